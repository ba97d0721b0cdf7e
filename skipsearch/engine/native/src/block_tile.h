// What the tiles of a block product share. A tile sums the products of a few rows.
#pragma once
#include "block_numbers.h"
#include "block_product.h"

#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__))
#define SS_PAIR_PRODUCTS   // the processor multiplies bytes to sums of two products in 16 bits
#endif
#if defined(__ARM_FEATURE_DOTPROD) || (defined(SS_PAIR_PRODUCTS) && !defined(__AVX512BW__))
#define SS_SIGNED_BYTES    // numbers of 8 bits are made signed, which takes their zero away
#endif

namespace {

constexpr int64_t PREFETCH_GROUPS = 32;   // how far ahead a tile prefetches, into the L2 cache

constexpr int zero_of(const BlockFormat &format) {
#if defined(SS_SIGNED_BYTES)
    if (format.product_bits() == 8) return 0;
#endif
    return format.zero;
}

}  // namespace
