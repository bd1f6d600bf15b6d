/*
 * direct.h: small products, and those with few k's. A and B's rows are multiplied where they lie: packing, listing or
 * padding them would take longer than the product. Included after vec_*.h.
 *
 *     tile: rows x vectors of C in registers      sums[r][v] += a[r][k] * b[k][v]      for each k
 *
 * The floor is multiply-adds, for few k's the writing of C. Rows go in blocks, and tiles of a block down its rows
 * first: the columns of B that they share stay in the first-level cache. B is read again for every block, and a tile
 * touches a page of it for each k. B has to lie in the second-level cache, so larger ones are refused, unless their
 * rows are short. With AVX-512 tiles are low and wide where there are columns enough: 4 rows by 64 columns read B in
 * longer runs than 8 by 32.
 *
 * Threads share out rows or columns of C, whichever is more even. If B comes from memory and C is small they share out
 * k's: each thread reads its own whole rows of B, and the parts' sums are added up in their order.
 *
 * Nothing is skipped. Sums of 320 k's are added to C, or to the sums of a block where something follows them; a tile
 * that is done with all k's rounds its sums to C's dtype by itself. Where rows of C have no gap between them and a
 * tile has all columns, it writes whole vectors: what spills over a row's end is overwritten by the rows below.
 */
#include "operands.h"

#include <stdio.h>

#define DIRECT_BYTES ((int64_t)512 << 10) /* most of B's rows */
#define DIRECT_SHORT 128                  /* columns: of shorter rows a chain's k's stay in the second-level cache */
#define DIRECT_CACHED ((size_t)128 << 10)
#define DIRECT_CHAIN 320
#define DIRECT_WIDE 4                   /* most vectors of a tile */
#define DIRECT_FOUR (VEC == 16 ? 4 : 3) /* of one of four rows */
#define DIRECT_SUMS 4096                /* that are finished together, or those of a tile's rows */
#define DIRECT_ROWS (32 << 10)          /* elements of A in a block, where it is read in place */
#define DIRECT_LONG 1024                /* columns: parts of many longer rows of C are pages apart; of half as many, */
#define DIRECT_FEW 32                   /* where there are so few k's that a tile does little but write C */
#define DIRECT_WIDENED (8 << 10)        /* where it is not */

static bool direct_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->w->rows_bytes > (size_t)DIRECT_BYTES && p->n > DIRECT_SHORT) {
    (void)snprintf(why, why_bytes, "b's rows have %zu KB, direct takes %lld at most", p->w->rows_bytes >> 10,
                   (long long)DIRECT_BYTES >> 10);
    return false;
  }
  return true;
}

/* Several threads that read B from memory each read whole rows of it, where C is small. */
static bool direct_shares_ks(const esmm_problem *p)
{
  return p->threads > 1 && p->w->rows_bytes > DIRECT_CACHED && p->m * esmm_round_up(p->n, VEC) <= DIRECT_SUMS;
}

static void direct_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                         int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  const double m = (double)p->m, k = (double)p->k, vectors = (double)esmm_ceil_div(p->n, VEC);
  const bool in_place = p->a.dtype == ESMM_F32 && p->a.order == ESMM_ROW_MAJOR;
  units[0] = m * k * vectors;
  /* So small a B is in the second-level cache. From memory, parts of long rows come slowly. */
  const double slow = p->n <= DIRECT_WIDE * VEC || direct_shares_ks(p) ? 1.0 : 2.0;
  units[1] = p->w->rows_bytes <= DIRECT_CACHED ? 0.0 : (double)p->w->rows_bytes * slow;
  units[2] = in_place ? 0.0 : m * k * (p->a.order == ESMM_ROW_MAJOR ? 1.0 : 8.0);
  units[3] = m * vectors * ((double)esmm_ceil_div(p->k, DIRECT_CHAIN) + (esmm_is_plain(p) ? 0.0 : 1.0));
  units[5] = 1.0;
}

