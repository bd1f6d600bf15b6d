/*
 * cmd_inspect.c: esmm inspect: where a file's zeros are, and what that is worth.
 *
 * Densities are exact, over the whole matrix, from the library's own bitmaps: one bitmap a row (or column), coarsened
 * step by step. Beside each stands the density for independent zeros at the same element density: the difference is
 * the structure that lets tall strips skip.
 */
#include "inspect.h"
#include "verdict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define WEIGHTS_MAGIC "\211ESMMW\r\n" /* first bytes of a file that esmm_weights_save wrote */

static const int64_t strips[] = {1, 4, 8, 16, 32, 64, 128};
enum { STRIPS = sizeof strips / sizeof *strips };

typedef struct side {
  double strip[STRIPS]; /* density at strips[i] */
  double dead;          /* share of k's that are zero throughout */
} side;

static bool is_weights(const char *path)
{
  unsigned char head[8] = {0};
  struct stat info;
  if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) /* looking into a pipe would take its first bytes away */
    return false;
  FILE *file = fopen(path, "rb");
  if (!file)
    return false;
  size_t got = fread(head, 1, sizeof head, file);
  fclose(file);
  return got == sizeof head && memcmp(head, WEIGHTS_MAGIC, sizeof head) == 0;
}

/* "2048x3072" */
static int parse_dims(const char *text, int64_t *rows, int64_t *cols)
{
  *rows = *cols = 0;
  if (!text)
    return CLI_GO;
  char first[32] = "";
  size_t length = strcspn(text, "x");
  if (!text[length] || length == 0 || length >= sizeof first)
    return cli_usage("--dims: %s is not ROWSxCOLS, as in 2048x3072", text);
  memcpy(first, text, length);
  int status = cli_parse_int("--dims", first, 0, (int64_t)CLI_MAX_DIMENSION, rows);
  return status == CLI_GO ? cli_parse_int("--dims", text + length + 1, 0, (int64_t)CLI_MAX_DIMENSION, cols) : status;
}

/* Element i's bits less the sign; *infinity: what an Inf has there. */
static uint32_t body_of(const esmm_matrix *m, int64_t i, uint32_t *infinity)
{
  uint32_t word;
  switch (m->dtype) {
  case ESMM_F32:
    *infinity = 0x7f800000u;
    memcpy(&word, (const float *)m->data + i, sizeof word);
    return word & 0x7fffffffu;
  case ESMM_BF16:
    *infinity = 0x7f80u;
    return ((const uint16_t *)m->data)[i] & 0x7fffu;
  case ESMM_F16:
    *infinity = 0x7c00u;
    return ((const uint16_t *)m->data)[i] & 0x7fffu;
  }
  *infinity = 1; /* an unknown dtype has neither */
  return 0;
}

static void count_special(const esmm_matrix *m, int64_t *nan_count, int64_t *inf_count)
{
  const int64_t count = m->rows * m->cols; /* files are read tightly packed */
  *nan_count = *inf_count = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t infinity;
    const uint32_t body = body_of(m, i, &infinity);
    *nan_count += body > infinity;
    *inf_count += body == infinity;
  }
}

static esmm_status measure_side(esmm_ctx *ctx, const esmm_matrix *m, bool as_b, side *out)
{
  esmm_pattern *lines = NULL, *now = NULL, *whole = NULL;
  const int64_t length = as_b ? m->cols : m->rows;
  *out = (side){0};
  esmm_status status = as_b ? esmm_pattern_extract_b(ctx, m, 1, &lines) : esmm_pattern_extract(ctx, m, 1, &lines);
  if (status != ESMM_OK)
    return status;
  out->strip[0] = cli_pattern(ctx, lines).density;
  for (int i = 1; i < STRIPS && status == ESMM_OK; i++) {
    esmm_pattern *coarser = NULL;
    status = esmm_pattern_coarsen(ctx, now ? now : lines, strips[i], &coarser);
    if (status == ESMM_OK)
      out->strip[i] = cli_pattern(ctx, coarser).density;
    esmm_pattern_free(now);
    now = coarser;
  }
  if (status == ESMM_OK && length > 0)
    status = esmm_pattern_coarsen(ctx, lines, length, &whole);
  if (whole)
    out->dead = 1 - cli_pattern(ctx, whole).density;
  esmm_pattern_free(whole);
  esmm_pattern_free(now);
  esmm_pattern_free(lines);
  return status;
}

