/*
 * cmd_list.c: esmm list: the kernels, from the library's own registry.
 */
#include "cli.h"

static void flags_text(unsigned flags, char *out, size_t bytes)
{
  snprintf(out, bytes, "%s%s%s", flags & ESMM_KERNEL_DETERMINISTIC ? "D" : "-", flags & ESMM_KERNEL_SKIPS ? "S" : "-",
           flags & ESMM_KERNEL_REFERENCE ? "R" : "-");
}

int cmd_list(int argc, char **argv)
{
  bool names = false;
  const cli_option options[] = {{"names", CLI_FLAG, &names, NULL,
                                 "only the names of those that this machine can run, one a line", 0, 0, NULL, NULL},
                                {0}};
  const cli_parser parser = {
      .synopsis = "list [--names]",
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

  static const char *const heads[] = {"kernel", "number", "backend", "here", "flags", "what it does"};
  cli_table *table = cli_table_new("lrllll", heads);
  bool any_number = false;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    char flags[8];
    esmm_status got = esmm_kernel_get(i, &info);
    if (got != ESMM_OK) {
      cli_table_free(table);
      return cli_status(NULL, "list", got);
    }
    if (names && info.available)
      printf("%s\n", info.name);
    cli_style style = info.available ? CLI_PLAIN : CLI_FAINT;
    flags_text(info.flags, flags, sizeof flags);
    cli_table_cell(table, style, "%s", info.name);
    if (info.number)
      cli_table_cell(table, style, "%d", info.number);
    else
      cli_table_cell(table, style, "-");
    cli_table_cell(table, style, "%s", info.backend);
    cli_table_cell(table, style, "%s", info.available ? "yes" : "no");
    cli_table_cell(table, style, "%s", flags);
    cli_table_cell(table, style, "%s", info.doc);
    any_number = any_number || info.number;
  }
  if (!names) {
    cli_table_print(table, stdout);
    printf("\nFlags: D deterministic, S skips zeros, R reference (runs only when asked for)%s\n",
           any_number ? "; number: place on the ladder of prior work" : "");
  }
  cli_table_free(table);
  return CLI_OK;
}
