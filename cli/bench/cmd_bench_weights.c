/*
 * cmd_bench_weights.c: esmm bench-weights: every matrix below a directory as B, measured by bench's own parts.
 *
 * One B is in memory at a time. A matrix that cannot be read or measured is reported and skipped; the exit status says
 * so.
 */
#include "bench.h"
#include "bench_weights.h"
#include "models.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One product: where its B is, and its A where there is a file for it. */
typedef struct item {
  int file;
  char *b, *a;    /* words for model_load: FILE::TENSOR; a NULL: generated */
  char *tensor;   /* its name in a file of many; NULL: the file is the matrix */
  char shape[48]; /* as it is stored */
  const char *dtype;
} item;

typedef struct weights_bench {
  bench bench;
  cli_problem asked; /* the options */
  const char *dir, *csv;
  int64_t m, block;
  model_files files;
  item *items;
  int count;
  cli_output out;
  cli_table *table; /* NULL where the CSV goes to stdout */
  bool started;
  int measured, wrong, failed;
} weights_bench;

/* ---- items ---- */

static char *copy_text(const char *text)
{
  return strcpy(cli_alloc(strlen(text) + 1, 1), text);
}

static char *word_of(const char *path, const char *tensor)
{
  const size_t bytes = strlen(path) + strlen(tensor) + 3;
  char *word = cli_alloc(bytes, 1);
  snprintf(word, bytes, "%s::%s", path, tensor);
  return word;
}

static bool is_single(const io_tensors *tensors)
{
  return strcmp(tensors->kind, "npy") == 0 || strcmp(tensors->kind, "raw") == 0;
}

static io_tensors *open_file(const char *path)
{
  char error[IO_ERROR_BYTES];
  io_tensors *tensors;
  int64_t rows, cols;
  model_raw_shape(path, &rows, &cols);
  if (io_tensors_open(path, rows, cols, &tensors, error, sizeof error) != 0)
    (void)cli_failed("%s", error);
  return tensors;
}

static void list_file(weights_bench *w, int file)
{
  io_tensors *tensors = open_file(w->files.paths[file]);
  w->failed += !tensors;
  for (size_t i = 0; tensors && i < tensors->count; i++) {
    const io_tensor *t = &tensors->list[i];
    if (io_tensor_refusal(t) || t->shape[0] == 0 || t->shape[1] == 0)
      continue;
    w->items = cli_grow(w->items, (size_t)w->count + 1, sizeof *w->items);
    item *added = &w->items[w->count++];
    *added = (item){.file = file,
                    .b = word_of(w->files.paths[file], t->name),
                    .tensor = is_single(tensors) ? NULL : copy_text(t->name),
                    .dtype = io_dtype_str(t->dtype)};
    snprintf(added->shape, sizeof added->shape, "%lldx%lld", (long long)t->shape[0], (long long)t->shape[1]);
  }
  io_tensors_close(tensors);
}

/* An A that stands beside its B is no weight: it becomes part of that item. */
static void pair_files(weights_bench *w)
{
  for (int i = 0; i < w->count; i++) {
    bool used = false;
    for (int j = 0; j < w->count && !w->items[i].tensor; j++)
      if (!w->items[j].tensor && !w->items[j].a &&
          weights_are_pair(w->files.paths[w->items[i].file], w->files.paths[w->items[j].file])) {
        w->items[j].a = copy_text(w->items[i].b);
        used = true;
      }
    if (used) {
      free(w->items[i].b);
      w->items[i].b = NULL;
    }
  }
  int kept = 0;
  for (int i = 0; i < w->count; i++)
    if (w->items[i].b)
      w->items[kept++] = w->items[i];
    else
      free(w->items[i].a);
  w->count = kept;
}

/* ---- one product ---- */