static void print_facts(const char *path, const esmm_matrix *m, const side *a, const side *b)
{
  const double total = (double)m->rows * (double)m->cols;
  int64_t nan_count, inf_count;
  count_special(m, &nan_count, &inf_count);
  cli_table *table = cli_table_new("ll", NULL);
  cli_table_fact(table, "file", "%s", path);
  cli_table_fact(table, "shape", "%lld x %lld, %s-major", (long long)m->rows, (long long)m->cols,
                 m->order == ESMM_ROW_MAJOR ? "row" : "column");
  cli_table_fact(table, "dtype", "%s, %s", esmm_dtype_str(m->dtype),
                 cli_bytes(total * (double)esmm_dtype_size(m->dtype)));
  cli_table_fact(table, "nonzeros", "%.0f of %.0f, element density %.4f", round(a->strip[0] * total), total,
                 a->strip[0]);
  cli_table_fact(table, "zero rows", "%.0f of %lld, %s", round(b->dead * (double)m->rows), (long long)m->rows,
                 cli_percent(b->dead));
  cli_table_fact(table, "zero columns", "%.0f of %lld, %s", round(a->dead * (double)m->cols), (long long)m->cols,
                 cli_percent(a->dead));
  cli_table_fact(table, "NaN, Inf", "%lld, %lld", (long long)nan_count, (long long)inf_count);
  cli_table_print(table, stdout);
  cli_table_free(table);
}

static void print_strips(const side *a, const side *b)
{
  static const char *const heads[] = {"strip", "as A: rows", "as B: columns", "if independent"};
  cli_table *table = cli_table_new("rrrr", heads);
  for (int i = 0; i < STRIPS; i++) {
    cli_table_cell(table, CLI_PLAIN, "%lld", (long long)strips[i]);
    cli_table_cell(table, CLI_PLAIN, "%.4f", a->strip[i]);
    cli_table_cell(table, CLI_PLAIN, "%.4f", b->strip[i]);
    cli_table_cell(table, CLI_FAINT, "%.4f", 1 - pow(1 - a->strip[0], (double)strips[i]));
  }
  printf("\nStrip density: share of k's that some row of a strip (some column, as B) needs\n");
  cli_table_print(table, stdout);
  cli_table_free(table);
}

static int dense_operand(esmm_ctx *ctx, const char *what, esmm_operand operand, int64_t rows, int64_t cols,
                         esmm_dtype dtype, io_matrix *out)
{
  int status = cli_matrix_alloc(what, rows, cols, dtype, out);
  if (status != CLI_GO)
    return status;
  esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_DENSE, .operand = operand, .seed = 1};
  esmm_status done = esmm_generate(ctx, &g, &out->m);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, what, done);
}

typedef struct prediction {
  cli_table *table;
  dense_baseline baseline;
  bool full; /* nothing is zero: nothing is promised */
} prediction;

