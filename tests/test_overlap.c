/*
 * test_overlap.c: what may share memory and what may not. C is written while A and the bias are still read, so they
 * must not meet in an element; slices side by side in one buffer do not, though they lie within each other's extent.
 */
#include "harness.h"

#include <stdlib.h>
#include <string.h>

enum { M = 6, N = 10, K = 8 };

typedef struct fixture {
  esmm_ctx *ctx;
  esmm_matrix a, b;
  esmm_weights *w;
} fixture;

static int set_up(void **state)
{
  fixture *f = calloc(1, sizeof *f);
  assert_non_null(f);
  f->ctx = th_ctx(2);
  f->a = th_matrix_alloc(M, K, ESMM_F32);
  f->b = th_matrix_alloc(K, N, ESMM_F32);
  th_fill(&f->a, 1, 0.5, true);
  th_fill(&f->b, 2, 0.8, true);
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
  esmm_ctx_free(f->ctx);
  free(f);
  return 0;
}

/* It is ESMM_ERR_OVERLAP, and the text names both. */
static void expect_overlap(const fixture *f, esmm_status got, const char *one, const char *other)
{
  const char *text = esmm_ctx_error(f->ctx);
  if (got != ESMM_ERR_OVERLAP)
    fail_msg("%s and %s: %s; text: %s", one, other, esmm_status_str(got), text);
  if (!strstr(text, one) || !strstr(text, other))
    fail_msg("the text '%s' does not say '%s' and '%s'", text, one, other);
}

static void c_and_a(void **state)
{
  fixture *f = *state;
  float *shared = calloc(200, sizeof *shared);
  assert_non_null(shared);
  esmm_matrix a = {.data = shared, .rows = M, .cols = K}, c = {.data = shared, .rows = M, .cols = N};
  expect_overlap(f, esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), "c", "a");
  c.data = shared + M * K - 1; /* the last element of A */
  expect_overlap(f, esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), "c", "a");
  c.data = shared + M * K; /* next to each other is fine */
  assert_int_equal(esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), ESMM_OK);
  c.data = shared;
  a.data = shared + M * N;
  assert_int_equal(esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), ESMM_OK);
  free(shared);
}

static void bias_in_c(void **state)
{
  fixture *f = *state;
  static const int64_t inside[] = {0, 3, M * N - 1, -N + 1}; /* elements from C's first; the last ends in it */
  float *buffer = calloc(M * N + 2 * N, sizeof *buffer);
  assert_non_null(buffer);
  esmm_matrix c = {.data = buffer + N, .rows = M, .cols = N};
  for (int i = 0; i < 4; i++) {
    esmm_matmul_opts o = {.size = sizeof o, .bias = buffer + N + inside[i]};
    expect_overlap(f, esmm_matmul(f->ctx, &f->a, f->w, &c, &o, NULL), "bias", "c");
    for (int64_t at = 0; at < M * N; at++)
      assert_true(buffer[N + at] == 0);
  }
  for (int64_t at = 0; at < 2; at++) { /* right before and right behind C */
    esmm_matmul_opts o = {.size = sizeof o, .bias = at ? buffer + N + M * N : buffer};
    assert_int_equal(esmm_matmul(f->ctx, &f->a, f->w, &c, &o, NULL), ESMM_OK);
  }
  free(buffer);
}

/*
 * A and C as slices of one buffer: lines of A (rows, or columns where they are the contiguous ones) begin at `a_at` of
 * each line of the buffer, those of C at `c_at`.
 */
static void check_slices(fixture *f, esmm_order order, int64_t ld, int64_t a_at, int64_t c_at, esmm_status want)
{
  const int64_t lines = 16; /* more than A or C has */
  float *shared = calloc((size_t)(lines * ld), sizeof *shared), *before = calloc((size_t)(lines * ld), sizeof *before);
  assert_true(shared && before);
  esmm_matrix a = {.data = shared + a_at, .rows = M, .cols = K, .ld = ld, .order = order};
  esmm_matrix c = {.data = shared + c_at, .rows = M, .cols = N, .ld = ld, .order = order};
  for (int64_t i = 0; i < lines * ld; i++)
    shared[i] = (float)(i % 7 - 3);
  memcpy(before, shared, (size_t)(lines * ld) * sizeof *shared);
  const esmm_status got = esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL);
  if (got != want)
    fail_msg("order %d, ld %d, A at %d, C at %d: %s, expected %s", (int)order, (int)ld, (int)a_at, (int)c_at,
             esmm_status_str(got), esmm_status_str(want));
  if (want == ESMM_OK)
    for (int64_t i = 0; i < M; i++)
      for (int64_t j = 0; j < N; j++) {
        double sum = 0;
        for (int64_t k = 0; k < K; k++)
          sum += (double)before[a_at + th_index(&a, i, k)] * th_get(&f->b, k, j);
        if (th_get(&c, i, j) != sum)
          fail_msg("order %d, ld %d, A at %d, C at %d: C[%d,%d] is %g, not %g", (int)order, (int)ld, (int)a_at,
                   (int)c_at, (int)i, (int)j, th_get(&c, i, j), sum);
        before[c_at + th_index(&c, i, j)] = shared[c_at + th_index(&c, i, j)];
      }
  assert_memory_equal(before, shared, (size_t)(lines * ld) * sizeof *shared); /* nothing but C was written */
  free(shared);
  free(before);
}

