/*
 * esmm.h: matrix products that skip the zeros they find at run time.
 *
 *     C = epilogue(alpha * A * B + beta * C)
 *
 * A [m,k] is activations: ordinary dense storage, known only now. B [k,n] is weights: prepared once, multiplied
 * many times. Nobody converts A to a sparse format; the library scans it, finds which k cannot contribute to which
 * tile of C, and never does that work. Where there is nothing to skip a dense kernel runs instead.
 *
 *     esmm_ctx *ctx;  esmm_weights *w;
 *     esmm_ctx_create(&ctx, NULL);
 *     esmm_prepare(ctx, &b, NULL, &w);              once
 *     esmm_matmul(ctx, &a, w, &c, NULL, NULL);      as often as you like
 *     esmm_weights_free(w);  esmm_ctx_free(ctx);
 *
 * Rules that hold everywhere
 * - Every function that can fail returns esmm_status. After a failure esmm_ctx_error(ctx) names the argument and its
 *   value (functions that take no context, or a const one, have only the status), new handles are NULL, C keeps what it
 *   held (on a GPU: unless work on it had begun), and files keep their old content.
 * - The library never prints, never exits, never aborts. The OpenMP runtime it is built with may: GNU's ends the
 *   process when the system refuses it threads.
 * - Options structs start with their size in bytes (`.size = sizeof opts`); a zero field means the default; a NULL
 *   pointer to one means all defaults. A size smaller than the library's is an older program's and fine; a larger one,
 *   or an unknown enum value, is an error, never a guess.
 * - Every _free accepts NULL.
 * - Dimensions are int64_t and may be 0. With k = 0 the product is zero, and the epilogue still applies.
 * - Threads: a context belongs to one caller thread at a time; two contexts may run at once. esmm_weights and
 *   esmm_pattern are immutable and may be shared by any number of contexts. Free them when nobody uses them.
 *
 * Numbers
 * - fp32, bf16 and fp16 for A, B and C in any mix; products are accumulated in fp32. Rounding to bf16 and fp16 is to
 *   nearest even; what is too large becomes Inf.
 * - -0.0 counts as zero; NaN and Inf count as nonzero. A zero that is skipped does not meet the other operand, so
 *   0 * Inf and 0 * NaN then contribute nothing; which zeros are skipped depends on the kernel and on their neighbours.
 *   Who needs IEEE propagation sets `strict`, which turns all skipping off.
 * - beta = 0 never reads C. alpha = 0 does not read A or B.
 * - The same call on the same data in the same context gives the same bits, for every kernel whose
 *   ESMM_KERNEL_DETERMINISTIC flag is set; all that the plan chooses from have it. Another tuning may choose another
 *   kernel.
 */
#ifndef ESMM_H
#define ESMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ESMM_VERSION_MAJOR 0
#define ESMM_VERSION_MINOR 1
#define ESMM_VERSION_PATCH 0

#if defined(__GNUC__)
#define ESMM_API __attribute__((visibility("default")))
#else
#define ESMM_API
#endif

/* ------------------------------------------------------------------------------------------------ status */

/* Values are fixed for ever; the gaps are for later. */
typedef enum esmm_status {
  ESMM_OK = 0,
  ESMM_ERR_ARGUMENT = 10,       /* NULL where a pointer is needed, an unknown enum value, an option out of range */
  ESMM_ERR_SHAPE = 11,          /* dimensions that do not agree, or are negative */
  ESMM_ERR_LD = 12,             /* leading dimension smaller than a row (or column) */
  ESMM_ERR_DTYPE = 13,          /* a dtype that does not exist or is not accepted here */
  ESMM_ERR_OVERFLOW = 14,       /* a size in bytes that does not fit in memory's address range, or blocks past int32 */
  ESMM_ERR_OVERLAP = 15,        /* C shares memory with A, or with another thing that it must not */
  ESMM_ERR_MEMORY = 20,         /* an allocation failed */
  ESMM_ERR_DEVICE_MEMORY = 21,  /* the GPU has too little free memory for this */
  ESMM_ERR_UNSUPPORTED = 30,    /* no kernel, or not the forced one, can do this, or it cannot be done while a stream is
                                   captured into a graph; the text says why */
  ESMM_ERR_UNKNOWN_KERNEL = 31, /* a kernel name that is not in the list */
  ESMM_ERR_DEVICE = 40,         /* an unknown device name, or a device that is not there or not supported */
  ESMM_ERR_DRIVER = 41,         /* no NVIDIA driver, or one that is too old */
  ESMM_ERR_DEVICE_LOST = 42,    /* the GPU stopped or a kernel crashed: nothing on this device works any more */
  ESMM_ERR_DRIVER_CALL = 43,    /* another failure of a driver call; the text names it */
  ESMM_ERR_IO = 50,             /* the operating system refused; the text has its reason */
  ESMM_ERR_FORMAT = 51,         /* not a weights file, or one whose fields contradict each other */
  ESMM_ERR_TRUNCATED = 52,      /* a file that ends too early */
  ESMM_ERR_CHECKSUM = 53,       /* a file whose bytes were changed */
  ESMM_ERR_VERSION = 54         /* a file of a newer version, or of the other byte order */
} esmm_status;

