/*
 * test_cuda_streams.c: where a GPU context's work goes, in which order, and what a stream that is being captured into a
 * graph refuses; on the driver of fake_cuda.c. No GPU is needed, and no result is looked at: kernels do nothing there.
 */
#include "fake_gpu.h"

static void streams_wait_for_each_other(void **state)
{
  (void)state;
  static char first, second;
  bench b;
  bench_start(&b);
  assert_int_equal(bench_run(&b, 40, &first), ESMM_OK);
  int64_t waits = fake->waits;
  const int64_t records = fake->records;
  assert_int_equal(bench_run(&b, 40, &first), ESMM_OK);
  assert_int_equal(fake->waits, waits);
  assert_true(fake->records > records);
  assert_int_equal(bench_run(&b, 40, &second), ESMM_OK);
  assert_int_equal(fake->waits, ++waits);
  assert_int_equal(bench_run(&b, 40, &second), ESMM_OK);
  assert_int_equal(fake->waits, waits);
  assert_int_equal(bench_run(&b, 40, NULL), ESMM_OK);
  assert_int_equal(fake->waits, ++waits);
  bench_stop(&b, "streams");
}

/* Not products alone: while the context's stream is captured, all that has to wait for the GPU is refused. */
static void all_work_goes_to_the_stream(void **state)
{
  (void)state;
  static char stream;
  bench b;
  bench_start(&b);
  assert_int_equal(bench_run(&b, 8, NULL), ESMM_OK);
  int64_t waits = fake->waits;
  esmm_matrix other;
  assert_int_equal(place(b.ctx, &b.d.a, &other), ESMM_OK);
  assert_int_equal(esmm_ctx_set_stream(b.ctx, &stream), ESMM_OK);
  assert_int_equal(fake->waits, waits); /* setting it does nothing yet */
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.a, &other), ESMM_OK);
  assert_int_equal(fake->waits, ++waits);
  assert_int_equal(bench_run(&b, 8, NULL), ESMM_OK);
  assert_int_equal(fake->waits, ++waits);

  esmm_pattern *pattern = NULL;
  const esmm_prune_opts prune = {.size = sizeof prune, .format.kind = ESMM_FORMAT_NM},
                        top = {.size = sizeof top, .top = 3, .soft = 1};
  const esmm_generator generator = {.size = sizeof generator};
  fake->captured = &stream;
  for (int captured = 0; captured < 2; captured++) {
    assert_int_equal(esmm_ctx_set_stream(b.ctx, captured ? &stream : NULL), ESMM_OK);
    const esmm_status want = captured ? ESMM_ERR_UNSUPPORTED : ESMM_OK;
    assert_int_equal(esmm_matrix_copy(b.ctx, &b.d.a, &b.a), want);
    assert_int_equal(esmm_matrix_copy(b.ctx, &b.a, &b.d.a), want);
    assert_int_equal(esmm_pattern_extract(b.ctx, &b.a, 32, &pattern), want);
    esmm_pattern_free(pattern);
    assert_int_equal(esmm_pattern_extract(b.ctx, &b.a, 8, &pattern), want);
    esmm_pattern_free(pattern);
    assert_int_equal(esmm_prune(b.ctx, &b.a, &prune, NULL), want);
    assert_int_equal(esmm_prune(b.ctx, &b.a, &top, NULL), want);
    assert_int_equal(esmm_generate(b.ctx, &generator, &b.a), want);
    assert_int_equal(esmm_weights_to_dense(b.ctx, b.w, &b.d.b), want);
  }
  fake->captured = NULL;
  assert_int_equal(esmm_ctx_set_stream(b.ctx, NULL), ESMM_OK);
  assert_null(esmm_ctx_stream(b.ctx));
  esmm_memory_free(b.ctx, other.data);
  bench_stop(&b, "all work");
}

static void capture(void **state)
{
  (void)state;
  static char stream;
  bench b;
  bench_start(&b);
  fake->captured = &stream;
  assert_int_equal(bench_run(&b, 8, &stream), ESMM_ERR_UNSUPPORTED); /* no scratch yet */
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "outside the capture"));
  fake->captured = NULL;
  assert_int_equal(bench_run(&b, 8, &stream), ESMM_OK);

  fake->captured = &stream;
  const int64_t records = fake->records, waits = fake->waits, launches = fake->launches;
  assert_int_equal(bench_run(&b, 8, &stream), ESMM_OK);
  assert_true(fake->launches > launches);
  assert_int_equal(fake->records, records); /* events of a graph order nothing outside it */
  assert_int_equal(fake->waits, waits);
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.d.a, b.w, &b.d.c, NULL), ESMM_ERR_UNSUPPORTED); /* host memory */
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "captured"));
  fake->captured = NULL;

  /* The graph knows the old scratch: what replaces it must not free it. */
  esmm_matrix b_large = th_matrix_alloc(96, 720, ESMM_F32), a_large = th_matrix_alloc(400, 96, ESMM_F32),
              c_large = th_matrix_alloc(400, 720, ESMM_F32);
  th_fill(&b_large, 3, 0.5, true);
  th_fill(&a_large, 4, 0.5, true);
  esmm_weights *w = NULL;
  assert_int_equal(esmm_prepare(b.ctx, &b_large, NULL, &w), ESMM_OK);
  const int64_t blocks = fake->blocks, allocations = fake->allocations;
  assert_int_equal(esmm_matmul(b.ctx, &a_large, w, &c_large, NULL, NULL), ESMM_OK);
  assert_true(fake->allocations > allocations);
  assert_int_equal(fake->blocks - blocks, fake->allocations - allocations); /* nothing was freed */
  esmm_weights_free(w);
  free(b_large.data);
  free(a_large.data);
  free(c_large.data);
  bench_stop(&b, "capture");
}

