// The kernels that the extension carries: tools/metal/embed.py writes the file that defines them.
#pragma once

#include <span>
#include <string_view>

namespace lily {

struct KernelSource {
    std::string_view name;  // of the file in metal/
    std::string_view text;  // with what it includes of ours
};

extern const std::span<const KernelSource> kKernelSources;
extern const std::string_view kMetallib;  // compiled from them; empty unless Apple's compiler was there

}  // namespace lily
