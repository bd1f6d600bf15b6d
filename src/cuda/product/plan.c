/*
 * plan.c: which kernel of a GPU, and who chooses.
 *
 * The host never waits for the GPU in order to choose. What a dense kernel costs does not depend on the data; what a
 * skipping kernel costs is a line in two densities of A, those of its strips and of their joint with B:
 *
 *     seconds = base + per_strip * strip + per_joint * joint
 *
 * So the host finds the best dense kernel and the best skipping one, and often that is enough: the one is cheaper even
 * if A has no zeros, or the other even if A has nothing else. Where A decides, a small kernel samples A, puts the
 * numbers into that line and writes the outcome to device memory; then both kernels are launched, each with a selector
 * that it looks at first, and the one that was not chosen returns at once. The choice depends on A's values alone: the
 * same call gives the same bits. Both share their scratch, as only one of them touches it.
 *
 * A skipping kernel that has a partner needs none of that: it is given the line, samples A by itself, and does the
 * partner's work inside its own launch where that is the cheaper one.
 */
#include "cuda/product/product.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SELECT_SECONDS 5e-6 /* sampling, and a launch that returns at once */
#define PAIR_SECONDS 5e-7   /* what choosing costs a kernel that does it in its own launch, where A has no zeros */
#define STRIPS_SECONDS 5e-6 /* a launch that makes B's strips, */
#define STRIPS_RATE 2.5e12  /* and its bytes a second, read and written */
#define MIDDLE_STRIP .5     /* A's density at which skipping kernels are compared with each other */

/* ---- what a kernel costs ---- */

double esmm_cuda_seconds_before(const esmm_kernel *self, const esmm_problem *p)
{
  const esmm_cuda_weights *b = esmm_cuda_b(p);
  if (!wants_strips(p, self))
    return 0.0;
  const double read = (double)b->rows_ld * (double)p->k * (double)esmm_dtype_size(p->w->dtype);
  const double written = (double)(b->strips.strips * ESMM_STRIP) * (double)b->strips.k_padded * sizeof(float);
  return STRIPS_SECONDS + (read + written) / STRIPS_RATE;
}

static esmm_cuda_units units_of(const esmm_kernel *kernel, const esmm_problem *p, const double *cost, int64_t *variant)
{
  esmm_cuda_units units = {.base = {[ESMM_COST_TERMS - 1] = 1.0}};
  esmm_cuda_about(kernel)->line(kernel, p, cost, &units, variant);
  return units;
}

void esmm_cuda_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                     int64_t *variant)
{
  const esmm_cuda_units line = units_of(self, p, cost, variant);
  const double strip = p->sample.strip[sample_level(self)], joint = p->sample.joint[sample_level(self)];
  for (int i = 0; i < ESMM_COST_TERMS; i++)
    units[i] = line.base[i] + line.per_strip[i] * strip + line.per_joint[i] * joint;
}

static double density_of_b(const esmm_problem *p, const esmm_kernel *kernel)
{
  return p->w->full ? 1.0 : is_tall(kernel) ? esmm_cuda_b(p)->tile_density : p->w->strip_density;
}

static candidate look_at(const esmm_problem *p, int index)
{
  const esmm_kernel *kernel = esmm_registry_at(index);
  const double *cost = p->ctx->cost[index];
  candidate c = {.kernel = kernel, .index = index, .b = density_of_b(p, kernel)};
  const esmm_cuda_units units = units_of(kernel, p, cost, &c.variant);
  c.base = kernel->seconds_before ? kernel->seconds_before(kernel, p) : 0.0;
  for (int i = 0; i < ESMM_COST_TERMS; i++) {
    c.base += cost[i] * units.base[i];
    c.per_strip += cost[i] * units.per_strip[i];
    c.per_joint += cost[i] * units.per_joint[i];
  }
  return c;
}

double esmm_run_seconds_at(const candidate *c, double strip, double joint)
{
  return c->base + c->per_strip * strip + c->per_joint * joint;
}

static double middle(const candidate *c)
{
  return c->kernel ? esmm_run_seconds_at(c, MIDDLE_STRIP, MIDDLE_STRIP * c->b) : INFINITY;
}

/* If A has no zeros. */
static double most(const candidate *c)
{
  return esmm_run_seconds_at(c, 1, c->b);
}

/*
 * So much more than the best dense kernel is still level with it: what may be lost where A turns out to have no zeros,
 * so that they can be skipped where it has. Zeros come out of activations, and into the product that makes rows
 * shorter.
 */
static double level(const esmm_problem *p)
{
  return p->k >= p->n ? 1.025 : 1.01;
}

/* May the skipping kernel choose between itself and its partner, if there is one? Only where that costs next to nothing
   when A has no zeros. */
static bool pair_pays(const esmm_problem *p, const candidate *dense, const candidate *skip, const candidate *partner)
{
  return partner->kernel && skip->base + PAIR_SECONDS < dense->base &&
         fmin(most(skip), partner->base) + PAIR_SECONDS <= level(p) * dense->base;
}

/* Whom does the device choose from, and must it? selectable: the best dense kernel that has a selector; partner: that
   of the skipping kernel. */
