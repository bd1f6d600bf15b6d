/*
 * model_density.c: where a weight's zeros are, and the plan's prediction for them, in little memory.
 *
 * B is looked at in bands of columns. Densities come from one bitmap a column, a bit an element, coarsened step by
 * step. For the prediction the bands are prepared, and their times add up (a GPU takes all of B at once); A is a dense
 * matrix made of one piece of memory, mapped again and again: the plan samples it.
 */
#include "models.h"
#include "verdict.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const int64_t model_strips[MODEL_STRIPS] = {8, 16, 32, 64, 128};
const int64_t model_blocks[MODEL_BLOCKS] = {16, 32, 64, 128};
const int model_groups[MODEL_GROUPS] = {4, 8, 16};

static const size_t band_bytes = (size_t)16 << 20; /* of B, prepared at once */

/* ---- bands of columns ---- */

typedef struct bands {
  const esmm_matrix *b;
  int64_t cols; /* of each but the last */
  int64_t ld;   /* in room */
  io_matrix room;
} bands;

/* The elements of a mapped tensor may lie anywhere (io_tensors.as_mapped): then only memcpy may touch them. */
static bool is_aligned(const esmm_matrix *b)
{
  return (uintptr_t)b->data % esmm_dtype_size(b->dtype) == 0;
}

/* whole_b: all of B at once, for a GPU, where a part of a product does not take a part of its time. */
static int64_t band_cols(const esmm_matrix *b, bool whole_b)
{
  const int64_t whole = 128; /* columns: every strip and block of the densities */
  const size_t column = (size_t)(b->rows > 0 ? b->rows : 1) * esmm_dtype_size(b->dtype);
  if (whole_b)
    return b->cols;
  const int64_t cols = (int64_t)(band_bytes / column) / whole * whole, most = cols > whole ? cols : whole;
  return most < b->cols ? most : b->cols;
}

/* copied: bands are copies, with columns of an odd length where a column's elements lie together: reading across
   columns whose length is a power of two, as prepare does, would use a few lines of the cache only. */
static int bands_start(const char *what, const esmm_matrix *b, bool copied, bool whole_b, bands *out)
{
  const bool by_columns = b->order == ESMM_COL_MAJOR;
  *out = (bands){.b = b, .cols = band_cols(b, whole_b)};
  out->ld = by_columns ? (b->rows / 32 * 2 + 3) * 16 : out->cols; /* an odd number of half cache lines or lines */
  return copied ? cli_matrix_alloc(what, by_columns ? out->cols : b->rows, out->ld, b->dtype, &out->room) : CLI_GO;
}

static esmm_matrix band_at(const bands *s, int64_t from)
{
  const esmm_matrix *b = s->b;
  const size_t size = esmm_dtype_size(b->dtype);
  const bool by_columns = b->order == ESMM_COL_MAJOR;
  esmm_matrix band = *b;
  band.cols = b->cols - from < s->cols ? b->cols - from : s->cols;
  band.data = (char *)b->data + (size_t)(by_columns ? from * b->ld : from) * size;
  if (!s->room.memory)
    return band;
  const int64_t lines = by_columns ? band.cols : band.rows, length = by_columns ? band.rows : band.cols;
  for (int64_t i = 0; i < lines; i++)
    memcpy((char *)s->room.memory + (size_t)(i * s->ld) * size, (const char *)band.data + (size_t)(i * b->ld) * size,
           (size_t)length * size);
  band.data = s->room.memory;
  band.ld = s->ld;
  return band;
}

/* ---- densities ---- */

/* Is a bit set from `from` on, in front of `to`? Both lie in words of at least one block. */
static bool any_bit(const uint64_t *bits, int64_t from, int64_t to)
{
  const int64_t first = from / 64, last = (to - 1) / 64;
  const uint64_t above = UINT64_MAX << (from % 64), below = UINT64_MAX >> (63 - (to - 1) % 64);
  if (first == last)
    return bits[first] & above & below;
  bool any = (bits[first] & above) || (bits[last] & below);
  for (int64_t i = first + 1; i < last && !any; i++)
    any = bits[i] != 0;
  return any;
}

