/*
 * nm.h: N:M weights, shared by the instruction sets. Included after vec_*.h.
 *
 * Where columns choose for themselves, a vector of values has an index for each lane, which selects among the group's
 * few a's: one permutation and one multiply-add for m / n multiply-adds of a dense product,
 *
 *     c[row][0..15] += value[slot][0..15] * a[row][group][index[slot][0..15]]
 *
 * A tile is up to 16 rows (8 with AVX2) by a vector of columns, so that an index is unpacked once for all of them. A is
 * packed by groups, as many in a vector as fit, without groups that are zero in all rows of the tile:
 *
 *     [set of groups][rows][VEC]        VEC / m groups to a set; a longer group has two vectors for itself
 *
 * Values and indices are read as they are stored: for few rows their bytes are the floor, 0.53 of fp32 for 2:4.
 *
 * Where 16 or more columns share their choice it is a list of k's: nm_lists.h multiplies few rows, gemm.h more. Where 2
 * to 15 do, or no instruction selects from so long a group, gemm.h multiplies what panels.h has widened.
 */
#include "gemm.h"

#include <math.h>

#include "nm_lists.h"

static bool nm_selects(const esmm_weights *w)
{
  return w->nm.group_cols == 1 && w->nm.group <= SELECT_MOST;
}

#if SELECT_MOST > 0

#define SELECT_CHAIN 160 /* terms summed before they are added to C: as many as a dense product of 2:4 weights */
#define FEW 4            /* rows for which memory is the limit */
#define SELECT_BLOCK 128 /* rows of A that are packed together */

/* ------------------------------------------------------------------------------------------------ tiles */

/* A panel of 16 columns at a stretch of groups, or the VEC columns of it that a tile has. */
typedef struct slots {
  const void *values;          /* [slots][16] */
  const unsigned char *packed; /* [slots][16]: the indices as they are stored */
  const int32_t *index;        /* [slots][16]: unpacked, for tiles of more than FEW rows */
  index_plan plan;
  int64_t index_bytes; /* of a slot's packed indices */
  esmm_dtype dtype;
  int64_t each, all; /* slots of a group, of the stretch: the last group may have fewer */
  int64_t set;       /* groups of A to a vector */
  int length;        /* k's of a group */
  bool known;        /* each, set and length are constants */
} slots;

/* sums [rows] += the values of a slot times the a's that they name, of a [rows][span] from `base` on */
ALWAYS void add_slot(const int rows, const bool two, const slots *b, int64_t slot, const float *a, int base, vec *sums)
{
  const vec x = esmm_vec_load(b->values, b->dtype, slot * ESMM_HALF_COLS);
  const vec_index index = rows <= FEW ? index_unpack(&b->plan, b->packed + slot * b->index_bytes, base)
                                      : index_load(b->index + slot * ESMM_HALF_COLS, base);
  __asm__("" : "+r"(a)); /* else a's rows stay in registers from slot to slot, and there are too few */
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
    sums[r] = vec_fma(vec_select(two, a + r * (two ? 2 * VEC : VEC), index), x, sums[r]);
}

/* One group; few rows have two chains of sums, because one would wait for itself. */
ALWAYS void add_group(const int rows, const bool two, const slots *b, int64_t group, const float *a, int base,
                      vec *even, vec *odd)
{
  int64_t slot = group * b->each;
  const int64_t end = esmm_min(b->all, slot + b->each);
  if (rows <= FEW)
    for (; slot + 2 <= end; slot += 2) {
      add_slot(rows, two, b, slot, a, base, even);
      add_slot(rows, two, b, slot + 1, a, base, odd);
    }
  for (; slot < end; slot++)
    add_slot(rows, two, b, slot, a, base, even);
}

