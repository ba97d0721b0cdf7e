// Weights of 2 to 8 bits in blocks, which the formats of GGUF files are stored in.
//
// A group has GROUP_SIZE inputs of the PANEL_ROWS outputs of a panel. A weight is
// scale * (number - zero), or scale * number + minimum, with unsigned numbers of `bits` bits. In a
// format with a codebook the number is codebook_of(kind)[the bits].
// A group stores, one after the other:
//
// - scales: half[PANEL_ROWS], or int8[n_scales][PANEL_ROWS] if there are super-blocks
// - minimums, if the format has them: half[PANEL_ROWS], or uint8[n_scales][PANEL_ROWS]
// - numbers, in steps of STEP_SIZE inputs, so that a word holds the inputs of one step:
//   8 bits: uint8[step][PANEL_ROWS][STEP_SIZE]
//   2 bits: four steps in a byte, uint8[step / 4][PANEL_ROWS][STEP_SIZE]
//   else: the lower 4 bits of two steps in a byte, uint8[step / 2][PANEL_ROWS][STEP_SIZE];
//   then, for each bit above 4, uint8[PANEL_ROWS][STEP_SIZE] with a bit (5 bits) or two bits
//   (6 bits: 4 steps a byte) of each step
//
// A super-block has SUPER_GROUPS groups. It begins with half[PANEL_ROWS], by which the scales of
// its groups are multiplied, and half[PANEL_ROWS], by which the minimums are multiplied, negated.
#pragma once
#include "abi.h"
#include "half.h"

constexpr int GROUP_SIZE = 32;
constexpr int STEP_SIZE = 4;
constexpr int GROUP_STEPS = GROUP_SIZE / STEP_SIZE;
constexpr int SUPER_GROUPS = 8;
constexpr int LOW_BYTES = GROUP_SIZE * int(PANEL_ROWS) / 2;       // lower 4 bits of a group
constexpr int PLANE_BYTES = STEP_SIZE * int(PANEL_ROWS);          // one byte a word

// A block of numbers, one a byte: weights that `quantize_blocks` rounded, on their way to a panel.
struct UnpackedBlock {
    uint16_t scale;                // half
    uint8_t numbers[GROUP_SIZE];
};

// A super-block of IQ2 or IQ3, as grid_blocks.py unpacks it: a number is one of the codebook.
struct UnpackedSuperBlock {
    uint16_t scale;                // half, by which the scales are multiplied
    int8_t scales[SUPER_GROUPS][2];
    uint8_t numbers[SUPER_GROUPS][GROUP_SIZE];
};

struct BlockFormat {
    int bits, zero;
    bool has_min, has_super_blocks;
    int n_scales;                  // scales of an output in a group
    bool has_codebook;

    // Bits of the numbers that are multiplied.
    constexpr int product_bits() const { return has_codebook ? 8 : bits < 4 ? 4 : bits; }
    // Steps whose lower bits share a byte.
    constexpr int steps_a_byte() const { return bits == 8 ? 1 : bits == 2 ? 4 : 2; }
    constexpr int number_bytes() const {
        const int planes = GROUP_STEPS / steps_a_byte();
        return (bits == 5 || bits == 6 ? planes + bits - 4 : planes) * PLANE_BYTES;
    }
    constexpr int scale_bytes() const {
        return int(PANEL_ROWS) * (has_super_blocks ? n_scales : 2) * (1 + has_min);
    }
    constexpr int group_bytes() const { return scale_bytes() + number_bytes(); }
    constexpr int header_bytes() const {
        return has_super_blocks ? int(PANEL_ROWS) * (2 + 2 * has_min) : 0;
    }
    constexpr int64_t super_bytes() const { return header_bytes() + SUPER_GROUPS * group_bytes(); }
    constexpr int64_t header_offset(int64_t group) const {
        return group / SUPER_GROUPS * super_bytes();
    }
    constexpr int64_t group_offset(int64_t group) const {
        return header_offset(group) + header_bytes() + group % SUPER_GROUPS * group_bytes();
    }
    constexpr int64_t panel_bytes(int64_t in) const {
        const int64_t groups = (in + GROUP_SIZE - 1) / GROUP_SIZE;
        return groups * group_bytes() +
               (groups + SUPER_GROUPS - 1) / SUPER_GROUPS * header_bytes();
    }
};

// By PanelKind. The entry of DENSE is not used.
constexpr BlockFormat BLOCK_FORMATS[] = {
    {0, 0, false, false, 0, false},
    {8, 128, false, false, 1, false},   // Q8_0
    {4, 8, false, false, 1, false},     // Q4_0
    {4, 0, true, false, 1, false},      // Q4_1
    {5, 16, false, false, 1, false},    // Q5_0
    {5, 0, true, false, 1, false},      // Q5_1
    {6, 32, false, false, 1, false},    // Q6_0, which no file has
    {4, 0, true, true, 1, false},       // Q4_K
    {5, 0, true, true, 1, false},       // Q5_K
    {6, 32, false, true, 2, false},     // Q6_K
    {4, 4, false, true, 2, false},      // Q3_K: three bits in a file
    {4, 128, false, false, 1, true},    // IQ4_NL
    {4, 128, false, true, 1, true},     // IQ4_XS
    {4, 128, false, false, 1, true},    // MXFP4
    {2, 0, true, true, 2, false},       // Q2_K
    {4, 128, false, true, 1, true},     // IQ3_S
    {4, 128, false, true, 1, true},     // IQ3_XXS
    {4, 128, false, true, 2, true},     // IQ2_S, IQ2_XS and IQ2_XXS
};

