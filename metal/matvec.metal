// The steps that multiply one row at a time: every projection of a decode step, with its norm, gate,
// activation and residual in the same kernel. A threadgroup stages the row's input in threadgroup memory; a
// SIMD-group takes four outputs at a time. The grid is (blocks of outputs, rows of the batch).
#include "logits.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;

// Writes, or adds, outputs of the block-th four rows of one matrix, of which `first` is row 0.
METAL_FUNC void write_rows(Weights w, args::Matrix m, uint first, uint block, threadgroup const float* h,
                           ushort lane, device float* out, bool add) {
    const uint row = block * kRowsOfSimd;
    if (row >= m.rows) return;
    const uint rows = min(uint(kRowsOfSimd), m.rows - row);
    float y[kRowsOfSimd];
    row_dots(w, m, first + row, rows, h, lane, y);
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r)
        if (lane == r && r < rows) out[row + r] = add ? out[row + r] + y[r] : y[r];
}

METAL_FUNC uint blocks_of(args::Matrix m) { return (m.rows + kRowsOfSimd - 1) / kRowsOfSimd; }

// Writes outputs of the block-th four rows of several matrices on end, row t of each. It finds the matrix
// first and then has one loop for all: a kernel's code has to be fetched too.
template <ushort kCount>
METAL_FUNC void write_one_of(thread const Weights* w, constant args::Matrix* shapes,
                             device float* const thread* out, uint t, uint block, threadgroup const float* h,
                             ushort lane) {
    Weights weights = w[0];
    args::Matrix m = shapes[0];
    device float* to = out[0];
    uint first = 0, end = blocks_of(m);
#pragma unroll
    for (ushort i = 1; i < kCount; ++i) {
        const uint blocks = blocks_of(shapes[i]);
        if (block >= end) {
            weights = w[i];
            m = shapes[i];
            to = out[i];
            first = end;
        }
        end += blocks;
    }
    if (block < end) write_rows(weights, m, 0, block - first, h, lane, to + t * m.rows, false);
}

}  // namespace

// gdn_in: h = norm(x); qkv, z, b, a = W h.
[[kernel]] void gdn_in(constant args::NormProject& p       [[buffer(0)]],
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
                       uint thread_index                   [[thread_index_in_threadgroup]],
                       ushort simd                         [[simdgroup_index_in_threadgroup]],
                       ushort simds                        [[simdgroups_per_threadgroup]],
                       ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint t = group.y, D = p.matrix[0].columns;
    norm_row(x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, uint(simds) * kSimd, simd,
             simds, lane);

    const uint block = group.x * simds + simd;
    const Weights w[4] = {{qkv_weight, qkv_scales, qkv_biases},
                          {z_weight, z_scales, z_biases},
                          {b_weight, b_scales, b_biases},
                          {a_weight, a_scales, a_biases}};
    device float* const out[4] = {qkv, z, b, a};
    write_one_of<4>(w, p.matrix, out, t, block, h, lane);
}

// attn_in: h = norm(x); qg, k, v = W h.
[[kernel]] void attn_in(constant args::NormProject& p       [[buffer(0)]],
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
                        uint thread_index                   [[thread_index_in_threadgroup]],
                        ushort simd                         [[simdgroup_index_in_threadgroup]],
                        ushort simds                        [[simdgroups_per_threadgroup]],
                        ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint t = group.y, D = p.matrix[0].columns;
    norm_row(x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, uint(simds) * kSimd, simd,
             simds, lane);

    const uint block = group.x * simds + simd;
    const Weights w[3] = {
        {q_weight, q_scales, q_biases}, {k_weight, k_scales, k_biases}, {v_weight, v_scales, v_biases}};
    device float* const out[3] = {qg, k, v};
    write_one_of<3>(w, p.matrix, out, t, block, h, lane);
}

