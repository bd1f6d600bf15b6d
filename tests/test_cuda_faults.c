/*
 * test_cuda_faults.c: what the library does when the CUDA driver is missing, old, out of memory or fails, on the driver
 * of fake_cuda.c. No GPU is needed, and no result is looked at: kernels do nothing there.
 */
#include "fake_gpu.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum {
  OUT_OF_MEMORY = 2,
  DEVICE_UNAVAILABLE = 46,
  NO_BINARY = 209,
  ILLEGAL_ADDRESS = 700,
  MISMATCH = 803,
  UNKNOWN = 999
};

static bool reported; /* the failure has come back as a status */

/* ---- what the device is ---- */

static void check_create(const char *device, esmm_status expected, const char *const *words)
{
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  const esmm_status status = create(&m, device, &ctx, text, sizeof text);
  if (status != expected)
    fail_msg("%s: status is '%s', not '%s': %s", device, esmm_status_str(status), esmm_status_str(expected), text);
  assert_null(ctx);
  for (; *words; words++)
    if (!strstr(text, *words))
      fail_msg("%s: the text does not say '%s': %s", device, *words, text);
  assert_int_equal(m.live, 0);

  /* The same, where the library may choose: the CPU, and why. */
  assert_int_equal(create(&m, "auto", &ctx, text, sizeof text), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cpu");
  if (strcmp(device, "cuda") == 0)
    assert_true(*esmm_ctx_device_reason(ctx) != '\0');
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance(device);
}
#define CHECK_CREATE(device, status, ...) check_create(device, status, (const char *const[]){__VA_ARGS__, NULL})

static void build_without_kernels(void **state)
{
  (void)state;
  CHECK_CREATE("cuda", ESMM_ERR_DEVICE, "no GPU kernels", "nvcc");
}

/* These come first: once a driver is open, it stays so. */
static void driver_too_old(void **state)
{
  (void)state;
  fake->version = 11080;
  CHECK_CREATE("cuda", ESMM_ERR_DRIVER, "11.8", "12.0");
  fake->version = 12040;
}

static void driver_does_not_start(void **state)
{
  (void)state;
  fake->fail_call = "cuInit";
  fake->result = MISMATCH;
  CHECK_CREATE("cuda", ESMM_ERR_DRIVER, "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
}

static void no_device(void **state)
{
  (void)state;
  fake->devices = 0; /* before the driver has started, and after */
  CHECK_CREATE("cuda", ESMM_ERR_DEVICE, "cuInit: CUDA_ERROR_NO_DEVICE");
  reset();
  meter m = {0};
  esmm_ctx_free(must_create(&m));
  fake->devices = 0;
  CHECK_CREATE("cuda", ESMM_ERR_DEVICE, "cuDeviceGetCount");
}

static void device_not_usable(void **state)
{
  (void)state;
  fake->sm = 75;
  CHECK_CREATE("cuda", ESMM_ERR_DEVICE, "sm_75", "sm_80 or later", "Fake GPU 0");
  reset();
  fake->fail_call = "cuDevicePrimaryCtxRetain";
  fake->result = DEVICE_UNAVAILABLE;
  CHECK_CREATE("cuda", ESMM_ERR_DEVICE, "cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE");
  reset();
  fake->fail_call = "cuModuleLoadData"; /* the driver is older than the toolkit, or has no code for this GPU */
  fake->result = NO_BINARY;
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  const esmm_status status = create(&m, "cuda", &ctx, text, sizeof text);
  assert_true(status == ESMM_ERR_DRIVER || status == ESMM_ERR_DRIVER_CALL);
  assert_non_null(strstr(text, "cuModuleLoadData"));
  assert_non_null(strstr(text, "CUDA_ERROR_NO_BINARY_FOR_GPU"));
  check_balance("a GPU without code");
}

static void device_not_there(void **state)
{
  (void)state;
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  assert_int_equal(create(&m, "cuda:1", &ctx, text, sizeof text), ESMM_ERR_DEVICE);
  assert_non_null(strstr(text, "cuda:1"));
  fake->devices = 2;
  assert_int_equal(create(&m, "cuda:1", &ctx, text, sizeof text), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cuda:1");
  assert_string_equal(esmm_ctx_device_name(ctx), "Fake GPU 1");
  assert_non_null(strstr(esmm_ctx_features(ctx), "sm_90"));
  assert_string_equal(esmm_ctx_device_reason(ctx), "");
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance("two devices");
}

static void second_device_works(void **state)
{
  (void)state;
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  fake->devices = 2;
  fake->first_sm = 75;
  assert_int_equal(create(&m, "auto", &ctx, text, sizeof text), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cuda:1");
  assert_string_equal(esmm_ctx_device_reason(ctx), "");
  assert_string_equal(esmm_ctx_error(ctx), "");
  esmm_ctx_free(ctx);
  assert_int_equal(create(&m, "cuda", &ctx, text, sizeof text), ESMM_ERR_DEVICE); /* which means the first */
  assert_non_null(strstr(text, "Fake GPU 0"));
  fake->sm = 61;
  assert_int_equal(create(&m, "auto", &ctx, text, sizeof text), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cpu");
  assert_non_null(strstr(esmm_ctx_device_reason(ctx), "sm_75")); /* the first one's, not the last one's */
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
  check_balance("an old GPU and a new one");
}

static void any_call_fails(void **state)
{
  (void)state;
  static const struct {
    const char *call;
    int result;
    esmm_status status;
    const char *text;
  } cases[] = {
      {"cuDeviceGetCount", UNKNOWN, ESMM_ERR_DRIVER_CALL, "cuDeviceGetCount: CUDA_ERROR_UNKNOWN"},
      {"cuDeviceGetAttribute", UNKNOWN, ESMM_ERR_DRIVER_CALL, "cuDeviceGetAttribute"},
      {"cuDevicePrimaryCtxRetain", OUT_OF_MEMORY, ESMM_ERR_DEVICE_MEMORY,
       "cuDevicePrimaryCtxRetain of cuda:0: CUDA_ERROR_OUT_OF_MEMORY"},
      {"cuEventCreate", UNKNOWN, ESMM_ERR_DRIVER_CALL, "cuEventCreate: CUDA_ERROR_UNKNOWN"},
      {"cuEventCreate", 12345, ESMM_ERR_DRIVER_CALL, "cuEventCreate: "}, /* the driver has no name for it */
      {"cuEventCreate", ILLEGAL_ADDRESS, ESMM_ERR_DEVICE_LOST, "cuEventCreate: CUDA_ERROR_ILLEGAL_ADDRESS"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    reset();
    fake->fail_call = cases[i].call;
    fake->result = cases[i].result;
    CHECK_CREATE("cuda", cases[i].status, cases[i].text);
  }
}

/* ---- a session: everything that a program does with a GPU, with one call failing ---- */

static const char *text_of(const esmm_ctx *ctx)
{
  return ctx ? esmm_ctx_error(ctx) : "";
}

/* Calls that do the work: no failure of theirs may go unnoticed. The others give things back, or are done without. */
static bool does_work(const char *call)
{
  static const char *const calls[] = {
      "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuMemAlloc",          "cuMemAllocAsync",
      "cuLaunchKernelEx", "cuMemcpyHtoDAsync",   "cuMemcpyDtoHAsync",  "cuMemcpy2DAsync",     "cuMemsetD8Async",
      "cuEventCreate",    "cuEventRecord",       "cuStreamWaitEvent",  "cuStreamIsCapturing", "cuEventElapsedTime"};
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
    if (strcmp(calls[i], call) == 0)
      return true;
  return false;
}

/* What a failure must be: a status that fits, a text that names the call and the driver's reason. */
static void check_failure(const char *step, esmm_status status, const char *text, esmm_status expected)
{
  if (!fake->failed)
    fail_msg("%s fails with %s (%s), though no call has failed", step, esmm_status_str(status), text);
  reported = true;
  const bool starting = strcmp(fake->failed, "cuInit") == 0;
  if (status != expected && !(starting && status == ESMM_ERR_DRIVER))
    fail_msg("%s: %s failed, the status is %s, not %s (%s)", step, fake->failed, esmm_status_str(status),
             esmm_status_str(expected), text);
  if (!strstr(text, fake->failed) || !strstr(text, "CUDA_ERROR_"))
    fail_msg("%s: %s failed, the text is '%s'", step, fake->failed, text);
}

/* One step; where it fails, it is tried again, and must then succeed: the failure was a passing one. */
#define STEP(name, call)                                                                                         \
  do {                                                                                                           \
    esmm_status status_ = (call);                                                                                \
    if (status_ != ESMM_OK) {                                                                                    \
      check_failure(name, status_, ctx ? text_of(ctx) : text, expected);                                         \
      status_ = (call);                                                                                          \
    }                                                                                                            \
    if (status_ != ESMM_OK)                                                                                      \
      fail_msg("%s: after %s failed, the next try gives %s (%s)", name, fake->failed ? fake->failed : "nothing", \
               esmm_status_str(status_), ctx ? text_of(ctx) : text);                                             \
  } while (0)

static void session(const data *d, meter *m, esmm_status expected)
{
  char text[512] = "";
  esmm_ctx *ctx = NULL;
  esmm_weights *w = NULL;
  esmm_timer *timer = NULL;
  esmm_matrix a, c, host = d->c;
  esmm_stats stats = {.size = sizeof stats};
  double seconds = 0;
  int32_t host_counts[72];
  void *counts = NULL;
  esmm_pattern *of_host = NULL, *of_device = NULL;
  uint64_t bits[5 * 2];
  esmm_pattern_info info = {.size = sizeof info};
  esmm_weights *from_blocks = NULL;
  static const float norms[256] = {1, 2, 3};
  const esmm_prune_opts to_blocks = {.size = sizeof to_blocks, .format.kind = ESMM_FORMAT_BSR, .density = 0.5},
                        to_2_4 = {.size = sizeof to_2_4, .format.kind = ESMM_FORMAT_NM},
                        to_top = {.size = sizeof to_top, .top = 1, .soft = 1, .input_norms = norms},
                        to_share = {.size = sizeof to_share, .density = 0.5, .scope = ESMM_PRUNE_MATRIX, .soft = 1};
  STEP("create", create(m, "cuda", &ctx, text, sizeof text));
  STEP("prepare", esmm_prepare(ctx, &d->b, NULL, &w));
  const esmm_matmul_opts with_host = {.size = sizeof with_host,
                                      .activation = ESMM_ACT_SILU,
                                      .residual = &d->c,
                                      .gate = w,
                                      .column_nonzeros = host_counts,
                                      .c_pattern = &of_host};
  /* First what needs most scratch: where that grows, it may be refused more than is needed. */
  STEP("the whole epilogue, host operands", esmm_matmul(ctx, &d->a, w, &host, &with_host, &stats));
  STEP("matmul with host operands", esmm_matmul(ctx, &d->a, w, &host, NULL, &stats));
  STEP("alloc", place(ctx, &d->a, &a));
  STEP("alloc", place(ctx, &d->c, &c));
  STEP("copy in", esmm_matrix_copy(ctx, &d->a, &a));
  STEP("timer", esmm_timer_create(ctx, &timer));
  STEP("timer start", esmm_timer_start(timer));
  STEP("matmul", esmm_matmul(ctx, &a, w, &c, NULL, NULL));
  STEP("timer stop", esmm_timer_stop(timer));
  STEP("timer seconds", esmm_timer_seconds(timer, &seconds));
  STEP("matmul with statistics", esmm_matmul(ctx, &a, w, &c, NULL, &stats));
  STEP("alloc", esmm_memory_alloc(ctx, sizeof host_counts, &counts));
  const esmm_bsr there = {.size = sizeof there,
                          .rows = 64,
                          .cols = 64,
                          .block_rows = 64,
                          .block_cols = 64,
                          .index_bits = 32,
                          .row_pointers = counts,
                          .place = ESMM_DEVICE};
  STEP("prepare from blocks there", esmm_prepare_bsr(ctx, &there, NULL, &from_blocks));
  STEP("prune to blocks", esmm_prune(ctx, &c, &to_blocks, NULL));
  STEP("prune to 2:4", esmm_prune(ctx, &c, &to_2_4, NULL));
  STEP("prune to the top of columns", esmm_prune(ctx, &c, &to_top, NULL));
  STEP("prune to the top of all", esmm_prune(ctx, &c, &to_share, NULL));
  const esmm_matmul_opts with_device = {
      .size = sizeof with_device, .residual = &c, .gate = w, .column_nonzeros = counts, .c_pattern = &of_device};
  STEP("the whole epilogue", esmm_matmul(ctx, &a, w, &c, &with_device, NULL));
  STEP("pattern bits", esmm_pattern_bits(ctx, of_device, 0, 5, bits));
  STEP("pattern info", esmm_pattern_get_info(ctx, of_host, &info));
  esmm_pattern_free(of_host);
  STEP("the memory of a pattern again", esmm_matmul(ctx, &d->a, w, &host, &with_host, NULL));
  STEP("synchronize", esmm_ctx_synchronize(ctx));
  STEP("copy out", esmm_matrix_copy(ctx, &c, &host));
  assert_true(seconds > 0);
  esmm_timer_free(timer);
  esmm_memory_free(ctx, a.data);
  esmm_memory_free(ctx, c.data);
  esmm_memory_free(ctx, counts);
  esmm_pattern_free(of_host);
  esmm_weights_free(from_blocks);
  esmm_ctx_free(ctx);
  esmm_weights_free(w); /* they may outlive their context */
  esmm_pattern_free(of_device);
}

static void fail_each_call_of(const char *name, data d, int pools, int result, esmm_status expected)
{
  int64_t n = 1;
  for (;; n++) {
    assert_true(n < 10000);
    reset();
    fake->pools = pools;
    fake->fail_at = n;
    fake->result = result;
    meter m = {0};
    reported = false;
    session(&d, &m, expected);
    if (fake->failed && !reported && does_work(fake->failed))
      fail_msg("call %lld, %s, failed, and nobody said so", (long long)n, fake->failed);
    check_balance(fake->failed ? fake->failed : name);
    assert_int_equal(m.live, 0);
    if (!fake->failed)
      break;
  }
  print_message("# %s: %lld driver calls failed one after the other\n", name, (long long)(n - 1));
  assert_true(n > 50);
  free_data(&d);
}

/* B's strips kept, B's strips made for the call, B as it is. */
static void fail_each_call(const char *name, int pools, int result, esmm_status expected)
{
  fail_each_call_of(name, make_data(), pools, result, expected);
  fail_each_call_of(name, make_data_of(ESMM_F32, ESMM_BF16), pools, result, expected);
  fail_each_call_of(name, make_data_of(ESMM_F16, ESMM_F16), pools, result, expected);
}

static void session_with_a_failing_call(void **state)
{
  (void)state;
  fail_each_call("unknown error", 1, UNKNOWN, ESMM_ERR_DRIVER_CALL);
}

static void session_out_of_memory(void **state)
{
  (void)state;
  fail_each_call("out of memory", 1, OUT_OF_MEMORY, ESMM_ERR_DEVICE_MEMORY);
}

static void session_without_pools(void **state)
{
  (void)state;
  fail_each_call("no memory pools", 0, UNKNOWN, ESMM_ERR_DRIVER_CALL);
}

static void fail_each_allocation(data d)
{
  for (int64_t n = 1;; n++) {
    assert_true(n < 1000);
    meter m = {.fail_at = n};
    char text[512];
    esmm_ctx *ctx = NULL;
    esmm_weights *w = NULL;
    esmm_stats stats = {.size = sizeof stats};
    esmm_pattern *pattern = NULL;
    int32_t counts[72];
    esmm_status status = create(&m, "cuda", &ctx, text, sizeof text);
    if (status == ESMM_OK)
      status = esmm_prepare(ctx, &d.b, NULL, &w);
    if (status == ESMM_OK)
      status = esmm_matmul(ctx, &d.a, w, &d.c, NULL, &stats);
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .residual = &d.c,
                                   .gate = w,
                                   .column_nonzeros = counts,
                                   .c_strip_rows = 128,
                                   .c_pattern = &pattern};
    if (status == ESMM_OK)
      status = esmm_matmul(ctx, &d.a, w, &d.c, &opts, NULL);
    esmm_pattern_info info = {.size = sizeof info};
    if (status == ESMM_OK)
      status = esmm_pattern_get_info(ctx, pattern, &info);
    esmm_pattern_free(pattern);
    if (status != ESMM_OK && (status != ESMM_ERR_MEMORY || !m.failed))
      fail_msg("allocation %lld failed, the status is %s (%s)", (long long)n, esmm_status_str(status), text_of(ctx));
    esmm_weights_free(w);
    esmm_ctx_free(ctx);
    assert_int_equal(m.live, 0);
    check_balance("host memory");
    if (!m.failed)
      break;
  }
  free_data(&d);
}

static void session_without_host_memory(void **state)
{
  (void)state;
  fail_each_allocation(make_data());
  fail_each_allocation(make_data_of(ESMM_BF16, ESMM_BF16));
}

/* Each kernel by name, on shapes with tails, with every call failing once. The fake driver knows what a grid, a tensor
   map and a copy may be. */
static bool fail_in_kernel(const char *kernel, esmm_dtype dtype, int64_t rows, int64_t cols, int64_t k)
{
  esmm_matrix a = th_matrix_alloc(rows, k, dtype), b = th_matrix_alloc(k, cols, dtype),
              c = th_matrix_alloc(rows, cols, dtype);
  bool ran = false;
  th_fill(&a, 5, 0.5, true);
  th_fill(&b, 6, 0.5, true);
  for (int64_t n = 0;; n++) { /* 0: nothing fails */
    assert_true(n < 10000);
    reset();
    meter m = {0};
    esmm_ctx *ctx = must_create(&m);
    esmm_weights *w = NULL;
    const esmm_format_kind kind = dtype == ESMM_F32        ? ESMM_FORMAT_DENSE /* no GPU takes the others */
                                  : strstr(kernel, "nm_")  ? ESMM_FORMAT_NM
                                  : strstr(kernel, "bsr_") ? ESMM_FORMAT_BSR
                                                           : ESMM_FORMAT_DENSE;
    const esmm_prepare_opts prepare = {.size = sizeof prepare, .format.kind = kind};
    assert_int_equal(esmm_prepare(ctx, &b, &prepare, &w), ESMM_OK);
    esmm_matmul_opts opts = {.size = sizeof opts, .force = kernel};
    esmm_stats stats = {.size = sizeof stats};
    fake->fail_at = n;
    fake->result = UNKNOWN;
    esmm_status status = esmm_matmul(ctx, &a, w, &c, &opts, &stats);
    const bool unsupported = status == ESMM_ERR_UNSUPPORTED;
    if (status != ESMM_OK && !unsupported) {
      check_failure(kernel, status, esmm_ctx_error(ctx), ESMM_ERR_DRIVER_CALL);
      status = esmm_matmul(ctx, &a, w, &c, &opts, &stats);
    }
    if (status != ESMM_OK && !unsupported)
      fail_msg("%s: %lld x %lld x %lld: %s", kernel, (long long)rows, (long long)cols, (long long)k,
               esmm_ctx_error(ctx));
    const bool reached = fake->failed != NULL;
    ran = status == ESMM_OK;
    esmm_weights_free(w);
    esmm_ctx_free(ctx);
    assert_int_equal(m.live, 0);
    check_balance(kernel);
    if (unsupported || (n > 0 && !reached))
      break;
  }
  free(a.data);
  free(b.data);
  free(c.data);
  return ran;
}

static void every_kernel(void **state)
{
  (void)state;
  const char *names[96];
  int kernels = 0;
  meter m = {0};
  esmm_ctx *ctx = must_create(&m);
  for (int i = 0; i < esmm_kernel_count() && kernels < 96; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    if (strcmp(info.backend, "cuda") == 0 && info.available)
      names[kernels++] = info.name;
  }
  esmm_ctx_free(ctx);
  assert_true(kernels > 0);
  for (int i = 0; i < kernels; i++) {
    int ran = 0;
    for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
      ran += fail_in_kernel(names[i], (esmm_dtype)dtype, 1, 1, 1);
      ran += fail_in_kernel(names[i], (esmm_dtype)dtype, 33, 131, 70);
      ran += fail_in_kernel(names[i], (esmm_dtype)dtype, 257, 300, 1030);
    }
    if (ran == 0 && strncmp(names[i], "cublas", 6) != 0) /* which does not start here */
      fail_msg("%s ran none of these products", names[i]);
  }
}

/* ---- a lost device ---- */

/* Like session(), but nothing works after the failure; every handle must still be freed without harm. */
static bool lost_session(const data *d, int64_t n)
{
  reset();
  fake->fail_at = n;
  fake->result = ILLEGAL_ADDRESS;
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  esmm_weights *w = NULL;
  esmm_timer *timer = NULL;
  esmm_matrix a = {0}, c = {0}, host = d->c;
  esmm_status status = create(&m, "cuda", &ctx, text, sizeof text);
  if (status == ESMM_OK)
    status = esmm_prepare(ctx, &d->b, NULL, &w);
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &d->a, w, &host, NULL, NULL);
  if (status == ESMM_OK)
    status = place(ctx, &d->a, &a);
  if (status == ESMM_OK)
    status = place(ctx, &d->c, &c);
  if (status == ESMM_OK)
    status = esmm_timer_create(ctx, &timer);
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &a, w, &c, NULL, NULL);
  if (status == ESMM_OK)
    status = esmm_ctx_synchronize(ctx);
  if (status != ESMM_OK && status != ESMM_ERR_DEVICE_LOST && !(status == ESMM_ERR_DRIVER && !ctx))
    fail_msg("call %lld, %s, failed: the status is %s (%s)", (long long)n, fake->failed, esmm_status_str(status),
             ctx ? text_of(ctx) : text);
  if (status == ESMM_ERR_DEVICE_LOST && ctx && w) {
    assert_int_equal(esmm_matmul(ctx, &d->a, w, &host, NULL, NULL), ESMM_ERR_DEVICE_LOST);
    assert_non_null(strstr(esmm_ctx_error(ctx), "lost earlier"));
    assert_non_null(strstr(esmm_ctx_error(ctx), "CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_int_equal(esmm_ctx_synchronize(ctx), ESMM_ERR_DEVICE_LOST);
    esmm_ctx *second = NULL;
    meter other = {0};
    assert_int_equal(create(&other, "cuda", &second, text, sizeof text), ESMM_ERR_DEVICE_LOST);
    assert_int_equal(other.live, 0);
  }
  const bool reached = fake->failed != NULL;
  esmm_timer_free(timer);
  if (ctx) {
    esmm_memory_free(ctx, a.data);
    esmm_memory_free(ctx, c.data);
  }
  esmm_ctx_free(ctx);
  esmm_weights_free(w);
  assert_int_equal(m.live, 0);
  check_balance("a lost device");
  return reached;
}

static void lost_device(void **state)
{
  (void)state;
  data d = make_data();
  int64_t n = 1;
  while (lost_session(&d, n))
    assert_true(++n < 10000);
  assert_true(n > 50);
  reset();
  meter m = {0};
  session(&d, &m, ESMM_OK); /* when the last user is gone, the next one gets a new primary context */
  check_balance("after a lost device");
  free_data(&d);
}

static void launch_that_crashes(void **state)
{
  (void)state;
  data d = make_data();
  meter m = {0};
  esmm_ctx *ctx = must_create(&m);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &d.b, NULL, &w), ESMM_OK);
  fake->fail_call = "cuLaunchKernelEx";
  fake->result = ILLEGAL_ADDRESS;
  assert_int_equal(esmm_matmul(ctx, &d.a, w, &d.c, NULL, NULL), ESMM_ERR_DEVICE_LOST);
  assert_non_null(strstr(esmm_ctx_error(ctx), "cuLaunchKernelEx of "));
  assert_non_null(strstr(esmm_ctx_error(ctx), "CUDA_ERROR_ILLEGAL_ADDRESS"));
  fake->fail_call = NULL;
  assert_int_equal(esmm_matmul(ctx, &d.a, w, &d.c, NULL, NULL), ESMM_ERR_DEVICE_LOST);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  check_balance("a launch that crashes");
  free_data(&d);
}

/* ---- memory ---- */

static void device_memory_runs_out(void **state)
{
  (void)state;
  data d = make_data();
  meter m = {0};
  esmm_ctx *ctx = must_create(&m);
  esmm_weights *w = NULL;
  const size_t all = fake->memory;
  fake->memory = 64;
  assert_int_equal(esmm_prepare(ctx, &d.b, NULL, &w), ESMM_ERR_DEVICE_MEMORY);
  assert_null(w);
  assert_non_null(strstr(esmm_ctx_error(ctx), "cuMemAlloc"));
  assert_non_null(strstr(esmm_ctx_error(ctx), " bytes: CUDA_ERROR_OUT_OF_MEMORY"));
  void *ptr = &d;
  assert_int_equal(esmm_memory_alloc(ctx, 1234, &ptr), ESMM_ERR_DEVICE_MEMORY);
  assert_null(ptr);
  assert_string_equal(esmm_ctx_error(ctx), "cuMemAlloc of 1234 bytes: CUDA_ERROR_OUT_OF_MEMORY");
  fake->memory = all;
  assert_int_equal(esmm_prepare(ctx, &d.b, NULL, &w), ESMM_OK);
  fake->memory = (size_t)fake->bytes;
  assert_int_equal(esmm_matmul(ctx, &d.a, w, &d.c, NULL, NULL), ESMM_ERR_DEVICE_MEMORY);
  assert_non_null(strstr(esmm_ctx_error(ctx), "cuMemAllocAsync of "));
  fake->memory = all;
  assert_int_equal(esmm_matmul(ctx, &d.a, w, &d.c, NULL, NULL), ESMM_OK);
  esmm_weights_free(w);
  esmm_ctx_free(ctx);
  check_balance("out of memory");
  free_data(&d);
}

static void second_call_allocates_nothing(void **state)
{
  (void)state;
  bench b;
  bench_start(&b);
  assert_int_equal(bench_run(&b, 8, NULL), ESMM_OK);
  const int64_t device = fake->allocations, host = b.m.calls, modules = fake->modules;
  for (int i = 0; i < 3; i++)
    assert_int_equal(bench_run(&b, 8, NULL), ESMM_OK);
  assert_int_equal(fake->allocations, device);
  assert_int_equal(b.m.calls, host);
  assert_int_equal(fake->modules, modules);
  assert_int_equal(bench_run(&b, 40, NULL), ESMM_OK); /* larger: may grow once */
  const int64_t grown = fake->allocations, blocks = fake->blocks;
  assert_true(grown - device <= 1);
  assert_int_equal(bench_run(&b, 40, NULL), ESMM_OK);
  assert_int_equal(bench_run(&b, 3, NULL), ESMM_OK); /* smaller: never */
  assert_int_equal(fake->allocations, grown);
  assert_int_equal(fake->blocks, blocks);
  bench_stop(&b, "second call");
}

/* ---- copies ---- */

static void copies_wait_for_the_host_only(void **state)
{
  (void)state;
  bench b;
  esmm_matrix other;
  bench_start(&b);
  assert_int_equal(place(b.ctx, &b.d.a, &other), ESMM_OK);
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.a, &other), ESMM_OK); /* loads what it needs */
  int64_t waited = fake->synchronizations;
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.d.a, &b.a), ESMM_OK);
  assert_true(fake->synchronizations > waited);
  waited = fake->synchronizations;
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.a, &b.d.a), ESMM_OK);
  assert_true(fake->synchronizations > waited);
  waited = fake->synchronizations;
  const int64_t launches = fake->launches, records = fake->records;
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.a, &other), ESMM_OK);
  assert_int_equal(fake->synchronizations, waited);
  assert_int_equal(fake->launches, launches + 1);
  static char stream;
  const int64_t waits = fake->waits;
  assert_int_equal(fake->records, records); /* the default stream keeps its order without an event, */
  assert_int_equal(bench_run(&b, 8, &stream), ESMM_OK);
  assert_int_equal(fake->records, records + 2); /* and has one when another comes after it, */
  assert_int_equal(fake->waits, waits + 1);
  assert_int_equal(bench_run(&b, 8, NULL), ESMM_OK);
  assert_int_equal(fake->records, records + 2);
  assert_int_equal(esmm_ctx_synchronize(b.ctx), ESMM_OK); /* or the host waits for it */
  assert_int_equal(fake->records, records + 3);
  esmm_memory_free(b.ctx, other.data);
  bench_stop(&b, "copies");
}

