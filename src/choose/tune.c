/*
 * tune.c: the plan's cost constants: shipped with each kernel, measured on this machine, cached in a file.
 *
 * Measuring: every competing kernel runs products that differ in the terms of its cost model, and the constants, none
 * of them negative, are fitted to the least relative error of the estimates. The cache is one text file a machine and
 * number of threads, or a GPU; a file that does not parse, or is of another machine or version, is ignored: the shipped
 * constants serve. It says how busy other processes kept the machine, as a reason to tune again.
 *
 * The backend says which products, and how kernels are timed. Operands lie in its memory where it has some.
 */
#include "choose/tune.h"
#include "choose/recall.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE_MAGIC "esmm-tune 2"
#define COST_UNIT 1e18       /* the file holds whole attoseconds: decimal points follow the locale */
#define TEMPORARY_BYTES 4112 /* a path and a suffix */
#define MOST_CHANGE 4.0      /* times the shipped constant, or its inverse: bounds of a fitted one */
#define PULL 0.01            /* towards the shipped constants */
#define LOAD_SECONDS 0.1     /* for which esmm_load measures */
#define TRIAL_SECONDS 0.01   /* the same before each trial: two or three turns of a scheduler */

/* ------------------------------------------------------------------------------------------------ shipped */

/* Constants are in use from now on. */
static void take_costs(esmm_ctx *ctx)
{
  const unsigned char *bytes = (const unsigned char *)ctx->cost;
  ctx->cost_id = 0;
  for (size_t i = 0; i < sizeof ctx->cost; i++)
    ctx->cost_id = (ctx->cost_id ^ bytes[i]) * 0x100000001b3u;
  esmm_recall_clear_shapes(ctx);
}

void esmm_tune_defaults(esmm_ctx *ctx)
{
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  const int useful = cpus > 0 && cpus < ctx->threads ? (int)cpus : ctx->threads;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    const int by = kernel->backend->threads ? useful : 1; /* else constants are of the whole device */
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      ctx->cost[i][t] = kernel->cost[t] / (t < ESMM_COST_TERMS - 1 ? by : 1);
  }
  take_costs(ctx);
}

int esmm_is_tuned(const esmm_ctx *ctx)
{
  return ctx && ctx->tuned;
}

int esmm_tune_load(const esmm_ctx *ctx)
{
  return ctx && ctx->tuned ? ctx->tune_load : 0;
}

static double load_for(esmm_ctx *ctx, double seconds)
{
  return ctx->backend->load ? ctx->backend->load(ctx, seconds) : 0.0;
}

static int in_percent(double share)
{
  return (int)lround(100.0 * fmin(fmax(share, 0.0), 1.0));
}

int esmm_load(esmm_ctx *ctx)
{
  return ctx ? in_percent(load_for(ctx, LOAD_SECONDS)) : 0;
}

const char *esmm_tune_path(const esmm_ctx *ctx)
{
  return ctx ? ctx->tune_path : "";
}

/* ------------------------------------------------------------------------------------------------ the cache file */

/* "amd-epyc-9634-84-core-processor" */
static void slug(const char *name, char *out, size_t bytes)
{
  size_t n = 0;
  for (; *name && n + 1 < bytes; name++) {
    const char c = *name;
    const int letter = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (letter)
      out[n++] = c;
    else if (c >= 'A' && c <= 'Z')
      out[n++] = (char)(c - 'A' + 'a');
    else if (n && out[n - 1] != '-')
      out[n++] = '-';
  }
  while (n && out[n - 1] == '-')
    n--;
  out[n] = '\0';
}

static void set_path(esmm_ctx *ctx)
{
  const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  char name[160], machine[128];
  slug(ctx->device_name, machine, sizeof machine);
  char suffix[32] = "";
  ctx->backend->tune_suffix(ctx, suffix, sizeof suffix);
  const int length = snprintf(name, sizeof name, "esmm/%.96s%s.tune", machine, suffix);
  ctx->tune_path[0] = '\0';
  if (length < 0)
    return;
  int total = 0;
  if (cache && cache[0] == '/') /* the XDG rules: a relative path is invalid and to be ignored */
    total = snprintf(ctx->tune_path, sizeof ctx->tune_path, "%s/%s", cache, name);
  else if (home && home[0] == '/')
    total = snprintf(ctx->tune_path, sizeof ctx->tune_path, "%s/.cache/%s", home, name);
  if (total < 0 || (size_t)total >= sizeof ctx->tune_path)
    ctx->tune_path[0] = '\0';
}

