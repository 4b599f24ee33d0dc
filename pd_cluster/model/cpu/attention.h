// Paged attention over the block-major pool, with what comes just before it: norms of q and k, rotation, KV write.
//
// Two forms. Decoding (one query): KV heads of a sequence together, vectors run along the head dimension. Otherwise one
// KV head at a time and queries are the lanes of vectors: a tile of up to 2 * VL (token, head) rows is transposed once,
// keys and values are broadcast as they lie in the pool, and the softmax needs no sum across a vector. Both are online:
// a running maximum m and sum l per row. What a row computes does not depend on what else is in the batch.
#pragma once
#include <alloca.h>
#include <math.h>

#include "team.h"
#include "vector.h"

#define MAX_DIM 256
#define MAX_GROUP 8 // larger groups fill the lanes by themselves
#define CHUNK 64    // keys at a time
#ifndef DECODE_CHUNK
#define DECODE_CHUNK 32 // of all heads of a sequence
#endif
#define PAD 16      // what is done at once with keys: at most this many
#define LANES (2 * VL)
_Static_assert(CHUNK % PAD == 0 && DECODE_CHUNK % PAD == 0 && PAD % VL == 0 && PAD % KR == 0, "tiles fit");
#define NEVER -1e30f // below every score, and finite: differences stay numbers
#define LOG2E 1.44269504f

typedef struct {
    int64_t num_tokens, num_seqs, num_threads;
    const int32_t *query_starts, *context_lens, *block_table, *table_starts, *order;
    const int64_t *slots;
    const float *cos, *sin; // [num_tokens, head_dim]
} Step;

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, window, block_size;
    int64_t block_stride, key_offset, value_offset; // floats
    float scaling, softcap, eps;
    const float *q_norm, *k_norm;
} Layer;

typedef struct {
    const Step *step;
    const Layer *layer;
    float *pool, *qkv, *out;
    int64_t token_counter, item_counter;
    const int64_t *item_starts; // in the step's order
    int64_t decode_parts;       // items that the KV heads of a decoding sequence are shared among
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
    float *place = w->pool + block * y->block_stride + offset * y->num_kv_heads * dim;
    for (int64_t h = 0; h < y->num_heads; h++) rotate(q + h * dim, cos, sin, y->q_norm, y->eps, dim, q + h * dim);
    for (int64_t h = 0; h < y->num_kv_heads; h++)
        rotate(k + h * dim, cos, sin, y->k_norm, y->eps, dim, place + y->key_offset + h * dim);
    memcpy(place + y->value_offset, v, (size_t)(y->num_kv_heads * dim) * 4);
}

// ---- keys and values of one sequence and head

typedef struct {
    const float *keys, *values; // of block 0
    const int32_t *table;
    int64_t block_stride, row_stride, block_size;
} Source;

// Some KV heads of one sequence (one unless it decodes); of query_len * group rows those from first_row on.
typedef struct {
    Source source;
    const float *q; // at the first token's and the group's first head
    float *out;
    int64_t num_heads, query_len, context_len, first_row;
} Item;

