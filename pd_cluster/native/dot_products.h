// Products of words: four int8 codes of activations with four codes of weights, exactly, or two bfloat16 values with
// two.
#pragma once
#include "packed_weights.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512BF16__)
#define HAVE_BF16_DOTS 1
#else
#define HAVE_BF16_DOTS 0
#endif

// Adds to each lane the products of four unsigned codes with four signed codes of x. `small`: unsigned codes are at
// most 15.
INLINE vi add_dots(vi acc, vi codes, vi x, int small) {
#if VL == 16 && defined(__AVX512VNNI__)
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x)); // with the intrinsic, compilers copy the sums
    return acc;
#elif VL == 8 && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)x);
#elif VL == 16
    __m512i y = (__m512i)x, w = (__m512i)codes;
    if (!small) { // |codes - 128| times x with the sign of codes - 128: two such products fit in 16 bits
        w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(w), _mm512_setzero_si512(), y);
        w = _mm512_abs_epi8(w);
    }
    return acc + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(w, y), _mm512_set1_epi16(1));
#elif VL == 8
    __m256i y = (__m256i)x, w = (__m256i)codes;
    if (!small) {
        w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        y = _mm256_sign_epi8(y, w);
        w = _mm256_abs_epi8(w);
    }
    return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, y), _mm256_set1_epi16(1));
#elif defined(__aarch64__)
    int8x16_t w = (int8x16_t)codes, y = (int8x16_t)x;
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

INLINE vi add_bf16_dots(vi acc, vi numbers, vi x) {
#if VL == 16 && HAVE_BF16_DOTS
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(numbers), "v"(x));
    return acc;
#else
    return acc; // never called
#endif
}
