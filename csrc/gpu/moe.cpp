// GpuOps: the mixture of experts. A few rows go through it one at a time; a prompt's are sorted by expert.
#include <algorithm>
#include <numeric>
#include <utility>

#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

namespace {

constexpr uint32_t kMoeDownOutputs = 4;  // of a threadgroup of moe_down, times four: 384 threads
constexpr int64_t kSortRun = 256;  // assignments that a threadgroup of the sort takes: metal/experts.metal

}  // namespace

// Memory for the sort of a pass's assignments, and for what the experts give before it is added up.
void GpuOps::allocate_experts() {
    const int64_t assignments = int64_t{rows_} * c_.experts_per_token;
    uint32_t tiles = 0;
    for (int T = 1; T <= rows_; ++T) tiles = std::max(tiles, most_tiles(static_cast<uint32_t>(T)));
    static_assert(sizeof(args::Tile) % sizeof(float) == 0);
    order_ = reinterpret_cast<uint32_t*>(scratch(assignments));
    counts_ = reinterpret_cast<uint32_t*>(scratch(ceil_div(assignments, kSortRun) * int64_t{c_.experts}));
    tiles_ = reinterpret_cast<args::Tile*>(
        scratch(int64_t{tiles} * static_cast<int64_t>(sizeof(args::Tile) / sizeof(float))));
    grids_ = reinterpret_cast<uint32_t*>(scratch(6));
    part_ = scratch(options_.fused_moe ? (assignments * c_.hidden + 1) / 2 : assignments * c_.hidden);
    if (!options_.fused_moe) up_ = scratch(rows_ * int64_t{std::max(c_.hidden_width(), c_.shared_width)});
    shared_out_ = scratch(int64_t{rows_} * c_.hidden);
}

void GpuOps::moe_route(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("moe_route");
    const MoeWeights& w = here(layer).moe;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    const args::MoeRoute p{matrix(w.router),    matrix(w.shared_expert_gate),        matrix(w.shared_gate),
                           matrix(w.shared_up), static_cast<float>(c_.norm_epsilon), !options_.fused_norm};
    if (tiled(batch)) return moe_route_tiles(layer, p, T);
    if (!options_.fused_moe) return moe_route_steps(layer, T);
    const float* x = normed(here(layer).post_norm, a_.x.as<float>(), T, a_.h.as<float>());
    const uint32_t blocks = blocks_of(p.router) + 1 + blocks_of(p.shared_gate);
    run(recorder_,
        {.kernel = "moe_route", .groups = {groups_for(2 * blocks), T, 1}, .threadgroup = {vector_bytes(D)}},
        p,
        Buffers()
            .read(x, bytes_of_rows(a_.x, T))
            .norm(here(layer).post_norm, p.normed)
            .weights(w.router)
            .weights(w.shared_expert_gate)
            .weights(w.shared_gate)
            .weights(w.shared_up)
            .write(a_.h.data, p.normed ? 0 : bytes_of_rows(a_.h, T))
            .write(a_.router.data, bytes_of_rows(a_.router, T))
            .write(a_.shared_gate.data, bytes_of_rows(a_.shared_gate, T))
            .write(a_.shared.data, bytes_of_rows(a_.shared, T)));
}

void GpuOps::moe_up(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("moe_up");
    const MoeWeights& w = here(layer).moe;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    const args::MoeUp p{matrix(w.gate, c_.expert_width), matrix(w.up, c_.expert_width),
                        static_cast<uint32_t>(c_.experts), static_cast<uint32_t>(c_.experts_per_token),
                        !options_.fused_choice};
    if (tiled(batch)) return moe_up_tiles(layer, p, T);
    if (!options_.fused_moe) return moe_up_steps(layer, T);
    if (p.chosen) choose_experts(T, 0);
    const size_t router = bytes_of_rows(a_.router, T), expert = bytes_of_rows(a_.expert, T),
                 weight = bytes_of_rows(a_.weight, T);
    const int64_t rows = most_experts(T) * c_.expert_width;
    const uint32_t blocks = p.experts_per_token * blocks_of(p.gate);
    run(recorder_,
        {.kernel = "moe_up",
         .groups = {groups_for(2 * blocks), T, 1},
         .threadgroup = {vector_bytes(D), 4 * p.experts, 8 * p.experts}},
        p,
        Buffers()
            .read(a_.h.data, bytes_of_rows(a_.h, T))
            .add(Binding::read(a_.router.data, router).reading(p.chosen ? 0 : router))
            .weights(w.gate, rows)
            .weights(w.up, rows)
            .add(p.chosen ? Binding::read(a_.expert.data, expert) : Binding::write(a_.expert.data, expert))
            .write(a_.weight.data, p.chosen ? 0 : weight)
            .write(a_.hidden.data, bytes_of_rows(a_.hidden, T)));
}

