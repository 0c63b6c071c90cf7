#include "session.h"

#include <algorithm>
#include <utility>

#include "error.h"

namespace lily {

namespace {

// Rows of logits computed at a time when every row's are wanted: enough to reuse a weight, few enough to stay
// small.
constexpr int kLogitRows = 32;

}  // namespace

// The right to use the device, waited for. A thread that has it and asks again would wait for itself: what an
// interrupt runs between two layers can do that.
class Session::Turn {
   public:
    explicit Turn(Session& session) : session_(session) {
        LILY_CHECK(Error, session.owner_ != std::this_thread::get_id(),
                   "the model is at work in this very thread: a signal handler or a callback that interrupts "
                   "it cannot use it; let it return first");
        session.mutex_.lock();
        session.owner_ = std::this_thread::get_id();
    }
    ~Turn() {
        session_.owner_ = std::thread::id();
        session_.mutex_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Session& session_;
};

Session::Session(std::shared_ptr<const Weights> weights, std::unique_ptr<Ops> ops, int chunk, DType kv)
    : weights_(std::move(weights)),
      ops_(std::move(ops)),
      layout_(weights_->config, kv, ops_->recurrent_copies()),
      chunk_(chunk) {
    static std::atomic<uint64_t> made{0};
    layout_.session = ++made;
}

void Session::check_own(const State& state) const {
    LILY_CHECK(std::invalid_argument, state.layout().session == layout_.session,
               "state: wanted one of this session, got another's. Take the tokens in anew.");
}

State Session::new_state() const {
    return State(layout_, *ops_);
}

State Session::fork(const State& state) {
    check_own(state);
    const Turn turn(*this);
    return state;
}

void Session::check(const State& state, std::span<const int32_t> tokens) const {
    check_own(state);
    const Config& c = weights_->config;
    const auto length = static_cast<int64_t>(tokens.size());
    LILY_CHECK(ContextError, state.length() + length <= c.max_positions,
               "%lld tokens do not fit: the context holds %lld, of which %lld are taken. Shorten the prompt.",
               static_cast<long long>(length), static_cast<long long>(c.max_positions),
               static_cast<long long>(state.length()));
    for (int64_t i = 0; i < length; ++i) {
        const int32_t token = tokens[static_cast<size_t>(i)];
        LILY_CHECK(std::invalid_argument, token >= 0 && token < c.vocab,
                   "tokens[%lld]: wanted an id from 0 to %d, got %d", static_cast<long long>(i), c.vocab - 1,
                   token);
    }
}

// Takes one chunk into one state, which is as it was if that is interrupted.
void Session::pass(State& state, std::span<const int32_t> tokens, const Interrupt& interrupt) {
    State before;
    if (interrupt) before = state;  // shares its memory, so the pass writes to a copy
    const auto length = static_cast<int>(tokens.size());
    try {
        state.prepare(length, *ops_);
        state.set_logits(false);
        const Segment segment{&state, 0, length, state.length()};
        forward(*weights_, *ops_, Batch{tokens, {&segment, 1}, length}, interrupt);
    } catch (...) {
        if (interrupt) {
            const State abandoned = std::exchange(state, before);  // a device may still be at it
            ops_->finish();
        }
        throw;
    }
}

// One chunk at a time, so that callers on other threads take turns between chunks.
template <class AfterChunk>
void Session::take_in(State& state, std::span<const int32_t> tokens, const Progress& progress,
                      const Interrupt& interrupt, AfterChunk after) {
    check(state, tokens);
    const auto total = static_cast<int64_t>(tokens.size());
    for (int64_t done = 0; done < total;) {
        if (progress && done > 0) progress(done, total);
        // Chunks end on multiples of the chunk size in the sequence, wherever this call began.
        const int64_t to_border = chunk_ - state.length() % chunk_;
        const auto length = static_cast<int>(std::min(to_border, total - done));
        {
            const Turn turn(*this);
            pass(state, tokens.subspan(static_cast<size_t>(done), static_cast<size_t>(length)), interrupt);
            after(done, length);
            if (done + length == total) {
                ops_->head(*weights_, length - 1, 1, state.logits());
                state.set_logits(true);
            }
        }
        done += length;
    }
    if (progress) progress(total, total);
}

void Session::extend(State& state, std::span<const int32_t> tokens, const Progress& progress,
                     const Interrupt& interrupt) {
    take_in(state, tokens, progress, interrupt, [](int64_t, int) {});
}

void Session::logits(State& state, std::span<const int32_t> tokens, float* out, const Progress& progress,
                     const Interrupt& interrupt) {
    const int64_t vocab = weights_->config.vocab;
    take_in(state, tokens, progress, interrupt, [&](int64_t done, int length) {
        for (int row = 0; row < length; row += kLogitRows)
            ops_->head(*weights_, row, std::min(kLogitRows, length - row), out + (done + row) * vocab);
    });
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
    return ops_->sample(logits, sampling, {state.length(), history.counts(), allowed});
}

int32_t Session::step(State& state, int32_t token, const Sampling& sampling, History& history,
                      std::span<const uint32_t> allowed) {
    extend(state, {&token, 1}, nullptr);
    history.add(token);
    return sample(state, sampling, history, allowed);
}

std::vector<TokenLogprob> Session::logprobs(const State& state, int32_t token, int top) const {
    return lily::logprobs(logits_of(state), token, top);
}

}  // namespace lily
