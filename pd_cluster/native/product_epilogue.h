// Turns sums of spans into results: multiplies by the scales of codes and of rows, and adds the outputs' bias.
#pragma once
#include "packed_weights.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// Returns x rounded to float32. Prevents compilers from fusing the multiplication that gives x with a later addition,
// because some machines cannot fuse them.
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

// Returns a * b + c, rounded only once if the machine can do that; compilers fuse only some such expressions.
INLINE vf fused(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Returns the new total of a span: (sums - zero * x) * scale + before. The two flags are constants.
INLINE vf folded(int has_scales, int has_zeros, vf sums, vf zero, float x, vf scale, vf before) {
    if (has_zeros) sums = fused(-zero, splat(x), sums);
    return has_scales ? fused(sums, scale, before) : before + sums;
}

// Adds the scaled sums c of one panel, [num_rows][MOST_PANELS * PANEL], to totals. The three flags are constants.
INLINE void fold_panel(const Packed *w, int codes, int has_zeros, int has_scales, const float *c, int64_t num_rows,
                       const int32_t *sums, const float *scales, const float *zeros, float *totals, int64_t stride,
                       int is_first) {
    int32_t offset = code_offset(w->p->form);
    vf scale[PARTS] = {0}, zero[PARTS] = {0};
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
            store(totals + h * VL, folded(has_scales, has_zeros, value, zero[h], sum, scale[h], before));
        }
    }
}

// Adds a span's sums c [num_rows][MOST_PANELS * PANEL] to totals, whose rows are `stride` apart.
static void fold(const Packed *w, const float *c, int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels,
                 int64_t span, float *totals, int64_t stride) {
    const Product *p = w->p;
    int is_first = span == 0, codes = p->activations == AS_CODES;
    const int32_t *sums = w->sums + row * w->num_spans + span;
    for (int64_t q = 0; q < num_panels; q++) {
        int64_t at = ((panel + q) * p->num_groups + span / p->spans_of_group) * PANEL;
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

// Writes results: totals times the scales of their rows, plus the bias. With `to`, results are rounded and added to
// rows.
static void finish(const Packed *w, int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels,
                   const float *totals) {
    const Product *p = w->p;
    for (int64_t r = row; r < row + num_rows; r++) for (int64_t q = panel; q < panel + num_panels; q++) {
        float ALIGNED part[PANEL], *out = out_row(w, r) + q * PANEL;
        int64_t n = MIN(PANEL, p->outputs - q * PANEL);
        float *to = n < PANEL ? part : out; // the last panel may extend beyond the row
        if (n < PANEL && w->to) memcpy(part, out, (size_t)n * 4);
        UNROLL for (int h = 0; h < PARTS; h++, totals += VL) {
            vf value = load(totals);
            if (p->activations == AS_CODES) value = rounded(value * w->row_scales[r]);
            if (p->bias) value += load(p->bias + q * PANEL + h * VL);
            if (w->to) value = load(to + h * VL) + rounded(value * w->times[r]);
            store(to + h * VL, value);
        }
        if (n < PANEL) memcpy(out, part, (size_t)n * 4);
    }
}
