/*
 * pairs.h: the packed product of bf16 operands on AVX-512 BF16, whose instruction vdpbf16ps multiplies two k's of 16
 * columns at a time and adds both products to fp32 sums. Included by k_*_avx512bf16.c after vec_avx512.h.
 *
 * The instruction wants the two k's side by side, in 32 bits: a pair of A for a row, a pair of B for a column.
 *
 *   A, by strips of 8, 16 or 32 rows: tiles [kept / 2][8], 32 bits: two k's of a row. Or tiles [kept][8], 16 bits,
 *   where pairs depend on the panel.
 *
 *   B stays as it was prepared: two halves of 16 columns for each k. The next two k's of a list are put side by side
 *   in registers. A form of B with fixed pairs would multiply every pair that has one of the list's k's.
 *
 * BSR weights whose block width 32 divides are read where they lie, too: rows of a block column are block_cols apart.
 * So are N:M weights of which 32 columns share their k's.
 *
 * Where B is full the list of a strip does not depend on the panel, and A is packed in pairs once; the first tile of
 * the strip keeps the pairs of B for those below it. Where it is not, every tile makes its own pairs of both: those of
 * A a few steps ahead, to a buffer that never leaves the first-level cache. A Zen 4 has room for these shuffles beside
 * its multiply-adds, but not for stores: one of 64 bytes takes a multiply-add's place twice, and a buffer for all tiles
 * of a strip would be fetched from the second-level cache to be written. A dense product has one list for all strips,
 * and makes the pairs of B once for a block.
 *
 * A list with an odd end gets a zero of both operands: no Inf meets a zero that is not in the data.
 *
 * Tile 8 x 32 as in fp32: 16 accumulators, two vectors of B, eight broadcasts. It runs at 99 % of a Zen 4's peak from
 * the first-level cache, larger ones do no better. Sums stay in registers for PAIRS_CHAIN or PAIRS_STRAIGHT k's
 * at most.
 */
#ifndef ESMM_PAIRS_H
#define ESMM_PAIRS_H

#include "kept.h"
#include "words.h"

#include <stdio.h>

#define PAIRS_CHAIN 512    /* k's of a list that are summed before they are added to C; even */
#define PAIRS_STRAIGHT 768 /* the same in a dense product, which makes no pairs of A for each chain */
#define PAIRS_STRETCH 2048 /* k's of A packed at a time in a dense product */
#define PAIRS_AHEAD 8      /* steps by which a tile makes pairs of A before it multiplies them */
#define PAIRS_PAGE 128     /* k's by which halves of B are fetched before they are needed: a page */

typedef __m512i pair_vec;

ALWAYS vec dot_pairs(vec sums, pair_vec a, pair_vec b)
{
  return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

/* Which words of two vectors make 16 pairs. */
ALWAYS pair_vec pair_places(void)
{
  return _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008, 0x270007,
                          0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
}

/* 16 columns at two k's, side by side. */
ALWAYS pair_vec pair_up(const char *even, const char *odd, pair_vec places)
{
  return _mm512_permutex2var_epi16(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)even)),
                                   places,
                                   _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)odd)));
}

/* The same with zeros for the second. */
ALWAYS pair_vec pair_last(const char *even)
{
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)even));
}

/* ------------------------------------------------------------------------------------------------ tiles */

ALWAYS void pairs_step(const int rows, vec sums[MR][2], const uint32_t *a, pair_vec x0, pair_vec x1)
{
  VEC_KEEP(x0);
  VEC_KEEP(x1);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++) {
    const pair_vec y = _mm512_set1_epi32((int)a[r]);
    sums[r][0] = dot_pairs(sums[r][0], y, x0);
    sums[r][1] = dot_pairs(sums[r][1], y, x1);
  }
}

/* A tile's operands: n k's of a list, of B */
typedef struct pairs_of_b {
  const char *first, *second; /* columns 0..15 and 16..31 of the k at offset 0 */
  const uint32_t *list;       /* [n]: offsets in bytes */
  int64_t n;
  int64_t ahead;  /* bytes from a k to the one prefetched meanwhile */
  pair_vec *made; /* [ceil(n / 2)][2]: where they are side by side */
} pairs_of_b;

/* and of A, by 8 rows. */
typedef struct pairs_of_a {
  uint32_t *pairs;      /* [ceil(n / 2)][8]; or room for that, and: */
  const char *words;    /* 8 rows of the k at offset 0; NULL: pairs are there */
  const uint32_t *list; /* [n]: offsets in bytes */
} pairs_of_a;

ALWAYS void pairs_step_at(const int rows, vec sums[MR][2], const uint32_t *a, const pairs_of_b *b, const uint32_t *list,
                          pair_vec places)
{
  pairs_step(rows, sums, a, pair_up(b->first + list[0], b->first + list[1], places),
             pair_up(b->second + list[0], b->second + list[1], places));
}

