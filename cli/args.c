/*
 * args.c: errors, options and the numbers in them.
 *
 * The parser guesses nothing: a word that no table knows is an error, and so is a number with a letter behind it.
 * strtol and strtod alone would accept " 12", "0x10", "nan" and "12x"; every number passes through the checks here
 * instead.
 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors ---- */

static const char *command_name = "", *subject = "";

void cli_set_command(const char *name)
{
  command_name = name;
}

void cli_set_subject(const char *name)
{
  subject = name;
}

static void __attribute__((format(printf, 1, 0))) say(const char *format, va_list list)
{
  char text[2048], shown[sizeof text]; /* control characters of a file name must not reach the terminal */
  const int used = snprintf(text, sizeof text / 2, "%s%s", subject, subject[0] ? ": " : "");
  const size_t at = (size_t)used < sizeof text / 2 ? (size_t)used : sizeof text / 2 - 1;
  vsnprintf(text + at, sizeof text - at, format, list);
  (void)io_show(text, shown, sizeof shown);
  fflush(stdout);
  if (command_name[0])
    fprintf(stderr, "esmm: %s: %s\n", command_name, shown);
  else
    fprintf(stderr, "esmm: %s\n", shown);
}

int cli_usage(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  say(format, list);
  va_end(list);
  return CLI_USAGE;
}

int cli_failed(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  say(format, list);
  va_end(list);
  return CLI_FAILED;
}

void cli_note(const char *format, ...)
{
  va_list list;
  va_start(list, format);
  say(format, list);
  va_end(list);
}

int cli_status(const esmm_ctx *ctx, const char *what, esmm_status status)
{
  static const char call[] = "esmm_prune makes"; /* a user of the command has another way */
  const char *error = ctx ? esmm_ctx_error(ctx) : "", *text = error[0] ? error : esmm_status_str(status);
  const char *at = strstr(text, call);
  return at ? cli_failed("%s: %.*s'esmm prune' makes%s", what, (int)(at - text), text, at + strlen(call))
            : cli_failed("%s: %s", what, text);
}

void *cli_alloc(size_t count, size_t size)
{
  return cli_grow(NULL, count, size);
}

void *cli_grow(void *ptr, size_t count, size_t size)
{
  size_t bytes;
  bool fits = !__builtin_mul_overflow(count ? count : 1, size, &bytes);
  void *grown = !fits ? NULL : ptr ? realloc(ptr, bytes) : calloc(1, bytes);
  if (!grown) {
    cli_failed("out of memory");
    exit(CLI_FAILED);
  }
  return grown;
}

/* ---- numbers ---- */

int cli_parse_int(const char *what, const char *text, int64_t min, int64_t max, int64_t *out)
{
  const char *digits = text[0] == '-' ? text + 1 : text;
  if (!digits[0] || digits[strspn(digits, "0123456789")])
    return cli_usage("%s: %s is not a whole number", what, text[0] ? text : "''");
  errno = 0;
  long long x = strtoll(text, NULL, 10);
  if (errno == ERANGE || x < min || x > max)
    return cli_usage("%s: %s is out of range, %lld to %lld", what, text, (long long)min, (long long)max);
  *out = x;
  return CLI_GO;
}

static bool parse_plain_double(const char *text, double *out)
{
  if (!text[0] || text[strspn(text, "0123456789.eE+-")])
    return false;
  char *end;
  *out = strtod(text, &end);
  return end != text && !*end && isfinite(*out);
}

int cli_parse_double(const char *what, const char *text, double min, double max, double *out)
{
  double x;
  if (!parse_plain_double(text, &x))
    return cli_usage("%s: %s is not a number", what, text[0] ? text : "''");
  if (!(x >= min && x <= max))
    return cli_usage("%s: %s is out of range, %g to %g", what, text, min, max);
  *out = x;
  return CLI_GO;
}

int cli_parse_density(const char *what, const char *text, double *out)
{
  char plain[64];
  size_t length = strlen(text);
  bool percent = length && text[length - 1] == '%';
  double x = 0;
  if (percent)
    length--;
  bool good = length < sizeof plain;
  if (good) {
    memcpy(plain, text, length);
    plain[length] = 0;
    good = parse_plain_double(plain, &x);
  }
  if (!good)
    return cli_usage("%s: %s is not a share", what, text[0] ? text : "''");
  if (percent)
    x /= 100;
  if (!(x >= 0 && x <= 1))
    return cli_usage("%s: %s is out of range, 0 to 1 (or 0%% to 100%%)", what, text);
  *out = x;
  return CLI_GO;
}

