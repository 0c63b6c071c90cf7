// Norms as dispatches of their own: before a product of many rows, and, for comparison, before those of one
// row, which take the same norms in their prologues.
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kMaxSimds = 32;

}  // namespace

// h = x / rms(x) * norm, a threadgroup a row, which reads it twice: the second time from its cache.
template <class T>
[[kernel]] void norm_rows(constant args::NormRows& p  [[buffer(0)]],
                          device const float* x       [[buffer(1)]],  // (T, D)
                          device const float* norm    [[buffer(2)]],  // (D)
                          device T* h                 [[buffer(3)]],  // (T, D)
                          uint t                      [[threadgroup_position_in_grid]],
                          ushort thread_index         [[thread_index_in_threadgroup]],
                          ushort simd                 [[simdgroup_index_in_threadgroup]],
                          ushort simds                [[simdgroups_per_threadgroup]],
                          ushort lane                 [[thread_index_in_simdgroup]]) {
    threadgroup float partial[kMaxSimds];
    const uint D = p.width, threads = uint(simds) * kSimd;
    x += t * D;
    h += t * D;
    const float scale = norm_scale(x, D, p.epsilon, partial, thread_index, threads, simd, simds, lane);
    for (uint i = thread_index; i < D; i += threads) h[i] = T(x[i] * scale * norm[i]);
}

template [[host_name("norm_rows_bf16")]] [[kernel]] decltype(norm_rows<bfloat>) norm_rows<bfloat>;
template [[host_name("norm_rows_f32")]] [[kernel]] decltype(norm_rows<float>) norm_rows<float>;

// h = silu(z) norm(y), the norm taken over each head. A threadgroup takes a row, a SIMD-group a head at a
// time.
template <class T>
[[kernel]] void gated_norm_rows(constant args::NormRows& p  [[buffer(0)]],
                                device const float* y       [[buffer(1)]],  // (T, y_stride), Hv Dv used
                                device const float* z       [[buffer(2)]],  // (T, Hv Dv)
                                device const float* norm    [[buffer(3)]],  // (Dv)
                                device T* h                 [[buffer(4)]],  // (T, Hv Dv)
                                uint t                      [[threadgroup_position_in_grid]],
                                ushort simd                 [[simdgroup_index_in_threadgroup]],
                                ushort simds                [[simdgroups_per_threadgroup]],
                                ushort lane                 [[thread_index_in_simdgroup]]) {
    const uint width = p.width, Dv = p.head_dim;
    y += t * p.y_stride;
    z += t * width;
    h += t * width;
    constexpr ushort kKept = 4 * kQuads;  // as gdn_out adds squares up
    for (uint head = simd * Dv; head < width; head += simds * Dv) {
        float squares = 0;
        for (uint first = 0; first < Dv; first += kSimd * kKept) {
            float sum = 0;
#pragma unroll
            for (ushort q = 0; q < kQuads; ++q) {
                const uint i = first + lane * kKept + 4 * q;
                const float4 of = i < Dv ? *(device const float4*)(y + head + i) : float4(0.0f);
                sum += dot(of, of);
            }
            const ushort kept = min(uint(kSimd), (Dv - first) / kKept);
            for (ushort o = 0; o < kept; ++o) squares += simd_shuffle(sum, o);
        }
        const float scale = precise::rsqrt(squares / float(Dv) + p.epsilon);
        for (uint i = lane; i < Dv; i += kSimd)
            h[head + i] = T(silu(z[head + i]) * y[head + i] * norm[i] * scale);
    }
}

template [[host_name("gated_norm_rows_bf16")]] [[kernel]] decltype(gated_norm_rows<bfloat>)
    gated_norm_rows<bfloat>;
template [[host_name("gated_norm_rows_f32")]] [[kernel]] decltype(gated_norm_rows<float>)
    gated_norm_rows<float>;
