/*
 * esmm.h: matrix products that skip the zeros they find at run time.
 *
 *     C = epilogue(alpha * A * B + beta * C)
 *
 * A [m,k] is activations: an ordinary dense array, known only now. B [k,n] is weights: prepared once, multiplied many
 * times. ESMM looks for A's zeros and skips each k that cannot contribute to a tile of C. With nothing to skip it runs
 * a dense kernel.
 *
 *     1. Simple    enough to write a program
 *     2. Rules     for every function; numbers
 *     3. Options   of contexts, weights and products
 *     4. GPU       streams, graphs, device memory
 *     5. Plan      which kernel runs, what a context remembers
 *
 * esmm_ffn.h adds a feed-forward layer, esmm_tools.h pruning, tuning, timers and test data.
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
 *     #include <esmm.h>
 *     #include <stdio.h>
 *
 *     int main(void)
 *     {
 *       float a[] = {1, 0, 0, 4}, b[] = {5, 6, 7, 8}, c[4];
 *       esmm_matrix A = {.data = a, .rows = 2, .cols = 2}, B = A, C = A;
 *       B.data = b;
 *       C.data = c;
 *       char why[256] = "";
 *       esmm_ctx_opts opts = {.size = sizeof opts, .error = why, .error_size = sizeof why};
 *       esmm_ctx *ctx = NULL;
 *       esmm_weights *w = NULL;
 *       esmm_status status = esmm_ctx_create(&ctx, &opts);
 *       if (status == ESMM_OK)
 *         status = esmm_prepare(ctx, &B, NULL, &w);             // once
 *       if (status == ESMM_OK)
 *         status = esmm_matmul(ctx, &A, w, &C, NULL, NULL);     // as often as you like
 *       if (status == ESMM_OK)
 *         printf("%g %g\n%g %g\n", c[0], c[1], c[2], c[3]);     // 5 6, 28 32
 *       else
 *         fprintf(stderr, "%s: %s\n", esmm_status_str(status), ctx ? esmm_ctx_error(ctx) : why);
 *       esmm_weights_free(w);
 *       esmm_ctx_free(ctx);
 *       return status != ESMM_OK;
 *     }
 *
 * Link with: cc program.c $(pkg-config --cflags --libs esmm). The device is the first working NVIDIA GPU, else the CPU;
 * opts.device or ESMM_DEVICE chooses another. You allocate C, with A's rows and B's columns. Fields of an esmm_matrix
 * that are 0 mean packed, row-major fp32 in host memory.
 */

typedef enum esmm_status {
  ESMM_OK = 0,
  ESMM_ERR_ARGUMENT = 10, /* a NULL pointer, an unknown enum value, an option out of range */
  ESMM_ERR_SHAPE = 11,    /* dimensions negative or not matching */
  ESMM_ERR_LD = 12,       /* leading dimension too small */
  ESMM_ERR_DTYPE = 13,    /* not a dtype, or not accepted here */
  ESMM_ERR_OVERFLOW = 14, /* bytes beyond the address range, or blocks beyond int32 */
  ESMM_ERR_OVERLAP = 15,  /* C overlaps A, or something else that it must not */
  ESMM_ERR_MEMORY = 20,
  ESMM_ERR_DEVICE_MEMORY = 21, /* too little free memory on the GPU */
  ESMM_ERR_UNSUPPORTED = 30,   /* no kernel, or not the forced one, can do this; or not during a capture */
  ESMM_ERR_UNKNOWN_KERNEL = 31,
  ESMM_ERR_DEVICE = 40,      /* unknown, absent or unsupported device */
  ESMM_ERR_DRIVER = 41,      /* no NVIDIA driver, or one that is too old */
  ESMM_ERR_DEVICE_LOST = 42, /* a kernel crashed or the GPU stopped; nothing works there any more */
  ESMM_ERR_DRIVER_CALL = 43, /* a driver call failed; the text names it */
  ESMM_ERR_IO = 50,          /* the system refused; the text has its reason */
  ESMM_ERR_FORMAT = 51,      /* not a valid weights file */
  ESMM_ERR_TRUNCATED = 52,   /* a file ends too early */
  ESMM_ERR_CHECKSUM = 53,    /* a file was damaged */
  ESMM_ERR_VERSION = 54      /* a newer file, or of the other byte order */
} esmm_status;

