/*
 * parts.h: the dense product by oneDNN (onednn.h), where it is installed. Included after vec_avx512.h by a file that
 * defines OUR_DENSE, the fallback kernel for products that the library fails to do.
 *
 * A product is cut into parts, about as many for every thread: of rows, each with all columns, or of columns, if rows
 * are few and reading B is the cost. The library reads B in its own layout or, where that is not kept, in rows
 * of fp32. It writes C itself where nothing follows the sum and C's rows lie tightly. Else it writes fp32 sums of a
 * part to scratch, and the epilogue makes C of them. A part of a new size is compiled first, which takes some tenths of
 * a millisecond. Rows of an A that do not lie tightly are copied: version 2 has no such kernel for them.
 *
 * If the library fails to set up a part OUR_DENSE does the product. If it fails to multiply a part, OUR_DENSE does that
 * part, or the whole product where parts are columns. Scratch suffices for either.
 */
#include "onednn.h"
#include "operands.h"

#include <stdatomic.h>
#include <stdio.h>

#define MOST_ROWS 256 /* of a part */

enum { BY_ROWS, BY_COLUMNS }; /* variants */

extern const esmm_kernel OUR_DENSE;
static const esmm_kernel *const fallback = &OUR_DENSE;

static bool is_packed(const esmm_problem *p)
{
  return p->w->forms & ESMM_FORM(ONEDNN);
}

/* The library takes fp32 rows of B only where they lie tightly, so their padding is part of the product. */
static int64_t width_of(const esmm_problem *p)
{
  return is_packed(p) ? p->n : p->w->rows_ld;
}

typedef struct cut {
  int64_t parts, rows, cols;    /* of each but the last part */
  int64_t last_rows, last_cols; /* of that */
  bool copied, direct;          /* the library reads copies of A's rows; it writes C */
} cut;

/* Columns can be parts where all of the product may be done once more. */
static bool may_cut_columns(const esmm_problem *p)
{
  return p->threads > 1 && p->m <= MOST_ROWS && p->n > ESMM_ONEDNN_BLOCK && is_packed(p) &&
         esmm_onednn_cuts_columns(p->w) && p->beta == 0.0f && !p->residual.data && !p->nonzeros && !p->bitmaps;
}

static cut cut_columns(const esmm_problem *p)
{
  const int64_t blocks = esmm_ceil_div(p->n, ESMM_ONEDNN_BLOCK), each = esmm_ceil_div(blocks, p->threads);
  cut x = {.parts = esmm_ceil_div(blocks, each), .rows = p->m, .cols = each * ESMM_ONEDNN_BLOCK, .last_rows = p->m};
  x.last_cols = p->n - (x.parts - 1) * x.cols;
  x.copied = p->a.ld != p->k;
  return x;
}

static cut cut_rows(const esmm_problem *p)
{
  const int64_t wanted = esmm_round_up(esmm_ceil_div(p->m, MOST_ROWS), p->threads);
  cut x = {.rows = esmm_ceil_div(p->m, wanted), .cols = width_of(p), .last_cols = width_of(p)};
  x.parts = esmm_ceil_div(p->m, x.rows);
  x.last_rows = p->m - (x.parts - 1) * x.rows;
  x.copied = p->a.ld != p->k;
  x.direct = esmm_is_rounded(p) && p->c.ld == p->n && width_of(p) == p->n &&
             (p->c.dtype == ESMM_F32 || p->c.dtype == p->w->dtype);
  return x;
}

/* The plan may have left the call one thread since. */
static bool by_columns(const esmm_problem *p)
{
  return p->variant == BY_COLUMNS && p->threads > 1;
}

static cut cut_of(const esmm_problem *p)
{
  return by_columns(p) ? cut_columns(p) : cut_rows(p);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const bool small = p->k < ESMM_ONEDNN_SIDE || p->n < ESMM_ONEDNN_SIDE;
  if (!small && p->a.order == ESMM_ROW_MAJOR)
    return fallback->can_run(fallback, p, why, why_bytes);
  (void)snprintf(why, why_bytes, small ? "b is smaller than %d x %d" : "a is column-major", ESMM_ONEDNN_SIDE,
                 ESMM_ONEDNN_SIDE);
  return false;
}

