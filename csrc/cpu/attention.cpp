// CpuOps: the steps of a full-attention layer. A row attends to pages in order and merges spans of pages in
// order, so its result depends on its position alone: not on the chunk, the batch or the threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/backend.h"

namespace lily {

void CpuOps::attn_in(const LayerWeights& layer, const Batch& batch) {
    const AttentionWeights& w = layer.attn;
    const Inputs x = prepare(batch.rows, c_.hidden, {&w.q, &w.k, &w.v},
                             [&](int64_t r, int) { return normed(r, layer.input_norm); });
    multiply({product(w.q, x, a_.qg), product(w.k, x, a_.k), product(w.v, x, a_.v)}, batch.rows);
}

// RoPE on the first R dimensions of a head; dimension i turns with dimension i + R / 2.
// turn: (R) cosines, then sines, of the position.
void CpuOps::rotate(float* head, const float* turn) const {
    const int half = c_.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * turn[i] - b * turn[half + i];
        head[i + half] = a * turn[half + i] + b * turn[i];
    }
}

// Norms and turns a row's queries and keys, and writes its keys and values into their page.
void CpuOps::place_row(const LayerWeights& layer, const Segment& segment, int t, float* key) {
    const int Dh = c_.head_dim, half = c_.rotary_dim / 2;
    const int64_t r = segment.row + t, position = segment.position + t;
    const float scale = 1.f / std::sqrt(static_cast<float>(Dh));
    float* turn = key + Dh;
    for (int i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) * frequency_[static_cast<size_t>(i)];
        turn[i] = static_cast<float>(std::cos(angle));
        turn[half + i] = static_cast<float>(std::sin(angle));
    }
    for (int h = 0; h < c_.heads; ++h) {
        float* query = query_ + (r * c_.heads + h) * Dh;
        norm(row(a_.qg, r) + static_cast<int64_t>(h) * 2 * Dh, layer.attn.q_norm, query);
        rotate(query, turn);
        for (int d = 0; d < Dh; ++d) query[d] *= scale;
    }
    const int64_t page = position / kPageTokens;
    for (int h = 0; h < c_.kv_heads; ++h) {
        norm(row(a_.k, r) + static_cast<int64_t>(h) * Dh, layer.attn.k_norm, key);
        rotate(key, turn);
        const size_t plane = segment.state->layout().head * static_cast<size_t>(h);
        kernels_->append(key, row(a_.v, r) + static_cast<int64_t>(h) * Dh,
                         static_cast<int>(position % kPageTokens), Dh, kv_,
                         segment.state->keys(layer.index, page) + plane,
                         segment.state->values(layer.index, page) + plane);
    }
}

// Attends rows [first, first + rows) of a segment to the part of one span that each may see.
void CpuOps::attend_span(const Segment& segment, int layer, int kv_head, int first, int rows, int64_t span,
                         float* scores, float* out) {
    const AttentionHeads heads{c_.heads / c_.kv_heads, c_.head_dim, kv_};
    const int64_t result = static_cast<int64_t>(heads.heads) * (heads.head_dim + 2);
    for (int64_t head = 0; head < static_cast<int64_t>(rows) * heads.heads; ++head) {
        float* start = out + head * (heads.head_dim + 2);
        std::fill_n(start, heads.head_dim + 2, 0.f);
        start[0] = -std::numeric_limits<float>::infinity();
    }
    const size_t plane = segment.state->layout().head * static_cast<size_t>(kv_head);
    const int64_t end = segment.position + first + rows;  // of the positions that the last row sees
    for (int64_t page = span * kSpanPages; page < (span + 1) * kSpanPages && page * kPageTokens < end;
         ++page) {
        const std::byte* keys = segment.state->keys(layer, page) + plane;
        const std::byte* values = segment.state->values(layer, page) + plane;
        for (int i = 0; i < rows; ++i) {
            const int64_t seen = segment.position + first + i + 1 - page * kPageTokens;
            if (seen <= 0) continue;
            const int64_t r = segment.row + first + i;
            kernels_->attend(heads, keys, values, std::min<int64_t>(seen, kPageTokens),
                             query_ + (r * c_.heads + kv_head * heads.heads) * c_.head_dim, scores,
                             out + i * result);
        }
    }
}

