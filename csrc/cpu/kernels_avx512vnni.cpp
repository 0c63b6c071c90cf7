// The kernels compiled for AVX-512 with integer dot products.
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsAvx512Vnni =
    LILY_KERNEL_TABLE("avx512vnni", arrange_digits, product_digits, packs, pack);

}  // namespace lily
