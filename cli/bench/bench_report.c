/*
 * bench_report.c: a benchmark's output: a table for people, a line a measurement for programs.
 *
 * The fields of a record are listed once; JSON and CSV are two ways to print that list.
 */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- records ---- */

#define TEXT(name, value) \
  {                       \
    name, value, 0, false \
  }
#define NUMBER(name, value)  \
  {                          \
    name, NULL, value, false \
  }
static const char on_random[] = "_on_random"; /* how the name of a baseline on random dense data ends */

static const char *source_kind(const cli_source *source)
{
  static const char *const kinds[] = {"dense", "random", "blockwise", "pattern", "activations"};
  return source->path ? "file" : kinds[source->generator.kind];
}

static void generator_text(const cli_problem *p, char *out, size_t bytes)
{
  const char *a = source_kind(&p->a), *b = source_kind(&p->b);
  if (strcmp(a, b) == 0)
    snprintf(out, bytes, "%s", a);
  else
    snprintf(out, bytes, "%s/%s", a, b);
}

static void dtype_text(const cli_problem *p, char *out, size_t bytes)
{
  const char *a = esmm_dtype_str((esmm_dtype)p->dtype_a), *b = esmm_dtype_str((esmm_dtype)p->dtype_b);
  const char *c = esmm_dtype_str((esmm_dtype)p->dtype_c);
  if (p->dtype_a == p->dtype_b && p->dtype_b == p->dtype_c)
    snprintf(out, bytes, "%s", a);
  else
    snprintf(out, bytes, "%s x %s -> %s", a, b, c);
}

static double speedup(const bench_result *result, const bench_contestant *c)
{
  return result->best < 0 ? NAN : result->contestants[result->best].median / c->median;
}

/* The requested density of a generated operand; NAN for a file. */
static double asked_density(const cli_source *source)
{
  const esmm_generator *g = &source->generator;
  double ones = 0;
  if (source->path)
    return NAN;
  if (source->prune.format.kind == ESMM_FORMAT_NM)
    return (double)source->prune.format.keep / source->prune.format.group;
  if (source->prune.format.kind == ESMM_FORMAT_BSR)
    return source->prune.density;
  if (g->kind != ESMM_GEN_PATTERN)
    return g->density;
  for (int i = 0; i < 8; i++)
    ones += g->pattern[i] == '1';
  return ones / 8;
}

/* A gate is a second product. */
static double dense_gflops(const bench_data *data, double seconds)
{
  return (data->finish.gate_weights ? 4e-9 : 2e-9) * (double)data->m * (double)data->n * (double)data->k / seconds;
}

static const char *baseline_title(const bench_contestant *best)
{
  if (!best)
    return "none";
  return best->library ? best->library->title : "ESMM's own dense kernel";
}

/* Texts that fields point to. */
typedef struct labels {
  char generator[32], dtype[48], seed[32];
} labels;

static labels make_labels(const bench *b)
{
  labels l;
  snprintf(l.seed, sizeof l.seed, "%llu", (unsigned long long)b->problem.seed);
  generator_text(&b->problem, l.generator, sizeof l.generator);
  dtype_text(&b->problem, l.dtype, sizeof l.dtype);
  return l;
}

/* Where, and what: the same for every kernel. */
static int problem_fields(const bench *b, const bench_data *data, const labels *l, cli_field *out)
{
  const cli_field fields[] = {
      TEXT("device", esmm_ctx_device(b->ctx)),
      TEXT("device_name", esmm_ctx_device_name(b->ctx)),
      {"gpu", b->gpu ? esmm_ctx_device_name(b->ctx) : NULL, NAN, false},
      NUMBER("threads", b->threads),
      NUMBER("line", b->line ? (double)b->line : NAN),
      NUMBER("m", (double)data->m),
      NUMBER("n", (double)data->n),
      NUMBER("k", (double)data->k),
      TEXT("dtype", l->dtype),
      TEXT("generator", l->generator),
      {"seed", l->seed, 0, true},
      NUMBER("asked_density_a", asked_density(&b->problem.a)),
      NUMBER("asked_density_b", asked_density(&b->problem.b)),
      NUMBER("density_a", data->density_a),
      NUMBER("density_b", data->info.element_density),
      TEXT("format", b->problem.format ? b->problem.format : "dense"),
      {"epilogue", b->epilogue_words, NAN, false},
      NUMBER("given", b->given_rows ? (double)b->given_rows : NAN),
      NUMBER("weight_bytes", (double)data->info.bytes),
      NUMBER("strip128_density_a", data->strip_density_a),
  };
  memcpy(out, fields, sizeof fields);
  return sizeof fields / sizeof *fields;
}

