#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "error.h"
#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

namespace {

constexpr int kLogitRows = 32;

}  // namespace

GpuOps::GpuOps(const Weights& weights, const Options& options, int rows, DType kv,
               std::unique_ptr<Device> device)
    : c_(weights.config),
      options_(options),
      kv_(kv),
      rows_(rows),
      expert_rows_(options.expert_tile ? static_cast<uint32_t>(options.expert_tile) : 128),
      device_(std::move(device)),
      recorder_(*device_),
      sample_scratch_(c_.vocab) {
    const Config& c = c_;
    for (int columns :
         {c.hidden, c.value_heads * c.value_dim, c.heads * c.head_dim, c.expert_width, c.shared_width})
        fits_tiles_ = fits_tiles_ && columns % kSlabColumns == 0;
    const int64_t T = rows_;
    constexpr DType f32 = DType::f32, i32 = DType::i32;
#define LILY_FIELD(name, width, type) a_.name = Tensor(scratch(T * (width)), type, {T, width});
    LILY_ACTIVATIONS(LILY_FIELD)
#undef LILY_FIELD
    tokens_ = reinterpret_cast<int32_t*>(scratch(T));
    turns_ = scratch(T * c.rotary_dim);
    logits_ = scratch(int64_t{kLogitRows} * c.vocab);
    rounded_ = scratch((T * std::max<int64_t>(c.hidden, c.value_heads * c.value_dim) + 1) / 2);
    allocate_experts();
    sequences_ =
        reinterpret_cast<args::Sequence*>(scratch(kSequences * sizeof(args::Sequence) / sizeof(float)));
    allocate_gdn();
    allocate_attention();
    for (int i = 0; i < c.rotary_dim / 2; ++i)
        frequency_.push_back(std::pow(c.rope_theta, -2.0 * i / c.rotary_dim));
    upload(weights);
}

float* GpuOps::scratch(int64_t floats) {
    owned_.push_back(device_->allocate(static_cast<size_t>(floats) * sizeof(float)));
    scratch_bytes_ += static_cast<size_t>(floats) * sizeof(float);
    return reinterpret_cast<float*>(owned_.back().get());
}

// Kernels load words, and files place them at any byte: what is not aligned is copied.
Tensor GpuOps::upload(const Tensor& tensor) {
    if (!tensor || reinterpret_cast<uintptr_t>(tensor.data) % bytes_of(tensor.dtype) == 0) return tensor;
    owned_.push_back(device_->allocate(tensor.bytes()));
    std::memcpy(owned_.back().get(), tensor.data, tensor.bytes());
    Tensor copy = tensor;
    copy.data = owned_.back().get();
    return copy;
}

void GpuOps::upload(const Weights& weights) {
    const auto place = [&](Linear& w) {
        w.weight = upload(w.weight);
        w.scales = upload(w.scales);
        w.biases = upload(w.biases);
    };
    embedding_ = weights.embedding;
    head_ = weights.head;
    norm_ = weights.norm;
    layers_ = weights.layers;
    place(embedding_);
    place(head_);
    for (LayerWeights& layer : layers_) {
        GdnWeights& g = layer.gdn;
        AttentionWeights& a = layer.attn;
        MoeWeights& m = layer.moe;
        for (Linear* w :
             {&g.in_qkv, &g.in_z, &g.in_b, &g.in_a, &g.out, &a.q, &a.k, &a.v, &a.out, &m.router, &m.gate,
              &m.up, &m.down, &m.shared_gate, &m.shared_up, &m.shared_down, &m.shared_expert_gate})
            place(*w);
    }
}

void GpuOps::copy(std::byte* to, const std::byte* from, size_t bytes) {
    recorder_.finish();
    std::memcpy(to, from, bytes);
}

