/*
 * test_threads.c: two caller threads, each with a context of its own, share one esmm_weights and one esmm_pattern.
 *
 * Run under ThreadSanitizer this says whether sharing is safe; everywhere it says that results are those of one thread
 * alone. A barrier starts the callers together, so that they overlap.
 */
#include "harness.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 2, ROUNDS = 3 };

typedef struct shared {
  esmm_matrix a;
  esmm_weights *w;
  esmm_pattern *pattern;
  const char *force;
  pthread_barrier_t start;
} shared;

typedef struct caller {
  shared *common;
  int threads;
  esmm_matrix c;
  esmm_status status;
  char kernel[32];
  char error[256];
  pthread_t id;
} caller;

/* cmocka's assertions belong to the main thread: here failures are only noted. */
static void *call(void *arg)
{
  caller *me = arg;
  shared *s = me->common;
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts opts = {.size = sizeof opts, .device = th_device(), .threads = me->threads, .no_tuning_cache = 1};
  me->status = esmm_ctx_create(&ctx, &opts);
  pthread_barrier_wait(&s->start);
  for (int round = 0; round < ROUNDS && me->status == ESMM_OK; round++) {
    esmm_stats stats = {.size = sizeof stats};
    esmm_matmul_opts product = {.size = sizeof product, .force = s->force, .a_pattern = round == 1 ? s->pattern : NULL};
    memset(me->c.data, 0xff, (size_t)(me->c.rows * me->c.cols) * sizeof(float));
    me->status = esmm_matmul(ctx, &s->a, s->w, &me->c, &product, &stats);
    memcpy(me->kernel, stats.kernel, sizeof me->kernel);
    esmm_weights_info info = {.size = sizeof info};
    if (me->status == ESMM_OK)
      me->status = esmm_weights_get_info(s->w, &info);
  }
  strncpy(me->error, esmm_ctx_error(ctx), sizeof me->error - 1);
  esmm_ctx_free(ctx);
  return NULL;
}

/* Integers: exact, so that results of one and of two threads are the same bits too. */
static int64_t share(int64_t m, int64_t n, esmm_dtype dtype, const char *force, int threads)
{
  const int64_t k = 260;
  esmm_ctx *ctx = th_ctx(1);
  shared s = {.a = th_matrix_alloc(m, k, dtype), .force = force};
  esmm_matrix b = th_matrix_alloc(k, n, dtype), alone = th_matrix_alloc(m, n, ESMM_F32);
  th_fill(&s.a, 21, 0.3, true);
  th_fill(&b, 22, 0.6, true);
  for (int64_t i = 0; i < k; i += 3) /* whole rows of zeros: something to skip in B as well */
    for (int64_t j = 0; j < n; j++)
      th_set(&b, i, j, 0);
  esmm_prepare_opts prepared = th_prepare_opts_for(ctx, force);
  prepared.strict = force && strncmp(force, "onednn", strlen("onednn")) == 0; /* B is kept for it where no k is dead */
  assert_int_equal(esmm_prepare(ctx, &b, &prepared, &s.w), ESMM_OK);
  assert_int_equal(esmm_pattern_extract(ctx, &s.a, 1, &s.pattern), ESMM_OK);
  esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  esmm_status status = esmm_matmul(ctx, &s.a, s.w, &alone, &opts, NULL);
  int64_t ran = 0;
  if (status == ESMM_OK) {
    caller callers[CALLERS];
    assert_int_equal(pthread_barrier_init(&s.start, NULL, CALLERS), 0);
    for (int i = 0; i < CALLERS; i++) {
      callers[i] = (caller){.common = &s, .threads = threads, .c = th_matrix_alloc(m, n, ESMM_F32)};
      assert_int_equal(pthread_create(&callers[i].id, NULL, call, &callers[i]), 0);
    }
    for (int i = 0; i < CALLERS; i++)
      assert_int_equal(pthread_join(callers[i].id, NULL), 0);
    for (int i = 0; i < CALLERS; i++) {
      if (callers[i].status != ESMM_OK)
        fail_msg("%s, %s, caller %d: %s", force ? force : "auto", esmm_dtype_str(dtype), i, callers[i].error);
      if (memcmp(alone.data, callers[i].c.data, (size_t)(m * n) * sizeof(float)) != 0)
        fail_msg("%s, %s, m=%lld, %d threads: caller %d got another result than one thread alone", callers[i].kernel,
                 esmm_dtype_str(dtype), (long long)m, threads, i);
      free(callers[i].c.data);
      ran++;
    }
    pthread_barrier_destroy(&s.start);
  } else if (status != ESMM_ERR_UNSUPPORTED) {
    fail_msg("%s, %s: %s", force ? force : "auto", esmm_dtype_str(dtype), esmm_ctx_error(ctx));
  }
  esmm_pattern_free(s.pattern);
  esmm_weights_free(s.w);
  esmm_ctx_free(ctx);
  free(s.a.data);
  free(b.data);
  free(alone.data);
  return ran;
}

static void share_with_every_kernel(int threads)
{
  static const struct {
    int64_t m, n;
  } shapes[] = {{3, 100}, {70, 100}, {500, 9}};
  esmm_ctx *ctx = th_ctx(1);
  for (int i = 0; i <= esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info, .name = NULL};
    if (i < esmm_kernel_count())
      assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    int64_t ran = 0;
    if (info.name && (!info.available || (th_on_gpu() && !(info.formats & 1u << ESMM_FORMAT_DENSE))))
      continue;
    /* A kernel with the first dtype of operands that it takes; the plan with each. */
    for (int dtype = ESMM_F32; dtype <= ESMM_F16 && (ran == 0 || !info.name); dtype++)
      for (size_t h = 0; h < sizeof shapes / sizeof *shapes; h++)
        ran += share(shapes[h].m, shapes[h].n, (esmm_dtype)dtype, info.name, threads);
    if (ran == 0)
      fail_msg("%s ran nowhere", info.name ? info.name : "auto");
  }
  esmm_ctx_free(ctx);
}

static void two_contexts_of_one_thread(void **state)
{
  (void)state;
  share_with_every_kernel(1);
}

static void two_contexts_of_two_threads(void **state)
{
  (void)state;
  share_with_every_kernel(2);
}

/* First calls may set things up (CPU detection, the registry): two contexts made at once must not disturb each other.
 */
static void *make_and_free(void *arg)
{
  pthread_barrier_t *start = arg;
  pthread_barrier_wait(start);
  esmm_ctx *ctx = NULL;
  esmm_status status = esmm_ctx_create(&ctx, NULL);
  esmm_ctx_free(ctx);
  return status == ESMM_OK ? arg : NULL;
}

static void contexts_made_at_once(void **state)
{
  (void)state;
  pthread_barrier_t start;
  pthread_t id[CALLERS];
  assert_int_equal(pthread_barrier_init(&start, NULL, CALLERS), 0);
  for (int i = 0; i < CALLERS; i++)
    assert_int_equal(pthread_create(&id[i], NULL, make_and_free, &start), 0);
  for (int i = 0; i < CALLERS; i++) {
    void *result = NULL;
    assert_int_equal(pthread_join(id[i], &result), 0);
    assert_non_null(result);
  }
  pthread_barrier_destroy(&start);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(contexts_made_at_once), /* first: nothing has been set up yet */
      cmocka_unit_test(two_contexts_of_one_thread),
      cmocka_unit_test(two_contexts_of_two_threads),
  };
  return cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
