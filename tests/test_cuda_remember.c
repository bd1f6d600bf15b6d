/*
 * test_cuda_remember.c: a context that remembers, on a real GPU: a stream of calls whose A is dense, then nearly empty,
 * then dense again. Whatever runs, the results are right; the kernel follows A; the same calls in a fresh context give
 * the same bits; a graph keeps what was known at its capture. When reports are asked for and used is in
 * test_cuda_recall.c, which needs no GPU.
 */
#include "choose/recall.h"
#include "gpu.h"

#include <dlfcn.h>

enum { STRIP128 = 128, CHECKED_ROWS = 4, BATCH = 16 };
/* A report comes within so many calls, and is used less than so many later: by the end of a phase A is known. */
enum { PHASE = 2 * ESMM_REPORTS, PHASES = 3, CALLS = PHASES * PHASE };

typedef enum filling { DENSE, SPARSE, FILLINGS } filling;
static const double DENSITY[FILLINGS] = {1, 0.05};

static filling filling_of(int call)
{
  return call / PHASE % 2 ? SPARSE : DENSE;
}

/* ---- operands ---- */

typedef struct setting {
  esmm_matrix a[FILLINGS], b;                   /* host */
  esmm_matrix da[FILLINGS], dc[BATCH], nothing; /* device; nothing: NaN in every byte */
  esmm_weights *w;
  void *got, *want[FILLINGS]; /* C, fp32 */
  size_t bytes;
} setting;

/* Strips of so many rows have all or nothing of a k. Integers: sums are exact, and every kernel has the same. */
static void fill(esmm_matrix *m, uint64_t seed, double density, bool integers)
{
  th_rng rng = {seed};
  bool *alive = malloc((size_t)m->cols * sizeof *alive);
  assert_non_null(alive);
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t k = 0; k < m->cols; k++) {
      if (i % STRIP128 == 0)
        alive[k] = th_unit(&rng) < density;
      const double value = integers ? (double)(1 + th_below(&rng, 4)) : 0.5 + th_unit(&rng);
      th_set(m, i, k, alive[k] ? (th_below(&rng, 2) ? value : -value) : 0);
    }
  free(alive);
}

static void *room_for(size_t bytes)
{
  void *p = malloc(bytes);
  assert_non_null(p);
  return p;
}

static setting start(int64_t m, int64_t n, int64_t k, esmm_dtype dtype, bool integers)
{
  setting s = {.b = host_matrix(k, n, dtype), .bytes = (size_t)(m * n) * sizeof(float)};
  fill(&s.b, 1, 1, integers);
  expect_ok(gpu, esmm_prepare(gpu, &s.b, NULL, &s.w));
  s.got = room_for(s.bytes);
  memset(s.got, 0xff, s.bytes);
  s.nothing = device_matrix(m, n);
  assert_int_equal(calls.to_device((uintptr_t)s.nothing.data, s.got, s.bytes), 0);
  assert_int_equal(calls.stream_synchronize(NULL), 0); /* of pageable memory it only says that it was read */
  for (int i = 0; i < BATCH; i++)
    s.dc[i] = device_matrix(m, n);
  for (int i = 0; i < FILLINGS; i++) {
    s.a[i] = host_matrix(m, k, dtype);
    fill(&s.a[i], 2 + (uint64_t)i, DENSITY[i], integers);
    s.da[i] = to_device(&s.a[i]);
    s.want[i] = room_for(s.bytes);
  }
  return s;
}

static void stop(setting *s)
{
  for (int i = 0; i < FILLINGS; i++) {
    free(s->a[i].data);
    free(s->want[i]);
    esmm_memory_free(gpu, s->da[i].data);
  }
  for (int i = 0; i < BATCH; i++)
    esmm_memory_free(gpu, s->dc[i].data);
  esmm_memory_free(gpu, s->nothing.data);
  esmm_weights_free(s->w);
  free(s->b.data);
  free(s->got);
}

static void poison(const setting *s, esmm_matrix *dc)
{
  expect_ok(gpu, esmm_matrix_copy(gpu, &s->nothing, dc));
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
}

static void fetch(setting *s, const esmm_matrix *dc)
{
  assert_int_equal(calls.to_host(s->got, (uintptr_t)dc->data, s->bytes), 0);
}

