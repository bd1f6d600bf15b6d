/*
 * bench_epilogue.c: --epilogue: products that end with a bias, an activation, a gate, a residual or statistics of C.
 *
 * Only our kernels do: the dense libraries multiply alone, twice where there is a gate, and their times leave out the
 * epilogue. Results are held to float64, with error_bound.h's error of the sums carried through the epilogue; counts
 * and bitmaps to all of the stored C.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- options ---- */

static const char *const activations[] = {"none", "relu", "relu2", "gelu", "gelu-tanh", "silu"}; /* esmm_activation */

static int activation_of(const char *word, size_t length)
{
  for (int i = 1; i < (int)(sizeof activations / sizeof *activations); i++)
    if (strlen(activations[i]) == length && strncmp(activations[i], word, length) == 0)
      return i;
  return 0;
}

static bool is_word(const char *name, const char *word, size_t length)
{
  return strlen(name) == length && strncmp(name, word, length) == 0;
}

static int take_word(const char *word, size_t length, bench_epilogue *out)
{
  static const char bitmaps[] = "bitmaps:";
  const int activation = activation_of(word, length);
  bool *flag = is_word("bias", word, length)       ? &out->bias
               : is_word("residual", word, length) ? &out->residual
               : is_word("gate", word, length)     ? &out->gate
               : is_word("counts", word, length)   ? &out->counts
                                                   : NULL;
  if ((flag && *flag) || (activation && out->activation))
    return cli_usage("--epilogue: '%.*s' is one too many: each at most once, and one activation", (int)length, word);
  if (flag) {
    *flag = true;
    return CLI_GO;
  }
  if (activation) {
    out->activation = (esmm_activation)activation;
    return CLI_GO;
  }
  if (length > strlen(bitmaps) && length < 32 && strncmp(word, bitmaps, strlen(bitmaps)) == 0) {
    char rows[32];
    snprintf(rows, sizeof rows, "%.*s", (int)(length - strlen(bitmaps)), word + strlen(bitmaps));
    return cli_parse_int("--epilogue bitmaps", rows, 1, 1 << 20, &out->bitmap_rows);
  }
  return cli_usage("--epilogue: '%.*s' is none of bias, relu, relu2, gelu, gelu-tanh, silu, gate, residual, counts, "
                   "bitmaps:ROWS",
                   (int)length, word);
}

int bench_epilogue_parse(const char *text, bench_epilogue *out)
{
  int status = CLI_GO;
  *out = (bench_epilogue){.any = text != NULL};
  for (const char *word = text; word && status == CLI_GO;) {
    const size_t length = strcspn(word, ",");
    status = take_word(word, length, out);
    word = word[length] ? word + length + 1 : NULL;
  }
  return status;
}

/* ---- operands ---- */

static int dense(const bench *b, const char *what, uint64_t seed, int64_t rows, int64_t cols, io_matrix *out)
{
  return bench_dense(b, what, ESMM_OPERAND_A, seed, rows, cols, ESMM_F32, out);
}

/* A second B, with zeros of the same kind. */
static int make_gate(bench *b, bench_data *data)
{
  bench_finish *f = &data->finish;
  const esmm_matrix *like = &data->b.m;
  esmm_generator generator = b->problem.b.generator;
  const esmm_prune_opts *prune = &b->problem.b.prune;
  if (b->problem.b.path)
    return cli_failed("--epilogue: a gate is generated, and B comes from a file");
  generator.seed += 500;
  int status = cli_matrix_alloc("gate", like->rows, like->cols, like->dtype, &f->gate);
  esmm_status made = status == CLI_GO ? esmm_generate(b->ctx, &generator, &f->gate.m) : ESMM_OK;
  if (status == CLI_GO && made == ESMM_OK && prune->format.kind != ESMM_FORMAT_DENSE)
    made = esmm_prune(b->ctx, &f->gate.m, prune, NULL);
  f->plain_gate = cli_alloc((size_t)data->copies, sizeof *f->plain_gate);
  f->gate_weights = cli_alloc((size_t)data->copies, sizeof *f->gate_weights);
  for (int i = 0; i < data->copies && status == CLI_GO && made == ESMM_OK; i++) {
    status = bench_plain(b->ctx, "gate in f32", &f->gate.m, i > 0, &f->plain_gate[i]);
    if (status == CLI_GO)
      made = esmm_prepare(b->ctx, &f->gate.m, &b->problem.prepare, &f->gate_weights[i]);
  }
  return made == ESMM_OK ? status : cli_status(b->ctx, "gate", made);
}

