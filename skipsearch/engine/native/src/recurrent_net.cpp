// Recurrent layers, for the instruction set that the compiler's flags choose. All numbers are
// float, as transformers computes them in every dtype.
#include "recurrent_net.h"

#include <cmath>

#include "vec.h"

namespace {

constexpr int64_t NET_ROWS = 32;   // rows that are convolved before the states read them
constexpr float KEY_NORM_EPS = 1e-6f;

// Rows first ... first + count - 1 of each text.
struct RowRange {
    int64_t first, count;
};

// The convolved channels of the rows of a range.
struct Convolved {
    float *values;                 // [batch, NET_ROWS, channels]
    int64_t channels;
    const float *at(int64_t text, int64_t i, int64_t channel) const {
        return values + (text * NET_ROWS + i) * channels + channel;
    }
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Returns the sum of products, in an order that depends on the width alone.
float multiply_add(const float *x, const float *y, int64_t width) {
    FloatVec sums{};
    int64_t d = 0;
    for (; d + LANES<float> <= width; d += LANES<float>) sums += load(x + d) * load(y + d);
    float sum = sum_lanes(sums);
    for (; d < width; ++d) sum += x[d] * y[d];
    return sum;
}

void activate_silu(float *x, int64_t width) {
    int64_t d = 0;
    for (; d + LANES<float> <= width; d += LANES<float>) store(x + d, activate(load(x + d), SILU));
    for (; d < width; ++d) x[d] *= sigmoid(x[d]);
}

// Convolves channels first ... end - 1 of some rows of a text.
void convolve(const ConvArgs &conv, int64_t text, int64_t first, int64_t end, RowRange range,
              const Convolved &to) {
    for (int64_t i = 0; i < range.count; ++i) {
        // Columns before the first one are zeros.
        const int64_t last = conv.columns - conv.rows + range.first + i + 1;
        const int64_t begin = last - conv.kernel;
        float *row = to.values + (text * NET_ROWS + i) * to.channels;
        for (int64_t c = first; c < end; ++c) {
            const float *column = conv.mixed + (text * conv.channels + c) * conv.columns;
            const float *weights = conv.weight + c * conv.kernel;
            float sum = conv.bias ? conv.bias[c] : 0.0f;
            for (int64_t n = begin < 0 ? 0 : begin; n < last; ++n)
                sum += column[n] * weights[n - begin];
            row[c] = sum;
        }
        activate_silu(row + first, end - first);
    }
}

// Writes a vector, divided by its length and multiplied by `factor`.
void normalize(const float *from, int64_t width, float factor, float *to) {
    const float scale = factor / std::sqrt(multiply_add(from, from, width) + KEY_NORM_EPS);
    for (int64_t d = 0; d < width; ++d) to[d] = from[d] * scale;
}

// One head of a gated delta net (Yang et al., arXiv 2412.06464). A row multiplies the state, a
// matrix [key_dim, value_dim], by a decay; writes to it by what the row's value differs from what
// the state returns for the row's key; and reads it with the row's query.
class DeltaHead {
  public:
    static int64_t count_floats(const DeltaNetArgs &args) {
        return NET_ROWS * (2 * args.key_dim + 2 * args.value_dim + 2);
    }
    static int64_t count_heads(const DeltaNetArgs &args) { return args.value_heads; }

    DeltaHead(const DeltaNetArgs &args, const Convolved &convolved, int64_t text, int64_t head,
              RowRange range, float *scratch)
        : args(args), convolved(convolved), text(text), head(head), range(range) {
        queries = scratch, keys = queries + NET_ROWS * args.key_dim;
        outputs = keys + NET_ROWS * args.key_dim;
        gates = outputs + NET_ROWS * args.value_dim;
        decays = gates + NET_ROWS * args.value_dim, betas = decays + NET_ROWS;
    }

    void run() {
        load_rows();
        // A part of the state stays in the L1 cache while all rows use it.
        int64_t d = 0;
        for (; d + 2 * LANES<float> <= args.value_dim; d += 2 * LANES<float>)
            update_values<FloatVec, 2>(d);
        for (; d < args.value_dim; ++d) update_values<float, 1>(d);
        store_rows();
    }

