/*
 * matmul.c: one product on a GPU: operands in host memory are copied there, a kernel is chosen, statistics are taken.
 *
 * The rule of the plan here: the host never waits for the GPU in order to choose. What a dense kernel costs does not
 * depend on the data; what a skipping kernel costs is a line in two densities of A, those of its strips and of their
 * joint with B:
 *
 *     seconds = base + per_strip * strip + per_joint * joint
 *
 * So the host finds the best dense kernel and the best skipping one, and often that is enough: the one is cheaper even
 * if A has no zeros, or the other even if A has nothing else. Where A decides, a small kernel samples A, puts
 * the numbers into that line and writes the outcome to device memory; then both kernels are launched, each with a
 * selector that it looks at first, and the one that was not chosen returns at once. The choice depends on A's values
 * alone: the same call gives the same bits. Both share their scratch, as only one of them touches it.
 *
 * A skipping kernel that has a partner needs none of that: it is given the line, samples A by itself, and does the
 * partner's work inside its own launch where that is the cheaper one.
 *
 * Kernels that read B as fp32 strips get them made for the call where B is of 16 bits; the plan counts that.
 *
 * Scratch holds, in this order: staged A, C and bias, the notes, B's strips, the kernels' workspace.
 */
#include "cuda/cuda.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define ALIGN 256
#define SELECT_SECONDS 5e-6 /* sampling, and a launch that returns at once */
#define PAIR_SECONDS 5e-7   /* what choosing costs a kernel that does it in its own launch, where A has no zeros */
#define STRIPS_SECONDS 5e-6 /* a launch that makes B's strips, */
#define STRIPS_RATE 2.5e12  /* and its bytes a second, read and written */
#define MIDDLE_STRIP .5     /* A's density at which skipping kernels are compared with each other */

/* ---- operands on the device ---- */

/* What of a call lies in host memory, and where in scratch it is staged. */
typedef struct staging {
  bool a_staged, c_staged, bias_staged;
  esmm_matrix a, c; /* the caller's */
  const float *bias;
  size_t a_at, c_at, bias_at, notes_at, b_at, work_at;
  size_t bytes; /* of all scratch up to the notes */
} staging;

/* What the device tells the host, when statistics are wanted or a choice is explained. */
typedef struct notes {
  esmm_choice_device choice; /* of the sample: selectors look at it */
  esmm_choice_device report; /* of the kernel that ran, where it has something to say */
  uint64_t joint;
} notes;

/*
 * Gives p operands of the device. Their addresses are not known yet, but their alignment is: kernels may look at it
 * when they say how much workspace they need.
 */
static esmm_status stage(esmm_ctx *ctx, esmm_problem *p, bool with_a, staging *st)
{
  void *const anywhere = esmm_cuda_pointer(ALIGN);
  *st = (staging){.a = p->a, .c = p->c, .bias = p->bias};
  st->a_staged = with_a && p->a.place == ESMM_HOST;
  st->c_staged = p->c.place == ESMM_HOST;
  st->bias_staged = p->bias && st->c_staged;
  size_t total = 0;
  if (!esmm_cuda_reserve(&total, st->a_staged ? esmm_cuda_tight_bytes(&p->a) : 0, ALIGN, &st->a_at) ||
      !esmm_cuda_reserve(&total, st->c_staged ? esmm_cuda_tight_bytes(&p->c) : 0, ALIGN, &st->c_at) ||
      !esmm_cuda_reserve(&total, st->bias_staged ? (size_t)p->n * sizeof(float) : 0, ALIGN, &st->bias_at) ||
      !esmm_cuda_reserve(&total, sizeof(notes), ALIGN, &st->notes_at))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "a is %lld x %lld, c is %lld x %lld: too large to be copied to the GPU",
                     (long long)p->m, (long long)p->k, (long long)p->m, (long long)p->n);
  st->bytes = total;
  if (st->a_staged)
    p->a = esmm_cuda_tight(&p->a, ESMM_DEVICE, anywhere);
  if (st->c_staged)
    p->c = esmm_cuda_tight(&p->c, ESMM_DEVICE, anywhere);
  if (st->bias_staged)
    p->bias = anywhere;
  return ESMM_OK;
}

