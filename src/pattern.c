/*
 * pattern.c: bitmaps of a matrix's strips, and what a tiled kernel could skip with them.
 *
 * Extraction has to run at memory speed on any machine, so it is plain C that compilers vectorise at their baseline:
 * the rows of a strip are ORed as bytes, whatever the dtype, into a buffer that stays in the first-level cache; only
 * the ORed words are tested, once a strip, with the sign bit masked away (so -0.0 is zero, NaN and Inf are not). Where
 * k is the strided direction (column-major A, row-major B) a strip's elements lie together instead, and each k's few
 * bytes are folded into one bit directly.
 */
#include "backend.h"
#include "bits.h"
#include "esmm_tools.h"
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

enum {
  STRETCH = 1024, /* k's ORed at a time: 4 KiB of fp32, so rows are read a page at a time and the buffer stays in L1 */
  STRIPS_AT_ONCE = 512 /* strips of one k-word handled together when k is strided: long runs down each column */
};

static inline int64_t popcount(uint64_t x)
{
  x -= (x >> 1) & 0x5555555555555555u;
  x = (x & 0x3333333333333333u) + ((x >> 2) & 0x3333333333333333u);
  x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return (int64_t)((x * 0x0101010101010101u) >> 56);
}

static size_t bits_bytes(const esmm_pattern *p)
{
  return (size_t)(p->strips * p->words + 1) * sizeof(uint64_t); /* never zero: an empty bitmap still has an address */
}

/* with_bits: in host memory. */
static esmm_status make_pattern(esmm_ctx *ctx, int64_t rows, int64_t k, int64_t strip_rows, bool with_bits,
                                esmm_pattern **pattern)
{
  int64_t strips = esmm_ceil_div(rows, strip_rows), words = esmm_ceil_div(k, 64);
  size_t bytes;
  if (!esmm_size_mul((size_t)strips, (size_t)words, &bytes) || !esmm_size_mul(bytes, sizeof(uint64_t), &bytes) ||
      !esmm_size_add(bytes, sizeof(uint64_t), &bytes))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "bitmaps of %lld strips by %lld words do not fit in memory",
                     (long long)strips, (long long)words);
  esmm_pattern *p = esmm_mem_alloc(&ctx->allocator, sizeof *p);
  uint64_t *bits = p && with_bits ? esmm_mem_alloc(&ctx->allocator, bytes) : NULL;
  if (!p || (with_bits && !bits)) {
    esmm_mem_free(&ctx->allocator, p, sizeof *p);
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "out of memory: %zu bytes for bitmaps", bytes);
  }
  *p = (esmm_pattern){.allocator = ctx->allocator,
                      .rows = rows,
                      .k = k,
                      .strip_rows = strip_rows,
                      .strips = strips,
                      .words = words,
                      .bits = bits};
  *pattern = p;
  return ESMM_OK;
}

esmm_status esmm_pattern_alloc(esmm_ctx *ctx, int64_t rows, int64_t k, int64_t strip_rows, esmm_pattern **pattern)
{
  return make_pattern(ctx, rows, k, strip_rows, true, pattern);
}

esmm_status esmm_pattern_shell(esmm_ctx *ctx, int64_t rows, int64_t k, int64_t strip_rows, esmm_pattern **pattern)
{
  const esmm_status status = make_pattern(ctx, rows, k, strip_rows, false, pattern);
  if (status == ESMM_OK) {
    (*pattern)->backend = ctx->backend;
    (*pattern)->ordinal = ctx->ordinal;
  }
  return status;
}

/* ---- patterns on a device ---- */

esmm_status esmm_check_pattern(esmm_ctx *ctx, const char *what, const esmm_pattern *pattern)
{
  if (!pattern->backend || (pattern->backend == ctx->backend && pattern->ordinal == ctx->ordinal))
    return ESMM_OK;
  return esmm_fail(ctx, ESMM_ERR_DEVICE,
                   "%s lies on %s:%d, but this is a %s context: esmm_pattern_coarsen in a context of that device makes "
                   "one in host memory",
                   what, pattern->backend->name, pattern->ordinal, esmm_ctx_kind(ctx));
}