typedef enum esmm_dtype { ESMM_F32 = 0, ESMM_BF16 = 1, ESMM_F16 = 2 } esmm_dtype;
typedef enum esmm_order { ESMM_ROW_MAJOR = 0, ESMM_COL_MAJOR = 1 } esmm_order;
typedef enum esmm_place { ESMM_HOST = 0, ESMM_DEVICE = 1 } esmm_place;

/* A matrix in your memory. Zero the struct first. */
typedef struct esmm_matrix {
  void *data; /* aligned to its elements */
  int64_t rows, cols;
  int64_t ld; /* elements from one row (COL_MAJOR: column) to the next; 0: packed */
  esmm_dtype dtype;
  esmm_order order;
  esmm_place place;    /* not checked: a host pointer as ESMM_DEVICE crashes all CUDA work of the process */
  int device;          /* ESMM_DEVICE: which GPU, 0 for cuda:0; else 0 */
  const float *scales; /* reserved, with the next two: 0 */
  int scaling;
  int reserved;
} esmm_matrix;

typedef struct esmm_ctx esmm_ctx;         /* a device, its threads and scratch memory */
typedef struct esmm_weights esmm_weights; /* prepared B; contexts of one device may share it */

struct esmm_ctx_opts; /* see part 3; NULL will do */
struct esmm_prepare_opts;
struct esmm_matmul_opts;
struct esmm_stats;

ESMM_API esmm_status esmm_ctx_create(esmm_ctx **ctx, const struct esmm_ctx_opts *opts);
ESMM_API void esmm_ctx_free(esmm_ctx *ctx);

/* The last failure: which argument, which value; "" if there was none, or for NULL. */
ESMM_API const char *esmm_ctx_error(const esmm_ctx *ctx);
/* "leading dimension too small"; never NULL */
ESMM_API const char *esmm_status_str(esmm_status status);

/* Copies B; on a GPU it must be ready in stream order. The call waits for its own work. */
ESMM_API esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const struct esmm_prepare_opts *opts,
                                  esmm_weights **weights);
ESMM_API void esmm_weights_free(esmm_weights *weights); /* a GPU's: waits for the device */

/* C must not overlap A. Do not modify A during the call; on a GPU a concurrent write can deadlock it. Operands in host
   memory are copied to the GPU and back. */
ESMM_API esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                                 const struct esmm_matmul_opts *opts, struct esmm_stats *stats);

/* ================================================================================================ 2. Rules */

/*
 * Functions
 * - After a failure new handles are NULL; C (unless GPU work on it had begun) and files are unchanged. Functions with a
 *   const context, or none, set no error text.
 * - The library never prints, exits or aborts, and makes do with the threads that the system grants.
 * - Set each struct's `size` to its sizeof, in answers too. A smaller size is an older program's and fine; a larger
 *   one is an error. A zero field, or NULL for options, means the default. In yes-or-no fields anything but 0 is yes.
 *   `reserved` fields must be 0.
 * - Every _free accepts NULL.
 * - Dimensions may be 0. With k = 0 the product is zero, and the epilogue still applies.
 *
 * Threads
 * - One caller thread at a time may use a context; two contexts may run at once. esmm_weights and esmm_pattern are
 *   immutable and may be shared; free them after their last use.
 * - A context starts threads when it needs them; they block all signals and end with it. After a fork the child may
 *   use and free CPU contexts that were idle.
 *
 * Numbers
 * - A, B and C are fp32, bf16 or fp16 in any mix; sums are fp32. Rounding is to nearest even, overflow becomes Inf.
 * - -0.0 counts as zero, NaN and Inf as nonzero. A skipped 0 * Inf or 0 * NaN contributes nothing; which zeros are
 *   skipped depends on kernel and neighbours. `strict` turns skipping off, for IEEE propagation.
 * - beta = 0 never reads C. alpha = 0 reads neither A nor B.
 * - Each kernel that the plan chooses gives the same bits for the same call on the same data, but the plan may change
 *   kernels: it times calls, mostly the first 32 of a kind, and remembers (part 5). deterministic = 1: the same
 *   sequence of calls gives the same bits. For single calls to repeat on a GPU, also set remember = -1.
 */

