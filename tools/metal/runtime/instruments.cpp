#include "instruments.h"

#include <algorithm>
#include <cstring>

#include "findings.h"

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" const char _end[] __attribute__((visibility("hidden")));

namespace lily::metal {
namespace {

bool within(uint64_t address, const void* begin, uint64_t bytes) {
    return address - reinterpret_cast<uint64_t>(begin) < bytes;
}

const char* verb(Access kind) {
    return kind.writes() ? "writes" : "reads";
}

std::string thread_name(const Touch& touch) {
    if (touch.flags & Touch::kGroups) return "several groups";
    if (touch.flags & Touch::kSimds) return "several SIMD-groups";
    if (touch.flags & Touch::kWholeSimd) return "SIMD-group " + std::to_string(touch.simd);
    return "thread " + std::to_string(touch.thread);
}

}  // namespace

TrackedMemory& Instruments::tracked() {
    static auto& memory = *new TrackedMemory;
    return memory;
}

void Instruments::begin_dispatch() {
    const Launch& launch = *worker_.launch;
    const Kernel& kernel = *worker_.kernel;
    counted_.clear();
    regions_.clear();
    threadgroup_read = threadgroup_written = 0;
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < launch.binding_count; ++i) {
        const Binding& binding = launch.bindings[i];
        const auto* end = kernel.arguments + kernel.argument_count;
        const auto* argument = std::find_if(kernel.arguments, end, [&](const Argument& a) {
            return a.space != Space::kThreadgroup && a.index == binding.index;
        });
        const bool known = argument != end, reached = binding.index >= kBuffers;
        const bool writable = binding.writes && (reached || (known && argument->writable));
        counted_.push_back({&binding, known ? argument : nullptr, writable, {}});
        counted_.back().traffic.buffer = binding.index;
        if (binding.data && binding.bytes) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return launch.bindings[a].data < launch.bindings[b].data; });
    for (uint32_t i : order) {
        const auto begin = reinterpret_cast<uint64_t>(launch.bindings[i].data),
                   end = begin + launch.bindings[i].bytes;
        if (regions_.empty() || begin >= regions_.back().end)
            regions_.push_back({.begin = begin, .end = end, .base = begin / kPageBytes * kPageBytes});
        Region& region = regions_.back();
        region.end = std::max(region.end, end);
        region.bindings.push_back(i);
        region.pages.resize((region.end - region.base + kPageBytes - 1) / kPageBytes);
    }
    group_pages_.clear();
    group_pages_.resize(kArena / kPageBytes);
    sites_.clear();
    site_numbers_.clear();
    std::fill(std::begin(recent_sites_), std::end(recent_sites_),
              std::remove_reference_t<decltype(recent_sites_[0])>{});
}

void Instruments::begin_group() {
    for (auto& page : group_pages_)
        if (page) std::memset(page->written, 0, sizeof page->written);
    variables_.clear();
    stamps_.resize(worker_.simd_count);
    for (uint32_t& stamp : stamps_) stamp++;
}

void Instruments::simd_went_on(uint32_t simd) {
    stamps_[simd]++;
}

void Instruments::add_variable(uint32_t begin, uint32_t end) {
    variables_.emplace_back(begin, end);
}

uint32_t Instruments::site_of(const Place& place) {
    const uint64_t key = place.code ? reinterpret_cast<uint64_t>(place.code) : place.line;
    auto& recent = recent_sites_[(key ^ key >> 8) & 255];
    if (recent.key == key) return recent.number;
    const auto [found, is_new] = site_numbers_.try_emplace(key, static_cast<uint32_t>(sites_.size()));
    if (is_new) sites_.push_back({place, {}});
    recent = {key, found->second};
    return found->second;
}

Touch Instruments::touch_now(bool in_device, bool atomic, bool whole_simd, uint32_t site) {
    const Lane& lane = current_lane();
    Touch now;
    now.group = worker_.group_number;
    now.epoch = in_device ? worker_.device_epoch : worker_.threadgroup_epoch;
    now.simd_epoch = in_device ? lane.simd->device_epoch : lane.simd->threadgroup_epoch;
    now.site = site;
    now.thread = static_cast<uint16_t>(lane.thread.index);
    now.simd = static_cast<uint8_t>(lane.thread.simdgroup);
    now.flags = static_cast<uint8_t>(Touch::kSome | (atomic ? Touch::kAtomic : 0) |
                                     (whole_simd ? Touch::kWholeSimd : 0));
    return now;
}

