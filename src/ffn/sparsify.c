/*
 * sparsify.c: at most two nonzeros of every four, along the axis that the next product sums over.
 *
 * Groups along features lie in one token's row: of features 4g to 4g + 3 those that go sparse share two places. Groups
 * along tokens are four rows, one group for each sparse column. Either way one task handles whole rows and sums into
 * its own record, and the records are added in order: the same numbers for any threads.
 */
#include "convert.h"
#include "ffn.h"
#include "threads.h"

#include <math.h>
#include <string.h>

#define GROUP 4
#define KEPT 2

typedef struct record {
  int64_t kept, dropped;
  double norm, difference; /* squared */
  double fit, own;         /* soft threshold: <x, s> and <s, s> of the shrunk values s */
} record;

typedef struct job {
  const ffn_sparsify *how;
  esmm_sparsifier kind;
  const esmm_matrix *src;
  esmm_matrix *dst;
  const int32_t *columns; /* features that go sparse */
  int64_t count;
  const int32_t *tokens; /* order of tokens, NULL: as they are */
  record *records;       /* of each token, or group of them */
  float factor;          /* soft threshold: of all that was shrunk */
} job;

/* ---- one group ---- */

/* Of four values the two largest, NaN before all, ties to the lower place; the others become 0. */
static void keep_largest(const float *v, float *out)
{
  int first = 0, second = -1;
  float rank[GROUP];
  for (int i = 0; i < GROUP; i++)
    rank[i] = isnan(v[i]) ? INFINITY : fabsf(v[i]);
  for (int i = 0; i < GROUP; i++) /* a NaN outranks an Inf */
    if (isnan(v[i]) ? !isnan(v[first]) : !isnan(v[first]) && rank[i] > rank[first])
      first = i;
  for (int i = 0; i < GROUP; i++) {
    if (i == first)
      continue;
    if (second < 0 || (isnan(v[i]) ? !isnan(v[second]) : !isnan(v[second]) && rank[i] > rank[second]))
      second = i;
  }
  for (int i = 0; i < GROUP; i++)
    out[i] = i == first || i == second ? v[i] : 0.0f;
}

/* Shrinks all by the third largest magnitude: two at most are left. */
static void shrink(const float *v, float *out)
{
  float largest[3] = {0};
  for (int i = 0; i < GROUP; i++) {
    float x = fabsf(v[i]);
    for (int j = 0; j < 3; j++)
      if (x > largest[j]) {
        const float moved = largest[j];
        largest[j] = x;
        x = moved;
      }
  }
  for (int i = 0; i < GROUP; i++)
    out[i] = fabsf(v[i]) > largest[2] ? copysignf(fabsf(v[i]) - largest[2], v[i]) : 0.0f;
}

/*
 * Two of four at random, each with probability p and then divided by it, so that the mean is what it was. The sum of
 * the variances, x^2 (1 / p - 1), is least where p follows the magnitude; a value with p above 1 stays for certain, and
 * the others share the rest. `u` in [0, 1) picks the places u and u + 1 on a line of length 2 on which each value takes
 * up its p: as no p is above 1, they are two different ones.
 */
static void draw(const float *v, double u, float *out)
{
  double rest = 0.0, p[GROUP];
  int largest = 0;
  for (int i = 1; i < GROUP; i++)
    largest = fabsf(v[i]) > fabsf(v[largest]) ? i : largest;
  for (int i = 0; i < GROUP; i++)
    rest += i == largest ? 0.0 : (double)fabsf(v[i]);
  const double most = (double)fabsf(v[largest]);
  for (int i = 0; i < GROUP; i++) {
    const double x = (double)fabsf(v[i]);
    p[i] = most <= rest ? 2.0 * x / (most + rest) : i == largest ? 1.0 : x / rest;
  }
  double from = 0.0;
  int last = -1, picked = 0;
  for (int i = 0; i < GROUP; i++) {
    const double to = from + p[i];
    const bool in = (from <= u && u < to) || (from <= u + 1.0 && u + 1.0 < to);
    out[i] = in && picked < KEPT ? (float)((double)v[i] / p[i]) : 0.0f;
    picked += in;
    last = p[i] > 0.0 ? i : last;
    from = to;
  }
  if (picked < KEPT && out[last] == 0.0f) /* the line came out short by rounding */
    out[last] = (float)((double)v[last] / p[last]);
}

