// Routing: which experts a token goes to.
#pragma once

#include "quant.h"

namespace lily {

constant constexpr ushort kMaxChosen = 32;  // experts of a token

// The K largest of E logits, best first, ties to the lower id. Every thread counts how many come before the
// one it looks at, which takes one pass where K maxima in a row would take K; a SIMD-group looks at 32 in a
// row, so those below them win a tie and those above lose it. None of the logits may be NaN. The caller's
// barrier makes the choice visible.
METAL_FUNC void choose(threadgroup const float* logits, uint E, uint K, ushort simd, ushort simds,
                       ushort lane, threadgroup uint* expert) {
    for (uint first = simd * kSimd; first < E; first += simds * kSimd) {
        const float mine = logits[min(first + lane, E - 1)];
        uint before = 0;
#pragma unroll 8
        for (uint o = 0; o < first; ++o) before += logits[o] >= mine;
        for (uint o = first; o < min(first + kSimd, E); ++o)
            before += logits[o] > mine || (logits[o] == mine && o < first + lane);
#pragma unroll 8
        for (uint o = first + kSimd; o < E; ++o) before += logits[o] > mine;
        if (before < K && first + lane < E) expert[before] = first + lane;
    }
}

// A router's logit as choose() takes it: what is no number comes last.
METAL_FUNC float comparable(float logit) { return isnan(logit) ? -INFINITY : logit; }

// The share of the k-th chosen expert: of the softmax over those K.
METAL_FUNC float share_of(threadgroup const float* logits, uint K, threadgroup const uint* expert, uint k) {
    const float best = logits[expert[0]];
    float total = 0;
    for (uint o = 0; o < K; ++o) total += precise::exp(logits[expert[o]] - best);
    return precise::exp(logits[expert[k]] - best) / total;
}

}  // namespace lily