/* Exact sums of a few rows, by hand. */
static void check_rows(const setting *s, filling f)
{
  const int64_t m = s->a[f].rows, n = s->b.cols, k = s->b.rows, rows[CHECKED_ROWS] = {0, m / 3, m / 2, m - 1};
  double *sum = calloc((size_t)(CHECKED_ROWS * n), sizeof *sum);
  assert_non_null(sum);
  for (int64_t p = 0; p < k; p++) {
    double x[CHECKED_ROWS], any = 0;
    for (int r = 0; r < CHECKED_ROWS; r++) {
      x[r] = th_get(&s->a[f], rows[r], p);
      any += x[r] * x[r];
    }
    for (int64_t j = 0; any > 0 && j < n; j++) {
      const double y = th_get(&s->b, p, j);
      for (int r = 0; r < CHECKED_ROWS; r++)
        sum[r * n + j] += x[r] * y;
    }
  }
  for (int64_t i = 0; i < CHECKED_ROWS * n; i++) {
    const int64_t row = rows[i / n];
    const float got = ((const float *)s->want[f])[row * n + i % n];
    if (!((double)got == sum[i]))
      fail_msg("without memory, density %g: C[%d,%d] is %g, not %g", DENSITY[f], (int)row, (int)(i % n), (double)got,
               sum[i]);
  }
  free(sum);
}

/* What a context that does not remember makes of both A's. */
static void make_want(setting *s)
{
  for (int f = 0; f < FILLINGS; f++) {
    poison(s, &s->dc[0]);
    expect_ok(gpu, esmm_matmul(gpu, &s->da[f], s->w, &s->dc[0], NULL, NULL));
    expect_ok(gpu, esmm_ctx_synchronize(gpu));
    fetch(s, &s->dc[0]);
    memcpy(s->want[f], s->got, s->bytes);
    check_rows(s, (filling)f);
  }
}

static esmm_ctx *remembering(void)
{
  char text[256] = "";
  esmm_ctx *ctx = NULL;
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = device_name,
                              .no_tuning_cache = 1,
                              .remember = 1,
                              .error = text,
                              .error_size = sizeof text};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    fail_msg("%s", text);
  return ctx;
}

/* ---- a stream of calls ---- */

/* What ran at the end of each phase. */
typedef struct ran {
  char kernel[PHASES][64];
} ran;

/* Calls from `first` on. Between them it waits for the GPU only if told to, and after the last of a phase, whose
   statistics are wanted. */
static void call_batch(esmm_ctx *ctx, setting *s, int first, bool wait, ran *names)
{
  for (int i = 0; i < BATCH; i++) {
    const int call = first + i;
    esmm_stats stats = {.size = sizeof stats};
    const bool last = (call + 1) % PHASE == 0;
    expect_ok(ctx, esmm_matmul(ctx, &s->da[filling_of(call)], s->w, &s->dc[i], NULL, last ? &stats : NULL));
    if (last) {
      (void)snprintf(names->kernel[call / PHASE], sizeof *names->kernel, "%s", stats.kernel);
      print_message("# %d x %d x %d, %s: %s, %s\n", (int)s->dc[0].rows, (int)s->b.rows, (int)s->b.cols,
                    filling_of(call) == DENSE ? "dense" : "sparse", stats.kernel, stats.reason);
    }
    if (wait)
      expect_ok(ctx, esmm_ctx_synchronize(ctx));
  }
  expect_ok(ctx, esmm_ctx_synchronize(ctx));
}

static ran check_stream(setting *s)
{
  ran names = {0};
  esmm_ctx *ctx = remembering();
  for (int first = 0; first < CALLS; first += BATCH) {
    for (int i = 0; i < BATCH; i++)
      poison(s, &s->dc[i]);
    call_batch(ctx, s, first, false, &names);
    for (int i = 0; i < BATCH; i++) {
      fetch(s, &s->dc[i]);
      if (memcmp(s->got, s->want[filling_of(first + i)], s->bytes) != 0)
        fail_msg("call %d, density %g: C is wrong", first + i, DENSITY[filling_of(first + i)]);
    }
  }
  esmm_recollection r = {.size = sizeof r};
  expect_ok(ctx, esmm_recall(ctx, s->w, s->dc[0].rows, &r));
  assert_true(r.known && r.calls == CALLS && r.reports > PHASES);
  assert_true(r.strip_density_a > 0.99); /* as in the last phase */
  esmm_ctx_free(ctx);
  return names;
}

static bool skips(const char *kernel)
{
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (strcmp(info.name, kernel) == 0)
      return info.flags & ESMM_KERNEL_SKIPS;
  }
  fail_msg("there is no kernel %s", kernel);
  return false;
}

typedef struct sizes {
  int64_t m, n, k;
  esmm_dtype dtype;
} sizes;

/* What skips is far ahead on an A of 5 %, and behind on one without zeros. */
static const sizes CLEAR[] = {{1024, 4096, 4096, ESMM_BF16}, {16, 4096, 4096, ESMM_F16}, {512, 1024, 1024, ESMM_F32}};

