// Panels: matrices of 4 bits once more, in the order and the large pages that the kernels read fastest. They
// take the place of the file's pages in memory, as many bytes for as many.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "error.h"
#include "state.h"
#include "weights.h"

namespace lily {

// Zeros, in large pages where there are enough of them.
Memory map_memory(size_t bytes);

struct Panels {
    Memory memory;
    size_t bytes = 0;
    std::vector<const std::byte*> of;  // by Linear::number; null: read where the file has it

    const std::byte* at(const Linear& w) const { return of[static_cast<size_t>(w.number)]; }
};

// How panels are asked for: the options repack and repack_cache.
struct Packing {
    std::string repack;  // "off"; "on"; or "auto", if the weights are large and the system has room for
                         // panels beside what it can't give up
    std::string cache;   // where a file of them is kept; see PanelFile
    Notice notice;
};

// The panels of some weights, which sessions share, made if there are none yet. Without panels, all are null.
std::shared_ptr<const Panels> panels_of(const Weights&, const Kernels&, Threads&, const Packing&);

}  // namespace lily
