/*
 * decode.h: m of 1 to 16. Reads only the rows of B that some row of A needs. Included after vec_*.h.
 *
 * The floor is bytes: union of A's nonzero k's times a row of B. B is row-major and each needed row is read as one long
 * run, eight or sixteen rows at a time; time falls with the density. For m > 1, k goes in blocks so small that the rows
 * of B that one row of A needs are still in the second-level cache for the next row.
 *
 * Eight or sixteen products are added up before they go to a partial sum of up to 512 k's (256 listed ones for m = 1),
 * and partial sums to the whole: a chain of k additions would have several times the error of a dense library.
 */
#include "operands.h"

#include <stdio.h>

#define DECODE_ROWS 16
#define DECODE_AT_ONCE (VEC == 16 ? 16 : 8) /* rows of B read side by side: as many as there are registers for */
#define DECODE_COLS 2048                    /* columns at a time: two pages of a row of fp32 B */
#define DECODE_NARROW 512                   /* columns that are still worth a separate range */
#define DECODE_K 64                         /* k's in a block when m > 1: 512 KB of fp32 B */
#define DECODE_RUN 600                      /* bytes that could be read while a row's part of a range begins */
#define DECODE_SCAN 512                     /* k's of A converted at a time where it is not fp32 row-major */
#define PARTIAL 256                         /* listed k's in a partial sum when m = 1 */
#define PARTIAL_K 512                       /* k's in a partial sum when m > 1 */

static bool decode_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m > DECODE_ROWS) {
    (void)snprintf(why, why_bytes, "m is %lld, decode takes %d at most", (long long)p->m, DECODE_ROWS);
    return false;
  }
  return true;
}

typedef struct decode_layout {
  int64_t room; /* entries of a row's list */
  int64_t width, items;
  size_t at_ks, at_sums, at_partial, bytes;
} decode_layout;

static decode_layout decode_lay_out(const esmm_problem *p)
{
  const int64_t line = 64 / (int64_t)sizeof(float);
  /* Every thread the same number of column ranges, each of whole cache lines. For one row two, so that another thread
     takes half of a late thread's; with more rows narrow ranges cost more than that: a list has few k's of a block. */
  const int64_t least = p->m == 1 && p->threads > 1 ? esmm_min(2 * p->threads, esmm_ceil_div(p->n, DECODE_NARROW)) : 1;
  const int64_t ranges = esmm_round_up(esmm_max(least, esmm_ceil_div(p->n, DECODE_COLS)), p->threads);
  decode_layout l = {.room = p->k + 64};
  l.width = esmm_round_up(esmm_ceil_div(p->n, ranges), 2 * line);
  l.items = esmm_ceil_div(p->n, l.width);
  l.bytes = align_up((size_t)(p->m * l.room) * sizeof(float));
  l.at_ks = set_aside(&l.bytes, p->m * l.room, sizeof(uint32_t));
  l.at_sums = set_aside(&l.bytes, p->m * l.items * l.width, sizeof(float));
  l.at_partial = set_aside(&l.bytes, p->m * l.items * l.width, sizeof(float));
  return l;
}

static void decode_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                         int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 1;
  const double m = (double)p->m, n = (double)p->w->rows_ld, k = (double)p->k;
  const double bytes = n * (double)esmm_dtype_size(p->w->dtype) + (double)(DECODE_RUN * decode_lay_out(p).items);
  units[0] = k * p->sample.strip[ESMM_CPU_HEIGHTS - 1] * bytes;
  units[1] = (m - 1.0) * k * p->sample.element * n / VEC; /* one row's worth is hidden behind the reading of B */
  units[2] = m * k;
  /* To start on a row's part of a block takes as long as to update some hundred columns. */
  units[3] = p->m > 1 ? m * (n + 256.0) * (double)esmm_ceil_div(p->k, DECODE_K)
                      : n + 256.0 * k * p->sample.element / DECODE_AT_ONCE;
  units[5] = p->threads > 1 ? 1.0 : 0.25;
}

static size_t decode_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return decode_lay_out(p).bytes;
}