static void write_rows(weights_bench *w, const item *it, const bench_data *data, const bench_result *result,
                       const model_densities *densities)
{
  const bench *b = &w->bench;
  const bench_contestant *best = result->best < 0 ? NULL : &result->contestants[result->best];
  weights_labels labels;
  double blocks = NAN;
  weights_labels_read(w->files.paths[it->file], w->files.prefix, it->tensor, &labels);
  for (int i = 0; i < MODEL_BLOCKS; i++)
    if (model_blocks[i] == w->block)
      blocks = 1 - densities->block[i];
  for (int i = 0; i < result->ours; i++) {
    const bench_contestant *c = &result->contestants[i];
    const bool ran = c->outcome != BENCH_UNSUPPORTED;
    const double speedup = best ? best->median / c->median : NAN;
    const cli_field fields[] = {
        {"layer", labels.layer, 0, false},
        {"pruner", labels.pruner, 0, false},
        {"group_size", NULL, labels.group_size, false},
        {"permutation", labels.permutation, 0, false},
        {"sparsity", NULL, labels.sparsity, false},
        {"original_shape", it->shape, 0, false},
        {"dtype", it->dtype, 0, false},
        {"m", NULL, (double)data->m, false},
        {"k", NULL, (double)data->k, false},
        {"n", NULL, (double)data->n, false},
        {"element_sparsity", NULL, 1 - densities->element, false},
        {"block", NULL, (double)w->block, false},
        {"block_sparsity", NULL, blocks, false},
        {"a", it->a ? "file" : b->problem.a.text, 0, false},
        {"density_a", NULL, data->density_a, false},
        {"format", b->problem.format ? b->problem.format : "dense", 0, false},
        {"kernel", c->name, 0, false},
        {"requested", c->force[0] ? c->force : "auto", 0, false},
        {"ms_extract", NULL, ran ? 1e3 * c->extract : NAN, false},
        {"ms_multiply", NULL, ran ? 1e3 * (c->median - c->extract) : NAN, false},
        {"ms", NULL, 1e3 * c->median, false},
        {"ms_p95", NULL, 1e3 * c->p95, false},
        {"ms_prepare", NULL, 1e3 * data->seconds_prepare, false},
        {"baseline", best ? best->name : "none", 0, false},
        {"ms_baseline", NULL, best ? 1e3 * best->median : NAN, false},
        {"speedup", NULL, ran ? speedup : NAN, false},
        {"rel_err", NULL, c->rel_err, false},
        {"outcome", bench_outcome_str(c->outcome), 0, false},
        {"reason", c->reason, 0, false},
        {"device_name", esmm_ctx_device_name(b->ctx), 0, false},
        {"threads", NULL, b->threads, false},
        {"file", w->files.paths[it->file], 0, false},
        {"source_id", esmm_source_id(), 0, false},
    };
    cli_csv_record(w->out.file, fields, sizeof fields / sizeof *fields, !w->started);
    w->started = true;
    w->wrong += c->outcome == BENCH_WRONG;
    w->measured += c->outcome == BENCH_OK || c->outcome == BENCH_NOT_CHECKED;
    if (!w->table || !ran)
      continue;
    const bool wrong = c->outcome == BENCH_WRONG;
    cli_table_cell(w->table, CLI_PLAIN, "%s", labels.layer);
    cli_table_cell(w->table, CLI_PLAIN, "%s", it->shape);
    cli_table_cell(w->table, CLI_PLAIN, "%.4f", 1 - densities->element);
    cli_table_cell(w->table, CLI_PLAIN, "%.4f", blocks);
    cli_table_cell(w->table, CLI_PLAIN, "%s%s", c->force[0] ? "" : "auto: ", c->name);
    cli_table_cell(w->table, wrong ? CLI_BAD : CLI_PLAIN, "%s", wrong ? "WRONG" : cli_number(1e3 * c->median, 4));
    cli_table_cell(w->table, CLI_PLAIN, "%s", cli_number(best ? 1e3 * best->median : NAN, 4));
    cli_table_cell(w->table, speedup > 1 ? CLI_GOOD : CLI_PLAIN, isfinite(speedup) ? "%.2f x" : "-", speedup);
  }
}

