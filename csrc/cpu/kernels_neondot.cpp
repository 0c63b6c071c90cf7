// The kernels compiled for NEON with integer dot products.
#define LILY_NEON 1
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsNeonDot = LILY_DIGITS_TABLE("neondot", 3);
const Kernels kKernelsNeonDotPrompt = LILY_DIGITS_TABLE("neondot, 2 digits", 2);

}  // namespace lily
