/*
 * bench.c: esmm bench: options, the walk over a sweep, the exit status.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char about[] =
    "Measures kernels against the fastest dense library for this device (cuBLAS; OpenBLAS, BLIS, oneDNN), every\n"
    "result checked against float64. Our time includes the scan of A; the preparation of B is timed apart.\n"
    "\n"
    "  kernels   auto (default: what the plan chooses), all (that can compete here), names ('esmm list') and ideas\n"
    "            (joint), in a comma list\n"
    "  runs      timed calls of each, at least; more where they are short (default 7)";

static const char notes[] = CLI_PROBLEM_NOTES
    "\n"
    "What the columns say\n"
    "  ms, p95: median and 95th percentile of a call. extract: the part of it that scans and packs A.\n"
    "  dense ms: the fastest dense library on this data or on random dense data. speedup: over that.\n"
    "  GFLOP/s (TFLOP/s on a GPU): counting 2 M N K, useful: counting what was multiplied. error: max |C - exact|\n"
    "  / max |exact|, ours and that library's. joint: the share of (tile, k) that was multiplied.\n"
    "  With M up to 64 weights of over 128 KB rotate through several copies, so that they come from memory.\n"
    "  A GPU's operands lie in its memory; its L2 cache is emptied before each call, and its own clock measures.\n"
    "  cuBLAS gets A and B as they are where both are bf16 or both f16, and C is the same or f32; else all in f32.\n"
    "  So does oneDNN on a CPU, where it can, with B in its own layout; OpenBLAS and BLIS get f32.\n"
    "  A kernel that promises the same bits each time is wrong if they differ after the measurement.\n"
    "  On a GPU auto learns from its calls: it is measured once it has learnt. ms_first of --json and --csv is a call\n"
    "  that knows nothing yet.\n"
    "\n"
    "What else can be measured\n"
    "  --calls: calls of each kernel in batches, in a row on the same operands, once the plan knows them: nanoseconds\n"
    "  a call, the median and the least of the batches. 20000 calls; on a CPU 0.2 s at least and 2 s at most. On a "
    "GPU\n"
    "  they are launched and not waited for: it is the host's time. On a CPU the plan remembers only auto's choice: a\n"
    "  call that names its kernel costs some microseconds more.\n"
    "  --epilogue: what the product ends with, as esmm_matmul does it: C = activation(A B + bias) + residual, or with "
    "a\n"
    "  gate activation(A G) * (A B + bias) + residual; counts of the nonzeros of C's columns; bitmaps of its strips. "
    "Only\n"
    "  our kernels do that: the dense library only multiplies, twice with a gate. All results are checked.\n"
    "  --peers: separate lines, no baseline; the time is the product's, the format is made beforehand. A peer that\n"
    "  is missing or refuses is named below the table. ESMM_CUSPARSELT and ESMM_CUSPARSE may name the files.\n"
    "  --prepare: medians of 'runs' times: B in the device's memory, pruned there, then prepared.\n"
    "  --switch N: 8 N calls with the same weights; candidates are the kernels named, all by default, and the dense\n"
    "  libraries. 1.00 is as fast as if the plan had known; beside it, the same with an A that stays dense.\n"
    "  --suite: as --list; with --json its lines can be held against the record's ('esmm compare', 'esmm report').\n"
    "  --list: options of the command line hold for every line; a line that fails is named, the others are measured.\n"
    "\n"
    "Exit status: 0 all right; 1 a wrong result, or nothing could be measured; 2 wrong words.\n"
    "\n"
    "Examples\n"
    "  esmm bench auto 5 --size 1024 --blockwise --sweep 1,.75,.5,.25,.125\n"
    "  esmm bench all 7 --dims 1 4096 4096 --random --density-a 10% --density-b 1\n"
    "  esmm bench auto 7 --load-a activations.npy --dims 2048 3072 768 --json -\n"
    "  esmm bench joint,cublas,auto 10 --device cuda --size 4096 --blockwise --pattern 11110000\n"
    "  esmm bench auto --device cuda --dtype bf16 --size 8192 --blockwise --strip 128 --sweep 1,.5,.25 --density-b 1\n";

/* Ways to measure something else, of which one at most can be asked for. */
static int check_modes(const bench *b, bool sweep)
{
  const char *modes[7];
  int count = 0;
  if (b->once)
    modes[count++] = "--once";
  if (b->calls)
    modes[count++] = "--calls";
  if (b->prepare)
    modes[count++] = "--prepare";
  if (b->switch_every)
    modes[count++] = "--switch";
  if (b->list)
    modes[count++] = "--list";
  if (b->suite_word)
    modes[count++] = "--suite";
  if (sweep && !b->once)
    modes[count++] = "--sweep";
  if (count > 1)
    return cli_usage("%s and %s cannot both be given", modes[0], modes[1]);
  if ((b->switch_every || b->prepare) && (b->epilogue_words || b->peers || b->given_rows))
    return cli_usage("%s and %s cannot both be given", modes[0],
                     b->epilogue_words ? "--epilogue"
                     : b->peers        ? "--peers"
                                       : "--given");
  if (b->once && (b->json || b->csv || b->skip_stats || b->extraction))
    return cli_usage("--once measures nothing: give no --json, --csv, --skip-stats or --extraction with it");
  if (b->energy && (b->once || b->calls || b->prepare || b->switch_every))
    return cli_usage("%s and --energy cannot both be given", modes[0]);
  if (count && !sweep && (b->skip_stats || b->extraction))
    return cli_usage("%s and %s cannot both be given", modes[0], b->skip_stats ? "--skip-stats" : "--extraction");
  return CLI_GO;
}

