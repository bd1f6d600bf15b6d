/*
 * test_api.c: the interface as esmm.h promises it. Every status code is provoked, every error text must name the
 * argument and its value, and nothing may have changed after a failure.
 *
 * ESMM_ERR_OVERLAP is test_overlap.c's, devices are test_device.c's. ESMM_ERR_FORMAT, TRUNCATED, CHECKSUM and VERSION
 * are provoked by damaged files in test_weights_file.c too; ESMM_ERR_MEMORY for each single allocation in
 * test_faults.c.
 */
#include "harness.h"

#include <math.h>
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
  f->ctx = th_ctx(2);
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

static void expect_matmul(fixture *f, const char *what, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                          const esmm_matmul_opts *opts, esmm_status want, const char *word1, const char *word2)
{
  th_expect(what, esmm_matmul(f->ctx, a, w, c, opts, NULL), want, esmm_ctx_error(f->ctx), word1, word2);
  if (memcmp(f->before, f->c.data, sizeof f->before) != 0)
    fail_msg("%s: C was changed", what);
}

/* The error text is one buffer of the context: it may be fetched before or after the call. */
#define EXPECT(call, status, word1, word2) th_expect(#call, (call), status, esmm_ctx_error(f->ctx), word1, word2)

/* ---- what has names ---- */

static void names_and_versions(void **state)
{
  (void)state;
  static const esmm_status all[] = {
      ESMM_OK,         ESMM_ERR_ARGUMENT,      ESMM_ERR_SHAPE,       ESMM_ERR_LD,
      ESMM_ERR_DTYPE,  ESMM_ERR_OVERFLOW,      ESMM_ERR_OVERLAP,     ESMM_ERR_MEMORY,
      ESMM_ERR_IO,     ESMM_ERR_FORMAT,        ESMM_ERR_UNSUPPORTED, ESMM_ERR_UNKNOWN_KERNEL,
      ESMM_ERR_DEVICE, ESMM_ERR_VERSION,       ESMM_ERR_TRUNCATED,   ESMM_ERR_CHECKSUM,
      ESMM_ERR_DRIVER, ESMM_ERR_DEVICE_MEMORY, ESMM_ERR_DEVICE_LOST, ESMM_ERR_DRIVER_CALL,
  };
  enum { COUNT = sizeof all / sizeof *all };
  for (int i = 0; i < COUNT; i++)
    for (int j = 0; j <= i; j++) {
      const char *x = esmm_status_str(all[i]), *y = esmm_status_str(all[j]);
      assert_true(x && *x);
      if ((strcmp(x, y) == 0) != (i == j))
        fail_msg("statuses %d and %d are both called '%s'", (int)all[i], (int)all[j], x);
    }
  assert_non_null(esmm_status_str((esmm_status)12345));
  assert_int_equal(esmm_version(), ESMM_VERSION_MAJOR * 10000 + ESMM_VERSION_MINOR * 100 + ESMM_VERSION_PATCH);
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", ESMM_VERSION_MAJOR, ESMM_VERSION_MINOR, ESMM_VERSION_PATCH);
  assert_string_equal(esmm_version_str(), version);
  assert_int_equal(strlen(esmm_source_id()), 16);
  assert_int_equal(strspn(esmm_source_id(), "0123456789abcdef"), 16);
  assert_int_equal(esmm_dtype_size(ESMM_F32), 4);
  assert_int_equal(esmm_dtype_size(ESMM_BF16), 2);
  assert_int_equal(esmm_dtype_size(ESMM_F16), 2);
  assert_int_equal(esmm_dtype_size((esmm_dtype)9), 0);
  assert_string_equal(esmm_dtype_str(ESMM_F32), "f32");
  assert_string_equal(esmm_dtype_str(ESMM_BF16), "bf16");
  assert_string_equal(esmm_dtype_str(ESMM_F16), "f16");
}

static void kernels_are_listed_in_order(void **state)
{
  (void)state;
  int count = esmm_kernel_count(), dense = 0, reference = 0;
  const char *last = "";
  assert_true(count >= 2);
  for (int i = 0; i < count; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(NULL, i, &info), ESMM_OK);
    assert_true(strcmp(last, info.name) < 0);
    assert_true(info.doc && strlen(info.doc) > 10);
    const int gpu = strcmp(info.backend, "cuda") == 0;
    assert_true(gpu || strcmp(info.backend, "cpu") == 0);
    assert_false(gpu && info.available); /* without a context: as for the CPU */
    assert_true(strlen(info.name) < sizeof((esmm_stats *)0)->kernel);
    last = info.name;
    dense += info.available && strncmp(info.name, "dense", 5) == 0 && !(info.flags & ESMM_KERNEL_SKIPS);
    reference += info.available && (info.flags & ESMM_KERNEL_REFERENCE) != 0;
  }
  assert_true(dense >= 1);
  assert_true(reference >= 1);
  esmm_kernel_info info = {.size = sizeof info};
  assert_int_equal(esmm_kernel_get(NULL, -1, &info), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_kernel_get(NULL, count, &info), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_kernel_get(NULL, 0, NULL), ESMM_ERR_ARGUMENT);
  info.size = 0;
  assert_int_equal(esmm_kernel_get(NULL, 0, &info), ESMM_ERR_ARGUMENT);
}

/* ---- contexts ---- */

static void create_fails(const char *what, const esmm_ctx_opts *given, esmm_status want, const char *word1,
                         const char *word2)
{
  char text[512] = "";
  esmm_ctx_opts opts = *given;
  opts.size = sizeof opts;
  opts.no_tuning_cache = 1;
  opts.error = text;
  opts.error_size = sizeof text;
  esmm_ctx *ctx = NULL;
  esmm_status got = esmm_ctx_create(&ctx, &opts);
  th_expect(what, got, want, text, word1, word2);
  assert_null(ctx);
  char tiny[8];
  memset(tiny, 'x', sizeof tiny);
  opts.error = tiny;
  opts.error_size = 5;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), want);
  assert_true(memchr(tiny, 0, 5) != NULL);
  assert_memory_equal(tiny + 5, "xxx", 3);
}

