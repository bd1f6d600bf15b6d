/*
 * test_cuda_blocks.c: blocks on a GPU: pruning to them keeps what a CPU keeps, arrays of blocks in device memory give
 * the weights that the same arrays in host memory give, or are refused in the same words, and columns of any length
 * are multiplied once each.
 */
#include "bsr_arrays.h"
#include "gpu16.h"

#include <math.h>

/* ---- pruning ---- */

/* Ties, zeros of either sign, a few Inf and NaN; whole areas of zeros. */
static void fill_to_prune(esmm_matrix *b, uint64_t seed)
{
  th_rng rng = {seed};
  for (int64_t k = 0; k < b->rows; k++)
    for (int64_t j = 0; j < b->cols; j++) {
      const int64_t kind = th_below(&rng, 4000);
      const double x = kind < 2000 ? (double)(th_below(&rng, 7) - 3) : 2 * th_unit(&rng) - 1;
      const bool dead = (k / 16 + j / 16) % 3 == 0;
      th_set(b, k, j, dead ? -0.0 : kind == 0 ? (double)INFINITY : kind == 1 ? (double)NAN : x);
    }
}

static esmm_matrix matrix_of(int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order, int64_t padding)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = dtype, .order = order};
  m.ld = (order == ESMM_ROW_MAJOR ? cols : rows) + padding;
  m.data = calloc(th_matrix_bytes(&m) + 64, 1);
  assert_non_null(m.data);
  return m;
}

/* The same matrix, of which only elements count, in device memory. */
static esmm_matrix copied(const esmm_matrix *host)
{
  esmm_matrix m = to_device(host);
  expect_ok(gpu, esmm_ctx_synchronize(gpu));
  return m;
}

static void expect_same(const char *what, int i, const esmm_matrix *device, const esmm_matrix *host)
{
  esmm_matrix back = *host;
  back.data = malloc(th_matrix_bytes(host) + 64);
  assert_non_null(back.data);
  expect_ok(gpu, esmm_matrix_copy(gpu, device, &back));
  const size_t size = th_element_bytes(host->dtype);
  for (int64_t r = 0; r < host->rows; r++)
    for (int64_t c = 0; c < host->cols; c++) {
      const size_t at = (size_t)th_index(host, r, c) * size;
      if (memcmp((const char *)back.data + at, (const char *)host->data + at, size) != 0)
        fail_msg("%s, case %d: [%d,%d] is %g, not %g", what, i, (int)r, (int)c, th_get(&back, r, c),
                 th_get(host, r, c));
    }
  free(back.data);
}

/* The same blocks as a CPU's, bit for bit: cut ones at the edges, ties, with norms and without. */
static void pruned_as_on_a_cpu(void **state)
{
  (void)state;
  static const int blocks[][2] = {{4, 4},    {16, 16},   {32, 32},   {1, 33}, {64, 8},
                                  {40, 100}, {128, 128}, {256, 256}, {2, 2}};
  static const double densities[] = {0.0, 0.3, 0.5, 1.0};
  for (int f = 0; f < COUNT(blocks); f++)
    for (int i = 0; i < 12; i++) {
      esmm_matrix b = matrix_of(257 + 8 * (i % 3), 193 + 31 * (i % 2), (esmm_dtype)(i % 3),
                                i % 4 < 3 ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR, i % 5);
      float norms[300];
      fill_to_prune(&b, (uint64_t)(f * 100 + i));
      for (int k = 0; k < 300; k++)
        norms[k] = k % 15 == 0 ? -0.0f : (float)(k % 5) * 0.37f + (float)(k % 3);
      esmm_matrix db = copied(&b);
      const esmm_prune_opts opts = {
          .size = sizeof opts,
          .format = {.kind = ESMM_FORMAT_BSR, .block_rows = blocks[f][0], .block_cols = blocks[f][1]},
          .density = densities[i % 4],
          .input_norms = i / 3 % 2 ? norms : NULL};
      esmm_prune_report reports[2] = {{.size = sizeof *reports}, {.size = sizeof *reports}};
      expect_ok(cpu, esmm_prune(cpu, &b, &opts, &reports[0]));
      expect_ok(gpu, esmm_prune(gpu, &db, &opts, &reports[1]));
      expect_same("pruned", 100 * f + i, &db, &b);
      assert_int_equal(reports[0].kept, reports[1].kept);
      assert_int_equal(reports[0].dropped, reports[1].dropped);
      for (int which = 0; which < 2; which++) {
        const double x = which ? reports[0].norm_dropped : reports[0].norm,
                     y = which ? reports[1].norm_dropped : reports[1].norm;
        assert_true(isnan(x) ? isnan(y) : x == y || fabs(x - y) <= 1e-12 * x);
      }
      esmm_memory_free(gpu, db.data);
      free(b.data);
    }
}

/* ---- arrays in device memory ---- */