/* ================================================================================================ 3. Options */

/* ------------------------------------------------------------------------------------------------ context */

/* alloc returns NULL on failure; align is a power of two, at least 64. */
typedef struct esmm_allocator {
  void *(*alloc)(void *user, size_t bytes, size_t align);
  void (*free)(void *user, void *ptr, size_t bytes);
  void *user;
} esmm_allocator;

typedef struct esmm_ctx_opts {
  size_t size;
  const char *device; /* "auto": the first working NVIDIA GPU, else the CPU; "cpu"; "cuda", "cuda:1". NULL: ESMM_DEVICE,
                         else "auto" */
  int threads;        /* 0: ESMM_THREADS, else all CPUs of this process; at most 1024 */
  const char *force;  /* kernel for every call; NULL: ESMM_FORCE, else the plan's */
  const esmm_allocator *allocator; /* NULL: the system's. Must outlive the context and its weights */
  int no_tuning_cache;             /* 1: shipped cost constants */
  char *error;                     /* receives the error text if creation fails; NULL: not wanted */
  size_t error_size;
  int remember;      /* 1: remembers between calls (part 5); -1: does not; 0: ESMM_REMEMBER (0 or 1), else 1 */
  int deterministic; /* 1: learns nothing from timings; -1: learns; 0: ESMM_DETERMINISTIC (0 or 1), else -1 */
} esmm_ctx_opts;

