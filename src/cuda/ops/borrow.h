/* borrow.h: B of a product as it lies in device memory, not prepared: for layers, which change it every step. */
#ifndef ESMM_CUDA_BORROW_H
#define ESMM_CUDA_BORROW_H

#include "cuda/cuda.h"

/*
 * Weights for b, a matrix on the GPU, which is copied only if it cannot be read as it lies. It is not scanned: every k
 * counts as alive. old: NULL, or an earlier call's weights for such a B. If they fit they become *out: nothing is
 * allocated, nothing waits, and what is remembered of their products still holds. Else *out is new, and old still the
 * caller's, as after a failure. a: the dtype of the other operand. b's data must stay until the products with it are
 * done.
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
