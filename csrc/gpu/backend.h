// GpuOps: the steps of the model as dispatches. It owns the buffers, chooses kernels, fills their arguments,
// and declares what each dispatch reads and writes; the recorder turns that into barriers.
#pragma once

#include <memory>
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
    std::vector<Binding> pages_from(int64_t position, const Segment&, const args::Attention&,
                                    bool written) const;
    void place(const AttentionWeights&, const Segment&, const args::Attention&, std::byte** table);
    void attend(const Segment&, const args::Attention&, int first, int rows, std::byte** table);

    const Config c_;
    const Options options_;
    const DType kv_;
    const int rows_;  // the largest T
    std::unique_ptr<Device> device_;
    Recorder recorder_;

    std::vector<Memory> owned_;
    size_t scratch_bytes_ = 0;
    Activations a_;
    int32_t* tokens_ = nullptr;    // (T)
    float* query_ = nullptr;       // (T, H, Dh) normed, turned, scaled
    float* turns_ = nullptr;       // (T, R / 2, 2): cosine and sine of each row's position
    float* partial_ = nullptr;     // (rows of a pass, H, spans of the longest context, Dh + 2)
    float* logits_ = nullptr;      // (rows at a time, V)
    std::byte** pages_ = nullptr;  // (sequences, pages of the longest context): their addresses
    int64_t spans_ = 0;            // of the longest context
    int64_t pages_of_sequence_ = 0;
    std::vector<double> frequency_;  // (R / 2)

    Linear embedding_, head_;
    Tensor norm_;
    std::vector<LayerWeights> layers_;  // with every matrix where the device reads it
    SampleScratch sample_scratch_;
};

}  // namespace lily
