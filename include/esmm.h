/*
 * esmm.h: matrix products that skip the zeros they find at run time.
 *
 *     C = epilogue(alpha * A * B + beta * C)
 *
 * A [m,k] holds activations: an ordinary dense array, known only now. B [k,n] holds weights: prepared once, multiplied
 * many times. ESMM scans A, finds which k cannot contribute to which tile of C, and skips that work. Where there is
 * nothing to skip, a dense kernel runs instead.
 *
 *     1. Simple    contexts, matrices, prepare, multiply, errors: enough to write a program
 *     2. Rules     what holds for every function; numbers
 *     3. Options   of contexts, weights and products; sparse formats, files, bitmaps, statistics
 *     4. GPU       streams, graphs, device memory
 *     5. Plan      which kernel runs and why; what a context remembers
 *
 * esmm_ffn.h has a feed-forward layer, esmm_tools.h pruning, tuning, timers and test data. Both include this header.
 */
#ifndef ESMM_H
#define ESMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ESMM_VERSION_MAJOR 0
#define ESMM_VERSION_MINOR 2
#define ESMM_VERSION_PATCH 0

#if defined(__GNUC__)
#define ESMM_API __attribute__((visibility("default")))
#else
#define ESMM_API
#endif

/* ================================================================================================ 1. Simple */

/*
 *     float a[] = {1, 0, 0, 4}, b[] = {5, 6, 7, 8}, c[4];
 *     esmm_matrix A = {.data = a, .rows = 2, .cols = 2};
 *     esmm_matrix B = {.data = b, .rows = 2, .cols = 2};
 *     esmm_matrix C = {.data = c, .rows = 2, .cols = 2};
 *     esmm_ctx *ctx = NULL;
 *     esmm_weights *w = NULL;
 *     esmm_status status = esmm_ctx_create(&ctx, NULL);             // a GPU if there is one, else the CPU
 *     if (status == ESMM_OK)
 *       status = esmm_prepare(ctx, &B, NULL, &w);                   // once
 *     if (status == ESMM_OK)
 *       status = esmm_matmul(ctx, &A, w, &C, NULL, NULL);           // as often as you like
 *     if (status != ESMM_OK)
 *       fprintf(stderr, "%s: %s\n", esmm_status_str(status), esmm_ctx_error(ctx));
 *     esmm_weights_free(w);
 *     esmm_ctx_free(ctx);
 */

/* The values never change; the gaps are for later ones. */
typedef enum esmm_status {
  ESMM_OK = 0,
  ESMM_ERR_ARGUMENT = 10,       /* NULL where a pointer is needed, an unknown enum value, an option out of range */
  ESMM_ERR_SHAPE = 11,          /* dimensions that do not agree, or are negative */
  ESMM_ERR_LD = 12,             /* leading dimension smaller than a row (or column) */
  ESMM_ERR_DTYPE = 13,          /* a dtype that does not exist or is not accepted here */
  ESMM_ERR_OVERFLOW = 14,       /* a size in bytes beyond the address range, or more blocks than int32 can count */
  ESMM_ERR_OVERLAP = 15,        /* C shares memory with A, or with something else that it must not */
  ESMM_ERR_MEMORY = 20,         /* an allocation failed */
  ESMM_ERR_DEVICE_MEMORY = 21,  /* the GPU has too little free memory for this */
  ESMM_ERR_UNSUPPORTED = 30,    /* no kernel, or not the forced one, can do this, or not during a stream capture */
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

typedef enum esmm_dtype { ESMM_F32 = 0, ESMM_BF16 = 1, ESMM_F16 = 2 } esmm_dtype;
typedef enum esmm_order { ESMM_ROW_MAJOR = 0, ESMM_COL_MAJOR = 1 } esmm_order;
typedef enum esmm_place { ESMM_HOST = 0, ESMM_DEVICE = 1 } esmm_place;

/* A matrix in your memory. Zero the struct first: fields that you do not set are then right. */
typedef struct esmm_matrix {
  void *data; /* aligned to its elements */
  int64_t rows, cols;
  int64_t ld; /* elements from one row (ROW_MAJOR) or column (COL_MAJOR) to the next; 0: tightly packed */
  esmm_dtype dtype;
  esmm_order order;
  esmm_place place; /* where data lies. Not checked: a host pointer marked ESMM_DEVICE crashes a kernel, and with it all
                       CUDA work of the process */
  int device;       /* which GPU, for ESMM_DEVICE: 0 for cuda:0; 0 for host memory */
  const float *scales; /* this and the next two are reserved, and must be 0 */
  int scaling;
  int reserved;
} esmm_matrix;

typedef struct esmm_ctx esmm_ctx;         /* a device, its threads, scratch memory, the last error text */
typedef struct esmm_weights esmm_weights; /* prepared B: immutable; contexts of one device may share it */

struct esmm_ctx_opts; /* these are in part 3; NULL means the defaults, or no statistics */
struct esmm_prepare_opts;
struct esmm_matmul_opts;
struct esmm_stats;

ESMM_API esmm_status esmm_ctx_create(esmm_ctx **ctx, const struct esmm_ctx_opts *opts);
ESMM_API void esmm_ctx_free(esmm_ctx *ctx);

/* Text of the last failure: names the argument and its value. "" if there was none, or for NULL. */
ESMM_API const char *esmm_ctx_error(const esmm_ctx *ctx);
/* A short English name of a status ("leading dimension too small"); never NULL. */
ESMM_API const char *esmm_status_str(esmm_status status);

/* B may be freed or changed afterwards. On a GPU it must be ready in the current stream's order; the call waits for its
   own work. */
ESMM_API esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const struct esmm_prepare_opts *opts,
                                  esmm_weights **weights);
