// What the lanes of a SIMD-group compute together: the last lane to come computes for all.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "scheduler.h"

using namespace lily::metal;

namespace {

enum Operation : uint32_t { kSum, kProduct, kMaximum, kMinimum, kAnd, kOr, kXor };
enum Number : uint32_t { kFloat, kInt, kUint };

template <class T>
T identity(uint32_t operation) {
    constexpr bool is_float = std::is_same_v<T, float>;
    switch (operation) {
        case kSum:
            return is_float ? static_cast<T>(-0.0f) : T(0);  // -0 + x is x for every x
        case kProduct:
            return T(1);
        case kMaximum:
            return is_float ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
        case kMinimum:
            return is_float ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
        case kAnd:
            return static_cast<T>(-1);
        default:
            return T(0);
    }
}

// A NaN loses against a number, as in Metal's max and min.
template <class T>
T combine(T a, T b, uint32_t operation) {
    if constexpr (!std::is_same_v<T, float>) {
        if (operation == kAnd) return a & b;
        if (operation == kOr) return a | b;
        if (operation == kXor) return a ^ b;
        if (operation == kSum) return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
        if (operation == kProduct) return static_cast<T>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
    }
    switch (operation) {
        case kSum:
            return a + b;
        case kProduct:
            return a * b;
        case kMaximum:
            return a != a || b > a ? b : a;
        default:
            return a != a || b < a ? b : a;
    }
}

template <class T>
T lane_value(const SimdGroup& simd, uint32_t place, uint32_t lane, uint32_t component) {
    T value;
    std::memcpy(&value, simd.slots[place][lane].bytes + component * sizeof(T), sizeof value);
    return value;
}

// Halves the lanes until one is left: the order of additions of a butterfly of shuffles.
template <class T>
void reduce(SimdGroup& simd, uint32_t place, uint32_t count, uint32_t operation) {
    for (uint32_t component = 0; component < count; ++component) {
        T values[kSimdWidth];
        for (uint32_t lane = 0; lane < kSimdWidth; ++lane)
            values[lane] = simd.active >> lane & 1 ? lane_value<T>(simd, place, lane, component)
                                                   : identity<T>(operation);
        for (uint32_t half = kSimdWidth / 2; half; half /= 2)
            for (uint32_t lane = 0; lane < half; ++lane)
                values[lane] = combine(values[lane], values[lane + half], operation);
        std::memcpy(&simd.results[place][component], values, sizeof(T));
    }
}

template <class T>
void scan(SimdGroup& simd, uint32_t place, uint32_t count, uint32_t operation) {
    for (uint32_t component = 0; component < count; ++component) {
        T sum = operation == kSum ? T(0) : T(1);
        for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
            if (!(simd.active >> lane & 1)) continue;
            const T own = lane_value<T>(simd, place, lane, component);
            std::memcpy(simd.slots[place][lane].bytes + component * sizeof(T), &sum, sizeof sum);
            sum = combine(sum, own, operation);
        }
    }
}

unsigned char* own_slot(Lane& lane) {
    return lane.simd->slots[lane.simd->generation & 1][lane.thread.lane].bytes;
}

}  // namespace

extern "C" {

const void* msl_runtime_exchange(const void* value, uint32_t bytes, uint32_t line) {
    Lane& lane = current_lane();
    std::memcpy(own_slot(lane), value, bytes);
    const uint32_t place = meet(call_at(Call::kExchange, line), [](SimdGroup&, uint32_t) {});
    return lane.simd->slots[place];
}

uint64_t msl_runtime_ballot(uint32_t vote, uint32_t line) {
    Lane& lane = current_lane();
    std::memcpy(own_slot(lane), &vote, sizeof vote);
    const uint32_t place = meet(call_at(Call::kBallot, line), [](SimdGroup& simd, uint32_t at) {
        uint32_t votes = 0;
        for (uint32_t i = 0; i < kSimdWidth; ++i)
            if (simd.active >> i & 1 && lane_value<uint32_t>(simd, at, i, 0)) votes |= 1u << i;
        simd.results[at][0] = votes;
        simd.results[at][1] = simd.active;
    });
    const uint32_t* results = lane.simd->results[place];
    return static_cast<uint64_t>(results[1]) << 32 | results[0];
}

void msl_runtime_reduce(const void* from, void* to, uint32_t type, uint32_t count, uint32_t operation,
                        uint32_t line) {
    Lane& lane = current_lane();
    std::memcpy(own_slot(lane), from, count * 4);
    const uint32_t place = meet(call_at(Call::kReduce, line), [=](SimdGroup& simd, uint32_t at) {
        if (type == kFloat)
            reduce<float>(simd, at, count, operation);
        else if (type == kInt)
            reduce<int32_t>(simd, at, count, operation);
        else
            reduce<uint32_t>(simd, at, count, operation);
    });
    std::memcpy(to, lane.simd->results[place], count * 4);
}

void msl_runtime_scan(const void* from, void* to, uint32_t type, uint32_t count, uint32_t operation,
                      uint32_t line) {
    Lane& lane = current_lane();
    std::memcpy(own_slot(lane), from, count * 4);
    const uint32_t place = meet(call_at(Call::kScan, line), [=](SimdGroup& simd, uint32_t at) {
        if (type == kFloat)
            scan<float>(simd, at, count, operation);
        else
            scan<uint32_t>(simd, at, count, operation);
    });
    std::memcpy(to, lane.simd->slots[place][lane.thread.lane].bytes, count * 4);
}

float msl_runtime_sinpi(float x) {
    return static_cast<float>(std::sin(std::numbers::pi * std::remainder(x, 2.0)));
}
float msl_runtime_cospi(float x) {
    return static_cast<float>(std::cos(std::numbers::pi * std::remainder(x, 2.0)));
}
float msl_runtime_tanpi(float x) {
    return static_cast<float>(std::tan(std::numbers::pi * std::remainder(x, 1.0)));
}
float msl_runtime_asinh(float x) {
    return std::asinh(x);
}
float msl_runtime_acosh(float x) {
    return std::acosh(x);
}
float msl_runtime_atanh(float x) {
    return std::atanh(x);
}
float msl_runtime_ldexp(float x, int k) {
    return std::ldexp(x, k);
}
float msl_runtime_frexp(float x, int* exponent) {
    return std::frexp(x, exponent);
}
float msl_runtime_nextafter(float x, float y) {
    return std::nextafter(x, y);
}

// The front end calls this to round a float to bfloat: to nearest even, NaN stays NaN.
__bf16 __truncsfbf2(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return std::bit_cast<__bf16>(static_cast<uint16_t>(rounded));
}
}