/* `place` is the group's number in its matrix. Returns whether the group counts for the soft threshold's scale. */
static bool choose(const job *j, const float *v, uint64_t place, float *out)
{
  int nonzeros = 0;
  bool finite = true;
  for (int i = 0; i < GROUP; i++) {
    nonzeros += v[i] != 0.0f;
    finite = finite && isfinite(v[i]);
  }
  if (!finite)
    keep_largest(v, out);
  else if (nonzeros <= KEPT)
    memcpy(out, v, GROUP * sizeof *out);
  else if (j->kind == ESMM_SPARSIFY_TOP_N)
    keep_largest(v, out);
  else if (j->kind == ESMM_SPARSIFY_SOFT)
    shrink(v, out);
  else {
    uint64_t state = j->how->seed ^ place * 0xd1342543de82ef95u;
    draw(v, (double)(ffn_random(&state) >> 11) * 0x1p-53, out);
  }
  return finite;
}

/* ---- rows ---- */

static void note_row(const job *j, int64_t row, record *r)
{
  const int64_t at = row * j->src->ld;
  for (int64_t c = 0; c < j->src->cols; c++) {
    const double x = (double)esmm_load_element(j->src->data, j->src->dtype, at + c);
    const double y = (double)esmm_load_element(j->dst->data, j->dst->dtype, at + c);
    r->kept += x != 0.0 && y != 0.0;
    r->dropped += x != 0.0 && y == 0.0;
    r->norm += x * x;
    r->difference += x == y || isnan(x) ? 0.0 : (x - y) * (x - y);
  }
}

/* One group: elements at[0..GROUP) of src and dst, -1 for those that are not there. */
static inline void do_group(const job *j, const int64_t *at, uint64_t place, record *r)
{
  float v[GROUP], out[GROUP];
  bool any = false;
  for (int i = 0; i < GROUP; i++) {
    v[i] = at[i] < 0 ? 0.0f : esmm_load_element(j->src->data, j->src->dtype, at[i]);
    any = any || v[i] != 0.0f;
  }
  if (!any)
    return;
  const bool finite = choose(j, v, place, out);
  for (int i = 0; i < GROUP; i++) {
    if (at[i] >= 0)
      esmm_store_element(j->dst->data, j->dst->dtype, at[i], out[i]);
    if (finite && j->kind == ESMM_SPARSIFY_SOFT) {
      r->fit += (double)v[i] * (double)out[i];
      r->own += (double)out[i] * (double)out[i];
    }
  }
}

static inline int64_t place_of(const job *j, int64_t i)
{
  const int32_t feature = j->columns[i];
  return j->how->places ? j->how->places[feature] : feature;
}

static void along_features(const job *j, int64_t token, record *r)
{
  const int64_t row = token * j->src->ld;
  for (int64_t i = 0; i < j->count;) {
    const int32_t group = j->columns[i] / GROUP;
    int64_t at[GROUP] = {-1, -1, -1, -1};
    for (; i < j->count && j->columns[i] / GROUP == group; i++) {
      const int64_t column = place_of(j, i);
      at[j->columns[i] % GROUP] = column < 0 ? -1 : row + column;
    }
    do_group(j, at, (uint64_t)token << 32 | (uint64_t)group, r);
  }
}

static inline int64_t token_at(const job *j, int64_t i)
{
  return i >= j->src->rows ? -1 : j->tokens ? j->tokens[i] : i;
}

