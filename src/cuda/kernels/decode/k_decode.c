/*
 * k_decode.c: m of 1 to 16, on a GPU. See k_decode.cu.
 *
 * The floor is the bytes of B's rows that A needs. How C is cut: more columns in a block read A less often, more blocks
 * along k fill the GPU; a cluster's blocks have to find room side by side, so they do not take all of it.
 *
 * A gated product's launch reads both weights: twice as many warps, two for the same columns.
 */
#include "cuda/kernels/common/host.h"
#include "cuda/kernels/decode/decode_params.h"

#include <math.h>
#include <stdio.h>

#define WARPS (ESMM_DECODE_THREADS / 32)
#define MOST_SHIFT 2     /* four warps side by side, two for each column */
#define LEAST_RANGE 128  /* k's that are worth a block */
#define FEW_BLOCKS 16    /* so few wait for B's rows one after the other */
#define BLOCK_EXTRA 2048 /* shared memory that a block takes beside what it asks for */

ESMM_FATBIN(k_decode);

/* The kernel for up to `rows` rows of A. */
typedef struct width {
  esmm_cuda_function function;
  esmm_cuda_function gated; /* both branches of a gated product; none for fp32 */
  int64_t rows;
  int at_once; /* blocks on a multiprocessor that has clusters */
} width;

#define FUNCTION(name)                         \
  {                                            \
    &fatbin_k_decode, name, ESMM_DECODE_SHARED \
  }
