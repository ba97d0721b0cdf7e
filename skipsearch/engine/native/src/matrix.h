// Multiplies a matrix in panels by rows of inputs. An output is summed over chunks of inputs, and
// the sums of the chunks are added in order. So a result has the same bits for any number of rows
// and threads. The rows share what is read: a chunk stays in the L1 cache while all rows use it.
#pragma once
#include "block_numbers.h"
#include "inputs.h"

namespace {

constexpr int64_t CACHE_LINE = 64;          // bytes
constexpr int64_t CHUNK_BYTES = 16384;      // of weights in a chunk
constexpr int64_t PREFETCH_BYTES = 8192;    // how far ahead one row tile prefetches

// Inputs that the inner loop takes at once, and inputs of a chunk.
template <class T> constexpr int64_t STEP_INPUTS = sizeof(T) <= 2 ? 2 : 1;
template <class T> constexpr int64_t CHUNK_INPUTS = CHUNK_BYTES / (PANEL_ROWS * sizeof(T));

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

// Adds the products of R rows and a chunk to sums [R, PANEL_ROWS]. Each step of the loop prefetches
// `prefetch_step` bytes from `prefetch` on.
template <class T, int R>
void run_tile(const T *w, const Input<T> *x, int64_t x_stride, int64_t inputs, Acc<T> *sums,
              const char *prefetch, int64_t prefetch_step) {
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

// Runs the tile that has `rows` rows, at most TILE_ROWS.
template <class T, int R = TILE_ROWS<T>>
void run_tile_of(int64_t rows, const T *w, const Input<T> *x, int64_t x_stride, int64_t inputs,
                 Acc<T> *sums, const char *prefetch, int64_t prefetch_step) {
    if constexpr (R > 0) {
        if (rows == R)
            return run_tile<T, R>(w, x, x_stride, inputs, sums, prefetch, prefetch_step);
        run_tile_of<T, R - 1>(rows, w, x, x_stride, inputs, sums, prefetch, prefetch_step);
    }
}

// Multiplies a panel by x [rows, x_stride], chunk by chunk. get_chunk(k, count) returns the weights
// of inputs k ... k + count - 1 in the layout of a dense panel.
// prefetches: whether chunks follow each other in memory, so that the next one can be fetched.
template <class T, class GetChunk>
void multiply_chunks(int64_t in, const Input<T> *x, int64_t x_stride, int64_t rows, Acc<T> *sums,
                     bool prefetches, GetChunk get_chunk) {
    const int64_t inputs = (in + STEP_INPUTS<T> - 1) / STEP_INPUTS<T> * STEP_INPUTS<T>;
    // With more rows, the processor by itself looks fewer steps ahead. If several tiles share a
    // chunk, each tile prefetches a part of the next chunk.
    const int64_t tiles = (rows + TILE_ROWS<T> - 1) / TILE_ROWS<T>;
    const int64_t step_bytes = STEP_INPUTS<T> * PANEL_ROWS * int64_t(sizeof(T));
    const int64_t prefetch_step = prefetches ? step_bytes / tiles : 0;
    const int64_t distance = !prefetches ? 0 : tiles == 1 ? PREFETCH_BYTES : CHUNK_BYTES;
    for (int64_t i = 0; i < rows * PANEL_ROWS; ++i) sums[i] = 0;
    for (int64_t k = 0; k < inputs; k += CHUNK_INPUTS<T>) {
        const int64_t count = inputs - k < CHUNK_INPUTS<T> ? inputs - k : CHUNK_INPUTS<T>;
        const T *chunk = get_chunk(k, count);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t r = tile * TILE_ROWS<T>;
            const int64_t tile_rows = rows - r < TILE_ROWS<T> ? rows - r : TILE_ROWS<T>;
            run_tile_of<T>(tile_rows, chunk, x + r * x_stride + k, x_stride, count,
                           sums + r * PANEL_ROWS,
                           (const char *)chunk + distance +
                               tile * prefetch_step * (count / STEP_INPUTS<T>),
                           prefetch_step);
        }
    }
}

// Stores weights of inputs k and k + 1 of a group in the layout of a dense panel.
// to: the group's first input, at the outputs of the vectors.
template <class T>
inline void store_dense(T *to, int k, FloatVec first, FloatVec second) {
    if constexpr (sizeof(T) == 2) {
        const WordVec low = (WordVec)round_vec_to<bf16>(first) >> 16;
        const WordVec high = (WordVec)round_vec_to<bf16>(second) & 0xffff0000u;
        store(to + k * PANEL_ROWS, low | high);
    } else if constexpr (sizeof(T) == 4) {
        store(to + k * PANEL_ROWS, first), store(to + (k + 1) * PANEL_ROWS, second);
    } else
        for (int i = 0; i < LANES<float>; ++i) {
            to[k * PANEL_ROWS + i] = T(first[i]);
            to[(k + 1) * PANEL_ROWS + i] = T(second[i]);
        }
}

// Writes the weights of group n in the layout of a dense panel.
template <class T, int64_t KIND> void unpack_group(const void *panel, int64_t n, T *to) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    const GroupReader<KIND> group(panel, n);
    for (int out = 0; out < PANEL_ROWS; out += LANES<float>) {
        const FloatVec scales[2] = {group.scale(out, 0), group.scale(out, FORMAT.n_scales - 1)};
        FloatVec minimums[2] = {};
        if constexpr (FORMAT.has_min) {
            minimums[0] = group.minimum(out, 0);
            minimums[1] = group.minimum(out, FORMAT.n_scales - 1);
        }
        T *outputs = to + out * STEP_INPUTS<T>;
#pragma GCC unroll 8
        for (int step = 0; step < GROUP_STEPS; ++step) {
            const WordVec words = group.words(out, step);
            FloatVec values[STEP_SIZE];
#pragma GCC unroll 4
            for (int i = 0; i < STEP_SIZE; ++i) {
                const IntVec number = (IntVec)(words >> (8 * i) & 255u) - FORMAT.zero;
                const int half = step * FORMAT.n_scales / GROUP_STEPS;
                values[i] = __builtin_convertvector(number, FloatVec) * scales[half];
                if constexpr (FORMAT.has_min) values[i] += minimums[half];
            }
            store_dense<T>(outputs, step * STEP_SIZE, values[0], values[1]);
            store_dense<T>(outputs, step * STEP_SIZE + 2, values[2], values[3]);
        }
    }
}

