// History: the tokens that one answer has so far, counted for the penalties.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "ops.h"

namespace lily {

class History {
   public:
    void add(int32_t token) {
        const auto place = std::ranges::lower_bound(counts_, token, {}, &TokenCount::token);
        if (place != counts_.end() && place->token == token)
            ++place->count;
        else
            counts_.insert(place, {token, 1});
    }
    std::span<const TokenCount> counts() const { return counts_; }  // by token

   private:
    std::vector<TokenCount> counts_;
};

}  // namespace lily
