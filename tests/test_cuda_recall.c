/*
 * test_cuda_recall.c: what a GPU's plan remembers of A's densities: when a report is asked for, when it is used, what
 * then runs, and what happens where it is late, never comes or has no memory to go to. On the driver of fake_cuda.c: no
 * GPU is needed. Kernels do nothing there but what a test lets them: here they report the densities that the test says,
 * at once, later by another thread, or never.
 */
#include "cuda/cuda.h"
#include "fake_gpu.h"

#include <math.h>
#include <pthread.h>
#include <time.h>

enum { M = 512, K = 1024, N = 1024, CALLS = 96, LATE = 512 };

typedef enum when { AT_ONCE, LATER, NEVER } when;

static struct {
  float strip;      /* what A's densities are */
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

static void write_report(uint64_t to, float strip)
{
  esmm_choice_device *slot = esmm_cuda_pointer(to);
  slot->element = slot->strip = slot->joint = strip;
  __atomic_store_n(&slot->ready, 1, __ATOMIC_RELEASE);
}

static void *write_late(void *unused)
{
  (void)unused;
  for (bool stop = false; !stop;) {
    (void)nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    (void)pthread_mutex_lock(&late.lock);
    if (late.count >= late.least || late.stop) {
      for (int i = 0; i < late.count; i++)
        write_report(late.to[i], late.strip[i]);
      late.flushes += late.count > 0;
      late.count = 0;
    }
    stop = late.stop;
    (void)pthread_mutex_unlock(&late.lock);
  }
  return NULL;
}

static void start_late(int least)
{
  late.stop = false;
  late.least = least;
  late.flushes = 0;
  assert_int_equal(pthread_create(&late.thread, NULL, write_late, NULL), 0);
}

static void stop_late(void)
{
  (void)pthread_mutex_lock(&late.lock);
  late.stop = true;
  (void)pthread_mutex_unlock(&late.lock);
  assert_int_equal(pthread_join(late.thread, NULL), 0);
}

static void report(uint64_t to)
{
  if (!to || gpu.when == NEVER)
    return;
  if (gpu.when == AT_ONCE) {
    write_report(to, gpu.strip);
    return;
  }
  (void)pthread_mutex_lock(&late.lock);
  assert_true(late.count < LATE);
  late.to[late.count] = to;
  late.strip[late.count++] = gpu.strip;
  (void)pthread_mutex_unlock(&late.lock);
}

/* Stands in for every kernel. Device memory is the host's. */
static void note_launch(const char *name, const void *params)
{
  if (strcmp(name, "esmm_sample") == 0) {
    esmm_sample_params sample;
    memcpy(&sample, params, sizeof sample);
    gpu.samples++;
    report(sample.out);
    return;
  }
  (void)snprintf(gpu.product, sizeof gpu.product, "%s", name);
  gpu.chooses = false;
  if (strncmp(name, "esmm_wgmma16_", 13) == 0) {
    esmm_wgmma16_params p;
    memcpy(&p, params, sizeof p);
    gpu.chooses = p.choose || p.selector.address;
    gpu.self += p.report != 0;
    report(p.report);
  } else if (strncmp(name, "esmm_decode_", 12) == 0) {
    esmm_decode_params p;
    memcpy(&p, params, sizeof p);
    gpu.chooses = p.selector.address != 0;
    gpu.self += p.report != 0;
    report(p.report);
  }
}

/* ---- a product whose zeros the test decides ---- */

typedef struct rig {
  meter m;
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
} rig;

static void prepare_rig(rig *x)
{
  const esmm_prepare_opts opts = {.size = sizeof opts, .strict = 1}; /* every bit of B's is set, without a kernel */
  assert_int_equal(esmm_prepare(x->ctx, &x->b, &opts, &x->w), ESMM_OK);
}

/* The plan's estimates at a density. */
static double seconds_of(rig *x, const char *kernel, float strip)
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
   else. Any other kernel takes far longer. */
#define LIBRARY_SECONDS 20e-6
#define DENSE_SECONDS 30e-6
#define JOINT_SECONDS 40e-6
#define ZEROS_SECONDS 3e-6

static void set_costs(rig *x)
{
  double *joint = NULL;
  for (int i = 0; i < esmm_registry_count(); i++) {
    const char *name = esmm_registry_at(i)->name;
    double *cost = x->ctx->cost[i];
    memset(cost, 0, sizeof x->ctx->cost[i]);
    cost[ESMM_COST_TERMS - 1] = strcmp(name, "cublas_bf16") == 0        ? LIBRARY_SECONDS
                                : strcmp(name, "dense_bf16_sm90a") == 0 ? DENSE_SECONDS
                                : strcmp(name, "joint_bf16_sm90a") == 0 ? ZEROS_SECONDS
                                                                        : 1.0;
    if (strcmp(name, "joint_bf16_sm90a") == 0)
      joint = cost;
  }
  assert_non_null(joint);
  const double zeros = seconds_of(x, "joint_bf16_sm90a", 0);
  joint[0] = 1e-6; /* its stages, which zeros save */
  joint[0] *= (JOINT_SECONDS - zeros) / (seconds_of(x, "joint_bf16_sm90a", 1) - zeros);
}

static void start_of(rig *x, int64_t m, int64_t k, int64_t n)
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
  gpu.when = AT_ONCE;
  fake->kernel = note_launch;
  set_costs(x);
}

