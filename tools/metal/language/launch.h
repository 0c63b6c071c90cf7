// What an entry point needs: the built-ins and buffers of the thread that it starts. kernels.py writes the
// calls.
#pragma once

#if !MSL_CUDA
typedef const thread msl_thread* msl_thread_context;
#define MSL_GROUP(c) ((const thread msl_group*)(c)->group)
#define MSL_TRIPLE(...) \
    ::uint3 {           \
        __VA_ARGS__     \
    }

MSL_FN uint3 msl_triple(const thread uint32_t* v) {
    return uint3{v[0], v[1], v[2]};
}
MSL_FN uint3 msl_position_in_grid(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->position) * msl_triple(MSL_GROUP(c)->dispatch_threads) +
           msl_triple(c->position);
}
MSL_FN uint3 msl_grid(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->grid);
}
MSL_FN uint3 msl_group_position(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->position);
}
MSL_FN uint3 msl_groups(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->groups);
}
MSL_FN uint3 msl_position(msl_thread_context c) {
    return msl_triple(c->position);
}
MSL_FN uint3 msl_threads(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->threads);
}
MSL_FN uint3 msl_dispatch_threads(msl_thread_context c) {
    return msl_triple(MSL_GROUP(c)->dispatch_threads);
}
MSL_FN uint msl_index(msl_thread_context c) {
    return c->index;
}
MSL_FN uint msl_lane(msl_thread_context c) {
    return c->lane;
}
MSL_FN uint msl_simdgroup(msl_thread_context c) {
    return c->simdgroup;
}
MSL_FN uint msl_simdgroups(msl_thread_context c) {
    return MSL_GROUP(c)->simdgroups;
}
MSL_FN ulong msl_buffer(msl_thread_context c, uint index) {
    return MSL_GROUP(c)->buffers[index];
}
MSL_FN ulong msl_threadgroup(msl_thread_context c, uint index) {
    return MSL_GROUP(c)->threadgroup_buffers[index];
}
#endif
MSL_FN uint msl_simd_width(msl_thread_context) {
    return 32;
}
MSL_FN uint msl_quad_lane(msl_thread_context c) {
    return msl_index(c) & 3;
}
MSL_FN uint msl_quadgroup(msl_thread_context c) {
    return msl_index(c) >> 2;
}

template <class T>
MSL_FN void msl_check_builtin() {
    typedef metal::msl_element<T> element;
    static_assert(metal::is_same_v<element, uint> || metal::is_same_v<element, ushort>,
                  "a built-in such as [[thread_position_in_grid]] is uint or ushort, or a vector of them");
}
template <class T>
MSL_FN T msl_builtin(uint value) {
    msl_check_builtin<T>();
    static_assert(metal::msl_shape<T>::count == 1, "this built-in has one component");
    return (T)value;
}
template <class T>
MSL_FN T msl_builtin(uint3 value) {
    msl_check_builtin<T>();
    if constexpr (metal::msl_shape<T>::count == 1)
        return (T)value.x;
    else if constexpr (metal::msl_shape<T>::count == 2)
        return T{(metal::msl_element<T>)value.x, (metal::msl_element<T>)value.y};
    else
        return __builtin_convertvector(value, T);
}
