/*
 * parts.h: the dense product by oneDNN, where it is installed: what PyTorch has, and skipping has to beat. See onednn.h
 * for how it is called. Included after vec_avx512.h by a file that defines OUR_DENSE: the kernel that does what the
 * library fails to do.
 *
 * A product is cut into parts of rows, about as many for every thread, each with all columns. The library reads B of
 * bf16 in its own layout and B of fp32 in rows, and writes C itself where nothing follows the sum and C's rows lie
 * tightly. Else it writes fp32 sums of a part to scratch, and the epilogue makes C of them. Heights of parts are
 * multiples of 8 or 16, because every height is compiled once. Rows past the last such multiple are copied, with zeros
 * below them; so are all rows of an A whose rows do not lie tightly, which version 2 has no such kernel for.
 *
 * Where the library fails to set up a part OUR_DENSE does the product, and where it fails to multiply one that part of
 * it: so scratch suffices for either.
 */
#include "onednn.h"
#include "operands.h"

#include <stdatomic.h>
#include <stdio.h>

#define FEW_ROWS 64   /* of a part, so that steps are finer */
#define LEAST_SIDE 16 /* of a B that is worth the library's call */

extern const esmm_kernel OUR_DENSE;
static const esmm_kernel *const fallback = &OUR_DENSE;

/* The library takes fp32 rows of B only where they lie tightly, so their padding is part of the product. */
static int64_t width_of(const esmm_problem *p)
{
  return p->w->dtype == ESMM_F32 ? p->w->rows_ld : p->n;
}

typedef struct cut {
  int64_t rows, parts;     /* of each but the last part */
  int64_t last, last_room; /* rows of the last one, and with zeros below them */
  bool copied, direct;     /* the library reads copies of A's rows; it writes C */
} cut;

static cut cut_rows(const esmm_problem *p)
{
  const int64_t parts = esmm_round_up(esmm_ceil_div(p->m, ESMM_ONEDNN_ROWS), p->threads);
  const int64_t rows = esmm_ceil_div(p->m, parts), step = rows < FEW_ROWS ? 8 : 16;
  cut x = {.rows = esmm_round_up(rows, step)};
  x.parts = esmm_ceil_div(p->m, x.rows);
  x.last = p->m - (x.parts - 1) * x.rows;
  x.last_room = esmm_round_up(x.last, step);
  x.copied = p->a.ld != p->k;
  x.direct = esmm_is_rounded(p) && p->c.ld == p->n && width_of(p) == p->n &&
             (p->c.dtype == ESMM_F32 || p->c.dtype == p->w->dtype);
  return x;
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  const bool small = p->k < LEAST_SIDE || p->n < LEAST_SIDE;
  if (!small && p->a.order == ESMM_ROW_MAJOR)
    return fallback->can_run(fallback, p, why, why_bytes);
  (void)snprintf(why, why_bytes, small ? "b is smaller than %d x %d" : "a is column-major", LEAST_SIDE, LEAST_SIDE);
  return false;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 0;
  const cut x = cut_rows(p);
  const double rows = (double)((x.parts - 1) * x.rows + x.last_room), n = (double)p->n, k = (double)p->k;
  const double bytes = (double)esmm_dtype_size(p->w->dtype), lanes = 4.0 / bytes;
  /* Threads that find no part have to wait. */
  const double waiting = (double)esmm_round_up(x.parts, p->threads) / (double)x.parts;
  units[0] = waiting * rows * (double)esmm_round_up(p->n, 64) * (double)esmm_round_up(p->k, 2) / (VEC * lanes);
  units[1] = waiting * rows * k;
  units[2] = (double)esmm_min(x.parts, p->threads) * n * k * bytes; /* each thread reads all of it */
  units[3] = (double)p->m * n * (x.direct ? 0.0 : 1.0);
  units[4] = (double)esmm_round_up(x.parts, p->threads);
  units[5] = 1.0;
}

typedef struct layout {
  size_t at_threads;           /* what threads have, or the fallback, behind the flags of parts that failed; */
  size_t at_a, at_sums, bytes; /* each of them: the library's scratch, a copy of rows of A, sums */
} layout;

