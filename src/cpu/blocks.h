/*
 * blocks.h: what the packed products share (gemm.h in fp32, pairs.h in bf16): sums of tiles, blocks of C for threads,
 * bitmaps of strips, k-lists, and the choice of a strip's height. Included after vec_*.h.
 */
#ifndef ESMM_BLOCKS_H
#define ESMM_BLOCKS_H

#include "operands.h"

#include <math.h>
#include <stdio.h>

#define TILE_COLS (2 * VEC)
#define MAX_STRIP 32
#define MIN_STRIP (MR == 8 ? 8 : 4)

/* ------------------------------------------------------------------------------------------------ tiles */

/* c [rows, TILE_COLS] (+)= sums */
ALWAYS void tile_store(const int rows, vec sums[MR][2], float *c, int64_t ldc, bool add)
{
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    float *to = c + r * ldc;
    if (add) {
      sums[r][0] = vec_add(sums[r][0], vec_load(to));
      sums[r][1] = vec_add(sums[r][1], vec_load(to + VEC));
    }
    vec_store(to, sums[r][0]);
    vec_store(to + VEC, sums[r][1]);
  }
}

ALWAYS void tile_clear(const int rows, vec sums[MR][2])
{
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    sums[r][0] = sums[r][1] = vec_zero();
}

ALWAYS void tile_prefetch(const int rows, float *c, int64_t ldc)
{
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    __builtin_prefetch(c + r * ldc, 1);
    __builtin_prefetch(c + r * ldc + TILE_COLS - 1, 1);
  }
}

/* ------------------------------------------------------------------------------------------------ bitmaps */

/* The strip's bits from the caller's pattern: the OR of its strips that touch these rows. */
static void bits_from_pattern(const esmm_pattern *pattern, int64_t row0, int64_t rows, int64_t k0, int64_t kc,
                              uint64_t *bits)
{
  const int64_t word0 = k0 / 64, words = esmm_ceil_div(kc, 64);
  memset(bits, 0, (size_t)words * sizeof *bits);
  for (int64_t s = row0 / pattern->strip_rows; s <= (row0 + rows - 1) / pattern->strip_rows; s++)
    for (int64_t i = 0; i < words; i++)
      bits[i] |= pattern->bits[s * pattern->words + word0 + i];
}

ALWAYS bool any_bit(const uint64_t *bits, int64_t from, int64_t count) /* count is at most 32 */
{
  const uint64_t low = bits[from / 64] >> (from % 64);
  const uint64_t high = from % 64 ? bits[from / 64 + 1] << (64 - from % 64) : 0;
  return ((low | high) & (((uint64_t)1 << count) - 1)) != 0;
}

/* ------------------------------------------------------------------------------------------------ k-lists */

/* One side of a joint: a strip of A, or a panel of B. */
typedef struct joined {
  const uint64_t *bits;   /* [words]: the k's that it has */
  const uint32_t *before; /* [words]: how many before word w, counted from before[0] on */
  int64_t kept;           /* in all */
  uint32_t step;          /* bytes from one of them to the next */
} joined;

ALWAYS int64_t join_words(const joined *a, const joined *b, uint32_t *list_a, uint32_t *list_b, const uint32_t *live,
                          int64_t lives, const int groups)
{
  uint32_t *end_a = list_a, *end_b = list_b;
  for (int64_t x = 0; x < lives; x++) {
    const int64_t i = live ? live[x] : x;
    const uint64_t of_a = a->bits[i], of_b = b->bits[i], joint = of_a & of_b;
    if (groups == 1 && !joint)
      continue;
    end_a = append_offsets(end_a, extract_bits(joint, of_a), (a->before[i] - a->before[0]) * a->step, a->step, groups);
    end_b = append_offsets(end_b, extract_bits(joint, of_b), (b->before[i] - b->before[0]) * b->step, b->step, groups);
  }
  return end_a - list_a;
}

/*
 * The joint of two bitmaps as offsets; lists need room for kc + 16 entries. From the kept counts the loops know how
 * many groups of bits a word usually fills, so they run a fixed number of times without mispredicted branches. live:
 * the `lives` words in which b has bits; NULL: all of `lives` words.
 */
static inline int64_t join(const joined *a, const joined *b, int64_t words, const uint32_t *live, int64_t lives,
                           uint32_t *list_a, uint32_t *list_b)
{
  if (lives == 0)
    return 0;
  const int64_t bits_a_word = esmm_max(a->kept / words, b->kept / lives);
  if (live)
    return join_words(a, b, list_a, list_b, live, lives, 1);
  if (bits_a_word <= APPEND_GROUP / 2)
    return join_words(a, b, list_a, list_b, NULL, lives, 1);
  if (bits_a_word <= 3 * APPEND_GROUP / 2)
    return join_words(a, b, list_a, list_b, NULL, lives, 2);
  return join_words(a, b, list_a, list_b, NULL, lives, 4);
}

