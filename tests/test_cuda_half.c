/*
 * test_cuda_half.c: the kernels that split A into halves of 2:4 (half_*_sm90a): what only they can get wrong. Rows of
 * every density side by side, so that patches of A have no overflow, little, or so much that the second half is
 * multiplied; tails of m, n and k; every C. test_kernels.c has the rest of the shapes and epilogues.
 *
 * Small integers: every sum is exact, whatever the order.
 */
#include "gpu16.h"

#include <math.h>
#include <stdlib.h>

static const char *const KERNELS[] = {"half_bf16_sm90a", "half_f16_sm90a"};

/* How rows of A are filled, by turns. */
enum { ROW_EMPTY, ROW_RARE, ROW_SOME, ROW_MORE, ROW_HALVES, ROW_TRIPLES, ROW_FULL, ROW_KINDS };

static bool is_set(int kind, int64_t k, th_rng *rng)
{
  switch (kind) {
  case ROW_EMPTY:
    return false;
  case ROW_RARE:
    return th_below(rng, 40) == 0;
  case ROW_SOME:
    return th_below(rng, 10) == 0;
  case ROW_MORE:
    return th_below(rng, 4) == 0;
  case ROW_HALVES: /* 2:4 as it is */
    return k % 4 == 1 || k % 4 == 3;
  case ROW_TRIPLES:
    return k % 4 != k / 4 % 4;
  default:
    return true;
  }
}

typedef struct product {
  esmm_matrix a, b, c; /* in host memory */
  esmm_matrix da, dc;
  esmm_weights *w;
  double *sums;
} product;

/* mix: of which kinds the rows of a strip are; 0: all of them, else rows of that kind among ROW_RARE. */
static product make_product(int64_t m, int64_t n, int64_t k, esmm_dtype dtype, esmm_dtype dtype_c, int mix)
{
  product p = {.a = host_matrix(m, k, dtype), .b = host_matrix(k, n, dtype), .c = host_matrix(m, n, dtype_c)};
  th_rng rng = {(uint64_t)(m * 31 + n * 7 + k + mix)};
  p.sums = calloc((size_t)(m * n), sizeof *p.sums);
  assert_non_null(p.sums);
  for (int64_t i = 0; i < k; i++)
    for (int64_t j = 0; j < n; j++)
      th_set(&p.b, i, j, (double)th_below(&rng, 7) - 3);
  for (int64_t i = 0; i < m; i++)
    for (int64_t l = 0; l < k; l++) {
      const int kind = mix ? (i % 16 == 5 ? mix : ROW_RARE) : (int)(i * 5 % ROW_KINDS);
      double x = is_set(kind, l, &rng) ? (double)th_below(&rng, 5) - 2 : 0;
      if (x == 0 && th_below(&rng, 2))
        x = -0.0;
      th_set(&p.a, i, l, x);
      for (int64_t j = 0; x != 0 && j < n; j++)
        p.sums[i * n + j] += x * th_get(&p.b, l, j);
    }
  p.da = to_device(&p.a);
  p.dc = to_device(&p.c);
  expect_ok(gpu, esmm_prepare(gpu, &p.b, NULL, &p.w));
  return p;
}

static void end_product(product *p)
{
  esmm_weights_free(p->w);
  esmm_memory_free(gpu, p->da.data);
  esmm_memory_free(gpu, p->dc.data);
  free(p->a.data);
  free(p->b.data);
  free(p->c.data);
  free(p->sums);
}