/* "load 38": per cent. */
static bool read_load(FILE *f, int *load)
{
  static const char word[] = "load ";
  char line[32], *end;
  if (!fgets(line, sizeof line, f) || strncmp(line, word, sizeof word - 1) != 0)
    return false;
  const char *digits = line + sizeof word - 1;
  const long value = strtol(digits, &end, 10);
  *load = (int)value;
  return *digits >= '0' && *digits <= '9' && *end == '\n' && value <= 100;
}

static bool read_cache(esmm_ctx *ctx, FILE *f)
{
  int load;
  double cost[ESMM_MAX_KERNELS][ESMM_COST_TERMS];
  bool seen[ESMM_MAX_KERNELS] = {false};
  char line[512], name[64];
  memcpy(cost, ctx->cost, sizeof cost);
  if (!fgets(line, sizeof line, f) || strncmp(line, CACHE_MAGIC " ", strlen(CACHE_MAGIC) + 1) != 0)
    return false;
  line[strcspn(line, "\n")] = '\0';
  if (strcmp(line + strlen(CACHE_MAGIC) + 1, esmm_source_id()) != 0)
    return false; /* measured with other kernels */
  if (!read_load(f, &load))
    return false;
  while (fgets(line, sizeof line, f)) {
    int used = 0;
    if (sscanf(line, "%63s%n", name, &used) != 1)
      return false;
    const char *rest = line + used;
    for (int i = 0; i < esmm_registry_count(); i++) {
      if (strcmp(esmm_registry_at(i)->name, name) != 0)
        continue;
      seen[i] = true;
      for (int t = 0; t < ESMM_COST_TERMS; t++) {
        char *end;
        const long long units = strtoll(rest, &end, 10);
        if (end == rest || units < 0 || units > (long long)COST_UNIT)
          return false;
        cost[i][t] = (double)units / COST_UNIT;
        if (cost[i][t] == 0.0 && ctx->cost[i][t] > 0.0)
          return false; /* no fit gives that: nothing is free */
        rest = end;
      }
    }
  }
  for (int i = 0; i < esmm_registry_count(); i++) {
    if (esmm_kernel_competes(ctx, esmm_registry_at(i)) && !seen[i])
      return false;
  }
  memcpy(ctx->cost, cost, sizeof cost);
  ctx->tune_load = load;
  take_costs(ctx);
  return true;
}

void esmm_tune_find(esmm_ctx *ctx)
{
  set_path(ctx);
  /* Whatever lies at that path must not hold the caller up: a pipe, say. */
  const int fd = ctx->tune_path[0] ? open(ctx->tune_path, O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1;
  struct stat about;
  FILE *f = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) ? fdopen(fd, "r") : NULL;
  if (f) {
    ctx->tuned = read_cache(ctx, f);
    (void)fclose(f);
  } else if (fd >= 0) {
    (void)close(fd);
  }
}

int esmm_tune_make_parents(const char *path)
{
  char part[4096];
  (void)snprintf(part, sizeof part, "%s", path);
  for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    if (mkdir(part, 0777) != 0 && errno != EEXIST)
      return -1;
    *slash = '/';
  }
  return 0;
}

/* A temporary file beside the cache; fills in its name. */
static esmm_status open_temporary(esmm_ctx *ctx, char *temporary, size_t bytes, FILE **f)
{
  if (!ctx->tune_path[0])
    return esmm_fail(ctx, ESMM_ERR_IO, "nowhere to keep the tuning: neither XDG_CACHE_HOME nor HOME is set");
  (void)snprintf(temporary, bytes, "%s.XXXXXX", ctx->tune_path);
  int fd = esmm_tune_make_parents(ctx->tune_path) == 0 ? mkstemp(temporary) : -1;
  *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (*f)
    return ESMM_OK;
  const int reason = errno;
  if (fd >= 0) {
    (void)close(fd);
    (void)unlink(temporary);
  }
  return esmm_fail(ctx, ESMM_ERR_IO, "%.300s: %s; set XDG_CACHE_HOME to a directory that can be written",
                   ctx->tune_path, strerror(reason));
}

