/* plan_lines.c: see plan_lines.h. Its reader knows no JSON but what its writer writes. */
#include "plan_lines.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SHOWN = 24, PATH = 192 };

void plan_add(plan_text *text, const char *format, ...)
{
  for (int turn = 0; turn < 2; turn++) {
    va_list arguments;
    va_start(arguments, format);
    const int length =
        vsnprintf(text->data ? text->data + text->length : NULL, text->room - text->length, format, arguments);
    va_end(arguments);
    if (length < 0)
      abort();
    if (text->data && text->length + (size_t)length < text->room) {
      text->length += (size_t)length;
      return;
    }
    text->room = 2 * text->room + (size_t)length + 1;
    text->data = realloc(text->data, text->room);
    if (!text->data)
      abort();
  }
}

/* ---- lines ---- */

typedef struct span {
  const char *at;
  size_t length;
} span;

typedef struct lines {
  span *line;
  size_t count;
} lines;

static bool same(span x, span y)
{
  return x.length == y.length && memcmp(x.at, y.at, x.length) == 0;
}

static lines split(const char *text)
{
  lines l = {0};
  for (const char *at = text; *at; at++)
    l.count += *at == '\n';
  l.line = calloc(l.count + 1, sizeof *l.line);
  if (!l.line)
    abort();
  for (size_t i = 0; i < l.count; i++) {
    const char *end = strchr(text, '\n');
    l.line[i] = (span){text, (size_t)(end - text)};
    text = end + 1;
  }
  return l;
}

/* Up to where the kernel is named. */
static span product_of(span line)
{
  static const char behind[] = "\",\"kernel\":";
  for (size_t i = 0; i + sizeof behind <= line.length; i++)
    if (memcmp(line.at + i, behind, sizeof behind - 1) == 0)
      return (span){line.at, i};
  return line;
}

static const span *find(const lines *in, span line)
{
  const span product = product_of(line);
  for (size_t i = 0; i < in->count; i++)
    if (same(product_of(in->line[i]), product))
      return &in->line[i];
  return NULL;
}

/* ---- fields of a line ---- */

typedef struct pair {
  char path[PATH]; /* last[0].epilogue.c.cols */
  span value;
} pair;

typedef struct pairs {
  pair *pair;
  size_t count;
} pairs;

static const char *end_of_value(const char *at, const char *end)
{
  if (*at == '"') {
    const char *quote = memchr(at + 1, '"', (size_t)(end - at - 1));
    return quote ? quote + 1 : end;
  }
  while (at < end && *at != ',' && *at != '}' && *at != ']')
    at++;
  return at;
}

static pairs fields_of(span line)
{
  const char *const end = line.at + line.length;
  char section[32] = "";
  int launch = -1;
  pairs p = {0};
  for (const char *at = line.at; at < end; at++)
    p.count += *at == ':';
  p.pair = calloc(p.count + 1, sizeof *p.pair);
  if (!p.pair)
    abort();
  p.count = 0;
  for (const char *at = line.at; at < end; at++) {
    launch += *at == '{' && section[0];
    if (*at == ']')
      section[0] = '\0';
    if (*at != '"')
      continue;
    const char *name = at + 1, *quote = end_of_value(at, end) - 1;
    const int length = (int)(quote - name);
    if (quote + 2 >= end)
      break;
    at = quote + 2; /* behind the colon */
    if (*at == '[') {
      (void)snprintf(section, sizeof section, "%.*s", length, name);
      launch = -1;
      continue;
    }
    pair *to = &p.pair[p.count++];
    if (section[0])
      (void)snprintf(to->path, sizeof to->path, "%s[%d].%.*s", section, launch, length, name);
    else
      (void)snprintf(to->path, sizeof to->path, "%.*s", length, name);
    to->value = (span){at, (size_t)(end_of_value(at, end) - at)};
    at = to->value.at + to->value.length - 1;
  }
  return p;
}

static const span *value_of(const pairs *p, const char *path)
{
  for (size_t i = 0; i < p->count; i++)
    if (strcmp(p->pair[i].path, path) == 0)
      return &p->pair[i].value;
  return NULL;
}

/* Fields of x, which is, that have another value in y, which should be; or, with `lacking`, that y has not. */
static int show(const pairs *x, const pairs *y, bool lacking, int shown)
{
  for (size_t i = 0; i < x->count; i++) {
    const pair *p = &x->pair[i];
    const span *other = value_of(y, p->path);
    if (lacking ? other != NULL : !other || same(*other, p->value))
      continue;
    if (shown++ >= MOST_SHOWN)
      continue;
    if (lacking)
      printf("#   %s is %.*s, which should not be there\n", p->path, (int)p->value.length, p->value.at);
    else
      printf("#   %s is %.*s, it should be %.*s\n", p->path, (int)p->value.length, p->value.at, (int)other->length,
             other->at);
  }
  return shown;
}

static int show_missing(const pairs *should, const pairs *is, int shown)
{
  for (size_t i = 0; i < should->count; i++) {
    const pair *p = &should->pair[i];
    if (!value_of(is, p->path) && shown++ < MOST_SHOWN)
      printf("#   %s is not there, it should be %.*s\n", p->path, (int)p->value.length, p->value.at);
  }
  return shown;
}

static void show_line(span should, span is)
{
  const pairs want = fields_of(should), got = fields_of(is);
  const span product = product_of(is);
  printf("# %.*s\n", (int)product.length, product.at);
  int shown = show(&got, &want, false, 0);
  shown = show(&got, &want, true, shown);
  shown = show_missing(&want, &got, shown);
  if (shown > MOST_SHOWN)
    printf("#   and %d more of its fields\n", shown - MOST_SHOWN);
  free(want.pair);
  free(got.pair);
}

int plan_compare(const char *should, const char *is)
{
  if (strcmp(should, is) == 0)
    return 0;
  const lines want = split(should), got = split(is);
  int others = 0, added = 0, gone = 0;
  for (size_t i = 0; i < got.count; i++) {
    const bool in_place = i < want.count && same(product_of(want.line[i]), product_of(got.line[i]));
    const span *old = in_place ? &want.line[i] : find(&want, got.line[i]);
    if (!old && added++ == 0)
      printf("# a product that should not be there: %.*s\n", (int)product_of(got.line[i]).length, got.line[i].at);
    if (old && !same(*old, got.line[i]) && others++ == 0)
      show_line(*old, got.line[i]);
  }
  for (size_t i = 0; i < want.count; i++)
    if (!find(&got, want.line[i]) && gone++ == 0)
      printf("# a product that is not there: %.*s\n", (int)product_of(want.line[i]).length, want.line[i].at);
  if (others + added + gone)
    printf("# of %zu products %d are others, %d are new, %d are gone\n", got.count, others, added, gone);
  else if (++others)
    printf("# the products come in another order\n");
  free(want.line);
  free(got.line);
  return others + added + gone;
}
