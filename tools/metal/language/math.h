// Metal's mathematics. Functions of floats take float and half, never bfloat, as Metal's do. The simulator's
// fast:: and precise:: are the same functions: what a device's fast ones lose is not simulated.
#pragma once

namespace metal {
template <class T>
constant constexpr const bool msl_is_math = msl_is_float_v<T> && !is_same_v<msl_element<T>, bfloat>;
#define MSL_MATH template <class T, class = enable_if_t<msl_is_math<T>>>
#define MSL_ARITHMETIC template <class T, class = enable_if_t<is_arithmetic_v<msl_element<T>>>>
#define MSL_INTEGER template <class T, class = enable_if_t<msl_is_integer_v<T>>>

// Applies a function of one component to every component.
template <class T, class F>
MSL_FN constexpr T msl_each(T x, F f) {
    if constexpr (!is_vector_v<T>)
        return (T)f(x);
    else {
        T r{};
        for (int i = 0; i < msl_shape<T>::count; ++i) r[i] = (msl_element<T>)f(x[i]);
        return r;
    }
}
template <class T, class F>
MSL_FN constexpr T msl_each(T x, T y, F f) {
    if constexpr (!is_vector_v<T>)
        return (T)f(x, y);
    else {
        T r{};
        for (int i = 0; i < msl_shape<T>::count; ++i) r[i] = (msl_element<T>)f(x[i], y[i]);
        return r;
    }
}

// One component, in float; half goes through float.
MSL_FN float msl_exp(float x) {
#if MSL_CUDA
    return msl_special_exp(x);
#else
    return __builtin_elementwise_exp(x);
#endif
}
MSL_FN float msl_exp2(float x) {
#if MSL_CUDA
    return msl_special_exp2(x);
#else
    return __builtin_elementwise_exp2(x);
#endif
}
MSL_FN float msl_exp10(float x) {
    return __builtin_elementwise_exp10(x);
}
MSL_FN float msl_log(float x) {
#if MSL_CUDA
    return msl_special_log(x);
#else
    return __builtin_elementwise_log(x);
#endif
}
MSL_FN float msl_log2(float x) {
#if MSL_CUDA
    return msl_special_log2(x);
#else
    return __builtin_elementwise_log2(x);
#endif
}
MSL_FN float msl_log10(float x) {
    return __builtin_elementwise_log10(x);
}
MSL_FN float msl_sin(float x) {
    return __builtin_elementwise_sin(x);
}
MSL_FN float msl_cos(float x) {
    return __builtin_elementwise_cos(x);
}
MSL_FN float msl_tan(float x) {
    return __builtin_elementwise_tan(x);
}
MSL_FN float msl_asin(float x) {
    return __builtin_elementwise_asin(x);
}
MSL_FN float msl_acos(float x) {
    return __builtin_elementwise_acos(x);
}
MSL_FN float msl_atan(float x) {
    return __builtin_elementwise_atan(x);
}
MSL_FN float msl_sinh(float x) {
    return __builtin_elementwise_sinh(x);
}
MSL_FN float msl_cosh(float x) {
    return __builtin_elementwise_cosh(x);
}
MSL_FN float msl_tanh(float x) {
    return __builtin_elementwise_tanh(x);
}
MSL_FN float msl_asinh(float x) {
    return msl_runtime_asinh(x);
}
MSL_FN float msl_acosh(float x) {
    return msl_runtime_acosh(x);
}
MSL_FN float msl_atanh(float x) {
    return msl_runtime_atanh(x);
}
MSL_FN float msl_sqrt(float x) {
    return __builtin_elementwise_sqrt(x);
}
MSL_FN float msl_rsqrt(float x) {
    return 1.0f / __builtin_elementwise_sqrt(x);
}
MSL_FN float msl_floor(float x) {
    return __builtin_elementwise_floor(x);
}
MSL_FN float msl_ceil(float x) {
    return __builtin_elementwise_ceil(x);
}
MSL_FN float msl_trunc(float x) {
    return __builtin_elementwise_trunc(x);
}
MSL_FN float msl_rint(float x) {
    return __builtin_elementwise_roundeven(x);
}
MSL_FN float msl_round(float x) {
    return __builtin_elementwise_round(x);
}
MSL_FN float msl_fabs(float x) {
    return __builtin_elementwise_abs(x);
}
// Below one, also where x is a small negative number and x - floor(x) rounds to one.
MSL_FN float msl_fract(float x) {
    const float f = x - msl_floor(x);
    return f >= 1.0f ? 0.99999994f : f;
}
MSL_FN float msl_sinpi(float x) {
    return msl_runtime_sinpi(x);
}
MSL_FN float msl_cospi(float x) {
    return msl_runtime_cospi(x);
}
MSL_FN float msl_tanpi(float x) {
    return msl_runtime_tanpi(x);
}
MSL_FN float msl_pow(float x, float y) {
    return __builtin_elementwise_pow(x, y);
}
MSL_FN float msl_atan2(float y, float x) {
    return __builtin_elementwise_atan2(y, x);
}
MSL_FN float msl_fmod(float x, float y) {
    return __builtin_elementwise_fmod(x, y);
}
MSL_FN float msl_copysign(float x, float y) {
    return __builtin_elementwise_copysign(x, y);
}
MSL_FN float msl_fmin(float x, float y) {
    return x != x ? y : y != y ? x : x < y ? x : y;
}
MSL_FN float msl_fmax(float x, float y) {
    return x != x ? y : y != y ? x : x > y ? x : y;
}
MSL_FN float msl_fdim(float x, float y) {
    return x > y ? x - y : 0.0f;
}
MSL_FN float msl_divide(float x, float y) {
    return x / y;
}

// Takes bfloat only to refuse it: its implicit conversion to float would choose one otherwise.
#define MSL_OTHER_MATH \
    template <class T, class = enable_if_t<msl_is_float_v<T> && (is_vector_v<T> || is_same_v<T, bfloat>)>>
#define MSL_UNARY(NAME)                                                                          \
    MSL_FN float NAME(float x) {                                                                 \
        return msl_##NAME(x);                                                                    \
    }                                                                                            \
    MSL_FN half NAME(half x) {                                                                   \
        return (half)msl_##NAME((float)x);                                                       \
    }                                                                                            \
    MSL_OTHER_MATH MSL_FN T NAME(T x) {                                                          \
        static_assert(msl_is_math<T>, #NAME " takes float and half: write " #NAME "(float(x))"); \
        return msl_each(x, [](msl_element<T> v) { return msl_##NAME((float)v); });               \
    }
#define MSL_BINARY(NAME)                                                                                    \
    MSL_FN float NAME(float x, float y) {                                                                   \
        return msl_##NAME(x, y);                                                                            \
    }                                                                                                       \
    MSL_FN half NAME(half x, half y) {                                                                      \
        return (half)msl_##NAME((float)x, (float)y);                                                        \
    }                                                                                                       \
    MSL_OTHER_MATH MSL_FN T NAME(T x, T y) {                                                                \
        static_assert(msl_is_math<T>, #NAME " takes float and half: write " #NAME "(float(x), float(y))");  \
        return msl_each(x, y,                                                                               \
                        [](msl_element<T> a, msl_element<T> b) { return msl_##NAME((float)a, (float)b); }); \
    }
MSL_FN float msl_powr(float x, float y) {
    return msl_pow(x, y);
}
#define MSL_FUNCTIONS                                                                                   \
    MSL_UNARY(exp)                                                                                      \
    MSL_UNARY(exp2)                                                                                     \
    MSL_UNARY(exp10)                                                                                    \
    MSL_UNARY(log) MSL_UNARY(log2) MSL_UNARY(log10) MSL_UNARY(sin) MSL_UNARY(cos) MSL_UNARY(tan)        \
        MSL_UNARY(asin) MSL_UNARY(acos) MSL_UNARY(atan) MSL_UNARY(sinh) MSL_UNARY(cosh) MSL_UNARY(tanh) \
            MSL_UNARY(asinh) MSL_UNARY(acosh) MSL_UNARY(atanh) MSL_UNARY(sqrt) MSL_UNARY(rsqrt)         \
                MSL_UNARY(floor) MSL_UNARY(ceil) MSL_UNARY(trunc) MSL_UNARY(rint) MSL_UNARY(round)      \
                    MSL_UNARY(fract) MSL_UNARY(fabs) MSL_UNARY(sinpi) MSL_UNARY(cospi) MSL_UNARY(tanpi) \
                        MSL_BINARY(pow) MSL_BINARY(powr) MSL_BINARY(atan2) MSL_BINARY(fmod)             \
                            MSL_BINARY(copysign) MSL_BINARY(fmin) MSL_BINARY(fmax) MSL_BINARY(fdim)     \
                                MSL_BINARY(divide) MSL_MATH MSL_FN T                                    \
                                sincos(T x, thread T& cosine) {                                         \
        cosine = cos(x);                                                                                \
        return sin(x);                                                                                  \
    }                                                                                                   \
    MSL_MATH MSL_FN T saturate(T x) {                                                                   \
        return fmin(fmax(x, T(0)), T(1));                                                               \
    }                                                                                                   \
    MSL_MATH MSL_FN T fmax3(T a, T b, T c) {                                                            \
        return fmax(a, fmax(b, c));                                                                     \
    }                                                                                                   \
    MSL_MATH MSL_FN T fmin3(T a, T b, T c) {                                                            \
        return fmin(a, fmin(b, c));                                                                     \
    }                                                                                                   \
    MSL_MATH MSL_FN T fmedian3(T a, T b, T c) {                                                         \
        return fmax(fmin(a, b), fmin(fmax(a, b), c));                                                   \
    }
MSL_FUNCTIONS
namespace fast {
MSL_FUNCTIONS
}
namespace precise {
MSL_FUNCTIONS
}

MSL_MATH MSL_FN T fma(T a, T b, T c) {
    return __builtin_elementwise_fma(a, b, c);
}
MSL_FN float ldexp(float x, int k) {
    return msl_runtime_ldexp(x, k);
}
MSL_FN float frexp(float x, thread int& exponent) {
    return msl_runtime_frexp(x, &exponent);
}
MSL_FN float modf(float x, thread float& whole) {
    whole = trunc(x);
    return copysign(x - whole, x);
}
MSL_FN float nextafter(float x, float y) {
    return msl_runtime_nextafter(x, y);
}
MSL_MATH MSL_FN T mix(T x, T y, T a) {
    return x + (y - x) * a;
}
template <class T, int N>
MSL_FN vec<T, N> mix(vec<T, N> x, vec<T, N> y, T a) {
    return x + (y - x) * a;
}
MSL_MATH MSL_FN T step(T edge, T x) {
    return msl_each(edge, x, [](msl_element<T> e, msl_element<T> v) { return v < e ? 0.0f : 1.0f; });
}
MSL_MATH MSL_FN T smoothstep(T low, T high, T x) {
    const T t = saturate((x - low) / (high - low));
    return t * t * (T(3) - T(2) * t);
}
MSL_MATH MSL_FN T sign(T x) {
    return msl_each(x, [](msl_element<T> v) { return v > 0 ? 1.0f : v < 0 ? -1.0f : (float)v; });
}

// What kind of number. bfloat has these in Metal too.
#define MSL_CLASSIFY(T, BITS, MAGNITUDE, INFINITE)                     \
    MSL_FN bool isnan(T x) {                                           \
        return (as_type<BITS>(x) & MAGNITUDE) > INFINITE;              \
    }                                                                  \
    MSL_FN bool isinf(T x) {                                           \
        return (as_type<BITS>(x) & MAGNITUDE) == INFINITE;             \
    }                                                                  \
    MSL_FN bool isfinite(T x) {                                        \
        return (as_type<BITS>(x) & MAGNITUDE) < INFINITE;              \
    }                                                                  \
    MSL_FN bool signbit(T x) {                                         \
        return (as_type<BITS>(x) & ~MAGNITUDE & (MAGNITUDE + 1)) != 0; \
    }
MSL_CLASSIFY(float, uint, 0x7fffffffu, 0x7f800000u)
MSL_CLASSIFY(half, ushort, 0x7fff, 0x7c00)
MSL_CLASSIFY(bfloat, ushort, 0x7fff, 0x7f80)

// Both arguments of one type: Metal finds mixed ones ambiguous.
MSL_ARITHMETIC MSL_FN constexpr T max(T a, T b) {
    return msl_each(a, b, [](msl_element<T> x, msl_element<T> y) { return x != x ? y : x < y ? y : x; });
}
MSL_ARITHMETIC MSL_FN constexpr T min(T a, T b) {
    return msl_each(a, b, [](msl_element<T> x, msl_element<T> y) { return x != x ? y : y < x ? y : x; });
}
template <class T, int N>
MSL_FN constexpr vec<T, N> max(vec<T, N> a, T b) {
    return max(a, (vec<T, N>)(b));
}
template <class T, int N>
MSL_FN constexpr vec<T, N> min(vec<T, N> a, T b) {
    return min(a, (vec<T, N>)(b));
}
MSL_ARITHMETIC MSL_FN constexpr T max3(T a, T b, T c) {
    return max(a, max(b, c));
}
MSL_ARITHMETIC MSL_FN constexpr T min3(T a, T b, T c) {
    return min(a, min(b, c));
}
MSL_ARITHMETIC MSL_FN constexpr T median3(T a, T b, T c) {
    return max(min(a, b), min(max(a, b), c));
}
MSL_ARITHMETIC MSL_FN constexpr T clamp(T x, T low, T high) {
    return min(max(x, low), high);
}
template <class T, int N>
MSL_FN constexpr vec<T, N> clamp(vec<T, N> x, T low, T high) {
    return min(max(x, (vec<T, N>)(low)), (vec<T, N>)(high));
}
MSL_ARITHMETIC MSL_FN constexpr T abs(T a) {
    return msl_each(a, [](msl_element<T> v) { return v < 0 ? -v : v; });
}
template <class T, class B>
MSL_FN T select(T a, T b, B choice) {
    if constexpr (!is_vector_v<T>)
        return choice ? b : a;
    else {
        T r;
        for (int i = 0; i < msl_shape<T>::count; ++i) r[i] = choice[i] ? b[i] : a[i];
        return r;
    }
}
template <class B>
MSL_FN bool all(B v) {
    if constexpr (!is_vector_v<B>)
        return v;
    else {
        bool r = true;
        for (int i = 0; i < msl_shape<B>::count; ++i) r = r && v[i];
        return r;
    }
}
template <class B>
MSL_FN bool any(B v) {
    return !all(v == 0);
}

// Geometry.
template <class T, int N>
MSL_FN T dot(vec<T, N> a, vec<T, N> b) {
    T sum = a[0] * b[0];
    for (int i = 1; i < N; ++i) sum += a[i] * b[i];
    return sum;
}
template <class T, int N>
MSL_FN T length_squared(vec<T, N> a) {
    return dot(a, a);
}
template <class T, int N>
MSL_FN T length(vec<T, N> a) {
    return sqrt(dot(a, a));
}
template <class T, int N>
MSL_FN T distance(vec<T, N> a, vec<T, N> b) {
    return length(a - b);
}
template <class T, int N>
MSL_FN vec<T, N> normalize(vec<T, N> a) {
    return a * rsqrt(dot(a, a));
}

// Integers.
MSL_INTEGER MSL_FN T popcount(T x) {
    return msl_each(x,
                    [](msl_element<T> v) { return __builtin_popcountg((make_unsigned_t<msl_element<T>>)v); });
}
MSL_INTEGER MSL_FN T clz(T x) {
    return msl_each(x, [](msl_element<T> v) {
        return __builtin_clzg((make_unsigned_t<msl_element<T>>)v, (int)sizeof(v) * 8);
    });
}
MSL_INTEGER MSL_FN T ctz(T x) {
    return msl_each(x, [](msl_element<T> v) {
        return __builtin_ctzg((make_unsigned_t<msl_element<T>>)v, (int)sizeof(v) * 8);
    });
}
MSL_INTEGER MSL_FN T rotate(T x, T n) {
    return msl_each(x, n, [](msl_element<T> v, msl_element<T> by) {
        typedef make_unsigned_t<msl_element<T>> U;
        const uint width = sizeof(U) * 8, k = (uint)by & (width - 1);
        return k ? (U)((U)((U)v << k) | (U)((U)v >> (width - k))) : (U)v;
    });
}
MSL_INTEGER MSL_FN T reverse_bits(T x) {
    return msl_each(x, [](msl_element<T> v) {
        typedef make_unsigned_t<msl_element<T>> U;
        U r = 0;
        for (uint i = 0; i < sizeof(U) * 8; ++i) r = (U)(r << 1) | (((U)v >> i) & 1);
        return r;
    });
}
template <class T>
MSL_FN T extract_bits(T x, uint offset, uint count) {
    const uint width = sizeof(T) * 8;
    typedef make_unsigned_t<T> U;
    if (!count) return 0;
    return (T)((T)(U)((U)x << (width - offset - count)) >> (width - count));
}
template <class T>
MSL_FN T insert_bits(T base, T insert, uint offset, uint count) {
    typedef make_unsigned_t<T> U;
    const U mask = count >= sizeof(T) * 8 ? ~(U)0 : (U)((((U)1 << count) - 1) << offset);
    return (T)(((U)base & ~mask) | (((U)insert << offset) & mask));
}
MSL_FN uint mulhi(uint a, uint b) {
    return (uint)(((ulong)a * b) >> 32);
}
MSL_FN int mulhi(int a, int b) {
    return (int)(((long)a * b) >> 32);
}
MSL_FN ulong mulhi(ulong a, ulong b) {
    return (ulong)(((unsigned __int128)a * b) >> 64);
}
MSL_FN long mulhi(long a, long b) {
    return (long)(((__int128)a * b) >> 64);
}
MSL_FN uint mad24(uint a, uint b, uint c) {
    return (a & 0xffffffu) * (b & 0xffffffu) + c;
}
MSL_FN uint mul24(uint a, uint b) {
    return (a & 0xffffffu) * (b & 0xffffffu);
}
MSL_INTEGER MSL_FN T addsat(T x, T y) {
    return __builtin_elementwise_add_sat(x, y);
}
MSL_INTEGER MSL_FN T subsat(T x, T y) {
    return __builtin_elementwise_sub_sat(x, y);
}
MSL_INTEGER MSL_FN T absdiff(T x, T y) {
    return x > y ? x - y : y - x;
}
MSL_INTEGER MSL_FN T hadd(T x, T y) {
    return (x & y) + ((x ^ y) >> 1);
}
MSL_INTEGER MSL_FN T rhadd(T x, T y) {
    return (x | y) - ((x ^ y) >> 1);
}

// Small matrices, column by column.
template <class T, int C, int R>
struct matrix {
    vec<T, R> columns[C];
    MSL_FN matrix() = default;
    MSL_FN explicit matrix(T diagonal) {
        for (int i = 0; i < C; ++i) {
            columns[i] = vec<T, R>(T(0));
            if (i < R) columns[i][i] = diagonal;
        }
    }
    template <class U>
    MSL_FN explicit matrix(const matrix<U, C, R>& other) {
        for (int i = 0; i < C; ++i) columns[i] = __builtin_convertvector(other.columns[i], vec<T, R>);
    }
    MSL_FN thread vec<T, R>& operator[](int i) thread { return columns[i]; }
    MSL_FN const thread vec<T, R>& operator[](int i) const thread { return columns[i]; }
    MSL_FN device vec<T, R>& operator[](int i) device { return columns[i]; }
    MSL_FN const device vec<T, R>& operator[](int i) const device { return columns[i]; }
    MSL_FN threadgroup vec<T, R>& operator[](int i) threadgroup { return columns[i]; }
    MSL_FN const threadgroup vec<T, R>& operator[](int i) const threadgroup { return columns[i]; }
    MSL_FN const constant vec<T, R>& operator[](int i) const constant { return columns[i]; }
};
#define MSL_MATRICES(T)             \
    typedef matrix<T, 2, 2> T##2x2; \
    typedef matrix<T, 2, 3> T##2x3; \
    typedef matrix<T, 2, 4> T##2x4; \
    typedef matrix<T, 3, 2> T##3x2; \
    typedef matrix<T, 3, 3> T##3x3; \
    typedef matrix<T, 3, 4> T##3x4; \
    typedef matrix<T, 4, 2> T##4x2; \
    typedef matrix<T, 4, 3> T##4x3; \
    typedef matrix<T, 4, 4> T##4x4;
MSL_MATRICES(float)
MSL_MATRICES(half)
MSL_MATRICES(bfloat)
}  // namespace metal
using metal::bfloat2x4;
using metal::bfloat4x4;
using metal::float2x4;
using metal::float4x4;
using metal::half2x4;
using metal::half4x4;
