// Attention between its projections: q and k norms, RoPE and the append; attention over spans of
// positions, and their merge; attention of many rows at once in matrix tiles; the gate. Keys and values
// lie in pages of 256 positions, (G, 256, Dh) each, of which a table has the addresses. Every sum runs
// over a grid of positions that starts at 0 and does not depend on the other rows of a dispatch, so a
// row's bits do not either.
#include "norm.h"
#include "quant.h"
#include "tile.h"

using namespace lily;

namespace {

constant constexpr uint kPage = 256;     // positions of a page
constant constexpr ushort kSimds = 4;    // SIMD-groups that share a span, or a block of rows
constant constexpr ushort kKeys = 4;     // consecutive positions that a SIMD-group takes at a time
constant constexpr ushort kRows = 32;    // rows times heads of a tile of queries
constant constexpr ushort kBlock = 64;   // positions of a tile of keys: as csrc/gpu/attention.cpp clears them

struct Page {
    device uchar* data;
};

// How keys and values are kept: as numbers, or, in int8, as multiples of a row's scale. The scales of a
// head's 256 rows follow them, so a row's lies 4 (position % kPage) bytes behind the last row's end.
template <typename KV>
struct Kept {
    enum { kScaled = 0, kNumbersOfScale = 0 };
};
template <>
struct Kept<char> {
    enum { kScaled = 1, kNumbersOfScale = 4 };
};

// A head's key at a position. Those of later positions of the page follow it; its value lies p.plane
// numbers further.
template <typename KV>
METAL_FUNC device KV* key_at(device const Page* pages, constant args::Attention& p, uint kv_head,
                             uint position) {
    device KV* layer = (device KV*)pages[position / kPage].data + 2 * p.layer * p.plane;
    return layer + kv_head * kPage * (p.head_dim + Kept<KV>::kNumbersOfScale) + position % kPage * p.head_dim;
}

// The scale of a row, key or value, at a position.
template <typename KV>
METAL_FUNC device float* scale_of(device KV* row, uint Dh, uint position) {
    const uint slot = position % kPage;
    return (device float*)(row + (kPage - slot) * Dh) + slot;
}

// A lane's numbers of a row as they are kept, as floats, and the row's scale: 1 unless it is scaled.
template <typename KV, ushort N>
METAL_FUNC float keep(thread float* x) {
    if (!Kept<KV>::kScaled) {
        for (ushort i = 0; i < N; ++i) x[i] = float(KV(x[i]));
        return 1;
    }
    float most = 0;
    for (ushort i = 0; i < N; ++i) most = max(most, abs(x[i]));
    const float scale = simd_max(most) / 127.0f;
    for (ushort i = 0; i < N; ++i) x[i] = scale > 0.0f ? rint(x[i] / scale) : 0.0f;
    return scale;
}

// A head's row of q or k, normed, then turned by RoPE: dimension i with i + R / 2. A lane gets N
// consecutive dimensions, zeros past Dh. turns: (R / 2), cosine and sine of the row's position.
template <ushort N>
METAL_FUNC void normed(device const float* in, device const float* norm, device const float2* turns,
                       constant args::Attention& p, ushort lane, thread float* out) {
    const uint Dh = p.head_dim, half_turns = p.rotary_dim / 2;
    float squares = 0;
    for (ushort i = 0; i < N; ++i) {
        const uint d = lane * N + i;
        out[i] = d < Dh ? in[d] : 0.0f;
        squares = fma(out[i], out[i], squares);
    }
    const float scale = precise::rsqrt(simd_sum(squares) / float(Dh) + p.epsilon);
    for (ushort i = 0; i < N; ++i) {
        const uint d = lane * N + i;
        if (d >= Dh) continue;
        out[i] = out[i] * scale * norm[d];
        if (d >= p.rotary_dim) continue;
        const bool low = d < half_turns;
        const uint other = low ? d + half_turns : d - half_turns;
        const float2 turn = turns[min(d, other)];
        const float partner = in[other] * scale * norm[other];
        out[i] = fma(out[i], turn.x, low ? -(partner * turn.y) : partner * turn.y);
    }
}

// A lane's N consecutive numbers of a row of Dh, zeros past its end: one 16-byte load if wide, which needs
// Dh = 32 N and N = 8 numbers of 2 bytes.
template <bool kWide, ushort N, typename T>
METAL_FUNC void load(device const T* row, uint Dh, ushort lane, thread float* x) {
    if (kWide) {
        const uint4 pairs = ((device const uint4*)row)[lane];  // a bfloat is the upper half of a float
        const float4 even = as_type<float4>(pairs << 16), odd = as_type<float4>(pairs & 0xffff0000u);
        for (ushort i = 0; i < 4; ++i) {
            x[2 * i] = even[i];
            x[2 * i + 1] = odd[i];
        }
    } else {
        for (ushort i = 0; i < N; ++i) x[i] = lane * N + i < Dh ? float(row[lane * N + i]) : 0.0f;
    }
}

// An element of attn_mix_flash's result: divided by its row's sum, gated, and written if there is such a row.
struct Finish {
    constant args::Attention& p;
    device const float* qg;
    device float* mixed;
    threadgroup const float* totals;  // of the tile's rows
    uint first, last;                 // the tile's first row, and the last that there is
    uint kv_head, column;             // the tile's first dimension

