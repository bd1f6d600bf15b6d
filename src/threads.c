/*
 * threads.c: a context's threads. The calling thread takes part, as worker 0.
 *
 * One word, `state`, says how many threads the open loop wants, and how many workers are inside. A worker enters by
 * adding one to it, which works only while the loop is open; the first thread that finds no piece left closes the loop.
 * The caller then waits for the workers inside, and never for a worker that has not started.
 *
 * An idle worker spins briefly (SPIN), then yields for up to LINGER if loops come less than SOON apart, then sleeps on
 * a futex: it takes no time from a program that does something else. Waking a worker takes 40 to 100 us, as long as a
 * small product. So a product that is not worth waking workers (ctx->wakes) wakes them only where loops follow each
 * other, and seldom. If more threads want to run than there are CPUs, workers do not linger: the system gives a CPU to
 * a woken thread sooner than to one that yielded. The caller wakes two workers, and each of them two more, so that the
 * caller starts on its own pieces soon. Linux usually places a woken thread on its waker's CPU, even where others are
 * idle, and there it would wait for milliseconds: the waker bars it from that CPU until it runs on another.
 *
 * After a fork the child has none of these threads. It sees that by a counter that the fork raises, and starts its own.
 */
#include "threads.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPIN 20e-6              /* s: an idle worker, and a caller at the end of a loop, spins for half of this; */
#define LINGER 1e-3             /* s: the worker then yields for so long, if the loop before came */
#define SOON 1e-4               /* less than so many seconds earlier */
#define REST 2e-4               /* seconds between two attempts to wake others for brief products */
#define PATIENCE 2e-4           /* seconds that the caller looks whether the last pieces are done */
#define AGAIN 1.0               /* seconds until the system is asked anew for threads that it refused */
#define STACK ((size_t)1 << 20) /* many times a kernel's need: a program's thread-local data lie there too */

/* state: threads wanted, the caller sleeps, others inside */
#define WANTED_SHIFT 16
#define WANTED_MASK 0xffff0000u
#define CALLER_SLEEPS 0x8000u
#define INSIDE_MASK 0x7fffu
#define QUIT WANTED_MASK /* more than any loop wants: all come, and leave */

enum { AWAKE, ASLEEP, WAKING };

typedef struct worker {
  _Alignas(64) _Atomic int64_t next; /* the first piece of its share that no thread has taken */
  _Atomic uint32_t asleep;           /* AWAKE, ASLEEP or WAKING */
  bool moved; /* it may not run on every CPU of `allowed` at present; its waker's while WAKING, else its own */
  cpu_set_t allowed, elsewhere;
  pid_t tid;
  int id;
  struct esmm_threads *pool;
  pthread_t thread;
} worker;

typedef struct esmm_threads {
  _Alignas(64) _Atomic uint32_t state;
  _Atomic int to_wake; /* the first worker that no thread has tried to wake yet */
  int wake_end;        /* past the last one that is to be woken */
  /* The loop. Workers inside read it; the caller writes it when none is inside. */
  esmm_piece *piece;
  void *arg;
  int64_t items, at_once, pieces;
  int threads;
  long cpus;         /* of this machine */
  _Atomic bool soon; /* the loop came soon after the one before */
  _Atomic int cpu;   /* the caller's, when it opened the loop */
  /* The caller's own */
  int most, running; /* workers that there is room for, that there are, 0 among both */
  unsigned forks;    /* as the counter was when the first was started */
  double not_before; /* 0, or when to ask again for more */
  double ended;      /* when the last loop was done */
  double woke;       /* when sleepers were last woken */
  worker worker[];
} esmm_threads;

static _Atomic unsigned forks; /* between the first process and this one, those without an exec */
static bool forks_counted;

static void count_fork(void)
{
  atomic_fetch_add(&forks, 1);
}

