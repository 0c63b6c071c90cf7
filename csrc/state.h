// State: everything one sequence leaves behind after its tokens, as a value that forks cheaply.
// Keys and values live in pages of 256 positions; forks share pages and copy one only to write into it.
#pragma once

#include <cstdint>
#include <memory>
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

    size_t recurrent_bytes() const { return static_cast<size_t>(copies) * recurrent; }

    DType kv = DType::bf16;
    size_t plane = 0;      // bytes of one layer's keys (or values) in a page: (G, 256, Dh)
    size_t page = 0;       // bytes of a page: (attention layers, 2, G, 256, Dh)
    int64_t conv = 0;      // floats of one layer's convolution state: (C - 1, channels), oldest first
    int64_t delta = 0;     // floats of one layer's delta state: (Hv, Dv, Dk), in the backend's own order
    size_t recurrent = 0;  // bytes of all layers' conv and delta states
    size_t logits = 0;     // bytes of (V) f32
    int delta_layers = 0;
    uint64_t session = 0;  // whose states these are: no other may read them
    int copies = 1;        // of the recurrent states; with two, a pass reads one and writes the other
};

class State {
   public:
    State() = default;
    State(const StateLayout& layout, Ops& ops);

    // A copy that shares every page and the recurrent state until one of the two is extended.
    State fork() const { return *this; }

    int64_t length() const { return length_; }  // tokens taken in so far
    size_t bytes() const;                       // of memory this state refers to, shared or not
    bool has_logits() const { return has_logits_; }
    const StateLayout& layout() const { return layout_; }

    // Makes positions [length, length + tokens) and the recurrent state writable by this state alone.
    void prepare(int64_t tokens, Ops& ops);
    void advance(int64_t tokens) {
        length_ += tokens;
        current_ = next();
    }
    void set_logits(bool valid) { has_logits_ = valid; }

    std::byte* keys(int attention_layer, int64_t page) const {
        return pages_[static_cast<size_t>(page)].get() +
               layout_.plane * static_cast<size_t>(2 * attention_layer);
    }
    std::byte* values(int attention_layer, int64_t page) const {
        return keys(attention_layer, page) + layout_.plane;
    }
    float* conv(int delta_layer) const { return recurrent(current_, delta_layer); }
    float* delta(int delta_layer) const { return conv(delta_layer) + layout_.conv; }
    float* next_conv(int delta_layer) const { return recurrent(next(), delta_layer); }
    float* next_delta(int delta_layer) const { return next_conv(delta_layer) + layout_.conv; }
    float* logits() const {
        return reinterpret_cast<float*>(logits_.get());
    }  // (V), of the last token taken in

   private:
    int next() const { return (current_ + 1) % layout_.copies; }
    float* recurrent(int copy, int delta_layer) const;

    StateLayout layout_;
    int current_ = 0;            // the copy of the recurrent states that holds
    std::vector<Memory> pages_;  // page p holds positions [256 p, 256 p + 256)
    Memory recurrent_;
    Memory logits_;
    int64_t length_ = 0;
    bool has_logits_ = false;
};

}  // namespace lily
