// One decode step of layers that are more than a product (steps.py says what each computes), with
// few rows: all of a layer in one parallel region.
#include <cmath>
#include <omp.h>

#include "products.h"

using namespace products;

namespace {

// Values of all weights and states below which waking the other threads costs more than they save.
constexpr long ALONE = 1 << 15;

INLINE Part part() { return {omp_get_thread_num(), omp_get_num_threads()}; }

struct Mixer {
    long conv_width, inner, heads, head_width, groups, size, taps, norm_group;
    const float *conv_weight, *conv_bias, *decay, *skip, *step_bias, *norm_weight;
    float eps;
    int normed;
};

// Convolves channels [begin, end) of one row and shifts their windows [channels, taps - 1].
void convolve(const Mixer& m, const float* x, float* windows, float* y, long begin, long end) {
    const long past = m.taps - 1;
    for (long c = begin; c < end; c++) {
        float* window = windows + c * past;
        const float* w = m.conv_weight + c * m.taps;
        float s = m.conv_bias ? m.conv_bias[c] : 0;
        for (long k = 0; k < past; k++) s += window[k] * w[k];
        y[c] = s + x[c] * w[past];
        for (long k = 0; k + 1 < past; k++) window[k] = window[k + 1];
        if (past) window[past - 1] = x[c];
    }
    for (long c = begin; c < end; c += LANES) store(y + c, silu(load(y + c, end - c)), end - c);
}

// Advances one head's state [head_width, size] by a token and reads it.
void advance(const Mixer& m, long head, const float* convolved, float raw_step, float* state,
             float* y) {
    const float raw = raw_step + m.step_bias[head];
    const float step = raw > 20 ? raw : std::log1p(std::exp(raw));
    const float decay = std::exp(step * m.decay[head]);
    const long group = head / (m.heads / m.groups);
    const float* x = convolved + head * m.head_width;
    const float* b = convolved + m.inner + group * m.size;
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
void gate(const Mixer& m, long begin, const float* gates, float* y) {
    const long end = begin + m.norm_group;
    Floats squares{};
    for (long i = begin; i < end; i += LANES) {
        const Floats x = load(y + i, end - i) * silu(load(gates + i, end - i));
        store(y + i, x, end - i);
        squares += x * x;
    }
    if (!m.normed) return;
    const float factor = 1 / std::sqrt(sum(squares) / m.norm_group + m.eps);
    for (long i = begin; i < end; i += LANES)
        store(y + i, load(y + i, end - i) * factor * load(m.norm_weight + i, end - i), end - i);
}

}  // namespace

extern "C" void hybrid_product(const float* x, long rows, const float* weight, const float* bias,
                               long outputs, long inputs, float* y) {
    const Weight w = {weight, bias, outputs, inputs};
#pragma omp parallel if (outputs * inputs > ALONE)
    product(w, x, inputs, rows, y, outputs, NOTHING, part());
}

extern "C" void hybrid_mlp(const float* x, long rows, const float* up, const float* up_bias,
                           const float* down, const float* down_bias, long width, long inner,
                           float* hidden, float* y) {
    const Weight first = {up, up_bias, inner, width}, second = {down, down_bias, width, inner};
#pragma omp parallel if (width * inner > ALONE)
    {
        product(first, x, width, rows, hidden, inner, SQUARED_RELU, part());
#pragma omp barrier
        product(second, hidden, inner, rows, y, width, NOTHING, part());
    }
}

// Without the weights of a projection, the caller has computed it, or will.
extern "C" void hybrid_mamba2(const float* x, long rows, long width, const float* in_weight,
                              const float* in_bias, const float* out_weight, const float* out_bias,
                              const float* scale, const float* conv_weight, const float* conv_bias,
                              const float* decay, const float* skip, const float* step_bias,
                              const float* norm_weight, const int64_t* slots, float* windows,
                              long windows_stride, float* states, long states_stride, long heads,
                              long head_width, long groups, long size, long taps, long norm_group,
                              float eps, float* projected, float* convolved, float* mixed,
                              float* y) {
    const long inner = heads * head_width, conv_width = inner + 2 * groups * size;
    const long projections = inner + conv_width + heads;
    const Mixer m = {conv_width, inner, heads, head_width, groups, size, taps, norm_group,
                     conv_weight, conv_bias, decay, skip, step_bias, norm_weight, eps,
                     norm_weight != nullptr};
    const Weight in = {in_weight, in_bias, projections, width};
    const Weight out = {out_weight, out_bias, width, inner};
    const long values =
        (in_weight ? projections * width : 0) + rows * (inner * size + conv_width);
#pragma omp parallel if (values > ALONE)
    {
        const Part p = part();
        if (in_weight) {
            product(in, x, width, rows, projected, projections, NOTHING, p);
#pragma omp barrier
        }
        if (scale) {
            for (long r = 0; r < rows; r++)
                for (long i = p.begin(projections, LANES); i < p.end(projections, LANES); i++)
                    projected[r * projections + i] *= scale[i];
#pragma omp barrier
        }
        for (long r = 0; r < rows; r++) {
            if (slots[r] < 0) continue;
            convolve(m, projected + r * projections + inner, windows + slots[r] * windows_stride,
                     convolved + r * conv_width, p.begin(conv_width, LANES),
                     p.end(conv_width, LANES));
        }
#pragma omp barrier
        for (long i = p.begin(rows * heads, 1); i < p.end(rows * heads, 1); i++) {
            const long r = i / heads, head = i % heads;
            float* to = mixed + r * inner + head * head_width;
            if (slots[r] < 0) {
                for (long j = 0; j < head_width; j++) to[j] = 0;
                continue;
            }
            const float* row = projected + r * projections;
            advance(m, head, convolved + r * conv_width, row[inner + conv_width + head],
                    states + slots[r] * states_stride + head * head_width * size, to);
        }
#pragma omp barrier
        const long norms = inner / norm_group;
        for (long i = p.begin(rows * norms, 1); i < p.end(rows * norms, 1); i++) {
            const long r = i / norms;
            gate(m, i % norms * norm_group, projected + r * projections, mixed + r * inner);
        }
        if (out_weight) {
#pragma omp barrier
            product(out, mixed, inner, rows, y, width, NOTHING, p);
        }
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight; with a residual x + residual is summed first, into `sum`.
extern "C" void hybrid_rms_norm(const float* x, const float* residual, const float* weight,
                                float* sum_, float* y, long rows, long width, float eps) {
    for (long r = 0; r < rows; r++) {
        const float* from = x + r * width;
        if (residual) {
            float* to = sum_ + r * width;
            for (long i = 0; i < width; i++) to[i] = from[i] + residual[r * width + i];
            from = to;
        }
        Floats squares{};
        for (long i = 0; i < width; i += LANES) {
            const Floats v = load(from + i, width - i);
            squares += v * v;
        }
        const float factor = 1 / std::sqrt(sum(squares) / width + eps);
        for (long i = 0; i < width; i++) y[r * width + i] = from[i] * factor * weight[i];
    }
}