static void contexts(void **state)
{
  (void)state;
  th_clean_environment();
  esmm_ctx *ctx = NULL;
  assert_int_equal(esmm_ctx_create(NULL, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_ctx_create(&ctx, NULL), ESMM_OK);
  assert_string_equal(esmm_ctx_device(ctx), "cpu");
  assert_true(esmm_ctx_threads(ctx) >= 1);
  assert_true(strlen(esmm_ctx_device_name(ctx)) > 0);
  assert_non_null(esmm_ctx_features(ctx));
  assert_string_equal(esmm_ctx_error(ctx), "");
  assert_non_null(esmm_tune_path(ctx));
  esmm_ctx_free(ctx);
  esmm_ctx_free(NULL);

  esmm_ctx_opts opts = {.size = 3};
  ctx = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_ARGUMENT);
  assert_null(ctx);
  char text[128] = "";
  opts = (esmm_ctx_opts){.size = sizeof opts + 8, .error = text, .error_size = sizeof text}; /* a newer program's */
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_ARGUMENT);
  assert_null(ctx);
  assert_non_null(strstr(text, "opts->size is "));
  opts.error = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_ARGUMENT);
  opts = (esmm_ctx_opts){.size = sizeof opts.size + 4, .device = "cpu"}; /* cuts through a pointer */
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_ERR_ARGUMENT);
  assert_null(ctx);
  opts = (esmm_ctx_opts){.size = sizeof opts.size}; /* a caller compiled when size was all there was */
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  esmm_ctx_free(ctx);

  create_fails("device", &(esmm_ctx_opts){.device = "banana"}, ESMM_ERR_DEVICE, "device", "banana");
  create_fails("threads", &(esmm_ctx_opts){.threads = -3}, ESMM_ERR_ARGUMENT, "threads", "-3");
  create_fails("threads", &(esmm_ctx_opts){.threads = 1025}, ESMM_ERR_ARGUMENT, "threads", "1025");
  create_fails("force", &(esmm_ctx_opts){.force = "banana"}, ESMM_ERR_UNKNOWN_KERNEL, "force", "banana");
  create_fails("allocator", &(esmm_ctx_opts){.allocator = &(esmm_allocator){0}}, ESMM_ERR_ARGUMENT, "allocator",
               "alloc");
}

static void environment(void **state)
{
  fixture *f = *state;
  static const char *const bad[] = {"banana", "0", "-1", "99999999", "2x", " ", "1e2", "99999999999999999999999"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    setenv("ESMM_THREADS", bad[i], 1);
    create_fails("ESMM_THREADS", &(esmm_ctx_opts){0}, ESMM_ERR_ARGUMENT, "ESMM_THREADS", bad[i]);
  }
  setenv("ESMM_THREADS", "3", 1);
  esmm_ctx *ctx = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, NULL), ESMM_OK);
  assert_int_equal(esmm_ctx_threads(ctx), 3);
  esmm_ctx_free(ctx);
  ctx = th_ctx(2);
  assert_int_equal(esmm_ctx_threads(ctx), 2); /* the option wins */
  esmm_ctx_free(ctx);
  unsetenv("ESMM_THREADS");

  setenv("ESMM_FORCE", "banana", 1);
  create_fails("ESMM_FORCE", &(esmm_ctx_opts){0}, ESMM_ERR_UNKNOWN_KERNEL, "ESMM_FORCE", "banana");
  setenv("ESMM_FORCE", "ref", 1);
  ctx = th_ctx(1);
  esmm_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_matmul(ctx, &f->a, f->w, &f->c, NULL, &stats), ESMM_OK);
  assert_int_equal(strncmp(stats.kernel, "ref", 3), 0);
  esmm_matmul_opts over = {.size = sizeof over, .force = "dense"};
  assert_int_equal(esmm_matmul(ctx, &f->a, f->w, &f->c, &over, &stats), ESMM_OK);
  assert_int_equal(strncmp(stats.kernel, "dense", 5), 0); /* the call's wins over the context's */
  esmm_ctx_free(ctx);
  setenv("ESMM_FORCE", "", 1); /* empty: as if unset */
  ctx = th_ctx(1);
  assert_int_equal(esmm_matmul(ctx, &f->a, f->w, &f->c, NULL, &stats), ESMM_OK);
  assert_int_not_equal(strncmp(stats.kernel, "ref", 3), 0);
  esmm_ctx_free(ctx);
  unsetenv("ESMM_FORCE");
}

/* ---- NULL, everywhere ---- */

