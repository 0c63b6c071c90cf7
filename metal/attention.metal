// Attention between its projections, row by row: q and k norms, RoPE and the append; attention over spans of
// positions, and their merge; the gate. Keys and values lie in pages of 256 positions, (G, 256, Dh) each, of
// which a table has the addresses. Every sum runs over a grid of positions that starts at 0 and does not
// depend on the other rows of a dispatch, so a row's bits do not either.
#include "attention.h"
#include "norm.h"

using namespace lily;

namespace {

constant constexpr ushort kSimds = 4;  // SIMD-groups that share a span
constant constexpr ushort kKeys = 4;   // consecutive positions that a SIMD-group takes at a time

}  // namespace

// attn_mix of several rows of a sequence, first part: a SIMD-group norms and turns one key/value head's
// key of one token, and writes it and the value into their page. Rows past the last token write zeros,
// which the matrix tiles of attn_mix_flash multiply by zeros. The grid is (G, tokens + cleared).
template <typename KV, ushort N>
[[kernel]] void attn_mix_place(constant args::Attention& p             [[buffer(0)]],
                               device const float* k                   [[buffer(1)]],  // (tokens, G, Dh)
                               device const float* v                   [[buffer(2)]],  // (tokens, G, Dh)
                               device const float* k_norm              [[buffer(3)]],  // (Dh)
                               device const float2* turns              [[buffer(4)]],  // (tokens, R / 2)
                               device const args::Sequence* sequences  [[buffer(5)]],  // (1)
                               device const Page* pages                [[buffer(6)]],
                               uint2 group                             [[threadgroup_position_in_grid]],
                               ushort lane                             [[thread_index_in_simdgroup]]) {
    const uint Dh = p.head_dim, kv_head = group.x, t = group.y;
    float key[N], value[N];
    if (t < p.tokens) {
        const uint row = (t * p.kv_heads + kv_head) * Dh;
        normed<N>(k + row, k_norm, turns + t * (p.rotary_dim / 2), p, lane, key);
        load<false, N>(v + row, Dh, lane, value);
    } else {
        for (ushort i = 0; i < N; ++i) key[i] = value[i] = 0;
    }
    const uint position = sequences[0].position + t;
    device KV* out = key_at<KV>(pages, p, kv_head, position);
    const float key_scale = keep<KV, N>(key), value_scale = keep<KV, N>(value);
    if (Kept<KV>::kScaled && lane == 0) {
        *scale_of(out, Dh, position) = key_scale;
        *scale_of(out + p.plane, Dh, position) = value_scale;
    }
    for (ushort i = 0; i < N; ++i) {
        const uint d = lane * N + i;
        if (d >= Dh) break;
        out[d] = KV(key[i]);
        out[p.plane + d] = KV(value[i]);
    }
}

// attn_mix where that is a dispatch of its own: norms and turns the queries, in their place, which decode
// otherwise does in the next one's prologue. A SIMD-group takes a head of a row; the grid is (H, rows).
template <ushort N>
[[kernel]] void attn_mix_turn(constant args::Attention& p  [[buffer(0)]],
                              device float* qg             [[buffer(1)]],  // (rows, H, 2, Dh)
                              device const float* q_norm   [[buffer(2)]],  // (Dh)
                              device const float2* turns   [[buffer(3)]],  // (rows, R / 2)
                              uint2 group                  [[threadgroup_position_in_grid]],
                              ushort lane                  [[thread_index_in_simdgroup]]) {
    const uint Dh = p.head_dim, row = group.y;
    device float* q = qg + (row * p.heads + group.x) * 2 * Dh;
    float x[N];
    normed<N>(q, q_norm, turns + row * (p.rotary_dim / 2), p, lane, x);
    simdgroup_barrier(mem_flags::mem_device);  // a turned number needs its partner as it was
    for (ushort i = 0; i < N; ++i)
        if (lane * N + i < Dh) q[lane * N + i] = x[i];
}

