/*
 * test_tune.c: the plan's measured constants: where their file lies, that it is used, and that a bad one is not.
 *
 * The file's format is the library's own business; the tests write it by hand to be able to damage it.
 */
#include "harness.h"

#include "choose/recall.h"
#include "choose/tune.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[64];

static int set_up(void **state)
{
  (void)state;
  th_clean_environment();
  snprintf(directory, sizeof directory, "/tmp/esmm_tune_XXXXXX");
  assert_non_null(mkdtemp(directory));
  setenv("XDG_CACHE_HOME", directory, 1);
  return 0;
}

static esmm_ctx *context(void)
{
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts opts = {.size = sizeof opts, .threads = 1};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  return ctx;
}

static int tear_down(void **state)
{
  (void)state;
  setenv("XDG_CACHE_HOME", directory, 1);
  esmm_ctx *ctx = context();
  char inner[128];
  snprintf(inner, sizeof inner, "%s/esmm", directory);
  unlink(esmm_tune_path(ctx));
  esmm_ctx_free(ctx);
  rmdir(inner);
  return rmdir(directory);
}

/* A good file, in which every kernel costs dear but those whose name starts with cheap. */
static size_t make_file(char *out, size_t room, const char *cheap)
{
  size_t used = (size_t)snprintf(out, room, "esmm-tune 2 %s\nload 38\n", esmm_source_id());
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (!esmm_kernel_competes(NULL, kernel))
      continue;
    used += (size_t)snprintf(out + used, room - used, "%s", kernel->name);
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      used += (size_t)snprintf(out + used, room - used, " %s", /* attoseconds */
                               strncmp(kernel->name, cheap, strlen(cheap)) ? "1000000000000" : "1000000");
    used += (size_t)snprintf(out + used, room - used, "\n");
  }
  assert_true(used < room);
  return used;
}

