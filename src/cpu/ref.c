/*
 * ref.c: the oracle. Sums in float64, in the order of k, no blocking, no skipping, accepts everything that was
 * prepared.
 *
 * It reads the prepared weights, so it checks the kernels; tests check prepare with a separate loop.
 */
#include "cpu/costs.h"
#include "cpu/epilogue.h"
#include "threads.h"

#include <math.h>
#include <stdio.h>

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->strict && !p->w->rows && !p->w->full) {
    (void)snprintf(why, why_bytes, "strict needs weights that kept their zeros: prepare with strict or for any m");
    return false;
  }
  return true;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  units[0] = (double)p->m * (double)p->n * (double)p->k;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  size_t bytes;
  return esmm_size_mul((size_t)p->k, sizeof(double) * (size_t)p->threads, &bytes) ? bytes : SIZE_MAX;
}

static void read_bsr_column(const esmm_weights *w, int64_t j, double *column)
{
  const esmm_bsr_form *f = &w->bsr;
  const int64_t strip = j / f->block_cols, block = (int64_t)f->block_rows * f->block_cols;
  memset(column, 0, (size_t)w->k * sizeof *column);
  for (int64_t i = f->start[strip]; i < f->start[strip + 1]; i++)
    for (int64_t r = 0, k = (int64_t)f->at[i] * f->block_rows; r < f->block_rows && k < w->k; r++, k++)
      column[k] = (double)esmm_load_element(f->values, w->dtype, i * block + r * f->block_cols + j % f->block_cols);
}

static void read_nm_column(const esmm_weights *w, int64_t j, double *column)
{
  const esmm_nm_form *f = &w->nm;
  memset(column, 0, (size_t)w->k * sizeof *column);
  for (int64_t s = 0; s < f->slots; s++)
    column[esmm_nm_k(f, j, s)] = (double)esmm_load_element(
        f->values, w->dtype, (j / ESMM_NM_PANEL * f->slots + s) * ESMM_NM_PANEL + j % ESMM_NM_PANEL);
}

/* Column j of B as doubles, zeros where a form dropped them. */
static void read_column(const esmm_weights *w, int64_t j, double *column)
{
  if (w->format == ESMM_FORMAT_BSR) {
    read_bsr_column(w, j, column);
    return;
  }
  if (w->format == ESMM_FORMAT_NM) {
    read_nm_column(w, j, column);
    return;
  }
  if (w->rows) {
    for (int64_t k = 0; k < w->k; k++)
      column[k] = (double)esmm_load_element(w->rows, w->dtype, k * w->rows_ld + j);
    return;
  }
  const int64_t panel = j / ESMM_PANEL, in_panel = j % ESMM_PANEL;
  const uint64_t *bits = w->bits + panel * w->words;
  const int64_t kept = w->before[panel * (w->words + 1) + w->words];
  int64_t at =
      (int64_t)w->panel_at[panel] + in_panel / ESMM_HALF_COLS * kept * ESMM_HALF_COLS + in_panel % ESMM_HALF_COLS;
  for (int64_t k = 0; k < w->k; k++) {
    const bool alive = bits[k / 64] >> (k % 64) & 1;
    column[k] = alive ? (double)esmm_load_element(w->panel_data, w->dtype, at) : 0.0;
    at += alive ? ESMM_HALF_COLS : 0;
  }
}

static double activate(esmm_activation activation, double x)
{
  const double positive = x < 0.0 ? 0.0 : x; /* NaN stays NaN */
  switch (activation) {
  case ESMM_ACT_NONE:
    return x;
  case ESMM_ACT_RELU:
    return positive;
  case ESMM_ACT_RELU2:
    return positive * positive;
  case ESMM_ACT_GELU:
    return x == -INFINITY ? 0.0 : 0.5 * x * erfc(-x * 0.70710678118654752440);
  case ESMM_ACT_GELU_TANH: /* (1 + tanh u) / 2 = 1 / (1 + e^(-2u)) */
    return x == -INFINITY ? 0.0 : x / (1.0 + exp(-1.5957691216057307118 * (x + 0.044715 * x * x * x)));
  case ESMM_ACT_SILU:
    return x == -INFINITY ? 0.0 : x / (1.0 + exp(-x));
  }
  return x;
}

static double finish(const esmm_problem *p, int64_t row, int64_t col, double sum)
{
  double x = (double)p->alpha * sum;
  if (p->beta != 0.0f)
    x += (double)p->beta * (double)esmm_matrix_get(&p->c, row, col);
  if (p->bias)
    x += (double)p->bias[col];
  x = activate(p->activation, x);
  if (p->factor)
    x *= (double)p->factor[row * p->factor_ld + col];
  if (p->residual.data)
    x += (double)esmm_matrix_get(&p->residual, row, col);
  return x;
}

typedef struct job {
  const esmm_problem *p;
  double *columns; /* a worker's is [k] */
} job;

static void multiply_columns(void *arg, int64_t first, int64_t end, int worker)
{
  const job *x = arg;
  const esmm_problem *p = x->p;
  double *column = x->columns + worker * p->k;
  esmm_matrix c = p->c;
  for (int64_t j = first; j < end; j++) {
    read_column(p->w, j, column);
    for (int64_t i = 0; i < p->m; i++) {
      double sum = 0.0;
      for (int64_t k = 0; k < p->k; k++) {
        const double a = (double)esmm_matrix_get(&p->a, i, k);
        if (p->strict || (a != 0.0 && column[k] != 0.0))
          sum += a * column[k];
      }
      esmm_matrix_set(&c, i, j, (float)finish(p, i, j, sum));
    }
  }
  esmm_finish_plain(p, 0, p->m, first, end - first);
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  job x = {.p = p, .columns = scratch};
  esmm_for(ctx, p->threads, p->n, 16, multiply_columns, &x);
  stats->joint_density = 1.0;
  stats->flop_useful = stats->flop_dense;
  return ESMM_OK;
}

ESMM_KERNEL(ref) = {
    .name = "ref",
    .doc = "float64 oracle: sums in the order of k, accepts everything; runs only when forced",
    .backend = &esmm_cpu_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_REFERENCE,
    .can_run = can_run,
    .terms = terms,
    .term_names = {"multiply-adds"},
    .cost = {8 * ESMM_CPU_COST_FMA_PORTABLE},
    .workspace = workspace,
    .run = run,
};
