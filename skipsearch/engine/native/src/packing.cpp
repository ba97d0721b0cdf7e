// Unpacks the blocks of GGUF files (ggml-common.h of llama.cpp documents them) and packs their
// numbers, scales and minimums into panels.
#include "packing.h"

#include "blocks.h"

namespace {

// One group of one output. scale and minimum are halves; in a super-block they are integers.
struct Group {
    uint8_t numbers[GROUP_SIZE];
    uint16_t scales[2], minimum;
};

uint16_t read_half(const uint8_t *from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return half;
}

// Returns the bytes of a block in a file, which has GROUP_SIZE inputs, or SUPER_GROUPS times as
// many.
int file_block_bytes(int64_t kind) {
    constexpr int BYTES[] = {0, 34, 18, 20, 22, 24, 0, 144, 176, 210};
    return BYTES[kind];
}

// Reads a block of GROUP_SIZE inputs.
void read_block(int64_t kind, const uint8_t *block, Group &group) {
    const BlockFormat &format = BLOCK_FORMATS[kind];
    group.scales[0] = read_half(block), block += 2;
    if (format.has_min) group.minimum = read_half(block), block += 2;
    if (format.bits == 8) {
        for (int i = 0; i < GROUP_SIZE; ++i) group.numbers[i] = block[i] ^ 128;
        return;
    }
    uint32_t high_bits = 0;
    if (format.bits == 5) std::memcpy(&high_bits, block, 4), block += 4;
    for (int i = 0; i < GROUP_SIZE; ++i) {
        const int low = i < 16 ? block[i] & 15 : block[i - 16] >> 4;
        group.numbers[i] = uint8_t(low | (high_bits >> i & 1) << 4);
    }
}

// Reads group `index` of a super-block of Q4_K or Q5_K.
void read_k_block(int64_t kind, const uint8_t *block, int index, Group &group) {
    const uint8_t *scales = block + 4, *high = block + 16;
    const uint8_t *low = high + (kind == Q5_K ? 32 : 0) + index / 2 * 32;
    if (index < 4) group.scales[0] = scales[index] & 63, group.minimum = scales[index + 4] & 63;
    else {
        group.scales[0] = uint16_t((scales[index + 4] & 15) | (scales[index - 4] >> 6) << 4);
        group.minimum = uint16_t((scales[index + 4] >> 4) | (scales[index] >> 6) << 4);
    }
    for (int i = 0; i < GROUP_SIZE; ++i) {
        group.numbers[i] = low[i] >> index % 2 * 4 & 15;
        if (kind == Q5_K) group.numbers[i] |= uint8_t((high[i] >> index & 1) << 4);
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

// Writes a group of one output into a panel that was filled with zeros.
void write_group(const BlockFormat &format, const Group &group, int out, uint8_t *to) {
    if (format.has_super_blocks) {
        for (int s = 0; s < format.n_scales; ++s)
            to[s * PANEL_ROWS + out] = uint8_t(group.scales[s]);
        if (format.has_min) to[PANEL_ROWS + out] = uint8_t(group.minimum);
    } else {
        std::memcpy(to + 2 * out, &group.scales[0], 2);
        if (format.has_min) std::memcpy(to + 2 * (PANEL_ROWS + out), &group.minimum, 2);
    }
    uint8_t *numbers = to + format.scale_bytes();
    for (int i = 0; i < GROUP_SIZE; ++i) {
        const NumberPlace place(format, out, i);
        if (format.bits == 8) {
            numbers[place.byte] = group.numbers[i];
            continue;
        }
        numbers[place.byte] |= uint8_t((group.numbers[i] & 15) << place.shift);
        if (format.bits > 4)
            numbers[place.high_byte] |= uint8_t(group.numbers[i] >> 4 << place.high_shift);
    }
}

// Writes a row of a file into a panel.
void pack_row(const PackArgs &args, const uint8_t *row, int out, uint8_t *panel) {
    const BlockFormat &format = BLOCK_FORMATS[args.kind];
    const int64_t groups = (args.in + GROUP_SIZE - 1) / GROUP_SIZE;
    Group group{};
    for (int64_t n = 0; n < groups; ++n) {
        if (args.is_unpacked) {
            const uint8_t *block = row + n * int64_t(sizeof(UnpackedBlock));
            group.scales[0] = read_half(block);
            std::memcpy(group.numbers, block + 2, GROUP_SIZE);
        } else if (!format.has_super_blocks)
            read_block(args.kind, row + n * file_block_bytes(args.kind), group);
        else {
            const uint8_t *block = row + n / SUPER_GROUPS * file_block_bytes(args.kind);
            const int index = int(n % SUPER_GROUPS);
            if (args.kind == Q6_K) read_q6_k_block(block, index, group);
            else read_k_block(args.kind, block, index, group);
            uint8_t *header = panel + format.header_offset(n);
            std::memcpy(header + 2 * out, args.kind == Q6_K ? block + 208 : block, 2);
            if (format.has_min) std::memcpy(header + 2 * (PANEL_ROWS + out), block + 2, 2);
        }
        write_group(format, group, out, panel + format.group_offset(n));
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
            copy_column(group, column, to_group, to_column, format.n_scales + n_minimums, 1);
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
    const BlockFormat &format = BLOCK_FORMATS[args.kind];
    for (int64_t n = 0; n < args.n_panels; ++n) {
        uint8_t *panel = (uint8_t *)args.panels + n * format.panel_bytes(args.in);
        std::memset(panel, 0, size_t(format.panel_bytes(args.in)));
        for (int out = 0; out < PANEL_ROWS; ++out) {
            if (const uint8_t *row = args.rows[n * PANEL_ROWS + out])
                pack_row(args, row, out, panel);
        }
    }
}
