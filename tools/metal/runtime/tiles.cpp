// simdgroup_matrix and matrix multiplications: done once for a SIMD-group, in the machine's own vectors.
#include <bit>
#include <cstdlib>
#include <cstring>

#include "findings.h"
#include "instruments.h"
#include "scheduler.h"

using namespace lily::metal;

extern "C" __bf16 __truncsfbf2(float value);

namespace {

enum Stored : uint32_t { kFloat, kHalf, kBfloat };
constexpr int kSide = 8;

float read(const void* from, uint32_t type, int64_t index) {
    switch (type) {
        case kFloat:
            return static_cast<const float*>(from)[index];
        case kHalf:
            return static_cast<float>(static_cast<const _Float16*>(from)[index]);
        default:
            return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(from)[index])
                                        << 16);
    }
}

void write(void* to, uint32_t type, int64_t index, float value) {
    switch (type) {
        case kFloat:
            static_cast<float*>(to)[index] = value;
            break;
        case kHalf:
            static_cast<_Float16*>(to)[index] = static_cast<_Float16>(value);
            break;
        default:
            static_cast<__bf16*>(to)[index] = __truncsfbf2(value);
    }
}

float rounded(float value, uint32_t type) {
    if (type == kHalf) return static_cast<float>(static_cast<_Float16>(value));
    if (type == kBfloat) return static_cast<float>(__truncsfbf2(value));
    return value;
}

uint32_t bytes_of(uint32_t type) {
    return type == kFloat ? 4 : 2;
}

float* matrix(SimdGroup& simd, uint32_t id) {
    if (!simd.matrices) {
        simd.matrices = static_cast<float (*)[64]>(std::malloc(sizeof(float[64]) * MSL_MATRICES));
        if (!simd.matrices) std::abort();
    }
    return simd.matrices[id];
}

float* filled(SimdGroup& simd, uint32_t id) {
    simd.filled[id / 64] |= 1ull << id % 64;
    return matrix(simd, id);
}

const float* operand(SimdGroup& simd, uint32_t id, const char* name, uint32_t line) {
    if (!(simd.filled[id / 64] >> id % 64 & 1))
        report(*current_lane().worker, Fault::kMatrix, line, "%s holds nothing yet", name);
    return matrix(simd, id);
}

void note(const void* address, uint32_t type, int64_t stride, bool write, uint32_t line) {
    if (kInstrumented)
        current_lane().worker->instruments->tile(address, kSide * bytes_of(type), kSide,
                                                 stride * bytes_of(type), write, bytes_of(type), line);
}

using Row = float __attribute__((vector_size(32)));

// c += a b, each element's sum from k = 0 on.
void multiply(float* d, const float* a, const float* b, const float* c) {
    Row rows[kSide], right[kSide];
    std::memcpy(rows, c, sizeof rows);
    std::memcpy(right, b, sizeof right);
    for (int k = 0; k < kSide; ++k)
        for (int row = 0; row < kSide; ++row) {
            const float x = a[row * kSide + k];
            rows[row] = __builtin_elementwise_fma(Row{x, x, x, x, x, x, x, x}, right[k], rows[row]);
        }
    std::memcpy(d, rows, sizeof rows);
}

// Which two elements a lane holds in Apple's layout: its row, and the first of two columns.
void apple_place(uint32_t lane, uint32_t& row, uint32_t& column) {
    row = ((lane >> 2) & 4) + ((lane >> 1) & 3);
    column = ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
}

struct AppleOperands {
    float values[6];
    float result[2];
};

}  // namespace

