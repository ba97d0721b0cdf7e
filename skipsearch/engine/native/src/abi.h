// The structs that Python fills in. ../structs.py mirrors them field by field, and ../layout.py
// lets the compiler compare the two.
#pragma once
#include <cstdint>

enum Dtype : int64_t { F32, BF16, F64 };
// How a panel stores its weights: in the model's dtype, or in blocks as blocks.h describes them.
enum PanelKind : int64_t {
    DENSE, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q4_K, Q5_K, Q6_K, Q3_K, IQ4_NL, IQ4_XS,
    MXFP4, Q2_K, IQ3_S, IQ3_XXS, IQ2_S
};
// How inputs of panels in blocks are rounded. INT16 uses two int8 numbers, of which one counts
// 128 times as much.
enum Activations : int64_t { INT8, INT16, FLOAT };
// How the cache stores K/V: in the model's dtype, or as Int8Row of kv_row.h.
enum KVFormat : int64_t { KV_DTYPE, KV_INT8 };
// CLAMPED_SWIGLU of (gate, up) is g * sigmoid(alpha * g) * (u + 1), where g is gate cut to at most
// `limit`, and u is up cut to -limit ... limit.
enum Activation : int64_t { SILU, GELU_TANH, GELU, CLAMPED_SWIGLU };

// Output rows in a panel. A weight matrix is stored panel by panel. A dense panel is
// [input][PANEL_ROWS], so that a vector load reads one input of neighbouring outputs. In bfloat16
// two inputs of one output are neighbours: [input / 2][PANEL_ROWS][2]. Missing outputs and inputs
// are zeros.
constexpr int64_t PANEL_ROWS = 32;
constexpr int64_t KV_GROUP = 32;   // int8 numbers of K/V that share a scale

struct Panel {
    const void *weight;            // aligned to 64 bytes
    int64_t kind;                  // PanelKind
};

struct Matrix {
    const Panel *panels;           // [ceil(out / PANEL_ROWS)]
    const void *bias;              // float (double for F64), padded to whole panels; null: no bias
    int64_t out, in;               // outputs and inputs, without padding
    int64_t has_blocks;            // 1: a panel is not dense
};

// RMSNorm: x / rms(x) * weight.
struct Norm {
    const void *weight;            // [width], float (double for F64); null: no norm
    double eps;
    int64_t width;
};

struct Layer {
    Norm attn_norm, q_norm, k_norm, attn_post_norm, mlp_norm, mlp_post_norm;
    Matrix qkv, out;
    Matrix gate_up;                // a panel of gate, then the same panel of up; both are padded
    Matrix down;
    int64_t heads, kv_heads, head_dim;
    int64_t window_index;          // in Model::windows
    int64_t rotary_index;          // in PassArgs::rotary_tables
    int64_t activation;            // Activation
    double alpha, limit;           // of CLAMPED_SWIGLU
    double scale;                  // of attention scores
    const double *query_factors;   // by which queries are multiplied, at `position / query_period`;
                                   // null: by none
    int64_t query_period;
    const void *sinks;             // [heads], float (double for F64): a score of each head that
                                   // only adds to the sum of the softmax; null: none
    Matrix router;                 // [n_experts, hidden_size]
    int64_t n_experts;             // 0: the MLP has none. Else gate_up has the panels of expert
                                   // after expert, and so has down
    int64_t experts_per_token;
    int64_t normalizes;            // 1: the weights of a row's experts have a sum of 1
    Matrix shared_gate_up;         // of an expert that all rows read, as gate_up
    Matrix shared_down;            // no outputs: there is no such expert
    Matrix shared_gate;            // [1, hidden_size]: its sigmoid weighs this expert
};

struct Model {
    int64_t dtype, hidden_size, vocab_size, n_layers, n_windows;
    const Layer *layers;
    const int64_t *windows;        // [n_windows] tokens that a row attends to; 0: all
    Norm norm;                     // before the head
    Matrix head;
    const void *embedding;         // [vocab_size, hidden_size] in the dtype, or null
    const Panel *embedding_panels; // the embedding in panels, if `embedding` is null
    double embed_scale;
    int64_t activations;           // Activations
    int64_t kv_format;             // KVFormat
};

// cos and sin of the rotary embedding, [length, width] by position, in float (double for F64).
// sin is negated in its first half.
struct RotaryTable {
    const void *cos, *sin;
    int64_t width, length;
};

// The input of a draft head's layer:
// projection * [embedding_norm(embedding of a token); hidden_norm(hidden state before it)].
struct InputMix {
    Norm embedding_norm, hidden_norm;
    Matrix projection;             // [hidden_size, 2 * hidden_size]
};

// How a draft draws its tokens: from softmax(logits / temperature), of which top_k and then top_p
// keep the most likely tokens.
struct Sampling {
    double temperature, top_p;     // top_p: 1: all tokens
    int64_t top_k;                 // 0: all tokens
    const double *uniforms;        // [tokens of the draft], each at least 0 and below 1
    void *probs;                   // [tokens of the draft, outputs of the head], the distributions;
                                   // float (double for F64)
};