/* A short English name of a status ("leading dimension too small"); never NULL. */
ESMM_API const char *esmm_status_str(esmm_status status);

ESMM_API int esmm_version(void);             /* major * 10000 + minor * 100 + patch, of the library that runs */
ESMM_API const char *esmm_version_str(void); /* "0.1.0" */
ESMM_API const char *esmm_source_id(void);   /* 16 hex digits: a hash over the sources this library was built from */

/* ------------------------------------------------------------------------------------------------ context */

typedef struct esmm_ctx esmm_ctx; /* a device, its threads, scratch memory, cost constants, the last error text */

/* Where memory comes from. alloc returns NULL on failure; align is a power of two, at least 64. */
typedef struct esmm_allocator {
  void *(*alloc)(void *user, size_t bytes, size_t align);
  void (*free)(void *user, void *ptr, size_t bytes);
  void *user;
} esmm_allocator;

typedef struct esmm_ctx_opts {
  size_t size;
  const char *device;              /* "auto": the first NVIDIA GPU that works, else the CPU; "cpu"; "cuda", "cuda:0",
                                      "cuda:1", ... NULL: ESMM_DEVICE, else "auto" */
  int threads;                     /* 0: ESMM_THREADS, else the CPUs this process may run on; at most 1024 */
  const char *force;               /* kernel for every call; NULL: ESMM_FORCE, else the plan decides */
  const esmm_allocator *allocator; /* NULL: the system's. Must outlive the context and all weights made with it */
  int no_tuning_cache;             /* 1: use the shipped cost constants, do not look for a cache file */
  char *error;                     /* if not NULL, takes the error text when creation fails, also for a size that is
                                      too large; it is not looked at where size says that it is not there */
  size_t error_size;
} esmm_ctx_opts;

