// The steps that multiply one row at a time: every projection of a decode step, with its norm, gate,
// activation and residual in the same kernel. A threadgroup stages the row's input in threadgroup memory,
// with its first loads of weights under way; a SIMD-group takes four outputs at a time. The grid is (blocks
// of outputs, rows of the batch); where a GPU holds fewer threadgroups than there are blocks, a threadgroup
// of gdn_in, attn_in and head takes several, and stages its input once.
#include "logits.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;
constant constexpr ushort kHalf = kAhead / 2;  // stretches of a lane where SIMD-groups share a row

// Four rows, and where their products go: the first `count` of them.
struct Block {
    Rows rows;
    device float* out;
    uint count;
    METAL_FUNC void write(thread const float* y, ushort lane) const {
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r)
            if (lane == r && r < count) out[r] = y[r];
    }
};

// The block-th four rows of several matrices on end, whose products go to row t of `out`. One loop serves all
// matrices: a kernel's code has to be fetched too.
template <ushort kCount>
METAL_FUNC Block block_of(thread const Weights* w, constant args::Matrix* shapes,
                          device float* const thread* out, uint t, uint block) {
    Weights weights = w[0];
    args::Matrix m = shapes[0];
    device float* to = out[0];
    uint first = 0, end = blocks_of(m.rows);
#pragma unroll
    for (ushort i = 1; i < kCount; ++i) {
        const uint blocks = blocks_of(shapes[i].rows);
        if (block >= end) {
            weights = w[i];
            m = shapes[i];
            to = out[i];
            first = end;
        }
        end += blocks;
    }
    const bool present = block < end;
    const uint row = present ? (block - first) * kRowsOfSimd : 0;
    const uint count = present ? min(uint(kRowsOfSimd), m.rows - row) : 0;
    return {rows_of(weights, m, row, count), to + t * m.rows + row, count};
}

constant constexpr uint kKept = 4 * kQuads;  // numbers that a thread keeps in slots at a time

// What a thread keeps: loaded before a matrix's rows, which many wait for.
struct GatedInput {
    float4 y[kQuads], z[kQuads], norm[kQuads];
};

METAL_FUNC GatedInput gated_input(device const float* y, device const float* z, device const float* norm,
                                  uint width, uint Dv, uint i) {
    GatedInput in = {};
    if (i >= width) return in;
#pragma unroll
    for (ushort q = 0; q < kQuads; ++q) {
        in.y[q] = *(device const float4*)(y + i + 4 * q);
        in.z[q] = *(device const float4*)(z + i + 4 * q);
        in.norm[q] = *(device const float4*)(norm + (i + 4 * q) % Dv);
    }
    return in;
}

// silu(z) norm(y), for write_vector: kept in slots without the heads' 1 / rms(y).
struct GatedNormed {
    threadgroup float* h;
    threadgroup const float* scales;  // 1 / rms(y) where a head's numbers begin, of every kKept-th number
    uint Dv;
    METAL_FUNC float4 operator()(uint i) const { return *slot(h, i) * scales[i / Dv * Dv / kKept]; }
};

// The four rows of a matrix from one on, as many of them as there are.
METAL_FUNC Rows rows_from(Weights w, args::Matrix m, uint row) {
    return rows_of(w, m, row, min(uint(kRowsOfSimd), m.rows - row));
}

// The rows of a threadgroup where few outputs have long rows: its SIMD-groups share them, each takes a part
// of the columns of four.
constant constexpr ushort kBlocks = args::kSharedBlocks;

METAL_FUNC Rows shared_rows(Weights w, args::Matrix m, uint group, ushort simd, ushort simds) {
    const ushort parts = simds / kBlocks;
    const uint row = (group * kBlocks + simd / parts) * kRowsOfSimd;
    return rows_of(w, m, row, row < m.rows ? min(uint(kRowsOfSimd), m.rows - row) : 0, simd % parts, parts);
}

METAL_FUNC void write_shared(thread const float* y, args::Matrix m, uint group, uint thread_index,
                             ushort simd, ushort simds, ushort lane, threadgroup float* sums,
                             device float* out, bool add) {
    leave(y, lane, sums + simd * kRowsOfSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const ushort parts = simds / kBlocks;
    const uint outputs = kBlocks * kRowsOfSimd, row = group * outputs + thread_index;
    if (thread_index >= outputs || row >= m.rows) return;
    const uint from = thread_index / kRowsOfSimd * parts * kRowsOfSimd + thread_index % kRowsOfSimd;
    float sum = 0;
    for (ushort part = 0; part < parts; ++part) sum += sums[from + part * kRowsOfSimd];
    out[row] = add ? out[row] + sum : sum;
}

}  // namespace

