// CpuOps: the steps of the model on the CPU. It splits each step into tasks for the pool and calls the
// kernels of the code path chosen for this machine. Float32 throughout, except keys and values.
#pragma once

#include <array>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/panels.h"
#include "cpu/threads.h"
#include "ops.h"
#include "sample.h"

namespace lily {

// Rows of one step's input in the order that the kernels of one bit width read them.
struct Arranged {
    const float* data = nullptr;  // row r at data + r * stride
    int64_t stride = 0;
    const uint16_t* tiles = nullptr;  // where products take them so, the same rows as tiles

    // The tiles from a row on that begins a block of them; null if there are none.
    const uint16_t* tiled_from(int64_t row, int64_t columns) const {
        return tiles ? tiles + row * tiled_columns(columns) : nullptr;
    }
};

// One step's input, arranged for every bit width that its matrices have.
struct Inputs {
    Arranged by_bits[3];  // 0, 4, 8
    const Arranged& of(const Linear& w) const { return by_bits[w.bits / 4]; }
};

constexpr int kPromptRows = 16;  // from which a prompt's kernels are used
constexpr int kMaxTaps = 16;     // of the convolution
constexpr int kBlockRows = 8;    // query rows that share a pass over a page of keys and values
constexpr int kSpanPages = 8;    // pages that one task of split attention takes
constexpr int kSpanTokens = kSpanPages * kPageTokens;
constexpr int kSplitRows = 8;     // rows up to which attention is split over spans
constexpr int kRowWork = 16;      // what norming and arranging a value costs, in multiplications
constexpr int kMaxOutputs = 256;  // outputs of one task: 256 x 2,048 weights of 4 bits fit beside the panel

// y = W x for every row, or silu(W x) * (Up x) when up is set. Output n of row r goes to out + r * stride +
// n.
struct Product {
    const Linear* w = nullptr;
    const Linear* up = nullptr;
    Arranged x = {};
    Arranged up_x = {};
    float* out = nullptr;
    int64_t stride = 0;
    bool add = false;  // to what is there
};

class CpuOps final : public Ops {
   public:
    CpuOps(const Weights& weights, int threads, const Packing& packing, int rows, DType kv,
           const Kernels& steps, const Kernels& prompts);

    const Activations& activations() const override { return a_; }
    std::string name() const override { return std::string("cpu ") + prompts_.name; }
    int threads() const override { return threads_.count(); }
    int recurrent_copies() const override { return 1; }
    size_t packed_bytes() const override { return panels_->bytes; }
    size_t scratch_bytes() const override { return scratch_bytes_; }
    int grid() const override { return steps_ == &prompts_ ? 1 : kPromptRows; }
    std::string state_order() const override { return "cpu"; }
    bool maps_files() const override { return true; }
    void clear_page(std::byte* page, int position) const override;

    Memory allocate(size_t bytes) override;
    void copy(std::byte* to, const std::byte* from, size_t bytes) override;

    void begin(const Batch&) override;
    void finish() override {}
    void nothing() override { threads_.meet(); }
    int64_t stages() const override { return threads_.rounds(); }
    void use_kernels(const std::string& file) override;
    void embed(const Linear&, const Batch&) override;
    void gdn_in(const LayerWeights&, const Batch&) override;
    void gdn_mix(const LayerWeights&, const Batch&) override;
    void gdn_out(const LayerWeights&, const Batch&) override;
    void attn_in(const LayerWeights&, const Batch&) override;
    void attn_mix(const LayerWeights&, const Batch&) override;
    void attn_out(const LayerWeights&, const Batch&) override;
    void moe_route(const LayerWeights&, const Batch&) override;
    void moe_up(const LayerWeights&, const Batch&) override;
    void moe_down(const LayerWeights&, const Batch&) override;
    void head(const Weights&, int row, int rows, float* logits) override;
    void sample(std::span<const float> logits, const Sampling&, const Draw&) override;
    int32_t drawn(int) override { return drawn_; }
    void read_state(const LayerWeights&, const State&, float* first, float* second) const override;

   private:
    float* scratch(int64_t floats);
    void allocate_scratch();
    void size_arranged(const Weights&);

    float* row(const Tensor& activation, int64_t r) const {
        return activation.as<float>() + r * activation.shape[1];
    }
    const float* norm(const float* x, const Tensor& weight, float* y) const {
        kernels_->rms_norm(x, weight.as<float>(), weight.shape[0], static_cast<float>(c_.norm_epsilon), y);
        return y;
    }
    // A row of the residual stream, normed for the projections of a step.
    const float* normed(int64_t r, const Tensor& weight) const {
        return norm(row(a_.x, r), weight, normed_ + r * c_.hidden);
    }

