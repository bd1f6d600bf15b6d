/*
 * candidates.c: which kernels can do a product, and what they are predicted to cost. Each says whether it can run and
 * how many units of work it would do; the context's constants turn units into seconds. Dense kernels are on the list
 * like any other, so sparsity has to earn its place on every call.
 */
#include "backend.h"
#include "choose/choose.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool no(char *why, size_t why_bytes, const char *format, ...) __attribute__((format(printf, 3, 4)));

static bool no(char *why, size_t why_bytes, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  (void)vsnprintf(why, why_bytes, format, args);
  va_end(args);
  return false;
}

/* The first form of a mask, for texts. */
static const esmm_form *first_form(unsigned mask)
{
  return &esmm_form_table[__builtin_ctz(mask)];
}

static bool has_form(const esmm_weights *w, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  if (!kernel->reads || kernel->reads & (w->forms | w->makes))
    return true;
  if (!(kernel->reads & esmm_forms_of_format(w->format)))
    return no(why, why_bytes, "reads %s weights, and these are %s", esmm_format_str(first_form(kernel->reads)->format),
              esmm_format_str(w->format));
  const esmm_form *form = first_form(kernel->reads & esmm_forms_of_format(w->format));
  return no(why, why_bytes, "%s: they have no %s", form->absent, form->name);
}

static bool has_dtypes(const esmm_problem *p, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  const esmm_dtype a = p->a.dtype, b = p->w->dtype;
  if (!kernel->dtypes || (a == b && kernel->dtypes & ESMM_DTYPE_BIT(a)))
    return true;
  char names[64] = "";
  size_t used = 0;
  for (unsigned left = kernel->dtypes; left && used < sizeof names; left &= left - 1)
    used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? " or " : "",
                             esmm_dtype_str((esmm_dtype)__builtin_ctz(left)));
  return no(why, why_bytes, "a is %s and b %s, it takes %s only", esmm_dtype_str(a), esmm_dtype_str(b), names);
}

bool esmm_plan_can_run(const esmm_problem *p, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  /* Asking what is missing may open a library: only for products that could use it. */
  if (kernel->missing && kernel->backend == p->ctx->backend &&
      (!has_dtypes(p, kernel, why, why_bytes) || !has_form(p->w, kernel, why, why_bytes)))
    return false;
  if (!esmm_kernel_available(p->ctx, kernel, why, why_bytes) || !has_dtypes(p, kernel, why, why_bytes) ||
      !has_form(p->w, kernel, why, why_bytes))
    return false;
  if (p->strict && p->w->format != ESMM_FORMAT_DENSE)
    return no(why, why_bytes, "strict: %s weights dropped their zeros", esmm_format_str(p->w->format));
  if (p->strict && (kernel->flags & ESMM_KERNEL_SKIPS))
    return no(why, why_bytes, "strict: no skipping");
  return !kernel->can_run || kernel->can_run(kernel, p, why, why_bytes);
}

double esmm_plan_seconds(const esmm_problem *p, int index, double *units, int64_t *variant)
{
  const esmm_kernel *kernel = esmm_registry_at(index);
  double own[ESMM_COST_TERMS];
  double *count = units ? units : own, seconds = 0.0;
  const double *cost = p->ctx->cost[index];
  memset(count, 0, sizeof own);
  kernel->terms(kernel, p, cost, count, variant);
  for (int i = 0; i < ESMM_COST_TERMS; i++)
    seconds += count[i] * cost[i];
  return kernel->seconds_before ? seconds + kernel->seconds_before(kernel, p) : seconds;
}

static void estimate(const esmm_problem *p, const char *force, bool looked, esmm_choice *choice)
{
  double units[ESMM_COST_TERMS];
  const double *cost = p->ctx->cost[choice->index];
  choice->seconds = esmm_plan_seconds(p, choice->index, units, &choice->variant);
  int most = 0;
  for (int i = 0; i < ESMM_COST_TERMS; i++)
    if (units[i] * cost[i] > units[most] * cost[most])
      most = i;
  int length = snprintf(choice->text, sizeof choice->text, "mostly %s", choice->kernel->term_names[most]);
  if (choice->kernel->variant_strips && choice->variant > 1 && length > 0)
    length += snprintf(choice->text + length, sizeof choice->text - (size_t)length, ", strips of %d rows",
                       (int)choice->variant);
  const double ratio = force ? 1.0 : esmm_choose_ratio(p, looked, choice->index, &choice->times);
  if (choice->times > 0 && length > 0 && (size_t)length < sizeof choice->text)
    (void)snprintf(choice->text + length, sizeof choice->text - (size_t)length, ", measured %.2f x that", ratio);
  choice->seconds *= ratio;
}

