// The steps that multiply many rows: the projections of a prompt's chunk.
#include "matmul.h"
#include "norm.h"

using namespace lily;

namespace {

// y[row][column] = or += value, where there is such an output; or a value and its right neighbour.
struct Store {
    device float* y;  // (rows, columns)
    uint row, column, rows, columns;
    bool add;

    METAL_FUNC void operator()(ushort r, ushort c, float value) const {
        if (row + r >= rows || column + c >= columns) return;
        device float* at = y + (row + r) * columns + column + c;
        *at = add ? *at + value : value;
    }
    METAL_FUNC void operator()(ushort r, ushort c, float2 values) const {
        if (columns % 2 != 0) {
            (*this)(r, c, values.x);
            (*this)(r, c + 1, values.y);
        } else if (row + r < rows && column + c < columns) {
            device float2* at = (device float2*)(y + (row + r) * columns + column + c);
            *at = add ? *at + values : values;
        }
    }
};

// y[row][column] = silu(gate) up
struct StoreSwiglu {
    device float* y;  // (rows, columns)
    uint row, column, rows, columns;

    METAL_FUNC void operator()(ushort r, ushort c, float gate, float up) const {
        if (row + r < rows && column + c < columns) y[(row + r) * columns + column + c] = silu(gate) * up;
    }
    METAL_FUNC void operator()(ushort r, ushort c, float2 gate, float2 up) const {
        (*this)(r, c, gate.x, up.x);
        (*this)(r, c + 1, gate.y, up.y);
    }
};

}  // namespace

// y = bfloat(x) W^T, or y += it. A threadgroup makes kSlabRows outputs of up to B::kRows rows, so that a slab
// of W is dequantised once for all of them. The grid is (blocks of outputs, blocks of rows).
template <class B, class T>
[[kernel, max_total_threads_per_threadgroup(128)]] void matmul(
    constant args::Matmul& p    [[buffer(0)]],
    device const T* x           [[buffer(1)]],  // (T, x_stride), W's columns of them used
    device const uchar* weight  [[buffer(2)]],  // (N, K) as stored
    device const uchar* scales  [[buffer(3)]],
    device const uchar* biases  [[buffer(4)]],
    device float* y             [[buffer(5)]],  // (T, N)
    threadgroup bfloat* slabs   [[threadgroup(0)]],  // as csrc/gpu/device.h has it: Tiling
    uint2 group                 [[threadgroup_position_in_grid]],
    ushort thread_index         [[thread_index_in_threadgroup]],
    ushort simd                 [[simdgroup_index_in_threadgroup]],
    ushort lane                 [[thread_index_in_simdgroup]]) {
    threadgroup float stages[B::kSimds * kStage];
    threadgroup uint start[B::kRows];
    const uint first = group.y * B::kRows, column = group.x * kSlabRows, N = p.matrix.rows;
    for (ushort r = thread_index; r < B::kRows; r += B::kThreads)
        start[r] = min(first + r, p.tokens - 1) * p.x_stride;

    Outputs<B> out;
    threadgroup float* stage = stages + simd * kStage;
    const OneMatrix w = {{weight, scales, biases}, p.matrix, column, N - column};
    multiply(out, LeftRows<T>{x, start}, p.tokens - first, w, p.matrix.columns, slabs, stage, thread_index,
             simd, lane);
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles; ++c)
            out.sum[r][c].each(
                Store{y, first + out.row(simd, r), column + out.column(simd, c), p.tokens, N, p.add != 0},
                stage, lane);
}

// y = silu(x Gate^T) (x Up^T). Half the slab holds rows of each matrix and a SIMD-group the sums of both for
// the same outputs, so that SwiGLU is done in registers. The grid is (blocks of half as many outputs, blocks
// of rows).
template <class B>
[[kernel, max_total_threads_per_threadgroup(128)]] void matmul_swiglu(
    constant args::MatmulSwiglu& p   [[buffer(0)]],
    device const float* x            [[buffer(1)]],  // (T, K)
    device const uchar* gate_weight  [[buffer(2)]],  // (N, K) as stored
    device const uchar* gate_scales  [[buffer(3)]],
    device const uchar* gate_biases  [[buffer(4)]],
    device const uchar* up_weight    [[buffer(5)]],  // (N, K)
    device const uchar* up_scales    [[buffer(6)]],
    device const uchar* up_biases    [[buffer(7)]],
    device float* y                  [[buffer(8)]],  // (T, N)
    threadgroup bfloat* slabs        [[threadgroup(0)]],
    uint2 group                      [[threadgroup_position_in_grid]],
    ushort thread_index              [[thread_index_in_threadgroup]],
    ushort simd                      [[simdgroup_index_in_threadgroup]],
    ushort lane                      [[thread_index_in_simdgroup]]) {
    threadgroup float stages[B::kSimds * kStage];
    threadgroup uint start[B::kRows];
    const uint first = group.y * B::kRows, column = group.x * kSlabRows / 2;
    const uint N = p.gate.rows, K = p.gate.columns;
    for (ushort r = thread_index; r < B::kRows; r += B::kThreads) start[r] = min(first + r, p.tokens - 1) * K;

    Outputs<B> out;
    threadgroup float* stage = stages + simd * kStage;
    const TwoMatrices w = {{{gate_weight, gate_scales, gate_biases}, p.gate, column, N - column},
                           {{up_weight, up_scales, up_biases}, p.up, column, N - column}};
    multiply(out, LeftRows<float>{x, start}, p.tokens - first, w, K, slabs, stage, thread_index, simd, lane);
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles / 2; ++c)
            out.sum[r][c].each(
                out.sum[r][c + B::kColumnTiles / 2],
                StoreSwiglu{y, first + out.row(simd, r), column + out.column(simd, c), p.tokens, N}, stage,
                lane);
}

#define instantiate_matmul(type, name, rows)                               \
    template [[host_name(LILY_TILED("matmul_" name "_" #rows))]] [[kernel]] \
    decltype(matmul<Block##rows, type>) matmul<Block##rows, type>;
#define instantiate_swiglu(rows)                                           \
    template [[host_name(LILY_TILED("matmul_swiglu_" #rows))]] [[kernel]]   \
    decltype(matmul_swiglu<Block##rows>) matmul_swiglu<Block##rows>;
instantiate_matmul(bfloat, "bf16", 16)
instantiate_matmul(bfloat, "bf16", 32)
instantiate_matmul(bfloat, "bf16", 128)
instantiate_matmul(float, "f32", 16)
instantiate_matmul(float, "f32", 32)
instantiate_matmul(float, "f32", 128)
instantiate_swiglu(16)
instantiate_swiglu(32)
instantiate_swiglu(128)
