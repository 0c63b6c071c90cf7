// Reads config.json: dimensions, the kinds of the layers, and how each module is quantised. A key that is
// absent has the value of Qwen3.6-35B-A3B; a key that asks for what Lily does not compute is refused by name.
#include "config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "error.h"
#include "safetensors.h"

namespace lily {

namespace {

constexpr const char* kOtherVariant = " Lily does not compute that variant of the model.";

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw ModelFilesError(path + ": " + what);
}

// One object of config.json, and how to name its keys in a message.
struct Section {
    const std::string& path;
    const Json& json;
    std::string prefix;

    [[noreturn]] void refuse(const std::string& key, const std::string& wanted,
                             const std::string& todo = kDownloadAgain) const {
        const Json* got = json.find(key);
        fail(path, prefix + key + ": wanted " + wanted + ", got " + (got ? got->describe() : "nothing") +
                       "." + todo);
    }

    int64_t integer(const char* key, int64_t standard, int64_t least, int64_t most) const {
        const Json* found = json.find(key);
        if (!found) return standard;
        if (!found->is_integer() || found->integer() < least || found->integer() > most) {
            refuse(key, "an integer from " + std::to_string(least) + " to " + std::to_string(most));
        }
        return found->integer();
    }

    double number(const char* key, double standard, double least, double most) const {
        const Json* found = json.find(key);
        if (!found) return standard;
        double value = NAN;
        try {
            value = found->number();
        } catch (const JsonError&) {  // refused below
        }
        if (!(value >= least && value <= most)) {
            refuse(key, format("a number from %g to %g", least, most));
        }
        return value;
    }

    // A setting that Lily computes one value of.
    void only(const char* key, bool value) const {
        const Json* found = json.find(key);
        if (found && !(found->is_boolean() && found->boolean() == value)) {
            refuse(key, value ? "true" : "false", kOtherVariant);
        }
    }
    void only(const char* key, const char* value) const {
        const Json* found = json.find(key);
        if (found && !(found->is_string() && found->string() == value)) {
            refuse(key, in_quotes(value), kOtherVariant);
        }
    }
};

// Limits are far above any model of the family, and low enough that no product of dimensions overflows.
struct Dimension {
    const char* key;
    int Config::* field;
    int standard, most;
    int multiple;  // what the kernels' vectors need
};

constexpr Dimension kDimensions[] = {
    {"num_hidden_layers", &Config::layers, 40, 1024, 1},
    {"hidden_size", &Config::hidden, 2048, 1 << 16, 16},
    {"vocab_size", &Config::vocab, 248320, 1 << 22, 1},
    {"num_attention_heads", &Config::heads, 16, 1024, 1},
    {"num_key_value_heads", &Config::kv_heads, 2, 1024, 1},
    {"head_dim", &Config::head_dim, 256, 1024, 16},
    {"linear_num_key_heads", &Config::key_heads, 16, 1024, 1},
    {"linear_num_value_heads", &Config::value_heads, 32, 1024, 1},
    {"linear_key_head_dim", &Config::key_dim, 128, 1024, 16},
    {"linear_value_head_dim", &Config::value_dim, 128, 1024, 16},
    {"linear_conv_kernel_dim", &Config::conv_taps, 4, 16, 1},
    {"num_experts", &Config::experts, 256, 4096, 1},
    {"num_experts_per_tok", &Config::experts_per_token, 8, 4096, 1},
    {"moe_intermediate_size", &Config::expert_width, 512, 1 << 16, 16},
    {"shared_expert_intermediate_size", &Config::shared_width, 512, 1 << 16, 16},
};

void read_dimensions(const Section& text, Config& c) {
    for (const Dimension& d : kDimensions) {
        c.*d.field = static_cast<int>(text.integer(d.key, d.standard, 1, d.most));
        if (c.*d.field % d.multiple != 0) {
            text.refuse(d.key, "a multiple of " + std::to_string(d.multiple),
                        " Lily's kernels need whole vectors.");
        }
    }
    c.norm_epsilon = text.number("rms_norm_eps", 1e-6, 0, 1);
    c.max_positions = text.integer("max_position_embeddings", 262144, 1, 1 << 30);

    const auto divides = [&](int part, int whole, const char* key, const char* of) {
        if (whole % part != 0) {
            text.refuse(key, std::string("a divisor of ") + of + " " + std::to_string(whole));
        }
    };
    divides(c.kv_heads, c.heads, "num_key_value_heads", "num_attention_heads");
    divides(c.key_heads, c.value_heads, "linear_num_key_heads", "linear_num_value_heads");
    if (c.experts_per_token > c.experts) {
        text.refuse("num_experts_per_tok", "at most num_experts " + std::to_string(c.experts));
    }
    if (c.conv_taps < 2) text.refuse("linear_conv_kernel_dim", "at least 2");
}

void read_rope(const Section& text, Config& c) {
    static const Json kNone;
    const std::string key = text.json.find("rope_parameters") ? "rope_parameters" : "rope_scaling";
    const Json* parameters = text.json.find(key);
    if (parameters && !parameters->is_object()) text.refuse(key, "an object");
    const Section rope{text.path, parameters ? *parameters : kNone, text.prefix + key + "."};
    rope.only("rope_type", "default");
    rope.only("type", "default");
    c.rope_theta = rope.number("rope_theta", text.number("rope_theta", 1e7, 1, 1e15), 1, 1e15);
    const double factor =
        rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25, 0, 1), 0, 1);
    c.rotary_dim = static_cast<int>(c.head_dim * factor);
    if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0) {
        text.refuse("partial_rotary_factor", "an even number of rotated dimensions of head_dim " +
                                                 std::to_string(c.head_dim) + ", which it makes " +
                                                 std::to_string(c.rotary_dim));
    }
}

