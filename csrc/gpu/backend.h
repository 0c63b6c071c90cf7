// GpuOps: the steps of the model as dispatches. It owns the buffers, chooses kernels, fills their arguments,
// and declares what each dispatch reads and writes; the recorder turns that into barriers.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gpu/recorder.h"
#include "metal/args.h"
#include "ops.h"
#include "options.h"
#include "sample.h"

namespace lily {

class GpuOps final : public Ops {
   public:
    GpuOps(const Weights& weights, const Options& options, int rows, DType kv,
           std::unique_ptr<Device> device);

    const Activations& activations() const override { return a_; }
    std::string name() const override { return device_->name(); }
    int threads() const override { return 1; }
    int recurrent_copies() const override { return 2; }
    size_t scratch_bytes() const override { return scratch_bytes_; }

    Memory allocate(size_t bytes) override { return device_->allocate(bytes); }
    void copy(std::byte* to, const std::byte* from, size_t bytes) override;
    void begin(const Batch&) override;
    void finish() override { recorder_.finish(); }
    void drop_barrier(int64_t number) override { device_->drop_barrier(number); }

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
    int32_t sample(std::span<const float> logits, const Sampling&, const Draw&) override;
    void read_state(const LayerWeights&, const State&, float* first, float* second) const override;

   private:
    float* scratch(int64_t floats);
    void upload(const Weights&);
    Tensor upload(const Tensor&);
    const LayerWeights& here(const LayerWeights& layer) const {
        return layers_[static_cast<size_t>(layer.number)];
    }
    float* row(const Tensor& activation, int64_t r) const {
        return activation.as<float>() + r * activation.shape[1];
    }
    static size_t bytes_of_rows(const Tensor& activation, int64_t rows) {
        return static_cast<size_t>(rows * activation.shape[1]) * bytes_of(activation.dtype);
    }

    // Products of many rows: gpu/matmul.cpp.
    struct Rows {
        const void* data;
        size_t bytes;
        uint32_t stride;  // numbers between rows
        DType type;       // bf16 or f32
    };
    bool tiled(const Batch&) const;
    static uint32_t block_rows(uint32_t T);
    static uint32_t threads_of_block(uint32_t rows);
    void norm_rows(const Tensor& norm, uint32_t T, void* h, DType type);
    void multiply(const Linear&, const Rows& x, uint32_t T, float* y, bool add = false);
    void project(const Tensor& norm, uint32_t T,
                 std::initializer_list<std::pair<const Linear*, const Tensor*>> list);

    // Experts of many rows: gpu/moe.cpp.
    void allocate_experts();
    uint32_t most_tiles(uint32_t T) const;
    void sort_assignments(const LayerWeights&, uint32_t T);
    void moe_route_tiles(const LayerWeights&, const args::MoeRoute&, uint32_t T);
    void moe_up_tiles(const LayerWeights&, const args::MoeUp&, uint32_t T);
    void moe_down_tiles(const LayerWeights&, const args::MoeDown&, uint32_t T);

    int64_t number_of(const Segment&) const;
    const args::Sequence* sequence_of(const Segment& s) const { return sequences_ + number_of(s); }

    // gpu/gdn.cpp
    bool chunks() const;
    void allocate_gdn();
    args::GdnMix gdn_args(const LayerWeights&, const Segment&) const;
    void gdn_step(const LayerWeights&, std::span<const Segment>);
    void gdn_scan(const LayerWeights&, const Segment&);
    void gdn_chunks(const args::GdnMix&, const Segment&, int64_t rows, std::span<const Binding> delta);

    // gpu/attention.cpp
    uint32_t spans_of(int64_t seen) const;
    bool flashes(const Segment&) const;
    const char* kv_name() const;
    int dimensions_of_lane() const;
    void allocate_attention();
    args::Attention attention_args(const LayerWeights&, const Segment&) const;
    std::byte** pages_of(const Segment& s) const { return pages_ + number_of(s) * pages_of_sequence_; }
    size_t bytes_of_tables(size_t sequences) const {
        return sequences * static_cast<size_t>(pages_of_sequence_) * sizeof(std::byte*);
    }
    const float* turns_of(int64_t r) const { return turns_ + r * c_.rotary_dim; }
    size_t bytes_of_turns(int64_t rows) const {
        return static_cast<size_t>(rows * c_.rotary_dim) * sizeof(float);
    }
    void reach_pages(std::vector<Binding>&, int layer, const Segment&, int64_t position, bool written) const;
    void place(const LayerWeights&, const Segment&, bool clears);
    void attend(const LayerWeights&, std::span<const Segment>, int rows);
    void attend_pass(const LayerWeights&, std::span<const Segment>, const args::Attention&);
    void flash(const LayerWeights&, const Segment&);

    static constexpr int kSequences = 64;  // of a batch

    const Config c_;
    const Options options_;
    const DType kv_;
    const int rows_;              // the largest T
    const uint32_t expert_rows_;  // the most rows of an expert that a threadgroup takes
    bool fits_tiles_ = true;      // whether every product of the layers sums over a multiple of 64
    std::unique_ptr<Device> device_;
    Recorder recorder_;

    std::vector<Memory> owned_;
    size_t scratch_bytes_ = 0;
    Activations a_;
    int32_t* tokens_ = nullptr;            // (T)
    float* turns_ = nullptr;               // (T, R / 2, 2): cosine and sine of each row's position
    float* logits_ = nullptr;              // (rows at a time, V)
    args::Sequence* sequences_ = nullptr;  // (kSequences)

    float* prepared_ = nullptr;  // (rows of whole chunks, channels): q, k, v convolved and normed
    float* gates_ = nullptr;     // (rows of whole chunks, Hv, 2): log decay, beta
    float* solved_ = nullptr;    // (2, chunks, Hv, 64, 64): M and P of metal/gdn_chunk.metal
    float* scales_ =
        nullptr;  // (chunks, Hv, 3, 8, 8, 8): diagonals that scale a chunk's rows by their decays

    float* partial_ = nullptr;  // (results_, H, Dh + 2): of spans of positions, a row's together
    int64_t results_ = 0;
    std::byte** pages_ = nullptr;  // (kSequences, pages of the longest context): their addresses

    void* rounded_ = nullptr;      // (T, max(D, Hv Dv)) bf16: rows that are multiplied in tiles
    uint32_t* order_ = nullptr;    // (T K): assignments sorted by expert
    uint32_t* counts_ = nullptr;   // (runs of assignments, E)
    args::Tile* tiles_ = nullptr;  // (tiles)
    uint32_t* grids_ = nullptr;    // (2, 3): threadgroups of moe_up_tiles and of moe_down_tiles
    void* part_ = nullptr;         // (T, K, D) bf16: what the experts give
    float* shared_out_ = nullptr;  // (T, D): what the shared expert gives
    int sorted_layer_ = -1;        // whose assignments order_ has
    int64_t pages_of_sequence_ = 0;

    std::vector<double> frequency_;  // (R / 2)

    Linear embedding_, head_;
    Tensor norm_;
    std::vector<LayerWeights> layers_;  // with every matrix where the device reads it
    SampleScratch sample_scratch_;
};

}  // namespace lily
