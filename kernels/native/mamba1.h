// One token of a few rows through a Mamba1 layer, between its projections.
#pragma once
#include <cmath>

#include "convolution.h"
#include "products.h"

namespace mamba1 {
using namespace products;

// A layer: its sizes, its parameters, and the states [inner, size] of all slots. Where it is
// `normed`, a token's step, input and output vectors are normalized, without weights.
struct Mixer {
    long inner, size, rank;
    const float *decay, *skip;  // [inner, size], [inner]
    int normed;
    float eps;
    convolution::Convolution conv;
    float* states;
    long states_stride;
    long parameters() const { return rank + 2 * size; }
};

// This part of the channels: their inputs are the first half of `projected` [rows, 2 * inner].
static inline void convolve(const Mixer& m, long rows, const int64_t* slots, const float* projected,
                            float* convolved, Part part) {
    const long begin = part.begin(m.inner, LANES), end = part.end(m.inner, LANES);
    for (long r = 0; r < rows; r++)
        if (slots[r] >= 0)
            convolution::convolve(m.conv, projected + r * 2 * m.inner, slots[r],
                                  convolved + r * m.inner, begin, end);
}

INLINE void normalize(const float* x, float* y, long size, float eps, int normed) {
    float squares = 0;
    for (long i = 0; i < size; i++) squares += x[i] * x[i];
    const float factor = normed ? 1 / std::sqrt(squares / size + eps) : 1;
    for (long i = 0; i < size; i++) y[i] = x[i] * factor;
}

// One channel of one row: advances its state [size] and reads it.
INLINE float advance(const Mixer& m, long channel, float x, float raw_step, const float* in,
                     const float* out, float* state) {
    const float step = raw_step > 20 ? raw_step : std::log1p(std::exp(raw_step));
    const float* decay = m.decay + channel * m.size;
    const float added = step * x;
    Floats read{};
    for (long n = 0; n < m.size; n += LANES) {
        const long left = m.size - n;
        const Floats now = load(state + n, left) * simd::exp(load(decay + n, left) * step) +
                           load(in + n, left) * added;
        store(state + n, now, left);
        read += now * load(out + n, left);
    }
    return sum(read) + m.skip[channel] * x;
}

// This part of the channels, behind the barrier at which `selected` [rows, parameters] is complete:
// advances states at `slots` (-1 for padding, which yields zeros) and leaves what goes into the
// output's projection in `mixed` [rows, inner]. `steps` projects the steps to all channels.
static inline void advance(const Mixer& m, const Weight& steps, long rows, const int64_t* slots,
                           const float* projected, const float* convolved, const float* selected,
                           float* mixed, Part part) {
    static thread_local Scratch own;
    const long width = m.parameters(), inner = m.inner;
    float* vectors = own.of(rows * width);
    for (long r = 0; r < rows; r++) {
        const float* from = selected + r * width;
        float* to = vectors + r * width;
        normalize(from, to, m.rank, m.eps, m.normed);
        for (long at = m.rank; at < width; at += m.size)
            normalize(from + at, to + at, m.size, m.eps, m.normed);
    }
    // The same part of the outputs as of the channels below.
    product(steps, vectors, width, rows, mixed, inner, NOTHING, part);
    const long begin = part.begin(inner, WIDE), end = part.end(inner, WIDE);
    for (long r = 0; r < rows; r++) {
        float* y = mixed + r * inner;
        const float* in = vectors + r * width + m.rank;
        for (long c = begin; c < end; c++) {
            if (slots[r] < 0) {
                y[c] = 0;
                continue;
            }
            float* state = m.states + slots[r] * m.states_stride + c * m.size;
            y[c] = advance(m, c, convolved[r * inner + c], y[c], in, in + m.size, state);
        }
        const float* gates = projected + (2 * r + 1) * inner;
        for (long c = begin; c < end; c += LANES)
            store(y + c, load(y + c, end - c) * simd::silu(load(gates + c, end - c)), end - c);
    }
}

}  // namespace mamba1