    METAL_FUNC void operator()(ushort r, ushort c, float value) const {
        if (first + r > last) return;
        const uint shared = p.heads / p.kv_heads, Dh = p.head_dim, d = column + c;
        const uint t = (first + r) / shared, head = kv_head * shared + (first + r) % shared;
        const float gate = sigmoid(qg[((t * p.heads + head) * 2 + 1) * Dh + d]);
        mixed[t * p.y_stride + head * Dh + d] = value / totals[r] * gate;
    }
};

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
    for (uint run = begin + simd * kKeys; run < end; run += kSimds * kKeys) {
        device const KV* keys = key_at<KV>(pages, p, kv_head, run);
        float share[kHeads][kKeys], x[N];
        for (ushort j = 0; j < kKeys; ++j) {
            const bool present = run + j < end, is_own = appends && run + j == position;
            if (is_own) {
                for (ushort i = 0; i < N; ++i) x[i] = own[lane * N + i];
            } else if (present) {
                load<kWide, N>(keys + j * Dh, Dh, lane, x);
            }
            float scale = 1;
            if (Kept<KV>::kScaled && present)
                scale = is_own ? own_scales[0] : *scale_of(keys + j * Dh, Dh, run + j);
            for (ushort h = 0; h < kHeads; ++h) {
                float score = 0;
                for (ushort i = 0; i < N && present; ++i) score = fma(q[h][i], x[i], score);
                share[h][j] = present ? simd_sum(score) : -INFINITY;
                if (Kept<KV>::kScaled) share[h][j] *= scale;
            }
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
        for (ushort j = 0; j < kKeys; ++j) {
            if (run + j >= end) break;
            const bool is_own = appends && run + j == position;
            if (is_own) {
                for (ushort i = 0; i < N; ++i) x[i] = own[kWidth + lane * N + i];
            } else {
                load<kWide, N>(keys + p.plane + j * Dh, Dh, lane, x);
            }
            if (Kept<KV>::kScaled) {
                const float scale = is_own ? own_scales[1] : *scale_of(keys + p.plane + j * Dh, Dh, run + j);
                for (ushort h = 0; h < kHeads; ++h) share[h][j] *= scale;
            }
            for (ushort h = 0; h < kHeads; ++h)
                for (ushort i = 0; i < N; ++i) y[h][i] = fma(share[h][j], x[i], y[h][i]);
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

// attn_mix of many rows of a sequence, second part: a threadgroup takes kRows query rows that share a
// key/value head, its heads token by token, and walks the positions in blocks of kBlock from 0, with a
// softmax that keeps a running maximum and sum. Scores and results go through tiles of bf16 with float32
// sums: a SIMD-group makes the scores of every row with a quarter of the block's keys, then the
// results of every row in a quarter of the dimensions, so that it alone reads those keys and values,
// straight from their page; between the two, four threads a row turn scores into bf16 shares in
// threadgroup memory. The shares that are summed are the rounded ones. A block that lies after a row
// leaves it as it was. The grid is (tiles of rows, G). Threadgroup memory: 30 KB at Dh = 256, most of it
// the queries.
template <ushort Dh>
[[kernel]] void attn_mix_flash(constant args::Attention& p             [[buffer(0)]],
                               device const float* qg                  [[buffer(1)]],  // (tokens, H, 2, Dh)
                               device const float* q_norm              [[buffer(2)]],  // (Dh)
                               device const float2* turns              [[buffer(3)]],  // (tokens, R / 2)
                               device const args::Sequence* sequences  [[buffer(4)]],  // (1)
                               device const Page* pages                [[buffer(5)]],
                               device float* mixed                     [[buffer(6)]],  // (tokens, y_stride)
                               uint2 group                             [[threadgroup_position_in_grid]],
                               ushort thread_index                     [[thread_index_in_threadgroup]],
                               ushort simd                             [[simdgroup_index_in_threadgroup]],
                               ushort lane                             [[thread_index_in_simdgroup]]) {
    constexpr ushort N = Dh / kSimd, kThreadsOfRow = kSimds * kSimd / kRows;
    constexpr ushort kRowTiles = kRows / kTile, kColumns = Dh / kSimds, kTiles = kColumns / kTile;
    constexpr ushort kQueryStride = Dh + 8, kScoreStride = kBlock + 4, kShareStride = kBlock + 8;
    static_assert(kBlock == kSimds * kTile, "a SIMD-group makes the scores of one tile of keys");
    threadgroup bfloat queries[kRows * kQueryStride], shares[kRows * kShareStride];
    threadgroup float scores[kRows * kScoreStride], totals[kRows], shrinks[kRowTiles * kScale];

    const uint shared = p.heads / p.kv_heads, rows = p.tokens * shared, kv_head = group.y;
    const uint first = group.x * kRows, last = min(first + kRows, rows) - 1;
    const uint end = sequences[0].position + last / shared + 1;
    for (ushort r = simd; r < kRows; r += kSimds) {
        const uint t = min(first + r, last) / shared, head = kv_head * shared + min(first + r, last) % shared;
        float x[N];
        normed<N>(qg + (t * p.heads + head) * 2 * Dh, q_norm, turns + t * (p.rotary_dim / 2), p, lane, x);
        for (ushort i = 0; i < N; ++i)  // so that exp2 of a score is what exp of the unscaled one would be
            queries[r * kQueryStride + lane * N + i] = bfloat(x[i] * precise::rsqrt(float(Dh)) * M_LOG2E_F);
    }
    for (ushort i = thread_index; i < kRowTiles * kScale; i += kSimds * kSimd) shrinks[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const ushort row = thread_index / kThreadsOfRow, part = thread_index % kThreadsOfRow;  // of the softmax
    const uint seen = sequences[0].position + min(first + row, last) / shared + 1;
    float top = -INFINITY, total = 0;
    PlainSum y[kRowTiles][kTiles];
    for (ushort r = 0; r < kRowTiles; ++r)
        for (ushort d = 0; d < kTiles; ++d) y[r][d].clear();

    for (uint begin = 0; begin < end; begin += kBlock) {
        device bfloat* keys = key_at<bfloat>(pages, p, kv_head, begin);
        Sum score[kRowTiles];
        for (ushort r = 0; r < kRowTiles; ++r) score[r].clear();
        for (ushort d = 0; d < Dh; d += kDepth) {
            Right key;
            key.load_transposed(keys + simd * kTile * Dh + d, Dh);
            for (ushort r = 0; r < kRowTiles; ++r) {
                Left query;
                query.load(queries + r * kTile * kQueryStride + d, kQueryStride);
                score[r].add(query, key);
            }
        }
        for (ushort r = 0; r < kRowTiles; ++r)
            score[r].store(scores + r * kTile * kScoreStride + simd * kTile, kScoreStride);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        float x[kBlock / kThreadsOfRow], highest = top, sum = 0;
        for (ushort i = 0; i < kBlock / kThreadsOfRow; ++i) {
            const ushort c = i * kThreadsOfRow + part;
            x[i] = begin + c < seen ? scores[row * kScoreStride + c] : -INFINITY;
            highest = max(highest, x[i]);
        }
        for (ushort step = 1; step < kThreadsOfRow; step *= 2)
            highest = max(highest, simd_shuffle_xor(highest, step));
        for (ushort i = 0; i < kBlock / kThreadsOfRow; ++i) {
            const bfloat share = bfloat(precise::exp2(x[i] - highest));
            shares[row * kShareStride + i * kThreadsOfRow + part] = share;
            sum += float(share);
        }
        for (ushort step = 1; step < kThreadsOfRow; step *= 2) sum += simd_shuffle_xor(sum, step);
        const float shrink = precise::exp2(top - highest);
        total = fma(total, shrink, sum);
        top = highest;
        if (part == 0) RowScale::put(shrinks + row / kTile * kScale, row % kTile, shrink);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (ushort r = 0; r < kRowTiles; ++r) {
            RowScale shrinking;
            shrinking.load(shrinks + r * kScale);
            for (ushort d = 0; d < kTiles; ++d) y[r][d].scale(shrinking);
        }
        device bfloat* values = keys + p.plane + simd * kColumns;
        for (ushort c = 0; c < kBlock; c += kDepth) {
            Left share[kRowTiles];
            for (ushort r = 0; r < kRowTiles; ++r)
                share[r].load(shares + r * kTile * kShareStride + c, kShareStride);
            for (ushort d = 0; d < kTiles; ++d) {
                PlainRight value;
                value.load(values + c * Dh + d * kTile, Dh);
                for (ushort r = 0; r < kRowTiles; ++r) y[r][d].add(share[r], value);
            }
        }
    }
    if (part == 0) totals[row] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float* stage = scores + simd * kStage;
    for (ushort r = 0; r < kRowTiles; ++r)
        for (ushort d = 0; d < kTiles; ++d)
            y[r][d].each(Finish{p, qg, mixed, totals + r * kTile, first + r * kTile, last, kv_head,
                                uint(simd) * kColumns + d * kTile},
                         stage, lane);
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

#define instantiate_attn_mix_flash(dims)                        \
    template [[host_name("attn_mix_flash_" #dims)]] [[kernel]] \
    decltype(attn_mix_flash<dims>) attn_mix_flash<dims>;
instantiate_attn_mix_flash(64)
instantiate_attn_mix_flash(128)
instantiate_attn_mix_flash(256)
