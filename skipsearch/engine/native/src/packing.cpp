// Unpacks the blocks of GGUF files (ggml-common.h of llama.cpp documents them) and packs their
// numbers, scales and minimums into panels. Blocks of IQ2 and IQ3 come from grid_blocks.py.
#include "packing.h"

#include <algorithm>

#include "blocks.h"

namespace {

// One group of one output. scale and minimum are halves; in a super-block they are integers.
struct Group {
    uint8_t numbers[GROUP_SIZE];
    uint16_t scales[2], minimums[2];
};

uint16_t read_half(const uint8_t *from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return half;
}

// Returns the bytes of a block in a file, which has GROUP_SIZE inputs, or SUPER_GROUPS times as
// many.
int file_block_bytes(int64_t kind) {
    constexpr int GRID_BYTES = sizeof(UnpackedSuperBlock);
    constexpr int BYTES[] = {0,   34,  18, 20,  22, 24, 0,          144,        176,
                             210, 110, 18, 136, 17, 84, GRID_BYTES, GRID_BYTES, GRID_BYTES};
    return BYTES[kind];
}

// Returns half of 2^(exponent - 127), the scale of a block of MXFP4, as a half; 0 if no half is it,
// which panels.py allows in blocks of zeros alone.
uint16_t halve_power(uint8_t exponent) {
    const int power = exponent - 128;
    if (power < -24 || power > 15) return 0;
    return uint16_t(power < -14 ? 1 << (power + 24) : (power + 15) << 10);
}

// Reads a block of GROUP_SIZE inputs.
template <int64_t KIND> void read_block(const uint8_t *block, Group &group) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    if constexpr (KIND == MXFP4) group.scales[0] = halve_power(*block++);
    else group.scales[0] = read_half(block), block += 2;
    if constexpr (FORMAT.has_min) group.minimums[0] = read_half(block), block += 2;
    if constexpr (FORMAT.bits == 8) {
        for (int i = 0; i < GROUP_SIZE; ++i) group.numbers[i] = block[i] ^ 128;
        return;
    }
    uint32_t high_bits = 0;
    if constexpr (FORMAT.bits == 5) std::memcpy(&high_bits, block, 4), block += 4;
    for (int i = 0; i < GROUP_SIZE / 2; ++i) {
        group.numbers[i] = block[i] & 15;
        group.numbers[i + GROUP_SIZE / 2] = block[i] >> 4;
    }
    if constexpr (FORMAT.bits == 5)
        for (int i = 0; i < GROUP_SIZE; ++i)
            group.numbers[i] |= uint8_t((high_bits >> i & 1) << 4);
}

// Reads group `index` of a super-block of Q4_K or Q5_K.
template <int64_t KIND> void read_k_block(const uint8_t *block, int index, Group &group) {
    const uint8_t *scales = block + 4, *high = block + 16;
    const uint8_t *low = high + (KIND == Q5_K ? 32 : 0) + index / 2 * 32;
    if (index < 4) group.scales[0] = scales[index] & 63, group.minimums[0] = scales[index + 4] & 63;
    else {
        group.scales[0] = uint16_t((scales[index + 4] & 15) | (scales[index - 4] >> 6) << 4);
        group.minimums[0] = uint16_t((scales[index + 4] >> 4) | (scales[index] >> 6) << 4);
    }
    for (int i = 0; i < GROUP_SIZE; ++i) {
        group.numbers[i] = low[i] >> index % 2 * 4 & 15;
        if constexpr (KIND == Q5_K) group.numbers[i] |= uint8_t((high[i] >> index & 1) << 4);
    }
}

// Reads group `index` of a super-block of Q6_K.
void read_q6_k_block(const uint8_t *block, int index, Group &group) {
    const uint8_t *low = block + index / 4 * 64 + index % 2 * 32;
    const uint8_t *high = block + 128 + index / 4 * 32, *scales = block + 192;
    for (int i = 0; i < GROUP_SIZE; ++i)
        group.numbers[i] = uint8_t((low[i] >> index % 4 / 2 * 4 & 15) |
                                   (high[i] >> index % 4 * 2 & 3) << 4);
    group.scales[0] = scales[2 * index], group.scales[1] = scales[2 * index + 1];
}

// Reads group `index` of a super-block of Q3_K.
void read_q3_k_block(const uint8_t *block, int index, Group &group) {
    const uint8_t *high = block, *low = block + 32 + index / 4 * 32, *scales = block + 96;
    for (int i = 0; i < GROUP_SIZE; ++i)
        group.numbers[i] = uint8_t((low[i] >> index % 4 * 2 & 3) | (high[i] >> index & 1) << 2);
    for (int half = 0; half < 2; ++half) {
        const int n = 2 * index + half;
        const int low_bits = n < 8 ? scales[n] & 15 : scales[n - 8] >> 4;
        const int high_bits = scales[8 + n % 4] >> n / 4 * 2 & 3;
        group.scales[half] = uint16_t((low_bits | high_bits << 4) - 32);
    }
}

