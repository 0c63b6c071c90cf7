// Reading weights in every form that they are stored in, and the dot products of rows with a vector in
// threadgroup memory.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "twin.h"

namespace lily {

using namespace metal;

constant constexpr ushort kSimd = 32;         // lanes of a SIMD-group, on every Apple GPU
constant constexpr ushort kRowsOfSimd = 4;    // rows of a matrix that a SIMD-group takes at a time
constant constexpr ushort kAhead = 4;         // stretches that a lane has under way, if rows are wide
constant constexpr uint kGroup = 64;          // numbers that share a scale and a bias

// A matrix where it lies. scales and biases: (rows, columns / 64); unused when the matrix is plain.
struct Weights {
    device const uchar* weight;
    device const uchar* scales;
    device const uchar* biases;
};

METAL_FUNC float number(device const uchar* p, uint type, uint i) {
    if (type == args::kBf16) return float(((device const bfloat*)p)[i]);
    if (type == args::kF16) return float(((device const half*)p)[i]);
    return ((device const float*)p)[i];
}

// One element: for the embedding, where a row is read once.
METAL_FUNC float element(Weights w, args::Matrix m, uint row, uint column) {
    if (m.bits == 0) return number(w.weight, m.type, row * m.columns + column);
    const uint slots = 32 / m.bits;
    const uint at = row * m.columns + column;
    const uint word = ((device const uint*)w.weight)[at / slots];
    const uint q = (word >> (at % slots * m.bits)) & ((1u << m.bits) - 1u);
    const uint group = at / kGroup;
    return number(w.scales, m.type, group) * float(q) + number(w.biases, m.type, group);
}

// A field of a word as a float. It becomes the lowest bits of 2^23's fraction, which takes an instruction
// less than converting an integer, at full rate on every GPU; exact, since fields end below bit 23.
METAL_FUNC float field(uint word, uint mask) {
    return as_type<float>(0x4b000000u | (word & mask)) - 8388608.0f;
}

// How many SIMD-groups' worth so many rows are.
METAL_FUNC uint blocks_of(uint rows) { return (rows + kRowsOfSimd - 1) / kRowsOfSimd; }

// Up to four rows that a SIMD-group multiplies with a vector, from column `begin` to `end` of each; a row
// past the last repeats it, and of no rows there are no columns.
struct Rows {
    Weights first;
    uint last;             // row: how many there are, less one
    uint weights, groups;  // bytes of a row's weights, and of its scales
    uint begin, end;
    uint bits, type;
    METAL_FUNC bool packed() const { return bits != 0 && type != args::kF32; }
    METAL_FUNC Weights row(ushort r) const {
        const ulong at = min(uint(r), last);
        return {first.weight + at * weights, first.scales + at * groups, first.biases + at * groups};
    }
};

// Of the matrix's rows `row` to `row + rows - 1`, the part-th of `parts` parts of their columns.
METAL_FUNC Rows rows_of(Weights w, args::Matrix m, uint row, uint rows, uint part = 0, uint parts = 1) {
    Rows out;
    out.bits = m.bits;
    out.type = m.type;
    const uint groups = m.columns / kGroup, each = (groups + parts - 1) / parts * kGroup;
    out.begin = min(part * each, m.columns);
    out.end = rows == 0 ? out.begin : min(out.begin + each, m.columns);
    const uint size = m.type == args::kF32 ? 4 : 2;
    out.weights = m.bits == 0 ? m.columns * size : m.columns * m.bits / 8;
    out.groups = groups * size;
    const ulong at = rows == 0 ? 0 : row;
    out.first = Weights{w.weight + at * out.weights, w.scales + at * out.groups, w.biases + at * out.groups};
    out.last = rows == 0 ? 0 : rows - 1;
    return out;
}

template <class T>
METAL_FUNC float value(ushort bits) {
    return float(as_type<T>(bits));
}

// How a SIMD-group multiplies rows: what it keeps of the vector (write_vector, put_quads,
// slot, vector_element), of the weights
// that are under way (Ahead, load), and of the sums (Shares, add_packed, add_numbers, sums).
#ifdef LILY_PRODUCTS

#include LILY_PRODUCTS

#else

constant constexpr ushort kQuads = 1;  // of four numbers that a thread puts at a time
constant constexpr ushort kAheadShared = kAhead;  // the same where SIMD-groups share rows

// Where a thread may keep four numbers until it puts them.
METAL_FUNC threadgroup float4* slot(threadgroup float* x, uint i) {
    return (threadgroup float4*)(x + args::spread(i));
}

// Puts a thread's numbers, from the i-th on, into a vector of n.
METAL_FUNC void put_quads(threadgroup float* x, uint n, uint i, thread const float4* quads) {
    if (i < n) *(threadgroup float4*)(x + args::spread(i)) = quads[0];
}

// Puts a vector of n numbers, a multiple of 4, into threadgroup memory of args::vector_floats(n): value(i)
// gives those from i on. All of `threads` threads call it, whole SIMD-groups of them.
template <class Value>
METAL_FUNC void write_vector(threadgroup float* x, uint n, uint thread_index, uint threads, Value value) {
    for (uint i = 4 * thread_index; i < n; i += 4 * threads)
        *(threadgroup float4*)(x + args::spread(i)) = value(i);
}

METAL_FUNC float vector_element(threadgroup const float* x, uint i) { return x[args::spread(i)]; }

// A lane's stretch of the rows: 8 bytes of each, with their groups' scales and biases.
struct Stretch {
    uint2 words[kRowsOfSimd];
    ushort scales[kRowsOfSimd], biases[kRowsOfSimd];
};

// Adds the i-th stretch, times x, to total: sum(q x) and sum(x) come first, then its group's scale and bias.
// Fields stay where they are in their half of the word, times a power of two, which x is divided by
// beforehand.
template <ushort kBits, class T>
METAL_FUNC void add_stretch(thread const Stretch& stretch, uint i, threadgroup const float* x, float factor,
                            thread float* total) {
    constexpr ushort kSlots = 64 / kBits, kOfHalf = 16 / kBits;
    constexpr uint kMask = (1u << kBits) - 1u;
    float v[kSlots];
    float sum = 0;
#pragma unroll
    for (ushort j = 0; j < kSlots; j += twin::step(4, kSlots)) {
        const float4 four = *(threadgroup const float4*)(x + args::spread(i * kSlots + j)) * factor;
#pragma unroll
        for (ushort c = 0; c < 4; ++c) {
            sum += four[c];
            v[j + c] = four[c] * (1.0f / float(1u << (kBits * ((j + c) % kOfHalf))));
        }
    }
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) {
        float dot = 0;
#pragma unroll
        for (ushort j = 0; j < kSlots; j += twin::step(1, kSlots)) {
            const uint word = stretch.words[r][j / (2 * kOfHalf)] >> (j / kOfHalf % 2 * 16);
            dot = fma(field(word, kMask << (kBits * (j % kOfHalf))), v[j], dot);
        }
        total[r] += value<T>(stretch.scales[r]) * dot + value<T>(stretch.biases[r]) * sum;
    }
}