ESMM_API void esmm_weights_free(esmm_weights *weights); /* a GPU's: waits for the device */

/* C must not overlap A. Do not modify A during the call: on a GPU a concurrent write can deadlock it. A GPU context
   copies operands in host memory to the GPU and back; without any it is asynchronous (part 4). */
ESMM_API esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                                 const struct esmm_matmul_opts *opts, struct esmm_stats *stats);

/* ================================================================================================ 2. Rules */

/*
 * Functions
 * - Those that can fail return esmm_status. After a failure new handles are NULL, C keeps what it held (on a GPU:
 *   unless work on it had begun), and files keep their old content. Functions that take no context, or a const one,
 *   leave no error text.
 * - The library never prints, exits or aborts. If the system refuses it threads, it continues with those it has.
 * - Options structs start with their size in bytes (`.size = sizeof opts`). A zero field means the default; a NULL
 *   struct means all defaults. A smaller size is an older program's and fine; a larger one, or an unknown enum value,
 *   is an error. Yes-or-no fields take anything but 0 as yes. Fields called `reserved` must be 0.
 * - Set `size` of structs that receive answers, too.
 * - Every _free accepts NULL.
 * - Dimensions may be 0. With k = 0 the product is zero, and the epilogue still applies.
 *
 * Threads
 * - A context belongs to one caller thread at a time; two contexts may run at once. esmm_weights and esmm_pattern are
 *   immutable, and any number of contexts may share them; free them after the last use.
 * - A context starts its threads when a call first needs them; they block all signals, and end with the context. After
 *   a fork the child may use and free CPU contexts on which no call was running; they start threads anew.
 *
 * Numbers
 * - A, B and C are fp32, bf16 or fp16 in any mix; products are accumulated in fp32. Rounding to bf16 and fp16 is to
 *   nearest even; values that are too large become Inf.
 * - -0.0 counts as zero; NaN and Inf count as nonzero. A skipped zero does not meet the other operand, so 0 * Inf and
 *   0 * NaN contribute nothing; which zeros are skipped depends on the kernel and on their neighbours. For IEEE
 *   propagation set `strict`, which turns all skipping off.
 * - beta = 0 never reads C. alpha = 0 reads neither A nor B.
 * - A kernel gives the same bits for the same call on the same data; the plan chooses only kernels with the
 *   ESMM_KERNEL_DETERMINISTIC flag. It may choose another kernel later: it times calls, mostly the first 32 of a kind,
 *   and on a GPU uses what the context remembers (part 5). In a context with deterministic = 1, nothing is timed: the
 *   same sequence of calls gives the same bits; with remember = -1, or on a CPU, so does the same call.
 */

