/*
 * baseline.c: the dense library's speed, in two constants.
 *
 * On a GPU the plan has kernels that call the library, with their own constants: the cheapest kernel that skips nothing
 * is the baseline. A CPU's library multiplies in fp32 whatever B's dtype is. With one row it reads B once (sgemv); with
 * more it packs B, which reads and writes it again, and multiplies at its own speed. Of bench/results/amd-epyc, where
 * the shipped constants come from, that is within 15 % from 1 row to 2048. Weights in a cache are read faster: so our
 * own dense kernels count too, where they are faster.
 */
#include "baseline.h"

#include "bench/blas.h"
#include "verdict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What one thread of the machine of the CPU record reaches with OpenBLAS 0.3.21. */
static const double shipped_flops = 104e9, shipped_bytes = 16e9;

static bool can_run(const esmm_ctx *ctx, const char *kernel)
{
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) == ESMM_OK && strcmp(info.name, kernel) == 0)
      return info.available;
  }
  return false;
}

/* The best of a few calls, in seconds; the first one warms up. */
static double time_product(const blas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
                           float *c)
{
  enum { CALLS = 4 };
  double best = INFINITY;
  for (int i = 0; i <= CALLS; i++) {
    const double started = cli_now();
    (m == 1 ? blas_sgemv : blas_sgemm)(library, m, k, n, a, b, c);
    const double seconds = cli_now() - started;
    if (i > 0 && seconds < best)
      best = seconds;
  }
  return best;
}

/* 64 MB of weights for one row, and a cube: some 50 ms on two threads. */
static bool measure(const blas_library *library, dense_baseline *out)
{
  enum { SIDE = 4096, CUBE = 768 };
  float *b = malloc(sizeof *b * SIDE * SIDE);
  if (!b)
    return false;
  for (size_t i = 0; i < (size_t)SIDE * SIDE; i++)
    b[i] = 1;
  float *a = b + (size_t)2 * SIDE * 1024, *c = b + (size_t)3 * SIDE * 1024; /* apart from what the cube reads as B */
  const double cube = time_product(library, CUBE, CUBE, CUBE, a, b, c);
  float row[SIDE], result[SIDE];
  for (int i = 0; i < SIDE; i++)
    row[i] = 1;
  const double weights = time_product(library, 1, SIDE, SIDE, row, b, result);
  free(b);
  out->flops = 2.0 * CUBE * CUBE * CUBE / cube;
  out->bytes = 4.0 * SIDE * SIDE / weights;
  return true;
}

void dense_baseline_find(const esmm_ctx *ctx, dense_baseline *out)
{
  *out = (dense_baseline){0};
  if (cli_on_gpu(ctx)) {
    snprintf(out->name, sizeof out->name, "the fastest kernel here that skips nothing, cuBLAS among them");
    return;
  }
  const int threads = esmm_ctx_threads(ctx);
  if (!esmm_is_tuned(ctx)) { /* of the instruction set: that the library uses it like our own kernels */
    const double isa = can_run(ctx, "dense_f32_avx512") ? 1 : can_run(ctx, "dense_f32_avx2") ? 0.5 : 0.1;
    out->flops = shipped_flops * isa * threads;
    out->bytes = shipped_bytes * (threads < 8 ? threads : 8); /* more threads than that share the memory */
    snprintf(out->name, sizeof out->name,
             "OpenBLAS in fp32 as measured on the CPU of the record, or our kernel that skips nothing");
    return;
  }
  blas_library libraries[BLAS_LIBRARIES];
  const int count = blas_open(libraries, threads);
  for (int i = 0; i < count; i++) {
    dense_baseline one = {0};
    if (libraries[i].onednn) /* it has no sgemm of BLAS's */
      continue;
    if (!measure(&libraries[i], &one) || one.flops <= out->flops)
      continue;
    *out = one;
    snprintf(out->name, sizeof out->name,
             "%s in fp32, measured here (%s GFLOP/s, %s GB/s), or our kernel that skips nothing", libraries[i].title,
             cli_number(one.flops * 1e-9, 3), cli_number(one.bytes * 1e-9, 3));
  }
  if (out->flops == 0)
    snprintf(out->name, sizeof out->name, "our kernel that skips nothing (no OpenBLAS or BLIS was found)");
}

double dense_baseline_seconds(const dense_baseline *baseline, int64_t m, int64_t k, int64_t n,
                              const esmm_verdict *verdicts, int count)
{
  const esmm_verdict *dense = verdict_dense(verdicts, count);
  const double own = dense ? dense->seconds : NAN;
  if (baseline->flops == 0)
    return own;
  const double weights = 4.0 * (double)k * (double)n, flop = 2.0 * (double)m * (double)n * (double)k;
  const double library = m == 1 ? weights / baseline->bytes : flop / baseline->flops + 2 * weights / baseline->bytes;
  return own < library ? own : library;
}
