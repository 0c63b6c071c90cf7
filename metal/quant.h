// Reading weights in every form that they are stored in, and the dot products of rows with a vector in
// threadgroup memory.
#pragma once

#include <metal_stdlib>

#include "args.h"

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

// Adds a lane's share of kRowsOfSimd rows times x (columns) to total. A lane takes every 32nd word of 32
// bits, so that a SIMD-group reads 128 consecutive bytes of a row; sum(q x) and sum(x) of a word come first,
// then its group's scale and bias.
template <ushort kBits>
METAL_FUNC void quantised_share(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x, ushort lane,
                                float factor, thread float* total) {
    constexpr uint kSlots = 32 / kBits;
    constexpr uint kMask = (1u << kBits) - 1u;
    const uint words = m.columns / kSlots;
    const uint groups = m.columns / kGroup;
    device const uint* weight = (device const uint*)w.weight;
    for (uint i = lane; i < words; i += kSimd) {
        float v[kSlots];
        float sum = 0;
        for (uint j = 0; j < kSlots; ++j) {
            v[j] = x[i * kSlots + j] * factor;
            sum += v[j];
        }
        const uint group = i * kSlots / kGroup;
        for (ushort r = 0; r < kRowsOfSimd; ++r) {
            if (r >= rows) break;
            const uint word = weight[(row + r) * words + i];
            float dot = 0;
            for (uint j = 0; j < kSlots; ++j) dot = fma(float((word >> (kBits * j)) & kMask), v[j], dot);
            const uint g = (row + r) * groups + group;
            total[r] += number(w.scales, m.type, g) * dot + number(w.biases, m.type, g) * sum;
        }
    }
}

// total[r] += factor * (W[row + r] . x), this lane's share, for the `rows` first of kRowsOfSimd rows.
METAL_FUNC void row_shares(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x, ushort lane,
                           float factor, thread float* total) {
    if (m.bits == 4) return quantised_share<4>(w, m, row, rows, x, lane, factor, total);
    if (m.bits == 8) return quantised_share<8>(w, m, row, rows, x, lane, factor, total);
    for (uint k = lane; k < m.columns; k += kSimd)
        for (ushort r = 0; r < kRowsOfSimd; ++r)
            if (r < rows) total[r] += number(w.weight, m.type, (row + r) * m.columns + k) * x[k] * factor;
}

// y[r] = W[row + r] . x for the `rows` first of kRowsOfSimd rows; every lane gets every sum.
METAL_FUNC void row_dots(Weights w, args::Matrix m, uint row, uint rows, threadgroup const float* x, ushort lane,
                         thread float* y) {
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = 0;
    row_shares(w, m, row, rows, x, lane, 1.0f, y);
    for (ushort r = 0; r < kRowsOfSimd; ++r) y[r] = simd_sum(y[r]);
}

}  // namespace lily
