// CpuOps: the sparse mixture of experts. Rows are grouped by expert, so that each expert's weights are read
// once; a row's experts are added in the order of their ids, whatever else is in the batch.
#include <algorithm>
#include <cmath>

#include "cpu/backend.h"

namespace lily {

void CpuOps::moe_route(const LayerWeights& layer, const Batch& batch) {
    const MoeWeights& w = layer.moe;
    const Inputs h =
        prepare(batch.rows, c_.hidden, {&w.router, &w.shared_expert_gate, &w.shared_gate, &w.shared_up},
                [&](int64_t r, int) { return norm(row(a_.x, r), layer.post_norm, row(a_.h, r)); });
    Product shared = product(w.shared_gate, h, a_.shared);
    shared.up = &w.shared_up;
    shared.up_x = h.of(w.shared_up);
    multiply({product(w.router, h, a_.router), product(w.shared_expert_gate, h, a_.shared_gate), shared},
             batch.rows);
}

// The K largest router logits, ties to the lower id, and the softmax over them: the softmax over all,
// renormalised.
void CpuOps::choose_experts(int64_t r) {
    const float* logits = row(a_.router, r);
    const int K = c_.experts_per_token;
    int32_t* expert = a_.expert.as<int32_t>() + r * K;
    float* weight = row(a_.weight, r);
    int found = 0;
    for (int e = 0; e < c_.experts; ++e) {
        int place = found;
        while (place > 0 && logits[e] > logits[expert[place - 1]]) --place;
        if (place == K) continue;
        found = std::min(found + 1, K);
        for (int i = found - 1; i > place; --i) expert[i] = expert[i - 1];
        expert[place] = e;
    }
    double total = 0;
    for (int i = 0; i < K; ++i) total += std::exp(double(logits[expert[i]]) - logits[expert[0]]);
    for (int i = 0; i < K; ++i)
        weight[i] = static_cast<float>(std::exp(double(logits[expert[i]]) - logits[expert[0]]) / total);
}

// A stable counting sort of the slots t K + k by expert.
void CpuOps::sort_by_expert(int rows) {
    const int32_t* expert = a_.expert.as<int32_t>();
    const int64_t slots = static_cast<int64_t>(rows) * c_.experts_per_token;
    std::fill(first_of_.begin(), first_of_.end(), 0);
    for (int64_t slot = 0; slot < slots; ++slot) ++first_of_[static_cast<size_t>(expert[slot]) + 1];
    active_.clear();
    for (int e = 0; e < c_.experts; ++e) {
        const auto next = static_cast<size_t>(e) + 1;
        if (first_of_[next]) active_.push_back(e);
        first_of_[next] += first_of_[next - 1];
    }
    for (int64_t slot = slots - 1; slot >= 0;
         --slot)  // from the back, so that each end moves down to its start
        sorted_[--first_of_[static_cast<size_t>(expert[slot]) + 1]] = static_cast<int32_t>(slot);
    for (size_t e = 0; e + 1 < first_of_.size(); ++e) first_of_[e] = first_of_[e + 1];
    first_of_.back() = static_cast<int32_t>(slots);
}

void CpuOps::expert_up(const MoeWeights& w, const Inputs& h, int expert, int64_t first, int64_t outputs,
                       int thread) {
    const int32_t begin = first_of_[static_cast<size_t>(expert)],
                  end = first_of_[static_cast<size_t>(expert) + 1];
    const int64_t K = c_.experts_per_token, F = c_.expert_width;
    const Arranged gate_x = h.of(w.gate), up_x = h.of(w.up);
    const bool tiled = kernels_->tile_rows && w.gate.bits == 4 && w.up.bits == 4;
    const int most = tiled ? kTileRows : kPanel;
    const float *x[kTileRows], *u[kTileRows];
    float *out[kTileRows], *up[kTileRows];
    float up_outputs[kPanel * kMaxOutputs];
    uint16_t* tiles = tiled ? thread_tiles_ + thread * kTileRows * tiled_columns(c_.hidden) : nullptr;
    for (int32_t i = begin; i < end; i += most) {
        const int M = std::min(most, end - i);
        for (int m = 0; m < M; ++m) {
            const int64_t row = sorted_[i + m] / K;
            x[m] = gate_x.data + row * gate_x.stride;
            u[m] = up_x.data + row * up_x.stride;
        }
        if (tiled) kernels_->tile_rows(x, M, c_.hidden, tiles);
        const int64_t at_once = M <= kPanel ? kMaxOutputs : kPanel * kMaxOutputs / kTileRows;
        for (int64_t o = first; o < first + outputs; o += at_once) {
            const int64_t count = std::min(at_once, first + outputs - o);
            for (int m = 0; m < M; ++m) {
                out[m] = a_.hidden.as<float>() + sorted_[i + m] * F + o;
                up[m] = up_outputs + m * at_once;
            }
            multiply_rows(w.gate, expert * F + o, count, x, tiles, M, {out, nullptr});
            multiply_rows(w.up, expert * F + o, count, u, tiles, M, {up, nullptr});
            for (int m = 0; m < M; ++m) kernels_->swiglu(out[m], up[m], count, out[m]);
        }
    }
}

void CpuOps::moe_up(const LayerWeights& layer, const Batch& batch) {
    const MoeWeights& w = layer.moe;
    const Inputs h = arrange(batch.rows, c_.hidden, {&w.gate, &w.up}, [&](int64_t r, int) {
        choose_experts(r);
        return row(a_.h, r);
    });
    sort_by_expert(batch.rows);
    // Of an expert's outputs; all of them if its rows are made into tiles for it.
    const int64_t few = batch.rows > kPanel ? 128 : 64;
    const int64_t each = std::min<int64_t>(c_.expert_width, kernels_->tile_rows ? c_.expert_width : few);
    const int64_t blocks = (c_.expert_width + each - 1) / each;
    const int64_t work = int64_t{2} * batch.rows * c_.experts_per_token * c_.expert_width * c_.hidden;
    threads_.run(static_cast<int64_t>(active_.size()) * blocks, work, [&](int64_t task, int thread) {
        const int64_t first = task % blocks * each;
        expert_up(w, h, active_[static_cast<size_t>(task / blocks)], first,
                  std::min(each, c_.expert_width - first), thread);
    });
}

void CpuOps::expert_down(const MoeWeights& w, const Inputs& hidden, int expert, int64_t first,
                         int64_t outputs) {
    const int32_t begin = first_of_[static_cast<size_t>(expert)],
                  end = first_of_[static_cast<size_t>(expert) + 1];
    const Arranged in = hidden.of(w.down);
    const float* x[kTileRows];
    float *out[kTileRows], scale[kTileRows];
    const int most = in.tiles ? kTileRows : kPanel;
    const int64_t at = static_cast<int64_t>(expert) * c_.hidden + first;
    for (int32_t i = begin; i < end; i += most) {
        const int M = std::min(most, end - i);
        for (int m = 0; m < M; ++m) {
            const int64_t slot = sorted_[i + m];
            x[m] = in.data + slot * in.stride;
            out[m] = row(a_.x, slot / c_.experts_per_token) + first;
            scale[m] = a_.weight.as<float>()[slot];
        }
        const int64_t tiled = in.tiles ? block_of_[static_cast<size_t>(expert)] * kTile + i - begin : 0;
        multiply_rows(w.down, at, outputs, x, in.tiled_from(tiled, w.down.columns), M, {out, scale});
    }
}

// The rows of every expert as tiles, its blocks behind those of the expert before.
void CpuOps::tile_hidden(const Arranged& hidden) {
    int32_t blocks = 0;
    for (int expert : active_) {
        const auto e = static_cast<size_t>(expert);
        block_of_[e] = blocks;
        blocks += (first_of_[e + 1] - first_of_[e] + kTile - 1) / kTile;
    }
    const int64_t F = c_.expert_width;
    threads_.run(static_cast<int64_t>(active_.size()), blocks * kTile * F, [&](int64_t task, int) {
        const auto e = static_cast<size_t>(active_[static_cast<size_t>(task)]);
        uint16_t* tiles = hidden_tiles_ + block_of_[e] * kTile * tiled_columns(F);
        for (int32_t i = first_of_[e]; i < first_of_[e + 1]; i += kTile, tiles += kTile * tiled_columns(F)) {
            const float* x[kTile];
            const int M = std::min(kTile, first_of_[e + 1] - i);
            for (int m = 0; m < M; ++m) x[m] = hidden.data + sorted_[i + m] * hidden.stride;
            kernels_->tile_rows(x, M, F, tiles);
        }
    });
}

void CpuOps::shared_down(const MoeWeights& w, const Inputs& shared, int rows, int64_t first,
                         int64_t outputs) {
    const Arranged in = shared.of(w.shared_down);
    const float* x[kTileRows];
    float *out[kTileRows], scale[kTileRows];
    const int most = in.tiles ? kTileRows : kPanel;
    for (int r = 0; r < rows; r += most) {
        const int M = std::min(most, rows - r);
        for (int m = 0; m < M; ++m) {
            x[m] = in.data + (r + m) * in.stride;
            out[m] = row(a_.x, r + m) + first;
            scale[m] = static_cast<float>(1 / (1 + std::exp(-double(*row(a_.shared_gate, r + m)))));
        }
        multiply_rows(w.shared_down, first, outputs, x, in.tiled_from(r, w.shared_down.columns), M,
                      {out, scale});
    }
}

// A task owns some outputs of every row, so the experts add into them one after another.
void CpuOps::moe_down(const LayerWeights& layer, const Batch& batch) {
    const MoeWeights& w = layer.moe;
    const int64_t slots = static_cast<int64_t>(batch.rows) * c_.experts_per_token;
    sort_by_expert(batch.rows);
    Inputs hidden = arrange(slots, c_.expert_width, {&w.down}, [&](int64_t slot, int) {
        return a_.hidden.as<float>() + slot * c_.expert_width;
    });
    if (Arranged& four = hidden.by_bits[1]; kernels_->tile_rows && four.data) {
        tile_hidden(four);
        four.tiles = hidden_tiles_;
    }
    const Inputs shared = prepare(
        batch.rows, c_.shared_width, {&w.shared_down}, [&](int64_t r, int) { return row(a_.shared, r); },
        slots * arranged_floats(c_.expert_width));
    const int64_t each = outputs_of_task(c_.hidden);
    const int64_t work = (slots * c_.expert_width + int64_t{batch.rows} * c_.shared_width) * c_.hidden;
    threads_.run((c_.hidden + each - 1) / each, work, [&](int64_t task, int) {
        const int64_t first = task * each, outputs = std::min(each, c_.hidden - first);
        for (int expert : active_) expert_down(w, hidden, expert, first, outputs);
        shared_down(w, shared, batch.rows, first, outputs);
    });
}

}  // namespace lily