static void null_arguments(void **state)
{
  fixture *f = *state;
  esmm_weights *w = NULL;
  esmm_pattern *p = NULL;
  esmm_generator g = {.size = sizeof g};
  esmm_skip_stats skip = {.size = sizeof skip};
  esmm_verdict verdicts[4];
  int count = 4;

  assert_int_equal(esmm_matmul(NULL, &f->a, f->w, &f->c, NULL, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_matrix_copy(NULL, &f->a, &f->c), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_explain(NULL, &f->a, f->w, &f->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_pattern_skip_stats(NULL, NULL, NULL, &skip), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_generate(NULL, &g, &f->a), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_generator_preset(NULL, "early", &g), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_save(NULL, f->w, "x"), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_tune(NULL, 0, NULL, NULL), ESMM_ERR_ARGUMENT);

  expect_matmul(f, "a", NULL, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "a", "NULL");
  expect_matmul(f, "weights", &f->a, NULL, &f->c, NULL, ESMM_ERR_ARGUMENT, "weights", "NULL");
  expect_matmul(f, "c", &f->a, f->w, NULL, NULL, ESMM_ERR_ARGUMENT, "c", "NULL");
  const esmm_matrix no_data = {.rows = M, .cols = K};
  esmm_matrix no_c = {.rows = M, .cols = N};
  expect_matmul(f, "a->data", &no_data, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "a", "NULL");
  expect_matmul(f, "c->data", &f->a, f->w, &no_c, NULL, ESMM_ERR_ARGUMENT, "c", "NULL");

  EXPECT(esmm_prepare(f->ctx, NULL, NULL, &w), ESMM_ERR_ARGUMENT, "b", "NULL");
  EXPECT(esmm_prepare(f->ctx, &f->b, NULL, NULL), ESMM_ERR_ARGUMENT, "weights", "NULL");
  EXPECT(esmm_matrix_copy(f->ctx, NULL, &f->c), ESMM_ERR_ARGUMENT, "src", "NULL");
  EXPECT(esmm_matrix_copy(f->ctx, &f->a, NULL), ESMM_ERR_ARGUMENT, "dst", "NULL");
  EXPECT(esmm_explain(f->ctx, NULL, f->w, &f->c, NULL, verdicts, sizeof *verdicts, &count), ESMM_ERR_ARGUMENT, "a",
         "NULL");
  EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, verdicts, sizeof *verdicts, NULL), ESMM_ERR_ARGUMENT, "count",
         "");
  EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, NULL, sizeof *verdicts, &count), ESMM_ERR_ARGUMENT, "verdicts",
         "NULL");
  EXPECT(esmm_pattern_extract(f->ctx, NULL, 1, &p), ESMM_ERR_ARGUMENT, "a", "NULL");
  EXPECT(esmm_pattern_extract(f->ctx, &f->a, 1, NULL), ESMM_ERR_ARGUMENT, "pattern", "NULL");
  EXPECT(esmm_pattern_extract_b(f->ctx, NULL, 1, &p), ESMM_ERR_ARGUMENT, "b", "NULL");
  EXPECT(esmm_pattern_coarsen(f->ctx, NULL, 1, &p), ESMM_ERR_ARGUMENT, "pattern", "NULL");
  EXPECT(esmm_pattern_skip_stats(f->ctx, NULL, NULL, &skip), ESMM_ERR_ARGUMENT, "NULL", "");
  EXPECT(esmm_generate(f->ctx, NULL, &f->c), ESMM_ERR_ARGUMENT, "generator", "NULL");
  EXPECT(esmm_generate(f->ctx, &g, NULL), ESMM_ERR_ARGUMENT, "out", "NULL");
  EXPECT(esmm_generator_preset(f->ctx, NULL, &g), ESMM_ERR_ARGUMENT, "preset", "NULL");
  EXPECT(esmm_generator_preset(f->ctx, "early", NULL), ESMM_ERR_ARGUMENT, "generator", "NULL");
  EXPECT(esmm_weights_save(f->ctx, NULL, "x"), ESMM_ERR_ARGUMENT, "weights", "NULL");
  EXPECT(esmm_weights_save(f->ctx, f->w, NULL), ESMM_ERR_ARGUMENT, "path", "NULL");
  EXPECT(esmm_weights_load(f->ctx, NULL, &w), ESMM_ERR_ARGUMENT, "path", "NULL");
  EXPECT(esmm_weights_load(f->ctx, "x", NULL), ESMM_ERR_ARGUMENT, "weights", "NULL");
  assert_null(w);
  assert_null(p);

  esmm_weights_info info = {.size = sizeof info};
  assert_int_equal(esmm_weights_get_info(NULL, &info), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_weights_get_info(f->w, NULL), ESMM_ERR_ARGUMENT);
  esmm_weights_free(NULL);
  esmm_pattern_free(NULL);
  assert_string_equal(esmm_ctx_error(NULL), "");
  assert_int_equal(esmm_ctx_threads(NULL), 0);
  assert_non_null(esmm_ctx_device(NULL));
  assert_non_null(esmm_ctx_device_name(NULL));
  assert_non_null(esmm_ctx_features(NULL));
  assert_non_null(esmm_tune_path(NULL));
  assert_int_equal(esmm_is_tuned(NULL), 0);
  assert_int_equal(esmm_tune_load(NULL), 0);
  assert_int_equal(esmm_load(NULL), 0);
  esmm_pattern_info pattern_info = {.size = sizeof pattern_info};
  uint64_t bits;
  assert_int_equal(esmm_pattern_get_info(NULL, NULL, &pattern_info), ESMM_ERR_ARGUMENT);
  EXPECT(esmm_pattern_get_info(f->ctx, NULL, &pattern_info), ESMM_ERR_ARGUMENT, "pattern", "NULL");
  assert_int_equal(esmm_pattern_bits(NULL, NULL, 0, 0, &bits), ESMM_ERR_ARGUMENT);
  EXPECT(esmm_pattern_bits(f->ctx, NULL, 0, 0, &bits), ESMM_ERR_ARGUMENT, "pattern", "NULL");
}

/* ---- bad matrices and options ---- */

static void bad_matrices(void **state)
{
  fixture *f = *state;
  esmm_matrix x = f->a;
  x.cols = K - 1;
  expect_matmul(f, "k", &x, f->w, &f->c, NULL, ESMM_ERR_SHAPE, "a", "7");
  x = f->a;
  x.rows = -4;
  expect_matmul(f, "negative", &x, f->w, &f->c, NULL, ESMM_ERR_SHAPE, "a", "-4");
  x = f->a;
  x.ld = K - 3;
  expect_matmul(f, "ld", &x, f->w, &f->c, NULL, ESMM_ERR_LD, "a", "5");
  x.ld = -1;
  expect_matmul(f, "ld", &x, f->w, &f->c, NULL, ESMM_ERR_LD, "ld", "-1");
  x = f->a;
  x.order = ESMM_COL_MAJOR;
  x.ld = M - 1;
  expect_matmul(f, "ld of columns", &x, f->w, &f->c, NULL, ESMM_ERR_LD, "a", "5");
  x = f->a;
  x.dtype = (esmm_dtype)17;
  expect_matmul(f, "dtype", &x, f->w, &f->c, NULL, ESMM_ERR_DTYPE, "a", "17");
  x = f->a;
  x.order = (esmm_order)5;
  expect_matmul(f, "order", &x, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "order", "5");
  x = f->a;
  x.place = (esmm_place)6;
  expect_matmul(f, "place", &x, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "place", "6");
  static const float scales[1] = {1};
  x = f->a;
  x.scales = scales;
  expect_matmul(f, "scales", &x, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT,
                "a->scales is set, but no dtype of this version has scales", "");
  x = f->c;
  x.scaling = 2;
  expect_matmul(f, "scaling", &f->a, f->w, &x, NULL, ESMM_ERR_ARGUMENT, "c->scaling is 2", "");
  x = f->a;
  x.reserved = -5;
  expect_matmul(f, "reserved", &x, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "a->reserved is -5", "");
  x = f->a;
  x.device = 3;
  expect_matmul(f, "device", &x, f->w, &f->c, NULL, ESMM_ERR_ARGUMENT, "a->device", "3");
  x = f->c;
  x.device = -1;
  expect_matmul(f, "device of c", &f->a, f->w, &x, NULL, ESMM_ERR_ARGUMENT, "c->device", "-1");
  x = f->a;
  x.rows = INT64_MAX;
  expect_matmul(f, "overflow", &x, f->w, &f->c, NULL, ESMM_ERR_OVERFLOW, "a", "9223372036854775807");
  x = f->a;
  x.ld = INT64_MAX;
  expect_matmul(f, "overflow of ld", &x, f->w, &f->c, NULL, ESMM_ERR_OVERFLOW, "a", "9223372036854775807");

  x = f->c;
  x.rows = M + 1;
  expect_matmul(f, "rows of c", &f->a, f->w, &x, NULL, ESMM_ERR_SHAPE, "c", "7");
  x = f->c;
  x.cols = N - 1;
  expect_matmul(f, "columns of c", &f->a, f->w, &x, NULL, ESMM_ERR_SHAPE, "c", "9");
  x = f->c;
  x.ld = 2;
  expect_matmul(f, "ld of c", &f->a, f->w, &x, NULL, ESMM_ERR_LD, "c", "2");

  esmm_weights *w = NULL;
  x = f->b;
  x.cols = INT64_MAX;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_OVERFLOW, "b", "9223372036854775807");
  x = f->b;
  x.rows = x.cols = (int64_t)1 << 40;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_OVERFLOW, "b", "1099511627776");
  x = f->b;
  x.dtype = (esmm_dtype)-1;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_DTYPE, "b", "-1");
  x = f->b;
  x.ld = 1;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_LD, "b", "1");
  assert_null(w);
  EXPECT(esmm_matrix_copy(f->ctx, &f->a, &f->c), ESMM_ERR_SHAPE, "src", "dst");
  assert_memory_equal(f->before, f->c.data, sizeof f->before);
  x = f->b;
  x.device = 2;
  EXPECT(esmm_prepare(f->ctx, &x, NULL, &w), ESMM_ERR_ARGUMENT, "b->device", "2");
}

