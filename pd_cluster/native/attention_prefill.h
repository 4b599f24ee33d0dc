// Attention of several queries. Each row, which is a token and a head of the group, is one lane of the vectors.
#pragma once
#include "attention_step.h"

typedef struct {
    int64_t dim, num_rows;       // num_rows is at most LANES
    vi position[2], last[2];     // each lane's token, and the last key that it sees
    float (*q)[LANES];           // transposed and scaled: [dim][lane]
    float (*acc)[LANES];         // sums of values, transposed: [dim][lane]
    ALIGNED float p[CHUNK][LANES]; // scores, then weights: [key][lane]
    vf m[2], l[2];
} Tile;

// Adds the products of KR keys with q to sums. Prefetches as many values of the keys `ahead`, unless that is null.
INLINE void dot_lanes(float (*q)[LANES], int lv, const float **key, int64_t dim, const float **ahead, vf (*sum)[2]) {
    for (int64_t d = 0; d < dim; d++) {
        vf part[2];
        if (ahead && d % 16 == 0) UNROLL for (int i = 0; i < KR; i++) __builtin_prefetch(ahead[i] + d, 0, 2);
        UNROLL for (int c = 0; c < lv; c++) part[c] = *(const vf *)(q[d] + c * VL);
        UNROLL for (int i = 0; i < KR; i++) {
            vf number = splat(key[i][d]);
            UNROLL for (int c = 0; c < lv; c++) sum[i][c] += number * part[c];
        }
    }
}

// Computes p[j] = k[j] . q for all lanes, KR keys at a time. Key j has `more_dim` further numbers at more[j].
// Prefetches the keys of a chunk, `ahead`, unless that is null.
INLINE void score_lanes(Tile *t, int lv, const float **k, const float **more, int64_t more_dim, int64_t n,
                        const float **ahead) {
    for (int64_t j = 0; j < n; j += KR) {
        vf sum[KR][2];
        const float *key[KR];
        UNROLL for (int i = 0; i < KR; i++) key[i] = k[j + i];
        UNROLL for (int i = 0; i < KR; i++) UNROLL for (int c = 0; c < lv; c++) sum[i][c] = (vf){0};
        dot_lanes(t->q, lv, key, t->dim, ahead ? ahead + j : 0, sum);
        if (more_dim) {
            UNROLL for (int i = 0; i < KR; i++) key[i] = more[j + i];
            dot_lanes(t->q + t->dim, lv, key, more_dim, 0, sum);
        }
        UNROLL for (int i = 0; i < KR; i++) UNROLL for (int c = 0; c < lv; c++)
            *(vf *)(t->p[j + i] + c * VL) = sum[i][c];
    }
}

// Computes acc[d] = acc[d] * fade + sum over j of v[j][d] * p[j], KR columns at a time.
INLINE void add_lanes(Tile *t, int lv, const float **v, int64_t n, const vf *fade) {
    for (int64_t d = 0; d < t->dim; d += KR) {
        vf sum[KR][2];
        UNROLL for (int i = 0; i < KR; i++) UNROLL for (int c = 0; c < lv; c++)
            sum[i][c] = *(const vf *)(t->acc[d + i] + c * VL) * fade[c];
        for (int64_t j = 0; j < n; j++) {
            const float *value = v[j] + d;
            vf p[2];
            UNROLL for (int c = 0; c < lv; c++) p[c] = *(const vf *)(t->p[j] + c * VL);
            UNROLL for (int i = 0; i < KR; i++) {
                vf part = splat(value[i]);
                UNROLL for (int c = 0; c < lv; c++) sum[i][c] += part * p[c];
            }
        }
        UNROLL for (int i = 0; i < KR; i++) UNROLL for (int c = 0; c < lv; c++)
            *(vf *)(t->acc[d + i] + c * VL) = sum[i][c];
    }
}

// Sets scores to minus infinity for keys that a lane does not see: later keys, and keys outside its window.
INLINE void mask_lanes(Tile *t, int lv, int64_t first_key, int64_t n, int64_t window) {
    for (int64_t j = 0; j < n; j++) UNROLL for (int c = 0; c < lv; c++) {
        vi key = (int32_t)(first_key + j) - (vi){0};
        vi seen = key <= t->last[c];
        if (window) seen &= key > t->position[c] - (int32_t)window;
        vf *p = (vf *)(t->p[j] + c * VL);
        *p = pick(seen, *p, splat(-INFINITY));
    }
}

INLINE void soften_lanes(Tile *t, int c, int64_t n, vf *fade) {
    vf most = t->m[c], sum = {0};
    for (int64_t j = 0; j < n; j++) most = vmax(most, *(const vf *)(t->p[j] + c * VL));
    for (int64_t j = 0; j < n; j++) {
        vf *p = (vf *)(t->p[j] + c * VL);
        *p = exp2v(*p - most);
        sum += *p;
    }
    fade[c] = exp2v(t->m[c] - most);
    t->l[c] = t->l[c] * fade[c] + sum;
    t->m[c] = most;
}

