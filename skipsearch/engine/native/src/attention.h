// Attention over the KV cache. A row's keys are taken in blocks of KEY_BLOCK entries of the row's
// own text. The result of a block does not depend on the other rows, and a row's blocks are merged
// in order. So different threads may compute the blocks of one row, and the bits stay the same.
#pragma once
#include "kernels.h"
#include "kv_row.h"
#include "matrix.h"

namespace {

constexpr int QUERY_TILE = 4;   // queries that share what is read

// One query head of one row.
template <class T> struct QueryRow {
    const Acc<T> *q;                   // [head_dim]
    const VisibleKeys *visible_keys;
    int64_t row, head;
};

// A softmax over some of the keys: the largest score, the sum of e^(score - max), and the sum of
// values weighted by e^(score - max), [head_dim].
template <class A> struct PartialSoftmax {
    A max, sum;
    A *values;
};

// The number type of a row of K/V, Row, is Row::Number. Keys and values are [capacity] rows.
template <class Row> using NumberOf = typename Row::Number;

// Returns q * key. WIDTH is the head_dim if it is known at compile time, or 0.
template <class Row, int WIDTH, class T = NumberOf<Row>>
inline Acc<T> dot(const Acc<T> *q, const char *key, int64_t run_time_width) {
    const int64_t width = WIDTH ? WIDTH : run_time_width;
    Vec<T> acc = {};
    int64_t d = 0;
#pragma GCC unroll 16
    for (; d + LANES<T> <= width; d += LANES<T>)
        acc += load(q + d) * Row::load_from(key, width, d);
    Acc<T> sum = sum_lanes(acc);
    for (; d < width; ++d) sum += q[d] * Row::read(key, width, d);
    return sum;
}

template <class Row, int WIDTH, class T = NumberOf<Row>>
void score_keys_of_width(const Acc<T> *q, const char *keys, int64_t width, int64_t from,
                         int64_t to, Acc<T> scale, Acc<T> *scores) {
#pragma GCC unroll 4
    for (int64_t i = from; i < to; ++i)
        scores[i] = scale * dot<Row, WIDTH>(q, keys + i * Row::bytes(width), width);
}

// Writes the scores of keys from ... to - 1. The usual widths have loops of their own, which sum in
// the same order.
template <class Row, class T = NumberOf<Row>>
void score_keys(const Acc<T> *q, const char *keys, int64_t width, int64_t from, int64_t to,
                Acc<T> scale, Acc<T> *scores) {
    if (width == 64) score_keys_of_width<Row, 64>(q, keys, width, from, to, scale, scores);
    else if (width == 128) score_keys_of_width<Row, 128>(q, keys, width, from, to, scale, scores);
    else score_keys_of_width<Row, 0>(q, keys, width, from, to, scale, scores);
}

// Prefetches BYTES bytes of the entry that is PREFETCH_BYTES after entry i. An entry at or after
// `to` is counted from `next` on. entries, next: the first byte of entry 0. next: what is read
// after these entries; null: nothing.
template <int BYTES>
inline void prefetch_entry(const char *entries, const char *next, int64_t entry_bytes, int64_t i,
                           int64_t to) {
    const int64_t distance = PREFETCH_BYTES / entry_bytes;
    if (i + distance >= to && !next) return;
    const char *address = i + distance < to ? entries + (i + distance) * entry_bytes
                                            : next + (i + distance - to) * entry_bytes;
#pragma GCC unroll 16
    for (int line = 0; line < BYTES; line += CACHE_LINE) __builtin_prefetch(address + line, 0, 3);
}

// As accumulate_values, for the V vectors of values from dimension d on.
template <class Row, int N, int V, class T = NumberOf<Row>>
inline void accumulate_vectors(const char *values, const char *next, int64_t width, int64_t d,
                               int64_t from, int64_t to, const Acc<T> *const *weights,
                               Acc<T> *const *sums) {
    constexpr int BYTES = V * LANES<T> * int(Row::number_bytes);
    const int64_t entry_bytes = Row::bytes(width), offset = d * Row::number_bytes;
    Vec<T> acc[N][V];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[n][v] = load(sums[n] + d + v * LANES<T>);
    for (int64_t i = from; i < to; ++i) {
        const char *value = values + i * entry_bytes;
        prefetch_entry<BYTES>(values + offset, next ? next + offset : nullptr, entry_bytes, i, to);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const Vec<T> vec = Row::load_from(value, width, d + v * LANES<T>);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) acc[n][v] += vec * weights[n][i];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) store(sums[n] + d + v * LANES<T>, acc[n][v]);
}

