/*
 * load.c: how busy others keep the CPUs, measured: the system's queues do not show whether our threads get the CPUs
 * that they ask for.
 *
 * One thread a CPU, at most the context's, wants to run all the time until a common end. The time they did not get went
 * to other processes, to a limit on this one, or, where the kernel knows, to another guest of the same machine. A late
 * thread has lost the time until it starts, and a thread that never starts all of it.
 */
#include "cpu/cpu.h"
#include "threads.h"

#include <sched.h>
#include <time.h>

typedef struct stretch {
  double end;                   /* of the stretch, as esmm_now has it */
  double got[ESMM_MAX_THREADS]; /* seconds of a CPU, by item */
} stretch;

static double thread_seconds(void)
{
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Asks for the clock and nothing else: that is work enough for a scheduler. */
static void keep_busy(void *arg, int64_t first, int64_t end, int worker)
{
  stretch *s = arg;
  (void)worker;
  for (int64_t i = first; i < end; i++) {
    const double start = thread_seconds();
    while (esmm_now() < s->end)
      ;
    s->got[i] = thread_seconds() - start;
  }
}

double esmm_cpu_load(esmm_ctx *ctx, double seconds)
{
  cpu_set_t set;
  const int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const int threads = cpus < 1 ? 1 : cpus < ctx->threads ? cpus : ctx->threads;
  stretch s = {0};
  const double start = esmm_now();
  s.end = start + seconds;
  esmm_for(ctx, threads, threads, 1, keep_busy, &s);
  double got = 0.0;
  for (int i = 0; i < threads; i++)
    got += s.got[i];
  const double load = 1.0 - got / (threads * (esmm_now() - start));
  return load > 0.0 ? load : 0.0;
}
