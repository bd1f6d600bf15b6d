/*
 * cmd_profile.c: esmm profile: what Nsight Compute says of the GPU functions behind a product.
 *
 * It runs `esmm bench ... --once` under ncu, reads the table that ncu prints as CSV, and shows one line for each GPU
 * function, averaged over its launches. ncu varies: other versions print other words around the table, and some
 * counters are for root only. So columns are found by their names, a cell that is no number is shown as "-", and a
 * failure is examined once more, so that the message says what to do.
 */
#include "cli.h"

#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- metrics ---- */

typedef enum metric {
  DURATION,
  SM,
  DRAM,
  L2_HITS,
  OCCUPANCY,
  REGISTERS,
  SHARED_STATIC,
  SHARED_DYNAMIC,
  BRANCHES,
  METRICS
} metric;

static const char *const metric_names[METRICS] = {
    [DURATION] = "gpu__time_duration.sum", /* nanoseconds */
    [SM] = "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    [DRAM] = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    [L2_HITS] = "lts__t_sector_hit_rate.pct",
    [OCCUPANCY] = "sm__warps_active.avg.pct_of_peak_sustained_active",
    [REGISTERS] = "launch__registers_per_thread",
    [SHARED_STATIC] = "launch__shared_mem_per_block_static", /* bytes */
    [SHARED_DYNAMIC] = "launch__shared_mem_per_block_dynamic",
    [BRANCHES] = "smsp__sass_average_branch_targets_threads_uniform.pct",
};

/* One GPU function, over all its launches. */
typedef struct function {
  char *name;
  int launches;
  double sum[METRICS];
  int count[METRICS]; /* launches that gave a number */
} function;

typedef struct profile {
  function *functions;
  int count;
} profile;

static double mean(const function *f, metric m)
{
  return f->count[m] ? f->sum[m] / f->count[m] : NAN;
}

static double shared_kib(const function *f)
{
  return (mean(f, SHARED_STATIC) + mean(f, SHARED_DYNAMIC)) / 1024;
}

static void free_profile(profile *p)
{
  for (int i = 0; i < p->count; i++)
    free(p->functions[i].name);
  free(p->functions);
  *p = (profile){0};
}

/* ---- ncu's CSV ---- */

/* Takes the next field off a line, in place: quotes removed, "" inside them made ". NULL at the end of the line. */
static char *next_field(char **at)
{
  char *from = *at, *start = *at, *to = *at;
  if (!from)
    return NULL;
  bool quoted = *from == '"';
  from += quoted;
  while (*from) {
    if (quoted && from[0] == '"' && from[1] == '"')
      from++;
    else if (quoted && *from == '"') {
      quoted = false;
      from++;
      continue;
    } else if (!quoted && *from == ',')
      break;
    *to++ = *from++;
  }
  *at = *from ? from + 1 : NULL;
  *to = '\0';
  return start;
}

/* Where the columns are. */
typedef struct columns {
  int name, metrics[METRICS];
} columns;

static bool read_heads(char *line, columns *out)
{
  bool first = true, is_table = false;
  *out = (columns){.name = -1};
  for (int m = 0; m < METRICS; m++)
    out->metrics[m] = -1;
  int column = 0;
  for (char *field; (field = next_field(&line)); column++, first = false) {
    if (first)
      is_table = strcmp(field, "ID") == 0;
    if (strcmp(field, "Kernel Name") == 0)
      out->name = column;
    for (int m = 0; m < METRICS; m++)
      if (strcmp(field, metric_names[m]) == 0)
        out->metrics[m] = column;
  }
  return is_table && out->name >= 0;
}

/* "1,234.5" where the locale groups digits; NAN for no number. */
static double read_number(const char *text)
{
  char plain[64];
  size_t used = 0;
  for (; *text && used + 1 < sizeof plain; text++)
    if (*text != ',')
      plain[used++] = *text;
  plain[used] = '\0';
  char *end;
  double x = strtod(plain, &end);
  return used && !*end && isfinite(x) ? x : NAN;
}

static function *find_function(profile *p, const char *name)
{
  for (int i = 0; i < p->count; i++)
    if (strcmp(p->functions[i].name, name) == 0)
      return &p->functions[i];
  p->functions = cli_grow(p->functions, (size_t)p->count + 1, sizeof *p->functions);
  function *f = &p->functions[p->count++];
  *f = (function){.name = cli_alloc(strlen(name) + 1, 1)};
  memcpy(f->name, name, strlen(name));
  return f;
}