/* ------------------------------------------------------------------------------------------------ dense products */

/* Is there a form of B with every k? */
static inline bool dense_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->w->format == ESMM_FORMAT_DENSE && !p->w->rows && !p->w->full) {
    (void)snprintf(why, why_bytes,
                   "the weights were prepared for large m and dropped zeros of b; prepare them with strict");
    return false;
  }
  return true;
}

/* ------------------------------------------------------------------------------------------------ heights */

/* terms() of the kernels that skip: the cheapest strip height, by the units that units_of counts. */
static inline void cheapest_strip(const esmm_problem *p, const double *cost,
                                  void (*units_of)(const esmm_problem *p, int level, double *units), double *units,
                                  int64_t *variant)
{
  double best = 0.0;
  *variant = 0;
  for (int level = 0; (1 << level) <= MAX_STRIP; level++) {
    if ((1 << level) < MIN_STRIP)
      continue;
    double now[ESMM_COST_TERMS] = {0}, seconds = 0.0;
    units_of(p, level, now);
    for (int i = 0; i < ESMM_COST_TERMS; i++)
      seconds += now[i] * cost[i];
    if (*variant == 0 || seconds < best) {
      best = seconds;
      *variant = 1 << level;
      memcpy(units, now, sizeof now);
    }
  }
}

/* ------------------------------------------------------------------------------------------------ blocks */

/* Panels of a block of C, `most` or fewer: so that threads have `each` blocks where there are panels enough. */
static inline int64_t panels_of_block(const esmm_problem *p, int64_t panels, int64_t most, int64_t blocks_m,
                                      int64_t each)
{
  const int64_t nc = esmm_min(panels, most), wanted = each * p->threads;
  if (p->threads == 1 || blocks_m * esmm_ceil_div(panels, nc) >= wanted)
    return nc;
  return esmm_ceil_div(panels, esmm_min(panels, esmm_ceil_div(wanted, blocks_m)));
}

typedef struct tally {
  double extract;    /* seconds */
  double terms;      /* multiplied (row, column, k)s */
  double kept, seen; /* strip bits set, and all, where zeros of A are skipped */
} tally;

typedef void block_function(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t);

typedef struct blocks_job {
  const esmm_problem *p;
  block_function *multiply;
  const void *plan;
  char *scratch; /* of each worker: a tally, then what multiply gets */
  size_t bytes;  /* both */
} blocks_job;

#define TALLY_BYTES align_up(sizeof(tally))

static void multiply_blocks(void *arg, int64_t first, int64_t end, int worker)
{
  const blocks_job *x = arg;
  char *own = x->scratch + (size_t)worker * x->bytes;
  for (int64_t block = first; block < end; block++)
    x->multiply(x->p, x->plan, block, own + TALLY_BYTES, (tally *)(void *)own);
}

/* Where multiply needs that many bytes. */
static size_t blocks_workspace(const esmm_problem *p, size_t bytes)
{
  size_t all;
  return esmm_size_mul(TALLY_BYTES + bytes, (size_t)p->threads, &all) ? all : SIZE_MAX;
}

/* Runs all blocks of C, `bytes` of scratch a thread, and fills in the statistics. */
static void run_blocks(const esmm_problem *p, block_function *multiply, const void *plan, int64_t blocks, size_t bytes,
                       void *scratch, esmm_stats *stats)
{
  blocks_job x = {.p = p, .multiply = multiply, .plan = plan, .scratch = scratch, .bytes = TALLY_BYTES + bytes};
  for (int i = 0; i < p->threads; i++)
    memset(x.scratch + (size_t)i * x.bytes, 0, sizeof(tally));
  esmm_for(p->ctx, p->threads, blocks, 1, multiply_blocks, &x);
  tally all = {0};
  for (int i = 0; i < p->threads; i++) {
    const tally *t = (const tally *)(void *)(x.scratch + (size_t)i * x.bytes);
    all.extract = fmax(all.extract, t->extract);
    all.terms += t->terms; /* whole numbers: the order does not matter */
    all.kept += t->kept;
    all.seen += t->seen;
  }
  stats->seconds_extract = all.extract;
  stats->flop_useful = 2.0 * all.terms;
  stats->joint_density = all.terms / ((double)p->m * (double)p->n * (double)p->k);
  if (all.seen > 0)
    stats->strip_density_a = all.kept / all.seen;
}

#endif
