// make_ops: the one place that knows which backends there are.
#include "cpu/backend.h"
#include "error.h"
#include "gpu/backend.h"
#include "options.h"

namespace lily {

namespace {

struct CodePath {
    const Kernels* kernels;
    bool present;
};

// The best first.
std::vector<CodePath> code_paths() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    return {{&kKernelsAvx512Vnni, vnni},
            {&kKernelsAvx512, avx512},
            {&kKernelsAvx2, avx2},
            {&kKernelsPlain, true}};
#else
    return {{&kKernelsPlain, true}};
#endif
}

const Kernels& choose(const std::string& simd) {
    std::string present;
    for (const CodePath& path : code_paths()) {
        if (!path.present) continue;
        if (simd == "auto" || simd == path.kernels->name) return *path.kernels;
        present += (present.empty() ? "" : ", ") + std::string(path.kernels->name);
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
    const Kernels &steps = choose(options.simd), *prompts = &steps;
#if defined(__x86_64__)
    if (&steps == &kKernelsAvx512Vnni && options.prefill_digits == 2) prompts = &kKernelsAvx512VnniPrompt;
#endif
    return std::make_unique<CpuOps>(weights, options.threads, options.repack, rows, kv, steps, *prompts);
}

}  // namespace lily