/* One line of the prediction: the plan's estimate for its kernel against the time of the dense library. */
static int predict(esmm_ctx *ctx, const prediction *p, const char *role, const esmm_matrix *a,
                   const esmm_weights *weights)
{
  cli_table *table = p->table;
  esmm_weights_info info = {.size = sizeof info};
  esmm_status done = esmm_weights_get_info(weights, &info);
  if (done != ESMM_OK)
    return cli_status(ctx, role, done);
  esmm_matrix near, c = {0}; /* where the kernels want them */
  int status = cli_device_view(ctx, "A", a, &near);
  if (status == CLI_GO)
    status = cli_device_alloc(ctx, "C", a->rows, info.cols, ESMM_F32, ESMM_ROW_MAJOR, &c);
  if (status != CLI_GO) {
    cli_device_view_free(ctx, a, &near);
    return status;
  }
  int count = esmm_kernel_count();
  esmm_verdict *verdicts = cli_alloc((size_t)count, sizeof *verdicts);
  done = esmm_explain(ctx, &near, weights, &c, NULL, verdicts, sizeof *verdicts, &count);
  if (done != ESMM_OK) {
    status = cli_status(ctx, role, done);
  } else {
    const esmm_verdict *chosen = verdict_chosen(verdicts, count);
    const double dense = dense_baseline_seconds(&p->baseline, a->rows, info.rows, info.cols, verdicts, count);
    const double seconds = chosen ? chosen->seconds : NAN;
    cli_table_cell(table, CLI_PLAIN, "%s", role);
    cli_table_cell(table, CLI_PLAIN, "[%lld,%lld] x [%lld,%lld]", (long long)a->rows, (long long)a->cols,
                   (long long)info.rows, (long long)info.cols);
    cli_table_cell(table, CLI_PLAIN, "%s", chosen ? chosen->kernel : "none");
    cli_table_cell(table, CLI_PLAIN, "%s", cli_seconds(seconds));
    cli_table_cell(table, CLI_PLAIN, "%s", cli_seconds(dense));
    if (seconds > 0 && isfinite(dense) && !p->full)
      cli_table_cell(table, dense > seconds ? CLI_GOOD : CLI_PLAIN, "%.2fx", dense / seconds);
    else
      cli_table_cell(table, CLI_PLAIN, "-");
  }
  free(verdicts);
  cli_device_view_free(ctx, a, &near);
  cli_device_free(ctx, &c);
  return status;
}

static int predict_as_a(esmm_ctx *ctx, const prediction *p, const inspect_request *r, const esmm_matrix *file)
{
  io_matrix b = {0};
  esmm_weights *weights = NULL;
  int status = dense_operand(ctx, "B", ESMM_OPERAND_B, file->cols, r->n, file->dtype, &b);
  if (status == CLI_GO) {
    esmm_status done = esmm_prepare(ctx, &b.m, NULL, &weights);
    status = done == ESMM_OK ? predict(ctx, p, "as A", file, weights) : cli_status(ctx, "B", done);
  }
  esmm_weights_free(weights);
  io_matrix_free(&b);
  return status;
}

static int predict_as_b(esmm_ctx *ctx, const prediction *p, const inspect_request *r, const esmm_weights *weights,
                        int64_t k, esmm_dtype dtype)
{
  io_matrix a = {0};
  int status = dense_operand(ctx, "A", ESMM_OPERAND_A, r->m, k, dtype, &a);
  if (status == CLI_GO)
    status = predict(ctx, p, "as B", &a.m, weights);
  io_matrix_free(&a);
  return status;
}

static prediction prediction_new(const esmm_ctx *ctx)
{
  static const char *const heads[] = {"", "product", "kernel", "estimate", "dense", "speedup"};
  prediction p = {.table = cli_table_new("lllrrr", heads)};
  dense_baseline_find(ctx, &p.baseline);
  return p;
}

static void print_prediction(const esmm_ctx *ctx, const prediction *p)
{
  printf("\nPredicted by the plan, the other operand dense, %s, %s\n", cli_workers(ctx),
         esmm_is_tuned(ctx) ? "constants measured here" : "shipped constants ('esmm tune' measures this machine)");
  cli_table_print(p->table, stdout);
  printf("dense: %s\n", p->baseline.name);
  if (p->full)
    printf("Nothing is zero here: there is nothing to skip, and no speedup is promised.\n");
}

