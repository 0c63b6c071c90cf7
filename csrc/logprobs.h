// Logprobs: how likely the model held tokens to be, whatever they are then drawn by. On every backend the
// same, in double from the logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lily {

struct TokenLogprob {
    int32_t token;
    double logprob;
};

// The log-softmax of logits (V) for a token, then for the `top` likeliest, best first, ties to the lower id.
// Throws DeviceError for logits that are not finite.
std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t token, int top);

}  // namespace lily
