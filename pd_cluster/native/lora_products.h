// Computes adapters of a linear layer: y += B (A x), for rows with an adapter. The order of a row's sums does not
// depend on the other rows.
#pragma once
#include "thread_team.h"
#include "simd_vectors.h"

#define LORA_ROWS 4      // maximum number of rows of one adapter that are computed together
#define LORA_RANKS 8     // rows of A that are stored together
#define LORA_INPUTS 16   // inputs that are stored together
#define LORA_OUTPUTS 64  // outputs of B that are stored together
#define MOST_LORA_RANKS 8192
#define FEW_LORA_WORK 65536 // fewer products run on one thread

typedef struct {
    int64_t first_rank, num_ranks, first_output, num_outputs;
    const float *b; // [outputs / LORA_OUTPUTS][num_ranks][LORA_OUTPUTS]
} LoraPart;

typedef struct {
    int64_t num_ranks, num_parts;
    const float *a; // [num_ranks / LORA_RANKS][inputs / LORA_INPUTS][LORA_RANKS][LORA_INPUTS]
    LoraPart parts[];
} LoraAdapter;

typedef struct {
    int64_t slot, first, num_rows; // first: index in `rows`
} LoraBlock;

typedef struct {
    const float *x;
    int64_t x_stride, in_features;
    float *y;
    int64_t y_stride;
    const int64_t *rows;
    const LoraBlock *blocks;
    int64_t num_blocks;
    const LoraAdapter *const *adapters; // indexed by slot; null: the adapter does not change this layer
    int64_t counter;
} LoraWork;

// Computes low[row][j] = sum over the inputs of a[j] * x[row], for n rows of A from `first` on, among LORA_RANKS.
INLINE void lora_down(int m, int n, int first, const float *const *x, float (*tail)[LORA_INPUTS], int64_t in_features,
                      const float *a, float *low, int64_t stride) {
    vf sums[LORA_ROWS][LORA_RANKS];
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int j = 0; j < n; j++) sums[r][j] = (vf){0};
    int64_t whole = in_features / LORA_INPUTS * LORA_INPUTS;
    for (int64_t k = 0; k < in_features; k += LORA_INPUTS) {
        const float *w = a + (k * LORA_RANKS + first * LORA_INPUTS);
        UNROLL for (int v = 0; v < LORA_INPUTS; v += VL) {
            vf input[LORA_ROWS];
            UNROLL for (int r = 0; r < m; r++) input[r] = load((k < whole ? x[r] + k : tail[r]) + v);
            UNROLL for (int j = 0; j < n; j++) {
                vf weight = load(w + j * LORA_INPUTS + v);
                UNROLL for (int r = 0; r < m; r++) sums[r][j] += weight * input[r];
            }
        }
    }
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int j = 0; j < n; j++) low[r * stride + j] = sum_of(sums[r][j]);
}

// Adds to y[row] the products of low[row] with a part's LORA_OUTPUTS outputs from `first` on.
INLINE void lora_up(int m, const LoraPart *part, int64_t first, const float *low, int64_t stride, float *const *y) {
    const float *b = part->b + first * part->num_ranks;
    for (int64_t at = 0; at < MIN(LORA_OUTPUTS, part->num_outputs - first); at += 4 * VL) {
        vf sums[LORA_ROWS][4];
        UNROLL for (int r = 0; r < m; r++) UNROLL for (int v = 0; v < 4; v++) sums[r][v] = (vf){0};
        for (int64_t rank = 0; rank < part->num_ranks; rank++) {
            vf weight[4];
            UNROLL for (int v = 0; v < 4; v++) weight[v] = load(b + rank * LORA_OUTPUTS + at + v * VL);
            UNROLL for (int r = 0; r < m; r++) {
                vf factor = splat(low[r * stride + part->first_rank + rank]);
                UNROLL for (int v = 0; v < 4; v++) sums[r][v] += weight[v] * factor;
            }
        }
        UNROLL for (int r = 0; r < m; r++) UNROLL for (int v = 0; v < 4; v++) {
            float *out = y[r] + part->first_output + first + at + v * VL;
            int64_t left = part->num_outputs - first - at - v * VL;
            if (left >= VL)
                store(out, load(out) + sums[r][v]);
            else
                for (int64_t i = 0; i < left; i++) out[i] += sums[r][v][i];
        }
    }
}

INLINE void lora_rows(int m, const LoraWork *w, const LoraAdapter *adapter, const int64_t *rows) {
    float ALIGNED low[LORA_ROWS * MOST_LORA_RANKS], tail[LORA_ROWS][LORA_INPUTS] = {0};
    const float *x[LORA_ROWS];
    float *y[LORA_ROWS];
    int64_t padded = (w->in_features + LORA_INPUTS - 1) / LORA_INPUTS * LORA_INPUTS, stride = adapter->num_ranks;
    int64_t whole = w->in_features / LORA_INPUTS * LORA_INPUTS;
    for (int r = 0; r < m; r++) {
        x[r] = w->x + rows[r] * w->x_stride;
        y[r] = w->y + rows[r] * w->y_stride;
        memcpy(tail[r], x[r] + whole, (size_t)(w->in_features - whole) * sizeof(float));
    }
    for (int64_t rank = 0; rank < stride; rank += LORA_RANKS) {
        const float *a = adapter->a + rank * padded;
        if (m == 1) {
            lora_down(1, LORA_RANKS, 0, x, tail, w->in_features, a, low + rank, stride);
        } else {
            lora_down(m, LORA_RANKS / 2, 0, x, tail, w->in_features, a, low + rank, stride);
            lora_down(m, LORA_RANKS / 2, LORA_RANKS / 2, x, tail, w->in_features, a, low + rank + LORA_RANKS / 2, stride);
        }
    }
    for (int64_t at = 0; at < adapter->num_parts; at++)
        for (int64_t first = 0; first < adapter->parts[at].num_outputs; first += LORA_OUTPUTS)
            lora_up(m, adapter->parts + at, first, low, stride, y);
}

static void lora_work(void *data) {
    LoraWork *w = data;
    for (int64_t item; (item = next_items(&w->counter, 1)) < w->num_blocks;) {
        const LoraBlock *block = w->blocks + item;
        const LoraAdapter *adapter = w->adapters[block->slot];
        if (!adapter) continue;
        switch (block->num_rows) {
        case 1: lora_rows(1, w, adapter, w->rows + block->first); break;
        case 2: lora_rows(2, w, adapter, w->rows + block->first); break;
        case 3: lora_rows(3, w, adapter, w->rows + block->first); break;
        default: lora_rows(4, w, adapter, w->rows + block->first);
        }
    }
}

// Adds the adapters' outputs for `rows` of x to the same rows of y; the rows of a block have the same adapter.
void pd_lora(const float *x, int64_t x_stride, int64_t in_features, float *y, int64_t y_stride, const int64_t *rows,
             const LoraBlock *blocks, int64_t num_blocks, const LoraAdapter *const *adapters, int64_t num_threads) {
    LoraWork work = {x, x_stride, in_features, y, y_stride, rows, blocks, num_blocks, adapters, 0};
    if (num_blocks * LORA_RANKS * in_features < FEW_LORA_WORK) num_threads = 1;
    run(lora_work, &work, MIN(num_threads, num_blocks));
}
