// A matrix in panels times some rows. An output is summed input by input, in chunks whose sums are then added up in order: the same for one
// row as for many, and whoever takes it. Rows share what is read: a chunk of a panel stays in the first cache while all of them use it.
#pragma once
#include "vec.h"

namespace {

// What a row of inputs is kept as. The dot product of bfloat16 takes pairs of neighbours as they are.
#if defined(SS_BF16_DOT)
template <class T> using In = T;
#else
template <class T> using In = Sum<T>;
#endif

template <class T> inline In<T> input(Sum<T> x);
template <> inline In<float> input<float>(float x) { return x; }
template <> inline In<double> input<double>(double x) { return x; }
template <> inline In<bf16> input<bf16>(float x) {
#if defined(SS_BF16_DOT)
    return narrow<bf16>(x);
#else
    return rounded<bf16>(x);
#endif
}

// The same of a vector.
template <class T> inline void store_input(In<T> *to, Vec<T> x) {
    if constexpr (sizeof(In<T>) == sizeof(T)) store_as(to, x);
    else store(to, rounded_all<T>(x));
}

constexpr int64_t CHUNK_BYTES = 16384, AHEAD = 8192, LINE = 64;   // AHEAD: how far a group that is alone fetches
template <class W> constexpr int64_t STEP = sizeof(W) <= 2 ? 2 : 1;               // inputs that are taken together
template <class W> constexpr int64_t CHUNK = CHUNK_BYTES / (PANEL * sizeof(W));   // inputs of a chunk
template <class T> constexpr int VECS = PANEL / LANES<T>;                         // vectors of a panel
template <class T> constexpr int GROUP = SS_BYTES == 64 ? 16 / VECS<T> : SS_BYTES == 32 ? 8 / VECS<T> : 1;   // rows that registers hold

// Inputs of a row, rounded up, so that none is read that was not written.
inline int64_t padded(int64_t inputs) { return (inputs + 15) / 16 * 16; }

template <class T> struct Step;

template <class A> struct Wide {
    template <int R> static inline void add(Vec<A> (&acc)[R][VECS<A>], const A *w, const A *x, int64_t next) {
#pragma GCC unroll 16
        for (int v = 0; v < VECS<A>; ++v) {
            const Vec<A> weight = load(w + v * LANES<A>);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += weight * x[r * next];
        }
    }
};
template <> struct Step<float> : Wide<float> {};
template <> struct Step<double> : Wide<double> {};
template <> struct Step<bf16> {
    template <int R> static inline void add(FloatVec (&acc)[R][VECS<bf16>], const bf16 *w, const In<bf16> *x, int64_t next) {
#pragma GCC unroll 16
        for (int v = 0; v < VECS<bf16>; ++v) {
            const WordVec pairs = raw<WordVec>(w + 2 * v * LANES<bf16>);
#if defined(SS_BF16_DOT)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                acc[r][v] = (FloatVec)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pairs, (__m512bh)(WordVec{} + raw<uint32_t>(x + r * next)));
#else
            const FloatVec even = (FloatVec)(pairs << 16), odd = (FloatVec)(pairs & 0xffff0000u);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += even * x[r * next];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += odd * x[r * next + 1];
#endif
        }
    }
};

// R rows times a chunk, added to `sums` [R, PANEL]. ahead: what to fetch meanwhile, `pace` bytes a step.
template <class T, class W, int R> struct Tile {
    static void run(const char *weights, const In<T> *x, int64_t next, int64_t inputs, Sum<T> *sums, const char *ahead, int64_t pace) {
        const T *w = (const T *)weights;
        Vec<T> acc[R][VECS<T>] = {};
        for (int64_t k = 0; k < inputs; k += STEP<T>) {
            __builtin_prefetch(ahead, 0, 3);
            if (pace > LINE) __builtin_prefetch(ahead + LINE, 0, 3);
            ahead += pace;
            Step<T>::template add<R>(acc, w + k * PANEL, x + k, next);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < VECS<T>; ++v) {
                Sum<T> *to = sums + r * PANEL + v * LANES<T>;
                store(to, load(to) + acc[r][v]);
            }
    }
};

template <class T, class W, int R = GROUP<T>>
void tiles(int64_t rows, const char *w, const In<T> *x, int64_t next, int64_t inputs, Sum<T> *sums, const char *ahead, int64_t pace) {
    if constexpr (R > 0) {
        if (rows == R) return Tile<T, W, R>::run(w, x, next, inputs, sums, ahead, pace);
        tiles<T, W, R - 1>(rows, w, x, next, inputs, sums, ahead, pace);
    }
}

// Of so many inputs of a panel.
template <class W> inline int64_t bytes_of(int64_t inputs) { return inputs * PANEL * int64_t(sizeof(W)); }
template <> inline int64_t bytes_of<int8_t>(int64_t inputs) { return inputs * PANEL + (inputs + SCALED - 1) / SCALED * SCALE_BYTES; }

template <class T, class W>
void panel_of(const Matrix &m, int64_t p, const In<T> *x, int64_t next, int64_t rows, Sum<T> *sums) {
    const int64_t inputs = (m.in + STEP<W> - 1) / STEP<W> * STEP<W>;
    const char *weights = (const char *)m.weight + p * bytes_of<W>(inputs);
    // The more rows, the fewer steps the processor looks ahead by itself. Groups that share a chunk fetch a part of the next one each.
    const int64_t groups = (rows + GROUP<T> - 1) / GROUP<T>, pace = STEP<W> * PANEL * int64_t(sizeof(W)) / groups;
    const int64_t distance = groups == 1 ? AHEAD : CHUNK_BYTES;
    for (int64_t i = 0; i < rows * PANEL; ++i) sums[i] = 0;
    for (int64_t k = 0; k < inputs; k += CHUNK<W>) {
        const int64_t count = inputs - k < CHUNK<W> ? inputs - k : CHUNK<W>;
        const char *chunk = weights + bytes_of<W>(k), *ahead = chunk + distance;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t r = g * GROUP<T>, left = rows - r < GROUP<T> ? rows - r : GROUP<T>;
            tiles<T, W>(left, chunk, x + r * next + k, next, count, sums + r * PANEL, ahead + g * pace * (count / STEP<W>), pace);
        }
    }
}

// One panel of the matrix times `rows` rows x [rows, next], without the bias: sums [rows, PANEL].
template <class T> void panel(const Matrix &m, int64_t p, const In<T> *x, int64_t next, int64_t rows, Sum<T> *sums) {
    m.kind == EIGHT_BITS ? panel_of<T, int8_t>(m, p, x, next, rows, sums) : panel_of<T, T>(m, p, x, next, rows, sums);
}

inline int64_t panels(const Matrix &m) { return (m.out + PANEL - 1) / PANEL; }

// What part of so many things a thread takes: [from, to).
struct Share {
    int64_t from, to;
    Share(int64_t count, int thread, int threads) : from(count * thread / threads), to(count * (thread + 1) / threads) {}
};

}  // namespace
