// Definitions that the kernels of recurrent layers share: segments and states of sequences, parts of vectors, gates.
#pragma once
#include <math.h>

#include "row_kernels.h"

// Rows [first, stop) of a sequence. They are computed in order, and read and update the state in `block`. The state
// after the last row is copied to block `keep`, unless `keep` is -1. A sequence's segments are consecutive
// (model/inputs/state_rows.py).
typedef struct {
    int32_t first, stop, block, keep;
} Segment;

typedef struct {
    int64_t num_segments, num_sequences;
    const Segment *segments;
    int32_t *starts; // [num_segments + 1]: the first segment of each sequence, then the number of segments
} Sequences;

// A plane of one layer in all blocks, [block][head][width].
typedef struct {
    float *data;
    int64_t stride; // floats from block to block
} StatePlane;

INLINE float *in_block(const StatePlane *plane, int64_t block) { return plane->data + block * plane->stride; }

static void find_sequences(Sequences *s) {
    s->num_sequences = 0;
    for (int64_t i = 0; i < s->num_segments; i++)
        if (!i || s->segments[i].block != s->segments[i - 1].block) s->starts[s->num_sequences++] = (int32_t)i;
    s->starts[s->num_sequences] = (int32_t)s->num_segments;
}

// Returns the first n numbers at p, and zeros in the other lanes.
INLINE vf load_first(const float *p, int64_t n) {
    if (n >= VL) return load(p);
#if VL == 16
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    float lanes[VL] = {0};
    memcpy(lanes, p, (size_t)n * 4);
    return load(lanes);
#endif
}

INLINE void store_first(float *p, vf x, int64_t n) {
    if (n >= VL) store(p, x);
    else {
        float lanes[VL];
        store(lanes, x);
        memcpy(p, lanes, (size_t)n * 4);
    }
}

INLINE int64_t whole_vectors(int64_t n) { return (n + VL - 1) / VL * VL; }

#define LOG2E 1.44269504f

// Returns e^x for x up to 88.
INLINE vf exponential(vf x) { return exp2v(x * LOG2E); }

// Returns 1 / (1 + e^-x).
INLINE vf logistic(vf x) { return 1.0f / (exp2v(at_most(x * -LOG2E, 126.0f)) + 1.0f); }

// Returns log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|. The logarithm is 2 artanh(s) with s = y / (2 + y) and
// s <= 1/3; the series of artanh has an error of 2e-9 before rounding.
INLINE vf softplus(vf x) {
    vf y = exp2v(-vmax(x, -x) * LOG2E), s = y / (y + 2.0f), square = s * s;
    vf series = splat(1.0f / 15);
    series = multiply_add(series, square, splat(1.0f / 13));
    series = multiply_add(series, square, splat(1.0f / 11));
    series = multiply_add(series, square, splat(1.0f / 9));
    series = multiply_add(series, square, splat(1.0f / 7));
    series = multiply_add(series, square, splat(1.0f / 5));
    series = multiply_add(series, square, splat(1.0f / 3));
    series = multiply_add(series, square, splat(1.0f));
    return multiply_add(series, s * 2.0f, vmax(splat(0.0f), x));
}

// Returns the sum of the squares of n numbers; the order of addition depends on n only.
static __attribute__((noinline)) float squares_of(const float *x, int64_t n) {
    vf sum = {0};
    for (int64_t i = 0; i < n; i += VL) {
        vf value = load_first(x + i, n - i);
        sum = multiply_add(value, value, sum);
    }
    return total_of(sum);
}

#define NO_GATE 0
#define SILU_AFTER 1    // norm first, then gate
#define SIGMOID_AFTER 2 // likewise
#define SILU_BEFORE 3   // gate first, then norm

// A norm over each head or group of heads, and a gate.
typedef struct {
    int64_t gate_kind, gate_stride; // stride: floats from row to row
    const float *gate;              // [num_rows][num_features], strided
    const float *weight;            // null: no norm
    int64_t weight_stride;          // floats from head to head; 0 if all heads have the same weight
    float eps;
} GatedNorm;

INLINE vf gate_of(int64_t kind, const float *gate, int64_t n) {
    vf value = load_first(gate, n);
    return kind == SIGMOID_AFTER ? logistic(value) : value * logistic(value);
}

// Norms and gates the n features of a head or group.
static __attribute__((noinline)) void gated_norm(const GatedNorm *g, const float *gate, const float *weight, float *x,
                                                 int64_t n) {
    if (g->gate_kind == SILU_BEFORE)
        for (int64_t i = 0; i < n; i += VL)
            store_first(x + i, load_first(x + i, n - i) * gate_of(SILU_BEFORE, gate + i, n - i), n - i);
    float scale = weight ? 1.0f / sqrtf(squares_of(x, n) / (float)n + g->eps) : 1.0f;
    int gates = g->gate_kind == SILU_AFTER || g->gate_kind == SIGMOID_AFTER;
    for (int64_t i = 0; i < n; i += VL) {
        vf value = load_first(x + i, n - i);
        if (weight) value = value * scale * load_first(weight + i, n - i);
        if (gates) value *= gate_of(g->gate_kind, gate + i, n - i);
        store_first(x + i, value, n - i);
    }
}
