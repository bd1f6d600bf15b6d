/*
 * test_cuda_recall.c: what a GPU's plan remembers of A's densities: when a report is asked for, when it is used, what
 * then runs, and what happens where it is late, never comes or has no memory to go to. On the driver of fake_cuda.c: no
 * GPU is needed. Kernels do nothing there but what a test lets them: here they report the densities that the test says,
 * at once, later by another thread, or never.
 */
#include "recall_rig.h"

/* How often such products report, and after how many calls that is used. Not taken from the code: watched. */
typedef struct rhythm {
  int delay;    /* from the call that reports to the one that uses it */
  int sampled;  /* calls from one sampling launch to the next, where the library runs */
  int reported; /* calls from one report to the next, where joint runs and reports itself */
} rhythm;

/* Calls from one report to the next; reports: where call() counts them. */
static int find_gap(rig *x, const int *reports)
{
  int last = -1;
  for (int i = 0; i < CALLS; i++) {
    call(x, NULL, NULL);
    if (*reports && last >= 0)
      return i - last;
    if (*reports)
      last = i;
  }
  fail_msg("no two reports in %d calls", CALLS);
  return 0;
}

static rhythm watch(double longer)
{
  rig x;
  rhythm found = {0};
  start(&x);
  set_costs(&x, longer);
  call(&x, NULL, NULL);
  assert_int_equal(gpu.samples + gpu.self, 1); /* the first always reports */
  for (found.delay = 1; found.delay < CALLS; found.delay++) {
    call(&x, NULL, NULL);
    if (recall_of(&x, M).known)
      break;
  }
  assert_true(ran_dense());
  found.sampled = find_gap(&x, &gpu.samples);
  assert_true(ran_dense());
  call_until(&x, 0.05f);
  assert_true(ran_joint());
  found.reported = find_gap(&x, &gpu.self);
  assert_true(ran_joint());
  stop(&x);
  return found;
}

static rhythm usual_rhythm(void)
{
  const rhythm r = watch(1);
  assert_true(1 < r.reported && r.reported < r.sampled && r.delay < r.sampled); /* or these tests show nothing */
  assert_true(3 * r.sampled + r.delay < CALLS);
  return r;
}

/* ---- when a report is used ---- */

/* Each call has another density: that shows whose report is used. */
static void reports_are_used_after_the_delay(void **state)
{
  (void)state;
  const rhythm h = usual_rhythm();
  rig x;
  bool reported[CALLS];
  int dense = 0, joint = 0;
  start(&x);
  for (int i = 0; i < CALLS; i++) {
    int used = -1, reports = 0;
    gpu.strip = (float)i / 4096 + (i / (2 * h.sampled) % 2 ? 0.0f : 0.9f);
    call(&x, NULL, NULL);
    reported[i] = gpu.samples + gpu.self > 0;
    assert_true(gpu.samples + gpu.self <= 1);
    for (int j = 0; j <= i - h.delay; j++)
      if (reported[j]) {
        used = j;
        reports++;
      }
    const esmm_recollection r = recall_of(&x, M);
    assert_int_equal(r.known, used >= 0);
    assert_int_equal(r.reports, reports);
    assert_int_equal(r.calls, i + 1);
    const bool sparse = used >= 0 && used / (2 * h.sampled) % 2;
    const double strip = used < 0 ? 0 : (double)((float)used / 4096 + (sparse ? 0.0f : 0.9f));
    if (r.strip_density_a != strip || r.joint_density > strip || (used >= 0 && r.strip_rows != ESMM_TILE))
      fail_msg("call %d is to use the report of call %d: %g, not %g", i, used, strip, r.strip_density_a);
    if (!(sparse ? ran_joint() : ran_dense()))
      fail_msg("call %d at %g: %s", i, strip, gpu.product);
    dense += !sparse;
    joint += sparse;
  }
  assert_true(dense > 10 && joint > 10);
  assert_false(recall_of(&x, 8).known); /* another class of rows */
  stop(&x);
}

/* A kernel that reports itself does so more often than it would be sampled, and is not sampled. */
static void skipping_kernels_report(void **state)
{
  (void)state;
  const rhythm h = usual_rhythm();
  rig x;
  start(&x);
  gpu.strip = 0.05f;
  expect_strips(&x, 0.05);
  for (int i = 0; i <= 2 * h.sampled; i++) {
    call(&x, NULL, NULL);
    assert_true(ran_joint());
    if (gpu.self != (i % h.reported == 0) || gpu.samples)
      fail_msg("call %d: %d samples, %d reports of the kernel", i, gpu.samples, gpu.self);
  }
  assert_int_equal(recall_of(&x, M).reports, 1 + (2 * h.sampled - h.delay) / h.reported);
  stop(&x);
}

