// Row-wise kernels: a root-mean-square norm with an optional addition before it, and gated activations.
#pragma once
#include <math.h>

#include "thread_team.h"
#include "simd_vectors.h"

#define SMALL 32768 // fewer elements are computed on one thread, because waking another thread costs as much

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

// Returns how many rows a thread takes at a time.
static int64_t rows_at_once(int64_t num_rows, int64_t num_threads) {
    return num_threads > 1 ? MAX(1, MIN(16, num_rows / (2 * num_threads))) : num_rows;
}

// Computes x [num_rows, features] += delta, if there is a delta, then out = x / rms(x) * weight.
void pd_norm(float *x, const float *delta, const float *weight, float *out, int64_t num_rows, int64_t features,
             float eps, int64_t num_threads) {
    if (num_rows * features < SMALL) num_threads = 1;
    NormWork work = {x, delta, weight, out, num_rows, features, 0, rows_at_once(num_rows, num_threads), eps};
    run(norm_work, &work, num_threads);
}

typedef struct {
    const float *gate_up;
    float *out;
    int64_t num_rows, features, counter, num_parts;
    int activation;
} GateWork;

#define SILU 0
#define GELU_TANH 1
#define SWIGLUOAI 2


// silu(x) = x / (1 + e^-x); gelu with tanh is the same with -2 sqrt(2 / pi) (x + 0.044715 x^3) in the exponent.
// swigluoai (gpt-oss) is x / (1 + e^-1.702x), with both halves clamped.
INLINE vf activate(vf x, int activation) {
    const float log2e = 1.44269504f, gelu_scale = 2.0f * 0.79788456f;
    vf exponent = x * (activation == SWIGLUOAI ? -1.702f * log2e : -log2e);
    if (activation == GELU_TANH) exponent = (x + x * x * x * 0.044715f) * (-gelu_scale * log2e);
    return x / (exp2v(-vmax(splat(-126.0f), -exponent)) + 1.0f);
}

INLINE vf at_most(vf x, float most) { return -vmax(splat(-most), -x); }

INLINE vf gated(vf gate, vf up, int activation) {
    if (activation != SWIGLUOAI) return activate(gate, activation) * up;
    return activate(at_most(gate, 7.0f), activation) * (vmax(splat(-7.0f), at_most(up, 7.0f)) + 1.0f);
}

INLINE void gate_part(const float *gate, const float *up, float *out, int64_t n, int activation) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(out + i, gated(load(gate + i), load(up + i), activation));
    for (; i < n; i++) out[i] = gated(splat(gate[i]), splat(up[i]), activation)[0];
}

static void gate_row(const float *gate, const float *up, float *out, int64_t n, int activation) {
    switch (activation) { // each activation has its own loop
    case GELU_TANH: gate_part(gate, up, out, n, GELU_TANH); break;
    case SWIGLUOAI: gate_part(gate, up, out, n, SWIGLUOAI); break;
    default: gate_part(gate, up, out, n, SILU);
    }
}

// Gates `num_rows` rows from `row` on.
static void make_gated(const void *data, int64_t row, int64_t num_rows) {
    const GateWork *w = data;
    int64_t n = w->features;
    for (int64_t r = row; r < row + num_rows; r++)
        gate_row(w->gate_up + r * 2 * n, w->gate_up + r * 2 * n + n, w->out + r * n, n, w->activation);
}

static void gate_work(void *data) {
    GateWork *w = data;
    int64_t n = w->features, width = (n / w->num_parts + VL - 1) / VL * VL;
    for (int64_t item; (item = next_items(&w->counter, 1)) < w->num_rows * w->num_parts;) {
        int64_t row = item / w->num_parts, start = MIN(n, item % w->num_parts * width);
        int64_t stop = item % w->num_parts == w->num_parts - 1 ? n : MIN(n, start + width);
        const float *gate = w->gate_up + row * 2 * n + start;
        float *out = w->out + row * n + start;
        gate_row(gate, gate + n, out, stop - start, w->activation);
    }
}

// Computes out [num_rows, features] = activation(left half of gate_up) * right half.
void pd_gate(const float *gate_up, float *out, int64_t num_rows, int64_t features, int activation,
             int64_t num_threads) {
    GateWork work = {gate_up, out, num_rows, features, 0, 1, activation};
    if (num_rows * features < SMALL / 4) num_threads = 1;
    if (num_rows < 4 * num_threads) work.num_parts = num_threads;
    run(gate_work, &work, num_threads);
}
