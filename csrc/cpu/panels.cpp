#include "cpu/panels.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "cpu/panel_file.h"

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

// Calls take(matrix, where its panels begin) for every matrix that has any; returns the bytes of all.
template <class Take>
size_t for_each_packed(const Weights& weights, const Kernels& kernels, const Take& take) {
    size_t bytes = 0;
    for_each_matrix(weights, [&](const Linear& w) {
        if (!kernels.packs(w)) return;
        take(w, bytes);
        bytes += packed_bytes(w);
    });
    return bytes;
}

// Packs a matrix and gives back the file's pages of it: two copies of all are never in memory.
void pack(const Linear& w, const Kernels& kernels, Threads& threads, std::byte* to) {
    threads.run(w.rows / kPackRows, w.rows * w.columns,
                [&](int64_t block, int) { kernels.pack(w, block, to); });
    for (const Tensor* part : {&w.weight, &w.scales, &w.biases}) drop_pages(*part);
}

Memory pack_into_memory(const Weights& weights, const Kernels& kernels, Threads& threads, size_t bytes) {
    Memory memory = map_memory(bytes);
    for_each_packed(weights, kernels,
                    [&](const Linear& w, size_t at) { pack(w, kernels, threads, memory.get() + at); });
    return memory;
}

// Through memory for one matrix, the largest.
Memory pack_into_file(const Weights& weights, const Kernels& kernels, Threads& threads,
                      const PanelFile& file) {
    return file.make([&](const PanelFile::Put& put) {
        size_t largest = 0;
        for_each_packed(weights, kernels,
                        [&](const Linear& w, size_t) { largest = std::max(largest, packed_bytes(w)); });
        const Memory one = map_memory(largest);
        bool good = true;
        for_each_packed(weights, kernels, [&](const Linear& w, size_t) {
            if (!good) return;
            pack(w, kernels, threads, one.get());
            good = put(one.get(), packed_bytes(w));
        });
        return good;
    });
}

bool has_room(size_t bytes) {
    return static_cast<double>(bytes) * kRoom < static_cast<double>(available_memory());
}

}  // namespace

std::shared_ptr<const Panels> panels_of(const Weights& weights, const Kernels& kernels, Threads& threads,
                                        const Packing& packing) {
    auto panels = std::make_shared<Panels>();
    panels->of.resize(static_cast<size_t>(weights.matrices));
    if (packing.repack == "off" || !kernels.pack) return panels;
    const std::lock_guard lock(weights.panels_mutex);
    if (auto made = weights.panels.lock()) return made;
    const size_t bytes = for_each_packed(weights, kernels, [](const Linear&, size_t) {});
    const bool automatic = packing.repack == "auto";
    if (bytes == 0 || (automatic && bytes < kWorthPacking)) return panels;

    // A file's pages can be given up, and so need no room.
    const PanelFile file(weights, kernels, bytes, packing.cache, packing.notice);
    panels->memory = file.map();
    if (!panels->memory) panels->memory = pack_into_file(weights, kernels, threads, file);
    if (!panels->memory && automatic && !has_room(bytes)) return panels;
    if (!panels->memory) panels->memory = pack_into_memory(weights, kernels, threads, bytes);
    panels->bytes = bytes;
    for_each_packed(weights, kernels, [&](const Linear& w, size_t at) {
        panels->of[static_cast<size_t>(w.number)] = panels->memory.get() + at;
    });
    weights.panels = panels;
    return panels;
}

}  // namespace lily
