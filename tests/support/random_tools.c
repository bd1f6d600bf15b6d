/*
 * random_tools.c: one call of what goes with the product: copies, patterns, generators, and what a context remembers or
 * tells.
 */
#include "random_calls.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

void call_copy(world *w)
{
  const int64_t rows = about(w, 0, 300), cols = about(w, 0, 300);
  const value_kind kind = chance(w, 0.1) ? SPECIAL : chance(w, 0.5) ? REAL : WHOLE;
  draw_values(w, w->values[FOR_A], rows, cols, kind, true);
  const esmm_matrix from = place_values(w, FOR_A, rows, cols, any_dtype(w), w->values[FOR_A]);
  esmm_matrix to;
  th_matrix_place(&w->arena[FOR_C], &to, rows, cols, below(w, 9), any_dtype(w), any_order(w));
  say(w, "copy %d x %d %s order %d to %s order %d", (int)rows, (int)cols, esmm_dtype_str(from.dtype), (int)from.order,
      esmm_dtype_str(to.dtype), (int)to.order);
  must_be(w, esmm_matrix_copy(w->ctx, &from, &to), ESMM_OK);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      const double want = th_round(to.dtype, w->values[FOR_A][i * cols + j]), got = th_get(&to, i, j);
      if (got != want && !(isnan(got) && isnan(want)))
        fail_msg("%s: [%d,%d] is %.9g, expected %.9g", w->now, (int)i, (int)j, got, want);
    }
  if (!th_guards_intact(&w->arena[FOR_C]) || !padding_intact(&to))
    fail_msg("%s: wrote beside the copy", w->now);
}

/* ---- patterns ---- */

/* Bits by definition, [strips][k], of values [rows, k] (by_rows) or [k, cols]. */
static bool *bits_of(const double *values, int64_t rows, int64_t k, bool by_rows, int64_t strip)
{
  const int64_t strips = (rows + strip - 1) / strip;
  bool *bits = calloc((size_t)(strips * k + 1), sizeof *bits);
  assert_non_null(bits);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < k; j++)
      bits[i / strip * k + j] |= values[by_rows ? i * k + j : j * rows + i] != 0;
  return bits;
}

static void compare_bits(world *w, const esmm_pattern *pattern, const bool *want, int64_t rows, int64_t k,
                         int64_t strip)
{
  const esmm_pattern_info info = th_pattern(w->ctx, pattern);
  const int64_t strips = (rows + strip - 1) / strip;
  if (info.rows != rows || info.k != k || info.strip_rows != strip || info.strips != strips)
    fail_msg("%s: a pattern of %d x %d, %d strips of %d", w->now, (int)info.rows, (int)info.k, (int)info.strips,
             (int)info.strip_rows);
  uint64_t *bits = th_pattern_bits(w->ctx, pattern);
  int64_t set = 0;
  for (int64_t s = 0; s < strips; s++)
    for (int64_t j = 0; j < 64 * info.words; j++) {
      const bool expected = j < k && want[s * k + j];
      set += expected;
      if ((bits[s * info.words + j / 64] >> j % 64 & 1) != expected)
        fail_msg("%s: bit %d of strip %d should be %d", w->now, (int)j, (int)s, expected);
    }
  if (fabs(info.density - (strips * k > 0 ? (double)set / (double)(strips * k) : 0)) > 1e-12)
    fail_msg("%s: density %.12g of %d bits of %d", w->now, info.density, (int)set, (int)(strips * k));
  free(bits);
}

/* Shares of stretches of `step` k's, over all pairs of strips, with no k alive in both. */
static double skipped(const bool *a, int64_t of_a, const bool *b, int64_t of_b, int64_t k, int64_t step)
{
  int64_t all = 0, empty = 0;
  for (int64_t i = 0; i < of_a; i++)
    for (int64_t j = 0; j < of_b; j++)
      for (int64_t k0 = 0; k0 < k; k0 += step) {
        bool alive = false;
        for (int64_t at = k0; at < k0 + step && at < k; at++)
          alive |= a[i * k + at] && b[j * k + at];
        all++;
        empty += !alive;
      }
  return all ? (double)empty / (double)all : 0;
}

static void check_reorder(world *w, const esmm_pattern *rows, int64_t count, int64_t strip)
{
  int64_t *order = malloc((size_t)(count + 1) * sizeof *order);
  bool *seen = calloc((size_t)count + 1, sizeof *seen);
  esmm_pattern *reordered = NULL, *plain = NULL;
  assert_true(order && seen);
  must_be(w, esmm_pattern_reorder(w->ctx, rows, strip, order, &reordered), ESMM_OK);
  must_be(w, esmm_pattern_coarsen(w->ctx, rows, strip, &plain), ESMM_OK);
  for (int64_t i = 0; i < count; i++) {
    if (order[i] < 0 || order[i] >= count || seen[order[i]])
      fail_msg("%s: order[%d] is %d", w->now, (int)i, (int)order[i]);
    seen[order[i]] = true;
  }
  if (th_pattern(w->ctx, reordered).density > th_pattern(w->ctx, plain).density)
    fail_msg("%s: reordered rows are denser", w->now);
  esmm_pattern_free(reordered);
  esmm_pattern_free(plain);
  free(order);
  free(seen);
}

