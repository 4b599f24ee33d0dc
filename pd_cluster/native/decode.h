// One query token: a run of KV heads of one sequence goes over the keys together, some keys at a time, so that memory
// is read in the order it lies in, once, and fetched ahead.
#pragma once
#include "paged.h"

#define AHEAD_HINT 2 // the L2 cache: a chunk of all heads exceeds L1

// A prefetch in progress: rows of `pieces` heads each, one after the other.
typedef struct {
    const char **rows;
    int64_t row, end, piece, pieces;
} Ahead;

INLINE void fetch(Ahead *ahead, int64_t dim) {
    if (!ahead || ahead->row >= ahead->end) return;
    const char *from = ahead->rows[ahead->row] + ahead->piece * vector_nbytes(dim);
    UNROLL for (int64_t at = 0; at < vector_nbytes(dim); at += 64) __builtin_prefetch(from + at, 0, AHEAD_HINT);
    if (++ahead->piece == ahead->pieces) ahead->piece = 0, ahead->row++;
}

// Computes scores[g][j] = q[g] . (k[j] + at) for `heads` query heads; n keys, rounded up to whole vectors.
INLINE void score_keys(int64_t dim, int heads, const float *q, const char **k, int64_t at, int64_t n,
                       float (*scores)[CHUNK], Ahead *ahead) {
    for (int64_t j0 = 0; j0 < n; j0 += VL) {
        vf parts[GT][VL], scales = splat(1.0f);
        for (int j = 0; j < VL; j++) {
            const char *key = k[j0 + j] + at;
            vf sum[GT], first = numbers_at(key, 0, dim);
            fetch(ahead, dim);
            if (IS_CODED) scales[j] = scale_of(key, dim);
            UNROLL for (int g = 0; g < heads; g++) sum[g] = load(q + g * dim) * first;
            UNROLL for (int64_t d = VL; d < dim; d += VL) {
                vf part = numbers_at(key, d, dim);
                UNROLL for (int g = 0; g < heads; g++) sum[g] += load(q + g * dim + d) * part;
            }
            UNROLL for (int g = 0; g < heads; g++) parts[g][j] = sum[g];
        }
        UNROLL for (int g = 0; g < heads; g++)
            store(scores[g] + j0, IS_CODED ? sums_of(parts[g]) * scales : sums_of(parts[g]));
    }
}

// Computes acc[g] = acc[g] * fade[g] + sum over j of weights[g][j] * (v[j] + at)[d ...], for `width` vectors.
INLINE void add_columns(int64_t dim, int heads, int width, const char **v, int64_t at, int64_t d, int64_t n,
                        float (*weights)[CHUNK], const float *fade, float *acc, Ahead *ahead) {
    vf sum[GT][4];
    UNROLL for (int g = 0; g < heads; g++) UNROLL for (int i = 0; i < width; i++)
        sum[g][i] = load(acc + g * dim + i * VL) * fade[g];
    for (int64_t j = 0; j < n; j++) {
        fetch(ahead, dim);
        UNROLL for (int i = 0; i < width; i++) {
            vf part = numbers_at(v[j] + at, d + i * VL, dim);
            UNROLL for (int g = 0; g < heads; g++) sum[g][i] += part * weights[g][j];
        }
    }
    UNROLL for (int g = 0; g < heads; g++) UNROLL for (int i = 0; i < width; i++)
        store(acc + g * dim + i * VL, sum[g][i]);
}

INLINE void add_values(int64_t dim, int heads, const char **v, int64_t at, int64_t n, float (*weights)[CHUNK],
                       const float *fade, float *acc, Ahead *ahead) {
    int64_t d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL)
        add_columns(dim, heads, 4, v, at, d, n, weights, fade, acc + d, d ? 0 : ahead);
    for (; d < dim; d += VL) add_columns(dim, heads, 1, v, at, d, n, weights, fade, acc + d, d ? 0 : ahead);
}

// Turns scores [n] into weights 2^(score - m), with zeros up to a whole vector. Returns the factor for older sums.
INLINE float soften(float *scores, int64_t n, float softcap, float *m, float *l) {
    vf most = splat(*m), sum = {0};
    for (int64_t j = 0; j < n; j += VL) {
        vf score = load(scores + j);
        if (softcap > 0) score = cap(score, softcap);
        if (j + VL > n) score = first_lanes(score, n - j);
        if (softcap > 0 || j + VL > n) store(scores + j, score);
        most = vmax(most, score);
    }
    float now = max_of(most);
    for (int64_t j = 0; j < n; j += VL) {
        vf weight = exp2v(load(scores + j) - now);
        store(scores + j, weight);
        sum += weight;
    }
    float fade = exp2v(splat(*m - now))[0];
    *l = *l * fade + sum_of(sum);
    *m = now;
    return fade;
}