void GpuOps::moe_down(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("moe_down");
    const MoeWeights& w = here(layer).moe;
    const auto T = static_cast<uint32_t>(batch.rows);
    const args::MoeDown p{matrix(w.down, c_.hidden), matrix(w.shared_down),
                          static_cast<uint32_t>(c_.experts_per_token)};
    if (tiled(batch)) return moe_down_tiles(layer, p, T);
    if (!options_.fused_moe) return moe_down_steps(layer, T);
    const uint32_t experts = p.experts_per_token * vector_bytes(p.down.columns);
    run(recorder_,
        {.kernel = "moe_down",
         .groups = {ceil_div(blocks_of(p.down), kMoeDownOutputs), T, 1},
         .threads = kSimd * kMoeDownOutputs * args::kMoeDownParts,
         .threadgroup = {experts + vector_bytes(static_cast<uint32_t>(c_.shared_width))}},
        p,
        Buffers()
            .read(a_.expert.data, bytes_of_rows(a_.expert, T))
            .read(a_.weight.data, bytes_of_rows(a_.weight, T))
            .read(a_.hidden.data, bytes_of_rows(a_.hidden, T))
            .read(a_.shared_gate.data, bytes_of_rows(a_.shared_gate, T))
            .read(a_.shared.data, bytes_of_rows(a_.shared, T))
            .weights(w.down, most_experts(T) * c_.hidden)
            .weights(w.shared_down)
            .update(a_.x.data, bytes_of_rows(a_.x, T)));
}

// Sorts the assignments of T tokens by expert, unless moe_up has done so for this layer in this pass: on the
// device, in order_, with the tiles that work them off in tiles_ and the grids of those in grids_.
void GpuOps::sort_assignments(const LayerWeights& layer, uint32_t T) {
    if (sorted_layer_ == layer.number) return;
    sorted_layer_ = layer.number;
    const auto E = static_cast<uint32_t>(c_.experts),
               assignments = T * static_cast<uint32_t>(c_.experts_per_token);
    const uint32_t runs = ceil_div(assignments, kSortRun);
    const args::MoeSort p{assignments,
                          E,
                          runs,
                          expert_rows(T),
                          ceil_div(c_.expert_width, tiling_.outputs / 2),
                          ceil_div(c_.hidden, tiling_.outputs)};
    if (!options_.gpu_routing) return sort_on_host(p);
    const size_t counts = size_t{runs} * E * sizeof(uint32_t);
    run(recorder_,
        {.kernel = "moe_sort_count", .groups = {runs, 1, 1}, .threads = kSortRun, .threadgroup = {4 * E}}, p,
        Buffers().read(a_.expert.data, bytes_of_rows(a_.expert, T)).write(counts_, counts));
    run(recorder_,
        {.kernel = "moe_sort_plan", .groups = {1, 1, 1}, .threads = kSortRun, .threadgroup = {4 * E}}, p,
        Buffers()
            .update(counts_, counts)
            .write(tiles_, most_tiles(T) * sizeof(args::Tile))
            .write(grids_, 6 * sizeof(uint32_t)));
    run(recorder_, {.kernel = "moe_sort_place", .groups = {runs, 1, 1}, .threads = kSortRun}, p,
        Buffers()
            .read(a_.expert.data, bytes_of_rows(a_.expert, T))
            .read(counts_, counts)
            .write(order_, assignments * sizeof(uint32_t)));
}

// The same by the host, which waits for the chosen experts.
void GpuOps::sort_on_host(const args::MoeSort& p) {
    recorder_.finish();
    std::vector<int32_t> expert(p.assignments);
    device_->copy(expert.data(), a_.expert.data, p.assignments * sizeof(int32_t));
    std::vector<uint32_t> order(p.assignments);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::sort(order, {}, [&](uint32_t i) { return std::pair(expert[i], i); });
    std::vector<args::Tile> tiles;
    for (uint32_t first = 0, rows = 0; first < p.assignments; first += rows) {
        const int32_t e = expert[order[first]];
        rows = 1;
        while (first + rows < p.assignments && rows < p.tile_rows && expert[order[first + rows]] == e) ++rows;
        tiles.push_back({static_cast<uint32_t>(e), first, rows});
    }
    const auto count = static_cast<uint32_t>(tiles.size());
    const uint32_t grids[2][3] = {{p.up_blocks, count, 1}, {p.down_blocks, count, 1}};
    device_->write(order_, order.data(), order.size() * sizeof(uint32_t));
    device_->write(tiles_, tiles.data(), tiles.size() * sizeof(args::Tile));
    device_->write(grids_, grids, sizeof grids);
}

