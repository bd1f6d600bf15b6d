/*
 * random_prune.c: one esmm_prune or esmm_format_check, against the words of esmm_tools.h: every element is weighed, and
 * the order of all of them says which stay.
 */
#include "random_calls.h"

#include <math.h>
#include <stdlib.h>

typedef struct pruning {
  int64_t k, n;
  esmm_prune_opts opts;
  const float *norms;
  const double *before;
  double *after; /* what should be there, before the common factor of soft */
} pruning;

/* Something that is kept or goes as a whole; of equal weights, those with a nonzero stay first, then the lower place.
 */
typedef struct ranked {
  double weight;
  bool nonzero;
  int64_t at;
} ranked;

static int by_weight(const void *x, const void *y)
{
  const ranked *a = x, *b = y;
  if (a->weight != b->weight)
    return a->weight > b->weight ? -1 : 1;
  if (a->nonzero != b->nonzero)
    return a->nonzero ? -1 : 1;
  return a->at < b->at ? -1 : a->at > b->at;
}

/* |b| as it is compared; NaN is infinite. */
static double weight(const pruning *p, int64_t k, int64_t j)
{
  const double x = fabs(p->before[k * p->n + j]) * (p->norms ? (double)p->norms[k] : 1);
  return isnan(x) ? INFINITY : x;
}

static ranked rank_of(const pruning *p, int64_t k, int64_t j, int64_t at)
{
  return (ranked){weight(p, k, j), p->before[k * p->n + j] != 0, at};
}

static ranked rank_of_area(const pruning *p, int64_t k0, int64_t k1, int64_t j0, int64_t j1, int64_t at)
{
  ranked area = {.at = at};
  for (int64_t k = k0; k < k1; k++)
    for (int64_t j = j0; j < j1; j++) {
      area.weight += weight(p, k, j) * weight(p, k, j);
      area.nonzero |= p->before[k * p->n + j] != 0;
    }
  return area;
}

static void clear(const pruning *p, int64_t k0, int64_t k1, int64_t j0, int64_t j1)
{
  for (int64_t k = k0; k < k1; k++)
    for (int64_t j = j0; j < j1; j++)
      p->after[k * p->n + j] = 0;
}

static int64_t at_most(int64_t x, int64_t most)
{
  return x < most ? x : most;
}

/* What stays of a group that shrinks: less by the largest that goes, and zero rather than of the other sign. */
static void shrink(const pruning *p, const ranked *order, int64_t count, int64_t keep)
{
  for (int64_t i = 0; i < count; i++)
    if (!isfinite(p->before[order[i].at]))
      return;
  const double less = keep < count ? fabs(p->before[order[keep].at]) : 0;
  for (int64_t i = 0; i < keep; i++) {
    const double x = p->after[order[i].at];
    p->after[order[i].at] = fabs(x) > less ? copysign(fabs(x) - less, x) : 0;
  }
}

/* Elements that are weighed against each other: the first `keep` of the order stay. */
static void rank_elements(const pruning *p, ranked *order, int64_t count, int64_t keep)
{
  qsort(order, (size_t)count, sizeof *order, by_weight);
  for (int64_t i = keep; i < count; i++)
    p->after[order[i].at] = 0;
  if (p->opts.soft)
    shrink(p, order, count, keep);
}

static void prune_nm(const pruning *p, ranked *order)
{
  const int group = p->opts.format.group, keep = p->opts.format.keep;
  const int strip = p->opts.format.group_cols > 1 ? p->opts.format.group_cols : 1;
  for (int64_t k0 = 0; k0 < p->k; k0 += group)
    for (int64_t j0 = 0; j0 < p->n; j0 += strip) {
      const int64_t k1 = at_most(k0 + group, p->k), j1 = at_most(j0 + strip, p->n), count = k1 - k0;
      for (int64_t k = k0; k < k1; k++)
        order[k - k0] = strip == 1 ? rank_of(p, k, j0, k * p->n + j0) : rank_of_area(p, k, k + 1, j0, j1, k);
      if (strip == 1) {
        rank_elements(p, order, count, at_most(keep, count));
        continue;
      }
      qsort(order, (size_t)count, sizeof *order, by_weight);
      for (int64_t i = keep; i < count; i++)
        clear(p, order[i].at, order[i].at + 1, j0, j1);
    }
}