/* Nor without a context. */
static void handles_are_null_without_a_context(void **state)
{
  fixture *f = *state;
  const esmm_bsr blocks = {.size = sizeof blocks};
#define MAKES_NOTHING(type, call)                \
  do {                                           \
    type *handle = (type *)(void *)f;            \
    assert_int_equal((call), ESMM_ERR_ARGUMENT); \
    assert_null(handle);                         \
  } while (0)
  MAKES_NOTHING(void, esmm_memory_alloc(NULL, 64, &handle));
  MAKES_NOTHING(esmm_weights, esmm_prepare(NULL, &f->b, NULL, &handle));
  MAKES_NOTHING(esmm_weights, esmm_prepare_bsr(NULL, &blocks, NULL, &handle));
  MAKES_NOTHING(esmm_weights, esmm_weights_load(NULL, "x", &handle));
  MAKES_NOTHING(esmm_pattern, esmm_pattern_extract(NULL, &f->a, 1, &handle));
  MAKES_NOTHING(esmm_pattern, esmm_pattern_extract_b(NULL, &f->b, 1, &handle));
  MAKES_NOTHING(esmm_pattern, esmm_pattern_coarsen(NULL, NULL, 1, &handle));
  MAKES_NOTHING(esmm_pattern, esmm_pattern_reorder(NULL, NULL, 1, NULL, &handle));
  MAKES_NOTHING(esmm_timer, esmm_timer_create(NULL, &handle));
  esmm_matmul_opts opts = {.size = sizeof opts};
  MAKES_NOTHING(esmm_pattern, (opts.c_pattern = &handle, esmm_matmul(NULL, &f->a, f->w, &f->c, &opts, NULL)));
  MAKES_NOTHING(esmm_pattern, (opts.c_pattern = &handle, esmm_matmul_bsr(NULL, &blocks, f->w, &f->c, &opts, NULL)));
  opts.size = 1;
  assert_int_equal(esmm_matmul(NULL, &f->a, f->w, &f->c, &opts, NULL), ESMM_ERR_ARGUMENT);
#undef MAKES_NOTHING
}

/* What made nothing leaves NULL, whatever the handle held before: nobody frees a stale one. */
static void handles_are_null_after_failure(void **state)
{
  fixture *f = *state;
  esmm_pattern *fine = NULL;
  assert_int_equal(esmm_pattern_extract(f->ctx, &f->a, 2, &fine), ESMM_OK);
  esmm_pattern *const stale = fine;
  esmm_weights *const stale_weights = f->w;
  esmm_matrix bad = f->a;
  bad.dtype = (esmm_dtype)9;
#define MAKES_NOTHING(handle, before, call, status, word1, word2) \
  do {                                                            \
    (handle) = (before);                                          \
    EXPECT(call, status, word1, word2);                           \
    assert_null(handle);                                          \
  } while (0)
  esmm_pattern *p;
  MAKES_NOTHING(p, stale, esmm_pattern_extract(f->ctx, &f->a, 0, &p), ESMM_ERR_ARGUMENT, "strip_rows", "0");
  MAKES_NOTHING(p, stale, esmm_pattern_extract(f->ctx, &f->a, -5, &p), ESMM_ERR_ARGUMENT, "strip_rows", "-5");
  MAKES_NOTHING(p, stale, esmm_pattern_extract(f->ctx, NULL, 1, &p), ESMM_ERR_ARGUMENT, "a", "NULL");
  MAKES_NOTHING(p, stale, esmm_pattern_extract(f->ctx, &bad, 1, &p), ESMM_ERR_DTYPE, "a", "9");
  MAKES_NOTHING(p, stale, esmm_pattern_extract_b(f->ctx, &f->b, -2, &p), ESMM_ERR_ARGUMENT, "strip_cols", "-2");
  MAKES_NOTHING(p, stale, esmm_pattern_extract_b(f->ctx, &bad, 1, &p), ESMM_ERR_DTYPE, "b", "9");
  MAKES_NOTHING(p, stale, esmm_pattern_coarsen(f->ctx, fine, 3, &p), ESMM_ERR_ARGUMENT, "strip_rows", "3");
  MAKES_NOTHING(p, stale, esmm_pattern_coarsen(f->ctx, NULL, 4, &p), ESMM_ERR_ARGUMENT, "pattern", "NULL");
  esmm_weights *w;
  MAKES_NOTHING(w, stale_weights, esmm_prepare(f->ctx, &bad, NULL, &w), ESMM_ERR_DTYPE, "b", "9");
  MAKES_NOTHING(w, stale_weights, esmm_weights_load(f->ctx, "/nowhere/weights", &w), ESMM_ERR_IO, "/nowhere",
                "No such");
  MAKES_NOTHING(w, stale_weights, esmm_weights_load(f->ctx, NULL, &w), ESMM_ERR_ARGUMENT, "path", "NULL");
#undef MAKES_NOTHING
  esmm_ctx *ctx = f->ctx;
  assert_int_equal(esmm_ctx_create(&ctx, &(esmm_ctx_opts){.size = sizeof(esmm_ctx_opts), .threads = -1}),
                   ESMM_ERR_ARGUMENT);
  assert_null(ctx);
  esmm_pattern_free(fine);
}

