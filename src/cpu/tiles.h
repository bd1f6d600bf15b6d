/*
 * tiles.h: the product of bf16 operands on AMX (amx.h), whose unit multiplies 16 rows by 16 columns over 32 k's in 16
 * cycles. Included by k_*_amx.c after vec_avx512.h.
 *
 *   A, by strips of 32 rows: [32][kept], rows an odd number of cache lines apart, so that the 16 rows of a tile do not
 *   fall into one set of the cache. Where zeros are skipped, only the k's at which the strip is not zero.
 *
 *   B must have pairs of k's side by side: steps of 32 k's, two tiles [16 pairs][16 columns][2]. No form of B has that:
 *   k's are put side by side two steps ahead of the unit, which does not wait for it. A dense product does so once for
 *   a block of 256 rows, about a tenth of the block's work. A strip with its own list does so for itself, from the
 *   block's copy of the panel, with zeros where the panel lacks a k. So B's zeros are not skipped beside A's: for that,
 *   k's would have to be put side by side within rows of A for every panel, as meet.h does.
 *
 * 2 x 2 tiles of sums, 32 x 32, stay in the unit for a stretch of k's, and go to scratch in fp32, [panel][rows][32].
 * Ends of lists and of A and B are filled up with zeros in both operands: no Inf meets a zero that is not in the data.
 */
#ifndef ESMM_TILES_H
#define ESMM_TILES_H

#include "amx.h"
#include "words.h"

#define TILES_STEP 32                      /* k's that the unit takes at a time */
#define TILES_STRIP 32                     /* rows */
#define TILES_AHEAD 2                      /* steps by which B is made before it is multiplied */
#define TILES_RING 4                       /* steps of B that there is room for, where it is used once */
#define TILES_LINE ((int64_t)64)           /* bytes of a k in a panel's copy, and of a row in a tile */
#define TILES_TILE (AMX_ROWS * TILES_LINE) /* bytes */

/* ------------------------------------------------------------------------------------------------ B */

/* Where the steps of B come from. */
typedef struct tiles_of_b {
  const char *first, *second; /* halves of a panel that has every k: [k][16]; or NULL, and: */
  const char *laid;           /* a copy, [k][32], in the order that unpacking undoes */
  const uint32_t *list;       /* offsets into it, whole steps */
  const char *last[2];        /* the last step's halves, filled up with zeros */
  char *made;                 /* [step][2 tiles] */
  int64_t ring;               /* step s lies at place s & ring */
  const char *next[2];        /* halves of the next panel, a part of which is fetched while this is multiplied: */
  int64_t fetches;            /* lines of each at a step */
} tiles_of_b;

/* A k of 32 columns, so that unpacking two k's gives pairs in the order of columns: low halves of 128 bits are the
   first 16 columns. */
ALWAYS __m512i lay_row(__m512i x)
{
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), x);
}

ALWAYS __m512i lay_halves(const char *first, const char *second)
{
  const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)first));
  return lay_row(_mm512_inserti64x4(x, _mm256_loadu_si256((const __m256i *)(const void *)second), 1));
}

/* 32 k's of 16 columns, [32][16], as a tile. */
ALWAYS void make_tile(const char *half, char *to)
{
  const __m512i places =
      _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008, 0x170007,
                       0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++)
    _mm512_store_si512(to + i * TILES_LINE,
                       _mm512_permutexvar_epi16(places, _mm512_loadu_si512(half + i * TILES_LINE)));
}

ALWAYS void make_listed(const char *laid, const uint32_t *list, char *to)
{
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++) {
    const __m512i x = _mm512_load_si512(laid + list[2 * i]), y = _mm512_load_si512(laid + list[2 * i + 1]);
    _mm512_store_si512(to + i * TILES_LINE, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(to + TILES_TILE + i * TILES_LINE, _mm512_unpackhi_epi16(x, y));
  }
}

ALWAYS void make_step(const bool listed, const tiles_of_b *b, int64_t step, int64_t steps)
{
  char *to = b->made + (step & b->ring) * 2 * TILES_TILE;
  if (listed) {
    make_listed(b->laid, b->list + step * TILES_STEP, to);
    return;
  }
  const bool last = step == steps - 1 && b->last[0];
  make_tile(last ? b->last[0] : b->first + step * TILES_TILE, to);
  make_tile(last ? b->last[1] : b->second + step * TILES_TILE, to + TILES_TILE);
}

