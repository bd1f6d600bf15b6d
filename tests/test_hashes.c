/*
 * test_hashes.c: the bits of C of every CPU kernel are what tests/golden/cpu_hashes.txt says, so that a change of CPU
 * code which is meant to keep them is seen to keep them.
 *
 * The products are drawn from the factors of test_kernels.c (kernel_factors.h) by a fixed seed, in groups. A line of
 * the file has, for one kernel and one number of threads, a hash of every group: of all elements of C of the group's
 * products that the kernel takes, "-" where it takes none. Operands are made from integers, sums follow the kernel's
 * own order, and no file is compiled with contracted multiply-adds: gcc and clang at any -O give the same bits.
 *
 * Nothing but the kernel's arithmetic may decide: the constants of the cost model, which choose the strip height, are
 * replaced by two settings, for low and for tall strips, and the number of threads is what the context has. Threads
 * beyond the caller's are not woken: blocks of C do not depend on which thread computes them.
 *
 * Kernels of other libraries (those that can be missing) are left out: their bits are not this library's. A kernel
 * that the CPU or the build lacks is skipped by name; `make golden` keeps its lines and writes all others anew.
 */
#include "harness.h"
#include "kernel.h"
#include "kernel_factors.h"
#include "operands.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN "tests/golden/cpu_hashes.txt"
enum { CASES = 120, GROUPS = 6, LINES = 512, FIELD = 24 };

static const int THREADS[] = {1, 2, 7, 84};
#define COUNTS COUNT(THREADS)
static const char *const group_names[GROUPS] = {"f32", "bf16", "f16", "mixed", "bsr", "nm"};

typedef struct line {
  char kernel[48];
  int threads;
  char hash[GROUPS][FIELD];
} line;

static line golden[LINES], made[LINES];
static int golden_count, made_count;
static esmm_ctx *contexts[COUNTS];
static th_arena arena_a, arena_b, arena_c;
static float generated[MAX_SIZE * MAX_K], bias[MAX_SIZE];
static double dense[MAX_SIZE * MAX_K], values_b[MAX_SIZE * MAX_K];
static char now[160];

static bool is_hashed(const esmm_kernel *kernel)
{
  return kernel->backend == &esmm_cpu_backend && !kernel->missing;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
  const unsigned char *x = data;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ x[i]) * 0x100000001b3u;
  return hash;
}

/* ---- the products ---- */

static void draw_case(int group, int number, th_rng *rng, test_case *t)
{
  do
    for (int f = 0; f < FACTORS; f++)
      t->level[f] = (uint8_t)th_below(rng, LEVELS[f]);
  while (SIZES_M[t->level[F_M]] * SIZES_N[t->level[F_N]] * SIZES_K[t->level[F_K]] > most_products / 5 ||
         t->level[F_M] * t->level[F_N] * t->level[F_K] == 0);
  static const int formats[GROUPS][2] = {{0, 1}, {0, 1}, {0, 1}, {0, 1}, {1, 7}, {7, COUNT(FORMATS)}};
  t->level[F_FORMAT] = (uint8_t)(formats[group][0] + th_below(rng, formats[group][1] - formats[group][0]));
  if (group < 3)
    t->level[F_DTYPE_A] = t->level[F_DTYPE_B] = (uint8_t)group;
  else if (number % 2 == 0) /* kernels of blocks and groups in bf16 take nothing else */
    t->level[F_DTYPE_A] = t->level[F_DTYPE_B] = group == 3 ? 0 : ESMM_BF16;
  if (number % 4 == 0) /* few rows or columns, for kernels that take nothing else */
    t->level[number % 8 ? F_M : F_N] = (uint8_t)(1 + th_below(rng, 7));
  for (int f = F_DENSITY_A; f <= F_DENSITY_B; f += F_DENSITY_B - F_DENSITY_A) /* not empty */
    t->level[f] = (uint8_t)(1 + th_below(rng, COUNT(DENSITIES) - 1));
  if (t->level[F_ALPHA] == 1) /* 0: no kernel is asked */
    t->level[F_ALPHA] = 3;
  if (t->level[F_PLAIN]) {
    t->level[F_ORDER_C] = t->level[F_DTYPE_C] = t->level[F_BIAS] = t->level[F_ACTIVATION] = t->level[F_ALPHA] = 0;
    t->level[F_BETA] = number % 2 ? 2 : 0;
  }
}

