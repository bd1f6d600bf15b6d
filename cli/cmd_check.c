/*
 * cmd_check.c: esmm check: a self-test of a few seconds, after building or installing the library.
 *
 * Every kernel that this machine can run multiplies the same handful of problems (ragged shapes, every dtype, both
 * orders, several kinds of zeros, epilogues) and is compared with the reference kernel, element by element:
 * - integers: sums are exact, so the result must be equal;
 * - otherwise: the error is at most what error_bound.h allows a sum of k terms, carried through the epilogue, plus the
 *   rounding to C's dtype.
 * C starts out as NaN, and so does the padding between its rows, which must still be NaN afterwards. Statistics of C
 * must be those of the C that came out.
 *
 * A GPU gets each product twice: with operands in the host's memory, which the library copies there and back, and with
 * operands in its own. Data, reference and bounds are made by the CPU.
 */
#include "bench/error_bound.h"
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct problem {
  int64_t m, k, n;
  esmm_generator_kind kind;
  double density;
  bool integers;
  esmm_dtype dtype_a, dtype_b, dtype_c;
  esmm_order order_a, order_b, order_c;
  float alpha, beta;
  bool bias, residual, gate, statistics;
  esmm_activation activation;
  int64_t padding; /* elements between the rows of C */
  uint64_t seed;
} problem;

typedef struct data {
  io_matrix a, b;
  io_matrix start; /* C before the product; NaN where beta is 0 */
  io_matrix bias, residual, gate, gate_bias;
  io_matrix want;     /* f32 */
  io_matrix bound[2]; /* f32: the error allowed at each element, [1]: of cuBLAS; unused for integers */
  io_matrix got, wide;
  esmm_weights *weights, *gate_weights; /* of the context that makes the reference */
  /* B and the gate again for kernels that read no dense one; made when they are needed */
  esmm_weights *formats[ESMM_FORMAT_NM + 1], *gate_formats[ESMM_FORMAT_NM + 1];
  int32_t *counts;       /* [n]: nonzeros of C's columns */
  esmm_pattern *pattern; /* of C */
  /* GPU only */
  esmm_weights *gpu_weights, *gpu_gate;
  esmm_matrix gpu_a, gpu_bias, gpu_gate_bias, gpu_counts; /* counts: as words of fp32 */
  esmm_matrix gpu_c; /* gpu_c: all the bytes of C, padding too, as one row of fp32 */
  io_matrix bytes;   /* the same on the host */
} data;

typedef struct score {
  const char *name, *force;
  esmm_format_kind format; /* of the weights that it is given */
  int ran, exact, refused, wrong;
  double worst; /* error over its bound */
  char first[320];
  char why_not[160]; /* why it refused, the first time */
} score;

/* ---- matrices ---- */

static int make_empty(int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order, int64_t padding, io_matrix *out)
{
  bool by_rows = order == ESMM_ROW_MAJOR;
  int64_t lines = by_rows ? rows : cols, length = by_rows ? cols : rows;
  int status = cli_matrix_alloc("check", lines, length + padding, dtype, out);
  if (status != CLI_GO)
    return status;
  memset(out->memory, 0xff, out->bytes); /* NaN in every dtype */
  out->m.rows = rows;
  out->m.cols = cols;
  out->m.ld = length + padding;
  out->m.order = order;
  return CLI_GO;
}

static int make_operand(esmm_ctx *ctx, const problem *p, esmm_operand operand, uint64_t salt, io_matrix *out)
{
  bool is_a = operand == ESMM_OPERAND_A;
  esmm_generator g = {.size = sizeof g,
                      .kind = p->kind,
                      .operand = operand,
                      .seed = p->seed * 2 + (is_a ? 0 : 1) + salt,
                      .density = p->density,
                      .pattern = "11010010",
                      .integers = p->integers};
  if (p->kind == ESMM_GEN_ACTIVATIONS && !is_a) /* activations are A's */
    g.kind = ESMM_GEN_DENSE;
  int status = is_a ? make_empty(p->m, p->k, p->dtype_a, p->order_a, 0, out)
                    : make_empty(p->k, p->n, p->dtype_b, p->order_b, 0, out);
  if (status != CLI_GO)
    return status;
  esmm_status done = esmm_generate(ctx, &g, &out->m);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "generator", done);
}

