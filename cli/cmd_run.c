/*
 * cmd_run.c: esmm run: multiplies matrices from files and writes the product, or only prepares B.
 *
 * Everything is read and checked before anything is multiplied, and files are written last and whole: a run that fails
 * leaves the old ones as they were.
 */
#include "models.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  const char *a, *b, *weights, *c, *bias, *gate, *gate_bias, *residual, *out, *save;
  int64_t dims[3];
  cli_machine machine;
  bool has_dims, strict, stats, has_alpha, has_beta, has_use;
  double alpha, beta;
  int activation, dtype_c, use, k_axis;
  const char *force;
} request;

typedef struct operands {
  io_matrix a, b, c, bias, gate_bias, residual;
  esmm_weights *weights, *gate;
  esmm_weights_info info;
  int32_t *nonzeros; /* of C's columns, and its bitmaps: for --stats */
  esmm_pattern *bitmaps;
} operands;

/* Writing must not overwrite an input, or an output just written. --out may replace --c, which it is made from. */
static int check_targets(const request *r)
{
  const struct {
    const char *name, *path;
  } inputs[] = {{"--a", r->a},
                {"--b", r->b},
                {"--weights", r->weights},
                {"--bias", r->bias},
                {"--gate", r->gate},
                {"--gate-bias", r->gate_bias},
                {"--residual", r->residual}};
  if (r->out && strcmp(r->out, "-") == 0)
    return cli_usage("--out: the product goes to a file; '-' is not one");
  if (cli_same_file(r->out, r->save))
    return cli_usage("--out and --save-weights name the same file, %s", r->out);
  for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) {
    int status = cli_output_spares("--out", r->out, inputs[i].name, inputs[i].path);
    if (status == CLI_GO)
      status = cli_output_spares("--save-weights", r->save, inputs[i].name, inputs[i].path);
    if (status != CLI_GO)
      return status;
  }
  return CLI_GO;
}

static int check_request(const request *r)
{
  if (r->b && r->weights)
    return cli_usage("--b and --weights cannot both be given: the weights are B, prepared");
  if (!r->b && !r->weights)
    return cli_usage("it needs B: --b FILE, or --weights FILE (see 'esmm run --help')");
  if (!r->a && !r->save)
    return cli_usage("it needs A: --a FILE; or --save-weights FILE, to prepare B and no more");
  if (r->a && !r->out)
    return cli_usage("it needs a name for the product: --out FILE.npy");
  if (!r->a && (r->out || r->c || r->bias || r->gate || r->gate_bias || r->residual || r->activation || r->has_alpha ||
                r->has_beta || r->stats))
    return cli_usage(
        "without --a nothing is multiplied: only --b, --dims, --use, --strict and --save-weights make sense");
  if (r->weights && (r->save || r->has_use))
    return cli_usage("%s: --weights are prepared already; give --b instead", r->save ? "--save-weights" : "--use");
  if (r->c && !(r->has_beta && r->beta != 0))
    return cli_usage("--c is only read where --beta is not 0: give --beta");
  if (!r->c && r->has_beta && r->beta != 0)
    return cli_usage("--beta needs the C that it multiplies: --c FILE");
  if (r->gate_bias && !r->gate)
    return cli_usage("--gate-bias needs the weights that it belongs to: --gate FILE");
  return check_targets(r);
}

static int prepare(esmm_ctx *ctx, const request *r, operands *o)
{
  esmm_status done;
  if (r->weights) {
    done = esmm_weights_load(ctx, r->weights, &o->weights);
    if (done != ESMM_OK)
      return cli_status(ctx, "--weights", done);
  } else {
    int status =
        model_read_word(ctx, "--b", r->b, true, (model_k_axis)r->k_axis, r->has_dims, r->dims[1], r->dims[2], &o->b);
    if (status != CLI_GO)
      return status;
    esmm_prepare_opts opts = {.size = sizeof opts, .use = (esmm_use)r->use, .strict = r->strict};
    done = esmm_prepare(ctx, &o->b.m, &opts, &o->weights);
    if (done != ESMM_OK)
      return cli_status(ctx, "--b", done);
    io_matrix_free(&o->b); /* the weights hold all that is needed of it */
  }
  o->info = (esmm_weights_info){.size = sizeof o->info};
  done = esmm_weights_get_info(o->weights, &o->info);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "weights", done);
}

static int prepare_gate(esmm_ctx *ctx, const request *r, operands *o)
{
  io_matrix file = {0};
  const int status =
      model_read_word(ctx, "--gate", r->gate, true, (model_k_axis)r->k_axis, true, o->info.rows, o->info.cols, &file);
  if (status != CLI_GO)
    return status;
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = (esmm_use)r->use, .strict = r->strict};
  const esmm_status done = esmm_prepare(ctx, &file.m, &opts, &o->gate);
  io_matrix_free(&file);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "--gate", done);
}

