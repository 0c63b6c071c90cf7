#include "cpu/panels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace lily {

namespace {

constexpr size_t kWorthPacking = size_t{1} << 30;  // less is made ready in place sooner than it is packed
constexpr double kRoom = 1.1;                      // of the panels' bytes, that must be available

// The number in a file, or after a name in one; the largest if there is none.
size_t number_in(const char* path, const std::string& name = "") {
    std::ifstream file(path);
    std::string word;
    while (!name.empty() && file >> word && word != name) {
    }
    size_t number = 0;
    return file >> number ? number : std::numeric_limits<size_t>::max();
}

// Bytes that could be had without taking any from other processes; files in memory count as free.
size_t available_memory() {
    constexpr size_t kNone = std::numeric_limits<size_t>::max();
    size_t available = number_in("/proc/meminfo", "MemAvailable:");
    if (available != kNone) available *= 1024;
    const size_t limit = number_in("/sys/fs/cgroup/memory.max"),
                 used = number_in("/sys/fs/cgroup/memory.stat", "anon");
    if (limit != kNone && used != kNone) available = std::min(available, limit - std::min(limit, used));
    return available;
}

// Gives back the pages that lie within some of a file's bytes; who reads there again finds them in the file.
void drop_pages(const Tensor& tensor) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(tensor.data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(tensor.data) + tensor.bytes()) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

size_t packed_bytes(const Linear& w) {
    return w.weight.bytes() + w.scales.bytes() + w.biases.bytes();
}

}  // namespace

std::shared_ptr<const Panels> panels_of(const Weights& weights, const Kernels& kernels, Threads& threads,
                                        const std::string& repack) {
    auto panels = std::make_shared<Panels>();
    panels->of.resize(static_cast<size_t>(weights.matrices));
    if (repack == "off" || !kernels.pack) return panels;
    const std::lock_guard lock(weights.panels_mutex);
    if (auto made = weights.panels.lock()) return made;
    size_t bytes = 0;
    for_each_matrix(weights, [&](const Linear& w) { bytes += kernels.packs(w) ? packed_bytes(w) : 0; });
    const bool fits =
        bytes >= kWorthPacking && static_cast<double>(bytes) * kRoom < double(available_memory());
    if (bytes == 0 || (repack == "auto" && !fits)) return panels;

    panels->bytes = bytes;
    panels->memory = map_memory(bytes);
    std::byte* to = panels->memory.get();
    for_each_matrix(weights, [&](const Linear& w) {
        if (!kernels.packs(w)) return;
        panels->of[static_cast<size_t>(w.number)] = to;
        threads.run(w.rows / kPackRows, w.rows * w.columns,
                    [&](int64_t block, int) { kernels.pack(w, block, to); });
        for (const Tensor* part : {&w.weight, &w.scales, &w.biases}) drop_pages(*part);
        to += packed_bytes(w);
    });
    weights.panels = panels;
    return panels;
}

}  // namespace lily
