/*
 * cpu.c: a layer's passes on a CPU (passes.h). Its memory is the host's, its products prepare their B for the one call,
 * and its gradients between products are fp32.
 */
#include "activation.h"
#include "convert.h"
#include "cpu/epilogue.h"
#include "ffn.h"
#include "threads.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ---- */

static esmm_status alloc(esmm_ctx *ctx, size_t bytes, void **memory)
{
  *memory = esmm_mem_alloc(&ctx->allocator, bytes);
  return *memory ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of the layer's", bytes);
}

static void release(const esmm_allocator *allocator, int ordinal, void *memory, size_t bytes)
{
  (void)ordinal;
  esmm_mem_free(allocator, memory, bytes);
}

static esmm_status copy_bias(esmm_ctx *ctx, const float *from, int64_t n, float *to)
{
  (void)ctx;
  memcpy(to, from, (size_t)n * sizeof *to);
  return ESMM_OK;
}

/* ---- B of products ---- */

/* Weights that soon change get no library's layout: making it takes longer than the library's product saves. So the
   limit is below B's own forms and one more: two of them, or one for large m only. */
#define RATIO_WITHOUT_LIBRARY 2.0
#define RATIO_OF_ONE_FORM 1.5

static esmm_status prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, bool given,
                           esmm_weights *old, esmm_weights **out)
{
  (void)given;
  (void)old;
  esmm_prepare_opts o = *opts;
  const bool one_form = o.use == ESMM_USE_LARGE_M && o.format.kind == ESMM_FORMAT_DENSE;
  if (o.max_bytes_ratio == 0.0)
    o.max_bytes_ratio = one_form ? RATIO_OF_ONE_FORM : RATIO_WITHOUT_LIBRARY;
  return esmm_prepare(ctx, b, &o, out);
}

static esmm_status take_b(esmm_ctx *ctx, esmm_ffn_cache *cache, ffn_b which, const esmm_matrix *b, esmm_dtype a,
                          bool strict, esmm_weights **out)
{
  (void)cache;
  (void)which;
  (void)a;
  const esmm_prepare_opts opts = {.size = sizeof opts, .strict = strict, .max_bytes_ratio = RATIO_WITHOUT_LIBRARY};
  return esmm_prepare(ctx, b, &opts, out);
}

static void put_back(esmm_ffn_cache *cache, ffn_b which, esmm_weights *w)
{
  (void)cache;
  (void)which;
  esmm_weights_free(w);
}

/* ---- h ---- */

/* h = act(gate) * up, or act(up) where there is no gate. */
typedef struct activating {
  esmm_activation activation;
  const esmm_matrix *up, *gate; /* gate may be NULL */
  esmm_matrix *h;
} activating;

static void activate_rows(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const activating *a = arg;
  for (int64_t t = first; t < end; t++)
    for (int64_t f = 0; f < a->h->cols; f += VEC) {
      const int64_t count = esmm_min(VEC, a->h->cols - f);
      const vec x = esmm_read_part(a->up, t, f, count);
      const vec y = a->gate ? vec_mul(esmm_activate_vec(a->activation, esmm_read_part(a->gate, t, f, count)), x)
                            : esmm_activate_vec(a->activation, x);
      esmm_write_part(a->h, t, f, count, y);
    }
}

static esmm_status activate(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *up, const esmm_matrix *gate,
                            esmm_matrix *h)
{
  activating a = {.activation = ffn->o.activation, .up = up, .gate = gate, .h = h};
  esmm_for(ctx, ctx->threads, h->rows, esmm_at_once(1, h->cols * (int64_t)sizeof(float)), activate_rows, &a);
  return ESMM_OK;
}

/* ---- statistics ---- */

typedef struct counting {
  const esmm_matrix *m;
  bool above;
  int32_t *counts;
} counting;

enum { WIDTH = 512 };