static void count_forks(void)
{
  forks_counted = pthread_atfork(NULL, NULL, count_fork) == 0;
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
  (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word)
{
  (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static inline void relax(void)
{
  for (int i = 0; i < 4; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}

/* Do more threads want to run on this machine than it has CPUs? No, where the system does not say. */
static bool is_crowded(const esmm_threads *p)
{
  char text[128];
  const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  const ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
  if (file >= 0)
    (void)close(file);
  if (length <= 0)
    return false;
  text[length] = '\0';
  const char *running = text; /* "0.20 0.18 0.12 2/80 11206": of 80 threads 2 want to run */
  for (int i = 0; i < 3 && running; i++)
    running = strchr(running + 1, ' ');
  return running && strtol(running, NULL, 10) > p->cpus;
}

/* Bars a worker from this CPU. The worker itself calls this, or its waker; */
static void send_elsewhere(worker *w, int cpu)
{
  if (w->moved || cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(w->tid, sizeof w->allowed, &w->allowed) != 0)
    return;
  w->elsewhere = w->allowed;
  CPU_CLR((size_t)cpu, &w->elsewhere);
  if (CPU_COUNT(&w->elsewhere) > 0)
    w->moved = sched_setaffinity(w->tid, sizeof w->elsewhere, &w->elsewhere) == 0;
}

/* once it runs elsewhere it may run anywhere again, unless its CPUs were changed meanwhile. */
static void free_again(worker *me)
{
  cpu_set_t now;
  if (me->moved && sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &me->elsewhere))
    (void)sched_setaffinity(0, sizeof me->allowed, &me->allowed);
  me->moved = false;
}

/* Looks whether a loop wants this worker, for a while; *state is then the pool's. */
static bool look_for_loop(worker *me, uint32_t *state)
{
  double most = SPIN;
  bool apart = false; /* it was tried, at least */
  const double start = esmm_now();
  for (double spent = 0.0; spent < most; spent = esmm_now() - start) {
    *state = atomic_load(&me->pool->state);
    if (*state >> WANTED_SHIFT > (uint32_t)me->id)
      return true;
    if (most > SPIN && !apart && sched_getcpu() == atomic_load(&me->pool->cpu)) {
      apart = true;
      send_elsewhere(me, sched_getcpu());
      free_again(me);
    } else if (most > SPIN) {
      (void)sched_yield();
    } else if (spent < SPIN / 2)
      relax();
    else if (atomic_load(&me->pool->soon) && !is_crowded(me->pool))
      most = LINGER;
    else
      return false;
  }
  return false;
}

/* Back from sleep, woken or not. A waker may not be done with it yet. */
static void wake_up(worker *me)
{
  uint32_t was = ASLEEP;
  if (!atomic_compare_exchange_strong(&me->asleep, &was, AWAKE))
    while (atomic_load(&me->asleep) != AWAKE)
      (void)sched_yield();
  free_again(me);
}

/* The state, once a loop wants this worker. */
static uint32_t wait_for_loop(worker *me)
{
  uint32_t state;
  while (!look_for_loop(me, &state)) {
    /* The caller opens a loop, then reads this; the worker sets this, then looks for a loop: one sees the other. */
    atomic_store(&me->asleep, ASLEEP);
    if (atomic_load(&me->pool->state) >> WANTED_SHIFT <= (uint32_t)me->id)
      sleep_while(&me->asleep, ASLEEP);
    wake_up(me);
  }
  return state;
}

static bool wake_worker(worker *w, bool elsewhere)
{
  uint32_t was = ASLEEP;
  if (atomic_load(&w->asleep) != ASLEEP || !atomic_compare_exchange_strong(&w->asleep, &was, WAKING))
    return false;
  if (elsewhere)
    send_elsewhere(w, sched_getcpu());
  atomic_store(&w->asleep, AWAKE);
  wake(&w->asleep);
  return true;
}

static void wake_two(esmm_threads *p)
{
  int woken = 0;
  for (int i;
       woken < 2 && atomic_load(&p->state) & WANTED_MASK && (i = atomic_fetch_add(&p->to_wake, 1)) < p->wake_end;)
    woken += wake_worker(&p->worker[i], true);
}

static int64_t share_start(const esmm_threads *p, int id)
{
  return p->pieces / p->threads * id + esmm_min(id, p->pieces % p->threads);
}

/* Pieces until there are none, of this worker's share first. */
static void do_pieces(esmm_threads *p, int me)
{
  for (int i = 0; i < p->threads; i++) {
    const int whose = me + i < p->threads ? me + i : me + i - p->threads;
    _Atomic int64_t *next = &p->worker[whose].next;
    const int64_t end = share_start(p, whose + 1);
    while (atomic_load_explicit(next, memory_order_relaxed) < end) {
      const int64_t piece = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
      if (piece < end)
        p->piece(p->arg, piece * p->at_once, esmm_min(p->items, (piece + 1) * p->at_once), me);
    }
  }
  atomic_fetch_and(&p->state, ~WANTED_MASK); /* closed: there is nothing to come for */
}

static void *work(void *arg)
{
  worker *me = arg;
  esmm_threads *p = me->pool;
  (void)pthread_setname_np(pthread_self(), "esmm");
  me->tid = (pid_t)syscall(SYS_gettid);
  for (;;) {
    uint32_t state = wait_for_loop(me);
    if ((state & WANTED_MASK) == QUIT)
      return NULL;
    if (!atomic_compare_exchange_weak(&p->state, &state, state + 1))
      continue;
    wake_two(p);
    do_pieces(p, me->id);
    state = atomic_fetch_sub(&p->state, 1);
    if (state == (CALLER_SLEEPS | 1))
      wake(&p->state);
  }
}

/* The loop is closed: those inside finish their last piece. Where the caller sleeps, they may have its CPU. */
static void wait_for_others(esmm_threads *p)
{
  double most = SPIN;
  const double start = esmm_now();
  for (double spent = 0.0; spent < most; spent = esmm_now() - start) {
    if (!(atomic_load(&p->state) & INSIDE_MASK))
      return;
    if (most > SPIN || spent < SPIN / 2)
      relax();
    else if (is_crowded(p))
      break;
    else
      most = PATIENCE;
  }
  atomic_fetch_or(&p->state, CALLER_SLEEPS);
  for (uint32_t state; (state = atomic_load(&p->state)) & INSIDE_MASK;)
    sleep_while(&p->state, state);
}

static bool start_worker(esmm_threads *p, int id)
{
  worker *w = &p->worker[id];
  pthread_attr_t attr;
  *w = (worker){.id = id, .pool = p};
  if (pthread_attr_init(&attr) != 0)
    return false;
  /* Where a program's thread-local data alone is larger than this, the default has to do. */
  bool started = pthread_attr_setstacksize(&attr, STACK) == 0 && pthread_create(&w->thread, &attr, work, w) == 0;
  (void)pthread_attr_destroy(&attr);
  return started || pthread_create(&w->thread, NULL, work, w) == 0;
}

/* Signals are for the program's own threads: workers inherit that all are blocked but those of their own faults. */
static void start_workers(esmm_threads *p, int threads)
{
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  sigset_t all, before;
  (void)pthread_once(&once, count_forks);
  if (!forks_counted || sigfillset(&all) != 0)
    return;
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    (void)sigdelset(&all, faults[i]);
  if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0)
    return;
  while (p->running < threads && start_worker(p, p->running))
    p->running++;
  (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* How many of the threads wanted there are, or can be started. */
static int have_threads(esmm_threads *p, int wanted, bool start)
{
  if (p->forks != atomic_load_explicit(&forks, memory_order_relaxed)) {
    p->forks = atomic_load(&forks);
    p->running = 1;
    p->not_before = 0.0;
  }
  wanted = wanted < p->most ? wanted : p->most;
  if (start && p->running < wanted && (p->not_before == 0.0 || esmm_now() >= p->not_before)) {
    start_workers(p, wanted);
    p->not_before = p->running < wanted ? esmm_now() + AGAIN : 0.0;
  }
  return p->running < wanted ? p->running : wanted;
}

void esmm_for(const esmm_ctx *ctx, int threads, int64_t items, int64_t at_once, esmm_piece *piece, void *arg)
{
  esmm_threads *p = ctx->pool;
  const int64_t pieces = esmm_ceil_div(items, at_once);
  double now = 0.0;
  bool soon = false;
  int wakes = ctx->wakes;
  if (pieces > 1 && threads > 1) {
    now = esmm_now();
    soon = now - p->ended < SOON;
    if (soon && now - p->woke > REST)
      wakes = threads - 1;
    threads = have_threads(p, (int)esmm_min(threads, pieces), wakes > 0);
  }
  if (pieces <= 1 || threads <= 1) {
    if (items > 0)
      piece(arg, 0, items, 0);
    p->ended = now > 0.0 ? esmm_now() : p->ended;
    return;
  }
  p->piece = piece;
  p->arg = arg;
  p->items = items;
  p->at_once = at_once;
  p->pieces = pieces;
  p->threads = threads;
  p->wake_end = 1 + (int)esmm_min(wakes, threads - 1);
  if (wakes > 0)
    p->woke = now;
  atomic_store_explicit(&p->cpu, sched_getcpu(), memory_order_relaxed);
  atomic_store_explicit(&p->soon, soon, memory_order_relaxed);
  for (int i = 0; i < threads; i++)
    atomic_store_explicit(&p->worker[i].next, share_start(p, i), memory_order_relaxed);
  atomic_store_explicit(&p->to_wake, 1, memory_order_relaxed);
  atomic_store(&p->state, (uint32_t)threads << WANTED_SHIFT);
  wake_two(p);
  do_pieces(p, 0);
  wait_for_others(p);
  p->ended = esmm_now();
}

static size_t bytes_of(int threads)
{
  return sizeof(esmm_threads) + (size_t)threads * sizeof(worker);
}

esmm_status esmm_threads_open(esmm_ctx *ctx)
{
  ctx->pool = esmm_mem_alloc(&ctx->allocator, bytes_of(ctx->threads));
  if (!ctx->pool)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %d threads", ctx->threads);
  memset(ctx->pool, 0, bytes_of(ctx->threads));
  ctx->pool->most = ctx->threads;
  ctx->pool->cpus = sysconf(_SC_NPROCESSORS_ONLN);
  ctx->pool->running = 1;
  ctx->pool->forks = atomic_load(&forks);
  return ESMM_OK;
}

void esmm_threads_close(esmm_ctx *ctx)
{
  esmm_threads *p = ctx->pool;
  if (!p)
    return;
  if (p->forks == atomic_load(&forks)) {
    atomic_store(&p->state, QUIT);
    for (int i = 1; i < p->running; i++)
      (void)wake_worker(&p->worker[i], false); /* it may be gone at any moment */
    for (int i = 1; i < p->running; i++)
      (void)pthread_join(p->worker[i].thread, NULL);
  }
  esmm_mem_free(&ctx->allocator, p, bytes_of(ctx->threads));
}
