/*
 * recall.c: A's densities, as products of a GPU report them for the next ones.
 *
 * A call that reports has a slot in pinned host memory: a kernel writes the densities there, then the word `ready`. The
 * slots are a ring for each entry of the context's table of densities (src/recall.h): call N of an entry has slot N
 * modulo ESMM_REPORTS. Call N's report is used from call N + L on, never before, even if it is there: so the choice
 * does not depend on the GPU's speed. L is so long that the report nearly always is there by then; if not, the host
 * waits for it, without a driver call.
 */
#include "cuda/kernels/decode/decode_params.h"
#include "cuda/product/product.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MOST_SAMPLE_EVERY 32 /* calls from one sampling launch to the next, at most */
#define MOST_REPORT_EVERY 16 /* the same for kernels that report themselves */
#define SAME_STRIPS 0.25     /* of a strip density, by which it may move */
#define ELEMENTS_EVERY 8     /* reports, of which one counts A's elements */
#define AHEAD_SECONDS 300e-6 /* how far the host may be ahead of the GPU without having to wait for a report */
#define LEAST_DELAY 1        /* calls until a report is used: those of long products come before their end */
#define MOST_DELAY 16        /* the same; less than ESMM_REPORTS, so that a slot is free when its turn comes again */
#define SPIN_SECONDS 20e-6   /* a shorter wait spins */
#define NAP_NANOSECONDS 20000
#define GIVE_UP_SECONDS 2.0 /* the stream waits for something else: no report is expected any more */

_Static_assert(MOST_DELAY < ESMM_REPORTS, "a slot would be used again before it is read");

/* ---- how often, how late ---- */

static int clamp_calls(double calls, int least, int most)
{
  return calls >= (double)most ? most : calls <= (double)least ? least : (int)ceil(calls);
}

/* Decode, for few rows, reports at its end: the next call must not wait for that. */
void esmm_run_set_pace(candidates *list, int64_t m, double dense_seconds)
{
  list->dense = dense_seconds;
  list->delay =
      clamp_calls(AHEAD_SECONDS / dense_seconds, m > ESMM_DECODE_ROWS ? LEAST_DELAY : LEAST_DELAY + 1, MOST_DELAY);
}

/* Calls from one report to the next: the faster the kernel that runs, the more a report would cost it. */
static int pace(const run *r, const candidates *list)
{
  const double share = ESMM_GPU_REPORTS * (r->d.memory == MEMORY_KNOWN ? r->d.seconds : list->dense);
  return r->reports_itself ? clamp_calls(ESMM_GPU_REPORT / share, 1, MOST_REPORT_EVERY)
                           : clamp_calls(ESMM_GPU_LAUNCH_TWO / share, 1, MOST_SAMPLE_EVERY);
}

/* ---- pinned memory ---- */

typedef struct slots {
  esmm_allocator allocator;
  esmm_choice_device *host; /* [ESMM_RECALL_ENTRIES][ESMM_REPORTS]; NULL: could not be had, and is not tried again */
  CUdeviceptr device;       /* the same memory, as kernels see it */
  uint32_t missing[ESMM_RECALL_ENTRIES]; /* slots of reports that did not come in time: until they do, none is asked for
                                            in this place of the table */
  bool impatient;                        /* none has come since: the next wait would be as long */
} slots;

#define SLOT_BYTES (ESMM_RECALL_ENTRIES * ESMM_REPORTS * sizeof(esmm_choice_device))

static void release(void *object)
{
  slots *all = object;
  const esmm_allocator allocator = all->allocator;
  if (all->host)
    (void)esmm_cuda_driver_get()->cuMemFreeHost(all->host);
  esmm_mem_free(&allocator, all, sizeof *all);
}

/* make: where there are none yet. NULL: there are none, and none could be made. */
static slots *slots_of(esmm_ctx *ctx, bool make)
{
  static const char key;
  slots *all = esmm_cuda_attached(ctx, &key);
  if (all || !make)
    return all;
  all = esmm_mem_alloc(&ctx->allocator, sizeof *all);
  if (!all)
    return NULL;
  *all = (slots){.allocator = ctx->allocator};
  void *host;
  if (esmm_cuda_pin(SLOT_BYTES, &host, &all->device)) /* else the context does without */
    all->host = host;
  if (esmm_cuda_attach(ctx, &key, all, release) == ESMM_OK)
    return all;
  release(all);
  return NULL;
}