ALWAYS void fetch_next(const tiles_of_b *b, int64_t step)
{
  for (int64_t i = step * b->fetches; i < (step + 1) * b->fetches; i++) {
    _mm_prefetch(b->next[0] + i * TILES_LINE, _MM_HINT_T1);
    _mm_prefetch(b->next[1] + i * TILES_LINE, _MM_HINT_T1);
  }
}

/* ------------------------------------------------------------------------------------------------ tiles */

typedef enum tiles_way { TILES_MADE, TILES_MAKE, TILES_LISTED } tiles_way;

/* c [32, 32] (+)= a * b over `steps` steps; one: 16 rows only. stride: bytes between a's rows. */
ALWAYS void tiles_steps(const tiles_way way, const bool one, const char *a, int64_t stride, int64_t steps,
                        const tiles_of_b *b, float *c, bool add)
{
  for (int64_t s = 0; way != TILES_MADE && s < esmm_min(TILES_AHEAD, steps); s++)
    make_step(way == TILES_LISTED, b, s, steps);
  amx_take_sums(one, c, add);
  for (int64_t s = 0; s < steps; s++, a += TILES_LINE) {
    const char *from = b->made + (s & b->ring) * 2 * TILES_TILE;
    if (way != TILES_MADE && s + TILES_AHEAD < steps)
      make_step(way == TILES_LISTED, b, s + TILES_AHEAD, steps);
    amx_load(6, from, TILES_LINE);
    amx_load(4, a, stride);
    amx_dot(0, 4, 6);
    amx_load(7, from + TILES_TILE, TILES_LINE);
    amx_dot(1, 4, 7);
    if (!one) {
      amx_load(5, a + AMX_ROWS * stride, stride);
      amx_dot(2, 5, 6);
      amx_dot(3, 5, 7);
    }
    fetch_next(b, s);
  }
  amx_leave_sums(one, c);
}

ALWAYS void tiles_ways(const bool one, tiles_way way, const char *a, int64_t stride, int64_t steps, const tiles_of_b *b,
                       float *c, bool add)
{
  switch (way) {
  case TILES_MADE:
    tiles_steps(TILES_MADE, one, a, stride, steps, b, c, add);
    return;
  case TILES_MAKE:
    tiles_steps(TILES_MAKE, one, a, stride, steps, b, c, add);
    return;
  case TILES_LISTED:
    tiles_steps(TILES_LISTED, one, a, stride, steps, b, c, add);
    return;
  }
}

static __attribute__((noinline)) void tiles_multiply(tiles_way way, bool one, const char *a, int64_t stride,
                                                     int64_t steps, const tiles_of_b *b, float *c, bool add)
{
  if (one)
    tiles_ways(true, way, a, stride, steps, b, c, add);
  else
    tiles_ways(false, way, a, stride, steps, b, c, add);
}

/* ------------------------------------------------------------------------------------------------ A */

typedef struct tiles_strip {
  int64_t row0, rows; /* of the block of C */
  int64_t kept;       /* k's packed, of the stretch */
  uint64_t *bits;     /* [words] */
  uint32_t *list;     /* its k's as offsets into a panel's copy, in whole steps */
  char *a;            /* [16 or 32][kept], up to whole steps, then zeros */
} tiles_strip;

static inline int64_t steps_of(int64_t k)
{
  return esmm_ceil_div(k, TILES_STEP);
}

/* Bytes between rows of packed A: at least a line behind the last step, which compressing may write to. */
static inline int64_t tiles_stride(int64_t kc)
{
  return (steps_of(kc) + 1) / 2 * 2 * TILES_LINE + TILES_LINE;
}

/* A row's k's of bits, or all, one after another; zeros up to a whole step. Returns how many. */
ALWAYS int64_t pack_row(const uint16_t *a, int64_t kc, const uint64_t *bits, uint16_t *to)
{
  int64_t n = 0;
  for (int64_t k = 0; k < kc; k += 32) {
    const __m512i x = load_words(a + k, kc - k);
    if (!bits) {
      _mm512_storeu_si512(to + k, x);
      continue;
    }
    const uint32_t keep = (uint32_t)(bits[k / 64] >> (k % 64));
    _mm512_storeu_si512(to + n, _mm512_maskz_compress_epi16(keep, x));
    n += __builtin_popcount(keep);
  }
  if (!bits)
    return kc;
  if (n % TILES_STEP)
    _mm512_mask_storeu_epi16(to + n, (__mmask32)(((uint64_t)1 << (TILES_STEP - n % TILES_STEP)) - 1),
                             _mm512_setzero_si512());
  return n;
}

