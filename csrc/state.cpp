#include "state.h"

#include "ops.h"

namespace lily {

StateLayout::StateLayout(const Config& c, DType kv_type, int recurrent_copies)
    : kv(kv_type), copies(recurrent_copies) {
    plane = static_cast<size_t>(c.kv_heads) * kPageTokens * static_cast<size_t>(c.head_dim) * bytes_of(kv);
    page = plane * 2 * static_cast<size_t>(c.attention_layers());
    conv = static_cast<int64_t>(c.conv_taps - 1) * c.channels();
    delta = static_cast<int64_t>(c.value_heads) * c.value_dim * c.key_dim;
    delta_layers = c.delta_layers();
    recurrent = static_cast<size_t>(delta_layers) * static_cast<size_t>(conv + delta) * sizeof(float);
    logits = static_cast<size_t>(c.vocab) * sizeof(float);
}

State::State(const StateLayout& layout, Ops& ops)
    : layout_(layout),
      recurrent_(ops.allocate(layout.recurrent_bytes())),
      logits_(ops.allocate(layout.logits)) {}

size_t State::bytes() const {
    return pages_.size() * layout_.page + layout_.recurrent_bytes() + layout_.logits;
}

void State::prepare(int64_t tokens, Ops& ops) {
    const auto own = [&](Memory& memory, size_t bytes) {
        if (memory.use_count() == 1) return;
        Memory mine = ops.allocate(bytes);
        ops.copy(mine.get(), memory.get(), bytes);
        memory = std::move(mine);
    };
    own(recurrent_, layout_.recurrent_bytes());
    own(logits_, layout_.logits);
    if (layout_.page == 0 || tokens == 0) return;
    const auto first = static_cast<size_t>(length_ / kPageTokens);  // where the next position goes
    if (first < pages_.size()) own(pages_[first], layout_.page);
    const auto wanted = static_cast<size_t>((length_ + tokens + kPageTokens - 1) / kPageTokens);
    while (pages_.size() < wanted) pages_.push_back(ops.allocate(layout_.page));
}

float* State::recurrent(int copy, int delta_layer) const {
    return reinterpret_cast<float*>(recurrent_.get() + static_cast<size_t>(copy) * layout_.recurrent) +
           delta_layer * (layout_.conv + layout_.delta);
}

}  // namespace lily