/* ================================================================================================ 3. Options */

/* ------------------------------------------------------------------------------------------------ context */

/* Where memory comes from. alloc returns NULL on failure; align is a power of two, at least 64. */
typedef struct esmm_allocator {
  void *(*alloc)(void *user, size_t bytes, size_t align);
  void (*free)(void *user, void *ptr, size_t bytes);
  void *user;
} esmm_allocator;

/* Where a field is 0 or NULL, the environment variable named beside it decides, if set. */
typedef struct esmm_ctx_opts {
  size_t size;
  const char *device;              /* "auto": the first NVIDIA GPU that works, else the CPU; "cpu"; "cuda", "cuda:0",
                                      "cuda:1", ... NULL: ESMM_DEVICE, else "auto" */
  int threads;                     /* 0: ESMM_THREADS, else the CPUs this process may run on; at most 1024 */
  const char *force;               /* kernel for every call; NULL: ESMM_FORCE, else the plan decides */
  const esmm_allocator *allocator; /* NULL: the system's. Must outlive the context and all weights made with it */
  int no_tuning_cache;             /* 1: use the shipped cost constants, do not look for a cache file */
  char *error;                     /* NULL, or receives the error text if creation fails, provided that size includes
                                      this field; a size that is somewhat too large does not prevent it */
  size_t error_size;
  int remember;      /* 1: remembers densities and verdicts between calls (part 5); -1: plans each call by itself;
                        0: ESMM_REMEMBER (0 or 1), else 1 */
  int deterministic; /* 1: the plan learns nothing from how long calls take; -1: it learns;
                        0: ESMM_DETERMINISTIC (0 or 1), else it learns */
} esmm_ctx_opts;

