// Chooses the keys that each token of sparse latent attention sees, by index keys, which the pool stores next to
// latents.
// A key's score is the sum over heads of weight * max(0, query . key). The `most` keys with the highest scores are
// chosen; of equal scores, the first ones. Heads are lanes, and are added in a fixed order, so a score's bits do not
// depend on other rows.
#pragma once
#include "attention_prefill.h"

#define SPAN 512       // keys per item
#define DIGIT_BITS 11  // bits per digit of the radix search: three digits cover 32 bits
#define NUM_DIGITS (1 << DIGIT_BITS)

typedef struct {
    int64_t num_heads, width, most, block_size;
    int64_t block_stride, offset; // bytes
} Index;

typedef struct {
    const Step *step;
    const Index *index;
    char *pool;
    const float *queries, *weights, *keys;
    float *scores;           // [num_slab, longest]
    int64_t longest, num_slab;
    int64_t num_rows;        // tokens that see more keys than are chosen
    const int32_t *rows, *seqs; // [num_rows]: these tokens, and their sequences
    int32_t *chosen;         // [num_tokens, most]
    int64_t token_counter, *counters; // counters: two for each slab
} IndexWork;

static int64_t num_seen(const Step *s, int64_t seq, int64_t token) {
    return s->context_lens[seq] - s->query_starts[seq + 1] + token + 1;
}

static void keep_index_key(const IndexWork *w, int64_t token) {
    const Index *y = w->index;
    int64_t block = w->step->slots[token] / y->block_size, offset = w->step->slots[token] % y->block_size;
    char *place = w->pool + block * y->block_stride + y->offset + offset * vector_nbytes(y->width);
    put_vector(w->keys + token * y->width, y->width, place);
}

// Writes a token's queries as [tiles][width][LANES], and its weights as [tiles][LANES]; lanes without a head have
// weight 0.
static void lay_out_heads(const IndexWork *w, int64_t token, int64_t tiles, float (*q)[LANES], float (*weight)[LANES]) {
    const Index *y = w->index;
    const float *from = w->queries + token * y->num_heads * y->width;
    memset(q, 0, (size_t)(tiles * y->width) * sizeof *q);
    memset(weight, 0, (size_t)tiles * sizeof *weight);
    for (int64_t h = 0; h < y->num_heads; h++) {
        weight[h / LANES][h % LANES] = w->weights[token * y->num_heads + h];
        for (int64_t d = 0; d < y->width; d++) q[h / LANES * y->width + d][h % LANES] = from[h * y->width + d];
    }
}

// Scores n keys, at most a CHUNK; n is rounded up to a whole KR in `out`.
INLINE void score_keys(int64_t tiles, int64_t width, float (*q)[LANES], float (*weight)[LANES], const float **key,
                       int64_t n, float *out) {
    for (int64_t j = 0; j < n; j += KR) {
        vf total[KR];
        UNROLL for (int i = 0; i < KR; i++) total[i] = (vf){0};
        for (int64_t tile = 0; tile < tiles; tile++) {
            vf sum[KR][2];
            UNROLL for (int i = 0; i < KR; i++) sum[i][0] = sum[i][1] = (vf){0};
            dot_lanes(q + tile * width, 2, key + j, width, 0, sum);
            UNROLL for (int i = 0; i < KR; i++) UNROLL for (int c = 0; c < 2; c++)
                total[i] += vmax((vf){0}, sum[i][c]) * load(weight[tile] + c * VL);
        }
        UNROLL for (int i = 0; i < KR; i++) out[j + i] = sum_of(total[i]) + 0.0f; // no negative zero
    }
}

