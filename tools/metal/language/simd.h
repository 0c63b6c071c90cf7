// Barriers, and what the lanes of a SIMD-group do together: each is one meeting of the 32 lanes in the
// runtime. Metal lets a part of the lanes do these; here all lanes that have not returned must come, so that
// a kernel does not depend on how a compiler reconverges lanes.
#pragma once

namespace metal {
#define MSL_SITE uint site = __builtin_LINE()
MSL_VALUE_OF uint MSL_SLOT = 64;
enum msl_operation { msl_sum, msl_product, msl_maximum, msl_minimum, msl_and, msl_or, msl_xor };
enum msl_number { msl_float, msl_int, msl_uint };

enum class mem_flags {
    mem_none = 0,
    mem_device = 1,
    mem_threadgroup = 2,
    mem_texture = 4,
    mem_threadgroup_imageblock = 8,
    mem_object_data = 16
};
MSL_FN constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return (mem_flags)((int)a | (int)b);
}
enum memory_order { memory_order_relaxed = 0, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope {
    thread_scope_thread = 0,
    thread_scope_threadgroup = 1,
    thread_scope_device = 2,
    thread_scope_simdgroup = 4
};

MSL_FN void threadgroup_barrier(mem_flags flags, MSL_SITE) {
    msl_runtime_barrier((uint)flags, site);
}
MSL_FN void simdgroup_barrier(mem_flags flags, MSL_SITE) {
    msl_runtime_simd_barrier((uint)flags, site);
}
MSL_FN void atomic_thread_fence(mem_flags flags, memory_order, thread_scope scope = thread_scope_device) {
    msl_runtime_fence((uint)flags, (uint)scope);
}

template <class T>
MSL_FN constexpr void msl_check_simd() {
    typedef msl_element<T> E;
    static_assert(is_arithmetic_v<E> && !is_same_v<E, bfloat> && !is_same_v<E, bool> && sizeof(E) <= 4,
                  "SIMD-group functions take float, half and integers of up to 32 bits, and vectors of them");
}
#if MSL_CUDA
MSL_FN uint msl_own_lane() {
    return msl_warp_lane();
}
template <class T>
struct msl_exchanged {
    T value;
    MSL_FN T operator[](uint lane) const { return msl_shuffle(value, lane & 31); }
};
template <class T>
MSL_FN msl_exchanged<T> msl_exchange(T value, uint) {
    msl_check_simd<T>();
    return {value};
}
#else
MSL_FN uint msl_own_lane() {
    return msl_current_thread()->lane;
}

// A rendezvous after which every lane may read any lane's value.
template <class T>
struct msl_exchanged {
    const thread uchar* slots;
    MSL_FN T operator[](uint lane) const { return *(const thread T*)(slots + MSL_SLOT * (lane & 31)); }
};
template <class T>
MSL_FN msl_exchanged<T> msl_exchange(T value, uint site) {
    msl_check_simd<T>();
    return {(const thread uchar*)msl_runtime_exchange(&value, sizeof(T), site)};
}
#endif
template <class T>
MSL_FN T simd_shuffle(T value, ushort lane, MSL_SITE) {
    return msl_exchange(value, site)[lane];
}
template <class T>
MSL_FN T simd_broadcast(T value, ushort lane, MSL_SITE) {
    return msl_exchange(value, site)[lane];
}
template <class T>
MSL_FN T simd_broadcast_first(T value, MSL_SITE) {
    const ulong first = __builtin_ctzl(msl_runtime_ballot(true, site));
    return msl_exchange(value, site)[first];
}
template <class T>
MSL_FN T simd_shuffle_xor(T value, ushort mask, MSL_SITE) {
    return msl_exchange(value, site)[msl_own_lane() ^ mask];
}
// A lane whose source lies outside keeps its own value, which Metal leaves undefined.
template <class T>
MSL_FN T simd_shuffle_down(T value, ushort delta, MSL_SITE) {
    const uint from = msl_own_lane() + delta;
    return msl_exchange(value, site)[from < 32 ? from : msl_own_lane()];
}
template <class T>
MSL_FN T simd_shuffle_up(T value, ushort delta, MSL_SITE) {
    const uint lane = msl_own_lane();
    return msl_exchange(value, site)[lane >= delta ? lane - delta : lane];
}
template <class T>
MSL_FN T simd_shuffle_rotate_down(T value, ushort delta, MSL_SITE) {
    return msl_exchange(value, site)[msl_own_lane() + delta];
}
template <class T>
MSL_FN T simd_shuffle_rotate_up(T value, ushort delta, MSL_SITE) {
    return msl_exchange(value, site)[msl_own_lane() + 32 - (delta & 31)];
}
template <class T>
MSL_FN T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSL_SITE) {
    const uint lane = msl_own_lane();
    const T moved = msl_exchange(value, site)[lane + 32 - delta],
            filled = msl_exchange(fill, site)[lane + 32 - delta];
    return lane >= delta ? moved : filled;
}
template <class T>
MSL_FN T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSL_SITE) {
    const uint lane = msl_own_lane();
    const T moved = msl_exchange(value, site)[lane + delta], filled = msl_exchange(fill, site)[lane + delta];
    return lane + delta < 32 ? moved : filled;
}

