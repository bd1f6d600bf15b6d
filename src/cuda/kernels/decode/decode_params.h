/* decode_params.h: parameters of k_decode.cu, C of at most 16 rows from the rows of B that A needs, and what host and
   device agree on. */
#ifndef ESMM_CUDA_DECODE_PARAMS_H
#define ESMM_CUDA_DECODE_PARAMS_H

#include "cuda/params.h"

#define ESMM_DECODE_ROWS 16
#define ESMM_DECODE_THREADS 256
#define ESMM_DECODE_COLS 64             /* columns of a warp where B is 16-bit; ESMM_STRIP for fp32 */
#define ESMM_DECODE_MOST_SIDE (1 << 30) /* of B: counters have 32 bits */
/* Blocks at once on a multiprocessor that has clusters: of the kernels for few rows (16-bit: 8; fp32: 1 and 4), and of
 * those for more. */
#define ESMM_DECODE_BLOCKS_FEW_ROWS 3
#define ESMM_DECODE_BLOCKS 2
#define ESMM_DECODE_STEP 16 /* listed k's that are multiplied at once */
#define ESMM_DECODE_RANKS 8 /* most blocks that share a tile's k's: a cluster */
#define ESMM_DECODE_K 64    /* range and chunk are multiples of it */
#define ESMM_DECODE_SPARE 8 /* k's of room behind a chunk of A in shared memory; one is zeros */
/* Bytes of a list of k's that is filled up to whole steps. */
#define ESMM_DECODE_LIST(chunk) (((chunk) + ESMM_DECODE_STEP) * 2)
#define ESMM_DECODE_PAD 4        /* floats behind each row of sums in shared memory */
#define ESMM_DECODE_SHARED 98304 /* most dynamic shared memory */

typedef struct esmm_decode_params {
  esmm_selector selector;
  esmm_device_matrix a;
  uint64_t b;          /* rows [k][n padded], or strips [n padded / 32][k_padded][32] of fp32 */
  int64_t b_slice;     /* bytes from the columns of a warp to those of the next */
  uint32_t b_row;      /* bytes from a k to the next */
  int32_t group_shift; /* 1 << it warps lie side by side in a block; the others share these columns' k's */
  int32_t range;       /* k's of a block */
  int32_t chunk;       /* k's of A in shared memory at once */
  int32_t vector;      /* lines of A along k are aligned to 16 bytes */
  int32_t inbox;       /* where in shared memory the sums of the cluster's blocks arrive */
  uint64_t report;     /* esmm_choice_device, or 0 */
  esmm_epilogue_params epilogue;
  /* esmm_decode_gated_*: C = activation(alpha * (A gate) + gate_bias) * (alpha * (A B) + ...), as in the epilogue. */
  uint64_t gate;        /* its rows, as b's: b_row apart */
  uint64_t gate_bias;   /* [n] fp32, or 0 */
  uint64_t gate_report; /* report of the gate's product, or 0 */
  int32_t gate_activation;
  int32_t unused;
} esmm_decode_params;
ESMM_PARAMS_SIZE(esmm_decode_params, 288);

#endif
