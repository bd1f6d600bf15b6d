/*
 * k_decode_bf16_avx512bf16.c: m of 2 to 16 rows of bf16 on AVX-512 BF16. Reads only the rows of B that some row of A
 * needs, as decode.h does, and multiplies two nonzeros of a row at a time.
 *
 * The floor is bytes: the union of A's nonzero k's times a row of B. At m = 16 and 10 % that is 0.8 of B, and decode.h
 * would widen B for each nonzero, which takes longer than reading it. Here each row of A has a list of pairs for every
 * block of PAIR_K k's, and
 *
 *     sums[row][0..31] += pair . (row even of B, row odd of B)[0..31]        for each pair of the list
 *
 * with the two rows put side by side in registers. A block is PAIR_K k's by PAIR_COLS columns, 512 KB at most: it stays
 * in the second-level cache for all rows of A, and while it is multiplied the needed rows of the next one are
 * prefetched, because the CPU does not prefetch parts of rows that lie pages apart. Within a block all rows of A go
 * through CHUNK columns before the next: PAIR_K k's of those are 16 KB, half of the first-level cache, and each line of
 * B comes there once. (Rows of A one after another, each through all columns of the block, fetched it once for every
 * nonzero.)
 *
 * Sums stay in the order in which unpacking leaves columns, until a range of columns is done. A list with an odd end
 * gets a zero and a row of zeros: no Inf meets a zero that is not in the data.
 */
#include "vec_avx512.h"

#include "operands.h"

#include <stdio.h>

#define PAIR_K 256
#define PAIR_COLS 1024
#define PAIR_MOST_ROWS 16
#define CHUNK (2 * VEC) /* columns that are summed in registers: a cache line of B */

typedef struct pair_layout {
  int64_t room;   /* entries of a row's list: pairs are half as many */
  int64_t blocks; /* of k's */
  int64_t width, items;
  int64_t row_bytes; /* of B */
  size_t at_rows, at_values, at_starts, at_alive, at_zeros, at_sums, at_lists, list_bytes, bytes;
} pair_layout;

static pair_layout lay_out(const esmm_problem *p)
{
  pair_layout l = {.blocks = esmm_ceil_div(p->k, PAIR_K), .row_bytes = p->w->rows_ld * (int64_t)sizeof(uint16_t)};
  /* Every thread the same number of column ranges, each of whole chunks. */
  const int64_t ranges = esmm_round_up(esmm_ceil_div(p->n, PAIR_COLS), p->threads);
  l.room = esmm_round_up(p->k, 2) + 2 * l.blocks;
  l.width = esmm_round_up(esmm_ceil_div(p->n, ranges), CHUNK);
  l.items = esmm_ceil_div(p->n, l.width);
  l.at_rows = 0;
  l.bytes = align_up((size_t)(p->m * l.room) * sizeof(void *));
  l.at_values = set_aside(&l.bytes, p->m * l.room / 2, sizeof(uint32_t));
  l.at_starts = set_aside(&l.bytes, p->m * (l.blocks + 1), sizeof(uint32_t)); /* [m][blocks + 1] */
  /* [k], and a byte for each k */
  l.at_alive =
      set_aside(&l.bytes, p->k * (int64_t)(sizeof(uint32_t) + 1) + (l.blocks + 1) * (int64_t)sizeof(uint32_t), 1);
  l.at_zeros = set_aside(&l.bytes, l.row_bytes, 1);
  l.at_sums = set_aside(&l.bytes, p->m * l.items * l.width, sizeof(float));
  l.at_lists = l.bytes; /* of each thread: a block of a row as fp32, and its nonzeros */
  l.list_bytes = align_up((size_t)(3 * (PAIR_K + 64)) * sizeof(float));
  l.bytes += (size_t)p->threads * l.list_bytes;
  return l;
}

static bool can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->m >= 2 && p->m <= PAIR_MOST_ROWS)
    return true;
  (void)snprintf(why, why_bytes, "m is %lld, it takes 2 to %d", (long long)p->m, PAIR_MOST_ROWS);
  return false;
}

static void terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units, int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 1;
  const double m = (double)p->m, n = (double)p->w->rows_ld, k = (double)p->k;
  const double blocks = (double)esmm_ceil_div(p->k, PAIR_K);
  units[0] = k * p->sample.strip[ESMM_CPU_HEIGHTS - 1] * n * (double)sizeof(uint16_t);
  units[1] = m * (k * p->sample.element + 0.5 * blocks) * n / (2 * VEC);
  units[2] = m * k;
  units[5] = 1.0;
}

static size_t workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return lay_out(p).bytes;
}

