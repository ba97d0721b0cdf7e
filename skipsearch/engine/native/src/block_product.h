// The product of a panel in blocks and rounded rows. It does not depend on the model's dtype, so it
// is compiled once for an instruction set.
#pragma once
#include "blocks.h"

// Rows of inputs, rounded to int8 in blocks of GROUP_SIZE inputs.
struct RoundedRows {
    int8_t *numbers;               // [rows, stride]
    int32_t *half_sums;            // [rows, stride / 16] sums of 16 numbers
    float *scales;                 // [rows, stride / GROUP_SIZE]
    int64_t stride;                // a multiple of GROUP_SIZE

    RoundedRows from_row(int64_t row) const {
        return {numbers + row * stride, half_sums + row * stride / (GROUP_SIZE / 2),
                scales + row * stride / GROUP_SIZE, stride};
    }
};

// Multiplies a panel of `in` inputs by the first `rows` rows. Writes sums [rows, PANEL_ROWS].
void multiply_block_panel(const Panel &panel, int64_t in, const RoundedRows &x, int64_t rows,
                          float *sums);