// Adds the values of entries from ... to - 1, weighted by weights[n] [KEY_BLOCK], to sums[n]
// [width], for each of N queries. next: what is read afterwards; null: nothing.
template <class Row, int N, class T = NumberOf<Row>>
void accumulate_values(const char *values, const char *next, int64_t width, int64_t from,
                       int64_t to, const Acc<T> *const *weights, Acc<T> *const *sums) {
    int64_t d = 0;
    for (; d + 4 * LANES<T> <= width; d += 4 * LANES<T>)
        accumulate_vectors<Row, N, 4>(values, next, width, d, from, to, weights, sums);
    for (; d + LANES<T> <= width; d += LANES<T>)
        accumulate_vectors<Row, N, 1>(values, next, width, d, from, to, weights, sums);
    for (; d < width; ++d)
        for (int n = 0; n < N; ++n)
            for (int64_t i = from; i < to; ++i)
                sums[n][d] += weights[n][i] * Row::read(values + i * Row::bytes(width), width, d);
}

// Writes the scores of keys from ... to - 1 for N queries, N a power of two. Each key is read once
// for all queries. The lane sums of all products of a tile are taken together.
template <class Row, int WIDTH, int N, class T = NumberOf<Row>>
void score_tiles(const QueryRow<T> *queries, const char *keys, const char *next, int64_t from,
                 int64_t to, Acc<T> scale, Acc<T> (*scores)[KEY_BLOCK]) {
    constexpr int KEYS = LANES<T> / N, VECTORS = WIDTH / LANES<T>;
    constexpr int64_t ENTRY_BYTES = Row::bytes(WIDTH);
    for (int64_t i = from; i < to; i += KEYS) {
        Vec<T> sums[LANES<T>] = {};
        prefetch_entry<KEYS * int(ENTRY_BYTES)>(keys, next, ENTRY_BYTES, i, to);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) {
            Vec<T> q[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) q[n] = load(queries[n].q + v * LANES<T>);
#pragma GCC unroll 16
            for (int k = 0; k < KEYS; ++k) {
                const Vec<T> key =
                    Row::load_from(keys + (i + k) * ENTRY_BYTES, WIDTH, v * LANES<T>);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sums[n * KEYS + k] += q[n] * key;
            }
        }
        Acc<T> tile[LANES<T>];   // [N, KEYS]
        store(tile, sum_lanes_of_each(sums) * scale);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            __builtin_memcpy(scores[n] + i, tile + n * KEYS, KEYS * sizeof(Acc<T>));
    }
}