static void bad_options(void **state)
{
  fixture *f = *state;
  esmm_matmul_opts o = {.size = 0};
  expect_matmul(f, "size 0", &f->a, f->w, &f->c, &o, ESMM_ERR_ARGUMENT, "size", "0");
  o.size = sizeof o + 1;
  char size[24];
  snprintf(size, sizeof size, "%zu", o.size);
  expect_matmul(f, "size", &f->a, f->w, &f->c, &o, ESMM_ERR_ARGUMENT, "size", size);
  o = (esmm_matmul_opts){.size = sizeof o, .activation = (esmm_activation)44};
  expect_matmul(f, "activation", &f->a, f->w, &f->c, &o, ESMM_ERR_ARGUMENT, "activation", "44");
  o = (esmm_matmul_opts){.size = sizeof o, .force = "banana"};
  expect_matmul(f, "force", &f->a, f->w, &f->c, &o, ESMM_ERR_UNKNOWN_KERNEL, "force", "banana");
  o = (esmm_matmul_opts){.size = sizeof o, .reserved = 2};
  expect_matmul(f, "reserved", &f->a, f->w, &f->c, &o, ESMM_ERR_ARGUMENT, "opts->reserved, once c_packed, is 2", "");

  esmm_stats stats = {.size = 1};
  assert_int_equal(esmm_matmul(f->ctx, &f->a, f->w, &f->c, NULL, &stats), ESMM_ERR_ARGUMENT);
  stats.size = sizeof stats + 1;
  assert_int_equal(esmm_matmul(f->ctx, &f->a, f->w, &f->c, NULL, &stats), ESMM_ERR_ARGUMENT);
  assert_non_null(strstr(esmm_ctx_error(f->ctx), "stats"));
  assert_memory_equal(f->before, f->c.data, sizeof f->before);

  esmm_weights *w = NULL;
  esmm_prepare_opts p = {.size = 1};
  EXPECT(esmm_prepare(f->ctx, &f->b, &p, &w), ESMM_ERR_ARGUMENT, "size", "1");
  p = (esmm_prepare_opts){.size = sizeof p, .use = (esmm_use)33};
  EXPECT(esmm_prepare(f->ctx, &f->b, &p, &w), ESMM_ERR_ARGUMENT, "use", "33");
  p = (esmm_prepare_opts){.size = sizeof p, .max_bytes_ratio = -2};
  EXPECT(esmm_prepare(f->ctx, &f->b, &p, &w), ESMM_ERR_ARGUMENT, "max_bytes_ratio", "-2");
  p = (esmm_prepare_opts){.size = sizeof p, .reserved = 7};
  EXPECT(esmm_prepare(f->ctx, &f->b, &p, &w), ESMM_ERR_ARGUMENT, "reserved", "7");
  p = (esmm_prepare_opts){.size = sizeof p, .max_bytes_ratio = NAN};
  EXPECT(esmm_prepare(f->ctx, &f->b, &p, &w), ESMM_ERR_ARGUMENT, "max_bytes_ratio", "nan");
  assert_null(w);

  esmm_generator g = {.size = 2};
  EXPECT(esmm_generate(f->ctx, &g, &f->c), ESMM_ERR_ARGUMENT, "size", "2");
  g = (esmm_generator){.size = sizeof g, .kind = (esmm_generator_kind)77};
  EXPECT(esmm_generate(f->ctx, &g, &f->c), ESMM_ERR_ARGUMENT, "kind", "77");
  g = (esmm_generator){.size = sizeof g, .kind = ESMM_GEN_RANDOM, .density = 1.5};
  EXPECT(esmm_generate(f->ctx, &g, &f->c), ESMM_ERR_ARGUMENT, "density", "1.5");
  g = (esmm_generator){.size = sizeof g, .kind = ESMM_GEN_PATTERN, .pattern = "1011"};
  EXPECT(esmm_generate(f->ctx, &g, &f->c), ESMM_ERR_ARGUMENT, "pattern", "1011");
  EXPECT(esmm_generator_preset(f->ctx, "noon", &g), ESMM_ERR_ARGUMENT, "preset", "noon");
  assert_memory_equal(f->before, f->c.data, sizeof f->before);
}

static void pattern_of_another_matrix(void **state)
{
  fixture *f = *state;
  esmm_pattern *p = NULL;
  esmm_matrix other = th_matrix_alloc(M + 2, K, ESMM_F32);
  assert_int_equal(esmm_pattern_extract(f->ctx, &other, 1, &p), ESMM_OK);
  esmm_matmul_opts o = {.size = sizeof o, .a_pattern = p};
  expect_matmul(f, "a_pattern", &f->a, f->w, &f->c, &o, ESMM_ERR_SHAPE, "a_pattern", "8");
  esmm_pattern_free(p);
  free(other.data);
}

/* ---- what is kept, and how much ---- */

