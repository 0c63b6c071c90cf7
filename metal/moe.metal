// The sparse mixture of experts, one row at a time.
#include "choose.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;

// Two SIMD-groups make four outputs: one the products with Gate, its neighbour those with Up.
constant constexpr ushort kParts = 2;

}  // namespace

// moe_route: h = norm(x); router logits, the shared expert's gate, and its hidden row after SwiGLU.
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_route(
                          constant args::MoeRoute& p        [[buffer(0)]],
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
    threadgroup float partial[kMaxSimds], sums[kMaxSimds * kRowsOfSimd];
    const uint t = group.y, D = p.router.columns, threads = uint(simds) * kSimd;
    const uint E = p.router.rows, Fs = p.shared_gate.rows;
    const uint routes = blocks_of(E);  // blocks of the router, then shared
    const uint blocks = routes + 1 + blocks_of(Fs);
    const ushort half_of = simd % kParts;
    const uint wanted = group.x * (simds / kParts) + simd / kParts, block = min(wanted, blocks - 1);
    const bool shares = block > routes;
    const uint row = (shares ? block - routes - 1 : block < routes ? block : 0) * kRowsOfSimd;
    Weights w = {router_weight, router_scales, router_biases};
    args::Matrix m = p.router;
    if (block == routes) {
        w = Weights{open_weight, open_scales, open_biases};
        m = p.shared_expert_gate;
    } else if (shares) {
        w = Weights{gate_weight, gate_scales, gate_biases};
        m = p.shared_gate;
        if (half_of != 0) {
            w = Weights{up_weight, up_scales, up_biases};
            m = p.shared_up;
        }
    }
    const uint count = wanted < blocks ? min(uint(kRowsOfSimd), m.rows - row) : 0;
    const Rows rows = rows_of(w, m, row, count, shares ? 0 : half_of, shares ? 1 : kParts);
    Ahead<kAhead> ahead = load<kAhead>(rows, lane);
    norm_row(x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index, threads, simd, simds, lane);
    if (group.x == 0 && !p.normed)
        for (uint i = thread_index; i < D; i += threads) h_out[t * D + i] = h[args::spread(i)];
    float y[kRowsOfSimd];
    dots(rows, ahead, h, lane, y);
    leave(y, lane, sums + simd * kRowsOfSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (half_of != 0 || lane >= count) return;
    const float first = sums[simd * kRowsOfSimd + lane], second = sums[(simd + 1) * kRowsOfSimd + lane];
    if (shares) {
        shared[t * Fs + row + lane] = silu(first) * second;
    } else if (block == routes) {
        shared_gate[t] = first + second;
    } else {
        router[t * E + row + lane] = first + second;
    }
}

// moe_up: chooses K experts, then hidden = silu(Gate h) (Up h) of each. Every threadgroup chooses for itself,
// which costs less than a stage of its own; the first one writes the choice down.
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_up(
                       constant args::MoeUp& p             [[buffer(0)]],
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
    threadgroup float sums[kMaxSimds * kRowsOfSimd];
    const uint t = group.y, D = p.gate.columns, F = p.gate.rows, E = p.experts, K = p.experts_per_token;
    const uint threads = uint(simds) * kSimd;
    if (p.chosen) {
        if (thread_index < K) expert[thread_index] = uint(expert_out[t * K + thread_index]);
    } else {
        for (uint e = thread_index; e < E; e += threads) logits[e] = comparable(router[t * E + e]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        choose(logits, E, K, simd, simds, lane, expert);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint blocks = blocks_of(F);  // of one expert
    const ushort half_of = simd % kParts;
    const uint wanted = group.x * (simds / kParts) + simd / kParts, block = min(wanted, K * blocks - 1);
    const uint k = block / blocks, row = block % blocks * kRowsOfSimd;
    const uint count = wanted < K * blocks ? min(uint(kRowsOfSimd), F - row) : 0;
    Weights w = {gate_weight, gate_scales, gate_biases};
    args::Matrix m = p.gate;
    if (half_of != 0) {
        w = Weights{up_weight, up_scales, up_biases};
        m = p.up;
    }
    const Rows rows = rows_of(w, m, expert[k] * F + row, count);
    Ahead<kAhead> ahead = load<kAhead>(rows, lane);
    for (uint i = thread_index; i < D; i += threads) h[args::spread(i)] = h_in[t * D + i];
    if (group.x == 0 && thread_index < K && !p.chosen) {
        expert_out[t * K + thread_index] = int(expert[thread_index]);
        weight_out[t * K + thread_index] = share_of(logits, K, expert, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float y[kRowsOfSimd];
    dots(rows, ahead, h, lane, y);
    leave(y, lane, sums + simd * kRowsOfSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (half_of != 0 || lane >= count) return;
    hidden[(t * K + k) * F + row + lane] =
        silu(sums[simd * kRowsOfSimd + lane]) * sums[(simd + 1) * kRowsOfSimd + lane];
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
    const uint t = group.y, row = group.x * kRowsOfSimd, count = min(uint(kRowsOfSimd), D - row);
    const Weights down = {down_weight, down_scales, down_biases};
    const Weights shared_down = {shared_weight, shared_scales, shared_biases};
    float total[kRowsOfSimd];
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) total[r] = 0;
    for (uint k = simd; k <= K; k += simds) {
        const bool own = k < K;
        device const float* from = own ? hidden + (t * K + k) * F : shared + t * Fs;
        const Rows rows = rows_of(own ? down : shared_down, own ? p.down : p.shared_down,
                                  own ? uint(expert[t * K + k]) * D + row : row, count);
        Ahead<1> ahead = load<1>(rows, lane);  // an expert is narrow
        threadgroup float* in = h + k * args::spread(F);
        for (uint i = lane; i < (own ? F : Fs); i += kSimd) in[args::spread(i)] = from[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        add_shares(rows, ahead, in, lane, own ? weight[t * K + k] : sigmoid(shared_gate[t]), total);
    }
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) total[r] = simd_sum(total[r]);
    leave(total, lane, sums[simd]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= count) return;
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
