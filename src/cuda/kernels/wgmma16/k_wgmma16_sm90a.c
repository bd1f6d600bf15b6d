/*
 * k_wgmma16_sm90a.c: bf16 and fp16 on Hopper: dense_*_sm90a and joint_*_sm90a, which are modes of one device function.
 * See k_wgmma16_sm90a.cu.
 *
 * A gated product is one launch of dense's: tiles of 128 columns of C, for which a stage has as many columns of both
 * weights. The joint kernel makes one branch alone. On request its launch chooses between itself and its dense partner.
 * A is read as it is where TMA can do that (16 bits, 16-byte lines), else copied first.
 */
#include "cuda/kernels/common/host.h"

#include <math.h>
#include <stdio.h>

#define ALIGN 1024                /* of the workspace's parts: what wgmma reads */
#define LEAST_STEPS 4             /* stages that are worth a part */
#define LEND 5                    /* stages that writing lent sums takes, */
#define ADD_LENT 4                /* and to add them */
#define LEAST_LENT 12             /* stages that are worth lending */
#define STAYS 24000000            /* bytes of B that stay in half of the second-level cache */
#define PART_STAGES 13            /* adding the parts of a split tile takes as long */
#define MANY_ROUNDS 6             /* waves; after them the plan counts a partial one as whole: see saves_by_parts */
#define KEPT 4                    /* k's per alive one that joint expects, to decide on split tiles */
#define MOST_STRIP_ROWS (1 << 30) /* of C's bitmaps: more than C has rows, and 32 bits */

ESMM_FATBIN(k_wgmma16_sm90a);

typedef struct functions {
  esmm_cuda_function any, more, gated; /* more: dense, where a curve or a residual follows in registers */
  esmm_cuda_function lent;             /* dense, where stages are lent */
} functions;
#define FUNCTION(name)                                                 \
  {                                                                    \
    &fatbin_k_wgmma16_sm90a, "esmm_wgmma16_" name, ESMM_WGMMA16_SHARED \
  }
#define FUNCTIONS(id)                                                               \
  {                                                                                 \
    FUNCTION(id), FUNCTION("more_" id), FUNCTION("gated_" id), FUNCTION("lent_" id) \
  }
static const functions bf16 = FUNCTIONS("bf16"), f16 = FUNCTIONS("f16");

/* ---- can it? ---- */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m > ESMM_WGMMA16_MOST_SIDE || p->n > ESMM_WGMMA16_MOST_SIDE || p->k > ESMM_WGMMA16_MOST_SIDE ||
      (double)p->k * (double)esmm_cuda_b(p)->rows_ld / 8 > (double)UINT32_MAX)
    return esmm_cuda_too_large(p, why, why_bytes);
  if (esmm_cuda_sms(p) <= ESMM_WGMMA16_MOST_BLOCKS)
    return true;
  (void)snprintf(why, why_bytes, "the GPU has %d multiprocessors, it takes %d at most", (int)esmm_cuda_sms(p),
                 ESMM_WGMMA16_MOST_BLOCKS);
  return false;
}

/* Numbers that a thread reads two at once. */
static bool aligned(const float *row)
{
  return (uintptr_t)row % (2 * sizeof *row) == 0;
}

/* More follows the sums than scaling, a bias and a rectifier. */
static bool more_follows(const esmm_problem *p)
{
  return p->activation > ESMM_ACT_RELU2 || p->gated || p->residual.data;
}

/* Dense can have TMA write C: what follows the sums is done in registers, and reads no more than biases and a residual.
   joint can where no more follows. */
static bool writes_boxes(const esmm_problem *p)
{
  return esmm_dtype_size(p->c.dtype) == 2 && p->c.order == ESMM_ROW_MAJOR && p->beta == 0.0f &&
         esmm_cuda_as_it_is(&p->c) && aligned(p->bias) && aligned(p->gate.w ? p->gate.bias : NULL) &&
         (!p->gated || p->gate.w) && (!p->residual.data || esmm_in_pairs(&p->residual));
}

