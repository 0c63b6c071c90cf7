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

// Adds a lane's share of kRowsOfSimd rows times x (columns) to total. The loads of kAhead words of each row
// are under way at once, since memory answers late; what lies past the last row or word repeats it and counts
// for nothing: a branch round a load makes the next one wait. A lane takes every 32nd word of 32 bits, so
// that a SIMD-group reads 128 consecutive bytes of a row; sum(q x) and sum(x) of a word come first, then its
// group's scale and bias. Fields stay where they are in their half of the word, times a power of two, which x
// is divided by beforehand.
template <ushort kBits, class T, ushort kAhead>
METAL_FUNC void quantised_share(Weights w, uint columns, uint row, uint rows, threadgroup const float* x,
                                ushort lane, float factor, thread float* total) {
    constexpr ushort kSlots = 32 / kBits, kOfHalf = kSlots / 2;
    constexpr uint kMask = (1u << kBits) - 1u;
    const uint words = columns / kSlots, groups = columns / kGroup;
    device const uint* weight[kRowsOfSimd];
    device const T* scales[kRowsOfSimd];
    device const T* biases[kRowsOfSimd];
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) {
        const uint at = row + min(uint(r), rows - 1);
        weight[r] = (device const uint*)w.weight + at * words;
        scales[r] = (device const T*)w.scales + at * groups;
        biases[r] = (device const T*)w.biases + at * groups;
    }
    for (uint begin = lane; begin < words + lane; begin += kAhead * kSimd) {
        uint word[kAhead][kRowsOfSimd];
        T scale[kAhead][kRowsOfSimd], bias[kAhead][kRowsOfSimd];
#pragma unroll
        for (ushort a = 0; a < kAhead; ++a) {
            const uint i = min(begin + a * kSimd, words - 1), group = i * kSlots / kGroup;
#pragma unroll
            for (ushort r = 0; r < kRowsOfSimd; ++r) {
                word[a][r] = twin::load(weight[r], i);
                scale[a][r] = twin::load(scales[r], group);
                bias[a][r] = twin::load(biases[r], group);
            }
        }
#pragma unroll
        for (ushort a = 0; a < kAhead; ++a) {
            const uint i = begin + a * kSimd;
            float v[kSlots];
            float sum = 0;
#pragma unroll
            for (ushort j = 0; j < kSlots; j += twin::step(4, kSlots)) {
                float4 four = 0;
                if (i < words) four = *(threadgroup const float4*)(x + i * kSlots + j) * factor;
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
                for (ushort j = 0; j < kSlots; j += twin::step(1, kSlots))
                    dot = fma(field(word[a][r] >> (j / kOfHalf * 16), kMask << (kBits * (j % kOfHalf))), v[j],
                              dot);
                total[r] += float(scale[a][r]) * dot + float(bias[a][r]) * sum;
            }
        }
    }
}

template <ushort kBits, ushort kAhead>
METAL_FUNC void quantised_share(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x,
                                ushort lane, float factor, thread float* total) {
    if (m.type == args::kBf16)
        return quantised_share<kBits, bfloat, kAhead>(w, m.columns, row, rows, x, lane, factor, total);
    if (m.type == args::kF16)
        return quantised_share<kBits, half, kAhead>(w, m.columns, row, rows, x, lane, factor, total);
    quantised_share<kBits, float, kAhead>(w, m.columns, row, rows, x, lane, factor, total);
}

// total[r] += factor * (W[row + r] . x), this lane's share, for the `rows` first of kRowsOfSimd rows.
METAL_FUNC void row_shares(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x,
                           ushort lane, float factor, thread float* total) {
    if (m.bits == 4 && m.columns <= 512)
        return quantised_share<4, 2>(w, m, row, rows, x, lane, factor, total);
    if (m.bits == 4) return quantised_share<4, 4>(w, m, row, rows, x, lane, factor, total);
    if (m.bits == 8) return quantised_share<8, 4>(w, m, row, rows, x, lane, factor, total);
    for (uint k = lane; k < m.columns; k += kSimd)
        for (ushort r = 0; r < kRowsOfSimd; ++r)
            if (r < rows) total[r] += number(w.weight, m.type, (row + r) * m.columns + k) * x[k] * factor;
}

// y[r] = W[row + r] . x for the `rows` first of kRowsOfSimd rows; every lane gets every sum.
METAL_FUNC void row_dots(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x,
                         ushort lane, thread float* y) {
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = 0;
    row_shares(w, m, row, rows, x, lane, 1.0f, y);
#pragma unroll
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = simd_sum(y[r]);
}

}  // namespace lily
