/*
 * fake_nvml.c: libnvidia-ml.so.1 for tests: one GPU, in the place on the bus that fake_cuda.c gives cuda:0, that takes
 * ESMM_FAKE_WATTS (default 300) at every moment. Its counter moves every ESMM_FAKE_STEP milliseconds (default 20; 0:
 * never). ESMM_FAKE_NVML says what it lacks: "energy" its counter, "power" that and its power, "init" all of it;
 * "once": its counter fails when it is read for the third time; "soon": from then on.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device);
EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules);
EXPORT int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);

static int started, reads;

static double number(const char *variable, double otherwise)
{
  const char *text = getenv(variable);
  return text && text[0] ? strtod(text, NULL) : otherwise;
}

static int lacks(const char *what)
{
  const char *asked = getenv("ESMM_FAKE_NVML");
  return asked && strcmp(asked, what) == 0;
}

int nvmlInit_v2(void)
{
  if (lacks("init"))
    return DRIVER_NOT_LOADED;
  started++;
  return SUCCESS;
}

int nvmlShutdown(void)
{
  started--;
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device)
{
  *device = &started;
  return started > 0 && strcmp(bus, "0000:01:00.0") == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules)
{
  struct timespec now;
  const double step = 1e-3 * number("ESMM_FAKE_STEP", 20);
  if (device != &started || started == 0 || lacks("energy") || lacks("power"))
    return NOT_SUPPORTED;
  reads++;
  if ((reads == 3 && lacks("once")) || (reads >= 3 && lacks("soon")))
    return GPU_IS_LOST;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  const double seconds = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
  *millijoules = 1000;
  if (step > 0)
    *millijoules = (unsigned long long)(1e3 * number("ESMM_FAKE_WATTS", 300) * step * floor(seconds / step));
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
  if (device != &started || started == 0 || lacks("power"))
    return NOT_SUPPORTED;
  *milliwatts = (unsigned)(1e3 * number("ESMM_FAKE_WATTS", 300));
  return SUCCESS;
}