/* first, end: in stretches of WIDTH columns */
static void count_stretches(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const counting *x = arg;
  const esmm_matrix *m = x->m;
  for (int64_t from = first * WIDTH; from < esmm_min(end * WIDTH, m->cols); from += WIDTH) {
    const int64_t width = esmm_min(WIDTH, m->cols - from);
    int32_t *counts = x->counts + from;
    memset(counts, 0, (size_t)width * sizeof *counts);
    for (int64_t t = 0; t < m->rows; t++) {
      float line[WIDTH];
      esmm_load_elements(m->data, m->dtype, t * m->ld + from, 1, width, line, 1);
      for (int64_t f = 0; f < width; f++)
        counts[f] += x->above ? !(line[f] <= 0.0f) : line[f] != 0.0f;
    }
  }
}

/* counts[f]: elements of column f of m that are not zero, or, with `above`, that are not zero or less. */
static void count_columns(const esmm_ctx *ctx, const esmm_matrix *m, bool above, int32_t *counts)
{
  counting x = {.m = m, .above = above, .counts = counts};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(m->cols, WIDTH), esmm_at_once(m->rows, WIDTH * (int64_t)sizeof(float)),
           count_stretches, &x);
}

static int by_key(const void *x, const void *y)
{
  const uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
  return a < b ? -1 : a > b;
}

static int by_number(const void *x, const void *y)
{
  const int32_t a = *(const int32_t *)x, b = *(const int32_t *)y;
  return a < b ? -1 : a > b;
}

/* FFN_ORDER and FFN_COLUMNS from the counts. */
static void rank_columns(const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  const int64_t features = ffn->o.d_hidden;
  const int32_t *counts = ffn_numbers(cache, FFN_COUNTS);
  const int32_t *open = ffn->branches > 1 && ffn_makes_zeros(ffn) && !once ? ffn_numbers(cache, FFN_OPEN) : counts;
  uint64_t *keys = cache->buffers[FFN_KEYS].data;
  int32_t *order = cache->buffers[FFN_ORDER].data, *columns = cache->buffers[FFN_COLUMNS].data;
  cache->nonzeros = cache->alive_columns = cache->alive = 0;
  for (int64_t f = 0; f < features; f++) {
    keys[f] = (uint64_t)(uint32_t)counts[f] << 32 | (uint64_t)f;
    cache->nonzeros += counts[f];
    cache->alive_columns += counts[f] > 0;
  }
  qsort(keys, (size_t)features, sizeof *keys, by_key);
  for (int64_t i = 0; i < features; i++) {
    const int32_t f = (int32_t)(keys[i] & INT32_MAX);
    if (open[f] > 0 || !ffn_makes_zeros(ffn))
      order[cache->alive++] = f;
  }
  for (int64_t i = 0; i < cache->sparse; i++)
    columns[i] = (int32_t)(keys[i] & INT32_MAX);
  qsort(columns, (size_t)cache->sparse, sizeof *columns, by_number);
}

