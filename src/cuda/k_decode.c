/*
 * k_decode.c: m of 1 to 16, on a GPU. See k_decode.cu.
 *
 * The floor is the bytes of B's rows that A needs. How C is cut: more columns in a tile mean that A is read less often,
 * more blocks along k that the GPU is full.
 */
#include "cuda.h"

#include <stdio.h>

#define MOST_SIDE ((int64_t)1 << 30) /* of B: counters have 32 bits */
#define LEAST_RANGE 128              /* k's that are worth a block of their own */
#define RANGE_UNIT 64                /* k's of a block are a multiple of it, */
#define SHARE_UNIT 16                /* and those of a warp of this */
#define FEW_WARPS 8                  /* of a block that shares its multiprocessor, or has little shared memory */
#define BLOCK_EXTRA 2048             /* shared memory that a block takes beside what it asks for */

ESMM_FATBIN(k_decode);

/* A kernel of k_decode.cu, by the rows of A that it has room for. */
typedef struct variant {
  esmm_cuda_function any, large; /* the same function: for any GPU, and where a block may have much shared memory */
  int64_t rows, cols;            /* of a tile */
  int64_t warps;                 /* most of a block */
  int64_t stages;                /* of a warp's ring */
  int64_t scan;                  /* k's of A that are scanned at a time */
  int64_t at_once;               /* most blocks on a multiprocessor, by their registers */
} variant;

#define FUNCTIONS(name)                              \
  {&fatbin_k_decode, name, ESMM_DECODE_SHARED},      \
  {                                                  \
    &fatbin_k_decode, name, ESMM_DECODE_SHARED_LARGE \
  }
static const variant bf16[] = {{FUNCTIONS("esmm_decode_bf16_8"), 8, 64, 16, 3, 256, 3},
                               {FUNCTIONS("esmm_decode_bf16_16"), 16, 128, 8, 2, 64, 2}};
static const variant f16[] = {{FUNCTIONS("esmm_decode_f16_8"), 8, 64, 16, 3, 256, 3},
                              {FUNCTIONS("esmm_decode_f16_16"), 16, 128, 8, 2, 64, 2}};
static const variant f32[] = {{FUNCTIONS("esmm_decode_f32_1"), 1, 32, 16, 3, 128, 3},
                              {FUNCTIONS("esmm_decode_f32_4"), 4, 32, 16, 3, 128, 2},
                              {FUNCTIONS("esmm_decode_f32_8"), 8, 32, 16, 3, 128, 2},
                              {FUNCTIONS("esmm_decode_f32_16"), 16, 32, 16, 4, 32, 2}};

/* By dtype and m; for a larger m, which cannot run, the largest. */
static const variant *find_variant(const esmm_problem *p)
{
  const variant *v = p->w->dtype == ESMM_F32 ? f32 : p->w->dtype == ESMM_BF16 ? bf16 : f16;
  while (v->rows < p->m && v->rows < ESMM_DECODE_ROWS)
    v++;
  return v;
}

/* ---- how a product is cut ---- */

typedef struct cut {
  int64_t tiles; /* of columns */
  int64_t ranks; /* blocks that share a tile */
  int64_t warps; /* of a block */
} cut;

/* As few blocks to a tile as nearly fill the GPU. */
static cut find_cut(const esmm_problem *p, int64_t most_ranks)
{
  const variant *v = find_variant(p);
  const int64_t gpu = p->w->cuda->multiprocessors;
  cut c = {.tiles = esmm_ceil_div(p->n, v->cols), .ranks = 1};
  while (c.ranks * 2 <= most_ranks && c.ranks * 2 * LEAST_RANGE <= p->k && 4 * c.tiles * c.ranks < 3 * gpu)
    c.ranks *= 2;
  c.warps = c.tiles * c.ranks > gpu ? FEW_WARPS : v->warps;
  return c;
}

/* ---- shared memory, as k_decode.cu lays it out ---- */

static bool has_large(const esmm_cuda_properties *gpu)
{
  return gpu->shared_per_block >= ESMM_DECODE_SHARED_LARGE;
}

/* Bytes of a block for as many blocks as are to share a multiprocessor. */
static int64_t room(const esmm_cuda_properties *gpu, const variant *v, const cut *c, int64_t multiprocessors)
{
  const int64_t together = esmm_min(esmm_ceil_div(c->tiles * c->ranks, multiprocessors), v->at_once);
  const int64_t most = has_large(gpu) ? ESMM_DECODE_SHARED_LARGE : ESMM_DECODE_SHARED;
  return esmm_min(most, gpu->shared_per_sm / together - BLOCK_EXTRA);
}

/* Bytes of a warp that has so many k's of A. */
static int64_t warp_bytes(const esmm_problem *p, int64_t chunk)
{
  const variant *v = find_variant(p);
  const int64_t element = (int64_t)esmm_dtype_size(p->w->dtype), lines = p->w->dtype == ESMM_F32 ? v->rows : p->m;
  const int64_t ring = v->stages * ESMM_DECODE_STEP * v->cols * element;
  const int64_t list = (chunk + ESMM_DECODE_STEP) * (int64_t)sizeof(uint16_t);
  return esmm_round_up(ring + lines * (chunk + ESMM_DECODE_SPARE) * element + list, 256);
}

