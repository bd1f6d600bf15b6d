/*
 * test_cuda_learn.c: a GPU context learns what kernels take, on the driver of fake_cuda.c with a clock: machines on
 * which each kernel takes 0.5 to 2 times what is predicted for it, with noise, outliers and a drift. The products are
 * those of the GPU record's sweep; their densities are known from the start, as after esmm_expect.
 *
 * Which kernel a call took is told by what it launches: each is forced once, and what it launches is noted.
 */
#include "choose/measured.h"
#include "cuda/device/device.h"
#include "esmm_tools.h"
#include "fake_gpu.h"
#include "fake_reports.h"

#include <pthread.h>

enum { CALLS = 32, MOST = 24, MACHINES = 20 };

#define NOISE 0.05
#define OUTLIER_EVERY 50
#define DRIFT 0.10 /* over the calls of one machine, up and down again */

/* ---- one product ---- */

typedef struct way {
  uint64_t launches; /* a hash of what is launched */
  double predicted, takes;
  char name[48];
} way;

typedef struct rig {
  meter meter;
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
  way ways[MOST];
  int count;
  const char *what;
} rig;

#define SAMPLE 12e-6

static fake_zeros zeros;
static double sampling;   /* seconds of sampling launches that no event has come behind yet */
static uint64_t launches; /* of the call that is being made */
static const rig *clocked;
static th_rng rng = {.state = 37};
static int64_t asked;
static double chosen; /* what the kernel of the last call takes, but for noise */

static double uniform(void)
{
  return th_unit(&rng);
}

static void note(const char *name, const unsigned *grid)
{
  for (; *name; name++)
    launches = (launches ^ (unsigned char)*name) * 1099511628211u;
  for (int i = 0; grid && i < 3; i++)
    launches = (launches ^ grid[i]) * 1099511628211u;
}

/* B has no zeros. */
static void fill_b(const void *params)
{
  esmm_prepare_bits_params p;
  memcpy(&p, params, sizeof p);
  esmm_prepare_found *found = esmm_cuda_pointer(p.found);
  found->nonzero = (uint64_t)(p.k * p.strips * ESMM_STRIP);
  found->set = (uint64_t)(p.k * p.strips);
  found->tile_set = (uint64_t)(p.k * esmm_ceil_div(p.strips, ESMM_TILE / ESMM_STRIP));
}

static void take_launch(const char *name, const void *params)
{
  fake_answer(&zeros, name, params);
  if (strcmp(name, "esmm_prepare_bits") == 0)
    fill_b(params);
  if (strcmp(name, "esmm_sample") == 0) {
    sampling += SAMPLE;
    return;
  }
  note(name, fake->launch.grid);
  if (strncmp(name, "esmm_wgmma16_", 13) == 0) { /* dense and joint */
    esmm_wgmma16_params p;
    memcpy(&p, params, sizeof p);
    launches += (uint64_t)p.mode + 1;
  }
}

static void take_gemm(const char *call, const fake_gemm *g)
{
  (void)g;
  note(call, NULL);
}

static const way *way_of(const rig *x)
{
  for (int i = 0; i < x->count; i++)
    if (x->ways[i].launches == launches)
      return &x->ways[i];
  return NULL;
}

/* What was launched since the last event takes so long; nothing, where nothing was. */
static double takes(void)
{
  const double before = sampling;
  const way *mine = launches ? way_of(clocked) : NULL;
  launches = 0;
  sampling = 0;
  if (!mine)
    return before;
  chosen = mine->takes;
  const double drift = 1 + DRIFT * sin((double)asked++ / 40.0);
  const double outlier = th_below(&rng, OUTLIER_EVERY) == 0 ? 10 : 1;
  return before + mine->takes * drift * (1 + NOISE * (2 * uniform() - 1)) * outlier;
}

static void must(const rig *x, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", x->what, esmm_ctx_error(x->ctx));
}

static esmm_matrix matrix(const rig *x, int64_t rows, int64_t cols)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .ld = cols, .dtype = ESMM_BF16, .place = ESMM_DEVICE};
  must(x, esmm_memory_alloc(x->ctx, (size_t)(rows * cols * 2), &m.data));
  return m;
}

