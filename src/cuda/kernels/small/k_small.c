/*
 * k_small.c: fp32 products that take a few microseconds however they are multiplied, on a GPU. See k_small.cu.
 *
 * A dense library takes 8 to 12 us for many of these, where a launch takes 5: it splits or pads, or has no tile that is
 * small enough. In 16 bits it has, and this would be slower.
 */
#include "cuda/kernels/common/host.h"

#include <math.h>
#include <stdio.h>

#define TURN (ESMM_SMALL_THREADS / 32 * ESMM_SMALL_CHUNK) /* k's that a block's warps take at once */
#define CLUSTER_TURNS 1                                   /* what it costs that blocks share a tile, in turns */
#define MOST_ELEMENTS 1e9                                 /* of A, B and C, lines whole: its counters have 32 bits */

ESMM_FATBIN(k_small);

#define FUNCTION(name)       \
  {                          \
    &fatbin_k_small, name, 0 \
  }
static const esmm_cuda_function rows = FUNCTION("esmm_small_f32"), columns = FUNCTION("esmm_small_f32_by_k");

/* ---- how a product is cut ---- */

typedef struct cut {
  int64_t tiles; /* of columns */
  int64_t units; /* tiles of C */
  int64_t ranks; /* blocks that share a tile */
  int64_t turns;
} cut;

/* Blocks share a tile where that saves more turns than it costs. Clusters are sm_90's. */
static cut find_cut(const esmm_problem *p)
{
  const int64_t most = esmm_cuda_get(p->ctx)->sm == 90 ? ESMM_SMALL_RANKS : 1;
  cut best = {.tiles = esmm_ceil_div(p->n, ESMM_SMALL_TILE), .ranks = 1, .turns = esmm_ceil_div(p->k, TURN)};
  best.units = best.tiles * esmm_ceil_div(p->m, ESMM_SMALL_TILE);
  int64_t least = best.turns;
  for (int64_t ranks = 2; ranks <= most && ranks * best.units <= esmm_cuda_room_for(ranks, esmm_cuda_sms(p));
       ranks *= 2) {
    const int64_t turns = esmm_ceil_div(p->k, ranks * TURN);
    if (turns + CLUSTER_TURNS < least) {
      least = turns + CLUSTER_TURNS;
      best.ranks = ranks;
      best.turns = turns;
    }
  }
  return best;
}

/* ---- the kernel ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  if ((p->a.order == ESMM_COL_MAJOR ? k : m) * (double)p->a.ld < MOST_ELEMENTS && k * n < MOST_ELEMENTS &&
      m * n < MOST_ELEMENTS)
    return true;
  (void)snprintf(why, why_bytes,
                 "a is %lld x %lld, its lines %lld apart, and b has %lld columns: too large for its counters",
                 (long long)p->m, (long long)p->k, (long long)p->a.ld, (long long)p->n);
  return false;
}

static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p);
  const double rounds = (double)esmm_ceil_div(c.units * c.ranks, esmm_cuda_sms(p));
  units->base[0] = rounds * (double)c.turns * fmin((double)p->k / TURN, 1.0);
  units->base[1] = (double)c.units * (double)p->k * (2 * ESMM_SMALL_TILE * sizeof(float));
  units->base[2] = rounds;
  units->base[3] = c.ranks > 1 ? 1.0 : 0.0;
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)scratch;
  (void)stats;
  const cut c = find_cut(p);
  const esmm_small_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                    .a = esmm_cuda_matrix(&p->a),
                                    .b = esmm_cuda_b(p)->form[ESMM_FORM_TIGHT32],
                                    .n = (int32_t)p->n,
                                    .tiles = (int32_t)c.tiles,
                                    .ranks = (int32_t)c.ranks,
                                    .epilogue = esmm_cuda_epilogue(p)};
  const esmm_launch launch = {.grid_x = (unsigned)(c.units * c.ranks),
                              .threads = ESMM_SMALL_THREADS,
                              .cluster = c.ranks > 1 ? (unsigned)c.ranks : 0};
  return esmm_cuda_launch(ctx, p->a.order == ESMM_COL_MAJOR ? &columns : &rows, &launch, esmm_cuda_call_of(p)->stream,
                          &params);
}

ESMM_KERNEL(small_f32) = {
    .name = "small_f32",
    .doc = "f32, a few microseconds: multiplies everything, without tensor cores",
    .backend = &esmm_cuda_backend,
    .flags = ESMM_KERNEL_DETERMINISTIC,
    .reads = ESMM_FORM(TIGHT32),
    .dtypes = ESMM_DTYPE_BIT(ESMM_F32),
    .device = &(const esmm_cuda_kernel){.sm = 80, .line = line},
    .can_run = can_run,
    .terms = esmm_cuda_terms,
    .term_names = {"turns", "reading", "rounds of blocks", "clusters", "", "launches"},
    .cost = {ESMM_GPU_SMALL_TURN, ESMM_GPU_CACHED, ESMM_GPU_SMALL_TURN, ESMM_GPU_CLUSTER, 0.0, ESMM_GPU_LAUNCH},
    .run = run,
};