static int measure(weights_bench *w, const item *it, bool first)
{
  bench *b = &w->bench;
  bench_data data = {0};
  bench_result result = {0};
  model_densities densities;
  b->problem = w->asked;
  b->problem.load_a = it->a;
  b->problem.load_b = it->b;
  b->problem.name_a = "A";
  b->problem.name_b = "B";
  b->problem.size = w->m; /* the rows of a generated A; k and n are B's */
  if (it->a) {            /* what was asked of a generated one is not for it */
    b->problem.density_a = NAN;
    b->problem.has_activations = false;
  }
  if (b->gpu && !b->problem.has_dtype) { /* its kernels for 16-bit weights take such an A */
    b->problem.dtype = strcmp(it->dtype, "BF16") == 0 ? ESMM_BF16 : strcmp(it->dtype, "F16") == 0 ? ESMM_F16 : ESMM_F32;
    b->problem.has_dtype = true;
  }
  int status = cli_problem_resolve(&b->problem, NAN);
  if (status != CLI_GO)
    return status;
  status = bench_data_make(b, &data);
  if (status == CLI_GO && first && !b->no_tune)
    status = cli_tune_once(b->ctx);
  if (status == CLI_GO)
    status = model_measure(b->ctx, it->b, &data.b.m, &densities);
  if (status == CLI_GO)
    status = bench_measure(b, &data, &result);
  if (status == CLI_GO)
    write_rows(w, it, &data, &result, &densities);
  bench_result_free(&result);
  bench_data_free(b, &data);
  w->failed += status == CLI_FAILED;
  return status == CLI_FAILED ? CLI_GO : status;
}

/* ---- all of them ---- */

static int measure_all(weights_bench *w)
{
  bench *b = &w->bench;
  int status = CLI_GO;
  b->threads = esmm_ctx_threads(b->ctx);
  b->total = 100 * w->count;
  bench_open_libraries(b);
  cli_progress_start(&b->progress, "bench-weights");
  for (int i = 0; i < w->count && status == CLI_GO; i++) {
    b->done = 100 * i;
    cli_progress_update(&b->progress, b->done, b->total);
    cli_set_subject(w->items[i].b);
    status = measure(w, &w->items[i], i == 0);
    cli_set_subject("");
  }
  cli_progress_end(&b->progress);
  cublas_close(&b->cublas);
  return status;
}

static int report(weights_bench *w)
{
  if (w->table)
    cli_table_print(w->table, stdout);
  const int status = cli_output_close(&w->out, "--csv");
  if (status != CLI_GO)
    return status;
  if (w->failed)
    cli_note("%d of them could not be read or measured", w->failed);
  return w->failed || w->wrong || w->measured == 0 ? CLI_FAILED : CLI_OK;
}

static int run(weights_bench *w)
{
  static const char *const heads[] = {"layer", "shape", "zeros", "zero blocks", "kernel", "ms", "dense ms", "speedup"};
  bench *b = &w->bench;
  int status = model_files_find(w->dir, &w->files);
  if (status == CLI_GO)
    status = model_files_spared(&w->files, "--csv", w->csv);
  if (status == CLI_GO)
    status = cli_output_open(&w->out, "--csv", w->csv);
  if (status == CLI_GO)
    status = cli_context(&b->problem.machine, NULL, &b->ctx);
  if (status == CLI_GO) {
    b->gpu = cli_on_gpu(b->ctx);
    status = cli_kernels(b->ctx, "kernels", b->kernel_words, &b->kernels, &b->kernel_count);
  }
  w->failed = w->files.failed;
  for (int i = 0; i < w->files.count && status == CLI_GO; i++)
    list_file(w, i);
  pair_files(w);
  if (status == CLI_GO && w->count == 0)
    status = cli_failed("%s: no matrix of F32, BF16 or F16 is in its files", w->dir);
  if (status == CLI_GO && strcmp(w->csv, "-") != 0)
    w->table = cli_table_new("llrrlrrr", heads);
  if (status == CLI_GO)
    status = measure_all(w);
  if (status == CLI_GO)
    status = report(w);
  cli_output_discard(&w->out);
  cli_table_free(w->table);
  for (int i = 0; i < w->count; i++) {
    free(w->items[i].a);
    free(w->items[i].b);
    free(w->items[i].tensor);
  }
  free(w->items);
  model_files_free(&w->files);
  esmm_ctx_free(b->ctx);
  return status;
}