/* Large enough for its launch to sample A, and dense needs no other entry for C. */
static bool can_choose(const esmm_problem *p)
{
  return p->m >= ESMM_WGMMA16_LEAST_SAMPLED && p->k >= ESMM_WGMMA16_LEAST_SAMPLED &&
         !(more_follows(p) && writes_boxes(p));
}

/* ---- how a product is cut ---- */

/* Of C, or pairs of them where two blocks share an operand. */
static int64_t count_tiles(const esmm_problem *p, int cols, int share)
{
  const int64_t rows = esmm_ceil_div(p->m, ESMM_TILE), columns = esmm_ceil_div(p->n, cols);
  return (share == ESMM_WGMMA16_SHARE_B ? esmm_ceil_div(rows, 2) : rows) *
         (share == ESMM_WGMMA16_SHARE_A ? esmm_ceil_div(columns, 2) : columns);
}

/* Splitting pays where it saves each part more stages than adding takes; kept: k's per alive one. */
static bool parts_pay(int64_t splits, int64_t steps, int64_t kept)
{
  return (splits - 1) * steps > PART_STAGES * splits * kept;
}

/* Stages that each of the last wave's `rest` tiles lends to the idle pairs. All end at the same time where
   steps - lent + ADD_LENT = (lent + LEND) * rest / idle + LEND: a tile's stages may be cut in two. */
static int64_t lend_stages(int64_t rest, int64_t clusters, int64_t steps)
{
  const double each = (double)rest / (double)(clusters - rest);
  const int64_t lent = (int64_t)(((double)steps + ADD_LENT) / (each + 1.0) - LEND);
  return lent >= LEAST_LENT ? lent : 0;
}

/* kept: expected k's of A per alive one; parts: most of a tile; lends: idle pairs may begin with stages of the last
   wave's tiles. */
static esmm_wgmma16_units cut_tiles(const esmm_problem *p, int cols, int share, int group, int64_t kept, int64_t parts,
                                    bool lends)
{
  const int64_t clusters = esmm_cuda_sms(p) / ESMM_WGMMA16_CLUSTER, steps = esmm_ceil_div(p->k, ESMM_WGMMA16_K);
  const int64_t tiles = count_tiles(p, cols, share);
  /* Split-k for a partial last wave, where that fills the GPU. */
  const int64_t rest = tiles % clusters;
  const int64_t most = rest > 0 ? esmm_min(parts, esmm_min(clusters / rest, steps / LEAST_STEPS)) : 1;
  const int64_t splits = most > 1 && parts_pay(most, steps, kept) ? most : 1;
  const int64_t lent = lends && 2 * rest > clusters && tiles > clusters ? lend_stages(rest, clusters, steps) : 0;
  return (esmm_wgmma16_units){.cols = cols,
                              .share = share,
                              .group = group,
                              .whole = (int32_t)(splits > 1 || lent > 0 ? tiles - rest : tiles),
                              .splits = (int32_t)splits,
                              .lent = (int32_t)lent};
}

/* Tiles of 256 columns are faster for each column, those of 128 fill the GPU sooner. Where B stays in the second-level
   cache, rows of A need not come together. Those of a gated product are of 128 columns, at what 256 cost. */
static esmm_wgmma16_units cut_dense(const esmm_problem *p)
{
  const int64_t rows = esmm_ceil_div(p->m, ESMM_TILE), wide = rows * esmm_ceil_div(p->n, ESMM_WGMMA16_WIDE);
  const int cols = wide < esmm_cuda_sms(p) * 15 / 16 ? ESMM_WGMMA16_NARROW : ESMM_WGMMA16_WIDE;
  const int share = rows > 1 ? ESMM_WGMMA16_SHARE_B : ESMM_WGMMA16_SHARE_A;
  const double b = 2.0 * (double)p->k * (double)p->n;
  if (p->gate.w)
    return cut_tiles(p, ESMM_WGMMA16_GATED, share, 2.0 * b > STAYS ? 8 : 1, 1, ESMM_WGMMA16_GATED_PARTS, false);
  return cut_tiles(p, cols, share, b > STAYS ? 8 : 1, 1, INT64_MAX, !more_follows(p));
}

