// What the lanes of a SIMD-group and the threads of a group do together, one kernel each.
#include <metal_stdlib>
using namespace metal;

#define LANES(NAME, T, ...)                                                                                       \
    kernel void NAME##_##T(device T* to [[buffer(0)]], device const T* xs [[buffer(1)]],                          \
                           uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {         \
        const T x = xs[i];                                                                                        \
        const T twice = x + x;                                                                                    \
        (void)lane, (void)twice;                                                                                  \
        to[i] = __VA_ARGS__;                                                                                      \
    }
#define NUMBERS(NAME, ...)                                                                                   \
    LANES(NAME, float, __VA_ARGS__) LANES(NAME, half, __VA_ARGS__) LANES(NAME, int, __VA_ARGS__)             \
    LANES(NAME, uint, __VA_ARGS__) LANES(NAME, ushort, __VA_ARGS__) LANES(NAME, float4, __VA_ARGS__)
#define WHOLE(NAME, ...) LANES(NAME, int, __VA_ARGS__) LANES(NAME, uint, __VA_ARGS__) LANES(NAME, ushort, __VA_ARGS__)
NUMBERS(sum, simd_sum(x)) NUMBERS(max, simd_max(x)) NUMBERS(min, simd_min(x))
LANES(product, float, simd_product(x)) LANES(product, uint, simd_product(x))
WHOLE(and, simd_and(x)) WHOLE(or, simd_or(x)) WHOLE(xor, simd_xor(x))
NUMBERS(inclusive_sum, simd_prefix_inclusive_sum(x)) NUMBERS(exclusive_sum, simd_prefix_exclusive_sum(x))
LANES(inclusive_product, float, simd_prefix_inclusive_product(x))
LANES(exclusive_product, float, simd_prefix_exclusive_product(x))
NUMBERS(shuffle, simd_shuffle(x, ushort((lane * 7 + 3) % 32))) NUMBERS(broadcast, simd_broadcast(x, 13))
NUMBERS(broadcast_first, simd_broadcast_first(x)) NUMBERS(shuffle_xor, simd_shuffle_xor(x, 5))
NUMBERS(rotate_down, simd_shuffle_rotate_down(x, 3)) NUMBERS(rotate_up, simd_shuffle_rotate_up(x, 3))
NUMBERS(fill_down, simd_shuffle_and_fill_down(x, twice, 3)) NUMBERS(fill_up, simd_shuffle_and_fill_up(x, twice, 3))
// Metal says nothing of lanes whose source lies outside: they take no part.
LANES(shuffle_down, float, lane < 29 ? simd_shuffle_down(x, 3) : simd_shuffle_down(x, 3) * 0)
LANES(shuffle_up, float, lane >= 3 ? simd_shuffle_up(x, 3) : simd_shuffle_up(x, 3) * 0)
LANES(ballot, uint, uint(ulong(simd_ballot(x % 3 == 0))))
LANES(any, uint, simd_any(x % 31 == 0)) LANES(all, uint, simd_all(x != 77))
LANES(active, uint, uint(ulong(simd_active_threads_mask()))) LANES(is_first, uint, simd_is_first())
NUMBERS(quad_sum, quad_sum(x)) NUMBERS(quad_max, quad_max(x)) NUMBERS(quad_min, quad_min(x))
LANES(quad_product, float, quad_product(x)) NUMBERS(quad_broadcast, quad_broadcast(x, 2))
NUMBERS(quad_shuffle, quad_shuffle(x, ushort((lane + 1) % 4))) NUMBERS(quad_shuffle_xor, quad_shuffle_xor(x, 1))

// A reduction over a whole group, as kernels do it, and one after some lanes have returned.
kernel void group_sum(device float* to [[buffer(0)]], device const float* xs [[buffer(1)]],
                      threadgroup float* partial [[threadgroup(0)]], uint i [[thread_position_in_grid]],
                      uint group [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
                      ushort simd [[simdgroup_index_in_threadgroup]], ushort simds [[simdgroups_per_threadgroup]]) {
    const float sum = simd_sum(xs[i]);
    if (lane == 0) partial[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float all = simd_sum(lane < simds ? partial[lane] : 0.0f);
    if (lane == 0 && simd == 0) to[group] = all;
}
kernel void sum_of_those_left(device float* to [[buffer(0)]], device const float* xs [[buffer(1)]],
                              uint i [[thread_position_in_grid]], ushort lane [[thread_index_in_simdgroup]]) {
    if (lane >= 20) return;
    to[i] = simd_sum(xs[i]);
}
// Values go round a ring of all threads, one step a barrier.
kernel void ring(device uint* to [[buffer(0)]], constant uint& steps [[buffer(1)]],
                 uint t [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    threadgroup uint s[1024];
    s[t] = t;
    for (uint k = 0; k < steps; ++k) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint x = s[(t + 1) % threads];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        s[t] = x;
    }
    to[t] = s[t];
}
