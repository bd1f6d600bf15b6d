/*
 * test_random.c: random calls of the public interface on a CPU, one after the other, in worlds of a few hundred: a
 * context with 1 to 84 threads and weights that go from call to call. What a call should give is computed in float64 by
 * code of tests/support that shares none with the library; products are most of the calls, and at least a tenth of all
 * are cut into blocks or shared out to threads.
 *
 *   test_random                                10,000 calls
 *   ESMM_TEST_CALLS=0 test_random              until something is wrong (make soak)
 *   ESMM_TEST_SEED=17 test_random              other ones
 *
 * A failure names the seed of its world: with it as ESMM_TEST_SEED that world comes first.
 */
#include "cpu/cpu.h"
#include "random_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LIVES = 400 }; /* calls of a world */

static world w;

static void *take(void *user, size_t bytes, size_t align)
{
  (void)user;
  void *memory = NULL;
  if (w.fail_in > 0 && --w.fail_in == 0) {
    w.failed = true;
    return NULL;
  }
  if (posix_memalign(&memory, align, bytes) != 0)
    return NULL;
  memset(memory, 0xcd, bytes < 4096 ? bytes : 4096); /* what is there counts for nothing */
  return memory;
}

static void give(void *user, void *memory, size_t bytes)
{
  (void)user;
  (void)bytes;
  free(memory);
}

/* Half of the contexts share the smallest product out to all their threads; most of their threads sleep. */
static void open_world(uint64_t seed)
{
  static const int threads[] = {1, 1, 2, 2, 3, 4, 7, 16, 84};
  w.rng.state = seed;
  w.threads = threads[below(&w, 9)];
  w.remembers = chance(&w, 0.8);
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = "cpu",
                              .threads = w.threads,
                              .allocator = &w.allocator,
                              .no_tuning_cache = 1,
                              .remember = w.remembers ? 1 : -1,
                              .deterministic = -1};
  if (esmm_ctx_create(&w.ctx, &opts) != ESMM_OK)
    fail_msg("no context with %d threads", w.threads);
  if (chance(&w, 0.5)) {
    w.ctx->thread_work = 1e-12;
    w.ctx->wake_seconds = 1e12;
  }
}

static void close_world(void)
{
  for (int i = 0; i < HELD; i++)
    drop_weights(&w.held[i]);
  esmm_ctx_free(w.ctx);
}

static void make_call(uint64_t seed)
{
  static const struct {
    double share;
    void (*call)(world *);
  } others[] = {{0.08, call_prune},    {0.02, call_format_check}, {0.04, call_copy},  {0.03, call_pattern},
                {0.03, call_generate}, {0.005, call_layer},       {0.04, call_wrong}, {0.015, call_context}};
  double at = th_unit(&w.rng);
  snprintf(w.now, sizeof w.now, "seed %llu, call %lld, %d threads: ", (unsigned long long)seed,
           (long long)(w.calls % LIVES), w.threads);
  w.calls++;
  for (size_t i = 0; i < sizeof others / sizeof *others; i++, at -= others[i - 1].share)
    if (at < others[i].share) {
      others[i].call(&w);
      return;
    }
  call_product(&w);
}

static void random_calls(void **state)
{
  (void)state;
  const int64_t most = th_env_int("ESMM_TEST_CALLS", 10000), first = th_env_int("ESMM_TEST_SEED", 1);
  char dir[] = "/tmp/esmm-random-XXXXXX", file[600];
  assert_non_null(mkdtemp(dir));
  w.dir = dir;
  w.allocator = (esmm_allocator){.alloc = take, .free = give};
  for (int i = 0; i < ARENAS; i++) {
    th_arena_create(&w.arena[i], (size_t)MOST_ELEMENTS * sizeof(float));
    w.values[i] = malloc((size_t)MOST_ELEMENTS * sizeof *w.values[i]);
    assert_non_null(w.values[i]);
  }
  const time_t began = time(NULL);
  for (uint64_t seed = (uint64_t)first; most == 0 || w.calls < most; seed++) {
    open_world(seed);
    for (int i = 0; i < LIVES && (most == 0 || w.calls < most); i++)
      make_call(seed);
    close_world();
    if (most == 0 && isatty(STDERR_FILENO))
      fprintf(stderr, "\r%lld calls, %lld s ", (long long)w.calls, (long long)(time(NULL) - began));
  }
  print_message("# %lld calls, %lld products, %lld of them across a cut, %lld s\n", (long long)w.calls,
                (long long)w.products, (long long)w.across, (long long)(time(NULL) - began));
  if (w.across * 10 < w.calls)
    fail_msg("%lld of %lld calls are products across a cut: fewer than a tenth", (long long)w.across,
             (long long)w.calls);
  for (int i = 0; i < ARENAS; i++) {
    th_arena_free(&w.arena[i]);
    free(w.values[i]);
  }
  snprintf(file, sizeof file, "%s/random.esmm", dir);
  unlink(file);
  assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls)};
  th_clean_environment();
  th_on_crash(w.now);
  return cmocka_run_group_tests_name("random", tests, NULL, NULL);
}