// gdn_in: h = norm(x); qkv, z, b, a = W h.
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_in(
                       constant args::NormProject& p       [[buffer(0)]],
                       device const float* x               [[buffer(1)]],   // (T, D)
                       device const float* norm            [[buffer(2)]],   // (D)
                       device const uchar* qkv_weight      [[buffer(3)]],   // (channels, D) as stored
                       device const uchar* qkv_scales      [[buffer(4)]],
                       device const uchar* qkv_biases      [[buffer(5)]],
                       device const uchar* z_weight        [[buffer(6)]],   // (Hv Dv, D)
                       device const uchar* z_scales        [[buffer(7)]],
                       device const uchar* z_biases        [[buffer(8)]],
                       device const uchar* b_weight        [[buffer(9)]],   // (Hv, D)
                       device const uchar* b_scales        [[buffer(10)]],
                       device const uchar* b_biases        [[buffer(11)]],
                       device const uchar* a_weight        [[buffer(12)]],  // (Hv, D)
                       device const uchar* a_scales        [[buffer(13)]],
                       device const uchar* a_biases        [[buffer(14)]],
                       device float* qkv                   [[buffer(15)]],  // (T, channels)
                       device float* z                     [[buffer(16)]],  // (T, Hv Dv)
                       device float* b                     [[buffer(17)]],  // (T, Hv)
                       device float* a                     [[buffer(18)]],  // (T, Hv)
                       threadgroup float* h                [[threadgroup(0)]],  // (D)
                       uint2 group                         [[threadgroup_position_in_grid]],
                       uint2 groups                        [[threadgroups_per_grid]],
                       uint thread_index                   [[thread_index_in_threadgroup]],
                       ushort simd                         [[simdgroup_index_in_threadgroup]],
                       ushort simds                        [[simdgroups_per_threadgroup]],
                       ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint t = group.y, D = p.matrix[0].columns;
    const Weights w[4] = {{qkv_weight, qkv_scales, qkv_biases},
                          {z_weight, z_scales, z_biases},
                          {b_weight, b_scales, b_biases},
                          {a_weight, a_scales, a_biases}};
    device float* const out[4] = {qkv, z, b, a};
    const NormInput in = norm_input(x + t * D, norm, D, p.normed, thread_index);
    uint at = group.x * simds + simd;
    Block block = block_of<4>(w, p.matrix, out, t, at);
    Ahead<kHalf> ahead = load<kHalf>(block.rows, lane);
    norm_row(in, x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, uint(simds) * kSimd, simd,
             simds, lane);
    while (block.count != 0) {
        at += groups.x * simds;
        const Block next = block_of<4>(w, p.matrix, out, t, at);
        float y[kRowsOfSimd];
        dots(block.rows, next.rows, ahead, h, lane, y);
        block.write(y, lane);
        block = next;
    }
}

// attn_in: h = norm(x); qg, k, v = W h.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_in(
                        constant args::NormProject& p       [[buffer(0)]],
                        device const float* x               [[buffer(1)]],  // (T, D)
                        device const float* norm            [[buffer(2)]],  // (D)
                        device const uchar* q_weight        [[buffer(3)]],  // (H 2 Dh, D) as stored
                        device const uchar* q_scales        [[buffer(4)]],
                        device const uchar* q_biases        [[buffer(5)]],
                        device const uchar* k_weight        [[buffer(6)]],  // (G Dh, D)
                        device const uchar* k_scales        [[buffer(7)]],
                        device const uchar* k_biases        [[buffer(8)]],
                        device const uchar* v_weight        [[buffer(9)]],  // (G Dh, D)
                        device const uchar* v_scales        [[buffer(10)]],
                        device const uchar* v_biases        [[buffer(11)]],
                        device float* qg                    [[buffer(12)]],  // (T, H 2 Dh)
                        device float* k                     [[buffer(13)]],  // (T, G Dh)
                        device float* v                     [[buffer(14)]],  // (T, G Dh)
                        threadgroup float* h                [[threadgroup(0)]],  // (D)
                        uint2 group                         [[threadgroup_position_in_grid]],
                        uint2 groups                        [[threadgroups_per_grid]],
                        uint thread_index                   [[thread_index_in_threadgroup]],
                        ushort simd                         [[simdgroup_index_in_threadgroup]],
                        ushort simds                        [[simdgroups_per_threadgroup]],
                        ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint t = group.y, D = p.matrix[0].columns;
    const Weights w[3] = {
        {q_weight, q_scales, q_biases}, {k_weight, k_scales, k_biases}, {v_weight, v_scales, v_biases}};
    device float* const out[3] = {qg, k, v};
    const NormInput in = norm_input(x + t * D, norm, D, p.normed, thread_index);
    uint at = group.x * simds + simd;
    Block block = block_of<3>(w, p.matrix, out, t, at);
    Ahead<kHalf> ahead = load<kHalf>(block.rows, lane);
    norm_row(in, x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, uint(simds) * kSimd, simd,
             simds, lane);
    while (block.count != 0) {
        at += groups.x * simds;
        const Block next = block_of<3>(w, p.matrix, out, t, at);
        float y[kRowsOfSimd];
        dots(block.rows, next.rows, ahead, h, lane, y);
        block.write(y, lane);
        block = next;
    }
}

