// Multiplies random weights by random rows with a built library, for every kind of panel, and
// prints the products. test_native_arm.py runs it in an emulator.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi.h"
#include "blocks.h"

namespace {

constexpr int64_t IN = 512, OUT = 96, ROWS = 5;

uint32_t state = 1;
uint32_t next_random() { return state = state * 1664525u + 1013904223u; }
float next_uniform() { return float(next_random() >> 8) / float(1 << 23) - 1.0f; }

// Bytes of a block in a file.
constexpr int block_bytes[] = {0,   34, 18,  20, 22, 24,  0,   144, 176,
                               210, 110, 18, 136, 17, 84, 274, 274, 274};

// Blocks of a GGUF file with random numbers and scales near 0.01.
std::vector<uint8_t> make_file_rows(int64_t kind, int64_t row_bytes) {
    std::vector<uint8_t> rows(size_t(OUT * row_bytes));
    for (uint8_t &byte : rows) byte = uint8_t(next_random() >> 24);
    for (int64_t at = 0; at < int64_t(rows.size()); at += block_bytes[kind]) {
        const uint16_t scale = uint16_t(0x2000 | (next_random() >> 22));   // a half near 0.01
        if (kind == MXFP4) {
            rows[size_t(at)] = uint8_t(118 + next_random() % 6);   // a power near 0.01
            continue;
        }
        const int64_t of_block = kind == Q6_K ? 208 : kind == Q3_K ? 108 : kind == Q2_K ? 80 : 0;
        std::memcpy(&rows[size_t(at + of_block)], &scale, 2);
        if (BLOCK_FORMATS[kind].has_min) std::memcpy(&rows[size_t(at + of_block + 2)], &scale, 2);
    }
    return rows;
}

}  // namespace

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    const auto quantize = (void (*)(const QuantizeArgs *))dlsym(library,
                                                                "skipsearch_quantize_blocks");
    const auto pack = (void (*)(const PackArgs *))dlsym(library, "skipsearch_pack_blocks");
    const auto multiply = (int (*)(int64_t, const ProductArgs *))dlsym(library,
                                                                       "skipsearch_run_product");
    for (int64_t kind = Q8_0; kind <= IQ2_S; ++kind) {
        const BlockFormat &format = BLOCK_FORMATS[kind];
        std::vector<uint8_t> bytes;
        int64_t row_bytes;
        if (kind == Q6_0) {   // no file has it
            std::vector<float> weights(size_t(OUT * IN));
            for (float &weight : weights) weight = next_uniform();
            row_bytes = IN / GROUP_SIZE * int64_t(sizeof(UnpackedBlock));
            bytes.resize(size_t(OUT * row_bytes));
            const QuantizeArgs args{weights.data(), OUT * IN / GROUP_SIZE, 6, bytes.data()};
            quantize(&args);
        } else {
            const int64_t in_block = GROUP_SIZE * (format.has_super_blocks ? SUPER_GROUPS : 1);
            row_bytes = IN / in_block * block_bytes[kind];
            bytes = make_file_rows(kind, row_bytes);
        }
        std::vector<const uint8_t *> rows;
        for (int64_t r = 0; r < OUT; ++r) rows.push_back(bytes.data() + r * row_bytes);
        const int64_t panel_bytes = format.panel_bytes(IN), n_panels = OUT / PANEL_ROWS;
        uint8_t *packed = (uint8_t *)std::aligned_alloc(
            64, size_t((n_panels * panel_bytes + 63) / 64 * 64 + 4096));
        const PackArgs packing{rows.data(), kind == Q6_0, n_panels, IN, kind, packed};
        pack(&packing);
        std::vector<Panel> panels;
        for (int64_t n = 0; n < n_panels; ++n) panels.push_back({packed + n * panel_bytes, kind});
        const Matrix matrix{panels.data(), nullptr, OUT, IN, 1};
        std::vector<float> x(size_t(ROWS * IN)), y(size_t(ROWS * OUT));
        for (float &value : x) value = next_uniform();
        for (const int64_t activations : {INT8, INT16, FLOAT}) {
            const ProductArgs args{&matrix, x.data(), y.data(), ROWS, 1, activations, 1, nullptr};
            if (multiply(F32, &args)) return 2;
            std::printf("%d %d", int(kind), int(activations));
            for (const float value : y) std::printf(" %a", double(value));
            std::printf("\n");
        }
        std::free(packed);
    }
}
