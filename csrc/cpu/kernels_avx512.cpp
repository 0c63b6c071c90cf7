// The kernels compiled for AVX-512.
#include "cpu/kernels_impl.h"

namespace lily {

const Kernels kKernelsAvx512 =
    LILY_KERNEL_TABLE("avx512", arrange, product, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);

}  // namespace lily
