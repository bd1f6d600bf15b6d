/*
 * esmm_ffn.h: a feed-forward layer that can be trained, built on esmm.h.
 *
 *     esmm_ffn *ffn;  esmm_ffn_cache *cache;
 *     esmm_ffn_create(ctx, &opts, &ffn);
 *     esmm_ffn_cache_create(ctx, ffn, &cache);
 *     esmm_ffn_set_weights(ctx, ffn, &weights, NULL);             after every change of the weights
 *     esmm_ffn_forward(ctx, ffn, &x, &y, cache, NULL);
 *     esmm_ffn_backward(ctx, ffn, cache, &dy, &grads, NULL);      if you train
 *
 * With T tokens in the rows of x:
 *
 *     h = act(x W1 + b1)                                     [T, d_hidden]
 *     h = act(x Wg + bg) * (x W1 + b1)                       if it is gated
 *     y = h W2 + b2                                          [T, d_model]
 *
 * The pass that makes h also finds its zeros, so y skips them without another scan. dh is computed only where h is
 * nonzero; dx and the weights' gradients are products that look for the zeros of h and of dpre again.
 *
 * Modes
 *     exact    (default) skips zeros where that pays
 *     dense    never skips, so zeros meet Inf and NaN as IEEE says; else the same result
 *     sparse   products of h and of dpre (the gradient before the activation) get at most two of every four values,
 *              2:4, chosen by the sparsifier
 *     split    the same for the sparsest share of h's columns only, ranked by their nonzeros in this forward pass;
 *              ties go to the lower index. The other columns are multiplied as they are, and both parts are added
 *
 * Gradients pass straight through: they are those of the layer without the dropped values.
 *
 * The reduction axis rule: the four values of a group must lie side by side along the axis that is summed.
 *   y = h W2, dx = dpre W1'      sum over features: four features of one token
 *   dW2 = h' dy, dW1 = x' dpre   sum over tokens:   four tokens of one feature
 *   x W1, dh = dy W2', biases    have no sparse operand: nothing is dropped
 * So a weight gradient and dx drop different values of the same matrix. A group of features is four neighbours, by
 * index, among those that go sparse; a group of tokens is four neighbours in the order of permute_tokens. A last group
 * may be short; with two values it is kept whole.
 *
 * Low rank: with rank1, W1 (and Wg) is u v with u [d_model, rank1], v [rank1, d_hidden]; with rank2, W2 is u v with
 * u [d_hidden, rank2], v [rank2, d_model]. The rule then holds for the factor that meets h: v of W1, u of W2.
 *
 * Devices. A layer computes on the device of the context that made it; contexts of another device are refused
 * (ESMM_ERR_DEVICE). On a GPU every matrix, bias and gradient lies in that GPU's memory (ESMM_DEVICE), and work goes to
 * the context's stream. Operands of the layer's own 16-bit dtype use the tensor cores; others are slower.
 *
 * On a GPU calls are asynchronous, except: a report; the first pass of a new shape, whose memory is then kept; backward
 * in exact mode, which waits for h when features are dead, to leave them out (with more than 90 % alive, in one step of
 * eight).
 *
 * A step that has run once can be captured into a graph; from then on its cache takes passes of that number of tokens
 * only. Setting weights and passes without a cache use the layer's memory: if you call them on several streams, put
 * each behind the one before.
 *
 * The rules of esmm.h, part 2, hold here too.
 */
#ifndef ESMM_FFN_H
#define ESMM_FFN_H

#include "esmm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct esmm_ffn esmm_ffn;             /* the layer: its options and its prepared weights */
typedef struct esmm_ffn_cache esmm_ffn_cache; /* what one forward pass leaves for its backward pass */

typedef enum esmm_ffn_mode {
  ESMM_FFN_EXACT = 0,
  ESMM_FFN_SPLIT = 1,
  ESMM_FFN_SPARSE = 2,
  ESMM_FFN_DENSE = 3
} esmm_ffn_mode;

/* In all three a group that holds NaN or Inf keeps its two largest, NaN first. */
typedef enum esmm_sparsifier {
  ESMM_SPARSIFY_TOP_N = 0, /* the two largest magnitudes; ties go to the lower place */
  ESMM_SPARSIFY_SOFT = 1,  /* soft threshold: all four shrink by the third largest magnitude, then one factor scales the
                              whole matrix as near as possible to the original */
  ESMM_SPARSIFY_MVUE = 2   /* random, unbiased, of least variance: each stays with a probability p that follows its
                              magnitude, and is divided by p. Two or fewer nonzeros stay as they are */
} esmm_sparsifier;

typedef struct esmm_ffn_opts {
  size_t size;
  int64_t d_model, d_hidden;  /* at least 1 */
  int64_t rank1, rank2;       /* of W1 (and Wg), of W2; 0: full */
  esmm_activation activation; /* 0: ESMM_ACT_RELU2 */
  int gated;                  /* 1: h = act(gate) * up */
  esmm_dtype dtype;           /* of h and of the caches' other matrices; arithmetic between products is fp32 */
  esmm_ffn_mode mode;
  esmm_sparsifier sparsifier; /* split and sparse */
  double sparse_share;        /* split: share of the columns of h that goes sparse, above 0 and at most 1; 0: 0.95 */
  int permute_tokens;         /* split and sparse: 1: groups of four tokens follow an order shuffled by seed, so that
                                 neighbours, which resemble each other, rarely share one */
  uint64_t seed;              /* of the shuffle and of MVUE: the same seed and calls give the same bits */
} esmm_ffn_opts;

