/*
 * dots.h: B of 1 to 15 columns. Every element of C is a dot product of a row of A and a column of B, both of which lie
 * one k after another (B as turned columns): no column is padded, and A is read once, as it is. Included after vec_*.h.
 *
 *     tile: rows x cols sums, a vector each       sums[r][j] += a[r][k..] * b[j][k..]
 *
 * The floor is bytes of A for one column or two, multiply-adds for more. A tile has 8 rows by 1 or 2 columns, or 4 by 4
 * (AVX2, portable: 8 by 1, 4 by 2, for 16 registers); rows that are left over are done singly, in four chains of sums.
 *
 * Nothing is skipped: with few columns, testing an element of A costs as much as multiplying it. A sum's chain is
 * a vector's lane and at most 256 terms long.
 */
#include "operands.h"

#define DOTS_K (256 * VEC)             /* k's of a stretch: their sums are then added up */
#define DOTS_SHORT 64                  /* k's: shorter rows of 16 bits are widened together */
#define DOTS_BLOCK 64                  /* rows of A whose sums are finished together */
#define DOTS_WIDE (VEC == 16 ? 4 : 2)  /* most columns of a tile */
#define DOTS_TALL2 (VEC == 16 ? 8 : 4) /* rows of a tile of 2 columns */
#define DOTS_TALL(cols) ((cols) == 1 ? 8 : (cols) == 2 ? DOTS_TALL2 : 4)
#define DOTS_CHAINS 4 /* of a single row */
#define DOTS_ROWS 8   /* most rows of a tile */

/* A is read where it lies: its rows go on one k after another, in fp32 or, where they are not short and not read for
   many columns, in B's dtype. Else it becomes fp32 first. */
static bool dots_in_place(const esmm_problem *p)
{
  return p->a.order == ESMM_ROW_MAJOR &&
         (p->a.dtype == ESMM_F32 || (p->a.dtype == p->w->dtype && p->k >= DOTS_SHORT && p->n <= 2));
}

/* A column of A times a number, which goes down rows one after another: C is one vector by another. */
static bool dots_is_scaling(const esmm_problem *p)
{
  return p->k == 1 && p->n == 1 && p->a.order == ESMM_ROW_MAJOR && p->a.ld == 1;
}

static void dots_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                       int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  const double m = (double)p->m, n = (double)p->n, k = (double)p->k;
  units[0] = m * n * (double)esmm_ceil_div(p->k, VEC);
  units[1] = m * k * (double)esmm_dtype_size(p->a.dtype);
  units[2] = dots_in_place(p) ? 0.0 : m * k * (p->a.order == ESMM_ROW_MAJOR ? 1.0 : 8.0);
  units[3] = m * n * (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
  if (dots_is_scaling(p)) {
    units[0] /= VEC;
    units[3] /= VEC;
  }
}

/* sums [rows, cols] (+)= a [rows, kc] x b [cols, kc]; b begins at element `at` of turned columns */
ALWAYS void dots_tile(const int rows, const int cols, const int chains, const esmm_dtype of_a, const esmm_dtype dtype,
                      const void *a, int64_t lda, const void *b, int64_t at, int64_t ldb, int64_t kc, float *sums,
                      int64_t ld, bool add)
{
  vec x[DOTS_ROWS][DOTS_WIDE][DOTS_CHAINS], y[DOTS_WIDE];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int j = 0; j < cols; j++)
#pragma GCC unroll 4
      for (int u = 0; u < chains; u++)
        x[r][j][u] = vec_zero();
  int64_t k = 0;
  for (; k + chains * VEC <= kc; k += chains * VEC)