/* A report costs a short product more, and the host is more of them ahead of the GPU. */
static void short_products_report_less_often(void **state)
{
  (void)state;
  const rhythm of[] = {watch(0.1), watch(1), watch(10)};
  for (int i = 1; i < 3; i++) {
    assert_true(of[i].delay < of[i - 1].delay);
    assert_true(of[i].sampled < of[i - 1].sampled);
    assert_true(of[i].reported < of[i - 1].reported);
  }
  assert_int_equal(of[2].sampled, 1); /* long ones always do */
  assert_true(of[0].delay < ESMM_REPORTS && of[0].sampled <= ESMM_REPORTS);
}

/* The products of a sequence of calls whose zeros come and go. */
static void record(rig *x, bool with_stats, char log[CALLS][80])
{
  uint32_t random = 12345;
  for (int i = 0; i < CALLS; i++) {
    esmm_stats stats;
    random = random * 1664525u + 1013904223u;
    gpu.strip = i % (CALLS / 2) < CALLS / 4 ? 0.9f + 0.1f * (float)(random >> 28) / 16.0f : 0.04f;
    call(x, NULL, with_stats ? &stats : NULL);
    (void)snprintf(log[i], sizeof log[i], "%s%s", gpu.product, gpu.chooses ? ", chooses" : "");
  }
}

static void same_calls_same_kernels(void **state)
{
  (void)state;
  static char first[CALLS][80], again[CALLS][80];
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
  const rhythm h = usual_rhythm();
  rig x;
  start(&x);
  start_late(1);
  gpu.when = LATER;
  gpu.strip = 0.05f;
  for (int i = 0; i <= h.delay; i++)
    call(&x, NULL, NULL);
  assert_true(ran_joint() && recall_of(&x, M).known);
  stop_late();
  stop(&x);
}

