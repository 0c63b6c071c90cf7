// GpuOps: products of many rows, and the norms before them.
#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

// Whether a pass multiplies in tiles. Only a prompt's: several sequences in one pass are continued row by
// row, so that none of them depends on how many there are.
bool GpuOps::tiled(const Batch& batch) const {
    return fits_tiles_ && batch.segments.size() == 1 && batch.rows >= options_.matmul_rows;
}

// The rows that a threadgroup takes of T: as few as hold all, so that a short prompt keeps all SIMD-groups
// busy.
uint32_t GpuOps::block_rows(uint32_t T) {
    return T <= 16 ? 16 : T <= 32 ? 32 : 128;
}

// Of the kernels' Block16, Block32 and Block128: metal/matmul.h.
uint32_t GpuOps::threads_of_block(uint32_t rows) {
    return rows == 16 ? 64 : 128;
}

// h = norm(x) of T rows, as bf16 or f32.
void GpuOps::norm_rows(const Tensor& norm, uint32_t T, void* h, DType type) {
    const auto D = static_cast<uint32_t>(c_.hidden);
    const args::NormRows p{D, 0, 0, static_cast<float>(c_.norm_epsilon)};
    run(recorder_, {.kernel = type == DType::bf16 ? "norm_rows_bf16" : "norm_rows_f32", .groups = {T, 1, 1}},
        p,
        Buffers()
            .read(a_.x.data, bytes_of_rows(a_.x, T))
            .read(norm)
            .write(h, size_t{T} * D * bytes_of(type)));
}

// y (T, N) = x W^T, or y += it.
void GpuOps::multiply(const Linear& w, const Rows& x, uint32_t T, float* y, bool add) {
    const uint32_t rows = block_rows(T);
    const args::Matmul p{matrix(w), T, x.stride, add};
    run(recorder_,
        {.kernel = format("matmul_%s_%u", x.type == DType::bf16 ? "bf16" : "f32", rows),
         .groups = {ceil_div(p.matrix.rows, kSlabRows), ceil_div(T, rows), 1},
         .threads = threads_of_block(rows)},
        p, Buffers().read(x.data, x.bytes).weights(w).write(y, size_t{T} * p.matrix.rows * sizeof(float)));
}

// The projections of normed rows: y_i = W_i norm(x).
void GpuOps::project(const Tensor& norm, uint32_t T,
                     std::initializer_list<std::pair<const Linear*, const Tensor*>> list) {
    const auto D = static_cast<uint32_t>(c_.hidden);
    norm_rows(norm, T, rounded_, DType::bf16);
    const Rows h{rounded_, size_t{T} * D * sizeof(uint16_t), D, DType::bf16};
    for (const auto& [w, y] : list) multiply(*w, h, T, y->as<float>());
}

}  // namespace lily
