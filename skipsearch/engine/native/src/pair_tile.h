// The tile of a block product for instruction sets that multiply bytes to sums of two products in
// 16 bits. Numbers of 4 bits are summed in 16 bits over a group; more bits would not fit.
#pragma once
#include "block_tile.h"

namespace {

#if defined(__AVX512BW__)
#define SS_INT(operation) _mm512_##operation
typedef __m512i PairVec;
constexpr int TILE_ROWS = 8;   // rows whose sums fit in the vector registers
constexpr int tile_vecs(int) { return 2; }
#else
#define SS_INT(operation) _mm256_##operation
typedef __m256i PairVec;
constexpr int TILE_ROWS = 4;
constexpr int tile_vecs(int rows) { return rows > 2 ? 2 : 4; }
#endif

// Adds neighbouring 16-bit sums.
inline PairVec add_pairs(PairVec pairs) {
    return SS_INT(madd_epi16)(pairs, SS_INT(set1_epi16)(1));
}

// Returns the sums, in 32 bits, of four products of 8 bits each.
inline PairVec multiply_bytes(PairVec words, PairVec x) {
#if defined(SS_SIGNED_BYTES)
    words ^= (PairVec)(WordVec{} + 0x80808080u);
    return add_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(words), _mm256_sign_epi8(x, words)));
#else
    const PairVec even_x = SS_INT(srai_epi16)(SS_INT(slli_epi16)(x, 8), 8);
    const PairVec even_words = (PairVec)((WordVec)words & 0x00ff00ffu);
    return SS_INT(add_epi32)(
        SS_INT(madd_epi16)(even_words, even_x),
        SS_INT(madd_epi16)(SS_INT(srli_epi16)(words, 8), SS_INT(srai_epi16)(x, 8)));
#endif
}

// Adds the products of two steps to sums: in 16 bits if BITS is 4, else in 32. What is summed in 16
// bits fits: 8 steps of 4 bits are at most 8 * 2 * 15 * 127, and 2 of 6 bits 2 * 2 * 63 * 127.
template <int BITS>
inline void add_steps(PairVec &sums, const PairVec (&words)[2], const PairVec (&x)[2]) {
    if constexpr (BITS == 8)
        sums = SS_INT(add_epi32)(sums, SS_INT(add_epi32)(multiply_bytes(words[0], x[0]),
                                                         multiply_bytes(words[1], x[1])));
    else {
        const PairVec pairs = SS_INT(add_epi16)(SS_INT(maddubs_epi16)(words[0], x[0]),
                                                SS_INT(maddubs_epi16)(words[1], x[1]));
        sums = BITS == 4 ? SS_INT(add_epi16)(sums, pairs)
                         : SS_INT(add_epi32)(sums, add_pairs(pairs));
    }
    // Compilers reorder the additions of a loop and run out of registers. This keeps the order.
    asm("" : "+v"(sums));
}

// Adds the products of R rows, and of groups first ... end - 1, to sums [R, PANEL_ROWS].
// Prefetches groups that follow these, if `prefetches`.
template <int64_t KIND, int R>
[[gnu::noinline]] void run_tile(const Panel &panel, int64_t first, int64_t end,
                                const RoundedRows &x, float *sums, bool prefetches) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    constexpr int BITS = FORMAT.product_bits(), HALF_STEPS = GROUP_STEPS / FORMAT.n_scales;
    constexpr int VECS = tile_vecs(R), OUTPUTS = VECS * LANES<float>;
    // A store to `sums` could change what `x` refers to, so it is copied.
    const int8_t *const numbers = x.numbers;
    const int32_t *const half_sums = x.half_sums;
    const float *const scales = x.scales;
    const int64_t stride = x.stride, scale_stride = stride / GROUP_SIZE;
    for (int64_t n = first; n < end; ++n) {
        const GroupReader<KIND> group(panel.weight, n);
        if (prefetches)
            for (int byte = 0; byte < FORMAT.group_bytes(); byte += 64)
                __builtin_prefetch(group.group + PREFETCH_GROUPS * FORMAT.group_bytes() + byte, 0,
                                   2);
        float x_scales[R], x_sums[R][2];   // of the rows: scales, and sums of inputs by scale
        int32_t offsets[R][2];          // what the format's zero takes away
        for (int r = 0; r < R; ++r) {
            const int32_t *halves = half_sums + 2 * (r * scale_stride + n);
            const int32_t sum = FORMAT.n_scales == 2 ? halves[0] : halves[0] + halves[1];
            x_scales[r] = scales[r * scale_stride + n];
            x_sums[r][0] = float(sum) * x_scales[r];
            x_sums[r][1] = float(halves[1]) * x_scales[r];
            offsets[r][0] = zero_of(FORMAT) * sum;
            offsets[r][1] = zero_of(FORMAT) * halves[1];
        }
        for (int from = 0; from < PANEL_ROWS; from += OUTPUTS) {
#pragma GCC unroll 2
            for (int half = 0; half < FORMAT.n_scales; ++half) {
                PairVec products[VECS][R] = {};
                const int8_t *inputs = numbers + n * GROUP_SIZE;
#pragma GCC unroll 4
                for (int step = half * HALF_STEPS; step < (half + 1) * HALF_STEPS; step += 2) {
                    PairVec words[VECS][2];
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v) {
                        words[v][0] = (PairVec)group.words(from + v * LANES<float>, step);
                        words[v][1] = (PairVec)group.words(from + v * LANES<float>, step + 1);
                    }
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const int8_t *of_row = inputs + r * stride + step * STEP_SIZE;
                        const PairVec words_x[2] = {
                            SS_INT(set1_epi32)(load_bits<int32_t>(of_row)),
                            SS_INT(set1_epi32)(load_bits<int32_t>(of_row + STEP_SIZE))};
#pragma GCC unroll 4
                        for (int v = 0; v < VECS; ++v)
                            add_steps<BITS>(products[v][r], words[v], words_x);
                    }
                }
#pragma GCC unroll 4
                for (int v = 0; v < VECS; ++v) {
                    const int out = from + v * LANES<float>;
                    const FloatVec scale = group.scale(out, half);
                    [[maybe_unused]] FloatVec minimum;
                    if constexpr (FORMAT.has_min) minimum = group.minimum(out, half);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const PairVec pairs = products[v][r];
                        IntVec sum = (IntVec)(BITS == 4 ? add_pairs(pairs) : pairs);
                        if constexpr (zero_of(FORMAT) != 0) sum -= offsets[r][half];
                        FloatVec acc = load(sums + r * PANEL_ROWS + out);
                        acc += __builtin_convertvector(sum, FloatVec) * (scale * x_scales[r]);
                        if constexpr (FORMAT.has_min) acc += minimum * x_sums[r][half];
                        store(sums + r * PANEL_ROWS + out, acc);
                    }
                }
            }
        }
    }
}
#undef SS_INT

}  // namespace
