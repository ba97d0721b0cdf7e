#include "visibility.h"

#include <algorithm>
#include <cstring>

namespace {

// The position of the token in each slot of one text.
class SlotPositions {
  public:
    SlotPositions(const PassArgs &args, int64_t text)
        : args_(args), slots_(args.slots + text * args.slots_batch_stride),
          positions_(args.positions + text * args.positions_batch_stride),
          key_positions_(args.key_positions
                             ? args.key_positions + text * args.key_positions_batch_stride
                             : nullptr) {
        const auto [low, high] = std::minmax_element(slots_, slots_ + args.rows);
        low_ = *low, high_ = *high;
    }

    int64_t of(int64_t slot) const {
        if (key_positions_) return key_positions_[slot];
        if (slot >= low_ && slot <= high_)
            for (int64_t t = 0; t < args_.rows; ++t)
                if (slots_[t] == slot) return positions_[t];
        return slot;
    }

  private:
    const PassArgs &args_;
    const int64_t *slots_, *positions_, *key_positions_;
    int64_t low_, high_;   // the range of slots that the pass writes
};

// Returns how many bytes from the first on are not 0.
int64_t count_leading(const uint8_t *visible, int64_t count) {
    int64_t n = 0;
    for (uint64_t eight; n + 8 <= count; n += 8) {
        std::memcpy(&eight, visible + n, 8);
        if (eight != 0x0101010101010101u) break;
    }
    while (n < count && visible[n]) ++n;
    return n;
}

}  // namespace

int64_t find_visible_keys(const PassArgs &args, int64_t window, VisibleKeys *visible_keys,
                          int32_t *extra) {
    int64_t n_extra = 0;
    for (int64_t b = 0; b < args.batch; ++b) {
        const SlotPositions positions(args, b);
        for (int64_t t = 0; t < args.rows; ++t) {
            VisibleKeys &row = visible_keys[b * args.rows + t];
            // The last position before the attention window.
            const int64_t last_outside =
                window ? args.positions[b * args.positions_batch_stride + t] - window : -1;
            if (args.visible == nullptr) {
                const int64_t count = args.slots[b * args.slots_batch_stride + t] + 1;
                row = {std::clamp<int64_t>(last_outside + 1, 0, count), count, count, nullptr};
                continue;
            }
            const uint8_t *visible =
                args.visible + b * args.visible_batch_stride + t * args.visible_row_stride;
            int64_t prefix = count_leading(visible, args.n_keys);
            if (window) {
                int64_t n = 0;
                while (n < prefix && positions.of(n) == n) ++n;
                prefix = n;
            }
            row = {std::clamp<int64_t>(last_outside + 1, 0, prefix), prefix, prefix,
                   extra ? extra + n_extra : nullptr};
            for (int64_t slot = prefix; slot < args.n_keys; ++slot) {
                if (!visible[slot]) continue;
                if (extra) {
                    const bool is_outside = window && positions.of(slot) <= last_outside;
                    extra[n_extra] = is_outside ? -1 : int32_t(slot);
                }
                ++n_extra, ++row.count;
            }
        }
    }
    return n_extra;
}