ESMM_API int esmm_ctx_threads(const esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_device(const esmm_ctx *ctx);      /* "cpu", "cuda:0" */
ESMM_API const char *esmm_ctx_device_name(const esmm_ctx *ctx); /* "AMD EPYC 9634 84-Core Processor", "NVIDIA H200" */
ESMM_API const char *esmm_ctx_features(const esmm_ctx *ctx);    /* "avx2 fma f16c bmi2 avx512", "sm_90, 132 SMs" */
/* Why "auto" became the CPU ("libcuda.so.1: cannot open shared object file: ..."); "" otherwise. */
ESMM_API const char *esmm_ctx_device_reason(const esmm_ctx *ctx);

ESMM_API int esmm_version(void);             /* of the library that runs: major * 10000 + minor * 100 + patch */
ESMM_API const char *esmm_version_str(void); /* "0.2.0" */
ESMM_API const char *esmm_source_id(void);   /* 16 hex digits: a hash of the sources this library was built from */

/* ------------------------------------------------------------------------------------------------ matrix */

ESMM_API size_t esmm_dtype_size(esmm_dtype dtype);     /* bytes of an element; 0 for an unknown dtype */
ESMM_API const char *esmm_dtype_str(esmm_dtype dtype); /* "f32", "bf16", "f16" */

/* Copies src to dst of the same shape, converting dtype and order, between host and device too. They must not share
   memory. Asynchronous, like esmm_matmul, if both lie in the GPU's memory; waits otherwise. */
ESMM_API esmm_status esmm_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

/* ------------------------------------------------------------------------------------------------ weights */

/* What B is turned into; docs/formats.md has the layouts. Kernels for the same format compete. Strict products need
   dense weights. A GPU refuses BSR and NM of fp32 with ESMM_ERR_UNSUPPORTED. */
typedef enum esmm_format_kind {
  ESMM_FORMAT_DENSE = 0, /* all of B, or panels of 32 columns without the k's that are zero in all of them */
  ESMM_FORMAT_BSR = 1,   /* blocks of block_rows x block_cols: those with a nonzero are kept */
  ESMM_FORMAT_NM = 2     /* of every `group` k's at most `keep` are nonzero: keep:group, as in 2:4 */
} esmm_format_kind;

/* Fields of other kinds are ignored; in answers they are 0. */
typedef struct esmm_format {
  esmm_format_kind kind;
  int block_rows, block_cols; /* BSR: 1 to 256; rows run along k. 0: 32 (esmm_prepare_bsr: those of its b) */
  int keep, group;            /* NM: 1 <= keep <= group <= 32; both 0: 2 and 4 */
  int group_cols;             /* NM: columns that share their choice of k's; 0 or 1: each has its own */
  int reserved[2];            /* 0 */
} esmm_format;

ESMM_API const char *esmm_format_str(esmm_format_kind kind); /* "dense", "bsr", "nm" */

/*
 * Which forms of B are kept. Ratio: max_bytes_ratio, the most bytes that they may hold together, over B's own; its
 * default is 2, on a GPU and for oneDNN's copy 3. Padding is not counted (on a CPU to 64 bytes and panels of 32
 * columns, on a GPU to 128 columns), so narrow matrices take more.
 *
 *     device  B              use             kept                          and, if the ratio allows it
 *     CPU     dense          ANY             rows; panels
 *                            DECODE          rows
 *                            LARGE_M         panels
 *             ≤ 15 columns   each            also: B turned
 *             fp32, bf16     ANY, LARGE_M                                  oneDNN's layout, from 3 (LARGE_M: 2) (a)
 *             BSR, NM        each            that format
 *     GPU     dense 16-bit   each            padded rows                   unpadded rows, from 2 (b)
 *             dense fp32     DECODE          strips of 32 columns
 *                            ANY, LARGE_M    strips of 32 columns          columns, from 2; rows for cuBLAS, from 3
 *             BSR 16-bit     each            blocks                        padded rows, from 2
 *             2:4 16-bit     each            2:4, 0.5625 of B's bytes (c)  padded rows, for both together
 *             other NM       each            padded rows
 *
 *     (a) where oneDNN is installed, the CPU has AVX-512 (for bf16 AVX-512 BF16), and the panels keep 30 % of their k's
 *         or more
 *     (b) if B has fewer than 128 columns, or a number that 8 does not divide
 *     (c) also of NM weights that fit 2:4. A GPU other than Hopper needs the rows too and refuses 2:4 without them
 */
typedef enum esmm_use {
  ESMM_USE_ANY = 0,    /* any m */
  ESMM_USE_DECODE = 1, /* m of 1 to 16 */
  ESMM_USE_LARGE_M = 2 /* m well above 16 */
} esmm_use;

typedef struct esmm_prepare_opts {
  size_t size;
  esmm_use use;           /* of a dense B; other formats keep one form for every m */
  int strict;             /* 1: keep zeros of B, so that strict products can run from panels */
  double max_bytes_ratio; /* see above; 0: the default */
  esmm_format format;     /* NM: B must fit; esmm_format_check and esmm_prune (esmm_tools.h) help */
  int unchecked; /* 1: esmm_prepare_bsr trusts arrays in device memory and does not wait to check them. Damaged ones
                    give weights of some other matrix, but no access out of bounds */
  int reserved;  /* 0 */
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
  esmm_format format;     /* with its defaults filled in; NM: group_cols is at least 1 */
  int64_t blocks;         /* BSR: blocks kept */
  double block_density;   /* BSR: kept share of all blocks */
} esmm_weights_info;

ESMM_API esmm_status esmm_weights_get_info(const esmm_weights *weights, esmm_weights_info *info);

/* Writes a temporary file beside path, then renames it: path holds the old or the new weights, never half. A file does
   not store max_bytes_ratio: load uses the default. */
ESMM_API esmm_status esmm_weights_save(esmm_ctx *ctx, const esmm_weights *weights, const char *path);
ESMM_API esmm_status esmm_weights_load(esmm_ctx *ctx, const char *path, esmm_weights **weights);

/* B again, from any format, in out's dtype and order. If out has B's dtype, every nonzero returns bit for bit; a -0.0
   that the format does not hold returns as +0. */
ESMM_API esmm_status esmm_weights_to_dense(esmm_ctx *ctx, const esmm_weights *weights, esmm_matrix *out);

/*
 * A matrix as blocks: your own arrays, only read. They lie in host memory or, for esmm_prepare_bsr on a GPU, all three
 * in its memory, ready in the current stream's order. The arrays of a SciPy bsr_array or csr_array (1 x 1 blocks), or
 * of a PyTorch sparse BSR or CSR tensor, fit as they are. With ESMM_COL_MAJOR so do CSC and BSC arrays, or a BSR of the
 * transposed matrix: a layer's weight [out, in], when B is to be [in, out]. Edge blocks are whole; what they hold
 * beyond rows and cols is ignored.
 */
typedef struct esmm_bsr {
  size_t size;
  int64_t rows, cols;         /* of the matrix; need not be multiples of the block's */
  int block_rows, block_cols; /* 1 to 256 */
  int index_bits;             /* 32 or 64: int32_t or int64_t indices */
  esmm_dtype dtype;           /* of values */
  esmm_order order;           /* COL_MAJOR: swap "row" and "column" below, in the blocks too */
  int64_t blocks;             /* how many are stored; at most INT32_MAX, as are block rows and block columns */
  const void *row_pointers;   /* [ceil(rows / block_rows) + 1]: starts at 0, never falls, ends at blocks */
  const void *column_indices; /* [blocks], rising within a block row: sorted, no duplicates */
  const void *values;         /* [blocks][block_rows][block_cols] */
  esmm_place place;           /* of the three arrays, */
  int device;                 /* and if that is ESMM_DEVICE: on which GPU, as in esmm_matrix */
} esmm_bsr;

/*
 * esmm_prepare from blocks, as a dense B unless opts->format asks for another. ESMM_FORMAT_BSR with b's own block size
 * (its default here) needs no dense copy (on a GPU a temporary one); blocks of zeros are dropped. Damaged arrays are
 * refused: ESMM_ERR_ARGUMENT names the array, the place and the value. Arrays in device memory are checked there,
 * unless opts->unchecked.
 */
ESMM_API esmm_status esmm_prepare_bsr(esmm_ctx *ctx, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                      esmm_weights **weights);

/* ------------------------------------------------------------------------------------------------ bitmaps */

/*
 * The bitmaps of one activation matrix: one bit per k for each strip of strip_rows rows, little-endian (bit i of byte j
 * stands for k = 8j + i), 1 if any element of the strip at that k is nonzero. The last strip may be short.
 */
typedef struct esmm_pattern esmm_pattern;

typedef struct esmm_pattern_info {
  size_t size;
  int64_t rows, k; /* of the matrix */
  int64_t strip_rows;
  int64_t strips;
  int64_t words;  /* of one strip's bitmap: ceil(k / 64) */
  double density; /* set share of the bits; 0 for an empty pattern */
} esmm_pattern_info;

ESMM_API esmm_status esmm_pattern_extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows,
                                          esmm_pattern **pattern);
