// The operations of a sub-layer on one row, one head or one panel.
#pragma once
#include "matrix.h"

namespace {

constexpr int64_t ROWS_AT_ONCE = 128;   // rows that go through a sub-layer together

// Hands out memory piece by piece. An arena that starts at null only measures how much is needed.
struct Arena {
    char *next;
    template <class X> X *take(int64_t count) {
        X *piece = (X *)next;
        next += (count * int64_t(sizeof(X)) + 63) / 64 * 64;
        return piece;
    }
};

inline int64_t plane_count(int64_t activations) { return activations == INT16 ? 2 : 1; }

// Takes memory for rounded rows. stride: a multiple of GROUP_SIZE.
inline RoundedRows take_rounded(Arena &arena, int64_t activations, int64_t rows, int64_t stride) {
    const int64_t planes = plane_count(activations);
    const int64_t count = activations == FLOAT ? 0 : rows * planes * stride;
    return {arena.take<int8_t>(count), arena.take<int32_t>(count / (GROUP_SIZE / 2)),
            arena.take<float>(count / GROUP_SIZE), stride, planes};
}

// The experts that rows choose. A pair is a row and one of its experts. Pairs are ordered by
// expert, and those of an expert by row.
template <class A> struct Routes {
    A *logits;                 // [n_experts in whole panels] of one row
    int64_t *experts;          // [pairs] of row after row
    A *weights;                // [pairs] of row after row
    int64_t *rows;             // [pairs], ordered by expert
    A *pair_weights;           // [pairs], ordered by expert
    int64_t *first;            // [n_experts + 1] the first pair of each expert
    int64_t *active;           // [n_experts] the experts that have pairs
    int64_t n_active;
};

// Memory that one thread works in.
template <class T> struct ThreadScratch {
    Input<T> *x;               // [rows, x_stride] rows after a norm
    RoundedRows rounded;       // [rows, the larger stride of x and `mid`]
    Acc<T> *sums[2];           // [rows * planes, PANEL_ROWS] outputs of a panel
    Acc<T> *values;            // [QUERY_TILE + QUERY_SPAN, values_stride] sums of attention
    Acc<T> *row;               // [h_stride] one row that is mixed into the input, or null
    Input<T> *gathered;        // [pairs, x_stride] the row of each pair, or null
    Routes<Acc<T>> routes;     // if a layer has experts
};

template <class A> inline A scalar_sqrt(A x);
template <> inline float scalar_sqrt(float x) { return __builtin_sqrtf(x); }
template <> inline double scalar_sqrt(double x) { return __builtin_sqrt(x); }

// Stores `count` values as T.
template <class T> inline void store_as(T *to, const Acc<T> *x, int64_t count) {
    int64_t d = 0;
    for (; d + LANES<T> <= count; d += LANES<T>) store_as(to + d, load(x + d));
    for (; d < count; ++d) to[d] = from_acc<T>(x[d]);
}

// Returns 1 / rms(x).
template <class A> inline A inverse_rms(const A *x, int64_t width, double eps) {
    Vec<A> squares = {};
    int64_t d = 0;
    for (; d + LANES<A> <= width; d += LANES<A>) squares += load(x + d) * load(x + d);
    A sum = sum_lanes(squares);
    for (; d < width; ++d) sum += x[d] * x[d];
    return 1 / scalar_sqrt<A>(sum / A(width) + A(eps));
}

// Writes norm(x) to `to` as inputs, or x if there is no norm, and zeros from `width` to `stride`.
template <class T>
void rms_norm_row(const Norm &norm, const Acc<T> *x, int64_t width, Input<T> *to, int64_t stride) {
    using A = Acc<T>;
    const A *weight = (const A *)norm.weight;
    const A scale = weight ? inverse_rms<A>(x, width, norm.eps) : A(1);
    int64_t d = 0;
    for (; d + LANES<T> <= width; d += LANES<T>)
        store_input<T>(to + d, weight ? load(x + d) * scale * load(weight + d) : load(x + d));
    for (; d < width; ++d) to[d] = to_input<T>(weight ? x[d] * scale * weight[d] : x[d]);
    for (; d < stride; ++d) to[d] = to_input<T>(0);
}

// Applies the norm in place to each segment of norm.width values.
template <class A> void rms_norm_heads(const Norm &norm, A *x, int64_t width) {
    const A *weight = (const A *)norm.weight;
    for (int64_t start = 0; weight && start < width; start += norm.width) {
        const A scale = inverse_rms<A>(x + start, norm.width, norm.eps);
        for (int64_t d = 0; d < norm.width; ++d) x[start + d] *= scale * weight[d];
    }
}

// Applies the rotary embedding to the first `width` values of one head, in place. A pair (a, b)
// from the two halves becomes (a, b) * cos + (b, a) * sin.
template <class A> inline void apply_rope(A *x, const A *cos, const A *sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; ++d) {
        const A a = x[d], b = x[d + half];
        x[d] = a * cos[d] + b * sin[d];
        x[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

// Adds the outputs of a panel to `to`, which is rounded to T.
template <class T> void add_panel(const Acc<T> *outputs, Acc<T> *to) {
    for (int64_t j = 0; j < PANEL_ROWS; j += LANES<T>)
        store(to + j, round_vec_to<T>(load(to + j) + load(outputs + j)));
}

// Adds the bias of a panel to sums [rows, PANEL_ROWS], if the matrix has a bias.
template <class T>
void add_bias(const Matrix &matrix, int64_t panel, int64_t rows, Acc<T> *sums) {
    const Acc<T> *bias = (const Acc<T> *)matrix.bias;
    for (int64_t i = 0; bias && i < rows; ++i)
        for (int64_t j = 0; j < PANEL_ROWS; ++j)
            sums[i * PANEL_ROWS + j] += bias[panel * PANEL_ROWS + j];
}

// Writes activation(gate) * up, or CLAMPED_SWIGLU of both, for one row of a panel.
template <class T>
inline void act_mul(const Layer &layer, const Acc<T> *gate, const Acc<T> *up, Input<T> *to) {
    using A = Acc<T>;
    if (layer.activation != CLAMPED_SWIGLU) {
        for (int64_t j = 0; j < PANEL_ROWS; j += LANES<T>)
            store_input<T>(to + j, activate(load(gate + j), layer.activation) * load(up + j));
        return;
    }
    const Vec<T> limit = Vec<T>{} + A(layer.limit);
    for (int64_t j = 0; j < PANEL_ROWS; j += LANES<T>) {
        Vec<T> g = load(gate + j), u = load(up + j);
        g = g > limit ? limit : g;
        u = u > limit ? limit : (u < -limit ? -limit : u);
        store_input<T>(to + j, g / (A(1) + exp_vec(A(-layer.alpha) * g)) * (u + A(1)));
    }
}

// Adds the outputs of a panel, weighted, to `to`.
template <class T> inline void add_weighted(const Acc<T> *outputs, Acc<T> weight, Acc<T> *to) {
    for (int64_t j = 0; j < PANEL_ROWS; ++j) to[j] += weight * outputs[j];
}

// Returns one weight of a matrix, rounded to T.
template <class T> inline Acc<T> read_weight(const Panel *panels, int64_t out, int64_t in) {
    const Panel &panel = panels[out / PANEL_ROWS];
    const int64_t row = out % PANEL_ROWS;
    if (panel.kind != DENSE) return round_to<T>(Acc<T>(read_block_weight(panel, row, in)));
    constexpr int64_t S = STEP_INPUTS<T>;
    return to_acc(((const T *)panel.weight)[in / S * S * PANEL_ROWS + row * S + in % S]);
}

// Writes the embedding of a token to `to` [hidden_size].
template <class T> void load_embedding(const Model &model, int64_t token, Acc<T> *to) {
    const T *row =
        model.embedding ? (const T *)model.embedding + token * model.hidden_size : nullptr;
    for (int64_t d = 0; d < model.hidden_size; ++d) {
        const Acc<T> value =
            row ? to_acc(row[d]) : read_weight<T>(model.embedding_panels, token, d);
        to[d] = model.embed_scale == 1 ? value : round_to<T>(value * Acc<T>(model.embed_scale));
    }
}

template <class T> void load_hidden(const Model &model, const T *from, Acc<T> *to) {
    for (int64_t d = 0; d < model.hidden_size; ++d) to[d] = to_acc(from[d]);
}

// Writes [norm(embedding of a token); norm(hidden state)] of `rows` rows to x. row: memory for one.
template <class T>
void mix_rows(const Model &model, const InputMix &mix, const int64_t *tokens, const T *hidden,
              int64_t rows, Acc<T> *row, Input<T> *x, int64_t x_stride) {
    const int64_t width = model.hidden_size;
    for (int64_t i = 0; i < rows; ++i) {
        Input<T> *to = x + i * x_stride;
        load_embedding<T>(model, tokens[i], row);
        rms_norm_row<T>(mix.embedding_norm, row, width, to, width);
        load_hidden<T>(model, hidden + i * width, row);
        rms_norm_row<T>(mix.hidden_norm, row, width, to + width, x_stride - width);
    }
}

// Finds the token with the largest logit (the first one if several are equal), and the sum of
// e^(logit - largest logit), from which its probability follows. A NaN counts as the largest.
template <class A> struct ArgmaxAcc {
    A max = -A(__builtin_inf()), sum = 0;
    int64_t index = 0;

    // Takes in a panel of `width` logits, the first of which is that of token `first`. They are
    // rounded to T, as the caller gets them.
    template <class T> void update(const A *logits, int64_t first, int64_t width) {
        A l[PANEL_ROWS];
        for (int64_t j = 0; j < PANEL_ROWS; j += LANES<T>)
            store(l + j, round_vec_to<T>(load(logits + j)));
        for (int64_t j = width; j < PANEL_ROWS; ++j) l[j] = -A(__builtin_inf());
        ArgmaxAcc panel;
        for (int64_t j = 0; j < width; ++j)
            if (l[j] > panel.max || l[j] != l[j]) panel.max = l[j], panel.index = first + j;
        Vec<A> sums = {};
        for (int64_t j = 0; j < PANEL_ROWS; j += LANES<A>) sums += exp_vec(load(l + j) - panel.max);
        panel.sum = sum_lanes(sums);
        update(panel);
    }

    // Takes in the result for later tokens.
    void update(const ArgmaxAcc &later) {
        if (later.sum == 0) return;
        const bool is_larger = later.max > max || later.max != later.max;
        const A new_max = is_larger ? later.max : max;
        const Vec<A> scales = exp_vec(Vec<A>{max - new_max, later.max - new_max});
        sum = sum * scales[0] + later.sum * scales[1];
        if (is_larger) max = later.max, index = later.index;
    }
};

}  // namespace