METAL_FUNC uint stretch_of(thread const Rows& rows, uint column) { return column * rows.bits / 64; }

// What a lane has of the rows: N stretches. All these loads are under way at once, since memory answers late,
// and a kernel issues them before it makes the vector that they are multiplied with.
template <ushort N>
struct Ahead {
    Stretch stretch[N];
};

// Loads from the lane's stretch on, of which it takes every 32nd, so that a SIMD-group reads 256 consecutive
// bytes of a row. What lies past the end repeats the last and counts for nothing: a branch round a load makes
// the next one wait.
template <ushort N>
METAL_FUNC void load(thread const Rows& rows, uint stretch, thread Ahead<N>& ahead) {
    if (!rows.packed() || rows.begin == rows.end) return;
    Weights row[kRowsOfSimd];
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) row[r] = rows.row(r);
    const uint last = stretch_of(rows, rows.end) - 1, of_group = stretch_of(rows, kGroup);
#pragma unroll
    for (ushort a = 0; a < N; ++a) {
        const uint i = min(stretch + a * kSimd, last), group = i / of_group;
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            ahead.stretch[a].words[r] = twin::load((device const uint2*)row[r].weight, i);
            ahead.stretch[a].scales[r] = twin::load((device const ushort*)row[r].scales, group);
            ahead.stretch[a].biases[r] = twin::load((device const ushort*)row[r].biases, group);
        }
    }
}

