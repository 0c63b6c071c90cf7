// The bodies of the CPU kernels, compiled once a code path by the kernels_*.cpp that define LILY_KERNELS and
// include this. Lanes run along a weight's words, along keys in scores, and along value dimensions elsewhere.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "cpu/twin.h"

namespace lily {
namespace {

constexpr int kPage = 256;  // kPageTokens, without state.h and its library code

// ---- Products with quantised and plain matrices

// Inputs are reordered so that lane l of vector (c, j) is the input that slot j of word c * kLanes + l holds.
void arrange(const float* x, int64_t columns, int bits, float* out) {
    const int slots = bits == 4 ? 8 : bits == 8 ? 4 : 1;
    const int64_t words = columns / slots;
    const int64_t chunks = (words + kLanes - 1) / kLanes;
    for (int64_t c = 0; c < chunks; ++c)
        for (int j = 0; j < slots; ++j)
            for (int lane = 0; lane < kLanes; ++lane) {
                const int64_t k = (c * kLanes + lane) * slots + j;
                out[(c * slots + j) * kLanes + lane] = k < columns ? x[k] : 0.f;
            }
    float* sums = out + (columns + 127) / 128 * 128;
    const int64_t groups = bits ? columns / 64 : 0;
    for (int64_t g = 0; g < (groups + 15) / 16 * 16; ++g) {
        float total = 0;
        for (int64_t k = 64 * g; g < groups && k < 64 * g + 64; ++k) total += x[k];
        sums[g] = total;
    }
}

// The stored types: element i, or kLanes elements from i on, of an array at any address.
struct Bf16 {
    static LILY_INLINE const char* at(const void* p, int64_t i) {
        return static_cast<const char*>(p) + 2 * i;
    }
    static LILY_INLINE float get(const void* p, int64_t i) { return from_bf16(load_as<uint16_t>(at(p, i))); }
    static LILY_INLINE Floats vector(const void* p, int64_t i) { return load_bf16(at(p, i)); }
};
struct F16 {
    static LILY_INLINE float get(const void* p, int64_t i) {
        return from_half(load_as<uint16_t>(Bf16::at(p, i)));
    }
    static LILY_INLINE Floats vector(const void* p, int64_t i) {
        float lane[kLanes];
        for (int l = 0; l < kLanes; ++l) lane[l] = get(p, i + l);
        return load(lane);
    }
};
struct F32 {
    static LILY_INLINE const char* at(const void* p, int64_t i) {
        return static_cast<const char*>(p) + 4 * i;
    }
    static LILY_INLINE float get(const void* p, int64_t i) { return load_as<float>(at(p, i)); }
    static LILY_INLINE Floats vector(const void* p, int64_t i) { return load_as<Floats>(at(p, i)); }
};
struct I8 {
    static LILY_INLINE const int8_t* at(const void* p, int64_t i) {
        return static_cast<const int8_t*>(p) + i;
    }
    static LILY_INLINE Floats vector(const void* p, int64_t i) {
        return __builtin_convertvector(load_as<Bytes>(at(p, i)), Floats);
    }
};
template <class Type>
constexpr bool kScaled = false;  // whether the scales of a page's rows lie behind them
template <>
constexpr bool kScaled<I8> = true;

// Values [i, i + kLanes) of which only those before n exist.
template <class Type>
LILY_INLINE Floats partial(const void* p, int64_t i, int64_t n) {
    if (i + kLanes <= n) return Type::vector(p, i);
    float lane[kLanes] = {};
    for (int64_t l = 0; i + l < n; ++l) lane[l] = Type::get(p, i + l);
    return load(lane);
}

// The scale of each lane's word in chunk c: a group of 64 is 8 words of 4 bits or 16 words of 8.
template <class Type, int kBits>
LILY_INLINE Floats scale_lanes(const void* scales, int64_t c, int64_t groups) {
    constexpr int kWordsOfGroup = kBits == 4 ? 8 : 16;
    const int64_t g = c * kLanes / kWordsOfGroup;
    if constexpr (kLanes <= kWordsOfGroup) {
        return splat(Type::get(scales, g));
    } else {
        const float low = Type::get(scales, g);
        const float high = g + 1 < groups ? Type::get(scales, g + 1) : 0.f;
        Floats v = splat(low);
        const Floats w = splat(high);
        for (int lane = kWordsOfGroup; lane < kLanes; ++lane) v[lane] = w[lane];
        return v;
    }
}

#if defined(__AVX512F__)
template <>
LILY_INLINE Floats scale_lanes<Bf16, 4>(const void* scales, int64_t c, int64_t groups) {
    uint32_t pair;  // two neighbouring bf16: the first belongs to the low eight lanes
    if (2 * c + 1 < groups) {
        pair = load_as<uint32_t>(Bf16::at(scales, 2 * c));
    } else {
        pair = load_as<uint16_t>(Bf16::at(scales, 2 * c));
    }
    const Words shift = {16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};
    return reinterpret_cast<Floats>((splat_words(pair) << shift) & 0xffff0000u);
}
#endif

LILY_INLINE Words words_at(const std::byte* row, int64_t i, int64_t n) {
    if (i + kLanes <= n) return load_as<Words>(row + 4 * i);
    uint32_t lane[kLanes] = {};
    std::memcpy(lane, row + 4 * i, static_cast<size_t>(4 * (n - i)));
    return load_as<Words>(lane);
}

// R rows of W times M rows of x. Every (row, m) pair sees the same operations in the same order whatever R
// and M are.
template <int R, int M, class Type, int kBits>
LILY_INLINE void quantised_tile(const Linear& w, int64_t row, const float* const* x, float (&y)[R][M]) {
    constexpr int kSlots = 32 / kBits;
    const int64_t words = w.columns / kSlots, groups = w.columns / 64;
    const int64_t chunks = (words + kLanes - 1) / kLanes;
    const int64_t scale_bytes = groups * static_cast<int64_t>(bytes_of(w.scales.dtype));
    const std::byte *q[R], *scales[R], *biases[R];
    Floats total[R][M];
    for (int r = 0; r < R; ++r) {
        q[r] = twin::at(w.weight.data + (row + r) * words * 4);
        scales[r] = twin::at(w.scales.data + (row + r) * scale_bytes);
        biases[r] = twin::at(w.biases.data + (row + r) * scale_bytes);
        for (int m = 0; m < M; ++m) total[r][m] = Floats{};
    }
    for (int64_t c = 0; c < chunks; ++c) {
        Words word[R];
        Floats part[R][M];
        for (int r = 0; r < R; ++r) {
            word[r] = words_at(q[r], c * kLanes, words);
            for (int m = 0; m < M; ++m) part[r][m] = Floats{};
        }
#pragma GCC unroll 8
        for (int j = 0; j < kSlots; j += twin::step(kSlots))
            for (int r = 0; r < R; ++r) {
                const Floats value = kBits == 4 ? nibble(word[r], j) : byte(word[r], j);
                for (int m = 0; m < M; ++m)
                    part[r][m] = fma(value, load(x[m] + (c * kSlots + j) * kLanes), part[r][m]);
            }
        for (int r = 0; r < R; ++r) {
            const Floats scale = scale_lanes<Type, kBits>(scales[r], c, groups);
            for (int m = 0; m < M; ++m) total[r][m] = fma(part[r][m], scale, total[r][m]);
        }
    }
    const int64_t sums = (w.columns + 127) / 128 * 128;
    for (int64_t g = 0; g < groups; g += kLanes)
        for (int r = 0; r < R; ++r) {
            const Floats bias = partial<Type>(biases[r], g, groups);
            for (int m = 0; m < M; ++m) total[r][m] = fma(bias, load(x[m] + sums + g), total[r][m]);
        }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) y[r][m] = sum(total[r][m]);
}

template <int R, int M, class Type>
LILY_INLINE void plain_tile(const Linear& w, int64_t row, const float* const* x, float (&y)[R][M]) {
    const int64_t stride = w.columns * static_cast<int64_t>(bytes_of(w.weight.dtype));
    Floats total[R][M];
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) total[r][m] = Floats{};
    for (int64_t k = 0; k < w.columns; k += kLanes)
        for (int r = 0; r < R; ++r) {
            const Floats value = partial<Type>(w.weight.data + (row + r) * stride, k, w.columns);
            for (int m = 0; m < M; ++m) total[r][m] = fma(value, load(x[m] + k), total[r][m]);
        }
    for (int r = 0; r < R; ++r)
        for (int m = 0; m < M; ++m) y[r][m] = sum(total[r][m]);
}

