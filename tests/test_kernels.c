/*
 * test_kernels.c: one table over every kernel that the device can run, and over the plan's own choice ("auto").
 *
 * A case is one level of each factor below (shapes, data, orders, dtypes, options). The full product is out of reach,
 * so the test picks cases until, for each kernel, every pair of levels that it can run has been run together: a kernel
 * that fails for one combination of two things is found. Which cases these are follows from a fixed seed and from what
 * the kernels accept. All kernels run every case, so one oracle serves them all.
 *
 * A result is right if each element is within the bound of cli/error_bound.h, if integers come out exact, if the
 * largest error is at most twice that of the dense kernel (see error_factor for what tensor cores do to 16-bit
 * operands), and if nothing but C's elements was written. On a GPU the measure is no kernel but one fp32 chain in the
 * order of k, on the host: cuBLAS splits k at sizes as small as these, and is then better than any sum in order. Its
 * turn is in the benchmark.
 *
 *   ESMM_TEST_CASE=<word printed by a failure>   run that case alone
 *   ESMM_TEST_CASES=n                            at most n cases (sanitizer builds); pairs may then stay open
 *   ESMM_TEST_SECONDS=n                          after so many no more random cases; all pairs are run nevertheless
 *   ESMM_TEST_DEVICE=cuda                        on a GPU, with operands in host and in device memory
 *   ESMM_TEST_REDUCED=1                          a few dozen small random cases, for compute-sanitizer
 */
#include "bench/error_bound.h"
#include "harness.h"
#include "kernel.h"
#include "kernel_factors.h"
#include "operands.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef TABLE_OF
#define TABLE_OF "" /* only kernels with this in their names, as tests.mk builds it; "": all, and auto */
#endif

/* ---- who runs ---- */

typedef struct entrant {
  const char *name; /* a kernel, or "auto" */
  unsigned flags;
  int64_t ran, working, refused, failed; /* cases; working: those with something to compute */
  int64_t open, closed;                  /* pairs of levels not yet run, and given up */
  uint8_t pair[ALL_LEVELS][ALL_LEVELS];  /* 0: open, 1: run, 2: cannot be run */
  uint8_t tries[ALL_LEVELS][ALL_LEVELS];
  int64_t level_tries[ALL_LEVELS], level_runs[ALL_LEVELS];
  test_case good[KEPT_CASES]; /* cases it could run: where the next try starts from */
  char first_failure[900];
} entrant;

static entrant *entrants;
static int entrant_count;
static int first_level[FACTORS + 1];
static th_arena arena_a, arena_b, arena_c, arena_bias;
static th_device_arena device_a, device_b, device_c, device_bias;
static esmm_ctx *contexts[2]; /* of 1 and 2 threads; on a GPU any two */
static bool gpu;
static float *scratch;
static double *da, *db, *sum, *magnitude, *expected, *tolerance, *loose;
static float *chain; /* the sums in one fp32 chain each; on a GPU */
static unsigned char *copy_a, *copy_b, *copy_c, *copy_first;
static char now[1200]; /* what is being done, for a crash and for a failure */

/* ---- one case ---- */

typedef struct product {
  int64_t m, n, k;
  esmm_matrix a, b, c;
  size_t bytes_a, bytes_b, bytes_c;
  float alpha, beta;
  const float *bias;
  esmm_matmul_opts opts;
  esmm_prepare_opts prepare;
  esmm_ctx *ctx;
  esmm_matrix given_a, given_b; /* A and B as the library gets them: here, or copies on the device */
  bool c_on_device;
  bool exact;
  double largest; /* magnitude of the result */
} product;

static int64_t case_products(const test_case *t)
{
  return SIZES_M[level(t, F_M)] * SIZES_N[level(t, F_N)] * SIZES_K[level(t, F_K)];
}

static void describe(const test_case *t, const char *who)
{
  static const char *const kinds[] = {"dense", "random", "strips32", "strips6", "pattern", "bursts", "activations"};
  static const char *const dtypes[] = {"f32", "bf16", "f16"}, *const uses[] = {"any", "decode", "large_m"};
  static const char *const formats[] = {"dense", "bsr", "nm"};
  static const char *const activations[] = {"none", "relu", "relu2"};
  char word[FACTORS + 1];
  case_word(t, word);
  const uint8_t *l = t->level;
  snprintf(now, sizeof now,
           "%s: m=%d n=%d k=%d | A %s density %g %s %s pad %d | B %s density %g %s %s pad %d | C %s %s pad %d | "
           "alpha %g%s beta %g%s bias %d %s | %s %d use %s pattern %d strict %d integers %d %s %dx%d %d:%d:%d plain %d "
           "seed %llx | "
           "ESMM_TEST_CASE=%s",
           who, (int)SIZES_M[l[F_M]], (int)SIZES_N[l[F_N]], (int)SIZES_K[l[F_K]], kinds[l[F_KIND_A]],
           DENSITIES[l[F_DENSITY_A]], dtypes[l[F_DTYPE_A]], l[F_ORDER_A] ? "col" : "row", (int)PADS[l[F_PAD_A]],
           kinds[l[F_KIND_B]], DENSITIES[l[F_DENSITY_B]], dtypes[l[F_DTYPE_B]], l[F_ORDER_B] ? "col" : "row",
           (int)PADS[l[F_PAD_B]], dtypes[l[F_DTYPE_C]], l[F_ORDER_C] ? "col" : "row", (int)PADS[l[F_PAD_C]],
           l[F_ALPHA] ? (double)SCALES[l[F_ALPHA]] : 1, l[F_ALPHA] ? "" : " (NULL)", (double)SCALES[l[F_BETA]],
           l[F_BETA] ? "" : " (NULL)", l[F_BIAS], activations[l[F_ACTIVATION]], gpu ? "on the device" : "threads",
           l[F_THREADS] + !gpu, uses[l[F_USE]], (int)PATTERN_ROWS[l[F_PATTERN]], l[F_STRICT], l[F_INTEGERS],
           formats[FORMATS[l[F_FORMAT]].format], FORMATS[l[F_FORMAT]].rows, FORMATS[l[F_FORMAT]].cols,
           FORMATS[l[F_FORMAT]].keep, FORMATS[l[F_FORMAT]].group, FORMATS[l[F_FORMAT]].group_cols, l[F_PLAIN],
           (unsigned long long)case_seed(t), word);
}

