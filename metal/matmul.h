// The product of many rows with a matrix as it is stored: the loop that every prefill kernel shares. Weights
// become bfloat in threadgroup memory, a slab of 64 rows and 64 columns at a time, and never exist expanded
// anywhere else.
#pragma once

#include "quant.h"
#include "tile.h"

namespace lily {

constant constexpr ushort kSlabColumns = 64;  // columns of W in a slab: a group of quantised numbers

// How a threadgroup divides its block of outputs: kSimdRows x kSimdColumns SIMD-groups, each with kRowTiles x
// kColumnTiles tiles. Column tile c of a SIMD-group in column s is the slab's tile c * kSimdColumns + s, so
// that a SIMD-group has tiles of the slab's first half and the ones half a slab on, gate and up.
template <ushort RowTiles, ushort SimdRows, ushort SimdColumns>
struct Block {
    static constant constexpr const ushort kRowTiles = RowTiles;
    static constant constexpr const ushort kSimdRows = SimdRows;
    static constant constexpr const ushort kSimdColumns = SimdColumns;
    static constant constexpr const ushort kColumnTiles = kSlabRows / kTile / SimdColumns;
    static constant constexpr const ushort kRows = RowTiles * SimdRows * kTile;
    static constant constexpr const ushort kSimds = SimdRows * SimdColumns;
    static constant constexpr const ushort kThreads = kSimds * kSimd;
};

// Writes `count` consecutive numbers of a row, all of one group, as bfloat.
template <ushort kBits, ushort kCount, class Out>
METAL_FUNC void dequantise_words(Weights w, args::Matrix m, uint at, Out out) {
    constexpr ushort kSlots = 32 / kBits;
    constexpr uint kMask = (1u << kBits) - 1u;
    const float scale = number(w.scales, m.type, at / kGroup), bias = number(w.biases, m.type, at / kGroup);
    device const uint* words = (device const uint*)w.weight + at / kSlots;
#pragma unroll
    for (ushort i = 0; i < kCount / kSlots; ++i) {
        const uint word = words[i];
#pragma unroll
        for (ushort j = 0; j < kSlots; ++j)
            out[i * kSlots + j] = bfloat(fma(scale, float((word >> (kBits * j)) & kMask), bias));
    }
}

template <ushort kCount, class Out>
METAL_FUNC void dequantise(Weights w, args::Matrix m, uint row, uint column, Out out) {
    const uint at = row * m.columns + column;
    if (m.bits == 4) return dequantise_words<4, kCount>(w, m, at, out);
    if (m.bits == 8) return dequantise_words<8, kCount>(w, m, at, out);
    for (ushort i = 0; i < kCount; ++i) out[i] = bfloat(number(w.weight, m.type, at + i));
}

// Where a row of a slab comes from.
struct Place {
    Weights w;
    args::Matrix m;
    uint row;
};

// What a slab's rows are. Rows past the last repeat it: their outputs are not written.
struct OneMatrix {
    Weights w;
    args::Matrix m;
    uint first, rows;  // W's row at the slab's row 0, and how many there are from it on

    METAL_FUNC Place place(ushort row, bool) const { return {w, m, first + min(uint(row), rows - 1)}; }
};

// The slab's first half comes from one matrix, the second from the same rows of the other.
struct TwoMatrices {
    OneMatrix gate, up;

    METAL_FUNC Place place(ushort row, bool second) const {
        if (second) return up.place(row - kSlabRows / 2, second);
        return gate.place(row, second);
    }
};

// Rows of the left matrix, wherever they lie: row r of the block starts at x[start[r]].
template <class T>
struct LeftRows {
    device const T* x;
    threadgroup const uint* start;

    METAL_FUNC bfloat operator()(uint row, uint column) const { return bfloat(x[start[row] + column]); }
};

// A SIMD-group's share of the outputs, and where it lies.
template <class B>
struct Outputs {
    BlockSum sum[B::kRowTiles][B::kColumnTiles];

