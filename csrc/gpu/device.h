// Device: how a GPU is driven. Three implementations: Metal, CUDA, and a simulator that runs the same kernels
// on the CPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "state.h"
#include "traffic.h"

namespace lily {

// A stretch of memory that a dispatch reads, or reads and writes. What it declares here is what orders it.
struct Binding {
    const void* data = nullptr;
    size_t bytes = 0;
    bool written = false;
    size_t reads = 0, writes = 0;  // how many of the bytes it reads and writes, where it can say; else all

    static Binding read(const void* data, size_t bytes) { return {data, bytes, false, bytes, 0}; }
    static Binding write(void* data, size_t bytes) { return {data, bytes, true, 0, bytes}; }
    static Binding update(void* data, size_t bytes) { return {data, bytes, true, bytes, bytes}; }

    // The same of which only so many bytes are read, or written.
    Binding reading(size_t some) const { return {data, bytes, written, some, writes}; }
    Binding writing(size_t some) const { return {data, bytes, written, reads, some}; }
};

struct Dispatch {
    std::string kernel;
    std::string op;                         // of ops.h, to which it belongs
    uint32_t groups[3] = {1, 1, 1};         // threadgroups; with `indirect`, the most that there can be
    uint32_t threads = 32;                  // of a threadgroup, in one dimension
    std::span<const std::byte> args;        // buffer 0
    std::span<const Binding> buffers;       // buffers 1, 2, ...
    std::span<const uint32_t> threadgroup;  // bytes of each threadgroup argument
    std::span<const Binding> reached;       // memory whose addresses lie in one of the buffers
    const uint32_t* indirect = nullptr;     // (3): the threadgroups, where an earlier dispatch wrote them
    double operations = 0;  // multiplications and additions, where they take longer than memory
};

// What the names of kernels that multiply in tiles end with where they do so by tensor operations:
// metal/tile.h.
inline constexpr const char* kTensorKernels = "_tensor";

// What threadgroups that multiply in tiles are on a device: metal/matmul.h,
// tools/metal/language/cuda_multiply.h.
struct Tiling {
    uint32_t outputs = 64;             // of a threadgroup
    uint32_t threads_of_few = 64;      // of one that takes 16 rows; 128 of any other
    uint32_t bytes = 2 * 64 * 72 * 2;  // of its slabs, and beside them
    uint32_t bytes_of_row = 0;         // for each row that it takes
    uint32_t threadgroups = 0;         // that are wanted: rather many of 32 rows than fewer of 128
};

struct Device {
    virtual ~Device() = default;
    virtual std::string name() const = 0;
    // Whether the GPU has what Metal 4's tensor operations run on, and its library kernels that use them.
    virtual bool tensor_operations() const { return false; }
    // Threadgroups of 256 threads that run at once, if a kernel is better off with no more of them.
    virtual uint32_t threadgroups_at_once() const { return ~0u; }
    // SIMD-groups of a threadgroup whose SIMD-groups share a matrix's rows: more of them, if a few
    // threadgroups leave the GPU waiting for each one's instructions. A multiple of 4, at most 16.
    virtual uint32_t simds_of_row() const { return 8; }
    virtual Tiling tiling() const { return {}; }
    virtual uint32_t flash_landing(uint32_t /*head_dim*/) const { return 16; }  // bytes: metal/tile.h, Panel
    virtual const char* gdn_scan() const { return "chunked"; }                  // the option's "auto"
    virtual Memory allocate(size_t bytes) = 0;                                  // zero-filled
    virtual Memory allocate_shared(size_t bytes) { return allocate(bytes); }  // that the host reads in place
    virtual void dispatch(const Dispatch&) = 0;  // may run beside earlier ones until a barrier
    virtual void barrier() = 0;                  // later dispatches see what earlier ones wrote
    virtual void drop_barrier(int64_t) {
    }  // for tests of the simulator: the n-th barrier from here does nothing
    // What has been dispatched starts. Its number is what wait() takes; what is dispatched from here on sees
    // what it wrote, without a barrier.
    virtual uint64_t commit() { return 0; }
    virtual void wait(uint64_t) { finish(); }        // for this and all before it; throws as finish() does
    virtual bool overlaps() const { return false; }  // whether the host is free between the two
    // Compiles every kernel; what is wrong with any, a line each. Others compile when they are first
    // dispatched.
    virtual std::vector<std::string> compile() { return {}; }
    virtual double seconds() { return 0; }  // that the GPU worked since the last call, if it says
    // Bytes that may still be allocated beside all there is, whose small ones may come in larger pieces;
    // nothing if it does not say.
    virtual std::optional<size_t> room() const { return std::nullopt; }
    virtual void admit(size_t) {}  // throws DeviceError if so many more are not to be had

    // Memory of the host's that dispatches read in place, for as long as the device lives.
    virtual void map(std::span<const std::byte>, const std::string& /*label*/) {}
    virtual bool reads(const void*, size_t) const { return host_reads(); }  // whether kernels reach it there
    // What a kernel finds memory of allocate() by, if the address lies in another buffer.
    virtual std::byte* address(const void* data) const {
        return static_cast<std::byte*>(const_cast<void*>(data));
    }

    // Where the GPU has memory of its own, the host reaches it through these alone. Both come after all that
    // was asked for before.
    virtual bool host_reads() const { return true; }  // whether memory of allocate() is the host's
    virtual void copy(void* to, const void* from, size_t bytes) {  // either side may be either's; waits
        finish();
        std::memcpy(to, from, bytes);
    }
    virtual void write(void* to, const void* from,
                       size_t bytes) {  // from the host's, which may change at once
        std::memcpy(to, from, bytes);
    }
    // The dispatches since the last call, as an instrumented simulator saw them; the first call begins.
    virtual std::vector<RecordedDispatch> recorded() { return {}; }
    virtual void finish() = 0;  // waits; throws DeviceError for what went wrong since the last time
};

// Runs kernels that tools/metal compiled for the CPU. `folder` holds them.
std::unique_ptr<Device> make_simulator(const std::string& folder);

// The first NVIDIA GPU, with kernels that tools/metal compiled to PTX: `file`, or those of the package.
// Throws DeviceError without one.
std::unique_ptr<Device> make_cuda(const std::string& file);
bool has_cuda(const std::string& file);  // whether there is one that runs them

// The Mac's GPU, with the kernels that the extension holds. Elsewhere `file` is the same code on a simulated
// Metal, which tools/metal/apple/build.py makes for tests. Throws DeviceError without one.
struct MetalSettings {
    std::string file;
    int resident_seconds = 180;  // after the last work, for which memory stays resident
    Notice notice;               // while the device is being made
};
std::unique_ptr<Device> make_metal(const MetalSettings&);
bool has_metal(const std::string& file);  // whether there is one that it takes
// What is known of it, "name: value" a line; empty if there is none.
std::string metal_facts(const std::string& file);

}  // namespace lily