/* Of every m k's of a column, or of the columns that choose together, the first n that have a nonzero stay. */
static void fit_groups(esmm_matrix *b, double *values, int n, int m, int64_t cols)
{
  for (int64_t j0 = 0; j0 < b->cols; j0 += cols)
    for (int64_t k0 = 0, kept = 0; k0 < b->rows; k0++) {
      const int64_t end = j0 + cols < b->cols ? j0 + cols : b->cols;
      bool alive = false;
      kept = k0 % m == 0 ? 0 : kept;
      for (int64_t j = j0; j < end; j++)
        alive = alive || values[k0 * b->cols + j] != 0;
      if (!alive || kept++ < n)
        continue;
      for (int64_t j = j0; j < end; j++) {
        values[k0 * b->cols + j] = 0;
        th_set(b, k0, j, 0);
      }
    }
}

static void make_product(const test_case *t, product *p)
{
  const uint8_t *l = t->level;
  uint64_t seed = case_seed(t);
  th_rng rng = {seed ^ 0x5eed};
  *p = (product){.m = SIZES_M[l[F_M]], .n = SIZES_N[l[F_N]], .k = SIZES_K[l[F_K]], .exact = l[F_INTEGERS]};
  th_matrix_place(&arena_a, &p->a, p->m, p->k, PADS[l[F_PAD_A]], l[F_DTYPE_A], l[F_ORDER_A]);
  th_matrix_place(&arena_b, &p->b, p->k, p->n, PADS[l[F_PAD_B]], l[F_DTYPE_B], l[F_ORDER_B]);
  th_matrix_place(&arena_c, &p->c, p->m, p->n, PADS[l[F_PAD_C]], l[F_DTYPE_C], l[F_ORDER_C]);
  const operand_recipe of_a = {ESMM_OPERAND_A, l[F_KIND_A], DENSITIES[l[F_DENSITY_A]], p->exact, seed};
  make_operand(contexts[0], &of_a, &p->a, scratch, da);
  const operand_recipe of_b = {ESMM_OPERAND_B, l[F_KIND_B], DENSITIES[l[F_DENSITY_B]], p->exact, seed + 1};
  make_operand(contexts[0], &of_b, &p->b, scratch, db);
  const int n = FORMATS[l[F_FORMAT]].keep, m = FORMATS[l[F_FORMAT]].group, cols = FORMATS[l[F_FORMAT]].group_cols;
  if (m > 0)
    fit_groups(&p->b, db, n, m, cols > 1 ? cols : 1);

  p->alpha = l[F_ALPHA] ? SCALES[l[F_ALPHA]] : 1;
  p->beta = SCALES[l[F_BETA]];
  float *bias = th_place(&arena_bias, (size_t)p->n * sizeof *bias);
  for (int64_t j = 0; j < p->n; j++)
    bias[j] = p->exact ? (float)(th_below(&rng, 9) - 4) : (float)(2 * th_unit(&rng) - 1);
  p->bias = l[F_BIAS] ? bias : NULL;
  if (p->beta != 0) /* else C stays NaN, and must not be read */
    for (int64_t i = 0; i < p->m; i++)
      for (int64_t j = 0; j < p->n; j++)
        th_set(&p->c, i, j, p->exact ? (double)(th_below(&rng, 9) - 4) : 2 * th_unit(&rng) - 1);

  p->bytes_a = th_matrix_bytes(&p->a);
  p->bytes_b = th_matrix_bytes(&p->b);
  p->bytes_c = th_matrix_bytes(&p->c);
  memcpy(copy_a, p->a.data, p->bytes_a);
  memcpy(copy_b, p->b.data, p->bytes_b);
  memcpy(copy_c, p->c.data, p->bytes_c);

  p->ctx = contexts[l[F_THREADS] & 1];
  p->given_a = p->a;
  p->given_b = p->b;
  p->c_on_device = gpu && l[F_THREADS] >> 1;
  if (gpu && (l[F_THREADS] & 1)) {
    p->given_a.data = th_device_put(&device_a, p->a.data, p->bytes_a);
    p->given_b.data = th_device_put(&device_b, p->b.data, p->bytes_b);
    p->given_a.place = p->given_b.place = ESMM_DEVICE;
    p->given_a.device = p->given_b.device = th_gpu_ordinal();
  }
  const float *given_bias = p->bias;
  if (p->c_on_device && p->bias)
    given_bias = th_device_put(&device_bias, p->bias, (size_t)p->n * sizeof *p->bias);
  p->opts = (esmm_matmul_opts){.size = sizeof p->opts,
                               .alpha = l[F_ALPHA] ? &p->alpha : NULL,
                               .beta = l[F_BETA] ? &p->beta : NULL,
                               .bias = given_bias,
                               .activation = l[F_ACTIVATION],
                               .strict = l[F_STRICT] >> 1};
  p->prepare = (esmm_prepare_opts){.size = sizeof p->prepare,
                                   .use = l[F_USE],
                                   .strict = l[F_FORMAT] == 0 && (l[F_STRICT] & 1),
                                   .max_bytes_ratio = l[F_FORMAT] ? 1e6 : 0, /* blocks that jut out of a small B */
                                   .format.kind = FORMATS[l[F_FORMAT]].format,
                                   .format.block_rows = FORMATS[l[F_FORMAT]].rows,
                                   .format.block_cols = FORMATS[l[F_FORMAT]].cols,
                                   .format.keep = n,
                                   .format.group = m,
                                   .format.group_cols = cols};
}