static void weights_are_described(void **state)
{
  fixture *f = *state;
  esmm_matrix b = th_matrix_alloc(512, 256, ESMM_BF16);
  th_fill(&b, 9, 0.25, false);
  int64_t nonzero = 0;
  for (int64_t i = 0; i < 512 * 256; i++)
    nonzero += th_decode(b.data, b.dtype, i) != 0;
  for (int use = 0; use < 3; use++) {
    esmm_weights *w = NULL;
    esmm_prepare_opts opts = {.size = sizeof opts, .use = (esmm_use)use, .strict = use == 2};
    opts.max_bytes_ratio = use == 0 ? 2.0 : 1.5; /* nothing for a library */
    assert_int_equal(esmm_prepare(f->ctx, &b, &opts, &w), ESMM_OK);
    esmm_weights_info info = {.size = sizeof info};
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
    assert_int_equal(info.rows, 512);
    assert_int_equal(info.cols, 256);
    assert_int_equal(info.dtype, ESMM_BF16);
    assert_int_equal(info.use, use);
    assert_int_equal(info.strict, use == 2);
    assert_true(info.strip_cols >= 1);
    assert_true(info.element_density == (double)nonzero / (512 * 256));
    assert_true(info.strip_density >= info.element_density && info.strip_density <= 1);
    double own = 512 * 256 * 2, most = use == 0 ? 2.1 : 1.1;
    if (!((double)info.bytes >= own * 0.9 && (double)info.bytes <= own * most))
      fail_msg("use %d: %zu bytes for weights of %g bytes", use, info.bytes, own);
    info = (esmm_weights_info){.size = 2};
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_ERR_ARGUMENT);
    esmm_weights_free(w);
  }
  esmm_weights *w = NULL;
  esmm_prepare_opts tight = {.size = sizeof tight, .max_bytes_ratio = 1};
  EXPECT(esmm_prepare(f->ctx, &b, &tight, &w), ESMM_ERR_UNSUPPORTED, "max_bytes_ratio", "1");
  assert_null(w);
  free(b.data);
}

static void minus_zero_is_zero(void **state)
{
  fixture *f = *state;
  for (int d = 0; d < 3; d++) {
    esmm_matrix b = th_matrix_alloc(K, N, (esmm_dtype)d);
    for (int64_t i = 0; i < K * N; i++)
      th_encode(b.data, b.dtype, i, -0.0);
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare(f->ctx, &b, NULL, &w), ESMM_OK);
    esmm_weights_info info = {.size = sizeof info};
    assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
    assert_true(info.element_density == 0 && info.strip_density == 0);
    esmm_weights_free(w);
    free(b.data);
  }
}

static void files_report_the_system(void **state)
{
  fixture *f = *state;
  esmm_weights *w = NULL;
  char path[64] = "/tmp/esmm_test_XXXXXX";
  EXPECT(esmm_weights_load(f->ctx, "/nowhere/weights", &w), ESMM_ERR_IO, "/nowhere/weights", "No such file");
  EXPECT(esmm_weights_save(f->ctx, f->w, "/nowhere/weights"), ESMM_ERR_IO, "/nowhere/weights", "No such file");
  assert_null(w);
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, "not a weights file, but long enough to have held the header of one", 66), 66);
  close(fd);
  esmm_status got = esmm_weights_load(f->ctx, path, &w);
  if (got != ESMM_ERR_FORMAT && got != ESMM_ERR_TRUNCATED)
    fail_msg("a text file gives %s", esmm_status_str(got));
  assert_non_null(strstr(esmm_ctx_error(f->ctx), path));
  assert_int_equal(esmm_weights_save(f->ctx, f->w, path), ESMM_OK);
  assert_int_equal(esmm_weights_load(f->ctx, path, &w), ESMM_OK);
  esmm_weights_free(w);
  w = NULL;

  FILE *file = fopen(path, "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, -3, SEEK_END), 0);
  int byte = fgetc(file);
  assert_int_equal(fseek(file, -3, SEEK_END), 0);
  fputc(byte ^ 0x10, file);
  fclose(file);
  EXPECT(esmm_weights_load(f->ctx, path, &w), ESMM_ERR_CHECKSUM, path, "");
  assert_int_equal(truncate(path, 200), 0);
  EXPECT(esmm_weights_load(f->ctx, path, &w), ESMM_ERR_TRUNCATED, path, "");
  assert_null(w);
  unlink(path);
}

/* ---- forcing, statistics, explanations ---- */

static void force_by_name_and_idea(void **state)
{
  fixture *f = *state;
  esmm_stats stats = {.size = sizeof stats};
  for (int i = 0; i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(f->ctx, i, &info), ESMM_OK);
    esmm_matmul_opts o = {.size = sizeof o, .force = info.name};
    if (!info.available || !(info.formats & 1u << ESMM_FORMAT_DENSE)) {
      expect_matmul(f, info.name, &f->a, f->w, &f->c, &o, ESMM_ERR_UNSUPPORTED, info.name, "");
      continue;
    }
    char idea[32];
    snprintf(idea, sizeof idea, "%.*s", (int)strcspn(info.name, "_"), info.name);
    o.force = idea;
    esmm_status status = esmm_matmul(f->ctx, &f->a, f->w, &f->c, &o, &stats);
    if (status != ESMM_OK)
      fail_msg("force '%s': %s", idea, esmm_ctx_error(f->ctx));
    assert_int_equal(strncmp(stats.kernel, idea, strlen(idea)), 0);
    memcpy(f->c.data, f->before, sizeof f->before);
  }
  /* Decode takes few rows: forced on many it has to refuse, never to run something else. */
  esmm_matrix a = th_matrix_alloc(100, K, ESMM_F32), c = th_matrix_alloc(100, N, ESMM_F32);
  esmm_matmul_opts o = {.size = sizeof o, .force = "decode"};
  EXPECT(esmm_matmul(f->ctx, &a, f->w, &c, &o, NULL), ESMM_ERR_UNSUPPORTED, "decode", "100");
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts forced = {.size = sizeof forced, .force = "decode", .no_tuning_cache = 1};
  assert_int_equal(esmm_ctx_create(&ctx, &forced), ESMM_OK);
  assert_int_equal(esmm_matmul(ctx, &a, f->w, &c, NULL, NULL), ESMM_ERR_UNSUPPORTED);
  esmm_ctx_free(ctx);
  free(a.data);
  free(c.data);
}