/* 2:4 and blocks that are there, asked for or not: as B, k is the file's first axis; transposed, its last one. */
static int print_patterns(esmm_ctx *ctx, const char *path, const esmm_matrix *m)
{
  static const char *const ways[] = {"as B", "as B transposed ([out, in])"};
  bool any = false;
  for (int i = 0; i < 2; i++) {
    esmm_matrix b = *m;
    model_densities densities;
    if (i == 1) {
      b.rows = m->cols;
      b.cols = m->rows;
      b.order = m->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    }
    const int status = model_measure(ctx, path, &b, &densities);
    if (status != CLI_GO)
      return status;
    const char *pattern = model_pattern(&densities);
    if (pattern[0])
      printf("%sPattern %s: %s\n", any ? "" : "\n", ways[i], pattern);
    any = any || pattern[0];
  }
  return CLI_GO;
}

static int inspect_matrix(esmm_ctx *ctx, const inspect_request *r)
{
  enum { STEPS = 6 };
  cli_progress progress;
  cli_progress_start(&progress, "inspect");
  io_matrix file;
  int status = model_read(NULL, r->path, r->dims, r->rows, r->cols, &file);
  if (status != CLI_GO)
    return status;

  side a, b;
  esmm_weights *weights = NULL;
  prediction p = prediction_new(ctx);
  const bool empty = file.m.rows == 0 || file.m.cols == 0; /* its other side may be any number: nothing is multiplied */
  cli_progress_update(&progress, 1, STEPS);
  esmm_status done = measure_side(ctx, &file.m, false, &a);
  cli_progress_update(&progress, 2, STEPS);
  if (done == ESMM_OK)
    done = measure_side(ctx, &file.m, true, &b);
  cli_progress_update(&progress, 3, STEPS);
  p.full = done == ESMM_OK && a.strip[0] == 1;
  if (done == ESMM_OK && !empty)
    done = esmm_prepare(ctx, &file.m, NULL, &weights);
  cli_progress_update(&progress, 4, STEPS);
  if (done != ESMM_OK)
    status = cli_status(ctx, r->path, done);
  else if (!empty)
    status = predict_as_a(ctx, &p, r, &file.m);
  cli_progress_update(&progress, 5, STEPS);
  if (status == CLI_GO && !empty)
    status = predict_as_b(ctx, &p, r, weights, file.m.rows, file.m.dtype);
  cli_progress_end(&progress);
  if (status == CLI_GO) {
    print_facts(r->path, &file.m, &a, &b);
    print_strips(&a, &b);
    status = empty ? CLI_GO : print_patterns(ctx, r->path, &file.m);
  }
  if (status == CLI_GO && !empty)
    print_prediction(ctx, &p);
  cli_table_free(p.table);
  esmm_weights_free(weights);
  io_matrix_free(&file);
  return status == CLI_GO ? CLI_OK : status;
}

static int inspect_weights(esmm_ctx *ctx, const inspect_request *r)
{
  static const char *const uses[] = {"any m", "decode (m up to 16)", "large m"};
  if (r->dims)
    return cli_usage("--dims: a weights file has its own shape");
  esmm_weights *weights = NULL;
  esmm_weights_info info = {.size = sizeof info};
  esmm_status done = esmm_weights_load(ctx, r->path, &weights);
  if (done == ESMM_OK)
    done = esmm_weights_get_info(weights, &info);
  if (done != ESMM_OK) {
    esmm_weights_free(weights);
    return cli_status(ctx, r->path, done);
  }
  cli_table *facts = cli_table_new("ll", NULL);
  prediction p = prediction_new(ctx);
  p.full = info.element_density == 1;
  cli_table_fact(facts, "file", "%s, prepared weights", r->path);
  cli_table_fact(facts, "shape", "%lld x %lld", (long long)info.rows, (long long)info.cols);
  cli_table_fact(facts, "dtype", "%s", esmm_dtype_str(info.dtype));
  cli_table_fact(facts, "use", "%s%s", uses[info.use], info.strict ? ", strict" : "");
  cli_table_fact(facts, "bytes held", "%s", cli_bytes((double)info.bytes));
  cli_table_fact(facts, "element density", "%.4f", info.element_density);
  cli_table_fact(facts, "strip density", "%.4f at %s", info.strip_density, cli_count(info.strip_cols, "column"));
  cli_table_print(facts, stdout);
  int status = predict_as_b(ctx, &p, r, weights, info.rows, info.dtype);
  if (status == CLI_GO)
    print_prediction(ctx, &p);
  cli_table_free(facts);
  cli_table_free(p.table);
  esmm_weights_free(weights);
  return status == CLI_GO ? CLI_OK : status;
}

