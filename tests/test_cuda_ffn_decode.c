/*
 * test_cuda_ffn_decode.c: few tokens through a gated layer on a GPU, against float64: 1 to 16 tokens, both orders of
 * the weights, both 16-bit dtypes, shapes that no tile fits, gates that let nothing or everything through; twice, since
 * blocks must leave the memory where they meet as they found it. Passes in a graph, which runs with another x.
 */
#include "convert.h"
#include "ffn_rig.h"
#include "gpu.h"

static void decode_is_the_dense_pass(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_model, d_hidden;
    double dead;
  } cases[] = {{1, 64, 96, 0.9},   {2, 136, 200, 0.5},   {3, 264, 500, 0.8}, {8, 520, 333, 0},
               {9, 264, 250, 0.7}, {16, 392, 700, 0.95}, {5, 4104, 60, 0.6}, {16, 4096, 300, 0.5},
               {16, 256, 64, 1},   {7, 1024, 4800, 0.9}, {4, 24, 8, 0},      {12, 304, 3100, 0.7},
               {1, 20, 50, 0.5},   {13, 768, 3072, 0.9}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int kind = 0; kind < 8; kind++) {
      const esmm_dtype dtype = kind & 1 ? ESMM_F16 : ESMM_BF16;
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = cases[c].d_model,
                  .d_hidden = cases[c].d_hidden,
                  .activation = kind & 2 ? ESMM_ACT_RELU2 : ESMM_ACT_RELU,
                  .gated = 1};
      char what[60];
      (void)snprintf(what, sizeof what, "case %zu, kind %d", c, kind);
      oracle_create(&o, c + 3, 1);
      kill_features(&o, cases[c].dead, c);
      for (int64_t e = 0; dtype == ESMM_F16 && e < o.tokens * o.d_model; e++)
        o.p[P_X][e] /= 32; /* h, squared, is not to overflow */
      for (int i = 0; i < P_COUNT; i++)
        for (int64_t e = 0; o.p[i] && e < oracle_rows(&o, i) * oracle_cols(&o, i); e++)
          o.p[i][e] = i >= P_B1 ? (double)(float)o.p[i][e] : th_round(dtype, o.p[i][e]);
      esmm_ffn_opts opts = opts_of(&o);
      opts.dtype = dtype;
      rig r;
      rig_create(&r, &o, &opts, (layout){dtype, kind & 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, 0}, 2);
      oracle_forward(&o);
      esmm_matrix p[P_COUNT] = {{0}}, rows = make_matrix(o.tokens, o.d_model, (layout){dtype, ESMM_ROW_MAJOR, 0});
      for (int i = 0; i < P_COUNT; i++)
        if (r.p[i].data)
          p[i] = to_device(&r.p[i]);
      must(cpu, esmm_matrix_copy(cpu, &r.p[P_X], &rows));
      esmm_matrix x = to_device(&rows), y = to_device(&rows);
      const esmm_ffn_weights weights = {.size = sizeof weights,
                                        .w1 = &p[P_W1],
                                        .gate = &p[P_GATE],
                                        .w2 = &p[P_W2],
                                        .b1 = p[P_B1].data,
                                        .b_gate = p[P_B_GATE].data,
                                        .b2 = p[P_B2].data};
      esmm_ffn *ffn = NULL;
      must(gpu, esmm_ffn_create(gpu, &opts, &ffn));
      for (int i = 0; i < 3; i++) { /* the last with weights that were set again */
        if (i != 1)
          must(gpu, esmm_ffn_set_weights(gpu, ffn, &weights, NULL));
        must(gpu, esmm_ffn_forward(gpu, ffn, &x, &y, NULL, NULL));
        must(gpu, esmm_matrix_copy(gpu, &y, &rows));
        check_matrix(what, "y", &rows, o.y, dtype == ESMM_BF16 ? 4e-2 : 6e-3);
      }
      esmm_ffn_free(ffn);
      for (int i = 0; i < P_COUNT; i++)
        esmm_memory_free(gpu, p[i].data);
      esmm_memory_free(gpu, x.data);
      esmm_memory_free(gpu, y.data);
      free(rows.data);
      rig_free(&r);
      oracle_free(&o);
    }
}

/* A captured pass has the x, and so the features, that are there when the graph runs. In between a pass of another size
   goes through the same memory. */
