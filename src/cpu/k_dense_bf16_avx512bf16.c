/*
 * k_dense_bf16_avx512bf16.c: the dense product of bf16 operands on AVX-512 BF16, twice the multiply-adds a cycle of
 * fp32. See pairs.h.
 */
#include "vec_avx512.h"

#include "pairs.h"

#define MOST_COLS ((int64_t)1 << 21) /* a chain of B's rows must lie within 4 GB: offsets have 32 bits */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  if (p->n <= MOST_COLS)
    return dense_can_run(self, p, why, why_bytes);
  (void)snprintf(why, why_bytes, "n is %lld, it takes %lld at most", (long long)p->n, (long long)MOST_COLS);
  return false;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  *variant = 0;
  const double m = (double)p->m, k = (double)p->k, columns = (double)(p->w->panels * ESMM_PANEL);
  const bool rows = !(p->w->panel_data && p->w->full);
  units[0] = m * columns * k / (2 * VEC);
  units[1] = m * k;
  units[2] = (double)p->n * k * (double)sizeof(uint16_t);
  units[3] = (double)esmm_ceil_div(p->m, 128) * columns * k * (rows ? 4.0 : 1.0);
  if (p->m <= 2 * MR && !rows) {
    /* Pairs are made on the way, and B is read while rows are multiplied: most of the lesser time does not show. */
    const double multiply = units[0] * cost[0], read = units[2] * cost[2];
    units[3] = 0.0;
    units[multiply < read ? 0 : 2] *= 0.25;
  }
  units[4] = m * columns * (esmm_is_plain(p) ? (double)esmm_ceil_div(p->k, PAIRS_STRAIGHT) : 8.0);
  units[5] = 1.0;
}

ESMM_KERNEL(dense_bf16_avx512bf16) = {
    .name = "dense_bf16_avx512bf16",
    .doc = "packed dense product of bf16, two k's at a time",
    .reads = ESMM_FORM(PANELS) | ESMM_FORM(ROWS),
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .can_run = can_run,
    .term_names = {"multiply-adds", "packing of a", "reading of b", "pairing of b", "updates of c", "starting threads"},
    .cost = {ESMM_CPU_COST_FMA_BF16, COST_PACK, ESMM_CPU_COST_READ_B, ESMM_CPU_COST_PAIR, ESMM_CPU_COST_UPDATE,
             ESMM_CPU_COST_START},
    PAIRS_KERNEL,
};
