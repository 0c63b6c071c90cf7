// Attention between its projections, row by row: q and k norms, RoPE and the append; attention over spans of
// positions, and their merge; the gate. Keys and values lie in pages of 256 positions, (G, 256, Dh) each, of
// which a table has the addresses. Every sum runs over a grid of positions that starts at 0 and does not
// depend on the other rows of a dispatch, so a row's bits do not either.
#include "attention.h"
#include "norm.h"

using namespace lily;

namespace {

constant constexpr ushort kMergeSimds = 8;   // SIMD-groups that share the spans of a row
constant constexpr ushort kMergeWidth = 64;  // dimensions of a head that a threadgroup merges

// The block of rows from a position on, of those before `others` and the own one there.
template <typename KV>
METAL_FUNC void split_block(thread SplitBlock<KV>& block, device const Page* pages,
                            constant args::Attention& p, uint kv_head, uint position, uint others,
                            bool appends) {
    block.position = position;
    block.placed = ushort(min(uint(kSplitBlock), others - position));
    block.own = appends && block.placed < kSplitBlock ? block.placed : kSplitBlock;
    if (block.placed != 0) block.keys = key_at<KV>(pages, p, kv_head, position);
}

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
// queries, a SIMD-group a head, which later takes its softmax. Where the dispatch appends, the threadgroups
// of the last span make the row's own key as well and take it from threadgroup memory; the one of the first
// heads writes it into its page, which no other reads there. The span goes by in blocks of rows: scores of
// all heads, shares of all heads with a running maximum, sums of the values. A row of one span is gated and
// finished here, others leave [maximum, sum, Dh unnormalised values] for attn_mix_merge. The grid is
// (spans, G times blocks of heads, rows), so that a long context fills the GPU at one row.
template <typename KV, ushort N, ushort kHeads, bool kWide>
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_mix_split(
                               constant args::Attention& p             [[buffer(0)]],
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
    static_assert(kHeads <= kSplitSimds, "a head belongs to a SIMD-group");
    static_assert(args::kLeastSpan % kSplitBlock == 0, "a block belongs to a span");
    threadgroup float queries[kHeads * kWidth], own_scales[2];
    threadgroup KV own_numbers[2 * kWidth];
    // two blocks' scores: the one is written while the other is still read
    threadgroup float scores[2 * kHeads * kScoreStride], shrinks[2 * kHeads], totals[kHeads];

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

    const uint others = appends ? position : end;  // behind the last position whose row lies in its page
    const OwnRow<KV> own = {own_numbers, own_scales};
    SplitBlock<KV> block;
    block.plane = p.plane;
    block.Dh = Dh;
    SplitScores<KV, N, kHeads, kWide> keys;
    SplitSums<KV, N, kHeads, kWide> values;
    values.clear();
    split_block(block, pages, p, kv_head, begin, others, appends);
    keys.load(block, simd, lane);
    values.load(block, simd, lane);

    if (simd < kHeads) {
        device const float* query = qg + (first_head + min(uint(simd), heads - 1)) * 2 * Dh;
        float x[N];
        if (p.turned) {
            load_floats<kWide, N>(query, Dh, lane, x);
        } else {
            normed<N, kWide>(query, q_norm, turns + row * (p.rotary_dim / 2), p, lane, x);
        }
        for (ushort i = 0; i < N; ++i) x[i] *= precise::rsqrt(float(Dh));
        SplitQueries<KV, N, kHeads, kWide>::put(queries, simd, lane, x);
    }
    if (appends && simd == kSplitSimds - 1) {
        const uint in = (row * p.kv_heads + kv_head) * Dh;
        float key[N], value[N];
        normed<N, kWide>(k + in, k_norm, turns + row * (p.rotary_dim / 2), p, lane, key);
        load_floats<kWide, N>(v + in, Dh, lane, value);
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
            own_numbers[d] = KV(key[i]);
            own_numbers[kWidth + d] = KV(value[i]);
            if (first != 0 || d >= Dh) continue;
            out[d] = KV(key[i]);
            out[p.plane + d] = KV(value[i]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float top = -INFINITY, total = 0;  // of the SIMD-group's head
    ushort turn = 0;
    for (uint at = begin; at < end; at += kSplitBlock, turn = 1 - turn) {
        threadgroup float* score = scores + turn * kHeads * kScoreStride;
        const SplitBlock<KV> now = block;
        keys.write(now, own, queries, score, simd, lane);
        const bool more = at + kSplitBlock < end;
        if (more) {  // is loaded meanwhile
            split_block(block, pages, p, kv_head, at + kSplitBlock, others, appends);
            keys.load(block, simd, lane);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simd < kHeads) {
            threadgroup float* mine = score + simd * kScoreStride;
            float2 x = *(threadgroup const float2*)(mine + 2 * lane);
            for (ushort i = 0; i < 2; ++i) x[i] = at + 2 * lane + i < end ? x[i] : -INFINITY;
            const float highest = max(top, simd_max(max(x[0], x[1])));
            const float2 shares = {precise::exp(x[0] - highest), precise::exp(x[1] - highest)};
            const float shrink = precise::exp(top - highest);
            simdgroup_barrier(mem_flags::mem_threadgroup);  // every score is read
            SplitShares<KV, N, kHeads, kWide>::put(mine, lane, shares);
            total = fma(total, shrink, simd_sum(shares[0] + shares[1]));
            top = highest;
            if (lane == 0) shrinks[turn * kHeads + simd] = shrink;
            if (lane == 0 && !more) totals[simd] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        values.add(now, own, score, shrinks + turn * kHeads, simd, lane);
        if (more) values.load(block, simd, lane);
    }

    float y[N];
    values.sums(lane, y);
    const bool finished = span > position;  // there is one span
    if (!finished && simd < heads && lane == 0) {
        device float* out = partial + ((first_head + simd) * p.spans + group.x) * (Dh + 2);
        out[0] = top;
        out[1] = total;
    }
    const ushort h = lane / kQuarters;
    if (h >= heads) return;
    const uint head = first_head + h;
    device float* out = partial + (head * p.spans + group.x) * (Dh + 2) + 2;
    for (ushort i = 0; i < N; ++i) {
        const uint d = (simd * kQuarters + lane % kQuarters) * N + i;
        if (d >= Dh) continue;
        if (finished) {
            mixed[row * p.y_stride + (head - row * p.heads) * Dh + d] =
                y[i] / totals[h] * sigmoid(qg[(head * 2 + 1) * Dh + d]);
        } else {
            out[d] = y[i];
        }
    }
}

// attn_mix, decode of long contexts, second part: puts the spans of a head together in a fixed order,
// divides, and applies the gate. A threadgroup takes kMergeWidth dimensions of one head of one row, a
// SIMD-group every eighth span, a lane two of the dimensions. The grid is (blocks of dimensions, H, rows).
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_mix_merge(
                               constant args::Attention& p             [[buffer(0)]],
                               device const args::Sequence* sequences  [[buffer(1)]],  // (rows or 1)
                               // (rows, H, spans, Dh + 2)
                               device const float* partial             [[buffer(2)]],
                               device const float* qg                  [[buffer(3)]],  // (rows, H, 2, Dh)
                               device float* mixed                     [[buffer(4)]],  // (rows, y_stride)
                               uint3 group                             [[threadgroup_position_in_grid]],
                               uint thread_index                       [[thread_index_in_threadgroup]],
                               ushort simd                             [[simdgroup_index_in_threadgroup]],
                               ushort lane                             [[thread_index_in_simdgroup]]) {
    threadgroup float parts[kMergeSimds * kMergeWidth], sums[kMergeSimds];
    const uint head = group.y, row = group.z, Dh = p.head_dim, result = Dh + 2;
    const uint position = sequences[p.appends ? row : 0].position + (p.appends ? 0 : p.before + row);
    const uint spans = position / args::span_of(position + 1, p.fixed_from) + 1;
    if (spans == 1) return;  // finished by attn_mix_split
    device const float* in = partial + (row * p.heads + head) * p.spans * result;
    float highest = -INFINITY;
    for (uint s = lane; s < spans; s += kSimd) highest = max(highest, in[s * result]);
    highest = simd_max(highest);
    const uint d = group.x * kMergeWidth + lane;
    float sum = 0, low = 0, high = 0;
#pragma unroll 4
    for (uint s = simd; s < spans; s += kMergeSimds) {
        device const float* one = in + s * result;
        const float weight = precise::exp(one[0] - highest);
        sum = fma(one[1], weight, sum);
        if (d < Dh) low = fma(one[2 + d], weight, low);
        if (d + kSimd < Dh) high = fma(one[2 + d + kSimd], weight, high);
    }
    parts[simd * kMergeWidth + lane] = low;
    parts[simd * kMergeWidth + lane + kSimd] = high;
    if (lane == 0) sums[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint mine = group.x * kMergeWidth + thread_index;
    if (thread_index >= kMergeWidth || mine >= Dh) return;
    float value = 0, whole = 0;
    for (ushort s = 0; s < kMergeSimds; ++s) {
        value += parts[s * kMergeWidth + thread_index];
        whole += sums[s];
    }
    mixed[row * p.y_stride + head * Dh + mine] =
        value / whole * sigmoid(qg[((row * p.heads + head) * 2 + 1) * Dh + mine]);
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
    instantiate_attn_mix_split(name, KV, n, 8, false)
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
instantiate_attn_mix_split(bf16, bfloat, 8, 8, true)
