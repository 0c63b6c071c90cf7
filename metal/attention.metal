// Attention between its projections: q and k norms, RoPE and the append; split attention over spans of
// positions; merge and gate. Keys and values lie in pages of 256 positions, (G, 256, Dh) each, of which a
// table has the addresses.
#include "norm.h"
#include "quant.h"

using namespace lily;

namespace {

constant constexpr uint kPage = 256;        // positions of a page
constant constexpr uint kSpan = 2048;       // positions of one result: as csrc/gpu/ops.cpp counts them
constant constexpr ushort kHeadsOfSimd = 4; // query heads that share a load of keys and values
constant constexpr ushort kSimds = 4;       // SIMD-groups that share a span

struct Page {
    device uchar* data;
};

METAL_FUNC float stored(device const uchar* p, uint type, uint i) { return number(p, type, i); }

METAL_FUNC void keep(device uchar* p, uint type, uint i, float value) {
    if (type == args::kBf16) {
        ((device bfloat*)p)[i] = bfloat(value);
    } else {
        ((device float*)p)[i] = value;
    }
}

// The plane of keys of this layer in a page; that of values follows it.
METAL_FUNC device uchar* keys_of(device const Page* pages, constant args::Attention& p, uint page) {
    return pages[page].data + 2 * p.layer * p.plane;
}

}  // namespace

// attn_mix, first part. A SIMD-group takes one head of one token: a query head is normed, turned and scaled
// into query; a key/value head is normed, turned and written into its page. The grid is (H + G, T).
[[kernel]] void attn_mix_place(constant args::Attention& p        [[buffer(0)]],
                               device const float* qg             [[buffer(1)]],  // (T, H, 2, Dh)
                               device const float* k              [[buffer(2)]],  // (T, G, Dh)
                               device const float* v              [[buffer(3)]],  // (T, G, Dh)
                               device const float* q_norm         [[buffer(4)]],  // (Dh)
                               device const float* k_norm         [[buffer(5)]],  // (Dh)
                               device const float2* turns         [[buffer(6)]],  // (T, R / 2): cosine and sine
                               device const Page* pages           [[buffer(7)]],
                               device float* query                [[buffer(8)]],  // (T, H, Dh)
                               uint2 group                        [[threadgroup_position_in_grid]],
                               ushort lane                        [[thread_index_in_simdgroup]]) {
    const uint t = group.y, Dh = p.head_dim, half_turns = p.rotary_dim / 2;
    const bool is_query = group.x < p.heads;
    const uint head = is_query ? group.x : group.x - p.heads;
    device const float* in = is_query ? qg + (t * p.heads + head) * 2 * Dh : k + (t * p.kv_heads + head) * Dh;
    device const float* norm = is_query ? q_norm : k_norm;
    float squares = 0;
    for (uint d = lane; d < Dh; d += kSimd) squares += in[d] * in[d];
    const float scale = precise::rsqrt(simd_sum(squares) / float(Dh) + p.epsilon);

    const uint position = p.position + t;
    device uchar* keys = keys_of(pages, p, position / kPage);
    const uint at = (head * kPage + position % kPage) * Dh;
    for (uint d = lane; d < Dh; d += kSimd) {
        float value = in[d] * scale * norm[d];
        if (d < p.rotary_dim) {  // dimension i turns with dimension i + R / 2
            const bool low = d < half_turns;
            const uint other = low ? d + half_turns : d - half_turns;
            const float2 turn = turns[t * half_turns + min(d, other)];
            const float partner = in[other] * scale * norm[other];
            value = low ? value * turn.x - partner * turn.y : partner * turn.y + value * turn.x;
        }
        if (is_query) {
            query[(t * p.heads + head) * Dh + d] = value * precise::rsqrt(float(Dh));
        } else {
            keep(keys, p.kv_type, at + d, value);
            keep(keys + p.plane, p.kv_type, at + d, v[(t * p.kv_heads + head) * Dh + d]);
        }
    }
}