static void units_of(const esmm_problem *p, const cut *x, double *units)
{
  const double bytes = (double)esmm_dtype_size(p->w->dtype), lanes = 4.0 / bytes, k = (double)p->k;
  const double rows = (double)x->rows, cols = (double)esmm_round_up(x->cols, ESMM_ONEDNN_BLOCK);
  /* Threads that find no part have to wait. */
  const double parts = (double)esmm_round_up(x->parts, p->threads);
  units[0] = parts * rows * cols * (double)esmm_round_up(p->k, 2) / (VEC * lanes);
  units[1] = parts * rows * k;
  units[2] = (double)esmm_min(x->parts, p->threads) * cols * k * bytes; /* each thread reads all of its columns */
  units[3] = x->direct ? 0.0 : (double)p->m * (double)p->n;
  units[4] = parts;
  units[5] = 1.0;
}

static double seconds_of(const double *units, const double *cost)
{
  double sum = 0.0;
  for (int i = 0; i < ESMM_COST_TERMS; i++)
    sum += units[i] * cost[i];
  return sum;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  const cut x = cut_rows(p);
  units_of(p, &x, units);
  *variant = BY_ROWS;
  if (!may_cut_columns(p))
    return;
  double other[ESMM_COST_TERMS];
  const cut y = cut_columns(p);
  units_of(p, &y, other);
  if (seconds_of(other, cost) >= seconds_of(units, cost))
    return;
  memcpy(units, other, sizeof other);
  *variant = BY_COLUMNS;
}

typedef struct layout {
  size_t at_threads;           /* the threads' scratch, or the fallback's, behind the flags of failed parts; */
  size_t at_a, at_sums, bytes; /* each of them: the library's scratch, a copy of rows of A, sums */
} layout;

/* A part but the last, and the last; false: the library failed. */
static bool take_parts(const esmm_problem *p, const cut *x, esmm_onednn_part *part[2])
{
  const esmm_dtype dtype = x->direct ? p->c.dtype : ESMM_F32;
  part[0] = esmm_onednn_take(p->w, x->rows, x->cols, dtype);
  part[1] = part[0] ? esmm_onednn_take(p->w, x->last_rows, x->last_cols, dtype) : NULL;
  if (part[1])
    return true;
  esmm_onednn_give_back(part[0]);
  return false;
}

static void give_back(esmm_onednn_part *part[2])
{
  esmm_onednn_give_back(part[0]);
  esmm_onednn_give_back(part[1]);
}

static layout lay_out(const esmm_problem *p, const cut *x, esmm_onednn_part *const part[2])
{
  const size_t scratch[2] = {esmm_onednn_scratch(part[0]), esmm_onednn_scratch(part[1])};
  layout l = {.at_threads = align_up((size_t)x->parts)};
  l.at_a = align_up(scratch[0] > scratch[1] ? scratch[0] : scratch[1]);
  l.at_sums = align_up(l.at_a + (size_t)(x->copied ? x->rows * p->k : 0) * esmm_dtype_size(p->a.dtype));
  l.bytes = align_up(l.at_sums + (size_t)(x->direct ? 0 : x->rows * x->cols) * sizeof(float));
  return l;
}

/* The rows of part i as a product; all of it where parts are columns. */
static esmm_problem part_problem(const esmm_problem *p, const cut *x, int64_t i)
{
  esmm_problem part = *p;
  const int64_t row0 = i * x->rows;
  esmm_matrix *const all[] = {&part.a, &part.c, &part.residual};
  part.variant = 0;
  if (by_columns(p))
    return part;
  part.m = i == x->parts - 1 ? x->last_rows : x->rows;
  part.row0 = p->row0 + row0;
  part.pattern = NULL;
  for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
    if (all[j]->data)
      all[j]->data = (char *)all[j]->data + (size_t)esmm_matrix_index(all[j], row0, 0) * esmm_dtype_size(all[j]->dtype);
    all[j]->rows = part.m;
  }
  if (p->factor)
    part.factor = p->factor + row0 * p->factor_ld;
  return part;
}

