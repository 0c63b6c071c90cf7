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

}  // namespace lily
