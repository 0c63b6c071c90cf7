// The kernels compiled for AVX2 and FMA.
#include "cpu/kernels_impl.h"

namespace lily {

const Kernels kKernelsAvx2 =
    LILY_KERNEL_TABLE("avx2", arrange, product, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);

}  // namespace lily