/* Copies what has to be there before the product; with_c where C is read. */
static esmm_status upload(esmm_ctx *ctx, const staging *st, bool with_c, CUdeviceptr scratch, esmm_problem *p,
                          CUstream stream, size_t *moved)
{
  esmm_status status = ESMM_OK;
  if (st->a_staged) {
    p->a.data = esmm_cuda_pointer(scratch + st->a_at);
    status = esmm_cuda_upload(ctx, &st->a, &p->a, stream);
    *moved += esmm_cuda_tight_bytes(&st->a);
  }
  if (st->c_staged) {
    p->c.data = esmm_cuda_pointer(scratch + st->c_at);
    if (status == ESMM_OK && with_c) {
      status = esmm_cuda_upload(ctx, &st->c, &p->c, stream);
      *moved += esmm_cuda_tight_bytes(&st->c);
    }
  }
  if (st->bias_staged) {
    const size_t bytes = (size_t)p->n * sizeof(float);
    p->bias = esmm_cuda_pointer(scratch + st->bias_at);
    if (status == ESMM_OK)
      status = esmm_cuda_to_device(ctx, scratch + st->bias_at, st->bias, bytes, stream);
    *moved += bytes;
  }
  return status;
}

/* ---- the plan ---- */

typedef struct candidate {
  const esmm_kernel *kernel; /* NULL: there is none */
  int index;
  int64_t strip_rows;
  double base, per_strip, per_joint;
  double b; /* B's density at its strips: no A has more of it as its joint */
} candidate;

typedef enum which { RUN_DENSE = 0, RUN_SKIP = 1, DEVICE_CHOOSES } which;

typedef struct decision {
  candidate of[2]; /* RUN_DENSE, RUN_SKIP */
  which run;
  bool pair; /* DEVICE_CHOOSES inside the skipping kernel: the dense one is its partner */
  int considered;
} decision;

static void set_sample(esmm_problem *p, double element, double strip, double joint)
{
  p->sample.element = element;
  for (int i = 0; i < ESMM_SAMPLE_HEIGHTS; i++) {
    p->sample.strip[i] = strip;
    p->sample.joint[i] = joint;
  }
}

/* Its strips are of 128 rows and columns: the kernel reads a B of 16 bits as it is. */
static bool is_tall(const esmm_problem *p, const esmm_kernel *kernel)
{
  return p->w->cuda->tiles && !kernel->reads_strips;
}

/* B's strips are to be made for the call. */
static bool wants_strips(const esmm_problem *p, const esmm_kernel *kernel)
{
  return kernel && kernel->reads_strips && !p->w->cuda->strips.data;
}

double esmm_cuda_b_strips_seconds(const esmm_problem *p)
{
  const struct esmm_cuda_weights *device = p->w->cuda;
  if (device->strips.data)
    return 0.0;
  const double read = (double)device->rows_ld * (double)p->k * (double)esmm_dtype_size(p->w->dtype);
  const double written = (double)(device->strips.strips * ESMM_STRIP) * (double)device->strips.k_padded * sizeof(float);
  return STRIPS_SECONDS + (read + written) / STRIPS_RATE;
}

static double density_of_b(const esmm_problem *p, const esmm_kernel *kernel)
{
  return p->w->full ? 1.0 : is_tall(p, kernel) ? p->w->cuda->tile_density : p->w->strip_density;
}

static candidate look_at(const esmm_ctx *ctx, esmm_problem *p, int index)
{
  const esmm_kernel *kernel = esmm_registry_at(index);
  candidate c = {.kernel = kernel, .index = index, .b = density_of_b(p, kernel)};
  set_sample(p, 0, 0, 0);
  c.base = esmm_plan_seconds(ctx, p, index, NULL, &c.strip_rows);
  if (kernel->flags & ESMM_KERNEL_SKIPS) {
    set_sample(p, 1, 1, 0);
    c.per_strip = fmax(0.0, esmm_plan_seconds(ctx, p, index, NULL, &c.strip_rows) - c.base);
    set_sample(p, 0, 0, 1);
    c.per_joint = fmax(0.0, esmm_plan_seconds(ctx, p, index, NULL, &c.strip_rows) - c.base);
  }
  return c;
}

