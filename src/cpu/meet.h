/*
 * meet.h: the product of bf16 operands on AMX (amx.h) over the k's at which 32 rows of A meet 32 columns of B. Included
 * by k_*_amx.c after vec_avx512.h. tiles.h skips A's zeros alone, and puts a strip's k's side by side once for all
 * panels; here every 32 x 32 tile of C has its own list, and both operands are put together for it. That costs two to
 * three times the unit's work for a share of the k's: it pays below about half of them.
 *
 *   A, by strips of 32 rows: lines [kept][16], 32 bits: rows r and r + 16 at that k. A line is a cache line. So 16 k's
 *   by 16 rows are turned as words of 32 bits, and two such, half a step apart, are put side by side by shifts, for
 *   which CPUs have other ports than for shuffles. A step's pairs are therefore k's i and i + 16 of 32.
 *
 *   B stays as it was prepared, two halves [kept][16]: a pair is two loads and one shuffle.
 *
 *   Lists have places in A's lines and in the panel, 16 bits, times 8: a CPU multiplies by 8 again as it loads.
 *
 * A is made for a step, then tiles of B for the step before are loaded, then B is made: new stores are not in the cache
 * yet, and a load waits for any store whose address is near its own modulo 4 KB.
 *
 * The end of a list has zeros in both operands: no Inf meets a zero that is not in the data.
 */
#ifndef ESMM_MEET_H
#define ESMM_MEET_H

#include "amx.h"
#include "words.h"

#define MEET_STEP 32            /* k's that the unit takes at a time */
#define MEET_STRIP 32           /* rows */
#define MEET_STRETCH 4096       /* k's at most, so that places times 8 have 16 bits */
#define MEET_ROWS 64            /* of a block where threads are many: packed once, for all columns */
#define MEET_LINE ((int64_t)64) /* bytes of a k of A, and of a row of a tile */
#define MEET_TILE (AMX_ROWS * MEET_LINE)
#define MEET_SECONDS 0xaaaaaaaau /* of pairs */

/* ------------------------------------------------------------------------------------------------ lists */

/* What meets: a strip of A or a panel of B. */
typedef struct meet_side {
  const uint64_t *bits;  /* [words] */
  const uint32_t *place; /* [words]: that of a word's first k, times 8, twice side by side */
  bool few;              /* no word has more than 32 bits */
} meet_side;

static inline uint32_t twice(uint32_t place)
{
  return 8 * place * 0x10001u;
}

/* Appends the places of a word's k's that bits name; up to 32 entries past the end may be overwritten. */
ALWAYS uint16_t *append_places(const bool few, uint16_t *list, uint64_t bits, uint32_t place)
{
  const __m512i iota = _mm512_set_epi32(0xf800f0, 0xe800e0, 0xd800d0, 0xc800c0, 0xb800b0, 0xa800a0, 0x980090, 0x880080,
                                        0x780070, 0x680060, 0x580050, 0x480040, 0x380030, 0x280020, 0x180010, 0x80000);
  const __m512i at = _mm512_add_epi16(iota, _mm512_set1_epi32((int)place));
  _mm512_storeu_si512(list, _mm512_maskz_compress_epi16((__mmask32)bits, at));
  list += few ? __builtin_popcountll(bits) : __builtin_popcount((uint32_t)bits);
  if (few)
    return list;
  const __m512i behind = _mm512_add_epi16(at, _mm512_set1_epi16(8 * 32));
  _mm512_storeu_si512(list, _mm512_maskz_compress_epi16((__mmask32)(bits >> 32), behind));
  return list + __builtin_popcountll(bits >> 32);
}

ALWAYS int64_t meet_words(const bool few, const meet_side *a, const meet_side *b, int64_t words, uint16_t *list_a,
                          uint16_t *list_b)
{
  const uint16_t *start = list_a;
  for (int64_t i = 0; i < words; i++) {
    const uint64_t both = a->bits[i] & b->bits[i];
    list_a = append_places(few, list_a, extract_bits(both, a->bits[i]), a->place[i]);
    list_b = append_places(few, list_b, extract_bits(both, b->bits[i]), b->place[i]);
  }
  return list_a - start;
}

