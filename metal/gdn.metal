// Gated DeltaNet between its projections, token after token: one kernel for a few tokens of many
// sequences, and for many tokens of one a kernel that convolves, norms and makes the gates, with two scans
// behind it. gdn_chunk.metal has a third.
//
// The rule, for each token:  m = S k;  d = beta (v - decay m);  S = decay S + d k;  y = S q.
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr ushort kValues = 64;      // rows of S that a threadgroup of gdn_mix_step takes
constant constexpr ushort kLanesOfRow = 4;   // lanes that share a row of S
constant constexpr ushort kRowsOfLanes = kSimd / kLanesOfRow;
constant constexpr uint kMaxKeyDim = 256;
constant constexpr ushort kSimds = 8;        // SIMD-groups of a threadgroup that prepares or scans

METAL_FUNC uint channels_of(constant args::GdnMix& p) {
    return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim;
}

// Row t of q, k and v before the convolution; rows before the first token are in the state.
METAL_FUNC float history(device const float* qkv, device const float* conv, uint channels, uint taps, int t,
                         uint channel) {
    return t >= 0 ? qkv[uint(t) * channels + channel] : conv[uint(t + int(taps) - 1) * channels + channel];
}

// A channel of token t, convolved and activated. weight: (channels, taps), the last tap for the token
// itself.
METAL_FUNC float convolved(device const float* qkv, device const float* conv, device const float* weight,
                           uint channels, uint taps, uint t, uint channel) {
    float sum = 0;
    for (uint j = 0; j < taps; ++j)
        sum = fma(history(qkv, conv, channels, taps, int(t + j) - int(taps) + 1, channel),
                  weight[channel * taps + j], sum);
    return silu(sum);
}

// The same, with four taps asked for at once: of many tokens, whose convolution waits for memory.
METAL_FUNC float convolved_ahead(device const float* qkv, device const float* conv,
                                 device const float* weight, uint channels, uint taps, uint t, uint channel) {
    float sum = 0;
    for (uint first = 0; first < taps; first += 4) {
        float x[4], w[4];
#pragma unroll
        for (ushort j = 0; j < 4; ++j) {
            const uint tap = min(first + j, taps - 1);
            x[j] = history(qkv, conv, channels, taps, int(t + tap) - int(taps) + 1, channel);
            w[j] = weight[channel * taps + tap];
        }
#pragma unroll
        for (ushort j = 0; j < 4; ++j) sum = first + j < taps ? fma(x[j], w[j], sum) : sum;
    }
    return silu(sum);
}

// log(1 + e^x), without losing small values to the 1.
METAL_FUNC float softplus(float x) {
    const float e = precise::exp(-fabs(x));
    return max(x, 0.0f) + (e < 1e-3f ? e - 0.5f * e * e + e * e * e / 3.0f : precise::log(1.0f + e));
}

// The sum over kLanes neighbouring lanes, in each of them.
template <ushort kLanes>
METAL_FUNC float lanes_sum(float x) {
    if (kLanes == kSimd) return simd_sum(x);
    for (ushort step = 1; step < kLanes; step *= 2) x += simd_shuffle_xor(x, step);
    return x;
}

// The column of a lane's i-th number of N, where kLanes lanes share a row: they take runs of four in turn, or
// single numbers if that is too few, so that together they load consecutive bytes.
template <ushort kLanes, ushort N>
METAL_FUNC uint column_of(ushort lane, ushort i) {
    constexpr ushort kRun = N < 4 ? 1 : 4;
    return (i / kRun * kLanes + lane % kLanes) * kRun + i % kRun;
}

// A lane's numbers of a row of Dk, zeros past its end. Dk is a multiple of 16.
template <ushort kLanes, ushort N>
METAL_FUNC void load_columns(device const float* row, uint Dk, bool present, ushort lane, thread float* x) {
    if (N < 4) {
        for (ushort i = 0; i < N; ++i) {
            const uint column = column_of<kLanes, N>(lane, i);
            x[i] = present && column < Dk ? row[column] : 0.0f;
        }
        return;
    }
    for (ushort i = 0; i < N; i += 4) {
        const uint column = column_of<kLanes, N>(lane, i);
        float4 run = 0;
        if (present && column < Dk) run = *(device const float4*)(row + column);
        for (ushort j = 0; j < 4; ++j) x[i + j] = run[j];
    }
}