// head: logits = W norm(x), and for sample the best key of each threadgroup's 32.
[[kernel]] void head(constant args::NormProject& p       [[buffer(0)]],
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
    threadgroup atomic_uint largest[1];
    const args::Matrix m = p.matrix[0];
    if (thread_index == 0) atomic_store_explicit(largest, 0, memory_order_relaxed);
    norm_row(x + group.y * m.columns, norm, m.columns, p.epsilon, p.normed, h, partial, thread_index,
             uint(simds) * kSimd, simd, simds, lane);
    const Weights w = {weight, scales, biases};
    const uint row = (group.x * simds + simd) * kRowsOfSimd;
    uint key = 0;
    if (row < m.rows) {
        const uint rows = min(uint(kRowsOfSimd), m.rows - row);
        float y[kRowsOfSimd];
        row_dots(w, m, row, rows, h, lane, y);
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            if (lane != r || r >= rows) continue;
            logits[group.y * m.rows + row + r] = y[r];
            key = key_of_finite(y[r]);
        }
    }
    if (!p.best) return;
    key = simd_max(key);
    if (lane == 0) atomic_fetch_max_explicit(largest, key, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0)
        best[group.y * groups.x + group.x] = atomic_load_explicit(largest, memory_order_relaxed);
}

// gdn_out: x += W (silu(z) norm(y)), the norm taken over each head.
[[kernel]] void gdn_out(constant args::MixOut& p          [[buffer(0)]],
                        device const float* y             [[buffer(1)]],  // (T, y_stride), Hv Dv of them used
                        device const float* z             [[buffer(2)]],  // (T, Hv Dv)
                        device const float* norm          [[buffer(3)]],  // (Dv)
                        device const uchar* weight        [[buffer(4)]],  // (D, Hv Dv) as stored
                        device const uchar* scales        [[buffer(5)]],
                        device const uchar* biases        [[buffer(6)]],
                        device float* x                   [[buffer(7)]],  // (T, D)
                        threadgroup float* h              [[threadgroup(0)]],  // (Hv Dv)
                        uint2 group                       [[threadgroup_position_in_grid]],
                        ushort simd                       [[simdgroup_index_in_threadgroup]],
                        ushort simds                      [[simdgroups_per_threadgroup]],
                        ushort lane                       [[thread_index_in_simdgroup]]) {
    const uint t = group.y, width = p.out.columns, Dv = p.head_dim;
    y += t * p.y_stride;
    z += t * width;
    for (uint head = simd * Dv; head < width; head += simds * Dv) {  // a SIMD-group takes a head
        float squares = 0;
        for (uint i = lane; i < Dv; i += kSimd) squares += y[head + i] * y[head + i];
        const float scale = precise::rsqrt(simd_sum(squares) / float(Dv) + p.epsilon);
        for (uint i = lane; i < Dv; i += kSimd)
            h[head + i] = silu(z[head + i]) * (y[head + i] * scale * norm[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const Weights w = {weight, scales, biases};
    write_rows(w, p.out, 0, group.x * simds + simd, h, lane, x + t * p.out.rows, true);
}

// attn_out: x += W y. And what is left of the other steps where what comes before a product is a dispatch of
// its own: y = W x.
[[kernel]] void matvec(constant args::Matmul& p    [[buffer(0)]],
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
    const uint t = group.y, N = p.matrix.rows, K = p.matrix.columns;
    for (uint i = thread_index; i < K; i += uint(simds) * kSimd) h[i] = x[t * p.x_stride + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Weights w = {weight, scales, biases};
    write_rows(w, p.matrix, 0, group.x * simds + simd, h, lane, y + t * N, p.add);
}

// y = W_e x for each of a token's experts e. The grid is (blocks of outputs, T K).
[[kernel]] void matvec_experts(constant args::MatvecExperts& p  [[buffer(0)]],
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
    const uint row = p.shared ? group.y / p.experts_per_token : group.y;
    for (uint i = thread_index; i < columns; i += uint(simds) * kSimd) h[i] = x[row * columns + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Weights w = {weight, scales, biases};
    const uint first = uint(expert[group.y]) * N;
    write_rows(w, p.matrix, first, group.x * simds + simd, h, lane, y + group.y * N, false);
}
