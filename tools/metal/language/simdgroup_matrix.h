// simdgroup_matrix, 8 x 8. The lanes of a SIMD-group hold such a matrix together, and its documented
// interface never shows which lane holds what: so the runtime keeps it once for the group, and the first lane
// to come to an operation does it for all (instrumented: the last, once all have come to the same one).
#pragma once

namespace metal {
enum msl_stored { msl_stored_float, msl_stored_half, msl_stored_bfloat };
template <class T>
MSL_VALUE_OF uint msl_stored_as = is_same_v<T, float>  ? msl_stored_float
                                  : is_same_v<T, half> ? msl_stored_half
                                                       : msl_stored_bfloat;
#define MSL_ANY(POINTER) (volatile device void*)(size_t)(POINTER)

#if !MSL_CUDA
MSL_FN bool msl_my_turn(const volatile device void* address, ulong stride, uint site) {
#if MSL_INSTRUMENTED
    return msl_runtime_matrix_turn(address, stride, site);
#else
    thread msl_thread* me = msl_current_thread();
    thread msl_simdgroup_shared* all = (thread msl_simdgroup_shared*)me->shared;
    if (me->matrix_operations++ != all->matrix_operations) return false;
    all->matrix_operations++;
    return true;
#endif
}

#endif

#if MSL_UNDOCUMENTED || MSL_CUDA
// Apple's own layout, which it does not document: two elements a lane, for replaying public kernels that rely
// on it; and, on an NVIDIA GPU, that GPU's.
template <class T, int C, int R>
struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup_matrix is 8 x 8");
    vec<T, 2> elements;
    MSL_FN simdgroup_matrix() = default;
    MSL_FN explicit simdgroup_matrix(T diagonal) {
        for (int i = 0; i < 2; ++i) elements[i] = row() == column(i) ? diagonal : T(0);
    }
#if MSL_CUDA
    static MSL_FN uint row() { return msl_matrix_row(); }
    static MSL_FN uint column(int i) { return msl_matrix_column() + i; }
#else
    static MSL_FN uint row() { return ((msl_own_lane() >> 2) & 4) + ((msl_own_lane() >> 1) & 3); }
    static MSL_FN uint column(int i) {
        return ((msl_own_lane() >> 2) & 2) * 2 + (msl_own_lane() & 1) * 2 + i;
    }
#endif
    MSL_FN thread vec<T, 2>& thread_elements() thread { return elements; }
    MSL_FN thread const vec<T, 2>& thread_elements() const thread { return elements; }
};
template <class T, int C, int R = C>
MSL_FN simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> made;
    made.elements = vec<T, 2>{value, value};
    return made;
}
#define MSL_MATRIX_ADDRESS(M)                                            \
    p[transpose ? (origin.y + M.column(i)) * stride + origin.x + M.row() \
                : (origin.y + M.row()) * stride + origin.x + M.column(i)]
#define MSL_MATRIX_LOAD(SPACE)                                                                          \
    template <class T>                                                                                  \
    MSL_FN void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const SPACE T* p, ulong stride = 8, \
                               ulong2 origin = ulong2{0, 0}, bool transpose = false) {                  \
        for (int i = 0; i < 2; ++i) m.elements[i] = MSL_MATRIX_ADDRESS(m);                              \
    }
#define MSL_MATRIX_STORE(SPACE)                                                            \
    template <class T>                                                                     \
    MSL_FN void simdgroup_store(simdgroup_matrix<T, 8, 8> m, SPACE T* p, ulong stride = 8, \
                                ulong2 origin = ulong2{0, 0}, bool transpose = false) {    \
        for (int i = 0; i < 2; ++i) MSL_MATRIX_ADDRESS(m) = m.elements[i];                 \
    }
template <class D, class A, class B, class C>
MSL_FN void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                          thread const simdgroup_matrix<A, 8, 8>& a,
                                          thread const simdgroup_matrix<B, 8, 8>& b,
                                          thread const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
    const float from[6] = {(float)a.elements.x, (float)a.elements.y, (float)b.elements.x,
                           (float)b.elements.y, (float)c.elements.x, (float)c.elements.y};
