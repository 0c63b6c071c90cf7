// The halves of a product, which bench/limits.py measures the whole beside: metal/twin.h for the CPU. Kernels
// are whole unless they are compiled with one of these defined, which nothing but that bench does:
//   LILY_LOADS_ONLY       every weight is loaded, and one number of each word counts
//   LILY_ARITHMETIC_ONLY  everything is computed, on numbers in the first-level cache instead of weights
#pragma once

#include <array>
#include <cstdint>

#include "cpu/simd.h"

#if defined(LILY_LOADS_ONLY) || defined(LILY_ARITHMETIC_ONLY)
#define LILY_TWIN(kernels)                                                         \
    extern "C" __attribute__((visibility("default"))) const Kernels* lily_kernels( \
        size_t size) { /* of the table that is asked for */                        \
        return size == sizeof(Kernels) ? &kernels : nullptr;                       \
    }
#else
#define LILY_TWIN(kernels)
#endif

namespace lily {
namespace {
namespace twin {

#if defined(LILY_ARITHMETIC_ONLY)
// What stands for any row of weights of up to 16 KB. Halves of words are numbers of 2^-63 to 2 as bfloat16.
alignas(64) constexpr auto kMade = [] {
    std::array<uint32_t, 4096> words{};
    for (uint32_t i = 0; i < words.size(); ++i)
        words[i] = (i * 0x9e3779b9u & 0xbfffbfffu) | 0x20002000u;  // Knuth's multiplier
    return words;
}();
constexpr bool kAsks = false;
#else
constexpr bool kAsks = true;  // memory for weights, ahead of their use
#endif

// Where weights are to be read.
template <class T>
LILY_INLINE const T* at(const T* weights) {
#if defined(LILY_ARITHMETIC_ONLY)
    const void* made = kMade.data();
    asm volatile("" : "+r"(made));  // which nobody sees to be the same each time
    weights = static_cast<const T*>(made);
#endif
    return weights;
}

// From one of `all` numbers of a word to the next that counts.
constexpr int step(int all) {
#if defined(LILY_LOADS_ONLY)
    return all;
#else
    return all > 0;
#endif
}

}  // namespace twin
}  // namespace
}  // namespace lily
