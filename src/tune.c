/*
 * tune.c: the plan's cost constants: shipped with each kernel, measured on this machine, cached in a file.
 *
 * Measuring: every kernel that competes runs a set of products for which the terms of its cost model differ, and the
 * constants are fitted so that the relative error of the estimates is least, none of them negative. The cache is one
 * text file a machine and number of threads, or a GPU; a file that does not parse, or is of another machine or version,
 * is ignored: the shipped constants serve.
 *
 * On a GPU operands lie in its memory, and times are those of the whole call on the device.
 */
#include "cuda/cuda.h"
#include "esmm_tools.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE_MAGIC "esmm-tune 1"
#define COST_UNIT 1e18       /* the file holds whole attoseconds: decimal points follow the locale */
#define TEMPORARY_BYTES 4112 /* a path and a suffix */
#define MAX_SAMPLES 64
#define MOST_CHANGE 4.0  /* a fitted constant is at most so many times the shipped one, or so many times less */
#define PULL 0.01        /* towards the shipped constants */
#define GPU_BATCH 2e-3   /* seconds: calls that are timed together on a GPU take about so long */
#define SMALL_M_COPIES 8 /* of A when m is small: rows of B that the last run left in cache must not look cheap */

/* ------------------------------------------------------------------------------------------------ shipped */

void esmm_tune_defaults(esmm_ctx *ctx)
{
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  const int useful = cpus > 0 && cpus < ctx->threads ? (int)cpus : ctx->threads;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    const int by = kernel->backend == ESMM_CUDA ? 1 : useful; /* a GPU's constants are of the whole GPU */
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      ctx->cost[i][t] = kernel->cost[t] / (t < ESMM_COST_TERMS - 1 ? by : 1);
  }
}