// Tiles of expert_rows(T) rows that T tokens can need: all of the full ones, and one part of a tile for each
// expert.
uint32_t GpuOps::most_tiles(uint32_t T) const {
    const uint32_t assignments = T * static_cast<uint32_t>(c_.experts_per_token);
    return assignments / expert_rows(T) + std::min(static_cast<uint32_t>(c_.experts), assignments);
}

// Chooses each row's experts, and rounds so many numbers of it for products in tiles.
void GpuOps::choose_experts(uint32_t T, uint32_t rounded) {
    const args::MoeChoose p{static_cast<uint32_t>(c_.experts), static_cast<uint32_t>(c_.experts_per_token),
                            rounded};
    run(recorder_,
        {.kernel = "moe_up_choose",
         .groups = {T, 1, 1},
         .threads = 4 * kSimd,
         .threadgroup = {4 * p.experts, 8 * p.experts}},
        p,
        Buffers()
            .read(a_.h.data, size_t{T} * rounded * sizeof(float))
            .read(a_.router.data, bytes_of_rows(a_.router, T))
            .write(a_.expert.data, bytes_of_rows(a_.expert, T))
            .write(a_.weight.data, bytes_of_rows(a_.weight, T))
            .write(rounded_, size_t{T} * rounded * sizeof(uint16_t)));
}

// x += sum over k of weight_k part_k + sigmoid(shared_gate) shared_out.
void GpuOps::combine(uint32_t T, DType type) {
    const auto D = static_cast<uint32_t>(c_.hidden), K = static_cast<uint32_t>(c_.experts_per_token);
    run(recorder_,
        {.kernel = type == DType::bf16 ? "moe_down_combine_bf16" : "moe_down_combine_f32",
         .groups = {ceil_div(D, kSimds * kSimd), T, 1}},
        args::MoeCombine{D, K},
        Buffers()
            .read(part_, size_t{T} * K * D * bytes_of(type))
            .read(a_.weight.data, bytes_of_rows(a_.weight, T))
            .read(shared_out_, size_t{T} * D * sizeof(float))
            .read(a_.shared_gate.data, bytes_of_rows(a_.shared_gate, T))
            .update(a_.x.data, bytes_of_rows(a_.x, T)));
}

// Row by row without fusion: every product and what lies between two of them as a dispatch of its own.

// y (T K, rows) = W_e x for each of a row's experts e, which take the row's x or one each.
void GpuOps::multiply_experts(const Linear& w, uint32_t rows, const Tensor& x, bool shared, uint32_t T,
                              void* y) {
    const args::MatvecExperts p{matrix(w, rows), static_cast<uint32_t>(c_.experts_per_token), shared};
    const uint32_t assignments = T * p.experts_per_token;
    run(recorder_,
        {.kernel = "matvec_experts",
         .groups = {groups_for(blocks_of(p.matrix)), assignments, 1},
         .threadgroup = {vector_bytes(p.matrix.columns)}},
        p,
        Buffers()
            .read(x.data, bytes_of_rows(x, T))
            .read(a_.expert.data, bytes_of_rows(a_.expert, T))
            .weights(w, most_experts(T) * rows)
            .write(y, size_t{assignments} * rows * sizeof(float)));
}

// gate = silu(gate) up.
void GpuOps::swiglu(const void* up, const Tensor& gate, uint32_t T) {
    const size_t bytes = bytes_of_rows(gate, T);
    const auto count = static_cast<uint32_t>(bytes / sizeof(float));
    run(recorder_, {.kernel = "swiglu", .groups = {ceil_div(count, kSimds * kSimd), 1, 1}}, count,
        Buffers().read(up, bytes).update(gate.data, bytes));
}

void GpuOps::moe_route_steps(const LayerWeights& layer, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const Rows h{a_.h.data, bytes_of_rows(a_.h, T), static_cast<uint32_t>(c_.hidden), DType::f32};
    norm_rows(here(layer).post_norm, a_.x.as<float>(), T, a_.h.data, h.type);
    multiply_rows(w.router, h, T, a_.router.as<float>());
    multiply_rows(w.shared_expert_gate, h, T, a_.shared_gate.as<float>());
    multiply_rows(w.shared_gate, h, T, a_.shared.as<float>());
    multiply_rows(w.shared_up, h, T, up_);
    swiglu(up_, a_.shared, T);
}

void GpuOps::moe_up_steps(const LayerWeights& layer, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const auto F = static_cast<uint32_t>(c_.expert_width);
    choose_experts(T, 0);
    multiply_experts(w.gate, F, a_.h, true, T, a_.hidden.data);
    multiply_experts(w.up, F, a_.h, true, T, up_);
    swiglu(up_, a_.hidden, T);
}

