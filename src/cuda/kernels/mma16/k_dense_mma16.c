/*
 * k_dense_mma16.c: dense product of bf16 or fp16 by mma.sync, for every GPU from sm_80 on. See mma16.cuh.
 *
 * Takes A of any order, leading dimension and alignment: lines that do not start at multiples of 16 bytes are read
 * element by element.
 */
#include "cuda/kernels/mma16/mma16.h"

enum { SHAPES = 3, HOWS = 4 };

/* Blocks of C, from the fastest for each element to what fills a GPU soonest. */
static const struct {
  int64_t rows, cols;
  double least; /* blocks that a multiprocessor runs in the time of one */
} shapes[SHAPES] = {{128, 256, 1.0}, {128, 128, 1.0}, {64, 64, 2.0}};
#define LARGEST ESMM_MMA16_SHARED(128, 256)

ESMM_FATBIN(k_dense_mma16);
#define OF_SHAPE(name, rows, cols) ESMM_MMA16_FUNCTION(fatbin_k_dense_mma16, name "_" #cols, rows, cols)
#define ALIGNED(name)                                                          \
  {                                                                            \
    OF_SHAPE(name, 128, 256), OF_SHAPE(name, 128, 128), OF_SHAPE(name, 64, 64) \
  }
#define ELEMENTS(name)                                           \
  {                                                              \
    [0] = OF_SHAPE(name, 128, 256), [2] = OF_SHAPE(name, 64, 64) \
  }
#define OF_DTYPE(name)                                                                                             \
  {                                                                                                                \
    ALIGNED(name "_rows"), ALIGNED(name "_cols"), ELEMENTS(name "_rows_elements"), ELEMENTS(name "_cols_elements") \
  }
/* By dtype, by how A is read (order, then alignment), by shape. */
static const esmm_cuda_function functions[2][HOWS][SHAPES] = {OF_DTYPE("esmm_dense_bf16"), OF_DTYPE("esmm_dense_f16")};

static bool can_run_bf16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return esmm_mma16_can_run(ctx, p, ESMM_BF16, LARGEST, why, why_bytes);
}

static bool can_run_f16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return esmm_mma16_can_run(ctx, p, ESMM_F16, LARGEST, why, why_bytes);
}

static int how(const esmm_matrix *a)
{
  return (a->order == ESMM_ROW_MAJOR ? 0 : 1) + (esmm_cuda_in_lines(a) ? 0 : 2);
}

static double steps(const esmm_problem *p, int shape)
{
  const double rounds = esmm_mma16_rounds(p, shapes[shape].rows, shapes[shape].cols);
  return (rounds < shapes[shape].least ? shapes[shape].least : rounds) * (double)esmm_ceil_div(p->k, ESMM_MMA16_K);
}

static int best_shape(const esmm_problem *p, const double *cost)
{
  int best = 0;
  for (int i = 1; i < SHAPES; i++)
    if (functions[0][how(&p->a)][i].name && cost[i] * steps(p, i) < cost[best] * steps(p, best))
      best = i;
  return best;
}

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  const int shape = best_shape(p, cost);
  units[shape] = steps(p, shape);
  if (how(&p->a) >= 2)
    units[3] = steps(p, shape) * (double)shapes[shape].rows;
  units[4] = (double)p->m * (double)p->n;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = shapes[shape].cols;
}

static size_t workspace(const esmm_problem *p)
{
  (void)p;
  return 0;
}

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  int shape = 0;
  while (shape < SHAPES - 1 && shapes[shape].cols != p->strip_rows)
    shape++;
  const esmm_cuda_function *function = &functions[p->a.dtype == ESMM_BF16 ? 0 : 1][how(&p->a)][shape];
  const esmm_mma16_params params = esmm_mma16_params_of(p);
  const esmm_launch launch = esmm_mma16_launch(p, shapes[shape].rows, shapes[shape].cols, function->shared);
  stats->strip_rows = 0;
  return esmm_cuda_launch(ctx, function, &launch, p->call->stream, &params);
}

#define TERMS                                                                                                       \
  {                                                                                                                 \
    "steps of 128 x 256", "steps of 128 x 128", "steps of 64 x 64", "loads of elements", "writing of c", "launches" \
  }
#define COST                                    \
  {                                             \
    6.3e-7, 3.8e-7, 2.2e-7, 4.3e-9, 1e-12, 8e-6 \
  }

ESMM_KERNEL(dense_bf16_mma) = {
    .name = "dense_bf16_mma",
    .doc = "multiplies everything, bf16 on tensor cores (mma.sync); any order, alignment and shape",
    .backend = ESMM_CUDA,
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .sm = 80,
    .can_run = can_run_bf16,
    .terms = terms,
    .term_names = TERMS,
    .cost = COST,
    .workspace = workspace,
    .run = run,
};

ESMM_KERNEL(dense_f16_mma) = {
    .name = "dense_f16_mma",
    .doc = "multiplies everything, fp16 on tensor cores (mma.sync); any order, alignment and shape",
    .backend = ESMM_CUDA,
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .sm = 80,
    .can_run = can_run_f16,
    .terms = terms,
    .term_names = TERMS,
    .cost = COST,
    .workspace = workspace,
    .run = run,
};
