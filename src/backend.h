/*
 * backend.h: what a device can do, as one table of functions. The core asks only this table. It never asks which device
 * it is, and includes no device's header but the CPU's forms of weights, which host memory and files hold. backend.c
 * lists the devices.
 *
 * Arguments were checked by the core: pointers, shapes, dtypes, places, overlaps. A function that can fail returns a
 * status and has set the context's error text.
 */
#ifndef ESMM_BACKEND_H
#define ESMM_BACKEND_H

#include "kernel.h"

struct esmm_seen;
struct esmm_trial;
struct esmm_tune_job;

struct esmm_backend {
  const char *name; /* "cpu": its device is called so; with ":1" behind it, where there may be several */
  const char *kind; /* "CPU", "GPU": for texts that people read */
  bool numbered;    /* there may be several of its devices */
  bool memory;      /* it has its own memory: matrices of ESMM_DEVICE lie there */
  bool streams;     /* its work goes to streams */
  bool threads;     /* its kernels run on the context's threads, which divide their costs */

  /* ---- devices ---- */
  esmm_status (*count)(esmm_ctx *ctx, int *count); /* how many there are; fails with the reason where there are none */
  /* Sets device, device_name, features and state of ctx; backend and ordinal are set. */
  esmm_status (*open)(esmm_ctx *ctx, int ordinal);
  void (*close)(esmm_ctx *ctx); /* waits for the context's work */
  esmm_status (*synchronize)(esmm_ctx *ctx);

  /* ---- memory, matrices, patterns: operands lie in host memory or in the device's ---- */
  esmm_status (*memory_alloc)(esmm_ctx *ctx, size_t bytes, void **ptr);
  void (*memory_free)(esmm_ctx *ctx, void *ptr);
  esmm_status (*copy)(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);
  esmm_status (*pattern)(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern);
  /* Patterns of C lie on the device: multiply gives p->bitmaps their memory. Copies bits to the host, and waits. NULL:
     they lie in host memory. */
  esmm_status (*pattern_bits)(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips,
                              uint64_t *bits);
  void (*pattern_free)(esmm_pattern *pattern); /* its part of them; needs no context */