/* Of every m k's of a column, or of the columns that choose together, the first n stay. */
static void fit_groups(esmm_matrix *b, int n, int m)
{
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++)
      if (k % m >= n)
        th_set(b, k, j, 0);
}

/* The context's cost model by which each kernel that has a choice takes low strips, or tall ones. */
static void set_strips(esmm_ctx *ctx, bool tall)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    for (int term = 0; term < ESMM_COST_TERMS; term++)
      ctx->cost[i][term] = term == ESMM_COST_TERMS - 1 ? 0 : (term < 3) == tall ? 1e-15 : 1e-9;
}

static void run_kernel(const esmm_kernel *kernel, esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights,
                       esmm_matrix *c, const unsigned char *before, const esmm_matmul_opts *of, uint64_t *hash)
{
  const size_t bytes = th_matrix_bytes(c), element = th_element_bytes(c->dtype);
  esmm_matmul_opts opts = *of;
  opts.force = kernel->name;
  memcpy(c->data, before, bytes);
  const esmm_status status = esmm_matmul(ctx, a, weights, c, &opts, NULL);
  if (status == ESMM_ERR_UNSUPPORTED)
    return;
  if (status != ESMM_OK)
    fail_msg("%s: %s: %s in %s", kernel->name, esmm_status_str(status), esmm_ctx_error(ctx), now);
  *hash = *hash ? *hash : 0xcbf29ce484222325u;
  for (int64_t i = 0; i < c->rows; i++)
    for (int64_t j = 0; j < c->cols; j++) {
      if (isnan(th_get(c, i, j)))
        fail_msg("%s made a NaN of finite numbers in %s", kernel->name, now);
      *hash = hash_bytes(*hash, (const char *)c->data + (size_t)th_index(c, i, j) * element, element);
    }
}

static void run_case(int group, int number, uint64_t (*hash)[COUNTS])
{
  th_rng rng = {(uint64_t)(group * 1000 + number) * 0x5851f42d4c957f2du + 1};
  test_case t;
  draw_case(group, number, &rng, &t);
  const uint8_t *l = t.level;
  const int64_t m = SIZES_M[l[F_M]], n = SIZES_N[l[F_N]], k = SIZES_K[l[F_K]];
  snprintf(now, sizeof now, "product %d of group %s: m=%d n=%d k=%d", number, group_names[group], (int)m, (int)n,
           (int)k);
  esmm_matrix a, b, c;
  th_matrix_place(&arena_a, &a, m, k, PADS[l[F_PAD_A]], l[F_DTYPE_A], l[F_ORDER_A]);
  th_matrix_place(&arena_b, &b, k, n, PADS[l[F_PAD_B]], l[F_DTYPE_B], l[F_ORDER_B]);
  th_matrix_place(&arena_c, &c, m, n, PADS[l[F_PAD_C]], l[F_DTYPE_C], l[F_ORDER_C]);
  const operand_recipe of_a = {ESMM_OPERAND_A, l[F_KIND_A] % KIND_ACTIVATIONS, DENSITIES[l[F_DENSITY_A]], l[F_INTEGERS],
                               th_next(&rng)};
  make_operand(contexts[0], &of_a, &a, generated, dense);
  const operand_recipe of_b = {ESMM_OPERAND_B, l[F_KIND_B], DENSITIES[l[F_DENSITY_B]], l[F_INTEGERS], th_next(&rng)};
  make_operand(contexts[0], &of_b, &b, generated, values_b);
  const int keep = FORMATS[l[F_FORMAT]].keep, of = FORMATS[l[F_FORMAT]].group;
  if (of > 0)
    fit_groups(&b, keep, of);
  const float alpha = l[F_ALPHA] ? SCALES[l[F_ALPHA]] : 1, beta = SCALES[l[F_BETA]];
  for (int64_t j = 0; j < n; j++)
    bias[j] = (float)th_below(&rng, 4097) / 2048 - 1;
  for (int64_t i = 0; beta != 0 && i < m; i++)
    for (int64_t j = 0; j < n; j++)
      th_set(&c, i, j, (double)th_below(&rng, 4097) / 2048 - 1);
  const esmm_prepare_opts prepare = {.size = sizeof prepare,
                                     .use = l[F_USE],
                                     .max_bytes_ratio = l[F_FORMAT] ? 1e6 : 0,
                                     .format.kind = FORMATS[l[F_FORMAT]].format,
                                     .format.block_rows = FORMATS[l[F_FORMAT]].rows,
                                     .format.block_cols = FORMATS[l[F_FORMAT]].cols,
                                     .format.keep = keep,
                                     .format.group = of,
                                     .format.group_cols = FORMATS[l[F_FORMAT]].group_cols};
  esmm_weights *weights = NULL;
  esmm_pattern *pattern = NULL;
  if (esmm_prepare(contexts[0], &b, &prepare, &weights) != ESMM_OK)
    fail_msg("esmm_prepare: %s in %s", esmm_ctx_error(contexts[0]), now);
  if (PATTERN_ROWS[l[F_PATTERN]] > 0 &&
      esmm_pattern_extract(contexts[0], &a, PATTERN_ROWS[l[F_PATTERN]], &pattern) != ESMM_OK)
    fail_msg("esmm_pattern_extract: %s in %s", esmm_ctx_error(contexts[0]), now);
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = &alpha,
                                 .beta = &beta,
                                 .bias = l[F_BIAS] ? bias : NULL,
                                 .activation = l[F_ACTIVATION],
                                 .a_pattern = pattern};
  unsigned char *before = malloc(th_matrix_bytes(&c));
  assert_non_null(before);
  memcpy(before, c.data, th_matrix_bytes(&c));
  for (int at = 0; at < COUNTS; at++) {
    set_strips(contexts[at], number % 2);
    for (int i = 0; i < esmm_registry_count(); i++)
      if (is_hashed(esmm_registry_at(i)) && esmm_kernel_available(contexts[at], esmm_registry_at(i), NULL, 0))
        run_kernel(esmm_registry_at(i), contexts[at], &a, weights, &c, before, &opts, &hash[i][at]);
  }
  free(before);
  esmm_pattern_free(pattern);
  esmm_weights_free(weights);
}