/* Whether the cache can be written, before time is spent on what would be in it. */
static esmm_status try_cache(esmm_ctx *ctx)
{
  char temporary[TEMPORARY_BYTES];
  FILE *f;
  const esmm_status status = open_temporary(ctx, temporary, sizeof temporary, &f);
  if (status == ESMM_OK) {
    (void)fclose(f);
    (void)unlink(temporary);
  }
  return status;
}

static esmm_status write_cache(esmm_ctx *ctx)
{
  char temporary[TEMPORARY_BYTES];
  FILE *f;
  const esmm_status status = open_temporary(ctx, temporary, sizeof temporary, &f);
  if (status != ESMM_OK)
    return status;
  bool ok = fprintf(f, CACHE_MAGIC " %s\nload %d\n", esmm_source_id(), ctx->tune_load) > 0;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (!esmm_kernel_competes(ctx, kernel))
      continue;
    ok = ok && fprintf(f, "%s", kernel->name) > 0;
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      ok = ok && fprintf(f, " %lld", llround(fmin(ctx->cost[i][t], 1.0) * COST_UNIT)) > 0;
    ok = ok && fprintf(f, "\n") > 0;
  }
  ok = fflush(f) == 0 && ok;
  ok = fsync(fileno(f)) == 0 && ok;
  ok = fclose(f) == 0 && ok;
  if (!ok || rename(temporary, ctx->tune_path) != 0) {
    const int reason = errno;
    (void)unlink(temporary);
    return esmm_fail(ctx, ESMM_ERR_IO, "%.300s: %s", ctx->tune_path, strerror(reason));
  }
  return ESMM_OK;
}

/* ------------------------------------------------------------------------------------------------ measuring */

typedef struct fit {
  int count;
  double units[ESMM_MOST_TRIALS][ESMM_COST_TERMS], seconds[ESMM_MOST_TRIALS];
} fit;

static double estimate(const double *units, const double *cost)
{
  double seconds = 0.0;
  for (int t = 0; t < ESMM_COST_TERMS; t++)
    seconds += units[t] * cost[t];
  return seconds;
}

static int by_value(const void *x, const void *y)
{
  const double a = *(const double *)x, b = *(const double *)y;
  return a < b ? -1 : a > b;
}

/* How much slower than the shipped constants say this machine is, over all kernels and trials: the middle ratio. */
static double machine_scale(const esmm_ctx *ctx, const fit *fits)
{
  double ratios[ESMM_MAX_KERNELS * ESMM_MOST_TRIALS];
  size_t count = 0;
  for (int k = 0; k < esmm_registry_count(); k++)
    for (int i = 0; i < fits[k].count; i++)
      ratios[count++] = fits[k].seconds[i] / estimate(fits[k].units[i], ctx->cost[k]);
  if (count == 0)
    return 1.0;
  qsort(ratios, count, sizeof ratios[0], by_value);
  return ratios[count / 2];
}

/*
 * Least squares of sum(units * cost) / seconds = 1 by coordinate descent: the problem is tiny and convex. Each constant
 * stays within a factor of the shipped one, scaled to this machine, and is pulled a little towards it: this settles
 * terms that the trials cannot separate, and a disturbed machine cannot make a kernel look free. Repeated with weights
 * that fall with the residual, so that one disturbed trial does not bend the rest.
 */
static void solve(const fit *f, double scale, double *cost)
{
  double start[ESMM_COST_TERMS], weight[ESMM_MOST_TRIALS];
  for (int t = 0; t < ESMM_COST_TERMS; t++)
    cost[t] = start[t] = scale * cost[t];
  for (int i = 0; i < f->count; i++)
    weight[i] = 1.0;
  for (int pass = 0; pass < 8; pass++) {
    for (int round = 0; round < 300; round++)
      for (int t = 0; t < ESMM_COST_TERMS; t++) {
        double square = 0.0, top = 0.0;
        for (int i = 0; i < f->count; i++) {
          const double x = f->units[i][t] / f->seconds[i];
          const double rest = 1.0 - estimate(f->units[i], cost) / f->seconds[i] + cost[t] * x;
          top += weight[i] * rest * x;
          square += weight[i] * x * x;
        }
        if (square > 0.0)
          cost[t] = fmin(fmax((top + PULL * square * start[t]) / ((1.0 + PULL) * square), start[t] / MOST_CHANGE),
                         start[t] * MOST_CHANGE);
      }
    for (int i = 0; i < f->count; i++) {
      const double residual = estimate(f->units[i], cost) / f->seconds[i] - 1.0;
      weight[i] = 1.0 / (1.0 + residual * residual / 0.04);
    }
  }
}

