/*
 * energy.c: counters of energy: the powercap files of a CPU, NVML of a GPU.
 *
 * Since Linux 5.10 only root may read energy_uj, virtual machines mostly have no such files, and machines without an
 * NVIDIA driver have no NVML. None of that is a failure: the meter gives the reason.
 *
 * powercap has a directory for each package (intel-rapl:0, AMD's too) and one for parts of it (intel-rapl:0:0), which
 * the package counts already; psys, where there is one, counts the packages and more.
 */
#include "energy.h"

#include "cli.h"

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

/* ---- a CPU's packages ---- */

/* A whole number that fills a file. errno says why not; 0: it was no number. */
static bool read_number(const char *path, uint64_t *out)
{
  char text[64] = "", *end;
  FILE *file = fopen(path, "r");
  if (!file)
    return false;
  errno = 0;
  const bool any = fgets(text, sizeof text, file) != NULL;
  const int trouble = errno;
  fclose(file);
  errno = trouble;
  if (!any || text[0] < '0' || text[0] > '9')
    return false;
  *out = strtoull(text, &end, 10);
  return errno == 0 && (*end == '\n' || !*end);
}

static bool is_package(const char *directory)
{
  char path[400], name[64] = "";
  snprintf(path, sizeof path, "%.380s/name", directory);
  FILE *file = fopen(path, "r");
  const bool any = file && fgets(name, sizeof name, file);
  if (file)
    fclose(file);
  return any && strncmp(name, "package", strlen("package")) == 0;
}

static bool cannot_read(energy_meter *meter, const char *path)
{
  if (errno == EACCES || errno == EPERM)
    snprintf(meter->reason, sizeof meter->reason, "%.150s is for root alone: run this as root, or chmod a+r that file",
             path);
  else
    snprintf(meter->reason, sizeof meter->reason, "%.150s cannot be read: %.100s", path,
             errno ? strerror(errno) : "it has no number");
  return false;
}

static bool add_package(energy_meter *meter, const char *directory)
{
  energy_package *package = &meter->packages[meter->package_count];
  char path[400];
  if (meter->package_count == ENERGY_PACKAGES || !is_package(directory))
    return true;
  snprintf(package->path, sizeof package->path, "%.380s/energy_uj", directory);
  if (!read_number(package->path, &package->last))
    return cannot_read(meter, package->path);
  snprintf(path, sizeof path, "%.370s/max_energy_range_uj", directory);
  if (!read_number(path, &package->range))
    package->range = 0;
  meter->package_count++;
  return true;
}

