/*
 * test_cuda.c: what only a GPU has: operands in device memory, streams, graphs, timers, weights that travel between GPU
 * and CPU, too little device memory. Products themselves are in test_kernels.c, which runs on a GPU too.
 *
 * Integers make sums exact, so most results are compared bit by bit with the CPU's.
 */
#include "gpu.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- operands ---- */

/* A copy in host memory, fp32; free .data. */
static esmm_matrix to_host(const esmm_matrix *device)
{
  esmm_matrix m = host_matrix(device->rows, device->cols, ESMM_F32);
  expect_ok(gpu, esmm_matrix_copy(gpu, device, &m));
  return m;
}

static void fill_blockwise(esmm_matrix *m, esmm_operand operand, uint64_t seed, double density, int integers)
{
  const esmm_generator g = {.size = sizeof g,
                            .kind = density < 1 ? ESMM_GEN_BLOCKWISE : ESMM_GEN_DENSE,
                            .operand = operand,
                            .seed = seed,
                            .density = density,
                            .integers = integers};
  expect_ok(cpu, esmm_generate(cpu, &g, m));
}

static void expect_same(const esmm_matrix *x, const esmm_matrix *y, const char *what)
{
  assert_true(x->rows == y->rows && x->cols == y->cols);
  for (int64_t i = 0; i < x->rows; i++)
    for (int64_t j = 0; j < x->cols; j++)
      if (!(th_get(x, i, j) == th_get(y, i, j)))
        fail_msg("%s: C[%d,%d] is %.9g, not %.9g", what, (int)i, (int)j, th_get(y, i, j), th_get(x, i, j));
}

/* The same bits, of fp32 in host memory. */
static void expect_bits(const esmm_matrix *x, const esmm_matrix *y, const char *what)
{
  if (memcmp(x->data, y->data, (size_t)(x->rows * x->cols) * sizeof(float)) != 0)
    fail_msg("%s: other bits", what);
}

/* One product, with its exact result as the CPU has it. */
typedef struct job {
  esmm_matrix a, b, want; /* host */
  esmm_matrix da, db, dc; /* device */
  esmm_weights *w, *cpu_w;
} job;

static job make_job(int64_t m, int64_t n, int64_t k, double density)
{
  job j = {.a = host_matrix(m, k, ESMM_F32), .b = host_matrix(k, n, ESMM_F32), .want = host_matrix(m, n, ESMM_F32)};
  fill_blockwise(&j.a, ESMM_OPERAND_A, 1, density, 1);
  fill_blockwise(&j.b, ESMM_OPERAND_B, 2, density, 1);
  expect_ok(cpu, esmm_prepare(cpu, &j.b, NULL, &j.cpu_w));
  expect_ok(cpu, esmm_matmul(cpu, &j.a, j.cpu_w, &j.want, NULL, NULL));
  j.da = to_device(&j.a);
  j.db = to_device(&j.b);
  j.dc = device_matrix(m, n);
  expect_ok(gpu, esmm_prepare(gpu, &j.db, NULL, &j.w));
  return j;
}

static void end_job(job *j)
{
  esmm_weights_free(j->w);
  esmm_weights_free(j->cpu_w);
  esmm_memory_free(gpu, j->da.data);
  esmm_memory_free(gpu, j->db.data);
  esmm_memory_free(gpu, j->dc.data);
  free(j->a.data);
  free(j->b.data);
  free(j->want.data);
}

static void poison(const esmm_matrix *dc)
{
  esmm_matrix bad = host_matrix(dc->rows, dc->cols, ESMM_F32);
  for (int64_t i = 0; i < bad.rows * bad.cols; i++)
    ((float *)bad.data)[i] = NAN;
  esmm_matrix to = *dc;
  expect_ok(gpu, esmm_matrix_copy(gpu, &bad, &to));
  free(bad.data);
}

static void expect_result(const job *j, const char *what)
{
  esmm_matrix got = to_host(&j->dc);
  expect_same(&j->want, &got, what);
  free(got.data);
}

/* ---- where operands lie ---- */

