/*
 * prune_top.c: top-N and the soft threshold: which elements of a column, of the whole matrix or of an N:M group stay,
 * and what is subtracted from them.
 *
 * Elements that compete have a cut: the key and the place of the last one that stays. A column's cut is found among its
 * keys; the whole matrix's byte by byte, in passes over it, without room for keys. Then each element is decided alone,
 * area by area (format.h): on a GPU likewise (cuda/ops/prune.cu).
 */
#include "format/prune.h"

#include "bits.h"
#include "convert.h"
#include "threads.h"

#define CHUNK 16 /* columns whose keys are gathered side by side: a cache line of B's rows serves all of them */

/* Elements with a larger key stay, and those with this key up to place `last`. */
typedef struct cut {
  uint64_t least;
  int64_t last;
  double shrink; /* the largest score that goes: 0 where nothing is to shrink */
  bool finite;   /* counts for the factor */
} cut;

typedef struct job {
  esmm_matrix b;
  const esmm_top *how;
  int64_t rows, strips; /* of an area; areas side by side */
  cut *cuts;            /* DENSE: of each column, or one */
  uint64_t *keys;       /* [threads][CHUNK][k] */
  bool measures;        /* fits are made; else b is changed */
  float factor;
  esmm_area_fit *fits; /* soft: of each area */
  esmm_prune_tally *tallies;
} job;

static inline double norm_at(const job *j, int64_t k)
{
  return j->how->norms ? fabs((double)j->how->norms[k]) : 1.0; /* -0.0 is 0 */
}

static inline uint64_t key_at(const job *j, int64_t k, int64_t col)
{
  const int64_t at = esmm_matrix_index(&j->b, k, col);
  return esmm_prune_key(esmm_nonzero_at(j->b.data, j->b.dtype, at),
                        fabs((double)esmm_load_element(j->b.data, j->b.dtype, at)) * norm_at(j, k));
}

static inline bool stays(const cut *c, uint64_t key, int64_t place)
{
  return key > c->least || (key == c->least && place <= c->last);
}

/* ---- cuts ---- */

/* All stay, or none: no key has to be read. */
static cut simple_cut(int64_t keep)
{
  return keep > 0 ? (cut){.last = INT64_MAX} : (cut){.least = UINT64_MAX, .last = -1};
}

/* The rest of a cut, from the largest key of all and of those that go. */
static void finish_cut(const job *j, uint64_t largest, uint64_t gone, cut *c)
{
  c->finite = isfinite(esmm_prune_score(largest));
  c->shrink = j->how->soft && c->finite ? esmm_prune_score(gone) : 0.0;
}

static void finish_from_keys(const job *j, const uint64_t *keys, int64_t count, cut *c)
{
  uint64_t largest = 0, gone = 0;
  for (int64_t i = 0; i < count; i++) {
    largest = keys[i] > largest ? keys[i] : largest;
    gone = !stays(c, keys[i], i) && keys[i] > gone ? keys[i] : gone;
  }
  finish_cut(j, largest, gone, c);
}

static cut cut_of_column(const job *j, const uint64_t *keys)
{
  const int64_t count = j->b.rows, keep = j->how->keep;
  cut c = simple_cut(keep);
  if (keep > 0 && keep < count) {
    int64_t equal;
    c.least = esmm_prune_threshold(keys, count, keep, &equal);
    for (c.last = 0; keys[c.last] != c.least || --equal > 0; c.last++)
      ;
  }
  finish_from_keys(j, keys, count, &c);
  return c;
}

/* Of a group of N:M: the element that keep - 1 others come before. */
static cut cut_of_group(const job *j, int64_t k, int64_t count, int64_t col)
{
  uint64_t keys[ESMM_MAX_GROUP];
  cut c = simple_cut(count);
  for (int64_t i = 0; i < count; i++)
    keys[i] = key_at(j, k + i, col);
  for (int64_t i = 0; i < count; i++) {
    int before = 0;
    for (int64_t r = 0; r < count; r++)
      before += keys[r] > keys[i] || (keys[r] == keys[i] && r < i);
    if (before == j->how->format.keep - 1) {
      c.least = keys[i];
      c.last = i;
    }
  }
  finish_from_keys(j, keys, count, &c);
  return c;
}