/* Lists of the k's that both have; returns how many. */
static int64_t meet_lists(const meet_side *a, const meet_side *b, int64_t words, uint16_t *list_a, uint16_t *list_b)
{
  return a->few && b->few ? meet_words(true, a, b, words, list_a, list_b)
                          : meet_words(false, a, b, words, list_a, list_b);
}

/* ------------------------------------------------------------------------------------------------ a step of both */

/* A tile of C's k's. */
typedef struct meet_of {
  const char *lines;   /* of A */
  const char *half[2]; /* of the panel */
  const uint16_t *list_a, *list_b;
  int64_t n;
  char *made; /* two steps of A, [2][2 tiles], and behind them two of B */
} meet_of;

/* 16 rows, the first or the second of a strip, at 32 k's. */
ALWAYS void make_rows(const bool second, const char *lines, const uint16_t *list, char *to)
{
  __m512i x[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    const __m512i even = _mm512_load_si512(lines + 8 * (int64_t)list[i]);
    const __m512i odd = _mm512_load_si512(lines + 8 * (int64_t)list[i + 16]);
    x[i] = second ? _mm512_mask_blend_epi16(MEET_SECONDS, _mm512_srli_epi32(even, 16), odd)
                  : _mm512_mask_blend_epi16(MEET_SECONDS, even, _mm512_slli_epi32(odd, 16));
  }
  turn_pairs(x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    _mm512_store_si512(to + i * MEET_LINE, x[i]);
}

/* This and make_b are not inlined, so that the CPU's cache of decoded instructions holds their unrolled code once. They
   leave tiles alone. */
static __attribute__((noinline)) void make_a(bool one, const meet_of *x, int64_t step)
{
  char *to = x->made + (step & 1) * 2 * MEET_TILE;
  make_rows(false, x->lines, x->list_a + step * MEET_STEP, to);
  if (!one)
    make_rows(true, x->lines, x->list_a + step * MEET_STEP, to + MEET_TILE);
}

/* Which words of pair i are there, where a step has `count` k's: entry 32 + i - count. Branches would be
   mispredicted. */
#define BOTH 0xffffffffu
#define EVEN 0x55555555u
static const uint32_t pair_there[48] = {BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH, BOTH,
                                        BOTH, BOTH, BOTH, BOTH, BOTH, EVEN, EVEN, EVEN, EVEN, EVEN, EVEN,
                                        EVEN, EVEN, EVEN, EVEN, EVEN, EVEN, EVEN, EVEN, EVEN, EVEN};
#undef BOTH
#undef EVEN

ALWAYS void make_columns(const bool whole, const char *half, const uint16_t *list, int64_t count, char *to)
{
  const uint32_t *there = pair_there + MEET_STEP - count;
  const __m512i places =
      _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008, 0x170007,
                       0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
#pragma GCC unroll 16
  for (int i = 0; i < AMX_ROWS; i++) {
    const __m256i even = _mm256_loadu_si256((const __m256i *)(const void *)(half + 4 * (int64_t)list[i]));
    const __m256i odd = _mm256_loadu_si256((const __m256i *)(const void *)(half + 4 * (int64_t)list[i + 16]));
    const __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
    _mm512_store_si512(to + i * MEET_LINE, whole ? _mm512_permutexvar_epi16(places, x)
                                                 : _mm512_maskz_permutexvar_epi16(there[i], places, x));
  }
}

static __attribute__((noinline)) void make_b(const meet_of *x, int64_t step)
{
  char *to = x->made + (4 + (step & 1) * 2) * MEET_TILE;
  const uint16_t *list = x->list_b + step * MEET_STEP;
  const int64_t count = x->n - step * MEET_STEP;
  if (count >= MEET_STEP) {
    make_columns(true, x->half[0], list, MEET_STEP, to);
    make_columns(true, x->half[1], list, MEET_STEP, to + MEET_TILE);
  } else {
    make_columns(false, x->half[0], list, count, to);
    make_columns(false, x->half[1], list, count, to + MEET_TILE);
  }
}

/* c [32, 32] (+)= a * b; one: 16 rows only. */
ALWAYS void meet_steps(const bool one, const meet_of *x, float *c, bool add)
{
  const int64_t steps = esmm_ceil_div(x->n, MEET_STEP);
  if (steps > 0) {
    make_a(one, x, 0);
    make_b(x, 0);
  }
  amx_take_sums(one, c, add);
  for (int64_t s = 0; s < steps; s++) {
    const char *a = x->made + (s & 1) * 2 * MEET_TILE, *b = a + 4 * MEET_TILE;
    amx_load(4, a, MEET_LINE);
    if (!one)
      amx_load(5, a + MEET_TILE, MEET_LINE);
    if (s + 1 < steps)
      make_a(one, x, s + 1);
    amx_load(6, b, MEET_LINE);
    amx_dot(0, 4, 6);
    amx_load(7, b + MEET_TILE, MEET_LINE);
    amx_dot(1, 4, 7);
    if (!one) {
      amx_dot(2, 5, 6);
      amx_dot(3, 5, 7);
    }
    if (s + 1 < steps)
      make_b(x, s + 1);
  }
  amx_leave_sums(one, c);
}

static __attribute__((noinline)) void meet_multiply(bool one, const meet_of *x, float *c, bool add)
{
  if (one)
    meet_steps(true, x, c, add);
  else
    meet_steps(false, x, c, add);
}

/* ------------------------------------------------------------------------------------------------ A */

typedef struct meet_strip {
  int64_t row0, rows; /* of the block of C */
  int64_t kept;       /* k's packed, of the stretch */
  uint64_t *bits;     /* [words] */
  uint32_t *place;    /* [words] */
  bool few;
  char *lines; /* [kept], a line of zeros, and room for one more */
} meet_strip;

/* 32 k's of a strip, those of keep one after another. */
ALWAYS char *pack_lines(__m512i x[32], uint32_t keep, char *to)
{
  turn_pairs(x);
  turn_pairs(x + 16);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++, keep >>= 2) { /* stores every k, advances past kept ones only */
    const __m512i upper = x[i], lower = x[i + 16];
    _mm512_store_si512(to, _mm512_mask_blend_epi16(MEET_SECONDS, upper, _mm512_slli_epi32(lower, 16)));
    to += MEET_LINE * (keep & 1);
    _mm512_store_si512(to, _mm512_mask_blend_epi16(MEET_SECONDS, _mm512_srli_epi32(upper, 16), lower));
    to += MEET_LINE * (keep >> 1 & 1);
  }
  return to;
}