static esmm_wgmma16_units cut_skip(const esmm_problem *p, int mode)
{
  const int64_t rows = esmm_ceil_div(p->m, ESMM_TILE);
  if (mode == ESMM_WGMMA16_SKIP_A)
    return cut_tiles(p, ESMM_WGMMA16_WIDE, ESMM_WGMMA16_SHARE_A, 32, KEPT, INT64_MAX, false);
  return (esmm_wgmma16_units){
      .cols = ESMM_WGMMA16_NARROW, .group = 8, .whole = (int32_t)(rows * esmm_ceil_div(p->n, ESMM_TILE)), .splits = 1};
}

/* Does the plan count on what split-k saves? Not after many waves: it would promise more than 8 % over cuBLAS there,
   and products of 7 to 14 waves came out level with it. */
static bool saves_by_parts(const esmm_problem *p, const esmm_wgmma16_units *u)
{
  return u->splits > 1 && u->whole < MANY_ROUNDS * (esmm_cuda_sms(p) / ESMM_WGMMA16_CLUSTER);
}

/* Waves of units, each as long as a whole tile, of the busiest block. */
static double rounds(const esmm_problem *p, const esmm_wgmma16_units *u)
{
  const int64_t tiles = count_tiles(p, u->cols, u->share);
  const int64_t workers = esmm_cuda_sms(p) / (u->share == ESMM_WGMMA16_ALONE ? 1 : ESMM_WGMMA16_CLUSTER);
  return (double)esmm_ceil_div(u->whole, workers) + (tiles <= u->whole      ? 0.0
                                                     : saves_by_parts(p, u) ? 1.0 / u->splits
                                                                            : 1.0);
}

/* B's zeros are looked at where its tiles have enough of them to pay for narrower tiles of C. */
static int skip_mode(const esmm_problem *p)
{
  return p->w->full || 5 * esmm_cuda_b(p)->tile_density > 4 ? ESMM_WGMMA16_SKIP_A : ESMM_WGMMA16_SKIP_AB;
}

/*
 * Segments of k that a strip is packed in. One more shortens packing, which takes as long as one segment of 128 k's at
 * least, and costs every wave of tiles a stage that is not full: the best number goes with the root of k over waves.
 * Never more than fill the GPU in one wave.
 */
static void cut_segments(const esmm_problem *p, int32_t *segments, int32_t *segment_k)
{
  const int64_t strips = esmm_ceil_div(p->m, ESMM_TILE), gpu = esmm_cuda_sms(p);
  const esmm_wgmma16_units u = cut_skip(p, skip_mode(p));
  const double best = sqrt((double)(3 * esmm_ceil_div(p->k, ESMM_WGMMA16_K)) / (5 * rounds(p, &u)));
  const int64_t most = esmm_min(strips < gpu ? gpu / strips : 1, esmm_ceil_div(p->k, ESMM_WGMMA16_SEGMENT_STEP));
  const int64_t wanted = esmm_max(1, esmm_min((int64_t)(best + 0.5), esmm_min(most, ESMM_WGMMA16_MOST_SEGMENTS)));
  const int64_t k = esmm_round_up(esmm_ceil_div(p->k, wanted), ESMM_WGMMA16_SEGMENT_STEP);
  *segment_k = (int32_t)k;
  *segments = (int32_t)esmm_ceil_div(p->k, k);
}

/* ---- what it costs ---- */

/* In launches: TMA does not write tiles over C's edge. With odd lines, or an epilogue too large for registers, all of C
   is written element by element. */
static double edges(const esmm_problem *p, int cols, bool dense)
{
  const bool lines = esmm_cuda_as_it_is(&p->c), more = more_follows(p);
  const double all = ESMM_GPU_ODD * (double)p->m * (double)p->n;
  if (lines && more && !(dense && writes_boxes(p)))
    return ESMM_GPU_FOLLOWS * all;
  return (p->n % cols != 0 || !lines ? ESMM_GPU_EDGE : 0.0) + (!lines ? all : more ? ESMM_GPU_IN_REGISTERS * all : 0.0);
}

/* Arithmetic and reading work side by side: whichever takes longer is what the product takes. Writing C is hidden in
   part. */
