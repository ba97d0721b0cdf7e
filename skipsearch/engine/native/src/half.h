// Half precision numbers, for code that is compiled without the instructions of one processor.
#pragma once
#include <cstdint>
#include <cstring>

// Converts a half precision number to float, exactly.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits = sign | magnitude << 13;
    if (magnitude >= 0x7c00) bits |= 0x7f800000u;                   // infinity or NaN
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return magnitude >= 0x7c00 ? value : value * 0x1p112f;          // corrects the exponent's bias
}
