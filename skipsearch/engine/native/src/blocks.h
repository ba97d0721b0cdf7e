// The small steps of a sub-layer, a row or a head at a time.
#pragma once
#include "eights.h"

namespace {

constexpr int64_t ROWS = 128;   // of a longer pass, that go through a sub-layer together

// Memory handed out piece by piece; from null, to find how much it takes.
struct Arena {
    char *at;
    template <class X> X *take(int64_t count) {
        X *found = (X *)at;
        at += (count * int64_t(sizeof(X)) + 63) / 64 * 64;
        return found;
    }
};

// What one thread works in alone.
template <class T> struct Desk {
    In<T> *x;                  // normed rows
    Sum<T> *sums[2];           // of a panel
    Sum<T> *values;            // of the parts of attention
};

template <class A> inline A root(A x);
template <> inline float root(float x) { return __builtin_sqrtf(x); }
template <> inline double root(double x) { return __builtin_sqrt(x); }

// `count` sums as they are stored.
template <class T> inline void written(T *to, const Sum<T> *x, int64_t count) {
    int64_t d = 0;
    for (; d + LANES<T> <= count; d += LANES<T>) store_as(to + d, load(x + d));
    for (; d < count; ++d) to[d] = narrow<T>(x[d]);
}

// 1 / rms(x).
template <class A> inline A rms_scale(const A *x, int64_t width, double eps) {
    Vec<A> squares = {};
    int64_t d = 0;
    for (; d + LANES<A> <= width; d += LANES<A>) squares += load(x + d) * load(x + d);
    A sum = lanes_sum(squares);
    for (; d < width; ++d) sum += x[d] * x[d];
    return 1 / root<A>(sum / A(width) + A(eps));
}

template <class T> void normed_row(const Norm &norm, const Sum<T> *x, int64_t width, In<T> *to, int64_t step) {
    using A = Sum<T>;
    const A *weight = (const A *)norm.weight, scale = weight ? rms_scale<A>(x, width, norm.eps) : A(1);
    int64_t d = 0;
    for (; d + LANES<T> <= width; d += LANES<T>) store_input<T>(to + d, weight ? load(x + d) * scale * load(weight + d) : load(x + d));
    for (; d < width; ++d) to[d] = input<T>(weight ? x[d] * scale * weight[d] : x[d]);
    for (; d < step; ++d) to[d] = input<T>(0);
}

// Each stretch of the norm's width, in place.
template <class A> void normed_heads(const Norm &norm, A *x, int64_t width) {
    const A *weight = (const A *)norm.weight;
    for (int64_t at = 0; weight && at < width; at += norm.width) {
        const A scale = rms_scale<A>(x + at, norm.width, norm.eps);
        for (int64_t d = 0; d < norm.width; ++d) x[at + d] *= scale * weight[d];
    }
}

// Rotary embedding of one head: the pairs (a, b) of its first `width` dimensions become (a, b) cos + (b, a) sin.
template <class A> inline void turned(A *x, const A *cos, const A *sin, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; ++d) {
        const A a = x[d], b = x[d + half];
        x[d] = a * cos[d] + b * sin[d];
        x[d + half] = b * cos[d + half] + a * sin[d + half];
    }
}

template <class T> void biased(const Matrix &matrix, int64_t n, int64_t rows, Sum<T> *sums) {
    const Sum<T> *bias = (const Sum<T> *)matrix.bias;
    for (int64_t i = 0; bias && i < rows; ++i)
        for (int64_t j = 0; j < PANEL; ++j) sums[i * PANEL + j] += bias[n * PANEL + j];
}

// act(gate) * up, of a panel of one row.
template <class T> inline void gated(int64_t act, const Sum<T> *gate, const Sum<T> *up, In<T> *to) {
    for (int64_t j = 0; j < PANEL; j += LANES<T>) store_input<T>(to + j, activated(load(gate + j), act) * load(up + j));
}

// One weight of a matrix in panels.
template <class T> inline Sum<T> weight_at(const Matrix &matrix, int64_t out, int64_t in) {
    if (matrix.kind == EIGHT_BITS) {
        const char *block = (const char *)matrix.weight + out / PANEL * bytes_of<int8_t>((matrix.in + 1) / 2 * 2) + in / SCALED * BLOCK_BYTES;
        const float scale = wide(((const bf16 *)block)[out % PANEL]);
        return rounded<T>(Sum<T>(scale * float(((const int8_t *)block)[SCALE_BYTES + in % SCALED * PANEL + out % PANEL])));
    }
    const int64_t inputs = (matrix.in + STEP<T> - 1) / STEP<T> * STEP<T>;
    return wide(((const T *)matrix.weight)[(out / PANEL * inputs + in / STEP<T> * STEP<T>) * PANEL + out % PANEL * STEP<T> + in % STEP<T>]);
}

template <class T> void embedded(const Model &m, int64_t token, Sum<T> *to) {
    const T *row = m.embedding ? (const T *)m.embedding + token * m.hidden : nullptr;
    for (int64_t d = 0; d < m.hidden; ++d) {
        const Sum<T> found = row ? wide(row[d]) : weight_at<T>(m.head, token, d);
        to[d] = m.embed_scale == 1 ? found : rounded<T>(found * Sum<T>(m.embed_scale));
    }
}

// The token of the largest logit, the first of equals, and the sum of e^(logit - largest).
template <class A> struct Best {
    A most = -A(__builtin_inf()), sum = 0;
    int64_t index = 0;

    // A panel of logits, as they are handed on: rounded to T.
    template <class T> void look(const A *logits, int64_t first, int64_t width) {
        A l[PANEL];
        for (int64_t j = 0; j < PANEL; j += LANES<T>) store(l + j, rounded_all<T>(load(logits + j)));
        for (int64_t j = width; j < PANEL; ++j) l[j] = -A(__builtin_inf());
        Best here;
        for (int64_t j = 0; j < width; ++j)
            if (l[j] > here.most || l[j] != l[j]) here.most = l[j], here.index = first + j;
        Vec<A> sums = {};
        for (int64_t j = 0; j < PANEL; j += LANES<A>) sums += exps(load(l + j) - here.most);
        here.sum = lanes_sum(sums);
        look(here);
    }

    // What was found among later tokens.
    void look(const Best &later) {
        if (later.sum == 0) return;
        const bool larger = later.most > most || later.most != later.most;
        const A top = larger ? later.most : most;
        const Vec<A> scales = exps(Vec<A>{most - top, later.most - top});
        sum = sum * scales[0] + later.sum * scales[1];
        if (larger) most = later.most, index = later.index;
    }
};

}  // namespace
