// GpuOps: drawing a token, as the dispatches of metal/sample.metal.
#include "sample.h"

#include <algorithm>

#include "error.h"
#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

namespace {

constexpr uint32_t kThreads = 512;  // of sample: metal/sample.metal

uint32_t low(uint64_t x) {
    return static_cast<uint32_t>(x);
}
uint32_t high(uint64_t x) {
    return static_cast<uint32_t>(x >> 32);
}

}  // namespace

void GpuOps::allocate_draw(int64_t vocab) {
    const int64_t blocks = ceil_div(vocab, args::kLogitBlock);
    drawable_ = vocab;
    best_ = reinterpret_cast<uint32_t*>(scratch(kLogitRows * blocks));
    adjusted_ = scratch(vocab);
    listed_.resize(static_cast<size_t>(vocab));
    edits_ = reinterpret_cast<args::Edit*>(
        scratch(vocab * static_cast<int64_t>(sizeof(args::Edit) / sizeof(float))));
    allowed_ = reinterpret_cast<uint32_t*>(scratch(blocks));
}

// Writes down, by token, whose logits change: those with a bias and those generated before. Both lists are
// sorted.
uint32_t GpuOps::list_edits(const Sampling& s, const Draw& draw) {
    args::Edit* edit = listed_.data();
    auto bias = s.bias.begin();
    auto count = draw.counts.begin();
    while (bias != s.bias.end() || count != draw.counts.end()) {
        const bool biased =
            bias != s.bias.end() && (count == draw.counts.end() || bias->token <= count->token);
        const bool counted = count != draw.counts.end() && (!biased || count->token == bias->token);
        *edit = {static_cast<uint32_t>(biased ? bias->token : count->token), 0, counted, 0};
        if (biased) edit->bias = bias++->bias;
        if (counted) {
            const float many = s.frequency_penalty * static_cast<float>(count++->count);
            edit->penalty = s.presence_penalty + many;
        }
        ++edit;
    }
    const auto edits = static_cast<uint32_t>(edit - listed_.data());
    device_->write(edits_, listed_.data(), edits * sizeof(args::Edit));
    return edits;
}

// The logits that a token is drawn from, with the best of each of their blocks in best_: the head's own if
// nothing changes them.
const float* GpuOps::adjust(std::span<const float> logits, const Sampling& s, const Draw& draw) {
    const bool adjusted = adjusts(s, draw);
    if (!adjusted && best_of_ == logits.data()) return logits.data();
    const auto vocab = static_cast<uint32_t>(logits.size());
    const uint32_t blocks = ceil_div(vocab, args::kLogitBlock);
    args::Adjust p{vocab, 0, !draw.allowed.empty(), s.repetition_penalty, 1 / s.repetition_penalty};
    if (adjusted) {
        recorder_.finish();  // the host writes what an earlier draw may still read
        p.edits = list_edits(s, draw);
        device_->write(allowed_, draw.allowed.data(), draw.allowed.size_bytes());
    }
    run(recorder_, {.kernel = "sample_adjust", .groups = {groups_for(blocks), 1, 1}}, p,
        Buffers()
            .read(logits.data(), logits.size_bytes())
            .read(edits_, p.edits * sizeof(args::Edit))
            .read(allowed_, draw.allowed.size_bytes())
            .write(adjusted_, adjusted ? logits.size_bytes() : 0)
            .write(best_, blocks * sizeof(uint32_t)));
    best_of_ = adjusted ? nullptr : logits.data();
    return adjusted ? adjusted_ : logits.data();
}

void GpuOps::sample(std::span<const float> logits, const Sampling& s, const Draw& draw) {
    recorder_.begin("sample");
    try {
        check_draw(s, draw, logits.size());
    } catch (...) {
        recorder_.finish();  // the logits, which somebody may read next
        throw;
    }
    if (static_cast<int64_t>(logits.size()) > drawable_) allocate_draw(static_cast<int64_t>(logits.size()));
    const float* x = adjust(logits, s, draw);
    const auto vocab = static_cast<uint32_t>(logits.size());
    const uint32_t blocks = ceil_div(vocab, args::kLogitBlock);
    const uint64_t least = least_mass_of(s.min_p);
    const args::Matrix embedding = matrix(embedding_);
    const auto position = static_cast<uint64_t>(draw.position);
    const args::Sample p{
        .vocab = vocab,
        .blocks = blocks,
        .factor = s.temperature == 0 ? 0 : factor_of(s.temperature),
        .top_k = s.top_k > 0 && static_cast<uint32_t>(s.top_k) < vocab ? static_cast<uint32_t>(s.top_k) : 0,
        .has_part = s.top_p < 1,
        .part = s.top_p < 1 ? parts_of(s.top_p) : 0,
        .least_mass = {low(least), high(least)},
        .seed = {low(s.seed), high(s.seed)},
        .position = {low(position), high(position)},
        .embeds = options_.token_handoff && vocab == embedding.rows,
        .embedding = embedding};
    // The best token's block of logits is all that a greedy draw looks at.
    const size_t looked_at = p.factor == 0
                                 ? std::min<size_t>(args::kLogitBlock * sizeof(float), logits.size_bytes())
                                 : logits.size_bytes();
    run(recorder_, {.kernel = "sample", .groups = {1, 1, 1}, .threads = kThreads}, p,
        Buffers()
            .add(Binding::read(x, logits.size_bytes()).reading(looked_at))
            .read(best_, blocks * sizeof(uint32_t))
            .write(slot_->token, sizeof(int32_t))
            .weights(embedding_, p.embeds)
            .write(a_.x.data, p.embeds ? bytes_of_rows(a_.x, 1) : 0));
    drawn_ = slot_;
    slot_->drawn_of = logits;
    slot_->number = recorder_.commit();
    embedded_ = p.embeds;
}

int32_t GpuOps::drawn(int back) {
    const Slot& slot = back ? other(drawn_) : *drawn_;
    recorder_.wait(slot.number);
    const int32_t token = *static_cast<const volatile int32_t*>(slot.token);
    if (token == args::kNotFiniteToken) {
        std::vector<float> logits(slot.drawn_of.size());
        device_->copy(logits.data(), slot.drawn_of.data(), slot.drawn_of.size_bytes());
        throw_not_finite(logits);
    }
    if (token == args::kNoToken) throw_none_left(slot.drawn_of.size());
    return token;
}

}  // namespace lily