int esmm_is_tuned(const esmm_ctx *ctx)
{
  return ctx && ctx->tuned;
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
  int length;
  if (ctx->cuda)
    length = snprintf(name, sizeof name, "esmm/%.96s.tune", machine);
  else
    length = snprintf(name, sizeof name, "esmm/%.96s-%s-%d.tune", machine,
                      ctx->cpu & ESMM_CPU_AVX512 ? "avx512"
                      : ctx->cpu & ESMM_CPU_AVX2 ? "avx2"
                                                 : "portable",
                      ctx->threads);
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

static bool read_cache(esmm_ctx *ctx, FILE *f)
{
  double cost[ESMM_MAX_KERNELS][ESMM_COST_TERMS];
  bool seen[ESMM_MAX_KERNELS] = {false};
  char line[512], name[64];
  memcpy(cost, ctx->cost, sizeof cost);
  if (!fgets(line, sizeof line, f) || strncmp(line, CACHE_MAGIC " ", strlen(CACHE_MAGIC) + 1) != 0)
    return false;
  line[strcspn(line, "\n")] = '\0';
  if (strcmp(line + strlen(CACHE_MAGIC) + 1, esmm_source_id()) != 0)
    return false; /* measured with other kernels */
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

/* Makes every directory of path's parent; existing ones are fine. */
static int make_parents(const char *path)
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

/* A temporary file beside the cache, whose name it fills in. */
static esmm_status open_temporary(esmm_ctx *ctx, char *temporary, size_t bytes, FILE **f)
{
  if (!ctx->tune_path[0])
    return esmm_fail(ctx, ESMM_ERR_IO, "nowhere to keep the tuning: neither XDG_CACHE_HOME nor HOME is set");
  (void)snprintf(temporary, bytes, "%s.XXXXXX", ctx->tune_path);
  int fd = make_parents(ctx->tune_path) == 0 ? mkstemp(temporary) : -1;
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
  bool ok = fprintf(f, CACHE_MAGIC " %s\n", esmm_source_id()) > 0;
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

typedef struct trial {
  int64_t m, k, n;
  esmm_generator_kind kind;
  double density_a, density_b; /* BSR: the share of blocks that B keeps; NM: 1 */
  esmm_format format;
} trial;

/* clang-format off */
#define BLOCKS(rows, cols) {.kind = ESMM_FORMAT_BSR, .block_rows = (rows), .block_cols = (cols)}
#define GROUPS(n, m, cols) {.kind = ESMM_FORMAT_NM, .keep = (n), .group = (m), .group_cols = (cols)}
#define DENSE_B {.kind = ESMM_FORMAT_DENSE}
/* clang-format on */

/* Products in which multiply-adds, packing, lists, tile starts, bytes of B and fixed costs dominate in turn. */
static const trial cpu_trials[] = {
    {32, 64, 64, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {384, 1024, 384, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {512, 64, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {512, 512, 512, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B},
    {512, 512, 512, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .25, .25, DENSE_B},
    {1024, 2048, 1024, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B},
    {512, 1024, 512, ESMM_GEN_RANDOM, .02, 1, DENSE_B},
    {512, 1024, 512, ESMM_GEN_RANDOM, .1, 1, DENSE_B},
    {1024, 1024, 512, ESMM_GEN_RANDOM, .2, 1, DENSE_B},
    {1024, 1024, 1024, ESMM_GEN_RANDOM, .02, .25, DENSE_B},
    {1, 512, 1024, ESMM_GEN_RANDOM, .5, 1, DENSE_B},
    {1, 4096, 4096, ESMM_GEN_RANDOM, 1, 1, DENSE_B},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B},
    {1, 4096, 8192, ESMM_GEN_RANDOM, .5, 1, DENSE_B},
    {1, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B},
    {4, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B},
    {4, 4096, 8192, ESMM_GEN_RANDOM, .5, 1, DENSE_B},
    {4, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, DENSE_B},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .3, 1, DENSE_B},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .1, 1, DENSE_B},
    {16, 4096, 8192, ESMM_GEN_RANDOM, .03, 1, DENSE_B},
    {128, 256, 256, ESMM_GEN_DENSE, 1, .5, BLOCKS(32, 32)},
    {512, 512, 512, ESMM_GEN_DENSE, 1, .5, BLOCKS(32, 32)},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, .25, BLOCKS(32, 32)},
    {1024, 1024, 1024, ESMM_GEN_BLOCKWISE, .5, .25, BLOCKS(64, 64)},
    {1024, 2048, 1024, ESMM_GEN_DENSE, 1, .1, BLOCKS(32, 32)},
    {512, 1024, 512, ESMM_GEN_DENSE, 1, .25, BLOCKS(16, 16)},
    {512, 512, 512, ESMM_GEN_DENSE, 1, .2, BLOCKS(8, 8)},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, .5, BLOCKS(32, 32)},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, .25, BLOCKS(64, 64)},
    {128, 256, 256, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1)},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 1)},
    {1024, 1024, 512, ESMM_GEN_BLOCKWISE, .1, 1, GROUPS(2, 4, 1)},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 16, 1)},
    {768, 768, 768, ESMM_GEN_DENSE, 1, 1, GROUPS(2, 4, 32)},
    {1, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1)},
    {16, 4096, 8192, ESMM_GEN_RANDOM, 1, 1, GROUPS(2, 4, 1)},
};
#define CPU_TRIALS ((int)(sizeof cpu_trials / sizeof cpu_trials[0]))
_Static_assert(sizeof cpu_trials / sizeof cpu_trials[0] <= MAX_SAMPLES, "raise MAX_SAMPLES");

/*
 * The same for a GPU: waves of tiles, joint k's, extraction of A, long k, few rows and fixed costs in turn. Those with
 * one B follow each other: it is made once.
 */
