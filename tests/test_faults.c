/*
 * test_faults.c: ordinary scenarios with the n-th allocation failing, for n = 1, 2, ... until nothing fails any more.
 *
 * Each failure must come back as ESMM_ERR_MEMORY with a text, leave outputs as they were, leak nothing, and the same
 * context must then do the same thing well.
 */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct meter {
  int64_t calls, fail_at; /* the call that fails; 0: none */
  int64_t live, live_bytes;
  bool failed;
} meter;

static void *meter_alloc(void *user, size_t bytes, size_t align)
{
  meter *m = user;
  assert_true(align >= 64 && (align & (align - 1)) == 0);
  if (++m->calls == m->fail_at) {
    m->failed = true;
    return NULL;
  }
  void *p = NULL;
  if (posix_memalign(&p, align, bytes) != 0)
    return NULL;
  memset(p, 0xcd, bytes); /* nobody may count on zeros */
  m->live++;
  m->live_bytes += (int64_t)bytes;
  return p;
}

static void meter_free(void *user, void *p, size_t bytes)
{
  meter *m = user;
  assert_non_null(p);
  m->live--;
  m->live_bytes -= (int64_t)bytes;
  free(p);
}

static esmm_status make_ctx(meter *m, esmm_ctx **ctx, char *error, size_t error_size)
{
  esmm_allocator allocator = {.alloc = meter_alloc, .free = meter_free, .user = m};
  /* The header asks the allocator to outlive the context: the functions and `user` do, and the struct is kept too. */
  static esmm_allocator kept;
  kept = allocator;
  esmm_ctx_opts opts = {.size = sizeof opts,
                        .threads = 2,
                        .allocator = &kept,
                        .no_tuning_cache = 1,
                        .error = error,
                        .error_size = error_size};
  return esmm_ctx_create(ctx, &opts);
}

static void check_failure(const char *what, const meter *m, esmm_status status, const char *text)
{
  if (!m->failed)
    fail_msg("%s: %s (%s), though allocation %lld was never reached", what, esmm_status_str(status), text,
             (long long)m->fail_at);
  if (status != ESMM_ERR_MEMORY)
    fail_msg("%s: allocation %lld failed, status is %s (%s)", what, (long long)m->fail_at, esmm_status_str(status),
             text);
  if (!*text)
    fail_msg("%s: no error text", what);
}

/* ---- the scenarios: each makes everything anew and frees everything ---- */

typedef struct data {
  esmm_matrix a, b, c;
  char path[64];
  esmm_weights *plain; /* made by a context of its own */
  esmm_ctx *plain_ctx;
} data;

typedef esmm_status (*scenario)(esmm_ctx *ctx, data *d);

static esmm_status do_prepare(esmm_ctx *ctx, data *d)
{
  esmm_status status = ESMM_OK;
  for (int use = 0; use < 3 && status == ESMM_OK; use++) {
    esmm_weights *w = NULL;
    esmm_prepare_opts opts = {.size = sizeof opts, .use = (esmm_use)use};
    status = esmm_prepare(ctx, &d->b, &opts, &w);
    assert_true((status == ESMM_OK) == (w != NULL));
    esmm_weights_free(w);
  }
  return status;
}

static esmm_status do_matmul(esmm_ctx *ctx, data *d)
{
  esmm_status status = ESMM_OK;
  float *c = d->c.data;
  for (int i = 0; i < esmm_kernel_count() && status == ESMM_OK; i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    esmm_matmul_opts opts = {.size = sizeof opts, .force = info.name, .activation = ESMM_ACT_RELU};
    for (int64_t j = 0; j < d->c.rows * d->c.cols; j++)
      c[j] = -1234;
    status = esmm_matmul(ctx, &d->a, d->plain, &d->c, &opts, NULL);
    if (status == ESMM_ERR_UNSUPPORTED)
      status = ESMM_OK;
    else
      for (int64_t j = 0; j < d->c.rows * d->c.cols; j++)
        if ((c[j] == -1234) != (status != ESMM_OK))
          fail_msg("%s: status %s, C[%lld] is %g", info.name, esmm_status_str(status), (long long)j, (double)c[j]);
  }
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &d->a, d->plain, &d->c, NULL, NULL);
  return status;
}