ESMM_API esmm_status esmm_ctx_create(esmm_ctx **ctx, const esmm_ctx_opts *opts);
ESMM_API void esmm_ctx_free(esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_error(const esmm_ctx *ctx); /* text of the last failure, "" when there was none */
ESMM_API int esmm_ctx_threads(const esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_device(const esmm_ctx *ctx);      /* "cpu", "cuda:0" */
ESMM_API const char *esmm_ctx_device_name(const esmm_ctx *ctx); /* "AMD EPYC 9634 84-Core Processor", "NVIDIA H200" */
ESMM_API const char *esmm_ctx_features(const esmm_ctx *ctx);    /* "avx2 fma f16c bmi2 avx512", "sm_90, 132 SMs" */
/* Why "auto" became the CPU ("libcuda.so.1: cannot open shared object file: ..."); "" otherwise. */
ESMM_API const char *esmm_ctx_device_reason(const esmm_ctx *ctx);

/*
 * Work on a GPU is asynchronous: esmm_matmul puts it on a stream and returns, unless an operand lies in host memory or
 * statistics are asked for. Streams are CUstream or cudaStream_t handles passed as void *; NULL is the default stream.
 * The library works in the device's primary context, so pointers and streams of the CUDA runtime, PyTorch and others
 * are valid here and the other way round. Calls of one context on several streams are put in order by the library.
 *
 * esmm_matmul may be captured into a CUDA graph once the same call has run outside the capture; what waits (statistics,
 * operands in host memory), timers and esmm_prepare are refused there with ESMM_ERR_UNSUPPORTED, before anything is
 * captured. Memory of the device cannot be had or freed during a capture, nor contexts or weights.
 *
 * The graph works in its context's scratch memory, and the library does not see when it runs: its launches are put in
 * order by the caller. It must not run at the same time as other calls of that context, or as another graph captured
 * from it, and the context, the weights and the operands must outlive it. esmm_ctx_synchronize does not wait for it.
 * Which kernels a graph holds is settled at its capture, from sizes and weights; where the choice between them hangs on
 * how dense A is, the GPU makes it anew each time the graph runs, from what A holds then.
 */
ESMM_API esmm_status esmm_ctx_synchronize(esmm_ctx *ctx); /* waits for all work of this context */

/* Memory of the context's device (host memory on a CPU), aligned to 256 bytes. Free accepts NULL and waits for the
   device. */
ESMM_API esmm_status esmm_memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr);
ESMM_API void esmm_memory_free(esmm_ctx *ctx, void *ptr);

/* Seconds of device time between start and stop on a stream (of wall time on a CPU). */
typedef struct esmm_timer esmm_timer;
ESMM_API esmm_status esmm_timer_create(esmm_ctx *ctx, esmm_timer **timer);
ESMM_API void esmm_timer_free(esmm_timer *timer); /* before its context */
ESMM_API esmm_status esmm_timer_start(esmm_timer *timer, void *stream);
ESMM_API esmm_status esmm_timer_stop(esmm_timer *timer, void *stream);
ESMM_API esmm_status esmm_timer_seconds(esmm_timer *timer, double *seconds); /* waits for the stop */

/* ------------------------------------------------------------------------------------------------ matrix */

typedef enum esmm_dtype { ESMM_F32 = 0, ESMM_BF16 = 1, ESMM_F16 = 2 } esmm_dtype;
typedef enum esmm_order { ESMM_ROW_MAJOR = 0, ESMM_COL_MAJOR = 1 } esmm_order;
/* Where data lies. Nobody checks it: a host pointer called ESMM_DEVICE makes a kernel crash, and with it all CUDA work
 * of the process. */
typedef enum esmm_place { ESMM_HOST = 0, ESMM_DEVICE = 1 } esmm_place;

/* data: aligned to its elements. ld: elements from one row (ROW_MAJOR) or column (COL_MAJOR) to the next; 0 means
 * tightly packed. A context of a GPU takes matrices in its own memory and in the host's: those it copies there and back
 * (esmm_stats.staged_bytes). */
typedef struct esmm_matrix {
  void *data;
  int64_t rows, cols, ld;
  esmm_dtype dtype;
  esmm_order order;
  esmm_place place;
  int device; /* which GPU, for ESMM_DEVICE: 0 for cuda:0; 0 for host memory */
} esmm_matrix;

ESMM_API size_t esmm_dtype_size(esmm_dtype dtype);     /* bytes of an element; 0 for an unknown dtype */
ESMM_API const char *esmm_dtype_str(esmm_dtype dtype); /* "f32", "bf16", "f16" */

/* Copies src to dst of the same shape, converting dtype and order, between host and device too. They must not share
   memory. On a GPU it works on the default stream; it waits until it is done where src or dst lies in host memory, and
   is asynchronous, like esmm_matmul, where both lie in the GPU's. */
ESMM_API esmm_status esmm_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

/* ------------------------------------------------------------------------------------------------ weights */

/* Prepared B: immutable, shareable between contexts of one device: a GPU's lie in its memory. */
typedef struct esmm_weights esmm_weights;

typedef enum esmm_use {
  ESMM_USE_ANY = 0, /* any m: keeps two forms of B, at most twice its bytes (rows are padded to 64 bytes, panels to 32
                        columns: narrow matrices take more) */
  ESMM_USE_DECODE = 1, /* m of 1 to 16: keeps B's rows only */
  ESMM_USE_LARGE_M = 2 /* m well above 16: keeps B's panels only */
} esmm_use; /* on a GPU: a B of 16 bits is kept once, as its rows; one of fp32 as strips of 32 columns, and in a second
               form for dense kernels, unless used for decode or max_bytes_ratio is below 2 */

/*
 * What B is turned into. Dense keeps all of B, or its panels without the k's that are zero across 32 columns; the
 * others keep what the format holds and nothing else. docs/formats.md has the layouts. Kernels for a format compete
 * with one another; strict products need dense weights, and weights on a GPU are dense (ESMM_ERR_UNSUPPORTED).
 */
typedef enum esmm_format {
  ESMM_FORMAT_DENSE = 0,
  ESMM_FORMAT_BSR = 1, /* blocks of block_rows x block_cols, those with a nonzero */
  ESMM_FORMAT_NM = 2   /* of every m k's at most n are nonzero, in each column or in each strip of nm_cols columns */
} esmm_format;

typedef struct esmm_prepare_opts {
  size_t size;
  esmm_use use;           /* of a dense B; other formats keep one form for every m */
  int strict;             /* 1: keep zeros of B, so that strict products can run from panels */
  double max_bytes_ratio; /* most bytes the forms of B may hold, over B's own; default 2. Padding to whole panels,
                             cache lines and blocks is not counted */
  void *stream;           /* GPU: B is ready in this stream's order. esmm_prepare waits for its own work */
  esmm_format format;
  int block_rows, block_cols; /* BSR: 1 to 256; rows run along k. 0: 32 (esmm_prepare_bsr: those of its b) */
  int n, m;                   /* NM: 1 <= n <= m <= 32; both 0: 2 and 4. B must fit: see esmm_nm_check, esmm_prune */
  int nm_cols;                /* NM: columns that share their choice of k's; 0 or 1: each has its own */
} esmm_prepare_opts;

typedef struct esmm_weights_info {
  size_t size;
  int64_t rows, cols; /* k, n */
  esmm_dtype dtype;
  esmm_use use;
  int strict;
  int64_t strip_cols;     /* columns that share one bitmap */
  double element_density; /* nonzero share of B's elements */
  double strip_density;   /* set share of B's bitmap bits */
  size_t bytes;           /* held by the prepared weights */
  esmm_format format;
  int block_rows, block_cols; /* BSR, else 0 */
  int n, m, nm_cols;          /* NM, else 0; nm_cols is at least 1 */
  int64_t blocks;             /* BSR: blocks kept */
  double block_density;       /* BSR: kept share of all blocks */
} esmm_weights_info;

ESMM_API esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                                  esmm_weights **weights);
ESMM_API void esmm_weights_free(esmm_weights *weights); /* a GPU's: waits for the device */
ESMM_API esmm_status esmm_weights_get_info(const esmm_weights *weights, esmm_weights_info *info); /* set info->size */

/* Writes to a temporary file beside path, then renames it: path holds the old or the new weights, never half. A file
   does not know max_bytes_ratio: on a GPU, load makes what the default allows. */
ESMM_API esmm_status esmm_weights_save(esmm_ctx *ctx, const esmm_weights *weights, const char *path);
ESMM_API esmm_status esmm_weights_load(esmm_ctx *ctx, const char *path, esmm_weights **weights);

/* ------------------------------------------------------------------------------------------------ formats */

