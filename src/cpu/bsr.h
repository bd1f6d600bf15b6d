/*
 * bsr.h: the descriptor functions of the kernels for blocks, shared by the instruction sets. Included after vec_*.h.
 *
 * The floor is 2 * m * n * k * block density, less what A's strips do not need of it. A block's rows lie block_cols
 * apart and are read where they are; a panel is 32 columns of one block column (16, where 32 does not divide it), so
 * its k-list is that of the blocks, and one list serves all strips of A that are full. Block widths that 16 does not
 * divide are copied to panels of 32 columns, with the k's that any of their block columns has.
 *
 * Few rows of A are bound by the bytes of the blocks. Blocks of a block column lie one after another and are read so,
 * once, in whole rows: each row of A is a list of its nonzeros, and adds what it needs of a block while that is in the
 * first-level cache.
 */
#include "gemm.h"

#include <math.h>

/* ------------------------------------------------------------------------------------------------ few rows */

#define FEW_ROWS (VEC == 16 ? 3 : 8) /* with more, tiles that read B once for all rows are faster */
#define FEW_PARTIAL 512              /* k's in a partial sum */

static bool bsr_few(const esmm_problem *p)
{
  return p->m <= FEW_ROWS && source_of(p->w, true) == FROM_BLOCKS;
}