LILY_INLINE void put_one(const Output& out, int m, int64_t at, float y) {
    float& to = out.row[m][at];
    to = out.scale ? to + out.scale[m] * y : y;
}

template <int R, int M, class Type, int kBits>
LILY_INLINE void tile(const Linear& w, int64_t row, int64_t first, const float* const* x, const Output& out,
                      int m0) {
    float y[R][M];
    if constexpr (kBits == 0) {
        plain_tile<R, M, Type>(w, row, x + m0, y);
    } else {
        quantised_tile<R, M, Type, kBits>(w, row, x + m0, y);
    }
    for (int m = 0; m < M; ++m)
        for (int r = 0; r < R; ++r) put_one(out, m0 + m, row - first + r, y[r][m]);
}

template <int R, class Type, int kBits>
void rows_of(const Linear& w, int64_t row, int64_t first, const float* const* x, int M, const Output& out) {
    int m = 0;
    for (; m + 4 <= M; m += 4) tile<R, 4, Type, kBits>(w, row, first, x, out, m);
    if (M - m == 3) tile<R, 3, Type, kBits>(w, row, first, x, out, m);
    if (M - m == 2) tile<R, 2, Type, kBits>(w, row, first, x, out, m);
    if (M - m == 1) tile<R, 1, Type, kBits>(w, row, first, x, out, m);
}