static int check_files(const bench *b)
{
  if (b->json && b->csv && strcmp(b->json, "-") == 0 && strcmp(b->csv, "-") == 0)
    return cli_usage("--json and --csv cannot both go to stdout");
  int status = cli_output_spares("--json", b->json, "--csv", b->csv);
  if (status == CLI_GO)
    status = cli_output_spares("--json", b->json, "--list", b->list);
  if (status == CLI_GO)
    status = cli_output_spares("--csv", b->csv, "--list", b->list);
  if (status == CLI_GO)
    status = cli_problem_spared(&b->problem, "--json", b->json);
  return status == CLI_GO ? cli_problem_spared(&b->problem, "--csv", b->csv) : status;
}

static int parse(bench *b, int argc, char **argv)
{
  const char *sweep = NULL, *words[2];
  int count;
  const cli_option options[] = {
      CLI_PROBLEM_OPTIONS(&b->problem),
      {NULL, CLI_HEADING, NULL, NULL, "Measurements and output", 0, 0, NULL, NULL},
      BENCH_PRODUCT_OPTIONS(b),
      {"sweep", CLI_STRING, &sweep, "LIST", "several values of --density in one table: 1,.75,.5,.25", 0, 0, NULL, NULL},
      {"no-check", CLI_FLAG, &b->no_check, NULL, "do not check results", 0, 0, NULL, NULL},
      {"no-tune", CLI_FLAG, &b->no_tune, NULL, "do not measure the plan's constants, missing or of a busy machine", 0,
       0, NULL, NULL},
      {"skip-stats", CLI_FLAG, &b->skip_stats, NULL, "what block, warp and dot skipping would save, beside theory", 0,
       0, NULL, NULL},
      {"extraction", CLI_FLAG, &b->extraction, NULL, "speed of extraction beside that of memcpy", 0, 0, NULL, NULL},
      {"energy", CLI_FLAG, &b->energy, NULL,
       "joules a product: a second of calls in a row, counted by NVML for\n"
       "the whole GPU board, by RAPL for the CPU's packages",
       0, 0, NULL, NULL},
      {"price", CLI_STRING, &b->price_words, "P",
       "with --energy, dollars a million products: P or P/kWh for energy,\n"
       "P/h for an hour of the machine",
       0, 0, NULL, NULL},
      {"once", CLI_FLAG, &b->once, NULL, "only run each kernel, once, and measure nothing: for profilers", 0, 0, NULL,
       NULL},
      {"calls", CLI_FLAG, &b->calls, NULL, "the cost of a call, in nanoseconds; on a GPU, of the host", 0, 0, NULL,
       NULL},
      {"prepare", CLI_FLAG, &b->prepare, NULL, "the time to prune B to its --format and to prepare it", 0, 0, NULL,
       NULL},
      {"switch", CLI_INT, &b->switch_every, "N",
       "a stream of calls: A turns from dense to the given zeros and back\n"
       "every N calls: auto over the best kernel for each",
       1, 1000000, NULL, NULL},
      {"list", CLI_STRING, &b->list, "FILE",
       "many products in one process: a line of FILE has the options of\n"
       "one, for shape, zeros, dtypes, --epilogue and --peers",
       0, 0, NULL, NULL},
      {"suite", CLI_STRING, &b->suite_word, "NAME",
       "the products of a suite of the record, by its name; 'list' lists\n"
       "them",
       0, 0, NULL, NULL},
      {"json", CLI_STRING, &b->json, "FILE",
       "a line of JSON for each measurement; '-' is stdout, and the\n"
       "table then goes to stderr",
       0, 0, NULL, NULL},
      {"csv", CLI_STRING, &b->csv, "FILE", "the same as CSV", 0, 0, NULL, NULL},
      {"plot", CLI_STRING, &b->plot, "FILE",
       "the sweep as a figure: FILE.svg, or FILE.png where rsvg-convert\n"
       "is installed",
       0, 0, NULL, NULL},
      {0}};
  const cli_parser parser = {.synopsis = "bench [kernels] [runs] [options]",
                             .about = about,
                             .options = options,
                             .notes = notes,
                             .max_words = 2,
                             .words_are = "kernels and a number of runs"};
  int status = cli_parse(&parser, argc, argv, words, &count);
  b->kernel_words = status == CLI_GO && count > 0 ? words[0] : "auto";
  if (status == CLI_GO && count > 1)
    status = cli_parse_int("runs", words[1], 1, 100000, &b->runs);
  if (status == CLI_GO && sweep) {
    const cli_problem *swept = &b->problem;
    if (!isnan(swept->density))
      return cli_usage("--sweep and --density cannot both be given");
    bool fixed_a = swept->load_a || !isnan(swept->density_a);
    bool fixed_b = swept->load_b || swept->has_activations || !isnan(swept->density_b);
    if (fixed_a && fixed_b)
      return cli_usage("--sweep: neither operand is left to vary");
    status =
        cli_parse_densities("--sweep", sweep, b->sweep, (int)(sizeof b->sweep / sizeof *b->sweep), &b->sweep_count);
  }
  if (status == CLI_GO)
    status = check_files(b);
  if (status == CLI_GO)
    status = check_modes(b, sweep);
  if (status == CLI_GO)
    status = bench_plot_check(b);
  if (status == CLI_GO)
    status = bench_energy_parse(b);
  if (status == CLI_GO)
    status = bench_epilogue_parse(b->epilogue_words, &b->epilogue);
  if (status == CLI_GO && b->problem.load_b && (b->prepare || b->epilogue.gate))
    status = cli_usage("--load-b: B is generated with %s", b->prepare ? "--prepare" : "a gate");
  b->alone = b->once || b->calls || b->prepare;
  if (status != CLI_GO || b->list || b->suite_word) /* a line resolves its own problem */
    return status;
  for (int i = 0; i < b->sweep_count && status == CLI_GO; i++)
    status = cli_problem_resolve(&b->problem, b->sweep[i]);
  if (status == CLI_GO && b->sweep_count == 0)
    status = cli_problem_resolve(&b->problem, NAN);
  const cli_problem *p = &b->problem;
  if (status == CLI_GO && (p->m == 0 || p->k == 0 || p->n == 0))
    status = cli_usage("%s: a product of %lld x %lld x %lld has nothing to measure", p->has_dims ? "--dims" : "--size",
                       (long long)p->m, (long long)p->k, (long long)p->n);
  return status;
}

