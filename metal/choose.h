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
    float largest = -INFINITY, best = 0, total = 0, mine = 0;
    uint id = E - 1;
    bool stale = true;  // whether this lane's largest is to be found again, among every 32nd expert
    for (uint k = 0; k < K; ++k) {
        if (stale) {
            largest = -INFINITY;
            id = E - 1;
            for (uint e = lane; e < E; e += kSimd)
                if (logits[e] > largest) {
                    largest = logits[e];
                    id = e;
                }
        }
        const float most = simd_max(largest);
        const uint chosen = simd_min(largest == most ? id : E - 1);
        if (k == 0) best = most;
        const float share = precise::exp(most - best);
        total += share;
        stale = chosen % kSimd == lane;
        if (stale) logits[chosen] = -INFINITY;  // a lane writes only where it alone reads
        if (lane == k) {
            expert[k] = chosen;
            mine = share;
        }
    }
    if (lane < K) weight[lane] = mine / total;
}

}  // namespace lily
