// Vectors of the instruction set that this file is compiled to, and element-wise arithmetic.
#pragma once
#include <utility>

#include "abi.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define SS_BYTES 64
#elif defined(__AVX2__)
#define SS_BYTES 32
#else
#define SS_BYTES 16
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

typedef float FloatVec __attribute__((vector_size(SS_BYTES)));
typedef double DoubleVec __attribute__((vector_size(SS_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(SS_BYTES)));
typedef uint32_t WordVec __attribute__((vector_size(SS_BYTES)));
typedef int8_t FloatBytes __attribute__((vector_size(SS_BYTES / 4)));    // as many as floats
typedef int8_t DoubleBytes __attribute__((vector_size(SS_BYTES / 8)));   // as many as doubles
typedef uint16_t HalfVec __attribute__((vector_size(SS_BYTES / 2)));     // as many as floats

// Acc<T> is the type that values stored as T are computed in, Vec<T> its vector, and LANES<T> the
// number of values in that vector.
template <class T> struct ComputeType {
    using Acc = float;
    using Vec = FloatVec;
};
template <> struct ComputeType<double> {
    using Acc = double;
    using Vec = DoubleVec;
};
template <class T> using Acc = typename ComputeType<T>::Acc;
template <class T> using Vec = typename ComputeType<T>::Vec;
template <class T> constexpr int LANES = SS_BYTES / int(sizeof(Acc<T>));

// Reads the bytes of a value of type V.
template <class V, class P> inline V load_bits(const P *from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// Loads a vector of stored values.
inline FloatVec load(const float *from) { return load_bits<FloatVec>(from); }
inline DoubleVec load(const double *from) { return load_bits<DoubleVec>(from); }
inline FloatVec load(const bf16 *from) {
    // With __builtin_convertvector compilers convert two halves and join them.
#if defined(__AVX512F__)
    const WordVec bits = (WordVec)_mm512_cvtepu16_epi32((__m256i)load_bits<HalfVec>(from));
#elif defined(__AVX2__)
    const WordVec bits = (WordVec)_mm256_cvtepu16_epi32((__m128i)load_bits<HalfVec>(from));
#else
    const WordVec bits = __builtin_convertvector(load_bits<HalfVec>(from), WordVec);
#endif
    return (FloatVec)(bits << 16);
}

// Loads int8 values and converts them to float or double.
template <class V> inline V widen_int8(const int8_t *from);
template <> inline DoubleVec widen_int8(const int8_t *from) {
    return __builtin_convertvector(load_bits<DoubleBytes>(from), DoubleVec);
}
template <> inline FloatVec widen_int8(const int8_t *from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (FloatVec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (FloatVec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    return __builtin_convertvector(load_bits<FloatBytes>(from), FloatVec);
#endif
}

template <class V, class P> inline void store(P *to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

// Converts a stored value to the type that it is computed in.
inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }
inline float to_acc(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return load_bits<float>(&bits);
}

// Converts a computed value to T: to the nearest one, ties to even.
template <class T> inline T from_acc(Acc<T> x);
template <> inline float from_acc<float>(float x) { return x; }
template <> inline double from_acc<double>(double x) { return x; }
template <> inline bf16 from_acc<bf16>(float x) {
    const uint32_t bits = load_bits<uint32_t>(&x);
    if (x != x) return {uint16_t(bits >> 16 | 64)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Rounds a computed value to what T can hold.
template <class T> inline Acc<T> round_to(Acc<T> x) { return to_acc(from_acc<T>(x)); }

// Rounds each value of a vector to what T can hold.
template <class T> inline Vec<T> round_vec_to(Vec<T> x) { return x; }
template <> inline FloatVec round_vec_to<bf16>(FloatVec x) {
    const WordVec bits = (WordVec)x, near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return x != x ? (FloatVec)((bits | 0x400000u) & 0xffff0000u) : (FloatVec)near;
}

// Stores a vector in the type of `to`.
inline void store_as(float *to, FloatVec x) { store(to, x); }
inline void store_as(double *to, DoubleVec x) { store(to, x); }
inline void store_as(bf16 *to, FloatVec x) {
    const WordVec bits = (WordVec)round_vec_to<bf16>(x) >> 16;
#if defined(__AVX512F__)
    store(to, _mm512_cvtepi32_epi16((__m512i)bits));
#else
    store(to, __builtin_convertvector(bits, HalfVec));
#endif
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SS_SHUFFLES
#endif
#endif

// Adds the halves of a vector until one lane is left. Lane 0 of the result is the sum.
template <int HALF, class V, int... I>
inline V fold_lanes(V value, std::integer_sequence<int, I...> lanes) {
#if defined(SS_SHUFFLES)
    value += __builtin_shufflevector(value, value, (I ^ HALF)...);
#else
    V other;
    ((other[I] = value[I ^ HALF]), ...);
    value += other;
#endif
    if constexpr (HALF > 1) return fold_lanes<HALF / 2>(value, lanes);
    return value;
}

// Returns the sum of the lanes, always in the order of fold_lanes.
template <class V> inline auto sum_lanes(V value) {
    constexpr int N = sizeof(V) / sizeof(value[0]);
    return fold_lanes<N / 2>(value, std::make_integer_sequence<int, N>{})[0];
}

// Splits p and q into segments of S lanes and adds the two halves of each segment. Returns the
// shorter segments, those of p first.
template <int S, class V, int... I>
inline V add_halves(V p, V q, std::integer_sequence<int, I...>) {
    constexpr int N = sizeof...(I);
#define SS_FROM(lane) \
    ((lane) / (N / 2) * N + (lane) % (N / 2) / (S / 2) * S + (lane) % (S / 2))
#if defined(SS_SHUFFLES)
    return __builtin_shufflevector(p, q, SS_FROM(I)...) +
           __builtin_shufflevector(p, q, (SS_FROM(I) + S / 2)...);
#else
    V sums;
    ((sums[I] =
          (I < N / 2 ? p : q)[SS_FROM(I) % N] + (I < N / 2 ? p : q)[SS_FROM(I) % N + S / 2]),
     ...);
    return sums;
#endif
#undef SS_FROM
}

// Returns the lane sums of N vectors with N lanes, each summed in the order of sum_lanes. The
// vectors are overwritten.
template <class V, int N, int S = N> inline V sum_lanes_of_each(V (&values)[N]) {
    if constexpr (S == 1) return values[0];
    else {
#pragma GCC unroll 16
        for (int i = 0; i < S / 2; ++i)
            values[i] = add_halves<S>(values[2 * i], values[2 * i + 1],
                                      std::make_integer_sequence<int, N>{});
        return sum_lanes_of_each<V, N, S / 2>(values);
    }
}

// Returns e^x, to about two units in the last place; 0 for x < -87. The polynomial is that of
// Cephes' expf.
inline FloatVec exp_vec(FloatVec x) {
    const FloatVec magic = FloatVec{} + 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
    const FloatVec low = FloatVec{} - 87.0f, high = FloatVec{} + 88.0f;
    const FloatVec clamped = x < low ? low : (x > high ? high : x);
    const FloatVec shifted = clamped * 1.44269504088896341f + magic;
    const FloatVec n = shifted - magic;
    FloatVec r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    FloatVec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + (r + 1.0f);
    const IntVec power = ((IntVec)shifted - (IntVec)magic) << 23;
    y = (FloatVec)((IntVec)y + power);
    return x < low ? FloatVec{} : y;
}

inline DoubleVec exp_vec(DoubleVec x) {
    for (int i = 0; i < LANES<double>; ++i) x[i] = __builtin_exp(x[i]);
    return x;
}

inline float scalar_erf(float x) { return __builtin_erff(x); }
inline double scalar_erf(double x) { return __builtin_erf(x); }

template <class V> inline V activate(V x, int64_t activation) {
    using A = __typeof__(x[0] + x[0]);
    if (activation == SILU) return x / (A(1) + exp_vec(-x));
    // x * sigmoid(2y) = x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x^3).
    if (activation == GELU_TANH)
        return x / (A(1) + exp_vec(A(-1.5957691216057308) * (x + A(0.044715) * x * x * x)));
    for (unsigned i = 0; i < sizeof(V) / sizeof(A); ++i)
        x[i] = A(0.5) * x[i] * (A(1) + scalar_erf(x[i] * A(0.7071067811865476)));
    return x;
}

}  // namespace
