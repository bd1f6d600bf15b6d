/*
 * record.c: reading records.
 *
 * A record may come from anywhere: another version, a full disk, an editor. Each line is accepted or refused by
 * itself, and a refusal names its line.
 */
#include "record.h"

#include "../../io/file.h"

#include <errno.h>
#include <ftw.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#if ESMM_JANSSON
#include <jansson.h>

enum { MOST_LINES = 200000, MOST_BYTES = 1 << 28 };

static char *copy(const char *text)
{
  return strcpy(cli_alloc(strlen(text) + 1, 1), text);
}

static void __attribute__((format(printf, 3, 4))) problem(record *r, int line, const char *format, ...)
{
  char text[512], shown[600], place[32] = "";
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (line > 0)
    snprintf(place, sizeof place, "%d: ", line);
  if (r->problem_count == RECORD_PROBLEMS) {
    r->left_out++;
    return;
  }
  snprintf(shown, sizeof shown, "%s%s", place, text);
  r->problems[r->problem_count++] = copy(shown);
  cli_note("%s:%s%s", r->path, line > 0 ? "" : " ", shown);
}

static char *text_of(const json_t *line, const char *name)
{
  const json_t *value = json_object_get(line, name);
  char number[64];
  if (json_is_string(value))
    return copy(json_string_value(value));
  if (!json_is_number(value))
    return copy("");
  snprintf(number, sizeof number, "%.9g", json_number_value(value));
  return copy(number);
}

static double number_of(const json_t *line, const char *name)
{
  const json_t *value = json_object_get(line, name);
  return json_is_number(value) ? json_number_value(value) : NAN;
}

/* What was asked for, not what came of it: auto may have chosen another kernel since. */
static char *key_of(const json_t *line)
{
  static const char *const names[] = {
      "suite",     "asked", "device",          "threads",         "line",   "m",        "n",     "k",        "dtype",
      "generator", "seed",  "asked_density_a", "asked_density_b", "format", "epilogue", "given", "requested"};
  char *key = NULL;
  size_t bytes = 0;
  FILE *out = open_memstream(&key, &bytes);
  if (!out)
    return copy("");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char *text = text_of(line, names[i]);
    fprintf(out, "%s\037", text);
    free(text);
  }
  fclose(out);
  return key;
}

/* A peer that could not run beside the others, or had no time left, has a line with the reason (bench/peers/run.py). */
static bool is_failed_peer(const json_t *line, const char *outcome)
{
  char *suite = text_of(line, "suite");
  const bool is = strcmp(outcome, "failed") == 0 && (strcmp(suite, "peers16") == 0 || strcmp(suite, "sizes16") == 0);
  free(suite);
  return is;
}

static void take_line(record *r, int number, const json_t *line)
{
  static const char *const needed[] = {"m", "n", "k"};
  const bool host = json_object_get(line, "host_ns") != NULL;
  if (!host && !json_object_get(line, "ms")) {
    r->others++;
    return;
  }
  const double ms = host ? 1e-6 * number_of(line, "host_ns") : number_of(line, "ms");
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    if (!(number_of(line, needed[i]) > 0)) {
      problem(r, number, "field '%s' is not there, or no size", needed[i]);
      return;
    }
  if (!json_is_string(json_object_get(line, "kernel"))) {
    problem(r, number, "field 'kernel' is not there, or no name");
    return;
  }
  char *outcome = text_of(line, "outcome");
  if (!(ms > 0) && strcmp(outcome, "unsupported") != 0 && !is_failed_peer(line, outcome))
    problem(r, number, "field '%s' is no time", host ? "host_ns" : "ms");
  if (!(ms > 0) || !isfinite(ms)) {
    free(outcome);
    return;
  }
  if (r->count % 256 == 0)
    r->lines = cli_grow(r->lines, (size_t)r->count + 256, sizeof *r->lines);
  r->lines[r->count++] =
      (record_line){.key = key_of(line),
                    .suite = text_of(line, "suite"),
                    .asked = text_of(line, "asked"),
                    .device = text_of(line, "device_name"),
                    .dtype = text_of(line, "dtype"),
                    .generator = text_of(line, "generator"),
                    .format = text_of(line, "format"),
                    .kernel = text_of(line, "kernel"),
                    .requested = text_of(line, "requested"),
                    .baseline = text_of(line, "baseline"),
                    .outcome = outcome,
                    .m = number_of(line, "m"),
                    .n = number_of(line, "n"),
                    .k = number_of(line, "k"),
                    .threads = number_of(line, "threads"),
                    .density_a = number_of(line, "density_a"),
                    .density_b = number_of(line, "density_b"),
                    .ms = ms,
                    .least = host ? 1e-6 * number_of(line, "host_ns_min") : number_of(line, "ms_min"),
                    .p95 = number_of(line, "ms_p95"),
                    .baseline_ms = number_of(line, "ms_baseline"),
                    .speedup = number_of(line, "speedup"),
                    .rel_err = number_of(line, "rel_err")};
}

