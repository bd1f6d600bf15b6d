/* sparse.h: 2:4 in a layer on a GPU (ffn/passes.h): of ffn.c's table. */
#ifndef ESMM_CUDA_FFN_SPARSE_H
#define ESMM_CUDA_FFN_SPARSE_H

#include "ffn/passes.h"

esmm_status esmm_ffn_cuda_sparsify(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparsify *how,
                                   const esmm_matrix *src, esmm_matrix *dst);
esmm_status esmm_ffn_cuda_multiply_sparse(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparse_product *product,
                                          bool *done);

#endif
