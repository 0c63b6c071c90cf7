// Drawing a token on the host, bit for bit as reference.py states it. The random numbers are a function of
// (seed, position, token id) alone, so a draw never depends on what was drawn before, on the batch, or on the
// order in which candidates are looked at. That leaves the order free: what can't win is skipped.
#include "sample.h"

#include <algorithm>
#include <limits>

#include "error.h"
#include "metal/fixed.h"

namespace lily {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kBinBits = 14;       // a bin of logits: sign, exponent and five bits of the mantissa
constexpr int kBlock = 16;         // logits looked at together
constexpr int kLeastBuffer = 256;  // candidates gathered before the best of them are picked

// By a logit's bits as an int that orders as the floats do.
size_t bin_of(float x) {
    const auto bits = std::bit_cast<int32_t>(x + 0.f);  // -0 + 0 is +0
    const int32_t order = bits ^ ((bits >> 31) & 0x7fffffff);
    return (static_cast<uint32_t>(order) ^ 0x80000000u) >> (32 - kBinBits);
}

bool better(const Candidate& a, const Candidate& b) {
    return a.x > b.x || (a.x == b.x && a.token < b.token);
}

template <class Entry>
void check_ids(const char* what, std::span<const Entry> entries, size_t vocab) {
    if (entries.empty()) return;
    const int32_t first = entries.front().token, last = entries.back().token;  // they are in order
    LILY_CHECK(std::invalid_argument, first >= 0 && static_cast<size_t>(last) < vocab,
               "%s: wanted token ids from 0 to %zu, got %d", what, vocab - 1, first < 0 ? first : last);
}

// The logits after mask, bias and penalties, in that order; -infinity for what is excluded.
void adjust(std::span<float> x, const Sampling& s, const Draw& draw) {
    for (size_t i = 0; i < x.size() && !draw.allowed.empty(); ++i)
        if ((draw.allowed[i / 32] >> (i % 32) & 1) == 0) x[i] = -kInfinity;
    for (const auto& [token, bias] : s.bias) x[static_cast<size_t>(token)] += bias;
    const float inverse = 1 / s.repetition_penalty;
    for (const auto& [token, count] : draw.counts) {
        float& value = x[static_cast<size_t>(token)];
        value *= value < 0 ? s.repetition_penalty : inverse;
        const float many = s.frequency_penalty * static_cast<float>(count);
        value -= s.presence_penalty + many;
    }
    const auto limit = [&](const auto& entry) {
        float& value = x[static_cast<size_t>(entry.token)];
        value = std::min(value, std::numeric_limits<float>::max());
    };
    std::ranges::for_each(s.bias, limit);
    std::ranges::for_each(draw.counts, limit);
}

// A draw among adjusted logits.
class Drawing {
   public:
    Drawing(std::span<const float> x, float top, const Sampling& s, int64_t position)
        : x_(x),
          top_(top),
          factor_(factor_of(s.temperature)),
          least_mass_(least_mass_of(s.min_p)),
          seed_(s.seed),
          position_(static_cast<uint64_t>(position)) {}

    // (x - top) / temperature in 2^-24.
    int64_t scaled(float x) const { return static_cast<int32_t>(std::max((x - top_) * factor_, -0x1p30f)); }
    uint64_t mass_of(float x) const {
        const int64_t z = scaled(x);
        return z < kNoMass ? 0 : mass(z);
    }

    // The one drawn of all tokens that are no worse than `last`.
    int32_t among_all(const Candidate& last) {
        const auto vocab = static_cast<int32_t>(x_.size());
        const auto first = static_cast<int32_t>(std::ranges::find(x_, top_) - x_.begin());
        consider({top_, first}, block(first / 4).word[first % 4]);
        for (int32_t start = 0; start < vocab; start += 4) {
            const int32_t end = std::min(start + 4, vocab);
            float most = -kInfinity;
            for (int32_t i = start; i < end; ++i) most = std::max(most, x_[static_cast<size_t>(i)]);
            if (most < last.x || scaled(most) + kLargestGumbel < score_) continue;
            const RandomWords words = block(start / 4);
            for (int32_t i = start; i < end; ++i) {
                const Candidate candidate{x_[static_cast<size_t>(i)], i};
                if (!better(last, candidate)) consider(candidate, words.word[i - start]);
            }
        }
        return token_;
    }

