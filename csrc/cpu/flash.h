// Attention of a prompt's rows in the matrix tiles of AMX: queries, keys, exponentials and values in
// bfloat16, sums in float32. A block of rows takes pages in order, so that a row's result depends on its
// position alone.
#pragma once

#include "cpu/tiles.h"

namespace lily {
namespace {

constexpr int kPageTiles = kPage / kTile;  // tiles of keys across a page
constexpr int kPageSteps = kPage / kStep;  // steps of keys

// Two rows of 32 numbers as 32 pairs, one number of each.
LILY_INLINE void store_pairs(__m512i first, __m512i second, uint16_t* low, uint16_t* high) {
    alignas(64) static constexpr auto kOrder = [] {
        std::array<std::array<uint16_t, kStep>, 2> order{};
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < kStep; ++i)
                order[half][i] = static_cast<uint16_t>(half * kTile + i / 2 + i % 2 * kStep);
        return order;
    }();
    _mm512_storeu_si512(low, _mm512_permutex2var_epi16(first, _mm512_load_si512(kOrder[0].data()), second));
    _mm512_storeu_si512(high, _mm512_permutex2var_epi16(first, _mm512_load_si512(kOrder[1].data()), second));
}

// A matrix (rows, columns) of bfloat16 as right operands (rows / 32, columns / 16, 16 pairs of rows, 16
// columns). Rows and columns from `rows_end` and `columns_end` on are zeros.
void pair_rows(const uint16_t* from, int rows, int columns, int64_t rows_end, int64_t columns_end,
               uint16_t* tiles) {
    const int across = columns / kTile;
    for (int row = 0; row < rows; row += 2)
        for (int column = 0; column < columns; column += kStep) {
            const int64_t left = columns_end - column;
            const auto mask = left >= kStep ? ~__mmask32{0} : left <= 0 ? 0 : (__mmask32{1} << left) - 1;
            __m512i v[2];
            for (int i = 0; i < 2; ++i)
                v[i] = _mm512_maskz_loadu_epi16(row + i < rows_end ? mask : 0,
                                                from + int64_t{row + i} * columns + column);
            uint16_t* to = tiles + (int64_t{row / kStep} * across + column / kTile) * kTileNumbers +
                           row % kStep / 2 * kStep;
            store_pairs(v[0], v[1], to, to + kTileNumbers);
        }
}

void flash_begin(FlashBlock& b, const float* const* query) {
    const int steps = b.head_dim / kStep;
    for (int m = 0; m < b.rows; ++m) {
        uint16_t* to = b.queries + (m / kTile * steps * kTile + m % kTile) * kStep;
        for (int step = 0; step < steps; ++step, to += kTileNumbers)
            _mm512_storeu_si512(
                to, bf16_pair(load(query[m] + step * kStep), load(query[m] + step * kStep + kLanes)));
    }
    for (int m = b.rows; m % (2 * kTile) != 0; ++m)
        for (int step = 0; step < steps; ++step)
            std::memset(b.queries + ((m / kTile * steps + step) * kTile + m % kTile) * kStep, 0, 2 * kStep);
    for (int m = 0; m < b.rows; ++m) b.most[m] = -__builtin_inff(), b.total[m] = 0;
    std::memset(
        b.out, 0,
        static_cast<size_t>((b.rows + 2 * kTile - 1) / (2 * kTile) * 2 * kTile * b.head_dim) * sizeof(float));
}

// Turns 256 scores of which `seen` count into exponentials in bfloat16, a tile's row each 32 of them. Returns
// what the sums so far are to be multiplied by.
LILY_INLINE float exponentials(float* scores, int64_t seen, float& most, float& total, uint16_t* to) {
    Floats best = splat(most);
    for (int key = 0; key < kPage; key += kLanes) {
        Floats v = load(scores + key);
        if (key + kLanes > seen) {
            const auto mask = seen <= key ? 0 : (1 << (seen - key)) - 1;
            v = reinterpret_cast<Floats>(
                _mm512_mask_mov_ps(reinterpret_cast<__m512>(splat(-__builtin_inff())),
                                   static_cast<__mmask16>(mask), reinterpret_cast<__m512>(v)));
            store(scores + key, v);
        }
        best = max(best, v);
    }
    float top = best[0];
    for (int lane = 1; lane < kLanes; ++lane) top = best[lane] > top ? best[lane] : top;
    const Floats minus = splat(-top);
    Floats sum_of = Floats{};
    for (int key = 0; key < kPage; key += kStep, to += kTileNumbers) {
        const Floats low = exp(load(scores + key) + minus), high = exp(load(scores + key + kLanes) + minus);
        sum_of += low + high;
        _mm512_storeu_si512(to, bf16_pair(low, high));
    }
    const float keep = exp(splat(most - top))[0];
    most = top;
    total = total * keep + sum(sum_of);
    return keep;
}

// Tiles 0 to 3, two of rows by two of columns, += A (2 of rows, `row` steps apart, steps) B (steps, across).
LILY_INLINE void multiply_pair(const uint16_t* a, int64_t row, int steps, const uint16_t* b, int64_t across) {
    before_loads();
    for (int step = 0; step < steps; ++step, a += kTileNumbers, b += across * kTileNumbers) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(5, a + row * kTileNumbers, 64);
        _tile_loadd(7, b + kTileNumbers, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// keys: (Dh, 256), values (256, Dh), of which `count` positions exist. Row m sees seen[m] of them.
void flash_page(FlashBlock& b, const void* keys, const void* values, int64_t count, const int64_t* seen) {
    const Tiles in_use;
    const int Dh = b.head_dim, steps = Dh / kStep, across = Dh / kTile;
    pair_rows(static_cast<const uint16_t*>(keys), Dh, kPage, Dh, count, b.keys);
    pair_rows(static_cast<const uint16_t*>(values), kPage, Dh, count, Dh, b.values);
    const int key_tiles = static_cast<int>((count + 2 * kTile - 1) / (2 * kTile)) * 2;
    const int key_steps = key_tiles / 2;
    alignas(64) float scores[2 * kTile][kPage];
    alignas(64) uint16_t weights[2][kPageSteps][kTile][kStep];
    for (int m = 0; m < b.rows; m += 2 * kTile) {
        const int rows = b.rows - m < 2 * kTile ? b.rows - m : 2 * kTile;
        if (seen[m + rows - 1] <= 0) continue;  // later rows see more
        const uint16_t* queries = b.queries + int64_t{m / kTile} * steps * kTileNumbers;
        for (int tile = 0; tile < key_tiles; tile += 2) {
            clear_sums();
            multiply_pair(queries, steps, steps, b.keys + tile * kTileNumbers, kPageTiles);
            _tile_stored(0, &scores[0][tile * kTile], sizeof scores[0]);
            _tile_stored(1, &scores[0][(tile + 1) * kTile], sizeof scores[0]);
            _tile_stored(2, &scores[kTile][tile * kTile], sizeof scores[0]);
            _tile_stored(3, &scores[kTile][(tile + 1) * kTile], sizeof scores[0]);
        }
        float* out = b.out + int64_t{m} * Dh;
        for (int i = 0; i < 2 * kTile; ++i) {
            uint16_t* to = weights[i / kTile][0][i % kTile];
            if (i >= rows || seen[m + i] <= 0) {
                for (int step = 0; step < kPageSteps; ++step)
                    std::memset(to + step * kTileNumbers, 0, 2 * kStep);
                continue;
            }
            for (int tile = key_tiles; tile < kPageTiles; ++tile) store(&scores[i][tile * kTile], Floats{});
            const int64_t visible = seen[m + i] < kPage ? seen[m + i] : kPage;
            const float keep = exponentials(scores[i], visible, b.most[m + i], b.total[m + i], to);
            if (keep != 1)
                for (int d = 0; d < Dh; d += kLanes) store(out + i * Dh + d, load(out + i * Dh + d) * keep);
        }
        before_loads();
        for (int tile = 0; tile < across; tile += 2) {
            float* to = out + tile * kTile;
            _tile_loadd(0, to, 4 * Dh);
            _tile_loadd(1, to + kTile, 4 * Dh);
            _tile_loadd(2, to + kTile * Dh, 4 * Dh);
            _tile_loadd(3, to + kTile * Dh + kTile, 4 * Dh);
            multiply_pair(weights[0][0][0], kPageSteps, key_steps, b.values + tile * kTileNumbers, across);
            _tile_stored(0, to, 4 * Dh);
            _tile_stored(1, to + kTile, 4 * Dh);
            _tile_stored(2, to + kTile * Dh, 4 * Dh);
            _tile_stored(3, to + kTile * Dh + kTile, 4 * Dh);
        }
    }
}

}  // namespace
}  // namespace lily
