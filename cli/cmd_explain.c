/*
 * cmd_explain.c: esmm explain: the plan's verdict on every kernel for one product.
 */
#include "cli.h"
#include "verdict.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct request {
  cli_problem problem;
  const char *force;
  bool strict, tune;
} request;

enum { REORDER_ROWS = 128 }; /* rows of the strips that reordering is judged by */

/* Densities of A; exact, unlike the plan's sample. */
typedef struct densities {
  double element, strips;  /* of as many rows as B's strips have columns */
  double as_is, reordered; /* of strips of REORDER_ROWS: rows in their order, or similar ones together; equal where
                              that gains nothing */
} densities;

static esmm_status strip_density(esmm_ctx *ctx, const esmm_pattern *rows, int64_t strip, double *density)
{
  esmm_pattern *strips = NULL;
  esmm_status done = esmm_pattern_coarsen(ctx, rows, strip, &strips);
  *density = cli_pattern(ctx, strips).density;
  esmm_pattern_free(strips);
  return done;
}

/* A hint only: without it (no memory, say) nothing is printed. */
static void measure_reordered(esmm_ctx *ctx, const esmm_pattern *rows, densities *d)
{
  const esmm_pattern_info info = cli_pattern(ctx, rows);
  const int64_t count = info.strips;
  if (count <= REORDER_ROWS || info.k == 0) /* there is but one strip, or nothing in it */
    return;
  esmm_pattern *strips = NULL;
  int64_t *order = calloc((size_t)count, sizeof *order);
  double as_is = 0;
  if (order && strip_density(ctx, rows, REORDER_ROWS, &as_is) == ESMM_OK &&
      esmm_pattern_reorder(ctx, rows, REORDER_ROWS, order, &strips) == ESMM_OK) {
    d->as_is = as_is;
    d->reordered = cli_pattern(ctx, strips).density;
  }
  esmm_pattern_free(strips);
  free(order);
}

static esmm_status measure_a(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip, densities *d)
{
  esmm_pattern *rows = NULL;
  esmm_status done = esmm_pattern_extract(ctx, a, 1, &rows);
  if (done == ESMM_OK)
    done = strip_density(ctx, rows, strip, &d->strips);
  if (done == ESMM_OK)
    measure_reordered(ctx, rows, d);
  d->element = cli_pattern(ctx, rows).density;
  esmm_pattern_free(rows);
  return done;
}

static int print_problem(esmm_ctx *ctx, const cli_problem *p, const esmm_matrix *a, const esmm_weights_info *weights)
{
  densities d = {0};
  esmm_status done = measure_a(ctx, a, weights->strip_cols, &d);
  if (done != ESMM_OK)
    return cli_status(ctx, "A", done);
  printf("C [%lld,%lld] %s = A [%lld,%lld] %s x B [%lld,%lld] %s, %s\n", (long long)p->m, (long long)p->n,
         esmm_dtype_str((esmm_dtype)p->dtype_c), (long long)p->m, (long long)p->k,
         esmm_dtype_str((esmm_dtype)p->dtype_a), (long long)p->k, (long long)p->n,
         esmm_dtype_str((esmm_dtype)p->dtype_b), cli_workers(ctx));
  cli_print_no_gpu(ctx, 10, stdout);
  printf("A          %s (element density %s, %lld-row strips %s)\n", p->a.text, cli_number(d.element, 3),
         (long long)weights->strip_cols, cli_number(d.strips, 3));
  printf("B          %s (element density %s, %lld-column strips %s)\n", p->b.text,
         cli_number(weights->element_density, 3), (long long)weights->strip_cols,
         cli_number(weights->strip_density, 3));
  if (d.reordered < d.as_is)
    printf("reorder    A's rows sorted by similarity: %d-row strips %s -> %s (left to the caller: "
           "esmm_pattern_reorder)\n",
           REORDER_ROWS, cli_number(d.as_is, 3), cli_number(d.reordered, 3));
  if (esmm_is_tuned(ctx))
    printf("constants  measured here (%s)\n\n", esmm_tune_path(ctx));
  else
    printf("constants  as shipped; 'esmm tune' measures this machine\n\n");
  return CLI_GO;
}

/* Kernels of another backend cannot run here, whatever the product. */
static bool is_foreign(const esmm_ctx *ctx, const char *kernel)
{
  const char *backend = cli_on_gpu(ctx) ? "cuda" : "cpu";
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) == ESMM_OK && strcmp(info.name, kernel) == 0)
      return strcmp(info.backend, backend) != 0;
  }
  return false;
}

static void print_verdicts(const esmm_ctx *ctx, const esmm_verdict *verdicts, int count)
{
  static const char *const heads[] = {"", "kernel", "estimate", "vs dense", "verdict"};
  cli_table *table = cli_table_new("llrrl", heads);
  double dense = verdict_dense_seconds(verdicts, count);
  int foreign = 0;
  for (int i = 0; i < count; i++) {
    const esmm_verdict *v = &verdicts[i];
    if (!v->can_run && is_foreign(ctx, v->kernel)) {
      foreign++;
      continue;
    }
    cli_style style = v->chosen ? CLI_GOOD : v->can_run ? CLI_PLAIN : CLI_FAINT;
    cli_table_cell(table, style, "%s", v->chosen ? "*" : "");
    cli_table_cell(table, style, "%s", v->kernel);
    cli_table_cell(table, style, "%s", v->seconds > 0 ? cli_seconds(v->seconds) : "-");
    if (v->can_run && v->seconds > 0 && isfinite(dense))
      cli_table_cell(table, style, "%.2fx", dense / v->seconds);
    else
      cli_table_cell(table, style, "-");
    cli_table_cell(table, style, "%s%s", v->can_run ? "" : "cannot run: ", v->text);
  }
  cli_table_print(table, stdout);
  cli_table_free(table);
  if (foreign)
    cli_print(stdout, CLI_FAINT, "   %d kernel%s of a %s not shown\n", foreign, foreign == 1 ? "" : "s",
              cli_on_gpu(ctx) ? "CPU" : "GPU");
  printf("\n* the kernel that 'esmm run' and the library would take; estimates, not measurements ('esmm bench' "
         "measures)\n");
}