/*
 * A matrix as blocks: the caller's own arrays, only read, in host memory. Those of a SciPy bsr_array or csr_array (1 x
 * 1 blocks) or of a PyTorch sparse BSR or CSR tensor fit as they are; with ESMM_COL_MAJOR those of their column-wise
 * brothers (CSC, BSC), or, which is the same, those of a BSR of the transposed matrix: of a layer's weight [out, in],
 * when B is to be [in, out]. Edge blocks are whole: what they hold beyond rows and cols is not looked at.
 */
typedef struct esmm_bsr {
  size_t size;
  int64_t rows, cols;         /* of the matrix; need not be multiples of the block's */
  int block_rows, block_cols; /* 1 to 256 */
  int index_bits;             /* 32 or 64: int32_t or int64_t indices */
  esmm_dtype dtype;           /* of values */
  esmm_order order;           /* COL_MAJOR: read "column" for "row" and "row" for "column" below, in the blocks too */
  int64_t blocks;             /* how many are stored; at most INT32_MAX, as are block rows and block columns */
  const void *row_pointers;   /* [ceil(rows / block_rows) + 1]: 0 first, never falling, blocks last */
  const void *column_indices; /* [blocks], rising within a block row: sorted, no duplicates */
  const void *values;         /* [blocks][block_rows][block_cols] */
} esmm_bsr;

/*
 * esmm_prepare from blocks; opts->format says what is made of them, a dense B unless set. ESMM_FORMAT_BSR with b's own
 * block size (the default here) is made without a dense copy; blocks of zeros are dropped. Damaged arrays are refused:
 * ESMM_ERR_ARGUMENT names the array, the place and the value.
 */
ESMM_API esmm_status esmm_prepare_bsr(esmm_ctx *ctx, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                      esmm_weights **weights);

ESMM_API const char *esmm_format_str(esmm_format format); /* "dense", "bsr", "nm" */

/* B again, of any format, in out's dtype and order. Where out has B's dtype every nonzero comes back bit by bit; a -0.0
   that the format does not hold comes back as +0. */
ESMM_API esmm_status esmm_weights_to_dense(esmm_ctx *ctx, const esmm_weights *weights, esmm_matrix *out);

/* Does b [k,n] fit n:m along k, each column by itself? *k and *col: -1 where it does, else the first k and the column
   of the first group with more than n nonzeros: of the lowest k, there of the lowest column. */
ESMM_API esmm_status esmm_nm_check(esmm_ctx *ctx, const esmm_matrix *b, int n, int m, int64_t *k, int64_t *col);

/* ------------------------------------------------------------------------------------------------ pruning */

/*
 * Sets elements of b [k,n] to zero so that it fits a format.
 *   NM:  of each group of m k's the n elements of largest |b| stay, of equal ones the lower k. With nm_cols > 1 the
 *        columns of a strip choose together, by the sum of squares over them.
 *   BSR: the blocks of largest norm (sum of squares) stay, of equal ones the one of the lower block row, then the lower
 *        block column: round(density * all blocks) of them. What blocks keep is not touched.
 * With input_norms, |b| is |b| * input_norms[k] wherever it is compared: the norm of the input that it multiplies. NaN
 * counts as infinite.
 */
typedef struct esmm_prune_opts {
  size_t size;
  esmm_format format;         /* BSR or NM; DENSE (the default) is an error: there is nothing to prune to */
  int block_rows, block_cols; /* BSR, as in esmm_prepare_opts */
  int n, m, nm_cols;          /* NM, as in esmm_prepare_opts */
  double density;             /* BSR: share of blocks to keep, 0 to 1. Not defaulted: 0 drops all */
  const float *input_norms;   /* [k], finite and not negative; NULL: all 1 */
} esmm_prune_opts;

/* Elements: kept and dropped count nonzeros of b before; norms are Frobenius norms, without input_norms. */
typedef struct esmm_prune_report {
  size_t size;
  int64_t kept, dropped;
  double norm;         /* of b before */
  double norm_dropped; /* of what was dropped */
} esmm_prune_report;

/* report may be NULL. b may lie on the GPU: it is then copied to the host and back. */
ESMM_API esmm_status esmm_prune(esmm_ctx *ctx, esmm_matrix *b, const esmm_prune_opts *opts, esmm_prune_report *report);

/* ------------------------------------------------------------------------------------------------ pattern */

/*
 * The bitmaps of one activation matrix: one bit per k for each strip of strip_rows rows, little-endian (bit i of
 * byte j stands for k = 8j + i), 1 where any element of the strip at that k is nonzero. The last strip may be short.
 */
typedef struct esmm_pattern esmm_pattern;

ESMM_API esmm_status esmm_pattern_extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows,
                                          esmm_pattern **pattern);
/* The bitmaps of B's column strips: what esmm_pattern_extract gives for B transposed. */
ESMM_API esmm_status esmm_pattern_extract_b(esmm_ctx *ctx, const esmm_matrix *b, int64_t strip_cols,
                                            esmm_pattern **pattern);
/* ORs neighbouring strips: strip_rows must be a multiple of the pattern's own. */
ESMM_API esmm_status esmm_pattern_coarsen(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip_rows,
                                          esmm_pattern **coarser);
