/*
 * rows.h: for unstructured A, where zeros differ from row to row and even a short strip is full. Included after
 * vec_*.h.
 *
 * Each row of A becomes a list of (value, k) for every stretch of ROW_K k's; the same stretch of ROW_COLS columns of B
 * is copied into a buffer, and every row adds up the rows of that buffer that its list names, in registers:
 *
 *     sums[row][0..63] += value * buffer[k][0..63]        for each entry of the list
 *
 * 64 columns by 192 k's is the balance between two costs: a list that ends too soon (a mispredicted branch and an
 * update of the sums each time), and a buffer that is read from too far away. At 48 KB it is more than most first-level
 * caches hold, so part of it comes from the second level; that costs less than shorter lists would. Copying B costs
 * little because a block of up to 1024 rows shares it, and it lets B stay row-major, as decode wants it.
 *
 * Where the CPU has AVX-512 BF16 (ROW_PAIRS) and both operands are bf16, two entries of a list are taken at a time: B's
 * buffer stays bf16, half as large, and the two rows that a pair names are put side by side in registers. A list with
 * an odd end gets a zero that names a row of zeros.
 *
 * Lists are kept by band of 64 rows, then by stretch, then by row: the order in which they are read.
 */
#include "operands.h"

#include <stdio.h>

#define ROW_K 192
#define ROW_COLS (VEC >= 8 ? 64 : 32)
#define ROW_VECS (ROW_COLS / VEC)
#ifdef ROW_PAIRS
#define ROW_ELEMENT sizeof(uint16_t) /* of B's buffer */
#define ROW_COST ESMM_CPU_COST_ROW_BF16
#else
#define ROW_ELEMENT sizeof(float)
#define ROW_COST ESMM_CPU_COST_ROW
#endif
#define ROW_BUFFER align_up((size_t)(ROW_K + 1) * ROW_COLS * ROW_ELEMENT) /* with a row of zeros, for pairs */
#define BAND 64
#define ROW_BLOCK 1024
#define ROW_MOST_K (1 << 20) /* the lists of a band must have room for every k */

typedef struct row_layout {
  int64_t stretches, bands; /* bands in a block of rows */
  int64_t block_rows, panels, splits;
  int64_t entries; /* room for a band's list */
  size_t at_offsets, at_counts, at_starts, at_threads, thread_bytes, bytes;
} row_layout;

static row_layout rows_layout(const esmm_problem *p)
{
  row_layout l = {.stretches = esmm_ceil_div(p->k, ROW_K), .panels = esmm_ceil_div(p->n, ROW_COLS)};
  /* Lists need room for 8 bytes an element of A: 64 MB where k allows. */
  const int64_t most = esmm_max(BAND, esmm_min(ROW_BLOCK, ((int64_t)8 << 20) / esmm_max(1, p->k)) / BAND * BAND);
  l.block_rows = esmm_min(most, esmm_round_up(p->m, BAND));
  l.bands = l.block_rows / BAND;
  l.splits = esmm_min(l.bands, esmm_ceil_div(3 * p->threads, l.panels));
  l.entries = BAND * (p->k + l.stretches) + 64;
  l.bytes = align_up((size_t)(l.bands * l.entries) * sizeof(float));
  l.at_offsets = set_aside(&l.bytes, l.bands * l.entries, sizeof(uint32_t));
  l.at_counts = set_aside(&l.bytes, l.bands * l.stretches * BAND, 1);
  l.at_starts = set_aside(&l.bytes, l.bands * l.stretches, sizeof(uint32_t));
  l.at_threads = l.bytes;
  const size_t row_buffer = (size_t)BAND * ROW_K * sizeof(float);
  l.thread_bytes = ROW_BUFFER + align_up((size_t)(l.block_rows * ROW_COLS) * sizeof(float)) + align_up(row_buffer);
  l.bytes += (size_t)p->threads * l.thread_bytes;
  return l;
}

static bool rows_can_run(const esmm_kernel *self, const esmm_problem *p, char *why, size_t why_bytes)
{
  (void)self;
  if (p->k > ROW_MOST_K) {
    (void)snprintf(why, why_bytes, "k is %lld, row lists take %d at most", (long long)p->k, ROW_MOST_K);
    return false;
  }
  return true;
}

