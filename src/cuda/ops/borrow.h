/* borrow.h: B of a product as it lies in device memory, without preparing it: for a layer, whose B's change every step.
 */
#ifndef ESMM_CUDA_BORROW_H
#define ESMM_CUDA_BORROW_H

#include "cuda/cuda.h"

/*
 * Weights that multiply by b, a matrix on the GPU that is not copied where it can be read as it lies. Nothing is looked
 * for in it: every k counts as alive. old: NULL, or what an earlier call gave for such a B: where it fits it becomes
 * *out, nothing is allocated, nothing waits, and what is remembered of its products goes on to hold. Where it does not,
 * *out is new, and old still the caller's. That holds for failures, too. a: the dtype of the other operand. b's data
 * must stay until the products with it are done.
 *
 *   16-bit, row-major, 128 columns and no padding   as it lies
 *   16-bit, col-major                               as it lies, where cuBLAS multiplies it
 *   16-bit, else                                    one copy, which turns it round and pads it
 *   fp32                                            the forms that fp32 kernels read
 *
 * On the context's stream; may be captured into a graph once it has been called for that shape.
 */
esmm_status esmm_cuda_borrow(esmm_ctx *ctx, const esmm_matrix *b, esmm_dtype a, esmm_weights *old, esmm_weights **out);

#endif
