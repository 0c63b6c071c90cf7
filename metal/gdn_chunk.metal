// Gated DeltaNet over many tokens in chunks of 64, as matrix products (the WY form). Chunks lie on the
// position grid; rows of a chunk that are no token's hold zeros (gdn_mix_prepare), which change nothing.
//
// In a chunk, with G the running sum of log decays and S the state before it, the rule of gdn.metal
// unrolls to
//   D = M (V - e^G K S^T)
//   Y = e^G Q S^T + P D
//   S = e^G[63] S + (e^(G[63] - G) D)^T K
// where e^G scales rows, and
//   M = (I + A)^-1 diag(beta),  A[i][j] = beta[i] e^(G[i] - G[j]) k[i] . k[j] for j < i
//   P[i][j] = e^(G[i] - G[j]) q[i] . k[j] for j <= i.
// gdn_mix_solve makes M and P, which do not depend on S, of all chunks at once; gdn_mix_chunks walks the
// chunks. Everything is float32, fragments included, so a chunk's result differs from the token's by
// rounding alone: that of sums, and 2^-24 of G in what a decay is the power of.
// Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024.
#include "fragment.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kChunk = 64;
constant constexpr ushort kTiles = kChunk / kTile;
constant constexpr ushort kSimds = 4;            // SIMD-groups of a threadgroup
constant constexpr ushort kStride = kChunk + 4;  // of a matrix in threadgroup memory: off equal banks
constant constexpr ushort kLowerTiles = kTiles * (kTiles + 1) / 2;

// c += a b, of one tile each.
METAL_FUNC void multiply_add(thread Fragment<float>& c, threadgroup const float* a, uint a_stride,
                             threadgroup const float* b, uint b_stride) {
    Fragment<float> left, right;
    simdgroup_load(left, a, a_stride);
    simdgroup_load(right, b, b_stride);
    simdgroup_multiply_accumulate(c, left, right, c);
}

