/*
 * test_backend.c: the seam between the core and its devices is one table. A backend of the test's own, "toy", is put
 * beside the others and the public interface is run through it: names, contexts, memory, copies, patterns, weights,
 * products, explanations, timers, tuning, refusals. The toy's memory is the host's, held apart by a mark that it
 * checks; its products are those of the reference kernel.
 */
#include "backend.h"
#include "cpu/cpu.h"
#include "esmm_ffn.h"
#include "esmm_tools.h"
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEVICES = 2 };

static struct {
  int opened, closed, synchronized, allocated, freed, copied, patterns, prepared, weights_freed, multiplied, explained,
      timers;
} seen;

/* ---- the toy ---- */

static esmm_status toy_count(esmm_ctx *ctx, int *count)
{
  (void)ctx;
  *count = 0; /* "auto" must pass it by: it is there for who names it */
  return ESMM_OK;
}

static esmm_status toy_open(esmm_ctx *ctx, int ordinal)
{
  if (ordinal >= DEVICES)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "there is no toy:%d", ordinal);
  (void)snprintf(ctx->device, sizeof ctx->device, "toy:%d", ordinal);
  (void)snprintf(ctx->device_name, sizeof ctx->device_name, "Toy");
  (void)snprintf(ctx->features, sizeof ctx->features, "wooden");
  seen.opened++;
  return ESMM_OK;
}

static void toy_close(esmm_ctx *ctx)
{
  (void)ctx;
  seen.closed++;
}

static esmm_status toy_synchronize(esmm_ctx *ctx)
{
  (void)ctx;
  seen.synchronized++;
  return ESMM_OK;
}

static esmm_status toy_alloc(esmm_ctx *ctx, size_t bytes, void **ptr)
{
  seen.allocated++;
  return esmm_cpu_backend.memory_alloc(ctx, bytes, ptr);
}

static void toy_free(esmm_ctx *ctx, void *ptr)
{
  seen.freed++;
  esmm_cpu_backend.memory_free(ctx, ptr);
}

static esmm_status toy_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst)
{
  seen.copied++;
  esmm_copy_host(ctx, src, dst);
  return ESMM_OK;
}

static esmm_status toy_pattern(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  seen.patterns++;
  return esmm_pattern_host(ctx, a, strip_rows, pattern);
}

/* Its weights are a CPU's, called its own. */
static esmm_status toy_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out)
{
  const esmm_status status = esmm_prepare_checked(ctx, b, opts, out);
  if (status == ESMM_OK) {
    (*out)->backend = ctx->backend;
    (*out)->ordinal = ctx->ordinal;
    seen.prepared++;
  }
  return status;
}

static void toy_weights_free(esmm_weights *w)
{
  seen.weights_freed++;
  esmm_cpu_weights_free(w);
}

static esmm_status toy_to_host(esmm_ctx *ctx, const esmm_weights *w, esmm_weights **host)
{
  const esmm_matrix shape = {.rows = w->k, .cols = w->n, .dtype = w->dtype};
  const esmm_prepare_opts opts = {.size = sizeof opts, .use = w->use, .max_bytes_ratio = 1e9};
  esmm_matrix b;
  esmm_status status = esmm_host_twin(ctx, &shape, &b);
  if (status != ESMM_OK)
    return status;
  esmm_weights_unpack(w, &b);
  status = esmm_prepare_checked(ctx, &b, &opts, host);
  esmm_host_twin_free(ctx, &b);
  return status;
}

static esmm_status toy_from_host(esmm_ctx *ctx, const esmm_weights *host, esmm_weights **out)
{
  const esmm_status status = toy_to_host(ctx, host, out);
  if (status == ESMM_OK) {
    (*out)->backend = ctx->backend;
    (*out)->ordinal = ctx->ordinal;
  }
  return status;
}

static unsigned toy_formats(void)
{
  return 1u << ESMM_FORMAT_DENSE;
}

