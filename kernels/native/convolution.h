// One token through a short causal convolution whose last inputs are kept per channel.
#pragma once
#include "simd.h"

namespace convolution {
using namespace simd;

// [channels, taps] and [channels], or null; windows of all slots [slots][channels, taps - 1], floats
// or bfloat16s.
struct Convolution {
    long taps;
    const float *weight, *bias;
    void* windows;
    long stride;
    int bfloat16;
};

template <class T>
void shift(const Convolution& c, const float* x, T* windows, float* y, long begin, long end) {
    const long past = c.taps - 1;
    for (long i = begin; i < end; i++) {
        T* window = windows + i * past;
        const float* w = c.weight + i * c.taps;
        float s = c.bias ? c.bias[i] : 0;
        for (long k = 0; k < past; k++) s += one(window + k) * w[k];
        y[i] = s + x[i] * w[past];
        for (long k = 0; k + 1 < past; k++) window[k] = window[k + 1];
        if (past) put(window + past - 1, x[i]);
    }
    for (long i = begin; i < end; i += LANES) store(y + i, silu(load(y + i, end - i)), end - i);
}

// Channels [begin, end) of one row, with silu; shifts their windows at `slot`.
static inline void convolve(const Convolution& c, const float* x, long slot, float* y, long begin,
                            long end) {
    if (c.bfloat16)
        shift(c, x, (Bfloat16*)c.windows + slot * c.stride, y, begin, end);
    else
        shift(c, x, (float*)c.windows + slot * c.stride, y, begin, end);
}

}  // namespace convolution