#pragma GCC unroll 4
    for (int u = 0; u < chains; u++) {
#pragma GCC unroll 4
      for (int j = 0; j < cols; j++) {
        y[j] = esmm_vec_load(b, dtype, at + j * ldb + k + u * VEC);
        VEC_KEEP(y[j]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) {
        const vec z = esmm_vec_load(a, of_a, r * lda + k + u * VEC);
#pragma GCC unroll 4
        for (int j = 0; j < cols; j++)
          x[r][j][u] = vec_fma(z, y[j], x[r][j][u]);
      }
    }
  for (; k < kc; k += VEC) { /* B is padded, A is not */
    const int64_t count = esmm_min(VEC, kc - k);
#pragma GCC unroll 4
    for (int j = 0; j < cols; j++)
      y[j] = esmm_vec_load(b, dtype, at + j * ldb + k);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      const vec z = esmm_vec_load_first(a, of_a, r * lda + k, count);
#pragma GCC unroll 4
      for (int j = 0; j < cols; j++)
        x[r][j][0] = vec_fma(z, y[j], x[r][j][0]);
    }
  }
  vec flat[DOTS_ROWS * DOTS_WIDE];
  const bool alone = rows == 8 && cols == 1 && ld == 1 && !add; /* sums that lie together */
  float lanes[DOTS_ROWS * DOTS_WIDE];
#pragma GCC unroll 32
  for (int i = 0; i < rows * cols; i++) {
    flat[i] = x[i / cols][i % cols][0];
#pragma GCC unroll 4
    for (int u = 1; u < chains; u++)
      flat[i] = vec_add(flat[i], x[i / cols][i % cols][u]);
  }
  const int together = rows * cols - rows * cols % 8;
#pragma GCC unroll 4
  for (int i = 0; i < together; i += 8)
    vec_sums(flat + i, alone ? sums : lanes + i);
  if (alone)
    return;
#pragma GCC unroll 8
  for (int i = together; i < rows * cols; i++)
    lanes[i] = vec_sum(flat[i]);
#pragma GCC unroll 32
  for (int i = 0; i < rows * cols; i++) {
    float *to = sums + i / cols * ld + i % cols;
    *to = add ? *to + lanes[i] : lanes[i];
  }
}

typedef void dots_function(const void *a, int64_t lda, const void *b, int64_t at, int64_t ldb, int64_t kc, float *sums,
                           int64_t ld, bool add);

#define DOTS(name, rows, cols, chains, of_a, dtype)                                                              \
  static __attribute__((noinline)) void name(const void *a, int64_t lda, const void *b, int64_t at, int64_t ldb, \
                                             int64_t kc, float *sums, int64_t ld, bool add)                      \
  {                                                                                                              \
    dots_tile(rows, cols, chains, of_a, dtype, a, lda, b, at, ldb, kc, sums, ld, add);                           \
  }

/* By columns: a tall tile, and one of a single row. */
typedef struct dots_set {
  dots_function *tall[DOTS_WIDE + 1], *single[DOTS_WIDE + 1];
} dots_set;

