// Packs rows of blocks into panels.
#pragma once
#include "abi.h"

void pack_blocks(const PackArgs &args);
