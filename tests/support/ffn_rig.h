/*
 * ffn_rig.h: a layer of the library beside one of the oracle, with the same parameters: what the tests of esmm_ffn_*
 * share.
 */
#ifndef ESMM_TEST_FFN_RIG_H
#define ESMM_TEST_FFN_RIG_H

#include "ffn_oracle.h"

typedef struct rig {
  oracle *o;
  esmm_ctx *ctx;
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  esmm_matrix p[P_COUNT], d[P_COUNT], y, dy;
  esmm_ffn_weights weights;
  esmm_ffn_grads grads;
  esmm_ffn_report report;
} rig;

/* How matrices lie in memory. */
typedef struct layout {
  esmm_dtype dtype;
  esmm_order order;
  int64_t pad;
} layout;

extern const layout plain; /* fp32, row-major, tight */
extern const char *const gradient_names[P_COUNT];

esmm_matrix make_matrix(int64_t rows, int64_t cols, layout l); /* full of NaN; free .data */
void must(esmm_ctx *ctx, esmm_status status);                  /* fails the test with the context's text */
void expect(rig *r, esmm_status got, esmm_status want, const char *word1, const char *word2);
esmm_ffn_opts opts_of(const oracle *o);

void rig_create(rig *r, oracle *o, const esmm_ffn_opts *opts, layout l, int threads);
void rig_run(rig *r); /* forward and backward */
void rig_free(rig *r);

/* b1 (or the gate's bias) so low that a share of the features is dead for every token. */
void kill_features(oracle *o, double share, uint64_t seed);
/* Parameters and dy become integers from -2 to 2, so many of the parameters 0. */
void make_integers(oracle *o, uint64_t seed, double zeros);

/* Every element within share of the largest one: sums of a few hundred terms of one size. */
void check_matrix(const char *what, const char *name, const esmm_matrix *m, const double *want, double share);
void check_all(const char *what, const rig *r, double share); /* y and every gradient, against the oracle's */

#endif
