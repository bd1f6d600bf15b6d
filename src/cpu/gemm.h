/*
 * gemm.h: the packed product that dense and joint kernels share; included once by each k_*.c after its vec_*.h.
 *
 * A thread takes a block of mc rows by nc columns of C, and for each stretch of kc k's:
 *   1. packs A, strip by strip. A strip is 4 to 32 rows that share one bitmap; in it, tiles of MR rows:
 *
 *        tile [kept][MR]     up to MR rows, one k after another, only the k's with a nonzero in the strip (all of them
 *                            when dense)
 *
 *   2. for each panel of B (kept k's only, see panels.h) and each strip: joins the two bitmaps into a k-list, as byte
 *      offsets into the strip's tiles and into the panel, and runs every tile of the strip over that list. Where strip
 *      and panel are both full there is no list, and the tile runs straight through both.
 *
 * The list costs about one cycle an entry and serves strip rows / MR tiles. Where B is full a strip's list does not
 * depend on the panel and is made once; where strips are full one list of the panel serves them all.
 *
 * Sums stay in registers for a limited number of steps (chain_length) and are then added to C, which keeps the rounding
 * error at the level of blocked dense libraries.
 */
#ifndef ESMM_GEMM_H
#define ESMM_GEMM_H

#include "blocks.h"
#include "panels.h"

#define STRAIGHT_CHAIN 320 /* terms summed before they are added to C where nothing is skipped */
#define MOST_PAIRED 96     /* entries of a list that is summed in two chains side by side */
#define STRETCH 256        /* k's of A scanned at a time: a kilobyte of each row, so that the reads stay sequential */

/* ------------------------------------------------------------------------------------------------ tiles */

ALWAYS void tile_step(const int rows, vec sums[MR][2], const float *a, const float *b0, const float *b1)
{
  vec x0 = vec_load(b0), x1 = vec_load(b1);
  VEC_KEEP(x0);
  VEC_KEEP(x1);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const vec y = vec_all(a + r);
    sums[r][0] = vec_fma(y, x0, sums[r][0]);
    sums[r][1] = vec_fma(y, x1, sums[r][1]);
  }
}

/* a [n][MR], b0 and b1 [n][step] */
ALWAYS void tile_straight(const int rows, const float *a, const float *b0, const float *b1, int64_t step, int64_t n,
                          float *c, int64_t ldc, bool add)
{
  vec sums[MR][2];
  tile_prefetch(rows, c, ldc);
  tile_clear(rows, sums);
#pragma GCC unroll 4
  for (int64_t i = 0; i < n; i++) {
    tile_step(rows, sums, a, b0, b1);
    a += MR;
    b0 += step;
    b1 += step;
  }
  tile_store(rows, sums, c, ldc, add);
}

/* the same over the k's of a list: byte offsets into a, and into b0 and b1; c is updated every `chain` steps */
ALWAYS void tile_listed(const int rows, const float *a, const float *b0, const float *b1, const uint32_t *list_a,
                        const uint32_t *list_b, int64_t n, int64_t chain, float *c, int64_t ldc, bool add)
{
  vec sums[MR][2];
  tile_prefetch(rows, c, ldc);
  do {
    const uint32_t *end = list_b + (chain < n ? chain : n);
    tile_clear(rows, sums);
#pragma GCC unroll 2
    for (; list_b < end; list_a++, list_b++)
      tile_step(rows, sums, (const float *)((const char *)a + *list_a), (const float *)((const char *)b0 + *list_b),
                (const float *)((const char *)b1 + *list_b));
    tile_store(rows, sums, c, ldc, add);
    add = true;
    n -= chain;
  } while (n > 0);
}

ALWAYS void half_store(const int rows, const vec even[MR], const vec odd[MR], float *c, int64_t ldc, bool add)
{
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const vec sum = vec_add(even[r], odd[r]);
    vec_store(c + r * ldc, add ? vec_add(sum, vec_load(c + r * ldc)) : sum);
  }
}

