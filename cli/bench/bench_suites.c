/*
 * bench_suites.c: the suites of the record by name, for `esmm bench --suite`, so that other machines can be compared
 * with the record. This is their only definition: bench/record.sh and bench/gpu_record.sh name them too, beside the
 * measurements that only those make.
 *
 * A line of a suite has the options of products, with lists in braces: one product for each choice, the last list
 * fastest. What is chosen of the last list is the field "asked" of the record, unless the suite has one for all.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

struct bench_suite {
  const char *name, *about, *lines;
  const char *asked; /* NULL: what is chosen of the last list */
  bool gpu;
};

static const bench_suite suites[] = {
    {"blockwise", "strips of 32 in A and B", "--size {512,1024,2048} --blockwise --density {1,.75,.5,.25,.125}\n", NULL,
     false},
    {"unstructured", "zeros anywhere in A", "--size 2048 --random --density-b 1 --density-a {.1,.05}\n", NULL, false},
    {"decode", "1, 4 and 16 rows", "--dims={1,4,16}x4096x4096 --random --density-b 1 --density-a {1,.5,.1}\n", NULL,
     false},
    {"activations", "as of a trained net, by presets", "--dims 2048 3072 768 --activations={early,middle,late}\n", NULL,
     false},
    {"blockwise", "fp32, strips of 32 in A and B", "--size 4096 --blockwise --density {1,.75,.5,.25,.125}\n", NULL,
     true},
    {"dense16", "bf16 without zeros",
     "--dtype bf16 --dense "
     "--dims={4096x4096x4096,8192x8192x8192,4096x14336x4096,4096x4096x14336,1024x14336x4096,128x14336x4096}\n",
     "1", true},
    {"strips16", "A sparse by strips of 128",
     "--dtype bf16 --dims={4096x14336x4096,8192x8192x8192} --blockwise --strip 128 --density-b 1 "
     "--density-a {1,0.75,0.5,0.25,0.125}\n",
     NULL, true},
    {"joint16", "A and B sparse by strips of 128",
     "--dtype bf16 --dims={4096x14336x4096,8192x8192x8192} --blockwise --strip 128 --density {0.5,0.25}\n", NULL, true},
    {"random16", "zeros anywhere",
     "--dtype bf16 --dims={16,256,4096}x4096x14336 --random --density-b 1 --density-a {0.5,0.1}\n", NULL, true},
    {"decode16", "1, 4 and 16 rows",
     "--dtype bf16 --dims=1x14336x4096 --random --density-b 1 --density-a {1,0.5,0.1,0.05}\n"
     "--dtype bf16 --dims={4,16}x14336x4096 --activations={early,middle,late}\n"
     "--dtype bf16 --dims=1x4096x14336 --random --density-b 1 --density-a {1,0.5,0.1,0.05}\n"
     "--dtype bf16 --dims={4,16}x4096x14336 --activations={early,middle,late}\n",
     NULL, true},
    {"bsr16", "B in blocks",
     "--dtype bf16 --size 8192 --format bsr:128 --density-b {0.5,0.22,0.125}\n"
     "--dtype bf16 --size 8192 --format bsr:128 --peers --density-b {0.05}\n"
     "--dtype bf16 --size 8192 --format bsr:64 --density-b {0.5,0.22,0.125,0.05}\n"
     "--dtype bf16 --size 8192 --format bsr:32 --density-b {0.5,0.22}\n"
     "--dtype bf16 --size 8192 --format bsr:32 --peers --density-b {0.125}\n"
     "--dtype bf16 --size 8192 --format bsr:32 --density-b {0.05}\n"
     "--dtype bf16 --dims 4096 14336 4096 --format bsr:128 --density-b {0.5,0.22,0.125,0.05}\n"
     "--dtype bf16 --size 4096 --format bsr:128 --peers --density-b {0.22}\n"
     "--dtype bf16 --size 16384 --format bsr:128 --density-b {0.22}\n"
     "--dtype bf16 --size 8192 --format bsr:128 --blockwise --strip 128 --density-a .5 --density-b {0.5,0.22}\n"
     "--dtype bf16 --dims={1,16}x4096x14336 --format bsr:64 --density-b {0.5,0.1}\n",
     NULL, true},
    {"nm24", "B of 2:4, from 1 row to 8192",
     "--dtype bf16 --format nm:2:4 --density-a 1 --peers --dims={4096x4096x4096,8192x8192x8192,4096x14336x4096}\n"
     "--dtype bf16 --format nm:2:4 --density-a 1 --peers "
     "--dims={1,2,4,8,16,32,64,128,256,512,1024,2048,8192}x4096x14336\n",
     "0.5", true},
};