static int make_dense(esmm_ctx *ctx, const problem *p, uint64_t salt, int64_t rows, int64_t cols, esmm_dtype dtype,
                      esmm_order order, int64_t padding, io_matrix *out)
{
  esmm_generator g = {.size = sizeof g, .seed = p->seed * 2 + 7 + salt, .integers = p->integers};
  int status = make_empty(rows, cols, dtype, order, padding, out);
  if (status != CLI_GO)
    return status;
  esmm_status done = esmm_generate(ctx, &g, &out->m);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "generator", done);
}

static void free_data(esmm_ctx *ctx, data *d)
{
  io_matrix *all[] = {&d->a,    &d->b,        &d->start,    &d->bias, &d->residual, &d->gate, &d->gate_bias,
                      &d->want, &d->bound[0], &d->bound[1], &d->got,  &d->wide,     &d->bytes};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    io_matrix_free(all[i]);
  esmm_weights_free(d->weights);
  esmm_weights_free(d->gate_weights);
  for (int i = 0; i <= ESMM_FORMAT_NM; i++) {
    esmm_weights_free(d->formats[i]);
    esmm_weights_free(d->gate_formats[i]);
  }
  esmm_pattern_free(d->pattern);
  free(d->counts);
  esmm_weights_free(d->gpu_weights);
  esmm_weights_free(d->gpu_gate);
  esmm_matrix *on_gpu[] = {&d->gpu_a, &d->gpu_c, &d->gpu_bias, &d->gpu_gate_bias, &d->gpu_counts};
  for (size_t i = 0; i < sizeof on_gpu / sizeof *on_gpu; i++)
    cli_device_free(ctx, on_gpu[i]);
}

/* ---- what the result should be ---- */

static esmm_matmul_opts options_of(const problem *p, const data *d, const char *force)
{
  return (esmm_matmul_opts){.size = sizeof(esmm_matmul_opts),
                            .alpha = &p->alpha,
                            .beta = &p->beta,
                            .bias = p->bias ? d->bias.m.data : NULL,
                            .activation = p->activation,
                            .residual = p->residual ? &d->residual.m : NULL,
                            .gate = d->gate_weights,
                            .gate_bias = p->gate ? d->gate_bias.m.data : NULL,
                            .force = force};
}

static int reference(esmm_ctx *ctx, const problem *p, data *d)
{
  /* Integers must be equal after the same rounding to C's dtype; otherwise the reference is not rounded further. */
  esmm_dtype dtype = p->integers ? p->dtype_c : ESMM_F32;
  io_matrix c = {0};
  esmm_matmul_opts opts = options_of(p, d, "ref");
  int status = cli_matrix_convert(ctx, "reference", &d->start.m, dtype, &c);
  if (status == CLI_GO) {
    esmm_status done = esmm_matmul(ctx, &d->a.m, d->weights, &c.m, &opts, NULL);
    status = done == ESMM_OK ? cli_matrix_convert(ctx, "reference", &c.m, ESMM_F32, &d->want)
                             : cli_status(ctx, "reference", done);
  }
  io_matrix_free(&c);
  return status;
}

static void make_absolute(io_matrix *m)
{
  float *x = m->m.data;
  for (int64_t i = 0; i < m->m.rows * m->m.cols; i++)
    x[i] = fabsf(x[i]);
}

/* out = activation(alpha A B + beta C + bias) by the reference kernel in fp32, or that with the magnitudes of all. */
static int branch(esmm_ctx *ctx, const problem *p, const data *d, bool gate, bool magnitudes, io_matrix *out)
{
  io_matrix a = {0}, b = {0}, bias = {0};
  esmm_weights *weights = NULL;
  int status = cli_matrix_convert(ctx, "bound", &d->a.m, ESMM_F32, &a);
  if (status == CLI_GO)
    status = cli_matrix_convert(ctx, "bound", gate ? &d->gate.m : &d->b.m, ESMM_F32, &b);
  if (status == CLI_GO)
    status = cli_matrix_convert(ctx, "bound", gate ? &d->gate_bias.m : &d->bias.m, ESMM_F32, &bias);
  if (status == CLI_GO)
    status = cli_matrix_convert(ctx, "bound", &d->start.m, ESMM_F32, out);
  if (status == CLI_GO) {
    io_matrix *all[] = {&a, &b, &bias, out};
    for (size_t i = 0; i < sizeof all / sizeof *all && magnitudes; i++)
      make_absolute(all[i]);
    const float alpha = magnitudes ? fabsf(p->alpha) : p->alpha, own = magnitudes ? fabsf(p->beta) : p->beta;
    const float beta = gate ? 0 : own;
    esmm_matmul_opts opts = {.size = sizeof opts,
                             .alpha = &alpha,
                             .beta = &beta,
                             .bias = gate || p->bias ? bias.m.data : NULL,
                             .activation = gate && !magnitudes ? p->activation : ESMM_ACT_NONE,
                             .force = "ref"};
    esmm_status done = esmm_prepare(ctx, &b.m, NULL, &weights);
    if (done == ESMM_OK)
      done = esmm_matmul(ctx, &a.m, weights, &out->m, &opts, NULL);
    status = done == ESMM_OK ? CLI_GO : cli_status(ctx, "bound", done);
  }
  esmm_weights_free(weights);
  io_matrix_free(&a);
  io_matrix_free(&b);
  io_matrix_free(&bias);
  return status;
}

