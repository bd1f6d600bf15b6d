/*
 * recall_rig.h: products on the fake driver whose densities the test decides: it writes the reports that kernels and
 * samples would, at once, later or never, and sees what was launched.
 */
#ifndef ESMM_TEST_RECALL_RIG_H
#define ESMM_TEST_RECALL_RIG_H

#include "cuda/cuda.h"
#include "cuda/kernels/decode/decode_params.h"
#include "fake_gpu.h"

#include <math.h>
#include <pthread.h>
#include <time.h>

enum { M = 512, K = 1024, N = 1024, CALLS = 96, LATE = 2048 };
enum { STRIP_ROWS = 32 }; /* of what hand_over makes */

typedef enum when { AT_ONCE, LATER, NEVER } when;

static struct {
  float strip;      /* what A's densities are: of strips, */
  float element;    /* and of elements, which samples count and kernels do not; 0: the same, and all do */
  float counted;    /* share of its bits that a pattern of C is said to have; negative: nobody says */
  float overflow;   /* and its 2:4 overflow, as samples have it; below 0: they count none */
  when when;        /* a report comes in */
  int samples;      /* sampling launches of this call */
  int self;         /* reports that the product's own kernel was asked for */
  char product[64]; /* the kernel of this call */
  bool chooses;     /* it is one that chooses between itself and its partner, or has a selector */
  int64_t gemms;    /* of cuBLAS, before this call */
} gpu;

/* ---- reports that come later ---- */

static struct {
  pthread_mutex_t lock;
  pthread_t thread;
  bool stop;
  int least;   /* so many are written together */
  int flushes; /* how often that happened */
  int count;
  uint64_t to[LATE];
  float strip[LATE];
} late = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline void write_report(uint64_t to, float strip, float element)
{
  esmm_choice_device *slot = esmm_cuda_pointer(to);
  slot->element = element;
  slot->strip = slot->joint = strip;
  __atomic_store_n(&slot->ready, 1, __ATOMIC_RELEASE);
}

static inline void *write_late(void *unused)
{
  (void)unused;
  for (bool stop = false; !stop;) {
    (void)nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    (void)pthread_mutex_lock(&late.lock);
    if (late.count >= late.least || late.stop) {
      for (int i = 0; i < late.count; i++)
        write_report(late.to[i], late.strip[i], late.strip[i]);
      late.flushes += late.count > 0;
      late.count = 0;
    }
    stop = late.stop;
    (void)pthread_mutex_unlock(&late.lock);
  }
  return NULL;
}

static inline void start_late(int least)
{
  late.stop = false;
  late.least = least;
  late.flushes = 0;
  assert_int_equal(pthread_create(&late.thread, NULL, write_late, NULL), 0);
}

static inline void stop_late(void)
{
  (void)pthread_mutex_lock(&late.lock);
  late.stop = true;
  (void)pthread_mutex_unlock(&late.lock);
  assert_int_equal(pthread_join(late.thread, NULL), 0);
}

static inline void report(uint64_t to, bool counts)
{
  if (!to || gpu.when == NEVER)
    return;
  if (gpu.when == AT_ONCE) {
    write_report(to, gpu.strip, gpu.element == 0.0f ? gpu.strip : counts ? gpu.element : 0.0f);
    return;
  }
  (void)pthread_mutex_lock(&late.lock);
  assert_true(late.count < LATE);
  late.to[late.count] = to;
  late.strip[late.count++] = gpu.strip;
  (void)pthread_mutex_unlock(&late.lock);
}

/* A pattern whose strips, at any height, have so many of their bits. */
static inline void count_pattern(const void *params)
{
  esmm_tally_count_params p;
  memcpy(&p, params, sizeof p);
  esmm_pattern_bit_count *count = esmm_cuda_pointer(p.out);
  if (gpu.counted < 0)
    return;
  for (int i = 0; i < 2; i++)
    count->folded[i] =
        (uint64_t)((double)gpu.counted * (double)esmm_ceil_div(p.strips, p.fold[i]) * 64 * (double)p.words);
  __atomic_store_n(&count->ready, p.ready, __ATOMIC_RELEASE);
}

