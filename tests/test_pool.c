/*
 * test_pool.c: a context's threads (threads.h): every item is done once, by whoever is there; threads that are idle,
 * refused by the system or left behind by a fork.
 */
#include "harness.h"
#include "threads.h"

#include <dirent.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define RACES_WATCHED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define RACES_WATCHED 1
#endif
#endif
#if defined(RACES_WATCHED) || defined(__SANITIZE_ADDRESS__)
#define LIMITLESS 1 /* sanitizers need more address space than a limit would leave */
#endif

enum { MOST_ITEMS = 1000, MOST_THREADS = 16, PATIENCE = 20 /* seconds, for what takes none */ };

static void nap(double seconds)
{
  const struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
  (void)nanosleep(&t, NULL);
}

/* ---- loops ---- */

typedef struct loop {
  int threads;
  int64_t items;
  _Atomic int done[MOST_ITEMS];
  _Atomic int busy[MOST_THREADS];
  _Atomic int wrong; /* pieces that no loop should have */
} loop;

static void do_piece(void *arg, int64_t first, int64_t end, int worker)
{
  loop *l = arg;
  if (worker < 0 || worker >= l->threads || first >= end || end > l->items || l->busy[worker]++ != 0) {
    l->wrong++;
    return;
  }
  for (int64_t i = first; i < end; i++)
    l->done[i]++;
  l->busy[worker]--;
}

static bool loop_is_right(const esmm_ctx *ctx, int threads, int64_t items, int64_t at_once)
{
  loop l = {.threads = threads, .items = items};
  esmm_for(ctx, threads, items, at_once, do_piece, &l);
  bool right = l.wrong == 0;
  for (int64_t i = 0; i < items; i++)
    right = right && l.done[i] == 1;
  return right;
}

static void check_loop(const esmm_ctx *ctx, int threads, int64_t items, int64_t at_once)
{
  if (!loop_is_right(ctx, threads, items, at_once))
    fail_msg("%d threads, %lld items by %lld: not every item was done once, by a worker of its own", threads,
             (long long)items, (long long)at_once);
}

static void every_item_once(void **state)
{
  (void)state;
  static const int64_t items[] = {0, 1, 2, 3, 7, 16, 17, 63, 64, 65, 200, MOST_ITEMS}, at_once[] = {1, 2, 3, 64, 5000};
  static const int threads[] = {1, 2, 3, 4, 7, MOST_THREADS};
  esmm_ctx *ctx = th_ctx(MOST_THREADS);
  for (size_t t = 0; t < sizeof threads / sizeof *threads; t++)
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
      for (size_t a = 0; a < sizeof at_once / sizeof *at_once; a++)
        check_loop(ctx, threads[t], items[i], at_once[a]);
  for (int round = 0; round < 2000; round++) /* and in quick succession: a thread may be late for any of them */
    check_loop(ctx, 2 + round % 7, 1 + round % 19, 1);
  esmm_ctx_free(ctx);
}

/* ---- whether others take part ---- */

typedef struct meeting {
  double until;
  _Atomic int others, finished;
  bool slow;             /* others take their time */
  _Atomic int unblocked; /* signals that they would take */
} meeting;

/* Returns when some other worker has come. */
static void meet(void *arg, int64_t first, int64_t end, int worker)
{
  meeting *m = arg;
  (void)first;
  (void)end;
  if (worker > 0) {
    sigset_t blocked;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    m->unblocked += !sigismember(&blocked, SIGTERM) + !sigismember(&blocked, SIGALRM) + !sigismember(&blocked, SIGUSR1);
    m->others++;
    if (m->slow)
      nap(0.05);
    m->finished++;
  }
  while (m->others == 0 && esmm_now() < m->until)
    nap(1e-4);
}

static bool others_come(const esmm_ctx *ctx, int threads)
{
  meeting m = {.until = esmm_now() + PATIENCE};
  esmm_for(ctx, threads, 4, 1, meet, &m);
  return m.others > 0;
}

static void others_take_part(void **state)
{
  (void)state;
  static const double pauses[] = {0, 5e-6, 2e-5, 1e-4, 1e-3, 2e-2};
  esmm_ctx *ctx = th_ctx(3);
  for (int round = 0; round < 5; round++)
    for (size_t i = 0; i < sizeof pauses / sizeof *pauses; i++) {
      nap(pauses[i]);
      if (!others_come(ctx, 2 + round % 2))
        fail_msg("after %g s of nothing to do no other thread came in %d s", pauses[i], PATIENCE);
    }
  esmm_ctx_free(ctx);
}

static void those_inside_are_waited_for(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(3);
  for (int round = 0; round < 10; round++) {
    meeting m = {.until = esmm_now() + PATIENCE, .slow = true};
    esmm_for(ctx, 3, 3, 1, meet, &m);
    assert_int_equal(m.others, m.finished);
    assert_int_equal(m.unblocked, 0);
    assert_true(m.others > 0);
  }
  sigset_t blocked;
  assert_int_equal(pthread_sigmask(SIG_SETMASK, NULL, &blocked), 0);
  assert_int_equal(sigismember(&blocked, SIGUSR1), 0); /* the caller's are as they were */
  esmm_ctx_free(ctx);
}