// The numbers that four bits stand for in IQ4_NL and IQ4_XS: those of llama.cpp plus 128.
constexpr uint8_t CODEBOOK[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                  129, 141, 153, 166, 181, 197, 217, 241};
// The same of MXFP4: twice the numbers of E2M1 plus 128.
constexpr uint8_t CODEBOOK_E2M1[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                       128, 127, 126, 125, 124, 122, 120, 116};

// The entries of the grids of IQ3_S, IQ3_XXS and IQ2 have few magnitudes: these numbers are the
// magnitudes with a sign, plus 128, in ascending order.
constexpr uint8_t CODEBOOK_IQ3_S[16] = {113, 115, 117, 119, 121, 123, 125, 127,
                                        129, 131, 133, 135, 137, 139, 141, 143};
constexpr uint8_t CODEBOOK_IQ3_XXS[16] = {66,  76,  84,  92,  100, 108, 116, 124,
                                          132, 140, 148, 156, 164, 172, 180, 190};
constexpr uint8_t CODEBOOK_IQ2[16] = {85, 103, 120, 136, 153, 171};

using Codebook = const uint8_t[16];
constexpr Codebook &codebook_of(int64_t kind) {
    switch (kind) {
    case MXFP4: return CODEBOOK_E2M1;
    case IQ3_S: return CODEBOOK_IQ3_S;
    case IQ3_XXS: return CODEBOOK_IQ3_XXS;
    case IQ2_S: return CODEBOOK_IQ2;
    }
    return CODEBOOK;
}

// Calls function.operator()<KIND>() with the kind as a constant.
template <class Function> inline void with_block_kind(int64_t kind, Function function) {
    switch (kind) {
    case Q8_0: return function.template operator()<Q8_0>();
    case Q4_0: return function.template operator()<Q4_0>();
    case Q4_1: return function.template operator()<Q4_1>();
    case Q5_0: return function.template operator()<Q5_0>();
    case Q5_1: return function.template operator()<Q5_1>();
    case Q6_0: return function.template operator()<Q6_0>();
    case Q4_K: return function.template operator()<Q4_K>();
    case Q5_K: return function.template operator()<Q5_K>();
    case Q6_K: return function.template operator()<Q6_K>();
    case Q3_K: return function.template operator()<Q3_K>();
    case IQ4_NL: return function.template operator()<IQ4_NL>();
    case IQ4_XS: return function.template operator()<IQ4_XS>();
    case MXFP4: return function.template operator()<MXFP4>();
    case Q2_K: return function.template operator()<Q2_K>();
    case IQ3_S: return function.template operator()<IQ3_S>();
    case IQ3_XXS: return function.template operator()<IQ3_XXS>();
    case IQ2_S: return function.template operator()<IQ2_S>();
    }
}

// Where the byte of a number's lower bits is in the numbers of a group, and the shift of a number
// in it; the same of the bits above 4.
struct NumberPlace {
    int byte, shift, high_byte, high_shift;
    constexpr NumberPlace(const BlockFormat &format, int out, int in) {
        const int step = in / STEP_SIZE, word = out * STEP_SIZE + in % STEP_SIZE;
        const int low_steps = format.steps_a_byte();
        byte = step / low_steps * PLANE_BYTES + word, shift = step % low_steps * 8 / low_steps;
        const int high_bits = format.bits - 4, steps_a_byte = high_bits == 2 ? 4 : 8;
        high_byte = LOW_BYTES + step / steps_a_byte * PLANE_BYTES + word;
        high_shift = step % steps_a_byte * high_bits;
    }
};

// Returns one weight of a panel.
inline float read_block_weight(const Panel &panel, int64_t out, int64_t in) {
    const BlockFormat &format = BLOCK_FORMATS[panel.kind];
    const uint8_t *header = (const uint8_t *)panel.weight + format.header_offset(in / GROUP_SIZE);
    const uint8_t *group = (const uint8_t *)panel.weight + format.group_offset(in / GROUP_SIZE);
    const uint8_t *numbers = group + format.scale_bytes();
    const int k = int(in % GROUP_SIZE), index = k * format.n_scales / GROUP_SIZE;
    const auto half_at = [out](const uint8_t *from) {
        uint16_t half;
        std::memcpy(&half, from + 2 * out, sizeof half);
        return half_to_float(half);
    };
    float scale, minimum = 0;
    if (format.has_super_blocks) {
        const uint8_t *scales = group + index * PANEL_ROWS;
        scale = half_at(header) * float(int8_t(scales[out]));
        if (format.has_min)
            minimum = -half_at(header + 2 * PANEL_ROWS) *
                      float(scales[format.n_scales * PANEL_ROWS + out]);
    } else {
        scale = half_at(group);
        if (format.has_min) minimum = half_at(group + 2 * PANEL_ROWS);
    }
    const NumberPlace place(format, int(out), k);
    int number = numbers[place.byte];
    if (format.bits < 8) number = number >> place.shift & (format.bits == 2 ? 3 : 15);
    if (format.bits == 5 || format.bits == 6)
        number |= (numbers[place.high_byte] >> place.high_shift & ((1 << (format.bits - 4)) - 1))
                  << 4;
    if (format.has_codebook) number = codebook_of(panel.kind)[number];
    return float(number - format.zero) * scale + minimum;
}