int cmd_inspect(int argc, char **argv)
{
  inspect_request r = {.m = 1024, .n = 1024};
  bool has_axis = false;
  const cli_option options[] = {
      {"dims", CLI_STRING, &r.dims, "ROWSxCOLS", "the shape of a raw float32 file; a .npy file must agree", 0, 0, NULL,
       NULL},
      {"n", CLI_INT, &r.n, "N", "columns of the dense B that the file is predicted against, as A (default 1024)", 1,
       1e6, NULL, &r.has_n},
      {"m", CLI_INT, &r.m, "M", "rows of the dense A that the file is predicted against, as B (default 1024)", 1, 1e6,
       NULL, NULL},
      CLI_MACHINE_OPTIONS(&r.machine),
      {NULL, CLI_HEADING, NULL, NULL, "Of a model: a safetensors or .pt file, a directory, or any file with --json", 0,
       0, NULL, NULL},
      MODEL_K_AXIS_OPTION(&r.k_axis, &has_axis),
      {"format", CLI_STRING, &r.format, "dense|bsr:R|bsr:RxC|nm:N:M",
       "what B would be prepared as (default dense); where a tensor does\n"
       "not fit N:M there is no prediction",
       0, 0, NULL, NULL},
      {"json", CLI_STRING, &r.json, "FILE",
       "a line of JSON for each matrix; '-' is stdout, and the table\n"
       "then goes to stderr",
       0, 0, NULL, NULL},
      {0}};
  const cli_parser parser = {
      .synopsis = "inspect FILE|DIR [options]",
      .about =
          "Shows a matrix's shape, its zeros at several granularities, patterns of them (2:4, blocks), and the "
          "speedup\n"
          "over the dense library that the plan predicts for it as A (activations) and as B (weights). FILE is .npy,\n"
          "raw little-endian float32 with --dims or its shape in its name (w_512x128.f32), or prepared weights as\n"
          "'esmm run --save-weights' writes them.\n"
          "Compressed files: esmm inspect <(gunzip -c x.npy.gz)\n"
          "\n"
          "Of a safetensors or .pt file it lists every matrix as B, with the densities of its elements, of strips of\n"
          "32 columns and of square blocks, and the predicted speedup; of a directory, those of every .safetensors,\n"
          ".pt, .pth and .npy file below it, and of raw files that have their shape in their name (w_512x128.f32);\n"
          "of the index of a model in several files (model.safetensors.index.json), those of all of them.",
      .options = options,
      .min_words = 1,
      .max_words = 1,
      .words_are = "one file or directory"};
  int count;
  int status = cli_parse(&parser, argc, argv, &r.path, &count);
  if (status == CLI_GO)
    status = parse_dims(r.dims, &r.rows, &r.cols);
  if (status != CLI_GO)
    return status;
  const bool model = r.json || (!r.dims && model_is(r.path)), weights = is_weights(r.path);
  if (model && r.has_n)
    return cli_usage("--n is for one matrix as A; a model's tensors are inspected as B");
  if (!model && (has_axis || r.format))
    return cli_usage("--k-axis and --format are for a model or a directory, or with --json");
  if (weights && r.json)
    return cli_usage("--json: prepared weights are no tensors; it is for models and matrices");
  esmm_ctx *ctx;
  status = cli_context(&r.machine, NULL, &ctx);
  if (status != CLI_GO)
    return status;
  status = weights ? inspect_weights(ctx, &r) : model ? inspect_model(ctx, &r) : inspect_matrix(ctx, &r);
  esmm_ctx_free(ctx);
  return status;
}