static double cpu_seconds(void)
{
  struct timespec t;
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void idle_threads_take_no_time(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(4);
  assert_true(others_come(ctx, 4));
  nap(0.05);
  const double before = cpu_seconds();
  nap(0.5);
  const double used = cpu_seconds() - before;
  if (used > 0.1)
    fail_msg("%g s of CPU time while there was nothing to do for 0.5 s", used);
  esmm_ctx_free(ctx);
}

static int threads_now(void)
{
  DIR *tasks = opendir("/proc/self/task");
  int count = 0;
  assert_non_null(tasks);
  for (const struct dirent *entry; (entry = readdir(tasks));)
    count += entry->d_name[0] != '.';
  closedir(tasks);
  return count;
}

/* The system may need a moment to forget one that has ended. */
static bool threads_become(int count)
{
  for (int i = 0; i < 1000 * PATIENCE && threads_now() != count; i++)
    nap(1e-3);
  return threads_now() == count;
}

static void note_worker(void *arg, int64_t first, int64_t end, int worker)
{
  (void)first;
  (void)end;
  if (worker > 0)
    atomic_store((_Atomic bool *)arg, true);
  nap(1e-4);
}

/* A loop that is worth waking nobody is the caller's alone where all sleep, and they come to the next one. */
static void sleepers_are_left_alone(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(4);
  assert_true(others_come(ctx, 4));
  int alone = 0;
  for (int i = 0; i < 5; i++) {
    _Atomic bool others = false;
    nap(0.02); /* all fall asleep, if the machine lets them run, and the next loop does not come soon */
    ctx->wakes = 0;
    esmm_for(ctx, 4, 40, 1, note_worker, &others);
    ctx->wakes = INT_MAX;
    alone += !others;
  }
  assert_true(alone > 0); /* 4 ms a loop: who is woken comes */
  assert_true(others_come(ctx, 4));
  esmm_ctx_free(ctx);
}

/* How many of this process's threads may not run on all of its CPUs. */
static int threads_kept_from_cpus(void)
{
  cpu_set_t own, its;
  int count = 0;
  DIR *tasks = opendir("/proc/self/task");
  assert_non_null(tasks);
  assert_int_equal(sched_getaffinity(0, sizeof own, &own), 0);
  for (const struct dirent *task; (task = readdir(tasks));)
    if (task->d_name[0] != '.' && sched_getaffinity(atoi(task->d_name), sizeof its, &its) == 0)
      count += !CPU_EQUAL(&own, &its);
  (void)closedir(tasks);
  return count;
}

/* Waking a thread keeps it from a CPU for a moment; it is not to stay so, late or not. */
static void threads_may_run_anywhere(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(4);
  for (int i = 0; i < 20; i++) {
    check_loop(ctx, 4, 100, 1);
    nap(i % 2 ? 3e-3 : 0.0); /* asleep, or not */
  }
  for (int i = 0; threads_kept_from_cpus() && i < 100 * PATIENCE; i++)
    nap(0.01);
  assert_int_equal(threads_kept_from_cpus(), 0);
  esmm_ctx_free(ctx);
}

static void threads_end_with_their_context(void **state)
{
  (void)state;
  const int before = threads_now();
  for (int round = 0; round < 100; round++) {
    esmm_ctx *ctx = th_ctx(4);
    assert_true(threads_become(before)); /* none yet: nothing has needed one */
    check_loop(ctx, 1 + round % 4, MOST_ITEMS, 1);
    if (round % 10 == 0)
      nap(1e-3); /* asleep, or not yet */
    esmm_ctx_free(ctx);
  }
  assert_true(threads_become(before));
}

/* ---- children ---- */

#if !defined(RACES_WATCHED) /* ThreadSanitizer has no threads after a fork */

typedef struct product {
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, c;
} product;

/* Integers: exact, whoever adds them. */
static product make_product(int threads)
{
  const int64_t m = 96, k = 300, n = 200;
  product p = {.ctx = th_ctx(threads), .a = th_matrix_alloc(m, k, ESMM_F32), .c = th_matrix_alloc(m, n, ESMM_F32)};
  esmm_matrix b = th_matrix_alloc(k, n, ESMM_F32);
  th_fill(&p.a, 1, 0.5, true);
  th_fill(&b, 2, 0.5, true);
  assert_int_equal(esmm_prepare(p.ctx, &b, NULL, &p.w), ESMM_OK);
  assert_int_equal(esmm_matmul(p.ctx, &p.a, p.w, &p.c, NULL, NULL), ESMM_OK);
  free(b.data);
  return p;
}

static void free_product(product *p)
{
  esmm_weights_free(p->w);
  esmm_ctx_free(p->ctx);
  free(p->a.data);
  free(p->c.data);
}

static bool multiplies(const product *p)
{
  const size_t bytes = (size_t)(p->c.rows * p->c.cols) * sizeof(float);
  esmm_matrix c = {.data = calloc(bytes, 1), .rows = p->c.rows, .cols = p->c.cols};
  const bool same =
      c.data && esmm_matmul(p->ctx, &p->a, p->w, &c, NULL, NULL) == ESMM_OK && memcmp(c.data, p->c.data, bytes) == 0;
  free(c.data);
  return same;
}

/* What body says in a child, which has PATIENCE seconds: 0 where all is well; 100 and more: the signal that ended it.
 */
static int in_a_child(int (*body)(product *p), product *p)
{
  const pid_t child = fork();
  if (child == 0) {
    (void)alarm(PATIENCE);
    _exit(body(p));
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child)
    return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static int use_and_free(product *p)
{
  const int failed = !multiplies(p) ? 1 : !others_come(p->ctx, 3) ? 2 : 0;
  free_product(p);
  return failed;
}

static int only_free(product *p)
{
  esmm_ctx_free(p->ctx);
  return 0;
}

static int fork_again(product *p)
{
  return in_a_child(use_and_free, p) == 0 && multiplies(p) ? use_and_free(p) : 3;
}

static void children_multiply(void **state)
{
  (void)state;
  product p = make_product(3);
  for (int round = 0; round < 20; round++) {
    assert_int_equal(in_a_child(use_and_free, &p), 0);
    assert_int_equal(in_a_child(only_free, &p), 0);
    if (round % 4 == 0)
      nap(1e-3); /* workers asleep */
    assert_true(multiplies(&p));
  }
  assert_int_equal(in_a_child(fork_again, &p), 0);
  assert_int_equal(use_and_free(&p), 0);
}

#if !defined(LIMITLESS)

static size_t address_space(void)
{
  size_t pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%zu", &pages) != 1)
    pages = 0;
  if (file)
    (void)fclose(file);
  return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* Memory that malloc has already, but no room for another thread's stack: C libraries keep those of threads that ended,
   so that no thread may have been started before. */
static int without_threads(product *p)
{
  struct rlimit limit;
  (void)mallopt(M_MMAP_THRESHOLD, 32 << 20);
  (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
  void *volatile room = malloc((size_t)31 << 20); /* volatile: or the compiler leaves both calls out */
  free(room);
  if (getrlimit(RLIMIT_AS, &limit) != 0)
    return 3;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = address_space() + (64 << 10);
  if (setrlimit(RLIMIT_AS, &limit) != 0)
    return 4;
  product mine = make_product(3);
  meeting m = {.until = esmm_now() + 0.05};
  esmm_for(mine.ctx, 3, 4, 1, meet, &m);
  if (m.others != 0)
    return 5; /* the limit did not hold: nothing was shown */
  if (memcmp(mine.c.data, p->c.data, (size_t)(p->c.rows * p->c.cols) * sizeof(float)) != 0 || !multiplies(&mine))
    return 6;
  limit.rlim_cur = before;
  if (setrlimit(RLIMIT_AS, &limit) != 0)
    return 7;
  nap(1.1); /* then the system is asked again */
  return use_and_free(&mine);
}

static void refused_threads(void **state)
{
  (void)state;
  product p = make_product(1);
  assert_int_equal(in_a_child(without_threads, &p), 0);
  free_product(&p);
}

#endif
#endif

/* ---- two callers ---- */

static void *loops_of_one_caller(void *arg)
{
  const esmm_ctx *ctx = arg;
  bool right = true;
  for (int round = 0; round < 300 && right; round++)
    right = loop_is_right(ctx, 1 + round % 3, 1 + round, 1);
  return right ? arg : NULL;
}

static void two_pools_at_once(void **state)
{
  (void)state;
  esmm_ctx *ctx[2] = {th_ctx(3), th_ctx(3)};
  pthread_t other;
  assert_int_equal(pthread_create(&other, NULL, loops_of_one_caller, ctx[1]), 0);
  assert_non_null(loops_of_one_caller(ctx[0]));
  void *result = NULL;
  assert_int_equal(pthread_join(other, &result), 0);
  assert_non_null(result);
  esmm_ctx_free(ctx[0]);
  esmm_ctx_free(ctx[1]);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
#if !defined(LIMITLESS)
    cmocka_unit_test(refused_threads), /* first: no thread has been started yet */
#endif
    cmocka_unit_test(every_item_once),
    cmocka_unit_test(others_take_part),
    cmocka_unit_test(those_inside_are_waited_for),
    cmocka_unit_test(idle_threads_take_no_time),
    cmocka_unit_test(sleepers_are_left_alone),
    cmocka_unit_test(threads_may_run_anywhere),
    cmocka_unit_test(threads_end_with_their_context),
#if !defined(RACES_WATCHED)
    cmocka_unit_test(children_multiply),
#endif
    cmocka_unit_test(two_pools_at_once),
  };
  return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