static void expect_product(product *p, const char *force, float beta)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force, .beta = &beta};
  for (int64_t i = 0; i < p->c.rows; i++)
    for (int64_t j = 0; j < p->c.cols; j++)
      th_set(&p->c, i, j, beta != 0 ? (double)((i + j) % 5) : NAN);
  assert_int_equal(calls.to_device((uintptr_t)p->dc.data, p->c.data, th_matrix_bytes(&p->c)), 0);
  expect_ok(gpu, esmm_matmul(gpu, &p->da, p->w, &p->dc, &opts, NULL));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  assert_int_equal(calls.to_host(p->c.data, (uintptr_t)p->dc.data, th_matrix_bytes(&p->c)), 0);
  for (int64_t i = 0; i < p->c.rows; i++)
    for (int64_t j = 0; j < p->c.cols; j++) {
      const double before = beta != 0 ? (double)((i + j) % 5) : 0;
      const double want = th_round(p->c.dtype, p->sums[i * p->c.cols + j] + (double)beta * before);
      const double got = th_get(&p->c, i, j);
      if (!(got == want))
        fail_msg("%s, %d x %d x %d, C of %s: C[%d,%d] is %g, not %g", force, (int)p->c.rows, (int)p->a.cols,
                 (int)p->c.cols, esmm_dtype_str(p->c.dtype), (int)i, (int)j, got, want);
    }
}

static bool there(const char *kernel)
{
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (strcmp(info.name, kernel) == 0)
      return info.available;
  }
  return false;
}

/* m, n, k: one of everything, tails of everything, several tiles with several groups of k's. */
static const int64_t SIZES[][3] = {{1, 1, 1},       {5, 8, 3},        {16, 256, 64},    {130, 136, 72},
                                   {300, 264, 203}, {256, 264, 2112}, {600, 130, 1000}, {513, 1032, 320}};

static void rows_of_every_density(void **state)
{
  (void)state;
  for (int d = 0; d < 2; d++)
    for (int s = 0; there(KERNELS[d]) && s < COUNT(SIZES); s++)
      for (int mix = 0; mix < 3; mix++) {
        const int mixes[] = {0, ROW_SOME, ROW_MORE};
        product p =
            make_product(SIZES[s][0], SIZES[s][1], SIZES[s][2], DTYPES[d], s % 2 ? DTYPES[d] : ESMM_F32, mixes[mix]);
        expect_product(&p, KERNELS[d], 0);
        expect_product(&p, KERNELS[d], 2);
        end_product(&p);
      }
}

/* An Inf in B reaches the rows of A that have something there, as Inf, whichever half or list that is in. */
static void infinity_stays_infinity(void **state)
{
  (void)state;
  for (int d = 0; d < 2; d++) {
    if (!there(KERNELS[d]))
      continue;
    for (int few = 0; few < 2; few++) {
      product p = make_product(256, 64, 64, DTYPES[d], ESMM_F32, ROW_RARE);
      for (int64_t i = 0; i < 256; i++)
        for (int64_t l = 0; l < 64; l++) /* groups 0 to 3 have 1 to 4 nonzeros; a patch, 3 for each row that is full */
          th_set(&p.a, i, l, l < 16 && (!few || i % 16 == 0) && l % 4 <= l / 4 ? 1 : 0);
      for (int64_t l = 0; l < 64; l++)
        for (int64_t j = 0; j < 64; j++)
          th_set(&p.b, l, j, l == j ? INFINITY : 1);
      esmm_weights_free(p.w);
      p.w = NULL;
      expect_ok(gpu, esmm_prepare(gpu, &p.b, NULL, &p.w));
      assert_int_equal(calls.to_device((uintptr_t)p.da.data, p.a.data, th_matrix_bytes(&p.a)), 0);
      const esmm_matmul_opts opts = {.size = sizeof opts, .force = KERNELS[d]};
      expect_ok(gpu, esmm_matmul(gpu, &p.da, p.w, &p.dc, &opts, NULL));
      expect_ok(gpu, esmm_ctx_synchronize(gpu));
      assert_int_equal(calls.to_host(p.c.data, (uintptr_t)p.dc.data, th_matrix_bytes(&p.c)), 0);
      for (int64_t i = 0; i < 256; i++)
        for (int64_t j = 0; j < 16; j++) {
          const double got = th_get(&p.c, i, j);
          if (th_get(&p.a, i, j) != 0 && !(isinf(got) && got > 0))
            fail_msg("%s, few %d: C[%d,%d] is %g, not Inf", KERNELS[d], few, (int)i, (int)j, got);
        }
      end_product(&p);
    }
  }
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda_half", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_of_every_density),
      cmocka_unit_test(infinity_stays_infinity),
  };
  status = cmocka_run_group_tests_name("cuda_half", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
