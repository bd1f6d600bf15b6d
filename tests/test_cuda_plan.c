/*
 * test_cuda_plan.c: what the plan of a GPU launches where the density of A decides, and what it then says of it, on the
 * driver of fake_cuda.c: no GPU is needed. Kernels do nothing there but what a test lets them: here they note how they
 * were launched, and report what A's densities are and what the device has chosen.
 */
#include "cuda/cuda.h"
#include "cuda/ffn/decode_params.h"
#include "cuda/kernels/decode/decode_params.h"
#include "fake_gpu.h"

#include <math.h>

ESMM_FATBIN(ffn_decode);

enum { SIZE = 4096, MOST = 16 }; /* so large that skipping can pay for asking; launches of a call */

static struct {
  int count;
  char name[MOST][64];
  esmm_wgmma16_params wgmma16;  /* of the last launch of that kernel */
  esmm_decode_params decode;    /* the same */
  esmm_selector selector[MOST]; /* of kernels of 16-bit operands */
  esmm_choice_device says;
} seen;

static bool is_wgmma16(const char *name)
{
  return strncmp(name, "esmm_wgmma16_", 13) == 0;
}

/* Stands in for every kernel. Device memory is the host's. */
static void note_launch(const char *name, const void *params)
{
  assert_true(seen.count < MOST);
  (void)snprintf(seen.name[seen.count], sizeof seen.name[0], "%s", name);
  if (is_wgmma16(name)) {
    memcpy(&seen.wgmma16, params, sizeof seen.wgmma16);
    seen.selector[seen.count] = seen.wgmma16.selector;
    if (seen.wgmma16.report)
      memcpy(esmm_cuda_pointer(seen.wgmma16.report), &seen.says, sizeof seen.says);
  } else if (strncmp(name, "esmm_decode_", 12) == 0) {
    memcpy(&seen.decode, params, sizeof seen.decode);
    const uint64_t reports[] = {seen.decode.report, seen.decode.gate_report};
    for (int i = 0; i < 2; i++)
      if (reports[i])
        memcpy(esmm_cuda_pointer(reports[i]), &seen.says, sizeof seen.says);
  } else if (strcmp(name, "esmm_sample") == 0) {
    esmm_sample_params sample;
    memcpy(&sample, params, sizeof sample);
    memcpy(esmm_cuda_pointer(sample.out), &seen.says, sizeof seen.says);
  } else if (strncmp(name, "esmm_joint_", 11) == 0 || strncmp(name, "esmm_dense_", 11) == 0) {
    memcpy(&seen.selector[seen.count], params, sizeof seen.selector[0]); /* their parameters begin with it */
  }
  seen.count++;
}

static int count_of(const char *start)
{
  int count = 0;
  for (int i = 0; i < seen.count; i++)
    count += strncmp(seen.name[i], start, strlen(start)) == 0;
  return count;
}

static int count_passes(void) /* over C, for its statistics */
{
  return count_of("esmm_tally") - count_of("esmm_tally_begin") - count_of("esmm_tally_count");
}

/* A square product of one dtype whose B has no zeros. */
typedef struct square {
  meter m;
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, b, c;
  const char *dense, *joint; /* the pair */
} square;

static void square_start(square *s, esmm_dtype dtype)
{
  const bool bf16 = dtype == ESMM_BF16;
  *s = (square){.dense = bf16 ? "dense_bf16_sm90a" : "dense_f16_sm90a",
                .joint = bf16 ? "joint_bf16_sm90a" : "joint_f16_sm90a"};
  s->ctx = must_create(&s->m);
  esmm_matrix shape = {.rows = SIZE, .cols = SIZE, .dtype = dtype};
  assert_int_equal(place(s->ctx, &shape, &s->a), ESMM_OK);
  assert_int_equal(place(s->ctx, &shape, &s->b), ESMM_OK);
  assert_int_equal(place(s->ctx, &shape, &s->c), ESMM_OK);
  const esmm_prepare_opts opts = {.size = sizeof opts, .strict = 1}; /* every bit of B's is set, without a kernel */
  assert_int_equal(esmm_prepare(s->ctx, &s->b, &opts, &s->w), ESMM_OK);
  fake->kernel = note_launch;
}

static void square_stop(square *s)
{
  fake->kernel = NULL;
  esmm_weights_free(s->w);
  esmm_memory_free(s->ctx, s->a.data);
  esmm_memory_free(s->ctx, s->b.data);
  esmm_memory_free(s->ctx, s->c.data);
  esmm_ctx_free(s->ctx);
  assert_int_equal(s->m.live, 0);
  check_balance("a square product");
}

static void square_run(square *s, esmm_stats *stats)
{
  seen.count = 0;
  if (stats)
    *stats = (esmm_stats){.size = sizeof *stats};
  if (esmm_matmul(s->ctx, &s->a, s->w, &s->c, NULL, stats) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(s->ctx));
}