static void the_kernel_follows_a(void **state)
{
  (void)state;
  for (size_t i = 0; i < sizeof CLEAR / sizeof *CLEAR; i++) {
    setting s = start(CLEAR[i].m, CLEAR[i].n, CLEAR[i].k, CLEAR[i].dtype, true);
    make_want(&s);
    const ran names = check_stream(&s);
    if (skips(names.kernel[0]) || !skips(names.kernel[1]) || skips(names.kernel[2]))
      fail_msg("dense: %s, then sparse: %s, then dense: %s", names.kernel[0], names.kernel[1], names.kernel[2]);
    stop(&s);
  }
}

/* Where there is little between them, or one is best for any A. */
static void results_are_right(void **state)
{
  (void)state;
  static const sizes of[] = {
      {64, 4096, 4096, ESMM_BF16}, {1, 2048, 2048, ESMM_F16}, {200, 1001, 1000, ESMM_BF16}, {8, 2048, 2048, ESMM_F32}};
  for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
    setting s = start(of[i].m, of[i].n, of[i].k, of[i].dtype, true);
    make_want(&s);
    (void)check_stream(&s);
    stop(&s);
  }
}

/* ---- the same bits ---- */

static uint64_t hash_of(const setting *s)
{
  uint64_t hash = 0;
  const uint32_t *words = s->got;
  for (size_t i = 0; i < s->bytes / sizeof *words; i++)
    hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u;
  return hash;
}

/* Sums that are not exact show which kernel made them. In the second run the host waits after each call. */
static void check_same_bits(const sizes *of)
{
  static uint64_t hash[2][CALLS];
  ran names[2] = {0};
  setting s = start(of->m, of->n, of->k, of->dtype, false);
  for (int run = 0; run < 2; run++) {
    esmm_ctx *ctx = remembering();
    for (int call = 0; call < CALLS; call += BATCH) {
      call_batch(ctx, &s, call, run == 1, &names[run]);
      for (int i = 0; i < BATCH; i++) {
        fetch(&s, &s.dc[i]);
        hash[run][call + i] = hash_of(&s);
      }
    }
    esmm_ctx_free(ctx);
  }
  for (int call = 0; call < CALLS; call++)
    if (hash[0][call] != hash[1][call])
      fail_msg("call %d gave other bits in a second context", call);
  assert_memory_equal(&names[0], &names[1], sizeof names[0]);
  stop(&s);
}

static void same_calls_same_bits(void **state)
{
  (void)state;
  check_same_bits(&(sizes){128, 4096, 4096, ESMM_BF16});
  check_same_bits(&CLEAR[1]);
  check_same_bits(&CLEAR[2]);
}

/* ---- graphs ---- */

static void until_known(esmm_ctx *ctx, setting *s, void *stream, filling f)
{
  for (int i = 0; i < PHASE; i++)
    expect_ok(ctx, th_matmul_on(ctx, stream, &s->da[f], s->w, &s->dc[0], NULL));
  esmm_recollection r = {.size = sizeof r};
  expect_ok(ctx, esmm_recall(ctx, s->w, s->dc[0].rows, &r));
  assert_true(r.known && (r.strip_density_a > 0.5) == (f == DENSE));
}

/* A graph that was captured while one A was known is right for both, and its capture changes nothing. */
static void graphs_replay(void **state)
{
  (void)state;
  setting s = start(CLEAR[0].m, CLEAR[0].n, CLEAR[0].k, CLEAR[0].dtype, true);
  void *stream = new_stream();
  esmm_ctx *ctx = remembering();
  make_want(&s);
  esmm_matrix da = to_device(&s.a[DENSE]); /* the graph's A */
  const size_t bytes_a = th_matrix_bytes(&da);
  for (int known = 0; known < FILLINGS; known++) {
    void *graph = NULL, *exec = NULL;
    until_known(ctx, &s, stream, (filling)known);
    expect_ok(ctx, esmm_ctx_synchronize(ctx));
    esmm_recollection before = {.size = sizeof before}, after = before;
    expect_ok(ctx, esmm_recall(ctx, s.w, da.rows, &before));
    assert_int_equal(calls.begin_capture(stream, 0), 0);
    const esmm_status status = th_matmul_on(ctx, stream, &da, s.w, &s.dc[1], NULL);
    const int ended = calls.end_capture(stream, &graph);
    if (status != ESMM_OK || ended != 0 || !graph)
      fail_msg("captured with %s (%s), cuStreamEndCapture %d", esmm_status_str(status), esmm_ctx_error(ctx), ended);
    expect_ok(ctx, esmm_recall(ctx, s.w, da.rows, &after));
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(calls.instantiate(&exec, graph, 0), 0);
    for (int replay = 0; replay < 2 * FILLINGS; replay++) {
      const int f = replay % FILLINGS;
      assert_int_equal(calls.to_device((uintptr_t)da.data, s.a[f].data, bytes_a), 0);
      poison(&s, &s.dc[1]);
      assert_int_equal(calls.launch(exec, stream), 0);
      assert_int_equal(calls.stream_synchronize(stream), 0);
      fetch(&s, &s.dc[1]);
      if (memcmp(s.got, s.want[f], s.bytes) != 0)
        fail_msg("a graph of density %g: C is wrong at density %g", DENSITY[known], DENSITY[f]);
    }
    assert_int_equal(calls.exec_destroy(exec), 0);
    assert_int_equal(calls.graph_destroy(graph), 0);
  }
  esmm_ctx_free(ctx);
  assert_int_equal(calls.stream_destroy(stream), 0);
  esmm_memory_free(gpu, da.data);
  stop(&s);
}

