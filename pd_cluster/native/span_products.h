// Products with short spans, whose kernels add the sums to totals themselves. Either each block of rows decodes the
// weights in registers, and one call processes all spans of some panels, or the weights are decoded first
// (cached_products.h). Both have the same chains of additions, so results have the same bits.
#pragma once
#include "cached_products.h"

#define X_NBYTES 524288 // activations of an item whose weights are decoded in registers; they stay in the L2 cache
#define LEAST_ROWS 64 // minimum number of rows of an item of any width, because each item reads the weights again

typedef struct {
    const int32_t *x, *sums; // x of a block: [span][word][row]; sums of its rows: [row][span]
    int64_t x_stride, sum_stride, num_spans, num_words, panel_stride, spans_ahead;
    int64_t spans_of_group, num_groups;
    const int32_t *words, *next; // words of the first panel; words of the panels to prefetch
    const float *scales, *zeros; // those of the first panel, or null
    float *totals;               // [row][panels of the item][PANEL]
    int64_t stride;
    int fetches_next; // prefetch `next`, because the panels' own words are in the cache already
} Spans;

typedef void SpansKernel(const Spans *s);

// The kernel for m rows and v panels.
INLINE void multiply_spans(Way y, int m, int v, const Spans *s) {
    int has_zeros = s->zeros != 0, has_scales = y.form == CODES4 || y.form == CODES8 || y.form == E4M3S || s->scales;
    const int32_t *words = s->words, *x = s->x;
    float ALIGNED kept[BLOCK_ROWS * MANY_PANELS * PANEL];
    int64_t span_words = s->num_words * PANEL, in_group = 0, group = 0;
    for (int64_t span = 0; span < s->num_spans; span++, words += span_words, x = s->x + span * s->x_stride) {
        vi sums[BLOCK_ROWS][MANY_PANELS * PARTS];
        int64_t beyond = span + s->spans_ahead - s->num_spans;
        const int32_t *ahead = s->fetches_next ? s->next + span * span_words
                               : beyond < 0    ? words + s->spans_ahead * span_words
                                               : s->next + beyond * span_words;
        UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) sums[r][q] = (vi){0};
        int64_t k = 0;
        do {
            vi word[MANY_PANELS * PARTS], w[MANY_PANELS * PARTS];
            UNROLL for (int q = 0; q < v * PARTS; q++) {
                word[q] = load_for(y, words + q / PARTS * s->panel_stride + k * PANEL + q % PARTS * VL);
                if (q % PARTS == 0) __builtin_prefetch(ahead + q / PARTS * s->panel_stride + k * PANEL);
            }
            UNROLL for (int i = 0; i < steps_of_word(y); i++, x += m) {
                UNROLL for (int q = 0; q < v * PARTS; q++) w[q] = operand(y, word[q], i);
                UNROLL for (int r = 0; r < m; r++) {
                    vi value = x[r] - (vi){0};
                    UNROLL for (int q = 0; q < v * PARTS; q++) sums[r][q] = add_product(y, sums[r][q], w[q], value);
                }
            }
        } while (++k < s->num_words);
        // From here on many sums are read from memory; otherwise compilers copy registers in the loop.
        if (m > 2) {
            UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
                store(kept + (r * v * PARTS + q) * VL, (vf)sums[r][q]);
            __asm__ volatile("" : : "r"(kept) : "memory");
        }
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            int64_t at = (q / PARTS * s->num_groups + group) * PANEL + q % PARTS * VL;
            vf scale = has_scales ? load(s->scales + at) : (vf){0}, zero = has_zeros ? load(s->zeros + at) : (vf){0};
            UNROLL for (int r = 0; r < m; r++) {
                int32_t of_x = s->sums[r * s->sum_stride + span];
                float sum, *to = s->totals + r * s->stride + q * VL;
                vf value = m > 2 ? load(kept + (r * v * PARTS + q) * VL) : (vf)sums[r][q];
                if (y.as == AS_CODES) value = to_floats((vi)value - of_x * code_offset(y.form)), sum = (float)of_x;
                else memcpy(&sum, &of_x, 4);
                store(to, folded(has_scales, has_zeros, value, zero, sum, scale, load(to)));
            }
        }
        if (++in_group == s->spans_of_group) in_group = 0, group++;
    }
}

