/* Preloaded into a process, shifts its wall clock by the seconds in the file that WALL_CLOCK_FILE names: an
   int64 that a test may change at any time. The monotonic clock is left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static volatile const int64_t *shift_s;

__attribute__((constructor)) static void open_shift(void) {
    const char *path = getenv("WALL_CLOCK_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift_s, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        abort();
    shift_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime)
        real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real_clock_gettime(clock, now);
    if (status == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift_s;
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec time;
    int status = clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return status;
}

time_t time(time_t *stored) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (stored)
        *stored = now.tv_sec;
    return now.tv_sec;
}