// What the host writes for a pass: token ids, the turns of each row's position, and where each sequence's
// states and pages are.
void GpuOps::begin(const Batch& batch) {
    LILY_CHECK(std::invalid_argument, batch.segments.size() <= kSequences,
               "batch: wanted at most %d sequences, got %zu", kSequences, batch.segments.size());
    recorder_.finish();
    sorted_layer_ = -1;
    std::copy(batch.tokens.begin(), batch.tokens.end(), tokens_);
    const auto turns = static_cast<int64_t>(frequency_.size());
    for (size_t s = 0; s < batch.segments.size(); ++s) {
        const Segment& segment = batch.segments[s];
        for (int t = 0; t < segment.length; ++t)
            for (int64_t i = 0; i < turns; ++i) {
                const double angle =
                    static_cast<double>(segment.position + t) * frequency_[static_cast<size_t>(i)];
                float* turn = turns_ + ((segment.row + t) * turns + i) * 2;
                turn[0] = static_cast<float>(std::cos(angle));
                turn[1] = static_cast<float>(std::sin(angle));
            }
        sequences_[s] = {.now = c_.delta_layers() ? segment.state->conv(0) : nullptr,
                         .next = c_.delta_layers() ? segment.state->next_conv(0) : nullptr,
                         .row = static_cast<uint32_t>(segment.row),
                         .tokens = static_cast<uint32_t>(segment.length),
                         .position = static_cast<uint32_t>(segment.position),
                         .unused = 0};
        if (c_.attention_layers() == 0) continue;
        std::byte** table = pages_ + static_cast<int64_t>(s) * pages_of_sequence_;
        for (int64_t page = 0; page * kPageTokens < segment.position + segment.length; ++page)
            table[page] = segment.state->keys(0, page);
    }
}

// Which of the batch's sequences a segment is: begin() wrote them down in their order.
int64_t GpuOps::number_of(const Segment& s) const {
    int64_t number = 0;
    while (sequences_[number].row != static_cast<uint32_t>(s.row)) ++number;
    return number;
}

void GpuOps::embed(const Linear&, const Batch& batch) {
    const auto T = static_cast<uint32_t>(batch.rows);
    run(recorder_, {.kernel = "embed", .groups = {T, 1, 1}}, args::Embed{matrix(embedding_)},
        Buffers()
            .read(tokens_, T * sizeof(int32_t))
            .weights(embedding_)
            .write(a_.x.data, bytes_of_rows(a_.x, T)));
}

void GpuOps::head(const Weights&, int first, int rows, float* logits) {
    const args::NormProject p{{matrix(head_)}, static_cast<float>(c_.norm_epsilon)};
    const auto D = static_cast<uint32_t>(c_.hidden);
    const size_t bytes = static_cast<size_t>(rows) * static_cast<size_t>(c_.vocab) * sizeof(float);
    run(recorder_,
        {.kernel = "head",
         .groups = {groups_for(blocks_of(p.matrix[0])), static_cast<uint32_t>(rows), 1},
         .threadgroup = {4 * D}},
        p,
        Buffers()
            .read(row(a_.x, first), bytes_of_rows(a_.x, rows))
            .read(norm_)
            .weights(head_)
            .write(logits_, bytes));
    recorder_.finish();
    std::memcpy(logits, logits_, bytes);
}

int32_t GpuOps::sample(std::span<const float> logits, const Sampling& sampling, const Draw& draw) {
    return sample_token(logits, sampling, draw, sample_scratch_);
}

void GpuOps::gdn_in(const LayerWeights& layer, const Batch& batch) {
    const GdnWeights& w = here(layer).gdn;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    if (tiled(batch))
        return project(layer.input_norm, T,
                       {{&w.in_qkv, &a_.qkv}, {&w.in_z, &a_.z}, {&w.in_b, &a_.b}, {&w.in_a, &a_.a}});
    const args::NormProject p{{matrix(w.in_qkv), matrix(w.in_z), matrix(w.in_b), matrix(w.in_a)},
                              static_cast<float>(c_.norm_epsilon)};
    uint32_t blocks = 0;
    for (const args::Matrix& m : p.matrix) blocks += blocks_of(m);
    run(recorder_, {.kernel = "gdn_in", .groups = {groups_for(blocks), T, 1}, .threadgroup = {4 * D}}, p,
        Buffers()
            .read(a_.x.data, bytes_of_rows(a_.x, T))
            .read(layer.input_norm)
            .weights(w.in_qkv)
            .weights(w.in_z)
            .weights(w.in_b)
            .weights(w.in_a)
            .write(a_.qkv.data, bytes_of_rows(a_.qkv, T))
            .write(a_.z.data, bytes_of_rows(a_.z, T))
            .write(a_.b.data, bytes_of_rows(a_.b, T))
            .write(a_.a.data, bytes_of_rows(a_.a, T)));
}

