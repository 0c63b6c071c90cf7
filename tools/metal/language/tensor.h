// Metal 4's tensors and matmul2d, as far as they are documented. Which element of a tile a lane holds is not,
// so here it is a layout of our own, with one element a lane that is not valid: code that assumes a device's
// layout, or does not ask is_valid_element, breaks. A tile must lie within its tensor's extents. Not
// simulated: execution_thread, reductions, tensor_handle, 4-bit operands.
#pragma once

namespace metal {
constant constexpr const int dynamic_extent = -1;
template <class T>
constant constexpr const T dynamic_length_v = T(-1);

template <class Index, size_t rank>
struct dextents {
    Index sizes[rank];
    template <class... I>
    MSL_FN constexpr dextents(I... from) : sizes{(Index)from...} {}
    MSL_FN constexpr Index extent(size_t i) const { return sizes[i]; }
};
template <class Index, Index... fixed>
struct extents {
    Index sizes[sizeof...(fixed)] = {fixed...};
    MSL_FN constexpr Index extent(size_t i) const { return sizes[i]; }
};
struct tensor_inline {};

// Two dimensions: 0 is the column, contiguous unless strides say otherwise, 1 the row.
template <class Element, class Extents, class Tag = tensor_inline>
struct tensor {
    typedef remove_cv_t<remove_addrspace_t<Element>> element_type;
    Element* data;
    int sizes[2];
    int strides[2];
    MSL_FN tensor(Element* from, Extents e)
        : data(from), sizes{e.sizes[0], e.sizes[1]}, strides{1, e.sizes[0]} {}
    MSL_FN tensor(Element* from, Extents e, array<int, 2> s)
        : data(from), sizes{e.sizes[0], e.sizes[1]}, strides{s.__elements[0], s.__elements[1]} {}
    MSL_FN int get_extent(int i) const { return sizes[i]; }
    MSL_FN tensor slice(int column, int row) const {
        tensor part = *this;
        part.data += (long)column * strides[0] + (long)row * strides[1];
        part.sizes[0] -= column;
        part.sizes[1] -= row;
        return part;
    }
};

struct execution_simdgroup {
    MSL_VALUE_OF uint msl_count = 1;
};
template <int count>
struct execution_simdgroups {
    MSL_VALUE_OF uint msl_count = count;
};

enum msl_tile_type { msl_tile_int8 = 3, msl_tile_uint8, msl_tile_int32 };
template <class T>
MSL_VALUE_OF uint msl_tile_type_of = is_same_v<T, char> || is_same_v<T, int8_t> ? msl_tile_int8
                                     : is_same_v<T, uchar>                      ? msl_tile_uint8
                                     : is_same_v<T, int>                        ? msl_tile_int32
                                                                                : msl_stored_as<T>;
}  // namespace metal

namespace mpp {
namespace tensor_ops {
using metal::dynamic_extent;

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int rows, int columns, int depth = dynamic_extent, bool left = false,
                                  bool right = false, bool relaxed = false, mode what = mode::multiply)
        : m(rows),
          n(columns),
          k(depth),
          transpose_left(left),
          transpose_right(right),
          relaxed_precision(relaxed),
          matmul_mode(what) {}
};

// A tile of rows x columns in the registers of `simdgroups` SIMD-groups, which share its rows. Element i of a
// lane is number 32 i + (5 lane + 7 i) mod 32 of its SIMD-group's part, counted along the rows.
template <class T, int rows, int columns, int simdgroups = 1>
struct cooperative_tensor {
    typedef T element_type;
    static_assert(
        rows % simdgroups == 0 && rows / simdgroups * columns % 32 == 0,
        "the simulator shares a tile's rows among its SIMD-groups, and 32 lanes share a part evenly");
    MSL_VALUE_OF int msl_rows = rows / simdgroups;
    MSL_VALUE_OF int msl_columns = columns;
    MSL_VALUE_OF int msl_count = msl_rows * columns / 32;
    T msl_elements[msl_count + 1];

    MSL_FN cooperative_tensor() {  // holds nothing of use until it is written
        for (int i = 0; i <= msl_count; ++i) msl_elements[i] = (T)__builtin_nanf("");
    }
    MSL_FN static constexpr ushort get_capacity() { return msl_count + 1; }
    MSL_FN static constexpr bool is_valid_element(ushort i) { return i < msl_count; }
    MSL_FN static metal::array<int, 2> get_multidimensional_index(ushort i) {
        const thread msl_thread* me = msl_current_thread();
        const int number = i * 32 + ((me->lane * 5 + i * 7) & 31);
        const int first = simdgroups > 1 ? (int)me->simdgroup * msl_rows : 0;
        return {{number % columns, first + number / columns}};
    }
    MSL_FN thread T& operator[](ushort i) thread { return msl_elements[i]; }
    MSL_FN const thread T& operator[](ushort i) const thread { return msl_elements[i]; }
    template <class Tensor>
    MSL_FN void load(const thread Tensor& from) thread {
        for (ushort i = 0; i < msl_count; ++i) {
            const metal::array<int, 2> at = get_multidimensional_index(i);
            msl_elements[i] = (T)from.data[at[0] * from.strides[0] + at[1] * from.strides[1]];
        }
    }
    template <class Tensor>
    MSL_FN void store(const thread Tensor& to) const thread {
        for (ushort i = 0; i < msl_count; ++i) {
            const metal::array<int, 2> at = get_multidimensional_index(i);
            to.data[at[0] * to.strides[0] + at[1] * to.strides[1]] =
                (typename Tensor::element_type)msl_elements[i];
        }
    }
};

