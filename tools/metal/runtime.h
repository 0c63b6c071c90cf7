// The interface between a compiled Metal library and the program that loads it.
//
//     void* file = dlopen("kernels.so", RTLD_NOW | RTLD_LOCAL);
//     auto open = reinterpret_cast<const Library* (*)()>(dlsym(file, "lily_metal_library"));
//     const Library& library = *open();
//     Launch launch;                                    // fill in kernel, bindings, groups, threads
//     Result* result = library.dispatch(&launch);       // returns when every group has run
//     ... result->findings, result->traffic ...
//     library.release(result);
//
// Plain structs and pointers only: library and program may come from different compilers. Whatever a Library
// or a Result points to lives as long as it does. One library runs one dispatch at a time; others wait.
#pragma once

#include <cstdint>

namespace lily::metal {

constexpr uint32_t kVersion = 1;
constexpr int kBuffers = 31;
constexpr int kSimdWidth = 32;
constexpr uint32_t kThreadgroupMemory = 32768;

enum class Space : uint32_t { kDevice, kConstant, kThreadgroup };

struct Argument {
    const char* name;
    Space space;
    uint32_t index;     // [[buffer(n)]] or [[threadgroup(n)]]
    uint32_t writable;  // not const, not constant
    uint32_t atomic;    // points to atomics
    uint32_t optional;  // depends on a function constant, and may be left unbound
};

struct Kernel {
    const char* name;  // as the host asks for it: host_name, or the function's name
    const Argument* arguments;
    uint32_t argument_count;
    uint32_t max_threads;  // max_total_threads_per_threadgroup, or 1024
    void (*entry)(const void* thread);
};

struct FunctionConstant {
    const char* name;
    const char* type;  // bool, int, uint, short, ushort, float, ...
    uint32_t index;
    uint32_t bytes;
    void* value;
    bool* defined;
};

// Bytes [data, data + bytes) are buffer `index`; an access outside is a finding. For data that a dispatch
// declares to read and to write, `writes` says so: 0 read only (a write is a finding), 1 as the kernel's
// argument says. An index of kBuffers or more has no argument: it is memory whose address the kernel finds in
// another buffer (a page table), declared so that an instrumented library knows it. Each such binding has an
// index of its own.
struct Binding {
    uint32_t index;
    uint32_t writes = 1;
    void* data;
    uint64_t bytes;
};

struct ConstantValue {
    uint32_t index;
    const void* value;  // of the constant's type
};

enum class Order : uint32_t {
    kForward,
    kReverse,
    kRandom
};  // in which lanes and SIMD-groups run between meetings

struct Launch {
    uint32_t kernel = 0;  // in Library::kernels
    uint32_t groups[3] = {1, 1, 1};
    uint32_t threads[3] = {1, 1, 1};  // of a group
    uint32_t grid[3] = {0, 0, 0};  // threads in all, when the groups at the edge are smaller; 0: whole groups
    const uint32_t* indirect =
        nullptr;  // three group counts in device memory, read at the dispatch, in place of `groups`
    const Binding* bindings = nullptr;
    uint32_t binding_count = 0;
    const ConstantValue* constants = nullptr;  // what is not given is undefined, and 0
    uint32_t constant_count = 0;
    const uint32_t* threadgroup_bytes = nullptr;  // of [[threadgroup(0)]], [[threadgroup(1)]], ...
    uint32_t threadgroup_count = 0;
    Order order = Order::kForward;
    uint32_t seed = 1;
    uint32_t workers = 0;  // OS threads; 0: one a core. Atomics in device memory or instruments: always one
};

enum class Fault : uint32_t {
    kLaunch,         // the launch itself: no such kernel, a buffer that is not bound, too many threads
    kOutOfBounds,    // an access outside the bound buffers or the group's memory
    kReadOnly,       // a write through a buffer that the kernel or the dispatch declares read-only
    kMisaligned,     // an address that is not a multiple of the access
    kUninitialised,  // a read of memory that nothing has written
    kRace,           // two threads, one of them writing, with nothing that orders them
    kDivergence,     // lanes that meet at different calls, or a barrier that not all threads reach
    kMatrix,         // a matrix operand that holds nothing
    kMemory,         // over 32 KB of threadgroup memory
};

struct Finding {
    Fault fault;
    int32_t buffer;  // -1: none, or threadgroup memory
    uint64_t offset;
    const char* kernel;
    const char* file;  // "" where the line is not known
    uint32_t line;
    uint32_t count;       // how often at this line
    const char* message;  // all of the above in words
};

// What a dispatch did to one bound buffer; only an instrumented library counts.
struct Traffic {
    uint32_t buffer;
    uint32_t unused;
    uint64_t bytes_read, bytes_written;  // requested by all threads
    uint64_t reads, writes;              // accesses
    uint64_t groups;                     // accesses of a SIMD-group: one instruction, up to 32 lanes
    uint64_t sectors;                    // 32-byte sectors of those, each counted once a group access
    uint64_t lines;                      // 128-byte lines of those
    uint64_t unique_lines;               // 64-byte lines that the dispatch touched at all
};

// Bytes [begin, end) of a bound buffer that were read, or written: exactly those, merged and in order.
struct Range {
    uint32_t buffer;
    uint32_t written;
    uint64_t begin, end;
};

struct Result {
    const Finding* findings;
    uint32_t finding_count;
    uint32_t traffic_count;
    const Traffic* traffic;
    const Range* ranges;
    uint32_t range_count;
    uint32_t threadgroup_bytes;  // the most that a group held
    uint64_t threadgroup_read, threadgroup_written;
    uint64_t threads, groups;
    uint64_t switches;  // from one lane to another
    uint64_t barriers;  // of threadgroups
    uint64_t meetings;  // of SIMD-groups
    double seconds;
};

struct Library {
    uint32_t version;  // kVersion
    uint32_t instrumented;
    const Kernel* kernels;
    uint32_t kernel_count;
    uint32_t constant_count;
    const FunctionConstant* constants;
    Result* (*dispatch)(const Launch* launch);
    void (*release)(Result* result);

    // Memory of which an instrumented library knows every byte that has been written. `defined`: all of it,
    // now. Writes of kernels define by themselves; the host says what it writes. Overlapping memory is one
    // memory.
    void (*track)(const void* data, uint64_t bytes, uint32_t defined);
    void (*define)(const void* data, uint64_t bytes);
    void (*forget)(const void* data);
};

}  // namespace lily::metal

extern "C" const lily::metal::Library* lily_metal_library();
