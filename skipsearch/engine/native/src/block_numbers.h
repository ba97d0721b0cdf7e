// Reads numbers, scales and minimums of a group for LANES<float> neighbouring outputs.
#pragma once
#include "blocks.h"
#include "vec.h"

namespace {

inline FloatVec load_halves(const uint8_t *from) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_cvtph_ps((__m256i)load_bits<HalfVec>(from));
#elif defined(__F16C__)
    return (FloatVec)_mm256_cvtph_ps((__m128i)load_bits<HalfVec>(from));
#elif defined(__aarch64__)
    return (FloatVec)vcvt_f32_f16((float16x4_t)load_bits<HalfVec>(from));
#else
    FloatVec values;
    for (int i = 0; i < LANES<float>; ++i)
        values[i] = half_to_float(load_bits<uint16_t>(from + 2 * i));
    return values;
#endif
}

// Returns table[byte] for each byte of the words, which is less than 16.
inline WordVec look_up_bytes(const uint8_t (&table)[16], WordVec words) {
#if defined(__AVX512BW__)
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (WordVec)_mm512_shuffle_epi8(lanes, (__m512i)words);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i lanes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (WordVec)_mm256_shuffle_epi8(lanes, (__m256i)words);
#elif defined(__aarch64__)
    return (WordVec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)words);
#else
    uint8_t bytes[sizeof words];
    __builtin_memcpy(bytes, &words, sizeof words);
    for (uint8_t &byte : bytes) byte = table[byte];
    return load_bits<WordVec>(bytes);
#endif
}

// One group of a panel, as BLOCK_FORMATS[KIND] describes it.
template <int64_t KIND> struct GroupReader {
    static constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    const uint8_t *header, *group;

    GroupReader(const void *panel, int64_t n)
        : header((const uint8_t *)panel + FORMAT.header_offset(n)),
          group((const uint8_t *)panel + FORMAT.group_offset(n)) {}

    // The functions below read the outputs from `out` on.
    FloatVec scale(int out, int index) const {
        if constexpr (FORMAT.has_super_blocks)
            return load_halves(header + 2 * out) *
                   widen_int8<FloatVec>((const int8_t *)group + index * PANEL_ROWS + out);
        else return load_halves(group + 2 * out);
    }
    FloatVec minimum(int out, int index) const {
        if constexpr (FORMAT.has_super_blocks)
            return -load_halves(header + 2 * (PANEL_ROWS + out)) *
                   widen_int8<FloatVec>((const int8_t *)group +
                                        (FORMAT.n_scales + index) * PANEL_ROWS + out);
        else return load_halves(group + 2 * (PANEL_ROWS + out));
    }

    // The words of a step of inputs. A byte of a word is a number.
    WordVec words(int out, int step) const {
        const uint8_t *numbers = group + FORMAT.scale_bytes() + out * STEP_SIZE;
        constexpr int HIGH_BITS = FORMAT.bits - 4;
        if constexpr (FORMAT.bits == 8) return load_bits<WordVec>(numbers + step * PLANE_BYTES);
        if constexpr (FORMAT.bits == 2)
            return load_bits<WordVec>(numbers + step / 4 * PLANE_BYTES) >> (step % 4 * 2) &
                   0x03030303u;
        WordVec low = load_bits<WordVec>(numbers + step / 2 * PLANE_BYTES);
        low = (step % 2 ? low >> 4 : low) & 0x0f0f0f0fu;
        const auto high = [&](int i) {
            return load_bits<WordVec>(numbers + LOW_BYTES + i * PLANE_BYTES);
        };
        if constexpr (HIGH_BITS == 1) low |= (high(0) >> step & 0x01010101u) << 4;
        if constexpr (HIGH_BITS == 2)
            low |= (high(step / 4) >> (step % 4 * 2) & 0x03030303u) << 4;
        if constexpr (FORMAT.has_codebook) return look_up_bytes(codebook_of(KIND), low);
        return low;
    }
};

}  // namespace
