// The model's dimensions, read from a checkpoint's config.json. Nothing here depends on a backend.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace lily {

// How the weights of one module are stored. bits is 4 or 8 (affine), or 0 when stored unquantised.
struct Quantisation {
    int bits = 0;
    int group = 64;
    bool operator==(const Quantisation&) const = default;
};

// Every dimension with the letter that comments and docs use for it. T is always the number of tokens in a
// pass.
struct Config {
    int layers = 0;  // L
    int hidden = 0;  // D, width of the residual stream
    int vocab = 0;   // V
    double norm_epsilon = 1e-6;
    int64_t max_positions = 0;  // longest context the checkpoint was made for, in tokens

    int heads = 0;       // H, query heads of an attention layer
    int kv_heads = 0;    // G, key/value heads; query head h reads key/value head h / (H / G)
    int head_dim = 0;    // Dh
    int rotary_dim = 0;  // R, the leading dimensions of a head that RoPE rotates
    double rope_theta = 1e7;

    int key_heads = 0;    // Hk, heads of q and k in a Gated DeltaNet layer
    int value_heads = 0;  // Hv; value head j reads key head j / (Hv / Hk)
    int key_dim = 0;      // Dk
    int value_dim = 0;    // Dv
    int conv_taps = 0;    // C; the last tap multiplies the current token

    int experts = 0;            // E
    int experts_per_token = 0;  // K
    int expert_width = 0;       // F, hidden width of a routed expert
    int shared_width = 0;       // Fs, hidden width of the shared expert

    bool tied = false;            // tie_word_embeddings: the head is the embedding
    std::vector<bool> attention;  // (L): true for a full-attention layer, false for Gated DeltaNet

    bool quantised = false;     // config.json has a quantization section
    Quantisation quantisation;  // its default
    std::map<std::string, Quantisation>
        override;  // its exceptions, by module path without the checkpoint's prefix

    int channels() const {
        return 2 * key_heads * key_dim + value_heads * value_dim;
    }  // convolved: q, k and v together
    int hidden_width() const { return experts_per_token * expert_width; }
    int mixer_width() const {  // of the wider kind of mixer
        return value_heads * value_dim > heads * head_dim ? value_heads * value_dim : heads * head_dim;
    }
    int attention_layers() const;
    int delta_layers() const { return layers - attention_layers(); }
};

// A name without what checkpoints put before it: "language_model.model.layers.3.mlp.gate" is
// "layers.3.mlp.gate".
std::string module_path(std::string_view name);

// Whether a name belongs to the vision tower or to multi-token prediction, which Lily does not run.
bool is_skipped(std::string_view name);

// Reads DIRECTORY/config.json. Throws ModelFilesError for anything missing, malformed or of another
// architecture.
Config read_config(const std::string& directory);

}  // namespace lily
