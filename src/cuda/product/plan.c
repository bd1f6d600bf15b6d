/*
 * plan.c: which kernel; host or device chooses.
 *
 * The host does not wait for A in order to choose. What a dense kernel costs does not depend on the data; what a
 * skipping kernel costs is a line in two densities of A, those of its strips and of their joint with B:
 *
 *     seconds = base + per_strip * strip + per_joint * joint
 *
 * So the host finds the best dense kernel and the best skipping one, and often that is enough: the skipping one is
 * cheaper even if A has no zeros, or the dense one even if A has nothing else. Where A decides, a small kernel samples
 * A, evaluates that line and writes the outcome to device memory; then both kernels are launched; each reads its
 * selector first, and the one not chosen returns at once. The choice depends on A's values alone: the same call gives
 * the same bits. Both share their scratch, as only one of them touches it.
 *
 * A skipping kernel with a partner needs none of that: it gets the line, samples A itself, and does the partner's work
 * inside its own launch where that is cheaper.
 *
 * A gated product is two, each decided so, or one launch that makes both, if that is cheaper: for the remembered A, or
 * for one without zeros.
 *
 * Where earlier calls reported A's density (recall.c), or the call has A's pattern in host memory, the host chooses
 * among all kernels, a library's too, and runs the one.
 */
#include "cuda/product/product.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define MIDDLE_STRIP 0.5 /* A's density at which skipping kernels are compared with each other */

/* ---- what a kernel costs ---- */

double esmm_cuda_seconds_before(const esmm_kernel *self, const esmm_problem *p)
{
  const esmm_cuda_weights *b = esmm_cuda_b(p);
  if (!wants_strips(p, self))
    return 0.0;
  const double read = (double)b->rows_ld * (double)p->k * (double)esmm_dtype_size(p->w->dtype);
  const double written = (double)(b->strips.strips * ESMM_STRIP) * (double)b->strips.k_padded * sizeof(float);
  return ESMM_GPU_LAUNCH_NEXT + ESMM_GPU_MOVED * (read + written);
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
  const double past = esmm_cuda_past_knee(esmm_cuda_about(self), strip);
  for (int i = 0; i < ESMM_COST_TERMS; i++) {
    const double by_strip = line.base[i] + line.per_strip[i] * strip, most = line.at_most[i] * strip;
    units[i] = past * ((line.at_most[i] > 0.0 ? fmin(by_strip, most) : by_strip) + line.per_joint[i] * joint +
                       fmin(line.per_overflow[i] * p->sample.overflow, line.most_overflow[i]));
  }
}

static double density_of_b(const esmm_problem *p, const esmm_kernel *kernel)
{
  return p->w->full ? 1.0 : uses_strip128(kernel) ? esmm_cuda_b(p)->tile_density : p->w->strip_density;
}

/* A pass over C, for notes that the kernel does not make. */
static double seconds_behind(const esmm_kernel *kernel, const esmm_problem *p)
{
  const esmm_cuda_kernel *about = esmm_cuda_about(kernel);
  if ((!p->nonzeros && !p->bitmaps) || (about->tallies && about->tallies(p)))
    return 0.0;
  return ESMM_GPU_LAUNCH_NEXT + ESMM_GPU_MOVED * (double)p->m * (double)p->n * (double)esmm_dtype_size(p->c.dtype);
}

static candidate look_at(const esmm_problem *p, int index)
{
  const esmm_kernel *kernel = esmm_registry_at(index);
  const double *cost = p->ctx->cost[index];
  candidate c = {.kernel = kernel, .index = index, .b = density_of_b(p, kernel)};
  esmm_problem mine = *p;
  const esmm_cuda_units units = units_of(kernel, p, cost, &c.variant);
  c.base = (kernel->seconds_before ? kernel->seconds_before(kernel, p) : 0.0) + seconds_behind(kernel, p);
  for (int i = 0; i < ESMM_COST_TERMS; i++) {
    c.base += cost[i] * units.base[i];
    c.per_strip += cost[i] * units.per_strip[i];
    c.per_joint += cost[i] * units.per_joint[i];
    c.per_overflow += cost[i] * units.per_overflow[i];
    c.most_overflow += cost[i] * units.most_overflow[i];
    if (units.at_most[i] > 0.0) {
      c.over += cost[i] * units.base[i];
      c.over_per_strip += cost[i] * (units.per_strip[i] - units.at_most[i]);
    }
  }
  c.base += c.most_overflow;
  mine.variant = c.variant;
  c.work = esmm_kernel_workspace(kernel, &mine);
  return c;
}

