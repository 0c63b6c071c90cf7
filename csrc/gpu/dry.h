// A decode step recorded dry: what would be dispatched, and in which stages, without weights and without a
// GPU.
#pragma once

#include <string>
#include <vector>

#include "config.h"
#include "options.h"

namespace lily {

struct RecordedDispatch {
    std::string kernel;
    int64_t stage = 0;       // dispatches of one stage run side by side; a barrier lies between two stages
    int64_t groups = 0;      // threadgroups
    int64_t threads = 0;     // of a threadgroup
    size_t bound_bytes = 0;  // of all buffers it names, whether it reads all of them or not
};

// The dispatches that take in one token at a position and end with its logits.
std::vector<RecordedDispatch> record_decode(const Config& config, const Options& options, int64_t position);

}  // namespace lily