/* Gated and counted, with something to multiply and without: nothing is written unless all of it is. */
static esmm_status do_epilogue(esmm_ctx *ctx, data *d)
{
  static const float scales[] = {1, 0};
  enum { COLS = 70 };
  esmm_status status = ESMM_OK;
  float *c = d->c.data;
  assert_int_equal(d->c.cols, COLS);
  for (int i = 0; i < 4 && status == ESMM_OK; i++) {
    int32_t counts[COLS];
    esmm_pattern *pattern = (esmm_pattern *)(void *)counts;
    const esmm_matmul_opts opts = {.size = sizeof opts,
                                   .alpha = &scales[i % 2],
                                   .activation = ESMM_ACT_SILU,
                                   .gate = i < 2 ? d->plain : NULL,
                                   .column_nonzeros = counts,
                                   .c_pattern = &pattern};
    for (int64_t j = 0; j < d->c.rows * COLS; j++)
      c[j] = -1234;
    for (int j = 0; j < COLS; j++)
      counts[j] = -1;
    status = esmm_matmul(ctx, &d->a, d->plain, &d->c, &opts, NULL);
    assert_true((status == ESMM_OK) == (pattern != NULL));
    for (int64_t j = 0; j < d->c.rows * COLS; j++)
      assert_true((c[j] == -1234) == (status != ESMM_OK));
    for (int j = 0; j < COLS; j++)
      assert_true((counts[j] == -1) == (status != ESMM_OK));
    esmm_pattern_free(pattern);
  }
  return status;
}

static esmm_status do_pattern(esmm_ctx *ctx, data *d)
{
  esmm_pattern *fine = NULL, *coarse = NULL, *columns = NULL;
  esmm_skip_stats stats = {.size = sizeof stats};
  esmm_status status = esmm_pattern_extract(ctx, &d->a, 2, &fine);
  assert_true((status == ESMM_OK) == (fine != NULL));
  if (status == ESMM_OK)
    status = esmm_pattern_coarsen(ctx, fine, 8, &coarse);
  if (status == ESMM_OK)
    status = esmm_pattern_extract_b(ctx, &d->b, 32, &columns);
  if (status == ESMM_OK)
    status = esmm_pattern_skip_stats(ctx, coarse, columns, &stats);
  if (status == ESMM_OK) {
    esmm_matmul_opts opts = {.size = sizeof opts, .a_pattern = fine};
    status = esmm_matmul(ctx, &d->a, d->plain, &d->c, &opts, NULL);
  }
  esmm_pattern_free(fine);
  esmm_pattern_free(coarse);
  esmm_pattern_free(columns);
  return status;
}

static esmm_status do_save(esmm_ctx *ctx, data *d)
{
  return esmm_weights_save(ctx, d->plain, d->path);
}

static esmm_status do_load(esmm_ctx *ctx, data *d)
{
  esmm_weights *w = NULL;
  esmm_status status = esmm_weights_load(ctx, d->path, &w);
  assert_true((status == ESMM_OK) == (w != NULL));
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &d->a, w, &d->c, NULL, NULL);
  esmm_weights_free(w);
  return status;
}

/* Every format, from a matrix and from blocks, saved, loaded, back to dense, and multiplied. */
static esmm_status do_format(esmm_ctx *ctx, data *d, const esmm_prepare_opts *opts)
{
  const int32_t pointers[2] = {0, 1}, column = 0;
  const float block[4] = {1, 2, 3, 4};
  const esmm_bsr blocks = {.size = sizeof blocks,
                           .rows = 2,
                           .cols = 2,
                           .block_rows = 2,
                           .block_cols = 2,
                           .index_bits = 32,
                           .blocks = 1,
                           .row_pointers = pointers,
                           .column_indices = &column,
                           .values = block};
  esmm_weights *w = NULL, *small = NULL, *loaded = NULL;
  float out[4] = {0};
  esmm_matrix c = {.data = out, .rows = 2, .cols = 2, .order = ESMM_COL_MAJOR};
  char path[sizeof d->path + 8];
  snprintf(path, sizeof path, "%s.fmt", d->path);
  esmm_status status = esmm_prepare(ctx, &d->b, opts, &w);
  assert_true((status == ESMM_OK) == (w != NULL));
  if (status == ESMM_OK)
    status = esmm_matmul(ctx, &d->a, w, &d->c, NULL, NULL);
  if (status == ESMM_OK)
    status = esmm_weights_save(ctx, w, path);
  if (status == ESMM_OK)
    status = esmm_weights_load(ctx, path, &loaded);
  if (status == ESMM_OK)
    status = esmm_prepare_bsr(ctx, &blocks, opts, &small);
  assert_true((status == ESMM_OK) == (small != NULL));
  if (status == ESMM_OK)
    status = esmm_weights_to_dense(ctx, small, &c);
  if (status == ESMM_OK)
    status = esmm_matmul_bsr(ctx, &blocks, small, &c, NULL, NULL);
  if (status == ESMM_OK)
    assert_true(out[0] == 7 && out[1] == 15 && out[2] == 10 && out[3] == 22);
  unlink(path);
  esmm_weights_free(w);
  esmm_weights_free(small);
  esmm_weights_free(loaded);
  return status;
}

