/*
 * esmm.h: matrix products that skip the zeros they find at run time.
 *
 *     C = epilogue(alpha * A * B + beta * C)
 *
 * A [m,k] is activations: ordinary dense storage, known only now. B [k,n] is weights: prepared once, multiplied many
 * times. A is never converted to a sparse format. The library scans it, finds which k cannot contribute to which tile
 * of C, and skips that work. Where there is nothing to skip, a dense kernel runs instead.
 *
 *     esmm_ctx *ctx;  esmm_weights *w;
 *     esmm_ctx_create(&ctx, NULL);
 *     esmm_prepare(ctx, &b, NULL, &w);              once
 *     esmm_matmul(ctx, &a, w, &c, NULL, NULL);      as often as you like
 *     esmm_weights_free(w);  esmm_ctx_free(ctx);
 *
 * This header has the product and what it needs. esmm_ffn.h has a feed-forward layer built on it; esmm_tools.h has
 * pruning, tuning, timers and test data. Both include this one.
 *
 * Rules that hold everywhere
 * - Every function that can fail returns esmm_status. After a failure esmm_ctx_error(ctx) names the argument and its
 *   value, new handles are NULL, C keeps what it held (on a GPU: unless work on it had begun), and files keep their old
 *   content. Functions that take no context, or a const one, have only the status.
 * - The library never prints, exits or aborts. Where the system refuses it threads, it goes on with those it has.
 * - Options structs start with their size in bytes (`.size = sizeof opts`). A zero field means the default; a NULL
 *   pointer to the struct means all defaults. A smaller size than the library's is an older program's and fine. A
 *   larger one, or an unknown enum value, is an error, never a guess. In fields that say yes or no, anything but 0 is
 *   yes. Fields called `reserved` must be 0.
 * - Every _free accepts NULL.
 * - Dimensions are int64_t and may be 0. With k = 0 the product is zero, and the epilogue still applies.
 * - Threads: a context belongs to one caller thread at a time; two contexts may run at once. esmm_weights and
 *   esmm_pattern are immutable, and any number of contexts may share them. Free them when nobody uses them any more.
 *   A context starts its threads when a call first needs them; they block all signals, and end with the context. After
 *   a fork the child may use and free the contexts of a CPU that no call was running on; they start threads anew.
 *
 * Numbers
 * - A, B and C are fp32, bf16 or fp16 in any mix; products are accumulated in fp32. Rounding to bf16 and fp16 is to
 *   nearest even; values that are too large become Inf.
 * - -0.0 counts as zero; NaN and Inf count as nonzero. A skipped zero does not meet the other operand, so 0 * Inf and
 *   0 * NaN then contribute nothing; which zeros are skipped depends on the kernel and on their neighbours. If you need
 *   IEEE propagation, set `strict`: it turns all skipping off.
 * - beta = 0 never reads C. alpha = 0 does not read A or B.
 * - A kernel gives the same bits for the same call on the same data; all that the plan chooses from have the
 *   ESMM_KERNEL_DETERMINISTIC flag. Which kernel it is may change: the plan times calls and learns from them, mostly in
 *   the first 32 of a kind, and on a GPU it follows what the context remembers of earlier calls (see esmm_recall). In a
 *   context with deterministic = 1, or with ESMM_DETERMINISTIC=1 in the environment, nothing is timed: the same
 *   sequence of calls gives the same bits, and, with remember = -1 or on a CPU, the same call does.
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

/* ------------------------------------------------------------------------------------------------ status */

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
ESMM_API const char *esmm_version_str(void); /* "0.2.0" */
ESMM_API const char *esmm_source_id(void);   /* 16 hex digits: a hash of the sources this library was built from */

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
  char *error;                     /* if not NULL, receives the error text when creation fails, even if size is
                                      somewhat too large; not used where size is too small to include it */
  size_t error_size;
  int remember;      /* 1: the context remembers densities and verdicts from call to call (see esmm_recall); -1: it does
                        not, each call is planned by itself; 0: ESMM_REMEMBER (0 or 1), else yes */
  int deterministic; /* 1: nothing is learnt from what calls take, so the same calls in the same order give the same
                        bits; -1: the plan learns; 0: ESMM_DETERMINISTIC (0 or 1), else it learns */
} esmm_ctx_opts;

