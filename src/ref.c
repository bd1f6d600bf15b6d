/*
 * ref.c: the oracle. Sums in float64, in the order of k, no blocking, no skipping, accepts everything that was
 * prepared.
 *
 * It reads the prepared weights, so what it checks is the kernels; tests check prepare with a loop of their own.
 */
#include "epilogue.h"

#include <stdio.h>

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)ctx;
  if (p->strict && !p->w->rows && !p->w->full) {
    (void)snprintf(why, why_bytes, "strict needs weights that kept their zeros: prepare with strict or for any m");
    return false;
  }
  return true;
}

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  (void)cost;
  *strip_rows = 0;
  units[0] = (double)p->m * (double)p->n * (double)p->k;
}

static size_t workspace(const esmm_problem *p)
{
  size_t bytes;
  return esmm_size_mul((size_t)p->k, sizeof(double) * (size_t)p->threads, &bytes) ? bytes : SIZE_MAX;
}

/* Column j of B as doubles, zeros where a panel dropped them. */
static void read_column(const esmm_weights *w, int64_t j, double *column)
{
  if (w->rows) {
    for (int64_t k = 0; k < w->k; k++)
      column[k] = (double)esmm_load_element(w->rows, w->dtype, k * w->rows_ld + j);
    return;
  }
  const int64_t panel = j / ESMM_PANEL, in_panel = j % ESMM_PANEL;
  const uint64_t *bits = w->bits + panel * w->words;
  const int64_t kept = w->before[panel * (w->words + 1) + w->words];
  int64_t at = (int64_t)w->panel_at[panel] + in_panel / ESMM_HALF * kept * ESMM_HALF + in_panel % ESMM_HALF;
  for (int64_t k = 0; k < w->k; k++) {
    const bool alive = bits[k / 64] >> (k % 64) & 1;
    column[k] = alive ? (double)esmm_load_element(w->panel_data, w->dtype, at) : 0.0;
    at += alive ? ESMM_HALF : 0;
  }
}

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)ctx;
  esmm_matrix c = p->c;
#pragma omp parallel for num_threads(p->threads) schedule(static)
  for (int part = 0; part < p->threads; part++) {
    double *column = (double *)scratch + (int64_t)part * p->k;
    for (int64_t j = p->n * part / p->threads; j < p->n * (part + 1) / p->threads; j++) {
      read_column(p->w, j, column);
      for (int64_t i = 0; i < p->m; i++) {
        double sum = 0.0;
        for (int64_t k = 0; k < p->k; k++) {
          const double a = (double)esmm_matrix_get(&p->a, i, k);
          if (p->strict || (a != 0.0 && column[k] != 0.0))
            sum += a * column[k];
        }
        double x = (double)p->alpha * sum;
        if (p->beta != 0.0f)
          x += (double)p->beta * (double)esmm_matrix_get(&c, i, j);
        if (p->bias)
          x += (double)p->bias[j];
        esmm_matrix_set(&c, i, j, esmm_activate(p->activation, (float)x));
      }
    }
  }
  stats->joint_density = 1.0;
  stats->flop_useful = stats->flop_dense;
  return ESMM_OK;
}

ESMM_KERNEL(ref) = {
    .name = "ref",
    .doc = "float64 oracle: sums in the order of k, accepts everything; runs only when forced",
    .backend = ESMM_CPU,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_REFERENCE,
    .can_run = can_run,
    .terms = terms,
    .term_names = {"multiply-adds"},
    .cost = {1.5e-9},
    .workspace = workspace,
    .run = run,
};
