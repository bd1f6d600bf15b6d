/*
 * test_choose.c: the choice learns what a machine is like that the cost model does not know. A clock of its own makes
 * machines: what a kernel takes there is its prediction times a factor of 0.5 to 2, the same for all calls of it, and a
 * little noise, and now and then ten times as long. Then what is kept of it in a file, and who may read and write that.
 */
#include "choose/choose.h"
#include "choose/saved.h"
#include "esmm_tools.h"
#include "harness.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MACHINES = 60, CALLS = 32, SHAPES = 36, LATER = 200 };

static uint64_t random_state = 1;

static double uniform(void)
{
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (double)(random_state >> 11) / (double)((uint64_t)1 << 53);
}

static esmm_ctx *make_ctx(int deterministic, int no_cache)
{
  char error[256] = "";
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = "cpu",
                              .threads = 1, /* so that the process may be forked under ThreadSanitizer */
                              .no_tuning_cache = no_cache,
                              .deterministic = deterministic,
                              .error = error,
                              .error_size = sizeof error};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    fail_msg("%s", error);
  return ctx;
}

/* ---- machines ---- */

typedef struct shape {
  int64_t m, k, n;
  double density_a, density_b;
  esmm_dtype dtype;
} shape;

static esmm_ctx *learner; /* whose times these are */

typedef struct product {
  esmm_weights *w;
  esmm_problem p;
  esmm_shortlist list;
} product;

/* Products of which every kernel would take a microsecond at least: A is never read. */
static void make_products(esmm_ctx *ctx, product *all)
{
  static const int64_t ms[] = {8, 64, 512}, ks[] = {512, 2048}, ns[] = {256, 1024};
  for (int i = 0; i < SHAPES; i++) {
    product *x = &all[i];
    const int64_t m = ms[i % 3], k = ks[i / 3 % 2], n = ns[i / 6 % 2];
    esmm_matrix b = th_matrix_alloc(k, n, i % 5 == 0 ? ESMM_BF16 : ESMM_F32);
    th_fill(&b, (uint64_t)i + 1, i % 4 == 0 ? 0.5 : 1.0, false);
    assert_int_equal(esmm_prepare(ctx, &b, NULL, &x->w), ESMM_OK);
    free(b.data);
    static float nothing[1];
    x->p = (esmm_problem){.ctx = ctx,
                          .m = m,
                          .n = n,
                          .k = k,
                          .a = {.data = nothing, .rows = m, .cols = k, .ld = k, .dtype = b.dtype},
                          .c = {.data = nothing, .rows = m, .cols = n, .ld = n, .dtype = b.dtype},
                          .w = x->w,
                          .alpha = 1.0f,
                          .threads = 1};
    esmm_sample_fill(&x->p.sample, i < SHAPES / 2 ? 1.0 : 0.05 + 0.9 * uniform());
    esmm_plan_shortlist(&x->p, NULL, &x->list);
    assert_true(x->list.count > 1);
  }
}

typedef struct outcome {
  double first, later; /* what calls 1 to CALLS took over as many of the best kernel; and those behind them; */
  double worst;        /* what is chosen then */
} outcome;

typedef struct coldness {
  double times, seconds;
} coldness;

static double predicted(const product *x, int i)
{
  int64_t variant;
  return esmm_plan_seconds(&x->p, x->list.index[i], NULL, &variant);
}

/* factor: of each kernel of the list; cold: how much longer takes one that did not make the call before. */
static outcome learn(const product *x, const double *factor, int calls, coldness cold)
{
  esmm_history history = {0};
  esmm_plan plan;
  double best = INFINITY, total = 0.0, behind = 0.0, last = 0.0;
  int before = -1;
  for (int i = 0; i < x->list.count; i++)
    best = fmin(best, predicted(x, i) * factor[i]);
  for (int call = 0; call < calls; call++) {
    esmm_choose(&x->p, &x->list, true, &history, &plan);
    for (int i = 0; i < x->list.count; i++)
      if (x->list.index[i] == plan.index)
        last = plan.index == before || before < 0 ? predicted(x, i) * factor[i]
                                                  : predicted(x, i) * factor[i] * cold.times + cold.seconds;
    before = plan.index;
    total += call == 0 ? best : call < CALLS ? last : 0.0; /* nothing is known before the first */
    behind += call < CALLS ? 0.0 : last;
    if (plan.timed)
      esmm_choose_learn(learner, &plan, &history, last * (1.0 + 0.05 * uniform()) * (uniform() < 0.02 ? 10.0 : 1.0));
  }
  /* A call that is not a trial. */
  for (int more = 0; more < 4; more++) {
    esmm_choose(&x->p, &x->list, true, &history, &plan);
    for (int i = 0; i < x->list.count && !plan.tried; i++)
      if (x->list.index[i] == plan.index)
        last = predicted(x, i) * factor[i];
  }
  return (outcome){total / (CALLS * best), calls > CALLS ? behind / ((calls - CALLS) * best) : 1.0, last / best};
}