extern "C" {

// Instrumented code's way to simdgroup_matrix.h's msl_my_turn: all lanes meet, and the last to come does the
// work.
uint32_t msl_runtime_matrix_turn(const void* address, uint64_t stride, uint32_t line) {
    Lane& lane = current_lane();
    bool last = false;
    const uint64_t mine[2] = {reinterpret_cast<uint64_t>(address), stride};
    std::memcpy(lane.simd->slots[lane.simd->generation & 1][lane.thread.lane].bytes, mine, sizeof mine);
    meet(call_at(Call::kMatrix, line), [&](SimdGroup& simd, uint32_t place) {
        last = true;
        if (simd.active != ~0u)
            report(*lane.worker, Fault::kDivergence, line,
                   "%d lanes returned before the matrix operation of line %u, which needs all 32",
                   kSimdWidth - std::popcount(simd.active), line);
        for (uint32_t i = 0; i < kSimdWidth; ++i)
            if (simd.active >> i & 1 && std::memcmp(simd.slots[place][i].bytes, mine, sizeof mine) != 0) {
                report(*lane.worker, Fault::kDivergence, line,
                       "lanes give the matrix operation of line %u different addresses or strides", line);
                break;
            }
    });
    return last;
}

void msl_runtime_matrix_fill(uint32_t to, float value, uint32_t diagonal) {
    float* m = filled(*current_lane().simd, to);
    for (int i = 0; i < kSide * kSide; ++i) m[i] = diagonal && i / kSide != i % kSide ? 0.0f : value;
}

void msl_runtime_matrix_copy(uint32_t to, uint32_t from) {
    SimdGroup& simd = *current_lane().simd;
    const bool empty = !(simd.filled[from / 64] >> from % 64 & 1);
    std::memcpy(filled(simd, to), matrix(simd, from), sizeof(float[64]));
    if (empty) simd.filled[to / 64] &= ~(1ull << to % 64);
}

void msl_runtime_matrix_load(uint32_t to, const void* from, uint32_t type, uint64_t stride,
                             uint32_t transpose, uint32_t line) {
    float* m = filled(*current_lane().simd, to);
    const auto step = static_cast<int64_t>(stride);
    note(from, type, step, false, line);
    for (int row = 0; row < kSide; ++row) {
        for (int column = 0; column < kSide; ++column)
            m[transpose ? column * kSide + row : row * kSide + column] =
                read(from, type, row * step + column);
    }
}

void msl_runtime_matrix_store(uint32_t from, void* to, uint32_t type, uint64_t stride, uint32_t transpose,
                              uint32_t line) {
    const float* m = operand(*current_lane().simd, from, "the stored matrix", line);
    const auto step = static_cast<int64_t>(stride);
    note(to, type, step, true, line);
    for (int row = 0; row < kSide; ++row) {
        for (int column = 0; column < kSide; ++column)
            write(to, type, row * step + column, m[transpose ? column * kSide + row : row * kSide + column]);
    }
}

void msl_runtime_matrix_multiply(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t type,
                                 uint32_t line) {
    SimdGroup& simd = *current_lane().simd;
    const float* left = operand(simd, a, "the left operand", line);
    const float* right = operand(simd, b, "the right operand", line);
    const float* sum = operand(simd, c, "the accumulator", line);
    float* result = filled(simd, to);
    multiply(result, left, right, sum);
    if (type != kFloat)
        for (int i = 0; i < kSide * kSide; ++i) result[i] = rounded(result[i], type);
}

void msl_runtime_apple_multiply(float* to, const float* from, uint32_t line) {
    Lane& lane = current_lane();
    AppleOperands mine;
    std::memcpy(mine.values, from, sizeof mine.values);
    lane.simd->operands[lane.thread.lane] = &mine;
    meet(call_at(Call::kMatmul, line), [](SimdGroup& simd, uint32_t) {
        float whole[3][64];
        for (uint32_t i = 0; i < kSimdWidth; ++i) {
            uint32_t row, column;
            apple_place(i, row, column);
            const auto* held = static_cast<const AppleOperands*>(simd.operands[i]);
            for (int part = 0; part < 3; ++part)
                std::memcpy(&whole[part][row * kSide + column], held->values + 2 * part, 8);
        }
        multiply(whole[2], whole[0], whole[1], whole[2]);
        for (uint32_t i = 0; i < kSimdWidth; ++i) {
            uint32_t row, column;
            apple_place(i, row, column);
            auto* held = static_cast<AppleOperands*>(const_cast<void*>(simd.operands[i]));
            std::memcpy(held->result, &whole[2][row * kSide + column], 8);
        }
    });
    std::memcpy(to, mine.result, sizeof mine.result);
}
}
