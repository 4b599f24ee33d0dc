// Row-wise kernels: root-mean-square norm with an optional addition before it, gated activations.
#pragma once
#include <math.h>

#include "team.h"
#include "vector.h"

#define SMALL 32768 // elements below which one thread does it all: waking another costs as much

typedef struct {
    float *x;
    const float *delta, *weight;
    float *out;
    int64_t num_rows, features, counter, step;
    float eps;
} NormWork;

static void norm_row(float *x, const float *delta, const float *weight, float *out, int64_t n, float eps) {
    vf squares[4] = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) UNROLL for (int j = 0; j < 4; j++) {
        vf value = load(x + i + j * VL);
        if (delta) store(x + i + j * VL, value = value + load(delta + i + j * VL));
        squares[j] += value * value;
    }
    for (; i < n; i++) {
        if (delta) x[i] += delta[i];
        sum += x[i] * x[i];
    }
    sum += sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void norm_work(void *data) {
    NormWork *w = data;
    int64_t n = w->features;
    for (int64_t row; (row = next_items(&w->counter, w->step)) < w->num_rows;)
        for (int64_t r = row; r < MIN(row + w->step, w->num_rows); r++)
            norm_row(w->x + r * n, w->delta ? w->delta + r * n : 0, w->weight, w->out + r * n, n, w->eps);
}

// x [num_rows, features] += delta if there is one; out = x / rms(x) * weight.
void pd_norm(float *x, const float *delta, const float *weight, float *out, int64_t num_rows, int64_t features,
             float eps, int64_t num_threads) {
    NormWork work = {x, delta, weight, out, num_rows, features, 0, num_rows, eps};
    if (num_rows * features < SMALL) num_threads = 1;
    if (num_threads > 1) work.step = MAX(1, MIN(16, num_rows / (2 * num_threads)));
    run(norm_work, &work, num_threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    int64_t num_rows, features, counter, num_parts;
    int gelu;
} GateWork;

// silu(x) = x / (1 + e^-x); gelu with tanh is the same with -2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent.
INLINE vf activate(vf x, int gelu) {
    const float log2e = 1.44269504f, gelu_scale = 2.0f * 0.79788456f;
    vf exponent = gelu ? (x + x * x * x * 0.044715f) * (-gelu_scale * log2e) : x * -log2e;
    return x / (exp2v(-vmax(splat(-126.0f), -exponent)) + 1.0f);
}

INLINE void gate_part(const float *gate, const float *up, float *out, int64_t n, int gelu) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, activate(load(gate + i), gelu) * load(up + i));
    for (; i < n; i++) out[i] = activate(splat(gate[i]), gelu)[0] * up[i];
}

static void gate_work(void *data) {
    GateWork *w = data;
    int64_t n = w->features, width = (n / w->num_parts + VL - 1) / VL * VL;
    for (int64_t item; (item = next_items(&w->counter, 1)) < w->num_rows * w->num_parts;) {
        int64_t row = item / w->num_parts, start = MIN(n, item % w->num_parts * width);
        int64_t stop = item % w->num_parts == w->num_parts - 1 ? n : MIN(n, start + width);
        const float *gate = w->gate_up + row * 2 * n + start;
        float *out = w->out + row * n + start;
        if (w->gelu)
            gate_part(gate, gate + n, out, stop - start, 1);
        else
            gate_part(gate, gate + n, out, stop - start, 0);
    }
}

// out [num_rows, features] = activation(left half of gate_up) * right half.
void pd_gate(const float *gate_up, float *out, int64_t num_rows, int64_t features, int gelu, int64_t num_threads) {
    GateWork work = {gate_up, out, num_rows, features, 0, 1, gelu};
    if (num_rows * features < SMALL / 4) num_threads = 1;
    if (num_rows < 4 * num_threads) work.num_parts = num_threads;
    run(gate_work, &work, num_threads);
}
