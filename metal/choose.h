// Routing: which experts a token goes to.
#pragma once

#include "quant.h"

namespace lily {

constant constexpr ushort kMaxChosen = 32;  // experts of a token

// The K largest of E logits, best first, ties to the lower id, and their shares of the softmax over those K,
// by one SIMD-group. logits are overwritten. Where no number is left, as after a NaN, the last expert is
// named: every id is one that exists.
METAL_FUNC void choose(threadgroup float* logits, uint E, uint K, ushort lane, threadgroup uint* expert,
                       threadgroup float* weight) {
    float best = 0, total = 0;
    for (uint k = 0; k < K; ++k) {
        float value = -INFINITY;
        uint id = E - 1;
        for (uint e = lane; e < E; e += kSimd)
            if (logits[e] > value) {
                value = logits[e];
                id = e;
            }
        const float largest = simd_max(value);
        const uint chosen = simd_min(value == largest ? id : E - 1);
        if (k == 0) best = largest;
        const float share = precise::exp(largest - best);
        total += share;
        simdgroup_barrier(mem_flags::mem_threadgroup);  // all have read before one writes
        if (lane == 0) {
            expert[k] = chosen;
            weight[k] = share;
            logits[chosen] = -INFINITY;
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint k = lane; k < K; k += kSimd) weight[k] /= total;
}

}  // namespace lily
