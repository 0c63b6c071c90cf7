// Kernels that are wrong when they run: two groups of 64 threads, two buffers of 128 numbers. The comment before each
// says what the instrumented simulator must say, at the line that ends in `// !`; {own} is that line, {other} the one
// that ends in `// <`.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

#define BUFFERS device uint* out [[buffer(0)]], device const uint* in [[buffer(1)]]
#define INDEX uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]

// race: thread 0 writes offset 0 of threadgroup memory, which thread 63 read at line {other}; no barrier orders the two
kernel void missing_barrier(BUFFERS, INDEX) {
    threadgroup uint s[64];
    s[63 - t] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s[t] = t;  // !
    out[i] = t < 32 ? 0 : s[63 - t];  // <
}

// race: thread 63 reads offset 0 of threadgroup memory, which thread 0 wrote at line {other}; no barrier orders the two
kernel void simdgroup_barrier_only(BUFFERS, INDEX) {
    threadgroup uint s[64];
    s[t] = t;  // <
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = t < 32 ? 0 : s[63 - t];  // !
}

// race: thread 63 reads offset 0 of threadgroup memory, which thread 0 wrote at line {other}; no barrier orders the two
kernel void barrier_for_device_memory(BUFFERS, INDEX) {
    threadgroup uint s[64];
    s[t] = t;  // <
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = s[63 - t];  // !
}

// race: thread 63 reads offset 0 of out [[buffer(0)]], which thread 0 wrote at line {other}; no barrier orders the two
kernel void barrier_for_threadgroup_memory(BUFFERS, INDEX) {
    out[i] = t;  // <
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint x = out[i + 63 - 2 * t];  // !
    threadgroup_barrier(mem_flags::mem_device);
    out[i] = x;
}

// race: thread 1 reads offset 4 of threadgroup memory, which thread 0 wrote at line {other}; no barrier orders the two
kernel void lanes_of_one_simdgroup(BUFFERS, INDEX) {
    threadgroup uint s[65];
    s[t + 1] = t;  // <
    if (t == 0) s[0] = 0;
    out[i] = t == 1 ? s[1] : 0;  // !
}

// race: SIMD-group 0 writes offset 0 of threadgroup memory, which thread 0 wrote at line {other}; no barrier orders the two
kernel void tile_after_scalars(BUFFERS, INDEX) {
    threadgroup float s[64];
    s[t] = t;  // <
    if (t < 32) simdgroup_store(simdgroup_float8x8(1.0f), s, 8);  // !
    out[i] = 0;
}

// race: SIMD-group 0 reads offset 0 of threadgroup memory, which SIMD-group 0 wrote at line {other}; no barrier orders the two
kernel void tile_after_tile(BUFFERS, INDEX) {
    threadgroup float s[2][64];
    simdgroup_float8x8 a(1.0f);
    simdgroup_store(a, s[t / 32], 8);  // <
    simdgroup_load(a, s[t / 32], 8, ulong2(0, 0), true);  // !
    out[i] = 0;
}

// race: thread 1 reads offset 0 of out [[buffer(0)]], which thread 0 wrote at line {other}; no barrier orders the two
kernel void atomic_and_plain(device atomic_uint* out [[buffer(0)]], device const uint* in [[buffer(1)]], INDEX) {
    if (i == 0) atomic_store_explicit(out, 1, memory_order_relaxed);  // <
    if (i == 1) atomic_store_explicit(out + 1, ((device const uint*)out)[0], memory_order_relaxed);  // !
}

// race: thread 0 of group 1 writes offset 0 of out [[buffer(0)]], which thread 0 of group 0 wrote at line {own}; nothing orders the groups of a dispatch
kernel void groups_write_one_place(BUFFERS, INDEX) {
    out[t] = i;  // !
}

// race: thread 0 of group 1 reads offset 0 of out [[buffer(0)]], which thread 0 of group 0 wrote at line {other}; nothing orders the groups of a dispatch
kernel void group_reads_another(BUFFERS, INDEX) {
    if (i < 64) out[i] = i;  // <
    if (i >= 64) ((device ushort*)out)[2 * i] = out[i - 64];  // !
}

// race: thread 0 of group 1 writes offset 0 of out [[buffer(0)]], which several groups read at line {other}; nothing orders the groups of a dispatch
kernel void groups_read_then_one_writes(BUFFERS, INDEX) {
    const uint x = out[0];  // <
    if (t != 0) out[i] = x;
    if (i == 64) out[0] = x + 1;  // !
}

// out of bounds: reads 4 bytes at offset 512 of in [[buffer(1)]], which has 512
kernel void read_past_the_end(BUFFERS, INDEX) {
    out[i] = in[i + 1];  // !
}

