/*
 * test_device.c: which device a context is of, and what a CPU context says to memory and kernels of a GPU; its
 * own memory and timers. All of it is the same with and without a GPU in the machine; test_cuda.c needs one.
 */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { M = 6, N = 10, K = 8 };

typedef struct fixture {
  esmm_ctx *ctx;
  esmm_matrix a, b, c;
  esmm_weights *w;
  unsigned char before[M * N * sizeof(float)];
} fixture;

static int set_up(void **state)
{
  fixture *f = calloc(1, sizeof *f);
  assert_non_null(f);
  th_clean_environment();
  f->ctx = th_ctx_on("cpu", 2);
  f->a = th_matrix_alloc(M, K, ESMM_F32);
  f->b = th_matrix_alloc(K, N, ESMM_F32);
  f->c = th_matrix_alloc(M, N, ESMM_F32);
  th_fill(&f->a, 1, 0.5, true);
  th_fill(&f->b, 2, 0.8, true);
  th_fill(&f->c, 3, 1, true);
  memcpy(f->before, f->c.data, sizeof f->before);
  assert_int_equal(esmm_prepare(f->ctx, &f->b, NULL, &f->w), ESMM_OK);
  *state = f;
  return 0;
}

static int tear_down(void **state)
{
  fixture *f = *state;
  esmm_weights_free(f->w);
  free(f->a.data);
  free(f->b.data);
  free(f->c.data);
  esmm_ctx_free(f->ctx);
  free(f);
  return 0;
}

#define EXPECT(call, status, word1, word2) th_expect(#call, (call), status, esmm_ctx_error(f->ctx), word1, word2)

static void expect_matmul(fixture *f, const char *what, const esmm_matrix *a, esmm_matrix *c,
                          const esmm_matmul_opts *opts, esmm_status want, const char *word1, const char *word2)
{
  th_expect(what, esmm_matmul(f->ctx, a, f->w, c, opts, NULL), want, esmm_ctx_error(f->ctx), word1, word2);
  if (memcmp(f->before, f->c.data, sizeof f->before) != 0)
    fail_msg("%s: C was changed", what);
}

static void create_fails(const char *device, const char *source)
{
  char text[512] = "";
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .device = device, .no_tuning_cache = 1, .error = text, .error_size = sizeof text};
  esmm_ctx *ctx = NULL;
  const char *named = device ? device : getenv("ESMM_DEVICE");
  th_expect(named, esmm_ctx_create(&ctx, &opts), ESMM_ERR_DEVICE, text, source, named);
  assert_null(ctx);
}

static void device_names(void **state)
{
  (void)state;
  static const char *const bad[] = {"",        "banana",   "CPU",     "cpu:0",           "cuda:",   "cuda:x",
                                    "cuda:-1", "cuda: 0",  "cuda:1x", "cuda:256",        "cuda0",   "gpu",
                                    "cuda:+1", "cuda:0.0", "auto:0",  "cuda:4294967296", "cuda:0x1"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    create_fails(bad[i], "device");
    setenv("ESMM_DEVICE", bad[i], 1);
    if (*bad[i])
      create_fails(NULL, "ESMM_DEVICE");
  }
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts opts = {.size = sizeof opts, .device = "cpu", .no_tuning_cache = 1}; /* goes before the environment */
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cpu");
  assert_string_equal(esmm_ctx_device_reason(ctx), "");
  esmm_ctx_free(ctx);
  setenv("ESMM_DEVICE", "cpu", 1);
  opts.device = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cpu");
  assert_string_equal(esmm_ctx_device_reason(ctx), "");
  esmm_ctx_free(ctx);
  assert_string_equal(esmm_ctx_device_reason(NULL), "");
  th_clean_environment();
}

/* "auto" takes the GPU where there is one that works, else the CPU, and says why. */
static void auto_says_why(void **state)
{
  (void)state;
  char error[512] = "";
  esmm_ctx *gpu = NULL, *ctx = NULL;
  esmm_ctx_opts opts = {
      .size = sizeof opts, .device = "cuda", .no_tuning_cache = 1, .error = error, .error_size = sizeof error};
  const esmm_status status = esmm_ctx_create(&gpu, &opts);
  opts.device = "auto";
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  if (status == ESMM_OK) {
    assert_string_equal(esmm_ctx_device(gpu), "cuda:0");
    assert_string_equal(esmm_ctx_device(ctx), "cuda:0");
    assert_string_equal(esmm_ctx_device_reason(ctx), "");
  } else {
    assert_null(gpu);
    assert_true(status == ESMM_ERR_DRIVER || status == ESMM_ERR_DEVICE || status == ESMM_ERR_DRIVER_CALL);
    assert_true(strlen(error) > 10);
    assert_string_equal(esmm_ctx_device(ctx), "cpu");
    assert_int_equal(strncmp(esmm_ctx_device_reason(ctx), error, strlen(esmm_ctx_device_reason(ctx))), 0);
    assert_true(strlen(esmm_ctx_device_reason(ctx)) > 10);
    assert_true(strlen(esmm_ctx_device_name(ctx)) > 0);
  }
  assert_string_equal(esmm_ctx_error(ctx), ""); /* not a failure */
  esmm_ctx_free(gpu);
  esmm_ctx_free(ctx);
}

