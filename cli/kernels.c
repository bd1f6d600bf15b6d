/* kernels.c: which kernels a list on the command line means. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

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

/* What can compete: all but the reference. */
static void add_all(names *found, const esmm_ctx *ctx)
{
  esmm_kernel_info info;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info) && info.available && !(info.flags & ESMM_KERNEL_REFERENCE))
      add_name(found, info.name);
}

static int no_gpu(const esmm_ctx *ctx, const char *what, const char *word)
{
  const char *reason = esmm_ctx_device_reason(ctx);
  return cli_failed("%s: %s: this kernel runs on a GPU, and %s%s", what, word,
                    reason[0] ? "there is none: " : "this is the CPU, as was asked for", reason);
}

/* A kernel's own name; else the kernels of an idea that can run here: "joint", "joint_f32". */
static int add_named(names *found, const esmm_ctx *ctx, const char *what, const char *word)
{
  size_t length = strlen(word);
  esmm_kernel_info info, own = {0};
  int matches = 0, available = 0;
  int room = 2 * esmm_kernel_count() + 2, candidates = 0;
  for (int i = 0; i < esmm_kernel_count(); i++)
    if (kernel_at(ctx, i, &info) && strcmp(info.name, word) == 0)
      own = info;
  if (own.name && strcmp(own.backend, "cuda") == 0 && !cli_on_gpu(ctx))
    return no_gpu(ctx, what, word);
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
  if (strcmp(word, "all") == 0) {
    add_all(found, ctx);
    return CLI_GO;
  }
  if (strcmp(word, "auto") == 0) {
    add_name(found, "");
    return CLI_GO;
  }
  /* Names and numbers of the earlier kernels. */
  if (strncmp(word, "ladder", strlen("ladder")) == 0 || word[strspn(word, "0123456789-")] == 0)
    return cli_usage("%s: %s: the ladder of earlier kernels is a separate program: 'make ladder' builds it", what,
                     word);
  return add_named(found, ctx, what, word);
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