/* out[0..width) (+)= sum of values[i] * row ks[i] of b, for count rows at a time; width is a multiple of VEC. */
ALWAYS void add_rows(const int count, const esmm_dtype dtype, const void *b, int64_t ld, const float *values,
                     const uint32_t *ks, int64_t width, float *out, bool first)
{
  const void *row[DECODE_AT_ONCE];
  vec x[DECODE_AT_ONCE];
#pragma GCC unroll 16
  for (int i = 0; i < count; i++) {
    row[i] = (const char *)b + (size_t)((int64_t)ks[i] * ld) * esmm_dtype_bytes(dtype);
    x[i] = vec_all(values + i);
  }
  for (int64_t j = 0; j < width; j += VEC) {
    vec sum = vec_mul(x[0], esmm_vec_load(row[0], dtype, j));
#pragma GCC unroll 16
    for (int i = 1; i < count; i++)
      sum = vec_fma(x[i], esmm_vec_load(row[i], dtype, j), sum);
    vec_store(out + j, first ? sum : vec_add(sum, vec_load(out + j)));
  }
}

ALWAYS void add_list(const esmm_dtype dtype, const void *b, int64_t ld, const float *values, const uint32_t *ks,
                     int64_t count, int64_t width, float *out, bool first)
{
  for (; DECODE_AT_ONCE == 16 && count >= 16; count -= 16, values += 16, ks += 16, first = false)
    add_rows(16, dtype, b, ld, values, ks, width, out, first);
  for (; count >= 8; count -= 8, values += 8, ks += 8, first = false)
    add_rows(8, dtype, b, ld, values, ks, width, out, first);
  for (; count >= 4; count -= 4, values += 4, ks += 4, first = false)
    add_rows(4, dtype, b, ld, values, ks, width, out, first);
  if (count >= 2) {
    add_rows(2, dtype, b, ld, values, ks, width, out, first);
    count -= 2;
    values += 2;
    ks += 2;
    first = false;
  }
  if (count == 1)
    add_rows(1, dtype, b, ld, values, ks, width, out, first);
}

#define ADD_LIST(name, dtype)                                                                                    \
  static __attribute__((noinline)) void name(const void *b, int64_t ld, const float *values, const uint32_t *ks, \
                                             int64_t count, int64_t width, float *out, bool first)               \
  {                                                                                                              \
    add_list(dtype, b, ld, values, ks, count, width, out, first);                                                \
  }
ADD_LIST(add_list_f32, ESMM_F32)
ADD_LIST(add_list_bf16, ESMM_BF16)
ADD_LIST(add_list_f16, ESMM_F16)

typedef void add_list_function(const void *b, int64_t ld, const float *values, const uint32_t *ks, int64_t count,
                               int64_t width, float *out, bool first);

static add_list_function *const add_list_of[] = {
    [ESMM_F32] = add_list_f32, [ESMM_BF16] = add_list_bf16, [ESMM_F16] = add_list_f16};

static void add_partial(float *sums, const float *partial, int64_t width)
{
  for (int64_t j = 0; j < width; j += VEC)
    vec_store(sums + j, vec_add(vec_load(sums + j), vec_load(partial + j)));
}

/* One row of A alone. */
static void decode_one(add_list_function *add, const void *b, int64_t ld, const float *values, const uint32_t *ks,
                       int64_t count, int64_t width, float *sums, float *partial)
{
  for (int64_t i = 0; i < count; i += PARTIAL) {
    add(b, ld, values + i, ks + i, esmm_min(PARTIAL, count - i), width, i ? partial : sums, true);
    if (i)
      add_partial(sums, partial, width);
  }
}

/* Several rows: for each block of k's, every row adds what it needs of it while B's rows are in cache. */
static void decode_rows(const esmm_problem *p, add_list_function *add, const void *b, const float *values,
                        const uint32_t *ks, int64_t room, const int64_t *count, int64_t width, int64_t ld, float *sums,
                        float *partial)
{
  int64_t at[DECODE_ROWS] = {0};
  for (int64_t k0 = 0; k0 < p->k; k0 += DECODE_K) {
    const bool first = k0 % PARTIAL_K == 0, last = (k0 + DECODE_K) % PARTIAL_K == 0 || k0 + DECODE_K >= p->k;
    for (int64_t m = 0; m < p->m; m++) {
      const uint32_t *mine = ks + m * room;
      float *to = partial + m * ld;
      int64_t n = 0;
      while (at[m] + n < count[m] && mine[at[m] + n] < k0 + DECODE_K)
        n++;
      if (first)
        memset(to, 0, (size_t)width * sizeof *to);
      add(b, p->w->rows_ld, values + m * room + at[m], mine + at[m], n, width, to, false);
      at[m] += n;
      if (last)
        add_partial(sums + m * ld, to, width);
    }
  }
}