template <ushort N>
METAL_FUNC Ahead<N> load(thread const Rows& rows, ushort lane) {
    Ahead<N> ahead;
    load(rows, stretch_of(rows, rows.begin) + lane, ahead);
    return ahead;
}

// A lane's part of the four products.
struct Shares {
    float total[kRowsOfSimd] = {0, 0, 0, 0};
};

template <ushort kBits, class T, ushort N>
METAL_FUNC void add_packed(thread const Rows& rows, thread const Rows& then, thread Ahead<N>& ahead,
                           threadgroup const float* x, ushort lane, float factor, thread Shares& shares) {
    const uint end = stretch_of(rows, rows.end);
    for (uint i = stretch_of(rows, rows.begin) + lane;;) {
#pragma unroll
        for (ushort a = 0; a < N; ++a) {
            if (i + a * kSimd >= end) break;
            add_stretch<kBits, T>(ahead.stretch[a], i + a * kSimd, x, factor, shares.total);
        }
        i += N * kSimd;
        if (i - lane >= end) break;
        load(rows, i, ahead);
    }
    load(then, stretch_of(then, then.begin) + lane, ahead);
}

// The same of rows that are kept in another way, number by number.
METAL_FUNC void add_numbers(thread const Rows& rows, threadgroup const float* x, ushort lane, float factor,
                            thread Shares& shares) {
    const args::Matrix row = {1, rows.end, rows.bits, rows.type};
    for (uint k = rows.begin + lane; k < rows.end; k += kSimd)
        for (ushort r = 0; r < kRowsOfSimd; ++r)
            shares.total[r] += element(rows.row(r), row, 0, k) * vector_element(x, k) * factor;
}

// y[r] = the r-th sum; every lane gets every one.
METAL_FUNC void sums(thread const Shares& shares, ushort, thread float* y) {
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = simd_sum(shares.total[r]);
}

#endif

// Adds factor * (row r . x), this lane's part. ahead: what load() gave of the rows, and then of those that
// come next.
template <ushort N>
METAL_FUNC void add_shares(thread const Rows& rows, thread const Rows& then, thread Ahead<N>& ahead,
                           threadgroup const float* x, ushort lane, float factor, thread Shares& shares) {
    if (rows.begin == rows.end) return;
    if (!rows.packed()) return add_numbers(rows, x, lane, factor, shares);
    if (rows.bits == 4 && rows.type == args::kBf16)
        return add_packed<4, bfloat, N>(rows, then, ahead, x, lane, factor, shares);
    if (rows.bits == 4) return add_packed<4, half, N>(rows, then, ahead, x, lane, factor, shares);
    if (rows.type == args::kBf16) return add_packed<8, bfloat, N>(rows, then, ahead, x, lane, factor, shares);
    add_packed<8, half, N>(rows, then, ahead, x, lane, factor, shares);
}

// y[r] = row r . x; every lane gets every sum.
template <ushort N>
METAL_FUNC void dots(thread const Rows& rows, thread const Rows& then, thread Ahead<N>& ahead,
                     threadgroup const float* x, ushort lane, thread float* y) {
    Shares shares;
    add_shares(rows, then, ahead, x, lane, 1.0f, shares);
    sums(shares, lane, y);
}
template <ushort N>
METAL_FUNC void dots(thread const Rows& rows, thread Ahead<N>& ahead, threadgroup const float* x, ushort lane,
                     thread float* y) {
    const Rows none = {};
    dots(rows, none, ahead, x, lane, y);
}

// Leaves a SIMD-group's sums where others of its threadgroup find them.
METAL_FUNC void leave(thread const float* y, ushort lane, threadgroup float* sums) {
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r)
        if (lane == r) sums[r] = y[r];
}

}  // namespace lily
