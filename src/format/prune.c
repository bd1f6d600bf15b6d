/*
 * prune.c: zeros where a format needs them: N:M and blocks; prune_top.c has the rest. Keys (prune.h) decide which
 * values stay, so that a group's choice and a threshold over all blocks are the same comparison.
 */
#include "format/prune.h"

#include "bits.h"
#include "convert.h"
#include "esmm_tools.h"
#include "threads.h"

#define CHUNK 16 /* strips of columns gone through side by side: a cache line of B's rows serves all of them */

/* Of one stretch of B. Every stretch has its own, added up in order: sums do not depend on the threads. */
typedef esmm_prune_tally tally;

typedef struct job {
  esmm_matrix b;
  esmm_format f;      /* settled */
  const float *norms; /* NULL: all 1 */
  int64_t strips;
  tally *tallies; /* N:M: of each CHUNK strips */
  uint64_t *keys; /* BSR: of each block */
} job;

/* |b| times its input's norm: exact in double. */
static double weigh(const job *j, int64_t k, int64_t col)
{
  return fabs((double)esmm_matrix_get(&j->b, k, col)) * (j->norms ? (double)j->norms[k] : 1.0);
}

/* Of rows x cols elements from (k, col) on: the sum of squares. Column c of them adds to sum c modulo `sums`, in rising
   k's; then the upper half of the sums to the lower, until one is left. sums: a power of two. */
static uint64_t key_of_area(const job *j, int64_t k, int64_t rows, int64_t col, int64_t cols, int sums)
{
  bool nonzero = false;
  double squares[ESMM_BLOCK_SUMS];
  memset(squares, 0, (size_t)sums * sizeof *squares);
  for (int64_t r = k; r < k + rows; r++)
    for (int64_t c = 0; c < cols; c++) {
      const double x = weigh(j, r, col + c);
      nonzero = nonzero || esmm_nonzero_at(j->b.data, j->b.dtype, esmm_matrix_index(&j->b, r, col + c));
      squares[c % sums] += x * x;
    }
  for (int half = sums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++)
      squares[i] += squares[i + half];
  return esmm_prune_key(nonzero, squares[0]);
}

/* Counts rows x cols elements from (k, col) on and, unless they are kept, makes them zeros. */
static void settle_area(job *j, int64_t k, int64_t rows, int64_t col, int64_t cols, bool keep, tally *t)
{
  for (int64_t r = k; r < k + rows; r++)
    for (int64_t c = col; c < col + cols; c++) {
      const double x = (double)esmm_matrix_get(&j->b, r, c);
      const bool nonzero = esmm_nonzero_at(j->b.data, j->b.dtype, esmm_matrix_index(&j->b, r, c));
      t->squares += x * x;
      t->kept += nonzero && keep;
      if (keep)
        continue;
      t->dropped += nonzero;
      t->squares_dropped += x * x;
      esmm_matrix_set(&j->b, r, c, 0.0f);
    }
}

esmm_status esmm_prune_alloc(esmm_ctx *ctx, int64_t count, size_t size, void **array)
{
  size_t bytes;
  if (!esmm_size_mul((size_t)count, size, &bytes))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b has too many parts: %lld", (long long)count);
  *array = esmm_mem_alloc(&ctx->allocator, bytes);
  return *array ? ESMM_OK : esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes to prune with", bytes);
}

/* ---- N:M ---- */

/* The positions of the `keep` largest keys, of equal ones the lowest. */
static uint32_t best_of(const uint64_t *keys, int64_t count, int keep)
{
  uint32_t chosen = 0;
  for (int i = 0; i < keep && i < count; i++) {
    int64_t best = -1;
    for (int64_t p = 0; p < count; p++)
      if (!(chosen >> p & 1) && (best < 0 || keys[p] > keys[best]))
        best = p;
    chosen |= (uint32_t)1 << best;
  }
  return chosen;
}

static void prune_group(job *j, int64_t k0, int64_t strip, tally *t)
{
  const int64_t col = strip * j->f.group_cols, cols = esmm_min(j->f.group_cols, j->b.cols - col);
  const int64_t rows = esmm_min(j->f.group, j->b.rows - k0);
  uint64_t keys[ESMM_MAX_GROUP];
  for (int64_t r = 0; r < rows; r++)
    keys[r] = key_of_area(j, k0 + r, 1, col, cols, 1);
  const uint32_t chosen = best_of(keys, rows, j->f.keep);
  for (int64_t r = 0; r < rows; r++)
    settle_area(j, k0 + r, 1, col, cols, chosen >> r & 1, t);
}