static void rows_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                       int64_t *variant)
{
  (void)self;
  (void)cost;
  *variant = 1;
  const row_layout l = rows_layout(p);
  const double panels = (double)l.panels, blocks = (double)esmm_ceil_div(p->m, l.block_rows);
  const double m = (double)p->m, k = (double)p->k;
  units[0] = m * k * p->sample.element * panels;
  units[1] = m * (double)l.stretches * panels;
  units[2] = m * k;
  units[3] = k * panels * ROW_COLS * blocks;
  units[4] = m * panels * ROW_COLS * (esmm_is_plain(p) ? 1.0 : 4.0);
  units[5] = 1.0;
}

static size_t rows_workspace(const esmm_kernel *self, const esmm_problem *p)
{
  (void)self;
  return rows_layout(p).bytes;
}

#ifdef ROW_PAIRS

/* A row's list in pairs of bf16: half as many values, and offsets in twos. Returns the entries with a zero behind an
   odd end. The values are what bf16 was widened to, so their upper halves are all of them. */
ALWAYS int64_t pair_list(float *values, uint32_t *offsets, int64_t count)
{
  uint32_t *pairs = (uint32_t *)(void *)values;
  if (count % 2) {
    values[count] = 0.0f;
    offsets[count++] = (uint32_t)(ROW_K * ROW_COLS * ROW_ELEMENT);
  }
  for (int64_t i = 0; i < count; i += 2) {
    uint32_t words[2];
    memcpy(words, values + i, sizeof words);
    words[0] = words[0] >> 16 | (words[1] & 0xffff0000u);
    memcpy(pairs + i, words, sizeof *pairs);
  }
  return count;
}

/*
 * The stretch of ROW_COLS columns of B as bf16 [width][ROW_COLS], zero past its last column, and a row of zeros. 32
 * columns stand so that, of two rows, unpacking low and then high halves of 128 bits gives pairs in their order.
 */
static void copy_b(const esmm_weights *w, int64_t k0, int64_t width, int64_t j0, uint16_t *to)
{
  uint16_t place[32];
  for (int i = 0; i < 32; i++)
    place[i % 16 / 4 * 8 + i / 16 * 4 + i % 4] = (uint16_t)i;
  const __m512i places = _mm512_loadu_si512(place);
  const int64_t cols = esmm_min(ROW_COLS, w->rows_ld - j0); /* 32 or 64: rows are padded to cache lines */
  const uint16_t *from = (const uint16_t *)w->rows + k0 * w->rows_ld + j0;
  memset(to + ROW_K * ROW_COLS, 0, ROW_COLS * sizeof *to);
  for (int64_t k = 0; k < width; k++, to += ROW_COLS, from += w->rows_ld)
    for (int64_t j = 0; j < ROW_COLS; j += 32)
      _mm512_storeu_si512(to + j, j < cols ? _mm512_permutexvar_epi16(places, _mm512_loadu_si512(from + j))
                                           : _mm512_setzero_si512());
}

/* sums [rows][ROW_COLS] (+)= the lists of one band's stretch times the buffer of B */
static void add_band(const float *values, const uint32_t *offsets, const uint8_t *counts, int64_t rows,
                     const uint16_t *b, float *sums, bool first)
{
  for (int64_t r = 0; r < rows; r++, sums += ROW_COLS) {
    vec x[ROW_VECS];
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; v++)
      x[v] = vec_zero();
    for (const uint32_t *end = offsets + counts[r]; offsets < end; offsets += 2, values += 2) {
      int pair;
      memcpy(&pair, values, sizeof pair);
      const __m512bh y = (__m512bh)_mm512_set1_epi32(pair);
      const char *even = (const char *)b + offsets[0], *odd = (const char *)b + offsets[1];
#pragma GCC unroll 2
      for (int v = 0; v < ROW_VECS; v += 2) {
        const __m512i p = _mm512_loadu_si512(even + v * 32), q = _mm512_loadu_si512(odd + v * 32);
        x[v] = _mm512_dpbf16_ps(x[v], y, (__m512bh)_mm512_unpacklo_epi16(p, q));
        x[v + 1] = _mm512_dpbf16_ps(x[v + 1], y, (__m512bh)_mm512_unpackhi_epi16(p, q));
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < ROW_VECS; v++)
      vec_store(sums + v * VEC, first ? x[v] : vec_add(x[v], vec_load(sums + v * VEC)));
  }
}