/* The other product of cuBLAS. */
static int make_gpu_gate(const bench *b, bench_data *data)
{
  bench_gpu *g = &data->gpu;
  const bool wide = data->library_dtype != data->finish.gate.m.dtype;
  const esmm_matrix *from = wide ? &data->finish.plain_gate[0].m : &data->finish.gate.m;
  const esmm_order order = g->transposed ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  int status = cli_device_copy(b->ctx, "gate for cuBLAS", from, from->dtype, order, &g->plain_gate);
  if (status == CLI_GO)
    g->owned[g->owned_count++] = g->plain_gate;
  if (status == CLI_GO)
    status = cli_device_alloc(b->ctx, "gate's C", data->m, data->n, g->plain_c.dtype, ESMM_ROW_MAJOR, &g->gate_c);
  if (status == CLI_GO)
    g->owned[g->owned_count++] = g->gate_c;
  return status;
}

/* Where the device wants them; the gate's weights are there already. */
static int make_near(const bench *b, bench_data *data)
{
  bench_finish *f = &data->finish;
  const bench_epilogue *e = &b->epilogue;
  const esmm_dtype dtype_c = (esmm_dtype)b->problem.dtype_c;
  int status = CLI_GO;
  if (e->bias)
    status = cli_device_copy(b->ctx, "bias", &f->bias.m, ESMM_F32, ESMM_ROW_MAJOR, &f->near_bias);
  if (status == CLI_GO && e->residual)
    status = cli_device_copy(b->ctx, "residual", &f->residual.m, dtype_c, ESMM_ROW_MAJOR, &f->near_residual);
  if (status == CLI_GO && e->counts)
    status = cli_device_alloc(b->ctx, "counts", 1, data->n, ESMM_F32, ESMM_ROW_MAJOR, &f->near_counts);
  return status;
}

/* A residual of C's dtype, but in fp32: the reference adds the kernel's values. */
static int make_residual(const bench *b, bench_data *data)
{
  io_matrix rounded = {0};
  int status = dense(b, "residual", 7002, data->m, data->n, &data->finish.residual);
  if (status == CLI_GO && b->problem.dtype_c != ESMM_F32)
    status = cli_matrix_convert(b->ctx, "residual", &data->finish.residual.m, (esmm_dtype)b->problem.dtype_c, &rounded);
  if (status == CLI_GO && rounded.memory) {
    const esmm_status done = esmm_matrix_copy(b->ctx, &rounded.m, &data->finish.residual.m);
    status = done == ESMM_OK ? CLI_GO : cli_status(b->ctx, "residual", done);
  }
  io_matrix_free(&rounded);
  return status;
}

int bench_finish_make(bench *b, bench_data *data)
{
  bench_finish *f = &data->finish;
  const bench_epilogue *e = &b->epilogue;
  int status = e->bias ? dense(b, "bias", 7001, 1, data->n, &f->bias) : CLI_GO;
  if (status == CLI_GO && e->residual)
    status = make_residual(b, data);
  if (status == CLI_GO && e->counts)
    status = cli_matrix_alloc("counts", 1, data->n, ESMM_F32, &f->last_counts_host);
  if (status == CLI_GO && e->gate)
    status = make_gate(b, data);
  if (status == CLI_GO && e->gate && b->gpu && b->library_count > 0)
    status = make_gpu_gate(b, data);
  return status == CLI_GO ? make_near(b, data) : status;
}

static void forget_patterns(bench_finish *f, int keep)
{
  const int drop = f->pattern_count - keep;
  for (int i = 0; i < drop; i++)
    esmm_pattern_free(f->patterns[i]);
  for (int i = 0; i < keep && drop > 0; i++)
    f->patterns[i] = f->patterns[i + drop];
  f->pattern_count = drop > 0 ? keep : f->pattern_count;
}

void bench_finish_free(const bench *b, bench_data *data)
{
  bench_finish *f = &data->finish;
  forget_patterns(f, 0);
  for (int i = 0; i < data->copies && f->gate_weights; i++) {
    esmm_weights_free(f->gate_weights[i]);
    io_matrix_free(&f->plain_gate[i]);
  }
  free(f->gate_weights);
  free(f->plain_gate);
  cli_device_free(b->ctx, &f->near_bias);
  cli_device_free(b->ctx, &f->near_residual);
  cli_device_free(b->ctx, &f->near_counts);
  io_matrix_free(&f->bias);
  io_matrix_free(&f->residual);
  io_matrix_free(&f->gate);
  io_matrix_free(&f->last_counts_host);
  *f = (bench_finish){0};
}

