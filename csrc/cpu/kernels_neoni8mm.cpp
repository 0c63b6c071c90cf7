// The kernels compiled for NEON with integer dot products and products of matrices of bytes, which three rows
// of inputs and more go through. Sums are of integers: every result is that of kernels_neondot.cpp.
#define LILY_NEON 1
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsNeonI8mm = LILY_DIGITS_TABLE("neoni8mm", 3);
const Kernels kKernelsNeonI8mmPrompt = LILY_DIGITS_TABLE("neoni8mm, 2 digits", 2);

}  // namespace lily
