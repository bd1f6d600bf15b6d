/*
 * params.h: parameters of the layer's kernels (ffn.cu); builds upon cuda/params.h.
 *
 * Matrices between products are tight and row-major, so most kernels see them as one array of elements of one dtype.
 */
#ifndef ESMM_CUDA_FFN_PARAMS_H
#define ESMM_CUDA_FFN_PARAMS_H

#include "cuda/params.h"

#define ESMM_FFN_THREADS 256

/* esmm_ffn_activate: h = act(gate) * up, or act(up). */
typedef struct esmm_ffn_activate_params {
  uint64_t up, gate; /* gate 0: none */
  uint64_t h;
  int64_t count; /* elements of each */
  int32_t dtype, activation;
} esmm_ffn_activate_params;
ESMM_PARAMS_SIZE(esmm_ffn_activate_params, 40);

/*
 * esmm_ffn_derive, and without a ReLU esmm_ffn_derive_smooth: d, dh at first, becomes dpre, and d_gate the gate's.
 *   a ReLU without a gate   d * act' from its result h
 *   no gate                 d * act'(up)
 *   else                    d * act(gate), and d * up * act'(gate)
 */
typedef struct esmm_ffn_derive_params {
  uint64_t d, d_gate; /* [rows][cols]; d_gate 0: no gate */
  uint64_t h;         /* [rows][cols], where the result is enough; else 0 */
  uint64_t up, gate;  /* [rows][all] */
  uint64_t order;     /* int32 [cols]: their columns; 0: all of them, cols is all */
  int64_t rows, cols, all;
  int64_t count; /* entries of order: zeros follow */
  int32_t dtype, activation;
} esmm_ffn_derive_params;
ESMM_PARAMS_SIZE(esmm_ffn_derive_params, 88);

#define ESMM_FFN_SUM_COLS 256 /* columns of a block of esmm_ffn_sum, */
#define ESMM_FFN_SUM_ROWS 256 /* and its rows */

/* esmm_ffn_sum: sums of a block's rows, in float64, to partial; esmm_ffn_sum_end adds those of all blocks of rows. */
typedef struct esmm_ffn_sum_params {
  esmm_device_matrix m;
  uint64_t partial; /* [chunks][m.cols] double */
  uint64_t out;     /* fp32; with `open` int32 */
  uint64_t order;   /* int32 [m.cols]: where each goes; 0: in its place */
  int64_t chunks;   /* ceil(m.rows / ESMM_FFN_SUM_ROWS) */
  int64_t count;    /* columns that go somewhere: the first */
  int32_t add;      /* to what is there */
  int32_t open;     /* 1: count those that are not zero or less */
} esmm_ffn_sum_params;
ESMM_PARAMS_SIZE(esmm_ffn_sum_params, 88);

/* ---- 2:4 ---- */

typedef struct esmm_ffn_record {
  uint64_t kept, dropped;
  double norm, difference; /* squared */
  double fit, own;         /* soft threshold: <x, s> and <s, s> of the shrunk values s */
} esmm_ffn_record;
ESMM_PARAMS_SIZE(esmm_ffn_record, 48);

#define ESMM_FFN_DROPS 5

/* What a cache's passes leave on the device for the report, and for each other. */
typedef struct esmm_ffn_notes {
  esmm_ffn_record drops[ESMM_FFN_DROPS];
  uint64_t strips, nonzeros, alive_columns; /* of h */
  float factor, unused;                     /* soft threshold: of all that was shrunk */
} esmm_ffn_notes;
ESMM_PARAMS_SIZE(esmm_ffn_notes, 272);

enum { ESMM_FFN_WRITES = 0, ESMM_FFN_MEASURES = 1, ESMM_FFN_SCALES = 2 };

/* esmm_ffn_features, esmm_ffn_tokens: dst = src, at most two nonzeros in each group of four along features or tokens.
 */
typedef struct esmm_ffn_sparsify_params {
  uint64_t src, dst;    /* [tokens][features] */
  uint64_t others;      /* int32 [features]: -1: goes sparse, else its place among the others; 0: all go sparse */
  uint64_t token_order; /* int32 [tokens]; 0: as they are */
  uint64_t records;     /* one a block */
  uint64_t notes;
  uint64_t seed;
  int64_t tokens, features;
  int32_t dtype, sparsifier;
  int32_t step; /* ESMM_FFN_...: the soft threshold measures first, then scales */
  int32_t unused;
} esmm_ffn_sparsify_params;
ESMM_PARAMS_SIZE(esmm_ffn_sparsify_params, 88);

/* ---- ffn_two16_sm90a.cu: 2:4 on the sparse tensor cores ---- */

#define ESMM_FFN_PACK_FEATURES 512 /* threads of esmm_ffn_pack_features_<...>, */
#define ESMM_FFN_PACK_TOKENS 256   /* and of esmm_ffn_pack_tokens_<...> */

/*
 * esmm_ffn_pack_<axis>_<dtype>, with _any for others than top-N, with _others where not all columns go sparse: src
 * packed as nm_layout.h has it: lines are tokens and k's features, or lines are features and k's tokens. dst of `how`
 * is not used.
 */
