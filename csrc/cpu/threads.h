// Threads: the CPU backend's own pool. Workers spin briefly for the next piece of work, then yield, then
// sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace lily {

class Threads {
   public:
    explicit Threads(int count);  // 0: one per core this process may use
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return static_cast<int>(workers_.size()) + 1; }
    int64_t rounds() const { return round_.load(std::memory_order_relaxed); }  // of tasks that were shared

    // Calls function(task, thread) for every task in [0, tasks), on all threads, and returns when all are
    // done. The function must not throw. Each thread takes neighbouring tasks, one after the other, as long
    // as it has any, and then others': what it asks of memory ahead of time it mostly needs. Which thread
    // takes which task is not fixed, so no result may depend on it. `work` estimates the multiplications of
    // all tasks together: too few to share stay on the calling thread.
    template <class Function>
    void run(int64_t tasks, int64_t work, const Function& function) {
        if (tasks <= 1 || workers_.empty() || work < kWorthSharing) {
            for (int64_t task = 0; task < tasks; ++task) function(task, 0);
            return;
        }
        start(tasks, &function, [](const void* call, int64_t task, int thread) {
            (*static_cast<const Function*>(call))(task, thread);
        });
    }

    // Has every thread come, and returns then: work that is shared, without the work.
    void meet();

   private:
    using Call = void (*)(const void* function, int64_t task, int thread);

    // About ten microseconds on one core; waking and waiting for another costs a few.
    static constexpr int64_t kWorthSharing = 100'000;

    void start(int64_t tasks, const void* function, Call call);
    void serve(int thread);
    void take_tasks(int thread);
    void take_tasks_of(int owner, int thread);
    int64_t end_of(int64_t thread) const;

    std::vector<std::thread> workers_;
    const void* function_ = nullptr;
    Call call_ = nullptr;
    int64_t tasks_ = 0;
    std::atomic<bool> stop_{false};
    int process_ = 0;  // that the workers belong to
    // Each on a cache line of its own: they are written by different threads at the same time.
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    struct alignas(64) Share {
        std::atomic<uint64_t> left{0};  // round << 32 | tasks of a thread that nobody has taken yet
    };
    std::vector<Share> shares_;  // by thread
};

}  // namespace lily
