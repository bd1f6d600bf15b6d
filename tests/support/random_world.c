/* random_world.c: random numbers, operands and prepared weights for test_random.c; see random_calls.h. */
#include "bsr_arrays.h"
#include "random_calls.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int64_t below(world *w, int64_t n)
{
  return th_below(&w->rng, n);
}

bool chance(world *w, double share)
{
  return th_unit(&w->rng) < share;
}

int64_t about(world *w, int64_t least, int64_t most)
{
  return least + (int64_t)(exp(th_unit(&w->rng) * log((double)(most - least + 2))) - 1);
}

esmm_dtype any_dtype(world *w)
{
  static const esmm_dtype dtypes[] = {ESMM_F32, ESMM_F32, ESMM_BF16, ESMM_BF16, ESMM_F16};
  return dtypes[below(w, 5)];
}

esmm_order any_order(world *w)
{
  return chance(w, 0.25) ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
}

void say(world *w, const char *format, ...)
{
  const size_t used = strlen(w->now);
  va_list args;
  va_start(args, format);
  vsnprintf(w->now + used, sizeof w->now - used, format, args);
  va_end(args);
}

void must_be(world *w, esmm_status got, esmm_status want)
{
  if (got != want)
    fail_msg("%s: status %d (%s), expected %d: %s", w->now, (int)got, esmm_status_str(got), (int)want,
             esmm_ctx_error(w->ctx));
}

/* ---- operands ---- */

static double draw(world *w, value_kind kind)
{
  if (kind == REAL)
    return 2 * th_unit(&w->rng) - 1;
  const int64_t x = below(w, 6) - 3;
  return (double)(x < 0 ? x : x + 1) / (chance(w, 0.3) ? 2 : 1);
}

void draw_values(world *w, double *values, int64_t rows, int64_t cols, value_kind kind, bool k_is_cols)
{
  enum { NONE, SINGLE, STRIPS, DEAD, ALL, KINDS };
  static const double densities[] = {0.01, 0.05, 0.1, 0.25, 0.5, 0.9};
  const int zeros = chance(w, 0.02) ? ALL : (int)below(w, KINDS - 1);
  const double density = zeros == ALL ? 0 : densities[below(w, 6)];
  const int64_t strip = (int64_t[]){1, 4, 8, 32, 128}[below(w, 5)];
  const uint64_t seed = th_next(&w->rng);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      const int64_t line = k_is_cols ? i : j, k = k_is_cols ? j : i;
      bool alive = zeros == NONE || (zeros == SINGLE && chance(w, density));
      if (zeros == STRIPS || zeros == DEAD) {
        th_rng place = {seed ^ (uint64_t)(k * 7919 + (zeros == DEAD ? 0 : line / strip)) * 0x9e3779b97f4a7c15u};
        alive = th_unit(&place) < density;
      }
      values[i * cols + j] = alive ? draw(w, kind) : chance(w, 0.2) ? -0.0 : 0;
    }
  static const double special[] = {NAN, INFINITY, -INFINITY};
  for (int64_t count = kind == SPECIAL && rows * cols > 0 ? 1 + below(w, 3) : 0; count > 0; count--)
    values[below(w, rows * cols)] = special[below(w, 3)];
}

esmm_matrix place_values(world *w, int arena, int64_t rows, int64_t cols, esmm_dtype dtype, double *values)
{
  esmm_matrix m;
  th_matrix_place(&w->arena[arena], &m, rows, cols, chance(w, 0.4) ? below(w, 9) : 0, dtype, any_order(w));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      values[i * cols + j] = th_round(dtype, values[i * cols + j]);
      th_set(&m, i, j, values[i * cols + j]);
    }
  return m;
}

bool padding_intact(const esmm_matrix *m)
{
  const bool by_rows = m->order == ESMM_ROW_MAJOR;
  const int64_t lines = by_rows ? m->rows : m->cols, length = by_rows ? m->cols : m->rows;
  const size_t size = th_element_bytes(m->dtype);
  const unsigned char *data = m->data;
  for (int64_t i = 0; i < lines - 1; i++)
    for (size_t at = (size_t)(i * m->ld + length) * size; length > 0 && at < (size_t)((i + 1) * m->ld) * size; at++)
      if (data[at] != 0xff)
        return false;
  return true;
}

/* ---- weights ---- */

void drop_weights(held *h)
{
  esmm_weights_free(h->weights);
  free(h->values);
  *h = (held){0};
}

