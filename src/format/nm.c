/*
 * nm.c: of every `group` k's at most `keep` nonzeros, in each column or in each strip of columns. A group's choice is a
 * word of `group` bits: the nonzero k's and, if they are fewer than `keep`, the lowest others, so that every group
 * keeps the same number and positions differ.
 */
#include "backend.h"
#include "bits.h"
#include "convert.h"
#include "esmm_tools.h"
#include "threads.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define CHUNK 16 /* strips gone through side by side: a cache line of B's rows serves all of them */

static int64_t groups_of(int64_t k, int group)
{
  return esmm_ceil_div(k, group);
}

/* The k's of rows k0 .. k0 + rows - 1 that are not zero in all of the columns j0 .. j0 + cols - 1. */
static uint32_t nonzeros(const esmm_matrix *b, int64_t k0, int64_t rows, int64_t j0, int64_t cols)
{
  uint32_t found = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = j0; j < j0 + cols; j++)
      if (esmm_nonzero_at(b->data, b->dtype, esmm_matrix_index(b, k0 + r, j))) {
        found |= (uint32_t)1 << r;
        break;
      }
  return found;
}

/* ---- does B fit? ---- */

/* The lowest group with more than `keep` k's, from strip s on, of `strips` strips; *strip is which. Groups from `limit`
   on do not matter. f is settled. */
static int64_t first_offence(const esmm_matrix *b, const esmm_format *f, int64_t s, int64_t strips, int64_t limit,
                             int64_t *strip)
{
  for (int64_t g = 0; g < limit; g++)
    for (int64_t i = s; i < s + strips; i++) {
      const int64_t k0 = g * f->group, j0 = i * f->group_cols;
      const uint32_t found =
          nonzeros(b, k0, esmm_min(f->group, b->rows - k0), j0, esmm_min(f->group_cols, b->cols - j0));
      if (__builtin_popcount(found) > f->keep) {
        *strip = i;
        return g;
      }
    }
  return limit;
}

typedef struct offence {
  const esmm_matrix *b;
  const esmm_format *f;
  int64_t strips;
  _Atomic int64_t group; /* the first one found so far */
} offence;

static void find_first(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  offence *o = arg;
  for (int64_t i = first; i < end; i++) {
    int64_t at = 0, best = o->group;
    const int64_t s = i * CHUNK, found = first_offence(o->b, o->f, s, esmm_min(CHUNK, o->strips - s), best, &at);
    while (found < best && !atomic_compare_exchange_weak(&o->group, &best, found))
      ;
  }
}

/* The group of the lowest k, there the lowest strip, that has more than `keep` k's; false where there is none. */
static bool find_offence(const esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, int64_t *group,
                         int64_t *strip)
{
  const int64_t groups = groups_of(b->rows, f->group);
  const int64_t strips = groups > 0 ? esmm_ceil_div(b->cols, f->group_cols) : 0; /* without k any n is legal */
  offence o = {.b = b, .f = f, .strips = strips, .group = groups};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(strips, CHUNK), 1, find_first, &o);
  int64_t best = o.group, where = -1;
  /* And the lowest strip of that group, once more: threads that note a pair would have to take turns. */
  for (int64_t s = 0; best < groups && where < 0; s += CHUNK) {
    int64_t at = 0;
    if (first_offence(b, f, s, esmm_min(CHUNK, strips - s), best + 1, &at) == best)
      where = at;
  }
  *group = best;
  *strip = where;
  return best < groups;
}

esmm_status esmm_format_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, int64_t *k, int64_t *col)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!k || !col)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", k ? "col" : "k");
  *k = *col = -1;
  if (!format)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "format is NULL");
  esmm_format f = *format;
  esmm_status status = esmm_format_settle(ctx, "format->", &f, ESMM_DEFAULT_BLOCK, ESMM_DEFAULT_BLOCK);
  if (status != ESMM_OK)
    return status;
  if (f.kind != ESMM_FORMAT_NM)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "format->kind is %s, which every matrix fits: only nm can be checked",
                     esmm_format_str(f.kind));
  esmm_matrix checked, twin = {0};
  int64_t group = -1, strip = -1;
  status = esmm_check_matrix(ctx, "b", b, &checked);
  if (status != ESMM_OK)
    return status;
  if (checked.place == ESMM_DEVICE && ctx->backend->format_check) {
    status = ctx->backend->format_check(ctx, &checked, &f, &group, &strip);
  } else {
    if (checked.place == ESMM_DEVICE) {
      status = esmm_host_twin_read(ctx, &checked, &twin);
      checked = twin;
    }
    if (status == ESMM_OK && !find_offence(ctx, &checked, &f, &group, &strip))
      group = -1;
    esmm_host_twin_free(ctx, &twin);
  }
  if (status == ESMM_OK && group >= 0) {
    *k = group * f.group;
    *col = strip * f.group_cols;
  }
  return status;
}