/* One k of chain u. */
ALWAYS void direct_step(const int rows, const int vectors, const int u, const esmm_dtype dtype, const float *a,
                        int64_t lda, const void *b, int64_t at, vec x[MR][DIRECT_WIDE][4])
{
  vec y[DIRECT_WIDE];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    y[v] = esmm_vec_load(b, dtype, at + v * VEC);
    VEC_KEEP(y[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const vec z = vec_all(a + r * lda);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
      x[r][v][u] = vec_fma(z, y[v], x[r][v][u]);
  }
}

/* Tiles one below the other: c [count * rows, cols] (+)= a [count * rows, kc] x b [kc, cols]. */
typedef struct direct_tiles {
  const float *a;
  int64_t lda;
  const void *b;
  int64_t at, ldb; /* the first element in B's rows */
  int64_t kc;
  void *c;
  int64_t to, ldc; /* the first element in c */
  esmm_dtype of_c; /* f32 where sums are added */
  int64_t cols;    /* the last vector of a tile may be cut */
  int64_t spill;   /* in c, to where it need not be: rows below that are written later, without a gap. 0: not at all */
  int64_t count;
  bool add;
} direct_tiles;

/* The first count (VEC at most) of a vector's elements, from element `at` of c on: all, where they may spill. */
ALWAYS void direct_store(void *c, const esmm_dtype dtype, int64_t at, int64_t count, int64_t spill, vec x)
{
  if (count < VEC && at + VEC > spill)
    esmm_vec_store_first(c, dtype, at, count, x);
  else
    esmm_vec_store(c, dtype, at, x);
}

ALWAYS void direct_round_to(const esmm_dtype dtype, const float *sums, int64_t ld, int64_t rows, int64_t cols,
                            const direct_tiles *restrict t, int64_t to)
{
  const int64_t ldc = t->ldc, spill = t->spill; /* the compiler must assume that stores to C change them */
  void *c = t->c;
  for (int64_t r = 0; r < rows; r++, to += ldc, sums += ld)
    for (int64_t j = 0; j < cols; j += VEC)
      direct_store(c, dtype, to + j, cols - j, spill, vec_load(sums + j));
}

/* sums [rows, ld], of which cols are stored in C from element `to` on, in its dtype */
static __attribute__((noinline)) void direct_round(const float *sums, int64_t ld, int64_t rows, int64_t cols,
                                                   const direct_tiles *t, int64_t to)
{
  switch (t->of_c) {
  case ESMM_F32:
    break; /* is stored by the tile */
  case ESMM_BF16:
    direct_round_to(ESMM_BF16, sums, ld, rows, cols, t, to);
    break;
  case ESMM_F16:
    direct_round_to(ESMM_F16, sums, ld, rows, cols, t, to);
    break;
  }
}

/* One tile. Low and narrow ones have several chains, as one chain would wait for its own sums. */
ALWAYS void direct_tile(const int rows, const int vectors, const esmm_dtype dtype, const direct_tiles *restrict t,
                        const float *a, int64_t to)
{
  const int chains = rows * vectors >= 8 ? 1 : rows * vectors >= 4 ? 2 : 4;
  vec x[MR][DIRECT_WIDE][4];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int u = 0; u < chains; u++)
        x[r][v][u] = vec_zero();
  int64_t k = 0, at = t->at;
  for (; k + chains <= t->kc; k += chains)
#pragma GCC unroll 4
    for (int u = 0; u < chains; u++, at += t->ldb)
      direct_step(rows, vectors, u, dtype, a + k + u, t->lda, t->b, at, x);
  for (; k < t->kc; k++, at += t->ldb)
    direct_step(rows, vectors, 0, dtype, a + k, t->lda, t->b, at, x);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 4
      for (int u = 1; u < chains; u++)
        x[r][v][0] = vec_add(x[r][v][0], x[r][v][u]);
  if (t->of_c != ESMM_F32) {
    _Alignas(64) float sums[MR * DIRECT_WIDE * VEC];
    const bool flat = t->spill && t->cols <= VEC / 2; /* short rows without a gap are one */
    const int64_t ld = flat ? t->cols : vectors * VEC;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < vectors; v++)
        vec_store(sums + r * ld + v * VEC, x[r][v][0]);
    direct_round(sums, ld, flat ? 1 : rows, flat ? rows * ld : t->cols, t, to);
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
      const int64_t here = to + r * t->ldc + v * VEC, count = v + 1 < vectors ? VEC : t->cols - v * VEC;
      const float *c = (const float *)t->c + here;
      direct_store(t->c, ESMM_F32, here, count, t->spill,
                   t->add ? vec_add(x[r][v][0], esmm_load_part(c, count)) : x[r][v][0]);
    }
}

typedef void direct_function(const direct_tiles *restrict t);

#define DIRECT(name, rows, vectors, dtype)                                                       \
  static __attribute__((noinline)) void name(const direct_tiles *restrict t)                     \
  {                                                                                              \
    for (int64_t i = 0; i < t->count; i++)                                                       \
      direct_tile(rows, vectors, dtype, t, t->a + i * (rows)*t->lda, t->to + i * (rows)*t->ldc); \
  }

