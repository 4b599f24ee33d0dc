// Which cores the threads of a team may run on.
#pragma once
#include <errno.h>
#include <sched.h>

#include "team.h"

typedef struct {
    const cpu_set_t *cores;
    int64_t nbytes;
    int error;
} Placing;

static void place_one(void *data) {
    Placing *placing = data;
    if (sched_setaffinity(0, (size_t)placing->nbytes, placing->cores))
        __atomic_store_n(&placing->error, errno, __ATOMIC_RELAXED);
}

// Binds each thread of the calling thread's team, itself among them. Returns 0, or the errno of one that failed.
int64_t pd_place(int64_t num_threads, const void *cores, int64_t nbytes) {
    Placing placing = {cores, nbytes, 0};
    run(place_one, &placing, num_threads);
    return placing.error;
}
