// Computes the experts of a block in one call. Each row's chosen experts are computed, and their outputs, times the
// row's weights, are added in the order of the experts. The products are computed as in packed_products.h, so results
// are bitwise equal to separate calls per expert. A thread reads an expert's weights once for all rows that chose the
// expert.
#pragma once
#include "packed_products.h"
#include "row_kernels.h"

#define MOST_PARTS 64             // parts that are computed together
#define PARTS_NBYTES (8 << 20)    // maximum memory that they use, which stays in the cache
#define PART_ROWS 256             // rows of an expert that are computed together

typedef struct {
    int64_t num_rows, top_k, num_experts, num_threads, activation;
    const Product *const *gate_ups, *const *downs; // [num_experts]; rows, threads, x, out and scratch are not set
    const int64_t *chosen;                         // [num_rows, top_k]; numbers from num_experts on are skipped
    const float *weights;                          // [num_rows, top_k]
    const float *x;                                // [num_rows, inputs of gate_ups]
    float *out;                                    // [num_rows, outputs of downs]; results are added to it
    int64_t *starts;                               // [num_experts + 1]: set by pd_experts_nbytes
    uint8_t *scratch;                              // pd_experts_nbytes, at a multiple of 64
} Experts;

// Some rows of one expert.
typedef struct {
    Product products[2]; // gate_up, down
    Packed packed[2];
    Cut cuts[2];
    GateWork gate;
    int64_t begins[3]; // the first item of each phase: preparing for gate_up, multiplying, preparing for down
} Part;

enum { PREPARE_UP, MULTIPLY_UP, PREPARE_DOWN, GATE, ADD_DOWN, NUM_PHASES };

typedef struct {
    const Experts *e;
    Part *parts;
    int64_t num_parts, nbytes, panels, num_panels; // panels: of an ADD_DOWN item
    int64_t ends[PREPARE_DOWN + 1], counters[NUM_PHASES], gates; // gates: whether GATE is a separate phase
} Batch;

// The next expert, and its next row.
typedef struct {
    int64_t expert, row;
} Place;

static Product rows_of_product(const Product *of, int64_t num_rows) {
    Product p = *of;
    p.num_rows = num_rows, p.num_threads = 1;
    return p;
}

// Returns the number of rows in each part of an expert; an expert's parts have about equal numbers of rows.
static int64_t rows_of_experts_part(const Experts *e, int64_t expert) {
    int64_t num_rows = e->starts[expert + 1] - e->starts[expert];
    Product up = rows_of_product(e->gate_ups[expert], num_rows), down = rows_of_product(e->downs[expert], num_rows);
    int64_t most = MIN(PART_ROWS, MIN(rows_of_part(&up), rows_of_part(&down)));
    int64_t parts = (num_rows + most - 1) / most;
    return (num_rows + parts - 1) / parts;
}

// The layout of a part's memory, from its first byte on.
typedef struct {
    int64_t gate_up, gated, up, down, end;
} PartPlaces;

static PartPlaces places_of_part(const Product *up, const Product *down) {
    int64_t rows = up->num_rows;
    PartPlaces at = {0};
    at.gated = at.gate_up + whole_lines(rows * up->outputs * 4);
    at.up = at.gated + whole_lines(rows * down->inputs * 4);
    at.down = at.up + whole_lines(scratch_nbytes(*up, rows));
    at.end = at.down + whole_lines(scratch_nbytes(*down, rows));
    return at;
}

// Returns the size of the lists of rows and weights by expert.
static int64_t lists_nbytes(const Experts *e) { return 2 * whole_lines(e->num_rows * e->top_k * 8); }

