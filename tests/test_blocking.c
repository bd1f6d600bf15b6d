/*
 * test_blocking.c: products on both sides of every place where a CPU kernel cuts m, n or k: into blocks, bands and
 * chains of sums. Where these places are is asked of the kernel's own code (support/cuts.h), for 1 to 84 threads, with
 * the two other sizes small. On each side the product runs with the options that a kernel may apply once too often, or
 * not at all, where a block begins: beta, a residual that is C itself, counts of nonzeros, bias and activation, gaps
 * between the rows of A and C.
 *
 * All numbers are small integers, or halves of them: results are exact, and compared for equality.
 */
#include "cpu/cpu.h"
#include "cuts.h"
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { M, N, K, DIMS, OPTIONS = 6, MOST_ELEMENTS = 1 << 20, KEPT = 256 };
static const int THREADS[] = {1, 84, 3}; /* the first two where cases are limited */
static const int64_t SMALL[][DIMS] = {{2, 8, 16}, {17, 8, 80}};
static const int64_t LIMIT[DIMS] = {1100, 4200, 8300};

typedef struct form {
  esmm_format_kind kind;
  int keep, group, group_cols;
} form;
static const form FORMS[] = {
    {ESMM_FORMAT_DENSE, 0, 0, 0}, {ESMM_FORMAT_BSR, 0, 0, 0}, {ESMM_FORMAT_NM, 2, 4, 1}, {ESMM_FORMAT_NM, 2, 4, 32}};

static esmm_ctx *ctx;
static float of_a[MOST_ELEMENTS], of_b[MOST_ELEMENTS];
static char now[400];

typedef struct setting {
  const esmm_kernel *kernel;
  const form *form;
  esmm_dtype dtype;
  bool sparse;
  int threads;
} setting;

/* ---- operands ---- */

/* One k in ten of A lives where it is sparse; B's zeros fit 2:4. */
static float value_a(const setting *s, int64_t i, int64_t k)
{
  return s->sparse && k % 10 ? 0 : (float)((i * 7 + k * 5 + i * k % 3) % 3 + 1);
}

static float value_b(const setting *s, int64_t k, int64_t j)
{
  return s->form->group && k % s->form->group >= s->form->keep ? 0 : (float)((k * 3 + j * 5) % 5 - 2);
}

/* Small integers are exact in both dtypes, and bf16 has the upper half of fp32's bits. */
static void put(void *data, esmm_dtype dtype, int64_t at, float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (dtype == ESMM_F32)
    ((float *)data)[at] = value;
  else
    ((uint16_t *)data)[at] = (uint16_t)(bits >> 16);
}

static void fill(const setting *s, esmm_matrix *x, float *data, int64_t rows, int64_t cols, int64_t gap, bool is_a)
{
  *x = (esmm_matrix){.data = data, .rows = rows, .cols = cols, .ld = cols + gap, .dtype = s->dtype};
  assert_true(rows * (cols + gap) <= MOST_ELEMENTS);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++)
      put(data, s->dtype, i * (cols + gap) + j, is_a ? value_a(s, i, j) : value_b(s, i, j));
}

/* Weights of a size, kept: the search for cuts comes back to most of them. */
static struct kept {
  const form *form;
  esmm_dtype dtype;
  int64_t k, n;
  esmm_weights *weights;
} kept[KEPT];

static const esmm_weights *prepare(const setting *s, int64_t k, int64_t n)
{
  struct kept *x = &kept[(uint64_t)(k * 131 + n * 7 + (s->form - FORMS) + 4 * (int)s->dtype) % KEPT];
  if (x->form == s->form && x->dtype == s->dtype && x->k == k && x->n == n)
    return x->weights;
  esmm_weights_free(x->weights);
  *x = (struct kept){.form = s->form, .dtype = s->dtype, .k = k, .n = n};
  esmm_matrix b;
  fill(s, &b, of_b, k, n, 0, false);
  const esmm_prepare_opts opts = {.size = sizeof opts,
                                  .max_bytes_ratio = 1e6,
                                  .format.kind = s->form->kind,
                                  .format.block_rows = s->form->kind == ESMM_FORMAT_BSR ? 32 : 0,
                                  .format.block_cols = s->form->kind == ESMM_FORMAT_BSR ? 32 : 0,
                                  .format.keep = s->form->keep,
                                  .format.group = s->form->group,
                                  .format.group_cols = s->form->group_cols};
  if (esmm_prepare(ctx, &b, &opts, &x->weights) != ESMM_OK)
    fail_msg("esmm_prepare: %s", esmm_ctx_error(ctx));
  return x->weights;
}

/* ---- where the kernel cuts ---- */