ESMM_API esmm_status esmm_ffn_create(esmm_ctx *ctx, const esmm_ffn_opts *opts, esmm_ffn **ffn);
ESMM_API void esmm_ffn_free(esmm_ffn *ffn); /* afterwards its caches may only be freed */

/* Your parameters. Matrices have any dtype, order and ld; those that the options exclude are NULL. */
typedef struct esmm_ffn_weights {
  size_t size;
  const esmm_matrix *w1;     /* [d_model, d_hidden]; with rank1: [d_model, rank1] */
  const esmm_matrix *w1_v;   /* [rank1, d_hidden], with rank1 only */
  const esmm_matrix *gate;   /* like w1, if the layer is gated */
  const esmm_matrix *gate_v; /* like w1_v */
  const esmm_matrix *w2;     /* [d_hidden, d_model]; with rank2: [d_hidden, rank2] */
  const esmm_matrix *w2_v;   /* [rank2, d_model], with rank2 only */
  const float *b1, *b_gate;  /* [d_hidden]; NULL: none */
  const float *b2;           /* [d_model]; NULL: none */
} esmm_ffn_weights;

/*
 * Prepares the weights for forward passes; call it again after every change of them. prepare: NULL, or how to prepare
 * them (its strict is ignored: the mode decides). Dense mode needs dense weights: another format is
 * ESMM_ERR_UNSUPPORTED.
 *
 * Biases are copied. Backward passes read the matrices' data (not the structs) again: keep it in place and unchanged
 * until the last of them. With prepare NULL the same holds for
 * - decoding (at most 16 tokens, no cache) through a layer that a ReLU gates, in exact mode. It reads of w1 only what
 *   the gate lets through: in place if w1 is column-major, else from a copy that the first such pass makes;
 * - all forward passes on a GPU. They read a 16-bit row-major matrix in place if its columns are a multiple of 128,
 *   without padding and aligned to 256 bytes; others from a copy that this call makes on the device. If device memory
 *   does not suffice for it, the layer has no weights until the next call.
 */
ESMM_API esmm_status esmm_ffn_set_weights(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_ffn_weights *weights,
                                          const esmm_prepare_opts *prepare);

/*
 * A cache belongs to the layer it was made for and holds its last forward pass: h, values before the activation if the
 * derivative needs them, each column's count of nonzeros, and h's bitmaps. It grows to the largest pass. Free it before
 * or after the layer. A backward pass is refused (ESMM_ERR_ARGUMENT) with a cache of another layer, an empty one, or
 * one whose weights have been replaced since.
 */
ESMM_API esmm_status esmm_ffn_cache_create(esmm_ctx *ctx, esmm_ffn *ffn, esmm_ffn_cache **cache);
ESMM_API void esmm_ffn_cache_free(esmm_ffn_cache *cache);

/* The values dropped from one product's operand; all 0 in the exact and dense modes. */
typedef struct esmm_ffn_drop {
  int64_t kept, dropped; /* nonzeros that stayed, and that became zero */
  double norm;           /* Frobenius norm of the operand before */
  double norm_dropped;   /* of the operand less its replacement */
} esmm_ffn_drop;

typedef struct esmm_ffn_report {
  size_t size;
  int64_t tokens;
  int64_t alive_columns;  /* columns of h with a nonzero */
  int64_t sparse_columns; /* that went 2:4 */
  double sparse_share;    /* the same over d_hidden */
  int64_t strip_rows;     /* tokens that share one bitmap */
  double element_density; /* of h */
  double strip_density;   /* of h at strip_rows */
  esmm_ffn_drop y;        /* h, in y: set by the forward pass, and repeated by the backward pass */
  esmm_ffn_drop dx;       /* dpre, in dx (both halves if gated): set by the backward pass */
  esmm_ffn_drop dw1;      /* dpre, in dW1 (in low rank: of the factor that meets h) */
  esmm_ffn_drop dgate;    /* the gate's dpre, in dWg */
  esmm_ffn_drop dw2;      /* h, in dW2 */
} esmm_ffn_report;

/*
 * x, y [T, d_model]; y must not overlap x. cache NULL: no backward pass will follow. report may be NULL; otherwise set
 * its size. The cache remembers where x lies: keep x in place and unchanged until the backward pass has run.
 *
 * Threads: with caches of their own, forward and backward passes of several contexts may use one layer at once. Setting
 * weights, making or freeing caches, and passing NULL for the cache are for one caller at a time.
 */
ESMM_API esmm_status esmm_ffn_forward(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_matrix *x, esmm_matrix *y,
                                      esmm_ffn_cache *cache, esmm_ffn_report *report);

/* Where gradients go: your matrices, of the weights' shapes (any dtype, order and ld). NULL: not wanted, nor computed.
   They must not overlap each other or any input. */
typedef struct esmm_ffn_grads {
  size_t size;
  esmm_matrix *x; /* [T, d_model]; always overwritten */
  esmm_matrix *w1, *w1_v, *gate, *gate_v, *w2, *w2_v;
  float *b1, *b_gate, *b2;
  int accumulate; /* 1: adds the weights' and biases' gradients to the contents */
} esmm_ffn_grads;

/* dy [T, d_model]. May be called again with another dy. If it runs out of memory half-way, some gradients may already
   have been written. */
ESMM_API esmm_status esmm_ffn_backward(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *dy,
                                       const esmm_ffn_grads *grads, esmm_ffn_report *report);

#ifdef __cplusplus
}
#endif
#endif
