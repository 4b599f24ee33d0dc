// Computes the decoder layers of a step in one parallel region, with barriers between their parts. Results are bitwise
// equal to those of separate calls, which spent a quarter of a one-row step on waking threads and on returning.
#pragma once
#include "paged_attention.h"
#include "packed_products.h"
#include "row_kernels.h"

#define FEW_TO_MAKE 4 // up to this number of rows, a norm or gate is computed while a product packs its input

typedef void AttendPlan(const Step *, const Layer *, char *, float *, float *, int64_t *, Work *);

typedef struct {
    Product qkv, output, gate_up, down; // their rows, threads, x, out and scratch are not set
    const Layer *attention;
    const float *input_norm, *mlp_norm;
    float input_eps, mlp_eps;
    int64_t activation;
} DecoderLayer;

typedef struct {
    int64_t num_layers, num_rows, num_threads;
    const DecoderLayer *const *layers; // [num_layers]
    const Step *const *steps;          // [num_layers]
    AttendPlan *plan_attention;        // of the pool's dtype
    void (*attend)(void *);
    char *const *pools; // [num_layers]
    float *x, *delta;  // [num_rows, hidden_size]; at the end delta holds what the last layer adds to x
    int64_t has_delta; // whether delta must be added first
    uint8_t *scratch;  // pd_layers_nbytes, at a multiple of 64
} Layers;

typedef struct {
    Product products[4];
    Packed packed[4]; // qkv, output, gate_up, down
    NormWork norms[2];
    GateWork gate;
    Work attention;
    int makes; // whether norms and the gate are computed while products pack their input
} LayerWork;

typedef struct {
    const Layers *all;
    LayerWork *works;
} Team;

static Product product_of(const Product *of, const Layers *a) {
    Product p = *of;
    p.num_rows = a->num_rows, p.num_threads = a->num_threads;
    return p;
}

// The parts of the scratch memory, the same for each layer.
typedef struct {
    int64_t normed, qkv, attended, gate_up, gated, works, starts, product, end;
} Places;

static Places places_of(const Layers *a) {
    Places at = {0};
    int64_t hidden = 0, qkv = 0, attended = 0, gated = 0, product = 0;
    for (int64_t i = 0; i < a->num_layers; i++) {
        const DecoderLayer *y = a->layers[i];
        const Product *each[] = {&y->qkv, &y->output, &y->gate_up, &y->down};
        hidden = MAX(hidden, y->qkv.inputs), qkv = MAX(qkv, y->qkv.outputs);
        attended = MAX(attended, y->output.inputs), gated = MAX(gated, y->down.inputs);
        for (int j = 0; j < 4; j++) {
            Product p = product_of(each[j], a);
            product = MAX(product, scratch_nbytes(p, p.num_rows)); // for all rows at once
        }
    }
    int64_t row = a->num_rows * 4;
    at.qkv = at.normed + whole_lines(row * hidden);
    at.attended = at.qkv + whole_lines(row * qkv);
    at.gate_up = at.attended + whole_lines(row * attended);
    at.gated = at.gate_up + whole_lines(row * 2 * gated);
    at.works = at.gated + whole_lines(row * gated);
    at.starts = at.works + whole_lines(a->num_layers * (int64_t)sizeof(LayerWork));
    at.product = at.starts + whole_lines(a->num_layers * (a->num_rows + 1) * 8);
    at.end = at.product + product;
    return at;
}

int64_t pd_layers_nbytes(const Layers *a) { return places_of(a).end; }

static void make_normed(const void *data, int64_t row, int64_t num_rows) {
    const NormWork *w = data;
    int64_t n = w->features;
    for (int64_t r = row; r < row + num_rows; r++)
        norm_row(w->x + r * n, w->delta ? w->delta + r * n : 0, w->weight, w->out + r * n, n, w->eps);
}

static void plan_layer(const Layers *a, const Places *at, int64_t i, LayerWork *w) {
    const DecoderLayer *y = a->layers[i];
    int64_t hidden = y->qkv.inputs, step = rows_at_once(a->num_rows, a->num_threads);
    float *normed = (float *)(a->scratch + at->normed), *qkv = (float *)(a->scratch + at->qkv);
    float *attended = (float *)(a->scratch + at->attended), *gate_up = (float *)(a->scratch + at->gate_up);
    float *gated = (float *)(a->scratch + at->gated), *delta = i || a->has_delta ? a->delta : 0;
    const Product *of[] = {&y->qkv, &y->output, &y->gate_up, &y->down};
    const float *x[] = {normed, attended, normed, gated};
    float *out[] = {qkv, a->delta, gate_up, a->delta};
    w->norms[0] = (NormWork){a->x, delta, y->input_norm, normed, a->num_rows, hidden, 0, step, y->input_eps};
    w->norms[1] = (NormWork){a->x, a->delta, y->mlp_norm, normed, a->num_rows, hidden, 0, step, y->mlp_eps};
    w->gate = (GateWork){gate_up, gated, a->num_rows, y->down.inputs, 0, 1, (int)y->activation};
    if (a->num_rows < 4 * a->num_threads) w->gate.num_parts = a->num_threads;
    for (int j = 0; j < 4; j++) {
        w->products[j] = product_of(of[j], a);
        w->products[j].x = x[j], w->products[j].out = out[j], w->products[j].scratch = a->scratch + at->product;
        begin_product(w->products + j, w->packed + j);
    }
    w->makes = a->num_rows <= FEW_TO_MAKE;
    for (int j = 0; j < 4; j++) w->makes &= w->packed[j].by != BY_TILES; // tiles read rows of other threads
    if (w->makes) {
        w->packed[0].make = make_normed, w->packed[0].maker = w->norms;
        w->packed[2].make = make_normed, w->packed[2].maker = w->norms + 1;
        w->packed[3].make = make_gated, w->packed[3].maker = &w->gate;
    }
    int64_t *starts = (int64_t *)(a->scratch + at->starts) + i * (a->num_rows + 1);
    a->plan_attention(a->steps[i], y->attention, a->pools[i], qkv, attended, starts, &w->attention);
}

static void layers_work(void *data) {
    const Team *t = data;
    int several = t->all->num_threads > 1;
#define TOGETHER(part)                                                                                                 \
    do {                                                                                                               \
        part;                                                                                                          \
        if (several) runtime.barrier();                                                                                \
    } while (0)
    for (int64_t i = 0; i < t->all->num_layers; i++) {
        LayerWork *w = t->works + i;
        if (!w->makes) TOGETHER(norm_work(w->norms));
        TOGETHER(product_work(w->packed));
        TOGETHER(t->all->attend(&w->attention));
        TOGETHER(product_work(w->packed + 1));
        if (!w->makes) TOGETHER(norm_work(w->norms + 1));
        TOGETHER(product_work(w->packed + 2));
        if (!w->makes) TOGETHER(gate_work(&w->gate));
        TOGETHER(product_work(w->packed + 3));
    }
#undef TOGETHER
}

// Updates x, except for the last layer's output, which is left in delta.
void pd_layers(const Layers *a) {
    Places at = places_of(a);
    Team team = {a, (LayerWork *)(a->scratch + at.works)};
    for (int64_t i = 0; i < a->num_layers; i++) plan_layer(a, &at, i, team.works + i);
    run(layers_work, &team, a->num_threads);
}
