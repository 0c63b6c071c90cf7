// Attention of many rows of a sequence, in matrix tiles: behind attn_mix_place of attention.metal, which has
// put their keys and values into their pages.
#include "attention.h"
#include "norm.h"
#include "tile.h"

using namespace lily;

namespace {

constant constexpr ushort kSimds = 4;   // SIMD-groups that share a block of rows
constant constexpr ushort kRows = 32;   // rows times heads of a tile of queries
constant constexpr ushort kBlock = 64;  // positions of a tile of keys: as csrc/gpu/attention.cpp clears them

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

// attn_mix of many rows of a sequence, second part: a threadgroup takes kRows query rows that share a
// key/value head, its heads token by token, and walks the positions in blocks of kBlock from 0, with a
// softmax that keeps a running maximum and sum. Scores and results go through tiles of bf16 with float32
// sums: a SIMD-group makes the scores of every row with a quarter of the block's keys, then the
// results of every row in a quarter of the dimensions, so that it alone reads those keys and values, a panel
// of each; between the two, four threads a row turn scores into bf16 shares in
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
                               threadgroup uchar* landing              [[threadgroup(0)]],  // of the panels
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

    Panel<kTile, Dh> keys;          // this SIMD-group's of a block
    Panel<kBlock, kColumns> values;  // all of the block's, in this SIMD-group's dimensions
    values.template begin<kSimds>(keys.template begin<kSimds>(landing, simd), simd);
    keys.ask(key_at<bfloat>(pages, p, kv_head, 0) + simd * kTile * Dh, Dh, true, lane);
    for (uint begin = 0; begin < end; begin += kBlock) {
        values.ask(key_at<bfloat>(pages, p, kv_head, begin) + p.plane + simd * kColumns, Dh, true, lane);
        keys.wait();
        Sum score[kRowTiles];
        for (ushort r = 0; r < kRowTiles; ++r) score[r].clear();
        for (ushort d = 0; d < Dh; d += kDepth) {
            Right key;
            keys.load_transposed(key, 0, d);
            for (ushort r = 0; r < kRowTiles; ++r) {
                Left query;
                query.load(queries + r * kTile * kQueryStride + d, kQueryStride);
                score[r].add(query, key);
            }
        }
        for (ushort r = 0; r < kRowTiles; ++r)
            score[r].store(scores + r * kTile * kScoreStride + simd * kTile, kScoreStride);
        const uint next = min(begin + kBlock, end - 1) / kBlock * kBlock;
        keys.ask(key_at<bfloat>(pages, p, kv_head, next) + simd * kTile * Dh, Dh, begin + kBlock < end, lane);
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
        values.wait();
        for (ushort c = 0; c < kBlock; c += kDepth) {
            Left share[kRowTiles];
            for (ushort r = 0; r < kRowTiles; ++r)
                share[r].load(shares + r * kTile * kShareStride + c, kShareStride);
            for (ushort d = 0; d < kTiles; ++d) {
                PlainRight value;
                values.load(value, c, d * kTile);
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

#define instantiate_attn_mix_flash(dims)                        \
    template [[host_name(LILY_TILED("attn_mix_flash_" #dims))]] [[kernel]] \
    decltype(attn_mix_flash<dims>) attn_mix_flash<dims>;
instantiate_attn_mix_flash(64)
instantiate_attn_mix_flash(128)
instantiate_attn_mix_flash(256)