int bench_report_fields(const bench_data *data, const bench_result *result, const bench_contestant *c, cli_field *out)
{
  const bench_contestant *best = result->best < 0 ? NULL : &result->contestants[result->best];
  const bool ran = c->outcome != BENCH_UNSUPPORTED;
  const cli_field fields[] = {
      NUMBER("strip_rows", ran ? (double)c->stats.strip_rows : NAN),
      NUMBER("strip_density_a", ran ? c->stats.strip_density_a : NAN),
      NUMBER("strip_density_b", ran ? c->stats.strip_density_b : NAN),
      NUMBER("joint_density", ran ? c->stats.joint_density : NAN),
      NUMBER("runs", c->count),
      NUMBER("ms", 1e3 * c->median),
      NUMBER("ms_p95", 1e3 * c->p95),
      NUMBER("ms_min", 1e3 * c->fastest),
      NUMBER("ms_first", 1e3 * c->first),
      NUMBER("ms_plan", 1e3 * c->plan),
      NUMBER("ms_extract", 1e3 * c->extract),
      NUMBER("ms_prepare", 1e3 * data->seconds_prepare),
      TEXT("baseline", best ? best->name : "none"),
      TEXT("baseline_name", baseline_title(best)),
      NUMBER("ms_baseline", best ? 1e3 * best->median : NAN),
      NUMBER("speedup", speedup(result, c)),
      NUMBER("gflops", dense_gflops(data, c->median)),
      NUMBER("gflops_useful", ran ? 1e-9 * c->stats.flop_useful / c->median : NAN),
      NUMBER("flop_useful", ran ? c->stats.flop_useful : NAN),
      NUMBER("rel_err", c->rel_err),
      NUMBER("rel_err_baseline", result->baseline_err),
      NUMBER("checked_rows", (double)result->checked_rows),
      {"bit_identical",
       c->checks < 2 ? NULL
       : c->varies   ? "false"
                     : "true",
       NAN, true},
      NUMBER("weight_copies", data->copies),
      TEXT("outcome", bench_outcome_str(c->outcome)),
      TEXT("reason", c->reason),
  };
  memcpy(out, fields, sizeof fields);
  return sizeof fields / sizeof *fields;
}

static void print_times(FILE *out, const char *name, const bench_result *result, int from, int to)
{
  fprintf(out, ",\"%s\":{", name);
  for (int i = from; i < to; i++) {
    fputs(i > from ? "," : "", out);
    cli_json_string(out, result->contestants[i].name);
    fputc(':', out);
    cli_json_number(out, 1e3 * result->contestants[i].median);
  }
  fputc('}', out);
}

static void print_json(FILE *out, const cli_field *fields, int count, const bench_result *result)
{
  fputc('{', out);
  cli_json_fields(out, fields, count);
  if (result)
    print_times(out, "dense_ms", result, result->ours, result->peers);
  if (result && result->peers < result->count)
    print_times(out, "peer_ms", result, result->peers, result->count);
  fputs("}\n", out);
  fflush(out);
}

/* result: whose dense libraries a line of JSON lists; NULL: none. */
static void write_record(const bench *b, const bench_data *data, const bench_result *result, bench_report *report,
                         const char *kernel, const char *requested, const cli_field *own, int own_count)
{
  const labels l = make_labels(b);
  cli_field fields[BENCH_FIELDS];
  int count = 0;
  char date[16] = "";
  const time_t now = time(NULL);
  struct tm utc;
  if (b->suite) { /* the record's fields in front of its lines */
    if (gmtime_r(&now, &utc))
      strftime(date, sizeof date, "%Y-%m-%d", &utc);
    fields[count++] = (cli_field)TEXT("suite", bench_suite_name(b->suite));
    fields[count++] = (cli_field)TEXT("asked", b->asked);
    fields[count++] = (cli_field)TEXT("date", date);
  }
  fields[count++] = (cli_field)TEXT("kernel", kernel);
  fields[count++] = (cli_field)TEXT("requested", requested[0] ? requested : "auto");
  count += problem_fields(b, data, &l, fields + count);
  memcpy(fields + count, own, (size_t)own_count * sizeof *own);
  count += own_count;
  fields[count++] = (cli_field)TEXT("version", esmm_version_str());
  fields[count++] = (cli_field)TEXT("source_id", esmm_source_id());
  if (report->json.file)
    print_json(report->json.file, fields, count, result);
  if (report->csv.file)
    cli_csv_record(report->csv.file, fields, count, !report->csv_started);
  report->csv_started = true;
}

