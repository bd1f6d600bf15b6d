/*
 * main.c: the esmm command: finds the subcommand and leaves the rest to it.
 */
#include "cli.h"

#include <signal.h>
#include <string.h>

static const cli_command commands[] = {
    {"bench", "measure kernels against the best dense library, results checked", cmd_bench},
    {"bench-weights", "measure every weight below a directory, as CSV", cmd_bench_weights},
    {"compare", "say what became faster or slower between two records", cmd_compare},
    {"report", "write records as one page to look at", cmd_report},
    {"run", "multiply matrices from files and write the product", cmd_run},
    {"inspect", "show a file's shape, densities and predicted speedup", cmd_inspect},
    {"prune", "set weights of a safetensors file to zero, to fit N:M or blocks", cmd_prune},
    {"explain", "show what the plan thinks of every kernel for a problem", cmd_explain},
    {"list", "list the kernels", cmd_list},
    {"info", "show the machine, its features and the caches", cmd_info},
    {"check", "run a quick self-test", cmd_check},
    {"tune", "measure this machine for the plan", cmd_tune},
    {"profile", "show what Nsight Compute says of the kernels on a GPU", cmd_profile},
};

enum { COMMANDS = sizeof commands / sizeof *commands };

static const cli_command *find_command(const char *name)
{
  for (int i = 0; i < COMMANDS; i++)
    if (strcmp(commands[i].name, name) == 0)
      return &commands[i];
  return NULL;
}

static int unknown_command(const char *name)
{
  const char *names[COMMANDS + 2] = {[COMMANDS] = "help", [COMMANDS + 1] = "version"};
  for (int i = 0; i < COMMANDS; i++)
    names[i] = commands[i].name;
  const char *near = cli_closest(name, names, COMMANDS + 2);
  if (near)
    return cli_usage("%s: unknown command; did you mean %s?", name[0] ? name : "''", near);
  return cli_usage("%s: unknown command (see 'esmm --help')", name[0] ? name : "''");
}

static void print_overview(FILE *out)
{
  fprintf(out, "Usage: esmm COMMAND [words and options]\n\n"
               "Matrix products that skip the zeros they find at run time.\n\nCommands\n");
  for (int i = 0; i < COMMANDS; i++)
    fprintf(out, "  %-13s %s\n", commands[i].name, commands[i].summary);
  fprintf(out, "  %-13s %s\n  %-13s %s\n", "help", "this text; 'esmm help COMMAND' or 'esmm COMMAND --help' for one",
          "version", "version and source id");
  fprintf(out, "\nOptions\n"
               "  --help     as help\n"
               "  --version  as version\n"
               "\nEnvironment\n"
               "  ESMM_DEVICE     auto, cpu, cuda or cuda:N (default auto: the first GPU that works, else the CPU)\n"
               "  ESMM_THREADS    threads to use (default: the CPUs this process may run on)\n"
               "  ESMM_FORCE      kernel for every product\n"
               "  ESMM_REMEMBER   0: each product is planned by itself, whatever those before it saw (default 1)\n"
               "  ESMM_DETERMINISTIC\n"
               "                  1: nothing is learnt from what products take (default 0)\n"
               "  ESMM_OPENBLAS, ESMM_BLIS, ESMM_ONEDNN, ESMM_CUBLAS\n"
               "                  library files that bench compares with; kernels named onednn_... and\n"
               "                  cublas_... use the last two too (ESMM_ONEDNN=off: there is no such kernel)\n"
               "  ESMM_COOPERATIVE\n"
               "                  0: no cooperative launches in clusters, which ncu does not run (default 1)\n"
               "  ESMM_NCU        Nsight Compute's ncu, for profile\n"
               "  XDG_CACHE_HOME  where the tuning cache lies (default: ~/.cache)\n"
               "  NO_COLOR        no colour on a terminal\n");
}

static int version(int argc, char **argv)
{
  if (argc > 1)
    return cli_usage("%s: %s: it takes no words", argv[0], argv[1]);
  printf("esmm %s (source %s)\n", esmm_version_str(), esmm_source_id());
  return CLI_OK;
}

static int run_command(const cli_command *command, int argc, char **argv)
{
  cli_set_command(command->name);
  return command->run(argc, argv);
}

static int help(int argc, char **argv)
{
  if (argc == 1) {
    print_overview(stdout);
    return CLI_OK;
  }
  if (argc > 2)
    return cli_usage("help: %s: one word too many; it takes a command", argv[2]);
  const cli_command *command = find_command(argv[1]);
  if (!command && (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "version") == 0)) {
    print_overview(stdout);
    return CLI_OK;
  }
  if (!command)
    return unknown_command(argv[1]);
  char option[] = "--help";
  char *words[] = {argv[1], option, NULL};
  return run_command(command, 2, words);
}

static void clean_up(int signal_number)
{
  io_sinks_unlink();
  (void)raise(signal_number); /* by default now: the shell sees what ended the command */
}

/* An interrupted command leaves no temporary file, and a file that grows too large is an error like a full disk. */
static void set_signals(void)
{
  static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
  const struct sigaction ignore = {.sa_handler = SIG_IGN},
                         clean = {.sa_handler = clean_up, .sa_flags = (int)SA_RESETHAND};
  (void)sigaction(SIGXFSZ, &ignore, NULL);
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    struct sigaction now;
    if (sigaction(ends[i], NULL, &now) == 0 && now.sa_handler == SIG_DFL) /* nohup's is left alone */
      (void)sigaction(ends[i], &clean, NULL);
  }
}

int main(int argc, char **argv)
{
  int status;
  set_signals();
  if (argc < 2) {
    print_overview(stderr);
    return CLI_USAGE;
  }
  const cli_command *command = find_command(argv[1]);
  if (command)
    status = run_command(command, argc - 1, argv + 1);
  else if (strcmp(argv[1], "help") == 0 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
    status = help(argc - 1, argv + 1);
  else if (strcmp(argv[1], "version") == 0 || strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0)
    status = version(argc - 1, argv + 1);
  else if (argv[1][0] == '-')
    status = cli_usage("%s: unknown option (see 'esmm --help')", argv[1]);
  else
    status = unknown_command(argv[1]);

  /* A full disk or a closed pipe: results that did not arrive are not a success. */
  if ((fflush(stdout) != 0 || ferror(stdout)) && status == CLI_OK)
    status = cli_failed("cannot write to the standard output");
  return status;
}