static esmm_status do_formats(esmm_ctx *ctx, data *d)
{
  static const esmm_prepare_opts opts[] = {
      {.size = sizeof(esmm_prepare_opts),
       .format.kind = ESMM_FORMAT_BSR,
       .format.block_rows = 2,
       .format.block_cols = 2},
      {.size = sizeof(esmm_prepare_opts), .format.kind = ESMM_FORMAT_BSR},
      {.size = sizeof(esmm_prepare_opts), .format.kind = ESMM_FORMAT_NM, .format.keep = 4, .format.group = 4},
      {.size = sizeof(esmm_prepare_opts),
       .format.kind = ESMM_FORMAT_NM,
       .format.keep = 4,
       .format.group = 4,
       .format.group_cols = 8},
  };
  esmm_status status = ESMM_OK;
  for (size_t i = 0; i < sizeof opts / sizeof opts[0] && status == ESMM_OK; i++)
    status = do_format(ctx, d, &opts[i]);
  return status;
}

/* A failure leaves the matrix as it was. */
static esmm_status do_prune(esmm_ctx *ctx, data *d)
{
  static const esmm_prune_opts opts[] = {
      {.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM},
      {.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_BSR, .density = 0.5},
      {.size = sizeof(esmm_prune_opts), .format.kind = ESMM_FORMAT_NM, .soft = 1},
      {.size = sizeof(esmm_prune_opts), .top = 3},
      {.size = sizeof(esmm_prune_opts), .density = 0.5, .scope = ESMM_PRUNE_MATRIX, .soft = 1},
  };
  esmm_status status = ESMM_OK;
  for (size_t i = 0; i < sizeof opts / sizeof opts[0] && status == ESMM_OK; i++) {
    th_fill(&d->c, 3, 1.0, false);
    status = esmm_prune(ctx, &d->c, &opts[i], NULL);
    int64_t zeros = 0;
    for (int64_t j = 0; j < d->c.rows * d->c.cols; j++)
      zeros += ((float *)d->c.data)[j] == 0.0f;
    assert_true((zeros > 0) == (status == ESMM_OK));
  }
  return status;
}

static esmm_status do_generate(esmm_ctx *ctx, data *d)
{
  esmm_status status = ESMM_OK;
  for (int kind = 0; kind <= ESMM_GEN_ACTIVATIONS && status == ESMM_OK; kind++) {
    esmm_generator g = {.size = sizeof g, .kind = (esmm_generator_kind)kind, .density = 0.5, .pattern = "10101010"};
    status = esmm_generate(ctx, &g, &d->c);
  }
  return status;
}

