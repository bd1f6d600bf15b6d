/*
 * cmd_prune.c: esmm prune: weights of a safetensors file set to zero so that they fit N:M or blocks, or so that the
 * largest alone are left.
 *
 * Shapes and dtypes stay as they are, so the header does too, byte for byte, and with it the metadata and the order of
 * the tensors; the bytes of other tensors are copied. One tensor at a time is in memory.
 */
#include "models.h"

#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  const char *in, *out, *format, *include, *exclude, *norms, *json;
  double density;   /* NAN: not given */
  int64_t keep_top; /* 0: not given */
  int scope;        /* esmm_prune_scope */
  bool soft;
  int k_axis;    /* model_k_axis */
  char name[64]; /* of the format */
  char what[96]; /* the weights' new format, in words */
  cli_machine machine;
} request;

typedef struct job {
  esmm_ctx *ctx;
  const request *request;
  esmm_prune_opts opts;
  io_tensors *tensors, *norms;
  io_matrix copy; /* of the tensor that is being written */
  cli_table *table;
  cli_output json;
  cli_progress progress;
  int pruned, untouched;
  double kept, dropped, norm2, norm2_dropped; /* of all of them */
} job;

static bool is_chosen(const job *j, const io_tensor *tensor)
{
  const request *r = j->request;
  if (io_tensor_refusal(tensor) || tensor->bytes == 0 || (r->include && fnmatch(r->include, tensor->name, 0) != 0))
    return false;
  return !r->exclude || fnmatch(r->exclude, tensor->name, 0) != 0;
}

/* ---- norms of the inputs ---- */

/* [k] in F32, under the tensor's own name. */
static int find_norms(job *j, const char *name, int64_t k, int64_t *index)
{
  char error[IO_ERROR_BYTES];
  *index = -1;
  if (!j->norms)
    return CLI_GO;
  const int64_t at = io_tensors_find(j->norms, name);
  if (at < 0)
    return cli_failed("--input-norms: %s has none for '%s': add them, or leave the tensor out with --exclude",
                      j->request->norms, name);
  const io_tensor *norms = &j->norms->list[at];
  if (norms->dtype != IO_F32 || norms->dims != 1 || norms->shape[0] != k)
    return cli_failed("--input-norms: '%s' is %s %s, and should be F32 [%lld]: a number for each k", name,
                      io_dtype_str(norms->dtype), model_shape(norms), (long long)k);
  *index = at;
  return io_tensor_load(j->norms, (size_t)at, error, sizeof error) == 0 ? CLI_GO
                                                                        : cli_failed("--input-norms: %s", error);
}

/* ---- one tensor ---- */

/* NAN, shown as '-', where there is no such share: a norm with NaN or Inf in it. */
static double norm_share(double dropped, double norm)
{
  return !isfinite(norm) ? NAN : norm > 0 ? dropped / norm : 0;
}

static void report(job *j, const io_tensor *tensor, const esmm_prune_report *done)
{
  const double kept = (double)done->kept, dropped = (double)done->dropped, all = kept + dropped;
  const double share = norm_share(done->norm_dropped, done->norm);
  j->kept += kept;
  j->dropped += dropped;
  j->norm2 += done->norm * done->norm;
  j->norm2_dropped += done->norm_dropped * done->norm_dropped;
  cli_table_cell(j->table, CLI_PLAIN, "%s", tensor->name);
  cli_table_cell(j->table, CLI_PLAIN, "%lld x %lld", (long long)tensor->shape[0], (long long)tensor->shape[1]);
  cli_table_cell(j->table, CLI_PLAIN, "%s", io_dtype_str(tensor->dtype));
  cli_table_cell(j->table, CLI_PLAIN, "%.0f", kept);
  cli_table_cell(j->table, CLI_PLAIN, "%.0f", dropped);
  cli_table_cell(j->table, CLI_PLAIN, "%s", cli_percent(all > 0 ? dropped / all : 0));
  cli_table_cell(j->table, CLI_PLAIN, "%s", cli_percent(share));
  if (!j->json.file)
    return;
  const cli_field fields[] = {
      {"tensor", tensor->name, 0, false},
      {"dtype", io_dtype_str(tensor->dtype), 0, false},
      {"shape", model_shape(tensor), 0, true},
      {"format", j->request->name, 0, false},
      {"soft", NULL, j->opts.soft, false},
      {"kept", NULL, kept, false},
      {"dropped", NULL, dropped, false},
      {"norm", NULL, done->norm, false},
      {"norm_dropped", NULL, done->norm_dropped, false},
  };
  fputc('{', j->json.file);
  cli_json_fields(j->json.file, fields, sizeof fields / sizeof *fields);
  fputs("}\n", j->json.file);
}