/*
 * The same for short lists where registers allow (AVX-512): half a tile at a time, with separate sums for even and odd
 * entries, so that chains are half as long without another pass over c.
 */
ALWAYS void half_paired(const int rows, const float *a, const float *b, const uint32_t *list_a, const uint32_t *list_b,
                        int64_t n, float *c, int64_t ldc, bool add)
{
  vec even[MR], odd[MR];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    even[r] = odd[r] = vec_zero();
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) {
    const float *a0 = (const float *)((const char *)a + list_a[i]);
    const float *a1 = (const float *)((const char *)a + list_a[i + 1]);
    const vec x0 = vec_load((const float *)((const char *)b + list_b[i]));
    const vec x1 = vec_load((const float *)((const char *)b + list_b[i + 1]));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      even[r] = vec_fma(vec_all(a0 + r), x0, even[r]);
      odd[r] = vec_fma(vec_all(a1 + r), x1, odd[r]);
    }
  }
  if (i < n) {
    const float *a0 = (const float *)((const char *)a + list_a[i]);
    const vec x0 = vec_load((const float *)((const char *)b + list_b[i]));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
      even[r] = vec_fma(vec_all(a0 + r), x0, even[r]);
  }
  half_store(rows, even, odd, c, ldc, add);
}

/* And where the k's are one after another: b [n][step] */
ALWAYS void half_straight(const int rows, const float *a, const float *b, int64_t step, int64_t n, float *c,
                          int64_t ldc, bool add)
{
  vec even[MR], odd[MR];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    even[r] = odd[r] = vec_zero();
  int64_t i = 0;
  for (; i + 2 <= n; i += 2, a += 2 * MR, b += 2 * step) {
    const vec x0 = vec_load(b), x1 = vec_load(b + step);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      even[r] = vec_fma(vec_all(a + r), x0, even[r]);
      odd[r] = vec_fma(vec_all(a + MR + r), x1, odd[r]);
    }
  }
  if (i < n) {
    const vec x0 = vec_load(b);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
      even[r] = vec_fma(vec_all(a + r), x0, even[r]);
  }
  half_store(rows, even, odd, c, ldc, add);
}

ALWAYS void tile_paired(const int rows, const float *a, const float *b0, const float *b1, const uint32_t *list_a,
                        const uint32_t *list_b, int64_t n, float *c, int64_t ldc, bool add)
{
  tile_prefetch(rows, c, ldc);
  half_paired(rows, a, b0, list_a, list_b, n, c, ldc, add);
  half_paired(rows, a, b1, list_a, list_b, n, c + VEC, ldc, add);
}

/* The same where half a tile is enough, for the last columns or on a narrow panel: b1 is NULL in the calls below. */
ALWAYS void tile_narrow(const int rows, const float *a, const float *b, const uint32_t *list_a, const uint32_t *list_b,
                        int64_t n, int64_t chain, float *c, int64_t ldc, bool add)
{
  for (int64_t i = 0; i == 0 || i < n; i += 2 * chain, add = true)
    half_paired(rows, a, b, list_a + i, list_b + i, esmm_min(2 * chain, n - i), c, ldc, add);
}

typedef void straight_function(const float *a, const float *b0, const float *b1, int64_t step, int64_t n, float *c,
                               int64_t ldc, bool add);
typedef void listed_function(const float *a, const float *b0, const float *b1, const uint32_t *list_a,
                             const uint32_t *list_b, int64_t n, int64_t chain, float *c, int64_t ldc, bool add);

