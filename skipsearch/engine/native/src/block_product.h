// The product of a panel in blocks and rounded rows. It does not depend on the model's dtype, so it
// is compiled once for an instruction set.
#pragma once
#include "blocks.h"

// Rows of inputs, rounded to int8 in blocks of GROUP_SIZE inputs. With two planes, an input is the
// sum of two rounded ones.
struct RoundedRows {
    int8_t *numbers;               // [rows * planes, stride]
    int32_t *half_sums;            // [rows * planes, stride / 16] sums of 16 numbers
    float *scales;                 // [rows * planes, stride / GROUP_SIZE]
    int64_t stride;                // a multiple of GROUP_SIZE
    int64_t planes;                // rows of numbers that a row of inputs takes, 1 or 2

    RoundedRows from_plane(int64_t n) const {
        return {numbers + n * stride, half_sums + n * stride / (GROUP_SIZE / 2),
                scales + n * stride / GROUP_SIZE, stride, planes};
    }
};

// Multiplies a panel of `in` inputs by the first `rows` rows. Writes sums [rows, PANEL_ROWS]; the
// memory behind them, up to [rows * planes, PANEL_ROWS], is used too.
void multiply_block_panel(const Panel &panel, int64_t in, const RoundedRows &x, int64_t rows,
                          float *sums);
