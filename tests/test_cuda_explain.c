/*
 * test_cuda_explain.c: esmm_explain names the kernel that the product then runs, over shapes, dtypes and zeros of A and
 * B, aligned or not: also where the GPU makes the choice from what A holds.
 */
#include "esmm_tools.h"
#include "gpu16.h"

typedef struct zeros {
  esmm_generator_kind kind;
  double density;
} zeros;

static const zeros ZEROS[] = {{ESMM_GEN_DENSE, 1},       {ESMM_GEN_BLOCKWISE, .5}, {ESMM_GEN_BLOCKWISE, .12},
                              {ESMM_GEN_BLOCKWISE, .02}, {ESMM_GEN_RANDOM, .1},    {ESMM_GEN_RANDOM, 0}};

static esmm_matrix generated(int64_t rows, int64_t cols, int64_t ld, esmm_dtype dtype, esmm_operand operand, zeros z)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .ld = ld, .dtype = dtype, .place = ESMM_DEVICE, .device = ordinal};
  expect_ok(gpu, esmm_memory_alloc(gpu, (size_t)(rows * ld) * esmm_dtype_size(dtype), &m.data));
  const esmm_generator g = {.size = sizeof g,
                            .kind = z.kind,
                            .operand = operand,
                            .seed = 17 + (uint64_t)rows,
                            .density = z.density,
                            .strip = operand == ESMM_OPERAND_A ? 128 : 32};
  expect_ok(gpu, esmm_generate(gpu, &g, &m));
  return m;
}

/* The kernel that explain calls chosen. */
static void explained(const esmm_matrix *a, const esmm_weights *w, const esmm_matrix *c, const esmm_matmul_opts *opts,
                      char name[32])
{
  esmm_verdict verdicts[96];
  int count = COUNT(verdicts);
  expect_ok(gpu, esmm_explain(gpu, a, w, c, opts, verdicts, sizeof *verdicts, &count));
  name[0] = '\0';
  for (int i = 0; i < count; i++)
    if (verdicts[i].chosen) {
      assert_int_equal(name[0], '\0'); /* only one is */
      (void)snprintf(name, 32, "%s", verdicts[i].kernel);
    }
}

static int skipping, dense;

/* gate: the weights of the other branch, or NULL. */
static void check(const esmm_matrix *a, const esmm_weights *w, const esmm_weights *gate, esmm_matrix *c, int strict,
                  const char *what)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .strict = strict, .gate = gate};
  esmm_stats stats = {.size = sizeof stats};
  char name[32];
  explained(a, w, c, &opts, name);
  expect_ok(gpu, esmm_matmul(gpu, a, w, c, &opts, &stats));
  if (strcmp(name, stats.kernel) != 0)
    fail_msg("%s: explain says %s, %s ran (%s)", what, name, stats.kernel, stats.reason);
  *(strncmp(name, "joint", 5) == 0 || strncmp(name, "decode", 6) == 0 ? &skipping : &dense) += 1;
}

static void explain_is_what_runs(void **state)
{
  (void)state;
  static const int64_t shapes[][3] = {{1, 4096, 4096},    {4, 2048, 4096},    {16, 4096, 1024},   {64, 3072, 768},
                                      {100, 1000, 1003},  {256, 4096, 1024},  {1024, 1024, 1024}, {2048, 3072, 768},
                                      {2048, 2048, 2048}, {4096, 4096, 1024}, {5, 7, 9},          {3, 2000, 300},
                                      {129, 8, 2000},     {4096, 3072, 3072}};
  static const double of_b[] = {1, .3};
  skipping = dense = 0;
  for (int i = 0; i < COUNT(shapes); i++)
    for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++)
      for (int b_zeros = 0; b_zeros < COUNT(of_b); b_zeros++) {
        const int64_t m = shapes[i][0], k = shapes[i][1], n = shapes[i][2];
        esmm_matrix b = generated(k, n, n, (esmm_dtype)dtype, ESMM_OPERAND_B,
                                  (zeros){b_zeros ? ESMM_GEN_BLOCKWISE : ESMM_GEN_DENSE, of_b[b_zeros]});
        esmm_matrix c = {.rows = m, .cols = n, .ld = n, .dtype = (esmm_dtype)dtype, .place = ESMM_DEVICE};
        c.device = ordinal;
        expect_ok(gpu, esmm_memory_alloc(gpu, (size_t)(m * n) * sizeof(float), &c.data));
        esmm_weights *w = NULL, *gate = NULL; /* one launch may make both of few rows */
        expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
        if (m <= 64)
          expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &gate));
        for (int j = 0; j < COUNT(ZEROS); j++)
          for (int odd = 0; odd < 2; odd++) {
            char what[160];
            (void)snprintf(what, sizeof what, "%d x %d x %d %s, A %d %g%s, B %g", (int)m, (int)k, (int)n,
                           esmm_dtype_str((esmm_dtype)dtype), (int)ZEROS[j].kind, ZEROS[j].density,
                           odd ? ", odd lines" : "", of_b[b_zeros]);
            esmm_matrix a = generated(m, k, k + odd, (esmm_dtype)dtype, ESMM_OPERAND_A, ZEROS[j]);
            check(&a, w, NULL, &c, 0, what);
            if (j == 0)
              check(&a, w, NULL, &c, 1, what);
            if (gate)
              check(&a, w, gate, &c, 0, what);
            esmm_memory_free(gpu, a.data);
          }
        esmm_weights_free(w);
        esmm_weights_free(gate);
        esmm_memory_free(gpu, b.data);
        esmm_memory_free(gpu, c.data);
      }
  assert_true(skipping > 20 && dense > 20); /* both kinds were met */
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda explain", &status))
    return status;
  const struct CMUnitTest tests[] = {cmocka_unit_test(explain_is_what_runs)};
  status = cmocka_run_group_tests_name("cuda explain", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