static void cut_columns(void *arg, int64_t first, int64_t end, int worker)
{
  const job *j = arg;
  const int64_t k = j->b.rows;
  uint64_t *keys = j->keys + worker * CHUNK * k;
  for (int64_t i = first; i < end; i++) {
    const int64_t col = i * CHUNK, cols = esmm_min(CHUNK, j->b.cols - col);
    for (int64_t r = 0; r < k; r++)
      for (int64_t c = 0; c < cols; c++)
        keys[c * k + r] = key_at(j, r, col + c);
    for (int64_t c = 0; c < cols; c++)
      j->cuts[col + c] = cut_of_column(j, keys + c * k);
  }
}

/* A pass over all of B, by its lines as they lie. */
typedef struct pass {
  const job *job;
  uint64_t known, found; /* the bytes of the key that are known */
  int shift;             /* of the byte that is looked for */
  int64_t having[256];   /* elements that begin like it, by their next byte */
  uint64_t largest, gone;
} pass;

static uint64_t key_on_line(const job *j, int64_t line, int64_t at, int64_t *place)
{
  const bool by_rows = j->b.order == ESMM_ROW_MAJOR;
  const int64_t k = by_rows ? line : at, col = by_rows ? at : line;
  *place = k * j->b.cols + col;
  return key_at(j, k, col);
}

static int64_t line_length(const job *j)
{
  return j->b.order == ESMM_ROW_MAJOR ? j->b.cols : j->b.rows;
}

static void count_bytes(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  pass *p = arg;
  int64_t having[256] = {0}, place;
  for (int64_t line = first; line < end; line++)
    for (int64_t at = 0; at < line_length(p->job); at++) {
      const uint64_t key = key_on_line(p->job, line, at, &place);
      having[key >> p->shift & 255] += (key & p->known) == p->found;
    }
  for (int i = 0; i < 256; i++)
    (void)__atomic_fetch_add(&p->having[i], having[i], __ATOMIC_RELAXED);
}

