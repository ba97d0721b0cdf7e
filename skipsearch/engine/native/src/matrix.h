// Multiplies a matrix in panels by rows of inputs. An output is summed over chunks of inputs, and
// the sums of the chunks are added in order. So a result has the same bits for any number of rows
// and threads. The rows share what is read: a chunk stays in the L1 cache while all rows use it.
#pragma once
#include "vec.h"

namespace {

// Input<T> is how a row of inputs is stored. The dot product instruction of bfloat16 reads pairs of
// neighbouring bfloat16; all other code reads Acc<T>.
#if defined(SS_BF16_DOT)
template <class T> using Input = T;
#else
template <class T> using Input = Acc<T>;
#endif

// Rounds a value to T and returns it as it is stored in a row of inputs.
template <class T> inline Input<T> to_input(Acc<T> x);
template <> inline Input<float> to_input<float>(float x) { return x; }
template <> inline Input<double> to_input<double>(double x) { return x; }
template <> inline Input<bf16> to_input<bf16>(float x) {
#if defined(SS_BF16_DOT)
    return from_acc<bf16>(x);
#else
    return round_to<bf16>(x);
#endif
}

// Stores a vector as to_input does a value.
template <class T> inline void store_input(Input<T> *to, Vec<T> x) {
    if constexpr (sizeof(Input<T>) == sizeof(T)) store_as(to, x);
    else store(to, round_vec_to<T>(x));
}

constexpr int64_t CACHE_LINE = 64;          // bytes
constexpr int64_t CHUNK_BYTES = 16384;      // of weights in a chunk
constexpr int64_t PREFETCH_BYTES = 8192;    // how far ahead one row tile prefetches

// Of weights stored as W: inputs that the inner loop takes at once, and inputs of a chunk.
template <class W> constexpr int64_t STEP_INPUTS = sizeof(W) <= 2 ? 2 : 1;
template <class W> constexpr int64_t CHUNK_INPUTS = CHUNK_BYTES / (PANEL_ROWS * sizeof(W));

// Vectors of a panel's outputs, and rows whose sums fit in the vector registers.
template <class T> constexpr int PANEL_VECS = PANEL_ROWS / LANES<T>;
template <class T>
constexpr int TILE_ROWS = SS_BYTES == 64   ? 16 / PANEL_VECS<T>
                          : SS_BYTES == 32 ? 8 / PANEL_VECS<T>
                                           : 1;

// InnerStep<T>::add adds the products of STEP_INPUTS inputs of R rows to acc.
// w: [PANEL_ROWS, STEP_INPUTS] weights. x: [R, x_stride] inputs.
template <class T> struct InnerStep;

template <class A> struct OneInputStep {
    template <int R>
    static inline void add(Vec<A> (&acc)[R][PANEL_VECS<A>], const A *w, const A *x,
                           int64_t x_stride) {
#pragma GCC unroll 16
        for (int v = 0; v < PANEL_VECS<A>; ++v) {
            const Vec<A> weight = load(w + v * LANES<A>);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += weight * x[r * x_stride];
        }
    }
};
template <> struct InnerStep<float> : OneInputStep<float> {};
template <> struct InnerStep<double> : OneInputStep<double> {};
template <> struct InnerStep<bf16> {
    template <int R>
    static inline void add(FloatVec (&acc)[R][PANEL_VECS<bf16>], const bf16 *w,
                           const Input<bf16> *x, int64_t x_stride) {
#pragma GCC unroll 16
        for (int v = 0; v < PANEL_VECS<bf16>; ++v) {
            const WordVec pairs = load_bits<WordVec>(w + 2 * v * LANES<bf16>);
#if defined(SS_BF16_DOT)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const WordVec x_pair = WordVec{} + load_bits<uint32_t>(x + r * x_stride);
                acc[r][v] = (FloatVec)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pairs,
                                                       (__m512bh)x_pair);
            }
#else
            const FloatVec even = (FloatVec)(pairs << 16), odd = (FloatVec)(pairs & 0xffff0000u);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += even * x[r * x_stride];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) acc[r][v] += odd * x[r * x_stride + 1];
#endif
        }
    }
};

