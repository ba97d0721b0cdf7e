// Which keys each row of a pass attends to.
#pragma once
#include "abi.h"

// The keys that one row attends to, in text order: entry i < prefix is slot i, later entries are
// listed in `extra`. Sums run in the order of entries, so that a result does not depend on which
// slots hold the tokens.
struct VisibleKeys {
    int64_t first;          // entries before it are outside the attention window
    int64_t prefix;         // entries that are the slot of the same number
    int64_t count;          // all entries
    const int32_t *extra;   // [count - prefix] slots; -1: outside the attention window
};

// Fills `visible_keys` [batch * rows] for one attention window (0: no limit) and returns the number
// of extra entries of all rows. extra: memory for that many slots; null: they are only counted.
int64_t find_visible_keys(const PassArgs &args, int64_t window, VisibleKeys *visible_keys,
                          int32_t *extra);