static void raise_to(uint64_t *to, uint64_t x)
{
  uint64_t now = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (x > now && !__atomic_compare_exchange_n(to, &now, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    ;
}

static void find_bounds(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  pass *p = arg;
  uint64_t largest = 0, gone = 0;
  for (int64_t line = first; line < end; line++)
    for (int64_t at = 0; at < line_length(p->job); at++) {
      int64_t place;
      const uint64_t key = key_on_line(p->job, line, at, &place);
      largest = key > largest ? key : largest;
      gone = !stays(p->job->cuts, key, place) && key > gone ? key : gone;
    }
  raise_to(&p->largest, largest);
  raise_to(&p->gone, gone);
}

/* Where the equal-th of the elements with that key stands, by k's, then by columns. */
static int64_t place_of(const job *j, uint64_t key, int64_t equal)
{
  for (int64_t k = 0; k < j->b.rows; k++)
    for (int64_t col = 0; col < j->b.cols; col++)
      if (key_at(j, k, col) == key && --equal == 0)
        return k * j->b.cols + col;
  return INT64_MAX;
}

static void cut_whole(esmm_ctx *ctx, job *j)
{
  const int64_t lines = j->b.order == ESMM_ROW_MAJOR ? j->b.rows : j->b.cols;
  const int64_t some = esmm_at_once(line_length(j), (int64_t)esmm_dtype_size(j->b.dtype));
  cut *c = j->cuts;
  pass p = {.job = j};
  int64_t keep = j->how->keep;
  *c = simple_cut(keep);
  if (keep > 0 && keep < j->b.rows * j->b.cols) {
    unsigned byte = 0;
    for (p.shift = 56; p.shift >= 0; p.shift -= 8) {
      memset(p.having, 0, sizeof p.having);
      esmm_for(ctx, ctx->threads, lines, some, count_bytes, &p);
      byte = esmm_prune_next_byte(p.having, &keep);
      p.found |= (uint64_t)byte << p.shift;
      p.known |= (uint64_t)255 << p.shift;
    }
    c->least = p.found;
    if (keep < p.having[byte]) /* else all of those stay */
      c->last = place_of(j, c->least, keep);
  }
  if (!j->how->soft)
    return;
  esmm_for(ctx, ctx->threads, lines, some, find_bounds, &p);
  finish_cut(j, p.largest, p.gone, c);
}

/* ---- areas ---- */

/* One column's sums of an area. */
typedef struct column_sums {
  double fit, own, squares, difference;
} column_sums;

/* x, which stays, after shrinking. */
static inline double shrunk(const job *j, const cut *c, int64_t k, double x)
{
  if (c->shrink <= 0.0)
    return x;
  const double left = fabs(x) - c->shrink * (1.0 / norm_at(j, k)); /* a GPU has the inverses at hand */
  return left > 0.0 ? copysign(left, x) : 0.0;
}

static void settle(job *j, int64_t k, int64_t col, const cut *c, int64_t place, esmm_prune_tally *t, column_sums *s)
{
  const int64_t at = esmm_matrix_index(&j->b, k, col);
  const double x = (double)esmm_load_element(j->b.data, j->b.dtype, at);
  const bool stay = stays(c, key_at(j, k, col), place);
  const double left = stay ? shrunk(j, c, k, x) : 0.0;
  if (j->measures) {
    s->fit += c->finite ? x * left : 0.0;
    s->own += c->finite ? left * left : 0.0;
    return;
  }
  double y = stay ? x : 0.0;
  if (!stay || (isfinite(x) && (c->shrink > 0.0 || j->factor != 1.0f))) {
    esmm_store_element(j->b.data, j->b.dtype, at, stay ? (float)((double)j->factor * left) : 0.0f);
    y = (double)esmm_load_element(j->b.data, j->b.dtype, at);
  }
  s->squares += x * x;
  s->difference += stay && (x == y || isnan(x)) ? 0.0 : (x - y) * (x - y);
  t->kept += x != 0.0 && y != 0.0;
  t->dropped += x != 0.0 && y == 0.0;
}

/* Into the first: the upper half to the lower, until one is left. */
static void add_by_halves(column_sums *s)
{
  for (int half = ESMM_AREA_COLS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) {
      s[i].fit += s[i + half].fit;
      s[i].own += s[i + half].own;
      s[i].squares += s[i + half].squares;
      s[i].difference += s[i + half].difference;
    }
}

static void settle_group(job *j, int64_t k0, int64_t rows, int64_t col, esmm_prune_tally *t, column_sums *s)
{
  const esmm_top *how = j->how;
  const bool grouped = how->format.kind == ESMM_FORMAT_NM;
  const cut c = grouped ? cut_of_group(j, k0, rows, col) : j->cuts[how->whole ? 0 : col];
  for (int64_t k = k0; k < k0 + rows; k++)
    settle(j, k, col, &c, grouped ? k - k0 : how->whole ? k * j->b.cols + col : k, t, s);
}

static void settle_areas(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  job *j = arg;
  const int64_t group = j->how->format.kind == ESMM_FORMAT_NM ? j->how->format.group : j->rows;
  for (int64_t i = first; i < end; i++) {
    const int64_t level = i / j->strips * j->rows, behind = esmm_min(level + j->rows, j->b.rows);
    const int64_t col = i % j->strips * ESMM_AREA_COLS, cols = esmm_min(ESMM_AREA_COLS, j->b.cols - col);
    column_sums sums[ESMM_AREA_COLS] = {{0}};
    esmm_prune_tally t = {0};
    for (int64_t k = level; k < behind; k += group)
      for (int64_t c = 0; c < cols; c++)
        settle_group(j, k, esmm_min(group, behind - k), col + c, &t, &sums[c]);
    add_by_halves(sums);
    if (j->measures) {
      j->fits[i] = (esmm_area_fit){sums[0].fit, sums[0].own};
      continue;
    }
    t.squares = sums[0].squares;
    t.squares_dropped = sums[0].difference;
    j->tallies[i] = t;
  }
}

float esmm_top_factor(const esmm_area_fit *fits, int64_t areas)
{
  double fit = 0.0, own = 0.0;
  for (int64_t i = 0; i < areas; i++) {
    fit += fits[i].fit;
    own += fits[i].own;
  }
  return own > 0.0 ? (float)(fit / own) : 1.0f;
}

void esmm_tally_add(esmm_prune_tally *to, const esmm_prune_tally *from, int64_t count)
{
  for (int64_t i = 0; i < count; i++) { /* unsigned: a device that failed may have left anything there */
    to->kept = (int64_t)((uint64_t)to->kept + (uint64_t)from[i].kept);
    to->dropped = (int64_t)((uint64_t)to->dropped + (uint64_t)from[i].dropped);
    to->squares += from[i].squares;
    to->squares_dropped += from[i].squares_dropped;
  }
}

/* ---- the call ---- */

static void find_cuts(esmm_ctx *ctx, job *j)
{
  if (j->how->whole)
    cut_whole(ctx, j);
  else
    esmm_for(ctx, ctx->threads, esmm_ceil_div(j->b.cols, CHUNK), 1, cut_columns, j);
}

/* With all memory at hand. */
static void prune(esmm_ctx *ctx, job *j, int64_t areas)
{
  const int64_t some = esmm_at_once(j->rows, ESMM_AREA_COLS * (int64_t)esmm_dtype_size(j->b.dtype));
  if (j->how->format.kind == ESMM_FORMAT_DENSE)
    find_cuts(ctx, j);
  if (j->how->soft) {
    j->measures = true;
    esmm_for(ctx, ctx->threads, areas, some, settle_areas, j);
    j->factor = esmm_top_factor(j->fits, areas);
    j->measures = false;
  }
  esmm_for(ctx, ctx->threads, areas, some, settle_areas, j);
}

esmm_status esmm_prune_top(esmm_ctx *ctx, const esmm_matrix *b, const esmm_top *how, esmm_prune_tally *all)
{
  const bool dense = how->format.kind == ESMM_FORMAT_DENSE;
  job j = {.b = *b, .how = how, .rows = esmm_area_rows(&how->format), .factor = 1.0f};
  if (b->rows == 0 || b->cols == 0)
    return ESMM_OK;
  j.strips = esmm_ceil_div(b->cols, ESMM_AREA_COLS);
  const int64_t areas = esmm_ceil_div(b->rows, j.rows) * j.strips;
  const int64_t cuts = !dense ? 0 : how->whole ? 1 : b->cols, columns = dense && !how->whole ? ctx->threads * CHUNK : 0;
  const size_t column_bytes = (size_t)b->rows * sizeof *j.keys, each = sizeof *j.tallies + sizeof *j.fits;
  void *of_areas = NULL, *of_cuts = NULL, *of_keys = NULL;
  esmm_status status = esmm_prune_alloc(ctx, areas, each, &of_areas);
  if (status == ESMM_OK)
    status = esmm_prune_alloc(ctx, cuts, sizeof *j.cuts, &of_cuts);
  if (status == ESMM_OK)
    status = esmm_prune_alloc(ctx, columns, column_bytes, &of_keys);
  if (status == ESMM_OK) {
    j.tallies = of_areas;
    j.fits = (void *)(j.tallies + areas);
    j.cuts = of_cuts;
    j.keys = of_keys;
    prune(ctx, &j, areas);
    esmm_tally_add(all, j.tallies, areas);
  }
  esmm_mem_free(&ctx->allocator, of_keys, (size_t)columns * column_bytes);
  esmm_mem_free(&ctx->allocator, of_cuts, (size_t)cuts * sizeof *j.cuts);
  esmm_mem_free(&ctx->allocator, of_areas, (size_t)areas * each);
  return status;
}