esmm_status esmm_pattern_enter(esmm_ctx *ctx, const char *what, const esmm_pattern *pattern, const esmm_pattern **host)
{
  esmm_pattern *copy = NULL;
  *host = pattern;
  if (!pattern->backend)
    return ESMM_OK;
  esmm_status status = esmm_check_pattern(ctx, what, pattern);
  if (status == ESMM_OK)
    status = esmm_pattern_alloc(ctx, pattern->rows, pattern->k, pattern->strip_rows, &copy);
  if (status != ESMM_OK)
    return status;
  status = ctx->backend->pattern_bits(ctx, pattern, 0, pattern->strips, copy->bits);
  if (status != ESMM_OK) {
    esmm_pattern_free(copy);
    return status;
  }
  esmm_pattern_count(copy);
  *host = copy;
  return ESMM_OK;
}

void esmm_pattern_leave(const esmm_pattern *pattern, const esmm_pattern *host)
{
  esmm_pattern *copy;
  if (host == pattern)
    return;
  memcpy(&copy, &host, sizeof copy); /* enter made it, and gave it out as const */
  esmm_pattern_free(copy);
}

void esmm_pattern_count(esmm_pattern *pattern)
{
  pattern->set = 0;
  for (int64_t i = 0; i < pattern->strips * pattern->words; i++)
    pattern->set += popcount(pattern->bits[i]);
}

/* ---- k contiguous: A row-major ---- */

/* Four rows a pass: a quarter of the traffic to the buffer, and four streams for the prefetchers. */
static void or_rows(unsigned char *restrict buffer, const unsigned char *data, size_t stride, int64_t rows,
                    size_t bytes)
{
  int64_t r = rows % 4;
  switch (r) {
  case 0:
    memset(buffer, 0, bytes);
    break;
  case 1:
    memcpy(buffer, data, bytes);
    break;
  default:
    memcpy(buffer, data, bytes);
    for (int64_t i = 1; i < r; i++) {
      const unsigned char *row = data + (size_t)i * stride;
      for (size_t j = 0; j < bytes; j++)
        buffer[j] |= row[j];
    }
  }
  for (; r < rows; r += 4) {
    const unsigned char *r0 = data + (size_t)r * stride, *r1 = r0 + stride, *r2 = r1 + stride, *r3 = r2 + stride;
    for (size_t j = 0; j < bytes; j++)
      buffer[j] = (unsigned char)(buffer[j] | r0[j] | r1[j] | r2[j] | r3[j]);
  }
}

/* Bitmap words of one strip for `count` k's from a multiple of STRETCH on; returns how many bits are set. */
static int64_t extract_stretch(const esmm_matrix *a, int64_t row, int64_t rows, int64_t from, int64_t count,
                               uint64_t *words)
{
  _Alignas(uint64_t) unsigned char buffer[STRETCH * 4]; /* of elements, no larger than fp32 */
  unsigned char flag[STRETCH];
  const size_t element = esmm_dtype_bytes(a->dtype), stride = (size_t)a->ld * element;
  const unsigned char *data = (const unsigned char *)a->data + (size_t)row * stride + (size_t)from * element;
  or_rows(buffer, data, stride, rows, (size_t)count * element);
  esmm_flag_nonzero(buffer, a->dtype, count, flag);
  int64_t padded = esmm_round_up(count, 64), set = 0;
  memset(flag + count, 0, (size_t)(padded - count));
  for (int64_t i = 0; i < padded; i += 64) {
    const uint64_t word = esmm_gather_bits(flag + i);
    words[i / 64] = word;
    set += popcount(word);
  }
  return set;
}

/* An extraction, shared out. */
typedef struct job {
  const esmm_matrix *a;
  esmm_pattern *p;
  int64_t height; /* of strips */
  int64_t parts;  /* of each strip, or of each word of k's */
  _Atomic int64_t set;
} job;

static void k_contiguous_piece(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  job *j = arg;
  esmm_pattern *p = j->p;
  int64_t set = 0;
  for (int64_t task = first; task < end; task++) {
    int64_t strip = task / j->parts, from = task % j->parts * STRETCH, row = strip * j->height;
    set += extract_stretch(j->a, row, esmm_min(j->height, p->rows - row), from, esmm_min(STRETCH, p->k - from),
                           p->bits + strip * p->words + from / 64);
  }
  j->set += set;
}

/* ---- k strided: A column-major, B row-major ---- */

