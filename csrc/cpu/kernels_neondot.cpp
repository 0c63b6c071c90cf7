// The kernels compiled for NEON with integer dot products.
#define LILY_NEON 1
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsNeonDot = LILY_KERNEL_TABLE("neondot", arrange_digits<3>, product_digits<3>, nullptr,
                                                  nullptr, packs, pack, nullptr, nullptr);
const Kernels kKernelsNeonDotPrompt =
    LILY_KERNEL_TABLE("neondot, 2 digits", arrange_digits<2>, product_digits<2>, nullptr, nullptr, packs,
                      pack, nullptr, nullptr);

}  // namespace lily
