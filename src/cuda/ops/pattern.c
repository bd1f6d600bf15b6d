/*
 * pattern.c: bitmaps of a matrix on the GPU. It extracts strips of 32 rows, which the host ORs into taller ones; strips
 * of other heights come from a copy of the matrix in host memory. Patterns of C, which products fill, stay on the GPU.
 */
#include "cuda/cuda.h"

#include <pthread.h>

/* Its bitmaps of 32 rows, [strips][words] of 32 bits each, ORed into p's taller strips. */
static void fold_strips(const uint32_t *bits, int64_t strips, int64_t words, esmm_pattern *p)
{
  const int64_t height = p->strip_rows / ESMM_STRIP;
  const uint64_t last = p->k % 64 ? ((uint64_t)1 << (p->k % 64)) - 1 : UINT64_MAX;
  memset(p->bits, 0, (size_t)(p->strips * p->words) * sizeof *p->bits);
  for (int64_t s = 0; s < strips; s++) {
    uint64_t *to = p->bits + s / height * p->words;
    for (int64_t w = 0; w < words && w / 2 < p->words; w++)
      to[w / 2] |= (uint64_t)bits[s * words + w] << (32 * (w % 2));
  }
  for (int64_t s = 0; s < p->strips; s++) {
    uint64_t *to = p->bits + s * p->words;
    to[p->words - 1] &= last;
    for (int64_t w = 0; w < p->words; w++)
      p->set += __builtin_popcountll(to[w]);
  }
}

static esmm_status read_strips(esmm_ctx *ctx, const esmm_matrix *a, esmm_strips *strips, size_t bytes, uint32_t *bits)
{
  CUdeviceptr memory;
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_scratch(ctx, bytes, ctx->stream, &memory);
  if (status == ESMM_OK) {
    strips->bits = memory;
    status = esmm_cuda_extract(ctx, a, strips, false, (esmm_selector){0}, ctx->stream);
  }
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, bits, memory, bytes, ctx->stream);
  return esmm_cuda_end(ctx, ctx->stream, status);
}

/* p was allocated for a; fills it. */
static esmm_status extract_on_gpu(esmm_ctx *ctx, const esmm_matrix *a, esmm_pattern *p)
{
  const int64_t k_padded = esmm_cuda_k_padded(p->k), words = k_padded / 32;
  esmm_strips strips = {.strips = esmm_ceil_div(p->rows, ESMM_STRIP), .k_padded = k_padded};
  if (strips.strips == 0 || words == 0)
    return ESMM_OK;
  const size_t bytes = (size_t)strips.strips * (size_t)words * sizeof(uint32_t);
  uint32_t *bits = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!bits)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "out of memory: %zu bytes for bitmaps", bytes);
  const esmm_status status = read_strips(ctx, a, &strips, bytes, bits);
  if (status == ESMM_OK)
    fold_strips(bits, strips.strips, words, p);
  esmm_mem_free(&ctx->allocator, bits, bytes);
  return status;
}

esmm_status esmm_cuda_pattern(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern)
{
  esmm_status status;
  if (a->place == ESMM_HOST)
    return esmm_pattern_host(ctx, a, strip_rows, pattern);
  if (strip_rows % ESMM_STRIP != 0) {
    esmm_matrix twin;
    status = esmm_host_twin_read(ctx, a, &twin);
    if (status != ESMM_OK)
      return status;
    status = esmm_pattern_host(ctx, &twin, strip_rows, pattern);
    esmm_host_twin_free(ctx, &twin);
    return status;
  }
  esmm_pattern *p = NULL;
  status = esmm_pattern_alloc(ctx, a->rows, a->cols, strip_rows, &p);
  if (status != ESMM_OK)
    return status;
  status = extract_on_gpu(ctx, a, p);
  if (status != ESMM_OK) {
    esmm_pattern_free(p);
    return status;
  }
  *pattern = p;
  return ESMM_OK;
}

/* ---- patterns of C, which stay on the GPU ---- */

/*
 * Their memory. cuMemAlloc and cuMemFree wait for the GPU, so a context keeps its freed patterns' memory for its next
 * ones. Its calls run in order on the GPU, so a reused buffer is written only after its previous user has finished. The
 * shelf is shared by the context and its patterns; any of them may be the last to go.
 */
#define SHELF 4 /* pieces of memory that are kept */

typedef struct piece {
  CUdeviceptr memory;
  size_t bytes;
  CUevent filled; /* recorded behind the product that fills it */
  /* The number of set bits, in host memory that the GPU writes to; NULL: none. The previous owner's count may still be
     running: count->ready holds the counted owner's number. */
  esmm_pattern_bit_count *count;
  CUdeviceptr count_at;
  uint32_t number;
} piece;