/* One problem of the sweep; data is that of the one before. */
static int step(bench *b, double density, bool first, bench_data *data, bench_report *report)
{
  int status = cli_problem_resolve(&b->problem, density);
  if (status != CLI_GO)
    return status;
  if (!first && bench_data_fits(b, data))
    status = bench_data_next(b, data);
  else {
    bench_data_free(b, data);
    status = bench_data_make(b, data);
  }
  if (status == CLI_GO)
    status = b->once ? bench_once(b, data) : bench_product(b, data, report);
  if (status == CLI_GO && b->extraction && first)
    status = bench_extraction(b, data, report);
  return status;
}

int bench_product(bench *b, bench_data *data, bench_report *report)
{
  bench_result result = {0};
  const bool first = !report->table;
  int status = CLI_GO;
  if (first && !b->no_tune) /* after the data, so that a file that is not there is said at once */
    status = cli_tune_once(b->ctx);
  if (status != CLI_GO)
    return status;
  if (b->calls)
    return bench_calls(b, data, report);
  if (b->prepare)
    return bench_prepare(b, data, report);
  if (b->switch_every)
    return bench_switch(b, data, report);
  status = bench_measure(b, data, &result);
  if (status == CLI_GO) {
    cli_progress_end(&b->progress);
    if (first)
      bench_report_head(b, data, &result, report);
    bench_report_add(b, data, &result, report);
    bench_plot_add(b, data, &result, &report->plot);
    if (b->skip_stats)
      status = bench_skip_stats(b, data, report);
  }
  bench_result_free(&result);
  return status;
}

