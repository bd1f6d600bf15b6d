/*
 * k_nm_bf16_avx512bf16.c: N:M weights of bf16 on AVX-512 BF16, where columns choose for themselves. Two values of a
 * group are a pair, and one vpermw selects the pair of a's that they name:
 *
 *     c[row][0..15] += pair[0..15] . (a[row][index of the first], a[row][index of the second])[0..15]
 *
 * one permutation and one vdpbf16ps for two values of 16 columns, where nm.h has two of each. A tile is up to 16 rows
 * by 16 columns. A is packed by groups, 32 words at a time, without groups that are zero in all rows of the tile:
 *
 *     [set of groups][rows][32]
 *
 * so any group of N:M, 32 at most, is selected from one vector. Where a group keeps an odd number of values the last
 * pair has one: its second a is made a zero as well, so that no Inf meets a zero that is not in the data.
 *
 * Values and indices are read as they are stored, and put side by side on the way; where a block of rows has several
 * tiles, once for all of them. Sums stay in registers for STRETCH k's.
 *
 * The floor of many rows is 1.33 cycles a row for each pair (Zen 4: both instructions take two of three half-width
 * pipes), 1.5 times a dense product's floor for 2:4 weights; that of few rows is B's bytes, 0.56 of dense.
 */
#include "vec_avx512.h"

#include "words.h"

#include <stdio.h>

#define STRETCH 512                     /* k's whose terms are summed before they are added to C */
#define MOST_BLOCK 256                  /* rows of A that are packed together */
#define SPAN 32                         /* words of A in a set */
#define PACKED_WORDS ((int64_t)1 << 20) /* of A, packed at a time: pairs of B are made once for all of its rows */
#define HELD 4                          /* panels whose sums are finished together, where all k's are packed */

/* ------------------------------------------------------------------------------------------------ pairs */

/* A panel of 16 columns at a stretch of groups. */
typedef struct slots {
  const char *values;          /* [slots][16] */
  const unsigned char *packed; /* [slots]: indices as they are stored */
  __m512i *made;               /* [pair][2]: values and indices, where several tiles need them */
  index_plan plan;
  int64_t index_bytes; /* of a slot's indices */
  int64_t each, all;   /* slots of a group, of the stretch: the last group may have fewer */
  int64_t pairs;       /* of a group */
  int length;          /* k's of a group */
} slots;

/* Pair `pair` of a group: its values and indices; the second are zeros where there is no second. */
ALWAYS void make_pair(const slots *b, int64_t group, int64_t pair, const bool one, __m512i *values, __m512i *index)
{
  const int64_t slot = group * b->each + 2 * pair;
  const char *from = b->values + slot * HALF_BYTES;
  const unsigned char *places = b->packed + slot * b->index_bytes;
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
  *index = index_unpack(&b->plan, places, 0);
  *values = x;
  if (one)
    return;
  const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(from + HALF_BYTES)));
  *values = _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
  *index = _mm512_or_si512(*index, _mm512_slli_epi32(index_unpack(&b->plan, places + b->index_bytes, 0), 16));
}

/* Whether the last pair of a group has one value. */
ALWAYS bool ends_odd(const slots *b, int64_t group, int64_t pair)
{
  return group * b->each + 2 * pair + 1 >= esmm_min(b->all, (group + 1) * b->each);
}

static void make_pairs(const slots *b)
{
  for (int64_t group = 0; group * b->each < b->all; group++)
    for (int64_t pair = 0; pair < b->pairs && group * b->each + 2 * pair < b->all; pair++) {
      __m512i *to = b->made + 2 * (group * b->pairs + pair);
      make_pair(b, group, pair, ends_odd(b, group, pair), to, to + 1);
    }
}

/* ------------------------------------------------------------------------------------------------ tiles */

ALWAYS void add_pair(const int rows, const slots *b, const bool made, int64_t group, int64_t pair, const bool one,
                     const uint16_t *a, int base, vec *sums)
{
  __m512i values, index;
  if (made) {
    values = _mm512_load_si512(b->made + 2 * (group * b->pairs + pair));
    index = _mm512_load_si512(b->made + 2 * (group * b->pairs + pair) + 1);
  } else {
    make_pair(b, group, pair, one, &values, &index);
  }
  index = _mm512_add_epi16(index, _mm512_set1_epi16((short)base));
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++) {
    const __m512i of_a = _mm512_loadu_si512(a + r * SPAN);
    const __m512i picked =
        one ? _mm512_maskz_permutexvar_epi16(0x55555555, index, of_a) : _mm512_permutexvar_epi16(index, of_a);
    sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)picked, (__m512bh)values);
  }
}

