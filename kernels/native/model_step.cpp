// One decode step of a whole model (model_step.py says which ones): all of its layers, with few rows,
// in one parallel region. Every layer reads the normalized sum of what stands before it:
//   residual += what the layers before yielded; y = layer(norm(residual))
#include <omp.h>

#include <memory>

#include "attention.h"
#include "mamba1.h"
#include "mamba2.h"
#include "norm.h"
#include "scratch.h"

using namespace products;

namespace {

// What one step gives to all layers.
struct Step {
    long rows;
    const int64_t *state_slots, *kv_slots, *positions;
    const int64_t *slots, *lengths, *counts;  // of the sequences, as attention wants them
};

struct Layer {
    const float* norm;
    float in_scale, out_scale;  // of what it reads, and of what it yields
    int beside;                 // it reads what the layer before it read

    virtual ~Layer() = default;
    // Before the parallel region; returns the floats of scratch that all threads share.
    virtual long prepare(const Step& step) = 0;
    // By all threads of the region: x is each thread's own. y is written behind a barrier only, since
    // others may still read the one before it, and is complete behind the next.
    virtual void run(const Step& step, const float* x, float* y, float* scratch, Part part) = 0;
};

struct Mlp : Layer {
    Weight up, down;
    int activation;

    long prepare(const Step& step) override { return step.rows * down.inputs; }
    void run(const Step& step, const float* x, float* y, float* scratch, Part part) override {
        product(up, x, up.inputs, step.rows, scratch, down.inputs, activation, part);
#pragma omp barrier
        product(down, scratch, down.inputs, step.rows, y, down.outputs, NOTHING, part);
    }
};

struct Mamba2 : Layer {
    mamba2::Mixer mixer;
    Weight in, out;

    long prepare(const Step& step) override {
        return step.rows * (mixer.projections() + mixer.conv_width() + mixer.inner());
    }
    void run(const Step& step, const float* x, float* y, float* scratch, Part part) override {
        const long inner = mixer.inner(), projections = mixer.projections();
        float* mixed = scratch;
        float* projected = mixed + step.rows * inner;
        float* convolved = projected + step.rows * projections;
        product(in, x, in.inputs, step.rows, projected, projections, NOTHING, part);
#pragma omp barrier
        mamba2::step(mixer, step.rows, step.state_slots, projected, convolved, mixed, part);
        product(out, mixed, inner, step.rows, y, out.outputs, NOTHING, part);
    }
};

struct Mamba1 : Layer {
    mamba1::Mixer mixer;
    Weight in, parameters, steps, out;

    long prepare(const Step& step) override {
        return step.rows * (4 * mixer.inner + mixer.parameters());
    }
    void run(const Step& step, const float* x, float* y, float* scratch, Part part) override {
        const long inner = mixer.inner, rows = step.rows;
        float* projected = scratch;
        float* convolved = projected + 2 * rows * inner;
        float* mixed = convolved + rows * inner;
        float* selected = mixed + rows * inner;
        product(in, x, in.inputs, rows, projected, 2 * inner, NOTHING, part);
#pragma omp barrier
        mamba1::convolve(mixer, rows, step.state_slots, projected, convolved, part);
#pragma omp barrier
        product(parameters, convolved, inner, rows, selected, mixer.parameters(), NOTHING, part);
#pragma omp barrier
        mamba1::advance(mixer, steps, rows, step.state_slots, projected, convolved, selected, mixed,
                        part);
#pragma omp barrier
        product(out, mixed, inner, rows, y, out.outputs, NOTHING, part);
    }
};

struct Attention : Layer {
    Weight qkv, out;
    void *keys, *values;  // of the pool: [slots, heads, width], floats or bfloat16s
    long key_stride, value_stride;
    int query_heads, heads, width, bfloat16;
    float scale, cap, key_scale;
    long window;
    const float* rotation;  // [positions, rotated]: cosines, then sines; or null
    long rotated;
    attention::Call call;
    attention::Plan plan;

    long projections() const { return (long)(query_heads + 2 * heads) * width; }
    long attended() const { return (long)query_heads * width; }
    long prepare(const Step& step) override {
        call = {nullptr,      keys,        values,     nullptr,      nullptr,      step.slots,
                step.lengths, step.counts, projections(), key_stride, value_stride, width,
                (int)step.rows, query_heads, heads,     width,        width,        scale,
                cap,          window,      1,          bfloat16};
        plan = attention::plan(call);
        return step.rows * (projections() + attended()) + plan.partials;
    }
    void run(const Step& step, const float* x, float* y, float* scratch, Part part) override {
        float* projected = scratch;
        float* attended_ = projected + step.rows * projections();
        product(qkv, x, qkv.inputs, step.rows, projected, projections(), NOTHING, part);
#pragma omp barrier
        const long every = query_heads + 2 * heads, n = step.rows * every;
        for (long i = part.begin(n, 1); i < part.end(n, 1); i++)
            place(step, i / every, i % every, projected + i * width);
#pragma omp barrier
        attention::Call asked = call;
        asked.q = projected;
        asked.out = attended_;
        attention::attend(asked, plan, attended_ + step.rows * attended());
        product(out, attended_, attended(), step.rows, y, out.outputs, NOTHING, part);
    }

