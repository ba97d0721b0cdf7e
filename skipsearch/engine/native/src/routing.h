// The choice of experts, and its inverse: the rows of each expert.
#pragma once
#include "layer_ops.h"

namespace {

// Turns logits [count], padded with -infinity to whole panels, into probabilities.
template <class A> void softmax(A *logits, int64_t count) {
    const int64_t padded = (count + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    A max = logits[0], sum = 0;
    for (int64_t e = 1; e < count; ++e) max = logits[e] > max ? logits[e] : max;
    for (int64_t e = 0; e < padded; e += LANES<A>)
        store(logits + e, exp_vec(load(logits + e) - max));
    for (int64_t e = 0; e < count; ++e) sum += logits[e];
    for (int64_t e = 0; e < count; ++e) logits[e] /= sum;
}

// Chooses the experts with the largest probabilities (the first one of equal ones) and weighs them.
// Probabilities are float, as in the models of transformers.
template <class A>
void choose_experts(const Layer &layer, A *probs, int64_t *experts, A *weights) {
    A sum = 0;
    for (int64_t k = 0; k < layer.experts_per_token; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < layer.n_experts; ++e)
            if (probs[e] >= 0 && (best < 0 || probs[e] > probs[best])) best = e;
        if (best < 0)   // all others are NaN: their order does not matter, but each is chosen once
            for (best = 0; best < layer.n_experts && probs[best] == -1; ++best) {}
        experts[k] = best, weights[k] = A(float(probs[best])), sum += weights[k];
        probs[best] = -1;
    }
    for (int64_t k = 0; layer.normalizes && k < layer.experts_per_token; ++k)
        weights[k] = A(float(weights[k] / sum));
}

// Orders the pairs of `count` rows by expert.
template <class A> void order_pairs(const Layer &layer, int64_t count, Routes<A> &routes) {
    const int64_t k = layer.experts_per_token, n_pairs = count * k;
    for (int64_t e = 0; e <= layer.n_experts; ++e) routes.first[e] = 0;
    for (int64_t p = 0; p < n_pairs; ++p) ++routes.first[routes.experts[p] + 1];
    routes.n_active = 0;
    for (int64_t e = 0; e < layer.n_experts; ++e) {
        if (routes.first[e + 1]) routes.active[routes.n_active++] = e;
        routes.first[e + 1] += routes.first[e];
    }
    // `first` moves on to the end of each expert's pairs, and back afterwards.
    for (int64_t p = 0; p < n_pairs; ++p) {
        const int64_t to = routes.first[routes.experts[p]]++;
        routes.rows[to] = p / k, routes.pair_weights[to] = routes.weights[p];
    }
    for (int64_t e = layer.n_experts; e > 0; --e) routes.first[e] = routes.first[e - 1];
    routes.first[0] = 0;
}

// Chooses the experts of the rows x [rows, stride], orders the pairs, and copies the row of each
// pair to `gathered`. sums: [PANEL_ROWS].
template <class T>
void route_rows(const Layer &layer, const Input<T> *x, int64_t stride, int64_t rows, Acc<T> *sums,
                Routes<Acc<T>> &routes, Input<T> *gathered) {
    using A = Acc<T>;
    const int64_t k = layer.experts_per_token;
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t n = 0; n < panel_count(layer.router); ++n) {
            multiply_panel<T>(layer.router, n, {x + i * stride, stride, 1, nullptr}, sums);
            add_bias<T>(layer.router, n, 1, sums);
            for (int64_t j = 0, e = n * PANEL_ROWS; j < PANEL_ROWS; ++j, ++e)
                routes.logits[e] =
                    e < layer.n_experts ? round_to<T>(sums[j]) : -A(__builtin_inf());
        }
        softmax<A>(routes.logits, layer.n_experts);
        choose_experts<A>(layer, routes.logits, routes.experts + i * k, routes.weights + i * k);
    }
    order_pairs<A>(layer, rows, routes);
    for (int64_t p = 0; p < rows * k; ++p)
        __builtin_memcpy(gathered + p * stride, x + routes.rows[p] * stride,
                         size_t(stride) * sizeof(Input<T>));
}

}  // namespace
