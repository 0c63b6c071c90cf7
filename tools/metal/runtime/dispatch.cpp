// Takes a launch apart into groups, shares them among OS threads, and gathers what came of it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "findings.h"
#include "instruments.h"
#include "scheduler.h"

// Written by tools/metal/compile.py for the library's own kernels.
extern "C" {
extern const lily::metal::Kernel lily_metal_kernels[];
extern const uint32_t lily_metal_kernel_count;
extern const lily::metal::FunctionConstant lily_metal_constants[];
extern const uint32_t lily_metal_constant_count;
}

namespace lily::metal {
namespace {

// OS threads that run groups. They live as long as the process: a library is never unloaded.
class Pool {
   public:
    void run(uint32_t count, void (*work)(void*, uint32_t), void* argument) {
        if (process_ != getpid()) workers_ = 0, process_ = getpid();  // a fork has none of them
        for (; workers_ + 1 < count; ++workers_) std::thread([this, i = workers_ + 1] { serve(i); }).detach();
        {
            std::lock_guard lock(mutex_);
            work_ = work, argument_ = argument, wanted_ = count, left_ = count - 1, ++round_;
        }
        start_.notify_all();
        work(argument, 0);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return left_ == 0; });
    }

   private:
    void serve(uint32_t index) {
        uint64_t seen = 0;
        for (;;) {
            std::unique_lock lock(mutex_);
            start_.wait(lock, [&] { return round_ != seen && index < wanted_; });
            seen = round_;
            lock.unlock();
            work_(argument_, index);
            lock.lock();
            if (--left_ == 0) done_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    void (*work_)(void*, uint32_t) = nullptr;
    void* argument_ = nullptr;
    uint32_t wanted_ = 0, left_ = 0, workers_ = 0;
    uint64_t round_ = 0;
    pid_t process_ = 0;
};

struct OwnedResult : Result {
    Findings all;
    std::vector<Finding> list;
    std::vector<Traffic> all_traffic;
    std::vector<Range> all_ranges;
};

struct Dispatch {
    const Launch* launch;
    const Kernel* kernel;
    uint32_t groups[3];
    std::atomic<uint64_t> next{0};
    std::vector<Worker*> workers;
    std::vector<Findings> findings;
};

void set_up(Worker& worker, Dispatch& dispatch, uint32_t index) {
    const Launch& launch = *dispatch.launch;
    worker.launch = &launch;
    worker.kernel = dispatch.kernel;
    worker.findings = &dispatch.findings[index];
    worker.random = launch.seed * 2654435761u + index + 1;
    worker.random += worker.random == 0;
    worker.switches = worker.barriers = worker.meetings = worker.threads = worker.groups = 0;
    worker.memory_most = 0;
    worker.stopped = false;
    if (kInstrumented) {
        if (!worker.instruments) worker.instruments = new Instruments(worker);
        worker.instruments->begin_dispatch();
    }
    msl_group& group = worker.group;
    std::memset(group.buffers, 0, sizeof group.buffers);
    std::memset(group.threadgroup_buffers, 0, sizeof group.threadgroup_buffers);
    for (uint32_t i = 0; i < launch.binding_count; ++i)
        if (launch.bindings[i].index < kBuffers)
            group.buffers[launch.bindings[i].index] = reinterpret_cast<uint64_t>(launch.bindings[i].data);
    for (int i = 0; i < 3; ++i) {
        group.groups[i] = dispatch.groups[i];
        group.dispatch_threads[i] = launch.threads[i];
        group.grid[i] = launch.grid[i] ? launch.grid[i] : dispatch.groups[i] * launch.threads[i];
    }
}

void run_groups(void* argument, uint32_t index) {
    auto& dispatch = *static_cast<Dispatch*>(argument);
    Worker& worker = *dispatch.workers[index];
    set_up(worker, dispatch, index);
    const uint64_t total =
        static_cast<uint64_t>(dispatch.groups[0]) * dispatch.groups[1] * dispatch.groups[2];
    for (uint64_t number; (number = dispatch.next++) < total;) {
        const uint32_t position[3] = {
            static_cast<uint32_t>(number % dispatch.groups[0]),
            static_cast<uint32_t>(number / dispatch.groups[0] % dispatch.groups[1]),
            static_cast<uint32_t>(number / dispatch.groups[0] / dispatch.groups[1])};
        run_group(worker, position);
        if (worker.stopped || worker.findings->entries.size() >= Findings::kMost) break;
    }
}

// What is wrong with a launch before anything runs; empty if nothing.
std::string refusal(const Launch& launch, const uint32_t groups[3]) {
    if (launch.kernel >= lily_metal_kernel_count)
        return "there is no kernel " + std::to_string(launch.kernel) + ", only " +
               std::to_string(lily_metal_kernel_count);
    const Kernel& kernel = lily_metal_kernels[launch.kernel];
    const uint64_t threads = static_cast<uint64_t>(launch.threads[0]) * launch.threads[1] * launch.threads[2];
    if (threads == 0 || threads > kernel.max_threads)
        return "a group has " + std::to_string(threads) + " threads; 1 to " +
               std::to_string(kernel.max_threads) + " run";
    for (int i = 0; i < 3; ++i) {
        const uint64_t needed =
            launch.grid[i] ? (launch.grid[i] + launch.threads[i] - 1) / launch.threads[i] : groups[i];
        if (needed != groups[i])
            return "a grid of " + std::to_string(launch.grid[i]) + " threads needs " +
                   std::to_string(needed) + " groups, not " + std::to_string(groups[i]);
    }
    for (uint32_t i = 0; i < kernel.argument_count; ++i) {
        const Argument& argument = kernel.arguments[i];
        const std::string name = std::string(argument.name) + " [[" +
                                 (argument.space == Space::kThreadgroup ? "threadgroup(" : "buffer(") +
                                 std::to_string(argument.index) + ")]]";
        if (argument.optional) continue;
        if (argument.space == Space::kThreadgroup) {
            if (argument.index >= launch.threadgroup_count || !launch.threadgroup_bytes[argument.index])
                return name + " has no length";
            continue;
        }
        const auto* end = launch.bindings + launch.binding_count;
        if (std::none_of(launch.bindings, end,
                         [&](const Binding& b) { return b.index == argument.index && b.data; }))
            return name + " is not bound";
    }
    for (uint32_t i = 0; i < launch.constant_count; ++i) {
        const auto* end = lily_metal_constants + lily_metal_constant_count;
        const uint32_t index = launch.constants[i].index;
        if (std::none_of(lily_metal_constants, end,
                         [&](const FunctionConstant& c) { return c.index == index; }))
            return "there is no function constant " + std::to_string(index);
    }
    return "";
}

void set_constants(const Launch& launch) {
    for (uint32_t i = 0; i < lily_metal_constant_count; ++i) {
        const FunctionConstant& constant = lily_metal_constants[i];
        const auto* end = launch.constants + launch.constant_count;
        const auto* given = std::find_if(launch.constants, end,
                                         [&](const ConstantValue& v) { return v.index == constant.index; });
        *constant.defined = given != end;
        if (given != end)
            std::memcpy(constant.value, given->value, constant.bytes);
        else
            std::memset(constant.value, 0, constant.bytes);
    }
}

uint32_t worker_count(const Launch& launch, uint64_t groups) {
    const Kernel& kernel = lily_metal_kernels[launch.kernel];
    const auto* end = kernel.arguments + kernel.argument_count;
    const bool ordered = std::any_of(kernel.arguments, end, [](const Argument& a) { return a.atomic != 0; });
    if (kInstrumented || ordered) return 1;
    const uint32_t wanted =
        launch.workers ? launch.workers : std::max(1u, std::thread::hardware_concurrency());
    return static_cast<uint32_t>(std::clamp<uint64_t>(groups, 1, wanted));
}

void finish(OwnedResult& result, const Launch& launch, const Dispatch* dispatch) {
    const char* kernel =
        launch.kernel < lily_metal_kernel_count ? lily_metal_kernels[launch.kernel].name : "?";
    if (dispatch)
        for (const Findings& findings : dispatch->findings)
            for (const Findings::Entry& entry : findings.entries) result.all.add(entry);
    for (Findings::Entry& entry : result.all.entries) {
        entry.message =
            std::string(kernel) + (entry.line ? ":" + std::to_string(entry.line) : "") + ": " + entry.text;
        result.list.push_back({entry.fault, entry.buffer, entry.offset, kernel, entry.file.c_str(),
                               entry.line, entry.count, entry.message.c_str()});
    }
    result.findings = result.list.data();
    result.finding_count = static_cast<uint32_t>(result.list.size());
}

void collect(OwnedResult& result, Worker& worker) {
    worker.instruments->collect(result.all_traffic, result.all_ranges);
    result.traffic = result.all_traffic.data();
    result.traffic_count = static_cast<uint32_t>(result.all_traffic.size());
    result.ranges = result.all_ranges.data();
    result.range_count = static_cast<uint32_t>(result.all_ranges.size());
    result.threadgroup_read = worker.instruments->threadgroup_read;
    result.threadgroup_written = worker.instruments->threadgroup_written;
}

std::mutex& one_at_a_time() {
    static auto& mutex = *new std::mutex;
    return mutex;
}

Result* run(const Launch* launch) {
    static auto& pool = *new Pool;
    static auto& workers = *new std::vector<Worker*>;
    std::lock_guard lock(one_at_a_time());
    const auto begin = std::chrono::steady_clock::now();
    auto* result = new OwnedResult{};
    Dispatch dispatch{.launch = launch};
    std::copy_n(launch->indirect ? launch->indirect : launch->groups, 3, dispatch.groups);
    if (const std::string why = refusal(*launch, dispatch.groups); !why.empty()) {
        result->all.add({.fault = Fault::kLaunch, .text = why});
        finish(*result, *launch, nullptr);
        return result;
    }
    dispatch.kernel = &lily_metal_kernels[launch->kernel];
    set_constants(*launch);
    const uint64_t groups =
        static_cast<uint64_t>(dispatch.groups[0]) * dispatch.groups[1] * dispatch.groups[2];
    const uint32_t count = worker_count(*launch, groups);
    while (workers.size() < count) workers.push_back(new Worker);
    dispatch.workers.assign(workers.begin(), workers.begin() + count);
    dispatch.findings.resize(count);
    if (count == 1)
        run_groups(&dispatch, 0);
    else
        pool.run(count, run_groups, &dispatch);
    for (const Worker* worker : dispatch.workers) {
        result->switches += worker->switches;
        result->barriers += worker->barriers;
        result->meetings += worker->meetings;
        result->threads += worker->threads;
        result->groups += worker->groups;
        result->threadgroup_bytes = std::max(result->threadgroup_bytes, worker->memory_most);
    }
    if (kInstrumented) collect(*result, *workers[0]);
    finish(*result, *launch, &dispatch);
    result->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return result;
}

void release_result(Result* result) {
    delete static_cast<OwnedResult*>(result);
}

}  // namespace
}  // namespace lily::metal

extern "C" __attribute__((visibility("default"))) const lily::metal::Library* lily_metal_library() {
    using namespace lily::metal;
    static const Library library = {
        .version = kVersion,
        .instrumented = kInstrumented,
        .kernels = lily_metal_kernels,
        .kernel_count = lily_metal_kernel_count,
        .constant_count = lily_metal_constant_count,
        .constants = lily_metal_constants,
        .dispatch = run,
        .release = release_result,
        .track =
            [](const void* data, uint64_t bytes, uint32_t defined) {
                if (kInstrumented) Instruments::tracked().track(data, bytes, defined != 0);
            },
        .define =
            [](const void* data, uint64_t bytes) {
                if (kInstrumented) Instruments::tracked().define(data, bytes);
            },
        .forget =
            [](const void* data) {
                if (kInstrumented) Instruments::tracked().forget(data);
            },
    };
    return &library;
}