static void start(rig *x)
{
  start_of(x, M, K, N);
}

static void stop(rig *x)
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
static void call(rig *x, const esmm_matmul_opts *opts, esmm_stats *stats)
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

static bool ran_dense(void)
{
  return strcmp(gpu.product, "gemm") == 0;
}

static bool ran_joint(void)
{
  return strcmp(gpu.product, "esmm_wgmma16_bf16") == 0 && !gpu.chooses;
}

static esmm_recollection recall_of(rig *x, int64_t m)
{
  esmm_recollection r = {.size = sizeof r};
  assert_int_equal(esmm_recall(x->ctx, x->w, m, &r), ESMM_OK);
  return r;
}

static void expect_strips(rig *x, double strip)
{
  const esmm_recollection r = {.size = sizeof r, .strip_density_a = strip};
  assert_int_equal(esmm_expect(x->ctx, x->w, M, &r), ESMM_OK);
}

/* How often such products report, and after how many calls that is used: as the design says. */
typedef struct pace {
  int sample, self, delay;
} pace;

static int between(double calls, int least, int most)
{
  return (int)fmin(fmax(ceil(calls), least), most);
}

static pace pace_of(rig *x)
{
  const double dense = fmin(seconds_of(x, "cublas_bf16", 1), seconds_of(x, "dense_bf16_sm90a", 1));
  const pace p = {.sample = between(2e-6 / (0.005 * dense), 1, 32),
                  .self = between(1e-6 / (0.005 * dense), 1, 16),
                  .delay = between(150e-6 / dense, 2, 16)};
  assert_true(p.delay < p.sample && p.sample > 2 && 2 * p.sample + p.delay < CALLS); /* or these tests show nothing */
  return p;
}

/* ---- when a report is used ---- */

static void zeros_are_used_after_the_delay(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const pace p = pace_of(&x);
  for (int i = 0; i < p.sample + p.delay; i++) {
    gpu.strip = i == 0 ? 1.0f : 0.05f;
    call(&x, NULL, NULL);
    if (gpu.samples + gpu.self != (i % p.sample == 0))
      fail_msg("call %d: %d samples, %d reports of the kernel, one every %d calls", i, gpu.samples, gpu.self, p.sample);
    if (i >= p.delay && !ran_dense())
      fail_msg("call %d of %d + %d: %s", i, p.sample, p.delay, gpu.product);
    assert_int_equal(recall_of(&x, M).known, i >= p.delay);
  }
  esmm_recollection r = recall_of(&x, M);
  assert_true(r.strip_density_a == 1 && r.reports == 1 && r.calls == p.sample + p.delay);
  call(&x, NULL, NULL);
  if (!ran_joint())
    fail_msg("call %d + %d: %s", p.sample, p.delay, gpu.product);
  r = recall_of(&x, M);
  assert_true(fabs(r.strip_density_a - 0.05) < 1e-6 && fabs(r.joint_density - 0.05) < 1e-6);
  assert_true(r.strip_rows == ESMM_TILE && r.reports == 2 && r.known);
  assert_false(recall_of(&x, 8).known); /* another class of rows */
  stop(&x);
}

