// Computes the part of a recurrent layer between its projections in one parallel region: the convolution, then the
// recurrence with the norm after it. Threads divide sequences and heads among them; the tokens of one head are computed
// in order.
#pragma once
#include "convolution.h"
#include "gated_delta.h"
#include "mamba2.h"

#define CONV_ROWS 64         // rows of a span that a thread computes at a time
#define FEW_STATE_WORK 32768 // with fewer updates of state elements, over all tokens, one thread computes everything

typedef struct {
    int64_t num_rows, num_threads, rows_at_once;
    Sequences sequences;
    const Convolution *convolution;
    const Delta *delta; // null: the layer has none; mamba likewise
    const Mamba *mamba;
    float *convolved;  // [rows_at_once][num_channels]; without a recurrence it is the output, [num_rows][num_channels]
    int64_t *counters; // [2 * num_rows / rows_at_once + 3], zeros
} StateLayer;

// Convolves rows [start, stop) of the step, and norms Mamba-2's outputs of rows [before, start).
static void convolve_block(const StateLayer *w, int64_t start, int64_t stop, int64_t before, int64_t *counter) {
    const Convolution *c = w->convolution;
    int64_t spans = num_conv_spans(c), tiles = (stop - start + CONV_ROWS - 1) / CONV_ROWS;
    int64_t normed = w->mamba ? (start - before + CONV_ROWS - 1) / CONV_ROWS : 0;
    float *out = w->convolved - (w->delta || w->mamba ? start * c->num_channels : 0); // address of row 0
    for (int64_t i; (i = next_items(counter, 1)) < spans * tiles + normed;) {
        if (i < spans * tiles) {
            int64_t row = start + i / spans * CONV_ROWS;
            convolve_rows(c, &w->sequences, i % spans, row, MIN(stop, row + CONV_ROWS), out);
        } else {
            int64_t row = before + (i - spans * tiles) * CONV_ROWS;
            for (int64_t end = MIN(start, row + CONV_ROWS); row < end; row++) norm_groups(w->mamba, row);
        }
    }
}

// Computes the recurrence for rows [start, stop) of the step.
static void recur_block(const StateLayer *w, int64_t start, int64_t stop, int64_t *counter) {
    const Sequences *s = &w->sequences;
    int64_t num_channels = w->convolution->num_channels;
    const float *convolved = w->convolved - start * num_channels; // address of row 0
    if (w->delta) {
        Delta d = *w->delta;
        d.qkv = convolved, d.qkv_stride = num_channels;
        for (int64_t i; (i = next_items(counter, 1)) < d.num_heads * s->num_sequences;) delta_item(&d, s, i, start, stop);
    } else {
        Mamba m = *w->mamba;
        m.xbc = convolved, m.xbc_stride = num_channels;
        for (int64_t i; (i = next_items(counter, 1)) < m.num_heads * s->num_sequences;) mamba_item(&m, s, i, start, stop);
    }
}

static void all_together(const StateLayer *w) {
    if (w->num_threads > 1) runtime.barrier();
}

static void state_work(void *data) {
    const StateLayer *w = data;
    int64_t *counter = w->counters, before = 0, start = 0, recurs = w->delta || w->mamba;
    for (; start < w->num_rows; before = start, start += w->rows_at_once) {
        int64_t stop = MIN(w->num_rows, start + w->rows_at_once);
        convolve_block(w, start, stop, before, counter++);
        all_together(w);
        if (!recurs) continue;
        recur_block(w, start, stop, counter++);
        all_together(w);
    }
    convolve_block(w, w->num_rows, w->num_rows, before, counter++);
    int64_t items = num_conv_spans(w->convolution) * w->sequences.num_sequences;
    for (int64_t i; (i = next_items(counter, 1)) < items;) keep_span(w->convolution, &w->sequences, i);
}

// Computes the layer's outputs, and leaves the state after each sequence's last row in the sequence's block.
void pd_states(StateLayer *w) {
    int64_t numbers = w->convolution->num_channels * w->convolution->kernel;
    if (w->delta) numbers += w->delta->num_heads * w->delta->key_width * w->delta->value_width;
    if (w->mamba) numbers += w->mamba->num_heads * w->mamba->head_width * w->mamba->state_size;
    find_sequences(&w->sequences);
    if (numbers * w->num_rows < FEW_STATE_WORK) w->num_threads = 1;
    run(state_work, w, w->num_threads);
}
