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

void CpuOps::expert_up(const MoeWeights& w, const Inputs& h, int expert, int64_t first, int64_t outputs) {
    const int32_t begin = first_of_[static_cast<size_t>(expert)],
                  end = first_of_[static_cast<size_t>(expert) + 1];
    const int64_t K = c_.experts_per_token, F = c_.expert_width;
    const Arranged gate_x = h.of(w.gate), up_x = h.of(w.up);
    const float *x[kPanel], *u[kPanel];
    float *out[kPanel], *up[kPanel];
    float up_tile[kPanel][kMaxOutputs];
    for (int32_t i = begin; i < end; i += kPanel) {
        const int M = std::min(kPanel, end - i);
        for (int m = 0; m < M; ++m) {
            const int64_t slot = sorted_[i + m];
            x[m] = gate_x.data + slot / K * gate_x.stride;
            u[m] = up_x.data + slot / K * up_x.stride;
            out[m] = a_.hidden.as<float>() + slot * F + first;
            up[m] = up_tile[m];
        }
        kernels_->product(w.gate, panels_->at(w.gate), expert * F + first, outputs, x, M, {out, nullptr});
        kernels_->product(w.up, panels_->at(w.up), expert * F + first, outputs, u, M, {up, nullptr});
        for (int m = 0; m < M; ++m) kernels_->swiglu(out[m], up[m], outputs, out[m]);
    }
}

void CpuOps::moe_up(const LayerWeights& layer, const Batch& batch) {
    const MoeWeights& w = layer.moe;
    const Inputs h = prepare(batch.rows, c_.hidden, {&w.gate, &w.up}, [&](int64_t r, int) {
        choose_experts(r);
        return row(a_.h, r);
    });
    sort_by_expert(batch.rows);
    const int64_t each = std::min<int64_t>(c_.expert_width, batch.rows > kPanel ? 128 : 64);
    const int64_t blocks = (c_.expert_width + each - 1) / each;
    const int64_t work = int64_t{2} * batch.rows * c_.experts_per_token * c_.expert_width * c_.hidden;
    threads_.run(static_cast<int64_t>(active_.size()) * blocks, work, [&](int64_t task, int) {
        const int64_t first = task % blocks * each;
        expert_up(w, h, active_[static_cast<size_t>(task / blocks)], first,
                  std::min(each, c_.expert_width - first));
    });
}

void CpuOps::expert_down(const MoeWeights& w, const Inputs& hidden, int expert, int64_t first,
                         int64_t outputs) {
    const int32_t begin = first_of_[static_cast<size_t>(expert)],
                  end = first_of_[static_cast<size_t>(expert) + 1];
    const Arranged in = hidden.of(w.down);
    const float* x[kPanel];
    float *out[kPanel], scale[kPanel];
    for (int32_t i = begin; i < end; i += kPanel) {
        const int M = std::min(kPanel, end - i);
        for (int m = 0; m < M; ++m) {
            const int64_t slot = sorted_[i + m];
            x[m] = in.data + slot * in.stride;
            out[m] = row(a_.x, slot / c_.experts_per_token) + first;
            scale[m] = a_.weight.as<float>()[slot];
        }
        kernels_->product(w.down, panels_->at(w.down), static_cast<int64_t>(expert) * c_.hidden + first,
                          outputs, x, M, {out, scale});
    }
}

void CpuOps::shared_down(const MoeWeights& w, const Inputs& shared, int rows, int64_t first,
                         int64_t outputs) {
    const Arranged in = shared.of(w.shared_down);
    const float* x[kPanel];
    float *out[kPanel], scale[kPanel];
    for (int r = 0; r < rows; r += kPanel) {
        const int M = std::min(kPanel, rows - r);
        for (int m = 0; m < M; ++m) {
            x[m] = in.data + (r + m) * in.stride;
            out[m] = row(a_.x, r + m) + first;
            scale[m] = static_cast<float>(1 / (1 + std::exp(-double(*row(a_.shared_gate, r + m)))));
        }
        kernels_->product(w.shared_down, panels_->at(w.shared_down), first, outputs, x, M, {out, scale});
    }
}

// A task owns some outputs of every row, so the experts add into them one after another.
void CpuOps::moe_down(const LayerWeights& layer, const Batch& batch) {
    const MoeWeights& w = layer.moe;
    const int64_t slots = static_cast<int64_t>(batch.rows) * c_.experts_per_token;
    sort_by_expert(batch.rows);
    const Inputs hidden = prepare(slots, c_.expert_width, {&w.down}, [&](int64_t slot, int) {
        return a_.hidden.as<float>() + slot * c_.expert_width;
    });
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