/* The plan's estimate for a kernel at the densities that the device says. */
static double seconds_of(square *s, const char *kernel)
{
  esmm_verdict verdicts[ESMM_MAX_KERNELS];
  int count = ESMM_MAX_KERNELS;
  seen.count = 0;
  assert_int_equal(esmm_explain(s->ctx, &s->a, s->w, &s->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
  for (int i = 0; i < count; i++)
    if (strcmp(verdicts[i].kernel, kernel) == 0 && verdicts[i].can_run)
      return verdicts[i].seconds;
  fail_msg("%s is not among the verdicts", kernel);
  return 0;
}

static void expect_near(const char *what, double got, double want)
{
  if (!(fabs(got - want) <= 1e-6 * fabs(want)))
    fail_msg("%s is %.9g, not %.9g", what, got, want);
}

/* The line that the kernel was given is the plan's own. */
static void check_line(square *s)
{
  const esmm_wgmma16_params p = seen.wgmma16;
  seen.says = (esmm_choice_device){0};
  expect_near("the dense kernel's cost", (double)p.dense, seconds_of(s, s->dense));
  expect_near("the base", (double)p.base, seconds_of(s, s->joint));
  seen.says = (esmm_choice_device){.strip = 0.5f, .joint = 0.25f};
  expect_near("the line", (double)p.base + 0.5 * (double)p.per_strip + 0.25 * (double)p.per_joint,
              seconds_of(s, s->joint));
  if (!(p.base < p.dense && p.base + p.per_strip + p.per_joint > p.dense))
    fail_msg("A decides nothing: dense %g, base %g, per strip %g, per joint %g", (double)p.dense, (double)p.base,
             (double)p.per_strip, (double)p.per_joint);
}

/* One launch without a selector, which chooses; statistics name what it says that it chose. */
static void check_pair(square *s, int mode)
{
  const char *const function = strstr(s->joint, "bf16") ? "esmm_wgmma16_bf16" : "esmm_wgmma16_f16";
  seen.says = (esmm_choice_device){0};
  square_run(s, NULL);
  if (seen.count != 1 || strcmp(seen.name[0], function) != 0)
    fail_msg("%d launches, the first %s and the last %s: not %s alone", seen.count, seen.name[0],
             seen.name[seen.count - 1], function);
  assert_int_equal(seen.wgmma16.selector.address, 0);
  assert_int_equal(seen.wgmma16.choose, 1);
  assert_int_equal(seen.wgmma16.mode, mode);
  assert_true(seen.wgmma16.m == SIZE && seen.wgmma16.n == SIZE && seen.wgmma16.k == SIZE);
  assert_true(seen.wgmma16.packed && seen.wgmma16.lists && seen.wgmma16.counts && seen.wgmma16.a_bits &&
              seen.wgmma16.meeting);
  assert_true(seen.wgmma16.a == esmm_cuda_address(&s->a) && seen.wgmma16.b == esmm_cuda_of(s->w)->rows);
  check_line(s);
  for (uint32_t chosen = 0; chosen < 2; chosen++) {
    const char *ran = chosen ? s->joint : s->dense, *other = chosen ? s->dense : s->joint;
    const float strip = chosen ? 0.125f : 0.75f;
    esmm_stats stats;
    seen.says = (esmm_choice_device){.chosen = chosen, .element = 0.0625f, .strip = strip, .joint = strip};
    square_run(s, &stats);
    assert_int_equal(count_of("esmm_wgmma16_"), 1);
    assert_int_equal(seen.wgmma16.choose, 1);
    assert_int_equal(seen.wgmma16.selector.address, 0);
    assert_int_equal(count_of("esmm_dense_") + count_of("esmm_joint_"), 0);
    assert_string_equal(stats.kernel, ran);
    if (!strstr(stats.reason, "cheapest of ") || !strstr(stats.reason, other))
      fail_msg("%s ran, the reason is '%s'", ran, stats.reason);
    assert_int_equal(stats.strip_rows, chosen ? ESMM_TILE : 0);
    assert_int_equal(stats.strip_cols, ESMM_TILE);
    assert_true(stats.density_a == 0.0625);
    if (!chosen)
      assert_true(stats.joint_density == 1 && stats.strip_density_a == 0.75);
    assert_true(stats.seconds_total > 0 && stats.seconds_multiply > 0);
  }
}

static void pair_is_one_launch(void **state)
{
  (void)state;
  for (int dtype = ESMM_BF16; dtype <= ESMM_F16; dtype++) {
    square s;
    reset();
    square_start(&s, (esmm_dtype)dtype);
    check_pair(&s, ESMM_WGMMA16_SKIP_A);
    s.w->full = false; /* as if B's strips and tiles had half their bits */
    s.w->strip_density = ((esmm_cuda_weights *)s.w->device)->tile_density = 0.5;
    check_pair(&s, ESMM_WGMMA16_SKIP_AB);
    square_stop(&s);
  }
}

/* Makes the plan believe that a kernel takes so long for this product. */
static void set_seconds(square *s, const char *kernel, double seconds)
{
  const double now = seconds_of(s, kernel);
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(esmm_registry_at(i)->name, kernel) == 0)
      for (int term = 0; term < ESMM_COST_TERMS; term++)
        s->ctx->cost[i][term] *= seconds / now;
}

/* cuBLAS cannot wait for the device's choice. Where it is no better than our own dense kernel by more than a trifle,
   the pair runs; where it is, that alone. */
static void pair_beside_cublas(void **state)
{
  (void)state;
  fake->cublas = 0;
  square s;
  square_start(&s, ESMM_BF16);
  set_seconds(&s, "cublas_bf16", 0.99 * seconds_of(&s, s.dense));
  check_pair(&s, ESMM_WGMMA16_SKIP_A);
  const int64_t gemms = fake->gemms;
  set_seconds(&s, "cublas_bf16", 0.9 * seconds_of(&s, s.dense));
  square_run(&s, NULL);
  assert_int_equal(seen.count, 0);
  assert_int_equal(fake->gemms, gemms + 1);
  square_stop(&s);
}

/* What the kernel says of its extraction is taken out of its time. */
static void pair_tells_its_extraction(void **state)
{
  (void)state;
  square s;
  esmm_stats without, with;
  square_start(&s, ESMM_BF16);
  seen.says = (esmm_choice_device){.chosen = 1, .strip = 0.125f, .joint = 0.125f};
  square_run(&s, &without);
  seen.says.extract_ns = 20000;
  square_run(&s, &with);
  expect_near("seconds_extract", with.seconds_extract, without.seconds_extract + 2e-5);
  expect_near("seconds_multiply", with.seconds_multiply, without.seconds_multiply - 2e-5);
  square_stop(&s);
}

/* What the plan takes the density of strips of 8 rows for, at these of elements and of strips of 128: from the seconds
   of the kernel that has such strips, which are a line in it. */
static double strip8_density(square *s, float element, float strip)
{
  seen.says = (esmm_choice_device){0};
  const double none = seconds_of(s, "fine_bf16_sm90a");
  seen.says = (esmm_choice_device){.strip = 1.0f, .joint = 1.0f}; /* elements are not known: strips say all there is */
  const double all = seconds_of(s, "fine_bf16_sm90a");
  seen.says = (esmm_choice_device){.element = element, .strip = strip, .joint = strip};
  return (seconds_of(s, "fine_bf16_sm90a") - none) / (all - none);
}

static void expect_strip8(square *s, double element, double strip, double want, double part)
{
  const double got = strip8_density(s, (float)element, (float)strip);
  if (!(fabs(got - want) <= part * want))
    fail_msg("elements %g, strips of 128 %g: strips of 8 are %g, not %g", element, strip, got, want);
}

static void strips_of_8_rows_follow_from_elements_and_larger_ones(void **state)
{
  (void)state;
  square s;
  square_start(&s, ESMM_BF16);
  for (double e = 0.001; e < 0.2; e *= 3) /* anywhere */
    expect_strip8(&s, e, 1 - pow(1 - e, 128), 1 - pow(1 - e, 8), 0.02);
  expect_strip8(&s, 0.01, 1, 1 - pow(0.99, 8), 0.02);          /* spread more evenly than that */
  expect_strip8(&s, 0.1, 0.1, 0.1, 0.01);                      /* whole strips */
  expect_strip8(&s, 0.02, 0.1, 0.1 * (1 - pow(0.8, 8)), 0.02); /* anywhere in a tenth of the k's */
  expect_strip8(&s, 0, 0.3, 0.3, 1e-6);                        /* not known */
  expect_strip8(&s, 1, 1, 1, 1e-6);
  square_stop(&s);
}

static void expect_densities(square *s, double element, double strip)
{
  const esmm_recollection r = {
      .size = sizeof r, .density_a = element, .strip_density_a = strip, .strip_rows = ESMM_TILE};
  assert_int_equal(esmm_expect(s->ctx, s->w, SIZE, &r), ESMM_OK);
}

/* A few nonzeros anywhere: packed and multiplied by strips of 8 rows. Where they come together, or are many, or nobody
   has counted them, by others. */
static void few_nonzeros_anywhere_run_on_strips_of_8_rows(void **state)
{
  (void)state;
  square s;
  unsetenv("ESMM_REMEMBER"); /* densities have to be known */
  square_start(&s, ESMM_BF16);
  setenv("ESMM_REMEMBER", "0", 1);
  seen.says = (esmm_choice_device){.element = 0.01f, .strip = 0.72f, .joint = 0.72f};
  const struct {
    double element, strip;
    bool fine;
  } cases[] = {{0.01, 0.724, true}, {0.004, 0.4, true}, {0.01, 0.012, false}, {0.5, 0.724, false},
               {0, 0.724, false},   {0.1, 1, false},    {0, 0, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(esmm_forget(s.ctx), ESMM_OK);
    expect_densities(&s, cases[i].element, cases[i].strip);
    square_run(&s, NULL);
    const int launched = count_of("esmm_fine16_");
    if (launched != (cases[i].fine ? 2 : 0))
      fail_msg("elements %g, strips %g: %d launches of fine16, then %s", cases[i].element, cases[i].strip, launched,
               seen.name[0]);
  }
  square_stop(&s);
}

/* Packing reads rows in lines of 16 bytes; any other A is copied first. */
static void fine_copies_what_it_cannot_read(void **state)
{
  (void)state;
  square s;
  square_start(&s, ESMM_BF16);
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = "fine"};
  for (int i = 0; i < 3; i++) {
    esmm_matrix a = s.a;
    if (i == 1)
      a.order = ESMM_COL_MAJOR;
    if (i == 2) {
      a.rows = a.ld = SIZE / 2 + 1; /* a square in the same memory whose lines are odd */
      a.order = ESMM_COL_MAJOR;
    }
    esmm_matrix c = s.c;
    c.rows = a.rows;
    seen.count = 0;
    if (esmm_matmul(s.ctx, &a, s.w, &c, &opts, NULL) != ESMM_OK)
      fail_msg("%s", esmm_ctx_error(s.ctx));
    assert_int_equal(count_of("esmm_convert"), i > 0);
    assert_int_equal(count_of("esmm_fine16_pack"), 1);
    assert_string_equal(seen.name[seen.count - 1], "esmm_fine16_bf16");
  }
  square_stop(&s);
}

/* Forced, the same kernels do not choose. */
static void forced_kernels_do_not_choose(void **state)
{
  (void)state;
  square s;
  square_start(&s, ESMM_F16);
  for (int i = 0; i < 2; i++) {
    const esmm_matmul_opts opts = {.size = sizeof opts, .force = i ? s.joint : s.dense};
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL), ESMM_OK);
    assert_int_equal(seen.count, 1);
    assert_string_equal(seen.name[0], "esmm_wgmma16_f16");
    assert_int_equal(seen.wgmma16.choose, 0);
    assert_int_equal(seen.wgmma16.selector.address, 0);
    assert_int_equal(seen.wgmma16.mode, i ? ESMM_WGMMA16_SKIP_A : ESMM_WGMMA16_DENSE);
  }
  square_stop(&s);
}

