#include "shadow.h"

#include <algorithm>

namespace lily::metal {

bool unordered(const Touch& before, const Touch& now, bool groups_apart) {
    if (!(before.flags & Touch::kSome)) return false;
    if (before.flags & now.flags & Touch::kAtomic) return false;
    if (before.flags & Touch::kGroups) return true;
    if (before.group != now.group) return groups_apart;
    if (before.epoch != now.epoch) return false;
    if (before.flags & Touch::kSimds || before.simd != now.simd) return true;
    if (before.simd_epoch != now.simd_epoch) return false;
    if ((before.flags | now.flags) & Touch::kWholeSimd) return true;
    return before.thread != now.thread;
}

Touch joined(const Touch& before, const Touch& now, bool groups_apart) {
    Touch both = now;
    if (!(before.flags & Touch::kSome)) return both;
    if (!(before.flags & Touch::kAtomic)) both.flags &= static_cast<uint8_t>(~Touch::kAtomic);
    if (groups_apart && (before.flags & Touch::kGroups || before.group != now.group))
        both.flags |= Touch::kGroups;
    if (before.group != now.group || before.epoch != now.epoch) return both;
    if (before.flags & Touch::kSimds || before.simd != now.simd)
        both.flags |= Touch::kSimds;
    else if (before.flags & Touch::kWholeSimd || before.thread != now.thread)
        both.flags |= Touch::kWholeSimd;
    return both;
}

Cell* Page::cells(uint32_t offset, uint32_t bytes, uint32_t& count) {
    if (!cells_) cells_ = std::make_unique<Cell[]>(kPageBytes >> shift_);
    while (((offset | bytes) & ((1u << shift_) - 1)) != 0) {
        auto smaller = std::make_unique<Cell[]>(kPageBytes >> (shift_ - 1));
        for (uint32_t i = 0; i < kPageBytes >> shift_; ++i) smaller[2 * i] = smaller[2 * i + 1] = cells_[i];
        cells_ = std::move(smaller);
        --shift_;
    }
    count = bytes >> shift_;
    return &cells_[offset >> shift_];
}

void set_bits(uint64_t* bits, uint64_t offset, uint64_t bytes) {
    while (bytes) {
        const uint64_t from = offset % 64, count = std::min(bytes, 64 - from);
        bits[offset / 64] |= (count == 64 ? ~0ull : (1ull << count) - 1) << from;
        offset += count, bytes -= count;
    }
}

bool all_bits(const uint64_t* bits, uint64_t offset, uint64_t bytes) {
    while (bytes) {
        const uint64_t from = offset % 64, count = std::min(bytes, 64 - from);
        const uint64_t mask = (count == 64 ? ~0ull : (1ull << count) - 1) << from;
        if ((bits[offset / 64] & mask) != mask) return false;
        offset += count, bytes -= count;
    }
    return true;
}

void TrackedMemory::track(const void* data, uint64_t bytes, bool defined) {
    forget(data);
    Piece piece{bytes, defined, {}};
    if (!defined) piece.defined.resize((bytes + 63) / 64);
    pieces_[reinterpret_cast<uint64_t>(data)] = std::move(piece);
}

void TrackedMemory::define(const void* data, uint64_t bytes) {
    uint64_t offset = 0;
    Piece* piece = find(reinterpret_cast<uint64_t>(data), offset);
    if (piece && !piece->all_defined)
        set_bits(piece->defined.data(), offset, std::min(bytes, piece->bytes - offset));
}

void TrackedMemory::forget(const void* data) {
    pieces_.erase(reinterpret_cast<uint64_t>(data));
    last_ = nullptr;
    last_begin_ = last_end_ = 0;
}

bool TrackedMemory::is_defined(uint64_t address, uint64_t bytes) {
    uint64_t offset = 0;
    const Piece* piece = find(address, offset);
    if (!piece || piece->all_defined) return true;
    return all_bits(piece->defined.data(), offset, std::min(bytes, piece->bytes - offset));
}

TrackedMemory::Piece* TrackedMemory::find(uint64_t address, uint64_t& offset) {
    if (address < last_begin_ || address >= last_end_) {
        auto after = pieces_.upper_bound(address);
        if (after == pieces_.begin()) return nullptr;
        auto& [begin, piece] = *--after;
        if (address >= begin + piece.bytes) return nullptr;
        last_begin_ = begin, last_end_ = begin + piece.bytes, last_ = &piece;
    }
    offset = address - last_begin_;
    return last_;
}

}  // namespace lily::metal
