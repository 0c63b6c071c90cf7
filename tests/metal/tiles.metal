// Matrix tiles: simdgroup_matrix and matmul2d, alone and as whole products.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;

#define INSTANCE(NAME, FUNCTION, ...) \
    template [[host_name(NAME)]] [[kernel]] decltype(FUNCTION<__VA_ARGS__>) FUNCTION<__VA_ARGS__>;

// d = op(a) op(b) + c, 8 x 8, every operand with its own stride and origin.
template <typename T, bool kLeft, bool kRight>
[[kernel]] void tile(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device const float* c [[buffer(2)]],
                     device float* d [[buffer(3)]], ushort lane [[thread_index_in_simdgroup]]) {
    threadgroup T staged[8 * 12];
    for (ushort i = lane; i < 64; i += 32) staged[i / 8 * 12 + i % 8] = b[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_float8x8 sum;
    simdgroup_load(left, a, 20, ulong2(3, 1), kLeft);
    simdgroup_load(right, staged, 12, ulong2(0, 0), kRight);
    simdgroup_load(sum, c);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, d);
}
#define TILES(T)                                         \
    INSTANCE("tile_" #T, tile, T, false, false)          \
    INSTANCE("tile_" #T "_left", tile, T, true, false)   \
    INSTANCE("tile_" #T "_right", tile, T, false, true)
TILES(float) TILES(half) TILES(bfloat)

// Fills, diagonals, copies, products without a sum, transposed stores and results in half.
struct Pair {
    simdgroup_half8x8 of[2];
};
kernel void tile_values(device const half* a [[buffer(0)]], device half* d [[buffer(1)]]) {
    Pair pair;
    simdgroup_load(pair.of[0], a);
    pair.of[1] = simdgroup_half8x8(2.0h);
    Pair copy = pair;
    simdgroup_half8x8 product = make_filled_simdgroup_matrix<half, 8, 8>(1.0h);
    simdgroup_store(product, d);
    simdgroup_multiply(product, copy.of[0], copy.of[1]);
    simdgroup_store(product, d + 64);
    simdgroup_store(product, d + 128, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(product, copy.of[0], copy.of[0], product);
    simdgroup_store(product, d + 192);
}

struct Shape {
    uint M, N, K;
};

// C = A B^T, (M, K) and (N, K): 64 x 64 of C a group of four SIMD-groups.
constant constexpr ushort kDepth = 32;
constant constexpr ushort kPadded = kDepth + 8;
template <typename T>
METAL_FUNC void stage(threadgroup T* to, device const T* from, uint rows, uint stride, ushort thread_index) {
    for (ushort i = 0; i < 4; ++i) {
        const ushort row = (thread_index >> 3) + 16 * i, column = (thread_index & 7) * 4;
        vec<T, 4> v = vec<T, 4>(T(0));
        if (row < rows) v = *(device const vec<T, 4>*)(from + row * stride + column);
        *(threadgroup vec<T, 4>*)(to + row * kPadded + column) = v;
    }
}
template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void product(
    device const T* A [[buffer(0)]], device const T* B [[buffer(1)]], device float* C [[buffer(2)]],
    constant Shape& shape [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]], ushort simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup T left[64 * kPadded];
    threadgroup T right[64 * kPadded];
    const uint row = group.y * 64, column = group.x * 64;
    const ushort r0 = (simd >> 1) * 32, c0 = (simd & 1) * 32;
    simdgroup_float8x8 sum[4][4];
    for (ushort i = 0; i < 4; ++i)
        for (ushort j = 0; j < 4; ++j) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k0 = 0; k0 < shape.K; k0 += kDepth) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage(left, A + row * shape.K + k0, shape.M - row, shape.K, thread_index);
        stage(right, B + column * shape.K + k0, shape.N - column, shape.K, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (ushort k = 0; k < kDepth; k += 8) {
            simdgroup_matrix<T, 8, 8> a[4], b[4];
            for (ushort i = 0; i < 4; ++i) {
                simdgroup_load(a[i], left + (r0 + 8 * i) * kPadded + k, kPadded);
                simdgroup_load(b[i], right + (c0 + 8 * i) * kPadded + k, kPadded, ulong2(0, 0), true);
            }
            for (ushort i = 0; i < 4; ++i)
                for (ushort j = 0; j < 4; ++j) simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
        }
    }
    for (ushort i = 0; i < 4; ++i)
        for (ushort j = 0; j < 4; ++j)
            simdgroup_store(sum[i][j], C + (row + r0 + 8 * i) * shape.N + column + c0 + 8 * j, shape.N);
}
INSTANCE("product_float", product, float)
INSTANCE("product_half", product, half)
INSTANCE("product_bfloat", product, bfloat)

// C = op(A) op(B), operands in registers, element by element where the tensor says that they are.
template <typename T, typename Sum, bool kLeft, bool kRight>
[[kernel]] void registers(device const T* A [[buffer(0)]], device const T* B [[buffer(1)]], device Sum* C [[buffer(2)]],
                          constant Shape& shape [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]]) {
    constexpr auto descriptor =
        matmul2d_descriptor(16, 32, 16, kLeft, kRight, false, matmul2d_descriptor::mode::multiply_accumulate);
    matmul2d<descriptor, execution_simdgroup> multiply;
    auto a = multiply.template get_left_input_cooperative_tensor<T, T, Sum>();
    auto b = multiply.template get_right_input_cooperative_tensor<T, T, Sum>();
    auto c = multiply.template get_destination_cooperative_tensor<decltype(a), decltype(b), Sum>();
    const uint row = group.y * 16, column = group.x * 32;
    for (ushort i = 0; i < c.get_capacity(); ++i) c[i] = Sum(0);
    for (uint k = 0; k < shape.K; k += 16) {
        for (ushort i = 0; i < a.get_capacity(); ++i) {
            if (!a.is_valid_element(i)) continue;
            const auto at = a.get_multidimensional_index(i);
            a[i] = kLeft ? A[(k + at[1]) * shape.M + row + at[0]] : A[(row + at[1]) * shape.K + k + at[0]];
        }
        auto whole = tensor<device const T, dextents<int, 2>, tensor_inline>(
            B, dextents<int, 2>(kRight ? shape.K : shape.N, kRight ? shape.N : shape.K));
        auto part = kRight ? whole.slice(k, column) : whole.slice(column, k);
        b.load(part);
        multiply.run(a, b, c);
    }
    for (ushort i = 0; i < c.get_capacity(); ++i) {
        if (!c.is_valid_element(i)) continue;
        const auto at = c.get_multidimensional_index(i);
        C[(row + at[1]) * shape.N + column + at[0]] = c[i];
    }
}
INSTANCE("registers_half", registers, half, float, false, true)
INSTANCE("registers_bfloat", registers, bfloat, float, false, true)
INSTANCE("registers_bfloat_plain", registers, bfloat, float, false, false)
INSTANCE("registers_float_left", registers, float, float, true, false)
INSTANCE("registers_half_both", registers, half, float, true, true)
INSTANCE("registers_half_in_half", registers, half, half, false, true)

// C = A B^T from and to memory, K as long as the tensors say: by one SIMD-group, or by four that share the rows.
template <typename T, typename Sum, int kSimds>
[[kernel]] void memory(device const T* A [[buffer(0)]], device const T* B [[buffer(1)]], device Sum* C [[buffer(2)]],
                       constant Shape& shape [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]]) {
    constexpr auto descriptor = matmul2d_descriptor(64, 32, dynamic_extent, false, true, false);
    matmul2d<descriptor, execution_simdgroups<kSimds>> multiply;
    auto a = tensor<device const T, dextents<int, 2>, tensor_inline>(A, dextents<int, 2>(shape.K, shape.M)).slice(0, group.y * 64);
    auto b = tensor<device const T, dextents<int, 2>, tensor_inline>(B, dextents<int, 2>(shape.K, shape.N)).slice(0, group.x * 32);
    auto c = tensor<device Sum, dextents<int, 2>, tensor_inline>(C, dextents<int, 2>(shape.N, shape.M)).slice(group.x * 32, group.y * 64);
    if (kSimds == 1) {
        multiply.run(a, b, c);
    } else {
        auto held = multiply.template get_destination_cooperative_tensor<decltype(a), decltype(b), Sum>();
        multiply.run(a, b, held);
        held.store(c);
    }
}
INSTANCE("memory_half", memory, half, float, 1)
INSTANCE("memory_half_4", memory, half, float, 4)
INSTANCE("memory_bfloat_4", memory, bfloat, float, 4)
INSTANCE("memory_int8", memory, char, int, 1)
INSTANCE("memory_uint8_4", memory, uchar, int, 4)

// What a lane holds before anything is written, and which elements it holds.
kernel void layout(device float* contents [[buffer(0)]], device int2* places [[buffer(1)]], device uint* valid [[buffer(2)]],
                   ushort lane [[thread_index_in_simdgroup]]) {
    constexpr auto descriptor = matmul2d_descriptor(16, 16, 16);
    matmul2d<descriptor, execution_simdgroup> multiply;
    auto a = multiply.get_left_input_cooperative_tensor<float, float, float>();
    for (ushort i = 0; i < a.get_capacity(); ++i) {
        const auto at = a.get_multidimensional_index(i);
        contents[lane * a.get_capacity() + i] = a[i];
        places[lane * a.get_capacity() + i] = int2(at[0], at[1]);
        valid[lane * a.get_capacity() + i] = a.is_valid_element(i);
    }
}