/* What the line has for overflow that A does not have. */
static double spared(const candidate *c, double overflow)
{
  return overflow < 0.0 ? 0.0 : fmax(0.0, c->most_overflow - c->per_overflow * overflow);
}

double esmm_run_seconds_at(const candidate *c, double strip, double joint, double overflow)
{
  const double over = fmax(0.0, c->over + c->over_per_strip * strip) + spared(c, overflow);
  return esmm_cuda_past_knee(esmm_cuda_about(c->kernel), strip) *
         (c->base + c->per_strip * strip + c->per_joint * joint - over);
}

static double middle(const candidate *c)
{
  return c->kernel ? esmm_run_seconds_at(c, MIDDLE_STRIP, MIDDLE_STRIP * c->b, -1.0) : INFINITY;
}

/* If A has no zeros. */
static double most(const candidate *c)
{
  return esmm_run_seconds_at(c, 1, c->b, -1.0);
}

/* May the skipping kernel choose between itself and a partner? Only if that costs next to nothing for an A without
   zeros. */
static bool pair_pays(const candidate *dense, const candidate *skip, const candidate *partner)
{
  return partner->kernel && skip->base + ESMM_GPU_PAIR < dense->base &&
         fmin(most(skip), partner->base) + ESMM_GPU_PAIR <= ESMM_GPU_LEVEL * dense->base;
}

/* Must the device choose, and between which? selectable: the best dense kernel with a selector; partner: that of the
   skipping kernel. */