    int32_t among(std::span<const Candidate> candidates) {
        for (const Candidate& candidate : candidates) {
            const int32_t i = candidate.token;
            if (scaled(candidate.x) + kLargestGumbel >= score_) consider(candidate, block(i / 4).word[i % 4]);
        }
        return token_;
    }

   private:
    // The random words of tokens 4 b to 4 b + 3.
    RandomWords block(int32_t b) const { return philox(static_cast<uint32_t>(b), position_, seed_); }

    // A number that gumbel(word) is never above, for little work: -ln u is at least 1 - u, and that at least
    // half the power of two that begins it.
    static int64_t gumbel_bound(uint32_t word) {
        constexpr int64_t kLn2Up = (kLn2 >> 32) + 1;  // in 2^-24
        return (1 + std::countl_zero(~word)) * kLn2Up;
    }

    void consider(const Candidate& candidate, uint32_t word) {
        const int64_t z = scaled(candidate.x);
        if (z + gumbel_bound(word) < score_ || (least_mass_ > 0 && mass(z) < least_mass_)) return;
        const int64_t score = z + gumbel(word);
        if (score < score_ || (score == score_ && candidate.token > token_)) return;
        score_ = score;
        token_ = candidate.token;
    }

    const std::span<const float> x_;
    const float top_, factor_;
    const uint64_t least_mass_, seed_, position_;
    int64_t score_ = std::numeric_limits<int32_t>::min();
    int32_t token_ = std::numeric_limits<int32_t>::max();
};

// Gathers the k best, in no order. Of tokens that come with rising ids, an equal one is never better.
void gather_best(std::span<const float> x, size_t k, std::vector<Candidate>& found) {
    found.clear();
    const size_t room = std::min(k + std::max<size_t>(k, kLeastBuffer), x.size());
    float bar = -kInfinity;  // to be among the best, a logit must be above it
    const auto shrink = [&] {
        if (found.size() < k) return;
        std::nth_element(found.begin(), found.begin() + static_cast<ptrdiff_t>(k) - 1, found.end(), better);
        found.resize(k);
        bar = found.back().x;
    };
    for (size_t start = 0; start < x.size(); start += kBlock) {
        const auto block = x.subspan(start, std::min<size_t>(kBlock, x.size() - start));
        int above = 0;
        for (const float value : block) above |= value > bar;
        if (!above) continue;
        for (size_t i = 0; i < block.size(); ++i) {
            if (!(block[i] > bar)) continue;
            if (found.size() == room) shrink();
            if (block[i] > bar) found.push_back({block[i], static_cast<int32_t>(start + i)});
        }
    }
    shrink();
}

// How many of candidates, best first, it takes to hold a mass; at least one.
size_t count_holding(std::span<const Candidate> candidates, const Drawing& drawing, uint64_t wanted) {
    size_t count = 0;
    uint64_t held = 0;
    do held += drawing.mass_of(candidates[count++].x);
    while (count < candidates.size() && held < wanted);
    return count;
}

// The last of the best of all tokens that hold top_p of the mass. Bins keep the sorting to a few of them.
Candidate last_holding(std::span<const float> x, const Drawing& drawing, float top_p,
                       SampleScratch& scratch) {
    std::ranges::fill(scratch.masses, 0);
    uint64_t total = 0;
    for (const float value : x)
        if (const uint64_t m = drawing.mass_of(value)) {
            scratch.masses[bin_of(value)] += m;
            total += m;
        }
    const uint64_t wanted = std::max<uint64_t>(part_of(total, parts_of(top_p)), 1);
    uint64_t held = 0;
    size_t bin = scratch.masses.size() - 1;
    while (held + scratch.masses[bin] < wanted) held += scratch.masses[bin--];

    std::vector<Candidate>& found = scratch.candidates;
    found.clear();
    for (size_t i = 0; i < x.size(); ++i)
        if (bin_of(x[i]) == bin) found.push_back({x[i], static_cast<int32_t>(i)});
    std::ranges::sort(found, better);
    return found[count_holding(found, drawing, wanted - held) - 1];
}

}  // namespace