int cli_parse_densities(const char *what, const char *text, double *out, int room, int *count)
{
  *count = 0;
  for (const char *at = text;;) {
    size_t length = strcspn(at, ",");
    char item[64];
    if (length == 0 || length >= sizeof item)
      return cli_usage("%s: %s is not a comma list of shares", what, text[0] ? text : "''");
    memcpy(item, at, length);
    item[length] = 0;
    if (*count == room)
      return cli_usage("%s: more than %d values", what, room);
    int status = cli_parse_density(what, item, &out[*count]);
    if (status != CLI_GO)
      return status;
    ++*count;
    if (!at[length])
      return CLI_GO;
    at += length + 1;
  }
}

/* ---- suggestions ---- */

enum { WORD_MAX = 64 };

/* Edit distance with swaps of neighbours, the commonest slip of the fingers. */
static int edit_distance(const char *a, const char *b)
{
  int rows[3][WORD_MAX + 1];
  int length_a = (int)strlen(a), length_b = (int)strlen(b);
  for (int j = 0; j <= length_b; j++)
    rows[0][j] = j;
  for (int i = 1; i <= length_a; i++) {
    int *now = rows[i % 3], *last = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
    now[0] = i;
    for (int j = 1; j <= length_b; j++) {
      int best = last[j - 1] + (a[i - 1] != b[j - 1]);
      best = last[j] + 1 < best ? last[j] + 1 : best;
      best = now[j - 1] + 1 < best ? now[j - 1] + 1 : best;
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
        best = before[j - 2] + 1;
      now[j] = best;
    }
  }
  return rows[length_a % 3][length_b];
}

const char *cli_closest(const char *word, const char *const *candidates, int count)
{
  size_t length = strlen(word);
  if (length == 0 || length > WORD_MAX)
    return NULL;
  int limit = length < 3 ? 1 : length < 6 ? 2 : (int)length / 3 + 1;
  const char *best = NULL;
  for (int i = 0; i < count; i++) {
    if (!candidates[i] || strlen(candidates[i]) > WORD_MAX)
      continue;
    if (length >= 3 && strncmp(candidates[i], word, length) == 0)
      return candidates[i];
    int distance = edit_distance(word, candidates[i]);
    if (distance <= limit && distance < (int)length) {
      best = candidates[i];
      limit = distance - 1;
    }
  }
  return best;
}

/* ---- options ---- */

static bool is_end(const cli_option *option)
{
  return option->kind == CLI_FLAG && !option->name;
}

static int unknown_option(const cli_parser *parser, const char *word, size_t length)
{
  const char *names[128] = {"help"};
  int count = 1;
  for (const cli_option *o = parser->options; !is_end(o) && count < 128; o++)
    if (o->name)
      names[count++] = o->name;
  char name[WORD_MAX + 1] = "";
  size_t dashes = strspn(word, "-");
  if (dashes < length && length - dashes <= WORD_MAX)
    memcpy(name, word + dashes, length - dashes);
  const char *near = cli_closest(name, names, count);
  if (near)
    return cli_usage("%.*s: unknown option; did you mean --%s?", (int)length, word, near);
  return cli_usage("%.*s: unknown option", (int)length, word);
}

/* The place of text in "any|decode|large-m", or -1. */
static int choice_index(const char *choices, const char *text)
{
  int index = 0;
  for (const char *at = choices;; index++) {
    size_t length = strcspn(at, "|");
    if (strlen(text) == length && strncmp(at, text, length) == 0)
      return index;
    if (!at[length])
      return -1;
    at += length + 1;
  }
}

static int parse_choice(const cli_option *option, const char *what, const char *text)
{
  int index = choice_index(option->choices, text);
  if (index >= 0) {
    *(int *)option->target = index;
    return CLI_GO;
  }
  return cli_usage("%s: %s is none of %s", what, text[0] ? text : "''", option->choices);
}