/* A file of this shape as dtype; nothing where there is no such file. */
static int read_as(esmm_ctx *ctx, const char *what, const char *path, int64_t rows, int64_t cols, esmm_dtype dtype,
                   io_matrix *out)
{
  io_matrix file = {0};
  if (!path)
    return CLI_GO;
  int status = model_read_word(ctx, what, path, false, MODEL_K_AUTO, true, rows, cols, &file);
  if (status == CLI_GO)
    status = cli_matrix_convert(ctx, what, &file.m, dtype, out);
  io_matrix_free(&file);
  return status;
}

static int read_operands(esmm_ctx *ctx, const request *r, operands *o)
{
  const esmm_weights_info *w = &o->info;
  if (r->has_dims && (w->rows != r->dims[1] || w->cols != r->dims[2])) /* of a --b file this was checked before */
    return cli_failed("--weights: %s holds %lld x %lld, --dims says %lld x %lld", r->weights, (long long)w->rows,
                      (long long)w->cols, (long long)r->dims[1], (long long)r->dims[2]);
  int status = model_read_word(ctx, "--a", r->a, false, MODEL_K_AUTO, r->has_dims, r->dims[0], r->dims[1], &o->a);
  if (status != CLI_GO)
    return status;
  if (o->a.m.cols != w->rows)
    return cli_failed("--a: %s is %lld x %lld, but B is %lld x %lld: A needs %s", r->a, (long long)o->a.m.rows,
                      (long long)o->a.m.cols, (long long)w->rows, (long long)w->cols, cli_count(w->rows, "column"));

  const int64_t rows = o->a.m.rows;
  status = read_as(ctx, "--bias", r->bias, 1, w->cols, ESMM_F32, &o->bias);
  if (status == CLI_GO)
    status = read_as(ctx, "--gate-bias", r->gate_bias, 1, w->cols, ESMM_F32, &o->gate_bias);
  if (status == CLI_GO)
    status = read_as(ctx, "--residual", r->residual, rows, w->cols, ESMM_F32, &o->residual);
  if (status == CLI_GO && r->gate)
    status = prepare_gate(ctx, r, o);
  if (status == CLI_GO && r->c)
    return read_as(ctx, "--c", r->c, rows, w->cols, (esmm_dtype)r->dtype_c, &o->c);
  return status == CLI_GO ? cli_matrix_alloc("C", rows, w->cols, (esmm_dtype)r->dtype_c, &o->c) : status;
}

/* How many zeros C has, and where: what the next product could skip. */
static void print_c(esmm_ctx *ctx, cli_table *table, const operands *o)
{
  int64_t nonzeros = 0, dead = 0;
  const esmm_matrix *c = &o->c.m;
  for (int64_t j = 0; j < c->cols; j++) {
    nonzeros += o->nonzeros[j];
    dead += o->nonzeros[j] == 0;
  }
  const double elements = (double)c->rows * (double)c->cols;
  const esmm_pattern_info bitmaps = cli_pattern(ctx, o->bitmaps);
  cli_table_fact(table, "density of C", "elements %s, strips of %s %s; zero columns: %lld of %lld",
                 cli_number(elements > 0 ? (double)nonzeros / elements : 0, 3), cli_count(bitmaps.strip_rows, "row"),
                 cli_number(bitmaps.density, 3), (long long)dead, (long long)c->cols);
}

static void print_stats(esmm_ctx *ctx, const operands *o, const esmm_stats *s)
{
  const char *reason = esmm_ctx_device_reason(ctx);
  cli_table *table = cli_table_new("ll", NULL);
  cli_table_fact(table, "kernel", "%s", s->kernel);
  cli_table_fact(table, "reason", "%s", s->reason);
  cli_table_fact(table, "device", "%s%s%s", esmm_ctx_device(ctx), reason[0] ? "; no GPU: " : "", reason);
  if (!cli_on_gpu(ctx))
    cli_table_fact(table, "threads", "%d", s->threads);
  if (s->strip_rows > 0)
    cli_table_fact(table, "strips", "%s of A, %s of B", cli_count(s->strip_rows, "row"),
                   cli_count(s->strip_cols, "column"));
  cli_table_fact(table, "density of A", "elements %s (sampled), strips %s", cli_number(s->density_a, 3),
                 cli_number(s->strip_density_a, 3));
  cli_table_fact(table, "density of B", "strips %s", cli_number(s->strip_density_b, 3));
  cli_table_fact(table, "joint density", "%s", cli_number(s->joint_density, 3));
  cli_table_fact(table, "skipped", "%s", cli_percent(s->skipped_share));
  if (o->bitmaps)
    print_c(ctx, table, o);
  cli_table_fact(table, "time", "%s: plan %s, extract %s, multiply %s", cli_seconds(s->seconds_total),
                 cli_seconds(s->seconds_plan), cli_seconds(s->seconds_extract), cli_seconds(s->seconds_multiply));
  if (s->seconds_total > 0)
    cli_table_fact(table, "speed", "%s GFLOP/s useful, %s GFLOP/s dense-equivalent",
                   cli_number(s->flop_useful / s->seconds_total * 1e-9, 3),
                   cli_number(s->flop_dense / s->seconds_total * 1e-9, 3));
  cli_table_fact(table, "weights", "%s", cli_bytes((double)s->weights_bytes));
  if (cli_on_gpu(ctx))
    cli_table_fact(table, "staged", "%s copied between host and GPU", cli_bytes((double)s->staged_bytes));
  cli_table_print(table, stdout);
  cli_table_free(table);
}

