/*
 * test_cuda_ffn_decode.c: few tokens through a gated layer on a GPU, against float64: 1 to 16 tokens, both orders of
 * the weights, both 16-bit dtypes, shapes that no tile fits, gates that let nothing or everything through; twice, since
 * blocks must leave the memory where they meet as they found it.
 */
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

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda_ffn_decode", &status))
    return status;
  const struct CMUnitTest tests[] = {cmocka_unit_test(decode_is_the_dense_pass)};
  status = cmocka_run_group_tests_name("cuda_ffn_decode", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
