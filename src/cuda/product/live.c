/*
 * live.c: what calls take on a GPU, from a pair of events around some of them. Nothing waits: later calls ask whether
 * an event has come.
 *
 * Where the stream is idle, the host's own time lies between the two events, 15 to 20 us of it. So a time counts only
 * if the stream still had work before the first event when the second was recorded. Behind queued work a pair adds 2 to
 * 5 us, nearly the same to every launch; EVENT_SECONDS of that are taken off, and the rest is in the times of all
 * kernels that are compared. On an always idle stream timing soon becomes rare: each time that does not count doubles
 * the calls until the next.
 */
#include "cuda/product/product.h"

#include <math.h>
#include <string.h>

#define FLIGHTS 64           /* calls that may be under way */
#define FREE_MISSED 2        /* times that need not count: the next call is timed again. Then */
#define MOST_MISSED 8        /* each doubles the calls until the next, to 256 */
#define OFF_PAUSE 16         /* calls that a choice holds for where none can be timed */
#define EVENT_SECONDS 2.5e-6 /* what a pair of events adds at least */
#define BUDGET_SHARE 0.01    /* of each call, beside that */
#define SLACK_SECONDS 4e-6   /* launches differ by that, and small products are little else */
#define TIMED_EVERY 61       /* calls, once the choice stands: no multiple of those between two reports */
#define BUDGET_CALLS 6.0     /* that trials may lose: some are begun before the first time is known */

typedef struct flight {
  CUevent start, end; /* made when first used, and used again */
  esmm_plan plan;
  esmm_history *history; /* of the context's tables: it is another call's where its class has changed */
  esmm_class own;
} flight;

typedef struct live {
  esmm_allocator allocator;
  int ordinal;
  int first, count; /* those under way, in the order of their calls */
  int missed;       /* times in a row that did not count */
  flight ring[FLIGHTS];
} live;

static const esmm_cuda_driver *cu(void)
{
  return esmm_cuda_driver_get();
}

static flight *flight_at(live *x, int i)
{
  return &x->ring[(x->first + i) % FLIGHTS];
}

static void release(void *object)
{
  live *x = object;
  const esmm_allocator allocator = x->allocator;
  for (int i = 0; i < FLIGHTS; i++) {
    esmm_cuda_event_free_at(x->ordinal, x->ring[i].start);
    esmm_cuda_event_free_at(x->ordinal, x->ring[i].end);
  }
  esmm_mem_free(&allocator, x, sizeof *x);
}

/* NULL: there is no memory for it, and calls are not timed. */
static live *live_of(esmm_ctx *ctx)
{
  static const char key;
  live *x = esmm_cuda_attached(ctx, &key);
  if (x)
    return x;
  x = esmm_mem_alloc(&ctx->allocator, sizeof *x);
  if (!x)
    return NULL;
  memset(x, 0, sizeof *x);
  x->allocator = ctx->allocator;
  x->ordinal = ctx->ordinal;
  if (esmm_cuda_attach(ctx, &key, x, release) == ESMM_OK)
    return x;
  release(x);
  return NULL;
}

/* Has all before the event been done, and how long after another one? from may be NULL. What a capture in another
   thread forbids is allowed in the relaxed mode. */
static CUresult query(CUevent event, CUevent from, float *milliseconds)
{
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUresult result = cu()->cuThreadExchangeStreamCaptureMode(&mode);
  if (result != CUDA_SUCCESS)
    return result;
  result = cu()->cuEventQuery(event);
  if (result == CUDA_SUCCESS && from)
    result = cu()->cuEventElapsedTime(milliseconds, from, event);
  (void)cu()->cuThreadExchangeStreamCaptureMode(&mode);
  return result;
}

static void take(esmm_ctx *ctx, const flight *f, double seconds)
{
  esmm_choose_learn(ctx, &f->plan, f->history->own == f->own ? f->history : NULL,
                    fmax(seconds - EVENT_SECONDS, 0.5 * seconds));
}

/* Those that have come. */
static void collect(esmm_ctx *ctx, live *x)
{
  for (; x->count > 0; x->count--) {
    const flight *f = flight_at(x, 0);
    float milliseconds = 0.0f;
    const CUresult result = query(f->end, f->start, &milliseconds);
    if (result == CUDA_ERROR_NOT_READY)
      return;
    if (result == CUDA_SUCCESS)
      take(ctx, f, 1e-3 * (double)milliseconds);
    x->first = (x->first + 1) % FLIGHTS;
  }
}

static int flying(const void *self, esmm_class own, int index)
{
  const live *x = self;
  int found = 0;
  for (int i = 0; i < x->count; i++) {
    const flight *f = &x->ring[(x->first + i) % FLIGHTS];
    found += f->plan.own == own && f->plan.index == index;
  }
  return found;
}

void esmm_live_clock(run *r, bool counts, esmm_clock *clock)
{
  *clock = (esmm_clock){.every = TIMED_EVERY,
                        .budget = BUDGET_CALLS,
                        .share = BUDGET_SHARE,
                        .slack = SLACK_SECONDS,
                        .off = true,
                        .pause = OFF_PAUSE};
  const bool staged = r->st.a_staged || r->st.c_staged || r->st.residual_staged;
  if (!counts || !r->ctx->learns || r->timed || r->p->gated || r->branch || staged || esmm_cuda_capturing(r->ctx))
    return;
  live *x = live_of(r->ctx);
  if (!x)
    return;
  collect(r->ctx, x);
  if (r->ctx->turn > 0) /* one that does not count is no reason to wait */
    x->missed = 0;
  clock->flying = flying;
  clock->self = x;
  clock->off = x->count == FLIGHTS;
  clock->idle = x->missed > 0;
  if (!clock->off)
    clock->pause = x->missed > FREE_MISSED ? 1 << x->missed : 0;
}

static bool make_event(CUevent *event)
{
  return *event || cu()->cuEventCreate(event, CU_EVENT_DEFAULT) == CUDA_SUCCESS;
}

/* A failure here does not fail the product: the next driver call reports it. */
void esmm_live_begin(run *r)
{
  live *x = r->plan.timed ? live_of(r->ctx) : NULL;
  flight *f = x ? flight_at(x, x->count) : NULL;
  r->plan.timed =
      x && make_event(&f->start) && make_event(&f->end) && cu()->cuEventRecord(f->start, r->stream) == CUDA_SUCCESS;
}

void esmm_live_end(run *r)
{
  if (!r->plan.timed)
    return;
  live *x = live_of(r->ctx);
  flight *f = flight_at(x, x->count);
  if (cu()->cuEventRecord(f->end, r->stream) != CUDA_SUCCESS || query(f->start, NULL, NULL) != CUDA_ERROR_NOT_READY) {
    x->missed += x->missed < MOST_MISSED;
    return;
  }
  f->plan = r->plan;
  f->history = r->history;
  f->own = r->history->own;
  x->missed = 0;
  x->count++;
}
