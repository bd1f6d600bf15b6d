/* launch.c: a product's launches: the chosen kernel, both behind their selectors, or one that chooses itself. */
#include "cuda/product/product.h"

esmm_status esmm_run_sample(esmm_ctx *ctx, const esmm_problem *p, const decision *d, bool strip128, CUdeviceptr out,
                            CUstream stream)
{
  const esmm_cuda_line line = esmm_run_line(d);
  const esmm_sample_params params = {.a = esmm_cuda_matrix(&p->a),
                                     .alive = strip128 ? esmm_cuda_b(p)->tile_alive : esmm_cuda_b(p)->alive,
                                     .height = strip128 ? ESMM_TILE : ESMM_STRIP,
                                     .out = out,
                                     .dense = line.dense,
                                     .base = line.base,
                                     .per_strip = line.per_strip,
                                     .per_joint = line.per_joint};
  return esmm_cuda_sample(ctx, &params, stream);
}

esmm_status esmm_run_mark(const run *r, int which_mark)
{
  return r->timed ? esmm_cuda_event_record(r->ctx, r->mark[which_mark], r->stream) : ESMM_OK;
}

esmm_status esmm_cuda_mark_extracted(esmm_ctx *ctx, const esmm_problem *p)
{
  return esmm_cuda_call_of(p)->extracted
             ? esmm_cuda_event_record(ctx, esmm_cuda_call_of(p)->extracted, esmm_cuda_call_of(p)->stream)
             : ESMM_OK;
}

esmm_status esmm_run_make_marks(run *r)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; r->timed && status == ESMM_OK && i < MARKS; i++)
    status = esmm_cuda_event_create(r->ctx, &r->mark[i]);
  return status;
}

void esmm_run_free_marks(run *r)
{
  for (int i = 0; i < MARKS; i++)
    esmm_cuda_event_free(r->ctx, r->mark[i]);
}

/* B's strips for a kernel that reads them: the weights' own, or made from its rows. The bits are always the weights':
   strict ones have more of them than B's elements give. */
static esmm_status give_strips(run *r, const esmm_kernel *kernel, esmm_cuda_call *call)
{
  call->b = esmm_cuda_b(r->p)->strips;
  if (!wants_strips(r->p, kernel))
    return ESMM_OK;
  const esmm_matrix rows = esmm_cuda_weights_rows(r->p->w);
  esmm_matrix columns = rows; /* the same memory: B transposed */
  columns.rows = rows.cols;
  columns.cols = rows.rows;
  columns.order = ESMM_COL_MAJOR;
  const esmm_strips made = esmm_cuda_strips_at(r->scratch + r->st.b_at, r->p->n, r->p->k);
  call->b.data = made.data;
  return esmm_cuda_extract(r->ctx, &columns, &made, true, call->selector, r->stream);
}

/* Kernel `which` of the two; selectable: only if the device chose it; line: it may choose its partner instead. */
static esmm_status launch(run *r, which one, bool selectable, const esmm_cuda_line *line)
{
  const candidate *c = &r->d.of[one];
  const CUdeviceptr report = r->timed                         ? note_at(r, offsetof(notes, report))
                             : r->report && r->reports_itself ? r->report_at
                                                              : 0;
  esmm_cuda_call call = {.stream = r->stream,
                         .extracted = r->mark[EXTRACTED + (int)one],
                         .a_strips = &r->a_strips[one],
                         .all_of_b = &r->all_of_b[one],
                         .report = report ? report : r->gate_report_at,
                         .gate_report = report ? r->gate_report_at : 0,
                         .choose = line};
  if (selectable)
    call.selector = (esmm_selector){
        .address = note_at(r, offsetof(notes, choice) + offsetof(esmm_choice_device, chosen)), .value = (uint32_t)one};
  esmm_problem mine = *r->p;
  const esmm_cuda_kernel *about = esmm_cuda_about(c->kernel);
  const bool tallies = about->tallies && about->tallies(r->p);
  mine.variant = c->variant;
  mine.call = &call;
  if (!tallies) {
    mine.nonzeros = NULL;
    mine.bitmaps = NULL;
  }
  esmm_status status = c->kernel->reads & ESMM_FORM(STRIPS) ? give_strips(r, c->kernel, &call) : ESMM_OK;
  if (status == ESMM_OK)
    status = esmm_run_mark(r, EXTRACTED + (int)one); /* stays here where the kernel has no extraction of its own */
  if (status == ESMM_OK)
    status = c->kernel->run(c->kernel, r->ctx, &mine, esmm_cuda_pointer(r->scratch + r->st.work_at), &r->stats[one]);
  if (status == ESMM_OK && !tallies)
    status = esmm_cuda_tally(r->ctx, r->p, call.selector, r->stream);
  return status == ESMM_OK ? esmm_run_mark(r, DONE + (int)one) : status;
}

