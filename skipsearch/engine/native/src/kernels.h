// Between main.cpp and the kernels, which are compiled once for each dtype.
#pragma once
#include "rows.h"

// seen: by window, [batch * rows] each. blocks: of keys, of the row that sees most.
struct Job {
    const Model *model;
    const Pass *pass;
    const Seen *const *seen;
    int64_t blocks;
};

// y [rows, out] = x [rows, in] times a matrix, with its bias; in T as stored.
struct Product {
    const Matrix *matrix;
    const void *x;
    void *y;
    int64_t rows, threads;
};

// Of one dtype.
struct Kernels {
    void (*pass)(const Job &);
    void (*product)(const Product &);
};

constexpr int64_t KEYS_AT_ONCE = 256;   // entries of a block of keys