void read_layer_kinds(const Section& text, Config& c) {
    const Json* kinds = text.json.find("layer_types");
    if (!kinds) {
        const int64_t interval = text.integer("full_attention_interval", 4, 1, 1024);
        for (int l = 0; l < c.layers; ++l) c.attention.push_back((l + 1) % interval == 0);
        return;
    }
    try {
        for (const Json& kind : kinds->array()) {
            const bool attention = kind.string() == "full_attention";
            if (!attention && kind.string() != "linear_attention")
                throw JsonError("unknown kind " + in_quotes(kind.string()));
            c.attention.push_back(attention);
        }
    } catch (const JsonError& error) {
        fail(text.path,
             text.prefix + "layer_types: wanted \"linear_attention\" or \"full_attention\" for each layer: " +
                 error.what() + "." + kDownloadAgain);
    }
    if (c.attention.size() != static_cast<size_t>(c.layers)) {
        fail(text.path, text.prefix + "layer_types: wanted num_hidden_layers " + std::to_string(c.layers) +
                            " entries, got " + std::to_string(c.attention.size()) + "." + kDownloadAgain);
    }
}

void refuse_variants(const Section& text) {
    text.only("hidden_act", "silu");
    text.only("attention_bias", false);
    text.only("attn_output_gate", true);
    text.only("norm_topk_prob", true);
    text.only("use_sliding_window", false);
    if (text.integer("decoder_sparse_step", 1, 0, 1 << 20) != 1) {
        text.refuse("decoder_sparse_step", "1", kOtherVariant);
    }
    const Json* dense = text.json.find("mlp_only_layers");
    if (dense && !(dense->describe() == "an array" && dense->array().empty())) {
        text.refuse("mlp_only_layers", "an empty array", kOtherVariant);
    }
}

constexpr const char* kModelTypes[] = {"qwen3_5_moe", "qwen3_5_moe_text"};

void check_architecture(const Section& section) {
    const Json* type = section.json.find("model_type");
    if (!type) return;
    if (!type->is_string()) section.refuse("model_type", "\"qwen3_5_moe\"");
    for (const char* known : kModelTypes) {
        if (type->string() == known) return;
    }
    fail(section.path,
         section.prefix + "model_type: this is a " + printable(type->string()) +
             " model; Lily runs qwen3_5_moe (Qwen3.6-35B-A3B and its kin). Use a checkpoint of that model.");
}

// How one config section says that modules are stored.
struct Plan {
    Quantisation standard;
    std::map<std::string, Quantisation> override;
};

Quantisation read_quantisation(const Section& section, const std::string& module,
                               const Quantisation* standard) {
    const Json* mode = section.json.find("mode");
    const std::string name = mode && mode->is_string() ? mode->string() : mode ? mode->describe() : "affine";
    const std::string supported =
        " not supported (supported: 4-bit and 8-bit affine, group 64). Use such a conversion.";
    if (name != "affine") fail(section.path, module + ": mode " + printable(name) + supported);
    const Json* method = section.json.find("quant_method");
    if (method && !section.json.find("bits"))
        fail(section.path, module + ": quant_method " + method->describe() + supported);

    Quantisation q;
    for (const char* key : {"bits", "group_size"}) {
        if (!standard && !section.json.find(key)) section.refuse(key, "an integer");
    }
    q.bits = static_cast<int>(section.integer("bits", standard ? standard->bits : 0, 1, 32));
    q.group = static_cast<int>(section.integer("group_size", standard ? standard->group : 0, 1, 1 << 16));
    if ((q.bits != 4 && q.bits != 8) || q.group != 64) {
        fail(section.path, format("%s: %d-bit affine group %d", module.c_str(), q.bits, q.group) + supported);
    }
    return q;
}