/* Where the GPU has too little memory for a tensor, the host's has to do. */
static bool fits_gpu(job *j, size_t bytes)
{
  void *room = NULL;
  const bool fits = cli_on_gpu(j->ctx) && esmm_memory_alloc(j->ctx, bytes, &room) == ESMM_OK;
  if (fits)
    esmm_memory_free(j->ctx, room);
  return fits;
}

/* On a GPU in its memory, where the library prunes what it can; b gets the result. */
static int prune_matrix(job *j, const char *name, esmm_matrix *b, esmm_prune_report *report)
{
  esmm_matrix near = *b;
  const bool gpu = fits_gpu(j, (size_t)b->rows * (size_t)b->cols * esmm_dtype_size(b->dtype));
  const int status = gpu ? cli_device_copy(j->ctx, name, b, b->dtype, b->order, &near) : CLI_GO;
  if (status != CLI_GO)
    return status;
  esmm_status pruned = esmm_prune(j->ctx, &near, &j->opts, report);
  if (pruned == ESMM_OK && gpu)
    pruned = esmm_matrix_copy(j->ctx, &near, b);
  if (gpu)
    cli_device_free(j->ctx, &near);
  return pruned == ESMM_OK ? CLI_GO : cli_status(j->ctx, name, pruned);
}

static int prune_tensor(job *j, size_t index)
{
  const io_tensor *tensor = &j->tensors->list[index];
  esmm_matrix matrix;
  char error[IO_ERROR_BYTES];
  int64_t norms;
  if (io_tensor_matrix(j->tensors, index, &matrix, error, sizeof error) != 0)
    return cli_failed("%s", error);
  int status = cli_matrix_alloc(tensor->name, matrix.rows, matrix.cols, matrix.dtype, &j->copy);
  if (status != CLI_GO)
    return status;
  memcpy(j->copy.memory, matrix.data, tensor->bytes); /* tight and row-major: safetensors has nothing else */
  esmm_matrix b = model_as_b(j->tensors, &j->copy.m, (model_k_axis)j->request->k_axis);
  status = find_norms(j, tensor->name, b.rows, &norms);
  if (status != CLI_GO)
    return status;
  esmm_prune_report done = {.size = sizeof done};
  j->opts.input_norms = norms >= 0 ? j->norms->list[norms].data : NULL;
  status = prune_matrix(j, tensor->name, &b, &done);
  if (status != CLI_GO)
    return status;
  report(j, tensor, &done);
  j->pruned++;
  return CLI_GO;
}

/* For io_safetensors_copy: the bytes of one tensor. Not 0 after a failure, which it has reported. */
static int replace(void *user, size_t index, const void **bytes)
{
  job *j = user;
  io_matrix_free(&j->copy);
  if (index > 0)
    io_tensor_unload(j->tensors, index - 1);
  cli_progress_update(&j->progress, (int)index, (int)j->tensors->count);
  if (!is_chosen(j, &j->tensors->list[index])) {
    j->untouched++;
    return 0;
  }
  const int status = prune_tensor(j, index);
  *bytes = j->copy.memory;
  return status == CLI_GO ? 0 : status;
}

/* ---- the file ---- */

static void print_report(const job *j, FILE *out)
{
  const double all = j->kept + j->dropped;
  cli_table_print(j->table, out);
  fprintf(out, "\n%d tensor%s pruned to %s, %d copied unchanged\n", j->pruned, j->pruned == 1 ? "" : "s",
          j->request->what, j->untouched);
  fprintf(out, "dropped %s of their nonzeros and %s of their norm; k is the %s\n",
          cli_percent(all > 0 ? j->dropped / all : 0), cli_percent(norm_share(sqrt(j->norm2_dropped), sqrt(j->norm2))),
          j->request->k_axis == MODEL_K_FIRST ? "first axis" : "last axis ([out, in])");
  if (!isfinite(j->norm2))
    fprintf(out, "Some hold NaN or Inf: they have no norm, and no share of it (-).\n");
}

static int prune_file(job *j)
{
  static const char *const heads[] = {"tensor", "shape", "dtype", "kept", "dropped", "of nonzeros", "of norm"};
  const request *r = j->request;
  char error[IO_ERROR_BYTES] = "";
  int chosen = 0;
  for (size_t i = 0; i < j->tensors->count; i++)
    chosen += is_chosen(j, &j->tensors->list[i]);
  if (chosen == 0)
    return cli_failed(
        "%s: no tensor to prune: of %zu none is a matrix of F32, BF16 or F16 that --include and --exclude "
        "let through",
        r->in, j->tensors->count);
  j->table = cli_table_new("lllrrrr", heads);
  cli_progress_start(&j->progress, "prune, tensors");
  const int status = io_safetensors_copy(j->tensors, r->out, replace, j, error, sizeof error);
  cli_progress_end(&j->progress);
  if (status != 0)
    return error[0] ? cli_failed("%s", error) : status;
  const bool to_stdout = r->json && strcmp(r->json, "-") == 0;
  print_report(j, to_stdout ? stderr : stdout);
  return r->json ? cli_output_close(&j->json, "--json") : CLI_GO;
}