static double at(const io_matrix *m, int64_t i)
{
  return (double)((const float *)m->m.data)[i];
}

/* error_bound.h's bound on |alpha| |A||B| + |beta| |C| + |bias|, carried through the epilogue. */
static int bounds(esmm_ctx *ctx, const problem *p, data *d, const error_rule *rule, io_matrix *out)
{
  io_matrix gate_bound = {0}, gate = {0}, up = {0}, residual = {0};
  const double depth = error_depth(rule, (double)p->k);
  int status = branch(ctx, p, d, false, true, out);
  if (status == CLI_GO && p->gate)
    status = branch(ctx, p, d, true, true, &gate_bound);
  if (status == CLI_GO && p->gate)
    status = branch(ctx, p, d, true, false, &gate);
  if (status == CLI_GO && p->gate)
    status = branch(ctx, p, d, false, false, &up);
  if (status == CLI_GO && p->residual)
    status = cli_matrix_convert(ctx, "bound", &d->residual.m, ESMM_F32, &residual);
  for (int64_t i = 0; i < p->m * p->n && status == CLI_GO; i++) {
    const double size = fabs(at(&d->want, i)), added = p->residual ? fabs(at(&residual, i)) : 0;
    double error = error_of_sum(rule, depth, at(out, i));
    if (p->gate) {
      const double g = fabs(at(&gate, i)), u = fabs(at(&up, i));
      const double g_error = error_activated(p->activation, error_of_sum(rule, depth, at(&gate_bound, i)), g);
      error = g * error + u * g_error + error * g_error + 2 * ERROR_UNIT * g * u;
    } else {
      error = error_activated(p->activation, error, size + added);
    }
    error += p->residual ? 2 * ERROR_UNIT * (size + added) : 0;
    error += ERROR_UNIT * size; /* the reference's own rounding: it is kept in fp32 */
    ((float *)out->m.data)[i] = (float)(error_when_stored(rule, error, size) * (1 + 0x1p-20));
  }
  io_matrix_free(&gate_bound);
  io_matrix_free(&gate);
  io_matrix_free(&up);
  io_matrix_free(&residual);
  return status;
}

static int make_data(esmm_ctx *ctx, const problem *p, data *d, bool gpu)
{
  int status = make_operand(ctx, p, ESMM_OPERAND_A, 0, &d->a);
  if (status == CLI_GO)
    status = make_operand(ctx, p, ESMM_OPERAND_B, 0, &d->b);
  if (status == CLI_GO)
    status = make_dense(ctx, p, 0, 1, p->n, ESMM_F32, ESMM_ROW_MAJOR, 0, &d->bias);
  if (status == CLI_GO && p->residual)
    status = make_dense(ctx, p, 100, p->m, p->n, p->dtype_b, p->order_a, 1, &d->residual);
  if (status == CLI_GO && p->gate)
    status = make_operand(ctx, p, ESMM_OPERAND_B, 200, &d->gate);
  if (status == CLI_GO && p->gate)
    status = make_dense(ctx, p, 300, 1, p->n, ESMM_F32, ESMM_ROW_MAJOR, 0, &d->gate_bias);
  if (status == CLI_GO)
    status = p->beta != 0 ? make_dense(ctx, p, 0, p->m, p->n, p->dtype_c, p->order_c, p->padding, &d->start)
                          : make_empty(p->m, p->n, p->dtype_c, p->order_c, p->padding, &d->start);
  if (status == CLI_GO)
    status = make_empty(p->m, p->n, p->dtype_c, p->order_c, p->padding, &d->got);
  if (status == CLI_GO)
    status = make_empty(p->m, p->n, ESMM_F32, ESMM_ROW_MAJOR, 0, &d->wide);
  if (status != CLI_GO)
    return status;
  d->counts = cli_alloc((size_t)p->n, sizeof *d->counts);
  esmm_status done = esmm_prepare(ctx, &d->b.m, NULL, &d->weights);
  if (done == ESMM_OK && p->gate)
    done = esmm_prepare(ctx, &d->gate.m, NULL, &d->gate_weights);
  if (done != ESMM_OK)
    return cli_status(ctx, "prepare", done);
  status = reference(ctx, p, d);
  error_rule rule = {.dtype_c = p->dtype_c, .gpu = gpu, .halves = p->dtype_a != ESMM_F32 && p->dtype_a == p->dtype_b};
  for (int i = 0; i < 2 && status == CLI_GO && !p->integers; i++) {
    rule.parts = i;
    status = bounds(ctx, p, d, &rule, &d->bound[i]);
  }
  return status;
}