static void a_cpu_refuses_device_matrices(void **state)
{
  fixture *f = *state;
  esmm_matrix x = f->a;
  esmm_weights *w = NULL;
  esmm_pattern *p = NULL;
  x.place = ESMM_DEVICE;
  expect_matmul(f, "a on a GPU", &x, &f->c, NULL, ESMM_ERR_DEVICE, "a->place", "CPU");
  EXPECT(esmm_pattern_extract(f->ctx, &x, 32, &p), ESMM_ERR_DEVICE, "a->place", "CPU");
  EXPECT(esmm_pattern_extract_b(f->ctx, &x, 32, &p), ESMM_ERR_DEVICE, "b->place", "CPU");
  EXPECT(esmm_matrix_copy(f->ctx, &x, &f->a), ESMM_ERR_DEVICE, "src->place", "CPU");
  EXPECT(esmm_matrix_copy(f->ctx, &f->a, &x), ESMM_ERR_DEVICE, "dst->place", "CPU");
  esmm_generator g = {.size = sizeof g};
  EXPECT(esmm_generate(f->ctx, &g, &x), ESMM_ERR_DEVICE, "out->place", "CPU");
  x = f->b;
  x.place = ESMM_DEVICE;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_DEVICE, "b->place", "CPU");
  x = f->c;
  x.place = ESMM_DEVICE;
  x.device = 1;
  expect_matmul(f, "c on a GPU", &f->a, &x, NULL, ESMM_ERR_DEVICE, "c->place", "CPU");
  assert_null(w);
  assert_null(p);
}

/* Kernels of a GPU are there by name, and refuse by name. */
static void a_cpu_has_no_gpu_kernels(void **state)
{
  fixture *f = *state;
  enum { ROOM = 96 };
  esmm_verdict verdicts[ROOM];
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(f->ctx, i, &info), ESMM_OK);
    if (strcmp(info.backend, "cuda") != 0)
      continue;
    assert_false(info.available);
    const esmm_matmul_opts o = {.size = sizeof o, .force = info.name};
    expect_matmul(f, info.name, &f->a, &f->c, &o, ESMM_ERR_UNSUPPORTED, info.name, "runs on a GPU");
    int count = ROOM;
    EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, &o, verdicts, sizeof *verdicts, &count), ESMM_ERR_UNSUPPORTED,
           info.name, "a CPU context");
  }
  int count = ROOM;
  assert_int_equal(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
  for (int i = 0; i < count; i++)
    if (strstr(verdicts[i].text, "runs on a GPU"))
      assert_false(verdicts[i].can_run || verdicts[i].competes || verdicts[i].chosen);
}

static void memory_and_timers(void **state)
{
  fixture *f = *state;
  void *ptr = f;
  assert_int_equal(esmm_memory_alloc(NULL, 1, &ptr), ESMM_ERR_ARGUMENT);
  EXPECT(esmm_memory_alloc(f->ctx, 1, NULL), ESMM_ERR_ARGUMENT, "ptr", "NULL");
  EXPECT(esmm_memory_alloc(f->ctx, SIZE_MAX, &ptr), ESMM_ERR_MEMORY, "memory", "18446744073709551615");
  assert_null(ptr);
  esmm_memory_free(f->ctx, NULL);
  esmm_memory_free(NULL, NULL);
  static const size_t sizes[] = {0, 1, 255, 100000};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    assert_int_equal(esmm_memory_alloc(f->ctx, sizes[i], &ptr), ESMM_OK);
    assert_non_null(ptr);
    assert_int_equal((uintptr_t)ptr % 256, 0);
    memset(ptr, 0x5a, sizes[i]);
    esmm_memory_free(f->ctx, ptr);
  }
  assert_int_equal(esmm_ctx_synchronize(f->ctx), ESMM_OK);
  assert_int_equal(esmm_ctx_synchronize(NULL), ESMM_ERR_ARGUMENT);

  EXPECT(esmm_ctx_set_stream(f->ctx, f), ESMM_ERR_ARGUMENT, "stream is 0x", "a CPU context has no streams");
  assert_null(esmm_ctx_stream(f->ctx));
  assert_int_equal(esmm_ctx_set_stream(f->ctx, NULL), ESMM_OK);
  assert_int_equal(esmm_ctx_set_stream(NULL, NULL), ESMM_ERR_ARGUMENT);
  assert_null(esmm_ctx_stream(NULL));

  esmm_timer *timer = NULL;
  double seconds = -1;
  assert_int_equal(esmm_timer_create(NULL, &timer), ESMM_ERR_ARGUMENT);
  EXPECT(esmm_timer_create(f->ctx, NULL), ESMM_ERR_ARGUMENT, "timer", "NULL");
  assert_int_equal(esmm_timer_start(NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_timer_stop(NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_timer_seconds(NULL, &seconds), ESMM_ERR_ARGUMENT);
  esmm_timer_free(NULL);
  assert_int_equal(esmm_timer_create(f->ctx, &timer), ESMM_OK);
  EXPECT(esmm_timer_seconds(timer, &seconds), ESMM_ERR_ARGUMENT, "timer", "started");
  EXPECT(esmm_timer_stop(timer), ESMM_ERR_ARGUMENT, "timer", "started");
  assert_int_equal(esmm_timer_start(timer), ESMM_OK);
  EXPECT(esmm_timer_seconds(timer, &seconds), ESMM_ERR_ARGUMENT, "timer", "stopped");
  usleep(2000);
  assert_int_equal(esmm_timer_stop(timer), ESMM_OK);
  EXPECT(esmm_timer_seconds(timer, NULL), ESMM_ERR_ARGUMENT, "seconds", "NULL");
  assert_int_equal(esmm_timer_seconds(timer, &seconds), ESMM_OK);
  assert_true(seconds >= 0.002 && seconds < 60);
  assert_int_equal(esmm_timer_start(timer), ESMM_OK); /* again */
  EXPECT(esmm_timer_seconds(timer, &seconds), ESMM_ERR_ARGUMENT, "timer", "stopped");
  esmm_timer_free(timer);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      TEST(device_names),      TEST(auto_says_why), TEST(a_cpu_refuses_device_matrices), TEST(a_cpu_has_no_gpu_kernels),
      TEST(memory_and_timers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
