// The functions that Python calls. They return 0 if all went well, 1 if there is not enough memory,
// and 2 if a token, slot or position is outside the model or the cache. skipsearch_run_draft
// returns the number of drafted tokens, or one of these codes negated.
#include <algorithm>
#include <new>
#include <vector>

#include "kernels.h"
#include "packing.h"
#include "recurrent_net.h"
#include "threads.h"

extern const Kernels kernels_float, kernels_double, kernels_bf16;

namespace {

// Each calling thread keeps one, so that a pass allocates nothing.
struct VisibilityScratch {
    std::vector<std::vector<VisibleKeys>> visible_keys;   // [n_windows][batch * rows]
    std::vector<std::vector<int32_t>> extra;              // [n_windows], slots of extra entries
    std::vector<const VisibleKeys *> by_window;           // [n_windows] pointers to visible_keys
};

bool is_inside(int64_t value, int64_t count) { return value >= 0 && value < count; }

// Returns whether every token, slot and position is inside the memory that it is an index of.
bool check_indices(const Model &model, const PassArgs &args) {
    if (args.n_keys > args.capacity) return false;
    for (int64_t b = 0; b < args.batch; ++b)
        for (int64_t t = 0; t < args.rows; ++t) {
            if (args.tokens && !is_inside(args.tokens[b * args.rows + t], model.vocab_size))
                return false;
            if (args.first_layer == args.end_layer) continue;
            if (!is_inside(args.slots[b * args.slots_batch_stride + t], args.capacity))
                return false;
            for (int64_t i = args.first_layer; i < args.end_layer; ++i)
                if (!is_inside(args.positions[b * args.positions_batch_stride + t],
                               args.rotary_tables[model.layers[i].rotary_index].length))
                    return false;
        }
    return true;
}

// Finds the visible keys of all rows for every window. Returns the key blocks of the row that
// attends to the most keys.
int64_t compute_visibility(const Model &model, const PassArgs &args, VisibilityScratch &scratch) {
    const size_t windows = size_t(model.n_windows), rows = size_t(args.batch * args.rows);
    if (scratch.visible_keys.size() < windows)
        scratch.visible_keys.resize(windows), scratch.extra.resize(windows);
    scratch.by_window.clear();
    if (args.first_layer == args.end_layer) return 0;
    int64_t max_keys = 0;
    for (size_t w = 0; w < windows; ++w) {
        std::vector<VisibleKeys> &visible_keys = scratch.visible_keys[w];
        if (visible_keys.size() < rows) visible_keys.resize(rows);
        if (const int64_t n_extra =
                find_visible_keys(args, model.windows[w], visible_keys.data(), nullptr)) {
            if (scratch.extra[w].size() < size_t(n_extra)) scratch.extra[w].resize(size_t(n_extra));
            find_visible_keys(args, model.windows[w], visible_keys.data(), scratch.extra[w].data());
        }
        for (size_t r = 0; r < rows; ++r) max_keys = std::max(max_keys, visible_keys[r].count);
        scratch.by_window.push_back(visible_keys.data());
    }
    return (max_keys + KEY_BLOCK - 1) / KEY_BLOCK;
}

// Calls `run` and returns 0, or 1 if there is not enough memory.
template <class Run> int report_memory(Run run) {
    try {
        run();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

const Kernels &get_kernels(int64_t dtype) {
    return dtype == F64 ? kernels_double : dtype == BF16 ? kernels_bf16 : kernels_float;
}

bool run_checked(const Model &model, const PassArgs &args) {
    static thread_local VisibilityScratch scratch;
    if (!check_indices(model, args)) return false;
    const int64_t key_blocks = compute_visibility(model, args, scratch);
    get_kernels(model.dtype).run_pass(PassJob{&model, &args, scratch.by_window.data(), key_blocks});
    return true;
}

// Draws the token of step `step` of a draft from the logits of its pass.
void draw_token(const Model &model, const PassArgs &args, int64_t step) {
    const Sampling &sampling = *args.sampling;
    const int64_t n_rows = (args.head ? args.head : &model.head)->out;
    const int64_t prob_bytes = n_rows * (model.dtype == F64 ? 8 : 4);
    const int64_t row = get_kernels(model.dtype).draw_row(
        {&sampling, sampling.uniforms[step], args.logits, n_rows,
         (char *)sampling.probs + step * prob_bytes, args.confidence});
    *args.choice = args.head ? args.head_tokens[row] : row;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Returns 1 if this processor has the instructions that the kernels were compiled to. SS_REQUIRED
// is a list of SS_HAS(name of an instruction), each followed by &&.
EXPORT int skipsearch_runs_here() {
#define SS_HAS(instruction) __builtin_cpu_supports(#instruction)
    return SS_REQUIRED 1 ? 1 : 0;
}

EXPORT int skipsearch_run_pass(const Model *model, const PassArgs *args) {
    try {
        return run_checked(*model, *args) ? 0 : 2;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// Drafts in at most `max_tokens` passes, greedily or as `sampling` says. The first pass is `first`,
// whose last row drafts. Each later pass has one row: the token that the previous pass chose, at
// the next position and slot. A mix gets the token and `hidden_out` of the previous pass. The draft
// ends after the first token whose confidence is below `threshold`. `first` points to choice
// [max_tokens] and confidence [max_tokens]. Its logits are [max_tokens, outputs of the head] or
// null for a greedy draft, and [outputs of the head] for a sampled one, whose steps overwrite them.
EXPORT int skipsearch_run_draft(const Model *model, const PassArgs *first, int64_t max_tokens,
                                double threshold) {
    try {
        PassArgs args = *first;
        if (args.batch != 1 || args.visible || args.key_positions || !args.tokens) return -2;
        const int64_t itemsize = model->dtype == F64 ? 8 : model->dtype == BF16 ? 2 : 4;
        const int64_t logits_bytes = (args.head ? args.head : &model->head)->out * itemsize;
        const int64_t last = args.rows - 1;
        int64_t position = args.positions[last], slot = args.slots[last], count = 0;
        while (count < max_tokens) {
            if (!run_checked(*model, args)) return -2;
            if (args.sampling) draw_token(*model, args, count);
            ++count;
            if (double(*args.confidence) < threshold) break;
            if (args.mix && count == 1)
                args.hidden_out = (char *)args.hidden_out + last * model->hidden_size * itemsize;
            args.rows = 1, args.positions = &position, args.slots = &slot;
            args.hidden = args.mix ? args.hidden_out : nullptr;
            args.tokens = args.choice++, ++args.confidence, ++position, ++slot, ++args.n_keys;
            if (args.logits && !args.sampling) args.logits = (char *)args.logits + logits_bytes;
        }
        return int(count);
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

EXPORT int skipsearch_run_delta_net(const DeltaNetArgs *args) {
    return report_memory([&] { run_delta_net(*args); });
}

EXPORT int skipsearch_run_mamba(const MambaArgs *args) {
    return report_memory([&] { run_mamba(*args); });
}

EXPORT void skipsearch_quantize_blocks(const QuantizeArgs *args) { quantize_blocks(*args); }

EXPORT void skipsearch_pack_blocks(const PackArgs *args) { pack_blocks(*args); }

EXPORT void skipsearch_copy_rows(const CopyRowsArgs *args) { copy_rows(*args); }

EXPORT void skipsearch_read_rows(int64_t dtype, const ReadRowsArgs *args) {
    get_kernels(dtype).read_rows(*args);
}

EXPORT int skipsearch_run_product(int64_t dtype, const ProductArgs *args) {
    return report_memory([&] { get_kernels(dtype).run_product(*args); });
}
}
