// Attention of one query token. Consecutive KV heads of a sequence are computed together, some keys at a time, so that
// memory is read once, in order, and prefetched. Sequences that share a block table and begin at the same key are also
// computed together: their query heads join the same group. A head's sums do not depend on other heads.
#pragma once
#include "attention_many_heads.h"

// Allocates stack memory aligned to a cache line, because vectors that cross lines take twice the time.
#define LINES(nbytes) (void *)(((uintptr_t)alloca((size_t)(nbytes) + 64) + 63) & ~(uintptr_t)63)
#define AHEAD_HINT 2 // prefetch to the L2 cache, because a chunk of all heads exceeds the L1 cache

// A prefetch in progress: rows of `pieces` heads each, row by row.
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

// Makes the processor translate one address of each page before vectors are fetched from it.
INLINE void look_up(const char **k, const char **v, int64_t n, int64_t row_stride) {
    for (int64_t j = 0; j < n; j += MAX(1, PAGE_NBYTES / row_stride))
        __builtin_prefetch(k[j], 0, AHEAD_HINT), __builtin_prefetch(v[j], 0, AHEAD_HINT);
}

// Returns part of a vector, which is stored in the pool's dtype or already converted to floats.
INLINE vf numbers_of(const char *p, int64_t d, int64_t dim, int is_taken) {
    return is_taken ? load((const float *)p + d) : numbers_at(p, d, dim);
}

// Converts n vectors, rounded up to a whole PAD, to floats; also writes their factors.
INLINE void take_vectors(int64_t dim, const char **stored, int64_t at, int64_t n, const char **taken, float *factors) {
    for (int64_t j = 0; j < (n + PAD - 1) / PAD * PAD; j++) {
        UNROLL for (int64_t d = 0; d < dim; d += VL)
            store((float *)taken[j] + d, numbers_at(stored[j] + at, d, dim));
        if (IS_CODED) factors[j] = scale_of(stored[j] + at, dim);
    }
}

// Computes scores[g][j] = q[g] . (k[j] + at) for `heads` query heads; n keys, rounded up to whole vectors.
INLINE void score_keys(int64_t dim, int heads, const float *q, const char **k, int64_t at, int64_t n,
                       float (*scores)[DECODE_CHUNK], Ahead *ahead) {
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
                UNROLL for (int g = 0; g < heads; g++) sum[g] = multiply_add(load(q + g * dim + d), part, sum[g]);
            }
            UNROLL for (int g = 0; g < heads; g++) parts[g][j] = sum[g];
        }
        UNROLL for (int g = 0; g < heads; g++)
            store(scores[g] + j0, IS_CODED ? sums_of(parts[g]) * scales : sums_of(parts[g]));
    }
}

// Computes acc[g] = acc[g] * fade[g] + sum over j of weights[g][j] * (v[j] + at)[d ...], for `width` vectors.
INLINE void add_columns(int64_t dim, int heads, int is_taken, int width, const char **v, int64_t at, int64_t d,
                        int64_t n, float (*weights)[DECODE_CHUNK], const float *fade, float *acc, Ahead *ahead) {
    vf sum[GT][4];
    UNROLL for (int g = 0; g < heads; g++) UNROLL for (int i = 0; i < width; i++)
        sum[g][i] = load(acc + g * dim + i * VL) * fade[g];
    for (int64_t j = 0; j < n; j++) {
        fetch(ahead, dim);
        UNROLL for (int i = 0; i < width; i++) {
            vf part = numbers_of(v[j] + at, d + i * VL, dim, is_taken);
            UNROLL for (int g = 0; g < heads; g++) sum[g][i] = multiply_add(part, splat(weights[g][j]), sum[g][i]);
        }
    }
    UNROLL for (int g = 0; g < heads; g++) UNROLL for (int i = 0; i < width; i++)
        store(acc + g * dim + i * VL, sum[g][i]);
}

INLINE void add_values(int64_t dim, int heads, int is_taken, const char **v, int64_t at, int64_t n,
                       float (*weights)[DECODE_CHUNK], const float *fade, float *acc, Ahead *ahead) {
    int64_t d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL)
        add_columns(dim, heads, is_taken, 4, v, at, d, n, weights, fade, acc + d, d ? 0 : ahead);
    for (; d < dim; d += VL) add_columns(dim, heads, is_taken, 1, v, at, d, n, weights, fade, acc + d, d ? 0 : ahead);
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
    *l = multiply_add(splat(*l), splat(fade), splat(total_of(sum)))[0];
    *m = now;
    return fade;
}

