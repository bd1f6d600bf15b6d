/*
 * inspect_model.c: esmm inspect of a model: a line for every matrix in it.
 *
 * Tensors are loaded one by one and freed before the next: a model of any size needs memory for one band of prepared
 * columns and its bitmaps.
 */
#include "inspect.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct inspection {
  esmm_ctx *ctx;
  const inspect_request *request;
  esmm_prepare_opts prepare;
  dense_baseline baseline;
  model_files files;
  cli_table *table;
  cli_output json;
  cli_progress progress;
  double done, total;        /* bytes */
  double seconds, dense;     /* of all predictions */
  int shown, others, failed; /* tensors; failed: or files */
  char why[160];             /* some have no prediction */
  char refused[320];         /* the first that is no matrix that can be multiplied */
  bool some_full;            /* without a zero */
  struct {
    char text[64], first[200]; /* the finding, and the first tensor that shows it */
    int count;
  } patterns[8];
  int pattern_count;
} inspection;

static const char *shown_path(const inspection *s, int file)
{
  return s->files.paths[file] + s->files.prefix;
}

static void show_progress(inspection *s, double bytes)
{
  const double mebibyte = 1 << 20;
  s->done += bytes;
  cli_progress_update(&s->progress, (int)(s->done / mebibyte), (int)ceil(s->total / mebibyte));
}

/* ---- one tensor ---- */

typedef struct facts {
  int64_t k, n;
  bool full; /* nothing is zero: nothing is promised */
  model_densities densities;
  model_prediction prediction;
} facts;

static void add_row(const inspection *s, int file, const io_tensor *tensor, const facts *f)
{
  cli_table *t = s->table;
  if (s->files.count > 1 && !s->files.one)
    cli_table_cell(t, CLI_FAINT, "%s", shown_path(s, file));
  cli_table_cell(t, CLI_PLAIN, "%s", tensor->name);
  cli_table_cell(t, CLI_PLAIN, "%lld x %lld", (long long)tensor->shape[0], (long long)tensor->shape[1]);
  cli_table_cell(t, f ? CLI_PLAIN : CLI_FAINT, "%s", io_dtype_str(tensor->dtype));
  if (!f) {
    for (int i = 0; i < 7; i++)
      cli_table_cell(t, CLI_FAINT, "-");
    return;
  }
  const double speedup = f->prediction.dense / f->prediction.seconds;
  cli_table_cell(t, CLI_PLAIN, "%.4f", f->densities.element);
  cli_table_cell(t, CLI_PLAIN, "%.4f", f->densities.strip[2]);
  for (int i = 0; i < 3; i++)
    cli_table_cell(t, CLI_PLAIN, "%.4f", f->densities.block[i]);
  cli_table_cell(t, CLI_PLAIN, "%s", f->prediction.kernel[0] ? f->prediction.kernel : "-");
  if (isfinite(speedup) && !f->full)
    cli_table_cell(t, speedup > 1 ? CLI_GOOD : CLI_PLAIN, "%.2fx", speedup);
  else
    cli_table_cell(t, CLI_FAINT, "-");
}

static void print_densities(FILE *out, const char *name, const int64_t *sizes, const double *values, int count)
{
  fprintf(out, ",\"%s\":{", name);
  for (int i = 0; i < count; i++) {
    fprintf(out, "%s\"%lld\":", i ? "," : "", (long long)sizes[i]);
    cli_json_number(out, values[i]);
  }
  fputc('}', out);
}

static void print_json(const inspection *s, int file, const io_tensor *tensor, const facts *f)
{
  FILE *out = s->json.file;
  const cli_field about[] = {
      {"file", s->files.paths[file], 0, false},         {"tensor", tensor->name, 0, false},
      {"dtype", io_dtype_str(tensor->dtype), 0, false}, {"shape", model_shape(tensor), 0, true},
      {"bytes", NULL, (double)tensor->bytes, false},    {"refused", f ? NULL : io_tensor_refusal(tensor), NAN, false},
  };
  fputc('{', out);
  cli_json_fields(out, about, sizeof about / sizeof *about);
  if (f) {
    const char *seen = model_pattern(&f->densities);
    const model_prediction *p = &f->prediction;
    const cli_field fields[] = {
        {"k", NULL, (double)f->k, false},
        {"n", NULL, (double)f->n, false},
        {"m", NULL, (double)s->request->m, false},
        {"format", s->request->format ? s->request->format : "dense", 0, false},
        {"kernel", p->kernel, 0, false},
        {"predicted_ms", NULL, 1e3 * p->seconds, false},
        {"dense_ms", NULL, 1e3 * p->dense, false},
        {"baseline", s->baseline.name, 0, false},
        {"speedup", NULL, f->full ? NAN : p->dense / p->seconds, false},
        {"pattern", seen[0] ? seen : NULL, NAN, false},
        {"element_density", NULL, f->densities.element, false},
    };
    fputc(',', out);
    cli_json_fields(out, fields, sizeof fields / sizeof *fields);
    print_densities(out, "strip_density", model_strips, f->densities.strip, MODEL_STRIPS);
    print_densities(out, "block_density", model_blocks, f->densities.block, MODEL_BLOCKS);
  }
  fputs("}\n", out);
}