// Reductions and scans: the last lane to come computes for all, floats in float, in the order of a butterfly.
template <uint operation, bool scan, class T>
MSL_FN T msl_combine(T value, uint site) {
    msl_check_simd<T>();
    typedef msl_element<T> E;
    MSL_VALUE_OF uint type = is_floating_point_v<E> ? msl_float : is_signed_v<E> ? msl_int : msl_uint;
    typedef conditional_t<type == msl_float, float, uint> wide;
    wide from[4], to[4];
    if constexpr (is_vector_v<T>)
        for (int i = 0; i < msl_shape<T>::count; ++i) from[i] = (wide)value[i];
    else
        from[0] = (wide)value;
#if MSL_CUDA
    for (int i = 0; i < msl_shape<T>::count; ++i) {
        typedef conditional_t<type == msl_int, int, wide> number;
        const number own = (number)from[i];
        if constexpr (scan)
            to[i] = (wide)msl_scan<operation>(own);
        else
            to[i] = (wide)msl_butterfly<operation>(own);
    }
#else
    if constexpr (scan)
        msl_runtime_scan(from, to, type, msl_shape<T>::count, operation, site);
    else
        msl_runtime_reduce(from, to, type, msl_shape<T>::count, operation, site);
#endif
    if constexpr (is_vector_v<T>) {
        T r;
        for (int i = 0; i < msl_shape<T>::count; ++i) r[i] = (E)to[i];
        return r;
    } else
        return (T)to[0];
}
#define MSL_REDUCTION(NAME, OPERATION)                     \
    template <class T>                                     \
    MSL_FN T simd_##NAME(T value, MSL_SITE) {              \
        return msl_combine<OPERATION, false>(value, site); \
    }
#define MSL_INTEGER_REDUCTION(NAME, OPERATION)                               \
    template <class T>                                                       \
    MSL_FN T simd_##NAME(T value, MSL_SITE) {                                \
        static_assert(msl_is_integer_v<T>, "simd_" #NAME " takes integers"); \
        return msl_combine<OPERATION, false>(value, site);                   \
    }
