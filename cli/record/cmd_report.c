/*
 * cmd_report.c: esmm report: records as one page to look at.
 *
 * The page is page.html with the records in the place of @DATA@, as JSON. Text of a record can say anything, so '<',
 * '>' and '&' are escaped there too: no text can end the script that holds the data, and the page shows text as text.
 */
#include "record.h"

#include <stdlib.h>
#include <string.h>

extern const char esmm_page[], esmm_page_end[];

static const char mark[] = "@DATA@";

static const char *const fields[] = {
    "key", "suite", "asked", "device",    "dtype",     "generator", "format", "kernel", "requested",   "baseline",
    "m",   "n",     "k",     "density_a", "density_b", "ms",        "least",  "p95",    "baseline_ms", "speedup"};

static void write_line(FILE *out, const record_line *l)
{
  const char *const texts[] = {l->key,       l->suite,  l->asked,  l->device,    l->dtype,
                               l->generator, l->format, l->kernel, l->requested, l->baseline};
  const double numbers[] = {l->m,  l->n,     l->k,   l->density_a,   l->density_b,
                            l->ms, l->least, l->p95, l->baseline_ms, l->speedup};
  fputc('[', out);
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    cli_json_string(out, texts[i]);
    fputc(',', out);
  }
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    fputs(i ? "," : "", out);
    cli_json_number(out, numbers[i]);
  }
  fputc(']', out);
}

static void write_record(FILE *out, const record *r)
{
  const cli_field about[] = {{"name", r->path, 0, false},        {"date", r->date, 0, false},
                             {"version", r->version, 0, false},  {"source", r->source_id, 0, false},
                             {"others", NULL, r->others, false}, {"left_out", NULL, r->left_out, false}};
  fputc('{', out);
  cli_json_fields(out, about, sizeof about / sizeof *about);
  fputs(",\"problems\":[", out);
  for (int i = 0; i < r->problem_count; i++) {
    fputs(i ? "," : "", out);
    cli_json_string(out, r->problems[i]);
  }
  fputs("],\"lines\":[", out);
  for (int i = 0; i < r->count; i++) {
    fputs(i ? ",\n" : "\n", out);
    write_line(out, &r->lines[i]);
  }
  fputs("]}", out);
}

static void write_data(FILE *out, const records *all)
{
  fputs("{\"version\":", out);
  cli_json_string(out, esmm_version_str());
  fputs(",\"fields\":[", out);
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    fputs(i ? "," : "", out);
    cli_json_string(out, fields[i]);
  }
  fputs("],\"records\":[", out);
  for (int i = 0; i < all->count; i++) {
    fputs(i ? ",\n" : "\n", out);
    write_record(out, &all->list[i]);
  }
  fputs("]}", out);
}

/* JSON has these three characters in its strings only. */
static void write_for_script(FILE *out, const char *json)
{
  for (; *json; json++)
    if (*json == '<' || *json == '>' || *json == '&')
      fprintf(out, "\\u%04x", (unsigned)*json);
    else
      fputc(*json, out);
}

static int write_page(FILE *out, const records *all)
{
  const char *const at = strstr(esmm_page, mark), *const rest = at + sizeof mark - 1;
  char *json = NULL;
  size_t bytes = 0;
  FILE *memory = open_memstream(&json, &bytes);
  if (!memory)
    return cli_failed("out of memory");
  write_data(memory, all);
  const bool good = fclose(memory) == 0;
  if (good) {
    fwrite(esmm_page, 1, (size_t)(at - esmm_page), out);
    write_for_script(out, json);
    fwrite(rest, 1, (size_t)(esmm_page_end - rest), out);
  }
  free(json);
  return good ? CLI_GO : cli_failed("out of memory");
}

static int report(const char *path, const records *all)
{
  cli_output out;
  int measurements = 0, problems = 0;
  for (int i = 0; i < all->count; i++) {
    measurements += all->list[i].count;
    problems += all->list[i].problem_count + all->list[i].left_out;
  }
  if (measurements == 0)
    return cli_failed("there is no measurement in %s: no page is written",
                      all->count == 1 ? all->list[0].path : "these records");
  for (int i = 0; i < all->count; i++) {
    const int spared = cli_output_spares("--out", path, "a record", all->list[i].path);
    if (spared != CLI_GO)
      return spared;
  }
  int status = cli_output_open(&out, "--out", path);
  if (status != CLI_GO)
    return status;
  status = write_page(out.file, all);
  if (status == CLI_GO)
    status = cli_output_close(&out, "--out");
  cli_output_discard(&out);
  if (status != CLI_GO)
    return status;
  if (strcmp(path, "-") != 0)
    printf("%s: %s of %s%s\n", path, cli_count(measurements, "measurement"), cli_count(all->count, "record"),
           problems ? ", without what is wrong" : "");
  return CLI_OK;
}

int cmd_report(int argc, char **argv)
{
  enum { MOST = 64 };
  const char *out = "report.html", *words[MOST];
  int count = 0;
  const cli_option options[] = {
      {"out", CLI_STRING, &out, "FILE", "where the page goes (default report.html); '-' is stdout", 0, 0, NULL, NULL},
      {0}};
  const cli_parser parser = {
      .synopsis = "report DIR|FILE... [options]",
      .about =
          "Writes one HTML page of records, files that 'esmm bench --json' wrote or directories of them: tables that\n"
          "sort, a figure with the values of its points, and two records compared. It needs no network.",
      .options = options,
      .notes = "Lines that are wrong are named here and on the page, and the others are shown.\n"
               "\n"
               "Exit status: 0 the page is written; 1 nothing can be read, or there is no measurement; 2 wrong words.\n"
               "\n"
               "Example\n"
               "  esmm report bench/results --out report.html\n",
      .min_words = 1,
      .max_words = MOST,
      .words_are = "records, files or directories"};
  int status = cli_parse(&parser, argc, argv, words, &count);
  records all = {0};
  for (int i = 0; i < count && status == CLI_GO; i++)
    status = records_read(words[i], &all);
  if (status == CLI_GO)
    status = report(out, &all);
  records_free(&all);
  return status;
}
