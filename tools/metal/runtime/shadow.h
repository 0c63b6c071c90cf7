// What is known about memory, byte by byte: who touched it last, and whether anything was written there.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace lily::metal {

constexpr uint64_t kPageBytes = 4096;

// Who touched a byte, and how far the barriers had come then.
struct Touch {
    enum Flag : uint8_t {
        kSome = 1,       // there was an access
        kAtomic = 2,     // by atomics only
        kWholeSimd = 4,  // several lanes of one SIMD-group
        kSimds = 8,      // several SIMD-groups of one threadgroup
        kGroups = 16,    // several threadgroups
    };
    uint32_t group = 0;
    uint32_t epoch = 0;       // threadgroup_barriers that order this memory
    uint32_t simd_epoch = 0;  // simdgroup_barriers that do
    uint32_t site = 0;        // of the code, for messages
    uint16_t thread = 0;
    uint8_t simd = 0;
    uint8_t flags = 0;
};

// Whether nothing orders two touches of one byte, at least one of them a write. `groups_apart`: the memory is
// shared by threadgroups, between which nothing orders.
bool unordered(const Touch& before, const Touch& now, bool groups_apart);

// What stands for several readers at once.
Touch joined(const Touch& before, const Touch& now, bool groups_apart);

// The last write and the reads since, for a few bytes.
struct Cell {
    Touch write, read;
};

class Page {
   public:
    // Bits of the bytes touched in this dispatch; a word is a 64-byte line.
    uint64_t read[kPageBytes / 64] = {};
    uint64_t written[kPageBytes / 64] = {};

    // The cells of `bytes` bytes from `offset` on. Cells start out as four bytes and are split when something
    // smaller, or something that lies across, is touched.
    Cell* cells(uint32_t offset, uint32_t bytes, uint32_t& count);

   private:
    std::unique_ptr<Cell[]> cells_;
    uint32_t shift_ = 2;
};

// Sets or tests bits [offset, offset + bytes) of a bitmap.
void set_bits(uint64_t* bits, uint64_t offset, uint64_t bytes);
bool all_bits(const uint64_t* bits, uint64_t offset, uint64_t bytes);

// Memory that the host has told about, and which of its bytes are defined.
class TrackedMemory {
   public:
    struct Piece {
        uint64_t bytes;
        bool all_defined;
        std::vector<uint64_t> defined;
    };

    void track(const void* data, uint64_t bytes, bool defined);
    void define(const void* data, uint64_t bytes);
    void forget(const void* data);

    // Whether every byte is defined, or not tracked.
    bool is_defined(uint64_t address, uint64_t bytes);

   private:
    Piece* find(uint64_t address, uint64_t& offset);

    std::map<uint64_t, Piece> pieces_;  // by address
    uint64_t last_begin_ = 0, last_end_ = 0;
    Piece* last_ = nullptr;
};

}  // namespace lily::metal