static void prune_blocks(const pruning *p, ranked *order)
{
  const int rows = p->opts.format.block_rows, cols = p->opts.format.block_cols;
  const int64_t across = (p->n + cols - 1) / cols, count = (p->k + rows - 1) / rows * across;
  for (int64_t i = 0; i < count; i++) {
    const int64_t k0 = i / across * rows, j0 = i % across * cols;
    order[i] = rank_of_area(p, k0, at_most(k0 + rows, p->k), j0, at_most(j0 + cols, p->n), i);
  }
  qsort(order, (size_t)count, sizeof *order, by_weight);
  for (int64_t i = llround(p->opts.density * (double)count); i < count; i++) {
    const int64_t k0 = order[i].at / across * rows, j0 = order[i].at % across * cols;
    clear(p, k0, at_most(k0 + rows, p->k), j0, at_most(j0 + cols, p->n));
  }
}

static void prune_top(const pruning *p, ranked *order)
{
  const bool whole = p->opts.scope == ESMM_PRUNE_MATRIX;
  const int64_t count = whole ? p->k * p->n : p->k;
  const int64_t keep = p->opts.top ? at_most(p->opts.top, count) : llround(p->opts.density * (double)count);
  for (int64_t j0 = 0; j0 < (whole ? 1 : p->n); j0++) {
    for (int64_t i = 0; i < count; i++)
      order[i] = whole ? rank_of(p, i / p->n, i % p->n, i) : rank_of(p, i, j0, i * p->n + j0);
    rank_elements(p, order, count, keep);
  }
}

/* Soft: of the factors of 1 and more, the one that brings `after` closest to `before`; what is not finite, with all
   that it was weighed against, does not count. */
static double factor(const pruning *p)
{
  double along = 0, square = 0;
  for (int64_t i = 0; i < p->k * p->n; i++) {
    along += p->before[i] * p->after[i];
    square += p->after[i] * p->after[i];
  }
  return square > 0 && along > square ? along / square : 1;
}

static void draw_pruning(world *w, pruning *p, value_kind kind)
{
  static const int sizes[] = {1, 2, 3, 4, 8, 16, 31, 32, 64};
  p->opts = (esmm_prune_opts){.size = sizeof p->opts, .format.kind = (esmm_format_kind)below(w, 3)};
  esmm_format *f = &p->opts.format;
  p->opts.density = (double)below(w, 65) / 64;
  if (f->kind == ESMM_FORMAT_BSR) {
    f->block_rows = sizes[below(w, 9)];
    f->block_cols = sizes[below(w, 9)];
    if (chance(w, 0.5)) { /* few small blocks, of which the last is one element */
      f->block_rows = sizes[below(w, 4)];
      f->block_cols = sizes[below(w, 4)];
      p->k = f->block_rows * below(w, 4) + 1;
      p->n = f->block_cols * below(w, 4) + 1;
    }
  } else if (f->kind == ESMM_FORMAT_NM) {
    f->group = 1 + (int)below(w, 32);
    f->keep = 1 + (int)below(w, f->group);
    f->group_cols = chance(w, 0.6) ? 0 : sizes[below(w, 9)];
    p->opts.density = 0;
  } else {
    p->opts.scope = (esmm_prune_scope)below(w, 2);
    if (p->opts.density == 0 || chance(w, 0.5)) {
      p->opts.density = 0;
      p->opts.top = 1 + below(w, 40);
    }
  }
  p->opts.soft = kind == WHOLE && f->kind != ESMM_FORMAT_BSR && f->group_cols < 2 && chance(w, 0.3);
  if (kind == WHOLE && !p->opts.soft && chance(w, 0.3)) { /* -0.0 is 0 */
    static const float norms[] = {0, -0.0f, 0.5f, 1, 2};
    float *of = malloc((size_t)(p->k + 1) * sizeof *of);
    assert_non_null(of);
    for (int64_t k = 0; k < p->k; k++)
      of[k] = norms[below(w, 5)];
    p->opts.input_norms = p->norms = of;
  }
  say(w, "prune %d x %d to %s", (int)p->k, (int)p->n, esmm_format_str(f->kind));
  say(w, " %d x %d, %d:%d by %d, density %.9g top %d scope %d%s%s", f->block_rows, f->block_cols, f->keep, f->group,
      f->group_cols, p->opts.density, (int)p->opts.top, (int)p->opts.scope, p->opts.soft ? " soft" : "",
      p->norms ? " norms" : "");
}

