// Runs a threadgroup on one OS thread: every Metal thread is a fiber that runs until it must wait for others.
// What lanes do when they meet is in collectives.cpp and tiles.cpp; what is watched in between, in
// instruments.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../runtime.h"
#include "context.h"

#ifndef MSL_INSTRUMENTED
#define MSL_INSTRUMENTED 0
#endif

namespace lily::metal {

constexpr bool kInstrumented = MSL_INSTRUMENTED != 0;
constexpr size_t kSlot = 64;  // bytes between the values that lanes exchange; MSL_SLOT in language/simd.h

struct SimdGroup;
struct Worker;

struct Lane {
    msl_thread thread;  // first: what msl_current points to
    void* stack_pointer;
    SimdGroup* simd;
    Worker* worker;
    uint32_t bit;  // 1 << lane
};

struct alignas(64) Slot {
    unsigned char bytes[kSlot];
};

// Where a SIMD-group's lanes stand. A generation ends when all active lanes have met; results alternate
// between two places, since a lane can be one meeting ahead of another that still reads.
struct SimdGroup {
    msl_simdgroup_shared shared;  // first: what msl_thread::shared points to
    uint32_t index;
    uint32_t active;    // lanes that have not returned
    uint32_t runnable;  // lanes that wait for nothing
    uint32_t arrived;   // lanes at the current meeting
    uint32_t call;      // which call they are at
    uint32_t generation;
    void (*finish)(const void* work, SimdGroup& simd,
                   uint32_t place);  // what the last lane of this meeting does
    const void* work;
    uint32_t threadgroup_epoch, device_epoch;  // simdgroup_barriers passed, by the memory they order
    Slot slots[2][kSimdWidth];
    uint32_t results[2][4];
    float (*matrices)[64];              // MSL_MATRICES of them
    uint64_t filled[MSL_MATRIX_WORDS];  // which of them hold something
    const void* operands[kSimdWidth];
};

// What a product of matrix tiles works on, kept from one to the next.
template <class T>
struct Products {
    std::vector<T> left, right, sum, held;
};

// One OS thread's share of a dispatch. Its memory hangs here and not on thread_local variables: those of a
// library that has msl_current all lie in the static block, of which a process has room for few such
// libraries.
struct Worker {
    const Launch* launch = nullptr;
    const Kernel* kernel = nullptr;
    msl_group group;
    uint32_t group_number = 0;
    std::vector<Lane> lanes;
    std::vector<SimdGroup> simds;
    uint32_t thread_count = 0, simd_count = 0;
    uint32_t runnable_simds = 0;      // those with a runnable lane
    uint32_t waiting = 0, alive = 0;  // threads at the barrier, threads that have not returned
    uint32_t barrier_call = 0;
    uint32_t threadgroup_epoch = 0, device_epoch = 0;  // barriers passed, by the memory they order
    void* own_stack = nullptr;                         // where run_group goes on
    unsigned char* stacks = nullptr;
    uint32_t stack_count = 0;
    unsigned char* memory = nullptr;             // threadgroup memory
    uint32_t memory_used = 0;                    // up to where it is given out
    uint32_t memory_bytes = 0, memory_most = 0;  // how much of that is variables
    std::vector<uint32_t> declared_at;           // by declaration: where its variable lies, or kNowhere
    uint32_t random = 1;
    uint64_t switches = 0, barriers = 0, meetings = 0, threads = 0, groups = 0;
    bool broken = false;   // lanes or matrices are out of step
    bool stopped = false;  // a fault after which nothing more may run
    Products<float> float_products;
    Products<int32_t> integer_products;
    struct Findings* findings = nullptr;
    class Instruments* instruments = nullptr;
};

constexpr uint32_t kNowhere = ~0u;
// Between the variables of an instrumented group, so that running over the end of one shows.
constexpr uint32_t kGap = kInstrumented ? 64 : 0;
constexpr uint32_t kArena =
    1 << 17;  // more than kThreadgroupMemory, so that too much is found and not a crash

extern "C" thread_local msl_thread* msl_current __attribute__((tls_model("initial-exec")));
inline Lane& current_lane() {
    return *reinterpret_cast<Lane*>(msl_current);
}

void run_group(Worker& worker, const uint32_t position[3]);

// Gives the processor to another lane; returns when this one is runnable again.
void yield(Lane& lane);

// Abandons the running group and the rest of the dispatch.
[[noreturn]] void stop_dispatch(Worker& worker);

// Lets all active lanes of a SIMD-group go on.
void release(SimdGroup& simd, Worker& worker);

// The kind of call in the top byte, its line below: what lanes that meet must have in common.
enum class Call : uint32_t {
    kBarrier = 1,
    kSimdBarrier,
    kExchange,
    kBallot,
    kReduce,
    kScan,
    kMatrix,
    kMatmul
};
constexpr uint32_t call_at(Call call, uint32_t line) {
    return static_cast<uint32_t>(call) << 24 | (line & 0xffffff);
}

void report_divergence(const SimdGroup& simd, uint32_t call);

// Waits for all active lanes; the last runs `finish` for all, or, if what all wait for is a lane's return,
// that lane does. Gives which of the two result places is theirs.
template <class Finish>
inline uint32_t meet(uint32_t call, Finish finish) {
    Lane& lane = current_lane();
    SimdGroup& simd = *lane.simd;
    const uint32_t place = simd.generation & 1;
    if (simd.arrived == 0)
        simd.call = call;
    else if (simd.call != call)
        report_divergence(simd, call);
    simd.arrived |= lane.bit;
    if (simd.arrived == simd.active) {
        finish(simd, place);
        release(simd, *lane.worker);
        return place;
    }
    simd.work = &finish;
    simd.finish = [](const void* work, SimdGroup& group, uint32_t at) {
        (*static_cast<const Finish*>(work))(group, at);
    };
    simd.runnable &= ~lane.bit;
    yield(lane);
    return place;
}

}  // namespace lily::metal