/* Lines in host memory that lie farther apart than the largest pitch of a 2-D copy. Only their pages are ever used. */
static void lines_far_apart(void **state)
{
  (void)state;
  enum { LINES = 2, LONG = 96 };
  const int64_t ld = ((int64_t)1 << 29) + 64;
  const size_t bytes = ((size_t)ld * (LINES - 1) + 128 + LONG) * sizeof(float);
  float *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    print_message("# no address space of %zu bytes\n", bytes);
    skip();
  }
  for (int order = 0; order < 2; order++) {
    esmm_matrix far = {.data = memory,
                       .rows = order ? LONG : LINES,
                       .cols = order ? LINES : LONG,
                       .ld = ld,
                       .order = order ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR};
    esmm_matrix tight = far;
    bench b;
    bench_start(&b);
    tight.ld = 0;
    tight.place = ESMM_DEVICE;
    assert_int_equal(esmm_memory_alloc(b.ctx, LINES * LONG * sizeof(float), &tight.data), ESMM_OK);
    for (int64_t i = 0; i < LINES * LONG; i++)
      memory[i / LONG * ld + i % LONG] = (float)(i + 1);
    assert_int_equal(esmm_matrix_copy(b.ctx, &far, &tight), ESMM_OK);
    for (int64_t i = 0; i < LINES * LONG; i++) {
      assert_true(((float *)tight.data)[i] == (float)(i + 1));
      ((float *)tight.data)[i] = (float)-i;
    }
    assert_int_equal(esmm_matrix_copy(b.ctx, &tight, &far), ESMM_OK);
    for (int64_t i = 0; i < LINES * LONG; i++)
      assert_true(memory[i / LONG * ld + i % LONG] == (float)-i);
    if (!order) { /* as operands of a product: copied there, and back */
      esmm_matrix a = far, c = far;
      c.cols = 72;
      c.data = memory + 128;
      assert_int_equal(esmm_matmul(b.ctx, &a, b.w, &c, NULL, NULL), ESMM_OK);
    }
    esmm_memory_free(b.ctx, tight.data);
    bench_stop(&b, "lines far apart");
  }
  munmap(memory, bytes);
}