static void slices_of_one_buffer(void **state)
{
  fixture *f = *state;
  enum { LD = K + N + 5 };
  check_slices(f, ESMM_ROW_MAJOR, LD, 0, K, ESMM_OK);
  check_slices(f, ESMM_ROW_MAJOR, LD, N, 0, ESMM_OK);
  check_slices(f, ESMM_ROW_MAJOR, K + N, 0, K, ESMM_OK); /* each ends where the other begins */
  check_slices(f, ESMM_ROW_MAJOR, K + N, N, 0, ESMM_OK);
  check_slices(f, ESMM_ROW_MAJOR, LD, LD + 2, 2 + K, ESMM_OK); /* A a line further down */
  check_slices(f, ESMM_COL_MAJOR, 2 * M, 0, M, ESMM_OK);
  check_slices(f, ESMM_COL_MAJOR, 2 * M + 3, M + 2, 0, ESMM_OK);

  check_slices(f, ESMM_ROW_MAJOR, LD, 0, K - 1, ESMM_ERR_OVERLAP); /* one column in common */
  check_slices(f, ESMM_ROW_MAJOR, LD, N - 1, 0, ESMM_ERR_OVERLAP);
  check_slices(f, ESMM_ROW_MAJOR, K + N, 0, K + 1, ESMM_ERR_OVERLAP); /* C ends in A's next row */
  check_slices(f, ESMM_ROW_MAJOR, K + N, N + 1, 0, ESMM_ERR_OVERLAP);
  check_slices(f, ESMM_ROW_MAJOR, K + N, 0, 2 * (K + N) + K + 1, ESMM_ERR_OVERLAP);
  check_slices(f, ESMM_COL_MAJOR, 2 * M, 0, M - 1, ESMM_ERR_OVERLAP);
  check_slices(f, ESMM_COL_MAJOR, 2 * M, 0, M + 1, ESMM_ERR_OVERLAP);

  /* Equal leading dimensions in elements of different sizes are no slices: C's first row has some of A's second. */
  _Alignas(64) unsigned char bytes[M * 32 * 4] = {0};
  esmm_matrix a = {.data = bytes, .rows = M, .cols = K, .ld = 32, .dtype = ESMM_F16};
  esmm_matrix c = {.data = bytes + 32, .rows = M - 1, .cols = N, .ld = 32};
  a.rows = M - 1;
  expect_overlap(f, esmm_matmul(f->ctx, &a, f->w, &c, NULL, NULL), "c", "a");
}

static void copies_do_not_overlap(void **state)
{
  fixture *f = *state;
  float buffer[4 * 9];
  for (int i = 0; i < 36; i++)
    buffer[i] = (float)i;
  float before[4 * 9];
  memcpy(before, buffer, sizeof before);
  esmm_matrix src = {.data = buffer, .rows = 4, .cols = 4, .ld = 9}, dst = src;
  expect_overlap(f, esmm_matrix_copy(f->ctx, &src, &dst), "dst", "src");
  dst.order = ESMM_COL_MAJOR; /* a transposition in place would need another way */
  expect_overlap(f, esmm_matrix_copy(f->ctx, &src, &dst), "dst", "src");
  dst = src;
  dst.data = buffer + 3;
  expect_overlap(f, esmm_matrix_copy(f->ctx, &src, &dst), "dst", "src");
  expect_overlap(f, esmm_matrix_copy(f->ctx, &dst, &src), "dst", "src");
  assert_memory_equal(before, buffer, sizeof before);
  dst.data = buffer + 5; /* the last four columns of nine */
  assert_int_equal(esmm_matrix_copy(f->ctx, &src, &dst), ESMM_OK);
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 9; j++)
      assert_true(buffer[9 * i + j] == (float)(j < 5 ? 9 * i + j : 9 * i + j - 5));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
  th_clean_environment();
  const struct CMUnitTest tests[] = {
      TEST(c_and_a),
      TEST(bias_in_c),
      TEST(slices_of_one_buffer),
      TEST(copies_do_not_overlap),
  };
  return cmocka_run_group_tests_name("overlap", tests, NULL, NULL);
}
