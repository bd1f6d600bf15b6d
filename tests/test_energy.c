/*
 * test_energy.c: the command's counters of energy (cli/bench/energy.h): on powercap directories that the test makes and
 * changes, and on an NVML of the tests' own.
 */
#include "bench/energy.h"
#include "cli.h"
#include "fake_gpu.h"
#include "scratch.h"

#include <math.h>
#include <time.h>

static void put(const char *directory, const char *file, const char *text)
{
  char path[128];
  (void)mkdir(in_dir(directory), 0755);
  snprintf(path, sizeof path, "%s/%s", directory, file);
  put_file(in_dir(path), text, strlen(text));
}

static void put_package(const char *directory, const char *name, const char *energy, const char *range)
{
  put(directory, "name", name);
  put(directory, "energy_uj", energy);
  put(directory, "max_energy_range_uj", range);
}

static void said(const energy_meter *e, const char *text)
{
  assert_null(e->source);
  if (!strstr(e->reason, text))
    fail_msg("the reason is '%s', without '%s'", e->reason, text);
}

static int fresh(void **state)
{
  const int made = make_dir(state);
  setenv("ESMM_POWERCAP", dir, 1);
  unsetenv("ESMM_NVML");
  unsetenv("ESMM_FAKE_NVML");
  unsetenv("ESMM_FAKE_WATTS");
  unsetenv("ESMM_FAKE_STEP");
  return made;
}

static void packages_are_added_and_their_parts_are_not(void **state)
{
  (void)state;
  energy_meter e;
  double joules = -1;
  put_package("intel-rapl:0", "package-0\n", "1000000\n", "262143328850\n");
  put_package("intel-rapl:1", "package-1\n", "5\n", "262143328850\n");
  put_package("intel-rapl:0:0", "core\n", "77\n", "262143328850\n");
  put_package("intel-rapl:2", "psys\n", "99\n", "262143328850\n");
  assert_true(energy_open_cpu(&e));
  assert_string_equal(e.source, "rapl");
  assert_true(energy_read(&e, &joules));
  assert_true(joules == 0);
  put("intel-rapl:0", "energy_uj", "3500000\n");
  put("intel-rapl:1", "energy_uj", "250005\n");
  put("intel-rapl:0:0", "energy_uj", "99000000\n");
  put("intel-rapl:2", "energy_uj", "99000000\n");
  assert_true(energy_read(&e, &joules));
  assert_true(fabs(joules - 2.75) < 1e-9);
  energy_close(&e);
}

static void a_counter_that_wraps_goes_on(void **state)
{
  (void)state;
  energy_meter e;
  double joules;
  put_package("intel-rapl:0", "package-0\n", "65000000\n", "65532610\n");
  assert_true(energy_open_cpu(&e));
  put("intel-rapl:0", "energy_uj", "1000000\n");
  assert_true(energy_read(&e, &joules));
  assert_true(fabs(joules - 1.53261) < 1e-9);
  put("intel-rapl:0", "energy_uj", "2000000\n");
  assert_true(energy_read(&e, &joules));
  assert_true(fabs(joules - 2.53261) < 1e-9);
  energy_close(&e);
}

static void a_counter_that_goes_back_without_a_range_is_an_error(void **state)
{
  (void)state;
  energy_meter e;
  double joules;
  put_package("intel-rapl:0", "package-0\n", "65000000\n", "nothing\n");
  assert_true(energy_open_cpu(&e));
  put("intel-rapl:0", "energy_uj", "64000000\n");
  assert_false(energy_read(&e, &joules));
  assert_non_null(strstr(e.reason, "backwards"));
  energy_close(&e);
}

static void no_packages_is_a_reason(void **state)
{
  (void)state;
  energy_meter e;
  double joules;
  assert_false(energy_open_cpu(&e));
  said(&e, "no package");
  assert_false(energy_read(&e, &joules));
  energy_close(&e);
  put_package("intel-rapl:0", "psys\n", "1\n", "10\n");
  assert_false(energy_open_cpu(&e));
  said(&e, "no package");
  energy_close(&e);
  setenv("ESMM_POWERCAP", "/nowhere/at/all", 1);
  assert_false(energy_open_cpu(&e));
  said(&e, "/nowhere/at/all has no package");
  energy_close(&e);
}

