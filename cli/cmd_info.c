/*
 * cmd_info.c: esmm info: the machine, for reports of problems and measurements.
 */
#include "../io/tensors.h"
#include "bench/blas.h"
#include "bench/cublas.h"
#include "cli.h"

#include <sched.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CACHES = 8 };

typedef struct cache {
  char level[8], type[16], size[16];
} cache;

typedef struct machine {
  long cpus_online;
  int cpus_allowed;
  double memory; /* bytes */
  cache caches[CACHES];
  int cache_count;
  char cpu[128], driver[96]; /* driver: of a GPU; "" without one */
  char libraries[BLAS_LIBRARIES + 1][96];
  int library_count;
} machine;

/* One word of a file of /sys; false where there is none. */
static bool read_word(const char *directory, const char *name, char *out, size_t bytes)
{
  char path[160], format[16];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  snprintf(format, sizeof format, "%%%zus", bytes - 1);
  FILE *file = fopen(path, "r");
  if (!file)
    return false;
  bool found = fscanf(file, format, out) == 1;
  fclose(file);
  return found;
}

/* In a GPU context the CPU's name is another context's. */
static void name_cpu(const esmm_ctx *ctx, char *out, size_t bytes)
{
  esmm_ctx *other = NULL;
  esmm_ctx_opts opts = {.size = sizeof opts, .device = "cpu", .no_tuning_cache = 1};
  if (cli_on_gpu(ctx) && esmm_ctx_create(&other, &opts) != ESMM_OK)
    return;
  snprintf(out, bytes, "%s", esmm_ctx_device_name(other ? other : ctx));
  esmm_ctx_free(other);
}

/* In a separate process: OpenBLAS starts threads when it is opened, and if the system refused them it waits for them
   for ever at the process's end. */
static void find_blas(machine *m)
{
  int ends[2];
  if (pipe(ends) != 0)
    return;
  const pid_t child = fork();
  if (child == 0) {
    blas_library libraries[BLAS_LIBRARIES];
    const int count = blas_open(libraries, 1);
    for (int i = 0; i < count; i++)
      dprintf(ends[1], "%s\n", libraries[i].title);
    _exit(0);
  }
  close(ends[1]);
  FILE *titles = fdopen(ends[0], "r");
  while (titles && m->library_count < BLAS_LIBRARIES &&
         fgets(m->libraries[m->library_count], sizeof m->libraries[0], titles)) {
    char *title = m->libraries[m->library_count++];
    title[strcspn(title, "\n")] = '\0';
  }
  if (titles)
    fclose(titles);
  if (child > 0)
    waitpid(child, NULL, 0);
}

/* What `esmm bench` would compare with on this device. */
static void find_libraries(const esmm_ctx *ctx, machine *m)
{
  cublas_library cublas;
  if (cli_on_gpu(ctx)) {
    if (cublas_open(&cublas))
      snprintf(m->libraries[m->library_count++], sizeof m->libraries[0], "%s", cublas.title);
    cublas_close(&cublas);
    return;
  }
  find_blas(m);
}

static void examine(const esmm_ctx *ctx, machine *m)
{
  *m = (machine){.cpus_online = sysconf(_SC_NPROCESSORS_ONLN)};
  name_cpu(ctx, m->cpu, sizeof m->cpu);
  find_libraries(ctx, m);
  if (cli_on_gpu(ctx))
    cublas_driver_text(m->driver, sizeof m->driver);
  cpu_set_t set;
  m->cpus_allowed = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)m->cpus_online;
  m->memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
  for (int i = 0; i < CACHES; i++) {
    char directory[96];
    cache *c = &m->caches[m->cache_count];
    snprintf(directory, sizeof directory, "/sys/devices/system/cpu/cpu0/cache/index%d", i);
    if (read_word(directory, "level", c->level, sizeof c->level) &&
        read_word(directory, "type", c->type, sizeof c->type) && read_word(directory, "size", c->size, sizeof c->size))
      m->cache_count++;
  }
}

static void count_kernels(const esmm_ctx *ctx, int *available, int *all)
{
  *available = 0;
  *all = esmm_kernel_count();
  for (int i = 0; i < *all; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) == ESMM_OK && info.available)
      ++*available;
  }
}

static void add_row(cli_table *table, const char *name, const char *text)
{
  cli_table_cell(table, CLI_BOLD, "%s", name);
  cli_table_cell(table, CLI_PLAIN, "%s", text);
}