MSL_REDUCTION(sum, msl_sum)
MSL_REDUCTION(product, msl_product)
MSL_REDUCTION(max, msl_maximum)
MSL_REDUCTION(min, msl_minimum)
MSL_INTEGER_REDUCTION(and, msl_and)
MSL_INTEGER_REDUCTION(or, msl_or)
MSL_INTEGER_REDUCTION(xor, msl_xor)
// A scan gives the exclusive result; the lane's own value completes the inclusive one.
template <class T>
MSL_FN T simd_prefix_exclusive_sum(T value, MSL_SITE) {
    return msl_combine<msl_sum, true>(value, site);
}
template <class T>
MSL_FN T simd_prefix_exclusive_product(T value, MSL_SITE) {
    return msl_combine<msl_product, true>(value, site);
}
template <class T>
MSL_FN T simd_prefix_inclusive_sum(T value, MSL_SITE) {
    return msl_combine<msl_sum, true>(value, site) + value;
}
template <class T>
MSL_FN T simd_prefix_inclusive_product(T value, MSL_SITE) {
    return msl_combine<msl_product, true>(value, site) * value;
}

struct simd_vote {
    typedef ulong vote_t;
    vote_t votes;
    uint lanes;  // that voted
    MSL_FN explicit constexpr simd_vote(vote_t v = 0, uint voted = 0xffffffffu) : votes(v), lanes(voted) {}
    MSL_FN explicit constexpr operator vote_t() const { return votes; }
    MSL_FN bool all() const { return (uint)votes == lanes; }
    MSL_FN bool any() const { return votes != 0; }
};
MSL_FN simd_vote simd_ballot(bool vote, MSL_SITE) {
    const ulong votes = msl_runtime_ballot(vote, site);
    return simd_vote(votes & 0xffffffffu, (uint)(votes >> 32));
}
MSL_FN bool simd_any(bool vote, MSL_SITE) {
    return simd_ballot(vote, site).any();
}
MSL_FN bool simd_all(bool vote, MSL_SITE) {
    return simd_ballot(vote, site).all();
}
MSL_FN simd_vote simd_active_threads_mask(MSL_SITE) {
    return simd_ballot(true, site);
}
MSL_FN bool simd_is_first(MSL_SITE) {
    return msl_own_lane() == (uint)__builtin_ctzl(msl_runtime_ballot(true, site));
}

// Quads: four lanes of a SIMD-group, which must all come like any others.
template <class T>
MSL_FN T quad_shuffle(T value, ushort lane, MSL_SITE) {
    return msl_exchange(value, site)[(msl_own_lane() & ~3u) | (lane & 3)];
}
template <class T>
MSL_FN T quad_broadcast(T value, ushort lane, MSL_SITE) {
    return quad_shuffle(value, lane, site);
}
template <class T>
MSL_FN T quad_shuffle_xor(T value, ushort mask, MSL_SITE) {
    return msl_exchange(value, site)[msl_own_lane() ^ (mask & 3)];
}
template <class T>
MSL_FN T quad_shuffle_down(T value, ushort delta, MSL_SITE) {
    const uint lane = msl_own_lane();
    return msl_exchange(value, site)[(lane & 3) + delta < 4 ? lane + delta : lane];
}
template <class T>
MSL_FN T quad_shuffle_up(T value, ushort delta, MSL_SITE) {
    const uint lane = msl_own_lane();
    return msl_exchange(value, site)[(lane & 3) >= delta ? lane - delta : lane];
}
#define MSL_QUAD(NAME, EXPRESSION)                                                                  \
    template <class T>                                                                              \
    MSL_FN T quad_##NAME(T value, MSL_SITE) {                                                       \
        const msl_exchanged<T> lanes = msl_exchange(value, site);                                   \
        const uint first = msl_own_lane() & ~3u;                                                    \
        const T a = lanes[first], b = lanes[first + 1], c = lanes[first + 2], d = lanes[first + 3]; \
        return EXPRESSION;                                                                          \
    }
MSL_QUAD(sum, (T)((T)(a + b) + (T)(c + d)))
MSL_QUAD(product, (T)((T)(a * b) * (T)(c * d)))
MSL_QUAD(max, max(max(a, b), max(c, d)))
MSL_QUAD(min, min(min(a, b), min(c, d)))
}  // namespace metal