/* c [rows, VEC] (+)= a * b over `count` groups, packed in a; `list` says which groups of b they are */
ALWAYS void select_groups(const int rows, const bool two, const slots *b, const float *a, const uint32_t *list,
                          int64_t count, float *c, int64_t ldc, bool add)
{
  const int64_t chain = esmm_max(b->set, SELECT_CHAIN / b->each / b->set * b->set);
  int64_t i = 0;
  do {
    const int64_t end = esmm_min(count, i + chain);
    vec even[SELECT_ROWS], odd[SELECT_ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
      even[r] = odd[r] = vec_zero();
    for (; i < end; a += rows * (two ? 2 * VEC : VEC)) {
      const int64_t last = esmm_min(end, i + b->set);
      if (b->known && last - i == b->set && b->each * ((int64_t)list[last - 1] + 1) <= b->all) {
#pragma GCC unroll 4
        for (int g = 0; g < b->set; g++)
#pragma GCC unroll 8
          for (int slot = 0; slot < b->each; slot++)
            add_slot(rows, two, b, b->each * (int64_t)list[i + g] + slot, a, g * b->length, slot % 2 ? odd : even);
        i = last;
        continue;
      }
      for (int base = 0; i < last; i++, base += b->length)
        add_group(rows, two, b, list[i], a, base, even, odd);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
      const vec sum = rows <= FEW ? vec_add(even[r], odd[r]) : even[r];
      vec_store(c + r * ldc, add ? vec_add(sum, vec_load(c + r * ldc)) : sum);
    }
    add = true;
  } while (i < count);
}

/* Makes b's layout a constant for few rows: where memory is the limit, a branch for each slot costs time. */
#define IF_B_IS(type, n, m, bits)                                              \
  if (b.dtype == (type) && b.each == (n) && b.length == (m)) {                 \
    b.dtype = (type), b.each = (n), b.length = (m), b.set = VEC / (m);         \
    b.index_bytes = 2 * (bits), b.plan.two_bits = (bits) == 2, b.known = true; \
    select_groups(rows, two, &b, a, list, count, c, ldc, add);                 \
    return;                                                                    \
  }

ALWAYS void select_tile(const int rows, const bool two, const slots *of_b, const float *a, const uint32_t *list,
                        int64_t count, float *c, int64_t ldc, bool add)
{
  slots b = *of_b; /* in registers */
  if (rows <= FEW && !two) {
    IF_B_IS(ESMM_F32, 2, 4, 2)
    IF_B_IS(ESMM_BF16, 2, 4, 2)
    IF_B_IS(ESMM_F16, 2, 4, 2)
    IF_B_IS(ESMM_F32, 4, 8, 3)
    IF_B_IS(ESMM_BF16, 4, 8, 3)
    IF_B_IS(ESMM_F16, 4, 8, 3)
  }
  b.known = false;
  select_groups(rows, two, &b, a, list, count, c, ldc, add);
}

typedef void select_function(const slots *b, const float *a, const uint32_t *list, int64_t count, float *c, int64_t ldc,
                             bool add);

#define SELECT_TILE(name, rows, two)                                                                              \
  static __attribute__((noinline)) void name(const slots *b, const float *a, const uint32_t *list, int64_t count, \
                                             float *c, int64_t ldc, bool add)                                     \
  {                                                                                                               \
    select_tile(rows, two, b, a, list, count, c, ldc, add);                                                       \
  }
#define SELECT_TILES(rows)             \
  SELECT_TILE(one_##rows, rows, false) \
  SELECT_TILE(two_##rows, rows, true)
SELECT_TILES(1)
SELECT_TILES(2)
SELECT_TILES(4)
SELECT_TILES(8)
#if SELECT_ROWS == 16
SELECT_TILES(16)
#else
#define one_16 NULL
#define two_16 NULL
#endif

/* The tile of 1, 2, 4, 8 or 16 rows, by the binary logarithm of that. */
static select_function *const select_one[] = {one_1, one_2, one_4, one_8, one_16};
static select_function *const select_two[] = {two_1, two_2, two_4, two_8, two_16};

/* ------------------------------------------------------------------------------------------------ A */

typedef float group_word;
#include "nm_groups.h"

typedef struct select_layout {
  int64_t mc, kc, nc; /* a block of C, nc in panels of 16 columns; kc: k's of a stretch */
  int64_t at_once;    /* stretches that are packed before the first is multiplied */
  int64_t blocks_m, blocks_n;
  int64_t set, sets, span;     /* groups in a set, sets of a stretch, floats of a set and row */
  int64_t tiles, packed, list; /* tiles of a stretch, and what each stretch needs room for: floats, entries */
  size_t at_lists, at_counts, at_bits, at_index, at_sums, at_rows, bytes; /* a thread's scratch; packed A is first */
} select_layout;

static select_layout select_lay_out(const esmm_problem *p)
{
  const esmm_nm_form *form = &p->w->nm;
  select_layout l = {.mc = esmm_min(SELECT_BLOCK, p->m)};
  /* Stretches start at whole words of bitmaps and at whole groups. */
  int64_t unit = 64;
  while (unit % form->group != 0)
    unit += 64;
  l.kc = esmm_min(esmm_round_up(STRAIGHT_CHAIN, unit), esmm_round_up(p->k, unit));
  l.set = esmm_max(1, VEC / form->group);
  l.sets = esmm_ceil_div(esmm_ceil_div(esmm_min(l.kc, p->k), form->group), l.set);
  l.span = form->group <= VEC ? VEC : 2 * VEC;
  l.tiles = l.mc / SELECT_ROWS + 4; /* 15 rows at the end are 8 + 4 + 2 + 1 */
  l.packed = l.mc * l.sets * l.span;
  l.list = l.tiles * l.sets * l.set;
  /* With few rows all of a panel is read in one run: 256 KB of packed A stay in the second-level cache. */
  l.at_once = esmm_max(1, esmm_min(esmm_ceil_div(p->k, l.kc), 65536 / l.packed));
  l.blocks_m = esmm_ceil_div(p->m, l.mc);
  /* Threads have four blocks each; fewer than 8 panels to a block would pack A more than they multiply. */
  const int64_t share = p->threads > 1 ? esmm_ceil_div(4 * p->threads, l.blocks_m) : 1;
  l.nc = esmm_min(256, esmm_max(esmm_ceil_div(form->panels, share), esmm_min(8, form->panels)));
  l.blocks_n = esmm_ceil_div(form->panels, l.nc);
  l.bytes = align_up((size_t)(l.at_once * l.packed) * sizeof(float));
  l.at_lists = set_aside(&l.bytes, l.at_once * l.list, sizeof(uint32_t));
  l.at_counts = set_aside(&l.bytes, l.at_once * l.tiles, sizeof(int64_t));
  l.at_bits = set_aside(&l.bytes, l.kc / 64 + 1, sizeof(uint64_t));
  l.at_index = set_aside(&l.bytes, l.sets * l.set * form->keep * ESMM_HALF_COLS, sizeof(int32_t));
  l.at_sums = set_aside(&l.bytes, esmm_is_plain(p) ? 0 : l.mc * l.nc * ESMM_HALF_COLS, sizeof(float));
  l.at_rows = set_aside(&l.bytes, SELECT_ROWS * l.kc, sizeof(float));
  return l;
}

/* ------------------------------------------------------------------------------------------------ the product */

/* The i-th of the stretches that are packed at once. */
static group_stretch block_of(const esmm_problem *p, const select_layout *l, int64_t row0, int64_t k0, int64_t i,
                              char *scratch)
{
  return (group_stretch){.row0 = row0,
                         .rows = esmm_min(l->mc, p->m - row0),
                         .k0 = k0,
                         .kc = esmm_min(l->kc, p->k - k0),
                         .counts = (int64_t *)(void *)(scratch + l->at_counts) + i * l->tiles,
                         .lists = (uint32_t *)(void *)(scratch + l->at_lists) + i * l->list,
                         .tiles = (float *)(void *)scratch + i * l->packed};
}

static void pack_block(const esmm_problem *p, const select_layout *l, const group_stretch *x, char *scratch)
{
  const int64_t m = p->w->nm.group, words = esmm_ceil_div(x->kc, 64);
  uint64_t *bits = (uint64_t *)(void *)(scratch + l->at_bits);
  for (int64_t r = 0, tile = 0, rows; r < x->rows; r += rows, tile++) {
    int64_t ld;
    rows = (int64_t)1 << next_rows(x->rows - r);
    const float *a = rows_of_a(&p->a, x->row0 + r, rows, x->k0, x->kc, (float *)(void *)(scratch + l->at_rows), &ld);
    find_bits(p, a, ld, x->row0 + r, rows, x->k0, x->kc, bits);
    bits[words] = 0;
    x->counts[tile] = pack_groups(a, ld, rows, bits, x->kc, m, l->set, l->span, x->tiles + r * l->sets * l->span,
                                  x->lists + tile * l->sets * l->set);
  }
}

/* A panel against all tiles of a block: c [rows, cols] (+)= */
static void select_panel(const select_layout *l, const group_stretch *x, const slots *b, int64_t cols, float *c,
                         int64_t ldc, bool add, tally *t)
{
  for (int64_t r = 0, tile = 0, rows; r < x->rows; r += rows, tile++) {
    const int level = next_rows(x->rows - r);
    rows = (int64_t)1 << level;
    select_function *multiply = (l->span == VEC ? select_one : select_two)[level];
    const float *a = x->tiles + r * l->sets * l->span;
    const uint32_t *list = x->lists + tile * l->sets * l->set;
    for (int64_t j = 0; j < cols; j += VEC) {
      slots part = *b;
      part.values = (const char *)b->values + (size_t)j * esmm_dtype_size(b->dtype);
      part.packed += j / 8 * (b->index_bytes / 2);
      part.index += j;
      float *to = c + r * ldc + j;
      if (cols - j >= VEC) {
        multiply(&part, a, list, x->counts[tile], to, ldc, add);
        continue;
      }
      float edge[SELECT_ROWS * VEC]; /* past the last column C is not ours to write */
      multiply(&part, a, list, x->counts[tile], edge, VEC, false);
      for (int64_t i = 0; i < rows; i++)
        for (int64_t y = 0; y < cols - j; y++)
          to[i * ldc + y] = edge[i * VEC + y] + (add ? to[i * ldc + y] : 0.0f);
    }
    t->terms += (double)listed_slots(b->each, b->all, list, x->counts[tile]) * (double)rows * (double)cols;
  }
}

/* The indices of the slots of a stretch, to words. */
static void unpack_indices(const slots *b, int32_t *to)
{
  const unsigned char *from = b->packed;
  for (int32_t *end = to + b->all * ESMM_HALF_COLS; to < end; to += VEC, from += VEC / 8 * (b->index_bytes / 2))
    index_store(to, index_unpack(&b->plan, from, 0));
}

/* One block of C. */
static void select_multiply(const esmm_problem *p, const void *plan, int64_t block, char *scratch, tally *t)
{
  const select_layout *l = plan;
  const esmm_nm_form *form = &p->w->nm;
  const int64_t q0 = block % l->blocks_n * l->nc, panels = esmm_min(l->nc, form->panels - q0);
  const int64_t col0 = q0 * ESMM_HALF_COLS, width = esmm_min(panels * ESMM_HALF_COLS, p->n - col0);
  const bool plain = esmm_is_plain(p);
  float *sums = (float *)(void *)(scratch + l->at_sums);
  const int64_t row0 = block / l->blocks_n * l->mc, rows = esmm_min(l->mc, p->m - row0);
  const int64_t ldc = plain ? p->c.ld : l->nc * ESMM_HALF_COLS;
  float *c = plain ? (float *)p->c.data + row0 * p->c.ld + col0 : sums;
  int32_t *index = (int32_t *)(void *)(scratch + l->at_index);
  slots b = {.index = index,
             .plan = index_plan_of(form->bits),
             .index_bytes = 2 * form->bits,
             .dtype = p->w->dtype,
             .each = form->keep,
             .set = l->set,
             .length = form->group};
  for (int64_t k0 = 0; k0 < p->k; k0 += l->at_once * l->kc) {
    const int64_t stretches = esmm_min(l->at_once, esmm_ceil_div(p->k - k0, l->kc));
    const double start = now_if_timed(p);
    for (int64_t i = 0; i < stretches; i++) {
      const group_stretch x = block_of(p, l, row0, k0 + i * l->kc, i, scratch);
      pack_block(p, l, &x, scratch);
    }
    t->extract += now_if_timed(p) - start;
    for (int64_t q = 0; q < panels; q++)
      for (int64_t i = 0; i < stretches; i++) {
        const group_stretch x = block_of(p, l, row0, k0 + i * l->kc, i, scratch);
        const int64_t slot0 = x.k0 / form->group * form->keep, first = (q0 + q) * form->slots + slot0;
        b.all = esmm_min(form->slots - slot0, esmm_ceil_div(x.kc, form->group) * form->keep);
        b.values = (const char *)form->values + (size_t)(first * ESMM_HALF_COLS) * esmm_dtype_size(p->w->dtype);
        b.packed = form->index + (size_t)(first * b.index_bytes);
        if (rows > FEW)
          unpack_indices(&b, index);
        select_panel(l, &x, &b, esmm_min(ESMM_HALF_COLS, width - q * ESMM_HALF_COLS), c + q * ESMM_HALF_COLS, ldc,
                     x.k0 > 0 || (plain && p->beta == 1.0f), t);
      }
  }
  if (plain)
    esmm_finish_plain(p, row0, rows, col0, width);
  else
    esmm_finish(p, row0, rows, col0, width, sums, ldc);
}

static size_t select_workspace(const esmm_problem *p)
{
  return blocks_workspace(p, select_lay_out(p).bytes);
}

static void select_run(const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  const select_layout l = select_lay_out(p);
  run_blocks(p, select_multiply, &l, l.blocks_m * l.blocks_n, l.bytes, scratch, stats);
}

static void select_units(const esmm_problem *p, double *units, int64_t *variant)
{
  *variant = SELECT_ROWS;
  const esmm_nm_form *form = &p->w->nm;
  const double columns = (double)(form->panels * ESMM_HALF_COLS), each = (double)form->slots; /* values of a column */
  const double alive =
      1.0 - pow(1.0 - p->sample.strip[SELECT_ROWS == 16 ? 4 : 3], form->group); /* share of groups with a nonzero */
  units[0] = (double)p->m * columns * each * alive / VEC;
  units[1] = (double)p->m * (double)p->k;
  units[2] = (double)p->w->bytes * fmin(1.0, ESMM_CPU_COST_AHEAD * alive);
  units[3] = (double)esmm_ceil_div(p->m, SELECT_ROWS) * columns * each * alive / VEC;
  units[4] =
      (double)p->m * columns * (double)esmm_ceil_div(form->slots, SELECT_CHAIN) / VEC * (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

#else /* nm_selects() never says so */

#define select_workspace(p) 0
#define select_run(p, scratch, stats) (void)0
#define select_units(p, units, variant) (void)0

#endif

/* ------------------------------------------------------------------------------------------------ the descriptor */

/* The same from lists or from widened panels, at one strip height. */
static void nm_units(const esmm_problem *p, int level, double *units)
{
  const bool lists = source_of(p->w, true) == FROM_LISTS;
  const double columns = (double)(p->w->nm.panels * ESMM_HALF_COLS), k = (double)p->k;
  const double strips = (double)esmm_ceil_div(p->m, 1 << level), passes = (double)esmm_ceil_div(p->m, 128);
  const double kept = lists ? (double)p->w->nm.slots : k;
  /* A multiply-add of gemm.h over one with a selection. */
  units[0] = ESMM_CPU_COST_LISTED / ESMM_CPU_COST_CHOSEN * (double)p->m * columns * kept * p->sample.strip[level] / VEC;
  units[1] = (double)p->m * k * (0.5 + p->sample.strip[level]);
  units[2] = (double)p->w->bytes;
  units[3] = lists ? (strips * k / 16.0 + passes * kept) * columns / ESMM_PANEL : 2.0 * passes * columns * k;
  units[4] =
      (double)p->m * columns * (double)esmm_ceil_div(p->k, STRAIGHT_CHAIN) / VEC * (esmm_is_plain(p) ? 1.0 : 2.0);
  units[5] = 1.0;
}

static void nm_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                     int64_t *variant)
{
  (void)self;
  if (nm_selects(p->w))
    select_units(p, units, variant);
  else if (takes_lists(p))
    lists_units(p, units, variant);
  else
    cheapest_strip(p, cost, nm_units, units, variant);
}

static size_t nm_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  return nm_selects(p->w) ? select_workspace(p) : takes_lists(p) ? lists_workspace(p) : gemm_workspace(self, p);
}

static esmm_status nm_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                          esmm_stats *stats)
{
  if (nm_selects(p->w))
    select_run(p, scratch, stats);
  else if (takes_lists(p))
    lists_run(p, scratch, stats);
  else
    return gemm_run(self, ctx, p, scratch, stats);
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define NM_KERNEL                                                                                                      \
  .cost = {COST_FMA * ESMM_CPU_COST_CHOSEN,                                                                            \
           COST_PACK,                                                                                                  \
           ESMM_CPU_COST_READ_B,                                                                                       \
           ESMM_CPU_COST_INDEX,                                                                                        \
           ESMM_CPU_COST_VECTOR,                                                                                       \
           ESMM_CPU_COST_START},                                                                                       \
  .doc = "N:M weights: multiplies the values there are, less groups of k's that are zero in some rows of A",           \
  .backend = &esmm_cpu_backend, .reads = ESMM_FORM(NM), .variant_strips = true,                                        \
  .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS, .terms = nm_terms, .workspace = nm_workspace, .run = nm_run, \
  .term_names = {"multiply-adds", "scanning and packing of a", "reading of b", "unpacking of indices",                 \
                 "updates of c",  "starting threads"}
