/*
 * tune_model.c: esmm tune of a model: the products that its weights would make, each kernel timed in turns.
 *
 * What decides is shapes, dtypes and densities, so of matrices that are alike in these one is timed. A is made here,
 * with nonzeros anywhere: its own are not in the file.
 */
#include "tune_model.h"

#include "models.h"
#include "verdict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_VALUES = 16, MOST_SHAPES = 256 };

/* What matrices have in common that are timed once; densities in steps of a quarter, as the plan classes them. */
typedef struct shape {
  int64_t k, n;
  esmm_dtype dtype;
  int element, strip;
} shape;

typedef struct tuning {
  esmm_ctx *ctx;
  const tune_request *request;
  int64_t rows[MOST_VALUES];
  double densities[MOST_VALUES];
  int row_count, density_count;
  shape shapes[MOST_SHAPES];
  int shape_count, left_out; /* matrices behind the last shape that has room */
  int timed, short_ones;     /* products; too short for a clock */
  int failed;                /* files, tensors, products: they do not stop the others, the exit status reports them */
  cli_table *table;
  cli_progress progress;
  int done, total; /* tensors */
} tuning;

static int parse_rows(const char *text, tuning *t)
{
  char *copy = cli_alloc(strlen(text) + 1, 1), *rest = copy;
  int status = CLI_GO;
  memcpy(copy, text, strlen(text) + 1);
  for (const char *word = strsep(&rest, ","); word && status == CLI_GO; word = strsep(&rest, ",")) {
    if (t->row_count == MOST_VALUES)
      status = cli_usage("--rows: more than %d values", MOST_VALUES);
    else
      status = cli_parse_int("--rows", word, 1, (int64_t)CLI_MAX_DIMENSION, &t->rows[t->row_count++]);
  }
  free(copy);
  return status;
}

/* True: one like it was timed already, or there is no room. */
static bool is_known(tuning *t, const shape *x)
{
  for (int i = 0; i < t->shape_count; i++) {
    const shape *y = &t->shapes[i];
    if (y->k == x->k && y->n == x->n && y->dtype == x->dtype && y->element == x->element && y->strip == x->strip)
      return true;
  }
  if (t->shape_count == MOST_SHAPES) {
    t->left_out++;
    return true;
  }
  t->shapes[t->shape_count++] = *x;
  return false;
}

static void add_row(const tuning *t, const char *name, const shape *x, int64_t m, double density,
                    const esmm_verdict *verdicts, int count)
{
  const esmm_verdict *chosen = verdict_chosen(verdicts, count);
  const double dense = verdict_dense_seconds(verdicts, count), seconds = chosen ? chosen->seconds : NAN;
  char shown[256];
  (void)io_show(name, shown, sizeof shown);
  cli_table_cell(t->table, CLI_PLAIN, "%s", shown);
  cli_table_cell(t->table, CLI_PLAIN, "%lld x %lld x %lld", (long long)m, (long long)x->k, (long long)x->n);
  cli_table_cell(t->table, CLI_PLAIN, "%s", esmm_dtype_str(x->dtype));
  cli_table_cell(t->table, CLI_PLAIN, "%s", cli_percent(density));
  cli_table_cell(t->table, CLI_PLAIN, "%s", chosen ? chosen->kernel : "-");
  cli_table_cell(t->table, CLI_PLAIN, "%s", cli_seconds(seconds));
  cli_table_cell(t->table, dense > seconds ? CLI_GOOD : CLI_PLAIN, "%.2fx", dense / seconds);
}

/* One product: times the kernels and shows which is chosen from now on. CLI_GO, or it failed. */
static int tune_product(tuning *t, const char *name, const shape *x, const esmm_weights *weights, int64_t m,
                        double density)
{
  io_matrix host = {0};
  esmm_matrix a = {0}, c = {0};
  int status = cli_matrix_alloc("A", m, x->k, x->dtype, &host);
  if (status != CLI_GO)
    return status;
  const esmm_generator g = {
      .size = sizeof g, .kind = ESMM_GEN_RANDOM, .operand = ESMM_OPERAND_A, .seed = 1, .density = density};
  esmm_status done = esmm_generate(t->ctx, &g, &host.m);
  status = done == ESMM_OK ? cli_device_view(t->ctx, "A", &host.m, &a) : cli_status(t->ctx, "A", done);
  if (status == CLI_GO)
    status = cli_device_alloc(t->ctx, "C", m, x->n, x->dtype, ESMM_ROW_MAJOR, &c);
  int count = esmm_kernel_count();
  esmm_verdict *verdicts = cli_alloc((size_t)count, sizeof *verdicts);
  if (status == CLI_GO) {
    done = esmm_tune_weights(t->ctx, &a, weights, &c, NULL);
    if (done == ESMM_OK)
      done = esmm_explain(t->ctx, &a, weights, &c, NULL, verdicts, sizeof *verdicts, &count);
    status = done == ESMM_OK ? CLI_GO : cli_status(t->ctx, name, done);
  }
  if (status == CLI_GO) {
    const esmm_verdict *chosen = verdict_chosen(verdicts, count);
    add_row(t, name, x, m, density, verdicts, count);
    *(chosen && strstr(chosen->text, "measured") ? &t->timed : &t->short_ones) += 1;
  }
  free(verdicts);
  cli_device_view_free(t->ctx, &host.m, &a);
  cli_device_free(t->ctx, &c);
  io_matrix_free(&host);
  return status;
}

