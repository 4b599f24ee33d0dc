// Mamba-2's recurrence, token by token, in prompts and in decode. A head's state S has a row for each channel of x and
// a column for each channel of B and C. For each token, S is multiplied by e^(dt A), then dt x B^T is added; the
// token's output is S C + D x. The lanes of a row are summed in one order for any number of tokens.
#pragma once
#include "state_segments.h"

#define MOST_STATE_SIZE 256
#define MAMBA_TOKENS VL // maximum number of tokens that are computed together
#define ROWS_TOGETHER 2 // rows of a state whose vectors stay in registers
#if VL == 8
#define COLUMNS 4 // vectors of each such row
#else
#define COLUMNS 8
#endif

typedef struct {
    int64_t num_heads, num_groups, head_width, state_size;
    StatePlane state; // [head][head_width][state_size]
    const float *xbc; // [num_rows][x of all heads, B and C of all groups]
    int64_t xbc_stride;
    const float *steps; // [num_rows][num_heads]: dt before softplus, without bias
    int64_t steps_stride;
    const float *step_bias, *rates, *skips; // [num_heads]: rates are -A, skips are D
    float least_step, most_step;
    float *out;     // [num_rows][num_heads][head_width]
    GatedNorm norm; // over all heads of a group
} Mamba;

typedef struct {
    float ALIGNED b[MAMBA_TOKENS * MOST_STATE_SIZE], c[MAMBA_TOKENS * MOST_STATE_SIZE]; // padded with zeros
    float ALIGNED decays[MAMBA_TOKENS], steps[MAMBA_TOKENS];
    int64_t num_tokens, padded; // padded: length of a row of b and c
    const float *x;             // the head's part, [token][head_width], strided
    float *out;
} MambaTokens;