/* Zeros where a group holds more than the format keeps: of each group the columns of a strip keep the same k's. */
static void make_fit(world *w, held *h)
{
  const int keep = h->format.keep, group = h->format.group, strip = h->format.group_cols > 1 ? h->format.group_cols : 1;
  for (int64_t k0 = 0; k0 < h->k; k0 += group)
    for (int64_t j0 = 0; j0 < h->n; j0 += strip) {
      int kept = 0;
      for (int64_t k = k0; k < k0 + group && k < h->k; k++) {
        if (kept < keep && chance(w, 0.7)) {
          kept++;
          continue;
        }
        for (int64_t j = j0; j < j0 + strip && j < h->n; j++)
          h->values[k * h->n + j] = 0;
      }
    }
}

static esmm_format any_format(world *w)
{
  static const int sizes[] = {1, 2, 4, 8, 16, 32, 33, 64, 100};
  esmm_format f = {.kind = ESMM_FORMAT_DENSE};
  if (chance(w, 0.2)) {
    f.kind = ESMM_FORMAT_BSR;
    f.block_rows = sizes[below(w, 9)];
    f.block_cols = chance(w, 0.5) ? f.block_rows : sizes[below(w, 9)];
  } else if (chance(w, 0.2)) {
    f.kind = ESMM_FORMAT_NM;
    f.group = chance(w, 0.5) ? 4 : 1 + (int)below(w, 32);
    f.keep = f.group == 4 ? 2 : 1 + (int)below(w, f.group);
    f.group_cols = chance(w, 0.6) ? 0 : sizes[below(w, 9)];
  }
  return f;
}

static void check_to_dense(world *w, const held *h)
{
  esmm_matrix out;
  const esmm_dtype dtype = chance(w, 0.5) ? h->dtype : any_dtype(w);
  th_matrix_place(&w->arena[FOR_C], &out, h->k, h->n, below(w, 4), dtype, any_order(w));
  must_be(w, esmm_weights_to_dense(w->ctx, h->weights, &out), ESMM_OK);
  for (int64_t k = 0; k < h->k; k++)
    for (int64_t j = 0; j < h->n; j++) {
      const double want = th_round(dtype, h->values[k * h->n + j]), got = th_get(&out, k, j);
      if (got != want && !(isnan(got) && isnan(want)))
        fail_msg("%s: to_dense gives B[%d,%d] as %.9g, expected %.9g", w->now, (int)k, (int)j, got, want);
    }
  if (!th_guards_intact(&w->arena[FOR_C]) || !padding_intact(&out))
    fail_msg("%s: to_dense wrote beside its matrix", w->now);
}

/* Through a file, and back. */
static void save_and_load(world *w, held *h)
{
  char path[600];
  snprintf(path, sizeof path, "%s/random.esmm", w->dir);
  must_be(w, esmm_weights_save(w->ctx, h->weights, path), ESMM_OK);
  esmm_weights_free(h->weights);
  h->weights = NULL;
  must_be(w, esmm_weights_load(w->ctx, path, &h->weights), ESMM_OK);
}

static void check_info(world *w, const held *h)
{
  esmm_weights_info info = {.size = sizeof info};
  must_be(w, esmm_weights_get_info(h->weights, &info), ESMM_OK);
  int64_t nonzeros = 0;
  for (int64_t i = 0; i < h->k * h->n; i++)
    nonzeros += h->values[i] != 0;
  const double density = h->k * h->n > 0 ? (double)nonzeros / (double)(h->k * h->n) : 0;
  if (info.rows != h->k || info.cols != h->n || info.dtype != h->dtype || info.format.kind != h->format.kind ||
      fabs(info.element_density - density) > 1e-12)
    fail_msg("%s: info says %d x %d, dtype %d, format %d, density %.12g for %.12g", w->now, (int)info.rows,
             (int)info.cols, (int)info.dtype, (int)info.format.kind, info.element_density, density);
}

static void draw_size(world *w, int64_t *k, int64_t *n)
{
  const double kind = th_unit(&w->rng);
  const bool fixed_k = *k != 0, fixed_n = *n != 0;
  int64_t of_k = about(w, 1, 300), of_n = about(w, 1, 150);
  if (kind < 0.12) { /* on both sides of where k is cut */
    of_k = chance(w, 0.5) ? 1900 + below(w, 400) : about(w, 300, 9000);
    of_n = about(w, 1, 48);
  } else if (kind < 0.2) {
    of_n = about(w, 150, 4300);
    of_k = about(w, 1, 60);
  } else if (kind < 0.215) {
    of_k = chance(w, 0.5) ? 0 : of_k;
    of_n = chance(w, 0.5) ? 0 : of_n;
  }
  *k = fixed_k ? *k : of_k;
  *n = fixed_n ? *n : of_n;
  if (*k * *n > MOST_ELEMENTS / 8)
    *(fixed_k ? n : k) = MOST_ELEMENTS / 8 / (fixed_k ? *k : *n);
}