static void along_tokens(const job *j, int64_t group, record *r)
{
  int64_t rows[GROUP];
  for (int64_t i = 0; i < GROUP; i++)
    rows[i] = token_at(j, group * GROUP + i);
  for (int64_t i = 0; i < j->count; i++) {
    const int64_t column = place_of(j, i);
    if (column < 0)
      continue;
    int64_t at[GROUP];
    for (int x = 0; x < GROUP; x++)
      at[x] = rows[x] < 0 ? -1 : rows[x] * j->src->ld + column;
    do_group(j, at, (uint64_t)j->columns[i] << 32 | (uint64_t)group, r);
  }
}

/* The soft threshold's second pass: all that went sparse times the factor. */
static void scale_row(const job *j, int64_t row, float factor)
{
  for (int64_t i = 0; i < j->count; i++) {
    const int64_t column = place_of(j, i), at = row * j->dst->ld + column;
    if (column >= 0)
      esmm_store_element(j->dst->data, j->dst->dtype, at, factor * esmm_load_element(j->dst->data, j->dst->dtype, at));
  }
}

static void copy_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const job *j = arg;
  const size_t line = (size_t)j->src->cols * esmm_dtype_size(j->src->dtype);
  memcpy((char *)j->dst->data + (size_t)first * line, (const char *)j->src->data + (size_t)first * line,
         (size_t)(end - first) * line);
}

static void do_tasks(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const job *j = arg;
  for (int64_t task = first; task < end; task++)
    if (j->how->axis == FFN_ALONG_FEATURES)
      along_features(j, task, &j->records[task]);
    else
      along_tokens(j, task, &j->records[task]);
}

static void finish_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const job *j = arg;
  for (int64_t t = first; t < end; t++) {
    if (j->kind == ESMM_SPARSIFY_SOFT && j->factor != 1.0f)
      scale_row(j, t, j->factor);
    note_row(j, t, &j->records[t]);
  }
}

esmm_status esmm_ffn_sparsify_matrix(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparsify *how,
                                     const esmm_matrix *src, esmm_matrix *dst)
{
  esmm_ffn_drop *drop = &cache->drops[how->drop];
  const esmm_ffn_opts *o = &cache->ffn->o;
  job j = {.how = how,
           .kind = o->sparsifier,
           .src = src,
           .dst = dst,
           .columns = ffn_numbers(cache, FFN_COLUMNS),
           .count = cache->sparse,
           .tokens = o->permute_tokens ? ffn_numbers(cache, FFN_TOKENS) : NULL};
  const bool features = how->axis == FFN_ALONG_FEATURES;
  const int64_t tokens = src->rows, tasks = features ? tokens : esmm_ceil_div(tokens, GROUP);
  const esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_PARTIAL, 1, tokens, sizeof(record));
  if (status != ESMM_OK)
    return status;
  record *records = j.records = cache->buffers[FFN_PARTIAL].data, all = {0};
  memset(records, 0, (size_t)tokens * sizeof *records);
  const int64_t rows = esmm_at_once(src->cols, (int64_t)esmm_dtype_size(src->dtype)), few = esmm_ceil_div(rows, GROUP);
  esmm_for(ctx, ctx->threads, tokens, rows, copy_rows, &j);
  esmm_for(ctx, ctx->threads, tasks, few, do_tasks, &j);
  for (int64_t task = 0; task < tasks; task++) {
    all.fit += records[task].fit;
    all.own += records[task].own;
  }
  j.factor = all.own > 0.0 ? (float)(all.fit / all.own) : 1.0f;
  esmm_for(ctx, ctx->threads, tokens, few, finish_rows, &j);
  for (int64_t t = 0; t < tokens; t++) {
    drop->kept += records[t].kept;
    drop->dropped += records[t].dropped;
    all.norm += records[t].norm;
    all.difference += records[t].difference;
  }
  drop->norm = hypot(drop->norm, sqrt(all.norm));
  drop->norm_dropped = hypot(drop->norm_dropped, sqrt(all.difference));
  return ESMM_OK;
}
