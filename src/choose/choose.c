/* choose.c: see choose.h. */
#include "choose/choose.h"

#include "backend.h"
#include "form.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
  TIMED_EVERY = 16,
  TRIES = 3,          /* in a round of trials */
  NEXT_ROUND = 64,    /* calls until the second, */
  TIMED_AT_LEAST = 4, /* calls for each timed one */
  CHECKED_EVERY = 8192,
  EXACT_ROWS = 16,
  NOT_LOOKED = 255,
  STRIP32 = 5
};

#define STEP 0.22314355131420976 /* log 1.25 */
#define LEAST_DENSITY 0.01
#define LEAST_SECONDS 1e-6 /* shorter calls are not timed: the clock takes part of them */
#define MAY_WIN 2.0        /* times the best: what is expected within that is tried once, */
#define LIBRARY 4.0        /* a library within that: it must not be the faster one; */
#define AGAIN 1.4          /* a second time if it took less than that, */
#define LAST_AGAIN 1.2     /* and a third time */
#define TURN_WITHIN 3.0    /* esmm_tune_weights tries all within that */
#define CHECKED 1.2        /* the next best within that is timed now and then */
#define BUDGET_CALLS 3.0   /* calls of the best that all trials may lose, */
#define BUDGET_SHARE 0.03  /* and a share of each call; */
#define LATER_SECONDS 2e-4 /* more for later rounds: only short calls notice */
#define COLD_SECONDS 1e-4  /* what cold caches and sleeping threads add */
#define DISTURBED 3.0      /* times what was expected */
#define BETTER 0.97        /* times the last best: another has to beat this */

/* ---- classes ---- */

static uint64_t mix(uint64_t hash, uint64_t word)
{
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

int esmm_density_step(double density)
{
  return -(int)lround(log(fmax(density, LEAST_DENSITY)) / STEP);
}

static uint64_t rows_class(int64_t m)
{
  return m <= EXACT_ROWS ? (uint64_t)m : EXACT_ROWS + (uint64_t)lround(log((double)m / EXACT_ROWS) / STEP);
}

static uint64_t layout_of(const esmm_matrix *x)
{
  const bool lines = (uintptr_t)x->data % 16 == 0 && (uint64_t)x->ld * esmm_dtype_size(x->dtype) % 16 == 0;
  return x->data ? 1 + (uint64_t)x->dtype + 4 * (uint64_t)x->order + 8 * (uint64_t)x->place + 16 * (uint64_t)lines : 0;
}

static uint64_t hash_text(uint64_t hash, const char *text)
{
  for (; *text; text++)
    hash = mix(hash, (uint64_t)*text);
  return hash;
}

/* All but A's densities and the weights themselves. */
static esmm_class shape_class(const esmm_problem *p)
{
  const esmm_weights *w = p->w;
  const uint64_t words[] = {
      p->ctx->cost_id,
      p->ctx->backend->versions(w),
      (uint64_t)p->threads,
      (uint64_t)p->n,
      (uint64_t)p->k,
      rows_class(p->m),
      layout_of(&p->a),
      layout_of(&p->c),
      layout_of(&p->residual),
      (uint64_t)(p->bias != NULL) + 2 * (uint64_t)p->gated + 4 * (uint64_t)(p->nonzeros != NULL) +
          8 * (uint64_t)(p->bitmaps != NULL) + 16 * (uint64_t)p->strict + 32 * (uint64_t)(p->pattern != NULL) +
          64 * (uint64_t)(p->beta != 0.0f) + 128 * (uint64_t)(p->alpha != 1.0f),
      (uint64_t)p->activation,
      (uint64_t)w->dtype + 16 * (uint64_t)w->format,
      w->forms,
      (uint64_t)(w->bsr.block_rows * 1024 + w->bsr.block_cols),
      (uint64_t)(w->nm.keep * 65536 + w->nm.group * 1024 + w->nm.group_cols),
      (uint64_t)esmm_density_step(w->strip_density),
      (uint64_t)esmm_density_step(w->element_density),
  };
  uint64_t hash = hash_text(hash_text(0, p->ctx->device_name), p->ctx->features);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    hash = mix(hash, words[i]);
  return hash ? hash : 1;
}

esmm_density_class esmm_choose_class(const esmm_problem *p, bool looked)
{
  if (!looked)
    return (esmm_density_class){NOT_LOOKED, NOT_LOOKED};
  if (p->seen_rows > 0)
    return (esmm_density_class){(int)p->seen_rows, esmm_density_step(p->seen_strip)};
  return (esmm_density_class){esmm_density_step(p->sample.element), esmm_density_step(p->sample.strip[STRIP32])};
}

static esmm_class at(esmm_class of, esmm_density_class d)
{
  const uint64_t hash = mix(of, (uint64_t)(d.element + 1) << 32 | (uint64_t)(d.strip + 1));
  return hash ? hash : 1;
}

/* ---- what was measured ---- */

/* The geometric mean over classes one density step away. */
static double beside(esmm_class shared, esmm_density_class d, int index, esmm_evidence *seen)
{
  const esmm_density_class all[] = {{d.element - 1, d.strip},     {d.element + 1, d.strip},
                                    {d.element, d.strip - 1},     {d.element, d.strip + 1},
                                    {d.element - 1, d.strip - 1}, {d.element + 1, d.strip + 1}};
  double sum = 0.0;
  int found = 0;
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    esmm_evidence there;
    const double ratio = esmm_measured(at(shared, all[i]), index, &there);
    if (there.times == 0)
      continue;
    sum += log(ratio);
    found++;
    esmm_evidence_more(seen, there);
  }
  return found ? exp(sum / found) : 0.0;
}

