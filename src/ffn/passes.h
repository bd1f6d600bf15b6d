/*
 * passes.h: a layer's work between its products, as one table of functions for each device. forward.c and backward.c
 * combine products and passes. They are the same for every device, because esmm_matmul does the products and this table
 * the rest. cpu.c has a CPU's table, src/cuda/ffn/ a GPU's.
 *
 * Matrices, vectors of biases and the buffers of caches lie where the table's device computes. Between products every
 * matrix is tight and row-major, of the layer's dtype, but for gradients where `wide` says fp32. A function that can
 * fail has set the context's error text.
 */
#ifndef ESMM_FFN_PASSES_H
#define ESMM_FFN_PASSES_H

#include "esmm_ffn.h"
#include "internal.h"

/* Products of the backward pass, by their B: each has its own, so that the plan remembers them apart. */
typedef enum ffn_b {
  FFN_B_DT,          /* dt', in dh */
  FFN_B_CONTRACT,    /* dt, in the gradient of contract */
  FFN_B_RESTORE,     /* restore', in dt */
  FFN_B_DY,          /* dy, in the gradient of restore */
  FFN_B_IN,          /* x or x reduce, in the gradient of expand; the gate's behind it */
  FFN_B_EXPAND = 6,  /* expand', in ds; the gate's behind it */
  FFN_B_DS = 8,      /* ds, in the gradient of reduce; the gate's behind it */
  FFN_B_REDUCE = 10, /* reduce', in dx; the gate's behind it */
  FFN_B_SOME = 12,   /* those rows of expand' that belong to alive features; the gate's behind it */
  FFN_BS = 14
} ffn_b;

/* Operands that may go sparse: each draws from its own seed in each pass. */
typedef enum ffn_operand {
  FFN_OPERAND_Y,
  FFN_OPERAND_DX,
  FFN_OPERAND_DX_GATE,
  FFN_OPERAND_DW1,
  FFN_OPERAND_DGATE,
  FFN_OPERAND_DW2
} ffn_operand;

/* Which of them share a line of the report. */
typedef enum ffn_drop { FFN_DROP_Y, FFN_DROP_DX, FFN_DROP_DW1, FFN_DROP_DGATE, FFN_DROP_DW2, FFN_DROPS } ffn_drop;

typedef enum ffn_axis { FFN_ALONG_FEATURES, FFN_ALONG_TOKENS } ffn_axis;

typedef struct ffn_sparsify {
  ffn_axis axis;
  ffn_drop drop;         /* what was dropped is added to this */
  uint64_t seed;         /* for this matrix and pass alone */
  const int32_t *places; /* of features, in the matrix; -1: not there, all zero. NULL: where their index says */
} ffn_sparsify;

/* A product whose operand goes sparse: c = m b, or along tokens m' b, plus the other terms. */
typedef struct ffn_sparse_product {
  const ffn_sparsify *how;
  const esmm_matrix *m;         /* [tokens, features], tight */
  const esmm_weights *prepared; /* b [features, .], or along tokens [tokens, .]; NULL: as take_b makes it of */
  const esmm_matrix *b;         /* this, */
  ffn_b which;                  /* as this */
  const float *bias;            /* [columns of c] or NULL */
  const esmm_matrix *plus;      /* NULL for nothing; may be c itself */
  esmm_matrix *c;
} ffn_sparse_product;

/* dh [tokens, features] becomes dpre, in place, and the gate's beside it. */
typedef struct ffn_derivative {
  const esmm_matrix *h;         /* [tokens, features]: all that a ReLU without a gate needs */
  const esmm_matrix *up, *gate; /* before the activation, [tokens, d_hidden]; NULL where there is none */
  const int32_t *order;         /* which of their columns; NULL: all */
  int64_t count;                /* how many; zeros follow */
  esmm_matrix *dpre, *dpre_gate;
} ffn_derivative;