/* Of blocks of `rows` k's by the strip's columns. */
static esmm_status block_density(esmm_ctx *ctx, const esmm_pattern *strips, int64_t rows, double *density)
{
  const esmm_pattern_info info = cli_pattern(ctx, strips);
  const int64_t blocks = (info.k + rows - 1) / rows;
  uint64_t *bits = cli_alloc((size_t)info.words + 1, sizeof *bits);
  int64_t set = 0;
  esmm_status status = ESMM_OK;
  for (int64_t s = 0; s < info.strips && status == ESMM_OK; s++) {
    status = esmm_pattern_bits(ctx, strips, s, 1, bits);
    for (int64_t i = 0; i < blocks && status == ESMM_OK; i++)
      set += any_bit(bits, i * rows, (i + 1) * rows < info.k ? (i + 1) * rows : info.k);
  }
  free(bits);
  *density = info.strips > 0 && blocks > 0 ? (double)set / ((double)info.strips * (double)blocks) : 0;
  return status;
}

/* The most bits of a group of 4, 8 or 16. */
static int most_of_word(uint64_t word, int group)
{
  const uint64_t mask = ((uint64_t)1 << group) - 1;
  int most = 0;
  for (; word; word >>= group) {
    const int count = __builtin_popcountll(word & mask);
    most = count > most ? count : most;
  }
  return most;
}

/* Of columns, a bit an element. Ends where every kind of group was seen full: most weights have no pattern. */
static esmm_status count_groups(esmm_ctx *ctx, const esmm_pattern *columns, int *most)
{
  const esmm_pattern_info info = cli_pattern(ctx, columns);
  uint64_t *bits = cli_alloc((size_t)info.words + 1, sizeof *bits);
  esmm_status status = ESMM_OK;
  bool open = info.k > 0;
  for (int j = 0; j < MODEL_GROUPS; j++) /* a last group that is cut short fits by chance */
    if (info.k % model_groups[j] != 0)
      most[j] = model_groups[j];
  for (int64_t s = 0; s < info.strips && status == ESMM_OK && open; s++) {
    status = esmm_pattern_bits(ctx, columns, s, 1, bits);
    for (int64_t i = 0; i < info.words && status == ESMM_OK && open; i++) {
      open = false;
      for (int j = 0; j < MODEL_GROUPS; j++) {
        const int now = most[j] < model_groups[j] ? most_of_word(bits[i], model_groups[j]) : 0;
        most[j] = now > most[j] ? now : most[j];
        open = open || most[j] < model_groups[j];
      }
    }
  }
  free(bits);
  return status;
}

/* Adds a band's densities, each times the strips (or columns) it is the mean of. */
static esmm_status add_densities(esmm_ctx *ctx, const esmm_matrix *band, model_densities *sum, double *strips)
{
  esmm_pattern *now = NULL;
  esmm_status status = esmm_pattern_extract_b(ctx, band, 1, &now);
  if (status == ESMM_OK)
    sum->element += cli_pattern(ctx, now).density * (double)band->cols;
  if (status == ESMM_OK)
    status = count_groups(ctx, now, sum->most);
  for (int i = 0; i < MODEL_STRIPS && status == ESMM_OK; i++) {
    esmm_pattern *coarser = NULL;
    status = esmm_pattern_coarsen(ctx, now, model_strips[i], &coarser);
    esmm_pattern_free(now);
    now = coarser;
    if (status != ESMM_OK)
      break;
    const esmm_pattern_info info = cli_pattern(ctx, now);
    const double count = (double)info.strips;
    strips[i] += count;
    sum->strip[i] += info.density * count;
    for (int j = 0; j < MODEL_BLOCKS && status == ESMM_OK; j++)
      if (model_blocks[j] == model_strips[i]) {
        double density = 0;
        status = block_density(ctx, now, model_blocks[j], &density);
        sum->block[j] += density * count;
      }
  }
  esmm_pattern_free(now);
  return status;
}

