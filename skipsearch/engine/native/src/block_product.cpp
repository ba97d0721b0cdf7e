// The product of a panel in blocks and rounded rows, for the instruction set that the compiler's
// flags choose. The products of a group are summed in integers and scaled once. An output is summed
// over groups in their order, so a row has the same bits whatever the other rows are.
#include "block_product.h"

#include "block_tile.h"
#if defined(SS_PAIR_PRODUCTS)
#include "pair_tile.h"
#else
#include "dot_tile.h"
#endif

namespace {

constexpr int64_t CHUNK_GROUPS = 8;   // groups that stay in the L1 cache while all rows use them

// Runs the tile that has `rows` rows, at most TILE_ROWS.
template <int64_t KIND, int R = TILE_ROWS>
void run_tile_of(int64_t rows, const Panel &panel, int64_t first, int64_t end,
                 const RoundedRows &x, float *sums, bool prefetches) {
    if constexpr (R > 0) {
        if (rows == R) return run_tile<KIND, R>(panel, first, end, x, sums, prefetches);
        run_tile_of<KIND, R - 1>(rows, panel, first, end, x, sums, prefetches);
    }
}

}  // namespace

void multiply_block_panel(const Panel &panel, int64_t in, const RoundedRows &x, int64_t rows,
                          float *sums) {
    const int64_t groups = (in + GROUP_SIZE - 1) / GROUP_SIZE;
    const int64_t planes = rows * x.planes;
    for (int64_t i = 0; i < planes * PANEL_ROWS; ++i) sums[i] = 0;
    with_block_kind(panel.kind, [&]<int64_t KIND>() {
        for (int64_t n = 0; n < groups; n += CHUNK_GROUPS) {
            const int64_t end = n + CHUNK_GROUPS < groups ? n + CHUNK_GROUPS : groups;
            for (int64_t i = 0; i < planes; i += TILE_ROWS)
                run_tile_of<KIND>(planes - i < TILE_ROWS ? planes - i : TILE_ROWS, panel, n, end,
                                  x.from_plane(i), sums + i * PANEL_ROWS, i == 0);
        }
    });
    for (int64_t row = 0; x.planes == 2 && row < rows; ++row)
        for (int64_t i = 0; i < PANEL_ROWS; i += LANES<float>) {
            const float *pair = sums + 2 * row * PANEL_ROWS + i;
            store(sums + row * PANEL_ROWS + i, load(pair) + load(pair + PANEL_ROWS));
        }
}
