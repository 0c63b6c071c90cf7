// Session: a model loaded on a device, and the loops that drive it. Any thread may call it, and calls that
// compute take turns. A State belongs to one caller at a time: two threads that grow one, or read one that
// grows, race.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "forward.h"
#include "history.h"
#include "logprobs.h"

namespace lily {

// Called between chunks with (tokens done, tokens in all). An exception thrown from it stops the work.
using Progress = std::function<void(int64_t done, int64_t total)>;

class Session {
   public:
    Session(std::shared_ptr<const Weights> weights, std::unique_ptr<Ops> ops, int chunk, DType kv);

    const Weights& weights() const { return *weights_; }
    Ops& ops() { return *ops_; }

    State new_state() const;
    void check_own(const State& state) const;  // throws std::invalid_argument for another session's
    State fork(const State& state);            // state.fork() that waits for a pass in progress

    // Takes tokens in, chunk by chunk on the absolute position grid; the state then holds the last token's
    // logits. If it throws, from between chunks or between a chunk's layers, the state is as it was after the
    // last whole chunk.
    void extend(State& state, std::span<const int32_t> tokens, const Progress& progress,
                const Interrupt& interrupt = nullptr);

    // Draws the token that follows the state's last token. Needs logits, so at least one token must have been
    // taken in. `allowed` as in Draw.
    int32_t sample(State& state, const Sampling& sampling, const History& history = {},
                   std::span<const uint32_t> allowed = {});

    // A decode step: takes a drawn token in, and into the history, and draws the next.
    int32_t step(State& state, int32_t token, const Sampling& sampling, History& history,
                 std::span<const uint32_t> allowed = {});

    // What logprobs.h says of the state's logits.
    std::vector<TokenLogprob> logprobs(const State& state, int32_t token, int top) const;

    // Takes tokens in and writes every row's logits, (tokens, V) f32.
    void logits(State& state, std::span<const int32_t> tokens, float* out, const Progress& progress,
                const Interrupt& interrupt = nullptr);

   private:
    std::span<const float> logits_of(const State& state) const;
    void check(const State& state, std::span<const int32_t> tokens) const;
    template <class AfterChunk>
    void take_in(State& state, std::span<const int32_t> tokens, const Progress& progress,
                 const Interrupt& interrupt, AfterChunk after);
    void pass(State& state, std::span<const int32_t> tokens, const Interrupt& interrupt);

    class Turn;

    std::shared_ptr<const Weights> weights_;
    std::unique_ptr<Ops> ops_;
    StateLayout layout_;
    int chunk_;
    std::mutex mutex_;
    std::atomic<std::thread::id> owner_;  // of the turn in progress
};

}  // namespace lily
