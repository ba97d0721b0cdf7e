// A pass: what each thread does between two meetings of all. Whatever is shared is written by one thread, and read behind the next meeting.
#pragma once
#include "attention.h"
#include "blocks.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int64_t SPLIT_ROWS = 16;   // up to so many rows, threads share the keys of a row too
constexpr int64_t SPAN = 16;         // queries that read a block of a long text in turn

template <class T> class Runner {
    using A = Sum<T>;

  public:
    explicit Runner(const Job &job) : m(*job.model), p(*job.pass), job(job), total(p.batch * p.rows), threads(int(p.threads)) {
        most_rows = total < ROWS ? total : ROWS;
        int64_t qkv_width = 0, mid_width = 0, heads = 0, head_dim = 0;
        bool posts = false;
        for (int64_t i = p.first; i < p.last; ++i) {
            const Layer &layer = m.layers[i];
            grow(qkv_width, panels(layer.qkv) * PANEL), grow(mid_width, layer.out.in), grow(mid_width, layer.down.in);
            grow(heads, layer.heads), grow(head_dim, layer.head_dim);
            posts = posts || layer.attn_post_norm.weight || layer.mlp_post_norm.weight;
        }
        h_step = up(m.hidden), x_step = up(m.hidden), qkv_step = up(qkv_width), mid_step = up(mid_width), part_step = up(head_dim);
        split = total <= SPLIT_ROWS && job.blocks > 1 && threads > 1;
        Arena arena{nullptr};
        lay_out(arena, posts, heads);
        arena.at = (char *)workspace(size_t(arena.at - (char *)nullptr));
        lay_out(arena, posts, heads);
    }

    static void work(void *self, int thread, int threads, Barrier &barrier) { ((Runner *)self)->run(Me{thread, threads, barrier}); }

  private:
    struct Me {
        int thread, threads;
        Barrier &barrier;
        Share share(int64_t count) const { return {count, thread, threads}; }
    };

    const Model &m;
    const Pass &p;
    const Job &job;
    const int64_t total;
    const int threads;
    int64_t most_rows, h_step, x_step, qkv_step, mid_step, part_step;
    bool split;
    A *h, *qkv, *branch, *values;
    In<T> *mid;
    Part<A> *parts;
    Desk<T> *desks;
    Best<A> *bests;

    static void grow(int64_t &most, int64_t value) { most = value > most ? value : most; }
    static int64_t up(int64_t width) { return (width + PANEL - 1) / PANEL * PANEL; }

    void lay_out(Arena &arena, bool posts, int64_t heads) {
        const bool real = arena.at != nullptr;
        h = arena.take<A>(total * h_step), qkv = arena.take<A>(most_rows * qkv_step), mid = arena.take<In<T>>(most_rows * mid_step);
        branch = posts ? arena.take<A>(most_rows * h_step) : nullptr;
        const int64_t n_parts = split ? total * heads * job.blocks : 0;
        parts = arena.take<Part<A>>(n_parts), values = arena.take<A>(n_parts * part_step);
        desks = arena.take<Desk<T>>(threads), bests = arena.take<Best<A>>(threads * p.batch);
        for (int t = 0; t < threads; ++t) {
            Desk<T> desk{arena.take<In<T>>(most_rows * x_step), arena.take<A>(most_rows * PANEL), arena.take<A>(most_rows * PANEL),
                         arena.take<A>((TOGETHER + SPAN) * part_step)};
            if (real) desks[t] = desk;
        }
    }

    void run(Me me) {
        begin(me);
        for (int64_t i = p.first; i < p.last; ++i) {
            const bool attn = !p.skip || !p.skip[2 * i], mlp = !p.skip || !p.skip[2 * i + 1];
            for (int64_t r = 0; attn && r < total; r += ROWS) attention(me, m.layers[i], i, r, rows_from(r));
            for (int64_t r = 0; mlp && r < total; r += ROWS) feed_forward(me, m.layers[i], r, rows_from(r));
        }
        if (p.hidden_out)
            for (auto [r, end] = me.share(total); r < end; ++r)
                written<T>((T *)p.hidden_out + r * m.hidden, h + r * h_step, m.hidden);
        if (p.logits || p.choice) head(me);
    }

    int64_t rows_from(int64_t r) const { return total - r < ROWS ? total - r : ROWS; }
    int64_t position(int64_t r) const { return p.positions[r / p.rows * p.positions_step + r % p.rows]; }
    int64_t slot(int64_t r) const { return p.slots[r / p.rows * p.slots_step + r % p.rows]; }

    void begin(Me me) {
        for (auto [r, end] = me.share(total); r < end; ++r) {
            A *row = h + r * h_step;
            if (p.tokens) embedded<T>(m, p.tokens[r], row);
            else
                for (int64_t d = 0; d < m.hidden; ++d) row[d] = wide(((const T *)p.hidden)[r * m.hidden + d]);
            for (int64_t d = m.hidden; d < h_step; ++d) row[d] = 0;
        }
        me.barrier.wait();
    }

    // The rows from r on, normed, on this thread's desk.
    In<T> *normed(Me me, const Norm &norm, int64_t r, int64_t rows) {
        In<T> *x = desks[me.thread].x;
        for (int64_t i = 0; i < rows; ++i) normed_row<T>(norm, h + (r + i) * h_step, m.hidden, x + i * x_step, x_step);
        return x;
    }

    // This thread's share of a matrix, each panel of it handed to done(panel, sums [rows, PANEL]).
    template <class Done> void product(Me me, const Matrix &matrix, const In<T> *x, int64_t step, int64_t rows, Done done) {
        A *sums = desks[me.thread].sums[0];
        for (auto [n, end] = me.share(panels(matrix)); n < end; ++n) {
            panel<T>(matrix, n, x, step, rows, sums);
            biased<T>(matrix, n, rows, sums);
            done(n, sums);
        }
    }

    // Adds mid times a matrix to the rows from r on.
    void added(Me me, const Matrix &matrix, const Norm &post, int64_t r, int64_t rows) {
        A *into = post.weight ? branch : h + r * h_step;
        product(me, matrix, mid, mid_step, rows, [&](int64_t n, const A *sums) {
            for (int64_t i = 0; i < rows; ++i) {
                A *to = into + i * h_step + n * PANEL;
                for (int64_t j = 0; j < PANEL; j += LANES<T>) {
                    const Vec<T> sum = load(sums + i * PANEL + j);
                    store(to + j, post.weight ? sum : rounded_all<T>(load(to + j) + sum));
                }
            }
        });
        me.barrier.wait();
        if (!post.weight) return;
        for (auto [i, end] = me.share(rows); i < end; ++i) {
            A *to = h + (r + i) * h_step, *row = branch + i * h_step;
            normed_heads<A>(post, row, m.hidden);
            for (int64_t d = 0; d < h_step; d += LANES<T>) store(to + d, rounded_all<T>(load(to + d) + load(row + d)));
        }
        me.barrier.wait();
    }

    void feed_forward(Me me, const Layer &layer, int64_t r, int64_t rows) {
        const In<T> *x = normed(me, layer.mlp_norm, r, rows);
        A *gate = desks[me.thread].sums[0], *up = desks[me.thread].sums[1];
        for (auto [n, end] = me.share(panels(layer.gate_up) / 2); n < end; ++n) {
            panel<T>(layer.gate_up, 2 * n, x, x_step, rows, gate);
            biased<T>(layer.gate_up, 2 * n, rows, gate);
            panel<T>(layer.gate_up, 2 * n + 1, x, x_step, rows, up);
            biased<T>(layer.gate_up, 2 * n + 1, rows, up);
            for (int64_t i = 0; i < rows; ++i) gated<T>(layer.act, gate + i * PANEL, up + i * PANEL, mid + i * mid_step + n * PANEL);
        }
        me.barrier.wait();
        added(me, layer.down, layer.mlp_post_norm, r, rows);
    }

    void attention(Me me, const Layer &layer, int64_t index, int64_t r, int64_t rows) {
        const In<T> *x = normed(me, layer.attn_norm, r, rows);
        product(me, layer.qkv, x, x_step, rows, [&](int64_t n, const A *sums) {
            for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(qkv + i * qkv_step + n * PANEL, sums + i * PANEL, PANEL * sizeof(A));
        });
        me.barrier.wait();
        for (auto [i, end] = me.share(rows); i < end; ++i) turn_and_keep(layer, index, r + i, qkv + i * qkv_step);
        me.barrier.wait();
        if (split) attend_split(me, layer, index);
        else attend_whole(me, layer, index, r, rows);
        me.barrier.wait();
        added(me, layer.out, layer.attn_post_norm, r, rows);
    }

    // Norms and turns a row's queries and keys, and writes its keys and values where the plan says.
    void turn_and_keep(const Layer &layer, int64_t index, int64_t r, A *row) {
        const int64_t width = layer.head_dim, b = r / p.rows;
        normed_heads<A>(layer.q_norm, row, layer.heads * width);
        normed_heads<A>(layer.k_norm, row + layer.heads * width, layer.kv_heads * width);
        const Table &table = p.tables[layer.table];
        const A *cos = (const A *)table.cos + position(r) * table.width, *sin = (const A *)table.sin + position(r) * table.width;
        for (int64_t n = 0; n < layer.heads + layer.kv_heads; ++n) turned<A>(row + n * width, cos, sin, table.width);
        for (int64_t n = 0; n < layer.kv_heads; ++n) {
            const int64_t at = ((b * layer.kv_heads + n) * p.capacity + slot(r)) * width;
            const A *k = row + (layer.heads + n) * width, *v = k + layer.kv_heads * width;
            written<T>((T *)p.k[index] + at, k, width), written<T>((T *)p.v[index] + at, v, width);
        }
    }

    // The queries of one head of keys, of `rows` rows from r on, all of one text, from the n-th on: at most TOGETHER.
    int64_t queries(const Layer &layer, int64_t head, int64_t r, const A *from, int64_t n, int64_t count, Query<T> *found) const {
        const int64_t group = layer.heads / layer.kv_heads;
        int64_t got = 0;
        for (; got < TOGETHER && n + got < count; ++got) {
            const int64_t i = (n + got) / group, own = head * group + (n + got) % group;
            found[got] = {from + i * qkv_step + own * layer.head_dim, &job.seen[layer.window][r + i], r + i, own};
        }
        return got;
    }

    const T *kept(void *const *buffers, const Layer &layer, int64_t index, int64_t b, int64_t head) const {
        return (const T *)buffers[index] + (b * layer.kv_heads + head) * p.capacity * layer.head_dim;
    }

    void finish(const Layer &layer, const Query<T> &query, int64_t r, const Part<A> &part) {
        In<T> *to = mid + (query.row - r) * mid_step + query.head * layer.head_dim;
        int64_t d = 0;
        for (; d + LANES<T> <= layer.head_dim; d += LANES<T>) store_input<T>(to + d, load(part.values + d) / part.sum);
        for (; d < layer.head_dim; ++d) to[d] = input<T>(part.values[d] / part.sum);
    }

    // A thread takes whole rows, block after block; of a long text some more of them, so that they read a block while it is in the cache.
    void attend_whole(Me me, const Layer &layer, int64_t index, int64_t r, int64_t rows) {
        const int64_t group = layer.heads / layer.kv_heads, span = job.blocks > 1 ? SPAN : TOGETHER;
        int64_t item = 0;
        for (int64_t at = r; at < r + rows;) {
            const int64_t b = at / p.rows, end = (b + 1) * p.rows < r + rows ? (b + 1) * p.rows : r + rows, count = (end - at) * group;
            for (int64_t head = 0; head < layer.kv_heads; ++head)
                for (int64_t n = 0; n < count; n += span, ++item) {
                    if (item % me.threads != me.thread) continue;
                    const bool last = n + span < count || head + me.threads >= layer.kv_heads;
                    attend_head(me, layer, index, b, head, r, at, n, n + span < count ? n + span : count,
                                last ? nullptr : kept(p.k, layer, index, b, head + me.threads));
                }
            at = end;
        }
    }

    // The queries n ... end - 1 of one head of keys, of the rows from `at` on. next: the keys that are read afterwards.
    void attend_head(Me me, const Layer &layer, int64_t index, int64_t b, int64_t head, int64_t r, int64_t at, int64_t n, int64_t end,
                     const T *next) {
        Query<T> some[SPAN];
        Part<A> whole[SPAN], part[TOGETHER];
        A *mine = desks[me.thread].values;
        const int64_t width = layer.head_dim, all = end - n;
        int64_t blocks = 0, first = job.blocks;
        for (int64_t q = 0; q < all; q += TOGETHER) queries(layer, head, at, qkv + (at - r) * qkv_step, n + q, end, some + q);
        for (int64_t q = 0; q < all; ++q) {
            whole[q] = {0, 0, mine + (TOGETHER + q) * part_step};
            grow(blocks, blocks_of(*some[q].seen));
            first = some[q].seen->first / BLOCK < first ? some[q].seen->first / BLOCK : first;
        }
        for (int64_t q = 0; q < TOGETHER; ++q) part[q] = {0, 0, mine + q * part_step};
        const T *keys = kept(p.k, layer, index, b, head), *values = kept(p.v, layer, index, b, head);
        for (int64_t block = first; block < blocks; ++block)
            for (int64_t q = 0; q < all; q += TOGETHER) {
                const bool again = q + TOGETHER < all;
                const T *then = again ? keys + block * BLOCK * width : block + 1 < blocks ? keys + (block + 1) * BLOCK * width : next;
                const int64_t got = again ? TOGETHER : all - q;
                attend_some<T>(got, some + q, keys, values, then, width, block, A(layer.scale), part);
                for (int64_t i = 0; i < got; ++i) merge(whole[q + i], part[i], width);
            }
        for (int64_t q = 0; q < all; ++q) finish(layer, some[q], r, whole[q]);
    }

    // A thread takes some blocks of keys of all rows, and then merges what all threads found of some rows.
    void attend_split(Me me, const Layer &layer, int64_t index) {
        const int64_t count = p.rows * layer.heads / layer.kv_heads, items = p.batch * layer.kv_heads * job.blocks;
        for (auto [item, end] = me.share(items); item < end; ++item) {
            const int64_t b = item / (layer.kv_heads * job.blocks), head = item / job.blocks % layer.kv_heads, block = item % job.blocks;
            for (int64_t n = 0; n < count; n += TOGETHER) {
                Query<T> some[TOGETHER];
                Part<A> part[TOGETHER];
                const int64_t got = queries(layer, head, b * p.rows, qkv + b * p.rows * qkv_step, n, count, some);
                for (int64_t q = 0; q < got; ++q) part[q] = part_of(layer, some[q], block);
                const T *keys = kept(p.k, layer, index, b, head), *then = item + 1 < end ? keys + (block + 1) * BLOCK * layer.head_dim : nullptr;
                attend_some<T>(got, some, keys, kept(p.v, layer, index, b, head), then, layer.head_dim, block, A(layer.scale), part);
                for (int64_t q = 0; q < got; ++q) parts[(some[q].row * layer.heads + some[q].head) * job.blocks + block] = part[q];
            }
        }
        me.barrier.wait();
        for (auto [n, end] = me.share(total * layer.heads); n < end; ++n) {
            const Query<T> query{nullptr, nullptr, n / layer.heads, n % layer.heads};
            Part<A> whole{0, 0, desks[me.thread].values};
            for (int64_t block = 0; block < job.blocks; ++block) merge(whole, parts[n * job.blocks + block], layer.head_dim);
            finish(layer, query, 0, whole);
        }
    }

    Part<A> part_of(const Layer &layer, const Query<T> &query, int64_t block) const {
        return {0, 0, values + ((query.row * layer.heads + query.head) * job.blocks + block) * part_step};
    }

    void head(Me me) {
        const int64_t step = p.last_only ? p.rows : 1, count = total / step;   // of the rows that logits are for
        Best<A> *best = bests + me.thread * p.batch;
        for (int64_t b = 0; b < p.batch; ++b) best[b] = {};
        In<T> *x = desks[me.thread].x;
        for (int64_t r = 0; r < count; r += ROWS) {
            const int64_t rows = count - r < ROWS ? count - r : ROWS;
            for (int64_t i = 0; i < rows; ++i) normed_row<T>(m.norm, h + ((r + i + 1) * step - 1) * h_step, m.hidden, x + i * x_step, x_step);
            product(me, m.head, x, x_step, rows, [&](int64_t n, A *sums) {
                const int64_t width = m.vocab - n * PANEL < PANEL ? m.vocab - n * PANEL : PANEL;
                for (int64_t i = 0; i < rows; ++i) {
                    if (p.logits) written<T>((T *)p.logits + (r + i) * m.vocab + n * PANEL, sums + i * PANEL, width);
                    if (p.choice && (r + i + 1) * step % p.rows == 0) best[(r + i) * step / p.rows].template look<T>(sums + i * PANEL, n * PANEL, width);
                }
            });
        }
        if (!p.choice) return;
        me.barrier.wait();
        for (int64_t b = 0; me.thread == 0 && b < p.batch; ++b) {
            Best<A> found = bests[b];
            for (int t = 1; t < me.threads; ++t) found.look(bests[t * p.batch + b]);
            p.choice[b] = found.index;
            if (p.confidence) p.confidence[b] = float(1 / found.sum);
        }
    }
};

}  // namespace