static void statistics_are_plausible(void **state)
{
  fixture *f = *state;
  enum { SIZE = 192 };
  esmm_matrix a = th_matrix_alloc(SIZE, SIZE, ESMM_F32), b = th_matrix_alloc(SIZE, SIZE, ESMM_F32),
              c = th_matrix_alloc(SIZE, SIZE, ESMM_F32);
  esmm_generator g = {.size = sizeof g, .kind = ESMM_GEN_BLOCKWISE, .seed = 4, .density = 0.5};
  assert_int_equal(esmm_generate(f->ctx, &g, &a), ESMM_OK);
  g.operand = ESMM_OPERAND_B;
  g.seed = 5;
  assert_int_equal(esmm_generate(f->ctx, &g, &b), ESMM_OK);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(f->ctx, &b, NULL, &w), ESMM_OK);
  esmm_weights_info info = {.size = sizeof info};
  assert_int_equal(esmm_weights_get_info(w, &info), ESMM_OK);
  for (int i = 0; i <= esmm_kernel_count(); i++) {
    esmm_kernel_info kernel = {.size = sizeof kernel, .name = NULL};
    if (i < esmm_kernel_count())
      assert_int_equal(esmm_kernel_get(f->ctx, i, &kernel), ESMM_OK);
    esmm_matmul_opts o = {.size = sizeof o, .force = kernel.name};
    esmm_stats s;
    memset(&s, 0xee, sizeof s);
    s.size = sizeof s;
    if (esmm_matmul(f->ctx, &a, w, &c, &o, &s) != ESMM_OK)
      continue;
    const char *name = s.kernel;
    double flop = 2.0 * SIZE * SIZE * SIZE;
#define PLAUSIBLE(condition)                                                                                 \
  do {                                                                                                       \
    if (!(condition))                                                                                        \
      fail_msg("%s: not " #condition                                                                         \
               " (useful %g dense %g joint %g skipped %g strips %lld x %lld densities %g %g %g)",            \
               name, s.flop_useful, s.flop_dense, s.joint_density, s.skipped_share, (long long)s.strip_rows, \
               (long long)s.strip_cols, s.density_a, s.strip_density_a, s.strip_density_b);                  \
  } while (0)
    PLAUSIBLE(memchr(s.kernel, 0, sizeof s.kernel) != NULL && s.kernel[0]);
    PLAUSIBLE(memchr(s.reason, 0, sizeof s.reason) != NULL && s.reason[0]);
    PLAUSIBLE(s.threads == 2);
    PLAUSIBLE(s.flop_dense == flop);
    PLAUSIBLE(s.flop_useful > 0 && s.flop_useful <= flop);
    PLAUSIBLE(fabs(s.skipped_share - (1 - s.flop_useful / s.flop_dense)) < 1e-9);
    PLAUSIBLE(s.density_a > 0.3 && s.density_a < 0.7);
    PLAUSIBLE(s.strip_density_a >= 0 && s.strip_density_a <= 1);
    PLAUSIBLE(s.strip_density_b == info.strip_density);
    PLAUSIBLE(s.joint_density >= 0 && s.joint_density <= 1);
    PLAUSIBLE(s.strip_rows >= 0 && s.strip_cols >= 0);
    PLAUSIBLE(s.seconds_plan >= 0 && s.seconds_extract >= 0 && s.seconds_multiply >= 0);
    PLAUSIBLE(s.seconds_total > 0 && s.seconds_total < 60);
    PLAUSIBLE(s.seconds_plan + s.seconds_extract + s.seconds_multiply <= s.seconds_total * 1.01 + 1e-6);
    PLAUSIBLE(s.weights_bytes == info.bytes);
    if (strncmp(name, "joint", 5) == 0) /* strips of both operands are independent, half of each alive */
      PLAUSIBLE(s.joint_density > 0.18 && s.joint_density < 0.33);
    if (kernel.name && !(kernel.flags & ESMM_KERNEL_SKIPS))
      PLAUSIBLE(s.flop_useful == flop);
  }
  esmm_stats head = {.size = offsetof(esmm_stats, threads)}; /* an older caller's smaller struct */
  head.threads = -99;
  assert_int_equal(esmm_matmul(f->ctx, &a, w, &c, NULL, &head), ESMM_OK);
  assert_int_equal(head.threads, -99);
  assert_true(head.kernel[0] != 0);
  esmm_weights_free(w);
  free(a.data);
  free(b.data);
  free(c.data);
}

static void explain_agrees_with_what_runs(void **state)
{
  fixture *f = *state;
  static const int64_t shapes[][3] = {{1, 300, 300}, {16, 64, 500}, {64, 64, 64}, {200, 96, 130}};
  for (int i = 0; i < 4; i++)
    for (int d = 0; d <= 4; d++) {
      int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
      esmm_matrix a = th_matrix_alloc(m, k, ESMM_F32), b = th_matrix_alloc(k, n, ESMM_F32),
                  c = th_matrix_alloc(m, n, ESMM_F32);
      th_fill(&a, 1, d / 4.0, false);
      th_fill(&b, 2, 1, false);
      esmm_weights *w = NULL;
      assert_int_equal(esmm_prepare(f->ctx, &b, NULL, &w), ESMM_OK);
      esmm_verdict verdicts[96];
      int count = 96, chosen = -1;
      assert_int_equal(esmm_explain(f->ctx, &a, w, &c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
      assert_int_equal(count, esmm_kernel_count());
      double last = 0;
      for (int v = 0; v < count; v++) {
        assert_true(verdicts[v].text[0] != 0);
        if (verdicts[v].chosen) {
          assert_int_equal(chosen, -1);
          chosen = v;
          assert_true(verdicts[v].can_run);
        }
        if (!verdicts[v].competes)
          continue;
        assert_true(verdicts[v].can_run && (v == 0 || verdicts[v - 1].competes)); /* those it chooses from come first */
        assert_true(verdicts[v].seconds > 0 && verdicts[v].seconds >= last);
        last = verdicts[v].seconds;
      }
      assert_int_equal(chosen, 0); /* the cheapest */
      esmm_stats stats = {.size = sizeof stats};
      assert_int_equal(esmm_matmul(f->ctx, &a, w, &c, NULL, &stats), ESMM_OK);
      assert_string_equal(stats.kernel, verdicts[chosen].kernel);
      count = 1; /* less room than kernels: the total still comes back */
      memset(&verdicts[1], 0x5a, sizeof verdicts[1]);
      esmm_verdict untouched = verdicts[1];
      assert_int_equal(esmm_explain(f->ctx, &a, w, &c, NULL, verdicts, sizeof *verdicts, &count), ESMM_OK);
      assert_int_equal(count, esmm_kernel_count());
      assert_memory_equal(&untouched, &verdicts[1], sizeof untouched);
      esmm_weights_free(w);
      free(a.data);
      free(b.data);
      free(c.data);
    }
}

/* The array's stride is verdict_size, so that a program built with a smaller one keeps working. */
static void verdicts_of_older_programs(void **state)
{
  fixture *f = *state;
  typedef struct old_verdict {
    const char *kernel;
    unsigned flags;
    int can_run;
  } old_verdict;
  enum { ROOM = 96 };
  esmm_verdict now[ROOM];
  old_verdict old[ROOM + 1];
  int count = ROOM;
  assert_int_equal(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, now, sizeof *now, &count), ESMM_OK);
  assert_int_equal(count, esmm_kernel_count());
  memset(old, 0x77, sizeof old);
  const old_verdict untouched = old[ROOM];
  assert_int_equal(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, (esmm_verdict *)(void *)old, sizeof *old, &count),
                   ESMM_OK);
  assert_int_equal(count, esmm_kernel_count());
  for (int i = 0; i < count; i++) {
    assert_string_equal(old[i].kernel, now[i].kernel);
    assert_int_equal(old[i].flags, now[i].flags);
    assert_int_equal(old[i].can_run, now[i].can_run);
  }
  assert_memory_equal(&old[ROOM], &untouched, sizeof untouched);
  for (int i = 0; i < count; i++) { /* they tell what esmm_kernel_get tells */
    int at = 0;
    esmm_kernel_info info = {.size = sizeof info};
    for (; at < esmm_kernel_count(); at++)
      if (esmm_kernel_get(f->ctx, at, &info) == ESMM_OK && strcmp(info.name, now[i].kernel) == 0)
        break;
    assert_true(at < esmm_kernel_count());
    assert_int_equal(info.flags, now[i].flags);
  }

  EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, now, 0, &count), ESMM_ERR_ARGUMENT, "verdict_size is 0", "");
  EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, now, sizeof *now + 8, &count), ESMM_ERR_ARGUMENT,
         "verdict_size is 200", "192");
  count = 0; /* no room, no array: how many there are */
  assert_int_equal(esmm_explain(f->ctx, &f->a, f->w, &f->c, NULL, NULL, 0, &count), ESMM_OK);
  assert_int_equal(count, esmm_kernel_count());
}

