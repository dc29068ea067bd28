// One token of a few rows through a Mamba2 layer, between its projections.
#pragma once
#include <cmath>

#include "convolution.h"
#include "products.h"

namespace mamba2 {
using namespace products;

// A layer: its sizes, its parameters, and the states of all slots. `scale` [projections] multiplies
// the projected inputs, or is null; without a `norm_weight` nothing is normalized.
struct Mixer {
    long heads, head_width, groups, size, norm_group;
    const float *scale, *decay, *skip, *step_bias, *norm_weight;
    float eps;
    convolution::Convolution conv;
    float* states;
    long states_stride;
    long inner() const { return heads * head_width; }
    long conv_width() const { return inner() + 2 * groups * size; }
    long projections() const { return inner() + conv_width() + heads; }
};

// Advances one head's state [head_width, size] by a token and reads it.
INLINE void advance(const Mixer& m, long head, const float* convolved, float raw_step, float* state,
             float* y) {
    const float raw = raw_step + m.step_bias[head];
    const float step = raw > 20 ? raw : std::log1p(std::exp(raw));
    const float decay = std::exp(step * m.decay[head]);
    const long group = head / (m.heads / m.groups);
    const float* x = convolved + head * m.head_width;
    const float* b = convolved + m.inner() + group * m.size;
    const float* c = b + m.groups * m.size;
    for (long p = 0; p < m.head_width; p++) {
        float* s = state + p * m.size;
        const float added = step * x[p];
        Floats read{};
        long n = 0;
        for (; n + LANES <= m.size; n += LANES) {
            const Floats now = load(s + n) * decay + load(b + n) * added;
            store(s + n, now);
            read += now * load(c + n);
        }
        if (n < m.size) {
            const long left = m.size - n;
            const Floats now = load(s + n, left) * decay + load(b + n, left) * added;
            store(s + n, now, left);
            read += now * load(c + n, left);
        }
        y[p] = sum(read) + m.skip[head] * x[p];
    }
}

// Gates one norm group of a row and normalizes it, in place.
INLINE void gate(const Mixer& m, long begin, const float* gates, float* y) {
    const long end = begin + m.norm_group;
    Floats squares{};
    for (long i = begin; i < end; i += LANES) {
        const Floats x = load(y + i, end - i) * simd::silu(load(gates + i, end - i));
        store(y + i, x, end - i);
        squares += x * x;
    }
    if (!m.norm_weight) return;
    const float factor = 1 / std::sqrt(sum(squares) / m.norm_group + m.eps);
    for (long i = begin; i < end; i += LANES)
        store(y + i, load(y + i, end - i) * factor * load(m.norm_weight + i, end - i), end - i);
}

// By all threads of a parallel region, behind whose barrier `projected` [rows, projections] is
// complete: advances windows and states at `slots` (-1 for padding, which yields zeros) and leaves
// what goes into the output's projection in `mixed` [rows, inner]. `convolved` [rows, conv_width] is
// scratch. All is complete when it returns.
static inline void step(const Mixer& m, long rows, const int64_t* slots, float* projected,
                        float* convolved, float* mixed, Part part) {
    const long inner = m.inner(), conv_width = m.conv_width(), projections = m.projections();
    if (m.scale) {
        for (long r = 0; r < rows; r++)
            for (long i = part.begin(projections, LANES); i < part.end(projections, LANES); i++)
                projected[r * projections + i] *= m.scale[i];
#pragma omp barrier
    }
    const long begin = part.begin(conv_width, LANES), end = part.end(conv_width, LANES);
    for (long r = 0; r < rows; r++) {
        if (slots[r] < 0) continue;
        const float* x = projected + r * projections + inner;
        convolution::convolve(m.conv, x, slots[r], convolved + r * conv_width, begin, end);
    }
#pragma omp barrier
    for (long i = part.begin(rows * m.heads, 1); i < part.end(rows * m.heads, 1); i++) {
        const long r = i / m.heads, head = i % m.heads;
        float* to = mixed + r * inner + head * m.head_width;
        if (slots[r] < 0) {
            for (long j = 0; j < m.head_width; j++) to[j] = 0;
            continue;
        }
        float* state = m.states + slots[r] * m.states_stride + head * m.head_width * m.size;
        const float raw_step = projected[r * projections + inner + conv_width + head];
        advance(m, head, convolved + r * conv_width, raw_step, state, to);
    }
#pragma omp barrier
    const long norms = inner / m.norm_group;
    for (long i = part.begin(rows * norms, 1); i < part.end(rows * norms, 1); i++) {
        const long r = i / norms;
        gate(m, i % norms * m.norm_group, projected + r * projections, mixed + r * inner);
    }
#pragma omp barrier
}

}  // namespace mamba2