template <ushort kLanes, ushort N>
METAL_FUNC void store_columns(device float* row, uint Dk, bool present, ushort lane, thread const float* x) {
    if (!present) return;
    if (N < 4) {
        for (ushort i = 0; i < N; ++i) {
            const uint column = column_of<kLanes, N>(lane, i);
            if (column < Dk) row[column] = x[i];
        }
        return;
    }
    for (ushort i = 0; i < N; i += 4) {
        const uint column = column_of<kLanes, N>(lane, i);
        if (column < Dk) *(device float4*)(row + column) = float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
}

// What a threadgroup of a scan has of kBlock tokens, and what a thread brings of it. kWide: Dk and what a
// lane's numbers go past it, which are zeros; kRows: of S.
constant constexpr ushort kBlock = 8;
template <ushort kWide, ushort kRows>
struct Scanned {
    static constant constexpr const ushort kQuads = 2 * kWide / 4;  // of a token's key and query
    static constant constexpr const ushort kThreads = kSimds * kSimd;
    static constant constexpr const ushort kShare = (kBlock * kQuads + kThreads - 1) / kThreads;
    static_assert(kBlock * kRows <= kThreads, "a thread brings one value");
    float4 quads[kShare];
    float value;
    float2 gate;

    // Loads a thread's share of the tokens from t on. One past the last has zeros, which leave S as it is.
    METAL_FUNC void load(device const float* prepared, device const float2* gates, constant args::GdnMix& p,
                         uint head, uint first_value, uint t, uint tokens, ushort thread_index) {
        const uint Dk = p.key_dim, keys = p.key_heads * Dk, channels = channels_of(p);
        const uint key_head = head / (p.value_heads / p.key_heads);
#pragma unroll
        for (ushort i = 0; i < kShare; ++i) {
            const ushort at = thread_index + i * kThreads, quad = at % kQuads,
                         column = quad % (kQuads / 2) * 4;
            const uint token = t + at / kQuads;
            quads[i] = float4(0.0f);
            if (at < kBlock * kQuads && token < tokens && column < Dk)
                quads[i] = *(device const float4*)(prepared + (p.lead + token) * channels +
                                                   (quad < kQuads / 2 ? keys : 0) + key_head * Dk + column);
        }
        const uint token = t + thread_index / kRows, row = first_value + thread_index % kRows;
        value = 0;
        if (thread_index < kBlock * kRows && token < tokens && row < p.value_dim)
            value = prepared[(p.lead + token) * channels + 2 * keys + head * p.value_dim + row];
        gate = 0;
        if (thread_index < kBlock && t + thread_index < tokens)
            gate = gates[(p.lead + t + thread_index) * p.value_heads + head];
    }
    METAL_FUNC void put(threadgroup float4* all_quads, threadgroup float* values, threadgroup float2* decays,
                        ushort thread_index) const {
#pragma unroll
        for (ushort i = 0; i < kShare; ++i)
            if (thread_index + i * kThreads < kBlock * kQuads)
                all_quads[thread_index + i * kThreads] = quads[i];
        if (thread_index < kBlock * kRows) values[thread_index] = value;
        if (thread_index < kBlock) decays[thread_index] = float2(precise::exp(gate.x), gate.y);
    }
};

// The rule for a token, of a lane's part of a row of S: keys and queries are the token's, of kLanes N. Gives
// the row's number of y in each of its lanes.
template <ushort kLanes, ushort N>
METAL_FUNC float take_token(threadgroup const float* keys, threadgroup const float* queries, float value,
                            float2 gate, ushort lane, thread float* S) {
    constexpr ushort kSums = N < 4 ? N : 4;  // that do not wait for one another
    float k[N], Sk[kSums], Sq[kSums];
#pragma unroll
    for (ushort i = 0; i < kSums; ++i) Sk[i] = Sq[i] = 0;
#pragma unroll
    for (ushort i = 0; i < N; ++i) {
        k[i] = keys[column_of<kLanes, N>(lane, i)];
        S[i] *= gate.x;
        Sk[i % kSums] = fma(S[i], k[i], Sk[i % kSums]);
    }
    for (ushort i = 1; i < kSums; ++i) Sk[0] += Sk[i];
    const float d = (value - lanes_sum<kLanes>(Sk[0])) * gate.y;
#pragma unroll
    for (ushort i = 0; i < N; ++i) {
        S[i] = fma(d, k[i], S[i]);
        Sq[i % kSums] = fma(S[i], queries[column_of<kLanes, N>(lane, i)], Sq[i % kSums]);
    }
    for (ushort i = 1; i < kSums; ++i) Sq[0] += Sq[i];
    return lanes_sum<kLanes>(Sq[0]);
}

}  // namespace