static void check_report(world *w, const pruning *p, const esmm_matrix *b, const esmm_prune_report *report)
{
  int64_t kept = 0, dropped = 0;
  double norm = 0, norm_dropped = 0;
  for (int64_t i = 0; i < p->k * p->n; i++) {
    const double x = p->before[i], y = th_get(b, i / p->n, i % p->n);
    kept += x != 0 && y != 0;
    dropped += x != 0 && y == 0;
    norm += x * x;
    norm_dropped += (x - y) * (x - y);
  }
  if (report->kept != kept || report->dropped != dropped)
    fail_msg("%s: report says %d kept, %d dropped; expected %d and %d", w->now, (int)report->kept, (int)report->dropped,
             (int)kept, (int)dropped);
  norm = sqrt(norm);
  norm_dropped = sqrt(norm_dropped);
  if (isfinite(norm) && (fabs(report->norm - norm) > 1e-9 * norm ||
                         fabs(report->norm_dropped - norm_dropped) > (p->opts.soft ? 1e-2 : 1e-9) * norm))
    fail_msg("%s: report says norms %.9g and %.9g; expected %.9g and %.9g", w->now, report->norm, report->norm_dropped,
             norm, norm_dropped);
}

void call_prune(world *w)
{
  pruning p = {.k = about(w, 0, 200), .n = about(w, 0, 120)};
  const value_kind kind = chance(w, 0.1) ? SPECIAL : WHOLE;
  draw_pruning(w, &p, kind);
  const size_t size = (size_t)(p.k * p.n + 1);
  draw_values(w, w->values[FOR_B], p.k, p.n, kind, false);
  esmm_matrix b = place_values(w, FOR_B, p.k, p.n, any_dtype(w), w->values[FOR_B]);
  p.before = w->values[FOR_B];
  p.after = malloc(size * sizeof *p.after);
  ranked *order = malloc((size + 300) * sizeof *order);
  assert_true(p.after && order);
  for (int64_t i = 0; i < p.k * p.n; i++)
    p.after[i] = p.before[i];
  esmm_prune_report report = {.size = sizeof report};
  must_be(w, esmm_prune(w->ctx, &b, &p.opts, &report), ESMM_OK);
  if (p.opts.format.kind == ESMM_FORMAT_NM)
    prune_nm(&p, order);
  else if (p.opts.format.kind == ESMM_FORMAT_BSR)
    prune_blocks(&p, order);
  else
    prune_top(&p, order);
  const double f = p.opts.soft ? factor(&p) : 1;
  for (int64_t i = 0; i < p.k * p.n; i++) {
    const double got = th_get(&b, i / p.n, i % p.n), want = p.after[i] * f;
    const double error = p.opts.soft ? fabs(want) * (1e-6 + th_roundoff(b.dtype)) : 0;
    if (!(fabs(got - want) <= error) && got != want && !(isnan(got) && isnan(want)))
      fail_msg("%s: B[%d,%d] was %.9g and is %.9g, expected %.9g", w->now, (int)(i / p.n), (int)(i % p.n), p.before[i],
               got, want);
  }
  if (!th_guards_intact(&w->arena[FOR_B]) || !padding_intact(&b))
    fail_msg("%s: wrote beside B", w->now);
  check_report(w, &p, &b, &report);
  free((float *)p.norms);
  free(p.after);
  free(order);
}

void call_format_check(world *w)
{
  const int64_t rows = about(w, 0, 150), n = about(w, 0, 100);
  const int group = 1 + (int)below(w, 32);
  const esmm_format f = {.kind = ESMM_FORMAT_NM,
                         .group = group,
                         .keep = 1 + (int)below(w, group),
                         .group_cols = chance(w, 0.5) ? 0 : 1 + (int)below(w, 40)};
  const int strip = f.group_cols > 1 ? f.group_cols : 1;
  draw_values(w, w->values[FOR_B], rows, n, WHOLE, false);
  const esmm_matrix b = place_values(w, FOR_B, rows, n, any_dtype(w), w->values[FOR_B]);
  int64_t k = 0, col = 0, first_k = -1, first_col = -1;
  say(w, "format check of %d x %d, %d:%d by %d", (int)rows, (int)n, f.keep, f.group, f.group_cols);
  must_be(w, esmm_format_check(w->ctx, &b, &f, &k, &col), ESMM_OK);
  for (int64_t k0 = 0; k0 < rows && first_k < 0; k0 += group)
    for (int64_t j0 = 0; j0 < n && first_k < 0; j0 += strip) {
      int alive = 0;
      for (int64_t at = k0; at < k0 + group && at < rows; at++) {
        bool any = false;
        for (int64_t j = j0; j < j0 + strip && j < n; j++)
          any |= w->values[FOR_B][at * n + j] != 0;
        alive += any;
      }
      if (alive > f.keep) {
        first_k = k0;
        first_col = j0;
      }
    }
  if (k != first_k || col != first_col)
    fail_msg("%s: k %d, column %d; expected %d, %d", w->now, (int)k, (int)col, (int)first_k, (int)first_col);
}