/* Stands in for every kernel. Device memory is the host's. */
static inline void note_launch(const char *name, const void *params)
{
  if (strcmp(name, "esmm_tally_count") == 0) {
    count_pattern(params);
    return;
  }
  if (strcmp(name, "esmm_sample") == 0) {
    esmm_sample_params sample;
    memcpy(&sample, params, sizeof sample);
    gpu.samples++;
    if (gpu.overflow >= 0.0f && gpu.when == AT_ONCE) {
      esmm_choice_device *slot = esmm_cuda_pointer(sample.out);
      slot->overflow = gpu.overflow;
      slot->counted = 1;
    }
    report(sample.out, true);
    return;
  }
  (void)snprintf(gpu.product, sizeof gpu.product, "%s", name);
  gpu.chooses = false;
  if (strncmp(name, "esmm_wgmma16_", 13) == 0) {
    esmm_wgmma16_params p;
    memcpy(&p, params, sizeof p);
    gpu.chooses = p.choose || p.selector.address;
    gpu.self += p.report != 0;
    report(p.report, false);
  } else if (strncmp(name, "esmm_decode_", 12) == 0) {
    esmm_decode_params p;
    memcpy(&p, params, sizeof p);
    gpu.chooses = p.selector.address != 0;
    gpu.self += p.report != 0;
    report(p.report, false);
  }
}

/* ---- a product whose zeros the test decides ---- */

typedef struct rig {
  meter m;
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
} rig;

static inline void prepare_rig(rig *x)
{
  const esmm_prepare_opts opts = {.size = sizeof opts, .strict = 1}; /* every bit of B's is set, without a kernel */
  assert_int_equal(esmm_prepare(x->ctx, &x->b, &opts, &x->w), ESMM_OK);
}