typedef struct esmm_ffn_pack_params {
  esmm_ffn_sparsify_params how;
  uint64_t half;   /* [strips][blocks] */
  uint64_t side;   /* [tokens][side_ld]: columns that do not go sparse; 0: all do */
  int64_t side_ld; /* elements */
  int32_t strips;  /* of 128 lines, an even number */
  int32_t blocks;  /* of 64 k's */
} esmm_ffn_pack_params;
ESMM_PARAMS_SIZE(esmm_ffn_pack_params, 120);

#define ESMM_FFN_TWO16_MOST_SIDE (1 << 23)
#define ESMM_FFN_TWO16_COLS 256 /* of a tile; it has 128 lines */
#define ESMM_FFN_TWO16_CLUSTER 2
#define ESMM_FFN_TWO16_THREADS 384
#define ESMM_FFN_TWO16_STAGES(others) ((others) ? 4 : 5)
#define ESMM_FFN_TWO16_STAGE(others) (32768 + ((others) ? 16384 : 9216))
#define ESMM_FFN_TWO16_SHARED(others) \
  (ESMM_FFN_TWO16_STAGES(others) * ESMM_FFN_TWO16_STAGE(others) + 2 * ESMM_NM16_STAGING + 128)

/* esmm_ffn_two16_<...>: C = A B, A packed, and with others A's columns that do not go sparse times theirs of B. */
typedef struct esmm_ffn_two16_params {
  esmm_tensor_map map_b;         /* boxes of 64 by 64 */
  esmm_tensor_map map_side;      /* the same of A's other columns, k contiguous, */
  esmm_tensor_map map_others;    /* and of B's k's that belong to them, which lie as B does */
  uint64_t half;                 /* [2 * pairs][blocks] */
  int32_t m, n;                  /* lines of A, columns of B */
  int32_t blocks, others;        /* of 64 k's: packed, and the other columns */
  int32_t pairs;                 /* of strips of 128 lines */
  int32_t group;                 /* of pairs, that come together */
  int32_t turned;                /* 1: C is [n, m] */
  int32_t registers;             /* as in esmm_nm16_params */
  esmm_epilogue_params epilogue; /* C is row-major */
} esmm_ffn_two16_params;
ESMM_PARAMS_SIZE(esmm_ffn_two16_params, 576);

/* esmm_ffn_collect: the blocks' records in order: to notes.factor after measuring, else added to a drop. One block. */
typedef struct esmm_ffn_collect_params {
  uint64_t records, notes;
  int64_t count;
  int32_t drop; /* -1: the factor */
  int32_t unused;
} esmm_ffn_collect_params;
ESMM_PARAMS_SIZE(esmm_ffn_collect_params, 32);

#define ESMM_FFN_RANK_THREADS 1024

/* esmm_ffn_rank: from the counts, which columns go sparse and which are alive. One block. */
typedef struct esmm_ffn_rank_params {
  uint64_t counts;        /* int32 [features]: nonzeros of each column */
  uint64_t open;          /* int32 [features]: alive where not 0 */
  uint64_t columns;       /* int32 [features]: behind the first `sparse` the others, by index; 0: not wanted, */
  uint64_t others;        /* nor is this, which is as above */
  uint64_t order, places; /* int32 [features]: alive ones by index, and the other way round, -1 where dead; 0: not
                             wanted */
  uint64_t mailbox;       /* uint64 in host memory: pass << 32 | how many are alive; 0: not wanted */
  int64_t features, sparse;
  uint32_t pass, unused;
} esmm_ffn_rank_params;
ESMM_PARAMS_SIZE(esmm_ffn_rank_params, 80);

#define ESMM_FFN_PICK_ROWS 8 /* lines that a thread picks from at once */

/*
 * esmm_ffn_pick: lines of src, or elements of each of its lines, to dst: its line (element) i from index[i] where i is
 * below count, else from -1, which stands for zeros. With add they are added, and zeros are nothing.
 */
typedef struct esmm_ffn_pick_params {
  esmm_device_matrix src, dst; /* row-major */
  uint64_t index;              /* int32 [count] */
  int64_t count;
  int32_t elements; /* 1: of each line */
  int32_t add;
} esmm_ffn_pick_params;
ESMM_PARAMS_SIZE(esmm_ffn_pick_params, 104);

/* esmm_ffn_add: dst's line (element of each line) index[i] gets src's i added, for each i below count. */
typedef struct esmm_ffn_add_params {
  esmm_device_matrix src, dst; /* row-major; src is fp32 */
  uint64_t index;              /* int32 [count], no two alike */
  int64_t count;
  int32_t elements; /* 1: of each line */
  int32_t unused;
} esmm_ffn_add_params;
ESMM_PARAMS_SIZE(esmm_ffn_add_params, 104);

/* esmm_ffn_densities: to notes, which are 0: nonzeros, columns and strips of h that have one. */
typedef struct esmm_ffn_densities_params {
  uint64_t h, notes;
  int64_t tokens, features, strip_rows;
  int32_t dtype, unused;
} esmm_ffn_densities_params;
ESMM_PARAMS_SIZE(esmm_ffn_densities_params, 48);

#endif
