// GpuOps: Gated DeltaNet between its projections, as the dispatches of metal/gdn.metal and
// metal/gdn_chunk.metal.
#include <algorithm>

#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

namespace {

constexpr uint32_t kValuesOfStep = 64;  // rows of S that a threadgroup of gdn_mix_step takes: metal/gdn.metal
constexpr uint32_t kSimdsOfScan = 8;   // SIMD-groups of a threadgroup that prepares or scans: metal/gdn.metal
constexpr uint32_t kSimdsOfChunk = 4;  // SIMD-groups of a threadgroup: metal/gdn_chunk.metal
constexpr int64_t kChunk = 64;         // tokens of a chunk of the position grid: metal/gdn_chunk.metal
constexpr uint32_t kTile = 8;          // rows of S that a SIMD-group walks with: metal/gdn_chunk.metal
constexpr int64_t kScales =
    3 * kTile;  // floats of a row in the diagonals that scale a chunk: metal/gdn_chunk.metal

}  // namespace

// Whether tokens may be scanned in chunks: the kernel is made for a few widths of keys.
bool GpuOps::chunks() const {
    return gdn_scan_ == "chunked" && (c_.key_dim == 32 || c_.key_dim == 64 || c_.key_dim == 128) &&
           c_.value_dim % kTile == 0;
}

// What a scan of the longest pass needs: rows of whole chunks, of which the first and the last may be in
// part another pass's.
void GpuOps::allocate_gdn() {
    const Config& c = c_;
    const bool scans = options_.gdn_scan_from > 0 && rows_ >= options_.gdn_scan_from;
    if (c.delta_layers() == 0 || (!scans && options_.fused_gdn)) return;
    const int64_t chunks_of_pass = (kChunk - 1 + rows_ + kChunk - 1) / kChunk, rows = chunks_of_pass * kChunk;
    prepared_ = scratch(rows * c.channels());
    gates_ = scratch(rows * c.value_heads * 2);
    if (!chunks()) return;
    solved_ = scratch(2 * rows * c.value_heads * kChunk);
    scales_ = scratch(rows * c.value_heads * kScales);
}

// A few tokens, of any number of sequences, go through one kernel; many of one sequence through a scan, and
// few as well if that kernel is not wanted.
void GpuOps::gdn_mix(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("gdn_mix");
    const auto many = [&](const Segment& s) {
        return options_.gdn_scan_from > 0 && s.choice() >= options_.gdn_scan_from;
    };
    std::span<const Segment> rest = batch.segments;
    while (!rest.empty()) {
        const auto next = std::find_if(rest.begin(), rest.end(), many);
        const auto few = static_cast<size_t>(next - rest.begin());
        if (few > 0 && options_.fused_gdn) {
            gdn_step(layer, rest.first(few));
            rest = rest.subspan(few);
        } else {
            gdn_scan(layer, rest[0], few > 0 ? "packed" : gdn_scan_);
            rest = rest.subspan(1);
        }
    }
}

args::GdnMix GpuOps::gdn_args(const LayerWeights& layer, const Segment& s) const {
    const StateLayout& layout = s.state->layout();
    return {.key_heads = static_cast<uint32_t>(c_.key_heads),
            .value_heads = static_cast<uint32_t>(c_.value_heads),
            .key_dim = static_cast<uint32_t>(c_.key_dim),
            .value_dim = static_cast<uint32_t>(c_.value_dim),
            .taps = static_cast<uint32_t>(c_.conv_taps),
            .layer = static_cast<uint32_t>(layer.index),
            .state = static_cast<uint32_t>(layout.conv + layout.delta),
            .lead = 0,
            .rows = static_cast<uint32_t>(s.length),
            .y_stride = static_cast<uint32_t>(a_.y.shape[1])};
}

void GpuOps::gdn_step(const LayerWeights& layer, std::span<const Segment> segments) {
    static constexpr std::array<int, 5> kSizes = {4, 8, 16, 32, 64};
    const int columns = variant(kSizes, (c_.key_dim + 3) / 4, "linear_key_head_dim", c_.key_dim);
    const args::GdnMix p = gdn_args(layer, segments[0]);
    std::vector<Binding> reached;
    for (const Segment& s : segments) {
        const size_t bytes = (s.state->layout().conv + s.state->layout().delta) * sizeof(float);
        reached.push_back(Binding::read(s.state->conv(layer.index), bytes));
        reached.push_back(Binding::write(s.state->next_conv(layer.index), bytes));
    }
    const int64_t end = segments.back().row + segments.back().length;
    run(recorder_,
        {.kernel = format("gdn_mix_step_%d", columns),
         .groups = {ceil_div(p.value_dim, kValuesOfStep), p.value_heads,
                    static_cast<uint32_t>(segments.size())},
         .threads = kValuesOfStep * 4,
         .reached = reached},
        p,
        Buffers()
            .read(a_.qkv.data, bytes_of_rows(a_.qkv, end))
            .read(a_.b.data, bytes_of_rows(a_.b, end))
            .read(a_.a.data, bytes_of_rows(a_.a, end))
            .read(here(layer).gdn.conv)
            .read(here(layer).gdn.a_log)
            .read(here(layer).gdn.dt_bias)
            .read(sequence_of(segments[0]), segments.size() * sizeof(args::Sequence))
            .write(a_.y.data, bytes_of_rows(a_.y, end)));
}