static void operands_anywhere(void **state)
{
  (void)state;
  job j = make_job(130, 100, 300, 0.5);
  float bias[100];
  for (int i = 0; i < 100; i++)
    bias[i] = (float)(i % 5 - 2);
  esmm_matrix bias_host = {.data = bias, .rows = 1, .cols = 100, .ld = 100}, bias_device = to_device(&bias_host);
  esmm_matrix want = host_matrix(130, 100, ESMM_F32);
  esmm_matmul_opts opts = {.size = sizeof opts, .bias = bias, .activation = ESMM_ACT_RELU};
  expect_ok(cpu, esmm_matmul(cpu, &j.a, j.cpu_w, &want, &opts, NULL));
  for (int where = 0; where < 8; where++) { /* bits: A, B, C on the device */
    char what[64];
    snprintf(what, sizeof what, "A %s, B %s, C %s", where & 1 ? "device" : "host", where & 2 ? "device" : "host",
             where & 4 ? "device" : "host");
    esmm_weights *w = NULL;
    expect_ok(gpu, esmm_prepare(gpu, where & 2 ? &j.db : &j.b, NULL, &w));
    esmm_matrix c = host_matrix(130, 100, ESMM_F32);
    memset(c.data, 0xff, 130 * 100 * sizeof(float));
    esmm_stats stats = {.size = sizeof stats};
    poison(&j.dc);
    opts.bias = where & 4 ? bias_device.data : bias;
    expect_ok(gpu, esmm_matmul(gpu, where & 1 ? &j.da : &j.a, w, where & 4 ? &j.dc : &c, &opts, &stats));
    if (where & 4) {
      free(c.data);
      c = to_host(&j.dc);
    }
    expect_same(&want, &c, what);
    size_t staged = (where & 1 ? 0 : 130 * 300 * sizeof(float)) + (where & 4 ? 0 : 130 * 100 * sizeof(float));
    if (stats.staged_bytes < staged || (staged == 0 && stats.staged_bytes != 0))
      fail_msg("%s: staged_bytes is %zu, at least %zu are in host memory", what, stats.staged_bytes, staged);
    free(c.data);
    esmm_weights_free(w);
  }
  esmm_memory_free(gpu, bias_device.data);
  free(want.data);
  end_job(&j);
}

static void expect_refused(esmm_ctx *ctx, esmm_status status, const char *what)
{
  if (status == ESMM_OK)
    fail_msg("%s was accepted", what);
  if (status == ESMM_ERR_DEVICE_LOST || esmm_ctx_error(ctx)[0] == 0)
    fail_msg("%s: %s, text '%s'", what, esmm_status_str(status), esmm_ctx_error(ctx));
}

static void wrong_places_are_refused(void **state)
{
  (void)state;
  job j = make_job(40, 50, 60, 1);
  esmm_matrix other = j.da, host_c = host_matrix(40, 50, ESMM_F32);
  esmm_weights *w = NULL;
  other.device = ordinal + 7;
  expect_refused(gpu, esmm_matmul(gpu, &other, j.w, &j.dc, NULL, NULL), "A on another GPU");
  other = j.dc;
  other.device = ordinal + 7;
  expect_refused(gpu, esmm_matmul(gpu, &j.da, j.w, &other, NULL, NULL), "C on another GPU");
  other = j.db;
  other.device = -1;
  expect_refused(gpu, esmm_prepare(gpu, &other, NULL, &w), "B on GPU -1");
  assert_null(w);
  expect_refused(cpu, esmm_matmul(cpu, &j.da, j.cpu_w, &host_c, NULL, NULL), "device memory on a CPU");
  expect_refused(cpu, esmm_prepare(cpu, &j.db, NULL, &w), "device memory on a CPU");
  assert_null(w);
  expect_refused(cpu, esmm_matmul(cpu, &j.a, j.w, &host_c, NULL, NULL), "a GPU's weights on a CPU");
  expect_refused(gpu, esmm_matmul(gpu, &j.a, j.cpu_w, &host_c, NULL, NULL), "a CPU's weights on a GPU");
  esmm_ctx *ctx = NULL;
  char error[256] = "";
  const esmm_ctx_opts opts = {.size = sizeof opts, .device = "cuda:200", .error = error, .error_size = sizeof error};
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_DEVICE);
  assert_null(ctx);
  assert_non_null(strstr(error, "200"));
  expect_ok(gpu, esmm_matmul(gpu, &j.da, j.w, &j.dc, NULL, NULL)); /* and all is well afterwards */
  expect_result(&j, "after refusals");
  free(host_c.data);
  end_job(&j);
}

static void overlap_on_the_device(void **state)
{
  (void)state;
  job j = make_job(40, 50, 60, 1);
  esmm_matrix c = j.dc;
  c.data = (char *)j.da.data + 40 * 60 * sizeof(float) - sizeof(float);
  assert_int_equal(esmm_matmul(gpu, &j.da, j.w, &c, NULL, NULL), ESMM_ERR_OVERLAP);
  end_job(&j);
}

/* ---- streams, graphs, threads ---- */