static int parse_dtype(const cli_option *option, const char *what, const char *text)
{
  char names[128] = "";
  size_t used = 0;
  for (int i = 0; esmm_dtype_size((esmm_dtype)i) > 0; i++) {
    const char *name = esmm_dtype_str((esmm_dtype)i);
    if (strcmp(text, name) == 0) {
      *(int *)option->target = i;
      return CLI_GO;
    }
    if (used < sizeof names)
      used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? "|" : "", name);
  }
  return cli_usage("%s: %s is none of %s", what, text[0] ? text : "''", names);
}

static void whole_limits(const cli_option *option, int64_t *min, int64_t *max)
{
  *min = (int64_t)option->min;
  *max = option->min == 0 && option->max == 0 ? INT64_MAX : (int64_t)option->max;
}

/* "MxKxN" in one word. */
static int parse_joined_dims(const cli_option *option, const char *what, const char *text)
{
  int64_t dims[3], min, max;
  whole_limits(option, &min, &max);
  const char *at = text;
  for (int i = 0; i < 3; i++) {
    size_t length = strcspn(at, "x");
    char item[32];
    if (length >= sizeof item || (at[length] == 'x') != (i < 2))
      return cli_usage("%s: %s is not three whole numbers", what, text[0] ? text : "''");
    memcpy(item, at, length);
    item[length] = 0;
    int status = cli_parse_int(what, item, min, max, &dims[i]);
    if (status != CLI_GO)
      return status;
    at += length + 1;
  }
  memcpy(option->target, dims, sizeof dims);
  return CLI_GO;
}

static int parse_seed(const char *what, const char *text, uint64_t *out)
{
  if (!text[0] || text[strspn(text, "0123456789")])
    return cli_usage("%s: %s is not a whole number from 0 up", what, text[0] ? text : "''");
  errno = 0;
  unsigned long long x = strtoull(text, NULL, 10);
  if (errno == ERANGE)
    return cli_usage("%s: %s is out of range, 0 to %llu", what, text, (unsigned long long)UINT64_MAX);
  *out = x;
  return CLI_GO;
}

static int parse_value(const cli_option *option, const char *what, const char *text)
{
  int64_t min, max;
  switch (option->kind) {
  case CLI_INT:
    whole_limits(option, &min, &max);
    return cli_parse_int(what, text, min, max, option->target);
  case CLI_SEED:
    return parse_seed(what, text, option->target);
  case CLI_DOUBLE: {
    bool free_range = option->min == 0 && option->max == 0;
    return cli_parse_double(what, text, free_range ? -HUGE_VAL : option->min, free_range ? HUGE_VAL : option->max,
                            option->target);
  }
  case CLI_DENSITY:
    return cli_parse_density(what, text, option->target);
  case CLI_STRING:
    if (!text[0])
      return cli_usage("%s: needs a value, not ''", what);
    *(const char **)option->target = text;
    return CLI_GO;
  case CLI_OPTIONAL:
    *(const char **)option->target = text;
    return CLI_GO;
  case CLI_CHOICE:
    return parse_choice(option, what, text);
  case CLI_DTYPE:
    return parse_dtype(option, what, text);
  case CLI_DIMS:
    return parse_joined_dims(option, what, text);
  case CLI_FLAG:
  case CLI_HEADING:
    break;
  }
  return CLI_GO;
}

