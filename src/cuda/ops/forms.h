/* forms.h: the forms of B that a GPU keeps (form.h), for prepare.c and for reading weights back. */
#ifndef ESMM_CUDA_FORMS_H
#define ESMM_CUDA_FORMS_H

#include "cuda/cuda.h"

/* Where the forms lie in the one allocation of the weights. */
typedef struct esmm_cuda_layout {
  unsigned forms; /* that are kept: ESMM_FORM(...) */
  size_t at[ESMM_FORM_KINDS];
  size_t alive_at, bytes;
} esmm_cuda_layout;

unsigned esmm_cuda_forms_formats(void); /* that have forms */

/* The forms kept of b, within `ratio` times its bytes; false on overflow. */
bool esmm_cuda_forms_lay_out(const esmm_matrix *b, const esmm_prepare_opts *opts, double ratio, esmm_cuda_layout *l);
/* Sets the addresses in device; its memory is there. */
void esmm_cuda_forms_place(const esmm_cuda_layout *l, int64_t k, int64_t n, esmm_cuda_weights *device);
/* b lies on the GPU. Fills the forms and the bitmaps of strips; of a 16-bit b, found (esmm_prepare_found) takes the
   number of nonzeros, and of a 2:4 one misfits. */
esmm_status esmm_cuda_forms_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUdeviceptr found,
                                 CUstream stream);
/* B again, into a tight row-major matrix in host memory. Between begin and end; waits. */
esmm_status esmm_cuda_forms_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream);

int64_t esmm_cuda_tiles(int64_t n); /* of 128 columns */
/* Bitmaps of `count` strips or tiles: a few hundredths of B, which was checked, so this fits. */
size_t esmm_cuda_bitmap_bytes(int64_t count, int64_t k);

/* The same memory, seen with rows and columns exchanged. */
esmm_matrix esmm_cuda_transposed(const esmm_matrix *m);

#endif