static void many_calls_in_flight(void **state)
{
  (void)state;
  enum { CALLS = 24 };
  job j = make_job(200, 256, 256, 0.3);
  void *stream = new_stream();
  esmm_matrix c[CALLS];
  for (int i = 0; i < CALLS; i++) {
    c[i] = device_matrix(200, 256);
    poison(&c[i]);
  }
  for (int i = 0; i < CALLS; i++) { /* nothing waits in between; shapes change, so that scratch is used anew */
    esmm_matrix a = j.da, part = c[i];
    a.rows = part.rows = 200 - 7 * i;
    expect_ok(gpu, th_matmul_on(gpu, i % 2 ? stream : NULL, &a, j.w, &part, NULL));
  }
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  for (int i = 0; i < CALLS; i++) {
    esmm_matrix got = to_host(&c[i]), want = j.want;
    assert_true(got.rows == 200 && isnan(th_get(&got, 199, 0)) == (i > 0));
    got.rows = want.rows = 200 - 7 * i;
    expect_same(&want, &got, "a call in flight");
    free(got.data);
    esmm_memory_free(gpu, c[i].data);
  }
  assert_int_equal(calls.stream_destroy(stream), 0);
  end_job(&j);
}

/* The second product reads what the first writes, on another stream: the library puts one context's calls in order. */
static void streams_of_one_context_are_ordered(void **state)
{
  (void)state;
  enum { SIZE = 1536 };
  void *one = new_stream(), *other = new_stream();
  esmm_matrix identity = host_matrix(SIZE, SIZE, ESMM_F32);
  for (int64_t i = 0; i < SIZE; i++)
    th_set(&identity, i, i, 1);
  job j = make_job(SIZE, SIZE, SIZE, 0.5);
  esmm_weights *id = NULL;
  expect_ok(gpu, esmm_prepare(gpu, &identity, NULL, &id));
  esmm_matrix middle = device_matrix(SIZE, SIZE);
  for (int round = 0; round < 4; round++) {
    void *first = round % 2 ? one : other, *second = round % 2 ? other : one;
    poison(&middle);
    poison(&j.dc);
    expect_ok(gpu, th_matmul_on(gpu, first, &j.da, j.w, &middle, NULL));
    expect_ok(gpu, th_matmul_on(gpu, second, &middle, id, &j.dc, NULL));
    assert_int_equal(calls.stream_synchronize(second), 0);
    expect_result(&j, "a product on a second stream");
  }
  esmm_weights_free(id);
  free(identity.data);
  esmm_memory_free(gpu, middle.data);
  end_job(&j);
  assert_int_equal(calls.stream_destroy(one), 0);
  assert_int_equal(calls.stream_destroy(other), 0);
}

/* Captures one product with fixed addresses and replays it, with the same A and with another. False: the kernel cannot
   do it, which the plan's own choice may never say. */
static bool capture_and_replay(const char *force, double density)
{
  enum { M = 300, N = 260, K = 520 };
  job j = make_job(M, N, K, density);
  void *stream = new_stream(), *graph = NULL, *exec = NULL;
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  esmm_status status = th_matmul_on(gpu, stream, &j.da, j.w, &j.dc, &opts); /* warms the workspace */
  const char *name = force ? force : "auto";
  const bool can = status == ESMM_OK;
  if (can) {
    expect_ok(gpu, esmm_ctx_synchronize(gpu));
    enum { GLOBAL = 0 };
    assert_int_equal(calls.begin_capture(stream, GLOBAL), 0);
    status = th_matmul_on(gpu, stream, &j.da, j.w, &j.dc, &opts);
    int ended = calls.end_capture(stream, &graph);
    if (status != ESMM_OK || ended != 0 || !graph)
      fail_msg("%s: captured with %s (%s), cuStreamEndCapture %d", name, esmm_status_str(status), esmm_ctx_error(gpu),
               ended);
    assert_int_equal(calls.instantiate(&exec, graph, 0), 0);
    for (int replay = 0; replay < 3; replay++) {
      if (replay == 2) { /* other values and other zeros at the same address */
        fill_blockwise(&j.a, ESMM_OPERAND_A, 77, density < 1 ? 0.6 : 0.2, 1);
        expect_ok(cpu, esmm_matmul(cpu, &j.a, j.cpu_w, &j.want, NULL, NULL));
        assert_int_equal(calls.to_device((uintptr_t)j.da.data, j.a.data, M * K * sizeof(float)), 0);
        assert_int_equal(calls.stream_synchronize(NULL), 0); /* of pageable memory it only says that it was read */
      }
      poison(&j.dc);
      assert_int_equal(calls.launch(exec, stream), 0);
      assert_int_equal(calls.stream_synchronize(stream), 0);
      char what[96];
      snprintf(what, sizeof what, "%s, density %g, replay %d", name, density, replay);
      expect_result(&j, what);
    }
    assert_int_equal(calls.exec_destroy(exec), 0);
    assert_int_equal(calls.graph_destroy(graph), 0);
  } else if (status != ESMM_ERR_UNSUPPORTED || !force) {
    fail_msg("%s: %s", name, esmm_ctx_error(gpu));
  }
  assert_int_equal(calls.stream_destroy(stream), 0);
  end_job(&j);
  return can;
}

