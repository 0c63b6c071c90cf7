// Drawing a token on the host.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops.h"

namespace lily {

struct Candidate {
    float x;  // its adjusted logit
    int32_t token;
};

// Memory that drawing needs, so that it allocates none.
struct SampleScratch {
    explicit SampleScratch(int vocab);
    size_t bytes() const;

    std::vector<float> adjusted;        // (V)
    std::vector<Candidate> candidates;  // at most V
    std::vector<uint64_t> masses;       // by bin of logits
};

int32_t sample_token(std::span<const float> logits, const Sampling&, const Draw&, SampleScratch&);

}  // namespace lily
