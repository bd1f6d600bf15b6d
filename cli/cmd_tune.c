/*
 * cmd_tune.c: esmm tune: measures the plan's cost constants on this machine and keeps them.
 */
#include "cli.h"

int cmd_tune(int argc, char **argv)
{
  bool dry_run = false;
  cli_machine machine = {0};
  const cli_option options[] = {{"dry-run", CLI_FLAG, &dry_run, NULL, "measure, but save nothing", 0, 0, NULL, NULL},
                                CLI_MACHINE_OPTIONS(&machine),
                                {0}};
  const cli_parser parser = {
      .synopsis = "tune [--dry-run] [--device NAME] [--threads N]",
      .about =
          "Measures how fast each kernel is on this device, of a GPU's kernels those for fp32: the others keep "
          "shipped\n"
          "constants. The plan uses the result to choose between them; it is kept in a file that later runs find. Do\n"
          "it again after a change of hardware, on an idle machine. The file says what share of the CPUs others took\n"
          "meanwhile ('esmm info' shows it); above 10 % 'esmm bench' measures again once they do not.",
      .options = options};
  int count;
  int status = cli_parse(&parser, argc, argv, NULL, &count);
  if (status != CLI_GO)
    return status;

  esmm_ctx *ctx;
  status = cli_context(&machine, NULL, &ctx);
  if (status != CLI_GO)
    return status;
  const char *path = esmm_tune_path(ctx);
  if (!dry_run && !path[0]) {
    status = cli_failed("there is no place for the result: set XDG_CACHE_HOME or HOME, or use --dry-run");
  } else {
    cli_progress progress;
    cli_progress_start(&progress, "tune");
    double start = cli_now();
    esmm_status tuned = esmm_tune(ctx, !dry_run, cli_progress_update, &progress);
    double seconds = cli_now() - start;
    cli_progress_end(&progress);
    if (tuned != ESMM_OK) {
      status = cli_status(ctx, "cache", tuned);
    } else {
      printf("measured in %s %s %s, ", cli_seconds(seconds), cli_on_gpu(ctx) ? "on" : "with", cli_workers(ctx));
      printf(dry_run ? "not saved\n" : "saved in %s\n", path);
      cli_warn_busy_tuning(ctx);
      status = CLI_OK;
    }
  }
  esmm_ctx_free(ctx);
  return status;
}
