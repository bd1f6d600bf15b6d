/* test_ffn_errors.c: what the feed-forward layer refuses, and what it does when memory runs out. */
#include "ffn_rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The layer passes both ways as it should, whatever was tried before; and is freed. */
static void ends_right(const char *what, rig *r, oracle *o)
{
  rig_run(r);
  oracle_forward(o);
  oracle_backward(o);
  check_all(what, r, 1e-5);
  rig_free(r);
  oracle_free(o);
}

static void caches_have_owners(void **state)
{
  (void)state;
  oracle o = {.tokens = 6, .d_model = 5, .d_hidden = 8, .activation = ESMM_ACT_RELU2};
  oracle_create(&o, 1, 1);
  const esmm_ffn_opts opts = opts_of(&o);
  rig r, s;
  rig_create(&r, &o, &opts, plain, 1);
  rig_create(&s, &o, &opts, plain, 1);
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "no forward pass",
         "esmm_ffn_forward");
  rig_run(&s);
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, s.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "another layer", "");
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_X], &r.y, s.cache, NULL), ESMM_ERR_ARGUMENT, "another layer", "");
  rig_run(&r);
  must(r.ctx, esmm_ffn_set_weights(r.ctx, r.ffn, &r.weights, NULL));
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "replaced", "again");
  rig_run(&r);
  /* A cache outlives its layer, and is not taken for one of a layer at the same address. */
  for (int i = 0; i < 3; i++) {
    esmm_ffn_free(r.ffn);
    must(r.ctx, esmm_ffn_create(r.ctx, &opts, &r.ffn));
    must(r.ctx, esmm_ffn_set_weights(r.ctx, r.ffn, &r.weights, NULL));
    expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "freed", "");
  }
  /* Freed in any order. */
  esmm_ffn_cache *caches[3] = {NULL};
  for (int i = 0; i < 3; i++)
    must(r.ctx, esmm_ffn_cache_create(r.ctx, r.ffn, &caches[i]));
  esmm_ffn_cache_free(caches[1]);
  esmm_ffn_cache_free(caches[0]);
  esmm_ffn_free(r.ffn);
  r.ffn = NULL;
  esmm_ffn_cache_free(caches[2]);
  esmm_ffn_cache_free(NULL);
  esmm_ffn_free(NULL);
  rig_free(&r);
  rig_free(&s);
  oracle_free(&o);
}

static void bad_options(void **state)
{
  (void)state;
  esmm_ctx *ctx = th_ctx(1);
  esmm_ffn *ffn = NULL;
  const esmm_ffn_opts good = {.size = sizeof good, .d_model = 4, .d_hidden = 8};
  struct {
    esmm_ffn_opts o;
    esmm_status status;
    const char *name, *value;
  } cases[12];
  for (int i = 0; i < 12; i++)
    cases[i].o = good;
  int n = 0;
#define CASE(change, code, word1, word2) \
  cases[n].o.change;                     \
  cases[n].status = code;                \
  cases[n].name = word1;                 \
  cases[n++].value = word2;
  CASE(d_model = 0, ESMM_ERR_SHAPE, "d_model", "0")
  CASE(d_hidden = -3, ESMM_ERR_SHAPE, "d_hidden", "-3")
  CASE(d_hidden = (int64_t)1 << 40, ESMM_ERR_SHAPE, "d_hidden", "1099511627776")
  CASE(rank1 = -1, ESMM_ERR_SHAPE, "rank1", "-1")
  CASE(rank2 = -2, ESMM_ERR_SHAPE, "rank2", "-2")
  CASE(activation = (esmm_activation)99, ESMM_ERR_ARGUMENT, "activation", "99")
  CASE(dtype = (esmm_dtype)7, ESMM_ERR_DTYPE, "dtype", "7")
  CASE(mode = (esmm_ffn_mode)4, ESMM_ERR_ARGUMENT, "mode", "4")
  CASE(sparsifier = (esmm_sparsifier)3, ESMM_ERR_ARGUMENT, "sparsifier", "3")
  CASE(sparse_share = 1.5, ESMM_ERR_ARGUMENT, "sparse_share", "1.5")
  CASE(sparse_share = NAN, ESMM_ERR_ARGUMENT, "sparse_share", "nan")
  CASE(size = sizeof good + 8, ESMM_ERR_ARGUMENT, "opts->size", "")
#undef CASE
  for (int i = 0; i < n; i++) {
    ffn = (esmm_ffn *)&n;
    th_expect("create", esmm_ffn_create(ctx, &cases[i].o, &ffn), cases[i].status, esmm_ctx_error(ctx), cases[i].name,
              cases[i].value);
    assert_null(ffn);
  }
  ffn = (esmm_ffn *)&n;
  assert_int_equal(esmm_ffn_create(NULL, &good, &ffn), ESMM_ERR_ARGUMENT);
  assert_null(ffn);
  assert_int_equal(esmm_ffn_create(ctx, NULL, &ffn), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_ffn_create(ctx, &good, NULL), ESMM_ERR_ARGUMENT);
  esmm_ffn_cache *cache = (esmm_ffn_cache *)&n;
  assert_int_equal(esmm_ffn_cache_create(NULL, NULL, &cache), ESMM_ERR_ARGUMENT);
  assert_null(cache);
  assert_int_equal(esmm_ffn_cache_create(ctx, NULL, &cache), ESMM_ERR_ARGUMENT);
  esmm_ctx_free(ctx);
}