static void settle(decision *d, const candidate *selectable, const candidate *partner)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  if (!skip->kernel || !dense->kernel) {
    d->run = skip->kernel ? RUN_SKIP : RUN_DENSE;
  } else if (most(skip) <= dense->base) {
    d->run = RUN_SKIP;
  } else if (pair_pays(dense, skip, partner)) {
    d->run = DEVICE_CHOOSES;
    d->pair = true;
    d->of[RUN_DENSE] = *partner;
  } else if (skip->base + 2 * ESMM_GPU_LAUNCH_NEXT >= dense->base) { /* asking costs as much as could be won */
    d->run = RUN_DENSE;
  } else if (partner->kernel &&
             partner->index == selectable->index) { /* what the pair could not win, a selector cannot */
    d->run = RUN_DENSE;
  } else if (selectable->index == dense->index && selectable->kernel) {
    d->run = DEVICE_CHOOSES;
  } else if (selectable->kernel &&
             fmin(most(skip), selectable->base) + ESMM_GPU_LAUNCH_NEXT <= ESMM_GPU_LEVEL * dense->base) {
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

/* ---- candidates ---- */

/* Without room for all, keeps the candidates that cost least with A half dense. */
static void add_candidate(candidates *list, const candidate *c)
{
  int at = list->count;
  if (at == MOST_CANDIDATES) {
    at = 0;
    for (int i = 1; i < list->count; i++)
      if (middle(&list->all[i]) > middle(&list->all[at]))
        at = i;
    if (middle(c) >= middle(&list->all[at]))
      return;
    list->count--;
    memmove(&list->all[at], &list->all[at + 1], (size_t)(list->count - at) * sizeof *list->all);
  }
  list->all[list->count++] = *c;
}

/* The partner of a skipping kernel, where it has one that can run, and A can be sampled by both. */
static candidate find_partner(const esmm_problem *p, const candidates *list, const esmm_kernel *skip)
{
  const esmm_cuda_kernel *about = skip ? esmm_cuda_about(skip) : NULL;
  if (about && about->partner && about->can_choose(p))
    for (int i = 0; i < list->count; i++)
      if (strcmp(list->all[i].kernel->name, about->partner) == 0)
        return list->all[i];
  return (candidate){0};
}

static bool skips(const candidate *c)
{
  return c->kernel->flags & ESMM_KERNEL_SKIPS;
}

/* Runs one of them, whatever A holds. */
static void run_alone(decision *d, const candidate *c)
{
  d->run = skips(c) ? RUN_SKIP : RUN_DENSE;
  d->pair = false;
  d->of[d->run] = *c;
  d->of[!d->run].kernel = NULL;
}

/* The decision where A's densities are not known. */
static void decide_unseen(const esmm_problem *p, const char *force, candidates *list)
{
  decision *d = &list->unseen;
  candidate selectable = {0}, only = {0};
  for (int i = 0; i < list->count; i++) {
    const candidate *c = &list->all[i];
    candidate *best = &d->of[skips(c) ? RUN_SKIP : RUN_DENSE];
    if (middle(c) < middle(best))
      *best = *c;
    if (middle(c) < middle(&only))
      only = *c;
    if (!skips(c) && !esmm_cuda_about(c->kernel)->library && middle(c) < middle(&selectable))
      selectable = *c;
  }
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  list->skips = skip->kernel && list->count > 1;
  list->overflow_matters = list->strip8 = false;
  for (int i = 0; i < list->count && dense->kernel; i++) {
    const candidate *c = &list->all[i];
    list->overflow_matters = list->overflow_matters ||
                             (c->most_overflow > 0.0 && ESMM_GPU_SURELY * (c->base - c->most_overflow) < dense->base);
    list->strip8 = list->strip8 || (uses_strip8(c->kernel) && c->base < dense->base);
  }
  d->strip128 = uses_strip128(skip->kernel ? skip->kernel : dense->kernel);
  esmm_run_set_pace(list, p->m, dense->kernel ? dense->base : most(skip));
  if (force) {
    run_alone(d, &only);
    d->strip128 = uses_strip128(only.kernel);
    return;
  }
  const candidate partner = find_partner(p, list, skip->kernel);
  settle(d, &selectable, &partner);
}

/* Asks every kernel. */
static esmm_status make_candidates(esmm_ctx *ctx, const esmm_problem *p, const char *force, candidates *list)
{
  list->unseen = (decision){0};
  list->count = 0;
  list->history = (esmm_history){0};
  list->stands = 0;
  for (int i = 0; i < esmm_registry_count(); i++)
    if (may_run(p, esmm_registry_at(i), force)) {
      const candidate c = look_at(p, i);
      add_candidate(list, &c);
      list->unseen.considered++;
    }
  if (list->count == 0) {
    esmm_choice choices[ESMM_MAX_KERNELS];
    int chosen;
    return esmm_plan_sampled(ctx, p, force, true, choices, &chosen); /* fails, and knows why */
  }
  decide_unseen(p, force, list);
  return ESMM_OK;
}

/*
 * The context's, made if it has none; or *own, which is not kept, for forced calls, and for captured ones, for which
 * fewer kernels can run. Captured calls still get the history.
 */
static esmm_status find_candidates(esmm_ctx *ctx, const esmm_problem *p, const char *force, bool counts,
                                   candidates *own, candidates **list)
{
  const bool keep = counts && !force && !esmm_cuda_capturing(ctx);
  candidates *kept = force ? NULL : esmm_recall_shape(p, keep);
  *list = kept;
  if (kept && !esmm_cuda_capturing(ctx))
    return ESMM_OK;
  const esmm_status status = make_candidates(ctx, p, force, own);
  *list = own;
  if (status != ESMM_OK)
    return status;
  if (kept)
    own->history = kept->history;
  kept = keep ? esmm_recall_add_shape(p) : NULL;
  if (kept) {
    *kept = *own;
    *list = kept;
  }
  return ESMM_OK;
}

/* ---- the decision where densities are remembered ---- */

/*
 * Known of A: the density e of its elements and s of taller strips. With zeros in random places, a strip of h rows
 * would be alive with 1 - (1 - e)^h. If s is lower than that, zeros cluster; then a share f of the k's is taken to hold
 * all nonzeros, in random places with density d: e = f d, s = f (1 - (1 - d)^rows). Rows that resemble their neighbours
 * have fewer strips of 8 rows than that.
 */
double esmm_run_strip8_density(double element, double strip, int64_t rows, int64_t fewer)
{
  enum { HALVINGS = 16 };
  if (element <= 0.0 || element >= 1.0 || rows <= fewer)
    return strip;
  double least = element, most_d = 1.0; /* of d */
  for (int i = 0; i < HALVINGS; i++) {
    const double d = i == 0 ? element : sqrt(least * most_d);
    const bool more = -expm1((double)rows * log1p(-d)) * element > strip * d; /* than s says: d is larger */
    if (i == 0 && !more)
      return fmin(strip, -expm1((double)fewer * log1p(-element)));
    if (more)
      least = d;
    else
      most_d = d;
  }
  return fmin(strip, element / least * -expm1((double)fewer * log1p(-least)));
}

/* Densities of lower strips than the kernel's say nothing of its own; those of taller ones are upper bounds. */
static double seconds_seen(const candidate *c, const run *r)
{
  const esmm_seen *seen = !r->d.by_pattern           ? r->seen
                          : uses_strip8(c->kernel)   ? &r->strip8
                          : uses_strip128(c->kernel) ? &r->strip128
                                                     : r->seen;
  if (uses_strip8(c->kernel)) {
    const double strip =
        esmm_run_strip8_density(seen->element, seen->strip, seen->strip_rows, esmm_cuda_about(c->kernel)->strip_rows);
    return esmm_run_seconds_at(c, strip, strip * c->b, -1.0);
  }
  if (seen->strip_rows && seen->strip_rows < strip_rows(uses_strip128(c->kernel)))
    return most(c);
  return esmm_run_seconds_at(c, seen->strip, seen->joint_known ? seen->joint : seen->strip * c->b,
                             seen->overflow_known ? seen->overflow : -1.0);
}

/*
 * By what factor a kernel must be predicted cheaper than a library to replace it. Predictions of most kernels waver
 * more than those of decode, which does little but read.
 */
static double handicap(const esmm_ctx *ctx, const candidate *c)
{
  const esmm_cuda_kernel *about = esmm_cuda_about(c->kernel);
  if (about->library)
    return 1.0;
  if (about->stand_in && esmm_cuda_get(ctx)->sm == 90)
    return ESMM_GPU_STAND_IN;
  return about->steady ? ESMM_GPU_STEADY : ESMM_GPU_SURELY;
}

/* Densities at strips of another height are of another class. */
static esmm_density_class class_of(const esmm_seen *seen)
{
  return (esmm_density_class){(int)esmm_max(1, esmm_min(seen->strip_rows, ESMM_TILE)), esmm_density_step(seen->strip)};
}

void esmm_run_note_class(const run *r)
{
  r->p->seen_rows = class_of(r->seen).element;
  r->p->seen_strip = r->seen->strip;
}

/* The cheapest of all, by predictions and by what calls took; or a trial. */
static void choose_seen(run *r, candidates *list, bool counts)
{
  decision *d = &r->d;
  const esmm_density_class seen = class_of(r->seen);
  const bool kept = counts && !esmm_cuda_capturing(r->ctx);
  if (kept && list->stands > 0 && !r->timed && r->ctx->turn == 0) {
    if (esmm_same_densities(seen, list->seen)) {
      list->stands--;
      run_alone(d, &list->all[list->chosen]);
      d->seconds = list->stood_seconds;
      d->predicted = list->stood_predicted;
      return;
    }
    if (list->lent)
      esmm_choose_return(&list->history, list->stands);
  }
  esmm_option all[MOST_CANDIDATES];
  esmm_clock clock;
  esmm_history asked = list->history; /* captured or explained calls change nothing */
  for (int i = 0; i < list->count; i++)
    all[i] = (esmm_option){.index = list->all[i].index,
                           .variant = list->all[i].variant,
                           .predicted = seconds_seen(&list->all[i], r),
                           .doubt = handicap(r->ctx, &list->all[i])};
  esmm_live_clock(r, kept, &clock);
  r->history = kept ? &list->history : &asked;
  esmm_choose_among(r->p, all, list->count, seen, &clock, r->history, &r->plan);
  int chosen = 0;
  while (list->all[chosen].index != r->plan.index)
    chosen++;
  run_alone(d, &list->all[chosen]);
  d->seconds = r->plan.seconds;
  d->predicted = r->plan.predicted;
  if (kept && r->ctx->learns && !r->timed) {
    list->chosen = chosen;
    list->seen = seen;
    list->stood_seconds = d->seconds;
    list->stood_predicted = d->predicted;
    list->lent = clock.off || clock.idle ? 0 : esmm_choose_stands(r->p, &r->plan, r->history);
    list->stands = clock.off || clock.idle ? clock.pause : list->lent;
  }
  r->history = kept ? r->history : NULL;
  d->next = r->plan.next < 0 ? NULL : esmm_registry_at(r->plan.next);
  d->next_seconds = r->plan.next_seconds;
}

static esmm_status choose(run *r, const char *force, bool counts)
{
  candidates own, *list;
  const esmm_status status = find_candidates(r->ctx, r->p, force, counts, &own, &list);
  if (status != ESMM_OK)
    return status;
  r->d = list->unseen;
  r->plan.timed = false;
  if (force)
    return ESMM_OK;
  esmm_run_recall(r, list, counts);
  if (r->d.memory == MEMORY_KNOWN)
    choose_seen(r, list, counts);
  if (counts)
    esmm_run_ask_for_report(r, list);
  return ESMM_OK;
}

/* Chooses a kernel that starts. One that cannot is not chosen again, so this ends. */
esmm_status esmm_run_choose(run *r, const char *force, bool counts)
{
  r->call = -1;
  const esmm_status status = choose(r, force, counts);
  if (status != ESMM_OK || r->d.run == DEVICE_CHOOSES)
    return status;
  const esmm_cuda_kernel *about = esmm_cuda_about(r->d.of[r->d.run].kernel);
  if (!about->start || about->start(r->ctx))
    return ESMM_OK;
  esmm_recall_clear_shapes(r->ctx);
  if (r->call >= 0)
    r->seen->calls--; /* it is the same call */
  return choose(r, force, counts);
}

/* Seconds of the decision. If the device chooses, and nothing is known of A, it may have no zeros. */
static double expected(const decision *d)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  if (d->memory == MEMORY_KNOWN)
    return d->predicted;
  return d->run == RUN_DENSE ? dense->base : d->run == RUN_SKIP ? most(skip) : fmin(dense->base, most(skip));
}