ESMM_API void esmm_pattern_free(esmm_pattern *pattern);
ESMM_API int64_t esmm_pattern_strip_rows(const esmm_pattern *pattern);
ESMM_API int64_t esmm_pattern_strips(const esmm_pattern *pattern);
ESMM_API int64_t esmm_pattern_k(const esmm_pattern *pattern);
ESMM_API double esmm_pattern_density(const esmm_pattern *pattern); /* strip density; 0 for an empty pattern */
/* The bitmap of one strip: ceil(k / 64) words, unused high bits 0. NULL if strip is out of range. */
ESMM_API const uint64_t *esmm_pattern_bits(const esmm_pattern *pattern, int64_t strip);

/*
 * An order of A's rows that puts similar ones into the same strip, so that fewer k's are alive in it. rows: a pattern
 * of single rows. order: takes as many numbers as there are rows (never NULL, also where there are none); order[i] is
 * the row that should stand i-th, each row once. reordered: NULL, or takes the pattern of strips of strip_rows rows in
 * that order, whose density is at most that of esmm_pattern_coarsen(rows, strip_rows): where nothing is gained the rows
 * stay as they are.
 *
 * The library never reorders by itself: who does must gather A's rows and put C's back. The same pattern gives the same
 * order. Takes O(rows k + rows log^2 rows): the bitmaps are read a few times, and the rows are halved by at most 1024
 * of the k's. A tenth of a second for 2048 rows.
 */
ESMM_API esmm_status esmm_pattern_reorder(esmm_ctx *ctx, const esmm_pattern *rows, int64_t strip_rows, int64_t *order,
                                          esmm_pattern **reordered);

/*
 * What a tiled kernel would skip, counted over every pair of an A strip and a B strip (equal k):
 *   block: a block_k-long stretch of k with no joint bit at all (no thread block need load it)
 *   warp:  the same for warp_k-long stretches (a warp tile's step)
 *   dot:   single k's outside the joint
 * Shares are of the stretches (or k's) there are; the last stretch may be short. joint_density = 1 - dot_skipped.
 */
typedef struct esmm_skip_stats {
  size_t size;
  int64_t block_k, warp_k; /* in: 0 means 64 and 8 */
  double block_skipped, warp_skipped, dot_skipped;
  double joint_density;
} esmm_skip_stats;

ESMM_API esmm_status esmm_pattern_skip_stats(esmm_ctx *ctx, const esmm_pattern *a, const esmm_pattern *b,
                                             esmm_skip_stats *stats);

/* ------------------------------------------------------------------------------------------------ product */

/* What -Inf gives is the limit: 0. NaN stays NaN. docs/numerics.md says how exact they are. */
typedef enum esmm_activation {
  ESMM_ACT_NONE = 0,
  ESMM_ACT_RELU = 1,      /* max(x, 0) */
  ESMM_ACT_RELU2 = 2,     /* max(x, 0)^2 */
  ESMM_ACT_GELU = 3,      /* x / 2 * erfc(-x / sqrt 2), the exact one */
  ESMM_ACT_GELU_TANH = 4, /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */
  ESMM_ACT_SILU = 5       /* x / (1 + exp(-x)) */
} esmm_activation;

/*
 * The epilogue, in this order, in fp32; what is not asked for is left out:
 *
 *     x = alpha * (A W) + beta * C + bias
 *     y = activation(x)                                      without a gate
 *     y = activation(alpha * (A gate) + gate_bias) * x       with one: SILU is SwiGLU, RELU is ReGLU
 *     C = y + residual, rounded once to C's dtype
 *
 * The statistics (column_nonzeros, c_pattern) are of C as it is stored: after that rounding, with -0.0 as zero and NaN
 * and Inf as nonzero. They are right for any m, k = 0 and alpha = 0 included.
 *
 * Memory: bias, gate_bias and column_nonzeros lie in device memory where C is, else in the host's. residual may lie in
 * either, and may be C itself (the same data, ld, dtype and order); else nothing that is read may share memory with C,
 * and column_nonzeros with nothing. A GPU has only bias, NONE, RELU and RELU2 yet, and refuses the rest with
 * ESMM_ERR_UNSUPPORTED before it does anything.
 */

typedef struct esmm_matmul_opts {
  size_t size;
  const float *alpha; /* NULL: 1 */
  const float *beta;  /* NULL: 0 */
  const float *bias;  /* [n], added to every row before the activation; must not lie in C; NULL: none. In device memory
                         where C is, else in the host's */
  esmm_activation activation;
  int strict;                    /* 1: no skipping, zeros meet Inf and NaN as IEEE says */
  const char *force;             /* a kernel's name, or its idea ("joint"); fails if it cannot run, where there is
                                    anything to multiply. Overrides the context's */
  const esmm_pattern *a_pattern; /* A's bitmaps where the caller has them: the CPU's joint kernel then does not scan A.
                                    Must be of this A: a term whose bit is 0 may or may not be part of the sum */
  void *stream;                  /* GPU: the work goes there */
  const esmm_matrix *residual;   /* [m,n], any dtype and order; NULL: none */
  const esmm_weights *gate;      /* a second B of weights' shape, prepared for the same device; its dtype and form may
                                    differ. Each product has its own plan; force and strict are for both. NULL: none */
  const float *gate_bias;        /* [n], only with a gate; NULL: none */
  int32_t *column_nonzeros;      /* [n], takes how many elements of each column of C are nonzero; m is at most 2^31 - 1,
                                    else ESMM_ERR_OVERFLOW. After a failure it holds what it held (on a GPU: unless work
                                    had begun). NULL: not wanted */
  int64_t c_strip_rows;          /* rows of C that share a bitmap in *c_pattern; 0 means 8 */
  esmm_pattern **c_pattern;      /* takes a new pattern: what esmm_pattern_extract(C, c_strip_rows) would give, to be
                                    the a_pattern of the product that takes C as its A, and to be freed by the caller.
                                    NULL after a failure. On a GPU its bits stay on the device and its accessors wait
                                    for them; a call captured into a graph cannot ask for it. NULL: not wanted */
} esmm_matmul_opts;

