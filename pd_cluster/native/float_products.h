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
// For up to MOST_TOGETHER rows, a thread reads several lines in turn. Reads from several pages of memory overlap, so
// products of 1 to 8 rows take three quarters of the time (measured on Sapphire Rapids).
#define TOGETHER 4
#define MOST_TOGETHER 14
// Inputs of a line that are multiplied with all rows before the next line's; they and the next ones fit in the L1 cache
#define FEW_PART 8     // for up to FEW_TOGETHER rows
#define FEW_TOGETHER 4
#define SOME_PART 16   // for up to MOST_TOGETHER rows
#define PART 64        // for more rows, one line after the other
#define PAGE 1024      // floats per page of memory
#define PAGES_AHEAD 32 // how far ahead addresses are translated; a prefetch would wait for the translation
#define SHARES 6       // shares of a thread's lines; other threads take the remaining shares of a late thread

typedef struct {
    int64_t num_rows, inputs, outputs, num_threads, span; // span: inputs of a span
    const float *x, *words, *bias;                        // [num_rows, inputs]; weight; [outputs of all lines] or null
    float *out;                                           // [num_rows, outputs]
} Floats;

typedef struct {
    const Floats *p;
    int64_t num_lines, line_size, at_once, next_line; // at_once: consecutive lines that a thread takes
    int64_t together, part;                           // lines that are read in turn; inputs per turn
} Lines;

// Weights to prefetch: LINE floats at `at` + i * `gap` for each i < together, then the same `step` floats further on.
typedef struct {
    const float *at;
    int64_t gap, step;
} Fetch;

// Adds the products of n inputs of m rows to sums [m][LINE]; rows of x are `stride` apart.
typedef void Adder(const float *x, int64_t stride, const float *words, int64_t n, Fetch ahead, float *sums, int begins);

INLINE void add_input(int m, const float *x, int64_t stride, const float *words, vf sums[][LINE / VL]) {
    vf w[LINE / VL];
    UNROLL for (int q = 0; q < LINE / VL; q++) w[q] = load(words + q * VL);
    UNROLL for (int r = 0; r < m; r++) {
        vf value = splat(x[r * stride]);
        UNROLL for (int q = 0; q < LINE / VL; q++)
            sums[r][q] = (vf)_mm512_fmadd_ps((__m512)w[q], (__m512)value, (__m512)sums[r][q]);
    }
}

INLINE void add_inputs(int m, int together, const float *x, int64_t stride, const float *words, int64_t n, Fetch ahead,
                       float *to, int begins) {
    vf sums[ROWS_AT_ONCE][LINE / VL];
    int64_t k = 0;
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < LINE / VL; q++)
        sums[r][q] = begins ? (vf){0} : load(to + r * LINE + q * VL);
    for (; k + together <= n; k += together, ahead.at += ahead.step)
        UNROLL for (int i = 0; i < together; i++, words += LINE) {
            UNROLL for (int q = 0; q < LINE / VL; q++) __builtin_prefetch(ahead.at + i * ahead.gap + q * VL);
            add_input(m, x + k + i, stride, words, sums);
            if (together > 1) __asm__ volatile("" : : : "memory"); // earlier loads would take too many registers
        }
    for (; k < n; k++, words += LINE) add_input(m, x + k, stride, words, sums);
    UNROLL for (int r = 0; r < m; r++) UNROLL for (int q = 0; q < LINE / VL; q++)
        store(to + r * LINE + q * VL, sums[r][q]);
}

// These are separate functions, because compilers keep the sums of inlined loops in memory.
#define ADDER(name, m, together)                                                                                       \
    static __attribute__((noinline)) void name##_##m(const float *x, int64_t stride, const float *words, int64_t n,    \
                                                     Fetch ahead, float *to, int begins) {                             \
        add_inputs(m, together, x, stride, words, n, ahead, to, begins);                                               \
    }
#define ADDERS_FROM_4(name, together)                                                                                  \
    ADDER(name, 4, together) ADDER(name, 5, together) ADDER(name, 6, together) ADDER(name, 7, together)