// head: logits = W norm(x), and for sample the best key of every kLogitBlock, which a SIMD-group takes.
[[kernel, max_total_threads_per_threadgroup(256)]] void head(
                     constant args::NormProject& p       [[buffer(0)]],
                     device const float* x               [[buffer(1)]],  // (rows, D)
                     device const float* norm            [[buffer(2)]],  // (D)
                     device const uchar* weight          [[buffer(3)]],  // (V, D) as stored
                     device const uchar* scales          [[buffer(4)]],
                     device const uchar* biases          [[buffer(5)]],
                     device float* logits                [[buffer(6)]],  // (rows, V)
                     device uint* best                   [[buffer(7)]],  // (rows, V / 32)
                     threadgroup float* h                [[threadgroup(0)]],  // (D)
                     uint2 group                         [[threadgroup_position_in_grid]],
                     uint2 groups                        [[threadgroups_per_grid]],
                     uint thread_index                   [[thread_index_in_threadgroup]],
                     ushort simd                         [[simdgroup_index_in_threadgroup]],
                     ushort simds                        [[simdgroups_per_threadgroup]],
                     ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const args::Matrix m = p.matrix[0];
    const Weights w = {weight, scales, biases};
    const NormInput in = norm_input(x + group.y * m.columns, norm, m.columns, p.normed, thread_index);
    uint row = min((group.x * simds + simd) * args::kLogitBlock, m.rows);
    Rows rows = rows_from(w, m, row);
    Ahead<kHalf> ahead = load<kHalf>(rows, lane);
    norm_row(in, x + group.y * m.columns, norm, m.columns, p.epsilon, p.normed, h, partial, thread_index,
             uint(simds) * kSimd, simd, simds, lane);
    for (uint key = 0; row < m.rows;) {
        const uint block = row / args::kLogitBlock, end = min((block + 1) * args::kLogitBlock, m.rows);
        const uint last = min(row + kRowsOfSimd, end);
        const uint after = last < end ? last : min((block + groups.x * simds) * args::kLogitBlock, m.rows);
        const Rows next = rows_from(w, m, after);
        float y[kRowsOfSimd];
        dots(rows, next, ahead, h, lane, y);
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            if (lane != r || row + r >= last) continue;
            logits[group.y * m.rows + row + r] = y[r];
            key = max(key, key_of_finite(y[r]));
        }
        if (last == end && p.best) {
            key = simd_max(key);
            const uint blocks = (m.rows + args::kLogitBlock - 1) / args::kLogitBlock;
            if (lane == 0) best[group.y * blocks + block] = key;
            key = 0;
        }
        row = after;
        rows = next;
    }
}