static esmm_status prepare_arrays(world *w, held *h, const esmm_matrix *b, const esmm_prepare_opts *opts)
{
  const bool own = h->format.kind == ESMM_FORMAT_BSR;
  const int rows = own ? h->format.block_rows : 1 + (int)below(w, 9);
  const int cols = own ? h->format.block_cols : 1 + (int)below(w, 9);
  arrays x = make_arrays(b, rows, cols, chance(w, 0.5) ? 32 : 64, any_order(w), chance(w, 0.3));
  const esmm_status status = esmm_prepare_bsr(w->ctx, &x.b, opts, &h->weights);
  free_arrays(&x);
  return status;
}

static void make_weights(world *w, held *h, int64_t k, int64_t n)
{
  draw_size(w, &k, &n);
  *h = (held){.k = k, .n = n, .dtype = any_dtype(w), .format = any_format(w)};
  h->kind = chance(w, 0.03) ? SPECIAL : chance(w, 0.2) ? REAL : WHOLE;
  h->values = calloc((size_t)(k * n + 1), sizeof *h->values);
  assert_non_null(h->values);
  draw_values(w, h->values, k, n, h->kind, false);
  if (h->format.kind == ESMM_FORMAT_NM)
    make_fit(w, h);
  esmm_matrix b = place_values(w, FOR_B, k, n, h->dtype, h->values);
  esmm_prepare_opts opts = {.size = sizeof opts,
                            .use = (esmm_use)below(w, 3),
                            .strict = h->format.kind == ESMM_FORMAT_DENSE && chance(w, 0.2),
                            .max_bytes_ratio = (double[]){0, 0, 0, 1, 1.5, 2, 3, 10}[below(w, 8)],
                            .format = h->format};
  h->strict = opts.strict || opts.use != ESMM_USE_LARGE_M;
  say(w, "B %d x %d %s %s, use %d, strict %d, ratio %g", (int)k, (int)n, esmm_dtype_str(h->dtype),
      esmm_format_str(h->format.kind), (int)opts.use, opts.strict, opts.max_bytes_ratio);
  if (h->format.kind == ESMM_FORMAT_BSR)
    say(w, " %d x %d", h->format.block_rows, h->format.block_cols);
  if (h->format.kind == ESMM_FORMAT_NM)
    say(w, " %d:%d, %d columns together", h->format.keep, h->format.group, h->format.group_cols);
  say(w, "; ");
  const bool from_arrays = chance(w, 0.15) && k * n <= 1 << 14; /* of blocks, whatever the format */
  esmm_status status = from_arrays ? prepare_arrays(w, h, &b, &opts) : esmm_prepare(w->ctx, &b, &opts, &h->weights);
  if (status == ESMM_ERR_UNSUPPORTED && strstr(esmm_ctx_error(w->ctx), "max_bytes_ratio")) {
    opts.max_bytes_ratio = 100;
    status = esmm_prepare(w->ctx, &b, &opts, &h->weights);
  }
  must_be(w, status, ESMM_OK);
  if (chance(w, 0.03))
    save_and_load(w, h);
  if (chance(w, 0.2))
    check_to_dense(w, h);
  if (chance(w, 0.2))
    check_info(w, h);
}

held *any_weights(world *w, int64_t k, int64_t n, const held *but)
{
  if (chance(w, 0.6)) {
    const int64_t first = below(w, HELD);
    for (int64_t i = 0; i < HELD; i++) {
      held *h = &w->held[(first + i) % HELD];
      if (h->weights && (k == 0 || h->k == k) && (n == 0 || h->n == n)) {
        say(w, "B %d x %d %s %s as before; ", (int)h->k, (int)h->n, esmm_dtype_str(h->dtype),
            esmm_format_str(h->format.kind));
        return h;
      }
    }
  }
  int64_t place = below(w, HELD);
  place = &w->held[place] == but ? (place + 1) % HELD : place;
  held *h = &w->held[place];
  drop_weights(h);
  make_weights(w, h, k, n);
  return h;
}