static void bad_weights(void **state)
{
  (void)state;
  oracle o = {.tokens = 6, .d_model = 5, .d_hidden = 8, .activation = ESMM_ACT_RELU2};
  oracle_create(&o, 1, 1);
  const esmm_ffn_opts opts = opts_of(&o);
  rig r;
  rig_create(&r, &o, &opts, plain, 1);
  esmm_ffn_weights w = r.weights;
  w.w1 = r.weights.w2;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_SHAPE, "weights->w1", "8 x 5");
  w = r.weights;
  w.w2 = NULL;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT, "weights->w2", "NULL");
  w = r.weights;
  w.gate = w.w1;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT, "weights->gate", "options");
  w = r.weights;
  w.w2_v = w.w2;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT, "weights->w2_v", "options");
  w = r.weights;
  w.b_gate = w.b1;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT, "weights->b_gate", "gate");
  w = r.weights;
  w.size = 4;
  expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT, "weights->size", "4");
  assert_int_equal(esmm_ffn_set_weights(r.ctx, NULL, &w, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_ffn_set_weights(r.ctx, r.ffn, NULL, NULL), ESMM_ERR_ARGUMENT);
  assert_int_equal(esmm_ffn_set_weights(NULL, r.ffn, &w, NULL), ESMM_ERR_ARGUMENT);
  ends_right("after errors", &r, &o); /* and the layer still has the weights it had */
}

/* What the caller set is named: the mode and the format, not the strict products that follow from them. */
static void dense_mode_needs_dense_weights(void **state)
{
  (void)state;
  oracle o = {.tokens = 6, .d_model = 5, .d_hidden = 8, .activation = ESMM_ACT_RELU2};
  oracle_create(&o, 1, 1);
  esmm_ffn_opts opts = opts_of(&o);
  opts.mode = ESMM_FFN_DENSE;
  rig r;
  rig_create(&r, &o, &opts, plain, 1);
  for (int format = ESMM_FORMAT_BSR; format <= ESMM_FORMAT_NM; format++) {
    const esmm_prepare_opts prepare = {
        .size = sizeof prepare, .format.kind = (esmm_format_kind)format, .format.keep = 4, .format.group = 4};
    expect(&r, esmm_ffn_set_weights(r.ctx, r.ffn, &r.weights, &prepare), ESMM_ERR_UNSUPPORTED, "mode is dense",
           esmm_format_str(prepare.format.kind));
    assert_null(strstr(esmm_ctx_error(r.ctx), "strict"));
  }
  ends_right("after errors", &r, &o); /* with the weights it had */
}

