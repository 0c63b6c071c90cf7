// Names of Apple's library that it does not document and public kernels use all the same. Only with
// -DMSL_UNDOCUMENTED, as are the layout in simdgroup_matrix.h and thread_elements(): our own kernels have
// none of it.
#pragma once

#define __METAL_PRECISE_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_MAYBE_FAST_MATH__ 2

#define MSL_INTERNAL_UNARY(NAME)                \
    MSL_FN float __metal_##NAME(float x, int) { \
        return metal::NAME(x);                  \
    }
#define MSL_INTERNAL_BINARY(NAME)                        \
    MSL_FN float __metal_##NAME(float x, float y, int) { \
        return metal::NAME(x, y);                        \
    }
#define MSL_INTERNAL_TERNARY(NAME)                                \
    MSL_FN float __metal_##NAME(float x, float y, float z, int) { \
        return metal::NAME(x, y, z);                              \
    }
MSL_INTERNAL_UNARY(acos)
MSL_INTERNAL_UNARY(acosh)
MSL_INTERNAL_UNARY(asin)
MSL_INTERNAL_UNARY(asinh)
MSL_INTERNAL_UNARY(atan)
MSL_INTERNAL_UNARY(atanh)
MSL_INTERNAL_UNARY(ceil)
MSL_INTERNAL_UNARY(cos)
MSL_INTERNAL_UNARY(cosh)
MSL_INTERNAL_UNARY(cospi)
MSL_INTERNAL_UNARY(exp)
MSL_INTERNAL_UNARY(exp10)
MSL_INTERNAL_UNARY(exp2)
MSL_INTERNAL_UNARY(fabs)
MSL_INTERNAL_UNARY(floor)
MSL_INTERNAL_UNARY(fract)
MSL_INTERNAL_UNARY(log)
MSL_INTERNAL_UNARY(log10)
MSL_INTERNAL_UNARY(log2)
MSL_INTERNAL_UNARY(rint)
MSL_INTERNAL_UNARY(round)
MSL_INTERNAL_UNARY(rsqrt)
MSL_INTERNAL_UNARY(sin)
MSL_INTERNAL_UNARY(sinh)
MSL_INTERNAL_UNARY(sinpi)
MSL_INTERNAL_UNARY(sqrt)
MSL_INTERNAL_UNARY(tan)
MSL_INTERNAL_UNARY(tanh)
MSL_INTERNAL_UNARY(tanpi)
MSL_INTERNAL_UNARY(trunc)
MSL_INTERNAL_BINARY(atan2)
MSL_INTERNAL_BINARY(divide)
MSL_INTERNAL_BINARY(fmax)
MSL_INTERNAL_BINARY(fmin)
MSL_INTERNAL_BINARY(fmod)
MSL_INTERNAL_BINARY(pow)
MSL_INTERNAL_BINARY(powr)
MSL_INTERNAL_TERNARY(fmax3)
MSL_INTERNAL_TERNARY(fmin3)
MSL_INTERNAL_TERNARY(fmedian3)
MSL_FN float __metal_fma(float a, float b, float c) {
    return metal::fma(a, b, c);
}
MSL_FN float __metal_ldexp(float x, int k, int) {
    return metal::ldexp(x, k);
}
MSL_FN float __metal_nextafter(float x, float y) {
    return metal::nextafter(x, y);
}
MSL_FN float __metal_frexp(float x, thread int* exponent) {
    return metal::frexp(x, *exponent);
}
MSL_FN ushort __metal_get_simdgroup_size(ushort) {
    return 32;
}
MSL_FN ushort __metal_get_thread_index_in_simdgroup(ushort) {
    return (ushort)msl_current_thread()->lane;
}

#define MSL_INTERNAL_SIMD(NAME)             \
    template <class T>                      \
    MSL_FN T __metal_simd_##NAME(T value) { \
        return metal::simd_##NAME(value);   \
    }
#define MSL_INTERNAL_BITS(NAME)                                \
    template <class T>                                         \
    MSL_FN T __metal_simd_##NAME(T value) {                    \
        if constexpr (metal::msl_is_integer_v<T>)              \
            return metal::simd_##NAME(value);                  \
        else                                                   \
            return value; /* named for floats, never called */ \
    }
#define MSL_INTERNAL_SHUFFLE(NAME)                       \
    template <class T>                                   \
    MSL_FN T __metal_simd_##NAME(T value, ushort lane) { \
        return metal::simd_##NAME(value, lane);          \
    }
#define MSL_INTERNAL_FILL(NAME)                                           \
    template <class T>                                                    \
    MSL_FN T __metal_simd_##NAME(T value, T fill, ushort delta, ushort) { \
        return metal::simd_##NAME(value, fill, delta);                    \
    }
MSL_INTERNAL_SIMD(sum)
MSL_INTERNAL_SIMD(product)
MSL_INTERNAL_SIMD(max)
MSL_INTERNAL_SIMD(min)
MSL_INTERNAL_BITS(and)
MSL_INTERNAL_BITS(or)
MSL_INTERNAL_BITS(xor)
MSL_INTERNAL_SIMD(prefix_inclusive_sum)
MSL_INTERNAL_SIMD(prefix_exclusive_sum)
MSL_INTERNAL_SIMD(prefix_inclusive_product)
MSL_INTERNAL_SIMD(prefix_exclusive_product)
MSL_INTERNAL_SHUFFLE(broadcast)
MSL_INTERNAL_SHUFFLE(shuffle)
MSL_INTERNAL_SHUFFLE(shuffle_down)
MSL_INTERNAL_SHUFFLE(shuffle_up)
MSL_INTERNAL_SHUFFLE(shuffle_xor)
MSL_INTERNAL_SHUFFLE(shuffle_rotate_down)
MSL_INTERNAL_SHUFFLE(shuffle_rotate_up)
MSL_INTERNAL_FILL(shuffle_and_fill_up)
MSL_INTERNAL_FILL(shuffle_and_fill_down)

namespace metal {
template <class... T>
using _disjunction = disjunction<T...>;
template <class... T>
using _conjunction = conjunction<T...>;
struct os_log {
    constexpr os_log(const constant char*, const constant char*) __constant {}
    template <class... A>
    MSL_FN void log_debug(const constant char*, A...) const constant {}
    template <class... A>
    MSL_FN void log_info(const constant char*, A...) const constant {}
    template <class... A>
    MSL_FN void log_error(const constant char*, A...) const constant {}
    template <class... A>
    MSL_FN void log_default(const constant char*, A...) const constant {}
};
template <class T>
struct _atomic {
    T msl_value;
};
}  // namespace metal
