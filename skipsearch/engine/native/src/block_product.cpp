// The product of a panel in blocks and rounded rows, for the instruction set that the compiler's
// flags choose. The products of a group are summed in integers and scaled once. An output is summed
// over groups in their order, so a row has the same bits whatever the other rows are.
#include "block_product.h"

#include "block_numbers.h"

namespace {

constexpr int64_t CHUNK_GROUPS = 8;   // groups that stay in the L1 cache while all rows use them
constexpr int64_t PREFETCH_GROUPS = 32;   // how far ahead a tile prefetches, into the L2 cache
constexpr int TILE_ROWS = SS_BYTES == 64 ? 8 : 4;   // rows whose sums fit in the vector registers

// Vectors of outputs that a tile of `rows` rows sums together. An input is broadcast once for all
// of them, and a broadcast takes as long as a product. One or two rows wait for memory instead.
constexpr int tile_vecs(int rows) { return SS_BYTES == 64 && rows > 2 ? 2 : 1; }

#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
#define SS_PAIR_PRODUCTS   // the processor multiplies bytes to sums of two products in 16 bits
#endif
#if defined(__ARM_FEATURE_DOTPROD) || (defined(SS_PAIR_PRODUCTS) && !defined(__AVX512BW__))
#define SS_SIGNED_BYTES    // numbers of 8 bits are made signed, which takes their zero away
#endif

constexpr int zero_of(const BlockFormat &format) {
#if defined(SS_SIGNED_BYTES)
    if (format.product_bits() == 8) return 0;
#endif
    return format.zero;
}

#if defined(SS_PAIR_PRODUCTS)

#if defined(__AVX512BW__)
#define SS_INT(operation) _mm512_##operation
typedef __m512i PairVec;
#else
#define SS_INT(operation) _mm256_##operation
typedef __m256i PairVec;
#endif

// Steps whose products fit in 16 bits: 4 bits 8 * 2 * 15 * 127, 5 bits 4 * 2 * 31 * 127, 6 bits
// 2 * 2 * 63 * 127, signed 8 bits 2 * 128 * 127.
constexpr int pair_steps(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

// A step's words, made ready for the products with many rows.
template <int BITS> struct Step {
    PairVec words;
    explicit Step(WordVec numbers) : words((PairVec)numbers) {}
    PairVec multiply(PairVec x) const { return SS_INT(maddubs_epi16)(words, x); }
};
#if defined(SS_SIGNED_BYTES)
template <> struct Step<8> {
    PairVec words, magnitudes;
    explicit Step(WordVec numbers)
        : words((PairVec)(numbers ^ 0x80808080u)), magnitudes(_mm256_abs_epi8(words)) {}
    PairVec multiply(PairVec x) const {
        return _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, words));
    }
};
#endif

// Sums of the products of a row, a lane an output.
template <int BITS> struct ProductSums {
    PairVec pairs;                 // sums in 16 bits, of at most pair_steps(BITS) steps
    IntVec sums;
    void start(int32_t sum) { sums = IntVec{} + sum; }
    // Adds the products of a step and of x, an int8[STEP_SIZE]. steps: how many were added before.
    void add(const Step<BITS> &step, const int8_t *x, int steps, bool is_last) {
        const PairVec x_words = SS_INT(set1_epi32)(load_bits<int32_t>(x));
#if !defined(SS_SIGNED_BYTES)
        if constexpr (BITS == 8) {
            const PairVec even_x = SS_INT(srai_epi16)(SS_INT(slli_epi16)(x_words, 8), 8);
            const PairVec even_words = (PairVec)((WordVec)step.words & 0x00ff00ffu);
            sums += (IntVec)SS_INT(madd_epi16)(even_words, even_x);
            sums += (IntVec)SS_INT(madd_epi16)(SS_INT(srli_epi16)(step.words, 8),
                                               SS_INT(srai_epi16)(x_words, 8));
            return;
        }
#endif
        const PairVec products = step.multiply(x_words);
        pairs = steps % pair_steps(BITS) ? SS_INT(add_epi16)(pairs, products) : products;
        if ((steps + 1) % pair_steps(BITS) == 0 || is_last)
            sums += (IntVec)SS_INT(madd_epi16)(pairs, SS_INT(set1_epi16)(1));
    }
};
#undef SS_INT

