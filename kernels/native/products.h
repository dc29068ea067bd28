// Products of a few rows with a weight as it is stored: y[b, n] = sum over k of x[b, k] w[n, k].
#pragma once
#include "scratch.h"
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

// GATED_SILU: the first half of a weight's outputs are gates of the second, y = silu(g) * u.
enum Activation { NOTHING = 0, SQUARED_RELU = 1, GATED_SILU = 2 };

struct Weight {
    const void* values;  // [outputs, inputs] floats, or bfloat16s
    const float* bias;   // [outputs] or null
    long outputs, inputs;
    int bfloat16;
    float gate_scale = 1;  // of the gates, before their activation
};

// Rows of x, and where their results go.
struct Rows {
    const float* x;
    long x_stride, count;
    float* y;
    long y_stride;
    Rows from(long b) const {
        return {x + b * x_stride, x_stride, count - b, y + b * y_stride, y_stride};
    }
};

constexpr int TILE = 4;   // rows of the weight that are computed at once
constexpr int MANY = 5;   // rows of x from which on lanes are rows instead of inputs
constexpr int WIDE = 8;   // rows of the weight that are computed at once then
constexpr int BLOCK = 256;  // inputs that are converted at once then
constexpr int AHEAD = 1 << 14;  // bytes of a weight that are asked for before they are needed

INLINE Floats activated(const Weight& w, Floats x, Floats gated, int activation) {
    if (activation == SQUARED_RELU) return larger(x, Floats{}) * larger(x, Floats{});
    if (activation == GATED_SILU) return simd::silu(x * w.gate_scale) * gated;
    return x;
}

// The sums of N rows of a weight with B rows of x, that of row i with b in lane b * N + i. How one
// is summed up depends on neither. Asks for what of the weight is needed next: its next N rows, or
// the bytes behind a single one.
template <int N, int B, class T>
INLINE Floats sums_of(const T* rows, long inputs, const float* x, long x_stride) {
    Floats s[LANES];
    for (int i = 0; i < N * B; i++) s[i] = Floats{};
    long k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        Floats a[B];
        for (int b = 0; b < B; b++) a[b] = load(x + b * x_stride + k);
        for (int i = 0; i < N; i++) {
            const long next = N == 1 ? AHEAD / (long)sizeof(T) : N * inputs;
            __builtin_prefetch(rows + i * inputs + k + next);
            const Floats v = load(rows + i * inputs + k);
            for (int b = 0; b < B; b++) s[b * N + i] += v * a[b];
        }
    }
    if (k < inputs)
        for (int i = 0; i < N; i++)
            for (int b = 0; b < B; b++)
                s[b * N + i] += load(rows + i * inputs + k, inputs - k) *
                                load(x + b * x_stride + k, inputs - k);
    if (N * B == LANES) return sums(s);
    Floats found{};
    for (int i = 0; i < N * B; i++) found[i] = sum(s[i]);
    return found;
}

// Outputs n to n + N of B rows.
template <int N, int B, class T>
INLINE void tile(const Weight& w, long n, const Rows& r, int activation) {
    const T* values = (const T*)w.values;
    const long half = activation == GATED_SILU ? w.outputs / 2 : 0;
    Floats found = sums_of<N, B>(values + n * w.inputs, w.inputs, r.x, r.x_stride);
    Floats gated{};
    if (half)
        gated = sums_of<N, B>(values + (half + n) * w.inputs, w.inputs, r.x, r.x_stride);
    if (w.bias)
        for (int i = 0; i < N * B; i++) {
            found[i] += w.bias[n + i % N];
            if (half) gated[i] += w.bias[half + n + i % N];
        }
    float results[LANES];
    store(results, activated(w, found, gated, activation));
    for (int b = 0; b < B; b++) memcpy(r.y + b * r.y_stride + n, results + b * N, N * sizeof(float));
}

template <int N, class T>
INLINE void few(const Weight& w, long n, const Rows& r, int activation) {
    if (r.count >= 4) tile<N, 4, T>(w, n, r, activation);
    else if (r.count == 3) tile<N, 3, T>(w, n, r, activation);
    else if (r.count == 2) tile<N, 2, T>(w, n, r, activation);
    else tile<N, 1, T>(w, n, r, activation);
}

// Rows of a weight as floats: where they lie, or converted into `copies`, whose stride is BLOCK.
INLINE const float* floats_of(const float* rows, long, int, long, float*) { return rows; }
INLINE const float* floats_of(const Bfloat16* rows, long inputs, int n, long count, float* copies) {
    for (int i = 0; i < n; i++)
        for (long k = 0; k < count; k += LANES)
            store(copies + i * BLOCK + k, load(rows + i * inputs + k, count - k));
    return copies;
}

