// Metal's types on clang's "C++ for OpenCL" front end, which checks address spaces as Metal's compiler does.
// Included in front of every rewritten source, so names that a kernel must not use start with msl_ or MSL_.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma clang diagnostic ignored "-Wduplicate-decl-specifier"

#define device __global
#define threadgroup __local
#define thread __private
#define constant const __constant  // Metal's constant implies const
#define MSL_FN inline __attribute__((always_inline))
#define MSL_VALUE_OF static constant constexpr const

// Words that are OpenCL's and free in Metal.
#define global msl_word_global
#define local msl_word_local
#define generic msl_word_generic
#define pipe msl_word_pipe
#define read_only msl_word_read_only
#define write_only msl_word_write_only
#define read_write msl_word_read_write
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#define atomic_bool msl_atomic_bool
#define atomic_ulong msl_atomic_ulong
#define atomic_long msl_atomic_long
#define atomic_flag msl_atomic_flag

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef long intptr_t;
typedef ulong uintptr_t;
typedef __bf16 bfloat;

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}
// clang has no vectors of bool here: a bool2 holds two bytes.
#define MSL_VECTORS(DO) \
    DO(char) DO(uchar) DO(short) DO(ushort) DO(int) DO(uint) DO(long) DO(ulong) DO(half) DO(float) DO(bfloat)
#define MSL_DECLARE(T)             \
    typedef metal::vec<T, 2> T##2; \
    typedef metal::vec<T, 3> T##3; \
    typedef metal::vec<T, 4> T##4;
MSL_VECTORS(MSL_DECLARE)
typedef char2 bool2;
typedef char3 bool3;
typedef char4 bool4;

namespace metal {
using ::bfloat;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;
#define MSL_USE(T) \
    using ::T##2;  \
    using ::T##3;  \
    using ::T##4;
MSL_VECTORS(MSL_USE)
MSL_USE(bool)

// Type traits.
template <typename T, T v>
struct integral_constant {
    MSL_VALUE_OF T value = v;
    typedef T value_type;
    constexpr operator T() const { return v; }
};
template <bool b>
using bool_constant = integral_constant<bool, b>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <bool b, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
    typedef T type;
};
template <bool b, class T = void>
using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T = void>
using _enable_if_t = enable_if_t<b, T>;
template <bool b, class A, class B>
struct conditional {
    typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
    typedef B type;
};
template <bool b, class A, class B>
using conditional_t = typename conditional<b, A, B>::type;

#define MSL_REMOVE(NAME, ...)  \
    template <class T>         \
    struct NAME<__VA_ARGS__> { \
        typedef T type;        \
    };