/* Fills in chunk and warp_shared; returns the bytes of a block. */
static int64_t lay_out(const esmm_problem *p, int64_t warps, int64_t bytes, esmm_decode_params *params)
{
  const variant *v = find_variant(p);
  const int64_t inbox = (p->m * v->cols + ESMM_DECODE_RANKS) * (int64_t)sizeof(float);
  int64_t chunk = esmm_round_up(params->share, v->scan);
  while (chunk > v->scan && warps * warp_bytes(p, chunk) + inbox > bytes)
    chunk -= v->scan;
  params->chunk = (int32_t)chunk;
  params->warp_shared = (int32_t)warp_bytes(p, chunk);
  return warps * warp_bytes(p, chunk) + inbox;
}

/* ---- the kernel ---- */

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, esmm_dtype dtype, char *why, size_t why_bytes)
{
  const int shared = esmm_cuda_get(ctx)->shared_per_block;
  if (p->m > ESMM_DECODE_ROWS)
    (void)snprintf(why, why_bytes, "m is %lld, decode takes %d at most", (long long)p->m, ESMM_DECODE_ROWS);
  else if (p->a.dtype != dtype || p->w->dtype != dtype)
    (void)snprintf(why, why_bytes, "a is %s and b %s, it takes %s only", esmm_dtype_str(p->a.dtype),
                   esmm_dtype_str(p->w->dtype), esmm_dtype_str(dtype));
  else if (p->n > MOST_SIDE || p->k > MOST_SIDE)
    (void)snprintf(why, why_bytes, "b is %lld x %lld: too large for its counters", (long long)p->k, (long long)p->n);
  else if (shared < ESMM_DECODE_SHARED)
    (void)snprintf(why, why_bytes, "a block may have %d bytes of shared memory, it needs %d", shared,
                   ESMM_DECODE_SHARED);
  else
    return true;
  return false;
}

static bool can_run_bf16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_BF16, why, why_bytes);
}

static bool can_run_f16(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_F16, why, why_bytes);
}

static bool can_run_f32(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes)
{
  return can_run(ctx, p, ESMM_F32, why, why_bytes);
}

static void terms(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows)
{
  (void)cost;
  const double m = (double)p->m, k = (double)p->k, element = (double)esmm_dtype_size(p->w->dtype);
  const double cols = (double)esmm_round_up(p->n, find_variant(p)->cols);
  units[0] = p->sample.strip[ESMM_SAMPLE_HEIGHTS - 1] * k * cols * element; /* a strip is all of A: its union */
  units[1] = m * k * element * (double)find_cut(p, ESMM_DECODE_RANKS).tiles;
  units[2] = m * (double)p->n;
  units[ESMM_COST_TERMS - 1] = 1.0;
  *strip_rows = p->m;
}

static size_t workspace(const esmm_problem *p)
{
  (void)p;
  return 0;
}

/* Lines along k that can be copied 16 bytes at a time. */
static bool is_vector(const esmm_matrix *a)
{
  const bool along_k = a->order == ESMM_ROW_MAJOR || a->ld == 1, many = a->rows > 1;
  return along_k && esmm_cuda_address(a) % 16 == 0 && (!many || a->ld * (int64_t)esmm_dtype_size(a->dtype) % 16 == 0);
}

static esmm_status run(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  const struct esmm_cuda_weights *w = p->w->cuda;
  const esmm_cuda_properties *gpu = esmm_cuda_get(ctx);
  const variant *v = find_variant(p);
  const bool is_f32 = p->w->dtype == ESMM_F32;
  cut c = find_cut(p, gpu->sm == 90 ? ESMM_DECODE_RANKS : 1);
  if (!has_large(gpu))
    c.warps = FEW_WARPS;
  const int64_t range = esmm_round_up(esmm_ceil_div(p->k, c.ranks), RANGE_UNIT);
  esmm_decode_params params = {
      .gate = p->call->gate,
      .a = esmm_cuda_matrix(&p->a),
      .b = is_f32 ? w->strips.data : w->rows,
      .b_slice = is_f32 ? w->strips.k_padded * ESMM_STRIP * (int64_t)sizeof(float) : v->cols * 2,
      .b_row = is_f32 ? ESMM_STRIP * (uint32_t)sizeof(float) : (uint32_t)w->rows_ld * 2,
      .range = (int32_t)range,
      .share = (int32_t)esmm_round_up(esmm_ceil_div(range, c.warps), SHARE_UNIT),
      .vector = is_vector(&p->a),
      .report = p->call->report,
      .epilogue = esmm_cuda_epilogue(p),
  };
  const int64_t shared = lay_out(p, c.warps, room(gpu, v, &c, w->multiprocessors), &params);
  const esmm_launch launch = {.grid_x = (unsigned)(c.tiles * c.ranks),
                              .threads = (unsigned)(32 * c.warps),
                              .shared = (unsigned)shared,
                              .cluster = c.ranks > 1 ? (unsigned)c.ranks : 0};
  stats->strip_rows = p->m;
  return esmm_cuda_launch(ctx, has_large(gpu) ? &v->large : &v->any, &launch, p->call->stream, &params);
}

#define DESCRIPTOR(id)                                                                                             \
  .name = "decode_" #id, .doc = "m of 1 to 16, " #id ": reads only the rows of B that some row of A needs",        \
  .backend = ESMM_CUDA, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .sm = 80, .can_run = can_run_##id, \
  .terms = terms, .term_names = {"reading of b", "scanning of a", "writing of c", "", "", "launches"},             \
  .cost = {2.8e-13, 1.5e-13, 1e-12, 0.0, 0.0, 3.5e-6}, .workspace = workspace, .run = run

ESMM_KERNEL(decode_bf16) = {DESCRIPTOR(bf16)};

ESMM_KERNEL(decode_f16) = {DESCRIPTOR(f16)};

ESMM_KERNEL(decode_f32) = {DESCRIPTOR(f32)};