static void write_file(const char *text, size_t bytes)
{
  char inner[128];
  snprintf(inner, sizeof inner, "%s/esmm", directory);
  mkdir(inner, 0700);
  esmm_ctx *ctx = context();
  FILE *file = fopen(esmm_tune_path(ctx), "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(text, 1, bytes, file), bytes);
  fclose(file);
  esmm_ctx_free(ctx);
}

static void the_path_follows_the_environment(void **state)
{
  (void)state;
  const char *home = getenv("HOME");
  char *old_home = home ? strdup(home) : NULL;
  esmm_ctx *ctx = context();
  assert_int_equal(strncmp(esmm_tune_path(ctx), directory, strlen(directory)), 0);
  assert_int_equal(esmm_is_tuned(ctx), 0);
  esmm_ctx_free(ctx);
  setenv("HOME", "/home/somebody", 1);
  static const char *const ignored[] = {NULL, "", "relative/cache"}; /* as the XDG rules say */
  for (int i = 0; i < 3; i++) {
    if (ignored[i])
      setenv("XDG_CACHE_HOME", ignored[i], 1);
    else
      unsetenv("XDG_CACHE_HOME");
    ctx = context();
    assert_int_equal(strncmp(esmm_tune_path(ctx), "/home/somebody/.cache/", 22), 0);
    esmm_ctx_free(ctx);
  }
  unsetenv("HOME");
  ctx = context();
  assert_string_equal(esmm_tune_path(ctx), "");
  esmm_ctx_free(ctx);
  char *endless = malloc(8001); /* a path that does not fit is no path */
  assert_non_null(endless);
  memset(endless, 'x', 8000);
  endless[0] = '/';
  endless[8000] = 0;
  setenv("XDG_CACHE_HOME", endless, 1);
  ctx = context();
  assert_string_equal(esmm_tune_path(ctx), "");
  esmm_ctx_free(ctx);
  free(endless);
  if (old_home)
    setenv("HOME", old_home, 1);
  free(old_home);
  setenv("XDG_CACHE_HOME", directory, 1);
}

static void chosen(esmm_ctx *ctx, char *name, size_t bytes)
{
  esmm_matrix a = th_matrix_alloc(8, 40, ESMM_F32), b = th_matrix_alloc(40, 50, ESMM_F32),
              c = th_matrix_alloc(8, 50, ESMM_F32);
  th_fill(&a, 1, 0.5, true);
  th_fill(&b, 2, 1, true);
  esmm_weights *w = NULL;
  esmm_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  assert_int_equal(esmm_matmul(ctx, &a, w, &c, NULL, &stats), ESMM_OK);
  snprintf(name, bytes, "%s", stats.kernel);
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
}

static void constants_of_the_file_decide(void **state)
{
  (void)state;
  static const char *const ideas[] = {"dense", "joint", "rows", "decode"};
  char text[8192], kernel[32];
  for (int i = 0; i < 4; i++) {
    write_file(text, make_file(text, sizeof text, ideas[i]));
    esmm_ctx *ctx = context();
    assert_int_equal(esmm_is_tuned(ctx), 1);
    assert_int_equal(esmm_tune_load(ctx), 38); /* busy as it was, it is used */
    chosen(ctx, kernel, sizeof kernel);
    if (strncmp(kernel, ideas[i], strlen(ideas[i])) != 0)
      fail_msg("with a file in which %s is cheapest, %s ran", ideas[i], kernel);
    esmm_ctx_free(ctx);
    esmm_ctx *shipped = th_ctx(1); /* no_tuning_cache */
    assert_int_equal(esmm_is_tuned(shipped), 0);
    assert_int_equal(esmm_tune_load(shipped), 0);
    esmm_ctx_free(shipped);
  }
}

static void expect_ignored(const char *what, const char *text, size_t bytes)
{
  char before[32], after[32];
  esmm_ctx *shipped = th_ctx(1);
  chosen(shipped, before, sizeof before);
  esmm_ctx_free(shipped);
  write_file(text, bytes);
  esmm_ctx *ctx = context();
  if (esmm_is_tuned(ctx))
    fail_msg("a file %s was taken", what);
  chosen(ctx, after, sizeof after);
  assert_string_equal(before, after); /* nothing of it stuck */
  esmm_ctx_free(ctx);
}

static void bad_files_are_ignored(void **state)
{
  (void)state;
  char good[8192], bad[8192];
  size_t bytes = make_file(good, sizeof good, "dense");
  for (size_t cut = 0; cut + 16 < bytes; cut += 11) /* the last number may lose digits and still be one */
    expect_ignored("that was cut off", good, cut);
  static const char *const numbers[] = {"nan", "-1", "1.5", "99999999999999999999999", "x", ""};
  for (int i = 0; i < 6; i++) {
    const char *first = strchr(strstr(good, "load 38\n") + 8, ' ') + 1, *rest = strchr(first, ' ');
    int length = snprintf(bad, sizeof bad, "%.*s%s%s", (int)(first - good), good, numbers[i], rest);
    expect_ignored(numbers[i], bad, (size_t)length);
  }
  static const char *const loads[] = {
      "",           "load\n",      "load \n",    "load x\n",
      "load -1\n",  "load 101\n",  "load 38x\n", "load  38\n",
      "load 3.8\n", "load 38 1\n", "land 38\n",  "load 99999999999999999999999999999999999\n"};
  for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
    const char *line = strstr(good, "load 38\n");
    int length = snprintf(bad, sizeof bad, "%.*s%s%s", (int)(line - good), good, loads[i], line + 8);
    expect_ignored(loads[i][0] ? loads[i] : "without its load", bad, (size_t)length);
  }
  memcpy(bad, good, bytes);
  bad[13] = bad[13] == '0' ? '1' : '0'; /* the source id: measured with other kernels */
  expect_ignored("of other sources", bad, bytes);
  memcpy(bad, good, bytes);
  bad[10] = '9';
  expect_ignored("of another version", bad, bytes);
  memset(bad, 'y', sizeof bad);
  expect_ignored("of one endless line", bad, sizeof bad);
  memset(bad, 0, sizeof bad);
  expect_ignored("of zeros", bad, sizeof bad);
}

static double fake_load;

static double give_load(esmm_ctx *ctx, double seconds)
{
  (void)ctx;
  assert_true(seconds > 0 && seconds < 1);
  return fake_load;
}

/* A backend that says what its load is, and has one small trial. */
static void the_load_is_the_backend_s(void **state)
{
  (void)state;
  static const esmm_trial one[] = {{.m = 2, .k = 2, .n = 2, .kind = ESMM_GEN_DENSE, .density_a = 1, .density_b = 1},
                                   {.m = 0}};
  esmm_ctx *ctx = th_ctx(2);
  const esmm_backend *own = ctx->backend;
  const int now = esmm_load(ctx);
  assert_true(now >= 0 && now <= 100);
  esmm_backend other = *own;
  other.trials = one;
  other.load = give_load;
  ctx->backend = &other;
  static const struct {
    double share;
    int percent;
  } loads[] = {{0, 0}, {.104, 10}, {.106, 11}, {.377, 38}, {1, 100}, {1.5, 100}, {-.5, 0}};
  for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
    fake_load = loads[i].share;
    assert_int_equal(esmm_load(ctx), loads[i].percent);
    assert_int_equal(esmm_tune(ctx, 0, NULL, NULL), ESMM_OK);
    assert_int_equal(esmm_tune_load(ctx), loads[i].percent);
  }
  other.load = NULL; /* it cannot tell */
  assert_int_equal(esmm_load(ctx), 0);
  assert_int_equal(esmm_tune(ctx, 0, NULL, NULL), ESMM_OK);
  assert_int_equal(esmm_tune_load(ctx), 0);
  ctx->backend = own;
  esmm_ctx_free(ctx);
}

