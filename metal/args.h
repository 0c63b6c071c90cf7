// The arguments of every kernel: included by the kernels and by csrc/gpu/ops.cpp, so that both sides see one
// layout. All fields are 32 bits wide, but for addresses.
#pragma once

#ifdef __METAL_VERSION__
#define LILY_DEVICE device
#else
#include <cstdint>
#define LILY_DEVICE
#endif

namespace lily {
namespace args {

#ifndef __METAL_VERSION__
using uint = uint32_t;
#endif

// How numbers are stored.
enum Type { kBf16 = 0, kF16 = 1, kF32 = 2 };

// A matrix: rows of `columns` numbers, in `bits` (4 or 8, affine in groups of 64) or, when bits is 0, as
// plain numbers.
struct Matrix {
    uint rows;
    uint columns;
    uint bits;
    uint type;  // of scales and biases, or of the numbers themselves
};

// Where number i of a vector that rows are multiplied with lies in threadgroup memory. Neighbouring lanes
// read 16 numbers each; four floats of room after every 16 keep them out of each other's banks.
inline uint spread(uint i) { return i + i / 16 * 4; }

// Floats of threadgroup memory that such a vector takes, in whole groups of 64.
inline uint vector_floats(uint n) { return (n + 63) / 64 * 80; }

// Blocks of four outputs that a threadgroup of gdn_out and matvec takes; as many of its SIMD-groups share
// each.
enum { kSharedBlocks = 4 };
// SIMD-groups that share the experts of moe_down.
enum { kMoeDownParts = 3 };

struct Embed {
    Matrix embedding;
};

// A row of the residual stream, normed, times up to four matrices.
struct NormProject {
    Matrix matrix[4];
    float epsilon;
    uint normed;  // whether the row comes normed
    uint best;    // head: whether it notes the best of its logits
};

struct MoeRoute {
    Matrix router, shared_expert_gate, shared_gate, shared_up;
    float epsilon;
    uint normed;  // whether the row comes normed
};

struct MixOut {
    Matrix out;
    uint y_stride;  // floats between rows of y
    uint head_dim;  // gdn_out: of the heads that are normed
    float epsilon;
};

struct MoeUp {
    Matrix gate, up;  // of one expert
    uint experts, experts_per_token;
    uint chosen;  // whether the experts come chosen
};

struct MoeChoose {
    uint experts, experts_per_token;
    uint width;  // of the row that is rounded; 0: none is
};

struct MoeDown {
    Matrix down, shared_down;  // down: of one expert
    uint experts_per_token;
};

// Rows normed before many of them are multiplied.
struct NormRows {
    uint width;     // of a row
    uint y_stride;  // gated: floats between rows of y
    uint head_dim;  // gated: of the heads that are normed
    float epsilon;
};

// Rows of x times a matrix, one at a time or, for prompts, many; and with two matrices that SwiGLU joins.
struct Matmul {
    Matrix matrix;
    uint tokens;
    uint x_stride;  // numbers between rows of x
    uint add;       // whether y is added to
};

struct MatmulSwiglu {
    Matrix gate, up;
    uint tokens;
};

// A row for each of a token's experts, times the expert's matrix.
struct MatvecExperts {
    Matrix matrix;  // of one expert
    uint experts_per_token;
    uint shared;  // whether a token's experts take the same row of x
};

// A prompt's assignments, K experts a token, sorted by expert: assignment t K + k is token t's k-th expert.
struct MoeSort {
    uint assignments;
    uint experts;
    uint runs;                   // of kSortRun assignments
    uint tile_rows;              // the most that a tile holds
    uint up_blocks, down_blocks; // threadgroups that a tile takes
};

// The rows of one expert that a threadgroup takes: sorted assignments [first, first + rows).
struct Tile {
    uint expert, first, rows;
};

struct MoeCombine {
    uint width;  // D
    uint experts_per_token;
};

// A sequence of the batch: its tokens in this pass, and where its recurrent states lie, of all layers one
// after another. A pass reads one copy and writes the other. Attention finds its pages in a table of their
// addresses.
struct Sequence {
    LILY_DEVICE float* now;   // (layers, conv (C - 1, channels) then S (Hv, Dv, Dk))
    LILY_DEVICE float* next;  // the same
    uint row;                 // of its first token, in the batch
    uint tokens;
    uint position;  // of its first token
    uint unused;
};

struct GdnMix {
    uint key_heads, value_heads, key_dim, value_dim, taps;
    uint layer;  // among the Gated DeltaNet layers
    uint state;  // floats of a layer's states
    uint lead;   // rows of the first block of the position grid that come before this sequence's first token
    uint rows;   // that are prepared: of the grid's blocks, or the tokens'
    uint y_stride;
};

struct Attention {
    uint tokens;   // rows of this dispatch
    uint before;   // rows of the sequence before them in this pass
    uint appends;  // 1: each row is a sequence of its own, and the dispatch writes its key and value
    uint cleared;  // positions to clear after the last token
    uint heads, kv_heads, head_dim, rotary_dim;
    float epsilon;
    uint layer;       // among the attention layers
    uint plane;       // numbers of one layer's keys, or values, in a page
    uint pages;       // of a sequence's table
    uint turned;      // whether the queries come normed and turned
    uint spans;       // results kept for each row and head
    uint fixed_from;  // positions from which spans no longer grow; 0: never
    uint y_stride;
};

// A token that is drawn with other logits than the head gave.
struct Edit {
    uint token;
    float bias;
    uint penalised;  // whether it was generated before
    float penalty;   // what is subtracted then
};

struct Adjust {
    uint vocab;
    uint edits;
    uint masked;                // whether there is a mask
    float repetition, inverse;  // the factor of a negative logit, and of another
};

struct Sample {
    uint vocab;
    uint blocks;         // of kLogitBlock logits
    float factor;        // 2^24 / temperature; 0: the best token
    uint top_k;          // 0: all
    uint has_part;       // whether top_p is below 1
    uint part;           // top_p in 2^-32
    uint least_mass[2];  // min_p in 2^-40: these are the low and the high half
    uint seed[2], position[2];
    uint embeds;  // whether the token's row of the embedding is looked up
    Matrix embedding;
};

enum { kLogitBlock = 32 };                      // logits whose best the head notes
enum { kNotFiniteToken = -1, kNoToken = -2 };   // what sample leaves where there is none

// Decode attention cuts the positions that a row sees into spans, on a grid that depends on how many it sees
// and on nothing else. One span up to kOneSpan; then the smallest that make at most kMostSpans; from
// fixed_from on, kFixedSpan each.
enum { kOneSpan = 256, kLeastSpan = 64, kMostSpans = 128, kFixedSpan = 512 };

inline uint span_of(uint seen, uint fixed_from) {
    if (fixed_from != 0 && seen >= fixed_from) return kFixedSpan;
    if (seen <= kOneSpan) return kOneSpan;
    uint span = kLeastSpan;
    while (span * kMostSpans < seen) span *= 2;
    return span;
}

}  // namespace args
}  // namespace lily
