// The kernels of prompts compiled for AMX; a row or few go through those of kernels_avx512vnni.cpp.
#include "cpu/flash.h"

namespace lily {

const Kernels kKernelsAmxPrompt = LILY_KERNEL_TABLE("amx", arrange_tiles, product_rows_of, tile_rows,
                                                    product_tiles, packs, pack, flash_begin, flash_page);

bool has_amx() {
    static const bool granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                                __builtin_cpu_supports("avx512bf16") && may_use_tiles();
    return granted;
}

}  // namespace lily