ESMM_API int esmm_ctx_threads(const esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_device(const esmm_ctx *ctx);      /* "cpu", "cuda:0" */
ESMM_API const char *esmm_ctx_device_name(const esmm_ctx *ctx); /* "NVIDIA H200" */
ESMM_API const char *esmm_ctx_features(const esmm_ctx *ctx);    /* "avx2 fma f16c", "sm_90, 132 SMs" */
/* Why "auto" became the CPU ("libcuda.so.1: cannot open ..."), or "". */
ESMM_API const char *esmm_ctx_device_reason(const esmm_ctx *ctx);

ESMM_API int esmm_version(void);             /* major * 10000 + minor * 100 + patch */
ESMM_API const char *esmm_version_str(void); /* "0.2.0" */
ESMM_API const char *esmm_source_id(void);   /* 16 hex digits, a hash of the sources */

/* ------------------------------------------------------------------------------------------------ matrix */

ESMM_API size_t esmm_dtype_size(esmm_dtype dtype);     /* bytes; 0 for an unknown dtype */
ESMM_API const char *esmm_dtype_str(esmm_dtype dtype); /* "f32", "bf16", "f16" */

/* Copies between host and device, converting dtype and order. src and dst have one shape and must not overlap.
   Asynchronous if both lie in the GPU's memory. */
ESMM_API esmm_status esmm_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

/* ------------------------------------------------------------------------------------------------ weights */

/* Layouts: docs/formats.md. Strict products need dense weights. A GPU refuses BSR and NM of fp32. */
typedef enum esmm_format_kind {
  ESMM_FORMAT_DENSE = 0, /* all of B, or panels of 32 columns without their zero k's */
  ESMM_FORMAT_BSR = 1,   /* blocks of block_rows x block_cols: those with a nonzero are kept */
  ESMM_FORMAT_NM = 2     /* of every `group` k's at most `keep` are nonzero: keep:group, as in 2:4 */
} esmm_format_kind;

/* Fields of other kinds are ignored, in answers 0. */
typedef struct esmm_format {
  esmm_format_kind kind;
  int block_rows, block_cols; /* BSR: 1 to 256; rows run along k. 0: 32 (esmm_prepare_bsr: those of its b) */
  int keep, group;            /* NM: 1 <= keep <= group <= 32; both 0: 2 and 4 */
  int group_cols;             /* NM: columns that share their k's; 0: 1 */
  int reserved[2];            /* 0 */
} esmm_format;

ESMM_API const char *esmm_format_str(esmm_format_kind kind); /* "dense", "bsr", "nm" */

/*
 * Which forms of B are kept. Each takes B's bytes or fewer, plus padding (to 32 columns, a GPU's rows to 128).
 * max_bytes_ratio limits their sum, without padding, over B's bytes; default 2, on a GPU or with oneDNN's form 3.
 *
 *     device  B              use             kept                     and, from a ratio of
 *     CPU     dense          ANY             rows, panels
 *                            DECODE          rows
 *                            LARGE_M         panels
 *             < 16 columns   all             also B turned
 *             fp32, bf16     ANY, LARGE_M                             3 (LARGE_M: 2): oneDNN's form (a)
 *             BSR, NM        all             that format
 *     GPU     dense 16-bit   all             rows                     2: unpadded rows (b)
 *             dense fp32     DECODE          strips
 *                            ANY, LARGE_M    strips                   2: columns; 3: rows
 *             BSR 16-bit     all             blocks                   2: rows
 *             2:4 16-bit     all             2:4, at 0.5625 (c)       1.5625: rows
 *             other NM       all             rows
 *
 *     (a) with oneDNN, AVX-512 (bf16: AVX-512 BF16), and at least 30 % of the panels' k's kept
 *     (b) below 128 columns, or if 8 does not divide them
 *     (c) also NM that fits 2:4; a GPU other than Hopper refuses it without rows
 */
typedef enum esmm_use {
  ESMM_USE_ANY = 0,    /* any m */
  ESMM_USE_DECODE = 1, /* m of 1 to 16 */
  ESMM_USE_LARGE_M = 2 /* m well above 16 */
} esmm_use;

typedef struct esmm_prepare_opts {
  size_t size;
  esmm_use use;           /* of a dense B */
  int strict;             /* 1: keep zeros, so that strict products can run from panels */
  double max_bytes_ratio; /* see above; 0: the default */
  esmm_format format;     /* NM: B must fit; see esmm_prune of esmm_tools.h */
  int unchecked; /* 1: esmm_prepare_bsr neither checks arrays in device memory nor waits; damage gives wrong weights,
                    but no access out of bounds */
  int reserved;  /* 0 */
} esmm_prepare_opts;

typedef struct esmm_weights_info {
  size_t size;
  int64_t rows, cols; /* k, n */
  esmm_dtype dtype;
  esmm_use use;
  int strict;
  int64_t strip_cols;     /* columns per bitmap */
  double element_density; /* nonzero share of B's elements */
  double strip_density;   /* set share of B's bitmap bits */
  size_t bytes;           /* held */
  esmm_format format;     /* with its defaults filled in */
  int64_t blocks;         /* BSR: blocks kept */
  double block_density;   /* BSR: kept share of all blocks */
} esmm_weights_info;

ESMM_API esmm_status esmm_weights_get_info(const esmm_weights *weights, esmm_weights_info *info);

/* Writes a temporary file, then renames it: path holds the old or the new weights. max_bytes_ratio is not stored; load
   uses the default. */
ESMM_API esmm_status esmm_weights_save(esmm_ctx *ctx, const esmm_weights *weights, const char *path);
ESMM_API esmm_status esmm_weights_load(esmm_ctx *ctx, const char *path, esmm_weights **weights);

/* B again, converted to out's dtype and order; with B's dtype, bit for bit but for -0.0, which may return as +0. */
ESMM_API esmm_status esmm_weights_to_dense(esmm_ctx *ctx, const esmm_weights *weights, esmm_matrix *out);

/*
 * A matrix as blocks: your arrays, only read, in host memory or, for esmm_prepare_bsr on a GPU, all three in its
 * memory, ready in stream order. SciPy's bsr_array and csr_array (1 x 1 blocks) and PyTorch's sparse BSR and CSR
 * tensors fit as they are; with ESMM_COL_MAJOR so do CSC and BSC, or a BSR of the transpose (a layer's weight [out, in]
 * as B [in, out]). Edge blocks are whole; what lies beyond rows and cols is ignored.
 */
typedef struct esmm_bsr {
  size_t size;
  int64_t rows, cols;         /* need not be multiples of the block's */
  int block_rows, block_cols; /* 1 to 256 */
  int index_bits;             /* 32 or 64 */
  esmm_dtype dtype;           /* of values */
  esmm_order order;           /* COL_MAJOR: swap "row" and "column" below, in the blocks too */
  int64_t blocks;             /* stored; at most INT32_MAX, as are block rows and columns */
  const void *row_pointers;   /* [ceil(rows / block_rows) + 1]: from 0 to blocks, never falling */
  const void *column_indices; /* [blocks], rising within a block row */
  const void *values;         /* [blocks][block_rows][block_cols] */
  esmm_place place;           /* of the arrays */
  int device;                 /* as in esmm_matrix */
} esmm_bsr;

/* esmm_prepare from blocks: a dense B unless opts->format says otherwise. ESMM_FORMAT_BSR (by default of b's block
   size) needs no dense copy (on a GPU a temporary one) and drops blocks of zeros. Damaged arrays are ESMM_ERR_ARGUMENT;
   the text names the place. */
ESMM_API esmm_status esmm_prepare_bsr(esmm_ctx *ctx, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                      esmm_weights **weights);

/* ------------------------------------------------------------------------------------------------ bitmaps */

/* A's bitmaps: one bit per k and strip of strip_rows rows, little-endian (bit i of byte j is k = 8j + i), 1 if any
   element there is nonzero. The last strip may be short. */
typedef struct esmm_pattern esmm_pattern;

typedef struct esmm_pattern_info {
  size_t size;
  int64_t rows, k;
  int64_t strip_rows;
  int64_t strips;
  int64_t words;  /* of a strip: ceil(k / 64) */
  double density; /* set share of the bits */
} esmm_pattern_info;

ESMM_API esmm_status esmm_pattern_extract(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows,
                                          esmm_pattern **pattern);
/* Bitmaps of B's column strips: esmm_pattern_extract of B transposed. */
ESMM_API esmm_status esmm_pattern_extract_b(esmm_ctx *ctx, const esmm_matrix *b, int64_t strip_cols,
                                            esmm_pattern **pattern);
/* ORs neighbouring strips; strip_rows: a multiple of the pattern's. The result lies in host memory. */
ESMM_API esmm_status esmm_pattern_coarsen(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip_rows,
                                          esmm_pattern **coarser);
ESMM_API void esmm_pattern_free(esmm_pattern *pattern);
ESMM_API esmm_status esmm_pattern_get_info(esmm_ctx *ctx, const esmm_pattern *pattern, esmm_pattern_info *info);
/* Copies the bitmaps of `strips` strips, from `strip` on: `words` words each, unused high bits 0. */
ESMM_API esmm_status esmm_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips,
                                       uint64_t *bits);

