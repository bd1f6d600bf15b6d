/*
 * k_nm_generic.c: bf16 and fp16 with N:M weights of any kind, on any GPU. See k_nm_generic.cu.
 */
#include "cuda/ops/nm.h"

#include <stdio.h>

ESMM_FATBIN(k_nm_generic);
static const esmm_cuda_function bf16 = {&fatbin_k_nm_generic, "esmm_nm_generic_bf16", 0};
static const esmm_cuda_function f16 = {&fatbin_k_nm_generic, "esmm_nm_generic_f16", 0};

static int64_t count_blocks(const esmm_problem *p)
{
  return esmm_ceil_div(p->m, ESMM_NM_GENERIC_TILE) * esmm_ceil_div(p->n, ESMM_NM_GENERIC_TILE);
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m <= ESMM_NM16_MOST_SIDE && p->n <= ESMM_NM16_MOST_SIDE && p->k <= ESMM_NM16_MOST_SIDE &&
      count_blocks(p) <= INT32_MAX)
    return true;
  (void)snprintf(why, why_bytes, "a is %lld x %lld and b has %lld columns: too large for its counters", (long long)p->m,
                 (long long)p->k, (long long)p->n);
  return false;
}

/* Rounds of blocks, four on a multiprocessor, each of which goes through all k's. */
static void line(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
                 int64_t *variant)
{
  (void)self;
  (void)cost;
  const double rounds = (double)esmm_ceil_div(count_blocks(p), 4 * esmm_cuda_sms(p));
  units->base[0] = rounds * (double)esmm_ceil_div(p->k, ESMM_NM_GENERIC_K);
  units->base[1] = (double)esmm_dtype_size(p->c.dtype) * (double)p->m * (double)p->n;
  *variant = 0;
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)scratch;
  (void)stats;
  const esmm_cuda_slots s = esmm_cuda_slots_of(p->w);
  const esmm_nm_generic_params params = {.selector = esmm_cuda_call_of(p)->selector,
                                         .a = esmm_cuda_matrix(&p->a),
                                         .n = p->n,
                                         .values = s.values,
                                         .places = s.places,
                                         .ld = s.ld,
                                         .strips = s.strips,
                                         .group_cols = p->w->nm.group_cols,
                                         .keep = p->w->nm.keep,
                                         .group = p->w->nm.group,
                                         .epilogue = esmm_cuda_epilogue(p)};
  const esmm_launch launch = {.grid_x = (unsigned)count_blocks(p), .threads = ESMM_NM_GENERIC_THREADS};
  return esmm_cuda_launch(ctx, self->own, &launch, esmm_cuda_call_of(p)->stream, &params);
}

static const esmm_cuda_kernel about = {.sm = 80, .line = line, .stand_in = true};

#define DESCRIPTOR(id, dtype)                                                                                       \
  .name = "nm_generic_" #id,                                                                                        \
  .doc = #id ": N:M weights of any kind: reads what they kept, multiplies it as a dense tile (mma)",                \
  .backend = &esmm_cuda_backend, .flags = ESMM_KERNEL_DETERMINISTIC, .reads = ESMM_FORM(NM16) | ESMM_FORM(SLOTS16), \
  .dtypes = ESMM_DTYPE_BIT(dtype), .device = &about, .own = &id, .can_run = can_run, .terms = esmm_cuda_terms,      \
  .term_names = {"stages of 64 k's", "writing of c", [ESMM_COST_TERMS - 1] = "launches"},                           \
  .cost = {3e-6, 2.9e-13, [ESMM_COST_TERMS - 1] = 6e-6}, .run = run

ESMM_KERNEL(nm_generic_bf16) = {DESCRIPTOR(bf16, ESMM_BF16)};

ESMM_KERNEL(nm_generic_f16) = {DESCRIPTOR(f16, ESMM_F16)};