static void dense_line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                       int64_t *variant)
{
  (void)self;
  const esmm_wgmma16_units u = cut_dense(p);
  const double stages = rounds(p, &u) * (double)esmm_ceil_div(p->k, ESMM_WGMMA16_K);
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  const double read = 2.0 * k * (m + (p->gate.w ? 2.0 : 1.0) * n);
  const int narrow = u.cols == ESMM_WGMMA16_WIDE || p->gate.w ? 0 : 1;
  units->base[2] = ESMM_GPU_EXPOSED * esmm_cuda_c_bytes(p);
  if (cost[narrow] * stages >= cost[2] * read)
    units->base[narrow] = stages;
  else
    units->base[2] += read;
  units->base[3] = saves_by_parts(p, &u) ? 1.0 : 0.0;
  units->base[4] = esmm_cuda_copy_units(&p->a, false);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + edges(p, u.cols, true);
  *variant = 0;
}

/* The same; of B, only what A needs is read. One or two strips are packed by few blocks, which take k after k. */
static void joint_line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                       int64_t *variant)
{
  (void)self;
  const int mode = skip_mode(p), narrow = mode == ESMM_WGMMA16_SKIP_AB;
  const esmm_wgmma16_units u = cut_skip(p, mode);
  double *per_density = narrow ? units->per_joint : units->per_strip;
  const double all = rounds(p, &u), stages = all * (double)esmm_ceil_div(p->k, ESMM_WGMMA16_K);
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  int32_t segments, segment_k;
  cut_segments(p, &segments, &segment_k);
  units->base[2] = 2.0 * k * m + ESMM_GPU_EXPOSED * esmm_cuda_c_bytes(p);
  if (cost[narrow] * stages >= cost[2] * 2.0 * k * n)
    per_density[narrow] = stages * (narrow && p->w->format == ESMM_FORMAT_BSR ? ESMM_GPU_UNEVEN : 1.0);
  else
    per_density[2] = 2.0 * k * n;
  units->base[3] = all * segments; /* a tile has a stage that is not full for each of them, or a round of bitmaps */
  units->base[4] = esmm_cuda_copy_units(&p->a, false);
  units->base[ESMM_COST_TERMS - 1] = 1.0 + (saves_by_parts(p, &u) ? ESMM_GPU_SUMS : 0.0) + edges(p, u.cols, false) +
                                     (p->m <= 2 * ESMM_TILE ? ESMM_GPU_K / ESMM_GPU_LAUNCH_SKIP * k : 0.0);
  *variant = ESMM_TILE;
}

/* ---- workspace: a copy of A, then the parts' sums, then the packed A ---- */

typedef struct layout {
  size_t copy, partial, packed, lists, counts, bits, bytes;
} layout;

static size_t partial_bytes(const esmm_problem *p, const esmm_wgmma16_units *u)
{
  const int64_t clusters = esmm_cuda_sms(p) / ESMM_WGMMA16_CLUSTER;
  return u->splits > 1 || u->lent > 0 ? (size_t)(ESMM_WGMMA16_CLUSTER * clusters) * ESMM_WGMMA16_PARTIAL : 0;
}

static bool lay_out(const esmm_problem *p, bool packs, layout *l)
{
  const esmm_wgmma16_units dense = cut_dense(p), skip = cut_skip(p, skip_mode(p));
  const size_t of_dense = partial_bytes(p, &dense), of_skip = packs ? partial_bytes(p, &skip) : 0;
  const size_t strips = (size_t)esmm_ceil_div(p->m, ESMM_TILE);
  int32_t segments, segment_k;
  cut_segments(p, &segments, &segment_k);
  const size_t k = (size_t)segments * (size_t)segment_k;
  size_t entries;
  *l = (layout){0};
  return esmm_size_mul(strips, k, &entries) && entries <= SIZE_MAX / 1024 &&
         esmm_cuda_reserve(&l->bytes, esmm_cuda_copy_bytes(&p->a, false), ALIGN, &l->copy) &&
         esmm_cuda_reserve(&l->bytes, of_dense > of_skip ? of_dense : of_skip, ALIGN, &l->partial) &&
         (!packs ||
          (esmm_cuda_reserve(&l->bytes, entries * ESMM_TILE * 2, ALIGN, &l->packed) &&
           esmm_cuda_reserve(&l->bytes, entries * sizeof(uint32_t) + ESMM_WGMMA16_LISTS_PAST, ALIGN, &l->lists) &&
           esmm_cuda_reserve(&l->bytes, strips * (size_t)segments * sizeof(uint32_t), ALIGN, &l->counts) &&
           esmm_cuda_reserve(&l->bytes, strips * (size_t)esmm_cuda_b(p)->strips.k_padded / 8, ALIGN, &l->bits)));
}