/* A strip's bits, unless they are known, and its lines, by one look at A. */
static void meet_pack(const esmm_problem *p, int64_t block_row0, int64_t k0, int64_t kc, uint16_t *buffer,
                      meet_strip *s)
{
  const int64_t words = esmm_ceil_div(kc, 64), row0 = block_row0 + s->row0;
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  int64_t ld;
  const uint16_t *a = words_of_a(&p->a, row0, s->rows, k0, kc, buffer, &ld);
  if (p->pattern)
    bits_from_pattern(p->pattern, row0, s->rows, k0, kc, s->bits);
  else
    memset(s->bits, 0, (size_t)words * sizeof *s->bits);
  char *end = s->lines;
  for (int64_t k = 0; k < kc; k += 32) {
    __m512i x[32], any = _mm512_setzero_si512();
#pragma GCC unroll 32
    for (int r = 0; r < MEET_STRIP; r++) {
      x[r] = r < s->rows ? load_words(a + r * ld + k, kc - k) : _mm512_setzero_si512();
      any = _mm512_or_si512(any, x[r]);
    }
    if (!p->pattern)
      s->bits[k / 64] |= (uint64_t)_mm512_test_epi16_mask(any, magnitude) << (k % 64);
    const uint32_t keep = (uint32_t)(s->bits[k / 64] >> (k % 64));
    if (keep)
      end = pack_lines(x, keep, end);
  }
  _mm512_store_si512(end, _mm512_setzero_si512());
  s->kept = (end - s->lines) / MEET_LINE;
}

