/*
 * ladder_params.h: what the ladder's kernels are told. Read by k_ladder.c and k_ladder.cu.
 */
#ifndef LADDER_PARAMS_H
#define LADDER_PARAMS_H

#include "cuda/params.h"

#define LADDER_TILE 128     /* rows and columns of a block, */
#define LADDER_THREADS 256  /* its threads, */
#define LADDER_BLOCKS 2     /* blocks at once on a multiprocessor, */
#define LADDER_SHARED 68224 /* and the dynamic shared memory of a block, bytes */

/*
 * The ladder reads A as the caller has it, with bitmaps of its own strip heights.
 *   a_bits [ceil(m / height)][words], b_bits8 [4 * b.strips][words]: words = b.k_padded / 32, bits as in esmm_strips
 */
typedef struct ladder_params {
  esmm_selector selector;
  int64_t m, n, k;
  esmm_device_matrix a;
  esmm_strips b;
  uint64_t a_bits;  /* 0 where A is not scanned */
  uint64_t b_bits8; /* of strips of 8 columns; 0 where those of 32 are used */
  esmm_epilogue_params epilogue;
} ladder_params;
ESMM_PARAMS_SIZE(ladder_params, 280);

/* By number: rows of A's strips (0: it has no bitmaps), columns of B's. */
#define LADDER_10 0, 32
#define LADDER_17 0, 32
#define LADDER_20 64, 32
#define LADDER_21 8, 32
#define LADDER_25 64, 32
#define LADDER_28 8, 32
#define LADDER_29 32, 32
#define LADDER_30 8, 8

#endif
