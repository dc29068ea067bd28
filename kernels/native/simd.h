// Vectors of 16 floats and what the kernels do with them, in GCC's and Clang's vector extension: the
// compiler turns them into whatever registers the machine has.
#pragma once
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <utility>

#define INLINE static inline __attribute__((always_inline))

namespace simd {

template <class Function, int... I>
INLINE void each_of(Function&& call, std::integer_sequence<int, I...>) {
    (call(std::integral_constant<int, I>{}), ...);
}
// call(0), ..., call(N - 1), without a loop: an array of vectors whose indices are known stays in
// registers. The function must be INLINED.
template <int N, class Function>
INLINE void each(Function&& call) {
    each_of(call, std::make_integer_sequence<int, N>{});
}
#define INLINED __attribute__((always_inline))

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
    each<8>([&](auto i) INLINED { x[i] = paired<8>(x[i], x[i + 8]); });
    each<4>([&](auto i) INLINED { x[i] = paired<4>(x[i], x[i + 4]); });
    each<2>([&](auto i) INLINED { x[i] = paired<2>(x[i], x[i + 2]); });
    return paired<1>(x[0], x[1]);
}

// b where one of them is not a number.
INLINE Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INLINE bool any_larger(Floats a, Floats b) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
    const Ints found = a > b;
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= found[i];
    return any;
#endif
}
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

// 2^x for x <= 0 within two units in the last place; 0 from -127 on. x = n + f with |f| <= 1/2; 2^f by
// the polynomial of degree 6 with the smallest relative error (2.6e-9) that is 1 for f = 0, 2^n by
// adding n to the exponent's bits: those of n are the lowest of the rounded sum.
INLINE Floats exp2_down(Floats x) {
    const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats y = larger(all(-127.0f), x);
    const Floats rounded = y + ROUND;
    const Floats f = y - (rounded - ROUND);
    Floats p = all(1.559467751e-4f);
    p = p * f + 1.34066439e-3f;
    p = p * f + 9.617692975e-3f;
    p = p * f + 5.550310551e-2f;
    p = p * f + 2.402265278e-1f;
    p = p * f + 6.93147215e-1f;
    p = p * f + 1.0f;
    return (Floats)((Words)p + ((Words)rounded << 23));
}

INLINE Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }
INLINE Floats silu(Floats x) { return x / (exp(-x) + 1.0f); }

}  // namespace simd