typedef uint16_t row_element;

#else

ALWAYS int64_t pair_list(const float *values, const uint32_t *offsets, int64_t count)
{
  (void)values;
  (void)offsets;
  return count;
}

/* The stretch of ROW_COLS columns of B as fp32 [width][ROW_COLS], zero past its last column. */
static void copy_b(const esmm_weights *w, int64_t k0, int64_t width, int64_t j0, float *to)
{
  const int64_t cols = esmm_min(ROW_COLS, w->rows_ld - j0);
  for (int64_t k = 0; k < width; k++, to += ROW_COLS) {
    const int64_t at = (k0 + k) * w->rows_ld + j0;
    widen(w->rows, w->dtype, at, cols, to);
    if (cols < ROW_COLS)
      memset(to + cols, 0, (size_t)(ROW_COLS - cols) * sizeof *to);
  }
}

/* sums [rows][ROW_COLS] (+)= the lists of one band's stretch times the buffer of B */
static void add_band(const float *values, const uint32_t *offsets, const uint8_t *counts, int64_t rows, const float *b,
                     float *sums, bool first)
{
  for (int64_t r = 0; r < rows; r++, sums += ROW_COLS) {
    vec x[ROW_VECS];
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECS; v++)
      x[v] = vec_zero();
    for (const uint32_t *end = offsets + counts[r]; offsets < end; offsets++, values++) {
      const vec y = vec_all(values);
      const float *from = (const float *)((const char *)b + *offsets);
#pragma GCC unroll 16
      for (int v = 0; v < ROW_VECS; v++)
        x[v] = vec_fma(y, vec_load(from + v * VEC), x[v]);
    }
#pragma GCC unroll 16
    for (int v = 0; v < ROW_VECS; v++)
      vec_store(sums + v * VEC, first ? x[v] : vec_add(x[v], vec_load(sums + v * VEC)));
  }
}

typedef float row_element;

#endif

/* The lists of one band of rows, all stretches. Returns its nonzeros. */
static int64_t list_band(const esmm_problem *p, const row_layout *l, int64_t row0, int64_t rows, float *values,
                         uint32_t *offsets, uint8_t *counts, uint32_t *starts, float *buffer)
{
  int64_t n = 0, nonzeros = 0;
  for (int64_t s = 0; s < l->stretches; s++) {
    const int64_t k0 = s * ROW_K, width = esmm_min(ROW_K, p->k - k0);
    int64_t ld;
    const float *a = rows_of_a(&p->a, row0, rows, k0, width, buffer, &ld);
    starts[s] = (uint32_t)n;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t count = list_nonzeros(a + r * ld, width, 0, ROW_COLS * ROW_ELEMENT, values + n, offsets + n);
      const int64_t listed = pair_list(values + n, offsets + n, count);
      counts[s * BAND + r] = (uint8_t)listed;
      nonzeros += count;
      n += listed;
    }
  }
  return nonzeros;
}

typedef struct row_job {
  const esmm_problem *p;
  const row_layout *l;
  float *values;
  uint32_t *offsets, *starts;
  uint8_t *counts;
  char *own;                       /* thread_bytes of each worker: B's buffer, sums, rows of A as fp32 */
  int64_t row0, block_rows, bands; /* the block of rows */
  _Atomic int64_t nonzeros;
} row_job;

static float *worker_sums(const row_job *x, int worker)
{
  return (float *)(void *)(x->own + (size_t)worker * x->l->thread_bytes + ROW_BUFFER);
}

static void list_bands(void *arg, int64_t first, int64_t end, int worker)
{
  row_job *x = arg;
  const row_layout *l = x->l;
  float *buffer = worker_sums(x, worker) + align_up((size_t)(l->block_rows * ROW_COLS) * sizeof(float)) / sizeof(float);
  int64_t nonzeros = 0;
  for (int64_t i = first; i < end; i++)
    nonzeros += list_band(x->p, l, x->row0 + i * BAND, esmm_min(BAND, x->block_rows - i * BAND),
                          x->values + i * l->entries, x->offsets + i * l->entries, x->counts + i * l->stretches * BAND,
                          x->starts + i * l->stretches, buffer);
  x->nonzeros += nonzeros;
}