static int open_tensors(const char *what, const char *path, io_tensors **out)
{
  char error[IO_ERROR_BYTES];
  if (io_tensors_open(path, 0, 0, out, error, sizeof error) != 0)
    return cli_failed("%s%s", what, error);
  if (strcmp((*out)->kind, "safetensors") == 0)
    return CLI_GO;
  return cli_failed("%s%s: is a .%s file, and prune reads and writes safetensors", what, path, (*out)->kind);
}

static int prune(job *j)
{
  const request *r = j->request;
  int status = open_tensors("", r->in, &j->tensors);
  if (status == CLI_GO && r->norms)
    status = open_tensors("--input-norms: ", r->norms, &j->norms);
  if (status == CLI_GO && r->json)
    status = cli_output_open(&j->json, "--json", r->json);
  if (status == CLI_GO)
    status = prune_file(j);
  cli_output_discard(&j->json);
  cli_table_free(j->table);
  io_matrix_free(&j->copy);
  io_tensors_close(j->norms);
  io_tensors_close(j->tensors);
  return status;
}

/* Writing must not overwrite an input, or an output just written. */
static int check_targets(const request *r)
{
  int status = cli_output_spares("OUT", r->out, "IN", r->in);
  if (status == CLI_GO)
    status = cli_output_spares("OUT", r->out, "--input-norms", r->norms);
  if (status == CLI_GO)
    status = cli_output_spares("--json", r->json, "IN", r->in);
  if (status == CLI_GO)
    status = cli_output_spares("--json", r->json, "OUT", r->out);
  return status == CLI_GO ? cli_output_spares("--json", r->json, "--input-norms", r->norms) : status;
}

/* Are --keep-top and the other options of this command in order? */
static int check_words(const request *r, const esmm_format *format)
{
  const bool dense = format->kind == ESMM_FORMAT_DENSE;
  if (r->keep_top && !dense)
    return cli_usage("--keep-top keeps weights wherever they are; %s says itself how many stay: give one of them",
                     r->format);
  if (r->keep_top && !isnan(r->density))
    return cli_usage("--keep-top and --density both say how many weights stay: give one of them");
  if (dense && !r->keep_top && !(r->density > 0))
    return cli_usage(
        "--format: dense needs --keep-top N or a --density above 0, else there is nothing to prune to; or it "
        "is nm:N:M or bsr:R or bsr:RxC");
  if (format->kind == ESMM_FORMAT_NM && !isnan(r->density))
    return cli_usage("--density is for bsr and dense; %s says itself how many stay", r->format);
  if (r->scope != ESMM_PRUNE_COLUMN && !dense)
    return cli_usage("--scope is for --keep-top and --format dense; %s has its own", r->format);
  if (r->soft && (format->kind == ESMM_FORMAT_BSR || format->group_cols > 1))
    return cli_usage("--soft shrinks single weights, and %s chooses several together", r->format);
  return CLI_GO;
}

static void set_texts(request *r, const esmm_format *format)
{
  const char *soft = r->soft ? ", soft" : "", *of = r->scope == ESMM_PRUNE_MATRIX ? "all" : "each output";
  const bool bare = r->format && r->format[0] >= '0' && r->format[0] <= '9';
  (void)snprintf(r->name, sizeof r->name, "%s%s", bare ? "nm:" : "", r->format ? r->format : "dense");
  if (format->kind != ESMM_FORMAT_DENSE)
    (void)snprintf(r->what, sizeof r->what, "%s%s", r->name, soft);
  else if (r->keep_top)
    (void)snprintf(r->what, sizeof r->what, "the %lld largest of %s%s", (long long)r->keep_top, of, soft);
  else
    (void)snprintf(r->what, sizeof r->what, "the largest %s of %s%s", cli_percent(r->density), of, soft);
}

/* The words as the library's options. */
static int resolve(request *r, esmm_prune_opts *opts)
{
  esmm_format format;
  if (!r->format && !r->keep_top)
    return cli_usage("it needs --format nm:N:M or bsr:R or bsr:RxC, or --keep-top N (see 'esmm prune --help')");
  int status = cli_parse_format(r->format, &format);
  if (status == CLI_GO)
    status = check_words(r, &format);
  if (status != CLI_GO)
    return status;
  set_texts(r, &format);
  *opts = (esmm_prune_opts){.size = sizeof *opts,
                            .format = format,
                            .density = !isnan(r->density)               ? r->density
                                       : format.kind == ESMM_FORMAT_BSR ? 0.5
                                                                        : 0,
                            .top = r->keep_top,
                            .scope = (esmm_prune_scope)r->scope,
                            .soft = r->soft};
  return CLI_GO;
}