typedef struct decode_job {
  const esmm_problem *p;
  const decode_layout *l;
  float *values, *sums, *partial;
  uint32_t *ks;
  int64_t count[DECODE_ROWS]; /* entries of each row's list */
} decode_job;

static void decode_items(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const decode_job *x = arg;
  const esmm_problem *p = x->p;
  const decode_layout *l = x->l;
  const esmm_weights *w = p->w;
  add_list_function *add = add_list_of[w->dtype];
  for (int64_t item = first; item < end; item++) {
    const int64_t j0 = item * l->width, cols = esmm_min(l->width, p->n - j0);
    const int64_t width = esmm_min(l->width, w->rows_ld - j0); /* a multiple of VEC: rows are padded to cache lines */
    const char *b = (const char *)w->rows + (size_t)j0 * esmm_dtype_size(w->dtype);
    float *sums = x->sums + item * p->m * l->width, *partial = x->partial + item * p->m * l->width;
    memset(sums, 0, (size_t)(p->m * l->width) * sizeof *sums);
    if (p->m == 1)
      decode_one(add, b, w->rows_ld, x->values, x->ks, x->count[0], width, sums, partial);
    else
      decode_rows(p, add, b, x->values, x->ks, l->room, x->count, width, l->width, sums, partial);
    esmm_finish(p, 0, p->m, j0, cols, sums, l->width);
  }
}

static esmm_status decode_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                              esmm_stats *stats)
{
  (void)self;
  const decode_layout l = decode_lay_out(p);
  decode_job x = {.p = p,
                  .l = &l,
                  .values = scratch,
                  .sums = (float *)(void *)((char *)scratch + l.at_sums),
                  .partial = (float *)(void *)((char *)scratch + l.at_partial),
                  .ks = (uint32_t *)(void *)((char *)scratch + l.at_ks)};
  int64_t nonzeros = 0;
  const double start = now_if_timed(p);
  for (int64_t m = 0; m < p->m; m++) {
    int64_t *count = &x.count[m];
    for (int64_t k0 = 0; k0 < p->k; k0 += DECODE_SCAN) {
      float buffer[DECODE_SCAN];
      int64_t ld;
      const int64_t width = esmm_min(DECODE_SCAN, p->k - k0);
      const float *row = rows_of_a(&p->a, m, 1, k0, width, buffer, &ld);
      *count += list_nonzeros(row, width, (uint32_t)k0, 1, x.values + m * l.room + *count, x.ks + m * l.room + *count);
    }
    nonzeros += *count;
  }
  stats->seconds_extract = now_if_timed(p) - start;
  esmm_for(ctx, p->threads, l.items, 1, decode_items, &x);
  stats->density_a = (double)nonzeros / ((double)p->m * (double)p->k);
  stats->strip_density_a = stats->joint_density = stats->density_a;
  stats->flop_useful = 2.0 * (double)nonzeros * (double)p->n;
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define DECODE_KERNEL                                                                                         \
  .cost = {ESMM_CPU_COST_READ_B,      VEC * ESMM_CPU_COST_STREAMED, 2 * COST_PACK, ESMM_CPU_COST_UPDATE, 0.0, \
           ESMM_CPU_COST_START_DECODE},                                                                       \
  .doc = "m of 1 to 16: reads only the rows of B that some row of A needs", .backend = &esmm_cpu_backend,     \
  .reads = ESMM_FORM(ROWS), .variant_strips = true, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,   \
  .can_run = decode_can_run, .terms = decode_terms, .workspace = decode_workspace, .run = decode_run,         \
  .term_names = {"reading of b", "multiply-adds of nonzeros", "scanning of a", "updates of c", "", "starting threads"}
