// The halves of a product of a matrix and a vector, which bench/limits.py measures the whole beside. The
// kernels are whole unless they are compiled with one of these defined, which nothing but that bench does:
//   LILY_LOADS_ONLY       every weight is loaded, and one number of each word counts
//   LILY_ARITHMETIC_ONLY  everything is computed, on numbers made from the index instead of weights
#pragma once

namespace lily {
namespace twin {

// What stands for the i-th number of some weights: one that differs from row to row, as those do.
METAL_FUNC uint made(device const void* weights, uint i) {
    return uint(reinterpret_cast<ulong>(weights)) + i * 0x9e3779b9u;  // Knuth's multiplier
}

// The i-th number of some weights.
template <class T>
METAL_FUNC T load(device const T* weights, uint i) {
#ifdef LILY_ARITHMETIC_ONLY
    return T(made(weights, i));  // the same in every part of a vector
#else
    return weights[i];
#endif
}

// From one number of a word's `all` to the next that counts.
constexpr ushort step(ushort each, ushort all) {
#ifdef LILY_LOADS_ONLY
    return all;
#else
    return all < each ? all : each;
#endif
}

}  // namespace twin
}  // namespace lily