/* ------------------------------------------------------------------------------------------------ product */

/* At -Inf each gives 0; NaN stays NaN. Accuracy: docs/numerics.md. */
typedef enum esmm_activation {
  ESMM_ACT_NONE = 0,
  ESMM_ACT_RELU = 1,      /* max(x, 0) */
  ESMM_ACT_RELU2 = 2,     /* max(x, 0)^2 */
  ESMM_ACT_GELU = 3,      /* x / 2 * erfc(-x / sqrt 2) */
  ESMM_ACT_GELU_TANH = 4, /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */
  ESMM_ACT_SILU = 5       /* x / (1 + exp(-x)) */
} esmm_activation;

/*
 * The epilogue, in fp32, without what you do not ask for (NULL, 0):
 *
 *     x = alpha * (A W) + beta * C + bias
 *     y = activation(x)                                      without a gate
 *     y = activation(alpha * (A gate) + gate_bias) * x       with one: SILU is SwiGLU, RELU is ReGLU
 *     C = y + residual, rounded once to C's dtype
 *
 * Memory. bias, gate_bias and column_nonzeros lie in device memory if C does, else in the host's. residual may be C
 * itself (same data, ld, dtype and order). No other input may overlap C; column_nonzeros may overlap nothing.
 *
 * Gate. A second B of the same shape and device; dtype and form may differ. force and strict apply to both products.
 * Each has its own plan and the gate's needs scratch of m * n floats, unless one GPU kernel makes both.
 *
 * column_nonzeros and c_pattern describe C as stored. After a failure *c_pattern is NULL and column_nonzeros unchanged
 * (unless GPU work had begun).
 *
 * c_pattern receives what esmm_pattern_extract(C, c_strip_rows) would give: pass it as a_pattern to the product whose A
 * is C, then free it. A GPU's stays there, for contexts of that GPU; reading it waits for the product.
 *
 * a_pattern must be of this A: terms whose bit is 0 may be left out. The CPU's joint kernel then does not scan A. On a
 * GPU, a pattern in host memory decides at once. One in GPU memory is used only if nothing is remembered, and the call
 * then waits for it.
 */