/* A GPU without such a pair: a sample, then both kernels, each behind its selector. */
static void others_have_selectors(void **state)
{
  (void)state;
  for (int dtype = ESMM_BF16; dtype <= ESMM_F16; dtype++) {
    square s;
    reset();
    fake->sm = 80;
    square_start(&s, (esmm_dtype)dtype);
    square_run(&s, NULL);
    assert_string_equal(seen.name[0], "esmm_sample");
    assert_int_equal(count_of("esmm_wgmma16_"), 0);
    assert_true(count_of("esmm_joint_") >= 1 && count_of("esmm_dense_") == 1);
    for (int i = 1; i < seen.count; i++) {
      assert_true(seen.selector[i].address != 0 && seen.selector[i].address == seen.selector[1].address);
      assert_int_equal(seen.selector[i].value, strncmp(seen.name[i], "esmm_joint_", 11) == 0);
    }
    square_stop(&s);
  }
}

/* Every part of an epilogue runs: in the kernel, a gate as a product before it, statistics as a pass behind it. */
static void every_part_of_the_epilogue_runs(void **state)
{
  (void)state;
  bench b;
  esmm_pattern *pattern = NULL;
  void *counts = NULL;
  bench_start(&b);
  assert_int_equal(esmm_memory_alloc(b.ctx, 72 * sizeof(int32_t), &counts), ESMM_OK);
  fake->kernel = note_launch;
  const struct {
    const char *word;
    esmm_matmul_opts opts;
    int products, passes;
  } parts[] = {{"nothing", {0}, 1, 0},
               {"GELU", {.activation = ESMM_ACT_GELU}, 1, 0},
               {"GELU_TANH", {.activation = ESMM_ACT_GELU_TANH}, 1, 0},
               {"SILU", {.activation = ESMM_ACT_SILU}, 1, 0},
               {"residual", {.residual = &b.c}, 1, 0},
               {"gate", {.gate = b.w}, 2, 0},
               {"counts", {.column_nonzeros = counts}, 1, 1},
               {"pattern", {.c_pattern = &pattern}, 1, 1},
               {"all", {.gate = b.w, .residual = &b.c, .column_nonzeros = counts, .c_pattern = &pattern}, 2, 1}};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    esmm_matmul_opts opts = parts[i].opts;
    int count = 0;
    opts.size = sizeof opts;
    opts.force = "joint_f32";
    assert_int_equal(esmm_explain(b.ctx, &b.a, b.w, &b.c, &opts, NULL, 0, &count), ESMM_OK);
    assert_null(pattern);
    seen.count = 0;
    if (esmm_matmul(b.ctx, &b.a, b.w, &b.c, &opts, NULL) != ESMM_OK)
      fail_msg("%s: %s", parts[i].word, esmm_ctx_error(b.ctx));
    if (count_of("esmm_joint_f32") != parts[i].products || count_passes() != parts[i].passes)
      fail_msg("%s: %d products, %d passes", parts[i].word, count_of("esmm_joint_f32"), count_passes());
    const float alpha = 0;
    opts.alpha = &alpha;
    esmm_pattern_free(pattern);
    pattern = NULL;
    seen.count = 0;
    if (esmm_matmul(b.ctx, &b.a, b.w, &b.c, &opts, NULL) != ESMM_OK)
      fail_msg("%s: %s", parts[i].word, esmm_ctx_error(b.ctx));
    assert_int_equal(count_of("esmm_finish"), parts[i].products);
    assert_int_equal(count_passes(), parts[i].passes);
    esmm_pattern_free(pattern);
    pattern = NULL;
  }
  const esmm_matmul_opts wrong = {.size = sizeof wrong, .activation = (esmm_activation)6};
  th_expect("no activation", esmm_matmul(b.ctx, &b.a, b.w, &b.c, &wrong, NULL), ESMM_ERR_ARGUMENT,
            esmm_ctx_error(b.ctx), "activation", "6");
  fake->kernel = NULL;
  esmm_memory_free(b.ctx, counts);
  bench_stop(&b, "every part of an epilogue");
}