static double seconds_at(const candidate *c, double strip, double joint)
{
  return c->base + c->per_strip * strip + c->per_joint * joint;
}

static double middle(const candidate *c)
{
  return c->kernel ? seconds_at(c, MIDDLE_STRIP, MIDDLE_STRIP * c->b) : INFINITY;
}

/* If A has no zeros. */
static double most(const candidate *c)
{
  return seconds_at(c, 1, c->b);
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
  } else if (skip->base + 2 * SELECT_SECONDS >= dense->base) { /* nothing to win that the question would not cost */
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

static bool may_run(const esmm_ctx *ctx, const esmm_problem *p, const esmm_kernel *kernel, const char *force)
{
  char why[160];
  return kernel->backend == ESMM_CUDA && esmm_plan_may_choose(ctx, kernel, force) &&
         esmm_plan_can_run(ctx, p, kernel, why, sizeof why);
}

/* The partner of a skipping kernel, where it has one that can run. */
static candidate find_partner(const esmm_ctx *ctx, esmm_problem *p, const esmm_kernel *skip)
{
  for (int i = 0; skip && skip->partner && i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (strcmp(kernel->name, skip->partner) == 0 && may_run(ctx, p, kernel, NULL))
      return look_at(ctx, p, i);
  }
  return (candidate){0};
}

static esmm_status choose(esmm_ctx *ctx, esmm_problem *p, const char *force, decision *d)
{
  candidate selectable = {0}, only = {0};
  *d = (decision){0};
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (!may_run(ctx, p, kernel, force))
      continue;
    const candidate c = look_at(ctx, p, i);
    candidate *best = &d->of[kernel->flags & ESMM_KERNEL_SKIPS ? RUN_SKIP : RUN_DENSE];
    d->considered++;
    if (middle(&c) < middle(best))
      *best = c;
    if (middle(&c) < middle(&only))
      only = c;
    if (!(kernel->flags & ESMM_KERNEL_SKIPS) && !kernel->library && middle(&c) < middle(&selectable))
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
    const candidate partner = find_partner(ctx, p, d->of[RUN_SKIP].kernel);
    settle(p, d, &selectable, &partner);
  }
  return ESMM_OK;
}

/* Chooses what can be started. A kernel that cannot says so when it is asked again, so this ends. */
static esmm_status choose_started(esmm_ctx *ctx, esmm_problem *p, const char *force, decision *d)
{
  const esmm_status status = choose(ctx, p, force, d);
  if (status != ESMM_OK || d->run == DEVICE_CHOOSES)
    return status;
  const esmm_kernel *kernel = d->of[d->run].kernel;
  return !kernel->start || kernel->start(ctx) ? ESMM_OK : choose(ctx, p, force, d);
}

static size_t workspace(const esmm_problem *p, const candidate *c)
{
  esmm_problem mine = *p;
  if (!c->kernel)
    return 0;
  mine.strip_rows = c->strip_rows;
  return c->kernel->workspace(&mine);
}

/* At the strips of the skipping kernel; where there is none, at those that one would have. */
static esmm_status sample(esmm_ctx *ctx, const esmm_problem *p, const decision *d, CUdeviceptr out, CUstream stream)
{
  const candidate *dense = &d->of[RUN_DENSE], *skip = &d->of[RUN_SKIP];
  const bool tall = is_tall(p, skip->kernel ? skip->kernel : dense->kernel);
  const esmm_sample_params params = {.a = esmm_cuda_matrix(&p->a),
                                     .alive = tall ? p->w->cuda->tile_alive : p->w->cuda->alive,
                                     .height = tall ? ESMM_TILE : ESMM_STRIP,
                                     .out = out,
                                     .dense = (float)dense->base,
                                     .base = (float)skip->base,
                                     .per_strip = (float)skip->per_strip,
                                     .per_joint = (float)skip->per_joint};
  return esmm_cuda_sample(ctx, &params, stream);
}

