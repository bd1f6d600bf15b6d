/*
 * kernel.h: the kernel descriptor. Adding a kernel is adding one file, src/cpu/k_<name>.c (a GPU's: a pair in
 * src/cuda/kernels), that ends in
 *
 *     ESMM_KERNEL(joint_f32_avx2) = { .doc = "...", .backend = &esmm_cpu_backend, .terms = ..., .run = ... };
 *
 * The build scans those files for ESMM_KERNEL and makes the registry from them; plan, tests, benchmarks and
 * `esmm list` take it from there. docs/adding-a-kernel.md walks through one.
 */
#ifndef ESMM_KERNEL_H
#define ESMM_KERNEL_H

#include "dtype.h"
#include "internal.h"

typedef struct esmm_backend esmm_backend;
extern const esmm_backend esmm_cpu_backend;

/*
 * Densities of a cheap sample of A, at strip heights 1, 2, 4, ..., 128 (index log2). A backend fills in the heights
 * that its kernels have.
 */
#define ESMM_SAMPLE_HEIGHTS 8
typedef struct esmm_sample {
  double element;                    /* nonzero share of A's elements */
  double overflow;                   /* share that is the third or fourth nonzero of four k's; a GPU counts it */
  double strip[ESMM_SAMPLE_HEIGHTS]; /* strip density of A at height 1 << i */
  double joint[ESMM_SAMPLE_HEIGHTS]; /* joint density with B's strips */
} esmm_sample;

/* The other branch of a gated product: the sum is multiplied by activation(alpha * (A w) + bias). */
typedef struct esmm_gate {
  const esmm_weights *w; /* NULL: there is none */
  const float *bias;     /* NULL: none */
  esmm_activation activation;
} esmm_gate;

/* One product, checked: every pointer valid, every ld filled in, shapes agree, m, n > 0. */
typedef struct esmm_problem {
  const esmm_ctx *ctx; /* where it is multiplied */
  int64_t m, n, k;
  esmm_matrix a, c;
  const esmm_weights *w;
  float alpha, beta;
  const float *bias; /* NULL: none */
  esmm_activation activation;
  bool gated;          /* the sum is multiplied by another branch: factor, once that is made, or gate */
  esmm_gate gate;      /* that branch, as the caller wants it. A kernel sees one only where it is to make both */
  const float *factor; /* that branch, finished, [m,n] row-major */
  int64_t factor_ld;
  esmm_matrix residual;  /* data is NULL: none */
  int32_t *nonzeros;     /* [n], to which the nonzeros of C's columns are added; NULL: not wanted */
  esmm_pattern *bitmaps; /* into which C's strips are ORed; NULL: not wanted */
  int64_t row0;          /* row of the whole C, in bitmaps, that is row 0 of this one */
  bool strict;
  bool timed;                  /* seconds are wanted: else no clock need be read */
  const esmm_pattern *pattern; /* NULL: scan A */
  int threads;
  esmm_sample sample;
  int64_t seen_rows; /* for explanations, where remembered densities decided: rows of their strips, */
  double seen_strip; /* and their density; 0: the sample decided */
  int64_t variant;   /* which of its ways the kernel goes, as its terms() said; 0: it has one */
  const void *call;  /* what the backend passes to run() beside this; NULL: nothing */
} esmm_problem;

/* The gate's branch as a separate product of m rows, row-major in fp32, lines `ld` apart. The backend places its C. */
esmm_problem esmm_gate_problem(const esmm_problem *p, const esmm_gate *gate, int64_t m, int64_t ld);

/* Callbacks get the kernel itself: one function may serve several kernels, which differ in their descriptors. */
typedef struct esmm_kernel esmm_kernel;
struct esmm_kernel {
  const char *name, *doc;
  const esmm_backend *backend;
  unsigned flags;      /* ESMM_KERNEL_... of esmm.h */
  unsigned cpu;        /* ESMM_CPU_... it needs */
  unsigned reads;      /* the form of B that it reads, ESMM_FORM(...); 0: whatever there is */
  unsigned dtypes;     /* A and B are of the same dtype, one of these, ESMM_DTYPE_BIT(...); 0: of any, mixed too */
  bool variant_strips; /* its variant is the height of A's strips, in rows, which statistics and explanations show */
  const void *device;  /* the backend's own struct, for what only its kernels say; NULL: nothing */
  const void *own;     /* private to the kernel's file: tables that its functions choose from */

  /* May be NULL: what this machine lacks that the kernel needs beside its CPU or GPU ("libcublas was not found"), or
     NULL where all is there. */
  const char *(*missing)(const esmm_kernel *self);

  /* May be NULL, which means yes. Can it do this problem? If not, says why in a short phrase ("m is 40, decode takes 16
     at most"). Form, dtypes and strict were looked at before. */
  bool (*can_run)(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes);

