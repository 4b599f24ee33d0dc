// The form in which the pool stores a vector of keys or values. Each library has one form, which POOL selects at
// compile time.
//
// Floats are stored unchanged. A vector's codes are followed by its float32 scale, all as bytes; kv/kv_vectors.py uses
// the same form.
#pragma once
#include "activation_packing.h"

#define POOL_FLOAT32 0
#define POOL_BFLOAT16 1
#define POOL_INT8 2
#define POOL_FP8_E4M3 3
#define POOL_INT4 4
#ifndef POOL
#define POOL POOL_FLOAT32
#endif
#define IS_CODED (POOL >= POOL_INT8)

INLINE int64_t codes_nbytes(int64_t dim) {
    return POOL == POOL_FLOAT32 ? 4 * dim : POOL == POOL_BFLOAT16 ? 2 * dim : POOL == POOL_INT4 ? dim / 2 : dim;
}

INLINE int64_t vector_nbytes(int64_t dim) { return codes_nbytes(dim) + (IS_CODED ? 4 : 0); }

// Returns VL unsigned bytes as words; callers use only the low byte of each word.
INLINE vi load_bytes(const char *p) {
#if VL == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VL == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi words;
    for (int i = 0; i < VL; i++) words[i] = (uint8_t)p[i];
    return words;
#endif
}

INLINE vi load_halves(const char *p) {
#if VL == 16
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi words;
    uint16_t half[VL];
    memcpy(half, p, sizeof half);
    for (int i = 0; i < VL; i++) words[i] = half[i];
    return words;
#endif
}

// Returns numbers d, d + 1, ... of a vector, unscaled if they are codes; d is a multiple of VL.
INLINE vf numbers_at(const char *p, int64_t d, int64_t dim) {
#if POOL == POOL_FLOAT32
    return load((const float *)p + d);
#elif POOL == POOL_BFLOAT16
    return (vf)(load_halves(p + 2 * d) << 16);
#elif POOL == POOL_INT8
    return to_floats((load_bytes(p + d) << 24) >> 24);
#elif POOL == POOL_FP8_E4M3
    return e4m3_number(load_bytes(p + d), 0);
#else
    int64_t half = dim / 2;
    vi words = load_bytes(p + (d < half ? d : d - half));
    return to_floats((d < half ? words & 15 : words >> 4) - 8);
#endif
}

// Returns the scale by which numbers_at's results must be multiplied.
INLINE float scale_of(const char *p, int64_t dim) {
    if (!IS_CODED) return 1.0f;
    float scale;
    memcpy(&scale, p + codes_nbytes(dim), 4);
    return POOL == POOL_FP8_E4M3 ? scale * 256.0f : scale; // see e4m3_number
}

// Returns the nearest code of e4m3, ties to even; |x| may exceed 448 only by rounding.
INLINE uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
    float size = __builtin_fabsf(x);
    uint32_t subnormal = (uint32_t)(int32_t)__builtin_rintf(size * 512.0f); // below 2^-6, codes are 2^-9 apart
    return (uint8_t)(sign | (size < 0.015625f ? subnormal : normal));
}

// Writes a vector of numbers.
INLINE void put_vector(const float *x, int64_t dim, char *to) {
#if POOL == POOL_FLOAT32
    memcpy(to, x, (size_t)dim * 4);
#elif POOL == POOL_BFLOAT16
    uint16_t *half = (uint16_t *)to;
    for (int64_t i = 0; i < dim; i++) half[i] = (uint16_t)(round_to_bf16(x[i]) >> 16);
#else
    const float most_code = POOL == POOL_INT8 ? 127.0f : POOL == POOL_INT4 ? 7.0f : 448.0f;
    float inverse, scale = set_scale(x, dim, most_code, &inverse);
    int64_t half = dim / 2;
    (void)half;
    if (inverse == 0) // x may contain NaN
        memset(to, POOL == POOL_INT4 ? 0x88 : 0, (size_t)codes_nbytes(dim));
    else if (POOL == POOL_INT8)
        for (int64_t i = 0; i < dim; i++) to[i] = (char)(int32_t)__builtin_rintf(x[i] * inverse);
    else if (POOL == POOL_FP8_E4M3)
        for (int64_t i = 0; i < dim; i++) to[i] = (char)to_e4m3(x[i] * inverse);
    else
        for (int64_t i = 0; i < half; i++) {
            int32_t low = (int32_t)__builtin_rintf(x[i] * inverse), high;
            high = (int32_t)__builtin_rintf(x[half + i] * inverse);
            to[i] = (char)((low + 8) | (high + 8) << 4);
        }
    memcpy(to + codes_nbytes(dim), &scale, 4);
#endif
}

// Converts a vector to floats, multiplied by its scale.
INLINE void take_vector(const char *from, int64_t dim, float *to) {
    float scale = scale_of(from, dim);
    for (int64_t d = 0; d < dim; d += VL) store(to + d, numbers_at(from, d, dim) * scale);
}