static void a_captured_pass_takes_another_x(void **state)
{
  (void)state;
  static const struct {
    int64_t tokens, d_model, d_hidden;
  } cases[] = {{1, 264, 500}, {4, 1024, 4800}, {16, 392, 700}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
    for (int columns = 0; columns < 2; columns++) {
      oracle o = {.tokens = cases[c].tokens,
                  .d_model = cases[c].d_model,
                  .d_hidden = cases[c].d_hidden,
                  .activation = ESMM_ACT_RELU,
                  .gated = 1};
      oracle_create(&o, c + 11, 1);
      kill_features(&o, 0.6, c);
      esmm_ffn_opts opts = opts_of(&o);
      opts.dtype = ESMM_BF16;
      rig r;
      rig_create(&r, &o, &opts, (layout){ESMM_BF16, columns ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR, 0}, 2);
      const layout rows = {ESMM_BF16, ESMM_ROW_MAJOR, 0};
      esmm_matrix p[P_COUNT] = {{0}}, first = make_matrix(o.tokens, o.d_model, rows);
      esmm_matrix other = make_matrix(o.tokens, o.d_model, rows), want = make_matrix(o.tokens, o.d_model, rows);
      esmm_matrix got = make_matrix(o.tokens, o.d_model, rows);
      const size_t bytes = (size_t)(o.tokens * o.d_model) * sizeof(uint16_t);
      for (int i = 0; i < P_COUNT; i++)
        if (r.p[i].data)
          p[i] = to_device(&r.p[i]);
      must(cpu, esmm_matrix_copy(cpu, &r.p[P_X], &first));
      for (int64_t i = 0; i < o.tokens * o.d_model; i++) /* turned round: other features are alive */
        ((uint16_t *)other.data)[i] = ((const uint16_t *)first.data)[o.tokens * o.d_model - 1 - i] ^ 0x8000u;
      void *graph = NULL, *exec = NULL, *stream = new_stream();
      esmm_matrix x = to_device(&other), y = to_device(&got);
      const esmm_ffn_weights weights = {.size = sizeof weights,
                                        .w1 = &p[P_W1],
                                        .gate = &p[P_GATE],
                                        .w2 = &p[P_W2],
                                        .b1 = p[P_B1].data,
                                        .b_gate = p[P_B_GATE].data,
                                        .b2 = p[P_B2].data};
      esmm_ffn *ffn = NULL;
      must(gpu, esmm_ctx_set_stream(gpu, stream));
      must(gpu, esmm_ffn_create(gpu, &opts, &ffn));
      must(gpu, esmm_ffn_set_weights(gpu, ffn, &weights, NULL));
      must(gpu, esmm_ffn_forward(gpu, ffn, &x, &y, NULL, NULL));
      must(gpu, esmm_matrix_copy(gpu, &y, &want));
      must(gpu, esmm_matrix_copy(gpu, &first, &x));
      must(gpu, esmm_ffn_forward(gpu, ffn, &x, &y, NULL, NULL));
      must(gpu, esmm_matrix_copy(gpu, &y, &got));
      assert_true(memcmp(got.data, want.data, bytes) != 0);
      double *expected = malloc((size_t)(o.tokens * o.d_model) * sizeof *expected);
      assert_non_null(expected);
      for (int64_t i = 0; i < o.tokens * o.d_model; i++)
        expected[i] = (double)esmm_from_bf16(((const uint16_t *)want.data)[i]);
      assert_int_equal(calls.begin_capture(stream, 0), 0);
      must(gpu, esmm_ffn_forward(gpu, ffn, &x, &y, NULL, NULL));
      assert_int_equal(calls.end_capture(stream, &graph), 0);
      assert_int_equal(calls.instantiate(&exec, graph, 0), 0);
      esmm_matrix one = x, y_one = y;
      one.rows = y_one.rows = 1;
      for (int i = 0; i < 2; i++) {
        must(gpu, esmm_ffn_forward(gpu, ffn, &one, &y_one, NULL, NULL));
        must(gpu, esmm_matrix_copy(gpu, &other, &x));
        must(gpu, esmm_ctx_synchronize(gpu));
        assert_int_equal(calls.launch(exec, stream), 0);
        assert_int_equal(calls.stream_synchronize(stream), 0);
        must(gpu, esmm_matrix_copy(gpu, &y, &got));
        check_matrix("captured", "y", &got, expected, 2e-2);
      }
      (void)calls.exec_destroy(exec);
      (void)calls.graph_destroy(graph);
      esmm_ffn_free(ffn);
      must(gpu, esmm_ctx_set_stream(gpu, NULL));
      assert_int_equal(calls.stream_destroy(stream), 0);
      for (int i = 0; i < P_COUNT; i++)
        esmm_memory_free(gpu, p[i].data);
      esmm_memory_free(gpu, x.data);
      esmm_memory_free(gpu, y.data);
      free(first.data);
      free(other.data);
      free(want.data);
      free(got.data);
      free(expected);
      rig_free(&r);
      oracle_free(&o);
    }
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda_ffn_decode", &status))
    return status;
  const struct CMUnitTest tests[] = {cmocka_unit_test(decode_is_the_dense_pass),
                                     cmocka_unit_test(a_captured_pass_takes_another_x)};
  status = cmocka_run_group_tests_name("cuda_ffn_decode", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