// A thread's stack, and what the runtime and the library keep for themselves.
bool Instruments::in_own_memory(uint64_t address) const {
    constexpr uint64_t kStacks = 64 << 10;
    return within(address, worker_.stacks, worker_.stack_count * kStacks) ||
           within(address, worker_.lanes.data(), worker_.lanes.size() * sizeof(Lane)) ||
           within(address, worker_.simds.data(), worker_.simds.size() * sizeof(SimdGroup)) ||
           within(address, &worker_, sizeof worker_) ||
           within(address, __ehdr_start, static_cast<uint64_t>(_end - __ehdr_start));
}

Region* Instruments::region_of(uint64_t address) {
    auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                  [](uint64_t a, const Region& region) { return a < region.begin; });
    if (after == regions_.begin()) return nullptr;
    --after;
    return address < after->end ? &*after : nullptr;
}

// The bound buffer that an access goes to: one that holds all of it, and if several do, one that allows it.
Instruments::Counted* Instruments::counted_for(Region& region, uint64_t address, uint32_t bytes, bool write) {
    Counted* best = nullptr;
    for (uint32_t i : region.bindings) {
        const Binding& binding = *counted_[i].binding;
        const auto begin = reinterpret_cast<uint64_t>(binding.data);
        if (address < begin || address + bytes > begin + binding.bytes) continue;
        if (!best ||
            (write ? counted_[i].writable && !best->writable : !counted_[i].writable && best->writable))
            best = &counted_[i];
    }
    return best;
}

void Instruments::access(const void* pointer, uint32_t bytes, Access kind, bool aligned, const Place& place) {
    const auto address = reinterpret_cast<uint64_t>(pointer);
    if (bytes == 0 || in_own_memory(address)) return;
    const bool in_group = within(address, worker_.memory, kArena);
    const uint32_t site = site_of(place);
    const Touch now = touch_now(!in_group, kind.atomic(), false, site);
    if (in_group) {
        threadgroup_access(address, bytes, kind, now);
        return;
    }
    Region* region = region_of(address);
    Counted* counted = region ? counted_for(*region, address, bytes, kind.writes()) : nullptr;
    if (!counted) outside_buffers(address, bytes, kind, site);
    const auto index = static_cast<int32_t>(counted->binding->index);
    const uint64_t offset = address - reinterpret_cast<uint64_t>(counted->binding->data);
    if (aligned && address % bytes)
        fault(Fault::kMisaligned, site, index, offset,
              access_text(kind, bytes, index, offset) + ", whose address is not a multiple of " +
                  std::to_string(bytes));
    device_access(*region, *counted, address, bytes, kind, now);
    const Lane& lane = current_lane();
    GroupAccess& group = group_access(site, lane.thread.simdgroup, lane.thread.lane, *counted);
    count_sectors(group, *counted, *region, address, bytes);
}

void Instruments::tile(const void* pointer, uint32_t bytes, uint32_t rows, int64_t step, bool write,
                       uint32_t element, uint32_t line) {
    const uint32_t site = site_of({.line = line});
    const Access kind{write ? Access::kWrites : Access::kReads};
    GroupAccess group;
    for (uint32_t row = 0; row < rows; ++row) {
        const uint64_t address = reinterpret_cast<uint64_t>(pointer) + static_cast<uint64_t>(row * step);
        if (within(address, worker_.memory, kArena)) {
            threadgroup_access(address, bytes, kind, touch_now(false, false, true, site));
            continue;
        }
        Region* region = region_of(address);
        Counted* counted = region ? counted_for(*region, address, bytes, write) : nullptr;
        if (!counted) outside_buffers(address, bytes, kind, site);
        const auto index = static_cast<int32_t>(counted->binding->index);
        const uint64_t offset = address - reinterpret_cast<uint64_t>(counted->binding->data);
        if (address % element)
            fault(Fault::kMisaligned, site, index, offset,
                  access_text(kind, bytes, index, offset) + ", whose address is not a multiple of " +
                      std::to_string(element));
        device_access(*region, *counted, address, bytes, kind, touch_now(true, false, true, site));
        if (row == 0) counted->traffic.groups++;
        count_sectors(group, *counted, *region, address, bytes);
    }
}

