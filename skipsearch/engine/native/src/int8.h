// Multiplies int8 weights by rows in the model's dtype. The products of a group are summed over
// integer weights and scaled once, group by group.
#pragma once
#include "matrix.h"

namespace {

// Int8Step<T>::add adds the products of two inputs of R rows to acc.
// w: [2, PANEL_ROWS] weights. x: [R, x_stride] inputs.
template <class T> struct Int8Step {
    template <int R>
    static inline void add(Vec<T> (&acc)[R][PANEL_VECS<T>], const int8_t *w, const Input<T> *x,
                           int64_t x_stride) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 16
            for (int v = 0; v < PANEL_VECS<T>; ++v) {
                const Vec<T> weight = widen_int8<Vec<T>>(w + i * PANEL_ROWS + v * LANES<T>);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) acc[r][v] += weight * x[r * x_stride + i];
            }
    }
};

#if defined(SS_BF16_DOT)
// Tables that convert int8 to bfloat16, which holds every integer up to 127 exactly. The low and
// high byte of the magnitude are looked up, and the sign bit is set afterwards.
struct Int8ToBf16 {
    alignas(64) uint8_t low[128], high[128], order[64];
    constexpr Int8ToBf16() : low(), high(), order() {
        for (int n = 1; n < 128; ++n) {
            int top_bit = 6;
            while (!(n >> top_bit)) --top_bit;
            const int bits = (127 + top_bit) << 7 | (n << (7 - top_bit) & 127);
            low[n] = uint8_t(bits & 255), high[n] = uint8_t(bits >> 8);
        }
        // Makes the two inputs of an output neighbours. Unpacking the lower half of each 16 bytes
        // then gives outputs 0 ... 15, and unpacking the upper half gives outputs 16 ... 31.
        for (int output = 0; output < 32; ++output)
            for (int input = 0; input < 2; ++input)
                order[output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2 + input] =
                    uint8_t(input * 32 + output);
    }
};
constexpr Int8ToBf16 int8_to_bf16;

template <> struct Int8Step<bf16> {
    template <int R>
    static inline void add(FloatVec (&acc)[R][PANEL_VECS<bf16>], const int8_t *w,
                           const Input<bf16> *x, int64_t x_stride) {
        const __m512i weights = _mm512_permutexvar_epi8(load64(int8_to_bf16.order), load64(w));
        const __m512i magnitude = _mm512_abs_epi8(weights);
        const __m512i low = _mm512_permutex2var_epi8(load64(int8_to_bf16.low), magnitude,
                                                     load64(int8_to_bf16.low + 64));
        const __m512i unsigned_high = _mm512_permutex2var_epi8(
            load64(int8_to_bf16.high), magnitude, load64(int8_to_bf16.high + 64));
        // 0xf8 is a | (b & c): sets the sign bit of negative weights.
        const __m512i high =
            _mm512_ternarylogic_epi32(unsigned_high, weights, _mm512_set1_epi8(-128), 0xf8);
        const __m512i pairs[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const WordVec x_pair = WordVec{} + load_bits<uint32_t>(x + r * x_stride);
                acc[r][v] = (FloatVec)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pairs[v],
                                                       (__m512bh)x_pair);
            }
    }

  private:
    static inline __m512i load64(const void *from) { return _mm512_loadu_si512(from); }
};
#endif

template <class T, int R> struct Tile<T, int8_t, R> {
    // Groups that the inner loop takes at once. With few rows, one group alone would leave the
    // processor waiting for each sum before the next addition.
    static constexpr int REGISTERS = SS_BYTES == 64 ? 16 : 8;   // for sums
    static constexpr int FITTING_GROUPS = REGISTERS / (R * PANEL_VECS<T>);
    static constexpr int GROUPS = FITTING_GROUPS > 4 ? 4 : FITTING_GROUPS > 1 ? FITTING_GROUPS : 1;

    static void run(const char *w, const Input<T> *x, int64_t x_stride, int64_t inputs,
                    Acc<T> *sums, const char *prefetch, int64_t prefetch_step) {
        for (; inputs >= GROUPS * GROUP_SIZE;
             inputs -= GROUPS * GROUP_SIZE, w += GROUPS * GROUP_BYTES, x += GROUPS * GROUP_SIZE)
            prefetch =
                run_groups<GROUPS>(w, x, x_stride, GROUP_SIZE, sums, prefetch, prefetch_step);
        for (; inputs > 0; inputs -= GROUP_SIZE, w += GROUP_BYTES, x += GROUP_SIZE)
            prefetch = run_groups<1>(w, x, x_stride, inputs < GROUP_SIZE ? inputs : GROUP_SIZE,
                                     sums, prefetch, prefetch_step);
    }

  private:
    // Runs N groups with `inputs` inputs each. Returns where to prefetch next.
    template <int N>
    static inline __attribute__((always_inline)) const char *
    run_groups(const char *w, const Input<T> *x, int64_t x_stride, int64_t inputs, Acc<T> *sums,
               const char *prefetch, int64_t prefetch_step) {
        Vec<T> acc[N][R][PANEL_VECS<T>] = {};
        for (int64_t k = 0; k < inputs; k += 2)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                __builtin_prefetch(prefetch, 0, 3);
                prefetch += prefetch_step;
                Int8Step<T>::template add<R>(
                    acc[n], (const int8_t *)w + n * GROUP_BYTES + SCALE_BYTES + k * PANEL_ROWS,
                    x + n * GROUP_SIZE + k, x_stride);
            }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            __builtin_prefetch(prefetch, 0, 3);
            prefetch += prefetch_step;
#pragma GCC unroll 16
            for (int v = 0; v < PANEL_VECS<T>; ++v) {
                const Vec<T> scale = load_scales(w + n * GROUP_BYTES + v * LANES<T> * 2);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    Acc<T> *to = sums + r * PANEL_ROWS + v * LANES<T>;
                    store(to, load(to) + acc[n][r][v] * scale);
                }
            }
        }
        return prefetch;
    }

    static inline Vec<T> load_scales(const char *from) {
        const bf16 *stored = (const bf16 *)from;
        if constexpr (sizeof(Acc<T>) == 4) return load(stored);
        else {
            Vec<T> scales;
            for (int i = 0; i < LANES<T>; ++i) scales[i] = to_acc(stored[i]);
            return scales;
        }
    }
};

}  // namespace