int model_measure(esmm_ctx *ctx, const char *what, const esmm_matrix *b, model_densities *out)
{
  double strips[MODEL_STRIPS] = {0};
  bands s;
  *out = (model_densities){0};
  int status = bands_start(what, b, !is_aligned(b), false, &s);
  for (int64_t from = 0; from < b->cols && status == CLI_GO; from += s.cols) {
    const esmm_matrix band = band_at(&s, from);
    const esmm_status added = add_densities(ctx, &band, out, strips);
    if (added != ESMM_OK)
      status = cli_status(ctx, what, added);
  }
  io_matrix_free(&s.room);
  if (status != CLI_GO || b->cols == 0)
    return status;
  out->element /= (double)b->cols;
  for (int i = 0; i < MODEL_STRIPS; i++) {
    out->strip[i] /= strips[i];
    for (int j = 0; j < MODEL_BLOCKS; j++)
      if (model_blocks[j] == model_strips[i])
        out->block[j] /= strips[i];
  }
  return CLI_GO;
}

/* A pattern is one where its places are all but filled: zeros that lie anywhere fit wide groups by chance. */
const char *model_pattern(const model_densities *d)
{
  const double filled = 0.9;
  static char text[64];
  text[0] = '\0';
  for (int i = MODEL_BLOCKS - 1; i >= 0 && !text[0]; i--) /* large blocks are worth the most */
    if (d->block[i] < 0.9 && d->element > 0 && d->element >= filled * d->block[i])
      snprintf(text, sizeof text, "blocks of %lld x %lld (--format bsr:%lld)", (long long)model_blocks[i],
               (long long)model_blocks[i], (long long)model_blocks[i]);
  for (int i = 0; i < MODEL_GROUPS && !text[0]; i++)
    if (d->most[i] > 0 && 2 * d->most[i] <= model_groups[i] && d->element >= filled * d->most[i] / model_groups[i])
      snprintf(text, sizeof text, "%d:%d along k (--format nm:%d:%d)", d->most[i], model_groups[i], d->most[i],
               model_groups[i]);
  return text;
}

/* ---- the prediction ---- */

typedef struct dense_a {
  esmm_matrix m;
  size_t bytes; /* that are mapped */
} dense_a;

static void dense_a_free(dense_a *a)
{
  if (a->m.data)
    (void)munmap(a->m.data, a->bytes);
  a->m.data = NULL;
}

