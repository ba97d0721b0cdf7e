// Layers with a recurrent state, between their projections: a short convolution, and for each row
// an update of the state of each head. Rows are computed one after the other, so a row has the same
// bits in a pass over one row and in a pass over many.
#pragma once
#include "abi.h"
#include "threads.h"

// Runs a layer on args.conv.threads threads. Throws std::bad_alloc.
void run_delta_net(const DeltaNetArgs &args);
void run_mamba(const MambaArgs &args);
