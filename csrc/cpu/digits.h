// Products with matrices of 4 bits by the machine's products of bytes, as exact as float32 ones.
//
// A group of 64 inputs becomes integers of 24 bits times a power of two, and those three signed digits of 8
// bits. A weight is an integer from 0 to 15, so digit times weight sums exactly in 32 bits, four products an
// instruction, or two where sums take one of their own, where a float32 multiplication is one: three digits
// cost less than one float32 input, whose weights first have to become floats. The only
// roundings are the inputs' (2^-23 of the group's largest) and one addition a group. Two digits, for prompts
// where the option says so, round inputs to 2^-15 of the group's largest: finer than bfloat16's 2^-9.
//
// Lanes are rows of W. Words of kLanes rows are transposed on their way from where the file has them into a
// panel in the first-level cache, which then meets every row of inputs. Results of a row depend on nothing
// else.
#pragma once

#include <type_traits>

#include "cpu/digits_simd.h"
#include "cpu/kernels_impl.h"

namespace lily {
namespace {

constexpr int kGroup = 64;                             // inputs that share a scale, in the weights and here
constexpr int kGroupWords = kGroup / 8;                // of 4-bit weights
constexpr int kScaleGroups = 2 * kLanes;               // groups whose scales are transposed at a time
constexpr int kPanelGroups = kLanes < 8 ? kLanes : 8;  // groups whose words are
constexpr int kPanelLanes = kPackRows;                 // rows in a panel
constexpr int kPanelRows = kPanelLanes / kLanes;       // vectors of them
// Vectors of rows whose sums registers hold, and those sums: of 32 registers, but AVX2 has 16. The others
// hold weights and a digit.
constexpr int kHeldRows = kLanes == 16 ? 2 : kLanes == 8 ? 1 : 4;
constexpr int kHeldSums = kLanes == 8 ? 9 : 24;
constexpr int kStreamRows = 2;            // up to which products are as fast as memory gives weights
constexpr int kStreamVectors = 2;         // of rows that are then multiplied together
constexpr int kRecordsAhead = 24;         // that the second-level cache is asked for before they are used
constexpr int64_t kGroupFloats = 3 * 16;  // an input group's digits, in floats

// Of a row of inputs: per group the three digits of its 64 inputs, highest first; then the groups' scales;
// then the groups' sums. A digit's bytes lie as the weights' do: per word of eight the even inputs, then the
// odd.
LILY_INLINE const float* scales_of(const float* x, int64_t groups) {
    return x + kGroupFloats * groups;
}

template <int D>
void digits_of_group(const float* x, int8_t* digits, float* scale, float* total_of) {
    Floats most = Floats{}, faults = Floats{};
    for (int i = 0; i < kGroup; i += kLanes) {
        const Floats v = load(x + i);
        most = max(max(v, -v), most);
        faults = fma(v, Floats{}, faults);
    }
    float top = 0;
    for (int lane = 0; lane < kLanes; ++lane) top = most[lane] > top ? most[lane] : top;
    // With three digits 2^(e - 22) for a largest input of 2^e to 2^(e + 1), less a little so that none
    // overflows.
    constexpr uint32_t kBits = 8 * D - 2;
    uint32_t bits;
    const float wide = top * 1.01f;
    std::memcpy(&bits, &wide, 4);
    uint32_t exponent = bits >> 23;
    if (exponent < 23) exponent = 23;  // smaller inputs, below 2^-104, lose digits
    const uint32_t unit_bits = (exponent - kBits) << 23, inverse_bits = (254 - exponent + kBits) << 23;
    float unit, inverse;
    std::memcpy(&unit, &unit_bits, 4);
    std::memcpy(&inverse, &inverse_bits, 4);
    Ints total = Ints{};
    for (int i = 0; i < kGroup / kLanes; ++i) {
        const Floats t = load(x + i * kLanes) * splat(inverse);
        const Floats half = select(t < Floats{}, splat(-0.5f), splat(0.5f));
        Ints n = __builtin_convertvector(t + half, Ints);
        total += n;
        for (int p = D - 1; p >= 0; --p) {
            const Ints digit = n << 24 >> 24;
            put_digits(digit, digits + p * kGroup, i * kLanes);
            n = (n - digit) >> 8;
        }
    }
    int32_t sum_of_all = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum_of_all += total[lane];
    const float fault = sum(faults);  // not zero if an input is not finite: the product shall say so
    *scale = unit + fault;
    *total_of = unit * static_cast<float>(sum_of_all) + fault;
}

template <int D>
void arrange_digits(const float* x, int64_t columns, int bits, float* out) {
    if (bits != 4) return arrange(x, columns, bits, out);
    const int64_t groups = columns / kGroup;
    float* scales = out + kGroupFloats * groups;
    for (int64_t g = 0; g < groups; ++g)
        digits_of_group<D>(x + kGroup * g, reinterpret_cast<int8_t*>(out + kGroupFloats * g), scales + g,
                           scales + groups + g);
}

// A group of columns of kPanelLanes rows of W: word j of every row, then the scales and the biases. A matrix
// of such records is as large as it was; Scale is uint16_t for bfloat16.
template <class Scale>
struct Record {
    template <int D>
    static constexpr int kInputRows = kHeldSums / (kHeldRows * D);  // that share an unpacked weight
    uint32_t words[kGroupWords][kPanelLanes];
    Scale scales[kPanelLanes], biases[kPanelLanes];
};
static_assert(sizeof(Record<uint16_t>) == kPanelLanes * (kGroup / 2 + 2 * sizeof(uint16_t)));

template <class Type>
using ScaleOf = std::conditional_t<std::is_same_v<Type, Bf16>, uint16_t, float>;

LILY_INLINE Floats scales_at(const uint16_t* from) {
    return load_bf16(from);
}
LILY_INLINE Floats scales_at(const float* from) {
    return load(from);
}

// Rows of a matrix, kLanes of them from `first` on; those past `last` are that one again.
struct Rows {
    const std::byte* first;
    int64_t stride, last;  // bytes; a number of rows after the first

