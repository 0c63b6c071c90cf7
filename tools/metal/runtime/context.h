// What a kernel's code and the runtime share: read by the runtime's C++ and by the front end, so plain words
// only.
#pragma once
#ifdef __OPENCL_CPP_VERSION__
#define MSL_WORD ulong
#else
#include <cstdint>
#define MSL_WORD uint64_t
#endif

enum {
    MSL_BUFFERS = 31,
    MSL_MATRIX_WORDS = 8,  // 512 matrices of a SIMD-group at a time
    MSL_MATRICES = MSL_MATRIX_WORDS * 64
};

// One threadgroup. `dispatch_threads` is the size asked for, `threads` that of this group, smaller at a
// grid's edge.
struct msl_group {
    MSL_WORD buffers[MSL_BUFFERS];
    MSL_WORD threadgroup_buffers[MSL_BUFFERS];
    uint32_t position[3];
    uint32_t groups[3];
    uint32_t grid[3];
    uint32_t dispatch_threads[3];
    uint32_t threads[3];
    uint32_t simdgroups;
};

// One thread.
struct msl_thread {
    MSL_WORD group;   // msl_group
    MSL_WORD shared;  // msl_simdgroup_shared
    uint32_t position[3];
    uint32_t index;
    uint32_t lane;
    uint32_t simdgroup;
    uint32_t matrix_operations;  // done so far; see simdgroup_matrix.h
    uint32_t unused;
    MSL_WORD free_matrices[MSL_MATRIX_WORDS];
};

// What the lanes of a SIMD-group share with code that does not call the runtime.
struct msl_simdgroup_shared {
    uint32_t matrix_operations;
};

// A tile of an operand: element (row, column) lies `row * row_stride + column * column_stride` elements on.
// In registers the same counts, in the order of cooperative_tensor's elements, a part of the rows in every
// SIMD-group.
struct msl_tile {
    MSL_WORD address;
    int64_t row_stride;
    int64_t column_stride;
    uint32_t rows;
    uint32_t columns;
    uint32_t row_limit;  // the tensor's extents
    uint32_t column_limit;
    uint32_t type;  // 0: float, 1: half, 2: bfloat, 3: int8, 4: uint8, 5: int32
    uint32_t in_registers;
};

// matmul2d: c = a b, or c += a b.
struct msl_matmul {
    struct msl_tile a;
    struct msl_tile b;
    struct msl_tile c;
    uint32_t accumulate;
    uint32_t simdgroups;  // that share the rows of a and c
};
