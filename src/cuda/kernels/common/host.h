/*
 * host.h: what the host's side of several kernels says and does alike: sizes that counters and shared memory do not
 * hold; a 16-bit A that a kernel reads through TMA, as it is where its lines allow that, else as a copy in the kernel's
 * workspace; whether TMA can write C; how many blocks run at once in clusters.
 */
#ifndef ESMM_CUDA_HOST_H
#define ESMM_CUDA_HOST_H

#include "cuda/cuda.h"

#include <stdio.h>

/* ---- what can_run says; both return false ---- */

static inline bool esmm_cuda_too_large(const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)snprintf(why, why_bytes, "a is %lld x %lld and b has %lld columns: too large for its counters", (long long)p->m,
                 (long long)p->k, (long long)p->n);
  return false;
}

static inline bool esmm_cuda_too_little_shared(const esmm_problem *p, int needs, char *why, size_t why_bytes)
{
  (void)snprintf(why, why_bytes, "a block may have %d bytes of shared memory, it needs %d",
                 esmm_cuda_get(p->ctx)->shared_per_block, needs);
  return false;
}

/* ---- lines ---- */

/* TMA's lines begin at multiples of 16 bytes and lie at most 2^40 bytes apart. */
static inline bool esmm_cuda_as_it_is(const esmm_matrix *a)
{
  return esmm_cuda_in_lines(a) && a->ld < (int64_t)1 << 38;
}

/* Lines along k that can be copied 16 bytes at a time. */
static inline bool esmm_cuda_is_vector(const esmm_matrix *a)
{
  const bool along_k = a->order == ESMM_ROW_MAJOR || a->ld == 1;
  return along_k && esmm_cuda_address(a) % 16 == 0 &&
         (a->rows == 1 || a->ld * (int64_t)esmm_dtype_size(a->dtype) % 16 == 0);
}

/* TMA can write C: 16 bits, lines of 16 bytes, nothing is read but the bias. */
static inline bool esmm_cuda_writes_boxes(const esmm_problem *p, const esmm_epilogue_params *e)
{
  return esmm_dtype_size(p->c.dtype) == 2 && p->c.order == ESMM_ROW_MAJOR && e->beta == 0.0f &&
         !(e->extra & ESMM_EXTRA_VALUES) && esmm_cuda_as_it_is(&p->c);
}

/* Sums may be finished in registers, before they are turned: TMA can write C, and what follows needs to know of a sum's
   place its column alone. A gate's factor is made after the plan. */
static inline bool esmm_cuda_in_registers(const esmm_problem *p)
{
  const esmm_epilogue_params e = esmm_cuda_epilogue(p);
  return !(p->gated && !p->factor) && esmm_cuda_writes_boxes(p, &e);
}

/* ---- C ---- */

static inline double esmm_cuda_c_bytes(const esmm_problem *p)
{
  return (double)esmm_dtype_size(p->c.dtype) * (double)p->m * (double)p->n;
}

/* ---- A as a kernel reads it: in either order, or by rows alone ---- */

static inline bool esmm_cuda_needs_copy(const esmm_matrix *a, bool by_rows)
{
  return (by_rows && a->order == ESMM_COL_MAJOR) || !esmm_cuda_as_it_is(a);
}

static inline esmm_matrix esmm_cuda_aligned_copy(const esmm_matrix *a, bool by_rows, CUdeviceptr at)
{
  esmm_matrix copy = *a;
  copy.data = esmm_cuda_pointer(at);
  copy.order = by_rows ? ESMM_ROW_MAJOR : a->order;
  copy.ld = esmm_round_up(copy.order == ESMM_ROW_MAJOR ? a->cols : a->rows, 8);
  return copy;
}

/* Bytes of the copy, 0 where none is needed; SIZE_MAX on overflow. */
static inline size_t esmm_cuda_copy_bytes(const esmm_matrix *a, bool by_rows)
{
  const esmm_matrix copy = esmm_cuda_aligned_copy(a, by_rows, 0);
  const size_t lines = (size_t)(copy.order == ESMM_ROW_MAJOR ? a->rows : a->cols);
  size_t bytes;
  if (!esmm_cuda_needs_copy(a, by_rows))
    return 0;
  return esmm_size_mul((size_t)copy.ld * 2, lines, &bytes) ? bytes : SIZE_MAX;
}

/* Units of a cost model: a launch and what it moves. */
static inline double esmm_cuda_copy_units(const esmm_matrix *a, bool by_rows)
{
  return esmm_cuda_needs_copy(a, by_rows) ? 1.0 + (double)a->rows * (double)a->cols * ESMM_GPU_COPIED : 0.0;
}

/* A itself, or its copy at `at`. */
static inline esmm_status esmm_cuda_align_a(esmm_ctx *ctx, const esmm_problem *p, bool by_rows, CUdeviceptr at,
                                            esmm_matrix *a)
{
  const esmm_cuda_call *call = esmm_cuda_call_of(p);
  *a = p->a;
  if (!esmm_cuda_needs_copy(&p->a, by_rows))
    return ESMM_OK;
  *a = esmm_cuda_aligned_copy(&p->a, by_rows, at);
  return esmm_cuda_convert(ctx, &p->a, a, call->selector, call->stream);
}

/* The same where this is all that comes before the product. */
static inline esmm_status esmm_cuda_extract_a(esmm_ctx *ctx, const esmm_problem *p, bool by_rows, CUdeviceptr at,
                                              esmm_matrix *a)
{
  const esmm_status status = esmm_cuda_align_a(ctx, p, by_rows, at, a);
  return status == ESMM_OK && esmm_cuda_needs_copy(&p->a, by_rows) ? esmm_cuda_mark_extracted(ctx, p) : status;
}

/* ---- clusters ---- */

/* Blocks that run at once, in clusters of `ranks`: those of a larger one have to find room side by side. */
static inline int64_t esmm_cuda_most_blocks(int64_t at_once, int64_t ranks)
{
  return ranks <= 2 ? at_once : 17 * at_once / 20;
}

/* The same of blocks that each have one of the GPU's multiprocessors: larger clusters do not find room on every one. */
static inline int64_t esmm_cuda_room_for(int64_t ranks, int64_t gpu)
{
  return ranks > 2 ? gpu - gpu / 8 : gpu;
}

#endif
