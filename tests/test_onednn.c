/*
 * test_onednn.c: what the library does with oneDNN on a CPU: where B is kept in its layout and where not, files, a
 * forked child, and what happens where it is turned off or not there. Results of onednn_* are in the table of
 * test_kernels.c. Where it is not installed, or the CPU has no AVX-512 BF16, only the latter;
 * in a portable build, which has no such kernel, nothing.
 */
#include "harness.h"
#include "internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { M = 70, K = 256, N = 192 };
#define MODE "ESMM_TEST_ONEDNN"

typedef struct rig {
  esmm_ctx *ctx;
  esmm_matrix a, b, c;
} rig;

static void start(rig *x)
{
  *x = (rig){.ctx = th_ctx_on("cpu", 2), .a = th_matrix_alloc(M, K, ESMM_BF16), .b = th_matrix_alloc(K, N, ESMM_BF16)};
  x->c = th_matrix_alloc(M, N, ESMM_BF16);
  th_fill(&x->a, 1, 1.0, true);
  th_fill(&x->b, 2, 1.0, true);
}

static void stop(rig *x)
{
  esmm_ctx_free(x->ctx);
  free(x->a.data);
  free(x->b.data);
  free(x->c.data);
}

static esmm_status multiply(rig *x, const esmm_weights *w, const char *force)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  return esmm_matmul(x->ctx, &x->a, w, &x->c, &opts, NULL);
}

/* Prepares b so, and says whether onednn runs; *bytes may be NULL. */
static bool keeps(rig *x, esmm_use use, double ratio, size_t *bytes)
{
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = use, .max_bytes_ratio = ratio};
  esmm_weights_info info = {.size = sizeof info};
  esmm_weights *w = NULL;
  if (esmm_prepare(x->ctx, &x->b, &opts, &w) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(x->ctx));
  const esmm_status status = multiply(x, w, "onednn");
  assert_true(status == ESMM_OK || status == ESMM_ERR_UNSUPPORTED);
  assert_int_equal(multiply(x, w, NULL), ESMM_OK);
  assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
  if (bytes)
    *bytes = info.bytes;
  esmm_weights_free(w);
  return status == ESMM_OK;
}

static bool is_here(void)
{
#ifdef ESMM_PORTABLE
  return false;
#endif
  rig x;
  start(&x);
  const bool here = keeps(&x, ESMM_USE_ANY, 0.0, NULL);
  stop(&x);
  return here;
}

/* B once more where the limit of bytes allows it: by default, and where all of B is alive. */
static void kept_where_worth_it(void **state)
{
  (void)state;
  rig x;
  if (!is_here())
    skip();
  start(&x);
  size_t with, without;
  assert_true(keeps(&x, ESMM_USE_ANY, 0.0, &with));
  assert_false(keeps(&x, ESMM_USE_ANY, 2.0, &without));
  assert_true(with >= without + (size_t)K * N * 2);
  assert_true(keeps(&x, ESMM_USE_ANY, 3.0, NULL));
  assert_true(keeps(&x, ESMM_USE_LARGE_M, 2.0, NULL));
  assert_false(keeps(&x, ESMM_USE_LARGE_M, 1.5, NULL));
  assert_false(keeps(&x, ESMM_USE_DECODE, 0.0, NULL));
  for (int64_t k = 0; k < K; k++) /* most k's are dead: skipping them is then worth more */
    for (int64_t j = 0; j < N && k % 4; j++)
      th_set(&x.b, k, j, 0.0);
  assert_false(keeps(&x, ESMM_USE_ANY, 0.0, NULL));
  stop(&x);
}

static void files_make_it_again(void **state)
{
  (void)state;
  rig x;
  if (!is_here())
    skip();
  start(&x);
  char path[64];
  esmm_weights *w = NULL, *read = NULL;
  (void)snprintf(path, sizeof path, "/tmp/test_onednn.%ld", (long)getpid());
  assert_int_equal(esmm_prepare(x.ctx, &x.b, NULL, &w), ESMM_OK);
  assert_int_equal(esmm_weights_save(x.ctx, w, path), ESMM_OK);
  assert_int_equal(esmm_weights_load(x.ctx, path, &read), ESMM_OK);
  (void)remove(path);
  assert_int_equal(multiply(&x, w, "onednn"), ESMM_OK);
  esmm_matrix first = th_matrix_alloc(M, N, ESMM_BF16);
  memcpy(first.data, x.c.data, th_matrix_bytes(&first));
  assert_int_equal(multiply(&x, read, "onednn"), ESMM_OK);
  assert_memory_equal(first.data, x.c.data, th_matrix_bytes(&first));
  free(first.data);
  esmm_weights_free(w);
  esmm_weights_free(read);
  stop(&x);
}