/* The bitmaps of B's column strips: what esmm_pattern_extract gives for B transposed. */
ESMM_API esmm_status esmm_pattern_extract_b(esmm_ctx *ctx, const esmm_matrix *b, int64_t strip_cols,
                                            esmm_pattern **pattern);
/* ORs neighbouring strips: strip_rows must be a multiple of the pattern's own. The result lies in host memory. */
ESMM_API esmm_status esmm_pattern_coarsen(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip_rows,
                                          esmm_pattern **coarser);
ESMM_API void esmm_pattern_free(esmm_pattern *pattern);
ESMM_API esmm_status esmm_pattern_get_info(esmm_ctx *ctx, const esmm_pattern *pattern, esmm_pattern_info *info);
/* Copies the bitmaps of `strips` strips, from `strip` on, to bits: `words` words each, unused high bits 0. */
ESMM_API esmm_status esmm_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips,
                                       uint64_t *bits);

/* ------------------------------------------------------------------------------------------------ product */

/* At -Inf each gives its limit, 0. NaN stays NaN. docs/numerics.md says how exact they are. */
typedef enum esmm_activation {
  ESMM_ACT_NONE = 0,
  ESMM_ACT_RELU = 1,      /* max(x, 0) */
  ESMM_ACT_RELU2 = 2,     /* max(x, 0)^2 */
  ESMM_ACT_GELU = 3,      /* x / 2 * erfc(-x / sqrt 2), the exact one */
  ESMM_ACT_GELU_TANH = 4, /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */
  ESMM_ACT_SILU = 5       /* x / (1 + exp(-x)) */
} esmm_activation;

