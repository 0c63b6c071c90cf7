// The integer arithmetic of drawing a token: e^x, ln and Gumbel noise in fixed point, and Philox. The same
// bits on every machine, and the same lines: the kernels and csrc/sample.cpp include them. reference.py has
// each function, with its error, under the same name.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define LILY_FUNCTION METAL_FUNC
#define LILY_CONSTANT constant constexpr
#define LILY_TABLE constant
#else
#include <bit>
#include <cstdint>
#define LILY_FUNCTION constexpr
#define LILY_CONSTANT inline constexpr
#define LILY_TABLE
#endif

namespace lily {

#ifdef __METAL_VERSION__
METAL_FUNC int leading_zeros(ulong x) { return int(metal::clz(x)); }
#else
using uint = uint32_t;
using ulong = uint64_t;
static_assert(sizeof(long) == 8);
constexpr int leading_zeros(ulong x) {
    return std::countl_zero(x);
}
#endif

LILY_CONSTANT long kLn2 = 49946518145322874;  // in 2^-56
LILY_CONSTANT long kLog2E = 1549082005;       // in 2^-30
LILY_CONSTANT long kSqrt2 = 6074001000;       // in 2^-32
LILY_CONSTANT long kLnRatio[11] = {1073741825, -536870906, 357913612,  -268436126, 214775591, -178955778,
                                   152603315,  -133367554, 128267892, -124775757, 70569817};
LILY_CONSTANT long kExp2Ratio[6] = {-744261112, 257940802, -59591844, 10304738, -1386885, 123394};

// Horner's rule, x in 2^-bits, coefficients and result in 2^-30.
template <int N>
LILY_FUNCTION long polynomial(LILY_TABLE const long (&coefficients)[N], long x, int bits) {
    long y = coefficients[N - 1];
    for (int k = N - 2; k >= 0; --k) y = coefficients[k] + ((x * y) >> bits);
    return y;
}

// ln x in 2^-56, for 0 < x < 2^62.
LILY_FUNCTION long fixed_ln(ulong x) {
    const int top = 63 - leading_zeros(x);
    const long m = long(top > 32 ? x >> (top - 32) : x << (32 - top));
    const bool up = m > kSqrt2;
    const long r = up ? m - (1L << 33) : 2 * (m - (1L << 32));  // in 2^-33
    return (top + up) * kLn2 + ((r * polynomial(kLnRatio, r, 33)) >> 7);
}

// A draw from the standard Gumbel distribution, in 2^-24, made of 32 random bits.
LILY_FUNCTION long gumbel(uint word) {
    const long exponential = 33 * kLn2 - fixed_ln(2 * ulong(word) + 1);
    return (56 * kLn2 - fixed_ln(ulong(exponential))) >> 32;
}

// The largest that any word gives.
LILY_CONSTANT long kLargestGumbel = 383759636;

// e^z in 2^-40, for z in 2^-24, -64 <= z <= 0.
LILY_FUNCTION ulong mass(long z) {
    const long y = -z * kLog2E, f = (y >> 24) & ((1L << 30) - 1);
    const int whole = int(y >> 54);
    const long fraction = (1L << 30) + ((f * polynomial(kExp2Ratio, f, 30)) >> 30);
    return whole < 63 ? ulong(fraction << 10) >> whole : 0;
}
LILY_CONSTANT long kNoMass = -28L * (1L << 24);  // below it mass() is 0: e^-28 is less than 2^-40

// The part of a total that `part` / 2^32 is.
LILY_FUNCTION ulong part_of(ulong total, uint part) {
    return (total >> 32) * part + (((total & 0xffffffffu) * part) >> 32);
}

// Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011. The four words of
// tokens 4 block to 4 block + 3.
struct RandomWords {
    uint word[4];
};
LILY_FUNCTION RandomWords philox(uint block, ulong position, ulong seed) {
    RandomWords c = {{block, uint(position), uint(position >> 32), 0}};
    uint key0 = uint(seed), key1 = uint(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const ulong a = ulong(0xD2511F53u) * c.word[0], b = ulong(0xCD9E8D57u) * c.word[2];
        const RandomWords next = {
            {uint(b >> 32) ^ c.word[1] ^ key0, uint(b), uint(a >> 32) ^ c.word[3] ^ key1, uint(a)}};
        c = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

#ifndef __METAL_VERSION__
static_assert(kLargestGumbel == gumbel(0xffffffffu));
#endif

}  // namespace lily
