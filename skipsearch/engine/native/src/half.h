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

// Rounds a float to half precision, ties to even. Larger values become the largest finite one.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) return sign | 0x7bff;                    // 65520 and more, or a NaN
    const float magnitude = value < 0 ? -value : value;
    if (bits < 0x38800000) return sign | uint16_t(__builtin_rintf(magnitude * 0x1p24f));
    bits += 0xfff + (bits >> 13 & 1);
    return sign | uint16_t((bits - (112u << 23)) >> 13);
}