/* A launch: its ID is a whole number, which the line of units does not have. */
static void read_launch(char *line, const columns *c, profile *p)
{
  double values[METRICS];
  const char *name = NULL;
  bool launch = false;
  for (int m = 0; m < METRICS; m++)
    values[m] = NAN;
  int column = 0;
  for (char *field; (field = next_field(&line)); column++) {
    if (column == 0)
      launch = field[0] && !field[strspn(field, "0123456789")];
    if (column == c->name)
      name = field;
    for (int m = 0; m < METRICS; m++)
      if (column == c->metrics[m])
        values[m] = read_number(field);
  }
  if (!launch || !name || !name[0])
    return;
  function *f = find_function(p, name);
  f->launches++;
  for (int m = 0; m < METRICS; m++)
    if (!isnan(values[m])) {
      f->sum[m] += values[m];
      f->count[m]++;
    }
}

/* Changes text. */
static void read_report(char *text, profile *p)
{
  columns c;
  bool inside = false;
  for (char *line = text, *next; line; line = next) {
    next = strchr(line, '\n');
    if (next)
      *next++ = '\0';
    size_t length = strlen(line);
    if (length && line[length - 1] == '\r')
      line[length - 1] = '\0';
    if (line[0] != '"') /* words of ncu, or of the command that it runs */
      continue;
    if (!inside)
      inside = read_heads(line, &c);
    else
      read_launch(line, &c, p);
  }
}

/* ---- ncu ---- */

static bool is_program(const char *path)
{
  return access(path, X_OK) == 0;
}

static bool find_in_path(char *out, size_t bytes)
{
  const char *path = getenv("PATH");
  for (const char *at = path; at && *at;) {
    size_t length = strcspn(at, ":");
    int needed = snprintf(out, bytes, "%.*s/ncu", (int)length, at);
    if (length && needed > 0 && (size_t)needed < bytes && is_program(out))
      return true;
    at += length + (at[length] == ':');
  }
  return false;
}

/* The last of a sorted list is the newest version. */
static bool find_installed(char *out, size_t bytes)
{
  static const char *const places[] = {"/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu",
                                       "/usr/local/NVIDIA-Nsight-Compute*/ncu"};
  bool found = false;
  for (size_t i = 0; i < sizeof places / sizeof *places && !found; i++) {
    glob_t matches;
    if (glob(places[i], 0, NULL, &matches) != 0)
      continue;
    for (size_t j = matches.gl_pathc; j-- > 0 && !found;) {
      found = is_program(matches.gl_pathv[j]) && strlen(matches.gl_pathv[j]) < bytes;
      if (found)
        snprintf(out, bytes, "%s", matches.gl_pathv[j]);
    }
    globfree(&matches);
  }
  return found;
}

static bool find_ncu(char *out, size_t bytes)
{
  const char *asked = getenv("ESMM_NCU");
  if (asked && asked[0]) {
    snprintf(out, bytes, "%s", asked);
    return strlen(asked) < bytes && is_program(asked);
  }
  return find_in_path(out, bytes) || find_installed(out, bytes);
}

/* All that a program says on both streams, and how it ended; text is to be freed. */
typedef struct answer {
  char *text;
  int status; /* exit status; -1: it could not be run, or a signal ended it */
} answer;

static void become(char **words, int output)
{
  /* ncu does not run cooperative launches in clusters; a profiled GPU does nothing else. */
  if (setenv("ESMM_COOPERATIVE", "0", 0) == 0 && dup2(output, STDOUT_FILENO) >= 0 && dup2(output, STDERR_FILENO) >= 0)
    execv(words[0], words);
  _exit(127);
}

static char *read_all(int from)
{
  size_t used = 0, room = 1 << 16;
  char *text = cli_alloc(room, 1);
  for (;;) {
    ssize_t got = read(from, text + used, room - used - 1);
    if (got < 0 && errno == EINTR)
      continue;
    if (got <= 0)
      break;
    used += (size_t)got;
    if (used + 1 == room)
      text = cli_grow(text, room *= 2, 1);
  }
  text[used] = '\0';
  return text;
}

static answer run_program(char **words)
{
  answer a = {.status = -1};
  int ends[2], status = 0;
  fflush(stdout);
  if (pipe(ends) != 0)
    return a;
  pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    become(words, ends[1]);
  }
  close(ends[1]);
  if (child > 0) {
    a.text = read_all(ends[0]);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
      ;
    a.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  close(ends[0]);
  return a;
}

/* ---- what went wrong ---- */