typedef struct esmm_matmul_opts {
  size_t size;
  const float *alpha; /* NULL: 1 */
  const float *beta;  /* NULL: 0 */
  const float *bias;  /* [n] */
  esmm_activation activation;
  int strict;        /* 1: no skipping */
  const char *force; /* a kernel's name, or its idea ("joint"); fails if it cannot run. Overrides the context's */
  const esmm_pattern *a_pattern;
  const esmm_matrix *residual; /* [m,n], any dtype and order */
  const esmm_weights *gate;
  const float *gate_bias;   /* [n], only with a gate */
  int32_t *column_nonzeros; /* [n], receives the count of each column's nonzeros; m is at most 2^31 - 1 */
  int64_t c_strip_rows;     /* rows per bitmap; 0: 8 */
  esmm_pattern **c_pattern;
  int reserved; /* 0 */
} esmm_matmul_opts;

/* With a gate: FLOP and seconds of both products, the rest of the one with weights. On a GPU, seconds are GPU time. */
typedef struct esmm_stats {
  size_t size;
  char kernel[32];
  char reason[160];       /* "cheapest of 3: 12.1 ms, then ..." */
  int threads;            /* of the CPU; 0 on a GPU */
  int64_t strip_rows;     /* of A; 0: no strips */
  int64_t strip_cols;     /* of B */
  double density_a;       /* of A's elements, sampled */
  double strip_density_a; /* at strip_rows; sampled unless the kernel scans all of A */
  double strip_density_b;
  double joint_density;    /* multiplied share of all (tile, k) */
  double skipped_share;    /* 1 - useful / dense FLOP */
  double flop_useful;      /* 2 * multiplied terms */
  double flop_dense;       /* 2 * m * n * k */
  double seconds_plan;     /* sampling A and choosing */
  double seconds_extract;  /* scanning and packing A */
  double seconds_multiply; /* the rest */
  double seconds_total;    /* with copies to and from a GPU */
  size_t weights_bytes;
  size_t staged_bytes; /* copied between host and GPU */
} esmm_stats;

/* esmm_matmul with A as blocks in host memory, so that nothing is scanned. a_pattern must be NULL. */
ESMM_API esmm_status esmm_matmul_bsr(esmm_ctx *ctx, const esmm_bsr *a, const esmm_weights *weights, esmm_matrix *c,
                                     const esmm_matmul_opts *opts, esmm_stats *stats);

/* ================================================================================================ 4. GPU */

/*
 * Streams. All GPU work of a context goes to its current stream.
 *
 * - A stream is a CUstream or cudaStream_t passed as void *; NULL is the default stream. On a CPU anything but NULL is
 *   ESMM_ERR_ARGUMENT.
 * - Setting it does not wait, and the library keeps calls on several streams in order. A stream must exist until you
 *   set another, or the context has no more work for it.
 * - esmm_matmul returns once its work is on the stream, unless an operand lies in host memory or you ask for
 *   statistics.
 * - Pointers and streams are those of the device's primary context, as in the CUDA runtime and PyTorch.
 *
 * Graphs. esmm_matmul may be captured into a CUDA graph once the same call has run outside the capture.
 *
 * - Calls that wait (statistics, operands in host memory), c_pattern, timers and esmm_prepare are refused during a
 *   capture: ESMM_ERR_UNSUPPORTED, with nothing captured. Do not allocate or free device memory, contexts or weights.
 * - The library does not see a graph run, and the graph uses its context's scratch memory. It must not run beside other
 *   calls of that context or other graphs captured from it; context, weights and operands must outlive it;
 *   esmm_ctx_synchronize does not wait for it.
 * - The capture settles the kernels by the densities remembered then. If none are, and the
 *   choice depends on A's density, the GPU chooses at each launch.
 */