/* A kernel that reports itself does so more often than it would be sampled, and is not sampled. */
static void skipping_kernels_report(void **state)
{
  (void)state;
  rig x;
  bool itself = false;
  start(&x);
  const pace p = pace_of(&x);
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(esmm_registry_at(i)->name, "joint_bf16_sm90a") == 0)
      itself = esmm_cuda_about(esmm_registry_at(i))->reports;
  gpu.strip = 0.05f;
  expect_strips(&x, 0.05);
  for (int i = 0; i <= 2 * p.sample; i++) {
    call(&x, NULL, NULL);
    assert_true(ran_joint());
    if (gpu.self != (itself && i % p.self == 0) || gpu.samples != (!itself && i % p.sample == 0))
      fail_msg("call %d: %d samples, %d reports of the kernel", i, gpu.samples, gpu.self);
  }
  assert_int_equal(recall_of(&x, M).reports, 1 + (2 * p.sample - p.delay) / (itself ? p.self : p.sample));
  stop(&x);
}

/* The products of a sequence of calls whose zeros come and go. */
static void record(rig *x, bool with_stats, char log[CALLS][64])
{
  uint32_t random = 12345;
  for (int i = 0; i < CALLS; i++) {
    esmm_stats stats;
    random = random * 1664525u + 1013904223u;
    gpu.strip = i % 24 < 12 ? 0.9f + 0.1f * (float)(random >> 28) / 16.0f : 0.04f;
    call(x, NULL, with_stats ? &stats : NULL);
    (void)snprintf(log[i], sizeof log[i], "%s%s", gpu.product, gpu.chooses ? ", chooses" : "");
  }
}

static void same_calls_same_kernels(void **state)
{
  (void)state;
  static char first[CALLS][64], again[CALLS][64];
  int dense = 0, joint = 0;
  for (int way = 0; way < 4; way++) { /* first, again, with late reports, with statistics */
    rig x;
    reset();
    start(&x);
    gpu.when = way == 2 ? LATER : AT_ONCE;
    if (way == 2)
      start_late(1);
    record(&x, way == 3, way == 0 ? first : again);
    if (way == 2)
      stop_late();
    stop(&x);
    for (int i = 0; way > 0 && i < CALLS; i++)
      if (strcmp(first[i], again[i]) != 0)
        fail_msg("call %d: first %s, then %s (way %d)", i, first[i], again[i], way);
  }
  for (int i = 0; i < CALLS; i++) {
    dense += strcmp(first[i], "gemm") == 0;
    joint += strcmp(first[i], "esmm_wgmma16_bf16") == 0;
  }
  assert_true(dense > 10 && joint > 10);
}

static void late_reports_are_waited_for(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const pace p = pace_of(&x);
  start_late(1);
  gpu.when = LATER;
  gpu.strip = 0.05f;
  for (int i = 0; i <= p.delay; i++)
    call(&x, NULL, NULL);
  assert_true(ran_joint() && recall_of(&x, M).known);
  stop_late();
  stop(&x);
}

static void missing_reports_are_given_up(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const pace p = pace_of(&x);
  char unknown[64];
  gpu.when = NEVER;
  call(&x, NULL, NULL);
  (void)snprintf(unknown, sizeof unknown, "%s", gpu.product);
  for (int i = 1; i < p.delay; i++)
    call(&x, NULL, NULL);
  const double begun = esmm_now();
  call(&x, NULL, NULL);
  const double waited = esmm_now() - begun;
  assert_true(waited > 1.5 && waited < 10);
  gpu.when = AT_ONCE;
  gpu.strip = 0.05f;
  for (int i = 0; i < CALLS; i++) {
    call(&x, NULL, NULL);
    assert_int_equal(gpu.samples + gpu.self, 0);
    assert_string_equal(gpu.product, unknown);
  }
  esmm_stats stats;
  call(&x, NULL, &stats);
  assert_non_null(strstr(stats.reason, "a report never came: "));
  assert_false(recall_of(&x, M).known);
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  stop(&x);
}