static void wait_for(pid_t child)
{
  int status = 0;
  assert_true(child > 0);
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

static void forked_child_multiplies(void **state)
{
  (void)state;
  rig x;
  if (!is_here())
    skip();
  start(&x);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(x.ctx, &x.b, NULL, &w), ESMM_OK);
  assert_int_equal(multiply(&x, w, "onednn"), ESMM_OK);
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    (void)alarm(60);
    _exit(multiply(&x, w, "onednn") == ESMM_OK ? 0 : 1);
  }
  wait_for(child);
  esmm_weights_free(w);
  stop(&x);
}

/* fp32, where B's lines are padded: C's padding may be as long as theirs, and is the caller's all the same. */
static void padding_of_c_stays(void **state)
{
  (void)state;
  enum { ROWS = 96, DEEP = 64, COLS = 40, PADDED = 48 };
  esmm_ctx *ctx = th_ctx_on("cpu", 2);
  esmm_matrix a = th_matrix_alloc(ROWS, DEEP, ESMM_F32), b = th_matrix_alloc(DEEP, COLS, ESMM_F32),
              c = th_matrix_alloc(ROWS, PADDED, ESMM_F32);
  const esmm_matmul_opts forced = {.size = sizeof forced, .force = "onednn_f32_avx512"};
  float *values = c.data;
  esmm_weights *w = NULL;
  th_fill(&a, 1, 1.0, true);
  th_fill(&b, 2, 1.0, true);
  for (int i = 0; i < ROWS * PADDED; i++)
    values[i] = -7.0f;
  c.cols = COLS;
  c.ld = PADDED;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  const esmm_status status = esmm_matmul(ctx, &a, w, &c, &forced, NULL);
  assert_int_equal(esmm_matmul(ctx, &a, w, &c, NULL, NULL), ESMM_OK);
  int changed = 0;
  for (int i = 0; i < ROWS; i++)
    for (int j = COLS; j < PADDED; j++)
      changed += values[i * PADDED + j] != -7.0f;
  assert_int_equal(changed, 0);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  free(a.data);
  free(b.data);
  free(c.data);
  if (status != ESMM_OK)
    skip();
}

/* What the library has no kernel for must not keep it from what it has one for. */
static void a_rounded_c_is_no_failure(void **state)
{
  (void)state;
  enum { ROWS = 32, DEEP = 64, COLS = 48 };
  esmm_ctx *ctx = th_ctx_on("cpu", 1);
  esmm_matrix a = th_matrix_alloc(ROWS, DEEP, ESMM_F32), b = th_matrix_alloc(DEEP, COLS, ESMM_F32),
              c = th_matrix_alloc(ROWS, COLS, ESMM_F32), rounded = th_matrix_alloc(ROWS, COLS, ESMM_BF16);
  const esmm_matmul_opts forced = {.size = sizeof forced, .force = "onednn_f32_avx512"};
  esmm_weights *w = NULL;
  th_fill(&a, 1, 1.0, true);
  th_fill(&b, 2, 1.0, true);
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  const esmm_status before = esmm_matmul(ctx, &a, w, &c, &forced, NULL);
  assert_int_equal(esmm_matmul(ctx, &a, w, &rounded, &forced, NULL), before);
  assert_int_equal(esmm_matmul(ctx, &a, w, &c, &forced, NULL), before);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  free(a.data);
  free(b.data);
  free(c.data);
  free(rounded.data);
  if (before != ESMM_OK)
    skip();
}

/* Few rows are cut into columns for several threads, many into rows: of A and C with tight lines and with others, with
   beta and without, of both dtypes, beside the sums of one thread's dense kernel. */