static void prune_chunks(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  job *j = arg;
  for (int64_t i = first; i < end; i++) {
    j->tallies[i] = (tally){0};
    for (int64_t k0 = 0; k0 < j->b.rows; k0 += j->f.group)
      for (int64_t s = i * CHUNK; s < esmm_min((i + 1) * CHUNK, j->strips); s++)
        prune_group(j, k0, s, &j->tallies[i]);
  }
}

static esmm_status prune_nm(esmm_ctx *ctx, job *j, tally *all)
{
  j->strips = j->b.rows > 0 ? esmm_ceil_div(j->b.cols, j->f.group_cols) : 0; /* no k, no work: any n is legal */
  const int64_t chunks = esmm_ceil_div(j->strips, CHUNK);
  void *array;
  const esmm_status status = esmm_prune_alloc(ctx, chunks, sizeof(tally), &array);
  if (status != ESMM_OK)
    return status;
  j->tallies = array;
  esmm_for(ctx, ctx->threads, chunks, 1, prune_chunks, j);
  esmm_tally_add(all, j->tallies, chunks);
  esmm_mem_free(&ctx->allocator, array, (size_t)chunks * sizeof(tally));
  return ESMM_OK;
}

/* ---- blocks ---- */

/* Byte by byte from the highest: how many keys with this prefix have each next byte? */
uint64_t esmm_prune_threshold(const uint64_t *keys, int64_t count, int64_t keep, int64_t *equal)
{
  uint64_t found = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    const uint64_t known = shift == 56 ? 0 : ~(uint64_t)0 << (shift + 8);
    int64_t having[256] = {0};
    for (int64_t i = 0; i < count; i++)
      having[keys[i] >> shift & 255] += (keys[i] & known) == found;
    found |= (uint64_t)esmm_prune_next_byte(having, &keep) << shift;
  }
  *equal = keep;
  return found;
}

static void find_keys(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  job *j = arg;
  for (int64_t i = first; i < end; i++) {
    const int64_t k = i / j->strips * j->f.block_rows, col = i % j->strips * j->f.block_cols;
    j->keys[i] = key_of_area(j, k, esmm_min(j->f.block_rows, j->b.rows - k), col,
                             esmm_min(j->f.block_cols, j->b.cols - col), ESMM_BLOCK_SUMS);
  }
}

/* Which of them stay: the keep largest keys, and among ties the first. Gives them one by one. */
typedef struct choice {
  uint64_t least;
  int64_t equal; /* of those with that key, how many are still to stay */
} choice;

static choice choose(const uint64_t *keys, int64_t blocks, double density)
{
  const int64_t keep = llround(density * (double)blocks);
  choice c = {.least = UINT64_MAX}; /* no key is */
  if (keep > 0)
    c.least = esmm_prune_threshold(keys, blocks, keep, &c.equal);
  return c;
}

static bool stays(choice *c, uint64_t key)
{
  return key > c->least || (key == c->least && c->equal-- > 0);
}

static esmm_status count_blocks(esmm_ctx *ctx, const job *j, int64_t *strips, int64_t *blocks)
{
  const int64_t levels = esmm_ceil_div(j->b.rows, j->f.block_rows);
  *strips = esmm_ceil_div(j->b.cols, j->f.block_cols);
  if (__builtin_mul_overflow(levels, *strips, blocks))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b has too many blocks: %lld rows of %lld", (long long)levels,
                     (long long)*strips);
  return ESMM_OK;
}

static esmm_status prune_blocks(esmm_ctx *ctx, job *j, double density, tally *all)
{
  int64_t blocks = 0;
  void *array = NULL;
  esmm_status status = count_blocks(ctx, j, &j->strips, &blocks);
  if (status == ESMM_OK)
    status = esmm_prune_alloc(ctx, blocks, sizeof(uint64_t), &array);
  if (status != ESMM_OK)
    return status;
  uint64_t *keys = j->keys = array;
  esmm_for(ctx, ctx->threads, blocks,
           esmm_at_once(j->f.block_rows, j->f.block_cols * (int64_t)esmm_dtype_size(j->b.dtype)), find_keys, j);
  choice c = choose(keys, blocks, density);
  for (int64_t i = 0; i < blocks; i++) {
    const int64_t k = i / j->strips * j->f.block_rows, col = i % j->strips * j->f.block_cols;
    settle_area(j, k, esmm_min(j->f.block_rows, j->b.rows - k), col, esmm_min(j->f.block_cols, j->b.cols - col),
                stays(&c, keys[i]), all);
  }
  esmm_mem_free(&ctx->allocator, array, (size_t)blocks * sizeof(uint64_t));
  return ESMM_OK;
}

