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
/* By dtype, by how A is read (order, then alignment), by shape, which is the variant. */
static const esmm_cuda_function functions[2][HOWS][SHAPES] = {OF_DTYPE("esmm_dense_bf16"), OF_DTYPE("esmm_dense_f16")};

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  return esmm_mma16_can_run(p, LARGEST, why, why_bytes);
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
    if (functions[0][esmm_mma16_how(&p->a)][i].name && cost[i] * steps(p, i) < cost[best] * steps(p, best))
      best = i;
  return best;
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  const int shape = best_shape(p, cost);
  units->base[shape] = steps(p, shape);
  if (esmm_mma16_how(&p->a) >= 2)
    units->base[3] = steps(p, shape) * (double)shapes[shape].rows;
  units->base[4] = esmm_cuda_c_bytes(p);
  *variant = shape;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  const int shape = (int)p->variant;
  const esmm_cuda_function *mine = self->own; /* [HOWS][SHAPES] */
  const esmm_cuda_function *function = &mine[esmm_mma16_how(&p->a) * SHAPES + shape];
  const esmm_mma16_params params = esmm_mma16_params_of(p);
  const esmm_launch launch = esmm_mma16_launch(p, shapes[shape].rows, shapes[shape].cols, function->shared);
  stats->strip_rows = 0;
  return esmm_cuda_launch(ctx, function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

#define DESCRIPTOR(id, dtype, row)                                                                         \
  .name = "dense_" #id "_mma",                                                                             \
  .doc = "multiplies everything, " #id " on tensor cores (mma.sync); any order, alignment and shape",      \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(ROWS16),           \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = functions[row][0], .can_run = can_run,         \
  .terms = esmm_cuda_terms, .term_names = {"steps of 128 x 256", "steps of 128 x 128", "steps of 64 x 64", \
                                           "loads of elements",  "writing of c",       "launches"},        \
  .cost = {ESMM_GPU_STAGE,    ESMM_GPU_STAGE_128, ESMM_GPU_STEP_64,                                        \
           ESMM_GPU_ELEMENTS, ESMM_GPU_WRITTEN,   ESMM_GPU_LAUNCH_LARGE},                                  \
  .run = run

static const esmm_cuda_kernel about = {.sm = 80, .line = line, .stand_in = true};

ESMM_KERNEL(dense_bf16_mma) = {DESCRIPTOR(bf16, ESMM_BF16, 0)};

ESMM_KERNEL(dense_f16_mma) = {DESCRIPTOR(f16, ESMM_F16, 1)};