/* Every kernel that competes meets a trial of its dtype and format. */
static void every_kernel_has_a_trial(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(1);
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    bool found = !esmm_kernel_competes(ctx, kernel);
    for (const esmm_trial *t = ctx->backend->trials; t->m > 0 && !found; t++)
      found = (kernel->dtypes ? (kernel->dtypes & ESMM_DTYPE_BIT(t->dtype)) != 0 : t->dtype == ESMM_F32) &&
              esmm_kernel_formats(kernel) & 1u << t->format.kind;
    if (!found)
      fail_msg("%s: no trial measures it", kernel->name);
  }
  esmm_ctx_free(ctx);
}

typedef struct progress {
  int calls, last, total;
} progress;

static void on_progress(void *user, int done, int total)
{
  progress *p = user;
  assert_true(done >= p->last && done <= total && total > 0);
  p->calls++;
  p->last = done;
  p->total = total;
}

/* A small product, always the same shape; how many shapes of call the context has made after it. */
static int64_t shapes_after_a_product(esmm_ctx *ctx, const esmm_weights *w)
{
  float a[4] = {1, 2, 3, 4}, c[4];
  const esmm_matrix of_a = {.data = a, .rows = 2, .cols = 2};
  esmm_matrix of_c = {.data = c, .rows = 2, .cols = 2};
  assert_int_equal(esmm_matmul(ctx, &of_a, w, &of_c, NULL, NULL), ESMM_OK);
  return esmm_recall_shapes_made(ctx);
}

static void tuning_measures_and_saves(void **state)
{
  (void)state;
  progress p = {0};
  esmm_ctx *ctx = context();
  float b[4] = {1, 0, 0, 1};
  const esmm_matrix of_b = {.data = b, .rows = 2, .cols = 2};
  esmm_weights *w = NULL;
  unlink(esmm_tune_path(ctx));
  assert_int_equal(esmm_prepare(ctx, &of_b, NULL, &w), ESMM_OK);
  assert_int_equal(shapes_after_a_product(ctx, w), 1);
  assert_int_equal(shapes_after_a_product(ctx, w), 1);
  static double shipped[ESMM_MAX_KERNELS][ESMM_COST_TERMS];
  memcpy(shipped, ctx->cost, sizeof shipped);
  assert_int_equal(esmm_tune(ctx, 1, on_progress, &p), ESMM_OK);
  const int64_t made = esmm_recall_shapes_made(ctx);
  assert_int_equal(shapes_after_a_product(ctx, w), made + 1); /* other costs: it is made anew */
  esmm_weights_free(w);
  assert_int_equal(esmm_is_tuned(ctx), 1);
  assert_true(p.calls >= 2 && p.last == p.total);
  for (int i = 0; i < esmm_registry_count(); i++) {
    bool measured = !esmm_kernel_competes(ctx, esmm_registry_at(i));
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      measured = measured || shipped[i][t] != ctx->cost[i][t];
    if (!measured)
      fail_msg("%s: it was not measured", esmm_registry_at(i)->name);
  }
  esmm_ctx *later = context();
  assert_int_equal(esmm_is_tuned(later), 1);
  assert_int_equal(esmm_tune_load(later), esmm_tune_load(ctx));
  for (int i = 0; i < ESMM_MAX_KERNELS; i++)
    for (int t = 0; t < ESMM_COST_TERMS; t++) {
      double saved = ctx->cost[i][t], loaded = later->cost[i][t];
      if (!(isfinite(loaded) && loaded >= 0 && fabs(saved - loaded) <= 1e-5 * saved))
        fail_msg("kernel %d, term %d: %g was saved, %g loaded", i, t, saved, loaded);
    }
  esmm_ctx_free(later);
  esmm_ctx_free(ctx);
}

static void a_place_that_cannot_be_written(void **state)
{
  (void)state;
  setenv("XDG_CACHE_HOME", "/dev/null", 1);
  esmm_ctx *ctx = context();
  assert_int_equal(esmm_tune(ctx, 1, NULL, NULL), ESMM_ERR_IO);
  assert_non_null(strstr(esmm_ctx_error(ctx), "/dev/null"));
  esmm_ctx_free(ctx);
  setenv("XDG_CACHE_HOME", directory, 1);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_path_follows_the_environment),
      cmocka_unit_test(constants_of_the_file_decide),
      cmocka_unit_test(bad_files_are_ignored),
      cmocka_unit_test(the_load_is_the_backend_s),
      cmocka_unit_test(every_kernel_has_a_trial),
      cmocka_unit_test(tuning_measures_and_saves),
      cmocka_unit_test(a_place_that_cannot_be_written),
  };
  /* Measuring takes seconds, and most of a minute under a sanitizer: the last two are for full runs. */
  size_t count = sizeof tests / sizeof *tests - (th_env_int("ESMM_TEST_CASES", 0) ? 2 : 0);
  return _cmocka_run_group_tests("tune", tests, count, set_up, tear_down);
}
