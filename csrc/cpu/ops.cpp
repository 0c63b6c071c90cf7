// CpuOps: its memory, the products that every step is made of, and the steps at the two ends of the model.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <new>
#include <string_view>
#include <utility>

#include "cpu/backend.h"
#include "error.h"

namespace lily {

namespace {

constexpr size_t kHugePage = 2 << 20;
// From here on memory comes from the system and goes back to it. What is smaller is aligned here: glibc's
// aligned_alloc does not find again what it was given back, and states that come and go made a process grow
// without end.
constexpr size_t kMapped = 64 << 10;
constexpr size_t kCacheLine = 64;

}  // namespace

Memory map_memory(size_t bytes) {
    if (bytes < kMapped) {
        auto* base = static_cast<std::byte*>(std::calloc(1, bytes + kCacheLine));
        if (!base) throw std::bad_alloc();
        const auto at = reinterpret_cast<uintptr_t>(base);
        return Memory(base + (kCacheLine - at % kCacheLine), [base](std::byte*) { std::free(base); });
    }
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
    if (bytes >= kHugePage) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return Memory(static_cast<std::byte*>(p), [bytes](std::byte* q) { munmap(q, bytes); });
}

CpuOps::CpuOps(const Weights& weights, int threads, const Packing& packing, int rows, DType kv,
               const Kernels& steps, const Kernels& prompts)
    : c_(weights.config),
      steps_(&steps),
      prompts_(prompts),
      threads_(threads),
      panels_(panels_of(weights, steps, threads_, packing)),
      rows_(rows),
      kv_(kv),
      sample_scratch_(c_.vocab) {
    LILY_CHECK(ModelFilesError, c_.conv_taps <= kMaxTaps, "linear_conv_kernel_dim: wanted at most %d, got %d",
               kMaxTaps, c_.conv_taps);
    allocate_scratch();
    size_arranged(weights);
    scratch_bytes_ += sample_scratch_.bytes();
    for (int i = 0; i < c_.rotary_dim / 2; ++i)
        frequency_.push_back(std::pow(c_.rope_theta, -2.0 * i / c_.rotary_dim));
    for (const LayerWeights& layer : weights.layers) {
        if (layer.attention) continue;
        float* taps_first = scratch(static_cast<int64_t>(c_.conv_taps) * c_.channels());
        for (int i = 0; i < c_.channels(); ++i)
            for (int j = 0; j < c_.conv_taps; ++j)
                taps_first[j * c_.channels() + i] = layer.gdn.conv.as<float>()[i * c_.conv_taps + j];
        conv_.push_back(taps_first);
        for (int j = 0; j < c_.value_heads; ++j)
            rate_.push_back(std::exp(double(layer.gdn.a_log.as<float>()[j])));
    }
    first_of_.resize(static_cast<size_t>(c_.experts) + 1);
    active_.reserve(static_cast<size_t>(c_.experts));
}

float* CpuOps::scratch(int64_t floats) {
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
    owned_.push_back(map_memory(bytes));
    scratch_bytes_ += bytes;
    return reinterpret_cast<float*>(owned_.back().get());
}

void CpuOps::allocate_scratch() {
    const Config& c = c_;
    const int64_t T = rows_;
    constexpr DType f32 = DType::f32, i32 = DType::i32;
#define LILY_FIELD(name, width, type) a_.name = Tensor(scratch(T * (width)), type, {T, width});
    LILY_ACTIVATIONS(LILY_FIELD)
#undef LILY_FIELD
    normed_ = scratch(T * std::max<int64_t>(c.hidden, a_.y.shape[1]));
    mixed_ = scratch(T * c.channels());
    decay_ = scratch(T * c.value_heads);
    beta_ = scratch(T * c.value_heads);
    key_query_ = scratch(T * c.key_heads);
    query_ = scratch(T * c.heads * c.head_dim);
    const int64_t spans = (c.max_positions + kSpanTokens - 1) / kSpanTokens;
    partial_ = scratch(kSplitRows * c.heads * spans * (c.head_dim + 2));
    const int64_t group = c.heads / c.kv_heads;
    thread_floats_ = group * kPageTokens + 2 * kBlockRows * group * (c.head_dim + 2);
    if (prompts_.flash_page) thread_floats_ = std::max(thread_floats_, FlashBlock::floats(c.head_dim));
    thread_floats_ = (thread_floats_ + 15) / 16 * 16;
    thread_ = scratch(threads_.count() * thread_floats_);
    sorted_ = reinterpret_cast<int32_t*>(scratch(T * c.experts_per_token));
}

// Each bit width has one buffer, large enough for every step. moe_down keeps routed and shared rows side by
// side.
void CpuOps::size_arranged(const Weights& weights) {
    std::array<int64_t, 3> floats = {};
    const auto need = [&](const Linear& w, int64_t count) {
        int64_t& size = floats[static_cast<size_t>(w.bits / 4)];
        size = std::max(size, count);
    };
    for_each_matrix(weights, [&](const Linear& w) { need(w, rows_ * arranged_floats(w.columns)); });
    const int64_t routed = rows_ * c_.experts_per_token * arranged_floats(c_.expert_width);
    for (const LayerWeights& layer : weights.layers) {
        need(layer.moe.down, routed);
        need(layer.moe.shared_down, routed + rows_ * arranged_floats(c_.shared_width));
    }
    for (size_t i = 0; i < floats.size(); ++i)
        if (floats[i]) arranged_[i] = scratch(floats[i]);
    if (!prompts_.tile_rows) return;
    int64_t columns = 0;
    for_each_matrix(weights, [&](const Linear& w) { columns = std::max(columns, tiled_columns(w.columns)); });
    const auto numbers = [&](int64_t rows, int64_t width) {
        return reinterpret_cast<uint16_t*>(
            scratch((rows + kTile - 1) / kTile * kTile * tiled_columns(width) / 2));
    };
    tiles_ = numbers(rows_, columns);
    hidden_tiles_ =
        numbers(rows_ * c_.experts_per_token + int64_t{c_.experts} * (kTile - 1), c_.expert_width);
    thread_tiles_ = numbers(int64_t{threads_.count()} * kTileRows, c_.hidden);
    block_of_.resize(static_cast<size_t>(c_.experts));
}

// Rows that are arranged for weights of 4 bits, as tiles.
const uint16_t* CpuOps::tile(const Arranged& rows, int64_t count, int64_t columns) {
    const int64_t blocks = (count + kTile - 1) / kTile;
    threads_.run(blocks, count * columns, [&](int64_t block, int) {
        const float* x[kTile];
        const int M = static_cast<int>(std::min<int64_t>(kTile, count - block * kTile));
        for (int m = 0; m < M; ++m) x[m] = rows.data + (block * kTile + m) * rows.stride;
        kernels_->tile_rows(x, M, columns, tiles_ + block * kTile * tiled_columns(columns));
    });
    return tiles_;
}

Memory CpuOps::allocate(size_t bytes) {
    return map_memory(bytes);
}

void CpuOps::copy(std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}

void CpuOps::begin(const Batch& batch) {
    const bool prompt = batch.segments.size() == 1 && batch.segments[0].choice() >= kPromptRows;
    kernels_ = prompt ? &prompts_ : steps_;
}

// The library stays: a session uses it to its end.
void CpuOps::use_kernels(const std::string& file) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const symbol = library ? dlsym(library, "lily_kernels") : nullptr;
    const auto open = reinterpret_cast<const Kernels* (*)(size_t)>(symbol);
    const Kernels* kernels = open ? open(sizeof(Kernels)) : nullptr;
    LILY_CHECK(DeviceError, kernels && std::string_view(kernels->name) == steps_->name,
               "%s: wanted kernels of %s, compiled from the sources of this core, got %s", file.c_str(),
               steps_->name,
               kernels   ? kernels->name
               : library ? "others"
                         : dlerror());
    steps_ = kernels;
}