/* Where TMA can write C, dense has an entry for curves and residuals; joint, and a residual that is read one by one, go
   through shared memory. */
static void curves_and_residuals_have_an_entry(void **state)
{
  (void)state;
  square s;
  reset();
  square_start(&s, ESMM_BF16);
  esmm_matrix odd = s.b;
  odd.order = ESMM_COL_MAJOR;
  const struct {
    esmm_matmul_opts opts;
    const char *function;
    int boxes;
  } cases[] = {{{.force = s.dense, .activation = ESMM_ACT_RELU}, "esmm_wgmma16_bf16", 1},
               {{.force = s.dense, .activation = ESMM_ACT_GELU}, "esmm_wgmma16_more_bf16", 1},
               {{.force = s.dense, .residual = &s.c}, "esmm_wgmma16_more_bf16", 1},
               {{.force = s.dense, .residual = &odd}, "esmm_wgmma16_bf16", 0},
               {{.force = s.joint, .activation = ESMM_ACT_GELU}, "esmm_wgmma16_bf16", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    esmm_matmul_opts opts = cases[i].opts;
    opts.size = sizeof opts;
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL), ESMM_OK);
    assert_int_equal(seen.count, 1);
    assert_string_equal(seen.name[0], cases[i].function);
    assert_int_equal(seen.wgmma16.c_boxes, cases[i].boxes);
  }
  square_stop(&s);
}

