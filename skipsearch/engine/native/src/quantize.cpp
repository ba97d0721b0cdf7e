// Rounds weights to numbers of 4 to 8 bits, in blocks of GROUP_SIZE with a scale each.
#include "packing.h"

#include "blocks.h"

namespace {

// Scales that are tried for fewer than 8 bits: the weight of the largest magnitude becomes the
// lowest number, zero, plus one of these.
constexpr float SCALE_STEPS[] = {0.0f, -0.9f, -0.6f, -0.3f, 0.3f, 0.6f};

// Rounds a block to multiples of a scale. Returns the sum of squared errors.
float round_to_scale(const float *weights, float scale, int zero, int low, int high,
                     uint8_t *numbers) {
    const float divisor = scale == 0 ? 1 : scale;
    float errors[GROUP_SIZE], sum = 0;
    for (int i = 0; i < GROUP_SIZE; ++i) {
        float number = __builtin_rintf(weights[i] / divisor) + float(zero);
        number = number < float(low) ? float(low) : number;   // a NaN stays one
        number = number > float(high) ? float(high) : number;
        const float error = (number - float(zero)) * scale - weights[i];
        numbers[i] = uint8_t(int(number)), errors[i] = error * error;
    }
    for (int i = 0; i < GROUP_SIZE; ++i) sum += errors[i];
    return sum;
}

}  // namespace

void quantize_blocks(const QuantizeArgs &args) {
    const int zero = 1 << (args.bits - 1);
    for (int64_t n = 0; n < args.n_blocks; ++n) {
        const float *weights = args.weights + n * GROUP_SIZE;
        UnpackedBlock &block = ((UnpackedBlock *)args.blocks)[n];
        float extreme = 0, zero_or_nan = 0;
        for (int i = 0; i < GROUP_SIZE; ++i) zero_or_nan += weights[i] * 0;
        if (zero_or_nan != 0) {   // a weight is infinite or NaN, so the block is NaN
            block = {0x7e00, {}};
            continue;
        }
        for (int i = 0; i < GROUP_SIZE; ++i)
            if (__builtin_fabsf(weights[i]) > __builtin_fabsf(extreme)) extreme = weights[i];
        if (args.bits == 8) {
            block.scale = float_to_half(__builtin_fabsf(extreme) / 127);
            round_to_scale(weights, half_to_float(block.scale), zero, 1, 255, block.numbers);
            continue;
        }
        float least_error = 0;
        for (const float &step : SCALE_STEPS) {
            uint8_t numbers[GROUP_SIZE];
            const uint16_t scale = float_to_half(extreme / -(float(zero) + step));
            const float error = round_to_scale(weights, half_to_float(scale), zero, 0,
                                               2 * zero - 1, numbers);
            if (&step != SCALE_STEPS && error >= least_error) continue;
            least_error = error, block.scale = scale;
            std::memcpy(block.numbers, numbers, GROUP_SIZE);
        }
    }
}