static double ratio_of(esmm_class own, esmm_class shared, esmm_density_class d, int index, esmm_evidence *seen)
{
  esmm_evidence of_mine = {0};
  const double here = esmm_measured(at(shared, d), index, seen);
  const double mine = own ? esmm_measured(at(own, d), index, &of_mine) : 0.0;
  if (mine > 0.0 && of_mine.warm >= seen->warm) {
    esmm_evidence_more(seen, of_mine);
    return mine;
  }
  if (here > 0.0)
    return here;
  const double near = d.element == NOT_LOOKED ? 0.0 : beside(shared, d, index, seen);
  return near > 0.0 ? near : esmm_measured_anywhere(index);
}

double esmm_choose_ratio(const esmm_problem *p, bool looked, int index, int *times)
{
  esmm_evidence seen = {0};
  *times = 0;
  if (!p->ctx->learns)
    return 1.0;
  const esmm_class shared = shape_class(p);
  const double ratio = ratio_of(mix(shared, p->w->serial), shared, esmm_choose_class(p, looked), index, &seen);
  *times = seen.times;
  return ratio;
}

/* ---- the choice ---- */

/* Its seconds, or more if never measured. */
static double doubted(const esmm_option *x)
{
  return x->times > 0 ? x->seconds : x->seconds * x->doubt;
}

/* Places of the best and the next, the first of equals. */
static void rank(const esmm_option *all, int count, int *best, int *next)
{
  *best = 0;
  *next = -1;
  for (int i = 1; i < count; i++)
    if (doubted(&all[i]) < doubted(&all[*best])) {
      *next = *best;
      *best = i;
    } else if (*next < 0 || doubted(&all[i]) < doubted(&all[*next])) {
      *next = i;
    }
}

/* What a trial may lose: twice the expectation if never measured. */
static double loss_of(const esmm_option *x, double best)
{
  return fmax(0.0, x->hoped - best) * (x->times == 0 || x->hoped < x->seconds ? 2.0 : 1.0);
}