// gdn_mix of a few tokens: convolution, norms, gates and the rule in one kernel, with S k and S q from one
// pass over S: y = decay S q + d (k . q). A threadgroup has kValues rows of one head's S, a SIMD-group
// eight of them, four lanes a row, each with N = Dk / 4 numbers in registers from the first token to the
// last: S is read once and written once. It convolves what it needs of q, k and v; the last rows before
// the convolution go to the next state, those of q and k from the first value head of a key head. The grid
// is (blocks of a head's rows, value heads, sequences): 64 threadgroups a token of the 35B, where one a
// head would leave cores idle.
template <ushort N>
[[kernel]] void gdn_mix_step(constant args::GdnMix& p                [[buffer(0)]],
                             device const float* all_qkv             [[buffer(1)]],  // (T, channels)
                             device const float* all_b               [[buffer(2)]],  // (T, Hv)
                             device const float* all_a               [[buffer(3)]],  // (T, Hv)
                             device const float* weight              [[buffer(4)]],  // (channels, C)
                             device const float* a_log               [[buffer(5)]],  // (Hv)
                             device const float* dt_bias             [[buffer(6)]],  // (Hv)
                             device const args::Sequence* sequences  [[buffer(7)]],
                             device float* all_y                     [[buffer(8)]],  // (T, y_stride)
                             uint3 group                             [[threadgroup_position_in_grid]],
                             uint thread_index                       [[thread_index_in_threadgroup]],
                             uint threads                            [[threads_per_threadgroup]],
                             ushort simd                             [[simdgroup_index_in_threadgroup]],
                             ushort lane                             [[thread_index_in_simdgroup]]) {
    threadgroup float q[kMaxKeyDim], k[kMaxKeyDim], v[kValues];
    threadgroup float scales[3];  // of q, of k, and k . q of the scaled two

    const uint Dk = p.key_dim, Dv = p.value_dim, C = p.taps, share = p.value_heads / p.key_heads;
    const uint head = group.y, key_head = head / share, first_value = group.x * kValues;
    const uint keys = p.key_heads * Dk, channels = channels_of(p);
    const uint values = min(uint(kValues), Dv - first_value);
    const uint tokens = sequences[group.z].tokens, first_row = sequences[group.z].row;
    device const float* qkv = all_qkv + first_row * channels;
    device const float* conv_in = sequences[group.z].now + p.layer * p.state;  // (C - 1, channels)
    device float* conv_out = sequences[group.z].next + p.layer * p.state;
    device const float* S_in = conv_in + (C - 1) * channels;  // (Hv, Dv, Dk)
    device float* S_out = conv_out + (C - 1) * channels;

    const uint row = simd * kRowsOfLanes + lane / kLanesOfRow;  // of this threadgroup's rows of S
    const bool present = row < values;
    const uint at = (head * Dv + first_value + row) * Dk;
    float S[N];
    load_columns<kLanesOfRow, N>(S_in + at, Dk, present, lane, S);
    for (uint i = Dk + thread_index; i < kLanesOfRow * N; i += threads) q[i] = k[i] = 0;

    const float rate = precise::exp(a_log[head]);
    for (uint t = 0; t < tokens; ++t) {
        for (uint i = thread_index; i < 2 * Dk + values; i += threads) {
            if (i < Dk) {
                q[i] = convolved(qkv, conv_in, weight, channels, C, t, key_head * Dk + i);
            } else if (i < 2 * Dk) {
                k[i - Dk] = convolved(qkv, conv_in, weight, channels, C, t, keys + key_head * Dk + (i - Dk));
            } else {
                const uint channel = 2 * keys + head * Dv + first_value + (i - 2 * Dk);
                v[i - 2 * Dk] = convolved(qkv, conv_in, weight, channels, C, t, channel);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd == 0) {
            float qq = 0, kk = 0, kq = 0;
            for (uint i = lane; i < Dk; i += kSimd) {
                qq = fma(q[i], q[i], qq);
                kk = fma(k[i], k[i], kk);
                kq = fma(k[i], q[i], kq);
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

        const uint gate = (first_row + t) * p.value_heads + head;
        const float decay = precise::exp(-rate * softplus(all_a[gate] + dt_bias[head]));
        const float beta = sigmoid(all_b[gate]);
        float Sk = 0, Sq = 0;
        for (ushort i = 0; i < N; ++i) {
            const uint column = column_of<kLanesOfRow, N>(lane, i);
            Sk = fma(S[i], k[column], Sk);
            Sq = fma(S[i], q[column], Sq);
        }
        Sk = lanes_sum<kLanesOfRow>(Sk);
        Sq = lanes_sum<kLanesOfRow>(Sq);
        const float d = (present ? fma(-decay, Sk * scales[1], v[row]) : 0.0f) * beta;
        if (present && lane % kLanesOfRow == 0)
            all_y[(first_row + t) * p.y_stride + head * Dv + first_value + row] =
                fma(d, scales[2], decay * (Sq * scales[0]));
        const float dk = d * scales[1];
        for (ushort i = 0; i < N; ++i)
            S[i] = fma(dk, k[column_of<kLanesOfRow, N>(lane, i)], decay * S[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);  // q, k and v are written again
    }
    store_columns<kLanesOfRow, N>(S_out + at, Dk, present, lane, S);

    const bool keeps_keys = group.x == 0 && head % share == 0;
    for (uint i = thread_index + (keeps_keys ? 0 : 2 * Dk); i < 2 * Dk + values; i += threads) {
        const uint channel = i < Dk       ? key_head * Dk + i
                             : i < 2 * Dk ? keys + key_head * Dk + (i - Dk)
                                          : 2 * keys + head * Dv + first_value + (i - 2 * Dk);
        for (uint j = 0; j + 1 < C; ++j)
            conv_out[j * channels + channel] =
                history(qkv, conv_in, channels, C, int(tokens + j) - int(C) + 1, channel);
    }
}

// gdn_mix of many tokens, first part: q and k convolved and of length Dk^-1/2 and 1, v convolved, and the
// gates, once for all that scan them: prepared is q, k and v side by side, gates the logarithm of the
// decay and beta. Rows lie on the position grid of blocks of 64, so that the first token has row p.lead;
// rows of the grid that are no token's hold zeros, which leave S as it is. Only
// gdn_chunk.metal needs the grid; for others, rows are the tokens'. A SIMD-group takes a head of q,
// k or v of one row; the one of a v head makes its gates; those of the last C - 1 tokens copy them, before
// the convolution, to the next state, and the first one's what stays of the state before. The grid is
// (2 Hk + Hv, rows / kSimds): neighbours in a threadgroup convolve the same rows.
[[kernel]] void gdn_mix_prepare(constant args::GdnMix& p                [[buffer(0)]],
                                device const float* qkv                 [[buffer(1)]],  // (T, channels)
                                device const float* b                   [[buffer(2)]],  // (T, Hv)
                                device const float* a                   [[buffer(3)]],  // (T, Hv)
                                device const float* weight              [[buffer(4)]],  // (channels, C)
                                device const float* a_log               [[buffer(5)]],  // (Hv)
                                device const float* dt_bias             [[buffer(6)]],  // (Hv)
                                device const args::Sequence* sequences  [[buffer(7)]],  // (1)
                                device float* prepared                  [[buffer(8)]],  // (rows, channels)
                                device float2* gates                    [[buffer(9)]],  // (rows, Hv)
                                uint2 group                             [[threadgroup_position_in_grid]],
                                ushort simd                             [[simdgroup_index_in_threadgroup]],
                                ushort lane                             [[thread_index_in_simdgroup]]) {
    const uint C = p.taps, channels = channels_of(p), tokens = sequences[0].tokens;
    const bool is_value = group.x >= 2 * p.key_heads, is_query = group.x < p.key_heads;
    const uint head = group.x - (is_value ? 2 * p.key_heads : 0), width = is_value ? p.value_dim : p.key_dim;
    const uint first = (is_value ? 2 * p.key_heads * p.key_dim : 0) + head * width;
    const uint row = group.y * kSimds + simd, t = row - p.lead;
    const bool present = row >= p.lead && t < tokens;
    if (row >= p.rows) return;
    device const float* conv_in = sequences[0].now + p.layer * p.state;
    device float* conv_out = sequences[0].next + p.layer * p.state;
    device float* out = prepared + row * channels + first;

    float squares = 0;
    for (uint i = lane; i < width; i += kSimd) {
        const float mixed = present ? convolved_ahead(qkv, conv_in, weight, channels, C, t, first + i) : 0.0f;
        squares = fma(mixed, mixed, squares);
        out[i] = mixed;
        if (present && t + C > tokens)
            conv_out[(t + C - 1 - tokens) * channels + first + i] = qkv[t * channels + first + i];
        for (uint j = 0; present && t == 0 && j + tokens + 1 < C; ++j)
            conv_out[j * channels + first + i] = conv_in[(j + tokens) * channels + first + i];
    }
    if (is_value) {
        if (lane != 0) return;
        float2 gate = 0;
        if (present) {
            const uint at = t * p.value_heads + head;
            gate = float2(-precise::exp(a_log[head]) * softplus(a[at] + dt_bias[head]), sigmoid(b[at]));
        }
        gates[row * p.value_heads + head] = gate;
    } else {
        float scale = precise::rsqrt(simd_sum(squares) + 1e-6f);
        if (is_query) scale *= precise::rsqrt(float(p.key_dim));
        for (uint i = lane; i < width; i += kSimd) out[i] *= scale;
    }
}

// gdn_mix of many tokens, as a scan: kLanes lanes share a row of S, each with N = Dk / kLanes numbers in
// registers from the first token to the last; S is read once and written once. With 32 lanes a SIMD-group
// has one row and sums over all of its lanes twice a token ("registers"); with 8 it has four rows and three
// shuffles do ("packed"). A threadgroup brings q, k and v of kBlock tokens into its memory at a time, and
// asks for those of the next before it takes these: memory answers later than a token takes. The grid is
// (blocks of a head's rows, value heads).
template <ushort kLanes, ushort N>
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_mix_scan(
                             constant args::GdnMix& p                [[buffer(0)]],
                             device const float* prepared            [[buffer(1)]],  // (rows, channels)
                             device const float2* gates              [[buffer(2)]],  // (rows, Hv)
                             device const args::Sequence* sequences  [[buffer(3)]],  // (1)
                             device float* y                         [[buffer(4)]],  // (T, y_stride)
                             uint2 group                             [[threadgroup_position_in_grid]],
                             ushort thread_index                     [[thread_index_in_threadgroup]],
                             ushort simd                             [[simdgroup_index_in_threadgroup]],
                             ushort lane                             [[thread_index_in_simdgroup]]) {
    constexpr ushort kRows = kSimds * kSimd / kLanes, kWide = kLanes * N;
    threadgroup float4 quads[kBlock * 2 * kWide / 4];  // (kBlock, 2, kWide): keys, queries
    threadgroup float values[kBlock * kRows];          // (kBlock, kRows)
    threadgroup float2 decays[kBlock];                 // (kBlock): decay, beta
    const uint Dk = p.key_dim, Dv = p.value_dim, channels = channels_of(p), tokens = sequences[0].tokens;
    const uint head = group.y, first = group.x * kRows;
    const ushort row = simd * (kSimd / kLanes) + lane / kLanes;  // of this threadgroup's rows of S
    const uint value = first + row;                              // of the head's
    const bool present = value < Dv, writes = present && lane % kLanes == 0;
    const uint conv = (p.taps - 1) * channels, at = (head * Dv + value) * Dk;
    device const float* S_in = sequences[0].now + p.layer * p.state + conv;
    device float* S_out = sequences[0].next + p.layer * p.state + conv;
    device float* out = y + head * Dv + value;
    float S[N];
    load_columns<kLanes, N>(S_in + at, Dk, present, lane, S);

    Scanned<kWide, kRows> next;
    next.load(prepared, gates, p, head, first, 0, tokens, thread_index);
    for (uint t = 0; t < tokens; t += kBlock) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody reads what was there
        next.put(quads, values, decays, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        next.load(prepared, gates, p, head, first, t + kBlock, tokens, thread_index);
#pragma unroll
        for (ushort i = 0; i < kBlock; ++i) {
            threadgroup const float* keys = (threadgroup const float*)quads + i * 2 * kWide;
            const float sum =
                take_token<kLanes, N>(keys, keys + kWide, values[i * kRows + row], decays[i], lane, S);
            if (writes && t + i < tokens) out[(t + i) * p.y_stride] = sum;
        }
    }
    store_columns<kLanes, N>(S_out + at, Dk, present, lane, S);
}

#define instantiate_gdn_mix_step(n) \
    template [[host_name("gdn_mix_step_" #n)]] [[kernel]] decltype(gdn_mix_step<n>) gdn_mix_step<n>;
instantiate_gdn_mix_step(4)
instantiate_gdn_mix_step(8)
instantiate_gdn_mix_step(16)
instantiate_gdn_mix_step(32)
instantiate_gdn_mix_step(64)

#define instantiate_gdn_mix_scan(strategy, lanes, n)                    \
    template [[host_name("gdn_mix_" #strategy "_" #n)]] [[kernel]] \
    decltype(gdn_mix_scan<lanes, n>) gdn_mix_scan<lanes, n>;
instantiate_gdn_mix_scan(registers, 32, 1)
instantiate_gdn_mix_scan(registers, 32, 2)
instantiate_gdn_mix_scan(registers, 32, 4)
instantiate_gdn_mix_scan(registers, 32, 8)
instantiate_gdn_mix_scan(packed, 8, 2)
instantiate_gdn_mix_scan(packed, 8, 4)
instantiate_gdn_mix_scan(packed, 8, 8)
instantiate_gdn_mix_scan(packed, 8, 16)
instantiate_gdn_mix_scan(packed, 8, 32)