  private:
    const DeltaNetArgs &args;
    const Convolved &convolved;
    const int64_t text, head;
    const RowRange range;
    float *queries, *keys;         // [NET_ROWS, key_dim]
    float *outputs, *gates;        // [NET_ROWS, value_dim]
    float *decays, *betas;         // [NET_ROWS]

    int64_t index(int64_t i) const {
        return (text * args.conv.rows + range.first + i) * args.value_heads + head;
    }
    const float *values(int64_t i) const {
        return convolved.at(text, i, 2 * args.key_heads * args.key_dim + head * args.value_dim);
    }

    void load_rows() {
        const int64_t width = args.key_dim;
        const int64_t channel = head * args.key_heads / args.value_heads * width;
        for (int64_t i = 0; i < range.count; ++i) {
            normalize(convolved.at(text, i, channel), width, 1.0f / std::sqrt(float(width)),
                      queries + i * width);
            normalize(convolved.at(text, i, args.key_heads * width + channel), width, 1.0f,
                      keys + i * width);
            betas[i] = sigmoid(args.beta_logits[index(i)]);
            const float step = softplus(args.steps[index(i)] + args.step_biases[head]);
            decays[i] = std::exp(-args.decay_rates[head] * step);
        }
    }

    // Runs the delta rule for N neighbouring V's of values, from value `first` on. V: a vector, or
    // one number.
    template <class V, int N> void update_values(int64_t first) {
        constexpr int64_t WIDTH = sizeof(V) / sizeof(float);
        const int64_t stride = args.value_dim;
        float *state =
            args.states + (text * args.value_heads + head) * args.key_dim * stride + first;
        for (int64_t i = 0; i < range.count; ++i) {
            const float *query = queries + i * args.key_dim, *key = keys + i * args.key_dim;
            V known[N] = {}, output[N] = {}, change[N];
            for (int64_t k = 0; k < args.key_dim; ++k)
                for (int n = 0; n < N; ++n) {
                    float *place = state + k * stride + n * WIDTH;
                    const V decayed = load_bits<V>(place) * decays[i];
                    known[n] += decayed * key[k];
                    store(place, decayed);
                }
            for (int n = 0; n < N; ++n)
                change[n] = (load_bits<V>(values(i) + first + n * WIDTH) - known[n]) * betas[i];
            for (int64_t k = 0; k < args.key_dim; ++k)
                for (int n = 0; n < N; ++n) {
                    float *place = state + k * stride + n * WIDTH;
                    const V updated = load_bits<V>(place) + change[n] * key[k];
                    output[n] += updated * query[k];
                    store(place, updated);
                }
            for (int n = 0; n < N; ++n)
                store(outputs + i * stride + first + n * WIDTH, output[n]);
        }
    }

    // Applies the norm and the gate to the outputs.
    void store_rows() {
        const int64_t width = args.value_dim;
        for (int64_t i = 0; i < range.count; ++i) {
            const float *from = outputs + i * width;
            float *gate = gates + i * width, *to = args.out + index(i) * width;
            const float mean = multiply_add(from, from, width) / float(width);
            const float scale = 1.0f / std::sqrt(mean + float(args.norm_eps));
            for (int64_t d = 0; d < width; ++d) gate[d] = args.gates[index(i) * width + d];
            activate_silu(gate, width);
            for (int64_t d = 0; d < width; ++d)
                to[d] = args.norm_weight[d] * (from[d] * scale) * gate[d];
        }
    }
};

// One head of Mamba 2 (Dao and Gu, arXiv 2405.21060). A row multiplies the state, a matrix
// [head_dim, state_dim], by a decay; adds the product of its input and its B; and reads it with
// its C.
class MambaHead {
  public:
    static int64_t count_floats(const MambaArgs &) { return 0; }
    static int64_t count_heads(const MambaArgs &args) { return args.heads; }