/* May it win? before: times of earlier rounds; begun: the call before was its trial. */
static bool may_win(const esmm_option *x, double best, const esmm_clock *clock, int before, bool begun)
{
  const bool again = clock->warms && before > 0;
  if (x->flying > 0 || x->predicted < LEAST_SECONDS)
    return false;
  if (x->times == 0 || (again && !x->warm))
    return x->hoped < (esmm_registry_at(x->index)->missing ? LIBRARY : MAY_WIN) * best + clock->slack;
  if (x->times - (again ? 0 : before) >= (again ? before : TRIES))
    return false;
  if (before > 0)
    return x->seconds < (begun ? AGAIN : MAY_WIN) * best;
  return x->seconds < (x->times == 1 ? AGAIN : LAST_AGAIN) * best;
}

/* How often earlier rounds of trials timed a kernel. The first calls find cold caches and sleeping threads, and may
   take ten times as long: hence further rounds, three in all, each after four times as many calls. */
static int tried_before(const esmm_history *h, esmm_density_class d, const esmm_option *best)
{
  /* Many weights of a shape have few calls each, but all times count. */
  const uint32_t timed = esmm_measured_count(at(h->shared, d), best->index);
  const uint32_t calls = h->calls > TIMED_AT_LEAST * timed ? h->calls : TIMED_AT_LEAST * timed;
  int times = 0;
  for (uint32_t at = NEXT_ROUND; calls >= at && times + 2 * TRIES <= ESMM_MEASURED_TIMES; at *= 4)
    times += TRIES;
  return times;
}

/* Times of the first calls alone are upper bounds. The hope is the prediction, scaled by the best kernel's ratio. */
static void hope(esmm_option *all, int count, int best, bool again)
{
  const double ratio = all[best].seconds / all[best].predicted;
  for (int i = 0; i < count; i++)
    all[i].hoped = again && !all[i].warm
                       ? fmin(all[i].seconds, fmax(ratio * all[i].predicted, all[i].seconds - COLD_SECONDS))
                       : all[i].seconds;
}

/* Seconds of the best measured option; infinite if there is none. */
static double least_measured(const esmm_option *all, int count)
{
  double least = INFINITY;
  for (int i = 0; i < count; i++)
    if (all[i].times > 0)
      least = fmin(least, all[i].seconds);
  return least;
}

/* The option to try, or -1. A trial already begun comes first: its data lie in the caches. */
static int to_try(const esmm_option *all, int count, int best, const esmm_history *h, const esmm_clock *clock,
                  int before)
{
  const bool again = clock->warms && before > 0;
  const double budget = all[best].seconds * (clock->budget + clock->share * (double)h->calls) +
                        (again ? LATER_SECONDS : 0.0) - (double)h->spent;
  int found = -1;
  for (int i = 0; i < count; i++) {
    const bool begun = all[i].index + 1 == h->trying;
    if (begun && h->warmed && i != best && all[i].hoped < LIBRARY * all[best].seconds)
      return i; /* a warmed kernel is timed, too, unless A has changed meanwhile */
    if (i == best || !may_win(&all[i], all[best].seconds, clock, before, begun) || (begun && h->in_row > TRIES) ||
        loss_of(&all[i], all[best].seconds) > budget)
      continue;
    if (begun)
      return i;
    if (found < 0 || all[i].hoped < all[found].hoped)
      found = i;
  }
  return found;
}

/* Takes turns among those that may be the fastest, as many as a class has room for. */
static int by_turn(const esmm_option *all, int count, int best, int turn)
{
  int places[ESMM_MAX_KERNELS] = {best}, found = 0;
  for (int i = 0; i < count; i++) {
    int cheaper = 0;
    for (int j = 0; j < count; j++)
      cheaper += all[j].seconds < all[i].seconds;
    if (i == best || (cheaper < ESMM_MEASURED_KERNELS && all[i].seconds < TURN_WITHIN * all[best].seconds))
      places[found++] = i;
  }
  return places[(turn - 1) % found];
}

