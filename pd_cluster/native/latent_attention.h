// Absorbed latent attention (MLA) over the same pool: a token keeps one latent and one rotated part for all heads.
// A head has two matrices: the first times the latent is the head's key, the second times the latent is its value. Each
// query is therefore multiplied by the first matrix and then attends to latents directly; the weighted sum of latents
// is multiplied by the second. Rows, each a head and a token, are lanes, in prompts and in decode. Keys are added CHUNK
// at a time from the first key on, so a row's bits depend neither on the chunks of its prompt nor on other rows. With
// chosen keys (sparse_index.h), all lanes of an item belong to one token.
#pragma once
#include "attention_prefill.h"

#define MAX_LATENT 512
#define MAX_ROPE 128

typedef struct {
    int64_t num_heads, width, rope_width, query_width, value_width, block_size; // query_width excludes the rotated part
    int64_t block_stride, latent_offset, rope_offset;                           // bytes
    int64_t first_key;                                                          // the first visible key
    float scaling;
    const float *keys;   // [num_heads, query_width, width]
    const float *values; // [num_heads, width, value_width]
    const int32_t *chosen; // [num_tokens, most]: keys of tokens that see more than `most`; null: all keys are visible
    int64_t most;
} Latents;

typedef struct {
    const Step *step;
    const Latents *layer;
    char *pool;
    const float *queries, *latents, *ropes;
    float *out;
    int64_t token_counter, item_counter;
    const int64_t *item_starts; // [2 * num_seqs + 1], in the step's order: a sequence's first item, then its first item
                                // of tokens that see only chosen keys
    int64_t few;                // rows per item of sequences with few tokens
} LatentWork;

// The lanes of one item: rows of one sequence, each a head and a token.
typedef struct {
    int64_t seq, num_rows, head[LANES], token[LANES]; // each lane's head and token (index in the step)
    const int32_t *chosen;                            // keys that the only token sees; null: all before each token
} Rows;

static void keep_token(const LatentWork *w, int64_t token) {
    const Step *s = w->step;
    const Latents *y = w->layer;
    int64_t block = s->slots[token] / y->block_size, offset = s->slots[token] % y->block_size, dim = y->rope_width;
    char *place = w->pool + block * y->block_stride;
    float rotated[MAX_ROPE];
    rotate(w->ropes + token * dim, s->cos + token * dim, s->sin + token * dim, 0, 0, dim, rotated);
    put_vector(w->latents + token * y->width, y->width, place + y->latent_offset + offset * vector_nbytes(y->width));
    put_vector(rotated, dim, place + y->rope_offset + offset * vector_nbytes(dim));
}

// Writes the addresses of visible latents and rotated parts [start, start + n); repeats the last up to a whole PAD.
static void locate_latents(const LatentWork *w, const Rows *rows, int64_t start, int64_t n, const char **k,
                           const char **r) {
    const Latents *y = w->layer;
    const int32_t *table = w->step->block_table + w->step->table_starts[rows->seq];
    int64_t block = start / y->block_size, offset = start % y->block_size;
    for (int64_t j = 0; rows->chosen && j < n; j++) {
        uint32_t at = (uint32_t)rows->chosen[start + j], size = (uint32_t)y->block_size;
        const char *place = w->pool + table[at / size] * y->block_stride;
        k[j] = place + y->latent_offset + at % size * vector_nbytes(y->width);
        r[j] = place + y->rope_offset + at % size * vector_nbytes(y->rope_width);
    }
    for (int64_t j = rows->chosen ? n : 0; j < n; block++, offset = 0) {
        const char *place = w->pool + table[block] * y->block_stride;
        for (int64_t stop = MIN(n, j + y->block_size - offset); j < stop; j++, offset++) {
            k[j] = place + y->latent_offset + offset * vector_nbytes(y->width);
            r[j] = place + y->rope_offset + offset * vector_nbytes(y->rope_width);
        }
    }
    for (int64_t j = n; j < (n + PAD - 1) / PAD * PAD; j++) k[j] = k[n - 1], r[j] = r[n - 1];
}

// ---- products with a head's matrix [n, width]