static size_t slot_number(const esmm_ctx *ctx, const esmm_seen *seen, int64_t call)
{
  return (size_t)esmm_recall_place(ctx, seen) * ESMM_REPORTS + (size_t)(call % ESMM_REPORTS);
}

/* ---- waiting ---- */

/* A word that the GPU writes last has the value that says so. */
static bool has_come(const uint32_t *word, uint32_t value)
{
  return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value;
}

static bool is_ready(const esmm_choice_device *slot)
{
  return has_come(&slot->ready, 1);
}

/* If the stream waits for later work of this thread, only one call waits: *impatient from then on, until a report
   comes. */
static bool wait_for_word(const esmm_ctx *ctx, const uint32_t *word, uint32_t value, bool *impatient)
{
  if (has_come(word, value)) {
    *impatient = false;
    return true;
  }
  if (*impatient || esmm_cuda_lost(ctx))
    return false;
  const double start = esmm_now();
  for (double waited = 0.0; waited < GIVE_UP_SECONDS; waited = esmm_now() - start) {
    if (has_come(word, value))
      return true;
    if (waited > SPIN_SECONDS)
      (void)nanosleep(&(struct timespec){.tv_nsec = NAP_NANOSECONDS}, NULL);
  }
  *impatient = !has_come(word, value);
  return !*impatient;
}

static bool wait_for(const esmm_ctx *ctx, slots *all, const esmm_choice_device *slot)
{
  return wait_for_word(ctx, &slot->ready, 1, &all->impatient);
}

static void give_up(slots *all, const esmm_ctx *ctx, esmm_seen *seen)
{
  all->missing[esmm_recall_place(ctx, seen)] |= seen->pending;
  seen->known = false;
  seen->pending = 0;
}

/* Something is still to come in an entry's place of the table. */
static bool is_silent(slots *all, const esmm_ctx *ctx, const esmm_seen *seen)
{
  const int place = esmm_recall_place(ctx, seen);
  for (uint32_t left = all->missing[place]; left; left &= left - 1)
    if (is_ready(&all->host[place * ESMM_REPORTS + __builtin_ctz(left)]))
      all->missing[place] &= ~(left & (0u - left));
  return all->missing[place] != 0;
}

static uint32_t bit_of(int64_t call)
{
  return (uint32_t)1 << call % ESMM_REPORTS;
}

/* A kernel that does not measure joint reports strip there, and element 0 if it counts none; an earlier count then
   holds while strips are about as dense. */
static void take(esmm_seen *seen, const esmm_choice_device *slot, int64_t call)
{
  if (call < seen->from)
    return;
  seen->known = true;
  seen->joint_known = slot->joint < slot->strip;
  if (slot->element > 0.0f || fabs((double)slot->strip - seen->strip) > SAME_STRIPS * seen->strip)
    seen->element = (double)slot->element;
  seen->strip = (double)slot->strip;
  seen->joint = (double)slot->joint;
  if (slot->counted) {
    seen->overflow_known = true;
    seen->overflow = (double)slot->overflow;
  }
  seen->strip_rows = seen->rows_of[call % ESMM_REPORTS];
  seen->reports++;
}

/* Reports of the entry's calls up to `last`, in their order; seen: the entry, or a copy to explain. */
static void collect(const esmm_ctx *ctx, slots *all, const esmm_seen *entry, esmm_seen *seen, int64_t last)
{
  for (int64_t call = esmm_max(0, seen->calls - ESMM_REPORTS); seen->pending && call <= last; call++) {
    const esmm_choice_device *slot = &all->host[slot_number(ctx, entry, call)];
    if (!(seen->pending & bit_of(call)))
      continue;
    if (!wait_for(ctx, all, slot)) {
      if (seen == entry)
        give_up(all, ctx, seen);
      return;
    }
    take(seen, slot, call);
    seen->pending &= ~bit_of(call);
  }
}

void esmm_cuda_settle_reports(esmm_ctx *ctx, esmm_seen *seen)
{
  slots *all = slots_of(ctx, false);
  for (int64_t call = esmm_max(0, seen->calls - ESMM_REPORTS); call < seen->calls; call++)
    if (seen->pending & bit_of(call) && !wait_for(ctx, all, &all->host[slot_number(ctx, seen, call)])) {
      give_up(all, ctx, seen);
      return;
    }
  seen->pending = 0;
}