    LILY_INLINE const std::byte* at(int64_t lane) const {
        return twin::at(first + (lane < last ? lane : last) * stride);
    }
};

// Scales, or biases, of groups [first, first + kScaleGroups).
template <class Type>
LILY_INLINE void take_scales(const Rows& rows, int64_t first, int64_t groups, float* to) {
    constexpr int64_t kStride = kPanelLanes;
    const int64_t count = groups - first < kScaleGroups ? groups - first : kScaleGroups;
    if constexpr (std::is_same_v<Type, Bf16>) {
        Words v[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) v[lane] = load_first(rows.at(lane) + 2 * first, 2 * count);
        transpose(v);
        for (int i = 0; 2 * i < count; ++i) {
            store(to + 2 * i * kStride, reinterpret_cast<Floats>(v[i] << 16));
            store(to + (2 * i + 1) * kStride, reinterpret_cast<Floats>(v[i] & 0xffff0000u));
        }
    } else {
        for (int lane = 0; lane < kLanes; ++lane)
            for (int64_t g = 0; g < count; ++g) to[g * kStride + lane] = Type::get(rows.at(lane), first + g);
    }
}

// Groups [first, first + count) of kLanes rows of W, at most kPanelGroups, into the lanes from `lane` on of
// as many records. Rows from `end` on are the last one again.
template <class Type>
LILY_INLINE void take_groups(const Linear& w, int64_t row, int64_t end, int64_t first, int count, int lane,
                             Record<ScaleOf<Type>>* to) {
    const int64_t words = w.columns / 8, groups = w.columns / kGroup, last = end - 1 - row;
    const Rows q{w.weight.data + row * words * 4, words * 4, last};
    for (int word = 0; word < count * kGroupWords; word += kLanes) {
        Words v[kLanes];
        for (int i = 0; i < kLanes; ++i) v[i] = words_at(q.at(i), first * kGroupWords + word, words);
        transpose(v);
        for (int i = 0; i < kLanes && word + i < count * kGroupWords; ++i)
            std::memcpy(to[(word + i) / kGroupWords].words[(word + i) % kGroupWords] + lane, &v[i],
                        sizeof v[i]);
    }
    const int64_t bytes = groups * static_cast<int64_t>(bytes_of(w.scales.dtype));
    const Rows scales{w.scales.data + row * bytes, bytes, last},
        biases{w.biases.data + row * bytes, bytes, last};
    if constexpr (std::is_same_v<Type, Bf16>) {
        constexpr int kHalf = kLanes / 2;  // words that hold the scales of kPanelGroups groups or more
        static_assert(2 * kHalf >= kPanelGroups);
        Words v[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            v[i] = first_halves(load_first(scales.at(i) + 2 * first, 2 * count),
                                load_first(biases.at(i) + 2 * first, 2 * count));
        }
        transpose(v);
        for (int g = 0; g < count; ++g) {
            const int shift = g % 2 ? 16 : 0;
            const Halves scale = __builtin_convertvector(v[g / 2] >> shift, Halves),
                         bias = __builtin_convertvector(v[kHalf + g / 2] >> shift, Halves);
            std::memcpy(to[g].scales + lane, &scale, sizeof scale);
            std::memcpy(to[g].biases + lane, &bias, sizeof bias);
        }
    } else {
        for (int i = 0; i < kLanes; ++i)
            for (int g = 0; g < count; ++g) {
                to[g].scales[lane + i] = Type::get(scales.at(i), first + g);
                to[g].biases[lane + i] = Type::get(biases.at(i), first + g);
            }
    }
}

// Adds a group's products, by digits, to the sums so far. unit: of the inputs' group; their sum is at
// unit[groups].
template <int D>
LILY_INLINE Floats add_group(const Ints (&part)[D], Floats scale, Floats bias, const float* unit,
                             int64_t groups, Floats total) {
    // The two lowest digits' sum has 26 bits, the highest's 18.
    Floats sum = __builtin_convertvector((part[D - 2] << 8) + part[D - 1], Floats);
    if constexpr (D == 3) sum = fma(__builtin_convertvector(part[0], Floats), splat(65536.f), sum);
    return fma(bias, splat(unit[groups]), fma(sum, scale * splat(unit[0]), total));
}

// The products of a group by digits: N vectors of rows, those from `lane` on, times M rows of inputs, whose
// digits are given. ahead: the record that memory is asked for meanwhile, or null.
template <int D, int N, int M, class Scale>
LILY_INLINE void multiply_group(const Record<Scale>& record, int lane, const int32_t* const (&digits)[M],
                                const Record<Scale>* ahead, Ints (&part)[M][N][D]) {
    const auto* lines = reinterpret_cast<const std::byte*>(ahead);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            for (int p = 0; p < D; ++p) part[m][n][p] = Ints{};
    for (int first = 0; first < kGroupWords; first += kSumWords) {
        Sums sums[M][N][D];
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                for (int p = 0; p < D; ++p) sums[m][n][p] = Sums{};
#pragma GCC unroll 2
        for (int word = first; word < first + kSumWords; ++word) {
            if (ahead)
                for (int line = 0; line < 2; ++line) __builtin_prefetch(lines + (2 * word + line) * 64, 0, 2);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half += twin::step(2)) {
                Words weight[N];
                for (int n = 0; n < N; ++n)
                    weight[n] =
                        load_as<Words>(record.words[word] + lane + n * kLanes) >> (4 * half) & 0x0f0f0f0fu;
                for (int m = 0; m < M; ++m)
                    for (int p = 0; p < D; p += twin::step(D)) {
                        const Ints digit = digits[m][p * 16 + 2 * word + half] - Ints{};
                        for (int n = 0; n < N; ++n) sums[m][n][p] = dot4(sums[m][n][p], weight[n], digit);
                    }
            }
        }
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n)
                for (int p = 0; p < D; ++p) part[m][n][p] += widened(sums[m][n][p]);
    }
    if (ahead)
        for (int line = 16; line < 18; ++line) __builtin_prefetch(lines + line * 64, 0, 2);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// A record for products of matrices: of word j of every row the weights as bytes, the even, then the odd.
struct WideRecord {
    template <int D>
    static constexpr int kInputRows = 2;
    uint32_t words[kGroupWords][kPanelLanes][2];
    float scales[kPanelLanes], biases[kPanelLanes];
};

// The first N vectors of rows.
template <int N, class Scale>
LILY_INLINE void widen(const Record<Scale>& record, WideRecord& to) {
    for (int lane = 0; lane < N * kLanes; lane += kLanes) {
        for (int word = 0; word < kGroupWords; ++word)
            put_nibbles(load_as<Words>(record.words[word] + lane), to.words[word][lane]);
        store(to.scales + lane, scales_at(record.scales + lane));
        store(to.biases + lane, scales_at(record.biases + lane));
    }
}

// Two rows of inputs at a time times two of weights; one row alone is multiplied twice, in the same time.
template <int D, int N, int M>
LILY_INLINE void multiply_group(const WideRecord& record, int lane, const int32_t* const (&digits)[M],
                                const WideRecord*, Ints (&part)[M][N][D]) {
    static_assert(M <= WideRecord::kInputRows<D>);
    Ints sums[N][2][D];  // of rows 0 and 1, 2 and 3 of a vector: the first inputs' two, the others' two
    for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half)
            for (int p = 0; p < D; ++p) sums[n][half][p] = Ints{};
#pragma GCC unroll 2
    for (int word = 0; word < kGroupWords; ++word) {
        Words inputs[D];
        for (int p = 0; p < D; ++p)
            inputs[p] = pair_of(digits[0] + p * 16 + 2 * word, digits[M - 1] + p * 16 + 2 * word);
        for (int n = 0; n < N; ++n)
            for (int half = 0; half < 2; ++half) {
                const Words weight = load_as<Words>(record.words[word][lane + n * kLanes + 2 * half]);
                for (int p = 0; p < D; ++p)
                    sums[n][half][p] = multiply_pairs(sums[n][half][p], inputs[p], weight);
            }
    }
    for (int n = 0; n < N; ++n)
        for (int p = 0; p < D; ++p) {
            const Words one = reinterpret_cast<Words>(sums[n][0][p]),
                        other = reinterpret_cast<Words>(sums[n][1][p]);
            part[0][n][p] = reinterpret_cast<Ints>(first_halves(one, other));
            if constexpr (M == 2) part[1][n][p] = reinterpret_cast<Ints>(second_halves(one, other));
        }
}

