// Matrix units: the one file that knows them. A SIMD-group multiplies a Left tile, 16 x 32 bfloat, by a Right
// tile, 32 x 16 bfloat, into a Sum, 16 x 16 float; the lanes hold a tile together. Weights and keys lie
// transposed in memory, as Right has them; values do not, which takes a type of its own, PlainRight, and a
// PlainSum. A RowScale multiplies each row of a sum by a number. A BlockSum is the Sum of matmul.h's loop;
// its elements may be visited in pairs of neighbours as well.
//
// Two implementations of the same types. LILY_TENSOR selects Metal 4's tensor operations, for GPUs that
// have a matrix unit (M5 and later); without it simdgroup_matrix does the work, on the ordinary ALUs of M1 to
// M4. A kernel that multiplies in tiles is compiled with either, under two names, and the host asks for the
// one that its device can run. Which lane holds which element is documented for neither, so nobody assumes
// it: tensors are asked, and simdgroup_matrix goes through `stage`, kStage floats of threadgroup memory that
// a SIMD-group has for itself.
#pragma once

#include <metal_stdlib>

#if defined(LILY_TILES)
#include <metal_stdlib>
#elif defined(LILY_TENSOR)
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include <metal_tensor>
#if !defined(__HAVE_TENSOR__)
#error "LILY_TENSOR: wanted Metal 4 (-std=metal4.0, macOS 26.2), got an older one; leave tensors.metal out"
#endif
#else
#include <metal_simdgroup_matrix>
#endif

namespace lily {

using namespace metal;

// The name of a kernel, as the host asks for it with this implementation.
#ifdef LILY_TENSOR
#define LILY_TILED(name) name "_tensor"
#else
#define LILY_TILED(name) name
#endif

constant constexpr ushort kTile = 16;   // rows of Left; columns of Right; both of Sum
constant constexpr ushort kDepth = 32;  // columns of Left, rows of Right: a lane each

#if defined(LILY_TILES)

#include LILY_TILES

#elif defined(LILY_TENSOR)

constant constexpr ushort kStage = 1;      // not needed, but an array has a size
constant constexpr ushort kSlabRows = 64;  // outputs of a threadgroup that multiplies: matmul.h

// 16 x 16 x 32 is the least that matmul2d takes from registers: one of its three sizes has to be 32. Right is
// declared transposed, because that is how weights lie.
constant constexpr auto kProduct = mpp::tensor_ops::matmul2d_descriptor(
    kTile, kTile, kDepth, false, true, true, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
using Product = mpp::tensor_ops::matmul2d<kProduct, execution_simdgroup>;
constant constexpr auto kPlainProduct = mpp::tensor_ops::matmul2d_descriptor(
    kTile, kTile, kDepth, false, false, true,
    mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
using PlainProduct = mpp::tensor_ops::matmul2d<kPlainProduct, execution_simdgroup>;

struct Left {
    using Held = decltype(Product().get_left_input_cooperative_tensor<bfloat, bfloat, float>());
    Held held;

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, threadgroup float*, ushort) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            const auto at = held.get_multidimensional_index(i);  // (column, row)
            held[i] = value(ushort(at[1]), ushort(at[0]));
        }
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(threadgroup bfloat* p, ushort stride) {
        using Extents = dextents<int, 2>;
        const array<int, 2> strides = {1, int(stride)};
        const tensor<threadgroup bfloat, Extents, tensor_inline> source(p, Extents(kDepth, kTile), strides);
        held.load(source);
    }
};

struct Right {
    using Held = decltype(Product().get_right_input_cooperative_tensor<bfloat, bfloat, float>());
    Held held;

    // element (row, column) = p[column * stride + row]
    METAL_FUNC void load_transposed(threadgroup bfloat* p, ushort stride) {
        using Extents = dextents<int, 2>;
        const array<int, 2> strides = {1, int(stride)};
        const tensor<threadgroup bfloat, Extents, tensor_inline> source(p, Extents(kDepth, kTile), strides);
        held.load(source);
    }
    METAL_FUNC void load_transposed(device bfloat* p, uint stride) {
        using Extents = dextents<int, 2>;
        const array<int, 2> strides = {1, int(stride)};
        const tensor<device bfloat, Extents, tensor_inline> source(p, Extents(kDepth, kTile), strides);
        held.load(source);
    }
};

struct PlainRight {
    using Held = decltype(PlainProduct().get_right_input_cooperative_tensor<bfloat, bfloat, float>());
    Held held;

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(device bfloat* p, uint stride) {
        using Extents = dextents<int, 2>;
        const array<int, 2> strides = {1, int(stride)};
        const tensor<device bfloat, Extents, tensor_inline> source(p, Extents(kTile, kDepth), strides);
        held.load(source);
    }
};

constant constexpr ushort kScale = kTile;  // floats that scale 16 rows

struct RowScale {
    threadgroup const float* factors;

