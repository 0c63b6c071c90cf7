// The sparse mixture of experts, one row at a time.
#include "choose.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;

// Two SIMD-groups make four outputs: one the products with Gate, its neighbour those with Up.
constant constexpr ushort kParts = 2;

// Rows of Down of one of a token's experts; the K-th is the shared one.
struct DownRows {
    Weights down, shared;
    args::Matrix m, shared_m;
    uint K, row, count;
    METAL_FUNC Rows of(uint k, uint expert) const {
        if (k < K) return rows_of(down, m, expert * m.rows + row, count);
        return rows_of(shared, shared_m, row, k == K ? count : 0);
    }
};

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
    const NormInput in = norm_input(x + t * D, norm, D, p.normed, thread_index);
    const Rows rows = rows_of(w, m, row, count, shares ? 0 : half_of, shares ? 1 : kParts);
    Ahead<kAhead> ahead = load<kAhead>(rows, lane);
    const float scale = norm_row(in, x + t * D, norm, D, p.epsilon, p.normed, h, partial, thread_index,
                                 threads, simd, simds, lane);
    if (group.x == 0 && !p.normed)
        for (uint i = thread_index; i < D; i += threads) h_out[t * D + i] = x[t * D + i] * scale * norm[i];
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
                       threadgroup Candidate* candidates   [[threadgroup(2)]],  // (E)
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
        if (simd == 0) choose(logits, candidates, E, K, lane, expert);
    }
    const uint chooses = p.chosen || simds == 1 ? 0 : kSimd;  // threads that do, while the others fetch h
    if (thread_index >= chooses)
        write_vector(h, D, thread_index - chooses, threads - chooses, Copied{h_in + t * D});
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
    if (group.x == 0 && thread_index < K && !p.chosen) {
        expert_out[t * K + thread_index] = int(expert[thread_index]);
        weight_out[t * K + thread_index] = share_of(logits, K, expert, thread_index);
    }
    float y[kRowsOfSimd];
    dots(rows, ahead, h, lane, y);
    leave(y, lane, sums + simd * kRowsOfSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (half_of != 0 || lane >= count) return;
    hidden[(t * K + k) * F + row + lane] =
        silu(sums[simd * kRowsOfSimd + lane]) * sums[(simd + 1) * kRowsOfSimd + lane];
}

// moe_down: x += sum over k of weight_k Down_k hidden_k + sigmoid(shared_gate) SharedDown shared. Three
// SIMD-groups share four outputs, each takes every third expert, the shared one as the last.
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
    constexpr ushort kShare = args::kMoeDownParts;
    threadgroup float partial[kMaxSimds * kRowsOfSimd], factors[kMaxChosen + 1];
    threadgroup uint experts[kMaxChosen];
    const uint D = p.down.rows, F = p.down.columns, Fs = p.shared_down.columns, K = p.experts_per_token;
    const uint t = group.y, outputs = simds / kShare * kRowsOfSimd, begin = group.x * outputs;
    const uint row = begin + simd / kShare * kRowsOfSimd;
    const uint count = row < D ? min(uint(kRowsOfSimd), D - row) : 0;
    const Weights down = {down_weight, down_scales, down_biases};
    const Weights shared_down = {shared_weight, shared_scales, shared_biases};
    // of one expert, the shared one as the last
    const DownRows all = {down, shared_down, p.down, p.shared_down, K, row, count};
    uint k = simd % kShare;
    Rows rows = all.of(k, k < K ? uint(expert[t * K + k]) : 0);
    Ahead<1> ahead = load<1>(rows, lane);  // an expert is narrow
    if (thread_index < K) experts[thread_index] = uint(expert[t * K + thread_index]);
    if (thread_index <= K)
        factors[thread_index] = thread_index < K ? weight[t * K + thread_index] : sigmoid(shared_gate[t]);
    for (uint e = simd; e <= K; e += simds)
        write_vector(h + e * args::vector_floats(F), e < K ? F : Fs, lane, kSimd,
                     Copied{e < K ? hidden + (t * K + e) * F : shared + t * Fs});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Shares shares;
    for (; k <= K; k += kShare) {
        const Rows next = all.of(k + kShare, experts[min(k + kShare, K - 1)]);
        add_shares(rows, next, ahead, h + k * args::vector_floats(F), lane,
                   factors[k], shares);
        rows = next;
    }
    float total[kRowsOfSimd];
    sums(shares, lane, total);
    leave(total, lane, partial + simd * kRowsOfSimd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index >= outputs || begin + thread_index >= D) return;
    const uint from = thread_index / kRowsOfSimd * kShare * kRowsOfSimd + thread_index % kRowsOfSimd;
    float sum = 0;
    for (ushort i = 0; i < kShare; ++i) sum += partial[from + i * kRowsOfSimd];
    x[t * D + begin + thread_index] += sum;
}

// gate = silu(gate) up, where the two products were dispatches of their own. A thread takes one number.
[[kernel]] void swiglu(constant uint& count    [[buffer(0)]],
                       device const float* up  [[buffer(1)]],  // (count)
                       device float* gate      [[buffer(2)]],  // (count)
                       uint i                  [[thread_position_in_grid]]) {
    if (i < count) gate[i] = silu(gate[i]) * up[i];
}