/* Why `chosen`, at the densities of choice. */
static void give_reason(const decision *d, const char *force, which chosen, const esmm_choice_device *choice,
                        char *text, size_t bytes)
{
  const candidate *mine = &d->of[chosen], *other = &d->of[!chosen];
  if (force)
    (void)snprintf(text, bytes, "forced by '%.40s'", force);
  else if (!other->kernel)
    (void)snprintf(text, bytes, "%s", d->considered > 1 ? "the cheapest that can run" : "the only one that can run");
  else
    (void)snprintf(text, bytes, "cheapest of %d: %.3g ms, then %s with %.3g ms", d->considered,
                   1e3 * seconds_at(mine, choice->strip, choice->joint), other->kernel->name,
                   1e3 * seconds_at(other, choice->strip, choice->joint));
}

/* ---- the product ---- */

/* Marks in the stream's time; the kernels of a pair run one after the other, so each has its own. */
enum { START, STAGED, PLANNED, EXTRACTED, DONE = EXTRACTED + 2, END = DONE + 2, MARKS };

typedef struct run {
  esmm_ctx *ctx;
  esmm_problem *p;
  CUstream stream;
  staging st;
  decision d;
  CUdeviceptr scratch;
  bool timed;
  CUevent mark[MARKS]; /* all NULL unless timed */
  esmm_strips a_strips[2];
  bool all_of_b[2];
  esmm_stats stats[2]; /* as each kernel fills them */
} run;

static esmm_status mark(const run *r, int which_mark)
{
  return r->timed ? esmm_cuda_event_record(r->ctx, r->mark[which_mark], r->stream) : ESMM_OK;
}

esmm_status esmm_cuda_mark_extracted(esmm_ctx *ctx, const esmm_problem *p)
{
  return p->call->extracted ? esmm_cuda_event_record(ctx, p->call->extracted, p->call->stream) : ESMM_OK;
}

static esmm_status make_marks(run *r)
{
  esmm_status status = ESMM_OK;
  for (int i = 0; r->timed && status == ESMM_OK && i < MARKS; i++)
    status = esmm_cuda_event_create(r->ctx, &r->mark[i]);
  return status;
}

static void free_marks(run *r)
{
  for (int i = 0; i < MARKS; i++)
    esmm_cuda_event_free(r->ctx, r->mark[i]);
}

static CUdeviceptr note_at(const run *r, size_t offset)
{
  return r->scratch + r->st.notes_at + offset;
}

/* B's strips for a kernel that reads them: the weights' own, or made from its rows. The bits are always the weights':
   strict ones have more of them than B's elements give. */
static esmm_status give_strips(run *r, esmm_cuda_call *call)
{
  call->b = r->p->w->cuda->strips;
  if (call->b.data)
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
  esmm_cuda_call call = {.stream = r->stream,
                         .extracted = r->mark[EXTRACTED + (int)one],
                         .a_strips = &r->a_strips[one],
                         .all_of_b = &r->all_of_b[one],
                         .report = r->timed ? note_at(r, offsetof(notes, report)) : 0,
                         .choose = line};
  if (selectable)
    call.selector = (esmm_selector){
        .address = note_at(r, offsetof(notes, choice) + offsetof(esmm_choice_device, chosen)), .value = (uint32_t)one};
  esmm_problem mine = *r->p;
  mine.strip_rows = c->strip_rows;
  mine.call = &call;
  esmm_status status = c->kernel->reads_strips ? give_strips(r, &call) : ESMM_OK;
  if (status == ESMM_OK)
    status = mark(r, EXTRACTED + (int)one); /* stays here where the kernel has no extraction of its own */
  if (status == ESMM_OK)
    status = c->kernel->run(r->ctx, &mine, esmm_cuda_pointer(r->scratch + r->st.work_at), &r->stats[one]);
  return status == ESMM_OK ? mark(r, DONE + (int)one) : status;
}

/* The skipping kernel, which chooses between itself and its partner. */
static esmm_status launch_pair(run *r)
{
  const candidate *dense = &r->d.of[RUN_DENSE], *skip = &r->d.of[RUN_SKIP];
  const esmm_cuda_line line = {.dense = (float)dense->base,
                               .base = (float)skip->base,
                               .per_strip = (float)skip->per_strip,
                               .per_joint = (float)skip->per_joint};
  const esmm_status status = mark(r, PLANNED);
  return status == ESMM_OK ? launch(r, RUN_SKIP, false, &line) : status;
}

