/*
 * test_cuda_densities.c: what a call on a GPU learns of A beside the densities of strips: elements, overflow of groups
 * of four, and the counts of a pattern that another product has left. On the fake driver.
 */
#include "recall_rig.h"

/* A kernel of strips of 8 rows needs A's elements counted, which the kernel that runs before it does not report: then A
   is sampled. Without that it would never be known to be the faster one. */
static void elements_are_counted_for_strips_of_8_rows(void **state)
{
  (void)state;
  rig x;
  start(&x);
  double *fine = cost_of(&x, "fine_bf16_sm90a");
  fine[ESMM_COST_TERMS - 1] = ZEROS_SECONDS;
  const double zeros = seconds_of(&x, "fine_bf16_sm90a", 0);
  fine[0] = 1e-8;
  fine[0] *= 1e-3 / (seconds_of(&x, "fine_bf16_sm90a", 1) - zeros);
  expect_strips(&x, 0.3); /* joint's turn */
  gpu.strip = 0.3f;
  gpu.element = 0.0028f;
  int joint = 0, i = 0;
  for (; i < CALLS && strcmp(gpu.product, "esmm_fine16_bf16") != 0; i++) {
    call(&x, NULL, NULL);
    joint += ran_joint();
  }
  assert_true(i < CALLS && joint > 0);
  gpu.strip = 1.0f; /* A is full now: its elements are no longer what they were */
  gpu.element = 1.0f;
  for (i = 0; i < CALLS && !ran_dense(); i++)
    call(&x, NULL, NULL);
  assert_true(i < CALLS);
  stop(&x);
}

/* A kernel that A's overflow decides about: with none it is cheaper than the library, with much it is dearer. Kernels
   that report do not count it, so a sample is taken first; an unknown share counts as much. */
static void overflow_is_asked_for(void **state)
{
  (void)state;
  rig x;
  start(&x);
  double *half = cost_of(&x, "half_bf16_sm90a");
  half[ESMM_COST_TERMS - 1] = 0.3 * LIBRARY_SECONDS;
  half[0] = 1e-6;
  half[1] = LIBRARY_SECONDS / (0.01 * M * K * N);
  half[0] *= LIBRARY_SECONDS / (seconds_of(&x, "half_bf16_sm90a", 1) - half[ESMM_COST_TERMS - 1]); /* both halves */
  for (int i = 0; i < CALLS; i++) {
    call(&x, NULL, NULL);
    assert_true(strcmp(gpu.product, "esmm_half16_bf16") != 0 && gpu.self == 0);
    assert_true(i > 0 || gpu.samples == 1);
  }
  const float overflow[] = {0.0f, 0.5f, 0.001f};
  for (int i = 0; i < 3; i++) {
    gpu.overflow = overflow[i];
    for (int j = 0; j < CALLS; j++)
      call(&x, NULL, NULL);
    assert_string_equal(gpu.product, i == 1 ? "gemm" : "esmm_half16_bf16");
  }
  stop(&x);
}

/* The pattern that an earlier product left tells the first call, which samples nothing; what it says is remembered, so
   that no later call waits for one. */
static void handed_over_patterns_tell(void **state)
{
  (void)state;
  for (int full = 0; full < 2; full++) {
    rig x;
    start(&x);
    esmm_pattern *pattern = hand_over(&x, full ? 1.0f : 0.05f);
    esmm_matmul_opts opts = {.size = sizeof opts, .a_pattern = pattern};
    call(&x, &opts, NULL);
    assert_true(full ? ran_dense() : ran_joint());
    assert_int_equal(gpu.samples + gpu.self, 0);
    const esmm_recollection r = recall_of(&x, M);
    assert_true(r.known && fabs(r.strip_density_a - (full ? 1.0 : 0.05)) < 1e-3);
    esmm_pattern_free(pattern);
    opts.a_pattern = pattern = hand_over(&x, -1.0f); /* in the same memory, and not counted yet */
    const double began = esmm_now();
    call(&x, &opts, NULL);
    assert_true(full ? ran_dense() : ran_joint());
    assert_true(esmm_now() - began < 1.0);
    esmm_pattern_free(pattern);
    stop(&x);
  }
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(elements_are_counted_for_strips_of_8_rows), TEST(overflow_is_asked_for),
                                    TEST(handed_over_patterns_tell)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda densities, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda densities", with, NULL, NULL);
}
