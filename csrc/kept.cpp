#include "kept.h"

namespace lily {

size_t Kept::bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
}

size_t Kept::cost_of(const State& state) const {
    size_t more = 0;
    for (const Block* block : state.blocks())
        if (!states_.contains(block)) more += block->bytes();
    return more;
}

size_t Kept::cost(const State& state) const {
    const std::lock_guard lock(mutex_);
    return cost_of(state);
}

bool Kept::keep(const State& state, size_t budget) {
    const std::lock_guard lock(mutex_);
    const size_t more = cost_of(state);
    if (bytes_ + more > budget) return false;
    for (const Block* block : state.blocks()) ++states_[block];
    bytes_ += more;
    return true;
}

void Kept::let_go(const State& state) {
    const std::lock_guard lock(mutex_);
    for (const Block* block : state.blocks()) {
        const auto found = states_.find(block);
        if (found == states_.end() || --found->second > 0) continue;
        bytes_ -= block->bytes();
        states_.erase(found);
    }
}

}  // namespace lily
