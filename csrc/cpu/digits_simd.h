// What digits.h asks of a machine: sums of products of bytes, and words put in place. One section a machine
// for each.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cpu/simd.h"

namespace lily {
namespace {

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));

// Sums: of a lane's products, in 32 bits where the machine has integer dot products, else in 16, two a lane.
// dot4: sums + the products of four unsigned and four signed bytes a lane, the unsigned at most 15.
// widened: sums in 32 bits a lane.
#if defined(__AVX512VNNI__)

typedef Ints Sums;

LILY_INLINE Sums dot4(Sums sums, Words weights, Ints digits) {
    return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums),
                                                      reinterpret_cast<__m512i>(weights),
                                                      reinterpret_cast<__m512i>(digits)));
}

#elif defined(__AVX512F__)

typedef Shorts Sums;

LILY_INLINE Sums dot4(Sums sums, Words weights, Ints digits) {
    return sums + reinterpret_cast<Sums>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights),
                                                              reinterpret_cast<__m512i>(digits)));
}

LILY_INLINE Ints widened(Shorts sums) {
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sums), _mm512_set1_epi16(1)));
}

#elif defined(__AVX2__)

typedef Shorts Sums;

LILY_INLINE Sums dot4(Sums sums, Words weights, Ints digits) {
    return sums + reinterpret_cast<Sums>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights),
                                                              reinterpret_cast<__m256i>(digits)));
}

LILY_INLINE Ints widened(Shorts sums) {
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sums), _mm256_set1_epi16(1)));
}

#elif defined(__ARM_FEATURE_DOTPROD)

typedef Ints Sums;

LILY_INLINE Sums dot4(Sums sums, Words weights, Ints digits) {
    return reinterpret_cast<Sums>(vdotq_s32(reinterpret_cast<int32x4_t>(sums),
                                            reinterpret_cast<int8x16_t>(weights),
                                            reinterpret_cast<int8x16_t>(digits)));
}

#endif

LILY_INLINE Ints widened(Ints sums) {
    return sums;
}

// Words of weights whose products may be summed so. Of four words, a sum of 16 bits has 16 products of at
// most 15 * 128.
constexpr int kSumWords = std::is_same_v<Sums, Ints> ? 8 : 4;

#if defined(__AVX512F__)

// The lowest bytes of inputs [i, i + kLanes) of a group, to their places among a digit's: per word of eight
// the even inputs, then the odd.
LILY_INLINE void put_digits(Ints digit, int8_t* to, int i) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(digit));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_shuffle_epi8(bytes, order));
}

// Row i's word j becomes row j's word i.
LILY_INLINE void transpose(Words (&v)[kLanes]) {
    constexpr __mmask16 kAll = 0xffff;  // gcc 12 warns of the forms without a mask
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = reinterpret_cast<__m512i>(v[i]);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_maskz_unpacklo_epi32(kAll, a[i], a[i + 1]);
        b[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)  // a[i + j]: word j of each quarter, of rows i to i + 3
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_maskz_unpacklo_epi64(0xff, b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_maskz_unpackhi_epi64(0xff, b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const __m512i even_low = _mm512_maskz_shuffle_i32x4(kAll, a[j], a[4 + j], 0x88),
                      odd_low = _mm512_maskz_shuffle_i32x4(kAll, a[j], a[4 + j], 0xdd),
                      even_high = _mm512_maskz_shuffle_i32x4(kAll, a[8 + j], a[12 + j], 0x88),
                      odd_high = _mm512_maskz_shuffle_i32x4(kAll, a[8 + j], a[12 + j], 0xdd);
        v[j] = reinterpret_cast<Words>(_mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, 0x88));
        v[4 + j] = reinterpret_cast<Words>(_mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, 0x88));
        v[8 + j] = reinterpret_cast<Words>(_mm512_maskz_shuffle_i32x4(kAll, even_low, even_high, 0xdd));
        v[12 + j] = reinterpret_cast<Words>(_mm512_maskz_shuffle_i32x4(kAll, odd_low, odd_high, 0xdd));
    }
}

// The first bytes of a vector, the rest zeros.
LILY_INLINE Words load_first(const std::byte* from, int64_t bytes) {
    const auto mask = bytes >= 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
    return reinterpret_cast<Words>(_mm512_maskz_loadu_epi8(mask, from));
}

