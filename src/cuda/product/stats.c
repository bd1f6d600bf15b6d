/* stats.c: a call's statistics: times, densities, why its kernel was chosen. All of this waits for the GPU. */
#include "cuda/product/product.h"

#include <math.h>
#include <stdio.h>

esmm_status esmm_run_seconds_between(const run *r, int from, int to, double *seconds)
{
  return esmm_cuda_event_seconds(r->ctx, r->mark[from], r->mark[to], seconds);
}

/* launched: the launch that did the work. Only its report has an extraction within the launch. */
static esmm_status take_times(const run *r, which launched, const esmm_choice_device *report, esmm_stats *s)
{
  const bool both = r->d.run == DEVICE_CHOOSES && !r->d.pair;
  const int from = both && launched == RUN_DENSE ? DONE + RUN_SKIP : PLANNED;
  double other = 0.0;
  esmm_status status = esmm_run_seconds_between(r, START, END, &s->seconds_total);
  if (status == ESMM_OK)
    status = esmm_run_seconds_between(r, STAGED, PLANNED, &s->seconds_plan);
  if (status == ESMM_OK)
    status = esmm_run_seconds_between(r, from, EXTRACTED + (int)launched, &s->seconds_extract);
  if (status == ESMM_OK)
    status = esmm_run_seconds_between(r, EXTRACTED + (int)launched, DONE + (int)launched, &s->seconds_multiply);
  if (status == ESMM_OK && both) /* a launch that returned at once is a cost of choosing */
    status = launched == RUN_DENSE ? esmm_run_seconds_between(r, PLANNED, DONE + RUN_SKIP, &other)
                                   : esmm_run_seconds_between(r, DONE + RUN_SKIP, DONE + RUN_DENSE, &other);
  s->seconds_plan += other;
  const double inside = fmin(1e-9 * (double)report->extract_ns, s->seconds_multiply);
  s->seconds_extract += inside;
  s->seconds_multiply -= inside;
  return status;
}

/* The strip density of what the kernel extracted, exactly. */
static esmm_status read_strip_density(const run *r, const esmm_strips *strips, double *density)
{
  const size_t words = (size_t)strips->strips * (size_t)strips->k_padded / 32, bytes = words * sizeof(uint32_t);
  uint32_t *bits = esmm_mem_alloc(&r->ctx->allocator, bytes);
  if (!bits)
    return ESMM_OK; /* the sample's stays */
  const esmm_status status = esmm_cuda_to_host(r->ctx, bits, strips->bits, bytes, r->stream);
  int64_t set = 0;
  for (size_t i = 0; status == ESMM_OK && i < words; i++)
    set += __builtin_popcount(bits[i]);
  *density = (double)set / ((double)strips->strips * (double)r->p->k);
  esmm_mem_free(&r->ctx->allocator, bits, bytes);
  return status;
}

static esmm_status count_joint(const run *r, const esmm_strips *a, bool strip128, double *density)
{
  const esmm_cuda_weights *b = esmm_cuda_b(r->p);
  const int64_t b_strips = strip128 ? esmm_ceil_div(r->p->n, ESMM_TILE) : b->strips.strips;
  const CUdeviceptr out = note_at(r, offsetof(notes, joint));
  const esmm_count_params params = {.a_bits = a->bits,
                                    .b_bits = strip128 ? b->tiles : b->strips.bits,
                                    .a_strips = a->strips,
                                    .b_strips = b_strips,
                                    .words = a->k_padded / 32,
                                    .k = r->p->k,
                                    .out = out};
  uint64_t joint = 0;
  esmm_status status = esmm_cuda_count_joint(r->ctx, &params, r->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(r->ctx, &joint, out, sizeof joint, r->stream);
  *density = (double)joint / ((double)a->strips * (double)b_strips * (double)r->p->k);
  return status;
}

static esmm_status take_densities(const run *r, which chosen, const esmm_choice_device *choice, esmm_stats *s)
{
  const esmm_strips *a = &r->a_strips[chosen];
  const bool strip128 = uses_strip128(r->d.of[chosen].kernel);
  esmm_status status = ESMM_OK;
  if (strip128) {
    s->strip_cols = ESMM_TILE;
    s->strip_density_b = esmm_cuda_b(r->p)->tile_density;
  }
  s->density_a = (double)choice->element;
  s->strip_density_a = (double)choice->strip;
  if (chosen == RUN_DENSE) {
    s->joint_density = 1.0;
  } else if (a->strips > 0) {
    status = read_strip_density(r, a, &s->strip_density_a);
    if (status == ESMM_OK && r->all_of_b[chosen])
      s->joint_density = s->strip_density_a;
    else if (status == ESMM_OK)
      status = count_joint(r, a, strip128, &s->joint_density);
  } else if (s->joint_density == 0.0) { /* neither strips nor a report */
    s->joint_density = (double)choice->joint;
  }
  s->flop_useful = s->joint_density * s->flop_dense;
  return status;
}

/* What the device noted. The sample's densities, or, where the kernel has reported some, its own. */
static esmm_status read_notes(run *r, notes *seen)
{
  const bool sampled = r->d.run == DEVICE_CHOOSES && !r->d.pair;
  esmm_status status = ESMM_OK;
  if (!sampled) /* for the densities alone */
    status = esmm_run_sample(r->ctx, r->p, &r->d, r->d.strip128, note_at(r, offsetof(notes, choice)), r->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(r->ctx, seen, note_at(r, 0), offsetof(notes, joint), r->stream);
  if (status != ESMM_OK)
    return status;
  const esmm_choice_device sample = seen->choice;
  if (r->d.pair || seen->report.strip > 0.0f || seen->report.ready) {
    seen->choice.strip = seen->report.strip;
    seen->choice.joint = seen->report.joint;
  }
  /* What is remembered is what it would be without statistics. */
  esmm_run_report(r, r->reports_itself ? &seen->choice : &sample);
  return ESMM_OK;
}

esmm_status esmm_run_stats(run *r, const char *force, esmm_stats *s)
{
  notes seen = {0};
  esmm_status status = read_notes(r, &seen);
  if (status != ESMM_OK)
    return status;
  const uint32_t by_device = r->d.pair ? seen.report.chosen : seen.choice.chosen;
  const which chosen = r->d.run != DEVICE_CHOOSES ? r->d.run : by_device ? RUN_SKIP : RUN_DENSE;
  const size_t moved = s->staged_bytes;
  *s = r->stats[chosen];
  s->staged_bytes = moved;
  (void)snprintf(s->kernel, sizeof s->kernel, "%s", r->d.of[chosen].kernel->name);
  esmm_run_reason(r, force, chosen, &seen.choice, s->reason, sizeof s->reason);
  status = take_times(r, r->d.pair ? RUN_SKIP : chosen, &seen.report, s);
  return status == ESMM_OK ? take_densities(r, chosen, &seen.choice, s) : status;
}