/* The cut of this size, `which` of the kernel's along one dimension; 0 where the kernel does not take the product. */
static int64_t cut_at(const setting *s, const int64_t size[DIMS], int dim, int which, const esmm_weights *w, bool plain)
{
  char why[160];
  double units[ESMM_COST_TERMS] = {0};
  esmm_problem p = {.ctx = ctx, .m = size[M], .n = size[N], .k = size[K], .w = w, .alpha = 1, .threads = s->threads};
  p.a = (esmm_matrix){.rows = size[M], .cols = size[K], .ld = size[K], .dtype = s->dtype};
  p.c = (esmm_matrix){.rows = size[M], .cols = size[N], .ld = size[N]};
  p.beta = plain ? 1 : 0.5f;
  esmm_sample_fill(&p.sample, s->sparse ? 0.1 : 1);
  if (!esmm_plan_can_run(&p, s->kernel, why, sizeof why))
    return 0;
  for (int i = 0; i < esmm_registry_count(); i++)
    if (esmm_registry_at(i) == s->kernel)
      s->kernel->terms(s->kernel, &p, ctx->cost[i], units, &p.variant);
  return cuts_of(s->kernel, &p).of[dim][which];
}

/* Does the product have more than `parts` parts along dim? */
static int is_cut(const setting *s, int64_t size[DIMS], int dim, int which, int64_t parts, bool plain)
{
  const int64_t cut = cut_at(s, size, dim, which, prepare(s, size[K], size[N]), plain);
  return cut == 0 ? -1 : esmm_ceil_div(size[dim], cut) > parts;
}

/* The largest size along dim that has so many parts; 0 where there is no larger one within the limit. */
static int64_t find_edge(const setting *s, const int64_t small[DIMS], int dim, int which, int64_t parts, bool plain)
{
  int64_t size[DIMS] = {small[M], small[N], small[K]}, low = 1, high = 1;
  size[dim] = 1;
  for (int cut = 0; cut != 1; high = size[dim], size[dim] = esmm_min(2 * size[dim], LIMIT[dim])) {
    cut = is_cut(s, size, dim, which, parts, plain);
    if (cut == 0)
      low = size[dim];
    if (cut < 1 && size[dim] == LIMIT[dim])
      return 0;
  }
  while (high - low > 1) {
    size[dim] = low + (high - low) / 2;
    if (is_cut(s, size, dim, which, parts, plain) == 1)
      high = size[dim];
    else
      low = size[dim];
  }
  return low;
}

/* ---- products ---- */

static void check(const setting *s, const int64_t size[DIMS], const double *sums, int options)
{
  const int64_t m = size[M], n = size[N], k = size[K], gap = options % 2 ? 3 : 0, ldc = n + gap;
  const float alpha = options == 4 ? 0.5f : 1, beta = options == 0 ? 1 : options == 1 ? 0.5f : options == 3 ? 2 : 0;
  esmm_matrix a, c = {.rows = m, .cols = n, .ld = ldc};
  fill(s, &a, of_a, m, k, gap, true);
  const esmm_weights *w = prepare(s, k, n);
  float *out = malloc((size_t)(m * ldc) * sizeof *out), *bias = calloc((size_t)n, sizeof *bias);
  int32_t *counts = calloc((size_t)n, sizeof *counts), *expected = calloc((size_t)n, sizeof *expected);
  assert_true(out && bias && counts && expected);
  for (int64_t i = 0; i < m * ldc; i++)
    out[i] = (float)(i % 7 - 3);
  for (int64_t j = 0; j < n; j++)
    bias[j] = (float)(j % 9 - 4);
  c.data = out;
  snprintf(now, sizeof now, "%s: m=%d n=%d k=%d, %s, density of A %g, %d threads, alpha %g beta %g%s%s%s gaps of %d",
           s->kernel->name, (int)m, (int)n, (int)k, esmm_format_str(s->form->kind), s->sparse ? 0.1 : 1.0, s->threads,
           (double)alpha, (double)beta, options == 2 || options == 4 ? " residual C" : "",
           options > 2 ? " bias and relu" : "", options && options < 5 ? " counts" : "", (int)gap);
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = &alpha,
                                 .beta = &beta,
                                 .bias = options > 2 ? bias : NULL,
                                 .activation = options > 2 ? ESMM_ACT_RELU : ESMM_ACT_NONE,
                                 .residual = options == 2 || options == 4 ? &c : NULL,
                                 .column_nonzeros = options && options < 5 ? counts : NULL,
                                 .force = s->kernel->name};
  const esmm_status status = esmm_matmul(ctx, &a, w, &c, &opts, NULL);
  if (status != ESMM_OK && status != ESMM_ERR_UNSUPPORTED)
    fail_msg("%s: %s", now, esmm_ctx_error(ctx));
  for (int64_t i = 0; status == ESMM_OK && i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      const float old = (float)((i * ldc + j) % 7 - 3);
      double x = (double)alpha * sums[i * n + j] + (double)(beta * old);
      if (opts.bias)
        x = x + (double)bias[j] > 0 ? x + (double)bias[j] : 0;
      x += opts.residual ? (double)old : 0;
      expected[j] += x != 0;
      if ((double)out[i * ldc + j] != x)
        fail_msg("%s: C[%d,%d] is %.9g, expected %.9g", now, (int)i, (int)j, (double)out[i * ldc + j], x);
    }
  for (int64_t j = 0; status == ESMM_OK && opts.column_nonzeros && j < n; j++)
    if (counts[j] != expected[j])
      fail_msg("%s: column %d has %d nonzeros counted, expected %d", now, (int)j, counts[j], expected[j]);
  free(out);
  free(bias);
  free(counts);
  free(expected);
}