template <class T>
struct remove_reference {
    typedef T type;
};
MSL_REMOVE(remove_reference, thread T&)
MSL_REMOVE(remove_reference, device T&)
MSL_REMOVE(remove_reference, threadgroup T&)
MSL_REMOVE(remove_reference, constant T&)
template <class T>
struct remove_addrspace {
    typedef T type;
};
MSL_REMOVE(remove_addrspace, thread T)
MSL_REMOVE(remove_addrspace, device T)
MSL_REMOVE(remove_addrspace, threadgroup T)
MSL_REMOVE(remove_addrspace, constant T)
template <class T>
struct remove_const {
    typedef T type;
};
MSL_REMOVE(remove_const, const T)
template <class T>
struct remove_cv {
    typedef __remove_cv(T) type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
using remove_cv_t = typename remove_cv<T>::type;

// A vector type's element and count; a scalar is its own element.
template <class T>
struct msl_shape {
    typedef T element;
    MSL_VALUE_OF int count = 1;
};
template <class T, int N>
struct msl_shape<vec<T, N>> {
    typedef T element;
    MSL_VALUE_OF int count = N;
};
template <class T>
using msl_element = typename msl_shape<T>::element;

#define MSL_TRAIT(NAME, ...)                       \
    template <class T>                             \
    struct NAME : bool_constant<(__VA_ARGS__)> {}; \
    template <class T>                             \
    constant constexpr const bool NAME##_v = NAME<T>::value;
template <class A, class B>
constant constexpr const bool is_same_v = is_same<A, B>::value;
MSL_TRAIT(is_floating_point, is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>)
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
MSL_TRAIT(is_scalar, is_arithmetic_v<T>)
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_signed, is_arithmetic_v<T> && !__is_unsigned(T))
MSL_TRAIT(is_void, __is_void(T))
MSL_TRAIT(is_class, __is_class(T))
MSL_TRAIT(is_enum, __is_enum(T))
MSL_TRAIT(is_vector, msl_shape<T>::count > 1)
MSL_TRAIT(msl_is_float, is_floating_point_v<msl_element<T>>)
MSL_TRAIT(msl_is_integer, is_integral_v<msl_element<T>>)
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B>
constant constexpr const bool is_convertible_v = is_convertible<A, B>::value;
template <class T>
struct underlying_type {
    typedef __underlying_type(T) type;
};
template <class T>
struct make_unsigned {
    typedef __make_unsigned(T) type;
};
template <class T>
struct make_signed {
    typedef __make_signed(T) type;
};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <class T>
using make_signed_t = typename make_signed<T>::type;
template <class T>
struct make_scalar {
    typedef msl_element<T> type;
};
template <class T>
using make_scalar_t = msl_element<T>;
template <class T>
struct vec_elements : integral_constant<int, msl_shape<T>::count> {};
template <class... T>
struct conjunction : true_type {};
template <class A, class... T>
struct conjunction<A, T...> : bool_constant<A::value && conjunction<T...>::value> {};
template <class... T>
struct disjunction : false_type {};
template <class A, class... T>
struct disjunction<A, T...> : bool_constant<A::value || disjunction<T...>::value> {};
template <class... T>
constant constexpr const bool conjunction_v = conjunction<T...>::value;
template <class... T>
constant constexpr const bool disjunction_v = disjunction<T...>::value;
template <class T>
constexpr T declval();
template <class T, T... I>
struct integer_sequence {};
template <size_t... I>
using index_sequence = integer_sequence<size_t, I...>;
template <class T>
using uniform = T;
template <class T>
MSL_FN constexpr T make_uniform(T x) {
    return x;
}