bool energy_open_cpu(energy_meter *meter)
{
  const char *asked = getenv("ESMM_POWERCAP"), *root = asked && asked[0] ? asked : "/sys/class/powercap";
  char pattern[300];
  glob_t found = {0};
  bool all = true;
  *meter = (energy_meter){0};
  snprintf(pattern, sizeof pattern, "%.260s/intel-rapl:*", root);
  if (glob(pattern, 0, NULL, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc && all; i++)
      all = add_package(meter, found.gl_pathv[i]);
  globfree(&found);
  if (!all)
    return false;
  if (meter->package_count == 0) {
    snprintf(meter->reason, sizeof meter->reason,
             "%.150s has no package: the kernel shows no RAPL counters here, as in most virtual machines", root);
    return false;
  }
  meter->source = "rapl";
  return true;
}

static bool read_packages(energy_meter *meter, double *joules)
{
  *joules = 0;
  for (int i = 0; i < meter->package_count; i++) {
    energy_package *package = &meter->packages[i];
    uint64_t now;
    if (!read_number(package->path, &now))
      return cannot_read(meter, package->path);
    if (now >= package->last)
      package->microjoules += (double)(now - package->last);
    else if (package->range >= package->last) /* past its end once: it is read too often for twice */
      package->microjoules += (double)(package->range - package->last) + (double)now;
    else {
      snprintf(meter->reason, sizeof meter->reason,
               "%.150s went backwards, and no max_energy_range_uj says where it wraps", package->path);
      return false;
    }
    package->last = now;
    *joules += 1e-6 * package->microjoules;
  }
  return true;
}

/* ---- a GPU's board ---- */

enum { NOT_SUPPORTED = 3 }; /* of nvml.h: NVML_ERROR_NOT_SUPPORTED */

static bool find(void *file, const char *name, void *function)
{
  void *symbol = file ? dlsym(file, name) : NULL;
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

/* The driver and NVML number devices differently, but agree on the place on the bus. */
static bool bus_of(energy_meter *meter, int ordinal, char *out, int bytes)
{
  int (*init)(unsigned), (*get)(int *, int), (*get_bus)(char *, int, int), device = 0;
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  const bool all = find(driver, "cuInit", &init) && find(driver, "cuDeviceGet", &get) &&
                   find(driver, "cuDeviceGetPCIBusId", &get_bus);
  if (all && init(0) == 0 && get(&device, ordinal) == 0 && get_bus(out, bytes, device) == 0)
    return true;
  snprintf(meter->reason, sizeof meter->reason, "the driver does not say where cuda:%d is on the bus", ordinal);
  return false;
}

static bool nvml_failed(energy_meter *meter, const char *call, int status)
{
  snprintf(meter->reason, sizeof meter->reason,
           status == NOT_SUPPORTED ? "this GPU has no %.80s" : "%.80s gave status %d", call, status);
  return false;
}

bool energy_open_gpu(energy_meter *meter, int ordinal)
{
  const char *asked = getenv("ESMM_NVML"), *name = asked && asked[0] ? asked : "libnvidia-ml.so.1";
  int (*init)(void), (*get_device)(const char *, void **);
  char bus[32];
  unsigned milliwatts = 0;
  *meter = (energy_meter){0};
  void *file = dlopen(name, RTLD_NOW | RTLD_LOCAL); /* never closed, as the driver */
  if (!file) {
    snprintf(meter->reason, sizeof meter->reason, "NVML cannot be opened: %.200s", dlerror());
    return false;
  }
  if (!find(file, "nvmlInit_v2", &init) || !find(file, "nvmlShutdown", &meter->shutdown) ||
      !find(file, "nvmlDeviceGetHandleByPciBusId_v2", &get_device)) {
    meter->shutdown = NULL;
    snprintf(meter->reason, sizeof meter->reason, "%.200s is no NVML", name);
    return false;
  }
  if (!bus_of(meter, ordinal, bus, sizeof bus)) {
    meter->shutdown = NULL;
    return false;
  }
  int status = init();
  if (status != 0) {
    meter->shutdown = NULL;
    return nvml_failed(meter, "nvmlInit", status);
  }
  status = get_device(bus, &meter->device);
  if (status != 0)
    return nvml_failed(meter, "nvmlDeviceGetHandleByPciBusId", status);
  if (find(file, "nvmlDeviceGetTotalEnergyConsumption", &meter->get_energy) &&
      meter->get_energy(meter->device, &meter->first) == 0) {
    meter->source = "nvml_energy";
    return true;
  }
  meter->get_energy = NULL; /* before Volta */
  if (!find(file, "nvmlDeviceGetPowerUsage", &meter->get_power))
    return nvml_failed(meter, "nvmlDeviceGetPowerUsage", NOT_SUPPORTED);
  status = meter->get_power(meter->device, &milliwatts);
  if (status != 0)
    return nvml_failed(meter, "nvmlDeviceGetPowerUsage", status);
  meter->watts = 1e-3 * milliwatts;
  meter->when = cli_now();
  meter->source = "nvml_power";
  return true;
}

static bool read_board(energy_meter *meter, double *joules)
{
  unsigned long long now = 0;
  unsigned milliwatts = 0;
  if (meter->get_energy) {
    const int status = meter->get_energy(meter->device, &now);
    *joules = 1e-3 * ((double)now - (double)meter->first);
    return status == 0 || nvml_failed(meter, "nvmlDeviceGetTotalEnergyConsumption", status);
  }
  const int status = meter->get_power(meter->device, &milliwatts);
  const double when = cli_now(), watts = 1e-3 * milliwatts;
  if (status != 0)
    return nvml_failed(meter, "nvmlDeviceGetPowerUsage", status);
  meter->joules += 0.5 * (meter->watts + watts) * (when - meter->when);
  meter->watts = watts;
  meter->when = when;
  *joules = meter->joules;
  return true;
}

/* ---- both ---- */

bool energy_read(energy_meter *meter, double *joules)
{
  if (!meter->source)
    return false;
  return meter->package_count ? read_packages(meter, joules) : read_board(meter, joules);
}

const char *energy_title(const energy_meter *meter)
{
  if (!meter->source)
    return "not known";
  return meter->package_count ? "of the CPU's packages, by RAPL, other programs' too"
         : meter->get_energy  ? "of the whole GPU board, by NVML's counter"
                              : "of the whole GPU board, by NVML's power, sampled";
}

void energy_close(energy_meter *meter)
{
  if (meter->shutdown)
    (void)meter->shutdown();
  *meter = (energy_meter){0};
}