typedef struct pair_job {
  const esmm_problem *p;
  const pair_layout *l;
  const char **rows;    /* [m][room]: of B, two for each pair */
  uint32_t *values;     /* [m][room / 2]: pairs of bf16 */
  uint32_t *starts;     /* [m][blocks + 1], in pairs */
  uint32_t *alive;      /* k's that some row needs, rising */
  uint32_t *alive_end;  /* [blocks]: how many of them up to the end of a block */
  unsigned char *needs; /* [k]: 1 where some row needs it */
  char *zeros, *lists;
  float *sums;
  _Atomic int64_t nonzeros;
} pair_job;

/* A row's nonzeros of a block as pairs. Returns how many pairs. */
static int64_t pair_up(const pair_job *x, int64_t k0, const float *values, const uint32_t *ks, int64_t count,
                       const char **rows, uint32_t *pairs)
{
  const char *b = (const char *)x->p->w->rows + k0 * x->l->row_bytes;
  for (int64_t i = 0; i < count; i++) /* rows of A are listed by several threads */
    __atomic_store_n(x->needs + k0 + ks[i], 1, __ATOMIC_RELAXED);
  for (int64_t i = 0; i < count; i += 2) {
    const bool two = i + 1 < count;
    uint32_t words[2] = {0, 0};
    memcpy(words, values + i, two ? sizeof words : sizeof *words);
    pairs[i / 2] = words[0] >> 16 | (words[1] & 0xffff0000u); /* what bf16 was widened to: upper halves are all */
    rows[i] = b + (int64_t)ks[i] * x->l->row_bytes;
    rows[i + 1] = two ? b + (int64_t)ks[i + 1] * x->l->row_bytes : x->zeros;
  }
  return (count + 1) / 2;
}

static void list_rows(void *arg, int64_t first, int64_t end, int worker)
{
  pair_job *x = arg;
  const esmm_problem *p = x->p;
  const pair_layout *l = x->l;
  float *buffer = (float *)(void *)(x->lists + (size_t)worker * l->list_bytes), *values = buffer + PAIR_K + 64;
  uint32_t *ks = (uint32_t *)(void *)(values + PAIR_K + 64);
  for (int64_t m = first; m < end; m++) {
    uint32_t *starts = x->starts + m * (l->blocks + 1);
    int64_t pairs = 0, nonzeros = 0;
    for (int64_t block = 0; block < l->blocks; block++) {
      const int64_t k0 = block * PAIR_K, width = esmm_min(PAIR_K, p->k - k0);
      int64_t ld;
      const float *row = rows_of_a(&p->a, m, 1, k0, width, buffer, &ld);
      const int64_t count = list_nonzeros(row, width, 0, 1, values, ks);
      starts[block] = (uint32_t)pairs;
      pairs +=
          pair_up(x, k0, values, ks, count, x->rows + m * l->room + 2 * pairs, x->values + m * l->room / 2 + pairs);
      nonzeros += count;
    }
    starts[l->blocks] = (uint32_t)pairs;
    x->nonzeros += nonzeros;
  }
}

/* The k's that some row needs, for prefetching. */
static void find_alive(const pair_job *x)
{
  uint32_t n = 0;
  for (int64_t k = 0; k < x->p->k; k++) {
    x->alive[n] = (uint32_t)k;
    n += x->needs[k];
    x->alive_end[k / PAIR_K] = n;
  }
}

/* sums [CHUNK] += the pairs of a row's list times B's columns from byte `at` on */
ALWAYS void add_pairs(const char *const *rows, const uint32_t *values, int64_t pairs, int64_t at, float *sums)
{
  vec x = vec_zero(), y = vec_zero();
  for (int64_t i = 0; i < pairs; i++) {
    const __m512bh a = (__m512bh)_mm512_set1_epi32((int)values[i]);
    const __m512i q = _mm512_loadu_si512(rows[2 * i] + at), r = _mm512_loadu_si512(rows[2 * i + 1] + at);
    x = _mm512_dpbf16_ps(x, a, (__m512bh)_mm512_unpacklo_epi16(q, r));
    y = _mm512_dpbf16_ps(y, a, (__m512bh)_mm512_unpackhi_epi16(q, r));
  }
  vec_store(sums, vec_add(x, vec_load(sums)));
  vec_store(sums + VEC, vec_add(y, vec_load(sums + VEC)));
}

/* Unpacking leaves columns 0..3, 8..11, 16..19, 24..27 in the low vector and the rest in the high one. */
static void put_in_order(float *sums, int64_t cols)
{
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t j = 0; j < cols; j += 2 * VEC) {
    const vec x = vec_load(sums + j), y = vec_load(sums + j + VEC);
    vec_store(sums + j, _mm512_permutex2var_ps(x, low, y));
    vec_store(sums + j + VEC, _mm512_permutex2var_ps(x, high, y));
  }
}