/* ---- B's form ---- */

static void put_index(unsigned char *list, int64_t i, int bits, unsigned index)
{
  for (int bit = 0; bit < bits; bit++, index >>= 1) {
    const int64_t at = i * bits + bit;
    list[at / 8] = (unsigned char)(list[at / 8] | (index & 1) << (at % 8));
  }
}

/* The positions of one group's choice, in rising order, to slots from `slot` on of column or strip i. */
static void put_choice(const esmm_nm_form *f, int64_t i, int64_t slot, uint32_t choice)
{
  for (; choice; choice &= choice - 1, slot++) {
    const unsigned index = (unsigned)__builtin_ctz(choice);
    if (f->group_cols == 1)
      put_index(f->index + (i / ESMM_NM_PANEL * f->slots + slot) * (ESMM_NM_PANEL / 8) * f->bits, i % ESMM_NM_PANEL,
                f->bits, index);
    else
      put_index(f->index + (size_t)i * f->list_bytes, slot, f->bits, index);
  }
}

/* Index of `strips` strips from s on; columns past B's last, which only single ones have, choose like zeros. */
static void choose(const esmm_matrix *b, const esmm_nm_form *f, int64_t s, int64_t strips)
{
  for (int64_t g = 0; g < groups_of(b->rows, f->group); g++) {
    const int64_t k0 = g * f->group, rows = esmm_min(f->group, b->rows - k0), kept = esmm_min(f->keep, rows);
    for (int64_t i = s; i < s + strips; i++) {
      const int64_t j0 = i * f->group_cols, cols = esmm_max(0, esmm_min(f->group_cols, b->cols - j0));
      uint32_t choice = nonzeros(b, k0, rows, j0, cols);
      while (__builtin_popcount(choice) < kept)
        choice |= choice + 1; /* its lowest 0 */
      put_choice(f, i, g * f->keep, choice);
    }
  }
}

static void fill_values(const esmm_matrix *b, const esmm_weights *w, int64_t panel)
{
  const esmm_nm_form *f = &w->nm;
  for (int64_t s = 0; s < f->slots; s++)
    for (int64_t j = panel * ESMM_NM_PANEL; j < (panel + 1) * ESMM_NM_PANEL; j++)
      if (j < w->n)
        esmm_copy_element(f->values, esmm_nm_value(f, j, s), b->data, esmm_matrix_index(b, esmm_nm_k(f, j, s), j),
                          w->dtype);
      else
        esmm_store_element(f->values, w->dtype, esmm_nm_value(f, j, s), 0.0f);
}

typedef struct filling {
  const esmm_matrix *b;
  const esmm_weights *w;
  int64_t strips;
} filling;

static void choose_chunks(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  for (int64_t s = first * CHUNK; s < esmm_min(end * CHUNK, x->strips); s += CHUNK)
    choose(x->b, &x->w->nm, s, esmm_min(CHUNK, x->strips - s));
}

static void fill_panels(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const filling *x = arg;
  for (int64_t p = first; p < end; p++)
    fill_values(x->b, x->w, p);
}

esmm_status esmm_nm_misfit(esmm_ctx *ctx, const esmm_format *f, int64_t k, int64_t n, int64_t group, int64_t strip,
                           int count)
{
  const int64_t k0 = group * f->group, j0 = strip * f->group_cols, cols = esmm_min(f->group_cols, n - j0);
  return esmm_fail(
      ctx, ESMM_ERR_ARGUMENT,
      "b does not fit %d:%d: k %lld to %lld of column%s %lld%s has %d nonzero k's; esmm_prune makes it fit", f->keep,
      f->group, (long long)k0, (long long)(esmm_min(k0 + f->group, k) - 1), cols > 1 ? "s from" : "", (long long)j0,
      cols > 1 ? ", which share their choice," : "", count);
}

