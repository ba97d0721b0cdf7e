#include "rows.h"

#include <algorithm>
#include <cstring>

namespace {

// Where the tokens in the slots of one text stand.
class Places {
  public:
    Places(const Pass &pass, int64_t b)
        : pass_(pass), slots_(pass.slots + b * pass.slots_step), positions_(pass.positions + b * pass.positions_step),
          known_(pass.key_positions ? pass.key_positions + b * pass.key_positions_step : nullptr) {
        const auto [low, high] = std::minmax_element(slots_, slots_ + pass.rows);
        low_ = *low, high_ = *high;
    }

    int64_t of(int64_t slot) const {
        if (known_) return known_[slot];
        if (slot >= low_ && slot <= high_)
            for (int64_t t = 0; t < pass_.rows; ++t)
                if (slots_[t] == slot) return positions_[t];
        return slot;
    }

  private:
    const Pass &pass_;
    const int64_t *slots_, *positions_, *known_;
    int64_t low_, high_;
};

// How many bytes from the first on are 1.
int64_t leading(const uint8_t *shown, int64_t count) {
    int64_t n = 0;
    for (uint64_t eight; n + 8 <= count; n += 8) {
        std::memcpy(&eight, shown + n, 8);
        if (eight != 0x0101010101010101u) break;
    }
    while (n < count && shown[n]) ++n;
    return n;
}

}  // namespace

int64_t find_seen(const Pass &pass, int64_t window, Seen *seen, int32_t *extra) {
    int64_t extras = 0;
    for (int64_t b = 0; b < pass.batch; ++b) {
        const Places places(pass, b);
        for (int64_t t = 0; t < pass.rows; ++t) {
            Seen &row = seen[b * pass.rows + t];
            const int64_t near = window ? pass.positions[b * pass.positions_step + t] - window : -1;  // what stands behind that is seen
            if (pass.visible == nullptr) {
                const int64_t own = pass.slots[b * pass.slots_step + t] + 1;
                row = {std::clamp<int64_t>(near + 1, 0, own), own, own, nullptr};
                continue;
            }
            const uint8_t *shown = pass.visible + b * pass.visible_step + t * pass.visible_row;
            int64_t prefix = leading(shown, pass.keys);
            if (window) {
                int64_t n = 0;
                while (n < prefix && places.of(n) == n) ++n;
                prefix = n;
            }
            row = {std::clamp<int64_t>(near + 1, 0, prefix), prefix, prefix, extra ? extra + extras : nullptr};
            for (int64_t slot = prefix; slot < pass.keys; ++slot) {
                if (!shown[slot]) continue;
                if (extra) extra[extras] = window && places.of(slot) <= near ? -1 : int32_t(slot);
                ++extras, ++row.count;
            }
        }
    }
    return extras;
}
