// GpuOps: products of many rows, and the norms before them.
#include <algorithm>

#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

// Whether a pass multiplies in tiles. Only a prompt's: several sequences in one pass are continued row by
// row, so that none of them depends on how many there are.
bool GpuOps::tiled(const Batch& batch) const {
    return fits_tiles_ && batch.segments.size() == 1 && batch.segments[0].choice() >= options_.matmul_rows;
}

// The rows that a threadgroup takes of T: as few as hold all, so that a short prompt keeps all SIMD-groups
// busy, and few if that makes threadgroups for all of the device.
uint32_t GpuOps::block_rows(uint32_t T, uint32_t outputs) const {
    if (T <= 32) return T <= 16 ? 16 : 32;
    return ceil_div(outputs, tiling_.outputs) * ceil_div(T, 128) < tiling_.threadgroups ? 32 : 128;
}

// The most rows of an expert that a threadgroup takes.
uint32_t GpuOps::expert_rows(uint32_t T) const {
    if (options_.expert_tile) return static_cast<uint32_t>(options_.expert_tile);
    const bool few =
        T * static_cast<uint32_t>(c_.experts_per_token) <= 32 * static_cast<uint32_t>(c_.experts);
    return tiling_.threadgroups && few ? 32 : 128;
}

// Of the kernels' Block16, Block32 and Block128: metal/matmul.h.
uint32_t GpuOps::threads_of_block(uint32_t rows) const {
    return rows == 16 ? tiling_.threads_of_few : 128;
}

// Room for a product's matrices, two for one with SwiGLU, if they are expanded before it.
void GpuOps::allocate_expanded() {
    if (options_.fused_dequantisation) return;
    int64_t most = 0;
    for (const LayerWeights& layer : layers_) {
        const GdnWeights& g = layer.gdn;
        const AttentionWeights& a = layer.attn;
        const MoeWeights& m = layer.moe;
        for (const Linear* w :
             {&g.in_qkv, &g.in_z, &g.in_b, &g.in_a, &g.out, &a.q, &a.k, &a.v, &a.out, &m.router, &m.gate,
              &m.up, &m.down, &m.shared_gate, &m.shared_up, &m.shared_down, &m.shared_expert_gate})
            if (w->bits) most = std::max(most, w->rows * w->columns);
    }
    for (void*& place : expanded_) place = scratch((most + 1) / 2);
}

// The matrix that a product takes: the stored one, or the numbers that it stands for, which are the same.
Linear GpuOps::expanded(const Linear& w, int place) {
    if (options_.fused_dequantisation || w.bits == 0) return w;
    const Tensor numbers(expanded_[place], DType::bf16, {w.rows, w.columns});
    const args::Matrix p = matrix(w);
    const int64_t words = w.rows * w.columns * w.bits / 32;
    run(recorder_, {.kernel = "expand", .groups = {ceil_div(words, kSimds * kSimd), 1, 1}}, p,
        Buffers().weights(w).write(numbers.data, numbers.bytes()));
    return {numbers, {}, {}, w.rows, w.columns, 0};
}

// h = norm(x) of T rows, as bf16 or f32.
void GpuOps::norm_rows(const Tensor& norm, const float* x, uint32_t T, void* h, DType type) {
    const auto D = static_cast<uint32_t>(c_.hidden);
    const args::NormRows p{D, 0, 0, static_cast<float>(c_.norm_epsilon)};
    run(recorder_, {.kernel = type == DType::bf16 ? "norm_rows_bf16" : "norm_rows_f32", .groups = {T, 1, 1}},
        p, Buffers().read(x, bytes_of_rows(a_.x, T)).read(norm).write(h, size_t{T} * D * bytes_of(type)));
}

// What products row by row take of x: x, which they norm themselves, or h, which is normed here.
const float* GpuOps::normed(const Tensor& norm, const float* x, uint32_t T, float* h) {
    if (options_.fused_norm) return x;
    norm_rows(norm, x, T, h, DType::f32);
    return h;
}

// h = silu(z) norm(y) of T rows, as bf16 or f32, the norm taken over each head.
void GpuOps::gated_norm_rows(const Tensor& norm, uint32_t T, void* h, DType type) {
    const auto width = static_cast<uint32_t>(a_.z.shape[1]);
    const args::NormRows p{width, static_cast<uint32_t>(a_.y.shape[1]), static_cast<uint32_t>(c_.value_dim),
                           static_cast<float>(c_.norm_epsilon)};
    run(recorder_,
        {.kernel = type == DType::bf16 ? "gated_norm_rows_bf16" : "gated_norm_rows_f32", .groups = {T, 1, 1}},
        p,
        Buffers()
            .read(a_.y.data, bytes_of_rows(a_.y, T))
            .read(a_.z.data, bytes_of_rows(a_.z, T))
            .read(norm)
            .write(h, size_t{T} * width * bytes_of(type)));
}

// y (T, N) = x W^T, or y += it, in tiles.
void GpuOps::multiply(const Linear& stored, const Rows& x, uint32_t T, float* y, bool add) {
    const Linear w = expanded(stored);
    const uint32_t rows = block_rows(T, static_cast<uint32_t>(w.rows));
    const args::Matmul p{matrix(w), T, x.stride, add};
    const size_t bytes = size_t{T} * p.matrix.rows * sizeof(float);
    run(recorder_,
        {.kernel = format("matmul_%s_%u%s", x.type == DType::bf16 ? "bf16" : "f32", rows, tile_kernels_),
         .groups = {ceil_div(p.matrix.rows, tiling_.outputs), ceil_div(T, rows), 1},
         .threads = threads_of_block(rows),
         .landing = slab_bytes(rows),
         .operations = operations_of(w, T)},
        p,
        Buffers()
            .read(x.data, x.bytes)
            .weights(w)
            .add(add ? Binding::update(y, bytes) : Binding::write(y, bytes)));
}

// The same row by row.
void GpuOps::multiply_rows(const Linear& w, const Rows& x, uint32_t T, float* y, bool add) {
    const args::Matmul p{matrix(w), T, x.stride, add};
    const size_t bytes = size_t{T} * p.matrix.rows * sizeof(float);
    run(recorder_,
        {.kernel = "matvec",
         .groups = {ceil_div(blocks_of(p.matrix), args::kSharedBlocks), T, 1},
         .threads = simds_of_row_ * kSimd,
         .threadgroup = {vector_bytes(p.matrix.columns)}},
        p,
        Buffers()
            .read(x.data, x.bytes)
            .weights(w)
            .add(add ? Binding::update(y, bytes) : Binding::write(y, bytes)));
}

// The projections of normed rows: y_i = W_i norm(x).
void GpuOps::project(const Tensor& norm, uint32_t T,
                     std::initializer_list<std::pair<const Linear*, const Tensor*>> list) {
    const auto D = static_cast<uint32_t>(c_.hidden);
    norm_rows(norm, a_.x.as<float>(), T, rounded_, DType::bf16);
    const Rows h{rounded_, size_t{T} * D * sizeof(uint16_t), D, DType::bf16};
    for (const auto& [w, y] : list) multiply(*w, h, T, y->as<float>());
}

}  // namespace lily