static void fill_plan(const esmm_option *all, int count, int chosen, int next, esmm_plan *plan)
{
  plan->index = all[chosen].index;
  plan->kernel = esmm_registry_at(plan->index);
  plan->variant = all[chosen].variant;
  plan->predicted = all[chosen].predicted;
  plan->seconds = all[chosen].seconds;
  plan->count = count;
  plan->next = next < 0 ? -1 : all[next].index;
  plan->next_seconds = next < 0 ? 0.0 : all[next].seconds;
}

static int place_of(const esmm_option *all, int count, int index)
{
  for (int i = 0; i < count; i++)
    if (all[i].index == index)
      return i;
  return -1;
}

/* The best, and the next; the last best stays unless another is surely better. */
static void rank_after(const esmm_option *all, int count, const esmm_history *h, int *best, int *next)
{
  rank(all, count, best, next);
  const int last = h->last ? place_of(all, count, h->last - 1) : -1;
  if (last < 0 || last == *best || doubted(&all[*best]) <= BETTER * doubted(&all[last]))
    return;
  *next = *best;
  *best = last;
}

/* What was measured, of all options. True: some are being measured. */
static bool recall_ratios(const esmm_problem *p, esmm_option *all, int count, esmm_density_class d,
                          const esmm_clock *clock, esmm_history *h)
{
  if (h->shared == 0) {
    h->shared = shape_class(p);
    h->own = mix(h->shared, p->w->serial);
  }
  bool flying = false;
  for (int i = 0; i < count; i++) {
    esmm_evidence seen = {0};
    all[i].seconds *= ratio_of(h->own, h->shared, d, all[i].index, &seen);
    all[i].times = seen.times;
    all[i].warm = seen.warm;
    all[i].flying = clock->flying ? clock->flying(clock->self, at(h->own, d), all[i].index) : 0;
    flying = flying || all[i].flying > 0;
  }
  return flying;
}

/* Whether the call is timed, and its notes. */
static void set_clock(const esmm_ctx *ctx, const esmm_option *x, esmm_density_class d, const esmm_clock *clock,
                      esmm_history *h, esmm_plan *plan)
{
  plan->own = at(h->own, d);
  plan->shared = at(h->shared, d);
  const bool measurable = !clock->off && x->predicted >= LEAST_SECONDS;
  plan->open = ctx->turn == 0 && (plan->open || x->times + x->flying < TRIES) && x->predicted >= LEAST_SECONDS;
  plan->timed = measurable && !plan->warming &&
                (plan->open || plan->tried || clock->idle || ctx->turn > 0 || h->until_timed == 0);
  h->until_timed = plan->timed ? (uint32_t)clock->every - 1 : h->until_timed - (h->until_timed > 0);
  h->calls++;
  h->spent += (float)plan->reserve;
  h->in_row = plan->tried && h->trying == plan->index + 1 ? h->in_row + 1 : 0;
  h->trying = plan->tried ? plan->index + 1 : 0;
  h->warmed = plan->warming;
  if (!plan->tried)
    h->last = plan->index + 1;
}

