/*
 * k_nm16_decode.c: decode_nm_bf16 and decode_nm_f16: few rows times 2:4 weights. See k_nm16_decode.cu.
 *
 * The floor is B's bytes. A is copied by every block, so the more columns a block has the better; but warps that share
 * a block's columns need no cluster, and fewer columns mean more blocks.
 */
#include "cuda/kernels/common/host.h"
#include "cuda/kernels/nm16/decode_params.h"
#include "cuda/ops/nm.h"

#include <math.h>
#include <stdio.h>

#define WARPS (ESMM_NM16_DECODE_THREADS / 32)
#define AT_ONCE 2        /* blocks on a multiprocessor */
#define MOST_SHIFT 2     /* four warps side by side, two for each column */
#define LEAST_BLOCKS 2   /* of 64 k's that a warp is to have where a cluster shares them */
#define FEW 8            /* rows of A that one instruction takes */
#define BLOCK_EXTRA 2048 /* shared memory that a block takes beside what it asks for */

ESMM_FATBIN(k_nm16_decode);
#define FUNCTION(name)                                                       \
  {                                                                          \
    &fatbin_k_nm16_decode, "esmm_nm16_decode_" name, ESMM_NM16_DECODE_SHARED \
  }
/* For at most 8 rows, and for more. */
static const esmm_cuda_function bf16[2] = {FUNCTION("bf16_8"), FUNCTION("bf16_16")},
                                f16[2] = {FUNCTION("f16_8"), FUNCTION("f16_16")};

/* ---- how a product is cut ---- */

typedef struct cut {
  int shift;     /* 1 << shift warps side by side in a block */
  int64_t ranks; /* blocks that share columns */
  int64_t tiles; /* of columns */
} cut;

/* The most columns in a block with which the GPU is nearly full, alone rather than in clusters; where it will not be,
   what fills it best. */
static cut find_cut(const esmm_problem *p)
{
  const int64_t slices = esmm_ceil_div(p->n, ESMM_NM16_DECODE_COLS), blocks = esmm_nm16_blocks(p->k);
  const int64_t most_ranks = esmm_cuda_get(p->ctx)->sm == 90 ? ESMM_NM16_DECODE_RANKS : 1;
  const int64_t at_once = AT_ONCE * esmm_cuda_sms(p), enough = 3 * at_once / 4;
  cut best = {.shift = MOST_SHIFT, .ranks = 1, .tiles = esmm_ceil_div(slices, 1 << MOST_SHIFT)};
  int64_t best_busy = 0;
  for (int64_t ranks = 1; ranks <= most_ranks; ranks *= 2)
    for (int shift = MOST_SHIFT; shift >= 0; shift--) {
      const int64_t tiles = esmm_ceil_div(slices, 1 << shift), busy = esmm_min(tiles * ranks, enough);
      if (ranks > 1 && ranks * (WARPS >> shift) * LEAST_BLOCKS > blocks)
        continue;
      if (tiles * ranks <= esmm_cuda_most_blocks(at_once, ranks) && busy > best_busy) {
        best = (cut){.shift = shift, .ranks = ranks, .tiles = tiles};
        best_busy = busy;
      }
    }
  return best;
}

/* Fills in range and chunk; returns the bytes of a block. */
static int64_t lay_out(const esmm_problem *p, const cut *c, esmm_nm16_decode_params *params)
{
  const int64_t most = esmm_min(ESMM_NM16_DECODE_SHARED, esmm_cuda_get(p->ctx)->shared_per_sm / AT_ONCE - BLOCK_EXTRA);
  const int64_t cols = ESMM_NM16_DECODE_COLS << c->shift, ways = WARPS >> c->shift;
  const int64_t sums = ways * p->m * (cols + ESMM_NM16_DECODE_PAD) * (int64_t)sizeof(float);
  const int64_t unit = ways * ESMM_NM16_DECODE_STAGES(p->m > FEW ? 2 : 1),
                range = esmm_ceil_div(params->blocks, c->ranks);
  const int64_t room = (most / (2 * p->m) - ESMM_NM16_DECODE_SPARE) / ESMM_NM16_K;
  params->range = (int32_t)range;
  params->chunk = (int32_t)esmm_min(range, esmm_max(room / unit, 1) * unit);
  return esmm_max(sums, 2 * p->m * (params->chunk * ESMM_NM16_K + ESMM_NM16_DECODE_SPARE));
}

/* ---- the kernel ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->n > ESMM_NM16_MOST_SIDE || p->k > ESMM_NM16_MOST_SIDE)
    return esmm_cuda_too_large(p, why, why_bytes);
  if (esmm_cuda_get(p->ctx)->shared_per_block < ESMM_NM16_DECODE_SHARED)
    return esmm_cuda_too_little_shared(p, ESMM_NM16_DECODE_SHARED, why, why_bytes);
  if (p->m <= ESMM_NM16_DECODE_ROWS)
    return true;
  (void)snprintf(why, why_bytes, "m is %lld, it takes %d at most", (long long)p->m, ESMM_NM16_DECODE_ROWS);
  return false;
}

/* Bytes of B, by the part of the GPU that reads them; those of A, which each block copies. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const cut c = find_cut(p);
  const double m = (double)p->m, k = (double)p->k, blocks = (double)(4 * c.tiles * c.ranks),
               gpu = (double)(3 * esmm_cuda_sms(p));
  const double read = (double)(esmm_nm16_blocks(p->k) * esmm_nm16_tiles(p->n) * ESMM_NM16_BLOCK);
  units->base[0] = read * fmax(1.0, gpu / blocks);
  units->base[1] = 2.0 * m * k * (double)c.tiles;
  units->base[2] = m;
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  (void)stats;
  const esmm_cuda_function *of = self->own;
  const cut c = find_cut(p);
  esmm_nm16_decode_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                    .a = esmm_cuda_matrix(&p->a),
                                    .b = esmm_cuda_b(p)->nm,
                                    .blocks = (int32_t)esmm_nm16_blocks(p->k),
                                    .group_shift = c.shift,
                                    .vector = esmm_cuda_is_vector(&p->a),
                                    .epilogue = esmm_cuda_epilogue(p)};
  const esmm_launch launch = {.grid_x = (unsigned)(c.tiles * c.ranks),
                              .threads = ESMM_NM16_DECODE_THREADS,
                              .shared = (unsigned)lay_out(p, &c, &params),
                              .cluster = c.ranks > 1 ? (unsigned)c.ranks : 0};
  return esmm_cuda_launch(ctx, &of[p->m > FEW], &launch, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 80, .line = line};

#define DESCRIPTOR(id, dtype)                                                                                 \
  .name = "decode_nm_" #id, .doc = #id ": m of 1 to 16, 2:4 weights: reads the k's that they kept, once",     \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(NM16),                \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = id, .can_run = can_run, .terms = esmm_cuda_terms, \
  .term_names = {"reading of b", "copying of a", "rows of a", "", "", "launches"},                            \
  .cost = {ESMM_GPU_READ, ESMM_GPU_CACHED, ESMM_GPU_ROW, 0.0, 0.0, ESMM_GPU_LAUNCH}, .run = run

ESMM_KERNEL(decode_nm_bf16) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(decode_nm_f16) = {DESCRIPTOR(f16, ESMM_F16)};