/* A gated product with the kernel of that name, or the plan's own. */
static void gated_run(square *s, const char *force, esmm_stats *stats)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force, .gate = s->w, .activation = ESMM_ACT_SILU};
  seen.count = 0;
  if (stats)
    *stats = (esmm_stats){.size = sizeof *stats};
  if (esmm_matmul(s->ctx, &s->a, s->w, &s->c, &opts, stats) != ESMM_OK)
    fail_msg("%s", esmm_ctx_error(s->ctx));
}

static void check_gated_launch(const square *s, const char *function)
{
  const esmm_wgmma16_params *p = &seen.wgmma16;
  if (count_of("esmm_wgmma16_") != 1 || count_of(function) != 1)
    fail_msg("%d launches, %d of %s", count_of("esmm_wgmma16_"), count_of(function), function);
  assert_int_equal(seen.count, 1 + count_of("esmm_sample"));
  assert_true(p->mode == ESMM_WGMMA16_DENSE && p->choose == 0 && p->c_boxes == 1);
  assert_true(p->gate_activation == ESMM_ACT_SILU && p->epilogue.activation == ESMM_ACT_NONE && !p->epilogue.factor);
  assert_int_equal(p->units[ESMM_WGMMA16_DENSE].cols, ESMM_WGMMA16_GATED);
  assert_memory_equal(&p->map_gate, &p->map_b, sizeof p->map_b); /* they are the same weights */
  assert_true(p->m == SIZE && p->n == SIZE && p->k == SIZE && p->a == esmm_cuda_address(&s->a));
}

/* Both branches of a gated product are one launch of the dense kernel: by its name, and where that is cheaper than two.
   Where A is known to have few nonzeros, skipping them twice is. The skipping kernel makes one branch alone. */
static void gated_is_one_launch(void **state)
{
  (void)state;
  for (int dtype = ESMM_BF16; dtype <= ESMM_F16; dtype++) {
    const char *function = dtype == ESMM_BF16 ? "esmm_wgmma16_gated_bf16" : "esmm_wgmma16_gated_f16";
    const esmm_matmul_opts opts = {.size = sizeof opts, .activation = ESMM_ACT_SILU};
    esmm_verdict verdicts[ESMM_MAX_KERNELS];
    esmm_stats stats;
    square s;
    int count = ESMM_MAX_KERNELS;
    reset();
    setenv("ESMM_REMEMBER", "1", 1);
    square_start(&s, (esmm_dtype)dtype);
    setenv("ESMM_REMEMBER", "0", 1);
    seen.says = (esmm_choice_device){.element = 1, .strip = 1, .joint = 1, .ready = 1};
    gated_run(&s, s.dense, NULL);
    check_gated_launch(&s, function);
    gated_run(&s, NULL, NULL);
    check_gated_launch(&s, function);
    gated_run(&s, NULL, &stats);
    assert_int_equal(count_of(function), 1);
    assert_string_equal(stats.kernel, s.dense);
    assert_true(stats.flop_dense == 4.0 * SIZE * SIZE * SIZE && stats.flop_useful == stats.flop_dense);
    if (!strstr(stats.reason, "both products in one launch"))
      fail_msg("the reason is '%s'", stats.reason);
    esmm_matmul_opts gated = opts;
    gated.gate = s.w;
    seen.count = 0;
    assert_int_equal(esmm_explain(s.ctx, &s.a, s.w, &s.c, &gated, verdicts, sizeof *verdicts, &count), ESMM_OK);
    for (int i = 0; i < count; i++)
      if (verdicts[i].chosen != (strcmp(verdicts[i].kernel, s.dense) == 0) ||
          (verdicts[i].chosen && !strstr(verdicts[i].text, "both products in one launch")))
        fail_msg("%s is%s chosen: '%s'", verdicts[i].kernel, verdicts[i].chosen ? "" : " not", verdicts[i].text);
    gated_run(&s, s.joint, NULL);
    assert_int_equal(count_of("esmm_wgmma16_"), 2);
    assert_int_equal(count_of(function), 0);
    seen.says = (esmm_choice_device){.chosen = 1, .element = .01f, .strip = .02f, .joint = .02f, .ready = 1};
    for (int i = 0; i < 4 * ESMM_REPORTS; i++)
      gated_run(&s, NULL, NULL);
    assert_int_equal(count_of(function), 0);
    square_stop(&s);
  }
}

