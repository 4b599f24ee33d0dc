// The gated delta rule, token by token, in prompts and in decode. A head's state S has a row for each channel of a key
// and a column for each channel of a value. For each token, the rows of S are multiplied by the token's decays; then
// beta times k (v - S^T k)^T is added; the token's output is S^T q. Columns are independent, and rows are added in
// order, so the bits depend neither on how columns are grouped nor on where a step begins.
#pragma once
#include "state_segments.h"

#define MOST_KEY_WIDTH 256
#define DELTA_TOKENS 16 // tokens that are prepared together
#if VL == 16
#define WIDE 8   // vectors of a row that a single token processes at once
#define NARROW 4 // the same for several tokens; two tokens' sums stay in registers
#elif VL == 8
#define WIDE 4
#define NARROW 2
#else
#define WIDE 8
#define NARROW 4
#endif

typedef struct {
    int64_t num_heads, num_key_heads, key_width, value_width;
    int64_t has_channel_decays; // one decay per row of a state; otherwise one per head
    StatePlane state;           // [head][key_width][value_width]
    const float *qkv;           // [num_rows][queries, keys, values of all heads], from row 0 on
    int64_t qkv_stride;
    const float *decays; // [num_rows][num_heads], or [num_rows][num_heads][key_width]: before softplus, without bias
    const float *betas;  // [num_rows][num_heads]: before their sigmoid
    int64_t decays_stride, betas_stride;
    const float *decay_bias; // shaped like one row of decays
    const float *rates;      // [num_heads]: a decay is e^(-rate * softplus(decay + bias))
    float *out;              // [num_rows][num_heads][value_width]
    GatedNorm norm;          // over one head
} Delta;

// Some prepared tokens of a head. Rows of q, k and decayed keys are `MOST_KEY_WIDTH` apart, values `v_stride`.
typedef struct {
    float ALIGNED q[DELTA_TOKENS * MOST_KEY_WIDTH], k[DELTA_TOKENS * MOST_KEY_WIDTH], decayed[DELTA_TOKENS * MOST_KEY_WIDTH];
    float ALIGNED decays[DELTA_TOKENS * MOST_KEY_WIDTH]; // one per row of a state; if one per head: [DELTA_TOKENS]
    float ALIGNED betas[DELTA_TOKENS];
    float ALIGNED state[MOST_KEY_WIDTH * NARROW * VL];
    const float *v;
    float *out;
    int64_t num_tokens, v_stride, out_stride, key_width;
} DeltaTokens;

// Sets kv to S^T k of a token for the decayed S: `decayed` is the key times the decays.
INLINE void find_values(int nv, const float *decayed, int64_t key_width, const float *s, int64_t stride, vf *kv) {
    vf sums[WIDE] = {0};
    for (int64_t i = 0; i < key_width; i++) UNROLL for (int j = 0; j < nv; j++)
        sums[j] = multiply_add(splat(decayed[i]), load(s + i * stride + j * VL), sums[j]);
    UNROLL for (int j = 0; j < nv; j++) kv[j] = sums[j];
}

// Updates S with a token's delta. Sets `out` to the token's output, and `kv` to find_values' result for the next token.
INLINE void update_state(int nv, int by_channel, int has_next, const DeltaTokens *t, int64_t token, const vf *delta,
                         float *s, int64_t stride, vf *out, vf *kv) {
    const float *q = t->q + token * MOST_KEY_WIDTH, *k = t->k + token * MOST_KEY_WIDTH;
    const float *decays = t->decays + token * MOST_KEY_WIDTH, *next = t->decayed + (token + 1) * MOST_KEY_WIDTH;
    vf decay = splat(t->decays[token]), sums[WIDE] = {0}, found[WIDE] = {0}, add[WIDE];
    UNROLL for (int j = 0; j < nv; j++) add[j] = delta[j];
    for (int64_t i = 0; i < t->key_width; i++) {
        vf key = splat(k[i]), query = splat(q[i]), following = has_next ? splat(next[i]) : key;
        if (by_channel) decay = splat(decays[i]);
        UNROLL for (int j = 0; j < nv; j++) {
            float *at = s + i * stride + j * VL;
            vf value = multiply_add(key, add[j], load(at) * decay);
            store(at, value);
            sums[j] = multiply_add(query, value, sums[j]);
            if (has_next) found[j] = multiply_add(following, value, found[j]);
        }
    }
    UNROLL for (int j = 0; j < nv; j++) out[j] = sums[j], kv[j] = found[j];
}

