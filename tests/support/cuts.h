/*
 * cuts.h: where a CPU kernel cuts a product, asked of the kernel's own code: the files cuts_*.c include the
 * kernels' headers and call the functions that lay their blocks out.
 */
#ifndef ESMM_TEST_CUTS_H
#define ESMM_TEST_CUTS_H

#include "kernel.h"

#include <string.h>

enum { CUTS = 3 };

/* Lengths along m, n and k after which something new begins: a block, a band, a chain of sums. Unused ones are 0. */
typedef struct cuts {
  int64_t of[3][CUTS];
} cuts;

/* Of any CPU kernel; p->variant is what the kernel's terms() said. */
cuts cuts_of(const esmm_kernel *kernel, const esmm_problem *p);
/* Is the product cut anywhere? p->sample is filled in; p->variant need not be. */
bool cuts_any(const esmm_kernel *kernel, esmm_problem *p);

cuts cuts_portable(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_avx2(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_avx512(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_pairs(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_decode(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_nm(const esmm_kernel *kernel, const esmm_problem *p);
cuts cuts_amx(const esmm_kernel *kernel, const esmm_problem *p);

static inline bool cuts_idea(const esmm_kernel *kernel, const char *idea)
{
  return strncmp(kernel->name, idea, strlen(idea)) == 0;
}

#endif