void call_pattern(world *w)
{
  const int64_t m = about(w, 0, 200), n = about(w, 0, 100), k = about(w, 0, 300);
  const int64_t strip = 1 + below(w, 40), cols = 1 + below(w, 40), times = 1 + below(w, 4);
  say(w, "patterns of %d x %d by %d, and %d x %d by %d", (int)m, (int)k, (int)strip, (int)k, (int)n, (int)cols);
  draw_values(w, w->values[FOR_A], m, k, WHOLE, true);
  draw_values(w, w->values[FOR_B], k, n, WHOLE, false);
  const esmm_matrix a = place_values(w, FOR_A, m, k, any_dtype(w), w->values[FOR_A]);
  const esmm_matrix b = place_values(w, FOR_B, k, n, any_dtype(w), w->values[FOR_B]);
  esmm_pattern *of_a = NULL, *of_b = NULL, *coarser = NULL;
  must_be(w, esmm_pattern_extract(w->ctx, &a, strip, &of_a), ESMM_OK);
  must_be(w, esmm_pattern_extract_b(w->ctx, &b, cols, &of_b), ESMM_OK);
  must_be(w, esmm_pattern_coarsen(w->ctx, of_a, strip * times, &coarser), ESMM_OK);
  bool *bits_a = bits_of(w->values[FOR_A], m, k, true, strip), *bits_b = bits_of(w->values[FOR_B], n, k, false, cols);
  bool *bits_c = bits_of(w->values[FOR_A], m, k, true, strip * times);
  compare_bits(w, of_a, bits_a, m, k, strip);
  compare_bits(w, of_b, bits_b, n, k, cols);
  compare_bits(w, coarser, bits_c, m, k, strip * times);
  esmm_skip_stats stats = {.size = sizeof stats, .block_k = below(w, 80), .warp_k = below(w, 20)};
  const int64_t block = stats.block_k ? stats.block_k : 64, warp = stats.warp_k ? stats.warp_k : 8;
  must_be(w, esmm_pattern_skip_stats(w->ctx, of_a, of_b, &stats), ESMM_OK);
  const int64_t strips_a = (m + strip - 1) / strip, strips_b = (n + cols - 1) / cols;
  if (strips_a * strips_b * k != 0 &&
      (fabs(stats.block_skipped - skipped(bits_a, strips_a, bits_b, strips_b, k, block)) > 1e-12 ||
       fabs(stats.warp_skipped - skipped(bits_a, strips_a, bits_b, strips_b, k, warp)) > 1e-12 ||
       fabs(stats.dot_skipped - skipped(bits_a, strips_a, bits_b, strips_b, k, 1)) > 1e-12 ||
       fabs(stats.joint_density + stats.dot_skipped - 1) > 1e-12))
    fail_msg("%s: stretches of %d and %d: %.9g, %.9g, %.9g are skipped, joint density %.9g", w->now, (int)block,
             (int)warp, stats.block_skipped, stats.warp_skipped, stats.dot_skipped, stats.joint_density);
  if (strip == 1)
    check_reorder(w, of_a, m, cols);
  esmm_pattern_free(of_a);
  esmm_pattern_free(of_b);
  esmm_pattern_free(coarser);
  free(bits_a);
  free(bits_b);
  free(bits_c);
}

/* ---- generators ---- */

static bool may_be(const esmm_generator *g, const double *values, int64_t rows, int64_t cols, int64_t i, int64_t j)
{
  const bool is_a = g->operand == ESMM_OPERAND_A, alive = values[i * cols + j] != 0;
  const int64_t k = is_a ? j : i, line = is_a ? i : j, strip = g->strip ? g->strip : 32;
  if (g->integers && values[i * cols + j] != nearbyint(values[i * cols + j]))
    return false;
  if (g->kind == ESMM_GEN_DENSE)
    return alive;
  if (g->kind == ESMM_GEN_PATTERN)
    return alive == (g->pattern[k % 8] == '1');
  if (g->kind == ESMM_GEN_BLOCKWISE) { /* as the first line of its strip */
    const int64_t first = line - line % strip;
    return alive == (values[is_a ? first * cols + k : k * cols + first] != 0) && (g->density < 1 || alive) &&
           (g->density > 0 || !alive);
  }
  if (g->kind == ESMM_GEN_RANDOM)
    return (g->density < 1 || alive) && (g->density > 0 || !alive);
  return values[i * cols + j] >= 0 && rows > 0;
}