// Conversions. T(a, b, ...) and static_cast<T>(x) of a source arrive here; see rewrite.py.
template <class To, class From>
MSL_FN constexpr To msl_convert(From from) {
    if constexpr (is_same_v<To, From>)
        return from;
    else if constexpr (msl_shape<To>::count > 1 && msl_shape<To>::count == msl_shape<From>::count)
        return __builtin_convertvector(from, To);
    else
        return To(from);
}
template <class V, class A>
MSL_FN constexpr void msl_append(thread V& to, thread int& at, A from) {
    if constexpr (msl_shape<A>::count > 1)
        for (int k = 0; k < msl_shape<A>::count; ++k) to[at++] = (msl_element<V>)from[k];
    else
        to[at++] = (msl_element<V>)from;
}
template <class V, class... A>
MSL_FN constexpr V msl_fill(A... from) {
    V made{};
    int at = 0;
    (msl_append(made, at, from), ...);
    return made;
}
template <class... A>
struct msl_components {
    MSL_VALUE_OF int count = 0;
};
template <class A, class... Rest>
struct msl_components<A, Rest...> {
    MSL_VALUE_OF int count = msl_shape<A>::count + msl_components<Rest...>::count;
};
// A packed vector as the vector that it holds; anything else as it is.
template <class A>
MSL_FN constexpr typename A::msl_vector msl_unpacked(A from, int) {
    return from;
}
template <class A>
MSL_FN constexpr A msl_unpacked(A from, long) {
    return from;
}
template <class To, class... A>
MSL_FN constexpr To msl_make_unpacked(A... from) {
    if constexpr (msl_shape<To>::count == 1)
        return To(from...);
    else if constexpr (sizeof...(A) == 1 && msl_components<A...>::count == 1)
        return To((msl_element<To>(from), ...));
    else if constexpr (sizeof...(A) == 1)
        return (msl_convert<To>(from), ...);
    else {
        static_assert(msl_components<A...>::count == msl_shape<To>::count,
                      "a vector's constructor needs exactly as many components as the vector has");
        return msl_fill<To>(from...);
    }
}
template <class To>
MSL_FN constexpr To msl_make() {
    return To();
}
template <class To, class... A>
MSL_FN constexpr To msl_make(A... from) {
    return msl_make_unpacked<To>(msl_unpacked(from, 0)...);
}
template <class To, class From>
MSL_FN constexpr To msl_static_cast(From from) {
    if constexpr (is_same_v<To, From>)
        return from;
    else if constexpr (is_floating_point_v<To> && is_floating_point_v<From> && sizeof(To) == sizeof(From))
        return static_cast<To>(static_cast<float>(from));
    else if constexpr (is_vector_v<To> || is_vector_v<From>)
        return msl_convert<To>(from);
    else
        return static_cast<To>(from);
}
template <class To, class From>
MSL_FN To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
    if constexpr (sizeof(To) == sizeof(From)) return __builtin_bit_cast(To, from);
}
// {a, b} passed where a vector is wanted.
template <class... A>
struct msl_braces;
template <class A, class B>
struct msl_braces<A, B> {
    A a;
    B b;
    template <class T>
    MSL_FN constexpr operator vec<T, 2>() const {
        return vec<T, 2>{(T)a, (T)b};
    }
};
template <class A, class B, class C>
struct msl_braces<A, B, C> {
    A a;
    B b;
    C c;
    template <class T>
    MSL_FN constexpr operator vec<T, 3>() const {
        return vec<T, 3>{(T)a, (T)b, (T)c};
    }
};
template <class A, class B, class C, class D>
struct msl_braces<A, B, C, D> {
    A a;
    B b;
    C c;
    D d;
    template <class T>
    MSL_FN constexpr operator vec<T, 4>() const {
        return vec<T, 4>{(T)a, (T)b, (T)c, (T)d};
    }
};
template <class... A>
MSL_FN constexpr msl_braces<A...> msl_braced(A... from) {
    return {from...};
}

// Packed vectors: aligned like their elements.
#define MSL_PACK(T, N, ...)                                                    \
    struct packed_##T##N {                                                     \
        typedef T##N msl_vector;                                               \
        T __VA_ARGS__;                                                         \
        packed_##T##N() = default;                                             \
        MSL_FN packed_##T##N(T##N v) { msl_take(v); }                          \
        packed_##T##N(const packed_##T##N&) = default;                         \
        packed_##T##N(const constant packed_##T##N&) = default;                \
        packed_##T##N& operator=(const packed_##T##N&) = default;              \
        MSL_FN operator T##N() const { return T##N{__VA_ARGS__}; }             \
        MSL_FN operator T##N() const device { return T##N{__VA_ARGS__}; }      \
        MSL_FN operator T##N() const constant { return T##N{__VA_ARGS__}; }    \
        MSL_FN operator T##N() const threadgroup { return T##N{__VA_ARGS__}; } \
        MSL_FN void msl_take(T##N v);                                          \
    };
#define MSL_PACKED(T)                              \
    MSL_PACK(T, 2, x, y)                           \
    MSL_PACK(T, 3, x, y, z)                        \
    MSL_PACK(T, 4, x, y, z, w)                     \
    MSL_FN void packed_##T##2 ::msl_take(T##2 v) { \
        x = v.x, y = v.y;                          \
    }                                              \
    MSL_FN void packed_##T##3 ::msl_take(T##3 v) { \
        x = v.x, y = v.y, z = v.z;                 \
    }                                              \
    MSL_FN void packed_##T##4 ::msl_take(T##4 v) { \
        x = v.x, y = v.y, z = v.z, w = v.w;        \
    }
