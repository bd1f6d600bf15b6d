/*
 * internal.h: what the library's own files share. Not installed.
 *
 * Objects behind the opaque handles, memory, errors, sizes. Kernels also include kernel.h.
 */
#ifndef ESMM_INTERNAL_H
#define ESMM_INTERNAL_H

#include "esmm.h"

#include "form.h"
#include "format/format.h"

#include <stdbool.h>

#define ESMM_MAX_THREADS 1024
#define ESMM_ERROR_BYTES 512
#define ESMM_MAX_KERNELS 96
#define ESMM_COST_TERMS 6 /* terms of a kernel's cost model, see kernel.h */

/* CPU features that kernels ask for; cpu/cpuid.c sets them when CPUID and XGETBV both agree. */
enum {
  ESMM_CPU_AVX2 = 1,       /* AVX2, FMA, F16C, BMI1, BMI2, LZCNT, POPCNT */
  ESMM_CPU_AVX512 = 2,     /* the above, and AVX-512 F, DQ, BW, VL, CD */
  ESMM_CPU_AVX512BF16 = 4, /* the above, and AVX-512 BF16 */
  ESMM_CPU_AMX = 8         /* the above, AVX-512 VBMI2, and AMX tiles of bf16, which the system lets this process use */
};

struct esmm_ctx {
  esmm_allocator allocator;
  int threads;
  double thread_work;        /* multiply-adds: t threads that are awake are worth it where each has t times this */
  double wake_seconds;       /* seconds of a product that are worth waking a thread */
  int wakes;                 /* how many the running product is worth; INT_MAX: all */
  struct esmm_threads *pool; /* the threads (threads.h) */
  unsigned cpu;              /* ESMM_CPU_... */
  char force[64];            /* "" when the plan decides */
  bool force_from_env;       /* it is ESMM_FORCE's */
  const struct esmm_backend *backend; /* what the device can do (backend.h) */
  int ordinal;                        /* which of its devices */
  void *state;                        /* the backend's own part of the context */
  void *stream;                       /* where work goes; NULL: the default stream, or a CPU */
  char device[16];                    /* as esmm_ctx_device gives it */
  char device_name[128];
  char device_reason[256]; /* why "auto" became the CPU */
  char features[128];
  char tune_path[4096];
  bool tuned;
  int tune_load;                                  /* per cent of the CPUs that others took while it was measured */
  double cost[ESMM_MAX_KERNELS][ESMM_COST_TERMS]; /* seconds per unit of each term, by registry index */
  void *scratch; /* grows, never shrinks: no allocation after the first call of a shape */
  size_t scratch_bytes;
  uint64_t cost_id;                  /* of these constants: times measured with others do not count */
  bool learns;                       /* from what calls take: choose/choose.h */
  int64_t learnt;                    /* times so far: for tests */
  int turn;                          /* whose turn it is in esmm_tune_weights, from 1 on; 0: no call of that */
  int owner;                         /* the process that made the context: a child does not write its file */
  uint32_t home;                     /* the file of what was measured, by a hash of its name; 0: none */
  bool remember;                     /* from call to call: choose/recall.h */
  struct esmm_recall_tables *recall; /* NULL where not */
  char error[ESMM_ERROR_BYTES];
};

/* ---- prepared weights: two or three forms of a dense B, or one of another format (format/format.h), in B's own dtype
 * ---- */

#define ESMM_PANEL 32     /* columns of B that share one bitmap and one panel */
#define ESMM_HALF_COLS 16 /* a panel is two halves of 16 columns: a cache line of fp32 for each k */

#define ESMM_TURNED_COLS 15 /* most columns of a B that is kept turned too: less than the widest vector */

/* B in the layout that oneDNN likes best (cpu/onednn.h), beside the others. */
typedef struct esmm_onednn_form {
  void *data; /* NULL when not kept */
  size_t bytes;
  void *desc;         /* the library's, of a product that reads this layout, */
  const void *layout; /* which is described there; */
  bool in_blocks;     /* of columns, one after the other */
} esmm_onednn_form;

/*
 * turned: [n][turned_ld], B transposed, turned_ld padded to a cache line with zeros. Where n is ESMM_TURNED_COLS at
 *         most, beside the others. For dot products.
 * rows:   [k][rows_ld], row-major, rows_ld padded to a cache line. For decode and the row kernel.
 * panels: for each panel of 32 columns, only the k's with a nonzero in it (all k's when strict), compacted:
 *           first half  [kept][16]   columns 0..15
 *           second half [kept][16]   columns 16..31, zero-padded past n
 *         kept = before[panel][words]; the k's kept are the bits of bits[panel], in order.
 */
struct esmm_weights {
  esmm_allocator allocator;
  uint64_t serial; /* other weights have other numbers, also at the same address (recall.h) */
  int64_t k, n;
  esmm_dtype dtype;
  esmm_use use;
  bool strict;
  bool full; /* every panel keeps every k */
  double element_density, strip_density;
  size_t bytes;