/* ---- the file ---- */

static line *find_line(line *lines, int count, const char *kernel, int threads)
{
  for (int i = 0; i < count; i++)
    if (strcmp(lines[i].kernel, kernel) == 0 && lines[i].threads == threads)
      return &lines[i];
  return NULL;
}

static void read_golden(void)
{
  char text[512];
  FILE *file = fopen(GOLDEN, "r");
  while (file && fgets(text, sizeof text, file)) {
    line x = {.threads = 0};
    const int read = sscanf(text, "%47s %d %*s %23s %*s %23s %*s %23s %*s %23s %*s %23s %*s %23s", x.kernel, &x.threads,
                            x.hash[0], x.hash[1], x.hash[2], x.hash[3], x.hash[4], x.hash[5]);
    if (x.kernel[0] == '#')
      continue;
    if (read != 2 + GROUPS || golden_count == LINES)
      fail_msg("%s: a kernel, a number of threads and %d hashes were expected: %s", GOLDEN, GROUPS, text);
    golden[golden_count++] = x;
  }
  if (file)
    fclose(file);
}

/* Lines of kernels that could not run here stay as they were, if the registry still has the kernel. */
static void write_golden(void)
{
  FILE *file = fopen(GOLDEN, "w");
  assert_non_null(file);
  fputs("# Hashes of C by kernel, threads and group of products: tests/test_hashes.c. Written by make golden.\n", file);
  for (int i = 0; i < esmm_registry_count(); i++)
    for (int at = 0; at < COUNTS; at++) {
      const char *name = esmm_registry_at(i)->name;
      const line *x = find_line(made, made_count, name, THREADS[at]);
      if (!x && is_hashed(esmm_registry_at(i)))
        x = find_line(golden, golden_count, name, THREADS[at]);
      if (!x)
        continue;
      fprintf(file, "%-26s %2d", x->kernel, x->threads);
      for (int group = 0; group < GROUPS; group++)
        fprintf(file, " %s %s", group_names[group], x->hash[group]);
      fputc('\n', file);
    }
  assert_int_equal(fclose(file), 0);
}

/* ---- the tests ---- */

