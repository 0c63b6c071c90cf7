// A vector of floats as wide as the registers this translation unit is compiled for, and the few operations
// kernels need. Included only by kernels_*.cpp: everything is static, so that no wide instruction leaks into
// another code path. kernels_neon*.cpp define LILY_NEON: every arm64 compiler has NEON, the plain path too.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(LILY_NEON)
#include <arm_neon.h>
#endif

namespace lily {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

#define LILY_INLINE inline __attribute__((always_inline))

LILY_INLINE Floats splat(float value) {
    return value - Floats{};
}
LILY_INLINE Words splat_words(uint32_t value) {
    return value - Words{};
}

// Loads from any address.
template <class Vector>
LILY_INLINE Vector load_as(const void* from) {
    Vector v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
LILY_INLINE Floats load(const float* from) {
    return load_as<Floats>(from);
}
LILY_INLINE Floats load_bf16(const void* from) {
#if defined(__AVX512F__)  // gcc widens a half at a time
    const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(from));
    const __m512i words = _mm512_maskz_cvtepu16_epi32(0xffff, halves);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(words) << 16);
#else
    return reinterpret_cast<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
#endif
}
LILY_INLINE void store(float* to, Floats v) {
    std::memcpy(to, &v, sizeof v);
}

// a * b + c, rounded once where the machine has it. Every code path uses this and nothing else to multiply
// and add.
LILY_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b),
                                                    reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
    return reinterpret_cast<Floats>(_mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b),
                                                    reinterpret_cast<__m256>(c)));
#elif defined(LILY_NEON)
    return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                              reinterpret_cast<float32x4_t>(a),
                                              reinterpret_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}

// The lanes added as a balanced tree, always in the same order.
LILY_INLINE float sum(Floats v) {
    float lane[kLanes];
    store(lane, v);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

LILY_INLINE Floats select(Ints mask, Floats yes, Floats no) {
    return reinterpret_cast<Floats>((mask & reinterpret_cast<Ints>(yes)) |
                                    (~mask & reinterpret_cast<Ints>(no)));
}
LILY_INLINE Floats max(Floats a, Floats b) {
    return select(a > b, a, b);
}

// e^x to about one unit in the last place; exactly 0 below -87.3, so that masked scores vanish. NaN stays
// NaN. Cody-Waite reduction by ln 2 and the polynomial of Cephes' expf (S. L. Moshier, 1992).
LILY_INLINE Floats exp(Floats x) {
    const Ints vanishes = x < splat(-87.3f);
    x = select(x > splat(88.3f), splat(88.3f), select(vanishes, splat(-87.3f), x));
    const Floats magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = fma(x, splat(1.44269504f), magic) - magic;
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.f);
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return select(vanishes, Floats{}, p * reinterpret_cast<Floats>(exponent));
}

LILY_INLINE Floats sigmoid(Floats x) {
    return splat(1.f) / (splat(1.f) + exp(-x));
}

// The unsigned integers 0..15 at bits [4 j, 4 j + 4) of each word, as floats.
LILY_INLINE Floats nibble(Words words, int j) {
#if defined(__AVX512F__)
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const Words shifted = words >> (4 * j);  // the permutation reads the low four bits of each index only
    return reinterpret_cast<Floats>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(shifted), table));
#else
    return __builtin_convertvector(reinterpret_cast<Ints>((words >> (4 * j)) & 15u), Floats);
#endif
}

LILY_INLINE Floats byte(Words words, int j) {
    return __builtin_convertvector(reinterpret_cast<Ints>((words >> (8 * j)) & 255u), Floats);
}

}  // namespace
}  // namespace lily