#if MSL_CUDA
    float to[2] = {from[4], from[5]};
    if constexpr (is_same_v<A, bfloat> && is_same_v<B, bfloat>)
        msl_multiply_bfloats(to, __builtin_bit_cast(uint, a.elements), __builtin_bit_cast(uint, b.elements));
    else
        msl_multiply_pairs(to, from, from + 2);
#else
    float to[2];
    msl_runtime_apple_multiply(to, from, site);
#endif
    d.elements = vec<D, 2>{(D)to[0], (D)to[1]};
}
#else
template <class T, int C, int R>
struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup_matrix is 8 x 8");
    static_assert(is_floating_point_v<T>, "simdgroup_matrix holds float, half or bfloat");
    uint msl_id;  // where the runtime keeps it; every lane gives the same matrix the same number
    MSL_FN simdgroup_matrix() : msl_id(take()) {}
    MSL_FN explicit simdgroup_matrix(T diagonal, MSL_SITE) : msl_id(take()) {
        if (msl_my_turn(0, 0, site)) msl_runtime_matrix_fill(msl_id, (float)diagonal, true);
    }
    MSL_FN simdgroup_matrix(const simdgroup_matrix& other) : msl_id(take()) { copy(msl_id, other.msl_id); }
    MSL_FN simdgroup_matrix& operator=(const simdgroup_matrix& other) {
        copy(msl_id, other.msl_id);
        return *this;
    }
    MSL_FN ~simdgroup_matrix() { msl_current_thread()->free_matrices[msl_id >> 6] |= 1ul << (msl_id & 63); }

   private:
    static MSL_FN void copy(uint to, uint from) {
        if (msl_my_turn(0, 0, 0)) msl_runtime_matrix_copy(to, from);
    }
    static MSL_FN uint take() {
        thread msl_thread* me = msl_current_thread();
        uint word = 0;
        while (word < MSL_MATRIX_WORDS - 1 && me->free_matrices[word] == 0) ++word;
        const uint bit = __builtin_ctzl(me->free_matrices[word]);
        me->free_matrices[word] &= ~(1ul << bit);
        return word * 64 + bit;
    }
};
template <class T, int C, int R = C>
MSL_FN simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value, MSL_SITE) {
    simdgroup_matrix<T, C, R> made;
    if (msl_my_turn(0, 0, site)) msl_runtime_matrix_fill(made.msl_id, (float)value, false);
    return made;
}
#define MSL_MATRIX_LOAD(SPACE)                                                                          \
    template <class T>                                                                                  \
    MSL_FN void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, const SPACE T* p, ulong stride = 8, \
                               ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_SITE) {        \
        p += origin.y * stride + origin.x;                                                              \
        if (msl_my_turn(MSL_ANY(p), stride, site))                                                      \
            msl_runtime_matrix_load(m.msl_id, MSL_ANY(p), msl_stored_as<T>, stride, transpose, site);   \
    }
#define MSL_MATRIX_STORE(SPACE)                                                                        \
    template <class T>                                                                                 \
    MSL_FN void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, SPACE T* p, ulong stride = 8,      \
                                ulong2 origin = ulong2{0, 0}, bool transpose = false, MSL_SITE) {      \
        p += origin.y * stride + origin.x;                                                             \
        if (msl_my_turn(MSL_ANY(p), stride, site))                                                     \
            msl_runtime_matrix_store(m.msl_id, MSL_ANY(p), msl_stored_as<T>, stride, transpose, site); \
    }
template <class D, class A, class B, class C>
MSL_FN void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d,
                                          thread const simdgroup_matrix<A, 8, 8>& a,
                                          thread const simdgroup_matrix<B, 8, 8>& b,
                                          thread const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
    if (msl_my_turn(0, 0, site))
        msl_runtime_matrix_multiply(d.msl_id, a.msl_id, b.msl_id, c.msl_id, msl_stored_as<D>, site);
}
#endif
MSL_MATRIX_LOAD(device)
MSL_MATRIX_LOAD(threadgroup)
MSL_MATRIX_LOAD(constant)
MSL_MATRIX_STORE(device)
MSL_MATRIX_STORE(threadgroup)
template <class D, class A, class B>
MSL_FN void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, thread const simdgroup_matrix<A, 8, 8>& a,
                               thread const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
    const simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
    simdgroup_multiply_accumulate(d, a, b, zero, site);
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
}  // namespace metal