static void graphs(void **state)
{
  (void)state;
  int captured = 0;
  assert_true(capture_and_replay(NULL, 1));
  assert_true(capture_and_replay(NULL, 0.2));
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    captured += info.available && capture_and_replay(info.name, 0.3);
  }
  assert_true(captured > 0);
}

typedef struct caller {
  const job *j;
  pthread_barrier_t *start;
  pthread_t id;
  bool right;
  char error[256];
} caller;

/* cmocka's assertions belong to the main thread: here failures are only noted. */
static void *call_in_a_thread(void *arg)
{
  caller *me = arg;
  const job *j = me->j;
  esmm_ctx *ctx = NULL;
  void *c_data = NULL;
  float *got = calloc((size_t)(j->want.rows * j->want.cols), sizeof *got);
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .device = device_name, .no_tuning_cache = 1, .error = me->error, .error_size = 256};
  esmm_status status = esmm_ctx_create(&ctx, &opts);
  pthread_barrier_wait(me->start);
  esmm_matrix c = j->dc, host = j->want;
  host.data = got;
  if (status == ESMM_OK)
    status = esmm_memory_alloc(ctx, th_matrix_bytes(&c), &c_data);
  c.data = c_data;
  for (int round = 0; round < 20 && status == ESMM_OK; round++)
    status = esmm_matmul(ctx, &j->da, j->w, &c, NULL, NULL);
  if (status == ESMM_OK)
    status = esmm_matrix_copy(ctx, &c, &host);
  me->right = status == ESMM_OK && got && memcmp(got, j->want.data, th_matrix_bytes(&host)) == 0;
  if (ctx && status != ESMM_OK)
    snprintf(me->error, sizeof me->error, "%.255s", esmm_ctx_error(ctx));
  esmm_memory_free(ctx, c_data);
  esmm_ctx_free(ctx);
  free(got);
  return NULL;
}

static void contexts_in_threads(void **state)
{
  (void)state;
  enum { CALLERS = 4 };
  job j = make_job(257, 190, 400, 0.4);
  for (int64_t i = 0; i < j.want.rows * j.want.cols; i++)
    ((float *)j.want.data)[i] += 0.0f; /* no -0.0: bits are compared */
  caller callers[CALLERS];
  pthread_barrier_t start;
  assert_int_equal(pthread_barrier_init(&start, NULL, CALLERS), 0);
  for (int i = 0; i < CALLERS; i++) {
    callers[i] = (caller){.j = &j, .start = &start};
    assert_int_equal(pthread_create(&callers[i].id, NULL, call_in_a_thread, &callers[i]), 0);
  }
  for (int i = 0; i < CALLERS; i++)
    assert_int_equal(pthread_join(callers[i].id, NULL), 0);
  for (int i = 0; i < CALLERS; i++)
    if (!callers[i].right)
      fail_msg("caller %d got another result: %s", i, callers[i].error);
  pthread_barrier_destroy(&start);
  end_job(&j);
}

/* Weights outlive the context that made them, and serve others. */
static void weights_outlive_their_context(void **state)
{
  (void)state;
  job j = make_job(90, 70, 130, 0.5);
  esmm_ctx *maker = th_ctx_on(device_name, 1);
  esmm_weights *w = NULL;
  expect_ok(maker, esmm_prepare(maker, &j.b, NULL, &w));
  esmm_ctx_free(maker);
  poison(&j.dc);
  expect_ok(gpu, esmm_matmul(gpu, &j.da, w, &j.dc, NULL, NULL));
  expect_result(&j, "weights of a context that is gone");
  esmm_weights_free(w);
  end_job(&j);
}

/* ---- weights and patterns: GPU and CPU agree ---- */

static void expect_same_info(const esmm_weights *x, const esmm_weights *y)
{
  esmm_weights_info a = {.size = sizeof a}, b = {.size = sizeof b};
  assert_int_equal(esmm_weights_get_info(x, &a), ESMM_OK);
  assert_int_equal(esmm_weights_get_info(y, &b), ESMM_OK);
  assert_true(a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype && a.use == b.use && a.strict == b.strict);
  if (!(fabs(a.element_density - b.element_density) < 1e-9) || !(fabs(a.strip_density - b.strip_density) < 1e-9))
    fail_msg("densities %.9g and %.9g, %.9g and %.9g", a.element_density, b.element_density, a.strip_density,
             b.strip_density);
}

