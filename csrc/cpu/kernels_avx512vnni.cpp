// The kernels compiled for AVX-512 with integer dot products.
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsAvx512Vnni = LILY_DIGITS_TABLE("avx512vnni", 3);
const Kernels kKernelsAvx512VnniPrompt = LILY_DIGITS_TABLE("avx512vnni, 2 digits", 2);
LILY_TWIN(kKernelsAvx512Vnni)

}  // namespace lily
