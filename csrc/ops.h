// Ops: the steps of this model. One implementation per backend; forward.cpp calls them in order.
// A step is what reference.py states in a function of the same name.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "state.h"
#include "tensor.h"
#include "traffic.h"
#include "weights.h"

namespace lily {

// A run of consecutive tokens of one sequence inside a batch.
struct Segment {
    State* state;
    int row;  // its first row in the batch
    int length;
    int64_t position;  // of its first token in the sequence
    // Rows that kernels are chosen by: in a prompt, those from the border of the position grid's chunk to
    // where the prompt or the chunk ends, so that a row goes the same way however its prompt is cut. 0:
    // length.
    int chunk_rows = 0;

    int choice() const { return chunk_rows ? chunk_rows : length; }
};

// In the place of a token id: the token that Ops::sample drew last, which the device has and the host need
// not know.
constexpr int32_t kDrawn = -1;

constexpr int kLogitRows = 32;  // that head gives at a time: enough to reuse a weight

// T rows: one segment when a prompt is taken in, one or several of length 1 when sequences are continued.
struct Batch {
    std::span<const int32_t> tokens;  // (T); one row may be kDrawn
    std::span<const Segment> segments;
    int rows = 0;  // T

    const Segment& segment_of(int64_t row) const {
        size_t i = 0;
        while (row >= segments[i].row + segments[i].length) ++i;
        return segments[i];
    }
};

// clang-format off
// What flows between the steps. Allocated once for the largest T; each row belongs to one token.
//      name        width of a row                  type   written by    holds
#define LILY_ACTIVATIONS(X)                                                                                   \
    X(x,            c.hidden,                       f32)  /* embed, *_out, moe_down: the residual stream */   \
    X(qkv,          c.channels(),                   f32)  /* gdn_in: q, k, v before the convolution */        \
    X(z,            c.value_heads * c.value_dim,    f32)  /* gdn_in: output gate */                           \
    X(b,            c.value_heads,                  f32)  /* gdn_in: before the sigmoid that makes beta */    \
    X(a,            c.value_heads,                  f32)  /* gdn_in: before the softplus of the decay */      \
    X(qg,           c.heads * 2 * c.head_dim,       f32)  /* attn_in: per head Dh query, Dh gate */           \
    X(k,            c.kv_heads * c.head_dim,        f32)  /* attn_in */                                       \
    X(v,            c.kv_heads * c.head_dim,        f32)  /* attn_in */                                       \
    X(y,            c.mixer_width(),                f32)  /* gdn_mix, attn_mix: the mixer's output */         \
    X(h,            c.hidden,                       f32)  /* moe_route: the normed residual */                \
    X(router,       c.experts,                      f32)  /* moe_route: router logits */                      \
    X(shared_gate,  1,                              f32)  /* moe_route: logit of the shared expert's gate */  \
    X(shared,       c.shared_width,                 f32)  /* moe_route: shared expert after SwiGLU */         \
    X(expert,       c.experts_per_token,            i32)  /* moe_up: chosen experts, best first */            \
    X(weight,       c.experts_per_token,            f32)  /* moe_up: their weights, which sum to 1 */         \
    X(hidden,       c.hidden_width(),               f32)  /* moe_up: chosen experts after SwiGLU */
// clang-format on

struct Activations {
#define LILY_FIELD(name, width, type) Tensor name;
    LILY_ACTIVATIONS(LILY_FIELD)
#undef LILY_FIELD
};

struct TokenBias {
    int32_t token;
    float bias;  // an addend; -infinity excludes the token
    bool operator==(const TokenBias&) const = default;
};

struct TokenCount {
    int32_t token;
    int32_t count;
};

// What tokens are drawn by, the same for a whole answer. Values that stand here change nothing, but for the
// temperature.
struct Sampling {
    float temperature = 0;  // 0: the best token, ties to the lower id
    int top_k = 0;          // 0: all
    float top_p = 1;
    float min_p = 0;
    float repetition_penalty = 1;  // > 0
    float presence_penalty = 0;
    float frequency_penalty = 0;
    std::vector<TokenBias> bias;  // by token, each once
    uint64_t seed = 0;
    bool operator==(const Sampling&) const = default;
};

// What one token is drawn from beside the logits.
struct Draw {
    int64_t position = 0;                // of the token in its sequence
    std::span<const TokenCount> counts;  // the generated tokens, by token, each once
    std::span<const uint32_t> allowed;   // (V / 32), bit i % 32 of word i / 32 for token i; empty: all are
};

struct Ops {
    virtual ~Ops() = default;