#define NAMES_FROM_4(name) name##_4, name##_5, name##_6, name##_7
ADDER(in_turn, 1, TOGETHER) ADDER(in_turn, 2, TOGETHER) ADDER(in_turn, 3, TOGETHER) ADDERS_FROM_4(in_turn, TOGETHER)
ADDERS_FROM_4(apart, 1) // more than MOST_TOGETHER rows never have smaller blocks
static Adder *const adders[2][ROWS_AT_ONCE] = {{0, 0, 0, NAMES_FROM_4(apart)},
                                               {in_turn_1, in_turn_2, in_turn_3, NAMES_FROM_4(in_turn)}};

// Sets sums [lines][num_rows][LINE] over n inputs of some lines, part by part. Each line, in its turn, prefetches a
// share of the next parts of all lines; blocks of rows divide this share.
static void add_span(const Lines *w, int64_t lines, const float *x, const float *words, int64_t n, float *sums) {
    const Floats *p = w->p;
    int64_t blocks = (p->num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, step = LINE / blocks, size = w->line_size;
    for (int64_t k = 0; k < n; k += w->part) {
        int64_t part = MIN(w->part, n - k);
        const float *at = words + k * LINE, *next = at + w->part * LINE;
        if (w->together == 1)
            for (int64_t i = 0; i < w->part * LINE; i += PAGE) __builtin_prefetch(at + PAGES_AHEAD * PAGE + i);
        for (int64_t line = 0; line < lines; line++) {
            Fetch ahead = w->together > 1 ? (Fetch){next + line * part / TOGETHER * LINE, size, step}
                                          : (Fetch){next, 0, step};
            for (int64_t block = 0, row = 0, m; block < blocks; block++, row += m) { // blocks of about equal size
                m = (p->num_rows - row + blocks - block - 1) / (blocks - block);
                adders[w->together > 1][m - 1](x + row * p->inputs + k, p->inputs, at + line * size, part, ahead,
                                               sums + (line * p->num_rows + row) * LINE, k == 0);
                ahead.at += part / w->together * ahead.step;
            }
        }
    }
}

static void compute_lines(const Lines *w, int64_t line, int64_t lines) {
    const Floats *p = w->p;
    float ALIGNED sums[MOST_ROWS_OF_FLOATS * LINE], totals[MOST_ROWS_OF_FLOATS * LINE];
    const float *words = p->words + line * w->line_size;
    for (int64_t k = 0; k < p->inputs; k += p->span) {
        add_span(w, lines, p->x + k, words + k * LINE, MIN(p->span, p->inputs - k), k ? sums : totals);
        for (int64_t i = 0; k && i < lines * p->num_rows * LINE; i += VL)
            store(totals + i, load(totals + i) + load(sums + i));
    }
    for (int64_t i = 0; i < lines * p->num_rows; i++) {
        float *row = totals + i * LINE;
        int64_t output = (line + i / p->num_rows) * LINE;
        for (int64_t q = 0; p->bias && q < LINE; q += VL) store(row + q, load(row + q) + load(p->bias + output + q));
        memcpy(p->out + i % p->num_rows * p->outputs + output, row, (size_t)MIN(LINE, p->outputs - output) * 4);
    }
}
_Static_assert(TOGETHER * MOST_TOGETHER <= MOST_ROWS_OF_FLOATS, "the sums of all lines fit");

static void lines_work(void *data) {
    Lines *w = data;
    for (int64_t line, end; (line = next_items(&w->next_line, w->at_once)) < w->num_lines;)
        for (end = MIN(line + w->at_once, w->num_lines); line < end; line += w->together)
            compute_lines(w, line, MIN(w->together, end - line));
}

// Computes out = x times the weight, transposed, plus the bias.
void pd_floats(const Floats *p) {
    int64_t inputs = (p->inputs + LINE_INPUTS - 1) / LINE_INPUTS * LINE_INPUTS;
    Lines w = {.p = p, .num_lines = (p->outputs + LINE - 1) / LINE, .line_size = inputs * LINE};
    w.together = p->num_rows <= MOST_TOGETHER ? TOGETHER : 1;
    w.part = p->num_rows <= FEW_TOGETHER ? FEW_PART : p->num_rows <= MOST_TOGETHER ? SOME_PART : PART;
    w.at_once = w.num_lines / (SHARES * p->num_threads) / w.together * w.together;
    w.at_once = MAX(w.at_once, MAX(1, MIN(w.together, w.num_lines / (2 * p->num_threads))));
    run(lines_work, &w, p->num_threads);
}
#endif
