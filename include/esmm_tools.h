/*
 * esmm_tools.h: tools beside the product of esmm.h.
 *
 *   pruning       makes a weight matrix fit a sparse format, and reports the loss
 *   patterns      the share that would be skipped, and an order of the rows in which it is larger
 *   tuning        measures this machine, so that the plan chooses well here
 *   timers        device time between two points of a stream
 *   generators    seeded matrices with zeros in known places, for tests and benchmarks
 *
 * The rules of esmm.h, part 2, hold here too.
 */
#ifndef ESMM_TOOLS_H
#define ESMM_TOOLS_H

#include "esmm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------ pruning */

/*
 * Does b [k,n] fit the format? Only NM can be checked: every matrix fits BSR and DENSE, which are ESMM_ERR_UNSUPPORTED.
 * *k and *col are -1 if it fits. Otherwise they are the first k and the first column of the first group with more than
 * `keep` nonzero k's: of the lowest k, and there of the lowest column.
 */
ESMM_API esmm_status esmm_format_check(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, int64_t *k,
                                       int64_t *col);

/* Which elements compete where single ones are pruned. */
typedef enum esmm_prune_scope {
  ESMM_PRUNE_COLUMN = 0, /* those of a column of b: each output keeps the same number */
  ESMM_PRUNE_MATRIX = 1  /* all of b */
} esmm_prune_scope;

/*
 * Sets elements of b [k,n] to zero so that it fits a format, or so that few are left.
 *
 * NM: of each group of k's the `keep` elements of largest |b| stay; of equal ones, the lower k. With group_cols above 1
 * the columns of a strip choose together, by the sum of squares over them.
 *
 * BSR: the blocks of largest norm (sum of squares) stay; of equal ones, the one of the lower block row, then of the
 * lower block column. round(density * all blocks) of them stay, and their contents are not touched.
 *
 * DENSE: top-N. The `top` elements of largest |b| stay, of each column or of all of b; or round(density * elements) of
 * them, where top is 0. Of equal ones, the lower k, then the lower column.
 *
 * With input_norms, |b| is |b| * input_norms[k] wherever it is compared: k's norm in the input that b
 * multiplies. NaN counts as infinite. Of equal ones a nonzero always stays before a zero, also where a norm is 0.
 *
 * With soft (a soft threshold) the values that top-N or NM keeps shrink: the largest dropped |b| is subtracted from
 * those it competed with (a value that would change sign becomes zero), then the whole matrix is multiplied by the
 * factor, 1 or more, that brings it closest to b. So the result is continuous in b. A group, column or matrix that
 * holds NaN or Inf does not shrink, and does not count for the factor.
 */
typedef struct esmm_prune_opts {
  size_t size;
  esmm_format format;       /* DENSE (the default) needs top or density: every matrix fits it */
  double density;           /* share to keep, 0 to 1. BSR: of blocks; has no default: 0 drops all. DENSE: of elements */
  const float *input_norms; /* [k], finite and not negative; NULL: all 1 */
  int64_t top;              /* DENSE: how many elements to keep; 0: density says */
  esmm_prune_scope scope;   /* DENSE: of what */
  int soft;                 /* 1: soft threshold; DENSE, and NM whose columns choose alone */
} esmm_prune_opts;

/* Elements: kept and dropped count nonzeros of b before, by whether they are nonzero after; norms are Frobenius norms,
   without input_norms. */
typedef struct esmm_prune_report {
  size_t size;
  int64_t kept, dropped;
  double norm;         /* of b before */
  double norm_dropped; /* of the dropped elements; soft: of b before less b after */
} esmm_prune_report;

/* report may be NULL. A b on the GPU is pruned there, with the same bits as on a CPU; for BSR blocks of fewer than 16
   elements it is copied to the host and back. The call waits. */
ESMM_API esmm_status esmm_prune(esmm_ctx *ctx, esmm_matrix *b, const esmm_prune_opts *opts, esmm_prune_report *report);

/* ------------------------------------------------------------------------------------------------ patterns */

/*
 * An order of A's rows that puts similar ones into the same strip, so that fewer k's are alive in it.
 *   rows       a pattern of single rows
 *   order      receives as many numbers as there are rows (never NULL, even if there are none): order[i] is the row
 *              that should stand i-th, each row once
 *   reordered  NULL, or receives the pattern of strips of strip_rows rows in that order. Its density is at most that of
 *              esmm_pattern_coarsen(rows, strip_rows): if nothing is gained the rows stay as they are
 *
 * The library never reorders by itself: if you use the order, gather A's rows and put C's back. The same pattern gives
 * the same order. Takes O(rows k + rows log^2 rows): the bitmaps are read a few times, and the rows are halved by at
 * most 1024 of the k's. A tenth of a second for 2048 rows.
 */
ESMM_API esmm_status esmm_pattern_reorder(esmm_ctx *ctx, const esmm_pattern *rows, int64_t strip_rows, int64_t *order,
                                          esmm_pattern **reordered);

/*
 * The share that a tiled kernel would skip, counted over every pair of an A strip and a B strip (equal k):
 *   block: a stretch of block_k k's without a joint bit (no thread block need load it)
 *   warp:  the same for stretches of warp_k k's (a warp tile's step)
 *   dot:   single k's outside the joint
 * Shares are of all stretches (or k's); the last stretch may be short. joint_density = 1 - dot_skipped.
 */
typedef struct esmm_skip_stats {
  size_t size;
  int64_t block_k, warp_k; /* in: 0 means 64 and 8 */
  double block_skipped, warp_skipped, dot_skipped;
  double joint_density;
} esmm_skip_stats;

