// Norms of a row.
#pragma once
#include <cmath>

#include "simd.h"

namespace simd {

// y = x / sqrt(mean(x^2) + eps) * weight * scale; y may be x.
static inline void rms_norm(const float* x, const float* weight, float* y, long width, float eps,
                            float scale = 1) {
    Floats squares{};
    for (long i = 0; i < width; i += LANES) {
        const Floats v = load(x + i, width - i);
        squares += v * v;
    }
    const float factor = scale / std::sqrt(sum(squares) / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * factor * weight[i];
}

}  // namespace simd
