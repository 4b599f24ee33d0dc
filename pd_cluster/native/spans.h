// Products of codes of 4 bits whose spans are short: one call goes over all spans of some panels, and sums go from
// registers to totals. The chains are those of blocks.h, so results have the same bits.
#pragma once
#include "blocks.h"

#define SPANS_AHEAD 2 // spans that are fetched before they are needed

typedef struct {
    const int32_t *x, *sums; // of a block [span][word][row]; of its rows [row][span]
    int64_t x_stride, num_spans, num_words, spans_of_group, num_groups, panel_stride;
    const int32_t *words, *next; // of the first panel; of the panels to fetch
    const float *scales, *zeros; // of the first panel
    float *totals;               // [row][panels of the item][PANEL]
    int64_t stride;
    int fetches_next; // only: the panels' own words are in the cache already
} Spans;

typedef void SpansKernel(const Spans *s);

// A kernel for m rows and v panels.
INLINE void multiply_spans(Way y, int m, int v, const Spans *s) {
    int has_zeros = s->zeros != 0;
    const int32_t *words = s->words, *x = s->x;
    int64_t span_words = s->num_words * PANEL, in_group = 0, group = 0;
    for (int64_t span = 0; span < s->num_spans; span++, words += span_words, x = s->x + span * s->x_stride) {
        vi sums[BLOCK_ROWS][MANY_PANELS * PARTS];
        int64_t beyond = span + SPANS_AHEAD - s->num_spans;
        const int32_t *ahead = s->fetches_next ? s->next + span * span_words
                               : beyond < 0    ? words + SPANS_AHEAD * span_words
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
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            int64_t at = (q / PARTS * s->num_groups + group) * PANEL + q % PARTS * VL;
            vf scale = load(s->scales + at), zero = has_zeros ? load(s->zeros + at) : (vf){0};
            UNROLL for (int r = 0; r < m; r++) {
                int32_t of_x = s->sums[r * s->num_spans + span];
                float sum, *to = s->totals + r * s->stride + q * VL;
                vf value = (vf)sums[r][q];
                if (y.as == AS_CODES) value = to_floats(sums[r][q] - of_x * code_offset(y.form)), sum = (float)of_x;
                else memcpy(&sum, &of_x, 4);
                store(to, folded(1, has_zeros, value, zero, sum, scale, span ? load(to) : (vf){0}));
            }
        }
        if (++in_group == s->spans_of_group) in_group = 0, group++;
    }
}

#undef KIND
#undef KERNEL
#undef PANELS_OF
#define PANELS_OF(m, sums)                                                                                             \
    ((m) * 8 * PARTS <= (sums) ? 8 : (m) * 4 * PARTS <= (sums) ? 4 : (m) * 2 * PARTS <= (sums) ? 2 : 1)
#define KIND SpansKernel
#define KERNEL(name, m, v, form, as)                                                                                   \
    static __attribute__((noinline)) void name(const Spans *s) { multiply_spans((Way){form, as}, m, v, s); }

FEW_KERNELS(codes4_as_floats, FEW_SUMS, CODES4, AS_FLOATS)
#if HAVE_BF16_DOTS
FEW_KERNELS(codes4_as_bf16s, FEW_SUMS, CODES4, AS_BF16S)
#endif
#if SPAN_ROWS == 8
TABLE(8, codes4, SPAN_SUMS, CODES4, AS_CODES)
#else
FEW_KERNELS(codes4, SPAN_SUMS, CODES4, AS_CODES)
#endif

// Whether a product is one of these.
static int goes_over_spans(const Packed *w) { return w->p->form == CODES4 && !w->decodes; }

static SpansKernel *const *spans_kernels_of(const Packed *w, int64_t m) {
    if (w->p->activations == AS_CODES) return codes4[m - 1];
#if HAVE_BF16_DOTS
    if (w->by == BY_DOTS) return codes4_as_bf16s[m - 1];
#endif
    return codes4_as_floats[m - 1];
}

// Computes results of some rows, the first that of a block, and panels. The first panel of the next item is `next`.
static void multiply_by_spans(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels,
                              int64_t next) {
    const Product *p = w->p;
    float ALIGNED totals[(MANY_ROWS + BLOCK_ROWS) * MANY_PANELS * PANEL];
    int64_t m = w->together, num_blocks = (num_rows + m - 1) / m, most = PANELS_OF(m, p->activations == AS_CODES ? SPAN_SUMS : FEW_SUMS);
    SpansKernel *const *kernels = spans_kernels_of(w, m);
    Spans s = {.x_stride = w->ready_rows / m * w->span_nbytes / 4, .num_spans = w->num_spans,
               .num_words = w->span_words, .spans_of_group = p->spans_of_group, .num_groups = p->num_groups,
               .panel_stride = w->num_spans * w->span_words * PANEL, .stride = num_panels * PANEL};
    for (int64_t q = 0, v; q < num_panels; q += v) {
        v = num_panels - q >= most ? most : 1;
        int64_t at = (panel + q) * p->num_groups * PANEL;
        s.words = words_at(w, panel + q, 0);
        s.next = words_at(w, q + v < num_panels ? panel + q + v : next, 0);
        s.scales = p->scales + at, s.zeros = p->zeros ? p->zeros + at : 0;
        for (int64_t block = 0; block < num_blocks; block++) {
            s.x = block_at(w, first / m + block, 0);
            s.sums = w->sums + (first + block * m) * w->num_spans;
            s.totals = totals + block * m * s.stride + q * PANEL;
            s.fetches_next = num_blocks > 1 && block == num_blocks - 1;
            kernels[v > 1](&s);
        }
    }
    finish(w, first, num_rows, panel, num_panels, totals);
}
