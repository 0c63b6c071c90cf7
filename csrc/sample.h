// Drawing a token on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ops.h"

namespace lily {

struct Candidate {
    float x;  // its adjusted logit
    int32_t token;
};

constexpr int kTopBlock = 4096;  // logits whose largest is found at a time

// Memory that drawing needs, so that it allocates none.
struct SampleScratch {
    explicit SampleScratch(int vocab);
    size_t bytes() const;

    std::vector<float> tops;            // (V / kTopBlock) the largest of each block
    std::vector<float> adjusted;        // (V)
    std::vector<Candidate> candidates;  // at most V
    std::vector<uint64_t> masses;       // by bin of logits
};

// Settings in the units of metal/fixed.h: 2^24 / temperature; top_p below 1 in 2^-32; min_p in 2^-40.
inline float factor_of(float temperature) {
    return 0x1p24f / std::max(temperature, 0x1p-20f);
}
inline uint32_t parts_of(float top_p) {
    return static_cast<uint32_t>(top_p * 0x1p32f);
}
inline uint64_t least_mass_of(float min_p) {
    return static_cast<uint64_t>(min_p * 0x1p40f);
}

// Throws std::invalid_argument for an id outside the vocabulary or a mask of another size.
void check_draw(const Sampling&, const Draw&, size_t vocab);

// Whether logits are changed before a token is drawn from them.
bool adjusts(const Sampling&, const Draw&);

// What it means that no token could be drawn. Throw always.
[[noreturn]] void throw_not_finite(std::span<const float> logits);
[[noreturn]] void throw_none_left(size_t vocab);

// Fills `tops` with the largest of each block of x; returns whether all of x is finite.
using FindTops = std::function<bool(std::span<const float> x, std::vector<float>& tops)>;
int32_t sample_token(std::span<const float> logits, const Sampling&, const Draw&, SampleScratch&,
                     const FindTops& find_tops);

}  // namespace lily
