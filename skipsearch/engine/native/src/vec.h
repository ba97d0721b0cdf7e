// Vectors of this file's instruction set, and the arithmetic that no sum depends on.
#pragma once
#include <utility>

#include "abi.h"

#if defined(__AVX2__)
#include <immintrin.h>
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
typedef int8_t FloatBytes __attribute__((vector_size(SS_BYTES / 4)));
typedef int8_t DoubleBytes __attribute__((vector_size(SS_BYTES / 8)));
typedef uint16_t HalfVec __attribute__((vector_size(SS_BYTES / 2)));

// Of a stored type: what is computed in, its vectors, how many lanes these have.
template <class T> struct Of {
    using Sum = float;
    using Vec = FloatVec;
};
template <> struct Of<double> {
    using Sum = double;
    using Vec = DoubleVec;
};
template <class T> using Sum = typename Of<T>::Sum;
template <class T> using Vec = typename Of<T>::Vec;
template <class T> constexpr int LANES = SS_BYTES / int(sizeof(Sum<T>));

template <class V, class P> inline V raw(const P *from) {
    V found;
    __builtin_memcpy(&found, from, sizeof found);
    return found;
}

inline FloatVec load(const float *from) { return raw<FloatVec>(from); }
inline DoubleVec load(const double *from) { return raw<DoubleVec>(from); }
inline FloatVec load(const bf16 *from) {
#if defined(__AVX512F__)   // compilers make two halves of it, and join them
    const WordVec bits = (WordVec)_mm512_cvtepu16_epi32((__m256i)raw<HalfVec>(from));
#elif defined(__AVX2__)
    const WordVec bits = (WordVec)_mm256_cvtepu16_epi32((__m128i)raw<HalfVec>(from));
#else
    const WordVec bits = __builtin_convertvector(raw<HalfVec>(from), WordVec);
#endif
    return (FloatVec)(bits << 16);
}

// Integers of 8 bits as numbers of a wider type.
template <class V> inline V widened(const int8_t *from);
template <> inline DoubleVec widened(const int8_t *from) { return __builtin_convertvector(raw<DoubleBytes>(from), DoubleVec); }
template <> inline FloatVec widened(const int8_t *from) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (FloatVec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(raw<FloatBytes>(from), FloatVec);
#endif
}

template <class V, class P> inline void store(P *to, V value) { __builtin_memcpy(to, &value, sizeof value); }

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    return raw<float>(&bits);
}

template <class T> inline T narrow(Sum<T> x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline double narrow<double>(double x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {  // to the nearest, ties to even
    const uint32_t bits = raw<uint32_t>(&x);
    if (x != x) return {uint16_t(bits >> 16 | 64)};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// As a value of T, in the wider type.
template <class T> inline Sum<T> rounded(Sum<T> x) { return wide(narrow<T>(x)); }

// The same of vectors.
template <class T> inline Vec<T> rounded_all(Vec<T> x) { return x; }
template <> inline FloatVec rounded_all<bf16>(FloatVec x) {
    const WordVec bits = (WordVec)x, near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return x != x ? (FloatVec)((bits | 0x400000u) & 0xffff0000u) : (FloatVec)near;
}
inline void store_as(float *to, FloatVec x) { store(to, x); }
inline void store_as(double *to, DoubleVec x) { store(to, x); }
inline void store_as(bf16 *to, FloatVec x) {
    const WordVec bits = (WordVec)rounded_all<bf16>(x) >> 16;
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

// The sum of the lanes, always in the same order: halves are added until one lane is left.
template <int HALF, class V, int... I> inline V folded(V value, std::integer_sequence<int, I...> lanes) {
#if defined(SS_SHUFFLES)
    value += __builtin_shufflevector(value, value, (I ^ HALF)...);
#else
    V other;
    ((other[I] = value[I ^ HALF]), ...);
    value += other;
#endif
    if constexpr (HALF > 1) return folded<HALF / 2>(value, lanes);
    return value;
}
template <class V> inline auto lanes_sum(V value) {
    constexpr int N = sizeof(V) / sizeof(value[0]);
    return folded<N / 2>(value, std::make_integer_sequence<int, N>{})[0];
}

// Stretches of S lanes of one vector and of another, their halves added: stretches of half the length, those of the first vector first.
template <int S, class V, int... I> inline V halved(V p, V q, std::integer_sequence<int, I...>) {
    constexpr int N = sizeof...(I);
#define SS_FROM(lane) ((lane) / (N / 2) * N + (lane) % (N / 2) / (S / 2) * S + (lane) % (S / 2))
#if defined(SS_SHUFFLES)
    return __builtin_shufflevector(p, q, SS_FROM(I)...) + __builtin_shufflevector(p, q, (SS_FROM(I) + S / 2)...);
#else
    V sums;
    ((sums[I] = (I < N / 2 ? p : q)[SS_FROM(I) % N] + (I < N / 2 ? p : q)[SS_FROM(I) % N + S / 2]), ...);
    return sums;
#endif
#undef SS_FROM
}

// lanes_sum of as many vectors as they have lanes, each in the order that it has alone. They are overwritten.
template <class V, int N, int S = N> inline V all_lanes_sums(V (&values)[N]) {
    if constexpr (S == 1) return values[0];
    else {
#pragma GCC unroll 16
        for (int i = 0; i < S / 2; ++i) values[i] = halved<S>(values[2 * i], values[2 * i + 1], std::make_integer_sequence<int, N>{});
        return all_lanes_sums<V, N, S / 2>(values);
    }
}

// e^x to about two units in the last place; 0 below -87. Cephes' polynomial.
inline FloatVec exps(FloatVec x) {
    const FloatVec magic = FloatVec{} + 12582912.0f;
    const FloatVec low = FloatVec{} - 87.0f, high = FloatVec{} + 88.0f;
    const FloatVec at = x < low ? low : (x > high ? high : x);
    const FloatVec shifted = at * 1.44269504088896341f + magic;
    const FloatVec n = shifted - magic;
    FloatVec r = at - n * 0.693359375f;
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

inline DoubleVec exps(DoubleVec x) {
    for (int i = 0; i < LANES<double>; ++i) x[i] = __builtin_exp(x[i]);
    return x;
}

inline float erf_of(float x) { return __builtin_erff(x); }
inline double erf_of(double x) { return __builtin_erf(x); }

template <class V> inline V activated(V x, int64_t act) {
    using A = __typeof__(x[0] + x[0]);
    if (act == SILU) return x / (A(1) + exps(-x));
    if (act == GELU_TANH) return x / (A(1) + exps(A(-1.5957691216057308) * (x + A(0.044715) * x * x * x)));
    for (unsigned i = 0; i < sizeof(V) / sizeof(A); ++i) x[i] = A(0.5) * x[i] * (A(1) + erf_of(x[i] * A(0.7071067811865476)));
    return x;
}

}  // namespace