#undef KIND
#undef KERNEL
#undef PANELS_OF
#define PANELS_OF(m, sums)                                                                                             \
    ((m) * 8 * PARTS <= FEW_SUMS   ? 8                                                                                 \
     : (m) * 4 * PARTS <= FEW_SUMS ? 4                                                                                 \
     : (m) * 2 * PARTS <= (sums)   ? 2                                                                                 \
                                   : 1)
#define KIND SpansKernel
#define KERNEL(name, m, v, form, as)                                                                                   \
    static __attribute__((noinline)) void name(const Spans *s) { multiply_spans((Way){form, as}, m, v, s); }

// Only some numbers of rows have kernels, to save compile time.
#if VL == 16
#define SMALL_SUMS SPAN_SUMS
#define TO_SMALL(name, sums, form, as)                                                                                 \
    TO_4(name, sums, form, as) KERNELS(name, 6, sums, form, as) KERNELS(name, 8, sums, form, as)
#define NAMES_SMALL(name) NAMES_4(name), NONE, BOTH(name##6), NONE, BOTH(name##8)
#else
#define SMALL_SUMS FEW_SUMS
#define TO_SMALL(name, sums, form, as) TO_4(name, sums, form, as)
#define NAMES_SMALL(name) NAMES_4(name)
#endif

BLOCK_KERNELS(floats, SMALL_SUMS, FLOATS, AS_FLOATS)
TABLE(SMALL, bf16s_as_floats, SMALL_SUMS, BF16S, AS_FLOATS)
TABLE(SMALL, codes8_as_floats, SMALL_SUMS, CODES8, AS_FLOATS)
TABLE(SMALL, codes4_as_floats, SMALL_SUMS, CODES4, AS_FLOATS)
TABLE(SMALL, e4m3s_as_floats, SMALL_SUMS, E4M3S, AS_FLOATS)
#if HAVE_BF16_DOTS
TABLE(SMALL, codes8_as_bf16s, SMALL_SUMS, CODES8, AS_BF16S)
TABLE(SMALL, codes4_as_bf16s, SMALL_SUMS, CODES4, AS_BF16S)
TABLE(SMALL, e4m3s_as_bf16s, SMALL_SUMS, E4M3S, AS_BF16S)
#endif
#if SPAN_ROWS == 8
TABLE(8, codes4, SPAN_SUMS, CODES4, AS_CODES)
#else
TABLE(4, codes4, SPAN_SUMS, CODES4, AS_CODES)
#endif
// Returns the rows per block of a product with floats. Among the numbers that have a kernel, it is the one with the
// least work, where each block costs as much as one additional row.
#define HAS_ROWS(table, m) ((m) <= (int64_t)(sizeof table / sizeof *table) && table[(m) - 1][0])
static int64_t rows_of_numbers(int64_t num_rows, int64_t form, int decodes) {
    int64_t best = 0, least = INT64_MAX;
    for (int64_t m = BLOCK_ROWS; m > 0; m--) {
        int64_t work = (num_rows + m - 1) / m * (m + 1);
        int is_there = decodes ? HAS_ROWS(decoded_floats, m) : form == FLOATS || HAS_ROWS(codes4_as_floats, m);
        if (!is_there || work >= least) continue;
        best = m, least = work;
    }
    return best;
}
#undef HAS_ROWS

// Whether the functions in this file compute the product.
static int goes_over_spans(const Packed *w) {
    const Product *p = w->p;
    return p->activations == AS_CODES ? p->form == CODES4 : w->by == BY_FLOATS || p->form != BF16S;
}

