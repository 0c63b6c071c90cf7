// State: everything one sequence leaves behind after its tokens, as a value that forks cheaply.
// Keys and values live in pages of 256 positions. Forks share pages: whoever appends first to the last one
// does so in place, for no other state sees those positions; whoever comes second copies that page. The
// recurrent states are copied before they change, or, on a backend that keeps two, the step writes the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "config.h"
#include "tensor.h"

namespace lily {

struct Ops;

constexpr int kPageTokens = 256;

using Memory = std::shared_ptr<std::byte>;  // owned by the backend that allocated it

// Sizes and offsets of a sequence's memory: fixed by the model and by the type that keys and values are kept
// in.
struct StateLayout {
    StateLayout() = default;
    StateLayout(const Config& config, DType kv, int recurrent_copies);

    DType kv = DType::bf16;
    size_t head =
        0;  // bytes of one head's keys (or values) in a page: (256, Dh); int8: then (256) f32 scales
    size_t plane = 0;      // bytes of one layer's keys (or values) in a page: (G) heads
    size_t page = 0;       // bytes of a page: (attention layers, 2, G) heads
    int64_t conv = 0;      // floats of one layer's convolution state: (C - 1, channels), oldest first
    int64_t delta = 0;     // floats of one layer's delta state: (Hv, Dv, Dk), in the backend's own order
    size_t recurrent = 0;  // bytes of all layers' conv and delta states
    size_t logits = 0;     // bytes of (V) f32
    int delta_layers = 0;
    uint64_t session = 0;  // whose states these are: no other may read them
    int copies = 1;        // of the recurrent states; with two, a pass reads one and writes the other
};

// How many bytes of states are alive, and how many there may be. Counted where memory is had, so that no
// moment escapes.
class Ledger {
   public:
    void take(size_t bytes);  // throws MemoryLimitError, and then has taken nothing
    void give(size_t bytes) { live_ -= static_cast<int64_t>(bytes); }

    int64_t live() const { return live_; }
    int64_t peak() const { return peak_; }  // since it was last reset
    void reset_peak() { peak_ = live_.load(); }
    int64_t limit() const { return limit_; }
    void set_limit(int64_t bytes) { limit_ = bytes; }  // of what is asked for from now on; 0: none

   private:
    std::atomic<int64_t> live_{0}, peak_{0}, limit_{0};
};

// A page, one copy of the recurrent states, or logits. States share it by counting; it is written only by a
// state that holds it alone, but for the free positions of a page, which belong to whoever takes them first.
class Block {
   public:
    Block(Ops& ops, std::shared_ptr<Ledger> ledger, size_t bytes);  // zeros
    Block(Memory file, size_t bytes);  // of a mapped file: counts as shared, for it must not be written
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    std::byte* data() const { return memory_.get(); }
    size_t bytes() const { return bytes_; }
    bool mapped() const { return !ledger_; }

    int filled = 0;  // of a page: positions that some state has taken

   private:
    Memory memory_;
    size_t bytes_;
    std::shared_ptr<Ledger> ledger_;
};

class State {
   public:
    State() = default;
    State(const StateLayout& layout, Ops& ops, std::shared_ptr<Ledger> ledger);
    // A state that a file holds. pages: enough for `length`.  logits: none if null.
    State(const StateLayout& layout, std::shared_ptr<Ledger> ledger, int64_t length,
          std::span<const std::shared_ptr<Block>> pages, std::shared_ptr<Block> recurrent,
          std::shared_ptr<Block> logits);

    // A copy that shares every page and the recurrent states until one of the two is extended.
    State fork() const;
    // A fork for a step that may come to nothing. It takes over what this state would have written next, and
    // writes its logits to a block that nobody reads, if there is one.
    State fork_ahead(std::shared_ptr<Block> logits);

    int64_t length() const { return length_; }  // tokens taken in so far
    size_t bytes() const;                       // of memory this state refers to, shared or not
    bool has_logits() const { return has_logits_; }
    const StateLayout& layout() const { return layout_; }

    // Makes positions [length, length + tokens) and the recurrent states writable by this state alone.
    void prepare(int64_t tokens, Ops& ops);
    void advance(int64_t tokens);
    float* new_logits(Ops& ops);  // room for those of the last token; to be followed by set_logits(true)
    void set_logits(bool valid) { has_logits_ = valid; }

    std::byte* keys(int attention_layer, int64_t page) const {
        return pages_[static_cast<size_t>(page)]->data() +
               layout_.plane * static_cast<size_t>(2 * attention_layer);
    }
    std::byte* values(int attention_layer, int64_t page) const {
        return keys(attention_layer, page) + layout_.plane;
    }
    float* conv(int delta_layer) const { return recurrent(*now_, delta_layer); }
    float* delta(int delta_layer) const { return conv(delta_layer) + layout_.conv; }
    float* next_conv(int delta_layer) const { return recurrent(next_ ? *next_ : *now_, delta_layer); }
    float* next_delta(int delta_layer) const { return next_conv(delta_layer) + layout_.conv; }
    float* logits() const {  // (V), of the last token taken in
        return logits_ ? reinterpret_cast<float*>(logits_->data()) : nullptr;
    }

    // All that it holds memory by: the pages in order, the recurrent states that hold, the logits. For who
    // counts bytes or writes them to a file.
    std::span<const std::shared_ptr<Block>> pages() const { return pages_; }
    const std::shared_ptr<Block>& recurrent() const { return now_; }
    const std::shared_ptr<Block>& logits_block() const { return logits_; }
    std::vector<const Block*> blocks() const;

   private:
    using Share = std::shared_ptr<Block>;
    Share allocate(Ops& ops, size_t bytes) const;
    void own(Share& block, Ops& ops) const;  // copies it unless it is this state's alone
    float* recurrent(const Block& block, int delta_layer) const {
        return reinterpret_cast<float*>(block.data()) + delta_layer * (layout_.conv + layout_.delta);
    }

    StateLayout layout_;
    std::shared_ptr<Ledger> ledger_;
    std::vector<Share> pages_;  // page p holds positions [256 p, 256 p + 256)
    Share now_, next_;          // recurrent states of all layers; next_: where a pass writes them, if apart
    Share logits_;
    int64_t length_ = 0;
    bool has_logits_ = false;
};

// Number i of a head's rows in a page, which belongs to position `slot` of it. Dh: numbers of a position.
float kept_at(const std::byte* head, DType kv, int64_t Dh, int64_t i, int64_t slot);

// A file mapped by its descriptor. Writing to it would change this process's view alone. Throws DeviceError.
Memory map_file(int file, size_t bytes);

// Bytes that some states hold together: what they share counts once.
size_t bytes_of(std::span<const State* const> states);

}  // namespace lily