static void bad_passes(void **state)
{
  (void)state;
  oracle o = {.tokens = 6, .d_model = 5, .d_hidden = 8, .activation = ESMM_ACT_RELU2};
  oracle_create(&o, 1, 1);
  const esmm_ffn_opts opts = opts_of(&o);
  rig r;
  rig_create(&r, &o, &opts, plain, 1);
  esmm_matrix wrong = r.p[P_W2], *x = &r.p[P_X];
  esmm_ffn *empty = NULL;
  must(r.ctx, esmm_ffn_create(r.ctx, &opts, &empty));
  expect(&r, esmm_ffn_forward(r.ctx, empty, x, &r.y, NULL, NULL), ESMM_ERR_ARGUMENT, "no weights", "set_weights");
  esmm_ffn_free(empty);
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, x, &wrong, NULL, NULL), ESMM_ERR_SHAPE, "y is 8 x 5", "6 x 5");
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, &r.p[P_W1], &r.y, NULL, NULL), ESMM_ERR_SHAPE, "x is 5 x 8", "");
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, x, x, NULL, NULL), ESMM_ERR_OVERLAP, "y", "x");
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, NULL, &r.y, NULL, NULL), ESMM_ERR_ARGUMENT, "x is NULL", "");
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, x, NULL, NULL, NULL), ESMM_ERR_ARGUMENT, "y is NULL", "");
  expect(&r, esmm_ffn_forward(r.ctx, NULL, x, &r.y, NULL, NULL), ESMM_ERR_ARGUMENT, "ffn is NULL", "");
  assert_int_equal(esmm_ffn_forward(NULL, r.ffn, x, &r.y, NULL, NULL), ESMM_ERR_ARGUMENT);
  esmm_ffn_report report = {.size = 3};
  expect(&r, esmm_ffn_forward(r.ctx, r.ffn, x, &r.y, NULL, &report), ESMM_ERR_ARGUMENT, "report->size", "3");
  rig_run(&r);
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &r.grads, &report), ESMM_ERR_ARGUMENT, "report->size",
         "3");
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &wrong, &r.grads, NULL), ESMM_ERR_SHAPE, "dy", "8 x 5");
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, NULL, &r.grads, NULL), ESMM_ERR_ARGUMENT, "dy is NULL", "");
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, NULL, NULL), ESMM_ERR_ARGUMENT, "grads is NULL", "");
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, NULL, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "cache is NULL", "");
  expect(&r, esmm_ffn_backward(r.ctx, NULL, r.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT, "ffn is NULL", "");
  assert_int_equal(esmm_ffn_backward(NULL, r.ffn, r.cache, &r.dy, &r.grads, NULL), ESMM_ERR_ARGUMENT);
  esmm_ffn_grads g = r.grads;
  g.w1 = &wrong;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_SHAPE, "grads->w1", "8 x 5");
  g = r.grads;
  g.gate = &wrong;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_ARGUMENT, "grads->gate", "options");
  g = r.grads;
  g.b_gate = g.b1;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_ARGUMENT, "grads->b_gate", "options");
  g = r.grads;
  g.w2 = &wrong; /* the weights themselves */
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_OVERLAP, "grads->w2", "weights");
  g = r.grads;
  g.x = &r.dy;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_OVERLAP, "grads->x", "dy");
  g = r.grads;
  g.b2 = r.d[P_X].data;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_OVERLAP, "grads->b2", "grads->x");
  esmm_matrix turned = {.data = r.d[P_W2].data, .rows = 5, .cols = 8, .dtype = ESMM_F32, .order = ESMM_COL_MAJOR};
  g = r.grads;
  g.w1 = &turned;
  expect(&r, esmm_ffn_backward(r.ctx, r.ffn, r.cache, &r.dy, &g, NULL), ESMM_ERR_OVERLAP, "grads->w2", "grads->w1");
  rig_free(&r);
  oracle_free(&o);
}

typedef struct meter {
  int64_t calls, fail_at, live;
  bool failed;
} meter;