void check_draw(const Sampling& s, const Draw& draw, size_t vocab) {
    check_ids<TokenBias>("logit_bias", s.bias, vocab);
    check_ids<TokenCount>("history", draw.counts, vocab);
    LILY_CHECK(std::invalid_argument, draw.allowed.empty() || draw.allowed.size() == (vocab + 31) / 32,
               "allowed: wanted %zu words, a bit for each of %zu tokens, got %zu", (vocab + 31) / 32, vocab,
               draw.allowed.size());
}

bool adjusts(const Sampling& s, const Draw& draw) {
    const bool penalised = s.repetition_penalty != 1 || s.presence_penalty != 0 || s.frequency_penalty != 0;
    return !draw.allowed.empty() || !s.bias.empty() || (penalised && !draw.counts.empty());
}

void throw_not_finite(std::span<const float> x) {
    size_t i = 0;
    while (x[i] - x[i] == 0) ++i;
    throw DeviceError(
        format("sample: wanted finite logits, got %g for token %zu of %zu; the weights are "
               "damaged, or the device failed",
               static_cast<double>(x[i]), i, x.size()));
}

void throw_none_left(size_t vocab) {
    throw std::invalid_argument(
        format("no token is left to draw; the mask and logit_bias exclude all %zu", vocab));
}

SampleScratch::SampleScratch(int vocab)
    : tops((static_cast<size_t>(vocab) + kTopBlock - 1) / kTopBlock), masses(size_t{1} << kBinBits) {
    adjusted.resize(static_cast<size_t>(vocab));
    candidates.reserve(static_cast<size_t>(vocab));
}

size_t SampleScratch::bytes() const {
    return (tops.size() + adjusted.size()) * sizeof(float) + candidates.capacity() * sizeof(Candidate) +
           masses.size() * sizeof(uint64_t);
}

int32_t sample_token(std::span<const float> logits, const Sampling& s, const Draw& draw,
                     SampleScratch& scratch, const FindTops& find_tops) {
    check_draw(s, draw, logits.size());
    std::vector<float>& tops = scratch.tops;
    if (!find_tops(logits, tops)) throw_not_finite(logits);
    std::span<const float> x = logits;
    if (adjusts(s, draw)) {
        scratch.adjusted.assign(logits.begin(), logits.end());
        adjust(scratch.adjusted, s, draw);
        x = scratch.adjusted;
        find_tops(x, tops);
    }
    const auto first = std::ranges::max_element(tops);
    const float top = *first;
    if (top == -kInfinity) throw_none_left(x.size());
    if (s.temperature == 0) {
        const auto block = x.begin() + kTopBlock * (first - tops.begin());
        return static_cast<int32_t>(std::find(block, x.end(), top) - x.begin());
    }

    Drawing drawing(x, top, s, draw.position);
    if (s.top_k > 0 && static_cast<size_t>(s.top_k) < x.size()) {
        gather_best(x, static_cast<size_t>(s.top_k), scratch.candidates);
        std::span<const Candidate> kept = scratch.candidates;
        if (s.top_p < 1) {
            std::ranges::sort(scratch.candidates, better);
            uint64_t total = 0;
            for (const Candidate& candidate : kept) total += drawing.mass_of(candidate.x);
            kept = kept.first(count_holding(kept, drawing, part_of(total, parts_of(s.top_p))));
        }
        return drawing.among(kept);
    }
    if (s.top_p < 1) return drawing.among_all(last_holding(x, drawing, s.top_p, scratch));
    return drawing.among_all({-kInfinity, std::numeric_limits<int32_t>::max()});
}

}  // namespace lily
