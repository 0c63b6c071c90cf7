// Where attention finds keys and values, how they are kept, and what a head's row becomes before it meets
// another: what the kernels that go row by row share with those that take tiles.
#pragma once

#include <metal_stdlib>

#include "args.h"
#include "quant.h"

namespace lily {

using namespace metal;

constant constexpr uint kPage = 256;  // positions of a page

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

// The same of floats: 16 bytes at a time if wide, which needs Dh = 32 N and N a multiple of 4.
template <bool kWide, ushort N>
METAL_FUNC void load_floats(device const float* row, uint Dh, ushort lane, thread float* x) {
    if (!kWide) return load<false, N>(row, Dh, lane, x);
    for (ushort i = 0; i < N; i += 4) {
        const float4 four = *(device const float4*)(row + lane * N + i);
        for (ushort j = 0; j < 4; ++j) x[i + j] = four[j];
    }
}

// A head's row of q or k, normed, then turned by RoPE: dimension i with i + R / 2. A lane gets N
// consecutive dimensions, zeros past Dh. turns: (R / 2), cosine and sine of the row's position. Wide, R / 2
// is a multiple of N, so that a lane's partners are another lane's.
template <ushort N, bool kWide = false>
METAL_FUNC void normed(device const float* in, device const float* norm, device const float2* turns,
                       constant args::Attention& p, ushort lane, thread float* out) {
    const uint Dh = p.head_dim, half_turns = p.rotary_dim / 2;
    float weight[N], squares = 0;
    load_floats<kWide, N>(in, Dh, lane, out);
    load_floats<kWide, N>(norm, Dh, lane, weight);
    for (ushort i = 0; i < N; ++i) squares = fma(out[i], out[i], squares);
    const float scale = precise::rsqrt(simd_sum(squares) / float(Dh) + p.epsilon);
    for (ushort i = 0; i < N; ++i) out[i] = out[i] * scale * weight[i];
    const bool low = lane * N < half_turns;
    float partner[N];
    if (kWide)
        for (ushort i = 0; i < N; ++i)
            partner[i] = simd_shuffle(
                out[i], ushort(low ? lane + half_turns / N : lane - half_turns / N) % kSimd);
    for (ushort i = 0; i < N; ++i) {
        const uint d = lane * N + i;
        if (d >= p.rotary_dim) break;
        const bool first = kWide ? low : d < half_turns;
        const uint other = first ? d + half_turns : d - half_turns;
        const float2 turn = turns[min(d, other)];
        if (!kWide) partner[i] = in[other] * scale * norm[other];
        out[i] = fma(out[i], turn.x, first ? -(partner[i] * turn.y) : partner[i] * turn.y);
    }
}

// How attn_mix_split shares work out: a threadgroup takes the rows of a head's keys and values kSplitBlock
// at a time. A SIMD-group scores kSplitKeys of them, and then sums all of them up in its share of the
// dimensions, so that every number is read by one lane. Four lanes have a row's numbers, N at a time.
constant constexpr ushort kSplitSimds = 8;
constant constexpr ushort kQuarters = 4;
constant constexpr ushort kSplitKeys = kSimd / kQuarters;
constant constexpr ushort kSplitBlock = kSplitSimds * kSplitKeys;
constant constexpr ushort kScoreStride = kSplitBlock + 16;  // floats of a head's scores: banks for the lanes

// Rows of one key/value head that lie in one page, and, behind them, perhaps one in threadgroup memory,
// which a row's own position brings along.
template <typename KV>
struct SplitBlock {
    device const KV* keys;  // the values lie `plane` numbers further
    uint plane, Dh, position;
    ushort placed, own;  // rows that lie in the page; the row that does not, or kSplitBlock
};
template <typename KV>
struct OwnRow {
    threadgroup const KV* numbers;    // (2, 32 N): key and value
    threadgroup const float* scales;  // (2)
};

// N numbers of a row of keys, or (part = 1) of values, and their scale.
template <bool kWide, ushort N, typename KV>
METAL_FUNC float row_piece(thread const SplitBlock<KV>& block, thread const OwnRow<KV>& own, ushort row,
                           ushort part, ushort piece, thread float* x) {
    if (row == block.own || block.placed == 0) {
        for (ushort i = 0; i < N; ++i)
            x[i] = row == block.own ? float(own.numbers[(part * kSimd + piece) * N + i]) : 0.0f;
        return Kept<KV>::kScaled && row == block.own ? own.scales[part] : 1.0f;
    }
    const uint at =
        min(row, ushort(block.placed - 1));  // one past the last repeats it and counts for nothing
    device const KV* from = block.keys + part * block.plane + at * block.Dh;
    load<kWide, N>(from, block.Dh, piece, x);
    return Kept<KV>::kScaled ? *scale_of((device KV*)from, block.Dh, block.position + at) : 1.0f;
}

// A head's query, which a SIMD-group has N consecutive dimensions a lane of, among those of a threadgroup.
template <typename KV, ushort N, ushort kHeads, bool kWide>
struct SplitQueries {
    METAL_FUNC static void put(threadgroup float* queries, ushort head, ushort lane, thread const float* x) {
        for (ushort i = 0; i < N; ++i) queries[(head * kSimd + lane) * N + i] = x[i];
    }
};

// The scores of a block's rows: a lane adds up a quarter of a row's dimensions.
template <typename KV, ushort N, ushort kHeads, bool kWide>
struct SplitScores {
    METAL_FUNC void load(thread const SplitBlock<KV>&, ushort, ushort) {}  // as they are used