void Instruments::device_access(Region& region, Counted& counted, uint64_t address, uint32_t bytes,
                                Access kind, const Touch& now) {
    const auto index = static_cast<int32_t>(counted.binding->index);
    const uint64_t offset = address - reinterpret_cast<uint64_t>(counted.binding->data);
    Traffic& traffic = counted.traffic;
    if (kind.writes() && !counted.writable)
        fault(Fault::kReadOnly, now.site, index, offset,
              access_text(kind, bytes, index, offset) + ", which it may only read");
    if (kind.reads()) {
        traffic.bytes_read += bytes, traffic.reads++;
        if (!tracked().is_defined(address, bytes))
            fault(Fault::kUninitialised, now.site, index, offset,
                  access_text(kind, bytes, index, offset) + ", which nothing has written");
    }
    if (kind.writes()) {
        traffic.bytes_written += bytes, traffic.writes++;
        tracked().define(reinterpret_cast<void*>(address), bytes);
    }
    for (uint64_t at = address; at < address + bytes;) {
        const uint64_t place = at - region.base;
        auto& page = region.pages[place / kPageBytes];
        if (!page) page = std::make_unique<Page>();
        const auto begin = static_cast<uint32_t>(place % kPageBytes);
        const auto count =
            static_cast<uint32_t>(std::min<uint64_t>(address + bytes - at, kPageBytes - begin));
        if (kind.reads()) set_bits(page->read, begin, count);
        if (kind.writes()) set_bits(page->written, begin, count);
        if (counted.writable || kind.writes() || region.bindings.size() > 1)
            check_order(*page, begin, count, kind, now, true, index, offset + (at - address));
        at += count;
    }
}

void Instruments::threadgroup_access(uint64_t address, uint32_t bytes, Access kind, const Touch& now) {
    const auto offset = static_cast<uint32_t>(address - reinterpret_cast<uint64_t>(worker_.memory));
    const bool inside = std::any_of(variables_.begin(), variables_.end(), [&](const auto& variable) {
        return offset >= variable.first && offset + bytes <= variable.second;
    });
    if (!inside) outside_group_memory(address, bytes, kind, now.site);
    (kind.writes() ? threadgroup_written : threadgroup_read) += bytes;
    auto& page = group_pages_[offset / kPageBytes];
    if (!page) page = std::make_unique<Page>();
    const uint32_t begin = offset % kPageBytes;
    const uint32_t count = std::min(bytes, static_cast<uint32_t>(kPageBytes) - begin);
    if (kind.reads() && !all_bits(page->written, begin, count))
        fault(Fault::kUninitialised, now.site, -1, offset,
              access_text(kind, bytes, -1, offset) + ", which nothing has written");
    if (kind.writes()) set_bits(page->written, begin, count);
    check_order(*page, begin, count, kind, now, false, -1, offset);
    if (count < bytes) threadgroup_access(address + count, bytes - count, kind, now);
}

void Instruments::check_order(Page& page, uint32_t offset, uint32_t bytes, Access kind, const Touch& now,
                              bool in_device, int32_t buffer, uint64_t buffer_offset) {
    uint32_t count = 0;
    Cell* cells = page.cells(offset, bytes, count);
    for (uint32_t i = 0; i < count; ++i) {
        Cell& cell = cells[i];
        if (unordered(cell.write, now, in_device))
            race(cell.write, true, now, kind, in_device, buffer, buffer_offset);
        else if (kind.writes() && unordered(cell.read, now, in_device))
            race(cell.read, false, now, kind, in_device, buffer, buffer_offset);
        if (kind.writes()) cell.write = now;
        if (kind.reads()) cell.read = joined(cell.read, now, in_device);
    }
}

void Instruments::race(const Touch& other, bool wrote, const Touch& now, Access kind, bool in_device,
                       int32_t buffer, uint64_t offset) {
    const Place& place = sites_[other.site].place;
    const uint32_t line = place.code ? source_line(place.code).line : place.line;
    const bool apart = in_device && (other.group != now.group || other.flags & Touch::kGroups);
    const std::string in_group = apart ? " of group " : "";
    std::string text =
        thread_name(now) + (apart ? in_group + std::to_string(now.group) : "") + " " + verb(kind) +
        " offset " + std::to_string(offset) + " of " + name_of(buffer) + ", which " + thread_name(other) +
        (apart && !(other.flags & Touch::kGroups) ? in_group + std::to_string(other.group) : "") +
        (wrote ? " wrote" : " read") + " at line " + std::to_string(line);
    text += apart ? "; nothing orders the groups of a dispatch" : "; no barrier orders the two";
    fault(Fault::kRace, now.site, buffer, offset, text);
}

