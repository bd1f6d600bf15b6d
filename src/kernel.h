/*
 * kernel.h: the kernel descriptor. Adding a kernel is adding one file, src/<backend>/k_<name>.c, that ends in
 *
 *     ESMM_KERNEL(joint_f32_avx2) = { .doc = "...", .can_run = ..., .terms = ..., .run = ... };
 *
 * The build scans those files for ESMM_KERNEL and makes the registry from them; plan, tests, benchmarks and
 * `esmm list` take it from there. docs/adding-a-kernel.md walks through one.
 */
#ifndef ESMM_KERNEL_H
#define ESMM_KERNEL_H

#include "internal.h"

typedef enum esmm_backend { ESMM_CPU = 0, ESMM_CUDA = 1 } esmm_backend;

/* Densities of A seen by the plan in a cheap sample, at strip heights 1, 2, 4, ..., 32 (index log2). */
#define ESMM_SAMPLE_HEIGHTS 6
typedef struct esmm_sample {
  double element;                    /* nonzero share of A's elements */
  double strip[ESMM_SAMPLE_HEIGHTS]; /* strip density of A at height 1 << i */
  double joint[ESMM_SAMPLE_HEIGHTS]; /* joint density with B's panels */
} esmm_sample;

/* One product, checked: every pointer valid, every ld filled in, shapes agree, m, n > 0. */
typedef struct esmm_problem {
  int64_t m, n, k;
  esmm_matrix a, c;
  const esmm_weights *w;
  float alpha, beta;
  const float *bias; /* NULL: none */
  esmm_activation activation;
  const float *factor; /* the finished other branch of a gated product, [m,n] row-major; NULL: none */
  int64_t factor_ld;
  esmm_matrix residual;  /* data is NULL: none */
  int32_t *nonzeros;     /* [n], to which the nonzeros of C's columns are added; NULL: not wanted */
  esmm_pattern *bitmaps; /* into which C's strips are ORed; NULL: not wanted */
  int64_t row0;          /* row of the whole C, in bitmaps, that is row 0 of this one */
  bool strict;
  const esmm_pattern *pattern; /* NULL: scan A */
  int threads;
  esmm_sample sample;
  int64_t strip_rows;                /* chosen by the kernel's terms(): see below */
  const struct esmm_cuda_call *call; /* GPU: the stream and what goes with it (cuda/cuda.h); NULL on a CPU */
} esmm_problem;

typedef struct esmm_kernel {
  const char *name, *doc;
  esmm_backend backend;
  int number;     /* place on the ladder, 0: none */
  unsigned flags; /* ESMM_KERNEL_... of esmm.h */
  unsigned cpu;   /* ESMM_CPU_... it needs */
  int sm;         /* CUDA: the least compute capability, 80 or 90 */
  bool sm_exact;  /* CUDA: built for that one only (sm_90a) */
  bool ungated;   /* CUDA: its launches have no esmm_gate (a library's): it runs only where the host can choose */
  esmm_format_kind format; /* of B: the one that it reads */
  bool any_format;         /* reads B of whatever format */
  bool reads_strips;       /* CUDA: reads B as fp32 strips; those of a B of 16 bits are made for the call */
  const char *partner;     /* CUDA: the dense kernel that this skipping one chooses against in its own launch */

  /* May be NULL: what this machine lacks that the kernel needs beside its CPU or GPU ("libcublas was not found"), or
     NULL where all is there. */
  const char *(*missing)(void);

  /* Can it do this problem? If not, says why in a short phrase ("m is 40, decode takes 16 at most"). */
  bool (*can_run)(const esmm_ctx *ctx, const esmm_problem *p, char *why, size_t why_bytes);

  /* CUDA, may be NULL: called before run() where it was chosen, to get what is got only when needed (a library's
     handle). False: it cannot be had, and can_run() says so from now on; the plan then chooses another. */
  bool (*start)(esmm_ctx *ctx);

  /*
   * The cost model: time = sum of units[i] * cost[i]. terms() fills units (multiply-add vectors, list words, bytes,
   * ...; 0 where unused; the last is 1, for what any call costs) and notes in *strip_rows the variant it assumed, 0
   * where there is none. esmm_tune fits cost[] by measuring.
   */
  void (*terms)(const esmm_problem *p, const double *cost, double *units, int64_t *strip_rows);
  const char *const term_names[ESMM_COST_TERMS];
  const double cost[ESMM_COST_TERMS]; /* shipped constants, seconds per unit on one thread */

  size_t (*workspace)(const esmm_problem *p); /* bytes of scratch run() is given; SIZE_MAX on overflow */

  /*
   * On a CPU it cannot fail: everything that could was checked or allocated before. On a GPU a launch may; A, C, bias
   * and scratch are then device memory, and the work goes to p->call->stream. Fills kernel-specific fields of stats.
   */
  esmm_status (*run)(esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats);
} esmm_kernel;

#define ESMM_KERNEL(id)                      \
  extern const esmm_kernel esmm_kernel_##id; \
  const esmm_kernel esmm_kernel_##id

/* registry.c */
int esmm_registry_count(void);
const esmm_kernel *esmm_registry_at(int index); /* ordered by name */
bool esmm_kernel_matches(const esmm_kernel *kernel,
                         const char *name); /* its full name, or its idea before the first _ */
bool esmm_force_known(const char *name);    /* some kernel matches */
/* Its backend is the context's and the device has what it needs; else says why not. why may be NULL. */
bool esmm_kernel_available(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes);
/* CPU: the same idea for a wider instruction set that is there, or NULL: then this kernel runs only when named in full.
 */
const esmm_kernel *esmm_kernel_superseded(const esmm_ctx *ctx, const esmm_kernel *kernel);
/* The plan of this context chooses from it, and esmm_tune measures it. */
bool esmm_kernel_competes(const esmm_ctx *ctx, const esmm_kernel *kernel);

/* sample.c: the plan's cheap look at A */
void esmm_sample_a(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample);

/* plan.c */

/* The context has what the kernel needs, strict allows it, and it can do this problem; else says why not. */
bool esmm_plan_can_run(const esmm_ctx *ctx, const esmm_problem *p, const esmm_kernel *kernel, char *why,
                       size_t why_bytes);
/* Is it one to choose from: of those that force names, or, where that is NULL, of those that compete? */
bool esmm_plan_may_choose(const esmm_ctx *ctx, const esmm_kernel *kernel, const char *force);
/* The cost model at p->sample. units [ESMM_COST_TERMS] may be NULL. */
double esmm_plan_seconds(const esmm_ctx *ctx, const esmm_problem *p, int index, double *units, int64_t *strip_rows);

typedef struct esmm_choice {
  const esmm_kernel *kernel;
  int index;
  bool can_run, competes;
  double seconds;
  int64_t strip_rows;
  char text[160];
} esmm_choice;

/*
 * Samples A, fills one choice a kernel, in registry order, and sets *chosen to the cheapest that can run (of those that
 * force names, when it is not NULL), or fails with ESMM_ERR_UNSUPPORTED and says why not.
 */
esmm_status esmm_plan(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen);
/* The same with the densities that p->sample has already. */
esmm_status esmm_plan_sampled(esmm_ctx *ctx, const esmm_problem *p, const char *force, esmm_choice *choices,
                              int *chosen);

#endif
