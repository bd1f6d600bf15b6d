/*
 * choose.h: which kernel, from what calls are predicted to cost (candidates.c) and what calls took (measured.h).
 *
 * A prediction makes the list. What decides is the prediction times what this kernel took over its predictions before:
 * on these weights in calls of this class, else on weights of this shape, else in classes beside this one, else
 * anywhere on this machine, else 1. A class has all that a cost depends on: sizes (the rows exactly to 16, then in
 * steps of a quarter), dtypes, what follows the sum, B's density, threads, and the densities of A in steps of a
 * quarter.
 *
 * What has not been measured is tried where it may win and a trial is affordable: all trials together may lose three
 * calls of the best kernel, so that calls 1 to 32 cost about 1.05 times as much as the best kernel's, and seldom more
 * than 1.10. After that one call in 16 is timed. A context that does not learn has predictions alone.
 */
#ifndef ESMM_CHOOSE_H
#define ESMM_CHOOSE_H

#include "choose/measured.h"
#include "kernel.h"

/* What was chosen for a call, and why. */
typedef struct esmm_plan {
  const esmm_kernel *kernel;
  int index; /* of it, in the registry */
  int64_t variant;
  double predicted, seconds; /* by the model; by what was measured as well */
  int count;                 /* there were so many to choose from; */
  int next;                  /* the index of the next best, or -1 */
  double next_seconds;
  bool timed;     /* what it takes is wanted: esmm_choose_learn */
  bool tried;     /* for that alone */
  bool open;      /* the next call may try another */
  esmm_class own; /* of the call, on these weights */
  esmm_class shared;
  double known; /* what the best takes of those that were measured */
} esmm_plan;

/* What is kept of a shape of call on the same weights. Zeros before the first. */
typedef struct esmm_history {
  esmm_class own, shared; /* but for A's densities */
  uint32_t calls, rest;   /* so far; until the next is timed */
  uint32_t checked;       /* how often the next best was looked at again */
  int last, trying;       /* indices and 1 more: of the kernel that was best last, of one that was tried then */
  float spent;            /* seconds that trials lost */
} esmm_history;

/* The best of a list that is not empty, at p->sample. looked: that is what was seen of A, not filled in. history may be
   NULL: then nothing is tried. */
void esmm_choose(const esmm_problem *p, const esmm_shortlist *list, bool looked, esmm_history *history,
                 esmm_plan *plan);
/* That a timed call took so long. */
void esmm_choose_learn(const esmm_problem *p, const esmm_plan *plan, esmm_history *history, double seconds);
/* For how many more calls of such a shape the plan need not be asked for again, where A is not looked at: counts them.
 */
int esmm_choose_stands(const esmm_problem *p, const esmm_plan *plan, esmm_history *history);
/* What a kernel's prediction is multiplied by, and how many times that was measured in calls of this class or beside
   it: for explanations. */
double esmm_choose_ratio(const esmm_problem *p, bool looked, int index, int *times);
/* "cheapest of 5: 0.12 ms, then ..." */
void esmm_choose_text(const esmm_plan *plan, char *text, size_t bytes);

#endif
