// GpuOps: the steps of the model as dispatches. It owns the buffers, chooses kernels, fills their arguments,
// and declares what each dispatch reads and writes; the recorder turns that into barriers.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gpu/recorder.h"
#include "metal/args.h"
#include "ops.h"
#include "options.h"

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
    int grid() const override;
    std::string state_order() const override { return "gpu"; }
    bool maps_files() const override { return false; }
    void clear_page(std::byte* page, int position) const override;

    Memory allocate(size_t bytes) override;
    void copy(std::byte* to, const std::byte* from, size_t bytes) override;
    bool host_reads() const override { return device_->host_reads(); }
    void begin(const Batch&) override;
    void finish() override { recorder_.finish(); }
    std::vector<std::string> compile() override { return device_->compile(); }
    double device_seconds() override { return device_->seconds(); }
    std::optional<size_t> room() const override { return device_->room(); }
    void drop_barrier(int64_t number) override { device_->drop_barrier(number); }
    std::vector<RecordedDispatch> recorded() override { return device_->recorded(); }
    void nothing() override;

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
    bool overlaps() const override { return device_->overlaps() && options_.token_handoff; }
    int32_t drawn(int back) override;
    void read_state(const LayerWeights&, const State&, float* first, float* second) const override;

   private:
    float* scratch(int64_t floats);
    void upload(const Weights&);
    void upload(Tensor&);
    template <class Visit>
    void each_weight(const Visit&);
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
    uint32_t block_rows(uint32_t T, uint32_t outputs) const;
    uint32_t expert_rows(uint32_t T) const;
    uint32_t threads_of_block(uint32_t rows) const;
    uint32_t slab_bytes(uint32_t rows) const { return tiling_.bytes + rows * tiling_.bytes_of_row; }
    void allocate_expanded();
    Linear expanded(const Linear&, int place = 0);
    void norm_rows(const Tensor& norm, const float* x, uint32_t T, void* h, DType type);
    const float* normed(const Tensor& norm, const float* x, uint32_t T, float* h);
    void gated_norm_rows(const Tensor& norm, uint32_t T, void* h, DType type);
    void multiply(const Linear&, const Rows& x, uint32_t T, float* y, bool add = false);
    void project(const Tensor& norm, uint32_t T,
                 std::initializer_list<std::pair<const Linear*, const Tensor*>> list);

    void multiply_rows(const Linear&, const Rows& x, uint32_t T, float* y, bool add = false);

    // Experts of many rows, and of a few with a dispatch for each step: gpu/moe.cpp.
    void allocate_experts();
    uint32_t most_tiles(uint32_t T) const;
    int64_t most_experts(uint32_t T) const {
        return std::min<int64_t>(c_.experts, int64_t{T} * c_.experts_per_token);
    }
    void sort_assignments(const LayerWeights&, uint32_t T);
    void sort_on_host(const args::MoeSort&);
    void choose_experts(uint32_t T, uint32_t rounded);
    void multiply_experts(const Linear&, uint32_t rows, const Tensor& x, bool shared, uint32_t T, void* y);
    void swiglu(const void* up, const Tensor& gate, uint32_t T);
    void combine(uint32_t T, DType type);
    void moe_route_steps(const LayerWeights&, uint32_t T);
    void moe_up_steps(const LayerWeights&, uint32_t T);
    void moe_down_steps(const LayerWeights&, uint32_t T);
    void moe_route_tiles(const LayerWeights&, const args::MoeRoute&, uint32_t T);
    void moe_up_tiles(const LayerWeights&, const args::MoeUp&, uint32_t T);
    void moe_down_tiles(const LayerWeights&, const args::MoeDown&, uint32_t T);

    int64_t number_of(const Segment&) const;
    const args::Sequence* sequence_of(const Segment& s) const { return slot_->sequences + number_of(s); }

    // gpu/gdn.cpp
    bool chunks() const;
    void allocate_gdn();
    args::GdnMix gdn_args(const LayerWeights&, const Segment&) const;
    void gdn_step(const LayerWeights&, std::span<const Segment>);
    void gdn_scan(const LayerWeights&, const Segment&, const std::string& how);
    void gdn_chunks(const args::GdnMix&, const Segment&, int64_t rows, std::span<const Binding> delta);

    // gpu/attention.cpp
    uint32_t spans_of(int64_t seen) const;
    bool flashes(const Segment&) const;
    const char* kv_name() const;
    int dimensions_of_lane() const;
    void allocate_attention();
    args::Attention attention_args(const LayerWeights&, const Segment&) const;
    Binding tables(std::span<const Segment>) const;
    const float* turns_of(int64_t r) const { return slot_->turns + r * c_.rotary_dim; }
    size_t bytes_of_turns(int64_t rows) const {
        return static_cast<size_t>(rows * c_.rotary_dim) * sizeof(float);
    }
    void reach_pages(std::vector<Binding>&, int layer, const Segment&, int64_t begin, int64_t end,
                     bool written) const;
    void place(const LayerWeights&, const Segment&, bool clears);
    void turn(const LayerWeights&, const Segment&);
    void attend(const LayerWeights&, std::span<const Segment>, int rows, bool appends);
    void attend_pass(const LayerWeights&, std::span<const Segment>, const args::Attention&);
    void flash(const LayerWeights&, const Segment&);

    // gpu/sample.cpp
    void allocate_draw(int64_t vocab);
    uint32_t list_edits(const Sampling&, const Draw&);
    const float* adjust(std::span<const float> logits, const Sampling&, const Draw&);

    static constexpr int kSequences = 64;  // of a batch

    const Config c_;
    const Options options_;
    const DType kv_;
    const int rows_;          // the largest T
    bool fits_tiles_ = true;  // whether every product of the layers sums over a multiple of 64
    std::unique_ptr<Device> device_;
    const uint32_t at_once_;       // threadgroups that a kernel which loops has, at most
    const uint32_t simds_of_row_;  // SIMD-groups of a threadgroup whose SIMD-groups share rows
    const Tiling tiling_;
    const std::string gdn_scan_;      // the option, or what the device does by itself
    const char* const tile_kernels_;  // what the names of kernels that multiply in tiles end with
    Recorder recorder_;

    std::vector<Memory> owned_;
    size_t scratch_bytes_ = 0;
    Activations a_;
    // What the host writes for a pass, and the token that the pass ends in. There are two, taken in turns, so
    // that a pass can be prepared while the one before it runs.
    struct Slot {
        int32_t* tokens = nullptr;            // (T)
        float* turns = nullptr;               // (T, R / 2, 2): cosine and sine of each row's position
        args::Sequence* sequences = nullptr;  // (kSequences)
        std::byte** pages = nullptr;          // (kSequences, pages of the longest context): their addresses
        int32_t* token = nullptr;             // (1): the one drawn
        std::span<const float> drawn_of;      // what it was drawn from
        uint64_t number = 0;                  // of what was committed with it last
    };
    std::array<Slot, 2> slots_;
    Slot* slot_ = slots_.data();   // of the pass
    Slot* drawn_ = slots_.data();  // of the last draw
    Slot& other(const Slot* slot) { return slots_[slot == slots_.data()]; }
    std::array<args::Sequence, kSequences> sequences_ = {};  // of the pass, as the host finds them

    float* prepared_ = nullptr;  // (rows of whole chunks, channels): q, k, v convolved and normed
    float* gates_ = nullptr;     // (rows of whole chunks, Hv, 2): log decay, beta
    float* solved_ = nullptr;    // (2, chunks, Hv, 64, 64): M and P of metal/gdn_chunk.metal
    float* scales_ =
        nullptr;  // (chunks, Hv, 3, 8, 8, 8): diagonals that scale a chunk's rows by their decays

    float* partial_ = nullptr;  // (results_, H, Dh + 2): of spans of positions, a row's together
    int64_t results_ = 0;

    void* expanded_[2] = {};       // the largest matrix each, bf16: if weights are expanded before products
    void* rounded_ = nullptr;      // (T, max(D, Hv Dv)) bf16: rows that are multiplied in tiles
    float* normed_ = nullptr;      // (T, max(D, Hv Dv)): rows that are normed before products row by row
    float* up_ = nullptr;          // (T, max(K F, Fs)): products with Up, if SwiGLU comes after them
    uint32_t* order_ = nullptr;    // (T K): assignments sorted by expert
    uint32_t* counts_ = nullptr;   // (runs of assignments, E)
    args::Tile* tiles_ = nullptr;  // (tiles)
    uint32_t* grids_ = nullptr;    // (2, 3): threadgroups of moe_up_tiles and of moe_down_tiles
    void* part_ = nullptr;         // (T, K, D) bf16, or f32 if moe_down is not one: what the experts give
    float* shared_out_ = nullptr;  // (T, D): what the shared expert gives
    int sorted_layer_ = -1;        // whose assignments order_ has
    int64_t pages_of_sequence_ = 0;

    std::vector<double> frequency_;  // (R / 2)

    Linear embedding_, head_;
    Tensor norm_;
    std::vector<LayerWeights> layers_;  // with every matrix where the device reads it

    int64_t drawable_ = 0;         // V that there is room for
    uint32_t* best_ = nullptr;     // (kLogitRows, V / 32): of each block of logits, as metal/logits.h has it
    float* adjusted_ = nullptr;    // (V)
    args::Edit* edits_ = nullptr;  // (V)
    std::vector<args::Edit> listed_;  // the same, as the host writes them
    uint32_t* allowed_ = nullptr;     // (V / 32)
    std::atomic<const float*> best_of_ =
        nullptr;                      // the logits whose best are in best_, if they are the head's last row
    bool embedded_ = false;           // whether x begins with the row of the one drawn
    const int32_t* taken_ = nullptr;  // (T): where the pass's tokens are, its slot's or drawn before
};

}  // namespace lily
