// Threads: the CPU backend's own pool. Workers spin briefly for the next piece of work, then yield, then sleep.
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

    // Calls function(task, thread) for every task in [0, tasks), on all threads, and returns when all are done.
    // The function must not throw. Which thread takes which task is not fixed, so no result may depend on it.
    template <class Function>
    void run(int64_t tasks, const Function& function) {
        if (tasks <= 1 || workers_.empty()) {
            for (int64_t task = 0; task < tasks; ++task) function(task, 0);
            return;
        }
        start(tasks, &function, [](const void* work, int64_t task, int thread) {
            (*static_cast<const Function*>(work))(task, thread);
        });
    }

  private:
    using Call = void (*)(const void* work, int64_t task, int thread);

    void start(int64_t tasks, const void* work, Call call);
    void serve(int thread);
    void take_tasks(int thread);

    std::vector<std::thread> workers_;
    const void* work_ = nullptr;
    Call call_ = nullptr;
    int64_t tasks_ = 0;
    bool stop_ = false;
    // Each on a cache line of its own: they are written by different threads at the same time.
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> busy_{0};
};

}  // namespace lily