static void missing_reports_are_given_up(void **state)
{
  (void)state;
  const rhythm h = usual_rhythm();
  rig x;
  char unknown[64];
  start(&x);
  gpu.when = NEVER;
  call(&x, NULL, NULL);
  (void)snprintf(unknown, sizeof unknown, "%s", gpu.product);
  for (int i = 1; i < h.delay; i++)
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

/* An explanation says what the next call does. */
static void explain(rig *x, esmm_verdict *chosen)
{
  esmm_verdict verdicts[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS;
  assert_int_equal(esmm_explain(x->ctx, &x->a, x->w, &x->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
  for (int i = 0; i < count; i++)
    if (verdicts[i].chosen) {
      *chosen = verdicts[i];
      return;
    }
  fail_msg("no kernel is chosen");
}

static void reasons_and_explanations(void **state)
{
  (void)state;
  const rhythm h = usual_rhythm();
  rig x;
  esmm_stats stats;
  esmm_verdict chosen;
  start(&x);
  gpu.strip = 0.05f;
  for (int i = 0; i <= h.delay; i++) {
    explain(&x, &chosen);
    call(&x, NULL, &stats);
    assert_string_equal(chosen.kernel, stats.kernel);
    assert_string_equal(stats.kernel, i < h.delay ? "cublas_bf16" : "joint_bf16_sm90a");
    if (i < h.delay)
      assert_non_null(strstr(stats.reason, "nothing remembered yet: "));
  }
  const char *const parts[] = {"remembered from 1 call: strips 5 %; cheapest of ", " ms, then "};
  for (int i = 0; i < 2; i++)
    if (!strstr(stats.reason, parts[i]) || !strstr(chosen.text, parts[i]))
      fail_msg("'%s' is not in '%s', or not in '%s'", parts[i], stats.reason, chosen.text);
  assert_int_equal(esmm_forget(x.ctx), ESMM_OK);
  assert_true(!recall_of(&x, M).known && recall_of(&x, M).calls == 0);
  expect_strips(&x, 0.125);
  call(&x, NULL, &stats);
  assert_non_null(strstr(stats.reason, "expected: strips 12.5 %; "));
  stop(&x);
}

/* The ratio of joint's time and cuBLAS's, on the way from one to another, at which the other kernel begins to run. */
static double find_flip(rig *x, double from, double to, bool to_joint)
{
  enum { STEPS = 60 };
  const double base = ZEROS_SECONDS, slope = JOINT_SECONDS - ZEROS_SECONDS;
  for (int i = 0; i <= STEPS; i++) {
    const double ratio = from + (to - from) * i / STEPS;
    call_until(x, (float)((ratio * LIBRARY_SECONDS - base) / slope));
    if (to_joint ? ran_joint() : ran_dense())
      return ratio;
    if (!(to_joint ? ran_dense() : ran_joint()))
      fail_msg("joint takes %g times as long as cuBLAS: %s", ratio, gpu.product);
  }
  fail_msg("no other kernel runs, though joint's time goes from %g to %g times that of cuBLAS", from, to);
  return 0;
}

/* The library is replaced only by what is cheaper, and near the line what ran before stays. */
static void kernels_do_not_flip(void **state)
{
  (void)state;
  rig x;
  start(&x);
  const double down = find_flip(&x, 1.3, 0.7, true), up = find_flip(&x, 0.7, 1.3, false);
  if (!(down > 0.8 && down < 0.99 && up > down + 0.02 && up < 1.1))
    fail_msg("joint runs from %g times the time of cuBLAS on, and cuBLAS again from %g on", down, up);
  stop(&x);
}

/* Kernels for GPUs without those of sm_90a do not replace the library where these can run, and stay of use where there
   is no library. */
static void stand_ins_do_not_replace_the_library(void **state)
{
  (void)state;
  for (int library = 0; library < 2; library++) {
    rig x;
    esmm_stats stats;
    start(&x);
    cost_of(&x, "dense_bf16_sm90a")[ESMM_COST_TERMS - 1] = NEVER_SECONDS;
    cost_of(&x, "joint_bf16_sm90a")[ESMM_COST_TERMS - 1] = NEVER_SECONDS;
    for (int i = 0; i < esmm_registry_count(); i++)
      if (esmm_registry_at(i)->device && esmm_registry_at(i)->backend == x.ctx->backend &&
          esmm_cuda_about(esmm_registry_at(i))->stand_in)
        x.ctx->cost[i][ESMM_COST_TERMS - 1] = LIBRARY_SECONDS / 2;
    fake->cublas = library ? 0 : NO_CUBLAS;
    expect_strips(&x, 0.05);
    call(&x, NULL, &stats);
    if (library ? !ran_dense() : !strstr(stats.kernel, "bf16_mma"))
      fail_msg("with library %d: %s", library, stats.kernel);
    stop(&x);
  }
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
  const rhythm h = usual_rhythm();
  rig x;
  start(&x);
  rig host = x;
  host.a = th_matrix_alloc(M, K, ESMM_BF16);
  host.c = th_matrix_alloc(M, N, ESMM_BF16);
  gpu.strip = 0.05f;
  for (int i = 0; i <= h.delay; i++) {
    call(i % 2 ? &x : &host, NULL, NULL);
    assert_int_equal(gpu.samples + gpu.self, i == 0);
    assert_int_equal(ran_joint(), i == h.delay);
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
  enum { WEIGHTS = ESMM_RECALL_ENTRIES + 44 };
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

/* What was remembered of weights that are gone, or is still to be reported, is not taken for what lies there now. */
static void weights_at_the_same_address(void **state)
{
  (void)state;
  rig x;
  int same = 0;
  start(&x);
  start_late(1);
  for (int i = 0; i < 6; i++) {
    const esmm_weights *old = x.w;
    gpu.when = i % 2 ? LATER : AT_ONCE;
    expect_strips(&x, 0.05);
    call(&x, NULL, NULL);
    assert_true(ran_joint());
    esmm_weights_free(x.w);
    prepare_rig(&x);
    same += x.w == old;
    assert_true(!recall_of(&x, M).known && recall_of(&x, M).calls == 0);
  }
  print_message("# the same address %d times of 6\n", same);
  stop_late();
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
  call_until(&x, 1.0f);
  assert_true(find_gap(&x, &gpu.samples) > 1); /* so the next one is not to report */
  const int64_t made = esmm_recall_shapes_made(x.ctx), before = fake->calls;
  call(&x, NULL, NULL);
  assert_true(ran_dense() && gpu.samples == 0);
  assert_int_equal(esmm_recall_shapes_made(x.ctx), made);
  /* The current context, asked for, set and put back; capture; stream. cuBLAS is apart. */
  assert_true(fake->calls - before <= 5);
  x.a.rows = x.c.rows = M - 1;
  call(&x, NULL, NULL);
  assert_int_equal(esmm_recall_shapes_made(x.ctx), made + 1);
  x.a.rows = x.c.rows = M;
  stop(&x);
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(reports_are_used_after_the_delay),
                                    TEST(skipping_kernels_report),
                                    TEST(short_products_report_less_often),
                                    TEST(same_calls_same_kernels),
                                    TEST(late_reports_are_waited_for),
                                    TEST(missing_reports_are_given_up),
                                    TEST(reasons_and_explanations),
                                    TEST(kernels_do_not_flip),
                                    TEST(stand_ins_do_not_replace_the_library),
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