typedef enum pairs_way { PAIRS_MAKE, PAIRS_FETCH, PAIRS_KEEP, PAIRS_MADE } pairs_way; /* b's pairs */

/*
 * c [rows, 32] (+)= a * b. Makes the pairs of B, and keeps them if others need them. fetch: B comes from memory, and
 * the CPU fetches ahead by itself, but not into the next page.
 */
ALWAYS void pairs_making(const int rows, const bool fetch, const bool keep, const uint32_t *a, const pairs_of_b *b,
                         float *c, int64_t ldc, bool add)
{
  const pair_vec places = pair_places();
  const char *b0 = b->first, *b1 = b->second;
  const uint32_t *list = b->list, *end = list + b->n / 2 * 2;
  pair_vec *made = b->made;
  vec sums[MR][2];
  tile_prefetch(rows, c, ldc);
  tile_clear(rows, sums);
  for (; list < end; list += 2, a += MR) {
    const pair_vec x0 = pair_up(b0 + list[0], b0 + list[1], places), x1 = pair_up(b1 + list[0], b1 + list[1], places);
    if (fetch) {
      _mm_prefetch(b0 + b->ahead + list[0], _MM_HINT_T0);
      _mm_prefetch(b1 + b->ahead + list[0], _MM_HINT_T0);
    }
    if (keep) {
      _mm512_storeu_si512(made, x0);
      _mm512_storeu_si512(made + 1, x1);
      made += 2;
    }
    pairs_step(rows, sums, a, x0, x1);
  }
  if (b->n % 2) {
    const pair_vec x0 = pair_last(b0 + list[0]), x1 = pair_last(b1 + list[0]);
    if (keep) {
      _mm512_storeu_si512(made, x0);
      _mm512_storeu_si512(made + 1, x1);
    }
    pairs_step(rows, sums, a, x0, x1);
  }
  tile_store(rows, sums, c, ldc, add);
}

/* The same with pairs that are made. */
ALWAYS void pairs_made(const int rows, const uint32_t *a, const pairs_of_b *b, float *c, int64_t ldc, bool add)
{
  const pair_vec *from = b->made, *end = from + (b->n + 1) / 2 * 2;
  vec sums[MR][2];
  tile_prefetch(rows, c, ldc);
  tile_clear(rows, sums);
#pragma GCC unroll 2
  for (; from < end; from += 2, a += MR)
    pairs_step(rows, sums, a, _mm512_loadu_si512(from), _mm512_loadu_si512(from + 1));
  tile_store(rows, sums, c, ldc, add);
}

/* 8 rows at two k's, side by side. */
ALWAYS void pair_rows(__m128i even, __m128i odd, uint32_t *to)
{
  _mm_storeu_si128((__m128i *)(void *)to, _mm_unpacklo_epi16(even, odd));
  _mm_storeu_si128((__m128i *)(void *)(to + MR / 2), _mm_unpackhi_epi16(even, odd));
}

ALWAYS __m128i load_rows(const char *words, uint32_t at)
{
  return _mm_loadu_si128((const __m128i *)(const void *)(words + at));
}

/* The same with no pairs made: neither B's, nor A's, which are PAIRS_AHEAD steps ahead. */
ALWAYS void pairs_joined(const int rows, const pairs_of_a *a, const pairs_of_b *b, float *c, int64_t ldc, bool add)
{
  const pair_vec places = pair_places();
  const pairs_of_b from = *b; /* in registers */
  const char *words = a->words;
  const uint32_t *next = a->list, *list = from.list, *pairs = a->pairs, *end = next + from.n / 2 * 2;
  const uint32_t *first = next + esmm_min(PAIRS_AHEAD, from.n / 2) * 2, *last = list + from.n / 2 * 2;
  uint32_t *to = a->pairs;
  vec sums[MR][2];
  tile_prefetch(rows, c, ldc);
  tile_clear(rows, sums);
  for (; next < first; next += 2, to += MR)
    pair_rows(load_rows(words, next[0]), load_rows(words, next[1]), to);
  for (; next < end; next += 2, to += MR, list += 2, pairs += MR) {
    pair_rows(load_rows(words, next[0]), load_rows(words, next[1]), to);
    pairs_step_at(rows, sums, pairs, &from, list, places);
  }
  if (from.n % 2)
    pair_rows(load_rows(words, next[0]), _mm_setzero_si128(), to);
  for (; list < last; list += 2, pairs += MR)
    pairs_step_at(rows, sums, pairs, &from, list, places);
  if (from.n % 2)
    pairs_step(rows, sums, pairs, pair_last(from.first + list[0]), pair_last(from.second + list[0]));
  tile_store(rows, sums, c, ldc, add);
}

/* The same for 9 to 16 rows, two tiles of A: 16 columns at a time, so that pairs of B serve all rows and need not be
   kept. */