/* What is left of an error in x after the activation. */
static double activated(const product *p, double x, double error)
{
  return p->opts.activation == ESMM_ACT_RELU2 ? 2 * x * error + error * error + th_roundoff(ESMM_F32) * x * x : error;
}

/* Fills expected and tolerance: float64, with the error that a sum may have. loose: that of cuBLAS's. */
static void make_expected(product *p)
{
  th_oracle(p->m, p->n, p->k, da, db, sum, magnitude);
  const error_rule rule = {
      .dtype_c = p->c.dtype, .gpu = gpu, .halves = p->a.dtype != ESMM_F32 && p->a.dtype == p->b.dtype};
  error_rule in_parts = rule;
  in_parts.parts = true;
  const double depth = error_depth(&rule, (double)p->k), alpha = (double)p->alpha, beta = (double)p->beta;
  esmm_matrix before = p->c;
  before.data = copy_c;
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      int64_t at = i * p->n + j;
      double old = beta != 0 ? beta * th_get(&before, i, j) : 0, bias = p->bias ? (double)p->bias[j] : 0;
      double x = alpha * sum[at] + old + bias;
      double terms = fabs(alpha) * magnitude[at] + fabs(old) + fabs(bias);
      double error = error_of_sum(&rule, depth, terms), rounded = error_of_sum(&in_parts, depth, terms);
      if (p->opts.activation != ESMM_ACT_NONE && !(x > 0))
        x = 0;
      error = activated(p, x, error);
      rounded = activated(p, x, rounded);
      if (p->opts.activation == ESMM_ACT_RELU2)
        x *= x;
      expected[at] = x;
      tolerance[at] = error_when_stored(&rule, error, x);
      loose[at] = error_when_stored(&in_parts, rounded, x);
      p->largest = fmax(p->largest, fabs(x));
    }
}

/* cuBLAS may split k and then adds parts that it has rounded to a 16-bit C; the plan's choice may be cuBLAS. */
static bool rounds_parts(const product *p, const char *name)
{
  return gpu && p->c.dtype != ESMM_F32 && (strcmp(name, "auto") == 0 || strncmp(name, "cublas", strlen("cublas")) == 0);
}

/* The largest error of C; *wrong is set, and what is wrong written to text, if an element is outside its bound. */
static double check_elements(const product *p, const char *name, bool *wrong, char *text, size_t text_bytes)
{
  const double *bound = rounds_parts(p, name) ? loose : tolerance;
  double worst = 0;
  *wrong = false;
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      double got = th_get(&p->c, i, j), want = expected[i * p->n + j], allowed = bound[i * p->n + j];
      if (p->exact) {
        want = th_round(p->c.dtype, want);
        allowed = 0;
        if (got == want)
          continue; /* also where both are Inf */
      }
      if (isinf(got) && (got > 0) == (want > 0) && fabs(want) + allowed >= th_largest(p->c.dtype))
        continue;
      double error = fabs(got - want);
      worst = fmax(worst, error);
      if (!(error <= allowed) && !*wrong) {
        *wrong = true;
        snprintf(text, text_bytes, "C[%lld,%lld] is %.9g, expected %.9g within %.3g", (long long)i, (long long)j, got,
                 want, allowed);
      }
    }
  return worst;
}

/* Bytes of C that are no elements (between its rows) must be as they were. */
static bool padding_intact(const product *p)
{
  size_t size = th_element_bytes(p->c.dtype);
  int64_t lines = p->c.order == ESMM_ROW_MAJOR ? p->m : p->n, length = p->c.order == ESMM_ROW_MAJOR ? p->n : p->m;
  for (int64_t line = 0; line + 1 < lines; line++) {
    size_t from = (size_t)(line * p->c.ld + length) * size, to = (size_t)((line + 1) * p->c.ld) * size;
    if (length > 0 && memcmp((unsigned char *)p->c.data + from, copy_c + from, to - from) != 0)
      return false;
  }
  return true;
}

