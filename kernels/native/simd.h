// Vectors of 16 floats and what the kernels do with them, in GCC's and Clang's vector extension: the
// compiler turns them into whatever registers the machine has.
#pragma once
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

namespace simd {

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

// A bfloat16: the upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

INLINE Floats all(float x) { return x - Floats{}; }
INLINE Floats load(const float* p) { return *(const Unaligned*)p; }
INLINE Floats load(const Bfloat16* p) {
    Halves bits = *(const UnalignedHalves*)p;
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
INLINE float one(const float* p) { return *p; }
INLINE float one(const Bfloat16* p) {
    uint32_t word = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
}
INLINE void put(float* p, float x) { *p = x; }
// Rounded to the nearest, to even in the middle.
INLINE void put(Bfloat16* p, float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    p->bits = (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
// The first `count` values, then zeros; reads nothing behind them.
template <class T>
INLINE Floats load(const T* p, long count) {
    if (count >= LANES) return load(p);
    T some[LANES] = {};
    memcpy(some, p, count * sizeof(T));
    return load(some);
}
// Keeps x in a register where the compiler would read it from memory at each use.
INLINE void keep(Floats& x) {
#ifdef __AVX512F__
    asm("" : "+v"(x));
#else
    (void)x;
#endif
}
INLINE void store(float* p, Floats x) { *(Unaligned*)p = x; }
INLINE void store(float* p, Floats x, long count) {
    if (count >= LANES) {
        store(p, x);
    } else {
        memcpy(p, &x, count * sizeof(float));
    }
}

INLINE float sum(Floats x) {
    Half h[2];
    memcpy(h, &x, sizeof x);
    Half s = h[0] + h[1];
    Quarter q[2];
    memcpy(q, &s, sizeof s);
    Quarter t = q[0] + q[1];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

// Adds the halves of pairs of lanes: the sums of 16 vectors are the lanes of one after four rounds.
template <int STEP>
INLINE Floats paired(Floats a, Floats b) {
    Ints even, odd;
    for (int i = 0; i < LANES; i++) {
        const int from = i & STEP ? LANES : 0;
        even[i] = from + (i & ~STEP);
        odd[i] = from + (i | STEP);
    }
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}
// The sum of every x[i], in lane i. Changes x.
INLINE Floats sums(Floats x[LANES]) {
    for (int i = 0; i < 8; i++) x[i] = paired<8>(x[i], x[i + 8]);
    for (int i = 0; i < 4; i++) x[i] = paired<4>(x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) x[i] = paired<2>(x[i], x[i + 2]);
    return paired<1>(x[0], x[1]);
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE float largest(Floats x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = x[i] > found ? x[i] : found;
    return found;
}

// e^x within two units in the last place; 0 below e^-87.3. 2^n by the exponent's bits, e^r for the
// rest |r| <= ln(2) / 2 by the polynomial of degree 6 through Chebyshev's points.
INLINE Floats exp(Floats x) {
    const float LOWEST = -87.3f, HIGHEST = 88.3f;
    const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    Floats y = x < LOWEST ? all(LOWEST) : x;
    y = y > HIGHEST ? all(HIGHEST) : y;
    Floats n = y * 1.44269504f + ROUND - ROUND;
    Floats r = y - n * 0.693145751953125f - n * 1.42860677e-06f;
    Floats p = all(1.394111894e-3f);
    p = p * r + 8.375134775e-3f;
    p = p * r + 4.1666352770e-2f;
    p = p * r + 1.66664154140e-1f;
    p = p * r + 5.00000004715e-1f;
    p = p * r + 1.0000000377f;
    p = p * r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats result = p * (Floats)power;
    return x < LOWEST ? Floats{} : result;
}

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }
INLINE Floats silu(Floats x) { return x / (exp(-x) + 1.0f); }

}  // namespace simd