#define TILES(rows)                                                                                               \
  static __attribute__((noinline)) void straight_##rows(const float *a, const float *b0, const float *b1,         \
                                                        int64_t step, int64_t n, float *c, int64_t ldc, bool add) \
  {                                                                                                               \
    if (b1)                                                                                                       \
      tile_straight(rows, a, b0, b1, step, n, c, ldc, add);                                                       \
    else                                                                                                          \
      half_straight(rows, a, b0, step, n, c, ldc, add);                                                           \
  }                                                                                                               \
  static __attribute__((noinline)) void listed_##rows(const float *a, const float *b0, const float *b1,           \
                                                      const uint32_t *list_a, const uint32_t *list_b, int64_t n,  \
                                                      int64_t chain, float *c, int64_t ldc, bool add)             \
  {                                                                                                               \
    if (!b1)                                                                                                      \
      tile_narrow(rows, a, b0, list_a, list_b, n, chain, c, ldc, add);                                            \
    else if (MR == 8 && n <= MOST_PAIRED)                                                                         \
      tile_paired(rows, a, b0, b1, list_a, list_b, n, c, ldc, add);                                               \
    else                                                                                                          \
      tile_listed(rows, a, b0, b1, list_a, list_b, n, chain, c, ldc, add);                                        \
  }
TILES(1)
TILES(2)
TILES(3)
TILES(4)
#if MR >= 6
TILES(5)
TILES(6)
#endif
#if MR == 8
TILES(7)
TILES(8)
static straight_function *const straight[MR + 1] = {NULL,       straight_1, straight_2, straight_3, straight_4,
                                                    straight_5, straight_6, straight_7, straight_8};
static listed_function *const listed[MR + 1] = {NULL,     listed_1, listed_2, listed_3, listed_4,
                                                listed_5, listed_6, listed_7, listed_8};
#elif MR == 6
static straight_function *const straight[MR + 1] = {NULL,       straight_1, straight_2, straight_3,
                                                    straight_4, straight_5, straight_6};
static listed_function *const listed[MR + 1] = {NULL, listed_1, listed_2, listed_3, listed_4, listed_5, listed_6};
#else
static straight_function *const straight[MR + 1] = {NULL, straight_1, straight_2, straight_3, straight_4};
static listed_function *const listed[MR + 1] = {NULL, listed_1, listed_2, listed_3, listed_4};
#endif

/* ------------------------------------------------------------------------------------------------ A */

typedef struct strip {
  int64_t row0, rows; /* of the block of C */
  int64_t kept;       /* k's packed, of the stretch */
  uint64_t *bits;     /* [words] */
  uint32_t *before;   /* [words]: k's kept before word w */
  float *tiles;       /* ceil(rows / MR) tiles, tile_stride floats apart */
  int64_t tile_stride;
  uint32_t *list_a, *list_b; /* its k-list when B is full */
} strip;

/* First row of tile t: a strip's rows are shared out evenly, 32 = 5 + 5 + 6 + 5 + 5 + 6 where a tile has 6 at most. */
ALWAYS int64_t tile_row(const strip *s, int64_t t)
{
  return s->rows * t / esmm_ceil_div(s->rows, MR);
}

/* ORs the words of rows of a (fp32, leading dimension ld) over `width` k's into out. */
ALWAYS void or_rows(const esmm_word32 *a, int64_t ld, int64_t rows, int64_t width, uint32_t *restrict out)
{
  int64_t r = 0;
  memset(out, 0, (size_t)width * sizeof *out);
  for (; r + 4 <= rows; r += 4) {
    const esmm_word32 *x = a + r * ld, *y = x + ld, *z = y + ld, *w = z + ld;
    for (int64_t i = 0; i < width; i++)
      out[i] |= (x[i] | y[i]) | (z[i] | w[i]);
  }
  for (; r < rows; r++)
    for (int64_t i = 0; i < width; i++)
      out[i] |= a[r * ld + i];
}

/* bits [ceil(kc / 64)] of a strip, whose rows from row0 and k0 on are a in fp32 */
static void find_bits(const esmm_problem *p, const float *a, int64_t ld, int64_t row0, int64_t rows, int64_t k0,
                      int64_t kc, uint64_t *bits)
{
  if (p->pattern) {
    bits_from_pattern(p->pattern, row0, rows, k0, kc, bits);
    return;
  }
  uint32_t ors[STRETCH];
  for (int64_t k = 0; k < kc; k += STRETCH) {
    const int64_t width = esmm_min(STRETCH, kc - k);
    or_rows((const esmm_word32 *)(a + k), ld, rows, width, ors);
    if (width < STRETCH)
      memset(ors + width, 0, (size_t)(STRETCH - width) * sizeof *ors);
    for (int64_t i = 0; i < width; i += 64)
      *bits++ = nonzero_bits(ors + i);
  }
}

