// Activations of packed products: float32 rows become padded rows of numbers, of bfloat16 or of int8 codes.
#pragma once
#include "words.h"

#define SMALLEST_ROW 0x0d800000 // 2^-100 as bits: codes of smaller rows are zeros

// Rounds to the nearest bfloat16, ties to even, with the bits of a float32. NaN stays NaN.
INLINE uint32_t round_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : rounded;
}

// Returns the largest magnitude's bits: as integers, infinities and then NaN are the largest.
static int32_t largest(const float *x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

// Chooses codes round(x * inverse), the largest `most_code`. Returns a code's worth: NaN if one of x is not finite.
static float set_scale(const float *x, int64_t n, float most_code, float *inverse) {
    int32_t bits = largest(x, n);
    float most;
    memcpy(&most, &bits, 4);
    *inverse = bits < SMALLEST_ROW || bits >= 0x7f800000 ? 0.0f : most_code / most;
    return bits >= 0x7f800000 ? __builtin_nanf("") : most / most_code;
}

static int32_t to_codes(const float *x, int64_t n, float inverse, int8_t *codes) {
    int32_t sum = 0;
    if (inverse == 0) {
        memset(codes, 0, (size_t)n);
        return 0;
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t code = (int32_t)__builtin_rintf(x[i] * inverse);
        codes[i] = (int8_t)code;
        sum += code;
    }
    return sum;
}

// Sums 16 interleaved parts, then these in order.
static float sum_in_order(const float *x, int64_t n) {
    float parts[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) for (int j = 0; j < 16; j++) parts[j] += x[i + j];
    for (int j = 0; i + j < n; j++) parts[j] += x[i + j];
    for (int j = 0; j < 16; j++) sum += parts[j];
    return sum;
}

// Writes numbers of x as they are, or rounded to bfloat16, `step` apart.
static void to_floats_apart(const float *x, int64_t n, int rounds, float *to, int64_t step) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = round_to_bf16(x[i]);
        float rounded;
        memcpy(&rounded, &bits, 4);
        to[i * step] = rounds ? rounded : x[i];
    }
}

static float sum_of_rounded(const float *x, int64_t n) {
    float total = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = round_to_bf16(x[i]);
        float number;
        memcpy(&number, &bits, 4);
        total += number;
    }
    return total;
}

static void prepare_row(const Packed *w, int64_t row) {
    const Product *p = w->p;
    const float *from = p->x + MIN(row, p->num_rows - 1) * p->inputs;
    uint8_t *to = w->x + row / w->together * w->row_nbytes + row % w->together * w->width;
    int64_t step = w->together, is_row = row < p->num_rows;
    float inverse = 0;
    if (p->activations == AS_CODES) w->row_scales[row] = set_scale(from, p->inputs, 127.0f, &inverse);
    for (int64_t span = 0; span < w->num_spans; span++, to += w->span_nbytes) {
        int64_t in_group = span % p->spans_of_group * p->span_inputs;
        int64_t first = span / p->spans_of_group * p->group + in_group;
        int64_t n = MAX(0, MIN(MIN(p->span_inputs, p->group - in_group), p->inputs - first)) * is_row;
        const float *x = from + first;
        int32_t *sum = w->sums + row * w->num_spans + span;
        if (p->activations == AS_CODES)
            *sum = to_codes(x, n, inverse, (int8_t *)to);
        else if (w->width == 2)
            for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = (uint16_t)(round_to_bf16(x[i]) >> 16);
        else
            to_floats_apart(x, n, p->activations == AS_BF16S, (float *)to, step);
        if (step == 1)
            memset(to + n * w->width, 0, (size_t)((p->span_padded - n) * w->width));
        else
            for (int64_t i = n; i < p->span_padded; i++) ((float *)to)[i * step] = 0;
        if (p->zeros && p->activations != AS_CODES) {
            float total = p->activations == AS_FLOATS ? sum_in_order(x, n) : sum_of_rounded(x, n);
            memcpy(sum, &total, 4);
        }
    }
}