static int multiply(esmm_ctx *ctx, const request *r, operands *o, esmm_stats *stats)
{
  const float alpha = (float)r->alpha, beta = (float)r->beta;
  esmm_matmul_opts opts = {.size = sizeof opts,
                           .alpha = &alpha,
                           .beta = &beta,
                           .bias = o->bias.m.data,
                           .activation = (esmm_activation)r->activation,
                           .strict = r->strict,
                           .gate = o->gate,
                           .gate_bias = o->gate_bias.m.data,
                           .residual = r->residual ? &o->residual.m : NULL};
  if (r->stats) {
    o->nonzeros = calloc((size_t)o->info.cols + 1, sizeof *o->nonzeros);
    if (!o->nonzeros)
      return cli_failed("--stats: out of memory: %lld counts", (long long)o->info.cols);
    opts.column_nonzeros = o->nonzeros;
    opts.c_pattern = &o->bitmaps;
  }
  esmm_status done = esmm_matmul(ctx, &o->a.m, o->weights, &o->c.m, &opts, stats);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "product", done);
}

static int save_weights(esmm_ctx *ctx, const request *r, const operands *o)
{
  esmm_status done = esmm_weights_save(ctx, o->weights, r->save);
  if (done != ESMM_OK)
    return cli_status(ctx, "--save-weights", done);
  printf("%s: weights of %lld x %lld %s, %s\n", r->save, (long long)o->info.rows, (long long)o->info.cols,
         esmm_dtype_str(o->info.dtype), cli_bytes((double)o->info.bytes));
  return CLI_GO;
}

static int save_product(esmm_ctx *ctx, const request *r, const operands *o, const esmm_stats *stats)
{
  char error[IO_ERROR_BYTES];
  if (io_npy_write(r->out, &o->c.m, error, sizeof error) != 0)
    return cli_failed("--out: %s", error);
  printf("%s: %lld x %lld %s, by %s in %s\n", r->out, (long long)o->c.m.rows, (long long)o->c.m.cols,
         esmm_dtype_str(io_npy_dtype(o->c.m.dtype)), stats->kernel, cli_seconds(stats->seconds_total));
  if (r->stats)
    print_stats(ctx, o, stats);
  return CLI_GO;
}

static int run(esmm_ctx *ctx, const request *r, operands *o)
{
  enum { STEPS = 4 };
  esmm_stats stats = {.size = sizeof stats};
  cli_progress progress;
  cli_progress_start(&progress, "run");
  int status = prepare(ctx, r, o);
  cli_progress_update(&progress, 1, STEPS);
  if (status == CLI_GO && r->a)
    status = read_operands(ctx, r, o);
  cli_progress_update(&progress, 2, STEPS);
  if (status == CLI_GO && r->a)
    status = multiply(ctx, r, o, &stats);
  cli_progress_update(&progress, 3, STEPS);
  cli_progress_end(&progress);
  if (status == CLI_GO && r->save)
    status = save_weights(ctx, r, o);
  if (status == CLI_GO && r->a)
    status = save_product(ctx, r, o, &stats);
  return status == CLI_GO ? CLI_OK : status;
}

