/* prune.h: top-N and the soft threshold on a GPU, for the backend's table. */
#ifndef ESMM_CUDA_PRUNE_H
#define ESMM_CUDA_PRUNE_H

#include "cuda/cuda.h"

/* As backend.h says. */
esmm_status esmm_cuda_prune_top(esmm_ctx *ctx, const esmm_matrix *b, const esmm_top *how, esmm_prune_tally *tally);

#endif