    MambaHead(const MambaArgs &args, const Convolved &convolved, int64_t text, int64_t head,
              RowRange range, float *)
        : args(args), convolved(convolved), text(text), head(head), range(range) {}

    void run() {
        const int64_t width = args.state_dim, first_group = args.heads * args.head_dim;
        const int64_t group = head * args.groups / args.heads;
        float *state = args.states + (text * args.heads + head) * args.head_dim * width;
        for (int64_t i = 0; i < range.count; ++i) {
            const int64_t index =
                (text * args.conv.rows + range.first + i) * args.heads + head;
            const float *x = convolved.at(text, i, head * args.head_dim);
            const float *b = convolved.at(text, i, first_group + group * width);
            const float *c = b + args.groups * width;
            float step = softplus(args.steps[index] + args.step_biases[head]);
            step = step < float(args.min_step) ? float(args.min_step) : step;
            step = step > float(args.max_step) ? float(args.max_step) : step;
            const float decay = std::exp(-args.decay_rates[head] * step);
            for (int64_t p = 0; p < args.head_dim; ++p) {
                update_state(state + p * width, decay, step * x[p], b, width);
                args.out[index * args.head_dim + p] =
                    multiply_add(state + p * width, c, width) + args.skips[head] * x[p];
            }
        }
    }

  private:
    const MambaArgs &args;
    const Convolved &convolved;
    const int64_t text, head;
    const RowRange range;

    static void update_state(float *state, float decay, float input, const float *b,
                             int64_t width) {
        int64_t n = 0;
        for (; n + LANES<float> <= width; n += LANES<float>)
            store(state + n, load(state + n) * decay + load(b + n) * input);
        for (; n < width; ++n) state[n] = state[n] * decay + b[n] * input;
    }
};

// A layer whose heads are computed by Head.
template <class Args, class Head> struct NetJob {
    const Args &args;
    Convolved convolved;
    float *scratch;                // [threads, Head::count_floats]

    static void work(void *self, int thread, int threads, Barrier &barrier) {
        ((const NetJob *)self)->run(thread, threads, barrier);
    }

    void run(int thread, int threads, Barrier &barrier) const {
        const ConvArgs &conv = args.conv;
        const int64_t n_heads = Head::count_heads(args), count = conv.batch * n_heads;
        // A vector of channels is not divided between threads.
        const int64_t vectors = (conv.channels + LANES<float> - 1) / LANES<float>;
        const int64_t end = vectors * (thread + 1) / threads * LANES<float>;
        for (RowRange range{0, 0}; range.first < conv.rows; range.first += NET_ROWS) {
            range.count = conv.rows - range.first;
            if (range.count > NET_ROWS) range.count = NET_ROWS;
            for (int64_t text = 0; text < conv.batch; ++text)
                convolve(conv, text, vectors * thread / threads * LANES<float>,
                         end < conv.channels ? end : conv.channels, range, convolved);
            barrier.wait();
            for (int64_t i = count * thread / threads; i < count * (thread + 1) / threads; ++i)
                Head(args, convolved, i / n_heads, i % n_heads, range,
                     scratch + thread * Head::count_floats(args))
                    .run();
            barrier.wait();
        }
    }
};

template <class Args, class Head> void run_net(const Args &args) {
    const ConvArgs &conv = args.conv;
    const int64_t n_convolved = conv.batch * NET_ROWS * conv.channels;
    const int64_t n_floats = n_convolved + conv.threads * Head::count_floats(args);
    float *memory = (float *)get_workspace(size_t(n_floats) * sizeof(float));
    NetJob<Args, Head> job{args, {memory, conv.channels}, memory + n_convolved};
    run_on_threads(int(conv.threads), NetJob<Args, Head>::work, &job);
}

}  // namespace

void run_delta_net(const DeltaNetArgs &args) { run_net<DeltaNetArgs, DeltaHead>(args); }
void run_mamba(const MambaArgs &args) { run_net<MambaArgs, MambaHead>(args); }
