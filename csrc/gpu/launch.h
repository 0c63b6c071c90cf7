// How GpuOps dispatches: what a kernel binds, and its launch.
#pragma once

#include <array>
#include <span>
#include <string>

#include "error.h"
#include "gpu/recorder.h"
#include "metal/args.h"
#include "tensor.h"
#include "weights.h"

namespace lily {

inline constexpr uint32_t kSimd = 32;                   // lanes of a SIMD-group
inline constexpr uint32_t kSimds = 8;                   // SIMD-groups of a threadgroup that multiplies
inline constexpr uint32_t kRowsOfSimd = 4;              // outputs that a SIMD-group takes: metal/quant.h
inline constexpr int kSlabColumns = 64;                 // a multiple of which a tiled product sums over
inline constexpr uint32_t kMaxThreadgroup = 32 * 1024;  // bytes of threadgroup memory, on every Apple GPU

inline uint32_t ceil_div(int64_t a, int64_t b) {
    return static_cast<uint32_t>((a + b - 1) / b);
}

// What a dispatch binds, in the order of the kernel's arguments.
class Buffers {
   public:
    Buffers& read(const void* data, size_t bytes) { return add(Binding::read(data, bytes)); }
    Buffers& write(void* data, size_t bytes) { return add(Binding::write(data, bytes)); }
    Buffers& update(void* data, size_t bytes) { return add(Binding::update(data, bytes)); }
    Buffers& read(const Tensor& t) { return read(t.data, t.bytes()); }
    Buffers& weights(const Linear& w) { return weights(w, w.rows); }
    Buffers& weights(const Linear& w, int64_t rows) {  // of which it reads so many rows
        const auto all = static_cast<size_t>(w.rows), some = static_cast<size_t>(rows);
        for (const Tensor* t : {&w.weight, &w.scales, &w.biases}) {
            const Tensor& bound = *t ? *t : w.weight;  // a plain matrix has no scales: bound, not read
            add(Binding::read(bound.data, bound.bytes()).reading(t->bytes() / all * some));
        }
        return *this;
    }
    Buffers& norm(const Tensor& w, bool normed) {  // which it reads unless its row comes normed
        return add(Binding::read(w.data, w.bytes()).reading(normed ? 0 : w.bytes()));
    }
    Buffers& add(const Binding& binding) {
        list_[count_++] = binding;
        return *this;
    }
    std::span<const Binding> list() const { return {list_.data(), count_}; }

   private:
    std::array<Binding, 30> list_ = {};
    size_t count_ = 0;
};

inline uint32_t type_of(DType dtype) {
    return dtype == DType::bf16 ? args::kBf16 : dtype == DType::f16 ? args::kF16 : args::kF32;
}

// rows: of one expert where experts are stacked.
inline args::Matrix matrix(const Linear& w, int64_t rows = 0) {
    return {static_cast<uint32_t>(rows ? rows : w.rows), static_cast<uint32_t>(w.columns),
            static_cast<uint32_t>(w.bits), type_of(w.bits ? w.scales.dtype : w.weight.dtype)};
}

inline uint32_t blocks_of(const args::Matrix& m) {
    return ceil_div(m.rows, kRowsOfSimd);
}

// Of a vector of so many floats that rows are multiplied with, in threadgroup memory.
inline uint32_t vector_bytes(uint32_t floats) {
    return args::vector_floats(floats) * static_cast<uint32_t>(sizeof(float));
}

inline uint32_t groups_for(uint32_t blocks) {
    return ceil_div(blocks, kSimds);
}

struct Launch {
    std::string kernel;
    std::array<uint32_t, 3> groups;
    uint32_t threads = kSimds * kSimd;
    std::array<uint32_t, 3> threadgroup = {};  // bytes of each threadgroup argument; 0: there is none
    std::span<const Binding> reached = {};
    const uint32_t* indirect = nullptr;  // see Dispatch
    uint32_t landing = 0;   // bytes of the only threadgroup argument, if the device says how many
    double operations = 0;  // see Dispatch
};

// Operations of products of T rows with a matrix.
inline double operations_of(const Linear& w, double T) {
    return 2 * T * static_cast<double>(w.rows) * static_cast<double>(w.columns);
}

template <class Args>
void run(Recorder& recorder, const Launch& launch, const Args& args, const Buffers& buffers) {
    size_t arguments = 0;
    uint32_t bytes = 0;
    for (uint32_t size : launch.threadgroup) {
        arguments += size != 0;
        bytes += size;
    }
    LILY_CHECK(DeviceError, bytes <= kMaxThreadgroup - 2048,
               "%s: needs %u bytes of threadgroup memory, a GPU has %u. This model is too wide for the GPU "
               "kernels; use "
               "device=\"cpu\".",
               launch.kernel.c_str(), bytes, kMaxThreadgroup);
    recorder.dispatch({.kernel = launch.kernel,
                       .op = recorder.op(),
                       .groups = {launch.groups[0], launch.groups[1], launch.groups[2]},
                       .threads = launch.threads,
                       .args = {reinterpret_cast<const std::byte*>(&args), sizeof args},
                       .buffers = buffers.list(),
                       .threadgroup = launch.landing ? std::span(&launch.landing, 1)
                                                     : std::span(launch.threadgroup.data(), arguments),
                       .reached = launch.reached,
                       .indirect = launch.indirect,
                       .operations = launch.operations});
}

// The smallest variant of a kernel whose lanes hold at least `wanted` numbers each.
template <size_t N>
int variant(const std::array<int, N>& sizes, int wanted, const char* what, int got) {
    for (int size : sizes)
        if (size >= wanted) return size;
    throw DeviceError(format("%s: the GPU kernels take at most %d, got %d. Use device=\"cpu\".", what,
                             got / wanted * sizes.back(), got));
}

}  // namespace lily