/* Forced by its full name, or by its idea: of this backend, on a CPU with the widest instruction set. */
bool esmm_plan_may_choose(const esmm_ctx *ctx, const esmm_kernel *kernel, const char *force)
{
  if (!force)
    return esmm_kernel_competes(ctx, kernel);
  return strcmp(kernel->name, force) == 0 || (kernel->backend == ctx->backend && esmm_kernel_matches(kernel, force) &&
                                              !esmm_kernel_superseded(ctx, kernel));
}

/* Why a kernel that can run does not compete, or NULL. */
static const char *only_when_forced(const esmm_kernel *kernel)
{
  return kernel->flags & ESMM_KERNEL_REFERENCE ? "for checking" : NULL;
}

static bool from_env(const esmm_ctx *ctx, const char *force)
{
  return force == ctx->force && ctx->force_from_env;
}

void esmm_plan_forced_text(const esmm_ctx *ctx, const char *force, char *text, size_t bytes)
{
  (void)snprintf(text, bytes, from_env(ctx, force) ? "forced by ESMM_FORCE=%.40s" : "forced by '%.40s'", force);
}

/* Nothing can run: the best reason there is. */
static esmm_status say_why_not(esmm_ctx *ctx, const char *force, const esmm_choice *choices, int refused)
{
  for (int i = 0; refused < 0 && force && i < esmm_registry_count(); i++)
    if (esmm_kernel_matches(choices[i].kernel, force)) /* an idea of the other backend */
      return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%.60s %s", force, choices[i].text);
  if (refused < 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "no kernel is available for this product");
  const esmm_choice *best = &choices[refused];
  return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                   best->kernel->backend == ctx->backend ? "%s cannot run this product: %s" : "%s %s",
                   best->kernel->name, best->text);
}

/* A name from the environment is not in the caller's program: say where it is. */
static esmm_status refuse(esmm_ctx *ctx, const char *force, const esmm_choice *choices, int refused)
{
  const esmm_status status = say_why_not(ctx, force, choices, refused);
  const size_t used = strlen(ctx->error);
  if (force && from_env(ctx, force))
    (void)snprintf(ctx->error + used, sizeof ctx->error - used,
                   " (ESMM_FORCE=%s asks for it: unset that, or set it to one that `esmm list` says runs here)", force);
  return status;
}

/* Places in seconds[count] of the least, the first of equals, and of the next; -1: there is none. */
static void rank(const double *seconds, int count, int *best, int *next)
{
  *best = *next = -1;
  for (int i = 0; i < count; i++)
    if (*best < 0 || seconds[i] < seconds[*best]) {
      *next = *best;
      *best = i;
    } else if (*next < 0 || seconds[i] < seconds[*next]) {
      *next = i;
    }
}

static void list_kernel(esmm_shortlist *list, int index)
{
  list->index[list->count++] = (uint8_t)index;
  list->sees_a = list->sees_a || esmm_registry_at(index)->flags & ESMM_KERNEL_SKIPS;
}

void esmm_plan_shortlist(const esmm_problem *p, const char *force, esmm_shortlist *list)
{
  char why[160];
  list->count = 0;
  list->sees_a = false;
  for (int i = 0; i < esmm_registry_count(); i++)
    if (esmm_plan_may_choose(p->ctx, esmm_registry_at(i), force) &&
        esmm_plan_can_run(p, esmm_registry_at(i), why, sizeof why))
      list_kernel(list, i);
}

void esmm_sample_fill(esmm_sample *sample, double density)
{
  sample->element = sample->overflow = density;
  for (int i = 0; i < ESMM_SAMPLE_HEIGHTS; i++)
    sample->strip[i] = sample->joint[i] = density;
}

