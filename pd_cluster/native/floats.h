// Products of float32 activations with weights of any form: one chain of multiplications and additions for each result
// and span, from the first input to the last, however many rows there are.
#pragma once
#include "words.h"

#if VL == 16
#define FLOAT_ROWS 12 // of a tile in registers; many rows are stored in blocks of as many
#define FLOAT_PANELS 2
#else
#define FLOAT_ROWS 6
#define FLOAT_PANELS 1
#endif

// Computes acc[r][panel] = sum over the span of x[r] * words, for m rows and v panels, both constants. Inputs of a row
// are `apart`, rows x_stride.
INLINE void sum_block(int form, int m, int v, const float *x, int64_t x_stride, int64_t apart, const int32_t *words,
                      int64_t panel_stride, int64_t num_words, vf (*acc)[MOST_PANELS * PARTS]) {
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) acc[r][q] = (vf){0};
    for (int64_t k = 0; k < num_words; k++) {
        vi word[MOST_PANELS * PARTS];
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            const int32_t *at = words + q / PARTS * panel_stride + k * PANEL + q % PARTS * VL;
            word[q] = load_words(at);
            if (m == 1 && q % PARTS == 0) __builtin_prefetch(at + AHEAD);
        }
        UNROLL for (int i = 0; i < inputs_of_word(form); i++) {
            vf y[MOST_PANELS * PARTS];
            UNROLL for (int q = 0; q < v * PARTS; q++) y[q] = number(form, word[q], i);
            UNROLL for (int r = 0; r < m; r++) {
                vf value = splat(x[r * x_stride + (k * inputs_of_word(form) + i) * apart]);
                UNROLL for (int q = 0; q < v * PARTS; q++) acc[r][q] += value * y[q];
            }
        }
    }
}

INLINE void float_block(int form, int m, int v, const float *x, int64_t x_stride, const int32_t *words,
                        int64_t panel_stride, int64_t num_words, float *c) {
    vf acc[FLOAT_ROWS][MOST_PANELS * PARTS];
    sum_block(form, m, v, x, x_stride, 1, words, panel_stride, num_words, acc);
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
        store(c + r * MOST_PANELS * PANEL + q * VL, acc[r][q]);
}

// The same for at most FEW_ROWS rows; x has whole blocks of four if it has several.
INLINE void few_floats(int form, int64_t num_rows, int64_t num_panels, const float *x, int64_t x_stride,
                       const int32_t *words, int64_t panel_stride, int64_t num_words, float *c) {
    for (int64_t q = 0, v; q < num_panels; q += v) {
        const int32_t *at = words + q * panel_stride;
        int64_t most = num_rows == 1 ? 4 : FLOAT_PANELS;
        v = num_panels - q >= most ? most : 1;
        for (int64_t r = 0; r < num_rows; r += 4) {
            const float *rows = x + r * x_stride;
            float *to = c + r * MOST_PANELS * PANEL + q * PANEL;
#define BLOCK(m, v) float_block(form, m, v, rows, x_stride, at, panel_stride, num_words, to)
            if (num_rows == 1 && v == 4) BLOCK(1, 4);
            else if (num_rows == 1) BLOCK(1, 1);
            else if (v == FLOAT_PANELS) BLOCK(4, FLOAT_PANELS);
            else BLOCK(4, 1);
#undef BLOCK
        }
    }
}

INLINE void decode_form(int form, const int32_t *words, int64_t num_words, float *out) {
    for (int64_t k = 0; k < num_words; k++) for (int h = 0; h < PARTS; h++) {
        vi word = load_words(words + k * PANEL + h * VL);
        UNROLL for (int i = 0; i < inputs_of_word(form); i++)
            store(out + (k * inputs_of_word(form) + i) * PANEL + h * VL, number(form, word, i));
    }
}

// Decodes a span of one panel to numbers.
static void decode_to_floats(int64_t form, const int32_t *words, int64_t num_words, float *out) {
    switch (form) {
    case BF16S: decode_form(BF16S, words, num_words, out); break;
    case CODES8: decode_form(CODES8, words, num_words, out); break;
    case CODES4: decode_form(CODES4, words, num_words, out); break;
    default: decode_form(E4M3S, words, num_words, out);
    }
}

static void multiply_floats(int64_t form, int64_t num_rows, int64_t num_panels, const float *x, int64_t x_stride,
                            const int32_t *words, int64_t panel_stride, int64_t num_words, float *c) {
#define FEW(form) few_floats(form, num_rows, num_panels, x, x_stride, words, panel_stride, num_words, c)
    switch (form) {
    case BF16S: FEW(BF16S); break;
    case CODES8: FEW(CODES8); break;
    case CODES4: FEW(CODES4); break;
    default: FEW(E4M3S);
    }
#undef FEW
}