// Converts a chunk's vectors to float32 rows; the vectors of a float32 pool are used in place.
INLINE void as_numbers(int64_t dim, const char **stored, int64_t n, float *numbers, const float **rows) {
    for (int64_t j = 0; j < (n + PAD - 1) / PAD * PAD; j++) {
        if (POOL == POOL_FLOAT32) {
            rows[j] = (const float *)stored[j];
        } else {
            rows[j] = numbers + MIN(j, n - 1) * dim;
            if (j < n) take_vector(stored[j], dim, numbers + j * dim);
        }
    }
}

INLINE void attend_keys(Tile *t, int lv, const Layer *y, const Source *source, int64_t first, int64_t stop,
                        int64_t least, int64_t most) {
    const char *stored_k[CHUNK], *stored_v[CHUNK];
    const float *k[CHUNK], *v[CHUNK];
    float *numbers = POOL == POOL_FLOAT32 ? 0 : alloca((size_t)(2 * CHUNK * t->dim) * 4);
    for (int64_t at = first; at < stop; at += CHUNK) {
        int64_t n = MIN(CHUNK, stop - at);
        vf fade[2];
        locate(source, at, n, stored_k, stored_v);
        as_numbers(t->dim, stored_k, n, numbers, k);
        as_numbers(t->dim, stored_v, n, numbers + CHUNK * t->dim, v);
        score_lanes(t, lv, k, 0, 0, n, 0);
        if (y->softcap > 0)
            for (int64_t j = 0; j < n; j++) UNROLL for (int c = 0; c < lv; c++)
                *(vf *)(t->p[j] + c * VL) = cap(*(const vf *)(t->p[j] + c * VL), y->softcap);
        if (at + n - 1 > least || (y->window && at <= most - y->window)) mask_lanes(t, lv, at, n, y->window);
        UNROLL for (int c = 0; c < lv; c++) soften_lanes(t, c, n, fade);
        add_lanes(t, lv, v, n, fade);
    }
}

// Loads the tile's rows of q, transposed, one per lane. Lanes without a row repeat the last row.
static void load_tile(Tile *t, const float **rows, float scale) {
    for (int64_t d = 0; d < t->dim; d += VL) UNROLL for (int c = 0; c < 2; c++) {
        vf square[VL];
        UNROLL for (int i = 0; i < VL; i++) square[i] = load(rows[c * VL + i] + d) * scale;
        transpose(square);
        UNROLL for (int i = 0; i < VL; i++) {
            *(vf *)(t->q[d + i] + c * VL) = square[i];
            *(vf *)(t->acc[d + i] + c * VL) = (vf){0};
        }
    }
}

static void store_tile(const Tile *t, float **rows) {
    for (int c = 0; c * VL < t->num_rows; c++) {
        vf share = 1.0f / t->l[c];
        for (int64_t d = 0; d < t->dim; d += VL) {
            vf square[VL];
            UNROLL for (int i = 0; i < VL; i++) square[i] = *(const vf *)(t->acc[d + i] + c * VL) * share;
            transpose(square);
            UNROLL for (int i = 0; i < VL; i++)
                if (c * VL + i < t->num_rows) store(rows[c * VL + i] + d, square[i]);
        }
    }
}

static __attribute__((noinline)) void attend_tile(const Layer *y, const Item *item) {
    ALIGNED float q[MAX_DIM][LANES], acc[MAX_DIM][LANES];
    Tile tile, *t = &tile;
    t->q = q, t->acc = acc;
    int64_t group = y->num_heads / y->num_kv_heads, dim = y->head_dim;
    int64_t token_stride = (y->num_heads + 2 * y->num_kv_heads) * dim;
    const float *from[LANES];
    float *to[LANES];
    t->dim = dim;
    t->num_rows = MIN(LANES, item->query_len * group - item->first_row);
    for (int64_t i = 0; i < LANES; i++) {
        int64_t row = item->first_row + MIN(i, t->num_rows - 1), token = row / group, head = row % group;
        int64_t at = item->tokens[0] + token;
        from[i] = item->q + at * token_stride + head * dim;
        to[i] = item->out + (at * y->num_heads + head) * dim;
        t->position[i / VL][i % VL] = (int32_t)(item->context_lens[0] - item->query_len + token);
        t->last[i / VL][i % VL] = item->key_limits ? item->key_limits[token] - 1 : t->position[i / VL][i % VL];
    }
    load_tile(t, from, query_scale(y));
    for (int c = 0; c < 2; c++) t->m[c] = splat(NEVER), t->l[c] = splat(item->sinks ? 1 : 0);
    if (item->sinks)
        for (int64_t i = 0; i < LANES; i++)
            t->m[i / VL][i % VL] = item->sinks[(item->first_row + MIN(i, t->num_rows - 1)) % group] * LOG2E;
    int64_t least = t->position[0][0], most = t->position[1][VL - 1];
    int64_t first = first_seen(y, least), stop = t->last[1][VL - 1] + 1; // no lane sees keys beyond the last lane's
    if (t->num_rows > VL)
        attend_keys(t, 2, y, &item->source, first, stop, least, most);
    else
        attend_keys(t, 1, y, &item->source, first, stop, least, most);
    store_tile(t, to);
}