static void note_failure(entrant *e, const char *text)
{
  if (e->failed++ < 5)
    print_message("# FAILED %s | %s\n", now, text);
  if (e->first_failure[0] == 0)
    snprintf(e->first_failure, sizeof e->first_failure, "%.640s | %.240s", now, text);
}

/* Levels that leave next to nothing to compute: a pair counts as run only if none but its own two is of this kind. */
static bool is_idle(int f, int l)
{
  switch (f) {
  case F_M:
    return SIZES_M[l] == 0;
  case F_N:
    return SIZES_N[l] == 0;
  case F_K:
    return SIZES_K[l] == 0;
  case F_DENSITY_A:
  case F_DENSITY_B:
    return DENSITIES[l] <= 0;
  case F_ALPHA:
    return l > 0 && SCALES[l] == 0;
  default:
    return false;
  }
}

static int idle_levels(const test_case *t)
{
  int idle = 0;
  for (int f = 0; f < FACTORS; f++)
    idle += is_idle(f, t->level[f]);
  return idle;
}

static void mark_run(entrant *e, const test_case *t)
{
  int idle = idle_levels(t);
  e->ran++;
  if (idle == 0)
    e->good[e->working++ % KEPT_CASES] = *t;
  for (int f = 0; f < FACTORS; f++) {
    int x = first_level[f] + t->level[f];
    e->level_runs[x] += idle == is_idle(f, t->level[f]);
    for (int g = 0; g < f; g++) {
      uint8_t *pair = &e->pair[x][first_level[g] + t->level[g]];
      if (is_idle(f, t->level[f]) + is_idle(g, t->level[g]) < idle)
        continue;
      e->open -= *pair == 0;
      e->closed -= *pair == 2;
      *pair = 1;
    }
  }
}

/* C as it was, then the product into it. *stray: memory around C, or A or its surroundings, was written. */
static esmm_status multiply(product *p, const esmm_weights *weights, const esmm_matmul_opts *opts, esmm_stats *stats,
                            const char **stray)
{
  esmm_matrix c = p->c;
  memcpy(p->c.data, copy_c, p->bytes_c);
  if (p->c_on_device) {
    c.data = th_device_put(&device_c, p->c.data, p->bytes_c);
    c.place = ESMM_DEVICE;
    c.device = th_gpu_ordinal();
  }
  esmm_status status = esmm_matmul(p->ctx, &p->given_a, weights, &c, opts, stats);
  *stray = NULL;
  device_a.ctx = device_c.ctx = p->ctx;
  if (p->c_on_device && !th_device_get(&device_c, p->c.data))
    *stray = "memory around C was written, on the device";
  if (!padding_intact(p) || !th_guards_intact(&arena_c))
    *stray = "memory around C was written";
  if (p->given_a.place == ESMM_DEVICE && !th_device_get(&device_a, p->a.data))
    *stray = "memory around A was written, on the device";
  if (memcmp(p->a.data, copy_a, p->bytes_a) != 0 || !th_guards_intact(&arena_a))
    *stray = "A was written";
  return status;
}

/*
 * How much larger than the dense kernel's an entrant's largest error may be. Tensor cores cut off, where others round,
 * what does not fit when they add products of 16-bit operands: such errors do not cancel. cuBLAS was seen to be off by
 * 4.5 times the error of one fp32 chain (fp16, 17 x 2049 x 16), and our kernels as well. vdpbf16ps rounds both of its
 * products' sums, and its chains are longer: where the dense kernel is one of fp32, as it is for BSR and N:M weights,
 * it was seen to be off by 5 times that one's error (65 x 1025 x 8).
 */
static double error_factor(const entrant *e, const product *p)
{
  const bool halves = gpu && p->a.dtype != ESMM_F32 && p->a.dtype == p->b.dtype;
  if (!gpu && p->prepare.format.kind != ESMM_FORMAT_DENSE && p->a.dtype == ESMM_BF16 && p->b.dtype == ESMM_BF16 &&
      (strstr(e->name, "_bf16_") || strcmp(e->name, "auto") == 0))
    return 8;
  if (halves && strncmp(e->name, "cublas", strlen("cublas")) == 0)
    return 16; /* a library adds in the order it likes */
  return halves && (strstr(e->name, "f16") || strcmp(e->name, "auto") == 0) ? 8 : 2;
}