typedef struct ffn_passes {
  bool patterns; /* bitmaps of h help the product behind it: it is asked for them */
  bool turned;   /* products read a B that lies transposed: backward need not turn weights round */
  bool wide;     /* gradients between products are fp32, else of the layer's dtype */
  bool alike;    /* scatter_rows takes a src of dst's order, and without `add` of dst's dtype; else fp32 rows */
  bool keeps;    /* the memory of earlier weights is used again, in place */

  /* Modes, as bits 1 << esmm_ffn_mode, in which backward leaves out features that are dead in the whole batch. */
  unsigned compacts;
  int64_t step; /* their number is rounded up to a multiple of this, with zeros */

  /* May be NULL: always. May a pass of that many tokens use this cache now? Can more memory be allocated now? */
  esmm_status (*admit)(esmm_ctx *ctx, esmm_ffn_cache *cache, int64_t tokens);
  esmm_status (*may_alloc)(esmm_ctx *ctx);
  /* May be NULL: always. Shall a pass find dead features? Where few were dead, only now and then. */
  esmm_status (*looks)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool *looks);

  /* ---- memory of caches and biases: kept from pass to pass ---- */
  esmm_status (*alloc)(esmm_ctx *ctx, size_t bytes, void **memory);
  void (*release)(const esmm_allocator *allocator, int ordinal, void *memory, size_t bytes); /* NULL is fine */
  esmm_status (*copy_bias)(esmm_ctx *ctx, const float *from, int64_t n, float *to);

  /* ---- B of products ---- */
  /* The layer's weights. opts: with defaults; given: by the caller. old: the weights the same matrix had before, or
     NULL: it may become *out, changed, and is then no longer the caller's to free. */
  esmm_status (*prepare)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, bool given,
                         esmm_weights *old, esmm_weights **out);
  /* B of a product in the backward pass, whose A has that dtype; put_back once the product is under way. */
  esmm_status (*take_b)(esmm_ctx *ctx, esmm_ffn_cache *cache, ffn_b which, const esmm_matrix *b, esmm_dtype a,
                        bool strict, esmm_weights **out);
  void (*put_back)(esmm_ffn_cache *cache, ffn_b which, esmm_weights *w);

  /* ---- forward ---- */
  /* h = act(gate) * up, or act(up) where gate is NULL. */
  esmm_status (*activate)(esmm_ctx *ctx, const esmm_ffn *ffn, const esmm_matrix *up, const esmm_matrix *gate,
                          esmm_matrix *h);
  /* Counts, and where it has a use for it the pattern, of an h that the product before did not count. */
  esmm_status (*count)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);
  /* What follows from the counts: FFN_ORDER, FFN_COLUMNS, FFN_TOKENS and the numbers of the cache. once: no backward
     pass will follow. */
  esmm_status (*rank)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool once);

  /*
   * Few tokens through a layer that a ReLU gates: the gate first, then only the features it opens. May be NULL: never.
   * can_decode: *gate is where the rectified gate is to be written, [tokens, d_hidden]; data is NULL where the pass
   * cannot be made so. decode: y from it, and h->data is NULL; or h [tokens, d_hidden], and y is the caller's to make.
   * renew: the weights have changed, and so must the cache's copy of them.
   */
  esmm_status (*can_decode)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                            esmm_matrix *gate);
  esmm_status (*decode)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *x,
                        const esmm_matrix *gate, esmm_matrix *h, esmm_matrix *y);
  esmm_status (*renew)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);

  /* ---- backward ---- */
  esmm_status (*derive)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const ffn_derivative *job);
  /* May be NULL. dh where h (gated: the gate) is alive and zeros elsewhere, if that is cheaper than all of it; else
   *done stays false. dt [tokens, d_out], order: as FFN_ORDER, or NULL. */
  esmm_status (*masked)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *dt,
                        const esmm_matrix *h, const int32_t *order, esmm_matrix *dh, bool *done);
  /* Sets cache->alive, the entries of FFN_ORDER, and makes FFN_PLACES from those. May say that all are alive. */
  esmm_status (*settle)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);

  /* dst = src with at most two nonzeros in each group of four, in the columns that the cache says; both [tokens, .] of
     one dtype, tight. */
  esmm_status (*sparsify)(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparsify *how, const esmm_matrix *src,
                          esmm_matrix *dst);
  /* May be NULL. Both in one, where the device has a product for it; else *done stays false. */
  esmm_status (*multiply_sparse)(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparse_product *product, bool *done);
  esmm_status (*forget_drops)(esmm_ctx *ctx, esmm_ffn_cache *cache, bool forward); /* of y, or all the others */

  /* dst = rows order[0..count) of src (order NULL: all), and zeros behind them; `turned`: src and dst are of one dtype
     and row-major, else src is of any order, and dst of any dtype. */
  esmm_status (*gather_rows)(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                             esmm_matrix *dst);
  /* The same of columns, both of one dtype and row-major. */
  esmm_status (*gather_columns)(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                esmm_matrix *dst);
  /* Row i of src (as `alike` says) to row f of dst where places[f] is i; rows of dst that have no place become zero.
     With add, src is added and they stay. */
  esmm_status (*scatter_rows)(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *places, esmm_matrix *dst, bool add);
  /* out[order[c]] (+)= the sum of column c of m, of count columns; order NULL: out[c]. The others of out's n become 0,
     unless added to. */
  esmm_status (*column_sums)(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *m, const int32_t *order,
                             int64_t count, int64_t n, float *out, bool add);
  void (*forget)(esmm_ffn_cache *cache); /* the device's part of a freed cache; NULL: nothing */

  /* Numbers of the report, to the cache's own: alive_columns, nonzeros, strip_density, drops. May wait. */
  esmm_status (*report)(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);
} ffn_passes;

extern const ffn_passes esmm_ffn_cpu; /* cpu.c */

#endif
