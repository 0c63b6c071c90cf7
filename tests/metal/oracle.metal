// The operation of MLX's rms_norm in our own words, to be compared with what Apple's compiler made of theirs: a row a
// group, four numbers a thread, sums by lanes and then by SIMD-groups; rounded to T before the weight multiplies.
#include <metal_stdlib>
using namespace metal;

kernel void rms_norm(device const bfloat* x [[buffer(0)]], device const bfloat* weight [[buffer(1)]],
                     device bfloat* out [[buffer(2)]], constant float& epsilon [[buffer(3)]],
                     constant uint& columns [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[32];
    const ulong start = ulong(row) * columns + index * 4;
    float sum = 0;
    for (uint i = 0; i < 4; ++i) {
        const float v = float(x[start + i]);
        sum += v * v;
    }
    sum = simd_sum(sum);
    if (simd == 0) sums[lane] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 0) sums[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float scale = precise::rsqrt(simd_sum(sums[lane]) / float(columns) + epsilon);
    for (uint i = 0; i < 4; ++i)
        out[start + i] = weight[index * 4 + i] * bfloat(float(x[start + i]) * scale);
}
