/*
 * narrow.c: lists of the blocks in a B of cells, 32 k's by 32 columns each, for a caller's blocks that are narrower
 * than a cell.
 *
 * A tile has eight times 32 columns, and reads a chunk of A wherever one of them has a block. So those go together that
 * have blocks at the same k's: the longest that is left first, then, seven times, what shares most k's with what the
 * tile has so far. Of blocks in random places this saves 10 to 15 % of A's chunks, of others more.
 *
 * The blocks themselves are kept once more, in the order in which lists name them: those of an entry come by one copy.
 */
#include "cuda/ops/blocks.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN 1024
#define SIDE ESMM_NARROW_SIDE
#define COLS ESMM_NARROW_COLS
#define BLOCK_BYTES (SIDE * SIDE * 2)
#define WINDOW 512 /* columns that are looked at for a place: what all take grows with the square of their number */

/* What of it is counted on the host, in one allocation. */
typedef struct tables {
  int64_t columns, chunks, words, tiles;
  uint64_t *bits;    /* [columns][words]: which chunks have a block */
  uint64_t *joined;  /* [words]: of what a tile has so far */
  uint32_t *lengths; /* [columns] */
  uint32_t *from;    /* [chunks + 1]: where in `left` columns of that length begin */
  uint32_t *left;    /* [columns], longest first */
  uint32_t *places;  /* [tiles][COLS] */
  esmm_cuda_tile_column *by_length;
  unsigned char *flags; /* [columns][chunks] */
  void *memory;
  size_t bytes;
} tables;

static esmm_status alloc_tables(esmm_ctx *ctx, const esmm_weights *w, tables *t)
{
  *t = (tables){.columns = esmm_ceil_div(w->n, SIDE), .chunks = esmm_ceil_div(w->k, SIDE)};
  t->words = esmm_ceil_div(t->chunks, 64);
  t->tiles = esmm_ceil_div(t->columns, COLS);
  const size_t columns = (size_t)t->columns, words = (size_t)t->words, tiles = (size_t)t->tiles;
  t->bytes = (columns * words + words) * sizeof *t->bits + tiles * sizeof *t->by_length +
             (2 * columns + (size_t)t->chunks + 1 + tiles * COLS) * sizeof *t->left +
             columns * (size_t)t->chunks; /* B has more elements than each of these */
  t->memory = esmm_mem_alloc(&ctx->allocator, t->bytes);
  if (!t->memory)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", t->bytes);
  t->bits = t->memory;
  t->joined = t->bits + columns * words;
  t->by_length = (void *)(t->joined + words);
  t->lengths = (void *)(t->by_length + tiles);
  t->left = t->lengths + columns;
  t->from = t->left + columns;
  t->places = t->from + t->chunks + 1;
  t->flags = (void *)(t->places + tiles * COLS);
  return ESMM_OK;
}

/* ---- which columns go together ---- */

static void take_bits(tables *t)
{
  memset(t->bits, 0, (size_t)(t->columns * t->words) * sizeof *t->bits);
  for (int64_t i = 0; i < t->columns; i++) {
    t->lengths[i] = 0;
    for (int64_t chunk = 0; chunk < t->chunks; chunk++)
      if (t->flags[i * t->chunks + chunk]) {
        t->bits[i * t->words + chunk / 64] |= (uint64_t)1 << (chunk % 64);
        t->lengths[i]++;
      }
  }
}

/* left: by length, and those of one length in their order. */
static void sort_columns(tables *t)
{
  uint32_t *from = t->from;
  memset(from, 0, (size_t)(t->chunks + 1) * sizeof *from);
  for (int64_t i = 0; i < t->columns; i++)
    from[t->lengths[i]]++;
  for (int64_t length = t->chunks, before = 0; length >= 0; length--) {
    const uint32_t count = from[length];
    from[length] = (uint32_t)before;
    before += count;
  }
  for (int64_t i = 0; i < t->columns; i++)
    t->left[from[t->lengths[i]]++] = (uint32_t)i;
}

/* The place among the first `count` that are left of who shares most with `joined`. */
static int64_t nearest(const tables *t, const uint32_t *left, int64_t count)
{
  int64_t best = 0, most = -1;
  for (int64_t i = 0; i < count && most < t->lengths[left[i]]; i++) { /* the others are too short to share more */
    const uint64_t *bits = t->bits + (int64_t)left[i] * t->words;
    int64_t shared = 0;
    for (int64_t j = 0; j < t->words; j++)
      shared += __builtin_popcountll(bits[j] & t->joined[j]);
    if (shared > most) {
      most = shared;
      best = i;
    }
  }
  return best;
}

static void join_columns(tables *t)
{
  uint32_t *left = t->left, *place = t->places;
  int64_t count = t->columns;
  for (int64_t i = 0; i < t->tiles * COLS; i++, place++) {
    if (i % COLS == 0)
      memset(t->joined, 0, (size_t)t->words * sizeof *t->joined);
    if (count == 0) {
      *place = ESMM_NO_CELL;
      continue;
    }
    const int64_t at = i % COLS == 0 ? 0 : nearest(t, left, esmm_min(count, WINDOW));
    *place = left[at];
    for (int64_t j = 0; j < t->words; j++)
      t->joined[j] |= t->bits[(int64_t)*place * t->words + j];
    memmove(left + 1, left, (size_t)at * sizeof *left);
    left++;
    count--;
  }
}