    METAL_FUNC static ushort row(ushort simd, ushort tile) {
        return (simd / B::kSimdColumns * B::kRowTiles + tile) * kTile;
    }
    METAL_FUNC static ushort column(ushort simd, ushort tile) {
        return (tile * B::kSimdColumns + simd % B::kSimdColumns) * kTile;
    }
};

// What follows is how a threadgroup walks over the columns: multiply(), and its Block16, Block32 and
// Block128.
#ifdef LILY_MULTIPLY

#include LILY_MULTIPLY

#else

constant constexpr ushort kSlabStride =
    kSlabColumns + 8;  // 16 bytes of padding spread the rows over memory banks
constant constexpr ushort kSlabSize = kSlabRows * kSlabStride;  // of which there are two: Tiling

using Block16 = Block<1, 1, 2>;
using Block32 = Block<1, 2, 2>;
using Block128 = Block<2, 4, 1>;  // a slab serves 128 rows: 64 accumulators a lane

// The same rows as a tile sees them.
template <class T>
struct LeftTile {
    LeftRows<T> rows;
    uint row, column;

    METAL_FUNC bfloat operator()(ushort r, ushort c) const { return rows(row + r, column + c); }
};

// out = left W^T over K columns, K a multiple of 64, by a whole threadgroup: `rows` rows of left, the slab's
// rows of W. The threadgroup dequantises the next slab while it multiplies by this one, which makes one
// barrier a slab. Tiles without rows are skipped. `stage` is this SIMD-group's. Sums run over k in order
// whatever the block, so a row's result depends on that row alone.
template <class B, class T, class Matrices>
METAL_FUNC void multiply(thread Outputs<B>& out, LeftRows<T> left, uint rows, Matrices w, uint K,
                         threadgroup bfloat* slabs, threadgroup float* stage, ushort thread_index,
                         ushort simd, ushort lane) {
    constexpr ushort kNumbers = kSlabRows * kSlabColumns / B::kThreads;  // a thread's share of a slab
    constexpr ushort kThreadsOfRow = kSlabColumns / kNumbers;
    const ushort slab_row = thread_index / kThreadsOfRow,
                 slab_column = thread_index % kThreadsOfRow * kNumbers;
    const Place from = w.place(slab_row, slab_row >= kSlabRows / 2);
    threadgroup bfloat* mine = slabs + slab_row * kSlabStride + slab_column;
#pragma unroll
    for (ushort r = 0; r < B::kRowTiles; ++r)
#pragma unroll
        for (ushort c = 0; c < B::kColumnTiles; ++c) out.sum[r][c].clear();

    dequantise<kNumbers>(from.w, from.m, from.row, slab_column, mine);
    for (uint k = 0; k < K; k += kSlabColumns) {
        const ushort current = k / kSlabColumns % 2;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (k + kSlabColumns < K)
            dequantise<kNumbers>(from.w, from.m, from.row, k + kSlabColumns + slab_column,
                                 mine + (1 - current) * kSlabSize);
        threadgroup bfloat* slab = slabs + current * kSlabSize;
#pragma unroll
        for (ushort depth = 0; depth < kSlabColumns; depth += kDepth) {
            Left a[B::kRowTiles];
#pragma unroll
            for (ushort r = 0; r < B::kRowTiles; ++r) {
                const ushort row = out.row(simd, r);
                if (row < rows) a[r].set(LeftTile<T>{left, row, k + depth}, stage, lane);
            }
#pragma unroll
            for (ushort c = 0; c < B::kColumnTiles; ++c) {
                if (out.row(simd, 0) >= rows) break;
                Right b;
                b.load_transposed(slab + out.column(simd, c) * kSlabStride + depth, kSlabStride);
#pragma unroll
                for (ushort r = 0; r < B::kRowTiles; ++r)
                    if (out.row(simd, r) < rows) out.sum[r][c].add(a[r], b);
            }
        }
    }
}

#endif

}  // namespace lily
