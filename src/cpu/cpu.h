/*
 * cpu.h: the CPU backend as its own files see it.
 *
 * backend.c   the table of backend.h               product.c   a product: sample, choose, run
 * prepare.c   B's bitmaps and its forms (forms.c)  sample.c    the cheap look at A that the plan decides on
 * cpuid.c     instruction sets                     tune.c      how kernels are measured
 * load.c      how busy others keep the CPUs
 * k_*.c       one kernel a file, made of idea (dense.h, joint.h, rows.h, ...) and instruction set (vec_*.h)
 */
#ifndef ESMM_CPU_CPU_H
#define ESMM_CPU_CPU_H

#include "choose/tune.h"

#define ESMM_CPU_HEIGHTS 6 /* strips of 1, 2, 4, ..., 32 rows: a CPU's part of esmm_sample */

/* sample.c: fills in the heights of p->sample that a CPU has */
#define ESMM_SAMPLE_ROWS 32 /* of a sampled block: the tallest strip */
void esmm_sample_a(const esmm_ctx *ctx, const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample);
void esmm_sample_avx512(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample);
void esmm_sample_avx2(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample);
void esmm_sample_portable(const esmm_matrix *a, const esmm_weights *w, esmm_sample *sample);
void esmm_sample_extent(const esmm_matrix *a, int64_t *groups, int64_t *spread); /* blocks down and across A */
double esmm_sample_seconds(const esmm_matrix *a);                                /* about how long that takes */

/* product.c */
esmm_status esmm_cpu_multiply(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s);
esmm_status esmm_cpu_finish(esmm_ctx *ctx, esmm_problem *p, bool want_stats, esmm_stats *s);
esmm_status esmm_cpu_explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen);

/* prepare.c: the forms; needs no context */
void esmm_cpu_weights_free(esmm_weights *w);

/* tune.c */
extern const esmm_trial esmm_cpu_trials[];
esmm_status esmm_cpu_tune_sample(esmm_ctx *ctx, esmm_problem *p);
esmm_status esmm_cpu_tune_measure(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *job, esmm_problem *p,
                                  double *seconds);

/* load.c */
double esmm_cpu_load(esmm_ctx *ctx, double seconds);

#endif