typedef struct esmm_stats { /* with a gate: FLOP and seconds of both products, the rest of the one with weights */
  size_t size;
  char kernel[32];        /* which ran */
  char reason[160];       /* why: "cheapest of 3: 12.1 ms, then dense_f32_avx2 with 88 ms" */
  int threads;            /* of the CPU; 0 on a GPU */
  int64_t strip_rows;     /* of A in that kernel; 0 where it has none */
  int64_t strip_cols;     /* of B */
  double density_a;       /* element density of A, from the plan's sample */
  double strip_density_a; /* at strip_rows, exact where the kernel scans all of A, else from the sample */
  double strip_density_b;
  double joint_density;    /* multiplied share of all (tile, k) */
  double skipped_share;    /* 1 - useful / dense FLOP */
  double flop_useful;      /* 2 * multiplied terms */
  double flop_dense;       /* 2 * m * n * k */
  double seconds_plan;     /* sampling A and choosing. On a GPU these are its seconds */
  double seconds_extract;  /* scanning and packing A (the slowest thread) */
  double seconds_multiply; /* the rest, without copies between host and GPU */
  double seconds_total;    /* with them */
  size_t weights_bytes;
  size_t staged_bytes; /* copied between host and GPU by this call, because an operand lies in host memory */
} esmm_stats;

/* C must not overlap A, and nobody may write to A while the call works on it: on a GPU that could make it wait for
   ever. A stats pointer that is not NULL needs its size field set. */
ESMM_API esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                                 const esmm_matmul_opts *opts, esmm_stats *stats);

/* The same with an A [m,k] that is given as blocks: they say which k's are alive, nothing is scanned. a_pattern must be
   NULL. */
ESMM_API esmm_status esmm_matmul_bsr(esmm_ctx *ctx, const esmm_bsr *a, const esmm_weights *weights, esmm_matrix *c,
                                     const esmm_matmul_opts *opts, esmm_stats *stats);

/* ------------------------------------------------------------------------------------------------ kernels and plan */

enum {
  ESMM_KERNEL_DETERMINISTIC = 1, /* same data, same threads: same bits */
  ESMM_KERNEL_SKIPS = 2,         /* may skip zeros; never used under strict */
  ESMM_KERNEL_REFERENCE = 4,     /* for checking: only runs when forced */
  ESMM_KERNEL_ABLATION = 8       /* kept for comparison: only runs when forced */
};

typedef struct esmm_kernel_info {
  size_t size;
  const char *name;    /* "joint_f32_avx2" */
  const char *doc;     /* one line */
  const char *backend; /* "cpu", "cuda" */
  int number;          /* its place on the ladder of prior work, or 0 */
  unsigned flags;      /* ESMM_KERNEL_... */
  int available;       /* 1: the context can run it: its backend is the context's, and the device has what it needs */
  unsigned formats;    /* of B that it reads: the bits 1 << esmm_format */
} esmm_kernel_info;

ESMM_API int esmm_kernel_count(void);
/* Ordered by name; set info->size. ctx NULL: as for a context of the CPU. */
ESMM_API esmm_status esmm_kernel_get(const esmm_ctx *ctx, int index, esmm_kernel_info *info);

typedef struct esmm_verdict {
  size_t size;        /* of one element of the array: set it in the first */
  const char *kernel; /* its name */
  unsigned flags;     /* ESMM_KERNEL_... */
  int can_run;
  int competes; /* 1: the plan chooses from it here; else it runs only when forced by its full name */
  int chosen;
  double seconds; /* the plan's estimate; 0 where it makes none, as for kernels that a wider instruction set replaces */
  char text[160]; /* why not, or what the estimate rests on */
} esmm_verdict;

/*
 * The plan's verdict on every kernel for one product: first those it chooses from, cheapest first, then what runs only
 * when forced, then what cannot run. *count: in, the array's room; out, how many there are (0 where there is nothing to
 * multiply: an empty C, k = 0, alpha = 0).
 */
ESMM_API esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights,
                                  const esmm_matrix *c, const esmm_matmul_opts *opts, esmm_verdict *verdicts,
                                  int *count);

/*
 * Measures the plan's cost constants on this machine (a few seconds), uses them in this context and, if save is not 0,
 * writes them to esmm_tune_path() for later contexts; if it cannot, it says so before it measures (ESMM_ERR_IO).
 * progress may be NULL; it is called with done and total.
 */