template <class Type, int kBits>
void product_of(const Linear& w, int64_t first, int64_t outputs, const float* const* x, int M, Output out) {
    const int64_t end = first + outputs;
    int64_t row = first;
    if (M == 1)
        for (; row + 4 <= end; row += 4) tile<4, 1, Type, kBits>(w, row, first, x, out, 0);
    for (; row + 2 <= end; row += 2) rows_of<2, Type, kBits>(w, row, first, x, M, out);
    for (; row < end; ++row) rows_of<1, Type, kBits>(w, row, first, x, M, out);
}

template <int kBits>
void product_by_type(DType type, const Linear& w, int64_t first, int64_t outputs, const float* const* x,
                     int M, Output out) {
    if (type == DType::bf16) return product_of<Bf16, kBits>(w, first, outputs, x, M, out);
    if (type == DType::f16) return product_of<F16, kBits>(w, first, outputs, x, M, out);
    product_of<F32, kBits>(w, first, outputs, x, M, out);
}

void product(const Linear& w, const std::byte*, int64_t first, int64_t outputs, const float* const* x, int M,
             Output out) {
    if (w.bits == 4) return product_by_type<4>(w.scales.dtype, w, first, outputs, x, M, out);
    if (w.bits == 8) return product_by_type<8>(w.scales.dtype, w, first, outputs, x, M, out);
    product_by_type<0>(w.weight.dtype, w, first, outputs, x, M, out);
}

// ---- Norms and gates. The tails take one value at a time through the same vector functions.

float dot(const float* a, const float* b, int64_t n) {
    Floats total = Floats{};
    for (int64_t i = 0; i < n; i += kLanes) total = fma(partial<F32>(a, i, n), partial<F32>(b, i, n), total);
    return sum(total);
}

