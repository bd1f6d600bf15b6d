/*
 * aligned.h: a 16-bit A for kernels that read it through TMA: as it is where its lines allow that, else a copy in the
 * kernel's workspace; and whether TMA can write C.
 */
#ifndef ESMM_CUDA_ALIGNED_H
#define ESMM_CUDA_ALIGNED_H

#include "cuda/cuda.h"

/* TMA's lines begin at multiples of 16 bytes and lie at most 2^40 bytes apart. */
static inline bool esmm_cuda_as_it_is(const esmm_matrix *a)
{
  return esmm_cuda_in_lines(a) && a->ld < (int64_t)1 << 38;
}

/* TMA can write C: 16 bits, lines of 16 bytes, nothing is read but the bias. */
static inline bool esmm_cuda_writes_boxes(const esmm_problem *p, const esmm_epilogue_params *e)
{
  return esmm_dtype_size(p->c.dtype) == 2 && p->c.order == ESMM_ROW_MAJOR && e->beta == 0.0f &&
         !(e->extra & ESMM_EXTRA_VALUES) && esmm_cuda_as_it_is(&p->c);
}

/* The copy: of the same order. */
static inline esmm_matrix esmm_cuda_aligned_copy(const esmm_matrix *a, CUdeviceptr at)
{
  esmm_matrix copy = *a;
  copy.data = esmm_cuda_pointer(at);
  copy.ld = esmm_round_up(a->order == ESMM_ROW_MAJOR ? a->cols : a->rows, 8);
  return copy;
}

/* Bytes of the copy, 0 where none is needed; SIZE_MAX on overflow. */
static inline size_t esmm_cuda_copy_bytes(const esmm_matrix *a)
{
  const esmm_matrix copy = esmm_cuda_aligned_copy(a, 0);
  const size_t lines = (size_t)(a->order == ESMM_ROW_MAJOR ? a->rows : a->cols);
  size_t bytes;
  if (esmm_cuda_as_it_is(a))
    return 0;
  return esmm_size_mul((size_t)copy.ld * 2, lines, &bytes) ? bytes : SIZE_MAX;
}

/* Units of a cost model: a launch and what it moves. */
static inline double esmm_cuda_copy_units(const esmm_problem *p)
{
  return esmm_cuda_as_it_is(&p->a) ? 0.0 : 1.0 + (double)p->m * (double)p->k * 1e-6;
}

/* A as the kernel reads it: itself, or its copy at `at`. */
static inline esmm_status esmm_cuda_align_a(esmm_ctx *ctx, const esmm_problem *p, CUdeviceptr at, esmm_matrix *a)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  *a = p->a;
  if (esmm_cuda_as_it_is(&p->a))
    return ESMM_OK;
  *a = esmm_cuda_aligned_copy(&p->a, at);
  const esmm_status status = esmm_cuda_convert(ctx, &p->a, a, call->selector, call->stream);
  return status == ESMM_OK ? esmm_cuda_mark_extracted(ctx, p) : status;
}

#endif