ESMM_API esmm_status esmm_ctx_create(esmm_ctx **ctx, const esmm_ctx_opts *opts);
ESMM_API void esmm_ctx_free(esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_error(const esmm_ctx *ctx); /* text of the last failure, "" if there was none */
ESMM_API int esmm_ctx_threads(const esmm_ctx *ctx);
ESMM_API const char *esmm_ctx_device(const esmm_ctx *ctx);      /* "cpu", "cuda:0" */
ESMM_API const char *esmm_ctx_device_name(const esmm_ctx *ctx); /* "AMD EPYC 9634 84-Core Processor", "NVIDIA H200" */
ESMM_API const char *esmm_ctx_features(const esmm_ctx *ctx);    /* "avx2 fma f16c bmi2 avx512", "sm_90, 132 SMs" */
/* Why "auto" became the CPU ("libcuda.so.1: cannot open shared object file: ..."); "" otherwise. */
ESMM_API const char *esmm_ctx_device_reason(const esmm_ctx *ctx);

/*
 * Streams. All GPU work of a context goes to its current stream: products, preparing, copies, patterns, timers.
 *
 * - A stream is a CUstream or cudaStream_t passed as void *. NULL, the default, is the default stream.
 * - Set it before the call whose work is to go there. Setting it costs nothing, and nothing waits. The stream must
 *   exist until you set another one, or the context has no more work for it.
 * - The library puts the calls of one context in order, also when they are on several streams.
 * - A CPU context has no streams: anything but NULL is ESMM_ERR_ARGUMENT.
 *
 * On a GPU esmm_matmul is asynchronous: it returns once its work is on the stream, unless an operand lies in host
 * memory or statistics are asked for. The library works in the device's primary context, so pointers and streams of the
 * CUDA runtime, PyTorch and others are valid here, and the other way round.
 *
 * Graphs. esmm_matmul may be captured into a CUDA graph once the same call has run outside the capture. Calls that wait
 * (statistics, operands in host memory), c_pattern, timers and esmm_prepare are refused during a capture with
 * ESMM_ERR_UNSUPPORTED, before anything is captured. Do not allocate or free device memory, contexts or weights during
 * a capture.
 *
 * A graph works in its context's scratch memory, and the library does not see it run, so you must order its launches
 * yourself. It must not run at the same time as other calls of that context, or as another graph captured from it. The
 * context, the weights and the operands must outlive it. esmm_ctx_synchronize does not wait for it. The capture settles
 * which kernels a graph holds, from sizes, weights and what is remembered then (see esmm_recall); where nothing is, and
 * the choice between them depends on how dense A is, the GPU makes it anew each time the graph runs.
 */
ESMM_API esmm_status esmm_ctx_set_stream(esmm_ctx *ctx, void *stream);
ESMM_API void *esmm_ctx_stream(const esmm_ctx *ctx);      /* the current one */
ESMM_API esmm_status esmm_ctx_synchronize(esmm_ctx *ctx); /* waits for all work of this context */

/* Memory of the context's device (host memory on a CPU), aligned to 256 bytes. Free accepts NULL and waits for the
   device. */
ESMM_API esmm_status esmm_memory_alloc(esmm_ctx *ctx, size_t bytes, void **ptr);
ESMM_API void esmm_memory_free(esmm_ctx *ctx, void *ptr);

/* ------------------------------------------------------------------------------------------------ matrix */

typedef enum esmm_dtype { ESMM_F32 = 0, ESMM_BF16 = 1, ESMM_F16 = 2 } esmm_dtype;
typedef enum esmm_order { ESMM_ROW_MAJOR = 0, ESMM_COL_MAJOR = 1 } esmm_order;
/* Where data lies. This is not checked: a host pointer marked ESMM_DEVICE makes a kernel crash, and with it all CUDA
   work of the process. */
typedef enum esmm_place { ESMM_HOST = 0, ESMM_DEVICE = 1 } esmm_place;

/*
 * A matrix in your memory. Zero the struct first: fields that you do not set are then right. A GPU context takes
 * matrices in its own memory and in the host's; those in host memory it copies to the GPU and back
 * (esmm_stats.staged_bytes).
 */
typedef struct esmm_matrix {
  void *data; /* aligned to its elements */
  int64_t rows, cols;
  int64_t ld; /* elements from one row (ROW_MAJOR) or column (COL_MAJOR) to the next; 0: tightly packed */
  esmm_dtype dtype;
  esmm_order order;
  esmm_place place;
  int device; /* which GPU, for ESMM_DEVICE: 0 for cuda:0; 0 for host memory */
  /* Reserved for 8-bit types. No dtype has scales today: all three must be 0. */
  const float *scales;
  int scaling;
  int reserved;
} esmm_matrix;

ESMM_API size_t esmm_dtype_size(esmm_dtype dtype);     /* bytes of an element; 0 for an unknown dtype */
ESMM_API const char *esmm_dtype_str(esmm_dtype dtype); /* "f32", "bf16", "f16" */

/* Copies src to dst of the same shape, converting dtype and order, between host and device too. They must not share
   memory. It waits until it is done if src or dst lies in host memory; if both lie in the GPU's it is asynchronous,
   like esmm_matmul. */
ESMM_API esmm_status esmm_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

/* ------------------------------------------------------------------------------------------------ formats */

/*
 * What B is turned into. DENSE keeps all of B, or its panels without the k's that are zero across 32 columns; the
 * others keep what the format holds and nothing else. docs/formats.md has the layouts. Kernels for the same format
 * compete with one another. Strict products need dense weights. A GPU takes BSR and NM of bf16 and f16; of fp32 it
 * refuses them with ESMM_ERR_UNSUPPORTED.
 */
typedef enum esmm_format_kind {
  ESMM_FORMAT_DENSE = 0,
  ESMM_FORMAT_BSR = 1, /* blocks of block_rows x block_cols: those with a nonzero are kept */
  ESMM_FORMAT_NM = 2   /* of every `group` k's at most `keep` are nonzero, often written keep:group, as in 2:4 */
} esmm_format_kind;

/* One format, the same struct wherever a format is asked for or told. The fields of other kinds are not looked at; in
   answers they are 0. */
typedef struct esmm_format {
  esmm_format_kind kind;
  int block_rows, block_cols; /* BSR: 1 to 256; rows run along k. 0: 32 (esmm_prepare_bsr: those of its b) */
  int keep, group;            /* NM: 1 <= keep <= group <= 32; both 0: 2 and 4 */
  int group_cols;             /* NM: columns that share their choice of k's; 0 or 1: each has its own */
  int reserved[2];            /* 0 */
} esmm_format;

ESMM_API const char *esmm_format_str(esmm_format_kind kind); /* "dense", "bsr", "nm" */

/* ------------------------------------------------------------------------------------------------ weights */

/* Prepared B: immutable, and shareable between contexts of one device. A GPU's lie in its memory. */
typedef struct esmm_weights esmm_weights;

typedef enum esmm_use {
  ESMM_USE_ANY = 0,    /* any m: keeps two forms of B, at most twice its bytes (rows are padded to 64 bytes, panels to
                          32 columns, and a B of 15 columns or fewer is kept a third time, turned, whatever the use:
                          narrow matrices take more) */
  ESMM_USE_DECODE = 1, /* m of 1 to 16: keeps B's rows only */
  ESMM_USE_LARGE_M = 2 /* m well above 16: keeps B's panels only */
} esmm_use; /* where oneDNN is installed and the CPU has AVX-512 (for bf16 AVX-512 BF16), an fp32 or bf16 B that is
               not for decode and whose panels of 32 columns keep 30 % of their k's or more is kept once more, as
               oneDNN lays it out, unless max_bytes_ratio is below 3 (for large m: 2). On a GPU a 16-bit B is kept as
               its rows, padded to 128 columns; where it has fewer, or a number that 8 does not divide, also without
               padding, unless max_bytes_ratio is below 2. An fp32 B is kept as strips of 32 columns, and unless it
               is for decode in a second form for dense kernels (not with max_bytes_ratio below 2), and as its rows
               for cuBLAS (not below 3). Beside BSR weights, and NM weights that fit 2:4, which take 0.5625 of B's
               bytes, a GPU keeps B's rows as a dense copy where max_bytes_ratio allows both (BSR: from 2 on); a GPU
               that is no Hopper refuses 2:4 without one. Of other NM weights it keeps B's rows alone */

typedef struct esmm_prepare_opts {
  size_t size;
  esmm_use use;           /* of a dense B; other formats keep one form for every m */
  int strict;             /* 1: keep zeros of B, so that strict products can run from panels */
  double max_bytes_ratio; /* most bytes the forms of B may hold, over B's own; default 2, on a GPU, and where B is
                             kept for oneDNN, 3. Padding to whole panels, cache lines and blocks is not counted */
  esmm_format format;     /* NM: B must fit; esmm_format_check and esmm_prune (esmm_tools.h) help */
  int unchecked; /* 1: esmm_prepare_bsr takes arrays in device memory as sound, and does not wait to see it. What
                    is damaged then gives weights of some other matrix, but is never followed out of bounds */
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

/* On a GPU, B must be ready in the current stream's order. esmm_prepare waits for its own work. */
ESMM_API esmm_status esmm_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                                  esmm_weights **weights);
ESMM_API void esmm_weights_free(esmm_weights *weights); /* a GPU's: waits for the device */
ESMM_API esmm_status esmm_weights_get_info(const esmm_weights *weights, esmm_weights_info *info); /* set info->size */

/* Writes to a temporary file beside path, then renames it: path holds the old or the new weights, never half. A file
   does not store max_bytes_ratio: load makes what the default allows on a GPU, and for oneDNN. */
ESMM_API esmm_status esmm_weights_save(esmm_ctx *ctx, const esmm_weights *weights, const char *path);
ESMM_API esmm_status esmm_weights_load(esmm_ctx *ctx, const char *path, esmm_weights **weights);

/* B again, from any format, in out's dtype and order. Where out has B's dtype every nonzero comes back bit for bit; a
   -0.0 that the format does not hold comes back as +0. */
ESMM_API esmm_status esmm_weights_to_dense(esmm_ctx *ctx, const esmm_weights *weights, esmm_matrix *out);

/*
 * A matrix as blocks: your own arrays, only read, in host memory or, for esmm_prepare_bsr on a GPU, all three in its
 * memory, ready in the current stream's order. The arrays of a SciPy bsr_array or csr_array (1 x 1
 * blocks), or of a PyTorch sparse BSR or CSR tensor, fit as they are. With ESMM_COL_MAJOR so do those of their
 * column-compressed counterparts (CSC, BSC), or, which is the same, those of a BSR of the transposed matrix: a layer's
 * weight [out, in], when B is to be [in, out]. Edge blocks are whole: what they hold beyond rows and cols is ignored.
 */
typedef struct esmm_bsr {
  size_t size;
  int64_t rows, cols;         /* of the matrix; need not be multiples of the block's */
  int block_rows, block_cols; /* 1 to 256 */
  int index_bits;             /* 32 or 64: int32_t or int64_t indices */
  esmm_dtype dtype;           /* of values */
  esmm_order order;           /* COL_MAJOR: read "column" for "row" and "row" for "column" below, in the blocks too */
  int64_t blocks;             /* how many are stored; at most INT32_MAX, as are block rows and block columns */
  const void *row_pointers;   /* [ceil(rows / block_rows) + 1]: starts at 0, never falls, ends at blocks */
  const void *column_indices; /* [blocks], rising within a block row: sorted, no duplicates */
  const void *values;         /* [blocks][block_rows][block_cols] */
  esmm_place place;           /* of the three arrays, */
  int device;                 /* and if that is ESMM_DEVICE: on which GPU, as in esmm_matrix */
} esmm_bsr;

/*
 * esmm_prepare from blocks; opts->format says what to make of them, a dense B unless set. ESMM_FORMAT_BSR with b's own
 * block size (the default here) is made without a dense copy (on a GPU with one, which it gives back); blocks of zeros
 * are dropped. Damaged arrays are refused: ESMM_ERR_ARGUMENT names the array, the place and the value. Arrays in device
 * memory are checked there, unless opts->unchecked.
 */
ESMM_API esmm_status esmm_prepare_bsr(esmm_ctx *ctx, const esmm_bsr *b, const esmm_prepare_opts *opts,
                                      esmm_weights **weights);

/* ------------------------------------------------------------------------------------------------ pattern */

/*
 * The bitmaps of one activation matrix: one bit per k for each strip of strip_rows rows, little-endian (bit i of byte j
 * stands for k = 8j + i), 1 where any element of the strip at that k is nonzero. The last strip may be short.
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
/* Set info->size. */
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
 * The epilogue, in this order, in fp32; what you do not ask for is left out:
 *
 *     x = alpha * (A W) + beta * C + bias
 *     y = activation(x)                                      without a gate
 *     y = activation(alpha * (A gate) + gate_bias) * x       with one: SILU is SwiGLU, RELU is ReGLU
 *     C = y + residual, rounded once to C's dtype
 *
 * The statistics (column_nonzeros, c_pattern) are of C as it is stored: after that rounding, with -0.0 as zero and NaN
 * and Inf as nonzero. They are right for any m, and for k = 0 and alpha = 0 too.
 *
 * On a GPU one launch makes both branches where a kernel can and that is cheaper (dense 16-bit weights of one dtype, up
 * to 16 rows or on Hopper); else the gate's is finished into scratch of m * n numbers of fp32 before the other product.
 * Where C lies in device memory so do the biases and column_nonzeros, and all of it is asynchronous. *c_pattern's
 * bitmaps stay on the GPU: only contexts of that GPU take them, and esmm_pattern_get_info, esmm_pattern_bits and
 * esmm_pattern_coarsen, whose result lies in host memory, wait for them. It is new memory, so c_pattern is refused
 * while a stream is captured.
 *
 * residual may be C itself (the same data, ld, dtype and order). Nothing else that is read may share memory with C, and
 * column_nonzeros may share memory with nothing.
 */
typedef struct esmm_matmul_opts {
  size_t size;
  const float *alpha; /* NULL: 1 */
  const float *beta;  /* NULL: 0 */
  const float *bias;  /* [n], added to every row before the activation. In device memory if C is, else in the host's.
                         NULL: none */
  esmm_activation activation;
  int strict;                    /* 1: no skipping, zeros meet Inf and NaN as IEEE says */
  const char *force;             /* a kernel's name, or its idea ("joint"); fails if it cannot run, where there is
                                    anything to multiply. Overrides the context's */
  const esmm_pattern *a_pattern; /* A's bitmaps, if you have them: the CPU's joint kernel then does not scan A, and a
                                    GPU chooses its kernel by them: at once if they lie in host memory, else where
                                    it remembers nothing of such products, and then it waits for the product that
                                    makes them. Kernels on a GPU scan A all the same. Must be of this A: a term whose
                                    bit is 0 may or may not be part of the sum */
  const esmm_matrix *residual;   /* [m,n], any dtype and order; NULL: none */
  const esmm_weights *gate;      /* a second B of weights' shape, prepared for the same device; its dtype and form may
                                    differ. Each product has its own plan, unless one launch makes both; force and
                                    strict are for both. NULL: none */
  const float *gate_bias;        /* [n], only with a gate; where bias would lie. NULL: none */
  int32_t *column_nonzeros;      /* [n], receives how many elements of each column of C are nonzero; in device memory if
                                    C is, else in the host's. m is at most 2^31 - 1, else ESMM_ERR_OVERFLOW. Unchanged
                                    after a failure (on a GPU: unless work had begun). NULL: not wanted */
  int64_t c_strip_rows;          /* rows of C that share a bitmap in *c_pattern; 0 means 8 */
  esmm_pattern **c_pattern;      /* receives a new pattern: what esmm_pattern_extract(C, c_strip_rows) would give. Use
                                    it as the a_pattern of the product that takes C as its A, then free it. NULL after a
                                    failure. NULL: not wanted */
  int reserved;                  /* 0 */
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
  double seconds_plan;     /* sampling A and choosing. On a GPU all seconds are the GPU's */
  double seconds_extract;  /* scanning and packing A (the slowest thread) */
  double seconds_multiply; /* the rest, without copies between host and GPU */
  double seconds_total;    /* with those copies */
  size_t weights_bytes;
  size_t staged_bytes; /* copied between host and GPU by this call, because an operand lies in host memory */
} esmm_stats;

/* C must not overlap A, and nobody may write to A while the call works on it: on a GPU that could make it wait for
   ever. stats may be NULL; otherwise set its size. */
ESMM_API esmm_status esmm_matmul(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights, esmm_matrix *c,
                                 const esmm_matmul_opts *opts, esmm_stats *stats);

/* The same with A [m,k] given as blocks in host memory: they say which k's are alive, and nothing is scanned. a_pattern
   must be NULL. */
ESMM_API esmm_status esmm_matmul_bsr(esmm_ctx *ctx, const esmm_bsr *a, const esmm_weights *weights, esmm_matrix *c,
                                     const esmm_matmul_opts *opts, esmm_stats *stats);

/* ------------------------------------------------------------------------------------------------ kernels and plan */

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
  int available;       /* 1: the context can run it: its backend is the context's, and the device has what it needs */
  unsigned formats;    /* of B that it reads: the bits 1 << esmm_format_kind */
} esmm_kernel_info;

