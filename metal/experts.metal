// The sparse mixture of experts for a prompt's chunk: each token's experts are chosen, the assignments
// (token, expert) are sorted by expert, each expert's matrices meet all of its rows at once (grouped.metal),
// and what they give is added up. Nothing of it goes back to the CPU: the sort writes the list of tiles and
// the size of the grids that work them off.
//
// The sort is a counting sort in three dispatches, and stable: runs of kSortRun assignments are counted side
// by side; one threadgroup turns the counts into the first place of each expert in each run; and each
// assignment's place is that plus how many of its run's earlier assignments go to the same expert. No place
// depends on the order in which threads arrive.
#include "choose.h"
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr uint kSortRun = 256;  // threads of the sort's threadgroups

}  // namespace

// Chooses each token's experts, and rounds its row for products in tiles. A threadgroup takes a token.
[[kernel]] void moe_up_choose(constant args::MoeChoose& p [[buffer(0)]],
                              device const float* h       [[buffer(1)]],  // (T, D)
                              device const float* router  [[buffer(2)]],  // (T, E)
                              device int* expert_out      [[buffer(3)]],  // (T, K)
                              device float* weight_out    [[buffer(4)]],  // (T, K)
                              device bfloat* rounded      [[buffer(5)]],  // (T, D)
                              threadgroup float* logits   [[threadgroup(0)]],  // (E)
                              threadgroup Candidate* candidates [[threadgroup(1)]],  // (E)
                              uint t                      [[threadgroup_position_in_grid]],
                              ushort thread_index         [[thread_index_in_threadgroup]],
                              ushort simd                 [[simdgroup_index_in_threadgroup]],
                              ushort simds                [[simdgroups_per_threadgroup]],
                              ushort lane                 [[thread_index_in_simdgroup]]) {
    threadgroup uint expert[kMaxChosen];
    const uint D = p.width, E = p.experts, K = p.experts_per_token, threads = uint(simds) * kSimd;
    for (uint e = thread_index; e < E; e += threads) logits[e] = comparable(router[t * E + e]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simd == 0) choose(logits, candidates, E, K, lane, expert);
    for (uint i = thread_index; i < D; i += threads) rounded[t * D + i] = bfloat(h[t * D + i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = thread_index; k < K; k += threads) {
        expert_out[t * K + k] = int(expert[k]);
        weight_out[t * K + k] = share_of(logits, K, expert, k);
    }
}

// counts[run][e] = assignments of the run that go to expert e. A threadgroup takes a run, a thread an
// assignment.
[[kernel]] void moe_sort_count(constant args::MoeSort& p      [[buffer(0)]],
                               device const int* expert       [[buffer(1)]],  // (T K)
                               device uint* counts            [[buffer(2)]],  // (runs, E)
                               threadgroup atomic_uint* seen  [[threadgroup(0)]],  // (E)
                               uint run                       [[threadgroup_position_in_grid]],
                               ushort thread_index            [[thread_index_in_threadgroup]]) {
    for (uint e = thread_index; e < p.experts; e += kSortRun)
        atomic_store_explicit(seen + e, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint i = run * kSortRun + thread_index;
    if (i < p.assignments) atomic_fetch_add_explicit(seen + expert[i], 1, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = thread_index; e < p.experts; e += kSortRun)
        counts[run * p.experts + e] = atomic_load_explicit(seen + e, memory_order_relaxed);
}

// Turns counts into places, and lists the tiles. One threadgroup: a thread sums up an expert over the runs,
// one SIMD-group takes the prefix sums over the experts, 32 at a time, and then each expert's places in the
// runs follow from its first.
[[kernel]] void moe_sort_plan(constant args::MoeSort& p  [[buffer(0)]],
                              device uint* counts        [[buffer(1)]],  // (runs, E): counts, then places
                              device args::Tile* tiles   [[buffer(2)]],  // (tiles)
                              device uint* grids         [[buffer(3)]],  // (2, 3): of moe_up, of moe_down
                              threadgroup uint* first    [[threadgroup(0)]],  // (E)
                              ushort thread_index        [[thread_index_in_threadgroup]],
                              ushort simd                [[simdgroup_index_in_threadgroup]],
                              ushort lane                [[thread_index_in_simdgroup]]) {
    const uint E = p.experts;
    for (uint e = thread_index; e < E; e += kSortRun) {
        uint rows = 0;
        for (uint run = 0; run < p.runs; ++run) rows += counts[run * E + e];
        first[e] = rows;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (simd == 0) {
        uint rows_before = 0, tiles_before = 0;
        for (uint base = 0; base < E; base += kSimd) {
            const uint e = base + lane;
            const uint rows = e < E ? first[e] : 0;
            const uint needed = (rows + p.tile_rows - 1) / p.tile_rows;
            const uint place = rows_before + simd_prefix_exclusive_sum(rows);
            const uint tile = tiles_before + simd_prefix_exclusive_sum(needed);
            for (uint i = 0; i < needed; ++i) {
                const uint done = i * p.tile_rows;
                const args::Tile next = {e, place + done, min(p.tile_rows, rows - done)};
                tiles[tile + i] = next;
            }
            if (e < E) first[e] = place;
            rows_before += simd_sum(rows);
            tiles_before += simd_sum(needed);
        }
        if (lane == 0) {
            grids[0] = p.up_blocks;
            grids[3] = p.down_blocks;
            grids[1] = grids[4] = tiles_before;
            grids[2] = grids[5] = 1;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint e = thread_index; e < E; e += kSortRun) {
        uint place = first[e];
        for (uint run = 0; run < p.runs; ++run) {
            const uint rows = counts[run * E + e];
            counts[run * E + e] = place;
            place += rows;
        }
    }
}

// order[place] = assignment. A threadgroup takes a run, a thread an assignment.
[[kernel]] void moe_sort_place(constant args::MoeSort& p  [[buffer(0)]],
                               device const int* expert   [[buffer(1)]],  // (T K)
                               device const uint* places  [[buffer(2)]],  // (runs, E): of a run's first
                               device uint* order         [[buffer(3)]],  // (T K)
                               uint run                   [[threadgroup_position_in_grid]],
                               ushort thread_index        [[thread_index_in_threadgroup]]) {
    threadgroup int of_run[kSortRun];
    const uint i = run * kSortRun + thread_index;
    const int mine = i < p.assignments ? expert[i] : -1;
    of_run[thread_index] = mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (mine < 0) return;
    uint earlier = 0;
    for (ushort j = 0; j < thread_index; ++j) earlier += of_run[j] == mine;
    order[places[run * p.experts + uint(mine)] + earlier] = i;
}

// x += sum over k of weight_k part_k + sigmoid(shared_gate) shared. The experts are added best first,
// whatever order they were worked off in. A thread takes one number; the grid is (blocks of a row, rows).
template <class T>
[[kernel]] void moe_down_combine(constant args::MoeCombine& p     [[buffer(0)]],
                                 device const T* part             [[buffer(1)]],  // (T, K, D)
                                 device const float* weight       [[buffer(2)]],  // (T, K)
                                 device const float* shared       [[buffer(3)]],  // (T, D)
                                 device const float* shared_gate  [[buffer(4)]],  // (T)
                                 device float* x                  [[buffer(5)]],  // (T, D)
                                 uint2 group                      [[threadgroup_position_in_grid]],
                                 uint2 threads                    [[threads_per_threadgroup]],
                                 ushort thread_index              [[thread_index_in_threadgroup]]) {
    const uint t = group.y, D = p.width, K = p.experts_per_token, i = group.x * threads.x + thread_index;
    if (i >= D) return;
    float sum = 0;
    for (uint k = 0; k < K; ++k) sum = fma(weight[t * K + k], float(part[(t * K + k) * D + i]), sum);
    x[t * D + i] += fma(sigmoid(shared_gate[t]), shared[t * D + i], sum);
}

template [[host_name("moe_down_combine_bf16")]] [[kernel]] decltype(moe_down_combine<bfloat>)
    moe_down_combine<bfloat>;
template [[host_name("moe_down_combine_f32")]] [[kernel]] decltype(moe_down_combine<float>)
    moe_down_combine<float>;
