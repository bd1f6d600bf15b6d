/* tune.c: the products that a CPU's kernels are measured on, and how. */
#include "cpu/cpu.h"

/* clang-format off */
#define BLOCKS(rows, cols) {.kind = ESMM_FORMAT_BSR, .block_rows = (rows), .block_cols = (cols)}
#define GROUPS(n, m, cols) {.kind = ESMM_FORMAT_NM, .keep = (n), .group = (m), .group_cols = (cols)}
#define DENSE_B {.kind = ESMM_FORMAT_DENSE}
/* clang-format on */

/* Products in which multiply-adds, packing, lists, tile starts, bytes of B and fixed costs dominate in turn. */
const esmm_trial esmm_cpu_trials[] = {
    {32, 64, 64, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {512, 1024, 1, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {256, 512, 8, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {1024, 64, 4, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {256, 16, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {384, 1024, 384, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {512, 64, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_F32},
    {512, 512, 512, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B, ESMM_F32},
    {512, 512, 512, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B, ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B, ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .25, .25, DENSE_B, ESMM_F32},
    {1024, 2048, 1024, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B, ESMM_F32},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B, ESMM_F32},
    {512, 1024, 512, ESMM_GEN_RANDOM, .02, 1, DENSE_B, ESMM_F32},
    {512, 1024, 512, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_F32},
    {1024, 1024, 512, ESMM_GEN_RANDOM, .2, 1, DENSE_B, ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_RANDOM, .02, .25, DENSE_B, ESMM_F32},
    {1, 512, 1024, ESMM_GEN_RANDOM, .5, 1, DENSE_B, ESMM_F32},
    {1, 4096, 4096, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_F32},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_F32},
    {1, 4096, 8192, ESMM_GEN_RANDOM, .5, 1, DENSE_B, ESMM_F32},
    {1, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_F32},
    {4, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_F32},
    {4, 4096, 8192, ESMM_GEN_RANDOM, .5, 1, DENSE_B, ESMM_F32},
    {4, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .3, 1, DENSE_B, ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .03, 1, DENSE_B, ESMM_F32},
    {128, 256, 256, ESMM_GEN_DENSE, 1, .5, BLOCKS(32, 32), ESMM_F32},
    {512, 512, 512, ESMM_GEN_DENSE, 1, .5, BLOCKS(32, 32), ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, .25, BLOCKS(32, 32), ESMM_F32},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .5, .25, BLOCKS(64, 64), ESMM_F32},
    {1024, 2048, 1024, ESMM_GEN_DENSE, 1, .1, BLOCKS(32, 32), ESMM_F32},
    {512, 1024, 512, ESMM_GEN_DENSE, 1, .25, BLOCKS(16, 16), ESMM_F32},
    {512, 512, 512, ESMM_GEN_DENSE, 1, .2, BLOCKS(8, 8), ESMM_F32},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, .5, BLOCKS(32, 32), ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, .25, BLOCKS(64, 64), ESMM_F32},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1), ESMM_F32},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1), ESMM_F32},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .1, 1, GROUPS(2, 4, 1), ESMM_F32},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 16, 1), ESMM_F32},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 32), ESMM_F32},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1), ESMM_F32},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1), ESMM_F32},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_BF16},
    {384, 1024, 384, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_BF16},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_BF16},
    {512, 64, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B, ESMM_BF16},
    {512, 512, 512, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B, ESMM_BF16},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B, ESMM_BF16},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .25, .25, DENSE_B, ESMM_BF16},
    {1024, 2048, 1024, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B, ESMM_BF16},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B, ESMM_BF16},
    {512, 1024, 512, ESMM_GEN_RANDOM, .02, 1, DENSE_B, ESMM_BF16},
    {1024, 1024, 512, ESMM_GEN_RANDOM, .2, 1, DENSE_B, ESMM_BF16},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_BF16},
    {2, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_BF16},
    {4, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_BF16},
    {4, 4096, 8192, ESMM_GEN_RANDOM, .3, 1, DENSE_B, ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B, ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .3, 1, DENSE_B, ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B, ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .03, 1, DENSE_B, ESMM_BF16},
    {512, 512, 512, ESMM_GEN_DENSE, 1, .5, BLOCKS(32, 32), ESMM_BF16},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, .25, BLOCKS(32, 32), ESMM_BF16},
    {1024, 2048, 1024, ESMM_GEN_BLOCKWISE, .5, .1, BLOCKS(64, 64), ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, .25, BLOCKS(64, 64), ESMM_BF16},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1), ESMM_BF16},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1), ESMM_BF16},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .1, 1, GROUPS(2, 4, 1), ESMM_BF16},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1), ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1), ESMM_BF16},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 32), ESMM_BF16},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 32), ESMM_BF16},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .1, 1, GROUPS(2, 4, 32), ESMM_BF16},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 32), ESMM_BF16},
    {.m = 0},
};
_Static_assert(sizeof esmm_cpu_trials / sizeof esmm_cpu_trials[0] <= ESMM_MOST_TRIALS + 1, "raise ESMM_MOST_TRIALS");

/*
 * The best of several runs, or for small m their lower quarter: which rows of B are still in cache is part of its cost.
 * Goes on until the best two agree, within reason: disturbances only make a run longer.
 */
static double measure(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *x, esmm_problem *p, void *scratch)
{
  double seconds[32], spent = 0.0;
  int runs = 0;
  for (int i = 0; i <= 32; i++) {
    esmm_stats stats = {.size = sizeof stats};
    p->a = x->a[i % x->copies];
    const double start = esmm_now();
    (void)kernel->run(kernel, ctx, p, scratch, &stats); /* a CPU's kernel cannot fail */
    const double now = esmm_now() - start;
    if (i == 0) /* warms caches and threads up */
      continue;
    int at = runs++;
    for (; at > 0 && now < seconds[at - 1]; at--)
      seconds[at] = seconds[at - 1];
    seconds[at] = now;
    spent += now;
    const bool agree = runs >= 4 && seconds[1] <= 1.05 * seconds[0];
    if ((agree && (runs >= 12 || spent > 0.02)) || spent > 0.2)
      break;
  }
  return seconds[x->copies > 1 ? runs / 4 : 0];
}

esmm_status esmm_cpu_tune_measure(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *x, esmm_problem *p,
                                  double *seconds)
{
  const size_t bytes = esmm_kernel_workspace(kernel, p);
  void *scratch = bytes == SIZE_MAX ? NULL : esmm_scratch(ctx, bytes);
  if (!scratch)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of scratch for %s", bytes, kernel->name);
  *seconds = measure(ctx, kernel, x, p, scratch);
  return ESMM_OK;
}

esmm_status esmm_cpu_tune_sample(esmm_ctx *ctx, esmm_problem *p)
{
  (void)ctx;
  esmm_sample_a(p->ctx, &p->a, p->w, &p->sample);
  return ESMM_OK;
}
