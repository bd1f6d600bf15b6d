/*
 * random_product.c: one esmm_matmul with options in any mix, against sums in float64. Numbers whose sums are exact must
 * come out exactly; the others within the bound of docs/numerics.md, written anew here.
 */
#include "bounded.h"
#include "bsr_arrays.h"
#include "cuts.h"
#include "random_calls.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Everything one product has: what the library gets, and what the expectation is made of. */
typedef struct product {
  const held *b, *gate;
  esmm_matrix a, c, residual;
  int64_t m, n, k;
  const double *values_a;
  float alpha, beta, *bias, *gate_bias;
  double *old, *extra; /* C before, the residual: NULL where they do not count */
  value_kind kind;
  esmm_matmul_opts opts;
  esmm_pattern *given, *made;
  int32_t *nonzeros;
  unsigned char *before; /* C's bytes */
  arrays blocks;         /* A's, for esmm_matmul_bsr */
  bool as_blocks;
  char force[64];
} product;

/* ---- sums ---- */

/* Of one branch: the sum, that of magnitudes, and how many zeros meet Inf or NaN, which may be part of the sum. */
typedef struct sums {
  double *is, *magnitude;
  int *hidden;
} sums;

static void add_up(const product *p, const held *b, sums *s)
{
  const size_t size = (size_t)(p->m * p->n + 1);
  *s = (sums){calloc(size, sizeof(double)), calloc(size, sizeof(double)), calloc(size, sizeof(int))};
  assert_true(s->is && s->magnitude && s->hidden);
  if (p->alpha == 0)
    return;
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t k = 0; k < p->k; k++) {
      const double x = p->values_a[i * p->k + k], *row = b->values + k * p->n;
      if (p->kind == SPECIAL) {
        for (int64_t j = 0; j < p->n; j++) {
          if ((x == 0 && !isfinite(row[j])) || (row[j] == 0 && !isfinite(x)))
            s->hidden[i * p->n + j]++;
          else if (x != 0 && row[j] != 0)
            s->is[i * p->n + j] += x * row[j];
        }
      } else if (x != 0 && p->kind == WHOLE) {
        for (int64_t j = 0; j < p->n; j++)
          s->is[i * p->n + j] += x * row[j];
      } else if (x != 0) {
        for (int64_t j = 0; j < p->n; j++) {
          s->is[i * p->n + j] += x * row[j];
          s->magnitude[i * p->n + j] += fabs(x * row[j]);
        }
      }
    }
}

static void free_sums(sums *s)
{
  free(s->is);
  free(s->magnitude);
  free(s->hidden);
}

/* ---- what an element of C should be ---- */

static number branch(const product *p, const sums *s, int64_t at, bool hidden, float beta, const float *bias)
{
  const double old = beta != 0 ? p->old[at] : 0;
  const double more = bias ? (double)bias[at % p->n] : 0;
  number x = {(double)p->alpha * s->is[at] + (double)beta * old + more, 0};
  if (hidden)
    x.is = NAN;
  if (p->kind == REAL) { /* a library's kernel may add in any order */
    const double k = (double)p->k,
                 all = fabs((double)p->alpha) * s->magnitude[at] + fabs((double)beta * old) + fabs(more);
    x.error = (2 * k + 20) * UNIT * all;
  }
  return x;
}

static bool is_right(const product *p, double got, number want)
{
  if (isnan(want.is))
    return isnan(got);
  if (want.error == 0)
    return got == th_round(p->c.dtype, want.is);
  const double most = fabs(want.is) + want.error, u = p->c.dtype == ESMM_F32 ? 0 : th_roundoff(p->c.dtype);
  if (isinf(got))
    return most * (1 + u) >= th_largest(p->c.dtype) && (got > 0) == (want.is > 0);
  const double subnormal = p->c.dtype == ESMM_F16 ? 0x1p-25 : p->c.dtype == ESMM_BF16 ? 0x1p-134 : 0x1p-150;
  return fabs(got - want.is) <= want.error + u * most + subnormal;
}

static number expected(const product *p, const sums *s, const sums *gate, int64_t at, bool hidden)
{
  const esmm_activation act = p->opts.activation;
  number y = branch(p, s, at, hidden, p->beta, p->bias);
  const bool exact = y.error == 0 && (act == ESMM_ACT_NONE || act == ESMM_ACT_RELU) && !p->gate;
  if (isnan(y.is))
    return y;
  if (exact) {
    y.is = act == ESMM_ACT_RELU && y.is < 0 ? 0 : y.is;
    y.is += p->extra ? p->extra[at] : 0;
    return y;
  }
  if (p->gate)
    y = times(activated(act, branch(p, gate, at, false, 0, p->gate_bias)), y);
  else
    y = activated(act, y);
  return p->extra ? plus(y, p->extra[at]) : rounded(y);
}