Instruments::GroupAccess& Instruments::group_access(uint32_t site, uint32_t simd, uint32_t lane,
                                                    Counted& counted) {
    auto& simds = sites_[site].simds;
    if (simds.size() <= simd) simds.resize(simd + 1);
    SimdSite& here = simds[simd];
    if (here.stamp != stamps_[simd]) {
        here.stamp = stamps_[simd];
        std::fill(std::begin(here.times), std::end(here.times), 0u);
        here.used = 0;
    }
    const uint32_t time = here.times[lane]++;
    if (time >= here.used) {
        if (here.used == here.accesses.size()) here.accesses.emplace_back();
        GroupAccess& fresh = here.accesses[here.used++];
        fresh.sectors.clear();
        fresh.lines.clear();
        counted.traffic.groups++;
    }
    return here.accesses[time];
}

void Instruments::count_sectors(GroupAccess& group, Counted& counted, const Region& region, uint64_t address,
                                uint32_t bytes) {
    const auto add = [](std::vector<uint32_t>& seen, uint32_t number) {
        if (std::find(seen.rbegin(), seen.rend(), number) != seen.rend()) return false;
        seen.push_back(number);
        return true;
    };
    const uint64_t begin = address - region.base, last = begin + bytes - 1;
    for (uint64_t sector = begin / 32; sector <= last / 32; ++sector)
        counted.traffic.sectors += add(group.sectors, static_cast<uint32_t>(sector));
    for (uint64_t line = begin / 128; line <= last / 128; ++line)
        counted.traffic.lines += add(group.lines, static_cast<uint32_t>(line));
}

std::string Instruments::name_of(int32_t buffer) const {
    if (buffer < 0) return "threadgroup memory";
    const std::string index = "buffer(" + std::to_string(buffer) + ")";
    for (const Counted& counted : counted_)
        if (counted.binding->index == static_cast<uint32_t>(buffer) && counted.argument)
            return std::string(counted.argument->name) + " [[" + index + "]]";
    return index;
}

void Instruments::fault(Fault kind, uint32_t site, int32_t buffer, uint64_t offset, const std::string& text) {
    const Place& place = sites_[site].place;
    const SourceLine source = place.code ? source_line(place.code) : SourceLine{"", place.line};
    worker_.findings->add({.fault = kind,
                           .buffer = buffer,
                           .offset = offset,
                           .line = source.line,
                           .code = source.line ? nullptr : place.code,
                           .text = text,
                           .file = source.file});
}

std::string Instruments::access_text(Access kind, uint32_t bytes, int32_t buffer, uint64_t offset) const {
    return std::string(verb(kind)) + " " + std::to_string(bytes) + " bytes at offset " +
           std::to_string(static_cast<int64_t>(offset)) + " of " + name_of(buffer);
}

void Instruments::outside_group_memory(uint64_t address, uint32_t bytes, Access kind, uint32_t site) {
    const uint64_t offset = address - reinterpret_cast<uint64_t>(worker_.memory);
    fault(Fault::kOutOfBounds, site, -1, offset,
          access_text(kind, bytes, -1, offset) + ", outside its variables");
    stop_dispatch(worker_);
}

void Instruments::outside_buffers(uint64_t address, uint32_t bytes, Access kind, uint32_t site) {
    constexpr int64_t kNear = 1 << 20;
    const Counted* nearest = nullptr;
    int64_t least = kNear;
    for (const Counted& counted : counted_) {
        const auto begin = reinterpret_cast<uint64_t>(counted.binding->data);
        const auto before = static_cast<int64_t>(begin - address);
        const auto after = static_cast<int64_t>(address + bytes - begin - counted.binding->bytes);
        if (std::max(before, after) < least) least = std::max(before, after), nearest = &counted;
    }
    if (!nearest) {
        fault(Fault::kOutOfBounds, site, -1, 0,
              std::string(verb(kind)) + " " + std::to_string(bytes) + " bytes far from every buffer");
        stop_dispatch(worker_);
    }
    const auto index = static_cast<int32_t>(nearest->binding->index);
    const uint64_t offset = address - reinterpret_cast<uint64_t>(nearest->binding->data);
    fault(Fault::kOutOfBounds, site, index, offset,
          access_text(kind, bytes, index, offset) + ", which has " + std::to_string(nearest->binding->bytes));
    stop_dispatch(worker_);
}