// For lanes of one head: t->acc = x transposed times the matrix, where x[i] is lane i's row of n numbers.
INLINE void multiply_lanes(Tile *t, int lv, const float **x, int64_t n, const float *matrix) {
    const float *rows[CHUNK];
    const vf same[2] = {splat(1.0f), splat(1.0f)};
    for (int64_t d = 0; d < t->dim; d++) UNROLL for (int c = 0; c < lv; c++) *(vf *)(t->acc[d] + c * VL) = (vf){0};
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t num = MIN(CHUNK, n - at);
        for (int64_t j = 0; j < num; j++) {
            rows[j] = matrix + (at + j) * t->dim;
            for (int64_t i = 0; i < lv * VL; i++) t->p[j][i] = x[i][at + j];
        }
        add_lanes(t, lv, rows, num, same);
    }
}

// For one lane: out = x times the matrix, with the same order of sums.
static void multiply_row(const float *x, int64_t n, const float *matrix, int64_t width, float *out) {
    memset(out, 0, (size_t)width * 4);
    int64_t j = 0;
    for (; j + 4 <= n; j += 4, matrix += 4 * width) for (int64_t d = 0; d < width; d += VL) {
        vf sum = load(out + d);
        UNROLL for (int i = 0; i < 4; i++) sum += load(matrix + i * width + d) * splat(x[j + i]);
        store(out + d, sum);
    }
    for (; j < n; j++, matrix += width) for (int64_t d = 0; d < width; d += VL)
        store(out + d, load(out + d) + load(matrix + d) * splat(x[j]));
}

// Sets t->acc to each lane's row x[i] times its head's matrix. Either all lanes have one head, or there are few lanes.
INLINE void multiply(Tile *t, int lv, const Rows *rows, const float **x, int64_t n, const float *matrices) {
    if (rows->head[0] == rows->head[rows->num_rows - 1] && rows->num_rows > 1) {
        multiply_lanes(t, lv, x, n, matrices + rows->head[0] * n * t->dim);
        return;
    }
    float row[MAX_LATENT];
    for (int64_t i = 0; i < rows->num_rows; i++) {
        multiply_row(x[i], n, matrices + rows->head[i] * n * t->dim, t->dim, row);
        for (int64_t d = 0; d < t->dim; d++) t->acc[d][i] = row[d];
    }
    for (int64_t d = 0; d < t->dim; d++)
        for (int64_t i = rows->num_rows; i < lv * VL; i++) t->acc[d][i] = t->acc[d][rows->num_rows - 1];
}

// ---- one item

// Sets t->q from the lanes' queries: first the absorbed part, then the rotated part, both scaled.
INLINE void load_queries(Tile *t, int lv, const LatentWork *w, const Rows *rows) {
    const Latents *y = w->layer;
    const Step *s = w->step;
    int64_t dim = y->rope_width, row_width = y->query_width + dim;
    float scale = y->scaling * LOG2E, rotated[MAX_ROPE];
    const float *x[LANES];
    for (int64_t i = 0; i < lv * VL; i++) {
        int64_t token = rows->token[i];
        x[i] = w->queries + (token * y->num_heads + rows->head[i]) * row_width;
        rotate(x[i] + y->query_width, s->cos + token * dim, s->sin + token * dim, 0, 0, dim, rotated);
        for (int64_t d = 0; d < dim; d++) t->q[y->width + d][i] = rotated[d] * scale;
    }
    multiply(t, lv, rows, x, y->query_width, y->keys);
    for (int64_t d = 0; d < y->width; d++) UNROLL for (int c = 0; c < lv; c++) {
        *(vf *)(t->q[d] + c * VL) = *(const vf *)(t->acc[d] + c * VL) * scale;
        *(vf *)(t->acc[d] + c * VL) = (vf){0};
    }
}

