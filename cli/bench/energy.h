/*
 * energy.h: how much energy the device has taken, as a counter in joules.
 *
 * A GPU's is its board's, by NVIDIA's management library (NVML), opened at run time and never linked. A CPU's is that
 * of its packages, by the kernel's powercap files (RAPL). Both count all that happens there, other programs' work too.
 */
#ifndef ESMM_CLI_ENERGY_H
#define ESMM_CLI_ENERGY_H

#include <stdbool.h>
#include <stdint.h>

enum { ENERGY_PACKAGES = 16 };

typedef struct energy_package {
  char path[400];     /* of its energy_uj */
  uint64_t last;      /* what it said last */
  uint64_t range;     /* it starts again at 0 after this; 0: not known */
  double microjoules; /* since it was opened */
} energy_package;

typedef struct energy_meter {
  const char *source; /* "rapl", "nvml_energy", "nvml_power": for records; NULL: there is none */
  char reason[320];   /* why there is none, or what went wrong last */
  int failures;       /* products in a row whose energy could not be measured */
  /* a CPU's */
  energy_package packages[ENERGY_PACKAGES];
  int package_count;
  /* a GPU's */
  void *device;
  int (*shutdown)(void);
  int (*get_energy)(void *, unsigned long long *); /* millijoules since the driver was loaded */
  int (*get_power)(void *, unsigned *);            /* milliwatts now */
  unsigned long long first;                        /* of get_energy */
  double joules, watts, when;                      /* of get_power: the sum so far, and its last sample */
} energy_meter;

/* Both: false where there is nothing to read, and meter->reason says why. energy_close() in both cases. */
bool energy_open_cpu(energy_meter *meter);              /* ESMM_POWERCAP names another /sys/class/powercap */
bool energy_open_gpu(energy_meter *meter, int ordinal); /* as CUDA counts; ESMM_NVML names another library */
/* Joules since it was opened. Sampled power is added up between calls, which must not be far apart then. */
bool energy_read(energy_meter *meter, double *joules);
const char *energy_title(const energy_meter *meter); /* what was measured, for people */
void energy_close(energy_meter *meter);

#endif
