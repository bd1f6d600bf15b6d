/* ffn.h: a GPU's passes of a layer (ffn/passes.h), and what their files share. */
#ifndef ESMM_CUDA_FFN_H
#define ESMM_CUDA_FFN_H

#include "ffn/ffn.h"
#include "ffn/passes.h"

extern const ffn_passes esmm_ffn_cuda;

static inline uint64_t esmm_ffn_address(const void *data)
{
  return (uint64_t)(uintptr_t)data;
}

/* Of a buffer of the cache. */
static inline uint64_t esmm_ffn_buffer(const esmm_ffn_cache *cache, int which)
{
  return esmm_ffn_address(cache->buffers[which].data);
}

/* Gives the buffer room for `bytes`; the first `zeros` are 0 when it is made. */
esmm_status esmm_ffn_cuda_reserve_zeros(esmm_ctx *ctx, esmm_ffn_cache *cache, int which, size_t bytes, size_t zeros);

#endif