// Processes all tokens in nv vectors of a state's columns. Only n columns exist, but s has room for whole vectors.
INLINE void delta_columns(int nv, int by_channel, const DeltaTokens *t, int64_t column, int64_t n, float *s,
                          int64_t stride) {
    vf kv[WIDE], delta[WIDE], out[WIDE];
    find_values(nv, t->decayed, t->key_width, s, stride, kv);
    for (int64_t token = 0; token < t->num_tokens; token++) {
        const float *v = t->v + token * t->v_stride + column;
        float *to = t->out + token * t->out_stride + column;
        vf beta = splat(t->betas[token]);
        UNROLL for (int j = 0; j < nv; j++) {
            vf value = n - j * VL > 0 ? load_first(v + j * VL, n - j * VL) : (vf){0};
            delta[j] = (value - kv[j]) * beta;
        }
        if (token + 1 < t->num_tokens) update_state(nv, by_channel, 1, t, token, delta, s, stride, out, kv);
        else update_state(nv, by_channel, 0, t, token, delta, s, stride, out, kv);
        UNROLL for (int j = 0; j < nv; j++)
            if (n - j * VL > 0) store_first(to + j * VL, out[j], n - j * VL);
    }
}

static __attribute__((noinline)) void wide_columns(const DeltaTokens *t, int by_channel, int64_t column, float *s,
                                                   int64_t stride) {
    if (by_channel) delta_columns(WIDE, 1, t, column, WIDE * VL, s, stride);
    else delta_columns(WIDE, 0, t, column, WIDE * VL, s, stride);
}

// Processes the tokens in up to NARROW vectors of columns, in a copy that fits in the L1 cache.
static __attribute__((noinline)) void narrow_columns(DeltaTokens *t, int by_channel, int64_t column, int64_t n,
                                                     float *s, int64_t stride) {
    float *copy = t->state;
    for (int64_t i = 0; i < t->key_width; i++) UNROLL for (int j = 0; j < NARROW; j++)
        store(copy + (i * NARROW + j) * VL,
              n - j * VL > 0 ? load_first(s + i * stride + j * VL, n - j * VL) : (vf){0});
    if (by_channel) delta_columns(NARROW, 1, t, column, n, copy, NARROW * VL);
    else delta_columns(NARROW, 0, t, column, n, copy, NARROW * VL);
    for (int64_t i = 0; i < t->key_width; i++) UNROLL for (int j = 0; j < NARROW; j++)
        if (n - j * VL > 0) store_first(s + i * stride + j * VL, load(copy + (i * NARROW + j) * VL), n - j * VL);
}

// Writes the vector, scaled to unit length and multiplied by a factor.
static __attribute__((noinline)) void unit_vector(const float *x, int64_t n, float factor, float *to) {
    float inverse = 1.0f / sqrtf(squares_of(x, n) + 1e-6f);
    for (int64_t i = 0; i < n; i += VL) store(to + i, load_first(x + i, n - i) * inverse * factor);
}

// Writes the decays of n rows of a state, or of n tokens with one decay each.
static __attribute__((noinline)) void make_decays(const float *x, const float *bias, int64_t n, float rate, float *to) {
    for (int64_t i = 0; i < n; i += VL)
        store(to + i, exponential(softplus(load_first(x + i, n - i) + load_first(bias + i, n - i)) * -rate));
}

