// Products of words: four int8 codes of activations with four of weights, exactly, or two bfloat16s with two.
#pragma once
#include "words.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if VL == 16
#define DOT_ROWS 8
#define DOT_PANELS 2
#else
#define DOT_ROWS 4
#define DOT_PANELS 1
#endif

#if defined(__AVX512BF16__)
#define HAVE_BF16_DOTS 1
#else
#define HAVE_BF16_DOTS 0
#endif

// Adds to each lane the products of its four unsigned codes with the four signed ones of x. `small`: codes up to 15.
INLINE vi add_dots(vi acc, vi codes, int32_t x, int small) {
#if VL == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(x));
#elif VL == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, _mm256_set1_epi32(x));
#elif VL == 16
    __m512i y = _mm512_set1_epi32(x), w = (__m512i)codes;
    if (!small) { // |codes - 128| times x with the sign: two such products fit 16 bits
        w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(w), _mm512_setzero_si512(), y);
        w = _mm512_abs_epi8(w);
    }
    return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, y), _mm512_set1_epi16(1));
#elif VL == 8
    __m256i y = _mm256_set1_epi32(x), w = (__m256i)codes;
    if (!small) {
        w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        y = _mm256_sign_epi8(y, w);
        w = _mm256_abs_epi8(w);
    }
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, y), _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    int8x16_t w = (int8x16_t)codes, y = vreinterpretq_s8_s32(vdupq_n_s32(x));
    if (!small) w = veorq_s8(w, vdupq_n_s8(-128));
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, w, y);
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(y)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(w, y));
    return acc + (vi)vpaddq_s32(low, high);
#endif
#else
    for (int j = 0; j < 4; j++) acc += ((codes >> (8 * j) & 0xff) - (small ? 0 : 128)) * ((x << (24 - 8 * j)) >> 24);
    return acc;
#endif
}

INLINE vi add_bf16_dots(vi acc, vi numbers, int32_t x) {
#if VL == 16 && HAVE_BF16_DOTS
    return (vi)_mm512_dpbf16_ps((__m512)acc, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(x));
#else
    return acc; // never called
#endif
}

// Computes c[r][panel] = sum over the span of x[r] * words, for m rows and v panels, both constants.
INLINE void dot_block(int form, int m, int v, const int32_t *x, int64_t x_stride, const int32_t *words,
                      int64_t panel_stride, int64_t num_words, float *c) {
    vi acc[DOT_ROWS][MOST_PANELS * PARTS];
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) acc[r][q] = (vi){0};
    for (int64_t k = 0; k < num_words; k++) {
        vi word[MOST_PANELS * PARTS];
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            const int32_t *at = words + q / PARTS * panel_stride + k * PANEL + q % PARTS * VL;
            word[q] = load_words(at);
            if (m == 1 && q % PARTS == 0) __builtin_prefetch(at + 32 * PANEL);
        }
        UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++) {
            const int32_t *y = x + r * x_stride + k * (form == CODES4 ? 2 : 1);
            if (form == BF16S) {
                acc[r][q] = add_bf16_dots(acc[r][q], word[q], *y);
            } else if (form == CODES8) {
                acc[r][q] = add_dots(acc[r][q], word[q], *y, 0);
            } else {
                acc[r][q] = add_dots(acc[r][q], word[q] & 0x0f0f0f0f, y[0], 1);
                acc[r][q] = add_dots(acc[r][q], word[q] >> 4 & 0x0f0f0f0f, y[1], 1);
            }
        }
    }
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
        store(c + r * MOST_PANELS * PANEL + q * VL, (vf)acc[r][q]);
}

INLINE void dot_blocks(int form, int64_t num_rows, int64_t num_panels, const int32_t *x, int64_t x_stride,
                       const int32_t *words, int64_t panel_stride, int64_t num_words, float *c) {
    for (int64_t q = 0, v; q < num_panels; q += v) {
        const int32_t *at = words + q * panel_stride;
        v = num_rows == 1 && num_panels - q >= 4 ? 4 : num_rows > 1 && num_panels - q >= DOT_PANELS ? DOT_PANELS : 1;
        for (int64_t r = 0, m; r < num_rows; r += m) {
            m = num_rows == 1 ? 1 : num_rows - r > 4 ? DOT_ROWS : 4;
            const int32_t *rows = x + r * x_stride;
            float *to = c + r * MOST_PANELS * PANEL + q * PANEL;
#define BLOCK(m, v) dot_block(form, m, v, rows, x_stride, at, panel_stride, num_words, to)
            if (m == 1 && v == 4) BLOCK(1, 4);
            else if (m == 1) BLOCK(1, 1);
            else if (m == DOT_ROWS && v == DOT_PANELS) BLOCK(DOT_ROWS, DOT_PANELS);
            else if (m == DOT_ROWS) BLOCK(DOT_ROWS, 1);
            else if (v == DOT_PANELS) BLOCK(4, DOT_PANELS);
            else BLOCK(4, 1);
#undef BLOCK
        }
    }
}

static void multiply_dots(int64_t form, int64_t num_rows, int64_t num_panels, const int32_t *x, int64_t x_stride,
                          const int32_t *words, int64_t panel_stride, int64_t num_words, float *c) {
#define BLOCKS(form) dot_blocks(form, num_rows, num_panels, x, x_stride, words, panel_stride, num_words, c)
    switch (form) {
    case CODES8: BLOCKS(CODES8); break;
    case CODES4: BLOCKS(CODES4); break;
    default: BLOCKS(BF16S);
    }
#undef BLOCKS
}
