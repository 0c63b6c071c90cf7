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
    X(int,          prefill_chunk, 0,       "Prefill: tokens in one pass; 0 is what suits the device: 4096 on an NVIDIA GPU, else 2048.")                         \
    X(int,          decode_batch,  8,       "Sequences whose next tokens are worked out in one pass, when several are written at once.") \
    X(int,          speculate,     0,       "Tokens guessed ahead from what followed the same words before, and checked in one pass, 7 at most; 0 guesses none.") \
    X(int,          checkpoint_tokens, 2048, "Prefixes: tokens between the checkpoints that rollback goes on from, of which a prefix keeps 8 at most; 0 keeps none.") \
    X(std::string,  kv,            "bf16",  "Type that keys and values are kept in: bf16, f32, or int8 with a scale a row.")                    \
    X(std::string,  simd,          "auto",  "CPU code path: auto, amx (which rounds prompts to bfloat16), avx512vnni, avx512, avx2, neoni8mm, neondot, neon or plain.")                                  \
    X(std::string,  repack,        "auto",  "CPU, all but neon and plain: whether 4-bit matrices are kept in the order that is read fastest, in place of the file's pages: on, off, or auto, if they have 1 GiB or more and memory allows.") \
    X(std::string,  repack_cache,  "",      "CPU: folder where matrices in that order are kept in a file, as large as they are, which later loads map instead of packing; beside is the checkpoint's own folder, nothing keeps none.") \
    X(int,          prefill_digits, 3,      "CPU prefill, all but amx, neon and plain: digits of 8 bits that inputs are multiplied in: 3 are float32's worth and give a prompt the bits of single steps, 2 are a third faster.") \
    X(std::string,  kernels,       "",      "File of GPU kernels instead of the package's: for sim by `make kernels`, which it needs; for cuda by `make ptx`.")  \
    X(int,          resident_seconds, 180,  "Metal: seconds after the last answer for which the model stays in memory that is wired; 0 leaves that to the system.") \
    X(bool,         gqa_packing,   true,    "GPU decode: eight query heads share each load of keys and values.")        \
    X(bool,         coalesced_kv,  true,    "GPU decode: keys and values are loaded 16 bytes at a time.")              \
    X(int,          fixed_blocks_from, 32768, "GPU decode: positions from which attention is cut into blocks of one size; 0 is never.") \
    X(int,          flash_from,    32,      "GPU prefill: tokens from which attention goes through matrix tiles; 0 is never.") \
    X(std::string,  gdn_scan,      "auto", "GPU prefill: how the delta rule is scanned: registers, packed, chunked, or auto, what is fastest on the device.") \
    X(int,          gdn_scan_from, 32,      "GPU prefill: tokens from which the delta rule is scanned; 0 is never.")                 \
    X(bool,         fused_dequantisation, true, "GPU prefill: weights become bfloat16 on their way into a product, not before it.") \
    X(bool,         gpu_routing,   true,    "GPU prefill: the device sorts a chunk's rows by expert, not the host.")         \
    X(bool,         fused_norm,    true,    "GPU decode: products norm their row themselves; otherwise norms are dispatches before them.")  \
    X(bool,         fused_gdn,     true,    "GPU decode: one dispatch convolves, norms, makes the gates and takes the delta rule's step.") \
    X(bool,         fused_attention, true,  "GPU decode: attention norms and turns queries and keys itself, and appends.")    \
    X(bool,         fused_choice,  true,    "GPU decode: experts' products choose the experts themselves.")                   \
    X(bool,         fused_moe,     true,    "GPU decode: moe_route, moe_up and moe_down are a dispatch each, activations and sums included.") \
    X(bool,         fused_argmax,  true,    "GPU decode: the head notes the best of each 32 logits, which a draw begins with.")   \
    X(bool,         concurrent,    true,    "GPU: dispatches that need nothing of one another run side by side.")              \
    X(bool,         token_handoff, true,    "GPU decode: a drawn token goes to the next step without the host.")               \
    X(std::string,  tiles,         "auto",  "GPU prefill: what multiplies tiles: tensor (Metal 4's tensor operations), simdgroup (simdgroup_matrix), or auto, the first if the GPU has it.") \
    X(int,          matmul_rows,   9,       "GPU prefill: rows from which products are tiled, not row by row.")   \
    X(int,          expert_tile,   0,       "GPU prefill: rows of an expert in a tile: 16, 32, or 0 for up to 128 together.")
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

// The values that an option's default is measured against, by option; none for one that is not a technique.
// Throws std::logic_error for an option of which it is not said.
std::map<std::string, std::vector<std::string>> option_alternatives();

}  // namespace lily