// out of bounds: writes 4 bytes at offset -4 of out [[buffer(0)]], which has 512
kernel void write_before_the_start(BUFFERS, INDEX) {
    out[(long)i - 1] = in[i];  // !
}

// out of bounds: reads 4 bytes far from every buffer
kernel void wild_pointer(BUFFERS, INDEX) {
    out[i] = in[(ulong)i << 40 | 1ul << 38];  // !
}

// out of bounds: reads 4 bytes at offset 256 of threadgroup memory, outside its variables
kernel void past_a_threadgroup_array(BUFFERS, INDEX) {
    threadgroup uint s[64];
    s[t] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = s[t + 1];  // !
}

// out of bounds: reads 32 bytes at offset 512 of in [[buffer(1)]], which has 512
kernel void tile_past_the_end(BUFFERS, INDEX) {
    simdgroup_float8x8 a;
    simdgroup_load(a, (device const float*)in + 72, 8);  // !
    out[i] = 0;
}

// out of bounds: the left operand of matmul2d is 16 x 16, over its tensor's extents of 8 x 16
kernel void tile_over_its_extents(BUFFERS, INDEX) {
    constexpr auto shape = matmul2d_descriptor(16, 16, 16, false, false, false, matmul2d_descriptor::mode::multiply);
    matmul2d<shape, execution_simdgroup> op;
    auto a = tensor<device const half, dextents<int, 2>, tensor_inline>((device const half*)in, dextents<int, 2>(16, 8));
    auto b = tensor<device const half, dextents<int, 2>, tensor_inline>((device const half*)in, dextents<int, 2>(16, 16));
    auto c = op.get_destination_cooperative_tensor<decltype(a), decltype(b), float>();
    op.run(a, b, c);  // !
    out[i] = 0;
}

// misaligned: reads 4 bytes at offset 1 of in [[buffer(1)]], whose address is not a multiple of 4
kernel void odd_address(BUFFERS, INDEX) {
    out[i] = *(device const uint*)((device const uchar*)in + 1);  // !
}

// misaligned: reads 16 bytes at offset 8 of in [[buffer(1)]], whose address is not a multiple of 16
kernel void vector_at_half_its_size(BUFFERS, INDEX) {
    const uint4 v = *(device const uint4*)(in + 2);  // !
    out[i] = v.x + v.y * v.z + v.w;
}

// uninitialised: reads 4 bytes at offset 252 of threadgroup memory, which nothing has written
kernel void half_an_array_written(BUFFERS, INDEX) {
    threadgroup uint s[64];
    if (t < 32) s[t] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = s[63 - t];  // !
}

// matrix: the accumulator holds nothing yet
kernel void matrix_of_nothing(BUFFERS, INDEX) {
    simdgroup_float8x8 a(1.0f), c;
    simdgroup_multiply_accumulate(c, a, a, c);  // !
    out[i] = 0;
}

// divergence: 32 of the 64 threads returned before the threadgroup_barrier of line {own}
kernel void divergent_barrier(BUFFERS, INDEX) {
    if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);  // !
    out[i] = t;
}

// divergence: 13 of the 64 threads returned before the threadgroup_barrier of line {own}
kernel void barrier_after_return(BUFFERS, INDEX) {
    if (t > 50) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // !
    out[i] = t;
}

// divergence: threads of one group are at the threadgroup_barriers of lines {other} and {own}
kernel void two_barriers(BUFFERS, INDEX) {
    if (t < 32) threadgroup_barrier(mem_flags::mem_threadgroup);  // <
    else threadgroup_barrier(mem_flags::mem_threadgroup);  // !
    out[i] = t;
}

// divergence: lanes of one SIMD-group are at the SIMD-group operations of lines {own} and {other}: all lanes must come to one
kernel void divergent_simd(BUFFERS, INDEX) {
    if (t & 1) out[i] = simd_sum(t);  // !
    else out[i] = simd_max(t);  // <
}

// divergence: 1 lanes returned before the matrix operation of line {own}, which needs all 32
kernel void lane_leaves(BUFFERS, INDEX) {
    simdgroup_float8x8 a(1.0f);
    if ((t & 31) == 31) return;
    simdgroup_multiply_accumulate(a, a, a, a);  // !
    out[i] = 0;
}

// divergence: lanes give the matrix operation of line {own} different addresses or strides
kernel void different_addresses(BUFFERS, INDEX) {
    simdgroup_float8x8 a;
    simdgroup_load(a, (device const float*)in + (t & 1), 8);  // !
    out[i] = 0;
}

// memory: a threadgroup holds 32800 bytes of threadgroup memory; the limit is 32768
kernel void too_much_memory(BUFFERS, threadgroup uint* s [[threadgroup(0)]], INDEX) {
    s[t] = t;
    out[i] = s[t];
}