/* Made on one device, saved there, loaded on the other: the products agree. */
static void weights_travel(void **state)
{
  (void)state;
  static const int64_t shapes[][2] = {{1, 1}, {64, 32}, {65, 33}, {130, 97}, {300, 257}, {7, 0}, {0, 5}};
  static const double ratios[] = {0, 1, 100}; /* the default, one form of B, anything */
  int travelled[3] = {0, 0, 0};
  char path[] = "/tmp/esmm-cuda-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
    for (int each = 0; each < 3 * 3 * 2 * 2 * 3; each++) {
      const esmm_dtype dtype = (esmm_dtype)(each % 3);
      const int ratio = each / 36;
      const esmm_prepare_opts opts = {.size = sizeof opts,
                                      .use = (esmm_use)(each / 3 % 3),
                                      .strict = each / 9 % 2,
                                      .max_bytes_ratio = ratios[ratio]};
      const bool from_gpu = each / 18 % 2;
      esmm_ctx *from = from_gpu ? gpu : cpu, *to = from_gpu ? cpu : gpu;
      const int64_t k = shapes[s][0], n = shapes[s][1], m = opts.use == ESMM_USE_DECODE ? 9 : 40;
      esmm_matrix a = host_matrix(m, k, ESMM_F32), b = host_matrix(k, n, dtype);
      esmm_matrix x = host_matrix(m, n, ESMM_F32), y = host_matrix(m, n, ESMM_F32);
      th_fill(&a, 3, 0.5, true);
      th_fill(&b, 4, s % 2 ? 0.2 : 1, true);
      esmm_weights *made = NULL, *loaded = NULL;
      /* Once B's bytes: enough for a GPU, too few for the two forms of a CPU. */
      const bool tight = ratios[ratio] == 1 && !from_gpu && opts.use == ESMM_USE_ANY;
      const esmm_status status = esmm_prepare(from, &b, &opts, &made);
      if (!tight || status != ESMM_ERR_UNSUPPORTED) /* what is padded to whole panels is not counted */
        expect_ok(from, status);
      if (status == ESMM_OK) {
        travelled[ratio]++;
        expect_ok(from, esmm_weights_save(from, made, path));
        expect_ok(to, esmm_weights_load(to, path, &loaded));
        expect_same_info(made, loaded);
        expect_ok(from, esmm_matmul(from, &a, made, &x, NULL, NULL));
        expect_ok(to, esmm_matmul(to, &a, loaded, &y, NULL, NULL));
        expect_same(&x, &y, from_gpu ? "from the GPU to the CPU" : "from the CPU to the GPU");
      }
      esmm_weights_free(made);
      esmm_weights_free(loaded);
      free(a.data);
      free(b.data);
      free(x.data);
      free(y.data);
    }
  unlink(path);
  assert_true(travelled[0] == 7 * 36 && travelled[1] >= 7 * 18 && travelled[2] == 7 * 36);
}

static void expect_same_pattern(const esmm_pattern *x, const esmm_pattern *y, const char *what)
{
  const esmm_pattern_info info = th_pattern(gpu, x), other = th_pattern(gpu, y);
  assert_memory_equal(&info, &other, sizeof info);
  uint64_t *bits = th_pattern_bits(gpu, x), *other_bits = th_pattern_bits(gpu, y);
  for (int64_t i = 0; i < info.strips * info.words; i++)
    if (bits[i] != other_bits[i])
      fail_msg("%s: strips of %d rows: strip %d differs", what, (int)info.strip_rows, (int)(i / info.words));
  free(bits);
  free(other_bits);
}

static void patterns_agree(void **state)
{
  (void)state;
  static const int64_t heights[] = {1, 6, 8, 16, 32, 33, 64, 200};
  for (int each = 0; each < 3 * 2 * 2; each++) {
    const esmm_order order = (esmm_order)(each / 3 % 2);
    esmm_matrix host = host_matrix(131, 197, (esmm_dtype)(each % 3));
    host.order = order;
    host.ld = order == ESMM_ROW_MAJOR ? 197 : 131;
    th_fill(&host, 9 + (uint64_t)each, each / 6 ? 0.02 : 0.3, true);
    th_set(&host, 130, 196, -0.0);
    th_set(&host, 0, 100, NAN);
    esmm_matrix device = to_device(&host);
    for (size_t h = 0; h < sizeof heights / sizeof *heights; h++) {
      esmm_pattern *want = NULL, *of_device = NULL, *of_host = NULL;
      expect_ok(cpu, esmm_pattern_extract(cpu, &host, heights[h], &want));
      expect_ok(gpu, esmm_pattern_extract(gpu, &device, heights[h], &of_device));
      expect_ok(gpu, esmm_pattern_extract(gpu, &host, heights[h], &of_host));
      expect_same_pattern(want, of_device, "A on the device");
      expect_same_pattern(want, of_host, "A in host memory");
      esmm_pattern_free(want);
      esmm_pattern_free(of_device);
      esmm_pattern_free(of_host);
      expect_ok(cpu, esmm_pattern_extract_b(cpu, &host, heights[h], &want));
      expect_ok(gpu, esmm_pattern_extract_b(gpu, &device, heights[h], &of_device));
      expect_same_pattern(want, of_device, "B on the device");
      esmm_pattern_free(want);
      esmm_pattern_free(of_device);
    }
    free(host.data);
    esmm_memory_free(gpu, device.data);
  }
}