ESMM_API esmm_status esmm_tune(esmm_ctx *ctx, int save, void (*progress)(void *user, int done, int total), void *user);
ESMM_API const char *
esmm_tune_path(const esmm_ctx *ctx);             /* "" without XDG_CACHE_HOME and HOME, or with no_tuning_cache */
ESMM_API int esmm_is_tuned(const esmm_ctx *ctx); /* 1: constants were measured here, not shipped */

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
  double density;       /* 0 to 1, for RANDOM, BLOCKWISE; element density for ACTIVATIONS. Not defaulted: 0 is empty */
  int64_t strip;        /* BLOCKWISE: rows of A (columns of B) per strip; 0 means 32 */
  const char *pattern;  /* PATTERN: eight characters 0 or 1 */
  double dead;          /* ACTIVATIONS: share of features that are never active, 0 to 1 */
  esmm_activation activation; /* ACTIVATIONS: RELU or RELU2 (the default) */
  int integers;               /* 1: values are small integers, so that sums are exact */
} esmm_generator;

ESMM_API esmm_status esmm_generate(esmm_ctx *ctx, const esmm_generator *generator, esmm_matrix *out);

/* Sets density and dead of an ACTIVATIONS generator: "early", "middle" or "late" layers of a trained net. */
ESMM_API esmm_status esmm_generator_preset(esmm_ctx *ctx, const char *preset, esmm_generator *generator);

/* ------------------------------------------------------------------------------------------------ ffn */

/*
 * A feed-forward layer that can be trained, built of the products above. With T tokens in the rows of x:
 *
 *     h = act(x W1 + b1)                                     [T, d_hidden]
 *     h = act(x Wg + bg) * (x W1 + b1)                       where it is gated
 *     y = h W2 + b2                                          [T, d_model]
 *
 * Zeros that the activation made are found in the pass that makes h, and y skips them without another look. Of dh only
 * what meets a nonzero of h is computed; dx and the weights' gradients are products that look for the zeros of h and of
 * dpre again.
 *
 * Modes. Exact, the default, and dense give the same result; exact skips, dense does not (zeros then meet Inf and NaN
 * as IEEE says). Sparse gives the products of h and of dpre (the gradient before the activation) at most two of every
 * four values, 2:4, chosen by the sparsifier. Split ranks the columns of h by their nonzeros in this forward pass (ties
 * to the lower index) and does so to the sparsest share of them only; the others are multiplied as they are, and both
 * parts are added. Gradients pass straight through: they are those of the layer without the dropped values.
 *
 * The reduction axis rule: the four values of a group must lie side by side along the axis that is summed.
 *   y = h W2, dx = dpre W1'      sum over features: four features of one token
 *   dW2 = h' dy, dW1 = x' dpre   sum over tokens:   four tokens of one feature
 *   x W1, dh = dy W2', biases    have no sparse operand: nothing is dropped
 * So a weight gradient and dx drop different values of the same matrix. Features of a group are four neighbours of
 * those that go sparse, by index; tokens of a group are four neighbours in the order of permute_tokens. A last group
 * may be short, and is kept whole where it has two values.
 *
 * Low rank: with rank1, W1 (and Wg) is u v with u [d_model, rank1], v [rank1, d_hidden]; with rank2, W2 is u v with
 * u [d_hidden, rank2], v [rank2, d_model]. The rule then holds for the factor that meets h: v of W1, u of W2.
 *
 * A layer is of the CPU for now: esmm_ffn_create refuses a context of a GPU with ESMM_ERR_UNSUPPORTED.
 */
typedef struct esmm_ffn esmm_ffn;             /* the layer: its options and its prepared weights */
typedef struct esmm_ffn_cache esmm_ffn_cache; /* what one forward pass leaves for its backward pass */

typedef enum esmm_ffn_mode {
  ESMM_FFN_EXACT = 0,
  ESMM_FFN_SPLIT = 1,
  ESMM_FFN_SPARSE = 2,
  ESMM_FFN_DENSE = 3
} esmm_ffn_mode;

typedef enum esmm_sparsifier {
  ESMM_SPARSIFY_TOP_N = 0, /* the two largest magnitudes, ties to the lower place */
  ESMM_SPARSIFY_SOFT = 1,  /* soft threshold: all four shrink by the third largest magnitude, then the whole matrix is
                              scaled by the one factor that brings it nearest to what it was */
  ESMM_SPARSIFY_MVUE = 2   /* random, right on average, of least variance: each stays with a probability p that follows
                              its magnitude and is divided by p. Two or fewer nonzeros stay as they are */
} esmm_sparsifier;         /* a group that holds NaN or Inf keeps its two largest, NaN first, in all three */

typedef struct esmm_ffn_opts {
  size_t size;
  int64_t d_model, d_hidden;  /* at least 1 */
  int64_t rank1, rank2;       /* of W1 (and Wg), of W2; 0: full */
  esmm_activation activation; /* 0: ESMM_ACT_RELU2 */
  int gated;                  /* 1: h = act(gate) * up */
  esmm_dtype dtype;           /* of h and of the caches' other matrices; arithmetic between products is fp32 */
  esmm_ffn_mode mode;
  esmm_sparsifier sparsifier; /* split and sparse */
  double sparse_share;        /* split: share of the columns of h that goes sparse, above 0 to 1; 0: 0.95 */
  int permute_tokens;         /* split and sparse: 1: groups of four tokens are taken from an order that is shuffled by
                                 seed, so that neighbours, which resemble each other, rarely meet */
  uint64_t seed;              /* of the shuffle and of MVUE: the same seed and calls give the same bits */
  void *stream;               /* GPU: the layer's work goes there, its products and the preparation of its weights */
} esmm_ffn_opts;

