// The checkpoint's weights, mapped into memory and bound to the model's layers.
// Large matrices stay where the file has them, at any byte address: read them with load<T>(). Small vectors
// are widened to float32 and aligned.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "config.h"
#include "tensor.h"

namespace lily {

// A matrix W of y = W x, as stored. Experts are stacked along the rows: expert e owns rows [e * N, (e + 1) *
// N).
struct Linear {
    Tensor weight;  // bits 4, 8: (rows, columns * bits / 32) u32, lowest bits first.  bits 0: (rows, columns)
                    // bf16, f16, f32
    Tensor scales;  // (rows, columns / 64) bf16, f16 or f32; the value is scale * q + bias
    Tensor biases;  // (rows, columns / 64), same type as scales
    int64_t rows = 0;
    int64_t columns = 0;
    int bits = 0;
    int number = -1;  // among the matrices of these weights; tied ones share it
};

struct GdnWeights {
    Linear in_qkv;   // (2 Hk Dk + Hv Dv, D): rows q, k, v
    Linear in_z;     // (Hv Dv, D)
    Linear in_b;     // (Hv, D)
    Linear in_a;     // (Hv, D)
    Linear out;      // (D, Hv Dv)
    Tensor conv;     // (channels, C) f32
    Tensor a_log;    // (Hv) f32
    Tensor dt_bias;  // (Hv) f32
    Tensor norm;     // (Dv) f32
};

struct AttentionWeights {
    Linear q;       // (H 2 Dh, D): per head Dh query rows, then Dh gate rows
    Linear k;       // (G Dh, D)
    Linear v;       // (G Dh, D)
    Linear out;     // (D, H Dh)
    Tensor q_norm;  // (Dh) f32
    Tensor k_norm;  // (Dh) f32
};

struct MoeWeights {
    Linear router;              // (E, D)
    Linear gate;                // (E F, D), experts stacked
    Linear up;                  // (E F, D)
    Linear down;                // (E D, F)
    Linear shared_gate;         // (Fs, D)
    Linear shared_up;           // (Fs, D)
    Linear shared_down;         // (D, Fs)
    Linear shared_expert_gate;  // (1, D)
};

struct LayerWeights {
    bool attention = false;
    int number = 0;         // among all layers
    int index = 0;          // among the layers of its kind: selects the state
    Tensor input_norm;      // (D) f32
    Tensor post_norm;       // (D) f32
    GdnWeights gdn;         // when !attention
    AttentionWeights attn;  // when attention
    MoeWeights moe;
};

class MappedFile;
struct Panels;

// Owns the mappings. Immutable once loaded, so any number of sessions may share it.
struct Weights {
    std::string directory;  // that they were loaded from
    Config config;
    Linear embedding;  // (V, D)
    Linear head;       // (V, D); the embedding when tie_word_embeddings
    Tensor norm;       // (D) f32
    std::vector<LayerWeights> layers;

    size_t bytes = 0;                   // of the text tensors that were bound
    size_t tensors = 0;                 // how many tensors were bound
    size_t skipped = 0;                 // vision and multi-token-prediction tensors, not read
    std::vector<std::string> warnings;  // stale index and the like: for the caller to log
    std::string
        fingerprint;  // of config, tensor table and samples; equal for equal checkpoints, however sharded

    int matrices = 0;  // how many Linear::number there are

    std::vector<std::shared_ptr<MappedFile>> files;
    std::vector<std::unique_ptr<float[]>> widened;  // the float32 copies of small vectors

    // The matrices once more, as the CPU's sessions read them fastest; shared by those that do. See
    // cpu/panels.h.
    mutable std::mutex panels_mutex;
    mutable std::weak_ptr<const Panels> panels;
};

// Calls function(Linear) for every matrix that inputs are multiplied with.
template <class Function>
void for_each_matrix(const Weights& weights, const Function& function) {
    for (const LayerWeights& layer : weights.layers) {
        const GdnWeights& g = layer.gdn;
        const AttentionWeights& a = layer.attn;
        const MoeWeights& m = layer.moe;
        if (layer.attention) {
            for (const Linear* w : {&a.q, &a.k, &a.v, &a.out}) function(*w);
        } else {
            for (const Linear* w : {&g.in_qkv, &g.in_z, &g.in_b, &g.in_a, &g.out}) function(*w);
        }
        for (const Linear* w : {&m.router, &m.gate, &m.up, &m.down, &m.shared_gate, &m.shared_up,
                                &m.shared_down, &m.shared_expert_gate})
            function(*w);
    }
    function(weights.head);
}

// Checks every file before reading any weight, and then reads the small vectors and a line of each matrix
// only. Throws ModelFilesError.
std::shared_ptr<const Weights> load_weights(const std::string& directory);

}  // namespace lily