typedef struct tally {
  int runs, dear, wrong; /* machines and products, over 1.10 at first, not within 1.05 of the best after the calls */
  double mean, later;    /* of the first, and of the others */
} tally;

static tally learn_machines(const product *all, int machines, int calls, coldness cold)
{
  tally t = {0};
  double dearest = 0.0;
  for (int machine = 0; machine < machines; machine++)
    for (int i = 0; i < SHAPES; i++) {
      double factor[ESMM_MAX_KERNELS];
      for (int j = 0; j < all[i].list.count; j++)
        factor[j] = exp2(2.0 * uniform() - 1.0);
      esmm_measured_clear();
      const outcome x = learn(&all[i], factor, calls, cold);
      t.runs++;
      t.wrong += x.worst > 1.05;
      t.dear += x.first > 1.10;
      dearest = fmax(dearest, x.first);
      t.mean += x.first;
      t.later += x.later;
    }
  t.mean /= t.runs;
  t.later /= t.runs;
  print_message("# %d machines and products, %d calls, cold %.1f and %.0f us: %d not within 1.05 of the best, %d over "
                "1.10 at first, "
                "mean %.3f, most %.2f; later %.3f\n",
                t.runs, calls, cold.times, 1e6 * cold.seconds, t.wrong, t.dear, t.mean, dearest, t.later);
  return t;
}

static void every_machine_is_learnt_within_32_calls(void **state)
{
  (void)state;
  esmm_ctx *ctx = make_ctx(-1, 1);
  static product all[SHAPES];
  learner = ctx;
  make_products(ctx, all);
  const int machines = th_env_int("ESMM_TEST_CASES", 0) ? MACHINES / 6 : MACHINES;
  const tally first = learn_machines(all, machines, CALLS, (coldness){1.0, 0.0});
  assert_true(first.wrong <= 2 + first.runs / 100);
  assert_true(first.dear <= first.runs * 12 / 100 && first.mean <= 1.065);
  /* Whatever the first trials found is looked at again. */
  const tally later = learn_machines(all, machines / 3, 1000, (coldness){1.0, 0.0});
  assert_true(later.wrong <= 1 + later.runs / 200 && later.later <= 1.02);
  const tally cold = learn_machines(all, machines / 3, 1000, (coldness){1.4, 0.0});
  assert_true(cold.wrong <= 2 + cold.runs * 6 / 100);
  const tally colder = learn_machines(all, machines / 3, 1000, (coldness){1.2, 5e-5});
  assert_true(colder.wrong <= 2 + colder.runs * 2 / 100 && colder.later <= 1.04 && cold.later <= 1.03);
  for (int i = 0; i < SHAPES; i++)
    esmm_weights_free(all[i].w);
  esmm_measured_clear();
  esmm_ctx_free(ctx);
}

/* ---- real calls ---- */

enum { M = 64, K = 512, N = 256 };

typedef struct rig {
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
} rig;

static void start(rig *x, int deterministic, int no_cache)
{
  *x = (rig){.ctx = make_ctx(deterministic, no_cache),
             .a = th_matrix_alloc(M, K, ESMM_F32),
             .b = th_matrix_alloc(K, N, ESMM_F32),
             .c = th_matrix_alloc(M, N, ESMM_F32)};
  th_fill(&x->a, 1, 0.3, true);
  th_fill(&x->b, 2, 1.0, true);
  assert_int_equal(esmm_prepare(x->ctx, &x->b, NULL, &x->w), ESMM_OK);
}

static void stop(rig *x)
{
  esmm_weights_free(x->w);
  esmm_ctx_free(x->ctx);
  free(x->a.data);
  free(x->b.data);
  free(x->c.data);
}

static void multiply(rig *x, int calls)
{
  for (int i = 0; i < calls; i++)
    assert_int_equal(esmm_matmul(x->ctx, &x->a, x->w, &x->c, NULL, NULL), ESMM_OK);
}