/* Fills in place, and returns whether no word has more than 32 bits. */
static bool meet_places(const uint64_t *bits, int64_t words, uint32_t *place)
{
  uint32_t before = 0, most = 0;
  for (int64_t i = 0; i < words; i++) {
    const uint32_t count = (uint32_t)__builtin_popcountll(bits[i]);
    place[i] = twice(before);
    before += count;
    most = count > most ? count : most;
  }
  return most <= 32;
}

/* ------------------------------------------------------------------------------------------------ the product */

typedef struct meet_blocking {
  int64_t panels;
  int64_t mc, kc, nc; /* nc in panels */
  int64_t held;       /* panels whose sums are in scratch: one, where all k's are one stretch */
  int64_t blocks_m, blocks_n;
  int64_t strip_bytes;
  /* each thread's scratch, in bytes from its start */
  size_t at_strips, at_bits, at_places, at_lists, at_made, at_sums, at_rows, bytes;
} meet_blocking;

static meet_blocking meet_plan(const esmm_problem *p)
{
  meet_blocking g = {.panels = p->w->panels};
  g.kc = esmm_round_up(esmm_ceil_div(p->k, esmm_ceil_div(p->k, MEET_STRETCH)), 64); /* even stretches */
  g.mc = p->threads > 1 ? MEET_ROWS : 2 * MEET_ROWS;
  g.mc = esmm_min(g.mc, esmm_round_up(p->m, MEET_STRIP));
  while (g.mc > MEET_STRIP && esmm_ceil_div(p->m, g.mc) * g.panels < 2 * p->threads)
    g.mc = esmm_round_up(g.mc / 2, MEET_STRIP);
  g.blocks_m = esmm_ceil_div(p->m, g.mc);
  const bool at_once = g.kc >= p->k;
  /* sums in scratch stay near */
  g.nc = panels_of_block(p, g.panels, at_once ? g.panels : 1024 / ESMM_PANEL, g.blocks_m, 2);
  g.blocks_n = esmm_ceil_div(g.panels, g.nc);
  g.held = at_once ? 1 : g.nc;
  g.strip_bytes = (g.kc + 2) * MEET_LINE;
  const int64_t strips = esmm_ceil_div(g.mc, MEET_STRIP), words = g.kc / 64;
  g.bytes = align_up((size_t)(strips * g.strip_bytes));
  g.at_strips = set_aside(&g.bytes, strips, sizeof(meet_strip));
  g.at_bits = set_aside(&g.bytes, strips * words, sizeof(uint64_t));
  g.at_places = set_aside(&g.bytes, (strips + 1) * words, sizeof(uint32_t)); /* of every strip, and of a panel */
  g.at_lists = set_aside(&g.bytes, 2 * (g.kc + 64), sizeof(uint16_t));       /* of a strip, and of a panel */
  g.at_made = set_aside(&g.bytes, 8 * MEET_TILE, 1);
  g.at_sums = set_aside(&g.bytes, g.mc * g.held * ESMM_PANEL, sizeof(float));
  g.at_rows = set_aside(&g.bytes, p->a.order == ESMM_ROW_MAJOR ? 0 : MEET_STRIP * g.kc, sizeof(uint16_t));
  return g;
}