template <class Element, class Extents, class Tag>
MSL_FN msl_tile msl_tile_of(const thread metal::tensor<Element, Extents, Tag>& t, int rows, int columns) {
    typedef typename metal::tensor<Element, Extents, Tag>::element_type T;
    msl_tile tile;
    tile.address = (ulong)t.data;
    tile.row_stride = t.strides[1];
    tile.column_stride = t.strides[0];
    tile.row_limit = t.sizes[1];
    tile.column_limit = t.sizes[0];
    tile.rows = rows < 0 ? tile.row_limit : rows;
    tile.columns = columns < 0 ? tile.column_limit : columns;
    tile.type = metal::msl_tile_type_of<T>;
    tile.in_registers = false;
    return tile;
}
template <class T, int held_rows, int held_columns, int simdgroups>
MSL_FN msl_tile msl_tile_of(const thread cooperative_tensor<T, held_rows, held_columns, simdgroups>& t, int,
                            int) {
    msl_tile tile;
    tile.address = (ulong)&t.msl_elements[0];
    tile.row_stride = held_columns;
    tile.column_stride = 1;
    tile.rows = tile.row_limit = t.msl_rows;
    tile.columns = tile.column_limit = held_columns;
    tile.type = metal::msl_tile_type_of<T>;
    tile.in_registers = true;
    return tile;
}

// matmul2d<descriptor, scope> arrives here with the descriptor's members apart; see rewrite.py.
template <int m, int n, int k, bool transpose_left, bool transpose_right, bool relaxed, int mode, class Scope>
class msl_matmul2d {
    MSL_VALUE_OF int simdgroups = Scope::msl_count;

   public:
    template <class Left, class Right, class Accumulator, class... Rest>
    MSL_FN auto get_left_input_cooperative_tensor() const {
        static_assert(simdgroups == 1 && k > 0,
                      "an input in registers needs the scope of one SIMD-group and a constant k");
        return cooperative_tensor<Left, transpose_left ? k : m, transpose_left ? m : k>();
    }
    template <class Left, class Right, class Accumulator, class... Rest>
    MSL_FN auto get_right_input_cooperative_tensor() const {
        static_assert(simdgroups == 1 && k > 0,
                      "an input in registers needs the scope of one SIMD-group and a constant k");
        return cooperative_tensor<Right, transpose_right ? n : k, transpose_right ? k : n>();
    }
    template <class Left, class Right, class Accumulator, class... Rest>
    MSL_FN auto get_destination_cooperative_tensor() const {
        return cooperative_tensor<Accumulator, m, n, simdgroups>();
    }
    template <class Left, class Right, class Destination>
    MSL_FN void run(const thread Left& left, const thread Right& right, thread Destination& destination,
                    uint site = __builtin_LINE()) const {
        check<typename Left::element_type, typename Right::element_type,
              typename Destination::element_type>();
        msl_matmul operands;
        operands.a = msl_tile_of(left, transpose_left ? k : m, transpose_left ? m : k);
        if (transpose_left) operands.a = msl_transposed(operands.a);
        operands.b = msl_tile_of(right, transpose_right ? n : k, transpose_right ? k : n);
        if (transpose_right) operands.b = msl_transposed(operands.b);
        operands.c = msl_tile_of(destination, m, n);
        operands.accumulate = mode == (int)matmul2d_descriptor::mode::multiply_accumulate;
        operands.simdgroups = simdgroups;
        msl_runtime_matmul(&operands, site);
    }

   private:
    template <class A, class B, class C>
    MSL_FN static constexpr void check() {
        using metal::is_same_v;
        static_assert(is_same_v<A, B>,
                      "give matmul2d operands of one type: mixed ones fail to compile on some systems");
        static_assert(metal::is_floating_point_v<A> == metal::is_floating_point_v<C>,
                      "matmul2d accumulates integers in int and the others in float, half or bfloat");
    }
    MSL_FN static msl_tile msl_transposed(msl_tile t) {
        msl_tile r = t;
        r.rows = t.columns, r.columns = t.rows;
        r.row_limit = t.column_limit, r.column_limit = t.row_limit;
        r.row_stride = t.column_stride, r.column_stride = t.row_stride;
        return r;
    }
};
}  // namespace tensor_ops
}  // namespace mpp