typedef struct shelf {
  esmm_allocator allocator;
  pthread_mutex_t lock;
  int users;
  bool open; /* its context is there */
  int ordinal;
  piece kept[SHELF];
} shelf;

/* esmm_pattern.device */
typedef struct placed {
  shelf *from;
  piece it;
  bool counted; /* the product counts the bits itself */
} placed;

static void free_piece(int ordinal, const piece *it)
{
  esmm_cuda_event_free_at(ordinal, it->filled); /* the memory holds the device */
  esmm_cuda_unpin_at(ordinal, it->count);
  esmm_cuda_free_at(ordinal, it->memory);
}

/* The caller was a user of it. */
static void leave_shelf(shelf *s)
{
  (void)pthread_mutex_lock(&s->lock);
  const bool last = --s->users == 0;
  (void)pthread_mutex_unlock(&s->lock);
  if (!last)
    return;
  const esmm_allocator allocator = s->allocator;
  (void)pthread_mutex_destroy(&s->lock);
  esmm_mem_free(&allocator, s, sizeof *s);
}

static void close_shelf(void *object)
{
  shelf *s = object;
  piece kept[SHELF];
  (void)pthread_mutex_lock(&s->lock);
  s->open = false;
  memcpy(kept, s->kept, sizeof kept);
  (void)pthread_mutex_unlock(&s->lock);
  for (int i = 0; i < SHELF; i++)
    if (kept[i].memory)
      free_piece(s->ordinal, &kept[i]);
  leave_shelf(s);
}

static const char key; /* of a context's shelf */

/* The context's, made when it is first asked for. */
static esmm_status find_shelf(esmm_ctx *ctx, shelf **out)
{
  shelf *s = esmm_cuda_attached(ctx, &key);
  *out = s;
  if (s)
    return ESMM_OK;
  s = esmm_mem_alloc(&ctx->allocator, sizeof *s);
  if (!s)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a pattern");
  *s = (shelf){.allocator = ctx->allocator, .users = 1, .open = true, .ordinal = ctx->ordinal};
  (void)pthread_mutex_init(&s->lock, NULL);
  const esmm_status status = esmm_cuda_attach(ctx, &key, s, close_shelf);
  if (status != ESMM_OK) {
    leave_shelf(s);
    return status;
  }
  *out = s;
  return ESMM_OK;
}

/* The smallest that is large enough; false where there is none. */
static bool take_from(shelf *s, size_t bytes, piece *out)
{
  int best = -1;
  (void)pthread_mutex_lock(&s->lock);
  for (int i = 0; i < SHELF; i++)
    if (s->kept[i].memory && s->kept[i].bytes >= bytes && (best < 0 || s->kept[i].bytes < s->kept[best].bytes))
      best = i;
  if (best >= 0) {
    *out = s->kept[best];
    s->kept[best] = (piece){0};
  }
  (void)pthread_mutex_unlock(&s->lock);
  return best >= 0;
}

/* Into a free place, or in place of a smaller one. What has no place is left in *it; memory 0: nothing is. */
static void put_on(shelf *s, piece *it)
{
  (void)pthread_mutex_lock(&s->lock);
  int at = 0;
  for (int i = 1; i < SHELF; i++)
    if (s->kept[i].bytes < s->kept[at].bytes)
      at = i;
  if (s->open && s->kept[at].bytes < it->bytes) {
    const piece out = s->kept[at];
    s->kept[at] = *it;
    *it = out;
  }
  (void)pthread_mutex_unlock(&s->lock);
}

static esmm_status make_piece(esmm_ctx *ctx, size_t bytes, piece *out)
{
  *out = (piece){.bytes = bytes};
  esmm_status status = esmm_cuda_alloc(ctx, bytes, &out->memory);
  if (status == ESMM_OK)
    status = esmm_cuda_event_create(ctx, &out->filled);
  if (status != ESMM_OK) {
    free_piece(ctx->ordinal, out);
    return status;
  }
  void *pinned;
  if (esmm_cuda_pin(sizeof *out->count, &pinned, &out->count_at)) {
    out->count = pinned;
    out->count->ready = 0;
  }
  return ESMM_OK;
}

/* Its bits, and the sums behind them. */
static size_t bytes_of(const esmm_pattern *p)
{
  return (size_t)(p->strips * p->words) * sizeof(uint64_t) + ESMM_TALLY_SUMS;
}

