// Packed products: activations are packed once, then threads compute blocks of results.
#pragma once
#include "activation_packing.h"
#include "register_blocks.h"
#include "decoded_weights.h"
#include "product_epilogue.h"
#include "span_products.h"
#include "amx_tiles.h"

#define TILE_BLOCK 256 // rows for which a thread decodes weights only once, or keeps the weights in its cache
#define MOST_TOTALS (TILE_BLOCK * DECODED_PANELS * PANEL)
#define FEW_DOTS 4 // up to this number of rows, codes are multiplied without tiles, with the same integer results

static int64_t whole_lines(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

// Returns the words per step of tiles. A span has as few steps as possible, all with the same number of whole words.
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
    return HAVE_BF16_DOTS ? BY_DOTS : BY_FLOATS;
}

// Returns the maximum number of rows for which each block decodes the codes in registers; for more, they are decoded
// once.
static int64_t most_in_registers(const Product *p) {
    if (p->form == FLOATS) return BLOCK_ROWS;
    if (p->form == E4M3S) return IS_ZEN ? 9 * FEW_ROWS : FEW_ROWS;
    return !IS_ZEN ? 2 * FEW_ROWS : VL == 16 ? MANY_ROWS : 9 * FEW_ROWS;
}

// Whether the weights of a span are decoded once, for many rows.
static int must_decode(const Product *p, int by) {
    if (by == BY_TILES) return p->form != (p->activations == AS_CODES ? CODES8 : BF16S);
    if (p->activations == AS_CODES || (by == BY_DOTS && p->form == BF16S)) return 0;
    return p->num_rows > most_in_registers(p);
}

// Returns the number of rows per block; blocks have about equal sizes.
static int64_t block_rows(const Packed *w) {
    if (w->p->activations != AS_CODES && goes_over_spans(w)) return rows_of_numbers(w->p->num_rows, w->p->form, (int)w->decodes);
    int64_t most = w->p->activations != AS_CODES ? BLOCK_ROWS : w->p->form == CODES4 ? SPAN_ROWS : CODE_ROWS;
    int64_t blocks = (w->p->num_rows + most - 1) / most;
    return (w->p->num_rows + blocks - 1) / blocks;
}

static void plan(const Product *p, Packed *w) {
    w->p = p;
    w->by = way(p);
    w->decodes = must_decode(p, (int)w->by);
    w->num_spans = p->num_groups * p->spans_of_group;
    w->num_panels = (p->outputs + PANEL - 1) / PANEL;
    w->span_words = p->span_padded / inputs_of_word((int)p->form);
    w->together = w->by == BY_TILES ? 1 : block_rows(w);
    int64_t pad = w->by == BY_TILES ? 2 * TILE_ROWS : w->together;
    w->ready_rows = p->num_rows == 1 ? 1 : (p->num_rows + pad - 1) / pad * pad;
    w->width = w->by == BY_FLOATS ? 4 : p->activations == AS_CODES ? 1 : 2;
    w->span_nbytes = p->span_padded * w->width * w->together;
    // The additional line avoids row distances that are powers of two, with which rows would compete for a few sets of
    // the cache.
    w->row_nbytes = (w->num_spans * w->span_nbytes + 63) / 64 * 64 + 64;
}

static int64_t scratch_nbytes(Product p, int64_t num_rows) {
    Packed w;
    p.num_rows = num_rows;
    plan(&p, &w);
    return w.ready_rows / w.together * w.row_nbytes + w.ready_rows * 4 * (1 + w.num_spans) + 2 * 64;
}

// Returns how many rows are packed and multiplied before the next ones. If weights are decoded, these parts are so
// small that packed rows stay in the cache. Parts have about equal sizes, and consist of whole blocks except for the
// last one.
static int64_t rows_of_part(const Product *p) {
    Packed w;
    plan(p, &w);
    if (w.by == BY_TILES || !w.decodes || !goes_over_spans(&w)) return p->num_rows;
    int64_t most = MIN(NEAR_ROWS, MAX(LEAST_NEAR_ROWS, NEAR_X_NBYTES / (w.row_nbytes / w.together)));
    if (p->num_rows <= most) return p->num_rows;
    int64_t parts = (p->num_rows + most - 1) / most, rows = (p->num_rows + parts - 1) / parts;
    return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
}

// Returns the scratch memory that a product needs.
int64_t pd_scratch_nbytes(const Product *p) {
    if (!p->num_rows) return 0;
    int64_t rows = rows_of_part(p), rest = p->num_rows % rows;
    return MAX(scratch_nbytes(*p, rows), scratch_nbytes(*p, rest ? rest : rows));
}

// Returns how the product of this form is computed on this machine: BY_FLOATS, BY_DOTS or BY_TILES.
int64_t pd_way(const Product *p) { return way(p); }

// Decodes the weights of a span for many rows to the form that dot products or tiles multiply.
static void decode_span(const Packed *w, int64_t panel, int64_t num_panels, int64_t span, int32_t *out,
                        int64_t stride) {
    int64_t form = w->p->form;
    for (int64_t q = 0; q < num_panels; q++) {
        const int32_t *words = words_at(w, panel + q, span);
        if (w->p->activations == AS_CODES)
            decode_to_codes(words, w->span_words, out + q * stride);
        else
            decode_to_bf16s(form, words, w->span_words, out + q * stride, words + AHEAD);
    }
}