void CpuOps::clear_page(std::byte* page, int position) const {
    const auto Dh = static_cast<size_t>(c_.head_dim), size = bytes_of(kv_);
    const size_t rows = Dh * kPageTokens * size, scale = bytes_of_scale(kv_);
    const auto kept = static_cast<size_t>(position);
    const int heads = 2 * c_.attention_layers() * c_.kv_heads;
    for (int plane = 0; plane < heads; ++plane, page += rows + kPageTokens * scale) {
        std::memset(page + rows + kept * scale, 0, (kPageTokens - kept) * scale);
        if (plane / c_.kv_heads % 2 == 1) {  // values (256, Dh)
            std::memset(page + kept * Dh * size, 0, (kPageTokens - kept) * Dh * size);
            continue;
        }
        for (size_t d = 0; d < Dh; ++d)  // keys (Dh, 256)
            std::memset(page + (d * kPageTokens + kept) * size, 0, (kPageTokens - kept) * size);
    }
}

// A few tasks a thread, so that uneven threads even out, of whole panels.
int64_t CpuOps::outputs_of_task(int64_t outputs) const {
    const int64_t even = outputs / (threads_.count() * 4);
    return std::clamp<int64_t>((even + kPackRows - 1) / kPackRows * kPackRows, kPackRows, kMaxOutputs);
}