  /*
   * The cost model: time = sum of units[i] * cost[i]. terms() fills units (multiply-add vectors, list words, bytes,
   * ...; 0 where unused; the last is 1, for what any call costs) and notes in *variant which way it would go, 0 where
   * there is one. esmm_tune fits cost[] by measuring.
   */
  void (*terms)(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant);
  const char *const term_names[ESMM_COST_TERMS];
  const double cost[ESMM_COST_TERMS]; /* shipped constants, seconds per unit on one thread */
  /* May be NULL: seconds of work before the kernel that none of its constants covers. */
  double (*seconds_before)(const esmm_kernel *self, const esmm_problem *p);

  /* Bytes of scratch run() is given; SIZE_MAX on overflow. NULL: none. */
  size_t (*workspace)(const esmm_kernel *self, const esmm_problem *p);

  /*
   * On a CPU it cannot fail: everything that could was checked or allocated before. On a GPU a launch may; A, C, bias
   * and scratch are then device memory. Fills kernel-specific fields of stats.
   */
  esmm_status (*run)(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats);
};

static inline size_t esmm_kernel_workspace(const esmm_kernel *kernel, const esmm_problem *p)
{
  return kernel->workspace ? kernel->workspace(kernel, p) : 0;
}

#define ESMM_KERNEL(id)                      \
  extern const esmm_kernel esmm_kernel_##id; \
  const esmm_kernel esmm_kernel_##id

/* registry.c */
int esmm_registry_count(void);
const esmm_kernel *esmm_registry_at(int index); /* ordered by name */
bool esmm_kernel_matches(const esmm_kernel *kernel,
                         const char *name); /* its full name, or its idea before the first _ */
bool esmm_force_known(const char *name);    /* some kernel matches */
/* Its backend is the context's and the device has what it needs; else says why not. why may be NULL. Without a context:
   as in a context of the last backend. */
bool esmm_kernel_available(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes);
/* The kernel that does the same better on this device, or NULL: then this one runs only when named in full. */
const esmm_kernel *esmm_kernel_superseded(const esmm_ctx *ctx, const esmm_kernel *kernel);
unsigned esmm_kernel_formats(const esmm_kernel *kernel); /* of B that it reads: bits 1 << esmm_format_kind */
/* The plan of this context chooses from it, and esmm_tune measures it. */
bool esmm_kernel_competes(const esmm_ctx *ctx, const esmm_kernel *kernel);

/* choose/candidates.c */

/* The context has what the kernel needs, strict allows it, and it can do this problem; else says why not. */
bool esmm_plan_can_run(const esmm_problem *p, const esmm_kernel *kernel, char *why, size_t why_bytes);
/* "forced by 'joint'", or by ESMM_FORCE. */
void esmm_plan_forced_text(const esmm_ctx *ctx, const char *force, char *text, size_t bytes);
/* May it be chosen: does force name it or, where force is NULL, does it compete? */
bool esmm_plan_may_choose(const esmm_ctx *ctx, const esmm_kernel *kernel, const char *force);
/* The cost model at p->sample. units [ESMM_COST_TERMS] may be NULL. */
double esmm_plan_seconds(const esmm_problem *p, int index, double *units, int64_t *variant);

/* Kernels to choose from. */
typedef struct esmm_shortlist {
  int count;
  bool sees_a;                     /* the cost or the variant of one of them depends on A's densities */
  uint8_t index[ESMM_MAX_KERNELS]; /* in the registry, rising */
} esmm_shortlist;

/* Of the kernels that compete, or that force names unless it is NULL, those that can do this problem. */
void esmm_plan_shortlist(const esmm_problem *p, const char *force, esmm_shortlist *list);
void esmm_sample_fill(esmm_sample *sample, double density); /* the same at all heights */
/* Would sampling A, which takes look_seconds, cost more than it could save, whatever A holds? Leaves p->sample full:
   the plan then chooses the cheapest kernel for a full A. */
bool esmm_plan_outright(esmm_problem *p, const esmm_shortlist *list, double look_seconds);

typedef struct esmm_choice {
  const esmm_kernel *kernel;
  int index;
  bool can_run, competes;
  int times; /* how often it was measured */
  double seconds;
  int64_t variant;
  char text[160];
} esmm_choice;

/*
 * By the densities in p->sample and the measured times; looked: A was sampled. Fills one choice a kernel, in registry
 * order, and sets *chosen to the cheapest that can run (of those that force names, when it is not NULL), or fails with
 * ESMM_ERR_UNSUPPORTED and says why not.
 */
esmm_status esmm_plan_sampled(esmm_ctx *ctx, const esmm_problem *p, const char *force, bool looked,
                              esmm_choice *choices, int *chosen);

#endif
