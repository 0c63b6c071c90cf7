// Products of prompts in the matrix tiles of AMX: weights of 4 bits become bfloat16, scale * q + bias rounded
// once as MLX rounds it, on their way into a tile; inputs are rounded to bfloat16; sums are float32.
//
// W is the left operand: a tile is 16 rows of it and 32 columns, which a table of a group's 16 weights
// unpacks in one permutation. Inputs are the right operand: 16 rows of them and the same 32 columns, in
// pairs. The word of 16 bits L of a row of weights holds columns 4 L to 4 L + 3, so that step s of a chunk of
// 128 columns takes columns 4 L + s, and inputs are arranged in that order. While the tiles of one slab of
// weights are multiplied, the next is unpacked between them: two units of the processor, busy at the same
// time.
#pragma once

#include <array>

#include "cpu/amx.h"
#include "cpu/digits.h"

namespace lily {
namespace {

constexpr int kStep = 32;                    // columns of W that a tile takes
constexpr int kTileNumbers = kTile * kStep;  // of bfloat16, 1 KB
constexpr int kChunk = 128;                  // columns of a row whose words fill a register: two groups
constexpr int kChunkSteps = kChunk / kStep;
constexpr int kSlabChunks = 2;  // 32 rows x 256 columns: 16 KB, twice, of the first-level cache's 48
constexpr int kSlabSteps = kSlabChunks * kChunkSteps;
constexpr int kChunksAhead = 4;             // that memory is asked for before they are unpacked
constexpr int kBlocks = kTileRows / kTile;  // blocks of inputs that a call multiplies

constexpr int64_t chunks_of(int64_t columns) {
    return tiled_columns(columns) / kChunk;
}

LILY_INLINE __m512i bf16_pair(Floats low, Floats high) {
    return reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
}

// A row of inputs in bfloat16, padded with zeros to whole chunks; within a chunk number (s, L) is column 4 L
// + s.
void arrange_tiles(const float* x, int64_t columns, int bits, float* out) {
    if (bits != 4) return arrange(x, columns, bits, out);
    alignas(64) uint16_t order[2][kStep];  // of half a chunk, 64 columns: two steps' 16 numbers each
    for (int i = 0; i < kStep; ++i)
        for (int two = 0; two < 2; ++two)
            order[two][i] = static_cast<uint16_t>(4 * (i % kTile) + i / kTile + 2 * two);
    const __m512i first = _mm512_load_si512(order[0]), second = _mm512_load_si512(order[1]);
    auto* to = reinterpret_cast<__m512i*>(out);
    for (int64_t k = 0; k < columns; k += kChunk, to += kChunkSteps) {
        __m512i half[2][2];
        for (int h = 0; h < 2; ++h) {
            __m512i v[2];
            for (int i = 0; i < 2; ++i) {
                const int64_t at = k + 64 * h + 32 * i;
                v[i] = at < columns ? bf16_pair(load(x + at), load(x + at + kLanes)) : __m512i{};
            }
            half[h][0] = _mm512_permutex2var_epi16(v[0], first, v[1]);
            half[h][1] = _mm512_permutex2var_epi16(v[0], second, v[1]);
        }
        for (int two = 0; two < 2; ++two) {
            _mm512_storeu_si512(to + 2 * two,
                                _mm512_maskz_shuffle_i64x2(0xff, half[0][two], half[1][two], 0x44));
            _mm512_storeu_si512(to + 2 * two + 1,
                                _mm512_maskz_shuffle_i64x2(0xff, half[0][two], half[1][two], 0xee));
        }
    }
}

// M arranged rows as tiles (M / 16, columns / 32, 16 pairs, 16 rows); rows that are missing are zeros.
void tile_rows(const float* const* x, int M, int64_t columns, uint16_t* tiles) {
    const int64_t steps = chunks_of(columns) * kChunkSteps;
    for (int m = 0; m < M; m += kTile)
        for (int64_t step = 0; step < steps; ++step, tiles += kTileNumbers) {
            Words v[kLanes];
            for (int i = 0; i < kTile; ++i)
                v[i] = m + i < M ? load_as<Words>(x[m + i] + step * kTile) : Words{};
            transpose(v);
            for (int i = 0; i < kTile; ++i) std::memcpy(tiles + i * kStep, &v[i], sizeof v[i]);
        }
}

// Where 32 rows of W come from: their words, scales and biases, a chunk at a time.
template <class Type>
struct InPlace {
    const Linear& w;
    int64_t row, last;  // the last row that exists