/* ---- threads ---- */

static void *many_products(void *arg)
{
  data *d = arg;
  for (int round = 0; round < 5; round++) {
    meter m = {0};
    char text[512];
    esmm_ctx *ctx = NULL;
    esmm_weights *w = NULL;
    if (create(&m, "cuda", &ctx, text, sizeof text) != ESMM_OK)
      return "create";
    if (esmm_prepare(ctx, &d->b, NULL, &w) != ESMM_OK)
      return "prepare";
    for (int i = 0; i < 10; i++)
      if (esmm_matmul(ctx, &d->a, w, &d->c, NULL, NULL) != ESMM_OK)
        return "matmul";
    if (esmm_ctx_synchronize(ctx) != ESMM_OK)
      return "synchronize";
    esmm_ctx_free(ctx);
    esmm_weights_free(w);
    if (m.live != 0)
      return "leak";
  }
  return NULL;
}

static void contexts_in_threads(void **state)
{
  (void)state;
  pthread_t threads[4];
  data d[4];
  for (int i = 0; i < 4; i++) {
    d[i] = make_data();
    assert_int_equal(pthread_create(&threads[i], NULL, many_products, &d[i]), 0);
  }
  for (int i = 0; i < 4; i++) {
    void *where = NULL;
    assert_int_equal(pthread_join(threads[i], &where), 0);
    if (where)
      fail_msg("thread %d failed in %s", i, (const char *)where);
    free_data(&d[i]);
  }
  check_balance("threads");
}