static void run_all(void)
{
  static uint64_t hash[ESMM_MAX_KERNELS][COUNTS];
  for (int group = 0; group < GROUPS; group++) {
    memset(hash, 0, sizeof hash);
    for (int number = 0; number < CASES; number++)
      run_case(group, number, hash);
    for (int i = 0; i < esmm_registry_count(); i++)
      for (int at = 0; at < COUNTS; at++) {
        const esmm_kernel *kernel = esmm_registry_at(i);
        if (!is_hashed(kernel) || !esmm_kernel_available(contexts[at], kernel, NULL, 0))
          continue;
        line *x = find_line(made, made_count, kernel->name, THREADS[at]);
        x = x ? x : &made[made_count++];
        snprintf(x->kernel, sizeof x->kernel, "%s", kernel->name);
        x->threads = THREADS[at];
        snprintf(x->hash[group], FIELD, hash[i][at] ? "%016llx" : "-", (unsigned long long)hash[i][at]);
      }
  }
}

static int set_up(void **state)
{
  (void)state;
  const size_t padded = (size_t)(MAX_SIZE + 16) * (MAX_K + 16) * sizeof(float);
  for (int at = 0; at < COUNTS; at++) {
    contexts[at] = th_ctx_on("cpu", THREADS[at]);
    contexts[at]->thread_work = 1e-12; /* all of them, for the smallest product */
    contexts[at]->wake_seconds = 1e12; /* and none woken */
  }
  th_arena_create(&arena_a, padded);
  th_arena_create(&arena_b, padded);
  th_arena_create(&arena_c, padded);
  read_golden();
  run_all();
  return 0;
}

static int tear_down(void **state)
{
  (void)state;
  th_arena_free(&arena_a);
  th_arena_free(&arena_b);
  th_arena_free(&arena_c);
  for (int at = 0; at < COUNTS; at++)
    esmm_ctx_free(contexts[at]);
  return 0;
}

static void one_kernel(void **state)
{
  const esmm_kernel *kernel = *state;
  char why[160] = "";
  if (!esmm_kernel_available(contexts[0], kernel, why, sizeof why)) {
    print_message("# %s skipped: %s\n", kernel->name, why);
    skip();
  }
  for (int at = 0; at < COUNTS; at++) {
    const line *got = find_line(made, made_count, kernel->name, THREADS[at]);
    const line *want = find_line(golden, golden_count, kernel->name, THREADS[at]);
    if (!want)
      fail_msg("%s has no line for %s on %d threads: make golden writes it", GOLDEN, kernel->name, THREADS[at]);
    for (int group = 0; group < GROUPS; group++)
      if (strcmp(got->hash[group], want->hash[group]) != 0)
        fail_msg("%s on %d threads: the bits of C changed, first in group %s: hash %s, %s has %s", kernel->name,
                 THREADS[at], group_names[group], got->hash[group], GOLDEN, want->hash[group]);
  }
}

/* A kernel that is removed takes its lines along. */
static void no_line_without_a_kernel(void **state)
{
  (void)state;
  for (int i = 0; i < golden_count; i++) {
    bool known = false;
    for (int x = 0; x < esmm_registry_count(); x++)
      known = known || strcmp(esmm_registry_at(x)->name, golden[i].kernel) == 0;
#ifdef ESMM_PORTABLE
    if (!known && golden[i].threads == 1)
      print_message("# %s skipped: this build has portable kernels only\n", golden[i].kernel);
#else
    if (!known)
      fail_msg("%s has a line for %s, which is no kernel", GOLDEN, golden[i].kernel);
#endif
  }
}

static void written(void **state)
{
  (void)state;
  write_golden();
}

int main(void)
{
  static struct CMUnitTest tests[ESMM_MAX_KERNELS + 1];
  size_t count = 0;
  th_clean_environment();
  th_on_crash(now);
  if (th_env_int("ESMM_GOLDEN_UPDATE", 0) != 0) {
    const struct CMUnitTest update[] = {cmocka_unit_test(written)};
    return cmocka_run_group_tests_name("hashes", update, set_up, tear_down);
  }
  for (int i = 0; i < esmm_registry_count(); i++)
    if (is_hashed(esmm_registry_at(i)))
      tests[count++] = th_test_of(esmm_registry_at(i)->name, one_kernel, esmm_registry_at(i));
  tests[count++] = (struct CMUnitTest)cmocka_unit_test(no_line_without_a_kernel);
  return _cmocka_run_group_tests("hashes", tests, count, set_up, tear_down);
}