ESMM_API esmm_status esmm_pattern_skip_stats(esmm_ctx *ctx, const esmm_pattern *a, const esmm_pattern *b,
                                             esmm_skip_stats *stats);

/* ------------------------------------------------------------------------------------------------ tuning */

/*
 * Measures the plan's cost constants on this machine (a few seconds), uses them in this context and, if save is not 0,
 * writes them to esmm_tune_path() for later contexts. If it cannot save, it says so before it measures (ESMM_ERR_IO).
 * Of a GPU's kernels those for fp32 are measured; the others keep shipped constants.
 * progress may be NULL; it is called with done and total.
 */
ESMM_API esmm_status esmm_tune(esmm_ctx *ctx, int save, void (*progress)(void *user, int done, int total), void *user);
/*
 * Times the fastest candidates for C = A x weights on this A, in turns, and remembers their times. Later products
 * choose by them, captured ones too: products of these weights, or of others of that shape, with the same number of
 * rows, about the same share of zeros, and operands and options of the same kind. Makes the product some 90 times, and
 * waits. C holds it afterwards.
 *
 * opts: as of esmm_matmul, such that C does not depend on its old values: beta 0, the residual apart from C, no
 * statistics. force must not name a kernel.
 *
 * ESMM_ERR_UNSUPPORTED, before anything is multiplied: the context does not learn, its stream is captured, there is
 * nothing to multiply; on a GPU also gated and strict products and operands in host memory, which are not timed. A
 * product that is too short for a clock (1 us on a CPU, a launch on a GPU) teaches nothing; that is no failure.
 */
ESMM_API esmm_status esmm_tune_weights(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                                       const esmm_matmul_opts *opts);
/*
 * Writes the times that the context learnt (esmm_ctx_opts.deterministic) to a file beside esmm_tune_path(), of the same
 * name but for its ending ".measured", for later contexts with this machine, these sources and this number of threads.
 * It keeps what other processes have written there meanwhile. Freeing a context does the same, and ignores failures.
 */
ESMM_API esmm_status esmm_tune_save(esmm_ctx *ctx);
ESMM_API const char *
esmm_tune_path(const esmm_ctx *ctx);             /* "" without XDG_CACHE_HOME and HOME, or with no_tuning_cache */
ESMM_API int esmm_is_tuned(const esmm_ctx *ctx); /* 1: constants were measured here, not shipped */

/*
 * Constants measured on a busy machine are worth less. esmm_tune_load is the share of the CPUs, in per cent, that other
 * processes took meanwhile; it is kept with the constants. esmm_load measures the same now: it keeps the context's
 * threads busy for a tenth of a second. More than ESMM_BUSY is a busy machine: tune again when it is idle. Both are 0
 * on a GPU, whose own clock measures, and for shipped constants.
 */
#define ESMM_BUSY 10
ESMM_API int esmm_tune_load(const esmm_ctx *ctx);
ESMM_API int esmm_load(esmm_ctx *ctx);

/* ------------------------------------------------------------------------------------------------ timers */

/* Seconds of device time between start and stop, each on the stream that is the context's at that call; on a CPU,
   seconds of wall time. */
typedef struct esmm_timer esmm_timer;
ESMM_API esmm_status esmm_timer_create(esmm_ctx *ctx, esmm_timer **timer);
ESMM_API void esmm_timer_free(esmm_timer *timer); /* before its context */
ESMM_API esmm_status esmm_timer_start(esmm_timer *timer);
ESMM_API esmm_status esmm_timer_stop(esmm_timer *timer);
ESMM_API esmm_status esmm_timer_seconds(esmm_timer *timer, double *seconds); /* waits for the stop */

/* ------------------------------------------------------------------------------------------------ generators */

typedef enum esmm_generator_kind {
  ESMM_GEN_DENSE = 0,      /* no zeros */
  ESMM_GEN_RANDOM = 1,     /* each element nonzero with probability `density` */
  ESMM_GEN_BLOCKWISE = 2,  /* each (strip, k) alive with probability `density`; alive ones have no zeros */
  ESMM_GEN_PATTERN = 3,    /* element (i, k) nonzero where pattern[k % 8] is '1' */
  ESMM_GEN_ACTIVATIONS = 4 /* ReLU or ReLU2 of correlated Gaussians, like a trained net's */
} esmm_generator_kind;

typedef enum esmm_operand { ESMM_OPERAND_A = 0, ESMM_OPERAND_B = 1 } esmm_operand;

typedef struct esmm_generator {
  size_t size;
  esmm_generator_kind kind;
  esmm_operand operand; /* which way k runs: A is [m,k], B is [k,n] */
  uint64_t seed;        /* same seed, same matrix, on every machine */
  double density;       /* 0 to 1, for RANDOM, BLOCKWISE; element density for ACTIVATIONS. Has no default: 0 is empty */
  int64_t strip;        /* BLOCKWISE: rows of A (columns of B) per strip; 0 means 32 */
  const char *pattern;  /* PATTERN: eight characters 0 or 1 */
  double dead;          /* ACTIVATIONS: share of features that are never active, 0 to 1 */
  esmm_activation activation; /* ACTIVATIONS: RELU or RELU2 (the default) */
  int integers;               /* 1: values are small integers, so that sums are exact */
} esmm_generator;

ESMM_API esmm_status esmm_generate(esmm_ctx *ctx, const esmm_generator *generator, esmm_matrix *out);

/* Sets density and dead of an ACTIVATIONS generator: "early", "middle" or "late" layers of a trained net. */
ESMM_API esmm_status esmm_generator_preset(esmm_ctx *ctx, const char *preset, esmm_generator *generator);

#ifdef __cplusplus
}
#endif
#endif
