// One decode step of layers that are more than a product (steps.py says what each computes), with
// few rows: all of a layer in one parallel region.
#include <omp.h>

#include "mamba2.h"
#include "norm.h"

using namespace products;

namespace {

// Values of all weights and states below which waking the other threads costs more than they save.
constexpr long ALONE = 1 << 15;

INLINE Part part() { return {omp_get_thread_num(), omp_get_num_threads()}; }

}  // namespace

extern "C" void hybrid_product(const float* x, long rows, const void* weight, const float* bias,
                               long outputs, long inputs, int bfloat16, float* y) {
    const Weight w = {weight, bias, outputs, inputs, bfloat16};
#pragma omp parallel if (outputs * inputs > ALONE)
    product(w, x, inputs, rows, y, outputs, NOTHING, part());
}

extern "C" void hybrid_mlp(const float* x, long rows, const float* up, const float* up_bias,
                           const float* down, const float* down_bias, long width, long inner,
                           float* hidden, float* y) {
    const Weight first = {up, up_bias, inner, width, 0};
    const Weight second = {down, down_bias, width, inner, 0};
#pragma omp parallel if (width * inner > ALONE)
    {
        product(first, x, width, rows, hidden, inner, SQUARED_RELU, part());
#pragma omp barrier
        product(second, hidden, inner, rows, y, width, NOTHING, part());
    }
}

extern "C" void hybrid_mamba2(const float* x, long rows, long width, const float* in_weight,
                              const float* in_bias, const float* out_weight, const float* out_bias,
                              const float* scale, const float* conv_weight, const float* conv_bias,
                              const float* decay, const float* skip, const float* step_bias,
                              const float* norm_weight, const int64_t* slots, float* windows,
                              long windows_stride, float* states, long states_stride, long heads,
                              long head_width, long groups, long size, long taps, long norm_group,
                              float eps, float* projected, float* convolved, float* mixed,
                              float* y) {
    const mamba2::Mixer m = {
        heads,       head_width, groups, size,   norm_group,
        scale,       decay,      skip,   step_bias, norm_weight,
        eps,         {taps, conv_weight, conv_bias, windows, windows_stride, 0},
        states,      states_stride};
    const long inner = m.inner(), projections = m.projections();
    const Weight in = {in_weight, in_bias, projections, width, 0};
    const Weight out = {out_weight, out_bias, width, inner, 0};
    const long values = projections * width + rows * (inner * size + m.conv_width());
#pragma omp parallel if (values > ALONE)
    {
        const Part p = part();
        product(in, x, width, rows, projected, projections, NOTHING, p);
#pragma omp barrier
        mamba2::step(m, rows, slots, projected, convolved, mixed, p);
        product(out, mixed, inner, rows, y, width, NOTHING, p);
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight; with a residual x + residual is summed first, into `sum`.
extern "C" void hybrid_rms_norm(const float* x, const float* residual, const float* weight,
                                float* sum, float* y, long rows, long width, float eps) {
    for (long r = 0; r < rows; r++) {
        const float* from = x + r * width;
        if (residual) {
            float* to = sum + r * width;
            for (long i = 0; i < width; i++) to[i] = from[i] + residual[r * width + i];
            from = to;
        }
        rms_norm(from, weight, y + r * width, width, eps);
    }
}