/* out[0..count * VEC) += sum of values[i] * row ks[i] of b, whose rows are ld elements apart */
ALWAYS void add_columns(const int count, const esmm_dtype dtype, const void *b, int64_t at, int64_t ld,
                        const float *values, const uint32_t *ks, int64_t n, float *out)
{
  vec even[8], odd[8]; /* two chains, because one would wait for itself */
#pragma GCC unroll 8
  for (int v = 0; v < count; v++)
    even[v] = odd[v] = vec_zero();
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) {
    const vec x = vec_all(values + i), y = vec_all(values + i + 1);
#pragma GCC unroll 8
    for (int v = 0; v < count; v++)
      even[v] = vec_fma(x, esmm_vec_load(b, dtype, at + ks[i] * ld + v * VEC), even[v]);
#pragma GCC unroll 8
    for (int v = 0; v < count; v++)
      odd[v] = vec_fma(y, esmm_vec_load(b, dtype, at + ks[i + 1] * ld + v * VEC), odd[v]);
  }
  if (i < n) {
    const vec x = vec_all(values + i);
#pragma GCC unroll 8
    for (int v = 0; v < count; v++)
      even[v] = vec_fma(x, esmm_vec_load(b, dtype, at + ks[i] * ld + v * VEC), even[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < count; v++)
    vec_store(out + v * VEC, vec_add(vec_add(even[v], odd[v]), vec_load(out + v * VEC)));
}

/* The same for `width` columns, a multiple of 16. */
ALWAYS void add_block(const esmm_dtype dtype, const void *b, int64_t at, int64_t width, const float *values,
                      const uint32_t *ks, int64_t n, float *out)
{
  int64_t j = 0;
  for (; VEC * 8 <= width - j && VEC > 4; j += VEC * 8)
    add_columns(8, dtype, b, at + j, width, values, ks, n, out + j);
  for (; VEC * 4 <= width - j; j += VEC * 4)
    add_columns(4, dtype, b, at + j, width, values, ks, n, out + j);
  for (; VEC * 2 <= width - j; j += VEC * 2)
    add_columns(2, dtype, b, at + j, width, values, ks, n, out + j);
  for (; j < width; j += VEC)
    add_columns(1, dtype, b, at + j, width, values, ks, n, out + j);
}

typedef void add_block_function(const void *b, int64_t at, int64_t width, const float *values, const uint32_t *ks,
                                int64_t n, float *out);

#define ADD_BLOCK(name, dtype)                                                                              \
  static __attribute__((noinline)) void name(const void *b, int64_t at, int64_t width, const float *values, \
                                             const uint32_t *ks, int64_t n, float *out)                     \
  {                                                                                                         \
    add_block(dtype, b, at, width, values, ks, n, out);                                                     \
  }
ADD_BLOCK(add_block_f32, ESMM_F32)
ADD_BLOCK(add_block_bf16, ESMM_BF16)
ADD_BLOCK(add_block_f16, ESMM_F16)

static add_block_function *const add_block_of[] = {
    [ESMM_F32] = add_block_f32, [ESMM_BF16] = add_block_bf16, [ESMM_F16] = add_block_f16};

/* Scratch: each row of A as a list, by block rows, and sums of each thread. */
typedef struct few_layout {
  int64_t room;   /* entries of a row's list */
  int64_t levels; /* block rows, and one for the end */
  size_t at_ks, at_starts, at_row, at_sums, sums_bytes, bytes;
} few_layout;

static few_layout few_lay_out(const esmm_problem *p)
{
  few_layout l = {.room = p->k + 64, .levels = p->w->bsr.levels + 1};
  l.bytes = align_up((size_t)(p->m * l.room) * sizeof(float));
  l.at_ks = set_aside(&l.bytes, p->m * l.room, sizeof(uint32_t));
  l.at_starts = set_aside(&l.bytes, p->m * l.levels, sizeof(uint32_t));
  l.at_row = set_aside(&l.bytes, p->k, sizeof(float));
  l.at_sums = l.bytes;
  l.sums_bytes = align_up((size_t)(2 * p->m * p->w->bsr.block_cols) * sizeof(float));
  l.bytes += (size_t)p->threads * l.sums_bytes;
  return l;
}

typedef struct few_lists {
  float *values;    /* [m][room] */
  uint32_t *ks;     /* [m][room], counted from the first k of the block row */
  uint32_t *starts; /* [m][levels] */
} few_lists;

/* Returns how many nonzeros A has. */
static int64_t few_list(const esmm_problem *p, const few_layout *l, float *buffer, const few_lists *to)
{
  const int64_t rows = p->w->bsr.block_rows;
  int64_t all = 0;
  for (int64_t i = 0; i < p->m; i++) {
    int64_t ld, n = 0;
    const float *a = rows_of_a(&p->a, i, 1, 0, p->k, buffer, &ld);
    for (int64_t level = 0; level + 1 < l->levels; level++) {
      const int64_t k = level * rows;
      to->starts[i * l->levels + level] = (uint32_t)n;
      n += list_nonzeros(a + k, esmm_min(rows, p->k - k), 0, 1, to->values + i * l->room + n, to->ks + i * l->room + n);
    }
    to->starts[(i + 1) * l->levels - 1] = (uint32_t)n;
    all += n;
  }
  return all;
}

static void few_flush(float *sums, float *partial, int64_t cells)
{
  for (int64_t i = 0; i < cells; i += VEC) {
    vec_store(sums + i, vec_add(vec_load(sums + i), vec_load(partial + i)));
    vec_store(partial + i, vec_zero());
  }
}

/* One block column; sums and partial are [m][block_cols]. Returns the multiplied terms of a column. */
static int64_t few_strip(const esmm_problem *p, const few_layout *l, const few_lists *a, int64_t s, float *sums,
                         float *partial)
{
  const esmm_bsr_form *form = &p->w->bsr;
  const int64_t width = form->block_cols, cells = p->m * width;
  add_block_function *add = add_block_of[p->w->dtype];
  int64_t terms = 0, since = 0; /* the k that the partial sum starts at */
  memset(sums, 0, (size_t)cells * sizeof *sums);
  memset(partial, 0, (size_t)cells * sizeof *partial);
  for (int64_t i = form->start[s]; i < form->start[s + 1]; i++) {
    const int64_t level = form->at[i];
    if (level * form->block_rows - since >= FEW_PARTIAL) {
      few_flush(sums, partial, cells);
      since = level * form->block_rows;
    }
    for (int64_t r = 0; r < p->m; r++) {
      const uint32_t *starts = a->starts + r * l->levels + level;
      const int64_t from = r * l->room + starts[0], count = (int64_t)starts[1] - starts[0];
      add(form->values, i * form->block_rows * width, width, a->values + from, a->ks + from, count,
          partial + r * width);
      terms += count;
    }
  }
  few_flush(sums, partial, cells);
  return terms;
}

typedef struct few_job {
  const esmm_problem *p;
  const few_layout *l;
  const few_lists *a;
  char *sums;
  _Atomic int64_t terms;
} few_job;

static void few_strips(void *arg, int64_t first, int64_t end, int worker)
{
  few_job *x = arg;
  const esmm_problem *p = x->p;
  const int64_t width = p->w->bsr.block_cols;
  float *sums = (float *)(void *)(x->sums + (size_t)worker * x->l->sums_bytes);
  int64_t terms = 0;
  for (int64_t s = first; s < end; s++) {
    const int64_t col0 = s * width, cols = esmm_min(width, p->n - col0);
    terms += cols * few_strip(p, x->l, x->a, s, sums, sums + p->m * width);
    esmm_finish(p, 0, p->m, col0, cols, sums, width);
  }
  x->terms += terms;
}

static void few_run(const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const few_layout l = few_lay_out(p);
  const few_lists a = {.values = scratch,
                       .ks = (uint32_t *)(void *)((char *)scratch + l.at_ks),
                       .starts = (uint32_t *)(void *)((char *)scratch + l.at_starts)};
  const double start = now_if_timed(p);
  const int64_t nonzeros = few_list(p, &l, (float *)(void *)((char *)scratch + l.at_row), &a);
  stats->seconds_extract = now_if_timed(p) - start;
  few_job x = {.p = p, .l = &l, .a = &a, .sums = (char *)scratch + l.at_sums};
  esmm_for(p->ctx, p->threads, p->w->bsr.strips, 1, few_strips, &x);
  const double terms = (double)x.terms;
  stats->density_a = (double)nonzeros / ((double)p->m * (double)p->k);
  stats->strip_density_a = stats->density_a;
  stats->joint_density = terms / ((double)p->m * (double)p->n * (double)p->k);
  stats->flop_useful = 2.0 * terms;
}

/* ------------------------------------------------------------------------------------------------ the descriptor */

static void few_units(const esmm_problem *p, double *units)
{
  const double m = (double)p->m, k = (double)p->k, columns = (double)(p->w->bsr.strips * p->w->bsr.block_cols);
  /* One row's worth is hidden behind the reading of B. */
  units[0] = (m - 1.0) * columns * k * bsr_density(p->w) * p->sample.element / VEC;
  units[1] = m * k;
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * p->sample.strip[ESMM_CPU_HEIGHTS - 1]);
  units[3] = 0.5 * m * (double)p->w->bsr.blocks;
  units[5] = 1.0;
}