  esmm_format_kind format;
  esmm_bsr_form bsr; /* ESMM_FORMAT_BSR; rows, panel_data, before and panel_at are then NULL */
  esmm_nm_form nm;   /* ESMM_FORMAT_NM; the same */

  int64_t panels; /* ceil(n / ESMM_PANEL) */
  int64_t words;  /* ceil(k / 64) */
  uint64_t *bits; /* [panels][words]; always there */
  float *alive;   /* [k]: share of panels whose bitmap has this k; none where n is 0 */

  void *rows; /* NULL when not kept */
  int64_t rows_ld;
  size_t rows_bytes;

  void *panel_data; /* NULL when not kept */
  size_t panel_bytes;
  uint32_t *before;   /* [panels][words + 1]: k's kept before word w */
  uint64_t *panel_at; /* [panels + 1]: where each panel starts in panel_data, in elements */

  void *turned; /* NULL when not kept */
  int64_t turned_ld;

  esmm_onednn_form onednn;

  const struct esmm_backend *backend; /* where they were prepared, */
  int ordinal;                        /* on which of its devices */
  unsigned forms;                     /* that are there: ESMM_FORM(...) of form.h */
  unsigned makes;                     /* that the backend can make of those for a call */
  void *device; /* the forms of another device than a CPU: then none of the above is set but k, n, dtype, use, strict,
                   full, densities, bytes, format and panels */
};

/* cpu/forms.c. B again, in its dtype: out is a row-major host matrix [k, n] of that dtype. Zeros that no form kept are
 * +0. */
void esmm_weights_unpack(const esmm_weights *weights, esmm_matrix *out);

/* Allocates a weights object with bits and alive, and with rows or panels as use says, or with what the format keeps as
   far as esmm_form_alloc goes; contents are not set. Of b its shape and dtype count; opts are checked ones. */
esmm_status esmm_weights_alloc(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                               esmm_weights **weights);

/* Both densities and full, from B's nonzeros and the set bits of its bitmaps. */
void esmm_weights_set_densities(esmm_weights *weights, int64_t nonzero, int64_t set);
void esmm_weights_set_alive(esmm_weights *weights);   /* alive[] from bits */
void esmm_weights_count_bytes(esmm_weights *weights); /* bytes from the buffers' sizes */

/* cpu/forms.c. Row k of a host matrix, `cols` columns from j0 on, as the bits of its dtype. */
void esmm_read_row(const esmm_matrix *b, int64_t k, int64_t j0, int64_t cols, void *out);

/* api.c: the options with every default filled in, checked against the context; see esmm_format_settle */
#define ESMM_DEFAULT_BLOCK 32
esmm_status esmm_prepare_opts_check(esmm_ctx *ctx, const esmm_prepare_opts *opts, int block_rows, int block_cols,
                                    esmm_prepare_opts *o);

/* cpu/prepare.c: b lies in host memory; it and opts were checked */
#define ESMM_BYTES_RATIO 2.0 /* max_bytes_ratio, unless given */
esmm_status esmm_prepare_checked(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts,
                                 esmm_weights **out);
/* The last step of preparing: the limit of bytes, a format's bitmaps and densities. w goes to *out, or is freed where
   status, or this, is a failure. */
esmm_status esmm_prepare_finish(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_status status, esmm_weights *w,
                                esmm_weights **out);

