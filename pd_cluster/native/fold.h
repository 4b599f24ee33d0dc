// From sums of spans to results: codes get their scales, rows theirs, and outputs their bias.
#pragma once
#include "words.h"

// Returns x, rounded: compilers must not fuse its multiplication with a later addition, which not all machines have.
INLINE vf rounded(vf x) {
#if VL == 16
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

// Adds sums c of one panel, [num_rows][MOST_PANELS * PANEL], to totals, scaled. The three flags are constants.
INLINE void fold_panel(const Packed *w, int codes, int has_zeros, int has_scales, const float *c, int64_t num_rows,
                       const int32_t *sums, const float *scales, const float *zeros, float *totals, int64_t stride,
                       int is_first) {
    int32_t offset = code_offset(w->p->form);
    vf scale[PARTS], zero[PARTS];
    UNROLL for (int h = 0; h < PARTS; h++) {
        if (has_scales) scale[h] = load(scales + h * VL);
        if (has_zeros) zero[h] = load(zeros + h * VL);
    }
    for (int64_t r = 0; r < num_rows; r++, c += MOST_PANELS * PANEL, totals += stride, sums += w->num_spans) {
        float sum = 0;
        if (codes) sum = (float)*sums;
        else if (has_zeros) memcpy(&sum, sums, 4);
        UNROLL for (int h = 0; h < PARTS; h++) {
            vf value = load(c + h * VL), before = is_first ? (vf){0} : load(totals + h * VL);
            if (codes) value = to_floats((vi)value - *sums * offset);
            if (has_zeros) value -= zero[h] * splat(sum);
            store(totals + h * VL, has_scales ? before + value * scale[h] : before + value);
        }
    }
}

// Adds a span's sums c [MOST_ROWS][MOST_PANELS * PANEL] to totals [num_rows][num_panels * PANEL].
static void fold(const Packed *w, const float *c, int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels,
                 int64_t span, float *totals) {
    const Product *p = w->p;
    int is_first = span == 0, codes = p->activations == AS_CODES;
    const int32_t *sums = w->sums + row * w->num_spans + span;
    for (int64_t q = 0; q < num_panels; q++) {
        int64_t at = ((panel + q) * p->num_groups + span / p->spans_of_group) * PANEL, stride = num_panels * PANEL;
        const float *from = c + q * PANEL, *scales = p->scales + at, *zeros = p->zeros + at;
        float *to = totals + q * PANEL;
#define FOLD(codes, zero, scale)                                                                                       \
    fold_panel(w, codes, zero, scale, from, num_rows, sums, scales, zeros, to, stride, is_first)
        if (codes && p->zeros) FOLD(1, 1, 1);
        else if (codes) FOLD(1, 0, 1);
        else if (p->zeros) FOLD(0, 1, 1);
        else if (p->scales) FOLD(0, 0, 1);
        else FOLD(0, 0, 0);
#undef FOLD
    }
}

// Writes results: totals times the scales of their rows, plus the bias.
static void finish(const Packed *w, int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels,
                   const float *totals) {
    const Product *p = w->p;
    for (int64_t r = row; r < row + num_rows; r++) for (int64_t q = panel; q < panel + num_panels; q++) {
        float ALIGNED part[PANEL], *out = p->out + r * p->outputs + q * PANEL;
        int64_t n = MIN(PANEL, p->outputs - q * PANEL);
        float *to = n < PANEL ? part : out; // the last panel may go beyond the row
        UNROLL for (int h = 0; h < PARTS; h++, totals += VL) {
            vf value = load(totals);
            if (p->activations == AS_CODES) value = rounded(value * w->row_scales[r]);
            if (p->bias) value += load(p->bias + q * PANEL + h * VL);
            store(to + h * VL, value);
        }
        if (n < PANEL) memcpy(out, part, (size_t)n * 4);
    }
}