void GpuOps::moe_down_steps(const LayerWeights& layer, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const Rows shared{a_.shared.data, bytes_of_rows(a_.shared, T), static_cast<uint32_t>(c_.shared_width),
                      DType::f32};
    multiply_experts(w.down, static_cast<uint32_t>(c_.hidden), a_.hidden, false, T, part_);
    multiply_rows(w.shared_down, shared, T, shared_out_);
    combine(T, DType::f32);
}

// Many rows, in tiles.

void GpuOps::moe_route_tiles(const LayerWeights& layer, const args::MoeRoute& p, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const Rows h{a_.h.data, bytes_of_rows(a_.h, T), p.router.columns, DType::f32};
    norm_rows(here(layer).post_norm, a_.x.as<float>(), T, a_.h.data, h.type);
    multiply(w.router, h, T, a_.router.as<float>());
    multiply(w.shared_expert_gate, h, T, a_.shared_gate.as<float>());
    const Linear gate = expanded(w.shared_gate, 0), up = expanded(w.shared_up, 1);
    const uint32_t rows = block_rows(T, 2 * p.shared_gate.rows);
    run(recorder_,
        {.kernel = format("matmul_swiglu_%u%s", rows, tile_kernels_),
         .groups = {ceil_div(p.shared_gate.rows, tiling_.outputs / 2), ceil_div(T, rows), 1},
         .threads = threads_of_block(rows),
         .landing = slab_bytes(rows),
         .operations = 2 * operations_of(gate, T)},
        args::MatmulSwiglu{matrix(gate), matrix(up), T},
        Buffers()
            .read(h.data, h.bytes)
            .weights(gate)
            .weights(up)
            .write(a_.shared.data, bytes_of_rows(a_.shared, T)));
}

void GpuOps::moe_up_tiles(const LayerWeights& layer, const args::MoeUp& p, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const size_t rounded = size_t{T} * p.gate.columns * sizeof(uint16_t);
    choose_experts(T, p.gate.columns);
    sort_assignments(layer, T);
    const Linear gate = expanded(w.gate, 0), up = expanded(w.up, 1);
    args::MoeUp tiles = p;
    tiles.gate = matrix(gate, c_.expert_width);
    tiles.up = matrix(up, c_.expert_width);
    run(recorder_,
        {.kernel = format("moe_up_tiles_%u%s", expert_rows(T), tile_kernels_),
         .groups = {ceil_div(p.gate.rows, tiling_.outputs / 2), most_tiles(T), 1},
         .threads = threads_of_block(expert_rows(T)),
         .indirect = grids_,
         .landing = slab_bytes(expert_rows(T)),
         .operations = 2 * operations_of(gate, T * p.experts_per_token) / c_.experts},
        tiles,
        Buffers()
            .read(rounded_, rounded)
            .read(order_, T * p.experts_per_token * sizeof(uint32_t))
            .read(tiles_, most_tiles(T) * sizeof(args::Tile))
            .weights(gate)
            .weights(up)
            .write(a_.hidden.data, bytes_of_rows(a_.hidden, T)));
}

void GpuOps::moe_down_tiles(const LayerWeights& layer, const args::MoeDown& p, uint32_t T) {
    const MoeWeights& w = here(layer).moe;
    const uint32_t D = p.down.rows, K = p.experts_per_token;
    sort_assignments(layer, T);
    const Linear down = expanded(w.down);
    args::MoeDown tiles = p;
    tiles.down = matrix(down, c_.hidden);
    const size_t part = size_t{T} * K * D * sizeof(uint16_t);
    run(recorder_,
        {.kernel = format("moe_down_tiles_%u%s", expert_rows(T), tile_kernels_),
         .groups = {ceil_div(D, tiling_.outputs), most_tiles(T), 1},
         .threads = threads_of_block(expert_rows(T)),
         .indirect = grids_ + 3,
         .landing = slab_bytes(expert_rows(T)),
         .operations = operations_of(down, T * K) / c_.experts},
        tiles,
        Buffers()
            .read(a_.hidden.data, bytes_of_rows(a_.hidden, T))
            .read(order_, T * K * sizeof(uint32_t))
            .read(tiles_, most_tiles(T) * sizeof(args::Tile))
            .weights(down)
            .write(part_, part));
    const Rows hidden{a_.shared.data, bytes_of_rows(a_.shared, T), p.shared_down.columns, DType::f32};
    multiply(w.shared_down, hidden, T, shared_out_);
    combine(T, DType::bf16);
}

}  // namespace lily