void bench_report_record(const bench *b, const bench_data *data, bench_report *report, const char *kernel,
                         const char *requested, const cli_field *own, int count)
{
  write_record(b, data, NULL, report, kernel, requested, own, count);
}

/* ---- the table ---- */

int bench_report_open(const bench *b, bench_report *report)
{
  bool to_stdout = (b->json && strcmp(b->json, "-") == 0) || (b->csv && strcmp(b->csv, "-") == 0);
  *report = (bench_report){.out = to_stdout ? stderr : stdout};
  int status = b->json ? cli_output_open(&report->json, "--json", b->json) : CLI_GO;
  if (status == CLI_GO && b->csv)
    status = cli_output_open(&report->csv, "--csv", b->csv);
  if (status != CLI_GO)
    return status;
  report->remarks = open_memstream(&report->text, &report->bytes);
  return report->remarks ? CLI_GO : cli_failed("out of memory");
}

/* strips NAN: not known */
static void print_operand(const char *label, const cli_source *source, double density, double strips, bool swept,
                          FILE *out)
{
  if (swept && !source->path && source->generator.kind != ESMM_GEN_DENSE) {
    fprintf(out, "%-9s %s, density as in the table\n", label, source_kind(source));
    return;
  }
  fprintf(out, "%-9s %s; element density %s", label, source->text, cli_number(density, 3));
  if (!isnan(strips))
    fprintf(out, ", %d-row strips %s", BENCH_STRIP, cli_number(strips, 3));
  fputc('\n', out);
}

static void print_libraries(const bench *b, const bench_data *data, FILE *out)
{
  if (b->library_count == 0) {
    fprintf(out, "dense     no %s found: compared with ESMM's own dense kernel\n",
            b->gpu ? "cuBLAS" : "OpenBLAS, BLIS or oneDNN");
    return;
  }
  fprintf(out, "dense     ");
  for (int i = 0; i < b->library_count; i++)
    fprintf(out, "%s%s", i ? ", " : "", b->libraries[i].title);
  const bool wide = data->library_dtype == ESMM_F32;
  if (b->list)
    fputs(" (gemm, and gemv for one row)", out);
  else if (wide)
    fprintf(out, "%s%s", data->m == 1 ? " (sgemm and sgemv)" : " (sgemm)", b->gpu ? ", pedantic" : "");
  else
    fprintf(out, " (%s in %s)", data->m == 1 ? "gemm and gemv" : "gemm", esmm_dtype_str(data->library_dtype));
  if (b->gpu && !b->list)
    fprintf(out, ", B %s-major", data->gpu.transposed ? "column" : "row");
  fprintf(out, ", on this data and on random dense data; the fastest counts\n");
  if (!wide || b->list)
    return;
  if (data->onednn.product && !data->onednn.reason[0])
    fprintf(out, "          oneDNN multiplies %s, B in its own layout, by %s\n", esmm_dtype_str(data->onednn.dtype),
            onednn_product_kernel(data->onednn.product));
  if (data->b.m.dtype != ESMM_F32 || data->a[0].m.dtype != ESMM_F32 || b->problem.dtype_c != ESMM_F32)
    fprintf(out, "          BLAS libraries multiply in fp32, with operands converted beforehand\n");
}

static bool is_many(const bench *b)
{
  return b->sweep_count || b->list;
}