/* The skipping kernel first: it is the one that was hoped for. */
static esmm_status launch_both(run *r)
{
  esmm_status status = sample(r->ctx, r->p, &r->d, note_at(r, offsetof(notes, choice)), r->stream);
  if (status == ESMM_OK)
    status = mark(r, PLANNED);
  if (status == ESMM_OK)
    status = launch(r, RUN_SKIP, true, NULL);
  return status == ESMM_OK ? launch(r, RUN_DENSE, true, NULL) : status;
}

static esmm_status launch_chosen(run *r)
{
  esmm_status status = mark(r, STAGED);
  if (status != ESMM_OK)
    return status;
  if (r->d.run == DEVICE_CHOOSES)
    return r->d.pair ? launch_pair(r) : launch_both(r);
  status = mark(r, PLANNED);
  return status == ESMM_OK ? launch(r, r->d.run, false, NULL) : status;
}

static esmm_status copy_back(run *r, size_t *moved)
{
  if (!r->st.c_staged)
    return ESMM_OK;
  *moved += esmm_cuda_tight_bytes(&r->st.c);
  return esmm_cuda_download(r->ctx, &r->p->c, &r->st.c, r->stream);
}

/* ---- statistics: these wait ---- */

static esmm_status seconds_between(const run *r, int from, int to, double *seconds)
{
  return esmm_cuda_event_seconds(r->ctx, r->mark[from], r->mark[to], seconds);
}