// gdn_out: x += W (silu(z) norm(y)), the norm taken over each head.
[[kernel, max_total_threads_per_threadgroup(512)]] void gdn_out(
                        constant args::MixOut& p          [[buffer(0)]],
                        device const float* y             [[buffer(1)]],  // (T, y_stride), Hv Dv of them used
                        device const float* z             [[buffer(2)]],  // (T, Hv Dv)
                        device const float* norm          [[buffer(3)]],  // (Dv)
                        device const uchar* weight        [[buffer(4)]],  // (D, Hv Dv) as stored
                        device const uchar* scales        [[buffer(5)]],
                        device const uchar* biases        [[buffer(6)]],
                        device float* x                   [[buffer(7)]],  // (T, D)
                        threadgroup float* h              [[threadgroup(0)]],  // (Hv Dv)
                        threadgroup float* squares        [[threadgroup(1)]],  // (Hv Dv / 4): sums of them
                        uint2 group                       [[threadgroup_position_in_grid]],
                        uint thread_index                 [[thread_index_in_threadgroup]],
                        ushort simd                       [[simdgroup_index_in_threadgroup]],
                        ushort simds                      [[simdgroups_per_threadgroup]],
                        ushort lane                       [[thread_index_in_simdgroup]]) {
    threadgroup float sums[kMaxSimds * kRowsOfSimd];
    const uint t = group.y, width = p.out.columns, Dv = p.head_dim;
    const Rows rows = shared_rows(Weights{weight, scales, biases}, p.out, group.x, simd, simds);
    const uint threads = uint(simds) * kSimd;
    y += t * p.y_stride;
    z += t * width;
    GatedInput in = gated_input(y, z, norm, width, Dv, kKept * thread_index);
    Ahead<kAheadShared> ahead = load<kAheadShared>(rows, lane);
    for (uint i = kKept * thread_index; i < width;) {
        float sum = 0;
#pragma unroll
        for (ushort q = 0; q < kQuads; ++q) {
            const float4 z4 = in.z[q], opened = {silu(z4[0]), silu(z4[1]), silu(z4[2]), silu(z4[3])};
            sum += dot(in.y[q], in.y[q]);
            *slot(h, i + 4 * q) = opened * in.y[q] * in.norm[q];
        }
        squares[i / kKept] = sum;
        i += kKept * threads;
        in = gated_input(y, z, norm, width, Dv, i);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = Dv * thread_index; i < width; i += Dv * threads) {  // a thread a head
        float sum = 0;
        for (uint at = i; at < i + Dv; at += kKept) sum += squares[at / kKept];
        squares[i / kKept] = precise::rsqrt(sum / float(Dv) + p.epsilon);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    write_vector(h, width, thread_index, threads, GatedNormed{h, squares, Dv});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float out[kRowsOfSimd];
    dots(rows, ahead, h, lane, out);
    write_shared(out, p.out, group.x, thread_index, simd, simds, lane, sums, x + t * p.out.rows, true);
}

// attn_out: x += W y. And what is left of the other steps where what comes before a product is a dispatch of
// its own: y = W x.
[[kernel, max_total_threads_per_threadgroup(512)]] void matvec(
                       constant args::Matmul& p    [[buffer(0)]],
                       device const float* x       [[buffer(1)]],  // (T, x_stride), K of them used
                       device const uchar* weight  [[buffer(2)]],  // (N, K) as stored
                       device const uchar* scales  [[buffer(3)]],
                       device const uchar* biases  [[buffer(4)]],
                       device float* y             [[buffer(5)]],  // (T, N)
                       threadgroup float* h        [[threadgroup(0)]],  // (K)
                       uint2 group                 [[threadgroup_position_in_grid]],
                       uint thread_index           [[thread_index_in_threadgroup]],
                       ushort simd                 [[simdgroup_index_in_threadgroup]],
                       ushort simds                [[simdgroups_per_threadgroup]],
                       ushort lane                 [[thread_index_in_simdgroup]]) {
    threadgroup float sums[kMaxSimds * kRowsOfSimd];
    const uint t = group.y, N = p.matrix.rows, K = p.matrix.columns;
    const Rows rows = shared_rows(Weights{weight, scales, biases}, p.matrix, group.x, simd, simds);
    Ahead<kAheadShared> ahead = load<kAheadShared>(rows, lane);
    write_vector(h, K, thread_index, uint(simds) * kSimd, Copied{x + t * p.x_stride});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float out[kRowsOfSimd];
    dots(rows, ahead, h, lane, out);
    write_shared(out, p.matrix, group.x, thread_index, simd, simds, lane, sums, y + t * N, p.add);
}

// y = W_e x for each of a token's experts e. The grid is (blocks of outputs, T K).
[[kernel, max_total_threads_per_threadgroup(256)]] void matvec_experts(
                               constant args::MatvecExperts& p  [[buffer(0)]],
                               device const float* x            [[buffer(1)]],  // (T or T K, columns)
                               device const int* expert         [[buffer(2)]],  // (T, K)
                               device const uchar* weight       [[buffer(3)]],  // (E N, columns) as stored
                               device const uchar* scales       [[buffer(4)]],
                               device const uchar* biases       [[buffer(5)]],
                               device float* y                  [[buffer(6)]],  // (T K, N)
                               threadgroup float* h             [[threadgroup(0)]],  // (columns)
                               uint2 group                      [[threadgroup_position_in_grid]],
                               uint thread_index                [[thread_index_in_threadgroup]],
                               ushort simd                      [[simdgroup_index_in_threadgroup]],
                               ushort simds                     [[simdgroups_per_threadgroup]],
                               ushort lane                      [[thread_index_in_simdgroup]]) {
    const uint N = p.matrix.rows, columns = p.matrix.columns;
    const uint in = p.shared ? group.y / p.experts_per_token : group.y;
    const uint row = (group.x * simds + simd) * kRowsOfSimd;
    const uint count = row < N ? min(uint(kRowsOfSimd), N - row) : 0;
    const Block block = {
        rows_of(Weights{weight, scales, biases}, p.matrix, uint(expert[group.y]) * N + row, count),
        y + group.y * N + row, count};
    Ahead<kAhead> ahead = load<kAhead>(block.rows, lane);
    write_vector(h, columns, thread_index, uint(simds) * kSimd, Copied{x + in * columns});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float out[kRowsOfSimd];
    dots(block.rows, ahead, h, lane, out);
    block.write(out, lane);
}