/* host: A and B as they were made; a and c: where the kernels want them. */
typedef struct operands {
  io_matrix host_a, host_b;
  esmm_matrix a, c;
  esmm_weights *weights;
} operands;

static int prepare(esmm_ctx *ctx, request *r, operands *o)
{
  cli_problem *p = &r->problem;
  int status = cli_problem_make(ctx, p, &o->host_a, &o->host_b);
  if (status == CLI_GO)
    status = cli_device_view(ctx, "A", &o->host_a.m, &o->a);
  if (status == CLI_GO)
    status = cli_device_alloc(ctx, "C", p->m, p->n, (esmm_dtype)p->dtype_c, ESMM_ROW_MAJOR, &o->c);
  if (status != CLI_GO)
    return status;
  esmm_prepare_opts opts = p->prepare;
  opts.strict = r->strict && opts.format.kind == ESMM_FORMAT_DENSE;
  esmm_status done = esmm_prepare(ctx, &o->host_b.m, &opts, &o->weights);
  return done == ESMM_OK ? CLI_GO : cli_status(ctx, "B", done);
}

/* Times the kernels in turns on these operands, and keeps the times for later runs. */
static int tune(esmm_ctx *ctx, const request *r, operands *o)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .strict = r->strict};
  const double start = cli_now();
  esmm_status done = esmm_tune_weights(ctx, &o->a, o->weights, &o->c, &opts);
  if (done != ESMM_OK)
    return cli_status(ctx, "--tune", done);
  const double seconds = cli_now() - start;
  done = esmm_tune_save(ctx);
  if (done != ESMM_OK)
    return cli_status(ctx, "--tune", done);
  printf("timed in turns in %s, and saved for later runs\n", cli_seconds(seconds));
  return CLI_GO;
}

static int explain(esmm_ctx *ctx, const request *r, const operands *o)
{
  int count = esmm_kernel_count();
  esmm_verdict *verdicts = cli_alloc((size_t)count, sizeof *verdicts);
  esmm_matmul_opts opts = {.size = sizeof opts, .strict = r->strict};
  esmm_weights_info info = {.size = sizeof info};
  esmm_status done = esmm_explain(ctx, &o->a, o->weights, &o->c, &opts, verdicts, sizeof *verdicts, &count);
  if (done == ESMM_OK)
    done = esmm_weights_get_info(o->weights, &info);
  int status = done == ESMM_OK ? print_problem(ctx, &r->problem, &o->host_a.m, &info) : cli_status(ctx, "plan", done);
  if (status == CLI_GO && count == 0)
    printf("nothing to multiply: a dimension is 0, and no kernel runs\n");
  else if (status == CLI_GO)
    print_verdicts(ctx, verdicts, count);
  free(verdicts);
  return status == CLI_GO ? CLI_OK : status;
}

int cmd_explain(int argc, char **argv)
{
  request r = {0};
  cli_problem_init(&r.problem);
  const cli_option options[] = {
      CLI_PROBLEM_OPTIONS(&r.problem),
      {"force", CLI_STRING, &r.force, "NAME", "ask about one kernel, or the kernels of one idea", 0, 0, NULL, NULL},
      {"tune", CLI_FLAG, &r.tune, NULL, "first time the kernels in turns on this product, and keep what they take", 0,
       0, NULL, NULL},
      {"strict", CLI_FLAG, &r.strict, NULL, "no skipping: zeros meet Inf and NaN as IEEE says", 0, 0, NULL, NULL},
      {0}};
  const cli_parser parser = {
      .synopsis = "explain [options]",
      .about =
          "Shows, for one product, which kernels can run, the time that the plan predicts for each, and which it\n"
          "would choose. The product is described as for 'esmm bench'. Where A has more than 128 rows, and strips of\n"
          "128 would be less dense with similar rows together, it says so; that is left to the caller\n"
          "(esmm_pattern_reorder). With --tune the kernels are timed first, some 90 products in all, and what\n"
          "they took is kept beside the file of 'esmm tune': later products of that shape, dtype and density choose\n"
          "by it, from their first call on and inside CUDA graphs too.",
      .options = options,
      .notes = CLI_PROBLEM_NOTES};
  int count;
  int status = cli_parse(&parser, argc, argv, NULL, &count);
  if (status == CLI_GO)
    status = cli_problem_resolve(&r.problem, NAN);
  if (status != CLI_GO)
    return status;

  esmm_ctx *ctx;
  status = cli_context(&r.problem.machine, r.force, &ctx);
  if (status != CLI_GO)
    return status;
  operands o = {0};
  status = prepare(ctx, &r, &o);
  if (status == CLI_GO && r.tune)
    status = tune(ctx, &r, &o);
  if (status == CLI_GO)
    status = explain(ctx, &r, &o);
  esmm_weights_free(o.weights);
  cli_device_view_free(ctx, &o.host_a.m, &o.a);
  cli_device_free(ctx, &o.c);
  io_matrix_free(&o.host_a);
  io_matrix_free(&o.host_b);
  esmm_ctx_free(ctx);
  return status;
}
