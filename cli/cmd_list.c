/*
 * cmd_list.c: esmm list: the kernels, from the library's own registry.
 */
#include "cli.h"

enum { WIDEST = 120 };

static void flags_text(unsigned flags, char *out, size_t bytes)
{
  snprintf(out, bytes, "%s%s%s", flags & ESMM_KERNEL_DETERMINISTIC ? "D" : "-", flags & ESMM_KERNEL_SKIPS ? "S" : "-",
           flags & ESMM_KERNEL_REFERENCE ? "R" : "-");
}

static void add_row(cli_table *table, const esmm_kernel_info *info)
{
  cli_style style = info->available ? CLI_PLAIN : CLI_FAINT;
  char flags[8];
  flags_text(info->flags, flags, sizeof flags);
  cli_table_cell(table, style, "%s", info->name);
  cli_table_cell(table, style, "%s", info->backend);
  cli_table_cell(table, style, "%s", info->available ? "yes" : "no");
  cli_table_cell(table, style, "%s", flags);
  cli_table_cell(table, style, "%s", info->doc);
}

static int print_list(const esmm_ctx *ctx, bool names)
{
  static const char *const heads[] = {"kernel", "backend", "here", "flags", "what it does"};
  cli_table *table = cli_table_new("lllll", heads);
  int status = CLI_OK;
  for (int i = 0; i < esmm_kernel_count() && status == CLI_OK; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    esmm_status got = esmm_kernel_get(ctx, i, &info);
    if (got != ESMM_OK)
      status = cli_status(ctx, "list", got);
    else if (!names)
      add_row(table, &info);
    else if (info.available)
      printf("%s\n", info.name);
  }
  if (!names && status == CLI_OK) {
    const int width = cli_screen_width(stdout);
    cli_table_print_wrapped(table, width > 0 ? width : WIDEST, stdout);
    printf("\nhere: whether %s can run it\n"
           "flags: D deterministic, S skips zeros, R reference (runs only when asked for)\n",
           esmm_ctx_device(ctx));
  }
  cli_table_free(table);
  return status;
}

int cmd_list(int argc, char **argv)
{
  bool names = false;
  cli_machine machine = {0};
  const cli_option options[] = {{"names", CLI_FLAG, &names, NULL,
                                 "only the names of those that the device can run, one a line", 0, 0, NULL, NULL},
                                CLI_DEVICE_OPTION(&machine.device),
                                {0}};
  const cli_parser parser = {
      .synopsis = "list [--names] [--device NAME]",
      .about = "Lists the kernels. 'esmm bench NAME', '--force NAME' and ESMM_FORCE take a name, or the idea that it\n"
               "starts with (joint, dense, ...).",
      .options = options,
      .notes = "Flags\n"
               "  D  deterministic: the same data and threads give the same bits\n"
               "  S  skips zeros; never used under --strict\n"
               "  R  reference: for checking, only runs when it is asked for\n"};
  int count;
  int status = cli_parse(&parser, argc, argv, NULL, &count);
  if (status != CLI_GO)
    return status;
  esmm_ctx *ctx;
  status = cli_context(&machine, NULL, &ctx);
  if (status == CLI_GO)
    status = print_list(ctx, names);
  esmm_ctx_free(ctx);
  return status;
}