// Tile<T, W, R>::run adds the products of R rows and a chunk to sums [R, PANEL_ROWS]. Each step of
// the loop prefetches `prefetch_step` bytes from `prefetch` on.
template <class T, class W, int R> struct Tile {
    static void run(const char *weights, const Input<T> *x, int64_t x_stride, int64_t inputs,
                    Acc<T> *sums, const char *prefetch, int64_t prefetch_step) {
        const T *w = (const T *)weights;
        Vec<T> acc[R][PANEL_VECS<T>] = {};
        for (int64_t k = 0; k < inputs; k += STEP_INPUTS<T>) {
            __builtin_prefetch(prefetch, 0, 3);
            if (prefetch_step > CACHE_LINE) __builtin_prefetch(prefetch + CACHE_LINE, 0, 3);
            prefetch += prefetch_step;
            InnerStep<T>::template add<R>(acc, w + k * PANEL_ROWS, x + k, x_stride);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < PANEL_VECS<T>; ++v) {
                Acc<T> *to = sums + r * PANEL_ROWS + v * LANES<T>;
                store(to, load(to) + acc[r][v]);
            }
    }
};

// Runs the tile that has `rows` rows, at most TILE_ROWS.
template <class T, class W, int R = TILE_ROWS<T>>
void run_tile(int64_t rows, const char *weights, const Input<T> *x, int64_t x_stride,
              int64_t inputs, Acc<T> *sums, const char *prefetch, int64_t prefetch_step) {
    if constexpr (R > 0) {
        if (rows == R)
            return Tile<T, W, R>::run(weights, x, x_stride, inputs, sums, prefetch, prefetch_step);
        run_tile<T, W, R - 1>(rows, weights, x, x_stride, inputs, sums, prefetch, prefetch_step);
    }
}

// Returns the bytes that `inputs` inputs of a panel take.
template <class W> inline int64_t panel_bytes(int64_t inputs) {
    return inputs * PANEL_ROWS * int64_t(sizeof(W));
}
template <> inline int64_t panel_bytes<int8_t>(int64_t inputs) {
    return inputs * PANEL_ROWS + (inputs + GROUP_SIZE - 1) / GROUP_SIZE * SCALE_BYTES;
}

template <class T, class W>
void multiply_panel_as(const Matrix &matrix, int64_t panel, const Input<T> *x, int64_t x_stride,
                       int64_t rows, Acc<T> *sums) {
    const int64_t inputs = (matrix.in + STEP_INPUTS<W> - 1) / STEP_INPUTS<W> * STEP_INPUTS<W>;
    const char *weights = (const char *)matrix.weight + panel * panel_bytes<W>(inputs);
    // With more rows, the processor by itself looks fewer steps ahead. If several tiles share a
    // chunk, each tile prefetches a part of the next chunk.
    const int64_t tiles = (rows + TILE_ROWS<T> - 1) / TILE_ROWS<T>;
    const int64_t prefetch_step = STEP_INPUTS<W> * PANEL_ROWS * int64_t(sizeof(W)) / tiles;
    const int64_t distance = tiles == 1 ? PREFETCH_BYTES : CHUNK_BYTES;
    for (int64_t i = 0; i < rows * PANEL_ROWS; ++i) sums[i] = 0;
    for (int64_t k = 0; k < inputs; k += CHUNK_INPUTS<W>) {
        const int64_t count = inputs - k < CHUNK_INPUTS<W> ? inputs - k : CHUNK_INPUTS<W>;
        const char *chunk = weights + panel_bytes<W>(k), *prefetch = chunk + distance;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t r = tile * TILE_ROWS<T>;
            const int64_t tile_rows = rows - r < TILE_ROWS<T> ? rows - r : TILE_ROWS<T>;
            run_tile<T, W>(tile_rows, chunk, x + r * x_stride + k, x_stride, count,
                           sums + r * PANEL_ROWS,
                           prefetch + tile * prefetch_step * (count / STEP_INPUTS<W>),
                           prefetch_step);
        }
    }
}

// Multiplies one panel of the matrix by x [rows, x_stride], without the bias.
// Writes sums [rows, PANEL_ROWS].
template <class T>
void multiply_panel(const Matrix &matrix, int64_t panel, const Input<T> *x, int64_t x_stride,
                    int64_t rows, Acc<T> *sums) {
    matrix.kind == INT8 ? multiply_panel_as<T, int8_t>(matrix, panel, x, x_stride, rows, sums)
                        : multiply_panel_as<T, T>(matrix, panel, x, x_stride, rows, sums);
}

inline int64_t panel_count(const Matrix &matrix) {
    return (matrix.out + PANEL_ROWS - 1) / PANEL_ROWS;
}

// A thread's share of `count` items: from ... to - 1.
struct WorkRange {
    int64_t from, to;
    WorkRange(int64_t count, int thread, int threads)
        : from(count * thread / threads), to(count * (thread + 1) / threads) {}
};

}  // namespace
