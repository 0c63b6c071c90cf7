// Weights as numbers: rows of the embedding, and whole matrices.
#include "quant.h"

using namespace lily;

// x[t] = E[tokens[t]]. A threadgroup takes one token, a thread every 256th column. A draw that failed left a
// negative token, which somebody reports once the pass that took it is done.
[[kernel]] void embed(constant args::Embed& a          [[buffer(0)]],
                      device const int* tokens         [[buffer(1)]],  // (T)
                      device const uchar* weight       [[buffer(2)]],  // (V, D) as stored
                      device const uchar* scales       [[buffer(3)]],
                      device const uchar* biases       [[buffer(4)]],
                      device float* x                  [[buffer(5)]],  // (T, D)
                      uint t                           [[threadgroup_position_in_grid]],
                      uint thread_index                [[thread_index_in_threadgroup]],
                      uint threads                     [[threads_per_threadgroup]]) {
    const Weights w = {weight, scales, biases};
    const uint columns = a.embedding.columns, row = uint(max(tokens[t], 0));
    for (uint k = thread_index; k < columns; k += threads)
        x[t * columns + k] = element(w, a.embedding, row, k);
}

// What a dispatch without work takes, for bench/limits.py.
[[kernel]] void nothing(constant args::Embed&  [[buffer(0)]],
                        device float*          [[buffer(1)]]) {}

// out = W in bfloat, as a slab would hold it: for comparison with products that never write it down. A thread
// takes a word.
[[kernel]] void expand(constant args::Matrix& m    [[buffer(0)]],
                       device const uchar* weight  [[buffer(1)]],  // (N, K) in 4 or 8 bits
                       device const uchar* scales  [[buffer(2)]],
                       device const uchar* biases  [[buffer(3)]],
                       device bfloat* out          [[buffer(4)]],  // (N, K)
                       uint i                      [[thread_position_in_grid]]) {
    const uint slots = 32 / m.bits, at = i * slots;
    if (at >= m.rows * m.columns) return;
    const float scale = number(scales, m.type, at / kGroup), bias = number(biases, m.type, at / kGroup);
    const uint word = ((device const uint*)weight)[i];
    for (uint j = 0; j < slots; ++j)
        out[at + j] = bfloat(fma(scale, float((word >> (m.bits * j)) & ((1u << m.bits) - 1u)), bias));
}
