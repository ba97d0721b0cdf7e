// The kernels of one dtype, SS_TYPE (float, double or bf16), for the instruction set that the
// compiler's flags choose.
#include "forward.h"
#include "sampling.h"

namespace {

template <class T> void run_pass(const PassJob &job) {
    ForwardPass<T> pass(job);
    run_on_threads(int(job.args->threads), ForwardPass<T>::work, &pass);
}

// A product of a matrix and rows. Each thread takes some of the panels.
template <class T> struct PanelProduct {
    const ProductArgs &args;
    int64_t x_stride;
    Input<T> *x;           // [rows, x_stride]
    RoundedRows rounded;   // [rows, x_stride]
    Acc<T> *sums;          // [threads, ROWS_AT_ONCE * planes, PANEL_ROWS]

    static void work(void *self, int thread, int threads, Barrier &) {
        ((PanelProduct *)self)->run(thread, threads);
    }

    void run(int thread, int threads) {
        const Matrix &matrix = *args.matrix;
        Acc<T> *thread_sums = sums + thread * ROWS_AT_ONCE * rounded.planes * PANEL_ROWS;
        for (auto [n, end] = WorkRange(panel_count(matrix), thread, threads); n < end; ++n)
            for (int64_t r = 0; r < args.rows; r += ROWS_AT_ONCE) {
                const int64_t rows = args.rows - r < ROWS_AT_ONCE ? args.rows - r : ROWS_AT_ONCE;
                const int64_t width = matrix.out - n * PANEL_ROWS < PANEL_ROWS
                                          ? matrix.out - n * PANEL_ROWS
                                          : PANEL_ROWS;
                const RoundedRows rounded_rows = rounded.from_plane(r * rounded.planes);
                const bool rounds = matrix.has_blocks && args.activations != FLOAT;
                multiply_panel<T>(matrix, n,
                                  {x + r * x_stride, x_stride, rows,
                                   rounds ? &rounded_rows : nullptr},
                                  thread_sums);
                add_bias<T>(matrix, n, rows, thread_sums);
                for (int64_t i = 0; i < rows; ++i)
                    for (int64_t j = 0; j < width; ++j)
                        ((T *)args.y)[(r + i) * matrix.out + n * PANEL_ROWS + j] =
                            from_acc<T>(thread_sums[i * PANEL_ROWS + j]);
            }
    }
};

template <class T> void run_product(const ProductArgs &args) {
    const int64_t x_stride = (args.matrix->in + PANEL_ROWS - 1) / PANEL_ROWS * PANEL_ROWS;
    Arena arena{nullptr};
    PanelProduct<T> product{args, x_stride, nullptr, {}, nullptr};
    // The first iteration measures the memory, the second one uses it.
    for (int measured = 0; measured < 2; ++measured) {
        if (measured) arena.next = (char *)get_workspace(size_t(arena.next - (char *)nullptr));
        product.x = arena.take<Input<T>>(args.rows * x_stride);
        product.rounded = take_rounded(arena, args.activations, args.rows, x_stride);
        product.sums = arena.take<Acc<T>>(args.threads * ROWS_AT_ONCE *
                                          plane_count(args.activations) * PANEL_ROWS);
    }
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