static esmm_status count_h(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const esmm_matrix h = esmm_ffn_view(cache, FFN_H, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
  const esmm_status status = esmm_pattern_extract(ctx, &h, FFN_STRIP, &cache->pattern);
  if (status == ESMM_OK)
    count_columns(ctx, &h, false, cache->buffers[FFN_COUNTS].data);
  return status;
}

static esmm_status rank(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once)
{
  const esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_KEYS, 1, ffn->o.d_hidden, sizeof(uint64_t));
  if (status != ESMM_OK)
    return status;
  if (!once && ffn->branches > 1 && ffn_makes_zeros(ffn)) {
    const esmm_matrix gate = esmm_ffn_view(cache, FFN_PRE_GATE, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
    count_columns(ctx, &gate, true, cache->buffers[FFN_OPEN].data);
  }
  rank_columns(ffn, cache, once);
  if (ffn->o.permute_tokens && !once && cache->shuffled != cache->tokens) {
    esmm_ffn_shuffle_tokens(ffn->o.seed, cache->tokens, cache->buffers[FFN_TOKENS].data);
    cache->shuffled = cache->tokens;
  }
  return ESMM_OK;
}

/* ---- dh and dpre ---- */

/* m as fp32 rows: itself, or gathered. *order becomes NULL where its rows are now in order. */
static esmm_status as_rows(esmm_ctx *ctx, esmm_ffn_cache *cache, int buffer, const esmm_matrix *m,
                           const int32_t **order, int64_t rows, esmm_matrix *out)
{
  *out = *m;
  if (m->dtype == ESMM_F32 && m->order == ESMM_ROW_MAJOR)
    return ESMM_OK;
  const esmm_status status = esmm_ffn_matrix(ctx, cache, buffer, rows, m->cols, ESMM_F32, out);
  if (status == ESMM_OK)
    (void)esmm_ffn_gather_rows(ctx, m, *order, rows, out);
  *order = NULL;
  return status;
}

/* Elements of the layer where dh is needed, as a share of those it would be computed for. */
static double alive_density(const esmm_ffn *ffn, const esmm_ffn_cache *cache, int64_t features)
{
  const int32_t *counts = ffn_numbers(cache, ffn->branches > 1 ? FFN_OPEN : FFN_COUNTS);
  double sum = 0.0;
  for (int64_t f = 0; f < ffn->o.d_hidden; f++)
    sum += counts[f];
  const double all = (double)cache->tokens * (double)features;
  return all > 0 ? sum / all : 1.0;
}

static esmm_status masked(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *dt,
                          const esmm_matrix *h, const int32_t *order, esmm_matrix *dh, bool *done)
{
  const int32_t *none = NULL;
  ffn_masked job = {.out = *dh, .w_rows = order, .alive = *h};
  if (alive_density(ffn, cache, dh->cols) >= FFN_MASKED)
    return ESMM_OK;
  *done = true;
  if (ffn->branches > 1) {
    job.alive = esmm_ffn_view(cache, FFN_PRE_GATE, cache->tokens, ffn->o.d_hidden, ffn->o.dtype);
    job.columns = order;
  }
  esmm_status status = as_rows(ctx, cache, FFN_WIDE_DT, dt, &none, dt->rows, &job.dt);
  if (status == ESMM_OK)
    status = as_rows(ctx, cache, FFN_WEIGHTS, &ffn->params.contract.matrix, &job.w_rows, dh->cols, &job.w);
  if (status == ESMM_OK)
    esmm_ffn_masked_run(ctx, &job);
  return status;
}

typedef struct deriving {
  const ffn_derivative *job;
  esmm_activation activation;
  float *rows; /* two a thread */
} deriving;

/* dh of some tokens becomes dpre of the up branch, and of the gate. */
static void derive_rows(void *arg, int64_t first, int64_t end, int worker)
{
  const deriving *x = arg;
  const ffn_derivative *job = x->job;
  const esmm_activation activation = x->activation;
  const int64_t n = job->dpre->cols;
  float *a = x->rows + 2 * n * worker, *b = a + n;
  for (int64_t t = first; t < end; t++) {
    float *d = (float *)job->dpre->data + t * n;
    if (!job->up) {
      esmm_ffn_load_row(job->h, t, NULL, n, a);
      for (int64_t i = 0; i < n; i++)
        d[i] *= ffn_slope_of_result((int)activation, a[i]);
      continue;
    }
    esmm_ffn_load_row(job->up, t, job->order, n, a);
    if (!job->gate) {
      for (int64_t i = 0; i < n; i++)
        d[i] *= ffn_slope(activation, a[i]);
      continue;
    }
    float *d_gate = (float *)job->dpre_gate->data + t * n;
    esmm_ffn_load_row(job->gate, t, job->order, n, b);
    for (int64_t i = 0; i < n; i++)
      d_gate[i] = d[i] * a[i] * ffn_slope(activation, b[i]);
    for (int64_t i = 0; i < n; i += VEC) {
      const int64_t count = esmm_min(VEC, n - i);
      const vec y = esmm_activate_vec(activation, esmm_load_part(b + i, count));
      esmm_write_part(job->dpre, t, i, count, vec_mul(esmm_load_part(d + i, count), y));
    }
  }
}

static esmm_status derive(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const ffn_derivative *job)
{
  const esmm_status status =
      esmm_ffn_reserve(ctx, cache, FFN_ROWS, 2 * (int64_t)ctx->threads, job->dpre->cols, sizeof(float));
  if (status != ESMM_OK)
    return status;
  deriving x = {.job = job, .activation = ffn->o.activation, .rows = cache->buffers[FFN_ROWS].data};
  esmm_for(ctx, ctx->threads, job->dpre->rows, esmm_at_once(1, job->dpre->cols * (int64_t)sizeof(float)), derive_rows,
           &x);
  return ESMM_OK;
}

/* ---- few tokens, the gate first ---- */

/* If some token's gate opens more than this share of features, all of x W1 is one product, which reads W1 in one go. */
#define DECODE_OPEN 0.5

static bool lies_turned(const esmm_matrix *w1)
{
  return w1->dtype == ESMM_F32 && w1->order == ESMM_COL_MAJOR;
}

/* w1 feature by feature, as fp32, from the caller's. */
static void turn(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const esmm_matrix w1 = ffn_transposed(ffn->params.in[FFN_UP].expand.matrix);
  esmm_matrix turned = esmm_ffn_view(cache, FFN_TURNED, w1.rows, w1.cols, ESMM_F32);
  (void)esmm_ffn_gather_rows(ctx, &w1, NULL, w1.rows, &turned);
  cache->turned = ffn->generation;
}

static esmm_status can_decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                              esmm_matrix *gate)
{
  const esmm_status status = esmm_ffn_matrix(ctx, cache, FFN_PRE_GATE, x->rows, ffn->o.d_hidden, ESMM_F32, gate);
  if (status != ESMM_OK)
    gate->data = NULL;
  return status;
}

