// A row of K/V: the keys or values of one KV head and one token, as the cache stores them.
#pragma once
#include "layer_ops.h"

namespace {

// [head_dim] numbers in the model's dtype.
template <class T> struct DtypeRow {
    using Number = T;
    static constexpr int64_t number_bytes = sizeof(T);
    static constexpr int64_t bytes(int64_t width) { return width * number_bytes; }
    static Vec<T> load_from(const char *row, int64_t, int64_t d) {
        return load((const T *)row + d);
    }
    static Acc<T> read(const char *row, int64_t, int64_t d) { return to_acc(((const T *)row)[d]); }
    static void write(char *row, const Acc<T> *values, int64_t width) {
        store_as<T>((T *)row, values, width);
    }
};

// [head_dim] int8, then a float for each KV_GROUP of them: their scale.
template <class T> struct Int8Row {
    using Number = T;
    static constexpr int64_t number_bytes = 1;
    static constexpr int64_t bytes(int64_t width) {
        return width + (width + KV_GROUP - 1) / KV_GROUP * int64_t(sizeof(float));
    }
    static Acc<T> scale(const char *row, int64_t width, int64_t d) {
        return load_bits<float>(row + width + d / KV_GROUP * int64_t(sizeof(float)));
    }
    static Vec<T> load_from(const char *row, int64_t width, int64_t d) {
        return widen_int8<Vec<T>>((const int8_t *)row + d) * scale(row, width, d);
    }
    static Acc<T> read(const char *row, int64_t width, int64_t d) {
        return Acc<T>(((const int8_t *)row)[d]) * scale(row, width, d);
    }
    // The scale of a group is its largest value over 127.
    static void write(char *row, const Acc<T> *values, int64_t width) {
        for (int64_t start = 0; start < width; start += KV_GROUP) {
            const int64_t end = start + KV_GROUP < width ? start + KV_GROUP : width;
            float largest = 0;
            for (int64_t d = start; d < end; ++d) {
                const float size = __builtin_fabsf(float(values[d]));
                largest = size > largest ? size : largest;
            }
            const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
            for (int64_t d = start; d < end; ++d)
                row[d] = char(int8_t(__builtin_rintf(float(values[d]) * inverse)));
            __builtin_memcpy(row + width + start / KV_GROUP * int64_t(sizeof(float)), &scale,
                             sizeof scale);
        }
    }
};

}  // namespace
