// The sparse mixture of experts, one row at a time.
#include "choose.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;

// out[row + r] = silu(Gate[row + r] . h) (Up[row + r] . h) for up to four rows; `first` offsets the rows in
// the matrices.
METAL_FUNC void write_swiglu(Weights gate, args::Matrix gate_shape, Weights up, args::Matrix up_shape,
                             uint first, uint row, uint rows, threadgroup const float* h, ushort lane,
                             device float* out) {
    float sums[2][kRowsOfSimd] = {};
    // One loop, not two calls: a kernel's code has to be fetched too.
#pragma unroll 1
    for (ushort i = 0; i < 2; ++i) {
        float y[kRowsOfSimd];
        row_dots(i ? up : gate, i ? up_shape : gate_shape, first + row, rows, h, lane, y);
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            sums[0][r] = i ? sums[0][r] : y[r];
            sums[1][r] = y[r];
        }
    }
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r)
        if (lane == r && r < rows) out[row + r] = silu(sums[0][r]) * sums[1][r];
}

}  // namespace

// moe_route: h = norm(x); router logits, the shared expert's gate, and its hidden row after SwiGLU.
[[kernel]] void moe_route(constant args::MoeRoute& p        [[buffer(0)]],
                          device const float* x             [[buffer(1)]],   // (T, D)
                          device const float* norm          [[buffer(2)]],   // (D)
                          device const uchar* router_weight [[buffer(3)]],   // (E, D) as stored
                          device const uchar* router_scales [[buffer(4)]],
                          device const uchar* router_biases [[buffer(5)]],
                          device const uchar* open_weight   [[buffer(6)]],   // (1, D): shared expert's gate
                          device const uchar* open_scales   [[buffer(7)]],
                          device const uchar* open_biases   [[buffer(8)]],
                          device const uchar* gate_weight   [[buffer(9)]],   // (Fs, D)
                          device const uchar* gate_scales   [[buffer(10)]],
                          device const uchar* gate_biases   [[buffer(11)]],
                          device const uchar* up_weight     [[buffer(12)]], // (Fs, D)
                          device const uchar* up_scales     [[buffer(13)]],
                          device const uchar* up_biases     [[buffer(14)]],
                          device float* h_out               [[buffer(15)]], // (T, D)
                          device float* router              [[buffer(16)]], // (T, E)
                          device float* shared_gate         [[buffer(17)]], // (T)
                          device float* shared              [[buffer(18)]], // (T, Fs)
                          threadgroup float* h              [[threadgroup(0)]], // (D)
                          uint2 group                       [[threadgroup_position_in_grid]],
                          uint thread_index                 [[thread_index_in_threadgroup]],
                          ushort simd                       [[simdgroup_index_in_threadgroup]],
                          ushort simds                      [[simdgroups_per_threadgroup]],
                          ushort lane                       [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint t = group.y, D = p.router.columns, threads = uint(simds) * kSimd;
    norm_row(x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, threads, simd, simds, lane);
    if (group.x == 0 && !p.normed)
        for (uint i = thread_index; i < D; i += threads) h_out[t * D + i] = h[i];

    const uint E = p.router.rows, Fs = p.shared_gate.rows;
    const uint router_blocks = (E + kRowsOfSimd - 1) / kRowsOfSimd;
    const uint block = group.x * simds + simd;
    if (block <= router_blocks) {  // the last of these is the shared expert's gate
        const bool open = block == router_blocks;
        const uint row = open ? 0 : block * kRowsOfSimd, rows = open ? 1 : min(uint(kRowsOfSimd), E - row);
        const Weights routed = {router_weight, router_scales, router_biases},
                      opened = {open_weight, open_scales, open_biases};
        float y[kRowsOfSimd];
        row_dots(open ? opened : routed, open ? p.shared_expert_gate : p.router, row, rows, h, lane, y);
        device float* out = open ? shared_gate + t : router + t * E + row;
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r)
            if (lane == r && r < rows) out[r] = y[r];
    } else {
        const uint row = (block - router_blocks - 1) * kRowsOfSimd;
        if (row >= Fs) return;
        const Weights gate = {gate_weight, gate_scales, gate_biases}, up = {up_weight, up_scales, up_biases};
        write_swiglu(gate, p.shared_gate, up, p.shared_up, 0, row, min(uint(kRowsOfSimd), Fs - row), h, lane,
                     shared + t * Fs);
    }
}

