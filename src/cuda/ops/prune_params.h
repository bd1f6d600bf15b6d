/* prune_params.h: parameters of prune.cu's kernels; see cuda/params.h. */
#ifndef ESMM_CUDA_PRUNE_PARAMS_H
#define ESMM_CUDA_PRUNE_PARAMS_H

#include "cuda/params.h"

#define ESMM_TOP_THREADS 256
#define ESMM_TOP_COLS 32 /* columns of an area (format.h's ESMM_AREA_COLS), and of a block that cuts columns */

/* Keys order as format/prune.h's do. Without norms they are the bits of |b| as fp32, NaN as Inf; else those of a
   double. Elements with a larger key than `least` stay, and those with that key at places up to `last`. */
typedef struct esmm_device_cut {
  uint64_t least;
  int64_t last;   /* a k, or k * n + column where all of B has one cut */
  double shrink;  /* the largest score that goes; 0: nothing shrinks */
  int64_t finite; /* counts for the factor */
} esmm_device_cut;
ESMM_PARAMS_SIZE(esmm_device_cut, 32);

/* Which bytes of a key can be other than zero: shifts from the highest to the lowest. */
typedef struct esmm_top_keys {
  uint64_t norms; /* [k] fp32, or 0 */
  int32_t high, low;
} esmm_top_keys;
ESMM_PARAMS_SIZE(esmm_top_keys, 16);

/* esmm_top_columns: the cut of each column; a block has 32 columns at a time. At most UINT32_MAX k's. */
typedef struct esmm_top_columns_params {
  esmm_device_matrix b;
  esmm_top_keys keys;
  int64_t keep;
  uint64_t cuts;       /* [n] esmm_device_cut */
  int32_t place_shift; /* of the highest byte of a k */
  int32_t soft;
} esmm_top_columns_params;
ESMM_PARAMS_SIZE(esmm_top_columns_params, 80);

/*
 * esmm_top_count: having[x] grows by the elements of B with key `found` in the bytes that `known` covers, and x in the
 * one at shift; or, where `places` is not 0, with key `found`, and likewise of their place.
 * esmm_top_bounds: having[0] rises to the largest key, having[1] to the largest that goes.
 * Blocks lie along B's lines (x) and across them (y).
 */
typedef struct esmm_top_count_params {
  esmm_device_matrix b;
  esmm_top_keys keys;
  uint64_t having; /* uint64_t */
  uint64_t known, found;
  uint64_t place_known, place_found;
  int32_t shift;
  int32_t places;
  esmm_device_cut cut; /* bounds */
} esmm_top_count_params;
ESMM_PARAMS_SIZE(esmm_top_count_params, 136);

/* esmm_top_measure: an esmm_area_fit of each area. esmm_top_settle: b in place, an esmm_prune_tally of each area. They
   are numbered by levels; blocks lie along strips (x) and along levels (y). */
typedef struct esmm_top_areas_params {
  esmm_device_matrix b;
  esmm_top_keys keys;
  uint64_t cuts; /* of each column, or one for all; 0: each group of N:M finds its own */
  uint64_t out;
  uint64_t inverses;      /* [k] double, of the norms; 0 where there are none */
  int64_t levels, strips; /* areas along k, and side by side */
  int32_t rows;           /* of an area */
  int32_t group;          /* k's that have one cut: as many as `rows` where cuts are given */
  int32_t keep;           /* of a group */
  int32_t whole;          /* one cut for all */
  int32_t soft;
  float factor;
} esmm_top_areas_params;
ESMM_PARAMS_SIZE(esmm_top_areas_params, 120);

#endif
