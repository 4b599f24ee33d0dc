// Products whose weights are decoded once for many blocks of rows. Some spans are decoded into the cache, for
// one or two panels at a time. Weights stored as floats are read in place, while the next ones are prefetched. As in
// span_products.h, a result is one chain of additions over each span and one chain over the spans, so the bits are
// equal.
#pragma once
#include "register_blocks.h"

#if VL == 16
#define NEAR_NBYTES 32768 // bytes of decoded weights
#define NEAR_ROWS 528     // maximum number of rows of an item, with which x of these spans stays in the L2 cache
#else
#define NEAR_NBYTES 16384
#define NEAR_ROWS 264
#endif
#define NEAR_X_NBYTES (2 << 20) // bytes of the rows that are prepared and multiplied together
#define LEAST_NEAR_ROWS 96      // least number of such rows, however wide: each part of rows decodes the weights again
#define NEAR_PANELS (BLOCK_SUMS / BLOCK_ROWS / PARTS)

typedef struct {
    const int32_t *x, *sums; // x of the first block: [span][block][word][row]; sums of its rows: [row][span]
    int64_t num_blocks, x_stride, sum_stride, num_spans, num_words;
    int64_t in_group, spans_of_group, num_groups; // in_group: the first span's number in its group
    const int32_t *words, *ahead;                 // [panel][span][word][PANEL]; ahead: the words to prefetch
    int64_t panel_stride, step;                   // step: numbers prefetched per four words of a block
    const float *scales, *zeros;                  // of the first panel and group; zeros may be null
    float *totals, *to; // old totals of the first row and panel, rows `stride` apart; new totals, `to_stride` apart
    int64_t stride, to_stride;
} Near;

typedef void NearKernel(const Near *s);

// Adds a span's scaled sums to totals: reads rows `stride` apart, writes rows `to_stride` apart.
INLINE void add_scaled(int has_zeros, int m, int v, const float *sums, const float *scales, const float *zeros,
                       int64_t scale_stride, const int32_t *of_x, int64_t sum_stride, const float *totals,
                       int64_t stride, float *to, int64_t to_stride) {
    UNROLL for (int q = 0; q < v * PARTS; q++) {
        int64_t at = q / PARTS * scale_stride + q % PARTS * VL;
        vf scale = load(scales + at), zero = has_zeros ? load(zeros + at) : (vf){0};
        UNROLL for (int r = 0; r < m; r++) {
            vf sum = load(sums + (r * v * PARTS + q) * VL), before = load(totals + r * stride + q * VL);
            float x = 0;
            if (has_zeros) memcpy(&x, of_x + r * sum_stride, 4);
            store(to + r * to_stride + q * VL, folded(1, has_zeros, sum, zero, x, scale, before));
        }
    }
}

// The kernel for blocks of m rows and v panels.
INLINE void multiply_near(Way y, int m, int v, const Near *s) {
    float ALIGNED kept[BLOCK_ROWS * NEAR_PANELS * PANEL];
    int64_t num_words = s->num_words, panel_stride = s->panel_stride, num_spans = s->num_spans, half = s->step / 2;
    const int32_t *ahead = s->ahead;
    int64_t stride = s->stride, sum_stride = s->sum_stride, scale_stride = s->num_groups * PANEL;
    for (int64_t block = 0; block < s->num_blocks; block++) {
        float *totals = s->totals + block * m * stride, *last = s->to + block * m * s->to_stride;
        const int32_t *w = s->words;
        int64_t in_group = s->in_group, group = 0;
        UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v; q++)
            __builtin_prefetch(last + r * s->to_stride + q * PANEL, 1);
        for (int64_t span = 0; span < num_spans; span++) {
            const int32_t *x = s->x + span * s->x_stride + block * m * num_words, *end = w + num_words * PANEL;
            vi sums[BLOCK_ROWS][NEAR_PANELS * PARTS];
            UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) sums[r][q] = (vi){0};
            do {
                UNROLL for (int q = 0; q < v; q++) {
                    __builtin_prefetch(ahead + q * panel_stride);
                    __builtin_prefetch(ahead + q * panel_stride + half);
                }
                ahead += s->step;
                UNROLL for (int i = 0; i < 4; i++, x += m, w += PANEL) { // the number of words is a multiple of four
                    vi words[NEAR_PANELS * PARTS];
                    UNROLL for (int q = 0; q < v * PARTS; q++)
                        words[q] = load_words(w + q / PARTS * panel_stride + q % PARTS * VL);
                    UNROLL for (int r = 0; r < m; r++) {
                        vi value = x[r] - (vi){0};
                        UNROLL for (int q = 0; q < v * PARTS; q++)
                            sums[r][q] = add_product(y, sums[r][q], words[q], value);
                    }
                }
            } while (w < end);
            // From here on the totals are read from memory; otherwise compilers copy registers in the loop.
            UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
                store(kept + (r * v * PARTS + q) * VL, (vf)sums[r][q]);
            __asm__ volatile("" : : "r"(kept) : "memory");
            int is_last = span == num_spans - 1;
            const float *scales = s->scales + group * PANEL, *zeros = s->zeros + group * PANEL;
            const int32_t *of_x = s->sums + block * m * sum_stride + span;
            float *to = is_last ? last : totals;
            int64_t to_stride = is_last ? s->to_stride : stride;
            if (s->zeros)
                add_scaled(1, m, v, kept, scales, zeros, scale_stride, of_x, sum_stride, totals, stride, to, to_stride);
            else
                add_scaled(0, m, v, kept, scales, 0, scale_stride, of_x, 0, totals, stride, to, to_stride);
            if (++in_group == s->spans_of_group) in_group = 0, group++;
        }
    }
}

// Only some numbers of rows have kernels, to save compile time.
#undef KIND
#undef KERNEL
#undef PANELS_OF
#define PANELS_OF(m, sums) NEAR_PANELS
#define KIND NearKernel
#define KERNEL(name, m, v, form, as)                                                                                   \
    static __attribute__((noinline)) void name(const Near *s) { multiply_near((Way){form, as}, m, v, s); }
#define NONE {0, 0}
#if VL == 16
#define TO_LARGE(name, sums, form, as)                                                                                 \
    KERNELS(name, 8, sums, form, as) KERNELS(name, 10, sums, form, as) KERNELS(name, 11, sums, form, as)               \
    KERNELS(name, 12, sums, form, as)
#define NAMES_LARGE(name)                                                                                              \
    NONE, NONE, NONE, NONE, NONE, NONE, NONE, BOTH(name##8), NONE, BOTH(name##10), BOTH(name##11), BOTH(name##12)
#else
#define TO_LARGE(name, sums, form, as)                                                                                 \
    KERNELS(name, 4, sums, form, as) KERNELS(name, 5, sums, form, as) KERNELS(name, 6, sums, form, as)
#define NAMES_LARGE(name) NONE, NONE, NONE, BOTH(name##4), BOTH(name##5), BOTH(name##6)
#endif
TABLE(LARGE, decoded_floats, BLOCK_SUMS, FLOATS, AS_FLOATS)
#if HAVE_BF16_DOTS
TABLE(LARGE, decoded_bf16s, BLOCK_SUMS, BF16S, AS_BF16S)
#define DECODED_BF16S decoded_bf16s
#else
#define DECODED_BF16S decoded_floats // never used
#endif