/* The rest of the first line that has this in it, without what stands before it. */
static bool find_line(const char *text, const char *mark, char *out, size_t bytes)
{
  const char *at = text ? strstr(text, mark) : NULL;
  if (!at)
    return false;
  at += strlen(mark);
  at += strspn(at, " :");
  snprintf(out, bytes, "%.*s", (int)strcspn(at, "\r\n"), at);
  return true;
}

/* true: there is a GPU. Else it was said that there is none. */
static bool have_gpu(const cli_machine *machine)
{
  char error[512] = "";
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts opts = {
      .size = sizeof opts, .device = machine->device, .no_tuning_cache = 1, .error = error, .error_size = sizeof error};
  esmm_status status = esmm_ctx_create(&ctx, &opts);
  esmm_ctx_free(ctx);
  if (status != ESMM_OK)
    cli_failed("there is no GPU to profile: %s", error[0] ? error : esmm_status_str(status));
  return status == ESMM_OK;
}

static int explain_failure(const char *ncu, const cli_machine *machine, const answer *a)
{
  char line[400];
  if (a->text && strstr(a->text, "ERR_NVGPUCTRPERM"))
    return cli_failed("the driver keeps the GPU's counters for root (ERR_NVGPUCTRPERM): run this as root, in a "
                      "container with --cap-add=SYS_ADMIN, or load the nvidia module with "
                      "NVreg_RestrictProfilingToAdminUsers=0");
  if (find_line(a->text, "esmm: bench:", line, sizeof line))
    return cli_failed("%s", line);
  if (!have_gpu(machine))
    return CLI_FAILED;
  if (find_line(a->text, "==ERROR==", line, sizeof line))
    return cli_failed("%s: %s", ncu, line);
  if (a->status == 0)
    return cli_failed("%s saw no launch on %s: did a kernel of the GPU run?", ncu, machine->device);
  return a->status == 127 ? cli_failed("%s could not be run", ncu)
                          : cli_failed("%s ended with status %d and said nothing of use", ncu, a->status);
}

static int no_ncu(const cli_machine *machine)
{
  const char *asked = getenv("ESMM_NCU");
  if (asked && asked[0])
    return cli_failed("ESMM_NCU: %s is no program", asked);
  return have_gpu(machine) ? cli_failed("there is no ncu in PATH, /usr/local/cuda/bin or /opt/nvidia/nsight-compute: "
                                        "install Nsight Compute, or set ESMM_NCU to its ncu")
                           : CLI_FAILED;
}

/* ---- the report ---- */

/* "void cutlass::Kernel2<...>(Params)" is too much for a table: no return type, no parameters, and only so long. */
static void short_name(const char *name, char *out, size_t bytes)
{
  if (strncmp(name, "void ", 5) == 0)
    name += 5;
  size_t length = strcspn(name, "(");
  if (length < bytes)
    snprintf(out, bytes, "%.*s", (int)length, name);
  else
    snprintf(out, bytes, "%.*s...", (int)bytes - 4, name);
}

static void add_share(cli_table *table, double percent)
{
  cli_table_cell(table, CLI_PLAIN, isnan(percent) ? "-" : "%.1f", percent);
}

static void print_profile(const profile *p)
{
  static const char *const heads[] = {"GPU function", "launches", "duration", "SM %",       "DRAM %",
                                      "L2 hit %",     "occup. %", "regs",     "shared KiB", "branch %"};
  cli_table *table = cli_table_new("lrrrrrrrrr", heads);
  for (int i = 0; i < p->count; i++) {
    const function *f = &p->functions[i];
    char name[38];
    short_name(f->name, name, sizeof name);
    cli_table_cell(table, CLI_PLAIN, "%s", name);
    cli_table_cell(table, CLI_PLAIN, "%d", f->launches);
    cli_table_cell(table, CLI_PLAIN, "%s", cli_seconds(1e-9 * mean(f, DURATION)));
    add_share(table, mean(f, SM));
    add_share(table, mean(f, DRAM));
    add_share(table, mean(f, L2_HITS));
    add_share(table, mean(f, OCCUPANCY));
    cli_table_cell(table, CLI_PLAIN, isnan(mean(f, REGISTERS)) ? "-" : "%.0f", mean(f, REGISTERS));
    add_share(table, shared_kib(f));
    add_share(table, mean(f, BRANCHES));
  }
  cli_table_print(table, stdout);
  cli_table_free(table);
}

static void csv_number(FILE *out, double x)
{
  fputc(',', out);
  if (isfinite(x))
    cli_json_number(out, x);
}

