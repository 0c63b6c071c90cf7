// The integer arithmetic of drawing a token: e^x, ln and Gumbel noise in fixed point, and Philox. The same
// bits on every machine; reference.py has each function, with its error, under the same name.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace lily {

constexpr int64_t kLn2 = 49946518145322874;  // in 2^-56
constexpr int64_t kLog2E = 1549082005;       // in 2^-30
constexpr int64_t kSqrt2 = 6074001000;       // in 2^-32

// Horner's rule, x in 2^-bits, coefficients and result in 2^-30.
template <size_t N>
constexpr int64_t polynomial(const std::array<int64_t, N>& coefficients, int64_t x, int bits) {
    int64_t y = coefficients[N - 1];
    for (size_t k = N - 1; k-- > 0;) y = coefficients[k] + ((x * y) >> bits);
    return y;
}

constexpr std::array<int64_t, 11> kLnRatio = {1073741825, -536870906, 357913612, -268436126,
                                              214775591,  -178955778, 152603315, -133367554,
                                              128267892,  -124775757, 70569817};
constexpr std::array<int64_t, 6> kExp2Ratio = {-744261112, 257940802, -59591844, 10304738, -1386885, 123394};

// ln x in 2^-56, for 0 < x < 2^62.
constexpr int64_t fixed_ln(uint64_t x) {
    const int top = 63 - std::countl_zero(x);
    const auto m = static_cast<int64_t>(top > 32 ? x >> (top - 32) : x << (32 - top));
    const bool up = m > kSqrt2;
    const int64_t r = up ? m - (int64_t{1} << 33) : 2 * (m - (int64_t{1} << 32));  // in 2^-33
    return (top + up) * kLn2 + ((r * polynomial(kLnRatio, r, 33)) >> 7);
}

// A draw from the standard Gumbel distribution, in 2^-24, made of 32 random bits.
constexpr int64_t gumbel(uint32_t word) {
    const int64_t exponential = 33 * kLn2 - fixed_ln(2 * uint64_t{word} + 1);
    return (56 * kLn2 - fixed_ln(static_cast<uint64_t>(exponential))) >> 32;
}

// The largest that any word gives, and a number that gumbel(word) is never above, for little work: -ln u is
// at least 1 - u, and that at least half the power of two that begins it.
constexpr int64_t kLargestGumbel = gumbel(0xffffffffu);
constexpr int64_t gumbel_bound(uint32_t word) {
    constexpr int64_t kLn2Up = (kLn2 >> 32) + 1;  // in 2^-24
    return (1 + std::countl_zero(~word)) * kLn2Up;
}

// e^z in 2^-40, for z in 2^-24, -64 <= z <= 0.
constexpr uint64_t mass(int64_t z) {
    const int64_t y = -z * kLog2E, f = (y >> 24) & ((int64_t{1} << 30) - 1);
    const int whole = static_cast<int>(y >> 54);
    const int64_t fraction = (int64_t{1} << 30) + ((f * polynomial(kExp2Ratio, f, 30)) >> 30);
    return whole < 63 ? static_cast<uint64_t>(fraction << 10) >> whole : 0;
}

// Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
        counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

}  // namespace lily