static const char about[] =
    "Measures every matrix below a directory as B, the weights of a product, and writes a line of CSV for each and "
    "each\n"
    "kernel: what its path says of it, its shape and zeros, times, and the speedup over the fastest dense library.\n"
    "Results are checked as 'esmm bench' checks them.\n"
    "\n"
    "  kernels   as of 'esmm bench' (default auto)\n"
    "  runs      timed calls of each, at least (default 3)";

static const char notes[] =
    "What is found\n"
    "  .safetensors, .pt, .pth and .npy files, and raw float32 with the shape in the name (w_512x128.f32).\n"
    "  A is generated, dense unless an option says otherwise, but for pairs of .npy or raw files in one directory "
    "whose\n"
    "  names differ in a/b, x/w, input/weight or activations/weights only (fc1_a.npy, fc1_b.npy): those are "
    "multiplied.\n"
    "\n"
    "What is read from paths\n"
    "  pruner (wanda, sparsegpt, magnitude, ...), group_size (grp_8), permutation (row_perm), sparsity "
    "(sparsity_0.5);\n"
    "  what is left is the layer.\n"
    "\n"
    "Exit status: 0 all right; 1 a wrong result, or a file or matrix that could not be measured; 2 wrong words.\n"
    "\n"
    "Example\n"
    "  esmm bench-weights pruned/ all 5 --m 512 --csv pruned.csv\n";

int cmd_bench_weights(int argc, char **argv)
{
  weights_bench *w = cli_alloc(1, sizeof *w);
  bench *b = &w->bench;
  cli_problem *p = &b->problem;
  const char *words[3];
  int count, block = 1;
  *w = (weights_bench){.csv = "-", .m = 1024};
  b->runs = 3;
  cli_problem_init(p);
  const cli_option options[] = {
      {"m", CLI_INT, &w->m, "M", "rows of an A that is generated (default 1024)", 1, 1e6, NULL, NULL},
      {"density-a", CLI_DENSITY, &p->density_a, "D", "its nonzero share, each element on its own (default 1)", 0, 0,
       NULL, NULL},
      {"activations", CLI_OPTIONAL, &p->activations, "early|middle|late", "instead: like a trained net's activations",
       0, 0, "early|middle|late", &p->has_activations},
      {"seed", CLI_SEED, &p->seed, "S", "of the generator (default 1)", 0, 0, NULL, NULL},
      MODEL_K_AXIS_OPTION(&p->k_axis, NULL),
      {"format", CLI_STRING, &p->format, "F", "what B is prepared as: dense (default), bsr:R, bsr:RxC, nm:N:M", 0, 0,
       NULL, NULL},
      {"dtype", CLI_DTYPE, &p->dtype, "f32|bf16|f16",
       "of A, B and C (default: B as in its file, A and C\n"
       "f32, on a GPU like B)",
       0, 0, NULL, &p->has_dtype},
      {"block", CLI_CHOICE, &block, "16|32|64|128", "of block_sparsity (default 32)", 0, 0, "16|32|64|128", NULL},
      {"no-check", CLI_FLAG, &b->no_check, NULL, "do not check results", 0, 0, NULL, NULL},
      {"no-tune", CLI_FLAG, &b->no_tune, NULL, "do not measure the plan's constants, missing or of a busy machine", 0,
       0, NULL, NULL},
      {"csv", CLI_STRING, &w->csv, "FILE", "where the CSV goes, with a table on stdout (default '-', stdout itself)", 0,
       0, NULL, NULL},
      CLI_MACHINE_OPTIONS(&p->machine),
      {0}};
  const cli_parser parser = {.synopsis = "bench-weights DIR [kernels] [runs] [options]",
                             .about = about,
                             .options = options,
                             .notes = notes,
                             .min_words = 1,
                             .max_words = 3,
                             .words_are = "a directory, kernels and a number of runs"};
  int status = cli_parse(&parser, argc, argv, words, &count);
  if (status == CLI_GO && count > 2)
    status = cli_parse_int("runs", words[2], 1, 100000, &b->runs);
  if (status == CLI_GO) {
    w->dir = words[0];
    b->kernel_words = count > 1 ? words[1] : "auto";
    w->block = model_blocks[block];
    w->asked = *p;
    status = run(w);
  }
  free(b->kernels);
  free(w);
  return status;
}
