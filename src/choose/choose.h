/*
 * choose.h: which kernel, by predicted costs (candidates.c) and by what calls took (measured.h).
 *
 * A prediction makes the list. The choice is by the prediction times the ratio of measured to predicted time: on these
 * weights in calls of this class, else on weights of this shape, else in classes beside this one, else anywhere on this
 * machine, else 1. A class has all that a cost depends on: sizes (the rows exactly to 16, then in steps of a quarter),
 * dtypes, what follows the sum, B's density, threads, and the densities of A in steps of a quarter.
 *
 * Unmeasured kernels are tried where they may win and a trial is affordable: all trials together may lose three calls
 * of the best kernel, on a GPU six, and then a little of each call, so that calls 1 to 32 cost about 1.06 times as much
 * as the best kernel's. After that one call in 16 is timed, on a GPU one in 61. On a CPU the first calls find cold
 * caches and sleeping threads, so what they take is an upper bound: kernels that may still win are tried again after
 * 64, 256 and 1,024 calls, each behind a call that is not timed, and may lose another 0.2 ms. A context that does not
 * learn has predictions alone.
 *
 * A CPU's call is measured when it returns. A GPU's is measured some calls later: until then the trial is under way,
 * and what it is expected to lose counts as lost.
 */
#ifndef ESMM_CHOOSE_H
#define ESMM_CHOOSE_H

#include "choose/measured.h"
#include "kernel.h"

/* A kernel that a call may take. */
typedef struct esmm_option {
  int index; /* in the registry */
  int64_t variant;
  double predicted; /* seconds, by the model */
  double doubt;     /* at least 1: an unmeasured prediction has to be better than others by this factor */
  double seconds;   /* predicted, times the measured ratio: esmm_choose_among fills this in, */
  double hoped;     /* the same, but for what was measured in the first calls alone, */
  int times;        /* and how often it was measured, */
  bool warm;        /* behind the first calls, */
  int flying;       /* and how often it is being measured */
} esmm_option;

/* What is known of A: a class of densities, which are in steps of a quarter. */
typedef struct esmm_density_class {
  int element, strip;
} esmm_density_class;

/* How calls are timed. */
typedef struct esmm_clock {
  int every;     /* calls from one that is timed to the next, once the choice stands */
  double budget; /* calls of the best kernel that all trials may lose, */
  double share;  /* and a share of each call */
  double slack;  /* seconds by which a prediction may be off however small the product is */
  bool off;      /* no call is timed, and nothing is tried */
  bool warms;    /* later rounds of trials begin with a call that is not timed: the others' data lie in the caches */
  bool idle;     /* the last time did not count: nothing is tried until one does */
  int pause;     /* where off or idle: calls that a choice holds for */
  /* May be NULL: timed calls in flight, of that class and kernel. */
  int (*flying)(const void *self, esmm_class own, int index);
  const void *self;
} esmm_clock;

/* What was chosen for a call, and why. */
typedef struct esmm_plan {
  const esmm_kernel *kernel;
  int index; /* of it, in the registry */
  int64_t variant;
  double predicted, seconds; /* by the model; by what was measured as well */
  int count;                 /* options there were; */
  int next;                  /* the index of the next best, or -1 */
  double next_seconds;
  bool timed;     /* its time is wanted: esmm_choose_learn */
  bool tried;     /* for that alone */
  bool warming;   /* for the calls behind it, which are timed */
  bool warm;      /* the first calls are over: its time counts more than theirs */
  bool open;      /* the next call may try another */
  bool flying;    /* a kernel of these is being measured */
  esmm_class own; /* of the call, on these weights */
  esmm_class shared;
  double known;   /* seconds of the best, as far as known */
  double reserve; /* seconds that the trial is expected to lose: they are in history.spent */
} esmm_plan;

/* What is kept of a shape of call on the same weights. Zeros before the first. */
typedef struct esmm_history {
  esmm_class own, shared;      /* but for A's densities */
  uint32_t calls, until_timed; /* so far; until the next is timed */
  uint32_t checked;            /* how often the next best was looked at again */
  int last, trying;            /* index + 1: of the last best kernel, of one tried then; */
  int in_row;                  /* calls behind the first in a row of its trials */
  bool warmed;                 /* the last of them was not timed */
  float spent;                 /* seconds that trials lost */
} esmm_history;

/* The best of a nonempty list, at p->sample. looked: A was sampled, not assumed. history may be NULL: then nothing is
   tried. */
void esmm_choose(const esmm_problem *p, const esmm_shortlist *list, bool looked, esmm_history *history,
                 esmm_plan *plan);
/* The same of count options, at least one, with their predictions and doubts. */
void esmm_choose_among(const esmm_problem *p, esmm_option *all, int count, esmm_density_class seen,
                       const esmm_clock *clock, esmm_history *history, esmm_plan *plan);
/* Of a density, for a class. */
int esmm_density_step(double density);
/* That of p->sample; looked: A was looked at for it. */
esmm_density_class esmm_choose_class(const esmm_problem *p, bool looked);
static inline bool esmm_same_densities(esmm_density_class x, esmm_density_class y)
{
  return x.element == y.element && x.strip == y.strip;
}
/* Notes a timed call. */
void esmm_choose_learn(esmm_ctx *ctx, const esmm_plan *plan, esmm_history *history, double seconds);
/* For how many more calls of this shape and class the plan stands: lends them, so the history counts them already. */
int esmm_choose_stands(const esmm_problem *p, const esmm_plan *plan, esmm_history *history);
/* The history gets back unused calls. */
void esmm_choose_return(esmm_history *history, int calls);
/* What a kernel's prediction is multiplied by, and how many times that was measured in calls of this class or beside
   it: for explanations. */
double esmm_choose_ratio(const esmm_problem *p, bool looked, int index, int *times);
/* "cheapest of 5: 0.12 ms, then ..." */
void esmm_choose_text(const esmm_plan *plan, char *text, size_t bytes);

#endif