/* Runs one entrant on a product that is ready; baseline is the dense kernel's largest error, or negative. */
static void run_entrant(entrant *e, const test_case *t, product *p, const esmm_weights *weights, double baseline)
{
  esmm_ctx *ctx = p->ctx;
  esmm_stats stats = {.size = sizeof stats};
  const char *stray;
  bool with_stats = (case_seed(t) & 1) != 0, automatic = strcmp(e->name, "auto") == 0;
  char text[240] = "";
  esmm_matmul_opts opts = p->opts;
  opts.force = automatic ? NULL : e->name;
  describe(t, e->name);
  for (int f = 0; f < FACTORS; f++)
    e->level_tries[first_level[f] + t->level[f]]++;

  esmm_status status = multiply(p, weights, &opts, with_stats ? &stats : NULL, &stray);
  if (stray)
    note_failure(e, stray);
  if (status == ESMM_ERR_UNSUPPORTED) {
    e->refused++;
    if (esmm_ctx_error(ctx)[0] == 0)
      note_failure(e, "refused without saying why");
    if (memcmp(p->c.data, copy_c, p->bytes_c) != 0)
      note_failure(e, "refused, but changed C");
    if (automatic && !p->opts.strict) {
      snprintf(text, sizeof text, "the plan found no kernel: %.160s", esmm_ctx_error(ctx));
      note_failure(e, text);
    }
    return;
  }
  mark_run(e, t);
  if (status != ESMM_OK) {
    snprintf(text, sizeof text, "%s: %.160s", esmm_status_str(status), esmm_ctx_error(ctx));
    note_failure(e, text);
    return;
  }
  bool wrong;
  double worst = check_elements(p, e->name, &wrong, text, sizeof text);
  if (wrong)
    note_failure(e, text);
  /* Largest errors of few elements are luck; with many they are a property of the kernel. */
  if (!wrong && baseline >= 0 && p->m * p->n >= 256) {
    double floor = (gpu && p->k <= 128 ? 16 : 4) * fmax(0x1p-23, 2 * th_roundoff(p->c.dtype)) * p->largest;
    if (!(worst <= error_factor(e, p) * baseline + floor)) {
      snprintf(text, sizeof text, "largest error %.3g, the dense kernel's is %.3g", worst, baseline);
      note_failure(e, text);
    }
  }
  if (with_stats) {
    double flop = 2.0 * (double)p->m * (double)p->n * (double)p->k;
    bool nothing = flop == 0 || p->alpha == 0;
    if (nothing ? strcmp(stats.kernel, "none") != 0 : !automatic && strcmp(stats.kernel, e->name) != 0)
      note_failure(e, "stats.kernel is not the forced kernel");
    if (stats.flop_dense != flop || !(stats.flop_useful >= 0 && stats.flop_useful <= flop * 1.0001))
      note_failure(e, "stats: useful and dense FLOP do not fit");
  }
  if ((e->flags & ESMM_KERNEL_DETERMINISTIC) && (case_seed(t) & 6) == 0) {
    memcpy(copy_first, p->c.data, p->bytes_c);
    status = multiply(p, weights, &opts, NULL, &stray);
    if (status != ESMM_OK || memcmp(copy_first, p->c.data, p->bytes_c) != 0)
      note_failure(e, "the second run gave other bits");
  }
}

/* Leaves C as sums in one fp32 chain each would; returns its largest error. */
static double chain_error(product *p)
{
  esmm_matrix before = p->c;
  bool wrong;
  char text[240];
  before.data = copy_c;
  th_chain(p->m, p->n, p->k, da, db, chain);
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      float x = (float)p->alpha * chain[i * p->n + j];
      if (p->beta != 0)
        x += (float)p->beta * (float)th_get(&before, i, j);
      x += p->bias ? p->bias[j] : 0;
      if (p->opts.activation != ESMM_ACT_NONE && !(x > 0))
        x = 0;
      th_set(&p->c, i, j, p->opts.activation == ESMM_ACT_RELU2 ? x * x : x);
    }
  const double worst = check_elements(p, "chain", &wrong, text, sizeof text);
  if (wrong)
    fail_msg("one fp32 chain: %s in %s", text, now);
  return worst;
}

/* The dense kernel's largest error on this product, or -1 where there is none to compare with. */
static double dense_error(product *p)
{
  esmm_weights *weights = NULL;
  esmm_matmul_opts opts = p->opts;
  opts.force = "dense";
  opts.strict = 0;
  opts.a_pattern = NULL;
  esmm_prepare_opts prepare = {.size = sizeof prepare, .use = ESMM_USE_LARGE_M};
  const char *stray;
  double worst = -1;
  if (p->exact || p->m * p->n < 256)
    return worst;
  if (gpu)
    return chain_error(p);
  if (esmm_prepare(p->ctx, &p->given_b, &prepare, &weights) != ESMM_OK)
    return worst;
  if (multiply(p, weights, &opts, NULL, &stray) == ESMM_OK) {
    bool wrong;
    char text[240];
    worst = check_elements(p, "dense", &wrong, text, sizeof text);
    worst = wrong ? -1 : worst; /* reported when the dense kernel's own turn comes */
  }
  esmm_weights_free(weights);
  return worst;
}