/* With room for fp32, whatever its dtype. */
static bool make_matrix(esmm_ctx *ctx, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_matrix *m)
{
  *m = (esmm_matrix){.rows = rows, .cols = cols, .ld = cols, .dtype = dtype};
  m->data = esmm_mem_alloc(&ctx->allocator, (size_t)(rows * cols) * sizeof(float));
  return m->data != NULL;
}

static void free_matrix(esmm_ctx *ctx, esmm_matrix *m)
{
  if (m->place == ESMM_DEVICE)
    esmm_memory_free(ctx, m->data);
  else
    esmm_mem_free(&ctx->allocator, m->data, (size_t)(m->rows * m->cols) * sizeof(float));
  m->data = NULL;
}

/* To the device's memory, where it has some, with or without what it holds. */
static esmm_status move_to_device(esmm_ctx *ctx, esmm_matrix *m, bool copy)
{
  if (!ctx->backend->memory)
    return ESMM_OK;
  esmm_matrix there = *m;
  there.place = ESMM_DEVICE;
  there.device = ctx->ordinal;
  esmm_status status = esmm_memory_alloc(ctx, (size_t)(m->rows * m->cols) * sizeof(float), &there.data);
  if (status == ESMM_OK && copy)
    status = esmm_matrix_copy(ctx, m, &there);
  if (status != ESMM_OK) {
    esmm_memory_free(ctx, there.data);
    return status;
  }
  free_matrix(ctx, m);
  *m = there;
  return ESMM_OK;
}

static void bench_free(esmm_ctx *ctx, esmm_tune_job *x, bool also_b)
{
  for (int i = 0; i < ESMM_TUNE_COPIES; i++)
    free_matrix(ctx, &x->a[i]);
  free_matrix(ctx, &x->c);
  if (also_b) {
    free_matrix(ctx, &x->b);
    esmm_weights_free(x->w);
    x->w = NULL;
  }
}

static esmm_status no_memory(esmm_ctx *ctx, int64_t rows, int64_t cols)
{
  return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a %lld x %lld trial", (long long)rows, (long long)cols);
}

static esmm_status bench_make_b(esmm_ctx *ctx, const esmm_trial *t, esmm_tune_job *x)
{
  if (x->w && x->of_b->k == t->k && x->of_b->n == t->n && x->of_b->density_b == t->density_b &&
      x->of_b->dtype == t->dtype && x->of_b->format.kind == ESMM_FORMAT_DENSE && t->format.kind == ESMM_FORMAT_DENSE)
    return ESMM_OK;
  bench_free(ctx, x, true);
  x->of_b = t;
  if (!make_matrix(ctx, t->k, t->n, t->dtype, &x->b))
    return no_memory(ctx, t->k, t->n);
  const bool dense = t->format.kind == ESMM_FORMAT_DENSE;
  const esmm_prune_opts prune = {.size = sizeof prune, .format = t->format, .density = t->density_b};
  const esmm_prepare_opts opts = {.size = sizeof opts, .format = t->format};
  const esmm_generator b = {.size = sizeof b,
                            .kind = dense && t->density_b < 1 ? ESMM_GEN_BLOCKWISE : ESMM_GEN_DENSE,
                            .operand = ESMM_OPERAND_B,
                            .seed = 2,
                            .density = t->density_b};
  esmm_status status = esmm_generate(ctx, &b, &x->b);
  if (status == ESMM_OK && !dense)
    status = esmm_prune(ctx, &x->b, &prune, NULL);
  if (status == ESMM_OK)
    status = move_to_device(ctx, &x->b, true);
  if (status == ESMM_OK)
    status = esmm_prepare(ctx, &x->b, &opts, &x->w);
  return status;
}