// The first halves of two vectors.
LILY_INLINE Words first_halves(Words low, Words high) {
    return reinterpret_cast<Words>(_mm512_maskz_shuffle_i32x4(0xffff, reinterpret_cast<__m512i>(low),
                                                              reinterpret_cast<__m512i>(high), 0x44));
}

#else

LILY_INLINE Words load_first(const std::byte* from, int64_t bytes) {
    if (bytes >= static_cast<int64_t>(sizeof(Words))) return load_as<Words>(from);
    Words v = Words{};
    std::memcpy(&v, from, static_cast<size_t>(bytes));
    return v;
}

#if defined(__AVX2__)

LILY_INLINE void put_digits(Ints digit, int8_t* to, int i) {
    // Either half of the register to its places: even inputs first, four bytes behind them the odd.
    const __m256i order = _mm256_setr_epi8(0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                           -1, -1, 0, 8, -1, -1, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(digit), order);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + i),
                     _mm_or_si128(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
}

LILY_INLINE void transpose(Words (&v)[kLanes]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = reinterpret_cast<__m256i>(v[i]);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)  // a[i + j]: word j of each half, of rows i to i + 3
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm256_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm256_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        v[j] = reinterpret_cast<Words>(_mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
        v[4 + j] = reinterpret_cast<Words>(_mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
    }
}

LILY_INLINE Words first_halves(Words low, Words high) {
    return reinterpret_cast<Words>(
        _mm256_permute2x128_si256(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high), 0x20));
}

#elif defined(__ARM_FEATURE_DOTPROD)

LILY_INLINE void put_digits(Ints digit, int8_t* to, int i) {
    to += i / 8 * 8 + i % 8 / 2;
    for (int lane = 0; lane < kLanes; ++lane) to[lane % 2 * 4 + lane / 2] = static_cast<int8_t>(digit[lane]);
}

LILY_INLINE void transpose(Words (&v)[kLanes]) {
    const auto as_pairs = [](uint32x4_t x) { return vreinterpretq_u64_u32(x); };
    const auto put = [](uint64x2_t x) { return reinterpret_cast<Words>(x); };
    const uint32x4x2_t a = vtrnq_u32(reinterpret_cast<uint32x4_t>(v[0]), reinterpret_cast<uint32x4_t>(v[1]));
    const uint32x4x2_t b = vtrnq_u32(reinterpret_cast<uint32x4_t>(v[2]), reinterpret_cast<uint32x4_t>(v[3]));
    for (int j = 0; j < 2; ++j) {
        v[j] = put(vtrn1q_u64(as_pairs(a.val[j]), as_pairs(b.val[j])));
        v[2 + j] = put(vtrn2q_u64(as_pairs(a.val[j]), as_pairs(b.val[j])));
    }
}

LILY_INLINE Words first_halves(Words low, Words high) {
    return reinterpret_cast<Words>(
        vtrn1q_u64(reinterpret_cast<uint64x2_t>(low), reinterpret_cast<uint64x2_t>(high)));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

LILY_INLINE Words second_halves(Words low, Words high) {
    return reinterpret_cast<Words>(
        vtrn2q_u64(reinterpret_cast<uint64x2_t>(low), reinterpret_cast<uint64x2_t>(high)));
}

// sum + two rows of inputs times two of weights, of eight signed bytes each: the first inputs' sums, then the
// second's.
LILY_INLINE Ints multiply_pairs(Ints sum, Words inputs, Words weights) {
    return reinterpret_cast<Ints>(vmmlaq_s32(reinterpret_cast<int32x4_t>(sum),
                                             reinterpret_cast<int8x16_t>(inputs),
                                             reinterpret_cast<int8x16_t>(weights)));
}

// Eight bytes of either row of inputs.
LILY_INLINE Words pair_of(const int32_t* one, const int32_t* other) {
    return reinterpret_cast<Words>(vcombine_s32(vld1_s32(one), vld1_s32(other)));
}

// The weights of each word as bytes: the even, then the odd.
LILY_INLINE void put_nibbles(Words words, uint32_t* to) {
    const uint32x4x2_t halves = {{reinterpret_cast<uint32x4_t>(words & 0x0f0f0f0fu),
                                  reinterpret_cast<uint32x4_t>(words >> 4 & 0x0f0f0f0fu)}};
    vst2q_u32(to, halves);
}

#endif

#endif
#endif

}  // namespace
}  // namespace lily