    // Of 16 rows from 16 `half` on.
    LILY_INLINE void take(int half, int64_t chunk, Words (&words)[kTile], float (&scale)[2][kTile],
                          float (&bias)[2][kTile]) const {
        const int64_t columns = w.columns, groups = columns / kGroup, row_words = columns / 8;
        const int64_t bytes = groups * static_cast<int64_t>(bytes_of(w.scales.dtype));
        for (int i = 0; i < kTile; ++i) {
            const int64_t wanted = row + half * kTile + i, r = wanted < last ? wanted : last;
            words[i] = words_at(w.weight.data + r * row_words * 4, chunk * kTile, row_words);
            for (int64_t g = 0; g < 2; ++g) {
                const bool exists = 2 * chunk + g < groups;
                scale[g][i] = exists ? Type::get(w.scales.data + r * bytes, 2 * chunk + g) : 0.f;
                bias[g][i] = exists ? Type::get(w.biases.data + r * bytes, 2 * chunk + g) : 0.f;
            }
        }
    }
    LILY_INLINE void ask(int64_t) const {}
};

struct Packed {
    const Record<uint16_t>* records;
    int64_t groups;

    LILY_INLINE void take(int half, int64_t chunk, Words (&words)[kTile], float (&scale)[2][kTile],
                          float (&bias)[2][kTile]) const {
        for (int64_t g = 0; g < 2; ++g) {
            const bool exists = 2 * chunk + g < groups;
            const Record<uint16_t>& record = records[exists ? 2 * chunk + g : 2 * chunk];
            for (int j = 0; j < kGroupWords; ++j)
                words[g * kGroupWords + j] = load_as<Words>(record.words[j] + half * kTile);
            store(scale[g], exists ? scales_at(record.scales + half * kTile) : Floats{});
            store(bias[g], exists ? scales_at(record.biases + half * kTile) : Floats{});
        }
        transpose(words);
    }
    // Asks memory for a chunk.
    LILY_INLINE void ask(int64_t chunk) const {
        const auto* at = reinterpret_cast<const std::byte*>(records + 2 * chunk);
        for (size_t byte = 0; byte < 2 * sizeof *records; byte += 64) __builtin_prefetch(at + byte);
    }
};

// 16 rows and a chunk of W: four tiles, two tiles' size apart.
template <class Source>
LILY_INLINE void unpack(const Source& source, int half, int64_t chunk, uint16_t* tiles) {
    alignas(64) float scale[2][kTile], bias[2][kTile];
    Words words[kTile];
    source.take(half, chunk, words, scale, bias);
    const Floats q = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i nibble = _mm512_set1_epi16(15);
    const __m512i second = _mm512_maskz_set1_epi16(0xffff0000u, 16);
#pragma GCC unroll 4
    for (int i = 0; i < kTile; ++i) {
        const __m512i table = bf16_pair(fma(q, splat(scale[0][i]), splat(bias[0][i])),
                                        fma(q, splat(scale[1][i]), splat(bias[1][i])));
        const auto word = reinterpret_cast<__m512i>(words[i]);
#pragma GCC unroll 4
        for (int s = 0; s < kChunkSteps; ++s) {
            constexpr int kAndOr = 0xea;  // a & b | c
            const __m512i index =
                _mm512_ternarylogic_epi32(_mm512_srli_epi16(word, 4 * s), nibble, second, kAndOr);
            _mm512_store_si512(tiles + s * 2 * kTileNumbers + i * kStep,
                               _mm512_permutexvar_epi16(index, table));
        }
    }
}

// One of the units of a slab of 32 rows, whose tiles are (steps, 2): the first 16 rows, then the others.
template <class Source>
LILY_INLINE void unpack_unit(const Source& source, int64_t slab, int unit, uint16_t* tiles) {
    const int chunk = unit / 2, half = unit % 2;
    if (half == 0) source.ask(slab * kSlabChunks + chunk + kChunksAhead);
    unpack(source, half, slab * kSlabChunks + chunk, tiles + (2 * chunk * kChunkSteps + half) * kTileNumbers);
}

// Tiles 0 to 3 += a slab's tiles times those of one or two blocks of inputs. between(step) runs in the shadow
// of the tiles' products.
template <int kBlocksAtOnce, class Between>
LILY_INLINE void multiply_slab(const uint16_t* w, const uint16_t* x, int64_t block, int steps,
                               const Between& between) {
    before_loads();
    for (int step = 0; step < steps; ++step, w += 2 * kTileNumbers, x += kTileNumbers) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, x, 64);
        _tile_loadd(5, w + kTileNumbers, 64);
        if constexpr (kBlocksAtOnce == 2) _tile_loadd(7, x + block, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (kBlocksAtOnce == 2) {
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        between(step);
    }
}

// Sums of 32 rows of W with kBlocks blocks of inputs: (blocks, 2, 16 rows of W, 16 of inputs).
using TileSums = float[kBlocks][2][kTile * kTile];

LILY_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

LILY_INLINE void load_sums(bool first, bool two, const float (*sums)[2][kTile * kTile]) {
    if (first) return clear_sums();
    before_loads();
    _tile_loadd(0, sums[0][0], 64);
    _tile_loadd(1, sums[0][1], 64);
    if (!two) return;
    _tile_loadd(2, sums[1][0], 64);
    _tile_loadd(3, sums[1][1], 64);
}

LILY_INLINE void store_sums(bool two, float (*sums)[2][kTile * kTile]) {
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (!two) return;
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
}

// Rows [at, at + count) of W, of one tile, times a block's rows m.
LILY_INLINE void put_tile(const float* sums, int64_t at, int64_t count, int m, int M, const Output& out) {
    Words v[kLanes];
    for (int i = 0; i < kTile; ++i) v[i] = load_as<Words>(sums + i * kTile);
    transpose(v);
    const auto mask = static_cast<__mmask16>(count >= kTile ? 0xffff : (1 << count) - 1);
    for (int i = 0; i < kTile && m + i < M; ++i) {
        float* to = out.row[m + i] + at;
        auto y = reinterpret_cast<Floats>(v[i]);
        if (out.scale)
            y = reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(mask, to)) + splat(out.scale[m + i]) * y;
        _mm512_mask_storeu_ps(to, mask, reinterpret_cast<__m512>(y));
    }
}

// 32 rows of W from `row` on, which `source_of(row)` reads, times M rows of inputs in tiles.
template <class SourceOf>
void product_rows(const SourceOf& source_of, int64_t columns, int64_t first, int64_t end, const uint16_t* x,
                  int M, const Output& out) {
    const Tiles in_use;
    const int64_t chunks = chunks_of(columns), block = chunks * kChunkSteps * kTileNumbers;
    const int64_t slabs = (chunks + kSlabChunks - 1) / kSlabChunks;
    const int blocks = (M + kTile - 1) / kTile;
    alignas(64) uint16_t slab_tiles[2][kSlabSteps * 2 * kTileNumbers];
    alignas(64) TileSums sums;
    const auto chunks_in = [&](int64_t slab) {
        return static_cast<int>(chunks - slab * kSlabChunks < kSlabChunks ? chunks - slab * kSlabChunks
                                                                          : kSlabChunks);
    };
    const auto first_source = source_of(first);
    for (int unit = 0; unit < 2 * chunks_in(0); ++unit) unpack_unit(first_source, 0, unit, slab_tiles[0]);
    int now = 0;
    for (int64_t row = first; row < end; row += kPanelLanes) {
        for (int64_t slab = 0; slab < slabs; ++slab, now ^= 1) {
            // What is unpacked meanwhile: the next slab of these rows, or the first of the next.
            const bool same = slab + 1 < slabs;
            const auto next = source_of(same || row + kPanelLanes >= end ? row : row + kPanelLanes);
            const int64_t next_slab = same ? slab + 1 : 0;
            const int units = same || row + kPanelLanes < end ? 2 * chunks_in(next_slab) : 0;
            const int steps = chunks_in(slab) * kChunkSteps, pairs = (blocks + 1) / 2;
            const int interval = steps * pairs >= units ? steps * pairs / (units ? units : 1) : 1;
            int unit = 0, wait = interval, block_now = 0;
            const auto between = [&](int step) {
                if (!same)  // where the sums of two blocks will go, two rows a step
                    for (int i = 0; i < 2; ++i) {
                        const int m = block_now * kTile + 2 * (step % kTile) + i;
                        if (m < M) {
                            __builtin_prefetch(out.row[m] + row - first, 1);
                            __builtin_prefetch(out.row[m] + row - first + kTile, 1);
                        }
                    }
                if (--wait == 0) {
                    wait = interval;
                    if (unit < units) unpack_unit(next, next_slab, unit++, slab_tiles[now ^ 1]);
                }
            };
            const uint16_t* inputs = x + slab * kSlabSteps * kTileNumbers;
            for (int b = 0; b < blocks; b += 2, inputs += 2 * block) {
                const bool two = b + 1 < blocks;
                block_now = b;
                if (slab == 0 || blocks > 2) load_sums(slab == 0, two, sums + b);
                if (two) {
                    multiply_slab<2>(slab_tiles[now], inputs, block, steps, between);
                } else {
                    multiply_slab<1>(slab_tiles[now], inputs, block, steps, between);
                }
                if (!same || blocks > 2) store_sums(two, sums + b);
                for (int i = 0; !same && i < 2 * (two + 1); ++i) {
                    const int64_t at = row + i % 2 * kTile;
                    if (at < end)
                        put_tile(sums[b + i / 2][i % 2], at - first, end - at, (b + i / 2) * kTile, M, out);
                }
            }
            while (unit < units) unpack_unit(next, next_slab, unit++, slab_tiles[now ^ 1]);
        }
    }
}

template <class Type>
void product_tiles_of(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                      const uint16_t* x, int M, const Output& out) {
    const int64_t end = first + outputs, groups = w.columns / kGroup;
    if (std::is_same_v<Type, Bf16> && panels && first % kPanelLanes == 0 && outputs % kPanelLanes == 0) {
        const auto* records = reinterpret_cast<const Record<uint16_t>*>(panels);
        const auto source = [&](int64_t row) { return Packed{records + row / kPanelLanes * groups, groups}; };
        return product_rows(source, w.columns, first, end, x, M, out);
    }
    const auto source = [&](int64_t row) { return InPlace<Type>{w, row, end - 1}; };
    product_rows(source, w.columns, first, end, x, M, out);
}

// ---- Matrices of 8 bits, such as the router's, in float32 throughout: a prompt's rows share what unpacking
// costs.

constexpr int kUnpackedRows = 4;            // of W, times as many of inputs: all the registers
constexpr int64_t kUnpackedColumns = 4096;  // at most, 64 KB

template <int M>
LILY_INLINE void multiply_unpacked(const float (*w)[kUnpackedColumns], int64_t columns, const float* const* x,
                                   float (&y)[kUnpackedRows][M]) {
    Floats total[kUnpackedRows][M];
    for (int r = 0; r < kUnpackedRows; ++r)
        for (int m = 0; m < M; ++m) total[r][m] = Floats{};
    for (int64_t k = 0; k < columns; k += kLanes) {
        Floats inputs[M];
        for (int m = 0; m < M; ++m) inputs[m] = load(x[m] + k);
        for (int r = 0; r < kUnpackedRows; ++r)
            for (int m = 0; m < M; ++m) total[r][m] = fma(load(w[r] + k), inputs[m], total[r][m]);
    }
    for (int r = 0; r < kUnpackedRows; ++r)
        for (int m = 0; m < M; ++m) y[r][m] = sum(total[r][m]);
}

template <class Type>
void product_unpacked(const Linear& w, int64_t first, int64_t outputs, const float* const* x, int M,
                      const Output& out) {
    alignas(64) float unpacked[kUnpackedRows][kUnpackedColumns];
    const int64_t words = w.columns / 4, groups = w.columns / kGroup;
    const int64_t chunks = (words + kLanes - 1) / kLanes;
    const int64_t scale_bytes = groups * static_cast<int64_t>(bytes_of(w.scales.dtype));
    for (int64_t o = 0; o < outputs; o += kUnpackedRows) {
        const int rows = outputs - o < kUnpackedRows ? static_cast<int>(outputs - o) : kUnpackedRows;
        for (int r = 0; r < kUnpackedRows; ++r) {
            const int64_t row = first + o + (r < rows ? r : rows - 1);
            for (int64_t c = 0; c < chunks; ++c) {
                const Words word = words_at(w.weight.data + row * words * 4, c * kLanes, words);
                const Floats scale = scale_lanes<Type, 8>(w.scales.data + row * scale_bytes, c, groups),
                             bias = scale_lanes<Type, 8>(w.biases.data + row * scale_bytes, c, groups);
                for (int j = 0; j < 4; ++j)
                    store(unpacked[r] + (c * 4 + j) * kLanes, fma(byte(word, j), scale, bias));
            }
        }
        const auto put_rows = [&](const auto& y, int m0, int count) {
            for (int m = 0; m < count; ++m)
                for (int r = 0; r < rows; ++r) put_one(out, m0 + m, o + r, y[r][m]);
        };
        int m = 0;
        for (; m + 4 <= M; m += 4) {
            float y[kUnpackedRows][4];
            multiply_unpacked<4>(unpacked, chunks * 4 * kLanes, x + m, y);
            put_rows(y, m, 4);
        }
        for (; m < M; ++m) {
            float y[kUnpackedRows][1];
            multiply_unpacked<1>(unpacked, chunks * 4 * kLanes, x + m, y);
            put_rows(y, m, 1);
        }
    }
}

// Products that no tiles take.
void product_rows_of(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                     const float* const* x, int M, Output out) {
    if (w.bits != 8 || w.columns > kUnpackedColumns) return product(w, panels, first, outputs, x, M, out);
    if (w.scales.dtype == DType::bf16) return product_unpacked<Bf16>(w, first, outputs, x, M, out);
    if (w.scales.dtype == DType::f16) return product_unpacked<F16>(w, first, outputs, x, M, out);
    product_unpacked<F32>(w, first, outputs, x, M, out);
}

void product_tiles(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                   const uint16_t* x, int M, Output out) {
    if (w.scales.dtype == DType::bf16) return product_tiles_of<Bf16>(w, panels, first, outputs, x, M, out);
    if (w.scales.dtype == DType::f16) return product_tiles_of<F16>(w, panels, first, outputs, x, M, out);
    product_tiles_of<F32>(w, panels, first, outputs, x, M, out);
}

}  // namespace
}  // namespace lily
