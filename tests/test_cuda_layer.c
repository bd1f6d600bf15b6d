/*
 * test_cuda_layer.c: the feed-forward layer on a GPU as far as that can be told without one: on the driver of
 * fake_cuda.c, whose kernels do nothing. A second step allocates nothing and waits for nothing; a step can be captured
 * into a graph once it has run; few tokens take one launch behind the gate; and whichever call of the driver fails, the
 * layer says so, and gives everything back.
 */
#include "cuda/cuda.h"
#include "cuda/ffn/params.h"
#include "esmm_ffn.h"
#include "fake_gpu.h"

typedef struct net {
  meter m;
  esmm_ctx *ctx;
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  esmm_matrix x, y, dy, dx, w1, gate, w2, d1, dgate, d2;
  float *b1, *b2;
  esmm_ffn_weights weights;
  esmm_ffn_grads grads;
} net;

typedef struct kind {
  esmm_ffn_mode mode;
  esmm_sparsifier sparsifier;
  int gated;
  esmm_activation activation;
  int64_t tokens, d_model, d_hidden;
} kind;

static const kind kinds[] = {
    {ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 0, ESMM_ACT_RELU2, 40, 128, 256},
    {ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 1, ESMM_ACT_RELU, 33, 20, 50},
    {ESMM_FFN_DENSE, ESMM_SPARSIFY_TOP_N, 1, ESMM_ACT_SILU, 40, 128, 256},
    {ESMM_FFN_SPLIT, ESMM_SPARSIFY_SOFT, 0, ESMM_ACT_RELU2, 33, 20, 50},
    {ESMM_FFN_SPARSE, ESMM_SPARSIFY_MVUE, 1, ESMM_ACT_RELU, 40, 128, 256},
    {ESMM_FFN_SPARSE, ESMM_SPARSIFY_SOFT, 0, ESMM_ACT_RELU2, 260, 128, 260}, /* packed, from here on */
    {ESMM_FFN_SPLIT, ESMM_SPARSIFY_TOP_N, 1, ESMM_ACT_RELU, 256, 72, 320},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static esmm_status device(net *n, int64_t rows, int64_t cols, esmm_matrix *m)
{
  *m = (esmm_matrix){.rows = rows, .cols = cols, .dtype = ESMM_BF16, .place = ESMM_DEVICE};
  return esmm_memory_alloc(n->ctx, (size_t)(rows * cols) * 2, &m->data);
}

static void free_net(net *n)
{
  const esmm_matrix *all[] = {&n->x, &n->y, &n->dy, &n->dx, &n->w1, &n->gate, &n->w2, &n->d1, &n->dgate, &n->d2};
  esmm_ffn_cache_free(n->cache);
  esmm_ffn_free(n->ffn);
  for (size_t i = 0; i < sizeof all / sizeof *all && n->ctx; i++)
    esmm_memory_free(n->ctx, all[i]->data);
  if (n->ctx) {
    esmm_memory_free(n->ctx, n->b1);
    esmm_memory_free(n->ctx, n->b2);
  }
  esmm_ctx_free(n->ctx);
}

/* Everything but the context, which is there. */
static esmm_status make_net(net *n, const kind *k)
{
  const int64_t t = k->tokens, d = k->d_model, h = k->d_hidden;
  const struct {
    esmm_matrix *m;
    int64_t rows, cols;
  } all[] = {{&n->x, t, d},  {&n->y, t, d},    {&n->dy, t, d}, {&n->dx, t, d},    {&n->w1, d, h},
             {&n->d1, d, h}, {&n->gate, d, h}, {&n->w2, h, d}, {&n->dgate, d, h}, {&n->d2, h, d}};
  esmm_status status = ESMM_OK;
  void *b1 = NULL, *b2 = NULL;
  for (size_t i = 0; i < sizeof all / sizeof *all && status == ESMM_OK; i++)
    status = device(n, all[i].rows, all[i].cols, all[i].m);
  if (status == ESMM_OK)
    status = esmm_memory_alloc(n->ctx, (size_t)h * 4, &b1);
  n->b1 = b1;
  if (status == ESMM_OK)
    status = esmm_memory_alloc(n->ctx, (size_t)d * 4, &b2);
  n->b2 = b2;
  const esmm_ffn_opts opts = {.size = sizeof opts,
                              .d_model = d,
                              .d_hidden = h,
                              .activation = k->activation,
                              .gated = k->gated,
                              .dtype = ESMM_BF16,
                              .mode = k->mode,
                              .sparsifier = k->sparsifier,
                              .permute_tokens = 1};
  if (status == ESMM_OK)
    status = esmm_ffn_create(n->ctx, &opts, &n->ffn);
  if (status == ESMM_OK)
    status = esmm_ffn_cache_create(n->ctx, n->ffn, &n->cache);
  n->weights = (esmm_ffn_weights){.size = sizeof n->weights,
                                  .w1 = &n->w1,
                                  .gate = k->gated ? &n->gate : NULL,
                                  .w2 = &n->w2,
                                  .b1 = n->b1,
                                  .b2 = n->b2};
  n->grads = (esmm_ffn_grads){.size = sizeof n->grads,
                              .x = &n->dx,
                              .w1 = &n->d1,
                              .gate = k->gated ? &n->dgate : NULL,
                              .w2 = &n->d2,
                              .b1 = n->b1, /* nobody looks at it */
                              .b2 = n->b2};
  return status;
}

static esmm_status step(net *n)
{
  esmm_status status = esmm_ffn_set_weights(n->ctx, n->ffn, &n->weights, NULL);
  if (status == ESMM_OK)
    status = esmm_ffn_forward(n->ctx, n->ffn, &n->x, &n->y, n->cache, NULL);
  return status == ESMM_OK ? esmm_ffn_backward(n->ctx, n->ffn, n->cache, &n->dy, &n->grads, NULL) : status;
}

static void must_step(net *n, const char *what)
{
  const esmm_status status = step(n);
  if (status != ESMM_OK)
    fail_msg("%s: %s: %s", what, esmm_status_str(status), esmm_ctx_error(n->ctx));
}

/* With cuBLAS, and without. */
static void a_second_step_allocates_nothing_and_waits_for_nothing(void **state)
{
  (void)state;
  static char stream;
  for (int i = 0; i < 2 * KINDS; i++) {
    net n = {0};
    char what[40];
    (void)snprintf(what, sizeof what, "kind %d", i);
    fake->cublas = i % 2 ? NO_CUBLAS : 0;
    n.ctx = must_create(&n.m);
    assert_int_equal(make_net(&n, &kinds[i / 2]), ESMM_OK);
    assert_int_equal(esmm_ctx_set_stream(n.ctx, &stream), ESMM_OK);
    must_step(&n, what);
    must_step(&n, what); /* plans that were made without a handle of cuBLAS are made again */
    const int64_t allocations = fake->allocations, synchronizations = fake->synchronizations, launches = fake->launches;
    const int64_t gemms = fake->gemms;
    must_step(&n, what);
    assert_int_equal(fake->allocations, allocations);
    assert_int_equal(fake->synchronizations, synchronizations);
    assert_true(fake->launches > launches);
    if (i % 2 == 0 && kinds[i / 2].tokens < 256)
      assert_true(fake->gemms > gemms); /* weights that lie transposed are read as they lie */
    fake->captured = &stream;
    must_step(&n, what);
    assert_int_equal(fake->allocations, allocations);
    fake->captured = NULL;
    esmm_ffn_report report = {.size = sizeof report};
    assert_int_equal(esmm_ffn_forward(n.ctx, n.ffn, &n.x, &n.y, NULL, &report), ESMM_OK);
    assert_true(fake->synchronizations > synchronizations);
    free_net(&n);
    assert_int_equal(n.m.live, 0);
    check_balance(what);
  }
}

static int64_t packs, products, sparsifies;

static void count_packs(const char *name, const void *params)
{
  (void)params;
  packs += strncmp(name, "esmm_ffn_pack_", 14) == 0;
  products += strncmp(name, "esmm_ffn_two16_", 15) == 0;
  sparsifies += strcmp(name, "esmm_ffn_features") == 0 || strcmp(name, "esmm_ffn_tokens") == 0;
}

/* 16-bit operands of the 2:4 modes are packed where there are tokens enough, else written with their zeros. */
static void operands_are_packed_where_they_can_be(void **state)
{
  (void)state;
  static const struct {
    kind k;
    int64_t packs, products, sparsifies;
  } cases[] = {
      {{ESMM_FFN_SPARSE, ESMM_SPARSIFY_TOP_N, 0, ESMM_ACT_RELU2, 256, 128, 260}, 4, 4, 0},
      {{ESMM_FFN_SPARSE, ESMM_SPARSIFY_SOFT, 0, ESMM_ACT_RELU2, 300, 128, 260}, 8, 4, 0}, /* it measures first */
      {{ESMM_FFN_SPLIT, ESMM_SPARSIFY_MVUE, 1, ESMM_ACT_RELU, 300, 72, 320}, 6, 6, 0},
      {{ESMM_FFN_SPARSE, ESMM_SPARSIFY_TOP_N, 0, ESMM_ACT_RELU2, 255, 128, 256}, 0, 0, 4},
      {{ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 0, ESMM_ACT_RELU2, 300, 128, 256}, 0, 0, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    net n = {0};
    n.ctx = must_create(&n.m);
    assert_int_equal(make_net(&n, &cases[i].k), ESMM_OK);
    must_step(&n, "the first");
    packs = products = sparsifies = 0;
    fake->kernel = count_packs;
    must_step(&n, "counted");
    fake->kernel = NULL;
    if (packs != cases[i].packs || products != cases[i].products || sparsifies != cases[i].sparsifies)
      fail_msg("case %zu: %lld packed, %lld multiplied, %lld written", i, (long long)packs, (long long)products,
               (long long)sparsifies);
    free_net(&n);
    assert_int_equal(n.m.live, 0);
    check_balance("packed");
  }
}

/* What the device would tell: how many features are alive; and the launches that only some of the features need. */
static int64_t alive, picked;

static void tell_alive(const char *name, const void *params)
{
  picked += strcmp(name, "esmm_ffn_pick") == 0;
  if (strcmp(name, "esmm_ffn_rank") != 0)
    return;
  const esmm_ffn_rank_params *p = params;
  if (p->mailbox)
    *(uint64_t *)esmm_cuda_pointer(p->mailbox) = (uint64_t)p->pass << 32 | (uint64_t)alive;
}

/* Dead features are left out where there are many; the pass says so itself, and in a graph none are. */
static void dead_features_are_left_out(void **state)
{
  (void)state;
  static char stream;
  for (int i = 0; i < 2; i++) {
    net n = {0};
    kind k = kinds[i];
    picked = 0;
    k.d_hidden = 1024;
    n.ctx = must_create(&n.m);
    assert_int_equal(make_net(&n, &k), ESMM_OK);
    assert_int_equal(esmm_ctx_set_stream(n.ctx, &stream), ESMM_OK);
    fake->kernel = tell_alive;
    alive = 200;
    must_step(&n, "the first");
    assert_int_equal(picked, 0);
    must_step(&n, "many dead");
    assert_true(picked > 0);
    must_step(&n, "again");
    const int64_t allocations = fake->allocations;
    must_step(&n, "once more");
    assert_int_equal(fake->allocations, allocations);
    picked = 0;
    alive = 1000;
    must_step(&n, "few dead");
    assert_int_equal(picked, 0);
    alive = 0;
    must_step(&n, "all dead");
    picked = 0;
    fake->captured = &stream;
    must_step(&n, "in a graph");
    assert_int_equal(picked, 0);
    fake->captured = NULL;
    free_net(&n);
    assert_int_equal(n.m.live, 0);
    check_balance("dead features");
  }
}

static void a_first_step_cannot_be_captured(void **state)
{
  (void)state;
  static char stream;
  net n = {0};
  n.ctx = must_create(&n.m);
  assert_int_equal(make_net(&n, &kinds[0]), ESMM_OK);
  assert_int_equal(esmm_ctx_set_stream(n.ctx, &stream), ESMM_OK);
  fake->captured = &stream;
  assert_int_equal(step(&n), ESMM_ERR_UNSUPPORTED);
  fake->captured = NULL;
  must_step(&n, "after the capture");
  free_net(&n);
  assert_int_equal(n.m.live, 0);
  check_balance("capture");
}

/* Every call of the driver in turn; what failed says so, and a later step works. */
static void any_call_may_fail(void **state)
{
  (void)state;
  enum { OUT_OF_MEMORY = 2 };
  for (int i = 0; i < KINDS; i++) {
    int64_t at = 1;
    for (bool failed = true; failed; at++) {
      net n = {0};
      char what[60];
      (void)snprintf(what, sizeof what, "kind %d, call %lld", i, (long long)at);
      n.ctx = must_create(&n.m);
      fake->result = OUT_OF_MEMORY;
      fake->failed = NULL;
      fake->fail_at = at;
      esmm_status status = make_net(&n, &kinds[i]);
      if (status == ESMM_OK)
        status = step(&n);
      fake->fail_at = 0;
      failed = fake->failed != NULL;
      if (!failed && status != ESMM_OK)
        fail_msg("%s: %s without a reason", what, esmm_ctx_error(n.ctx));
      if (failed && n.ffn && n.cache)
        must_step(&n, what);
      free_net(&n);
      assert_int_equal(n.m.live, 0);
      check_balance(what);
    }
    print_message("# kind %d: %lld calls failed one after the other\n", i, (long long)at - 2);
  }
}

/* ---- few tokens through a gate ---- */

static int64_t decodes;

static void count_decodes(const char *name, const void *params)
{
  (void)params;
  decodes += strncmp(name, "esmm_ffn_decode_", 16) == 0;
}

/* How many launches of the kernel a pass has. */
static int64_t decodes_of(net *n, esmm_ffn_cache *cache, esmm_ffn_report *report)
{
  decodes = 0;
  fake->kernel = count_decodes;
  const esmm_status status = esmm_ffn_forward(n->ctx, n->ffn, &n->x, &n->y, cache, report);
  fake->kernel = NULL;
  if (status != ESMM_OK)
    fail_msg("%s: %s", esmm_status_str(status), esmm_ctx_error(n->ctx));
  return decodes;
}

/* A pass of up to 16 tokens, exact, behind a ReLU's gate, is one product and one launch, where y is all that is wanted.
   It allocates once, for any number of tokens; so a graph of one size is not in the way of passes of another. */
static void few_tokens_take_one_launch_behind_the_gate(void **state)
{
  (void)state;
  static char stream;
  static const struct {
    esmm_ffn_mode mode;
    esmm_activation activation;
    int gated;
    int64_t tokens, d_model;
    int64_t decodes;
  } cases[] = {{ESMM_FFN_EXACT, ESMM_ACT_RELU, 1, 1, 128, 1},  {ESMM_FFN_EXACT, ESMM_ACT_RELU2, 1, 16, 128, 1},
               {ESMM_FFN_EXACT, ESMM_ACT_RELU, 1, 9, 136, 1},  {ESMM_FFN_EXACT, ESMM_ACT_RELU, 1, 17, 128, 0},
               {ESMM_FFN_EXACT, ESMM_ACT_SILU, 1, 4, 128, 0},  {ESMM_FFN_EXACT, ESMM_ACT_RELU, 0, 4, 128, 0},
               {ESMM_FFN_DENSE, ESMM_ACT_RELU, 1, 4, 128, 0},  {ESMM_FFN_SPARSE, ESMM_ACT_RELU, 1, 4, 128, 0},
               {ESMM_FFN_EXACT, ESMM_ACT_RELU, 1, 4, 4100, 0}, {ESMM_FFN_EXACT, ESMM_ACT_RELU, 1, 8, 8192, 1}};
  for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
    const kind k = {cases[i / 2].mode,
                    ESMM_SPARSIFY_TOP_N,
                    cases[i / 2].gated,
                    cases[i / 2].activation,
                    cases[i / 2].tokens,
                    cases[i / 2].d_model,
                    256};
    net n = {0};
    char what[60];
    (void)snprintf(what, sizeof what, "case %zu, %s", i / 2, i % 2 ? "columns" : "rows");
    n.ctx = must_create(&n.m);
    assert_int_equal(make_net(&n, &k), ESMM_OK);
    n.w1.order = n.gate.order = n.w2.order = i % 2 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
    assert_int_equal(esmm_ctx_set_stream(n.ctx, &stream), ESMM_OK);
    assert_int_equal(esmm_ffn_set_weights(n.ctx, n.ffn, &n.weights, NULL), ESMM_OK);
    fake->captured = &stream;
    assert_int_equal(esmm_ffn_forward(n.ctx, n.ffn, &n.x, &n.y, NULL, NULL), ESMM_ERR_UNSUPPORTED);
    fake->captured = NULL;
    for (int pass = 0; pass < 3; pass++)
      if (decodes_of(&n, NULL, NULL) != cases[i / 2].decodes)
        fail_msg("%s: %lld launches", what, (long long)decodes);
    const int64_t allocations = fake->allocations, synchronizations = fake->synchronizations;
    assert_int_equal(esmm_ffn_set_weights(n.ctx, n.ffn, &n.weights, NULL), ESMM_OK);
    assert_int_equal(decodes_of(&n, NULL, NULL), cases[i / 2].decodes);
    fake->captured = &stream;
    assert_int_equal(decodes_of(&n, NULL, NULL), cases[i / 2].decodes);
    fake->captured = NULL;
    assert_int_equal(fake->allocations, allocations);
    assert_int_equal(fake->synchronizations, synchronizations);
    if (cases[i / 2].decodes) { /* fewer tokens beside that graph; a cache and a report want more than y */
      n.x.rows = n.y.rows = 1;
      assert_int_equal(decodes_of(&n, NULL, NULL), 1);
      n.x.rows = n.y.rows = k.tokens;
      esmm_ffn_report report = {.size = sizeof report};
      assert_int_equal(decodes_of(&n, n.cache, NULL), 0);
      assert_int_equal(decodes_of(&n, NULL, &report), 0);
    }
    free_net(&n);
    assert_int_equal(n.m.live, 0);
    check_balance(what);
  }
}

/* As any_call_may_fail, without a cache. */
static void any_call_of_few_tokens_may_fail(void **state)
{
  (void)state;
  enum { OUT_OF_MEMORY = 2 };
  static const kind k = {ESMM_FFN_EXACT, ESMM_SPARSIFY_TOP_N, 1, ESMM_ACT_RELU, 4, 128, 256};
  int64_t at = 1;
  for (bool failed = true; failed; at++) {
    net n = {0};
    char what[60];
    (void)snprintf(what, sizeof what, "few tokens, call %lld", (long long)at);
    n.ctx = must_create(&n.m);
    fake->result = OUT_OF_MEMORY;
    fake->failed = NULL;
    fake->fail_at = at;
    esmm_status status = make_net(&n, &k);
    if (status == ESMM_OK)
      status = esmm_ffn_set_weights(n.ctx, n.ffn, &n.weights, NULL);
    if (status == ESMM_OK)
      status = esmm_ffn_forward(n.ctx, n.ffn, &n.x, &n.y, NULL, NULL);
    fake->fail_at = 0;
    failed = fake->failed != NULL;
    if (!failed && status != ESMM_OK)
      fail_msg("%s: %s without a reason", what, esmm_ctx_error(n.ctx));
    if (failed && n.ffn && n.cache) {
      assert_int_equal(esmm_ffn_set_weights(n.ctx, n.ffn, &n.weights, NULL), ESMM_OK);
      assert_int_equal(decodes_of(&n, NULL, NULL), 1);
    }
    free_net(&n);
    assert_int_equal(n.m.live, 0);
    check_balance(what);
  }
  assert_true(at > 10);
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest none[] = {cmocka_unit_test(no_kernels)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda_layer", none, NULL, NULL);
  const struct CMUnitTest tests[] = {
      TEST(a_second_step_allocates_nothing_and_waits_for_nothing),
      TEST(operands_are_packed_where_they_can_be),
      TEST(dead_features_are_left_out),
      TEST(a_first_step_cannot_be_captured),
      TEST(any_call_may_fail),
      TEST(few_tokens_take_one_launch_behind_the_gate),
      TEST(any_call_of_few_tokens_may_fail),
  };
  return cmocka_run_group_tests_name("cuda_layer", tests, NULL, NULL);
}