static esmm_status toy_check_epilogue(esmm_ctx *ctx, const esmm_matmul_opts *o)
{
  return o->residual ? esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "a toy has no residual") : ESMM_OK;
}

extern const esmm_kernel esmm_kernel_ref;

static esmm_status toy_multiply(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s)
{
  (void)want_stats;
  p->threads = 1;
  if (force)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "a toy has no %s", force);
  void *scratch = esmm_scratch(ctx, esmm_kernel_ref.workspace(&esmm_kernel_ref, p));
  if (!scratch)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a toy");
  seen.multiplied++;
  (void)snprintf(s->kernel, sizeof s->kernel, "toy");
  return esmm_kernel_ref.run(&esmm_kernel_ref, ctx, p, scratch, s);
}

static esmm_status toy_explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen)
{
  seen.explained++;
  return esmm_plan_sampled(ctx, p, force, true, choices, chosen);
}

static bool toy_has(const esmm_ctx *ctx, const esmm_kernel *kernel, char *why, size_t why_bytes)
{
  (void)ctx;
  (void)kernel;
  (void)snprintf(why, why_bytes, "a toy has no kernels");
  return false;
}

static esmm_status toy_timer_create(esmm_ctx *ctx, void **timer)
{
  seen.timers++;
  return esmm_cpu_backend.timer_create(ctx, timer);
}

static void toy_suffix(const esmm_ctx *ctx, char *out, size_t bytes)
{
  (void)ctx;
  (void)snprintf(out, bytes, "-wood");
}

static esmm_backend toy;

static int bring_toy(void **state)
{
  (void)state;
  toy = (esmm_backend){.name = "toy",
                       .kind = "toy",
                       .numbered = true,
                       .memory = true,
                       .streams = true,
                       .count = toy_count,
                       .open = toy_open,
                       .close = toy_close,
                       .synchronize = toy_synchronize,
                       .memory_alloc = toy_alloc,
                       .memory_free = toy_free,
                       .copy = toy_copy,
                       .pattern = toy_pattern,
                       .formats = toy_formats,
                       .prepare = toy_prepare,
                       .weights_free = toy_weights_free,
                       .weights_to_host = toy_to_host,
                       .weights_from_host = toy_from_host,
                       .check_epilogue = toy_check_epilogue,
                       .multiply = toy_multiply,
                       .explain = toy_explain,
                       .has = toy_has,
                       .timer_create = toy_timer_create,
                       .timer_free = esmm_cpu_backend.timer_free,
                       .timer_start = esmm_cpu_backend.timer_start,
                       .timer_stop = esmm_cpu_backend.timer_stop,
                       .timer_seconds = esmm_cpu_backend.timer_seconds,
                       .tune_suffix = toy_suffix};
  return esmm_backend_register(&toy) ? 0 : -1;
}

/* ---- the public interface through it ---- */

static esmm_ctx *open_toy(const char *device)
{
  esmm_ctx *ctx = NULL;
  char error[256] = "";
  const esmm_ctx_opts opts = {.size = sizeof opts, .device = device, .error = error, .error_size = sizeof error};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    fail_msg("%s", error);
  return ctx;
}

static void must(esmm_ctx *ctx, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", esmm_status_str(status), esmm_ctx_error(ctx));
}

static void refused(esmm_ctx *ctx, esmm_status status, esmm_status want, const char *text)
{
  if (status != want || !strstr(esmm_ctx_error(ctx), text))
    fail_msg("%s with '%s', not %s with '%s'", esmm_status_str(status), esmm_ctx_error(ctx), esmm_status_str(want),
             text);
}