int cmd_run(int argc, char **argv)
{
  request r = {.alpha = 1};
  const cli_option options[] = {
      {NULL, CLI_HEADING, NULL, NULL,
       "Files: .npy, raw little-endian float32 with --dims, FILE::TENSOR of safetensors or .pt", 0, 0, NULL, NULL},
      {"a", CLI_STRING, &r.a, "FILE", "A [M,K]: activations", 0, 0, NULL, NULL},
      {"b", CLI_STRING, &r.b, "FILE", "B [K,N]: weights; a tensor [out, in] is transposed", 0, 0, NULL, NULL},
      {"weights", CLI_STRING, &r.weights, "FILE", "B as --save-weights wrote it", 0, 0, NULL, NULL},
      {"out", CLI_STRING, &r.out, "FILE", "where C goes, as .npy; replaced only when all went well", 0, 0, NULL, NULL},
      {"save-weights", CLI_STRING, &r.save, "FILE", "keep B prepared; without --a, that is all", 0, 0, NULL, NULL},
      {"dims", CLI_DIMS, r.dims, "M K N", "the shapes; .npy files and tensors must agree", 0, CLI_MAX_DIMENSION, NULL,
       &r.has_dims},
      MODEL_K_AXIS_OPTION(&r.k_axis, NULL),
      {NULL, CLI_HEADING, NULL, NULL, "What is computed: C = activation(alpha A B + beta C + bias) + residual", 0, 0,
       NULL, NULL},
      {"alpha", CLI_DOUBLE, &r.alpha, "X", "default 1", -FLT_MAX, FLT_MAX, NULL, &r.has_alpha},
      {"beta", CLI_DOUBLE, &r.beta, "X", "default 0; otherwise with --c", -FLT_MAX, FLT_MAX, NULL, &r.has_beta},
      {"c", CLI_STRING, &r.c, "FILE", "the C [M,N] that beta multiplies; the file is not changed", 0, 0, NULL, NULL},
      {"bias", CLI_STRING, &r.bias, "FILE", "N numbers, added to every row", 0, 0, NULL, NULL},
      {"activation", CLI_CHOICE, &r.activation, "F", "none, relu, relu2, gelu, gelu-tanh or silu (default none)", 0, 0,
       "none|relu|relu2|gelu|gelu-tanh|silu", NULL},
      {"gate", CLI_STRING, &r.gate, "FILE",
       "a second B: C = activation(alpha A GATE + gate bias) * (alpha A B + beta C\n+ bias) + residual; silu makes it "
       "SwiGLU, relu ReGLU",
       0, 0, NULL, NULL},
      {"gate-bias", CLI_STRING, &r.gate_bias, "FILE", "N numbers, added to the gate's product", 0, 0, NULL, NULL},
      {"residual", CLI_STRING, &r.residual, "FILE", "[M,N], added last", 0, 0, NULL, NULL},
      {"dtype-c", CLI_DTYPE, &r.dtype_c, "T", "f32, bf16 (rounded to it, written as f32) or f16 (default f32)", 0, 0,
       NULL, NULL},
      {NULL, CLI_HEADING, NULL, NULL, "How", 0, 0, NULL, NULL},
      {"force", CLI_STRING, &r.force, "NAME", "this kernel, or none (see 'esmm list')", 0, 0, NULL, NULL},
      {"strict", CLI_FLAG, &r.strict, NULL, "no skipping: zeros meet Inf and NaN as IEEE says", 0, 0, NULL, NULL},
      {"use", CLI_CHOICE, &r.use, "any|decode|large-m", "what B is prepared for (default any)", 0, 0,
       "any|decode|large-m", &r.has_use},
      CLI_MACHINE_OPTIONS(&r.machine),
      {"stats", CLI_FLAG, &r.stats, NULL, "print kernel, densities and times; on a CPU the zeros of C too", 0, 0, NULL,
       NULL},
      {0}};
  const cli_parser parser = {.synopsis = "run --a FILE --b FILE --out FILE.npy [options]",
                             .about = "Multiplies two matrices from files and writes the product.",
                             .options = options,
                             .notes = "Examples\n"
                                      "  esmm run --a x.npy --b w.npy --out y.npy --activation relu2 --stats\n"
                                      "  esmm run --a x.npy --b up.npy --gate gate.npy --activation silu --out h.npy\n"
                                      "  esmm run --b w.npy --save-weights w.esmm\n"
                                      "  esmm run --a x.npy --weights w.esmm --out y.npy\n"
                                      "  esmm run --a x.f32 --b w.f32 --dims 64 4096 1024 --out y.npy\n"};
  int count;
  int status = cli_parse(&parser, argc, argv, NULL, &count);
  if (status == CLI_GO)
    status = check_request(&r);
  if (status != CLI_GO)
    return status;

  esmm_ctx *ctx;
  status = cli_context(&r.machine, r.force, &ctx);
  if (status != CLI_GO)
    return status;
  operands o = {0};
  status = run(ctx, &r, &o);
  esmm_weights_free(o.weights);
  io_matrix_free(&o.a);
  io_matrix_free(&o.b);
  io_matrix_free(&o.c);
  io_matrix_free(&o.bias);
  io_matrix_free(&o.gate_bias);
  io_matrix_free(&o.residual);
  esmm_weights_free(o.gate);
  esmm_pattern_free(o.bitmaps);
  free(o.nonzeros);
  esmm_ctx_free(ctx);
  return status;
}