    // Of the kScale floats, which were 0, those that scale a row.
    METAL_FUNC static void put(threadgroup float* scales, ushort row, float factor) { scales[row] = factor; }
    METAL_FUNC void load(threadgroup const float* scales) { factors = scales; }
};

struct Sum {
    using Held = decltype(Product().get_destination_cooperative_tensor<Left::Held, Right::Held, float>());
    Held held;

    METAL_FUNC void clear() {
        for (ushort i = 0; i < held.get_capacity(); ++i) held[i] = 0;
    }

    // this += a b
    METAL_FUNC void add(thread Left& a, thread Right& b) { Product().run(a.held, b.held, held); }

    // p[row * stride + column] = element (row, column)
    METAL_FUNC void store(threadgroup float* p, ushort stride) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            const auto at = held.get_multidimensional_index(i);  // (column, row)
            p[at[1] * stride + at[0]] = held[i];
        }
    }

    // visit(row, column, element) for every element, each by one lane
    template <class Visit>
    METAL_FUNC void each(Visit visit, threadgroup float*, ushort) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            const auto at = held.get_multidimensional_index(i);  // (column, row)
            visit(ushort(at[1]), ushort(at[0]), float(held[i]));
        }
    }

    // The same with the element of another sum beside it.
    template <class Visit>
    METAL_FUNC void each(thread Sum& other, Visit visit, threadgroup float*, ushort) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            const auto at = held.get_multidimensional_index(i);
            visit(ushort(at[1]), ushort(at[0]), float(held[i]), float(other.held[i]));
        }
    }
};

struct PlainSum {
    using Held =
        decltype(PlainProduct().get_destination_cooperative_tensor<Left::Held, PlainRight::Held, float>());
    Held held;

    METAL_FUNC void clear() {
        for (ushort i = 0; i < held.get_capacity(); ++i) held[i] = 0;
    }

    METAL_FUNC void add(thread Left& a, thread PlainRight& b) { PlainProduct().run(a.held, b.held, held); }

    METAL_FUNC void scale(thread RowScale& rows) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            held[i] *= rows.factors[held.get_multidimensional_index(i)[1]];
        }
    }

    template <class Visit>
    METAL_FUNC void each(Visit visit, threadgroup float*, ushort) {
        for (ushort i = 0; i < held.get_capacity(); ++i) {
            if (!held.is_valid_element(i)) continue;
            const auto at = held.get_multidimensional_index(i);  // (column, row)
            visit(ushort(at[1]), ushort(at[0]), float(held[i]));
        }
    }
};

using BlockSum = Sum;  // of a threadgroup's block of outputs: matmul.h

#else

// Rows of a staged tile: 16 bytes longer than they need to be, which spreads a column over memory banks.
constant constexpr ushort kStageFloats = kTile + 4, kStageBfloats = kDepth + 8;
constant constexpr ushort kStage = kTile * kStageFloats;
constant constexpr ushort kSlabRows = 64;  // outputs of a threadgroup that multiplies: matmul.h

struct Left {
    simdgroup_matrix<bfloat, 8, 8> part[2][4];

    // element (row, column) = value(row, column); lanes ask for a row's elements side by side
    template <class Value>
    METAL_FUNC void set(Value value, threadgroup float* stage, ushort lane) {
        threadgroup bfloat* p = (threadgroup bfloat*)stage;
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (ushort row = 0; row < kTile; ++row) p[row * kStageBfloats + lane] = value(row, lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort k = 0; k < 4; ++k)
                simdgroup_load(part[i][k], p + 8 * i * kStageBfloats + 8 * k, kStageBfloats);
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(threadgroup bfloat* p, ushort stride) {
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort k = 0; k < 4; ++k) simdgroup_load(part[i][k], p + 8 * i * stride + 8 * k, stride);
    }
};

struct Right {
    simdgroup_matrix<bfloat, 8, 8> part[4][2];

    // element (row, column) = p[column * stride + row]
    METAL_FUNC void load_transposed(threadgroup bfloat* p, ushort stride) {
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
                simdgroup_load(part[k][j], p + 8 * j * stride + 8 * k, stride, ulong2(0, 0), true);
    }
    METAL_FUNC void load_transposed(device bfloat* p, uint stride) {
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
                simdgroup_load(part[k][j], p + 8 * j * stride + 8 * k, stride, ulong2(0, 0), true);
    }