static void rows_and_columns_are_parts(void **state)
{
  (void)state;
  enum { DEEP = 70, COLS = 333, PADDED = 350 };
  static const int64_t all_rows[] = {1, 7, 33, 130, 300};
  enum { MANY = 8 }; /* threads: the last part has 13 columns */
  rig x;
  if (!is_here())
    skip();
  start(&x);
  esmm_ctx *const two = x.ctx, *const many = th_ctx_on("cpu", MANY);
  for (int narrow = 0; narrow < 4; narrow++) {
    x.ctx = narrow & 2 ? many : two;
    const esmm_dtype dtype = narrow & 1 ? ESMM_BF16 : ESMM_F32;
    esmm_matrix b = th_matrix_alloc(DEEP, COLS, dtype);
    esmm_weights *w = NULL;
    th_fill(&b, 2, 1.0, true);
    assert_int_equal(esmm_prepare(x.ctx, &b, NULL, &w), ESMM_OK);
    assert_true(w->onednn.in_blocks);
    for (size_t i = 0; i < 4 * sizeof all_rows / sizeof *all_rows; i++) {
      const int64_t rows = all_rows[i / 4], ld = i & 1 ? PADDED : DEEP, ldc = i & 2 ? PADDED : COLS;
      esmm_matrix a = th_matrix_alloc(rows, ld, dtype), c = th_matrix_alloc(rows, ldc, ESMM_F32),
                  want = th_matrix_alloc(rows, ldc, ESMM_F32);
      const float beta = i % 3 == 0 ? 0.5f : 0.0f;
      float bias[COLS];
      esmm_matmul_opts dense = {.size = sizeof dense, .force = "dense", .beta = &beta, .bias = i % 2 ? bias : NULL};
      esmm_matmul_opts forced = dense;
      forced.force = "onednn";
      for (int j = 0; j < COLS; j++)
        bias[j] = (float)(j % 7);
      th_fill(&a, 3 + i, 1.0, true);
      a.cols = DEEP;
      c.cols = want.cols = COLS;
      for (int call = 0; call < 2; call++) {
        assert_int_equal(esmm_matmul(x.ctx, &a, w, &want, &dense, NULL), ESMM_OK);
        assert_int_equal(esmm_matmul(x.ctx, &a, w, &c, &forced, NULL), ESMM_OK);
      }
      for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < COLS; j++)
          if (fabs(th_get(&c, r, j) - th_get(&want, r, j)) > 1e-3)
            fail_msg("%s, %lld rows: C[%lld,%lld] is %g, not %g", esmm_dtype_str(dtype), (long long)rows, (long long)r,
                     (long long)j, th_get(&c, r, j), th_get(&want, r, j));
      free(a.data);
      free(c.data);
      free(want.data);
    }
    esmm_weights_free(w);
    free(b.data);
  }
  x.ctx = two;
  esmm_ctx_free(many);
  stop(&x);
}

/* In a process of its own, as the library is opened once: the reason names the variable, and nothing else is missing.
 */
static int without_library(void)
{
  rig x;
  start(&x);
  esmm_weights *w = NULL;
  const bool fine = esmm_prepare(x.ctx, &x.b, NULL, &w) == ESMM_OK &&
                    multiply(&x, w, "onednn_bf16_avx512bf16") == ESMM_ERR_UNSUPPORTED &&
                    multiply(&x, w, NULL) == ESMM_OK;
  esmm_weights_free(w);
  stop(&x);
  return fine ? 0 : 1;
}

static void run_without(const char *value)
{
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    static char self[] = "/proc/self/exe";
    char *const arguments[] = {self, NULL};
    setenv(MODE, "without", 1);
    setenv("ESMM_ONEDNN", value, 1);
    execv(self, arguments);
    _exit(127);
  }
  wait_for(child);
}

static void turned_off_or_not_there(void **state)
{
  (void)state;
#ifdef ESMM_PORTABLE
  skip();
#endif
  run_without("off");
  run_without("/nonexistent/libdnnl.so");
}

int main(void)
{
  if (getenv(MODE))
    return without_library();
  (void)unsetenv("ESMM_ONEDNN");
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(kept_where_worth_it),       cmocka_unit_test(files_make_it_again),
      cmocka_unit_test(forked_child_multiplies),   cmocka_unit_test(padding_of_c_stays),
      cmocka_unit_test(a_rounded_c_is_no_failure), cmocka_unit_test(rows_and_columns_are_parts),
      cmocka_unit_test(turned_off_or_not_there)};
  return cmocka_run_group_tests_name("onednn", tests, NULL, NULL);
}
