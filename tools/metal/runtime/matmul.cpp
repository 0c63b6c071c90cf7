// matmul2d: the last lane of a SIMD-group to come gathers the operands, multiplies, and hands the result out.
#include <bit>
#include <cstring>
#include <type_traits>
#include <vector>

#include "findings.h"
#include "instruments.h"
#include "scheduler.h"

using namespace lily::metal;

extern "C" __bf16 __truncsfbf2(float value);

namespace {

enum Type : uint32_t { kFloat, kHalf, kBfloat, kInt8, kUint8, kInt32 };
constexpr uint32_t kBytes[] = {4, 2, 2, 1, 1, 4};

// Number i of lane l in its SIMD-group's part of a tile in registers; cooperative_tensor's own rule.
constexpr uint32_t place_of(uint32_t lane, uint32_t i) {
    return i * kSimdWidth + ((lane * 5 + i * 7) & 31);
}

// bfloat in memory, which converts to float by a shift.
struct Bfloat {
    uint16_t bits;
    explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
    explicit operator int32_t() const { return static_cast<int32_t>(static_cast<float>(*this)); }
};

// Calls function(values) with the memory at an address as numbers of a type.
template <class Function>
void as_type(uint64_t address, uint32_t type, Function function) {
    switch (type) {
        case kFloat:
            function(reinterpret_cast<float*>(address));
            break;
        case kHalf:
            function(reinterpret_cast<_Float16*>(address));
            break;
        case kBfloat:
            function(reinterpret_cast<Bfloat*>(address));
            break;
        case kInt8:
            function(reinterpret_cast<int8_t*>(address));
            break;
        case kUint8:
            function(reinterpret_cast<uint8_t*>(address));
            break;
        default:
            function(reinterpret_cast<int32_t*>(address));
    }
}

template <class Stored, class T>
void store(Stored& to, T value) {
    if constexpr (std::is_same_v<Stored, Bfloat>)
        to.bits = std::bit_cast<uint16_t>(__truncsfbf2(static_cast<float>(value)));
    else
        to = static_cast<Stored>(value);
}

// All lanes' copies of one operand.
struct Operand {
    const msl_tile* tiles[kSimdWidth];
    uint32_t first_row;  // of this SIMD-group's part, where the tile lies in memory
    uint32_t rows;       // of this part

    const msl_tile& tile() const { return *tiles[0]; }
};

void note_memory(const Operand& operand, bool write, uint32_t line) {
    const msl_tile& tile = operand.tile();
    if (!kInstrumented || tile.in_registers) return;
    Instruments& instruments = *current_lane().worker->instruments;
    const int64_t bytes = kBytes[tile.type];
    const auto* base =
        reinterpret_cast<const char*>(tile.address) + operand.first_row * tile.row_stride * bytes;
    const bool by_rows = tile.column_stride == 1;
    const int64_t step = (by_rows ? tile.row_stride : tile.column_stride) * bytes;
    const uint32_t runs = by_rows ? operand.rows : tile.columns,
                   length = by_rows ? tile.columns : operand.rows;
    if (by_rows || tile.row_stride == 1) {
        instruments.tile(base, length * kBytes[tile.type], runs, step, write, kBytes[tile.type], line);
        return;
    }
    for (uint32_t i = 0; i < length; ++i)
        instruments.tile(base + i * tile.row_stride * bytes, kBytes[tile.type], runs, step, write,
                         kBytes[tile.type], line);
}

// Reads an operand into rows x columns, row by row.
template <class T>
void gather(const Operand& operand, std::vector<T>& to, std::vector<T>& scratch, uint32_t line) {
    const msl_tile& tile = operand.tile();
    const uint32_t columns = tile.columns;
    to.resize(static_cast<size_t>(operand.rows) * columns);
    note_memory(operand, false, line);
    if (!tile.in_registers) {
        as_type(tile.address, tile.type, [&](const auto* from) {
            from += operand.first_row * tile.row_stride;
            if (tile.column_stride == 1) {
                for (uint32_t row = 0; row < operand.rows; ++row)
                    for (uint32_t column = 0; column < columns; ++column)
                        to[row * columns + column] = static_cast<T>(from[row * tile.row_stride + column]);
            } else {  // along the rows, which lie next to each other where the operand is transposed
                for (uint32_t column = 0; column < columns; ++column)
                    for (uint32_t row = 0; row < operand.rows; ++row)
                        to[row * columns + column] =
                            static_cast<T>(from[row * tile.row_stride + column * tile.column_stride]);
            }
        });
        return;
    }
    const bool as_held = tile.column_stride == 1;  // or transposed
    const auto held_columns = static_cast<uint32_t>(as_held ? tile.row_stride : tile.column_stride);
    std::vector<T>& held = as_held ? to : scratch;
    held.resize(to.size());
    for (uint32_t lane = 0; lane < kSimdWidth; ++lane)
        as_type(operand.tiles[lane]->address, tile.type, [&](const auto* from) {
            for (uint32_t i = 0; i < to.size() / kSimdWidth; ++i)
                held[place_of(lane, i)] = static_cast<T>(from[i]);
        });
    if (as_held) return;
    for (uint32_t row = 0; row < operand.rows; ++row)
        for (uint32_t column = 0; column < columns; ++column)
            to[row * columns + column] = held[column * held_columns + row];
}

template <class T>
void scatter(const Operand& operand, const std::vector<T>& from, uint32_t line) {
    const msl_tile& tile = operand.tile();
    note_memory(operand, true, line);
    if (!tile.in_registers) {
        as_type(tile.address, tile.type, [&](auto* to) {
            for (uint32_t row = 0; row < operand.rows; ++row)
                for (uint32_t column = 0; column < tile.columns; ++column)
                    store(to[(operand.first_row + row) * tile.row_stride + column * tile.column_stride],
                          from[row * tile.columns + column]);
        });
        return;
    }
    for (uint32_t lane = 0; lane < kSimdWidth; ++lane)
        as_type(operand.tiles[lane]->address, tile.type, [&](auto* to) {
            for (uint32_t i = 0; i < from.size() / kSimdWidth; ++i) store(to[i], from[place_of(lane, i)]);
        });
}

template <class T>
T fused(T x, T y, T sum) {
    if constexpr (std::is_same_v<T, float>)
        return __builtin_fmaf(x, y, sum);
    else
        return sum + x * y;
}

// c += a b, each element's sum from k = 0 on; kRows rows of kWide columns at a time stay in registers.
template <class T>
void multiply(const T* a, const T* b, T* c, uint32_t rows, uint32_t depth, uint32_t columns) {
    constexpr uint32_t kRows = 2, kWide = 32;
    const uint32_t whole_rows = rows / kRows * kRows, whole_columns = columns / kWide * kWide;
    for (uint32_t row = 0; row < whole_rows; row += kRows)
        for (uint32_t first = 0; first < whole_columns; first += kWide) {
            T sums[kRows][kWide];
            for (uint32_t r = 0; r < kRows; ++r)
                std::memcpy(sums[r], c + (row + r) * columns + first, sizeof sums[r]);
            for (uint32_t k = 0; k < depth; ++k)
                for (uint32_t r = 0; r < kRows; ++r)
                    for (uint32_t j = 0; j < kWide; ++j)
                        sums[r][j] = fused(a[(row + r) * depth + k], b[k * columns + first + j], sums[r][j]);
            for (uint32_t r = 0; r < kRows; ++r)
                std::memcpy(c + (row + r) * columns + first, sums[r], sizeof sums[r]);
        }
    for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t column = row < whole_rows ? whole_columns : 0; column < columns; ++column)
            for (uint32_t k = 0; k < depth; ++k)
                c[row * columns + column] =
                    fused(a[row * depth + k], b[k * columns + column], c[row * columns + column]);
}

