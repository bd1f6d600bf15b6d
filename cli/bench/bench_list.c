/*
 * bench_list.c: esmm bench --list FILE: many products in one process, one a line.
 *
 * A line holds the words of the command's own options for shape, zeros and dtypes. The command line's options hold for
 * every line that does not override them. A driver and a dense library take longer to start than most products to
 * measure: here they start once. Every line gets new operands and weights; one that fails is named, and the others are
 * measured. Empty lines and comments (#) are left out.
 */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WORDS = 64 };

typedef struct lines {
  char **text; /* [count]: NULL for a line that is left out */
  int count, products;
} lines;

static void free_lines(lines *all)
{
  for (int i = 0; i < all->count; i++)
    free(all->text[i]);
  free(all->text);
}

static int read_lines(const char *path, lines *all)
{
  FILE *file = fopen(path, "r");
  char *text = NULL;
  size_t room = 0;
  *all = (lines){0};
  if (!file)
    return cli_failed("--list: %s: %s", path, strerror(errno));
  while (getline(&text, &room, file) >= 0) {
    const size_t first = strspn(text, " \t\r\n");
    all->text = cli_grow(all->text, (size_t)all->count + 1, sizeof *all->text);
    all->text[all->count++] = NULL;
    if (!text[first] || text[first] == '#')
      continue;
    all->text[all->count - 1] = text;
    all->products++;
    text = NULL;
    room = 0;
  }
  const bool bad = ferror(file);
  free(text);
  fclose(file);
  if (bad)
    return cli_failed("--list: %s cannot be read", path);
  return all->products ? CLI_GO : cli_failed("--list: %s has no product", path);
}

static int suite_lines(const bench_suite *suite, lines *all)
{
  char asked[32];
  const int count = bench_suite_products(suite);
  *all = (lines){.text = cli_alloc((size_t)count, sizeof *all->text)};
  for (; all->count < count; all->count++, all->products++) {
    all->text[all->count] = bench_suite_line(suite, all->count, asked, sizeof asked);
    if (!all->text[all->count])
      return cli_failed("out of memory");
  }
  return CLI_GO;
}

/* An option of the command that is not one of a product's. */
static bool is_of_the_command(const char *word)
{
  static const char *const names[] = {"-h",           "--help",       "--json",    "--csv",   "--list",     "--suite",
                                      "--sweep",      "--once",       "--switch",  "--calls", "--no-check", "--no-tune",
                                      "--skip-stats", "--extraction", "--prepare", "--plot",  "--energy",   "--price"};
  const size_t length = strcspn(word, "=");
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (strlen(names[i]) == length && strncmp(word, names[i], length) == 0)
      return true;
  return false;
}

/* The options of a line on top of those of the command line. text is cut into words, which the problem points to. */
static int parse_line(char *text, bench *b)
{
  cli_problem *problem = &b->problem;
  char command[] = "bench";
  char *argv[MOST_WORDS + 1] = {command}, *rest = NULL;
  const char *words[1];
  int argc = 1, count;
  const char *device = problem->machine.device;
  const int64_t threads = problem->machine.threads;
  for (char *word = strtok_r(text, " \t\r\n", &rest); word; word = strtok_r(NULL, " \t\r\n", &rest)) {
    if (argc == MOST_WORDS)
      return cli_usage("more than %d words", MOST_WORDS - 1);
    if (is_of_the_command(word))
      return cli_usage("%.40s: it is no option of a product: give it on the command line", word);
    argv[argc++] = word;
  }
  const cli_option options[] = {CLI_PROBLEM_OPTIONS(problem), BENCH_PRODUCT_OPTIONS(b), {0}};
  const cli_parser parser = {.options = options, .words_are = "no words beside its options"};
  const int status = cli_parse(&parser, argc, argv, words, &count);
  if (status == CLI_GO && (problem->machine.device != device || problem->machine.threads != threads))
    return cli_usage("%s: all lines have the same: give it on the command line",
                     problem->machine.device != device ? "--device" : "--threads");
  return status;
}

/* Two products of a suite that differ in the zeros of A alone, which come last in their lines. */
static bool differ_in_a(const char *x, const char *y)
{
  static const char option[] = " --density-a ";
  const char *at = x ? strstr(x, option) : NULL;
  const size_t length = at ? (size_t)(at - x) + strlen(option) : 0;
  return at && strncmp(x, y, length) == 0 && !x[length + strcspn(x + length, " ")] &&
         !y[length + strcspn(y + length, " ")];
}

/* data is that of the line before; in a suite it stays. again: only A is to be made anew. */
static int measure_line(bench *b, char *text, bool again, bench_data *data, bench_report *report)
{
  cli_problem *p = &b->problem;
  int status = parse_line(text, b);
  if (status == CLI_GO)
    status = bench_epilogue_parse(b->epilogue_words, &b->epilogue);
  if (status == CLI_GO)
    status = cli_problem_resolve(p, NAN);
  if (status == CLI_GO)
    status = cli_problem_spared(p, "--json", b->json);
  if (status == CLI_GO)
    status = cli_problem_spared(p, "--csv", b->csv);
  if (status != CLI_GO)
    return status;
  if (again && bench_data_fits(b, data))
    status = bench_data_next(b, data);
  else {
    bench_data_free(b, data);
    status = bench_data_make(b, data);
  }
  if (status == CLI_GO)
    status = bench_product(b, data, report);
  if (!b->suite) /* the next line's epilogue is not yet known: this one's is freed */
    bench_data_free(b, data);
  return status;
}

int bench_list(bench *b, bench_report *report)
{
  const cli_problem given = b->problem;
  const char *const given_epilogue = b->epilogue_words;
  const int64_t given_rows = b->given_rows;
  const bool given_peers = b->peers;
  lines all;
  bench_data data = {0};
  char subject[256], *before = NULL;
  bool made = false; /* data is whole */
  int done = 0, failed = 0, status = b->suite ? suite_lines(b->suite, &all) : read_lines(b->list, &all);
  b->total = 100 * all.products;
  for (int i = 0; i < all.count && status == CLI_GO; i++) {
    if (!all.text[i])
      continue;
    snprintf(subject, sizeof subject, "%.200s:%d", b->list, i + 1);
    cli_set_subject(subject);
    b->line = b->suite ? 0 : i + 1; /* as the record has it */
    if (b->suite)
      free(bench_suite_line(b->suite, i, b->asked, sizeof b->asked));
    b->done = 100 * done++;
    b->problem = given;
    b->epilogue_words = given_epilogue;
    b->given_rows = given_rows;
    b->peers = given_peers;
    const bool again = b->suite && made && differ_in_a(before, all.text[i]);
    free(before);
    before = strdup(all.text[i]); /* parsing takes the text apart */
    made = measure_line(b, all.text[i], again, &data, report) == CLI_GO;
    failed += !made;
  }
  free(before);
  bench_data_free(b, &data);
  cli_set_subject("");
  b->problem = given;
  b->line = 0;
  free_lines(&all);
  if (status == CLI_GO && failed) {
    report->failed = failed;
    cli_note("%s: %d of %d products failed", b->suite ? b->list : "--list", failed, done);
  }
  return status;
}
