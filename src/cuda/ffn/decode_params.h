/*
 * decode_params.h: parameters of a gated layer's second half (ffn_decode.cu); builds upon cuda/params.h.
 */
#ifndef ESMM_CUDA_FFN_DECODE_PARAMS_H
#define ESMM_CUDA_FFN_DECODE_PARAMS_H

#include "cuda/params.h"

#define ESMM_FFN_DECODE_TOKENS 16 /* at most */
#define ESMM_FFN_DECODE_THREADS 512
#define ESMM_FFN_DECODE_WARPS (ESMM_FFN_DECODE_THREADS / 32)
#define ESMM_FFN_DECODE_K 256     /* values of a row of up that a warp takes at a time: all warps have a row of 4096 */
#define ESMM_FFN_DECODE_SUBS 2    /* most such turns, with at most 8 tokens; else one: x lies in registers */
#define ESMM_FFN_DECODE_COLS 256  /* columns of y that a block makes, */
#define ESMM_FFN_DECODE_HALF 128  /* and one of its warps */
#define ESMM_FFN_DECODE_STEP 16   /* features that a warp multiplies by down at once */
#define ESMM_FFN_DECODE_ROUND 16  /* features that a block adds up at once */
#define ESMM_FFN_DECODE_SLOT 4096 /* bytes of a warp's step: 8 rows of up, or 16 half rows of down */
#define ESMM_FFN_DECODE_SLOTS 3   /* on their way at once, for each warp */
#define ESMM_FFN_DECODE_MOST_FEATURES 65536 /* lists have 16 bits */
#define ESMM_FFN_DECODE_LISTED 32768        /* values of the gate that every block looks at by itself */

/* Words at the start of `meeting`, which are 0 before a launch and after it: blocks that have scanned, have made their
   part of h, have left; then one ticket for each tile of columns. */
#define ESMM_FFN_DECODE_TICKETS 4

/*
 * y = h down + b2 with h = act(gate) * (x up + b1), of the features that some token's gate lets through; see
 * ffn_decode.cu. dtype, of all but biases and partial: that of the kernel.
 */
typedef struct esmm_ffn_decode_params {
  esmm_device_matrix x, y; /* x [tokens, model]: row-major, lines begin at multiples of 16 bytes */
  uint64_t gate;           /* [tokens][line]: rectified; what is past `features` may be anything */
  uint64_t up, down;       /* [features][up_ld], [features][down_ld]: rows of `model` values */
  int64_t up_ld, down_ld;  /* multiples of 8; of ESMM_FFN_DECODE_HALF, zeros past `model` */
  uint64_t b1, b2;         /* fp32; 0: none */
  uint64_t h;              /* [tokens][line]: room for h of alive features, one after the other */
  uint64_t bits;           /* [line / 32] uint32: room for which those are */
  uint64_t partial;        /* [parts][tokens][COLS tiles] fp32: room for what blocks add up; parts > 1 */
  uint64_t meeting;        /* see above */
  int32_t line;            /* features, rounded up to a multiple of 32 */
  int32_t features, model;
  int32_t tiles, parts; /* of y's columns, and of the alive features: tiles * parts blocks of the launch or fewer */
  int32_t share, list;  /* entries of a block's two lists, multiples of 8 */
  int32_t square;       /* 1: ReLU2 */
} esmm_ffn_decode_params;
ESMM_PARAMS_SIZE(esmm_ffn_decode_params, 200);

/* Dynamic shared memory: slots; what warps add up, fp32 [WARPS][tokens in eights][ROUND]; two lists; bits. */
#define ESMM_FFN_DECODE_RING (ESMM_FFN_DECODE_WARPS * ESMM_FFN_DECODE_SLOTS * ESMM_FFN_DECODE_SLOT)
#define ESMM_FFN_DECODE_SUMS(halves) ((halves)*8 * ESMM_FFN_DECODE_WARPS * ESMM_FFN_DECODE_ROUND * 4)

#endif