/* ---- one call ---- */

/* Nothing is known: why, for the call's reason. */
static memory state_of(const esmm_ctx *ctx, slots *all, const esmm_seen *seen)
{
  if (all && !all->host)
    return MEMORY_REFUSED;
  return seen && all && is_silent(all, ctx, seen) ? MEMORY_SILENT : MEMORY_EMPTY;
}

/* Set bits of the pattern's strips, `ratio` of them ORed together. */
static int64_t count_bits(const esmm_pattern *a, int64_t ratio)
{
  int64_t set = 0;
  for (int64_t first = 0; first < a->strips; first += ratio) {
    const int64_t end = esmm_min(first + ratio, a->strips);
    for (int64_t w = 0; w < a->words; w++) {
      uint64_t any = 0;
      for (int64_t s = first; s < end; s++)
        any |= a->bits[s * a->words + w];
      set += __builtin_popcountll(any);
    }
  }
  return set;
}

/* Heights of strips that kernels have: at which a pattern is counted. */
enum { AT_STRIP32, AT_STRIP128, AT_STRIP8, HEIGHTS };
static const int64_t heights[HEIGHTS] = {ESMM_STRIP, ESMM_TILE, 1 << STRIP8_LEVEL};

/* The same, counted once for all products: threads that count at the same time find the same. */
static int64_t count_once(const esmm_pattern *a, int at)
{
  esmm_pattern *kept;
  memcpy(&kept, &a, sizeof kept); /* callers see no change */
  int64_t known = atomic_load_explicit(&kept->folded[at], memory_order_relaxed);
  if (known == 0) {
    known = 1 + count_bits(a, esmm_cuda_pattern_fold(a, heights[at]));
    atomic_store_explicit(&kept->folded[at], known, memory_order_relaxed);
  }
  return known - 1;
}

/* What A's bitmaps with `set` bits say of strips of that height: exact if theirs divide it; taller ones are no less
   dense. */
static esmm_seen seen_in_pattern(const esmm_pattern *a, int64_t height, int64_t set)
{
  const int64_t ratio = esmm_cuda_pattern_fold(a, height);
  const double strips = (double)esmm_ceil_div(a->strips, ratio);
  return (esmm_seen){.known = true,
                     .strip_rows = ratio * a->strip_rows,
                     .strip = a->k > 0 && strips > 0 ? (double)set / (strips * (double)a->k) : 0.0};
}

static void believe(run *r, const int64_t *set)
{
  r->view = seen_in_pattern(r->p->pattern, heights[AT_STRIP32], set[AT_STRIP32]);
  r->strip128 = seen_in_pattern(r->p->pattern, heights[AT_STRIP128], set[AT_STRIP128]);
  r->strip8 = seen_in_pattern(r->p->pattern, heights[AT_STRIP8], set[AT_STRIP8]);
  r->seen = &r->view;
  r->d.memory = MEMORY_KNOWN;
  r->d.by_pattern = true;
}

/*
 * A pattern on the GPU, where nothing is remembered: its counts are there by the end of the product that made it; the
 * host waits. That costs the GPU about as much as the sample that it saves, once: entry, which may be NULL, remembers
 * them for the next such call. False: there are none.
 */
static bool counted_on_gpu(run *r, slots *all, esmm_seen *entry)
{
  uint32_t number = 0;
  bool impatient = false;
  const esmm_pattern_bit_count *count = r->p->pattern ? esmm_cuda_pattern_count(r->p->pattern, &number) : NULL;
  if (!count || !wait_for_word(r->ctx, &count->ready, number, all ? &all->impatient : &impatient))
    return false;
  const int64_t set[HEIGHTS] = {(int64_t)count->folded[0], (int64_t)count->folded[1], (int64_t)count->own};
  believe(r, set);
  if (esmm_cuda_pattern_fold(r->p->pattern, heights[AT_STRIP8]) > 1)
    r->strip8 = r->view; /* the GPU has not counted at that height: strips that are taller say no less */
  if (entry) {
    entry->known = true;
    entry->joint_known = false;
    entry->strip = r->strip128.strip;
    entry->strip_rows = r->strip128.strip_rows;
  }
  return true;
}