/*
 * The epilogue, in fp32, in this order, without the steps that you do not ask for:
 *
 *     x = alpha * (A W) + beta * C + bias
 *     y = activation(x)                                      without a gate
 *     y = activation(alpha * (A gate) + gate_bias) * x       with one: SILU is SwiGLU, RELU is ReGLU
 *     C = y + residual, rounded once to C's dtype
 *
 * Memory. bias, gate_bias and column_nonzeros lie in device memory if C does, else in the host's; in device memory all
 * of it is asynchronous. residual may be C itself (the same data, ld, dtype and order). No other input may share memory
 * with C, and column_nonzeros may share memory with nothing.
 *
 * Gate. A second B of the shape of weights, prepared for the same device; its dtype and form may differ. force and
 * strict apply to both products, and each has its own plan, unless one launch makes both: on a GPU a kernel does that
 * where it can and where that is cheaper (dense 16-bit weights of one dtype, up to 16 rows or on Hopper). Otherwise the
 * gate's product goes first, into scratch of m * n fp32 numbers.
 *
 * column_nonzeros and c_pattern describe C as stored: after rounding, with -0.0 as zero, NaN and Inf as nonzero, also
 * for k = 0 and alpha = 0. m is at most 2^31 - 1 for column_nonzeros, else ESMM_ERR_OVERFLOW. After a failure
 * *c_pattern is NULL and column_nonzeros unchanged (on a GPU: unless work had begun).
 *
 * c_pattern receives a new pattern, the same as esmm_pattern_extract(C, c_strip_rows). Use it as the a_pattern of the
 * product that takes C as its A, then free it. A GPU's stays in its memory: only contexts of that GPU take it, and
 * esmm_pattern_get_info, esmm_pattern_bits and esmm_pattern_coarsen wait for it. It cannot be made during a capture.
 *
 * a_pattern must be of this A: a term whose bit is 0 may or may not be part of the sum. With it the CPU's joint kernel
 * does not scan A. A GPU's kernels do, but the plan chooses between them by the pattern: at once if it lies in host
 * memory; otherwise only if nothing is remembered of such products, after waiting for the product that makes it.
 */
typedef struct esmm_matmul_opts {
  size_t size;
  const float *alpha; /* NULL: 1 */
  const float *beta;  /* NULL: 0 */
  const float *bias;  /* [n], added to every row before the activation; NULL: none */
  esmm_activation activation;
  int strict;                    /* 1: no skipping, zeros meet Inf and NaN as IEEE says */
  const char *force;             /* a kernel's name, or its idea ("joint"), instead of the context's; the call fails if
                                    it cannot run and there is anything to multiply */
  const esmm_pattern *a_pattern; /* A's bitmaps, if you have them; NULL: none */
  const esmm_matrix *residual;   /* [m,n], any dtype and order; NULL: none */
  const esmm_weights *gate;      /* NULL: none */
  const float *gate_bias;        /* [n], only with a gate; NULL: none */
  int32_t *column_nonzeros;      /* [n], receives the number of nonzeros in each column of C; NULL: not wanted */
  int64_t c_strip_rows;          /* rows of C that share a bitmap in *c_pattern; 0 means 8 */
  esmm_pattern **c_pattern;      /* receives C's bitmaps; NULL: not wanted */
  int reserved;                  /* 0 */
} esmm_matmul_opts;

/* With a gate: FLOP and seconds of both products, the rest of the one with weights. On a GPU all seconds are the
   GPU's. */
typedef struct esmm_stats {
  size_t size;
  char kernel[32];        /* which ran */
  char reason[160];       /* why: "cheapest of 3: 12.1 ms, then dense_f32_avx2 with 88 ms" */
  int threads;            /* of the CPU; 0 on a GPU */
  int64_t strip_rows;     /* of A in that kernel; 0 if it has none */
  int64_t strip_cols;     /* of B */
  double density_a;       /* element density of A, from the plan's sample */
  double strip_density_a; /* at strip_rows; exact if the kernel scans all of A, else from the sample */
  double strip_density_b;
  double joint_density;    /* multiplied share of all (tile, k) */
  double skipped_share;    /* 1 - useful / dense FLOP */
  double flop_useful;      /* 2 * multiplied terms */
  double flop_dense;       /* 2 * m * n * k */
  double seconds_plan;     /* sampling A and choosing */
  double seconds_extract;  /* scanning and packing A (the slowest thread) */
  double seconds_multiply; /* the rest, without copies between host and GPU */
  double seconds_total;    /* with those copies */
  size_t weights_bytes;
  size_t staged_bytes; /* copied between host and GPU by this call, because an operand lies in host memory */
} esmm_stats;