/* Sets bit `i` of each strip's word where its run of `length` in this column has a nonzero. Runs lie end to end. */
static inline __attribute__((always_inline)) void test_runs(const esmm_dtype dtype, const unsigned char *column,
                                                            int64_t length, int64_t runs, int64_t i, uint64_t *bits)
{
  const size_t element = esmm_dtype_bytes(dtype), bytes = (size_t)length * element;
  const int64_t in_lane = 8 / (int64_t)element;
  const uint64_t magnitude =
      UINT64_MAX / (UINT64_MAX >> (64 - 8 * element)) * esmm_dtype_magnitude(dtype); /* a lane's */
  for (int64_t s = 0; s < runs; s++) {
    const unsigned char *run = column + (size_t)s * bytes;
    uint64_t all = 0;
    for (size_t at = 0; at + 8 <= bytes; at += 8) { /* some elements a lane: which of them is nonzero does not matter */
      uint64_t lane;
      memcpy(&lane, run + at, 8);
      all |= lane;
    }
    for (int64_t at = length / in_lane * in_lane; at < length; at++)
      all |= esmm_bits_at(run, dtype, at);
    bits[s] |= (uint64_t)((all & magnitude) != 0) << i;
  }
}

static void test_runs_of(esmm_dtype dtype, const unsigned char *column, int64_t length, int64_t runs, int64_t i,
                         uint64_t *bits)
{
  switch (dtype) { /* outside the loop: a run may be one element */
  case ESMM_F32:
    test_runs(ESMM_F32, column, length, runs, i, bits);
    break;
  case ESMM_BF16:
  case ESMM_F16: /* a zero has the same bits */
    test_runs(ESMM_F16, column, length, runs, i, bits);
    break;
  }
}

/* One word of k's for up to STRIPS_AT_ONCE strips. */
static int64_t extract_columns(const esmm_matrix *a, esmm_pattern *p, int64_t height, int64_t word, int64_t first,
                               int64_t count)
{
  const size_t element = esmm_dtype_bytes(a->dtype);
  uint64_t bits[STRIPS_AT_ONCE] = {0};
  const int64_t from = word * 64, ks = esmm_min(64, p->k - from), row = first * height;
  const int64_t whole = esmm_min(count, (p->rows - row) / height); /* the matrix may end in a short strip */
  const int64_t short_run = p->rows - row - whole * height;
  for (int64_t i = 0; i < ks; i++) {
    const unsigned char *column =
        (const unsigned char *)a->data + ((size_t)(from + i) * (size_t)a->ld + (size_t)row) * element;
    test_runs_of(a->dtype, column, height, whole, i, bits);
    test_runs_of(a->dtype, column + (size_t)(whole * height) * element, short_run, count - whole, i, bits + whole);
  }
  int64_t set = 0;
  for (int64_t s = 0; s < count; s++) {
    p->bits[(first + s) * p->words + word] = bits[s];
    set += popcount(bits[s]);
  }
  return set;
}

static void k_strided_piece(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  job *j = arg;
  int64_t set = 0;
  for (int64_t task = first; task < end; task++) {
    int64_t word = task / j->parts, strip = task % j->parts * STRIPS_AT_ONCE;
    set += extract_columns(j->a, j->p, j->height, word, strip, esmm_min(STRIPS_AT_ONCE, j->p->strips - strip));
  }
  j->set += set;
}

esmm_status esmm_pattern_host(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  esmm_pattern *p = NULL;
  const esmm_status status = esmm_pattern_alloc(ctx, a->rows, a->cols, strip_rows, &p);
  if (status != ESMM_OK)
    return status;
  job j = {.a = a, .p = p, .height = esmm_min(p->strip_rows, p->rows)};
  const int64_t size = (int64_t)esmm_dtype_size(a->dtype);
  if (a->order == ESMM_ROW_MAJOR) {
    j.parts = esmm_ceil_div(p->k, STRETCH);
    esmm_for(ctx, ctx->threads, p->strips * j.parts, esmm_at_once(j.height, STRETCH * size), k_contiguous_piece, &j);
  } else {
    j.parts = esmm_ceil_div(p->strips, STRIPS_AT_ONCE);
    esmm_for(ctx, ctx->threads, p->words * j.parts, esmm_at_once(j.height, 64 * STRIPS_AT_ONCE * size), k_strided_piece,
             &j);
  }
  p->set = j.set;
  *pattern = p;
  return ESMM_OK;
}

