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

// Numbers for write_vector: those of a row as they are, and normed.
struct Copied {
    device const float* x;
    METAL_FUNC float4 operator()(uint i) const { return *(device const float4*)(x + i); }
};
struct Normed {
    device const float* x;
    device const float* weight;
    float scale;
    METAL_FUNC float4 operator()(uint i) const {
        return *(device const float4*)(x + i) * scale * *(device const float4*)(weight + i);
    }
};

// What a thread puts first of a row, and its weights: loaded before a matrix's rows, which many wait for.
struct NormInput {
    float4 x[kQuads], weight[kQuads];
};

METAL_FUNC NormInput norm_input(device const float* x, device const float* weight, uint n, bool normed,
                                uint thread_index) {
    NormInput in;
#pragma unroll
    for (ushort q = 0; q < kQuads; ++q) {
        const uint i = 4 * (thread_index * kQuads + q);
        in.x[q] = i < n ? *(device const float4*)(x + i) : float4(0.0f);
        in.weight[q] = i < n && !normed ? *(device const float4*)(weight + i) : float4(1.0f);
    }
    return in;
}

// h = x / rms(x) * weight, a row of n values, as write_vector puts it, by a whole threadgroup; or h = x, if
// that is normed already. Ends with a barrier; returns 1 / rms(x).
METAL_FUNC float norm_row(thread const NormInput& in, device const float* x, device const float* weight,
                          uint n, float epsilon, bool normed, threadgroup float* h,
                          threadgroup float* partial, uint thread_index, uint threads, ushort simd,
                          ushort simds, ushort lane) {
    float scale = 1;
    if (!normed) {
        float squares = 0;
#pragma unroll
        for (ushort q = 0; q < kQuads; ++q) squares += dot(in.x[q], in.x[q]);
        for (uint i = 4 * kQuads * threads + 4 * thread_index; i < n; i += 4 * threads)
            squares += dot(*(device const float4*)(x + i), *(device const float4*)(x + i));
        scale = precise::rsqrt(group_sum(squares, partial, simd, simds, lane) / float(n) + epsilon);
    }
    float4 first[kQuads];
#pragma unroll
    for (ushort q = 0; q < kQuads; ++q) first[q] = in.x[q] * scale * in.weight[q];
    put_quads(h, n, 4 * kQuads * thread_index, first);
    if (normed)
        write_vector(h, n, thread_index + threads, threads, Copied{x});
    else
        write_vector(h, n, thread_index + threads, threads, Normed{x, weight, scale});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return scale;
}

}  // namespace lily
