// Watches every access of an instrumented kernel. Without instruments nothing calls this.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "scheduler.h"
#include "shadow.h"

namespace lily::metal {

// A place in a kernel's code: a return address, or the line itself where the language's headers know it.
struct Place {
    const void* code = nullptr;
    uint32_t line = 0;
};

// What an access does: bits, so that an atomic update is all three.
struct Access {
    static constexpr uint32_t kReads = 1, kWrites = 2, kAtomic = 4;
    uint32_t bits;
    bool reads() const { return bits & kReads; }
    bool writes() const { return bits & kWrites; }
    bool atomic() const { return bits & kAtomic; }
};

// Bound buffers that touch each other in memory; one shadow for all of them.
struct Region {
    uint64_t begin, end;  // of the memory
    uint64_t base;        // begin, down to a page
    std::vector<uint32_t> bindings;
    std::vector<std::unique_ptr<Page>> pages;
};

class Instruments {
   public:
    explicit Instruments(Worker& worker) : worker_(worker) {}

    void begin_dispatch();
    void begin_group();
    void simd_went_on(uint32_t simd);
    void add_variable(uint32_t begin, uint32_t end);

    // One access of the running lane. `aligned`: the code relies on the address being a multiple of `bytes`.
    void access(const void* address, uint32_t bytes, Access kind, bool aligned, const Place& place);

    // One access of the SIMD-group as a whole: rows of a tile, each of `bytes`, `step` bytes apart.
    void tile(const void* address, uint32_t bytes, uint32_t rows, int64_t step, bool write, uint32_t element,
              uint32_t line);

    // Moves what was counted into a result.
    void collect(std::vector<Traffic>& traffic, std::vector<Range>& ranges);
    uint64_t threadgroup_read = 0, threadgroup_written = 0;

    static TrackedMemory& tracked();

   private:
    // The sectors and lines that one instruction of a SIMD-group touched so far.
    struct GroupAccess {
        std::vector<uint32_t> sectors, lines;
    };
    // One place in the code: how often each lane came by since its SIMD-group last met.
    struct SimdSite {
        uint32_t stamp = 0;
        uint32_t times[kSimdWidth] = {};
        std::vector<GroupAccess> accesses;
        size_t used = 0;
    };
    struct Site {
        Place place;
        std::vector<SimdSite> simds;
    };
    struct Counted {
        const Binding* binding;
        const Argument* argument;
        bool writable;
        Traffic traffic;
    };

    uint32_t site_of(const Place& place);
    Touch touch_now(bool in_device, bool atomic, bool whole_simd, uint32_t site);
    bool in_own_memory(uint64_t address) const;
    Region* region_of(uint64_t address);
    Counted* counted_for(Region& region, uint64_t address, uint32_t bytes, bool write);
    void device_access(Region& region, Counted& counted, uint64_t address, uint32_t bytes, Access kind,
                       const Touch& now);
    void threadgroup_access(uint64_t address, uint32_t bytes, Access kind, const Touch& now);
    void check_order(Page& page, uint32_t offset, uint32_t bytes, Access kind, const Touch& now,
                     bool in_device, int32_t buffer, uint64_t buffer_offset);
    void count_sectors(GroupAccess& group, Counted& counted, const Region& region, uint64_t address,
                       uint32_t bytes);
    GroupAccess& group_access(uint32_t site, uint32_t simd, uint32_t lane, Counted& counted);

    std::string name_of(int32_t buffer) const;
    // "writes 4 bytes at offset 8 of y [[buffer(1)]]"
    std::string access_text(Access kind, uint32_t bytes, int32_t buffer, uint64_t offset) const;
    void fault(Fault kind, uint32_t site, int32_t buffer, uint64_t offset, const std::string& text);
    void race(const Touch& other, bool wrote, const Touch& now, Access kind, bool in_device, int32_t buffer,
              uint64_t offset);
    // These end the dispatch before the access happens: what lies there may not be memory at all.
    [[noreturn]] void outside_group_memory(uint64_t address, uint32_t bytes, Access kind, uint32_t site);
    [[noreturn]] void outside_buffers(uint64_t address, uint32_t bytes, Access kind, uint32_t site);

    Worker& worker_;
    std::vector<Region> regions_;
    std::vector<Counted> counted_;
    std::vector<std::pair<uint32_t, uint32_t>> variables_;  // of threadgroup memory
    std::vector<std::unique_ptr<Page>> group_pages_;
    std::vector<Site> sites_;
    std::unordered_map<uint64_t, uint32_t> site_numbers_;
    struct {
        uint64_t key = 0;
        uint32_t number = 0;
    } recent_sites_[256];
    std::vector<uint32_t> stamps_;  // by SIMD-group: how often it met
};

// File and line of a return address in this library; {"", 0} if not known.
struct SourceLine {
    std::string file;
    uint32_t line = 0;
};
SourceLine source_line(const void* code);

}  // namespace lily::metal
