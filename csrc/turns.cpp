#include "turns.h"

#include <algorithm>

#include "error.h"

namespace lily {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr auto kLook = milliseconds(50);  // how often a caller that waits looks whether it still has to

// How long a batch is held open for sequences whose last token was drawn in the batch before: half of what a
// batch takes, since one without them costs nearly as much as one with them.
constexpr auto kLeastWindow = microseconds(500), kLongestWindow = microseconds(4000);

}  // namespace

// A thread that has the device and asks again would wait for itself: what an interrupt runs between two
// layers can do that.
void Turns::check_free_thread() const {
    LILY_CHECK(Error, !taken_ || owner_ != std::this_thread::get_id(),
               "the model is at work in this very thread: a signal handler or a callback that interrupts "
               "it cannot use it; let it return first");
}

void Turns::own() {
    taken_ = true;
    owner_ = std::this_thread::get_id();
}

void Turns::take(const Interrupt& interrupt) {
    std::unique_lock lock(mutex_);
    check_free_thread();
    if (!taken_) return own();
    Waiting mine;
    waiting_.push_back(&mine);
    if (arrived_) arrived_->notify_one();  // there is other work: no batch is held open
    const auto called = [&] { return mine.called; };
    while (!mine.awake.wait_for(lock, kLook, called)) {
        if (!interrupt) continue;
        lock.unlock();
        try {
            interrupt();
        } catch (...) {
            lock.lock();
            if (mine.called)
                pass_on();
            else
                std::erase(waiting_, &mine);
            throw;
        }
        lock.lock();
    }
    own();
}

void Turns::leave() {
    const std::lock_guard lock(mutex_);
    pass_on();
}

// The device goes to whoever has waited longest. It stays taken on the way, so that nobody overtakes.
void Turns::pass_on() {
    owner_ = std::thread::id();
    if (waiting_.empty()) {
        taken_ = false;
        return;
    }
    Waiting* next = waiting_.front();
    waiting_.pop_front();
    next->called = true;
    next->awake.notify_one();
}

std::vector<Step*> Turns::join(Step& step) {
    std::unique_lock lock(mutex_);
    check_free_thread();
    std::erase(expected_, step.state);
    if (taken_) {
        Waiting mine;
        mine.step = &step;
        waiting_.push_back(&mine);
        if (arrived_) arrived_->notify_one();
        mine.awake.wait(lock, [&] { return mine.called || mine.done; });
        if (mine.done) return {};
    }
    own();
    return gather(step, lock);
}

std::vector<Step*> Turns::gather(Step& first, std::unique_lock<std::mutex>& lock) {
    const auto only_steps = [&] {
        return std::ranges::all_of(waiting_, [](const Waiting* w) { return w->step != nullptr; });
    };
    if (most_steps_ > 1 && !expected_.empty() && only_steps()) {
        std::condition_variable arrived;  // not a member: a forked child could not destroy it
        arrived_ = &arrived;
        const auto window = std::clamp<Clock::duration>(lasted_ / 2, kLeastWindow, kLongestWindow);
        arrived.wait_for(lock, window, [&] { return expected_.empty() || !only_steps(); });
        arrived_ = nullptr;
    }
    std::vector<Step*> steps{&first};
    std::erase_if(waiting_, [&](Waiting* w) {
        const auto same = [&](const Step* other) { return other->state == w->step->state; };
        if (w->step == nullptr || static_cast<int>(steps.size()) == most_steps_) return false;
        if (std::ranges::any_of(steps, same)) return false;  // a sequence has one next token
        steps.push_back(w->step);
        run_by_another_.push_back(w);
        return true;
    });
    began_ = Clock::now();
    return steps;
}

void Turns::leave(std::span<Step* const> steps) {
    const std::lock_guard lock(mutex_);
    lasted_ = Clock::now() - began_;
    steps_ += static_cast<int64_t>(steps.size());
    ++batches_;
    expected_.clear();
    if (steps.size() > 1 || !waiting_.empty())
        for (const Step* step : steps) expected_.push_back(step->state);
    for (Waiting* other : run_by_another_) {
        other->done = true;
        other->awake.notify_one();
    }
    run_by_another_.clear();
    pass_on();
}

std::pair<int64_t, int64_t> Turns::counts() const {
    const std::lock_guard lock(mutex_);
    return {steps_, batches_};
}

}  // namespace lily