// The inputs of a product.
template <class T> struct Inputs {
    const Input<T> *x;             // [rows, stride]
    int64_t stride, rows;
    const RoundedRows *rounded;    // the same rows for panels in blocks; null: `x` is for all
};

// Calls use(inputs) with the rows first ... end - 1 of `inputs`.
template <class T, class Use>
void with_rows(const Inputs<T> &inputs, int64_t first, int64_t end, Use use) {
    RoundedRows rounded{};
    if (inputs.rounded) rounded = inputs.rounded->from_plane(first * inputs.rounded->planes);
    use(Inputs<T>{inputs.x + first * inputs.stride, inputs.stride, end - first,
                  inputs.rounded ? &rounded : nullptr});
}

// Multiplies one panel of the matrix, without the bias. Writes sums [rows, PANEL_ROWS].
template <class T>
void multiply_panel(const Matrix &matrix, int64_t index, const Inputs<T> &inputs, Acc<T> *sums) {
    const Panel &panel = matrix.panels[index];
    if (panel.kind == DENSE)
        return multiply_chunks<T>(matrix.in, inputs.x, inputs.stride, inputs.rows, sums, true,
                                  [&](int64_t k, int64_t) {
                                      return (const T *)panel.weight + k * PANEL_ROWS;
                                  });
    if (inputs.rounded && sizeof(Acc<T>) == 4)
        return multiply_block_panel(panel, matrix.in, *inputs.rounded, inputs.rows, (float *)sums);
    if (inputs.rounded) {
        float *narrow = (float *)sums;   // widened in place, from the last one on
        multiply_block_panel(panel, matrix.in, *inputs.rounded, inputs.rows, narrow);
        for (int64_t i = inputs.rows * PANEL_ROWS - 1; i >= 0; --i) {
            const float sum = load_bits<float>(narrow + i);   // may share memory with sums[i]
            sums[i] = Acc<T>(sum);
        }
        return;
    }
    alignas(64) T chunk[CHUNK_INPUTS<T> * PANEL_ROWS];
    with_block_kind(panel.kind, [&]<int64_t KIND>() {
        multiply_chunks<T>(matrix.in, inputs.x, inputs.stride, inputs.rows, sums, false,
                           [&](int64_t k, int64_t count) {
                               for (int64_t i = 0; i < count; i += GROUP_SIZE)
                                   unpack_group<T, KIND>(panel.weight, (k + i) / GROUP_SIZE,
                                                         chunk + i * PANEL_ROWS);
                               return (const T *)chunk;
                           });
    });
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
