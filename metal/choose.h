// Routing: which experts a token goes to.
#pragma once

#include "quant.h"

namespace lily {

constant constexpr ushort kMaxChosen = 32;  // experts of a token

struct Candidate {
    float logit;
    uint expert;
};

// The K largest of E logits, best first, ties to the lower id, by one SIMD-group. Each lane finds the best of
// its own, every 32nd; the K-th of those bests is at most the K-th of all, so what is less than it drops out,
// which leaves little more than K candidates to be counted against each other. None of the logits may be NaN,
// and K is at most 32. The caller's barrier makes the choice visible.
METAL_FUNC void choose(threadgroup const float* logits, threadgroup Candidate* candidates, uint E, uint K,
                       ushort lane, threadgroup uint* expert) {
    float best = -INFINITY;
    for (uint e = lane; e < E; e += kSimd) best = max(best, logits[e]);
    uint before = 0;
#pragma unroll
    for (ushort o = 0; o < kSimd; ++o) {
        const float other = simd_shuffle(best, o);
        before += other > best || (other == best && o < lane);
    }
    const float least = simd_max(before == K - 1 ? best : -INFINITY);
    uint count = 0;
    for (uint first = 0; first < E; first += kSimd) {
        const uint e = first + lane;
        const float mine = logits[min(e, E - 1)];
        const bool stays = e < E && mine >= least;
        const uint votes = uint(simd_vote::vote_t(simd_ballot(stays)));
        if (stays) candidates[count + popcount(votes & ((1u << lane) - 1u))] = Candidate{mine, e};
        count += popcount(votes);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = lane; c < count; c += kSimd) {
        const Candidate mine = candidates[c];
        uint rank = 0;
#pragma unroll 8
        for (uint o = 0; o < count; ++o) {
            const float other = candidates[o].logit;
            rank += other > mine.logit || (other == mine.logit && o < c);
        }
        if (rank < K) expert[rank] = mine.expert;
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