static void settle(const esmm_problem *p, decision *d, const candidate *selectable, const candidate *partner)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  if (!skip->kernel || !dense->kernel) {
    d->run = skip->kernel ? RUN_SKIP : RUN_DENSE;
  } else if (most(skip) <= dense->base) {
    d->run = RUN_SKIP;
  } else if (pair_pays(p, dense, skip, partner)) {
    d->run = DEVICE_CHOOSES;
    d->pair = true;
    d->of[RUN_DENSE] = *partner;
  } else if (skip->base + 2 * SELECT_SECONDS >= dense->base) { /* asking costs as much as could be won */
    d->run = RUN_DENSE;
  } else if (partner->kernel &&
             partner->index == selectable->index) { /* what the pair could not win, a selector cannot */
    d->run = RUN_DENSE;
  } else if (selectable->index == dense->index && selectable->kernel) {
    d->run = DEVICE_CHOOSES;
  } else if (selectable->kernel && fmin(most(skip), selectable->base) + SELECT_SECONDS <= level(p) * dense->base) {
    /* The best dense kernel cannot wait for the device's choice: the next best stands in for it, if that is as good. */
    d->run = DEVICE_CHOOSES;
    d->of[RUN_DENSE] = *selectable;
  } else {
    d->run = RUN_DENSE;
  }
}

static bool may_run(const esmm_problem *p, const esmm_kernel *kernel, const char *force)
{
  char why[160];
  return kernel->backend == p->ctx->backend && esmm_plan_may_choose(p->ctx, kernel, force) &&
         esmm_plan_can_run(p, kernel, why, sizeof why);
}

/* The partner of a skipping kernel, where it has one that can run, and A can be sampled by both. */
static candidate find_partner(const esmm_problem *p, const esmm_kernel *skip)
{
  const esmm_cuda_kernel *about = skip ? esmm_cuda_about(skip) : NULL;
  for (int i = 0; about && about->partner && about->can_choose(p) && i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (strcmp(kernel->name, about->partner) == 0 && may_run(p, kernel, NULL))
      return look_at(p, i);
  }
  return (candidate){0};
}

static esmm_status choose(esmm_ctx *ctx, const esmm_problem *p, const char *force, decision *d)
{
  candidate selectable = {0}, only = {0};
  *d = (decision){0};
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (!may_run(p, kernel, force))
      continue;
    const candidate c = look_at(p, i);
    candidate *best = &d->of[kernel->flags & ESMM_KERNEL_SKIPS ? RUN_SKIP : RUN_DENSE];
    d->considered++;
    if (middle(&c) < middle(best))
      *best = c;
    if (middle(&c) < middle(&only))
      only = c;
    if (!(kernel->flags & ESMM_KERNEL_SKIPS) && !esmm_cuda_about(kernel)->library && middle(&c) < middle(&selectable))
      selectable = c;
  }
  if (d->considered == 0) {
    esmm_choice choices[ESMM_MAX_KERNELS];
    int chosen;
    return esmm_plan_sampled(ctx, p, force, choices, &chosen); /* fails, and knows why */
  }
  if (force) {
    d->run = only.kernel->flags & ESMM_KERNEL_SKIPS ? RUN_SKIP : RUN_DENSE;
    d->of[d->run] = only;
    d->of[!d->run].kernel = NULL;
  } else {
    const candidate partner = find_partner(p, d->of[RUN_SKIP].kernel);
    settle(p, d, &selectable, &partner);
  }
  return ESMM_OK;
}

/* Chooses what can be started. A kernel that cannot says so when it is asked again, so this ends. */
esmm_status esmm_run_choose(esmm_ctx *ctx, esmm_problem *p, const char *force, decision *d)
{
  const esmm_status status = choose(ctx, p, force, d);
  if (status != ESMM_OK || d->run == DEVICE_CHOOSES)
    return status;
  const esmm_kernel *kernel = d->of[d->run].kernel;
  return !esmm_cuda_about(kernel)->start || esmm_cuda_about(kernel)->start(ctx) ? ESMM_OK : choose(ctx, p, force, d);
}

esmm_cuda_line esmm_run_line(const decision *d)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  return (esmm_cuda_line){.dense = (float)dense->base,
                          .base = (float)skip->base,
                          .per_strip = (float)skip->per_strip,
                          .per_joint = (float)skip->per_joint};
}

/* Why `chosen`, at the densities of choice. A dense kernel may have been chosen before A was seen. */
void esmm_run_reason(const esmm_ctx *ctx, const decision *d, const char *force, which chosen,
                     const esmm_choice_device *choice, char *text, size_t bytes)
{
  const candidate *mine = &d->of[chosen], *other = &d->of[!chosen];
  if (force) {
    esmm_plan_forced_text(ctx, force, text, bytes);
    return;
  }
  if (!other->kernel) {
    (void)snprintf(text, bytes, "%s", d->considered > 1 ? "the cheapest that can run" : "the only one that can run");
    return;
  }
  const double own = 1e3 * esmm_run_seconds_at(mine, choice->strip, choice->joint);
  const double others = 1e3 * esmm_run_seconds_at(other, choice->strip, choice->joint);
  if (d->run != DEVICE_CHOOSES && others < own)
    (void)snprintf(text, bytes, "%.3g ms, settled before A is seen: %s would take %.3g ms here, %.3g ms without zeros",
                   own, other->kernel->name, others, 1e3 * most(other));
  else
    (void)snprintf(text, bytes, "cheapest of %d: %.3g ms, then %s with %.3g ms", d->considered, own,
                   other->kernel->name, others);
}