/* How many kernels explain says were measured. */
static int measured(rig *x)
{
  esmm_verdict all[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS, found = 0;
  assert_int_equal(esmm_explain(x->ctx, &x->a, x->w, &x->c, NULL, all, sizeof all[0], &count), ESMM_OK);
  for (int i = 0; i < count; i++)
    found += strstr(all[i].text, "measured") != NULL;
  return found;
}

static void calls_are_measured_and_explained(void **state)
{
  (void)state;
  rig x;
  esmm_measured_clear();
  start(&x, -1, 1);
  assert_int_equal(measured(&x), 0);
  multiply(&x, 100);
  assert_true(measured(&x) >= 1);
  stop(&x);
  esmm_measured_clear();
}

static void a_deterministic_context_measures_nothing(void **state)
{
  (void)state;
  rig x;
  esmm_measured_clear();
  start(&x, 1, 1);
  multiply(&x, 100);
  assert_int_equal(measured(&x), 0);
  assert_int_equal(esmm_tune_save(x.ctx), ESMM_ERR_UNSUPPORTED);
  stop(&x);
  setenv("ESMM_DETERMINISTIC", "1", 1);
  start(&x, 0, 1);
  multiply(&x, 100);
  assert_int_equal(measured(&x), 0);
  stop(&x);
  setenv("ESMM_DETERMINISTIC", "perhaps", 1);
  esmm_ctx *ctx;
  char error[256];
  const esmm_ctx_opts opts = {.size = sizeof opts, .error = error, .error_size = sizeof error};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_ARGUMENT);
  assert_non_null(strstr(error, "ESMM_DETERMINISTIC is 'perhaps'"));
  unsetenv("ESMM_DETERMINISTIC");
}

enum { THREADS = 8, CALLS_EACH = 300 };

static const rig *shared; /* weights and A: each thread has a context and a C of its own */

static void *learn_beside_others(void *arg)
{
  (void)arg;
  esmm_ctx *ctx = make_ctx(-1, 1);
  const esmm_matrix c = th_matrix_alloc(M, N, ESMM_F32);
  for (int i = 0; i < CALLS_EACH; i++) {
    esmm_matrix a = shared->a, part = c;
    a.rows = part.rows = 1 + i % M;
    assert_int_equal(esmm_matmul(ctx, &a, shared->w, &part, NULL, NULL), ESMM_OK);
  }
  free(c.data);
  esmm_ctx_free(ctx);
  return NULL;
}

static void threads_learn_together(void **state)
{
  (void)state;
  pthread_t threads[THREADS];
  rig x;
  esmm_measured_clear();
  start(&x, -1, 1);
  shared = &x;
  for (int i = 0; i < THREADS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, learn_beside_others, NULL), 0);
  for (int i = 0; i < THREADS; i++)
    assert_int_equal(pthread_join(threads[i], NULL), 0);
  assert_true(measured(&x) >= 1);
  stop(&x);
  esmm_measured_clear();
}

/* ---- the file ---- */

static char directory[] = "/tmp/esmm-choose-XXXXXX", file[512];

static void find_file(const rig *x)
{
  const char *tuned = esmm_tune_path(x->ctx);
  (void)snprintf(file, sizeof file, "%.*s.measured", (int)(strlen(tuned) - strlen(".tune")), tuned);
}

static void write_text(const char *text)
{
  FILE *f = fopen(file, "w");
  assert_non_null(f);
  assert_true(fputs(text, f) >= 0);
  assert_int_equal(fclose(f), 0);
}

