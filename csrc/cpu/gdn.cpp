// CpuOps: the steps of a Gated DeltaNet layer.
#include <algorithm>
#include <cmath>

#include "cpu/backend.h"

namespace lily {

void CpuOps::gdn_in(const LayerWeights& layer, const Batch& batch) {
    const GdnWeights& w = layer.gdn;
    const Inputs x = prepare(batch.rows, c_.hidden, {&w.in_qkv, &w.in_z, &w.in_b, &w.in_a},
                             [&](int64_t r, int) { return normed(r, layer.input_norm); });
    multiply({product(w.in_qkv, x, a_.qkv), product(w.in_z, x, a_.z), product(w.in_b, x, a_.b),
              product(w.in_a, x, a_.a)},
             batch.rows);
}

// Convolution and SiLU of a row, then the norms of q and k.
void CpuOps::convolve(const LayerWeights& layer, const Segment& segment, int t) {
    const int taps = c_.conv_taps, Dk = c_.key_dim, Hk = c_.key_heads;
    const int64_t r = segment.row + t, channels = c_.channels();
    const float* state = segment.state->conv(layer.index);
    const float *rows[kMaxTaps], *weight[kMaxTaps];
    for (int j = 0; j < taps; ++j) {
        const int from = t + j - (taps - 1);  // a row of this segment, or before it one of the state
        rows[j] = from >= 0 ? row(a_.qkv, segment.row + from) : state + (from + taps - 1) * channels;
        weight[j] = conv_[static_cast<size_t>(layer.index)] + j * channels;
    }
    float* mixed = mixed_ + r * channels;
    kernels_->conv(rows, weight, taps, channels, mixed);
    for (int h = 0; h < Hk; ++h) {
        float *q = mixed + h * Dk, *k = mixed + (Hk + h) * Dk;
        kernels_->l2_norm(q, Dk, 1.f / std::sqrt(static_cast<float>(Dk)));
        kernels_->l2_norm(k, Dk, 1.f);
        key_query_[r * Hk + h] = kernels_->dot(k, q, Dk);
    }
}

// decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).
void CpuOps::gates(const LayerWeights& layer, int64_t r) {
    for (int j = 0; j < c_.value_heads; ++j) {
        const double a = double(row(a_.a, r)[j]) + layer.gdn.dt_bias.as<float>()[j], b = row(a_.b, r)[j];
        const double softplus = std::max(a, 0.0) + std::log1p(std::exp(-std::abs(a)));
        const double rate = rate_[static_cast<size_t>(layer.index * c_.value_heads + j)];
        decay_[r * c_.value_heads + j] = static_cast<float>(std::exp(-rate * softplus));
        beta_[r * c_.value_heads + j] = static_cast<float>(1 / (1 + std::exp(-b)));
    }
}

// The state keeps the last C - 1 rows as they were before the convolution.
void CpuOps::keep_conv_state(const LayerWeights& layer, const Segment& segment) {
    const int kept = c_.conv_taps - 1, fresh = std::min(kept, segment.length);
    const int64_t channels = c_.channels();
    float* state = segment.state->conv(layer.index);
    std::memmove(state, state + fresh * channels,
                 static_cast<size_t>((kept - fresh) * channels) * sizeof(float));
    std::memcpy(state + (kept - fresh) * channels, row(a_.qkv, segment.row + segment.length - fresh),
                static_cast<size_t>(fresh * channels) * sizeof(float));
}

void CpuOps::gdn_mix(const LayerWeights& layer, const Batch& batch) {
    threads_.run(batch.rows, int64_t{batch.rows} * c_.channels() * kRowWork, [&](int64_t r, int) {
        const Segment& segment = batch.segment_of(r);
        convolve(layer, segment, static_cast<int>(r) - segment.row);
        gates(layer, r);
    });
    for (const Segment& segment : batch.segments) keep_conv_state(layer, segment);

    // Of a head's values: with Dk = 128 their part of S, 32 KB, stays in the first-level cache.
    constexpr int kLanesOfTask = 64;
    const int blocks = (c_.value_dim + kLanesOfTask - 1) / kLanesOfTask;
    const auto segments = static_cast<int64_t>(batch.segments.size());
    const int64_t channels = c_.channels(), keys = static_cast<int64_t>(c_.key_heads) * c_.key_dim;
    const int64_t work = int64_t{4} * batch.rows * c_.value_heads * c_.key_dim * c_.value_dim;
    threads_.run(segments * c_.value_heads * blocks, work, [&](int64_t task, int) {
        const int first = static_cast<int>(task % blocks) * kLanesOfTask;
        const int64_t head = task / blocks % c_.value_heads,
                      key_head = head / (c_.value_heads / c_.key_heads);
        const Segment& segment = batch.segments[static_cast<size_t>(task / blocks / c_.value_heads)];
        const float* mixed = mixed_ + segment.row * channels;
        const DeltaSpan span{
            .q = mixed + key_head * c_.key_dim,
            .k = mixed + keys + key_head * c_.key_dim,
            .v = mixed + 2 * keys + head * c_.value_dim,
            .decay = decay_ + segment.row * c_.value_heads + head,
            .beta = beta_ + segment.row * c_.value_heads + head,
            .kq = key_query_ + segment.row * c_.key_heads + key_head,
            .y = row(a_.y, segment.row) + head * c_.value_dim,
            .S = segment.state->delta(layer.index) + head * c_.key_dim * c_.value_dim,
            .stride = channels,
            .gate_stride = c_.value_heads,
            .kq_stride = c_.key_heads,
            .y_stride = a_.y.shape[1],
            .tokens = segment.length,
            .key_dim = c_.key_dim,
            .value_dim = c_.value_dim,
        };
        kernels_->delta(span, first, std::min(kLanesOfTask, c_.value_dim - first));
    });
}

void CpuOps::gdn_out(const LayerWeights& layer, const Batch& batch) {
    const GdnWeights& w = layer.gdn;
    const int64_t width = static_cast<int64_t>(c_.value_heads) * c_.value_dim;
    const Inputs y = prepare(batch.rows, width, {&w.out}, [&](int64_t r, int) {
        float* gated = normed_ + r * width;
        for (int64_t head = 0; head < width; head += c_.value_dim)
            norm(row(a_.y, r) + head, w.norm, gated + head);
        kernels_->swiglu(row(a_.z, r), gated, width, gated);
        return gated;
    });
    multiply({product(w.out, y, a_.x, true)}, batch.rows);
}

}  // namespace lily
