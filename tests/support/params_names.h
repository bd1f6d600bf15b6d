/*
 * params_names.h: the parameters of GPU kernels by name, for texts that are compared: nested structs as
 * epilogue.c.cols, elements of arrays as units.1.cols. Of tensor maps it is what the fake driver writes there.
 */
#ifndef ESMM_TEST_PARAMS_NAMES_H
#define ESMM_TEST_PARAMS_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct params_struct params_struct;

/* The struct that the kernel of this name takes, or the product by cuBLAS; NULL: no table has it. */
const params_struct *params_of(const char *function);

/* What becomes of a field that is not 0. A uint64_t is an address. */
typedef struct params_out {
  void (*number)(void *to, const char *name, const char *value);
  void (*address)(void *to, const char *name, uint64_t value);
  void *to;
} params_out;
void params_write(const params_struct *s, const void *params, const params_out *out);

/* Has a table every byte of its struct, but for those that only align a tensor map? Else it says which are missing. */
bool params_complete(char *why, size_t bytes);

#endif