void rms_norm(const float* x, const float* weight, int64_t n, float epsilon, float* y) {
    const float r = 1.f / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * weight[i];
}

void l2_norm(float* x, int64_t n, float scale) {
    const float r = scale / __builtin_sqrtf(dot(x, x, n) + 1e-6f);
    for (int64_t i = 0; i < n; ++i) x[i] *= r;
}

template <class Function>
LILY_INLINE void for_each_vector(int64_t n, Function function) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) function(i, static_cast<int64_t>(kLanes));
    if (i < n) function(i, n - i);
}

LILY_INLINE void store_partial(float* to, Floats v, int64_t n) {
    if (n == kLanes) return store(to, v);
    for (int64_t l = 0; l < n; ++l) to[l] = v[l];
}

void swiglu(const float* gate, const float* up, int64_t n, float* out) {
    for_each_vector(n, [&](int64_t i, int64_t width) {
        const Floats g = partial<F32>(gate, i, n);
        store_partial(out + i, g * sigmoid(g) * partial<F32>(up, i, n), width);
    });
}

void sigmoid_gate(float* y, const float* gate, int64_t n) {
    for_each_vector(n, [&](int64_t i, int64_t width) {
        store_partial(y + i, partial<F32>(y, i, n) * sigmoid(partial<F32>(gate, i, n)), width);
    });
}

// ---- Gated DeltaNet

void conv(const float* const* rows, const float* const* weight, int taps, int64_t n, float* out) {
    for_each_vector(n, [&](int64_t i, int64_t width) {
        Floats total = Floats{};
        for (int j = 0; j < taps; ++j)
            total = fma(partial<F32>(rows[j], i, n), partial<F32>(weight[j], i, n), total);
        store_partial(out + i, total * sigmoid(total), width);
    });
}

float largest(const float* x, int64_t n, bool& finite) {
    Floats tops = splat(-__builtin_inff()), faults = Floats{};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        tops = max(load(x + i), tops);
        faults = fma(load(x + i), Floats{}, faults);
    }
    float top = tops[0], fault = sum(faults);
    for (int lane = 1; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
    for (; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
        fault += x[i] * 0;
    }
    finite = fault == 0;
    return top;
}

// S k and S q of a token come from one pass over S, and
// y = S' q = decay (S q) + d (k . q) with d = beta (v - decay (S k)) and S' = decay S + k d.
// The pass that makes S' takes the next token's sums of it along, so S is read and written once a token.
constexpr int kTokensAhead = 2;
template <int N>
void delta_lanes(const DeltaSpan& s, int first, float* S, int64_t stride) {
    Floats sk[N], sq[N];
    for (int n = 0; n < N; ++n) sk[n] = sq[n] = Floats{};
    for (int i = 0; i < s.key_dim; ++i)
        for (int n = 0; n < N; ++n) {
            const Floats row = load(S + i * stride + n * kLanes);
            sk[n] = fma(row, splat(s.k[i]), sk[n]);
            sq[n] = fma(row, splat(s.q[i]), sq[n]);
        }
    for (int t = 0; t < s.tokens; ++t) {
        const float* k = s.k + t * s.stride;
        const bool last = t + 1 == s.tokens;
        const float *next_q = s.q + (last ? t : t + 1) * s.stride,
                    *next_k = s.k + (last ? t : t + 1) * s.stride;
        // Tokens lie far apart, which no processor foresees.
        const auto* ahead = s.q + (t + kTokensAhead < s.tokens ? t + kTokensAhead : t) * s.stride;
        for (int i = 0; i < s.key_dim; i += 16) {
            __builtin_prefetch(ahead + i);
            __builtin_prefetch(ahead + (s.k - s.q) + i);
        }
        for (int n = 0; n < N * kLanes; n += 16) __builtin_prefetch(ahead + (s.v - s.q) + first + n);
        const Floats decay = splat(s.decay[t * s.gate_stride]), beta = splat(s.beta[t * s.gate_stride]);
        const Floats kq = splat(s.kq[t * s.kq_stride]);
        Floats d[N];
        for (int n = 0; n < N; ++n) {
            d[n] = (load(s.v + t * s.stride + first + n * kLanes) - decay * sk[n]) * beta;
            store(s.y + t * s.y_stride + first + n * kLanes, fma(d[n], kq, decay * sq[n]));
            sk[n] = sq[n] = Floats{};
        }
        for (int i = 0; i < s.key_dim; ++i)
            for (int n = 0; n < N; ++n) {
                float* at = S + i * stride + n * kLanes;
                const Floats row = fma(splat(k[i]), d[n], load(at) * decay);
                store(at, row);
                sk[n] = fma(row, splat(next_k[i]), sk[n]);
                sq[n] = fma(row, splat(next_q[i]), sq[n]);
            }
    }
}

