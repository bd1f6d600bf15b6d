/*
 * masked.h: dh = dt W' only where h is alive: a dot product for each such element. Included once by each masked_*.c
 * after a vec_*.h.
 *
 * A task takes a stretch of features whose rows of W fit in the second-level cache, and runs over its tokens: the
 * token's row of dt is read once for all features that are alive in it, four of them side by side. A dense product
 * reuses what it loads better, so it wins where more than a fifth or so is alive (FFN_MASKED).
 */
#include "convert.h"
#include "ffn.h"
#include "threads.h"

#include <string.h>

#define CACHED ((int64_t)512 << 10) /* bytes of W a stretch may have */
#define MOST_FEATURES 256
#define TOKENS 128 /* of one task */
#define SIDE 4     /* dot products at a time */

/* Halves onto halves: after log2(VEC) steps one lane is left. */
static inline float add_up(vec x)
{
  float lanes[VEC];
  vec_store(lanes, x);
#pragma GCC unroll 4
  for (int half = VEC / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++)
      lanes[i] += lanes[i + half];
  return lanes[0];
}

/* out[i] = x . y[i], for SIDE rows y; each sum in two chains of whole vectors. */
static void dots(const float *x, const float *const *y, int64_t d, float *out)
{
  vec even[SIDE], odd[SIDE];
  for (int i = 0; i < SIDE; i++)
    even[i] = odd[i] = vec_zero();
  int64_t k = 0;
  for (; k + 2 * VEC <= d; k += 2 * VEC) {
    const vec x0 = vec_load(x + k), x1 = vec_load(x + k + VEC);
#pragma GCC unroll 4
    for (int i = 0; i < SIDE; i++) {
      even[i] = vec_fma(x0, vec_load(y[i] + k), even[i]);
      odd[i] = vec_fma(x1, vec_load(y[i] + k + VEC), odd[i]);
    }
  }
  for (int i = 0; i < SIDE; i++) {
    float sum = add_up(vec_add(even[i], odd[i]));
    for (int64_t rest = k; rest < d; rest++)
      sum += x[rest] * y[i][rest];
    out[i] = sum;
  }
}

/* The features of first..last that are alive in token t, as a list; out becomes 0 at all of them. */
static inline int64_t list_alive(const ffn_masked *job, int64_t t, int64_t first, int64_t last, int32_t *list)
{
  float *out = (float *)job->out.data + t * job->out.ld;
  int64_t n = 0;
  memset(out + first, 0, (size_t)(last - first) * sizeof *out);
  if (job->alive.dtype == ESMM_F32 && !job->columns) {
    const float *alive = (const float *)job->alive.data + t * job->alive.ld;
    for (int64_t i = first; i < last; i++) {
      list[n] = (int32_t)i;
      n += !(alive[i] <= 0.0f);
    }
    return n;
  }
  for (int64_t i = first; i < last; i++) {
    const int64_t at = t * job->alive.ld + (job->columns ? job->columns[i] : i);
    list[n] = (int32_t)i;
    n += !(esmm_load_element(job->alive.data, job->alive.dtype, at) <= 0.0f);
  }
  return n;
}

/* Features first..last of the tokens from..to. */
static void masked_block(const ffn_masked *job, int64_t first, int64_t last, int64_t from, int64_t to)
{
  int32_t list[MOST_FEATURES + 1];
  for (int64_t t = from; t < to; t++) {
    const float *x = (const float *)job->dt.data + t * job->dt.ld;
    float *out = (float *)job->out.data + t * job->out.ld;
    const int64_t n = list_alive(job, t, first, last, list);
    for (int64_t i = 0; i < n; i += SIDE) {
      const float *y[SIDE];
      float sums[SIDE];
      for (int64_t s = 0; s < SIDE; s++) { /* the last few may be fewer: the last one then stands in */
        const int64_t feature = list[esmm_min(i + s, n - 1)];
        y[s] = (const float *)job->w.data + (job->w_rows ? job->w_rows[feature] : feature) * job->w.ld;
      }
      dots(x, y, job->dt.cols, sums);
      for (int64_t s = 0; s < SIDE && i + s < n; s++)
        out[list[i + s]] = sums[s];
    }
  }
}

typedef struct masked_tasks {
  const ffn_masked *job;
  int64_t wide, bands;
} masked_tasks;

static void masked_piece(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const masked_tasks *x = arg;
  const int64_t tokens = x->job->out.rows, features = x->job->out.cols;
  for (int64_t task = first; task < end; task++) {
    const int64_t feature = task / x->bands * x->wide, from = task % x->bands * TOKENS;
    masked_block(x->job, feature, esmm_min(feature + x->wide, features), from, esmm_min(from + TOKENS, tokens));
  }
}

static void masked_all(const esmm_ctx *ctx, const ffn_masked *job)
{
  const int64_t bytes = 4 * esmm_max(1, job->w.ld), wide = esmm_max(16, esmm_min(MOST_FEATURES, CACHED / bytes));
  masked_tasks x = {.job = job, .wide = wide, .bands = esmm_ceil_div(job->out.rows, TOKENS)};
  esmm_for(ctx, ctx->threads, x.bands * esmm_ceil_div(job->out.cols, wide), 1, masked_piece, &x);
}