void CpuOps::finish_row(int64_t r, int kv_head, const float* result) {
    const int group = c_.heads / c_.kv_heads, Dh = c_.head_dim;
    for (int i = 0; i < group; ++i, result += Dh + 2) {
        const int64_t head = static_cast<int64_t>(kv_head) * group + i;
        float* y = row(a_.y, r) + head * Dh;
        for (int d = 0; d < Dh; ++d) y[d] = result[2 + d] / result[1];
        kernels_->sigmoid_gate(y, row(a_.qg, r) + head * 2 * Dh + Dh, Dh);
    }
}

// A task is a block of rows with one key/value head: it reads each page once for all of them.
void CpuOps::attend_rows(const LayerWeights& layer, const Batch& batch) {
    const int group = c_.heads / c_.kv_heads;
    const int64_t result = static_cast<int64_t>(group) * (c_.head_dim + 2);
    for (const Segment& segment : batch.segments) {
        const int blocks = (segment.length + kBlockRows - 1) / kBlockRows;
        const int64_t work =
            2 * segment.length * (segment.position + segment.length) * c_.heads * c_.head_dim;
        threads_.run(static_cast<int64_t>(blocks) * c_.kv_heads, work, [&](int64_t task, int thread) {
            const int kv_head = static_cast<int>(task % c_.kv_heads);
            const int first =
                (blocks - 1 - static_cast<int>(task / c_.kv_heads)) * kBlockRows;  // the longest first
            const int rows = std::min(kBlockRows, segment.length - first);
            float* scores = thread_ + thread * thread_floats_;
            float* whole = scores + static_cast<int64_t>(group) * kPageTokens;
            float* part = whole + kBlockRows * result;
            const int64_t spans = (segment.position + first + rows + kSpanTokens - 1) / kSpanTokens;
            attend_span(segment, layer.index, kv_head, first, rows, 0, scores, whole);
            for (int64_t span = 1; span < spans; ++span) {
                attend_span(segment, layer.index, kv_head, first, rows, span, scores, part);
                for (int i = 0; i < rows; ++i)
                    if (segment.position + first + i >= span * kSpanTokens)
                        kernels_->merge(whole + i * result, part + i * result, group, c_.head_dim);
            }
            for (int i = 0; i < rows; ++i) finish_row(segment.row + first + i, kv_head, whole + i * result);
        });
    }
}

// Whether this pass takes attention in tiles: for all of a prompt's rows or none.
bool CpuOps::flashes() const {
    return kernels_->flash_page && kv_ == DType::bf16 && c_.head_dim % 32 == 0 &&
           c_.heads / c_.kv_heads <= FlashBlock::kRows;
}

// A task is a block of rows with one key/value head: each page becomes tiles once for all of them.
void CpuOps::attend_tiles(const LayerWeights& layer, const Segment& segment) {
    const int group = c_.heads / c_.kv_heads, Dh = c_.head_dim, most = FlashBlock::kRows / group;
    const int blocks = (segment.length + most - 1) / most;
    const int64_t work = 2 * segment.length * (segment.position + segment.length) * c_.heads * Dh;
    threads_.run(static_cast<int64_t>(blocks) * c_.kv_heads, work, [&](int64_t task, int thread) {
        const int kv_head = static_cast<int>(task % c_.kv_heads);
        const int first = (blocks - 1 - static_cast<int>(task / c_.kv_heads)) * most;  // the longest first
        const int rows = std::min(most, segment.length - first);
        FlashBlock block;
        block.lay_out(thread_ + thread * thread_floats_, rows * group, Dh);
        const auto query_row = [&](int m) { return int64_t{segment.row} + first + m / group; };
        const float* query[FlashBlock::kRows];
        for (int m = 0; m < block.rows; ++m)
            query[m] = query_ + (query_row(m) * c_.heads + kv_head * group + m % group) * Dh;
        kernels_->flash_begin(block, query);
        const size_t plane = segment.state->layout().head * static_cast<size_t>(kv_head);
        const int64_t end = segment.position + first + rows;  // of the positions that the last row sees
        for (int64_t page = 0; page * kPageTokens < end; ++page) {
            int64_t seen[FlashBlock::kRows];
            for (int m = 0; m < block.rows; ++m)
                seen[m] = segment.position + first + m / group + 1 - page * kPageTokens;
            kernels_->flash_page(block, segment.state->keys(layer.index, page) + plane,
                                 segment.state->values(layer.index, page) + plane,
                                 std::min<int64_t>(end - page * kPageTokens, kPageTokens), seen);
        }
        for (int m = 0; m < block.rows; ++m) {
            const int64_t r = query_row(m), head = static_cast<int64_t>(kv_head) * group + m % group;
            float* y = row(a_.y, r) + head * Dh;
            for (int d = 0; d < Dh; ++d) y[d] = block.out[int64_t{m} * Dh + d] / block.total[m];
            kernels_->sigmoid_gate(y, row(a_.qg, r) + head * 2 * Dh + Dh, Dh);
        }
    });
}

