/*
 * test_cublas.c: what the library does with cuBLAS: a handle for each context that needs one, none while a graph is
 * captured, and what happens where it does not start or is not there. On the driver and cuBLAS of fake_cuda.c: no GPU
 * is needed, and no result is looked at.
 */
#include "cuda/cuda.h"
#include "fake_gpu.h"

#include <sys/wait.h>

static esmm_status run_kernel(bench *b, const char *force, int64_t m, esmm_stats *stats)
{
  esmm_matrix a = b->a, c = b->c;
  a.rows = c.rows = m;
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  *stats = (esmm_stats){.size = sizeof *stats};
  return esmm_matmul(b->ctx, &a, b->w, &c, &opts, stats);
}

static void cublas_works(void **state)
{
  (void)state;
  static char stream;
  bench b;
  esmm_stats stats;
  fake->cublas = 0;
  bench_start(&b);
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = "cublas_f32"};
  fake->captured = &stream; /* a handle cannot be had now, which says nothing of later */
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "before the capture"));
  assert_int_equal(fake->handles, 0);
  fake->captured = NULL;
  assert_int_equal(run_kernel(&b, "cublas_f32", 40, &stats), ESMM_OK);
  assert_string_equal(stats.kernel, "cublas_f32");
  assert_int_equal(fake->handles, 1);
  const int64_t sgemms = fake->sgemms;
  fake->captured = &stream;
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_OK);
  fake->captured = NULL;
  assert_int_equal(fake->handles, 1); /* one for the context */
  assert_int_equal(fake->sgemms, sgemms + 1);
  bench_stop(&b, "cuBLAS");
}

static uint64_t read_b; /* where a product by cuBLAS finds B */

static void note_b(const char *call, const fake_gemm *params)
{
  (void)call;
  read_b = params->a; /* a row-major C is made from turned operands */
}

/* Columns and rows of an fp32 B are two kernels; their common name stands for the faster of the two. */
static void fp32_has_two_layouts(void **state)
{
  (void)state;
  bench b;
  esmm_stats stats;
  fake->cublas = 0;
  bench_start(&b);
  const esmm_cuda_weights *w = esmm_cuda_of(b.w);
  const struct {
    const char *force, *runs;
    int64_t m;
    CUdeviceptr b;
  } cases[] = {{"cublas_f32", "cublas_f32", 40, w->columns},
               {"cublas_f32_rows", "cublas_f32_rows", 8, w->form[ESMM_FORM_TIGHT32]},
               {"cublas", "cublas_f32", 8, w->columns},
               {"cublas", "cublas_f32_rows", 40, w->form[ESMM_FORM_TIGHT32]}};
  fake->gemm = note_b;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(run_kernel(&b, cases[i].force, cases[i].m, &stats), ESMM_OK);
    assert_string_equal(stats.kernel, cases[i].runs);
    assert_int_equal(read_b, cases[i].b);
  }
  fake->gemm = NULL;
  bench_stop(&b, "B's rows and columns");
}

static int finished; /* passes over sums */

static void count_finish(const char *name, const void *params)
{
  (void)params;
  finished += strcmp(name, "esmm_finish") == 0;
}

/* 16-bit operands, in all orders, C of both dtypes; what it does not take it names. */
static void cublas_16(void **state)
{
  (void)state;
  meter m = {0};
  fake->cublas = 0;
  esmm_ctx *ctx = must_create(&m);
  const int64_t rows = 33, k = 70, n = 129, gemms = fake->gemms;
  for (int i = 0; i < 2 * 2 * 2 * 2 * 2; i++) {
    const esmm_dtype dtype = i & 1 ? ESMM_F16 : ESMM_BF16;
    const char *name = i & 1 ? "cublas_f16" : "cublas_bf16", *other = i & 1 ? "cublas_bf16" : "cublas_f16";
    esmm_matrix a = th_matrix_alloc(rows, k, dtype), b = th_matrix_alloc(k, n, dtype);
    esmm_matrix c = th_matrix_alloc(rows, n, i & 16 ? dtype : ESMM_F32);
    th_fill(&a, 1, 0.5, true);
    th_fill(&b, 2, 0.5, true);
    a.order = i & 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    b.order = i & 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    c.order = i & 8 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    a.ld = b.ld = c.ld = 0;
    esmm_weights *w = NULL;
    esmm_stats stats = {.size = sizeof stats};
    assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
    esmm_matmul_opts opts = {.size = sizeof opts, .force = name};
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &stats), ESMM_OK);
    assert_string_equal(stats.kernel, name);
    opts.force = other;
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &stats), ESMM_ERR_UNSUPPORTED);
    assert_non_null(strstr(esmm_ctx_error(ctx), "it takes"));
    opts = (esmm_matmul_opts){.size = sizeof opts, .force = name, .activation = ESMM_ACT_RELU};
    finished = 0;
    fake->kernel = count_finish;
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, NULL), ESMM_OK);
    fake->kernel = NULL;
    assert_int_equal(finished, 1); /* a pass over the library's sums */
    esmm_weights_free(w);
    free(a.data);
    free(b.data);
    free(c.data);
  }
  assert_int_equal(fake->gemms, gemms + 64);
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance("16-bit cuBLAS");
}