ALWAYS void pairs_tall_step(const int rows, vec sums[2 * MR], const uint32_t *a, const uint32_t *below, pair_vec x)
{
  VEC_KEEP(x);
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
    sums[r] = dot_pairs(sums[r], _mm512_set1_epi32((int)(r < MR ? a[r] : below[r - MR])), x);
}

ALWAYS void pairs_tall(const int rows, const uint32_t *a, const uint32_t *below, const char *half, const pairs_of_b *b,
                       float *c, int64_t ldc, bool add)
{
  const pair_vec places = pair_places();
  const char *ahead = half + b->ahead;
  const uint32_t *list = b->list, *end = list + b->n / 2 * 2;
  vec sums[2 * MR];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++) {
    __builtin_prefetch(c + r * ldc, 1);
    sums[r] = vec_zero();
  }
  for (; list < end; list += 2, a += MR, below += MR) {
    _mm_prefetch(ahead + list[0], _MM_HINT_T0);
    pairs_tall_step(rows, sums, a, below, pair_up(half + list[0], half + list[1], places));
  }
  if (b->n % 2)
    pairs_tall_step(rows, sums, a, below, pair_last(half + list[0]));
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
    vec_store(c + r * ldc, add ? vec_add(sums[r], vec_load(c + r * ldc)) : sums[r]);
}

typedef void tall_function(const uint32_t *a, const uint32_t *below, const pairs_of_b *b, float *c, int64_t ldc,
                           bool add);

#define TALL_TILE(rows)                                                                                            \
  static __attribute__((noinline)) void tall_##rows(const uint32_t *a, const uint32_t *below, const pairs_of_b *b, \
                                                    float *c, int64_t ldc, bool add)                               \
  {                                                                                                                \
    pairs_tall(rows, a, below, b->first, b, c, ldc, add);                                                          \
    pairs_tall(rows, a, below, b->second, b, c + VEC, ldc, add);                                                   \
  }
TALL_TILE(9)
TALL_TILE(10)
TALL_TILE(11)
TALL_TILE(12)
TALL_TILE(13)
TALL_TILE(14)
TALL_TILE(15)
TALL_TILE(16)
static tall_function *const tall_tile[2 * MR + 1] = {[9] = tall_9, tall_10, tall_11, tall_12,
                                                     tall_13,      tall_14, tall_15, tall_16};

typedef void pairs_function(pairs_way way, const pairs_of_a *a, const pairs_of_b *b, float *c, int64_t ldc, bool add);

/* With few rows a tile waits for memory alone, and fetching ahead gains nothing. */
#define PAIRS_TILE(rows)                                                                                      \
  static __attribute__((noinline)) void pairs_##rows(pairs_way way, const pairs_of_a *a, const pairs_of_b *b, \
                                                     float *c, int64_t ldc, bool add)                         \
  {                                                                                                           \
    if (a->words)                                                                                             \
      pairs_joined(rows, a, b, c, ldc, add);                                                                  \
    else if (way == PAIRS_MADE)                                                                               \
      pairs_made(rows, a->pairs, b, c, ldc, add);                                                             \
    else if (way == PAIRS_KEEP)                                                                               \
      pairs_making(rows, false, true, a->pairs, b, c, ldc, add);                                              \
    else if (way == PAIRS_FETCH && (rows) > MR / 2)                                                           \
      pairs_making(rows, true, false, a->pairs, b, c, ldc, add);                                              \
    else                                                                                                      \
      pairs_making(rows, false, false, a->pairs, b, c, ldc, add);                                             \
  }
PAIRS_TILE(1)
PAIRS_TILE(2)
PAIRS_TILE(3)
PAIRS_TILE(4)
PAIRS_TILE(5)
PAIRS_TILE(6)
PAIRS_TILE(7)
PAIRS_TILE(8)
static pairs_function *const pairs_tile[MR + 1] = {NULL,    pairs_1, pairs_2, pairs_3, pairs_4,
                                                   pairs_5, pairs_6, pairs_7, pairs_8};

/* ------------------------------------------------------------------------------------------------ A */

typedef struct pairs_strip {
  int64_t row0, rows; /* of the block of C */
  int64_t kept;       /* k's packed, of the stretch */
  uint64_t *bits;     /* [words] */
  uint32_t *before;   /* [words]: k's kept before word w */
  uint32_t *pairs;    /* tiles of 8 rows, [ceil(kept / 2)][8], tile_stride apart; or: */
  uint16_t *words;    /* the same, [kept][8], as many bytes apart */
  uint32_t *list;     /* its k's as offsets into a panel, where B is full */
} pairs_strip;

/* 32 k's of up to 16 rows, turned; rows that are not there are zeros. */
ALWAYS void load_turned(const uint16_t *a, int64_t ld, int64_t rows, int64_t count, __m512i x[16])
{
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++)
    x[r] = r < rows ? load_words(a + r * ld, count) : _mm512_setzero_si512();
  turn_pairs(x);
}

