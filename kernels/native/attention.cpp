// Softmax attention of new tokens over keys and values where they lie in a pool (attention.py says
// what it computes). A sequence's queries are taken in blocks, and where there are few of them its
// keys in pieces: each piece yields partial results, which are merged in the order of the keys. How
// keys are cut depends on the sequence alone, so a result depends neither on the rest of the batch
// nor on the number of threads.
#include <omp.h>

#include "attention_few.h"
#include "attention_many.h"
#include "scratch.h"

namespace attention {
namespace {

constexpr int ROWS = 64;     // query rows of a block: queries times the heads that share a key head
constexpr int PIECE = 1024;  // keys of a piece
constexpr int MOST_AT_ONCE = 4;  // pieces that a thread takes, one after the other

template <class T>
void run(const Call& c, const Task& task, float* scratch, float* partials) {
    const long rows = task.queries * c.group();
    if (rows == 1) return over_few<1, T>(c, task, scratch, partials);
    if (rows == 2) return over_few<2, T>(c, task, scratch, partials);
    if (rows == 3) return over_few<3, T>(c, task, scratch, partials);
    if (rows == FEW) return over_few<FEW, T>(c, task, scratch, partials);
    for (int head = task.head_begin; head < task.head_end; head++) {
        if (rows <= LANES) over_many<1, T>(c, task, head, scratch, partials);
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
        const float sink = c.sinks ? c.sinks[head] * LOG2_E : NONE;
        most = sink > most ? sink : most;
        float total = c.sinks ? exp2_down(all(sink - most))[0] : 0;
        float* out = c.out + (m.first_row * c.query_heads + r) * c.value_width;
        memset(out, 0, c.value_width * sizeof(float));
        for (long p = 0; p < m.pieces; p++) {
            const float* row = partials + (m.partial + p * rows + r) * size;
            const float share = exp2_down(all(row[0] - most))[0];
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
            found.blocks |= !few;
            const long piece = few ? PIECE : end - begin;
            if (!few || end - begin <= piece) {
                const int step = few ? c.heads : 1;
                for (int h = 0; h < c.heads; h += step)
                    found.tasks.push_back(
                        {s, first, queries, row + first, begin, end, h, h + step, -1});
                continue;
            }
            const Merge merge = {row + first, queries, partial, (end - begin + piece - 1) / piece};
            for (long i = merge.pieces - 1; i >= 0; i--) {
                const long at = begin + i * piece, stop = at + piece < end ? at + piece : end;
                found.tasks.push_back({s, first, queries, row + first, at, stop, 0, c.heads,
                                       partial + i * queries * c.query_heads});
            }
            partial += merge.pieces * queries * c.query_heads;
            found.merges.push_back(merge);
        }
        row += count;
    }
    found.partials = partial * row_size(c);
    return found;
}

void attend(const Call& c, const Plan& plan, float* partials) {
    const long wide = up(c.width > c.value_width ? c.width : c.value_width, LANES);
    const long many = (c.width + c.value_width + KEYS) * ROWS + KEYS * wide;
    const long few = few_scratch(c, c.heads);
    const long needed = up(many > few ? many : few, LANES);
    const long per_block = ROWS / c.group() > 0 ? ROWS / c.group() : 1;
    static thread_local Scratch own;
    float* scratch = own.of(needed + per_block * c.query_heads * row_size(c));
    const long tasks = plan.tasks.size(), share = tasks / (8 * omp_get_num_threads());
    const int turn = plan.blocks || share < 1 ? 1 : share < MOST_AT_ONCE ? share : MOST_AT_ONCE;
    // The longest come first: the last of a causal prefill.
#pragma omp for schedule(dynamic, turn)
    for (long i = tasks - 1; i >= 0; i--) {
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