static int64_t shared_of(const tables *t, uint32_t x, uint32_t y)
{
  int64_t shared = 0;
  for (int64_t i = 0; i < t->words; i++)
    shared += __builtin_popcountll(t->bits[(int64_t)x * t->words + i] & t->bits[(int64_t)y * t->words + i]);
  return shared;
}

/* Within a tile, two by two those that share most: they are multiplied together where both have a block. */
static void pair_columns(const tables *t, uint32_t *places)
{
  for (int i = 0; i < COLS; i += 2) {
    int64_t most = -1;
    for (int j = i + 1; j < COLS && places[j] != ESMM_NO_CELL; j++) {
      const int64_t shared = shared_of(t, places[i], places[j]);
      if (shared > most) {
        const uint32_t nearest_one = places[j];
        places[j] = places[i + 1];
        places[i + 1] = nearest_one;
        most = shared;
      }
    }
  }
}

/* ---- lists ---- */

/* Which of a tile's eight have a block of that chunk. */
static uint32_t alive_at(const tables *t, const uint32_t *places, int64_t chunk)
{
  uint32_t alive = 0;
  for (int i = 0; i < COLS; i++)
    if (places[i] != ESMM_NO_CELL)
      alive |= (uint32_t)(t->bits[(int64_t)places[i] * t->words + chunk / 64] >> (chunk % 64) & 1) << i;
  return alive;
}

/* Where a block of 32 columns and a chunk of 32 k's lies, as params.h has it. */
static uint32_t block_at(const esmm_cuda_blocks *b, const uint32_t *cells, uint32_t column, int64_t chunk)
{
  const int64_t of_cell = b->cell_k / SIDE, panel = column / (ESMM_CELL_COLS / SIDE);
  const uint32_t cell = cells[panel * b->chunks + chunk / of_cell];
  const uint32_t line = cell * (uint32_t)b->cell_k + (uint32_t)(chunk % of_cell) * SIDE;
  return line << 1 | column % (ESMM_CELL_COLS / SIDE);
}

/* The blocks of an entry, from what its chunks have of a tile's columns: those of one half of them, then the others. */
static void fill_blocks(const esmm_cuda_blocks *b, const uint32_t *cells, const uint32_t *places, const uint32_t *alive,
                        int chunks, esmm_narrow_entry *entry, uint32_t *blocks)
{
  uint32_t count = 0, lower = 0;
  for (int half = 0; half < 2; half++) {
    for (int i = 0; i < chunks; i++)
      for (int j = 0; j < COLS / 2; j++)
        if (alive[i] >> (half * (COLS / 2) + j) & 1) {
          entry->alive |= 1u << (16 * half + 4 * i + j);
          blocks[count++] = block_at(b, cells, places[half * (COLS / 2) + j], entry->chunk[i]);
        }
    if (half == 0)
      lower = count;
  }
  entry->counts = lower | count << 8 | (uint32_t)chunks << 16;
}

/* What is written of the lists: entries, and where each of their blocks lies. */
typedef struct written {
  esmm_narrow_entry *entries;
  uint32_t *blocks;
  int64_t entry_count, block_count;
} written;

/* A tile's entries, each as full as its chunks and blocks allow; returns how many. They are written to `out` where it
   is not NULL, and counted in n where it is. */
static int64_t fill_tile(const esmm_cuda_blocks *b, const uint32_t *cells, const tables *t, int64_t tile, written *out,
                         esmm_cuda_narrow *n)
{
  const uint32_t *places = t->places + tile * COLS;
  int64_t count = 0, chunk = 0;
  for (;;) {
    esmm_narrow_entry entry = {0};
    uint32_t alive[ESMM_NARROW_CHUNKS];
    int chunks = 0, blocks = 0;
    for (; chunk < t->chunks; chunk++) {
      const uint32_t here = alive_at(t, places, chunk);
      if (!here)
        continue;
      if (chunks == ESMM_NARROW_CHUNKS || blocks + __builtin_popcount(here) > ESMM_NARROW_BLOCKS)
        break;
      blocks += __builtin_popcount(here);
      alive[chunks] = here;
      entry.chunk[chunks++] = (uint32_t)chunk;
    }
    if (chunks == 0)
      return count;
    if (out) {
      entry.block = (uint32_t)out->block_count;
      fill_blocks(b, cells, places, alive, chunks, &entry, out->blocks + out->block_count);
      out->entries[out->entry_count++] = entry;
      out->block_count += blocks;
    } else {
      n->chunks += chunks;
      n->blocks += blocks;
    }
    count++;
  }
}

/* How many entries there are, and what is in them. */
static void count_entries(const esmm_cuda_blocks *b, const tables *t, esmm_cuda_narrow *n)
{
  for (int64_t tile = 0; tile < t->tiles; tile++)
    n->entry_count += fill_tile(b, NULL, t, tile, NULL, n);
}

