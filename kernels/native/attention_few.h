// Attention of up to FEW query rows for each key head: lanes are values of a head. All heads of a
// token are read together, so that its keys, and its values, are one piece of memory.
#pragma once
#include "attention_blocks.h"

namespace attention {

constexpr int FEW = 4;
constexpr int FEW_KEYS = 128;        // keys that are compared at once
constexpr long BYTES_AHEAD = 4096;  // by which a pool is asked for before it is needed

// How the scores of R rows lie in vectors: row r with key i of N is lane r * N + i.
template <int R>
struct Lanes {
    static constexpr int N = R == 1 ? LANES : R == 2 ? LANES / 2 : LANES / 4;
    // Where the score of row r and key j is in the scores of a block.
    static long at(int r, long j) { return j / N * LANES + r * N + j % N; }
};

// The products of R rows q [R, padded] with N keys.
template <int R, class T>
INLINE Floats products_of(const float* q, long padded, const T* const* keys, long from, long width) {
    constexpr int N = Lanes<R>::N;
    Floats s[LANES];
    each<LANES>([&](auto i) INLINED { s[i] = Floats{}; });
    const auto add = [&](long d, long left) INLINED {
        Floats rows[R];
        each<R>([&](auto r) INLINED { rows[r] = *(Floats*)(q + r * padded + d); });
        each<N>([&](auto i) INLINED {
            const Floats k = left ? load(keys[i] + from + d, left) : load(keys[i] + from + d);
            each<R>([&](auto r) INLINED { s[r * N + i] += k * rows[r]; });
        });
    };
    long d = 0;
    for (; d + LANES <= width; d += LANES) add(d, 0);
    if (d < width) add(d, width - d);
    return sums(s);
}

// acc[r, d...] += sum over keys of the scores of r and the key * values[key, d...], for T vectors
// from d on; if T is 0, for the `left` values that there are from d on, at most a vector. Even and
// odd keys are summed apart.
template <int R, int T, bool ASK, class V>
INLINE void weigh(const V* values, const Next<V>& next, long count, long d, const float* scores,
                  float* acc, long padded, long left = 0) {
    constexpr int N = T ? T : 1;
    constexpr int TILE = 4;  // keys of a turn; with eight, reading the pool takes 1.4 times as long
    Floats sums_[2][R * N];
    each<R * N>([&](auto i) INLINED {
        sums_[0][i] = *(Floats*)(acc + i / N * padded + d + i % N * LANES);
        sums_[1][i] = Floats{};
    });
    const auto add = [&](long j, const float* weights, Floats* s) INLINED {
        if (ASK) next.ask(j);
        const V* v = values + next.slots[j] * next.stride + d;
        Floats w[R];
        each<R>([&](auto r) INLINED { w[r] = all(weights[r * Lanes<R>::N]); });
        each<N>([&](auto t) INLINED {
            const Floats x = T ? load(v + t * LANES) : load(v, left);
            each<R>([&](auto r) INLINED { s[r * N + t] += x * w[r]; });
        });
    };
    long j = 0;
    for (; j + TILE <= count; j += TILE)
        each<TILE>([&](auto i) INLINED {
            add(j + i, scores + Lanes<R>::at(0, j) + i, sums_[i % 2]);
        });
    for (; j < count; j++) add(j, scores + Lanes<R>::at(0, j), sums_[0]);
    each<R * N>([&](auto i) INLINED {
        *(Floats*)(acc + i / N * padded + d + i % N * LANES) = sums_[0][i] + sums_[1][i];
    });
}

// All values of one head; asks for the rows of all heads if ASK.
template <int R, bool ASK, class V>
INLINE void weigh_all(const V* values, const Next<V>& next, long count, long width,
                      const float* scores, float* acc, long padded) {
    if (ASK && width < 2 * LANES)
        for (long j = 0; j < count; j++) next.ask(j);
    long d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES)
        if (ASK && d == 0) weigh<R, 2, true>(values, next, count, d, scores, acc, padded);
        else weigh<R, 2, false>(values, next, count, d, scores, acc, padded);
    for (; d < width; d += LANES)
        weigh<R, 0, false>(values, next, count, d, scores, acc, padded, width - d);
}

// The running softmax of a head's R rows, in the lanes of their scores.
template <int R>
struct Running {
    static constexpr int N = Lanes<R>::N;
    Floats most, total;

    void reset() {
        total = Floats{};
        for (int i = 0; i < LANES; i++) most[i] = i < R * N ? NONE : 0;
    }
    // Scores of a block become exponentials. The weighted values so far, acc [R, padded], are scaled
    // where a score is larger than all before it.
    void take(Floats* scores, int count, float* acc, long padded) {
        Floats top = scores[0];
        for (int i = 1; i < count; i++) top = larger(top, scores[i]);
        if (any_larger(top, most)) rescale(top, acc, padded);
        for (int i = 0; i < count; i++) {
            scores[i] = exp2_down(scores[i] - most);
            total += scores[i];
        }
    }
    void rescale(const Floats& top, float* acc, long padded) {
        Floats now = most;
        for (int i = 0; i < R * N; i++)
            for (int k = i / N * N; k < (i / N + 1) * N; k++) now[i] = top[k] > now[i] ? top[k] : now[i];
        const Floats kept = exp2_down(most - now);
        most = now;
        total *= kept;
        for (int r = 0; r < R; r++)
            for (long d = 0; d < padded; d += LANES) *(Floats*)(acc + r * padded + d) *= kept[r * N];
    }
    float sum_of(int r) const {
        float found = 0;
        for (int i = r * N; i < (r + 1) * N; i++) found += total[i];
        return found;
    }
};

