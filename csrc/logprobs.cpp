#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "error.h"

namespace lily {

namespace {

// The `count` largest, best first. A heap of them with the worst on top turns nearly all others away at once.
std::vector<int32_t> likeliest(std::span<const float> logits, size_t count) {
    const auto better = [&](int32_t a, int32_t b) {
        const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
        return x > y || (x == y && a < b);
    };
    std::vector<int32_t> heap;
    float bar = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < logits.size(); ++i) {
        if (heap.size() == count && !(logits[i] > bar)) continue;  // an equal one has the higher id
        if (heap.size() == count) {
            std::ranges::pop_heap(heap, better);
            heap.pop_back();
        }
        heap.push_back(static_cast<int32_t>(i));
        std::ranges::push_heap(heap, better);
        bar = logits[static_cast<size_t>(heap.front())];
    }
    std::ranges::sort_heap(heap, better);
    return heap;
}

}  // namespace

std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t token, int top) {
    const size_t vocab = logits.size();
    LILY_CHECK(std::invalid_argument, token >= 0 && static_cast<size_t>(token) < vocab,
               "token: wanted an id from 0 to %zu, got %d", vocab - 1, token);
    LILY_CHECK(std::invalid_argument, top >= 0, "top: wanted at least 0, got %d", top);
    const double largest = *std::ranges::max_element(logits);
    double sum = 0;
    for (const float logit : logits) sum += std::exp(logit - largest);
    LILY_CHECK(DeviceError, std::isfinite(sum),
               "logprobs: wanted finite logits, got others; the weights are damaged, or the device failed");

    const double normaliser = largest + std::log(sum);
    const auto logprob = [&](int32_t id) {
        return TokenLogprob{id, logits[static_cast<size_t>(id)] - normaliser};
    };
    std::vector<TokenLogprob> found = {logprob(token)};
    if (top > 0)
        for (const int32_t id : likeliest(logits, std::min<size_t>(static_cast<size_t>(top), vocab)))
            found.push_back(logprob(id));
    return found;
}

}  // namespace lily