static void take_about(record *r, int number, const json_t *line)
{
  char *version = text_of(line, "version");
  if (version[0] && strcmp(version, esmm_version_str()) != 0 && strcmp(version, r->version) != 0)
    problem(r, number, "is of version %.40s, and this is %s: what its fields mean may have changed", version,
            esmm_version_str());
  if (version[0]) {
    free(r->version);
    r->version = version;
  } else
    free(version);
  char **const fields[] = {&r->date, &r->source_id};
  static const char *const names[] = {"date", "source_id"};
  for (int i = 0; i < 2; i++) {
    char *text = text_of(line, names[i]);
    if (text[0] && !(*fields[i])[0]) {
      free(*fields[i]);
      *fields[i] = text;
    } else
      free(text);
  }
}

static int read_record(const char *path, record *r)
{
  struct stat info;
  char *text = NULL;
  size_t room = 0;
  int number = 0;
  *r = (record){.path = copy(path), .date = copy(""), .version = copy(""), .source_id = copy("")};
  FILE *file = fopen(path, "r");
  if (!file)
    return cli_failed("%s: cannot be opened: %s", path, strerror(errno));
  if (fstat(fileno(file), &info) == 0 && (!S_ISREG(info.st_mode) || info.st_size > MOST_BYTES)) {
    fclose(file);
    return cli_failed("%s: is no record: %s", path,
                      S_ISDIR(info.st_mode)   ? "a directory"
                      : S_ISREG(info.st_mode) ? "more than 256 MiB"
                                              : "no file");
  }
  ssize_t length;
  while ((length = getline(&text, &room, file)) >= 0 && number < MOST_LINES) {
    json_error_t where;
    number++;
    if (strspn(text, " \t\r\n") == (size_t)length)
      continue;
    json_t *line = json_loadb(text, (size_t)length, JSON_REJECT_DUPLICATES, &where);
    if (!line)
      problem(r, number, "is no JSON: %.200s", where.text);
    else if (!json_is_object(line))
      problem(r, number, "is no JSON object");
    else {
      take_about(r, number, line);
      take_line(r, number, line);
    }
    json_decref(line);
  }
  if (length >= 0)
    problem(r, number + 1, "and what follows is not read: a record has %d lines at most", MOST_LINES);
  const bool bad = ferror(file);
  free(text);
  fclose(file);
  if (bad)
    return cli_failed("%s: cannot be read", path);
  if (r->left_out > 0)
    cli_note("%s: %d more lines are wrong", path, r->left_out);
  return CLI_GO;
}

/* ---- directories ---- */

typedef struct names {
  char **list;
  int count;
} names;

static names *found; /* nftw has no argument for its caller */

static int visit(const char *path, const struct stat *info, int type, struct FTW *level)
{
  const size_t length = strlen(path);
  (void)info;
  (void)level;
  if (type != FTW_F || length < 6 || strcmp(path + length - 6, ".jsonl") != 0)
    return 0;
  found->list = cli_grow(found->list, (size_t)found->count + 1, sizeof *found->list);
  found->list[found->count++] = copy(path);
  return 0;
}

static int compare_names(const void *x, const void *y)
{
  return strcmp(*(char *const *)x, *(char *const *)y);
}

static int add(const char *path, records *out)
{
  out->list = cli_grow(out->list, (size_t)out->count + 1, sizeof *out->list);
  return read_record(path, &out->list[out->count++]);
}

int records_read(const char *path, records *out)
{
  struct stat info;
  if (stat(path, &info) != 0)
    return cli_failed("%s: cannot be opened: %s", path, strerror(errno));
  if (!S_ISDIR(info.st_mode))
    return add(path, out);
  names files = {0};
  found = &files;
  int status = nftw(path, visit, 32, FTW_PHYS) == 0 ? CLI_GO : cli_failed("%s: cannot be walked through", path);
  if (status == CLI_GO && files.count == 0)
    status = cli_failed("%s: no .jsonl file, as 'esmm bench --json' writes them, is in this directory", path);
  qsort(files.list, (size_t)files.count, sizeof *files.list, compare_names);
  for (int i = 0; i < files.count; i++) {
    if (status == CLI_GO)
      status = add(files.list[i], out);
    free(files.list[i]);
  }
  free(files.list);
  return status;
}

#else

int records_read(const char *path, records *out)
{
  (void)out;
  return cli_failed("%s: this build has no jansson, which reads records: install libjansson-dev and build again", path);
}

#endif

static void free_line(record_line *l)
{
  char *const texts[] = {l->key,    l->suite,  l->asked,     l->device,   l->dtype,  l->generator,
                         l->format, l->kernel, l->requested, l->baseline, l->outcome};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
    free(texts[i]);
}

void records_free(records *all)
{
  for (int i = 0; i < all->count; i++) {
    record *r = &all->list[i];
    for (int j = 0; j < r->count; j++)
      free_line(&r->lines[j]);
    for (int j = 0; j < r->problem_count; j++)
      free(r->problems[j]);
    free(r->lines);
    free(r->path);
    free(r->date);
    free(r->version);
    free(r->source_id);
  }
  free(all->list);
  *all = (records){0};
}