/* One k of a tile. */
ALWAYS void pack_one(const float *a, int64_t ld, int64_t rows, float *to)
{
  for (int64_t r = 0; r < rows; r++)
    to[r] = a[r * ld];
}

/* Packs the k's of bits of up to MR rows; room for two k's past the last is used. */
static void pack_tile(const float *a, int64_t ld, int64_t rows, const uint64_t *bits, int64_t kc, float *to)
{
  const uint64_t block_mask = ((uint64_t)1 << BLOCK) - 1;
  for (int64_t k0 = 0; k0 < kc; k0 += 64) {
    const uint64_t word = bits[k0 / 64];
    for (int i = 0; i < 64; i += BLOCK) {
      uint64_t group = word >> i & block_mask;
      const float *from = a + k0 + i;
      if (group == 0)
        continue;
      if (rows < MR - 2 || __builtin_popcountll(group) <= BLOCK / 4 || k0 + i + BLOCK > kc) {
        for (; group; group &= group - 1, to += MR)
          pack_one(from + __builtin_ctzll(group), ld, rows, to);
        continue;
      }
      block_column columns[BLOCK];
      block_load(from, ld, rows, columns);
#pragma GCC unroll 8
      for (int j = 0; j < BLOCK; j++) { /* stores every column, advances past kept ones only */
        block_store(to, columns[j]);
        to += MR * (group >> j & 1);
      }
    }
  }
}

static void set_all(uint64_t *bits, int64_t kc)
{
  for (int64_t k = 0; k < kc; k += 64)
    *bits++ = kc - k >= 64 ? UINT64_MAX : ((uint64_t)1 << (kc - k)) - 1;
}

static void pack_strip(const esmm_problem *p, bool skip, int64_t block_row0, int64_t k0, int64_t kc, float *buffer,
                       strip *s)
{
  const int64_t words = esmm_ceil_div(kc, 64), row0 = block_row0 + s->row0;
  int64_t ld;
  const float *a = rows_of_a(&p->a, row0, s->rows, k0, kc, buffer, &ld);
  if (!skip)
    set_all(s->bits, kc);
  else
    find_bits(p, a, ld, row0, s->rows, k0, kc, s->bits);
  uint32_t kept = 0;
  for (int64_t i = 0; i < words; i++) {
    s->before[i] = kept;
    kept += (uint32_t)__builtin_popcountll(s->bits[i]);
  }
  s->kept = kept;
  const int64_t tiles = esmm_ceil_div(s->rows, MR);
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t r = tile_row(s, t);
    pack_tile(a + r * ld, ld, tile_row(s, t + 1) - r, s->bits, kc, s->tiles + t * s->tile_stride);
  }
}

/* ------------------------------------------------------------------------------------------------ the product */

typedef struct blocking {
  bool skip, full; /* full: panels have every k */
  source from;
  int64_t width, panels; /* columns of a panel, panels in all */
  int64_t strip_rows;
  int64_t mc, kc, nc; /* nc in panels */
  int64_t blocks_m, blocks_n;
  /* each thread's scratch, in bytes from its start */
  size_t at_bits, at_before, at_strips, at_list, at_panel, at_panel_bits, at_panel_before, at_sums, at_rows, bytes;
} blocking;