INLINE void attend_latents(Tile *t, int lv, const LatentWork *w, const Rows *rows, int64_t stop, int64_t least) {
    const Latents *y = w->layer;
    const char *stored_k[2][CHUNK], *stored_r[2][CHUNK]; // of this chunk and of the next
    const float *k[CHUNK], *r[CHUNK];
    float *numbers = POOL == POOL_FLOAT32 ? 0 : alloca((size_t)(CHUNK * (y->width + y->rope_width)) * 4);
    int which = 0;
    locate_latents(w, rows, y->first_key, MIN(CHUNK, stop - y->first_key), stored_k[0], stored_r[0]);
    for (int64_t at = y->first_key; at < stop; at += CHUNK, which = !which) {
        int64_t n = MIN(CHUNK, stop - at), next = stop - at - n;
        vf fade[2];
        as_numbers(y->width, stored_k[which], n, numbers, k);
        as_numbers(y->rope_width, stored_r[which], n, numbers + CHUNK * y->width, r);
        if (next) locate_latents(w, rows, at + n, MIN(CHUNK, next), stored_k[!which], stored_r[!which]);
        const float **ahead = (const float **)stored_k[next >= CHUNK ? !which : which];
        score_lanes(t, lv, k, r, y->rope_width, n, POOL == POOL_FLOAT32 ? ahead : 0);
        if (at + n - 1 > least) mask_lanes(t, lv, at, n, 0);
        UNROLL for (int c = 0; c < lv; c++) soften_lanes(t, c, n, fade);
        add_lanes(t, lv, k, n, fade);
    }
}

// Writes each lane's result: its sums, divided by the total weight, times its head's matrix of values.
INLINE void store_values(Tile *t, int lv, const LatentWork *w, const Rows *rows, float (*shares)[MAX_LATENT]) {
    const Latents *y = w->layer;
    const float *x[LANES];
    for (int64_t i = 0; i < lv * VL; i++) {
        float share = 1.0f / t->l[i / VL][i % VL];
        for (int64_t d = 0; d < y->width; d++) shares[i][d] = t->acc[d][i] * share;
        x[i] = shares[i];
    }
    t->dim = y->value_width;
    multiply(t, lv, rows, x, y->width, y->values);
    for (int64_t i = 0; i < rows->num_rows; i++) {
        float *out = w->out + (rows->token[i] * y->num_heads + rows->head[i]) * y->value_width;
        for (int64_t d = 0; d < y->value_width; d++) out[d] = t->acc[d][i];
    }
}

INLINE void attend_rows(int lv, const LatentWork *w, const Rows *rows) {
    const Step *s = w->step;
    ALIGNED float q[MAX_LATENT + MAX_ROPE][LANES], acc[MAX_LATENT][LANES];
    float shares[LANES][MAX_LATENT];
    Tile tile, *t = &tile;
    t->q = q, t->acc = acc;
    t->dim = w->layer->width, t->num_rows = rows->num_rows;
    int64_t behind = s->context_lens[rows->seq] - s->query_starts[rows->seq + 1], least = INT64_MAX, stop = 0;
    for (int64_t i = 0; i < LANES; i++) {
        int64_t token = rows->token[i], last = s->key_limits ? s->key_limits[token] - 1 : behind + token;
        t->last[i / VL][i % VL] = (int32_t)last;
        least = MIN(least, last), stop = MAX(stop, last + 1);
    }
    if (rows->chosen) least = INT64_MAX, stop = w->layer->most;
    for (int c = 0; c < 2; c++) t->m[c] = splat(NEVER), t->l[c] = (vf){0};
    load_queries(t, lv, w, rows);
    attend_latents(t, lv, w, rows, stop, least);
    store_values(t, lv, w, rows, shares);
}

// These are separate functions so that their stack memory is released after each item.
static __attribute__((noinline)) void attend_half(const LatentWork *w, const Rows *rows) { attend_rows(1, w, rows); }
static __attribute__((noinline)) void attend_whole(const LatentWork *w, const Rows *rows) { attend_rows(2, w, rows); }

// ---- the work of one call

static int has_few(int64_t query_len) { return query_len < VL; }

// Returns a sequence's first token that sees only chosen keys, or the end of the sequence's tokens.
static int64_t first_choosing(const Step *s, const Latents *y, int64_t seq) {
    int64_t start = s->query_starts[seq], stop = s->query_starts[seq + 1];
    return y->chosen ? MIN(stop, MAX(start, y->most + stop - s->context_lens[seq])) : stop;
}