// Processes the tokens in a part of the state: `rows` rows of nv vectors, from `column` on. Adds the part's summand of
// each output to `lanes` [row][token].
INLINE void mamba_columns(int rows, int nv, const MambaTokens *t, int64_t column, int64_t n, const float (*inputs)[MAMBA_TOKENS],
                          float *s, int64_t stride, vf (*lanes)[MAMBA_TOKENS]) {
    vf state[ROWS_TOGETHER][COLUMNS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < nv; j++)
        state[r][j] = load_first(s + r * stride + column + j * VL, n - j * VL);
    for (int64_t token = 0; token < t->num_tokens; token++) {
        const float *b = t->b + token * t->padded + column, *c = t->c + token * t->padded + column;
        vf decay = splat(t->decays[token]), sums[ROWS_TOGETHER], input[ROWS_TOGETHER];
        UNROLL for (int r = 0; r < rows; r++) sums[r] = lanes[r][token], input[r] = splat(inputs[r][token]);
        UNROLL for (int j = 0; j < nv; j++) {
            vf in = load(b + j * VL), read = load(c + j * VL);
            UNROLL for (int r = 0; r < rows; r++) {
                state[r][j] = multiply_add(input[r], in, state[r][j] * decay);
                sums[r] = multiply_add(read, state[r][j], sums[r]);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) lanes[r][token] = sums[r];
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < nv; j++)
        store_first(s + r * stride + column + j * VL, state[r][j], n - j * VL);
}

// Processes tokens in some rows of a state.
INLINE void mamba_rows(int rows, const Mamba *m, const MambaTokens *t, int64_t row, float skip, float *s) {
    vf lanes[ROWS_TOGETHER][MAMBA_TOKENS];
    float ALIGNED x[ROWS_TOGETHER][MAMBA_TOKENS] = {0}, inputs[ROWS_TOGETHER][MAMBA_TOKENS];
    int64_t size = m->state_size, column = 0, stride = m->num_heads * m->head_width;
    for (int64_t token = 0; token < t->num_tokens; token++) UNROLL for (int r = 0; r < rows; r++) {
        lanes[r][token] = (vf){0};
        x[r][token] = t->x[token * m->xbc_stride + row + r];
    }
    UNROLL for (int r = 0; r < rows; r++) store(inputs[r], load(x[r]) * load(t->steps));
    for (; column + COLUMNS * VL <= t->padded; column += COLUMNS * VL)
        mamba_columns(rows, COLUMNS, t, column, size - column, inputs, s, size, lanes);
    for (; column < t->padded; column += VL)
        mamba_columns(rows, 1, t, column, size - column, inputs, s, size, lanes);
    UNROLL for (int r = 0; r < rows; r++) {
        float *out = t->out + row + r;
        if (t->num_tokens == MAMBA_TOKENS) {
            vf sums = multiply_add(splat(skip), load(x[r]), sums_of(lanes[r]));
            for (int64_t token = 0; token < MAMBA_TOKENS; token++) out[token * stride] = sums[token];
        } else for (int64_t token = 0; token < t->num_tokens; token++)
            out[token * stride] = multiply_add(splat(skip), splat(x[r][token]), splat(total_of(lanes[r][token])))[0];
    }
}

// Processes a single token in VL rows of a state.
INLINE void mamba_token(const Mamba *m, const MambaTokens *t, int64_t row, vf skip, float *s) {
    vf lanes[VL], decay = splat(t->decays[0]), x = load(t->x + row);
    float ALIGNED inputs[VL];
    store(inputs, x * t->steps[0]);
    for (int64_t r = 0; r < VL; r++, s += m->state_size) {
        vf sum = {0}, input = splat(inputs[r]);
        for (int64_t j = 0; j < m->state_size; j += VL) {
            int64_t n = m->state_size - j;
            vf value = multiply_add(input, load(t->b + j), load_first(s + j, n) * decay);
            store_first(s + j, value, n);
            sum = multiply_add(load(t->c + j), value, sum);
        }
        lanes[r] = sum;
    }
    store(t->out + row, multiply_add(skip, x, sums_of(lanes)));
}

static __attribute__((noinline)) void make_steps(const Mamba *m, int64_t head, int64_t row, MambaTokens *t) {
    float raw[MAMBA_TOKENS] = {0};
    for (int64_t i = 0; i < t->num_tokens; i++) raw[i] = m->steps[(row + i) * m->steps_stride + head];
    vf step = softplus(load(raw) + m->step_bias[head]);
    step = at_most(vmax(splat(m->least_step), step), m->most_step);
    store(t->steps, step);
    store(t->decays, exponential(step * -m->rates[head]));
}

static __attribute__((noinline)) void mamba_tokens(const Mamba *m, int64_t head, int64_t row, int64_t num_tokens,
                                                   float *s, MambaTokens *t) {
    int64_t size = m->state_size, group = head / (m->num_heads / m->num_groups), inner = m->num_heads * m->head_width;
    const float *b = m->xbc + row * m->xbc_stride + inner + group * size;
    t->num_tokens = num_tokens, t->padded = whole_vectors(size);
    t->x = m->xbc + row * m->xbc_stride + head * m->head_width;
    t->out = m->out + row * inner + head * m->head_width;
    make_steps(m, head, row, t);
    for (int64_t i = 0; i < num_tokens; i++, b += m->xbc_stride) for (int64_t j = 0; j < size; j += VL) {
        store(t->b + i * t->padded + j, load_first(b + j, size - j));
        store(t->c + i * t->padded + j, load_first(b + m->num_groups * size + j, size - j));
    }
    int64_t at = 0;
    for (; num_tokens == 1 && at + VL <= m->head_width; at += VL)
        mamba_token(m, t, at, splat(m->skips[head]), s + at * size);
    for (; at + ROWS_TOGETHER <= m->head_width; at += ROWS_TOGETHER)
        mamba_rows(ROWS_TOGETHER, m, t, at, m->skips[head], s + at * size);
    for (; at < m->head_width; at++) mamba_rows(1, m, t, at, m->skips[head], s + at * size);
}

// Computes a head of a sequence in rows [start, stop) of the step.
static void mamba_item(const Mamba *m, const Sequences *s, int64_t item, int64_t start, int64_t stop) {
    MambaTokens tokens;
    int64_t of = item / m->num_heads, head = item % m->num_heads, numbers = m->head_width * m->state_size;
    for (const Segment *g = s->segments + s->starts[of]; g < s->segments + s->starts[of + 1]; g++) {
        float *state = in_block(&m->state, g->block) + head * numbers;
        int64_t row = MAX(start, g->first), end = MIN(stop, g->stop);
        if (row >= end) continue;
        for (; row < end; row += MAMBA_TOKENS) mamba_tokens(m, head, row, MIN(MAMBA_TOKENS, end - row), state, &tokens);
        if (g->keep >= 0 && end == g->stop)
            memcpy(in_block(&m->state, g->keep) + head * numbers, state, (size_t)numbers * 4);
    }
}

// Norms and gates one row over all heads.
static void norm_groups(const Mamba *m, int64_t row) {
    int64_t inner = m->num_heads * m->head_width, width = inner / m->num_groups;
    if (m->norm.gate_kind == NO_GATE && !m->norm.weight) return;
    for (int64_t at = 0; at < inner; at += width)
        gated_norm(&m->norm, m->norm.gate + row * m->norm.gate_stride + at, m->norm.weight ? m->norm.weight + at : 0,
                   m->out + row * inner + at, width);
}
