// Rows of inputs: how they are stored, and how they are rounded to int8.
#pragma once
#include "block_product.h"
#include "vec.h"

namespace {

// Input<T> is how a row of inputs is stored. The dot product instruction of bfloat16 reads pairs of
// neighbouring bfloat16; all other code reads Acc<T>.
#if defined(SS_BF16_DOT)
template <class T> using Input = T;
#else
template <class T> using Input = Acc<T>;
#endif

// Rounds a value to T and returns it as it is stored in a row of inputs.
template <class T> inline Input<T> to_input(Acc<T> x);
template <> inline Input<float> to_input<float>(float x) { return x; }
template <> inline Input<double> to_input<double>(double x) { return x; }
template <> inline Input<bf16> to_input<bf16>(float x) {
#if defined(SS_BF16_DOT)
    return from_acc<bf16>(x);
#else
    return round_to<bf16>(x);
#endif
}

// Stores a vector as to_input does a value.
template <class T> inline void store_input(Input<T> *to, Vec<T> x) {
    if constexpr (sizeof(Input<T>) == sizeof(T)) store_as(to, x);
    else store(to, round_vec_to<T>(x));
}

// Rounds the inputs of one block to whole numbers up to `max_number`. Returns the scale. A NaN or
// an infinite input makes the scale NaN or infinite, and so every product of the block.
inline float round_block(const FloatVec *x, int32_t max_number, int32_t *integers) {
    constexpr int VECS = GROUP_SIZE / LANES<float>;
    const IntVec magnitude_mask = IntVec{} + 0x7fffffff;
    IntVec largest = {};   // bits of a magnitude: they are in the order of the magnitudes
    for (int v = 0; v < VECS; ++v) {
        const IntVec bits = (IntVec)x[v] & magnitude_mask;
        largest = bits > largest ? bits : largest;
    }
    int32_t max_bits = 0;
    for (int i = 0; i < LANES<float>; ++i) max_bits = largest[i] > max_bits ? largest[i] : max_bits;
    const float max = load_bits<float>(&max_bits), scale = max / float(max_number);
    const bool is_finite = max_bits < 0x7f800000;
    const float inverse = is_finite && scale > 1e-37f ? float(max_number) / max : 0;
    const FloatVec magic = FloatVec{} + 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
    for (int v = 0; v < VECS; ++v) {
        const FloatVec scaled = is_finite ? x[v] * inverse : FloatVec{};
        store(integers + v * LANES<float>, (IntVec)(scaled + magic) - (IntVec)magic);
    }
    return scale;
}

// Stores block n of a plane.
inline void store_block(const RoundedRows &plane, int64_t n, const int32_t *integers, float scale) {
    int32_t *half_sums = plane.half_sums + 2 * n;
    half_sums[0] = half_sums[1] = 0;
    for (int i = 0; i < GROUP_SIZE / 2; ++i) half_sums[0] += integers[i];
    for (int i = GROUP_SIZE / 2; i < GROUP_SIZE; ++i) half_sums[1] += integers[i];
    for (int i = 0; i < GROUP_SIZE; ++i) plane.numbers[n * GROUP_SIZE + i] = int8_t(integers[i]);
    plane.scales[n] = scale;
}

// Loads inputs as float.
inline FloatVec load_floats(const float *from) { return load(from); }
inline FloatVec load_floats(const bf16 *from) { return load(from); }
inline FloatVec load_floats(const double *from) {
    FloatVec values;
    for (int i = 0; i < LANES<float>; ++i) values[i] = float(from[i]);
    return values;
}

// Rounds rows [rows, x_stride] of `in` inputs each.
template <class T>
void round_rows(const Input<T> *x, int64_t x_stride, int64_t in, int64_t rows,
                const RoundedRows &to) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < in; k += GROUP_SIZE) {
            const Input<T> *from = x + r * x_stride + k;
            const int64_t count = in - k < GROUP_SIZE ? in - k : GROUP_SIZE;
            FloatVec block[GROUP_SIZE / LANES<float>] = {};
            if (count == GROUP_SIZE)
                for (int v = 0; v < GROUP_SIZE / LANES<float>; ++v)
                    block[v] = load_floats(from + v * LANES<float>);
            else {
                float values[GROUP_SIZE] = {};
                for (int64_t i = 0; i < count; ++i) values[i] = float(to_acc(from[i]));
                __builtin_memcpy(block, values, sizeof values);
            }
            const int64_t n = k / GROUP_SIZE;
            int32_t integers[GROUP_SIZE], low[GROUP_SIZE];
            if (to.planes == 1) {
                const float scale = round_block(block, 127, integers);
                store_block(to.from_plane(r), n, integers, scale);
                continue;
            }
            const float scale = round_block(block, 127 * 128, integers);
            for (int i = 0; i < GROUP_SIZE; ++i) {
                const int32_t high = (integers[i] + 64) >> 7;
                low[i] = integers[i] - 128 * high, integers[i] = high;
            }
            store_block(to.from_plane(2 * r), n, integers, 128 * scale);
            store_block(to.from_plane(2 * r + 1), n, low, scale);
        }
}

}  // namespace
