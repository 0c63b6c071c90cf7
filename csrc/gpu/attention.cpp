// GpuOps: attention between its projections, as the dispatches of metal/attention.metal.
#include <algorithm>

#include "gpu/backend.h"
#include "gpu/launch.h"

namespace lily {

namespace {

constexpr uint32_t kHeadsOfLoad = 8;   // query heads that share a load of keys and values
constexpr int64_t kRowsOfResults = 4;  // rows of the longest context whose spans' results fit at a time
constexpr uint32_t kMergeWidth = 64;   // dimensions that a threadgroup merges: metal/attention.metal
constexpr uint32_t kRowsOfTile = 32;   // rows times heads of a tile of queries: metal/flash.metal
constexpr int64_t kBlock = 64;         // positions of a tile of keys: metal/flash.metal

}  // namespace

// The spans that a row which sees `seen` positions falls into.
uint32_t GpuOps::spans_of(int64_t seen) const {
    const uint32_t span =
        args::span_of(static_cast<uint32_t>(seen), static_cast<uint32_t>(options_.fixed_blocks_from));
    return ceil_div(seen, span);
}

// Room for the results of the most spans that any row has: with growing spans that need not be the longest
// context.
void GpuOps::allocate_attention() {
    const Config& c = c_;
    if (c.attention_layers() == 0) return;
    pages_of_sequence_ = (c.max_positions + kPageTokens - 1) / kPageTokens;
    for (Slot& slot : slots_)
        slot.pages = reinterpret_cast<std::byte**>(scratch(2 * kSequences * pages_of_sequence_));
    results_ = kRowsOfResults * std::max<int64_t>(args::kMostSpans, spans_of(c.max_positions));
    partial_ = scratch(results_ * c.heads * (c.head_dim + 2));
}

args::Attention GpuOps::attention_args(const LayerWeights& layer, const Segment& s) const {
    return {.tokens = static_cast<uint32_t>(s.length),
            .before = 0,
            .appends = 0,
            .cleared = 0,
            .heads = static_cast<uint32_t>(c_.heads),
            .kv_heads = static_cast<uint32_t>(c_.kv_heads),
            .head_dim = static_cast<uint32_t>(c_.head_dim),
            .rotary_dim = static_cast<uint32_t>(c_.rotary_dim),
            .epsilon = static_cast<float>(c_.norm_epsilon),
            .layer = static_cast<uint32_t>(layer.index),
            .plane = static_cast<uint32_t>(s.state->layout().plane / bytes_of(kv_)),
            .pages = static_cast<uint32_t>(pages_of_sequence_),
            .turned = !options_.fused_attention,
            .spans = 0,
            .fixed_from = static_cast<uint32_t>(options_.fixed_blocks_from),
            .y_stride = static_cast<uint32_t>(a_.y.shape[1])};
}

// Several rows of a sequence are written into their pages first; a row that is alone in its sequence is
// appended by the dispatch that attends, unless that is not to do it all.
void GpuOps::attn_mix(const LayerWeights& layer, const Batch& batch) {
    recorder_.begin("attn_mix");
    const std::span<const Segment> segments = batch.segments;
    if (options_.fused_attention && std::all_of(segments.begin(), segments.end(), [&](const Segment& s) {
            return s.length == 1 && !flashes(s);
        }))
        return attend(layer, segments, batch.rows, true);
    for (const Segment& s : segments) {
        const bool tiled = flashes(s);
        place(layer, s, tiled);
        if (tiled) {
            flash(layer, s);
        } else {
            if (!options_.fused_attention) turn(layer, s);
            attend(layer, {&s, 1}, s.length, false);
        }
    }
}

// Whether a segment's attention goes through matrix tiles. They round keys and values to bf16, so who
// keeps them in f32 gets the kernels that do not; and they take heads of a few widths.
bool GpuOps::flashes(const Segment& s) const {
    return options_.flash_from > 0 && s.choice() >= options_.flash_from && kv_ == DType::bf16 &&
           (c_.head_dim == 64 || c_.head_dim == 128 || c_.head_dim == 256);
}

// Keys and values of a layer in the pages that hold positions [begin, end), which it reads or writes.
void GpuOps::reach_pages(std::vector<Binding>& reached, int layer, const Segment& s, int64_t begin,
                         int64_t end, bool written) const {
    const size_t plane = s.state->layout().plane;
    for (int64_t page = begin / kPageTokens; page * kPageTokens < s.position + s.length; ++page) {
        const int64_t first = std::max(begin, page * kPageTokens),
                      last = std::min(end, (page + 1) * kPageTokens);
        const size_t bytes =
            2 * plane / kPageTokens * static_cast<size_t>(std::max<int64_t>(0, last - first));
        std::byte* keys = s.state->keys(layer, page);
        reached.push_back(written ? Binding::write(keys, 2 * plane).writing(bytes)
                                  : Binding::read(keys, 2 * plane).reading(bytes));
    }
}

// The page tables of segments that follow each other in a batch: whole, but read as far as there are pages.
Binding GpuOps::tables(std::span<const Segment> segments) const {
    size_t pages = 0;
    for (const Segment& s : segments)
        pages += static_cast<size_t>((s.position + s.length + kPageTokens - 1) / kPageTokens);
    const size_t bytes = segments.size() * static_cast<size_t>(pages_of_sequence_) * sizeof(std::byte*);
    return Binding::read(slot_->pages + number_of(segments[0]) * pages_of_sequence_, bytes)
        .reading(pages * sizeof(std::byte*));
}

const char* GpuOps::kv_name() const {
    return kv_ == DType::bf16 ? "bf16" : kv_ == DType::i8 ? "int8" : "f32";
}

// Consecutive dimensions of a head that a lane takes.
int GpuOps::dimensions_of_lane() const {
    static constexpr std::array<int, 4> kSizes = {1, 2, 4, 8};
    return variant(kSizes, (c_.head_dim + 31) / 32, "head_dim", c_.head_dim);
}

void GpuOps::place(const LayerWeights& layer, const Segment& s, bool clears) {
    args::Attention p = attention_args(layer, s);
    const int64_t end = s.position + s.length;
    if (clears) p.cleared = static_cast<uint32_t>((end + kBlock - 1) / kBlock * kBlock - end);
    std::vector<Binding> reached;
    reach_pages(reached, layer.index, s, s.position, end + p.cleared, true);
    run(recorder_,
        {.kernel = format("attn_mix_place_%s_%d", kv_name(), dimensions_of_lane()),
         .groups = {p.kv_heads, p.tokens + p.cleared, 1},
         .threads = kSimd,
         .reached = reached},
        p,
        Buffers()
            .read(row(a_.k, s.row), bytes_of_rows(a_.k, s.length))
            .read(row(a_.v, s.row), bytes_of_rows(a_.v, s.length))
            .read(here(layer).attn.k_norm)
            .read(turns_of(s.row), bytes_of_turns(s.length))
            .read(sequence_of(s), sizeof(args::Sequence))
            .add(tables({&s, 1})));
}

// Norms and turns the queries of a segment, in their place.
void GpuOps::turn(const LayerWeights& layer, const Segment& s) {
    const args::Attention p = attention_args(layer, s);
    const size_t bytes = bytes_of_rows(a_.qg, s.length);  // queries and gates
    run(recorder_,
        {.kernel = format("attn_mix_turn_%d", dimensions_of_lane()),
         .groups = {p.heads, p.tokens, 1},
         .threads = kSimd},
        p,
        Buffers()
            .add(Binding::update(row(a_.qg, s.row), bytes).reading(bytes / 2).writing(bytes / 2))
            .read(here(layer).attn.q_norm)
            .read(turns_of(s.row), bytes_of_turns(s.length)));
}

// Attention over spans of the rows of segments that are one row each, which it appends, or of one segment
// whose rows are placed; as many rows at a time as there is room for their spans' results.
void GpuOps::attend(const LayerWeights& layer, std::span<const Segment> segments, int rows, bool appends) {
    const auto seen = [&](int r) {
        return appends ? segments[static_cast<size_t>(r)].position + 1 : segments[0].position + r + 1;
    };
    for (int first = 0, next = 0; first < rows; first = next) {
        uint32_t spans = 0;
        for (; next < rows; ++next) {
            const uint32_t wider = std::max(spans, spans_of(seen(next)));
            if (wider > 1 && (next - first + 1) * static_cast<int64_t>(wider) > results_) break;
            spans = wider;
        }
        const std::span<const Segment> here =
            appends ? segments.subspan(static_cast<size_t>(first)) : segments;
        args::Attention p = attention_args(layer, here[0]);
        p.tokens = static_cast<uint32_t>(next - first);
        p.before = appends ? 0 : static_cast<uint32_t>(first);
        p.appends = appends;
        p.spans = spans;
        attend_pass(layer, here.first(appends ? p.tokens : 1), p);
    }
}

void GpuOps::attend_pass(const LayerWeights& layer, std::span<const Segment> segments,
                         const args::Attention& p) {
    const Segment& s = segments[0];
    const int64_t first = s.row + p.before, rows = p.tokens;
    const uint32_t heads = options_.gqa_packing ? kHeadsOfLoad : 1, shared = p.heads / p.kv_heads;
    const bool wide =
        options_.coalesced_kv && kv_ == DType::bf16 && c_.head_dim == 256 && c_.rotary_dim % 16 == 0;
    const size_t results = p.spans > 1 ? p.tokens * p.heads * p.spans * (p.head_dim + 2) * sizeof(float) : 0;
    std::vector<Binding> reached;
    for (const Segment& segment : segments) {
        const int64_t seen = segment.position + (p.appends ? 0 : p.before + p.tokens);
        reach_pages(reached, layer.index, segment, 0, seen, false);
        if (!p.appends) continue;
        Binding& last = reached.back();  // the page that holds the row's own position
        last.written = true;
        last.writes = last.bytes / kPageTokens;
    }
    const size_t qg_bytes = bytes_of_rows(a_.qg, rows), k_bytes = bytes_of_rows(a_.k, rows);
    const size_t y_bytes = bytes_of_rows(a_.y, rows);
    const size_t gates = p.spans > 1 ? qg_bytes / 2 : 0;  // left to the merge
    run(recorder_,
        {.kernel = format("attn_mix_split_%s_%d_%u_%s", kv_name(), dimensions_of_lane(), heads,
                          wide ? "true" : "false"),
         .groups = {p.spans, p.kv_heads * ceil_div(shared, heads), p.tokens},
         .reached = reached},
        p,
        Buffers()
            .add(Binding::read(row(a_.qg, first), qg_bytes).reading(qg_bytes - gates))
            .add(Binding::read(row(a_.k, first), k_bytes).reading(p.appends ? k_bytes : 0))
            .add(Binding::read(row(a_.v, first), k_bytes).reading(p.appends ? k_bytes : 0))
            .norm(here(layer).attn.q_norm, p.turned)
            .norm(here(layer).attn.k_norm, !p.appends)
            .add(Binding::read(turns_of(first), bytes_of_turns(rows))
                     .reading(p.turned ? 0 : bytes_of_turns(rows)))
            .read(sequence_of(s), segments.size() * sizeof(args::Sequence))
            .add(tables(segments))
            .write(partial_, results)
            .add(Binding::write(row(a_.y, first), y_bytes).writing(p.spans > 1 ? 0 : y_bytes)));
    if (p.spans == 1) return;
    run(recorder_,
        {.kernel = "attn_mix_merge", .groups = {ceil_div(p.head_dim, kMergeWidth), p.heads, p.tokens}}, p,
        Buffers()
            .read(sequence_of(s), segments.size() * sizeof(args::Sequence))
            .read(partial_, results)
            .add(Binding::read(row(a_.qg, first), qg_bytes).reading(gates))
            .write(row(a_.y, first), y_bytes));
}

void GpuOps::flash(const LayerWeights& layer, const Segment& s) {
    const args::Attention p = attention_args(layer, s);
    const uint32_t rows = p.tokens * (p.heads / p.kv_heads);
    std::vector<Binding> reached;
    const int64_t end = (s.position + s.length + kBlock - 1) / kBlock * kBlock;  // with what place() cleared
    reach_pages(reached, layer.index, s, 0, end, false);
    run(recorder_,
        {.kernel = format("attn_mix_flash_%d%s", c_.head_dim, tile_kernels_),
         .groups = {ceil_div(rows, kRowsOfTile), p.kv_heads, 1},
         .threads = 4 * kSimd,
         .reached = reached,
         .landing = device_->flash_landing(p.head_dim),
         .operations = 4.0 * p.tokens * p.heads * p.head_dim * static_cast<double>(end)},
        p,
        Buffers()
            .read(row(a_.qg, s.row), bytes_of_rows(a_.qg, s.length))
            .read(here(layer).attn.q_norm)
            .read(turns_of(s.row), bytes_of_turns(s.length))
            .read(sequence_of(s), sizeof(args::Sequence))
            .add(tables({&s, 1}))
            .write(row(a_.y, s.row), bytes_of_rows(a_.y, s.length)));
}

}  // namespace lily