// Does the same for up to VL heads. m, l and fade have room for VL.
INLINE void soften_heads(int64_t heads, float (*scores)[DECODE_CHUNK], int64_t n, float softcap, float *m, float *l,
                         float *fade) {
    vf rows[VL], old = load(m), sums = load(l);
    vi changes = first_lanes(splat(0), heads) == splat(0);
    UNROLL for (int g = 0; g < VL; g++) rows[g] = splat(NEVER);
    for (int64_t g = 0; g < heads; g++) for (int64_t j = 0; j < n; j += VL) {
        vf score = load(scores[g] + j);
        if (softcap > 0) score = cap(score, softcap);
        if (j + VL > n) score = first_lanes(score, n - j);
        if (softcap > 0 || j + VL > n) store(scores[g] + j, score);
        rows[g] = vmax(rows[g], score);
    }
    vf now = vmax(old, maxes_of(rows)), fades = exp2v(old - now);
    store(m, pick(changes, now, old));
    for (int64_t g = 0; g < heads; g++) {
        rows[g] = (vf){0};
        for (int64_t j = 0; j < n; j += VL) {
            vf weight = exp2v(load(scores[g] + j) - m[g]);
            store(scores[g] + j, weight);
            rows[g] += weight;
        }
    }
    store(l, pick(changes, multiply_add(sums, fades, sums_of(rows)), sums));
    store(fade, fades);
}

// Computes scores like score_keys, for keys stored as floats, and prefetches next_k and next_v.
INLINE void score_many(int64_t dim, int64_t heads, const float *q, const char **k, int64_t at, int64_t n,
                       const float *factors, float (*scores)[DECODE_CHUNK], Ahead *next_k, Ahead *next_v) {
    int64_t fetched = 0, step = 1;
#if VL == 16
    float ALIGNED keys[MAX_DIM][VL];
    if (scores_six(dim, heads, k)) step = TQ;
#endif
    for (int64_t j = 0; j < n; j += VL) {
#if VL == 16
        if (step > 1) transpose_keys(dim, k + j, at, keys);
#endif
        for (int64_t g = 0; g < heads; g += step) {
            for (int64_t due = j + MIN(VL, ((g + step) * VL + heads - 1) / heads); fetched < due; fetched++)
                fetch(next_k, dim), fetch(next_v, dim);
#if VL == 16
            int64_t first = MIN(g, heads - step);
            if (step > 1) SIX_OF(score, dim, q + first * dim, keys, (float (*)[DECODE_CHUNK])(scores[first] + j));
            else
#endif
                store(scores[g] + j, score_query(dim, q + g * dim, k + j, at));
        }
        for (int64_t g = 0; IS_CODED && g < heads; g++)
            store(scores[g] + j, load(scores[g] + j) * load(factors + j));
    }
}

// Processes one chunk for one KV head and `heads` query heads; m and l as in soften_heads. Prefetches next_k and
// next_v. For many heads, `taken` holds the vectors as floats, converted once.
INLINE void attend_heads(const Layer *y, int64_t dim, int64_t heads, int many, const float *q, const char **k,
                         const char **v, int64_t at, int64_t n, const char **taken, float *acc, float *m, float *l,
                         Ahead *next_k, Ahead *next_v) {
    ALIGNED float scores[MOST_HEADS_TOGETHER][DECODE_CHUNK], fade[MOST_HEADS_TOGETHER + VL], factors[DECODE_CHUNK];
    int takes = many && POOL != POOL_FLOAT32;
    int64_t g = 0;
#define EACH_FEW(part)                                                                                                 \
    for (; g + GT <= heads; g += GT) part(GT);                                                                         \
    if (GT == 4 && heads - g == 3) part(3);                                                                            \
    if (GT == 4 && heads - g == 2) part(2);                                                                            \
    if (heads - g == 1) part(1)
#define SCORE(few) score_keys(dim, few, q + g * dim, k, at, n, scores + g, g ? 0 : next_k)
#define ADD(few)                                                                                                       \
    add_values(dim, few, takes, takes ? taken : v, takes ? 0 : at, n, scores + g, fade + g, acc + g * dim,             \
               many || g ? 0 : next_v)
    if (many) {
        if (takes) take_vectors(dim, k, at, n, taken, factors);
        score_many(dim, heads, q, takes ? taken : k, takes ? 0 : at, n, factors, scores, next_k, next_v);
        for (g = 0; g < heads; g += VL)
            soften_heads(MIN(VL, heads - g), scores + g, n, y->softcap, m + g, l + g, fade + g);
        if (takes) take_vectors(dim, v, at, n, taken, factors);
    } else {
        EACH_FEW(SCORE);
        for (g = 0; g < heads; g++) fade[g] = soften(scores[g], n, y->softcap, m + g, l + g);
        for (int64_t j = 0; IS_CODED && j < (n + PAD - 1) / PAD * PAD; j++) factors[j] = scale_of(v[j] + at, dim);
    }
    for (g = 0; IS_CODED && g < heads; g++)
        for (int64_t j = 0; j < n; j += VL) store(scores[g] + j, load(scores[g] + j) * load(factors + j));
    g = 0;
#if VL == 16
    if (many) g = add_sixes(dim, heads, takes ? taken : v, takes ? 0 : at, n, scores, fade, acc);
#endif
    EACH_FEW(ADD);
#undef EACH_FEW
#undef SCORE
#undef ADD
}