ESMM_API esmm_status esmm_ctx_set_stream(esmm_ctx *ctx, void *stream);
ESMM_API void *esmm_ctx_stream(const esmm_ctx *ctx);
ESMM_API esmm_status esmm_ctx_synchronize(esmm_ctx *ctx); /* waits for all work of this context */

/* Device memory (on a CPU host memory), aligned to 256 bytes. Free waits for the device. */
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
  int number;          /* reserved: 0 */
  unsigned flags;      /* ESMM_KERNEL_... */
  int available;       /* 1: runs on the context's device */
  unsigned formats;    /* of B that it reads, as bits 1 << kind */
} esmm_kernel_info;

ESMM_API int esmm_kernel_count(void);
/* Ordered by name. ctx NULL: as for a CPU context. */
ESMM_API esmm_status esmm_kernel_get(const esmm_ctx *ctx, int index, esmm_kernel_info *info);

typedef struct esmm_verdict {
  const char *kernel;
  unsigned flags; /* ESMM_KERNEL_... */
  int can_run;
  int competes; /* 1: the plan may choose it; 0: only when forced by its full name */
  int chosen;
  double seconds; /* estimated; 0: no estimate */
  char text[160]; /* why not, or what the estimate rests on */
} esmm_verdict;

/* The plan's verdict on every kernel for one product: those it chooses from, cheapest first; those that run only when
   forced; those that cannot run. verdict_size: sizeof *verdicts. *count: in, the array's room; out, the number of
   verdicts, 0 if there is nothing to multiply. */
ESMM_API esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights,
                                  const esmm_matrix *c, const esmm_matmul_opts *opts, esmm_verdict *verdicts,
                                  size_t verdict_size, int *count);

/* ------------------------------------------------------------------------------------------------ tune, recall */

/*
 * esmm_tune and esmm_tune_weights (esmm_tools.h) measure the machine, or one product.
 *
 * A CPU samples A where that can pay: not for tiny products, and seldom while the plan skips nothing and A stays alike.
 * esmm_expect does not change its choice. On a GPU the host chooses before A is seen. A context remembers how dense A
 * was, for each pair of weights and class of rows (1, 2, 3-4, 5-8, ..., 33-64, 65 and more), and runs the cheapest
 * kernel for such an A. If it remembers nothing, the GPU may choose between two kernels by a sample of this A.
 *
 * - The first call reports A's densities, then one in every few. Call N decides on the reports of call N - L and
 *   earlier; L is 1 to 16, larger for shorter products, whatever the GPU's speed.
 * - A call may wait for the report of call N - L. This mostly happens when long products on the same weights
 *   follow each other. The report comes once the GPU has scanned that call's A or, with up to 16 rows, finished
 *   its product. After two seconds the call goes on without it (the stream may wait for this very thread), and no
 *   other call waits until a report arrives.
 * - Calls with force, strict or an a_pattern in host memory neither use nor report densities; captured calls use them
 *   but report nothing. An earlier product's c_pattern, as a_pattern, counts as a report if there is none.
 */
typedef struct esmm_recollection {
  size_t size;
  int known;              /* 0: no density is remembered */
  double density_a;       /* of A's elements; 0 if not counted */
  double strip_density_a; /* at strip_rows */
  double joint_density;   /* of A's strips with B's. For esmm_expect: 0 means strip_density_a times B's density */
  int64_t strip_rows;     /* 32 or 128; for esmm_expect also 0: right for every kernel */
  int64_t calls, reports; /* so far, and those that reported; esmm_expect ignores these and known */
} esmm_recollection;

/* The densities remembered for m rows with these weights. */
ESMM_API esmm_status esmm_recall(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, esmm_recollection *out);
/* Sets them for the first call; reports replace them. ESMM_ERR_UNSUPPORTED if the context does not remember. */
ESMM_API esmm_status esmm_expect(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, const esmm_recollection *in);
/* Forgets everything; may wait for reports under way. */
ESMM_API esmm_status esmm_forget(esmm_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