bool esmm_run_choose_whole(run *r, const run *gate, const esmm_gate *branch, const char *force)
{
  const double two = expected(&r->d) + expected(&gate->d);
  const esmm_kernel *before = r->d.of[r->d.run == RUN_SKIP ? RUN_SKIP : RUN_DENSE].kernel;
  esmm_problem whole = *r->p;
  candidate best = {0};
  double seconds = 0.0;
  whole.gate = *branch;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (kernel->backend != r->ctx->backend || !esmm_cuda_about(kernel)->gates || !may_run(&whole, kernel, force) ||
        !may_run(gate->p, kernel, force))
      continue;
    const candidate c = look_at(&whole, i);
    const double mine = r->d.memory == MEMORY_KNOWN ? seconds_seen(&c, r) : most(&c);
    if (!best.kernel || mine < seconds) {
      best = c;
      seconds = mine;
    }
  }
  if (!best.kernel || (!force && seconds >= two))
    return false;
  run_alone(&r->d, &best);
  r->d.whole = true;
  r->d.seconds = seconds;
  r->d.next = before;
  r->d.next_seconds = two;
  if (!esmm_cuda_about(best.kernel)->reports)
    esmm_run_let_sample(r);
  return true;
}

/* The device ignores the knee: it gets the line that holds above it. */
esmm_cuda_line esmm_run_line(const decision *d)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  const double past = skip->kernel ? esmm_cuda_past_knee(esmm_cuda_about(skip->kernel), 1.0) : 1.0;
  return (esmm_cuda_line){.dense = (float)dense->base,
                          .base = (float)(past * skip->base),
                          .per_strip = (float)(past * skip->per_strip),
                          .per_joint = (float)(past * skip->per_joint)};
}