/* ------------------------------------------------------------------------------------------------ the product */

typedef struct tiles_blocking {
  bool skip, direct; /* direct: panels have every k, and are read where they lie */
  int64_t panels;
  int64_t mc, kc, nc; /* nc in panels */
  int64_t blocks_m, blocks_n;
  int64_t stride; /* of packed A */
  /* each thread's scratch, in bytes from its start */
  size_t at_strips, at_bits, at_lists, at_laid, at_made, at_last, at_sums, at_rows, bytes;
} tiles_blocking;

static tiles_blocking tiles_plan(const esmm_problem *p, bool skip)
{
  const esmm_weights *w = p->w;
  tiles_blocking g = {.skip = skip, .direct = !skip && w->panel_data && w->full, .panels = w->panels};
  int64_t most = 512; /* a panel's steps stay in the first-level cache: 32 KB */
  if (skip) {
    const double kept = fmax(1.0 / 8, p->sample.strip[ESMM_CPU_HEIGHTS - 1]);
    most = esmm_min(4096, (int64_t)(512.0 / kept));
  }
  g.kc = esmm_round_up(esmm_ceil_div(p->k, esmm_ceil_div(p->k, most)), 64); /* even stretches */
  g.mc = esmm_min(256, esmm_round_up(p->m, TILES_STRIP));
  while (g.mc > 64 && esmm_ceil_div(p->m, g.mc) * g.panels < 2 * p->threads)
    g.mc = esmm_round_up(g.mc / 2, TILES_STRIP);
  g.blocks_m = esmm_ceil_div(p->m, g.mc);
  g.nc = panels_of_block(p, g.panels, (skip ? 1024 : 512) / ESMM_PANEL, g.blocks_m, 3);
  g.blocks_n = esmm_ceil_div(g.panels, g.nc);
  g.stride = tiles_stride(g.kc);
  const int64_t strips = esmm_ceil_div(g.mc, TILES_STRIP), words = g.kc / 64;
  g.bytes = align_up((size_t)(strips * TILES_STRIP * g.stride));
  g.at_strips = set_aside(&g.bytes, strips, sizeof(tiles_strip));
  g.at_bits = set_aside(&g.bytes, strips * words, sizeof(uint64_t));
  g.at_lists = set_aside(&g.bytes, (skip ? strips : 1) * (g.kc + 64), sizeof(uint32_t)); /* of every strip, or of all */
  g.at_laid = set_aside(&g.bytes, g.direct ? 0 : (g.kc + 1) * TILES_LINE, 1);            /* and a line of zeros */
  g.at_made = set_aside(&g.bytes, 2 * TILES_TILE * (skip ? TILES_RING : steps_of(g.kc)), 1);
  g.at_last = set_aside(&g.bytes, 2 * TILES_TILE, 1);
  g.at_sums = set_aside(&g.bytes, g.mc * g.nc * ESMM_PANEL, sizeof(float));
  g.at_rows = set_aside(&g.bytes, p->a.order == ESMM_ROW_MAJOR ? 0 : TILES_STRIP * g.kc, sizeof(uint16_t));
  return g;
}

/* Fills a list up to whole steps with the place of zeros behind the copy. */
static inline void list_end(uint32_t *list, int64_t n, int64_t kc)
{
  for (; n % TILES_STEP; n++)
    list[n] = (uint32_t)(kc * TILES_LINE);
}

static void tiles_pack(const esmm_problem *p, const tiles_blocking *g, int64_t block_row0, int64_t k0, int64_t kc,
                       uint16_t *buffer, tiles_strip *s)
{
  const int64_t words = esmm_ceil_div(kc, 64), row0 = block_row0 + s->row0;
  int64_t ld;
  const uint16_t *a = words_of_a(&p->a, row0, s->rows, k0, kc, buffer, &ld);
  s->kept = kc;
  if (g->skip) {
    find_bits(p, a, ld, row0, s->rows, k0, kc, s->bits);
    uint32_t *end = s->list;
    for (int64_t w = 0; w < words; w++)
      end = append_offsets(end, s->bits[w], (uint32_t)(w * 64 * TILES_LINE), (uint32_t)TILES_LINE, 1);
    s->kept = end - s->list;
    list_end(s->list, s->kept, kc);
  }
  for (int64_t r = 0; r < s->rows; r++)
    (void)pack_row(a + r * ld, kc, g->skip ? s->bits : NULL, (uint16_t *)(void *)(s->a + r * g->stride));
  for (int64_t r = s->rows; r < (s->rows > AMX_ROWS ? TILES_STRIP : AMX_ROWS); r++)
    memset(s->a + r * g->stride, 0, (size_t)(steps_of(s->kept) * TILES_LINE));
}