static int measure(const inspection *s, const io_tensors *tensors, const esmm_matrix *matrix, const char *name,
                   facts *f)
{
  const esmm_matrix b = model_as_b(tensors, matrix, (model_k_axis)s->request->k_axis);
  f->k = b.rows;
  f->n = b.cols;
  f->prediction = (model_prediction){.seconds = NAN, .dense = NAN};
  if (b.rows == 0 || b.cols == 0) /* the other one may be anything */
    return CLI_GO;
  int status = model_measure(s->ctx, name, &b, &f->densities);
  f->full = f->densities.element == 1;
  return status == CLI_GO ? model_predict(s->ctx, name, &b, s->request->m, &s->prepare, &s->baseline, &f->prediction)
                          : status;
}

static void add_pattern(inspection *s, const char *tensor, const char *text)
{
  const int most = sizeof s->patterns / sizeof *s->patterns;
  int i = 0;
  while (i < s->pattern_count && strcmp(s->patterns[i].text, text) != 0)
    i++;
  if (!text[0] || i == most)
    return;
  if (i == s->pattern_count) {
    s->pattern_count++;
    snprintf(s->patterns[i].text, sizeof s->patterns[i].text, "%s", text);
    snprintf(s->patterns[i].first, sizeof s->patterns[i].first, "%s", tensor);
  }
  s->patterns[i].count++;
}

static int inspect_tensor(inspection *s, int file, io_tensors *tensors, size_t index)
{
  const io_tensor *tensor = &tensors->list[index];
  char error[IO_ERROR_BYTES];
  esmm_matrix matrix;
  facts f = {0};
  int status = CLI_GO;
  if (tensor->dims != 2) {
    s->others++;
    return CLI_GO;
  }
  const bool usable = !io_tensor_refusal(tensor);
  if (usable && io_tensor_matrix(tensors, index, &matrix, error, sizeof error) != 0) {
    (void)cli_failed("%s", error);
    s->failed++;
    return CLI_GO;
  }
  if (usable)
    status = measure(s, tensors, &matrix, tensor->name, &f);
  io_tensor_unload(tensors, index);
  if (status != CLI_GO)
    return status;
  s->shown++;
  if (isfinite(f.prediction.dense / f.prediction.seconds)) {
    s->seconds += f.full ? f.prediction.dense : f.prediction.seconds;
    s->dense += f.prediction.dense;
  }
  s->some_full = s->some_full || f.full;
  if (usable && f.k > 0 && f.n > 0)
    add_pattern(s, tensor->name, model_pattern(&f.densities));
  if (!usable && !s->refused[0])
    snprintf(s->refused, sizeof s->refused, "%.200s: %s", tensor->name, io_tensor_refusal(tensor));
  if (f.prediction.why[0] && !s->why[0])
    snprintf(s->why, sizeof s->why, "%s", f.prediction.why);
  add_row(s, file, tensor, usable ? &f : NULL);
  if (s->json.file)
    print_json(s, file, tensor, usable ? &f : NULL);
  return CLI_GO;
}

/* ---- files ---- */

static io_tensors *open_file(const inspection *s, int file)
{
  char error[IO_ERROR_BYTES];
  io_tensors *tensors;
  int64_t rows = s->request->rows, cols = s->request->cols;
  if (rows == 0 && cols == 0)
    model_raw_shape(s->files.paths[file], &rows, &cols);
  if (io_tensors_open(s->files.paths[file], rows, cols, &tensors, error, sizeof error) != 0)
    (void)cli_failed("%s", error);
  else
    tensors->as_mapped = true; /* a copy would take the memory of the whole tensor */
  return tensors;
}

/* A file or a tensor that cannot be read does not stop the others; the exit status says so. */
static int inspect_file(inspection *s, int file)
{
  io_tensors *tensors = open_file(s, file);
  int status = CLI_GO;
  if (!tensors) {
    s->failed++;
    return CLI_GO;
  }
  for (size_t i = 0; i < tensors->count && status == CLI_GO; i++) {
    const double bytes = (double)tensors->list[i].bytes;
    status = inspect_tensor(s, file, tensors, i);
    show_progress(s, bytes);
  }
  io_tensors_close(tensors);
  return status;
}