static void *meter_alloc(void *user, size_t bytes, size_t align)
{
  meter *m = user;
  void *p = NULL;
  if (++m->calls == m->fail_at) {
    m->failed = true;
    return NULL;
  }
  if (posix_memalign(&p, align, bytes) != 0)
    return NULL;
  memset(p, 0xcd, bytes); /* nobody may count on zeros */
  m->live++;
  return p;
}

static void meter_free(void *user, void *p, size_t bytes)
{
  (void)bytes;
  ((meter *)user)->live--;
  free(p);
}

static esmm_status whole_life(esmm_ctx *ctx, const esmm_ffn_opts *opts, rig *r)
{
  esmm_ffn *ffn = NULL;
  esmm_ffn_cache *cache = NULL;
  esmm_status status = esmm_ffn_create(ctx, opts, &ffn);
  assert_true((status == ESMM_OK) == (ffn != NULL));
  if (status == ESMM_OK)
    status = esmm_ffn_cache_create(ctx, ffn, &cache);
  for (int i = 0; i < 2 && status == ESMM_OK; i++) /* the second time they replace others */
    status = esmm_ffn_set_weights(ctx, ffn, &r->weights, NULL);
  if (status == ESMM_OK) {
    for (int64_t i = 0; i < r->y.rows * r->y.cols; i++)
      ((float *)r->y.data)[i] = -1234;
    status = esmm_ffn_forward(ctx, ffn, &r->p[P_X], &r->y, cache, NULL);
    for (int64_t i = 0; i < r->y.rows * r->y.cols; i++) /* after a failure y keeps what it held */
      assert_true((((float *)r->y.data)[i] == -1234) == (status != ESMM_OK));
  }
  if (status == ESMM_OK)
    status = esmm_ffn_forward(ctx, ffn, &r->p[P_X], &r->y, NULL, NULL);
  if (status == ESMM_OK) {
    status = esmm_ffn_backward(ctx, ffn, cache, &r->dy, &r->grads, &r->report);
    if (status != ESMM_OK) /* the cache still holds its pass */
      assert_int_equal(esmm_ffn_backward(ctx, ffn, cache, &r->dy, &r->grads, &r->report), ESMM_OK);
  }
  esmm_ffn_cache_free(cache);
  esmm_ffn_free(ffn);
  return status;
}

static void any_allocation_may_fail(void **state)
{
  (void)state;
  for (int kind = 0; kind < 6; kind++) {
    oracle o = {.tokens = 24,
                .d_model = 10,
                .d_hidden = 40,
                .rank1 = kind & 1 ? 4 : 0,
                .rank2 = kind & 1 ? 3 : 0,
                .activation = kind == 5 ? ESMM_ACT_GELU : ESMM_ACT_RELU2,
                .gated = kind >= 2};
    oracle_create(&o, 1, 1);
    kill_features(&o, 0.5, 3);
    esmm_ffn_opts opts = opts_of(&o);
    opts.mode = (esmm_ffn_mode)(kind % 4);
    opts.permute_tokens = 1;
    rig r;
    rig_create(&r, &o, &opts, plain, 1);
    int64_t n = 1;
    for (;; n++) {
      meter m = {.fail_at = n};
      const esmm_allocator allocator = {.alloc = meter_alloc, .free = meter_free, .user = &m};
      esmm_ctx_opts co = {.size = sizeof co, .threads = 1, .allocator = &allocator, .no_tuning_cache = 1};
      esmm_ctx *ctx = NULL;
      if (esmm_ctx_create(&ctx, &co) == ESMM_OK) {
        const esmm_status status = whole_life(ctx, &opts, &r);
        if (status != (m.failed ? ESMM_ERR_MEMORY : ESMM_OK))
          fail_msg("kind %d, allocation %lld: %s (%s)", kind, (long long)n, esmm_status_str(status),
                   esmm_ctx_error(ctx));
        if (m.failed)
          assert_true(*esmm_ctx_error(ctx));
        m.fail_at = 0;
        must(ctx, whole_life(ctx, &opts, &r)); /* the same context goes on */
      }
      esmm_ctx_free(ctx);
      assert_int_equal(m.live, 0);
      if (!m.failed)
        break;
    }
    print_message("# kind %d: %lld allocations failed one after the other\n", kind, (long long)(n - 1));
    assert_true(n > 20);
    rig_free(&r);
    oracle_free(&o);
  }
}