static void contexts(void **state)
{
  (void)state;
  char error[256] = "";
  esmm_ctx *ctx = open_toy("toy:1");
  assert_string_equal(esmm_ctx_device(ctx), "toy:1");
  assert_string_equal(esmm_ctx_device_name(ctx), "Toy");
  assert_string_equal(esmm_ctx_features(ctx), "wooden");
  must(ctx, esmm_ctx_synchronize(ctx));
  must(ctx, esmm_ctx_set_stream(ctx, &seen)); /* it has streams, whatever they are */
  assert_ptr_equal(esmm_ctx_stream(ctx), &seen);
  assert_true(esmm_tune_path(ctx)[0] == '\0' || strstr(esmm_tune_path(ctx), "toy-wood.tune"));
  esmm_ctx_free(ctx);
  assert_true(seen.opened == 1 && seen.closed == 1 && seen.synchronized == 1);
  const char *wrong[] = {"toy:2", "toy:", "toys", "toy:x"};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const esmm_ctx_opts opts = {.size = sizeof opts, .device = wrong[i], .error = error, .error_size = sizeof error};
    assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_DEVICE);
    assert_non_null(strstr(error, i == 0 ? "there is no toy:2" : "'toy:N'"));
  }
}

static void products(void **state)
{
  (void)state;
  enum { M = 5, K = 70, N = 37 };
  esmm_ctx *ctx = open_toy("toy"), *cpu = th_ctx_on("cpu", 0);
  esmm_matrix a = th_matrix_alloc(M, K, ESMM_F32), b = th_matrix_alloc(K, N, ESMM_F32);
  th_fill(&a, 1, .4, true);
  th_fill(&b, 2, .6, true);
  esmm_matrix da = a, db = b, dc = {.rows = M, .cols = N}, want = th_matrix_alloc(M, N, ESMM_F32), got = want;
  da.place = db.place = dc.place = ESMM_DEVICE;
  must(ctx, esmm_memory_alloc(ctx, M * K * sizeof(float), &da.data));
  must(ctx, esmm_memory_alloc(ctx, K * N * sizeof(float), &db.data));
  must(ctx, esmm_memory_alloc(ctx, M * N * sizeof(float), &dc.data));
  da.ld = K;
  db.ld = N;
  must(ctx, esmm_matrix_copy(ctx, &a, &da));
  must(ctx, esmm_matrix_copy(ctx, &b, &db));
  assert_true(seen.allocated == 3 && seen.copied == 2);

  esmm_weights *w = NULL, *of_cpu = NULL;
  must(ctx, esmm_prepare(ctx, &db, NULL, &w));
  must(cpu, esmm_prepare(cpu, &b, NULL, &of_cpu));
  refused(cpu, esmm_matmul(cpu, &a, w, &want, NULL, NULL), ESMM_ERR_DEVICE, "prepared on toy:0");
  refused(ctx, esmm_matmul(ctx, &da, of_cpu, &dc, NULL, NULL), ESMM_ERR_DEVICE, "prepared on the CPU");
  esmm_stats stats = {.size = sizeof stats};
  must(ctx, esmm_matmul(ctx, &da, w, &dc, NULL, &stats));
  assert_string_equal(stats.kernel, "toy");
  must(cpu, esmm_matmul(cpu, &a, of_cpu, &want, NULL, NULL));
  got.data = malloc(M * N * sizeof(float));
  must(ctx, esmm_matrix_copy(ctx, &dc, &got));
  assert_memory_equal(got.data, want.data, M * N * sizeof(float)); /* small integers: exact */

  esmm_verdict verdicts[96];
  int count = 96;
  refused(ctx, esmm_explain(ctx, &da, w, &dc, NULL, verdicts, sizeof *verdicts, &count), ESMM_ERR_UNSUPPORTED,
          "no kernel is available");
  assert_true(seen.multiplied == 1 && seen.explained == 1);
  refused(ctx,
          esmm_matmul(ctx, &da, w, &dc, &(esmm_matmul_opts){.size = sizeof(esmm_matmul_opts), .force = "joint"}, NULL),
          ESMM_ERR_UNSUPPORTED, "a toy has no joint");
  refused(ctx,
          esmm_matmul(ctx, &da, w, &dc, &(esmm_matmul_opts){.size = sizeof(esmm_matmul_opts), .residual = &dc}, NULL),
          ESMM_ERR_UNSUPPORTED, "a toy has no residual");
  da.device = 1;
  refused(ctx, esmm_matmul(ctx, &da, w, &dc, NULL, NULL), ESMM_ERR_DEVICE, "toy:0 context");
  da.device = 0;

  esmm_pattern *pattern = NULL;
  must(ctx, esmm_pattern_extract(ctx, &da, 2, &pattern));
  assert_int_equal(seen.patterns, 1);
  esmm_pattern_free(pattern);
  esmm_matrix back = {.rows = K, .cols = N, .data = malloc(K * N * sizeof(float))};
  must(ctx, esmm_weights_to_dense(ctx, w, &back));
  assert_memory_equal(back.data, b.data, K * N * sizeof(float));

  free(back.data);
  free(got.data);
  esmm_weights_free(w);
  esmm_weights_free(of_cpu);
  assert_int_equal(seen.weights_freed, 1);
  void *const all[] = {da.data, db.data, dc.data};
  for (int i = 0; i < 3; i++)
    esmm_memory_free(ctx, all[i]);
  assert_int_equal(seen.freed, 3);
  free(a.data);
  free(b.data);
  free(want.data);
  esmm_ctx_free(ctx);
  esmm_ctx_free(cpu);
}

