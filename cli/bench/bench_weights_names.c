/*
 * bench_weights_names.c: pruner, group size, permutation and sparsity out of paths, and which files belong together.
 */
#include "bench_weights.h"

#include "cli.h"

#include <math.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* The value is group 2; what stands around a match is no letter or digit. */
#define WORD(body) "(^|[^a-z0-9])" body "($|[^a-z0-9.])"

static const char pruners[] =
    WORD("(wanda|sparsegpt|magnitude|random|owl|ria|alps|dsnot|besa|gblm|obc|obs|admm|dense)");
static const char groups[] = WORD("gro?u?p(s|size|_size)?[_=-]?([0-9]+)");
static const char permutations[] = WORD("([a-z]+[_-]perm|[a-z]+[_-]permut(ed|ation)|no[_-]?perm|perm)");
static const char sparsities[] = WORD("(sparsity|sparse|sp)[_=-]?([0-9]*[.]?[0-9]+)");

/* Finds a pattern in text; the bytes of its group number `group` go to out. */
static bool find(const char *pattern, const char *text, int group, char *out, size_t out_size)
{
  regex_t regex;
  regmatch_t match[6];
  if (regcomp(&regex, pattern, REG_EXTENDED | REG_ICASE) != 0)
    return false;
  const bool found = regexec(&regex, text, 6, match, 0) == 0 && match[group].rm_so >= 0;
  if (found)
    snprintf(out, out_size, "%.*s", (int)(match[group].rm_eo - match[group].rm_so), text + match[group].rm_so);
  regfree(&regex);
  return found;
}

/* What one part of a path says; returns whether it says anything. */
static bool read_part(const char *part, weights_labels *labels)
{
  char number[32];
  bool any = find(pruners, part, 2, labels->pruner, sizeof labels->pruner);
  any = find(permutations, part, 2, labels->permutation, sizeof labels->permutation) || any;
  if (find(groups, part, 3, number, sizeof number)) {
    labels->group_size = strtod(number, NULL);
    any = true;
  }
  if (find(sparsities, part, 3, number, sizeof number)) {
    const double sparsity = strtod(number, NULL);
    labels->sparsity = sparsity > 1 ? sparsity / 100 : sparsity; /* 50 is meant as a percentage */
    any = true;
  }
  return any;
}

static size_t stem_length(const char *name, size_t length)
{
  for (size_t i = length; i > 1; i--)
    if (name[i - 1] == '.')
      return i - 1;
  return length;
}

void weights_labels_read(const char *path, size_t prefix, const char *tensor, weights_labels *labels)
{
  *labels = (weights_labels){.group_size = NAN, .sparsity = NAN};
  size_t used = 0;
  for (const char *at = path; *at;) {
    const size_t length = strcspn(at, "/");
    const bool last = at[length] == 0, shown = (size_t)(at - path) >= prefix;
    const size_t kept = last ? stem_length(at, length) : length;
    char part[256];
    snprintf(part, sizeof part, "%.*s", (int)kept, at);
    const bool label = read_part(part, labels);
    if (shown && length > 0 && !(last && tensor) && (last || !label) && used < sizeof labels->layer)
      used += (size_t)snprintf(labels->layer + used, sizeof labels->layer - used, "%s%s", used ? "/" : "", part);
    at += length + !last;
  }
  if (tensor)
    snprintf(labels->layer + (used < sizeof labels->layer ? used : 0),
             sizeof labels->layer - (used < sizeof labels->layer ? used : 0), "%s%s", used ? "/" : "", tensor);
}

/* ---- pairs ---- */

static const struct {
  const char *a, *b;
} partners[] = {{"a", "b"},
                {"x", "w"},
                {"act", "weight"},
                {"acts", "weights"},
                {"input", "weight"},
                {"inputs", "weights"},
                {"activation", "weight"},
                {"activations", "weights"}};

static bool is_shape(const char *word, size_t length)
{
  const size_t rows = strspn(word, "0123456789");
  return rows > 0 && rows < length && word[rows] == 'x' && rows + 1 + strspn(word + rows + 1, "0123456789") == length;
}

static const char *next_word(const char *at, const char *end, size_t *length)
{
  static const char between[] = "_-. ";
  for (;;) {
    while (at < end && strchr(between, *at))
      at++;
    size_t n = 0;
    while (at + n < end && !strchr(between, at[n]))
      n++;
    *length = n;
    if (n == 0 || !is_shape(at, n))
      return n ? at : NULL;
    at += n;
  }
}

static bool are_partners(const char *a, size_t a_length, const char *b, size_t b_length)
{
  for (size_t i = 0; i < sizeof partners / sizeof *partners; i++)
    if (strlen(partners[i].a) == a_length && strncasecmp(partners[i].a, a, a_length) == 0 &&
        strlen(partners[i].b) == b_length && strncasecmp(partners[i].b, b, b_length) == 0)
      return true;
  return false;
}

bool weights_are_pair(const char *a, const char *b)
{
  const char *a_name = strrchr(a, '/'), *b_name = strrchr(b, '/');
  const size_t a_dir = a_name ? (size_t)(a_name - a) + 1 : 0, b_dir = b_name ? (size_t)(b_name - b) + 1 : 0;
  if (a_dir != b_dir || memcmp(a, b, a_dir) != 0)
    return false;
  const char *x = a + a_dir, *y = b + b_dir;
  const char *x_end = x + stem_length(x, strlen(x)), *y_end = y + stem_length(y, strlen(y));
  int differences = 0;
  for (;;) {
    size_t x_length, y_length;
    x = next_word(x, x_end, &x_length);
    y = next_word(y, y_end, &y_length);
    if (!x || !y)
      return !x && !y && differences == 1;
    if (x_length != y_length || strncasecmp(x, y, x_length) != 0) {
      if (!are_partners(x, x_length, y, y_length))
        return false;
      differences++;
    }
    x += x_length;
    y += y_length;
  }
}