static void compare(world *w, const product *p)
{
  sums s, gate = {0};
  add_up(p, p->b, &s);
  if (p->gate)
    add_up(p, p->gate, &gate);
  for (int64_t i = 0; i < p->m; i++)
    for (int64_t j = 0; j < p->n; j++) {
      const int64_t at = i * p->n + j;
      const double got = th_get(&p->c, i, j);
      const bool hidden = s.hidden[at] > 0;
      if (is_right(p, got, expected(p, &s, &gate, at, hidden && p->opts.strict)) ||
          (hidden && is_right(p, got, expected(p, &s, &gate, at, true))))
        continue;
      const number want = expected(p, &s, &gate, at, hidden && p->opts.strict);
      fail_msg("%s: C[%d,%d] is %.9g, expected %.9g give or take %.3g", w->now, (int)i, (int)j, got, want.is,
               want.error);
    }
  free_sums(&s);
  if (p->gate)
    free_sums(&gate);
}

/* ---- statistics: of C as it is stored ---- */

static void compare_statistics(world *w, const product *p)
{
  for (int64_t j = 0; p->nonzeros && j < p->n; j++) {
    int32_t count = 0;
    for (int64_t i = 0; i < p->m; i++)
      count += th_get(&p->c, i, j) != 0;
    if (p->nonzeros[j] != count)
      fail_msg("%s: column %d has %d nonzeros counted, and %d", w->now, (int)j, p->nonzeros[j], count);
  }
  if (!p->made)
    return;
  const esmm_pattern_info info = th_pattern(w->ctx, p->made);
  const int64_t strip = p->opts.c_strip_rows ? p->opts.c_strip_rows : 8;
  if (info.rows != p->m || info.k != p->n || info.strip_rows != strip)
    fail_msg("%s: c_pattern is of %d x %d in strips of %d", w->now, (int)info.rows, (int)info.k, (int)info.strip_rows);
  uint64_t *bits = th_pattern_bits(w->ctx, p->made);
  for (int64_t at = 0; at < info.strips; at++)
    for (int64_t j = 0; j < p->n; j++) {
      bool alive = false;
      for (int64_t i = at * strip; i < (at + 1) * strip && i < p->m; i++)
        alive |= th_get(&p->c, i, j) != 0;
      if ((bits[at * info.words + j / 64] >> j % 64 & 1) != alive)
        fail_msg("%s: c_pattern has k %d of strip %d wrong", w->now, (int)j, (int)at);
    }
  free(bits);
}

/* ---- options ---- */

static float one_of(world *w, const float *choices, int64_t count)
{
  return choices[below(w, count)];
}

static float *draw_bias(world *w, int64_t n)
{
  float *bias = calloc((size_t)n + 1, sizeof *bias);
  assert_non_null(bias);
  for (int64_t j = 0; j < n; j++)
    bias[j] = (float)(below(w, 17) - 8) / 2;
  return bias;
}

static void pick_force(world *w, product *p)
{
  static const char *const ideas[] = {"dense", "joint", "rows", "decode", "dots", "direct", "bsr", "nm"};
  if (chance(w, 0.2)) {
    strcpy(p->force, ideas[below(w, 8)]);
  } else {
    const int count = esmm_kernel_count();
    const int64_t first = below(w, count);
    for (int64_t i = 0; i < count && !p->force[0]; i++) {
      esmm_kernel_info info = {.size = sizeof info};
      must_be(w, esmm_kernel_get(w->ctx, (int)((first + i) % count), &info), ESMM_OK);
      if (info.available && info.formats >> p->b->format.kind & 1)
        snprintf(p->force, sizeof p->force, "%s", info.name);
    }
  }
  p->opts.force = p->force[0] ? p->force : NULL;
  say(w, ", by %s", p->force);
}