// Rows of S lie a multiple of 256 bytes apart, so that few sets of the first-level cache would hold them all:
// several tokens work on a copy without gaps.
template <int N>
void delta_tokens(const DeltaSpan& s, int first) {
    constexpr int kMostKeys = 256;
    constexpr int64_t kStride = N * kLanes;
    float* S = s.S + first;
    if (s.tokens == 1 || s.key_dim > kMostKeys) return delta_lanes<N>(s, first, S, s.value_dim);
    alignas(64) float copy[kMostKeys * kStride];
    for (int i = 0; i < s.key_dim; ++i)
        std::memcpy(copy + i * kStride, S + static_cast<int64_t>(i) * s.value_dim, kStride * sizeof(float));
    delta_lanes<N>(s, first, copy, kStride);
    for (int i = 0; i < s.key_dim; ++i)
        std::memcpy(S + static_cast<int64_t>(i) * s.value_dim, copy + i * kStride, kStride * sizeof(float));
}

void delta(const DeltaSpan& span, int first, int lanes) {
    constexpr int kMost = kLanes == 16 ? 4 : 2;  // vectors of values: as registers allow
    for (; lanes >= kMost * kLanes; lanes -= kMost * kLanes, first += kMost * kLanes)
        delta_tokens<kMost>(span, first);
    for (; lanes >= 2 * kLanes; lanes -= 2 * kLanes, first += 2 * kLanes) delta_tokens<2>(span, first);
    for (; lanes > 0; lanes -= kLanes, first += kLanes) delta_tokens<1>(span, first);
}

// ---- Attention

// Rows of a page are read a few lanes at a time, again and again: the first time asks memory for the whole of
// a row, some rows ahead.
constexpr int kRowsAhead = 8;
template <class Type>
LILY_INLINE void ask_for_row(const void* rows, int64_t row, int64_t width) {
    const auto* at = reinterpret_cast<const char*>(Type::at(rows, row * width));
    for (const auto* end = reinterpret_cast<const char*>(Type::at(rows, (row + 1) * width)); at < end;
         at += 64)
        __builtin_prefetch(at, 0, 2);
}

// scores (heads, 256) of Q heads against one page of keys, for the lanes that `count` positions need.
template <int Q, class Type>
void page_scores(const void* keys, const float* query, int head_dim, int64_t count, float* scores) {
    for (int64_t key = 0; key < count; key += 2 * kLanes) {
        Floats low[Q], high[Q];
        for (int h = 0; h < Q; ++h) low[h] = high[h] = Floats{};
        for (int d = 0; d < head_dim; ++d) {
            if (key == 0) ask_for_row<Type>(keys, d + kRowsAhead, kPage);
            const Floats a = Type::vector(keys, d * kPage + key),
                         b = Type::vector(keys, d * kPage + key + kLanes);
            for (int h = 0; h < Q; ++h) {
                const Floats q = splat(query[h * head_dim + d]);
                low[h] = fma(q, a, low[h]);
                high[h] = fma(q, b, high[h]);
            }
        }
        for (int h = 0; h < Q; ++h) {
            store(scores + h * kPage + key, low[h]);
            store(scores + h * kPage + key + kLanes, high[h]);
        }
    }
}