// Processes one chunk for one KV head and its group; m and l as above. Prefetches next_k and next_v.
INLINE void decode_head(const Layer *y, int64_t dim, const float *q, const char **k, const char **v, int64_t at,
                        int64_t n, float *acc, float *m, float *l, Ahead *next_k, Ahead *next_v) {
    int64_t group = y->num_heads / y->num_kv_heads, g = 0;
    ALIGNED float scores[MAX_GROUP][CHUNK];
    float fade[MAX_GROUP];
    for (; g + GT <= group; g += GT) score_keys(dim, GT, q + g * dim, k, at, n, scores + g, g ? 0 : next_k);
#if GT == 4
    if (group - g == 3) score_keys(dim, 3, q + g * dim, k, at, n, scores + g, g ? 0 : next_k), g += 3;
    if (group - g == 2) score_keys(dim, 2, q + g * dim, k, at, n, scores + g, g ? 0 : next_k), g += 2;
#endif
    if (group - g == 1) score_keys(dim, 1, q + g * dim, k, at, n, scores + g, g ? 0 : next_k);
    for (g = 0; g < group; g++) fade[g] = soften(scores[g], n, y->softcap, m + g, l + g);
    for (int64_t j = 0; IS_CODED && j < n; j++)
        for (g = 0; g < group; g++) scores[g][j] *= scale_of(v[j] + at, dim);
    for (g = 0; g + GT <= group; g += GT)
        add_values(dim, GT, v, at, n, scores + g, fade + g, acc + g * dim, g ? 0 : next_v);
#if GT == 4
    if (group - g == 3)
        add_values(dim, 3, v, at, n, scores + g, fade + g, acc + g * dim, g ? 0 : next_v), g += 3;
    if (group - g == 2)
        add_values(dim, 2, v, at, n, scores + g, fade + g, acc + g * dim, g ? 0 : next_v), g += 2;
#endif
    if (group - g == 1) add_values(dim, 1, v, at, n, scores + g, fade + g, acc + g * dim, g ? 0 : next_v);
}

INLINE void decode_dim(const Layer *y, int64_t dim, const Item *item, const Item *after) {
    int64_t group = y->num_heads / y->num_kv_heads, rows = item->num_heads * group, context_len = item->context_len;
    float *scaled = alloca((size_t)(rows * dim) * 4), *acc = alloca((size_t)(rows * dim) * 4);
    float *m = alloca((size_t)rows * 4), *l = alloca((size_t)rows * 4), scale = query_scale(y);
    const char *buffer[4][CHUNK], **k = buffer[0], **v = buffer[1], **next = buffer[2], **next_v = buffer[3];
    for (int64_t i = 0; i < rows * dim; i++) scaled[i] = item->q[i] * scale, acc[i] = 0;
    for (int64_t i = 0; i < rows; i++) m[i] = item->sinks ? item->sinks[i] * LOG2E : NEVER, l[i] = item->sinks ? 1 : 0;
    int64_t at = first_seen(y, context_len - 1), n = MIN(DECODE_CHUNK, context_len - at), num_next;
    locate(&item->source, at, n, k, v);
    for (; n; at += n, n = num_next) {
        num_next = MIN(DECODE_CHUNK, context_len - at - n);
        const Item *owner = num_next || !after ? item : after;
        int64_t start = owner == item ? at + n : first_seen(y, after->context_len - 1);
        int64_t num_ahead = MIN(DECODE_CHUNK, owner->context_len - start);
        locate(&owner->source, start, num_ahead, next, next_v);
        Ahead ahead_k = {next, 0, num_ahead, 0, owner->num_heads}, ahead_v = ahead_k;
        ahead_v.rows = next_v;
        for (int64_t h = 0, r = 0; h < item->num_heads; h++, r += group)
            decode_head(y, dim, scaled + r * dim, k, v, h * vector_nbytes(dim), n, acc + r * dim, m + r, l + r,
                        &ahead_k, &ahead_v);
        const char **old_k = k, **old_v = v;
        k = next, v = next_v, next = old_k, next_v = old_v;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d++) item->out[r * dim + d] = acc[r * dim + d] / l[r];
}

// `after` is this thread's next item, if known: its first keys are prefetched with this item's last ones.
static void decode(const Layer *y, const Item *item, const Item *after) {
    switch (y->head_dim) { // the common sizes have their loops unrolled
    case 64: decode_dim(y, 64, item, after); break;
    case 128: decode_dim(y, 128, item, after); break;
    default: decode_dim(y, y->head_dim, item, after);
    }
}