static void draw_options(world *w, product *p)
{
  static const float alphas[] = {0.5f, -1, 2, 0}, betas[] = {1, 0.5f, -1, 2};
  const int64_t elements = p->m * p->n;
  p->opts = (esmm_matmul_opts){.size = sizeof p->opts};
  p->alpha = chance(w, 0.25) ? one_of(w, alphas, 4) : 1;
  p->beta = chance(w, 0.35) ? one_of(w, betas, 4) : 0;
  p->opts.alpha = p->alpha != 1 || chance(w, 0.2) ? &p->alpha : NULL;
  p->opts.beta = p->beta != 0 || chance(w, 0.2) ? &p->beta : NULL;
  if (chance(w, 0.3))
    p->opts.bias = p->bias = draw_bias(w, p->n);
  if (chance(w, 0.35))
    p->opts.activation = p->kind == SPECIAL || chance(w, 0.5) ? ESMM_ACT_RELU : (esmm_activation)below(w, 6);
  if (p->kind != SPECIAL && p->k && p->n && chance(w, 0.06)) {
    p->gate = any_weights(w, p->k, p->n, p->b);
    p->gate = p->gate->kind != SPECIAL ? p->gate : NULL;
    if (p->gate && p->gate->kind == REAL)
      p->kind = REAL;
    p->opts.gate = p->gate ? p->gate->weights : NULL;
    if (p->gate && chance(w, 0.5))
      p->opts.gate_bias = p->gate_bias = draw_bias(w, p->n);
  }
  /* C's old values count for beta, and for a residual that is C. */
  const bool in_place = chance(w, 0.1);
  for (int64_t i = 0; i < elements; i++)
    w->values[FOR_C][i] = p->beta != 0 || in_place ? (double)(below(w, 9) - 4) : NAN;
  p->c = place_values(w, FOR_C, p->m, p->n, any_dtype(w), w->values[FOR_C]);
  p->old = w->values[FOR_C];
  if (in_place) {
    p->opts.residual = &p->c;
    p->extra = p->old;
  } else if (chance(w, 0.12)) {
    for (int64_t i = 0; i < elements; i++)
      w->values[FOR_RESIDUAL][i] = (double)(below(w, 9) - 4);
    p->residual = place_values(w, FOR_RESIDUAL, p->m, p->n, any_dtype(w), w->values[FOR_RESIDUAL]);
    p->opts.residual = &p->residual;
    p->extra = w->values[FOR_RESIDUAL];
  }
  if (chance(w, 0.2))
    p->opts.column_nonzeros = p->nonzeros = calloc((size_t)p->n + 1, sizeof *p->nonzeros);
  if (chance(w, 0.1)) {
    p->opts.c_pattern = &p->made;
    p->opts.c_strip_rows = chance(w, 0.3) ? 0 : 1 + below(w, 40);
  }
  p->opts.strict = p->b->format.kind == ESMM_FORMAT_DENSE && (!p->gate || p->gate->format.kind == ESMM_FORMAT_DENSE) &&
                   p->b->strict && (!p->gate || p->gate->strict) && chance(w, p->kind == SPECIAL ? 0.5 : 0.05);
  if (p->kind == SPECIAL && p->opts.strict)
    say(w, " (strict)");
  say(w, ": alpha %g beta %g%s act %d%s%s%s%s", (double)p->alpha, (double)p->beta, p->bias ? " bias" : "",
      (int)p->opts.activation, p->gate ? " gate" : "", p->extra ? in_place ? " residual C" : " residual" : "",
      p->nonzeros ? " counts" : "", p->opts.c_pattern ? " pattern" : "");
  say(w, ", C %s%s ld %d", esmm_dtype_str(p->c.dtype), p->c.order == ESMM_COL_MAJOR ? " cols" : "", (int)p->c.ld);
}

/* ---- the call ---- */

/* Is the product cut into more than one block along m, n or k, or shared out to threads? */
static bool is_across(const world *w, const product *p, const esmm_stats *stats)
{
  if (stats->threads > 1)
    return true;
  esmm_problem problem = {.ctx = w->ctx, .m = p->m, .n = p->n, .k = p->k, .a = p->a, .c = p->c, .w = p->b->weights};
  problem.alpha = p->alpha;
  problem.beta = p->beta;
  problem.threads = 1;
  esmm_sample_fill(&problem.sample, stats->density_a);
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(esmm_registry_at(i)->name, stats->kernel) == 0)
      return cuts_any(esmm_registry_at(i), &problem);
  return false;
}

static void check_stats(world *w, const product *p, const esmm_stats *stats)
{
  const double dense = 2.0 * (double)p->m * (double)p->n * (double)p->k * (p->gate ? 2 : 1);
  if (stats->flop_useful > stats->flop_dense * (1 + 1e-12) || (stats->flop_dense != 0 && stats->flop_dense != dense))
    fail_msg("%s: statistics say %.9g useful of %.9g FLOP; the product has %.9g", w->now, stats->flop_useful,
             stats->flop_dense, dense);
  w->across += is_across(w, p, stats);
}

static esmm_status multiply(world *w, product *p, esmm_stats *stats)
{
  return p->as_blocks ? esmm_matmul_bsr(w->ctx, &p->blocks.b, p->b->weights, &p->c, &p->opts, stats)
                      : esmm_matmul(w->ctx, &p->a, p->b->weights, &p->c, &p->opts, stats);
}