/* Operands and weights on the GPU. B comes from either memory in turn. */
static int make_gpu_data(esmm_ctx *ctx, const problem *p, data *d)
{
  esmm_matrix near = {0};
  const int64_t words = (int64_t)((d->got.bytes + 3) / 4);
  const bool copied = p->seed % 2;
  int status = cli_device_copy(ctx, "A", &d->a.m, p->dtype_a, p->order_a, &d->gpu_a);
  if (status == CLI_GO)
    status = cli_device_copy(ctx, "bias", &d->bias.m, ESMM_F32, ESMM_ROW_MAJOR, &d->gpu_bias);
  if (status == CLI_GO)
    status = cli_matrix_alloc("C", 1, words, ESMM_F32, &d->bytes);
  if (status == CLI_GO)
    status = cli_device_alloc(ctx, "C", 1, words, ESMM_F32, ESMM_ROW_MAJOR, &d->gpu_c);
  if (status == CLI_GO && p->gate)
    status = cli_device_copy(ctx, "the gate's bias", &d->gate_bias.m, ESMM_F32, ESMM_ROW_MAJOR, &d->gpu_gate_bias);
  if (status == CLI_GO && p->statistics)
    status = cli_device_alloc(ctx, "counts", 1, p->n, ESMM_F32, ESMM_ROW_MAJOR, &d->gpu_counts);
  if (status == CLI_GO && copied)
    status = cli_device_copy(ctx, "B", &d->b.m, p->dtype_b, p->order_b, &near);
  if (status != CLI_GO)
    return status;
  memset(d->bytes.memory, 0xff, d->bytes.bytes);
  esmm_status done = esmm_prepare(ctx, copied ? &near : &d->b.m, NULL, &d->gpu_weights);
  if (done == ESMM_OK && p->gate)
    done = esmm_prepare(ctx, &d->gate.m, NULL, &d->gpu_gate);
  if (done != ESMM_OK)
    status = cli_status(ctx, "prepare", done);
  cli_device_free(ctx, &near);
  return status;
}

/* ---- one kernel on one problem ---- */

static void note_wrong(score *s, const problem *p, const char *what)
{
  s->wrong++;
  if (s->first[0])
    return;
  snprintf(s->first, sizeof s->first, "[%lld,%lld] %s%s x [%lld,%lld] %s%s -> %s%s, seed %llu: %s", (long long)p->m,
           (long long)p->k, esmm_dtype_str(p->dtype_a), p->order_a == ESMM_COL_MAJOR ? "'" : "", (long long)p->k,
           (long long)p->n, esmm_dtype_str(p->dtype_b), p->order_b == ESMM_COL_MAJOR ? "'" : "",
           esmm_dtype_str(p->dtype_c), p->order_c == ESMM_COL_MAJOR ? "'" : "", (unsigned long long)p->seed, what);
}

static bool padding_intact(const io_matrix *c)
{
  bool by_rows = c->m.order == ESMM_ROW_MAJOR;
  int64_t lines = by_rows ? c->m.rows : c->m.cols, length = by_rows ? c->m.cols : c->m.rows;
  size_t item = esmm_dtype_size(c->m.dtype);
  for (int64_t i = 0; i < lines; i++) {
    const unsigned char *at = (const unsigned char *)c->memory + (size_t)(i * c->m.ld + length) * item;
    for (size_t j = 0; j < (size_t)(c->m.ld - length) * item; j++)
      if (at[j] != 0xff)
        return false;
  }
  return true;
}

/* The plan may choose cuBLAS, which may split k and then adds parts rounded to a 16-bit C. */
static bool rounds_parts(const score *s)
{
  return strcmp(s->force, "auto") == 0 || strncmp(s->force, "cublas", strlen("cublas")) == 0;
}

