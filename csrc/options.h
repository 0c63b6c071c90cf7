// Options: how a model is run, never what it computes. Declared once; Python, the environment and the docs
// read this list.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace lily {

// clang-format off
//     type         name           default  what it does
#define LILY_OPTIONS(X)                                                                                               \
    X(std::string,  device,        "auto",  "Where to run: auto, cpu, metal, cuda or sim (the GPU kernels, simulated).")                                         \
    X(int,          threads,       0,       "CPU threads; 0 is one per core this process may use.")                   \
    X(int,          prefill_chunk, 2048,    "Tokens in one pass while a prompt is taken in.")                         \
    X(int,          decode_batch,  8,       "Sequences whose next tokens are worked out in one pass, when several are written at once.") \
    X(int,          checkpoint_tokens, 2048, "Prefixes: tokens between the checkpoints that rollback goes on from, of which a prefix keeps 8 at most; 0 keeps none.") \
    X(std::string,  kv,            "bf16",  "Type that keys and values are kept in: bf16, f32, or int8 with a scale a row.")                    \
    X(std::string,  simd,          "auto",  "CPU code path: auto, avx512, avx2 or plain.")                                  \
    X(std::string,  kernels,       "",      "File of GPU kernels: for device sim by `make kernels`, for cuda by `make ptx`; metal on a Mac holds its own.")  \
    X(bool,         gqa_packing,   true,    "GPU decode: four query heads share each load of keys and values.")        \
    X(bool,         coalesced_kv,  true,    "GPU decode: keys and values are loaded 16 bytes at a time.")              \
    X(int,          fixed_blocks_from, 32768, "GPU decode: positions from which attention is cut into blocks of one size; 0 is never.") \
    X(int,          flash_from,    32,      "GPU prefill: tokens from which attention goes through matrix tiles; 0 is never.") \
    X(std::string,  gdn_scan,      "chunked", "GPU prefill: how the delta rule is scanned: registers, packed or chunked.") \
    X(int,          gdn_scan_from, 32,      "GPU prefill: tokens from which the delta rule is scanned; 0 is never.")                 \
    X(bool,         fused_dequantisation, true, "GPU prefill: weights become bfloat16 on their way into a product, not before it.") \
    X(bool,         gpu_routing,   true,    "GPU prefill: the device sorts a chunk's rows by expert, not the host.")         \
    X(bool,         concurrent,    true,    "GPU: dispatches that need nothing of one another run side by side.")              \
    X(bool,         token_handoff, true,    "GPU decode: a drawn token goes to the next step without the host.")               \
    X(int,          matmul_rows,   9,       "GPU: rows of a prompt from which products are tiled, not row by row.")   \
    X(int,          expert_tile,   0,       "GPU: rows of an expert in a tile: 16, 32, or 0 for up to 128 together.")
// clang-format on

struct Options {
#define LILY_OPTION(type, name, standard, text) type name = standard;
    LILY_OPTIONS(LILY_OPTION)
#undef LILY_OPTION

    // Sets one option from its text. Throws std::invalid_argument that names the nearest option or the values
    // allowed.
    void set(const std::string& name, const std::string& value);
    std::map<std::string, std::string> values() const;
    void check() const;  // throws std::invalid_argument for a value out of range
};

// The defaults with LILY_<NAME> of the environment laid over them.
Options options_from_environment();

struct OptionInfo {
    std::string name, type, standard, text;
};
std::vector<OptionInfo> option_list();

}  // namespace lily