  /* ---- weights ---- */
  unsigned (*formats)(void); /* of B that it can prepare: bits 1 << esmm_format_kind */
  esmm_status (*prepare)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out);
  /* The same from blocks in the device's memory: fields are checked, arrays are not; `what` names them in the error
     text. NULL: it takes none. */
  esmm_status (*prepare_bsr)(esmm_ctx *ctx, const char *what, const esmm_bsr *b, const esmm_prepare_opts *opts,
                             esmm_weights **out);
  void (*weights_free)(esmm_weights *w); /* its part of them; needs no context */
  /* The same B as a CPU's weights, and the other way round; both NULL for the CPU alone. */
  esmm_status (*weights_to_host)(esmm_ctx *ctx, const esmm_weights *w, esmm_weights **host);
  esmm_status (*weights_from_host)(esmm_ctx *ctx, const esmm_weights *host, esmm_weights **out);
  /* For a matrix in the device's memory and a settled N:M format. format_check finds the first group, by k and then by
     strip, with too many nonzeros, or -1. prune takes norms of B's k's in host memory, or NULL. Both may be NULL: then
     the host does it in a copy. */
  esmm_status (*format_check)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, int64_t *group,
                              int64_t *strip);
  esmm_status (*prune)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, const float *norms,
                       esmm_prune_tally *tally);
  /* Prunes blocks of a matrix in the device's memory, not empty: weigh_blocks notes each, by block rows; drop_blocks
     clears those with keep 0. norms, notes and keep lie in host memory; both wait. NULL: the host does it in a copy. */
  esmm_status (*weigh_blocks)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, const float *norms,
                              esmm_block_note *notes);
  esmm_status (*drop_blocks)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *format, const unsigned char *keep);
  /* Top-N or a soft threshold of a matrix in the device's memory, not empty; waits. NULL: the host does it in a copy.
   */
  esmm_status (*prune_top)(esmm_ctx *ctx, const esmm_matrix *b, const esmm_top *how, esmm_prune_tally *tally);

  /* ---- products ---- */
  /* May be NULL: it has all of the epilogue. Refuses the parts it lacks, and says what to do instead. */
  esmm_status (*check_epilogue)(esmm_ctx *ctx, const esmm_matmul_opts *o);
  /* C is not empty, k and alpha are not 0; p->gate is the other branch, to be made too. s is filled in only where it is
     wanted. */
  esmm_status (*multiply)(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s);
  /* The epilogue alone: k or alpha is 0, or C is empty and column counts in the device's memory are to become 0. */
  esmm_status (*finish)(esmm_ctx *ctx, esmm_problem *p, bool want_stats, esmm_stats *s);
  /* What multiply would choose, as esmm_plan_sampled gives it. */
  esmm_status (*explain)(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen);
  /* Waits for the reports that an entry of recall.h expects, and takes none. NULL: its products send none. */
  void (*settle_reports)(esmm_ctx *ctx, struct esmm_seen *seen);
  /* Whether the device has what one of this backend's kernels needs; else says why not. ctx NULL: as in a new one. */
  bool (*has)(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes);
  /* May be NULL: the kernel that does the same better here, or NULL. Then this one runs only when named in full. */
  const esmm_kernel *(*superseded)(const esmm_ctx *ctx, const esmm_kernel *kernel);

  /* ---- time ---- */
  esmm_status (*timer_create)(esmm_ctx *ctx, void **timer);
  void (*timer_free)(esmm_ctx *ctx, void *timer);
  esmm_status (*timer_start)(esmm_ctx *ctx, void *timer);
  esmm_status (*timer_stop)(esmm_ctx *ctx, void *timer);
  esmm_status (*timer_seconds)(esmm_ctx *ctx, void *timer, double *seconds); /* waits for the stop */

  /* ---- tuning ---- */
  const struct esmm_trial *trials; /* products in which the terms of its kernels matter in turn (tune.h);
                                      NULL: it cannot be tuned */
  /* What the tuning of this device depends on beside its name, as part of a file name: "-avx2-2", "". */
  void (*tune_suffix)(const esmm_ctx *ctx, char *out, size_t bytes);
  /* Changes with the versions of the driver and of the library that such products may call: measured times depend on
     them. */
  uint64_t (*versions)(const esmm_weights *w);
  /* Fills in p->sample for the trial. */
  esmm_status (*tune_sample)(esmm_ctx *ctx, esmm_problem *p);
  esmm_status (*tune_measure)(esmm_ctx *ctx, const esmm_kernel *kernel, const struct esmm_tune_job *job,
                              esmm_problem *p, double *seconds);
  /* The share of the device, 0 to 1, that others take, measured for that many seconds. NULL: not measured. */
  double (*load)(esmm_ctx *ctx, double seconds);

  /* ---- the layer ---- */
  const struct ffn_passes
      *layer; /* what esmm_ffn_... do between products (ffn/passes.h); NULL: they do not run on it */
};

/* A context's name in texts: its kind, or its device where there may be several. */
static inline const char *esmm_ctx_kind(const esmm_ctx *ctx)
{
  return ctx->backend->numbered ? ctx->device : ctx->backend->kind;
}

/* Every backend, in the order in which "auto" tries them; the last always works. */
#define ESMM_MAX_BACKENDS 4
int esmm_backend_count(void);
const esmm_backend *esmm_backend_at(int index);
/* Puts another in front of "auto"'s last resort, before the first context is made: for tests. False where there is no
   room, or one of that name. */
bool esmm_backend_register(const esmm_backend *backend);
/* The backend and the ordinal of a device's name; NULL where there is none of that name. */
const esmm_backend *esmm_backend_find(const char *device, int *ordinal);
void esmm_backend_names(char *out, size_t bytes); /* "'auto', 'cpu', ...": what a device may be called */

#endif