#if VEC == 16
#define DOTS_SET(suffix, of_a, dtype)                                             \
  DOTS(tall_1_##suffix, 8, 1, 1, of_a, dtype)                                     \
  DOTS(tall_2_##suffix, DOTS_TALL2, 2, 1, of_a, dtype)                            \
  DOTS(tall_3_##suffix, 4, 3, 1, of_a, dtype)                                     \
  DOTS(tall_4_##suffix, 4, 4, 1, of_a, dtype)                                     \
  DOTS(single_1_##suffix, 1, 1, DOTS_CHAINS, of_a, dtype)                         \
  DOTS(single_2_##suffix, 1, 2, DOTS_CHAINS, of_a, dtype)                         \
  DOTS(single_3_##suffix, 1, 3, DOTS_CHAINS, of_a, dtype)                         \
  DOTS(single_4_##suffix, 1, 4, DOTS_CHAINS, of_a, dtype)                         \
  static const dots_set dots_##suffix = {                                         \
      {NULL, tall_1_##suffix, tall_2_##suffix, tall_3_##suffix, tall_4_##suffix}, \
      {NULL, single_1_##suffix, single_2_##suffix, single_3_##suffix, single_4_##suffix}};
#else
#define DOTS_SET(suffix, of_a, dtype)                                              \
  DOTS(tall_1_##suffix, 8, 1, 1, of_a, dtype)                                      \
  DOTS(tall_2_##suffix, DOTS_TALL2, 2, 1, of_a, dtype)                             \
  DOTS(single_1_##suffix, 1, 1, DOTS_CHAINS, of_a, dtype)                          \
  DOTS(single_2_##suffix, 1, 2, DOTS_CHAINS, of_a, dtype)                          \
  static const dots_set dots_##suffix = {{NULL, tall_1_##suffix, tall_2_##suffix}, \
                                         {NULL, single_1_##suffix, single_2_##suffix}};
#endif
DOTS_SET(f32, ESMM_F32, ESMM_F32)
DOTS_SET(f32_bf16, ESMM_F32, ESMM_BF16)
DOTS_SET(f32_f16, ESMM_F32, ESMM_F16)
DOTS_SET(bf16, ESMM_BF16, ESMM_BF16)
DOTS_SET(f16, ESMM_F16, ESMM_F16)

static const dots_set *dots_of(const esmm_problem *p)
{
  const bool same = p->a.dtype == p->w->dtype && dots_in_place(p);
  switch (p->w->dtype) {
  case ESMM_F32:
    return &dots_f32;
  case ESMM_BF16:
    return same ? &dots_bf16 : &dots_f32_bf16;
  case ESMM_F16:
    return same ? &dots_f16 : &dots_f32_f16;
  }
  return NULL; /* weights of an unknown dtype are not prepared */
}

/* Bytes of a thread's scratch: rows of A as fp32 where they are not. */
static size_t dots_room(const esmm_problem *p)
{
  if (dots_in_place(p))
    return 0;
  return align_up((size_t)(DOTS_ROWS * esmm_min(DOTS_K, p->k)) * sizeof(float));
}

static size_t dots_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return dots_room(p) * (size_t)p->threads;
}

static void dots_scale(const esmm_problem *p, int64_t row0, int64_t rows, float *sums)
{
  const esmm_weights *w = p->w;
  const float b = esmm_load_element(w->turned, w->dtype, 0);
  for (int64_t r = 0; r < rows; r += VEC)
    vec_store(sums + r,
              vec_mul(vec_all(&b), esmm_vec_load_first(p->a.data, p->a.dtype, row0 + r, esmm_min(VEC, rows - r))));
}

/* sums [rows, n] of rows from row0 on, DOTS_BLOCK at most. */
static void dots_block(const esmm_problem *p, const dots_set *set, int64_t row0, int64_t rows, float *buffer,
                       float *sums)
{
  const esmm_weights *w = p->w;
  const bool in_place = dots_in_place(p);
  const size_t size = in_place ? esmm_dtype_size(p->a.dtype) : sizeof(float);
  for (int64_t k0 = 0; k0 < p->k; k0 += DOTS_K) {
    const int64_t kc = esmm_min(DOTS_K, p->k - k0);
    for (int64_t r = 0; r < rows; r += DOTS_ROWS) {
      int64_t lda = p->a.ld;
      const int64_t count = esmm_min(DOTS_ROWS, rows - r);
      const char *a = in_place ? (const char *)p->a.data + (size_t)((row0 + r) * lda + k0) * size
                               : (const void *)rows_of_a(&p->a, row0 + r, count, k0, kc, buffer, &lda);
      for (int64_t j = 0, cols; j < p->n; j += cols) {
        cols = esmm_min(DOTS_WIDE, p->n - j);
        const int64_t tall = DOTS_TALL(cols);
        for (int64_t x = 0, step; x < count; x += step) {
          step = count - x >= tall ? tall : 1;
          (step == 1 ? set->single : set->tall)[cols](a + (size_t)(x * lda) * size, lda, w->turned,
                                                      j * w->turned_ld + k0, w->turned_ld, kc,
                                                      sums + (r + x) * p->n + j, p->n, k0 > 0);
        }
      }
    }
  }
}

/* Where nothing follows the sums. */
static void dots_store(const esmm_problem *p, int64_t row0, int64_t rows, const float *restrict sums)
{
  const bool adds = p->beta != 0.0f, tight = p->c.ld == p->n;
  const int64_t lines = tight ? 1 : rows, n = tight ? rows * p->n : p->n, ld = p->c.ld;
  float *restrict c = (float *)p->c.data + row0 * ld;
  for (int64_t r = 0; r < lines; r++, c += ld, sums += n)
    if (adds)
      for (int64_t j = 0; j < n; j++)
        c[j] += sums[j];
    else
      memcpy(c, sums, (size_t)n * sizeof *c);
}

/* Rows [row0, end) of C. */
static void dots_rows(const esmm_problem *p, int64_t row0, int64_t end, float *buffer)
{
  const dots_set *set = dots_of(p);
  const bool plain = esmm_is_plain(p), scaling = dots_is_scaling(p);
  _Alignas(64) float sums[DOTS_BLOCK * ESMM_TURNED_COLS];
  for (; row0 < end; row0 += DOTS_BLOCK) {
    const int64_t rows = esmm_min(DOTS_BLOCK, end - row0);
    if (scaling)
      dots_scale(p, row0, rows, sums);
    else
      dots_block(p, set, row0, rows, buffer, sums);
    if (plain) {
      dots_store(p, row0, rows, sums);
      esmm_finish_plain(p, row0, rows, 0, p->n);
    } else {
      esmm_finish(p, row0, rows, 0, p->n, sums, p->n);
    }
  }
}

typedef struct dots_job {
  const esmm_problem *p;
  char *scratch;
  size_t room; /* of a thread */
} dots_job;

/* Rows in tiles of four, or eight. */
static int64_t dots_item(const esmm_problem *p)
{
  return p->n <= 2 ? DOTS_ROWS : DOTS_TALL(DOTS_WIDE);
}

static void dots_piece(void *arg, int64_t first, int64_t end, int worker)
{
  const dots_job *x = arg;
  const int64_t rows = dots_item(x->p);
  dots_rows(x->p, first * rows, esmm_min(x->p->m, end * rows),
            (float *)(void *)(x->scratch + (size_t)worker * x->room));
}

static esmm_status dots_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                            esmm_stats *stats)
{
  (void)self;
  dots_job x = {.p = p, .scratch = scratch, .room = dots_room(p)};
  const int64_t rows = dots_item(p), items = esmm_ceil_div(p->m, rows);
  const int64_t most = esmm_at_once(rows, p->k * (int64_t)esmm_dtype_size(p->a.dtype));
  esmm_for(ctx, p->threads, items, esmm_min(most, esmm_ceil_div(items, p->threads)), dots_piece, &x);
  stats->flop_useful = 2.0 * (double)p->m * (double)p->n * (double)p->k;
  stats->joint_density = 1.0;
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define DOTS_KERNEL                                                                                                 \
  .cost = {COST_FMA * ESMM_CPU_COST_LOOSE,                                                                          \
           ESMM_CPU_COST_READ_A,                                                                                    \
           COST_WIDEN,                                                                                              \
           ESMM_CPU_COST_VECTOR,                                                                                    \
           0.0,                                                                                                     \
           ESMM_CPU_COST_CALL},                                                                                     \
  .doc = "n of 1 to 15: dot products of A's rows and B's columns", .backend = &esmm_cpu_backend,                    \
  .reads = ESMM_FORM(TURNED), .flags = ESMM_KERNEL_DETERMINISTIC, .terms = dots_terms, .workspace = dots_workspace, \
  .run = dots_run,                                                                                                  \
  .term_names = {"multiply-adds", "reading of a", "widening of a", "adding up of sums", "", "starting threads"}