void GpuOps::gdn_out(const LayerWeights& layer, const Batch& batch) {
    const Linear& out = here(layer).gdn.out;
    const auto T = static_cast<uint32_t>(batch.rows);
    const args::MixOut p{matrix(out), static_cast<uint32_t>(a_.y.shape[1]),
                         static_cast<uint32_t>(c_.value_dim), static_cast<float>(c_.norm_epsilon)};
    if (tiled(batch)) {
        const size_t bytes = size_t{T} * p.out.columns * sizeof(uint16_t);
        run(recorder_, {.kernel = "gated_norm_rows", .groups = {T, 1, 1}},
            args::NormRows{p.out.columns, p.y_stride, p.head_dim, p.epsilon},
            Buffers()
                .read(a_.y.data, bytes_of_rows(a_.y, T))
                .read(a_.z.data, bytes_of_rows(a_.z, T))
                .read(layer.gdn.norm)
                .write(rounded_, bytes));
        return multiply(out, {rounded_, bytes, p.out.columns, DType::bf16}, T, a_.x.as<float>(), true);
    }
    run(recorder_,
        {.kernel = "gdn_out",
         .groups = {groups_for(blocks_of(p.out)), T, 1},
         .threadgroup = {4 * p.out.columns}},
        p,
        Buffers()
            .read(a_.y.data, bytes_of_rows(a_.y, T))
            .read(a_.z.data, bytes_of_rows(a_.z, T))
            .read(layer.gdn.norm)
            .weights(out)
            .write(a_.x.data, bytes_of_rows(a_.x, T)));
}

void GpuOps::attn_in(const LayerWeights& layer, const Batch& batch) {
    const AttentionWeights& w = here(layer).attn;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    if (tiled(batch)) return project(layer.input_norm, T, {{&w.q, &a_.qg}, {&w.k, &a_.k}, {&w.v, &a_.v}});
    const args::NormProject p{{matrix(w.q), matrix(w.k), matrix(w.v)}, static_cast<float>(c_.norm_epsilon)};
    uint32_t blocks = 0;
    for (const args::Matrix& m : p.matrix) blocks += blocks_of(m);
    run(recorder_, {.kernel = "attn_in", .groups = {groups_for(blocks), T, 1}, .threadgroup = {4 * D}}, p,
        Buffers()
            .read(a_.x.data, bytes_of_rows(a_.x, T))
            .read(layer.input_norm)
            .weights(w.q)
            .weights(w.k)
            .weights(w.v)
            .write(a_.qg.data, bytes_of_rows(a_.qg, T))
            .write(a_.k.data, bytes_of_rows(a_.k, T))
            .write(a_.v.data, bytes_of_rows(a_.v, T)));
}

void GpuOps::attn_out(const LayerWeights& layer, const Batch& batch) {
    const Linear& out = here(layer).attn.out;
    const auto T = static_cast<uint32_t>(batch.rows);
    const args::MixOut p{matrix(out), static_cast<uint32_t>(a_.y.shape[1]), 0, 0};
    if (tiled(batch))
        return multiply(out, {a_.y.data, bytes_of_rows(a_.y, T), p.y_stride, DType::f32}, T, a_.x.as<float>(),
                        true);
    run(recorder_,
        {.kernel = "attn_out",
         .groups = {groups_for(blocks_of(p.out)), T, 1},
         .threadgroup = {4 * p.out.columns}},
        p,
        Buffers()
            .read(a_.y.data, bytes_of_rows(a_.y, T))
            .weights(out)
            .write(a_.x.data, bytes_of_rows(a_.x, T)));
}

void GpuOps::read_state(const LayerWeights& layer, const State& state, float* first, float* second) const {
    device_->finish();
    if (!layer.attention) {
        std::memcpy(first, state.conv(layer.index), static_cast<size_t>(state.layout().conv) * sizeof(float));
        std::memcpy(second, state.delta(layer.index),
                    static_cast<size_t>(state.layout().delta) * sizeof(float));
        return;
    }
    const int64_t Dh = c_.head_dim, length = state.length();
    for (int64_t h = 0; h < c_.kv_heads; ++h)
        for (int64_t t = 0; t < length; ++t)
            for (int64_t d = 0; d < Dh; ++d) {
                const int64_t page = t / kPageTokens;
                const auto at = static_cast<size_t>((h * kPageTokens + t % kPageTokens) * Dh + d);
                first[(h * length + t) * Dh + d] = float_at(state.keys(layer.index, page), kv_, at);
                second[(h * length + t) * Dh + d] = float_at(state.values(layer.index, page), kv_, at);
            }
}

}  // namespace lily