/* launched: the kernel whose launch did the work. What it says of its extraction itself, no mark could tell. */
static esmm_status take_times(const run *r, which launched, const esmm_choice_device *report, esmm_stats *s)
{
  const bool both = r->d.run == DEVICE_CHOOSES && !r->d.pair;
  const int from = both && launched == RUN_DENSE ? DONE + RUN_SKIP : PLANNED;
  double other = 0.0;
  esmm_status status = seconds_between(r, START, END, &s->seconds_total);
  if (status == ESMM_OK)
    status = seconds_between(r, STAGED, PLANNED, &s->seconds_plan);
  if (status == ESMM_OK)
    status = seconds_between(r, from, EXTRACTED + (int)launched, &s->seconds_extract);
  if (status == ESMM_OK)
    status = seconds_between(r, EXTRACTED + (int)launched, DONE + (int)launched, &s->seconds_multiply);
  if (status == ESMM_OK && both) /* a launch that returned at once is a cost of choosing */
    status = launched == RUN_DENSE ? seconds_between(r, PLANNED, DONE + RUN_SKIP, &other)
                                   : seconds_between(r, DONE + RUN_SKIP, DONE + RUN_DENSE, &other);
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

static esmm_status count_joint(const run *r, const esmm_strips *a, bool tall, double *density)
{
  const struct esmm_cuda_weights *b = r->p->w->cuda;
  const int64_t b_strips = tall ? b->rows_ld / ESMM_TILE : b->strips.strips;
  const CUdeviceptr out = note_at(r, offsetof(notes, joint));
  const esmm_count_params params = {.a_bits = a->bits,
                                    .b_bits = tall ? b->tiles : b->strips.bits,
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
  const bool tall = is_tall(r->p, r->d.of[chosen].kernel);
  esmm_status status = ESMM_OK;
  if (tall) {
    s->strip_cols = ESMM_TILE;
    s->strip_density_b = r->p->w->cuda->tile_density;
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
      status = count_joint(r, a, tall, &s->joint_density);
  } else if (s->joint_density == 0.0) { /* it neither noted strips nor said itself */
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
    status = sample(r->ctx, r->p, &r->d, note_at(r, offsetof(notes, choice)), r->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(r->ctx, seen, note_at(r, 0), offsetof(notes, joint), r->stream);
  if (status == ESMM_OK && (r->d.pair || seen->report.strip > 0.0f)) {
    seen->choice.strip = seen->report.strip;
    seen->choice.joint = seen->report.joint;
  }
  return status;
}

static esmm_status take_stats(run *r, const char *force, esmm_stats *s)
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
  give_reason(&r->d, force, chosen, &seen.choice, s->reason, sizeof s->reason);
  status = take_times(r, r->d.pair ? RUN_SKIP : chosen, &seen.report, s);
  return status == ESMM_OK ? take_densities(r, chosen, &seen.choice, s) : status;
}

/* ---- from the outside ---- */

/* strips: room for B's, too. */
static esmm_status get_scratch(run *r, bool strips, size_t work)
{
  const size_t b = strips ? esmm_cuda_strips_bytes(r->p->n, r->p->k) : 0;
  size_t bytes = r->st.bytes;
  const bool fits = esmm_cuda_reserve(&bytes, b, ALIGN, &r->st.b_at); /* false where b is SIZE_MAX */
  r->st.work_at = bytes;
  if (!fits || work == SIZE_MAX || !esmm_size_add(bytes, work, &bytes))
    return esmm_fail(r->ctx, ESMM_ERR_OVERFLOW, "%lld x %lld x %lld needs more scratch than fits in memory",
                     (long long)r->p->m, (long long)r->p->k, (long long)r->p->n);
  return esmm_cuda_scratch(r->ctx, bytes, r->stream, &r->scratch);
}

/* No sum to make (k or alpha is 0): only the epilogue. */
static esmm_status finish_only(run *r, esmm_stats *s)
{
  esmm_problem *p = r->p;
  esmm_status status = stage(r->ctx, p, false, &r->st);
  if (status == ESMM_OK)
    status = get_scratch(r, false, 0);
  if (status == ESMM_OK)
    status = mark(r, START);
  if (status == ESMM_OK)
    status = upload(r->ctx, &r->st, p->beta != 0.0f, r->scratch, p, r->stream, &s->staged_bytes);
  p->alpha = 1.0f; /* times a sum that is 0 */
  if (status == ESMM_OK)
    status = esmm_cuda_finish(r->ctx, p, r->stream);
  if (status == ESMM_OK)
    status = copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = mark(r, END);
  return status == ESMM_OK && r->timed ? seconds_between(r, START, END, &s->seconds_total) : status;
}

static esmm_status multiply(run *r, const char *force, esmm_stats *s)
{
  esmm_problem *p = r->p;
  esmm_status status = stage(r->ctx, p, true, &r->st);
  if (status == ESMM_OK)
    status = choose_started(r->ctx, p, force, &r->d);
  if (status != ESMM_OK)
    return status;
  const bool both = r->d.run == DEVICE_CHOOSES;
  const size_t dense = both || r->d.run == RUN_DENSE ? workspace(p, &r->d.of[RUN_DENSE]) : 0;
  const size_t skip = both || r->d.run == RUN_SKIP ? workspace(p, &r->d.of[RUN_SKIP]) : 0;
  const bool strips = ((both || r->d.run == RUN_DENSE) && wants_strips(p, r->d.of[RUN_DENSE].kernel)) ||
                      ((both || r->d.run == RUN_SKIP) && wants_strips(p, r->d.of[RUN_SKIP].kernel));
  r->stats[0] = r->stats[1] = *s;
  status = get_scratch(r, strips, dense > skip ? dense : skip);
  if (status == ESMM_OK && r->timed) /* who has nothing to report leaves this */
    status = esmm_cuda_zero(r->ctx, note_at(r, offsetof(notes, report)), sizeof(esmm_choice_device), r->stream);
  if (status == ESMM_OK)
    status = mark(r, START);
  if (status == ESMM_OK)
    status = upload(r->ctx, &r->st, p->beta != 0.0f, r->scratch, p, r->stream, &s->staged_bytes);
  if (status == ESMM_OK)
    status = launch_chosen(r);
  if (status == ESMM_OK)
    status = copy_back(r, &s->staged_bytes);
  if (status == ESMM_OK)
    status = mark(r, END);
  return status == ESMM_OK && r->timed ? take_stats(r, force, s) : status;
}

/* What would wait cannot be part of a graph: said before anything is captured. */
static esmm_status check_capture(esmm_ctx *ctx, const esmm_problem *p, bool want_stats)
{
  if (!esmm_cuda_capturing(ctx))
    return ESMM_OK;
  if (want_stats)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "stats cannot be taken while the stream is captured: they wait");
  if (p->a.place == ESMM_HOST || p->c.place == ESMM_HOST)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED,
                     "%s lies in host memory: while the stream is captured, operands must be on the GPU",
                     p->a.place == ESMM_HOST ? "a" : "c");
  return ESMM_OK;
}

esmm_status esmm_cuda_check_epilogue(esmm_ctx *ctx, const esmm_matmul_opts *o)
{
  const char *activation = o->activation == ESMM_ACT_GELU        ? "opts->activation is GELU"
                           : o->activation == ESMM_ACT_GELU_TANH ? "opts->activation is GELU_TANH"
                           : o->activation == ESMM_ACT_SILU      ? "opts->activation is SILU"
                                                                 : NULL;
  const char *what = o->residual          ? "opts->residual is set"
                     : o->gate        ? "opts->gate is set"
                     : o->column_nonzeros ? "opts->column_nonzeros is set"
                     : o->c_pattern       ? "opts->c_pattern is set"
                                          : activation;
  if (!what)
    return ESMM_OK;
  return esmm_fail(
      ctx, ESMM_ERR_UNSUPPORTED,
      "%s, which only a CPU has yet: leave it out here and do that step on C yourself, or make this product "
      "in a context of \"cpu\"",
      what);
}

esmm_status esmm_cuda_matmul(esmm_ctx *ctx, esmm_problem *p, const char *force, void *stream, bool want_stats,
                             esmm_stats *s)
{
  run r = {.ctx = ctx, .p = p, .stream = stream, .timed = want_stats};
  esmm_status status = esmm_cuda_begin(ctx, stream);
  if (status != ESMM_OK)
    return status;
  status = check_capture(ctx, p, want_stats);
  if (status == ESMM_OK)
    status = make_marks(&r);
  if (status == ESMM_OK)
    status = p->k == 0 || p->alpha == 0.0f ? finish_only(&r, s) : multiply(&r, force, s);
  status = esmm_cuda_end(ctx, stream, status);
  free_marks(&r);
  return status;
}

/* A's densities, on the host. */
static esmm_status look(run *r, esmm_choice_device *choice)
{
  size_t moved = 0;
  esmm_status status = get_scratch(r, false, 0);
  const CUdeviceptr at = note_at(r, offsetof(notes, choice));
  if (status == ESMM_OK)
    status = upload(r->ctx, &r->st, false, r->scratch, r->p, r->stream, &moved);
  if (status == ESMM_OK)
    status = sample(r->ctx, r->p, &r->d, at, r->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(r->ctx, choice, at, sizeof *choice, r->stream);
  return status;
}

esmm_status esmm_cuda_plan(esmm_ctx *ctx, esmm_problem *p, const char *force, void *stream, esmm_choice *choices,
                           int *chosen)
{
  run r = {.ctx = ctx, .p = p, .stream = stream};
  esmm_choice_device choice = {0};
  esmm_status status = stage(ctx, p, true, &r.st);
  if (status == ESMM_OK)
    status = choose(ctx, p, force, &r.d);
  if (status == ESMM_OK)
    status = esmm_cuda_begin(ctx, stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_refuse_capture(ctx, "an explained plan");
  status = esmm_cuda_end(ctx, stream, status == ESMM_OK ? look(&r, &choice) : status);
  if (status != ESMM_OK)
    return status;
  set_sample(p, (double)choice.element, (double)choice.strip, (double)choice.joint);
  status = esmm_plan_sampled(ctx, p, force, choices, chosen);
  if (status != ESMM_OK)
    return status;
  const which one = r.d.run != DEVICE_CHOOSES ? r.d.run : choice.chosen ? RUN_SKIP : RUN_DENSE;
  const candidate *c = &r.d.of[one];
  if (*chosen != c->index) /* the host named its candidates before it knew A */
    (void)snprintf(choices[*chosen].text, sizeof choices[*chosen].text,
                   "cheaper here, but not one that the GPU was given to choose from");
  *chosen = c->index;
  give_reason(&r.d, force, one, &choice, choices[c->index].text, sizeof choices[c->index].text);
  return ESMM_OK;
}
