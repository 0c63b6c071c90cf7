// make_ops: the one place that knows which backends there are.
#include "cpu/backend.h"
#include "error.h"
#include "gpu/backend.h"
#include "options.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace lily {

namespace {

struct CodePath {
    const char* name;
    const Kernels *steps, *prompts,
        *two_digits;  // of a row or few; of prompts; of those where the option says so
    bool present;
};

#if defined(__aarch64__)
#if defined(__APPLE__)
bool has(const char* feature) {
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname(feature, &there, &size, nullptr, 0) == 0 && there;
}
#endif

// Whether integer dot products are there: FEAT_DotProd, of Armv8.2, which every Apple silicon has.
bool has_dot_products() {
#if defined(__APPLE__)
    return has("hw.optional.arm.FEAT_DotProd");
#else
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
}

// And products of matrices of bytes: FEAT_I8MM, of Armv8.6, which Apple silicon has from the M2 on.
bool has_matrices() {
#if defined(__APPLE__)
    return has_dot_products() && has("hw.optional.arm.FEAT_I8MM");
#else
    constexpr unsigned long kI8mm = 1 << 13;  // HWCAP2_I8MM of Linux' asm/hwcap.h, which older ones lack
    return has_dot_products() && (getauxval(AT_HWCAP2) & kI8mm);
#endif
}
#endif

// The best first.
std::vector<CodePath> code_paths() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    return {
#if defined(__linux__)
        {"amx", &kKernelsAvx512Vnni, &kKernelsAmxPrompt, &kKernelsAmxPrompt, vnni && has_amx()},
#endif
        {"avx512vnni", &kKernelsAvx512Vnni, &kKernelsAvx512Vnni, &kKernelsAvx512VnniPrompt, vnni},
        {"avx512", &kKernelsAvx512, &kKernelsAvx512, &kKernelsAvx512Prompt, avx512},
        {"avx2", &kKernelsAvx2, &kKernelsAvx2, &kKernelsAvx2Prompt, avx2},
        {"plain", &kKernelsPlain, &kKernelsPlain, &kKernelsPlain, true}};
#elif defined(__aarch64__)
    return {{"neoni8mm", &kKernelsNeonI8mm, &kKernelsNeonI8mm, &kKernelsNeonI8mmPrompt, has_matrices()},
            {"neondot", &kKernelsNeonDot, &kKernelsNeonDot, &kKernelsNeonDotPrompt, has_dot_products()},
            {"neon", &kKernelsNeon, &kKernelsNeon, &kKernelsNeon, true},
            {"plain", &kKernelsPlain, &kKernelsPlain, &kKernelsPlain, true}};
#else
    return {{"plain", &kKernelsPlain, &kKernelsPlain, &kKernelsPlain, true}};
#endif
}

CodePath choose(const std::string& simd) {
    std::string present;
    for (const CodePath& path : code_paths()) {
        if (!path.present) continue;
        if (simd == "auto" || simd == path.name) return path;
        present += (present.empty() ? "" : ", ") + std::string(path.name);
    }
    throw DeviceError("option simd: this CPU cannot run '" + simd + "'; it can run " + present);
}

bool asks_for_cuda(const Options& options) {
    return options.device == "cuda" || (options.device == "auto" && has_cuda(options.kernels));
}

}  // namespace

// An NVIDIA GPU wants many rows of each expert: docs/nvidia.md.
int prefill_chunk(const Options& options) {
    if (options.prefill_chunk) return options.prefill_chunk;
    return asks_for_cuda(options) ? 4096 : kPrefillChunk;
}

std::unique_ptr<Ops> make_ops(const Weights& weights, const Options& options, int rows, DType kv,
                              const Notice& notice) {
    if (options.device == "sim")
        return std::make_unique<GpuOps>(weights, options, rows, kv, make_simulator(options.kernels));
    if (asks_for_cuda(options))
        return std::make_unique<GpuOps>(weights, options, rows, kv, make_cuda(options.kernels));
    if (options.device == "metal" || (options.device == "auto" && has_metal(options.kernels)))
        return std::make_unique<GpuOps>(weights, options, rows, kv,
                                        make_metal({options.kernels, options.resident_seconds, notice}));
    const CodePath path = choose(options.simd);
    const Packing packing{options.repack, options.repack_cache, notice};
    return std::make_unique<CpuOps>(weights, options.threads, packing, rows, kv, *path.steps,
                                    options.prefill_digits == 2 ? *path.two_digits : *path.prompts);
}

}  // namespace lily
