// The layer of a gated delta net between its projections (Yang et al., arXiv 2412.06464): a short
// convolution, the gated delta rule, and a gated norm.
//
// The state of a head is a matrix. A row of a text multiplies it by a decay, writes to it what the
// row's value differs from what the state returns for the row's key, and reads it with the row's
// query. Rows are computed one after the other, so a row has the same bits in a pass over one row
// and in a pass over many.
#pragma once
#include "abi.h"

constexpr int64_t DELTA_ROWS = 32;   // rows whose queries, keys and values are computed together

// Returns the floats of memory that a thread needs.
inline int64_t delta_scratch_size(const DeltaNetArgs &args) {
    return DELTA_ROWS * (2 * args.key_dim + 2 * args.value_dim + 2);
}

// Computes one head of one text. index: text * value_heads + head. scratch: see above.
void run_delta_head(const DeltaNetArgs &args, int64_t index, float *scratch);
