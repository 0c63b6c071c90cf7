#include "gpu/dry.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "forward.h"
#include "gpu/backend.h"

namespace lily {

namespace {

// Notes what it is asked to do. Its memory is address space, of which only what the host writes becomes real.
class Notebook final : public Device {
   public:
    explicit Notebook(std::vector<RecordedDispatch>& notes) : notes_(notes) {}

    std::string name() const override { return "dry"; }

    Memory allocate(size_t bytes) override {
        allocated_ += bytes;
        const size_t whole = bytes ? bytes : 1;
        void* p =
            mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        return Memory(static_cast<std::byte*>(p), [whole](std::byte* q) { munmap(q, whole); });
    }

    void dispatch(const Dispatch& d) override {
        notes_.push_back({.kernel = d.kernel,
                          .op = d.op,
                          .stage = stage_,
                          .groups = int64_t{d.groups[0]} * d.groups[1] * d.groups[2],
                          .threads = d.threads,
                          .memory = {}});
        for (const auto& list : {d.buffers, d.reached})
            for (const Binding& b : list)
                notes_.back().memory.push_back({.bytes = b.bytes, .reads = b.reads, .writes = b.writes});
    }

    void barrier() override { ++stage_; }
    void finish() override {}

    size_t allocated() const { return allocated_; }

   private:
    size_t allocated_ = 0;
    std::vector<RecordedDispatch>& notes_;
    int64_t stage_ = 0;
};

// Weights of the right shapes at addresses where nothing is: a dry run never looks.
class Phantom {
   public:
    explicit Phantom(const Config& config) {
        weights_.config = config;
        const Config& c = config;
        weights_.embedding = linear("embed_tokens", c.vocab, c.hidden);
        weights_.head = linear("lm_head", c.vocab, c.hidden);
        weights_.norm = vector({c.hidden});
        for (int l = 0, attention = 0; l < c.layers; ++l) {
            LayerWeights layer;
            layer.number = l;
            layer.attention = c.attention[static_cast<size_t>(l)];
            layer.index = layer.attention ? attention++ : l - attention;
            fill(layer, "layers." + std::to_string(l) + ".");
            weights_.layers.push_back(layer);
        }
    }
    const Weights& weights() const { return weights_; }

   private:
    void fill(LayerWeights& layer, const std::string& path) {
        const Config& c = weights_.config;
        const int64_t D = c.hidden, E = c.experts, F = c.expert_width, Fs = c.shared_width;
        const int64_t values = int64_t{c.value_heads} * c.value_dim, queries = int64_t{c.heads} * c.head_dim;
        const int64_t keys = int64_t{c.kv_heads} * c.head_dim;
        layer.input_norm = vector({D});
        layer.post_norm = vector({D});
        if (layer.attention) {
            const std::string p = path + "self_attn.";
            layer.attn = {linear(p + "q_proj", 2 * queries, D),
                          linear(p + "k_proj", keys, D),
                          linear(p + "v_proj", keys, D),
                          linear(p + "o_proj", D, queries),
                          vector({c.head_dim}),
                          vector({c.head_dim})};
        } else {
            const std::string p = path + "linear_attn.";
            layer.gdn = {linear(p + "in_proj_qkv", c.channels(), D),
                         linear(p + "in_proj_z", values, D),
                         linear(p + "in_proj_b", c.value_heads, D),
                         linear(p + "in_proj_a", c.value_heads, D),
                         linear(p + "out_proj", D, values),
                         vector({c.channels(), c.conv_taps}),
                         vector({c.value_heads}),
                         vector({c.value_heads}),
                         vector({c.value_dim})};
        }
        const std::string p = path + "mlp.";
        layer.moe = {linear(p + "gate", E, D),
                     linear(p + "switch_mlp.gate_proj", E * F, D),
                     linear(p + "switch_mlp.up_proj", E * F, D),
                     linear(p + "switch_mlp.down_proj", E * D, F),
                     linear(p + "shared_expert.gate_proj", Fs, D),
                     linear(p + "shared_expert.up_proj", Fs, D),
                     linear(p + "shared_expert.down_proj", D, Fs),
                     linear(p + "shared_expert_gate", 1, D)};
    }

    std::byte* place(size_t bytes) {
        std::byte* at = next_;
        next_ += (bytes + 255) / 256 * 256;
        return at;
    }

    Tensor tensor(DType dtype, std::initializer_list<int64_t> shape) {
        Tensor t(nullptr, dtype, shape);
        t.data = place(t.bytes());
        return t;
    }

    Tensor vector(std::initializer_list<int64_t> shape) { return tensor(DType::f32, shape); }

    Linear linear(const std::string& module, int64_t rows, int64_t columns) {
        const Config& c = weights_.config;
        const auto exception = c.override.find(module);
        const Quantisation q = exception != c.override.end() ? exception->second : c.quantisation;
        if (!c.quantised || q.bits == 0)
            return {tensor(DType::bf16, {rows, columns}), {}, {}, rows, columns, 0};
        return {tensor(DType::u32, {rows, columns * q.bits / 32}),
                tensor(DType::bf16, {rows, columns / 64}),
                tensor(DType::bf16, {rows, columns / 64}),
                rows,
                columns,
                q.bits};
    }

    Weights weights_;
    std::byte* next_ = reinterpret_cast<std::byte*>(uintptr_t{1} << 45);
};

}  // namespace

std::vector<RecordedDispatch> record_decode(const Config& config, const Options& options, int64_t position) {
    std::vector<RecordedDispatch> notes;
    const Phantom phantom(config);
    const DType kv = kv_type(options.kv);
    GpuOps ops(phantom.weights(), options, 1, kv, std::make_unique<Notebook>(notes));
    State state(StateLayout(config, kv, ops.recurrent_copies()), ops, std::make_shared<Ledger>());
    state.prepare(position + 1, ops);
    state.advance(position);
    const std::span<const float> logits(state.new_logits(ops), static_cast<size_t>(config.vocab));
    ops.sample(logits, {}, {position, {}, {}});  // by the step before
    notes.clear();
    const int32_t token = kDrawn;
    const Segment segment{&state, 0, 1, position};
    forward(phantom.weights(), ops, {{&token, 1}, {&segment, 1}, 1});
    ops.head(phantom.weights(), 0, 1, state.new_logits(ops));
    ops.sample(logits, {}, {position + 1, {}, {}});
    const int64_t first = notes.front().stage;
    for (RecordedDispatch& note : notes) note.stage -= first;
    return notes;
}

size_t scratch_of_prefill(const Config& config, const Options& options, int64_t tokens) {
    std::vector<RecordedDispatch> notes;
    const Phantom phantom(config);
    const DType kv = kv_type(options.kv);
    const int chunk = options.prefill_chunk ? options.prefill_chunk : kPrefillChunk;
    auto notebook = std::make_unique<Notebook>(notes);
    const Notebook& device = *notebook;
    GpuOps ops(phantom.weights(), options, chunk, kv, std::move(notebook));
    State state(StateLayout(config, kv, ops.recurrent_copies()), ops, std::make_shared<Ledger>());
    const std::vector<int32_t> zeros(static_cast<size_t>(chunk));
    for (int64_t done = 0; done < tokens; done = state.length()) {
        const auto rows = static_cast<int>(std::min<int64_t>(chunk, tokens - done));
        state.prepare(rows, ops);
        const Segment segment{&state, 0, rows, done};
        forward(phantom.weights(), ops,
                {std::span(zeros).first(static_cast<size_t>(rows)), {&segment, 1}, rows});
        notes.clear();
    }
    return device.allocated() - state.bytes();
}

}  // namespace lily
