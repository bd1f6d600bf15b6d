/*
 * kernels.c: which kernels a list on the command line means.
 *
 * Numbers are places on the ladder of prior work, which is a ladder of CUDA kernels; they are kept so that its old
 * command lines work. In a CPU context the numbers are known too, and the error says why there is no GPU.
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

static bool kernel_at(const esmm_ctx *ctx, int index, esmm_kernel_info *info)
{
  *info = (esmm_kernel_info){.size = sizeof *info};
  return esmm_kernel_get(ctx, index, info) == ESMM_OK;
}

/* What can compete: neither the reference nor what is kept for comparison. */
static void add_all(names *found, const esmm_ctx *ctx)
{
  const unsigned apart = ESMM_KERNEL_REFERENCE | ESMM_KERNEL_ABLATION;
  esmm_kernel_info info;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info) && info.available && !(info.flags & apart))
      add_name(found, info.name);
}

static bool add_numbered(names *found, const esmm_ctx *ctx, int64_t number)
{
  esmm_kernel_info info;
  bool any = false;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info) && info.number == number) {
      add_name(found, info.name);
      any = true;
    }
  return any;
}

static int no_gpu(const esmm_ctx *ctx, const char *what, const char *word, const char *which)
{
  const char *reason = esmm_ctx_device_reason(ctx);
  return cli_failed("%s: %s: %s on a GPU, and %s%s", what, word, which,
                    reason[0] ? "there is none: " : "this is the CPU, as was asked for", reason);
}

static int add_range(names *found, const esmm_ctx *ctx, const char *what, const char *word, int64_t first, int64_t last)
{
  bool any = false;
  if (first > last)
    return cli_usage("%s: %s runs backwards", what, word);
  for (int i = 0; i < LADDER; i++)
    if (ladder[i] >= first && ladder[i] <= last) {
      any = true;
      if (!cli_on_gpu(ctx))
        return no_gpu(ctx, what, word, "the ladder's kernels run");
      if (!add_numbered(found, ctx, ladder[i]))
        return cli_usage("%s: kernel %d is part of the CUDA ladder; this build has no CUDA backend", what, ladder[i]);
    }
  return any ? CLI_GO
             : cli_usage("%s: there is no kernel %s; the ladder has 10, 15, 17, 20, 21, 25, 28, 29 and 30", what, word);
}

/* A kernel's own name; else the kernels of an idea that can run here: "joint", "joint_f32". */
static int add_named(names *found, const esmm_ctx *ctx, const char *what, const char *word)
{
  size_t length = strlen(word);
  esmm_kernel_info info, own = {0};
  int matches = 0, available = 0;
  int room = 2 * esmm_kernel_count() + 3, candidates = 0;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info) && strcmp(info.name, word) == 0)
      own = info;
  if (own.name && strcmp(own.backend, "cuda") == 0 && !cli_on_gpu(ctx))
    return no_gpu(ctx, what, word, "this kernel runs");
  for (int i = 0; i < esmm_kernel_count() && !own.name; i++)
    if (kernel_at(ctx, i, &info) && strncmp(info.name, word, length) == 0 && info.name[length] == '_') {
      matches++;
      available += info.available;
      if (info.available)
        add_name(found, info.name);
    }
  if (own.name && available == 0)
    add_name(found, own.name); /* also where it cannot run: the table says why */
  if (own.name || available)
    return CLI_GO;
  if (matches)
    return cli_usage("%s: no %s kernel can run on %s", what, word, esmm_ctx_device(ctx));

  const char **list = cli_alloc((size_t)room, sizeof *list);
  char(*ideas)[32] = cli_alloc((size_t)room, sizeof *ideas);
  list[candidates++] = "all";
  list[candidates++] = "auto";
  list[candidates++] = "ladder";
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info)) {
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

static int add_word(names *found, const esmm_ctx *ctx, const char *what, const char *word)
{
  size_t digits = strspn(word, "0123456789");
  int64_t first, last;
  if (strcmp(word, "all") == 0) {
    add_all(found, ctx);
    return CLI_GO;
  }
  if (strcmp(word, "auto") == 0) {
    add_name(found, "");
    return CLI_GO;
  }
  if (strcmp(word, "ladder") == 0)
    return add_range(found, ctx, what, word, ladder[0], ladder[LADDER - 1]);
  if (digits == 0 || (word[digits] && word[digits] != '-'))
    return add_named(found, ctx, what, word);

  char number[64] = "";
  memcpy(number, word, digits < sizeof number ? digits : sizeof number - 1);
  if (word[digits] && (!word[digits + 1] || word[digits + 1 + strspn(word + digits + 1, "0123456789")]))
    return cli_usage("%s: %s is not a range of numbers", what, word);
  int status = cli_parse_int(what, number, 1, 1000, &first);
  last = first;
  if (status == CLI_GO && word[digits])
    status = cli_parse_int(what, word + digits + 1, 1, 1000, &last);
  return status == CLI_GO ? add_range(found, ctx, what, word, first, last) : status;
}

int cli_kernels(const esmm_ctx *ctx, const char *what, const char *list, const char ***out, int *count)
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
    status = add_word(&found, ctx, what, word);
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
