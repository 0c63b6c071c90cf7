// What dispatches ask of memory: as whoever dispatches declares it, and as an instrumented simulator saw it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lily {

// Of one stretch of memory that a dispatch binds.
struct Traffic {
    size_t bytes = 0;   // bound
    size_t reads = 0;   // declared: how many of them it reads, each counted once
    size_t writes = 0;  // declared: how many it writes
    // Seen: 0 in a dry run.
    uint64_t read_lines = 0, written_lines = 0;  // distinct lines of 64 bytes
    uint64_t asked_read = 0, asked_written = 0;  // bytes that all threads together asked for
    uint64_t accesses = 0;                       // of SIMD-groups: one instruction, up to 32 lanes
    uint64_t sectors = 0,
             lines = 0;  // of 32 and of 128 bytes that these touched, each counted once an access
};

struct RecordedDispatch {
    std::string kernel;
    std::string op;       // of ops.h
    int64_t stage = 0;    // dispatches of one stage run side by side; a barrier lies between two stages
    int64_t groups = 0;   // threadgroups
    int64_t threads = 0;  // of a threadgroup
    std::vector<Traffic> memory;  // in the order of its declarations
};

}  // namespace lily