/* ---- blocks on a device: it weighs them and makes zeros, the host chooses ---- */

/* Notes of smaller blocks would be larger than B. */
enum { LEAST_ELEMENTS = 16 };

static bool device_prunes_blocks(const esmm_ctx *ctx, const job *j)
{
  return ctx->backend->weigh_blocks && (int64_t)j->f.block_rows * j->f.block_cols >= LEAST_ELEMENTS && j->b.rows > 0 &&
         j->b.cols > 0;
}

static void choose_noted(const esmm_block_note *notes, uint64_t *keys, unsigned char *keep, int64_t blocks,
                         double density, tally *all)
{
  for (int64_t i = 0; i < blocks; i++)
    keys[i] = notes[i].key;
  choice c = choose(keys, blocks, density);
  for (int64_t i = 0; i < blocks; i++) {
    keep[i] = stays(&c, keys[i]);
    all->kept += keep[i] ? notes[i].nonzero : 0;
    all->dropped += keep[i] ? 0 : notes[i].nonzero;
    all->squares += notes[i].squares;
    all->squares_dropped += keep[i] ? 0.0 : notes[i].squares;
  }
}

static esmm_status prune_blocks_there(esmm_ctx *ctx, const job *j, double density, tally *all)
{
  int64_t strips, blocks = 0;
  void *array = NULL;
  const size_t each = sizeof(esmm_block_note) + sizeof(uint64_t) + 1;
  esmm_status status = count_blocks(ctx, j, &strips, &blocks);
  if (status == ESMM_OK)
    status = esmm_prune_alloc(ctx, blocks, each, &array);
  if (status != ESMM_OK)
    return status;
  esmm_block_note *notes = array;
  uint64_t *keys = (void *)(notes + blocks);
  unsigned char *keep = (void *)(keys + blocks);
  status = ctx->backend->weigh_blocks(ctx, &j->b, &j->f, j->norms, notes);
  if (status == ESMM_OK) {
    choose_noted(notes, keys, keep, blocks, density, all);
    status = ctx->backend->drop_blocks(ctx, &j->b, &j->f, keep);
  }
  esmm_mem_free(&ctx->allocator, array, (size_t)blocks * each);
  return status;
}

/* ---- the call ---- */

/* The remaining options of single elements. */
static esmm_status check_top(esmm_ctx *ctx, const esmm_prune_opts *o)
{
  const bool dense = o->format.kind == ESMM_FORMAT_DENSE;
  if (dense && o->top == 0 && o->density == 0.0)
    return esmm_fail(
        ctx, ESMM_ERR_ARGUMENT,
        "opts->format.kind is dense, which every b fits: set top or density to say how many elements stay, "
        "or set it to BSR or NM");
  if (o->top < 0 || (o->top > 0 && !dense))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->top is %lld, must be %s", (long long)o->top,
                     dense ? "at least 1, or 0 where density says how many stay"
                           : "0 with BSR and NM, which have their own way to say how many stay");
  if (o->top > 0 && o->density != 0.0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->top is %lld and opts->density is %g: set one of them",
                     (long long)o->top, o->density);
  if ((o->scope != ESMM_PRUNE_COLUMN && o->scope != ESMM_PRUNE_MATRIX) || (o->scope != ESMM_PRUNE_COLUMN && !dense))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->scope is %d, must be %s", (int)o->scope,
                     dense ? "an esmm_prune_scope" : "0 with BSR and NM");
  return ESMM_OK;
}

