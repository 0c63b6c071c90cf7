// The kernels compiled for the least this architecture has, without an instruction called by name.
#include "cpu/kernels_impl.h"

namespace lily {

const Kernels kKernelsPlain =
    LILY_KERNEL_TABLE("plain", arrange, product, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);

}  // namespace lily