/* Splits C into blocks so that threads have several each, and lays out a thread's scratch. */
static blocking plan_blocks(const esmm_problem *p, bool skip)
{
  blocking g = {.skip = skip, .strip_rows = skip ? p->variant : MAX_STRIP};
  g.from = source_of(p->w, skip);
  g.full = source_full(p->w, g.from);
  g.width = panel_width(p->w, g.from);
  g.panels = esmm_ceil_div(p->n, g.width);
  g.kc = esmm_round_up(esmm_ceil_div(p->k, esmm_ceil_div(p->k, STRAIGHT_CHAIN)), 64); /* even stretches */
  g.mc = 128;
  if (skip) {
    int level = 0;
    while (level + 1 < ESMM_CPU_HEIGHTS && (1 << level) < g.strip_rows)
      level++;
    /* Short lists cost most: the sparser the joint, the longer the stretch. */
    if (p->sample.joint[level] < 0.9)
      g.kc = p->sample.joint[level] > 0.2 ? 2048 : 4096;
    /* About 256 KB of packed A: it is read again for every panel and must stay in the second-level cache. */
    const int64_t kept = esmm_max(64, (int64_t)((double)esmm_min(g.kc, p->k) * p->sample.strip[level]));
    g.mc = esmm_max(64, esmm_min(512, 65536 / kept / MAX_STRIP * MAX_STRIP));
  }
  g.kc = esmm_min(g.kc, esmm_round_up(p->k, 64));
  /* Eight blocks a thread even out the load; blocks of less than 64 rows would pack A more than they multiply. */
  const int64_t share = esmm_round_up(esmm_ceil_div(p->m, 8 * (int64_t)p->threads), MAX_STRIP);
  g.mc = esmm_min(g.mc, esmm_max(64, share));
  g.mc = esmm_min(g.mc, esmm_round_up(p->m, g.strip_rows));
  g.blocks_m = esmm_ceil_div(p->m, g.mc);
  g.nc = panels_of_block(p, g.panels, 4096 / g.width, g.blocks_m, 4);
  g.blocks_n = esmm_ceil_div(g.panels, g.nc);
  const int64_t words = esmm_ceil_div(g.kc, 64), strips = esmm_ceil_div(g.mc, g.strip_rows);
  const int64_t tiles = strips * esmm_ceil_div(g.strip_rows, MR);
  g.bytes = align_up((size_t)(tiles * (g.kc + 2 * MR) * MR) * sizeof(float));
  g.at_bits = set_aside(&g.bytes, strips * words, sizeof(uint64_t));
  g.at_before = set_aside(&g.bytes, strips * words, sizeof(uint32_t));
  g.at_strips = set_aside(&g.bytes, strips, sizeof(strip));
  g.at_list = set_aside(&g.bytes, skip ? 2 * (g.kc + 64) * (g.full ? strips : 1) : 0, sizeof(uint32_t));
  g.at_panel = set_aside(&g.bytes, 2 * g.kc * ESMM_HALF_COLS, sizeof(float));
  g.at_panel_bits = set_aside(&g.bytes, words, sizeof(uint64_t));
  g.at_panel_before = set_aside(&g.bytes, 2 * (words + 1), sizeof(uint32_t));
  g.at_sums = set_aside(&g.bytes, esmm_is_plain(p) ? 0 : g.mc * g.nc * g.width, sizeof(float));
  g.at_rows = set_aside(&g.bytes, g.strip_rows * g.kc, sizeof(float));
  return g;
}

/*
 * How many of n listed terms to sum in a register before they are added to C. A dense product adds every 320 k's to C,
 * of which n / kc are not zero here: as many terms a chain give about its error. Shorter than 48, or 24 for short
 * lists, costs more time than it saves error (it grows with sqrt(length + n / length)).
 */
static int64_t chain_length(int64_t n, int64_t kc)
{
  const int64_t most = n <= 64 ? 24 : esmm_max(48, esmm_min(192, STRAIGHT_CHAIN * n / kc));
  return n == 0 ? 1 : esmm_ceil_div(n, esmm_ceil_div(n, most));
}

/* One tile: c (+)= a * b over n k's, of a list or, where there is none, one after another. */
ALWAYS void multiply_tile(int64_t rows, const float *a, const float *b0, const float *b1, int64_t step,
                          const uint32_t *list_a, const uint32_t *list_b, int64_t n, int64_t chain, float *c,
                          int64_t ldc, bool add)
{
  if (list_a) {
    listed[rows](a, b0, b1, list_a, list_b, n, chain, c, ldc, add);
    return;
  }
  for (int64_t i = 0; i < n; i += STRAIGHT_CHAIN) {
    straight[rows](a + i * MR, b0 + i * step, b1 ? b1 + i * step : NULL, step, esmm_min(STRAIGHT_CHAIN, n - i), c, ldc,
                   add);
    add = true;
  }
}