void CpuOps::multiply(std::initializer_list<Product> products, int rows) {
    struct Job {
        const Product* product;
        int64_t outputs_of_task, tasks;
    };
    std::array<Job, 4> jobs = {};
    int64_t tasks = 0, work = 0;
    size_t count = 0;
    for (const Product& product : products) {
        const int64_t each = outputs_of_task(product.w->rows);
        jobs[count] = {&product, each, (product.w->rows + each - 1) / each};
        tasks += jobs[count++].tasks;
        work += rows * product.w->rows * product.w->columns;
    }
    threads_.run(tasks, work, [&](int64_t task, int) {
        size_t j = 0;
        while (task >= jobs[j].tasks) task -= jobs[j++].tasks;
        const int64_t first = task * jobs[j].outputs_of_task;
        product_rows(*jobs[j].product, first,
                     std::min(jobs[j].outputs_of_task, jobs[j].product->w->rows - first), rows);
    });
}

void CpuOps::product_rows(const Product& p, int64_t first, int64_t outputs, int rows) {
    static constexpr auto kOnes = [] {
        std::array<float, kTileRows> ones{};
        ones.fill(1.f);
        return ones;
    }();
    const auto multiply = [&](const Linear& w, const Arranged& in, int r0, int M, Output out) {
        const float* x[kTileRows];
        for (int m = 0; m < M; ++m) x[m] = in.data + (r0 + m) * in.stride;
        multiply_rows(w, first, outputs, x, in.tiled_from(r0, w.columns), M, out);
    };
    float *out[kTileRows], *up[kPanel];
    float up_tile[kPanel][kMaxOutputs];
    const int most = p.x.tiles && !p.up ? kTileRows : kPanel;
    for (int r0 = 0; r0 < rows; r0 += most) {
        const int M = std::min(most, rows - r0);
        for (int m = 0; m < M; ++m) out[m] = p.out + (r0 + m) * p.stride + first;
        multiply(*p.w, p.x, r0, M, {out, p.add ? kOnes.data() : nullptr});
        if (!p.up) continue;
        for (int m = 0; m < M; ++m) up[m] = up_tile[m];
        multiply(*p.up, p.up_x, r0, M, {up, nullptr});
        for (int m = 0; m < M; ++m) kernels_->swiglu(out[m], up[m], outputs, out[m]);
    }
}