static void count_bytes(inspection *s)
{
  for (int i = 0; i < s->files.count; i++) {
    struct stat info;
    if (stat(s->files.paths[i], &info) == 0)
      s->total += (double)info.st_size;
  }
}

static cli_table *new_table(const inspection *s)
{
  static const char *const heads[] = {"file",     "tensor",   "shape",    "dtype",  "element", "strip 32",
                                      "block 16", "block 32", "block 64", "kernel", "speedup"};
  return s->files.count > 1 && !s->files.one ? cli_table_new("llllrrrrrlr", heads)
                                             : cli_table_new("lllrrrrrlr", heads + 1);
}

static void print_table(const inspection *s, FILE *out)
{
  static const char *const axes[] = {
      "the last axis of safetensors and .pt ([out, in]), the first of .npy and raw files",
      "the last axis: tensors are [out, in], as PyTorch's Linear has them",
      "the first axis: tensors are [in, out]",
  };
  const inspect_request *r = s->request;
  if (s->shown == 0 && s->failed > 0) /* what was there is said already */
    return;
  if (s->shown == 0) {
    fprintf(out, "No matrix is there: %d tensor%s, not of two dimensions.\n", s->others, s->others == 1 ? "" : "s");
    return;
  }
  cli_table_print(s->table, out);
  fprintf(out, "\nk is %s (--k-axis).\n", axes[r->k_axis]);
  fprintf(out, "Densities: nonzero share of elements; of k's that some of 32 columns need; of square blocks.\n");
  fprintf(out, "Speedup: predicted for a dense A of %lld row%s, %s, %s.\n", (long long)r->m, r->m == 1 ? "" : "s",
          cli_workers(s->ctx),
          esmm_is_tuned(s->ctx) ? "constants measured here" : "shipped constants ('esmm tune' measures this machine)");
  fprintf(out, "It is over %s.\n", s->baseline.name);
  if (s->some_full)
    fprintf(out, "Where nothing is zero there is nothing to skip, and no speedup is promised.\n");
  for (int i = 0; i < s->pattern_count; i++) {
    char first[1200];
    (void)io_show(s->patterns[i].first, first, sizeof first);
    if (s->patterns[i].count == 1)
      fprintf(out, "%s is of %s.\n", first, s->patterns[i].text);
    else
      fprintf(out, "%d tensors are of %s, the first %s.\n", s->patterns[i].count, s->patterns[i].text, first);
  }
  if (s->seconds > 0)
    fprintf(out, "All of them: %s instead of %s, %.2fx.\n", cli_seconds(s->seconds), cli_seconds(s->dense),
            s->dense / s->seconds);
  char shown_refused[3 * sizeof s->refused];
  (void)io_show(s->refused, shown_refused, sizeof shown_refused);
  if (s->refused[0])
    fprintf(out, "Those without densities are not read; the first, %s.\n", shown_refused);
  if (s->why[0])
    fprintf(out, "Some have no prediction: %s\n", s->why);
  if (s->others)
    fprintf(out, "%d other tensor%s, not of two dimensions, %s not shown.\n", s->others, s->others == 1 ? "" : "s",
            s->others == 1 ? "is" : "are");
}

int inspect_model(esmm_ctx *ctx, const inspect_request *request)
{
  inspection s = {.ctx = ctx, .request = request, .prepare = {.size = sizeof s.prepare}};
  int status = cli_parse_format(request->format, &s.prepare.format);
  if (status == CLI_GO)
    status = model_files_find(request->path, &s.files);
  if (status == CLI_GO)
    status = model_files_spared(&s.files, "--json", request->json);
  if (status == CLI_GO && request->json)
    status = cli_output_open(&s.json, "--json", request->json);
  if (status != CLI_GO) {
    model_files_free(&s.files);
    return status;
  }
  s.failed = s.files.failed;
  dense_baseline_find(ctx, &s.baseline);
  s.table = new_table(&s);
  count_bytes(&s);
  cli_progress_start(&s.progress, "inspect, MiB");
  for (int i = 0; i < s.files.count && status == CLI_GO; i++)
    status = inspect_file(&s, i);
  cli_progress_end(&s.progress);
  const bool to_stdout = request->json && strcmp(request->json, "-") == 0;
  if (status == CLI_GO)
    print_table(&s, to_stdout ? stderr : stdout);
  if (status == CLI_GO && request->json)
    status = cli_output_close(&s.json, "--json");
  cli_output_discard(&s.json);
  cli_table_free(s.table);
  model_files_free(&s.files);
  if (status == CLI_GO)
    status = s.failed ? CLI_FAILED : CLI_OK;
  return status;
}