#define WIDTHS_16(id)                                                                                                \
  {                                                                                                                  \
    {.function = FUNCTION("esmm_decode_" #id "_8"),                                                                  \
     .gated = FUNCTION("esmm_decode_gated_" #id "_8"),                                                               \
     .rows = 8,                                                                                                      \
     .at_once = ESMM_DECODE_BLOCKS_FEW_ROWS},                                                                        \
    {                                                                                                                \
      .function = FUNCTION("esmm_decode_" #id "_16"), .gated = FUNCTION("esmm_decode_gated_" #id "_16"), .rows = 16, \
      .at_once = ESMM_DECODE_BLOCKS                                                                                  \
    }                                                                                                                \
  }
#define WIDTH_32(count, blocks)                                                           \
  {                                                                                       \
    .function = FUNCTION("esmm_decode_f32_" #count), .rows = (count), .at_once = (blocks) \
  }
static const width bf16[] = WIDTHS_16(bf16), f16[] = WIDTHS_16(f16);
static const width f32[] = {WIDTH_32(1, ESMM_DECODE_BLOCKS_FEW_ROWS), WIDTH_32(4, ESMM_DECODE_BLOCKS_FEW_ROWS),
                            WIDTH_32(8, ESMM_DECODE_BLOCKS), WIDTH_32(16, ESMM_DECODE_BLOCKS)};

static const width *widths_of(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return f32;
  case ESMM_BF16:
    return bf16;
  case ESMM_F16:
    return f16;
  }
  return NULL; /* the plan lets no other through */
}

/* By dtype and m; for a larger m, which cannot run, the largest. */
static const width *find_width(const esmm_problem *p)
{
  const width *v = widths_of(p->w->dtype);
  while (v->rows < p->m && v->rows < ESMM_DECODE_ROWS)
    v++;
  return v;
}

/* ---- how a product is cut ---- */

typedef struct cut {
  int shift;     /* 1 << shift warps side by side in a block; of a gated product they are pairs */
  int64_t ranks; /* blocks that share columns */
  int64_t tiles; /* of columns */
} cut;

static int64_t columns_of_warp(const esmm_problem *p)
{
  return p->w->dtype == ESMM_F32 ? ESMM_STRIP : ESMM_DECODE_COLS;
}

/* Weights that the launch reads. */
static int sides(const esmm_problem *p)
{
  return p->gate.w ? 2 : 1;
}

/* Clusters are sm_90's. */
static int64_t most_ranks(const esmm_problem *p)
{
  return esmm_cuda_get(p->ctx)->sm == 90 ? ESMM_DECODE_RANKS : 1;
}

/* Blocks that run at once: a cluster's have to find room side by side. */
static int64_t most_blocks(int64_t at_once, int64_t ranks, int64_t gpu)
{
  return ranks == 1 ? at_once * gpu : at_once == 2 ? 17 * gpu / 10 : (at_once - 1) * gpu;
}

/* The most columns in a block with which the GPU is nearly full; where it will not be, what fills it best. */
static cut find_cut(const esmm_problem *p, int64_t most_ranks)
{
  const int64_t gpu = esmm_cuda_sms(p), at_once = find_width(p)->at_once;
  const int64_t slices = sides(p) * esmm_ceil_div(p->n, columns_of_warp(p)), enough = 3 * (at_once - 1) * gpu / 4;
  cut best = {.shift = MOST_SHIFT, .ranks = 1, .tiles = esmm_ceil_div(slices, 1 << MOST_SHIFT)};
  int64_t best_busy = 0;
  for (int shift = sides(p) - 1; shift <= MOST_SHIFT; shift++)
    for (int64_t ranks = 1; ranks <= most_ranks && (ranks == 1 || ranks * LEAST_RANGE <= p->k); ranks *= 2) {
      const int64_t tiles = esmm_ceil_div(slices, 1 << shift), busy = esmm_min(slices * ranks >> shift, enough);
      if (tiles * ranks <= most_blocks(at_once, ranks, gpu) && busy >= best_busy) {
        best = (cut){.shift = shift, .ranks = ranks, .tiles = tiles};
        best_busy = busy;
      }
    }
  return best;
}

/* ---- shared memory, as k_decode.cu lays it out ---- */

static int64_t chunk_bytes(const esmm_problem *p, int64_t chunk)
{
  const int64_t list = ESMM_DECODE_LIST(chunk), line = chunk + ESMM_DECODE_SPARE;
  if (p->w->dtype == ESMM_F32)
    return find_width(p)->rows * line * (int64_t)sizeof(float) + list + chunk / 8;
  return p->m * line * 2 + list;
}

/* Fills in chunk and inbox; returns the bytes of a block. */
static int64_t lay_out(const esmm_problem *p, int64_t room, esmm_decode_params *params)
{
  const int64_t cols = (columns_of_warp(p) << params->group_shift) / sides(p), ways = WARPS >> params->group_shift;
  const int64_t rows = sides(p) * p->m, sums = ways * rows * (cols + ESMM_DECODE_PAD) * (int64_t)sizeof(float);
  const int64_t inbox = (rows * cols + ESMM_DECODE_RANKS) * (int64_t)sizeof(float);
  const int64_t unit = chunk_bytes(p, ESMM_DECODE_K) - chunk_bytes(p, 0);
  const int64_t units = (esmm_max(room - inbox, sums) - chunk_bytes(p, 0)) / unit;
  params->chunk = (int32_t)esmm_min(params->range, units * ESMM_DECODE_K);
  params->inbox = (int32_t)esmm_round_up(esmm_max(chunk_bytes(p, params->chunk), sums), 16);
  return params->inbox + inbox;
}

static int64_t room(const esmm_ctx *ctx, const esmm_problem *p)
{
  const esmm_cuda_properties *gpu = esmm_cuda_get(ctx);
  return esmm_min(ESMM_DECODE_SHARED, gpu->shared_per_sm / find_width(p)->at_once - BLOCK_EXTRA);
}

/* ---- the kernel ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->n > ESMM_DECODE_MOST_SIDE || p->k > ESMM_DECODE_MOST_SIDE)
    return esmm_cuda_too_large(p, why, why_bytes);
  if (esmm_cuda_get(p->ctx)->shared_per_block < ESMM_DECODE_SHARED)
    return esmm_cuda_too_little_shared(p, ESMM_DECODE_SHARED, why, why_bytes);
  if (p->m <= ESMM_DECODE_ROWS)
    return true;
  (void)snprintf(why, why_bytes, "m is %lld, decode takes %d at most", (long long)p->m, ESMM_DECODE_ROWS);
  return false;
}

/* A strip is all of A: its density is the union's. */
static void line_16(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                    int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p, most_ranks(p));
  const double m = (double)p->m, k = (double)p->k, cols = (double)esmm_round_up(p->n, ESMM_DECODE_COLS);
  units->per_strip[0] = 2.0 * k * cols * sides(p);
  units->base[1] = 2.0 * m * k * (double)c.tiles;
  units->base[2] = fmin(k, 4096.0);
  units->per_strip[2] = c.tiles * c.ranks <= FEW_BLOCKS ? ESMM_GPU_ALIVE * k / (double)c.ranks : 0.0;
  units->base[3] = m;
  *variant = p->m;
}

static void line_f32(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                     int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p, most_ranks(p));
  const double m = (double)p->m, k = (double)p->k, cols = (double)esmm_round_up(p->n, ESMM_STRIP);
  const double range = (double)esmm_ceil_div(p->k, c.ranks);
  units->per_strip[0] = k * cols * sizeof(float) * (p->m > 8 ? ESMM_GPU_WIDE : 1.0);
  units->base[1] = m * k * sizeof(float) * (double)c.tiles;
  units->base[2] = (0.5 * m + 1.0) * range;     /* a block copies them one by one, */
  units->per_strip[2] = ESMM_GPU_ALIVE * range; /* and goes through its list */
  units->base[3] = 0.5 * m;
  *variant = p->m;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)scratch;
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const bool is_f32 = p->w->dtype == ESMM_F32;
  const cut c = find_cut(p, most_ranks(p));
  esmm_decode_params params = {
      .selector = esmm_cuda_call_of(p)->selector,
      .a = esmm_cuda_matrix(&p->a),
      .b = is_f32 ? w->strips.data : w->rows,
      .b_slice = is_f32 ? w->strips.k_padded * ESMM_STRIP * (int64_t)sizeof(float) : ESMM_DECODE_COLS * 2,
      .b_row = is_f32 ? ESMM_STRIP * (uint32_t)sizeof(float) : (uint32_t)w->rows_ld * 2,
      .group_shift = c.shift,
      .range = (int32_t)esmm_round_up(esmm_ceil_div(p->k, c.ranks), ESMM_DECODE_K),
      .vector = esmm_cuda_is_vector(&p->a),
      .report = esmm_cuda_call_of(p)->report,
      .epilogue = esmm_cuda_epilogue(p),
  };
  if (p->gate.w) { /* its rows are as far apart as b's: n decides that */
    params.gate = esmm_cuda_of(p->gate.w)->rows;
    params.gate_bias = (uint64_t)(uintptr_t)p->gate.bias;
    params.gate_activation = (int32_t)p->gate.activation;
    params.gate_report = esmm_cuda_call_of(p)->gate_report;
  }
  const esmm_launch launch = {.grid_x = (unsigned)(c.tiles * c.ranks),
                              .threads = ESMM_DECODE_THREADS,
                              .shared = (unsigned)lay_out(p, room(ctx, p), &params),
                              .cluster = c.ranks > 1 ? (unsigned)c.ranks : 0};
  const width *v = find_width(p);
  stats->strip_rows = p->m;
  return esmm_cuda_launch(ctx, p->gate.w ? &v->gated : &v->function, &launch, esmm_cuda_call_of(p)->stream, &params);
}

