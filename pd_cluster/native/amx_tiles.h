// AMX multiplies tiles of 16 rows by 64 bytes of activations with tiles of 64 bytes by 16 outputs.
// Any number of rows uses the same instruction. Missing rows are zeros, or copies of the only row.
#pragma once
#include "packed_weights.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && KEEPS_OFFSET && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_ROWS 16
#define TILE_WORDS 16
#ifndef TILE_STATE
#define TILE_STATE 18 // Linux's number of the tile registers; each process must request their use once
#endif

static int have_tiles(void) {
    static int state; // 0: not requested yet
    int known = __atomic_load_n(&state, __ATOMIC_RELAXED);
    if (!known) {
        known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_STATE) ? 2 : 1;
        __atomic_store_n(&state, known, __ATOMIC_RELAXED);
    }
    return known == 1;
}

// Tiles 0 to 3 hold results, 4 and 5 activations, 6 and 7 weights. A step multiplies `words` words, at most TILE_WORDS.
// A row's results do not depend on the tile's other rows.
static void set_tiles(int64_t rows, int64_t words) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_nbytes[16];
        uint8_t rows[16];
    } ALIGNED config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = (uint8_t)(i < 6 ? MIN(rows, TILE_ROWS) : words);
        config.row_nbytes[i] = (uint16_t)(i == 4 || i == 5 ? words * 4 : 64);
    }
    _tile_loadconfig(&config);
}

#define MULTIPLY(c, a, b) \
    do { if (codes) _tile_dpbsud(c, a, b); else _tile_dpbf16ps(c, a, b); } while (0)

INLINE void clear_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void prefetch_tile(const int32_t *at) {
    UNROLL for (int i = 0; i < TILE_WORDS; i++) __builtin_prefetch(at + i * PANEL);
}

// Computes c for at most 16 rows and four panels. Rows are x_nbytes apart. `far`: the weights are not cached.
INLINE void wide_tiles(int codes, int64_t num_panels, const uint8_t *x, int64_t x_nbytes, const int32_t *words,
                       int64_t panel_stride, int64_t num_words, int64_t step, int far, float *c) {
    const int64_t width = MOST_PANELS * PANEL * 4;
    clear_tiles();
#define STEP(tile, b)                                                                                                 \
    if (num_panels > tile) {                                                                                          \
        const int32_t *at = words + tile * panel_stride + k * PANEL;                                                  \
        if (far) prefetch_tile(at + AHEAD);                                                                \
        _tile_loadd(b, at, 64);                                                                                       \
        MULTIPLY(tile, 4, b);                                                                                         \
    }
    for (int64_t k = 0; k < num_words; k += step) {
        _tile_loadd(4, x + k * 4, x_nbytes);
        STEP(0, 6) STEP(1, 7) STEP(2, 6) STEP(3, 7)
    }
#undef STEP
    _tile_stored(0, c, width);
    if (num_panels > 1) _tile_stored(1, c + PANEL, width);
    if (num_panels > 2) _tile_stored(2, c + 2 * PANEL, width);
    if (num_panels > 3) _tile_stored(3, c + 3 * PANEL, width);
}

// Computes c for 32 rows and two panels.
INLINE void square_tiles(int codes, const uint8_t *x, int64_t x_nbytes, const int32_t *words, int64_t panel_stride,
                         int64_t num_words, int64_t step, float *c) {
    const int64_t width = MOST_PANELS * PANEL * 4;
    clear_tiles();
    for (int64_t k = 0; k < num_words; k += step) {
        _tile_loadd(4, x + k * 4, x_nbytes);
        _tile_loadd(6, words + k * PANEL, 64);
        MULTIPLY(0, 4, 6);
        _tile_loadd(7, words + panel_stride + k * PANEL, 64);
        MULTIPLY(1, 4, 7);
        _tile_loadd(5, x + TILE_ROWS * x_nbytes + k * 4, x_nbytes);
        MULTIPLY(2, 5, 6);
        MULTIPLY(3, 5, 7);
    }
    _tile_stored(0, c, width);
    _tile_stored(1, c + PANEL, width);
    _tile_stored(2, c + TILE_ROWS * MOST_PANELS * PANEL, width);
    _tile_stored(3, c + TILE_ROWS * MOST_PANELS * PANEL + PANEL, width);
}

INLINE void tile_blocks(int codes, int64_t num_rows, int64_t num_panels, const uint8_t *x, int64_t x_nbytes,
                        const int32_t *words, int64_t panel_stride, int64_t num_words, int64_t step, int far,
                        float *c) {
    if (num_rows > TILE_ROWS && num_panels == 2) {
        square_tiles(codes, x, x_nbytes, words, panel_stride, num_words, step, c);
        return;
    }
    for (int64_t r = 0; r < num_rows; r += TILE_ROWS)
        wide_tiles(codes, num_panels, x + r * x_nbytes, x_nbytes, words, panel_stride, num_words, step, far,
                   c + r * MOST_PANELS * PANEL);
}

static void multiply_tiles(int codes, int64_t num_rows, int64_t num_panels, const uint8_t *x, int64_t x_nbytes,
                           const int32_t *words, int64_t panel_stride, int64_t num_words, int64_t step, int far,
                           float *c) {
    if (codes)
        tile_blocks(1, num_rows, num_panels, x, x_nbytes, words, panel_stride, num_words, step, far, c);
    else
        tile_blocks(0, num_rows, num_panels, x, x_nbytes, words, panel_stride, num_words, step, far, c);
}

static void release_tiles(void) { _tile_release(); }
#undef MULTIPLY
#else
#define TILE_ROWS 16
#define TILE_WORDS 16
static int have_tiles(void) { return 0; }
static void set_tiles(int64_t rows, int64_t words) { (void)rows, (void)words; }
static void release_tiles(void) {}
static void multiply_tiles(int codes, int64_t num_rows, int64_t num_panels, const uint8_t *x, int64_t x_nbytes,
                           const int32_t *words, int64_t panel_stride, int64_t num_words, int64_t step, int far,
                           float *c) {
    __builtin_unreachable();
}
#endif