static void call(rig *x, const char *force)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  must(x, esmm_matmul(x->ctx, &x->a, x->w, &x->c, &opts, NULL));
}

/* Forgets what was learnt, and says again how dense A is. */
static void start_anew(rig *x)
{
  const esmm_recollection known = {.size = sizeof known,
                                   .density_a = zeros.element,
                                   .strip_density_a = fake_strips(&zeros, ESMM_TILE),
                                   .strip_rows = ESMM_TILE};
  fake->takes = NULL;
  fake->host = INFINITY; /* what is under way has ended, and the next call takes its times */
  call(x, NULL);
  fake->host = fake->gpu = 0;
  must(x, esmm_forget(x->ctx));
  esmm_measured_clear();
  must(x, esmm_expect(x->ctx, x->w, zeros.m, &known));
}

/* Every kernel that auto chooses from: what it launches, and what it is predicted to take. */
static void find_ways(rig *x)
{
  esmm_verdict all[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS;
  must(x, esmm_explain(x->ctx, &x->a, x->w, &x->c, NULL, all, sizeof all[0], &count));
  for (int i = 0; i < count && x->count < MOST; i++) {
    if (!all[i].can_run || !all[i].competes)
      continue;
    way *each = &x->ways[x->count++];
    (void)snprintf(each->name, sizeof each->name, "%s", all[i].kernel);
    each->predicted = all[i].seconds;
    launches = 0;
    call(x, all[i].kernel);
    each->launches = launches;
    launches = 0;
  }
  assert_true(x->count > 1);
}

static void make(rig *x, int64_t m, int64_t n, int64_t k, double density, int deterministic)
{
  *x = (rig){.what = "a product of the sweep"};
  reset();
  fake->cublas = 0;
  fake->memory = (size_t)1 << 40;
  fake->kernel = take_launch;
  fake->gemm = take_gemm;
  zeros = (fake_zeros){.m = m, .strip = ESMM_TILE, .element = density, .density_b = 1};
  x->meter.allocator = (esmm_allocator){.alloc = meter_alloc, .free = meter_free, .user = &x->meter};
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = "cuda",
                              .threads = 1,
                              .allocator = &x->meter.allocator,
                              .no_tuning_cache = 1,
                              .deterministic = deterministic};
  assert_int_equal(esmm_ctx_create(&x->ctx, &opts), ESMM_OK);
  x->a = matrix(x, m, k);
  x->b = matrix(x, k, n);
  x->c = matrix(x, m, n);
  must(x, esmm_prepare(x->ctx, &x->b, NULL, &x->w));
  start_anew(x);
  find_ways(x);
}

static void unmake(rig *x)
{
  fake->takes = NULL;
  fake->kernel = NULL;
  fake->gemm = NULL;
  esmm_memory_free(x->ctx, x->a.data);
  esmm_memory_free(x->ctx, x->b.data);
  esmm_memory_free(x->ctx, x->c.data);
  esmm_weights_free(x->w);
  esmm_ctx_free(x->ctx);
  esmm_measured_clear();
  assert_int_equal(x->meter.live, 0);
  check_balance(x->what);
}

/* Another machine. */
static void draw_machine(rig *x)
{
  for (int i = 0; i < x->count; i++)
    x->ways[i].takes = x->ways[i].predicted * exp2(2 * uniform() - 1);
}

static double best_of(const rig *x)
{
  double best = INFINITY;
  for (int i = 0; i < x->count; i++)
    best = fmin(best, x->ways[i].takes);
  return best;
}

static void begin_clock(const rig *x)
{
  clocked = x;
  asked = 0;
  launches = 0;
  fake->host = fake->gpu = 0;
  fake->per_call = 2e-7;
  fake->takes = takes;
}

/* The queue is never longer than one call: the host goes on when the last call but one has ended. */
typedef struct ran {
  double total, first, last;
} ran;