static __attribute__((noinline)) void score_span(const IndexWork *w, int64_t row, int64_t first, int64_t stop, float *out) {
    const Index *y = w->index;
    int64_t tiles = (y->num_heads + LANES - 1) / LANES, token = w->rows[row];
    const int32_t *table = w->step->block_table + w->step->table_starts[w->seqs[row]];
    char *room = alloca((size_t)(tiles * (y->width + 1)) * LANES * 4 + 64);
    float(*q)[LANES] = (float(*)[LANES])(((uintptr_t)room + 63) & ~(uintptr_t)63), (*weight)[LANES] = q + tiles * y->width;
    float *numbers = POOL == POOL_FLOAT32 ? 0 : alloca((size_t)(CHUNK * y->width) * 4), scores[CHUNK];
    const char *stored[CHUNK];
    const float *key[CHUNK];
    lay_out_heads(w, token, tiles, q, weight);
    for (int64_t at = first; at < stop; at += CHUNK) {
        int64_t n = MIN(CHUNK, stop - at);
        for (int64_t j = 0; j < n; j++) {
            int64_t block = (at + j) / y->block_size, offset = (at + j) % y->block_size;
            stored[j] = w->pool + table[block] * y->block_stride + y->offset + offset * vector_nbytes(y->width);
        }
        for (int64_t j = n; j < (n + PAD - 1) / PAD * PAD; j++) stored[j] = stored[n - 1];
        as_numbers(y->width, stored, n, numbers, key);
        score_keys(tiles, y->width, q, weight, key, n, scores);
        memcpy(out + at, scores, (size_t)n * 4);
    }
}

// Maps scores to unsigned integers in the same order.
INLINE uint32_t ordered(float score) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Writes the indexes of the best `most` of n scores, ascending.
static __attribute__((noinline)) void select_keys(const float *scores, int64_t n, int64_t most, int32_t *chosen) {
    uint32_t found = 0; // the lowest chosen score, found digit by digit
    int64_t wanted = most; // how many scores to choose among those that begin with the digits found so far
    for (int shift = 32 - DIGIT_BITS, known = 0; known < 32; known += DIGIT_BITS, shift = MAX(shift - DIGIT_BITS, 0)) {
        int64_t counts[NUM_DIGITS] = {0}, digit = NUM_DIGITS - 1;
        uint32_t mask = known ? ~0u << (32 - known) : 0;
        for (int64_t j = 0; j < n; j++) {
            uint32_t number = ordered(scores[j]);
            if ((number & mask) == (found & mask)) counts[(number & ~mask) >> shift & (NUM_DIGITS - 1)]++;
        }
        while (counts[digit] < wanted) wanted -= counts[digit--];
        found |= (uint32_t)digit << shift;
    }
    for (int64_t j = 0; j < n; j++) {
        uint32_t number = ordered(scores[j]);
        if (number > found || (number == found && wanted-- > 0)) *chosen++ = (int32_t)j;
    }
}

static void index_work(void *data) {
    IndexWork *w = data;
    const Step *s = w->step;
    for (int64_t token; (token = next_items(&w->token_counter, 4)) < s->num_tokens;)
        for (int64_t t = token; t < MIN(token + 4, s->num_tokens); t++) keep_index_key(w, t);
    int64_t spans = (w->longest + SPAN - 1) / SPAN, *counter = w->counters;
    for (int64_t first = 0; first < w->num_rows; first += w->num_slab, counter += 2) {
        int64_t count = MIN(w->num_slab, w->num_rows - first);
        if (s->num_threads > 1) runtime.barrier(); // all keys are written, and the last slab's scores are read
        for (int64_t item; (item = next_items(counter, 1)) < count * spans;) {
            int64_t row = first + item / spans, at = item % spans * SPAN;
            int64_t stop = MIN(at + SPAN, num_seen(s, w->seqs[row], w->rows[row]));
            if (at < stop) score_span(w, row, at, stop, w->scores + item / spans * w->longest);
        }
        if (s->num_threads > 1) runtime.barrier(); // all scores are written
        for (int64_t item; (item = next_items(counter + 1, 1)) < count;) {
            int64_t row = first + item, n = num_seen(s, w->seqs[row], w->rows[row]), most = w->index->most;
            select_keys(w->scores + item * w->longest, n, most, w->chosen + w->rows[row] * most);
        }
    }
}

// queries [num_tokens, num_heads, width], weights [num_tokens, num_heads], keys [num_tokens, width]; scores
// [num_slab, longest], rows and seqs [num_rows], counters [2 * slabs], zeros. The caller has checked all arguments.
void pd_choose(const Step *step, const Index *index, char *pool, const float *queries, const float *weights,
               const float *keys, float *scores, int64_t longest, int64_t num_slab, int64_t num_rows,
               const int32_t *rows, const int32_t *seqs, int32_t *chosen, int64_t *counters) {
    IndexWork work = {step,    index,    pool,     queries, weights, keys,   scores,
                      longest, num_slab, num_rows, rows,    seqs,    chosen, 0, counters};
    run(index_work, &work, step->num_threads);
}
