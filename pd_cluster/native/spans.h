// Products whose spans are short: sums go from a kernel to totals. Weights become numbers in registers, for each block of
// rows anew, and a call goes over all spans of some panels; or they are decoded to a cache, some spans of a few panels at
// a time, and multiplied with many blocks. Chains are the same, so results have the same bits.
#pragma once
#include "blocks.h"

#if VL == 16
#define NEAR_NBYTES 65536 // of decoded weights: they stay in the L2 cache
#else
#define NEAR_NBYTES 16384 // in the L1 cache: there are not enough registers for several panels
#endif
#define X_NBYTES 524288 // of the activations of an item whose weights become numbers in registers: also in the L2 cache
#define LEAST_ROWS 64 // of an item, however wide: each item reads the weights again

typedef struct {
    const int32_t *x, *sums; // of a block [span][word][row]; of its rows [row][span]
    int64_t x_stride, sum_stride, num_spans, num_words, panel_stride, spans_ahead;
    int64_t in_group, spans_of_group, num_groups; // in_group: the first span's number in its group
    const int32_t *words, *next; // of the first panel; of the panels to fetch
    const float *scales, *zeros; // of the first panel, or none
    float *totals;               // [row][panels of the item][PANEL]
    int64_t stride;
    int fetches_next; // only: the panels' own words are in the cache already
    int begins;       // totals are zeros
} Spans;

typedef void SpansKernel(const Spans *s);

// A kernel for m rows and v panels.
INLINE void multiply_spans(Way y, int m, int v, const Spans *s) {
    int has_zeros = s->zeros != 0, has_scales = y.form == CODES4 || y.form == CODES8 || y.form == E4M3S || s->scales;
    const int32_t *words = s->words, *x = s->x;
    float ALIGNED kept[BLOCK_ROWS * MANY_PANELS * PANEL];
    int64_t span_words = s->num_words * PANEL, in_group = s->in_group, group = 0;
    for (int64_t span = 0; span < s->num_spans; span++, words += span_words, x = s->x + span * s->x_stride) {
        vi sums[BLOCK_ROWS][MANY_PANELS * PARTS];
        int begins = s->begins && !span;
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
                if (q % PARTS == 0 && !y.is_near) __builtin_prefetch(ahead + q / PARTS * s->panel_stride + k * PANEL);
            }
            UNROLL for (int i = 0; i < steps_of_word(y); i++, x += m) {
                UNROLL for (int q = 0; q < v * PARTS; q++) w[q] = operand(y, word[q], i);
                UNROLL for (int r = 0; r < m; r++) {
                    vi value = x[r] - (vi){0};
                    UNROLL for (int q = 0; q < v * PARTS; q++) sums[r][q] = add_product(y, sums[r][q], w[q], value);
                }
            }
        } while (++k < s->num_words);
        // Many are read from memory from here on: otherwise compilers copy registers in the loop.
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
                vf before = begins ? (vf){0} : load(to);
                if (y.as == AS_CODES) value = to_floats((vi)value - of_x * code_offset(y.form)), sum = (float)of_x;
                else memcpy(&sum, &of_x, 4);
                store(to, folded(has_scales, has_zeros, value, zero, sum, scale, before));
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
    static __attribute__((noinline)) void name(const Spans *s) { multiply_spans((Way){form, as, NEAR}, m, v, s); }

// There are kernels for some numbers of rows only: compiling takes its time.
#define NONE {0, 0}
#if VL == 16
#define SMALL_SUMS SPAN_SUMS
#define TO_SMALL(name, sums, form, as)                                                                                 \
    TO_4(name, sums, form, as) KERNELS(name, 6, sums, form, as) KERNELS(name, 8, sums, form, as)
#define TO_LARGE(name, sums, form, as)                                                                                 \
    KERNELS(name, 8, sums, form, as) KERNELS(name, 10, sums, form, as) KERNELS(name, 11, sums, form, as)               \
    KERNELS(name, 12, sums, form, as)
