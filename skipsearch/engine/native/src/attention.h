// Attention over the slot cache. Keys are taken in blocks of BLOCK entries of a row's own text; what a row gets of a block does not depend on
// the other rows, and the blocks of a row are merged in order, so that threads may take them apart.
#pragma once
#include "matrix.h"
#include "kernels.h"

namespace {

constexpr int64_t BLOCK = KEYS_AT_ONCE;
constexpr int TOGETHER = 4;            // heads of queries that share what is read

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

template <class T, int WIDTH> inline Sum<T> dot(const Sum<T> *q, const T *key, int64_t any_width) {
    const int64_t width = WIDTH ? WIDTH : any_width;
    Vec<T> acc = {};
    int64_t d = 0;
#pragma GCC unroll 16
    for (; d + LANES<T> <= width; d += LANES<T>) acc += load(q + d) * load(key + d);
    Sum<T> found = lanes_sum(acc);
    for (; d < width; ++d) found += q[d] * wide(key[d]);
    return found;
}

// Scores of the keys from ... to - 1. The usual widths have loops of their own, of the same sums.
template <class T, int WIDTH> void score_all(const Sum<T> *q, const T *keys, int64_t width, int64_t from, int64_t to, Sum<T> scale, Sum<T> *scores) {
#pragma GCC unroll 4
    for (int64_t i = from; i < to; ++i) scores[i] = scale * dot<T, WIDTH>(q, keys + i * width, width);
}
template <class T> void score(const Sum<T> *q, const T *keys, int64_t width, int64_t from, int64_t to, Sum<T> scale, Sum<T> *scores) {
    if (width == 64) score_all<T, 64>(q, keys, width, from, to, scale, scores);
    else if (width == 128) score_all<T, 128>(q, keys, width, from, to, scale, scores);
    else score_all<T, 0>(q, keys, width, from, to, scale, scores);
}

// Fetches BYTES of the entry that stands DISTANCE behind entry i: one of `entries`, or behind `to` one of `then`; null for none.
template <class T, int BYTES> inline void fetch(const T *entries, const T *then, int64_t width, int64_t i, int64_t to) {
    const int64_t distance = AHEAD / (width * int64_t(sizeof(T)));
    if (i + distance >= to && !then) return;
    const char *at = (const char *)(i + distance < to ? entries + (i + distance) * width : then + (i + distance - to) * width);
#pragma GCC unroll 16
    for (int line = 0; line < BYTES; line += LINE) __builtin_prefetch(at + line, 0, 3);
}

// V vectors of the values from d on, by N weights each [BLOCK] of the entries from ... to - 1. then: what is read next.
template <class T, int N, int V>
inline void gather(const T *values, const T *then, int64_t width, int64_t d, int64_t from, int64_t to, const Sum<T> *const *weights,
                   Sum<T> *const *into) {
    Vec<T> acc[N][V];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[n][v] = load(into[n] + d + v * LANES<T>);
    for (int64_t i = from; i < to; ++i) {
        const T *value = values + i * width + d;
        fetch<T, V * LANES<T> * int(sizeof(T))>(values + d, then ? then + d : nullptr, width, i, to);
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
void weigh(const T *values, const T *then, int64_t width, int64_t from, int64_t to, const Sum<T> *const *weights, Sum<T> *const *into) {
    int64_t d = 0;
    for (; d + 4 * LANES<T> <= width; d += 4 * LANES<T>) gather<T, N, 4>(values, then, width, d, from, to, weights, into);
    for (; d + LANES<T> <= width; d += LANES<T>) gather<T, N, 1>(values, then, width, d, from, to, weights, into);
    for (; d < width; ++d)
        for (int n = 0; n < N; ++n)
            for (int64_t i = from; i < to; ++i) into[n][d] += weights[n][i] * wide(values[i * width + d]);
}

// The same of N queries at once, N a power of two: keys are read once for all of them, and sums of lanes are taken together.
template <class T, int WIDTH, int N>
void score_tiles(const Query<T> *queries, const T *keys, const T *then, int64_t from, int64_t to, Sum<T> scale, Sum<T> (*scores)[BLOCK]) {
    constexpr int KEYS = LANES<T> / N, VECTORS = WIDTH / LANES<T>;
    for (int64_t i = from; i < to; i += KEYS) {
        Vec<T> sums[LANES<T>] = {};
        fetch<T, KEYS * WIDTH * int(sizeof(T))>(keys, then, WIDTH, i, to);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            Vec<T> q[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) q[n] = load(queries[n].q + v * LANES<T>);
#pragma GCC unroll 16
            for (int k = 0; k < KEYS; ++k) {
                const Vec<T> key = load(keys + (i + k) * WIDTH + v * LANES<T>);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[n * KEYS + k] += q[n] * key;
            }
        }
        Sum<T> found[LANES<T>];
        store(found, all_lanes_sums(sums) * scale);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) __builtin_memcpy(scores[n] + i, found + n * KEYS, KEYS * sizeof(Sum<T>));
    }
}

// Scores of N queries, from[n] ... to[n] - 1 of each.
template <class T, int N>
void score_some(const Query<T> *queries, const T *keys, const T *then, int64_t width, const int64_t *from, const int64_t *to, Sum<T> scale,
                Sum<T> (*scores)[BLOCK]) {
    int64_t low = 0, high = BLOCK;   // what all have
    for (int n = 0; n < N; ++n) low = from[n] > low ? from[n] : low, high = to[n] < high ? to[n] : high;
    if (low > high || (N & (N - 1)) || N > LANES<T> || (width != 64 && width != 128)) high = low;
    if constexpr ((N & (N - 1)) == 0 && N <= LANES<T>) {
        high = low + (high - low) / (LANES<T> / N) * (LANES<T> / N);
        if (width == 64 && low < high) score_tiles<T, 64, N>(queries, keys, then, low, high, scale, scores);
        if (width == 128 && low < high) score_tiles<T, 128, N>(queries, keys, then, low, high, scale, scores);
    }
    for (int n = 0; n < N; ++n) {
        if (low < high && from[n] < low) score<T>(queries[n].q, keys, width, from[n], low, scale, scores[n]);
        const int64_t rest = low < high && high > from[n] ? high : from[n];
        if (rest < to[n]) score<T>(queries[n].q, keys, width, rest, to[n], scale, scores[n]);
    }
}

// What one query has in a block: slots that are entries of the same number, from low to high, then `extra` ones up to last.
struct Stretch {
    int64_t low, high, last;
    const int32_t *extra;