static size_t dense_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  layout l;
  return lay_out(p, false, &l) ? l.bytes : SIZE_MAX;
}

static size_t joint_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  layout l;
  return lay_out(p, true, &l) ? l.bytes : SIZE_MAX;
}

/* ---- running ---- */

/* A warp notes what it has of C, eight rows at a time. */
static bool tallies(const esmm_problem *p)
{
  return p->c.order == ESMM_ROW_MAJOR && (!p->bitmaps || p->bitmaps->strip_rows % 8 == 0);
}

/* Dense clears counts and bits itself where its tally warps see every tile: where TMA writes all of C. */
static bool clears(const esmm_problem *p)
{
  const esmm_wgmma16_units u = cut_dense(p);
  return u.splits == 1 && p->n % u.cols == 0 && writes_boxes(p) && tallies(p);
}

static esmm_status make_maps(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *a, esmm_wgmma16_params *params)
{
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const bool by_k = a->order == ESMM_COL_MAJOR;
  esmm_status status =
      esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(a), by_k ? p->m : p->k, by_k ? p->k : p->m, a->ld, &params->map_a);
  if (status == ESMM_OK)
    status = esmm_cuda_tensor_map_16(ctx, w->rows, w->rows_ld, p->k, w->rows_ld, &params->map_b);
  if (status == ESMM_OK && p->gate.w) {
    const esmm_cuda_weights *gate = esmm_cuda_of(p->gate.w);
    status = esmm_cuda_tensor_map_16(ctx, gate->rows, gate->rows_ld, p->k, gate->rows_ld, &params->map_gate);
  }
  if (status == ESMM_OK && params->packed)
    status = esmm_cuda_tensor_map_16(ctx, params->packed, ESMM_WGMMA16_BOX,
                                     esmm_ceil_div(p->m, ESMM_TILE) * 2 * params->segments * params->segment_k,
                                     ESMM_WGMMA16_BOX, &params->map_packed);
  if (status == ESMM_OK && params->c_boxes)
    status = esmm_cuda_tensor_map_16(ctx, esmm_cuda_address(&p->c), p->n, p->m, p->c.ld, &params->map_c);
  return status;
}

/* A launch's parameters in this mode, without the maps. a: A, or its copy. */
static esmm_wgmma16_params params_of(const esmm_problem *p, const esmm_matrix *a, int mode, CUdeviceptr scratch,
                                     const layout *l)
{
  const esmm_cuda_weights *w = esmm_cuda_b(p);
  const esmm_cuda_line *choose = esmm_cuda_call_of(p)->choose;
  esmm_wgmma16_params params = {
      .selector = esmm_cuda_call_of(p)->selector,
      .m = (int32_t)p->m,
      .n = (int32_t)p->n,
      .k = (int32_t)p->k,
      .mode = mode,
      .choose = choose != NULL,
      .a_by_k = a->order == ESMM_COL_MAJOR,
      .a = esmm_cuda_address(a),
      .b = w->rows,
      .a_ld = a->ld,
      .b_ld = w->rows_ld,
      .b_bits = w->tiles,
      .b_alive = w->tile_alive,
      .b_words = w->strips.k_padded / 32,
      .b_density = p->w->full ? 1.0f : (float)w->tile_density,
      .partial = scratch + l->partial,
      .report = esmm_cuda_call_of(p)->report,
      .units = {cut_dense(p), cut_skip(p, ESMM_WGMMA16_SKIP_A), cut_skip(p, ESMM_WGMMA16_SKIP_AB)},
      .c_boxes = writes_boxes(p) && (!more_follows(p) || (mode == ESMM_WGMMA16_DENSE && !choose)),
      .epilogue = esmm_cuda_epilogue(p),
      .gate_bias = (uint64_t)(uintptr_t)(p->gate.w ? p->gate.bias : NULL),
      .gate_activation = (int32_t)p->gate.activation};
  params.epilogue.strip_rows = esmm_min(params.epilogue.strip_rows, MOST_STRIP_ROWS);
  if (mode != ESMM_WGMMA16_DENSE) {
    params.packed = scratch + l->packed;
    params.lists = scratch + l->lists;
    params.counts = scratch + l->counts;
    params.a_bits = scratch + l->bits;
    cut_segments(p, &params.segments, &params.segment_k);
  }
  if (choose) {
    params.dense = choose->dense;
    params.base = choose->base;
    params.per_strip = choose->per_strip;
    params.per_joint = choose->per_joint;
    params.units[ESMM_WGMMA16_DENSE].lent = 0;
  }
  return params;
}