/* A sweep repeats its rows: it leaves out what the others show, and fits in 120 columns. */
static cli_table *new_table(const bench *b)
{
  const char *flops = b->gpu ? "TFLOP/s" : "GFLOP/s";
  const char *const one[] = {"kernel", "ms",     "p95",   "extract", "dense ms", "speedup",
                             flops,    "useful", "error", "dense's", "joint"};
  const char *const many[] = {b->suite  ? "product"
                              : b->list ? "line"
                                        : "density",
                              "kernel",
                              "ms",
                              "p95",
                              "extract",
                              "dense ms",
                              "speedup",
                              flops,
                              "error",
                              "joint",
                              "fastest dense"};
  return is_many(b) ? cli_table_new("rlrrrrrrrrl", many) : cli_table_new("lrrrrrrrrrr", one);
}

static void print_problem(const bench *b, const bench_data *data, FILE *out)
{
  const cli_problem *p = &b->problem;
  const labels l = make_labels(b);
  fprintf(out, "problem   C [%lld,%lld] = A [%lld,%lld] x B [%lld,%lld], %s\n", (long long)data->m, (long long)data->n,
          (long long)data->m, (long long)data->k, (long long)data->k, (long long)data->n, l.dtype);
  print_operand("A", &p->a, data->density_a, data->strip_density_a, b->sweep_count && isnan(p->density_a), out);
  print_operand("B", &p->b, data->info.element_density, NAN, b->sweep_count && isnan(p->density_b), out);
  if (b->epilogue.any)
    fprintf(out, "epilogue  %s, ours only; %s\n", b->epilogue_words,
            b->epilogue.gate           ? "the dense library multiplies twice, without the rest"
            : bench_finish_can_pass(b) ? "the dense library's C is plain; and_pass: with one pass over it behind"
                                       : "the dense library's C is plain");
  if (b->given_rows)
    fprintf(out, "given     A's bitmaps of strips of %lld rows; to make them is not timed\n", (long long)b->given_rows);
  fprintf(out, "weights   prepared in %s, %s", cli_seconds(data->seconds_prepare), cli_bytes((double)data->info.bytes));
  if (data->copies > 1)
    fprintf(out, "; each call takes the next of %d copies, so that they come from memory", data->copies);
}

void bench_report_head(const bench *b, const bench_data *data, const bench_result *result, bench_report *report)
{
  FILE *out = report->out;
  fprintf(out, "machine   %s, %s; %s\n", esmm_ctx_device_name(b->ctx), esmm_ctx_features(b->ctx), cli_workers(b->ctx));
  cli_print_no_gpu(b->ctx, 9, out);
  if (b->list)
    fprintf(out, "products  those of %s, by %s", b->list, b->suite ? "M,K,N and what was asked for" : "its lines");
  else
    print_problem(b, data, out);
  if (result && b->gpu)
    fprintf(out, "; the L2 cache is emptied before each call");
  fputc('\n', out);
  if (result) {
    report->table = new_table(b);
    print_libraries(b, data, out);
    if (b->no_check)
      fprintf(out, "check     none\n");
    else if (!b->list)
      fprintf(out, "check     %lld of %lld rows of C against float64\n", (long long)result->checked_rows,
              (long long)data->m);
  }
  fputc('\n', out);
}

static cli_style speed_style(double ratio)
{
  return ratio >= 1.05 ? CLI_GOOD : ratio < 0.95 ? CLI_WARN : CLI_PLAIN;
}

static void add_blank(cli_table *t, int cells)
{
  for (int i = 0; i < cells; i++)
    cli_table_cell(t, CLI_PLAIN, "%s", "");
}

static const char *error_text(double error)
{
  return isinf(error) ? "NaN" : cli_number(error, 2);
}

void bench_report_place(const bench *b, const bench_data *data, cli_table *t)
{
  if (b->suite)
    cli_table_cell(t, CLI_PLAIN, "%lld,%lld,%lld %s", (long long)data->m, (long long)data->k, (long long)data->n,
                   b->asked);
  else if (b->list)
    cli_table_cell(t, CLI_PLAIN, "%d", b->line);
  else if (b->sweep_count)
    cli_table_cell(t, CLI_PLAIN, "%s", cli_percent(b->problem.density_now));
}

