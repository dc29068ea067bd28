// Products of a few rows with a weight as it is stored: y[b, n] = sum over k of x[b, k] w[n, k].
#pragma once
#include "simd.h"

namespace products {
using namespace simd;

struct Part {
    long index, of;
    // Where this part of n things begins and ends; a multiple of `unit`.
    long begin(long n, long unit) const { return (n + unit - 1) / unit * index / of * unit; }
    long end(long n, long unit) const {
        const long found = (n + unit - 1) / unit * (index + 1) / of * unit;
        return found < n ? found : n;
    }
};

enum Activation { NOTHING = 0, SQUARED_RELU = 1 };

struct Weight {
    const float *values, *bias;  // [outputs, inputs], [outputs] or null
    long outputs, inputs;
};

constexpr int TILE = 4;

INLINE float activated(float x, int activation) {
    if (activation == SQUARED_RELU) return x > 0 ? x * x : 0;
    return x;
}

// N rows of the weight and B rows of x. How a result is summed up depends on neither.
template <int N, int B>
INLINE void tile(const Weight& w, long n, const float* x, long x_stride, float* y, long y_stride,
                 int activation) {
    Floats s[LANES];
    for (int i = 0; i < N * B; i++) s[i] = Floats{};
    const float* row = w.values + n * w.inputs;
    long k = 0;
    for (; k + LANES <= w.inputs; k += LANES) {
        Floats a[B];
        for (int b = 0; b < B; b++) a[b] = load(x + b * x_stride + k);
        for (int i = 0; i < N; i++) {
            const Floats v = load(row + i * w.inputs + k);
            for (int b = 0; b < B; b++) s[i * B + b] += v * a[b];
        }
    }
    if (k < w.inputs)
        for (int i = 0; i < N; i++)
            for (int b = 0; b < B; b++)
                s[i * B + b] += load(row + i * w.inputs + k, w.inputs - k) *
                                load(x + b * x_stride + k, w.inputs - k);
    float found[LANES];
    if (N * B == LANES) {
        store(found, sums(s));
    } else {
        for (int i = 0; i < N * B; i++) found[i] = sum(s[i]);
    }
    for (int i = 0; i < N; i++)
        for (int b = 0; b < B; b++)
            y[b * y_stride + n + i] =
                activated(found[i * B + b] + (w.bias ? w.bias[n + i] : 0), activation);
}

template <int N>
INLINE void rows_of(const Weight& w, long n, const float* x, long x_stride, long rows, float* y,
                    long y_stride, int activation) {
    long b = 0;
    for (; b + TILE <= rows; b += TILE)
        tile<N, TILE>(w, n, x + b * x_stride, x_stride, y + b * y_stride, y_stride, activation);
    for (; b < rows; b++)
        tile<N, 1>(w, n, x + b * x_stride, x_stride, y + b * y_stride, y_stride, activation);
}

// This part of the outputs, for all rows of x.
static inline void product(const Weight& w, const float* x, long x_stride, long rows, float* y,
                           long y_stride, int activation, Part part) {
    long n = part.begin(w.outputs, TILE);
    const long end = part.end(w.outputs, TILE);
    for (; n + TILE <= end; n += TILE)
        rows_of<TILE>(w, n, x, x_stride, rows, y, y_stride, activation);
    for (; n < end; n++) rows_of<1>(w, n, x, x_stride, rows, y, y_stride, activation);
}

}  // namespace products