/* The launch clears counts and bits, and counts the bits of strips as high as tiles. */
static void clear_within(const esmm_problem *p, esmm_wgmma16_params *params)
{
  const esmm_epilogue_params *e = &params->epilogue;
  params->count_words = e->counts ? p->n : 0;
  if (!e->bits)
    return;
  const esmm_cuda_pattern_sums adds = esmm_cuda_pattern_adds(p->bitmaps);
  params->bitmap_words = esmm_cuda_pattern_zeros(p->bitmaps);
  params->bitmap_sums = adds.sums;
  if (p->bitmaps->strip_rows == ESMM_TILE) {
    params->bit_count = adds.count;
    params->count_ready = adds.number;
  }
}

/* What statistics are to be counted from. */
static void note_strips(const esmm_problem *p, const esmm_wgmma16_params *params, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  stats->strip_rows = ESMM_TILE;
  if (call->all_of_b)
    *call->all_of_b = params->mode == ESMM_WGMMA16_SKIP_A;
  if (call->a_strips)
    *call->a_strips = (esmm_strips){
        .bits = params->a_bits, .strips = esmm_ceil_div(p->m, ESMM_TILE), .k_padded = esmm_cuda_b(p)->strips.k_padded};
}

static int mode_of(const esmm_kernel *self, const esmm_problem *p)
{
  return self->flags & ESMM_KERNEL_SKIPS ? skip_mode(p) : ESMM_WGMMA16_DENSE;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  const int mode = mode_of(self, p);
  esmm_matrix a;
  CUdeviceptr meeting = 0;
  layout l;
  if (!lay_out(p, mode != ESMM_WGMMA16_DENSE, &l)) /* its size was asked for before */
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  esmm_status status = esmm_cuda_meeting(ctx, ESMM_MEETING_WGMMA16, call->stream, &meeting);
  if (status == ESMM_OK)
    status = esmm_cuda_extract_a(ctx, p, false, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  esmm_wgmma16_params params = params_of(p, &a, mode, at, &l);
  params.meeting = meeting;
  if (mode != ESMM_WGMMA16_DENSE)
    note_strips(p, &params, stats);
  else if (!params.selector.address && !params.choose && clears(p))
    clear_within(p, &params);
  status = make_maps(ctx, p, &a, &params);
  if (status != ESMM_OK)
    return status;
  /* Cooperative: parts of a tile, pairs with lent stages, and all blocks after packing or clearing wait. */
  const esmm_launch launch = {
      .grid_x = (unsigned)(esmm_cuda_get(ctx)->multiprocessors / ESMM_WGMMA16_CLUSTER * ESMM_WGMMA16_CLUSTER),
      .threads = ESMM_WGMMA16_THREADS,
      .shared = ESMM_WGMMA16_SHARED,
      .cooperative = 1,
      .cluster = ESMM_WGMMA16_CLUSTER};
  const functions *own = self->own;
  const esmm_cuda_function *function = p->gate.w                           ? &own->gated
                                       : params.c_boxes && more_follows(p) ? &own->more
                                       : params.units[mode].lent           ? &own->lent
                                                                           : &own->any;
  status = esmm_cuda_launch(ctx, function, &launch, call->stream, &params);
  if (status == ESMM_OK && params.bit_count)
    esmm_cuda_pattern_note_counted(p->bitmaps);
  return status;
}

/* Samples A and chooses as a launch with p.choose would, and writes the result to the call's report. */
static esmm_status look(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch)
{
  static const esmm_cuda_function function = {&fatbin_k_wgmma16_sm90a, "esmm_wgmma16_look", 0};
  const CUdeviceptr at = (CUdeviceptr)(uintptr_t)scratch;
  esmm_matrix a;
  layout l;
  if (!lay_out(p, true, &l))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "the workspace does not fit in memory");
  const esmm_status status = esmm_cuda_extract_a(ctx, p, false, at + l.copy, &a);
  if (status != ESMM_OK)
    return status;
  const esmm_wgmma16_params params = params_of(p, &a, mode_of(self, p), at, &l);
  return esmm_cuda_launch_blocks(ctx, &function, 1, ESMM_WGMMA16_LOOK_THREADS, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about_dense = {
    .sm = 90, .exact = true, .line = dense_line, .tallies = tallies, .clears = clears, .gates = true};
#define ABOUT_JOINT(dense)                                                                                 \
  {                                                                                                        \
    .sm = 90, .exact = true, .line = joint_line, .partner = dense, .can_choose = can_choose, .look = look, \
    .tallies = tallies, .reports = true                                                                    \
  }
static const esmm_cuda_kernel about_joint_bf16 = ABOUT_JOINT("dense_bf16_sm90a"),
                              about_joint_f16 = ABOUT_JOINT("dense_f16_sm90a");

#define COMMON(id, dtype)                                                                                 \
  .backend = &esmm_cuda_backend, .reads = ESMM_FORM(ROWS16), .dtypes = ESMM_DTYPE_BIT(dtype), .own = &id, \
  .can_run = can_run, .terms = esmm_cuda_terms, .run = run

#define DENSE(id, dtype)                                                                                 \
  .name = "dense_" #id "_sm90a", .doc = #id ": multiplies everything, on Hopper's tensor cores (wgmma)", \
  .flags = ESMM_KERNEL_DETERMINISTIC, COMMON(id, dtype), .device = &about_dense,                         \
  .term_names = {"stages of 256 columns", "stages of 128 columns", "reading and writing",                \
                 "adding of parts",       "copying of a",          "launches"},                          \
  .cost = {ESMM_GPU_STAGE, ESMM_GPU_STAGE_128,   ESMM_GPU_MOVED,                                         \
           ESMM_GPU_PARTS, ESMM_GPU_LAUNCH_NEXT, ESMM_GPU_LAUNCH_LARGE},                                 \
  .workspace = dense_workspace

#define JOINT(id, dtype)                                                                                        \
  .name = "joint_" #id "_sm90a",                                                                                \
  .doc = #id ": skips k's without a nonzero in 128 rows of A or in 128 columns of B, on Hopper's tensor cores", \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, COMMON(id, dtype), .variant_strips = true,            \
  .device = &about_joint_##id,                                                                                  \
  .term_names = {"stages of 256 columns", "stages of 128 columns", "scan of a and writing of c",                \
                 "segments of tiles",     "copying of a",          "launches"},                                 \
  .cost = {ESMM_GPU_STAGE_JOINT, ESMM_GPU_STAGE_LISTED, ESMM_GPU_MOVED,                                         \
           ESMM_GPU_SEGMENT,     ESMM_GPU_LAUNCH_NEXT,  ESMM_GPU_LAUNCH_SKIP},                                  \
  .workspace = joint_workspace

ESMM_KERNEL(dense_bf16_sm90a) = {DENSE(bf16, ESMM_BF16)};

ESMM_KERNEL(dense_f16_sm90a) = {DENSE(f16, ESMM_F16)};

ESMM_KERNEL(joint_bf16_sm90a) = {JOINT(bf16, ESMM_BF16)};

ESMM_KERNEL(joint_f16_sm90a) = {JOINT(f16, ESMM_F16)};