/* A panel is narrower than a tile: half of one is used, and only with a list. */
ALWAYS bool is_narrow(int64_t width)
{
  return width < TILE_COLS;
}

/* One strip by one panel: c [rows, cols] of the block's output (+)= strip * panel over n listed k's, `chain` at a time,
   or over all of them. Columns behind those, up to `room`, may be written to. */
static void multiply_strip(const strip *s, const panel *b, int64_t width, const uint32_t *list_a,
                           const uint32_t *list_b, int64_t n, int64_t chain, float *c, int64_t ldc, int64_t cols,
                           int64_t room, bool add)
{
  if (n == 0 && add)
    return;
  const int64_t tiles = esmm_ceil_div(s->rows, MR), tile_cols = is_narrow(width) ? width : TILE_COLS;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t r = tile_row(s, t), rows = tile_row(s, t + 1) - r;
    const float *a = s->tiles + t * s->tile_stride;
    for (int64_t j = 0; j < cols; j += tile_cols) {
      const float *b0 = (j < ESMM_HALF_COLS ? b->first : b->second) + j % ESMM_HALF_COLS;
      const bool half = is_narrow(width) || cols - j <= VEC;
      const float *b1 = half ? NULL : (j + VEC < ESMM_HALF_COLS ? b->first : b->second) + (j + VEC) % ESMM_HALF_COLS;
      float *to = c + r * ldc + j;
      if (room - j >= (half ? VEC : TILE_COLS)) {
        multiply_tile(rows, a, b0, b1, b->step, list_a, list_b, n, chain, to, ldc, add);
        continue;
      }
      float edge[MR * TILE_COLS]; /* past the last column C is not ours to write */
      multiply_tile(rows, a, b0, b1, b->step, list_a, list_b, n, chain, edge, TILE_COLS, false);
      for (int64_t x = 0; x < rows; x++)
        for (int64_t y = 0; y < cols - j; y++)
          to[x * ldc + y] = edge[x * TILE_COLS + y] + (add ? to[x * ldc + y] : 0.0f);
    }
  }
}

/* Its k-list with the panel's k's. */
static int64_t join_strip(const strip *s, const panel *b, int64_t words)
{
  const joined of_a = {s->bits, s->before, s->kept, MR * sizeof(float)};
  const joined of_b = {b->bits, b->before, b->kept, (uint32_t)b->step * (uint32_t)sizeof(float)};
  return join(&of_a, &of_b, words, b->live, b->lives, s->list_a, s->list_b);
}