/* Share of a panel's k's that are kept, over those that have a nonzero in 32 columns: what sample.joint counts. */
static double bsr_kept_ratio(const esmm_weights *w)
{
  if (source_of(w, true) == FROM_UNION || w->strip_density <= 0.0)
    return 1.0;
  return bsr_density(w) / w->strip_density;
}

static void bsr_units(const esmm_problem *p, int level, double *units)
{
  const source from = source_of(p->w, true);
  const double m = (double)p->m, k = (double)p->k, width = (double)panel_width(p->w, from);
  const double columns = (double)esmm_round_up(p->n, panel_width(p->w, from)), panels = columns / width;
  const double strips = (double)esmm_ceil_div(p->m, 1 << level), height = (double)(1 << level);
  const double joint = fmin(1.0, p->sample.joint[level] * bsr_kept_ratio(p->w));
  const double lists = p->sample.strip[level] >= 1.0 ? (double)esmm_ceil_div(p->m, 64) : strips; /* a panel's lists */
  units[0] = m * columns * k * joint / VEC;
  units[1] = m * k * (0.5 + p->sample.strip[level]);
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * p->sample.strip[ESMM_CPU_HEIGHTS - 1]);
  units[3] = panels * (lists * k / 64.0 * (0.25 + joint) +
                       (from == FROM_UNION || p->w->dtype != ESMM_F32
                            ? (double)esmm_ceil_div(p->m, 64) * k * joint * (from == FROM_UNION ? 0.5 : 0.125)
                            : 0.0));
  units[4] = strips * panels * height * width / TILE_COLS / MR *
             (joint > 0.25 ? (double)esmm_ceil_div(p->k, 2048) : 1.0) * (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

static void bsr_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                      int64_t *variant)
{
  (void)self;
  if (!bsr_few(p)) {
    cheapest_strip(p, cost, bsr_units, units, variant);
    return;
  }
  *variant = 1;
  few_units(p, units);
}

static size_t bsr_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  return bsr_few(p) ? few_lay_out(p).bytes : gemm_workspace(self, p);
}

static esmm_status bsr_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                           esmm_stats *stats)
{
  if (!bsr_few(p))
    return gemm_run(self, ctx, p, scratch, stats);
  few_run(p, scratch, stats);
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define BSR_KERNEL                                                                                                   \
  .cost =                                                                                                            \
      {COST_FMA * ESMM_CPU_COST_LISTED, COST_PACK, ESMM_CPU_COST_READ_B, COST_WORD, COST_TILE, ESMM_CPU_COST_START}, \
  .backend = &esmm_cpu_backend, .reads = ESMM_FORM(BSR), .variant_strips = true,                                     \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .terms = bsr_terms, .workspace = bsr_workspace,            \
  .run = bsr_run,                                                                                                    \
  .term_names = {"multiply-adds",     "scanning and packing of a", "reading of b", "making of panels and k-lists",   \
                 "starting of tiles", "starting threads"}