// Floats of scratch for some key heads.
INLINE long few_scratch(const Call& c, long heads) {
    return heads * (FEW * (up(c.width, LANES) + up(c.value_width, LANES) + FEW_KEYS) + 2 * LANES);
}

template <int R, class T>
void over_few(const Call& c, const Task& task, float* scratch, float* partials) {
    constexpr int N = Lanes<R>::N;
    constexpr long VECTORS = FEW_KEYS / N;  // of a head's scores of a block
    const int32_t* slots = (const int32_t*)c.slots[task.sequence];
    const T* keys = (const T*)c.keys + (long)task.head_begin * c.width;
    const T* values = (const T*)c.values + (long)task.head_begin * c.value_head;
    const int heads = task.head_end - task.head_begin, rows = heads * R;
    const long padded = up(c.width, LANES), value_padded = up(c.value_width, LANES);
    Running<R>* running = (Running<R>*)scratch;             // [heads]
    Floats* scores = (Floats*)(running + heads);            // [heads, VECTORS]
    float* q = (float*)(scores + heads * VECTORS);          // [rows, padded]
    float* acc = q + rows * padded;                         // [rows, value_padded]
    const float scale = scale_of(c);
    Ints low, high, number;
    long first_high = task.end, last_low = 0;
    for (int i = 0; i < LANES; i++) {
        const Seen seen(c, task, (i < R * N ? i / N : R - 1) / c.group());
        low[i] = (int32_t)seen.low;
        high[i] = (int32_t)seen.high;
        number[i] = i % N;
        first_high = seen.high < first_high ? seen.high : first_high;
        last_low = seen.low > last_low ? seen.low : last_low;
    }
    for (int n = 0; n < rows; n++) {
        const float* from = query_of(c, task, task.head_begin + n / R, n % R);
        for (long d = 0; d < padded; d++) q[n * padded + d] = d < c.width ? from[d] * scale : 0;
    }
    for (int h = 0; h < heads; h++) running[h].reset();
    memset(acc, 0, rows * value_padded * sizeof(float));
    const long row_bytes = heads * c.width * (long)sizeof(T);
    const long ahead = BYTES_AHEAD / row_bytes > 2 ? BYTES_AHEAD / row_bytes : 2;
    for (long block = task.begin; block < task.end; block += FEW_KEYS) {
        const long count = task.end - block < FEW_KEYS ? task.end - block : FEW_KEYS;
        const long last = c.lengths[task.sequence] - 1 - block;  // behind this piece, too
        const Next<T> next_keys = {keys, slots + block, c.key_stride, (long)heads * c.width, ahead,
                                   last};
        const Next<T> next_values = {values, slots + block, c.value_stride,
                                     (long)heads * c.value_head, ahead, last};
        const bool hides = count < FEW_KEYS || block + count > first_high || block < last_low;
        for (long v = 0; v < VECTORS; v++) {
            const T* k[N];
            for (long i = 0; i < N; i++) {
                const long at = v * N + i < count ? v * N + i : count - 1;
                k[i] = keys + slots[block + at] * c.key_stride;
                next_keys.ask(v * N + i);
            }
            for (int h = 0; h < heads; h++) {
                Floats found =
                    products_of<R>(q + h * R * padded, padded, k, h * (long)c.width, c.width);
                if (c.cap > 0) found = capped(c, found);
                if (hides) {
                    const Ints at = number + (int32_t)(block + v * N);
                    const Ints seen = (at < high) & (at >= low);
                    found = seen ? found : all(-__builtin_inff());
                }
                scores[h * VECTORS + v] = found;
            }
        }
        for (int h = 0; h < heads; h++)
            running[h].take(scores + h * VECTORS, VECTORS, acc + h * R * value_padded, value_padded);
        for (int h = 0; h < heads; h++) {
            const T* of_head = values + h * c.value_head;
            const float* s = (const float*)(scores + h * VECTORS);
            float* to = acc + h * R * value_padded;
            if (h == 0)
                weigh_all<R, true>(of_head, next_values, count, c.value_width, s, to, value_padded);
            else
                weigh_all<R, false>(of_head, next_values, count, c.value_width, s, to, value_padded);
        }
    }
    for (int n = 0; n < rows; n++) {
        float* row = row_of_partials(c, task, task.head_begin + n / R, n % R, partials);
        row[0] = running[n / R].most[n % R * N];
        row[1] = running[n / R].sum_of(n % R);
        memcpy(row + 2, acc + n * value_padded, c.value_width * sizeof(float));
    }
}

}  // namespace attention