void Instruments::collect(std::vector<Traffic>& traffic, std::vector<Range>& ranges) {
    for (Counted& counted : counted_) {
        const auto begin = reinterpret_cast<uint64_t>(counted.binding->data),
                   end = begin + counted.binding->bytes;
        Region* region = counted.binding->bytes ? region_of(begin) : nullptr;
        if (!region) continue;
        const size_t first_range = ranges.size();
        uint64_t open[2] = {~0ull, ~0ull};  // where a range of reads, of writes began
        const auto add = [&](uint32_t written, uint64_t from, uint64_t to) {
            ranges.push_back({counted.binding->index, written, from - begin, to - begin});
        };
        for (uint64_t line = begin / 64 * 64; line < end; line += 64) {
            const auto& page = region->pages[(line - region->base) / kPageBytes];
            if (!page && open[0] == ~0ull && open[1] == ~0ull) {  // on to the next page
                line = line / kPageBytes * kPageBytes + kPageBytes - 64;
                continue;
            }
            const uint64_t word = (line - region->base) % kPageBytes / 64;
            const uint64_t bits[2] = {page ? page->read[word] : 0, page ? page->written[word] : 0};
            uint64_t mask = ~0ull;
            if (line < begin) mask &= ~0ull << (begin - line);
            if (line + 64 > end) mask &= ~0ull >> (line + 64 - end);
            counted.traffic.unique_lines += ((bits[0] | bits[1]) & mask) != 0;
            for (uint32_t written = 0; written < 2; ++written) {
                const uint64_t touched = bits[written] & mask;
                if ((touched == 0 && open[written] == ~0ull) || (touched == ~0ull && open[written] != ~0ull))
                    continue;
                for (uint64_t i = 0; i < 64; ++i) {
                    const bool now = touched >> i & 1;
                    if (now && open[written] == ~0ull) open[written] = line + i;
                    if (!now && open[written] != ~0ull) {
                        add(written, open[written], line + i);
                        open[written] = ~0ull;
                    }
                }
            }
        }
        for (uint32_t written = 0; written < 2; ++written)
            if (open[written] != ~0ull) add(written, open[written], end);
        std::stable_sort(ranges.begin() + static_cast<long>(first_range), ranges.end(),
                         [](const Range& a, const Range& b) { return a.written < b.written; });
        traffic.push_back(counted.traffic);
    }
}

}  // namespace lily::metal

using namespace lily::metal;

// What clang's thread sanitizer has instrumented code call.
#define LILY_ACCESS(BYTES)                                                      \
    void __tsan_read##BYTES(void* p) {                                          \
        watch(p, BYTES, {Access::kReads}, true, __builtin_return_address(0));   \
    }                                                                           \
    void __tsan_write##BYTES(void* p) {                                         \
        watch(p, BYTES, {Access::kWrites}, true, __builtin_return_address(0));  \
    }                                                                           \
    void __tsan_unaligned_read##BYTES(void* p) {                                \
        watch(p, BYTES, {Access::kReads}, false, __builtin_return_address(0));  \
    }                                                                           \
    void __tsan_unaligned_write##BYTES(void* p) {                               \
        watch(p, BYTES, {Access::kWrites}, false, __builtin_return_address(0)); \
    }

static void watch(const void* address, uint64_t bytes, Access kind, bool aligned, const void* code) {
    if (msl_current)
        current_lane().worker->instruments->access(address, static_cast<uint32_t>(bytes), kind, aligned,
                                                   {.code = code});
}

extern "C" {
LILY_ACCESS(1)
LILY_ACCESS(2)
LILY_ACCESS(4)
LILY_ACCESS(8)
LILY_ACCESS(16)
void __tsan_read_range(void* p, uint64_t bytes) {
    watch(p, bytes, {Access::kReads}, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, uint64_t bytes) {
    watch(p, bytes, {Access::kWrites}, false, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, uint64_t bytes) {
    watch(from, bytes, {Access::kReads}, false, __builtin_return_address(0));
    watch(to, bytes, {Access::kWrites}, false, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, uint64_t bytes) {
    watch(from, bytes, {Access::kReads}, false, __builtin_return_address(0));
    watch(to, bytes, {Access::kWrites}, false, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, uint64_t bytes) {
    watch(to, bytes, {Access::kWrites}, false, __builtin_return_address(0));
    return std::memset(to, value, bytes);
}
void __tsan_init() {}

void msl_runtime_atomic(const void* address, uint32_t bytes, uint32_t access, uint32_t line) {
    current_lane().worker->instruments->access(address, bytes, {access | Access::kAtomic}, true,
                                               {.line = line});
}
}