/* argv[*at] is an option; *at moves to the last word it used. */
static int parse_option(const cli_parser *parser, bool *given, int argc, char **argv, int *at)
{
  const char *word = argv[*at];
  size_t length = strcspn(word, "=");
  const char *joined = word[length] ? word + length + 1 : NULL;
  const cli_option *option = parser->options;
  if (strncmp(word, "--", 2) != 0)
    return unknown_option(parser, word, length);
  while (!is_end(option) &&
         !(option->name && strlen(option->name) == length - 2 && strncmp(option->name, word + 2, length - 2) == 0))
    option++;
  if (is_end(option))
    return unknown_option(parser, word, length);

  char what[WORD_MAX + 3];
  snprintf(what, sizeof what, "--%s", option->name);
  if (given[option - parser->options])
    return cli_usage("%s: given twice", what);
  given[option - parser->options] = true;
  if (option->seen)
    *option->seen = true;

  if (option->kind == CLI_FLAG) {
    if (joined)
      return cli_usage("%s: takes no value, so %s is too much", what, joined[0] ? joined : "'='");
    *(bool *)option->target = true;
    return CLI_GO;
  }
  if (joined)
    return parse_value(option, what, joined);
  if (option->kind == CLI_OPTIONAL) {
    bool takes = option->choices && *at + 1 < argc && choice_index(option->choices, argv[*at + 1]) >= 0;
    *(const char **)option->target = takes ? argv[++*at] : "";
    return CLI_GO;
  }
  int want = option->kind == CLI_DIMS && *at + 1 < argc && !strchr(argv[*at + 1], 'x') ? 3 : 1;
  for (int i = 1; i <= want; i++)
    if (*at + i >= argc || strncmp(argv[*at + i], "--", 2) == 0)
      return want == 3 ? cli_usage("%s: needs three whole numbers, %s", what, option->value)
                       : cli_usage("%s: needs a value, %s", what, option->value);
  int first = *at + 1;
  *at += want;
  if (want == 1)
    return parse_value(option, what, argv[first]);
  int64_t dims[3], min, max;
  whole_limits(option, &min, &max);
  for (int i = 0; i < 3; i++) {
    int status = cli_parse_int(what, argv[first + i], min, max, &dims[i]);
    if (status != CLI_GO)
      return status;
  }
  memcpy(option->target, dims, sizeof dims);
  return CLI_GO;
}

/* What stands left of an option's description: "--size N", "--activations[=early|middle|late]". */
static void option_label(const cli_option *option, char *out, size_t bytes)
{
  if (option->kind == CLI_OPTIONAL)
    snprintf(out, bytes, "--%s[=%s]", option->name, option->value);
  else
    snprintf(out, bytes, "--%s%s%s", option->name, option->value ? " " : "", option->value ? option->value : "");
}

static void print_described(int width, const char *label, const char *help)
{
  if ((int)strlen(label) > width)
    printf("  %s\n  %*s  ", label, width, "");
  else
    printf("  %-*s  ", width, label);
  for (; *help; help++) {
    putchar(*help);
    if (*help == '\n')
      printf("  %*s  ", width, "");
  }
  putchar('\n');
}

static int print_help(const cli_parser *parser)
{
  enum { WIDEST = 26 };
  char label[128];
  int width = (int)strlen("--help");
  for (const cli_option *o = parser->options; !is_end(o); o++)
    if (o->kind != CLI_HEADING) {
      option_label(o, label, sizeof label);
      int length = (int)strlen(label);
      width = length > width && length <= WIDEST ? length : width;
    }
  printf("Usage: %s%s\n\n%s\n", parser->alone ? "" : "esmm ", parser->synopsis, parser->about);
  if (parser->options->kind != CLI_HEADING)
    printf("\nOptions\n");
  for (const cli_option *o = parser->options; !is_end(o); o++) {
    if (o->kind == CLI_HEADING) {
      printf("\n%s\n", o->help);
      continue;
    }
    option_label(o, label, sizeof label);
    print_described(width, label, o->help);
  }
  print_described(width, "--help", "this text");
  if (parser->notes)
    printf("\n%s", parser->notes);
  return CLI_OK;
}

int cli_parse(const cli_parser *parser, int argc, char **argv, const char **words, int *count)
{
  int options = 0;
  while (!is_end(&parser->options[options]))
    options++;
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
      return print_help(parser);

  bool *given = cli_alloc((size_t)options + 1, sizeof *given);
  bool only_words = false;
  int status = CLI_GO;
  *count = 0;
  for (int i = 1; i < argc && status == CLI_GO; i++) {
    if (!only_words && strcmp(argv[i], "--") == 0)
      only_words = true;
    else if (!only_words && argv[i][0] == '-' && argv[i][1])
      status = parse_option(parser, given, argc, argv, &i);
    else if (*count == parser->max_words)
      status = parser->max_words == 0
                   ? cli_usage("%s: unexpected word", argv[i][0] ? argv[i] : "''")
                   : cli_usage("%s: one word too many; it takes %s", argv[i][0] ? argv[i] : "''", parser->words_are);
    else
      words[(*count)++] = argv[i];
  }
  free(given);
  if (status == CLI_GO && *count < parser->min_words)
    status = cli_usage("it needs %s (see 'esmm %s --help')", parser->words_are, command_name);
  return status;
}