Plan read_plan(const Section& section) {
    Plan plan;
    plan.standard = read_quantisation(section, section.prefix.substr(0, section.prefix.size() - 1), nullptr);
    for (const auto& [key, value] : section.json.object()) {
        if (!value.is_object() && !value.is_boolean())
            continue;  // bits, group_size, mode and what converters note down
        if (is_skipped(key)) continue;
        const std::string module = module_path(key);
        const Section entry{section.path, value, section.prefix + key + "."};
        Quantisation q = plan.standard;
        if (value.is_object()) q = read_quantisation(entry, in_quotes(key), &plan.standard);
        if (value.is_boolean() && !value.boolean()) q = Quantisation{0, 64};
        const auto [at, fresh] = plan.override.emplace(module, q);
        if (!fresh && at->second != q) {
            fail(section.path, section.prefix + in_quotes(key) +
                                   " contradicts another entry for the same module, " + module +
                                   ". Remove the wrong one.");
        }
    }
    return plan;
}

// The section may stand at either level under either name; copies must agree.
void read_plans(const std::vector<Section>& levels, Config& c) {
    std::optional<Plan> first;
    std::string name;
    for (const Section& level : levels) {
        for (const char* key : {"quantization", "quantization_config"}) {
            const Json* found = level.json.find(key);
            if (!found) continue;
            if (!found->is_object()) level.refuse(key, "an object");
            const Plan plan = read_plan(Section{level.path, *found, level.prefix + key + "."});
            if (first && (first->standard != plan.standard || first->override != plan.override)) {
                fail(level.path,
                     level.prefix + key + " contradicts " + name +
                         ": wanted two equal copies. Download the file again, or remove the wrong one.");
            }
            first = plan;
            name = level.prefix + key;
        }
    }
    if (!first) return;
    c.quantised = true;
    c.quantisation = first->standard;
    c.override = first->override;
}

}  // namespace

int Config::attention_layers() const {
    return static_cast<int>(std::count(attention.begin(), attention.end(), true));
}

bool is_skipped(std::string_view name) {
    for (const char* prefix : {"vision_tower.", "model.vision_tower.", "model.visual.", "visual.", "mtp."}) {
        if (name.starts_with(prefix)) return true;
    }
    return name.find(".mtp.") != std::string_view::npos;
}

std::string module_path(std::string_view name) {
    for (size_t start = 0; start != std::string_view::npos;) {
        const std::string_view rest = name.substr(start);
        for (const char* root : {"layers.", "embed_tokens.", "norm.", "lm_head."}) {
            const std::string_view word(root);
            if (rest.starts_with(word) || rest == word.substr(0, word.size() - 1)) return std::string(rest);
        }
        const size_t dot = name.find('.', start);
        start = dot == std::string_view::npos ? dot : dot + 1;
    }
    return std::string(name);
}

Config read_config(const std::string& directory) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(directory, ignored)) {
        const bool exists = std::filesystem::exists(directory, ignored);
        fail(directory, std::string(exists ? "is not a folder" : "no such folder") +
                            ": wanted one that holds config.json and model.safetensors. Check the path.");
    }
    const std::string path = (std::filesystem::path(directory) / "config.json").string();
    const Json root = read_json(path);
    const Json* nested = root.find("text_config");
    if (nested && !nested->is_object())
        fail(path, "text_config: wanted an object, got " + nested->describe() + ".");
    const Section top{path, root, ""};
    const Section text{path, nested ? *nested : root, nested ? "text_config." : ""};
    check_architecture(top);
    check_architecture(text);
    if (!root.find("model_type") && !text.json.find("model_type")) {
        top.refuse("model_type", "\"qwen3_5_moe\"", " Is this the config.json of a model?");
    }

    Config c;
    read_dimensions(text, c);
    read_rope(text, c);
    read_layer_kinds(text, c);
    refuse_variants(text);
    const Section& tied = text.json.find("tie_word_embeddings") ? text : top;
    if (const Json* tie = tied.json.find("tie_word_embeddings")) {
        if (!tie->is_boolean()) tied.refuse("tie_word_embeddings", "true or false");
        c.tied = tie->boolean();
    }
    read_plans(nested ? std::vector<Section>{top, text} : std::vector<Section>{top}, c);
    return c;
}

}  // namespace lily