static void remembered_reason(const decision *d, const esmm_seen *seen, char *text, size_t bytes)
{
  const int used = d->by_pattern ? snprintf(text, bytes, "by a_pattern; ")
                   : seen->reports > 0
                       ? snprintf(text, bytes, "remembered from %lld call%s: strips %.3g %%; ",
                                  (long long)seen->reports, seen->reports == 1 ? "" : "s", 100.0 * seen->strip)
                       : snprintf(text, bytes, "expected: strips %.3g %%; ", 100.0 * seen->strip);
  text += used;
  bytes -= (size_t)used;
  if (d->next && d->seconds <= d->next_seconds)
    (void)snprintf(text, bytes, "cheapest of %d: %.3g ms, then %s with %.3g ms", d->considered, 1e3 * d->seconds,
                   d->next->name, 1e3 * d->next_seconds);
  else if (d->next)
    (void)snprintf(text, bytes, "%.3g ms; %s is predicted at %.3g ms, a gain below the margin", 1e3 * d->seconds,
                   d->next->name, 1e3 * d->next_seconds);
  else
    (void)snprintf(text, bytes, "the only one that can run");
}

/* The start of the reason of a call without known densities. */
static const char *before_reason(memory what)
{
  switch (what) {
  case MEMORY_EMPTY:
    return "nothing remembered yet: ";
  case MEMORY_REFUSED:
    return "no pinned memory to remember: ";
  case MEMORY_SILENT:
    return "a report never came: ";
  case MEMORY_OFF:
  case MEMORY_KNOWN:
    break;
  }
  return "";
}

