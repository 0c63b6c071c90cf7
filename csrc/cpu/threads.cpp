#include "cpu/threads.h"

#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <system_error>

namespace lily {

namespace {

// Between two steps of a token lie a few microseconds, between two tokens some hundred: spin over the first,
// yield over the second, sleep when a caller has gone away.
constexpr int kSpins = 2000;
constexpr int kYields = 200;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

template <class Condition>
bool wait_awake(const Condition& done) {
    for (int i = 0; i < kSpins; ++i) {
        if (done()) return true;
        pause();
    }
    for (int i = 0; i < kYields; ++i) {
        if (done()) return true;
        std::this_thread::yield();
    }
    return false;
}

}  // namespace

Threads::Threads(int count) : process_(getpid()) {
    if (count == 0) count = cores();
    workers_.reserve(static_cast<size_t>(count - 1));
    shares_ = std::vector<Share>(static_cast<size_t>(count));
    try {
        for (int thread = 1; thread < count; ++thread)
            workers_.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error&) {
        // The machine grants no more threads: the ones it granted do the work.
    }
}

Threads::~Threads() {
    if (getpid() != process_) {
        // A forked child has the handles but not the threads, and the system may give their ids to new ones:
        // the handles are left alone for good.
        new std::vector<std::thread>(std::move(workers_));
        return;
    }
    stop_.store(true, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

// The caller waits for tasks, not for workers: one that the machine keeps from running holds nothing up,
// because a task is taken only from the round it belongs to, and what a round calls stays put until its last
// task is done.
void Threads::start(int64_t tasks, const void* function, Call call) {
    function_ = function;
    call_ = call;
    tasks_ = tasks;
    done_.store(0, std::memory_order_relaxed);
    const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
    for (int64_t t = 0; t < static_cast<int64_t>(shares_.size()); ++t)
        shares_[static_cast<size_t>(t)].left.store(
            uint64_t{round} << 32 | static_cast<uint64_t>(end_of(t) - end_of(t - 1)),
            std::memory_order_release);
    round_.store(round, std::memory_order_release);
    round_.notify_all();
    take_tasks(0);
    const auto finished = [&] { return done_.load(std::memory_order_acquire) == tasks; };
    while (!wait_awake(finished)) {
    }
}

// Nobody's task is done before all have one, so nobody takes two.
void Threads::meet() {
    std::atomic<int> here{0};
    const auto all = [&] { return here.load(std::memory_order_acquire) == count(); };
    run(count(), kWorthSharing, [&](int64_t, int) {
        here.fetch_add(1, std::memory_order_release);
        while (!wait_awake(all)) {
        }
    });
}

// Where a thread's tasks end.
int64_t Threads::end_of(int64_t thread) const {
    return tasks_ * (thread + 1) / static_cast<int64_t>(shares_.size());
}

void Threads::take_tasks_of(int owner, int thread) {
    std::atomic<uint64_t>& share = shares_[static_cast<size_t>(owner)].left;
    uint64_t left = share.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(left) != 0) {
        if (!share.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel,
                                         std::memory_order_acquire))
            continue;
        call_(function_, end_of(owner) - static_cast<uint32_t>(left), thread);
        done_.fetch_add(1, std::memory_order_release);
        left = share.load(std::memory_order_acquire);
    }
}

void Threads::take_tasks(int thread) {
    const int count = static_cast<int>(shares_.size());
    for (int i = 0; i < count; ++i) take_tasks_of((thread + i) % count, thread);
}

void Threads::serve(int thread) {
    uint32_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        const auto called = [&] { return round_.load(std::memory_order_acquire) != seen; };
        if (!wait_awake(called)) round_.wait(seen, std::memory_order_acquire);
        seen = round_.load(std::memory_order_acquire);
        take_tasks(thread);
    }
}

}  // namespace lily
