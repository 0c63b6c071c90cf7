// What digits.h asks of a machine with integer dot products: one section a machine.
#pragma once

#include <cstddef>

#include "cpu/simd.h"

namespace lily {
namespace {

#if defined(__AVX512VNNI__)

// sum + the products of four unsigned and four signed bytes a lane, the unsigned at most 15.
LILY_INLINE Ints dot4(Ints sum, Words weights, Ints digits) {
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                      reinterpret_cast<__m512i>(weights),
                                                      reinterpret_cast<__m512i>(digits)));
}

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

#elif defined(__ARM_FEATURE_DOTPROD)

LILY_INLINE Ints dot4(Ints sum, Words weights, Ints digits) {
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sum),
                                            reinterpret_cast<int8x16_t>(weights),
                                            reinterpret_cast<int8x16_t>(digits)));
}

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

LILY_INLINE Words load_first(const std::byte* from, int64_t bytes) {
    if (bytes >= static_cast<int64_t>(sizeof(Words))) return load_as<Words>(from);
    Words v = Words{};
    std::memcpy(&v, from, static_cast<size_t>(bytes));
    return v;
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

}  // namespace
}  // namespace lily
