// The tile of a block product for instruction sets that sum the products of a word: each lane of a
// vector adds four products of bytes to a sum in 32 bits. A plain processor computes the same.
#pragma once
#include "block_tile.h"

namespace {

constexpr int TILE_ROWS = SS_BYTES == 64 ? 8 : 4;   // rows whose sums fit in the vector registers

// Vectors of outputs that a tile of `rows` rows sums together. An input is broadcast once for all
// of them, and a broadcast takes as long as a product. One or two rows wait for memory instead.
constexpr int tile_vecs(int rows) { return SS_BYTES == 64 && rows > 2 ? 2 : 1; }

// The words of a step.
template <int BITS> struct Step {
    WordVec words;
#if defined(SS_SIGNED_BYTES)
    explicit Step(WordVec numbers) : words(BITS == 8 ? numbers ^ 0x80808080u : numbers) {}
#else
    explicit Step(WordVec numbers) : words(numbers) {}
#endif
};

// Sums of the products of a row, a lane an output.
template <int BITS> struct ProductSums {
    IntVec sums;
    void start(int32_t sum) { sums = IntVec{} + sum; }
    // Adds the products of a step and of x, an int8[STEP_SIZE].
    void add(const Step<BITS> &step, const int8_t *x) {
        [[maybe_unused]] const int32_t x_word = load_bits<int32_t>(x);
#if defined(__AVX512VNNI__)
        sums = (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)step.words,
                                           _mm512_set1_epi32(x_word));
#elif defined(__AVXVNNI__)
        sums = (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)step.words,
                                               _mm256_set1_epi32(x_word));
#elif defined(__ARM_FEATURE_DOTPROD)
        sums = (IntVec)vdotq_s32((int32x4_t)sums, (int8x16_t)step.words,
                                 vreinterpretq_s8_s32(vdupq_n_s32(x_word)));
#else
        for (int i = 0; i < STEP_SIZE; ++i)
            sums += (IntVec)(step.words >> (8 * i) & 255u) * int32_t(x[i]);
#endif
    }
};

// Adds the products of R rows, and of groups first ... end - 1, to sums [R, PANEL_ROWS].
// Prefetches groups that follow these, if `prefetches`.
template <int64_t KIND, int R>
void run_tile(const Panel &panel, int64_t first, int64_t end, const RoundedRows &x, float *sums,
              bool prefetches) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    constexpr int HALF_STEPS = GROUP_STEPS / FORMAT.n_scales;
    constexpr int VECS = tile_vecs(R), OUTPUTS = VECS * LANES<float>;
    constexpr int LINES = (FORMAT.group_bytes() + 63) / 64;
    for (int from = 0; from < PANEL_ROWS; from += OUTPUTS) {
        const auto output = [from](int v) { return from + v * LANES<float>; };
        FloatVec acc[VECS][R];
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) acc[v][r] = load(sums + r * PANEL_ROWS + output(v));
        for (int64_t n = first; n < end; ++n) {
            const GroupReader<KIND> group(panel.weight, n);
            if (prefetches)
                for (int line = from * LINES / PANEL_ROWS;
                     line < (from + OUTPUTS) * LINES / PANEL_ROWS; ++line)
                    __builtin_prefetch(group.group + PREFETCH_GROUPS * FORMAT.group_bytes() +
                                           line * 64, 0, 2);
#pragma GCC unroll 2
            for (int half = 0; half < FORMAT.n_scales; ++half) {
                ProductSums<FORMAT.product_bits()> products[VECS][R];
                int32_t x_sums[R];   // of the inputs that have this scale
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const int32_t *halves = x.half_sums + r * x.stride / (GROUP_SIZE / 2) + 2 * n;
                    x_sums[r] = FORMAT.n_scales == 2 ? halves[half] : halves[0] + halves[1];
#pragma GCC unroll 2
                    for (int v = 0; v < VECS; ++v)
                        products[v][r].start(-zero_of(FORMAT) * x_sums[r]);
                }
#pragma GCC unroll 8
                for (int i = 0; i < HALF_STEPS; ++i) {
                    const int step = half * HALF_STEPS + i;
#pragma GCC unroll 2
                    for (int v = 0; v < VECS; ++v) {
                        const Step<FORMAT.product_bits()> words(group.words(output(v), step));
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r)
                            products[v][r].add(words, x.numbers + r * x.stride + n * GROUP_SIZE +
                                                          step * STEP_SIZE);
                    }
                }
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) {
                    const FloatVec scale = group.scale(output(v), half);
                    [[maybe_unused]] FloatVec minimum;
                    if constexpr (FORMAT.has_min) minimum = group.minimum(output(v), half);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const float x_scale = x.scales[r * x.stride / GROUP_SIZE + n];
                        acc[v][r] += __builtin_convertvector(products[v][r].sums, FloatVec) *
                                     (scale * x_scale);
                        if constexpr (FORMAT.has_min)
                            acc[v][r] += minimum * (float(x_sums[r]) * x_scale);
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) store(sums + r * PANEL_ROWS + output(v), acc[v][r]);
    }
}

}  // namespace