/* An item is ROW_COLS columns of some of the block's bands. */
static void multiply_item(const row_job *x, int64_t item, row_element *b, float *sums)
{
  const esmm_problem *p = x->p;
  const row_layout *l = x->l;
  const int64_t j0 = item / l->splits * ROW_COLS, split = item % l->splits;
  const int64_t band0 = x->bands * split / l->splits, band1 = x->bands * (split + 1) / l->splits;
  const int64_t first_row = band0 * BAND, rows = esmm_min(band1 * BAND, x->block_rows) - first_row;
  for (int64_t s = 0; s < l->stretches && rows > 0; s++) {
    copy_b(p->w, s * ROW_K, esmm_min(ROW_K, p->k - s * ROW_K), j0, b);
    for (int64_t i = band0; i < band1; i++) {
      const int64_t at = i * l->entries + x->starts[i * l->stretches + s];
      add_band(x->values + at, x->offsets + at, x->counts + (i * l->stretches + s) * BAND,
               esmm_min(BAND, x->block_rows - i * BAND), b, sums + (i - band0) * BAND * ROW_COLS, s == 0);
    }
  }
  if (rows > 0)
    esmm_finish(p, x->row0 + first_row, rows, j0, esmm_min(ROW_COLS, p->n - j0), sums, ROW_COLS);
}

static void multiply_items(void *arg, int64_t first, int64_t end, int worker)
{
  const row_job *x = arg;
  row_element *b = (row_element *)(void *)(x->own + (size_t)worker * x->l->thread_bytes);
  for (int64_t item = first; item < end; item++)
    multiply_item(x, item, b, worker_sums(x, worker));
}

static esmm_status rows_run(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch,
                            esmm_stats *stats)
{
  (void)self;
  const row_layout l = rows_layout(p);
  char *at = scratch;
  row_job x = {.p = p,
               .l = &l,
               .values = scratch,
               .offsets = (uint32_t *)(void *)(at + l.at_offsets),
               .starts = (uint32_t *)(void *)(at + l.at_starts),
               .counts = (uint8_t *)at + l.at_counts,
               .own = at + l.at_threads};
  double extract = 0.0;
  for (; x.row0 < p->m; x.row0 += l.block_rows) {
    x.block_rows = esmm_min(l.block_rows, p->m - x.row0);
    x.bands = esmm_ceil_div(x.block_rows, BAND);
    const double start = now_if_timed(p);
    esmm_for(ctx, p->threads, x.bands, 1, list_bands, &x);
    extract += now_if_timed(p) - start;
    esmm_for(ctx, p->threads, l.panels * l.splits, 1, multiply_items, &x);
  }
  stats->seconds_extract = extract;
  stats->density_a = (double)x.nonzeros / ((double)p->m * (double)p->k);
  stats->strip_density_a = stats->joint_density = stats->density_a;
  stats->flop_useful = 2.0 * (double)x.nonzeros * (double)p->n;
  return ESMM_OK;
}

/* The fields that kernels of all instruction sets share. */
#define ROWS_KERNEL                                                                                          \
  .cost = {ROW_COST,                                                                                         \
           ESMM_CPU_COST_STRETCH,                                                                            \
           2 * COST_PACK,                                                                                    \
           ESMM_CPU_COST_REPACK,                                                                             \
           ESMM_CPU_COST_UPDATE,                                                                             \
           2 * ESMM_CPU_COST_START},                                                                         \
  .doc = "every row of A skips its own zeros: for unstructured activations", .backend = &esmm_cpu_backend,   \
  .reads = ESMM_FORM(ROWS), .variant_strips = true, .flags = ESMM_KERNEL_DETERMINISTIC | ESMM_KERNEL_SKIPS,  \
  .can_run = rows_can_run, .terms = rows_terms, .workspace = rows_workspace, .run = rows_run,                \
  .term_names = {                                                                                            \
      "multiply-adds of nonzeros", "starting of row lists", "scanning of a", "copying of b", "storing of c", \
      "starting threads"}