bool esmm_plan_outright(esmm_problem *p, const esmm_shortlist *list, double look_seconds)
{
  double least[ESMM_MAX_KERNELS], most[ESMM_MAX_KERNELS];
  int64_t variant;
  int best, next;
  esmm_sample_fill(&p->sample, 0.0);
  for (int i = 0; i < list->count; i++)
    least[i] = esmm_plan_seconds(p, list->index[i], NULL, &variant);
  esmm_sample_fill(&p->sample, 1.0);
  for (int i = 0; i < list->count; i++)
    most[i] = esmm_plan_seconds(p, list->index[i], NULL, &variant);
  rank(most, list->count, &best, &next);
  /* They assume all the context's threads; the look takes one. */
  const double slower = (double)p->ctx->threads / (double)p->threads;
  for (int i = 0; i < list->count; i++)
    if (i != best && slower * (most[best] - least[i]) > look_seconds)
      return false;
  return true;
}

/* The verdict on one kernel. */
static void judge(esmm_ctx *ctx, const esmm_problem *p, const char *force, bool looked, int index, esmm_choice *choice)
{
  memset(choice, 0, sizeof *choice);
  choice->kernel = esmm_registry_at(index);
  choice->index = index;
  choice->can_run = esmm_plan_can_run(p, choice->kernel, choice->text, sizeof choice->text);
  choice->competes = esmm_plan_may_choose(ctx, choice->kernel, force);
  if (!choice->can_run)
    return;
  const esmm_kernel *better = choice->competes ? NULL : esmm_kernel_superseded(ctx, choice->kernel);
  const char *kept = choice->competes ? NULL : only_when_forced(choice->kernel);
  if (better)
    (void)snprintf(choice->text, sizeof choice->text, "only when forced: %s does the same", better->name);
  else if (kept)
    (void)snprintf(choice->text, sizeof choice->text, "only when forced: %s", kept);
  else
    estimate(p, force, looked, choice);
}

/* How much a kernel's refusal says: most if it takes these dtypes and weights; then a dense one's that reads any form,
   as only the weights can rule it out. */
static int says(const esmm_problem *p, const esmm_kernel *kernel)
{
  char why[160];
  const bool meant = has_dtypes(p, kernel, why, sizeof why) && has_form(p->w, kernel, why, sizeof why);
  return (meant ? 3 : 0) + (kernel->flags & ESMM_KERNEL_SKIPS ? 0 : kernel->reads ? 1 : 2);
}

esmm_status esmm_plan_sampled(esmm_ctx *ctx, const esmm_problem *p, const char *force, bool looked,
                              esmm_choice *choices, int *chosen)
{
  esmm_shortlist list = {0};
  double seconds[ESMM_MAX_KERNELS];
  int refused = -1, best, next;
  for (int i = 0; i < esmm_registry_count(); i++) {
    judge(ctx, p, force, looked, i, &choices[i]);
    if (!choices[i].competes)
      continue;
    if (choices[i].can_run) {
      seconds[list.count] = choices[i].seconds;
      list_kernel(&list, i);
    } else if (refused < 0 ||
               (says(p, choices[i].kernel) > 0 && says(p, choices[i].kernel) >= says(p, choices[refused].kernel))) {
      refused = i;
    }
  }
  if (list.count == 0)
    return refuse(ctx, force, choices, refused);
  rank(seconds, list.count, &best, &next);
  *chosen = list.index[best];
  esmm_choice *choice = &choices[*chosen];
  if (force)
    esmm_plan_forced_text(ctx, force, choice->text, sizeof choice->text);
  else if (next >= 0)
    (void)snprintf(choice->text, sizeof choice->text, "cheapest of %d: %.3g ms%s, then %s with %.3g ms", list.count,
                   1e3 * seconds[best], choice->times > 0 ? " as measured" : "", choices[list.index[next]].kernel->name,
                   1e3 * seconds[next]);
  else
    (void)snprintf(choice->text, sizeof choice->text, "the only one that can run");
  return ESMM_OK;
}
