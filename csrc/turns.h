// Turns: who drives the device next. Callers are served in the order they came, one at a time; decode steps
// that wait at the same time are run together, by one of their callers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "forward.h"
#include "history.h"

namespace lily {

// A decode step that its caller waits for.
struct Step {
    State* state;
    int32_t token;  // to take in, and into the history, before the next is drawn
    const Sampling* sampling;
    History* history;
    std::span<const uint32_t> allowed;  // as in Draw
    int32_t drawn = 0;
    std::exception_ptr error = nullptr;
};

class Turns {
   public:
    explicit Turns(int most_steps) : most_steps_(most_steps) {}  // that are run together
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Waits for the device and has it for this thread alone until leave(). The interrupt is called several
    // times a second; what it throws ends the waiting. Throws Error in a thread that has the device already.
    void take(const Interrupt& interrupt = nullptr);
    void leave();

    // Returns the steps that this caller is to run, its own the first of them, or none if another caller has
    // run it. Whoever gets some has the device, and calls leave(steps) when all have their token or error.
    std::vector<Step*> join(Step& step);
    void leave(std::span<Step* const> steps);

    std::pair<int64_t, int64_t> counts() const;  // steps run, and the batches that they were run in

   private:
    using Clock = std::chrono::steady_clock;

    struct Waiting {
        Step* step = nullptr;  // none: wants the device for itself
        std::condition_variable awake;
        bool called = false;  // has the device
        bool done = false;    // its step was run by another
    };

    void check_free_thread() const;
    void own();
    void pass_on();
    std::vector<Step*> gather(Step& first, std::unique_lock<std::mutex>& lock);

    const int most_steps_;
    mutable std::mutex mutex_;
    bool taken_ = false;
    std::thread::id owner_;  // of the device, if it is taken
    std::deque<Waiting*> waiting_;
    // Sequences that were in the last batch of steps and have not come back for their next one: worth a short
    // wait.
    std::vector<const State*> expected_;
    std::condition_variable* arrived_ = nullptr;  // while a caller holds its batch open
    Clock::time_point began_;                     // when the batch of steps under way did
    Clock::duration lasted_{};                    // how long the last one took
    int64_t steps_ = 0, batches_ = 0;
    std::vector<Waiting*> run_by_another_;  // whose steps are in the batch under way, without its leader's
};

}  // namespace lily