/* The same arrays there; `at` keeps what is to be freed. Pointers may have been moved, or be NULL. */
static esmm_bsr arrays_there(const arrays *a, void *at[3])
{
  const void *host[3] = {a->pointers, a->indices, a->values},
             *given[3] = {a->b.row_pointers, a->b.column_indices, a->b.values};
  esmm_bsr b = a->b;
  const void *moved[3];
  for (int i = 0; i < 3; i++) {
    expect_ok(gpu, esmm_memory_alloc(gpu, a->bytes[i], &at[i]));
    assert_int_equal(calls.to_device((uintptr_t)at[i], host[i], a->bytes[i]), 0);
    moved[i] = given[i] ? (const char *)at[i] + ((const char *)given[i] - (const char *)host[i]) : NULL;
  }
  if (b.place == ESMM_HOST) /* else it is the damage */
    b.place = ESMM_DEVICE;
  b.row_pointers = moved[0];
  b.column_indices = moved[1];
  b.values = moved[2];
  return b;
}

static void free_there(void *at[3])
{
  for (int i = 0; i < 3; i++)
    esmm_memory_free(gpu, at[i]);
}

/* Into every format that a GPU prepares, from blocks of any size and order. */
static void weights_from_device_arrays(void **state)
{
  (void)state;
  static const int blocks[][2] = {{32, 32}, {1, 1}, {16, 8}, {128, 128}, {3, 50}};
  for (int f = 0; f < COUNT(blocks); f++)
    for (int i = 0; i < 8; i++) {
      const esmm_dtype dtype = i == 7 ? ESMM_F32 : DTYPES[i % 2];
      const int rows = blocks[f][0], cols = blocks[f][1], bits = i / 2 % 2 ? 64 : 32;
      esmm_matrix b = th_matrix_alloc(150 + 42 * (i % 2), 136 + i % 3, dtype);
      th_fill(&b, (uint64_t)(f * 10 + i), 0.4, true);
      for (int64_t r = 0; r < b.rows; r++) /* some blocks are dead */
        for (int64_t c = 0; c < b.cols; c++)
          if ((r / rows + c / cols) % 3 == 0)
            th_set(&b, r, c, 0.0);
      arrays a = make_arrays(&b, rows, cols, bits, (esmm_order)(i / 4), i % 3 == 0);
      void *at[3];
      const esmm_bsr there = arrays_there(&a, at);
      for (int kind = 0; kind < 2; kind++) {
        esmm_prepare_opts opts = {.size = sizeof opts, .unchecked = i % 2};
        opts.format.kind = kind == 1 && dtype != ESMM_F32 ? ESMM_FORMAT_BSR : ESMM_FORMAT_DENSE;
        esmm_weights *w = NULL;
        expect_ok(gpu, esmm_prepare_bsr(gpu, &there, &opts, &w));
        esmm_matrix out = host_matrix(b.rows, b.cols, dtype);
        expect_ok(gpu, esmm_weights_to_dense(gpu, w, &out));
        for (int64_t r = 0; r < b.rows; r++)
          for (int64_t c = 0; c < b.cols; c++)
            if (th_get(&out, r, c) != th_get(&b, r, c))
              fail_msg("%d x %d, case %d: [%d,%d] is %g, not %g", rows, cols, i, (int)r, (int)c, th_get(&out, r, c),
                       th_get(&b, r, c));
        free(out.data);
        esmm_weights_free(w);
      }
      free_there(at);
      free_arrays(&a);
      free(b.data);
    }
}

/* As 40 x 24 in blocks of 16 x 8, which are three block rows of three: refused as from host memory, in the same words;
   without the check nothing is read or written out of bounds. */
static void expect_damage(const char *what, void (*change)(arrays *a), esmm_status status)
{
  esmm_matrix b = th_matrix_alloc(40, 24, ESMM_BF16);
  th_fill(&b, 3, 1.0, true);
  for (int order = 0; order < 2; order++) {
    arrays a = make_arrays(&b, 16, 8, index_bits, (esmm_order)order, true);
    change(&a);
    void *at[3];
    const esmm_bsr there = arrays_there(&a, at);
    esmm_weights *w = NULL;
    assert_int_equal(esmm_prepare_bsr(gpu, &a.b, NULL, &w), status);
    char text[256];
    (void)snprintf(text, sizeof text, "%s", esmm_ctx_error(gpu));
    if (esmm_prepare_bsr(gpu, &there, NULL, &w) != status)
      fail_msg("%s: %s", what, esmm_ctx_error(gpu));
    assert_null(w);
    if (!strstr(text, "aligned")) /* which names addresses */
      assert_string_equal(esmm_ctx_error(gpu), text);
    const esmm_prepare_opts opts = {.size = sizeof opts, .unchecked = 1};
    const esmm_status without = esmm_prepare_bsr(gpu, &there, &opts, &w);
    if (without != ESMM_OK && without != status)
      fail_msg("%s, unchecked: %s", what, esmm_ctx_error(gpu));
    expect_ok(gpu, esmm_ctx_synchronize(gpu)); /* no kernel came to grief */
    esmm_weights_free(w);
    free_there(at);
    free_arrays(&a);
  }
  free(b.data);
}