ESMM_API esmm_status esmm_ffn_create(esmm_ctx *ctx, const esmm_ffn_opts *opts, esmm_ffn **ffn);
ESMM_API void esmm_ffn_free(esmm_ffn *ffn); /* its caches may still be freed, and nothing else */

/* The caller's parameters. Matrices of any dtype, order and ld; those that the options do not call for are NULL.
   b1, b_gate and b2 lie in device memory where w1 is, their gradients where dy is; else in the host's. */
typedef struct esmm_ffn_weights {
  size_t size;
  const esmm_matrix *w1;     /* [d_model, d_hidden]; with rank1: [d_model, rank1] */
  const esmm_matrix *w1_v;   /* [rank1, d_hidden], with rank1 only */
  const esmm_matrix *gate;   /* as w1, where the layer is gated */
  const esmm_matrix *gate_v; /* as w1_v */
  const esmm_matrix *w2;     /* [d_hidden, d_model]; with rank2: [d_hidden, rank2] */
  const esmm_matrix *w2_v;   /* [rank2, d_model], with rank2 only */
  const float *b1, *b_gate;  /* [d_hidden]; NULL: none */
  const float *b2;           /* [d_model]; NULL: none */
} esmm_ffn_weights;

/*
 * Prepares the weights for forward passes; call it again after every change of them. Biases are copied. The matrices
 * (their data, not the structs) are read again by backward passes: until the last of these they stay where they are, as
 * they are. prepare: NULL, or how to prepare them (its strict and stream are not looked at: the layer has its own).
 * Dense mode needs dense weights: with another format it is ESMM_ERR_UNSUPPORTED.
 */
ESMM_API esmm_status esmm_ffn_set_weights(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_ffn_weights *weights,
                                          const esmm_prepare_opts *prepare);

/*
 * A cache belongs to the layer it was made for and holds its last forward pass: h, values before the activation where
 * the derivative needs them, the nonzeros of each column and the strip bitmaps of h. It grows to the largest pass, and
 * is freed by who made it, before or after the layer. A backward pass with a cache of another layer, with one that
 * holds no pass, or one made with weights that were replaced since, is refused (ESMM_ERR_ARGUMENT).
 */
ESMM_API esmm_status esmm_ffn_cache_create(esmm_ctx *ctx, esmm_ffn *ffn, esmm_ffn_cache **cache);
ESMM_API void esmm_ffn_cache_free(esmm_ffn_cache *cache);

/* What was dropped from the operand of one product; all 0 in the exact and dense modes. */
typedef struct esmm_ffn_drop {
  int64_t kept, dropped; /* nonzeros of the operand that stayed nonzero, and that became zero */
  double norm;           /* Frobenius norm of the operand before */
  double norm_dropped;   /* of the difference between the operand and what was multiplied instead */
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
  esmm_ffn_drop y;        /* h, in y: set by the forward pass, and told again by the backward pass */
  esmm_ffn_drop dx;       /* dpre, in dx (both halves where gated): set by the backward pass */
  esmm_ffn_drop dw1;      /* dpre, in dW1 (of the factor that meets h, where it has low rank) */
  esmm_ffn_drop dgate;    /* the gate's dpre, in dWg */
  esmm_ffn_drop dw2;      /* h, in dW2 */
} esmm_ffn_report;

/*
 * x, y [T, d_model]; y must not overlap x. cache NULL: no backward pass will follow. A report that is not NULL needs
 * its size field set. The cache remembers where x lies: x stays there, as it is, until the backward pass has run.
 * Threads: with caches of their own, forward and backward passes of several contexts may use one layer at once; to set
 * weights, to make or free caches, and to pass NULL for the cache, is for one at a time.
 */
ESMM_API esmm_status esmm_ffn_forward(esmm_ctx *ctx, esmm_ffn *ffn, const esmm_matrix *x, esmm_matrix *y,
                                      esmm_ffn_cache *cache, esmm_ffn_report *report);

/* Where gradients go: the caller's matrices, of the weights' shapes (any dtype, order and ld); NULL where one is not
   wanted, and its work is then not done. They must not overlap each other or what is read. */
typedef struct esmm_ffn_grads {
  size_t size;
  esmm_matrix *x; /* [T, d_model]; always overwritten */
  esmm_matrix *w1, *w1_v, *gate, *gate_v, *w2, *w2_v;
  float *b1, *b_gate, *b2;
  int accumulate; /* 1: the weights' and biases' gradients are added to what is there */
} esmm_ffn_grads;

/* dy [T, d_model]. May be called again with another dy. If it fails in the middle for want of memory, gradients may
   have been written in part. */
ESMM_API esmm_status esmm_ffn_backward(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, const esmm_matrix *dy,
                                       const esmm_ffn_grads *grads, esmm_ffn_report *report);

#ifdef __cplusplus
}
#endif
#endif