/* The part of B's row k that a range of columns has. */
static void prefetch_row(const pair_job *x, uint32_t k, int64_t at, int64_t bytes)
{
  const char *row = (const char *)x->p->w->rows + (int64_t)k * x->l->row_bytes + at;
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(row + i, 0, 2);
}

static void multiply_range(const pair_job *x, int64_t j0, int64_t width, float *sums, int64_t ld)
{
  const esmm_problem *p = x->p;
  const pair_layout *l = x->l;
  const int64_t steps = p->m * esmm_ceil_div(width, CHUNK), at0 = j0 * (int64_t)sizeof(uint16_t);
  for (uint32_t i = 0; i < x->alive_end[0]; i++)
    prefetch_row(x, x->alive[i], at0, width * (int64_t)sizeof(uint16_t));
  for (int64_t block = 0; block < l->blocks; block++) {
    const int64_t from = x->alive_end[block], to = x->alive_end[esmm_min(block + 1, l->blocks - 1)];
    int64_t next = from, step = 0;
    for (int64_t j = 0; j < width; j += CHUNK)
      for (int64_t m = 0; m < p->m; m++) {
        const uint32_t *starts = x->starts + m * (l->blocks + 1) + block;
        step++;
        for (; next < from + (to - from) * step / steps; next++)
          prefetch_row(x, x->alive[next], at0, width * (int64_t)sizeof(uint16_t));
        add_pairs(x->rows + m * l->room + 2 * (int64_t)starts[0], x->values + m * l->room / 2 + starts[0],
                  (int64_t)starts[1] - starts[0], at0 + j * (int64_t)sizeof(uint16_t), sums + m * ld + j);
      }
  }
}

static void multiply_items(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const pair_job *x = arg;
  const esmm_problem *p = x->p;
  const pair_layout *l = x->l;
  for (int64_t item = first; item < end; item++) {
    const int64_t j0 = item * l->width, cols = esmm_min(l->width, p->n - j0);
    const int64_t width = esmm_min(l->width, esmm_round_up(cols, 2 * VEC)); /* rows are padded to cache lines */
    float *sums = x->sums + item * p->m * l->width;
    memset(sums, 0, (size_t)(p->m * l->width) * sizeof *sums);
    multiply_range(x, j0, width, sums, l->width);
    for (int64_t m = 0; m < p->m; m++)
      put_in_order(sums + m * l->width, width);
    esmm_finish(p, 0, p->m, j0, cols, sums, l->width);
  }
}

static esmm_status run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch, esmm_stats *stats)
{
  (void)self;
  const pair_layout l = lay_out(p);
  char *at = scratch;
  pair_job x = {.p = p,
                .l = &l,
                .rows = (const char **)(void *)(at + l.at_rows),
                .values = (uint32_t *)(void *)(at + l.at_values),
                .starts = (uint32_t *)(void *)(at + l.at_starts),
                .alive = (uint32_t *)(void *)(at + l.at_alive),
                .zeros = at + l.at_zeros,
                .lists = at + l.at_lists,
                .sums = (float *)(void *)(at + l.at_sums)};
  x.alive_end = x.alive + p->k;
  x.needs = (unsigned char *)(x.alive_end + l.blocks + 1);
  const double start = now_if_timed(p);
  memset(x.zeros, 0, (size_t)l.row_bytes);
  memset(x.needs, 0, (size_t)p->k);
  esmm_for(ctx, p->threads, p->m, 1, list_rows, &x);
  find_alive(&x);
  stats->seconds_extract = now_if_timed(p) - start;
  esmm_for(ctx, p->threads, l.items, 1, multiply_items, &x);
  const double nonzeros = (double)x.nonzeros;
  stats->density_a = nonzeros / ((double)p->m * (double)p->k);
  stats->strip_density_a = stats->joint_density = stats->density_a;
  stats->flop_useful = 2.0 * nonzeros * (double)p->n;
  return ESMM_OK;
}

ESMM_KERNEL(decode_bf16_avx512bf16) = {
    .name = "decode_bf16_avx512bf16",
    .doc = "m of 2 to 16: reads only the rows of B that some row of A needs",
    .backend = &esmm_cpu_backend,
    .reads = ESMM_FORM(ROWS),
    .dtypes = ESMM_DTYPE_BIT(ESMM_BF16),
    .variant_strips = true,
    .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,
    .cpu = ESMM_CPU_AVX2 | ESMM_CPU_AVX512 | ESMM_CPU_AVX512BF16,
    .can_run = can_run,
    .terms = terms,
    .term_names = {"reading of b", "multiply-adds of nonzeros", "scanning of a", "", "", "starting threads"},
    .cost = {ESMM_CPU_COST_READ_B, 8 * ESMM_CPU_COST_STREAMED, COST_PACK, 0.0, 0.0, 2 * ESMM_CPU_COST_START_DECODE},
    .workspace = workspace,
    .run = run,
};