/* How many features have a gate that is not 0. */
static int64_t count_open(const esmm_ctx *ctx, const esmm_matrix *gate, int32_t *counts)
{
  int64_t open = 0;
  count_columns(ctx, gate, true, counts);
  for (int64_t f = 0; f < gate->cols; f++)
    open += counts[f] > 0;
  return open;
}

typedef struct adding {
  const float *bias;
  esmm_matrix *up;
} adding;

static void add_bias(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const adding *x = arg;
  for (int64_t t = first; t < end; t++)
    for (int64_t f = 0; f < x->up->cols; f++)
      ((float *)x->up->data)[t * x->up->ld + f] += x->bias[f];
}

/* x W1 + b1 where the gate is open, and anything elsewhere. */
static esmm_status make_open(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                             const esmm_matrix *gate, esmm_matrix *up)
{
  const ffn_branch *branch = &ffn->params.in[FFN_UP];
  const int32_t *none = NULL;
  ffn_masked job = {.alive = *gate, .out = *up};
  const bool turned = lies_turned(&branch->expand.matrix);
  esmm_status status =
      turned ? ESMM_OK : esmm_ffn_reserve(ctx, cache, FFN_TURNED, ffn->o.d_hidden, ffn->o.d_model, sizeof(float));
  if (status == ESMM_OK)
    status = as_rows(ctx, cache, FFN_WIDE_DT, x, &none, x->rows, &job.dt);
  if (status != ESMM_OK)
    return status;
  if (!turned && cache->turned != ffn->generation)
    turn(ctx, ffn, cache);
  job.w = turned ? ffn_transposed(branch->expand.matrix)
                 : esmm_ffn_view(cache, FFN_TURNED, ffn->o.d_hidden, ffn->o.d_model, ESMM_F32);
  esmm_ffn_masked_run(ctx, &job);
  adding adds = {.bias = branch->bias, .up = up};
  if (branch->bias)
    esmm_for(ctx, ctx->threads, up->rows, esmm_at_once(1, up->cols * (int64_t)sizeof(float)), add_bias, &adds);
  return ESMM_OK;
}

