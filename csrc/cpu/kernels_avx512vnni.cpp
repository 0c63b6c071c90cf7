// The kernels compiled for AVX-512 with integer dot products.
#include "cpu/digits.h"

namespace lily {

const Kernels kKernelsAvx512Vnni = LILY_KERNEL_TABLE("avx512vnni", arrange_digits<3>, product_digits<3>,
                                                     nullptr, nullptr, packs, pack, nullptr, nullptr);
const Kernels kKernelsAvx512VnniPrompt =
    LILY_KERNEL_TABLE("avx512vnni, 2 digits", arrange_digits<2>, product_digits<2>, nullptr, nullptr, packs,
                      pack, nullptr, nullptr);
LILY_TWIN(kKernelsAvx512Vnni)

}  // namespace lily