/* Every value of bf16 and fp16 there and back, and fp32 rounded on the device as on the host. */
static void copies_convert(void **state)
{
  (void)state;
  enum { ALL = 65536 };
  for (int d = 1; d < 3; d++) {
    esmm_matrix half = host_matrix(256, 256, (esmm_dtype)d), wide = host_matrix(256, 256, ESMM_F32);
    for (int i = 0; i < ALL; i++)
      ((uint16_t *)half.data)[i] = (uint16_t)i;
    esmm_matrix device_half = to_device(&half), device_wide = device_matrix(256, 256);
    expect_ok(gpu, esmm_matrix_copy(gpu, &device_half, &device_wide));
    expect_ok(gpu, esmm_matrix_copy(gpu, &device_wide, &wide));
    for (int i = 0; i < ALL; i++) {
      double got = th_decode(wide.data, ESMM_F32, i), want = th_decode(half.data, half.dtype, i);
      if (isnan(want) ? !isnan(got) : got != want)
        fail_msg("%s bits %04x became %g on the device", esmm_dtype_str(half.dtype), (unsigned)i, got);
    }
    th_rng rng = {4};
    for (int i = 0; i < ALL; i++) /* random bits: all exponents, ties too where the low bits are cleared */
      ((uint32_t *)wide.data)[i] = (uint32_t)th_next(&rng) & (i % 2 ? 0xffffffffu : d == 1 ? 0xffff8000u : 0xfffff000u);
    esmm_matrix transposed = device_half, back = host_matrix(256, 256, half.dtype);
    transposed.order = ESMM_COL_MAJOR;
    expect_ok(gpu, esmm_matrix_copy(gpu, &wide, &device_wide));
    expect_ok(gpu, esmm_matrix_copy(gpu, &device_wide, &transposed)); /* changes order and dtype at once */
    expect_ok(gpu, esmm_matrix_copy(gpu, &transposed, &back));
    for (int i = 0; i < ALL; i++) {
      double x = th_decode(wide.data, ESMM_F32, i), want = th_round(half.dtype, x);
      double got = th_decode(back.data, half.dtype, i);
      if (isnan(want) ? !isnan(got) : got != want || signbit(got) != signbit(want))
        fail_msg("%.9g became %s %g on the device, not %g", x, esmm_dtype_str(half.dtype), got, want);
    }
    free(half.data);
    free(wide.data);
    free(back.data);
    esmm_memory_free(gpu, device_half.data);
    esmm_memory_free(gpu, device_wide.data);
  }
}

static void half_precision_operands(void **state)
{
  (void)state;
  for (int each = 0; each < 9; each++) {
    esmm_matrix a = host_matrix(150, 310, (esmm_dtype)(each % 3)), b = host_matrix(310, 140, (esmm_dtype)(each / 3));
    esmm_matrix c = host_matrix(150, 140, ESMM_F32), want = host_matrix(150, 140, ESMM_F32);
    fill_blockwise(&a, ESMM_OPERAND_A, 5, 0.4, 1);
    fill_blockwise(&b, ESMM_OPERAND_B, 6, 0.5, 1);
    esmm_matrix da = to_device(&a), db = to_device(&b), dc = to_device(&c);
    esmm_weights *w = NULL, *cpu_w = NULL;
    expect_ok(cpu, esmm_prepare(cpu, &b, NULL, &cpu_w));
    expect_ok(cpu, esmm_matmul(cpu, &a, cpu_w, &want, NULL, NULL));
    expect_ok(gpu, esmm_prepare(gpu, &db, NULL, &w));
    expect_ok(gpu, esmm_matmul(gpu, &da, w, &dc, NULL, NULL));
    expect_ok(gpu, esmm_matrix_copy(gpu, &dc, &c));
    expect_same(&want, &c, "16-bit operands");
    esmm_weights_free(w);
    esmm_weights_free(cpu_w);
    esmm_memory_free(gpu, da.data);
    esmm_memory_free(gpu, db.data);
    esmm_memory_free(gpu, dc.data);
    free(a.data);
    free(b.data);
    free(c.data);
    free(want.data);
  }
}

/* ---- the plan ---- */

static unsigned flags_of(const char *kernel)
{
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (strcmp(info.name, kernel) == 0)
      return info.flags;
  }
  fail_msg("there is no kernel '%s'", kernel);
  return 0;
}

