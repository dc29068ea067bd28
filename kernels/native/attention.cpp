// Softmax attention of new tokens over keys and values where they lie in a pool (attention.py says
// what it computes). A sequence's queries are taken in blocks, and where there are few of them its
// keys in pieces: each piece yields partial results, which are merged in the order of the keys. How
// keys are cut depends on the sequence alone, so a result depends neither on the rest of the batch
// nor on the number of threads.
#include "attention.h"

#include "scratch.h"

using namespace simd;

namespace attention {
namespace {

constexpr int ROWS = 64;     // query rows of a block: queries times the heads that share a key head
constexpr int KEYS = 64;     // keys that are compared at once
constexpr int PIECE = 512;   // keys of a piece
constexpr int AHEAD = 64;    // keys by which the memory is asked for before they are needed
constexpr int FEW = 4;       // rows up to which lanes are values of a head instead of rows
constexpr float NONE = -1e30f;  // the largest score of no keys

long up(long n, long unit) { return (n + unit - 1) / unit * unit; }

// Of a row's partial results: the largest score, the sum of exponentials, then the weighted values.
long row_size(const Call& c) { return 2 + c.value_width; }

template <class T>
INLINE void fetch(const T* row, long width) {
    for (long d = 0; d < width; d += 64 / (long)sizeof(T)) __builtin_prefetch(row + d);
}

INLINE Ints numbers() {
    Ints found;
    for (int i = 0; i < LANES; i++) found[i] = i;
    return found;
}

// acc[r, d...] += sum over keys of scores[r, key] * values[key, d...], for T vectors from d on, or
// for the `left` values of the last one if T is 0.
template <int R, int T, class V>
INLINE void weigh(const V* values, const int32_t* slots, long count, long stride, long d,
                  const float* scores, float* acc, long padded, long left = 0) {
    constexpr int N = T ? T : 1;
    Floats s[R][N];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) s[r][t] = *(Floats*)(acc + r * padded + d + t * LANES);
    for (long j = 0; j < count; j++) {
        const V* v = values + slots[j] * stride + d;
        for (int t = 0; t < N; t++) {
            const Floats x = T ? load(v + t * LANES) : load(v, left);
            for (int r = 0; r < R; r++) s[r][t] += x * scores[r * KEYS + j];
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) *(Floats*)(acc + r * padded + d + t * LANES) = s[r][t];
}

// Lanes are values of a head; R rows.
template <int R, class T>
void over_few(const Call& c, const Task& task, int head, float* scratch, float* partials) {
    const int32_t* slots = (const int32_t*)c.slots[task.sequence];
    const T* keys = (const T*)c.keys + (long)head * c.width;
    const T* values = (const T*)c.values + (long)head * c.value_head;
    const long before = c.lengths[task.sequence] - c.counts[task.sequence];
    const int group = c.group();
    const long padded = up(c.width, LANES), value_padded = up(c.value_width, LANES);
    float* q = scratch;
    float* acc = q + R * padded;
    float* scores = acc + R * value_padded;  // [R, KEYS]
    float largest_[R], total[R];
    long low[R], high[R], first_high = task.end, last_low = 0;
    for (int r = 0; r < R; r++) {
        const float* from = c.q + (task.first_row + r / group) * c.q_stride +
                            ((long)head * group + r % group) * c.width;
        for (long d = 0; d < padded; d++) q[r * padded + d] = d < c.width ? from[d] * c.scale : 0;
        for (long d = 0; d < value_padded; d++) acc[r * value_padded + d] = 0;
        largest_[r] = NONE;
        total[r] = 0;
        long at = before + task.first_query + r / group;
        high[r] = c.causal && at + 1 < task.end ? at + 1 : task.end;
        low[r] = c.window < 0 || !c.causal || at < c.window ? 0 : at - c.window;
        first_high = high[r] < first_high ? high[r] : first_high;
        last_low = low[r] > last_low ? low[r] : last_low;
    }
    for (long block = task.begin; block < task.end; block += KEYS) {
        const long count = task.end - block < KEYS ? task.end - block : KEYS;
        const bool hides = count < KEYS || block + count > first_high || block < last_low;
        for (long j = 0; j < KEYS; j += LANES) {
            const T* k[LANES];
            for (long i = 0; i < LANES; i++) {
                const long at = block + (j + i < count ? j + i : count - 1);
                k[i] = keys + slots[at] * c.key_stride;
                if (at + AHEAD < task.end) {
                    fetch(keys + slots[at + AHEAD] * c.key_stride, c.width);
                    fetch(values + slots[at + AHEAD] * c.value_stride, c.value_width);
                }
            }
            for (int r = 0; r < R; r++) {
                Floats s[LANES];
                for (int i = 0; i < LANES; i++) s[i] = Floats{};
                long d = 0;
                for (; d + LANES <= c.width; d += LANES) {
                    const Floats x = *(Floats*)(q + r * padded + d);
                    for (int i = 0; i < LANES; i++) s[i] += x * load(k[i] + d);
                }
                if (d < c.width) {
                    const Floats x = *(Floats*)(q + r * padded + d);
                    for (int i = 0; i < LANES; i++) s[i] += x * load(k[i] + d, c.width - d);
                }
                Floats found = sums(s);
                if (c.cap > 0) found = tanh(found / c.cap) * c.cap;
                if (hides) {
                    const Ints at = numbers() + (int32_t)(block + j);
                    const Ints seen = (at < (int32_t)high[r]) & (at >= (int32_t)low[r]);
                    found = seen ? found : all(-__builtin_inff());
                }
                *(Floats*)(scores + r * KEYS + j) = found;
            }
        }
        for (int r = 0; r < R; r++) {
            float* s = scores + r * KEYS;
            Floats most = all(-__builtin_inff());
            for (int j = 0; j < KEYS; j += LANES) most = larger(most, *(Floats*)(s + j));
            float now = largest(most);
            now = now > largest_[r] ? now : largest_[r];
            Floats added{};
            for (int j = 0; j < KEYS; j += LANES) {
                Floats x = exp(*(Floats*)(s + j) - now);
                *(Floats*)(s + j) = x;
                added += x;
            }
            float kept = exp(all(largest_[r] - now))[0];
            total[r] = total[r] * kept + sum(added);
            largest_[r] = now;
            for (long d = 0; d < value_padded; d += LANES) *(Floats*)(acc + r * value_padded + d) *= kept;
        }
        long d = 0;
        for (; d + 4 * LANES <= c.value_width; d += 4 * LANES)
            weigh<R, 4>(values, slots + block, count, c.value_stride, d, scores, acc, value_padded);
        if (d + 2 * LANES <= c.value_width) {
            weigh<R, 2>(values, slots + block, count, c.value_stride, d, scores, acc, value_padded);
            d += 2 * LANES;
        }
        if (d + LANES <= c.value_width) {
            weigh<R, 1>(values, slots + block, count, c.value_stride, d, scores, acc, value_padded);
            d += LANES;
        }
        if (d < c.value_width)
            weigh<R, 0>(values, slots + block, count, c.value_stride, d, scores, acc, value_padded,
                        c.value_width - d);
    }
    for (int r = 0; r < R; r++) {
        float* row = partials + (task.partial + r / group * c.query_heads + head * group + r % group) * row_size(c);
        row[0] = largest_[r];
        row[1] = total[r];
        memcpy(row + 2, acc + r * value_padded, c.value_width * sizeof(float));
    }
}

// Rows of a pool as floats: where they lie, or converted into `copies`.
INLINE const float* row_of(const float* pool, long at, long, float*) { return pool + at; }
INLINE const float* row_of(const Bfloat16* pool, long at, long width, float* copy) {
    long d = 0;
    for (; d + LANES <= width; d += LANES) store(copy + d, load(pool + at + d));
    for (; d < width; d++) copy[d] = one(pool + at + d);
    return copy;
}

// Lanes are rows: Z vectors of them. Keys and values are broadcast from where they lie.
template <int Z, class T>
void over_many(const Call& c, const Task& task, int head, float* scratch, float* partials) {
    constexpr int WIDE = Z * LANES;
    const int32_t* slots = (const int32_t*)c.slots[task.sequence];
    const T* keys = (const T*)c.keys + (long)head * c.width;
    const T* values = (const T*)c.values + (long)head * c.value_head;
    const long before = c.lengths[task.sequence] - c.counts[task.sequence];
    const int group = c.group();
    const long rows = task.queries * group;
    float* q = scratch;                                 // [width, WIDE]
    float* acc = q + (long)c.width * WIDE;              // [value_width, WIDE]
    float* scores = acc + (long)c.value_width * WIDE;   // [KEYS, WIDE]
    float* copies = scores + (long)KEYS * WIDE;         // [KEYS, width or value_width]
    const long copied = up(c.width > c.value_width ? c.width : c.value_width, LANES);
    Floats most[Z], total[Z];
    Ints high[Z], low[Z];
    long first_high = task.end, last_low = 0;
    for (int r = 0; r < WIDE; r++) {
        const long query = (r < rows ? r : rows - 1) / group;
        const float* from = c.q + (task.first_row + query) * c.q_stride +
                            ((long)head * group + r % group) * c.width;
        for (long d = 0; d < c.width; d++) q[d * WIDE + r] = r < rows ? from[d] * c.scale : 0;
        const long at = before + task.first_query + query;
        const long top = c.causal ? at + 1 : task.end;
        const long bottom = c.window < 0 || !c.causal || at < c.window ? 0 : at - c.window;
        high[r / LANES][r % LANES] = (int32_t)top;
        low[r / LANES][r % LANES] = (int32_t)bottom;
        first_high = top < first_high ? top : first_high;
        last_low = bottom > last_low ? bottom : last_low;
    }
    for (int z = 0; z < Z; z++) {
        most[z] = all(NONE);
        total[z] = Floats{};
    }
    memset(acc, 0, c.value_width * WIDE * sizeof(float));
    const float* rows_of_keys[KEYS];
    for (long block = task.begin; block < task.end; block += KEYS) {
        const long count = task.end - block < KEYS ? task.end - block : KEYS;
        for (long j = 0; j < KEYS && block + j + AHEAD < task.end; j++) {
            fetch(keys + slots[block + j + AHEAD] * c.key_stride, c.width);
            fetch(values + slots[block + j + AHEAD] * c.value_stride, c.value_width);
        }
        for (long j = 0; j < KEYS; j++)
            rows_of_keys[j] = j < count ? row_of(keys, slots[block + j] * c.key_stride, c.width,
                                                 copies + j * copied)
                                        : rows_of_keys[0];
        Floats now[Z];
        for (int z = 0; z < Z; z++) now[z] = most[z];
        const bool hides = block + count > first_high || block < last_low;
        constexpr int TILE = 4;
        for (long j = 0; j < count; j += TILE) {
            Floats s[TILE][Z];
            for (int i = 0; i < TILE; i++)
                for (int z = 0; z < Z; z++) s[i][z] = Floats{};
            const float* k[TILE];
            for (int i = 0; i < TILE; i++) k[i] = rows_of_keys[j + i];
            for (long d = 0; d < c.width; d++) {
                Floats x[Z];
                for (int z = 0; z < Z; z++) keep(x[z] = *(Floats*)(q + d * WIDE + z * LANES));
                for (int i = 0; i < TILE; i++)
                    for (int z = 0; z < Z; z++) s[i][z] += x[z] * k[i][d];
            }
            for (int i = 0; i < TILE; i++)
                for (int z = 0; z < Z; z++) {
                    Floats x = s[i][z];
                    if (c.cap > 0) x = tanh(x / c.cap) * c.cap;
                    if (hides || j + i >= count) {
                        const int32_t at = (int32_t)(block + j + i);
                        Ints seen = (at < high[z]) & (at >= low[z]);
                        x = seen & (j + i < count ? -1 : 0) ? x : all(-__builtin_inff());
                    }
                    now[z] = larger(now[z], x);
                    *(Floats*)(scores + (j + i) * WIDE + z * LANES) = x;
                }
        }
        Floats kept[Z], added[Z];
        for (int z = 0; z < Z; z++) {
            kept[z] = exp(most[z] - now[z]);
            most[z] = now[z];
            added[z] = Floats{};
        }
        for (long j = 0; j < count; j++)
            for (int z = 0; z < Z; z++) {
                Floats* x = (Floats*)(scores + j * WIDE + z * LANES);
                *x = exp(*x - now[z]);
                added[z] += *x;
            }
        for (int z = 0; z < Z; z++) total[z] = total[z] * kept[z] + added[z];
        for (long j = 0; j < count; j++)
            rows_of_keys[j] =
                row_of(values, slots[block + j] * c.value_stride, c.value_width, copies + j * copied);
        long d = 0;
        for (; d + TILE <= c.value_width; d += TILE) {
            Floats s[TILE][Z];
            for (int i = 0; i < TILE; i++)
                for (int z = 0; z < Z; z++)
                    s[i][z] = *(Floats*)(acc + (d + i) * WIDE + z * LANES) * kept[z];
            for (long j = 0; j < count; j++) {
                const float* v = rows_of_keys[j] + d;
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
                    s += *(Floats*)(scores + j * WIDE + z * LANES) * rows_of_keys[j][d];
                *(Floats*)(acc + d * WIDE + z * LANES) = s;
            }
    }
    for (long r = 0; r < rows; r++) {
        float* row = partials + (task.partial + r / group * c.query_heads + head * group + r % group) * row_size(c);
        row[0] = most[r / LANES][r % LANES];
        row[1] = total[r / LANES][r % LANES];
        for (long d = 0; d < c.value_width; d++) row[2 + d] = acc[d * WIDE + r];
    }
}

template <class T>
void run(const Call& c, const Task& task, float* scratch, float* partials) {
    const long rows = task.queries * c.group();
    for (int head = task.head_begin; head < task.head_end; head++) {
        if (rows == 1) over_few<1, T>(c, task, head, scratch, partials);
        else if (rows == 2) over_few<2, T>(c, task, head, scratch, partials);
        else if (rows == 3) over_few<3, T>(c, task, head, scratch, partials);
        else if (rows <= FEW) over_few<4, T>(c, task, head, scratch, partials);
        else if (rows <= LANES) over_many<1, T>(c, task, head, scratch, partials);
        else if (rows <= 2 * LANES) over_many<2, T>(c, task, head, scratch, partials);
        else over_many<4, T>(c, task, head, scratch, partials);
    }
}

void merge(const Call& c, const Merge& m, const float* partials, int head_begin, int head_end) {
    const long size = row_size(c), rows = m.queries * c.query_heads;
    for (long r = 0; r < rows; r++) {
        const int head = r % c.query_heads;
        if (head < head_begin * c.group() || head >= head_end * c.group()) continue;
        float most = NONE;
        for (long p = 0; p < m.pieces; p++) {
            const float* row = partials + (m.partial + p * rows + r) * size;
            most = row[0] > most ? row[0] : most;
        }
        const float sink = c.sinks ? c.sinks[head] : NONE;
        most = sink > most ? sink : most;
        float total = c.sinks ? exp(all(sink - most))[0] : 0;
        float* out = c.out + (m.first_row * c.query_heads + r) * c.value_width;
        memset(out, 0, c.value_width * sizeof(float));
        for (long p = 0; p < m.pieces; p++) {
            const float* row = partials + (m.partial + p * rows + r) * size;
            const float share = exp(all(row[0] - most))[0];
            total += row[1] * share;
            for (long d = 0; d < c.value_width; d++) out[d] += row[2 + d] * share;
        }
        const float factor = total > 0 ? 1 / total : 0;
        for (long d = 0; d < c.value_width; d++) out[d] *= factor;
    }
}

}  // namespace

Plan plan(const Call& c) {
    Plan found;
    const long per_block = ROWS / c.group() > 0 ? ROWS / c.group() : 1;
    long row = 0, partial = 0;
    for (int s = 0; s < c.sequences; s++) {
        const long count = c.counts[s], before = c.lengths[s] - count;
        for (long first = 0; first < count; first += per_block) {
            const long queries = count - first < per_block ? count - first : per_block;
            const long end = c.causal ? before + first + queries : c.lengths[s];
            long begin = c.causal && c.window >= 0 ? before + first - c.window : 0;
            begin = begin < 0 ? 0 : begin;
            const bool few = count <= per_block;
            const long piece = few ? PIECE : end - begin;
            if (!few || end - begin <= piece) {
                const int step = few ? c.heads : 1;
                for (int h = 0; h < c.heads; h += step)
                    found.tasks.push_back(
                        {s, first, queries, row + first, begin, end, h, h + step, -1});
                continue;
            }
            Merge merge = {row + first, queries, partial, 0};
            for (long at = begin; at < end; at += piece) {
                const long stop = at + piece < end ? at + piece : end;
                found.tasks.push_back(
                    {s, first, queries, row + first, at, stop, 0, c.heads, partial});
                partial += queries * c.query_heads;
                merge.pieces++;
            }
            found.merges.push_back(merge);
        }
        row += count;
    }
    found.partials = partial * row_size(c);
    return found;
}

void attend(const Call& c, const Plan& plan, float* partials) {
    const long wide = up(c.width > c.value_width ? c.width : c.value_width, LANES);
    const long needed =
        (up(c.width, LANES) + up(c.value_width, LANES) + KEYS) * ROWS + KEYS * wide;
    const long per_block = ROWS / c.group() > 0 ? ROWS / c.group() : 1;
    static thread_local Scratch own;
    float* scratch = own.of(needed + per_block * c.query_heads * row_size(c));
    // The longest come first: the last of a causal prefill.
#pragma omp for schedule(dynamic, 1)
    for (long i = (long)plan.tasks.size() - 1; i >= 0; i--) {
        Task task = plan.tasks[i];
        const bool whole = task.partial < 0;
        if (whole) task.partial = 0;
        float* target = whole ? scratch + needed : partials;
        if (c.bfloat16) run<Bfloat16>(c, task, scratch, target);
        else run<float>(c, task, scratch, target);
        if (whole)
            merge(c, {task.first_row, task.queries, 0, 1}, target, task.head_begin, task.head_end);
    }
    if (plan.merges.empty()) return;
#pragma omp for schedule(static)
    for (long i = 0; i < (long)plan.merges.size(); i++)
        merge(c, plan.merges[i], partials, 0, c.heads);
}

}  // namespace attention

extern "C" void hybrid_attention(const float* q, long q_stride, const void* keys, long key_stride,
                                 const void* values, long value_stride, long value_head,
                                 float* out,
                                 const float* sinks, const int64_t* slots, const int64_t* lengths,
                                 const int64_t* counts, int sequences, int query_heads, int heads,
                                 int width, int value_width, float scale, float cap, long window,
                                 int causal, int bfloat16) {
    const attention::Call c = {
        q,        keys,        values,     out,          sinks,      slots,       lengths,
        counts,   q_stride,    key_stride, value_stride, value_head, sequences,   query_heads,
        heads,    width,       value_width, scale,       cap,        window,      causal,
        bfloat16};
    const attention::Plan plan = attention::plan(c);
    static thread_local Scratch results;
    float* partials = results.of(plan.partials);
#pragma omp parallel if (plan.tasks.size() > 1)
    attention::attend(c, plan, partials);
}