static size_t largest(size_t a, size_t b)
{
  return a > b ? a : b;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  const cut x = cut_of(p);
  const esmm_problem first = part_problem(p, &x, 0), last = part_problem(p, &x, x.parts - 1);
  esmm_problem whole = *p;
  whole.variant = 0;
  const size_t least =
      largest(esmm_kernel_workspace(fallback, &whole),
              largest(esmm_kernel_workspace(fallback, &first), esmm_kernel_workspace(fallback, &last)));
  esmm_onednn_part *part[2];
  if (!take_parts(p, &x, part))
    return least;
  const layout l = lay_out(p, &x, part);
  give_back(part);
  size_t bytes, other;
  return esmm_size_mul(l.bytes, (size_t)p->threads, &bytes) && esmm_size_add(bytes, l.at_threads, &bytes) &&
                 esmm_size_add(least, l.at_threads, &other)
             ? largest(bytes, other)
             : SIZE_MAX;
}

typedef struct job {
  const esmm_problem *p;
  const cut *x;
  const layout *l;
  esmm_onednn_part *const *part;
  bool *failed; /* [parts] */
  char *scratch;
  atomic_bool any_failed;
} job;

/* to: [rows, k] */
static void copy_rows(const esmm_problem *p, int64_t row0, int64_t rows, char *to)
{
  const size_t size = esmm_dtype_size(p->a.dtype), bytes = (size_t)p->k * size;
  for (int64_t i = 0; i < rows; i++)
    memcpy(to + (size_t)i * bytes, (const char *)p->a.data + (size_t)((row0 + i) * p->a.ld) * size, bytes);
}

static void multiply_parts(void *arg, int64_t first, int64_t end, int worker)
{
  job *y = arg;
  const esmm_problem *p = y->p;
  const cut *x = y->x;
  const bool columns = by_columns(p);
  char *own = y->scratch + (size_t)worker * y->l->bytes;
  float *sums = (float *)(void *)(own + y->l->at_sums);
  for (int64_t i = first; i < end; i++) {
    const bool last = i == x->parts - 1;
    const int64_t row0 = columns ? 0 : i * x->rows, rows = last ? x->last_rows : x->rows;
    const int64_t col0 = columns ? i * x->cols : 0, cols = last ? x->last_cols : x->cols;
    const char *a = (const char *)p->a.data + (size_t)(row0 * p->a.ld) * esmm_dtype_size(p->a.dtype);
    char *c = (char *)p->c.data + (size_t)(row0 * p->c.ld) * esmm_dtype_size(p->c.dtype);
    if (x->copied) {
      a = own + y->l->at_a;
      copy_rows(p, row0, rows, own + y->l->at_a);
    }
    y->failed[i] = !esmm_onednn_multiply(y->part[last], p->w, col0, a, x->direct ? (void *)c : sums, own);
    if (y->failed[i])
      y->any_failed = true;
    else if (x->direct)
      esmm_finish_plain(p, row0, rows, 0, p->n);
    else
      esmm_finish(p, row0, rows, col0, columns ? cols : p->n, sums, cols);
  }
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  const cut x = cut_of(p);
  esmm_problem whole = *p;
  esmm_onednn_part *part[2];
  whole.variant = 0;
  if (!take_parts(p, &x, part))
    return fallback->run(fallback, ctx, &whole, scratch, stats);
  const layout l = lay_out(p, &x, part);
  char *at = scratch;
  job y = {.p = p, .x = &x, .l = &l, .part = part, .failed = scratch, .scratch = at + l.at_threads};
  esmm_for(ctx, p->threads, x.parts, 1, multiply_parts, &y);
  give_back(part);
  for (int64_t i = 0; i < x.parts && y.any_failed; i++)
    if (y.failed[i]) {
      const esmm_problem rest = part_problem(p, &x, i);
      (void)fallback->run(fallback, ctx, &rest, y.scratch, stats); /* a CPU's kernel cannot fail */
      if (by_columns(p))
        break;
    }
  stats->flop_useful = 2.0 * (double)p->m * (double)p->n * (double)p->k;
  stats->joint_density = 1.0;
  return ESMM_OK;
}

/* What both kernels say alike. */
#define PARTS_KERNEL                                                                                \
  .backend = &esmm_cpu_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .missing = esmm_onednn_missing, \
  .can_run = can_run, .terms = terms, .workspace = workspace, .run = run,                           \
  .term_names = {"multiply-adds", "reading of a",      "reading of b",                              \
                 "updates of c",  "starting of parts", "starting threads"}
