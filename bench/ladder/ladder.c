/*
 * ladder.c: the ladder: measures the GPU kernels of earlier work, by number, beside cuBLAS and today's joint kernel.
 *
 * The kernels are in k_ladder.c and k_ladder.cu. This program is the library with these kernels in its registry, and
 * the parts of `esmm bench` that make operands, measure, and check against float64.
 */
#include "bench/bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  int number; /* 0: it was no step then */
  const char *kernel;
} steps[] = {{10, "ladder_10_dense"},           {15, "cublas_f32"},
             {17, "ladder_17_b_only"},          {20, "ladder_20_joint_64x32"},
             {21, "ladder_21_joint_8x32"},      {25, "ladder_25_fused_64x32"},
             {28, "ladder_28_branchless_8x32"}, {29, "ladder_29_joint_32x32"},
             {30, "ladder_30_joint_8x8"},       {0, "joint_f32"}};
enum { STEPS = sizeof steps / sizeof *steps };

static const char about[] =
    "Measures the GPU kernels of earlier work, step by step, beside cuBLAS and today's joint kernel, every result\n"
    "checked against float64.\n"
    "\n"
    "  numbers   10, 15, 17, 20, 21, 25, 28, 29, 30 and ranges of them (20-29); 0 is today's kernel (default: all)";

static const char notes[] =
    "What the columns say\n"
    "  ms: median of a call. extract: the part of it that scans A in a launch of its own; 25 and 28 scan A inside\n"
    "  the kernel. cuBLAS ms: on this data or on random dense data, whichever is faster. x cuBLAS: over that.\n"
    "  error: max |C - exact| / max |exact|. joint: the share of (tile, k) that was multiplied.\n"
    "\n"
    "Exit status: 0 all right; 1 a wrong result, or nothing could be measured; 2 wrong words.\n";

static int number_of(const char *kernel)
{
  int i = 0;
  while (strcmp(steps[i].kernel, kernel) != 0)
    i++;
  return steps[i].number;
}

/* Kernels of the steps from first to last that are not there yet. */
static int add_range(bench *b, const char *word, int64_t first, int64_t last)
{
  bool any = false;
  for (int i = 0; i < STEPS; i++)
    if (steps[i].number >= first && steps[i].number <= last) {
      bool there = false;
      for (int j = 0; j < b->kernel_count; j++)
        there = there || b->kernels[j] == steps[i].kernel;
      if (!there)
        b->kernels[b->kernel_count++] = steps[i].kernel;
      any = true;
    }
  return any ? CLI_GO
             : cli_usage("numbers: there is no kernel %s; the ladder has 10, 15, 17, 20, 21, 25, 28, 29, 30, and 0",
                         word);
}

/* "20" or "20-29" */
static int add_word(bench *b, const char *word)
{
  const char *dash = strchr(word, '-');
  char from[16] = "";
  int64_t first = 0, last = 0;
  if (dash && (size_t)(dash - word) >= sizeof from)
    return cli_usage("numbers: %s is not a range of numbers", word);
  if (dash)
    memcpy(from, word, (size_t)(dash - word));
  int status = cli_parse_int("numbers", dash ? from : word, 0, 1000, &first);
  last = first;
  if (status == CLI_GO && dash)
    status = cli_parse_int("numbers", dash + 1, 0, 1000, &last);
  if (status == CLI_GO && first > last)
    return cli_usage("numbers: %s runs backwards", word);
  return status == CLI_GO ? add_range(b, word, first, last) : status;
}

static int parse(bench *b, int argc, char **argv)
{
  const char *sweep = ".5", *words[STEPS];
  int count;
  cli_problem *p = &b->problem;
  const cli_option options[] = {
      {"size", CLI_INT, &p->size, "N", "M = K = N = N (default 4096)", 1, CLI_MAX_DIMENSION, NULL, &p->has_size},
      {"dims", CLI_DIMS, p->dims, "M K N", "C [M,N] = A [M,K] x B [K,N]", 1, CLI_MAX_DIMENSION, NULL, &p->has_dims},
      {"sweep", CLI_STRING, &sweep, "LIST",
       "shares of strips of 32 rows of A and 32 columns of B that are not\n"
       "zero (default .5)",
       0, 0, NULL, NULL},
      {"dtype", CLI_DTYPE, &p->dtype, "f32|bf16|f16", "of A, B and C (default f32)", 0, 0, NULL, &p->has_dtype},
      {"seed", CLI_SEED, &p->seed, "N", "of the data (default 1)", 0, 0, NULL, NULL},
      {"runs", CLI_INT, &b->runs, "N", "timed calls of each, at least (default 7)", 1, 100000, NULL, NULL},
      CLI_DEVICE_OPTION(&p->machine.device),
      {"json", CLI_STRING, &b->json, "FILE",
       "a line of JSON for each measurement; '-' is stdout, and the\n"
       "table then goes to stderr",
       0, 0, NULL, NULL},
      {0}};
  const cli_parser parser = {.synopsis = "ladder [numbers] [options]",
                             .about = about,
                             .options = options,
                             .notes = notes,
                             .max_words = STEPS,
                             .words_are = "numbers of kernels",
                             .alone = true};
  int status = cli_parse(&parser, argc, argv, words, &count);
  for (int i = 0; i < count && status == CLI_GO; i++)
    status = add_word(b, words[i]);
  if (status == CLI_GO && count == 0)
    for (int i = 0; i < STEPS; i++)
      b->kernels[b->kernel_count++] = steps[i].kernel;
  if (!p->has_size && !p->has_dims) {
    p->size = 4096;
    p->has_size = true;
  }
  p->blockwise = true;
  if (status == CLI_GO)
    status =
        cli_parse_densities("--sweep", sweep, b->sweep, (int)(sizeof b->sweep / sizeof *b->sweep), &b->sweep_count);
  for (int i = 0; i < b->sweep_count && status == CLI_GO; i++)
    status = cli_problem_resolve(p, b->sweep[i]);
  return status;
}