/* A matrix without a zero: one piece of memory, as often as it takes. */
static int dense_a_make(int64_t m, int64_t k, esmm_dtype dtype, dense_a *a)
{
  const size_t piece = (size_t)2 << 20;
  size_t bytes;
  *a = (dense_a){.m = {.rows = m, .cols = k, .ld = k, .dtype = dtype}};
  if (__builtin_mul_overflow((size_t)m, (size_t)k, &bytes) ||
      __builtin_mul_overflow(bytes, esmm_dtype_size(dtype), &bytes) || bytes > SIZE_MAX / 2)
    return cli_failed("A of %lld x %lld is too large: give a smaller --m", (long long)m, (long long)k);
  a->bytes = (bytes / piece + 1) * piece;
  const int fd = memfd_create("esmm", MFD_CLOEXEC);
  unsigned char *room = fd < 0 || ftruncate(fd, (off_t)piece) != 0
                            ? MAP_FAILED
                            : mmap(NULL, a->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  bool good = room != MAP_FAILED;
  for (size_t at = 0; good && at < a->bytes; at += piece)
    good = mmap(room + at, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
  const int reason = errno;
  if (fd >= 0)
    close(fd);
  if (room != MAP_FAILED)
    a->m.data = room;
  if (good) {
    memset(room, 0x3f, piece); /* a positive number in every dtype */
    return CLI_GO;
  }
  dense_a_free(a);
  return cli_failed("A of %lld x %lld cannot be mapped: %s", (long long)m, (long long)k, strerror(reason));
}

/* The plan's estimates for one band; why: it cannot be prepared so. */
static esmm_status explain_band(esmm_ctx *ctx, const esmm_matrix *a, const esmm_matrix *band, esmm_matrix *c,
                                const esmm_prepare_opts *opts, esmm_verdict *verdicts, int *count)
{
  esmm_weights *weights = NULL;
  *count = esmm_kernel_count();
  esmm_status status = esmm_prepare(ctx, band, opts, &weights);
  if (status == ESMM_OK)
    status = esmm_explain(ctx, a, weights, c, NULL, verdicts, sizeof *verdicts, count);
  esmm_weights_free(weights);
  return status;
}

static esmm_status add_band(esmm_ctx *ctx, const esmm_matrix *a, const esmm_matrix *band, esmm_matrix *c,
                            const esmm_prepare_opts *opts, const dense_baseline *baseline, esmm_verdict *verdicts,
                            double *longest, model_prediction *sum)
{
  const esmm_prepare_opts dense = {.size = sizeof dense, .use = opts->use};
  int count;
  esmm_status status = explain_band(ctx, a, band, c, opts, verdicts, &count);
  const esmm_verdict *chosen = status == ESMM_OK ? verdict_chosen(verdicts, count) : NULL;
  if (status != ESMM_OK)
    return status;
  const double seconds = chosen ? chosen->seconds : NAN;
  sum->seconds += seconds;
  if (chosen && seconds > *longest) {
    *longest = seconds;
    snprintf(sum->kernel, sizeof sum->kernel, "%s", chosen->kernel);
  }
  if (opts->format.kind != ESMM_FORMAT_DENSE && baseline->flops == 0) /* such weights have no dense kernel */
    status = explain_band(ctx, a, band, c, &dense, verdicts, &count);
  if (status == ESMM_OK)
    sum->dense += dense_baseline_seconds(baseline, a->rows, band->rows, band->cols, verdicts, count);
  return status;
}

static int predict(esmm_ctx *ctx, const char *what, const esmm_matrix *b, const esmm_matrix *a, esmm_matrix *c,
                   const esmm_prepare_opts *opts, const dense_baseline *baseline, model_prediction *out)
{
  esmm_verdict *verdicts = cli_alloc((size_t)esmm_kernel_count() + 1, sizeof *verdicts);
  bands s;
  const int status = bands_start(what, b, b->order == ESMM_COL_MAJOR || !is_aligned(b), cli_on_gpu(ctx), &s);
  esmm_status done = ESMM_OK;
  double longest = 0;
  out->seconds = out->dense = 0;
  for (int64_t from = 0; from < b->cols && status == CLI_GO && done == ESMM_OK; from += s.cols) {
    const esmm_matrix band = band_at(&s, from);
    c->cols = band.cols;
    done = add_band(ctx, a, &band, c, opts, baseline, verdicts, &longest, out);
  }
  io_matrix_free(&s.room);
  free(verdicts);
  if (done == ESMM_OK)
    return status;
  out->seconds = out->dense = NAN;
  snprintf(out->why, sizeof out->why, "%s", esmm_ctx_error(ctx));
  const bool fatal = done == ESMM_ERR_MEMORY || done == ESMM_ERR_DEVICE_MEMORY || done == ESMM_ERR_DEVICE_LOST;
  return fatal ? cli_status(ctx, what, done) : CLI_GO;
}

int model_predict(esmm_ctx *ctx, const char *what, const esmm_matrix *b, int64_t m, const esmm_prepare_opts *opts,
                  const dense_baseline *baseline, model_prediction *out)
{
  *out = (model_prediction){.seconds = NAN, .dense = NAN};
  if (b->rows == 0 || b->cols == 0)
    return CLI_GO;
  dense_a a = {0};
  esmm_matrix near = {0}, c = {0};
  int status = dense_a_make(m, b->rows, b->dtype, &a);
  if (status == CLI_GO)
    status = cli_device_view(ctx, "A", &a.m, &near);
  if (status == CLI_GO)
    status = cli_device_alloc(ctx, "C", m, band_cols(b, cli_on_gpu(ctx)), ESMM_F32, ESMM_ROW_MAJOR, &c);
  if (status == CLI_GO)
    status = predict(ctx, what, b, &near, &c, opts, baseline, out);
  cli_device_free(ctx, &c);
  if (a.m.data)
    cli_device_view_free(ctx, &a.m, &near);
  dense_a_free(&a);
  return status;
}