    // scores: (kHeads, kScoreStride)
    METAL_FUNC void write(thread const SplitBlock<KV>& block, thread const OwnRow<KV>& own,
                          threadgroup const float* queries, threadgroup float* scores, ushort simd,
                          ushort lane) {
        const ushort row = simd * kSplitKeys + lane / kQuarters, quarter = lane % kQuarters;
        float sum[kHeads] = {}, scale = 1;
        for (ushort j = 0; j < kSimd; j += kQuarters) {
            float key[N];
            scale = row_piece<kWide, N>(block, own, row, 0, j + quarter, key);
            for (ushort h = 0; h < kHeads; ++h)
                for (ushort i = 0; i < N; ++i)
                    sum[h] = fma(queries[(h * kSimd + j + quarter) * N + i], key[i], sum[h]);
        }
        for (ushort h = 0; h < kHeads; ++h) {
            sum[h] += simd_shuffle_xor(sum[h], 1);
            sum[h] += simd_shuffle_xor(sum[h], 2);
            if (h % kQuarters == quarter) scores[h * kScoreStride + row] = sum[h] * scale;
        }
    }
};

// A head's shares of two neighbouring rows, in the place of its scores.
template <typename KV, ushort N, ushort kHeads, bool kWide>
struct SplitShares {
    METAL_FUNC static void put(threadgroup float* scores, ushort lane, float2 shares) {
        *(threadgroup float2*)(scores + 2 * lane) = shares;
    }
};

// The sums of values by their shares: a lane has N dimensions of every eighth row.
template <typename KV, ushort N, ushort kHeads, bool kWide>
struct SplitSums {
    float y[kHeads][N];

    METAL_FUNC void clear() {
        for (ushort h = 0; h < kHeads; ++h)
            for (ushort i = 0; i < N; ++i) y[h][i] = 0;
    }
    METAL_FUNC void load(thread const SplitBlock<KV>&, ushort, ushort) {}  // as they are used

    // shrinks: (kHeads), what comes before is multiplied with
    METAL_FUNC void add(thread const SplitBlock<KV>& block, thread const OwnRow<KV>& own,
                        threadgroup const float* shares, threadgroup const float* shrinks, ushort simd,
                        ushort lane) {
        const ushort piece = simd * kQuarters + lane % kQuarters;
        for (ushort h = 0; h < kHeads; ++h)
            for (ushort i = 0; i < N; ++i) y[h][i] *= shrinks[h];
        for (ushort j = 0; j < kSplitBlock; j += kSplitKeys) {
            const ushort row = j + lane / kQuarters;
            float value[N];
            const float scale = row_piece<kWide, N>(block, own, row, 1, piece, value);
            for (ushort h = 0; h < kHeads; ++h) {
                const float share = shares[h * kScoreStride + row] * scale;
                for (ushort i = 0; i < N; ++i) y[h][i] = fma(share, value[i], y[h][i]);
            }
        }
    }

    // out: the lane's N dimensions of head lane / 4
    METAL_FUNC void sums(ushort lane, thread float* out) {
        for (ushort h = 0; h < kHeads; ++h)
            for (ushort i = 0; i < N; ++i) {
                float sum = y[h][i];
                for (ushort step = kQuarters; step < kSimd; step *= 2) sum += simd_shuffle_xor(sum, step);
                if (h == 0 || h == lane / kQuarters) out[i] = sum;
            }
    }
};

#ifdef LILY_ATTENTION
#include LILY_ATTENTION
#endif

}  // namespace lily
