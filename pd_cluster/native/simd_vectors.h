// Vectors of the machine's width, and a few operations on them that C does not have. Needs GCC or clang.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16 // floats in a vector
#define KR 8  // rows of a register tile: KR * 2 accumulators, 2 vectors and a broadcast must fit in registers
#define GT 4  // query heads that share a pass over the values in decode
#define QT 8  // vectors of a query that stay in registers together with VL sums
#elif defined(__AVX2__)
#define VL 8
#define KR 4
#define GT 2
#define QT 4
#else
#define VL 4
#define KR 8
#define GT 4
#define QT 8
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define ALIGNED __attribute__((aligned(64)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias)); // may be unaligned

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

// Keeps x in a register; otherwise compilers may read it from memory for each use.
INLINE vf in_register(vf x) {
#if VL == 16
    __asm__("" : "+v"(x));
#endif
    return x;
}

// Returns a * b + sum, rounded only once if the machine can do that. By default, compilers fuse only some such sums;
// for AMD's processors, for example, not those of 256 bits in loops.
INLINE vf multiply_add(vf a, vf b, vf sum) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + sum;
#endif
}

// Returns the larger value per lane, or the second value if either is NaN.
INLINE vf vmax(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE float sum_of(vf x) {
#if VL == 16
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    UNROLL for (int i = 0; i < VL; i++) sum += x[i];
    return sum;
#endif
}

INLINE float max_of(vf x) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    UNROLL for (int i = 1; i < VL; i++) most = MAX(most, x[i]);
    return most;
#endif
}

// Returns the first n lanes of x, and minus infinity in the others.
INLINE vf first_lanes(vf x, int64_t n) {
    vi lane;
    UNROLL for (int i = 0; i < VL; i++) lane[i] = i;
    return pick(lane < (int32_t)MIN(n, VL), x, splat(-__builtin_inff()));
}

// Returns 2^x to 1.5e-7 relative; 0 from -127 down; x must be at most 127. NaN stays NaN. With x = n + f, |f| <= 1/2:
// a Taylor polynomial of degree 6 gives 2^f, then n is added to the exponent's bits.
INLINE vf exp2v(vf x) {
    const vf magic = splat(12582912.0f); // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    x = vmax(splat(-127.0f), x);
    vf rounded = x + magic;
    vf f = x - (rounded - magic);
    vf y = splat(1.540353e-4f);
    y = y * f + splat(1.3333558e-3f);
    y = y * f + splat(9.6181291e-3f);
    y = y * f + splat(5.5504109e-2f);
    y = y * f + splat(2.4022651e-1f);
    y = y * f + splat(6.9314718e-1f);
    y = y * f + splat(1.0f);
    return (vf)((vi)y + ((vi)rounded << 23));
}

// Transposes in place: rows[i][j] becomes rows[j][i].
INLINE void transpose(vf *rows) {
#if VL == 16
    __m512 *r = (__m512 *)rows, t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        r[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
        r[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + j], (__m512d)t[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int half = 0; half < 2; half++) {
        t[i + 8 * half] = _mm512_shuffle_f32x4(r[i + 8 * half], r[i + 4 + 8 * half], 0x88);
        t[i + 4 + 8 * half] = _mm512_shuffle_f32x4(r[i + 8 * half], r[i + 4 + 8 * half], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
#elif VL == 8
    __m256 *r = (__m256 *)rows, t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        r[i + 2 * j] = (__m256)_mm256_unpacklo_pd((__m256d)t[i + j], (__m256d)t[i + j + 2]);
        r[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd((__m256d)t[i + j], (__m256d)t[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) r[i] = t[i];
#else
    float t[VL][VL];
    for (int i = 0; i < VL; i++) store(t[i], rows[i]);
    for (int i = 0; i < VL; i++) UNROLL for (int j = 0; j < VL; j++) rows[i][j] = t[j][i];
#endif
}

// Returns a vector whose element i is the sum of rows[i].
INLINE vf sums_of(vf *rows) {
#if VL == 16
    __m512 *r = (__m512 *)rows, p[8], q[4];
    UNROLL for (int i = 0; i < 8; i++)
        p[i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]) + _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++)
        q[i] = (__m512)_mm512_unpacklo_pd((__m512d)p[2 * i], (__m512d)p[2 * i + 1]) +
               (__m512)_mm512_unpackhi_pd((__m512d)p[2 * i], (__m512d)p[2 * i + 1]);
    __m512 a = _mm512_shuffle_f32x4(q[0], q[1], 0x44) + _mm512_shuffle_f32x4(q[0], q[1], 0xee);
    __m512 b = _mm512_shuffle_f32x4(q[2], q[3], 0x44) + _mm512_shuffle_f32x4(q[2], q[3], 0xee);
    return (vf)(_mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd));
#elif VL == 8
    __m256 *r = (__m256 *)rows;
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
    return (vf)(_mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
#else
    vf sums;
    for (int i = 0; i < VL; i++) sums[i] = sum_of(rows[i]);
    return sums;
#endif
}

// Returns the sum of x, with the additions of sums_of.
INLINE float total_of(vf x) {
#if VL == 16
    x += __builtin_shuffle(x, (vi){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    x += __builtin_shuffle(x, (vi){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    x += __builtin_shuffle(x, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, (vi){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    return x[0];
#elif VL == 8
    x += __builtin_shuffle(x, (vi){1, 0, 3, 2, 5, 4, 7, 6});
    x += __builtin_shuffle(x, (vi){2, 3, 0, 1, 6, 7, 4, 5});
    x += __builtin_shuffle(x, (vi){4, 5, 6, 7, 0, 1, 2, 3});
    return x[0];
#else
    return sum_of(x);
#endif
}

// Returns a vector whose element i is the largest of rows[i].
INLINE vf maxes_of(vf *rows) {
#if VL == 16
    __m512 *r = (__m512 *)rows, p[8], q[4];
    UNROLL for (int i = 0; i < 8; i++)
        p[i] = _mm512_max_ps(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]), _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d a = (__m512d)p[2 * i], b = (__m512d)p[2 * i + 1];
        q[i] = _mm512_max_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    __m512 a = _mm512_max_ps(_mm512_shuffle_f32x4(q[0], q[1], 0x44), _mm512_shuffle_f32x4(q[0], q[1], 0xee));
    __m512 b = _mm512_max_ps(_mm512_shuffle_f32x4(q[2], q[3], 0x44), _mm512_shuffle_f32x4(q[2], q[3], 0xee));
    return (vf)_mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
#else
    transpose(rows);
    vf most = rows[0];
    UNROLL for (int i = 1; i < VL; i++) most = vmax(most, rows[i]);
    return most;
#endif
}