// Returns the kernels for blocks of m rows: for one panel, and for several.
static SpansKernel *const *spans_kernels_of(const Packed *w, int64_t m) {
    int64_t form = w->p->form;
    if (w->p->activations == AS_CODES) return codes4[m - 1];
#if HAVE_BF16_DOTS
    if (w->by == BY_DOTS)
        return (form == CODES4 ? codes4_as_bf16s : form == CODES8 ? codes8_as_bf16s : e4m3s_as_bf16s)[m - 1];
#endif
    return (form == CODES4   ? codes4_as_floats
            : form == CODES8 ? codes8_as_floats
            : form == BF16S  ? bf16s_as_floats
            : form == FLOATS ? floats
                             : e4m3s_as_floats)[m - 1];
}

static int64_t spans_panels(const Packed *w, int64_t m) {
    if (w->p->activations == AS_CODES) return PANELS_OF(m, SPAN_SUMS);
    return PANELS_OF(m, SMALL_SUMS);
}

// Returns those of a kernel's arguments that depend only on the product, for some panels and all spans.
static Spans spans_of(const Packed *w, int64_t num_panels) {
    const Product *p = w->p;
    return (Spans){.x_stride = w->ready_rows / w->together * w->span_nbytes / 4, .sum_stride = w->num_spans,
                   .num_spans = w->num_spans, .num_words = w->span_words, .spans_of_group = p->spans_of_group,
                   .num_groups = p->num_groups, .panel_stride = w->num_spans * w->span_words * PANEL,
                   .spans_ahead = MAX(1, AHEAD / (w->span_words * PANEL)), .stride = num_panels * PANEL};
}

// Prefetches the memory of a block's results. Without this, waiting for it took a thirtieth of a long prompt's time.
static void fetch_results(const Packed *w, int64_t row, int64_t panel, int64_t num_panels) {
    for (int64_t r = row; r < MIN(row + w->together, w->p->num_rows); r++)
        for (int64_t q = panel; q < panel + num_panels; q++) __builtin_prefetch(out_row(w, r) + q * PANEL, 1);
}

// Computes results of some rows and panels; the first row begins a block. `next`: the words of the next item.
static void multiply_in_registers(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                                  const int32_t *next, float *totals) {
    int64_t m = w->together, most = spans_panels(w, m);
    SpansKernel *const *kernels = spans_kernels_of(w, m);
    Spans s = spans_of(w, num_panels);
    memset(totals, 0, (size_t)((num_rows + m - 1) / m * m * s.stride) * 4);
    for (int64_t q = 0, v; q < num_panels; q += v) {
        v = num_panels - q >= most ? most : 1;
        s.words = words_at(w, panel + q, 0);
        s.next = q + v < num_panels ? words_at(w, panel + q + v, 0) : next;
        int64_t at = (panel + q) * w->p->num_groups * PANEL;
        s.scales = w->p->scales ? w->p->scales + at : 0, s.zeros = w->p->zeros ? w->p->zeros + at : 0;
        for (int64_t row = 0; row < num_rows; row += m) {
            s.fetches_next = row > 0 && row + m >= num_rows;
            if (num_rows > m && q + v == num_panels) fetch_results(w, first + row, panel, num_panels);
            s.x = block_at(w, (first + row) / m, 0), s.sums = w->sums + (first + row) * w->num_spans;
            s.totals = totals + row * s.stride + q * PANEL;
            kernels[v > 1](&s);
        }
    }
}