/* 16 rows of a pair to two tiles, or 8 to one. */
ALWAYS void store_pairs(uint32_t *to, int64_t tile_stride, bool two, __m512i x)
{
  _mm256_storeu_si256((__m256i *)(void *)to, _mm512_castsi512_si256(x));
  if (two)
    _mm256_storeu_si256((__m256i *)(void *)(to + tile_stride), _mm512_extracti64x4_epi64(x, 1));
}

/* 16 rows of a k to two tiles, or 8 to one. */
ALWAYS void store_words(uint16_t *to, int64_t stride, bool two, __m256i x)
{
  _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(x));
  if (two)
    _mm_storeu_si128((__m128i *)(void *)(to + stride), _mm256_extracti128_si256(x, 1));
}

/* All k's, in pairs: nothing is skipped, so they lie side by side in A already. */
static void pack_all(const uint16_t *a, int64_t ld, int64_t rows, int64_t kc, int64_t tile_stride, uint32_t *to)
{
  for (int64_t r = 0; r < rows; r += 2 * MR, to += 2 * tile_stride)
    for (int64_t k = 0; k < kc; k += 32) {
      __m512i x[16];
      load_turned(a + r * ld + k, ld, rows - r, kc - k, x);
      const int64_t pairs = esmm_min(16, (kc - k + 1) / 2);
      for (int64_t i = 0; i < pairs; i++)
        store_pairs(to + (k / 2 + i) * MR, tile_stride, rows - r > MR, x[i]);
    }
}

/* The k's of bits, one after another, to tiles [kept][8]; room for a k past the last is used. */
static void pack_words(const uint16_t *a, int64_t ld, int64_t rows, const uint64_t *bits, int64_t kc,
                       int64_t tile_stride, uint16_t *to)
{
  const __m512i odd_first = _mm512_set1_epi32(16);
  for (int64_t r = 0; r < rows; r += 2 * MR, to += 4 * tile_stride) {
    uint16_t *end = to;
    for (int64_t k = 0; k < kc; k += 32) {
      uint32_t group = (uint32_t)(bits[k / 64] >> (k % 64));
      if (!group)
        continue;
      __m512i x[16];
      load_turned(a + r * ld + k, ld, rows - r, kc - k, x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++, group >>= 2) { /* stores every k, advances past kept ones only */
        store_words(end, 2 * tile_stride, rows - r > MR, _mm512_cvtepi32_epi16(x[i]));
        end += MR * (group & 1);
        store_words(end, 2 * tile_stride, rows - r > MR, _mm512_cvtepi32_epi16(_mm512_srlv_epi32(x[i], odd_first)));
        end += MR * (group >> 1 & 1);
      }
    }
  }
}

/* Pairs of a strip's n k's, one after another: a tile's words become its pairs. */
static void pair_strip(int64_t rows, const uint16_t *words, int64_t n, int64_t tile_stride, uint32_t *to)
{
  for (int64_t r = 0; r < rows; r += MR, words += 2 * tile_stride, to += tile_stride)
    for (int64_t i = 0; i < n; i += 2) {
      const __m128i even = _mm_loadu_si128((const __m128i *)(const void *)(words + i * MR));
      const __m128i odd = _mm_loadu_si128((const __m128i *)(const void *)(words + (i + 1) * MR));
      pair_rows(even, i + 1 < n ? odd : _mm_setzero_si128(), to + i / 2 * MR);
    }
}

/* ------------------------------------------------------------------------------------------------ the product */

typedef struct pairs_blocking {
  bool skip, full; /* full: B has every k of every panel */
  bool from_rows;  /* B is read from its rows */
  bool blocks;     /* or from its blocks, whose width 32 divides, */
  bool lists;      /* or from N:M lists that 32 columns share */
  int64_t panels, width;
  int64_t tile_stride; /* words of 32 bits from one tile of packed A to the next */
  int64_t mc, kc, nc;  /* nc in panels */
  int64_t held;        /* panels whose sums are in scratch: one, where all k's are one stretch */
  int64_t sums_ld;
  int64_t blocks_m, blocks_n;
  /* each thread's scratch, in bytes from its start */
  size_t at_bits, at_before, at_strips, at_lists, at_a, at_b, at_words, at_sums, at_rows, at_kept, bytes;
} pairs_blocking;

/* Rows of a block, `most` or down to half as many, to balance the threads. */
static inline int64_t even_rows(int64_t m, int64_t most, int64_t threads)
{
  int64_t best = most;
  for (int64_t rows = most; threads > 1 && rows >= esmm_max(most / 2, MAX_STRIP); rows -= MAX_STRIP)
    if (esmm_ceil_div(esmm_ceil_div(m, rows), threads) * rows < esmm_ceil_div(esmm_ceil_div(m, best), threads) * best)
      best = rows;
  return best;
}