esmm_status esmm_nm_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w)
{
  const esmm_nm_form *f = &w->nm;
  const esmm_format format = {.kind = ESMM_FORMAT_NM, .keep = f->keep, .group = f->group, .group_cols = f->group_cols};
  int64_t group, strip;
  if (f->slots == 0) /* nothing is kept of any column, and no memory bounds how many there are */
    return ESMM_OK;
  if (find_offence(ctx, b, &format, &group, &strip)) {
    const int64_t k0 = group * f->group, j0 = strip * f->group_cols, cols = esmm_min(f->group_cols, w->n - j0);
    const int count = __builtin_popcount(nonzeros(b, k0, esmm_min(f->group, w->k - k0), j0, cols));
    return esmm_nm_misfit(ctx, &format, w->k, w->n, group, strip, count);
  }
  memset(f->index, 0, esmm_form_sizes(w).index);
  const int64_t strips = f->group_cols == 1 ? f->panels * ESMM_NM_PANEL : f->strips;
  filling x = {.b = b, .w = w, .strips = strips};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(strips, CHUNK), 1, choose_chunks, &x);
  esmm_for(ctx, ctx->threads, f->panels, 1, fill_panels, &x);
  return ESMM_OK;
}

void esmm_nm_unpack(const esmm_weights *w, esmm_matrix *out)
{
  const esmm_nm_form *f = &w->nm;
  for (int64_t j0 = 0; f->slots > 0 && j0 < w->n; j0 += ESMM_NM_PANEL)
    for (int64_t s = 0; s < f->slots; s++)
      for (int64_t j = j0; j < esmm_min(j0 + ESMM_NM_PANEL, w->n); j++)
        esmm_copy_element(out->data, esmm_nm_k(f, j, s) * out->ld + j, f->values, esmm_nm_value(f, j, s), w->dtype);
}

int64_t esmm_nm_scan_panel(const esmm_weights *w, int64_t panel, uint64_t *bits)
{
  const esmm_nm_form *f = &w->nm;
  int64_t count = 0;
  for (int64_t s = 0; s < f->slots; s++)
    for (int64_t j = panel * ESMM_PANEL; j < esmm_min((panel + 1) * ESMM_PANEL, w->n); j++) {
      if (!esmm_nonzero_at(f->values, w->dtype, esmm_nm_value(f, j, s)))
        continue;
      const int64_t k = esmm_nm_k(f, j, s);
      bits[k / 64] |= (uint64_t)1 << (k % 64);
      count++;
    }
  return count;
}

/* ---- a form out of a file ---- */

static bool valid_list(const esmm_weights *w, int64_t j, char *why, size_t why_bytes)
{
  const esmm_nm_form *f = &w->nm;
  for (int64_t s = 0; s < f->slots; s++) {
    const int64_t k = esmm_nm_k(f, j, s), end = esmm_min((s / f->keep + 1) * f->group, w->k);
    if (k < end && (s % f->keep == 0 || k > esmm_nm_k(f, j, s - 1)))
      continue;
    (void)snprintf(why, why_bytes, "index of slot %lld, column %lld is k = %lld: not rising below %lld", (long long)s,
                   (long long)j, (long long)k, (long long)end);
    return false;
  }
  return true;
}

bool esmm_nm_valid(const esmm_weights *w, char *why, size_t why_bytes)
{
  const esmm_nm_form *f = &w->nm;
  if (f->slots == 0) /* sections are empty then: the file's size does not bound n */
    return true;
  const int64_t lists = f->group_cols == 1 ? f->panels * ESMM_NM_PANEL : f->strips;
  for (int64_t i = 0; i < lists; i++)
    if (!valid_list(w, i * f->group_cols, why, why_bytes))
      return false;
  for (int64_t i = 0; i < f->strips; i++)
    for (int64_t bit = f->slots * f->bits; bit < (int64_t)(8 * f->list_bytes); bit++)
      if (f->index[(size_t)i * f->list_bytes + (size_t)bit / 8] >> (bit % 8) & 1) {
        (void)snprintf(why, why_bytes, "the index of columns from %lld goes on after its last slot",
                       (long long)(i * f->group_cols));
        return false;
      }
  for (int64_t j = w->n; j < f->panels * ESMM_NM_PANEL; j++)
    for (int64_t s = 0; s < f->slots; s++)
      if (esmm_nonzero_at(f->values, w->dtype, esmm_nm_value(f, j, s))) {
        (void)snprintf(why, why_bytes, "slot %lld holds a nonzero beyond the last column", (long long)s);
        return false;
      }
  return true;
}