#define NAMES_SMALL(name) NAMES_4(name), NONE, BOTH(name##6), NONE, BOTH(name##8)
#define NAMES_LARGE(name)                                                                                              \
    NONE, NONE, NONE, NONE, NONE, NONE, NONE, BOTH(name##8), NONE, BOTH(name##10), BOTH(name##11), BOTH(name##12)
#else
#define SMALL_SUMS FEW_SUMS
#define TO_SMALL(name, sums, form, as) TO_4(name, sums, form, as)
#define TO_LARGE(name, sums, form, as)                                                                                 \
    KERNELS(name, 4, sums, form, as) KERNELS(name, 5, sums, form, as) KERNELS(name, 6, sums, form, as)
#define NAMES_SMALL(name) NAMES_4(name)
#define NAMES_LARGE(name) NONE, NONE, NONE, BOTH(name##4), BOTH(name##5), BOTH(name##6)
#endif

#define NEAR 0
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
#undef NEAR
#define NEAR 1
TABLE(LARGE, decoded_floats, BLOCK_SUMS, FLOATS, AS_FLOATS)
#if HAVE_BF16_DOTS
TABLE(LARGE, decoded_bf16s, BLOCK_SUMS, BF16S, AS_BF16S)
#endif
#undef NEAR

// Returns the rows of a block of a product with numbers: of those that there are kernels for, the one with the least
// work, where a block takes the time of another row besides.
#define HAS_ROWS(table, m) ((m) <= (int64_t)(sizeof table / sizeof *table) && table[(m) - 1][0])
static int64_t rows_of_numbers(int64_t num_rows, int decodes) {
    int64_t best = 0, least = INT64_MAX;
    for (int64_t m = BLOCK_ROWS; m > 0; m--) {
        int64_t work = (num_rows + m - 1) / m * (m + 1);
        if (!(decodes ? HAS_ROWS(decoded_floats, m) : HAS_ROWS(codes4_as_floats, m)) || work >= least) continue;
        best = m, least = work;
    }
    return best;
}
#undef HAS_ROWS

// Whether a product is one of these.
static int goes_over_spans(const Packed *w) {
    const Product *p = w->p;
    return p->activations == AS_CODES ? p->form == CODES4 : w->by == BY_FLOATS || p->form != BF16S;
}

// Returns the kernels for blocks of m rows: for one panel, and for several.
static SpansKernel *const *spans_kernels_of(const Packed *w, int64_t m) {
    int64_t form = w->p->form;
    if (w->p->activations == AS_CODES) return codes4[m - 1];
#if HAVE_BF16_DOTS
    if (w->by == BY_DOTS && w->decodes) return decoded_bf16s[m - 1];
    if (w->by == BY_DOTS)
        return (form == CODES4 ? codes4_as_bf16s : form == CODES8 ? codes8_as_bf16s : e4m3s_as_bf16s)[m - 1];
#endif
    if (w->decodes) return decoded_floats[m - 1];
    return (form == CODES4   ? codes4_as_floats
            : form == CODES8 ? codes8_as_floats
            : form == BF16S  ? bf16s_as_floats
                             : e4m3s_as_floats)[m - 1];
}

static int64_t spans_panels(const Packed *w, int64_t m) {
    if (w->p->activations == AS_CODES) return PANELS_OF(m, SPAN_SUMS);
    return w->decodes ? PANELS_OF(m, BLOCK_SUMS) : PANELS_OF(m, SMALL_SUMS);
}

// A product's part in any of the kernels: some panels, all spans.
static Spans spans_of(const Packed *w, int64_t num_panels) {
    const Product *p = w->p;
    return (Spans){.x_stride = w->ready_rows / w->together * w->span_nbytes / 4, .sum_stride = w->num_spans,
                   .num_spans = w->num_spans, .num_words = w->span_words, .spans_of_group = p->spans_of_group,
                   .num_groups = p->num_groups, .panel_stride = w->num_spans * w->span_words * PANEL,
                   .spans_ahead = MAX(1, AHEAD / (w->span_words * PANEL)), .stride = num_panels * PANEL, .begins = 1};
}

// Sets the scales and the zeros of a panel and a span.
static void set_scales(const Packed *w, Spans *s, int64_t panel, int64_t span) {
    int64_t at = (panel * w->p->num_groups + span / w->p->spans_of_group) * PANEL;
    s->scales = w->p->scales ? w->p->scales + at : 0;
    s->zeros = w->p->zeros ? w->p->zeros + at : 0;
}

static void multiply_block(const Packed *w, SpansKernel *kernel, Spans *s, int64_t row, int64_t span, float *totals) {
    s->x = block_at(w, row / w->together, span);
    s->sums = w->sums + row * w->num_spans + span;
    s->totals = totals;
    kernel(s);
}

// Fetches what a block's results will overwrite: waiting for it at the end took a thirtieth of the time of long prompts.
static void fetch_results(const Packed *w, int64_t row, int64_t panel, int64_t num_panels) {
    const Product *p = w->p;
    for (int64_t r = row; r < MIN(row + w->together, p->num_rows); r++)
        for (int64_t q = panel; q < panel + num_panels; q++) __builtin_prefetch(p->out + r * p->outputs + q * PANEL, 1);
}

// Computes results of some rows, the first that of a block, and panels. The first panel of the next item is `next`.
static void multiply_in_registers(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                                  int64_t next, float *totals) {
    int64_t m = w->together, most = spans_panels(w, m);
    SpansKernel *const *kernels = spans_kernels_of(w, m);
    Spans s = spans_of(w, num_panels);
    for (int64_t q = 0, v; q < num_panels; q += v) {
        v = num_panels - q >= most ? most : 1;
        s.words = words_at(w, panel + q, 0);
        s.next = words_at(w, q + v < num_panels ? panel + q + v : next, 0);
        set_scales(w, &s, panel + q, 0);
        for (int64_t row = 0; row < num_rows; row += m) {
            s.fetches_next = row > 0 && row + m >= num_rows;
            if (num_rows > m && q + v == num_panels) fetch_results(w, first + row, panel, num_panels);
            multiply_block(w, kernels[v > 1], &s, first + row, 0, totals + row * s.stride + q * PANEL);
        }
    }
}

// The same, with weights that are decoded once for all rows, some spans at a time.
static void multiply_decoded(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                             int64_t next, float *totals) {
    int32_t ALIGNED decoded[NEAR_NBYTES / 4];
    int64_t m = w->together, most = spans_panels(w, m);
    SpansKernel *const *kernels = spans_kernels_of(w, m);
    Spans s = spans_of(w, num_panels);
    int64_t panel_stride = s.panel_stride, at_once = MAX(1, NEAR_NBYTES / (w->span_nbytes / m * PANEL * most));
    s.num_words = w->span_nbytes / 4 / m, s.words = decoded;
    for (int64_t span = 0; span < w->num_spans; span += s.num_spans, s.begins = 0) {
        s.num_spans = MIN(at_once, w->num_spans - span), s.in_group = span % w->p->spans_of_group;
        s.panel_stride = s.num_spans * s.num_words * PANEL;
        int64_t after = span + s.num_spans, num_words = s.num_spans * w->span_words;
        for (int64_t q = 0, v; q < num_panels; q += v) {
            v = num_panels - q >= most ? most : 1;
            const int32_t *from = words_at(w, panel + q, span);
            const int32_t *ahead = q + v < num_panels   ? words_at(w, panel + q + v, span)
                                   : after < w->num_spans ? words_at(w, panel, after)
                                                          : words_at(w, next, 0);
            for (int64_t i = 0; i < v; i++, from += panel_stride, ahead += panel_stride) {
                int32_t *to = decoded + i * s.panel_stride;
                if (w->by == BY_DOTS) decode_to_bf16s(w->p->form, from, num_words, to, ahead);
                else decode_to_floats(w->p->form, from, num_words, (float *)to, ahead);
            }
            set_scales(w, &s, panel + q, span);
            for (int64_t row = 0; row < num_rows; row += m) {
                if (q + v == num_panels && after == w->num_spans) fetch_results(w, first + row, panel, num_panels);
                multiply_block(w, kernels[v > 1], &s, first + row, span, totals + row * s.stride + q * PANEL);
            }
        }
    }
}

// Returns up to how many rows an item has.
static int64_t rows_of_item(const Packed *w) {
    if (!goes_over_spans(w) || w->decodes || w->p->activations == AS_CODES) return MANY_ROWS;
    return MIN(MANY_ROWS, MAX(LEAST_ROWS, X_NBYTES / (w->num_spans * w->p->span_padded * w->width)));
}

static void multiply_by_spans(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                              int64_t next) {
    float ALIGNED totals[(MANY_ROWS + BLOCK_ROWS) * MANY_PANELS * PANEL];
    if (w->decodes) multiply_decoded(w, first, num_rows, panel, num_panels, next, totals);
    else multiply_in_registers(w, first, num_rows, panel, num_panels, next, totals);
    finish(w, first, num_rows, panel, num_panels, totals);
}
