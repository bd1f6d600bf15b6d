/*
 * plan.c: which kernel. Each says whether it can run and how many units of work it would do; the context's constants
 * turn units into seconds; the cheapest wins. Dense kernels are on the list like any other, so sparsity has to earn
 * its place on every call.
 */
#include "kernel.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool can_run(const esmm_ctx *ctx, const esmm_problem *p, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  if ((kernel->cpu & ctx->cpu) != kernel->cpu) {
    (void)snprintf(why, why_bytes, "this CPU has no %s", kernel->cpu & ESMM_CPU_AVX512 ? "AVX-512" : "AVX2");
    return false;
  }
  if (p->strict && (kernel->flags & ESMM_KERNEL_SKIPS)) {
    (void)snprintf(why, why_bytes, "strict: no skipping");
    return false;
  }
  return kernel->can_run(ctx, p, why, why_bytes);
}

static void estimate(const esmm_ctx *ctx, const esmm_problem *p, esmm_choice *choice)
{
  double units[ESMM_COST_TERMS] = {0};
  const double *cost = ctx->cost[choice->index];
  choice->kernel->terms(p, cost, units, &choice->strip_rows);
  choice->seconds = 0.0;
  int most = 0;
  for (int i = 0; i < ESMM_COST_TERMS; i++) {
    choice->seconds += units[i] * cost[i];
    if (units[i] * cost[i] > units[most] * cost[most])
      most = i;
  }
  int length = snprintf(choice->text, sizeof choice->text, "mostly %s", choice->kernel->term_names[most]);
  if (choice->strip_rows > 1 && length > 0)
    (void)snprintf(choice->text + length, sizeof choice->text - (size_t)length, ", strips of %d rows",
                   (int)choice->strip_rows);
}

/* By its full name, or by its idea, which means the widest instruction set that is there. */
static bool is_forced(const esmm_ctx *ctx, const esmm_kernel *kernel, const char *force)
{
  return strcmp(kernel->name, force) == 0 ||
         (esmm_kernel_matches(kernel, force) && !esmm_kernel_superseded(kernel, ctx->cpu));
}

esmm_status esmm_plan(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen)
{
  esmm_sample_a(&p->a, p->w, &p->sample);
  int best = -1, next = -1, runnable = 0, refused = -1;
  for (int i = 0; i < esmm_registry_count(); i++) {
    esmm_choice *choice = &choices[i];
    memset(choice, 0, sizeof *choice);
    choice->kernel = esmm_registry_at(i);
    choice->index = i;
    choice->can_run = can_run(ctx, p, choice->kernel, choice->text, sizeof choice->text);
    choice->competes = force ? is_forced(ctx, choice->kernel, force) : esmm_kernel_competes(choice->kernel, ctx->cpu);
    if (!choice->can_run) {
      /* Of several reasons, a dense kernel's says most: it refuses only what the weights do not allow. */
      if (choice->competes && (refused < 0 || !(choice->kernel->flags & ESMM_KERNEL_SKIPS)))
        refused = i;
      continue;
    }
    const esmm_kernel *better = esmm_kernel_superseded(choice->kernel, ctx->cpu);
    if (!choice->competes && better) {
      (void)snprintf(choice->text, sizeof choice->text, "only when forced: %s does the same", better->name);
      continue;
    }
    if (!choice->competes && (choice->kernel->flags & ESMM_KERNEL_REFERENCE)) {
      (void)snprintf(choice->text, sizeof choice->text, "only when forced: for checking");
      continue;
    }
    estimate(ctx, p, choice);
    if (!choice->competes)
      continue;
    runnable++;
    if (best < 0 || choice->seconds < choices[best].seconds) {
      next = best;
      best = i;
    } else if (next < 0 || choice->seconds < choices[next].seconds) {
      next = i;
    }
  }
  if (best < 0)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "%s cannot run this product: %s",
                     refused >= 0 ? choices[refused].kernel->name : "no kernel",
                     refused >= 0 ? choices[refused].text : "none is available");
  char text[sizeof choices[best].text];
  if (force)
    (void)snprintf(text, sizeof text, "forced by '%.40s'", force);
  else if (next >= 0)
    (void)snprintf(text, sizeof text, "cheapest of %d: %.3g ms, then %s with %.3g ms", runnable,
                   1e3 * choices[best].seconds, choices[next].kernel->name, 1e3 * choices[next].seconds);
  else
    (void)snprintf(text, sizeof text, "the only one that can run");
  memcpy(choices[best].text, text, sizeof text);
  *chosen = best;
  return ESMM_OK;
}