ESMM_API int esmm_kernel_count(void);
/* Ordered by name; set info->size. ctx NULL: as for a CPU context. */
ESMM_API esmm_status esmm_kernel_get(const esmm_ctx *ctx, int index, esmm_kernel_info *info);

typedef struct esmm_verdict {
  const char *kernel; /* its name */
  unsigned flags;     /* ESMM_KERNEL_... */
  int can_run;
  int competes; /* 1: the plan chooses from it here; else it runs only when forced by its full name */
  int chosen;
  double seconds; /* the plan's estimate; 0 where it makes none, as for kernels that a wider instruction set replaces */
  char text[160]; /* why not, or what the estimate rests on */
} esmm_verdict;

/*
 * The plan's verdict on every kernel for one product: first those it chooses from, cheapest first, then those that run
 * only when forced, then those that cannot run. verdict_size: sizeof *verdicts. *count: in, the array's room; out, how
 * many there are (0 where there is nothing to multiply: an empty C, k = 0, alpha = 0).
 */
ESMM_API esmm_status esmm_explain(esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *weights,
                                  const esmm_matrix *c, const esmm_matmul_opts *opts, esmm_verdict *verdicts,
                                  size_t verdict_size, int *count);

/* ------------------------------------------------------------------------------------------------ memory of calls */