void CpuOps::embed(const Linear& w, const Batch& batch) {
    const auto number = [](const Tensor& t, int64_t i) {
        return float_at(t.data, t.dtype, static_cast<size_t>(i));
    };
    threads_.run(batch.rows, batch.rows * w.columns * kRowWork, [&](int64_t r, int) {
        const int32_t given = batch.tokens[static_cast<size_t>(r)];
        const int64_t token = given == kDrawn ? drawn_ : given;
        float* x = row(a_.x, r);
        for (int64_t k = 0; k < w.columns; ++k) {
            if (w.bits == 0) {
                x[k] = number(w.weight, token * w.columns + k);
                continue;
            }
            const int64_t slots = 32 / w.bits, group = token * (w.columns / 64) + k / 64;
            const auto word = load<uint32_t>(w.weight.data + (token * w.columns + k) / slots * 4);
            const uint32_t q = word >> (k % slots * w.bits) & ((1u << w.bits) - 1);
            x[k] = number(w.scales, group) * static_cast<float>(q) + number(w.biases, group);
        }
    });
}

// By the kernels of a row or few in a prompt too: it is the last row's that are asked for.
void CpuOps::head(const Weights& weights, int first, int rows, float* logits) {
    const Kernels* of_pass = std::exchange(kernels_, steps_);
    const Inputs x = prepare(rows, c_.hidden, {&weights.head}, [&](int64_t r, int) {
        return norm(row(a_.x, first + r), weights.norm, normed_ + r * c_.hidden);
    });
    multiply({{.w = &weights.head, .x = x.of(weights.head), .out = logits, .stride = weights.head.rows}},
             rows);
    kernels_ = of_pass;
}

void CpuOps::sample(std::span<const float> logits, const Sampling& sampling, const Draw& draw) {
    drawn_ = sample_token(logits, sampling, draw, sample_scratch_,
                          [this](auto x, auto& tops) { return find_tops(x, tops); });
}

bool CpuOps::find_tops(std::span<const float> x, std::vector<float>& tops) {
    const auto count = static_cast<int64_t>(x.size()), blocks = (count + kTopBlock - 1) / kTopBlock;
    std::atomic<bool> all_finite = true;
    tops.resize(static_cast<size_t>(blocks));
    threads_.run(blocks, count, [&](int64_t block, int) {
        const int64_t first = block * kTopBlock;
        bool finite = true;
        tops[static_cast<size_t>(block)] =
            kernels_->largest(x.data() + first, std::min<int64_t>(kTopBlock, count - first), finite);
        if (!finite) all_finite = false;
    });
    return all_finite;
}

void CpuOps::read_state(const LayerWeights& layer, const State& state, float* first, float* second) const {
    if (!layer.attention) {
        std::memcpy(first, state.conv(layer.index), static_cast<size_t>(state.layout().conv) * sizeof(float));
        const float* S = state.delta(layer.index);
        const int64_t Dk = c_.key_dim, Dv = c_.value_dim;
        for (int64_t h = 0; h < c_.value_heads; ++h)
            for (int64_t k = 0; k < Dk; ++k)
                for (int64_t v = 0; v < Dv; ++v) second[(h * Dv + v) * Dk + k] = S[(h * Dk + k) * Dv + v];
        return;
    }
    const int64_t Dh = c_.head_dim, length = state.length();
    for (int64_t h = 0; h < c_.kv_heads; ++h)
        for (int64_t t = 0; t < length; ++t)
            for (int64_t d = 0; d < Dh; ++d) {
                const int64_t page = t / kPageTokens, slot = t % kPageTokens;
                const auto head = state.layout().head * static_cast<size_t>(h);
                first[(h * length + t) * Dh + d] =
                    kept_at(state.keys(layer.index, page) + head, kv_, Dh, d * kPageTokens + slot, slot);
                second[(h * length + t) * Dh + d] =
                    kept_at(state.values(layer.index, page) + head, kv_, Dh, slot * Dh + d, slot);
            }
}

}  // namespace lily
