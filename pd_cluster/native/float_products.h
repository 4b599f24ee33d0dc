// Multiplies a few float32 rows with a weight that oneDNN has packed for AVX-512: [line of 64 outputs][input][output],
// inputs padded to a multiple of 16. Each result is one chain of additions over the inputs of a span; spans are added
// in order, then the bias. oneDNN adds in the same order, so the bits are equal. This code is faster, because it
// prefetches weights.
#pragma once
#include "thread_team.h"
#include "simd_vectors.h"

#if VL == 16
#define LINE 64 // adjacent outputs
#define LINE_INPUTS 16
#define MOST_ROWS_OF_FLOATS 96
#define ROWS_AT_ONCE 7 // rows whose sums fit in registers, together with a line of weights
#define PART 64        // inputs that are multiplied with all rows before the next ones; they stay in the L1 cache
#define FAR_PART 32    // the same if the next ones are prefetched to the L2 cache only
#define LEAST_FAR 5    // FAR_PART is faster for 5 to 18 rows, for which multiplying takes about as long as reading
#define MOST_FAR 18
#define PAGE 1024      // floats per page of memory
#define PAGES_AHEAD 32 // how far ahead addresses are translated; a prefetch would wait for the translation
#define SHARES 6       // shares of a thread's lines; other threads take the remaining shares of a late thread

typedef struct {
    int64_t num_rows, inputs, outputs, num_threads, span; // span: inputs
    const float *x, *words, *bias;                        // [num_rows, inputs]; weight; [outputs of all lines] or null
    float *out;                                           // [num_rows, outputs]
} Floats;

typedef struct {
    const Floats *p;
    int64_t num_lines, line_size, at_once, next_line; // at_once: consecutive lines that a thread takes
} Lines;

// Adds the products of n inputs of m rows to sums [m][LINE]; rows of x are `stride` apart. Prefetches `step` floats per
// input, from `ahead` on, to the L1 cache, or with `far` to the L2 cache.
typedef void Adder(const float *x, int64_t stride, const float *words, int64_t n, const float *ahead, int64_t step,
                   float *sums, int begins);

INLINE void add_inputs(int m, int far, const float *x, int64_t stride, const float *words, int64_t n,
                       const float *ahead, int64_t step, float *to, int begins) {
    vf sums[ROWS_AT_ONCE][LINE / VL];
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < LINE / VL; q++)
        sums[r][q] = begins ? (vf){0} : load(to + r * LINE + q * VL);
    for (int64_t k = 0; k < n; k++, words += LINE, ahead += step) {
        vf w[LINE / VL];
        UNROLL for (int q = 0; q < LINE / VL; q++) {
            w[q] = far ? in_register(load(words + q * VL)) : load(words + q * VL);
            if (far) __builtin_prefetch(ahead + q * VL, 0, 2);
            else __builtin_prefetch(ahead + q * VL);
        }
        UNROLL for (int r = 0; r < m; r++) {
            vf value = splat(x[r * stride + k]);
            UNROLL for (int q = 0; q < LINE / VL; q++)
                sums[r][q] = (vf)_mm512_fmadd_ps((__m512)w[q], (__m512)value, (__m512)sums[r][q]);
        }
    }
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < LINE / VL; q++)
        store(to + r * LINE + q * VL, sums[r][q]);
}

// These are separate functions, because compilers keep the sums of inlined loops in memory.
#define ADDER(name, m, far)                                                                                            \
    static __attribute__((noinline)) void name##_##m(const float *x, int64_t stride, const float *words, int64_t n,    \
                                                     const float *ahead, int64_t step, float *to, int begins) {        \
        add_inputs(m, far, x, stride, words, n, ahead, step, to, begins);                                              \
    }
#define ADDERS_FROM_4(name, far) ADDER(name, 4, far) ADDER(name, 5, far) ADDER(name, 6, far) ADDER(name, 7, far)
#define NAMES_FROM_4(name) name##_4, name##_5, name##_6, name##_7
ADDER(add_near, 1, 0) ADDER(add_near, 2, 0) ADDER(add_near, 3, 0) ADDERS_FROM_4(add_near, 0)
ADDERS_FROM_4(add_far, 1) // fewer rows never use `far`
static Adder *const adders[2][ROWS_AT_ONCE] = {{add_near_1, add_near_2, add_near_3, NAMES_FROM_4(add_near)},
                                               {0, 0, 0, NAMES_FROM_4(add_far)}};
_Static_assert(LEAST_FAR >= 4 && ROWS_AT_ONCE >= 7, "blocks of rows that are far have at least four");

// Sets sums [num_rows][LINE] over n inputs. Blocks of rows share the prefetching of the next part.
static void add_span(const Floats *p, const float *x, const float *words, int64_t n, float *sums) {
    int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, step = LINE / blocks;
    int far = p->num_rows >= LEAST_FAR && p->num_rows <= MOST_FAR;
    int64_t most = far ? FAR_PART : PART;
    for (int64_t k = 0; k < n; k += most) {
        const float *at = words + k * LINE;
        int64_t part = MIN(most, n - k), row = 0;
        for (int64_t i = 0; i < most * LINE; i += PAGE) __builtin_prefetch(at + PAGES_AHEAD * PAGE + i);
        for (int64_t block = 0; block < blocks; block++) { // blocks of about equal size
            int64_t m = (p->num_rows - row + blocks - block - 1) / (blocks - block);
            adders[far][m - 1](x + row * p->inputs + k, p->inputs, at, part, at + most * LINE + block * part * step,
                               step, sums + row * LINE, k == 0);
            row += m;
        }
    }
}

static void compute_line(const Lines *w, int64_t line) {
    const Floats *p = w->p;
    float ALIGNED sums[MOST_ROWS_OF_FLOATS * LINE], totals[MOST_ROWS_OF_FLOATS * LINE];
    const float *words = p->words + line * w->line_size;
    for (int64_t k = 0; k < p->inputs; k += p->span) {
        add_span(p, p->x + k, words + k * LINE, MIN(p->span, p->inputs - k), k ? sums : totals);
        for (int64_t i = 0; k && i < p->num_rows * LINE; i += VL) store(totals + i, load(totals + i) + load(sums + i));
    }
    for (int64_t r = 0; r < p->num_rows; r++) {
        float *row = totals + r * LINE;
        for (int64_t i = 0; p->bias && i < LINE; i += VL) store(row + i, load(row + i) + load(p->bias + line * LINE + i));
        memcpy(p->out + r * p->outputs + line * LINE, row, (size_t)MIN(LINE, p->outputs - line * LINE) * 4);
    }
}

static void lines_work(void *data) {
    Lines *w = data;
    for (int64_t first; (first = next_items(&w->next_line, w->at_once)) < w->num_lines;)
        for (int64_t line = first; line < MIN(first + w->at_once, w->num_lines); line++) compute_line(w, line);
}

// Computes out = x times the weight, transposed, plus the bias.
void pd_floats(const Floats *p) {
    Lines w = {p, (p->outputs + LINE - 1) / LINE, (p->inputs + LINE_INPUTS - 1) / LINE_INPUTS * LINE_INPUTS * LINE, 1, 0};
    w.at_once = MAX(1, w.num_lines / (SHARES * p->num_threads));
    run(lines_work, &w, p->num_threads);
}
#endif
