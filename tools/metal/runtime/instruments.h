// Watches every access of an instrumented kernel. Without instruments the scheduler calls none of this.
#pragma once

#include <cstdint>

#include "scheduler.h"

namespace lily::metal {

class Instruments {
   public:
    void begin_group();
    void end_group();
    void simd_went_on(uint32_t simd);

    // One access of a SIMD-group as a whole: a row of a matrix tile.
    void simd_access(const void* address, uint32_t bytes, bool write, uint32_t element, const void* code);
};

}  // namespace lily::metal
