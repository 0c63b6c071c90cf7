#include "scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

#include "findings.h"
#include "instruments.h"

// Saves the registers that a function must keep, and goes on where another fiber saved its own.
asm(R"(.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void msl_switch(void** save, void* to);

namespace lily::metal {

extern "C" {
thread_local msl_thread* msl_current = nullptr;
}

namespace {

constexpr size_t kStack = 64 << 10;
constexpr size_t kPage = 4096;

uint32_t next_random(Worker& worker) {  // xorshift
    uint32_t x = worker.random;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return worker.random = x;
}

// Picks a set bit of `mask`, which has one, by the launch's order; `after` is the bit that ran last.
uint32_t pick(Worker& worker, uint32_t mask, uint32_t after) {
    switch (worker.launch->order) {
        case Order::kForward: {
            const uint32_t above = mask & (~1u << after);
            return static_cast<uint32_t>(std::countr_zero(above ? above : mask));
        }
        case Order::kReverse: {
            const uint32_t below = mask & ((1u << after) - 1);
            return 31 - static_cast<uint32_t>(std::countl_zero(below ? below : mask));
        }
        default: {
            const uint32_t turn = next_random(worker) & 31;
            return (static_cast<uint32_t>(std::countr_zero(std::rotr(mask, static_cast<int>(turn)))) + turn) &
                   31;
        }
    }
}

[[gnu::noinline]] void yield_to_other_simd(Lane& lane) {
    Worker& worker = *lane.worker;
    worker.runnable_simds &= ~(1u << lane.simd->index);
    if (worker.runnable_simds == 0) {  // all have returned, or none can go on
        msl_switch(&lane.stack_pointer, worker.own_stack);
        return;
    }
    const SimdGroup& simd = worker.simds[pick(worker, worker.runnable_simds, lane.simd->index)];
    const uint32_t first =
        worker.launch->order == Order::kReverse ? 0 : 31;  // so that pick starts from the end
    Lane& next = worker.lanes[simd.index * kSimdWidth + pick(worker, simd.runnable, first)];
    msl_current = &next.thread;
    if (&next != &lane) msl_switch(&lane.stack_pointer, next.stack_pointer);
}

void leave(Lane& lane) {
    Worker& worker = *lane.worker;
    SimdGroup& simd = *lane.simd;
    simd.active &= ~lane.bit;
    simd.runnable &= ~lane.bit;
    worker.alive--;
    if (simd.arrived && simd.arrived == simd.active) {
        simd.finish(simd.work, simd, simd.generation & 1);
        release(simd, worker);
    }
    if (worker.alive && worker.waiting == worker.alive)
        release_barrier(worker, worker.barrier_call & 0xffffff, 0);
}

void start_lane() {
    Lane& lane = current_lane();
    lane.worker->kernel->entry(&lane.thread);
    leave(lane);
    yield(lane);
    std::abort();  // nobody resumes a thread that has returned
}

unsigned char* map(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<unsigned char*>(memory);
}

void make_stacks(Worker& worker, uint32_t count) {
    if (worker.stack_count >= count) return;
    if (worker.stacks) munmap(worker.stacks, worker.stack_count * kStack);
    worker.stacks = map(count * kStack);
    worker.stack_count = count;
    for (uint32_t i = 0; i < count; ++i) mprotect(worker.stacks + i * kStack, kPage, PROT_NONE);
}

// Lays out the lanes of a group of this shape.
void make_lanes(Worker& worker, const uint32_t threads[3]) {
    const uint32_t count = threads[0] * threads[1] * threads[2];
    make_stacks(worker, count);
    worker.thread_count = count;
    worker.simd_count = (count + kSimdWidth - 1) / kSimdWidth;
    worker.lanes.resize(count);
    for (SimdGroup& simd : worker.simds) std::free(simd.matrices);
    worker.simds.assign(worker.simd_count, SimdGroup{});
    for (uint32_t i = 0; i < worker.simd_count; ++i) worker.simds[i].index = i;
    for (uint32_t i = 0; i < count; ++i) {
        Lane& lane = worker.lanes[i];
        lane.worker = &worker;
        lane.simd = &worker.simds[i / kSimdWidth];
        lane.bit = 1u << i % kSimdWidth;
        msl_thread& thread = lane.thread;
        thread = {};
        thread.group = reinterpret_cast<uint64_t>(&worker.group);
        thread.shared = reinterpret_cast<uint64_t>(&lane.simd->shared);
        thread.position[0] = i % threads[0];
        thread.position[1] = i / threads[0] % threads[1];
        thread.position[2] = i / threads[0] / threads[1];
        thread.index = i;
        thread.lane = i % kSimdWidth;
        thread.simdgroup = i / kSimdWidth;
        std::fill(std::begin(thread.free_matrices), std::end(thread.free_matrices), ~0ull);
    }
}

// Points the fiber of a lane at its start. Stacks begin at different offsets, or all would share a few cache
// lines.
void wind_up(Worker& worker, uint32_t index) {
    auto* top =
        reinterpret_cast<uint64_t*>(worker.stacks + (index + 1) * kStack - 64 - (index * 832) % 16384);
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(&start_lane);
    worker.lanes[index].stack_pointer = top - 6;
}

// Gives a variable its place in the group's memory.
unsigned char* give_memory(Worker& worker, uint64_t bytes, uint32_t align) {
    const uint32_t begin = (worker.memory_used + align - 1) & ~(align - 1);
    if (begin + bytes + kGap > kArena) {
        report(worker, Fault::kMemory, 0,
               "a threadgroup wants %u bytes of threadgroup memory; the limit is %u",
               static_cast<uint32_t>(worker.memory_bytes + bytes), kThreadgroupMemory);
        stop_dispatch(worker);
    }
    worker.memory_used = begin + static_cast<uint32_t>(bytes) + kGap;
    worker.memory_bytes += static_cast<uint32_t>(bytes);
    if (kInstrumented) worker.instruments->add_variable(begin, begin + static_cast<uint32_t>(bytes));
    return worker.memory + begin;
}

void begin_group(Worker& worker, const uint32_t position[3]) {
    const Launch& launch = *worker.launch;
    msl_group& group = worker.group;
    uint32_t threads[3];
    for (int i = 0; i < 3; ++i) {
        group.position[i] = position[i];
        const uint32_t begin = position[i] * launch.threads[i];
        threads[i] = launch.grid[i] ? std::min(launch.threads[i], launch.grid[i] - begin) : launch.threads[i];
    }
    if (worker.broken || worker.lanes.empty() || !std::equal(threads, threads + 3, group.threads)) {
        make_lanes(worker, threads);
        std::copy(threads, threads + 3, group.threads);
        worker.broken = false;
    }
    group.simdgroups = worker.simd_count;
    worker.group_number = position[0] + group.groups[0] * (position[1] + group.groups[1] * position[2]);

    if (!worker.memory) {
        worker.memory = map(kArena);
        worker.memory_used = kArena;
    }
    // All ones are NaN in every floating type: what was not written shows.
    std::memset(worker.memory, 0xff, worker.memory_used);
    worker.memory_used = worker.memory_bytes = 0;
    std::fill(worker.declared_at.begin(), worker.declared_at.end(), kNowhere);
    if (kInstrumented) worker.instruments->begin_group();
    for (uint32_t i = 0; i < launch.threadgroup_count; ++i)
        group.threadgroup_buffers[i] =
            reinterpret_cast<uint64_t>(give_memory(worker, launch.threadgroup_bytes[i], 16));
    worker.waiting = 0;
    worker.alive = worker.thread_count;
    worker.threadgroup_epoch++;
    worker.device_epoch++;
    worker.runnable_simds = worker.simd_count == 32 ? ~0u : (1u << worker.simd_count) - 1;
    for (SimdGroup& simd : worker.simds) {
        const uint32_t count = std::min<uint32_t>(kSimdWidth, worker.thread_count - simd.index * kSimdWidth);
        simd.active = simd.runnable = count == 32 ? ~0u : (1u << count) - 1;
        simd.arrived = 0;
    }
    for (uint32_t i = 0; i < worker.thread_count; ++i) wind_up(worker, i);
}

void check_end(Worker& worker) {
    if (worker.alive) {
        uint32_t meeting = 0, line = 0;
        for (const SimdGroup& simd : worker.simds) {
            if (simd.arrived) line = simd.call & 0xffffff;
            meeting += static_cast<uint32_t>(std::popcount(simd.arrived));
        }
        worker.broken = true;
        report(worker, Fault::kDivergence, worker.waiting ? worker.barrier_call & 0xffffff : line,
               "threads wait for each other for ever: %u at the threadgroup_barrier of line %u, %u at the "
               "SIMD-group "
               "operation of line %u, %u have returned",
               worker.waiting, worker.barrier_call & 0xffffff, meeting, line,
               worker.thread_count - worker.alive);
        return;
    }
    for (const Lane& lane : worker.lanes) {
        if (lane.thread.matrix_operations == lane.simd->shared.matrix_operations) continue;
        worker.broken = true;
        report(worker, Fault::kDivergence, 0,
               "lanes of one SIMD-group did %u and %u matrix operations: all of them must do every one",
               lane.thread.matrix_operations, lane.simd->shared.matrix_operations);
        return;
    }
}

}  // namespace

void yield(Lane& lane) {
    Worker& worker = *lane.worker;
    worker.switches++;
    const uint32_t runnable = lane.simd->runnable;
    if (runnable == 0) {
        yield_to_other_simd(lane);
        return;
    }
    Lane& next = worker.lanes[lane.simd->index * kSimdWidth + pick(worker, runnable, lane.thread.lane)];
    msl_current = &next.thread;
    msl_switch(&lane.stack_pointer, next.stack_pointer);
}

void stop_dispatch(Worker& worker) {
    void* abandoned = nullptr;
    worker.broken = worker.stopped = true;
    msl_switch(&abandoned, worker.own_stack);
    std::abort();  // nobody comes back
}

void release(SimdGroup& simd, Worker& worker) {
    simd.runnable = simd.active;
    simd.arrived = 0;
    simd.generation++;
    worker.meetings++;
    if (kInstrumented) worker.instruments->simd_went_on(simd.index);
}

void release_barrier(Worker& worker, uint32_t line, uint32_t flags) {
    if (worker.alive != worker.thread_count)
        report(worker, Fault::kDivergence, line,
               "%u of the %u threads returned before the threadgroup_barrier of line %u",
               worker.thread_count - worker.alive, worker.thread_count, line);
    worker.waiting = 0;
    worker.barriers++;
    if (flags & 2) worker.threadgroup_epoch++;
    if (flags & 1) worker.device_epoch++;
    for (SimdGroup& simd : worker.simds) {
        simd.runnable = simd.active;
        if (simd.active) worker.runnable_simds |= 1u << simd.index;
        if (kInstrumented) worker.instruments->simd_went_on(simd.index);
    }
}

void report_divergence(const SimdGroup& simd, uint32_t call) {
    Worker& worker = *current_lane().worker;
    const uint32_t line = call & 0xffffff, other = simd.call & 0xffffff;
    report(worker, Fault::kDivergence, line,
           "lanes of one SIMD-group are at the SIMD-group operations of lines %u and %u: all lanes must come "
           "to one",
           std::min(line, other), std::max(line, other));
}

void run_group(Worker& worker, const uint32_t position[3]) {
    begin_group(worker, position);
    worker.groups++;
    worker.threads += worker.thread_count;
    Lane& first = worker.lanes[worker.launch->order == Order::kReverse ? worker.thread_count - 1 : 0];
    msl_current = &first.thread;
    msl_switch(&worker.own_stack, first.stack_pointer);
    msl_current = nullptr;
    if (worker.stopped) return;
    check_end(worker);
    worker.memory_most = std::max(worker.memory_most, worker.memory_bytes);
    if (worker.memory_bytes > kThreadgroupMemory)
        report(worker, Fault::kMemory, 0,
               "a threadgroup holds %u bytes of threadgroup memory; the limit is %u", worker.memory_bytes,
               kThreadgroupMemory);
}

}  // namespace lily::metal

using namespace lily::metal;

extern "C" {

void msl_runtime_barrier(uint32_t flags, uint32_t line) {
    Lane& lane = current_lane();
    Worker& worker = *lane.worker;
    const uint32_t call = call_at(Call::kBarrier, line);
    if (worker.waiting == 0)
        worker.barrier_call = call;
    else if (worker.barrier_call != call)
        report(worker, Fault::kDivergence, line,
               "threads of one group are at the threadgroup_barriers of lines %u and %u",
               std::min(line, worker.barrier_call & 0xffffff),
               std::max(line, worker.barrier_call & 0xffffff));
    if (++worker.waiting == worker.alive) {
        release_barrier(worker, line, flags);
        return;
    }
    lane.simd->runnable &= ~lane.bit;
    yield(lane);
}

void msl_runtime_simd_barrier(uint32_t flags, uint32_t line) {
    meet(call_at(Call::kSimdBarrier, line), [flags](SimdGroup& simd, uint32_t) {
        if (flags & 2) simd.threadgroup_epoch++;
        if (flags & 1) simd.device_epoch++;
    });
}

void msl_runtime_fence(uint32_t, uint32_t) {}

void* msl_threadgroup_memory(uint64_t bytes, uint32_t align, uint32_t declaration) {
    Worker& worker = *current_lane().worker;
    if (declaration >= worker.declared_at.size()) worker.declared_at.resize(declaration + 1, kNowhere);
    uint32_t& at = worker.declared_at[declaration];
    if (at == kNowhere) at = static_cast<uint32_t>(give_memory(worker, bytes, align) - worker.memory);
    return worker.memory + at;
}
}