MSL_VECTORS(MSL_PACKED)

template <class T, size_t N>
struct array {
    T __elements[N];
    MSL_FN constexpr thread T& operator[](size_t i) thread { return __elements[i]; }
    MSL_FN constexpr const thread T& operator[](size_t i) const thread { return __elements[i]; }
    MSL_FN constexpr const constant T& operator[](size_t i) const constant { return __elements[i]; }
    MSL_FN constexpr const device T& operator[](size_t i) const device { return __elements[i]; }
    MSL_FN constexpr const threadgroup T& operator[](size_t i) const threadgroup { return __elements[i]; }
    MSL_FN constexpr size_t size() const { return N; }
};

// Numeric limits.
template <class T>
struct numeric_limits;
#define MSL_LIMIT(NAME, VALUE)                \
    static MSL_FN constexpr msl_type NAME() { \
        return (msl_type)(VALUE);             \
    }
#define MSL_LIMITS_OF_FLOAT(T, MAX, MIN, EPSILON, DIGITS) \
    template <>                                           \
    struct numeric_limits<T> {                            \
        typedef T msl_type;                               \
        MSL_LIMIT(lowest, -MAX)                           \
        MSL_LIMIT(max, MAX)                               \
        MSL_LIMIT(min, MIN)                               \
        MSL_LIMIT(epsilon, EPSILON)                       \
        MSL_LIMIT(infinity, __builtin_huge_valf())        \
        MSL_LIMIT(quiet_NaN, __builtin_nanf(""))          \
        MSL_VALUE_OF int digits = DIGITS;                 \
    };
#define MSL_LIMITS_OF_INTEGER(T, LOWEST, MAX)                     \
    template <>                                                   \
    struct numeric_limits<T> {                                    \
        typedef T msl_type;                                       \
        MSL_LIMIT(lowest, LOWEST)                                 \
        MSL_LIMIT(min, LOWEST)                                    \
        MSL_LIMIT(max, MAX)                                       \
        MSL_VALUE_OF int digits = sizeof(T) * 8 - __is_signed(T); \
    };
MSL_LIMITS_OF_FLOAT(float, 3.40282346638528859812e+38f, 1.17549435082228750797e-38f, 1.1920929e-07f, 24)
MSL_LIMITS_OF_FLOAT(half, 65504.f, 6.103515625e-05f, 9.765625e-04f, 11)
MSL_LIMITS_OF_FLOAT(bfloat, 3.3895313892515355e+38f, 1.17549435082228750797e-38f, 7.8125e-03f, 8)
MSL_LIMITS_OF_INTEGER(char, -128, 127)
MSL_LIMITS_OF_INTEGER(signed char, -128, 127)
MSL_LIMITS_OF_INTEGER(uchar, 0, 255)
MSL_LIMITS_OF_INTEGER(short, -32768, 32767)
MSL_LIMITS_OF_INTEGER(ushort, 0, 65535)
MSL_LIMITS_OF_INTEGER(int, -2147483647 - 1, 2147483647)
MSL_LIMITS_OF_INTEGER(uint, 0, 4294967295u)
MSL_LIMITS_OF_INTEGER(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_LIMITS_OF_INTEGER(ulong, 0, 18446744073709551615UL)
MSL_LIMITS_OF_INTEGER(bool, 0, 1)
}  // namespace metal
using metal::as_type;  // in Metal these two need no namespace
using metal::vec;

// The copies that Metal gives a struct, also out of `constant`, which clang's generic space leaves out.
#define MSL_COPIES(S)                 \
    S(const S&) = default;            \
    S& operator=(const S&) = default; \
    S(const constant S&) = default;   \
    S& operator=(const constant S&) = default;
#define MSL_VALUE(S) \
    S() = default;   \
    MSL_COPIES(S)