static void check_gated_decode(const square *s, const char *function)
{
  const esmm_decode_params *p = &seen.decode;
  if (seen.count != 1 || strcmp(seen.name[0], function) != 0)
    fail_msg("%d launches, the first is %s, not %s", seen.count, seen.name[0], function);
  assert_true(p->gate_activation == ESMM_ACT_SILU && p->epilogue.activation == ESMM_ACT_NONE && !p->epilogue.factor);
  assert_true(p->gate == p->b && p->group_shift > 0 && p->a.data == esmm_cuda_address(&s->a));
}

/* Up to 16 rows: decode reads both weights in one launch, by its name and by the plan, whether A is known to have zeros
   or not; and that launch tells both weights' entries of the table what it saw, so that nothing samples A. */
static void gated_decode_is_one_launch(void **state)
{
  (void)state;
  for (int dtype = ESMM_BF16; dtype <= ESMM_F16; dtype++)
    for (int turn = 0; turn < 4; turn++) {
      const bool bf16 = dtype == ESMM_BF16, few = turn % 2 == 0;
      const char *const names[] = {"esmm_decode_gated_bf16_8", "esmm_decode_gated_bf16_16", "esmm_decode_gated_f16_8",
                                   "esmm_decode_gated_f16_16"};
      const char *function = names[2 * !bf16 + !few];
      const float strip = turn < 2 ? .05f : few ? 1.0f : .3f;
      int reports = 0;
      square s;
      reset();
      setenv("ESMM_REMEMBER", "1", 1);
      square_start(&s, (esmm_dtype)dtype);
      setenv("ESMM_REMEMBER", "0", 1);
      s.a.rows = s.c.rows = few ? 1 : 16;
      seen.says = (esmm_choice_device){.chosen = 1, .element = strip, .strip = strip, .joint = strip, .ready = 1};
      gated_run(&s, bf16 ? "decode_bf16" : "decode_f16", NULL);
      check_gated_decode(&s, function);
      for (int i = 0; i < 2 * ESMM_REPORTS; i++)
        gated_run(&s, NULL, NULL);
      for (int i = 0; i < ESMM_REPORTS; i++) {
        gated_run(&s, NULL, NULL);
        check_gated_decode(&s, function);
        reports += (seen.decode.report != 0) + (seen.decode.gate_report != 0);
      }
      assert_true(reports > 1);
      esmm_stats stats;
      gated_run(&s, NULL, &stats);
      assert_int_equal(count_of(function), 1);
      assert_true(stats.flop_dense == 4.0 * (double)s.a.rows * SIZE * SIZE);
      if (!strstr(stats.reason, "both products in one launch"))
        fail_msg("the reason is '%s'", stats.reason);
      square_stop(&s);
    }
}

/* Pairs of tiles that are left after whole rounds of 66 are split along k where that fills the GPU, after few rounds
   and after many. */
static void what_is_left_after_rounds_is_split(void **state)
{
  (void)state;
  static const struct {
    int64_t rows;
    int whole, splits;
  } cases[] = {{2304, 4 * 66, 2}, {3328, 6 * 66, 3}, {SIZE, 512, 1}}; /* 24, 20 and 50 are left */
  square s;
  square_start(&s, ESMM_BF16);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    s.a.rows = s.c.rows = cases[i].rows;
    gated_run(&s, s.dense, NULL);
    const esmm_wgmma16_units *u = &seen.wgmma16.units[ESMM_WGMMA16_DENSE];
    if (u->whole != cases[i].whole || u->splits != cases[i].splits)
      fail_msg("%d rows: %d whole tiles, the others in %d parts", (int)cases[i].rows, u->whole, u->splits);
  }
  square_stop(&s);
}

/* Where more than half of the 66 pairs have a tile that is left, the others begin with stages of it, if there are
   enough of them; not where a curve follows, nor in a launch that may choose to skip. */
