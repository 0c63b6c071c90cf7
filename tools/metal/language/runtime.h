// What the simulator's runtime does for a kernel. Declared for the front end here, defined in runtime/*.cpp;
// a `site` is the line of the call, by which lanes that meet at different calls are found.
#pragma once

extern "C" {
// The thread whose code runs. A fiber keeps its thread for life, so the compiler may read it once.
MSL_FN thread msl_thread* msl_current_thread(void) {
    thread msl_thread* current;
    __asm__("movq msl_current@gottpoff(%%rip), %0\n\tmovq %%fs:(%0), %0" : "=r"(current));
    return current;
}
threadgroup void* msl_threadgroup_memory(ulong bytes, uint align, uint declaration);
void msl_runtime_barrier(uint flags, uint site);
void msl_runtime_simd_barrier(uint flags, uint site);
void msl_runtime_fence(uint flags, uint scope);
// Gives where the lanes' values lie, MSL_SLOT bytes apart, until the SIMD-group's next operation but one.
const thread void* msl_runtime_exchange(const thread void* value, uint bytes, uint site);
ulong msl_runtime_ballot(uint vote, uint site);  // the votes, and above them the lanes that voted
void msl_runtime_reduce(const thread void* from, thread void* to, uint type, uint count, uint operation,
                        uint site);
void msl_runtime_scan(const thread void* from, thread void* to, uint type, uint count, uint operation,
                      uint site);
void msl_runtime_atomic(const volatile device void* address, uint bytes, uint access, uint site);

// Tiles: see simdgroup_matrix.h and tensor.h.
uint msl_runtime_matrix_turn(const volatile device void* address, ulong stride, uint site);
void msl_runtime_matrix_fill(uint to, float value, uint diagonal);
void msl_runtime_matrix_copy(uint to, uint from);
void msl_runtime_matrix_load(uint to, const volatile device void* from, uint type, ulong stride,
                             uint transpose, uint site);
void msl_runtime_matrix_store(uint from, volatile device void* to, uint type, ulong stride, uint transpose,
                              uint site);
void msl_runtime_matrix_multiply(uint to, uint a, uint b, uint c, uint type, uint site);
void msl_runtime_apple_multiply(thread float* to, const thread float* abc, uint site);
void msl_runtime_matmul(const thread msl_matmul* operands, uint site);

float msl_runtime_sinpi(float x);
float msl_runtime_cospi(float x);
float msl_runtime_tanpi(float x);
float msl_runtime_asinh(float x);
float msl_runtime_acosh(float x);
float msl_runtime_atanh(float x);
float msl_runtime_ldexp(float x, int k);
float msl_runtime_frexp(float x, thread int* exponent);
float msl_runtime_nextafter(float x, float y);
}