static void prepare_tokens(const Delta *d, int64_t head, int64_t row, int64_t num_tokens, DeltaTokens *t) {
    int64_t width = d->key_width, key_head = head / (d->num_heads / d->num_key_heads), keys = d->num_key_heads * width;
    float raw[DELTA_TOKENS] = {0}, bias[DELTA_TOKENS] = {0}, scale = 1.0f / sqrtf((float)width);
    t->num_tokens = num_tokens, t->key_width = width;
    t->v = d->qkv + row * d->qkv_stride + 2 * keys + head * d->value_width, t->v_stride = d->qkv_stride;
    t->out_stride = d->num_heads * d->value_width;
    t->out = d->out + row * t->out_stride + head * d->value_width;
    for (int64_t i = 0; i < num_tokens; i++) raw[i] = d->betas[(row + i) * d->betas_stride + head];
    for (int64_t i = 0; i < DELTA_TOKENS; i += VL) store(t->betas + i, logistic(load(raw + i)));
    if (!d->has_channel_decays) {
        for (int64_t i = 0; i < num_tokens; i++)
            raw[i] = d->decays[(row + i) * d->decays_stride + head], bias[i] = d->decay_bias[head];
        make_decays(raw, bias, DELTA_TOKENS, d->rates[head], t->decays);
    }
    for (int64_t i = 0; i < num_tokens; i++) {
        const float *q = d->qkv + (row + i) * d->qkv_stride + key_head * width;
        float *decays = t->decays + i * MOST_KEY_WIDTH, *k = t->k + i * MOST_KEY_WIDTH;
        unit_vector(q, width, scale, t->q + i * MOST_KEY_WIDTH);
        unit_vector(q + keys, width, 1.0f, k);
        if (d->has_channel_decays)
            make_decays(d->decays + (row + i) * d->decays_stride + head * width, d->decay_bias + head * width, width,
                        d->rates[head], decays);
        for (int64_t j = 0; j < width; j += VL)
            store(t->decayed + i * MOST_KEY_WIDTH + j,
                  load(k + j) * (d->has_channel_decays ? load(decays + j) : splat(t->decays[i])));
    }
}

static void delta_rows(const Delta *d, int64_t head, int64_t row, int64_t num_tokens, float *s, DeltaTokens *t) {
    int64_t width = d->value_width, column = 0;
    prepare_tokens(d, head, row, num_tokens, t);
    if (num_tokens == 1)
        for (; column + WIDE * VL <= width; column += WIDE * VL)
            wide_columns(t, (int)d->has_channel_decays, column, s + column, width);
    for (; column < width; column += NARROW * VL)
        narrow_columns(t, (int)d->has_channel_decays, column, MIN(width - column, NARROW * VL), s + column, width);
    for (int64_t i = 0; i < num_tokens; i++)
        gated_norm(&d->norm, d->norm.gate + (row + i) * d->norm.gate_stride + head * width,
                   d->norm.weight ? d->norm.weight + head * d->norm.weight_stride : 0, t->out + i * t->out_stride, width);
}

// Computes a head of a sequence in rows [start, stop) of the step.
static void delta_item(const Delta *d, const Sequences *s, int64_t item, int64_t start, int64_t stop) {
    DeltaTokens tokens;
    int64_t of = item / d->num_heads, head = item % d->num_heads, numbers = d->key_width * d->value_width;
    for (const Segment *g = s->segments + s->starts[of]; g < s->segments + s->starts[of + 1]; g++) {
        float *state = in_block(&d->state, g->block) + head * numbers;
        int64_t row = MAX(start, g->first), end = MIN(stop, g->stop);
        if (row >= end) continue;
        for (; row < end; row += DELTA_TOKENS) delta_rows(d, head, row, MIN(DELTA_TOKENS, end - row), state, &tokens);
        if (g->keep >= 0 && end == g->stop)
            memcpy(in_block(&d->state, g->keep) + head * numbers, state, (size_t)numbers * 4);
    }
}
