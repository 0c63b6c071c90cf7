// Drawing a token. The random numbers are a function of (seed, position, token id) alone, so a draw never
// depends on what was drawn before, on the batch, or on the order in which candidates are looked at.
#include <algorithm>
#include <cmath>

#include "cpu/backend.h"

namespace lily {

namespace {

// Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
        counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// A draw from the standard Gumbel distribution: the largest of logit + gumbel is a draw from the softmax.
double gumbel(uint64_t seed, int64_t position, int32_t token) {
    const auto p = static_cast<uint64_t>(position);
    const std::array<uint32_t, 4> words = philox(
        {static_cast<uint32_t>(token) / 4, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), 0},
        static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const double u =
        ((words[static_cast<size_t>(token) % 4] >> 8) + 0.5) * 0x1p-24;  // in (0, 1), never an end
    return -std::log(-std::log(u));
}

}  // namespace

int32_t sample_token(const float* logits, int vocab, const Sampling& s, int64_t position,
                     std::vector<int32_t>& ids) {
    if (s.temperature == 0) return static_cast<int32_t>(std::max_element(logits, logits + vocab) - logits);

    ids.resize(static_cast<size_t>(vocab));
    for (int32_t i = 0; i < vocab; ++i) ids[static_cast<size_t>(i)] = i;
    const auto better = [&](int32_t a, int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    auto end = ids.end();
    if (s.top_k > 0 && s.top_k < vocab) {
        std::nth_element(ids.begin(), ids.begin() + s.top_k, ids.end(), better);
        end = ids.begin() + s.top_k;
    }
    if (s.top_p < 1) {
        std::sort(ids.begin(), end, better);
        const auto weight = [&](int32_t i) {
            return std::exp((double(logits[i]) - logits[ids[0]]) / s.temperature);
        };
        double total = 0, mass = 0;
        for (auto i = ids.begin(); i != end; ++i) total += weight(*i);
        auto kept = ids.begin();
        do mass += weight(*kept++);
        while (kept != end && mass < s.top_p * total);
        end = kept;
    }
    int32_t best = -1;
    double best_score = 0;
    for (auto i = ids.begin(); i != end; ++i) {
        const double score = double(logits[*i]) / s.temperature + gumbel(s.seed, position, *i);
        if (best < 0 || score > best_score || (score == best_score && *i < best)) {
            best = *i;
            best_score = score;
        }
    }
    return best;
}

}  // namespace lily