/* One call; where no event was behind its launches, they are put into the queue here. */
static void queue_call(rig *x)
{
  call(x, NULL);
  fake->gpu = fmax(fake->gpu, fake->host) + takes();
}

static ran run_calls(rig *x, int calls, int ahead)
{
  enum { AHEAD = 64 };
  double ends[AHEAD] = {0};
  ran r = {0};
  begin_clock(x);
  for (int i = 0; i < calls; i++) {
    queue_call(x);
    r.total += chosen;
    r.first += i < 2 ? chosen : 0; /* nothing is known by then */
    r.last = chosen;
    ends[i % AHEAD] = fake->gpu;
    if (ahead > 0 && i >= ahead)
      fake->host = fmax(fake->host, ends[(i - ahead) % AHEAD]);
  }
  return r;
}

/* ---- the sweep ---- */

static const int64_t sides[][2] = {{14336, 4096}, {4096, 14336}, {4096, 4096}},
                     rows[] = {1, 4, 16, 64, 256, 1024, 4096};
static const double densities[] = {1, .9, .75, .5, .25, .125, .05};

typedef struct sums {
  int runs, wrong, dear;
  double dearest, mean;
} sums;

static double after_learning(rig *x)
{
  double least = INFINITY;
  for (int more = 0; more < 4; more++) {
    queue_call(x);
    fake->host = fake->gpu;
    least = fmin(least, chosen);
  }
  return least;
}

static void learn_one(int side, int row, int density, int machines, sums *s)
{
  rig x;
  make(&x, rows[row], sides[side][0], sides[side][1], densities[density], -1);
  for (int machine = 0; machine < machines; machine++) {
    start_anew(&x);
    draw_machine(&x);
    const double best = best_of(&x);
    const int64_t waited = fake->synchronizations;
    const ran first = run_calls(&x, CALLS, 1);
    assert_int_equal(fake->synchronizations, waited);
    const double cost = (first.total - (first.first - 2 * best)) / (CALLS * best);
    s->dear += cost > 1.10;
    s->dearest = fmax(s->dearest, cost);
    s->mean += cost;
    s->runs++;
    const double least = after_learning(&x); /* of four calls, of which one may be a trial */
    s->wrong += least > 1.05 * best;
  }
  unmake(&x);
}

static void every_machine_is_learnt_within_32_calls(void **state)
{
  (void)state;
  const int machines = th_env_int("ESMM_TEST_CASES", 0) ? 4 : MACHINES;
  sums s = {0};
  for (int side = 0; side < 3; side++)
    for (int row = 0; row < 7; row++)
      for (int density = 0; density < 7; density++)
        learn_one(side, row, density, machines, &s);
  print_message(
      "# %d machines and products: %d not within 1.05 of the best, %d over 1.10 at first, mean %.3f, most %.2f\n",
      s.runs, s.wrong, s.dear, s.mean / s.runs, s.dearest);
  assert_true(s.wrong <= 2 + s.runs * 3 / 200); /* by another seed 0.7 to 1.1 % */
  assert_true(s.mean / s.runs <= 1.10);
}

/* A call in which kernels are timed in turns finds the best, and costs no later call a trial. */
static void a_timing_run_finds_the_best(void **state)
{
  (void)state;
  int wrong = 0, runs = 0;
  for (int row = 0; row < 7; row++)
    for (int density = 0; density < 7; density += 2) {
      rig x;
      make(&x, rows[row], 4096, 14336, densities[density], -1);
      for (int machine = 0; machine < MACHINES; machine++) {
        start_anew(&x);
        draw_machine(&x);
        begin_clock(&x);
        must(&x, esmm_tune_weights(x.ctx, &x.a, x.w, &x.c, NULL));
        (void)takes(); /* its last call */
        queue_call(&x);
        wrong += chosen > 1.05 * best_of(&x);
        runs++;
      }
      unmake(&x);
    }
  print_message("# %d machines and products: %d not within 1.05 of the best\n", runs, wrong);
  assert_true(wrong <= runs / 50);
}