    // Rows that `fill(r, thread)` returns, arranged for each of the matrices, `offset` floats into the
    // buffers.
    template <class Fill>
    Inputs arrange(int64_t rows, int64_t columns, std::initializer_list<const Linear*> matrices,
                   const Fill& fill, int64_t offset = 0) {
        const int64_t stride = arranged_floats(columns);
        Inputs inputs;
        for (const Linear* w : matrices)
            inputs.by_bits[w->bits / 4] = {arranged_[w->bits / 4] + offset, stride, nullptr};
        threads_.run(rows, rows * columns * kRowWork, [&](int64_t r, int thread) {
            const float* x = fill(r, thread);
            for (int i = 0; i < 3; ++i)
                if (inputs.by_bits[i].data)
                    kernels_->arrange(x, columns, 4 * i, arranged_[i] + offset + r * stride);
        });
        return inputs;
    }
    // The same for products with all of the rows.
    template <class Fill>
    Inputs prepare(int64_t rows, int64_t columns, std::initializer_list<const Linear*> matrices,
                   const Fill& fill, int64_t offset = 0) {
        Inputs inputs = arrange(rows, columns, matrices, fill, offset);
        Arranged& four = inputs.by_bits[1];
        if (kernels_->tile_rows && four.data) four.tiles = tile(four, rows, columns);
        return inputs;
    }
    const uint16_t* tile(const Arranged& rows, int64_t count, int64_t columns);
    Product product(const Linear& w, const Inputs& x, const Tensor& out, bool add = false) const {
        return {.w = &w, .x = x.of(w), .out = out.as<float>(), .stride = out.shape[1], .add = add};
    }
    // y = W x of outputs [first, first + count) for M rows: as tiles if they are there, else by x.
    void multiply_rows(const Linear& w, int64_t first, int64_t count, const float* const* x,
                       const uint16_t* tiles, int M, Output out) const {
        if (tiles) return kernels_->product_tiles(w, panels_->at(w), first, count, tiles, M, out);
        kernels_->product(w, panels_->at(w), first, count, x, M, out);
    }
    void multiply(std::initializer_list<Product> products, int rows);
    void product_rows(const Product& product, int64_t first, int64_t outputs, int rows);
    int64_t outputs_of_task(int64_t outputs) const;
    bool find_tops(std::span<const float> x, std::vector<float>& tops);

    void convolve(const LayerWeights&, const Segment&, int t);
    void gates(const LayerWeights&, int64_t r);
    void keep_conv_state(const LayerWeights&, const Segment&);

    void rotate(float* head, const float* turn) const;
    void place_row(const LayerWeights&, const Segment&, int t, float* key);
    void attend_span(const Segment&, int layer, int kv_head, int first, int rows, int64_t span, float* scores,
                     float* out);
    void attend_rows(const LayerWeights&, const Batch&);
    bool flashes() const;
    void attend_tiles(const LayerWeights&, const Segment&);
    void attend_spans(const LayerWeights&, const Batch&, int64_t spans);
    void finish_row(int64_t r, int kv_head, const float* result);

    void choose_experts(int64_t r);
    void sort_by_expert(int rows);
    void tile_hidden(const Arranged& hidden);
    void expert_up(const MoeWeights&, const Inputs&, int expert, int64_t first, int64_t outputs, int thread);
    void expert_down(const MoeWeights&, const Inputs&, int expert, int64_t first, int64_t outputs);
    void shared_down(const MoeWeights&, const Inputs&, int rows, int64_t first, int64_t outputs);

    const Config c_;
    const Kernels* steps_;  // of a row or few
    const Kernels& prompts_;
    const Kernels* kernels_ = steps_;  // of this pass
    Threads threads_;
    const std::shared_ptr<const Panels> panels_;
    const int rows_;  // the largest T
    const DType kv_;

    Activations a_;
    std::vector<Memory> owned_;
    size_t scratch_bytes_ = 0;

    std::array<float*, 3> arranged_ = {};  // by bit width: 0, 4, 8
    uint16_t* tiles_ = nullptr;            // (T, the most columns), as tiles; null where none are used
    uint16_t* hidden_tiles_ = nullptr;     // (T K and what fills up the experts' blocks, F), by expert
    uint16_t* thread_tiles_ = nullptr;     // (threads, kTileRows, D)
    float* normed_ = nullptr;              // (T, D)
    float* mixed_ = nullptr;               // (T, channels) after the convolution: q, k normalised
    float* decay_ = nullptr;               // (T, Hv)
    float* beta_ = nullptr;                // (T, Hv)
    float* key_query_ = nullptr;           // (T, Hk)
    float* query_ = nullptr;               // (T, H, Dh) normalised, rotated, scaled
    float* partial_ = nullptr;             // (kSplitRows, H, spans of the longest context, Dh + 2)
    float* thread_ = nullptr;  // (threads): scores (H / G, 256), then two (kBlockRows, H / G, Dh + 2)
    int64_t thread_floats_ = 0;
    std::vector<const float*> conv_;  // by delta layer: (C, channels), taps first
    std::vector<double> rate_;        // (delta layers, Hv) exp(A_log)
    std::vector<double> frequency_;   // (R / 2)
    int32_t* sorted_ = nullptr;       // (T K) slots t K + k, by expert
    std::vector<int32_t> first_of_;   // (E + 1) into sorted_
    std::vector<int32_t> active_;     // experts with at least one row
    std::vector<int32_t> block_of_;   // (E) the first of its blocks in hidden_tiles_
    SampleScratch sample_scratch_;
    int32_t drawn_ = 0;
};

}  // namespace lily
