// Rounds weights to blocks, and packs rows of blocks into panels.
#pragma once
#include "abi.h"

void quantize_blocks(const QuantizeArgs &args);
void pack_blocks(const PackArgs &args);