#define DESCRIPTOR(id, dtype, form)                                                                                \
  .name = "decode_" #id, .doc = "m of 1 to 16, " #id ": reads only the rows of B that some row of A needs",        \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .reads = ESMM_FORM(form), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .variant_strips = true, .can_run = can_run, .terms = esmm_cuda_terms,           \
  .term_names = {"reading of b", "scanning of a", "k's of a block", "rows of a", "", "launches"}, .run = run

#define COST_16 \
  .device = &about_16, .cost = {ESMM_GPU_READ, ESMM_GPU_READ, ESMM_GPU_K, ESMM_GPU_ROW, 0.0, ESMM_GPU_LAUNCH}

static const esmm_cuda_kernel about_16 = {.sm = 80, .line = line_16, .steady = true, .reports = true, .gates = true};
static const esmm_cuda_kernel about_f32 = {.sm = 80, .line = line_f32, .reports = true};

ESMM_KERNEL(decode_bf16) = {DESCRIPTOR(bf16, ESMM_BF16, ROWS16), COST_16};

ESMM_KERNEL(decode_f16) = {DESCRIPTOR(f16, ESMM_F16, ROWS16), COST_16};

ESMM_KERNEL(decode_f32) = {DESCRIPTOR(f32, ESMM_F32, STRIPS), .device = &about_f32,
                           .cost = {ESMM_GPU_READ, ESMM_GPU_MOVED, ESMM_GPU_K, ESMM_GPU_ROW, 0.0, ESMM_GPU_LAUNCH}};
