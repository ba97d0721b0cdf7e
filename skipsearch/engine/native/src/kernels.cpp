// The kernels of one dtype, SS_TYPE (float, double or bf16), for the instruction set that the
// compiler's flags choose.
#include "forward.h"
#include "sampling.h"

namespace {

template <class T> void run_pass(const PassJob &job) {
    ForwardPass<T> pass(job);
    run_on_threads(int(job.args->threads), ForwardPass<T>::work, &pass);
}

// A product of a matrix and rows. Each thread takes some of the panels that rows need.
template <class T> struct PanelProduct {
    const ProductArgs &args;
    int64_t x_stride;
    Input<T> *x;           // [rows, x_stride]
    RoundedRows rounded;   // [rows, x_stride]
    Acc<T> *sums;          // [threads, ROWS_AT_ONCE * planes, PANEL_ROWS]
    int64_t *active;       // [n_parts] parts that have rows
    int64_t n_active;

    static void work(void *self, int thread, int threads, Barrier &) {
        ((PanelProduct *)self)->run(thread, threads);
    }

    int64_t first_row(int64_t part) const {
        return args.first_rows ? args.first_rows[part] : part * args.rows;
    }

    void run(int thread, int threads) {
        const int64_t panels = panel_count(*args.matrix) / args.n_parts;
        for (auto [item, end] = WorkRange(n_active * panels, thread, threads); item < end; ++item) {
            const int64_t own_sums = thread * ROWS_AT_ONCE * rounded.planes * PANEL_ROWS;
            run_panel(active[item / panels], item % panels, sums + own_sums);
        }
    }

    // Multiplies panel n of a part by the rows of the part.
    void run_panel(int64_t part, int64_t n, Acc<T> *thread_sums) {
        const Matrix &matrix = *args.matrix;
        const int64_t outputs = matrix.out / args.n_parts, left = outputs - n * PANEL_ROWS;
        const int64_t panel = part * (panel_count(matrix) / args.n_parts) + n;
        const int64_t width = left < PANEL_ROWS ? left : PANEL_ROWS, end = first_row(part + 1);
        for (int64_t r = first_row(part); r < end; r += ROWS_AT_ONCE) {
            const int64_t rows = end - r < ROWS_AT_ONCE ? end - r : ROWS_AT_ONCE;
            const RoundedRows rounded_rows = rounded.from_plane(r * rounded.planes);
            const bool rounds = matrix.has_blocks && args.activations != FLOAT;
            multiply_panel<T>(matrix, panel,
                              {x + r * x_stride, x_stride, rows, rounds ? &rounded_rows : nullptr},
                              thread_sums);
            add_bias<T>(matrix, panel, rows, thread_sums);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < width; ++j)
                    ((T *)args.y)[(r + i) * outputs + n * PANEL_ROWS + j] =
                        from_acc<T>(thread_sums[i * PANEL_ROWS + j]);
        }
    }
};

template <class T> void run_product(const ProductArgs &args) {
    const int64_t x_stride = (args.matrix->in + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    Arena arena{nullptr};
    PanelProduct<T> product{args, x_stride, nullptr, {}, nullptr, nullptr, 0};
    // The first iteration measures the memory, the second one uses it.
    for (int measured = 0; measured < 2; ++measured) {
        if (measured) arena.next = (char *)get_workspace(size_t(arena.next - (char *)nullptr));
        product.x = arena.take<Input<T>>(args.rows * x_stride);
        product.rounded = take_rounded(arena, args.activations, args.rows, x_stride);
        product.sums = arena.take<Acc<T>>(args.threads * ROWS_AT_ONCE *
                                          plane_count(args.activations) * PANEL_ROWS);
        product.active = arena.take<int64_t>(args.n_parts);
    }
    for (int64_t part = 0; part < args.n_parts; ++part)
        if (product.first_row(part) < product.first_row(part + 1))
            product.active[product.n_active++] = part;
    for (int64_t r = 0; r < args.rows; ++r)
        for (int64_t d = 0; d < x_stride; ++d)
            product.x[r * x_stride + d] =
                d < args.matrix->in
                    ? to_input<T>(to_acc(((const T *)args.x)[r * args.matrix->in + d]))
                    : to_input<T>(0);
    if (args.matrix->has_blocks && args.activations != FLOAT)
        round_rows<T>(product.x, x_stride, args.matrix->in, args.rows, product.rounded);
    run_on_threads(int(args.threads), PanelProduct<T>::work, &product);
}

template <class T> void read_rows(const ReadRowsArgs &args) {
    for (int64_t r = 0; r < args.n_rows; ++r)
        for (int64_t d = 0; d < args.matrix->in; ++d)
            ((T *)args.to)[r * args.matrix->in + d] =
                from_acc<T>(read_weight<T>(args.matrix->panels, args.rows[r], d));
}

}  // namespace

// SS_TYPE has to be expanded before ## joins it to the name.
#define KERNELS_OF(type) KERNELS_OF_EXPANDED(type)
#define KERNELS_OF_EXPANDED(type) kernels_##type
extern const Kernels KERNELS_OF(SS_TYPE);
const Kernels KERNELS_OF(SS_TYPE) = {run_pass<SS_TYPE>, run_product<SS_TYPE>,
                                         read_rows<SS_TYPE>, draw_row<SS_TYPE>};
