/* ffn.h: a GPU's passes of a layer (ffn/passes.h). */
#ifndef ESMM_CUDA_FFN_H
#define ESMM_CUDA_FFN_H

#include "ffn/passes.h"

extern const ffn_passes esmm_ffn_cuda;

#endif
