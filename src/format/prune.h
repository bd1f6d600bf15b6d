/* prune.h: what prune.c and prune_top.c share: keys, and what a call has been asked for. */
#ifndef ESMM_PRUNE_H
#define ESMM_PRUNE_H

#include "backend.h"

#include <math.h>
#include <string.h>

/* What stays is decided by keys: 64-bit numbers that order like the scores they stand for. Nonzeros come before zeros,
   whatever their score: what fits already stays as it is. */
static inline uint64_t esmm_prune_key(bool nonzero, double score)
{
  uint64_t bits;
  const double ordered = isnan(score) ? (double)INFINITY : score;
  memcpy(&bits, &ordered, sizeof bits); /* of numbers that are not negative: in the same order */
  return nonzero ? bits + 1 : 0;
}

/* The score again. */
static inline double esmm_prune_score(uint64_t key)
{
  double score;
  const uint64_t bits = key > 0 ? key - 1 : 0;
  memcpy(&score, &bits, sizeof score);
  return score;
}

/*
 * The next byte of the keep-th largest number, by how many of those that begin like it have which: as many as are
 * larger are taken from *keep. 1 <= *keep <= all that were counted; less may have been, where a device failed.
 */
static inline unsigned esmm_prune_next_byte(const int64_t having[256], int64_t *keep)
{
  unsigned byte = 255;
  for (; byte > 0 && *keep > having[byte]; byte--)
    *keep -= having[byte];
  return byte;
}

/* The keep-th largest key; *equal: how many of those equal to it are among the keep largest. 1 <= keep <= count. */
uint64_t esmm_prune_threshold(const uint64_t *keys, int64_t count, int64_t keep, int64_t *equal);

/* Memory to prune with; count may be 0. */
esmm_status esmm_prune_alloc(esmm_ctx *ctx, int64_t count, size_t size, void **array);

/* prune_top.c; b lies in host memory. */
esmm_status esmm_prune_top(esmm_ctx *ctx, const esmm_matrix *b, const esmm_top *how, esmm_prune_tally *all);

#endif
