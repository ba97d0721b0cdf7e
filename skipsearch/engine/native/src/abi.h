// What Python hands over: plain structs. ../abi.py mirrors them field by field.
#pragma once
#include <cstdint>

enum Dtype : int64_t { F32, BF16, F64 };
enum Kind : int64_t { AS_DTYPE, EIGHT_BITS };   // of a matrix
enum Act : int64_t { SILU, GELU_TANH, GELU };

// Output rows lie in panels of so many, side by side for each input: weight[panel][input][PANEL], padded with zeros. In bfloat16 two inputs
// of one output are neighbours: weight[panel][input / 2][PANEL][2].
constexpr int64_t PANEL = 32;

// Weights of 8 bits: so many inputs of an output share a scale. Block after block: a scale in bfloat16 for each output of the panel, then the
// inputs one by one, int8[input][PANEL]. The last block may be shorter, an even number of inputs.
constexpr int64_t SCALED = 32, SCALE_BYTES = 2 * PANEL, BLOCK_BYTES = SCALE_BYTES + SCALED * PANEL;

// bias: float, or double for F64, padded to whole panels; null for none.
struct Matrix {
    const void *weight;
    const void *bias;
    int64_t out, in, kind;
};

// x / rms(x) * weight. weight: float, or double for F64; null where there is no norm.
struct Norm {
    const void *weight;
    double eps;
    int64_t width;
};

// gate_up: a panel of gate, then the panel of up beside it, both padded. window: in Model::windows. table: of angles, in Pass::tables.
struct Layer {
    Norm attn_norm, q_norm, k_norm, attn_post_norm, mlp_norm, mlp_post_norm;
    Matrix qkv, out, gate_up, down;
    int64_t heads, kv_heads, head_dim, window, table, act;
    double scale;
};

// embedding: [vocab, hidden]; null where the head's panels are the embedding too.
struct Model {
    int64_t dtype, hidden, vocab, n_layers, n_windows;
    const Layer *layers;
    const int64_t *windows;        // tokens that a row sees; 0 for all
    Norm norm;
    Matrix head;
    const void *embedding;
    double embed_scale;
};

// cos, sin: [length, width], of each position, float or double as biases are; sin negated in its first half.
struct Table {
    const void *cos, *sin;
    int64_t width, length;
};

// One pass of `batch` texts with `rows` tokens each, through the layers first ... last - 1.
struct Pass {
    const int64_t *tokens;         // [batch, rows]; null: hidden goes into layer `first`
    const void *hidden;            // [batch, rows, H]
    void *hidden_out;              // what goes into layer `last`; null for none
    void *logits;                  // [batch, rows or 1, vocab]; null for none
    int64_t *choice;               // [batch], of the last row, with logits; null for none
    float *confidence;             // [batch], its probability
    int64_t batch, rows, first, last, last_only;
    const uint8_t *skip;           // [2 * n_layers], attention and MLP in turn; null: nothing is left out
    const int64_t *positions;      // [batch or 1, rows]
    int64_t positions_step;        // from one text to the next
    const int64_t *slots;
    int64_t slots_step;
    const uint8_t *visible;        // [batch or 1, rows, keys]; null: a row sees the slots up to its own
    int64_t visible_step, visible_row;
    const int64_t *key_positions;  // [batch or 1, keys]; null: as the slots are numbered, but for those of the pass
    int64_t key_positions_step;
    int64_t keys, capacity;
    void *const *k;                // of each layer: [batch, kv_heads, capacity, head_dim]
    void *const *v;
    const Table *tables;
    int64_t threads;
};
