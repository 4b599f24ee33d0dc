// Products in registers, for a block of rows and panels at a time. Each result is one chain of additions over a span,
// from the first input to the last, and one chain over the spans. Blocks of any size have the same chains, and so the
// same bits.
#pragma once
#include "activation_packing.h"
#include "decoded_weights.h"
#include "dot_products.h"
#include "product_epilogue.h"

#ifndef MANY_ROWS
#define MANY_ROWS 192 // maximum number of rows of an item; their x of one span stays in the L2 cache
#endif
#ifndef MANY_PANELS
#define MANY_PANELS 8 // maximum number of panels of an item
#endif
#define PART_WORDS 128 // words of a span that are multiplied with all rows before the next; 2 panels stay in L1
#define FEW_BLOCKS 3   // with more blocks, parts are twice as long; with fewer, short parts are prefetched in time
#define PANELS_OF(m, sums) ((m) * 4 * PARTS <= (sums) ? 4 : (m) * 2 * PARTS <= (sums) ? 2 : 1)

// The way in which a product is computed, constant in each loop: the words' form, and the form in which they are
// multiplied.
typedef struct {
    int form, as;
} Way;

// Adds the products of x [word][row] with words of some panels to sums [row][MOST_PANELS][PANEL] or, with `begins`, to
// zeros. Prefetches a line for each word of each panel, from `ahead` on, where panels are `ahead_stride` apart.
typedef void Kernel(const int32_t *x, const int32_t *words, int64_t panel_stride, int64_t num_words,
                    const int32_t *ahead, int64_t ahead_stride, int32_t *sums, int begins);

// Returns the number of words of x that are multiplied with one word of weights.
INLINE int steps_of_word(Way y) {
    int inputs = inputs_of_word(y.form);
    return y.as == AS_FLOATS ? inputs : y.as == AS_BF16S ? inputs / 2 : inputs / 4;
}

INLINE vi load_for(Way y, const int32_t *words) {
    vi word = load_words(words);
#if VL == 16
    if (y.form == CODES4 && y.as == AS_BF16S) return ordered4(word);
#endif
    return word;
}

// Returns part i of each word in the form to multiply: one float, two bfloat16 values, or four codes.
INLINE vi operand(Way y, vi word, int i) {
    if (y.as == AS_FLOATS) return (vi)number(y.form, word, i);
    if (y.as == AS_CODES) return y.form == CODES4 ? word >> (4 * i) & 0x0f0f0f0f : word;
#if VL == 16
    if (y.form == CODES4) return pair4(word, i);
#endif
    return y.form == BF16S ? word : pair(y.form, word, i);
}

// Returns sum + w * x, for vectors of integer type that contain floats. It is assembly, because compilers would keep
// each sum in two registers, one per type, and run out of registers.
INLINE vi add_number(vi sum, vi w, vi x) {
#if VL >= 8 && defined(__FMA__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#elif defined(__aarch64__)
    __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(w), "w"(x));
#else
    sum = (vi)((vf)sum + (vf)w * (vf)x);
#endif
    return sum;
}

INLINE vi add_product(Way y, vi sum, vi w, vi x) {
    if (y.as == AS_FLOATS) return add_number(sum, w, x);
    return y.as == AS_BF16S ? add_bf16_dots(sum, w, x) : add_dots(sum, w, x, y.form == CODES4);
}

// The kernel for m rows and v panels. All sizes except the number of words are constants.
INLINE void multiply_words(Way y, int m, int v, const int32_t *x, const int32_t *words, int64_t panel_stride,
                           int64_t num_words, const int32_t *ahead, int64_t ahead_stride, int32_t *to, int begins) {
    vi sums[BLOCK_ROWS][MOST_PANELS * PARTS];
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
        sums[r][q] = begins ? (vi){0} : load_words(to + r * MOST_PANELS * PANEL + q * VL);
    int64_t k = 0;
    do { // runs at least once, because a path around the loop would need copies of the sums
        vi word[MOST_PANELS * PARTS], w[MOST_PANELS * PARTS];
        UNROLL for (int q = 0; q < v * PARTS; q++) {
            const int32_t *at = words + q / PARTS * panel_stride + k * PANEL + q % PARTS * VL;
            word[q] = load_for(y, at);
            if (q % PARTS == 0) __builtin_prefetch(ahead + q / PARTS * ahead_stride + k * PANEL);
        }
        UNROLL for (int i = 0; i < steps_of_word(y); i++, x += m) {
            UNROLL for (int q = 0; q < v * PARTS; q++) w[q] = operand(y, word[q], i);
            UNROLL for (int r = 0; r < m; r++) {
                vi value = x[r] - (vi){0};
                UNROLL for (int q = 0; q < v * PARTS; q++) sums[r][q] = add_product(y, sums[r][q], w[q], value);
            }
        }
    } while (++k < num_words);
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < v * PARTS; q++)
        store((float *)to + r * MOST_PANELS * PANEL + q * VL, (vf)sums[r][q]);
}

// Defines the kernels of a way: for each number of rows, one for PANELS_OF panels, and one for a single panel. They are
// separate functions, because compilers keep the sums of inlined loops in memory.
#define KIND Kernel // the type of the kernels that the macros below define
#define KERNEL(name, m, v, form, as)                                                                                   \
    static __attribute__((noinline)) void name(const int32_t *x, const int32_t *words, int64_t panel_stride,           \
                                               int64_t num_words, const int32_t *ahead, int64_t ahead_stride,          \
                                               int32_t *to, int begins) {                                              \
        multiply_words((Way){form, as}, m, v, x, words, panel_stride, num_words, ahead, ahead_stride, to, begins);     \
    }
