// Decodes many query heads of one KV head: keys and values, stored as floats, are read once for all heads. The sums are
// bitwise equal to those in attention_decode.h.
#pragma once
#include "attention_step.h"

#define PAGE_NBYTES 4096 // a page of memory; keys at this distance compete for a few lines of the L1 cache

// Returns the products of a query with VL keys stored as floats, bitwise equal to those of score_keys.
INLINE vf score_query(int64_t dim, const float *q, const char **k, int64_t at) {
    vf sum[VL], part[QT] = {load(q)};
    int64_t d = VL;
    UNROLL for (int j = 0; j < VL; j++) sum[j] = part[0] * load((const float *)(k[j] + at));
    for (; d + QT * VL <= dim; d += QT * VL) {
        UNROLL for (int i = 0; i < QT; i++) part[i] = load(q + d + i * VL);
        UNROLL for (int j = 0; j < VL; j++) {
            const float *key = (const float *)(k[j] + at) + d;
            UNROLL for (int i = 0; i < QT; i++) sum[j] = multiply_add(part[i], load(key + i * VL), sum[j]);
        }
    }
    for (; d < dim; d += VL) {
        part[0] = load(q + d);
        UNROLL for (int j = 0; j < VL; j++)
            sum[j] = multiply_add(part[0], load((const float *)(k[j] + at) + d), sum[j]);
    }
    return sums_of(sum);
}

#if VL == 16
#define TQ 6 // query heads whose sums fit in registers: four vectors each
#define LEAST_TO_TRANSPOSE 18 // fewest query heads for which keys are transposed; TQ if keys leave the cache

// Writes VL keys as [dim][key].
static __attribute__((noinline)) void transpose_keys(int64_t dim, const char **k, int64_t at, float (*to)[VL]) {
    for (int64_t d = 0; d < dim; d += VL) {
        vf square[VL];
        UNROLL for (int j = 0; j < VL; j++) square[j] = load((const float *)(k[j] + at) + d);
        transpose(square);
        UNROLL for (int i = 0; i < VL; i++) store(to[d + i], square[i]);
    }
}

// Computes the products of TQ queries with VL transposed keys. Each lane of score_query is a separate sum here; four
// are computed at a time, and they are added in the order of sums_of. dim must exceed VL, because otherwise compilers
// could fuse these additions.
INLINE void score_six(int64_t dim, const float *q, float (*k)[VL], float (*scores)[DECODE_CHUNK]) {
    float ALIGNED parts[4][TQ][VL];
    for (int64_t part = 0; part < 4; part++, q += 4, k += 4) {
        vf sum[TQ][4];
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int g = 0; g < TQ; g++)
            sum[g][i] = splat(q[g * dim + i]) * load(k[i]);
        for (int64_t d = VL; d < dim; d += VL) UNROLL for (int i = 0; i < 4; i++) {
            vf key = in_register(load(k[d + i]));
            UNROLL for (int g = 0; g < TQ; g++) sum[g][i] = multiply_add(splat(q[g * dim + d + i]), key, sum[g][i]);
        }
        UNROLL for (int g = 0; g < TQ; g++)
            store(parts[part][g], (sum[g][0] + sum[g][2]) + (sum[g][1] + sum[g][3]));
    }
    UNROLL for (int g = 0; g < TQ; g++)
        store(scores[g], (load(parts[0][g]) + load(parts[2][g])) + (load(parts[1][g]) + load(parts[3][g])));
}

// Multiplies acc [TQ][dim] by fade, then adds the products of n values with their weights.
INLINE void add_six(int64_t dim, const char **v, int64_t at, int64_t n, float (*weights)[DECODE_CHUNK],
                    const float *fade, float *acc) {
    for (int64_t d = 0; d < dim; d += 4 * VL) {
        vf sum[TQ][4];
        UNROLL for (int g = 0; g < TQ; g++) UNROLL for (int i = 0; i < 4; i++)
            sum[g][i] = load(acc + g * dim + d + i * VL) * fade[g];
        for (int64_t j = 0; j < n; j++) {
            const float *value = (const float *)(v[j] + at) + d;
            vf part[4];
            UNROLL for (int i = 0; i < 4; i++) part[i] = in_register(load(value + i * VL));
            UNROLL for (int g = 0; g < TQ; g++) UNROLL for (int i = 0; i < 4; i++)
                sum[g][i] = multiply_add(part[i], splat(weights[g][j]), sum[g][i]);
        }
        UNROLL for (int g = 0; g < TQ; g++) UNROLL for (int i = 0; i < 4; i++)
            store(acc + g * dim + d + i * VL, sum[g][i]);
    }
}

// These are separate functions, because compilers keep the sums of inlined loops in memory.
#define SIX(name, DIM)                                                                                                 \
    static __attribute__((noinline)) void score_##name(const float *q, float (*k)[VL],                                 \
                                                       float (*scores)[DECODE_CHUNK]) {                                \
        score_six(DIM, q, k, scores);                                                                                  \
    }                                                                                                                  \
    static __attribute__((noinline)) void add_##name(const char **v, int64_t at, int64_t n,                            \
                                                     float (*weights)[DECODE_CHUNK], const float *fade, float *acc) {  \
        add_six(DIM, v, at, n, weights, fade, acc);                                                                    \
    }
SIX(six_of_64, 64) SIX(six_of_128, 128)
#define HAS_SIX(dim) (dim == 64 || dim == 128)
#define SIX_OF(part, dim, ...) (dim == 64 ? part##_six_of_64 : part##_six_of_128)(__VA_ARGS__)

// Whether query heads are scored TQ at a time; the last TQ may repeat earlier heads.
INLINE int scores_six(int64_t dim, int64_t heads, const char **k) {
    return HAS_SIX(dim) && heads >= ((k[1] - k[0]) % PAGE_NBYTES ? LEAST_TO_TRANSPOSE : TQ);
}

// Adds values for heads [0, heads), TQ at a time; returns how many are done.
INLINE int64_t add_sixes(int64_t dim, int64_t heads, const char **v, int64_t at, int64_t n,
                         float (*weights)[DECODE_CHUNK], const float *fade, float *acc) {
    int64_t g = 0;
    if (HAS_SIX(dim))
        for (; g + TQ <= heads; g += TQ) SIX_OF(add, dim, v, at, n, weights + g, fade + g, acc + g * dim);
    return g;
}
#endif
