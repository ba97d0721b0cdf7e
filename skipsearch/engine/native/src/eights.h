// Weights of 8 bits times rows in the model's dtype. The sums of a block are taken over whole numbers and scaled once, block after block.
#pragma once
#include "matrix.h"

namespace {

// Two inputs of all outputs of a panel, w [2, PANEL], times R rows.
template <class T> struct Pair {
    template <int R> static inline void add(Vec<T> (&acc)[R][VECS<T>], const int8_t *w, const In<T> *x, int64_t next) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
#pragma GCC unroll 16
            for (int v = 0; v < VECS<T>; ++v) {
                const Vec<T> weight = widened<Vec<T>>(w + i * PANEL + v * LANES<T>);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) acc[r][v] += weight * x[r * next + i];
            }
    }
};

#if defined(SS_BF16_DOT)
// Every whole number up to 127 is a bfloat16. The two bytes of it are looked up, and the sign is put in.
struct Bytes {
    alignas(64) uint8_t low[128], high[128], order[64];
    constexpr Bytes() : low(), high(), order() {
        for (int n = 1; n < 128; ++n) {
            int top = 6;
            while (!(n >> top)) --top;
            const int bits = (127 + top) << 7 | (n << (7 - top) & 127);
            low[n] = uint8_t(bits & 255), high[n] = uint8_t(bits >> 8);
        }
        // Pairs of inputs, so that the lower half of each 16 bytes unpacks to outputs 0 ... 15, and the upper half to the others.
        for (int output = 0; output < 32; ++output)
            for (int input = 0; input < 2; ++input)
                order[output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2 + input] = uint8_t(input * 32 + output);
    }
};
constexpr Bytes bytes;

template <> struct Pair<bf16> {
    template <int R> static inline void add(FloatVec (&acc)[R][VECS<bf16>], const int8_t *w, const In<bf16> *x, int64_t next) {
        const __m512i weights = _mm512_permutexvar_epi8(at(bytes.order), at(w)), size = _mm512_abs_epi8(weights);
        const __m512i low = _mm512_permutex2var_epi8(at(bytes.low), size, at(bytes.low + 64));
        const __m512i unsigned_high = _mm512_permutex2var_epi8(at(bytes.high), size, at(bytes.high + 64));
        const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, weights, _mm512_set1_epi8(-128), 0xf8);   // with the sign of weights
        const __m512i pairs[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                acc[r][v] = (FloatVec)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pairs[v], (__m512bh)(WordVec{} + raw<uint32_t>(x + r * next)));
    }

  private:
    static inline __m512i at(const void *from) { return _mm512_loadu_si512(from); }
};
#endif

template <class T, int R> struct Tile<T, int8_t, R> {
    static constexpr int FULL = SS_BYTES == 64 ? 16 : 8, MANY = FULL / (R * VECS<T>);
    static constexpr int BLOCKS = MANY > 4 ? 4 : MANY > 1 ? MANY : 1;   // at once: few rows alone would wait for one sum after the other

    static void run(const char *w, const In<T> *x, int64_t next, int64_t inputs, Sum<T> *sums, const char *ahead, int64_t pace) {
        for (; inputs >= BLOCKS * SCALED; inputs -= BLOCKS * SCALED, w += BLOCKS * BLOCK_BYTES, x += BLOCKS * SCALED)
            ahead = some<BLOCKS>(w, x, next, SCALED, sums, ahead, pace);
        for (; inputs > 0; inputs -= SCALED, w += BLOCK_BYTES, x += SCALED)
            ahead = some<1>(w, x, next, inputs < SCALED ? inputs : SCALED, sums, ahead, pace);
    }

  private:
    // N blocks of so many inputs each. Returns what to fetch next.
    template <int N>
    static inline __attribute__((always_inline)) const char *some(const char *w, const In<T> *x, int64_t next, int64_t inputs, Sum<T> *sums,
                                                                  const char *ahead, int64_t pace) {
        Vec<T> acc[N][R][VECS<T>] = {};
        for (int64_t k = 0; k < inputs; k += 2)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                __builtin_prefetch(ahead, 0, 3);
                ahead += pace;
                Pair<T>::template add<R>(acc[n], (const int8_t *)w + n * BLOCK_BYTES + SCALE_BYTES + k * PANEL, x + n * SCALED + k, next);
            }
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            __builtin_prefetch(ahead, 0, 3);
            ahead += pace;
#pragma GCC unroll 16
            for (int v = 0; v < VECS<T>; ++v) {
                const Vec<T> scale = scales(w + n * BLOCK_BYTES + v * LANES<T> * 2);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    Sum<T> *to = sums + r * PANEL + v * LANES<T>;
                    store(to, load(to) + acc[n][r][v] * scale);
                }
            }
        }
        return ahead;
    }

    static inline Vec<T> scales(const char *from) {
        const bf16 *scale = (const bf16 *)from;
        if constexpr (sizeof(Sum<T>) == 4) return load(scale);
        else {
            Vec<T> found;
            for (int i = 0; i < LANES<T>; ++i) found[i] = wide(scale[i]);
            return found;
        }
    }
};

}  // namespace