static void plan_part(const Experts *e, Place at, int64_t num_rows, uint8_t *memory, Part *part) {
    int64_t n = e->num_rows * e->top_k, first = e->starts[at.expert] + at.row;
    const int64_t *rows = (const int64_t *)e->scratch + first;
    const float *times = (const float *)(e->scratch + whole_lines(n * 8)) + first;
    Product *up = part->products, *down = part->products + 1;
    *up = rows_of_product(e->gate_ups[at.expert], num_rows), *down = rows_of_product(e->downs[at.expert], num_rows);
    PartPlaces p = places_of_part(up, down);
    float *gate_up = (float *)(memory + p.gate_up), *gated = (float *)(memory + p.gated);
    up->x = e->x, up->out = gate_up, up->scratch = memory + p.up;
    down->x = gated, down->out = e->out, down->scratch = memory + p.down;
    for (int i = 0; i < 2; i++) begin_product(part->products + i, part->packed + i);
    part->packed[0].from = rows, part->packed[1].to = rows, part->packed[1].times = times;
    part->gate = (GateWork){gate_up, gated, num_rows, down->inputs, 0, 1, (int)e->activation};
    if (part->packed[1].by == BY_TILES) return; // tiles read rows of other threads
    part->packed[1].make = make_gated, part->packed[1].maker = &part->gate;
}

// Plans the next parts; if `memory` is null, only computes their size. Returns whether there are any.
static int plan_parts(const Experts *e, Place *at, uint8_t *memory, Batch *b) {
    *b = (Batch){.e = e, .parts = b->parts};
    while (at->expert < e->num_experts && b->num_parts < MOST_PARTS) {
        int64_t left = e->starts[at->expert + 1] - e->starts[at->expert] - at->row;
        if (!left) {
            at->expert++, at->row = 0;
            continue;
        }
        int64_t num_rows = MIN(left, rows_of_experts_part(e, at->expert));
        Product up = rows_of_product(e->gate_ups[at->expert], num_rows);
        Product down = rows_of_product(e->downs[at->expert], num_rows);
        int64_t nbytes = places_of_part(&up, &down).end;
        if (b->num_parts && b->nbytes + nbytes > PARTS_NBYTES) break;
        if (memory) plan_part(e, *at, num_rows, memory + b->nbytes, b->parts + b->num_parts);
        b->num_parts++, b->nbytes += nbytes, at->row += num_rows;
    }
    return b->num_parts > 0;
}

static int64_t times_to_prepare(const Packed *w) {
    int64_t rows = rows_to_prepare(w);
    return (w->ready_rows + rows - 1) / rows;
}

// Divides the work of the parts into items.
static void cut_parts(Batch *b) {
    int64_t share = (b->e->num_threads + b->num_parts - 1) / b->num_parts;
    for (int64_t i = 0; i < b->num_parts; i++) {
        Part *part = b->parts + i;
        part->cuts[0] = cut_of(part->packed, share), part->cuts[1] = cut_of(part->packed + 1, b->e->num_threads);
        int64_t num_items[] = {times_to_prepare(part->packed), part->cuts[0].num_items,
                               times_to_prepare(part->packed + 1)};
        for (int j = 0; j < 3; j++) part->begins[j] = b->ends[j], b->ends[j] += num_items[j];
        b->panels = MAX(b->panels, part->cuts[1].panels);
        b->gates |= !part->packed[1].make;
    }
    b->num_panels = b->parts->packed[1].num_panels;
}

// Returns the first part, from `part` on, that contains this item of a phase.
static const Part *part_of(const Batch *b, int phase, const Part *part, int64_t item) {
    while (part + 1 < b->parts + b->num_parts && part[1].begins[phase] <= item) part++;
    return part;
}

static void prepare_parts(Batch *b, int phase, int product) {
    const Part *part = b->parts;
    for (int64_t item; (item = next_items(b->counters + phase, 1)) < b->ends[phase];) {
        part = part_of(b, phase, part, item);
        const Packed *w = part->packed + product;
        prepare(w, (item - part->begins[phase]) * rows_to_prepare(w));
    }
}

// Multiplies some rows and panels of a part, with tiles if the product uses them.
static void multiply_part(const Packed *w, const Cut *c, int64_t row, int64_t panel, const int32_t *next) {
    if (w->by == BY_TILES) set_tiles(w->p->num_rows, tile_step(w->span_nbytes / 4));
    multiply(w, c, row, panel, next);
    if (w->by == BY_TILES) release_tiles();
}

static const int32_t *words_of_item(const Batch *b, const Part *part, int64_t item) {
    if (item >= b->ends[MULTIPLY_UP]) return part->packed->p->words;
    const Part *of = part_of(b, MULTIPLY_UP, part, item);
    return words_at(of->packed, (item - of->begins[MULTIPLY_UP]) % of->cuts->groups * of->cuts->panels, 0);
}