/* The verdicts' chosen one. */
static void explained(const esmm_matrix *a, const esmm_weights *w, const esmm_matrix *c, char *name, size_t bytes)
{
  esmm_verdict verdicts[96];
  int count = 96, chosen = 0;
  expect_ok(gpu, esmm_explain(gpu, a, w, c, NULL, verdicts, sizeof *verdicts, &count));
  for (int i = 0; i < count; i++)
    if (verdicts[i].chosen) {
      assert_true(verdicts[i].can_run && verdicts[i].competes && verdicts[i].seconds > 0);
      snprintf(name, bytes, "%s", verdicts[i].kernel);
      chosen++;
    }
  assert_int_equal(chosen, 1);
}

/* Dense data, sparse data, and dense again, with the same shape: each call goes by its own A. */
static void plan_follows_the_data(void **state)
{
  (void)state;
  enum { SIZE = 2048 };
  static const double densities[] = {1, 0.05, 1};
  esmm_matrix a[3], b[3], c = device_matrix(SIZE, SIZE);
  esmm_weights *w[3] = {NULL, NULL, NULL};
  for (int i = 0; i < 3; i++) {
    esmm_matrix host = host_matrix(SIZE, SIZE, ESMM_F32);
    fill_blockwise(&host, ESMM_OPERAND_A, 30 + (uint64_t)i, densities[i], 0);
    a[i] = to_device(&host);
    fill_blockwise(&host, ESMM_OPERAND_B, 40 + (uint64_t)i, densities[i], 0);
    b[i] = to_device(&host);
    free(host.data);
    expect_ok(gpu, esmm_prepare(gpu, &b[i], NULL, &w[i]));
  }
  for (int i = 0; i < 3; i++) {
    const bool sparse = densities[i] < 0.5;
    char name[64] = "";
    esmm_stats stats = {.size = sizeof stats};
    esmm_matrix first;
    expect_ok(gpu, esmm_matmul(gpu, &a[i], w[i], &c, NULL, &stats));
    first = to_host(&c);
    if (!(flags_of(stats.kernel) & ESMM_KERNEL_SKIPS) == sparse)
      fail_msg("density %g: %s ran (%s)", densities[i], stats.kernel, stats.reason);
    if (!(stats.joint_density > 0 && stats.joint_density <= 1) || (sparse && !(stats.joint_density < 0.02)) ||
        !(fabs(stats.strip_density_b - densities[i]) < 0.02) || !(fabs(stats.density_a - densities[i]) < 0.1))
      fail_msg("density %g: stats have a %g, strips of b %g, joint %g", densities[i], stats.density_a,
               stats.strip_density_b, stats.joint_density);
    if (!(stats.seconds_total > 0 && stats.seconds_multiply > 0 &&
          stats.seconds_extract + stats.seconds_multiply <= 1.01 * stats.seconds_total + 1e-4))
      fail_msg("seconds: total %g, extract %g, multiply %g", stats.seconds_total, stats.seconds_extract,
               stats.seconds_multiply);
    explained(&a[i], w[i], &c, name, sizeof name);
    if (strcmp(name, stats.kernel) != 0)
      fail_msg("esmm_explain says %s, %s ran", name, stats.kernel);
    for (int again = 0; again < 4; again++) {
      poison(&c);
      expect_ok(gpu, esmm_matmul(gpu, &a[i], w[i], &c, NULL, again % 2 ? &stats : NULL));
      esmm_matrix got = to_host(&c);
      expect_bits(&first, &got, "the same call again");
      free(got.data);
    }
    free(first.data);
  }
  /* One shape of weights, A's that change: dense after sparse must not run as if it were sparse, nor the reverse. */
  for (int i = 0; i < 3; i++) {
    esmm_stats stats = {.size = sizeof stats};
    const int which = i % 2 ? 1 : 0;
    expect_ok(gpu, esmm_matmul(gpu, &a[which], w[0], &c, NULL, &stats));
    if (!(flags_of(stats.kernel) & ESMM_KERNEL_SKIPS) == (which == 1))
      fail_msg("A of density %g after another: %s ran (%s)", densities[which], stats.kernel, stats.reason);
  }
  for (int i = 0; i < 3; i++) {
    esmm_weights_free(w[i]);
    esmm_memory_free(gpu, a[i].data);
    esmm_memory_free(gpu, b[i].data);
  }
  esmm_memory_free(gpu, c.data);
}

static void timers_measure_the_device(void **state)
{
  (void)state;
  job j = make_job(1024, 1024, 1024, 1);
  esmm_timer *timer = NULL;
  double one = 0, eight = 0;
  expect_ok(gpu, esmm_timer_create(gpu, &timer));
  expect_ok(gpu, esmm_matmul(gpu, &j.da, j.w, &j.dc, NULL, NULL));
  for (int round = 0; round < 2; round++) {
    expect_ok(gpu, esmm_timer_start(timer));
    for (int i = 0; i < (round ? 64 : 8); i++)
      expect_ok(gpu, esmm_matmul(gpu, &j.da, j.w, &j.dc, NULL, NULL));
    expect_ok(gpu, esmm_timer_stop(timer));
    expect_ok(gpu, esmm_timer_seconds(timer, round ? &eight : &one));
  }
  if (!(one > 8 * 5e-6 && one < 0.5 && eight > 3 * one && eight < 24 * one))
    fail_msg("8 products took %g s, 64 took %g s", one, eight);
  esmm_timer_free(timer);
  esmm_timer_free(NULL);
  end_job(&j);
}