// Writes the scores of keys from[n] ... to[n] - 1 for query n of N.
template <class Row, int N, class T = NumberOf<Row>>
void score_queries(const QueryRow<T> *queries, const char *keys, const char *next, int64_t width,
                   const int64_t *from, const int64_t *to, Acc<T> scale,
                   Acc<T> (*scores)[KEY_BLOCK]) {
    int64_t low = 0, high = KEY_BLOCK;   // the keys that all queries attend to
    for (int n = 0; n < N; ++n)
        low = from[n] > low ? from[n] : low, high = to[n] < high ? to[n] : high;
    if (low > high || (N & (N - 1)) || N > LANES<T> || (width != 64 && width != 128)) high = low;
    if constexpr ((N & (N - 1)) == 0 && N <= LANES<T>) {
        high = low + (high - low) / (LANES<T> / N) * (LANES<T> / N);
        if (width == 64 && low < high)
            score_tiles<Row, 64, N>(queries, keys, next, low, high, scale, scores);
        if (width == 128 && low < high)
            score_tiles<Row, 128, N>(queries, keys, next, low, high, scale, scores);
    }
    for (int n = 0; n < N; ++n) {
        if (low < high && from[n] < low)
            score_keys<Row>(queries[n].q, keys, width, from[n], low, scale, scores[n]);
        const int64_t rest = low < high && high > from[n] ? high : from[n];
        if (rest < to[n])
            score_keys<Row>(queries[n].q, keys, width, rest, to[n], scale, scores[n]);
    }
}

// What one query attends to in a block. Entries low ... high - 1 are the slots of the same number,
// counted from the block's start. Entries high ... end - 1 have their slots in `extra`.
struct BlockRange {
    int64_t low, high, end;
    const int32_t *extra;

    BlockRange(const VisibleKeys &visible_keys, int64_t start) : extra(visible_keys.extra) {
        low = clamp(visible_keys.first - start), high = clamp(visible_keys.prefix - start);
        end = clamp(visible_keys.count - start);
        if (low > high) low = high;
        if (extra) extra += start + high - visible_keys.prefix;
    }

  private:
    static int64_t clamp(int64_t n) { return n < 0 ? 0 : n > KEY_BLOCK ? KEY_BLOCK : n; }
};

// Replaces scores [from, to) by e^(score - max), and sets max and sum of `part`. Other entries of
// the vectors that hold these scores become 0.
template <class T>
void softmax_weights(Acc<T> *scores, int64_t from, int64_t to, PartialSoftmax<Acc<T>> &part) {
    using A = Acc<T>;
    const int64_t low = from / LANES<T> * LANES<T>;
    const int64_t high = (to + LANES<T> - 1) / LANES<T> * LANES<T>;
    for (int64_t i = low; i < from; ++i) scores[i] = -A(__builtin_inf());
    for (int64_t i = to; i < high; ++i) scores[i] = -A(__builtin_inf());
    Vec<T> maxima = Vec<T>{} - A(__builtin_inf()), sums = {};
    for (int64_t i = low; i < high; i += LANES<T>) {
        const Vec<T> s = load(scores + i);
        maxima = s > maxima ? s : maxima;
    }
    part.max = maxima[0];
    for (int lane = 1; lane < LANES<T>; ++lane)
        part.max = maxima[lane] > part.max ? maxima[lane] : part.max;
    // If all entries are outside the window, -inf - -inf would be NaN.
    const A max = part.max > -A(__builtin_inf()) ? part.max : A(0);
    for (int64_t i = low; i < high; i += LANES<T>) {
        const Vec<T> e = exp_vec(load(scores + i) - max);
        store(scores + i, e);
        sums += e;
    }
    part.sum = sum_lanes(sums);
}

