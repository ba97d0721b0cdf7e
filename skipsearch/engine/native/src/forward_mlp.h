// The MLP of a layer in ForwardPass: plain, with experts, or with experts and a shared one.
// forward.h includes this file.
#pragma once

namespace {

template <class T>
void ForwardPass<T>::run_mlp(ThreadCtx ctx, const Layer &layer, int64_t r, int64_t rows) {
    fill_mid(ctx, layer, layer.gate_up, norm_rows(ctx, layer.mlp_norm, r, rows), rows);
    ctx.barrier.wait();
    add_to_residual(ctx, layer.down, layer.mlp_post_norm, r, rows);
}

// Writes activation(gate, up) of the rows x [rows, x_stride] to `mid`.
template <class T>
void ForwardPass<T>::fill_mid(ThreadCtx ctx, const Layer &layer, const Matrix &gate_up,
                              const Input<T> *x, int64_t rows) {
    const Inputs<T> inputs = prepare_inputs(ctx, gate_up, x, x_stride, rows);
    A *gate = scratches[ctx.thread].sums[0], *up = scratches[ctx.thread].sums[1];
    for (auto [n, end] = ctx.share(panel_count(gate_up) / 2); n < end; ++n) {
        multiply_panel<T>(gate_up, 2 * n, inputs, gate);
        add_bias<T>(gate_up, 2 * n, rows, gate);
        multiply_panel<T>(gate_up, 2 * n + 1, inputs, up);
        add_bias<T>(gate_up, 2 * n + 1, rows, up);
        for (int64_t i = 0; i < rows; ++i)
            act_mul<T>(layer, gate + i * PANEL_ROWS, up + i * PANEL_ROWS,
                       mid + i * mid_stride + n * PANEL_ROWS);
    }
}

// The outputs of a row's experts are added up in the order of the experts, so the sum does not
// depend on other rows.
template <class T>
void ForwardPass<T>::run_experts(ThreadCtx ctx, const Layer &layer, int64_t r, int64_t rows) {
    ThreadScratch<T> &scratch = scratches[ctx.thread];
    const Input<T> *x = norm_rows(ctx, layer.mlp_norm, r, rows);
    Routes<A> &routes = scratch.routes;   // each thread chooses by itself, with the same result
    route_rows<T>(layer, x, x_stride, rows, scratch.sums[0], routes, scratch.gathered);
    const int64_t n_pairs = rows * layer.experts_per_token;
    A *sums = scratch.sums[0], *more = scratch.sums[1];
    const auto inputs = prepare_inputs(ctx, layer.gate_up, scratch.gathered, x_stride, n_pairs);
    const int64_t mid_panels = panel_count(layer.gate_up) / 2 / layer.n_experts;
    for (auto [item, end] = ctx.share(routes.n_active * mid_panels); item < end; ++item) {
        const int64_t e = routes.active[item / mid_panels], n = item % mid_panels;
        const int64_t first = routes.first[e], panel = 2 * (e * mid_panels + n);
        with_rows(inputs, first, routes.first[e + 1], [&](const Inputs<T> &pairs) {
            multiply_panel<T>(layer.gate_up, panel, pairs, sums);
            add_bias<T>(layer.gate_up, panel, pairs.rows, sums);
            multiply_panel<T>(layer.gate_up, panel + 1, pairs, more);
            add_bias<T>(layer.gate_up, panel + 1, pairs.rows, more);
            for (int64_t i = 0; i < pairs.rows; ++i)
                act_mul<T>(layer, sums + i * PANEL_ROWS, more + i * PANEL_ROWS,
                           mid + (first + i) * mid_stride + n * PANEL_ROWS);
        });
    }
    ctx.barrier.wait();
    const Inputs<T> outputs = prepare_inputs(ctx, layer.down, mid, mid_stride, n_pairs);
    const int64_t panels = panel_count(layer.down) / layer.n_experts;
    for (auto [n, end] = ctx.share(panels); n < end; ++n) {
        for (int64_t i = 0; i < rows * PANEL_ROWS; ++i) more[i] = 0;
        for (int64_t a = 0; a < routes.n_active; ++a) {
            const int64_t e = routes.active[a], first = routes.first[e];
            with_rows(outputs, first, routes.first[e + 1], [&](const Inputs<T> &pairs) {
                multiply_panel<T>(layer.down, e * panels + n, pairs, sums);
                add_bias<T>(layer.down, e * panels + n, pairs.rows, sums);
                for (int64_t i = 0; i < pairs.rows; ++i)
                    add_weighted<T>(sums + i * PANEL_ROWS, routes.pair_weights[first + i],
                                    more + routes.rows[first + i] * PANEL_ROWS);
            });
        }
        for (int64_t i = 0; i < rows; ++i)
            add_panel<T>(more + i * PANEL_ROWS, h + (r + i) * h_stride + n * PANEL_ROWS);
    }
    ctx.barrier.wait();
    if (layer.shared_down.out) run_shared_expert(ctx, layer, x, r, rows);
}

// Adds sigmoid(shared_gate * x) * shared expert(x) to `rows` rows from r on. x: the rows that the
// other experts read, [rows, x_stride].
template <class T>
void ForwardPass<T>::run_shared_expert(ThreadCtx ctx, const Layer &layer, const Input<T> *x,
                                       int64_t r, int64_t rows) {
    A *sums = scratches[ctx.thread].sums[0], *weights = scratches[ctx.thread].routes.weights;
    multiply_panel<T>(layer.shared_gate, 0, {x, x_stride, rows, nullptr}, sums);
    for (int64_t i = 0; i < rows; ++i) {
        const A logit = round_to<T>(sums[i * PANEL_ROWS]);
        weights[i] = 1 / (1 + exp_vec(Vec<T>{} - logit)[0]);
    }
    fill_mid(ctx, layer, layer.shared_gate_up, x, rows);
    ctx.barrier.wait();
    A *output = scratches[ctx.thread].sums[1];
    multiply(ctx, layer.shared_down, mid, mid_stride, rows, [&](int64_t n, const A *outputs) {
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < PANEL_ROWS; ++j) output[j] = 0;
            add_weighted<T>(outputs + i * PANEL_ROWS, weights[i], output);
            add_panel<T>(output, h + (r + i) * h_stride + n * PANEL_ROWS);
        }
    });
    ctx.barrier.wait();
}

}  // namespace