static void what_may_not_be_read_says_what_to_do(void **state)
{
  (void)state;
  energy_meter e;
  put_package("intel-rapl:0", "package-0\n", "1\n", "10\n");
  assert_int_equal(chmod(in_dir("intel-rapl:0/energy_uj"), 0), 0);
  const uid_t user = geteuid();
  if (user == 0) /* root may read everything */
    assert_int_equal(seteuid(65534), 0);
  const bool opened = energy_open_cpu(&e);
  if (user == 0)
    assert_int_equal(seteuid(user), 0);
  assert_false(opened);
  said(&e, "run this as root, or chmod a+r");
  energy_close(&e);
}

static void what_is_no_number_is_an_error(void **state)
{
  (void)state;
  static const char *const texts[] = {"", "watts\n", "-5\n", "12x\n", "99999999999999999999999\n"};
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    energy_meter e;
    put_package("intel-rapl:0", "package-0\n", texts[i], "10\n");
    assert_false(energy_open_cpu(&e));
    said(&e, "cannot be read");
    energy_close(&e);
  }
}

/* ---- a GPU ---- */

static void wait_a_while(void)
{
  const struct timespec pause = {.tv_nsec = 200 * 1000 * 1000};
  (void)nanosleep(&pause, NULL);
}

static void a_board_is_counted(void **state)
{
  (void)state;
  static const char *const ways[] = {"", "energy"}, *const sources[] = {"nvml_energy", "nvml_power"};
  for (int i = 0; i < 2; i++) {
    energy_meter e;
    double before, after;
    setenv("ESMM_FAKE_NVML", ways[i], 1);
    setenv("ESMM_FAKE_WATTS", "500", 1);
    setenv("ESMM_FAKE_STEP", "1", 1);
    if (!energy_open_gpu(&e, 0))
      fail_msg("%s", e.reason);
    assert_string_equal(e.source, sources[i]);
    const double start = cli_now();
    assert_true(energy_read(&e, &before));
    wait_a_while();
    assert_true(energy_read(&e, &after));
    const double most = 500 * (cli_now() - start) + 1;
    if (!(after - before >= 95 && after - before <= most))
      fail_msg("%s: %g J in %g s", sources[i], after - before, cli_now() - start);
    energy_close(&e);
  }
}

static void what_a_gpu_lacks_is_a_reason(void **state)
{
  (void)state;
  energy_meter e;
  setenv("ESMM_FAKE_NVML", "power", 1);
  assert_false(energy_open_gpu(&e, 0));
  said(&e, "this GPU has no nvmlDeviceGetPowerUsage");
  energy_close(&e);
  setenv("ESMM_FAKE_NVML", "init", 1);
  assert_false(energy_open_gpu(&e, 0));
  said(&e, "nvmlInit gave status 9");
  energy_close(&e);
  unsetenv("ESMM_FAKE_NVML");
  fake->devices = 2;
  assert_false(energy_open_gpu(&e, 1)); /* NVML has none there */
  said(&e, "nvmlDeviceGetHandleByPciBusId gave status 6");
  energy_close(&e);
  assert_false(energy_open_gpu(&e, 5));
  said(&e, "cuda:5");
  energy_close(&e);
  setenv("ESMM_NVML", "/nowhere/libnvidia-ml.so.1", 1);
  assert_false(energy_open_gpu(&e, 0));
  said(&e, "NVML cannot be opened");
  energy_close(&e);
  setenv("ESMM_NVML", "libcuda.so.1", 1);
  assert_false(energy_open_gpu(&e, 0));
  said(&e, "is no NVML");
  energy_close(&e);
}

int main(int argc, char **argv)
{
  (void)argc;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(packages_are_added_and_their_parts_are_not, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(a_counter_that_wraps_goes_on, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(a_counter_that_goes_back_without_a_range_is_an_error, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(no_packages_is_a_reason, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(what_may_not_be_read_says_what_to_do, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(what_is_no_number_is_an_error, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(a_board_is_counted, fresh, remove_dir),
      cmocka_unit_test_setup_teardown(what_a_gpu_lacks_is_a_reason, fresh, remove_dir),
  };
  if (strcmp(use_fake(argv), "with") == 0)
    reset();
  return cmocka_run_group_tests(tests, NULL, NULL);
}