#define KERNELS(name, m, sums, form, as)                                                                               \
    KERNEL(name##m, m, PANELS_OF(m, sums), form, as) KERNEL(name##m##_one, m, 1, form, as)
#define TO_4(name, sums, form, as)                                                                                     \
    KERNELS(name, 1, sums, form, as) KERNELS(name, 2, sums, form, as)                                                  \
    KERNELS(name, 3, sums, form, as) KERNELS(name, 4, sums, form, as)
#define TO_6(name, sums, form, as)                                                                                     \
    TO_4(name, sums, form, as) KERNELS(name, 5, sums, form, as) KERNELS(name, 6, sums, form, as)
#define TO_8(name, sums, form, as)                                                                                     \
    TO_6(name, sums, form, as) KERNELS(name, 7, sums, form, as) KERNELS(name, 8, sums, form, as)
#define TO_12(name, sums, form, as)                                                                                    \
    TO_8(name, sums, form, as) KERNELS(name, 9, sums, form, as) KERNELS(name, 10, sums, form, as)       \
    KERNELS(name, 11, sums, form, as) KERNELS(name, 12, sums, form, as)
#define BOTH(name) {name##_one, name}
#define NAMES_4(name) BOTH(name##1), BOTH(name##2), BOTH(name##3), BOTH(name##4)
#define NAMES_6(name) NAMES_4(name), BOTH(name##5), BOTH(name##6)
#define NAMES_8(name) NAMES_6(name), BOTH(name##7), BOTH(name##8)
#define NAMES_12(name) NAMES_8(name), BOTH(name##9), BOTH(name##10), BOTH(name##11), BOTH(name##12)
#define TABLE(n, name, sums, form, as)                                                                                 \
    TO_##n(name, sums, form, as) static KIND *const name[][2] = {NAMES_##n(name)};
#define FEW_KERNELS(...) TABLE(4, __VA_ARGS__)
#if BLOCK_ROWS == 6
#define BLOCK_KERNELS(...) TABLE(6, __VA_ARGS__)
#else
#define BLOCK_KERNELS(...) TABLE(12, __VA_ARGS__)
#endif

#if HAVE_BF16_DOTS
BLOCK_KERNELS(bf16s, BLOCK_SUMS, BF16S, AS_BF16S)
#endif
#if CODE_ROWS > FEW_ROWS
BLOCK_KERNELS(codes8, CODE_SUMS, CODES8, AS_CODES)
#else
FEW_KERNELS(codes8, CODE_SUMS, CODES8, AS_CODES)
#endif

// Returns the kernels of a product for blocks of m rows: for one panel, and for several. Only products of 8-bit codes
// with codes, and dot products of bfloat16, are here; the others are in span_products.h.
static Kernel *const *kernels_of(const Packed *w, int64_t m) {
#if HAVE_BF16_DOTS
    if (w->p->activations != AS_CODES) return bf16s[m - 1];
#endif
    return codes8[m - 1];
}

static int64_t most_panels(const Packed *w, int64_t m) {
    return w->p->activations == AS_CODES ? PANELS_OF(m, CODE_SUMS) : PANELS_OF(m, BLOCK_SUMS);
}

// Computes results of some rows and panels; the first row begins a block.
static void multiply_blocks(const Packed *w, int64_t first, int64_t num_rows, int64_t panel, int64_t num_panels) {
    const int64_t sum_stride = MOST_PANELS * PANEL;
    float ALIGNED totals[(MANY_ROWS + BLOCK_ROWS) * MANY_PANELS * PANEL];
    int32_t ALIGNED sums[(MANY_ROWS + BLOCK_ROWS) * MOST_PANELS * PANEL];
    int64_t m = w->together, most = most_panels(w, m), stride = num_panels * PANEL, num_words = w->span_words;
    int64_t panel_stride = w->num_spans * num_words * PANEL, num_blocks = (num_rows + m - 1) / m;
    int64_t part = num_blocks == 1 ? num_words : num_blocks > FEW_BLOCKS ? 2 * PART_WORDS : PART_WORDS;
    int is_whole = part >= num_words;
    Kernel *const *kernels = kernels_of(w, m);
    for (int64_t span = 0; span < w->num_spans; span++) for (int64_t q = 0, v; q < num_panels; q += v) {
        v = num_panels - q >= most ? most : 1;
        const int32_t *words = words_at(w, panel + q, span);
        for (int64_t k = 0; k < num_words; k += part) for (int64_t block = 0; block < num_blocks; block++) {
            const int32_t *x = block_at(w, first / m + block, span) + k * m;
            int32_t *to = sums + (is_whole ? 0 : block * m * sum_stride);
            const int32_t *at = words + k * PANEL, *ahead = at + AHEAD;
            int64_t ahead_stride = panel_stride;
            if (num_blocks > 1) { // blocks share the prefetching of the next part
                ahead = k + part < num_words ? at + part * PANEL : words + v * panel_stride;
                ahead += MIN(block, v - 1) * panel_stride;
                ahead_stride = 0;
            }
            kernels[v > 1](x, at, panel_stride, MIN(part, num_words - k), ahead, ahead_stride, to, k == 0);
            if (k + part >= num_words)
                fold(w, (float *)to, first + block * m, m, panel + q, v, span, totals + block * m * stride + q * PANEL,
                     stride);
        }
    }
    finish(w, first, num_rows, panel, num_panels, totals);
}