static void write_csv(FILE *out, const profile *p)
{
  fprintf(out, "function,launches,duration_us,sm_percent,dram_percent,l2_hit_percent,occupancy_percent,registers,"
               "shared_kib,branch_percent\n");
  for (int i = 0; i < p->count; i++) {
    const function *f = &p->functions[i];
    const double values[] = {1e-3 * mean(f, DURATION), mean(f, SM),        mean(f, DRAM), mean(f, L2_HITS),
                             mean(f, OCCUPANCY),       mean(f, REGISTERS), shared_kib(f), mean(f, BRANCHES)};
    cli_csv_string(out, f->name);
    fprintf(out, ",%d", f->launches);
    for (size_t j = 0; j < sizeof values / sizeof *values; j++)
      csv_number(out, values[j]);
    fputc('\n', out);
  }
}

/* ---- the command ---- */

/* The words of `esmm profile` but its own options. The parser has seen them: a value never starts with --. */
static int pass_on(int argc, char **argv, char **out)
{
  static const char *const mine[] = {"--csv", "--device"};
  int count = 0;
  bool only_words = false;
  for (int i = 1; i < argc; i++) {
    bool skip = false, joined = false;
    for (size_t j = 0; j < sizeof mine / sizeof *mine && !only_words; j++) {
      size_t length = strlen(mine[j]);
      bool same = strncmp(argv[i], mine[j], length) == 0;
      skip = skip || (same && (!argv[i][length] || argv[i][length] == '='));
      joined = joined || (same && argv[i][length] == '=');
    }
    only_words = only_words || strcmp(argv[i], "--") == 0;
    if (!skip)
      out[count++] = argv[i];
    else if (!joined)
      i++;
  }
  return count;
}

/*
 * Ways to ask, each for kernels that do not run under the one before. ncu patches a kernel's code to count its
 * branches, and runs a kernel several times, with memory restored in between; application replay runs the whole command
 * again instead. The last way asks only for metrics that one run of a kernel gives.
 */
typedef enum attempt { ALL_METRICS, NO_PATCHES, WHOLE_RUNS, ONE_RUN, ATTEMPTS } attempt;

static bool is_asked(metric m, attempt how)
{
  const bool one_run = m == DURATION || m == REGISTERS || m == SHARED_STATIC || m == SHARED_DYNAMIC;
  return how == ONE_RUN ? one_run : how == ALL_METRICS || m != BRANCHES;
}

/* Whatever else ncu says, and however it ends. Counters that are for root are so in every way. */
static bool did_not_launch(const answer *a)
{
  return a->text && (strstr(a->text, "LaunchFailed") || strstr(a->text, "Failed to profile")) &&
         !strstr(a->text, "ERR_NVGPUCTRPERM");
}

static answer run_ncu(char *ncu, const cli_machine *machine, attempt how, int argc, char **argv)
{
  enum { FIXED = 26 };
  char self[4096], metrics[1024] = "", device[16];
  static char csv[] = "--csv", page[] = "--page", raw[] = "raw", clock[] = "--clock-control", none[] = "none",
              units[] = "--print-units", base[] = "base", metrics_option[] = "--metrics", bench[] = "bench",
              once[] = "--once", no_tune[] = "--no-tune", device_option[] = "--device", replay[] = "--replay-mode",
              kernel[] = "kernel", application[] = "application";
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  if (length <= 0)
    return (answer){.status = -1};
  self[length] = '\0';
  snprintf(device, sizeof device, "%s", machine->device);
  for (int m = 0; m < METRICS; m++) {
    size_t used = strlen(metrics);
    if (!is_asked((metric)m, how))
      continue;
    snprintf(metrics + used, sizeof metrics - used, "%s%s", m ? "," : "", metric_names[m]);
  }
  char *const fixed[] = {ncu,
                         csv,
                         page,
                         raw,
                         clock,
                         none,
                         units,
                         base,
                         replay,
                         how == WHOLE_RUNS ? application : kernel,
                         metrics_option,
                         metrics,
                         self,
                         bench,
                         once,
                         no_tune,
                         device_option,
                         device};
  size_t count = sizeof fixed / sizeof *fixed;
  _Static_assert(sizeof fixed / sizeof *fixed < FIXED, "room for every word");
  char **words = cli_alloc((size_t)argc + FIXED, sizeof *words);
  memcpy(words, fixed, sizeof fixed);
  count += (size_t)pass_on(argc, argv, words + count);
  words[count] = NULL;
  answer a = run_program(words);
  free(words);
  return a;
}