static void fill_entries(const esmm_cuda_blocks *b, const uint32_t *cells, tables *t, written *out)
{
  for (int64_t tile = 0; tile < t->tiles; tile++) {
    const uint32_t first = (uint32_t)out->entry_count;
    const int64_t count = fill_tile(b, cells, t, tile, out, NULL);
    t->by_length[tile] = (esmm_cuda_tile_column){.tile = (uint32_t)tile, .first = first, .entries = (uint32_t)count};
  }
  qsort(t->by_length, (size_t)t->tiles, sizeof *t->by_length, esmm_cuda_longer_first);
}

/* ---- to the device ---- */

static esmm_status upload(esmm_ctx *ctx, const tables *t, const written *lists, esmm_cuda_blocks *b, CUstream stream)
{
  esmm_cuda_narrow *n = &b->narrow;
  const struct {
    CUdeviceptr *to;
    const void *from;
    size_t bytes;
  } all[] = {{&n->values, NULL, (size_t)n->blocks * BLOCK_BYTES},
             {&n->entries, lists->entries, (size_t)n->entry_count * sizeof *lists->entries},
             {&n->columns, t->by_length, (size_t)t->tiles * sizeof *t->by_length},
             {&n->places, t->places, (size_t)(t->tiles * COLS) * sizeof *t->places}};
  size_t bytes = 0, at[sizeof all / sizeof *all];
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (!esmm_cuda_reserve(&bytes, all[i].bytes, ALIGN, &at[i]))
      return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "lists of %lld blocks would not fit in memory", (long long)n->blocks);
  esmm_status status = esmm_cuda_alloc(ctx, bytes, &n->memory);
  for (size_t i = 0; status == ESMM_OK && i < sizeof all / sizeof *all; i++) {
    *all[i].to = n->memory + at[i];
    if (all[i].from && all[i].bytes > 0)
      status = esmm_cuda_to_device(ctx, *all[i].to, all[i].from, all[i].bytes, stream);
  }
  b->bytes += bytes;
  return status == ESMM_OK ? esmm_cuda_narrow_pack(ctx, b, lists->blocks, stream) : status;
}

/* The columns stay with the host, too: it cuts long ones. */
static esmm_status keep_columns(esmm_ctx *ctx, const tables *t, esmm_cuda_narrow *n)
{
  const size_t bytes = (size_t)t->tiles * sizeof *t->by_length;
  n->by_length = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!n->by_length)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", bytes);
  memcpy(n->by_length, t->by_length, bytes);
  n->tiles = t->tiles;
  return ESMM_OK;
}

static esmm_status list(esmm_ctx *ctx, esmm_cuda_blocks *b, const uint32_t *cells, tables *t, CUstream stream)
{
  count_entries(b, t, &b->narrow);
  const size_t entries = (size_t)b->narrow.entry_count * sizeof(esmm_narrow_entry);
  const size_t bytes = entries + (size_t)esmm_max(1, b->narrow.blocks) * sizeof(uint32_t);
  char *memory = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!memory)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", bytes);
  written lists = {.entries = (void *)memory, .blocks = (void *)(memory + entries)};
  fill_entries(b, cells, t, &lists);
  esmm_status status = keep_columns(ctx, t, &b->narrow);
  if (status == ESMM_OK)
    status = upload(ctx, t, &lists, b, stream);
  esmm_mem_free(&ctx->allocator, memory, bytes);
  return status;
}

esmm_status esmm_cuda_narrow_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, const uint32_t *cells,
                                  CUstream stream)
{
  esmm_cuda_blocks *blocks = &((esmm_cuda_weights *)w->device)->blocks;
  CUdeviceptr memory;
  int64_t count;
  tables t;
  esmm_status status = alloc_tables(ctx, w, &t);
  if (status != ESMM_OK)
    return status;
  const size_t flags = (size_t)(t.columns * t.chunks);
  status = esmm_cuda_alloc(ctx, flags + ALIGN, &memory); /* the count, then the flags */
  if (status == ESMM_OK) {
    status = esmm_cuda_blocks_scan(ctx, b, SIDE, SIDE, memory + ALIGN, memory, &count, stream);
    if (status == ESMM_OK)
      status = esmm_cuda_to_host(ctx, t.flags, memory + ALIGN, flags, stream);
    esmm_cuda_free(ctx, memory);
  }
  if (status == ESMM_OK) {
    take_bits(&t);
    sort_columns(&t);
    join_columns(&t);
    for (int64_t tile = 0; tile < t.tiles; tile++)
      pair_columns(&t, t.places + tile * COLS);
    status = list(ctx, blocks, cells, &t, stream);
  }
  esmm_mem_free(&ctx->allocator, t.memory, t.bytes);
  return status;
}

void esmm_cuda_narrow_free(esmm_weights *w)
{
  esmm_cuda_narrow *n = &((esmm_cuda_weights *)w->device)->blocks.narrow;
  if (n->memory)
    esmm_cuda_free_at(w->ordinal, n->memory);
  if (n->by_length)
    esmm_mem_free(&w->allocator, n->by_length, (size_t)n->tiles * sizeof *n->by_length);
}