/* ---- too little memory ---- */

static void out_of_device_memory(void **state)
{
  (void)state;
  enum { MOST = 512 };
  void *held[MOST] = {NULL}, *never = held;
  int count = 0;
  job j = make_job(100, 90, 80, 0.5);
  assert_int_equal(esmm_memory_alloc(gpu, (size_t)1 << 46, &never), ESMM_ERR_DEVICE_MEMORY);
  assert_null(never);
  assert_true(esmm_ctx_error(gpu)[0] != 0);
  /* Takes what there is, in ever smaller pieces, until 128 MiB are no longer to be had. */
  for (size_t piece = (size_t)16 << 30; piece >= (size_t)64 << 20; piece /= 2)
    while (count < MOST && esmm_memory_alloc(gpu, piece, &held[count]) == ESMM_OK)
      count++;
  assert_true(count > 0);
  esmm_matrix b = host_matrix(4096, 8192, ESMM_F32);
  esmm_weights *w = NULL;
  const esmm_status status = esmm_prepare(gpu, &b, NULL, &w);
  if (status != ESMM_ERR_DEVICE_MEMORY || w || esmm_ctx_error(gpu)[0] == 0)
    fail_msg("128 MiB of weights on a full GPU: %s, text '%s'", esmm_status_str(status), esmm_ctx_error(gpu));
  /* A product whose A has to be copied there and does not fit. */
  esmm_matrix a = host_matrix(1 << 20, 80, ESMM_F32), c = host_matrix(1 << 20, 90, ESMM_F32);
  ((float *)c.data)[17] = 3;
  const esmm_status product = esmm_matmul(gpu, &a, j.w, &c, NULL, NULL);
  if (product != ESMM_ERR_DEVICE_MEMORY || ((float *)c.data)[17] != 3)
    fail_msg("a product of 700 MB on a full GPU: %s, text '%s'", esmm_status_str(product), esmm_ctx_error(gpu));
  for (int i = 0; i < count; i++)
    esmm_memory_free(gpu, held[i]);
  expect_ok(gpu, esmm_prepare(gpu, &b, NULL, &w)); /* and now it fits */
  esmm_weights_free(w);
  poison(&j.dc);
  expect_ok(gpu, esmm_matmul(gpu, &j.da, j.w, &j.dc, NULL, NULL));
  expect_result(&j, "after the GPU was full");
  free(a.data);
  free(b.data);
  free(c.data);
  end_job(&j);
}

static void context_says_what_it_is(void **state)
{
  (void)state;
  char expected[24];
  snprintf(expected, sizeof expected, "cuda:%d", ordinal);
  assert_string_equal(esmm_ctx_device(gpu), expected);
  assert_true(esmm_ctx_device_name(gpu)[0] != 0);
  assert_non_null(strstr(esmm_ctx_features(gpu), "sm_"));
  assert_string_equal(esmm_ctx_device_reason(gpu), "");
  esmm_ctx *automatic = th_ctx_on("auto", 1);
  assert_true(strncmp(esmm_ctx_device(automatic), "cuda:", 5) == 0);
  esmm_ctx_free(automatic);
  int of_gpu = 0;
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    expect_ok(gpu, esmm_kernel_get(gpu, i, &info));
    if (info.available)
      assert_string_equal(info.backend, "cuda");
    of_gpu += info.available;
  }
  assert_true(of_gpu > 0);
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(context_says_what_it_is),
      cmocka_unit_test(operands_anywhere),
      cmocka_unit_test(wrong_places_are_refused),
      cmocka_unit_test(overlap_on_the_device),
      cmocka_unit_test(many_calls_in_flight),
      cmocka_unit_test(streams_of_one_context_are_ordered),
      cmocka_unit_test(graphs),
      cmocka_unit_test(contexts_in_threads),
      cmocka_unit_test(weights_outlive_their_context),
      cmocka_unit_test(weights_travel),
      cmocka_unit_test(patterns_agree),
      cmocka_unit_test(copies_convert),
      cmocka_unit_test(half_precision_operands),
      cmocka_unit_test(plan_follows_the_data),
      cmocka_unit_test(timers_measure_the_device),
      cmocka_unit_test(out_of_device_memory),
  };
  status = cmocka_run_group_tests_name("cuda", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
