// Products of float32 activations with weights of any form: one chain of multiplications and additions for each result
// and span, from the first input to the last, however many rows there are.
#pragma once
#include "words.h"

#if VL == 16
#define FLOAT_ROWS 8
#define FEW_PANELS 2
#else
#define FLOAT_ROWS 4
#define FEW_PANELS 1
#endif

// Computes c[r][panel] = sum over the span of x[r] * words, for m rows and v panels, both constants.
INLINE void float_block(int form, int m, int v, const float *x, int64_t x_stride, const int32_t *words,
                        int64_t panel_stride, int64_t num_words, float *c) {
    vf acc[FLOAT_ROWS][MOST_PANELS * PARTS];
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) acc[r][q] = (vf){0};
    for (int64_t k = 0; k < num_words; k++) {
        vi word[MOST_PANELS * PARTS];
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            const int32_t *at = words + q / PARTS * panel_stride + k * PANEL + q % PARTS * VL;
            word[q] = load_words(at);
            if (m == 1 && q % PARTS == 0) __builtin_prefetch(at + 32 * PANEL);
        }
        UNROLL for (int i = 0; i < inputs_of_word(form); i++) {
            vf y[MOST_PANELS * PARTS];
            UNROLL for (int q = 0; q < v * PARTS; q++) y[q] = number(form, word[q], i);
            UNROLL for (int r = 0; r < m; r++) {
                vf value = splat(x[r * x_stride + k * inputs_of_word(form) + i]);
                UNROLL for (int q = 0; q < v * PARTS; q++) acc[r][q] += value * y[q];
            }
        }
    }
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
        store(c + r * MOST_PANELS * PANEL + q * VL, acc[r][q]);
}

// The same for any number of rows up to MOST_ROWS and of panels; x has FLOAT_ROWS whole rows if it has several.
INLINE void float_blocks(int form, int64_t num_rows, int64_t num_panels, const float *x, int64_t x_stride,
                         const int32_t *words, int64_t panel_stride, int64_t num_words, float *c) {
    for (int64_t q = 0, v; q < num_panels; q += v) {
        const int32_t *at = words + q * panel_stride;
        v = num_rows == 1 && num_panels - q >= 4 ? 4 : num_rows > 1 && num_panels - q >= FEW_PANELS ? FEW_PANELS : 1;
        for (int64_t r = 0, m; r < num_rows; r += m) {
            m = num_rows == 1 ? 1 : form == FLOATS && num_rows - r > 4 ? FLOAT_ROWS : 4;
            const float *rows = x + r * x_stride;
            float *to = c + r * MOST_PANELS * PANEL + q * PANEL;
#define BLOCK(m, v) float_block(form, m, v, rows, x_stride, at, panel_stride, num_words, to)
            if (m == 1 && v == 4) BLOCK(1, 4);
            else if (m == 1) BLOCK(1, 1);
            else if (form == FLOATS && m == FLOAT_ROWS && v == FEW_PANELS) BLOCK(FLOAT_ROWS, FEW_PANELS);
            else if (form == FLOATS && m == FLOAT_ROWS) BLOCK(FLOAT_ROWS, 1);
            else if (v == FEW_PANELS) BLOCK(4, FEW_PANELS);
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

// Decodes a span of one panel to words of form FLOATS.
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
#define BLOCKS(form) float_blocks(form, num_rows, num_panels, x, x_stride, words, panel_stride, num_words, c)
    switch (form) {
    case FLOATS: BLOCKS(FLOATS); break;
    case BF16S: BLOCKS(BF16S); break;
    case CODES8: BLOCKS(CODES8); break;
    case CODES4: BLOCKS(CODES4); break;
    default: BLOCKS(E4M3S);
    }
#undef BLOCKS
}
