// Metal's atomics, relaxed. Groups run on several OS threads, so these are the machine's own atomics.
#pragma once

namespace metal {
template <class T>
struct atomic {
    T msl_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

template <class T>
struct msl_same {  // keeps a parameter out of deduction
    typedef T type;
};
enum msl_access { msl_reads = 1, msl_writes = 2 };
#if MSL_INSTRUMENTED
#define MSL_NOTE_ATOMIC(ADDRESS, ACCESS) \
    msl_runtime_atomic((const volatile device void*)(size_t)(ADDRESS), sizeof(T), ACCESS, site)
#else
#define MSL_NOTE_ATOMIC(ADDRESS, ACCESS)
#endif

// The bare number, as clang's atomics take it.
#if MSL_CUDA
#define MSL_PLAIN(T, POINTER) ((__generic T*)(POINTER))
#else
#define MSL_PLAIN(T, POINTER) ((thread T*)(size_t)(POINTER))
#endif

template <uint operation, class T, class P>
MSL_FN T msl_atomic_update(P address, T value) {
    if constexpr (is_integral_v<T> && operation <= msl_xor && operation != msl_product &&
                  !is_same_v<T, bool>) {
        if constexpr (operation == msl_sum)
            return __atomic_fetch_add(address, value, 0);
        else if constexpr (operation == msl_maximum)
            return __atomic_fetch_max(address, value, 0);
        else if constexpr (operation == msl_minimum)
            return __atomic_fetch_min(address, value, 0);
        else if constexpr (operation == msl_and)
            return __atomic_fetch_and(address, value, 0);
        else if constexpr (operation == msl_or)
            return __atomic_fetch_or(address, value, 0);
        else
            return __atomic_fetch_xor(address, value, 0);
    } else {
        static_assert(operation == msl_sum,
                      "Metal's atomics on float add, subtract, load, store and exchange");
        T old, next;
        __atomic_load(address, &old, 0);
        do next = old + value;
        while (!__atomic_compare_exchange(address, &old, &next, false, 0, 0));
        return old;
    }
}
// In threadgroup memory Metal has atomics on 32-bit integers only.
template <bool in_device, class T>
MSL_FN constexpr void msl_check_atomic() {
    static_assert(
        is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, bool> || (in_device && is_same_v<T, float>),
        "Metal has this operation on atomic_int, atomic_uint and atomic_bool, and on atomic_float in device "
        "memory");
}
#define MSL_UPDATE(SPACE, IN_DEVICE, NAME, OPERATION, VALUE)                                           \
    template <class T>                                                                                 \
    MSL_FN T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* p, typename msl_same<T>::type v, \
                                            memory_order, MSL_SITE) {                                  \
        msl_check_atomic<IN_DEVICE, T>();                                                              \
        MSL_NOTE_ATOMIC(p, msl_reads | msl_writes);                                                    \
        return msl_atomic_update<OPERATION, T>(MSL_PLAIN(T, p), VALUE);                                \
    }
#define MSL_ATOMICS(SPACE, IN_DEVICE)                                                                  \
    template <class T>                                                                                 \
    MSL_FN T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order, MSL_SITE) {         \
        msl_check_atomic<IN_DEVICE, T>();                                                              \
        MSL_NOTE_ATOMIC(p, msl_reads);                                                                 \
        T v;                                                                                           \
        __atomic_load(MSL_PLAIN(T, p), &v, 0);                                                         \
        return v;                                                                                      \
    }                                                                                                  \
    template <class T>                                                                                 \
    MSL_FN void atomic_store_explicit(volatile SPACE atomic<T>* p, typename msl_same<T>::type v,       \
                                      memory_order, MSL_SITE) {                                        \
        msl_check_atomic<IN_DEVICE, T>();                                                              \
        MSL_NOTE_ATOMIC(p, msl_writes);                                                                \
        __atomic_store(MSL_PLAIN(T, p), &v, 0);                                                        \
    }                                                                                                  \
    template <class T>                                                                                 \
    MSL_FN T atomic_exchange_explicit(volatile SPACE atomic<T>* p, typename msl_same<T>::type v,       \
                                      memory_order, MSL_SITE) {                                        \
        msl_check_atomic<IN_DEVICE, T>();                                                              \
        MSL_NOTE_ATOMIC(p, msl_reads | msl_writes);                                                    \
        T old;                                                                                         \
        __atomic_exchange(MSL_PLAIN(T, p), &v, &old, 0);                                               \
        return old;                                                                                    \
    }                                                                                                  \
    template <class T>                                                                                 \
    MSL_FN bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* p, thread T* expected, \
                                                      typename msl_same<T>::type v, memory_order,      \
                                                      memory_order, MSL_SITE) {                        \
        msl_check_atomic<IN_DEVICE, T>();                                                              \
        MSL_NOTE_ATOMIC(p, msl_reads | msl_writes);                                                    \
        return __atomic_compare_exchange(MSL_PLAIN(T, p), expected, &v, false, 0, 0);                  \
    }                                                                                                  \
    MSL_UPDATE(SPACE, IN_DEVICE, add, msl_sum, v)                                                      \
    MSL_UPDATE(SPACE, IN_DEVICE, sub, msl_sum, (T) - v)                                                \
    MSL_UPDATE(SPACE, IN_DEVICE, max, msl_maximum, v)                                                  \
    MSL_UPDATE(SPACE, IN_DEVICE, min, msl_minimum, v)                                                  \
    MSL_UPDATE(SPACE, IN_DEVICE, and, msl_and, v)                                                      \
    MSL_UPDATE(SPACE, IN_DEVICE, or, msl_or, v)                                                        \
    MSL_UPDATE(SPACE, IN_DEVICE, xor, msl_xor, v)
MSL_ATOMICS(device, true)
MSL_ATOMICS(threadgroup, false)

// 64 bits: maximum and minimum only, in device memory, without the old value.
#define MSL_ATOMIC64(NAME, OPERATION)                                                             \
    MSL_FN void atomic_##NAME##_explicit(volatile device atomic<ulong>* p, ulong v, memory_order, \
                                         MSL_SITE) {                                              \
        typedef ulong T;                                                                          \
        MSL_NOTE_ATOMIC(p, msl_reads | msl_writes);                                               \
        msl_atomic_update<OPERATION, ulong>(MSL_PLAIN(ulong, p), v);                              \
    }
MSL_ATOMIC64(max, msl_maximum)
MSL_ATOMIC64(min, msl_minimum)
}  // namespace metal