void esmm_choose_among(const esmm_problem *p, esmm_option *all, int count, esmm_density_class d,
                       const esmm_clock *clock, esmm_history *h, esmm_plan *plan)
{
  esmm_history none = {0};
  int best, next;
  memset(plan, 0, sizeof *plan);
  for (int i = 0; i < count; i++) {
    all[i].seconds = all[i].predicted;
    all[i].times = all[i].flying = 0;
    all[i].warm = false;
  }
  esmm_history *const noted = h ? h : &none;
  if (p->ctx->learns)
    plan->flying = recall_ratios(p, all, count, d, clock, noted);
  rank_after(all, count, noted, &best, &next);
  int chosen = best;
  if (p->ctx->turn > 0 && h && !clock->off) {
    chosen = by_turn(all, count, best, p->ctx->turn);
  } else if (p->ctx->learns && h && !clock->off && !clock->idle && h->calls > 0 &&
             all[best].times + all[best].flying > 0 && all[best].predicted >= LEAST_SECONDS) {
    const int before = tried_before(h, d, &all[best]);
    plan->warm = clock->warms && before > 0;
    hope(all, count, best, plan->warm);
    const int other = to_try(all, count, best, h, clock, before);
    const bool check =
        h->calls / CHECKED_EVERY != h->checked && next >= 0 && all[next].seconds < CHECKED * all[best].seconds;
    h->checked = h->calls / CHECKED_EVERY;
    chosen = other >= 0 ? other : check ? next : best;
    plan->open = other >= 0;
    plan->reserve = other >= 0 ? loss_of(&all[other], all[best].seconds) : 0.0;
    plan->warming = other >= 0 && plan->warm && h->trying != all[other].index + 1;
    plan->warm = plan->warm && (other >= 0 || !check); /* a check finds cold caches */
  }
  plan->warm = plan->warm || !clock->warms || p->ctx->turn > 0;
  fill_plan(all, count, chosen, chosen == best ? next : best, plan);
  plan->tried = chosen != best;
  plan->known = fmin(least_measured(all, count), all[best].seconds);
  if (p->ctx->learns)
    set_clock(p->ctx, &all[chosen], d, clock, noted, plan);
  else if (h)
    h->last = plan->index + 1;
}

void esmm_choose(const esmm_problem *p, const esmm_shortlist *list, bool looked, esmm_history *h, esmm_plan *plan)
{
  static const esmm_clock clock = {.every = TIMED_EVERY, .budget = BUDGET_CALLS, .share = BUDGET_SHARE, .warms = true};
  esmm_option all[ESMM_MAX_KERNELS];
  for (int i = 0; i < list->count; i++) {
    all[i].index = list->index[i];
    all[i].doubt = 1.0;
    all[i].predicted = esmm_plan_seconds(p, list->index[i], NULL, &all[i].variant);
  }
  esmm_choose_among(p, all, list->count, esmm_choose_class(p, looked), &clock, p->ctx->learns ? h : NULL, plan);
}

void esmm_choose_learn(esmm_ctx *ctx, const esmm_plan *plan, esmm_history *h, double seconds)
{
  ctx->learnt++;
  const double ratio = seconds / plan->predicted;
  esmm_measured_add(plan->own, 0, plan->index, plan->warm, ratio);
  esmm_measured_add(plan->shared, ctx->home, plan->index, plan->warm, ratio);
  if (!plan->open || !h)
    return;
  /* A call much longer than expected was disturbed: that is not the trial's loss. */
  const double took = seconds < DISTURBED * plan->seconds ? seconds : plan->seconds;
  h->spent += (float)(fmax(0.0, took - plan->known) - plan->reserve);
}

int esmm_choose_stands(const esmm_problem *p, const esmm_plan *plan, esmm_history *h)
{
  if (!p->ctx->learns || plan->predicted < LEAST_SECONDS)
    return INT_MAX;
  if (!h || plan->open || plan->tried || plan->flying || p->ctx->turn > 0)
    return 0;
  h->calls += h->until_timed;
  const int more = (int)h->until_timed;
  h->until_timed = 0;
  return more;
}

void esmm_choose_return(esmm_history *h, int calls)
{
  h->calls -= (uint32_t)calls;
  h->until_timed = (uint32_t)calls;
}

void esmm_choose_text(const esmm_plan *plan, char *text, size_t bytes)
{
  if (plan->next < 0)
    (void)snprintf(text, bytes, "the only one that can run");
  else if (plan->tried)
    (void)snprintf(text, bytes, "tried: %.3g ms expected, %s takes %.3g ms", 1e3 * plan->seconds,
                   esmm_registry_at(plan->next)->name, 1e3 * plan->next_seconds);
  else
    (void)snprintf(text, bytes, "cheapest of %d: %.3g ms, then %s with %.3g ms", plan->count, 1e3 * plan->seconds,
                   esmm_registry_at(plan->next)->name, 1e3 * plan->next_seconds);
}