// moe_up: chooses K experts, then hidden = silu(Gate h) (Up h) of each. Every threadgroup chooses for itself,
// which costs less than a stage of its own; the first one writes the choice down.
[[kernel]] void moe_up(constant args::MoeUp& p             [[buffer(0)]],
                       device const float* h_in            [[buffer(1)]],  // (T, D)
                       device const float* router          [[buffer(2)]],  // (T, E)
                       device const uchar* gate_weight     [[buffer(3)]],  // (E F, D) as stored
                       device const uchar* gate_scales     [[buffer(4)]],
                       device const uchar* gate_biases     [[buffer(5)]],
                       device const uchar* up_weight       [[buffer(6)]],  // (E F, D)
                       device const uchar* up_scales       [[buffer(7)]],
                       device const uchar* up_biases       [[buffer(8)]],
                       device int* expert_out              [[buffer(9)]],   // (T, K)
                       device float* weight_out            [[buffer(10)]],  // (T, K)
                       device float* hidden                [[buffer(11)]],  // (T, K, F)
                       threadgroup float* h                [[threadgroup(0)]],  // (D)
                       threadgroup float* logits           [[threadgroup(1)]],  // (E)
                       uint2 group                         [[threadgroup_position_in_grid]],
                       uint thread_index                   [[thread_index_in_threadgroup]],
                       ushort simd                         [[simdgroup_index_in_threadgroup]],
                       ushort simds                        [[simdgroups_per_threadgroup]],
                       ushort lane                         [[thread_index_in_simdgroup]]) {
    threadgroup uint expert[kMaxChosen];
    threadgroup float weight[kMaxChosen];
    const uint t = group.y, D = p.gate.columns, F = p.gate.rows, E = p.experts, K = p.experts_per_token;
    const uint threads = uint(simds) * kSimd;
    for (uint i = thread_index; i < D; i += threads) h[i] = h_in[t * D + i];
    if (p.chosen) {
        if (thread_index < K) expert[thread_index] = uint(expert_out[t * K + thread_index]);
    } else {
        for (uint e = thread_index; e < E; e += threads) logits[e] = router[t * E + e];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == 0) choose(logits, E, K, lane, expert, weight);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (group.x == 0 && thread_index < K && !p.chosen) {
        expert_out[t * K + thread_index] = int(expert[thread_index]);
        weight_out[t * K + thread_index] = weight[thread_index];
    }

    const uint blocks = (F + kRowsOfSimd - 1) / kRowsOfSimd;  // of one expert
    const uint block = group.x * simds + simd;
    const uint k = block / blocks;
    if (k >= K) return;
    const uint row = block % blocks * kRowsOfSimd;
    const Weights gate = {gate_weight, gate_scales, gate_biases}, up = {up_weight, up_scales, up_biases};
    write_swiglu(gate, p.gate, up, p.up, expert[k] * F, row, min(uint(kRowsOfSimd), F - row), h, lane,
                 hidden + (t * K + k) * F);
}

// moe_down: x += sum over k of weight_k Down_k hidden_k + sigmoid(shared_gate) SharedDown shared. A
// threadgroup takes four outputs, and its SIMD-groups an expert each, the shared one as the last, so that
// their loads are under way side by side. Their shares are added up in that order.
[[kernel]] void moe_down(constant args::MoeDown& p          [[buffer(0)]],
                         device const int* expert           [[buffer(1)]],  // (T, K)
                         device const float* weight         [[buffer(2)]],  // (T, K)
                         device const float* hidden         [[buffer(3)]],  // (T, K, F)
                         device const float* shared_gate    [[buffer(4)]],  // (T)
                         device const float* shared         [[buffer(5)]],  // (T, Fs)
                         device const uchar* down_weight    [[buffer(6)]],  // (E D, F) as stored
                         device const uchar* down_scales    [[buffer(7)]],
                         device const uchar* down_biases    [[buffer(8)]],
                         device const uchar* shared_weight  [[buffer(9)]],  // (D, Fs)
                         device const uchar* shared_scales  [[buffer(10)]],
                         device const uchar* shared_biases  [[buffer(11)]],
                         device float* x                    [[buffer(12)]],  // (T, D)
                         threadgroup float* h               [[threadgroup(0)]],  // (K F + Fs)
                         uint2 group                        [[threadgroup_position_in_grid]],
                         uint thread_index                  [[thread_index_in_threadgroup]],
                         ushort simd                        [[simdgroup_index_in_threadgroup]],
                         ushort simds                       [[simdgroups_per_threadgroup]],
                         ushort lane                        [[thread_index_in_simdgroup]]) {
    threadgroup float sums[kMaxSimds][kRowsOfSimd];
    const uint D = p.down.rows, F = p.down.columns, Fs = p.shared_down.columns, K = p.experts_per_token;
    const uint t = group.y, row = group.x * kRowsOfSimd, rows = min(uint(kRowsOfSimd), D - row);
    const Weights down = {down_weight, down_scales, down_biases};
    const Weights shared_down = {shared_weight, shared_scales, shared_biases};
    float total[kRowsOfSimd];
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) total[r] = 0;
    for (uint k = simd; k <= K; k += simds) {
        const bool own = k < K;
        device const float* from = own ? hidden + (t * K + k) * F : shared + t * Fs;
        for (uint i = lane; i < (own ? F : Fs); i += kSimd) h[k * F + i] = from[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        row_shares(own ? down : shared_down, own ? p.down : p.shared_down,
                   own ? uint(expert[t * K + k]) * D + row : row, rows, h + k * F, lane,
                   own ? weight[t * K + k] : sigmoid(shared_gate[t]), total);
    }
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) {
        const float sum = simd_sum(total[r]);
        if (lane == r) sums[simd][r] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= rows) return;
    float sum = 0;
    for (ushort i = 0; i < simds; ++i) sum += sums[i][thread_index];
    x[t * D + row + thread_index] += sum;
}

// gate = silu(gate) up, where the two products were dispatches of their own. A thread takes one number.
[[kernel]] void swiglu(constant uint& count    [[buffer(0)]],
                       device const float* up  [[buffer(1)]],  // (count)
                       device float* gate      [[buffer(2)]],  // (count)
                       uint i                  [[thread_position_in_grid]]) {
    if (i < count) gate[i] = silu(gate[i]) * up[i];
}