// Reads group `index` of a super-block of Q2_K.
void read_q2_k_block(const uint8_t *block, int index, Group &group) {
    const uint8_t *numbers = block + 16 + index / 4 * 32;
    for (int i = 0; i < GROUP_SIZE; ++i) group.numbers[i] = numbers[i] >> index % 4 * 2 & 3;
    for (int half = 0; half < 2; ++half) {
        group.scales[half] = block[2 * index + half] & 15;
        group.minimums[half] = block[2 * index + half] >> 4;
    }
}

// Reads group `index` of a super-block of IQ4_XS.
void read_iq4_xs_block(const uint8_t *block, int index, Group &group) {
    const int high_bits = read_half(block + 2) >> 2 * index & 3;
    const int low_bits = block[4 + index / 2] >> index % 2 * 4 & 15;
    group.scales[0] = uint16_t((low_bits | high_bits << 4) - 32);
    const uint8_t *numbers = block + 8 + index * GROUP_SIZE / 2;
    for (int i = 0; i < GROUP_SIZE / 2; ++i) {
        group.numbers[i] = numbers[i] & 15;
        group.numbers[i + GROUP_SIZE / 2] = numbers[i] >> 4;
    }
}

// Reads group `index` of an unpacked super-block of IQ2 or IQ3.
void read_grid_block(const uint8_t *block, int index, Group &group) {
    UnpackedSuperBlock unpacked;
    std::memcpy(&unpacked, block, sizeof unpacked);
    for (int half = 0; half < 2; ++half)
        group.scales[half] = uint16_t(unpacked.scales[index][half]);
    std::memcpy(group.numbers, unpacked.numbers[index], GROUP_SIZE);
}

// Returns where the half of a super-block is by which its scales are multiplied.
constexpr int scale_offset(int64_t kind) {
    return kind == Q6_K ? 208 : kind == Q3_K ? 108 : kind == Q2_K ? 80 : 0;
}

// Writes a group of one output into a panel, a word of STEP_SIZE numbers at a time.
template <int64_t KIND> void write_group(const Group &group, int out, uint8_t *to) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    if constexpr (FORMAT.has_super_blocks) {
        for (int s = 0; s < FORMAT.n_scales; ++s) {
            to[s * PANEL_ROWS + out] = uint8_t(group.scales[s]);
            if (FORMAT.has_min)
                to[(FORMAT.n_scales + s) * PANEL_ROWS + out] = uint8_t(group.minimums[s]);
        }
    } else {
        std::memcpy(to + 2 * out, &group.scales[0], 2);
        if (FORMAT.has_min) std::memcpy(to + 2 * (PANEL_ROWS + out), group.minimums, 2);
    }
    uint32_t numbers[GROUP_STEPS];
    std::memcpy(numbers, group.numbers, sizeof numbers);
    uint8_t *words = to + FORMAT.scale_bytes() + out * STEP_SIZE;
    constexpr int STEPS = FORMAT.steps_a_byte();
    constexpr uint32_t LOW_BITS = FORMAT.bits == 8 ? ~0u : 0x0f0f0f0fu;
    for (int first = 0; first < GROUP_STEPS; first += STEPS) {
        uint32_t word = 0;
        for (int step = 0; step < STEPS; ++step)
            word |= (numbers[first + step] & LOW_BITS) << step * 8 / STEPS;
        std::memcpy(words + first / STEPS * PLANE_BYTES, &word, STEP_SIZE);
    }
    constexpr int HIGH_BITS = FORMAT.bits == 8 ? 0 : FORMAT.bits - 4;
    if constexpr (HIGH_BITS > 0) {
        constexpr int STEPS_A_BYTE = HIGH_BITS == 2 ? 4 : 8;
        for (int first = 0; first < GROUP_STEPS; first += STEPS_A_BYTE) {
            uint32_t word = 0;
            for (int step = 0; step < STEPS_A_BYTE; ++step)
                word |= (numbers[first + step] >> 4 & 0x0f0f0f0fu) << step * HIGH_BITS;
            std::memcpy(words + LOW_BYTES + first / STEPS_A_BYTE * PLANE_BYTES, &word, STEP_SIZE);
        }
    }
}