/* Where there is nothing to multiply there is no verdict, but a name that does not exist is still an error. */
static void explain_of_nothing(void **state)
{
  fixture *f = *state;
  const float zero = 0;
  const esmm_matrix no_rows = {.rows = 0, .cols = K}, no_k = {.rows = M, .cols = 0}, empty_b = {.rows = 0, .cols = N};
  const esmm_matrix empty_c = {.rows = 0, .cols = N};
  esmm_weights *of_no_k = NULL;
  assert_int_equal(esmm_prepare(f->ctx, &empty_b, NULL, &of_no_k), ESMM_OK);
  const struct {
    const char *what;
    const esmm_matrix *a, *c;
    const esmm_weights *w;
    const float *alpha;
  } nothing[] = {
      {"alpha is 0", &f->a, &f->c, f->w, &zero},
      {"k is 0", &no_k, &f->c, of_no_k, NULL},
      {"C is empty", &no_rows, &empty_c, f->w, NULL},
  };
  for (int i = 0; i < 3; i++) {
    esmm_verdict verdicts[4];
    int count = 4;
    esmm_matmul_opts o = {.size = sizeof o, .alpha = nothing[i].alpha};
    th_expect(nothing[i].what,
              esmm_explain(f->ctx, nothing[i].a, nothing[i].w, nothing[i].c, &o, verdicts, sizeof *verdicts, &count),
              ESMM_OK, "", "", "");
    assert_int_equal(count, 0);
    count = 4;
    o.force = "banana";
    th_expect(nothing[i].what,
              esmm_explain(f->ctx, nothing[i].a, nothing[i].w, nothing[i].c, &o, verdicts, sizeof *verdicts, &count),
              ESMM_ERR_UNKNOWN_KERNEL, esmm_ctx_error(f->ctx), "force", "banana");
    esmm_matrix c = *nothing[i].c;
    th_expect(nothing[i].what, esmm_matmul(f->ctx, nothing[i].a, nothing[i].w, &c, &o, NULL), ESMM_ERR_UNKNOWN_KERNEL,
              esmm_ctx_error(f->ctx), "force", "banana");
    assert_memory_equal(f->before, f->c.data, sizeof f->before);
  }
  esmm_verdict verdicts[4];
  int count = 4;
  const esmm_matmul_opts o = {.size = sizeof o, .force = "banana"};
  EXPECT(esmm_explain(f->ctx, &f->a, f->w, &f->c, &o, verdicts, sizeof *verdicts, &count), ESMM_ERR_UNKNOWN_KERNEL,
         "force", "banana");
  esmm_weights_free(of_no_k);
}

static void empty_products(void **state)
{
  fixture *f = *state;
  esmm_matrix a = {.rows = 0, .cols = K}, c = {.rows = 0, .cols = N};
  assert_int_equal(esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), ESMM_OK);
  esmm_matrix empty_b = {.rows = 0, .cols = N}, no_k = {.rows = M, .cols = 0};
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(f->ctx, &empty_b, NULL, &w), ESMM_OK);
  float bias[N];
  for (int j = 0; j < N; j++)
    bias[j] = (float)(j - 3);
  esmm_matmul_opts o = {.size = sizeof o, .bias = bias, .activation = ESMM_ACT_RELU2};
  assert_int_equal(esmm_matmul(f->ctx, &no_k, w, &f->c, &o, NULL), ESMM_OK); /* the epilogue alone */
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++)
      assert_true(th_get(&f->c, i, j) == (j > 3 ? (double)((j - 3) * (j - 3)) : 0));
  esmm_weights_free(w);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(names_and_versions),
      cmocka_unit_test(kernels_are_listed_in_order),
      cmocka_unit_test(contexts),
      TEST(environment),
      TEST(null_arguments),
      TEST(bad_matrices),
      TEST(handles_are_null_after_failure),
      TEST(handles_are_null_without_a_context),
      TEST(bad_options),
      TEST(pattern_of_another_matrix),
      TEST(weights_are_described),
      TEST(minus_zero_is_zero),
      TEST(files_report_the_system),
      TEST(force_by_name_and_idea),
      TEST(statistics_are_plausible),
      TEST(explain_agrees_with_what_runs),
      TEST(verdicts_of_older_programs),
      TEST(explain_of_nothing),
      TEST(empty_products),
  };
  return cmocka_run_group_tests_name("api", tests, NULL, NULL);
}
