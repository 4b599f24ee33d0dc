// Activations of packed products: float32 rows become padded rows of numbers, of bfloat16 or of int8 codes.
#pragma once
#include "floats.h"

#define SQUARES ((FLOAT_ROWS + VL - 1) / VL) // vectors that hold FLOAT_ROWS numbers
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

INLINE float rounded_to_bf16(float x) {
    uint32_t bits = round_to_bf16(x);
    float rounded;
    memcpy(&rounded, &bits, 4);
    return rounded;
}

INLINE vf vector_to_bf16(vf x) {
    vi bits = (vi)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) & (int32_t)0xffff0000;
    return pick((bits & 0x7fffffff) > 0x7f800000, (vf)(0x7fc00000 - (vi){0}), (vf)rounded);
}

// Sets the sum of a span's numbers, as they are multiplied.
static void set_sum(const Product *p, const float *x, int64_t n, int32_t *sum) {
    float total = 0;
    if (p->activations == AS_FLOATS) total = sum_in_order(x, n);
    else for (int64_t i = 0; i < n; i++) total += rounded_to_bf16(x[i]);
    memcpy(sum, &total, 4);
}

// Returns the first input of a span, and how many of its inputs there are.
static int64_t inputs_of_span(const Product *p, int64_t span, int64_t *n) {
    int64_t in_group = span % p->spans_of_group * p->span_inputs;
    int64_t first = span / p->spans_of_group * p->group + in_group;
    *n = MAX(0, MIN(MIN(p->span_inputs, p->group - in_group), p->inputs - first));
    return first;
}

static void prepare_row(const Packed *w, int64_t row) {
    const Product *p = w->p;
    const float *from = p->x + MIN(row, p->num_rows - 1) * p->inputs;
    uint8_t *to = w->x + row * w->row_nbytes;
    int64_t n, is_row = row < p->num_rows;
    float inverse = 0;
    if (p->activations == AS_CODES) w->row_scales[row] = set_scale(from, p->inputs, 127.0f, &inverse);
    for (int64_t span = 0; span < w->num_spans; span++, to += w->span_nbytes) {
        const float *x = from + inputs_of_span(p, span, &n);
        n *= is_row;
        int32_t *sum = w->sums + row * w->num_spans + span;
        if (p->activations == AS_CODES)
            *sum = to_codes(x, n, inverse, (int8_t *)to);
        else if (w->width == 2)
            for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = (uint16_t)(round_to_bf16(x[i]) >> 16);
        else if (p->activations == AS_BF16S)
            for (int64_t i = 0; i < n; i++) ((float *)to)[i] = rounded_to_bf16(x[i]);
        else
            memcpy(to, x, (size_t)n * 4);
        memset(to + n * w->width, 0, (size_t)((p->span_padded - n) * w->width));
        if (p->zeros && p->activations != AS_CODES) set_sum(p, x, n, sum);
    }
}

// Returns a span of a block of FLOAT_ROWS rows, [input][row]. Blocks of a span follow each other.
INLINE float *block_at(const Packed *w, int64_t block, int64_t span) {
    return (float *)(w->x + (span * (w->ready_rows / FLOAT_ROWS) + block) * w->span_nbytes);
}

// Writes VL inputs of such a block from the rows at `from`. Vectors of rows that are too long are overwritten by the
// next; `is_last`: none may be.
INLINE void transpose_block(const float **from, int64_t at, int rounds, int is_last, float *to) {
    vf square[SQUARES][VL];
    UNROLL for (int s = 0; s < SQUARES; s++) {
        UNROLL for (int r = 0; r < VL; r++) square[s][r] = load(from[s * VL + r] + at);
        if (rounds) UNROLL for (int r = 0; r < VL; r++) square[s][r] = vector_to_bf16(square[s][r]);
        transpose(square[s]);
    }
    for (int k = 0; k < VL; k++) UNROLL for (int s = 0; s < SQUARES; s++) {
        int n = MIN(VL, FLOAT_ROWS - s * VL);
        if (is_last) memcpy(to + k * FLOAT_ROWS + s * VL, &square[s][k], (size_t)n * 4);
        else store(to + k * FLOAT_ROWS + s * VL, square[s][k]);
    }
}

static void prepare_block(const Packed *w, int64_t block) {
    const Product *p = w->p;
    const float *from[SQUARES * VL];
    int64_t n, row = block * FLOAT_ROWS, most = MIN(FLOAT_ROWS, p->num_rows - row) - 1;
    int rounds = p->activations == AS_BF16S;
    for (int64_t r = 0; r < SQUARES * VL; r++) from[r] = p->x + (row + MIN(r, most)) * p->inputs;
    for (int64_t span = 0; span < w->num_spans; span++) {
        int64_t first = inputs_of_span(p, span, &n), i = 0;
        float *to = block_at(w, block, span);
        for (; i + VL <= n; i += VL, to += VL * FLOAT_ROWS)
            transpose_block(from, first + i, rounds, i + 2 * VL > p->span_padded, to);
        for (; i < n; i++) for (int r = 0; r < FLOAT_ROWS; r++, to++)
            *to = rounds ? rounded_to_bf16(from[r][first + i]) : from[r][first + i];
        memset(to, 0, (size_t)((p->span_padded - n) * FLOAT_ROWS * 4));
        if (p->zeros)
            for (int r = 0; r < FLOAT_ROWS; r++)
                set_sum(p, from[r] + first, n, w->sums + (row + r) * w->num_spans + span);
    }
}
