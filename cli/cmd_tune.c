/*
 * cmd_tune.c: esmm tune: measures the plan's cost constants on this machine, or a model's products, and keeps them.
 */
#include "cli.h"
#include "models.h"
#include "tune_model.h"

static int tune_machine(esmm_ctx *ctx, bool dry_run)
{
  cli_progress progress;
  cli_progress_start(&progress, "tune");
  const double start = cli_now();
  const esmm_status tuned = esmm_tune(ctx, !dry_run, cli_progress_update, &progress);
  const double seconds = cli_now() - start;
  cli_progress_end(&progress);
  if (tuned != ESMM_OK)
    return cli_status(ctx, "cache", tuned);
  printf("measured in %s %s %s, ", cli_seconds(seconds), cli_on_gpu(ctx) ? "on" : "with", cli_workers(ctx));
  printf(dry_run ? "not saved\n" : "saved in %s\n", esmm_tune_path(ctx));
  cli_warn_busy_tuning(ctx);
  return CLI_OK;
}

int cmd_tune(int argc, char **argv)
{
  tune_request r = {.rows = "1,16,256", .density_a = "10%"};
  cli_machine machine = {0};
  bool has_axis = false, dry_run = false;
  const char *given[2] = {NULL, NULL};
  const cli_option options[] = {
      {"dry-run", CLI_FLAG, &dry_run, NULL, "measure, but save nothing; not of a model", 0, 0, NULL, NULL},
      CLI_MACHINE_OPTIONS(&machine),
      {NULL, CLI_HEADING, NULL, NULL, "Of a model", 0, 0, NULL, NULL},
      {"rows", CLI_STRING, &given[0], "LIST", "rows of A (default 1,16,256)", 0, 0, NULL, NULL},
      {"density-a", CLI_STRING, &given[1], "LIST", "nonzero shares of A (default 10%)", 0, 0, NULL, NULL},
      MODEL_K_AXIS_OPTION(&r.k_axis, &has_axis),
      {0}};
  const cli_parser parser = {
      .synopsis = "tune [MODEL] [options]",
      .about =
          "Measures how fast each kernel is on this device, of a GPU's kernels those for fp32: the others keep "
          "shipped\n"
          "constants. The plan uses the result to choose between them; it is kept in a file that later runs find. Do\n"
          "it again after a change of hardware, on an idle machine. The file says what share of the CPUs others took\n"
          "meanwhile ('esmm info' shows it); above 10 % 'esmm bench' measures again once they do not.\n"
          "\n"
          "Of a model, a file or directory of tensors as for 'esmm inspect', it times the products of A with each\n"
          "matrix, every dtype on every device, kernel by kernel in turns: one matrix of each shape, dtype and\n"
          "density. A later run of such a product, with nothing behind the sum, takes the fastest from its first call\n"
          "on, in CUDA graphs too. 'esmm tune' without a model comes first: it voids what was kept before.",
      .options = options,
      .max_words = 1,
      .words_are = "at most one file or directory"};
  int count;
  int status = cli_parse(&parser, argc, argv, &r.path, &count);
  if (status != CLI_GO)
    return status;
  if (count == 0 && (given[0] || given[1] || has_axis))
    return cli_usage("--rows, --density-a and --k-axis are for a model: give its file, or leave them out");
  if (count > 0 && dry_run)
    return cli_usage("--dry-run is for the machine: what a model's products take is always kept");
  r.rows = given[0] ? given[0] : r.rows;
  r.density_a = given[1] ? given[1] : r.density_a;

  esmm_ctx *ctx;
  status = cli_context(&machine, NULL, &ctx);
  if (status != CLI_GO)
    return status;
  if (!dry_run && !esmm_tune_path(ctx)[0])
    status =
        cli_failed("there is no place for the result: set XDG_CACHE_HOME or HOME%s", count ? "" : ", or use --dry-run");
  else
    status = count ? tune_model(ctx, &r) : tune_machine(ctx, dry_run);
  esmm_ctx_free(ctx);
  return status;
}
