// What `python -m tools.metal.speed` measures, with the products of tiles.metal.
#include <metal_stdlib>
using namespace metal;

kernel void shuffles(device uint* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
    uint v = i;
    for (uint k = 0; k < count; ++k) v = simd_shuffle_xor(v, 1) + 1;
    out[i] = v;
}
kernel void sums(device float* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
    float v = i;
    for (uint k = 0; k < count; ++k) v = simd_sum(v) * 0.03125f;
    out[i] = v;
}
kernel void barriers(device uint* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
    uint v = i;
    for (uint k = 0; k < count; ++k) {
        threadgroup_barrier(mem_flags::mem_none);
        v += k;
    }
    out[i] = v;
}

struct Shape {
    uint rows;
    uint columns;
};
// y = W x for W of four bits in groups of 64: a SIMD-group takes four rows, a lane 16 numbers a step.
kernel void matvec(device const uint2* words [[buffer(0)]], device const bfloat* scales [[buffer(1)]],
                   device const bfloat* biases [[buffer(2)]], device const bfloat* x [[buffer(3)]],
                   device float* y [[buffer(4)]], constant Shape& shape [[buffer(5)]],
                   uint group [[threadgroup_position_in_grid]], ushort simd [[simdgroup_index_in_threadgroup]],
                   ushort simds [[simdgroups_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
    const uint row = (group * simds + simd) * 4, steps = shape.columns / 16, groups = shape.columns / 64;
    float total[4] = {0, 0, 0, 0};
    for (uint k = lane; k < steps; k += 32) {
        float v[16];
        float sum = 0;
        for (ushort i = 0; i < 16; ++i) {
            v[i] = float(x[k * 16 + i]);
            sum += v[i];
        }
        for (ushort r = 0; r < 4; ++r) {
            const uint2 q = words[(row + r) * steps + k];
            float dot = 0;
            for (ushort i = 0; i < 8; ++i) {
                dot += v[i] * float((q.x >> (4 * i)) & 0xf);
                dot += v[i + 8] * float((q.y >> (4 * i)) & 0xf);
            }
            const uint g = (row + r) * groups + k / 4;
            total[r] += float(scales[g]) * dot + float(biases[g]) * sum;
        }
    }
    for (ushort r = 0; r < 4; ++r) {
        const float sum = simd_sum(total[r]);
        if (lane == 0) y[row + r] = sum;
    }
}
