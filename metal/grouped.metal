// The products of a prompt's experts, in matrix tiles: behind experts.metal, which has sorted the chunk's
// assignments and listed the tiles.
#include "matmul.h"
#include "norm.h"

using namespace lily;

namespace {

// hidden[assignment] = silu(gate) up; or of two neighbours.
struct StoreHidden {
    device float* hidden;  // (T K, F)
    threadgroup const uint* assignment;
    uint row, column, rows, columns;

    METAL_FUNC void operator()(ushort r, ushort c, float gate, float up) const {
        if (row + r < rows && column + c < columns)
            hidden[assignment[row + r] * columns + column + c] = silu(gate) * up;
    }
    METAL_FUNC void operator()(ushort r, ushort c, float2 gate, float2 up) const {  // F is a multiple of 64
        if (row + r < rows && column + c < columns)
            *(device float2*)(hidden + assignment[row + r] * columns + column + c) =
                float2(silu(gate.x) * up.x, silu(gate.y) * up.y);
    }
};

// part[assignment] = value; or a value and its right neighbour.
struct StorePart {
    device bfloat* part;  // (T K, D)
    threadgroup const uint* assignment;
    uint row, column, rows, columns;

    METAL_FUNC void operator()(ushort r, ushort c, float value) const {
        if (row + r < rows && column + c < columns)
            part[assignment[row + r] * columns + column + c] = bfloat(value);
    }
    METAL_FUNC void operator()(ushort r, ushort c, float2 values) const {  // D is a multiple of 64
        if (row + r < rows && column + c < columns)
            *(device bfloat2*)(part + assignment[row + r] * columns + column + c) = bfloat2(values);
    }
};

}  // namespace

// hidden = silu(Gate h) (Up h) of the chosen experts. A threadgroup takes kSlabRows / 2 outputs of one
// expert for all rows of a tile, gathering them by the sorted assignments; a slab holds as many rows of Gate
// and the same of Up, dequantised once for the tile. The grid is (blocks of outputs, tiles), the tiles
// counted by moe_sort_plan.
template <class B>
[[kernel, max_total_threads_per_threadgroup(128)]] void moe_up_tiles(
    constant args::MoeUp& p          [[buffer(0)]],
    device const bfloat* h           [[buffer(1)]],  // (T, D)
    device const uint* order         [[buffer(2)]],  // (T K)
    device const args::Tile* tiles   [[buffer(3)]],  // (tiles)
    device const uchar* gate_weight  [[buffer(4)]],  // (E F, D) as stored
    device const uchar* gate_scales  [[buffer(5)]],
    device const uchar* gate_biases  [[buffer(6)]],
    device const uchar* up_weight    [[buffer(7)]],  // (E F, D)
    device const uchar* up_scales    [[buffer(8)]],
    device const uchar* up_biases    [[buffer(9)]],
    device float* hidden             [[buffer(10)]],  // (T K, F)
    threadgroup bfloat* slabs        [[threadgroup(0)]],
    uint2 group                      [[threadgroup_position_in_grid]],
    ushort thread_index              [[thread_index_in_threadgroup]],
    ushort simd                      [[simdgroup_index_in_threadgroup]],
    ushort lane                      [[thread_index_in_simdgroup]]) {
    threadgroup float stages[B::kSimds * kStage];
    threadgroup uint start[B::kRows];
    threadgroup uint assignment[B::kRows];
    const args::Tile tile = tiles[group.y];
    const uint F = p.gate.rows, D = p.gate.columns, column = group.x * kSlabRows / 2;
    for (ushort r = thread_index; r < B::kRows; r += B::kThreads) {
        assignment[r] = order[tile.first + min(uint(r), tile.rows - 1)];
        start[r] = assignment[r] / p.experts_per_token * D;
    }

    Outputs<B> out;
    threadgroup float* stage = stages + simd * kStage;
    const uint row = tile.expert * F + column;
    const TwoMatrices w = {{{gate_weight, gate_scales, gate_biases}, p.gate, row, F - column},
                           {{up_weight, up_scales, up_biases}, p.up, row, F - column}};
    multiply(out, LeftRows<bfloat>{h, start}, tile.rows, w, D, slabs, stage, thread_index, simd, lane);
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles / 2; ++c)
            out.sum[r][c].each(
                out.sum[r][c + B::kColumnTiles / 2],
                StoreHidden{hidden, assignment, out.row(simd, r), column + out.column(simd, c), tile.rows, F},
                stage, lane);
}

// part = Down hidden of the chosen experts. As moe_up_tiles, with kSlabRows outputs a threadgroup.
template <class B>
[[kernel, max_total_threads_per_threadgroup(128)]] void moe_down_tiles(
    constant args::MoeDown& p       [[buffer(0)]],
    device const float* hidden      [[buffer(1)]],  // (T K, F)
    device const uint* order        [[buffer(2)]],  // (T K)
    device const args::Tile* tiles  [[buffer(3)]],  // (tiles)
    device const uchar* weight      [[buffer(4)]],  // (E D, F) as stored
    device const uchar* scales      [[buffer(5)]],
    device const uchar* biases      [[buffer(6)]],
    device bfloat* part             [[buffer(7)]],  // (T K, D)
    threadgroup bfloat* slabs       [[threadgroup(0)]],
    uint2 group                     [[threadgroup_position_in_grid]],
    ushort thread_index             [[thread_index_in_threadgroup]],
    ushort simd                     [[simdgroup_index_in_threadgroup]],
    ushort lane                     [[thread_index_in_simdgroup]]) {
    threadgroup float stages[B::kSimds * kStage];
    threadgroup uint start[B::kRows];
    threadgroup uint assignment[B::kRows];
    const args::Tile tile = tiles[group.y];
    const uint D = p.down.rows, F = p.down.columns, column = group.x * kSlabRows;
    for (ushort r = thread_index; r < B::kRows; r += B::kThreads) {
        assignment[r] = order[tile.first + min(uint(r), tile.rows - 1)];
        start[r] = assignment[r] * F;
    }

    Outputs<B> out;
    threadgroup float* stage = stages + simd * kStage;
    const OneMatrix w = {{weight, scales, biases}, p.down, tile.expert * D + column, D - column};
    multiply(out, LeftRows<float>{hidden, start}, tile.rows, w, F, slabs, stage, thread_index, simd, lane);
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles; ++c)
            out.sum[r][c].each(
                StorePart{part, assignment, out.row(simd, r), column + out.column(simd, c), tile.rows, D},
                stage, lane);
}

#define instantiate_tiles(rows)                                              \
    template [[host_name(LILY_TILED("moe_up_tiles_" #rows))]] [[kernel]]     \
    decltype(moe_up_tiles<Block##rows>) moe_up_tiles<Block##rows>;           \
    template [[host_name(LILY_TILED("moe_down_tiles_" #rows))]] [[kernel]]   \
    decltype(moe_down_tiles<Block##rows>) moe_down_tiles<Block##rows>;
instantiate_tiles(16)
instantiate_tiles(32)
instantiate_tiles(128)