static void replay(const char *name, scenario run)
{
  data d = {.a = th_matrix_alloc(12, 300, ESMM_F32), .b = th_matrix_alloc(300, 70, ESMM_F16)};
  d.c = th_matrix_alloc(12, 70, ESMM_F32);
  th_fill(&d.a, 1, 0.4, true);
  th_fill(&d.b, 2, 0.7, true);
  d.plain_ctx = th_ctx(1);
  assert_int_equal(esmm_prepare(d.plain_ctx, &d.b, NULL, &d.plain), ESMM_OK);
  snprintf(d.path, sizeof d.path, "/tmp/esmm_faults_%ld", (long)getpid());
  assert_int_equal(esmm_weights_save(d.plain_ctx, d.plain, d.path), ESMM_OK);

  int64_t n = 1;
  for (;; n++) {
    assert_true(n < 10000);
    meter m = {.fail_at = n};
    char text[512] = "";
    esmm_ctx *ctx = NULL;
    esmm_status status = make_ctx(&m, &ctx, text, sizeof text);
    if (status != ESMM_OK) {
      check_failure(name, &m, status, text);
      assert_null(ctx);
      assert_int_equal(m.live, 0);
      continue;
    }
    status = run(ctx, &d);
    if (status != ESMM_OK) {
      check_failure(name, &m, status, esmm_ctx_error(ctx));
      m.fail_at = 0;
      status = run(ctx, &d); /* the same context goes on */
      if (status != ESMM_OK)
        fail_msg("%s: after allocation %lld failed, the next try gives %s", name, (long long)n, esmm_ctx_error(ctx));
    }
    esmm_ctx_free(ctx);
    if (m.live != 0 || m.live_bytes != 0)
      fail_msg("%s: allocation %lld failed, then %lld blocks, %lld bytes were left", name, (long long)n,
               (long long)m.live, (long long)m.live_bytes);
    if (!m.failed)
      break; /* fewer than n allocations in all: every one has failed once */
  }
  print_message("# %s: %lld allocations failed one after the other\n", name, (long long)(n - 1));
  assert_true(n > 1);
  esmm_weights *w = NULL; /* failed saves have not harmed the file */
  assert_int_equal(esmm_weights_load(d.plain_ctx, d.path, &w), ESMM_OK);
  esmm_weights_free(w);
  unlink(d.path);
  esmm_weights_free(d.plain);
  esmm_ctx_free(d.plain_ctx);
  free(d.a.data);
  free(d.b.data);
  free(d.c.data);
}

static void prepare_without_memory(void **state)
{
  (void)state;
  replay("prepare", do_prepare);
}

static void matmul_without_memory(void **state)
{
  (void)state;
  replay("matmul", do_matmul);
}

static void epilogue_without_memory(void **state)
{
  (void)state;
  replay("epilogue", do_epilogue);
}

static void pattern_without_memory(void **state)
{
  (void)state;
  replay("pattern", do_pattern);
}

static void save_without_memory(void **state)
{
  (void)state;
  replay("save", do_save);
}

static void load_without_memory(void **state)
{
  (void)state;
  replay("load", do_load);
}

static void generate_without_memory(void **state)
{
  (void)state;
  replay("generate", do_generate);
}

static void formats_without_memory(void **state)
{
  (void)state;
  replay("formats", do_formats);
}

static void prune_without_memory(void **state)
{
  (void)state;
  replay("prune", do_prune);
}

/* After the first call of a shape there is no allocation left that could fail. */
static void second_call_allocates_nothing(void **state)
{
  (void)state;
  meter m = {0};
  esmm_ctx *ctx = NULL;
  assert_int_equal(make_ctx(&m, &ctx, NULL, 0), ESMM_OK);
  esmm_matrix a = th_matrix_alloc(40, 100, ESMM_F32), b = th_matrix_alloc(100, 60, ESMM_F32),
              c = th_matrix_alloc(40, 60, ESMM_F32);
  th_fill(&a, 1, 0.5, false);
  th_fill(&b, 2, 0.5, false);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(ctx, &b, NULL, &w), ESMM_OK);
  assert_int_equal(esmm_matmul(ctx, &a, w, &c, NULL, NULL), ESMM_OK);
  int64_t calls = m.calls;
  for (int i = 0; i < 5; i++)
    assert_int_equal(esmm_matmul(ctx, &a, w, &c, NULL, NULL), ESMM_OK);
  assert_int_equal(m.calls, calls);
  esmm_ctx_free(ctx);
  esmm_weights_free(w); /* weights may outlive the context that made them */
  assert_int_equal(m.live, 0);
  free(a.data);
  free(b.data);
  free(c.data);
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(prepare_without_memory),  cmocka_unit_test(matmul_without_memory),
      cmocka_unit_test(epilogue_without_memory), cmocka_unit_test(pattern_without_memory),
      cmocka_unit_test(save_without_memory),     cmocka_unit_test(load_without_memory),
      cmocka_unit_test(generate_without_memory), cmocka_unit_test(formats_without_memory),
      cmocka_unit_test(prune_without_memory),    cmocka_unit_test(second_call_allocates_nothing),
  };
  return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