static pairs_blocking pairs_plan(const esmm_problem *p, bool skip)
{
  pairs_blocking g = {.skip = skip,
                      .blocks = p->w->format == ESMM_FORMAT_BSR,
                      .lists = p->w->format == ESMM_FORMAT_NM,
                      .panels = esmm_ceil_div(p->n, ESMM_PANEL)};
  g.full = !skip || (p->w->full && !g.blocks && !g.lists);
  g.from_rows = !skip && !(p->w->panel_data && p->w->full);
  g.width = skip ? p->variant : p->m > 16 ? 32 : p->m > 8 ? 16 : 8;
  g.kc = esmm_round_up(esmm_ceil_div(p->k, esmm_ceil_div(p->k, PAIRS_STRETCH)), 64); /* even stretches */
  g.mc = 256;
  if (skip) {
    int level = 0;
    while (level + 1 < ESMM_CPU_HEIGHTS && (1 << level) < g.width)
      level++;
    if (p->sample.joint[level] < 0.2)
      g.kc = 4096; /* short lists are what costs */
    /* About 512 KB of packed A: it is read again for every panel and must stay in the second-level cache. */
    const int64_t kept = esmm_max(64, (int64_t)((double)esmm_min(g.kc, p->k) * p->sample.strip[level]));
    g.mc = esmm_max(64, esmm_min(512, ((int64_t)1 << 18) / kept / MAX_STRIP * MAX_STRIP));
  }
  g.kc = esmm_min(g.kc, esmm_round_up(p->k, 64));
  const int64_t share = esmm_round_up(esmm_ceil_div(p->m, 4 * p->threads), MAX_STRIP);
  g.mc = esmm_min(g.mc, esmm_max(64, share));
  g.mc = esmm_min(even_rows(p->m, g.mc, p->threads), esmm_round_up(p->m, g.width));
  g.blocks_m = esmm_ceil_div(p->m, g.mc);
  const bool at_once = esmm_is_plain(p) || g.kc >= p->k;
  /* sums in scratch stay near */
  g.nc = panels_of_block(p, g.panels, (at_once ? 4096 : 1024) / TILE_COLS, g.blocks_m, 4);
  g.blocks_n = esmm_ceil_div(g.panels, g.nc);
  g.held = at_once ? 1 : g.nc;
  g.sums_ld = g.held * TILE_COLS + (at_once ? 0 : VEC); /* rows a page apart would push one another out of the cache */
  const int64_t words = esmm_ceil_div(g.kc, 64), strips = esmm_ceil_div(g.mc, g.width);
  const int64_t strip_bytes = (g.kc + 4) * g.width * (int64_t)sizeof(uint16_t);
  g.tile_stride = (g.kc / 2 + 2) * MR;
  g.bytes = align_up((size_t)(strips * strip_bytes));
  g.at_bits = set_aside(&g.bytes, strips * words, sizeof(uint64_t));
  g.at_before = set_aside(&g.bytes, strips * words, sizeof(uint32_t));
  g.at_strips = set_aside(&g.bytes, strips, sizeof(pairs_strip));
  /* of every strip, or of a strip and a panel, or of a chain */
  g.at_lists = set_aside(&g.bytes, !skip ? PAIRS_STRAIGHT : (g.full ? strips : 2) * (g.kc + 64), sizeof(uint32_t));
  g.at_a = set_aside(&g.bytes, PAIRS_CHAIN / 2 * MR, sizeof(uint32_t)); /* a chain's pairs of A, of a tile */
  g.at_b = set_aside(&g.bytes, (skip ? PAIRS_CHAIN : PAIRS_STRAIGHT) / 2 * 2, sizeof(pair_vec)); /* and of B */
  g.at_words = set_aside(&g.bytes, skip && g.full ? strip_bytes : 0, 1); /* a strip's words, before they become pairs */
  g.at_sums = set_aside(&g.bytes, esmm_is_plain(p) ? 0 : g.mc * g.sums_ld, sizeof(float));
  g.at_rows = set_aside(&g.bytes, p->a.order == ESMM_ROW_MAJOR ? 0 : g.width * g.kc, sizeof(uint16_t));
  /* the bits of a panel of blocks or lists, and their counts */
  g.at_kept = set_aside(&g.bytes, g.blocks || g.lists ? 2 * words + 1 : 0, sizeof(uint64_t));
  return g;
}

/* Offsets of n k's that lie `step` bytes apart. */
static void list_all(uint32_t *list, int64_t n, int64_t step)
{
  for (int64_t i = 0; i < n; i++)
    list[i] = (uint32_t)(i * step);
}

