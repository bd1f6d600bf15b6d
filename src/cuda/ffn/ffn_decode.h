/* ffn_decode.h: a gated layer's pass for few tokens on a GPU: the functions of ffn/passes.h. */
#ifndef ESMM_CUDA_FFN_DECODE_H
#define ESMM_CUDA_FFN_DECODE_H

#include "ffn/passes.h"

esmm_status esmm_cuda_ffn_can_decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                                     esmm_matrix *gate);
esmm_status esmm_cuda_ffn_decode(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                                 const esmm_matrix *gate, esmm_matrix *h, esmm_matrix *y);
esmm_status esmm_cuda_ffn_renew(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);

#endif
