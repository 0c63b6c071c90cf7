// Binds the tensors of a checkpoint to the model's layers: every name, type and shape is checked against the
// config before a byte of any tensor is read, and matrices are then used where the files have them.
#include "weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <span>

#include "error.h"
#include "safetensors.h"

namespace lily {

namespace {

constexpr size_t kNamesShown = 5;
constexpr size_t kShardsShown = 50;

using Shape = std::vector<int64_t>;
using Names = std::vector<std::string>;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw ModelFilesError(path + ": " + what);
}

// "a, b, c, d, e and 12 more"
std::string some_of(const Names& names, size_t shown = kNamesShown) {
    std::string text;
    for (size_t i = 0; i < std::min(names.size(), shown); ++i) text += (i ? ", " : "") + printable(names[i]);
    if (names.size() > shown) text += " and " + std::to_string(names.size() - shown) + " more";
    return text;
}

std::string describe(const StoredTensor& tensor) {
    return tensor.type + " " + shape_text(tensor.shape);
}

[[noreturn]] void refuse(const StoredTensor& tensor, const std::string& wanted, const std::string& todo) {
    fail(tensor.file->path(), "tensor " + in_quotes(tensor.name) + ": wanted " + wanted + ", got " +
                                  describe(tensor) + "." + todo);
}

constexpr const char* kOtherConfig = " Does config.json belong to these files?";

std::optional<DType> float_type(const std::string& type) {
    if (type == "BF16") return DType::bf16;
    if (type == "F16") return DType::f16;
    if (type == "F32") return DType::f32;
    return std::nullopt;
}

// FNV-1a, 64 bits: tells checkpoints apart, guards against nobody.
class Hash {
   public:
    void add(std::span<const std::byte> bytes) {
        for (const std::byte b : bytes) value_ = (value_ ^ static_cast<uint8_t>(b)) * 0x100000001b3u;
    }
    void add(const std::string& text) { add(std::as_bytes(std::span(text.data(), text.size() + 1))); }
    void add(int64_t value) { add(std::as_bytes(std::span(&value, 1))); }
    void add(double value) { add(std::bit_cast<int64_t>(value)); }
    std::string text() const { return format("%016llx", static_cast<unsigned long long>(value_)); }

   private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

// The text tensors of all files by their names without the checkpoint's prefix.
struct Table {
    std::map<std::string, StoredTensor> tensors;
    size_t skipped = 0;
};

// Prefixes that conversions put before the text model's names; anything else is another model's tensor.
std::string bare_name(const std::string& name) {
    const std::string path = module_path(name);
    const std::string_view prefix = std::string_view(name).substr(0, name.size() - path.size());
    for (const char* known :
         {"language_model.model.", "model.language_model.", "language_model.", "model.", ""}) {
        if (prefix == known) return path;
    }
    return name;
}

std::string file_name(const MappedFile& file) {
    return std::filesystem::path(file.path()).filename().string();
}

void add_file(Table& table, const MappedFile& file, const WeightFiles& files) {
    for (const StoredTensor& tensor : read_header(file)) {
        if (is_skipped(tensor.name)) {
            ++table.skipped;
            continue;
        }
        const auto [at, fresh] = table.tensors.emplace(bare_name(tensor.name), tensor);
        if (fresh) continue;
        // Two files hold it. The index says which of them counts; the other is left over from something else.
        const StoredTensor& other = at->second;
        const auto home = files.home.find(tensor.name);
        const bool told = home != files.home.end() && other.name == tensor.name && other.file != &file;
        if (told && home->second == file_name(*other.file)) continue;
        if (!told || home->second != file_name(file)) {
            fail(file.path(), "tensor " + in_quotes(tensor.name) + " is also in " + other.file->path() +
                                  ", as " + in_quotes(other.name) +
                                  ". Remove the files of the other conversion.");
        }
        at->second = tensor;
    }
}

// Checkpoints before conversion: experts fused or one by one, convolution taps last.
void refuse_hugging_face_layout(const Table& table) {
    for (const auto& [name, tensor] : table.tensors) {
        const bool experts = name.find(".mlp.experts.") != std::string::npos;
        const bool conv = name.ends_with(".linear_attn.conv1d.weight") && tensor.shape.size() == 3 &&
                          tensor.shape[1] == 1 && tensor.shape[2] != 1;
        if (!experts && !conv) continue;
        fail(tensor.file->path(),
             "this is a checkpoint in Hugging Face layout: wanted MLX layout, got tensor " +
                 in_quotes(tensor.name) + " " + describe(tensor) +
                 ". Use an MLX conversion, or convert it with `mlx_lm.convert --quantize`.");
    }
}

// Hands out the table's tensors, checked. What is missing is noted, so that it can be told all at once; until
// finish() the small vectors hold nothing.
class Binder {
   public:
    Binder(Weights& weights, const Table& table) : weights_(weights), table_(table) {}