static void add_our_row(const bench *b, const bench_data *data, const bench_result *result, const bench_contestant *c,
                        cli_table *t)
{
  const bench_contestant *best = result->best < 0 ? NULL : &result->contestants[result->best];
  const bool wrong = c->outcome == BENCH_WRONG;
  const double ratio = speedup(result, c), unit = b->gpu ? 1e-3 : 1;
  bench_report_place(b, data, t);
  cli_table_cell(t, CLI_PLAIN, "%s%s", c->force[0] ? "" : "auto: ", c->name);
  cli_table_cell(t, wrong ? CLI_BAD : CLI_PLAIN, "%s", wrong ? "WRONG" : cli_number(1e3 * c->median, 4));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * c->p95, 4));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(1e3 * c->extract, 3));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(best ? 1e3 * best->median : NAN, 4));
  cli_table_cell(t, speed_style(ratio), isfinite(ratio) ? "%.2f x" : "-", ratio);
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(unit * dense_gflops(data, c->median), 3));
  if (!is_many(b))
    cli_table_cell(t, CLI_PLAIN, "%s", cli_number(unit * 1e-9 * c->stats.flop_useful / c->median, 3));
  cli_table_cell(t, wrong ? CLI_BAD : CLI_PLAIN, "%s", error_text(c->rel_err));
  if (!is_many(b))
    cli_table_cell(t, CLI_PLAIN, "%s", cli_number(result->baseline_err, 2));
  cli_table_cell(t, CLI_PLAIN, "%s", cli_number(c->stats.joint_density, 3));
  if (is_many(b) && best)
    cli_table_cell(t, CLI_FAINT, "%.*s%s", (int)(strlen(best->name) - (best->dense_data ? strlen(on_random) : 0)),
                   best->name, best->dense_data ? "*" : "");
  else if (is_many(b))
    cli_table_cell(t, CLI_FAINT, "none");
}

static void add_baseline_row(const bench *b, const bench_data *data, const bench_result *result,
                             const bench_contestant *c, cli_table *t)
{
  const bool wrong = c->outcome == BENCH_WRONG, best = c == &result->contestants[result->best < 0 ? 0 : result->best];
  cli_table_cell(t, CLI_FAINT, "%s", c->name);
  cli_table_cell(t, wrong ? CLI_BAD : CLI_FAINT, "%s", wrong ? "WRONG" : cli_number(1e3 * c->median, 4));
  cli_table_cell(t, CLI_FAINT, "%s", cli_number(1e3 * c->p95, 4));
  add_blank(t, 1);
  cli_table_cell(t, CLI_FAINT, "%s", best ? "<--" : "");
  add_blank(t, 1);
  cli_table_cell(t, CLI_FAINT, "%s", cli_number((b->gpu ? 1e-3 : 1) * dense_gflops(data, c->median), 3));
  add_blank(t, 2);
  cli_table_cell(t, CLI_FAINT, "%s", isnan(c->rel_err) ? "" : error_text(c->rel_err));
  add_blank(t, 1);
}

/* Of a peer in a sweep or a list. */
static void add_peer_row(const bench *b, const bench_data *data, const bench_result *result, const bench_contestant *c,
                         cli_table *t)
{
  const bool wrong = c->outcome == BENCH_WRONG;
  const double ratio = speedup(result, c);
  if (b->list)
    cli_table_cell(t, CLI_FAINT, "%d", b->line);
  else
    cli_table_cell(t, CLI_FAINT, "%s", cli_percent(b->problem.density_now));
  cli_table_cell(t, CLI_FAINT, "peer: %s", c->name);
  cli_table_cell(t, wrong ? CLI_BAD : CLI_FAINT, "%s", wrong ? "WRONG" : cli_number(1e3 * c->median, 4));
  cli_table_cell(t, CLI_FAINT, "%s", cli_number(1e3 * c->p95, 4));
  add_blank(t, 2);
  cli_table_cell(t, CLI_FAINT, isfinite(ratio) ? "%.2f x" : "-", ratio);
  cli_table_cell(t, CLI_FAINT, "%s", cli_number(1e-3 * dense_gflops(data, c->median), 3));
  cli_table_cell(t, CLI_FAINT, "%s", error_text(c->rel_err));
  add_blank(t, 2);
}

/* A quiet machine repeats itself: half as long again in one call of twenty means that something else is running. */
static bool is_noisy(const bench_contestant *c)
{
  return c->count >= 5 && c->p95 > 1.5 * c->median;
}