/* Of the C that came out, whatever it is: nonzeros by column, and bitmaps. */
static void compare_statistics(esmm_ctx *ctx, const problem *p, const data *d, score *s)
{
  char what[128];
  esmm_pattern *want = NULL;
  for (int64_t j = 0; j < p->n; j++) {
    int32_t count = 0;
    for (int64_t i = 0; i < p->m; i++)
      count += ((const float *)d->wide.m.data)[i * p->n + j] != 0;
    if (count == d->counts[j])
      continue;
    snprintf(what, sizeof what, "column %lld has %d nonzeros, not %d", (long long)j, (int)count, (int)d->counts[j]);
    note_wrong(s, p, what);
    return;
  }
  const esmm_pattern_info info = cli_pattern(ctx, d->pattern);
  const int64_t words = info.strips * info.words;
  uint64_t *bits = cli_alloc((size_t)(2 * words + 1), sizeof *bits);
  const bool same = info.k == p->n && esmm_pattern_extract(ctx, &d->got.m, info.strip_rows, &want) == ESMM_OK &&
                    cli_pattern(ctx, want).strips == info.strips &&
                    esmm_pattern_bits(ctx, want, 0, info.strips, bits) == ESMM_OK &&
                    esmm_pattern_bits(ctx, d->pattern, 0, info.strips, bits + words) == ESMM_OK &&
                    memcmp(bits, bits + words, (size_t)words * sizeof *bits) == 0;
  if (!same)
    note_wrong(s, p, "the bitmaps of C are not those of C");
  esmm_pattern_free(want);
  free(bits);
}

static void compare(const problem *p, const data *d, score *s, bool gpu)
{
  const float *got = d->wide.m.data, *want = d->want.m.data, *bound = d->bound[gpu && rounds_parts(s)].m.data;
  char what[128];
  s->ran++;
  s->exact += p->integers;
  if (!padding_intact(&d->got)) {
    note_wrong(s, p, "it wrote between the rows of C");
    return;
  }
  for (int64_t i = 0; i < p->m * p->n; i++) {
    double error = fabs((double)got[i] - (double)want[i]);
    bool equal = got[i] == want[i];
    bool rounded = p->dtype_c != ESMM_F32; /* by up to half a unit, which would hide the sums' own error */
    if (!p->integers && !rounded && !equal && bound[i] > 0 && !(error / (double)bound[i] <= s->worst))
      s->worst = error / (double)bound[i];
    if (equal || (!p->integers && error <= (double)bound[i]))
      continue; /* a NaN is neither */
    snprintf(what, sizeof what, "C[%lld,%lld] is %.9g, not %.9g", (long long)(i / p->n), (long long)(i % p->n),
             (double)got[i], (double)want[i]);
    note_wrong(s, p, what);
    return;
  }
}

/* b in the kernel's format. Every matrix is 4:4 and has blocks; a 2:4 one is prepared as 2:4. together: columns of the
   others choose together, 32 at a time. */
static esmm_status in_format(esmm_ctx *ctx, const esmm_matrix *b, esmm_format_kind format, bool together,
                             esmm_weights **weights)
{
  esmm_prepare_opts opts = {.size = sizeof opts, .format.kind = format};
  int64_t k = -1, col = -1;
  if (*weights)
    return ESMM_OK;
  const esmm_status done =
      format == ESMM_FORMAT_NM ? esmm_format_check(ctx, b, &opts.format, &k, &col) : ESMM_OK; /* 2:4 */
  if (k >= 0) {
    opts.format.keep = opts.format.group = 4;
    opts.format.group_cols = together ? 32 : 1;
  }
  return done == ESMM_OK ? esmm_prepare(ctx, b, &opts, weights) : done;
}

static esmm_status weights_of(esmm_ctx *ctx, const problem *p, data *d, esmm_format_kind format,
                              const esmm_weights **weights, const esmm_weights **gate)
{
  *weights = d->gpu_weights ? d->gpu_weights : d->weights;
  *gate = d->gpu_weights ? d->gpu_gate : d->gate_weights;
  if (format == ESMM_FORMAT_DENSE)
    return ESMM_OK;
  const bool together = !d->gpu_weights; /* a CPU has kernels for such columns alone */
  esmm_status done = in_format(ctx, &d->b.m, format, together, &d->formats[format]);
  if (done == ESMM_OK && p->gate)
    done = in_format(ctx, &d->gate.m, format, together, &d->gate_formats[format]);
  *weights = d->formats[format];
  *gate = d->gate_formats[format];
  return done;
}

