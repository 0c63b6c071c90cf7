// The CPU's inner loops, as a table of functions: one table a code path, all compiled from kernels_impl.h.
// Results of a row never depend on how many rows or outputs a call covers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor.h"
#include "weights.h"

namespace lily {

// Floats that `arrange` writes for a row of `columns` inputs: the row in the order of the weight's words,
// then the sums of its groups of 64 (which multiply the biases), each padded to the widest registers.
constexpr int64_t arranged_floats(int64_t columns) {
    return (columns + 127) / 128 * 128 + (columns / 64 + 15) / 16 * 16;
}

constexpr int kTile = 16;  // rows of a tile, and its columns of 32 bits

// Columns of a row in tiles.
constexpr int64_t tiled_columns(int64_t columns) {
    return (columns + 127) / 128 * 128;
}

constexpr int kPackRows = 32;
constexpr const char* kPanelLayout = "1";  // counted up when what pack() writes changes: names files of it
constexpr int kTileRows = 256;  // rows multiplied at a time in tiles: 1 MB of bfloat16 with 2,048 columns
constexpr int kPanel = 64;  // rows multiplied at a time: 64 x 2,048 floats stay in a 1 MB second-level cache

// How a product leaves the kernel: stored, or scaled and added to what is there.
struct Output {
    float* const* row = nullptr;   // (M) pointers to where output `first` of each row goes
    const float* scale = nullptr;  // (M), or null to store
};

// The query heads that share a key/value head.
struct AttentionHeads {
    int heads = 0;
    int head_dim = 0;  // Dh
    DType kv = DType::bf16;
};

// Query rows that share a key/value head, taken through its pages together, and their memory.
struct FlashBlock {
    static constexpr int kRows = 256;  // of (token, head) at most: enough to be worth a page's tiles
    int rows = 0, head_dim = 0;
    uint16_t* queries = nullptr;  // (kRows / 16, Dh / 32, 16, 32): left operands
    uint16_t* keys = nullptr;     // (Dh / 32, 16, 16 pairs, 16): right operands, of a page
    uint16_t* values = nullptr;   // (8, Dh / 16, 16 pairs, 16)
    float* out = nullptr;         // (kRows, Dh) unnormalised
    float* most = nullptr;        // (kRows) the largest score
    float* total = nullptr;       // (kRows) the sum of exponentials

    static int64_t floats(int64_t head_dim) { return (kRows / 2 + 256 + kRows) * head_dim + 2 * kRows; }
    void lay_out(float* memory, int rows_, int head_dim_) {
        rows = rows_;
        head_dim = head_dim_;
        queries = reinterpret_cast<uint16_t*>(memory);
        keys = queries + kRows * head_dim;
        values = keys + 256 * head_dim;
        out = reinterpret_cast<float*>(values + 256 * head_dim);
        most = out + kRows * head_dim;
        total = most + kRows;
    }
};

// A head's share of the delta rule over T tokens.
struct DeltaSpan {
    const float* q = nullptr;  // token t at q + t * stride, (Dk); normalised and scaled
    const float* k = nullptr;
    const float* v = nullptr;      // (Dv)
    const float* decay = nullptr;  // token t at decay + t * gate_stride
    const float* beta = nullptr;
    const float* kq = nullptr;  // k . q of each token, at kq + t * kq_stride
    float* y = nullptr;         // token t at y + t * y_stride, (Dv)
    float* S = nullptr;         // (Dk, Dv): values are lanes
    int64_t stride = 0, gate_stride = 0, kq_stride = 0, y_stride = 0;
    int tokens = 0, key_dim = 0, value_dim = 0;
};

struct Kernels {
    const char* name;

    // Reorders a row of inputs for a weight stored in `bits`, and sums its groups.
    void (*arrange)(const float* x, int64_t columns, int bits, float* out);