static esmm_status decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                          const esmm_matrix *gate, esmm_matrix *h, esmm_matrix *y)
{
  const ffn_branch *branch = &ffn->params.in[FFN_UP];
  (void)y;
  esmm_matrix up;
  esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_OPEN, 1, gate->cols, sizeof(int32_t));
  if (status == ESMM_OK)
    status = esmm_ffn_matrix(ctx, cache, FFN_PRE_UP, x->rows, gate->cols, ESMM_F32, &up);
  if (status == ESMM_OK)
    status = esmm_ffn_matrix(ctx, cache, FFN_H, x->rows, gate->cols, ffn->o.dtype, h);
  if (status != ESMM_OK)
    return status;
  const int64_t open = count_open(ctx, gate, cache->buffers[FFN_OPEN].data);
  if ((double)open > DECODE_OPEN * (double)gate->cols) {
    const esmm_matmul_opts opts = {.size = sizeof opts, .bias = branch->bias};
    status = esmm_matmul(ctx, x, branch->expand.prepared, &up, &opts, NULL);
  } else {
    status = make_open(ctx, ffn, cache, x, gate, &up);
  }
  return status == ESMM_OK ? activate(ctx, ffn, &up, gate, h) : status;
}

static esmm_status renew(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  if (cache->buffers[FFN_TURNED].data && !lies_turned(&ffn->params.in[FFN_UP].expand.matrix))
    turn(ctx, ffn, cache);
  return ESMM_OK;
}

/* ---- counts of alive and dropped elements ---- */

static esmm_status settle(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  const int32_t *order = ffn_numbers(cache, FFN_ORDER);
  const esmm_status status = esmm_ffn_reserve(ctx, cache, FFN_PLACES, 1, ffn->o.d_hidden, sizeof(int32_t));
  if (status != ESMM_OK)
    return status;
  int32_t *places = cache->buffers[FFN_PLACES].data;
  for (int64_t f = 0; f < ffn->o.d_hidden; f++)
    places[f] = -1;
  for (int64_t i = 0; i < cache->alive; i++)
    places[order[i]] = (int32_t)i;
  return ESMM_OK;
}

static esmm_status forget_drops(esmm_ctx *ctx, esmm_ffn_cache *cache, bool forward)
{
  (void)ctx;
  for (int i = 0; i < FFN_DROPS; i++)
    if (forward == (i == FFN_DROP_Y))
      cache->drops[i] = (esmm_ffn_drop){0};
  return ESMM_OK;
}

/* All but the pattern's density is there already. */
static esmm_status report(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache)
{
  (void)ctx;
  (void)ffn;
  cache->strip_density = esmm_pattern_density(cache->pattern);
  return ESMM_OK;
}

const ffn_passes esmm_ffn_cpu = {
    .patterns = true,
    .wide = true,
    .compacts = 1u << ESMM_FFN_EXACT | 1u << ESMM_FFN_SPLIT | 1u << ESMM_FFN_SPARSE,
    .step = 1,
    .alloc = alloc,
    .release = release,
    .copy_bias = copy_bias,
    .prepare = prepare,
    .take_b = take_b,
    .put_back = put_back,
    .activate = activate,
    .count = count_h,
    .rank = rank,
    .can_decode = can_decode,
    .decode = decode,
    .renew = renew,
    .derive = derive,
    .masked = masked,
    .settle = settle,
    .sparsify = esmm_ffn_sparsify_matrix,
    .forget_drops = forget_drops,
    .gather_rows = esmm_ffn_gather_rows,
    .gather_columns = esmm_ffn_gather_columns,
    .scatter_rows = esmm_ffn_scatter_rows,
    .column_sums = esmm_ffn_column_sums,
    .report = report,
};