// Computes the attention of N queries over the entries of one block, for one KV head.
// keys, values: [capacity] rows. parts: [N], overwritten, their values too.
// next: the keys that are read afterwards; null: nothing.
template <class Row, int N, class T = NumberOf<Row>>
void attend_block(const QueryRow<T> *queries, const char *keys, const char *values,
                  const char *next, int64_t width, int64_t block, Acc<T> scale,
                  PartialSoftmax<Acc<T>> *parts) {
    using A = Acc<T>;
    const int64_t start = block * KEY_BLOCK, row_bytes = Row::bytes(width);
    keys += start * row_bytes, values += start * row_bytes;
    alignas(64) A weights[N][KEY_BLOCK], extra_weights[N][KEY_BLOCK];
    const A *weight_rows[N];
    A *sums[N];
    int64_t from = KEY_BLOCK, to = 0;   // the slots that any query attends to
    int64_t lows[N], highs[N];
    for (int n = 0; n < N; ++n) {
        const BlockRange range(*queries[n].visible_keys, start);
        lows[n] = range.low, highs[n] = range.high;
    }
    score_queries<Row, N>(queries, keys, values, width, lows, highs, scale, weights);
    for (int n = 0; n < N; ++n) {
        const BlockRange range(*queries[n].visible_keys, start);
        for (int64_t i = range.high; i < range.end; ++i) {
            const int32_t slot = range.extra[i - range.high];
            weights[n][i] = -A(__builtin_inf());
            if (slot >= 0)
                score_keys<Row>(queries[n].q, keys + (slot - start - i) * row_bytes, width, i,
                                i + 1, scale, weights[n]);
        }
        softmax_weights<T>(weights[n], range.low, range.end, parts[n]);
        for (int64_t i = range.high; i < range.end; ++i) extra_weights[n][i] = weights[n][i];
        for (int64_t d = 0; d < width; ++d) parts[n].values[d] = 0;
        weight_rows[n] = weights[n], sums[n] = parts[n].values;
        if (range.low < range.high)
            from = range.low < from ? range.low : from, to = range.high > to ? range.high : to;
    }
    // Slots that only other queries attend to get weight 0.
    for (int n = 0; n < N; ++n) {
        const BlockRange range(*queries[n].visible_keys, start);
        for (int64_t i = from; i < range.low && i < to; ++i) weights[n][i] = 0;
        for (int64_t i = range.high > from ? range.high : from; i < to; ++i) weights[n][i] = 0;
    }
    if (from < to) accumulate_values<Row, N>(values, next, width, from, to, weight_rows, sums);
    for (int n = 0; n < N; ++n) {
        const BlockRange range(*queries[n].visible_keys, start);
        for (int64_t i = range.high; i < range.end; ++i) {
            const int32_t slot = range.extra[i - range.high];
            const A *weight = &extra_weights[n][i];
            if (slot >= 0)
                accumulate_values<Row, 1>(values + (slot - start) * row_bytes, nullptr, width, 0,
                                          1, &weight, &sums[n]);
        }
    }
}

// Runs attend_block for `count` queries, at most QUERY_TILE.
template <class Row, int N = QUERY_TILE, class T = NumberOf<Row>>
void attend_block_of(int64_t count, const QueryRow<T> *queries, const char *keys,
                     const char *values, const char *next, int64_t width, int64_t block,
                     Acc<T> scale, PartialSoftmax<Acc<T>> *parts) {
    if constexpr (N > 0) {
        if (count == N)
            return attend_block<Row, N>(queries, keys, values, next, width, block, scale, parts);
        attend_block_of<Row, N - 1>(count, queries, keys, values, next, width, block, scale,
                                    parts);
    }
}

// Merges the result for later keys into `total`. A sum of 0 means that no key was attended to.
template <class A>
void merge(PartialSoftmax<A> &total, const PartialSoftmax<A> &later, int64_t width) {
    if (later.sum == 0) return;
    if (total.sum == 0) {
        total.max = later.max, total.sum = later.sum;
        for (int64_t d = 0; d < width; ++d) total.values[d] = later.values[d];
        return;
    }
    const A max = later.max > total.max ? later.max : total.max;
    const Vec<A> scales = exp_vec(Vec<A>{total.max - max, later.max - max});
    const A total_scale = scales[0], later_scale = scales[1];
    total.max = max, total.sum = total.sum * total_scale + later.sum * later_scale;
    for (int64_t d = 0; d < width; ++d)
        total.values[d] = total.values[d] * total_scale + later.values[d] * later_scale;
}

inline int64_t block_count(const VisibleKeys &visible_keys) {
    return (visible_keys.count + KEY_BLOCK - 1) / KEY_BLOCK;
}

}  // namespace