static void multiply_block(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const blocking *g = plan;
  const int64_t row0 = block / g->blocks_n * g->mc, rows = esmm_min(g->mc, p->m - row0);
  const int64_t q0 = block % g->blocks_n * g->nc, panels = esmm_min(g->nc, g->panels - q0);
  const int64_t strips = esmm_ceil_div(rows, g->strip_rows), all_words = esmm_ceil_div(g->kc, 64);
  const int64_t tiles = esmm_ceil_div(g->strip_rows, MR), tile_stride = (g->kc + 2 * MR) * MR;
  const bool plain = esmm_is_plain(p), shared_list = g->skip && g->full;
  strip *strip_of = (strip *)(void *)(scratch + g->at_strips);
  uint32_t *lists = (uint32_t *)(void *)(scratch + g->at_list);
  float *row_buffer = (float *)(void *)(scratch + g->at_rows);
  /* A tile that is narrower than a panel passes over a part of each row, which the hardware does not fetch ahead. */
  panel_room room = {.in_place = TILE_COLS >= g->width,
                     .values = (float *)(void *)(scratch + g->at_panel),
                     .bits = (uint64_t *)(void *)(scratch + g->at_panel_bits),
                     .before = (uint32_t *)(void *)(scratch + g->at_panel_before)};
  room.live = room.before + all_words + 1;
  float *sums = (float *)(void *)(scratch + g->at_sums);
  const int64_t ldc = plain ? p->c.ld : g->nc * g->width;
  float *c = plain ? (float *)p->c.data + row0 * p->c.ld + q0 * g->width : sums;
  for (int64_t k0 = 0; k0 < p->k; k0 += g->kc) {
    const int64_t kc = esmm_min(g->kc, p->k - k0), words = esmm_ceil_div(kc, 64);
    const bool add = k0 > 0 || (plain && p->beta == 1.0f);
    const double start = now_if_timed(p);
    for (int64_t i = 0; i < strips; i++) {
      strip *s = &strip_of[i];
      s->row0 = i * g->strip_rows;
      s->rows = esmm_min(g->strip_rows, rows - s->row0);
      s->bits = (uint64_t *)(void *)(scratch + g->at_bits) + i * all_words;
      s->before = (uint32_t *)(void *)(scratch + g->at_before) + i * all_words;
      s->tiles = (float *)(void *)scratch + i * tiles * tile_stride;
      s->tile_stride = tile_stride;
      s->list_a = lists + (shared_list ? 2 * i * (g->kc + 64) : 0);
      s->list_b = s->list_a + g->kc + 64;
      pack_strip(p, g->skip, row0, k0, kc, row_buffer, s);
      t->kept += g->skip ? (double)s->kept : 0.0;
      t->seen += g->skip ? (double)kc : 0.0;
      if (shared_list && s->kept < kc) /* every k of B is kept, so bit k stands at place k of the panel */
        for (int64_t w = 0, n = 0; w < words; n += __builtin_popcountll(s->bits[w++])) {
          for (int64_t x = 0, in_word = __builtin_popcountll(s->bits[w]); x < in_word; x++)
            s->list_a[n + x] = (uint32_t)((n + x) * (int64_t)(MR * sizeof(float)));
          append_offsets(s->list_b + n, s->bits[w], (uint32_t)(w * 64 * (int64_t)(ESMM_HALF_COLS * sizeof(float))),
                         ESMM_HALF_COLS * sizeof(float), 1);
        }
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++) {
      const panel b = make_panel(p->w, g->from, q0 + q, g->width, k0, kc, &room);
      const int64_t cols = esmm_min(g->width, p->n - (q0 + q) * g->width), mine = plain ? cols : g->width;
      int64_t n = -1; /* of the list there is, that of a full strip */
      for (int64_t i = 0; i < strips; i++) {
        const strip *s = &strip_of[i];
        float *to = c + s->row0 * ldc + q * g->width;
        if (s->kept == kc && b.kept == kc && !is_narrow(g->width)) {
          n = kc;
          multiply_strip(s, &b, g->width, NULL, NULL, kc, 0, to, ldc, cols, mine, add);
        } else {
          if (shared_list)
            n = s->kept;
          else if (n < 0 || s->kept < kc)
            n = join_strip(s, &b, words);
          multiply_strip(s, &b, g->width, s->list_a, s->list_b, n, chain_length(n, kc), to, ldc, cols, mine, add);
        }
        t->terms += (double)n * (double)s->rows * (double)cols;
        if (s->kept < kc)
          n = -1; /* its list is its own */
      }
    }
  }
  const int64_t col0 = q0 * g->width, cols = esmm_min(panels * g->width, p->n - col0);
  if (plain)
    esmm_finish_plain(p, row0, rows, col0, cols);
  else
    esmm_finish(p, row0, rows, col0, cols, sums, ldc);
}

/* ------------------------------------------------------------------------------------------------ descriptors */

static size_t gemm_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  return blocks_workspace(p, plan_blocks(p, self->flags & ESMM_KERNEL_SKIPS).bytes);
}

static esmm_status gemm_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                            esmm_stats *stats)
{
  (void)ctx;
  const blocking g = plan_blocks(p, self->flags & ESMM_KERNEL_SKIPS);
  run_blocks(p, multiply_block, &g, g.blocks_m * g.blocks_n, g.bytes, scratch, stats);
  return ESMM_OK;
}

#endif