    Stretch(const Seen &seen, int64_t begin) : extra(seen.extra) {
        low = within(seen.first - begin), high = within(seen.prefix - begin), last = within(seen.count - begin);
        if (low > high) low = high;
        if (extra) extra += begin + high - seen.prefix;
    }

  private:
    static int64_t within(int64_t n) { return n < 0 ? 0 : n > BLOCK ? BLOCK : n; }
};

// Turns scores [from, to) into e^(score - largest). The vectors that they lie in are filled up with scores of nothing.
template <class T> void weights_of(Sum<T> *scores, int64_t from, int64_t to, Part<Sum<T>> &part) {
    using A = Sum<T>;
    const int64_t low = from / LANES<T> * LANES<T>, high = (to + LANES<T> - 1) / LANES<T> * LANES<T>;
    for (int64_t i = low; i < from; ++i) scores[i] = -A(__builtin_inf());
    for (int64_t i = to; i < high; ++i) scores[i] = -A(__builtin_inf());
    Vec<T> tops = Vec<T>{} - A(__builtin_inf()), sums = {};
    for (int64_t i = low; i < high; i += LANES<T>) {
        const Vec<T> s = load(scores + i);
        tops = s > tops ? s : tops;
    }
    part.most = tops[0];
    for (int lane = 1; lane < LANES<T>; ++lane) part.most = tops[lane] > part.most ? tops[lane] : part.most;
    const A most = part.most > -A(__builtin_inf()) ? part.most : A(0);   // of nothing but hidden entries
    for (int64_t i = low; i < high; i += LANES<T>) {
        const Vec<T> e = exps(load(scores + i) - most);
        store(scores + i, e);
        sums += e;
    }
    part.sum = lanes_sum(sums);
}

// Up to TOGETHER queries over entries block * BLOCK ... of one head of keys and values [capacity, D]. parts[n].values are overwritten.
// then: the keys that are read next; null for none.
template <class T, int N>
void attend(const Query<T> *queries, const T *keys, const T *values, const T *then, int64_t width, int64_t block, Sum<T> scale,
            Part<Sum<T>> *parts) {
    using A = Sum<T>;
    const int64_t begin = block * BLOCK;
    keys += begin * width, values += begin * width;
    alignas(64) A weights[N][BLOCK], extra[N][BLOCK];
    const A *shared[N];
    A *into[N];
    int64_t from = BLOCK, to = 0;
    int64_t lows[N], highs[N];
    for (int n = 0; n < N; ++n) {
        const Stretch own(*queries[n].seen, begin);
        lows[n] = own.low, highs[n] = own.high;
    }
    score_some<T, N>(queries, keys, values, width, lows, highs, scale, weights);
    for (int n = 0; n < N; ++n) {
        const Stretch own(*queries[n].seen, begin);
        for (int64_t i = own.high; i < own.last; ++i) {
            const int32_t slot = own.extra[i - own.high];
            weights[n][i] = -A(__builtin_inf());
            if (slot >= 0) score<T>(queries[n].q, keys + (slot - begin - i) * width, width, i, i + 1, scale, weights[n]);
        }
        weights_of<T>(weights[n], own.low, own.last, parts[n]);
        for (int64_t i = own.high; i < own.last; ++i) extra[n][i] = weights[n][i];
        for (int64_t d = 0; d < width; ++d) parts[n].values[d] = 0;
        shared[n] = weights[n], into[n] = parts[n].values;
        if (own.low < own.high) from = own.low < from ? own.low : from, to = own.high > to ? own.high : to;
    }
    for (int n = 0; n < N; ++n) {   // where others have entries and this one has none
        const Stretch own(*queries[n].seen, begin);
        for (int64_t i = from; i < own.low && i < to; ++i) weights[n][i] = 0;
        for (int64_t i = own.high > from ? own.high : from; i < to; ++i) weights[n][i] = 0;
    }
    if (from < to) weigh<T, N>(values, then, width, from, to, shared, into);
    for (int n = 0; n < N; ++n) {
        const Stretch own(*queries[n].seen, begin);
        for (int64_t i = own.high; i < own.last; ++i) {
            const int32_t slot = own.extra[i - own.high];
            const A *one = &extra[n][i];
            if (slot >= 0) weigh<T, 1>(values + (slot - begin) * width, nullptr, width, 0, 1, &one, &into[n]);
        }
    }
}

template <class T, int N = TOGETHER>
void attend_some(int64_t count, const Query<T> *queries, const T *keys, const T *values, const T *then, int64_t width, int64_t block,
                 Sum<T> scale, Part<Sum<T>> *parts) {
    if constexpr (N > 0) {
        if (count == N) return attend<T, N>(queries, keys, values, then, width, block, scale, parts);
        attend_some<T, N - 1>(count, queries, keys, values, then, width, block, scale, parts);
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
