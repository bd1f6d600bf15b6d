/*
 * kernels.c: which kernels a list on the command line means.
 *
 * Numbers are places on the ladder of prior work, which is a ladder of CUDA kernels; they are kept so that its old
 * command lines work. A build without that backend knows the numbers, and says so instead of "unknown".
 */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

static const int ladder[] = {10, 15, 17, 20, 21, 25, 28, 29, 30};
enum { LADDER = sizeof ladder / sizeof *ladder };

typedef struct names {
  const char **list;
  int count;
} names;

static void add_name(names *found, const char *name)
{
  for (int i = 0; i < found->count; i++)
    if (strcmp(found->list[i], name) == 0)
      return;
  found->list = cli_grow(found->list, (size_t)found->count + 1, sizeof *found->list);
  found->list[found->count++] = name;
}

static bool kernel_at(int index, esmm_kernel_info *info)
{
  *info = (esmm_kernel_info){.size = sizeof *info};
  return esmm_kernel_get(index, info) == ESMM_OK;
}

static void add_all(names *found)
{
  esmm_kernel_info info;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(i, &info) && info.available && !(info.flags & ESMM_KERNEL_REFERENCE))
      add_name(found, info.name);
}

static bool add_numbered(names *found, int64_t number)
{
  esmm_kernel_info info;
  bool any = false;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(i, &info) && info.number == number) {
      add_name(found, info.name);
      any = true;
    }
  return any;
}

static int add_range(names *found, const char *what, const char *word, int64_t first, int64_t last)
{
  bool any = false;
  if (first > last)
    return cli_usage("%s: %s runs backwards", what, word);
  for (int i = 0; i < LADDER; i++)
    if (ladder[i] >= first && ladder[i] <= last) {
      any = true;
      if (!add_numbered(found, ladder[i]))
        return cli_usage("%s: kernel %d is part of the CUDA ladder; this build has no CUDA backend", what, ladder[i]);
    }
  return any ? CLI_GO
             : cli_usage("%s: there is no kernel %s; the ladder has 10, 15, 17, 20, 21, 25, 28, 29 and 30", what, word);
}

/* The name itself, or the kernels of an idea: "joint", "joint_f32". */
static int add_named(names *found, const char *what, const char *word)
{
  size_t length = strlen(word);
  esmm_kernel_info info;
  int matches = 0, unavailable = 0;
  int room = 2 * esmm_kernel_count() + 2, candidates = 0;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(i, &info) && strncmp(info.name, word, length) == 0 &&
        (info.name[length] == '_' || info.name[length] == '\0')) {
      matches++;
      if (info.available || info.name[length] == '\0')
        add_name(found, info.name); /* named in full: the table says why it cannot run */
      else
        unavailable++;
    }
  if (matches > unavailable)
    return CLI_GO;
  if (matches)
    return cli_usage("%s: no %s kernel can run on this machine", what, word);

  const char **list = cli_alloc((size_t)room, sizeof *list);
  char(*ideas)[32] = cli_alloc((size_t)room, sizeof *ideas);
  list[candidates++] = "all";
  list[candidates++] = "auto";
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(i, &info)) {
      snprintf(ideas[i], sizeof ideas[i], "%.*s", (int)strcspn(info.name, "_"), info.name);
      list[candidates++] = ideas[i];
      list[candidates++] = info.name;
    }
  const char *near = cli_closest(word, list, candidates);
  int status = near ? cli_usage("%s: there is no kernel %s; did you mean %s?", what, word, near)
                    : cli_usage("%s: there is no kernel %s (see 'esmm list')", what, word);
  free(ideas);
  free(list);
  return status;
}

static int add_word(names *found, const char *what, const char *word)
{
  size_t digits = strspn(word, "0123456789");
  int64_t first, last;
  if (strcmp(word, "all") == 0) {
    add_all(found);
    return CLI_GO;
  }
  if (strcmp(word, "auto") == 0) {
    add_name(found, "");
    return CLI_GO;
  }
  if (digits == 0 || (word[digits] && word[digits] != '-'))
    return add_named(found, what, word);

  char number[64] = "";
  memcpy(number, word, digits < sizeof number ? digits : sizeof number - 1);
  if (word[digits] && (!word[digits + 1] || word[digits + 1 + strspn(word + digits + 1, "0123456789")]))
    return cli_usage("%s: %s is not a range of numbers", what, word);
  int status = cli_parse_int(what, number, 1, 1000, &first);
  last = first;
  if (status == CLI_GO && word[digits])
    status = cli_parse_int(what, word + digits + 1, 1, 1000, &last);
  return status == CLI_GO ? add_range(found, what, word, first, last) : status;
}

int cli_kernels(const char *what, const char *list, const char ***out, int *count)
{
  names found = {0};
  int status = CLI_GO;
  for (const char *at = list; status == CLI_GO;) {
    size_t length = strcspn(at, ",");
    char word[64];
    if (length == 0 || length >= sizeof word) {
      status = cli_usage("%s: %s is not a comma list of kernels", what, list[0] ? list : "''");
      break;
    }
    memcpy(word, at, length);
    word[length] = 0;
    status = add_word(&found, what, word);
    if (!at[length])
      break;
    at += length + 1;
  }
  if (status != CLI_GO) {
    free(found.list);
    found = (names){0};
  }
  *out = found.list;
  *count = found.count;
  return status;
}
