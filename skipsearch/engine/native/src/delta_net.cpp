// A head of a gated delta net, for the instruction set that the compiler's flags choose. All numbers
// are float, as transformers computes them in every dtype.
#include "delta_net.h"

#include <cmath>

#include "vec.h"

namespace {

constexpr float KEY_NORM_EPS = 1e-6f;

// The rows first ... first + count - 1 of a head, in scratch memory.
struct HeadRows {
    float *queries, *keys;         // [DELTA_ROWS, key_dim]
    float *values, *outputs;       // [DELTA_ROWS, value_dim]
    float *decays, *betas;         // [DELTA_ROWS]
    int64_t first, count;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Returns the sum of squares, in an order that depends on the width alone.
float sum_squares(const float *x, int64_t width) {
    FloatVec sums{};
    int64_t d = 0;
    for (; d + LANES<float> <= width; d += LANES<float>) sums += load(x + d) * load(x + d);
    float sum = sum_lanes(sums);
    for (; d < width; ++d) sum += x[d] * x[d];
    return sum;
}

void activate_silu(float *x, int64_t width) {
    int64_t d = 0;
    for (; d + LANES<float> <= width; d += LANES<float>) store(x + d, activate(load(x + d), SILU));
    for (; d < width; ++d) x[d] *= sigmoid(x[d]);
}

// Convolves channels first ... first + count - 1 of a row of a text.
void convolve(const DeltaNetArgs &args, int64_t text, int64_t row, int64_t first, int64_t count,
              float *to) {
    const int64_t channels = 2 * args.key_heads * args.key_dim + args.value_heads * args.value_dim;
    const int64_t end = args.columns - args.rows + row + 1, begin = end - args.kernel;
    for (int64_t d = 0; d < count; ++d) {
        const float *column = args.mixed + (text * channels + first + d) * args.columns;
        const float *weights = args.conv_weight + (first + d) * args.kernel;
        float sum = args.conv_bias ? args.conv_bias[first + d] : 0.0f;
        for (int64_t n = begin < 0 ? 0 : begin; n < end; ++n)
            sum += column[n] * weights[n - begin];
        to[d] = sum;
    }
    activate_silu(to, count);
}

// Divides a vector by its length, and multiplies it by `factor`.
void normalize(float *x, int64_t width, float factor) {
    const float scale = factor / std::sqrt(sum_squares(x, width) + KEY_NORM_EPS);
    for (int64_t d = 0; d < width; ++d) x[d] *= scale;
}

void load_rows(const DeltaNetArgs &args, int64_t text, int64_t head, const HeadRows &rows) {
    const int64_t key_head = head * args.key_heads / args.value_heads;
    const int64_t width = args.key_dim, first_key = args.key_heads * width;
    const int64_t first_value = 2 * first_key + head * args.value_dim;
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i, at = (text * args.rows + row) * args.value_heads + head;
        float *query = rows.queries + i * width, *key = rows.keys + i * width;
        convolve(args, text, row, key_head * width, width, query);
        convolve(args, text, row, first_key + key_head * width, width, key);
        convolve(args, text, row, first_value, args.value_dim, rows.values + i * args.value_dim);
        normalize(query, width, 1.0f / std::sqrt(float(width)));
        normalize(key, width, 1.0f);
        rows.betas[i] = sigmoid(args.beta_logits[at]);
        const float step = softplus(args.steps[at] + args.step_biases[head]);
        rows.decays[i] = std::exp(-args.decay_rates[head] * step);
    }
}

// Loads and stores a lane of values of type V: a vector, or one number.
template <class V> V load_values(const float *from) { return load_bits<V>(from); }

// Runs the delta rule for N neighbouring V's of values. state: [key_dim, value_dim], from the first
// of these values on.
template <class V, int N>
void update_values(const DeltaNetArgs &args, const HeadRows &rows, int64_t first, float *state) {
    constexpr int64_t WIDTH = sizeof(V) / sizeof(float);
    const int64_t stride = args.value_dim;
    for (int64_t i = 0; i < rows.count; ++i) {
        const float *query = rows.queries + i * args.key_dim, *key = rows.keys + i * args.key_dim;
        const float decay = rows.decays[i];
        V known[N] = {}, output[N] = {}, change[N];
        for (int64_t k = 0; k < args.key_dim; ++k)
            for (int n = 0; n < N; ++n) {
                float *place = state + k * stride + n * WIDTH;
                const V decayed = load_values<V>(place) * decay;
                known[n] += decayed * key[k];
                store(place, decayed);
            }
        for (int n = 0; n < N; ++n)
            change[n] = (load_values<V>(rows.values + i * stride + first + n * WIDTH) - known[n]) *
                        rows.betas[i];
        for (int64_t k = 0; k < args.key_dim; ++k)
            for (int n = 0; n < N; ++n) {
                float *place = state + k * stride + n * WIDTH;
                const V updated = load_values<V>(place) + change[n] * key[k];
                output[n] += updated * query[k];
                store(place, updated);
            }
        for (int n = 0; n < N; ++n)
            store(rows.outputs + i * stride + first + n * WIDTH, output[n]);
    }
}

// Applies the norm and the gate to the outputs of a head.
void store_rows(const DeltaNetArgs &args, int64_t text, int64_t head, const HeadRows &rows) {
    const int64_t width = args.value_dim;
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t at = (text * args.rows + rows.first + i) * args.value_heads + head;
        const float *from = rows.outputs + i * width;
        float *gate = rows.values + i * width, *to = args.out + at * width;
        const float scale =
            1.0f / std::sqrt(sum_squares(from, width) / float(width) + float(args.norm_eps));
        for (int64_t d = 0; d < width; ++d) gate[d] = args.gates[at * width + d];
        activate_silu(gate, width);
        for (int64_t d = 0; d < width; ++d)
            to[d] = args.norm_weight[d] * (from[d] * scale) * gate[d];
    }
}

}  // namespace

void run_delta_head(const DeltaNetArgs &args, int64_t index, float *scratch) {
    const int64_t text = index / args.value_heads, head = index % args.value_heads;
    float *state = args.states + index * args.key_dim * args.value_dim;
    HeadRows rows;
    rows.queries = scratch, rows.keys = rows.queries + DELTA_ROWS * args.key_dim;
    rows.values = rows.keys + DELTA_ROWS * args.key_dim;
    rows.outputs = rows.values + DELTA_ROWS * args.value_dim;
    rows.decays = rows.outputs + DELTA_ROWS * args.value_dim;
    rows.betas = rows.decays + DELTA_ROWS;
    for (rows.first = 0; rows.first < args.rows; rows.first += DELTA_ROWS) {
        rows.count = args.rows - rows.first < DELTA_ROWS ? args.rows - rows.first : DELTA_ROWS;
        load_rows(args, text, head, rows);
        // A part of the state stays in the L1 cache while all rows use it.
        int64_t d = 0;
        for (; d + 2 * LANES<float> <= args.value_dim; d += 2 * LANES<float>)
            update_values<FloatVec, 2>(args, rows, d, state + d);
        for (; d < args.value_dim; ++d) update_values<float, 1>(args, rows, d, state + d);
        store_rows(args, text, head, rows);
    }
}