static void check_all(const setting *s, const int64_t size[DIMS])
{
  const int64_t m = size[M], n = size[N], k = size[K];
  double *sums = calloc((size_t)(m * n), sizeof *sums);
  float *row = malloc((size_t)n * sizeof *row);
  assert_true(sums && row);
  for (int64_t t = 0; t < k; t += s->sparse ? 10 : 1) {
    for (int64_t j = 0; j < n; j++)
      row[j] = value_b(s, t, j);
    for (int64_t i = 0; i < m; i++) {
      const float x = value_a(s, i, t);
      for (int64_t j = 0; j < n; j++)
        sums[i * n + j] += (double)(x * row[j]);
    }
  }
  for (int options = 0; options < OPTIONS; options++)
    check(s, size, sums, options);
  free(sums);
  free(row);
}

static void check_edges(const setting *s, int *edges)
{
  for (int small = 0; small < 2; small++)
    for (int dim = M; dim < DIMS; dim++)
      for (int which = 0; which < CUTS; which++)
        for (int parts = 1; parts <= 2; parts++) {
          const bool plain = parts == 2;
          const int64_t edge = find_edge(s, SMALL[small], dim, which, parts, plain);
          int64_t size[DIMS] = {SMALL[small][M], SMALL[small][N], SMALL[small][K]};
          for (size[dim] = edge; edge && size[dim] <= edge + 1; size[dim]++)
            check_all(s, size);
          *edges += edge > 0;
        }
}

static void one_kernel(void **state)
{
  setting s = {.kernel = *state};
  char why[160] = "";
  int edges = 0;
  ctx = th_ctx_on("cpu", 1);
  const bool available = esmm_kernel_available(ctx, s.kernel, why, sizeof why);
  esmm_ctx_free(ctx);
  if (!available) {
    print_message("# %s skipped: %s\n", s.kernel->name, why);
    skip();
  }
  const int most = th_env_int("ESMM_TEST_CASES", 0) ? 2 : (int)(sizeof THREADS / sizeof *THREADS);
  for (int t = 0; t < most; t++) {
    s.threads = THREADS[t];
    ctx = th_ctx_on("cpu", s.threads);
    ctx->thread_work = 1e-12; /* all of them, for the smallest product */
    ctx->wake_seconds = 1e12; /* and none woken: blocks do not depend on it */
    for (size_t f = 0; f < sizeof FORMS / sizeof *FORMS; f++)
      for (int sparse = 0; sparse <= (s.kernel->flags & ESMM_KERNEL_SKIPS ? 1 : 0); sparse++) {
        s.form = &FORMS[f];
        s.dtype = s.kernel->dtypes == ESMM_DTYPE_BIT(ESMM_BF16) ? ESMM_BF16 : ESMM_F32;
        s.sparse = sparse;
        if (esmm_kernel_formats(s.kernel) >> s.form->kind & 1)
          check_edges(&s, &edges);
      }
    esmm_ctx_free(ctx);
  }
  for (int i = 0; i < KEPT; i++)
    esmm_weights_free(kept[i].weights);
  memset(kept, 0, sizeof kept);
  print_message("# %s: %d edges\n", s.kernel->name, edges);
  if (edges == 0)
    fail_msg("%s: no edge was found", s.kernel->name);
}

int main(void)
{
  static struct CMUnitTest tests[ESMM_MAX_KERNELS];
  size_t count = 0;
  th_clean_environment();
  th_on_crash(now);
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (kernel->backend == &esmm_cpu_backend && !kernel->missing && !(kernel->flags & ESMM_KERNEL_REFERENCE))
      tests[count++] = th_test_of(kernel->name, one_kernel, kernel);
  }
  return _cmocka_run_group_tests("blocking", tests, count, NULL, NULL);
}