/* FNV-1a of a matrix's bytes. */
static uint64_t hash_matrix(uint64_t hash, const esmm_matrix *m)
{
  const unsigned char *bytes = m->data;
  for (size_t i = 0; bytes && i < th_matrix_bytes(m); i++)
    hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

/* A call that may fail for want of memory, and is made again then. */
#define TWICE(call)                      \
  do {                                   \
    if ((call) != ESMM_OK)               \
      assert_int_equal((call), ESMM_OK); \
  } while (0)

/* What two rounds of passes give, where an allocation may fail. */
static uint64_t stubborn_life(esmm_ctx *ctx, const esmm_ffn_opts *opts, rig *r)
{
  uint64_t hash = 0xcbf29ce484222325u;
  esmm_ffn *ffn = NULL;
  esmm_ffn_cache *cache = NULL;
  TWICE(esmm_ffn_create(ctx, opts, &ffn));
  TWICE(esmm_ffn_cache_create(ctx, ffn, &cache));
  TWICE(esmm_ffn_set_weights(ctx, ffn, &r->weights, NULL));
  for (int i = 0; i < 2; i++) {
    TWICE(esmm_ffn_forward(ctx, ffn, &r->p[P_X], &r->y, cache, NULL));
    hash = hash_matrix(hash, &r->y);
    TWICE(esmm_ffn_forward(ctx, ffn, &r->p[P_X], &r->y, NULL, NULL));
    hash = hash_matrix(hash, &r->y);
    TWICE(esmm_ffn_backward(ctx, ffn, cache, &r->dy, &r->grads, NULL));
    for (int j = 0; j < P_COUNT; j++)
      hash = hash_matrix(hash, &r->d[j]);
  }
  esmm_ffn_cache_free(cache);
  esmm_ffn_free(ffn);
  return hash;
}

/* A call that failed and is made again changes no bit of what follows. */
static void bits_survive_a_failure(void **state)
{
  (void)state;
  for (int kind = 0; kind < 8; kind++) {
    oracle o = {.tokens = 24, .d_model = 10, .d_hidden = 40, .activation = ESMM_ACT_RELU2, .gated = kind / 4};
    oracle_create(&o, 1, 1);
    kill_features(&o, 0.5, 3);
    esmm_ffn_opts opts = opts_of(&o);
    opts.mode = (esmm_ffn_mode)(kind % 4);
    opts.sparsifier = ESMM_SPARSIFY_MVUE;
    opts.permute_tokens = 1;
    rig r;
    rig_create(&r, &o, &opts, plain, 1);
    const uint64_t want = stubborn_life(r.ctx, &opts, &r);
    for (int64_t n = 1, more = 1; more; n++) {
      meter m = {0};
      const esmm_allocator allocator = {.alloc = meter_alloc, .free = meter_free, .user = &m};
      const esmm_ctx_opts co = {.size = sizeof co, .threads = 1, .allocator = &allocator, .no_tuning_cache = 1};
      esmm_ctx *ctx = NULL;
      assert_int_equal(esmm_ctx_create(&ctx, &co), ESMM_OK);
      m.fail_at = m.calls + n;
      if (stubborn_life(ctx, &opts, &r) != want)
        fail_msg("kind %d: other bits after allocation %lld failed (%s)", kind, (long long)n, esmm_ctx_error(ctx));
      more = m.failed;
      esmm_ctx_free(ctx);
    }
    rig_free(&r);
    oracle_free(&o);
  }
}

int main(void)
{
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(caches_have_owners),
      cmocka_unit_test(bad_options),
      cmocka_unit_test(bad_weights),
      cmocka_unit_test(dense_mode_needs_dense_weights),
      cmocka_unit_test(bad_passes),
      cmocka_unit_test(any_allocation_may_fail),
      cmocka_unit_test(bits_survive_a_failure),
  };
  return cmocka_run_group_tests_name("ffn_errors", tests, NULL, NULL);
}
