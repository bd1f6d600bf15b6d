/*
 * form.h: the forms that prepared weights keep of B. A form is one layout in memory; weights keep one or more, kernels
 * say which one they read, and the plan refuses a kernel whose form is not there.
 *
 * A new form is a kind and a line of the table here, and a line in the table of the backend that makes it: for a CPU
 * cpu/forms.c, for a GPU ops/forms.c in its folder. docs/adding-a-format.md walks through one.
 */
#ifndef ESMM_FORM_H
#define ESMM_FORM_H

#include "esmm.h"

#include <stdbool.h>

typedef enum esmm_form_kind {
  ESMM_FORM_PANELS,   /* CPU: 32 columns side by side, only the k's with a nonzero in them */
  ESMM_FORM_ROWS,     /* CPU: B's rows, padded to a cache line */
  ESMM_FORM_BSR,      /* CPU: blocks that have a nonzero */
  ESMM_FORM_NM,       /* CPU: n values of every m k's, with their places */
  ESMM_FORM_TURNED,   /* CPU: B transposed, where it has few columns */
  ESMM_FORM_ONEDNN,   /* CPU: bf16 and fp32, as oneDNN lays it out */
  ESMM_FORM_STRIPS,   /* GPU: fp32, strips of 32 columns, k-major */
  ESMM_FORM_COLUMNS,  /* GPU: fp32, B transposed */
  ESMM_FORM_ROWS16,   /* GPU: 16-bit rows, padded to 128 columns, with the bitmaps of tiles of 128 columns */
  ESMM_FORM_TIGHT16,  /* GPU: the same rows without padding, where a library is faster with those */
  ESMM_FORM_TIGHT32,  /* GPU: fp32 rows without padding */
  ESMM_FORM_CELLS16,  /* GPU: 16-bit cells of a BSR B that have a nonzero */
  ESMM_FORM_NM16,     /* GPU: 2:4, 16-bit: blocks of values and places for the sparse tensor core */
  ESMM_FORM_TURNED16, /* GPU: 16-bit, B transposed, where it lies so and a library reads it: of a layer's products */
  ESMM_FORM_KINDS
} esmm_form_kind;

#define ESMM_FORM(kind) (1u << ESMM_FORM_##kind) /* in masks: esmm_weights.forms, esmm_kernel.reads */

typedef struct esmm_form {
  const char *name; /* "panels": for texts */
  esmm_format_kind format;
  const char *absent; /* why weights of that format may lack it */
} esmm_form;

extern const esmm_form esmm_form_table[ESMM_FORM_KINDS];

unsigned esmm_forms_of_format(esmm_format_kind format); /* a mask */

#endif