    Linear linear(const std::string& module, const Shape& shape);
    Tensor vector(const std::string& name, const Shape& shape);

    const Names& missing() const { return missing_; }
    void finish();

   private:
    struct Widening {
        const StoredTensor* from;
        DType type;
        float* to;
    };

    const StoredTensor* take(const std::string& name);
    void quantised(const std::string& module, const Shape& shape, const StoredTensor& weight, Linear& out);
    int expected_bits(const std::string& module) const;
    void compare(const std::string& module, const Linear& linear);
    void warn_of_extra();
    std::string fingerprint() const;

    Weights& weights_;
    const Table& table_;
    std::map<std::string, const StoredTensor*> bound_;
    std::vector<Linear> linears_;
    std::vector<Widening> widenings_;
    Names missing_;
    Names disagreements_;
};

const StoredTensor* Binder::take(const std::string& name) {
    const auto found = table_.tensors.find(name);
    if (found == table_.tensors.end()) {
        missing_.push_back(name);
        return nullptr;
    }
    bound_[name] = &found->second;
    return &found->second;
}

Tensor view(const StoredTensor& tensor, DType type, int64_t rows, int64_t columns) {
    return Tensor(tensor.bytes.data(), type, {rows, columns});
}

// shape is (rows, columns), or (experts, rows, columns) for a stack.
Linear Binder::linear(const std::string& module, const Shape& shape) {
    Linear out;
    const StoredTensor* weight = take(module + ".weight");
    if (!weight) {
        for (const char* part : {".scales", ".biases"}) {
            if (expected_bits(module) > 0) take(module + part);
        }
        return out;
    }
    out.columns = shape.back();
    out.rows = 1;
    for (size_t i = 0; i + 1 < shape.size(); ++i) out.rows *= shape[i];

    if (weight->type == "U32") {
        quantised(module, shape, *weight, out);
    } else if (const auto type = float_type(weight->type)) {
        if (weight->shape != shape) refuse(*weight, shape_text(shape), kOtherConfig);
        out.weight = view(*weight, *type, out.rows, out.columns);
    } else {
        refuse(*weight, "U32 (packed) or BF16, F16, F32", " Use a 4-bit or 8-bit affine conversion.");
    }
    compare(module, out);
    out.number = weights_.matrices++;
    linears_.push_back(out);
    return out;
}

void Binder::quantised(const std::string& module, const Shape& shape, const StoredTensor& weight,
                       Linear& out) {
    constexpr const char* kSupported =
        " not supported (supported: 4-bit and 8-bit affine, group 64). Use such a conversion.";
    const StoredTensor* scales = take(module + ".scales");
    if (scales && scales->type == "U8") {
        fail(scales->file->path(), module + ": mxfp4 or nvfp4 (scales of type U8)" + kSupported);
    }
    const StoredTensor* biases = take(module + ".biases");
    if (!scales || !biases) return;

    // The last axes say how the module is stored: columns * bits / 32 words and columns / group scales.
    const auto with_last = [&](int64_t last) {
        Shape changed = shape;
        changed.back() = last;
        return changed;
    };
    const int64_t columns = shape.back();
    const int64_t words = weight.shape.empty() ? 0 : weight.shape.back();
    const int64_t groups = scales->shape.empty() ? 0 : scales->shape.back();
    const bool plausible =
        words > 0 && words <= columns && words * 32 % columns == 0 && groups > 0 && columns % groups == 0;
    if (weight.shape != with_last(words) || !plausible) {
        refuse(weight,
               "U32 " + shape_text(with_last(columns / 8)) + " (4-bit) or " +
                   shape_text(with_last(columns / 4)) + " (8-bit) with scales " +
                   shape_text(with_last(columns / 64)),
               kOtherConfig);
    }
    const int bits = static_cast<int>(words * 32 / columns);
    const int64_t group = columns / groups;
    if ((bits != 4 && bits != 8) || group != 64) {
        fail(weight.file->path(), module + ": " + std::to_string(bits) + "-bit affine group " +
                                      std::to_string(group) + kSupported);
    }
    for (const StoredTensor* companion : {scales, biases}) {
        if (companion->shape != with_last(groups) || !float_type(companion->type) ||
            companion->type != scales->type) {
            refuse(*companion,
                   "BF16, F16 or F32 " + shape_text(with_last(groups)) + ", scales and biases alike",
                   kDownloadAgain);
        }
    }
    const DType type = *float_type(scales->type);
    out.bits = bits;
    out.weight = view(weight, DType::u32, out.rows, words);
    out.scales = view(*scales, type, out.rows, groups);
    out.biases = view(*biases, type, out.rows, groups);
}

int Binder::expected_bits(const std::string& module) const {
    const Config& c = weights_.config;
    const auto named = c.override.find(module);
    return named != c.override.end() ? named->second.bits : c.quantised ? c.quantisation.bits : 0;
}

// The tensors say how a module is stored; a config that says otherwise is worth a warning, for it may be a
// wrong one.
void Binder::compare(const std::string& module, const Linear& linear) {
    const int expected = expected_bits(module);
    // Converters leave a module unquantised without saying so when its width is no multiple of the group.
    const bool silent = linear.bits == 0 && !weights_.config.override.contains(module);
    if (!linear.weight || linear.bits == expected || silent) return;
    const auto text = [](int bits) {
        return bits ? std::to_string(bits) + "-bit" : std::string("unquantised");
    };
    disagreements_.push_back(module + " (config.json says " + text(expected) + ", the tensors are " +
                             text(linear.bits) + ")");
}

Tensor Binder::vector(const std::string& name, const Shape& shape) {
    const StoredTensor* stored = take(name);
    if (!stored) return {};
    const auto type = float_type(stored->type);
    if (!type || stored->shape != shape)
        refuse(*stored, "BF16, F16 or F32 " + shape_text(shape), kOtherConfig);
    Tensor out(nullptr, DType::f32, {shape[0]});
    if (shape.size() > 1) out = Tensor(nullptr, DType::f32, {shape[0], shape[1]});
    weights_.widened.push_back(std::make_unique<float[]>(static_cast<size_t>(out.size())));
    out.data = reinterpret_cast<std::byte*>(weights_.widened.back().get());
    widenings_.push_back({stored, *type, weights_.widened.back().get()});
    return out;
}

void Binder::warn_of_extra() {
    Names extra;
    for (const auto& [name, tensor] : table_.tensors) {
        if (!bound_.contains(name)) extra.push_back(tensor.name);
    }
    if (!extra.empty()) {
        weights_.warnings.push_back(
            std::to_string(extra.size()) +
            " tensors belong to no part of the model and were ignored: " + some_of(extra) + ".");
    }
}

void Binder::finish() {
    for (const Widening& w : widenings_) {
        const size_t count = w.from->bytes.size() / bytes_of(w.type);
        for (size_t i = 0; i < count; ++i) {
            w.to[i] = float_at(w.from->bytes.data(), w.type, i);
            if (!std::isfinite(w.to[i])) {
                fail(w.from->file->path(), "tensor " + in_quotes(w.from->name) +
                                               ": wanted finite values, got " + std::to_string(w.to[i]) +
                                               " at " + std::to_string(i) + "." + kDownloadAgain);
            }
        }
    }
    for (const auto& [name, tensor] : bound_) weights_.bytes += tensor->bytes.size();
    weights_.tensors = bound_.size();
    if (!disagreements_.empty()) {
        weights_.warnings.push_back(
            "config.json and tensors disagree on how " + std::to_string(disagreements_.size()) +
            " modules are stored; the tensors were believed: " + some_of(disagreements_) + ".");
    }
    warn_of_extra();
    weights_.fingerprint = fingerprint();
}

// Dimensions, the table, every small vector and a line of every matrix: enough to tell fine-tunes of one
// model apart, and no more than a page of each matrix is read.
std::string Binder::fingerprint() const {
    constexpr size_t kLine = 64;
    const Config& c = weights_.config;
    Hash hash;
    for (const int64_t n : {c.layers, c.hidden, c.vocab, c.heads, c.kv_heads, c.head_dim, c.rotary_dim,
                            c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.conv_taps, c.experts,
                            c.experts_per_token, c.expert_width, c.shared_width, static_cast<int>(c.tied)}) {
        hash.add(n);
    }
    hash.add(c.norm_epsilon);
    hash.add(c.rope_theta);
    for (const bool attention : c.attention) hash.add(int64_t{attention});
    for (const auto& [name, tensor] : bound_) {
        hash.add(name);
        hash.add(describe(*tensor));
    }
    for (const Widening& w : widenings_) hash.add(w.from->bytes);
    for (const Linear& linear : linears_) {
        const size_t bytes = linear.weight.bytes();
        hash.add(std::span(linear.weight.data + bytes / 2, std::min(kLine, bytes - bytes / 2)));
    }
    return hash.text();
}

GdnWeights bind_gdn(Binder& bind, const std::string& path, const Config& c) {
    const int64_t values = int64_t{c.value_heads} * c.value_dim;
    GdnWeights w;
    w.in_qkv = bind.linear(path + "in_proj_qkv", {c.channels(), c.hidden});
    w.in_z = bind.linear(path + "in_proj_z", {values, c.hidden});
    w.in_b = bind.linear(path + "in_proj_b", {c.value_heads, c.hidden});
    w.in_a = bind.linear(path + "in_proj_a", {c.value_heads, c.hidden});
    w.out = bind.linear(path + "out_proj", {c.hidden, values});
    w.conv = bind.vector(path + "conv1d.weight", {c.channels(), c.conv_taps, 1});
    w.a_log = bind.vector(path + "A_log", {c.value_heads});
    w.dt_bias = bind.vector(path + "dt_bias", {c.value_heads});
    w.norm = bind.vector(path + "norm.weight", {c.value_dim});
    return w;
}

AttentionWeights bind_attention(Binder& bind, const std::string& path, const Config& c) {
    const int64_t queries = int64_t{c.heads} * c.head_dim, keys = int64_t{c.kv_heads} * c.head_dim;
    AttentionWeights w;
    w.q = bind.linear(path + "q_proj", {2 * queries, c.hidden});
    w.k = bind.linear(path + "k_proj", {keys, c.hidden});
    w.v = bind.linear(path + "v_proj", {keys, c.hidden});
    w.out = bind.linear(path + "o_proj", {c.hidden, queries});
    w.q_norm = bind.vector(path + "q_norm.weight", {c.head_dim});
    w.k_norm = bind.vector(path + "k_norm.weight", {c.head_dim});
    return w;
}

MoeWeights bind_moe(Binder& bind, const std::string& path, const Config& c) {
    MoeWeights w;
    w.router = bind.linear(path + "gate", {c.experts, c.hidden});
    w.gate = bind.linear(path + "switch_mlp.gate_proj", {c.experts, c.expert_width, c.hidden});
    w.up = bind.linear(path + "switch_mlp.up_proj", {c.experts, c.expert_width, c.hidden});
    w.down = bind.linear(path + "switch_mlp.down_proj", {c.experts, c.hidden, c.expert_width});
    w.shared_gate = bind.linear(path + "shared_expert.gate_proj", {c.shared_width, c.hidden});
    w.shared_up = bind.linear(path + "shared_expert.up_proj", {c.shared_width, c.hidden});
    w.shared_down = bind.linear(path + "shared_expert.down_proj", {c.hidden, c.shared_width});
    w.shared_expert_gate = bind.linear(path + "shared_expert_gate", {1, c.hidden});
    return w;
}

void bind_all(Binder& bind, Weights& weights) {
    const Config& c = weights.config;
    weights.norm = bind.vector("norm.weight", {c.hidden});  // first: a wrong hidden_size shows plainly here
    weights.embedding = bind.linear("embed_tokens", {c.vocab, c.hidden});
    weights.head = c.tied ? weights.embedding : bind.linear("lm_head", {c.vocab, c.hidden});
    int attention = 0, delta = 0;
    for (int l = 0; l < c.layers; ++l) {
        const std::string path = "layers." + std::to_string(l) + ".";
        LayerWeights layer;
        layer.attention = c.attention[static_cast<size_t>(l)];
        layer.number = attention + delta;
        layer.index = layer.attention ? attention++ : delta++;
        layer.input_norm = bind.vector(path + "input_layernorm.weight", {c.hidden});
        layer.post_norm = bind.vector(path + "post_attention_layernorm.weight", {c.hidden});
        if (layer.attention) {
            layer.attn = bind_attention(bind, path + "self_attn.", c);
        } else {
            layer.gdn = bind_gdn(bind, path + "linear_attn.", c);
        }
        layer.moe = bind_moe(bind, path + "mlp.", c);
        weights.layers.push_back(std::move(layer));
    }
}

[[noreturn]] void fail_missing_shards(const std::string& directory, const Names& shards,
                                      const std::string& also = "") {
    fail(directory, "missing " + some_of(shards, kShardsShown) + " (incomplete download?). Download " +
                        (shards.size() == 1 ? "it." : "them.") + also);
}

[[noreturn]] void fail_missing_tensors(const std::string& directory, const Names& names, const Table& table,
                                       const Config& c) {
    int layers = 0;
    while (table.tensors.contains("layers." + std::to_string(layers) + ".input_layernorm.weight")) ++layers;
    std::string cause = "The conversion is incomplete, or config.json belongs to other files.";
    if (layers < c.layers) {
        cause = "config.json says " + std::to_string(c.layers) + " layers, the files hold " +
                std::to_string(layers) + ": config.json belongs to other files, or files are missing.";
    } else if (std::all_of(names.begin(), names.end(),
                           [](const auto& n) { return n.starts_with("lm_head."); })) {
        cause = "Should tie_word_embeddings be true in config.json?";
    }
    fail(directory, std::to_string(names.size()) + " tensors are missing: " + some_of(names) + ". " + cause +
                        " Download the checkpoint again.");
}

}  // namespace

std::shared_ptr<const Weights> load_weights(const std::string& directory) {
    auto weights = std::make_shared<Weights>();
    weights->directory = directory;
    weights->config = read_config(directory);
    const WeightFiles files = find_weight_files(directory);
    Table table;
    try {
        for (const std::string& path : files.present) {
            weights->files.push_back(std::make_shared<MappedFile>(path));
            add_file(table, *weights->files.back(), files);
        }
    } catch (const ModelFilesError& error) {
        if (files.missing.empty()) throw;
        fail_missing_shards(directory, files.missing, std::string(" Besides, ") + error.what());
    }
    if (files.present.empty()) fail_missing_shards(directory, files.missing);
    refuse_hugging_face_layout(table);

    Binder bind(*weights, table);
    bind_all(bind, *weights);
    if (!bind.missing().empty() && !files.missing.empty()) fail_missing_shards(directory, files.missing);
    if (!bind.missing().empty()) fail_missing_tensors(directory, bind.missing(), table, weights->config);
    if (!files.missing.empty()) {
        weights->warnings.push_back(
            "the index names files that are not here, but those present hold every tensor: " +
            some_of(files.missing) + ".");
    }
    weights->skipped = table.skipped;
    bind.finish();
    return weights;
}

}  // namespace lily
