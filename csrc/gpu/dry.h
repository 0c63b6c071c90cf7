// A decode step recorded dry: what would be dispatched, and in which stages, without weights and without a
// GPU.
#pragma once

#include <vector>

#include "config.h"
#include "options.h"
#include "traffic.h"

namespace lily {

// The dispatches that take in one token at a position and draw the next.
std::vector<RecordedDispatch> record_decode(const Config& config, const Options& options, int64_t position);

// The bytes allocated while a prompt of so many tokens is taken in, besides weights and the prompt's own
// state.
size_t scratch_of_prefill(const Config& config, const Options& options, int64_t tokens);

}  // namespace lily