/* ---- calls ---- */

/* The bitmaps of a call are new ones. Those of calls that are still under way are kept: to free them might wait. */
void bench_finish_opts(const bench *b, bench_data *data, int turn, esmm_matmul_opts *opts)
{
  const bench_epilogue *e = &b->epilogue;
  bench_finish *f = &data->finish;
  opts->activation = e->activation;
  opts->bias = f->near_bias.data;
  opts->residual = e->residual ? &f->near_residual : NULL;
  opts->gate = e->gate ? f->gate_weights[turn % data->copies] : NULL;
  opts->column_nonzeros = f->near_counts.data;
  if (!e->bitmap_rows)
    return;
  if (f->pattern_count == BENCH_TIMERS)
    forget_patterns(f, 0);
  opts->c_strip_rows = e->bitmap_rows;
  f->patterns[f->pattern_count] = NULL;
  opts->c_pattern = &f->patterns[f->pattern_count++];
}

/* A gate takes two products' C; what only our kernels note is no part of it. */
bool bench_finish_can_pass(const bench *b)
{
  const bench_epilogue *e = &b->epilogue;
  return b->gpu && b->library_count > 0 && !e->gate && (e->bias || e->residual || e->activation != ESMM_ACT_NONE);
}

esmm_status bench_finish_pass(bench *b, bench_data *data)
{
  static const float zero = 0.0f, one = 1.0f;
  const bench_finish *f = &data->finish;
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = &zero,
                                 .beta = &one,
                                 .bias = f->near_bias.data,
                                 .activation = b->epilogue.activation,
                                 .residual = b->epilogue.residual ? &f->near_residual : NULL};
  return esmm_matmul(b->ctx, &data->gpu.a, data->weights[0], &data->gpu.plain_c, &opts, NULL);
}

void bench_finish_release(bench_data *data)
{
  forget_patterns(&data->finish, data->finish.pattern_count > 0 ? 1 : 0);
}

/* ---- the reference ---- */

int bench_finish_reference(const bench *b, const bench_data *data, bench_reference *reference)
{
  const bench_finish *f = &data->finish;
  reference->finished = true;
  reference->activation = b->epilogue.activation;
  reference->bias = f->bias.m.data;
  reference->residual = f->residual.m.data;
  if (!b->epilogue.gate)
    return CLI_GO;
  bench_reference gate = {0}; /* the same rows: they depend on the shape alone */
  const int status = bench_reference_make(b->threads, data->m, data->k, data->n, data->plain_a[0].m.data,
                                          f->plain_gate[0].m.data, &gate);
  reference->gate_values = gate.values;
  reference->gate_magnitudes = gate.magnitudes;
  free(gate.rows);
  free(gate.terms);
  return status;
}

static double activate(esmm_activation activation, double x)
{
  switch (activation) {
  case ESMM_ACT_NONE:
    break;
  case ESMM_ACT_RELU:
    return fmax(x, 0);
  case ESMM_ACT_RELU2:
    return x > 0 ? x * x : 0;
  case ESMM_ACT_GELU:
    return x / 2 * erfc(-x / sqrt(2));
  case ESMM_ACT_GELU_TANH:
    return x / 2 * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  case ESMM_ACT_SILU:
    return x / (1 + exp(-x));
  }
  return x;
}

double bench_finish_exact(const bench_reference *reference, const error_rule *rule, int64_t i, int64_t j, double *error)
{
  const int64_t at = i * reference->n + j;
  const double depth = error_depth(rule, (double)reference->terms[i]) + 1; /* the bias is a term more */
  const double bias = reference->bias ? (double)reference->bias[j] : 0;
  const double x = reference->values[at] + bias;
  double y, off = error_of_sum(rule, depth, reference->magnitudes[at] + fabs(bias));
  if (reference->gate_values) {
    const double g = activate(reference->activation, reference->gate_values[at]);
    const double g_off =
        error_activated(reference->activation, error_of_sum(rule, depth, reference->gate_magnitudes[at]), fabs(g));
    y = g * x;
    off = fabs(g) * off + fabs(x) * g_off + off * g_off + 2 * ERROR_UNIT * fabs(y);
  } else {
    y = activate(reference->activation, x);
    off = error_activated(reference->activation, off, fabs(y));
  }
  if (reference->residual) {
    const double added = (double)reference->residual[reference->rows[i] * reference->n + j];
    off += 2 * ERROR_UNIT * (fabs(y) + fabs(added));
    y += added;
  }
  *error = off;
  return y;
}