    // Turns one head of queries or keys by its position, and writes keys and values into the pool.
    void place(const Step& step, long row, long head, float* x) const {
        const bool is_key = head >= query_heads && head < query_heads + heads;
        if (is_key && key_scale != 1)
            for (long d = 0; d < width; d++) x[d] *= key_scale;
        if (rotation && head < query_heads + heads) rotate(step.positions[row], x);
        if (head < query_heads) return;
        const long at = step.kv_slots[row], own = (head - query_heads) % heads * width;
        void* pool = is_key ? keys : values;
        const long to = at * (is_key ? key_stride : value_stride) + own;
        if (bfloat16)
            for (long d = 0; d < width; d++) put((Bfloat16*)pool + to + d, x[d]);
        else
            memcpy((float*)pool + to, x, width * sizeof(float));
    }
    void rotate(long position, float* x) const {
        const long half = rotated / 2;
        const float* cosines = rotation + position * rotated;
        const float* sines = cosines + half;
        for (long d = 0; d < half; d++) {
            const float a = x[d], b = x[d + half];
            x[d] = a * cosines[d] - b * sines[d];
            x[d + half] = b * cosines[d] + a * sines[d];
        }
    }
};

struct Model {
    long width;
    float eps;
    int bfloat16;
    const float* norm;  // behind the last layer
    std::vector<std::unique_ptr<Layer>> layers;
    Scratch scratch;

    Weight weight(const void* values, const float* bias, long outputs, long inputs) const {
        return {values, bias, outputs, inputs, bfloat16};
    }
    // x, out: [rows, width].
    void run(const Step& step, const float* x, float* out) {
        const long size = step.rows * width;
        long most = 0;
        for (auto& layer : layers) {
            const long wanted = layer->prepare(step);
            most = wanted > most ? wanted : most;
        }
        float* yields = scratch.of(2 * size + most);  // of a layer, and of the one beside it
#pragma omp parallel
        pass(step, x, out, yields, yields + 2 * size,
             {omp_get_thread_num(), omp_get_num_threads()});
    }

  private:
    // Every thread has the residual of all rows: adding and normalizing it needs no barrier.
    void pass(const Step& step, const float* x, float* out, float* yields, float* shared, Part part) {
        static thread_local Scratch own;
        const long size = step.rows * width;
        float* residual = own.of(2 * size);
        float* normed = residual + size;
        memcpy(residual, x, size * sizeof(float));
        float scales[2];
        int pending = 0;
        for (auto& layer : layers) {
            if (!layer->beside) {
                add(residual, yields, scales, pending, size);
                pending = 0;
            }
            normalize(step.rows, residual, layer->norm, layer->in_scale, normed);
            layer->run(step, normed, yields + pending * size, shared, part);
            scales[pending++] = layer->out_scale;
#pragma omp barrier
        }
        add(residual, yields, scales, pending, size);
        if (part.index == 0) normalize(step.rows, residual, norm, 1, out);
    }
    void add(float* residual, const float* yields, const float* scales, int count, long size) const {
        for (int k = 0; k < count; k++)
            for (long i = 0; i < size; i++) residual[i] += scales[k] * yields[k * size + i];
    }
    void normalize(long rows, const float* from, const float* weight, float scale, float* to) const {
        for (long r = 0; r < rows; r++)
            rms_norm(from + r * width, weight, to + r * width, width, eps, scale);
    }
};

// Gives a layer to a model.
void append(Model* model, std::unique_ptr<Layer> layer, const float* norm, float in_scale,
            float out_scale, int beside) {
    layer->norm = norm;
    layer->in_scale = in_scale;
    layer->out_scale = out_scale;
    layer->beside = beside;
    model->layers.push_back(std::move(layer));
}

}  // namespace

extern "C" void* hybrid_model(long width, float eps, int bfloat16, const float* norm) {
    auto model = new Model;
    model->width = width;
    model->eps = eps;
    model->bfloat16 = bfloat16;
    model->norm = norm;
    return model;
}

extern "C" void hybrid_model_free(void* model) { delete (Model*)model; }

