// Device: how a GPU is driven. Three implementations: Metal, CUDA, and a simulator that runs the same kernels
// on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "state.h"

namespace lily {

// A stretch of memory that a dispatch reads, or reads and writes. What it declares here is what orders it.
struct Binding {
    const void* data = nullptr;
    size_t bytes = 0;
    bool written = false;
};

struct Dispatch {
    std::string kernel;
    uint32_t groups[3] = {1, 1, 1};         // threadgroups; with `indirect`, the most that there can be
    uint32_t threads = 32;                  // of a threadgroup, in one dimension
    std::span<const std::byte> args;        // buffer 0
    std::span<const Binding> buffers;       // buffers 1, 2, ...
    std::span<const uint32_t> threadgroup;  // bytes of each threadgroup argument
    std::span<const Binding> reached;       // memory whose addresses lie in one of the buffers
    const uint32_t* indirect = nullptr;     // (3): the threadgroups, where an earlier dispatch wrote them
};

struct Device {
    virtual ~Device() = default;
    virtual std::string name() const = 0;
    virtual Memory allocate(size_t bytes) = 0;   // zero-filled, readable by the host after finish()
    virtual void dispatch(const Dispatch&) = 0;  // may run beside earlier ones until a barrier
    virtual void barrier() = 0;                  // later dispatches see what earlier ones wrote
    virtual void drop_barrier(int64_t) {
    }  // for tests of the simulator: the n-th barrier from here does nothing
    virtual void finish() = 0;  // waits; throws DeviceError for what went wrong since the last time
};

// Runs kernels that tools/metal compiled for the CPU. `folder` holds them.
std::unique_ptr<Device> make_simulator(const std::string& folder);

}  // namespace lily
