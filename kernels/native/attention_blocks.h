// What the kernels for few and for many query rows of a head share. Scores are logarithms to the
// base 2: a power of two costs half of what e^x costs.
#pragma once
#include "attention.h"

namespace attention {
using namespace simd;

constexpr int KEYS = 64;        // keys that are compared at once
constexpr float NONE = -1e30f;  // the largest score of no keys
constexpr float LOG2_E = 1.44269504f;

INLINE long up(long n, long unit) { return (n + unit - 1) / unit * unit; }

// Of a row's partial results: the largest score, the sum of exponentials, then the weighted values.
INLINE long row_size(const Call& c) { return 2 + c.value_width; }

// The results of query row r of a task (queries times the heads that share a key head) of a key head.
INLINE float* row_of_partials(const Call& c, const Task& task, int head, int r, float* partials) {
    const int group = c.group();
    const long row = task.partial + r / group * c.query_heads + head * group + r % group;
    return partials + row * row_size(c);
}

// The query of that row.
INLINE const float* query_of(const Call& c, const Task& task, int head, int r) {
    const int group = c.group();
    return c.q + (task.first_row + r / group) * c.q_stride + ((long)head * group + r % group) * c.width;
}

// What queries are multiplied by, so that scores are logarithms to the base 2, and their cap.
INLINE float scale_of(const Call& c) { return c.cap > 0 ? c.scale : c.scale * LOG2_E; }
INLINE Floats capped(const Call& c, Floats x) { return tanh(x / c.cap) * (c.cap * LOG2_E); }

// The keys that a query sees: from `low` to before `high`.
struct Seen {
    long low, high;
    Seen(const Call& c, const Task& task, long query) {
        const long at = c.lengths[task.sequence] - c.counts[task.sequence] + task.first_query + query;
        high = c.causal && at + 1 < task.end ? at + 1 : task.end;
        low = c.window < 0 || !c.causal || at < c.window ? 0 : at - c.window;
    }
};

// Rows of a pool that are read soon, `ahead` keys from now, of which `last` is the last.
template <class T>
struct Next {
    const T* rows;
    const int32_t* slots;
    long stride, width, ahead, last;
    void ask(long j) const {
        const T* row = rows + slots[j + ahead < last ? j + ahead : last] * stride;
        for (long d = 0; d < width; d += 64 / (long)sizeof(T)) __builtin_prefetch(row + d);
    }
};

}  // namespace attention