    // y[m][n] = W[first + n] . x[m] for `outputs` rows of W and M arranged rows x, at most kPanel of them.
    // panels: W as pack() lays it out, or null to read it where the file has it; the results are the same.
    void (*product)(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                    const float* const* x, int M, Output out);

    // Where prompts are multiplied in tiles, else null: the rows of one arranged input after the other, at
    // most kTileRows of them, as tiles of 16 rows, and their product. tiles: (M / 16 rounded up, columns
    // rounded up to 128, 16) of bfloat16.
    void (*tile_rows)(const float* const* x, int M, int64_t columns, uint16_t* tiles);
    void (*product_tiles)(const Linear& w, const std::byte* panels, int64_t first, int64_t outputs,
                          const uint16_t* tiles, int M, Output out);

    // Lays out rows [kPackRows block, kPackRows (block + 1)) of W, at their place in panels of W's size. Null
    // where products know no such layout.
    bool (*packs)(const Linear& w);
    void (*pack)(const Linear& w, int64_t block, std::byte* panels);

    // y = x / rms(x) * weight, over n values.
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float epsilon, float* y);

    // out = silu(gate) * up, over n values; out may be either input.
    void (*swiglu)(const float* gate, const float* up, int64_t n, float* out);

    // y = y * sigmoid(gate), over n values.
    void (*sigmoid_gate)(float* y, const float* gate, int64_t n);

    // out = silu(sum over taps of rows[j][i] * weight[j][i]), over n channels.
    void (*conv)(const float* const* rows, const float* const* weight, int taps, int64_t n, float* out);

    // x = x / sqrt(sum(x^2) + 1e-6) * scale, over n values.
    void (*l2_norm)(float* x, int64_t n, float scale);

    float (*dot)(const float* a, const float* b, int64_t n);

    // The largest of n values, and whether all are finite.
    float (*largest)(const float* x, int64_t n, bool& finite);

    // The gated delta rule, token after token, for value lanes [first, first + 16).
    void (*delta)(const DeltaSpan& span, int first, int lanes);

    // Takes the first `count` positions of a page into the attention of (heads, Dh) queries, already scaled.
    // out holds, per head, [maximum, sum, Dh unnormalised values] and starts as [-inf, 0, 0 ...].
    // scores has room for (heads, 256).  keys: (Dh, 256), keys are lanes.  values: (256, Dh).
    void (*attend)(const AttentionHeads&, const void* keys, const void* values, int64_t count,
                   const float* query, float* scores, float* out);

    // The same for a block of a prompt's rows and pages of bfloat16, where tiles multiply them; else null.
    // query: (rows) pointers to (Dh), scaled. seen: (rows) how many of the page's positions each row sees,
    // none fewer than the row before. out, most and total then are what is left.
    void (*flash_begin)(FlashBlock&, const float* const* query);
    void (*flash_page)(FlashBlock&, const void* keys, const void* values, int64_t count, const int64_t* seen);

    // Folds what was attended elsewhere into `into`.
    void (*merge)(float* into, const float* from, int heads, int head_dim);

    // Writes a token's key and value into a page's planes of one head.
    void (*append)(const float* key, const float* value, int slot, int head_dim, DType kv, void* keys,
                   void* values);
};

extern const Kernels kKernelsPlain;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx2Prompt;  // of two digits
extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvx512Prompt;  // of two digits
extern const Kernels kKernelsAvx512Vnni;
extern const Kernels kKernelsAvx512VnniPrompt;  // of two digits
#if defined(__linux__)
extern const Kernels kKernelsAmxPrompt;
bool has_amx();  // and the system lets this process use it
#endif
#elif defined(__aarch64__)
extern const Kernels kKernelsNeon;
extern const Kernels kKernelsNeonDot;
extern const Kernels kKernelsNeonDotPrompt;  // of two digits
extern const Kernels kKernelsNeonI8mm;
extern const Kernels kKernelsNeonI8mmPrompt;  // of two digits
#endif

}  // namespace lily
