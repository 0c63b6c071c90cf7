// The kernels compiled for NEON with integer dot products and products of matrices of bytes, which three rows
// of inputs and more go through. Sums are of integers: every result is that of kernels_neondot.cpp.
#define LILY_NEON 1
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsNeonI8mm = LILY_KERNEL_TABLE("neoni8mm", arrange_digits<3>, product_digits<3>, nullptr,
                                                   nullptr, packs, pack, nullptr, nullptr);
const Kernels kKernelsNeonI8mmPrompt =
    LILY_KERNEL_TABLE("neoni8mm, 2 digits", arrange_digits<2>, product_digits<2>, nullptr, nullptr, packs,
                      pack, nullptr, nullptr);

}  // namespace lily
