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
constant constexpr ushort kAhead = 4;         // loads of each that a lane has under way, if wide
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
    device const uchar* weight[kRowsOfSimd];
    device const uchar* scales[kRowsOfSimd];
    device const uchar* biases[kRowsOfSimd];
    uint begin, end;
    uint bits, type;
    METAL_FUNC bool packed() const { return bits != 0 && type != args::kF32; }
    METAL_FUNC uint stretch_of(uint column) const { return column * bits / 64; }
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
    const uint bytes = m.bits == 0 ? m.columns * size : m.columns * m.bits / 8;
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) {
        const uint at = rows == 0 ? 0 : row + min(uint(r), rows - 1);
        out.weight[r] = w.weight + ulong(at) * bytes;
        out.scales[r] = w.scales + ulong(at) * groups * size;
        out.biases[r] = w.biases + ulong(at) * groups * size;
    }
    return out;
}

// What a lane has of the rows: N times 8 bytes of each, with their groups' scales and biases. All these
// loads are under way at once, since memory answers late, and a kernel issues them before it makes the vector
// that they are multiplied with.
template <ushort N>
struct Ahead {
    uint2 words[N][kRowsOfSimd];
    ushort scales[N][kRowsOfSimd], biases[N][kRowsOfSimd];
};

// Loads from the lane's stretch of 8 bytes on, of which it takes every 32nd, so that a SIMD-group reads 256
// consecutive bytes of a row. What lies past the end repeats the last and counts for nothing: a branch round
// a load makes the next one wait.
template <ushort N>
METAL_FUNC void load(thread const Rows& rows, uint stretch, thread Ahead<N>& ahead) {
    if (!rows.packed() || rows.begin == rows.end) return;
    const uint last = rows.stretch_of(rows.end) - 1, of_group = rows.stretch_of(kGroup);
#pragma unroll
    for (ushort a = 0; a < N; ++a) {
        const uint i = min(stretch + a * kSimd, last), group = i / of_group;
#pragma unroll
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            ahead.words[a][r] = twin::load((device const uint2*)rows.weight[r], i);
            ahead.scales[a][r] = twin::load((device const ushort*)rows.scales[r], group);
            ahead.biases[a][r] = twin::load((device const ushort*)rows.biases[r], group);
        }
    }
}

template <ushort N>
METAL_FUNC Ahead<N> load(thread const Rows& rows, ushort lane) {
    Ahead<N> ahead;
    load(rows, rows.stretch_of(rows.begin) + lane, ahead);
    return ahead;
}

template <class T>
METAL_FUNC float value(ushort bits) {
    return float(as_type<T>(bits));
}

// Adds what is loaded, times x, to total: sum(q x) and sum(x) of a stretch come first, then its group's scale
// and bias. Fields stay where they are in their half of the word, times a power of two, which x is divided by
// beforehand.
template <ushort kBits, class T, ushort N>
METAL_FUNC void add_stretches(thread const Ahead<N>& ahead, uint stretch, uint end,
                              threadgroup const float* x, float factor, thread float* total) {
    constexpr ushort kSlots = 64 / kBits, kOfHalf = 16 / kBits;
    constexpr uint kMask = (1u << kBits) - 1u;
#pragma unroll
    for (ushort a = 0; a < N; ++a) {
        const uint i = stretch + a * kSimd;
        if (i >= end) break;
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
                const uint word = ahead.words[a][r][j / (2 * kOfHalf)] >> (j / kOfHalf % 2 * 16);
                dot = fma(field(word, kMask << (kBits * (j % kOfHalf))), v[j], dot);
            }
            total[r] += value<T>(ahead.scales[a][r]) * dot + value<T>(ahead.biases[a][r]) * sum;
        }
    }
}

template <ushort kBits, class T, ushort N>
METAL_FUNC void add_packed(thread const Rows& rows, thread Ahead<N>& ahead, threadgroup const float* x,
                           ushort lane, float factor, thread float* total) {
    const uint end = rows.stretch_of(rows.end);
    for (uint i = rows.stretch_of(rows.begin);;) {
        add_stretches<kBits, T, N>(ahead, i + lane, end, x, factor, total);
        i += N * kSimd;
        if (i >= end) return;
        load(rows, i + lane, ahead);
    }
}

// The same of rows that are kept in another way, number by number.
METAL_FUNC void add_numbers(thread const Rows& rows, threadgroup const float* x, ushort lane, float factor,
                            thread float* total) {
    const args::Matrix row = {1, rows.end, rows.bits, rows.type};
    for (uint k = rows.begin + lane; k < rows.end; k += kSimd)
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            const Weights w = {rows.weight[r], rows.scales[r], rows.biases[r]};
            total[r] += element(w, row, 0, k) * x[args::spread(k)] * factor;
        }
}

// total[r] += factor * (row r . x), this lane's share; ahead: what load() gave.
template <ushort N>
METAL_FUNC void add_shares(thread const Rows& rows, thread Ahead<N>& ahead, threadgroup const float* x,
                           ushort lane, float factor, thread float* total) {
    if (rows.begin == rows.end) return;
    if (!rows.packed()) return add_numbers(rows, x, lane, factor, total);
    if (rows.bits == 4 && rows.type == args::kBf16)
        return add_packed<4, bfloat, N>(rows, ahead, x, lane, factor, total);
    if (rows.bits == 4) return add_packed<4, half, N>(rows, ahead, x, lane, factor, total);
    if (rows.type == args::kBf16) return add_packed<8, bfloat, N>(rows, ahead, x, lane, factor, total);
    add_packed<8, half, N>(rows, ahead, x, lane, factor, total);
}

// y[r] = row r . x; every lane gets every sum.
template <ushort N>
METAL_FUNC void dots(thread const Rows& rows, thread Ahead<N>& ahead, threadgroup const float* x, ushort lane,
                     thread float* y) {
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = 0;
    add_shares(rows, ahead, x, lane, 1.0f, y);
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = simd_sum(y[r]);
}

// Leaves a SIMD-group's sums where others of its threadgroup find them.
METAL_FUNC void leave(thread const float* y, ushort lane, threadgroup float* sums) {
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r)
        if (lane == r) sums[r] = y[r];
}

}  // namespace lily
