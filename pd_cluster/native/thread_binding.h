// Binds the threads of a team to cores.
#pragma once
#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "thread_team.h"

typedef struct {
    const cpu_set_t *cores;
    int64_t nbytes;
    int64_t *threads;
    int64_t num_threads;
    int error;
} Placing;

static void place_one(void *data) {
    Placing *placing = data;
    placing->threads[__atomic_fetch_add(&placing->num_threads, 1, __ATOMIC_RELAXED)] = syscall(SYS_gettid);
    if (sched_setaffinity(0, (size_t)placing->nbytes, placing->cores))
        __atomic_store_n(&placing->error, errno, __ATOMIC_RELAXED);
}

// Binds each thread of the calling thread's team, including the caller, and writes their ids to `threads`, which has
// room for `num_threads`; unused entries are unchanged. Returns 0, or the errno of a thread that failed.
int64_t pd_place(int64_t num_threads, const void *cores, int64_t nbytes, int64_t *threads) {
    Placing placing = {cores, nbytes, threads, 0, 0};
    run(place_one, &placing, num_threads);
    return placing.error;
}