static void pairs_pack(const esmm_problem *p, const pairs_blocking *g, int64_t block_row0, int64_t k0, int64_t kc,
                       uint16_t *row_buffer, uint16_t *word_buffer, pairs_strip *s)
{
  const int64_t words = esmm_ceil_div(kc, 64), row0 = block_row0 + s->row0;
  int64_t ld;
  const uint16_t *a = words_of_a(&p->a, row0, s->rows, k0, kc, row_buffer, &ld);
  if (!g->skip) {
    s->kept = kc;
    pack_all(a, ld, s->rows, kc, g->tile_stride, s->pairs);
    return;
  }
  find_bits(p, a, ld, row0, s->rows, k0, kc, s->bits);
  uint32_t kept = 0;
  for (int64_t i = 0; i < words; i++) {
    s->before[i] = kept;
    kept += (uint32_t)__builtin_popcountll(s->bits[i]);
  }
  s->kept = kept;
  if (!g->full) {
    pack_words(a, ld, s->rows, s->bits, kc, g->tile_stride, s->words);
    return;
  }
  if (kept == kc) {
    pack_all(a, ld, s->rows, kc, g->tile_stride, s->pairs);
  } else {
    pack_words(a, ld, s->rows, s->bits, kc, g->tile_stride, word_buffer);
    pair_strip(s->rows, word_buffer, kept, g->tile_stride, s->pairs);
  }
  uint32_t *end = s->list;
  for (int64_t w = 0; w < words; w++)
    end = append_offsets(end, s->bits[w], (uint32_t)(w * 64 * HALF_BYTES), (uint32_t)HALF_BYTES, 1);
}

/* c [rows, cols] (+)= a strip's tiles times b, that of a first; columns up to `room` may be written to. way: of the
   first tile. */
static void pairs_multiply(int64_t rows, pairs_of_a a, int64_t tile_stride, const pairs_of_b *b, pairs_way way,
                           float *c, int64_t ldc, int64_t cols, int64_t room, bool add)
{
  if (way == PAIRS_FETCH && rows > MR && room >= TILE_COLS) {
    tall_tile[rows](a.pairs, a.pairs + tile_stride, b, c, ldc, add);
    return;
  }
  for (int64_t r = 0; r < rows; r += MR, c += MR * ldc) {
    const int64_t count = esmm_min(MR, rows - r);
    float edge[MR * TILE_COLS]; /* past the last column C is not ours to write */
    const bool whole = room >= TILE_COLS;
    pairs_tile[count](way, &a, b, whole ? c : edge, whole ? ldc : TILE_COLS, whole && add);
    way = way == PAIRS_KEEP ? PAIRS_MADE : way;
    if (a.words)
      a.words += tile_stride * (int64_t)sizeof(uint32_t);
    else
      a.pairs += tile_stride;
    if (whole)
      continue;
    for (int64_t x = 0; x < count; x++)
      for (int64_t y = 0; y < cols; y++)
        c[x * ldc + y] = edge[x * TILE_COLS + y] + (add ? c[x * ldc + y] : 0.0f);
  }
}

/* The part of the block's C that a panel meets. */
typedef struct pairs_target {
  float *c;
  int64_t ldc, cols, room;
  bool add;
} pairs_target;

/* All k's of the stretch. A chain's pairs of B are made once, by the block's first strip: if there are others it has
   32 rows, and its tiles keep the pairs. A single strip of at most 16 rows need not keep them. */
static void pairs_straight(const pairs_blocking *g, const pairs_strip *strips, int64_t count, int64_t kc, pairs_of_b b,
                           int64_t step, const pairs_target *to)
{
  const int64_t chain = esmm_round_up(esmm_ceil_div(kc, esmm_ceil_div(kc, PAIRS_STRAIGHT)), 2);
  for (int64_t k = 0; k < kc; k += chain, b.first += chain * step, b.second += chain * step) {
    pairs_way way = count == 1 && strips[0].rows <= 2 * MR ? PAIRS_FETCH : PAIRS_KEEP;
    b.n = esmm_min(chain, kc - k);
    for (int64_t i = 0; i < count; i++, way = PAIRS_MADE)
      pairs_multiply(strips[i].rows, (pairs_of_a){.pairs = strips[i].pairs + k / 2 * MR}, g->tile_stride, &b, way,
                     to->c + strips[i].row0 * to->ldc, to->ldc, to->cols, to->room, to->add || k > 0);
  }
}

/* The n k's of a strip's list. list_a: where they stand in its words, from which pairs are made in a buffer; NULL: it
   has pairs. */
static void pairs_listed(const pairs_blocking *g, const pairs_strip *s, const uint32_t *list_a, int64_t n, pairs_of_b b,
                         uint32_t *buffer, const pairs_target *to)
{
  if (n == 0 && to->add)
    return;
  const uint32_t *list_b = b.list;
  const int64_t chain = n == 0 ? 2 : esmm_round_up(esmm_ceil_div(n, esmm_ceil_div(n, PAIRS_CHAIN)), 2);
  for (int64_t i = 0; i == 0 || i < n; i += chain) {
    const pairs_of_a a = list_a ? (pairs_of_a){.pairs = buffer, .words = (const char *)s->words, .list = list_a + i}
                                : (pairs_of_a){.pairs = s->pairs + i / 2 * MR};
    b.n = esmm_min(chain, n - i);
    b.list = list_b + i;
    pairs_multiply(s->rows, a, g->tile_stride, &b, s->rows > MR ? PAIRS_KEEP : PAIRS_MAKE, to->c + s->row0 * to->ldc,
                   to->ldc, to->cols, to->room, to->add || i > 0);
  }
}