template <class T>
void run(Products<T>& products, const Operand& a, const Operand& b, const Operand& c, bool accumulate,
         uint32_t line) {
    auto& [left, right, sum, held] = products;
    gather(a, left, held, line);
    gather(b, right, held, line);
    if (accumulate)
        gather(c, sum, held, line);
    else
        sum.assign(static_cast<size_t>(c.rows) * c.tile().columns, T(0));
    multiply(left.data(), right.data(), sum.data(), c.rows, a.tile().columns, c.tile().columns);
    scatter(c, sum, line);
}

// Whether the operands fit each other and lie within their tensors; reports what does not.
bool fits(const msl_matmul& m, uint32_t line) {
    Worker& worker = *current_lane().worker;
    const struct {
        const msl_tile& tile;
        const char* name;
    } operands[] = {{m.a, "left operand"}, {m.b, "right operand"}, {m.c, "destination"}};
    for (const auto& [tile, name] : operands)
        if (tile.rows > tile.row_limit || tile.columns > tile.column_limit) {
            report(worker, Fault::kOutOfBounds, line,
                   "the %s of matmul2d is %u x %u, over its tensor's extents of %u x %u", name, tile.rows,
                   tile.columns, tile.row_limit, tile.column_limit);
            return false;
        }
    if (m.a.columns == m.b.rows) return true;
    report(worker, Fault::kMatrix, line, "matmul2d multiplies %u columns by %u rows", m.a.columns, m.b.rows);
    return false;
}

}  // namespace

extern "C" void msl_runtime_matmul(const msl_matmul* mine, uint32_t line) {
    Lane& lane = current_lane();
    lane.simd->operands[lane.thread.lane] = mine;
    meet(call_at(Call::kMatmul, line), [&](SimdGroup& simd, uint32_t) {
        if (simd.active != ~0u) {
            report(*lane.worker, Fault::kDivergence, line, "matmul2d needs all 32 lanes of a SIMD-group");
            return;
        }
        if (mine->simdgroups > 1 && mine->simdgroups != lane.worker->simd_count)
            report(*lane.worker, Fault::kLaunch, line,
                   "matmul2d of %u SIMD-groups runs in a threadgroup of %u", mine->simdgroups,
                   lane.worker->simd_count);
        if (!fits(*mine, line)) return;
        const uint32_t part = mine->c.in_registers ? mine->c.rows : mine->c.rows / mine->simdgroups;
        Operand a{.first_row = 0, .rows = mine->a.rows}, b{.first_row = 0, .rows = mine->b.rows},
            c{.first_row = 0, .rows = part};
        if (mine->simdgroups > 1) {
            a.first_row = c.first_row = simd.index * part;
            a.rows = part;
        }
        for (uint32_t i = 0; i < kSimdWidth; ++i) {
            const auto* operands = static_cast<const msl_matmul*>(simd.operands[i]);
            a.tiles[i] = &operands->a, b.tiles[i] = &operands->b, c.tiles[i] = &operands->c;
        }
        if (mine->c.type >= kInt8)
            run(lane.worker->integer_products, a, b, c, mine->accumulate, line);
        else
            run(lane.worker->float_products, a, b, c, mine->accumulate, line);
    });
}