/* Forced it fails, with the reason; the plan does without it. */
static void cublas_does_not_start(void **state)
{
  (void)state;
  bench b;
  esmm_stats stats;
  bench_start(&b);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(run_kernel(&b, "cublas_f32", 40, &stats), ESMM_ERR_UNSUPPORTED);
    assert_non_null(strstr(esmm_ctx_error(b.ctx), "cublasCreate"));
    assert_non_null(strstr(esmm_ctx_error(b.ctx), "CUBLAS_STATUS_NOT_INITIALIZED"));
    fake->cublas = 0; /* it is not tried again in this context */
  }
  assert_int_equal(fake->handles, 0);
  assert_int_equal(run_kernel(&b, NULL, 40, &stats), ESMM_OK);
  assert_int_not_equal(strncmp(stats.kernel, "cublas", 6), 0);
  bench_stop(&b, "cuBLAS that does not start");
}

/* The same where the plan itself would have taken it: strict products, sizes at which it may be the cheapest. */
static void plan_without_cublas(void **state)
{
  (void)state;
  static const int64_t sizes[] = {1, 16, 64, 200, 512, 1024};
  int chosen = 0;
  for (size_t i = 0; i < 2 * sizeof sizes / sizeof sizes[0]; i++) {
    const int64_t size = sizes[i / 2], k = 256;
    fake->sm = i % 2 ? 80 : 90;
    fake->cublas = 0;
    meter m = {0};
    esmm_ctx *ctx = must_create(&m);
    esmm_matrix a = th_matrix_alloc(size, k, ESMM_F32), b = th_matrix_alloc(k, size, ESMM_F32),
                c = th_matrix_alloc(size, size, ESMM_F32);
    th_fill(&a, 7, 1, true);
    th_fill(&b, 8, 1, true);
    esmm_weights *w = NULL;
    const esmm_matmul_opts opts = {.size = sizeof opts, .strict = 1};
    esmm_stats with = {.size = sizeof with}, without = with;
    assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &with), ESMM_OK);
    esmm_ctx_free(ctx);
    ctx = must_create(&m);
    fake->cublas = NO_CUBLAS;
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &without), ESMM_OK);
    assert_int_not_equal(strncmp(without.kernel, "cublas", 6), 0);
    chosen += strncmp(with.kernel, "cublas", 6) == 0;
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, &opts, &without), ESMM_OK);
    esmm_weights_free(w);
    esmm_ctx_free(ctx);
    assert_int_equal(m.live, 0);
    check_balance("a plan without cuBLAS");
    free(a.data);
    free(b.data);
    free(c.data);
  }
  print_message("# the plan would have taken cuBLAS for %d of these products\n", chosen);
}

/* ---- no cuBLAS at all: a process of its own, because the library is looked for once ---- */

static int without_library(void)
{
  bench b;
  esmm_stats stats;
  int seen = 0;
  open_fake();
  reset();
  bench_start(&b);
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(b.ctx, i, &info) == ESMM_OK && strcmp(info.name, "cublas_f32") == 0)
      seen += 1 + info.available;
  }
  const esmm_status forced = run_kernel(&b, "cublas_f32", 40, &stats);
  const bool said = strstr(esmm_ctx_error(b.ctx), "libcublas was not found") != NULL;
  const esmm_status free_choice = run_kernel(&b, NULL, 40, &stats);
  if (seen != 1 || forced != ESMM_ERR_UNSUPPORTED || !said || free_choice != ESMM_OK) {
    fprintf(stderr, "# without cuBLAS: seen %d, forced: %s, %s\n", seen, esmm_status_str(forced),
            esmm_ctx_error(b.ctx));
    return 1;
  }
  bench_stop(&b, "no cuBLAS");
  return 0;
}

static void library_not_found(void **state)
{
  (void)state;
  fflush(NULL);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    static char self[] = "/proc/self/exe";
    char *const arguments[] = {self, NULL};
    setenv(MODE, "without cuBLAS", 1);
    setenv("ESMM_CUBLAS", "/nonexistent/libcublas.so", 1);
    execv(self, arguments);
    _exit(127);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

int main(int argc, char **argv)
{
  (void)argc;
  if (strcmp(use_fake(argv), "without cuBLAS") == 0)
    return without_library();
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(cublas_works),          TEST(fp32_has_two_layouts), TEST(cublas_16),
                                    TEST(cublas_does_not_start), TEST(plan_without_cublas),  TEST(library_not_found)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cublas, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cublas", with, NULL, NULL);
}
