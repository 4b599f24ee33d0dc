// Products of float32 activations of many rows: a span of some panels is decoded once for a block of rows, and sums of
// a tile in registers go straight to the totals. Same chains and same bits as floats.h and fold.h.
#pragma once
#include "activations.h"
#include "floats.h"
#include "fold.h"

#ifndef MANY_ROWS
#define MANY_ROWS 192 // of a block, at most: its x of a span stays in the L2 cache
#endif
#ifndef MANY_PANELS
#define MANY_PANELS 8  // of a block, at most
#endif
#define MANY_SPAN 128  // inputs, at most: decoded panels of a tile stay in the L1 cache

typedef struct {
    const float *scales, *zeros, *sums; // of the span's group; of the panels' first output; of the tile's first row
    int64_t panel_step, sum_step;       // between scales of panels, between sums of rows
    float *totals;
    int64_t stride;
    int is_first;
} Fold;

// Adds the sums of m rows and v panels to their totals. All but `f` are constants.
INLINE void many_block(int m, int v, int has_scales, int has_zeros, const float *x, const float *y, int64_t y_stride,
                       int64_t num_inputs, const Fold *f) {
    vf acc[FLOAT_ROWS][MOST_PANELS * PARTS];
    sum_block(FLOATS, m, v, x, 1, FLOAT_ROWS, (const int32_t *)y, y_stride, num_inputs, acc);
    UNROLL for (int q = 0; q < v * PARTS; q++) {
        vf scale = {0}, zero = {0};
        if (has_scales) scale = load(f->scales + q / PARTS * f->panel_step + q % PARTS * VL);
        if (has_zeros) zero = load(f->zeros + q / PARTS * f->panel_step + q % PARTS * VL);
        UNROLL for (int r = 0; r < m; r++) {
            float *to = f->totals + r * f->stride + q * VL;
            vf before = f->is_first ? (vf){0} : load(to);
            float sum = has_zeros ? f->sums[r * f->sum_step] : 0;
            store(to, folded(has_scales, has_zeros, acc[r][q], zero, sum, scale, before));
        }
    }
}

static void many_rows(const Packed *w, int64_t first, int64_t num_rows, int64_t v, int64_t span, const float *y,
                      Fold *f) {
    const Product *p = w->p;
    int64_t y_stride = w->span_nbytes / w->together / 4 * PANEL, num_inputs = y_stride / PANEL;
    for (int64_t r = 0; r < num_rows; r += FLOAT_ROWS, f->totals += FLOAT_ROWS * f->stride) {
        const float *x = block_at(w, (first + r) / FLOAT_ROWS, span);
        int is_half = num_rows - r <= FLOAT_ROWS / 2;
        f->sums = (const float *)w->sums + (first + r) * w->num_spans + span;
#define BLOCK(m, v, scales, zeros) many_block(m, v, scales, zeros, x, y, y_stride, num_inputs, f)
#define BLOCKS(scales, zeros)                                                                                         \
    if (is_half && v == FLOAT_PANELS) BLOCK(FLOAT_ROWS / 2, FLOAT_PANELS, scales, zeros);                             \
    else if (is_half) BLOCK(FLOAT_ROWS / 2, 1, scales, zeros);                                                        \
    else if (v == FLOAT_PANELS) BLOCK(FLOAT_ROWS, FLOAT_PANELS, scales, zeros);                                       \
    else BLOCK(FLOAT_ROWS, 1, scales, zeros);
        if (p->zeros) { BLOCKS(1, 1) }
        else if (p->scales) { BLOCKS(1, 0) }
        else { BLOCKS(0, 0) }
#undef BLOCKS
#undef BLOCK
    }
}

// Computes results of some rows, the first a multiple of FLOAT_ROWS, and panels.
static void multiply_many(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels) {
    const Product *p = w->p;
    float ALIGNED totals[MANY_ROWS * MANY_PANELS * PANEL], decoded[FLOAT_PANELS * MANY_SPAN * PANEL];
    int64_t y_stride = w->span_nbytes / w->together / 4 * PANEL;
    for (int64_t span = 0; span < w->num_spans; span++) {
        for (int64_t q = 0, v; q < num_panels; q += v) {
            v = num_panels - q >= FLOAT_PANELS ? FLOAT_PANELS : 1;
            for (int64_t i = 0; i < v; i++)
                decode_to_floats(p->form, words_at(w, panel + q + i, span), w->span_words, decoded + i * y_stride);
            int64_t at = ((panel + q) * p->num_groups + span / p->spans_of_group) * PANEL;
            Fold f = {.scales = p->scales + at, .zeros = p->zeros + at, .panel_step = p->num_groups * PANEL,
                      .sum_step = w->num_spans, .totals = totals + q * PANEL, .stride = num_panels * PANEL,
                      .is_first = span == 0};
            many_rows(w, first, num_rows, v, span, decoded, &f);
        }
    }
    finish(w, first, num_rows, panel, num_panels, totals);
}