static void a_timing_run_refuses_what_it_cannot_do(void **state)
{
  (void)state;
  rig x;
  int stream;
  make(&x, 64, 4096, 4096, .25, -1);
  const float beta = 1;
  const esmm_matmul_opts adds = {.size = sizeof adds, .beta = &beta},
                         forced = {.size = sizeof forced, .force = "joint"};
  assert_int_equal(esmm_tune_weights(NULL, &x.a, x.w, &x.c, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_tune_weights(x.ctx, &x.a, x.w, &x.c, &adds), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_tune_weights(x.ctx, &x.a, x.w, &x.c, &forced), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_tune_weights(x.ctx, NULL, x.w, &x.c, NULL), ESMM_ERR_ARGUMENT);
  must(&x, esmm_ctx_set_stream(x.ctx, &stream));
  const int64_t launched = fake->launches;
  fake->captured = &stream;
  assert_int_equal(esmm_tune_weights(x.ctx, &x.a, x.w, &x.c, NULL), ESMM_ERR_UNSUPPORTED);
  assert_int_equal(fake->launches, launched);
  fake->captured = NULL;
  must(&x, esmm_ctx_set_stream(x.ctx, NULL));
  unmake(&x);
  make(&x, 64, 4096, 4096, .25, 1);
  assert_int_equal(esmm_tune_weights(x.ctx, &x.a, x.w, &x.c, NULL), ESMM_ERR_UNSUPPORTED);
  unmake(&x);
}

/* How many times all kernels together were measured. */
static int64_t learnt(const rig *x)
{
  return x->ctx->learnt;
}

/* What it took to fail says nothing of a kernel. */
static void failed_calls_are_not_learnt(void **state)
{
  (void)state;
  enum { OUT_OF_RESOURCES = 701 };
  rig x;
  int failed = 0, worked = 0;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  begin_clock(&x);
  fake->result = OUT_OF_RESOURCES;
  for (int i = 0; i < 24; i++) { /* each second call */
    fake->fail_call = i % 2 ? "cuLaunchKernelEx" : NULL;
    const bool works = esmm_matmul(x.ctx, &x.a, x.w, &x.c, NULL, NULL) == ESMM_OK;
    fake->gpu = fmax(fake->gpu, fake->host) + takes();
    worked += works;
    failed += !works;
  }
  fake->fail_call = NULL;
  fake->result = 0;
  fake->host = INFINITY;
  call(&x, NULL);
  assert_true(failed > 0);
  assert_true(learnt(&x) > 0 && learnt(&x) <= worked);
  unmake(&x);
}

/* Statistics wait for each such call; those between are learnt from all the same. */
static void statistics_now_and_then_do_not_keep_it_from_learning(void **state)
{
  (void)state;
  rig x;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  begin_clock(&x);
  for (int i = 0; i < 64; i++) {
    esmm_stats stats = {.size = sizeof stats};
    queue_call(&x);
    if (i % 8 == 7) {
      must(&x, esmm_matmul(x.ctx, &x.a, x.w, &x.c, NULL, &stats));
      (void)takes();
    }
  }
  assert_true(learnt(&x) >= 3);
  unmake(&x);
}

/* After a phase in which no time counts, one in which they do. */
static void a_stream_that_gets_busy_is_learnt_from(void **state)
{
  (void)state;
  rig x;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  begin_clock(&x);
  for (int i = 0; i < 500; i++) {
    queue_call(&x);
    fake->host = fake->gpu + 1e-4;
  }
  const int64_t idle = learnt(&x); /* some: behind the samples of a few calls */
  for (int i = 0; i < 600; i++)
    queue_call(&x);
  fake->host = INFINITY;
  for (int i = 0; i < 300; i++)
    call(&x, NULL);
  assert_true(learnt(&x) >= idle + 3);
  unmake(&x);
}

/* It is 60 calls ahead of the GPU. */
static void a_host_far_ahead_learns_too(void **state)
{
  (void)state;
  int wrong = 0, runs = 0;
  for (int row = 0; row < 7; row += 2) {
    rig x;
    make(&x, rows[row], 4096, 14336, .25, -1);
    for (int machine = 0; machine < MACHINES; machine++) {
      start_anew(&x);
      draw_machine(&x);
      (void)run_calls(&x, 300, 60);
      wrong += after_learning(&x) > 1.05 * best_of(&x);
      runs++;
    }
    unmake(&x);
  }
  print_message("# %d machines and products: %d not within 1.05 of the best\n", runs, wrong);
  assert_true(wrong <= runs / 10);
}

/* ---- what must not change ---- */

/* The kernels of so many calls, as a hash. */
static uint64_t sequence(rig *x, int calls)
{
  uint64_t hash = 0;
  begin_clock(x);
  for (int i = 0; i < calls; i++) {
    launches = 0;
    fake->takes = NULL;
    call(x, NULL);
    hash = (hash ^ launches) * 1099511628211u;
    fake->takes = takes;
    fake->gpu = fmax(fake->gpu, fake->host) + takes();
  }
  return hash;
}

static void the_clock_changes_nothing_where_contexts_are_deterministic(void **state)
{
  (void)state;
  for (int row = 0; row < 7; row++) {
    rig x;
    make(&x, rows[row], 4096, 14336, .25, 1);
    uint64_t first = 0;
    for (int machine = 0; machine < 4; machine++) {
      start_anew(&x);
      draw_machine(&x);
      const int64_t records = fake->records;
      const uint64_t now = sequence(&x, CALLS);
      assert_true(machine == 0 || now == first);
      assert_int_equal(fake->records, records);
      first = now;
    }
    unmake(&x);
  }
}

static void memory_does_not_grow(void **state)
{
  (void)state;
  rig x;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  (void)run_calls(&x, 1000, 1);
  const int64_t live = x.meter.live, events = fake->events, blocks = fake->blocks;
  (void)run_calls(&x, th_env_int("ESMM_TEST_CASES", 0) ? 10000 : 100000, 1);
  assert_int_equal(x.meter.live, live);
  assert_int_equal(fake->blocks, blocks);
  assert_true(fake->events <= events + 128);
  unmake(&x);
}

/* What a capture in another thread forbids is not asked, and the captured call is no part of what is learnt. */
static void captures_beside_learning(void **state)
{
  (void)state;
  rig x;
  int other;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  (void)run_calls(&x, 8, 1);
  fake->captured = &other; /* another stream, in the global mode */
  (void)run_calls(&x, CALLS, 1);
  assert_true(chosen <= 1.05 * best_of(&x));
  const int64_t records = fake->records;
  must(&x, esmm_ctx_set_stream(x.ctx, &other));
  call(&x, NULL);
  assert_int_equal(fake->records, records);
  fake->captured = NULL;
  must(&x, esmm_ctx_set_stream(x.ctx, NULL));
  unmake(&x);
}

/* A stream with nothing to do gives no times, but behind a sample: the clock of the host would be in them. It is not
   asked for them often. */
static void idle_streams_are_left_alone(void **state)
{
  (void)state;
  rig x;
  make(&x, 256, 4096, 14336, .25, -1);
  draw_machine(&x);
  begin_clock(&x);
  const int64_t records = fake->records;
  for (int i = 0; i < 2000; i++) {
    queue_call(&x);
    fake->host = fake->gpu + 1e-4;
  }
  assert_true(fake->records - records < 160); /* of 2,000 calls, of which 63 sample */
  unmake(&x);
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  setenv("ESMM_REMEMBER", "1", 1);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(every_machine_is_learnt_within_32_calls),
                                    TEST(a_host_far_ahead_learns_too),
                                    TEST(a_timing_run_finds_the_best),
                                    TEST(failed_calls_are_not_learnt),
                                    TEST(statistics_now_and_then_do_not_keep_it_from_learning),
                                    TEST(a_stream_that_gets_busy_is_learnt_from),
                                    TEST(a_timing_run_refuses_what_it_cannot_do),
                                    TEST(the_clock_changes_nothing_where_contexts_are_deterministic),
                                    TEST(memory_does_not_grow),
                                    TEST(captures_beside_learning),
                                    TEST(idle_streams_are_left_alone)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda learn, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda learn", with, NULL, NULL);
}