// Writes a row of a file into a panel.
template <int64_t KIND>
void pack_row(const PackArgs &args, const uint8_t *row, int out, uint8_t *panel) {
    constexpr BlockFormat FORMAT = BLOCK_FORMATS[KIND];
    const int64_t groups = (args.in + GROUP_SIZE - 1) / GROUP_SIZE;
    Group group{};
    for (int64_t n = 0; n < groups; ++n) {
        if (args.is_unpacked) {
            const uint8_t *block = row + n * int64_t(sizeof(UnpackedBlock));
            group.scales[0] = read_half(block);
            std::memcpy(group.numbers, block + 2, GROUP_SIZE);
        } else if constexpr (!FORMAT.has_super_blocks)
            read_block<KIND>(row + n * file_block_bytes(KIND), group);
        else {
            const uint8_t *block = row + n / SUPER_GROUPS * file_block_bytes(KIND);
            const int index = int(n % SUPER_GROUPS);
            if constexpr (KIND == Q6_K) read_q6_k_block(block, index, group);
            else if constexpr (KIND == Q3_K) read_q3_k_block(block, index, group);
            else if constexpr (KIND == Q2_K) read_q2_k_block(block, index, group);
            else if constexpr (KIND == IQ4_XS) read_iq4_xs_block(block, index, group);
            else if constexpr (KIND == Q4_K || KIND == Q5_K)
                read_k_block<KIND>(block, index, group);
            else read_grid_block(block, index, group);
            uint8_t *header = panel + FORMAT.header_offset(n);
            const uint8_t *factors = block + scale_offset(KIND);
            std::memcpy(header + 2 * out, factors, 2);
            if (FORMAT.has_min) std::memcpy(header + 2 * (PANEL_ROWS + out), factors + 2, 2);
        }
        write_group<KIND>(group, out, panel + FORMAT.group_offset(n));
    }
}

// Copies one column of an array [n][PANEL_ROWS][bytes] to a column of another.
void copy_column(const uint8_t *from, int64_t column, uint8_t *to, int64_t to_column, int64_t n,
                 int64_t bytes) {
    for (int64_t i = 0; i < n; ++i)
        std::memcpy(to + (i * PANEL_ROWS + to_column) * bytes,
                    from + (i * PANEL_ROWS + column) * bytes, size_t(bytes));
}

// Copies an output of a panel in blocks to an output of another panel.
void copy_block_row(const BlockFormat &format, int64_t in, const uint8_t *from, int64_t column,
                    uint8_t *to, int64_t to_column) {
    const int64_t groups = (in + GROUP_SIZE - 1) / GROUP_SIZE, n_minimums = format.has_min;
    for (int64_t n = 0; n < groups; ++n) {
        if (format.has_super_blocks && n % SUPER_GROUPS == 0)
            copy_column(from + format.header_offset(n), column, to + format.header_offset(n),
                        to_column, 1 + n_minimums, 2);
        const uint8_t *group = from + format.group_offset(n);
        uint8_t *to_group = to + format.group_offset(n);
        if (format.has_super_blocks)
            copy_column(group, column, to_group, to_column, format.scale_bytes() / PANEL_ROWS, 1);
        else copy_column(group, column, to_group, to_column, 1 + n_minimums, 2);
        copy_column(group + format.scale_bytes(), column, to_group + format.scale_bytes(),
                    to_column, format.number_bytes() / PLANE_BYTES, STEP_SIZE);
    }
}

}  // namespace

void copy_rows(const CopyRowsArgs &args) {
    // Two inputs of bfloat16 are neighbours, so a cell has at least 4 bytes.
    const int64_t cell_bytes = args.itemsize == 2 ? 4 : args.itemsize;
    const int64_t n_cells = args.itemsize == 2 ? (args.in + 1) / 2 : args.in;
    for (int64_t i = 0; i < args.n_rows; ++i) {
        const int64_t row = args.rows[i], to_row = args.first_row + i;
        const Panel &panel = args.from[row / PANEL_ROWS], &to_panel = args.to[to_row / PANEL_ROWS];
        const uint8_t *from = (const uint8_t *)panel.weight;
        uint8_t *to = (uint8_t *)to_panel.weight;
        if (panel.kind == DENSE)
            copy_column(from, row % PANEL_ROWS, to, to_row % PANEL_ROWS, n_cells, cell_bytes);
        else
            copy_block_row(BLOCK_FORMATS[panel.kind], args.in, from, row % PANEL_ROWS, to,
                           to_row % PANEL_ROWS);
    }
}

void pack_blocks(const PackArgs &args) {
    with_block_kind(args.kind, [&]<int64_t KIND>() {
        const int64_t panel_bytes = BLOCK_FORMATS[KIND].panel_bytes(args.in);
        for (int64_t n = 0; n < args.n_panels; ++n) {
            uint8_t *panel = (uint8_t *)args.panels + n * panel_bytes;
            const uint8_t *const *rows = args.rows + n * PANEL_ROWS;
            // Rows of padding are zeros.
            if (std::find(rows, rows + PANEL_ROWS, nullptr) != rows + PANEL_ROWS)
                std::memset(panel, 0, size_t(panel_bytes));
            for (int out = 0; out < PANEL_ROWS; ++out)
                if (rows[out]) pack_row<KIND>(args, rows[out], out, panel);
        }
    });
}