// One pass over `batch` texts with `rows` tokens each, through layers first_layer to end_layer - 1.
// A batch stride is the number of elements from one text to the next; 0: all texts share one row.
struct PassArgs {
    const int64_t *tokens;         // [batch, rows]; null: the pass starts from `hidden`
    const void *hidden;            // [batch, rows, hidden_size], the input of first_layer
    void *hidden_out;              // [batch, rows, hidden_size], input of end_layer; may be null
    void *logits;                  // [batch, rows or 1, outputs of the head]; may be null
    int64_t *choice;               // [batch] most likely token of the last row; may be null
    float *confidence;             // [batch] probability of `choice`; may be null
    int64_t batch, rows;
    int64_t first_layer, end_layer;
    int64_t last_only;             // 1: only the last row of each text gets logits
    const uint8_t *skip;           // [n_layers, 2] for attention and MLP: 1 = skipped; null: none
    const int64_t *positions;      // [batch or 1, rows]
    int64_t positions_batch_stride;
    const int64_t *slots;          // [batch or 1, rows], where K/V of each token is written
    int64_t slots_batch_stride;
    const uint8_t *visible;        // [batch or 1, rows, n_keys]; null: each slot up to a row's own
    int64_t visible_batch_stride, visible_row_stride;
    const int64_t *key_positions;  // [batch or 1, n_keys]; null: slot i has position i, except for
                                   // the slots of this pass
    int64_t key_positions_batch_stride;
    int64_t n_keys;                // slots that rows may attend to
    int64_t capacity;              // slots of the cache
    void *const *k;                // [n_layers] pointers to [batch, kv_heads, capacity] rows of
                                   // head_dim keys in Model::kv_format
    void *const *v;                // the same of values
    const RotaryTable *rotary_tables;
    int64_t threads;
    const Matrix *head;            // rows of the head for some tokens; null: the model's own head
    const int64_t *head_tokens;    // [head->out] token of each row; null if `head` is null
    const InputMix *mix;           // of `tokens` and `hidden`; null: a pass starts from one of them
    const Sampling *sampling;      // of a draft of several steps; null: it is greedy
};

// y = x * matrix^T + bias, for arrays in the model's dtype. The matrix may have parts of as many
// whole panels each, such as experts; then each row is multiplied by one of them.
struct ProductArgs {
    const Matrix *matrix;
    const void *x;                 // [rows, in]
    void *y;                       // [rows, outputs of a part]
    int64_t rows, threads;
    int64_t activations;           // Activations
    int64_t n_parts;
    const int64_t *first_rows;     // [n_parts + 1], where the rows of a part begin; null: n_parts
                                   // is 1
};

// The short convolution of a layer with a recurrent state, and silu. All numbers are float.
struct ConvArgs {
    const float *mixed;            // [batch, channels, columns], of which the last `rows` columns
                                   // are of this pass
    const float *weight;           // [channels, kernel]
    const float *bias;             // [channels]; null: no bias
    int64_t batch, rows, channels, columns, kernel;
    int64_t threads;
};

// The layer of a gated delta net between its projections. conv: queries, keys and values.
struct DeltaNetArgs {
    ConvArgs conv;
    const float *gates;            // [batch, rows, value_heads, value_dim]
    const float *beta_logits;      // [batch, rows, value_heads]
    const float *steps;            // [batch, rows, value_heads], before bias and softplus
    const float *step_biases;      // [value_heads]
    const float *decay_rates;      // [value_heads]
    const float *norm_weight;      // [value_dim]
    double norm_eps;
    float *states;                 // [batch, value_heads, key_dim, value_dim], which are changed
    float *out;                    // [batch, rows, value_heads, value_dim]
    int64_t key_heads, value_heads, key_dim, value_dim;
};

// A layer of Mamba 2 between its projections, without its norm. conv: inputs, B and C.
struct MambaArgs {
    ConvArgs conv;
    const float *steps;            // [batch, rows, heads], before bias and softplus
    const float *step_biases;      // [heads]
    double min_step, max_step;
    const float *decay_rates;      // [heads]
    const float *skips;            // [heads], by which inputs are added to outputs
    float *states;                 // [batch, heads, head_dim, state_dim], which are changed
    float *out;                    // [batch, rows, heads, head_dim]
    int64_t heads, groups, head_dim, state_dim;
};

// Copies rows of a matrix out of its panels: to [n_rows, in], in the model's dtype.
struct ReadRowsArgs {
    const Matrix *matrix;
    const int64_t *rows;           // [n_rows] outputs
    int64_t n_rows;
    void *to;
};

// Copies rows of one matrix to rows of another, whose panels have the same kind and inputs.
struct CopyRowsArgs {
    const Panel *from;
    const int64_t *rows;           // [n_rows] outputs of `from`
    int64_t n_rows, in;
    const Panel *to;
    int64_t first_row;             // the output of `to` that the first row becomes
    int64_t itemsize;              // bytes of a weight in dense panels
};

// Rounds weights to blocks.
struct QuantizeArgs {
    const float *weights;          // [n_blocks, 32]
    int64_t n_blocks, bits;        // bits: 4 to 6, or 8
    void *blocks;                  // [n_blocks] UnpackedBlock
};

// Packs rows of blocks into panels of one kind.
struct PackArgs {
    const uint8_t *const *rows;    // [n_panels, PANEL_ROWS]; null: a row of zeros
    int64_t is_unpacked;           // 0: blocks as in a GGUF file; 1: UnpackedBlock
    int64_t n_panels, in, kind;
    void *panels;                  // the first panel; the others follow it
};