static esmm_status bench_make(esmm_ctx *ctx, const esmm_trial *t, esmm_tune_job *x)
{
  esmm_status status = bench_make_b(ctx, t, x);
  if (status == ESMM_OK)
    status =
        make_matrix(ctx, t->m, t->n, t->dtype, &x->c) ? move_to_device(ctx, &x->c, false) : no_memory(ctx, t->m, t->n);
  x->copies = t->m <= 16 && ctx->backend->threads ? ESMM_TUNE_COPIES : 1;
  for (int i = 0; status == ESMM_OK && i < x->copies; i++) {
    const esmm_generator a = {.size = sizeof a, .kind = t->kind, .seed = 10 + (uint64_t)i, .density = t->density_a};
    status = make_matrix(ctx, t->m, t->k, t->dtype, &x->a[i]) ? esmm_generate(ctx, &a, &x->a[i])
                                                              : no_memory(ctx, t->m, t->k);
    if (status == ESMM_OK)
      status = move_to_device(ctx, &x->a[i], true);
  }
  return status;
}

/* Is a kernel measured in this trial, if it can do the product? */
static bool meant(const esmm_ctx *ctx, const esmm_trial *t, const esmm_kernel *kernel)
{
  return esmm_kernel_competes(ctx, kernel) && (t->dtype == ESMM_F32 || kernel->dtypes & ESMM_DTYPE_BIT(t->dtype));
}

static bool meant_for_any(const esmm_ctx *ctx, const esmm_trial *t)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    if (meant(ctx, t, esmm_registry_at(i)))
      return true;
  return false;
}

/* Runs one trial on every kernel that can and notes what it took. */
static esmm_status try_all(esmm_ctx *ctx, const esmm_trial *t, esmm_tune_job *x, fit *fits)
{
  if (!meant_for_any(ctx, t))
    return ESMM_OK;
  esmm_status status = bench_make(ctx, t, x);
  esmm_problem p = {.ctx = ctx,
                    .m = t->m,
                    .n = t->n,
                    .k = t->k,
                    .a = x->a[0],
                    .c = x->c,
                    .w = x->w,
                    .alpha = 1.0f,
                    .threads = ctx->threads};
  if (status == ESMM_OK)
    status = ctx->backend->tune_sample(ctx, &p);
  for (int i = 0; status == ESMM_OK && i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    char why[160];
    if (!meant(ctx, t, kernel) || !esmm_plan_can_run(&p, kernel, why, sizeof why))
      continue;
    fit *f = &fits[i];
    double *units = f->units[f->count];
    memset(units, 0, sizeof f->units[0]);
    p.variant = 0;
    kernel->terms(kernel, &p, ctx->cost[i], units, &p.variant);
    double *seconds = &f->seconds[f->count];
    status = ctx->backend->tune_measure(ctx, kernel, x, &p, seconds);
    p.a = x->a[0];
    f->count += status == ESMM_OK;
    if (status == ESMM_ERR_UNSUPPORTED) /* a library that does not start: it keeps the shipped constants */
      status = ESMM_OK;
  }
  bench_free(ctx, x, false);
  return status;
}

esmm_status esmm_tune(esmm_ctx *ctx, int save, void (*progress)(void *user, int done, int total), void *user)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  const esmm_trial *trials = ctx->backend->trials;
  int count = 0;
  while (trials && trials[count].m > 0)
    count++;
  if (count == 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s has nothing to tune", ctx->device);
  if (!ctx->tune_path[0])
    set_path(ctx);
  if (save) {
    const esmm_status writable = try_cache(ctx);
    if (writable != ESMM_OK)
      return writable;
  }
  const size_t bytes = ESMM_MAX_KERNELS * sizeof(fit);
  fit *fits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!fits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for tuning");
  memset(fits, 0, bytes);
  esmm_status status = ESMM_OK;
  esmm_tune_job x = {0};
  double load = 0.0;
  for (int i = 0; status == ESMM_OK && i < count; i++) {
    if (progress)
      progress(user, i, count);
    load += load_for(ctx, TRIAL_SECONDS) / count;
    status = try_all(ctx, &trials[i], &x, fits);
  }
  bench_free(ctx, &x, true);
  if (status == ESMM_OK) {
    if (progress)
      progress(user, count, count);
    esmm_tune_defaults(ctx);
    const double scale = machine_scale(ctx, fits);
    for (int i = 0; i < esmm_registry_count(); i++)
      if (fits[i].count > 0)
        solve(&fits[i], scale, ctx->cost[i]);
    ctx->tuned = true;
    ctx->tune_load = in_percent(load);
    take_costs(ctx);
    if (save)
      status = write_cache(ctx);
  }
  esmm_mem_free(&ctx->allocator, fits, bytes);
  return status;
}
