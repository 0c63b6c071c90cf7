// The kernels compiled for AVX-512.
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsAvx512 = LILY_DIGITS_TABLE("avx512", 3);
const Kernels kKernelsAvx512Prompt = LILY_DIGITS_TABLE("avx512, 2 digits", 2);

}  // namespace lily
