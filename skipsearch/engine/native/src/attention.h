// Attention over the slot cache. Keys are taken in blocks of BLOCK entries of a row's own text; what a row gets of a block does not depend on
// the other rows, and the blocks of a row are merged in order, so that threads may take them apart.
#pragma once
#include "matrix.h"
#include "kernels.h"

namespace {

constexpr int64_t BLOCK = KEYS_AT_ONCE;
constexpr int TOGETHER = 4;   // heads of queries that share what is read

// One head of one row.
template <class T> struct Query {
    const Sum<T> *q;
    const Seen *seen;
    int64_t row, head;
};

// Of some entries: the largest score, the sum of e^(score - largest), and the values by these weights, [D].
template <class A> struct Part {
    A most, sum;
    A *values;
};

template <class T> inline Sum<T> dot(const Sum<T> *q, const T *key, int64_t width) {
    Vec<T> acc = {};
    int64_t d = 0;
    for (; d + LANES<T> <= width; d += LANES<T>) acc += load(q + d) * load(key + d);
    Sum<T> found = lanes_sum(acc);
    for (; d < width; ++d) found += q[d] * wide(key[d]);
    return found;
}

// V vectors of the values from d on, by N weights each [BLOCK] of the entries from ... to - 1.
template <class T, int N, int V>
inline void gather(const T *values, int64_t width, int64_t d, int64_t from, int64_t to, const Sum<T> *const *weights, Sum<T> *const *into) {
    Vec<T> acc[N][V];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[n][v] = load(into[n] + d + v * LANES<T>);
    for (int64_t i = from; i < to; ++i) {
        const T *value = values + i * width + d;
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const Vec<T> read = load(value + v * LANES<T>);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[n][v] += read * weights[n][i];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) store(into[n] + d + v * LANES<T>, acc[n][v]);
}

template <class T, int N>
void weigh(const T *values, int64_t width, int64_t from, int64_t to, const Sum<T> *const *weights, Sum<T> *const *into) {
    int64_t d = 0;
    for (; d + 4 * LANES<T> <= width; d += 4 * LANES<T>) gather<T, N, 4>(values, width, d, from, to, weights, into);
    for (; d + LANES<T> <= width; d += LANES<T>) gather<T, N, 1>(values, width, d, from, to, weights, into);
    for (; d < width; ++d)
        for (int n = 0; n < N; ++n)
            for (int64_t i = from; i < to; ++i) into[n][d] += weights[n][i] * wide(values[i * width + d]);
}

// Up to TOGETHER queries over entries block * BLOCK ... of one head of keys and values [capacity, D]. parts[n].values are overwritten.
template <class T, int N>
void attend(const Query<T> *queries, const T *keys, const T *values, int64_t width, int64_t block, Sum<T> scale, Part<Sum<T>> *parts) {
    using A = Sum<T>;
    const int64_t begin = block * BLOCK, end = begin + BLOCK;
    alignas(64) A weights[N][BLOCK], extra[N][BLOCK];   // of the slots that are entries of the same number, and of the others
    const A *shared[N];
    A *into[N];
    int64_t from = end, to = begin;
    for (int n = 0; n < N; ++n) {
        const Seen &seen = *queries[n].seen;
        const int64_t low = seen.first > begin ? seen.first : begin, high = seen.prefix < end ? seen.prefix : end;
        const int64_t last = seen.count < end ? seen.count : end;
        for (int64_t i = 0; i < BLOCK; ++i) weights[n][i] = -A(__builtin_inf());
        for (int64_t i = low; i < high; ++i) weights[n][i - begin] = scale * dot<T>(queries[n].q, keys + i * width, width);
        for (int64_t i = begin > seen.prefix ? begin : seen.prefix; i < last; ++i) {
            const int32_t slot = seen.extra[i - seen.prefix];
            if (slot >= 0) weights[n][i - begin] = scale * dot<T>(queries[n].q, keys + slot * width, width);
        }
        Part<A> &part = parts[n];
        part.most = -A(__builtin_inf());
        for (int64_t i = 0; i < BLOCK; ++i) part.most = weights[n][i] > part.most ? weights[n][i] : part.most;
        const A most = part.most > -A(__builtin_inf()) ? part.most : A(0);
        Vec<T> sum = {};
        for (int64_t i = 0; i < BLOCK; i += LANES<T>) {
            const Vec<T> e = exps(load(&weights[n][i]) - most);
            store(&weights[n][i], e);
            sum += e;
        }
        part.sum = lanes_sum(sum);
        for (int64_t i = begin > seen.prefix ? begin : seen.prefix; i < last; ++i) {
            extra[n][i - begin] = weights[n][i - begin];
            weights[n][i - begin] = 0;
        }
        for (int64_t d = 0; d < width; ++d) part.values[d] = 0;
        shared[n] = weights[n], into[n] = part.values;
        if (low < high) from = low < from ? low : from, to = high > to ? high : to;
    }
    if (from < to) weigh<T, N>(values + begin * width, width, from - begin, to - begin, shared, into);
    for (int n = 0; n < N; ++n) {
        const Seen &seen = *queries[n].seen;
        const int64_t last = seen.count < end ? seen.count : end;
        for (int64_t i = begin > seen.prefix ? begin : seen.prefix; i < last; ++i) {
            const int32_t slot = seen.extra[i - seen.prefix];
            const A *one = &extra[n][i - begin];
            if (slot >= 0) weigh<T, 1>(values + slot * width, width, 0, 1, &one, &into[n]);
        }
    }
}

template <class T, int N = TOGETHER>
void attend_some(int64_t count, const Query<T> *queries, const T *keys, const T *values, int64_t width, int64_t block, Sum<T> scale,
                 Part<Sum<T>> *parts) {
    if constexpr (N > 0) {
        if (count == N) return attend<T, N>(queries, keys, values, width, block, scale, parts);
        attend_some<T, N - 1>(count, queries, keys, values, width, block, scale, parts);
    }
}

// Adds a later part to the ones before it, which it is overwritten with where there are none.
template <class A> void merge(Part<A> &before, const Part<A> &part, int64_t width) {
    if (part.sum == 0) return;
    if (before.sum == 0) {
        before.most = part.most, before.sum = part.sum;
        for (int64_t d = 0; d < width; ++d) before.values[d] = part.values[d];
        return;
    }
    const A most = part.most > before.most ? part.most : before.most;
    const Vec<A> scales = exps(Vec<A>{before.most - most, part.most - most});
    const A old = scales[0], own = scales[1];
    before.most = most, before.sum = before.sum * old + part.sum * own;
    for (int64_t d = 0; d < width; ++d) before.values[d] = before.values[d] * old + part.values[d] * own;
}

inline int64_t blocks_of(const Seen &seen) { return (seen.count + BLOCK - 1) / BLOCK; }

}  // namespace
