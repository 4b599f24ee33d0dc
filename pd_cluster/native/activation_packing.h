// Packs the activations of products: float32 rows become padded rows of float32, bfloat16 or int8 codes.
#pragma once
#include "packed_weights.h"

#define SQUARES ((BLOCK_ROWS + VL - 1) / VL) // vectors for one number of each row of a block
#define SEGMENT 512 // inputs of a block that are prepared together
#define SMALLEST_ROW 0x0d800000 // the bits of 2^-100: rows whose values are all smaller get codes of zero

// Rounds to the nearest bfloat16, ties to even, stored as a float32. NaN stays NaN.
INLINE uint32_t round_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : rounded;
}

// Returns the bits of the largest magnitude. Compared as integers, NaN is above infinity, and infinity above numbers.
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

// Writes codes round(x * inverse), at most `most_code`. Returns the scale of a code: NaN if any x is not finite.
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

// Sums 16 interleaved parts, then adds the parts in order.
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

// Stores the sum of a span's values, in the form in which the values are multiplied.
static void set_sum(const Product *p, const float *x, int64_t n, int32_t *sum) {
    float total = 0;
    if (p->activations == AS_FLOATS) total = sum_in_order(x, n);
    else for (int64_t i = 0; i < n; i++) total += rounded_to_bf16(x[i]);
    memcpy(sum, &total, 4);
}

// Returns the first input of a span, and the number of its inputs without padding.
static int64_t inputs_of_span(const Product *p, int64_t span, int64_t *n) {
    int64_t in_group = span % p->spans_of_group * p->span_inputs;
    int64_t first = span / p->spans_of_group * p->group + in_group;
    *n = MAX(0, MIN(MIN(p->span_inputs, p->group - in_group), p->inputs - first));
    return first;
}

// Writes the `padded` values to multiply: n from x, then zeros. Returns the sum of the codes.
static int32_t write_numbers(const Packed *w, const float *x, int64_t n, int64_t padded, float inverse, uint8_t *to) {
    int32_t sum = 0;
    if (w->p->activations == AS_CODES)
        sum = to_codes(x, n, inverse, (int8_t *)to);
    else if (w->width == 2)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = (uint16_t)(round_to_bf16(x[i]) >> 16);
    else if (w->p->activations == AS_BF16S)
        for (int64_t i = 0; i < n; i++) ((float *)to)[i] = rounded_to_bf16(x[i]);
    else
        memcpy(to, x, (size_t)n * 4);
    memset(to + n * w->width, 0, (size_t)((padded - n) * w->width));
    return sum;
}

// Prepares a row for tiles, as [span][input].
static void prepare_row(const Packed *w, int64_t row) {
    const Product *p = w->p;
    const float *from = x_row(w, MIN(row, p->num_rows - 1));
    uint8_t *to = w->x + row * w->row_nbytes;
    int64_t n, is_row = row < p->num_rows;
    float inverse = 0;
    if (p->activations == AS_CODES) w->row_scales[row] = set_scale(from, p->inputs, 127.0f, &inverse);
    for (int64_t span = 0; span < w->num_spans; span++, to += w->span_nbytes) {
        const float *x = from + inputs_of_span(p, span, &n);
        int32_t *sum = w->sums + row * w->num_spans + span;
        n *= is_row;
        *sum = write_numbers(w, x, n, p->span_padded, inverse, to);
        if (p->zeros && p->activations != AS_CODES) set_sum(p, x, n, sum);
    }
}

// Returns the address of a span of a block of rows, [word][row]. The blocks of a span are consecutive.
INLINE int32_t *block_at(const Packed *w, int64_t block, int64_t span) {
    return (int32_t *)(w->x + (span * (w->ready_rows / w->together) + block) * w->span_nbytes);
}

// Writes words of m rows, [row][word], as [word][row]. `rows` has SQUARES * VL addresses, the last ones repeated.
static void interleave(const int32_t **rows, int64_t m, int64_t num_words, int32_t *to) {
    int64_t k = 0;
    for (; k + VL <= num_words; k += VL) {
        vf square[SQUARES][VL];
        UNROLL for (int s = 0; s < SQUARES; s++) {
            UNROLL for (int r = 0; r < VL; r++) square[s][r] = load((const float *)rows[s * VL + r] + k);
            transpose(square[s]);
        }
        int is_last = k + 2 * VL > num_words; // each write overlaps the next; the last must stop at the end
        for (int i = 0; i < VL; i++, to += m) for (int s = 0; s < SQUARES && s * VL < m; s++) {
            if (is_last) memcpy(to + s * VL, &square[s][i], (size_t)MIN(VL, m - s * VL) * 4);
            else store((float *)to + s * VL, square[s][i]);
        }
    }
    for (; k < num_words; k++) for (int64_t r = 0; r < m; r++) *to++ = rows[r][k];
}

static void prepare_block(const Packed *w, int64_t block) {
    const Product *p = w->p;
    uint8_t ALIGNED numbers[BLOCK_ROWS][SEGMENT * 4];
    const float *from[BLOCK_ROWS];
    const int32_t *rows[SQUARES * VL], *own[SQUARES * VL];
    float inverse[BLOCK_ROWS] = {0};
    int64_t m = w->together, first_row = block * m, n;
    for (int64_t r = 0; r < m; r++) {
        from[r] = x_row(w, MIN(first_row + r, p->num_rows - 1));
        if (p->activations == AS_CODES)
            w->row_scales[first_row + r] = set_scale(from[r], p->inputs, 127.0f, inverse + r);
    }
    for (int64_t r = 0; r < SQUARES * VL; r++) rows[r] = (const int32_t *)numbers[MIN(r, m - 1)];
    for (int64_t span = 0; span < w->num_spans; span++) {
        int64_t first = inputs_of_span(p, span, &n);
        int32_t *to = block_at(w, block, span), *sums = w->sums + first_row * w->num_spans + span;
        for (int64_t r = 0; r < m; r++) sums[r * w->num_spans] = 0;
        if (p->activations == AS_FLOATS && n == p->span_padded && m > 1) { // rows are used unchanged
            for (int64_t r = 0; r < SQUARES * VL; r++) own[r] = (const int32_t *)(from[MIN(r, m - 1)] + first);
            interleave(own, m, n, to);
        } else for (int64_t at = 0; at < p->span_padded; at += SEGMENT) {
            int64_t padded = MIN(SEGMENT, p->span_padded - at), num_words = padded * w->width / 4;
            for (int64_t r = 0; r < m; r++)
                sums[r * w->num_spans] += write_numbers(w, from[r] + first + at, MAX(0, MIN(padded, n - at)), padded,
                                                        inverse[r], m > 1 ? numbers[r] : (uint8_t *)to);
            if (m > 1) interleave(rows, m, num_words, to);
            to += num_words * m;
        }
        if (p->zeros && p->activations != AS_CODES)
            for (int64_t r = 0; r < m; r++) set_sum(p, from[r] + first, n, sums + r * w->num_spans);
    }
}