/* The pattern that a product leaves of its C: the product that has C as its A chooses by it, and what it says is exact.
 * Its strips of every height are counted at the two that kernels have, or at their own. */
static void handed_over_patterns_are_exact(void **state)
{
  (void)state;
  static const int64_t heights[] = {8, 32, 128, 4, 64, 24, 256};
  const int64_t m = 1000, k = 1100, n = 1024;
  esmm_matrix x = host_matrix(m, 64, ESMM_BF16), v = host_matrix(64, k, ESMM_BF16), b = host_matrix(k, n, ESMM_BF16);
  th_fill(&b, 2, 1.0, true);
  esmm_weights *w = NULL;
  expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w));
  for (size_t i = 0; i < sizeof heights / sizeof *heights; i++) {
    esmm_ctx *ctx = remembering();
    th_fill(&x, 10 + i, 1.0, true);
    th_fill(&v, 30 + i, 0.002, true);
    esmm_weights *first = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &v, NULL, &first));
    const esmm_matrix a_shape = {.rows = m, .cols = k, .ld = k, .dtype = ESMM_BF16},
                      c_shape = {.rows = m, .cols = n, .ld = n, .dtype = ESMM_BF16};
    esmm_matrix dx = to_device(&x), da = to_device(&a_shape), dc = to_device(&c_shape);
    expect_ok(gpu, esmm_ctx_synchronize(gpu));
    esmm_pattern *pattern = NULL, *strip128 = NULL;
    const esmm_matmul_opts leave = {.size = sizeof leave, .c_strip_rows = heights[i], .c_pattern = &pattern};
    expect_ok(ctx, esmm_matmul(ctx, &dx, first, &da, &leave, NULL));
    const esmm_matmul_opts take = {.size = sizeof take, .a_pattern = pattern};
    expect_ok(ctx, esmm_matmul(ctx, &da, w, &dc, &take, NULL));
    esmm_recollection r = {.size = sizeof r};
    expect_ok(ctx, esmm_recall(ctx, w, m, &r));
    assert_true(r.known);
    expect_ok(ctx, esmm_pattern_coarsen(ctx, pattern, 128 % heights[i] == 0 ? 128 : heights[i], &strip128));
    esmm_pattern_info info = {.size = sizeof info};
    expect_ok(ctx, esmm_pattern_get_info(ctx, strip128, &info));
    if (!(r.strip_density_a - info.density < 1e-9 && info.density - r.strip_density_a < 1e-9))
      fail_msg("strips of %d rows: %g, not %g", (int)heights[i], r.strip_density_a, info.density);
    esmm_pattern_free(pattern);
    esmm_pattern_free(strip128);
    esmm_memory_free(gpu, dx.data);
    esmm_memory_free(gpu, da.data);
    esmm_memory_free(gpu, dc.data);
    esmm_weights_free(first);
    esmm_ctx_free(ctx);
  }
  esmm_weights_free(w);
  free(x.data);
  free(v.data);
  free(b.data);
}

/* The driver of fake_cuda.c, whose kernels compute nothing. */
static bool driver_is_fake(void)
{
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  return library && dlsym(library, "fake_cuda");
}

int main(void)
{
  const struct CMUnitTest none[] = {{.name = "a GPU: the driver is a fake", .test_func = no_gpu}};
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_kernel_follows_a),           cmocka_unit_test(results_are_right),
      cmocka_unit_test(same_calls_same_bits),           cmocka_unit_test(graphs_replay),
      cmocka_unit_test(handed_over_patterns_are_exact),
  };
  int status = 0;
  if (driver_is_fake())
    return cmocka_run_group_tests_name("cuda remember", none, NULL, NULL);
  if (!use_gpu("cuda remember", &status))
    return status;
  status = cmocka_run_group_tests_name("cuda remember", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
