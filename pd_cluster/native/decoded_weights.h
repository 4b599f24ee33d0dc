// Decodes a span's weights to numbers or to 8-bit codes: word by word in registers, or a whole panel for many rows.
#pragma once
#include "packed_weights.h"

// Returns inputs 2i and 2i + 1 of each word as bfloat16, which represents every code exactly.
INLINE vi pair(int form, vi word, int i) {
    vi low = (vi)number(form, word, 2 * i) >> 16 & 0xffff, high = (vi)number(form, word, 2 * i + 1);
    return low | (high & (int32_t)0xffff0000);
}

#if VL == 16
// The same for 4-bit codes, by a table indexed with the lowest five bits, of which the fifth has no effect. `in_order`:
// words whose bytes are inputs 0, 2, 1, 3.
INLINE vi pair4(vi in_order, int i) {
    const __m256i codes = _mm256_set_epi16(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 numbers = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(codes));
    const __m512i table = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)numbers, 16)));
    const int shift = i == 0 ? 0 : i == 1 ? 8 : i == 2 ? 4 : 12;
    return (vi)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)in_order, shift), table);
}

INLINE vi ordered4(vi word) {
    const __m512i order = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
    return (vi)_mm512_shuffle_epi8((__m512i)word, order);
}
#endif

INLINE void decode_pairs(int form, const int32_t *words, int64_t num_words, int32_t *out, const int32_t *ahead) {
    int n = inputs_of_word(form);
    for (int64_t k = 0; k < num_words; k++) for (int h = 0; h < PARTS; h++) {
        vi word = load_words(words + k * PANEL + h * VL);
        if (!h) __builtin_prefetch(ahead + k * PANEL);
#if VL == 16
        if (form == CODES4) word = ordered4(word);
#endif
        UNROLL for (int i = 0; i < n / 2; i++) {
#if VL == 16
            vi numbers = form == CODES4 ? pair4(word, i) : pair(form, word, i);
#else
            vi numbers = pair(form, word, i);
#endif
            store((float *)out + (k * n / 2 + i) * PANEL + h * VL, (vf)numbers);
        }
    }
}

// Decodes a span of one panel to bfloat16, and prefetches as many words from `ahead` on.
static void decode_to_bf16s(int64_t form, const int32_t *words, int64_t num_words, int32_t *out,
                            const int32_t *ahead) {
    switch (form) {
    case CODES8: decode_pairs(CODES8, words, num_words, out, ahead); break;
    case CODES4: decode_pairs(CODES4, words, num_words, out, ahead); break;
    default: decode_pairs(E4M3S, words, num_words, out, ahead);
    }
}

INLINE void decode_form(int form, const int32_t *words, int64_t num_words, float *out, const int32_t *ahead) {
    for (int64_t k = 0; k < num_words; k++) for (int h = 0; h < PARTS; h++) {
        vi word = load_words(words + k * PANEL + h * VL);
        if (!h) __builtin_prefetch(ahead + k * PANEL);
        UNROLL for (int i = 0; i < inputs_of_word(form); i++)
            store(out + (k * inputs_of_word(form) + i) * PANEL + h * VL, number(form, word, i));
    }
}

// The same, but to float32.
static void decode_to_floats(int64_t form, const int32_t *words, int64_t num_words, float *out, const int32_t *ahead) {
    switch (form) {
    case BF16S: decode_form(BF16S, words, num_words, out, ahead); break;
    case CODES8: decode_form(CODES8, words, num_words, out, ahead); break;
    case CODES4: decode_form(CODES4, words, num_words, out, ahead); break;
    default: decode_form(E4M3S, words, num_words, out, ahead);
    }
}

// Decodes a span of one panel from 4-bit to 8-bit codes; their offset stays 8.
static void decode_to_codes(const int32_t *words, int64_t num_words, int32_t *out) {
    const int32_t taken_off = KEEPS_OFFSET ? 0 : (int32_t)0x80808080;
    for (int64_t k = 0; k < num_words * PANEL; k += VL) {
        vi word = load_words(words + k);
        if (k % PANEL == 0) __builtin_prefetch(words + k + AHEAD);
        int64_t at = k / PANEL * 2 * PANEL + k % PANEL;
        store((float *)out + at, (vf)((word & 0x0f0f0f0f) | taken_off));
        store((float *)out + at + PANEL, (vf)((word >> 4 & 0x0f0f0f0f) | taken_off));
    }
}
