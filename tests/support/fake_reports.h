/*
 * fake_reports.h: what a GPU's kernels report of A's densities, on a driver whose kernels do nothing else: a test says
 * how A's zeros lie, and the answers follow from that.
 */
#ifndef ESMM_TEST_FAKE_REPORTS_H
#define ESMM_TEST_FAKE_REPORTS_H

#include "cuda/cuda.h"
#include "cuda/kernels/decode/decode_params.h"

#include <math.h>
#include <string.h>

/* A of so many rows, a share of whose elements is not 0; those come `strip` rows at once, 1: anywhere. */
typedef struct fake_zeros {
  int64_t m, strip;
  double element, density_b; /* and of B's strips and tiles */
} fake_zeros;

/* Share of strips of that height that a k is alive in. */
static inline double fake_strips(const fake_zeros *z, int64_t height)
{
  const double rows = (double)(height < z->m ? height : z->m), each = (double)z->strip;
  return rows <= each ? z->element : 1 - pow(1 - z->element, rows / each);
}

static inline void fake_report(const fake_zeros *z, uint64_t to, int64_t height, bool counts, bool skips)
{
  if (!to)
    return;
  esmm_choice_device *slot = esmm_cuda_pointer(to);
  const double e = z->element, overflow = e * e * e * (1 - e) + e * e * e * e / 2; /* third or fourth of four k's */
  const float strip = (float)fake_strips(z, height);
  *slot = (esmm_choice_device){.chosen = skips,
                               .element = counts ? (float)e : 0,
                               .strip = strip,
                               .joint = (float)(strip * z->density_b),
                               .overflow = counts ? (float)overflow : 0,
                               .counted = counts};
  __atomic_store_n(&slot->ready, 1, __ATOMIC_RELEASE);
}

static inline bool fake_pays(const fake_zeros *z, float dense, float base, float per_strip, float per_joint,
                             int64_t height)
{
  const double strip = fake_strips(z, height);
  return (double)base + per_strip * strip + per_joint * strip * z->density_b < (double)dense;
}

/* Of a launch that may report. */
static inline void fake_answer(const fake_zeros *z, const char *name, const void *params)
{
  if (strncmp(name, "esmm_wgmma16_", 13) == 0) {
    esmm_wgmma16_params p;
    memcpy(&p, params, sizeof p);
    fake_report(z, p.report, ESMM_TILE, false,
                p.choose ? fake_pays(z, p.dense, p.base, p.per_strip, p.per_joint, ESMM_TILE)
                         : p.mode != ESMM_WGMMA16_DENSE);
  } else if (strncmp(name, "esmm_decode_", 12) == 0) {
    esmm_decode_params p;
    memcpy(&p, params, sizeof p);
    fake_report(z, p.report, p.a.rows, false, true);
    fake_report(z, p.gate_report, p.a.rows, false, true);
  } else if (strncmp(name, "esmm_fine16_", 12) == 0 && strcmp(name, "esmm_fine16_pack") != 0) {
    esmm_fine16_params p;
    memcpy(&p, params, sizeof p);
    fake_report(z, p.report, ESMM_FINE16_STRIP, false, true);
  } else if (strcmp(name, "esmm_sample") == 0) {
    esmm_sample_params p;
    memcpy(&p, params, sizeof p);
    fake_report(z, p.out, p.height, true, fake_pays(z, p.dense, p.base, p.per_strip, p.per_joint, p.height));
  }
}

#endif