// attn_mix, second part: softmax(q K) V over one span, for up to four query heads of one key/value head, each
// load of a key and a value serving all four. SIMD-groups take every fourth position; a lane has N
// consecutive dimensions. The result is [maximum, sum, Dh unnormalised values] a head. The grid is (spans, G
// times quads of heads, rows).
template <ushort N>
[[kernel]] void attn_mix_split(constant args::Attention& p        [[buffer(0)]],
                               device const float* query          [[buffer(1)]],  // (rows, H, Dh)
                               device const Page* pages           [[buffer(2)]],
                               device float* partial              [[buffer(3)]],  // (rows, H, spans, Dh + 2)
                               uint3 group                        [[threadgroup_position_in_grid]],
                               ushort simd                        [[simdgroup_index_in_threadgroup]],
                               ushort lane                        [[thread_index_in_simdgroup]]) {
    threadgroup float best[kSimds][kHeadsOfSimd], sums[kSimds][kHeadsOfSimd];
    threadgroup float mixed[kSimds][kHeadsOfSimd][N * kSimd];
    const uint Dh = p.head_dim, shared = p.heads / p.kv_heads;
    const uint quads = (shared + kHeadsOfSimd - 1) / kHeadsOfSimd;
    const uint kv_head = group.y / quads, first = group.y % quads * kHeadsOfSimd;
    const uint heads = min(uint(kHeadsOfSimd), shared - first);
    const uint row = group.z, seen = p.position + row + 1;
    const uint begin = group.x * kSpan;
    if (begin >= seen) return;  // uniform over the threadgroup
    const uint end = min(begin + kSpan, seen);

    float q[kHeadsOfSimd][N], y[kHeadsOfSimd][N], top[kHeadsOfSimd], total[kHeadsOfSimd];
    for (ushort h = 0; h < kHeadsOfSimd; ++h) {
        top[h] = -INFINITY;
        total[h] = 0;
        const uint head = kv_head * shared + first + min(uint(h), heads - 1);
        for (ushort i = 0; i < N; ++i) {
            const uint d = lane * N + i;
            q[h][i] = d < Dh ? query[(row * p.heads + head) * Dh + d] : 0.0f;
            y[h][i] = 0;
        }
    }
    for (uint position = begin + simd; position < end; position += kSimds) {
        device const uchar* keys = keys_of(pages, p, position / kPage);
        const uint at = (kv_head * kPage + position % kPage) * Dh + lane * N;
        float key[N], value[N];
        for (ushort i = 0; i < N; ++i) {
            const bool inside = lane * N + i < Dh;
            key[i] = inside ? stored(keys, p.kv_type, at + i) : 0.0f;
            value[i] = inside ? stored(keys + p.plane, p.kv_type, at + i) : 0.0f;
        }
        for (ushort h = 0; h < kHeadsOfSimd; ++h) {
            float score = 0;
            for (ushort i = 0; i < N; ++i) score = fma(q[h][i], key[i], score);
            score = simd_sum(score);
            const float now = max(top[h], score);
            const float shrink = precise::exp(top[h] - now), share = precise::exp(score - now);
            top[h] = now;
            total[h] = total[h] * shrink + share;
            for (ushort i = 0; i < N; ++i) y[h][i] = fma(share, value[i], y[h][i] * shrink);
        }
    }
    for (ushort h = 0; h < kHeadsOfSimd; ++h) {
        if (lane == 0) {
            best[simd][h] = top[h];
            sums[simd][h] = total[h];
        }
        for (ushort i = 0; i < N; ++i) mixed[simd][h][lane * N + i] = y[h][i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint h = simd; h < heads; h += kSimds) {  // a SIMD-group puts a head together
        float highest = best[0][h];
        for (ushort s = 1; s < kSimds; ++s) highest = max(highest, best[s][h]);
        float sum = 0;
        for (ushort s = 0; s < kSimds; ++s) sum += sums[s][h] * precise::exp(best[s][h] - highest);
        device float* out =
            partial + ((row * p.heads + kv_head * shared + first + h) * p.spans + group.x) * (Dh + 2);
        if (lane == 0) {
            out[0] = highest;
            out[1] = sum;
        }
        for (uint d = lane; d < Dh; d += kSimd) {
            float value = 0;
            for (ushort s = 0; s < kSimds; ++s) value += mixed[s][h][d] * precise::exp(best[s][h] - highest);
            out[2 + d] = value;
        }
    }
}

#define instantiate_attn_mix_split(n) \
    template [[host_name("attn_mix_split_" #n)]] [[kernel]] decltype(attn_mix_split<n>) attn_mix_split<n>;
instantiate_attn_mix_split(1)
instantiate_attn_mix_split(2)
instantiate_attn_mix_split(4)
instantiate_attn_mix_split(8)

// attn_mix, third part: puts the spans of a head together in their order, divides, and applies the gate. A
// SIMD-group takes one head of one row. The grid is (H, rows).
[[kernel]] void attn_mix_merge(constant args::Attention& p        [[buffer(0)]],
                               device const float* partial        [[buffer(1)]],  // (rows, H, spans, Dh + 2)
                               device const float* qg             [[buffer(2)]],  // (rows, H, 2, Dh)
                               device float* y                    [[buffer(3)]],  // (rows, y_stride), H Dh of them used
                               uint2 group                        [[threadgroup_position_in_grid]],
                               ushort lane                        [[thread_index_in_simdgroup]]) {
    const uint head = group.x, row = group.y, Dh = p.head_dim, result = Dh + 2;
    const uint spans = (p.position + row) / kSpan + 1;
    device const float* in = partial + (row * p.heads + head) * p.spans * result;
    float highest = -INFINITY, sum = 0;
    for (uint s = 0; s < spans; ++s) highest = max(highest, in[s * result]);
    for (uint s = 0; s < spans; ++s) sum += in[s * result + 1] * precise::exp(in[s * result] - highest);
    for (uint d = lane; d < Dh; d += kSimd) {
        float value = 0;
        for (uint s = 0; s < spans; ++s) value += in[s * result + 2 + d] * precise::exp(in[s * result] - highest);
        y[row * p.y_stride + head * Dh + d] = value / sum * sigmoid(qg[((row * p.heads + head) * 2 + 1) * Dh + d]);
    }
}
