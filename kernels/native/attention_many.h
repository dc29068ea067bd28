// Attention of more query rows for each key head: lanes are rows, Z vectors of them. Keys and values
// are broadcast from where they lie.
#pragma once
#include "attention_blocks.h"

namespace attention {

constexpr int MANY_AHEAD = 64;  // keys by which the memory is asked for before they are needed

// Rows of a pool as floats: where they lie, or converted into `copies`.
INLINE const float* row_of(const float* pool, long at, long, float*) { return pool + at; }
INLINE const float* row_of(const Bfloat16* pool, long at, long width, float* copy) {
    long d = 0;
    for (; d + LANES <= width; d += LANES) store(copy + d, load(pool + at + d));
    for (; d < width; d++) copy[d] = one(pool + at + d);
    return copy;
}

// s[i, z] = sum over n of rows[n, z] * pool[i][n], for N rows i.
template <int N, int Z>
INLINE void products_of(Floats s[N][Z], const float* rows, const float* const* pool, long count) {
    const float* of[N];
    each<N>([&](auto i) INLINED { of[i] = pool[i]; });
    each<N>([&](auto i) INLINED { each<Z>([&](auto z) INLINED { s[i][z] = Floats{}; }); });
    for (long n = 0; n < count; n++) {
        Floats x[Z];
        each<Z>([&](auto z) INLINED { keep(x[z] = *(Floats*)(rows + n * Z * LANES + z * LANES)); });
        each<N>([&](auto i) INLINED {
            const Floats k = all(of[i][n]);
            each<Z>([&](auto z) INLINED { s[i][z] += x[z] * k; });
        });
    }
}

template <int Z, class T>
void over_many(const Call& c, const Task& task, int head, float* scratch, float* partials) {
    constexpr int WIDE = Z * LANES;
    constexpr int TILE = Z == 4 ? 4 : 8;  // keys, or values of a head, whose sums are in registers
    const int32_t* slots = (const int32_t*)c.slots[task.sequence];
    const T* keys = (const T*)c.keys + (long)head * c.width;
    const T* values = (const T*)c.values + (long)head * c.value_head;
    const long rows = task.queries * c.group();
    float* q = scratch;                                // [width, WIDE]
    float* acc = q + (long)c.width * WIDE;             // [value_width, WIDE]
    float* scores = acc + (long)c.value_width * WIDE;  // [KEYS, WIDE]
    float* copies = scores + (long)KEYS * WIDE;        // [KEYS, width or value_width]
    const long copied = up(c.width > c.value_width ? c.width : c.value_width, LANES);
    const float scale = scale_of(c);
    Floats most[Z], total[Z];
    Ints high[Z], low[Z];
    long first_high = task.end, last_low = 0;
    for (int r = 0; r < WIDE; r++) {
        const long row = r < rows ? r : rows - 1;
        const float* from = query_of(c, task, head, row);
        for (long d = 0; d < c.width; d++) q[d * WIDE + r] = r < rows ? from[d] * scale : 0;
        const Seen seen(c, task, row / c.group());
        high[r / LANES][r % LANES] = (int32_t)seen.high;
        low[r / LANES][r % LANES] = (int32_t)seen.low;
        first_high = seen.high < first_high ? seen.high : first_high;
        last_low = seen.low > last_low ? seen.low : last_low;
    }
    for (int z = 0; z < Z; z++) {
        most[z] = all(NONE);
        total[z] = Floats{};
    }
    memset(acc, 0, c.value_width * WIDE * sizeof(float));
    const float* pool[KEYS];
    for (long block = task.begin; block < task.end; block += KEYS) {
        const long count = task.end - block < KEYS ? task.end - block : KEYS;
        const long last = task.end - 1 - block;
        const Next<T> next_keys = {keys, slots + block, c.key_stride, c.width, MANY_AHEAD, last};
        const Next<T> next_values = {values, slots + block, c.value_stride, c.value_width,
                                     MANY_AHEAD, last};
        for (long j = 0; j < KEYS; j++)
            pool[j] = j < count ? row_of(keys, slots[block + j] * c.key_stride, c.width,
                                         copies + j * copied)
                                : pool[0];
        Floats now[Z];
        for (int z = 0; z < Z; z++) now[z] = most[z];
        const bool hides = count < KEYS || block + count > first_high || block < last_low;
        const bool plain = !hides && !(c.cap > 0);
        for (long j = 0; j < count; j += TILE) {
            for (int i = 0; i < TILE; i++) next_keys.ask(j + i);
            Floats s[TILE][Z];
            products_of<TILE, Z>(s, q, pool + j, c.width);
            each<TILE>([&](auto i) INLINED {
                each<Z>([&](auto z) INLINED {
                    *(Floats*)(scores + (j + i) * WIDE + z * LANES) = s[i][z];
                });
            });
            if (plain)
                each<TILE>([&](auto i) INLINED {
                    each<Z>([&](auto z) INLINED { now[z] = larger(now[z], s[i][z]); });
                });
        }
        if (!plain)
            for (long j = 0; j < count; j++)
                for (int z = 0; z < Z; z++) {
                    Floats x = *(Floats*)(scores + j * WIDE + z * LANES);
                    if (c.cap > 0) x = capped(c, x);
                    const int32_t at = (int32_t)(block + j);
                    const Ints seen = (at < high[z]) & (at >= low[z]);
                    x = seen ? x : all(-__builtin_inff());
                    now[z] = larger(now[z], x);
                    *(Floats*)(scores + j * WIDE + z * LANES) = x;
                }
        Floats kept[Z], added[Z];
        for (int z = 0; z < Z; z++) {
            kept[z] = exp2_down(most[z] - now[z]);
            most[z] = now[z];
            added[z] = Floats{};
        }
        for (long j = 0; j < count; j++) {
            next_values.ask(j);
            for (int z = 0; z < Z; z++) {
                Floats* x = (Floats*)(scores + j * WIDE + z * LANES);
                *x = exp2_down(*x - now[z]);
                added[z] += *x;
            }
        }
        for (int z = 0; z < Z; z++) total[z] = total[z] * kept[z] + added[z];
        for (long j = 0; j < count; j++)
            pool[j] = row_of(values, slots[block + j] * c.value_stride, c.value_width,
                             copies + j * copied);
        long d = 0;
        for (; d + TILE <= c.value_width; d += TILE) {
            Floats s[TILE][Z];
            for (int i = 0; i < TILE; i++)
                for (int z = 0; z < Z; z++)
                    s[i][z] = *(Floats*)(acc + (d + i) * WIDE + z * LANES) * kept[z];
            for (long j = 0; j < count; j++) {
                const float* v = pool[j] + d;
                Floats x[Z];
                for (int z = 0; z < Z; z++) keep(x[z] = *(Floats*)(scores + j * WIDE + z * LANES));
                for (int i = 0; i < TILE; i++)
                    for (int z = 0; z < Z; z++) s[i][z] += x[z] * v[i];
            }
            for (int i = 0; i < TILE; i++)
                for (int z = 0; z < Z; z++)
                    *(Floats*)(acc + (d + i) * WIDE + z * LANES) = s[i][z];
        }
        for (; d < c.value_width; d++)
            for (int z = 0; z < Z; z++) {
                Floats s = *(Floats*)(acc + d * WIDE + z * LANES) * kept[z];
                for (long j = 0; j < count; j++)
                    s += *(Floats*)(scores + j * WIDE + z * LANES) * pool[j][d];
                *(Floats*)(acc + d * WIDE + z * LANES) = s;
            }
    }
    for (int r = 0; r < rows; r++) {
        float* row = row_of_partials(c, task, head, r, partials);
        row[0] = most[r / LANES][r % LANES];
        row[1] = total[r / LANES][r % LANES];
        for (long d = 0; d < c.value_width; d++) row[2 + d] = acc[d * WIDE + r];
    }
}

}  // namespace attention
