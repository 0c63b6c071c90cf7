// What is wrong with a dispatch, each fault once for a line of the kernel and a buffer, in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../runtime.h"

namespace lily::metal {

struct Worker;

struct Findings {
    struct Entry {
        Fault fault;
        int32_t buffer = -1;
        uint64_t offset = 0;
        uint32_t line = 0;
        const void* code = nullptr;  // where in the kernel, when the line must be looked up
        uint32_t count = 1;
        std::string text, file, message;
    };
    std::vector<Entry> entries;

    static constexpr size_t kMost = 100;

    // Adds a fault, or counts one that is there already.
    void add(Entry entry);
};

// A fault at a line of the kernel that runs; printf-style. 0: the line is not known.
void report(Worker& worker, Fault fault, uint32_t line, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// Lets every thread go on from a threadgroup_barrier.
void release_barrier(Worker& worker, uint32_t line, uint32_t flags);

}  // namespace lily::metal