    virtual const Activations& activations() const = 0;
    virtual std::string name() const = 0;  // the backend and the code path it chose, "cpu avx512"
    virtual int threads() const = 0;
    virtual int recurrent_copies() const = 0;          // 2: a step reads one and writes the other
    virtual size_t packed_bytes() const { return 0; }  // of matrices kept in another order than the files'
    virtual size_t scratch_bytes() const = 0;          // all it allocated besides those, weights and states
    // A prompt cut at multiples of it, its chunks too, gets the bits of the prompt in one piece.
    virtual int grid() const = 0;
    virtual std::string state_order() const = 0;  // names how it lays out pages and recurrent states

    // Zero-filled memory for states, and copies of it.
    virtual Memory allocate(size_t bytes) = 0;
    virtual void copy(std::byte* to, const std::byte* from,
                      size_t bytes) = 0;              // either side may be the host's
    virtual bool host_reads() const { return true; }  // whether that memory is the host's too
    virtual bool maps_files() const = 0;  // whether states may lie in a mapped file; if not, they are copied
    // Makes zeros of a page's positions from `position` on. The page is no state's.
    virtual void clear_page(std::byte* page, int position) const = 0;

    // Before the steps of a pass, and after which their results may be read.
    virtual void begin(const Batch&) = 0;
    virtual void finish() = 0;
    virtual void drop_barrier(int64_t) {}                            // see Device
    virtual std::vector<RecordedDispatch> recorded() { return {}; }  // see Device
    virtual void nothing() = 0;                                      // a stage without work, for benchmarks
    // Stages so far, where the host counts them: how often its threads were called together.
    virtual int64_t stages() const { return 0; }
    // Takes the kernels of a row or few from a file that cpu/twin.h's defines were compiled into.
    virtual void use_kernels(const std::string&) {
        throw DeviceError("use_kernels: wanted a CPU, got a GPU");
    }

    // The steps, in order. Each reads and writes the activations named in LILY_ACTIVATIONS.
    virtual void embed(const Linear& embedding, const Batch&) = 0;
    virtual void gdn_in(const LayerWeights&, const Batch&) = 0;    // norm, projections
    virtual void gdn_mix(const LayerWeights&, const Batch&) = 0;   // conv, gates, delta rule
    virtual void gdn_out(const LayerWeights&, const Batch&) = 0;   // gated norm, out projection, residual
    virtual void attn_in(const LayerWeights&, const Batch&) = 0;   // norm, q, gate, k, v
    virtual void attn_mix(const LayerWeights&, const Batch&) = 0;  // q/k norm, RoPE, append, attention, gate
    virtual void attn_out(const LayerWeights&, const Batch&) = 0;  // out projection, residual
    virtual void moe_route(const LayerWeights&,
                           const Batch&) = 0;                    // norm, router, shared expert's gate and up
    virtual void moe_up(const LayerWeights&, const Batch&) = 0;  // top-k, chosen experts' gate and up
    virtual void moe_down(const LayerWeights&,
                          const Batch&) = 0;  // down, weighted sum, shared expert, residual

    // Final norm and head of rows [row, row + rows), at most kLogitRows, into logits (rows, V) f32, memory of
    // allocate().
    virtual void head(const Weights&, int row, int rows, float* logits) = 0;
    // Draws a token from logits (V) f32 in memory of allocate(). Every backend draws the same one:
    // reference.py states each rounding. Throws std::invalid_argument for an id outside the vocabulary.
    virtual void sample(std::span<const float> logits, const Sampling&, const Draw&) = 0;
    // The token that sample drew last, or, back = 1, for the pass before, once it is there. Throws
    // DeviceError if a logit was not finite, std::invalid_argument if no token was left.
    virtual int32_t drawn(int back = 0) = 0;
    // Whether the host is free while a pass runs, so that the next can be prepared before its token is known.
    virtual bool overlaps() const { return false; }
    virtual std::vector<std::string> compile() { return {}; }            // see Device::compile
    virtual double device_seconds() { return 0; }                        // see Device::seconds
    virtual std::optional<size_t> room() const { return std::nullopt; }  // see Device::room

    // A layer's state in the order of the specification, float32. attention: keys, values (G, T, Dh) each;
    // delta: conv (C - 1, channels), S (Hv, Dv, Dk).
    virtual void read_state(const LayerWeights&, const State&, float* first, float* second) const = 0;
};

struct Options;

// The type that the option kv names.
inline DType kv_type(const std::string& name) {
    return name == "f32" ? DType::f32 : name == "int8" ? DType::i8 : DType::bf16;
}

inline constexpr int kPrefillChunk = 2048;  // tokens of a pass, if neither the option nor the device says

// Tokens of a pass: the option's, or what suits the device that it asks for.
int prefill_chunk(const Options&);

// rows: the largest T.  kv: what keys and values are kept in.
std::unique_ptr<Ops> make_ops(const Weights&, const Options&, int rows, DType kv, const Notice& = nullptr);

}  // namespace lily
