// The interface between exports.cpp and the kernels, which are compiled once for each dtype.
#pragma once
#include "visibility.h"

constexpr int64_t KEY_BLOCK = 256;   // keys that attention takes as one block

struct PassJob {
    const Model *model;
    const PassArgs *args;
    const VisibleKeys *const *visible_keys;   // [n_windows] pointers to [batch * rows]
    int64_t key_blocks;                       // key blocks of the row that attends to the most keys
};

// A draw of one token. confidence: becomes the largest probability.
struct Draw {
    const Sampling *sampling;
    double uniform;
    const void *logits;                       // [n_rows], in the model's dtype
    int64_t n_rows;                           // outputs of the head
    void *probs;                              // [n_rows], becomes the distribution
    float *confidence;
};

// The kernels of one dtype.
struct Kernels {
    void (*run_pass)(const PassJob &);
    void (*run_product)(const ProductArgs &);
    void (*read_rows)(const ReadRowsArgs &);
    int64_t (*draw_row)(const Draw &);        // returns a row of the head
};