extern "C" void hybrid_model_mlp(void* to, const float* norm, float in_scale, float out_scale,
                                 int beside, const void* up, const float* up_bias,
                                 const void* down, const float* down_bias, long inner,
                                 int activation, float gate_scale) {
    Model* model = (Model*)to;
    auto layer = std::make_unique<Mlp>();
    const long outputs = activation == GATED_SILU ? 2 * inner : inner;
    layer->up = model->weight(up, up_bias, outputs, model->width);
    layer->up.gate_scale = gate_scale;
    layer->down = model->weight(down, down_bias, model->width, inner);
    layer->activation = activation;
    append(model, std::move(layer), norm, in_scale, out_scale, beside);
}

extern "C" void hybrid_model_mamba2(void* to, const float* norm, float in_scale, float out_scale,
                                    int beside, const void* in_weight, const float* in_bias,
                                    const void* out_weight, const float* out_bias,
                                    const float* scale, const float* conv_weight,
                                    const float* conv_bias, const float* decay, const float* skip,
                                    const float* step_bias, const float* norm_weight,
                                    void* windows, long windows_stride, int bfloat16_windows,
                                    float* states, long states_stride, long heads, long head_width,
                                    long groups, long size, long taps, long norm_group,
                                    float eps) {
    Model* model = (Model*)to;
    auto layer = std::make_unique<Mamba2>();
    layer->mixer = {
        heads,       head_width, groups, size,   norm_group,
        scale,       decay,      skip,   step_bias, norm_weight,
        eps,         {taps, conv_weight, conv_bias, windows, windows_stride, bfloat16_windows},
        states,      states_stride};
    layer->in = model->weight(in_weight, in_bias, layer->mixer.projections(), model->width);
    layer->out = model->weight(out_weight, out_bias, model->width, layer->mixer.inner());
    append(model, std::move(layer), norm, in_scale, out_scale, beside);
}

extern "C" void hybrid_model_mamba1(void* to, const float* norm, float in_scale, float out_scale,
                                    int beside, const void* in_weight, const float* in_bias,
                                    const void* parameters, const float* parameters_bias,
                                    const void* steps, const float* steps_bias,
                                    const void* out_weight, const float* out_bias,
                                    const float* conv_weight, const float* conv_bias,
                                    const float* decay, const float* skip, void* windows,
                                    long windows_stride, int bfloat16_windows, float* states,
                                    long states_stride, long inner, long size, long rank,
                                    long taps, int normed, float eps) {
    Model* model = (Model*)to;
    auto layer = std::make_unique<Mamba1>();
    layer->mixer = {inner, size, rank, decay, skip, normed, eps,
                    {taps, conv_weight, conv_bias, windows, windows_stride, bfloat16_windows},
                    states, states_stride};
    layer->in = model->weight(in_weight, in_bias, 2 * inner, model->width);
    layer->parameters =
        model->weight(parameters, parameters_bias, layer->mixer.parameters(), inner);
    layer->steps = model->weight(steps, steps_bias, inner, rank);
    layer->out = model->weight(out_weight, out_bias, model->width, inner);
    append(model, std::move(layer), norm, in_scale, out_scale, beside);
}

extern "C" void hybrid_model_attention(void* to, const float* norm, float in_scale,
                                       float out_scale, int beside, const void* qkv,
                                       const float* qkv_bias, const void* out,
                                       const float* out_bias, void* keys, long key_stride,
                                       void* values, long value_stride, int query_heads, int heads,
                                       int width, int bfloat16, float scale, float cap, long window,
                                       float key_scale, const float* rotation, long rotated) {
    Model* model = (Model*)to;
    auto layer = std::make_unique<Attention>();
    layer->keys = keys;
    layer->values = values;
    layer->key_stride = key_stride;
    layer->value_stride = value_stride;
    layer->query_heads = query_heads;
    layer->heads = heads;
    layer->width = width;
    layer->bfloat16 = bfloat16;
    layer->scale = scale;
    layer->cap = cap;
    layer->window = window;
    layer->key_scale = key_scale;
    layer->rotation = rotation;
    layer->rotated = rotated;
    layer->qkv = model->weight(qkv, qkv_bias, layer->projections(), model->width);
    layer->out = model->weight(out, out_bias, model->width, layer->attended());
    append(model, std::move(layer), norm, in_scale, out_scale, beside);
}

extern "C" void hybrid_model_step(void* model, long rows, const float* x, float* out,
                                  const int64_t* state_slots, const int64_t* kv_slots,
                                  const int64_t* positions, const int64_t* slots,
                                  const int64_t* lengths, const int64_t* counts) {
    ((Model*)model)->run({rows, state_slots, kv_slots, positions, slots, lengths, counts}, x, out);
}
