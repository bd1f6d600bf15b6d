/*
 * gpu16.h: what the tests of 16-bit operands on a GPU share: both dtypes, and every kernel of the GPU that takes one of
 * them with dense weights, the plan's own choice last.
 */
#ifndef ESMM_TEST_GPU16_H
#define ESMM_TEST_GPU16_H

#include "gpu.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const esmm_dtype DTYPES[] = {ESMM_BF16, ESMM_F16};

/* ---- kernels ---- */

/* Those of this GPU for operands of one dtype, B in one format; the last is the plan. */
typedef struct kernels {
  int count;
  const char *force[97]; /* NULL: the plan */
  const char *name[97];
  unsigned flags[97];
  int64_t ran[97];
} kernels;

static inline kernels kernels_of_format(esmm_dtype dtype, esmm_format_kind format)
{
  kernels all = {0};
  char part[8];
  (void)snprintf(part, sizeof part, "_%s", esmm_dtype_str(dtype));
  for (int i = 0; i < esmm_kernel_count() && all.count < 96; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (!info.available || !strstr(info.name, part) || !(info.formats & 1u << format))
      continue;
    all.flags[all.count] = info.flags;
    all.force[all.count] = all.name[all.count] = info.name;
    all.count++;
  }
  assert_true(all.count > 0);
  all.name[all.count++] = "auto";
  return all;
}

static inline kernels kernels_of(esmm_dtype dtype)
{
  return kernels_of_format(dtype, ESMM_FORMAT_DENSE);
}

static inline bool skips(const kernels *all, int i)
{
  return all->flags[i] & ESMM_KERNEL_SKIPS;
}

static inline void expect_all_ran(const kernels *all)
{
  for (int i = 0; i < all->count; i++)
    if (all->ran[i] == 0)
      fail_msg("%s ran none of these products", all->name[i]);
}

static inline bool is_decode(const char *name)
{
  return strncmp(name, "decode", 6) == 0;
}

/* It skips elements, not k's. */
static inline bool is_half(const char *name)
{
  return strncmp(name, "half_", 5) == 0;
}

#endif