// A task is one row, one key/value head and one span: a few rows with a long past keep every thread busy.
void CpuOps::attend_spans(const LayerWeights& layer, const Batch& batch, int64_t spans) {
    const int group = c_.heads / c_.kv_heads;
    const int64_t result = static_cast<int64_t>(group) * (c_.head_dim + 2);
    const auto spans_of = [&](int64_t r, const Segment& segment) {
        return (segment.position + r - segment.row + kSpanTokens) / kSpanTokens;
    };
    const int64_t work = 2 * batch.rows * spans * kSpanTokens * c_.heads * c_.head_dim;
    threads_.run(batch.rows * c_.kv_heads * spans, work, [&](int64_t task, int thread) {
        const int64_t span = task % spans, r = task / spans / c_.kv_heads;
        const Segment& segment = batch.segment_of(r);
        if (span >= spans_of(r, segment)) return;
        attend_span(segment, layer.index, static_cast<int>(task / spans % c_.kv_heads),
                    static_cast<int>(r) - segment.row, 1, span, thread_ + thread * thread_floats_,
                    partial_ + task * result);
    });
    threads_.run(batch.rows * c_.kv_heads, batch.rows * spans * c_.heads * c_.head_dim,
                 [&](int64_t task, int) {
                     const int64_t r = task / c_.kv_heads;
                     float* whole = partial_ + task * spans * result;
                     for (int64_t span = 1; span < spans_of(r, batch.segment_of(r)); ++span)
                         kernels_->merge(whole, whole + span * result, group, c_.head_dim);
                     finish_row(r, static_cast<int>(task % c_.kv_heads), whole);
                 });
}

void CpuOps::attn_mix(const LayerWeights& layer, const Batch& batch) {
    const int64_t placed = int64_t{batch.rows} * (c_.heads + 2 * c_.kv_heads) * c_.head_dim;
    threads_.run(batch.rows, placed * kRowWork, [&](int64_t r, int thread) {
        const Segment& segment = batch.segment_of(r);
        place_row(layer, segment, static_cast<int>(r) - segment.row, thread_ + thread * thread_floats_);
    });
    if (flashes()) {
        for (const Segment& segment : batch.segments) attend_tiles(layer, segment);
        return;
    }
    int64_t longest = 0;
    for (const Segment& segment : batch.segments)
        longest = std::max(longest, segment.position + segment.length);
    const int64_t spans = (longest + kSpanTokens - 1) / kSpanTokens;
    if (spans > 1 && batch.rows <= kSplitRows) {
        attend_spans(layer, batch, spans);
    } else {
        attend_rows(layer, batch);
    }
}

void CpuOps::attn_out(const LayerWeights& layer, const Batch& batch) {
    const Linear& out = layer.attn.out;
    const Inputs y = prepare(batch.rows, out.columns, {&out}, [&](int64_t r, int) { return row(a_.y, r); });
    multiply({product(out, y, a_.x, true)}, batch.rows);
}

}  // namespace lily