static void add_row(const bench *b, const bench_data *data, const bench_result *result, const bench_contestant *c,
                    cli_table *t)
{
  const double dense = result->best < 0 ? NAN : result->contestants[result->best].median;
  const int number = number_of(c->force);
  const bool wrong = c->outcome == BENCH_WRONG;
  bench_report_place(b, data, t);
  if (number)
    cli_table_cell(t, CLI_PLAIN, "%d", number);
  else
    cli_table_cell(t, CLI_PLAIN, "today");
  cli_table_cell(t, CLI_PLAIN, "%s", c->name);
  cli_table_cell(t, wrong ? CLI_BAD : CLI_PLAIN, "%s", wrong ? "WRONG" : cli_number(1e3 * c->median, 4));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * c->extract, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * (c->median - c->extract), 4));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * dense, 4));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(dense / c->median, 3));
  cli_table_cell(t, wrong ? CLI_BAD : CLI_PLAIN, "%s", cli_number(c->rel_err, 2));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(c->stats.joint_density, 3));
}

static void add_rows(const bench *b, const bench_data *data, const bench_result *result, bench_report *report)
{
  static const char *const heads[] = {"density",  "number",    "kernel",   "ms",    "extract",
                                      "multiply", "cuBLAS ms", "x cuBLAS", "error", "joint"};
  if (!report->table) {
    bench_report_head(b, data, result, report);
    cli_table_free(report->table);
    report->table = cli_table_new("rrlrrrrrrr", heads);
  }
  for (int i = 0; i < result->ours; i++) {
    const bench_contestant *c = &result->contestants[i];
    cli_field fields[BENCH_FIELDS] = {{"number", NULL, number_of(c->force), false}};
    report->wrong += c->outcome == BENCH_WRONG;
    report->measured += c->outcome == BENCH_OK;
    if (c->outcome != BENCH_UNSUPPORTED)
      add_row(b, data, result, c, report->table);
    if (c->outcome != BENCH_OK)
      fprintf(report->remarks, "%s%s%s\n", c->outcome == BENCH_WRONG ? c->name : "",
              c->outcome == BENCH_WRONG ? " is WRONG: " : "", c->reason);
    const int count = 1 + bench_report_fields(data, result, c, fields + 1);
    bench_report_record(b, data, report, c->name, c->force, fields, count);
  }
}

static int measure(bench *b, double density, bench_report *report)
{
  bench_data data = {0};
  bench_result result = {0};
  int status = cli_problem_resolve(&b->problem, density);
  if (status == CLI_GO)
    status = bench_data_make(b, &data);
  if (status == CLI_GO)
    status = bench_measure(b, &data, &result);
  cli_progress_end(&b->progress);
  if (status == CLI_GO)
    add_rows(b, &data, &result, report);
  bench_result_free(&result);
  bench_data_free(b, &data);
  return status;
}

static int run(bench *b)
{
  bench_report report;
  int status = bench_report_open(b, &report);
  if (status == CLI_GO)
    status = cli_context(&b->problem.machine, NULL, &b->ctx);
  if (status == CLI_GO && !cli_on_gpu(b->ctx)) {
    const char *reason = esmm_ctx_device_reason(b->ctx);
    status = cli_failed("the ladder's kernels run on a GPU, and %s%s",
                        reason[0] ? "there is none: " : "this is the CPU, as was asked for", reason);
  }
  if (status == CLI_GO) {
    b->gpu = true;
    b->threads = esmm_ctx_threads(b->ctx);
    b->total = 100 * b->sweep_count;
    bench_open_libraries(b);
    cli_progress_start(&b->progress, "ladder");
    for (int i = 0; i < b->sweep_count && status == CLI_GO; i++) {
      b->done = 100 * i;
      status = measure(b, b->sweep[i], &report);
    }
    cublas_close(&b->cublas);
  }
  if (status == CLI_GO)
    status = bench_report_close(&report);
  if (status == CLI_GO)
    status = report.wrong || !report.measured ? CLI_FAILED : CLI_OK;
  bench_report_discard(&report);
  esmm_ctx_free(b->ctx);
  return status;
}

int main(int argc, char **argv)
{
  const char *kernels[STEPS];
  bench *b = cli_alloc(1, sizeof *b);
  b->kernels = kernels;
  b->runs = 7;
  cli_problem_init(&b->problem);
  cli_set_command("ladder");
  int status = parse(b, argc, argv);
  if (status == CLI_GO)
    status = run(b);
  free(b);
  if ((fflush(stdout) != 0 || ferror(stdout)) && status == CLI_OK)
    status = cli_failed("cannot write to the standard output");
  return status;
}