// attn_mix, decode: softmax(q K) V over one span of positions, for up to kHeads query heads of one
// key/value head, each load of a key and a value serving all of them. The prologue norms and turns the
// queries. Where the dispatch appends, the threadgroups of the last span make the row's own key as well
// and take it from threadgroup memory; the one of the first heads writes it into its page, which no other
// reads there. SIMD-groups take every fourth run of kKeys positions, a lane N consecutive dimensions: one
// maximum, and one scaling of what is summed, a run. A row of one span is gated and finished here, others
// leave [maximum, sum, Dh unnormalised values] for attn_mix_merge. The grid is (spans, G times blocks of
// heads, rows), so that a long context fills the GPU at one row.
template <typename KV, ushort N, ushort kHeads, bool kWide>
[[kernel]] void attn_mix_split(constant args::Attention& p             [[buffer(0)]],
                               device const float* qg                  [[buffer(1)]],  // (rows, H, 2, Dh)
                               device const float* k                   [[buffer(2)]],  // (rows, G, Dh)
                               device const float* v                   [[buffer(3)]],  // (rows, G, Dh)
                               device const float* q_norm              [[buffer(4)]],  // (Dh)
                               device const float* k_norm              [[buffer(5)]],  // (Dh)
                               device const float2* turns              [[buffer(6)]],  // (rows, R / 2)
                               device const args::Sequence* sequences  [[buffer(7)]],  // (rows or 1)
                               device const Page* tables               [[buffer(8)]],  // (as many, p.pages)
                               // (rows, H, spans, Dh + 2)
                               device float* partial                   [[buffer(9)]],
                               device float* mixed                     [[buffer(10)]], // (rows, y_stride)
                               uint3 group                             [[threadgroup_position_in_grid]],
                               ushort simd                             [[simdgroup_index_in_threadgroup]],
                               ushort lane                             [[thread_index_in_simdgroup]]) {
    constexpr ushort kWidth = N * kSimd;
    threadgroup float queries[kHeads * kWidth], own[2 * kWidth];  // own: key and value of the row
    threadgroup float own_scales[2];
    threadgroup float tops[kSimds * kHeads], totals[kSimds * kHeads], parts[kSimds * kHeads * kWidth];

    const uint Dh = p.head_dim, shared = p.heads / p.kv_heads, blocks = (shared + kHeads - 1) / kHeads;
    const uint kv_head = group.y / blocks, first = group.y % blocks * kHeads;
    const uint heads = min(uint(kHeads), shared - first);  // of this threadgroup, from first_head on
    const uint row = group.z, first_head = row * p.heads + kv_head * shared + first;
    const uint sequence = p.appends ? row : 0;
    const uint position = sequences[sequence].position + (p.appends ? 0 : p.before + row);
    const uint span = args::span_of(position + 1, p.fixed_from);
    const uint begin = group.x * span, end = min(begin + span, position + 1);
    if (begin >= end) return;  // uniform over the threadgroup
    const bool appends = p.appends && end == position + 1;
    device const Page* pages = tables + sequence * p.pages;

    for (ushort h = simd; h < heads; h += kSimds) {
        device const float* query = qg + (first_head + h) * 2 * Dh;
        float x[N];
        if (p.turned) {
            load<false, N>(query, Dh, lane, x);
        } else {
            normed<N>(query, q_norm, turns + row * (p.rotary_dim / 2), p, lane, x);
        }
        for (ushort i = 0; i < N; ++i) queries[h * kWidth + lane * N + i] = x[i] * precise::rsqrt(float(Dh));
    }
    if (appends && simd == kSimds - 1) {
        const uint in = (row * p.kv_heads + kv_head) * Dh;
        float key[N], value[N];
        normed<N>(k + in, k_norm, turns + row * (p.rotary_dim / 2), p, lane, key);
        load<false, N>(v + in, Dh, lane, value);
        device KV* out = key_at<KV>(pages, p, kv_head, position);
        const float key_scale = keep<KV, N>(key), value_scale = keep<KV, N>(value);
        if (Kept<KV>::kScaled && lane == 0) {
            own_scales[0] = key_scale;
            own_scales[1] = value_scale;
            if (first == 0) {
                *scale_of(out, Dh, position) = key_scale;
                *scale_of(out + p.plane, Dh, position) = value_scale;
            }
        }
        for (ushort i = 0; i < N; ++i) {
            const uint d = lane * N + i;
            own[d] = key[i];
            own[kWidth + d] = value[i];
            if (first != 0 || d >= Dh) continue;
            out[d] = KV(key[i]);
            out[p.plane + d] = KV(value[i]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float q[kHeads][N], y[kHeads][N], top[kHeads], total[kHeads];
    for (ushort h = 0; h < kHeads; ++h) {
        top[h] = -INFINITY;
        total[h] = 0;
        for (ushort i = 0; i < N; ++i) {
            q[h][i] = queries[min(uint(h), heads - 1) * kWidth + lane * N + i];
            y[h][i] = 0;
        }
    }
    const uint others = appends ? position : end;  // behind the last position whose row lies in its page
    for (uint run = begin + simd * kKeys; run < end; run += kSimds * kKeys) {
        // The loads of a run are under way at once. One past the last repeats it and counts for nothing.
        float keys[kKeys][N], values[kKeys][N], key_scales[kKeys], value_scales[kKeys];
        if (run < others) {
            device const KV* rows = key_at<KV>(pages, p, kv_head, run);
            for (ushort j = 0; j < kKeys; ++j) {
                const uint at = min(run + j, others - 1);
                device const KV* row = rows + (at - run) * Dh;
                load<kWide, N>(row, Dh, lane, keys[j]);
                load<kWide, N>(row + p.plane, Dh, lane, values[j]);
                key_scales[j] = Kept<KV>::kScaled ? *scale_of(row, Dh, at) : 1.0f;
                value_scales[j] = Kept<KV>::kScaled ? *scale_of(row + p.plane, Dh, at) : 1.0f;
            }
        }
        if (appends && run + kKeys > others)
            for (ushort j = 0; j < kKeys; ++j) {
                if (run + j < others) continue;
                for (ushort i = 0; i < N; ++i) {
                    keys[j][i] = own[lane * N + i];
                    values[j][i] = own[kWidth + lane * N + i];
                }
                key_scales[j] = Kept<KV>::kScaled ? own_scales[0] : 1.0f;
                value_scales[j] = Kept<KV>::kScaled ? own_scales[1] : 1.0f;
            }
        float share[kHeads][kKeys];
        for (ushort j = 0; j < kKeys; ++j)
            for (ushort h = 0; h < kHeads; ++h) {
                float score = 0;
                for (ushort i = 0; i < N; ++i) score = fma(q[h][i], keys[j][i], score);
                score = simd_sum(score);
                if (Kept<KV>::kScaled) score *= key_scales[j];
                share[h][j] = run + j < end ? score : -INFINITY;
            }
        for (ushort h = 0; h < kHeads; ++h) {
            float now = top[h], sum = 0;
            for (ushort j = 0; j < kKeys; ++j) now = max(now, share[h][j]);
            for (ushort j = 0; j < kKeys; ++j) {
                share[h][j] = precise::exp(share[h][j] - now);
                sum += share[h][j];
            }
            const float shrink = precise::exp(top[h] - now);
            top[h] = now;
            total[h] = fma(total[h], shrink, sum);
            for (ushort i = 0; i < N; ++i) y[h][i] *= shrink;
        }
        for (ushort h = 0; h < kHeads; ++h)
            for (ushort j = 0; j < kKeys; ++j) {
                const float weight = Kept<KV>::kScaled ? share[h][j] * value_scales[j] : share[h][j];
                for (ushort i = 0; i < N; ++i) y[h][i] = fma(weight, values[j][i], y[h][i]);
            }
    }
    for (ushort h = 0; h < kHeads; ++h) {
        if (lane == 0) {
            tops[simd * kHeads + h] = top[h];
            totals[simd * kHeads + h] = total[h];
        }
        for (ushort i = 0; i < N; ++i) parts[(simd * kHeads + h) * kWidth + lane * N + i] = y[h][i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint h = simd; h < heads; h += kSimds) {  // a SIMD-group puts a head together
        float highest = -INFINITY, sum = 0, weight[kSimds];
        for (ushort s = 0; s < kSimds; ++s) highest = max(highest, tops[s * kHeads + h]);
        for (ushort s = 0; s < kSimds; ++s) {
            weight[s] = precise::exp(tops[s * kHeads + h] - highest);
            sum = fma(totals[s * kHeads + h], weight[s], sum);
        }
        const uint head = first_head + h;
        const bool finished = span > position;  // there is one span
        device float* out = partial + (head * p.spans + group.x) * (Dh + 2);
        if (!finished && lane == 0) {
            out[0] = highest;
            out[1] = sum;
        }
        for (uint d = lane; d < Dh; d += kSimd) {
            float value = 0;
            for (ushort s = 0; s < kSimds; ++s)
                value = fma(parts[(s * kHeads + h) * kWidth + d], weight[s], value);
            if (finished) {
                mixed[row * p.y_stride + (head - row * p.heads) * Dh + d] =
                    value / sum * sigmoid(qg[(head * 2 + 1) * Dh + d]);
            } else {
                out[2 + d] = value;
            }
        }
    }
}

// attn_mix, decode of long contexts, second part: puts the spans of a head together in their order,
// divides, and applies the gate. A threadgroup takes one head of one row, a thread every 256th dimension:
// the maxima and sums of all spans, which each thread reads anew, are few. The grid is (H, rows).
[[kernel]] void attn_mix_merge(constant args::Attention& p             [[buffer(0)]],
                               device const args::Sequence* sequences  [[buffer(1)]],  // (rows or 1)
                               // (rows, H, spans, Dh + 2)
                               device const float* partial             [[buffer(2)]],
                               device const float* qg                  [[buffer(3)]],  // (rows, H, 2, Dh)
                               device float* mixed                     [[buffer(4)]],  // (rows, y_stride)
                               uint2 group                             [[threadgroup_position_in_grid]],
                               uint thread_index                       [[thread_index_in_threadgroup]],
                               uint threads                            [[threads_per_threadgroup]]) {
    const uint head = group.x, row = group.y, Dh = p.head_dim, result = Dh + 2;
    const uint position = sequences[p.appends ? row : 0].position + (p.appends ? 0 : p.before + row);
    const uint spans = position / args::span_of(position + 1, p.fixed_from) + 1;
    if (spans == 1) return;  // finished by attn_mix_split
    device const float* in = partial + (row * p.heads + head) * p.spans * result;
    float highest = -INFINITY, sum = 0;
    for (uint s = 0; s < spans; ++s) highest = max(highest, in[s * result]);
    for (uint s = 0; s < spans; ++s)
        sum = fma(in[s * result + 1], precise::exp(in[s * result] - highest), sum);
    for (uint d = thread_index; d < Dh; d += threads) {
        float value = 0;
        for (uint s = 0; s < spans; ++s)
            value = fma(in[s * result + 2 + d], precise::exp(in[s * result] - highest), value);
        mixed[row * p.y_stride + head * Dh + d] =
            value / sum * sigmoid(qg[((row * p.heads + head) * 2 + 1) * Dh + d]);
    }
}

#define instantiate_attn_mix_place(name, KV, n)                         \
    template [[host_name("attn_mix_place_" #name "_" #n)]] [[kernel]] \
    decltype(attn_mix_place<KV, n>) attn_mix_place<KV, n>;
#define instantiate_attn_mix_turn(n) \
    template [[host_name("attn_mix_turn_" #n)]] [[kernel]] decltype(attn_mix_turn<n>) attn_mix_turn<n>;
instantiate_attn_mix_turn(1)
instantiate_attn_mix_turn(2)
instantiate_attn_mix_turn(4)
instantiate_attn_mix_turn(8)

#define instantiate_attn_mix_split(name, KV, n, heads, wide)                                     \
    template [[host_name("attn_mix_split_" #name "_" #n "_" #heads "_" #wide)]] [[kernel]]       \
    decltype(attn_mix_split<KV, n, heads, wide>) attn_mix_split<KV, n, heads, wide>;
#define instantiate_attn_mix(name, KV, n)            \
    instantiate_attn_mix_place(name, KV, n)          \
    instantiate_attn_mix_split(name, KV, n, 1, false) \
    instantiate_attn_mix_split(name, KV, n, 4, false)
instantiate_attn_mix(bf16, bfloat, 1)
instantiate_attn_mix(bf16, bfloat, 2)
instantiate_attn_mix(bf16, bfloat, 4)
instantiate_attn_mix(bf16, bfloat, 8)
instantiate_attn_mix(f32, float, 1)
instantiate_attn_mix(f32, float, 2)
instantiate_attn_mix(f32, float, 4)
instantiate_attn_mix(f32, float, 8)
instantiate_attn_mix(int8, char, 1)
instantiate_attn_mix(int8, char, 2)
instantiate_attn_mix(int8, char, 4)
instantiate_attn_mix(int8, char, 8)
instantiate_attn_mix_split(bf16, bfloat, 8, 1, true)
instantiate_attn_mix_split(bf16, bfloat, 8, 4, true)