/* Panel q's halves at k0, which are `step` bytes a k. */
static pairs_of_b pairs_panel(const esmm_weights *w, bool from_rows, int64_t q, int64_t k0)
{
  if (from_rows) {
    const char *at = (const char *)w->rows + (k0 * w->rows_ld + q * ESMM_PANEL) * (int64_t)sizeof(uint16_t);
    return (pairs_of_b){.first = at, .second = at + HALF_BYTES};
  }
  const char *half[2];
  panel_halves(w, q, k0, half);
  return (pairs_of_b){.first = half[0], .second = half[1], .ahead = PAIRS_PAGE * HALF_BYTES};
}

/* The k's of panel q, of the stretch from k0 on, and where they are: of blocks and lists, found in scratch. */
static joined pairs_kept(const pairs_blocking *g, const esmm_weights *w, int64_t q, int64_t k0, int64_t kc,
                         char *scratch, pairs_of_b *b)
{
  const int64_t words = esmm_ceil_div(kc, 64);
  if (!g->blocks && !g->lists) {
    const uint32_t *before = w->before + q * (w->words + 1) + k0 / 64;
    return (joined){w->bits + q * w->words + k0 / 64, before, (int64_t)before[words] - before[0], (uint32_t)HALF_BYTES};
  }
  uint64_t *bits = (uint64_t *)(void *)(scratch + g->at_kept);
  const panel_room room = {
      .bits = bits, .before = (uint32_t *)(bits + words), .live = (uint32_t *)(bits + words) + words + 1};
  panel found = {.kept = 0};
  if (g->lists) {
    const int64_t slot = find_listed(&w->nm, q * ESMM_PANEL, k0, kc, &room, &found);
    const int64_t half = 2 * q + 1 < w->nm.panels ? w->nm.slots * HALF_BYTES : 0; /* else the second is not read */
    b->first = (const char *)w->nm.values + (2 * q * w->nm.slots + slot) * HALF_BYTES;
    b->second = b->first + half;
    return (joined){found.bits, found.before, found.kept, (uint32_t)HALF_BYTES};
  }
  const int64_t at = find_blocks(&w->bsr, q * ESMM_PANEL, k0, kc, &room, &found);
  b->first = (const char *)w->bsr.values + at * (int64_t)sizeof(uint16_t);
  b->second = b->first + HALF_BYTES;
  return (joined){found.bits, found.before, found.kept, (uint32_t)w->bsr.block_cols * (uint32_t)sizeof(uint16_t)};
}

/* The k's that a strip shares with a panel: offsets into the strip's words, then, kc + 64 entries on, into the panel.
   Where B is full the strip's own list is that, and none is made. */
static int64_t pairs_join(const pairs_blocking *g, const pairs_strip *s, const joined *of_b, int64_t words,
                          uint32_t *lists)
{
  if (g->full)
    return s->kept;
  const joined of_a = {s->bits, s->before, s->kept, (uint32_t)(MR * sizeof(uint16_t))};
  return join(&of_a, of_b, words, NULL, words, lists, lists + g->kc + 64);
}