/* A library that is not there is so for every product. */
static bool was_said(bench_report *report, const char *text)
{
  fflush(report->remarks);
  return report->text && strstr(report->text, text);
}

static void add_remarks(const bench *b, const bench_contestant *c, bench_report *report)
{
  if (c->outcome == BENCH_WRONG)
    cli_print(report->remarks, CLI_BAD, "%s is WRONG: %s\n", c->name, c->reason);
  else if (c->outcome == BENCH_UNSUPPORTED && !(c->peer && was_said(report, c->reason)))
    fprintf(report->remarks, "%s\n", c->reason);
  else if (!c->is_baseline && !c->force[0] && !is_many(b))
    fprintf(report->remarks, "auto chose %s: %s\n", c->name, c->reason);
}

void bench_report_add(const bench *b, const bench_data *data, const bench_result *result, bench_report *report)
{
  if (is_many(b) && result->best >= 0)
    report->starred = report->starred || result->contestants[result->best].dense_data;
  for (int i = 0; i < result->count; i++) {
    const bench_contestant *c = &result->contestants[i];
    /* A sweep or a list has its baseline in a column: rows for every library would hide the comparison. */
    if (i == result->ours && !is_many(b))
      cli_table_rule(report->table);
    if (c->outcome != BENCH_UNSUPPORTED && i < result->ours)
      add_our_row(b, data, result, c, report->table);
    else if (c->outcome != BENCH_UNSUPPORTED && !is_many(b))
      add_baseline_row(b, data, result, c, report->table);
    else if (c->outcome != BENCH_UNSUPPORTED && i >= result->peers)
      add_peer_row(b, data, result, c, report->table);
    add_remarks(b, c, report);
    report->noisy = report->noisy || ((i < result->ours || i == result->best) && is_noisy(c));
    if (i >= result->ours)
      continue;
    report->wrong += c->outcome == BENCH_WRONG;
    if (c->outcome == BENCH_UNSUPPORTED && !report->refused[0])
      snprintf(report->refused, sizeof report->refused, "%s", c->reason);
    report->measured += c->outcome == BENCH_OK || c->outcome == BENCH_NOT_CHECKED;
    cli_field fields[BENCH_FIELDS];
    int count = bench_report_fields(data, result, c, fields);
    count += bench_energy_fields(b, result, c, fields + count);
    write_record(b, data, result, report, c->name, c->force, fields, count);
  }
  bench_energy_add(b, data, result, report);
  if (b->energy && b->meter.reason[0] && !was_said(report, b->meter.reason))
    fprintf(report->remarks, "energy is left out: %s\n", b->meter.reason);
}

static void print_part(const bench_report *report, const char *title, const cli_table *table)
{
  if (!table)
    return;
  fprintf(report->out, "\n%s\n", title);
  cli_table_print(table, report->out);
}

int bench_report_close(bench_report *report)
{
  if (report->table)
    cli_table_print(report->table, report->out);
  if (report->starred)
    fprintf(report->remarks, "* on random dense data\n");
  if (report->noisy)
    fprintf(report->remarks, "The times vary much (p95 against ms): is something else running on this machine?\n");
  fclose(report->remarks);
  report->remarks = NULL;
  if (report->bytes)
    fprintf(report->out, "\n%s", report->text);
  print_part(report, "Skipped shares, measured and expected", report->skip_table);
  print_part(report, "Extraction of A's bitmaps", report->extraction_table);
  print_part(report, report->energy_title, report->energy_table);
  fflush(report->out);
  int status = report->json.file ? cli_output_close(&report->json, "--json") : CLI_GO;
  int other = report->csv.file ? cli_output_close(&report->csv, "--csv") : CLI_GO;
  return status == CLI_GO ? other : status;
}

void bench_report_discard(bench_report *report)
{
  free(report->plot);
  if (report->remarks)
    fclose(report->remarks);
  free(report->text);
  cli_table_free(report->table);
  cli_table_free(report->skip_table);
  cli_table_free(report->extraction_table);
  cli_table_free(report->energy_table);
  cli_output_discard(&report->json);
  cli_output_discard(&report->csv);
  *report = (bench_report){0};
}