/* One tile of C, by the lists of its strip and its panel. Returns how many k's they have. */
static int64_t meet_tile(const meet_strip *s, const meet_side *of_b, int64_t words, uint16_t *lists, int64_t room,
                         meet_of *x, float *c, bool add)
{
  const meet_side of_a = {s->bits, s->place, s->few};
  uint16_t *list_b = lists + room;
  x->n = meet_lists(&of_a, of_b, words, lists, list_b);
  for (int64_t i = x->n; i % MEET_STEP; i++) { /* A's line of zeros, and of B any */
    lists[i] = (uint16_t)(8 * s->kept);
    list_b[i] = list_b[0];
  }
  x->lines = s->lines;
  x->list_a = lists;
  x->list_b = list_b;
  if (x->n > 0 || !add)
    meet_multiply(s->rows <= AMX_ROWS, x, c, add);
  return x->n;
}

static void meet_block(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const meet_blocking *g = plan;
  const esmm_weights *w = p->w;
  const int64_t row0 = block / g->blocks_n * g->mc, rows = esmm_min(g->mc, p->m - row0);
  const int64_t q0 = block % g->blocks_n * g->nc, panels = esmm_min(g->nc, g->panels - q0);
  const int64_t strips = esmm_ceil_div(rows, MEET_STRIP), all_words = g->kc / 64;
  meet_strip *strip_of = (meet_strip *)(void *)(scratch + g->at_strips);
  uint16_t *lists = (uint16_t *)(void *)(scratch + g->at_lists);
  uint32_t *places = (uint32_t *)(void *)(scratch + g->at_places), *places_b = places + strips * all_words;
  meet_of x = {.made = scratch + g->at_made};
  amx_begin();
  for (int64_t k0 = 0; k0 < p->k; k0 += g->kc) {
    const int64_t kc = esmm_min(g->kc, p->k - k0), words = esmm_ceil_div(kc, 64);
    const double start = now_if_timed(p);
    for (int64_t i = 0; i < strips; i++) {
      meet_strip *s = &strip_of[i];
      s->row0 = i * MEET_STRIP;
      s->rows = esmm_min(MEET_STRIP, rows - s->row0);
      s->bits = (uint64_t *)(void *)(scratch + g->at_bits) + i * all_words;
      s->place = places + i * all_words;
      s->lines = scratch + i * g->strip_bytes;
      meet_pack(p, row0, k0, kc, (uint16_t *)(void *)(scratch + g->at_rows), s);
      s->few = meet_places(s->bits, words, s->place);
      t->kept += (double)s->kept;
      t->seen += (double)kc;
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++) {
      float *sums = (float *)(void *)(scratch + g->at_sums) + (g->held > 1 ? q : 0) * g->mc * ESMM_PANEL;
      const int64_t col0 = (q0 + q) * ESMM_PANEL, cols = esmm_min(ESMM_PANEL, p->n - col0);
      const uint64_t *bits = w->bits + (q0 + q) * w->words + k0 / 64;
      const meet_side of_b = {bits, places_b, meet_places(bits, words, places_b)};
      panel_halves(w, q0 + q, k0, x.half);
      for (int64_t i = 0; i < strips; i++) {
        const meet_strip *s = &strip_of[i];
        const int64_t n = meet_tile(s, &of_b, words, lists, g->kc + 64, &x, sums + s->row0 * ESMM_PANEL, k0 > 0);
        t->terms += (double)n * (double)s->rows * (double)cols;
      }
      if (k0 + kc == p->k)
        esmm_finish(p, row0, rows, col0, cols, sums, ESMM_PANEL);
    }
  }
  amx_end();
}

/* ------------------------------------------------------------------------------------------------ descriptors */

static inline size_t meet_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return blocks_workspace(p, meet_plan(p).bytes);
}

static inline esmm_status meet_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                                   esmm_stats *stats)
{
  (void)self;
  (void)ctx;
  const meet_blocking g = meet_plan(p);
  run_blocks(p, meet_block, &g, g.blocks_m * g.blocks_n, g.bytes, scratch, stats);
  return ESMM_OK;
}

#endif
