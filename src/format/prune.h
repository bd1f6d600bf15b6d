/* prune.h: what prune.c and prune_top.c share: keys, and a call's options. */
#ifndef ESMM_PRUNE_H
#define ESMM_PRUNE_H

#include "backend.h"

#include <math.h>
#include <string.h>

/* Keys decide which values stay: 64-bit numbers that order like their scores. Nonzeros come before zeros, whatever
   their score, so a B that fits already stays as it is. */
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
 * The next byte of the keep-th largest number, from counts of the next byte among numbers with its prefix; subtracts
 * the larger ones from *keep. 1 <= *keep <= all that were counted; a device that failed may have counted fewer.
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