/* ---- what a call says ---- */

static void reasons_and_explanations(void **state)
{
  (void)state;
  rig x;
  esmm_stats stats;
  start(&x);
  const pace p = pace_of(&x);
  gpu.strip = 0.05f;
  call(&x, NULL, &stats);
  assert_non_null(strstr(stats.reason, "nothing remembered yet: "));
  for (int i = 1; i < p.delay; i++)
    call(&x, NULL, NULL);
  esmm_verdict verdicts[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS;
  assert_int_equal(esmm_explain(x.ctx, &x.a, x.w, &x.c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
  assert_string_equal(verdicts[0].kernel, "joint_bf16_sm90a");
  assert_true(verdicts[0].chosen);
  call(&x, NULL, &stats);
  assert_string_equal(stats.kernel, "joint_bf16_sm90a");
  const char *const parts[] = {"remembered from 1 call: strips 5 %; cheapest of ", " ms, then "};
  for (int i = 0; i < 2; i++)
    if (!strstr(stats.reason, parts[i]) || !strstr(verdicts[0].text, parts[i]))
      fail_msg("'%s' is not in '%s', or not in '%s'", parts[i], stats.reason, verdicts[0].text);
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  assert_true(!recall_of(&x, M).known && recall_of(&x, M).calls == 0);
  expect_strips(&x, 0.125);
  call(&x, NULL, &stats);
  assert_non_null(strstr(stats.reason, "expected: strips 12.5 %; "));
  stop(&x);
}

/* Near the line the kernel stays; 3 % are enough to change it. */
static void kernels_do_not_flip(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const pace p = pace_of(&x);
  const double dense = seconds_of(&x, "cublas_bf16", 1), base = seconds_of(&x, "joint_bf16_sm90a", 0);
  const double slope = seconds_of(&x, "joint_bf16_sm90a", 1) - base;
  const struct {
    double ratio; /* of joint's time and cuBLAS's */
    bool joint;
  } steps[] = {{1.1, false}, {0.98, false}, {0.96, true}, {0.98, true}, {1.02, true}, {1.04, false}};
  const int count = (int)(sizeof steps / sizeof *steps);
  assert_true(count <= p.delay); /* no report is taken meanwhile */
  for (int i = 0; i < count; i++) {
    expect_strips(&x, (steps[i].ratio * dense - base) / slope);
    call(&x, NULL, NULL);
    if (!(steps[i].joint ? ran_joint() : ran_dense()))
      fail_msg("joint takes %g times as long as cuBLAS: %s", steps[i].ratio, gpu.product);
  }
  stop(&x);
}

/* ---- calls that do not count ---- */

static void captured_calls_change_nothing(void **state)
{
  (void)state;
  static char stream;
  rig x;
  start(&x);
  call(&x, NULL, NULL); /* scratch, handle */
  expect_strips(&x, 0.05);
  call(&x, NULL, NULL);
  assert_true(ran_joint());
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  assert_int_equal(esmm_ctx_set_stream(x.ctx, &stream), ESMM_OK);
  call(&x, NULL, NULL);
  for (int known = 0; known < 3; known++) {
    if (known)
      expect_strips(&x, known == 1 ? 0.05 : 1.0);
    const esmm_recollection before = recall_of(&x, M);
    fake->captured = &stream;
    call(&x, NULL, NULL);
    fake->captured = NULL;
    const esmm_recollection after = recall_of(&x, M);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(gpu.samples + gpu.self, 0);
    if (known)
      assert_true(known == 1 ? ran_joint() : ran_dense());
  }
  assert_int_equal(esmm_ctx_set_stream(x.ctx, NULL), ESMM_OK);
  stop(&x);
}

/* A library that was never started cannot be started while a graph is captured, whatever is remembered. */
static void captured_calls_start_no_library(void **state)
{
  (void)state;
  static char stream;
  rig x;
  start(&x);
  expect_strips(&x, 0.05);
  assert_int_equal(esmm_ctx_set_stream(x.ctx, &stream), ESMM_OK);
  call(&x, NULL, NULL);
  assert_true(ran_joint() && fake->handles == 0);
  expect_strips(&x, 1.0);
  fake->captured = &stream;
  call(&x, NULL, NULL);
  fake->captured = NULL;
  assert_string_equal(gpu.product, "esmm_wgmma16_bf16");
  assert_int_equal(fake->handles, 0);
  call(&x, NULL, NULL);
  assert_true(ran_dense() && fake->handles == 1);
  assert_int_equal(esmm_ctx_set_stream(x.ctx, NULL), ESMM_OK);
  stop(&x);
}

/* Operands in host memory are copied first; the rest is the same. */
static void host_operands_are_remembered(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const pace p = pace_of(&x);
  rig host = x;
  host.a = th_matrix_alloc(M, K, ESMM_BF16);
  host.c = th_matrix_alloc(M, N, ESMM_BF16);
  gpu.strip = 0.05f;
  for (int i = 0; i <= p.delay; i++) {
    call(i % 2 ? &x : &host, NULL, NULL);
    assert_int_equal(gpu.samples + gpu.self, i == 0);
    assert_int_equal(ran_joint(), i == p.delay);
  }
  free(host.a.data);
  free(host.c.data);
  stop(&x);
}

static void forced_and_strict_calls_are_not_remembered(void **state)
{
  (void)state;
  rig x;
  start(&x);
  expect_strips(&x, 0.01);
  call(&x, &(esmm_matmul_opts){.size = sizeof(esmm_matmul_opts), .strict = 1}, NULL);
  assert_true(ran_dense() && gpu.samples == 0);
  call(&x, &(esmm_matmul_opts){.size = sizeof(esmm_matmul_opts), .force = "dense_bf16_sm90a"}, NULL);
  assert_string_equal(gpu.product, "esmm_wgmma16_bf16");
  assert_int_equal(gpu.samples, 0);
  assert_int_equal(recall_of(&x, M).calls, 0);
  stop(&x);
}

static void remembering_can_be_turned_off(void **state)
{
  (void)state;
  rig x;
  setenv("ESMM_REMEMBER", "0", 1);
  start(&x);
  unsetenv("ESMM_REMEMBER");
  gpu.strip = 0.05f;
  for (int i = 0; i < CALLS; i++) {
    call(&x, NULL, NULL);
    assert_int_equal(gpu.samples + gpu.self, 0);
  }
  assert_int_equal(fake->pinned, 0);
  assert_true(recall_of(&x, M).known == 0 && recall_of(&x, M).calls == 0);
  const esmm_recollection in = {.size = sizeof in};
  th_expect("expect", esmm_expect(x.ctx, x.w, M, &in), ESMM_ERR_UNSUPPORTED, esmm_ctx_error(x.ctx), "remember", "-1");
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  stop(&x);
}

static void pinned_memory_is_refused(void **state)
{
  (void)state;
  static const char *const calls[] = {"cuMemHostAlloc", "cuMemHostGetDevicePointer"};
  for (int i = 0; i < 2; i++) {
    rig x;
    esmm_stats stats;
    reset();
    start(&x);
    fake->fail_call = calls[i];
    fake->result = CUDA_ERROR_OUT_OF_MEMORY;
    for (int j = 0; j < CALLS; j++) {
      call(&x, NULL, NULL);
      assert_int_equal(gpu.samples + gpu.self, 0);
    }
    fake->fail_call = NULL; /* it is not tried again */
    call(&x, NULL, &stats);
    assert_non_null(strstr(stats.reason, "no pinned memory to remember: "));
    assert_true(!recall_of(&x, M).known && fake->pinned == 0);
    expect_strips(&x, 0.05);
    call(&x, NULL, NULL);
    assert_true(ran_joint());
    stop(&x);
  }
}

/* ---- tables ---- */

/* More weights than there are entries: the oldest go, and their reports are waited for before they do. */
static void more_weights_than_entries(void **state)
{
  (void)state;
  enum { WEIGHTS = 300 };
  static esmm_weights *w[WEIGHTS];
  rig x;
  start_of(&x, 8, 64, 64);
  esmm_weights_free(x.w);
  start_late(ESMM_RECALL_ENTRIES); /* no report comes until the table is full */
  gpu.when = LATER;
  for (int i = 0; i < WEIGHTS; i++) {
    prepare_rig(&x);
    w[i] = x.w;
    call(&x, NULL, NULL);
    (void)pthread_mutex_lock(&late.lock);
    const int flushes = late.flushes;
    (void)pthread_mutex_unlock(&late.lock);
    if (i >= ESMM_RECALL_ENTRIES && flushes == 0)
      fail_msg("weights %d have the entry of others whose report is still to come", i);
  }
  stop_late();
  for (int i = 0; i < WEIGHTS; i++) {
    x.w = w[i];
    assert_int_equal(recall_of(&x, 8).calls, i >= WEIGHTS - ESMM_RECALL_ENTRIES);
  }
  for (int i = 0; i < WEIGHTS - 1; i++)
    esmm_weights_free(w[i]);
  stop(&x);
}

/* What was remembered of weights that are gone is not taken for what lies there now. */
static void weights_at_the_same_address(void **state)
{
  (void)state;
  rig x;
  int same = 0;
  start(&x);
  for (int i = 0; i < 3; i++) {
    const esmm_weights *old = x.w;
    expect_strips(&x, 0.05);
    call(&x, NULL, NULL);
    assert_true(ran_joint());
    esmm_weights_free(x.w);
    prepare_rig(&x);
    same += x.w == old;
    assert_true(!recall_of(&x, M).known && recall_of(&x, M).calls == 0);
  }
  print_message("# the same address %d times of 3\n", same);
  stop(&x);
}

/* A library that does not start leaves the plan without it, and the same call with one number. */
static void library_does_not_start(void **state)
{
  (void)state;
  rig x;
  start(&x);
  fake->cublas = NO_CUBLAS;
  expect_strips(&x, 1.0);
  for (int i = 0; i < 3; i++) {
    call(&x, NULL, NULL);
    assert_string_equal(gpu.product, "esmm_wgmma16_bf16");
    assert_int_equal(recall_of(&x, M).calls, i + 1);
  }
  stop(&x);
}

/* The second call of a shape asks no kernel again, and few things of the driver. */
static void second_call_is_short(void **state)
{
  (void)state;
  rig x;
  start(&x);
  for (int i = 0; i < 41; i++) /* the next one is not to report */
    call(&x, NULL, NULL);
  const int64_t made = esmm_recall_verdicts_made(x.ctx), before = fake->calls;
  call(&x, NULL, NULL);
  assert_true(ran_dense());
  assert_int_equal(esmm_recall_verdicts_made(x.ctx), made);
  /* The current context, asked for, set and put back; capture; stream. cuBLAS is apart. */
  assert_true(fake->calls - before <= 5);
  x.a.rows = x.c.rows = M - 1;
  call(&x, NULL, NULL);
  assert_int_equal(esmm_recall_verdicts_made(x.ctx), made + 1);
  x.a.rows = x.c.rows = M;
  stop(&x);
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(zeros_are_used_after_the_delay),
                                    TEST(skipping_kernels_report),
                                    TEST(same_calls_same_kernels),
                                    TEST(late_reports_are_waited_for),
                                    TEST(missing_reports_are_given_up),
                                    TEST(reasons_and_explanations),
                                    TEST(kernels_do_not_flip),
                                    TEST(captured_calls_change_nothing),
                                    TEST(captured_calls_start_no_library),
                                    TEST(host_operands_are_remembered),
                                    TEST(forced_and_strict_calls_are_not_remembered),
                                    TEST(remembering_can_be_turned_off),
                                    TEST(pinned_memory_is_refused),
                                    TEST(more_weights_than_entries),
                                    TEST(weights_at_the_same_address),
                                    TEST(library_does_not_start),
                                    TEST(second_call_is_short)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda recall, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda recall", with, NULL, NULL);
}