/* A pattern in host memory says what is known of A. One on the GPU takes a wait: it is used where nothing is known. */
void esmm_run_recall(run *r, const candidates *list, bool counts)
{
  esmm_ctx *ctx = r->ctx;
  const esmm_problem *p = r->p;
  r->seen = NULL;
  r->call = -1;
  r->d.memory = MEMORY_OFF;
  if (p->strict || !list->skips)
    return;
  if (p->pattern && p->pattern->bits) {
    const int64_t set[HEIGHTS] = {count_once(p->pattern, AT_STRIP32), count_once(p->pattern, AT_STRIP128),
                                  count_once(p->pattern, AT_STRIP8)};
    believe(r, set);
    return;
  }
  if (!ctx->recall) {
    if (p->pattern) /* slots: only for how long a wait may be */
      (void)counted_on_gpu(r, slots_of(ctx, counts && !esmm_cuda_capturing(ctx)), NULL);
    return;
  }
  const bool captured = esmm_cuda_capturing(ctx), changes = counts && !captured;
  slots *all = slots_of(ctx, changes);
  r->seen = changes ? esmm_recall_use_seen(ctx, p->w, p->m) : esmm_recall_seen(ctx, p->w, p->m);
  esmm_seen *entry = r->seen;
  const bool reports = all && all->host;
  if (entry && !counts) { /* explaining only */
    r->view = *entry;
    r->seen = &r->view;
  }
  if (entry && !captured && reports)
    collect(ctx, all, entry, r->seen, entry->calls - list->delay);
  if (!(r->seen && r->seen->known) && counted_on_gpu(r, all, changes && reports ? entry : NULL))
    return;
  if (entry && changes)
    r->call = entry->calls++;
  r->d.memory = r->seen && r->seen->known ? MEMORY_KNOWN : state_of(ctx, all, entry);
}

/* The kernel that always runs, whatever the device chooses; NULL: it may be either of two. */
static const esmm_kernel *sure_kernel(const decision *d)
{
  return d->run != DEVICE_CHOOSES ? d->of[d->run].kernel : d->pair ? d->of[RUN_SKIP].kernel : NULL;
}

/* Reporting kernels count strips, not elements: now and then A is sampled instead, if a kernel of strips of 8 rows
   needs them. */
static bool wants_elements(const esmm_seen *seen, const candidates *list)
{
  return list->strip8 && seen->known && seen->strip > 0.0 &&
         (seen->element <= 0.0 || seen->reports % ELEMENTS_EVERY == 0);
}

void esmm_run_ask_for_report(run *r, const candidates *list)
{
  slots *all = r->call >= 0 ? slots_of(r->ctx, false) : NULL;
  r->report = NULL;
  if (!all || !all->host || is_silent(all, r->ctx, r->seen))
    return;
  const esmm_kernel *kernel = sure_kernel(&r->d);
  /* Kernels do not count the overflow: once, where it matters, the sample does. */
  const bool sampled = (list->overflow_matters && !r->seen->overflow_known) || wants_elements(r->seen, list);
  r->reports_itself = kernel && esmm_cuda_about(kernel)->reports && !sampled;
  const int every = pace(r, list);
  if ((r->call + (r->seen->replaced ? every - 1 : 0)) % every != 0) /* soon replaced: no hurry to report */
    return;
  const size_t number = slot_number(r->ctx, r->seen, r->call);
  r->report = &all->host[number];
  r->report_at = all->device + number * sizeof(esmm_choice_device);
  r->report->counted = 0; /* kernels that count none leave it */
  __atomic_store_n(&r->report->ready, 0, __ATOMIC_RELEASE);
  r->seen->rows_of[r->call % ESMM_REPORTS] =
      (uint8_t)strip_rows(r->reports_itself ? uses_strip128(kernel) : r->d.strip128);
}

void esmm_run_let_sample(run *r)
{
  if (!r->report || !r->reports_itself)
    return;
  r->reports_itself = false;
  r->seen->rows_of[r->call % ESMM_REPORTS] = (uint8_t)strip_rows(r->d.strip128);
}

void esmm_run_expect_report(run *r)
{
  if (r->report)
    r->seen->pending |= bit_of(r->call);
}

void esmm_run_report(run *r, const esmm_choice_device *densities)
{
  if (!r->report)
    return;
  *r->report = *densities;
  r->report->ready = 1;
  esmm_run_expect_report(r);
}
