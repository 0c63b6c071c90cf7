// Gated DeltaNet between its projections: convolution, norms, gates and the delta rule in one kernel, token
// after token.
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kValues = 64;      // value rows of S that a threadgroup takes: half a head of the 35B
constant constexpr ushort kLanesOfRow = 4;   // lanes that share a row of S
constant constexpr ushort kRowsOfLanes = kSimd / kLanesOfRow;
constant constexpr uint kMaxKeyDim = 256;

// Row t of q, k and v before the convolution; rows before the first token are in the state.
METAL_FUNC float history(device const float* qkv, device const float* conv, uint channels, uint taps, int t, uint channel) {
    return t >= 0 ? qkv[uint(t) * channels + channel] : conv[uint(t + int(taps) - 1) * channels + channel];
}

// log(1 + e^x), without losing small values to the 1.
METAL_FUNC float softplus(float x) {
    const float e = precise::exp(-fabs(x));
    return max(x, 0.0f) + (e < 1e-3f ? e - 0.5f * e * e + e * e * e / 3.0f : precise::log(1.0f + e));
}

}  // namespace

// For each token: m = S k and S q from one pass over S; d = beta (v - decay m); y = decay S q + d (k . q); S
// = decay S + d k. A threadgroup has kValues rows of one head's S, a SIMD-group eight of them, four lanes a
// row, each with N = Dk / 4 numbers in registers from the first token to the last: S is read once and written
// once. The grid is (blocks of a head's rows, value heads).
template <ushort N>
[[kernel]] void gdn_mix(constant args::GdnMix& p           [[buffer(0)]],
                        device const float* qkv            [[buffer(1)]],  // (T, channels)
                        device const float* b              [[buffer(2)]],  // (T, Hv)
                        device const float* a              [[buffer(3)]],  // (T, Hv)
                        device const float* taps           [[buffer(4)]],  // (channels, C)
                        device const float* a_log          [[buffer(5)]],  // (Hv)
                        device const float* dt_bias        [[buffer(6)]],  // (Hv)
                        device const float* conv_in        [[buffer(7)]],  // (C - 1, channels), oldest first
                        device const float* S_in           [[buffer(8)]],  // (Hv, Dv, Dk)
                        device float* y                    [[buffer(9)]],  // (T, y_stride), Hv Dv of them used
                        device float* conv_out             [[buffer(10)]],
                        device float* S_out                [[buffer(11)]],
                        uint2 group                        [[threadgroup_position_in_grid]],
                        uint thread_index                  [[thread_index_in_threadgroup]],
                        uint threads                       [[threads_per_threadgroup]],
                        ushort simd                        [[simdgroup_index_in_threadgroup]],
                        ushort lane                        [[thread_index_in_simdgroup]]) {
    threadgroup float q[kMaxKeyDim], k[kMaxKeyDim], v[kValues];
    threadgroup float scales[3];  // of q, of k, and k . q of the scaled two

    const uint Dk = p.key_dim, Dv = p.value_dim, C = p.taps;
    const uint head = group.y, key_head = head / (p.value_heads / p.key_heads);
    const uint keys = p.key_heads * Dk, channels = 2 * keys + p.value_heads * Dv;
    const uint first_value = group.x * kValues;
    const uint values = min(uint(kValues), Dv - first_value);

    const uint row = simd * kRowsOfLanes + lane / kLanesOfRow;  // of this threadgroup's rows of S
    const uint part = lane % kLanesOfRow * N;                   // this lane's first column
    const bool present = row < values;
    const uint at = (head * Dv + first_value + row) * Dk + part;
    float S[N];
    for (ushort i = 0; i < N; ++i) S[i] = present ? S_in[at + i] : 0.0f;

    const float rate = precise::exp(a_log[head]);
    for (uint t = 0; t < p.tokens; ++t) {
        for (uint i = thread_index; i < 2 * Dk + values; i += threads) {
            const uint channel = i < Dk       ? key_head * Dk + i
                                 : i < 2 * Dk ? keys + key_head * Dk + (i - Dk)
                                              : 2 * keys + head * Dv + first_value + (i - 2 * Dk);
            float sum = 0;
            for (uint j = 0; j < C; ++j)
                sum = fma(history(qkv, conv_in, channels, C, int(t + j) - int(C) + 1, channel), taps[channel * C + j], sum);
            const float mixed = silu(sum);
            if (i < Dk) {
                q[i] = mixed;
            } else if (i < 2 * Dk) {
                k[i - Dk] = mixed;
            } else {
                v[i - 2 * Dk] = mixed;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == 0) {
            float qq = 0, kk = 0, kq = 0;
            for (uint i = lane; i < Dk; i += kSimd) {
                qq += q[i] * q[i];
                kk += k[i] * k[i];
                kq += k[i] * q[i];
            }
            const float q_scale = precise::rsqrt(simd_sum(qq) + 1e-6f) * precise::rsqrt(float(Dk));
            const float k_scale = precise::rsqrt(simd_sum(kk) + 1e-6f);
            kq = simd_sum(kq);
            if (lane == 0) {
                scales[0] = q_scale;
                scales[1] = k_scale;
                scales[2] = kq * q_scale * k_scale;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        const float decay = precise::exp(-rate * softplus(a[t * p.value_heads + head] + dt_bias[head]));
        const float beta = sigmoid(b[t * p.value_heads + head]);
        float Sk = 0, Sq = 0;
        for (ushort i = 0; i < N; ++i) {
            Sk = fma(S[i], k[part + i], Sk);
            Sq = fma(S[i], q[part + i], Sq);
        }
        for (ushort step = 1; step < kLanesOfRow; step *= 2) {
            Sk += simd_shuffle_xor(Sk, step);
            Sq += simd_shuffle_xor(Sq, step);
        }
        const float d = (present ? v[row] - decay * (Sk * scales[1]) : 0.0f) * beta;
        if (present && lane % kLanesOfRow == 0)
            y[t * p.y_stride + head * Dv + first_value + row] = fma(d, scales[2], decay * (Sq * scales[0]));
        const float dk = d * scales[1];
        for (ushort i = 0; i < N; ++i) S[i] = fma(dk, k[part + i], decay * S[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // q, k and v are written again
    }
    for (ushort i = 0; i < N; ++i)
        if (present) S_out[at + i] = S[i];

    // The last C - 1 rows before the convolution. The first value head of a key head keeps the rows of its q and k.
    const bool keeps_keys = group.x == 0 && head % (p.value_heads / p.key_heads) == 0;
    for (uint i = thread_index + (keeps_keys ? 0 : 2 * Dk); i < 2 * Dk + values; i += threads) {
        const uint channel = i < Dk       ? key_head * Dk + i
                             : i < 2 * Dk ? keys + key_head * Dk + (i - Dk)
                                          : 2 * keys + head * Dv + first_value + (i - 2 * Dk);
        for (uint j = 0; j + 1 < C; ++j)
            conv_out[j * channels + channel] =
                history(qkv, conv_in, channels, C, int(p.tokens + j) - int(C) + 1, channel);
    }
}

#define instantiate_gdn_mix(n) \
    template [[host_name("gdn_mix_" #n)]] [[kernel]] decltype(gdn_mix<n>) gdn_mix<n>;
instantiate_gdn_mix(4)
instantiate_gdn_mix(8)
instantiate_gdn_mix(16)
instantiate_gdn_mix(32)
instantiate_gdn_mix(64)