static void stages_are_lent(void **state)
{
  (void)state;
  static const struct {
    int64_t rows;
    esmm_activation activation;
    int whole, lent;
  } cases[] = {{1792, ESMM_ACT_RELU2, 66, 15}, {3840, ESMM_ACT_NONE, 3 * 66, 19}, {SIZE, ESMM_ACT_NONE, 256, 0},
               {1536, ESMM_ACT_NONE, 66, 0},   {1792, ESMM_ACT_SILU, 112, 0},     {896, ESMM_ACT_NONE, 128, 0}};
  square s;
  square_start(&s, ESMM_BF16);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const esmm_matmul_opts opts = {.size = sizeof opts, .force = s.dense, .activation = cases[i].activation};
    s.a.rows = s.c.rows = cases[i].rows;
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL), ESMM_OK);
    const esmm_wgmma16_units *u = &seen.wgmma16.units[ESMM_WGMMA16_DENSE];
    if (u->whole != cases[i].whole || u->lent != cases[i].lent)
      fail_msg("%d rows: %d whole tiles, %d stages of the others lent", (int)cases[i].rows, u->whole, u->lent);
    assert_int_equal(count_of("esmm_wgmma16_lent_bf16"), cases[i].lent > 0);
    assert_true(cases[i].lent == 0 || seen.wgmma16.partial);
  }
  s.a.rows = s.c.rows = cases[0].rows;
  assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &(esmm_matmul_opts){.size = sizeof(esmm_matmul_opts)}, NULL),
                   ESMM_OK);
  assert_true(!seen.wgmma16.choose || seen.wgmma16.units[ESMM_WGMMA16_DENSE].lent == 0);
  square_stop(&s);
}

/* The kernels for 16 bits take the statistics in their own launch, where C and its strips allow it. Dense then clears
   before what it adds to, and counts the bits of strips as high as its tiles: no launch goes before or behind it. */
static void wgmma16_tallies_itself(void **state)
{
  (void)state;
  static const struct {
    esmm_order order;
    int64_t strip_rows;
    bool itself;
  } cases[] = {
      {ESMM_ROW_MAJOR, 128, true}, {ESMM_ROW_MAJOR, 8, true}, {ESMM_ROW_MAJOR, 12, false}, {ESMM_COL_MAJOR, 8, false}};
  square s;
  void *counts = NULL;
  square_start(&s, ESMM_BF16);
  assert_int_equal(esmm_memory_alloc(s.ctx, SIZE * sizeof(int32_t), &counts), ESMM_OK);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    esmm_pattern *pattern = NULL;
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .force = s.dense,
                                   .activation = ESMM_ACT_RELU2,
                                   .column_nonzeros = counts,
                                   .c_strip_rows = cases[i].strip_rows,
                                   .c_pattern = &pattern};
    esmm_matrix c = s.c;
    c.order = cases[i].order;
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &c, &opts, NULL), ESMM_OK);
    assert_int_equal(count_passes(), !cases[i].itself);
    assert_int_equal(seen.wgmma16.epilogue.extra, cases[i].itself ? ESMM_EXTRA_TALLY : 0);
    assert_int_equal(seen.wgmma16.epilogue.counts != 0, cases[i].itself);
    assert_int_equal(seen.wgmma16.epilogue.bits != 0, cases[i].itself);
    assert_int_equal(seen.wgmma16.c_boxes, cases[i].order == ESMM_ROW_MAJOR);
    assert_int_equal(count_of("esmm_tally_begin"), !cases[i].itself);
    assert_int_equal(count_of("esmm_tally_count"), cases[i].strip_rows != 128);
    assert_int_equal(seen.wgmma16.count_words, cases[i].itself ? SIZE : 0);
    assert_int_equal(seen.wgmma16.bitmap_words > 0, cases[i].itself);
    assert_int_equal(seen.wgmma16.bit_count != 0, cases[i].strip_rows == 128);
    if (cases[i].itself)
      assert_int_equal(seen.wgmma16.epilogue.strip_rows, cases[i].strip_rows);
    esmm_pattern_free(pattern);
  }
  esmm_memory_free(s.ctx, counts);
  square_stop(&s);
}

/* A pattern in host memory says how dense A is: the host chooses, and nothing is sampled. */
static void a_pattern_tells_densities(void **state)
{
  (void)state;
  square s;
  square_start(&s, ESMM_BF16);
  for (int full = 0; full < 2; full++) {
    esmm_matrix host = th_matrix_alloc(SIZE, SIZE, ESMM_BF16);
    th_fill(&host, 1, full ? 1.0 : 0.0, true);
    for (int64_t j = 0; j < SIZE; j++)
      th_set(&host, j, j / 64, 1);
    esmm_pattern *pattern = NULL;
    assert_int_equal(esmm_pattern_extract(s.ctx, &host, 8, &pattern), ESMM_OK);
    const esmm_matmul_opts opts = {.size = sizeof opts, .a_pattern = pattern};
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, NULL), ESMM_OK);
    assert_int_equal(count_of("esmm_sample"), 0);
    assert_int_equal(seen.count, 1);
    esmm_stats stats = {.size = sizeof stats};
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &opts, &stats), ESMM_OK);
    assert_non_null(strstr(stats.reason, "a_pattern"));
    assert_int_equal(strcmp(stats.kernel, s.dense) == 0, full);
    esmm_pattern_free(pattern);
    free(host.data);
  }
  square_stop(&s);
}

