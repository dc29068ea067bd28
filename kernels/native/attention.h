// Attention over a pool as part of a larger call: what is asked, how it is cut, and the work.
#pragma once
#include <vector>

#include "simd.h"

namespace attention {

// What `attention.py` describes; a pool's keys and values are floats, or bfloat16s.
struct Call {
    const float* q;
    const void *keys, *values;
    float* out;
    const float* sinks;
    const int64_t *slots, *lengths, *counts;
    long q_stride, key_stride, value_stride, value_head;
    int sequences, query_heads, heads, width, value_width;
    float scale, cap;
    long window;
    int causal, bfloat16;
    int group() const { return query_heads / heads; }
};

// Queries of one sequence over some of its keys, for some key heads; `partial` is the first row of
// its partial results, -1 where there are no other pieces.
struct Task {
    int sequence;
    long first_query, queries, first_row, begin, end;
    int head_begin, head_end;
    long partial;
};

// Queries whose partial results are merged.
struct Merge {
    long first_row, queries, partial, pieces;
};

struct Plan {
    std::vector<Task> tasks;  // the last are done first; of a sequence's pieces the first
    std::vector<Merge> merges;
    long partials = 0;  // floats of partial results
    bool blocks = false;  // whether a sequence has more queries than one block
};

Plan plan(const Call& call);

// By all threads of a parallel region: the results are complete when it returns. `partials` has room
// for what the plan wants.
void attend(const Call& call, const Plan& plan, float* partials);

}  // namespace attention