/* The plan's estimates at a density. */
static inline double seconds_of(rig *x, const char *kernel, float strip)
{
  esmm_verdict verdicts[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS;
  const float was = gpu.strip;
  gpu.strip = strip;
  assert_int_equal(esmm_explain(x->ctx, &x->a, x->w, &x->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
  gpu.strip = was;
  for (int i = 0; i < count; i++)
    if (strcmp(verdicts[i].kernel, kernel) == 0 && verdicts[i].can_run)
      return verdicts[i].seconds;
  fail_msg("%s is not among the verdicts", kernel);
  return 0;
}

/* Times of the test's own: cuBLAS, which is the cheapest dense kernel, our own, joint without zeros and with nothing
   else. Any other kernel takes far longer. So there is no doubt what is cheapest where A is dense, or is not. */
#define LIBRARY_SECONDS 200e-6
#define DENSE_SECONDS 300e-6
#define JOINT_SECONDS 400e-6
#define ZEROS_SECONDS 30e-6
#define NEVER_SECONDS 1.0

static inline double *cost_of(rig *x, const char *kernel)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(esmm_registry_at(i)->name, kernel) == 0)
      return x->ctx->cost[i];
  fail_msg("there is no %s", kernel);
  return NULL;
}

/* These times, all of them so many times as long. */
static inline void set_costs(rig *x, double longer)
{
  for (int i = 0; i < esmm_registry_count(); i++) {
    memset(x->ctx->cost[i], 0, sizeof x->ctx->cost[i]);
    x->ctx->cost[i][ESMM_COST_TERMS - 1] = NEVER_SECONDS;
  }
  double *joint = cost_of(x, "joint_bf16_sm90a");
  cost_of(x, "cublas_bf16")[ESMM_COST_TERMS - 1] = longer * LIBRARY_SECONDS;
  cost_of(x, "dense_bf16_sm90a")[ESMM_COST_TERMS - 1] = longer * DENSE_SECONDS;
  joint[ESMM_COST_TERMS - 1] = longer * ZEROS_SECONDS;
  const double zeros = seconds_of(x, "joint_bf16_sm90a", 0);
  joint[0] = 1e-6; /* its stages, which zeros save */
  joint[0] *= (longer * JOINT_SECONDS - zeros) / (seconds_of(x, "joint_bf16_sm90a", 1) - zeros);
}

static inline void start_of(rig *x, int64_t m, int64_t k, int64_t n)
{
  *x = (rig){0};
  fake->cublas = 0;
  fake->kernel = NULL;
  x->ctx = must_create(&x->m);
  const esmm_matrix a = {.rows = m, .cols = k, .dtype = ESMM_BF16}, b = {.rows = k, .cols = n, .dtype = ESMM_BF16},
                    c = {.rows = m, .cols = n, .dtype = ESMM_BF16};
  assert_int_equal(place(x->ctx, &a, &x->a), ESMM_OK);
  assert_int_equal(place(x->ctx, &b, &x->b), ESMM_OK);
  assert_int_equal(place(x->ctx, &c, &x->c), ESMM_OK);
  prepare_rig(x);
  gpu.strip = 1.0f;
  gpu.element = 0.0f;
  gpu.overflow = -1.0f;
  gpu.when = AT_ONCE;
  fake->kernel = note_launch;
  set_costs(x, 1);
}

static inline void start(rig *x)
{
  start_of(x, M, K, N);
}

static inline void stop(rig *x)
{
  fake->kernel = NULL;
  esmm_weights_free(x->w);
  esmm_memory_free(x->ctx, x->a.data);
  esmm_memory_free(x->ctx, x->b.data);
  esmm_memory_free(x->ctx, x->c.data);
  esmm_ctx_free(x->ctx);
  assert_int_equal(x->m.live, 0);
  check_balance("what is remembered");
}

/* One call; gpu says what it launched. */
static inline void call(rig *x, const esmm_matmul_opts *opts, esmm_stats *stats)
{
  gpu.samples = gpu.self = 0;
  gpu.chooses = false;
  gpu.product[0] = '\0';
  gpu.gemms = fake->gemms;
  if (stats)
    *stats = (esmm_stats){.size = sizeof *stats};
  if (esmm_matmul(x->ctx, &x->a, x->w, &x->c, opts, stats) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(x->ctx));
  if (fake->gemms > gpu.gemms)
    (void)snprintf(gpu.product, sizeof gpu.product, "gemm");
}

/* The pattern of C, which may as well be A: the next product has it as its A. */
static inline esmm_pattern *hand_over(rig *x, float counted)
{
  esmm_pattern *pattern = NULL;
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .force = "dense_bf16_sm90a", .c_strip_rows = STRIP_ROWS, .c_pattern = &pattern};
  gpu.counted = counted;
  assert_int_equal(esmm_matmul(x->ctx, &x->a, x->w, &x->c, &opts, NULL), ESMM_OK);
  return pattern;
}

static inline bool ran_dense(void)
{
  return strcmp(gpu.product, "gemm") == 0;
}

static inline bool ran_joint(void)
{
  return strcmp(gpu.product, "esmm_wgmma16_bf16") == 0 && !gpu.chooses;
}

static inline esmm_recollection recall_of(rig *x, int64_t m)
{
  esmm_recollection r = {.size = sizeof r};
  assert_int_equal(esmm_recall(x->ctx, x->w, m, &r), ESMM_OK);
  return r;
}

static inline void expect_strips(rig *x, double strip)
{
  const esmm_recollection r = {.size = sizeof r, .strip_density_a = strip};
  assert_int_equal(esmm_expect(x->ctx, x->w, M, &r), ESMM_OK);
}

/* Calls until what is remembered is this density; the last of them has used it. */
static inline void call_until(rig *x, float strip)
{
  gpu.strip = strip;
  for (int i = 0; i < CALLS; i++) {
    call(x, NULL, NULL);
    const esmm_recollection r = recall_of(x, M);
    if (r.known && r.strip_density_a == (double)strip)
      return;
  }
  fail_msg("%g is not known after %d calls", (double)strip, CALLS);
}

#endif
