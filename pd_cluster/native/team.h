// Threads: the pool of torch's own OpenMP runtime, reached by address, so that there is only one pool.
#pragma once
#include <stdint.h>

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); // GOMP_parallel
    void (*barrier)(void);                                          // GOMP_barrier
} Runtime;

static Runtime runtime;

void pd_init(void *parallel, void *barrier) {
    runtime.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    runtime.barrier = (void (*)(void))barrier;
}

static inline void run(void (*work)(void *), void *data, int64_t num_threads) {
    if (num_threads > 1)
        runtime.parallel(work, data, (unsigned)num_threads, 0);
    else
        work(data);
}

// Takes the next `step` items from a counter that the team shares.
static inline int64_t next_items(int64_t *counter, int64_t step) {
    return __atomic_fetch_add(counter, step, __ATOMIC_RELAXED);
}
