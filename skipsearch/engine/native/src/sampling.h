// Draws the token of a draft step from the distribution of its logits.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

// Calls run(vector, index, lanes) for each vector of values [n]. `rest` fills up the last one.
template <class T, class Run>
inline void for_each_vector(const T *values, int64_t n, T rest, Run run) {
    int64_t i = 0;
    for (; i + LANES<T> <= n; i += LANES<T>) run(load(values + i), i, int64_t(LANES<T>));
    if (i == n) return;
    T last[LANES<T>];
    for (int64_t j = 0; j < LANES<T>; ++j) last[j] = i + j < n ? values[i + j] : rest;
    run(load(last), i, n - i);
}

// Turns logits [n] into weights e^((logit - largest logit) / temperature), of which the largest is
// 1. Returns false, and no weights, if a logit is NaN or the largest one is infinite.
template <class T> bool weigh_logits(const T *logits, int64_t n, Acc<T> temperature,
                                     Acc<T> *weights) {
    using A = Acc<T>;
    const T lowest = from_acc<T>(-A(__builtin_inf()));
    Vec<T> largest = Vec<T>{} - A(__builtin_inf()), is_nan = {};
    for_each_vector(logits, n, lowest, [&](Vec<T> x, int64_t, int64_t) {
        largest = x > largest ? x : largest;
        is_nan = x != x ? Vec<T>{} + A(1) : is_nan;
    });
    A max = largest[0];
    for (int lane = 0; lane < LANES<T>; ++lane) {
        if (is_nan[lane] != 0) return false;
        max = largest[lane] > max ? largest[lane] : max;
    }
    if (max - max != 0) return false;   // infinite
    for_each_vector(logits, n, lowest, [&](Vec<T> x, int64_t i, int64_t lanes) {
        const Vec<T> weight = exp_vec((x - max) / temperature);
        if (lanes == LANES<T>) store(weights + i, weight);
        else
            for (int64_t lane = 0; lane < lanes; ++lane) weights[i + lane] = weight[lane];
    });
    return true;
}

// Sets all weights to 0 but those of the `count` largest; equal ones stay together.
template <class A> void keep_largest(A *weights, int64_t n, int64_t count) {
    if (count >= n) return;
    std::vector<A> sorted(weights, weights + n);
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(),
                     [](A a, A b) { return a > b; });
    for (int64_t i = 0; i < n; ++i)
        if (weights[i] < sorted[size_t(count - 1)]) weights[i] = 0;
}

// Sets all weights to 0 but the largest ones, of which the last brings their share to at least
// `share`; of equal ones the first are kept. total: the sum of the weights.
template <class A> void keep_share(A *weights, int64_t n, double total, double share) {
    // All weights below `least` have a share of less than 1 - share together; half of it is for
    // rounding.
    const A least = A(total * (1 - share) / double(2 * n));
    std::vector<std::pair<A, int64_t>> heap;   // (weight, -index)
    for (int64_t i = 0; i < n; ++i) {
        if (weights[i] > 0 && weights[i] >= least) heap.emplace_back(weights[i], -i);
        else weights[i] = 0;
    }
    std::make_heap(heap.begin(), heap.end());
    double kept = 0;
    for (; !heap.empty() && kept < share * total; heap.pop_back()) {
        std::pop_heap(heap.begin(), heap.end());
        kept += double(heap.back().first);
    }
    for (const auto &[weight, negative_index] : heap) weights[-negative_index] = 0;
}

template <class A> double sum_of(const A *weights, int64_t n) {
    constexpr int64_t PARTS = 16;   // sums of their own, so that an addition waits for no other
    double sums[PARTS] = {}, sum = 0;
    int64_t i = 0;
    for (; i + PARTS <= n; i += PARTS)
        for (int64_t part = 0; part < PARTS; ++part) sums[part] += double(weights[i + part]);
    for (; i < n; ++i) sum += double(weights[i]);
    for (const double part : sums) sum += part;
    return sum;
}

// Fills in the distribution, and draws a row of the head from it. Logits without a finite largest
// one give each row the same probability.
template <class T> int64_t draw_row(const Draw &draw) {
    using A = Acc<T>;
    const Sampling &sampling = *draw.sampling;
    const int64_t n = draw.n_rows;
    A *probs = (A *)draw.probs;
    if (weigh_logits<T>((const T *)draw.logits, n, A(sampling.temperature), probs)) {
        if (sampling.top_k > 0) keep_largest(probs, n, sampling.top_k);
        if (sampling.top_p < 1) keep_share(probs, n, sum_of(probs, n), sampling.top_p);
    } else {
        std::fill(probs, probs + n, A(1));
    }
    const A scale = A(1 / sum_of(probs, n));
    for (int64_t i = 0; i < n; ++i) probs[i] *= scale;
    *draw.confidence = float(scale);   // the largest weight is 1
    const double point = draw.uniform * sum_of(probs, n);
    double sum = 0;
    int64_t drawn = 0;   // the last row with a probability that begins at or before the point
    for (int64_t i = 0; i < n && sum <= point; ++i)
        if (probs[i] > 0) drawn = i, sum += double(probs[i]);
    return drawn;
}

}  // namespace