/* The GPU that option or environment names, else the first. */
static int settle_device(cli_machine *machine)
{
  const char *variable = getenv("ESMM_DEVICE"), *what = machine->device ? "--device" : "ESMM_DEVICE";
  const char *asked = machine->device ? machine->device : variable && variable[0] ? variable : "auto";
  int status = cli_check_device(what, asked);
  if (status != CLI_GO)
    return status;
  if (strcmp(asked, "cpu") == 0)
    return cli_usage("%s: profile reads the counters of a GPU, and cpu is none", what);
  machine->device = strcmp(asked, "auto") == 0 ? "cuda" : asked;
  return CLI_GO;
}

static int profile_with(char *ncu, const cli_machine *machine, const char *csv, int argc, char **argv)
{
  cli_output output = {0};
  int status = csv ? cli_output_open(&output, "--csv", csv) : CLI_GO;
  if (status != CLI_GO)
    return status;
  profile p = {0};
  answer a = run_ncu(ncu, machine, ALL_METRICS, argc, argv);
  attempt how = ALL_METRICS;
  while (did_not_launch(&a) && how + 1 < ATTEMPTS) {
    free(a.text);
    how++;
    a = run_ncu(ncu, machine, how, argc, argv);
  }
  if (a.status == 0 && how != ALL_METRICS)
    cli_note("%s: under ncu a kernel does not launch %s",
             how == ONE_RUN ? "only the metrics of one run" : "branch efficiency is left out",
             how == ONE_RUN ? "more than once" : "with the code that counts it");
  char *copy = a.text ? strdup(a.text) : NULL; /* reading takes the text apart, and an error may have to quote it */
  if (copy)
    read_report(copy, &p);
  free(copy);
  if (a.status != 0 || p.count == 0) {
    status = explain_failure(ncu, machine, &a);
  } else if (csv) {
    write_csv(output.file, &p);
    status = cli_output_close(&output, "--csv");
  }
  if (status == CLI_GO && !(csv && strcmp(csv, "-") == 0))
    print_profile(&p);
  cli_output_discard(&output);
  free(a.text);
  free_profile(&p);
  return status == CLI_GO ? CLI_OK : status;
}

int cmd_profile(int argc, char **argv)
{
  cli_problem problem;
  const char *csv = NULL, *words[1];
  int count;
  cli_problem_init(&problem);
  const cli_option options[] = {CLI_PROBLEM_OPTIONS(&problem),
                                {NULL, CLI_HEADING, NULL, NULL, "Output", 0, 0, NULL, NULL},
                                {"csv", CLI_STRING, &csv, "FILE",
                                 "the table as CSV, names in full; '-' is stdout, instead of the table", 0, 0, NULL,
                                 NULL},
                                {0}};
  const cli_parser parser = {
      .synopsis = "profile [kernels] [options]",
      .about =
          "Runs kernels once each on a GPU under NVIDIA's Nsight Compute (ncu) and shows, for every GPU function,\n"
          "its duration and how well it used the GPU. Kernels and the product are given as for 'esmm bench'.",
      .options = options,
      .notes = CLI_PROBLEM_NOTES
      "\n"
      "What the columns say, averaged over launches\n"
      "  SM %, DRAM %: throughput, of the most there is. L2 hit %: of sectors asked for. occup. %: warps that were\n"
      "  active, of the most there can be. regs: a thread's. shared KiB: a block's, static and dynamic. branch %:\n"
      "  branches that all threads of a warp took alike. The preparation of B is among the functions. Caches are\n"
      "  emptied before each launch; the clock is left alone.\n"
      "\n"
      "ncu is looked for in PATH, /usr/local/cuda/bin and /opt/nvidia/nsight-compute; ESMM_NCU names another.\n"
      "Unless it is set, ESMM_COOPERATIVE is 0 for what ncu runs: let nothing else run on the GPU meanwhile.\n"
      "\n"
      "Examples\n"
      "  esmm profile auto --size 4096 --blockwise --density .5\n"
      "  esmm profile 25,29 --size 4096 --csv profile.csv\n",
      .max_words = 1,
      .words_are = "kernels"};
  int status = cli_parse(&parser, argc, argv, words, &count);
  if (status == CLI_GO)
    status = cli_problem_resolve(&problem, NAN);
  if (status == CLI_GO)
    status = cli_problem_spared(&problem, "--csv", csv);
  if (status == CLI_GO)
    status = settle_device(&problem.machine);
  if (status != CLI_GO)
    return status;
  char ncu[4096];
  return find_ncu(ncu, sizeof ncu) ? profile_with(ncu, &problem.machine, csv, argc, argv) : no_ncu(&problem.machine);
}