/* ---- statistics ---- */

typedef struct statistics {
  const float *c; /* all of C */
  int64_t m, n;
  int32_t *counts;     /* [n] */
  uint64_t *bits;      /* [strips][words] */
  int64_t rows, words; /* of a strip */
} statistics;

/* What they should be, in one pass over C. */
static void count_all(statistics *s)
{
  memset(s->counts, 0, (size_t)s->n * sizeof *s->counts);
  for (int64_t i = 0; i < s->m; i++) {
    const float *row = s->c + i * s->n;
    uint64_t *bits = s->bits ? s->bits + i / s->rows * s->words : NULL;
    for (int64_t j = 0; j < s->n; j++) {
      const bool set = row[j] != 0; /* NaN too */
      s->counts[j] += set;
      if (bits)
        bits[j / 64] |= (uint64_t)set << (j % 64);
    }
  }
}

static esmm_status compare_counts(const bench *b, bench_finish *f, const statistics *s, bool *right, char *why,
                                  size_t why_bytes)
{
  const esmm_status status = esmm_matrix_copy(b->ctx, &f->near_counts, &f->last_counts_host.m);
  for (int64_t j = 0; j < s->n && status == ESMM_OK && *right; j++) {
    int32_t got;
    memcpy(&got, (const char *)f->last_counts_host.m.data + (size_t)j * sizeof got, sizeof got);
    *right = got == s->counts[j];
    if (!*right)
      snprintf(why, why_bytes, "column %lld of C has %d nonzeros, and is said to have %d", (long long)j,
               (int)s->counts[j], (int)got);
  }
  return status;
}

static esmm_status compare_bitmaps(const bench *b, const bench_finish *f, const statistics *s, bool *right, char *why,
                                   size_t why_bytes)
{
  const esmm_pattern *pattern = f->patterns[f->pattern_count - 1];
  const esmm_pattern_info info = cli_pattern(b->ctx, pattern);
  const int64_t strips = (s->m + s->rows - 1) / s->rows;
  *right = pattern && info.strips == strips && info.words == s->words && info.strip_rows == s->rows;
  if (!*right) {
    snprintf(why, why_bytes, "C's bitmaps have another shape than was asked for");
    return ESMM_OK;
  }
  uint64_t *got = cli_alloc((size_t)s->words, sizeof *got);
  esmm_status status = ESMM_OK;
  for (int64_t i = 0; i < strips && status == ESMM_OK && *right; i++) {
    status = esmm_pattern_bits(b->ctx, pattern, i, 1, got);
    *right = status != ESMM_OK || memcmp(got, s->bits + i * s->words, (size_t)s->words * sizeof *got) == 0;
    if (!*right)
      snprintf(why, why_bytes, "the bitmap of strip %lld of C is not that of C", (long long)i);
  }
  free(got);
  return status;
}

int bench_finish_check(const bench *b, bench_data *data, bool *right, char *why, size_t why_bytes)
{
  bench_finish *f = &data->finish;
  const bench_epilogue *e = &b->epilogue;
  io_matrix all = {0};
  *right = true;
  if (!e->counts && !e->bitmap_rows)
    return CLI_GO;
  int status = cli_matrix_convert(b->ctx, "C", b->gpu ? &data->gpu.c : &data->c.m, ESMM_F32, &all);
  if (status != CLI_GO)
    return status;
  statistics s = {.c = all.m.data, .m = data->m, .n = data->n, .rows = e->bitmap_rows, .words = (data->n + 63) / 64};
  s.counts = cli_alloc((size_t)data->n, sizeof *s.counts);
  if (e->bitmap_rows)
    s.bits = cli_alloc((size_t)((data->m + s.rows - 1) / s.rows * s.words), sizeof *s.bits);
  count_all(&s);
  esmm_status done = e->counts ? compare_counts(b, f, &s, right, why, why_bytes) : ESMM_OK;
  if (done == ESMM_OK && *right && e->bitmap_rows)
    done = compare_bitmaps(b, f, &s, right, why, why_bytes);
  free(s.counts);
  free(s.bits);
  io_matrix_free(&all);
  return done == ESMM_OK ? CLI_GO : cli_status(b->ctx, "statistics", done);
}