// Turns the unit lower triangular X (64 x 64), upper tiles zero, into its inverse. The diagonal tiles are
// solved column by column, a thread a column; then pairs of inverted blocks X1, X2 with B below the first
// one and beside the second join to one of twice the size, whose lower left part is -X2 B X1, until one
// block is left. spare: kChunk / 2 * kChunk / 2 floats.
METAL_FUNC void invert(threadgroup float* X, threadgroup float* spare, ushort thread_index, ushort simd) {
    const ushort block = thread_index / kTile * kTile, column = thread_index % kTile;
    float x[kTile];
    if (block < kChunk) {
        for (ushort i = 0; i < kTile; ++i) {
            x[i] = i == column ? 1.0f : 0.0f;
            for (ushort j = 0; j < i; ++j) x[i] = fma(-X[(block + i) * kStride + block + j], x[j], x[i]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (block < kChunk)
        for (ushort i = 0; i < kTile; ++i) X[(block + i) * kStride + block + column] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const Fragment<float> minus(-1.0f);
    for (ushort n = 1; n < kTiles; n *= 2) {  // tiles of a block's side
        const ushort size = n * kTile, products = kTiles / 2 * n;
        for (ushort at = simd; at < products; at += kSimds) {  // spare = B X1
            const ushort pair = at / (n * n), i = at / n % n, j = at % n, corner = pair * 2 * size;
            threadgroup const float* B = X + (corner + size + i * kTile) * kStride + corner;
            Fragment<float> sum = zeros();
            for (ushort k = j; k < n; ++k)
                multiply_add(sum, B + k * kTile, kStride,
                             X + (corner + k * kTile) * kStride + corner + j * kTile, kStride);
            simdgroup_store(sum, spare + (pair * size + i * kTile) * size + j * kTile, size);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (ushort at = simd; at < products; at += kSimds) {  // -X2 spare
            const ushort pair = at / (n * n), i = at / n % n, j = at % n, corner = pair * 2 * size;
            threadgroup float* out = X + (corner + size + i * kTile) * kStride + corner;
            Fragment<float> sum = zeros();
            for (ushort k = 0; k <= i; ++k)
                multiply_add(sum, out + size + k * kTile, kStride,
                             spare + (pair * size + k * kTile) * size + j * kTile, size);
            Fragment<float> negated;
            simdgroup_multiply(negated, minus, sum);
            simdgroup_store(negated, out + j * kTile, kStride);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

}  // namespace

// What a chunk needs of its own tokens: M, P, and for each tile of eight rows three diagonal matrices that
// scale them by -e^G, e^G and e^(G[63] - G). A threadgroup takes one chunk of one value head. SIMD-groups
// take the lower tiles of k . k and q . k in turn, and scale them through a square of their own; 18 KB of
// threadgroup memory hold I + A and then its inverse. Upper tiles of M and P are never read, nor written.
// The grid is (chunks, value heads).
[[kernel]] void gdn_mix_solve(constant args::GdnMix& p      [[buffer(0)]],
                              device const float* prepared  [[buffer(1)]],  // (rows, channels)
                              device const float2* gates    [[buffer(2)]],  // (rows, Hv)
                              device float* M               [[buffer(3)]],  // (chunks, Hv, 64, 64)
                              device float* P               [[buffer(4)]],  // (chunks, Hv, 64, 64)
                              device float* scales          [[buffer(5)]],  // (chunks, Hv, 3, 8, 8, 8)
                              uint2 group                   [[threadgroup_position_in_grid]],
                              ushort thread_index           [[thread_index_in_threadgroup]],
                              ushort simd                   [[simdgroup_index_in_threadgroup]],
                              ushort lane                   [[thread_index_in_simdgroup]]) {
    threadgroup float X[kChunk * kStride], spare[kChunk / 2 * kChunk / 2], G[kChunk], beta[kChunk];
    const uint Dk = p.key_dim, channels = 2 * p.key_heads * Dk + p.value_heads * p.value_dim;
    const uint chunk = group.x, head = group.y, key_head = head / (p.value_heads / p.key_heads);
    const uint number = chunk * p.value_heads + head;
    device const float* q = prepared + chunk * kChunk * channels + key_head * Dk;
    device const float* k = q + p.key_heads * Dk;

    if (simd == 0) {
        float before = 0;
        for (ushort i = lane; i < kChunk; i += kSimd) {
            const float2 gate = gates[(chunk * kChunk + i) * p.value_heads + head];
            const float sum = before + simd_prefix_inclusive_sum(gate.x);
            before = simd_broadcast(sum, kSimd - 1);
            G[i] = sum;
            beta[i] = gate.y;
        }
    }
    for (ushort i = thread_index; i < kChunk * kStride; i += kSimds * kSimd) X[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (ushort i = thread_index; i < kTiles * kSquare; i += kSimds * kSimd) {
        const ushort row = i / kTile, column = i % kTile;
        const bool diagonal = row % kTile == column;
        const float decay = diagonal ? precise::exp(G[row]) : 0.0f;
        device float* out = scales + number * 3 * kTiles * kSquare + i;
        out[0] = -decay;
        out[kTiles * kSquare] = decay;
        out[2 * kTiles * kSquare] = diagonal ? precise::exp(G[kChunk - 1] - G[row]) : 0.0f;
    }

    threadgroup float* square = spare + simd * 2 * kSquare;             // of k . k, then of q . k
    // Tile row i starts with tile `first`.
    for (ushort at = simd, i = 0, first = 0; at < kLowerTiles; at += kSimds) {
        while (at > first + i) first += ++i;
        const ushort j = at - first;
        Fragment<float> kk = zeros(), qk = zeros(), left, right;
        for (uint d = 0; d < Dk; d += kTile) {
            simdgroup_load(right, k + j * kTile * channels + d, channels, ulong2(0, 0), true);
            simdgroup_load(left, k + i * kTile * channels + d, channels);
            simdgroup_multiply_accumulate(kk, left, right, kk);
            simdgroup_load(left, q + i * kTile * channels + d, channels);
            simdgroup_multiply_accumulate(qk, left, right, qk);
        }
        simdgroup_store(kk, square, kTile);
        simdgroup_store(qk, square + kSquare, kTile);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (ushort e = lane; e < kSquare; e += kSimd) {
            const ushort row = i * kTile + e / kTile, column = j * kTile + e % kTile;
            const float decay = column <= row ? precise::exp(G[row] - G[column]) : 0.0f;
            P[number * kChunk * kChunk + row * kChunk + column] = decay * square[kSquare + e];
            X[row * kStride + column] = row == column ? 1.0f : beta[row] * decay * square[e];
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    invert(X, spare, thread_index, simd);
    for (ushort at = thread_index; at < kChunk * kChunk; at += kSimds * kSimd) {
        const ushort row = at / kChunk, column = at % kChunk;
        if (column / kTile <= row / kTile)
            M[number * kChunk * kChunk + at] = X[row * kStride + column] * beta[column];
    }
}

// The walk over the chunks. A SIMD-group takes eight rows of one head's S, transposed, kKeyTiles fragments
// in registers from the first chunk to the last: S is read once and written once, and nothing passes
// between SIMD-groups. What they multiply it by, q, k, M, P and the scales, each reads for itself; the
// four of a threadgroup are of one head, and find it in the cache. Rows that are no token's are left out
// of y by way of threadgroup memory. The grid is (blocks of 32 rows of S, value heads).
template <ushort kKeyTiles>
[[kernel]] void gdn_mix_chunks(constant args::GdnMix& p                [[buffer(0)]],
                               device const float* prepared            [[buffer(1)]],  // (rows, channels)
                               device const float* M                   [[buffer(2)]],  // (chunks, Hv, 64, 64)
                               device const float* P                   [[buffer(3)]],  // (chunks, Hv, 64, 64)
                               // (chunks, Hv, 3, 8, 8, 8)
                               device const float* scales              [[buffer(4)]],
                               device const args::Sequence* sequences  [[buffer(5)]],  // (1)
                               device float* y                         [[buffer(6)]],  // (T, y_stride)
                               uint2 group                             [[threadgroup_position_in_grid]],
                               ushort simd                             [[simdgroup_index_in_threadgroup]],
                               ushort lane                             [[thread_index_in_simdgroup]]) {
    threadgroup float squares[kSimds * kSquare];
    threadgroup float* square = squares + simd * kSquare;
    constexpr ushort Dk = kKeyTiles * kTile;
    const uint Dv = p.value_dim, Hv = p.value_heads, channels = 2 * p.key_heads * Dk + Hv * Dv;
    const uint head = group.y, value = (group.x * kSimds + simd) * kTile;  // of the head: the first row of S
    if (value >= Dv) return;
    const uint key_head = head / (Hv / p.key_heads), tokens = sequences[0].tokens;
    const uint at = (p.taps - 1) * channels + (head * Dv + value) * Dk;  // in a layer's states
    device const float* S_in = sequences[0].now + p.layer * p.state + at;
    device float* S_out = sequences[0].next + p.layer * p.state + at;

    Fragment<float> S[kKeyTiles], D[kTiles], left, right;
#pragma unroll
    for (ushort d = 0; d < kKeyTiles; ++d) simdgroup_load(S[d], S_in + d * kTile, Dk, ulong2(0, 0), true);

    for (uint row = 0; row < p.lead + tokens; row += kChunk) {  // the first row of a chunk
        device const float* q = prepared + row * channels + key_head * Dk;
        device const float* k = q + p.key_heads * Dk;
        device const float* v = prepared + row * channels + 2 * p.key_heads * Dk + head * Dv + value;
        const uint number = row / kChunk * Hv + head;
        device const float* m = M + number * kChunk * kChunk;
        device const float* mixed = P + number * kChunk * kChunk;
        device const float* scale = scales + number * 3 * kTiles * kSquare;

        for (ushort i = 0; i < kTiles; ++i) {  // D = V - e^G K S^T
            Fragment<float> sum = zeros();
#pragma unroll
            for (ushort d = 0; d < kKeyTiles; ++d) {
                simdgroup_load(left, k + i * kTile * channels + d * kTile, channels);
                simdgroup_multiply_accumulate(sum, left, S[d], sum);
            }
            simdgroup_load(left, scale + i * kSquare, kTile);
            simdgroup_load(right, v + i * kTile * channels, channels);
            simdgroup_multiply_accumulate(D[i], left, sum, right);
        }
        for (ushort n = 0; n < kTiles; ++n) {  // D = M D, from the last tile up: those above are still needed
            const ushort i = kTiles - 1 - n;
            Fragment<float> sum = zeros();
            for (ushort j = 0; j <= i; ++j) {
                simdgroup_load(left, m + i * kTile * kChunk + j * kTile, kChunk);
                simdgroup_multiply_accumulate(sum, left, D[j], sum);
            }
            D[i] = sum;
        }
        for (ushort i = 0; i < kTiles; ++i) {  // Y = e^G Q S^T + P D
            Fragment<float> sum = zeros(), scaled;
#pragma unroll
            for (ushort d = 0; d < kKeyTiles; ++d) {
                simdgroup_load(left, q + i * kTile * channels + d * kTile, channels);
                simdgroup_multiply_accumulate(sum, left, S[d], sum);
            }
            simdgroup_load(left, scale + (kTiles + i) * kSquare, kTile);
            simdgroup_multiply(scaled, left, sum);
            for (ushort j = 0; j <= i; ++j) {
                simdgroup_load(left, mixed + i * kTile * kChunk + j * kTile, kChunk);
                simdgroup_multiply_accumulate(scaled, left, D[j], scaled);
            }
            simdgroup_store(scaled, square, kTile);
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (ushort e = lane; e < kSquare; e += kSimd) {
                const uint t = row + i * kTile + e / kTile - p.lead;  // wraps before the first token
                if (t < tokens) y[t * p.y_stride + head * Dv + value + e % kTile] = square[e];
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (ushort i = 0; i < kTiles; ++i) {  // D = e^(G[63] - G) D
            simdgroup_load(left, scale + (2 * kTiles + i) * kSquare, kTile);
            right = D[i];
            simdgroup_multiply(D[i], left, right);
        }
        const Fragment<float> decay(scale[2 * kTiles * kSquare - 1]);  // e^G[63], the last of its diagonal
#pragma unroll
        for (ushort d = 0; d < kKeyTiles; ++d) {                       // S^T = e^G[63] S^T + K^T D
            right = S[d];
            simdgroup_multiply(S[d], decay, right);
            for (ushort i = 0; i < kTiles; ++i) {
                simdgroup_load(left, k + i * kTile * channels + d * kTile, channels, ulong2(0, 0), true);
                simdgroup_multiply_accumulate(S[d], left, D[i], S[d]);
            }
        }
    }
#pragma unroll
    for (ushort d = 0; d < kKeyTiles; ++d) simdgroup_store(S[d], S_out + d * kTile, Dk, ulong2(0, 0), true);
}

#define instantiate_gdn_mix_chunks(tiles)                        \
    template [[host_name("gdn_mix_chunks_" #tiles)]] [[kernel]] \
    decltype(gdn_mix_chunks<tiles>) gdn_mix_chunks<tiles>;
instantiate_gdn_mix_chunks(4)
instantiate_gdn_mix_chunks(8)
instantiate_gdn_mix_chunks(16)