// The scaled queries of an item and their sums: [KV head][row][head of the group].
typedef struct {
    float *q, *acc; // [...][dim]
    float *m, *l;   // [...]
} Queries;

// Processes one chunk for one KV head: keys [start, start + n). Each row sees only keys before its own end.
INLINE void attend_group(const Layer *y, int64_t dim, const Item *item, const Queries *of, int64_t head, int many,
                         const char **k, const char **v, int64_t start, int64_t n, const char **taken, Ahead *next_k,
                         Ahead *next_v) {
    int64_t group = y->num_heads / y->num_kv_heads, rows = item->num_rows, at = head * vector_nbytes(dim);
    int64_t together = item->context_lens[0] >= start + n ? rows : 1;
    for (int64_t r = 0, seen; r < rows; r += together) {
        seen = MIN(n, item->context_lens[r] - start);
        int64_t i = (head * rows + r) * group;
        if (seen > 0)
            attend_heads(y, dim, together * group, many, of->q + i * dim, k, v, at, seen, taken, of->acc + i * dim,
                         of->m + i, of->l + i, next_k, next_v);
    }
}

INLINE void decode_dim(const Layer *y, int64_t dim, int many, const Item *item, const Item *after) {
    int64_t group = y->num_heads / y->num_kv_heads, rows = item->num_rows, heads = item->num_heads * rows * group;
    int64_t token_stride = (y->num_heads + 2 * y->num_kv_heads) * dim, context_len = item->context_lens[rows - 1];
    float *scaled = LINES(heads * dim * 4), *acc = LINES(heads * dim * 4);
    float *m = LINES((heads + VL) * 4), *l = LINES((heads + VL) * 4), scale = query_scale(y);
    float *numbers = many && POOL != POOL_FLOAT32 ? LINES(DECODE_CHUNK * dim * 4) : 0;
    const char *buffer[5][DECODE_CHUNK], **k = buffer[0], **v = buffer[1], **next = buffer[2], **next_v = buffer[3];
    for (int64_t j = 0; numbers && j < DECODE_CHUNK; j++) buffer[4][j] = (const char *)(numbers + j * dim);
    Queries of = {scaled, acc, m, l};
    for (int64_t i = 0; i < heads; i++) {
        int64_t head = i / (rows * group) * group + i % group;
        const float *q = item->q + item->tokens[i / group % rows] * token_stride + head * dim;
        for (int64_t d = 0; d < dim; d++) scaled[i * dim + d] = q[d] * scale, acc[i * dim + d] = 0;
        m[i] = item->sinks ? item->sinks[head] * LOG2E : NEVER, l[i] = item->sinks ? 1 : 0;
    }
    int64_t at = first_seen(y, context_len - 1), n = MIN(DECODE_CHUNK, context_len - at), num_next;
    locate(&item->source, at, n, k, v);
    for (; n; at += n, n = num_next) {
        num_next = MIN(DECODE_CHUNK, context_len - at - n);
        const Item *owner = num_next || !after ? item : after;
        int64_t end = owner->context_lens[owner->num_rows - 1];
        int64_t start = owner == item ? at + n : first_seen(y, end - 1), num_ahead = MIN(DECODE_CHUNK, end - start);
        locate(&owner->source, start, num_ahead, next, next_v);
        Ahead ahead_k = {next, 0, num_ahead, 0, owner->num_heads}, ahead_v = ahead_k;
        ahead_v.rows = next_v;
        look_up(next, next_v, num_ahead, item->source.row_stride);
        for (int64_t h = 0; h < item->num_heads; h++)
            attend_group(y, dim, item, &of, h, many, k, v, at, n, buffer[4], &ahead_k, &ahead_v);
        const char **old_k = k, **old_v = v;
        k = next, v = next_v, next = old_k, next_v = old_v;
    }
    for (int64_t i = 0; i < heads; i++) {
        int64_t head = i / (rows * group) * group + i % group;
        float *out = item->out + (item->tokens[i / group % rows] * y->num_heads + head) * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = acc[i * dim + d] / l[i];
    }
}

INLINE void decode_item(const Layer *y, int many, const Item *item, const Item *after) {
    switch (y->head_dim) { // loops are unrolled for common sizes
    case 64: decode_dim(y, 64, many, item, after); break;
    case 128: decode_dim(y, 128, many, item, after); break;
    default: decode_dim(y, y->head_dim, many, item, after);
    }
}

// These are separate functions so that their stack memory is released after each item.
static __attribute__((noinline)) void decode_few(const Layer *y, const Item *item, const Item *after) {
    decode_item(y, 0, item, after);
}

static __attribute__((noinline)) void decode_many(const Layer *y, const Item *item, const Item *after) {
    decode_item(y, 1, item, after);
}

// `after` is this thread's next item, if known: its first keys are prefetched during this item's last chunk.
static void decode(const Layer *y, const Item *item, const Item *after) {
    if (item->num_rows > 1 && item->num_rows * y->num_heads > GT * y->num_kv_heads) decode_many(y, item, after);
    else decode_few(y, item, after);
}