/* esmm_matmul with A [m,k] given as blocks in host memory: they say which k's are alive, and nothing is scanned.
   a_pattern must be NULL. */
ESMM_API esmm_status esmm_matmul_bsr(esmm_ctx *ctx, const esmm_bsr *a, const esmm_weights *weights, esmm_matrix *c,
                                     const esmm_matmul_opts *opts, esmm_stats *stats);

/* ================================================================================================ 4. GPU */

/*
 * Streams. All GPU work of a context goes to its current stream: products, preparing, copies, patterns, timers.
 *
 * - A stream is a CUstream or cudaStream_t passed as void *. NULL, the default, is the default stream. A CPU context
 *   has no streams: anything but NULL is ESMM_ERR_ARGUMENT.
 * - Set it before the call whose work is to go there. Setting it costs nothing and does not wait. The stream must exist
 *   until you set another one, or the context has no more work for it.
 * - The library puts the calls of one context in order, also when they are on several streams.
 * - esmm_matmul is asynchronous: it returns once its work is on the stream, unless an operand lies in host memory or
 *   you ask for statistics.
 * - The library works in the device's primary context, so it shares pointers and streams with the CUDA runtime, PyTorch
 *   and others.
 *
 * Graphs. esmm_matmul may be captured into a CUDA graph once the same call has run outside the capture.
 *
 * - Refused during a capture with ESMM_ERR_UNSUPPORTED, before anything is captured: calls that wait (statistics,
 *   operands in host memory), c_pattern, timers, esmm_prepare. Do not allocate or free device memory, contexts or
 *   weights during a capture.
 * - A graph uses its context's scratch memory, and the library does not see it run: order its launches yourself. It
 *   must not run beside other calls of that context, or beside another graph captured from it. The context, the weights
 *   and the operands must outlive it. esmm_ctx_synchronize does not wait for it.
 * - The capture settles the kernels, from sizes, weights and what is remembered then (part 5). If nothing is, and the
 *   choice depends on how dense A is, the GPU chooses anew each time the graph runs.
 */
ESMM_API esmm_status esmm_ctx_set_stream(esmm_ctx *ctx, void *stream);
ESMM_API void *esmm_ctx_stream(const esmm_ctx *ctx);      /* the current one */
ESMM_API esmm_status esmm_ctx_synchronize(esmm_ctx *ctx); /* waits for all work of this context */

/* Memory of the context's device (host memory on a CPU), aligned to 256 bytes. Free accepts NULL and waits for the
   device. */
ESMM_API esmm_status esmm_memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr);
ESMM_API void esmm_memory_free(esmm_ctx *ctx, void *ptr);

/* ================================================================================================ 5. Plan */

/* ------------------------------------------------------------------------------------------------ kernels, explain */

enum {
  ESMM_KERNEL_DETERMINISTIC = 1, /* same data, same threads: same bits */
  ESMM_KERNEL_SKIPS = 2,         /* may skip zeros; never used under strict */
  ESMM_KERNEL_REFERENCE = 4,     /* for checking: only runs when forced */
  ESMM_KERNEL_ABLATION = 8       /* reserved: no kernel has it */
};

typedef struct esmm_kernel_info {
  size_t size;
  const char *name;    /* "joint_f32_avx2" */
  const char *doc;     /* one line */
  const char *backend; /* "cpu", "cuda" */
  int number;          /* reserved: always 0 */
  unsigned flags;      /* ESMM_KERNEL_... */
  int available;       /* 1: its backend is the context's, and the device has what it needs */
  unsigned formats;    /* of B that it reads: the bits 1 << esmm_format_kind */
} esmm_kernel_info;