void call_generate(world *w)
{
  const int64_t rows = about(w, 0, 200), cols = about(w, 0, 200);
  char pattern[9] = "";
  for (int i = 0; i < 8; i++)
    pattern[i] = (char)('0' + below(w, 2));
  const esmm_generator_kind kind = (esmm_generator_kind)below(w, 5); /* activations are made for A alone */
  const double density = (double)below(w, 21) / 20;
  const esmm_generator g = {.size = sizeof g,
                            .kind = kind,
                            .operand = kind == ESMM_GEN_ACTIVATIONS ? ESMM_OPERAND_A : (esmm_operand)below(w, 2),
                            .seed = th_next(&w->rng),
                            .density = density,
                            .strip = below(w, 50),
                            .pattern = pattern,
                            .dead =
                                density > 0.95 ? 0 : (1 - density) * th_unit(&w->rng), /* some features stay alive */
                            .activation = ESMM_ACT_RELU + (esmm_activation)below(w, 2),
                            .integers = (int)below(w, 2)};
  say(w, "generate %d x %d, kind %d, operand %d, density %g, strip %d, pattern %s, dead %g, integers %d, seed %llu",
      (int)rows, (int)cols, (int)g.kind, (int)g.operand, g.density, (int)g.strip, pattern, g.dead, g.integers,
      (unsigned long long)g.seed);
  esmm_matrix x, again;
  th_matrix_place(&w->arena[FOR_A], &x, rows, cols, below(w, 9), any_dtype(w), any_order(w));
  th_matrix_place(&w->arena[FOR_C], &again, rows, cols, below(w, 9), x.dtype, any_order(w));
  must_be(w, esmm_generate(w->ctx, &g, &x), ESMM_OK);
  must_be(w, esmm_generate(w->ctx, &g, &again), ESMM_OK);
  for (int64_t i = 0; i < rows * cols; i++)
    w->values[FOR_A][i] = th_get(&x, i / cols, i % cols);
  for (int64_t i = 0; i < rows * cols; i++)
    if (!may_be(&g, w->values[FOR_A], rows, cols, i / cols, i % cols) ||
        w->values[FOR_A][i] != th_get(&again, i / cols, i % cols))
      fail_msg("%s: [%d,%d] is %.9g, the next time %.9g", w->now, (int)(i / cols), (int)(i % cols), w->values[FOR_A][i],
               th_get(&again, i / cols, i % cols));
  if (!th_guards_intact(&w->arena[FOR_A]) || !padding_intact(&x) || !padding_intact(&again))
    fail_msg("%s: wrote beside the matrix", w->now);
}

/* ---- what a context remembers, and tells ---- */

static void call_memory(world *w)
{
  const held *h = any_weights(w, 0, 0, NULL);
  const int64_t m = about(w, 1, 2000);
  say(w, "expect and recall for %d rows", (int)m);
  const esmm_recollection in = {.size = sizeof in,
                                .density_a = (double)below(w, 11) / 10,
                                .strip_density_a = 1,
                                .joint_density = (double)below(w, 11) / 10,
                                .strip_rows = (int64_t[]){0, 32, 128}[below(w, 3)]};
  esmm_recollection out = {.size = sizeof out};
  must_be(w, esmm_expect(w->ctx, h->weights, m, &in), ESMM_OK);
  must_be(w, esmm_recall(w->ctx, h->weights, m, &out), ESMM_OK);
  if (!out.known || out.density_a != in.density_a)
    fail_msg("%s: density %g was expected, %g is remembered", w->now, in.density_a, out.density_a);
  if (chance(w, 0.3)) {
    must_be(w, esmm_forget(w->ctx), ESMM_OK);
    must_be(w, esmm_recall(w->ctx, h->weights, m, &out), ESMM_OK);
    if (out.known)
      fail_msg("%s: known after esmm_forget", w->now);
  }
}

void call_context(world *w)
{
  if (w->remembers)
    call_memory(w);
  void *memory = NULL;
  must_be(w, esmm_memory_alloc(w->ctx, (size_t)below(w, 5000), &memory), ESMM_OK);
  esmm_memory_free(w->ctx, memory);
  esmm_timer *timer = NULL;
  double seconds = -1;
  must_be(w, esmm_timer_create(w->ctx, &timer), ESMM_OK);
  must_be(w, esmm_timer_start(timer), ESMM_OK);
  must_be(w, esmm_ctx_synchronize(w->ctx), ESMM_OK);
  must_be(w, esmm_timer_stop(timer), ESMM_OK);
  must_be(w, esmm_timer_seconds(timer, &seconds), ESMM_OK);
  esmm_timer_free(timer);
  if (!(seconds >= 0) || esmm_ctx_threads(w->ctx) != w->threads || strcmp(esmm_ctx_device(w->ctx), "cpu") != 0)
    fail_msg("%s: %g s, %d threads, device %s", w->now, seconds, esmm_ctx_threads(w->ctx), esmm_ctx_device(w->ctx));
}