/* Asks for counts and bitmaps. */
static void want_statistics(const problem *p, data *d, int32_t *counts, esmm_matmul_opts *opts)
{
  if (!p->statistics)
    return;
  esmm_pattern_free(d->pattern);
  d->pattern = NULL;
  memset(d->counts, 0xff, (size_t)p->n * sizeof *d->counts);
  opts->column_nonzeros = counts;
  opts->c_strip_rows = 1 + (int64_t)(p->seed % 9);
  opts->c_pattern = &d->pattern;
}

/* C and its padding go to the GPU and back as plain words, so that no conversion touches the marks. */
static esmm_status multiply_on_gpu(esmm_ctx *ctx, const problem *p, data *d, const char *force)
{
  esmm_matrix c = d->got.m;
  c.data = d->gpu_c.data;
  c.place = d->gpu_c.place;
  c.device = d->gpu_c.device;
  esmm_matmul_opts opts = options_of(p, d, force);
  opts.bias = p->bias ? d->gpu_bias.data : NULL;
  opts.gate = d->gpu_gate;
  opts.gate_bias = p->gate ? d->gpu_gate_bias.data : NULL;
  want_statistics(p, d, d->gpu_counts.data, &opts);
  memcpy(d->bytes.memory, d->start.memory, d->start.bytes);
  esmm_status done = esmm_matrix_copy(ctx, &d->bytes.m, &d->gpu_c);
  if (done == ESMM_OK)
    done = esmm_matmul(ctx, &d->gpu_a, d->gpu_weights, &c, &opts, NULL);
  if (done == ESMM_OK)
    done = esmm_matrix_copy(ctx, &d->gpu_c, &d->bytes.m);
  if (done == ESMM_OK && p->statistics) {
    esmm_matrix counts = {.data = d->counts, .rows = 1, .cols = p->n};
    done = esmm_matrix_copy(ctx, &d->gpu_counts, &counts);
  }
  memcpy(d->got.memory, d->bytes.memory, d->got.bytes);
  return done;
}

static esmm_status multiply(esmm_ctx *ctx, const problem *p, data *d, const score *s)
{
  memcpy(d->got.memory, d->start.memory, d->got.bytes); /* with the marks in the padding */
  const esmm_weights *weights = NULL;
  esmm_matmul_opts opts = options_of(p, d, s->force);
  esmm_status done = weights_of(ctx, p, d, s->format, &weights, &opts.gate);
  want_statistics(p, d, d->counts, &opts);
  return done == ESMM_OK ? esmm_matmul(ctx, &d->a.m, weights, &d->got.m, &opts, NULL) : done;
}

static int try_kernel(esmm_ctx *one, esmm_ctx *ctx, const problem *p, data *d, score *s, bool on_gpu)
{
  esmm_status done = on_gpu ? multiply_on_gpu(ctx, p, d, s->force) : multiply(ctx, p, d, s);
  if (done == ESMM_ERR_UNSUPPORTED) {
    if (s->refused++ == 0)
      snprintf(s->why_not, sizeof s->why_not, "%s", esmm_ctx_error(ctx));
    return CLI_GO;
  }
  if (done != ESMM_OK) {
    note_wrong(s, p, esmm_ctx_error(ctx));
    return CLI_GO;
  }
  done = esmm_matrix_copy(one, &d->got.m, &d->wide.m);
  if (done != ESMM_OK)
    return cli_status(one, "copy", done);
  compare(p, d, s, cli_on_gpu(ctx));
  if (p->statistics)
    compare_statistics(ctx, p, d, s);
  return CLI_GO;
}

/* ---- the problems ---- */

static const int64_t shapes[][3] = {{1, 1, 1},     {1, 64, 33},   {2, 130, 31},  {4, 257, 64},
                                    {7, 65, 96},   {16, 129, 65}, {17, 128, 32}, {33, 63, 97},
                                    {61, 200, 47}, {130, 70, 66}, {8, 264, 520}, {136, 192, 136}};
static const struct {
  esmm_generator_kind kind;
  double density;
} zeros[] = {{ESMM_GEN_DENSE, 1},         {ESMM_GEN_RANDOM, 0.1}, {ESMM_GEN_BLOCKWISE, 0.5}, {ESMM_GEN_PATTERN, 0},
             {ESMM_GEN_ACTIVATIONS, 0.2}, {ESMM_GEN_RANDOM, 0},   {ESMM_GEN_BLOCKWISE, 0.1}};
