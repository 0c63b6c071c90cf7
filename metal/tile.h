// Matrix units: the one file that knows them. A SIMD-group multiplies a Left tile, 16 x 32 bfloat, by a Right tile, 32 x 16
// bfloat, into a Sum, 16 x 16 float; every lane holds a share of each.
//
// Two implementations of the same three types. LILY_TENSOR selects Metal 4's tensor operations, for GPUs that have a matrix
// unit (M5 and later); without it simdgroup_matrix does the work, on the ordinary ALUs of M1 to M4. Which lane holds which
// element is nobody's business outside: elements are set and visited by (row, column).
#pragma once

#include <metal_stdlib>

#if defined(LILY_TENSOR)
#if !defined(__HAVE_TENSOR__)
#error "LILY_TENSOR: wanted Metal 4 (-std=metal4.0, macOS 26.2 or later), got an older language; build without LILY_TENSOR"
#endif
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>
#else
#include <metal_simdgroup_matrix>
#endif

namespace lily {

using namespace metal;

constant constexpr ushort kTile = 16;   // rows of Left; columns of Right; both of Sum
constant constexpr ushort kDepth = 32;  // columns of Left, rows of Right

#if defined(LILY_TENSOR)

// 16 x 16 x 32 is the square tile that matmul2d takes from registers: one of its three sizes has to be 32. Right is declared
// transposed, because that is how weights lie: its tensor is (column, row) of the 32 x 16 matrix.
constant constexpr auto kProduct = mpp::tensor_ops::matmul2d_descriptor(
    kTile, kTile, kDepth, false, true, true, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
using Product = mpp::tensor_ops::matmul2d<kProduct, execution_simdgroup>;

struct Left {
    using Tensor = Product::cooperative_tensor_left_input_t<bfloat, bfloat, float>;
    Tensor tensor;

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, ushort) {
        for (ushort i = 0; i < tensor.get_capacity(); ++i) {
            if (!tensor.is_valid_element(i)) continue;
            const auto at = tensor.get_multidimensional_index(i);  // (column, row)
            tensor[i] = value(ushort(at[1]), ushort(at[0]));
        }
    }
};

struct Right {
    using Tensor = Product::cooperative_tensor_right_input_t<bfloat, bfloat, float>;
    Tensor tensor;

    // element (row, column) = p[column * stride + row]
    METAL_FUNC void load_transposed(threadgroup const bfloat* p, ushort stride) {
        using Extents = dextents<int, 2>;
        const array<int, 2> strides = {1, int(stride)};
        auto source = metal::tensor<threadgroup bfloat, Extents, tensor_inline>(const_cast<threadgroup bfloat*>(p),
                                                                              Extents(kDepth, kTile), strides);
        tensor.load(source);
    }

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, ushort) {
        for (ushort i = 0; i < tensor.get_capacity(); ++i) {
            if (!tensor.is_valid_element(i)) continue;
            const auto at = tensor.get_multidimensional_index(i);  // (row, column), being transposed
            tensor[i] = value(ushort(at[0]), ushort(at[1]));
        }
    }
};

struct Sum {
    using Tensor = Product::cooperative_tensor_destination_t<Left::Tensor, Right::Tensor, float>;
    Tensor tensor;

    METAL_FUNC void clear() {
        for (ushort i = 0; i < tensor.get_capacity(); ++i) tensor[i] = 0;
    }

    // this += a b
    METAL_FUNC void add(thread Left& a, thread Right& b) { Product().run(a.tensor, b.tensor, tensor); }

    // visit(row, column, element) for every element, each by one lane
    template <class Visit>
    METAL_FUNC void each(Visit visit, ushort) {
        for (ushort i = 0; i < tensor.get_capacity(); ++i) {
            if (!tensor.is_valid_element(i)) continue;
            const auto at = tensor.get_multidimensional_index(i);  // (column, row)
            visit(ushort(at[1]), ushort(at[0]), float(tensor[i]));
        }
    }

    // The same with the element of another sum beside it.
    template <class Visit>
    METAL_FUNC void each(thread Sum& other, Visit visit, ushort) {
        for (ushort i = 0; i < tensor.get_capacity(); ++i) {
            if (!tensor.is_valid_element(i)) continue;
            const auto at = tensor.get_multidimensional_index(i);
            visit(ushort(at[1]), ushort(at[0]), float(tensor[i]), float(other.tensor[i]));
        }
    }
};

#else

// An 8 x 8 matrix gives a lane two elements side by side, in this row and from this column on.
METAL_FUNC ushort row_of_lane(ushort lane) { return (lane / 4 & 4) + (lane / 2 & 3); }
METAL_FUNC ushort column_of_lane(ushort lane) { return (lane / 4 & 2) * 2 + (lane & 1) * 2; }

struct Left {
    simdgroup_matrix<bfloat, 8, 8> part[2][4];

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, ushort lane) {
        const ushort row = row_of_lane(lane), column = column_of_lane(lane);
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort k = 0; k < 4; ++k)
#pragma unroll
                for (ushort e = 0; e < 2; ++e)
                    part[i][k].thread_elements()[e] = value(ushort(8 * i + row), ushort(8 * k + column + e));
    }
};

struct Right {
    simdgroup_matrix<bfloat, 8, 8> part[4][2];

    // element (row, column) = p[column * stride + row]
    METAL_FUNC void load_transposed(threadgroup const bfloat* p, ushort stride) {
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
                simdgroup_load(part[k][j], p + 8 * j * stride + 8 * k, stride, ulong2(0, 0), true);
    }

    // element (row, column) = value(row, column)
    template <class Value>
    METAL_FUNC void set(Value value, ushort lane) {
        const ushort row = row_of_lane(lane), column = column_of_lane(lane);
#pragma unroll
        for (ushort k = 0; k < 4; ++k)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
#pragma unroll
                for (ushort e = 0; e < 2; ++e)
                    part[k][j].thread_elements()[e] = value(ushort(8 * k + row), ushort(8 * j + column + e));
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

    // visit(row, column, element) for every element, each by one lane
    template <class Visit>
    METAL_FUNC void each(Visit visit, ushort lane) {
        const ushort row = row_of_lane(lane), column = column_of_lane(lane);
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
#pragma unroll
                for (ushort e = 0; e < 2; ++e)
                    visit(ushort(8 * i + row), ushort(8 * j + column + e), part[i][j].thread_elements()[e]);
    }

    // The same with the element of another sum beside it.
    template <class Visit>
    METAL_FUNC void each(thread Sum& other, Visit visit, ushort lane) {
        const ushort row = row_of_lane(lane), column = column_of_lane(lane);
#pragma unroll
        for (ushort i = 0; i < 2; ++i)
#pragma unroll
            for (ushort j = 0; j < 2; ++j)
#pragma unroll
                for (ushort e = 0; e < 2; ++e)
                    visit(ushort(8 * i + row), ushort(8 * j + column + e), part[i][j].thread_elements()[e],
                          other.part[i][j].thread_elements()[e]);
    }
};

#endif

}  // namespace lily