// Addresses of keys and values [start, start + n); the last is repeated up to a whole PAD.
static void locate(const Source *s, int64_t start, int64_t n, const float **k, const float **v) {
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

// softcap * tanh(score / softcap) in units of log 2, where x is 2 * log2(e) * score / softcap.
INLINE vf cap(vf x, float softcap) {
    vf e = exp2v(-vmax(splat(-126.0f), -x));
    return (1.0f - 2.0f / (e + 1.0f)) * (softcap * LOG2E);
}

INLINE int64_t first_seen(const Layer *y, int64_t position) { return y->window ? MAX(0, position - y->window + 1) : 0; }

INLINE float query_scale(const Layer *y) { return y->scaling * LOG2E * (y->softcap > 0 ? 2.0f / y->softcap : 1.0f); }

#include "decode.h"
#include "lanes.h"

// ---- the work of one call

static int is_decode(const Layer *y, int64_t query_len) {
    return query_len == 1 && y->num_heads <= MAX_GROUP * y->num_kv_heads;
}

static int64_t num_items(const Layer *y, int64_t query_len, int64_t decode_parts) {
    int64_t group = y->num_heads / y->num_kv_heads;
    return is_decode(y, query_len) ? decode_parts : (query_len * group + LANES - 1) / LANES * y->num_kv_heads;
}

// Item number `index`, where `at` is the place in the step's order of an earlier one. False past the last.
static int find_item(const Work *w, int64_t index, int64_t *at, Item *item) {
    const Step *s = w->step;
    const Layer *y = w->layer;
    if (index >= w->item_starts[s->num_seqs]) return 0;
    while (index >= w->item_starts[*at + 1]) ++*at;
    int64_t seq = s->order[*at], inner = index - w->item_starts[*at], kv_head, stop, tile = 0;
    int64_t dim = y->head_dim, group = y->num_heads / y->num_kv_heads, start = s->query_starts[seq];
    item->query_len = s->query_starts[seq + 1] - start;
    if (is_decode(y, item->query_len)) {
        kv_head = y->num_kv_heads * inner / w->decode_parts;
        stop = y->num_kv_heads * (inner + 1) / w->decode_parts;
    } else {
        int64_t tiles = (w->item_starts[*at + 1] - w->item_starts[*at]) / y->num_kv_heads;
        kv_head = inner / tiles, stop = kv_head + 1;
        tile = tiles - 1 - inner % tiles; // the longest first
    }
    const float *head = w->pool + kv_head * dim;
    item->source = (Source){head + y->key_offset, head + y->value_offset, s->block_table + s->table_starts[seq],
                            y->block_stride,      y->num_kv_heads * dim,  y->block_size};
    item->q = w->qkv + start * (y->num_heads + 2 * y->num_kv_heads) * dim + kv_head * group * dim;
    item->out = w->out + (start * y->num_heads + kv_head * group) * dim;
    item->num_heads = stop - kv_head;
    item->context_len = s->context_lens[seq];
    item->first_row = tile * LANES;
    return 1;
}

static void attend_work(void *data) {
    Work *w = data;
    const Step *s = w->step;
    Item items[2], *item = items, *after = items + 1;
    int64_t at = 0;
    for (int64_t token; (token = next_items(&w->token_counter, 4)) < s->num_tokens;)
        for (int64_t t = token; t < MIN(token + 4, s->num_tokens); t++) prepare_token(w, t);
    if (s->num_threads > 1) runtime.barrier(); // every key is in its place
    int more = find_item(w, next_items(&w->item_counter, 1), &at, item);
    while (more) {
        int decodes = is_decode(w->layer, item->query_len);
        if (!decodes) attend_tile(w->layer, item);
        more = find_item(w, next_items(&w->item_counter, 1), &at, after);
        if (decodes) decode(w->layer, item, more && is_decode(w->layer, after->query_len) ? after : 0);
        Item *done = item;
        item = after, after = done;
    }
}

// qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], its queries are rotated in place;
// out [num_tokens, num_heads * head_dim]. Whoever calls has checked every block, slot and shape.
void pd_attend(const Step *step, const Layer *layer, float *pool, float *qkv, float *out) {
    int64_t *starts = alloca((size_t)(step->num_seqs + 1) * sizeof(int64_t));
    int64_t wanted = (4 * step->num_threads + step->num_seqs - 1) / step->num_seqs;
    int64_t parts = step->num_threads > 1 ? MIN(wanted, layer->num_kv_heads) : 1;
    starts[0] = 0;
    for (int64_t i = 0; i < step->num_seqs; i++) {
        int64_t seq = step->order[i], query_len = step->query_starts[seq + 1] - step->query_starts[seq];
        starts[i + 1] = starts[i] + num_items(layer, query_len, parts);
    }
    Work work = {step, layer, pool, qkv, out, 0, 0, starts, parts};
    run(attend_work, &work, step->num_threads);
}
