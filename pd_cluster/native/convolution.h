// A short causal convolution of each channel. It continues from the earlier inputs, which a state keeps. Each sum
// begins with the bias and adds the oldest input first, so it does not depend on where a step begins.
#pragma once
#include "state_segments.h"

#define MOST_KERNEL 8
#define CHANNELS_AT_ONCE 1024 // inputs and weights of so many channels stay in the L1 cache

// The channels whose last inputs one state plane keeps. For each head, a block has [kernel - 1][channels], the oldest
// input first.
typedef struct {
    int64_t num_heads, channels, first_channel;
    StatePlane kept;
} ConvPart;

typedef struct {
    int64_t num_parts, kernel, num_channels, is_gated; // is_gated: the result is multiplied by its own sigmoid (silu)
    const ConvPart *parts;
    const float *weight; // [kernel][num_channels], for the oldest input first
    const float *bias;   // [num_channels]; null: zeros
    const float *x;      // [num_rows][num_channels], strided
    int64_t x_stride;
} Convolution;

INLINE void add_inputs_of(int kernel, const Convolution *c, const float *const *in, int64_t channel, int64_t n,
                          float *out) {
    for (int64_t i = 0; i < n; i += VL) {
        vf sum = c->bias ? load_first(c->bias + channel + i, n - i) : (vf){0};
        UNROLL for (int j = 0; j < kernel; j++)
            sum = multiply_add(load_first(c->weight + j * c->num_channels + channel + i, n - i),
                               load_first(in[j] + i, n - i), sum);
        if (c->is_gated) sum *= logistic(sum);
        store_first(out + i, sum, n - i);
    }
}

// Computes n channels of a row from their inputs, in[0] the oldest.
static __attribute__((noinline)) void convolve_channels(const Convolution *c, const float *const *in, int64_t channel,
                                                        int64_t n, float *out) {
    switch (c->kernel) {
    case 3: add_inputs_of(3, c, in, channel, n, out); break;
    case 4: add_inputs_of(4, c, in, channel, n, out); break;
    default: add_inputs_of((int)c->kernel, c, in, channel, n, out);
    }
}

// Writes to `to` the last kernel - 1 inputs of those in `from` and, after them, num_rows rows of x. `to` may be `from`.
static void keep_inputs(const Convolution *c, const float *from, const float *x, int64_t num_rows, int64_t channels,
                        float *to) {
    int64_t num_kept = c->kernel - 1;
    for (int64_t j = 0; j < num_kept; j++) {
        int64_t at = j + num_rows - num_kept; // index of the row
        memmove(to + j * channels, at < 0 ? from + (j + num_rows) * channels : x + at * c->x_stride, (size_t)channels * 4);
    }
}

// Computes some heads of a part in one row. The sequence begins at row `first`; `own` has its inputs before that.
static void convolve_row(const Convolution *c, const ConvPart *part, const float *own, int64_t first, int64_t row,
                         int64_t head, int64_t num_heads, float *out) {
    int64_t channels = part->channels, channel = part->first_channel + head * channels, oldest = row - (c->kernel - 1);
    const float *x = c->x + channel, *in[MOST_KERNEL];
    if (oldest >= first) {
        for (int64_t j = 0; j < c->kernel; j++) in[j] = x + (oldest + j) * c->x_stride;
        convolve_channels(c, in, channel, num_heads * channels, out + channel);
    } else for (int64_t h = head; h < head + num_heads; h++, x += channels) {
        const float *kept = own + h * (c->kernel - 1) * channels;
        for (int64_t j = 0; j < c->kernel; j++)
            in[j] = oldest + j < first ? kept + (row - first + j) * channels : x + (oldest + j) * c->x_stride;
        convolve_channels(c, in, part->first_channel + h * channels, channels, out + part->first_channel + h * channels);
    }
}

INLINE int64_t heads_at_once(const ConvPart *part) { return MAX(1, CHANNELS_AT_ONCE / part->channels); }

INLINE int64_t num_spans_of(const ConvPart *part) {
    return (part->num_heads + heads_at_once(part) - 1) / heads_at_once(part);
}

// Returns the number of spans; a span is the channels of the heads that are computed together.
static int64_t num_conv_spans(const Convolution *c) {
    int64_t spans = 0;
    for (int64_t i = 0; i < c->num_parts; i++) spans += num_spans_of(c->parts + i);
    return spans;
}

// Returns a span's part, its first head, and its number of heads.
static const ConvPart *conv_span(const Convolution *c, int64_t span, int64_t *head, int64_t *num_heads) {
    const ConvPart *part = c->parts;
    for (; span >= num_spans_of(part); part++) span -= num_spans_of(part);
    *head = span * heads_at_once(part);
    *num_heads = MIN(heads_at_once(part), part->num_heads - *head);
    return part;
}

// Computes a span of channels in rows [start, stop) of the step, over all sequences. `out`: the address of row 0.
static void convolve_rows(const Convolution *c, const Sequences *s, int64_t span, int64_t start, int64_t stop, float *out) {
    int64_t head, num_heads;
    const ConvPart *part = conv_span(c, span, &head, &num_heads);
    for (int64_t of = 0; of < s->num_sequences; of++) {
        const Segment *first = s->segments + s->starts[of], *last = s->segments + s->starts[of + 1] - 1;
        const float *own = in_block(&part->kept, first->block);
        for (int64_t row = MAX(start, first->first); row < MIN(stop, last->stop); row++)
            convolve_row(c, part, own, first->first, row, head, num_heads, out + row * c->num_channels);
    }
}

// Stores the last inputs of a sequence's span in its state, after all its rows are computed.
static void keep_span(const Convolution *c, const Sequences *s, int64_t item) {
    int64_t spans = num_conv_spans(c), of = item / spans, head, num_heads;
    const ConvPart *part = conv_span(c, item % spans, &head, &num_heads);
    const Segment *first = s->segments + s->starts[of], *stop = s->segments + s->starts[of + 1];
    for (int64_t h = head; h < head + num_heads; h++) {
        int64_t at = h * (c->kernel - 1) * part->channels;
        const float *x = c->x + first->first * c->x_stride + part->first_channel + h * part->channels;
        float *own = in_block(&part->kept, first->block) + at;
        for (const Segment *g = first; g < stop; g++)
            if (g->keep >= 0)
                keep_inputs(c, own, x, g->stop - first->first, part->channels, in_block(&part->kept, g->keep) + at);
        keep_inputs(c, own, x, stop[-1].stop - first->first, part->channels, own);
    }
}
