/* decode_params.h: parameters of k_nm16_decode.cu, and what host and device agree on. */
#ifndef ESMM_CUDA_NM16_DECODE_PARAMS_H
#define ESMM_CUDA_NM16_DECODE_PARAMS_H

#include "cuda/params.h"

#define ESMM_NM16_DECODE_ROWS 16
#define ESMM_NM16_DECODE_THREADS 256
#define ESMM_NM16_DECODE_COLS 32                                /* columns of a warp */
#define ESMM_NM16_DECODE_STAGES(halves) ((halves) == 1 ? 4 : 3) /* blocks of B that a warp has on their way */
#define ESMM_NM16_DECODE_RANKS 8                                /* most blocks that share a tile's k's: a cluster */
#define ESMM_NM16_DECODE_SPARE 8      /* k's of room behind a row of A in shared memory: rows lie in different banks */
#define ESMM_NM16_DECODE_PAD 4        /* floats behind a row of sums */
#define ESMM_NM16_DECODE_SHARED 98304 /* most dynamic shared memory */

typedef struct esmm_nm16_decode_params {
  esmm_selector selector;
  esmm_device_matrix a;
  uint64_t b;          /* the form nm16 */
  int32_t blocks;      /* of 64 k's */
  int32_t range;       /* the same of one block of the GPU */
  int32_t chunk;       /* the same of A in shared memory at once: a multiple of ways * stages */
  int32_t group_shift; /* 1 << it warps lie side by side; the others share these columns' k's */
  int32_t vector;      /* lines of A along k are aligned to 16 bytes */
  int32_t unused;
  esmm_epilogue_params epilogue;
} esmm_nm16_decode_params;
ESMM_PARAMS_SIZE(esmm_nm16_decode_params, 88 + sizeof(esmm_epilogue_params));

#endif