int cmd_prune(int argc, char **argv)
{
  request r = {.density = NAN};
  const cli_option options[] = {
      {"format", CLI_STRING, &r.format, "nm:N:M|nm:N:M:C|bsr:R|bsr:RxC|dense",
       "what the weights must fit: of M k's N stay (C columns choose\n"
       "together; 2:4 is nm:2:4), or blocks of R k's by C columns; dense:\n"
       "single weights, wherever they are, as many as --density says",
       0, 0, NULL, NULL},
      {"density", CLI_DENSITY, &r.density, "D",
       "share that stays: of blocks with bsr (default 0.5), of the weights\n"
       "of each output with dense",
       0, 0, NULL, NULL},
      {"keep-top", CLI_INT, &r.keep_top, "N", "in place of --format: the N largest weights of each output stay", 1,
       0x1p62, NULL, NULL},
      {"scope", CLI_CHOICE, &r.scope, "column|matrix",
       "column: with --keep-top and dense each output keeps as many (default);\n"
       "matrix: they are the largest of the whole matrix",
       0, 0, "column|matrix", NULL},
      {"soft", CLI_FLAG, &r.soft, NULL,
       "soft threshold: what stays shrinks by the largest weight that goes,\n"
       "then all is scaled to be closest to the original; not with bsr",
       0, 0, NULL, NULL},
      {"include", CLI_STRING, &r.include, "GLOB", "only tensors of such names, as '*.mlp.*.weight' (default: all)", 0,
       0, NULL, NULL},
      {"exclude", CLI_STRING, &r.exclude, "GLOB", "but none of these, as '*embed*'", 0, 0, NULL, NULL},
      {"input-norms", CLI_STRING, &r.norms, "FILE",
       "weigh by the norms of the inputs (|w| * norm): safetensors with\n"
       "an F32 vector [k] under the name of each tensor that is pruned",
       0, 0, NULL, NULL},
      MODEL_K_AXIS_OPTION(&r.k_axis, NULL),
      {"json", CLI_STRING, &r.json, "FILE",
       "a line of JSON for each pruned tensor; '-' is stdout, and the\n"
       "table then goes to stderr",
       0, 0, NULL, NULL},
      CLI_MACHINE_OPTIONS(&r.machine),
      {0}};
  const cli_parser parser = {
      .synopsis = "prune IN OUT (--format F | --keep-top N) [options]",
      .about =
          "Sets weights of a safetensors file to zero so that they fit a format that 'esmm bench --format' and\n"
          "esmm_prepare take: the largest stay (nm: of each group of M k's; bsr: the blocks of largest norm). Or,\n"
          "with --keep-top and dense, so that the largest alone are left, wherever they are. Every matrix of F32,\n"
          "BF16 or F16 is pruned, embeddings too, unless --include or --exclude says otherwise. All else is copied\n"
          "byte for byte: the metadata, the other tensors, their order. OUT appears whole or not at all. No training\n"
          "is done: what a model loses by it has to be measured.\n"
          "On a GPU (--device cuda) each is pruned in the GPU's memory, or where the library cannot, on the host: the\n"
          "result is the same.",
      .options = options,
      .notes = "Examples\n"
               "  esmm prune model.safetensors sparse.safetensors --format nm:2:4 --include '*.mlp.*.weight'\n"
               "  esmm prune model.safetensors blocks.safetensors --format bsr:32 --density 25% --exclude '*embed*'\n"
               "  esmm prune model.safetensors few.safetensors --format dense --density 30% --input-norms "
               "norms.safetensors\n",
      .min_words = 2,
      .max_words = 2,
      .words_are = "two files, IN and OUT"};
  const char *words[2];
  int count;
  esmm_prune_opts opts;
  int status = cli_parse(&parser, argc, argv, words, &count);
  if (status != CLI_GO)
    return status;
  r.in = words[0];
  r.out = words[1];
  status = resolve(&r, &opts);
  if (status == CLI_GO)
    status = check_targets(&r);
  if (status != CLI_GO)
    return status;
  job j = {.request = &r, .opts = opts};
  status = cli_context(&r.machine, NULL, &j.ctx);
  if (status == CLI_GO)
    status = prune(&j);
  esmm_ctx_free(j.ctx);
  return status == CLI_GO ? CLI_OK : status;
}