static void run_case(const test_case *t)
{
  product p;
  esmm_weights *weights = NULL;
  esmm_pattern *pattern = NULL;
  describe(t, "prepare");
  make_product(t, &p);
  make_expected(&p);
  esmm_ctx *ctx = p.ctx;
  esmm_status status = esmm_prepare(ctx, &p.given_b, &p.prepare, &weights);
  if (status != ESMM_OK)
    fail_msg("esmm_prepare: %s: %s in %s", esmm_status_str(status), esmm_ctx_error(ctx), now);
  if (memcmp(p.b.data, copy_b, p.bytes_b) != 0 || !th_guards_intact(&arena_b))
    fail_msg("esmm_prepare wrote B in %s", now);
  int64_t rows = PATTERN_ROWS[level(t, F_PATTERN)];
  if (rows > 0) {
    status = esmm_pattern_extract(ctx, &p.given_a, rows, &pattern);
    if (status != ESMM_OK)
      fail_msg("esmm_pattern_extract: %s in %s", esmm_ctx_error(ctx), now);
  }
  p.opts.a_pattern = pattern;
  double baseline = dense_error(&p);
  memset(p.b.data, 0xff, p.bytes_b); /* prepared weights hold no pointer to B */
  if (p.given_b.place == ESMM_DEVICE) {
    bool intact = th_device_get(&device_b, copy_first);
    if (!intact || memcmp(copy_first, copy_b, p.bytes_b) != 0)
      fail_msg("B was written on the device in %s", now);
    th_device_put(&device_b, p.b.data, p.bytes_b);
  }
  for (int i = 0; i < entrant_count; i++)
    run_entrant(&entrants[i], t, &p, weights, baseline);
  esmm_pattern_free(pattern);
  esmm_weights_free(weights);
}

/* ---- which cases ---- */

static bool is_plain(int f, int l)
{
  switch (f) {
  case F_ORDER_C:
  case F_DTYPE_C:
  case F_BIAS:
  case F_ACTIVATION:
    return l == 0;
  case F_ALPHA:
    return l == 0 || SCALES[l] == 1;
  case F_BETA:
    return SCALES[l] == 0 || SCALES[l] == 1;
  default:
    return true;
  }
}

/* F_PLAIN speaks for six other factors: they follow it, unless a pinned one contradicts. pinned may be NULL. */
static void settle(test_case *t, const bool *pinned)
{
  if (!t->level[F_PLAIN])
    return;
  for (int f = 0; f < FACTORS; f++)
    if (!is_plain(f, t->level[f])) {
      if (pinned && pinned[f])
        t->level[F_PLAIN] = 0;
      else
        t->level[f] = 0;
    }
}

static void random_case(th_rng *rng, test_case *t)
{
  do
    for (int f = 0; f < FACTORS; f++)
      t->level[f] = (uint8_t)th_below(rng, LEVELS[f]);
  while (case_products(t) > most_products);
  settle(t, NULL);
}

/* An open pair of e, from a random place on; false when there is none. */
static bool open_pair(const entrant *e, th_rng *rng, int *f, int *lf, int *g, int *lg)
{
  int all = first_level[FACTORS], start = (int)th_below(rng, all);
  for (int step = 0; step < all; step++) {
    int x = (start + step) % all, fx = 0;
    while (x >= first_level[fx + 1])
      fx++;
    for (int y = 0; y < first_level[fx]; y++)
      if (e->pair[x][y] == 0) {
        int fy = 0;
        while (y >= first_level[fy + 1])
          fy++;
        *f = fx, *lf = x - first_level[fx], *g = fy, *lg = y - first_level[fy];
        return true;
      }
  }
  return false;
}

/* Gives each factor that is not fixed the level that closes most pairs with those that are, at random among equals. */
static void fill_greedily(const entrant *e, th_rng *rng, test_case *t, const bool *pinned)
{
  bool fixed[FACTORS];
  memcpy(fixed, pinned, sizeof fixed);
  int start = (int)th_below(rng, FACTORS);
  for (int step = 0; step < FACTORS; step++) {
    int f = (start + step * 7) % FACTORS; /* 7 and FACTORS have no common divisor: every factor once */
    if (fixed[f])
      continue;
    int best = 0;
    int64_t best_gain = -1;
    for (int l = 0; l < LEVELS[f]; l++) {
      int x = first_level[f] + l;
      if (is_idle(f, l) || (e->level_tries[x] > 20 && e->level_runs[x] == 0))
        continue; /* the latter: it seems to refuse this one always */
      int64_t gain = 0;
      for (int g = 0; g < FACTORS; g++)
        if (fixed[g]) {
          int y = first_level[g] + t->level[g];
          gain += e->pair[x > y ? x : y][x > y ? y : x] == 0;
        }
      gain = gain * 1024 + th_below(rng, 1024);
      if (gain > best_gain) {
        best_gain = gain;
        best = l;
      }
    }
    t->level[f] = (uint8_t)best;
    fixed[f] = true;
  }
  settle(t, pinned);
  while (case_products(t) > most_products) { /* m, n, k: two of them may be pinned, never three */
    int f = (int)th_below(rng, 3);
    if (!pinned[f])
      t->level[f] = (uint8_t)(1 + th_below(rng, LEVELS[f] - 1)); /* not 0 */
  }
}

static void close_pair(entrant *e, int x, int y)
{
  uint8_t *pair = &e->pair[x > y ? x : y][x > y ? y : x];
  if (*pair == 0) {
    *pair = 2;
    e->open--;
    e->closed++;
  }
}

