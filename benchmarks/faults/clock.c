/* Moves the clocks that one process tree sees, through LD_PRELOAD: `benchmarks faults` writes the offsets to a mapped file.

   The file of BENCH_CLOCK_FILE is a table of {pid, realtime_ns, monotonic_ns}. The first entry applies to every process;
   each other entry applies to one process, and adds to the first. Absolute deadlines of waits are moved back, so that
   the kernel, whose clocks are unchanged, waits as long as the caller intends. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NUM_ENTRIES 64
#define SECOND 1000000000LL

struct entry {
    int64_t pid, realtime_ns, monotonic_ns;
};
static volatile struct entry *table;

__attribute__((constructor)) static void map_table(void) {
    const char *file = getenv("BENCH_CLOCK_FILE");
    int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, NUM_ENTRIES * sizeof(struct entry), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED)
        table = mapped;
}

static int is_realtime(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

static int64_t moved_ns(clockid_t clock) {
    int realtime = is_realtime(clock);
    if (!table || !(realtime || clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE ||
                    clock == CLOCK_MONOTONIC_RAW || clock == CLOCK_BOOTTIME))
        return 0;
    int64_t sum = realtime ? table[0].realtime_ns : table[0].monotonic_ns;
    int64_t pid = 0;
    for (int at = 1; at < NUM_ENTRIES && table[at].pid; at++) {
        if (!pid)
            pid = getpid();
        if (table[at].pid == pid)
            sum += realtime ? table[at].realtime_ns : table[at].monotonic_ns;
    }
    return sum;
}

static struct timespec plus(const struct timespec *time, int64_t ns) {
    int64_t sum = time->tv_nsec + ns % SECOND;
    struct timespec found = {time->tv_sec + ns / SECOND, sum};
    if (sum < 0) {
        found.tv_sec--, found.tv_nsec += SECOND;
    } else if (sum >= SECOND) {
        found.tv_sec++, found.tv_nsec -= SECOND;
    }
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int failed = syscall(SYS_clock_gettime, clock, time);
    if (!failed)
        *time = plus(time, moved_ns(clock));
    return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds)
        *seconds = now.tv_sec;
    return now.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    struct timespec real = flags & TIMER_ABSTIME ? plus(until, -moved_ns(clock)) : *until;
    static int (*next)(clockid_t, int, const struct timespec *, struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_nanosleep");
    return next(clock, flags, &real, left);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    struct timespec real = plus(until, -moved_ns(clock));
    static int (*next)(sem_t *, clockid_t, const struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "sem_clockwait");
    return next(semaphore, clock, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    struct timespec real = plus(until, -moved_ns(CLOCK_REALTIME));
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "sem_timedwait");
    return next(semaphore, &real);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    struct timespec real = plus(until, -moved_ns(clock));
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    return next(condition, mutex, clock, &real);
}

/* Only a condition's creator knows its clock: times after 2001 are taken as the wall clock's. */
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    clockid_t clock = until->tv_sec > SECOND ? CLOCK_REALTIME : CLOCK_MONOTONIC;
    struct timespec real = plus(until, -moved_ns(clock));
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        *(void **)&next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) /* this architecture never had an older version */
        *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return next(condition, mutex, &real);
}