// Adds the page's values, weighted by scores that are already exponentials, to N vectors of Q heads' outputs.
template <int Q, int N, class Type>
void page_values(const void* values, const float* scores, int head_dim, int64_t count, int first, float* out,
                 int64_t stride) {
    Floats total[Q][N];
#pragma GCC unroll 8
    for (int h = 0; h < Q; ++h)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[h][n] = load(out + h * stride + first + n * kLanes);
    for (int64_t key = 0; key < count; ++key) {
        if (first == 0) ask_for_row<Type>(values, key + kRowsAhead, head_dim);
        Floats value[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) value[n] = Type::vector(values, key * head_dim + first + n * kLanes);
#pragma GCC unroll 8
        for (int h = 0; h < Q; ++h) {
            const Floats weight = splat(scores[h * kPage + key]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) total[h][n] = fma(weight, value[n], total[h][n]);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < Q; ++h)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(out + h * stride + first + n * kLanes, total[h][n]);
}

// Turns scores into exponentials against the running maximum and rescales what was summed before.
void page_softmax(float* scores, int64_t count, int head_dim, float* out) {
    const float minus_infinity = -__builtin_inff();
    for (int64_t i = count; i < (count + kLanes - 1) / kLanes * kLanes; ++i) scores[i] = minus_infinity;
    Floats best = splat(out[0]);
    for (int64_t i = 0; i < count; i += kLanes) best = max(load(scores + i), best);
    float top = best[0];
    for (int lane = 1; lane < kLanes; ++lane) top = best[lane] > top ? best[lane] : top;
    const Floats shrink = exp(splat(out[0] - top));
    Floats total = Floats{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats e = exp(load(scores + i) - splat(top));
        store(scores + i, e);
        total = total + e;
    }
    out[1] = out[1] * shrink[0] + sum(total);
    out[0] = top;
    for (int d = 0; d < head_dim; d += kLanes) store(out + 2 + d, load(out + 2 + d) * shrink);
}

// Scales of a page's rows, which lie behind them, into weights of those rows.
void page_scales(const void* rows, int head_dim, int64_t count, float* weights) {
    const auto* scales =
        reinterpret_cast<const float*>(static_cast<const int8_t*>(rows) + int64_t{kPage} * head_dim);
    for (int64_t i = 0; i < count; i += kLanes) store(weights + i, load(weights + i) * load(scales + i));
}

template <int Q, class Type>
void attend_heads(const AttentionHeads& a, const void* keys, const void* values, int64_t count,
                  const float* query, float* scores, float* out) {
    const int64_t stride = a.head_dim + 2;
    page_scores<Q, Type>(keys, query, a.head_dim, count, scores);
    for (int h = 0; h < Q; ++h) {
        if (kScaled<Type>) page_scales(keys, a.head_dim, count, scores + h * kPage);
        page_softmax(scores + h * kPage, count, a.head_dim, out + h * stride);
        if (kScaled<Type>) page_scales(values, a.head_dim, count, scores + h * kPage);
    }
    int first = 0;
    for (; first + 2 * kLanes <= a.head_dim; first += 2 * kLanes)
        page_values<Q, 2, Type>(values, scores, a.head_dim, count, first, out + 2, stride);
    for (; first < a.head_dim; first += kLanes)
        page_values<Q, 1, Type>(values, scores, a.head_dim, count, first, out + 2, stride);
}

template <class Type>
void attend_as(const AttentionHeads& a, const void* keys, const void* values, int64_t count,
               const float* query, float* scores, float* out) {
    for (int h = 0; h < a.heads;) {
        const int heads = a.heads - h >= 8 ? 8 : a.heads - h >= 2 ? 2 : 1;
        const auto attend = heads == 8   ? attend_heads<8, Type>
                            : heads == 2 ? attend_heads<2, Type>
                                         : attend_heads<1, Type>;
        attend(a, keys, values, count, query + h * a.head_dim, scores + h * kPage,
               out + h * (a.head_dim + 2));
        h += heads;
    }
}

void attend(const AttentionHeads& a, const void* keys, const void* values, int64_t count, const float* query,
            float* scores, float* out) {
    const auto attend = a.kv == DType::bf16 ? attend_as<Bf16>
                        : a.kv == DType::i8 ? attend_as<I8>
                                            : attend_as<F32>;
    attend(a, keys, values, count, query, scores, out);
}

void merge(float* into, const float* from, int heads, int head_dim) {
    for (int h = 0; h < heads; ++h, into += head_dim + 2, from += head_dim + 2) {
        const float top = into[0] > from[0] ? into[0] : from[0];
        const Floats keep = exp(splat(into[0] - top)), take = exp(splat(from[0] - top));
        into[0] = top;
        into[1] = into[1] * keep[0] + from[1] * take[0];
        for (int d = 2; d < head_dim + 2; d += kLanes)
            store(into + d, fma(load(from + d), take, load(into + d) * keep));
    }
}

// A row in int8, number i at out + i * stride, and its scale behind the page's rows.
void append_int8(const float* row, int slot, int head_dim, int64_t stride, int8_t* page, int8_t* out) {
    float most = 0;
    for (int d = 0; d < head_dim; ++d) most = __builtin_fabsf(row[d]) > most ? __builtin_fabsf(row[d]) : most;
    const float scale = most / 127.f;
    reinterpret_cast<float*>(page + int64_t{kPage} * head_dim)[slot] = scale;
    for (int d = 0; d < head_dim; ++d)
        out[d * stride] = static_cast<int8_t>(scale > 0 ? __builtin_rintf(row[d] / scale) : 0.f);
}

void append(const float* key, const float* value, int slot, int head_dim, DType kv, void* keys,
            void* values) {
    if (kv == DType::i8) {
        auto *k = static_cast<int8_t*>(keys), *v = static_cast<int8_t*>(values);
        append_int8(key, slot, head_dim, kPage, k, k + slot);
        append_int8(value, slot, head_dim, 1, v, v + slot * head_dim);
        return;
    }
    for (int d = 0; d < head_dim; ++d) {
        if (kv == DType::bf16) {
            static_cast<uint16_t*>(keys)[d * kPage + slot] = to_bf16(key[d]);
            static_cast<uint16_t*>(values)[slot * head_dim + d] = to_bf16(value[d]);
        } else {
            static_cast<float*>(keys)[d * kPage + slot] = key[d];
            static_cast<float*>(values)[slot * head_dim + d] = value[d];
        }
    }
}

}  // namespace

#define LILY_KERNEL_TABLE(title, arrange_, product_, tile_rows_, product_tiles_, packs_, pack_, begin_, \
                          page_)                                                                        \
    {.name = title,                                                                                     \
     .arrange = arrange_,                                                                               \
     .product = product_,                                                                               \
     .tile_rows = tile_rows_,                                                                           \
     .product_tiles = product_tiles_,                                                                   \
     .packs = packs_,                                                                                   \
     .pack = pack_,                                                                                     \
     .rms_norm = rms_norm,                                                                              \
     .swiglu = swiglu,                                                                                  \
     .sigmoid_gate = sigmoid_gate,                                                                      \
     .conv = conv,                                                                                      \
     .l2_norm = l2_norm,                                                                                \
     .dot = dot,                                                                                        \
     .largest = largest,                                                                                \
     .delta = delta,                                                                                    \
     .attend = attend,                                                                                  \
     .flash_begin = begin_,                                                                             \
     .flash_page = page_,                                                                               \
     .merge = merge,                                                                                    \
     .append = append}

}  // namespace lily
