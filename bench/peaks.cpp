// What this machine's cores can do at most, all at once; bench/peaks.py compiles it for them and runs it.
//   peaks memory   bytes per second, read from a buffer that no cache holds
//   peaks vectors  operations per second of multiplications with an addition, float32, in the widest
//   registers peaks tiles    the same of bfloat16 in AMX's tiles
// Prints the best of some tries. Numbers are random: what a core multiplies decides how fast it can, in tiles
// almost by a factor of two between zeros and these.
#if defined(__aarch64__)
#define LILY_NEON
#endif
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/simd.h"
#include "cpu/threads.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include "cpu/amx.h"
#endif

namespace lily {
namespace {

constexpr int kTries = 5;
constexpr int64_t kBytes = int64_t{1} << 30;
constexpr int64_t kStretch = int64_t{2} << 20;  // that a task reads: a huge page
constexpr int64_t kAhead = 4096;                // bytes: a page that the processor does not foresee
constexpr int64_t kRounds = 1 << 16;            // of a task that multiplies
constexpr int64_t kTasks = 32;                  // of a thread, so that an uneven start evens out
constexpr int kRowSteps = 64;                   // tiles' products of a sum: 2,048 columns, a row of the model

// What a try did, per second, with all threads; the best of the tries. Task t of `tasks` does `each` of it.
template <class Task>
double best(Threads& threads, int64_t tasks, double each, const Task& task) {
    using Clock = std::chrono::steady_clock;
    double found = 0;
    for (int i = 0; i < kTries; ++i) {
        const auto began = Clock::now();
        threads.run(tasks, std::numeric_limits<int64_t>::max(), task);
        const std::chrono::duration<double> seconds = Clock::now() - began;
        found = std::max(found, static_cast<double>(tasks) * each / seconds.count());
    }
    return found;
}

// Lets the compiler leave out nothing that a value needs.
template <class Value>
LILY_INLINE void keep(const Value& value) {
    asm volatile("" ::"m"(value));
}

double memory(Threads& threads) {
    void* const p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("memory: wanted 1 GiB, got none");
#if defined(__linux__)
    madvise(p, kBytes, MADV_HUGEPAGE);
#endif
    auto* const bytes = static_cast<std::byte*>(p);
    threads.run(kBytes / kStretch, std::numeric_limits<int64_t>::max(), [&](int64_t task, int) {
        std::memset(bytes + task * kStretch, static_cast<int>(task % 255 + 1), kStretch);
    });
    return best(threads, kBytes / kStretch, kStretch, [&](int64_t task, int) {
        constexpr int kLines = 8;
        const std::byte* at = bytes + task * kStretch;
        Words total[kLines] = {};
        for (const std::byte* end = at + kStretch; at < end; at += kLines * sizeof(Words)) {
            for (size_t line = 0; line < kLines * sizeof(Words); line += 64)
                __builtin_prefetch(at + kAhead + line);
#pragma GCC unroll 8
            for (int i = 0; i < kLines; ++i) total[i] |= load_as<Words>(at + i * sizeof(Words));
        }
        keep(total);
    });
}

double vectors(Threads& threads) {
    constexpr int kChains = kLanes == 8 ? 12 : 24;  // of the 16 registers, or 32: none waits for its last sum
    std::minstd_rand random(1);
    std::uniform_real_distribution<float> number(-1, 1);
    std::array<float, 2 * kLanes> numbers;
    for (float& x : numbers) x = number(random);
    constexpr double kEach = 2.0 * kRounds * kChains * kLanes;
    return best(threads, threads.count() * kTasks, kEach, [&](int64_t, int) {
        const Floats a = load(numbers.data()), b = load(numbers.data() + kLanes);
        Floats total[kChains];
        for (int i = 0; i < kChains; ++i) total[i] = splat(static_cast<float>(i));
        for (int64_t round = 0; round < kRounds; ++round)
#pragma GCC unroll 24
            for (int i = 0; i < kChains; ++i) total[i] = fma(total[i], a, b);
        keep(total);
    });
}

#if defined(__AMX_BF16__) && defined(__linux__)
double tiles(Threads& threads) {
    if (!may_use_tiles())
        throw std::runtime_error("tiles: wanted the system's permission to use AMX, got none");
    alignas(64) std::array<uint16_t, 4 * 512> numbers;  // four tiles (16, 32) of bfloat16
    std::minstd_rand random(1);
    std::normal_distribution<float> number;
    for (uint16_t& x : numbers) {
        const float value = number(random);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        x = static_cast<uint16_t>(bits >> 16);
    }
    constexpr double kEach = 2.0 * kRounds * 4 * 16 * 16 * 32;
    return best(threads, threads.count() * kTasks, kEach, [&](int64_t, int) {
        const Tiles in_use;
        before_loads();
        _tile_loadd(4, numbers.data(), 64);
        _tile_loadd(5, numbers.data() + 512, 64);
        _tile_loadd(6, numbers.data() + 1024, 64);
        _tile_loadd(7, numbers.data() + 1536, 64);
        for (int64_t round = 0; round < kRounds; ++round) {
            if (round % kRowSteps == 0) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    });
}
#else
double tiles(Threads&) {
    throw std::runtime_error("tiles: wanted a processor with AMX in bfloat16, got another");
}
#endif

}  // namespace
}  // namespace lily

int main(int count, char** arguments) {
    using namespace lily;
    const std::string what = count == 2 ? arguments[1] : "";
    Threads threads(0);
    try {
        const double found = what == "memory"    ? memory(threads)
                             : what == "vectors" ? vectors(threads)
                             : what == "tiles"
                                 ? tiles(threads)
                                 : throw std::runtime_error("wanted memory, vectors or tiles, got " + what);
        std::printf("%.6g\n", found);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
