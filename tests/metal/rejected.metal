// What Metal does not take. Every case is checked by itself, with -DCASE=n; the checker must report the lines that end
// in `// !`, each with the message of its case, and nothing else.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

struct Point {
    uint n;
    float get() const { return n; }
};

#if CASE == 1  // a pointer or reference without an address space is `thread`, and cannot hold a device address
kernel void k(device float* x [[buffer(0)]]) {
    float* y = x;  // !
    y[0] = 1;
}
#elif CASE == 2  // cannot initialize a variable of type 'threadgroup float *thread' with an lvalue of type 'device float *thread'
kernel void k(device float* x [[buffer(0)]]) {
    threadgroup float* y = x;  // !
    y[0] = 1;
}
#elif CASE == 3  // no matching function for call to 'f'
void f(thread float* p) { p[0] = 1; }
kernel void k(device float* x [[buffer(0)]]) {
    f(x);  // !
}
#elif CASE == 4  // a pointer or reference without an address space is `thread`, and cannot hold a device address
void f(float* p) { p[0] = 1; }
kernel void k(device float* x [[buffer(0)]]) {
    f(x);  // !
}
#elif CASE == 5  // read-only variable is not assignable
kernel void k(constant float* x [[buffer(0)]]) {
    x[0] = 1;  // !
}
#elif CASE == 6  // use of type 'double' requires cl_khr_fp64 and __opencl_c_fp64 support
kernel void k(device float* x [[buffer(0)]]) {
    double d = x[0];  // !
    x[0] = d;
}
#elif CASE == 7  // use of undeclared identifier 'simd_summ'; did you mean 'simd_sum'?
kernel void k(device float* x [[buffer(0)]]) {
    x[0] = simd_summ(x[0]);  // !
}
#elif CASE == 8  // no matching function for call to 'threadgroup_barrier'
kernel void k(device float* x [[buffer(0)]]) {
    threadgroup_barrier();  // !
}
#elif CASE == 9  // no matching function for call to 'threadgroup_barrier'
kernel void k(device float* x [[buffer(0)]]) {
    threadgroup_barrier(memory_order_relaxed);  // !
}
#elif CASE == 10  // Metal does not convert to bfloat implicitly: write bfloat(x)
kernel void k(device bfloat* x [[buffer(0)]]) {
    float f = x[0];
    x[0] = f * 2.0f;  // !
}
#elif CASE == 11  // SIMD-group functions take float, half and integers of up to 32 bits, and vectors of them
kernel void k(device bfloat* x [[buffer(0)]]) {
    x[0] = simd_sum(x[0]);  // !
}
#elif CASE == 12  // no matching function for call to 'min'
kernel void k(device uint* x [[buffer(0)]]) {
    x[0] = min(x[0], 31);  // !
}
#elif CASE == 13  // program scope variable must reside in constant address space
float table[4] = {1, 2, 3, 4};  // !
kernel void k(device float* x [[buffer(0)]]) { x[0] = table[0]; }
#elif CASE == 14  // Metal has no recursion: f calls itself
uint f(uint n) {  // !
    return n ? f(n - 1) + n : 0;
}
kernel void k(device uint* x [[buffer(0)]]) { x[0] = f(x[0]); }
#elif CASE == 15  // virtual functions are not supported in C++ for OpenCL
struct A {
    virtual float v() { return 1; }  // !
};
kernel void k(device float* x [[buffer(0)]]) {
    A a;
    x[0] = a.v();
}
#elif CASE == 16  // 'default new' is not supported in C++ for OpenCL
kernel void k(device float* x [[buffer(0)]]) {
    float* p = new float;  // !
    x[0] = *p;
}
#elif CASE == 17  // cannot use 'try' with exceptions disabled
kernel void k(device float* x [[buffer(0)]]) {
    try {  // !
        x[0] = 1;
    } catch (...) {
    }
}
#elif CASE == 18  // k: 'float* x' points to no address space; write device, constant or threadgroup
kernel void k(float* x [[buffer(0)]]) { x[0] = 1; }  // !
#elif CASE == 19  // k: 'uint i' is neither a pointer or reference to a buffer nor a built-in such as [[thread_position_in_grid]]
kernel void k(device float* x [[buffer(0)]], uint i) { x[i] = 1; }  // !
#elif CASE == 20  // Metal has no attribute [[unrolled]]
kernel void k(device float* x [[buffer(0)]]) {
    [[unrolled]] for (int i = 0; i < 4; ++i) x[i] = 1;  // !
}
#elif CASE == 21  // a vector's constructor needs exactly as many components as the vector has
kernel void k(device float4* x [[buffer(0)]]) {
    x[0] = float4(1, 2, 3);  // !
}
#elif CASE == 22  // vector component access exceeds type 'device float2' (aka 'device metal::vec<float, 2>')
kernel void k(device float2* x [[buffer(0)]]) {
    x[0] = x[0].xz;  // !
}
#elif CASE == 23  // a threadgroup variable may be declared in a kernel only, not in f
void f(device float* x) {
    threadgroup float s[32];  // !
    s[0] = x[0];
    x[0] = s[0];
}
kernel void k(device float* x [[buffer(0)]]) { f(x); }
#elif CASE == 24  // k has 32772 bytes of threadgroup memory; the limit is 32768
kernel void k(device float* x [[buffer(0)]]) {  // !
    threadgroup float s[8192];
    threadgroup float more;
    s[0] = x[0];
    more = s[0];
    x[0] = more;
}
#elif CASE == 25  // Metal has no goto
kernel void k(device float* x [[buffer(0)]]) {
    goto a;  // !
a:
    x[0] = 1;
}
#elif CASE == 26  // k: x and y both have buffer index 0
kernel void k(device float* x [[buffer(0)]],
              device float* y [[buffer(0)]]) {  // !
    x[0] = y[0];
}
#elif CASE == 27  // assigning to 'vec<int, [...]>' from incompatible type 'device vec<float, [...]>'
kernel void k(device int4* x [[buffer(0)]], device float4* y [[buffer(1)]]) {
    x[0] = y[0];  // !
}
#elif CASE == 28  // cannot initialize object parameter of type 'const thread Point' with an expression of type 'device Point'
kernel void k(device float* x [[buffer(0)]], device Point* p [[buffer(1)]]) {
    x[0] = p->get();  // !
}
#elif CASE == 29  // binding reference of type 'thread float' to value of type 'device float' changes address space
kernel void k(device float* x [[buffer(0)]]) {
    thread float& r = x[0];  // !
    r = 1;
}
#elif CASE == 30  // kernel k must return void
kernel float k(device float* x [[buffer(0)]]) {  // !
    return x[0];
}
#elif CASE == 31  // no matching function for call to 'atomic_fetch_add_explicit'
kernel void k(device uint* x [[buffer(0)]]) {
    atomic_fetch_add_explicit(x, 1u, memory_order_relaxed);  // !
}
#elif CASE == 32  // 'cmath' file not found
#include <cmath>  // !
kernel void k(device float* x [[buffer(0)]]) { x[0] = std::sqrt(x[0]); }
#elif CASE == 33  // pointers to functions are not allowed
void g(device float* x, float (*f)(float)) {  // !
    x[0] = f(x[0]);
}
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }
#elif CASE == 34  // static local variable must reside in constant address space
kernel void k(device float* x [[buffer(0)]]) {
    static float s = 0;  // !
    s += 1;
    x[0] = s;
}
#elif CASE == 35  // assigning to 'bfloat' (aka 'bfloat') from incompatible type 'device half'
kernel void k(device half* x [[buffer(0)]], device bfloat* y [[buffer(1)]]) {
    y[0] = x[0];  // !
}
#elif CASE == 36  // Metal has no inline assembly
kernel void k(device float* x [[buffer(0)]]) {
    __asm__("nop");  // !
    x[0] = 1;
}
#elif CASE == 37  // k: buffer index 31 of x is over 30
kernel void k(device float* x [[buffer(31)]]) { x[0] = 1; }  // !
#elif CASE == 38  // k: the index of x must be a number, not 'kIndex'
constant constexpr uint kIndex = 0;
kernel void k(device float* x [[buffer(kIndex)]]) { x[0] = 1; }  // !
#elif CASE == 39  // there are two kernels of the name k
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1; }
kernel void k(device half* x [[buffer(0)]]) { x[0] = 1; }  // !
#elif CASE == 40  // a built-in such as [[thread_position_in_grid]] is uint or ushort, or a vector of them
kernel void k(device float* x [[buffer(0)]], int i [[thread_position_in_grid]]) { x[i] = 1; }  // !
#elif CASE == 41  // this built-in has one component
kernel void k(device float* x [[buffer(0)]], uint2 i [[thread_index_in_simdgroup]]) { x[i.x] = 1; }  // !
#elif CASE == 42  // Metal has this operation on atomic_int, atomic_uint and atomic_bool, and on atomic_float in device memory
kernel void k(device float* x [[buffer(0)]]) {
    threadgroup atomic_float sum;
    atomic_fetch_add_explicit(&sum, x[0], memory_order_relaxed);  // !
}
#elif CASE == 43  // Metal's atomics on float add, subtract, load, store and exchange
kernel void k(device atomic_float* x [[buffer(0)]]) {
    atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed);  // !
}
#elif CASE == 44  // exp takes float and half: write exp(float(x))
kernel void k(device bfloat* x [[buffer(0)]]) {
    x[0] = bfloat(exp(x[0]));  // !
}
#elif CASE == 45  // simd_and takes integers
kernel void k(device float* x [[buffer(0)]]) {
    x[0] = simd_and(x[0]);  // !
}
#elif CASE == 46  // no member named 'thread_elements' in 'metal::simdgroup_matrix<float, 8, 8>'
kernel void k(device float* x [[buffer(0)]]) {
    simdgroup_float8x8 m(1.0f);
    x[0] = m.thread_elements()[0];  // !
}
#elif CASE == 47  // simdgroup_matrix is 8 x 8
kernel void k(device float* x [[buffer(0)]]) {
    simdgroup_matrix<float, 16, 16> m(1.0f);  // !
    x[0] = 1;
}
#elif CASE == 48  // give matmul2d operands of one type: mixed ones fail to compile on some systems
kernel void k(device half* x [[buffer(0)]], device bfloat* y [[buffer(1)]], device float* z [[buffer(2)]]) {
    using namespace mpp::tensor_ops;
    constexpr auto shape = matmul2d_descriptor(16, 16, 16);
    matmul2d<shape, execution_simdgroup> op;
    auto a = tensor<device half, dextents<int, 2>, tensor_inline>(x, dextents<int, 2>(16, 16));
    auto b = tensor<device bfloat, dextents<int, 2>, tensor_inline>(y, dextents<int, 2>(16, 16));
    auto c = tensor<device float, dextents<int, 2>, tensor_inline>(z, dextents<int, 2>(16, 16));
    op.run(a, b, c);  // !
}
#elif CASE == 49  // an input in registers needs the scope of one SIMD-group and a constant k
kernel void k(device half* x [[buffer(0)]]) {
    using namespace mpp::tensor_ops;
    constexpr auto shape = matmul2d_descriptor(16, 16, 16);
    matmul2d<shape, execution_simdgroups<2>> op;
    auto a = op.get_left_input_cooperative_tensor<half, half, float>();  // !
    x[0] = a[0];
}
#elif CASE == 50  // k: an instance of a kernel must write its template arguments
template <typename T>
kernel void k(device T* x [[buffer(0)]]) {
    x[0] = 1;
}
template [[host_name("k_float")]] kernel void k(device float*);  // !
#elif CASE == 51  // h_float is an instance of h, which is no kernel here
template <typename T>
kernel void k(device T* x [[buffer(0)]]) {
    x[0] = 1;
}
template [[host_name("h_float")]] [[kernel]] decltype(h<float>) h<float>;  // !
#elif CASE == 52  // as_type needs two types of one size
kernel void k(device float* x [[buffer(0)]]) {
    x[0] = as_type<half>(x[0]);  // !
}
#elif CASE == 53  // read-only variable is not assignable
kernel void k(device const float* x [[buffer(0)]]) {
    x[0] = 1;  // !
}
#elif CASE == 54  // the index of function constant kCount must be a number
constant uint kCount [[function_constant(kCount)]];  // !
kernel void k(device uint* x [[buffer(0)]]) { x[0] = kCount; }
#elif CASE == 55  // a pointer or reference without an address space is `thread`, and cannot hold a threadgroup address
kernel void k(device float* x [[buffer(0)]]) {
    threadgroup float s[32];
    float* p = s;  // !
    x[0] = p[0];
}
#endif
