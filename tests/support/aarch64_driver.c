// Runs the kernels for a test on another processor: aarch64_driver LIBRARY ARENA NBYTES.
//
// A call is one line on stdin: a function's name, then its arguments as whole numbers. An address is an offset into the
// arena, a file that both sides map; 0 is no address. Each call is answered by a line "done". The thread pool is the
// one of this program's OpenMP library, as torch's is elsewhere.
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "attention_step.h"
#include "packed_weights.h"

void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
void GOMP_barrier(void);

static char *arena;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static int64_t argument(void) {
    int64_t value;
    if (scanf("%" SCNd64, &value) != 1) fail("an argument is missing");
    return value;
}

static void *at(int64_t offset) { return offset ? arena + offset : 0; }

static void *address(void) { return at(argument()); }

static float bits(void) { // a float travels as its bits
    uint32_t value = (uint32_t)argument();
    float result;
    memcpy(&result, &value, 4);
    return result;
}

#define PLACE(field) (field) = at((int64_t)(intptr_t)(field))

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) fail(dlerror());
    return found;
}

int main(int argc, char **argv) {
    if (argc != 4) fail("usage: aarch64_driver LIBRARY ARENA NBYTES");
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) fail(dlerror());
    int file = open(argv[2], O_RDWR);
    arena = mmap(0, (size_t)strtoll(argv[3], 0, 10), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || arena == MAP_FAILED) fail("the arena cannot be mapped");
    void (*init)(void *, void *) = find(library, "pd_init");
    void (*norm)(float *, const float *, const float *, float *, int64_t, int64_t, float, int64_t);
    void (*gate)(const float *, float *, int64_t, int64_t, int, int64_t);
    void (*attend)(const Step *, const Layer *, float *, float *, float *);
    void (*copy)(uint8_t *, const uint8_t *, int64_t);
    void (*multiply)(const Product *);
    init((void *)GOMP_parallel, (void *)GOMP_barrier);
    for (char name[32]; scanf("%31s", name) == 1;) {
        if (!strcmp(name, "pd_norm")) {
            norm = find(library, name);
            float *x = address(), *delta = address(), *weight = address(), *out = address();
            int64_t num_rows = argument(), features = argument();
            float eps = bits();
            norm(x, delta, weight, out, num_rows, features, eps, argument());
        } else if (!strcmp(name, "pd_gate")) {
            gate = find(library, name);
            float *gate_up = address(), *out = address();
            int64_t num_rows = argument(), features = argument(), activation = argument();
            gate(gate_up, out, num_rows, features, (int)activation, argument());
        } else if (!strcmp(name, "pd_attend")) {
            attend = find(library, name);
            Step *step = address();
            Layer *layer = address();
            float *pool = address(), *qkv = address(), *out = address();
            PLACE(step->query_starts), PLACE(step->context_lens), PLACE(step->block_table), PLACE(step->table_starts);
            PLACE(step->order), PLACE(step->together), PLACE(step->slots), PLACE(step->cos), PLACE(step->sin);
            PLACE(step->key_limits);
            PLACE(layer->q_norm), PLACE(layer->k_norm), PLACE(layer->sinks);
            attend(step, layer, pool, qkv, out);
        } else if (!strcmp(name, "pd_copy")) {
            copy = find(library, name);
            uint8_t *to = address(), *from = address();
            copy(to, from, argument());
        } else if (!strcmp(name, "pd_product")) {
            multiply = find(library, name);
            Product *product = address();
            PLACE(product->x), PLACE(product->words), PLACE(product->scales), PLACE(product->zeros);
            PLACE(product->bias), PLACE(product->out), PLACE(product->scratch);
            multiply(product);
        } else if (!strcmp(name, "pd_way") || !strcmp(name, "pd_scratch_nbytes")) {
            int64_t (*function)(const Product *) = find(library, name);
            printf("%" PRId64 " ", function(address()));
        } else
            fail(name);
        puts("done");
        fflush(stdout);
    }
}
