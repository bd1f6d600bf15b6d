/*
 * cmd_compare.c: esmm compare OLD NEW: what became faster or slower, beyond the noise.
 *
 * A median alone moves with the machine's other work. So a change counts only where the median and the fastest call
 * both moved by more than the noise that is allowed, and by more than the dense library did in the same runs.
 */
#include "record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CLI_SLOWER = 3 }; /* the exit status where something became slower */

typedef struct change {
  const record_line *old, *new;
  double ratio; /* of times, new over old, less what the dense library's did: over 1 is slower */
} change;

static double at_least_one(double x)
{
  return x > 1 ? x : 1; /* also for NAN */
}

/* 1 where the noise explains it. */
static double change_of(const record_line *old, const record_line *new, double noise)
{
  const double median = new->ms / old->ms, least = new->least / old->least;
  const double library = new->baseline_ms / old->baseline_ms;
  const double slower = fmin(median, isfinite(least) ? least : median) / at_least_one(library);
  const double faster = fmin(1 / median, isfinite(least) ? 1 / least : 1 / median) / at_least_one(1 / library);
  return slower > 1 + noise ? slower : faster > 1 + noise ? 1 / faster : 1;
}

static int compare_lines(const void *x, const void *y)
{
  return strcmp((*(const record_line *const *)x)->key, (*(const record_line *const *)y)->key);
}

static int compare_changes(const void *x, const void *y)
{
  const double a = ((const change *)x)->ratio, b = ((const change *)y)->ratio;
  return a < b ? 1 : a > b ? -1 : 0;
}

static const record_line **sorted(const records *all, int *count)
{
  *count = 0;
  for (int i = 0; i < all->count; i++)
    *count += all->list[i].count;
  const record_line **lines = cli_alloc((size_t)*count + 1, sizeof *lines);
  int at = 0;
  for (int i = 0; i < all->count; i++)
    for (int j = 0; j < all->list[i].count; j++)
      lines[at++] = &all->list[i].lines[j];
  qsort(lines, (size_t)*count, sizeof *lines, compare_lines);
  return lines;
}

static void add_row(cli_table *table, const change *c)
{
  const record_line *l = c->new;
  cli_table_cell(table, CLI_PLAIN, "%s%s%s", l->suite, l->suite[0] && l->asked[0] ? " " : "", l->asked);
  cli_table_cell(table, CLI_PLAIN, "%.0f x %.0f x %.0f %s", l->m, l->k, l->n, l->dtype);
  if (strcmp(c->old->kernel, l->kernel) == 0)
    cli_table_cell(table, CLI_PLAIN, "%s", l->kernel);
  else
    cli_table_cell(table, CLI_WARN, "%s, was %s", l->kernel, c->old->kernel);
  cli_table_cell(table, CLI_PLAIN, "%s", cli_number(c->old->ms, 4));
  cli_table_cell(table, CLI_PLAIN, "%s", cli_number(l->ms, 4));
  const bool slower = c->ratio > 1;
  cli_table_cell(table, slower ? CLI_BAD : CLI_GOOD, "%s %.2fx", slower ? "slower" : "faster",
                 slower ? c->ratio : 1 / c->ratio);
}

static int print_changes(const records *old, const records *new, double noise)
{
  static const char *const heads[] = {"measurement", "product", "kernel", "old ms", "new ms", "change"};
  int old_count, new_count, both = 0, changes = 0, slower = 0;
  const record_line **olds = sorted(old, &old_count), **news = sorted(new, &new_count);
  change *list = cli_alloc((size_t)new_count + 1, sizeof *list);
  for (int i = 0, j = 0; i < old_count && j < new_count;) {
    const int order = strcmp(olds[i]->key, news[j]->key);
    if (order == 0) {
      const double ratio = change_of(olds[i], news[j], noise);
      if (ratio != 1)
        list[changes++] = (change){olds[i], news[j], ratio};
      slower += ratio > 1;
      both++;
    }
    i += order <= 0;
    j += order >= 0;
  }
  qsort(list, (size_t)changes, sizeof *list, compare_changes);
  cli_table *table = cli_table_new("lllrrr", heads);
  for (int i = 0; i < changes; i++)
    add_row(table, &list[i]);
  if (changes > 0) {
    cli_table_print(table, stdout);
    fputc('\n', stdout);
  }
  printf("%s in both: %d slower, %d faster, %d within %s.\n", cli_count(both, "measurement"), slower, changes - slower,
         both - changes, cli_percent(noise));
  if (old_count > both || new_count > both)
    printf("Only in the old: %d. Only in the new: %d.\n", old_count - both, new_count - both);
  cli_table_free(table);
  free(list);
  free(olds);
  free(news);
  if (both == 0)
    return cli_failed("nothing was measured in both: they are of other products, devices or threads");
  return slower > 0 ? CLI_SLOWER : CLI_OK;
}

int cmd_compare(int argc, char **argv)
{
  double noise = 0.05;
  const char *words[2];
  int count;
  const cli_option options[] = {
      {"noise", CLI_DENSITY, &noise, "D", "changes up to this do not count (default 5%)", 0, 0, NULL, NULL}, {0}};
  const cli_parser parser = {
      .synopsis = "compare OLD NEW [options]",
      .about = "Says what became faster or slower between two records: files that 'esmm bench --json' or\n"
               "'esmm bench --suite' wrote, or directories of them.",
      .options = options,
      .notes =
          "What counts\n"
          "  Measurements are the same where what was asked for is: suite, product, dtype, zeros, device, threads,\n"
          "  kernel or auto. A change counts where the median and the fastest call both moved by more than the noise,\n"
          "  and by more than the dense library did in the same runs.\n"
          "\n"
          "Exit status: 0 nothing is slower; 3 something is; 1 a record cannot be read, or they have nothing in "
          "common;\n"
          "2 wrong words.\n"
          "\n"
          "Example\n"
          "  esmm bench --suite decode --json new.jsonl; esmm compare old.jsonl new.jsonl\n",
      .min_words = 2,
      .max_words = 2,
      .words_are = "two records"};
  int status = cli_parse(&parser, argc, argv, words, &count);
  if (status != CLI_GO)
    return status;
  records old = {0}, new = {0};
  status = records_read(words[0], &old);
  if (status == CLI_GO)
    status = records_read(words[1], &new);
  if (status == CLI_GO)
    status = print_changes(&old, &new, noise);
  records_free(&old);
  records_free(&new);
  return status;
}