// Computes results of some rows and panels with tiles. A span's weights are decoded while those of the previous span
// are multiplied: a tile cannot be loaded before its bytes have left the processor's store buffer.
static void multiply_in_tiles(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels) {
    const Product *p = w->p;
    float ALIGNED sums[MOST_ROWS * MOST_PANELS * PANEL], totals[MOST_TOTALS];
    int32_t ALIGNED decoded[2][DECODED_NBYTES / 4];
    int64_t panel_stride = w->num_spans * w->span_words * PANEL, num_words = w->span_words;
    if (w->decodes) {
        num_words = w->span_nbytes / 4;
        panel_stride = num_words * PANEL;
        decode_span(w, panel, num_panels, 0, decoded[0], panel_stride);
    }
    int64_t step = tile_step(num_words);
    for (int64_t span = 0; span < w->num_spans; span++) {
        const int32_t *words = w->decodes ? decoded[span % 2] : words_at(w, panel, span);
        if (w->decodes && span + 1 < w->num_spans)
            decode_span(w, panel, num_panels, span + 1, decoded[(span + 1) % 2], panel_stride);
        for (int64_t row = first; row < first + num_rows; row += MOST_ROWS) {
            int64_t m = MIN(MOST_ROWS, first + num_rows - row);
            const uint8_t *x = w->x + row * w->row_nbytes + span * w->span_nbytes;
            multiply_tiles(p->activations == AS_CODES, m, num_panels, x, w->row_nbytes, words, panel_stride, num_words,
                           step, !w->decodes, sums);
            fold(w, sums, row, m, panel, num_panels, span, totals + (row - first) * num_panels * PANEL,
                 num_panels * PANEL);
        }
    }
    finish(w, first, num_rows, panel, num_panels, totals);
}

// The division of a product into items: `groups` of panels, times groups of rows.
typedef struct {
    int64_t panels, rows, groups, num_items; // panels and rows of an item
} Cut;

static Cut cut_of(const Packed *w, int64_t num_threads) {
    int64_t in_tiles = w->by == BY_TILES, m = w->together, most_rows = in_tiles ? TILE_BLOCK : rows_of_item(w) / m * m;
    int64_t num_rows = w->p->num_rows, panels = in_tiles && num_rows > TILE_ROWS ? DECODED_PANELS : MOST_PANELS;
    if (!in_tiles && (w->ready_rows > m || goes_over_spans(w))) panels = MANY_PANELS;
    while (panels > 1 && w->num_panels < 4 * panels * num_threads) panels /= 2;
    int64_t groups = (w->num_panels + panels - 1) / panels;
    while (!in_tiles && most_rows > 2 * LEAST_ROWS &&
           groups * ((num_rows + most_rows - 1) / most_rows) < 2 * num_threads)
        most_rows = (most_rows / 2 + m - 1) / m * m; // with few panels, threads share the rows
    int64_t items = (num_rows + most_rows - 1) / most_rows;
    int64_t rows = in_tiles ? TILE_BLOCK : (w->ready_rows / m + items - 1) / items * m;
    return (Cut){panels, rows, groups, groups * items};
}

// Returns how many rows are packed at a time.
static int64_t rows_to_prepare(const Packed *w) { return w->by == BY_TILES ? 4 : w->together; }

static void prepare(const Packed *w, int64_t row) {
    if (w->make && row < w->p->num_rows) w->make(w->maker, row, MIN(rows_to_prepare(w), w->p->num_rows - row));
    if (w->by != BY_TILES) prepare_block(w, row / w->together);
    else for (int64_t r = row; r < MIN(row + 4, w->ready_rows); r++) prepare_row(w, r);
}

// Computes results of some rows and panels; `next`: the words of this thread's next item.
static void multiply(const Packed *w, const Cut *c, int64_t row, int64_t panel, const int32_t *next) {
    int64_t num_rows = MIN(c->rows, w->p->num_rows - row), num_panels = MIN(c->panels, w->num_panels - panel);
    if (num_rows <= 0) return;
    if (w->by == BY_TILES) multiply_in_tiles(w, row, num_rows, panel, num_panels);
    else if (goes_over_spans(w)) multiply_by_spans(w, row, num_rows, panel, num_panels, next);
    else multiply_blocks(w, row, num_rows, panel, num_panels);
}

static void product_work(void *data) {
    Packed *w = data;
    const Product *p = w->p;
    int64_t step = rows_to_prepare(w);
    Cut c = cut_of(w, p->num_threads);
    for (int64_t row; (row = next_items(&w->next_row, step)) < w->ready_rows;) prepare(w, row);
    if (p->num_threads > 1) runtime.barrier();
    if (w->by == BY_TILES) set_tiles(p->num_rows, tile_step(w->span_nbytes / 4));
    int64_t item = next_items(&w->next_item, 1);
    for (int64_t after; item < c.num_items; item = after) {
        after = next_items(&w->next_item, 1);
        multiply(w, &c, item / c.groups * c.rows, item % c.groups * c.panels,
                 words_at(w, after % c.groups * c.panels, 0));
    }
    if (w->by == BY_TILES) release_tiles();
}

// Plans a product and its memory. The product must have at most NEAR_ROWS rows, or weights that are not decoded.
static void begin_product(const Product *p, Packed *w) {
    *w = (Packed){0};
    plan(p, w);
    w->x = p->scratch;
    w->row_scales = (float *)(p->scratch + w->ready_rows / w->together * w->row_nbytes);
    w->sums = (int32_t *)(w->row_scales + (w->ready_rows + 15) / 16 * 16);
}

// Computes out [num_rows, outputs] = x times the weight, transposed, plus the bias.
void pd_product(const Product *p) {
    Packed w;
    Product part = *p;
    int64_t rows = rows_of_part(p);
    for (int64_t row = 0; row < p->num_rows; row += rows) {
        part.num_rows = MIN(rows, p->num_rows - row);
        part.x = p->x + row * p->inputs, part.out = p->out + row * p->outputs;
        begin_product(&part, &w);
        run(product_work, &w, p->num_threads);
    }
}
