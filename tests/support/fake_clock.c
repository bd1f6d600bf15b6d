/*
 * fake_clock.c: a thread's CPU time as it would be if others took ESMM_FAKE_LOAD per cent of the CPUs. Loaded in front
 * of libc (LD_PRELOAD), so that what the command does on a busy machine and on an idle one can be tested on any.
 */
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *t)
{
  const char *load = getenv("ESMM_FAKE_LOAD");
  if (clock != CLOCK_THREAD_CPUTIME_ID || !load)
    return (int)syscall(SYS_clock_gettime, clock, t);
  if (syscall(SYS_clock_gettime, CLOCK_MONOTONIC, t) != 0)
    return -1;
  const double seconds = ((double)t->tv_sec + 1e-9 * (double)t->tv_nsec) * (1.0 - 0.01 * strtod(load, NULL));
  t->tv_sec = (time_t)seconds;
  t->tv_nsec = (long)(1e9 * (seconds - (double)t->tv_sec));
  return 0;
}