/* Notes that the kernel reads the dense copy of other weights; returns the bytes it took of text. */
static int say_copy(const esmm_weights *w, const esmm_kernel *kernel, char *text, size_t bytes)
{
  const bool copy = kernel->reads && !(kernel->reads & esmm_forms_of_format(w->format));
  return snprintf(text, bytes, "%s", copy ? "on the dense copy: " : "");
}

/* Why `chosen`, at the densities of choice. A dense kernel may have been chosen before A was seen. */
void esmm_run_reason(const run *r, const char *force, which chosen, const esmm_choice_device *choice, char *text,
                     size_t bytes)
{
  const esmm_ctx *ctx = r->ctx;
  const decision *d = &r->d;
  const esmm_seen *seen = r->seen;
  const candidate *mine = &d->of[chosen], *other = &d->of[!chosen];
  if (force) {
    esmm_plan_forced_text(ctx, force, text, bytes);
    return;
  }
  if (d->whole) {
    (void)snprintf(text, bytes, "both products in one launch: %.3g ms, then %s with %.3g ms for the two",
                   1e3 * d->seconds, d->next->name, 1e3 * d->next_seconds);
    return;
  }
  const int said = say_copy(r->p->w, mine->kernel, text, bytes);
  text += said;
  bytes -= (size_t)said;
  if (d->memory == MEMORY_KNOWN) {
    remembered_reason(d, seen, text, bytes);
    return;
  }
  const int used = snprintf(text, bytes, "%s", before_reason(d->memory));
  text += used;
  bytes -= (size_t)used;
  if (!other->kernel) {
    (void)snprintf(text, bytes, "%s", d->considered > 1 ? "the cheapest that can run" : "the only one that can run");
    return;
  }
  const double own = 1e3 * esmm_run_seconds_at(mine, choice->strip, choice->joint, -1.0);
  const double others = 1e3 * esmm_run_seconds_at(other, choice->strip, choice->joint, -1.0);
  if (d->run != DEVICE_CHOOSES && others < own)
    (void)snprintf(text, bytes,
                   "%.3g ms, chosen without looking at A: %s would take %.3g ms here, %.3g ms without zeros", own,
                   other->kernel->name, others, 1e3 * most(other));
  else
    (void)snprintf(text, bytes, "cheapest of %d: %.3g ms, then %s with %.3g ms", d->considered, own,
                   other->kernel->name, others);
}