/* By rows, MR, 4, 2 and 1, and by vectors, 1 to 4, as registers allow. */
enum { DIRECT_HEIGHTS = 4 };
static const int direct_rows[DIRECT_HEIGHTS] = {MR, 4, 2, 1};
static const int direct_widest[DIRECT_HEIGHTS] = {2, DIRECT_FOUR, DIRECT_WIDE, DIRECT_WIDE};
typedef direct_function *direct_set[DIRECT_HEIGHTS][DIRECT_WIDE];

#define DIRECT_SET(suffix, dtype)                                                                                  \
  DIRECT(most_2_##suffix, MR, 2, dtype)                                                                            \
  DIRECT(most_1_##suffix, MR, 1, dtype)                                                                            \
  DIRECT(four_4_##suffix, 4, DIRECT_FOUR, dtype)                                                                   \
  DIRECT(four_3_##suffix, 4, 3, dtype)                                                                             \
  DIRECT(four_2_##suffix, 4, 2, dtype)                                                                             \
  DIRECT(four_1_##suffix, 4, 1, dtype)                                                                             \
  DIRECT(two_4_##suffix, 2, 4, dtype)                                                                              \
  DIRECT(two_3_##suffix, 2, 3, dtype)                                                                              \
  DIRECT(two_2_##suffix, 2, 2, dtype)                                                                              \
  DIRECT(two_1_##suffix, 2, 1, dtype)                                                                              \
  DIRECT(one_4_##suffix, 1, 4, dtype)                                                                              \
  DIRECT(one_3_##suffix, 1, 3, dtype)                                                                              \
  DIRECT(one_2_##suffix, 1, 2, dtype)                                                                              \
  DIRECT(one_1_##suffix, 1, 1, dtype)                                                                              \
  static const direct_set direct_##suffix = {{most_1_##suffix, most_2_##suffix, NULL, NULL},                       \
                                             {four_1_##suffix, four_2_##suffix, four_3_##suffix, four_4_##suffix}, \
                                             {two_1_##suffix, two_2_##suffix, two_3_##suffix, two_4_##suffix},     \
                                             {one_1_##suffix, one_2_##suffix, one_3_##suffix, one_4_##suffix}};
DIRECT_SET(f32, ESMM_F32)
DIRECT_SET(bf16, ESMM_BF16)
DIRECT_SET(f16, ESMM_F16)

static const direct_set *const direct_of[] = {
    [ESMM_F32] = &direct_f32, [ESMM_BF16] = &direct_bf16, [ESMM_F16] = &direct_f16};

/* How a product is shared out, and a thread's scratch: sums where something follows them, rows of A as fp32 where they
   are not. */
typedef enum direct_split { DIRECT_BY_ROWS, DIRECT_BY_COLS, DIRECT_BY_KS } direct_split;

typedef struct direct_part {
  direct_split split;
  bool stored;            /* by the tiles, in C; else sums are kept, and finished */
  int64_t items;          /* parts; the last ones may have less, or nothing */
  int64_t rows, cols, ks; /* of a part */
  int64_t lines, ld;      /* rows of a block; of sums */
  size_t at_rows, bytes;  /* rows of A in a thread's scratch, and all of that */
  size_t sums_bytes;      /* of a part's sums, where parts are k's: they come before the threads' scratch */
} direct_part;

/* The time of `rows` rows on a core, in rows of a full tile: low tiles take longer for a row. */
static double direct_height(int64_t rows)
{
  const int64_t rest = rows % MR;
  return (double)(rows - rest) + (rest & 4 ? 4.2 : 0.0) + (rest & 2 ? 2.3 : 0.0) + (rest & 1 ? 1.5 : 0.0);
}

static void direct_share_out(const esmm_problem *p, direct_part *x)
{
  const int64_t vectors = esmm_ceil_div(p->n, VEC), each = esmm_ceil_div(p->m, p->threads);
  const int64_t wide = esmm_ceil_div(vectors, p->threads);
  const double even = p->m >= 2 * MR * p->threads ? 1.1 : 1.0; /* long runs of C are worth some unevenness */
  *x = (direct_part){.items = p->threads, .rows = p->m, .cols = p->n, .ks = p->k};
  if (p->threads == 1)
    return;
  if (direct_shares_ks(p)) {
    x->split = DIRECT_BY_KS;
    x->items = esmm_round_up(esmm_ceil_div(p->k, DIRECT_CHAIN), p->threads);
    x->ks = esmm_ceil_div(p->k, x->items);
  } else if (direct_height(each) * (double)vectors < direct_height(p->m) * (double)wide * even) {
    x->rows = each;
  } else {
    x->split = DIRECT_BY_COLS;
    x->cols = wide * VEC;
  }
}

static direct_part direct_lay_out(const esmm_problem *p)
{
  direct_part x;
  direct_share_out(p, &x);
  const bool in_place = p->a.dtype == ESMM_F32 && p->a.order == ESMM_ROW_MAJOR;
  const int64_t k = esmm_min(DIRECT_CHAIN, x.ks);
  x.stored = x.split != DIRECT_BY_KS && (esmm_is_plain(p) || (p->k <= DIRECT_CHAIN && esmm_is_rounded(p)));
  x.lines = (in_place ? DIRECT_ROWS : DIRECT_WIDENED) / k;
  if (x.cols > DIRECT_LONG || (x.cols >= DIRECT_LONG / 2 && p->k <= DIRECT_FEW))
    x.lines = MR;
  if (x.split == DIRECT_BY_KS) {
    x.ld = esmm_round_up(p->n, VEC);
    x.sums_bytes = align_up((size_t)(p->m * x.ld) * sizeof(float));
  } else if (!x.stored) {
    x.ld = x.cols == p->n ? x.cols : esmm_round_up(x.cols, VEC); /* whole rows: as C's, without a gap */
    x.lines = esmm_min(x.lines, DIRECT_SUMS / x.ld);
  }
  x.lines = esmm_max(1, esmm_min(x.lines, esmm_round_up(x.rows, MR)) / MR) * MR;
  if (!x.stored && !x.sums_bytes)
    x.at_rows = (size_t)esmm_round_up(x.lines * x.ld, VEC) * sizeof(float);
  x.bytes = x.at_rows;
  if (!in_place)
    x.bytes += (size_t)(x.lines * k) * sizeof(float);
  if (p->threads > 1)
    x.bytes = align_up(x.bytes);
  return x;
}

static size_t direct_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const direct_part x = direct_lay_out(p);
  return x.sums_bytes * (size_t)x.items + x.bytes * (size_t)p->threads;
}

/* Are tiles of 4 rows by 4 vectors better than such of 8 by 2? Few k's do not pay for what happens at a tile's end. */
static bool direct_is_low(int64_t k, int64_t cols, esmm_dtype of_c)
{
  return VEC == 16 && cols > 2 * VEC && k >= (of_c == ESMM_F32 ? 4 : 32);
}

/* Rows of a block, columns [col0, col0 + cols): sums of k's [k0, k1), added to c, or in its place. */
static void direct_sums(const esmm_problem *p, int64_t row0, int64_t rows, int64_t col0, int64_t cols, int64_t k0,
                        int64_t k1, float *buffer, direct_tiles t)
{
  const esmm_weights *w = p->w;
  const direct_set *set = direct_of[w->dtype];
  const int64_t first = t.to;
  t.b = w->rows;
  t.ldb = w->rows_ld;
  for (; k0 < k1; k0 += DIRECT_CHAIN, t.add = true) {
    t.kc = esmm_min(DIRECT_CHAIN, k1 - k0);
    const float *a = rows_of_a(&p->a, row0, rows, k0, t.kc, buffer, &t.lda);
    for (int64_t r = 0, height = direct_is_low(t.kc, cols, t.of_c); r < rows;
         r += t.count * direct_rows[height], height++) {
      t.a = a + r * t.lda;
      t.count = (rows - r) / direct_rows[height];
      int64_t vectors = direct_widest[height];
      for (int64_t j = 0; t.count > 0 && j < cols; j += vectors * VEC) {
        vectors = esmm_min(vectors, esmm_ceil_div(cols - j, VEC));
        t.cols = esmm_min(vectors * VEC, cols - j);
        t.at = k0 * t.ldb + col0 + j;
        t.to = first + r * t.ldc + j;
        (*set)[height][vectors - 1](&t);
      }
    }
  }
}

/* Rows [row0, end), columns [col0, col0 + cols) of C. */
static void direct_block(const esmm_problem *p, const direct_part *x, int64_t row0, int64_t end, int64_t col0,
                         int64_t cols, char *scratch)
{
  float *sums = (float *)(void *)scratch, *buffer = (float *)(void *)(scratch + x->at_rows);
  const int64_t widest = direct_is_low(p->k, cols, p->c.dtype) ? 4 * VEC : 2 * VEC;
  const bool one_tile = p->c.ld == cols && cols <= widest, once = p->k <= DIRECT_CHAIN;
  const direct_tiles stored = {.c = p->c.data,
                               .ldc = p->c.ld,
                               .of_c = p->c.dtype,
                               .add = p->beta == 1.0f,
                               .spill = one_tile && once && p->beta == 0.0f ? end * cols : 0};
  for (int64_t r = row0; r < end; r += x->lines) {
    const int64_t rows = esmm_min(x->lines, end - r);
    if (x->stored) {
      direct_tiles t = stored;
      t.to = r * p->c.ld + col0;
      direct_sums(p, r, rows, col0, cols, 0, p->k, buffer, t);
      continue;
    }
    direct_sums(p, r, rows, col0, cols, 0, p->k, buffer, (direct_tiles){.c = sums, .ldc = x->ld, .of_c = ESMM_F32});
    esmm_finish(p, r, rows, col0, cols, sums, x->ld);
  }
  if (x->stored)
    esmm_finish_plain(p, row0, end - row0, col0, cols);
}

/* What k's [k0, k1) give, to sums [m, ld]: the padding of B's rows, too. */
static void direct_ks(const esmm_problem *p, const direct_part *x, int64_t k0, int64_t k1, float *sums, char *scratch)
{
  float *buffer = (float *)(void *)(scratch + x->at_rows);
  for (int64_t r = 0; r < p->m; r += x->lines)
    direct_sums(p, r, esmm_min(x->lines, p->m - r), 0, x->ld, k0, k1, buffer,
                (direct_tiles){.c = sums, .to = r * x->ld, .ldc = x->ld, .of_c = ESMM_F32});
}

/* The parts' sums, added up in their order, become C. */
static void direct_add_up(const esmm_problem *p, const direct_part *x, float *sums)
{
  const int64_t parts = esmm_ceil_div(p->k, x->ks), next = (int64_t)(x->sums_bytes / sizeof *sums);
  for (int64_t j = 0; j < p->m * x->ld; j += VEC) {
    vec sum = vec_load(sums + j);
    for (int64_t i = 1; i < parts; i++)
      sum = vec_add(sum, vec_load(sums + i * next + j));
    vec_store(sums + j, sum);
  }
  esmm_finish(p, 0, p->m, 0, p->n, sums, x->ld);
}

typedef struct direct_job {
  const esmm_problem *p;
  const direct_part *part;
  char *sums, *scratch;
} direct_job;

static void direct_piece(void *arg, int64_t first, int64_t end, int worker)
{
  const direct_job *x = arg;
  const direct_part *part = x->part;
  const esmm_problem *p = x->p;
  char *scratch = x->scratch + (size_t)worker * part->bytes;
  for (int64_t i = first; i < end; i++) {
    const int64_t row0 = part->split == DIRECT_BY_ROWS ? i * part->rows : 0;
    const int64_t col0 = part->split == DIRECT_BY_COLS ? i * part->cols : 0;
    const int64_t row1 = esmm_min(p->m, row0 + part->rows), cols = esmm_min(part->cols, p->n - col0);
    if (part->split == DIRECT_BY_KS)
      direct_ks(p, part, i * part->ks, esmm_min(p->k, (i + 1) * part->ks),
                (float *)(void *)(x->sums + (size_t)i * part->sums_bytes), scratch);
    else if (row0 < row1 && cols > 0)
      direct_block(p, part, row0, row1, col0, cols, scratch);
  }
}

static esmm_status direct_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                              esmm_stats *stats)
{
  (void)self;
  const direct_part part = direct_lay_out(p);
  direct_job x = {
      .p = p, .part = &part, .sums = scratch, .scratch = (char *)scratch + part.sums_bytes * (size_t)part.items};
  esmm_for(ctx, p->threads, part.items, 1, direct_piece, &x);
  if (part.split == DIRECT_BY_KS)
    direct_add_up(p, &part, scratch);
  stats->flop_useful = 2.0 * (double)p->m * (double)p->n * (double)p->k;
  stats->joint_density = 1.0;
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define DIRECT_KERNEL                                                                                             \
  .cost = {COST_FMA * ESMM_CPU_COST_LOOSE,                                                                        \
           ESMM_CPU_COST_READ_B,                                                                                  \
           COST_WIDEN,                                                                                            \
           ESMM_CPU_COST_VECTOR,                                                                                  \
           0.0,                                                                                                   \
           ESMM_CPU_COST_CALL},                                                                                   \
  .doc = "small products: multiplies A and B's rows where they lie, packs nothing", .backend = &esmm_cpu_backend, \
  .reads = ESMM_FORM(ROWS), .flags = ESMM_KERNEL_DETERMINISTIC, .can_run = direct_can_run, .terms = direct_terms, \
  .workspace = direct_workspace, .run = direct_run,                                                               \
  .term_names = {"multiply-adds", "reading of b", "widening of a", "updates of c", "", "starting threads"}
