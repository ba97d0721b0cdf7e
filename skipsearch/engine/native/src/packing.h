// Rounds weights to blocks, packs rows of blocks into panels, and copies rows between panels.
#pragma once
#include "abi.h"

void quantize_blocks(const QuantizeArgs &args);
void pack_blocks(const PackArgs &args);
void copy_rows(const CopyRowsArgs &args);