static void damaged_device_arrays_are_refused(void **state)
{
  (void)state;
  for (index_bits = 32; index_bits <= 64; index_bits += 32) {
#define X(name, status, word1, word2, change) expect_damage(#name, damage_##name, status);
    DAMAGES(X)
#undef X
  }
}

/* ---- columns that differ much in length ---- */

/* Sums of few and small whole numbers, so they are exact. Every eighth column of blocks is empty, and every eighth one
   full. */
static void fill_uneven(esmm_matrix *a, esmm_matrix *b, int side)
{
  th_rng rng = {(uint64_t)side};
  for (int64_t r = 0; r < a->rows; r++)
    for (int64_t k = 0; k < a->cols; k++)
      th_set(a, r, k, (double)(th_below(&rng, 3) - 1));
  for (int64_t k0 = 0; k0 < b->rows; k0 += side)
    for (int64_t c0 = 0; c0 < b->cols; c0 += side) {
      const int64_t kind = c0 / side % 8;
      const bool kept = kind == 7 || (kind > 0 && th_below(&rng, 6) == 0);
      for (int64_t k = k0; k < k0 + side; k++)
        for (int64_t c = c0; c < c0 + side; c++)
          th_set(b, k, c, kept ? (double)(th_below(&rng, 3) - 1) : 0.0);
    }
}

/* C, which is not what it was before, in host memory. */
static void multiply_there(const esmm_matrix *a, const esmm_weights *w, const char *force, esmm_matrix *c)
{
  const esmm_matmul_opts opts = {.size = sizeof opts, .force = force};
  memset(c->data, 0xff, th_matrix_bytes(c));
  esmm_matrix there = copied(c);
  expect_ok(gpu, esmm_matmul(gpu, a, w, &there, &opts, NULL));
  expect_ok(gpu, esmm_matrix_copy(gpu, &there, c));
  esmm_memory_free(gpu, there.data);
}

/* Enough tiles for ten and more of each block, or pair of blocks, and the same again: what they are given out by is
   left ready for the next product. */
static void uneven_columns(void **state)
{
  (void)state;
  enum { M = 8700, N = 5120, K = 256 };
  static const int sides[] = {128, 64, 32}; /* the first in pairs, the second alone, the third as narrow ones */
  for (int i = 0; i < 2 * COUNT(sides); i++) {
    const esmm_dtype dtype = DTYPES[i % 2];
    const int side = sides[i / 2];
    const kernels all = kernels_of_format(dtype, ESMM_FORMAT_BSR);
    esmm_matrix a = matrix_of(M, K, dtype, ESMM_ROW_MAJOR, 0), b = matrix_of(K, N, dtype, ESMM_ROW_MAJOR, 0),
                c = matrix_of(M, N, dtype, ESMM_ROW_MAJOR, 0), want = matrix_of(M, N, dtype, ESMM_ROW_MAJOR, 0);
    fill_uneven(&a, &b, side);
    esmm_prepare_opts opts = {.size = sizeof opts};
    esmm_weights *dense = NULL, *blocks = NULL;
    expect_ok(gpu, esmm_prepare(gpu, &b, &opts, &dense));
    opts.format = (esmm_format){.kind = ESMM_FORMAT_BSR, .block_rows = side, .block_cols = side};
    expect_ok(gpu, esmm_prepare(gpu, &b, &opts, &blocks));
    esmm_matrix da = copied(&a);
    multiply_there(&da, dense, NULL, &want);
    for (int j = 0; j < all.count; j++) {
      const bool runs = !is_decode(all.name[j]) && !(side % 64 == 0 && strstr(all.name[j], "narrow"));
      for (int run = 0; run < 2 && runs; run++) {
        multiply_there(&da, blocks, all.force[j], &c);
        if (memcmp(c.data, want.data, th_matrix_bytes(&c)) != 0)
          for (int64_t at = 0; at < (int64_t)M * N; at++)
            if (!(th_get(&c, at / N, at % N) == th_get(&want, at / N, at % N)))
              fail_msg("%s, blocks of %d, run %d: C[%d,%d] is %g, not %g", all.name[j], side, run, (int)(at / N),
                       (int)(at % N), th_get(&c, at / N, at % N), th_get(&want, at / N, at % N));
      }
    }
    esmm_memory_free(gpu, da.data);
    esmm_weights_free(dense);
    esmm_weights_free(blocks);
    free(a.data);
    free(b.data);
    free(c.data);
    free(want.data);
  }
}

int main(void)
{
  int status = 0;
  if (!use_gpu("cuda blocks", &status))
    return status;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(pruned_as_on_a_cpu),
      cmocka_unit_test(weights_from_device_arrays),
      cmocka_unit_test(damaged_device_arrays_are_refused),
      cmocka_unit_test(uneven_columns),
  };
  status = cmocka_run_group_tests_name("cuda blocks", tests, open_gpu, close_gpu);
  esmm_ctx_free(gpu);
  return status;
}