static const esmm_dtype dtypes[][3] = {{ESMM_F32, ESMM_F32, ESMM_F32}, {ESMM_BF16, ESMM_BF16, ESMM_BF16},
                                       {ESMM_F16, ESMM_F16, ESMM_F16}, {ESMM_BF16, ESMM_BF16, ESMM_F32},
                                       {ESMM_F16, ESMM_F16, ESMM_F32}, {ESMM_F32, ESMM_BF16, ESMM_F32},
                                       {ESMM_F16, ESMM_F32, ESMM_BF16}};
enum {
  SHAPES = sizeof shapes / sizeof *shapes,
  ZEROS = sizeof zeros / sizeof *zeros,
  DTYPES = sizeof dtypes / sizeof *dtypes,
  PROBLEMS = SHAPES * ZEROS * 2 * 2
};

/*
 * Shape, zeros and integers or not in full; fp32 for each, and one of the other mixes. Orders and epilogues take turns:
 * strides that are coprime to the rest let each meet each.
 */
static problem problem_at(int index)
{
  static const float alphas[] = {1, 1, 0.5f, -2, 1}, betas[] = {0, 1, 0.5f, 0, 0};
  static const esmm_activation activations[] = {ESMM_ACT_NONE, ESMM_ACT_NONE, ESMM_ACT_NONE, ESMM_ACT_RELU,
                                                ESMM_ACT_RELU2};
  int shape = index % SHAPES, kind = index / SHAPES % ZEROS;
  bool other = index / (SHAPES * ZEROS) % 2, integers = index / (SHAPES * ZEROS * 2);
  const esmm_dtype *dtype = dtypes[other ? 1 + (shape + kind) % (DTYPES - 1) : 0];
  /* Integers go without gates and curves: those round. */
  static const esmm_activation curves[] = {ESMM_ACT_NONE, ESMM_ACT_RELU,      ESMM_ACT_RELU2,
                                           ESMM_ACT_GELU, ESMM_ACT_GELU_TANH, ESMM_ACT_SILU};
  const bool more = (shape + index / SHAPES) % 2 == 0;
  int turn = shape * 3 + kind * 7 + (other ? 5 : 0) + (integers ? 11 : 0), epilogue = turn % 5, orders = turn % 8;
  return (problem){.m = shapes[shape][0],
                   .k = shapes[shape][1],
                   .n = shapes[shape][2],
                   .kind = zeros[kind].kind,
                   .density = zeros[kind].density,
                   .integers = integers,
                   .dtype_a = dtype[0],
                   .dtype_b = dtype[1],
                   .dtype_c = dtype[2],
                   .order_a = orders & 1 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                   .order_b = orders & 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                   .order_c = orders & 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR,
                   .alpha = alphas[epilogue],
                   .beta = betas[epilogue],
                   .bias = epilogue >= 2,
                   .activation = more && !integers ? curves[(shape + index / SHAPES / 2) % 6] : activations[epilogue],
                   .residual = more && turn % 3 == 0,
                   .gate = more && !integers && turn % 4 < 2,
                   .statistics = turn % 5 < 3,
                   .padding = turn % 2 ? 3 : 8, /* of 8: rows stay aligned to 16 bytes, which some kernels ask for */
                   .seed = (uint64_t)index + 1};
}

/* ---- the command ---- */

/* Every kernel that can run here but the reference, and the plan's own choice. */
static score *make_scores(const esmm_ctx *ctx, int *count)
{
  score *scores = cli_alloc((size_t)esmm_kernel_count() + 1, sizeof *scores);
  scores[0] = (score){.name = "auto", .force = "auto"};
  *count = 1;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) == ESMM_OK && info.available && !(info.flags & ESMM_KERNEL_REFERENCE)) {
      esmm_format_kind format = ESMM_FORMAT_DENSE; /* or the first that it reads */
      while (format < ESMM_FORMAT_NM && !(info.formats & 1u << format))
        format++;
      scores[*count] = (score){.name = info.name, .force = info.name, .format = format};
      ++*count;
    }
  }
  return scores;
}

/*
 * Every seventh problem is multiplied with all threads; all else is done with one: threads that wait for each other on
 * a busy machine would take many times as long over products as small as these. A GPU does them all.
 */
