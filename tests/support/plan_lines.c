/* plan_lines.c: see plan_lines.h. Its reader knows no JSON but what its writer writes. */
#include "plan_lines.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SHOWN = 16, PATH = 192 };

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

/* Its product in words: they have no quotes. */
static span product_of(span line)
{
  enum { START = sizeof "{\"product\":\"" - 1 };
  const char *end = line.length > START ? memchr(line.at + START, '"', line.length - START) : NULL;
  return end ? (span){line.at + START, (size_t)(end - line.at) - START} : line;
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
  span launch;     /* what is launched there; empty outside of launches */
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
  span function = {0};
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
    if (length == 6 && strncmp(name, "launch", 6) == 0)
      function = to->value;
    to->launch = section[0] ? function : (span){"", 0};
    at = to->value.at + to->value.length - 1;
  }
  return p;
}

static const pair *find_pair(const pairs *p, const char *path)
{
  for (size_t i = 0; i < p->count; i++)
    if (strcmp(p->pair[i].path, path) == 0)
      return &p->pair[i];
  return NULL;
}

/* How a field is and how it should be, either of which may be NULL; no more of them than can be read. */
static void show_pair(plan_text *to, const pair *is, const pair *should, int *shown)
{
  const pair *p = is ? is : should;
  if ((*shown)++ >= MOST_SHOWN)
    return;
  plan_add(to, "\n  %s", p->path);
  if (p->launch.length)
    plan_add(to, " of %.*s", (int)p->launch.length, p->launch.at);
  if (is)
    plan_add(to, " is %.*s, ", (int)is->value.length, is->value.at);
  else
    plan_add(to, " is not there, ");
  if (should)
    plan_add(to, "it should be %.*s", (int)should->value.length, should->value.at);
  else
    plan_add(to, "it should not be there");
}

/* Where another function is launched, that is all there is to say of its parameters. */
static bool comparable(const pairs *y, const pair *p)
{
  char path[PATH];
  const char *dot = strchr(p->path, '.');
  if (p->launch.length == 0 || !dot)
    return true;
  (void)snprintf(path, sizeof path, "%.*s.launch", (int)(dot - p->path), p->path);
  const pair *other = find_pair(y, path);
  return strcmp(p->path, path) == 0 || (other && same(other->value, p->launch));
}

static void show_line(plan_text *to, span should, span is)
{
  const pairs want = fields_of(should), got = fields_of(is);
  const span product = product_of(is);
  int shown = 0;
  plan_add(to, "\n%.*s", (int)product.length, product.at);
  for (size_t i = 0; i < got.count; i++) {
    const pair *p = &got.pair[i], *old = find_pair(&want, p->path);
    if (comparable(&want, p) && !(old && same(old->value, p->value)))
      show_pair(to, p, old, &shown);
  }
  for (size_t i = 0; i < want.count; i++)
    if (comparable(&got, &want.pair[i]) && !find_pair(&got, want.pair[i].path))
      show_pair(to, NULL, &want.pair[i], &shown);
  if (shown > MOST_SHOWN)
    plan_add(to, "\n  and %d more of its fields", shown - MOST_SHOWN);
  free(want.pair);
  free(got.pair);
}

int plan_compare(const char *should, const char *is, plan_text *said)
{
  if (strcmp(should, is) == 0)
    return 0;
  const lines want = split(should), got = split(is);
  int others = 0, added = 0, gone = 0;
  for (size_t i = 0; i < got.count; i++) {
    const bool in_place = i < want.count && same(product_of(want.line[i]), product_of(got.line[i]));
    const span *old = in_place ? &want.line[i] : find(&want, got.line[i]);
    if (!old && added++ == 0)
      plan_add(said, "\nno product that should be there: %.*s", (int)product_of(got.line[i]).length,
               product_of(got.line[i]).at);
    if (old && !same(*old, got.line[i]) && others++ == 0)
      show_line(said, *old, got.line[i]);
  }
  for (size_t i = 0; i < want.count; i++)
    if (!find(&got, want.line[i]) && gone++ == 0)
      plan_add(said, "\na product that is not there: %.*s", (int)product_of(want.line[i]).length,
               product_of(want.line[i]).at);
  if (others + added + gone)
    plan_add(said, "\nof %zu products %d are others, %d are new, %d are gone", got.count, others, added, gone);
  else if (++others)
    plan_add(said, "\nthe products come in another order");
  free(want.line);
  free(got.line);
  return others + added + gone;
}
