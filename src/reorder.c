/*
 * reorder.c: an order of A's rows in which similar ones share a strip.
 *
 * A tall strip is alive at every k where one of its rows is: rows that are alive at the same k's make strips with fewer
 * of them. The rows are halved, then each half again, down to single strips. This is 2-means with halves of equal size:
 * rows are ranked along the line between the halves' centres, at first between two rows far apart, and the line is
 * drawn anew a few times. It uses SAMPLED of the k's, those where the share of rows alive is nearest to a half: they
 * separate rows best. Ties are ordered by bitmap, so that a cut parts as few equal rows as possible. All sums are of
 * integers, so the order is the same on every machine.
 *
 * 2048 tokens of a trained net, strips of 128: 0.024 -> 0.020 in a layer whose features are mostly dead, 0.98 -> 0.82
 * in one where every feature is alive somewhere.
 */
#include "esmm_tools.h"
#include "internal.h"

#include <stdlib.h>
#include <string.h>

enum { SAMPLED = 1024, WORDS = SAMPLED / 64, DRAWN = 4 };

typedef struct ranked {
  int64_t score, index;
} ranked;

typedef struct source_row {
  const uint64_t *bits;
  int64_t words, index;
} source_row;

typedef struct job {
  int64_t strip_rows;
  uint64_t (*signs)[WORDS]; /* [rows]: sampled bits of each of `sorted` */
  source_row *sorted;       /* [rows]: equal ones side by side; from here on a row is known by its place among them */
  ranked *items;            /* [max(rows, k)] */
} job;

/* The highest score first; ties by index. */
static int compare(const void *x, const void *y)
{
  const ranked *a = x, *b = y;
  if (a->score != b->score)
    return a->score > b->score ? -1 : 1;
  return (a->index > b->index) - (a->index < b->index);
}

/* By the bitmaps, as numbers; ties by index. */
static int compare_rows(const void *x, const void *y)
{
  const source_row *a = x, *b = y;
  for (int64_t w = 0; w < a->words; w++)
    if (a->bits[w] != b->bits[w])
      return a->bits[w] < b->bits[w] ? -1 : 1;
  return (a->index > b->index) - (a->index < b->index);
}

static void sort_rows(const esmm_pattern *rows, source_row *sorted)
{
  for (int64_t r = 0; r < rows->strips; r++)
    sorted[r] = (source_row){rows->bits + r * rows->words, rows->words, r};
  qsort(sorted, (size_t)rows->strips, sizeof *sorted, compare_rows);
}

/* ---- the k's that are looked at ---- */

static void count_alive(const esmm_pattern *rows, ranked *items)
{
  for (int64_t k = 0; k < rows->k; k++)
    items[k] = (ranked){0, k};
  for (int64_t r = 0; r < rows->strips; r++)
    for (int64_t w = 0; w < rows->words; w++)
      for (uint64_t word = rows->bits[r * rows->words + w]; word; word &= word - 1)
        items[w * 64 + __builtin_ctzll(word)].score++;
}

static void sample_bits(const esmm_pattern *rows, job *j)
{
  count_alive(rows, j->items);
  for (int64_t k = 0; k < rows->k; k++)
    j->items[k].score = esmm_min(j->items[k].score, rows->strips - j->items[k].score);
  qsort(j->items, (size_t)rows->k, sizeof *j->items, compare);
  const int64_t sampled = esmm_min(rows->k, SAMPLED);
  for (int64_t r = 0; r < rows->strips; r++) {
    const uint64_t *bits = j->sorted[r].bits;
    for (int64_t i = 0; i < sampled; i++) {
      const int64_t k = j->items[i].index;
      j->signs[r][i / 64] |= (bits[k / 64] >> (k % 64) & 1) << (i % 64);
    }
  }
}

/* ---- halves ---- */

static int64_t score(const uint64_t *sign, const int64_t *weights)
{
  int64_t sum = 0;
  for (int w = 0; w < WORDS; w++)
    for (uint64_t word = sign[w]; word; word &= word - 1)
      sum += weights[w * 64 + __builtin_ctzll(word)];
  return sum;
}

/* How many of those rows have each bit. */
static void count_bits(const job *j, const int64_t *rows, int64_t count, int64_t *counts)
{
  memset(counts, 0, SAMPLED * sizeof *counts);
  for (int64_t i = 0; i < count; i++)
    for (int w = 0; w < WORDS; w++)
      for (uint64_t word = j->signs[rows[i]][w]; word; word &= word - 1)
        counts[w * 64 + __builtin_ctzll(word)]++;
}

/* Of `count` rows, the one farthest from the centre of `of` rows whose bits were counted. */
static const int64_t *farthest(const job *j, const int64_t *rows, int64_t count, const int64_t *counts, int64_t of)
{
  int64_t weights[SAMPLED], best = 0, most = INT64_MIN;
  for (int i = 0; i < SAMPLED; i++) /* |x - c|^2 is, but for a constant, the sum of 1 - 2 c over x's bits */
    weights[i] = of - 2 * counts[i];
  for (int64_t i = 0; i < count; i++) {
    const int64_t distance = score(j->signs[rows[i]], weights);
    if (distance > most) {
      most = distance;
      best = i;
    }
  }
  return rows + best;
}

