// The weights of packed products, and definitions that their kernels share.
// A word has 32 bits, for consecutive inputs of one output. A panel has 16 outputs, [span][word][output], so that a
// cache line has one word of each output. Inputs are divided into spans. A scale applies to whole spans; each span has
// its own sums, and is padded with zeros to whole words. Spans depend only on the weight, so a row's bits do not depend
// on other rows.
#pragma once
#include "thread_team.h"
#include "simd_vectors.h"

#define PANEL 16
#define PARTS (PANEL / VL)
#define AHEAD (32 * PANEL) // prefetch distance in words: 2 KiB
#define MOST_PANELS 4 // panels in a block of results
#define MOST_ROWS 32   // rows in a block of tiles
#define DECODED_NBYTES 16384
#define DECODED_PANELS 2 // decoded panels of floats; of other forms, which are half as wide, twice as many

// Processors on which units for decoding and for multiplying work in parallel, so that decoding costs little time.
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
#define IS_ZEN 1
#else
#define IS_ZEN 0
#endif

// A block of results in registers has up to BLOCK_ROWS rows, or CODE_ROWS if codes are multiplied. Its sums leave
// enough registers for the operands.
#define FEW_ROWS 4
#if VL == 16
#define BLOCK_ROWS 12
#define BLOCK_SUMS 24
#define FEW_SUMS 16
#elif VL == 8
#define BLOCK_ROWS 6
#define BLOCK_SUMS 12
#define FEW_SUMS 8
#else
#define BLOCK_ROWS 6
#define BLOCK_SUMS 24
#define FEW_SUMS 16
#endif
#if defined(__AVX512VNNI__)
#define CODE_ROWS 12
#define CODE_SUMS 24
#elif VL == 16
#define CODE_ROWS 8
#define CODE_SUMS 16
#else
#define CODE_ROWS 4
#define CODE_SUMS (4 * PARTS)
#endif

// The same for 4-bit codes, whose sums share registers with their scales (span_products.h).
#if VL == 16
#define SPAN_ROWS 8
#define SPAN_SUMS 16
#else
#define SPAN_ROWS CODE_ROWS
#define SPAN_SUMS CODE_SUMS
#endif

enum { FLOATS, BF16S, CODES8, CODES4, E4M3S };     // inputs per word: 1, 2, 4, 8 and 4
enum { AS_FLOATS, AS_BF16S, AS_CODES };            // the form in which activations are multiplied
enum { BY_FLOATS, BY_DOTS, BY_TILES };             // the first two are in register_blocks.h, the last in amx_tiles.h

typedef struct {
    int64_t num_rows, inputs, outputs, num_threads;
    int64_t form, activations;               // the form of the words; the form in which x is multiplied
    int64_t group, span_inputs, span_padded; // inputs per scale, per span, and per padded span
    int64_t spans_of_group, num_groups;
    const float *x; // [num_rows, inputs]
    const int32_t *words;
    const float *scales, *zeros; // [panel][group][PANEL], or null
    const float *bias;           // [panel][PANEL], or null
    float *out;                  // [num_rows, outputs]
    uint8_t *scratch;            // pd_scratch_nbytes, at a multiple of 64
} Product;

typedef struct {
    const Product *p;
    int64_t num_spans, num_panels, span_words, by, decodes; // decodes: weights are decoded once for many rows
    int64_t width, span_nbytes, row_nbytes; // bytes of an activation; of one span and of all spans of `together` rows
    int64_t ready_rows, together;           // number of rows with padding; rows per block
    uint8_t *x;                             // [span][block][word][row]; for tiles [row][span][input]
    float *row_scales;              // [ready_rows], if x is codes
    int32_t *sums;                  // [ready_rows][num_spans]: sums of x over each span, in the type of x
    int64_t next_row, next_item;
    void (*make)(const void *, int64_t, int64_t); // null, or writes rows of p->x: from a row on, that many
    const void *maker;                            // its first argument
    const int64_t *from, *to; // [num_rows] or null: rows of p->x to read; rows of p->out to which results are added
    const float *times;       // [num_rows], with `to`: factors of the results that are added
} Packed;

INLINE const float *x_row(const Packed *w, int64_t row) { return w->p->x + (w->from ? w->from[row] : row) * w->p->inputs; }
INLINE float *out_row(const Packed *w, int64_t row) { return w->p->out + (w->to ? w->to[row] : row) * w->p->outputs; }

INLINE int inputs_of_word(int form) { return form == FLOATS ? 1 : form == BF16S ? 2 : form == CODES4 ? 8 : 4; }

// Returns the shift of input i's code in a word of eight codes: first the low halves of the four bytes, then the high.
INLINE int shift4(int i) { return i < 4 ? 8 * i : 8 * i - 28; }

INLINE vi load_words(const int32_t *p) { return (vi)load((const float *)p); }
INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

// Returns e4m3 codes as floats, times 2^-8. Converts them as half precision, which has the same subnormals; on AMD, as
// subnormal floats, with which Intel's processors are a hundred times slower.
INLINE vf e4m3_number(vi word, int i) {
    if (IS_ZEN) return (vf)((word << (24 - 8 * i)) >> 4 & (int32_t)0x87f00000) * 0x1p112f;
    vi half = (word >> (8 * i) & 0x7f) << 7 | (word >> (8 * i) & 0x80) << 8;
#if VL == 16
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)half));
#elif VL == 8 && defined(__F16C__)
    __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 0x08);
    return (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(pairs));
#else
    vi magnitude = half & 0x7fff, sign = (half & 0x8000) << 16;
    vf normal = (vf)((magnitude << 13) + (112 << 23)), subnormal = to_floats(magnitude) * 5.9604644775390625e-8f;
    return (vf)((vi)pick(magnitude < 1024, subnormal, normal) | sign);
#endif
}

// Returns input i of each word as a float, without its scale.
INLINE vf number(int form, vi word, int i) {
    switch (form) {
    case FLOATS: return (vf)word;
    case BF16S: return (vf)(i ? word & (int32_t)0xffff0000 : word << 16);
    case CODES8: return to_floats((word << (24 - 8 * i)) >> 24);
    case E4M3S: return e4m3_number(word, i);
    default:
#if VL == 16
        return (vf)_mm512_permutexvar_ps((__m512i)(word >> shift4(i)), // the lowest four bits are the index
                                         (__m512){0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1});
#else
        return to_floats((word << (28 - shift4(i))) >> 28);
#endif
    }
}

// Codes are stored as signed integers for products with floats, and with an offset of 8 or 128 for products with codes.
// KEEPS_OFFSET: instructions multiply codes with their offset of 128; otherwise dot_products.h subtracts it first.
#if defined(__AVX512VNNI__) || (VL == 8 && defined(__AVXVNNI__))
#define KEEPS_OFFSET 1
#else
#define KEEPS_OFFSET 0
#endif

// Returns the offset of every code in sums of products.
INLINE int32_t code_offset(int64_t form) { return form == CODES4 ? 8 : KEEPS_OFFSET ? 128 : 0; }

INLINE const int32_t *words_at(const Packed *w, int64_t panel, int64_t span) {
    return w->p->words + (panel * w->num_spans + span) * w->span_words * PANEL;
}