static const trial gpu_trials[] = {
    {256, 256, 256, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {1024, 1024, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {2048, 2048, 2048, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B},
    {1024, 16384, 1024, ESMM_GEN_BLOCKWISE, .5, 1, DENSE_B},
    {1024, 16384, 1024, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {16, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B},
    {128, 4096, 4096, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_DENSE, 1, 1, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, 1, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_DENSE, 1, .25, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .25, .25, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .5, .5, DENSE_B},
    {4096, 4096, 4096, ESMM_GEN_BLOCKWISE, .1, .1, DENSE_B},
};
#define GPU_TRIALS ((int)(sizeof gpu_trials / sizeof gpu_trials[0]))
_Static_assert(sizeof gpu_trials / sizeof gpu_trials[0] <= MAX_SAMPLES, "raise MAX_SAMPLES");

typedef struct fit {
  int count;
  double units[MAX_SAMPLES][ESMM_COST_TERMS], seconds[MAX_SAMPLES];
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
  double ratios[ESMM_MAX_KERNELS * MAX_SAMPLES];
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
 * stays within a factor of the shipped one, scaled to this machine, and is pulled a little towards it: terms that the
 * trials do not tell apart are settled so, and a disturbed machine cannot make a kernel look free. Repeated with
 * weights that fall with the residual, because one trial that something disturbed must not bend the rest.
 */
static void solve(const fit *f, double scale, double *cost)
{
  double start[ESMM_COST_TERMS], weight[MAX_SAMPLES];
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

/* A trial's operands. B serves the next trial too if that has the same. */
typedef struct bench {
  const trial *of_b;
  esmm_matrix a[SMALL_M_COPIES], b, c;
  int copies; /* of A, each with its own nonzeros */
  esmm_weights *w;
} bench;

static bool make_matrix(esmm_ctx *ctx, int64_t rows, int64_t cols, esmm_matrix *m)
{
  *m = (esmm_matrix){.rows = rows, .cols = cols, .ld = cols};
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

/* On a GPU: to its memory, with or without what it holds. */
static esmm_status move_to_device(esmm_ctx *ctx, esmm_matrix *m, bool copy)
{
  if (!ctx->cuda)
    return ESMM_OK;
  esmm_matrix there = *m;
  there.place = ESMM_DEVICE;
  there.device = esmm_cuda_get(ctx)->ordinal;
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

static void bench_free(esmm_ctx *ctx, bench *x, bool also_b)
{
  for (int i = 0; i < SMALL_M_COPIES; i++)
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

static esmm_status bench_make_b(esmm_ctx *ctx, const trial *t, bench *x)
{
  if (x->w && x->of_b->k == t->k && x->of_b->n == t->n && x->of_b->density_b == t->density_b &&
      x->of_b->format.kind == ESMM_FORMAT_DENSE && t->format.kind == ESMM_FORMAT_DENSE)
    return ESMM_OK;
  bench_free(ctx, x, true);
  x->of_b = t;
  if (!make_matrix(ctx, t->k, t->n, &x->b))
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

static esmm_status bench_make(esmm_ctx *ctx, const trial *t, bench *x)
{
  esmm_status status = bench_make_b(ctx, t, x);
  if (status == ESMM_OK)
    status = make_matrix(ctx, t->m, t->n, &x->c) ? move_to_device(ctx, &x->c, false) : no_memory(ctx, t->m, t->n);
  x->copies = t->m <= 16 && !ctx->cuda ? SMALL_M_COPIES : 1;
  for (int i = 0; status == ESMM_OK && i < x->copies; i++) {
    const esmm_generator a = {.size = sizeof a, .kind = t->kind, .seed = 10 + (uint64_t)i, .density = t->density_a};
    status = make_matrix(ctx, t->m, t->k, &x->a[i]) ? esmm_generate(ctx, &a, &x->a[i]) : no_memory(ctx, t->m, t->k);
    if (status == ESMM_OK)
      status = move_to_device(ctx, &x->a[i], true);
  }
  return status;
}

/*
 * The best of several runs, or for small m their lower quarter: which rows of B are still in cache is part of its cost.
 * Goes on until the best two agree, within reason: what disturbs a run only makes it longer.
 */
static double measure(esmm_ctx *ctx, const esmm_kernel *kernel, const bench *x, esmm_problem *p, void *scratch)
{
  double seconds[32], spent = 0.0;
  int runs = 0;
  for (int i = 0; i <= 32; i++) {
    esmm_stats stats = {.size = sizeof stats};
    p->a = x->a[i % x->copies];
    const double start = esmm_now();
    (void)kernel->run(ctx, p, scratch, &stats); /* a CPU's kernel cannot fail */
    const double now = esmm_now() - start;
    if (i == 0) /* warms caches and threads up */
      continue;
    int at = runs++;
    for (; at > 0 && now < seconds[at - 1]; at--)
      seconds[at] = seconds[at - 1];
    seconds[at] = now;
    spent += now;
    const bool agree = runs >= 4 && seconds[1] <= 1.05 * seconds[0];
    if ((agree && (runs >= 12 || spent > 0.02)) || spent > 0.2)
      break;
  }
  return seconds[x->copies > 1 ? runs / 4 : 0];
}

static esmm_status measure_cpu(esmm_ctx *ctx, const esmm_kernel *kernel, const bench *x, esmm_problem *p,
                               double *seconds)
{
  const size_t bytes = kernel->workspace(p);
  void *scratch = bytes == SIZE_MAX ? NULL : esmm_scratch(ctx, bytes);
  if (!scratch)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for %zu bytes of scratch for %s", bytes, kernel->name);
  *seconds = measure(ctx, kernel, x, p, scratch);
  return ESMM_OK;
}

/* Seconds of `calls` calls in a row, on the device. */
static esmm_status time_calls(esmm_ctx *ctx, const esmm_kernel *kernel, bench *x, esmm_timer *timer, int calls,
                              double *seconds)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = kernel->name};
  esmm_status status = esmm_timer_start(timer);
  for (int i = 0; status == ESMM_OK && i < calls; i++)
    status = esmm_matmul(ctx, &x->a[0], x->w, &x->c, &opts, NULL);
  if (status == ESMM_OK)
    status = esmm_timer_stop(timer);
  return status == ESMM_OK ? esmm_timer_seconds(timer, seconds) : status;
}

/* The best of some batches: what a call costs in a row of its like, with the launches of the next already under way. */
static esmm_status measure_gpu(esmm_ctx *ctx, const esmm_kernel *kernel, bench *x, double *seconds)
{
  enum { BATCHES = 6 };
  esmm_timer *timer;
  esmm_status status = esmm_timer_create(ctx, &timer);
  if (status != ESMM_OK)
    return status;
  double took = 0.0;
  int calls = 2; /* the first batch loads the kernel and grows the scratch, the second says how many calls to take */
  for (int i = 0; status == ESMM_OK && i < BATCHES + 2; i++) {
    status = time_calls(ctx, kernel, x, timer, calls, &took);
    const double each = took / calls;
    *seconds = i <= 2 || each < *seconds ? each : *seconds;
    if (i == 1)
      calls = (int)fmin(fmax(GPU_BATCH / each, 2.0), 64.0);
  }
  esmm_timer_free(timer);
  return status;
}

/* Runs one trial on every kernel that can and notes what it took. */
static esmm_status try_all(esmm_ctx *ctx, const trial *t, bench *x, fit *fits)
{
  esmm_status status = bench_make(ctx, t, x);
  esmm_problem p = {
      .m = t->m, .n = t->n, .k = t->k, .a = x->a[0], .c = x->c, .w = x->w, .alpha = 1.0f, .threads = ctx->threads};
  esmm_choice choices[ESMM_MAX_KERNELS];
  int chosen;
  if (status == ESMM_OK && ctx->cuda)
    status = esmm_cuda_plan(ctx, &p, NULL, NULL, choices, &chosen); /* for the sample of A */
  else if (status == ESMM_OK)
    esmm_sample_a(&p.a, p.w, &p.sample);
  for (int i = 0; status == ESMM_OK && i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    char why[160];
    if (!esmm_kernel_competes(ctx, kernel) || !esmm_plan_can_run(ctx, &p, kernel, why, sizeof why))
      continue;
    fit *f = &fits[i];
    double *units = f->units[f->count];
    memset(units, 0, sizeof f->units[0]);
    p.strip_rows = 0;
    kernel->terms(&p, ctx->cost[i], units, &p.strip_rows);
    double *seconds = &f->seconds[f->count];
    status = ctx->cuda ? measure_gpu(ctx, kernel, x, seconds) : measure_cpu(ctx, kernel, x, &p, seconds);
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
  bench x = {0};
  const trial *trials = ctx->cuda ? gpu_trials : cpu_trials;
  const int count = ctx->cuda ? GPU_TRIALS : CPU_TRIALS;
  for (int i = 0; status == ESMM_OK && i < count; i++) {
    if (progress)
      progress(user, i, count);
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
    if (save)
      status = write_cache(ctx);
  }
  esmm_mem_free(&ctx->allocator, fits, bytes);
  return status;
}
