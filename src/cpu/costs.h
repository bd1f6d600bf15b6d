/*
 * costs.h: every constant of the plan's predictions for a CPU, of one core of the machine that it was measured on;
 * those of AMX are estimates, by instruction tables at 2.7 GHz. They only have to be about right: what calls take
 * corrects them (choose/choose.h), and `esmm tune` measures what kernels make of them. So kernels share one wherever it
 * means the same and differs by a half at most. scripts/constants.py counts them, and writes them changed at random.
 */
#ifndef ESMM_CPU_COSTS_H
#define ESMM_CPU_COSTS_H

/* Multiply-adds: seconds of a vector's, by instruction set */
#define ESMM_CPU_COST_FMA_PORTABLE 2.2e-10 /* s: 4 lanes */
#define ESMM_CPU_COST_FMA_AVX2 1.46e-10    /* s: 8 lanes */
#define ESMM_CPU_COST_FMA_AVX512 2.6e-10   /* s: 16 lanes */
#define ESMM_CPU_COST_FMA_BF16 2.9e-10     /* s: 16 lanes of pairs */
#define ESMM_CPU_COST_FMA_AMX 7e-9         /* s: a tile of 16 x 16 x 32 */
/* The same where it costs more */
#define ESMM_CPU_COST_LISTED 1.06      /* times: k's come from a list */
#define ESMM_CPU_COST_LOOSE 1.15       /* times: A and B lie as they were given, not packed */
#define ESMM_CPU_COST_CHOSEN 1.4       /* times: each column of B has its own k's */
#define ESMM_CPU_COST_STREAMED 5.5e-11 /* s: an element of B, of rows that are read once for a row of A */
#define ESMM_CPU_COST_ROW 1.75e-9      /* s: a nonzero of A by 64 columns of B in the first-level cache */
#define ESMM_CPU_COST_ROW_BF16 1e-9    /* s: the same in pairs */
#define ESMM_CPU_COST_STRETCH 4e-9     /* s: to begin such a list */

/* A */
#define ESMM_CPU_COST_PACK_PORTABLE 4.5e-10 /* s: an element scanned and packed */
#define ESMM_CPU_COST_PACK_AVX 1.5e-10      /* s: the same in vectors */
#define ESMM_CPU_COST_PACK_AMX 4e-11        /* s: the same into tiles */
#define ESMM_CPU_COST_WIDEN_PORTABLE 3e-10  /* s: an element of 16 bits made fp32, or copied */
#define ESMM_CPU_COST_WIDEN_AVX 3e-11       /* s: the same in vectors */
#define ESMM_CPU_COST_READ_A 1.3e-11        /* s: a byte read once, in order */

/* B */
#define ESMM_CPU_COST_READ_B 3.7e-11 /* s: a byte read */
#define ESMM_CPU_COST_AHEAD 2.5      /* times: rows read for one that is needed, which the hardware fetches ahead */
#define ESMM_CPU_COST_REPACK 3.2e-10 /* s: an element packed or widened for a block of rows */
#define ESMM_CPU_COST_PAIR 4e-11     /* s: an element of bf16 put beside that of the next k */
#define ESMM_CPU_COST_INDEX 2e-10    /* s: a vector's indices of N:M weights unpacked */

/* Lists of k's: seconds a word of 64 k's, of a strip by a panel */
#define ESMM_CPU_COST_WORD_PORTABLE 1e-7 /* s */
#define ESMM_CPU_COST_WORD_AVX 2.5e-8    /* s */
#define ESMM_CPU_COST_WORD_AMX 3e-9      /* s: and a quarter of what 32 of its k's take to be put side by side */

/* C: a tile begun, sums added and written */
#define ESMM_CPU_COST_TILE 1.5e-8      /* s: a tile of 4 x 8 or 6 x 16 */
#define ESMM_CPU_COST_TILE_AVX512 4e-8 /* s: a tile of 8 x 32 */
#define ESMM_CPU_COST_TILE_AMX 1.5e-7  /* s: a tile of 32 x 32 */
#define ESMM_CPU_COST_UPDATE 1.5e-10   /* s: an element */
#define ESMM_CPU_COST_VECTOR 1e-9      /* s: a vector, or part of one */

/* A call, whatever its size */
#define ESMM_CPU_COST_CALL 5e-8         /* s: nothing is laid out */
#define ESMM_CPU_COST_START 3e-6        /* s: threads started, scratch laid out */
#define ESMM_CPU_COST_START_DECODE 2e-6 /* s: the same for lists alone */
#define ESMM_CPU_COST_LIBRARY 5e-7      /* s: oneDNN called, for each part */

/* How many threads, and whether A is looked at */
#define ESMM_CPU_COST_TERM 3e-11        /* s: a multiply-add where none is skipped, by any kernel */
#define ESMM_CPU_COST_THREAD 2e4        /* multiply-adds: t threads that are awake are worth t times this each */
#define ESMM_CPU_COST_WAKE 1.5e-5       /* s: of a product, for each thread that is worth waking */
#define ESMM_CPU_COST_SAMPLE_ROW 5e-9   /* s: 64 k's of a row looked at */
#define ESMM_CPU_COST_SAMPLE_PLACE 2e-7 /* s: the work on 32 such rows then */

#endif