static bool run(world *w, product *p)
{
  const size_t bytes = th_matrix_bytes(&p->c);
  esmm_stats stats = {.size = sizeof stats};
  const bool wants_stats = chance(w, 0.7);
  p->before = malloc(bytes + 1);
  assert_non_null(p->before);
  memcpy(p->before, p->c.data, bytes);
  if (chance(w, 0.03)) {
    esmm_verdict verdicts[100];
    int count = 100;
    const esmm_status status =
        esmm_explain(w->ctx, &p->a, p->b->weights, &p->c, &p->opts, verdicts, sizeof *verdicts, &count);
    if (status != ESMM_OK && status != ESMM_ERR_UNSUPPORTED)
      must_be(w, status, ESMM_OK);
  }
  w->fail_in = chance(w, 0.03) ? 1 + (int)below(w, 4) : 0;
  esmm_status status = multiply(w, p, wants_stats ? &stats : NULL);
  w->fail_in = 0;
  if (w->failed) {
    must_be(w, status, ESMM_ERR_MEMORY);
    if (memcmp(p->before, p->c.data, bytes) != 0 || p->made)
      fail_msg("%s: without memory C was changed, or a pattern left", w->now);
    w->failed = false;
    status = multiply(w, p, wants_stats ? &stats : NULL);
  }
  if (!(status == ESMM_ERR_UNSUPPORTED && p->opts.force))
    must_be(w, status, ESMM_OK);
  if (!th_guards_intact(&w->arena[FOR_C]) || !padding_intact(&p->c))
    fail_msg("%s: wrote beside C", w->now);
  if (status == ESMM_OK && wants_stats)
    check_stats(w, p, &stats);
  if (status != ESMM_OK && (memcmp(p->before, p->c.data, bytes) != 0 || p->made))
    fail_msg("%s: a refused product changed C, or left a pattern", w->now);
  return status == ESMM_OK;
}

static void give_up(product *p)
{
  if (p->as_blocks)
    free_arrays(&p->blocks);
  esmm_pattern_free(p->given);
  esmm_pattern_free(p->made);
  free(p->bias);
  free(p->gate_bias);
  free(p->nonzeros);
  free(p->before);
}

/* A's rows: few or many, within what the oracle has time for. */
static int64_t draw_rows(world *w, int64_t k, int64_t n)
{
  const int64_t work = chance(w, 0.004) ? 20000000 : 600000;
  int64_t m = chance(w, 0.02) ? 0 : chance(w, 0.15) ? 1 : chance(w, 0.1) ? about(w, 60, 1200) : about(w, 1, 60);
  const int64_t widest = k > n ? k : n;
  if (widest > 0 && m * widest > MOST_ELEMENTS / 2)
    m = MOST_ELEMENTS / 2 / widest;
  if (k * n > 0 && m * k * n > work)
    m = work / (k * n) + 1;
  return m;
}

void call_product(world *w)
{
  product p = {.b = any_weights(w, 0, 0, NULL)};
  p.k = p.b->k;
  p.n = p.b->n;
  p.m = draw_rows(w, p.k, p.n);
  p.kind = p.b->kind;
  if (p.kind == WHOLE)
    p.kind = chance(w, 0.15) ? REAL : chance(w, 0.02) ? SPECIAL : WHOLE;
  draw_values(w, w->values[FOR_A], p.m, p.k, p.kind, true);
  const esmm_dtype dtype = chance(w, 0.6) ? p.b->dtype : any_dtype(w);
  p.a = place_values(w, FOR_A, p.m, p.k, dtype, w->values[FOR_A]);
  p.values_a = w->values[FOR_A];
  say(w, "m=%d A %s%s ld %d", (int)p.m, esmm_dtype_str(dtype), p.a.order == ESMM_COL_MAJOR ? " cols" : "", (int)p.a.ld);
  draw_options(w, &p);
  if (chance(w, 0.4))
    pick_force(w, &p);
  if (chance(w, 0.06) && p.m * p.k <= 1 << 14) {
    p.as_blocks = true;
    p.blocks = make_arrays(&p.a, 1 + (int)below(w, 20), 1 + (int)below(w, 20), chance(w, 0.5) ? 32 : 64, any_order(w),
                           chance(w, 0.3));
    say(w, ", A as blocks of %d x %d", p.blocks.b.block_rows, p.blocks.b.block_cols);
  } else if (!p.opts.strict && chance(w, 0.08)) {
    must_be(w, esmm_pattern_extract(w->ctx, &p.a, 1 + below(w, 40), &p.given), ESMM_OK);
    p.opts.a_pattern = p.given;
    say(w, ", bitmaps of A");
  }
  if (run(w, &p)) {
    compare(w, &p);
    compare_statistics(w, &p);
  }
  w->products++;
  give_up(&p);
}