static void files_timers_refusals(void **state)
{
  (void)state;
  esmm_ctx *ctx = open_toy("toy");
  float values[6] = {1, 0, 2, 0, 0, 3}, again[6];
  esmm_matrix b = {.data = values, .rows = 2, .cols = 3}, out = {.data = again, .rows = 2, .cols = 3};
  esmm_weights *w = NULL, *loaded = NULL;
  char path[] = "/tmp/esmm-toy-XXXXXX";
  const int fd = mkstemp(path);
  assert_true(fd >= 0 && close(fd) == 0);
  must(ctx, esmm_prepare(ctx, &b, NULL, &w));
  must(ctx, esmm_weights_save(ctx, w, path));
  must(ctx, esmm_weights_load(ctx, path, &loaded));
  must(ctx, esmm_weights_to_dense(ctx, loaded, &out));
  assert_memory_equal(values, again, sizeof values);
  esmm_weights_free(w);
  esmm_weights_free(loaded);
  (void)remove(path);

  esmm_timer *timer = NULL;
  double seconds = -1;
  must(ctx, esmm_timer_create(ctx, &timer));
  must(ctx, esmm_timer_start(timer));
  must(ctx, esmm_timer_stop(timer));
  must(ctx, esmm_timer_seconds(timer, &seconds));
  assert_true(seconds >= 0 && seen.timers == 1);
  esmm_timer_free(timer);

  w = NULL;
  refused(ctx,
          esmm_prepare(ctx, &b,
                       &(esmm_prepare_opts){.size = sizeof(esmm_prepare_opts), .format = {.kind = ESMM_FORMAT_BSR}},
                       &w),
          ESMM_ERR_UNSUPPORTED, "toy:0 context");
  esmm_ffn *ffn = NULL;
  refused(ctx, esmm_ffn_create(ctx, &(esmm_ffn_opts){.size = sizeof(esmm_ffn_opts), .d_model = 2, .d_hidden = 2}, &ffn),
          ESMM_ERR_UNSUPPORTED, "toy:0 context");
  refused(ctx, esmm_tune(ctx, 0, NULL, NULL), ESMM_ERR_UNSUPPORTED, "toy:0 has nothing to tune");
  esmm_kernel_info info = {.size = sizeof info};
  for (int i = 0; i < esmm_kernel_count(); i++) {
    must(ctx, esmm_kernel_get(ctx, i, &info));
    assert_int_equal(info.available, 0);
  }
  esmm_ctx_free(ctx);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {cmocka_unit_test(contexts), cmocka_unit_test(products),
                                     cmocka_unit_test(files_timers_refusals)};
  return cmocka_run_group_tests_name("backend", tests, bring_toy, NULL);
}
