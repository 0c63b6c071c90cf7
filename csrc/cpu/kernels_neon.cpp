// The kernels compiled for NEON.
#define LILY_NEON 1
#include "cpu/kernels_impl.h"

namespace lily {

const Kernels kKernelsNeon =
    LILY_KERNEL_TABLE("neon", arrange, product, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);

}  // namespace lily