/* Panel q at the stretch as a copy with every k, and a line of zeros behind it. from_rows: B's rows are read. */
static void lay_panel(const esmm_weights *w, bool from_rows, int64_t q, int64_t k0, int64_t kc, char *to)
{
  _mm512_store_si512(to + kc * TILES_LINE, _mm512_setzero_si512());
  if (from_rows) {
    const uint16_t *row = (const uint16_t *)w->rows + k0 * w->rows_ld + q * ESMM_PANEL;
    for (int64_t k = 0; k < kc; k++, row += w->rows_ld)
      _mm512_store_si512(to + k * TILES_LINE, lay_row(_mm512_loadu_si512(row)));
    return;
  }
  const char *half[2];
  panel_halves(w, q, k0, half);
  const uint64_t *bits = w->bits + q * w->words + k0 / 64;
  if (!w->full)
    memset(to, 0, (size_t)(kc * TILES_LINE));
  for (int64_t k = 0; k < kc; k += 64) {
    if (bits[k / 64] == UINT64_MAX) {
      for (int64_t i = 0; i < 64; i++, half[0] += HALF_BYTES, half[1] += HALF_BYTES)
        _mm512_store_si512(to + (k + i) * TILES_LINE, lay_halves(half[0], half[1]));
      continue;
    }
    for (uint64_t word = bits[k / 64]; word; word &= word - 1, half[0] += HALF_BYTES, half[1] += HALF_BYTES)
      _mm512_store_si512(to + (k + __builtin_ctzll(word)) * TILES_LINE, lay_halves(half[0], half[1]));
  }
}

/* A dense product's B: panel q at the stretch. */
static void straight_panel(const esmm_problem *p, const tiles_blocking *g, int64_t q, int64_t k0, int64_t kc,
                           char *scratch, tiles_of_b *b)
{
  const int64_t tail = kc % TILES_STEP, whole = kc - tail;
  if (!g->direct) {
    lay_panel(p->w, true, q, k0, kc, scratch + g->at_laid);
    return;
  }
  const char *half[2];
  panel_halves(p->w, q, k0, half);
  b->first = half[0];
  b->second = half[1];
  if (!tail)
    return;
  char *last = scratch + g->at_last;
  memset(last, 0, (size_t)(2 * TILES_TILE));
  for (int i = 0; i < 2; i++) {
    memcpy(last + i * TILES_TILE, half[i] + whole * HALF_BYTES, (size_t)(tail * HALF_BYTES));
    b->last[i] = last + i * TILES_TILE;
  }
}

/* Strip i of `strips` fetches its part of panel q. */
static inline void plan_fetches(const esmm_weights *w, int64_t q, int64_t k0, int64_t kc, int64_t i, int64_t strips,
                                int64_t steps, tiles_of_b *b)
{
  const uint32_t *before = w->before + q * (w->words + 1) + k0 / 64;
  const int64_t kept = (int64_t)before[esmm_ceil_div(kc, 64)] - before[0];
  const int64_t share = esmm_ceil_div(kept * HALF_BYTES / TILES_LINE, strips);
  panel_halves(w, q, k0, b->next);
  b->next[0] += i * share * TILES_LINE;
  b->next[1] += i * share * TILES_LINE;
  b->fetches = steps > 0 ? esmm_min(16, esmm_ceil_div(share, steps)) : 0;
}

/* Fetches the next stretch of some of a strip's rows: of all of them by the time the last panel is done. */
static inline void fetch_rows(const esmm_matrix *a, int64_t row0, int64_t rows, int64_t panel, int64_t panels,
                              int64_t k0, int64_t kc)
{
  if (a->order != ESMM_ROW_MAJOR)
    return;
  for (int64_t r = rows * panel / panels; r < rows * (panel + 1) / panels; r++) {
    const uint16_t *row = (const uint16_t *)a->data + (row0 + r) * a->ld + k0;
    for (int64_t k = 0; k < kc; k += TILES_LINE / (int64_t)sizeof *row)
      _mm_prefetch((const char *)(row + k), _MM_HINT_T1);
  }
}

