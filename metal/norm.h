// What kernels do to a row before they multiply it, and the functions that several of them share.
#pragma once

#include "quant.h"

namespace lily {

using namespace metal;

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

METAL_FUNC float silu(float x) { return x * sigmoid(x); }

// The sum of a value over a threadgroup; partial holds one float a SIMD-group. Every thread gets the sum.
METAL_FUNC float group_sum(float value, threadgroup float* partial, ushort simd, ushort simds, ushort lane) {
    const float mine = simd_sum(value);
    if (lane == 0) partial[simd] = mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0;
    for (ushort i = 0; i < simds; ++i) sum += partial[i];
    return sum;
}

// 1 / rms(x), a row of n values, by a whole threadgroup.
METAL_FUNC float norm_scale(device const float* x, uint n, float epsilon, threadgroup float* partial,
                            uint thread_index, uint threads, ushort simd, ushort simds, ushort lane) {
    float squares = 0;
    device const float4* x4 = (device const float4*)x;
    for (uint i = thread_index; i < n / 4; i += threads) squares += dot(x4[i], x4[i]);
    for (uint i = n / 4 * 4 + thread_index; i < n; i += threads) squares += x[i] * x[i];
    return precise::rsqrt(group_sum(squares, partial, simd, simds, lane) / float(n) + epsilon);
}

// h = x / rms(x) * weight, a row of n values, spread in threadgroup memory, by a whole threadgroup; or h =
// x, if that is normed already. Ends with a barrier.
METAL_FUNC void norm_row(device const float* x, device const float* weight, uint n, float epsilon,
                         bool normed, threadgroup float* h, threadgroup float* partial, uint thread_index,
                         uint threads, ushort simd, ushort simds, ushort lane) {
    if (normed) {
        for (uint i = thread_index; i < n; i += threads) h[args::spread(i)] = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        return;
    }
    const float scale = norm_scale(x, n, epsilon, partial, thread_index, threads, simd, simds, lane);
    device const float4* x4 = (device const float4*)x;
    for (uint i = thread_index; i < n / 4; i += threads)
        *(threadgroup float4*)(h + args::spread(4 * i)) = x4[i] * scale * ((device const float4*)weight)[i];
    for (uint i = n / 4 * 4 + thread_index; i < n; i += threads)
        h[args::spread(i)] = x[i] * scale * weight[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace lily
