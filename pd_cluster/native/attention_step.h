// Types and functions that both forms of attention share (see paged_attention.h): the step, the layer, the pool's rows.
#pragma once
#include <alloca.h>
#include <math.h>

#include "pool_vectors.h"

#define MAX_DIM 256
#define MAX_GROUP 8 // larger groups fill all lanes with one token's heads
#define CHUNK 64    // keys that are processed at a time
#ifndef DECODE_CHUNK
#define DECODE_CHUNK 32 // keys at a time, for all heads of a sequence
#endif
#define PAD 16      // the largest number of keys that one operation processes
// Limits of a decode item: sequences, their query heads per KV head, and bytes of queries and sums.
#define MOST_ROWS_TOGETHER 16
#define MOST_HEADS_TOGETHER 64
#define TOGETHER_NBYTES (1 << 18)
#define LANES (2 * VL)
_Static_assert(CHUNK % PAD == 0 && DECODE_CHUNK % PAD == 0 && PAD % VL == 0 && PAD % KR == 0, "tiles fit");
#define NEVER -1e30f // below every score, but finite, so that differences are never NaN
#define LOG2E 1.44269504f

typedef struct {
    int64_t num_tokens, num_seqs, num_threads;
    const int32_t *query_starts, *context_lens, *block_table, *table_starts, *order;
    // [num_seqs] or null, in the order of `order`: for the first of several sequences that share a table, their number;
    // for the others 0. The shortest comes first.
    const int32_t *together;
    const int64_t *slots;
    const float *cos, *sin; // [num_tokens, head_dim]
    const int32_t *key_limits; // [num_tokens] or null: ends of visible keys, which may follow the token
} Step;

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, window, first_key, block_size;
    int64_t block_stride, key_offset, value_offset; // bytes
    float scaling, softcap, eps;
    const float *q_norm, *k_norm;
    const float *sinks; // [num_heads] or null: scores of one more key, whose value is zero
} Layer;

typedef struct {
    const Step *step;
    const Layer *layer;
    char *pool;
    float *qkv, *out;
    int64_t token_counter, item_counter;
    const int64_t *item_starts; // [num_seqs + 1]: each sequence's first item, in the step's order
    int64_t decode_parts;       // number of items into which the KV heads of a decoding sequence are divided
    int64_t row_parts;          // number of items into which the rows of one table are divided
} Work;

// ---- before attention

INLINE void rotate(const float *x, const float *cos, const float *sin, const float *weight, float eps, int64_t dim,
                   float *out) {
    float scale = 1.0f;
    int64_t half = dim / 2;
    float left[MAX_DIM / 2], right[MAX_DIM / 2];
    if (weight) {
        vf squares = {0};
        for (int64_t i = 0; i < dim; i += VL) squares += load(x + i) * load(x + i);
        scale = 1.0f / sqrtf(sum_of(squares) / (float)dim + eps);
        for (int64_t i = 0; i < half; i++) left[i] = x[i] * scale * weight[i];
        for (int64_t i = 0; i < half; i++) right[i] = x[half + i] * scale * weight[half + i];
    } else {
        memcpy(left, x, (size_t)half * 4);
        memcpy(right, x + half, (size_t)half * 4);
    }
    for (int64_t i = 0; i < half; i++) out[i] = left[i] * cos[i] - right[i] * sin[i];
    for (int64_t i = 0; i < half; i++) out[half + i] = right[i] * cos[half + i] + left[i] * sin[half + i];
}

static void prepare_token(const Work *w, int64_t token) {
    const Step *s = w->step;
    const Layer *y = w->layer;
    int64_t dim = y->head_dim, row = (y->num_heads + 2 * y->num_kv_heads) * dim;
    float *q = w->qkv + token * row;
    const float *k = q + y->num_heads * dim, *v = k + y->num_kv_heads * dim;
    const float *cos = s->cos + token * dim, *sin = s->sin + token * dim;
    int64_t block = s->slots[token] / y->block_size, offset = s->slots[token] % y->block_size;
    int64_t nbytes = vector_nbytes(dim);
    char *place = w->pool + block * y->block_stride + offset * y->num_kv_heads * nbytes;
    for (int64_t h = 0; h < y->num_heads; h++) rotate(q + h * dim, cos, sin, y->q_norm, y->eps, dim, q + h * dim);
    for (int64_t h = 0; h < y->num_kv_heads; h++) {
        float key[MAX_DIM];
        rotate(k + h * dim, cos, sin, y->k_norm, y->eps, dim, key);
        put_vector(key, dim, place + y->key_offset + h * nbytes);
        put_vector(v + h * dim, dim, place + y->value_offset + h * nbytes);
    }
}

// ---- keys and values of one sequence and head

typedef struct {
    const char *keys, *values; // of block 0
    const int32_t *table;
    int64_t block_stride, row_stride, block_size; // strides in bytes
} Source;

// In decode: some KV heads of one sequence, or of several sequences that share a table, shortest first. Otherwise: one
// KV head, and `num_rows` rows from first_row on, of query_len * group rows in all.
typedef struct {
    Source source;
    const float *q; // address of the group's first head in the step's first token
    float *out;
    const float *sinks; // at the group's first head, or null
    const int32_t *key_limits; // at the first token, or null
    int64_t num_heads, query_len, first_row, num_rows;
    int64_t tokens[MOST_ROWS_TOGETHER], context_lens[MOST_ROWS_TOGETHER]; // [num_rows]; tokens: first of each sequence
} Item;

// Writes the addresses of keys and values [start, start + n); repeats the last one up to a whole PAD.
static void locate(const Source *s, int64_t start, int64_t n, const char **k, const char **v) {
    int64_t block = start / s->block_size, offset = start % s->block_size;
    for (int64_t j = 0; j < n;) {
        int64_t at = s->table[block] * s->block_stride + offset * s->row_stride;
        int64_t stop = MIN(n, j + s->block_size - offset);
        for (; j < stop; j++, at += s->row_stride) {
            k[j] = s->keys + at;
            v[j] = s->values + at;
        }
        block++;
        offset = 0;
    }
    for (int64_t j = n; j < (n + PAD - 1) / PAD * PAD; j++) k[j] = k[n - 1], v[j] = v[n - 1];
}

// Returns softcap * tanh(score / softcap) in units of log 2; x is 2 * log2(e) * score / softcap.
INLINE vf cap(vf x, float softcap) {
    vf e = exp2v(-vmax(splat(-126.0f), -x));
    return (1.0f - 2.0f / (e + 1.0f)) * (softcap * LOG2E);
}

INLINE int64_t first_seen(const Layer *y, int64_t position) {
    return y->window ? MAX(y->first_key, position - y->window + 1) : y->first_key;
}

INLINE float query_scale(const Layer *y) { return y->scaling * LOG2E * (y->softcap > 0 ? 2.0f / y->softcap : 1.0f); }
