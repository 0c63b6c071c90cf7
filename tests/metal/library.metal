// Metal's functions, one kernel each: test_metal_toolchain_library.py compares them with NumPy.
#include <metal_stdlib>
using namespace metal;

// to[i] = EXPRESSION of x and y.
#define EXPRESSION(NAME, TO, X, Y, ...)                                                                         \
    kernel void NAME(device TO* to [[buffer(0)]], device const X* xs [[buffer(1)]],                             \
                     device const Y* ys [[buffer(2)]], uint i [[thread_position_in_grid]]) {                    \
        const X x = xs[i];                                                                                      \
        const Y y = ys[i];                                                                                      \
        (void)x;                                                                                                \
        (void)y;                                                                                                \
        to[i] = __VA_ARGS__;                                                                                    \
    }
#define UNARY(NAME)                                   \
    EXPRESSION(NAME##_float, float, float, float, NAME(x))     \
    EXPRESSION(NAME##_half, half, half, half, NAME(x))         \
    EXPRESSION(NAME##_float4, float4, float4, float4, NAME(x)) \
    EXPRESSION(NAME##_fast, float, float, float, fast::NAME(x)) \
    EXPRESSION(NAME##_precise, float, float, float, precise::NAME(x))
#define BINARY(NAME)                                              \
    EXPRESSION(NAME##_float, float, float, float, NAME(x, y))     \
    EXPRESSION(NAME##_half, half, half, half, NAME(x, y))         \
    EXPRESSION(NAME##_float4, float4, float4, float4, NAME(x, y))
UNARY(exp) UNARY(exp2) UNARY(exp10) UNARY(log) UNARY(log2) UNARY(log10) UNARY(sin) UNARY(cos) UNARY(tan) UNARY(asin)
UNARY(acos) UNARY(atan) UNARY(sinh) UNARY(cosh) UNARY(tanh) UNARY(asinh) UNARY(acosh) UNARY(atanh) UNARY(sqrt)
UNARY(rsqrt) UNARY(floor) UNARY(ceil) UNARY(trunc) UNARY(rint) UNARY(round) UNARY(fract) UNARY(fabs) UNARY(sinpi)
UNARY(cospi) UNARY(tanpi) UNARY(saturate)
BINARY(pow) BINARY(powr) BINARY(atan2) BINARY(fmod) BINARY(copysign) BINARY(fmin) BINARY(fmax) BINARY(fdim) BINARY(divide)
BINARY(step)

EXPRESSION(fma_float, float, float, float, fma(x, y, x))
EXPRESSION(mix_float, float, float, float, mix(x, y, 0.25f))
EXPRESSION(smoothstep_float, float, float, float, smoothstep(0.5f, 2.0f, x))
EXPRESSION(sign_float, float, float, float, sign(x))
EXPRESSION(clamp_float, float, float, float, clamp(x, -1.0f, 1.0f))
EXPRESSION(fmax3_float, float, float, float, fmax3(x, y, 0.5f))
EXPRESSION(fmin3_float, float, float, float, fmin3(x, y, 0.5f))
EXPRESSION(fmedian3_float, float, float, float, fmedian3(x, y, 0.5f))
EXPRESSION(select_float, float, float, float, select(x, y, x > 1.0f))
EXPRESSION(ldexp_float, float, float, int, ldexp(x, y))
EXPRESSION(nextafter_float, float, float, float, nextafter(x, y))
EXPRESSION(isnan_float, uint, float, float, isnan(x) + 2 * isinf(x) + 4 * isfinite(x) + 8 * signbit(x))
EXPRESSION(isnan_half, uint, half, half, isnan(x) + 2 * isinf(x) + 4 * isfinite(x) + 8 * signbit(x))
EXPRESSION(isnan_bfloat, uint, bfloat, bfloat, isnan(x) + 2 * isinf(x) + 4 * isfinite(x) + 8 * signbit(x))
EXPRESSION(dot_float4, float, float4, float4, dot(x, y))
EXPRESSION(length_float4, float, float4, float4, length(x))
EXPRESSION(distance_float4, float, float4, float4, distance(x, y))
EXPRESSION(normalize_float4, float4, float4, float4, normalize(x))
kernel void sincos_float(device float2* to [[buffer(0)]], device const float* xs [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
    float cosine;
    const float sine = sincos(xs[i], cosine);
    to[i] = float2(sine, cosine);
}
kernel void frexp_float(device float2* to [[buffer(0)]], device const float* xs [[buffer(1)]],
                        uint i [[thread_position_in_grid]]) {
    int exponent;
    const float fraction = frexp(xs[i], exponent);
    to[i] = float2(fraction, exponent);
}
kernel void modf_float(device float2* to [[buffer(0)]], device const float* xs [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
    float whole;
    const float rest = modf(xs[i], whole);
    to[i] = float2(rest, whole);
}

// Integers of every size.
#define INTEGER(NAME, TYPE, ...) EXPRESSION(NAME##_##TYPE, TYPE, TYPE, TYPE, __VA_ARGS__)
#define INTEGERS(NAME, ...)                                                                                      \
    INTEGER(NAME, char, __VA_ARGS__) INTEGER(NAME, uchar, __VA_ARGS__) INTEGER(NAME, short, __VA_ARGS__)         \
    INTEGER(NAME, ushort, __VA_ARGS__) INTEGER(NAME, int, __VA_ARGS__) INTEGER(NAME, uint, __VA_ARGS__)
INTEGERS(min, min(x, y)) INTEGERS(max, max(x, y)) INTEGERS(abs, abs(x)) INTEGERS(popcount, popcount(x))
INTEGERS(clz, clz(x)) INTEGERS(ctz, ctz(x)) INTEGERS(rotate, rotate(x, y)) INTEGERS(reverse_bits, reverse_bits(x))
INTEGERS(addsat, addsat(x, y)) INTEGERS(subsat, subsat(x, y))
INTEGER(median3, int, median3(x, y, 7)) INTEGER(max3, int, max3(x, y, 7)) INTEGER(min3, int, min3(x, y, 7))
INTEGER(mulhi, int, mulhi(x, y)) INTEGER(mulhi, uint, mulhi(x, y))
INTEGER(absdiff, uint, absdiff(x, y)) INTEGER(hadd, ushort, hadd(x, y)) INTEGER(rhadd, ushort, rhadd(x, y))
INTEGER(mad24, uint, mad24(x, y, 5u)) INTEGER(mul24, uint, mul24(x, y))
INTEGER(extract_bits, int, extract_bits(x, 3, 7)) INTEGER(extract_bits, uint, extract_bits(x, 3, 7))
INTEGER(insert_bits, uint, insert_bits(x, y, 3, 7))

// Types that change.
EXPRESSION(float_to_bfloat, bfloat, float, float, bfloat(x))
EXPRESSION(bfloat_to_float, float, bfloat, bfloat, float(x))
EXPRESSION(float_to_half, half, float, float, half(x))
EXPRESSION(half_to_bfloat, bfloat, half, half, static_cast<bfloat>(x))
EXPRESSION(bfloat_sum, bfloat, bfloat, bfloat, x + y)
EXPRESSION(half_products, half, half, half, x * y + x)
EXPRESSION(bits_of_float, uint, float, float, as_type<uint>(x))
EXPRESSION(halves_of_uint, float2, uint, uint, float2(as_type<half2>(x)))
EXPRESSION(uchar4_to_float4, float4, uchar4, uchar4, float4(x))
EXPRESSION(float4_to_uchar4, uchar4, float4, float4, uchar4(x))
EXPRESSION(swizzles, float4, float4, float4, float4(x.wz, y.xy))
EXPRESSION(vector_constructors, float4, float, float, float4(float2(x), y, 1))
EXPRESSION(nibbles, float4, uint, uint, float4(uint4(x, x >> 4, x >> 8, x >> 12) & 0xfu))
struct Item {
    packed_float3 place;
    uchar kind;
};
kernel void packed_types(device float4* to [[buffer(0)]], device const Item* items [[buffer(1)]],
                         device packed_half4* halves [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    const Item item = items[i];
    to[i] = float4(float3(item.place), item.kind);
    halves[i] = packed_half4(half4(to[i]));
}
kernel void matrices(device float4* to [[buffer(0)]], device const float4x4* from [[buffer(1)]],
                     uint i [[thread_position_in_grid]]) {
    const float4x4 m = from[i];
    to[i] = m[0] + m[3] * m[1][2];
}

// Function constants, and what a kernel is told about its place.
constant bool kDoubles [[function_constant(0)]];
constant uint kCount [[function_constant(1)]];
constant float kScale [[function_constant(2)]];
constant bool kScaled = is_function_constant_defined(kScale);
kernel void constants(device float* to [[buffer(0)]], device const float* more [[buffer(1), function_constant(kDoubles)]],
                      uint i [[thread_position_in_grid]]) {
    float x = i < kCount ? 1 : 0;
    if (kDoubles) x += more[i];
    if (kScaled) x *= kScale;
    to[i] = x;
}
struct Place {
    uint values[24];
};
kernel void places(device Place* to [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
                   uint3 size [[threads_per_grid]], uint3 group [[threadgroup_position_in_grid]],
                   ushort3 groups [[threadgroups_per_grid]], uint3 in_group [[thread_position_in_threadgroup]],
                   uint3 threads [[threads_per_threadgroup]], uint3 asked [[dispatch_threads_per_threadgroup]],
                   ushort index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]]) {
    const uint at = (grid.z * size.y + grid.y) * size.x + grid.x;
    const uint values[24] = {grid.x,    grid.y,    grid.z,    size.x,  size.y,  size.z,  group.x, group.y,
                             group.z,   groups.x,  groups.y,  groups.z, in_group.x, in_group.y, in_group.z, threads.x,
                             threads.y, threads.z, asked.x,   asked.y, asked.z, index,   lane,    simd};
    for (uint i = 0; i < 24; ++i) to[at].values[i] = values[i];
}

// Atomics: every thread adds to the same places.
kernel void atomics(device atomic_uint* number [[buffer(0)]], device atomic_int* least [[buffer(1)]],
                    device atomic_float* sum [[buffer(2)]], device atomic_uint* order [[buffer(3)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
    threadgroup atomic_uint local;
    if (t == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&local, t, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) atomic_fetch_add_explicit(number, atomic_load_explicit(&local, memory_order_relaxed), memory_order_relaxed);
    atomic_fetch_max_explicit(number + 1, i, memory_order_relaxed);
    atomic_fetch_min_explicit(least, -int(i), memory_order_relaxed);
    atomic_fetch_or_explicit(number + 2, 1u << (i % 32), memory_order_relaxed);
    atomic_fetch_and_explicit(number + 3, ~(1u << (i % 8)), memory_order_relaxed);
    atomic_fetch_xor_explicit(number + 4, i, memory_order_relaxed);
    atomic_fetch_sub_explicit(number + 5, 2, memory_order_relaxed);
    atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
    atomic_fetch_sub_explicit(sum + 1, 0.25f, memory_order_relaxed);
    const uint place = atomic_fetch_add_explicit(number + 6, 1, memory_order_relaxed);
    atomic_exchange_explicit(order + place, i, memory_order_relaxed);
    uint seen = atomic_load_explicit(number + 7, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(number + 7, &seen, seen + i, memory_order_relaxed, memory_order_relaxed)) {
    }
}
kernel void wide_atomics(device atomic_ulong* number [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    atomic_max_explicit(number, ulong(i) << 33, memory_order_relaxed);
    atomic_min_explicit(number + 1, ulong(i + 5) << 33, memory_order_relaxed);
}