/* c [rows, 16] (+)= a * b over `count` groups, packed in a; `list` says which groups of b they are */
ALWAYS void add_groups(const int rows, const bool made, const slots *of_b, const uint16_t *a, const uint32_t *list,
                       int64_t count, float *c, int64_t ldc, bool add)
{
  const slots b = *of_b; /* in registers */
  vec sums[SELECT_ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
    sums[r] = vec_zero();
  int base = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t group = list[i];
    if (b.each == 2 && 2 * group + 2 <= b.all) {
      add_pair(rows, &b, made, group, 0, false, a, base, sums);
    } else {
      for (int64_t pair = 0; pair < b.pairs && group * b.each + 2 * pair < b.all; pair++)
        if (ends_odd(&b, group, pair))
          add_pair(rows, &b, made, group, pair, true, a, base, sums);
        else
          add_pair(rows, &b, made, group, pair, false, a, base, sums);
    }
    base += b.length;
    if (base + b.length > SPAN) {
      base = 0;
      a += rows * SPAN;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
    vec_store(c + r * ldc, add ? vec_add(sums[r], vec_load(c + r * ldc)) : sums[r]);
}

typedef void tile_function(const slots *b, const uint16_t *a, const uint32_t *list, int64_t count, float *c,
                           int64_t ldc, bool add);

#define TILE(rows)                                                                                           \
  static __attribute__((noinline)) void tile_##rows(const slots *b, const uint16_t *a, const uint32_t *list, \
                                                    int64_t count, float *c, int64_t ldc, bool add)          \
  {                                                                                                          \
    if (b->made)                                                                                             \
      add_groups(rows, true, b, a, list, count, c, ldc, add);                                                \
    else                                                                                                     \
      add_groups(rows, false, b, a, list, count, c, ldc, add);                                               \
  }
TILE(1)
TILE(2)
TILE(4)
TILE(8)
TILE(16)
static tile_function *const tile_of[] = {tile_1, tile_2, tile_4, tile_8, tile_16}; /* by the logarithm of rows */

/* ------------------------------------------------------------------------------------------------ A */

typedef uint16_t group_word;
#include "nm_groups.h"

typedef struct layout {
  int64_t mc, kc, nc;    /* a block of C, nc in panels of 16 columns; kc: k's of a stretch */
  int64_t stretches;     /* packed before the first is multiplied */
  int64_t held, sums_ld; /* panels whose sums are in scratch */
  int64_t blocks_m, blocks_n;
  int64_t groups, sets;                                                  /* of a stretch */
  int64_t tiles, packed;                                                 /* of a stretch: tiles, words of packed A */
  size_t at_lists, at_counts, at_bits, at_made, at_sums, at_rows, bytes; /* a thread's scratch; packed A is first */
} layout;

static layout lay_out(const esmm_problem *p)
{
  const esmm_nm_form *form = &p->w->nm;
  layout l = {.kc = 64};
  while (l.kc % form->group != 0) /* stretches start at whole words of bitmaps and at whole groups */
    l.kc += 64;
  l.kc = esmm_min(esmm_max(1, STRETCH / l.kc) * l.kc, esmm_round_up(p->k, l.kc));
  l.groups = esmm_ceil_div(l.kc, form->group);
  l.sets = esmm_ceil_div(l.groups, SPAN / form->group);
  l.stretches = esmm_min(esmm_ceil_div(p->k, l.kc), esmm_max(1, PACKED_WORDS / (SELECT_ROWS * l.sets * SPAN)));
  l.mc = esmm_max(SELECT_ROWS,
                  esmm_min(MOST_BLOCK, PACKED_WORDS / (l.stretches * l.sets * SPAN)) / SELECT_ROWS * SELECT_ROWS);
  l.mc = esmm_min(l.mc, p->m);
  l.tiles = l.mc / SELECT_ROWS + 4;
  l.packed = l.mc * l.sets * SPAN;
  l.blocks_m = esmm_ceil_div(p->m, l.mc);
  const int64_t share = p->threads > 1 ? esmm_ceil_div(4 * p->threads, l.blocks_m) : 1;
  l.nc = esmm_min(256, esmm_max(esmm_ceil_div(form->panels, share), esmm_min(8, form->panels)));
  l.blocks_n = esmm_ceil_div(form->panels, l.nc);
  l.held = l.stretches * l.kc >= p->k ? esmm_min(HELD, l.nc) : l.nc;
  l.sums_ld = l.held * ESMM_HALF_COLS + (l.held > HELD ? VEC : 0); /* rows a page apart would push one another out */
  l.bytes = align_up((size_t)(l.stretches * l.packed) * sizeof(uint16_t));
  l.at_lists = set_aside(&l.bytes, l.stretches * l.tiles * l.groups, sizeof(uint32_t));
  l.at_counts = set_aside(&l.bytes, l.stretches * l.tiles, sizeof(int64_t));
  l.at_bits = set_aside(&l.bytes, l.kc / 64 + 1, sizeof(uint64_t));
  l.at_made = set_aside(&l.bytes, p->m > SELECT_ROWS ? 2 * l.groups * ((form->keep + 1) / 2) : 0, sizeof(__m512i));
  l.at_sums = set_aside(&l.bytes, l.mc * l.sums_ld, sizeof(float));
  l.at_rows = set_aside(&l.bytes, p->a.order == ESMM_ROW_MAJOR ? 0 : SELECT_ROWS * l.kc, sizeof(uint16_t));
  return l;
}

/* The i-th of the stretches that are packed at once. */
static group_stretch stretch_of(const esmm_problem *p, const layout *l, int64_t row0, int64_t k0, int64_t i,
                                char *scratch)
{
  return (group_stretch){.row0 = row0,
                         .rows = esmm_min(l->mc, p->m - row0),
                         .k0 = k0 + i * l->kc,
                         .kc = esmm_min(l->kc, p->k - k0 - i * l->kc),
                         .counts = (int64_t *)(void *)(scratch + l->at_counts) + i * l->tiles,
                         .lists = (uint32_t *)(void *)(scratch + l->at_lists) + i * l->tiles * l->groups,
                         .tiles = (uint16_t *)(void *)scratch + i * l->packed};
}

static void pack_stretch(const esmm_problem *p, const layout *l, const group_stretch *x, char *scratch, tally *t)
{
  const int64_t words = esmm_ceil_div(x->kc, 64);
  uint64_t *bits = (uint64_t *)(void *)(scratch + l->at_bits);
  for (int64_t r = 0, tile = 0, rows; r < x->rows; r += rows, tile++) {
    int64_t ld;
    rows = (int64_t)1 << next_rows(x->rows - r);
    const uint16_t *a =
        words_of_a(&p->a, x->row0 + r, rows, x->k0, x->kc, (uint16_t *)(void *)(scratch + l->at_rows), &ld);
    find_bits(p, a, ld, x->row0 + r, rows, x->k0, x->kc, bits);
    bits[words] = 0;
    x->counts[tile] = pack_groups(a, ld, rows, bits, x->kc, p->w->nm.group, SPAN / p->w->nm.group, SPAN,
                                  x->tiles + r * l->sets * SPAN, x->lists + tile * l->groups);
    for (int64_t i = 0; i < words; i++)
      t->kept += (double)(rows * __builtin_popcountll(bits[i]));
    t->seen += (double)(rows * x->kc);
  }
}

/* ------------------------------------------------------------------------------------------------ the product */

/* A panel against all tiles of a block, at one stretch: sums [rows, 16] (+)= */
static void multiply_panel(const layout *l, const group_stretch *x, const slots *b, int64_t cols, float *sums, bool add,
                           tally *t)
{
  for (int64_t r = 0, tile = 0, rows; r < x->rows; r += rows, tile++) {
    const int level = next_rows(x->rows - r);
    const uint32_t *list = x->lists + tile * l->groups;
    rows = (int64_t)1 << level;
    tile_of[level](b, x->tiles + r * l->sets * SPAN, list, x->counts[tile], sums + r * l->sums_ld, l->sums_ld, add);
    t->terms += (double)listed_slots(b->each, b->all, list, x->counts[tile]) * (double)rows * (double)cols;
  }
}

static void multiply_block(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const layout *l = plan;
  const esmm_nm_form *form = &p->w->nm;
  const int64_t q0 = block % l->blocks_n * l->nc, panels = esmm_min(l->nc, form->panels - q0);
  const int64_t row0 = block / l->blocks_n * l->mc, rows = esmm_min(l->mc, p->m - row0);
  float *sums = (float *)(void *)(scratch + l->at_sums);
  slots b = {.made = rows > SELECT_ROWS ? (__m512i *)(void *)(scratch + l->at_made) : NULL,
             .plan = index_plan_of(form->bits),
             .index_bytes = 2 * form->bits,
             .each = form->keep,
             .pairs = (form->keep + 1) / 2,
             .length = form->group};
  for (int64_t k0 = 0; k0 < p->k; k0 += l->stretches * l->kc) {
    const int64_t stretches = esmm_min(l->stretches, esmm_ceil_div(p->k - k0, l->kc));
    const bool ends = k0 + stretches * l->kc >= p->k;
    const double start = now_if_timed(p);
    for (int64_t i = 0; i < stretches; i++) {
      const group_stretch x = stretch_of(p, l, row0, k0, i, scratch);
      pack_stretch(p, l, &x, scratch, t);
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++) {
      const int64_t col0 = (q0 + q) * ESMM_HALF_COLS, held = q % l->held;
      for (int64_t i = 0; i < stretches; i++) {
        const group_stretch x = stretch_of(p, l, row0, k0, i, scratch);
        const int64_t slot0 = x.k0 / form->group * form->keep, first = (q0 + q) * form->slots + slot0;
        b.all = esmm_min(form->slots - slot0, esmm_ceil_div(x.kc, form->group) * form->keep);
        b.values = (const char *)form->values + first * HALF_BYTES;
        b.packed = form->index + first * b.index_bytes;
        if (b.made)
          make_pairs(&b);
        multiply_panel(l, &x, &b, esmm_min(ESMM_HALF_COLS, p->n - col0), sums + held * ESMM_HALF_COLS, k0 + i > 0, t);
      }
      if (ends && (held == l->held - 1 || q == panels - 1)) {
        const int64_t from = col0 - held * ESMM_HALF_COLS;
        esmm_finish(p, row0, rows, from, esmm_min(col0 + ESMM_HALF_COLS, p->n) - from, sums, l->sums_ld);
      }
    }
  }
}

/* ------------------------------------------------------------------------------------------------ descriptor */

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->w->nm.group_cols == 1)
    return true;
  (void)snprintf(why, why_bytes, "%d columns choose together, it takes those that choose for themselves",
                 p->w->nm.group_cols);
  return false;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = SELECT_ROWS;
  const esmm_nm_form *form = &p->w->nm;
  const double columns = (double)(form->panels * ESMM_HALF_COLS), m = (double)p->m;
  const double alive = 1.0 - pow(1.0 - p->sample.strip[4], form->group); /* share of groups with a nonzero */
  const double pairs = (double)esmm_ceil_div(p->k, form->group) * (double)((form->keep + 1) / 2) * alive;
  units[0] = m * columns * pairs / VEC;
  units[1] = m * (double)p->k;
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * alive);
  units[3] = (double)esmm_ceil_div(p->m, MOST_BLOCK) * columns * pairs / VEC;
  units[4] = m * columns * (double)esmm_ceil_div(p->k, STRETCH) / VEC;
  units[5] = 1.0;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return blocks_workspace(p, lay_out(p).bytes);
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  (void)ctx;
  const layout l = lay_out(p);
  run_blocks(p, multiply_block, &l, l.blocks_m * l.blocks_n, l.bytes, scratch, stats);
  return ESMM_OK;
}

ESMM_KERNEL(nm_bf16_avx512bf16) = {
    .name = "nm_bf16_avx512bf16",
    .doc = "N:M weights: two values of a group at a time, less groups of k's that are zero in some rows of A",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(NM),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    .can_run = can_run,
    .terms = terms,
    .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "pairing of values", "updates of c",
                   "starting threads"},
    .cost = {ESMM_CPU_COST_FMA_BF16 * ESMM_CPU_COST_CHOSEN, COST_PACK, ESMM_CPU_COST_READ_B, 2 * ESMM_CPU_COST_INDEX,
             ESMM_CPU_COST_VECTOR, ESMM_CPU_COST_START},
    .workspace = workspace,
    .run = run,
};
