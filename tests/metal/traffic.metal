// Kernels whose traffic is known: test_metal_toolchain_faults.py counts it.
#include <metal_stdlib>
using namespace metal;

kernel void copy(device float* to [[buffer(0)]], device const float* from [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
    to[i] = from[i];
}

// 32 lanes read a column of 32 rows.
kernel void copy_by_columns(device float* to [[buffer(0)]], device const float* from [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
    to[i] = from[(i % 32) * 32 + i / 32];
}

kernel void copy_vectors(device float4* to [[buffer(0)]], device const float4* from [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
    if (i < 256) to[i] = from[i];
}

kernel void broadcast(device float* to [[buffer(0)]], device const float* from [[buffer(1)]],
                      uint i [[thread_position_in_grid]]) {
    to[i] = from[7];
}

kernel void every_third(device float* to [[buffer(0)]], device const float* from [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
    if (i % 3 == 0) to[i] = from[i];
}
