/*
 * operand.c: contexts for the command, and where its matrices come from: files or the library's generators.
 *
 * The rules that turn options into operands stand in CLI_PROBLEM_NOTES (cli.h), which --help prints. Options that
 * contradict each other are refused: a benchmark of the wrong product is worse than none.
 */
#include "models.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>

/* ---- matrices ---- */

/* Huge pages for large matrices, like the library's buffers: neither side of a comparison may gain by them. */
static void *alloc_data(size_t bytes)
{
  const size_t page = (size_t)2 << 20;
  if (bytes < 2 * page || bytes > SIZE_MAX - page)
    return io_alloc(bytes);
  bytes = (bytes + page - 1) / page * page;
  void *memory = aligned_alloc(page, bytes);
  if (memory)
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

int cli_matrix_alloc(const char *what, int64_t rows, int64_t cols, esmm_dtype dtype, io_matrix *out)
{
  size_t bytes = 0;
  *out = (io_matrix){0};
  bool fits = rows >= 0 && cols >= 0 && !__builtin_mul_overflow((size_t)rows, (size_t)cols, &bytes) &&
              !__builtin_mul_overflow(bytes, esmm_dtype_size(dtype), &bytes);
  void *memory = fits ? alloc_data(bytes) : NULL;
  if (!memory)
    return cli_failed("%s: no memory for a matrix of %lld x %lld %s", what, (long long)rows, (long long)cols,
                      esmm_dtype_str(dtype));
  out->memory = memory;
  out->bytes = bytes;
  out->m = (esmm_matrix){.data = memory, .rows = rows, .cols = cols, .ld = cols, .dtype = dtype};
  return CLI_GO;
}

int cli_matrix_convert(esmm_ctx *ctx, const char *what, const esmm_matrix *from, esmm_dtype dtype, io_matrix *out)
{
  int status = cli_matrix_alloc(what, from->rows, from->cols, dtype, out);
  if (status != CLI_GO)
    return status;
  esmm_status copied = esmm_matrix_copy(ctx, from, &out->m);
  if (copied != ESMM_OK) {
    status = cli_status(ctx, what, copied);
    io_matrix_free(out);
  }
  return status;
}

/* ---- contexts ---- */

int cli_check_device(const char *what, const char *device)
{
  static const char *const names[] = {"auto", "cpu", "cuda"};
  enum { NAMES = sizeof names / sizeof *names };
  for (int i = 0; i < NAMES; i++)
    if (strcmp(device, names[i]) == 0)
      return CLI_GO;
  const char *number = strncmp(device, "cuda:", 5) == 0 ? device + 5 : "";
  if (number[0] && !number[strspn(number, "0123456789")] && strlen(number) <= 4)
    return CLI_GO;
  const char *near = number[0] ? NULL : cli_closest(device, names, NAMES);
  if (strcasecmp(device, "gpu") == 0 || strcasecmp(device, "cuda") == 0)
    near = "cuda";
  return near ? cli_usage("%s: %s is no device; did you mean %s?", what, device, near)
              : cli_usage("%s: %s is no device: it is auto, cpu, cuda or cuda:N, with N from 0 to 255", what, device);
}

int cli_context(const cli_machine *machine, const char *force, esmm_ctx **ctx)
{
  char error[512] = "";
  esmm_ctx_opts opts = {.size = sizeof opts,
                        .device = machine->device,
                        .threads = (int)machine->threads,
                        .force = force,
                        .error = error,
                        .error_size = sizeof error};
  *ctx = NULL;
  const char *variable = getenv("ESMM_DEVICE");
  int named = machine->device         ? cli_check_device("--device", machine->device)
              : variable && *variable ? cli_check_device("ESMM_DEVICE", variable)
                                      : CLI_GO;
  if (named != CLI_GO)
    return named;
  esmm_status status = esmm_ctx_create(ctx, &opts);
  if (status == ESMM_OK)
    return CLI_GO;
  const char *text = error[0] ? error : esmm_status_str(status);
  bool asked = status == ESMM_ERR_ARGUMENT || status == ESMM_ERR_UNKNOWN_KERNEL;
  bool absent = status == ESMM_ERR_DEVICE || status == ESMM_ERR_DRIVER;
  const char *device = machine->device ? machine->device : variable;
  if (absent && device)
    return cli_failed("%s %s: %s; cpu and auto need no GPU", machine->device ? "--device" : "ESMM_DEVICE", device,
                      text);
  return asked ? cli_usage("%s", text) : cli_failed("%s", text);
}

bool cli_on_gpu(const esmm_ctx *ctx)
{
  return strncmp(esmm_ctx_device(ctx), "cuda", 4) == 0;
}

esmm_pattern_info cli_pattern(esmm_ctx *ctx, const esmm_pattern *pattern)
{
  esmm_pattern_info info = {.size = sizeof info};
  if (pattern)
    (void)esmm_pattern_get_info(ctx, pattern, &info); /* it fails without a context alone */
  return info;
}

const char *cli_workers(const esmm_ctx *ctx)
{
  static char text[48];
  int threads = esmm_ctx_threads(ctx);
  if (cli_on_gpu(ctx))
    snprintf(text, sizeof text, "%s", esmm_ctx_device(ctx));
  else
    snprintf(text, sizeof text, "%d thread%s", threads, threads == 1 ? "" : "s");
  return text;
}

void cli_print_no_gpu(const esmm_ctx *ctx, int width, FILE *out)
{
  const char *reason = esmm_ctx_device_reason(ctx);
  if (reason[0])
    cli_print(out, CLI_FAINT, "%-*s none: %s\n", width, "GPU", reason);
}

/* ---- device memory ---- */

static int ordinal_of(const esmm_ctx *ctx)
{
  const char *colon = strchr(esmm_ctx_device(ctx), ':');
  return colon ? (int)strtol(colon + 1, NULL, 10) : 0;
}

int cli_device_alloc(esmm_ctx *ctx, const char *what, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order,
                     esmm_matrix *out)
{
  size_t bytes = 0;
  const bool gpu = cli_on_gpu(ctx);
  *out = (esmm_matrix){.rows = rows,
                       .cols = cols,
                       .ld = order == ESMM_ROW_MAJOR ? cols : rows,
                       .dtype = dtype,
                       .order = order,
                       .place = gpu ? ESMM_DEVICE : ESMM_HOST,
                       .device = gpu ? ordinal_of(ctx) : 0};
  if (rows < 0 || cols < 0 || __builtin_mul_overflow((size_t)rows, (size_t)cols, &bytes) ||
      __builtin_mul_overflow(bytes, esmm_dtype_size(dtype), &bytes))
    return cli_failed("%s: a matrix of %lld x %lld is too large", what, (long long)rows, (long long)cols);
  esmm_status status = esmm_memory_alloc(ctx, bytes ? bytes : 1, &out->data);
  if (status == ESMM_OK)
    return CLI_GO;
  out->data = NULL;
  return cli_status(ctx, what, status);
}

int cli_device_copy(esmm_ctx *ctx, const char *what, const esmm_matrix *from, esmm_dtype dtype, esmm_order order,
                    esmm_matrix *out)
{
  int status = cli_device_alloc(ctx, what, from->rows, from->cols, dtype, order, out);
  if (status != CLI_GO)
    return status;
  esmm_status copied = esmm_matrix_copy(ctx, from, out);
  if (copied == ESMM_OK)
    return CLI_GO;
  status = cli_status(ctx, what, copied);
  cli_device_free(ctx, out);
  return status;
}

void cli_device_free(esmm_ctx *ctx, esmm_matrix *matrix)
{
  esmm_memory_free(ctx, matrix->data);
  matrix->data = NULL;
}

int cli_device_view(esmm_ctx *ctx, const char *what, const esmm_matrix *host, esmm_matrix *out)
{
  *out = *host;
  return cli_on_gpu(ctx) ? cli_device_copy(ctx, what, host, host->dtype, host->order, out) : CLI_GO;
}

void cli_device_view_free(esmm_ctx *ctx, const esmm_matrix *host, esmm_matrix *view)
{
  if (view->data != host->data)
    cli_device_free(ctx, view);
}

/* ---- tuning ---- */

void cli_warn_busy_tuning(const esmm_ctx *ctx)
{
  if (esmm_tune_load(ctx) > ESMM_BUSY)
    cli_note(
        "others took %d %% of the CPUs meanwhile, so the plan may choose worse than it could; run 'esmm tune' again "
        "when the machine is idle ('esmm bench' then does so by itself)",
        esmm_tune_load(ctx));
}

int cli_tune_once(esmm_ctx *ctx)
{
  /* The constants that kernels of a GPU ship with were measured on an H200, with more care than a few seconds allow. */
  const bool shipped = cli_on_gpu(ctx) && strstr(esmm_ctx_device_name(ctx), "H200");
  if (shipped || (esmm_is_tuned(ctx) && esmm_tune_load(ctx) <= ESMM_BUSY))
    return CLI_GO;
  const char *path = esmm_tune_path(ctx);
  if (esmm_is_tuned(ctx)) {
    const int now = esmm_load(ctx);
    if (now > ESMM_BUSY) {
      cli_note(
          "the plan's constants were measured while others took %d %% of the CPUs, and they take %d %% now; they are "
          "measured again when the machine is idle",
          esmm_tune_load(ctx), now);
      return CLI_GO;
    }
    cli_note("measuring this machine for the plan again: last time others took %d %% of the CPUs", esmm_tune_load(ctx));
  } else if (path[0])
    cli_note("measuring this machine for the plan, once; the result is kept in %s", path);
  else
    cli_note("measuring this machine for the plan; neither XDG_CACHE_HOME nor HOME is set, so it is not kept");
  cli_progress progress;
  cli_progress_start(&progress, "tune");
  esmm_status status = esmm_tune(ctx, path[0] != '\0', cli_progress_update, &progress);
  if (status == ESMM_ERR_IO) { /* no place for the result: a read-only home is no reason to stop */
    cli_note("the measurement cannot be kept: %s", esmm_ctx_error(ctx));
    status = esmm_tune(ctx, 0, cli_progress_update, &progress);
  }
  cli_progress_end(&progress);
  if (status == ESMM_OK)
    cli_warn_busy_tuning(ctx);
  return status == ESMM_OK ? CLI_GO : cli_status(ctx, "tune", status);
}

/* ---- problems ---- */

void cli_problem_init(cli_problem *problem)
{
  *problem = (cli_problem){.size = 1024, .strip = 32, .seed = 1, .name_a = "--load-a", .name_b = "--load-b"};
  problem->density = problem->density_a = problem->density_b = problem->dead = NAN;
}

static bool given(double x)
{
  return !isnan(x);
}

static int check_pattern(const char *what, const char *pattern)
{
  if (pattern && (strlen(pattern) != 8 || pattern[strspn(pattern, "01")]))
    return cli_usage("%s: %s is not eight characters 0 or 1", what, pattern);
  return CLI_GO;
}

static double share_of_ones(const char *pattern)
{
  double ones = 0;
  for (; *pattern; pattern++)
    ones += *pattern == '1';
  return ones / 8;
}

static int check_options(const cli_problem *p, bool any_pattern)
{
  const char *modes[5];
  int count = 0;
  if (p->dense)
    modes[count++] = "--dense";
  if (p->random)
    modes[count++] = "--random";
  if (p->blockwise)
    modes[count++] = "--blockwise";
  if (p->has_activations)
    modes[count++] = "--activations";
  if (any_pattern && !p->blockwise)
    modes[count++] = p->pattern ? "--pattern" : p->pattern_a ? "--pattern-a" : "--pattern-b";
  if (count > 1)
    return cli_usage("%s and %s cannot both be asked for", modes[0], modes[1]);

  bool densities = given(p->density_now) || given(p->density_a) || given(p->density_b);
  if (p->pattern && (p->pattern_a || p->pattern_b))
    return cli_usage("--pattern is for both operands: it cannot stand beside %s",
                     p->pattern_a ? "--pattern-a" : "--pattern-b");
  if (any_pattern && densities)
    return cli_usage("a pattern says what the density is: give one or the other");
  if (p->dense && densities)
    return cli_usage("--dense has no zeros: give no density with it");
  if (given(p->dead) && !p->has_activations)
    return cli_usage("--dead is for --activations");
  if (p->has_size && p->has_dims)
    return cli_usage("--size and --dims cannot both be given");
  if (p->load_a && (given(p->density_a) || p->pattern_a || p->has_activations))
    return cli_usage("--load-a: a loaded A has its own zeros: give no %s with it", p->pattern_a ? "--pattern-a"
                                                                                   : p->has_activations
                                                                                       ? "--activations"
                                                                                       : "--density-a");
  if (p->tile_rows && !p->load_a)
    return cli_usage("--tile-rows repeats the rows of a loaded A: give --load-a with it");
  if (p->load_b && (given(p->density_b) || p->pattern_b))
    return cli_usage("--load-b: a loaded B has its own zeros: give no %s with it",
                     p->pattern_b ? "--pattern-b" : "--density-b");
  if (p->load_a && p->load_b && (count > 0 || densities || any_pattern))
    return cli_usage("--load-a and --load-b: both operands are loaded, nothing is left to generate");
  return CLI_GO;
}

static void set_text(cli_source *source)
{
  const esmm_generator *g = &source->generator;
  const esmm_prune_opts *prune = &source->prune;
  const char *path = source->path;
  if (prune->format.kind == ESMM_FORMAT_BSR) {
    snprintf(source->text, sizeof source->text, "blocks of %d x %d, density %g", prune->format.block_rows,
             prune->format.block_cols, prune->density);
    return;
  }
  if (prune->format.kind == ESMM_FORMAT_NM) {
    const int used =
        snprintf(source->text, sizeof source->text, "%d:%d along k", prune->format.keep, prune->format.group);
    if (prune->format.group_cols > 1)
      snprintf(source->text + used, sizeof source->text - (size_t)used, ", %d columns together",
               prune->format.group_cols);
    return;
  }
  switch (path ? -1 : (int)g->kind) {
  case ESMM_GEN_DENSE:
    snprintf(source->text, sizeof source->text, "dense");
    break;
  case ESMM_GEN_RANDOM:
    snprintf(source->text, sizeof source->text, "random, density %g", g->density);
    break;
  case ESMM_GEN_BLOCKWISE:
    snprintf(source->text, sizeof source->text, "blockwise, density %g, strips of %d", g->density, (int)g->strip);
    break;
  case ESMM_GEN_PATTERN:
    snprintf(source->text, sizeof source->text, "pattern %s", g->pattern);
    break;
  case ESMM_GEN_ACTIVATIONS:
    snprintf(source->text, sizeof source->text, "activations%s%s, density %.3g, dead %.3g", source->preset ? " " : "",
             source->preset ? source->preset : "", g->density, g->dead);
    break;
  default: /* the end of a long path says more than its start */
    snprintf(source->text, sizeof source->text, "file %s%s", strlen(path) > 80 ? "..." : "",
             strlen(path) > 80 ? path + strlen(path) - 80 : path);
  }
}

static esmm_generator generate(esmm_generator_kind kind, double density)
{
  return (esmm_generator){
      .size = sizeof(esmm_generator), .kind = kind, .density = kind == ESMM_GEN_DENSE ? 1 : density};
}

static int resolve_activations(cli_problem *p)
{
  static const char *const presets[] = {"early", "middle", "late"};
  p->a.generator = generate(ESMM_GEN_ACTIVATIONS, 0);
  p->a.preset = p->activations && p->activations[0] ? p->activations : "middle";
  for (int i = 0; i < 3; i++)
    if (strcmp(p->a.preset, presets[i]) == 0)
      return CLI_GO;
  return cli_usage("--activations: %s is none of early|middle|late", p->a.preset);
}

/* Needs a context, so it waits for one: a preset's numbers are the library's. */
static int settle_activations(esmm_ctx *ctx, cli_problem *p)
{
  cli_source *a = &p->a;
  if (a->path || a->generator.kind != ESMM_GEN_ACTIVATIONS || !a->preset)
    return CLI_GO;
  esmm_status status = esmm_generator_preset(ctx, a->preset, &a->generator);
  if (status != ESMM_OK)
    return cli_status(ctx, "--activations", status);
  bool named = p->activations && p->activations[0];
  double density = given(p->density_a) ? p->density_a : p->density_now;
  if (given(density))
    a->generator.density = density;
  if (given(p->dead) || (given(density) && !named))
    a->generator.dead = given(p->dead) ? p->dead : 0;
  if (!named && (given(density) || given(p->dead)))
    a->preset = NULL;
  if (a->generator.density > 1 - a->generator.dead) /* a feature cannot be more than always on */
    return cli_failed("--dead: with %g of the features dead, a density of %g cannot be reached", a->generator.dead,
                      a->generator.density);
  set_text(a);
  return CLI_GO;
}

static int resolve_sources(cli_problem *p, double density, bool any_pattern)
{
  bool any_density = given(density) || given(p->density_a) || given(p->density_b);
  double a = given(p->density_a) ? p->density_a : density, b = given(p->density_b) ? p->density_b : density;
  bool loads = p->load_a || p->load_b;
  bool blockwise = p->blockwise;

  if (p->has_activations) {
    p->b.generator = generate(given(p->density_b) ? ESMM_GEN_RANDOM : ESMM_GEN_DENSE, p->density_b);
    return resolve_activations(p);
  }
  if (any_pattern && !blockwise) {
    const char *pattern_a = p->pattern ? p->pattern : p->pattern_a, *pattern_b = p->pattern ? p->pattern : p->pattern_b;
    p->a.generator = generate(pattern_a ? ESMM_GEN_PATTERN : ESMM_GEN_DENSE, 0);
    p->b.generator = generate(pattern_b ? ESMM_GEN_PATTERN : ESMM_GEN_DENSE, 0);
    p->a.generator.pattern = pattern_a;
    p->b.generator.pattern = pattern_b;
    return CLI_GO;
  }
  if (any_pattern) {
    a = p->pattern || p->pattern_a ? share_of_ones(p->pattern ? p->pattern : p->pattern_a) : 1;
    b = p->pattern || p->pattern_b ? share_of_ones(p->pattern ? p->pattern : p->pattern_b) : 1;
    any_density = true;
  }
  if (!p->dense && !p->random && !blockwise) { /* no mode */
    if (any_density) {
      p->a.generator = generate(given(a) ? ESMM_GEN_RANDOM : ESMM_GEN_DENSE, a);
      double for_b = given(p->density_b) ? p->density_b : p->load_a ? density : NAN;
      p->b.generator = generate(given(for_b) ? ESMM_GEN_RANDOM : ESMM_GEN_DENSE, for_b);
      return CLI_GO;
    }
    blockwise = !loads;
  }
  esmm_generator_kind kind = p->random ? ESMM_GEN_RANDOM : blockwise ? ESMM_GEN_BLOCKWISE : ESMM_GEN_DENSE;
  double missing = any_density ? 1 : 0.5;
  p->a.generator = generate(kind, given(a) ? a : missing);
  p->b.generator = generate(kind, given(b) ? b : missing);
  p->a.generator.strip = p->b.generator.strip = p->strip;
  return CLI_GO;
}

/* The numbers of text, one after each of the characters of `marks`: "8x16" with "x" to 8 and 16. False if it is not
   so, or if one is not within 1 and most. */
static bool take_numbers(const char *text, const char *marks, int most, int *numbers)
{
  for (int i = 0;; i++, marks++) {
    char *end;
    const long number = text[0] >= '0' && text[0] <= '9' ? strtol(text, &end, 10) : 0;
    if (number < 1 || number > most)
      return false;
    numbers[i] = (int)number;
    if (!marks[0] || end[0] != marks[0])
      return !marks[0] && !end[0];
    text = end + 1;
  }
}

int cli_parse_format(const char *text, esmm_format *format)
{
  int x[3] = {0};
  *format = (esmm_format){.kind = ESMM_FORMAT_DENSE};
  if (!text || strcmp(text, "dense") == 0)
    return CLI_GO;
  const char *body = strchr(text, ':');
  if (body && strncmp(text, "bsr:", 4) == 0) {
    const bool square = take_numbers(body + 1, "", 256, x);
    if (!square && !take_numbers(body + 1, "x", 256, x))
      return cli_usage("--format: %s is not bsr:R or bsr:RxC with rows and columns of a block from 1 to 256", text);
    *format = (esmm_format){.kind = ESMM_FORMAT_BSR, .block_rows = x[0], .block_cols = square ? x[0] : x[1]};
    return CLI_GO;
  }
  const bool bare = text[0] >= '0' && text[0] <= '9'; /* 2:4, the usual name */
  if (body && (bare || strncmp(text, "nm:", 3) == 0)) {
    const char *numbers = bare ? text : body + 1;
    const bool fits = take_numbers(numbers, ":", 32, x) || take_numbers(numbers, "::", 1 << 30, x);
    if (!fits || x[0] > x[1] || x[1] > 32)
      return cli_usage("--format: %s is not nm:N:M with 1 <= N <= M <= 32, or nm:N:M:C with C columns", text);
    *format = (esmm_format){.kind = ESMM_FORMAT_NM, .keep = x[0], .group = x[1], .group_cols = x[2]};
    return CLI_GO;
  }
  return cli_usage("--format: %s is none of dense, bsr:R, bsr:RxC, nm:N:M, nm:N:M:C", text);
}

/* A generated B of a format is a dense one, pruned. */
static int resolve_format(cli_problem *p)
{
  p->prepare = (esmm_prepare_opts){.size = sizeof p->prepare, .use = (esmm_use)p->use};
  const int status = cli_parse_format(p->format, &p->prepare.format);
  const esmm_format_kind kind = p->prepare.format.kind;
  if (status != CLI_GO || kind == ESMM_FORMAT_DENSE || p->b.path)
    return status;
  if (p->b.generator.kind == ESMM_GEN_PATTERN)
    return cli_usage("--format %s says where the zeros of B are: give no pattern for it", p->format);
  if (kind == ESMM_FORMAT_NM && given(p->density_b))
    return cli_usage("--format %s says how dense B is: give no --density-b with it", p->format);
  p->b.prune =
      (esmm_prune_opts){.size = sizeof p->b.prune, .format = p->prepare.format, .density = p->b.generator.density};
  p->b.generator = generate(ESMM_GEN_DENSE, 1);
  return CLI_GO;
}

static bool is_blockwise(const cli_source *source)
{
  return !source->path && source->generator.kind == ESMM_GEN_BLOCKWISE;
}

int cli_problem_spared(const cli_problem *p, const char *what, const char *path)
{
  const int status = cli_output_spares(what, path, "--load-a", p->load_a);
  return status == CLI_GO ? cli_output_spares(what, path, "--load-b", p->load_b) : status;
}

int cli_problem_resolve(cli_problem *p, double density)
{
  bool any_pattern = p->pattern || p->pattern_a || p->pattern_b;
  p->density_now = given(density) ? density : p->density;
  int status = check_pattern("--pattern", p->pattern);
  if (status == CLI_GO)
    status = check_pattern("--pattern-a", p->pattern_a);
  if (status == CLI_GO)
    status = check_pattern("--pattern-b", p->pattern_b);
  if (status == CLI_GO)
    status = check_options(p, any_pattern);
  if (status != CLI_GO)
    return status;

  p->a = (cli_source){.path = p->load_a};
  p->b = (cli_source){.path = p->load_b};
  status = resolve_sources(p, p->density_now, any_pattern);
  if (status != CLI_GO)
    return status;
  if (p->has_strip && !is_blockwise(&p->a) && !is_blockwise(&p->b))
    return cli_usage("--strip is for --blockwise");
  status = resolve_format(p);
  if (status != CLI_GO)
    return status;
  p->a.generator.operand = ESMM_OPERAND_A;
  p->b.generator.operand = ESMM_OPERAND_B;
  p->a.generator.seed = p->seed;
  p->b.generator.seed = p->seed + 0x9e3779b97f4a7c15u; /* another stream for B */
  set_text(&p->a);
  set_text(&p->b);
  if (p->tile_rows) {
    size_t used = strlen(p->a.text);
    snprintf(p->a.text + used, sizeof p->a.text - used, ", repeated to %s", cli_count(p->tile_rows, "row"));
  }

  p->m = p->has_dims ? p->dims[0] : p->size;
  p->k = p->has_dims ? p->dims[1] : p->size;
  p->n = p->has_dims ? p->dims[2] : p->size;
  return CLI_GO;
}

static int load(esmm_ctx *ctx, const char *what, const cli_problem *p, const cli_source *source, int64_t rows,
                int64_t cols, io_matrix *out)
{
  return model_read_word(ctx, what, source->path, source == &p->b, (model_k_axis)p->k_axis, p->has_dims || p->has_size,
                         rows, cols, out);
}

static int make(esmm_ctx *ctx, const char *what, const cli_source *source, int64_t rows, int64_t cols, esmm_dtype dtype,
                io_matrix *out)
{
  int status = cli_matrix_alloc(what, rows, cols, dtype, out);
  if (status != CLI_GO)
    return status;
  esmm_status made = esmm_generate(ctx, &source->generator, &out->m);
  if (made == ESMM_OK && source->prune.format.kind != ESMM_FORMAT_DENSE)
    made = esmm_prune(ctx, &out->m, &source->prune, NULL);
  return made == ESMM_OK ? CLI_GO : cli_status(ctx, what, made);
}

/* A loaded matrix stays in its own dtype unless another was asked for. */
static int settle_dtype(esmm_ctx *ctx, const char *what, bool asked, esmm_dtype dtype, io_matrix *matrix)
{
  if (!asked || matrix->m.dtype == dtype)
    return CLI_GO;
  io_matrix converted;
  int status = cli_matrix_convert(ctx, what, &matrix->m, dtype, &converted);
  if (status != CLI_GO)
    return status;
  io_matrix_free(matrix);
  *matrix = converted;
  return CLI_GO;
}

/* Repeats the rows until there are `rows`; in its dtype, row-major. */
static int tile(esmm_ctx *ctx, int64_t rows, io_matrix *matrix)
{
  const esmm_matrix *from = &matrix->m;
  if (from->rows == 0)
    return cli_usage("--tile-rows: A has no rows that could be repeated");
  if (rows < from->rows)
    return cli_usage("--tile-rows: %lld is too few, A has %s: give %lld or more", (long long)rows,
                     cli_count(from->rows, "row"), (long long)from->rows);
  io_matrix tiled;
  int status = cli_matrix_alloc("--tile-rows", rows, from->cols, from->dtype, &tiled);
  esmm_status copied = ESMM_OK;
  for (int64_t done = 0; done < rows && status == CLI_GO; done += from->rows) {
    esmm_matrix part = *from, to = tiled.m;
    part.rows = to.rows = rows - done < from->rows ? rows - done : from->rows;
    to.data = (char *)to.data + (size_t)(done * to.ld) * esmm_dtype_size(to.dtype);
    copied = esmm_matrix_copy(ctx, &part, &to);
    if (copied != ESMM_OK)
      status = cli_status(ctx, "--tile-rows", copied);
  }
  if (status != CLI_GO) {
    io_matrix_free(&tiled);
    return status;
  }
  io_matrix_free(matrix);
  *matrix = tiled;
  return CLI_GO;
}

int cli_problem_make(esmm_ctx *ctx, cli_problem *p, io_matrix *a, io_matrix *b)
{
  const bool asked_a = p->has_dtype || p->has_dtype_a, asked_b = p->has_dtype || p->has_dtype_b;
  const int dtype_a = p->has_dtype_a ? p->dtype_a : p->dtype, dtype_b = p->has_dtype_b ? p->dtype_b : p->dtype;
  const bool fixed = p->has_dims || p->has_size;
  *a = (io_matrix){0};
  if (b)
    *b = (io_matrix){0};
  int status = settle_activations(ctx, p);

  if (status == CLI_GO && p->a.path) {
    status = load(ctx, p->name_a, p, &p->a, p->m, p->k, a);
    if (status == CLI_GO)
      status = settle_dtype(ctx, p->name_a, asked_a, (esmm_dtype)dtype_a, a);
    if (status == CLI_GO && p->tile_rows)
      status = tile(ctx, p->tile_rows, a);
    p->m = a->m.rows;
    p->k = a->m.cols;
  }
  if (status == CLI_GO && b && p->b.path) {
    status = load(ctx, p->name_b, p, &p->b, p->k, p->n, b);
    if (status == CLI_GO)
      status = settle_dtype(ctx, p->name_b, asked_b, (esmm_dtype)dtype_b, b);
    if (status == CLI_GO && p->a.path && !fixed && b->m.rows != p->k)
      status = cli_failed("%s: %s is %lld x %lld, but A is %lld x %lld: B needs %s", p->name_b, p->b.path,
                          (long long)b->m.rows, (long long)b->m.cols, (long long)p->m, (long long)p->k,
                          cli_count(p->k, "row"));
    if (status == CLI_GO) {
      p->k = b->m.rows;
      p->n = b->m.cols;
    }
  }
  if (status == CLI_GO && !p->a.path)
    status = make(ctx, "A", &p->a, p->m, p->k, (esmm_dtype)dtype_a, a);
  if (status == CLI_GO && b && !p->b.path)
    status = make(ctx, "B", &p->b, p->k, p->n, (esmm_dtype)dtype_b, b);
  if (status == CLI_GO) {
    p->dtype_a = (int)a->m.dtype;
    p->dtype_b = b ? (int)b->m.dtype : dtype_b;
    p->dtype_c = p->has_dtype_c ? p->dtype_c : p->has_dtype ? p->dtype : ESMM_F32;
  }
  return status;
}