static void print_table(const esmm_ctx *ctx, const machine *m)
{
  cli_table *table = cli_table_new("ll", NULL);
  char text[512];
  int available, all;
  count_kernels(ctx, &available, &all);
  snprintf(text, sizeof text, "%s, source %s", esmm_version_str(), esmm_source_id());
  add_row(table, "esmm", text);
  add_row(table, "device", esmm_ctx_device(ctx));
  const bool gpu = cli_on_gpu(ctx);
  const char *reason = esmm_ctx_device_reason(ctx);
  if (reason[0]) {
    snprintf(text, sizeof text, "none: %s", reason);
    add_row(table, "GPU", text);
  }
  add_row(table, gpu ? "GPU" : "CPU", esmm_ctx_device_name(ctx));
  if (m->driver[0])
    add_row(table, "driver", m->driver);
  add_row(table, "features", esmm_ctx_features(ctx)[0] ? esmm_ctx_features(ctx) : "none that kernels use");
  if (gpu)
    add_row(table, "CPU", m->cpu);
  snprintf(text, sizeof text, "%ld online, %d for this process", m->cpus_online, m->cpus_allowed);
  add_row(table, "CPUs", text);
  text[0] = '\0';
  for (int i = 0; i < m->cache_count; i++) {
    const cache *c = &m->caches[i];
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "%sL%s%s %s", used ? ", " : "", c->level,
             strcmp(c->type, "Data") == 0          ? " data"
             : strcmp(c->type, "Instruction") == 0 ? " instruction"
                                                   : "",
             c->size);
  }
  add_row(table, "caches", text[0] ? text : "the system does not say");
  add_row(table, "memory", cli_bytes(m->memory));
  snprintf(text, sizeof text, "%d", esmm_ctx_threads(ctx));
  add_row(table, "threads", text);
  snprintf(text, sizeof text, "%d of %d available ('esmm list' shows them)", available, all);
  add_row(table, "kernels", text);
  const char *path = esmm_tune_path(ctx);
  add_row(table, "tuning cache", path[0] ? path : "none: neither XDG_CACHE_HOME nor HOME is set");
  if (!esmm_is_tuned(ctx))
    snprintf(text, sizeof text, "no: the plan uses shipped constants; run 'esmm tune'");
  else if (gpu)
    snprintf(text, sizeof text, "yes");
  else if (esmm_tune_load(ctx) <= ESMM_BUSY)
    snprintf(text, sizeof text, "yes, machine idle");
  else
    snprintf(text, sizeof text, "yes, while others took %d %% of the CPUs: run 'esmm tune' when they do not",
             esmm_tune_load(ctx));
  add_row(table, "tuned", text);
  for (int i = 0; i < m->library_count; i++)
    add_row(table, i == 0 ? "dense library" : "", m->libraries[i]);
  if (m->library_count == 0)
    add_row(table, "dense library",
            gpu ? "none: 'esmm bench' has no baseline (install cuBLAS, or set ESMM_CUBLAS)"
                : "none: 'esmm bench' has no baseline (install OpenBLAS or BLIS)");
  add_row(table, "safetensors", io_safetensors_missing()[0] ? io_safetensors_missing() : "can be read");
  add_row(table, ".pt", io_pt_missing()[0] ? io_pt_missing() : "can be read");
  cli_table_print(table, stdout);
  cli_table_free(table);
}

static void json_field(const char *name, const char *text)
{
  printf("  \"%s\": ", name);
  cli_json_string(stdout, text);
  printf(",\n");
}

static void print_json(const esmm_ctx *ctx, const machine *m)
{
  printf("{\n");
  json_field("version", esmm_version_str());
  json_field("source_id", esmm_source_id());
  json_field("device", esmm_ctx_device(ctx));
  json_field("cpu", m->cpu);
  if (cli_on_gpu(ctx))
    json_field("gpu", esmm_ctx_device_name(ctx));
  else
    printf("  \"gpu\": null,\n");
  json_field("gpu_driver", m->driver);
  json_field("no_gpu_because", esmm_ctx_device_reason(ctx));
  json_field("features", esmm_ctx_features(ctx));
  printf("  \"cpus_online\": %ld,\n  \"cpus_allowed\": %d,\n", m->cpus_online, m->cpus_allowed);
  printf("  \"memory_bytes\": %.0f,\n  \"caches\": [", m->memory);
  for (int i = 0; i < m->cache_count; i++) {
    printf("%s{\"level\": ", i ? ", " : "");
    cli_json_string(stdout, m->caches[i].level);
    printf(", \"type\": ");
    cli_json_string(stdout, m->caches[i].type);
    printf(", \"size\": ");
    cli_json_string(stdout, m->caches[i].size);
    printf("}");
  }
  printf("],\n  \"threads\": %d,\n  \"kernels\": [", esmm_ctx_threads(ctx));
  bool first = true;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    if (esmm_kernel_get(ctx, i, &info) != ESMM_OK || !info.available)
      continue;
    printf("%s", first ? "" : ", ");
    cli_json_string(stdout, info.name);
    first = false;
  }
  printf("],\n");
  json_field("tune_path", esmm_tune_path(ctx));
  printf("  \"reads_safetensors\": %s,\n  \"reads_pt\": %s,\n", io_safetensors_missing()[0] ? "false" : "true",
         io_pt_missing()[0] ? "false" : "true");
  printf("  \"tuned\": %s,\n", esmm_is_tuned(ctx) ? "true" : "false");
  if (esmm_is_tuned(ctx) && !cli_on_gpu(ctx)) /* per cent of the CPUs; of a GPU it says nothing */
    printf("  \"tune_load\": %d,\n", esmm_tune_load(ctx));
  else
    printf("  \"tune_load\": null,\n");
  printf("  \"dense_libraries\": [");
  for (int i = 0; i < m->library_count; i++) {
    printf("%s", i ? ", " : "");
    cli_json_string(stdout, m->libraries[i]);
  }
  printf("]\n}\n");
}

int cmd_info(int argc, char **argv)
{
  bool json = false;
  cli_machine where = {0};
  const cli_option options[] = {
      {"json", CLI_FLAG, &json, NULL, "as one JSON object", 0, 0, NULL, NULL}, CLI_MACHINE_OPTIONS(&where), {0}};
  const cli_parser parser = {.synopsis = "info [--json] [--device NAME] [--threads N]",
                             .about =
                                 "Shows version, machine, features, kernels, tuning, and the dense libraries found.",
                             .options = options};
  int count;
  int status = cli_parse(&parser, argc, argv, NULL, &count);
  if (status != CLI_GO)
    return status;
  esmm_ctx *ctx;
  status = cli_context(&where, NULL, &ctx);
  if (status != CLI_GO)
    return status;

  machine m;
  examine(ctx, &m);
  (json ? print_json : print_table)(ctx, &m);
  esmm_ctx_free(ctx);
  return CLI_OK;
}