#else

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
    void add(const Step<BITS> &step, const int8_t *x, int, bool) {
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

#endif

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
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const int32_t *row_sums = x.half_sums + r * x.stride / (GROUP_SIZE / 2) + 2 * n;
                    const int32_t sum = FORMAT.n_scales == 2 ? row_sums[half]
                                                             : row_sums[0] + row_sums[1];
#pragma GCC unroll 2
                    for (int v = 0; v < VECS; ++v)
                        products[v][r].start(-zero_of(FORMAT) * sum);
                }
#pragma GCC unroll 8
                for (int i = 0; i < HALF_STEPS; ++i) {
                    const int step = half * HALF_STEPS + i;
#pragma GCC unroll 2
                    for (int v = 0; v < VECS; ++v) {
                        const Step<FORMAT.product_bits()> words(group.words(output(v), step));
#pragma GCC unroll 8
                        for (int r = 0; r < R; ++r)
                            products[v][r].add(
                                words, x.numbers + r * x.stride + n * GROUP_SIZE + step * STEP_SIZE,
                                i, i == HALF_STEPS - 1);
                    }
                }
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) {
                    const FloatVec scale = group.scale(output(v), half);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        acc[v][r] += __builtin_convertvector(products[v][r].sums, FloatVec) *
                                     (scale * x.scales[r * x.stride / GROUP_SIZE + n]);
                }
            }
            if constexpr (FORMAT.has_min)
#pragma GCC unroll 2
                for (int v = 0; v < VECS; ++v) {
                    const FloatVec minimum = group.minimum(output(v));
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        const int32_t *row_sums =
                            x.half_sums + r * x.stride / (GROUP_SIZE / 2) + 2 * n;
                        acc[v][r] += minimum * (float(row_sums[0] + row_sums[1]) *
                                                x.scales[r * x.stride / GROUP_SIZE + n]);
                    }
                }
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) store(sums + r * PANEL_ROWS + output(v), acc[v][r]);
    }
}

// Runs the tile that has `rows` rows, at most TILE_ROWS.
template <int64_t KIND, int R = TILE_ROWS>
void run_tile_of(int64_t rows, const Panel &panel, int64_t first, int64_t end,
                 const RoundedRows &x, float *sums, bool prefetches) {
    if constexpr (R > 0) {
        if (rows == R) return run_tile<KIND, R>(panel, first, end, x, sums, prefetches);
        run_tile_of<KIND, R - 1>(rows, panel, first, end, x, sums, prefetches);
    }
}

}  // namespace

void multiply_block_panel(const Panel &panel, int64_t in, const RoundedRows &x, int64_t rows,
                          float *sums) {
    const int64_t groups = (in + GROUP_SIZE - 1) / GROUP_SIZE;
    const int64_t planes = rows * x.planes;
    for (int64_t i = 0; i < planes * PANEL_ROWS; ++i) sums[i] = 0;
    with_block_kind(panel.kind, [&]<int64_t KIND>() {
        for (int64_t n = 0; n < groups; n += CHUNK_GROUPS) {
            const int64_t end = n + CHUNK_GROUPS < groups ? n + CHUNK_GROUPS : groups;
            for (int64_t i = 0; i < planes; i += TILE_ROWS)
                run_tile_of<KIND>(planes - i < TILE_ROWS ? planes - i : TILE_ROWS, panel, n, end,
                                  x.from_plane(i), sums + i * PANEL_ROWS, i == 0);
        }
    });
    for (int64_t row = 0; x.planes == 2 && row < rows; ++row)
        for (int64_t i = 0; i < PANEL_ROWS; i += LANES<float>) {
            const float *pair = sums + 2 * row * PANEL_ROWS + i;
            store(sums + row * PANEL_ROWS + i, load(pair) + load(pair + PANEL_ROWS));
        }
}