void GpuOps::gdn_scan(const LayerWeights& layer, const Segment& s, const std::string& how) {
    args::GdnMix p = gdn_args(layer, s);
    const bool in_chunks = how == "chunked" && chunks();
    if (in_chunks) {
        p.lead = static_cast<uint32_t>(s.position % kChunk);
        p.rows = ceil_div(p.lead + s.length, kChunk) * kChunk;
    }
    const StateLayout& layout = s.state->layout();
    const int64_t rows = p.rows, first = in_chunks ? 0 : s.row;
    float *prepared = prepared_ + first * c_.channels(), *gates = gates_ + first * c_.value_heads * 2;
    const size_t conv_bytes = layout.conv * sizeof(float), delta_bytes = layout.delta * sizeof(float);
    const size_t prepared_bytes = rows * c_.channels() * sizeof(float);
    const size_t gate_bytes = rows * c_.value_heads * 2 * sizeof(float);
    const std::vector<Binding> conv = {Binding::read(s.state->conv(layer.index), conv_bytes),
                                       Binding::write(s.state->next_conv(layer.index), conv_bytes)};
    const std::vector<Binding> delta = {Binding::read(s.state->delta(layer.index), delta_bytes),
                                        Binding::write(s.state->next_delta(layer.index), delta_bytes)};
    run(recorder_,
        {.kernel = "gdn_mix_prepare",
         .groups = {2 * p.key_heads + p.value_heads, ceil_div(rows, kSimdsOfScan), 1},
         .threads = kSimdsOfScan * kSimd,
         .reached = conv},
        p,
        Buffers()
            .read(row(a_.qkv, s.row), bytes_of_rows(a_.qkv, s.length))
            .read(row(a_.b, s.row), bytes_of_rows(a_.b, s.length))
            .read(row(a_.a, s.row), bytes_of_rows(a_.a, s.length))
            .read(here(layer).gdn.conv)
            .read(here(layer).gdn.a_log)
            .read(here(layer).gdn.dt_bias)
            .read(sequence_of(s), sizeof(args::Sequence))
            .update(prepared, prepared_bytes)  // it scales q and k once their lengths are known
            .write(gates, gate_bytes));
    if (in_chunks) return gdn_chunks(p, s, rows, delta);

    static constexpr std::array<int, 4> kRegisters = {1, 2, 4, 8};
    static constexpr std::array<int, 5> kPacked = {2, 4, 8, 16, 32};
    const bool registers = how == "registers";
    const int lanes = registers ? 32 : 8, wanted = (c_.key_dim + lanes - 1) / lanes;
    const int columns = registers ? variant(kRegisters, wanted, "linear_key_head_dim", c_.key_dim)
                                  : variant(kPacked, wanted, "linear_key_head_dim", c_.key_dim);
    const uint32_t values = kSimdsOfScan * kSimd / lanes;  // rows of S of a threadgroup
    run(recorder_,
        {.kernel = format("gdn_mix_%s_%d", registers ? "registers" : "packed", columns),
         .groups = {ceil_div(p.value_dim, values), p.value_heads, 1},
         .threads = kSimdsOfScan * kSimd,
         .reached = delta},
        p,
        Buffers()
            .read(prepared, prepared_bytes)
            .read(gates, gate_bytes)
            .read(sequence_of(s), sizeof(args::Sequence))
            .write(row(a_.y, s.row), bytes_of_rows(a_.y, s.length)));
}

void GpuOps::gdn_chunks(const args::GdnMix& p, const Segment& s, int64_t rows,
                        std::span<const Binding> delta) {
    const int64_t matrices = rows * c_.value_heads * kChunk;  // floats of M, and of P
    const size_t prepared_bytes = rows * c_.channels() * sizeof(float),
                 matrix_bytes = matrices * sizeof(float);
    const size_t gate_bytes = rows * c_.value_heads * 2 * sizeof(float);
    const size_t scale_bytes = rows * c_.value_heads * kScales * sizeof(float);
    run(recorder_,
        {.kernel = "gdn_mix_solve",
         .groups = {static_cast<uint32_t>(rows / kChunk), p.value_heads, 1},
         .threads = kSimdsOfChunk * kSimd},
        p,
        Buffers()
            .read(prepared_, prepared_bytes)
            .read(gates_, gate_bytes)
            .write(solved_, matrix_bytes)
            .write(solved_ + matrices, matrix_bytes)
            .write(scales_, scale_bytes));
    const uint32_t values = kSimdsOfChunk * kTile;
    run(recorder_,
        {.kernel = format("gdn_mix_chunks_%u", p.key_dim / kTile),
         .groups = {ceil_div(p.value_dim, values), p.value_heads, 1},
         .threads = kSimdsOfChunk * kSimd,
         .reached = delta},
        p,
        Buffers()
            .read(prepared_, prepared_bytes)
            .read(solved_, matrix_bytes)
            .read(solved_ + matrices, matrix_bytes)
            .read(scales_, scale_bytes)
            .read(sequence_of(s), sizeof(args::Sequence))
            .write(row(a_.y, s.row), bytes_of_rows(a_.y, s.length)));
}

}  // namespace lily