    // element (row, column) = p[row * stride + column]
    METAL_FUNC void load(device bfloat* p, uint stride) {
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j) simdgroup_load(part[k][j], p + 8 * k * stride + 8 * j, stride);
    }
};

using PlainRight = Right;

constant constexpr ushort kScale = 2 * 8 * 8;  // floats that scale 16 rows: two diagonal matrices

struct RowScale {
    simdgroup_matrix<float, 8, 8> part[2];

    // Of the kScale floats, which were 0, those that scale a row.
    METAL_FUNC static void put(threadgroup float* scales, ushort row, float factor) {
        scales[row / 8 * 64 + row % 8 * 9] = factor;
    }
    METAL_FUNC void load(threadgroup const float* scales) {
        simdgroup_load(part[0], scales, 8);
        simdgroup_load(part[1], scales + 64, 8);
    }
};

struct Sum {
    simdgroup_matrix<float, 8, 8> part[2][2];

    METAL_FUNC void clear() {
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort j = 0; j < 2; ++j) part[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    // this += a b
    METAL_FUNC void add(thread Left& a, thread Right& b) {
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort i = 0; i < 2; ++i)
#pragma unroll
                for (ushort j = 0; j < 2; ++j)
                    simdgroup_multiply_accumulate(part[i][j], a.part[i][k], b.part[k][j], part[i][j]);
    }

    // visit(row, column, element) for every element, each by one lane: half a SIMD-group takes a row
    template <class Visit>
    METAL_FUNC void each(Visit visit, threadgroup float* stage, ushort lane) {
        stage_all(stage);
        for (ushort i = lane; i < kTile * kTile; i += 32)
            visit(i / kTile, i % kTile, stage[i / kTile * kStageFloats + i % kTile]);
    }

    // The same with the element of another sum beside it.
    template <class Visit>
    METAL_FUNC void each(thread Sum& other, Visit visit, threadgroup float* stage, ushort lane) {
        constexpr ushort kShare = kTile * kTile / 32;
        const ushort row = lane / kTile, column = lane % kTile;
        float mine[kShare];
        stage_all(stage);
#pragma unroll
        for (ushort i = 0; i < kShare; ++i) mine[i] = stage[(2 * i + row) * kStageFloats + column];
        other.stage_all(stage);
#pragma unroll
        for (ushort i = 0; i < kShare; ++i)
            visit(2 * i + row, column, mine[i], stage[(2 * i + row) * kStageFloats + column]);
    }

    // p[row * stride + column] = element (row, column)
    METAL_FUNC void store(threadgroup float* p, ushort stride) {
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort j = 0; j < 2; ++j) simdgroup_store(part[i][j], p + 8 * i * stride + 8 * j, stride);
    }

    // every row times its number
    METAL_FUNC void scale(thread RowScale& rows) {
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort j = 0; j < 2; ++j) {
                const simdgroup_matrix<float, 8, 8> before = part[i][j];
                simdgroup_multiply(part[i][j], rows.part[i], before);
            }
    }

    METAL_FUNC void stage_all(threadgroup float* stage) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        store(stage, kStageFloats);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
};

using PlainSum = Sum;
using BlockSum = Sum;  // of a threadgroup's block of outputs: matmul.h

#endif

#if !defined(LILY_TILES)

// Rows of a matrix in device memory that a SIMD-group multiplies by, kRows of kColumns numbers. It says which
// before it needs them, so that they can be on their way to `landing`, threadgroup memory of a size that the
// device says; here tiles are read from where they lie.
template <ushort kRows, ushort kColumns>
struct Panel {
    device bfloat* rows;
    uint stride;

    // Gives what of `landing` is left for others. kSimds: SIMD-groups of the threadgroup, which have a panel
    // each.
    template <ushort kSimds>
    METAL_FUNC threadgroup uchar* begin(threadgroup uchar* landing, ushort) {
        return landing;
    }
    METAL_FUNC void ask(device bfloat* p, uint n, bool, ushort) {
        rows = p;
        stride = n;
    }
    // For the rows that were asked for, if those of one other panel were asked for since.
    METAL_FUNC void wait() const {}
    METAL_FUNC void load_transposed(thread Right& tile, ushort row, ushort column) const {
        tile.load_transposed(rows + row * stride + column, stride);
    }
    METAL_FUNC void load(thread PlainRight& tile, ushort row, ushort column) const {
        tile.load(rows + row * stride + column, stride);
    }
};

#endif

}  // namespace lily
