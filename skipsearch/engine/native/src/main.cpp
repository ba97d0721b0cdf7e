// What Python calls. Each function returns 0, 1 where there is no memory for it, or 2 for numbers that would lead outside of it; a draft
// returns its length, or one of these two negated.
#include <algorithm>
#include <new>
#include <vector>

#include "kernels.h"
#include "threads.h"

extern const Kernels kernels_float, kernels_double, kernels_bf16;

namespace {

// Kept by each caller, so that a pass allocates nothing.
struct Sights {
    std::vector<std::vector<Seen>> seen;
    std::vector<std::vector<int32_t>> extra;
    std::vector<const Seen *> found;
};

bool inside(int64_t value, int64_t count) { return value >= 0 && value < count; }

// Whether every token, slot and position is one that there is room for.
bool sound(const Model &model, const Pass &pass) {
    if (pass.keys > pass.capacity) return false;
    for (int64_t b = 0; b < pass.batch; ++b)
        for (int64_t t = 0; t < pass.rows; ++t) {
            if (pass.tokens && !inside(pass.tokens[b * pass.rows + t], model.vocab)) return false;
            if (pass.first == pass.last) continue;
            if (!inside(pass.slots[b * pass.slots_step + t], pass.capacity)) return false;
            for (int64_t i = pass.first; i < pass.last; ++i)
                if (!inside(pass.positions[b * pass.positions_step + t], pass.tables[model.layers[i].table].length)) return false;
        }
    return true;
}

int64_t look(const Model &model, const Pass &pass, Sights &sights) {
    const size_t windows = size_t(model.n_windows), rows = size_t(pass.batch * pass.rows);
    if (sights.seen.size() < windows) sights.seen.resize(windows), sights.extra.resize(windows);
    sights.found.clear();
    if (pass.first == pass.last) return 0;
    int64_t most = 0;
    for (size_t w = 0; w < windows; ++w) {
        std::vector<Seen> &seen = sights.seen[w];
        if (seen.size() < rows) seen.resize(rows);
        if (const int64_t extras = find_seen(pass, model.windows[w], seen.data(), nullptr)) {
            if (sights.extra[w].size() < size_t(extras)) sights.extra[w].resize(size_t(extras));
            find_seen(pass, model.windows[w], seen.data(), sights.extra[w].data());
        }
        for (size_t r = 0; r < rows; ++r) most = std::max(most, seen[r].count);
        sights.found.push_back(seen.data());
    }
    return (most + KEYS_AT_ONCE - 1) / KEYS_AT_ONCE;
}

const Kernels &of(int64_t dtype) { return dtype == F64 ? kernels_double : dtype == BF16 ? kernels_bf16 : kernels_float; }

bool run(const Model &model, const Pass &pass) {
    static thread_local Sights sights;
    if (!sound(model, pass)) return false;
    const int64_t blocks = look(model, pass, sights);
    of(model.dtype).pass(Job{&model, &pass, sights.found.data(), blocks});
    return true;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Whether this processor has the instructions that the kernels were compiled to: SS_SET is 0 for plain C++, 1 for AVX2, 2 for AVX-512, 3 with bfloat16.
EXPORT int skipsearch_runs_here() {
#if SS_SET == 3
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return 0;
#endif
#if SS_SET >= 2
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) return 0;
#endif
#if SS_SET >= 1
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
#endif
    return 1;
}

EXPORT int skipsearch_pass(const Model *model, const Pass *pass) {
    try {
        return run(*model, *pass) ? 0 : 2;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// A greedy draft: `most` passes of one token, the first as it is given, each other one with the token that the one before chose, a position
// and a slot on. It ends behind the first token that is less sure than `threshold`. choice, confidence: [most]; logits: [most, vocab] or null.
EXPORT int skipsearch_draft(const Model *model, const Pass *first, int64_t most, double threshold) {
    try {
        Pass pass = *first;
        if (pass.batch != 1 || pass.rows != 1 || pass.visible || pass.key_positions || !pass.tokens) return -2;
        int64_t position = *pass.positions, slot = *pass.slots, count = 0;
        const int64_t row = model->vocab * (model->dtype == F64 ? 8 : model->dtype == BF16 ? 2 : 4);   // bytes of logits
        pass.positions = &position, pass.slots = &slot;
        while (count < most) {
            if (!run(*model, pass)) return -2;
            ++count;
            if (double(*pass.confidence) < threshold) break;
            pass.tokens = pass.choice++, ++pass.confidence, ++position, ++slot, ++pass.keys;
            if (pass.logits) pass.logits = (char *)pass.logits + row;
        }
        return int(count);
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

EXPORT int skipsearch_product(int64_t dtype, const Product *product) {
    try {
        of(dtype).product(*product);
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
}