esmm_status esmm_cuda_pattern_place(esmm_ctx *ctx, esmm_pattern *pattern)
{
  const size_t bytes = bytes_of(pattern);
  placed *p = esmm_mem_alloc(&ctx->allocator, sizeof *p);
  if (!p)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for a pattern");
  *p = (placed){0};
  esmm_status status = find_shelf(ctx, &p->from);
  if (status == ESMM_OK && !take_from(p->from, bytes, &p->it))
    status = make_piece(ctx, bytes, &p->it);
  if (status != ESMM_OK) {
    esmm_mem_free(&ctx->allocator, p, sizeof *p);
    return status;
  }
  p->it.number += p->it.number == UINT32_MAX ? 2 : 1; /* never 0 */
  (void)pthread_mutex_lock(&p->from->lock);
  p->from->users++;
  (void)pthread_mutex_unlock(&p->from->lock);
  pattern->device = p;
  return ESMM_OK;
}

int64_t esmm_cuda_pattern_zeros(const esmm_pattern *pattern)
{
  return (int64_t)(bytes_of(pattern) / sizeof(uint32_t));
}

int64_t esmm_cuda_pattern_fold(const esmm_pattern *pattern, int64_t height)
{
  return height % pattern->strip_rows == 0 ? height / pattern->strip_rows : 1;
}

/* Where sums of the bits lie. */
static CUdeviceptr sums_of(const esmm_pattern *pattern)
{
  const placed *p = pattern->device;
  return p->it.memory + bytes_of(pattern) - ESMM_TALLY_SUMS;
}

esmm_cuda_pattern_sums esmm_cuda_pattern_adds(const esmm_pattern *pattern)
{
  const placed *p = pattern->device;
  return (esmm_cuda_pattern_sums){
      .sums = sums_of(pattern), .count = p->it.count ? p->it.count_at : 0, .number = p->it.number};
}

void esmm_cuda_pattern_note_counted(esmm_pattern *pattern)
{
  placed *p = pattern->device;
  p->counted = true;
}

/* The product that takes it as its a_pattern chooses its kernel by these counts (product/recall.c). */
static esmm_status count(esmm_ctx *ctx, const esmm_pattern *pattern, CUstream stream)
{
  const placed *p = pattern->device;
  if (!p->it.count || p->counted)
    return ESMM_OK;
  const esmm_tally_count_params params = {
      .bits = p->it.memory,
      .strips = pattern->strips,
      .words = pattern->words,
      .fold = {esmm_cuda_pattern_fold(pattern, ESMM_STRIP), esmm_cuda_pattern_fold(pattern, ESMM_TILE)},
      .sums = sums_of(pattern),
      .out = p->it.count_at,
      .ready = p->it.number};
  return esmm_cuda_tally_count(ctx, &params, stream);
}

esmm_status esmm_cuda_pattern_placed(esmm_ctx *ctx, const esmm_pattern *pattern, CUstream stream)
{
  const placed *p = pattern->device;
  const esmm_status status = count(ctx, pattern, stream);
  return status == ESMM_OK ? esmm_cuda_event_record(ctx, p->it.filled, stream) : status;
}

const esmm_pattern_bit_count *esmm_cuda_pattern_count(const esmm_pattern *pattern, uint32_t *number)
{
  const placed *p = pattern->device;
  *number = p ? p->it.number : 0;
  return p ? p->it.count : NULL;
}

CUdeviceptr esmm_cuda_pattern_address(const esmm_pattern *pattern)
{
  const placed *p = pattern->device;
  return p ? p->it.memory : 0;
}

/* Another context may have filled it, on a stream not ordered with this one's. */
esmm_status esmm_cuda_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips,
                                   uint64_t *bits)
{
  const placed *p = pattern->device;
  const size_t from = (size_t)(strip * pattern->words) * sizeof *bits,
               bytes = (size_t)(strips * pattern->words) * sizeof *bits;
  if (!p || bytes == 0)
    return ESMM_OK; /* C is empty */
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_refuse_capture(ctx, "reading a pattern");
  if (status == ESMM_OK)
    status = esmm_cuda_event_wait(ctx, p->it.filled);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, bits, p->it.memory + from, bytes, ctx->stream);
  return esmm_cuda_end(ctx, ctx->stream, status);
}

void esmm_cuda_pattern_free(esmm_pattern *pattern)
{
  placed *p = pattern->device;
  if (!p)
    return;
  put_on(p->from, &p->it);
  if (p->it.memory)
    free_piece(pattern->ordinal, &p->it);
  leave_shelf(p->from);
  const esmm_allocator allocator = pattern->allocator;
  esmm_mem_free(&allocator, p, sizeof *p);
}