void bench_open_libraries(bench *b)
{
  if (b->alone)
    return;
  if (!b->gpu) {
    b->library_count = blas_open(b->libraries, b->threads);
    return;
  }
  const char *colon = strchr(esmm_ctx_device(b->ctx), ':');
  if (cublas_open(&b->cublas) && cublas_start(&b->cublas, colon ? (int)strtol(colon + 1, NULL, 10) : 0)) {
    b->libraries[0] = (blas_library){.name = "cublas"};
    snprintf(b->libraries[0].title, sizeof b->libraries[0].title, "%s", b->cublas.title);
    b->library_count = 1;
    return;
  }
  cli_note("cuBLAS is left out: %s", b->cublas.error);
  cublas_close(&b->cublas);
}

static int walk(bench *b, bench_report *report)
{
  int steps = b->sweep_count ? b->sweep_count : 1, status = CLI_GO;
  bench_data data = {0};
  b->threads = esmm_ctx_threads(b->ctx);
  b->total = 100 * steps;
  bench_open_libraries(b);
  bench_energy_open(b);
  cli_progress_start(&b->progress, "bench");
  if (b->list)
    status = bench_list(b, report);
  for (int i = 0; i < steps && status == CLI_GO && !b->list; i++) {
    b->done = 100 * i;
    status = step(b, b->sweep_count ? b->sweep[i] : NAN, i == 0, &data, report);
  }
  bench_data_free(b, &data);
  cli_progress_end(&b->progress);
  bench_energy_title(b, report->energy_title, sizeof report->energy_title);
  energy_close(&b->meter);
  cublas_close(&b->cublas);
  return status;
}

static int run(bench *b)
{
  bench_report report;
  int status = bench_report_open(b, &report);
  if (status == CLI_GO)
    status = cli_context(&b->problem.machine, NULL, &b->ctx);
  char name[64];
  if (status == CLI_GO && b->suite_word) {
    status = bench_suite_find(b->suite_word, cli_on_gpu(b->ctx), &b->suite);
    if (status == CLI_GO) {
      snprintf(name, sizeof name, "suite %s", bench_suite_name(b->suite));
      b->list = name;
    }
  }
  if (status == CLI_GO) {
    b->gpu = cli_on_gpu(b->ctx);
    /* auto is held against others: all of them, unless some are named */
    const bool others = b->switch_every && strcmp(b->kernel_words, "auto") == 0;
    status = cli_kernels(b->ctx, "kernels", others ? "all" : b->kernel_words, &b->kernels, &b->kernel_count);
  }
  if (status == CLI_GO && b->gpu && b->extraction)
    status = cli_usage("--extraction: it measures a CPU's scan (--device cpu); a GPU's is the column extract");
  if (status == CLI_GO)
    status = walk(b, &report);
  if (status == CLI_GO && !b->once)
    status = bench_report_close(&report);
  if (status == CLI_GO)
    status = bench_plot_write(b, report.plot);
  if (status == CLI_GO && !b->once && report.measured == 0 && report.wrong == 0 && report.failed == 0)
    status = cli_failed("none of the kernels asked for can run this product%s%s", report.refused[0] ? ": " : "",
                        report.refused);
  else if (status == CLI_GO)
    status = report.wrong || report.failed ? CLI_FAILED : CLI_OK;
  bench_report_discard(&report);
  esmm_ctx_free(b->ctx);
  return status;
}

int cmd_bench(int argc, char **argv)
{
  bench *b = cli_alloc(1, sizeof *b);
  b->runs = 7;
  cli_problem_init(&b->problem);
  int status = parse(b, argc, argv);
  if (status == CLI_GO)
    status = b->suite_word && strcmp(b->suite_word, "list") == 0 ? bench_suites_print() : run(b);
  free(b->kernels);
  free(b);
  return status;
}