static void multiply_ups(Batch *b) {
    const Part *part = b->parts;
    int64_t *counter = b->counters + MULTIPLY_UP, item = next_items(counter, 1);
    for (int64_t after; item < b->ends[MULTIPLY_UP]; item = after) {
        after = next_items(counter, 1);
        part = part_of(b, MULTIPLY_UP, part, item);
        const Cut *c = part->cuts;
        int64_t at = item - part->begins[MULTIPLY_UP];
        multiply_part(part->packed, c, at / c->groups * c->rows, at % c->groups * c->panels,
                      words_of_item(b, part, after));
    }
}

static void gate_parts(Batch *b) {
    for (int64_t i; (i = next_items(b->counters + GATE, 1)) < b->num_parts;)
        if (!b->parts[i].packed[1].make) make_gated(&b->parts[i].gate, 0, b->parts[i].gate.num_rows);
}

// An item covers some panels of all parts, in the order of the parts.
static void add_downs(Batch *b) {
    int64_t *counter = b->counters + ADD_DOWN, panel = next_items(counter, b->panels);
    for (int64_t after; panel < b->num_panels; panel = after) {
        after = next_items(counter, b->panels);
        int64_t end = MIN(panel + b->panels, b->num_panels);
        for (int64_t i = 0; i < b->num_parts; i++) {
            const Packed *w = b->parts[i].packed + 1;
            const Cut *c = b->parts[i].cuts + 1;
            const int32_t *next = i + 1 < b->num_parts     ? words_at(b->parts[i + 1].packed + 1, panel, 0)
                                  : after < b->num_panels ? words_at(b->parts->packed + 1, after, 0)
                                                          : w->p->words;
            for (int64_t q = panel; q < end; q += c->panels)
                for (int64_t row = 0; row < w->p->num_rows; row += c->rows)
                    multiply_part(w, c, row, q, next);
        }
    }
}

static void experts_work(void *data) {
    Batch *b = data;
    int several = b->e->num_threads > 1;
    prepare_parts(b, PREPARE_UP, 0);
    if (several) runtime.barrier();
    multiply_ups(b);
    if (several) runtime.barrier();
    if (b->gates) {
        gate_parts(b);
        if (several) runtime.barrier();
    }
    prepare_parts(b, PREPARE_DOWN, 1);
    if (several) runtime.barrier();
    add_downs(b);
}

// Lists rows and weights by expert, with rows in ascending order. Each entry of `starts` becomes the next expert's
// start.
static void list_rows(const Experts *e) {
    int64_t n = e->num_rows * e->top_k, *rows = (int64_t *)e->scratch;
    float *times = (float *)(e->scratch + whole_lines(n * 8));
    for (int64_t i = 0; i < n; i++) {
        if (e->chosen[i] >= e->num_experts) continue;
        int64_t at = e->starts[e->chosen[i]]++;
        rows[at] = i / e->top_k, times[at] = e->weights[i];
    }
    for (int64_t i = e->num_experts; i > 0; i--) e->starts[i] = e->starts[i - 1];
    e->starts[0] = 0;
}

// Counts the rows of each expert. Returns the scratch memory that the call needs.
int64_t pd_experts_nbytes(const Experts *e) {
    memset(e->starts, 0, (size_t)(e->num_experts + 1) * 8);
    for (int64_t i = 0; i < e->num_rows * e->top_k; i++)
        if (e->chosen[i] < e->num_experts) e->starts[e->chosen[i] + 1]++;
    for (int64_t i = 0; i < e->num_experts; i++) e->starts[i + 1] += e->starts[i];
    int64_t most = 0;
    Place at = {0};
    for (Batch b = {0}; plan_parts(e, &at, 0, &b);) most = MAX(most, b.nbytes);
    return lists_nbytes(e) + most;
}

// Adds the experts' outputs to out. All experts have the same number of outputs.
void pd_experts(const Experts *e) {
    Part parts[MOST_PARTS];
    Batch b = {.parts = parts};
    Place at = {0};
    list_rows(e);
    while (plan_parts(e, &at, e->scratch + lists_nbytes(e), &b)) {
        cut_parts(&b);
        run(experts_work, &b, e->num_threads);
    }
}
