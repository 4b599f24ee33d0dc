// Packed products: activations are prepared once, then threads take blocks of results.
#pragma once
#include "activations.h"
#include "dots.h"
#include "floats.h"
#include "tiles.h"

#define FLOAT_BLOCK 64  // rows for which a thread decodes weights once, or keeps them in its cache
#define TILE_BLOCK 256
#define FEW_DOTS 4 // up to here codes are multiplied without tiles, which gives the same integers

// A span's steps in tiles: as few as possible, equal, of whole words (`unit` of them).
static int64_t tile_step(int64_t num_words) {
    int64_t steps = (num_words + TILE_WORDS - 1) / TILE_WORDS;
    while (num_words % steps) steps++;
    return num_words / steps;
}

static int way(const Product *p) {
    int few = p->num_rows <= FEW_DOTS;
    if (p->activations == AS_CODES) return have_tiles() && !few ? BY_TILES : BY_DOTS;
    if (p->activations == AS_FLOATS) return BY_FLOATS;
    if (have_tiles()) return BY_TILES;
    return HAVE_BF16_DOTS && p->form == BF16S ? BY_DOTS : BY_FLOATS;
}

static void plan(const Product *p, Packed *w) {
    w->p = p;
    w->by = way(p);
    w->num_spans = p->num_groups * p->spans_of_group;
    w->num_panels = (p->outputs + PANEL - 1) / PANEL;
    w->word_inputs = inputs_of_word((int)p->form);
    w->span_words = p->span_padded / w->word_inputs;
    int64_t pad = w->by == BY_TILES ? 2 * TILE_ROWS : MAX(DOT_ROWS, FLOAT_ROWS);
    w->ready_rows = p->num_rows == 1 ? 1 : (p->num_rows + pad - 1) / pad * pad;
    w->row_nbytes = w->num_spans * p->span_padded * (w->by == BY_FLOATS ? 4 : p->activations == AS_CODES ? 1 : 2);
}

// Returns the memory that a product needs beside its operands.
int64_t pd_scratch_nbytes(const Product *p) {
    Packed w;
    plan(p, &w);
    return w.ready_rows * (w.row_nbytes + 64 + 4 * w.num_spans) + 3 * 64;
}

// Returns how the product of this form is computed on this machine: BY_FLOATS, BY_DOTS or BY_TILES.
int64_t pd_way(const Product *p) { return way(p); }

// Decodes the weights of a span for many rows. Returns the form that they have then.
static int64_t decode_span(const Packed *w, int64_t panel, int64_t num_panels, int64_t span, int32_t *out,
                           int64_t stride) {
    int64_t form = w->p->form;
    for (int64_t q = 0; q < num_panels; q++) {
        const int32_t *words = words_at(w, panel + q, span);
        if (w->by == BY_FLOATS)
            decode_to_floats(form, words, w->span_words, (float *)(out + q * stride));
        else if (w->p->activations == AS_CODES)
            decode_to_codes(words, w->span_words, out + q * stride);
        else
            decode_to_bf16s(form, words, w->span_words, out + q * stride);
    }
    return w->by == BY_FLOATS ? FLOATS : w->p->activations == AS_CODES ? CODES8 : BF16S;
}

static int must_decode(const Packed *w) {
    int64_t form = w->p->form;
    if (w->by == BY_TILES) return form != (w->p->activations == AS_CODES ? CODES8 : BF16S);
    if (w->by == BY_DOTS) return form == CODES4 && w->p->num_rows > FEW_ROWS;
    return form != FLOATS && w->p->num_rows > FEW_ROWS;
}

static void multiply_block(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels) {
    const Product *p = w->p;
    float ALIGNED sums[MOST_ROWS * MOST_PANELS * PANEL];
    int32_t ALIGNED decoded[DECODED_NBYTES / 4];
    int64_t panel_stride = w->num_spans * w->span_words * PANEL, decodes = must_decode(w), form = p->form;
    int64_t span_nbytes = w->row_nbytes / w->num_spans, num_words = w->span_words;
    for (int64_t span = 0; span < w->num_spans; span++) {
        const int32_t *words = words_at(w, panel, span);
        if (decodes) {
            num_words = w->by == BY_FLOATS ? p->span_padded : span_nbytes / 4;
            panel_stride = num_words * PANEL;
            form = decode_span(w, panel, num_panels, span, decoded, panel_stride);
            words = decoded;
        }
        for (int64_t row = first; row < first + num_rows; row += MOST_ROWS) {
            int64_t m = MIN(MOST_ROWS, first + num_rows - row);
            const uint8_t *x = w->x + row * w->row_nbytes + span * span_nbytes;
            int64_t x_words = w->row_nbytes / 4, step = tile_step(num_words);
            if (w->by == BY_TILES)
                multiply_tiles(p->activations == AS_CODES, m, num_panels, x, w->row_nbytes, words, panel_stride,
                               num_words, step, sums);
            else if (w->by == BY_DOTS)
                multiply_dots(form, m, num_panels, (const int32_t *)x, x_words, words, panel_stride, num_words, sums);
            else
                multiply_floats(form, m, num_panels, (const float *)x, x_words, words, panel_stride, num_words, sums);
            fold(w, sums, row, m, panel, num_panels, span);
        }
    }
}

static void product_work(void *data) {
    Packed *w = data;
    const Product *p = w->p;
    int64_t in_block = w->by == BY_FLOATS ? FLOAT_BLOCK : TILE_BLOCK;
    int64_t at_once = p->num_rows > TILE_ROWS || must_decode(w) ? DECODED_PANELS : MOST_PANELS;
    while (at_once > 1 && w->num_panels < 4 * at_once * p->num_threads) at_once /= 2;
    int64_t groups = (w->num_panels + at_once - 1) / at_once, blocks = (p->num_rows + in_block - 1) / in_block;
    for (int64_t row; (row = next_items(&w->next_row, 4)) < w->ready_rows;)
        for (int64_t r = row; r < MIN(row + 4, w->ready_rows); r++) prepare_row(w, r);
    if (p->num_threads > 1) runtime.barrier();
    if (w->by == BY_TILES) {
        int64_t words = w->row_nbytes / w->num_spans / 4;
        set_tiles(tile_step(words));
    }
    for (int64_t item; (item = next_items(&w->next_item, 1)) < groups * blocks;) {
        int64_t panel = item % groups * at_once, row = item / groups * in_block;
        multiply_block(w, row, MIN(in_block, p->num_rows - row), panel, MIN(at_once, w->num_panels - panel));
    }
    if (w->by == BY_TILES) release_tiles();
}

// Computes out [num_rows, outputs] = x times the weight, transposed, plus the bias.
void pd_product(const Product *p) {
    Packed w = {0};
    plan(p, &w);
    w.x = p->scratch;
    w.row_scales = (float *)(p->scratch + (w.ready_rows * w.row_nbytes + 63) / 64 * 64);
    w.sums = (int32_t *)(w.row_scales + (w.ready_rows + 15) / 16 * 16);
    run(product_work, &w, p->num_threads);
}