/* api.c: src to dst of the same shape, both checked and in host memory, converting dtype and order */
void esmm_copy_host(const esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

struct esmm_pattern {
  esmm_allocator allocator;
  int64_t rows, k;
  int64_t strip_rows, strips, words;
  int64_t set;                        /* bits set in all; 0 where they lie on a device, uncounted */
  uint64_t *bits;                     /* [strips][words]; NULL where they lie on a device */
  const struct esmm_backend *backend; /* whose memory they lie in; NULL: the host's */
  int ordinal;                        /* on which of its devices */
  void *device;                       /* the backend's own */
  _Atomic int64_t folded[3]; /* bits set at strips of 32, 128 and 8 rows, and 1 more: 0 until one has counted */
};

/* pattern.c: a was checked; the first one's bits and set are not filled in, the second has none yet: they will be the
   context's backend's. The third one's a lies in host memory. */
esmm_status esmm_pattern_alloc(esmm_ctx *ctx, int64_t rows, int64_t k, int64_t strip_rows, esmm_pattern **pattern);
esmm_status esmm_pattern_shell(esmm_ctx *ctx, int64_t rows, int64_t k, int64_t strip_rows, esmm_pattern **pattern);
esmm_status esmm_pattern_host(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern);
void esmm_pattern_count(esmm_pattern *pattern); /* set, from the bits */
/* Its bitmaps lie in host memory, or on the context's device; `what` names it in the error text. */
esmm_status esmm_check_pattern(esmm_ctx *ctx, const char *what, const esmm_pattern *pattern);
/* The same pattern with its bits in host memory: itself, or a copy, which waits; leave frees that. */
esmm_status esmm_pattern_enter(esmm_ctx *ctx, const char *what, const esmm_pattern *pattern, const esmm_pattern **host);
void esmm_pattern_leave(const esmm_pattern *pattern, const esmm_pattern *host);
double esmm_pattern_density(const esmm_pattern *pattern); /* 0 for an empty one, and for NULL */

/* ---- errors ---- */

/* Formats the context's error text and returns status, so that `return esmm_fail(...)` reads well. */
esmm_status esmm_fail(esmm_ctx *ctx, esmm_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* ---- checks of matrices; `what` names the argument in the error text ("a", "b", "c") ---- */

/* NULL, negative, enum, place, ld, overflow; on success *out is a copy with ld filled in. data may be NULL only when
   empty. */
esmm_status esmm_check_matrix(esmm_ctx *ctx, const char *what, const esmm_matrix *m, esmm_matrix *out);

/* Both checked: do they share an element? */
bool esmm_overlap(const esmm_matrix *x, const esmm_matrix *y);

/* Sets *handle to NULL, with no context, too; both must be there. handle: where a public function puts a new object. */
esmm_status esmm_begin_handle(esmm_ctx *ctx, const char *what, void *handle);

/* Copies the fields that the caller's struct has over the defaults in *into; opts may be NULL. */
esmm_status esmm_take_opts(esmm_ctx *ctx, const char *what, const void *opts, size_t known, void *into);

/* Not NULL, and prepared where this context computes: prepared weights lie where they were prepared. */
esmm_status esmm_check_weights(esmm_ctx *ctx, const char *what, const esmm_weights *w);

/* ---- memory and sizes ---- */

void *esmm_mem_alloc(const esmm_allocator *allocator, size_t bytes); /* 64-byte aligned, not zeroed; NULL on failure */
void esmm_mem_free(const esmm_allocator *allocator, void *ptr, size_t bytes);
void *esmm_scratch(esmm_ctx *ctx, size_t bytes); /* the context's scratch, at least this large; NULL on failure */

static inline bool esmm_size_mul(size_t a, size_t b, size_t *out) /* false on overflow */
{
  return !__builtin_mul_overflow(a, b, out);
}

static inline bool esmm_size_add(size_t a, size_t b, size_t *out)
{
  return !__builtin_add_overflow(a, b, out);
}

/* A caller's struct of this size: of this version or an older one, never cut through a pointer. */
static inline bool esmm_struct_size(size_t size, size_t known)
{
  return size >= sizeof(size_t) && size <= known && size % sizeof(void *) == 0;
}

/* 16 bits, row-major, pairs of columns aligned: a GPU's kernels read two at a time. */
static inline bool esmm_in_pairs(const esmm_matrix *m)
{
  return esmm_dtype_size(m->dtype) == 2 && m->order == ESMM_ROW_MAJOR && (uintptr_t)m->data % 4 == 0 && m->ld % 2 == 0;
}

static inline int64_t esmm_ceil_div(int64_t a, int64_t b)
{
  return a / b + (a % b != 0);
}
static inline int64_t esmm_round_up(int64_t a, int64_t b)
{
  return esmm_ceil_div(a, b) * b;
}
static inline int64_t esmm_min(int64_t a, int64_t b)
{
  return a < b ? a : b;
}
static inline int64_t esmm_max(int64_t a, int64_t b)
{
  return a > b ? a : b;
}

/*
 * Elements from one row of B's rows form to the next: whole cache lines, and never a multiple of a page, since rows
 * read side by side would then fall into the same few sets of the cache.
 */
static inline int64_t esmm_rows_ld(int64_t n, esmm_dtype dtype)
{
  const int64_t line = 64 / (int64_t)esmm_dtype_size(dtype), ld = esmm_round_up(n, line);
  return ld % (64 * line) == 0 && ld > 0 ? ld + line : ld;
}

double esmm_now(void); /* seconds, monotonic */

/* ---- a host copy of a matrix in device memory, tightly packed (api.c) ---- */

esmm_status esmm_host_twin(esmm_ctx *ctx, const esmm_matrix *m, esmm_matrix *twin); /* contents are not set */
esmm_status esmm_host_twin_read(esmm_ctx *ctx, const esmm_matrix *m, esmm_matrix *twin);
esmm_status esmm_host_twin_write(esmm_ctx *ctx, const esmm_matrix *twin, const esmm_matrix *m);
void esmm_host_twin_free(esmm_ctx *ctx, esmm_matrix *twin);

/* ---- the machine ---- */
unsigned esmm_cpu_detect(void);         /* ESMM_CPU_... */
const char *esmm_cpu_amx_refused(void); /* why the system refuses this process the CPU's AMX; or NULL */
void esmm_cpu_name(char *out, size_t bytes);

/* ---- tuning cache (tune.c) ---- */
void esmm_tune_defaults(esmm_ctx *ctx);
void esmm_tune_find(esmm_ctx *ctx); /* sets tune_path; loads the cache if there is a good one */

#endif
