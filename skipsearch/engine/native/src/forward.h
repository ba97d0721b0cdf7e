// The forward pass: what each thread does between barriers. Shared memory is written by one thread
// and read by others after the next barrier.
#pragma once
#include "attention.h"
#include "layer_ops.h"
#include "kernels.h"
#include "routing.h"
#include "threads.h"

namespace {

constexpr int64_t MAX_SPLIT_ROWS = 16;   // up to so many rows, threads share the keys of a row
constexpr int64_t QUERY_SPAN = 16;       // queries that a thread takes through a key block together

template <class T> class ForwardPass {
    using A = Acc<T>;

  public:
    explicit ForwardPass(const PassJob &job)
        : model(*job.model), args(*job.args), job(job), total_rows(args.batch * args.rows),
          threads(int(args.threads)) {
        max_rows = total_rows < ROWS_AT_ONCE ? total_rows : ROWS_AT_ONCE;
        int64_t qkv_width = 0, mid_width = 0, heads = 0, head_dim = 0;
        bool has_post_norm = false;
        for (int64_t i = args.first_layer; i < args.end_layer; ++i) {
            const Layer &layer = model.layers[i];
            raise_to(qkv_width, panel_count(layer.qkv) * PANEL_ROWS);
            raise_to(mid_width, layer.out.in), raise_to(mid_width, layer.down.in);
            raise_to(mid_width, layer.shared_down.in);
            raise_to(heads, layer.heads), raise_to(head_dim, layer.head_dim);
            raise_to(n_experts, layer.n_experts), raise_to(pairs_per_row, layer.experts_per_token);
            has_post_norm |= layer.attn_post_norm.weight || layer.mlp_post_norm.weight;
        }
        h_stride = round_up(model.hidden_size);
        x_stride = round_up(args.mix ? 2 * model.hidden_size : model.hidden_size);
        qkv_stride = round_up(qkv_width), mid_stride = round_up(mid_width);
        values_stride = round_up(head_dim);
        split_keys = total_rows <= MAX_SPLIT_ROWS && job.key_blocks > 1 && threads > 1;
        Arena arena{nullptr};
        allocate(arena, has_post_norm, heads);
        arena.next = (char *)get_workspace(size_t(arena.next - (char *)nullptr));
        allocate(arena, has_post_norm, heads);
    }

    static void work(void *self, int thread, int threads, Barrier &barrier) {
        ((ForwardPass *)self)->run(ThreadCtx{thread, threads, barrier});
    }

  private:
    struct ThreadCtx {
        int thread, threads;
        Barrier &barrier;
        WorkRange share(int64_t count) const { return {count, thread, threads}; }
    };

    const Model &model;
    const PassArgs &args;
    const PassJob &job;
    const int64_t total_rows;                  // batch * rows
    const int threads;
    int64_t max_rows;                          // rows that go through a sub-layer together
    int64_t n_experts = 0, pairs_per_row = 1;  // the most of a layer
    int64_t h_stride, x_stride, qkv_stride, mid_stride, values_stride;
    bool split_keys;                           // whether threads share the keys of a row
    A *h;                                      // [total_rows, h_stride] the residual stream
    A *qkv;                                    // [max_rows, qkv_stride]
    A *branch;                                 // [max_rows, h_stride] input of a post norm, or null
    A *values;                                 // [total_rows, heads, key_blocks, values_stride]
    Input<T> *mid;                             // [pairs, mid_stride] input of `out` and `down`
    PartialSoftmax<A> *parts;                  // [total_rows, heads, key_blocks] if split_keys
    ThreadScratch<T> *scratches;               // [threads]
    ArgmaxAcc<A> *argmaxes;                    // [threads, batch]

    static void raise_to(int64_t &max, int64_t value) { max = value > max ? value : max; }
    static int64_t round_up(int64_t width) {
        return (width + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    }

    // Lays out the memory of the pass. Called twice: first to measure it, then to use it.
    void allocate(Arena &arena, bool has_post_norm, int64_t heads) {
        const bool has_memory = arena.next != nullptr;
        h = arena.take<A>(total_rows * h_stride);
        qkv = arena.take<A>(max_rows * qkv_stride);
        const int64_t pairs = max_rows * pairs_per_row;   // without experts, a pair is a row
        mid = arena.take<Input<T>>(pairs * mid_stride);
        branch = has_post_norm ? arena.take<A>(max_rows * h_stride) : nullptr;
        const int64_t n_parts = split_keys ? total_rows * heads * job.key_blocks : 0;
        parts = arena.take<PartialSoftmax<A>>(n_parts);
        values = arena.take<A>(n_parts * values_stride);
        scratches = arena.take<ThreadScratch<T>>(threads);
        argmaxes = arena.take<ArgmaxAcc<A>>(threads * args.batch);
        for (int t = 0; t < threads; ++t) {
            const int64_t n_sums = max_rows * plane_count(model.activations) * PANEL_ROWS;
            const int64_t rounded_stride = x_stride > mid_stride ? x_stride : mid_stride;
            ThreadScratch<T> scratch{arena.take<Input<T>>(max_rows * x_stride),
                                     take_rounded(arena, model.activations, pairs, rounded_stride),
                                     arena.take<A>(n_sums),
                                     arena.take<A>(n_sums),
                                     arena.take<A>((QUERY_TILE + QUERY_SPAN) * values_stride),
                                     args.mix ? arena.take<A>(h_stride) : nullptr,
                                     n_experts ? arena.take<Input<T>>(pairs * x_stride) : nullptr,
                                     {}};
            if (n_experts)
                scratch.routes = {arena.take<A>(round_up(n_experts)), arena.take<int64_t>(pairs),
                                  arena.take<A>(pairs), arena.take<int64_t>(pairs),
                                  arena.take<A>(pairs), arena.take<int64_t>(n_experts + 1),
                                  arena.take<int64_t>(n_experts), 0};
            if (has_memory) scratches[t] = scratch;
        }
    }

    // Returns the rows as the products of a matrix read them. Rounds them if it has blocks.
    Inputs<T> prepare_inputs(ThreadCtx ctx, const Matrix &matrix, const Input<T> *x,
                             int64_t stride, int64_t rows) {
        const RoundedRows &rounded = scratches[ctx.thread].rounded;
        if (!matrix.has_blocks || model.activations == FLOAT) return {x, stride, rows, nullptr};
        round_rows<T>(x, stride, matrix.in, rows, rounded);
        return {x, stride, rows, &rounded};
    }

    void run(ThreadCtx ctx) {
        load_inputs(ctx);
        for (int64_t i = args.first_layer; i < args.end_layer; ++i) {
            const bool attn = !args.skip || !args.skip[2 * i];
            const bool mlp = !args.skip || !args.skip[2 * i + 1];
            for (int64_t r = 0; attn && r < total_rows; r += ROWS_AT_ONCE)
                run_attention(ctx, model.layers[i], i, r, rows_from(r));
            for (int64_t r = 0; mlp && r < total_rows; r += ROWS_AT_ONCE) {
                if (model.layers[i].n_experts) run_experts(ctx, model.layers[i], r, rows_from(r));
                else run_mlp(ctx, model.layers[i], r, rows_from(r));
            }
        }
        if (args.hidden_out)
            for (auto [r, end] = ctx.share(total_rows); r < end; ++r)
                store_as<T>((T *)args.hidden_out + r * model.hidden_size, h + r * h_stride,
                            model.hidden_size);
        if (args.logits || args.choice) run_head(ctx);
    }

    int64_t rows_from(int64_t r) const {
        return total_rows - r < ROWS_AT_ONCE ? total_rows - r : ROWS_AT_ONCE;
    }
    int64_t position(int64_t r) const {
        return args.positions[r / args.rows * args.positions_batch_stride + r % args.rows];
    }
    int64_t slot(int64_t r) const {
        return args.slots[r / args.rows * args.slots_batch_stride + r % args.rows];
    }

    // Fills h with the embeddings of the tokens, with the hidden states, or with a mix of both.
    void load_inputs(ThreadCtx ctx) {
        for (int64_t r = 0; args.mix && r < total_rows; r += ROWS_AT_ONCE)
            mix_inputs(ctx, *args.mix, r, rows_from(r));
        for (auto [r, end] = ctx.share(args.mix ? 0 : total_rows); r < end; ++r) {
            A *row = h + r * h_stride;
            if (args.tokens) load_embedding<T>(model, args.tokens[r], row);
            else load_hidden(model, (const T *)args.hidden + r * model.hidden_size, row);
            for (int64_t d = model.hidden_size; d < h_stride; ++d) row[d] = 0;
        }
        ctx.barrier.wait();
    }

    // Fills `rows` rows of h from r on with the mix of embeddings and hidden states.
    void mix_inputs(ThreadCtx ctx, const InputMix &mix, int64_t r, int64_t rows) {
        Input<T> *x = scratches[ctx.thread].x;
        mix_rows<T>(model, mix, args.tokens + r, (const T *)args.hidden + r * model.hidden_size,
                    rows, scratches[ctx.thread].row, x, x_stride);
        multiply(ctx, mix.projection, x, x_stride, rows, [&](int64_t n, const A *sums) {
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < PANEL_ROWS; j += LANES<T>)
                    store(h + (r + i) * h_stride + n * PANEL_ROWS + j,
                          round_vec_to<T>(load(sums + i * PANEL_ROWS + j)));
        });
    }

    // Applies a norm to `rows` rows from r on. Returns them in this thread's scratch memory.
    Input<T> *norm_rows(ThreadCtx ctx, const Norm &norm, int64_t r, int64_t rows) {
        Input<T> *x = scratches[ctx.thread].x;
        for (int64_t i = 0; i < rows; ++i)
            rms_norm_row<T>(norm, h + (r + i) * h_stride, model.hidden_size, x + i * x_stride,
                            x_stride);
        return x;
    }

    // Multiplies this thread's panels of a matrix by x [rows, stride], and calls
    // consume(panel, sums [rows, PANEL_ROWS]) after each.
    template <class Consume>
    void multiply(ThreadCtx ctx, const Matrix &matrix, const Input<T> *x, int64_t stride,
                  int64_t rows, Consume consume) {
        A *sums = scratches[ctx.thread].sums[0];
        const Inputs<T> inputs = prepare_inputs(ctx, matrix, x, stride, rows);
        for (auto [n, end] = ctx.share(panel_count(matrix)); n < end; ++n) {
            multiply_panel<T>(matrix, n, inputs, sums);
            add_bias<T>(matrix, n, rows, sums);
            consume(n, sums);
        }
    }

    // Multiplies a matrix by `mid`, applies the post norm if there is one, and adds the result to
    // the residual stream of `rows` rows from r on.
    void add_to_residual(ThreadCtx ctx, const Matrix &matrix, const Norm &post_norm, int64_t r,
                         int64_t rows) {
        A *output = post_norm.weight ? branch : h + r * h_stride;
        multiply(ctx, matrix, mid, mid_stride, rows, [&](int64_t n, const A *sums) {
            for (int64_t i = 0; i < rows; ++i) {
                A *to = output + i * h_stride + n * PANEL_ROWS;
                const A *from = sums + i * PANEL_ROWS;
                if (!post_norm.weight) add_panel<T>(from, to);
                else __builtin_memcpy(to, from, PANEL_ROWS * sizeof(A));
            }
        });
        ctx.barrier.wait();
        if (!post_norm.weight) return;
        for (auto [i, end] = ctx.share(rows); i < end; ++i) {
            A *to = h + (r + i) * h_stride, *row = branch + i * h_stride;
            rms_norm_heads<A>(post_norm, row, model.hidden_size);
            for (int64_t d = 0; d < h_stride; d += LANES<T>)
                store(to + d, round_vec_to<T>(load(to + d) + load(row + d)));
        }
        ctx.barrier.wait();
    }

    // forward_mlp.h has the definitions.
    void run_mlp(ThreadCtx ctx, const Layer &layer, int64_t r, int64_t rows);
    void run_experts(ThreadCtx ctx, const Layer &layer, int64_t r, int64_t rows);
    void run_shared_expert(ThreadCtx ctx, const Layer &layer, const Input<T> *x, int64_t r,
                           int64_t rows);
    void fill_mid(ThreadCtx ctx, const Layer &layer, const Matrix &gate_up, const Input<T> *x,
                  int64_t rows);

    void run_attention(ThreadCtx ctx, const Layer &layer, int64_t index, int64_t r, int64_t rows) {
        const Input<T> *x = norm_rows(ctx, layer.attn_norm, r, rows);
        multiply(ctx, layer.qkv, x, x_stride, rows, [&](int64_t n, const A *sums) {
            for (int64_t i = 0; i < rows; ++i)
                __builtin_memcpy(qkv + i * qkv_stride + n * PANEL_ROWS, sums + i * PANEL_ROWS,
                                 PANEL_ROWS * sizeof(A));
        });
        ctx.barrier.wait();
        if (model.kv_format == KV_INT8) attend<Int8Row<T>>(ctx, layer, index, r, rows);
        else attend<DtypeRow<T>>(ctx, layer, index, r, rows);
        ctx.barrier.wait();
        add_to_residual(ctx, layer.out, layer.attn_post_norm, r, rows);
    }

    // Stores the K/V of `rows` rows from r on as Row, and writes their attention to `mid`.
    template <class Row>
    void attend(ThreadCtx ctx, const Layer &layer, int64_t index, int64_t r, int64_t rows) {
        for (auto [i, end] = ctx.share(rows); i < end; ++i)
            rotate_and_store_kv<Row>(layer, index, r + i, qkv + i * qkv_stride);
        ctx.barrier.wait();
        if (split_keys) attend_by_block<Row>(ctx, layer, index);
        else attend_by_row<Row>(ctx, layer, index, r, rows);
    }

    // Applies norms and the rotary embedding to a row's queries and keys, in place, and writes its
    // keys and values to its slot. row: [heads + 2 * kv_heads, head_dim].
    template <class Row>
    void rotate_and_store_kv(const Layer &layer, int64_t index, int64_t r, A *row) {
        const int64_t width = layer.head_dim, b = r / args.rows;
        rms_norm_heads<A>(layer.q_norm, row, layer.heads * width);
        rms_norm_heads<A>(layer.k_norm, row + layer.heads * width, layer.kv_heads * width);
        const RotaryTable &table = args.rotary_tables[layer.rotary_index];
        const A *cos = (const A *)table.cos + position(r) * table.width;
        const A *sin = (const A *)table.sin + position(r) * table.width;
        for (int64_t n = 0; n < layer.heads + layer.kv_heads; ++n)
            apply_rope<A>(row + n * width, cos, sin, table.width);
        if (layer.query_factors)
            for (int64_t i = 0; i < layer.heads * width; ++i)
                row[i] *= (A)layer.query_factors[position(r) / layer.query_period];
        for (int64_t n = 0; n < layer.kv_heads; ++n) {
            const A *k = row + (layer.heads + n) * width, *v = k + layer.kv_heads * width;
            const int64_t offset = slot(r) * Row::bytes(width);
            Row::write(cached_head<Row>(args.k, layer, index, b, n) + offset, k, width);
            Row::write(cached_head<Row>(args.v, layer, index, b, n) + offset, v, width);
        }
    }

    // Collects the queries of one KV head, ordered by row and then by head, from query n on: at
    // most QUERY_TILE, and none from `count` on. q: the rows of qkv from row r on, all of one text.
    // Returns how many were written to `queries`.
    int64_t collect_queries(const Layer &layer, int64_t kv_head, int64_t r, const A *q, int64_t n,
                            int64_t count, QueryRow<T> *queries) const {
        const int64_t heads_per_kv = layer.heads / layer.kv_heads;
        int64_t collected = 0;
        for (; collected < QUERY_TILE && n + collected < count; ++collected) {
            const int64_t i = (n + collected) / heads_per_kv;
            const int64_t head = kv_head * heads_per_kv + (n + collected) % heads_per_kv;
            queries[collected] = {q + i * qkv_stride + head * layer.head_dim,
                                  &job.visible_keys[layer.window_index][r + i], r + i, head};
        }
        return collected;
    }

    // Returns the cached keys or values, [capacity] rows, of one KV head of text b.
    template <class Row>
    char *cached_head(void *const *buffers, const Layer &layer, int64_t index, int64_t b,
                      int64_t kv_head) const {
        return (char *)buffers[index] +
               (b * layer.kv_heads + kv_head) * args.capacity * Row::bytes(layer.head_dim);
    }

    // Writes a query's attention output to `mid`, whose first row is row r.
    void store_attention(const Layer &layer, const QueryRow<T> &query, int64_t r,
                         const PartialSoftmax<A> &part) {
        Input<T> *to = mid + (query.row - r) * mid_stride + query.head * layer.head_dim;
        A sum = part.sum;
        if (layer.sinks) {
            const A sink = ((const A *)layer.sinks)[query.head];
            sum += exp_vec(Vec<T>{} + (sink - part.max))[0];
        }
        int64_t d = 0;
        for (; d + LANES<T> <= layer.head_dim; d += LANES<T>)
            store_input<T>(to + d, load(part.values + d) / sum);
        for (; d < layer.head_dim; ++d) to[d] = to_input<T>(part.values[d] / sum);
    }

    // Attention in which a thread takes whole queries, block after block. If a text has several
    // blocks, a thread takes QUERY_SPAN queries, which read a block while it is in a cache.
    template <class Row>
    void attend_by_row(ThreadCtx ctx, const Layer &layer, int64_t index, int64_t r, int64_t rows) {
        const int64_t heads_per_kv = layer.heads / layer.kv_heads;
        const int64_t span = job.key_blocks > 1 ? QUERY_SPAN : QUERY_TILE;
        int64_t item = 0;
        for (int64_t text_row = r; text_row < r + rows;) {
            const int64_t b = text_row / args.rows;
            const int64_t end = (b + 1) * args.rows < r + rows ? (b + 1) * args.rows : r + rows;
            const int64_t count = (end - text_row) * heads_per_kv;
            for (int64_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head)
                for (int64_t n = 0; n < count; n += span, ++item) {
                    if (item % ctx.threads != ctx.thread) continue;
                    const bool no_next =
                        n + span < count || kv_head + ctx.threads >= layer.kv_heads;
                    attend_head<Row>(ctx, layer, index, b, kv_head, r, text_row, n,
                                     n + span < count ? n + span : count,
                                     no_next ? nullptr
                                             : cached_head<Row>(args.k, layer, index, b,
                                                                kv_head + ctx.threads));
                }
            text_row = end;
        }
    }

    // Attention of queries n ... end - 1 of one KV head, counted from row text_row on.
    // next: the keys that are read afterwards; null: nothing.
    template <class Row>
    void attend_head(ThreadCtx ctx, const Layer &layer, int64_t index, int64_t b, int64_t kv_head,
                     int64_t r, int64_t text_row, int64_t n, int64_t end, const char *next) {
        QueryRow<T> queries[QUERY_SPAN];
        PartialSoftmax<A> totals[QUERY_SPAN], block_parts[QUERY_TILE];
        A *scratch_values = scratches[ctx.thread].values;
        const int64_t width = layer.head_dim, count = end - n;
        int64_t blocks = 0, first_block = job.key_blocks;
        for (int64_t q = 0; q < count; q += QUERY_TILE)
            collect_queries(layer, kv_head, text_row, qkv + (text_row - r) * qkv_stride, n + q, end,
                            queries + q);
        for (int64_t q = 0; q < count; ++q) {
            totals[q] = {0, 0, scratch_values + (QUERY_TILE + q) * values_stride};
            raise_to(blocks, block_count(*queries[q].visible_keys));
            first_block = queries[q].visible_keys->first / KEY_BLOCK < first_block
                              ? queries[q].visible_keys->first / KEY_BLOCK
                              : first_block;
        }
        for (int64_t q = 0; q < QUERY_TILE; ++q)
            block_parts[q] = {0, 0, scratch_values + q * values_stride};
        const char *k = cached_head<Row>(args.k, layer, index, b, kv_head);
        const char *v = cached_head<Row>(args.v, layer, index, b, kv_head);
        const int64_t block_bytes = KEY_BLOCK * Row::bytes(width);
        for (int64_t block = first_block; block < blocks; ++block)
            for (int64_t q = 0; q < count; q += QUERY_TILE) {
                const bool same_block = q + QUERY_TILE < count;
                const char *next_keys = same_block           ? k + block * block_bytes
                                        : block + 1 < blocks ? k + (block + 1) * block_bytes
                                                             : next;
                const int64_t tile = same_block ? QUERY_TILE : count - q;
                attend_block_of<Row>(tile, queries + q, k, v, next_keys, width, block,
                                     A(layer.scale), block_parts);
                for (int64_t i = 0; i < tile; ++i) merge(totals[q + i], block_parts[i], width);
            }
        for (int64_t q = 0; q < count; ++q) store_attention(layer, queries[q], r, totals[q]);
    }

    // Attention in which a thread takes some key blocks of all rows. After a barrier, it merges the
    // blocks of some queries.
    template <class Row>
    void attend_by_block(ThreadCtx ctx, const Layer &layer, int64_t index) {
        const int64_t count = args.rows * layer.heads / layer.kv_heads;
        const int64_t items = args.batch * layer.kv_heads * job.key_blocks;
        for (auto [item, end] = ctx.share(items); item < end; ++item) {
            const int64_t b = item / (layer.kv_heads * job.key_blocks);
            const int64_t kv_head = item / job.key_blocks % layer.kv_heads;
            const int64_t block = item % job.key_blocks;
            for (int64_t n = 0; n < count; n += QUERY_TILE) {
                QueryRow<T> queries[QUERY_TILE];
                PartialSoftmax<A> block_parts[QUERY_TILE];
                const int64_t tile =
                    collect_queries(layer, kv_head, b * args.rows,
                                    qkv + b * args.rows * qkv_stride, n, count, queries);
                for (int64_t q = 0; q < tile; ++q)
                    block_parts[q] = empty_part(layer, queries[q], block);
                const char *k = cached_head<Row>(args.k, layer, index, b, kv_head);
                const char *v = cached_head<Row>(args.v, layer, index, b, kv_head);
                const int64_t next = (block + 1) * KEY_BLOCK * Row::bytes(layer.head_dim);
                attend_block_of<Row>(tile, queries, k, v, item + 1 < end ? k + next : nullptr,
                                     layer.head_dim, block, A(layer.scale), block_parts);
                for (int64_t q = 0; q < tile; ++q)
                    parts[(queries[q].row * layer.heads + queries[q].head) * job.key_blocks +
                          block] = block_parts[q];
            }
        }
        ctx.barrier.wait();
        for (auto [n, end] = ctx.share(total_rows * layer.heads); n < end; ++n) {
            const QueryRow<T> query{nullptr, nullptr, n / layer.heads, n % layer.heads};
            PartialSoftmax<A> total{0, 0, scratches[ctx.thread].values};
            for (int64_t block = 0; block < job.key_blocks; ++block)
                merge(total, parts[n * job.key_blocks + block], layer.head_dim);
            store_attention(layer, query, 0, total);
        }
    }

    PartialSoftmax<A> empty_part(const Layer &layer, const QueryRow<T> &query,
                                 int64_t block) const {
        const int64_t part = (query.row * layer.heads + query.head) * job.key_blocks + block;
        return {0, 0, values + part * values_stride};
    }

    // Writes logits, and the most likely token of each text's last row with its probability.
    void run_head(ThreadCtx ctx) {
        const Matrix &head = args.head ? *args.head : model.head;
        const int64_t step = args.last_only ? args.rows : 1;   // every step-th row gets logits
        const int64_t count = total_rows / step;
        const bool chooses = args.choice && !args.sampling;   // else the caller draws a token
        ArgmaxAcc<A> *thread_argmaxes = argmaxes + ctx.thread * args.batch;
        for (int64_t b = 0; b < args.batch; ++b) thread_argmaxes[b] = {};
        Input<T> *x = scratches[ctx.thread].x;
        for (int64_t r = 0; r < count; r += ROWS_AT_ONCE) {
            const int64_t rows = count - r < ROWS_AT_ONCE ? count - r : ROWS_AT_ONCE;
            for (int64_t i = 0; i < rows; ++i)
                rms_norm_row<T>(model.norm, h + ((r + i + 1) * step - 1) * h_stride,
                                model.hidden_size, x + i * x_stride, x_stride);
            multiply(ctx, head, x, x_stride, rows, [&](int64_t n, A *sums) {
                const int64_t width = head.out - n * PANEL_ROWS < PANEL_ROWS
                                          ? head.out - n * PANEL_ROWS
                                          : PANEL_ROWS;
                for (int64_t i = 0; i < rows; ++i) {
                    if (args.logits)
                        store_as<T>((T *)args.logits + (r + i) * head.out + n * PANEL_ROWS,
                                    sums + i * PANEL_ROWS, width);
                    if (chooses && (r + i + 1) * step % args.rows == 0)
                        thread_argmaxes[(r + i) * step / args.rows].template update<T>(
                            sums + i * PANEL_ROWS, n * PANEL_ROWS, width);
                }
            });
        }
        if (!chooses) return;
        ctx.barrier.wait();
        for (int64_t b = 0; ctx.thread == 0 && b < args.batch; ++b) {
            ArgmaxAcc<A> argmax = argmaxes[b];
            for (int t = 1; t < ctx.threads; ++t) argmax.update(argmaxes[t * args.batch + b]);
            args.choice[b] = args.head ? args.head_tokens[argmax.index] : argmax.index;
            if (args.confidence) args.confidence[b] = float(1 / argmax.sum);
        }
    }
};

}  // namespace

#include "forward_mlp.h"