static void pairs_block(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const pairs_blocking *g = plan;
  const esmm_weights *w = p->w;
  const int64_t row0 = block / g->blocks_n * g->mc, rows = esmm_min(g->mc, p->m - row0);
  const int64_t q0 = block % g->blocks_n * g->nc, panels = esmm_min(g->nc, g->panels - q0);
  const int64_t strips = esmm_ceil_div(rows, g->width), all_words = esmm_ceil_div(g->kc, 64);
  const int64_t step = g->from_rows ? w->rows_ld * (int64_t)sizeof(uint16_t) : HALF_BYTES;
  const bool plain = esmm_is_plain(p), shared = g->skip && g->full;
  pairs_strip *strip_of = (pairs_strip *)(void *)(scratch + g->at_strips);
  uint32_t *lists = (uint32_t *)(void *)(scratch + g->at_lists), *buffer = (uint32_t *)(void *)(scratch + g->at_a);
  float *sums = (float *)(void *)(scratch + g->at_sums);
  const bool panel_ends = !plain && g->kc >= p->k; /* its sums are whole, and go to C while they are near */
  pairs_target to = {.ldc = plain ? p->c.ld : g->sums_ld};
  float *c = plain ? (float *)p->c.data + row0 * p->c.ld + q0 * TILE_COLS : sums;
  if (!g->skip)
    list_all(lists, PAIRS_STRAIGHT, step);
  for (int64_t k0 = 0; k0 < p->k; k0 += g->kc) {
    const int64_t kc = esmm_min(g->kc, p->k - k0), words = esmm_ceil_div(kc, 64);
    const double start = now_if_timed(p);
    to.add = k0 > 0 || (plain && p->beta == 1.0f);
    for (int64_t i = 0; i < strips; i++) {
      pairs_strip *s = &strip_of[i];
      s->row0 = i * g->width;
      s->rows = esmm_min(g->width, rows - s->row0);
      s->bits = (uint64_t *)(void *)(scratch + g->at_bits) + i * all_words;
      s->before = (uint32_t *)(void *)(scratch + g->at_before) + i * all_words;
      s->words = (uint16_t *)(void *)scratch + i * (g->kc + 4) * g->width;
      s->pairs = (uint32_t *)(void *)s->words;
      s->list = lists + (shared ? i * (g->kc + 64) : 0);
      pairs_pack(p, g, row0, k0, kc, (uint16_t *)(void *)(scratch + g->at_rows),
                 (uint16_t *)(void *)(scratch + g->at_words), s);
      t->kept += g->skip ? (double)s->kept : 0.0;
      t->seen += g->skip ? (double)kc : 0.0;
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++) {
      pairs_of_b b = g->blocks || g->lists ? (pairs_of_b){.n = 0} : pairs_panel(w, g->from_rows, q0 + q, k0);
      const joined of_b = g->full ? (joined){.kept = 0} : pairs_kept(g, w, q0 + q, k0, kc, scratch, &b);
      b.made = (pair_vec *)(void *)(scratch + g->at_b);
      to.cols = esmm_min(TILE_COLS, p->n - (q0 + q) * TILE_COLS);
      to.room = plain ? to.cols : TILE_COLS;
      to.c = c + (panel_ends ? 0 : q * TILE_COLS);
      if (!g->skip) {
        b.list = lists;
        pairs_straight(g, strip_of, strips, kc, b, step, &to);
        t->terms += (double)kc * (double)rows * (double)to.cols;
      }
      for (int64_t i = 0; g->skip && i < strips; i++) {
        const pairs_strip *s = &strip_of[i];
        const int64_t n = pairs_join(g, s, &of_b, words, lists);
        b.list = shared ? s->list : lists + g->kc + 64;
        pairs_listed(g, s, shared ? NULL : lists, n, b, buffer, &to);
        t->terms += (double)n * (double)s->rows * (double)to.cols;
      }
      if (panel_ends)
        esmm_finish(p, row0, rows, (q0 + q) * TILE_COLS, to.cols, sums, g->sums_ld);
    }
  }
  if (panel_ends)
    return;
  const int64_t col0 = q0 * TILE_COLS, cols = esmm_min(panels * TILE_COLS, p->n - col0);
  if (plain)
    esmm_finish_plain(p, row0, rows, col0, cols);
  else
    esmm_finish(p, row0, rows, col0, cols, sums, to.ldc);
}

/* ------------------------------------------------------------------------------------------------ descriptors */

/* What kernels that skip have in common at one strip height: of the joint's k's, all of a panel are multiplied. */
static inline void pairs_units(const esmm_problem *p, int level, double joint, double *units)
{
  const double m = (double)p->m, k = (double)p->k, panels = (double)esmm_ceil_div(p->n, ESMM_PANEL);
  const double height = (double)(1 << level), strips = (double)esmm_ceil_div(p->m, 1 << level);
  units[0] = m * panels * ESMM_PANEL * k * joint / (2 * VEC);
  units[1] = m * k * (0.5 + p->sample.strip[level]);
  units[4] = strips * panels * height / MR * (joint > 0.25 ? (double)esmm_ceil_div(p->k, PAIRS_STRETCH) : 1.0) *
             (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

static inline size_t pairs_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  return blocks_workspace(p, pairs_plan(p, self->flags & ESMM_KERNEL_SKIPS).bytes);
}

static inline esmm_status pairs_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                                    esmm_stats *stats)
{
  (void)ctx;
  const pairs_blocking g = pairs_plan(p, self->flags & ESMM_KERNEL_SKIPS);
  run_blocks(p, pairs_block, &g, g.blocks_m * g.blocks_n, g.bytes, scratch, stats);
  return ESMM_OK;
}

/* The fields that the kernels share. */
#define PAIRS_KERNEL                                                                                          \
  .backend = &esmm_cpu_backend, .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),                                          \
  .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16, .terms = terms, .workspace = pairs_workspace, \
  .run = pairs_run

/* And those that skip. */
#define PAIRS_SKIPS                                                               \
  .variant_strips = true, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, \
  .cost = {ESMM_CPU_COST_FMA_BF16 * ESMM_CPU_COST_LISTED,                         \
           COST_PACK,                                                             \
           ESMM_CPU_COST_READ_B,                                                  \
           COST_WORD,                                                             \
           COST_TILE,                                                             \
           ESMM_CPU_COST_START},                                                  \
  PAIRS_KERNEL

#endif