static int64_t num_latent_items(const Latents *y, int64_t query_len, int64_t few) {
    if (has_few(query_len)) return (y->num_heads * query_len + few - 1) / few;
    return y->num_heads * ((query_len + LANES - 1) / LANES);
}

// Finds the rows of item `index`; `at` is an earlier item's position in item_starts. Returns 0 past the last item.
static int find_rows(const LatentWork *w, int64_t index, int64_t *at, Rows *rows) {
    const Step *s = w->step;
    const Latents *y = w->layer;
    if (index >= w->item_starts[2 * s->num_seqs]) return 0;
    while (index >= w->item_starts[*at + 1]) ++*at;
    int64_t seq = s->order[*at / 2], inner = index - w->item_starts[*at], start = s->query_starts[seq];
    int64_t middle = first_choosing(s, y, seq), query_len = middle - start, first, stop;
    rows->seq = seq, rows->chosen = 0;
    if (*at % 2) { // heads of one token
        int64_t groups = (y->num_heads + w->few - 1) / w->few, token = middle + inner / groups;
        first = inner % groups * w->few, stop = MIN(first + w->few, y->num_heads);
        rows->chosen = y->chosen + token * y->most, query_len = 1, start = token;
    } else if (has_few(query_len)) {
        first = inner * w->few, stop = MIN(first + w->few, y->num_heads * query_len);
    } else { // tiles of one head, the longest first
        int64_t tiles = (query_len + LANES - 1) / LANES, tile = tiles - 1 - inner / y->num_heads;
        int64_t head = inner % y->num_heads;
        first = head * query_len + tile * LANES, stop = MIN(first + LANES, (head + 1) * query_len);
    }
    rows->num_rows = stop - first;
    for (int64_t i = 0; i < LANES; i++) {
        int64_t row = MIN(first + i, stop - 1);
        rows->head[i] = row / query_len, rows->token[i] = start + row % query_len;
    }
    return 1;
}

static void latents_work(void *data) {
    LatentWork *w = data;
    const Step *s = w->step;
    Rows rows;
    int64_t at = 0;
    for (int64_t token; (token = next_items(&w->token_counter, 4)) < s->num_tokens;)
        for (int64_t t = token; t < MIN(token + 4, s->num_tokens); t++) keep_token(w, t);
    if (s->num_threads > 1) runtime.barrier(); // all latents are written
    while (find_rows(w, next_items(&w->item_counter, 1), &at, &rows)) {
        if (rows.num_rows > VL) attend_whole(w, &rows);
        else attend_half(w, &rows);
    }
}

// Returns the rows per item for sequences with few tokens, so that each thread gets an item if there are enough rows.
static int64_t few_rows(const Step *s, const Latents *y) {
    int64_t rows = y->num_heads * s->num_tokens, share = (rows + s->num_threads - 1) / s->num_threads;
    return MAX(1, MIN(share, LANES));
}

// queries [num_tokens, num_heads, query_width + rope_width] and ropes [num_tokens, rope_width], both not yet rotated;
// latents [num_tokens, width], normed; out [num_tokens, num_heads, value_width]. The caller has checked every block,
// slot and shape; all widths except query_width are multiples of 16.
void pd_latents(const Step *step, const Latents *layer, char *pool, const float *queries, const float *latents,
                const float *ropes, float *out) {
    int64_t *starts = alloca((size_t)(2 * step->num_seqs + 1) * sizeof(int64_t)), few = few_rows(step, layer);
    starts[0] = 0;
    for (int64_t i = 0; i < step->num_seqs; i++) {
        int64_t seq = step->order[i], middle = first_choosing(step, layer, seq), query_len = middle - step->query_starts[seq];
        starts[2 * i + 1] = starts[2 * i] + (query_len ? num_latent_items(layer, query_len, few) : 0);
        int64_t groups = (layer->num_heads + few - 1) / few;
        starts[2 * i + 2] = starts[2 * i + 1] + (step->query_starts[seq + 1] - middle) * groups;
    }
    LatentWork work = {step, layer, pool, queries, latents, ropes, out, 0, 0, starts, few};
    run(latents_work, &work, step->num_threads);
}