static int run_problems(esmm_ctx *one, esmm_ctx *all, score *scores, int count)
{
  const bool gpu = cli_on_gpu(all);
  cli_progress progress;
  cli_progress_start(&progress, "check");
  int status = CLI_GO;
  for (int i = 0; i < PROBLEMS && status == CLI_GO; i++) {
    esmm_ctx *ctx = gpu || i % 7 == 0 ? all : one;
    problem p = problem_at(i);
    data d = {0};
    status = make_data(one, &p, &d, gpu);
    if (status == CLI_GO && gpu)
      status = make_gpu_data(all, &p, &d);
    for (int s = 0; s < count && status == CLI_GO; s++) {
      status = try_kernel(one, ctx, &p, &d, &scores[s], false);
      if (status == CLI_GO && gpu)
        status = try_kernel(one, ctx, &p, &d, &scores[s], true);
    }
    free_data(all, &d);
    cli_progress_update(&progress, i + 1, PROBLEMS);
  }
  cli_progress_end(&progress);
  return status;
}

/* Another library's kernel, and the library is not installed: nothing is wrong with ours. */
static bool is_absent(const score *s)
{
  return s->ran == 0 && strstr(s->why_not, "libcublas");
}

/* A kernel that ran nowhere was not checked, and that is no success either. */
static int print_scores(const esmm_ctx *ctx, const score *scores, int count, double seconds)
{
  static const char *const heads[] = {"kernel", "products", "exact", "cannot", "error of bound", "result"};
  cli_table *table = cli_table_new("lrrrrl", heads);
  int bad = 0, absent = 0;
  for (int i = 0; i < count; i++) {
    const score *s = &scores[i];
    bool good = s->ran > 0 && s->wrong == 0;
    bad += !good && !is_absent(s);
    absent += is_absent(s);
    cli_table_cell(table, CLI_PLAIN, "%s", s->name);
    cli_table_cell(table, CLI_PLAIN, "%d", s->ran);
    cli_table_cell(table, CLI_PLAIN, "%d", s->exact);
    cli_table_cell(table, CLI_PLAIN, "%d", s->refused);
    cli_table_cell(table, CLI_PLAIN, "%s", s->ran > s->exact ? cli_number(s->worst, 2) : "-");
    if (good)
      cli_table_cell(table, CLI_GOOD, "ok");
    else if (s->wrong)
      cli_table_cell(table, CLI_BAD, "WRONG, %s", cli_count(s->wrong, "product"));
    else if (is_absent(s))
      cli_table_cell(table, CLI_WARN, "left out: no libcublas");
    else
      cli_table_cell(table, CLI_BAD, "NEVER RAN");
  }
  cli_table_print(table, stdout);
  cli_table_free(table);
  for (int i = 0; i < count; i++)
    if (scores[i].first[0])
      printf("%s: %s\n", scores[i].name, scores[i].first);
  printf("%d of %d ok on %s, %d problems, %s\n", count - bad - absent, count, esmm_ctx_device(ctx), (int)PROBLEMS,
         cli_seconds(seconds));
  return bad ? cli_failed("%d of %d kernels gave wrong results or none: please report the lines above with 'esmm info'",
                          bad, count)
             : CLI_OK;
}

int cmd_check(int argc, char **argv)
{
  cli_machine machine = {0};
  const cli_option options[] = {CLI_MACHINE_OPTIONS(&machine), {0}};
  const cli_parser parser = {
      .synopsis = "check [--device NAME] [--threads N]",
      .about =
          "A self-test of a few seconds: every kernel that the device can run, on small ragged problems of every\n"
          "dtype and with every epilogue, against the reference kernel; on a GPU with operands in its memory and in\n"
          "the host's. Exit status 0 only if all were right.",
      .options = options,
      .notes = "Columns\n"
               "  products        how many were multiplied and compared\n"
               "  exact           of those: on integers, where results must be equal\n"
               "  cannot          problems that the kernel does not take (decode takes few rows, for instance)\n"
               "  error of bound  largest error in fp32 results, as a share of what sums in fp32 may have; 1 is the "
               "limit\n"};
  int words;
  int status = cli_parse(&parser, argc, argv, NULL, &words);
  if (status != CLI_GO)
    return status;
  esmm_ctx *one = NULL, *all = NULL;
  status = cli_context(&machine, NULL, &all);
  if (status == CLI_GO)
    status = cli_context(&(cli_machine){.device = "cpu", .threads = 1}, NULL, &one);
  if (status == CLI_GO) {
    int count;
    double start = cli_now();
    score *scores = make_scores(all, &count);
    status = run_problems(one, all, scores, count);
    if (status == CLI_GO)
      status = print_scores(all, scores, count, cli_now() - start);
    free(scores);
  }
  esmm_ctx_free(one);
  esmm_ctx_free(all);
  return status;
}