esmm_status esmm_pattern_coarsen(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip_rows, esmm_pattern **coarser)
{
  esmm_status status = esmm_begin_handle(ctx, "coarser", coarser);
  if (status != ESMM_OK)
    return status;
  if (!pattern)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "pattern is NULL");
  if (strip_rows < 1 || strip_rows % pattern->strip_rows != 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip_rows is %lld, must be a multiple of the pattern's %lld",
                     (long long)strip_rows, (long long)pattern->strip_rows);
  esmm_pattern *p = NULL;
  const esmm_pattern *from;
  status = esmm_pattern_enter(ctx, "pattern", pattern, &from);
  if (status != ESMM_OK)
    return status;
  status = esmm_pattern_alloc(ctx, pattern->rows, pattern->k, strip_rows, &p);
  if (status != ESMM_OK) {
    esmm_pattern_leave(pattern, from);
    return status;
  }
  int64_t ratio = strip_rows / pattern->strip_rows;
  int64_t strips = p->words > 0 ? p->strips : 0; /* with k = 0 there may be any number of strips, and no work */
  for (int64_t s = 0; s < strips; s++) {
    uint64_t *to = p->bits + s * p->words;
    int64_t first = s * ratio, count = esmm_min(ratio, pattern->strips - first);
    memcpy(to, from->bits + first * p->words, (size_t)p->words * sizeof *to);
    for (int64_t i = 1; i < count; i++)
      for (int64_t w = 0; w < p->words; w++)
        to[w] |= from->bits[(first + i) * p->words + w];
    for (int64_t w = 0; w < p->words; w++)
      p->set += popcount(to[w]);
  }
  esmm_pattern_leave(pattern, from);
  *coarser = p;
  return ESMM_OK;
}

void esmm_pattern_free(esmm_pattern *pattern)
{
  if (!pattern)
    return;
  esmm_allocator allocator = pattern->allocator;
  if (pattern->backend)
    pattern->backend->pattern_free(pattern);
  if (pattern->bits)
    esmm_mem_free(&allocator, pattern->bits, bits_bytes(pattern));
  esmm_mem_free(&allocator, pattern, sizeof *pattern);
}

double esmm_pattern_density(const esmm_pattern *pattern)
{
  if (!pattern || pattern->strips == 0 || pattern->k == 0)
    return 0;
  return (double)pattern->set / ((double)pattern->strips * (double)pattern->k);
}

esmm_status esmm_pattern_get_info(esmm_ctx *ctx, const esmm_pattern *pattern, esmm_pattern_info *info)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!pattern || !info)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", pattern ? "info" : "pattern");
  if (!esmm_struct_size(info->size, sizeof *info))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "info->size is %zu; set it to sizeof *info, %zu in this version",
                     info->size, sizeof *info);
  const esmm_pattern *host;
  const esmm_status status = esmm_pattern_enter(ctx, "pattern", pattern, &host);
  if (status != ESMM_OK)
    return status;
  const esmm_pattern_info all = {.size = info->size,
                                 .rows = pattern->rows,
                                 .k = pattern->k,
                                 .strip_rows = pattern->strip_rows,
                                 .strips = pattern->strips,
                                 .words = pattern->words,
                                 .density = esmm_pattern_density(host)};
  esmm_pattern_leave(pattern, host);
  memcpy(info, &all, info->size);
  return ESMM_OK;
}

esmm_status esmm_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips, uint64_t *bits)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!pattern || !bits)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", pattern ? "bits" : "pattern");
  if (strip < 0 || strips < 0 || strip > pattern->strips || strips > pattern->strips - strip)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "strip and strips are %lld and %lld, but the pattern has %lld strips",
                     (long long)strip, (long long)strips, (long long)pattern->strips);
  if (pattern->backend) {
    const esmm_status status = esmm_check_pattern(ctx, "pattern", pattern);
    return status == ESMM_OK ? ctx->backend->pattern_bits(ctx, pattern, strip, strips, bits) : status;
  }
  memcpy(bits, pattern->bits + strip * pattern->words, (size_t)(strips * pattern->words) * sizeof *bits);
  return ESMM_OK;
}

/* ---- skip statistics ---- */

/*
 * Stretches of `step` k's that hold a joint bit, over `words` words. Bits past k are 0, so a short last stretch needs
 * no care: stretches that are not counted here are skipped.
 */
static int64_t count_within_words(const uint64_t *a, const uint64_t *b, int64_t words, int step)
{
  uint64_t leaders = 1; /* the lowest bit of each stretch */
  for (int at = step; at < 64; at += step)
    leaders |= (uint64_t)1 << at;
  int64_t count = 0;
  for (int64_t w = 0; w < words; w++) {
    uint64_t joint = a[w] & b[w];
    for (int shift = step / 2; shift > 0; shift /= 2) /* step is a power of two: the leader collects its stretch */
      joint |= joint >> shift;
    count += popcount(joint & leaders);
  }
  return count;
}

