// What an NVIDIA GPU does for a kernel, in place of the simulator's runtime: a SIMD-group is a warp, a
// threadgroup a block, and the lanes' meetings are shuffles. Included instead of runtime.h where MSL_CUDA is
// set; the names are the same, so that the rest of the language does not know.
#pragma once

MSL_VALUE_OF uint MSL_WARP = 0xffffffffu;  // all its lanes: Metal's kernels here never leave some behind

extern "C" {
// Calls of these become variables in tools/metal/cuda.py, since OpenCL declares none in templates.
__attribute__((convergent)) threadgroup void* msl_threadgroup_memory(ulong bytes, uint align,
                                                                     uint declaration);
threadgroup void* msl_dynamic_memory(void);
// Nobody has needed these yet: a kernel that calls one does not link.
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

MSL_FN uint msl_warp_lane() {
    return __nvvm_read_ptx_sreg_laneid();
}
MSL_FN void msl_runtime_barrier(uint, uint) {
    __syncthreads();
}
MSL_FN void msl_runtime_simd_barrier(uint, uint) {
    __nvvm_bar_warp_sync(MSL_WARP);
}
MSL_FN void msl_runtime_fence(uint, uint scope) {
    if (scope == 2)
        __nvvm_membar_gl();
    else
        __nvvm_membar_cta();
}
MSL_FN ulong msl_runtime_ballot(uint vote, uint) {
    return (ulong)MSL_WARP << 32 | __nvvm_vote_ballot_sync(MSL_WARP, vote != 0);
}

// Any lane's value of up to 16 bytes, a word at a time.
template <class T>
MSL_FN T msl_shuffle(T value, uint lane) {
    if constexpr (sizeof(T) < 4) {
        typedef metal::conditional_t<sizeof(T) == 2, ushort, uchar> bits;
        const uint moved = __nvvm_shfl_sync_idx_i32(MSL_WARP, (int)__builtin_bit_cast(bits, value), lane, 31);
        return __builtin_bit_cast(T, (bits)moved);
    } else {
        struct Words {
            int word[sizeof(T) / 4];
        };
        Words words = __builtin_bit_cast(Words, value);
        for (uint i = 0; i < sizeof(T) / 4; ++i)
            words.word[i] = __nvvm_shfl_sync_idx_i32(MSL_WARP, words.word[i], lane, 31);
        return __builtin_bit_cast(T, words);
    }
}

// Reductions and scans, of components that are float, int or uint. The butterfly goes from lane ^ 1 up to
// lane ^ 16, the simulator's order of adding, and a NaN loses against a number.
template <uint operation, class T>
MSL_FN T msl_combine_two(T a, T b) {
    if constexpr (operation == 0)
        return a + b;
    else if constexpr (operation == 1)
        return a * b;
    else if constexpr (operation == 2)
        return a != a || b > a ? b : a;
    else if constexpr (operation == 3)
        return a != a || b < a ? b : a;
    else if constexpr (operation == 4)
        return a & b;
    else if constexpr (operation == 5)
        return a | b;
    else
        return a ^ b;
}
template <uint operation, class T>
MSL_FN T msl_butterfly(T value) {
    constexpr bool whole = metal::is_same_v<T, int>, natural = metal::is_same_v<T, uint>;
    if constexpr (operation == 2 && natural) return __nvvm_redux_sync_umax(value, (int)MSL_WARP);
    if constexpr (operation == 3 && natural) return __nvvm_redux_sync_umin(value, (int)MSL_WARP);
    if constexpr (operation == 2 && whole) return __nvvm_redux_sync_max(value, (int)MSL_WARP);
    if constexpr (operation == 3 && whole) return __nvvm_redux_sync_min(value, (int)MSL_WARP);
    for (int mask = 1; mask < 32; mask *= 2) {
        const int other = __nvvm_shfl_sync_bfly_i32(MSL_WARP, __builtin_bit_cast(int, value), mask, 31);
        value = msl_combine_two<operation>(value, __builtin_bit_cast(T, other));
    }
    return value;
}
// What the lanes below this one combine to.
template <uint operation, class T>
MSL_FN T msl_scan(T value) {
    const uint lane = msl_warp_lane();
    for (uint distance = 1; distance < 32; distance *= 2) {
        const int other = __nvvm_shfl_sync_up_i32(MSL_WARP, __builtin_bit_cast(int, value), distance, 0);
        if (lane >= distance) value = msl_combine_two<operation>(__builtin_bit_cast(T, other), value);
    }
    const int below = __nvvm_shfl_sync_up_i32(MSL_WARP, __builtin_bit_cast(int, value), 1, 0);
    return lane == 0 ? T(operation) : __builtin_bit_cast(T, below);  // 0 for a sum, 1 for a product
}

// Two elements a lane, in the order that mma's operands of 16 bits and its sums have: see simdgroup_matrix.h.
MSL_FN uint msl_matrix_row() {
    return msl_warp_lane() / 4;
}
MSL_FN uint msl_matrix_column() {
    return msl_warp_lane() % 4 * 2;
}
// Floats as sums of two numbers of mma's tf32, whose product then lacks the two low parts' alone: about
// 2^-21. The order of the products in a sum is free, so element 2t stands at mma's t and 2t + 1 at its t + 4.
MSL_FN void msl_split(float x, thread uint& high, thread uint& low) {
    __asm__("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    __asm__("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(x - __builtin_bit_cast(float, high)));
}
MSL_FN void msl_multiply_tf32(thread float* d, thread float* rest, const thread uint* a,
                              const thread uint* b) {
    __asm__(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(rest[0]), "+f"(rest[1])
        : "r"(a[0]), "r"(0), "r"(a[1]), "r"(0), "r"(b[0]), "r"(b[1]));
}
MSL_FN void msl_multiply_pairs(thread float* d, const thread float* a, const thread float* b) {
    const uint row = msl_matrix_row(), t = msl_matrix_column() / 2;
    uint left[2], left_rest[2], right[2], right_rest[2];
    for (uint i = 0; i < 2; ++i) {
        const uint from = (2 * t + i) * 4 + row / 2;  // the lane of row 2t + i that has column `row`
        const float first = msl_shuffle(b[0], from), second = msl_shuffle(b[1], from);
        msl_split(row % 2 ? second : first, right[i], right_rest[i]);
        msl_split(a[i], left[i], left_rest[i]);
    }
    float unused[2] = {0, 0};
    msl_multiply_tf32(d, unused, left, right_rest);
    msl_multiply_tf32(d, unused, left_rest, right);
    msl_multiply_tf32(d, unused, left, right);
}
// The same of bfloat operands, on the matrix unit. mma has 16 rows; the lower 8 stay zero.
MSL_FN void msl_multiply_bfloats(thread float* d, uint a, uint b) {
    uint turned;
    __asm__("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(b));
    float unused[2] = {0, 0};
    __asm__("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(unused[0]), "+f"(unused[1])
            : "r"(a), "r"(0), "r"(turned));
}

// Two numbers as bfloats in one word, the first one low.
MSL_FN uint msl_bfloats(float low, float high) {
    uint pair;
    __asm__("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// c += a b, of 16 x 16 and 16 x 8 bfloats.
MSL_FN void msl_multiply_bfloats_16(thread float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
    __asm__(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// exp and log on the special function unit, to about 2^-21 of the result: the argument's product with log2(e)
// is carried in two parts, since the unit takes one number and a large one has no bits left for its fraction.
MSL_FN float msl_special_exp2(float x) {
    float y;
    __asm__("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
MSL_FN float msl_special_exp(float x) {
    const float high = x * 1.44269504f;
    const float low = __builtin_elementwise_fma(x, 1.44269504f, -high) + x * 1.925963033e-8f;
    const float whole = msl_special_exp2(high);
    const float exact = __builtin_elementwise_fma(whole, low * 0.693147181f, whole);
    return __builtin_elementwise_abs(high) < 200.0f ? exact : whole;  // infinities: low is no number
}
MSL_FN float msl_special_log2(float x) {
    float y;
    __asm__("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Near 1 the unit's error is large beside the result: there a series in (x - 1) / (x + 1) takes over.
MSL_FN float msl_special_log(float x) {
    if (x > 0.75f && x < 1.5f) {
        const float s = (x - 1.0f) / (x + 1.0f), t = s * s;
        float p = 2.0f / 13.0f;
        p = __builtin_elementwise_fma(p, t, 2.0f / 11.0f);
        p = __builtin_elementwise_fma(p, t, 2.0f / 9.0f);
        p = __builtin_elementwise_fma(p, t, 2.0f / 7.0f);
        p = __builtin_elementwise_fma(p, t, 2.0f / 5.0f);
        p = __builtin_elementwise_fma(p, t, 2.0f / 3.0f);
        p = __builtin_elementwise_fma(p, t, 2.0f);
        return p * s;
    }
    return msl_special_log2(x) * 0.693147181f;
}

// What an entry point hands its kernel; tools/metal/kernels.py fills it.
struct msl_thread {
    ulong buffers[31];
    ulong threadgroup_buffers[8];
};
struct msl_arguments {
    ulong words[32];  // a dispatch's argument struct: csrc/gpu/cuda.cpp passes as many
};
typedef const thread msl_thread* msl_thread_context;
#define MSL_TRIPLE_OF(NAME)                                                                \
    ::uint3 {                                                                              \
        (uint) __nvvm_read_ptx_sreg_##NAME##_x(), (uint)__nvvm_read_ptx_sreg_##NAME##_y(), \
            (uint)__nvvm_read_ptx_sreg_##NAME##_z()                                        \
    }
MSL_FN uint3 msl_group_position(msl_thread_context) {
    return MSL_TRIPLE_OF(ctaid);
}
MSL_FN uint3 msl_groups(msl_thread_context) {
    return MSL_TRIPLE_OF(nctaid);
}
MSL_FN uint3 msl_position(msl_thread_context) {
    return MSL_TRIPLE_OF(tid);
}
MSL_FN uint3 msl_threads(msl_thread_context) {
    return MSL_TRIPLE_OF(ntid);
}
MSL_FN uint3 msl_dispatch_threads(msl_thread_context c) {
    return msl_threads(c);
}
MSL_FN uint3 msl_grid(msl_thread_context c) {
    return msl_groups(c) * msl_threads(c);
}
MSL_FN uint3 msl_position_in_grid(msl_thread_context c) {
    return msl_group_position(c) * msl_threads(c) + msl_position(c);
}
MSL_FN uint msl_index(msl_thread_context c) {
    const uint3 at = msl_position(c), size = msl_threads(c);
    return (at.z * size.y + at.y) * size.x + at.x;
}
MSL_FN uint msl_lane(msl_thread_context c) {
    return msl_index(c) % 32;
}
MSL_FN uint msl_simdgroup(msl_thread_context c) {
    return msl_index(c) / 32;
}
MSL_FN uint msl_simdgroups(msl_thread_context c) {
    const uint3 size = msl_threads(c);
    return (size.x * size.y * size.z + 31) / 32;
}
// The grid of an indirect dispatch is known when it runs: the host launches the most groups that there can
// be.
MSL_FN bool msl_outside(ulong grid) {
    if (grid == 0) return false;
    const device uint* groups = (const device uint*)grid;
    const uint3 at = msl_group_position(0);
    return at.x >= groups[0] || at.y >= groups[1] || at.z >= groups[2];
}
MSL_FN ulong msl_buffer(msl_thread_context c, uint index) {
    return c->buffers[index];
}
MSL_FN ulong msl_threadgroup(msl_thread_context c, uint index) {
    return c->threadgroup_buffers[index];
}
