#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "error.h"
#include "gpu/backend.h"
#include "gpu/launch.h"
#include "safetensors.h"

namespace lily {

GpuOps::GpuOps(const Weights& weights, const Options& options, int rows, DType kv,
               std::unique_ptr<Device> device)
    : c_(weights.config),
      options_(options),
      kv_(kv),
      rows_(rows),
      device_(std::move(device)),
      at_once_(device_->threadgroups_at_once()),
      simds_of_row_(device_->simds_of_row()),
      tiling_(device_->tiling()),
      gdn_scan_(options.gdn_scan == "auto" ? device_->gdn_scan() : options.gdn_scan),
      tile_kernels_(options.tiles != "simdgroup" && device_->tensor_operations() ? kTensorKernels : ""),
      recorder_(*device_, options.concurrent) {
    LILY_CHECK(
        DeviceError, options.tiles != "tensor" || device_->tensor_operations(),
        "option tiles: wanted tensor operations, which %s, or its library of kernels, does not have. Use "
        "tiles=\"auto\".",
        device_->name().c_str());
    device_->admit(weights.bytes);
    const Config& c = c_;
    for (int columns :
         {c.hidden, c.value_heads * c.value_dim, c.heads * c.head_dim, c.expert_width, c.shared_width})
        fits_tiles_ = fits_tiles_ && columns % kSlabColumns == 0;
    const int64_t T = rows_;
    constexpr DType f32 = DType::f32, i32 = DType::i32;
#define LILY_FIELD(name, width, type) a_.name = Tensor(scratch(T * (width)), type, {T, width});
    LILY_ACTIVATIONS(LILY_FIELD)
#undef LILY_FIELD
    for (Slot& slot : slots_) {
        slot.tokens = reinterpret_cast<int32_t*>(scratch(T));
        slot.turns = scratch(T * c.rotary_dim);
        slot.sequences =
            reinterpret_cast<args::Sequence*>(scratch(kSequences * sizeof(args::Sequence) / sizeof(float)));
        owned_.push_back(device_->allocate_shared(sizeof(int32_t)));
        slot.token = reinterpret_cast<int32_t*>(owned_.back().get());
    }
    const int64_t widest = std::max(c.hidden, c.value_heads * c.value_dim);
    rounded_ = scratch((T * widest + 1) / 2);
    if (!options_.fused_norm) normed_ = scratch(T * widest);
    allocate_experts();
    allocate_draw(c.vocab);
    allocate_gdn();
    allocate_attention();
    for (int i = 0; i < c.rotary_dim / 2; ++i)
        frequency_.push_back(std::pow(c.rope_theta, -2.0 * i / c.rotary_dim));
    upload(weights);
    allocate_expanded();
}

float* GpuOps::scratch(int64_t floats) {
    owned_.push_back(device_->allocate(static_cast<size_t>(floats) * sizeof(float)));
    scratch_bytes_ += static_cast<size_t>(floats) * sizeof(float);
    return reinterpret_cast<float*>(owned_.back().get());
}

namespace {

// Kernels load words, and files place them at any byte. Packed words are loaded 8 bytes at a time
// (metal/quant.h), others 4.
bool is_aligned(const Tensor& tensor) {
    const size_t load = tensor.dtype == DType::u32 ? 8 : sizeof(uint32_t);
    return reinterpret_cast<uintptr_t>(tensor.data) % load == 0;
}

}  // namespace

// What is not aligned is copied, and so is what the device can't reach.
void GpuOps::upload(Tensor& tensor) {
    if (!tensor || (is_aligned(tensor) && device_->reads(tensor.data, tensor.bytes()))) return;
    owned_.push_back(device_->allocate(tensor.bytes()));
    device_->write(owned_.back().get(), tensor.data, tensor.bytes());
    tensor.data = owned_.back().get();
}

// Every tensor of the weights that the dispatches read.
template <class Visit>
void GpuOps::each_weight(const Visit& visit) {
    const auto linear = [&](Linear& w) {
        visit(w.weight);
        visit(w.scales);
        visit(w.biases);
    };
    visit(norm_);
    linear(embedding_);
    linear(head_);
    for (LayerWeights& layer : layers_) {
        GdnWeights& g = layer.gdn;
        AttentionWeights& a = layer.attn;
        MoeWeights& m = layer.moe;
        for (Linear* w :
             {&g.in_qkv, &g.in_z, &g.in_b, &g.in_a, &g.out, &a.q, &a.k, &a.v, &a.out, &m.router, &m.gate,
              &m.up, &m.down, &m.shared_gate, &m.shared_up, &m.shared_down, &m.shared_expert_gate})
            linear(*w);
        for (Tensor* t : {&layer.input_norm, &layer.post_norm, &g.conv, &g.a_log, &g.dt_bias, &g.norm,
                          &a.q_norm, &a.k_norm})
            visit(*t);
    }
}

// A file that has to be copied for the most part is copied whole, and not mapped: it would count twice.
void GpuOps::upload(const Weights& weights) {
    embedding_ = weights.embedding;
    head_ = weights.head;
    norm_ = weights.norm;
    layers_ = weights.layers;
    for (const std::shared_ptr<MappedFile>& file : weights.files) {
        const std::span<const std::byte> bytes = file->bytes();
        size_t stays = 0, moves = 0;
        each_weight([&](const Tensor& t) {
            if (t && t.data >= bytes.data() && t.data < bytes.data() + bytes.size())
                (is_aligned(t) ? stays : moves) += t.bytes();
        });
        if (stays > moves) device_->map(bytes, std::filesystem::path(file->path()).filename().string());
    }
    each_weight([&](Tensor& t) { upload(t); });
    device_->finish();
}

Memory GpuOps::allocate(size_t bytes) {
    best_of_ = nullptr;  // its memory may have been given back, and come again
    return device_->allocate(bytes);
}

void GpuOps::copy(std::byte* to, const std::byte* from, size_t bytes) {
    best_of_ = nullptr;
    recorder_.finish();
    device_->copy(to, from, bytes);
}

// The tiled kernels sum over blocks of 64 positions; those that go row by row do not care.
int GpuOps::grid() const {
    const int first[] = {options_.matmul_rows, options_.flash_from, options_.gdn_scan_from};
    int most = 0;
    for (int from : first)
        if (from <= rows_) most = std::max(most, from);
    constexpr int kBlock = 64;
    return most == 0 ? 1 : (most + kBlock - 1) / kBlock * kBlock;
}

void GpuOps::clear_page(std::byte* page, int position) const {
    const size_t row = static_cast<size_t>(c_.head_dim) * bytes_of(kv_), scale = bytes_of_scale(kv_);
    const auto kept = static_cast<size_t>(position);
    const int heads = 2 * c_.attention_layers() * c_.kv_heads;
    for (int head = 0; head < heads; ++head, page += kPageTokens * (row + scale)) {
        std::memset(page + kept * row, 0, (kPageTokens - kept) * row);  // (256, Dh)
        std::memset(page + kPageTokens * row + kept * scale, 0, (kPageTokens - kept) * scale);
    }
}

// What the host writes for a pass: token ids, the turns of each row's position, and where each sequence's
// states and pages are.
void GpuOps::begin(const Batch& batch) {
    LILY_CHECK(std::invalid_argument, batch.segments.size() <= kSequences,
               "batch: wanted at most %d sequences, got %zu", kSequences, batch.segments.size());
    const bool hands_over = batch.rows == 1 && batch.tokens[0] == kDrawn;
    const int32_t* last = drawn_->token;
    const int32_t token = hands_over && !options_.token_handoff ? drawn(0) : 0;
    slot_->number = recorder_.commit();
    slot_ = &other(slot_);
    recorder_.wait(slot_->number);
    sorted_layer_ = -1;
    if (hands_over && !options_.token_handoff) {
        device_->write(slot_->tokens, &token, sizeof token);
    } else if (!hands_over) {
        device_->write(slot_->tokens, batch.tokens.data(), batch.tokens.size_bytes());
    }
    taken_ = hands_over && options_.token_handoff ? last : slot_->tokens;
    embedded_ = embedded_ && taken_ == last;
    const auto turns = static_cast<int64_t>(frequency_.size());
    std::vector<float> turned(static_cast<size_t>(batch.rows) * frequency_.size() * 2);
    std::vector<std::byte*> table;
    for (size_t s = 0; s < batch.segments.size(); ++s) {
        const Segment& segment = batch.segments[s];
        for (int t = 0; t < segment.length; ++t)
            for (int64_t i = 0; i < turns; ++i) {
                const double angle =
                    static_cast<double>(segment.position + t) * frequency_[static_cast<size_t>(i)];
                float* turn = turned.data() + ((segment.row + t) * turns + i) * 2;
                turn[0] = static_cast<float>(std::cos(angle));
                turn[1] = static_cast<float>(std::sin(angle));
            }
        const bool recurs = c_.delta_layers() > 0;
        const auto address = [&](float* p) { return reinterpret_cast<float*>(device_->address(p)); };
        sequences_[s] = {.now = recurs ? address(segment.state->conv(0)) : nullptr,
                         .next = recurs ? address(segment.state->next_conv(0)) : nullptr,
                         .row = static_cast<uint32_t>(segment.row),
                         .tokens = static_cast<uint32_t>(segment.length),
                         .position = static_cast<uint32_t>(segment.position),
                         .unused = 0};
        if (c_.attention_layers() == 0) continue;
        table.clear();
        for (int64_t page = 0; page * kPageTokens < segment.position + segment.length; ++page)
            table.push_back(device_->address(segment.state->keys(0, page)));
        device_->write(slot_->pages + static_cast<int64_t>(s) * pages_of_sequence_, table.data(),
                       table.size() * sizeof(std::byte*));
    }
    device_->write(slot_->turns, turned.data(), turned.size() * sizeof(float));
    device_->write(slot_->sequences, sequences_.data(), batch.segments.size() * sizeof(args::Sequence));
}

// Which of the batch's sequences a segment is: begin() wrote them down in their order.
int64_t GpuOps::number_of(const Segment& s) const {
    int64_t number = 0;
    while (sequences_[static_cast<size_t>(number)].row != static_cast<uint32_t>(s.row)) ++number;
    return number;
}

void GpuOps::embed(const Linear&, const Batch& batch) {
    recorder_.begin("embed");
    if (std::exchange(embedded_, false)) return;  // sample did it
    const auto T = static_cast<uint32_t>(batch.rows);
    run(recorder_, {.kernel = "embed", .groups = {T, 1, 1}}, args::Embed{matrix(embedding_)},
        Buffers()
            .read(taken_, T * sizeof(int32_t))
            .weights(embedding_, T)
            .write(a_.x.data, bytes_of_rows(a_.x, T)));
}

// Each waits for the one before: they declare the same number.
void GpuOps::nothing() {
    recorder_.begin("nothing");
    run(recorder_, {.kernel = "nothing", .groups = {1, 1, 1}, .threads = kSimd}, args::Embed{},
        Buffers().write(a_.x.data, sizeof(float)));
}

void GpuOps::head(const Weights&, int first, int rows, float* logits) {
    recorder_.begin("head");
    const args::NormProject p{
        {matrix(head_)}, static_cast<float>(c_.norm_epsilon), !options_.fused_norm, options_.fused_argmax};
    const auto D = static_cast<uint32_t>(c_.hidden);
    const auto T = static_cast<uint32_t>(rows), blocks = ceil_div(p.matrix[0].rows, args::kLogitBlock);
    const float* x = normed(norm_, row(a_.x, first), T, normed_);
    run(recorder_,
        {.kernel = "head",
         .groups = {std::min(groups_for(blocks), at_once_), T, 1},
         .threadgroup = {vector_bytes(D)}},
        p,
        Buffers()
            .read(x, bytes_of_rows(a_.x, rows))
            .norm(norm_, p.normed)
            .weights(head_)
            .write(logits, size_t{T} * p.matrix[0].rows * sizeof(float))
            .write(best_, p.best ? size_t{T} * blocks * sizeof(uint32_t) : 0));
    best_of_ = rows == 1 && p.best ? logits : nullptr;
}

void GpuOps::gdn_in(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("gdn_in");
    const GdnWeights& w = here(layer).gdn;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    if (tiled(batch))
        return project(here(layer).input_norm, T,
                       {{&w.in_qkv, &a_.qkv}, {&w.in_z, &a_.z}, {&w.in_b, &a_.b}, {&w.in_a, &a_.a}});
    const args::NormProject p{{matrix(w.in_qkv), matrix(w.in_z), matrix(w.in_b), matrix(w.in_a)},
                              static_cast<float>(c_.norm_epsilon),
                              !options_.fused_norm,
                              0};
    const float* x = normed(here(layer).input_norm, a_.x.as<float>(), T, normed_);
    uint32_t blocks = 0;
    for (const args::Matrix& m : p.matrix) blocks += blocks_of(m);
    run(recorder_,
        {.kernel = "gdn_in",
         .groups = {std::min(groups_for(blocks), at_once_), T, 1},
         .threadgroup = {vector_bytes(D)}},
        p,
        Buffers()
            .read(x, bytes_of_rows(a_.x, T))
            .norm(here(layer).input_norm, p.normed)
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
    recorder_.begin("gdn_out");
    const Linear& out = here(layer).gdn.out;
    const Tensor& norm = here(layer).gdn.norm;
    const auto T = static_cast<uint32_t>(batch.rows);
    const args::MixOut p{matrix(out), static_cast<uint32_t>(a_.y.shape[1]),
                         static_cast<uint32_t>(c_.value_dim), static_cast<float>(c_.norm_epsilon)};
    if (tiled(batch)) {
        const Rows h{rounded_, size_t{T} * p.out.columns * sizeof(uint16_t), p.out.columns, DType::bf16};
        gated_norm_rows(norm, T, rounded_, h.type);
        return multiply(out, h, T, a_.x.as<float>(), true);
    }
    if (!options_.fused_norm) {
        const Rows h{normed_, size_t{T} * p.out.columns * sizeof(float), p.out.columns, DType::f32};
        gated_norm_rows(norm, T, normed_, h.type);
        return multiply_rows(out, h, T, a_.x.as<float>(), true);
    }
    run(recorder_,
        {.kernel = "gdn_out",
         .groups = {ceil_div(blocks_of(p.out), args::kSharedBlocks), T, 1},
         .threads = simds_of_row_ * kSimd,
         .threadgroup = {vector_bytes(p.out.columns), p.out.columns}},
        p,
        Buffers()
            .read(a_.y.data, bytes_of_rows(a_.y, T))
            .read(a_.z.data, bytes_of_rows(a_.z, T))
            .read(norm)
            .weights(out)
            .update(a_.x.data, bytes_of_rows(a_.x, T)));
}

void GpuOps::attn_in(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("attn_in");
    const AttentionWeights& w = here(layer).attn;
    const auto T = static_cast<uint32_t>(batch.rows), D = static_cast<uint32_t>(c_.hidden);
    if (tiled(batch))
        return project(here(layer).input_norm, T, {{&w.q, &a_.qg}, {&w.k, &a_.k}, {&w.v, &a_.v}});
    const args::NormProject p{{matrix(w.q), matrix(w.k), matrix(w.v)},
                              static_cast<float>(c_.norm_epsilon),
                              !options_.fused_norm,
                              0};
    const float* x = normed(here(layer).input_norm, a_.x.as<float>(), T, normed_);
    uint32_t blocks = 0;
    for (const args::Matrix& m : p.matrix) blocks += blocks_of(m);
    run(recorder_,
        {.kernel = "attn_in",
         .groups = {std::min(groups_for(blocks), at_once_), T, 1},
         .threadgroup = {vector_bytes(D)}},
        p,
        Buffers()
            .read(x, bytes_of_rows(a_.x, T))
            .norm(here(layer).input_norm, p.normed)
            .weights(w.q)
            .weights(w.k)
            .weights(w.v)
            .write(a_.qg.data, bytes_of_rows(a_.qg, T))
            .write(a_.k.data, bytes_of_rows(a_.k, T))
            .write(a_.v.data, bytes_of_rows(a_.v, T)));
}

void GpuOps::attn_out(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("attn_out");
    const Linear& out = here(layer).attn.out;
    const auto T = static_cast<uint32_t>(batch.rows);
    const Rows y{a_.y.data, bytes_of_rows(a_.y, T), static_cast<uint32_t>(a_.y.shape[1]), DType::f32};
    if (tiled(batch)) return multiply(out, y, T, a_.x.as<float>(), true);
    multiply_rows(out, y, T, a_.x.as<float>(), true);
}

void GpuOps::read_state(const LayerWeights& layer, const State& state, float* first, float* second) const {
    device_->finish();
    if (!layer.attention) {
        device_->copy(first, state.conv(layer.index),
                      static_cast<size_t>(state.layout().conv) * sizeof(float));
        device_->copy(second, state.delta(layer.index),
                      static_cast<size_t>(state.layout().delta) * sizeof(float));
        return;
    }
    const int64_t Dh = c_.head_dim, length = state.length();
    std::vector<std::byte> keys(state.layout().plane), values(keys.size());
    for (int64_t t = 0; t < length; ++t) {
        if (t % kPageTokens == 0) {
            device_->copy(keys.data(), state.keys(layer.index, t / kPageTokens), keys.size());
            device_->copy(values.data(), state.values(layer.index, t / kPageTokens), values.size());
        }
        for (int64_t h = 0; h < c_.kv_heads; ++h)
            for (int64_t d = 0; d < Dh; ++d) {
                const int64_t slot = t % kPageTokens;
                const auto head = state.layout().head * static_cast<size_t>(h);
                first[(h * length + t) * Dh + d] = kept_at(keys.data() + head, kv_, Dh, slot * Dh + d, slot);
                second[(h * length + t) * Dh + d] =
                    kept_at(values.data() + head, kv_, Dh, slot * Dh + d, slot);
            }
    }
}

}  // namespace lily