/* ---- no driver at all: a process of its own, with a library that cannot be loaded ---- */

static int without_driver(void)
{
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  const esmm_status status = create(&m, "cuda", &ctx, text, sizeof text);
  if (ctx || !(status == ESMM_ERR_DRIVER ? strstr(text, "libcuda.so.1") : strstr(text, "no GPU kernels"))) {
    fprintf(stderr, "# cuda: %s: %s\n", esmm_status_str(status), text);
    return 1;
  }
  if (create(&m, "auto", &ctx, text, sizeof text) != ESMM_OK || strcmp(esmm_ctx_device(ctx), "cpu") != 0 ||
      strcmp(esmm_ctx_device_reason(ctx), "") == 0) {
    fprintf(stderr, "# auto: %s\n", text);
    return 1;
  }
  esmm_ctx_free(ctx);
  return m.live != 0;
}

static void no_driver(void **state)
{
  (void)state;
  char directory[] = "/tmp/esmm_no_driver_XXXXXX", path[64];
  assert_non_null(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/libcuda.so.1", directory);
  FILE *file = fopen(path, "w"); /* an empty file: it stands before any real driver, and is none */
  assert_non_null(file);
  fclose(file);
  fflush(NULL);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0)
    start_again(directory, "without");
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  unlink(path);
  rmdir(directory);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

int main(int argc, char **argv)
{
  (void)argc;
  if (strcmp(use_fake(argv), "without") == 0)
    return without_driver();
  const struct CMUnitTest without[] = {TEST(build_without_kernels), TEST(no_driver)};
  const struct CMUnitTest with[] = {
      TEST(driver_too_old),
      TEST(driver_does_not_start),
      TEST(no_device),
      TEST(no_driver),
      TEST(device_not_usable),
      TEST(device_not_there),
      TEST(second_device_works),
      TEST(any_call_fails),
      TEST(session_with_a_failing_call),
      TEST(session_out_of_memory),
      TEST(session_without_pools),
      TEST(session_without_host_memory),
      TEST(every_kernel),
      TEST(lost_device),
      TEST(launch_that_crashes),
      TEST(device_memory_runs_out),
      TEST(second_call_allocates_nothing),
      TEST(copies_wait_for_the_host_only),
      TEST(lines_far_apart),
      TEST(contexts_in_threads),
  };
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda faults, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda faults", with, NULL, NULL);
}
