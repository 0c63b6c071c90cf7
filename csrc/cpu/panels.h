// Panels: matrices of 4 bits once more, in the order and the large pages that the kernels read fastest. They
// take the place of the file's pages in memory, as many bytes for as many.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/threads.h"
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

// The panels of some weights, which sessions share, made if there are none yet. repack: "off"; "on"; or
// "auto", if the weights are large and the system has room for them beside what it can't give up. Without
// panels, all are null.
std::shared_ptr<const Panels> panels_of(const Weights&, const Kernels&, Threads&, const std::string& repack);

}  // namespace lily
