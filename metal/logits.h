// Logits as keys: unsigned numbers that order as the logits do, so that no comparison hangs on how a GPU
// treats subnormal numbers.
#pragma once

#include <metal_stdlib>

#include "args.h"

namespace lily {

using namespace metal;

constant constexpr uint kNotFinite = 0xffffffff;  // the key of what no logit may be
constant constexpr uint kExcluded = 0x007fffff;   // the key of -infinity

// -0 and 0 have one key.
METAL_FUNC uint key_of(float x) {
    const uint bits = as_type<uint>(x);
    if (bits == 0x80000000) return 0x80000000;
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000;
}

METAL_FUNC float value_of(uint key) {
    return as_type<float>(key >> 31 != 0 ? key & 0x7fffffff : ~key);
}

// The key of a logit as the head wrote it.
METAL_FUNC uint key_of_finite(float x) {
    return (as_type<uint>(x) & 0x7f800000) == 0x7f800000 ? kNotFinite : key_of(x);
}

}  // namespace lily