static int density_step(double density)
{
  return (int)lround(log(fmax(density, 0.01)) / log(1.25));
}

static void tune_matrix(tuning *t, const char *name, const esmm_matrix *b)
{
  esmm_weights *weights = NULL;
  esmm_weights_info info = {.size = sizeof info};
  esmm_status done = esmm_prepare(t->ctx, b, NULL, &weights);
  if (done == ESMM_OK)
    done = esmm_weights_get_info(weights, &info);
  const shape x = {b->rows, b->cols, b->dtype, density_step(info.element_density), density_step(info.strip_density)};
  if (done != ESMM_OK) {
    (void)cli_status(t->ctx, name, done);
    t->failed++;
  } else if (!is_known(t, &x)) {
    for (int i = 0; i < t->row_count; i++)
      for (int j = 0; j < t->density_count; j++)
        t->failed += tune_product(t, name, &x, weights, t->rows[i], t->densities[j]) != CLI_GO;
  }
  esmm_weights_free(weights);
}

static void tune_tensor(tuning *t, io_tensors *tensors, size_t index)
{
  const io_tensor *tensor = &tensors->list[index];
  char error[IO_ERROR_BYTES];
  esmm_matrix matrix;
  if (io_tensor_refusal(tensor))
    return;
  if (io_tensor_matrix(tensors, index, &matrix, error, sizeof error) != 0) {
    (void)cli_failed("%s", error);
    t->failed++;
    return;
  }
  const esmm_matrix b = model_as_b(tensors, &matrix, (model_k_axis)t->request->k_axis);
  if (b.rows > 0 && b.cols > 0)
    tune_matrix(t, tensor->name, &b);
  io_tensor_unload(tensors, index);
}

static void tune_file(tuning *t, const char *path)
{
  char error[IO_ERROR_BYTES];
  io_tensors *tensors;
  int64_t rows, cols;
  model_raw_shape(path, &rows, &cols);
  if (io_tensors_open(path, rows, cols, &tensors, error, sizeof error) != 0) {
    (void)cli_failed("%s", error);
    t->failed++;
    return;
  }
  t->total += (int)tensors->count;
  for (size_t i = 0; i < tensors->count; i++) {
    cli_progress_update(&t->progress, t->done++, t->total);
    tune_tensor(t, tensors, i);
  }
  io_tensors_close(tensors);
}

static int save(const tuning *t)
{
  const esmm_status done = esmm_tune_save(t->ctx);
  return done == ESMM_OK ? CLI_GO : cli_status(t->ctx, "cache", done);
}

static int tune_files(tuning *t, const model_files *files)
{
  static const char *const heads[] = {"tensor", "product", "dtype", "A", "kernel", "takes", "vs dense"};
  t->table = cli_table_new("lllrlrr", heads);
  cli_progress_start(&t->progress, "tune");
  for (int i = 0; i < files->count; i++)
    tune_file(t, files->paths[i]);
  cli_progress_end(&t->progress);
  const int status = t->timed ? save(t) : CLI_GO;
  if (t->timed || t->short_ones)
    cli_table_print(t->table, stdout);
  else if (!t->failed)
    printf("No matrix is there that can be multiplied\n");
  if (t->timed && status == CLI_GO)
    printf("\n%s timed %s %s, and saved beside %s\n", cli_count(t->timed, "product"),
           cli_on_gpu(t->ctx) ? "on" : "with", cli_workers(t->ctx), esmm_tune_path(t->ctx));
  if (t->short_ones)
    printf("%s not timed: too short for a clock\n", cli_count(t->short_ones, "product"));
  if (t->left_out)
    printf("More than %d shapes: matrices of others were left out\n", MOST_SHAPES);
  cli_table_free(t->table);
  return status;
}

int tune_model(esmm_ctx *ctx, const tune_request *request)
{
  tuning t = {.ctx = ctx, .request = request};
  model_files files;
  int status = parse_rows(request->rows, &t);
  if (status == CLI_GO)
    status = cli_parse_densities("--density-a", request->density_a, t.densities, MOST_VALUES, &t.density_count);
  if (status == CLI_GO)
    status = model_files_find(request->path, &files);
  if (status != CLI_GO)
    return status;
  t.failed = files.failed;
  status = tune_files(&t, &files);
  model_files_free(&files);
  return status == CLI_GO ? t.failed ? CLI_FAILED : CLI_OK : status;
}