// Adds to s[i] the sums of row i of a weight with up to LANES rows of x, which are the lanes of
// `lanes` [inputs]. Asks for the weight's next N rows.
template <int N, class T>
INLINE void sums_of_many(const T* rows, long inputs, const Floats* lanes, float* copies, Floats* s) {
    Floats even[N], odd[N];
    for (int i = 0; i < N; i++) even[i] = odd[i] = Floats{};
    for (long block = 0; block < inputs; block += BLOCK) {
        const long count = inputs - block < BLOCK ? inputs - block : BLOCK;
        const float* w = floats_of(rows + block, inputs, N, count, copies);
        const long stride = sizeof(T) == sizeof(float) ? inputs : BLOCK;
        const Floats* x = lanes + block;
        long k = 0;
        for (; k + 2 <= count; k += 2) {
            if (k % LANES == 0)
                for (int i = 0; i < N; i++)
                    __builtin_prefetch(rows + block + (N + i) * inputs + k);
            for (int i = 0; i < N; i++) even[i] += x[k] * w[i * stride + k];
            for (int i = 0; i < N; i++) odd[i] += x[k + 1] * w[i * stride + k + 1];
        }
        if (k < count)
            for (int i = 0; i < N; i++) even[i] += x[k] * w[i * stride + k];
    }
    for (int i = 0; i < N; i++) s[i] = even[i] + odd[i];
}

template <int N, class T>
INLINE void many(const Weight& w, long n, const Rows& r, const Floats* lanes, float* copies,
                 int activation) {
    const T* values = (const T*)w.values;
    const long half = activation == GATED_SILU ? w.outputs / 2 : 0;
    const long rows = r.count < LANES ? r.count : LANES;
    Floats found[N], gated[N];
    for (int i = 0; i < N; i++) gated[i] = Floats{};
    sums_of_many<N>(values + n * w.inputs, w.inputs, lanes, copies, found);
    if (half) sums_of_many<N>(values + (half + n) * w.inputs, w.inputs, lanes, copies, gated);
    for (int i = 0; i < N; i++) {
        if (w.bias) {
            found[i] += w.bias[n + i];
            if (half) gated[i] += w.bias[half + n + i];
        }
        found[i] = activated(w, found[i], gated[i], activation);
    }
    for (long b = 0; b < rows; b++)
        for (int i = 0; i < N; i++) r.y[b * r.y_stride + n + i] = found[i][b];
}

// Rows b to b + LANES of x as lanes; zeros where there are none.
static inline void as_lanes(const Rows& r, long inputs, Floats* lanes) {
    const long rows = r.count < LANES ? r.count : LANES;
    for (long k = 0; k < inputs; k++) {
        Floats x{};
        for (long b = 0; b < rows; b++) x[b] = r.x[b * r.x_stride + k];
        lanes[k] = x;
    }
}

template <class T>
static inline void product_of(const Weight& w, Rows r, int activation, Part part) {
    const long outputs = activation == GATED_SILU ? w.outputs / 2 : w.outputs;
    const long begin = part.begin(outputs, WIDE), end = part.end(outputs, WIDE);
    static thread_local Scratch scratch;
    for (; r.count >= MANY; r = r.from(r.count < LANES ? r.count : LANES)) {
        float* copies = scratch.of(w.inputs * LANES + WIDE * BLOCK);
        Floats* lanes = (Floats*)(copies + WIDE * BLOCK);
        as_lanes(r, w.inputs, lanes);
        long n = begin;
        for (; n + WIDE <= end; n += WIDE) many<WIDE, T>(w, n, r, lanes, copies, activation);
        for (; n < end; n++) many<1, T>(w, n, r, lanes, copies, activation);
    }
    if (r.count <= 0) return;
    long n = begin;
    // One row of x takes a weight as one stream.
    for (; r.count > 1 && n + TILE <= end; n += TILE) few<TILE, T>(w, n, r, activation);
    for (; n < end; n++) few<1, T>(w, n, r, activation);
}

// This part of the outputs, for all rows of x.
static inline void product(const Weight& w, const float* x, long x_stride, long rows, float* y,
                           long y_stride, int activation, Part part) {
    const Rows r = {x, x_stride, rows, y, y_stride};
    if (w.bfloat16)
        product_of<Bfloat16>(w, r, activation, part);
    else
        product_of<float>(w, r, activation, part);
}

}  // namespace products