/* The line from the second centre to the first, in fixed point. */
static void draw_line(const job *j, const int64_t *first, int64_t firsts, const int64_t *second, int64_t seconds,
                      int64_t *line)
{
  const int64_t one = (int64_t)1 << 20;
  int64_t counts[SAMPLED];
  count_bits(j, first, firsts, line);
  count_bits(j, second, seconds, counts);
  for (int i = 0; i < SAMPLED; i++)
    line[i] = line[i] * one / firsts - counts[i] * one / seconds;
}

static void sort_along(const job *j, const int64_t *line, int64_t *rows, int64_t count)
{
  for (int64_t i = 0; i < count; i++)
    j->items[i] = (ranked){score(j->signs[rows[i]], line), rows[i]};
  qsort(j->items, (size_t)count, sizeof *j->items, compare);
  for (int64_t i = 0; i < count; i++)
    rows[i] = j->items[i].index;
}

static void halve(const job *j, int64_t *rows, int64_t count)
{
  const int64_t strips = esmm_ceil_div(count, j->strip_rows);
  if (strips < 2)
    return;
  const int64_t half = (strips + 1) / 2 * j->strip_rows;
  int64_t line[SAMPLED];
  count_bits(j, rows, count, line);
  const int64_t *one = farthest(j, rows, count, line, count);
  count_bits(j, one, 1, line);
  const int64_t *other = farthest(j, rows, count, line, 1);
  draw_line(j, one, 1, other, 1, line);
  for (int i = 0; i < DRAWN; i++) {
    sort_along(j, line, rows, count);
    draw_line(j, rows, half, rows + half, count - half, line);
  }
  sort_along(j, line, rows, count);
  halve(j, rows, half);
  halve(j, rows + half, count - half);
}

/* ---- the interface ---- */

/* The bitmaps of strips of rows taken in that order. */
static void or_strips(const esmm_pattern *rows, const int64_t *order, esmm_pattern *out)
{
  memset(out->bits, 0, (size_t)(out->strips * out->words) * sizeof *out->bits);
  for (int64_t i = 0; i < rows->strips && rows->words > 0; i++) {
    const uint64_t *from = rows->bits + order[i] * rows->words;
    uint64_t *to = out->bits + i / out->strip_rows * out->words;
    for (int64_t w = 0; w < out->words; w++)
      to[w] |= from[w];
  }
  out->set = 0;
  for (int64_t i = 0; i < out->strips * out->words; i++)
    out->set += __builtin_popcountll(out->bits[i]);
}

static esmm_status find_order(esmm_ctx *ctx, const esmm_pattern *rows, int64_t strip_rows, int64_t *order)
{
  const size_t count = (size_t)rows->strips, most = (size_t)esmm_max(rows->strips, rows->k);
  size_t signs, sources, bytes;
  job j = {.strip_rows = strip_rows};
  if (!esmm_size_mul(count, sizeof *j.signs, &signs) || !esmm_size_mul(count, sizeof *j.sorted, &sources) ||
      !esmm_size_mul(most, sizeof *j.items, &bytes) || !esmm_size_add(bytes, signs, &bytes) ||
      !esmm_size_add(bytes, sources, &bytes))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "notes on %lld rows do not fit in memory", (long long)rows->strips);
  j.signs = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!j.signs)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "out of memory: %zu bytes to reorder %lld rows", bytes,
                     (long long)rows->strips);
  j.sorted = (source_row *)(j.signs + count);
  j.items = (ranked *)(j.sorted + count);
  memset(j.signs, 0, signs);
  sort_rows(rows, j.sorted);
  sample_bits(rows, &j);
  halve(&j, order, rows->strips);
  for (int64_t i = 0; i < rows->strips; i++)
    order[i] = j.sorted[order[i]].index;
  esmm_mem_free(&ctx->allocator, j.signs, bytes);
  return ESMM_OK;
}

static void in_order(int64_t *order, int64_t count)
{
  for (int64_t i = 0; i < count; i++)
    order[i] = i;
}

esmm_status esmm_pattern_reorder(esmm_ctx *ctx, const esmm_pattern *rows, int64_t strip_rows, int64_t *order,
                                 esmm_pattern **reordered)
{
  if (reordered)
    *reordered = NULL;
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!rows || !order)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", !rows ? "rows" : "order");
  if (rows->strip_rows != 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "rows has strips of %lld rows, must be a pattern of single rows",
                     (long long)rows->strip_rows);
  if (strip_rows < 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_rows is %lld, must be at least 1", (long long)strip_rows);
  esmm_pattern *p = NULL;
  const esmm_pattern *given = rows;
  esmm_status status = esmm_pattern_enter(ctx, "rows", given, &rows);
  if (status != ESMM_OK)
    return status;
  status = esmm_pattern_alloc(ctx, rows->rows, rows->k, strip_rows, &p);
  if (status != ESMM_OK) {
    esmm_pattern_leave(given, rows);
    return status;
  }
  in_order(order, rows->strips);
  or_strips(rows, order, p);
  const int64_t before = p->set;
  if (p->strips > 1 && strip_rows > 1 && before > 0) {
    status = find_order(ctx, rows, strip_rows, order);
    if (status == ESMM_OK)
      or_strips(rows, order, p);
    if (status == ESMM_OK && p->set >= before) { /* nothing is gained: leave them as they are */
      in_order(order, rows->strips);
      or_strips(rows, order, p);
    }
  }
  esmm_pattern_leave(given, rows);
  if (status == ESMM_OK && reordered)
    *reordered = p;
  else
    esmm_pattern_free(p);
  return status;
}