/* A pattern tells the plan; a kernel that is forced is launched as without one. */
static void a_pattern_changes_no_launch(void **state)
{
  (void)state;
  square s;
  esmm_pattern *pattern = NULL;
  square_start(&s, ESMM_BF16);
  const esmm_matmul_opts leave = {.size = sizeof leave, .force = s.dense, .c_strip_rows = 128, .c_pattern = &pattern};
  assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &leave, NULL), ESMM_OK);
  for (int noted = 0; noted < 2; noted++) {
    const esmm_matmul_opts plain = {.size = sizeof plain, .force = noted ? s.dense : s.joint};
    esmm_matmul_opts with_pattern = plain;
    with_pattern.a_pattern = pattern;
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &plain, NULL), ESMM_OK);
    const esmm_wgmma16_params before = seen.wgmma16;
    char name[64];
    (void)snprintf(name, sizeof name, "%s", seen.name[0]);
    assert_int_equal(seen.count, 1);
    seen.count = 0;
    assert_int_equal(esmm_matmul(s.ctx, &s.a, s.w, &s.c, &with_pattern, NULL), ESMM_OK);
    assert_int_equal(seen.count, 1);
    assert_string_equal(seen.name[0], name);
    assert_memory_equal(&seen.wgmma16, &before, sizeof before);
  }
  esmm_pattern_free(pattern);
  square_stop(&s);
}

/* A product by a kernel: how many of its launches were in clusters, and how many cooperative. */
static void check_launches(square *s, const char *kernel, int clusters, int cooperative)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = kernel};
  seen.count = 0;
  fake->clusters = fake->cooperative = 0;
  if (esmm_matmul(s->ctx, &s->a, s->w, &s->c, &opts, NULL) != ESMM_OK)
    fail_msg("%s: %s", kernel, esmm_ctx_error(s->ctx));
  if (fake->clusters != clusters || fake->cooperative != cooperative)
    fail_msg("%s: %d launches in clusters and %d cooperative, not %d and %d", kernel, (int)fake->clusters,
             (int)fake->cooperative, clusters, cooperative);
}

/* ESMM_COOPERATIVE=0, for profilers: launches in clusters are not cooperative, others that have to be are. */
static void clusters_without_cooperation(void **state)
{
  static const char *const values[] = {NULL, "", "1", "0"};
  static const esmm_cuda_function decode = {&fatbin_ffn_decode, "esmm_ffn_decode_bf16_8", 0};
  const esmm_launch alone = {.grid_x = 1, .threads = 32, .cooperative = 1}; /* as the layer's */
  const esmm_ffn_decode_params params = {0};
  (void)state;
  for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
    square s;
    reset();
    if (values[i])
      setenv("ESMM_COOPERATIVE", values[i], 1);
    square_start(&s, ESMM_BF16);
    check_launches(&s, s.dense, 1, i < 3);
    check_launches(&s, s.joint, 1, i < 3);
    fake->clusters = fake->cooperative = 0;
    assert_int_equal(esmm_cuda_begin(s.ctx, NULL), ESMM_OK);
    assert_int_equal(esmm_cuda_end(s.ctx, NULL, esmm_cuda_launch(s.ctx, &decode, &alone, NULL, &params)), ESMM_OK);
    assert_true(fake->clusters == 0 && fake->cooperative == 1);
    square_stop(&s);
  }
  static const char *const devices[] = {"cuda", "auto"}; /* not the CPU either: who sets it means a GPU */
  setenv("ESMM_COOPERATIVE", "no", 1);
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
    meter m = {0};
    char text[512];
    esmm_ctx *ctx = NULL;
    assert_int_equal(create(&m, devices[i], &ctx, text, sizeof text), ESMM_ERR_ARGUMENT);
    assert_null(ctx);
    assert_string_equal(text, "ESMM_COOPERATIVE is 'no'; it must be 0 or 1");
  }
  unsetenv("ESMM_COOPERATIVE");
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  setenv("ESMM_REMEMBER", "0", 1); /* each call planned by itself; test_cuda_recall.c has the others */
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(pair_is_one_launch),
                                    TEST(pair_beside_cublas),
                                    TEST(pair_tells_its_extraction),
                                    TEST(forced_kernels_do_not_choose),
                                    TEST(others_have_selectors),
                                    TEST(every_part_of_the_epilogue_runs),
                                    TEST(gated_is_one_launch),
                                    TEST(gated_decode_is_one_launch),
                                    TEST(what_is_left_after_rounds_is_split),
                                    TEST(curves_and_residuals_have_an_entry),
                                    TEST(stages_are_lent),
                                    TEST(wgmma16_tallies_itself),
                                    TEST(a_pattern_tells_densities),
                                    TEST(a_pattern_changes_no_launch),
                                    TEST(strips_of_8_rows_follow_from_elements_and_larger_ones),
                                    TEST(few_nonzeros_anywhere_run_on_strips_of_8_rows),
                                    TEST(fine_copies_what_it_cannot_read),
                                    TEST(clusters_without_cooperation)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda plan, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda plan", with, NULL, NULL);
}
