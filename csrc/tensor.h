// Tensor: a typed, shaped view of memory that somebody else owns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace lily {

enum class DType : uint8_t { u32, i32, bf16, f16, f32, i8 };

constexpr size_t bytes_of(DType dtype) {
    return dtype == DType::i8 ? 1 : dtype == DType::bf16 || dtype == DType::f16 ? 2 : 4;
}
// Of what keys and values are kept in: int8 has a float32 scale a row, the largest magnitude over 127.
constexpr size_t bytes_of_scale(DType kv) {
    return kv == DType::i8 ? 4 : 0;
}
constexpr const char* name_of(DType dtype) {
    constexpr const char* kNames[] = {"u32", "i32", "bf16", "f16", "f32", "i8"};
    return kNames[static_cast<int>(dtype)];
}

// Row-major. A view of a weight points into a read-only mapping and must not be written.
struct Tensor {
    std::byte* data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    std::array<int64_t, 4> shape = {};

    Tensor() = default;
    Tensor(void* memory, DType type, std::initializer_list<int64_t> dimensions)
        : data(static_cast<std::byte*>(memory)), dtype(type) {
        for (int64_t n : dimensions) shape[static_cast<size_t>(rank++)] = n;
    }

    explicit operator bool() const { return data != nullptr; }
    int64_t size() const {
        int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
        return n;
    }
    size_t bytes() const { return static_cast<size_t>(size()) * bytes_of(dtype); }
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
};

// A value at any address. Weights are used where the file has them, and neither safetensors nor MLX aligns
// them: three of the four files of Qwen3.6-35B-A3B begin their tensors at an odd byte.
template <class T>
T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Widens a bfloat16: exact.
inline float from_bf16(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays a NaN.
inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Widens an IEEE half: exact.
inline float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    uint32_t bits;
    float value;
    if (magnitude >= 0x7c00u) {
        bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
    } else if (magnitude >= 0x400u) {
        bits = sign | ((magnitude << 13) + (112u << 23));
    } else {  // subnormal: magnitude * 2^-24
        value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    std::memcpy(&value, &bits, 4);
    return value;
}

// Element i of an array of bf16, f16 or f32 at any address.
inline float float_at(const std::byte* data, DType type, size_t i) {
    data += i * bytes_of(type);
    if (type == DType::f32) return load<float>(data);
    return type == DType::bf16 ? from_bf16(load<uint16_t>(data)) : from_half(load<uint16_t>(data));
}

}  // namespace lily
