// Kept: which memory a cache of states keeps, each block once, however many of the states share it.
#pragma once

#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "state.h"

namespace lily {

class Kept {
   public:
    size_t bytes() const;
    // Bytes that there would be more with this state.
    size_t cost(const State& state) const;
    // Counts a state among those that are kept, unless they would then take up more than `budget`.
    bool keep(const State& state, size_t budget);
    void let_go(const State& state);

   private:
    size_t cost_of(const State& state) const;

    mutable std::mutex mutex_;
    size_t bytes_ = 0;
    std::unordered_map<const Block*, int> states_;  // that hold a block
};

}  // namespace lily