/* f: the format, settled. */
static esmm_status check_opts(esmm_ctx *ctx, const esmm_prune_opts *o, const esmm_format *f, int64_t k)
{
  const esmm_status status = check_top(ctx, o);
  if (status != ESMM_OK)
    return status;
  if (f->kind != ESMM_FORMAT_NM && !(o->density >= 0.0 && o->density <= 1.0))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->density is %g, must be 0 to 1", o->density);
  if (o->soft != 0 && o->soft != 1)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->soft is %d, must be 0 or 1", o->soft);
  if (o->soft && (f->kind == ESMM_FORMAT_BSR || f->group_cols > 1))
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "opts->soft shrinks single elements, and %s: set soft to 0",
                     f->kind == ESMM_FORMAT_BSR ? "BSR chooses blocks" : "with group_cols columns choose together");
  for (int64_t i = 0; o->input_norms && i < k; i++)
    if (!(o->input_norms[i] >= 0.0f) || isinf(o->input_norms[i]))
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "opts->input_norms[%lld] is %g, must be finite and not negative",
                       (long long)i, (double)o->input_norms[i]);
  return ESMM_OK;
}

/* Pruning of single elements (prune_top.c). */
static bool is_top(const esmm_prune_opts *o)
{
  return o->format.kind == ESMM_FORMAT_DENSE || o->soft;
}

static esmm_top top_of(const job *j, const esmm_prune_opts *o)
{
  const bool whole = o->scope == ESMM_PRUNE_MATRIX;
  const int64_t count = whole ? j->b.rows * j->b.cols : j->b.rows;
  const int64_t keep = o->top > 0 ? o->top : llround(o->density * (double)count);
  return (esmm_top){.format = j->f, .keep = keep, .whole = whole, .soft = o->soft != 0, .norms = j->norms};
}

static esmm_status prune(esmm_ctx *ctx, job *j, const esmm_prune_opts *o, tally *t)
{
  if (is_top(o)) {
    const esmm_top how = top_of(j, o);
    return esmm_prune_top(ctx, &j->b, &how, t);
  }
  return j->f.kind == ESMM_FORMAT_NM ? prune_nm(ctx, j, t) : prune_blocks(ctx, j, o->density, t);
}

/* By the device itself where it can, else in a copy, which goes back when all went well. */
static esmm_status prune_on_gpu(esmm_ctx *ctx, job *j, const esmm_prune_opts *o, tally *t)
{
  const esmm_matrix device = j->b;
  const bool top = is_top(o), empty = device.rows == 0 || device.cols == 0;
  if (top && ctx->backend->prune_top) {
    const esmm_top how = top_of(j, o);
    return empty ? ESMM_OK : ctx->backend->prune_top(ctx, &device, &how, t);
  }
  if (!top && j->f.kind == ESMM_FORMAT_NM && ctx->backend->prune)
    return ctx->backend->prune(ctx, &device, &j->f, j->norms, t);
  if (!top && j->f.kind == ESMM_FORMAT_BSR && device_prunes_blocks(ctx, j))
    return prune_blocks_there(ctx, j, o->density, t);
  esmm_status status = esmm_host_twin_read(ctx, &device, &j->b);
  if (status != ESMM_OK)
    return status;
  status = prune(ctx, j, o, t);
  if (status == ESMM_OK)
    status = esmm_host_twin_write(ctx, &j->b, &device);
  esmm_host_twin_free(ctx, &j->b);
  return status;
}

esmm_status esmm_prune(esmm_ctx *ctx, esmm_matrix *b, const esmm_prune_opts *opts, esmm_prune_report *report)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (report && !esmm_struct_size(report->size, sizeof *report))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "report->size is %zu; set it to sizeof *report, %zu in this version",
                     report->size, sizeof *report);
  esmm_prune_opts o = {.size = sizeof o};
  job j = {0};
  tally t = {0};
  esmm_status status = esmm_check_matrix(ctx, "b", b, &j.b);
  if (status == ESMM_OK)
    status = esmm_take_opts(ctx, "opts", opts, sizeof o, &o);
  if (status == ESMM_OK) {
    j.norms = o.input_norms;
    j.f = o.format;
    status = esmm_format_settle(ctx, "opts->format.", &j.f, ESMM_DEFAULT_BLOCK, ESMM_DEFAULT_BLOCK);
  }
  if (status == ESMM_OK)
    status = check_opts(ctx, &o, &j.f, j.b.rows);
  if (status == ESMM_OK)
    status = j.b.place == ESMM_DEVICE ? prune_on_gpu(ctx, &j, &o, &t) : prune(ctx, &j, &o, &t);
  if (status != ESMM_OK || !report)
    return status;
  const esmm_prune_report all = {.size = report->size,
                                 .kept = t.kept,
                                 .dropped = t.dropped,
                                 .norm = sqrt(t.squares),
                                 .norm_dropped = sqrt(t.squares_dropped)};
  memcpy(report, &all, report->size);
  return ESMM_OK;
}