#endif

// N vectors of rows, those from `lane` on, of `count` records, the first of which is group `first`, times M
// rows of inputs, into the sums so far. ahead: how many records further on memory is asked for; 0 for none.
template <int D, int N, int M, class AnyRecord>
LILY_INLINE void multiply_records(const AnyRecord* records, int lane, int64_t first, int64_t count,
                                  int64_t groups, const float* const* x, float (*sums)[kPanelLanes],
                                  int64_t ahead) {
    const bool ask = ahead != 0 && lane == 0 && twin::kAsks;
    Floats total[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) total[m][n] = load(sums[m] + lane + n * kLanes);
    for (int64_t g = 0; g < count; ++g) {
        const AnyRecord& record = *twin::at(records + g);
        const int32_t* digits[M];
        for (int m = 0; m < M; ++m)
            digits[m] = reinterpret_cast<const int32_t*>(x[m] + (first + g) * kGroupFloats);
        Ints part[M][N][D];
        multiply_group(record, lane, digits, ask ? records + g + ahead : nullptr, part);
        for (int m = 0; m < M; ++m) {
            const float* unit = scales_of(x[m], groups) + first + g;
            for (int n = 0; n < N; ++n)
                total[m][n] =
                    add_group(part[m][n], scales_at(record.scales + lane + n * kLanes),
                              scales_at(record.biases + lane + n * kLanes), unit, groups, total[m][n]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(sums[m] + lane + n * kLanes, total[m][n]);
}

// The same for fewer than M rows of inputs.
template <int D, int N, int M, class AnyRecord>
LILY_INLINE void multiply_fewer(const AnyRecord* records, int lane, int64_t first, int64_t count,
                                int64_t groups, const float* const* x, int rows, float (*sums)[kPanelLanes],
                                int64_t ahead) {
    if constexpr (M > 1) {
        if (rows == M - 1)
            return multiply_records<D, N, M - 1>(records, lane, first, count, groups, x, sums, ahead);
        multiply_fewer<D, N, M - 1>(records, lane, first, count, groups, x, rows, sums, ahead);
    }
}

// N vectors of rows, those that registers hold at a time, times M rows of inputs. The first of these ask
// memory ahead for all.
template <int D, int N, class AnyRecord>
void multiply_rows(const AnyRecord* records, int64_t first, int64_t count, int64_t groups,
                   const float* const* x, int M, float (*sums)[kPanelLanes], int64_t ahead) {
    constexpr int kHeld = N < kHeldRows ? N : kHeldRows;
    constexpr int kTileRows = AnyRecord::template kInputRows<D>;
    for (int lane = 0; lane < N * kLanes; lane += kHeld * kLanes) {
        int m = 0;
        for (; m + kTileRows <= M; m += kTileRows)
            multiply_records<D, kHeld, kTileRows>(records, lane, first, count, groups, x + m, sums + m,
                                                  m == 0 ? ahead : 0);
        multiply_fewer<D, kHeld, kTileRows>(records, lane, first, count, groups, x + m, M - m, sums + m,
                                            m == 0 ? ahead : 0);
    }
}

// The same for the records of a panel, at most kPanelGroups.
template <int D, int N, class Scale>
LILY_INLINE void multiply_panel(const Record<Scale>* records, int64_t first, int64_t count, int64_t groups,
                                const float* const* x, int M, float (*sums)[kPanelLanes], int64_t ahead) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (M > kStreamRows) {
        alignas(64) WideRecord wide[kPanelGroups];
        for (int64_t g = 0; g < count; ++g) widen<N>(records[g], wide[g]);
        return multiply_rows<D, N>(wide, first, count, groups, x, M, sums, 0);
    }
#endif
    multiply_rows<D, N>(records, first, count, groups, x, M, sums, ahead);
}

LILY_INLINE void put(const Output& out, int64_t at, int64_t rows, int M, const float (*sums)[kPanelLanes]) {
    for (int m = 0; m < M; ++m) {
        float* to = out.row[m] + at;
        for (int64_t i = 0; i < rows; ++i) to[i] = out.scale ? to[i] + out.scale[m] * sums[m][i] : sums[m][i];
    }
}

// Rows [row, row + N kLanes) of W, of which those before `end` exist, times M rows of inputs.
template <int D, int N, class Type>
void digits_block(const Linear& w, const std::byte* panels, int64_t row, int64_t end, int64_t first,
                  const float* const* x, int M, const Output& out) {
    using Panel = Record<ScaleOf<Type>>;
    const int64_t groups = w.columns / kGroup;
    alignas(64) Panel panel[kPanelGroups];
    alignas(64) float sums[kPanel][kPanelLanes];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(sums[m] + n * kLanes, Floats{});
    const bool packed = std::is_same_v<Type, Bf16> && panels && N == kPanelRows && row % kPanelLanes == 0;
    const auto* records = reinterpret_cast<const Panel*>(panels) + row / kPanelLanes * groups;
    if (packed && M <= kStreamRows) {
        multiply_rows<D, N>(records, 0, groups, groups, x, M, sums, kRecordsAhead);
    } else {
        for (int64_t g0 = 0; g0 < groups; g0 += kPanelGroups) {
            const int count = static_cast<int>(groups - g0 < kPanelGroups ? groups - g0 : kPanelGroups);
            for (int n = 0; n < N && !packed; ++n)
                take_groups<Type>(w, row + n * kLanes, end, g0, count, n * kLanes, panel);
            multiply_panel<D, N>(packed ? records + g0 : panel, g0, count, groups, x, M, sums,
                                 packed ? kPanelGroups : 0);
        }
    }
    put(out, row - first, end - row < N * kLanes ? end - row : N * kLanes, M, sums);
}

// Asks for the lines of some memory, front to back.
struct Ahead {
    const std::byte* at;

    LILY_INLINE void ask(int64_t bytes) {
        for (const std::byte* end = at + bytes; at < end && twin::kAsks; at += 64)
            __builtin_prefetch(at, 0, 2);
    }
};

// The same for a few rows of inputs and rows of W that all exist: a tile's words go straight into its
// products, so that the processor has loads, transposition and products of neighbouring tiles under way at
// once.
template <int D, int N, int M, class Type>
void digits_stream(const Linear& w, int64_t row, int64_t first, const float* const* x, const Output& out) {
    constexpr int kTileGroups = kLanes / kGroupWords;
    const int64_t words = w.columns / 8, groups = w.columns / kGroup;
    const int64_t scale_bytes = groups * static_cast<int64_t>(bytes_of(w.scales.dtype));
    const std::byte* q = w.weight.data + row * words * 4;
    alignas(64) float scales[kScaleGroups][kPanelLanes], biases[kScaleGroups][kPanelLanes];
    Floats total[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) total[m][n] = Floats{};
    // The next rows' bytes are asked for in the order of their addresses, each tile a tile's worth.
    const int64_t size = static_cast<int64_t>(bytes_of(w.scales.dtype));
    Ahead next_words{q + N * kLanes * words * 4},
        next_scales{w.scales.data + (row + N * kLanes) * scale_bytes},
        next_biases{w.biases.data + (row + N * kLanes) * scale_bytes};
    for (int64_t g0 = 0; g0 < groups; g0 += kTileGroups) {
        const int scale = static_cast<int>(g0 % kScaleGroups);
        if (scale == 0)
            for (int n = 0; n < N; ++n) {
                const int64_t at = (row + n * kLanes) * scale_bytes;
                take_scales<Type>({w.scales.data + at, scale_bytes, kLanes}, g0, groups,
                                  scales[0] + n * kLanes);
                take_scales<Type>({w.biases.data + at, scale_bytes, kLanes}, g0, groups,
                                  biases[0] + n * kLanes);
            }
        Words v[N][kLanes];
        for (int n = 0; n < N; ++n) {
            for (int lane = 0; lane < kLanes; ++lane)
                v[n][lane] = words_at(twin::at(q + (n * kLanes + lane) * words * 4), g0 * kGroupWords, words);
            transpose(v[n]);
        }
        next_scales.ask(N * kLanes * kTileGroups * size);
        next_biases.ask(N * kLanes * kTileGroups * size);
#pragma GCC unroll 2
        for (int g = 0; g < kTileGroups; ++g) {
            if (g0 + g == groups) break;
            for (int m = 0; m < M; ++m) {
                const auto* digits = reinterpret_cast<const int32_t*>(x[m] + (g0 + g) * kGroupFloats);
                Ints part[N][D];
                for (int n = 0; n < N; ++n)
                    for (int p = 0; p < D; ++p) part[n][p] = Ints{};
#pragma GCC unroll 2
                for (int begin = 0; begin < kGroupWords; begin += kSumWords) {
                    Sums sums[N][D];
                    for (int n = 0; n < N; ++n)
                        for (int p = 0; p < D; ++p) sums[n][p] = Sums{};
#pragma GCC unroll 8
                    for (int word = begin; word < begin + kSumWords; ++word) {
                        if (m == 0) next_words.ask(N * kLanes * 4);
#pragma GCC unroll 2
                        for (int half = 0; half < 2; half += twin::step(2))
                            for (int p = 0; p < D; p += twin::step(D)) {
                                const Ints digit = digits[p * 16 + 2 * word + half] - Ints{};
                                for (int n = 0; n < N; ++n)
                                    sums[n][p] =
                                        dot4(sums[n][p],
                                             v[n][g * kGroupWords + word] >> (4 * half) & 0x0f0f0f0fu, digit);
                            }
                    }
                    for (int n = 0; n < N; ++n)
                        for (int p = 0; p < D; ++p) part[n][p] += widened(sums[n][p]);
                }
                for (int n = 0; n < N; ++n)
                    total[m][n] = add_group(part[n], load(scales[scale + g] + n * kLanes),
                                            load(biases[scale + g] + n * kLanes),
                                            scales_of(x[m], groups) + g0 + g, groups, total[m][n]);
            }
        }
    }
    alignas(64) float sums[M][kPanelLanes];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(sums[m] + n * kLanes, total[m][n]);
    put(out, row - first, N * kLanes, M, sums);
}

template <int D, class Type>
void digits_of(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
               const float* const* x, int M, const Output& out) {
    const int64_t end = first + outputs;
    int64_t row = first;
    if constexpr (kLanes >= kGroupWords)  // a tile of words is a group's or several
        for (constexpr int64_t kRows = kStreamVectors * kLanes;
             M <= kStreamRows && !panels && row + kRows <= end; row += kRows) {
            if (M == 1) digits_stream<D, kStreamVectors, 1, Type>(w, row, first, x, out);
            if (M == 2) digits_stream<D, kStreamVectors, 2, Type>(w, row, first, x, out);
        }
    for (; end - row > kPanelLanes / 2; row += kPanelLanes)
        digits_block<D, kPanelRows, Type>(w, panels, row, end, first, x, M, out);
    if (row < end) digits_block<D, kPanelRows / 2, Type>(w, panels, row, end, first, x, M, out);
}

// Whether a matrix can be kept as records, which then are as large as it was.
bool packs(const Linear& w) {
    return w.bits == 4 && w.scales.dtype == DType::bf16 && w.rows % kPanelLanes == 0;
}

// Rows [kPanelLanes block, kPanelLanes (block + 1)) of W as records, at their place in `panels`.
void pack(const Linear& w, int64_t block, std::byte* panels) {
    const int64_t groups = w.columns / kGroup, row = block * kPanelLanes;
    auto* records = reinterpret_cast<Record<uint16_t>*>(panels) + block * groups;
    for (int64_t g0 = 0; g0 < groups; g0 += kPanelGroups) {
        const int count = static_cast<int>(groups - g0 < kPanelGroups ? groups - g0 : kPanelGroups);
        for (int n = 0; n < kPanelRows; ++n)
            take_groups<Bf16>(w, row + n * kLanes, w.rows, g0, count, n * kLanes, records + g0);
    }
}

template <int D>
void product_digits(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                    const float* const* x, int M, Output out) {
    if (w.bits != 4) return product(w, panels, first, outputs, x, M, out);
    if (w.scales.dtype == DType::bf16) return digits_of<D, Bf16>(w, panels, first, outputs, x, M, out);
    if (w.scales.dtype == DType::f16) return digits_of<D, F16>(w, panels, first, outputs, x, M, out);
    digits_of<D, F32>(w, panels, first, outputs, x, M, out);
}

}  // namespace

#define LILY_DIGITS_TABLE(title, digits)                                                                    \
    LILY_KERNEL_TABLE(title, arrange_digits<digits>, product_digits<digits>, nullptr, nullptr, packs, pack, \
                      nullptr, nullptr)

}  // namespace lily