/* The skipping kernel, which chooses between itself and its partner. */
static esmm_status launch_pair(run *r)
{
  const esmm_cuda_line line = esmm_run_line(&r->d);
  const esmm_status status = esmm_run_mark(r, PLANNED);
  return status == ESMM_OK ? launch(r, RUN_SKIP, false, &line) : status;
}

/* The skipping kernel first: where it is chosen, nothing has to return before it. */
static esmm_status launch_both(run *r)
{
  const CUdeviceptr out = note_at(r, offsetof(notes, choice));
  esmm_status status = esmm_run_sample(r->ctx, r->p, &r->d, uses_strip128(r->d.of[RUN_SKIP].kernel), out, r->stream);
  if (status == ESMM_OK)
    status = esmm_run_mark(r, PLANNED);
  if (status == ESMM_OK)
    status = launch(r, RUN_SKIP, true, NULL);
  return status == ESMM_OK ? launch(r, RUN_DENSE, true, NULL) : status;
}

static esmm_status launch_alone(run *r)
{
  const esmm_status status = esmm_run_mark(r, PLANNED);
  return status == ESMM_OK ? launch(r, r->d.run, false, NULL) : status;
}

esmm_status esmm_run_report_ahead(run *r)
{
  if (!r->report || r->timed || r->reports_itself)
    return ESMM_OK;
  const esmm_status status = esmm_run_sample(r->ctx, r->p, &r->d, r->d.strip128, r->report_at, r->stream);
  if (status == ESMM_OK)
    esmm_run_expect_report(r); /* it comes, whatever becomes of the product */
  return status;
}

esmm_status esmm_run_launch(run *r)
{
  esmm_status status = esmm_run_mark(r, STAGED);
  if (status == ESMM_OK)
    status = esmm_run_report_ahead(r);
  if (status != ESMM_OK)
    return status;
  esmm_live_begin(r);
  status = r->d.run != DEVICE_CHOOSES ? launch_alone(r) : r->d.pair ? launch_pair(r) : launch_both(r);
  if (status == ESMM_OK)
    esmm_live_end(r);
  if (status == ESMM_OK && !r->timed && r->reports_itself) /* timed runs report with their statistics */
    esmm_run_expect_report(r);
  return status;
}

esmm_status esmm_run_look(run *r, CUdeviceptr out)
{
  const candidate *skip = &r->d.of[RUN_SKIP];
  if (!r->d.pair)
    return esmm_run_sample(r->ctx, r->p, &r->d, r->d.strip128, out, r->stream);
  const esmm_cuda_line line = esmm_run_line(&r->d);
  const esmm_cuda_call call = {.stream = r->stream, .report = out, .choose = &line};
  esmm_problem mine = *r->p;
  mine.variant = skip->variant;
  mine.call = &call;
  return esmm_cuda_about(skip->kernel)
      ->look(skip->kernel, r->ctx, &mine, esmm_cuda_pointer(r->scratch + r->st.work_at));
}
