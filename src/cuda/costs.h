/*
 * costs.h: what the GPU's predictions are made of: seconds on an H200, and factors on such. Kernels that do the same
 * share a constant; what their calls take on the GPU at hand is measured (src/choose), so these need only be about
 * right.
 */
#ifndef ESMM_CUDA_COSTS_H
#define ESMM_CUDA_COSTS_H

/* ---- memory ---- */

#define ESMM_GPU_READ 2.55e-13    /* s a byte: read from memory, by kernels that do little else */
#define ESMM_GPU_MOVED 3e-13      /* s a byte: read or written beside other work */
#define ESMM_GPU_CACHED 9e-14     /* s a byte: read from the second-level cache */
#define ESMM_GPU_SM_BYTE 1.6e-11  /* s a byte: what comes to one multiprocessor through that cache */
#define ESMM_GPU_WRITTEN 6e-13    /* s a byte: C as threads write it, without TMA */
#define ESMM_GPU_EXPOSED 0.6      /* factor: of the time that TMA writes C, what the product does not hide */
#define ESMM_GPU_SHORT_LINES 1.25 /* factor: bytes that come in lines of 64 */
#define ESMM_GPU_ODD_LINES 4.0    /* factor: cuBLAS in 16 bits where lines are not of 16 bytes */
#define ESMM_GPU_OTHER_LAYOUT 1.3 /* factor: cuBLAS in fp32 on that layout of B which is mostly slower */

/* ---- launches ---- */

#define ESMM_GPU_LAUNCH 5.6e-6       /* s: a small kernel */
#define ESMM_GPU_LAUNCH_LARGE 8.3e-6 /* s: persistent blocks, with a prologue that fills the rings */
#define ESMM_GPU_LAUNCH_TWO 1.15e-5  /* s: one that extracts or samples A, and one that waits for it */
#define ESMM_GPU_LAUNCH_SKIP 1.65e-5 /* s: the same with lists of alive k's, or of blocks */
#define ESMM_GPU_LAUNCH_NEXT 4.2e-6  /* s: one more launch before or behind a product: a copy of A, a pass over C */
#define ESMM_GPU_COPIED 1e-6         /* of such a launch: an element of a copied A */
#define ESMM_GPU_SUMS 0.5            /* of a launch: to go over sums again, cuBLAS's or those of split tiles */
#define ESMM_GPU_EDGE 0.5            /* of a launch: tiles that lie over C's edge */
#define ESMM_GPU_ODD 4.8e-7          /* of a launch: an element of C that TMA cannot write */
#define ESMM_GPU_FOLLOWS 2.5         /* of such an element: one that a gate, a residual or a curve follows */
#define ESMM_GPU_IN_REGISTERS 0.08   /* the same, where TMA writes C: by the instructions that it takes */
#define ESMM_GPU_PARTS 4.3e-6        /* s: adding the parts of split tiles through memory */
#define ESMM_GPU_CLUSTER 1.3e-6      /* s: the same from block to block of a cluster */

/* ---- stages of tensor cores ---- */

#define ESMM_GPU_STAGE 6.4e-7          /* s: 64 k's of 128 rows and 256 columns in 16 bits */
#define ESMM_GPU_STAGE_JOINT 7.5e-7    /* s: the same from lists of alive k's */
#define ESMM_GPU_STAGE_128 3.75e-7     /* s: of 128 columns */
#define ESMM_GPU_STAGE_LISTED 5.1e-7   /* s: the same from lists of alive k's, or of blocks */
#define ESMM_GPU_STAGE_HALF 4.2e-7     /* s: of 256 columns on sparse tensor cores, */
#define ESMM_GPU_STAGE_LOW 0.6         /* factor: and of 128 rows there */
#define ESMM_GPU_STEP_64 2.2e-7        /* s: of 64 x 64 by mma.sync */
#define ESMM_GPU_ELEMENTS 4.3e-9       /* s: a row of a step, loaded element by element */
#define ESMM_GPU_LISTED 1e-10          /* s: a k of a block that is looked at for a list */
#define ESMM_GPU_SEGMENT 1.05e-6       /* s: a segment of a tile: a stage that is not full */
#define ESMM_GPU_UNEVEN 1.25           /* factor: stages where columns of B differ in how many they have */
#define ESMM_GPU_CHUNK 4.5e-7          /* s: a chunk of k's that a block goes through, whatever it holds */
#define ESMM_GPU_CHUNK_SCAN 6.5e-7     /* s: one of A, listing its nonzeros */
#define ESMM_GPU_AGAIN 0.3             /* chunks: scanned again after an overflow of alive k's */
#define ESMM_GPU_KNEE 0.3              /* strip density above which the gathers of the fused kernel are late: */
#define ESMM_GPU_PAST_KNEE 1.45        /* factor: on its line there */
#define ESMM_GPU_FINE_STEP 1.15e-8     /* s: 16 k's of a strip of 8 rows */
#define ESMM_GPU_HALF_OVERFLOW 4.2e-13 /* s: an element of A that overflows 2:4, for a column of C */
#define ESMM_GPU_BSR_CELL 1.8e-7       /* s: a cell of 64 k's of a B of blocks */
#define ESMM_GPU_BSR_NARROW 6e-8       /* s: a chunk of A, or a block of 32 x 32 of B */
#define ESMM_GPU_F32_256 2.36e-6       /* s: 32 k's of 256 rows at fp32 accuracy */
#define ESMM_GPU_F32_128 1.6e-6        /* s: the same of 128 rows */
#define ESMM_GPU_F32_TERM 2.3e-14      /* s: a multiply-add at fp32 accuracy by mma.sync, */
#define ESMM_GPU_F32_LOAD 1.17e-14     /* s: and loading what it is made of */
#define ESMM_GPU_F32 4.1e-14           /* s: a multiply-add of cuBLAS in fp32 */

/* ---- few rows, small products ---- */

#define ESMM_GPU_K 5.6e-10         /* s: a k of a block, one after the other */
#define ESMM_GPU_ALIVE 4.7         /* of a k: an alive one that a block goes through alone */
#define ESMM_GPU_ROW 1.8e-7        /* s: a row of A */
#define ESMM_GPU_WIDE 1.65         /* factor: reading B in fp32 for more than 8 rows */
#define ESMM_GPU_SMALL_TURN 1.3e-6 /* s: k's that a block's warps take at once; or that a round of blocks is more */

/* ---- choosing ---- */

#define ESMM_GPU_PAIR 5e-7     /* s: choosing within a kernel's own launch, where A has no zeros */
#define ESMM_GPU_REPORT 1e-6   /* s: a report of A's densities by the kernel itself */
#define ESMM_GPU_REPORTS 0.007 /* factor: of a product's time, which reports may take in the mean */
#define ESMM_GPU_SURELY 1.06   /* factor: to be surely faster than a library, by prediction */
#define ESMM_GPU_STEADY 1.01   /* factor: the same where the cost model is right to a few per cent */
#define ESMM_GPU_LEVEL 1.025   /* factor: so much longer is about as fast, where zeros in A may be found for it */
#define ESMM_GPU_STAND_IN 3.0  /* factor: on kernels for older GPUs, where there are better ones */

#endif