ESMM_API int esmm_kernel_count(void);
/* Ordered by name. ctx NULL: as for a CPU context. */
ESMM_API esmm_status esmm_kernel_get(const esmm_ctx *ctx, int index, esmm_kernel_info *info);

typedef struct esmm_verdict {
  const char *kernel; /* its name */
  unsigned flags;     /* ESMM_KERNEL_... */
  int can_run;
  int competes; /* 1: the plan chooses from it here; else it runs only when forced by its full name */
  int chosen;
  double seconds; /* the plan's estimate; 0 if it makes none, as for kernels that a wider instruction set replaces */
  char text[160]; /* why not, or what the estimate rests on */
} esmm_verdict;

/*
 * The plan's verdict on every kernel for one product: first those it chooses from, cheapest first, then those that run
 * only when forced, then those that cannot run. verdict_size: sizeof *verdicts. *count: in, the array's room; out, the
 * number of verdicts (0 if there is nothing to multiply: an empty C, k = 0, alpha = 0).
 */
ESMM_API esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights,
                                  const esmm_matrix *c, const esmm_matmul_opts *opts, esmm_verdict *verdicts,
                                  size_t verdict_size, int *count);

/* ------------------------------------------------------------------------------------------------ tune, recall */

/*
 * esmm_tune and esmm_tune_weights (esmm_tools.h) measure this machine, or one product. Beside that a context remembers,
 * until the cost constants change, which kernels can run products of a shape on the same weights.
 *
 * A CPU samples A before it chooses, in every call, but for products so small that sampling would take longer than it
 * could save. It keeps what esmm_expect says only for esmm_recall to return.
 *
 * A GPU chooses before it has seen A. It remembers how dense A was, for each pair of weights and class of rows (1, 2, 3
 * to 4, 5 to 8, ..., 33 to 64, 65 and more), and runs the kernel that is cheapest for such an A. While it knows
 * nothing, the plan is that of a context that does not remember.
 *
 * - Some calls report densities: the first, then one in every few, more often the longer a product takes. Call N with
 *   the same weights and class decides on the reports of call N - L and earlier; L is 1 to 16, larger for shorter
 *   products. That does not depend on how fast the GPU is, so a deterministic context gives the same bits for the same
 *   sequence of calls.
 * - Call N may have to wait until the GPU has scanned the A of call N - L or, with up to 16 rows, finished that call.
 *   It rarely does if other products are between them; in a row of long products on the same weights the host stays L
 *   calls ahead. The wait ends after two seconds, the one thing here that depends on time: the call goes on (the stream
 *   may be waiting for this very thread), the densities count as unknown until the report arrives, and no other call
 *   waits before then.
 * - Calls with force, strict or an a_pattern in host memory neither use nor report densities. Captured calls use what
 *   is known, but report and change nothing: a graph keeps what was known at its capture.
 * - If nothing is known and a_pattern is the c_pattern of an earlier product, the call waits for that product and
 *   remembers the pattern's densities.
 * - Once densities are known, events time some calls, without waiting, and the plan learns how long kernels take. A
 *   time counts if the stream still had work before the call. esmm_tune_weights learns the same at once.
 * - There is room for 1024 shapes and 1024 pairs; the least recently used are dropped.
 */
typedef struct esmm_recollection {
  size_t size;
  int known;              /* 0: no density is remembered, and those below are 0 */
  double density_a;       /* element density of A; 0 if it was not counted */
  double strip_density_a; /* at strip_rows */
  double joint_density;   /* of A's strips with B's. For esmm_expect: 0 means strip_density_a times B's density */
  int64_t strip_rows;     /* 32 or 128; for esmm_expect also 0: right for every kernel */
  int64_t calls, reports; /* so far, and how many of them reported; esmm_expect ignores these and known */
} esmm_recollection;

/* The densities remembered for products of m rows with these weights. */
ESMM_API esmm_status esmm_recall(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, esmm_recollection *out);
/* Sets them for the first call; later reports replace them. ESMM_ERR_UNSUPPORTED if the context does not remember. */
ESMM_API esmm_status esmm_expect(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, const esmm_recollection *in);
/* Forgets everything. It may wait for reports that are under way. */
ESMM_API esmm_status esmm_forget(esmm_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
