// All kernels of one dtype, SS_TYPE (float, double or bf16), for the instruction set that the compiler's flags choose.
#include "pass.h"

namespace {

template <class T> void run_pass(const Job &job) {
    Runner<T> runner(job);
    together(int(job.pass->threads), Runner<T>::work, &runner);
}

template <class T> struct Multiplier {
    const Product &p;
    int64_t step;
    In<T> *x;
    Sum<T> *sums;

    static void work(void *self, int thread, int threads, Barrier &) { ((Multiplier *)self)->run(thread, threads); }

    void run(int thread, int threads) {
        const Matrix &m = *p.matrix;
        Sum<T> *mine = sums + thread * ROWS * PANEL;
        for (auto [n, end] = Share(panels(m), thread, threads); n < end; ++n)
            for (int64_t r = 0; r < p.rows; r += ROWS) {
                const int64_t rows = p.rows - r < ROWS ? p.rows - r : ROWS, width = m.out - n * PANEL < PANEL ? m.out - n * PANEL : PANEL;
                panel<T>(m, n, x + r * step, step, rows, mine);
                biased<T>(m, n, rows, mine);
                for (int64_t i = 0; i < rows; ++i)
                    for (int64_t j = 0; j < width; ++j) ((T *)p.y)[(r + i) * m.out + n * PANEL + j] = narrow<T>(mine[i * PANEL + j]);
            }
    }
};

template <class T> void run_product(const Product &p) {
    const int64_t step = (p.matrix->in + PANEL - 1) / PANEL * PANEL;
    Arena arena{nullptr};
    Multiplier<T> work{p, step, nullptr, nullptr};
    for (int twice = 0; twice < 2; ++twice) {
        if (twice) arena.at = (char *)workspace(size_t(arena.at - (char *)nullptr));
        work.x = arena.take<In<T>>(p.rows * step), work.sums = arena.take<Sum<T>>(p.threads * ROWS * PANEL);
    }
    for (int64_t r = 0; r < p.rows; ++r)
        for (int64_t d = 0; d < step; ++d)
            work.x[r * step + d] = d < p.matrix->in ? input<T>(wide(((const T *)p.x)[r * p.matrix->in + d])) : input<T>(0);
    together(int(p.threads), Multiplier<T>::work, &work);
}

}  // namespace

#define NAMED(type) NAMED_TOO(type)
#define NAMED_TOO(type) kernels_##type
extern const Kernels NAMED(SS_TYPE);
const Kernels NAMED(SS_TYPE) = {run_pass<SS_TYPE>, run_product<SS_TYPE>};
