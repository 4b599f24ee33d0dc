// Runs work on the threads of torch's own OpenMP runtime, called by address, so that there is only one thread pool.
#pragma once
#include <stdint.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); // GOMP_parallel
    void (*barrier)(void);                                          // GOMP_barrier
} Runtime;

static Runtime runtime;

void pd_init(void *parallel, void *barrier) {
    runtime.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    runtime.barrier = (void (*)(void))barrier;
}

typedef struct {
    void (*work)(void *);
    void *data;
} Task;

// Runs a thread's share of the work with subnormal numbers enabled, whatever the thread's own setting. e4m3 codes
// become such numbers (packed_weights.h), and a row's bits must not depend on the thread.
static __attribute__((noinline)) void with_subnormals(void *data) {
    const Task *task = data;
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u); // flush to zero, and denormals are zeros
    task->work(task->data);
    _mm_setcsr(before);
#else
    task->work(task->data);
#endif
}

static inline void run(void (*work)(void *), void *data, int64_t num_threads) {
    Task task = {work, data};
    if (num_threads > 1)
        runtime.parallel(with_subnormals, &task, (unsigned)num_threads, 0);
    else
        with_subnormals(&task);
}

// Takes the next `step` items from a counter that the team shares.
static inline int64_t next_items(int64_t *counter, int64_t step) {
    return __atomic_fetch_add(counter, step, __ATOMIC_RELAXED);
}
