// Which keys each row of a pass attends to.
#pragma once
#include "abi.h"

// Entries 0 ... prefix - 1 are the slots of those numbers, those behind them are `extra` (-1: out of the window). Entries before `first` are
// out of the window. A token thus has the number of its place in the row's own text, whatever slots hold it: sums go by that number.
struct Seen {
    int64_t first, prefix, count;
    const int32_t *extra;
};

// For all rows of a pass and one window. seen: [batch * rows]. extra: room for their entries; null to count them only.
int64_t find_seen(const Pass &pass, int64_t window, Seen *seen, int32_t *extra);