static void tiles_block(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const tiles_blocking *g = plan;
  const esmm_weights *w = p->w;
  const int64_t row0 = block / g->blocks_n * g->mc, rows = esmm_min(g->mc, p->m - row0);
  const int64_t q0 = block % g->blocks_n * g->nc, panels = esmm_min(g->nc, g->panels - q0);
  const int64_t strips = esmm_ceil_div(rows, TILES_STRIP), all_words = g->kc / 64;
  tiles_strip *strip_of = (tiles_strip *)(void *)(scratch + g->at_strips);
  uint32_t *lists = (uint32_t *)(void *)(scratch + g->at_lists);
  tiles_of_b b = {
      .laid = scratch + g->at_laid, .list = lists, .made = scratch + g->at_made, .ring = g->skip ? TILES_RING - 1 : -1};
  amx_begin();
  for (int64_t k0 = 0; k0 < p->k; k0 += g->kc) {
    const int64_t kc = esmm_min(g->kc, p->k - k0);
    const double start = now_if_timed(p);
    for (int64_t i = 0; i < strips; i++) {
      tiles_strip *s = &strip_of[i];
      s->row0 = i * TILES_STRIP;
      s->rows = esmm_min(TILES_STRIP, rows - s->row0);
      s->bits = (uint64_t *)(void *)(scratch + g->at_bits) + i * all_words;
      s->list = lists + (g->skip ? i * (g->kc + 64) : 0);
      s->a = scratch + s->row0 * g->stride;
      tiles_pack(p, g, row0, k0, kc, (uint16_t *)(void *)(scratch + g->at_rows), s);
      t->kept += g->skip ? (double)s->kept : 0.0;
      t->seen += g->skip ? (double)kc : 0.0;
    }
    if (!g->skip) {
      for (int64_t k = 0; k < kc; k++)
        lists[k] = (uint32_t)(k * TILES_LINE);
      list_end(lists, kc, kc);
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++) {
      float *sums = (float *)(void *)(scratch + g->at_sums) + q * g->mc * ESMM_PANEL;
      const int64_t col0 = (q0 + q) * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, p->n - col0);
      if (g->skip)
        lay_panel(w, false, q0 + q, k0, kc, scratch + g->at_laid);
      else
        straight_panel(p, g, q0 + q, k0, kc, scratch, &b);
      const bool ahead = q + 1 < panels && w->panel_data && (g->skip || g->direct);
      for (int64_t i = 0; i < strips; i++) {
        const tiles_strip *s = &strip_of[i];
        const tiles_way way = g->skip || (i == 0 && !g->direct) ? TILES_LISTED : i == 0 ? TILES_MAKE : TILES_MADE;
        if (g->skip)
          b.list = s->list;
        b.fetches = 0;
        if (ahead)
          plan_fetches(w, q0 + q + 1, k0, kc, i, strips, steps_of(s->kept), &b);
        fetch_rows(&p->a, row0 + s->row0, s->rows, q, panels, k0 + kc, esmm_min(g->kc, p->k - k0 - kc));
        tiles_multiply(way, s->rows <= AMX_ROWS, s->a, g->stride, steps_of(s->kept), &b, sums + s->row0 * ESMM_PANEL,
                       k0 > 0);
        t->terms += (double)s->kept * (double)s->rows * (double)cols;
      }
      if (k0 + kc == p->k)
        esmm_finish(p, row0, rows, col0, cols, sums, ESMM_PANEL);
    }
  }
  amx_end();
}

/* ------------------------------------------------------------------------------------------------ descriptors */

static inline size_t tiles_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  return blocks_workspace(p, tiles_plan(p, self->flags & ESMM_KERNEL_SKIPS).bytes);
}

static inline esmm_status tiles_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                                    esmm_stats *stats)
{
  (void)ctx;
  const tiles_blocking g = tiles_plan(p, self->flags & ESMM_KERNEL_SKIPS);
  run_blocks(p, tiles_block, &g, g.blocks_m * g.blocks_n, g.bytes, scratch, stats);
  return ESMM_OK;
}

#endif