/* Tries to close one open pair of e. What e refuses ten times, starting from cases it runs, it cannot run. */
static void next_case(entrant *e, th_rng *rng)
{
  int f, lf, g, lg;
  if (!open_pair(e, rng, &f, &lf, &g, &lg))
    return;
  int x = first_level[f] + lf, y = first_level[g] + lg;
  uint8_t tries = e->tries[x][y]++;
  bool pinned[FACTORS] = {false};
  pinned[f] = pinned[g] = true;
  test_case t = {{0}};
  if (tries == 0 || e->working == 0) {
    t.level[f] = (uint8_t)lf;
    t.level[g] = (uint8_t)lg;
    fill_greedily(e, rng, &t, pinned);
  } else {
    t = e->good[th_below(rng, e->working < KEPT_CASES ? e->working : KEPT_CASES)];
    t.level[f] = (uint8_t)lf;
    t.level[g] = (uint8_t)lg;
    settle(&t, pinned);
    for (int h = F_M; h <= F_K && case_products(&t) > most_products; h++)
      if (h != f && h != g)
        t.level[h] = (uint8_t)(1 + th_below(rng, LEVELS[h] < 9 ? LEVELS[h] - 1 : 8));
  }
  run_case(&t);
  if (e->pair[x][y] == 0 && tries >= 10)
    close_pair(e, x, y);
  for (int side = 0; side < 2; side++) {
    int z = side ? x : y;
    if (e->level_runs[z] > 0 || e->level_tries[z] < 60)
      continue;
    for (int h = 0; h < FACTORS; h++)
      for (int l = 0; l < LEVELS[h]; l++)
        if (!is_idle(h, l)) /* where nothing is to be computed, no kernel is asked */
          close_pair(e, z, first_level[h] + l);
  }
}

static bool reduced(void)
{
  return th_env_int("ESMM_TEST_REDUCED", 0) != 0;
}

static void run_table(void)
{
  const char *word = getenv("ESMM_TEST_CASE");
  int64_t most = th_env_int("ESMM_TEST_CASES", reduced() ? REDUCED_CASES : 20000), cases = 0;
  const time_t end = time(NULL) + (time_t)th_env_int("ESMM_TEST_SECONDS", 1 << 30);
  if (word && *word) {
    test_case t;
    if (!case_from_word(word, &t))
      fail_msg("ESMM_TEST_CASE=%s is not a case of this table", word);
    run_case(&t);
    print_message("# %s\n", now);
    return;
  }
  th_rng rng = {20240607};
  for (; cases < 60 && cases < most; cases++) { /* what the kernels accept shows first */
    test_case t;
    random_case(&rng, &t);
    run_case(&t);
  }
  for (bool open = true; open && cases < most;) {
    open = false;
    for (int i = 0; i < entrant_count && cases < most; i++)
      if (entrants[i].open > 0) {
        next_case(&entrants[i], &rng);
        cases++;
        open = true;
      }
  }
  /* Three things at once: random cases, for as many again. */
  for (int64_t random = cases; random > 0 && cases < most && time(NULL) < end; random--, cases++) {
    test_case t;
    do
      random_case(&rng, &t);
    while (idle_levels(&t) > 0);
    run_case(&t);
  }
  print_message("# %lld cases\n", (long long)cases);
}

/* ---- the tests ---- */

static void one_entrant(void **state)
{
  const entrant *e = *state;
  const char *word = getenv("ESMM_TEST_CASE");
  print_message("# %-22s %5lld cases, refused %lld; pairs of levels it cannot run: %lld, not reached: %lld\n", e->name,
                (long long)e->ran, (long long)e->refused, (long long)e->closed, (long long)e->open);
  if (e->failed > 0)
    fail_msg("%s failed %lld times, first: %s", e->name, (long long)e->failed, e->first_failure);
  if (word && *word)
    return;
  if (e->ran == 0)
    fail_msg("%s ran no case", e->name);
  if (e->open > 0 && !reduced() && th_env_int("ESMM_TEST_CASES", 0) == 0)
    fail_msg("%s: %lld pairs of levels were not reached", e->name, (long long)e->open);
}

/* formats: bit f for weights of esmm_format_kind f; the others are not tried more than the rest of the table does */
static void add_entrant(const char *name, unsigned flags, unsigned formats)
{
  entrant *e = &entrants[entrant_count++];
  e->name = name;
  e->flags = flags;
  memset(e->pair, 1, sizeof e->pair);
  for (int f = 0; f < FACTORS; f++)
    for (int x = first_level[f]; x < first_level[f + 1]; x++)
      for (int g = 0; g < f; g++)
        for (int l = 0; l < LEVELS[g]; l++) {
          if (f == F_PLAIN && x > first_level[f] && !is_plain(g, l))
            continue; /* they contradict each other */
          e->pair[x][first_level[g] + l] = 0;
          e->open++;
        }
  for (int l = 0; l < LEVELS[F_FORMAT]; l++)
    if (!(formats >> FORMATS[l].format & 1)) {
      e->level_tries[first_level[F_FORMAT] + l] = 1000; /* as if it had refused so often */
      for (int x = 0; x < first_level[FACTORS]; x++)
        if (x < first_level[F_FORMAT] || x >= first_level[F_FORMAT + 1])
          close_pair(e, x, first_level[F_FORMAT] + l);
    }
}

