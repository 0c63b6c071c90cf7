#include "session.h"

#include <algorithm>
#include <utility>

#include "error.h"

namespace lily {

// The right to use the device, waited for. A thread that has it and asks again would wait for itself: what an
// interrupt runs between two layers can do that.
class Session::Turn {
   public:
    explicit Turn(Session& session, const Interrupt& interrupt = nullptr) : turns_(session.turns_) {
        turns_.take(interrupt);
    }
    ~Turn() { turns_.leave(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
};

Session::Session(std::shared_ptr<const Weights> weights, std::unique_ptr<Ops> ops, int chunk, DType kv,
                 int most_steps)
    : weights_(std::move(weights)),
      ops_(std::move(ops)),
      layout_(weights_->config, kv, ops_->recurrent_copies()),
      chunk_(chunk),
      turns_(std::min(most_steps, chunk)),
      most_steps_(std::min(most_steps, chunk)) {
    static std::atomic<uint64_t> made{0};
    layout_.session = ++made;
}

void Session::check_own(const State& state) const {
    LILY_CHECK(std::invalid_argument, state.layout().session == layout_.session,
               "state: wanted one of this session, got another's. Take the tokens in anew.");
}

State Session::new_state() const {
    return State(layout_, *ops_, ledger_);
}

State Session::fork(const State& state) {
    check_own(state);
    const Turn turn(*this);
    return state.fork();
}

void Session::check(const State& state, std::span<const int32_t> tokens, const Intake& intake) const {
    check_own(state);
    const Config& c = weights_->config;
    const auto length = static_cast<int64_t>(tokens.size());
    const int64_t end = std::max(state.length() + length, intake.end);
    LILY_CHECK(ContextError, end <= c.max_positions,
               "%lld tokens do not fit: the context holds %lld, of which %lld are taken. Shorten the prompt.",
               static_cast<long long>(end - state.length()), static_cast<long long>(c.max_positions),
               static_cast<long long>(state.length()));
    for (int64_t i = 0; i < length; ++i) {
        const int32_t token = tokens[static_cast<size_t>(i)];
        LILY_CHECK(std::invalid_argument, token >= 0 && token < c.vocab,
                   "tokens[%lld]: wanted an id from 0 to %d, got %d", static_cast<long long>(i), c.vocab - 1,
                   token);
    }
    int64_t before = state.length();
    for (const int64_t position : intake.checkpoints) {
        LILY_CHECK(std::invalid_argument, position > before && position <= state.length() + length,
                   "checkpoints: wanted ascending positions from %lld to %lld, got %lld",
                   static_cast<long long>(state.length() + 1),
                   static_cast<long long>(state.length() + length), static_cast<long long>(position));
        LILY_CHECK(std::invalid_argument, resumes(position, end),
                   "checkpoints: wanted multiples of %d that are not right before the end, got %lld", grid(),
                   static_cast<long long>(position));
        before = position;
    }
}

// Takes one chunk, or a part of one, into one state, which is as it was if that is interrupted.
void Session::pass(State& state, std::span<const int32_t> tokens, int chunk_rows,
                   const Interrupt& interrupt) {
    drop_ahead();
    State before;
    if (interrupt) before = state.fork();  // shares its memory, so the pass writes to a copy
    const auto length = static_cast<int>(tokens.size());
    try {
        state.prepare(length, *ops_);
        state.set_logits(false);
        const Segment segment{&state, 0, length, state.length(), chunk_rows};
        forward(*weights_, *ops_, Batch{tokens, {&segment, 1}, length}, interrupt);
    } catch (...) {
        if (interrupt) {
            const State abandoned = std::exchange(state, before);  // a device may still be at it
            ops_->finish();
        }
        throw;
    }
}

void Session::make_logits(State& state, int row) {
    ops_->head(*weights_, row, 1, state.new_logits(*ops_));
    ops_->finish();
    state.set_logits(true);
}

// One chunk at a time, so that callers on other threads take turns between chunks.
template <class AfterChunk>
std::vector<State> Session::take_in(State& state, std::span<const int32_t> tokens, const Progress& progress,
                                    const Interrupt& interrupt, const Intake& intake, AfterChunk after) {
    check(state, tokens, intake);
    std::vector<State> kept;
    const auto total = static_cast<int64_t>(tokens.size());
    const int64_t last = state.length() + total, end = std::max(last, intake.end);
    auto checkpoint = intake.checkpoints.begin();
    for (int64_t done = 0; done < total;) {
        if (progress && done > 0) progress(done, total);
        // Chunks end on multiples of the chunk size in the sequence, wherever this call began.
        const int64_t chunk = state.length() / chunk_ * chunk_;
        const bool keeps = checkpoint != intake.checkpoints.end() && *checkpoint <= chunk + chunk_;
        const int64_t stop = keeps ? *checkpoint : std::min(chunk + chunk_, last);
        const auto length = static_cast<int>(stop - state.length());
        {
            const Turn turn(*this, interrupt);
            pass(state, tokens.subspan(static_cast<size_t>(done), static_cast<size_t>(length)),
                 static_cast<int>(std::min(chunk + chunk_, end) - chunk), interrupt);
            after(done, length);
            if (keeps || stop == end) make_logits(state, length - 1);
            if (keeps) kept.push_back(state.fork());
        }
        checkpoint += keeps;
        done += length;
    }
    if (progress) progress(total, total);
    return kept;
}

std::vector<State> Session::extend(State& state, std::span<const int32_t> tokens, const Progress& progress,
                                   const Interrupt& interrupt, const Intake& intake) {
    return take_in(state, tokens, progress, interrupt, intake, [](int64_t, int) {});
}

void Session::logits(State& state, std::span<const int32_t> tokens, float* out, const Progress& progress,
                     const Interrupt& interrupt) {
    const int64_t vocab = weights_->config.vocab;
    const auto bytes = [&](int64_t rows) { return static_cast<size_t>(rows * vocab) * sizeof(float); };
    Memory found;
    take_in(state, tokens, progress, interrupt, {}, [&](int64_t done, int length) {
        if (!found)
            found = ops_->allocate(bytes(std::min<int64_t>(kLogitRows, static_cast<int64_t>(tokens.size()))));
        for (int row = 0; row < length; row += kLogitRows) {
            const int rows = std::min(kLogitRows, length - row);
            ops_->head(*weights_, row, rows, reinterpret_cast<float*>(found.get()));
            ops_->copy(reinterpret_cast<std::byte*>(out + (done + row) * vocab), found.get(), bytes(rows));
        }
    });
}

// A cut off the grid changes sums of the tiled kernels. So does a rest that is shorter than the convolution,
// which they can't take, unless that is all that its chunk has.
bool Session::resumes(int64_t position, int64_t end) const {
    if (position == end) return true;
    if (position > end || position % grid() != 0) return false;
    const int64_t border = std::min(end, (position / chunk_ + 1) * chunk_);
    return grid() == 1 || position % chunk_ == 0 || border - position >= weights_->config.conv_taps - 1;
}

StateParts Session::parts(const State& state) {
    check_own(state);
    const Turn turn(*this);
    ops_->finish();
    const auto copied = [&](const Block& block) {
        std::shared_ptr<std::byte> copy(new std::byte[block.bytes()], std::default_delete<std::byte[]>());
        ops_->copy(copy.get(), block.data(), block.bytes());
        return copy;
    };
    const auto whole = [&](const std::shared_ptr<Block>& block) -> std::shared_ptr<const std::byte> {
        if (!ops_->host_reads()) return copied(*block);
        return std::shared_ptr<const std::byte>(block, block->data());
    };
    StateParts parts;
    for (int64_t page = 0; page * kPageTokens < state.length() && layout_.page; ++page) {
        const std::shared_ptr<Block>& block = state.pages()[static_cast<size_t>(page)];
        const auto held =
            static_cast<int>(std::min<int64_t>(state.length() - page * kPageTokens, kPageTokens));
        if (held == kPageTokens) {
            parts.pages.push_back(whole(block));
            continue;
        }
        const std::shared_ptr<std::byte> copy = copied(*block);
        ops_->clear_page(copy.get(), held);
        parts.pages.push_back(copy);
    }
    parts.recurrent = whole(state.recurrent());
    if (state.has_logits()) parts.logits = whole(state.logits_block());
    return parts;
}

// A part of a mapped file as a block: there, if the backend can read it there, else a copy.
std::shared_ptr<Block> Session::adopt(const Memory& file, size_t size, int64_t at, size_t bytes) {
    LILY_CHECK(std::invalid_argument,
               at >= 0 && bytes <= size && static_cast<size_t>(at) <= size - bytes &&
                   at % static_cast<int64_t>(sizeof(float)) == 0,
               "file: wanted %zu bytes at byte %lld, of %zu there are", bytes, static_cast<long long>(at),
               size);
    const Memory part(file, file.get() + at);
    if (ops_->maps_files()) return std::make_shared<Block>(part, bytes);
    auto block = std::make_shared<Block>(*ops_, ledger_, bytes);
    ops_->copy(block->data(), part.get(), bytes);
    block->filled = kPageTokens;
    return block;
}

std::vector<State> Session::restore(const Memory& file, size_t bytes, int64_t pages,
                                    std::span<const SavedState> states) {
    const Turn turn(*this);
    std::vector<std::shared_ptr<Block>> blocks;
    std::vector<State> restored;
    for (const SavedState& saved : states) {
        LILY_CHECK(std::invalid_argument, saved.length >= 0 && saved.length <= weights_->config.max_positions,
                   "state: wanted a length of at most %lld tokens, got %lld",
                   static_cast<long long>(weights_->config.max_positions),
                   static_cast<long long>(saved.length));
        const size_t held =
            layout_.page ? static_cast<size_t>((saved.length + kPageTokens - 1) / kPageTokens) : 0;
        while (blocks.size() < held)
            blocks.push_back(
                adopt(file, bytes, pages + static_cast<int64_t>(blocks.size() * layout_.page), layout_.page));
        restored.emplace_back(layout_, ledger_, saved.length, std::span(blocks).first(held),
                              adopt(file, bytes, saved.recurrent, layout_.recurrent),
                              saved.logits < 0 ? nullptr : adopt(file, bytes, saved.logits, layout_.logits));
    }
    return restored;
}

std::span<const float> Session::logits_of(const State& state) const {
    check_own(state);
    LILY_CHECK(std::invalid_argument, state.has_logits(),
               "nothing to continue: the state holds no token's logits");
    return {state.logits(), static_cast<size_t>(weights_->config.vocab)};
}

int32_t Session::sample(State& state, const Sampling& sampling, const History& history,
                        std::span<const uint32_t> allowed) {
    const std::span<const float> logits = logits_of(state);
    const Turn turn(*this);
    drop_ahead();
    return draw(logits, sampling, {state.length(), history.counts(), allowed});
}

int32_t Session::draw(std::span<const float> logits, const Sampling& sampling, const Draw& draw) {
    drawn_ = kNone;
    ops_->sample(logits, sampling, draw);
    return drawn_ = ops_->drawn();
}

int32_t Session::step(State& state, int32_t token, const Sampling& sampling, History& history,
                      std::span<const uint32_t> allowed) {
    check(state, {&token, 1}, {});
    Step mine{&state, token, &sampling, &history, allowed};
    if (const std::vector<Step*> steps = turns_.join(mine); !steps.empty()) {
        run(steps);
        turns_.leave(steps);
    }
    if (mine.error) std::rethrow_exception(mine.error);
    return mine.drawn;
}

// Whether a step was begun before it was asked for. Then its state has taken the token in, and the next is
// being drawn.
bool Session::take_ahead(Step& step) {
    if (!ahead_ || step.token != drawn_ || !step.allowed.empty() || step.state->length() != ahead_->length ||
        step.state->recurrent() != ahead_->from || *step.sampling != ahead_->sampling)
        return false;
    spare_logits_ = step.state->logits_block();
    *step.state = std::move(ahead_->state);
    ahead_.reset();
    step.history->add(step.token);
    return true;
}

// Begins the step after one whose token is being drawn, where no more than that token is needed. Whether it
// did.
bool Session::begin_ahead(const Step& step) {
    const Sampling& s = *step.sampling;
    const bool adjusts = !s.bias.empty() || s.repetition_penalty != 1 || s.presence_penalty != 0 ||
                         s.frequency_penalty != 0 || !step.allowed.empty();
    State& state = *step.state;
    const int64_t length = state.length();
    if (!ops_->overlaps() || adjusts || length + 1 > weights_->config.max_positions) return false;
    State next = state.fork_ahead(std::exchange(spare_logits_, nullptr));
    float* logits = nullptr;
    try {
        next.prepare(1, *ops_);
        logits = next.new_logits(*ops_);
    } catch (const Error&) {
        return false;  // there is no memory for it, but then it may never be asked for
    }
    const int32_t token = kDrawn;
    const Segment segment{&next, 0, 1, length, 0};
    forward(*weights_, *ops_, Batch{{&token, 1}, {&segment, 1}, 1});
    ops_->head(*weights_, 0, 1, logits);
    next.set_logits(true);
    ops_->sample(logits_of(next), s, {next.length(), {}, {}});
    ahead_.emplace(std::move(next), state.recurrent(), length, s);
    return true;
}

void Session::drop_ahead() {
    if (!ahead_) return;
    ahead_.reset();
    drawn_ = kNone;  // the device has a later one in its place
}

// Each step gets its token or its own error. Only a pass that fails fails for all of them.
void Session::run(std::vector<Step*> steps) {
    if (steps.size() == 1 && take_ahead(*steps[0])) {
        Step& step = *steps[0];
        try {
            drawn_ = kNone;
            step.drawn = drawn_ = ops_->drawn(begin_ahead(step));
        } catch (...) {
            step.error = std::current_exception();
        }
        return;
    }
    drop_ahead();
    const auto each = [&](const auto& work) {
        std::erase_if(steps, [&](Step* step) {
            try {
                work(*step);
            } catch (...) {
                step->error = std::current_exception();
            }
            return step->error != nullptr;
        });
    };
    each([&](Step& step) {
        step.state->prepare(1, *ops_);
        step.state->set_logits(false);
    });
    if (steps.empty()) return;
    std::vector<int32_t> tokens;
    std::vector<Segment> segments;
    const bool has_token = steps.size() == 1 && steps[0]->token == drawn_;  // the device, from its last draw
    for (Step* step : steps) {
        segments.push_back({step->state, static_cast<int>(tokens.size()), 1, step->state->length(), 0});
        tokens.push_back(has_token ? kDrawn : step->token);
    }
    try {
        forward(*weights_, *ops_, Batch{tokens, segments, static_cast<int>(tokens.size())});
        heads(steps);
    } catch (...) {
        for (Step* step : steps) step->error = std::current_exception();
        return;
    }
    each([&](Step& step) {
        State& state = *step.state;
        state.set_logits(true);
        step.history->add(step.token);
        const Draw next{state.length(), step.history->counts(), step.allowed};
        if (tokens.size() > 1) {
            step.drawn = draw(logits_of(state), *step.sampling, next);
            return;
        }
        drawn_ = kNone;
        ops_->sample(logits_of(state), *step.sampling, next);
        step.drawn = drawn_ = ops_->drawn(begin_ahead(step));
    });
}

// The head reads its weights once for all rows, and each row's logits go to their state.
void Session::heads(std::span<Step* const> steps) {
    const auto rows = static_cast<int>(steps.size());
    if (rows == 1) return ops_->head(*weights_, 0, 1, steps[0]->state->new_logits(*ops_));
    ops_->head(*weights_, 0, rows, logit_rows(steps.size()));
    for (size_t r = 0; r < steps.size(); ++r)
        ops_->copy(reinterpret_cast<std::byte*>(steps[r]->state->new_logits(*ops_)),
                   logit_rows_.get() + r * layout_.logits, layout_.logits);
}

float* Session::logit_rows(size_t rows) {
    if (rows > logit_rows_held_) {
        logit_rows_ = ops_->allocate(rows * layout_.logits);
        logit_rows_held_ = rows;
    }
    return reinterpret_cast<float*>(logit_rows_.get());
}

// The kernels are those of a single row, which give each of several rows the bits that it has alone. The
// recurrent states can't be taken back: after a wrong guess the state from before takes in what was right.
std::vector<int32_t> Session::step_with(State& state, int32_t token, std::span<const int32_t> guess,
                                        const Sampling& sampling, History& history) {
    std::vector<int32_t> tokens{token};
    tokens.insert(tokens.end(), guess.begin(), guess.end());
    check(state, tokens, {});
    LILY_CHECK(std::invalid_argument, static_cast<int>(tokens.size()) <= std::min(kLogitRows, chunk_),
               "guess: wanted at most %d tokens, got %zu", std::min(kLogitRows, chunk_) - 1, guess.size());
    const Turn turn(*this);
    const State before = state.fork();
    pass(state, tokens, 1, nullptr);
    const auto vocab = static_cast<size_t>(weights_->config.vocab);
    const float* rows = logit_rows(tokens.size());
    ops_->head(*weights_, 0, static_cast<int>(tokens.size()), logit_rows(tokens.size()));
    std::vector<int32_t> drawn;
    for (size_t r = 0; r < tokens.size() && (r == 0 || drawn.back() == tokens[r]); ++r) {
        history.add(tokens[r]);
        const int64_t position = before.length() + static_cast<int64_t>(drawn.size()) + 1;
        drawn.push_back(draw({rows + r * vocab, vocab}, sampling, {position, history.counts(), {}}));
    }
    if (drawn.size() < tokens.size()) {
        state = before;
        pass(state, std::span(tokens).first(drawn.size()), 1, nullptr);
    }
    ops_->copy(reinterpret_cast<std::byte*>(state.new_logits(*ops_)),
               logit_rows_.get() + (drawn.size() - 1) * layout_.logits, layout_.logits);
    state.set_logits(true);
    return drawn;
}

std::vector<TokenLogprob> Session::logprobs(const State& state, int32_t token, int top) {
    std::vector<float> room;
    return lily::logprobs(host_logits(state, room), token, top);
}

std::span<const float> Session::host_logits(const State& state, std::vector<float>& room) {
    const std::span<const float> logits = logits_of(state);
    if (ops_->host_reads()) return logits;
    const Turn turn(*this);
    room.resize(logits.size());
    ops_->copy(reinterpret_cast<std::byte*>(room.data()), reinterpret_cast<const std::byte*>(logits.data()),
               logits.size_bytes());
    return room;
}

}  // namespace lily
