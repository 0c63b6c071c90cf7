// Session: a model loaded on a device, and the loops that drive it. Any thread may call it, and calls that
// compute are served in the order they came. A State belongs to one caller at a time: two threads that grow
// one, or read one that grows, race.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "forward.h"
#include "history.h"
#include "kept.h"
#include "logprobs.h"
#include "turns.h"

namespace lily {

// How tokens are taken in beside one after another.
struct Intake {
    // Positions, ascending, each after the state's length and at most at the end of the tokens: the state as
    // it is there is kept too, with its logits.
    std::span<const int64_t> checkpoints = {};
    // Where the prompt ends, if these tokens are not the last of it. Then no logits are made for the end.
    int64_t end = 0;
};

// A state in a file: where its parts are, in bytes from the beginning.
struct SavedState {
    int64_t length;
    int64_t recurrent;
    int64_t logits;  // -1: none
};

// A copy of a state's memory that no other state writes, with nothing of what others hold in shared pages.
struct StateParts {
    std::vector<std::shared_ptr<const std::byte>> pages;  // of layout().page bytes each
    std::shared_ptr<const std::byte> recurrent, logits;   // logits: null if there are none
};

// Called between chunks with (tokens done, tokens in all). An exception thrown from it stops the work.
using Progress = std::function<void(int64_t done, int64_t total)>;

class Session {
   public:
    // chunk: tokens of a pass while a prompt is taken in.  most_steps: decode steps of several sequences that
    // are run as one pass.
    Session(std::shared_ptr<const Weights> weights, std::unique_ptr<Ops> ops, int chunk, DType kv,
            int most_steps = 1);

    const Weights& weights() const { return *weights_; }
    Ops& ops() { return *ops_; }
    Ledger& ledger() { return *ledger_; }
    // A prompt that is cut at multiples of it gets the bits of the prompt in one piece.
    int grid() const { return ops_->grid() == 1 || chunk_ % ops_->grid() == 0 ? ops_->grid() : chunk_; }
    std::tuple<size_t, size_t, size_t> sizes() const {  // bytes of a page, recurrent states, logits
        return {layout_.page, layout_.recurrent, layout_.logits};
    }

    Kept& kept() { return kept_; }
    const Turns& turns() const { return turns_; }
    State new_state() const;
    void check_own(const State& state) const;  // throws std::invalid_argument for another session's
    State fork(const State& state);            // state.fork() that waits for a pass in progress

    // Takes tokens in, chunk by chunk on the absolute position grid; the state then holds the last token's
    // logits. Returns the checkpoints. If it throws, from between chunks or between a chunk's layers, the
    // state is as it was after the last whole chunk.
    std::vector<State> extend(State& state, std::span<const int32_t> tokens, const Progress& progress,
                              const Interrupt& interrupt = nullptr, const Intake& intake = {});

    // Whether going on from a checkpoint at a position gives a prompt of `end` tokens the bits that it has
    // when it is taken in at once.
    bool resumes(int64_t position, int64_t end) const;

    StateParts parts(const State& state);
    // The states whose memory lies in a file, pages one after another from byte `pages` on. Throws
    // std::invalid_argument if anything lies outside the file.
    std::vector<State> restore(const Memory& file, size_t bytes, int64_t pages,
                               std::span<const SavedState> states);

    // Draws the token that follows the state's last token. Needs logits, so at least one token must have been
    // taken in. `allowed` as in Draw.
    int32_t sample(State& state, const Sampling& sampling, const History& history = {},
                   std::span<const uint32_t> allowed = {});

    // A decode step: takes a drawn token in, and into the history, and draws the next. Steps that several
    // threads wait for are run as one pass; each gives the token that it gives alone.
    int32_t step(State& state, int32_t token, const Sampling& sampling, History& history,
                 std::span<const uint32_t> allowed = {});

    // A step that takes in a guess of what follows the token too: one pass for all of them, from whose rows
    // it draws as step does until a draw is not the guess. Returns the draws, the last of them not taken in:
    // the tokens that as many steps would have given, and the state that they would have left.
    std::vector<int32_t> step_with(State& state, int32_t token, std::span<const int32_t> guess,
                                   const Sampling& sampling, History& history);

    // What logprobs.h says of the state's logits.
    std::vector<TokenLogprob> logprobs(const State& state, int32_t token, int top);

    // The last token's logits, (V), where the host reads them: in the state, or in `room`.
    std::span<const float> host_logits(const State& state, std::vector<float>& room);

    // Takes tokens in and writes every row's logits, (tokens, V) f32.
    void logits(State& state, std::span<const int32_t> tokens, float* out, const Progress& progress,
                const Interrupt& interrupt = nullptr);

   private:
    std::span<const float> logits_of(const State& state) const;
    template <class AfterChunk>
    std::vector<State> take_in(State& state, std::span<const int32_t> tokens, const Progress& progress,
                               const Interrupt& interrupt, const Intake& intake, AfterChunk after);
    void pass(State& state, std::span<const int32_t> tokens, int chunk_rows, const Interrupt& interrupt);
    void make_logits(State& state, int row);
    void check(const State& state, std::span<const int32_t> tokens, const Intake& intake) const;
    std::shared_ptr<Block> adopt(const Memory& file, size_t size, int64_t at, size_t bytes);
    void run(std::vector<Step*> steps);
    void heads(std::span<Step* const> steps);
    float* logit_rows(size_t rows);
    int32_t draw(std::span<const float> logits, const Sampling&, const Draw&);
    bool take_ahead(Step& step);
    bool begin_ahead(const Step& step);
    void drop_ahead();

    class Turn;

    std::shared_ptr<const Weights> weights_;
    std::unique_ptr<Ops> ops_;
    std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
    StateLayout layout_;
    int chunk_;
    Turns turns_;
    Kept kept_;
    Memory logit_rows_;  // (rows, V) f32, once a pass has several rows to draw from
    size_t logit_rows_held_ = 0;
    const int most_steps_;

    static constexpr int32_t kNone = -2;
    int32_t drawn_ = kNone;  // the token that the device drew last and still has

    // The step after the last one, begun on the device before the host knew its token. It works on a fork, so
    // it can be forgotten at any time: the state that it went on from is as it was.
    struct Ahead {
        State state;
        std::shared_ptr<Block>
            from;  // the recurrent states that it went on from, and how many tokens they held
        int64_t length;
        Sampling sampling;
    };
    std::optional<Ahead> ahead_;
    std::shared_ptr<Block> spare_logits_;  // of a state before the last
};

}  // namespace lily