static int64_t count_whole_words(const uint64_t *a, const uint64_t *b, int64_t words, int64_t words_per_step)
{
  int64_t count = 0;
  for (int64_t from = 0; from < words; from += words_per_step) {
    uint64_t joint = 0;
    int64_t to = from + esmm_min(words_per_step, words - from);
    for (int64_t w = from; w < to; w++)
      joint |= a[w] & b[w];
    count += joint != 0;
  }
  return count;
}

/* Any step: walks from joint bit to joint bit, each counting the stretch it falls in once. */
static int64_t count_anywhere(const uint64_t *a, const uint64_t *b, int64_t words, int64_t step)
{
  int64_t count = 0, last = -1;
  for (int64_t w = 0; w < words; w++)
    for (uint64_t joint = a[w] & b[w]; joint; joint &= joint - 1) {
      int64_t stretch = (w * 64 + __builtin_ctzll(joint)) / step;
      count += stretch != last;
      last = stretch;
    }
  return count;
}

static int64_t count_stretches(const uint64_t *a, const uint64_t *b, int64_t words, int64_t step)
{
  if (step % 64 == 0)
    return count_whole_words(a, b, words, step / 64);
  if (step < 64 && (step & (step - 1)) == 0)
    return count_within_words(a, b, words, (int)step);
  return count_anywhere(a, b, words, step);
}

/* With no stretch at all nothing is executed: that counts as all skipped, so that joint_density is 0 as for any empty
 * pattern. */
static double skipped_share(int64_t executed, double pairs, int64_t stretches)
{
  double all = pairs * (double)stretches;
  return all > 0 ? 1 - (double)executed / all : 1;
}

typedef struct skips {
  const esmm_pattern *a, *b;
  int64_t block_k, warp_k;
  _Atomic int64_t blocks, warps, dots;
} skips;

static void count_skips(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  skips *s = arg;
  const int64_t words = s->a->words;
  int64_t blocks = 0, warps = 0, dots = 0;
  for (int64_t i = first; i < end; i++) {
    const uint64_t *left = s->a->bits + i * words;
    for (int64_t j = 0; j < s->b->strips; j++) {
      const uint64_t *right = s->b->bits + j * words;
      blocks += count_stretches(left, right, words, s->block_k);
      warps += count_stretches(left, right, words, s->warp_k);
      dots += count_stretches(left, right, words, 1);
    }
  }
  s->blocks += blocks;
  s->warps += warps;
  s->dots += dots;
}

esmm_status esmm_pattern_skip_stats(esmm_ctx *ctx, const esmm_pattern *a, const esmm_pattern *b, esmm_skip_stats *stats)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!a || !b || !stats)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "%s is NULL", !a ? "a" : !b ? "b" : "stats");
  esmm_skip_stats all = {0};
  if (!esmm_struct_size(stats->size, sizeof all))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "stats->size is %zu; set it to sizeof *stats, %zu in this version",
                     stats->size, sizeof all);
  memcpy(&all, stats, stats->size);
  if (all.block_k < 0 || all.warp_k < 0)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "stats->%s is %lld, must not be negative",
                     all.block_k < 0 ? "block_k" : "warp_k", (long long)(all.block_k < 0 ? all.block_k : all.warp_k));
  if (a->k != b->k)
    return esmm_fail(ctx, ESMM_ERR_SHAPE, "pattern a has k = %lld, pattern b has k = %lld", (long long)a->k,
                     (long long)b->k);
  skips s = {.block_k = all.block_k ? all.block_k : 64, .warp_k = all.warp_k ? all.warp_k : 8};
  esmm_status status = esmm_pattern_enter(ctx, "a", a, &s.a);
  if (status != ESMM_OK)
    return status;
  status = esmm_pattern_enter(ctx, "b", b, &s.b);
  if (status != ESMM_OK) {
    esmm_pattern_leave(a, s.a);
    return status;
  }
  if (a->words > 0) /* k = 0: no work for any number of strips */
    esmm_for(ctx, ctx->threads, a->strips, esmm_at_once(b->strips, a->words * (int64_t)sizeof(uint64_t)), count_skips,
             &s);
  const double pairs = (double)a->strips * (double)b->strips;
  all.block_skipped = skipped_share(s.blocks, pairs, esmm_ceil_div(a->k, s.block_k));
  all.warp_skipped = skipped_share(s.warps, pairs, esmm_ceil_div(a->k, s.warp_k));
  all.dot_skipped = skipped_share(s.dots, pairs, a->k);
  all.joint_density = 1 - all.dot_skipped;
  memcpy(stats, &all, all.size);
  esmm_pattern_leave(a, s.a);
  esmm_pattern_leave(b, s.b);
  return ESMM_OK;
}