/* Refused before anything is captured: what a graph cannot hold, and what would end the capture. */
static void refused_while_captured(void **state)
{
  (void)state;
  static char stream;
  bench b;
  esmm_weights *w = NULL;
  esmm_timer *timer = NULL;
  esmm_matrix there;
  bench_start(&b);
  assert_int_equal(bench_run(&b, 8, &stream), ESMM_OK);
  assert_int_equal(esmm_timer_create(b.ctx, &timer), ESMM_OK);
  assert_int_equal(place(b.ctx, &b.d.b, &there), ESMM_OK);
  const int64_t launches = fake->launches, allocations = fake->allocations, records = fake->records;
  fake->captured = &stream;
  assert_int_equal(esmm_ctx_set_stream(b.ctx, &stream), ESMM_OK);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(esmm_prepare(b.ctx, i ? &there : &b.d.b, NULL, &w), ESMM_ERR_UNSUPPORTED);
    assert_null(w);
    assert_non_null(strstr(esmm_ctx_error(b.ctx), "captured"));
    assert_non_null(strstr(esmm_ctx_error(b.ctx), "weights"));
  }
  assert_int_equal(esmm_timer_start(timer), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "timer"));
  esmm_stats stats = {.size = sizeof stats};
  assert_int_equal(esmm_matmul(b.ctx, &b.a, b.w, &b.c, NULL, &stats), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "stats"));
  assert_int_equal(esmm_ctx_set_stream(b.ctx, NULL), ESMM_OK);
  fake->blocking = 1; /* and what the default stream does, where that would have to wait for the captured one */
  assert_int_equal(esmm_matrix_copy(b.ctx, &b.d.a, &b.a), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "default stream"));
  assert_int_equal(esmm_timer_start(timer), ESMM_ERR_UNSUPPORTED);
  assert_int_equal(fake->launches, launches);
  assert_int_equal(fake->allocations, allocations);
  assert_int_equal(fake->records, records);
  fake->captured = NULL;
  esmm_timer_free(timer);
  esmm_memory_free(b.ctx, there.data);
  bench_stop(&b, "refused while captured");
}

/* A graph may hold the whole epilogue, but for new memory and what lies in the host's. */
static void epilogue_while_captured(void **state)
{
  (void)state;
  static char stream;
  bench b;
  void *counts = NULL;
  esmm_pattern *pattern = NULL, *before = NULL;
  uint64_t bits[2];
  bench_start(&b);
  assert_int_equal(esmm_memory_alloc(b.ctx, 72 * sizeof(int32_t), &counts), ESMM_OK);
  esmm_matmul_opts opts = {.size = sizeof opts,
                           .activation = ESMM_ACT_SILU,
                           .residual = &b.c,
                           .gate = b.w,
                           .column_nonzeros = counts,
                           .c_pattern = &before};
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_OK);
  opts.c_pattern = NULL;
  fake->captured = &stream;
  const int64_t launches = fake->launches, allocations = fake->allocations;
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_OK);
  assert_true(fake->launches >= launches + 4); /* counts to 0, two products, a pass over C */
  assert_int_equal(fake->allocations, allocations);
  const int64_t captured = fake->launches;
  opts.c_pattern = &pattern;
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "opts->c_pattern"));
  assert_null(pattern);
  opts.c_pattern = NULL;
  opts.residual = &b.d.c;
  assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_ERR_UNSUPPORTED);
  assert_non_null(strstr(esmm_ctx_error(b.ctx), "opts->residual"));
  assert_int_equal(esmm_ctx_set_stream(b.ctx, &stream), ESMM_OK);
  assert_int_equal(esmm_pattern_bits(b.ctx, before, 0, 1, bits), ESMM_ERR_UNSUPPORTED);
  assert_int_equal(esmm_ctx_set_stream(b.ctx, NULL), ESMM_OK);
  assert_int_equal(fake->launches, captured);
  fake->captured = NULL;
  assert_int_equal(esmm_pattern_bits(b.ctx, before, 0, 1, bits), ESMM_OK);
  esmm_pattern_free(before);
  esmm_memory_free(b.ctx, counts);
  bench_stop(&b, "an epilogue in a graph");
}

/* A graph's work is in no event of the library: what frees memory waits for the whole device. */
static void freeing_waits_for_graphs(void **state)
{
  (void)state;
  static char stream;
  for (int grown = 0; grown < 2; grown++) {
    bench b;
    bench_start(&b);
    /* This kernel has no memory of its own with the context: only scratch is freed with it. */
    const esmm_matmul_opts opts = {.size = sizeof opts, .force = "dense_f32_mma"};
    assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_OK);
    fake->captured = &stream;
    assert_int_equal(th_matmul_on(b.ctx, &stream, &b.a, b.w, &b.c, &opts), ESMM_OK);
    fake->captured = NULL;
    if (grown) /* what the graph knows is not the scratch of now */
      assert_int_equal(esmm_matmul(b.ctx, &b.d.a, b.w, &b.d.c, &opts, NULL), ESMM_OK);
    fake->running = 1;
    esmm_memory_free(b.ctx, b.a.data);
    fake->running = 1;
    esmm_memory_free(b.ctx, b.c.data);
    b.a.data = b.c.data = NULL;
    fake->running = 1;
    esmm_weights_free(b.w);
    b.w = NULL;
    fake->running = 1;
    bench_stop(&b, "freeing while a graph runs");
  }
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {
      TEST(streams_wait_for_each_other), TEST(all_work_goes_to_the_stream), TEST(capture),
      TEST(refused_while_captured),      TEST(epilogue_while_captured),     TEST(freeing_waits_for_graphs)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("streams, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("streams", with, NULL, NULL);
}