/* Both of its parts; false: the library failed. */
static bool take_parts(const esmm_problem *p, const cut *x, esmm_onednn_part *part[2])
{
  const esmm_dtype direct = x->direct ? p->c.dtype : ESMM_F32, last = x->last == x->last_room ? direct : ESMM_F32;
  part[0] = x->parts > 1 ? esmm_onednn_take(p->w, x->rows, direct) : esmm_onednn_take(p->w, x->last_room, last);
  part[1] = part[0] ? esmm_onednn_take(p->w, x->last_room, last) : NULL;
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
  const int64_t most = x->parts > 1 ? x->rows : x->last_room, odd = x->last != x->last_room ? x->last_room : 0;
  const int64_t copied = x->copied ? most : odd, sums = x->direct ? odd : most;
  layout l = {.at_threads = align_up((size_t)x->parts)};
  l.at_a = align_up(scratch[0] > scratch[1] ? scratch[0] : scratch[1]);
  l.at_sums = align_up(l.at_a + (size_t)(copied * p->k) * esmm_dtype_size(p->a.dtype));
  l.bytes = align_up(l.at_sums + (size_t)(sums * width_of(p)) * sizeof(float));
  return l;
}

/* The rows of part i as a product of their own. */
static esmm_problem part_problem(const esmm_problem *p, const cut *x, int64_t i)
{
  esmm_problem part = *p;
  const int64_t row0 = i * x->rows;
  esmm_matrix *const all[] = {&part.a, &part.c, &part.residual};
  part.m = i == x->parts - 1 ? x->last : x->rows;
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
  const cut x = cut_rows(p);
  const esmm_problem first = part_problem(p, &x, 0), last = part_problem(p, &x, x.parts - 1);
  const size_t least = largest(esmm_kernel_workspace(fallback, p), largest(esmm_kernel_workspace(fallback, &first),
                                                                           esmm_kernel_workspace(fallback, &last)));
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

/* to: [room, k], zeros below the rows. */
static void copy_rows(const esmm_problem *p, int64_t row0, int64_t rows, int64_t room, char *to)
{
  const size_t size = esmm_dtype_size(p->a.dtype), bytes = (size_t)p->k * size;
  for (int64_t i = 0; i < rows; i++)
    memcpy(to + (size_t)i * bytes, (const char *)p->a.data + (size_t)((row0 + i) * p->a.ld) * size, bytes);
  memset(to + (size_t)rows * bytes, 0, (size_t)(room - rows) * bytes);
}

static void multiply_parts(void *arg, int64_t first, int64_t end, int worker)
{
  job *y = arg;
  const esmm_problem *p = y->p;
  const cut *x = y->x;
  char *own = y->scratch + (size_t)worker * y->l->bytes;
  float *sums = (float *)(void *)(own + y->l->at_sums);
  for (int64_t i = first; i < end; i++) {
    const bool last = i == x->parts - 1, odd = last && x->last != x->last_room, direct = x->direct && !odd;
    const int64_t row0 = i * x->rows, rows = last ? x->last : x->rows;
    const char *a = (const char *)p->a.data + (size_t)(row0 * p->a.ld) * esmm_dtype_size(p->a.dtype);
    char *c = (char *)p->c.data + (size_t)(row0 * p->c.ld) * esmm_dtype_size(p->c.dtype);
    if (x->copied || odd) {
      a = own + y->l->at_a;
      copy_rows(p, row0, rows, last ? x->last_room : rows, own + y->l->at_a);
    }
    y->failed[i] = !esmm_onednn_multiply(y->part[last], p->w, a, direct ? (void *)c : sums, own);
    if (y->failed[i])
      y->any_failed = true;
    else if (direct)
      esmm_finish_plain(p, row0, rows, 0, p->n);
    else
      esmm_finish(p, row0, rows, 0, p->n, sums, width_of(p));
  }
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  const cut x = cut_rows(p);
  esmm_onednn_part *part[2];
  if (!take_parts(p, &x, part))
    return fallback->run(fallback, ctx, p, scratch, stats);
  const layout l = lay_out(p, &x, part);
  char *at = scratch;
  job y = {.p = p, .x = &x, .l = &l, .part = part, .failed = scratch, .scratch = at + l.at_threads};
  esmm_for(ctx, p->threads, x.parts, 1, multiply_parts, &y);
  give_back(part);
  for (int64_t i = 0; i < x.parts && y.any_failed; i++)
    if (y.failed[i]) {
      const esmm_problem rest = part_problem(p, &x, i);
      (void)fallback->run(fallback, ctx, &rest, y.scratch, stats); /* a CPU's kernel cannot fail */
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