/*
 * A context remembers which kernels can do a product, and does not ask them all again in the next call of that shape
 * on the same weights. It drops that when the cost constants change. On a GPU, which has to choose before it has seen
 * A, it also remembers how dense A was, for each pair of weights and of a class of rows (1, 2, 3 to 4, 5 to 8, ..., 33
 * to 64, 65 and more), and runs the one kernel that is cheapest for such an A.
 *
 * - Some calls report what they saw: the first, then one in every few, the more often the longer a product takes. Call
 *   N with the same weights and class decides on what call N - L and those before it reported; L is 1 to 16, and the
 *   larger the shorter the products are. It does not depend on how fast the GPU is; in a deterministic context the same
 *   sequence of calls gives the same bits.
 * - A call may therefore have to wait until call N - L has scanned its A on the GPU or, where that has 16 rows or
 *   fewer, has ended. Where other products are between them it nearly always has; in a row of long products on the same
 *   weights the host stays that many ahead. It waits two seconds at most, which is the one thing here that depends on
 *   time: if the stream waits for longer (for something that this thread is still to do), the call goes on, these
 *   densities count as unknown until the report has come after all, and no other call waits before one has come.
 * - Calls with force, strict or an a_pattern in host memory neither use nor report densities. Captured calls use what
 *   is known, report nothing and change nothing: a graph holds what was known at its capture.
 * - The c_pattern of an earlier product, given as a_pattern where nothing is known, tells it: the call waits for that
 *   product, as for a report, and remembers what the pattern says.
 * - Where nothing is known yet, the plan is that of a context that does not remember.
 * - Where densities are known, some calls are timed by events on the GPU, and the plan learns what kernels take. No
 *   call waits for that. A time counts where the stream still had work before the call. esmm_tune_weights, of
 *   esmm_tools.h, learns the same at once.
 * - The tables have room for 1024 shapes and 1024 pairs; what was not used for longest is dropped.
 *
 * A CPU can see A before it chooses: it keeps what esmm_expect says for esmm_recall to return, and samples A in every
 * call all the same, but for products so small that the look would take longer than it could save.
 */
typedef struct esmm_recollection {
  size_t size;
  int known;              /* 0: no density is remembered, and those below are 0 */
  double density_a;       /* element density of A; 0 where nobody counted it */
  double strip_density_a; /* at strip_rows */
  double joint_density;   /* of A's strips with B's. For esmm_expect: 0 means strip_density_a times B's density */
  int64_t strip_rows;     /* 32 or 128; for esmm_expect also 0: right for every kernel */
  int64_t calls, reports; /* so far, and how many of them reported. esmm_expect does not look at them, nor at known */
} esmm_recollection;

/* What is remembered for products of m rows with these weights. Set out->size. */
ESMM_API esmm_status esmm_recall(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, esmm_recollection *out);
/* Sets it, so that the first call knows: later reports replace it. ESMM_ERR_UNSUPPORTED where the context does not
   remember. */
ESMM_API esmm_status esmm_expect(esmm_ctx *ctx, const esmm_weights *weights, int64_t m, const esmm_recollection *in);
/* Forgets everything. It may wait, as a call may, for reports that are under way. */
ESMM_API esmm_status esmm_forget(esmm_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