/* In a process of its own, which has read nothing yet: how many kernels it knows of at once. */
static int known_to_another(void)
{
  int status;
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    esmm_measured_clear();
    esmm_saved_forget();
    rig x;
    start(&x, -1, 0);
    _exit(measured(&x));
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

static void what_was_measured_serves_the_next_process(void **state)
{
  (void)state;
  assert_non_null(mkdtemp(directory));
  setenv("XDG_CACHE_HOME", directory, 1);
  rig x;
  struct stat about;
  esmm_measured_clear();
  start(&x, -1, 0);
  find_file(&x);
  multiply(&x, 100);
  assert_int_equal(stat(file, &about), -1); /* never inside a product */
  assert_int_equal(known_to_another(), 0);
  const int here = measured(&x);
  assert_int_equal(esmm_tune_save(x.ctx), ESMM_OK);
  assert_int_equal(known_to_another(), here);
  /* A child of a fork does not write, not even when it frees the context. */
  assert_int_equal(unlink(file), 0);
  multiply(&x, 2000);
  const pid_t child = fork();
  if (child == 0) {
    esmm_ctx_free(x.ctx);
    _exit(0);
  }
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(stat(file, &about), -1);
  stop(&x);
  assert_int_equal(stat(file, &about), 0); /* freeing the context does */
  assert_true(about.st_size <= 1 << 20);
}

/* Another process that holds the directory's lock, stopped perhaps, is not waited for. */
static void a_lock_that_is_held_is_not_waited_for(void **state)
{
  (void)state;
  rig x;
  esmm_measured_clear();
  start(&x, -1, 0);
  find_file(&x);
  (void)unlink(file);
  multiply(&x, 2000);
  char name[512];
  (void)snprintf(name, sizeof name, "%.*s", (int)(strrchr(file, '/') - file), file);
  const int held = open(name, O_RDONLY | O_DIRECTORY);
  assert_true(held >= 0);
  assert_int_equal(flock(held, LOCK_EX), 0);
  const double start_of_it = esmm_now();
  assert_int_equal(esmm_tune_save(x.ctx), ESMM_ERR_IO);
  stop(&x);
  assert_true(esmm_now() - start_of_it < 5.0);
  assert_int_equal(close(held), 0);
}

/* The next best is looked at again after 8192 calls, whatever call that is asked at. */
static void what_stands_is_checked_again(void **state)
{
  (void)state;
  esmm_ctx *ctx = make_ctx(-1, 1);
  static product all[SHAPES];
  learner = ctx;
  make_products(ctx, all);
  for (int offset = 0; offset < 16; offset += 5) {
    const product *x = &all[0];
    esmm_history history = {0};
    esmm_plan plan;
    int tried = 0, first = -1;
    double best = 0.0;
    esmm_measured_clear();
    for (int call = 0; call < 40000; call++) {
      esmm_choose(&x->p, &x->list, true, &history, &plan);
      best = first < 0 ? plan.predicted : best;
      first = first < 0 ? plan.index : first;
      tried += call > 1000 && plan.tried;
      if (plan.timed) /* all others are a tenth slower */
        esmm_choose_learn(learner, &plan, &history, plan.index == first ? best : 1.1 * best);
      if (call > 64 + offset)
        call += esmm_choose_stands(&x->p, &plan, &history);
    }
    assert_true(tried > 0);
  }
  for (int i = 0; i < SHAPES; i++)
    esmm_weights_free(all[i].w);
  esmm_measured_clear();
  esmm_ctx_free(ctx);
}

static void a_file_that_cannot_be_believed_is_as_good_as_none(void **state)
{
  (void)state;
  char head[64], text[512];
  (void)snprintf(head, sizeof head, "esmm-measured 1 %s\n", esmm_source_id());
  static const char *const bodies[] = {"",
                                       "0123456789abcdef",
                                       "0123456789abcdef\n",
                                       "0000000000000000 dense_f32_avx2 3 1000000\n",
                                       "0123456789abcdef dense_f32_avx2 0 1000000\n",
                                       "0123456789abcdef dense_f32_avx2 3 -1\n",
                                       "0123456789abcdef dense_f32_avx2 3 999999999999999999999\n",
                                       "0123456789abcdef dense_f32_avx2 3\n",
                                       "0123456789abcdef nothing_f32 3 1000000\n",
                                       "fedcba9876543210 %s%n 3 1000000\n"};
  for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
    (void)snprintf(text, sizeof text, "%s%s", head, bodies[i]);
    write_text(text);
    assert_int_equal(known_to_another(), 0);
  }
  write_text("esmm-measured 1 0000000000000000\n");
  assert_int_equal(known_to_another(), 0);
  assert_int_equal(unlink(file), 0);
  assert_int_equal(mkfifo(file, 0600), 0); /* must not hold anyone up */
  assert_int_equal(known_to_another(), 0);
  assert_int_equal(unlink(file), 0);
  setenv("XDG_CACHE_HOME", "/dev/null", 1);
  rig x;
  esmm_measured_clear();
  start(&x, -1, 0);
  multiply(&x, 2000);
  assert_int_equal(esmm_tune_save(x.ctx), ESMM_ERR_IO);
  assert_non_null(strstr(esmm_ctx_error(x.ctx), "/dev/null/esmm"));
  stop(&x); /* without a word */
  setenv("XDG_CACHE_HOME", directory, 1);
  (void)snprintf(text, sizeof text, "rm -rf %s", directory);
  assert_int_equal(system(text), 0);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_machine_is_learnt_within_32_calls),
      cmocka_unit_test(calls_are_measured_and_explained),
      cmocka_unit_test(a_deterministic_context_measures_nothing),
      cmocka_unit_test(what_was_measured_serves_the_next_process),
      cmocka_unit_test(a_lock_that_is_held_is_not_waited_for),
      cmocka_unit_test(a_file_that_cannot_be_believed_is_as_good_as_none),
      cmocka_unit_test(what_stands_is_checked_again),
      cmocka_unit_test(threads_learn_together), /* last: no fork after it */
  };
  return cmocka_run_group_tests_name("choose", tests, NULL, NULL);
}
