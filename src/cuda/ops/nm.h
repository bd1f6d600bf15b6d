/* nm.h: N:M weights on a GPU, for forms.c, prepare.c, the backend's table and the kernels that read them. */
#ifndef ESMM_CUDA_NM_H
#define ESMM_CUDA_NM_H

#include "cuda/cuda.h"
#include "cuda/ops/nm_layout.h"

/* No four k's from a multiple of 4 on have more than two nonzeros: the form nm16 holds such a B. */
static inline bool esmm_cuda_fits_nm16(const esmm_format *f)
{
  return f->keep == 1 ? f->group > 1 : f->keep == 2 && f->group % 4 == 0;
}

/* The options that weights were prepared with. */
static inline esmm_format esmm_cuda_nm_format(const esmm_weights *w)
{
  return (esmm_format){
      .kind = ESMM_FORMAT_NM, .keep = w->nm.keep, .group = w->nm.group, .group_cols = w->nm.group_cols};
}

double
esmm_cuda_nm_ratio(const esmm_format *f); /* bytes of the form nm16 of a B, padding apart, by its own; 0: it has none */
/* Bytes of the values and places; SIZE_MAX on overflow. */
size_t esmm_cuda_nm16_bytes(int64_t k, int64_t n);

/* Two of four k's of each column: what esmm_prepare16 checks itself. */
bool esmm_cuda_nm_is_24(const esmm_format *f);
/* b lies on the GPU, its format is settled. check writes a misfit to a uint64_t on the device that is 0 before; if
   there is one, fits fails as a CPU does. */
esmm_status esmm_cuda_nm_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, CUdeviceptr misfit,
                               CUstream stream);
esmm_status esmm_cuda_nm_fits(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, uint64_t misfit);
/* B again, into a row-major host matrix. */
esmm_status esmm_cuda_nm_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream);
/* The columns of a tile from its blocks, [blocks] in host memory, into a row-major host matrix of 16 bits. */
void esmm_cuda_nm16_unpack(const unsigned char *blocks, int64_t tile, esmm_matrix *b);

/* As backend.h says. */
esmm_status esmm_cuda_format_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, int64_t *group,
                                   int64_t *strip);
esmm_status esmm_cuda_prune(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                            esmm_prune_tally *tally);

#endif