enum { SUITES = sizeof suites / sizeof *suites };

/* One line with its lists; which: the product's number. Returns how many products it stands for; out may be NULL. */
static int expand(const char *line, size_t length, int which, FILE *out, char *asked, size_t asked_bytes)
{
  int total = 1, left;
  for (size_t i = 0; i < length; i++)
    if (line[i] == '{') {
      int choices = 1;
      for (; line[i] != '}'; i++)
        choices += line[i] == ',';
      total *= choices;
    }
  if (!out)
    return total;
  left = total;
  for (size_t i = 0; i < length; i++) {
    if (line[i] != '{') {
      fputc(line[i], out);
      continue;
    }
    const char *list = line + i + 1;
    const size_t end = strcspn(list, "}");
    int choices = 1, at = 0;
    for (size_t j = 0; j < end; j++)
      choices += list[j] == ',';
    left /= choices;
    const int chosen = which / left % choices;
    for (; at < chosen; list++)
      at += *list == ',';
    const size_t bytes = strcspn(list, ",}");
    fwrite(list, 1, bytes, out);
    snprintf(asked, asked_bytes, "%.*s", (int)bytes, list);
    i += end + 1;
  }
  return total;
}

int bench_suite_products(const bench_suite *suite)
{
  int count = 0;
  for (const char *line = suite->lines; *line; line += strcspn(line, "\n") + 1)
    count += expand(line, strcspn(line, "\n"), 0, NULL, NULL, 0);
  return count;
}

char *bench_suite_line(const bench_suite *suite, int product, char *asked, size_t asked_bytes)
{
  char *text = NULL;
  size_t bytes = 0;
  asked[0] = '\0';
  for (const char *line = suite->lines; *line; line += strcspn(line, "\n") + 1) {
    const size_t length = strcspn(line, "\n");
    const int count = expand(line, length, 0, NULL, NULL, 0);
    if (product >= count) {
      product -= count;
      continue;
    }
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
      return NULL;
    (void)expand(line, length, product, out, asked, asked_bytes);
    fclose(out);
    if (suite->asked)
      snprintf(asked, asked_bytes, "%s", suite->asked);
    return text;
  }
  return NULL;
}

const char *bench_suite_name(const bench_suite *suite)
{
  return suite->name;
}

int bench_suite_find(const char *name, bool gpu, const bench_suite **out)
{
  const char *names[SUITES];
  const char *other = NULL;
  int count = 0;
  for (int i = 0; i < SUITES; i++) {
    if (suites[i].gpu == gpu)
      names[count++] = suites[i].name;
    if (strcmp(suites[i].name, name) != 0)
      continue;
    if (suites[i].gpu == gpu) {
      *out = &suites[i];
      return CLI_GO;
    }
    other = gpu ? "a CPU: give --device cpu" : "a GPU: give --device cuda";
  }
  if (other)
    return cli_usage("--suite: %s is of %s", name, other);
  const char *near = cli_closest(name, names, count);
  return cli_usage("--suite: there is no %s; %s%s ('--suite list' lists them)", name,
                   near ? "did you mean " : "see the list", near ? near : "");
}

int bench_suites_print(void)
{
  static const char *const heads[] = {"suite", "device", "products", "what it measures"};
  cli_table *table = cli_table_new("llrl", heads);
  for (int i = 0; i < SUITES; i++) {
    cli_table_cell(table, CLI_PLAIN, "%s", suites[i].name);
    cli_table_cell(table, CLI_PLAIN, "%s", suites[i].gpu ? "cuda" : "cpu");
    cli_table_cell(table, CLI_PLAIN, "%d", bench_suite_products(&suites[i]));
    cli_table_cell(table, CLI_PLAIN, "%s", suites[i].about);
  }
  cli_table_print(table, stdout);
  cli_table_free(table);
  return CLI_OK;
}