// Computes the results with weights that are decoded once for all rows, some spans at a time.
static void multiply_decoded(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                             const int32_t *next, float *totals) {
    static const float ALIGNED ones[NEAR_PANELS * PANEL] = {[0 ... NEAR_PANELS * PANEL - 1] = 1.0f};
    const Product *p = w->p;
    int32_t ALIGNED decoded[NEAR_NBYTES / 4];
    int64_t m = w->together, num_words = w->span_nbytes / 4 / m, panel_stride = w->num_spans * w->span_words * PANEL;
    int64_t at_once = MAX(1, NEAR_NBYTES / (num_words * PANEL * 4 * NEAR_PANELS));
    NearKernel *const *kernels = (w->by == BY_DOTS ? DECODED_BF16S : decoded_floats)[m - 1];
    Near s = {.x_stride = w->ready_rows * num_words, .sum_stride = w->num_spans,
              .num_words = num_words, .spans_of_group = p->spans_of_group, .num_groups = p->num_groups,
              .words = decoded, .ahead = decoded, .stride = num_panels * PANEL};
    int64_t num_blocks = (num_rows + m - 1) / m;
    int64_t in_place = p->bias || w->to || (panel + num_panels) * PANEL > p->outputs ? 0 : num_rows / m;
    memset(totals, 0, (size_t)(num_blocks * m * s.stride) * 4);
    for (int64_t span = 0, after; span < w->num_spans; span = after) {
        after = MIN(span + at_once, w->num_spans), s.num_spans = after - span, s.in_group = span % p->spans_of_group;
        int64_t done = after == w->num_spans ? in_place : 0; // blocks whose results are final
        for (int64_t q = 0, v; q < num_panels; q += v) {
            v = num_panels - q >= NEAR_PANELS ? NEAR_PANELS : 1;
            const int32_t *from = words_at(w, panel + q, span);
            const int32_t *ahead = q + v < num_panels   ? words_at(w, panel + q + v, span)
                                   : after < w->num_spans ? words_at(w, panel, after)
                                                          : next;
            s.panel_stride = s.num_spans * num_words * PANEL;
            if (p->form == FLOATS) s.words = from, s.panel_stride = panel_stride, s.step = 4 * PANEL / num_blocks;
            else for (int64_t i = 0; i < v; i++, from += panel_stride, ahead += panel_stride) {
                int32_t *to = decoded + i * s.num_spans * num_words * PANEL;
                if (w->by == BY_DOTS) decode_to_bf16s(p->form, from, s.num_spans * w->span_words, to, ahead);
                else decode_to_floats(p->form, from, s.num_spans * w->span_words, (float *)to, ahead);
            }
            int64_t at = ((panel + q) * p->num_groups + span / p->spans_of_group) * PANEL;
            s.scales = p->scales ? p->scales + at : ones, s.zeros = p->zeros ? p->zeros + at : 0;
            for (int64_t block = 0; block < num_blocks; block += s.num_blocks) {
                int64_t row = first + block * m;
                s.num_blocks = block < done ? done : num_blocks - block;
                s.x = block_at(w, row / m, span), s.sums = w->sums + row * w->num_spans + span;
                s.totals = s.to = totals + block * m * s.stride + q * PANEL, s.to_stride = s.stride;
                if (p->form == FLOATS) s.ahead = ahead + block * num_words * s.num_spans * PANEL / num_blocks;
                if (block < done) s.to = p->out + row * p->outputs + (panel + q) * PANEL, s.to_stride = p->outputs;
                kernels[v > 1](&s);
            }
        }
    }
    finish(w, first + in_place * m, num_rows - in_place * m, panel, num_panels, totals + in_place * m * s.stride);
}

// Returns the largest number of rows of an item.
static int64_t rows_of_item(const Packed *w) {
    if (goes_over_spans(w) && w->decodes) return NEAR_ROWS;
    if (!goes_over_spans(w) || w->p->activations == AS_CODES) return MANY_ROWS;
    return MIN(MANY_ROWS, MAX(LEAST_ROWS, X_NBYTES / (w->num_spans * w->p->span_padded * w->width)));
}

static void multiply_by_spans(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                              const int32_t *next) {
    float ALIGNED totals[(MAX(MANY_ROWS, NEAR_ROWS) + BLOCK_ROWS) * MANY_PANELS * PANEL];
    if (w->decodes) {
        multiply_decoded(w, first, num_rows, panel, num_panels, next, totals);
        return;
    }
    multiply_in_registers(w, first, num_rows, panel, num_panels, next, totals);
    finish(w, first, num_rows, panel, num_panels, totals);
}
