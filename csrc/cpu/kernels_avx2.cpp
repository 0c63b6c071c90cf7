// The kernels compiled for AVX2 and FMA.
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsAvx2 = LILY_DIGITS_TABLE("avx2", 3);
const Kernels kKernelsAvx2Prompt = LILY_DIGITS_TABLE("avx2, 2 digits", 2);

}  // namespace lily