static void *numbers(size_t count, size_t size)
{
  void *p = malloc(count * size);
  assert_non_null(p);
  return p;
}

static int set_up(void **state)
{
  (void)state;
  const size_t elements = (size_t)MAX_SIZE * MAX_K, outputs = (size_t)MAX_SIZE * MAX_SIZE;
  const size_t padded = (size_t)(MAX_SIZE + 16) * (MAX_K + 16) * sizeof(float);
  if (gpu) {
    th_device_arena_create(&device_a, contexts[0], padded);
    th_device_arena_create(&device_b, contexts[0], padded);
    th_device_arena_create(&device_c, contexts[0], padded);
    th_device_arena_create(&device_bias, contexts[0], MAX_SIZE * sizeof(float));
  }
  th_arena_create(&arena_a, padded);
  th_arena_create(&arena_b, padded);
  th_arena_create(&arena_c, padded);
  th_arena_create(&arena_bias, MAX_SIZE * sizeof(float));
  da = numbers(elements, sizeof *da);
  db = numbers(elements, sizeof *db);
  scratch = numbers(elements, sizeof *scratch);
  sum = numbers(outputs, sizeof *sum);
  chain = numbers(outputs, sizeof *chain);
  magnitude = numbers(outputs, sizeof *magnitude);
  expected = numbers(outputs, sizeof *expected);
  tolerance = numbers(outputs, sizeof *tolerance);
  loose = numbers(outputs, sizeof *loose);
  copy_a = numbers(padded, 1);
  copy_b = numbers(padded, 1);
  copy_c = numbers(padded, 1);
  copy_first = numbers(padded, 1);
  run_table();
  return 0;
}

static int tear_down(void **state)
{
  (void)state;
  void *const all[] = {da,        db,    scratch, sum,    chain,  magnitude, expected,
                       tolerance, loose, copy_a,  copy_b, copy_c, copy_first};
  for (int i = 0; i < COUNT(all); i++)
    free(all[i]);
  th_arena_free(&arena_a);
  th_arena_free(&arena_b);
  th_arena_free(&arena_c);
  th_arena_free(&arena_bias);
  th_device_arena *const on_device[] = {&device_a, &device_b, &device_c, &device_bias};
  for (int i = 0; gpu && i < 4; i++)
    th_device_arena_free(on_device[i]);
  for (int i = 0; i < 2; i++)
    esmm_ctx_free(contexts[i]);
  return 0;
}

static void choose_sizes(void)
{
  if (gpu) {
    SIZES_M = SIZES_N = GPU_MN;
    SIZES_K = GPU_K;
    LEVELS[F_M] = LEVELS[F_N] = COUNT(GPU_MN);
    LEVELS[F_K] = COUNT(GPU_K);
    LEVELS[F_THREADS] = 4;
    LEVELS[F_FORMAT] = 1; /* a GPU has the others in some dtypes only: test_cuda_formats.c */
    most_products = 20000000;
  }
  if (reduced()) {
    SIZES_M = SIZES_N = FEW_MN;
    SIZES_K = FEW_K;
    LEVELS[F_M] = LEVELS[F_N] = COUNT(FEW_MN);
    LEVELS[F_K] = COUNT(FEW_K);
  }
}

int main(void)
{
  static struct CMUnitTest tests[MAX_ENTRANTS];
  th_clean_environment();
  th_on_crash(now);
  gpu = th_on_gpu();
  choose_sizes();
  for (int i = 0; i < 2; i++)
    contexts[i] = th_ctx(i + 1);
  for (int f = 0; f < FACTORS; f++)
    first_level[f + 1] = first_level[f] + LEVELS[f];
  if (first_level[FACTORS] > ALL_LEVELS || esmm_kernel_count() + 1 > MAX_ENTRANTS) {
    fprintf(stderr, "test_kernels: ALL_LEVELS or MAX_ENTRANTS is too small\n");
    return 1;
  }
  entrants = calloc(MAX_ENTRANTS, sizeof *entrants);
  if (!entrants)
    return 1;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(contexts[0], i, &info) != ESMM_OK || !strstr(info.name, TABLE_OF) ||
        (gpu && !(info.formats & 1u << ESMM_FORMAT_DENSE)))
      continue;
    if (!info.available) {
      char why[160] = "";
      (void)esmm_kernel_available(contexts[0], esmm_registry_at(i), why, sizeof why);
      if (strcmp(info.backend, gpu ? "cuda" : "cpu") == 0)
        print_message("# %-22s skipped: %s\n", info.name, why);
      continue;
    }
    add_entrant(info.name, info.flags, info.formats);
  }
  if (!*TABLE_OF)
    add_entrant("auto", ESMM_KERNEL_DETERMINISTIC, ~0u);
  for (int i = 0; i < entrant_count; i++)
    tests[i] = (struct CMUnitTest){.name = entrants[i].name, .test_func = one_entrant, .initial_state = &entrants[i]};
  int failed = _cmocka_run_group_tests("kernels", tests, (size_t)entrant_count, set_up, tear_down);
  free(entrants);
  return failed;
}
