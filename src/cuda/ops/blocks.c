/*
 * blocks.c: a B of blocks on the GPU. Whatever the caller's blocks are, it is kept as cells: cell_k k's, 64 where those
 * divide the blocks' rows, else 32, by 64 columns, each with a nonzero. Kernels find them in three ways:
 *
 *   entries   of a tile of 128 columns: the chunks of k that one of its two panels has a cell of, and which (params.h)
 *   columns   of tiles, those with most entries first: long ones begin first, so that all blocks end together
 *   places    [panels][chunks] of 64 columns each: the cell there, or ESMM_NO_CELL
 *
 * A cell's number counts tile by tile, chunk by chunk, panel by panel: the cells of an entry follow each other. Blocks
 * in cells, 32 by 32, have lists of their own (narrow.c).
 */
#include "cuda/ops/blocks.h"

#include <stdlib.h>
#include <string.h>

#define ALIGN 1024
#define PANELS (ESMM_BSR16_COLS / ESMM_CELL_COLS) /* of a tile */

ESMM_FATBIN(blocks);

typedef struct two {
  uint32_t x, y;
} two;

/* What of it is counted on the host, in one allocation. */
typedef struct tables {
  unsigned char *flags;           /* [panels][chunks] */
  uint32_t *places;               /* the same */
  two *which;                     /* [cells] chunk, panel */
  two *entries;                   /* [entry_count] */
  esmm_cuda_tile_column *columns; /* [tiles] */
  int64_t entry_count;
  void *memory;
  size_t bytes;
} tables;

static int64_t panels_of(const esmm_weights *w)
{
  return esmm_ceil_div(w->n, ESMM_CELL_COLS);
}

static int64_t tiles_of(const esmm_weights *w)
{
  return esmm_ceil_div(w->n, ESMM_BSR16_COLS);
}

/* ---- which cells there are ---- */

esmm_status esmm_cuda_blocks_scan(esmm_ctx *ctx, const esmm_matrix *b, int rows, int cols, CUdeviceptr flags,
                                  CUdeviceptr at, int64_t *count, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_blocks, "esmm_blocks_scan", 0};
  const esmm_blocks_scan_params params = {
      .b = esmm_cuda_matrix(b), .block_rows = rows, .block_cols = cols, .flags = flags, .count = at};
  const int64_t all = esmm_ceil_div(b->rows, rows) * esmm_ceil_div(b->cols, cols);
  uint64_t found = 0;
  esmm_status status = esmm_cuda_zero(ctx, at, sizeof found, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_blocks_launch(ctx, &function, esmm_ceil_div(all, ESMM_BLOCKS_THREADS / 32), stream, &params);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, &found, at, sizeof found, stream);
  *count = (int64_t)found;
  return status;
}

/* Where a tile's panels have a cell of that chunk: a bit each. */
static uint32_t panels_at(const esmm_weights *w, const tables *t, int64_t tile, int64_t chunk)
{
  uint32_t alive = 0;
  for (int64_t i = 0; i < PANELS && tile * PANELS + i < panels_of(w); i++)
    alive |= (uint32_t)t->flags[(tile * PANELS + i) * esmm_cuda_of(w)->blocks.chunks + chunk] << i;
  return alive;
}

int esmm_cuda_longer_first(const void *x, const void *y)
{
  const esmm_cuda_tile_column *a = x, *b = y;
  if (a->entries != b->entries)
    return a->entries > b->entries ? -1 : 1;
  return a->tile < b->tile ? -1 : a->tile > b->tile;
}

/* Numbers the cells, and lists them. */
static void fill_tables(const esmm_weights *w, tables *t)
{
  const int64_t chunks = esmm_cuda_of(w)->blocks.chunks;
  uint32_t cell = 0;
  int64_t entries = 0;
  _Static_assert(ESMM_NO_CELL == UINT32_MAX, "bytes of 0xff");
  memset(t->places, 0xff, (size_t)(panels_of(w) * chunks) * sizeof *t->places);
  for (int64_t tile = 0; tile < tiles_of(w); tile++) {
    esmm_cuda_tile_column *column = &t->columns[tile];
    *column = (esmm_cuda_tile_column){.tile = (uint32_t)tile, .first = (uint32_t)entries};
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const uint32_t alive = panels_at(w, t, tile, chunk);
      if (!alive)
        continue;
      t->entries[entries].x = (uint32_t)chunk | alive << 28;
      t->entries[entries++].y = cell;
      for (int i = 0; i < PANELS; i++)
        if (alive >> i & 1) {
          t->places[(tile * PANELS + i) * chunks + chunk] = cell;
          t->which[cell].x = (uint32_t)chunk;
          t->which[cell++].y = (uint32_t)(tile * PANELS + i);
        }
    }
    column->entries = (uint32_t)(entries - column->first);
  }
  t->entry_count = entries;
  qsort(t->columns, (size_t)tiles_of(w), sizeof *t->columns, esmm_cuda_longer_first);
}

static esmm_status alloc_tables(esmm_ctx *ctx, const esmm_weights *w, tables *t)
{
  const size_t cells = (size_t)esmm_cuda_of(w)->blocks.cells;
  const size_t places = (size_t)(panels_of(w) * esmm_cuda_of(w)->blocks.chunks), tiles = (size_t)tiles_of(w);
  t->bytes = places * (sizeof *t->places + 1) + cells * (sizeof *t->which + sizeof *t->entries) +
             tiles * sizeof *t->columns; /* all are less than B has elements, so this fits */
  t->memory = esmm_mem_alloc(&ctx->allocator, t->bytes);
  if (!t->memory)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", t->bytes);
  t->columns = t->memory;
  t->which = (void *)(t->columns + tiles);
  t->entries = (void *)(t->which + cells);
  t->places = (void *)(t->entries + cells);
  t->flags = (void *)(t->places + places);
  return ESMM_OK;
}

/* ---- to the device ---- */

esmm_status esmm_cuda_place_parts(esmm_ctx *ctx, const esmm_cuda_part *parts, size_t count, int64_t blocks,
                                  CUdeviceptr *memory, size_t *bytes, CUstream stream)
{
  size_t all = 0, at;
  for (size_t i = 0; i < count; i++)
    if (!esmm_cuda_reserve(&all, parts[i].bytes, ALIGN, &at))
      return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "lists of %lld blocks would not fit in memory", (long long)blocks);
  esmm_status status = esmm_cuda_alloc(ctx, all, memory);
  all = 0;
  for (size_t i = 0; status == ESMM_OK && i < count; i++) {
    (void)esmm_cuda_reserve(&all, parts[i].bytes, ALIGN, &at); /* as above */
    *parts[i].to = *memory + at;
    if (parts[i].from && parts[i].bytes > 0)
      status = esmm_cuda_to_device(ctx, *parts[i].to, parts[i].from, parts[i].bytes, stream);
  }
  *bytes += all;
  return status;
}

static esmm_status place_blocks(esmm_ctx *ctx, const esmm_weights *w, const tables *t, esmm_cuda_blocks *blocks,
                                CUstream stream)
{
  const size_t cell = (size_t)blocks->cell_k * ESMM_CELL_COLS * sizeof(uint16_t);
  size_t values;
  if (!esmm_size_mul((size_t)blocks->cells, cell, &values))
    values = SIZE_MAX;
  const esmm_cuda_part parts[] = {
      {&blocks->values, NULL, values},
      {&blocks->which, t->which, (size_t)blocks->cells * sizeof *t->which},
      {&blocks->entries, t->entries, (size_t)t->entry_count * sizeof *t->entries},
      {&blocks->columns, t->columns, (size_t)tiles_of(w) * sizeof *t->columns},
      {&blocks->places, t->places, (size_t)(panels_of(w) * blocks->chunks) * sizeof *t->places}};
  return esmm_cuda_place_parts(ctx, parts, sizeof parts / sizeof *parts, blocks->cells, &blocks->memory, &blocks->bytes,
                               stream);
}

esmm_status esmm_cuda_keep_columns(esmm_ctx *ctx, const esmm_cuda_tile_column *columns, int64_t tiles,
                                   esmm_cuda_tile_column **out)
{
  const size_t bytes = (size_t)tiles * sizeof *columns;
  *out = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!*out)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", bytes);
  memcpy(*out, columns, bytes);
  return ESMM_OK;
}

static esmm_status copy_cells(esmm_ctx *ctx, const esmm_cuda_function *function, const esmm_matrix *b,
                              const esmm_cuda_blocks *blocks, CUstream stream)
{
  const esmm_blocks_copy_params params = {.b = esmm_cuda_matrix(b),
                                          .cells = blocks->values,
                                          .which = blocks->which,
                                          .count = blocks->cells,
                                          .cell_k = blocks->cell_k};
  if (blocks->cells == 0)
    return ESMM_OK;
  return esmm_cuda_blocks_launch(ctx, function, blocks->cells, stream, &params);
}

esmm_status esmm_cuda_narrow_pack(esmm_ctx *ctx, const esmm_cuda_blocks *blocks, const uint32_t *which, CUstream stream)
{
  static const esmm_cuda_function function = {&fatbin_blocks, "esmm_narrow_pack", 0};
  const esmm_cuda_narrow *n = &blocks->narrow;
  const size_t bytes = (size_t)n->blocks * sizeof *which;
  CUdeviceptr memory;
  if (n->blocks == 0)
    return ESMM_OK;
  esmm_status status = esmm_cuda_alloc(ctx, bytes, &memory);
  if (status != ESMM_OK)
    return status;
  const esmm_narrow_pack_params params = {
      .cells = blocks->values, .which = memory, .blocks = n->values, .count = n->blocks};
  status = esmm_cuda_to_device(ctx, memory, which, bytes, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_blocks_launch(ctx, &function, n->blocks, stream, &params);
  esmm_cuda_free(ctx, memory);
  return status;
}

static esmm_status fill_from_flags(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUdeviceptr flags,
                                   tables *t, CUstream stream)
{
  static const esmm_cuda_function pack = {&fatbin_blocks, "esmm_blocks_pack", 0};
  esmm_cuda_blocks *blocks = &((esmm_cuda_weights *)w->device)->blocks;
  esmm_status status = alloc_tables(ctx, w, t);
  if (status == ESMM_OK)
    status = esmm_cuda_to_host(ctx, t->flags, flags, (size_t)(panels_of(w) * blocks->chunks), stream);
  if (status != ESMM_OK)
    return status;
  fill_tables(w, t);
  status = place_blocks(ctx, w, t, blocks, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_keep_columns(ctx, t->columns, tiles_of(w), &blocks->by_length);
  blocks->entry_count = t->entry_count;
  return status == ESMM_OK ? copy_cells(ctx, &pack, b, blocks, stream) : status;
}

esmm_status esmm_cuda_blocks_fill(esmm_ctx *ctx, const esmm_matrix *b, const esmm_weights *w, CUstream stream)
{
  esmm_cuda_blocks *blocks = &((esmm_cuda_weights *)w->device)->blocks;
  CUdeviceptr memory;
  tables t = {0};
  blocks->cell_k = w->bsr.block_rows % 64 == 0 ? 64 : 32;
  blocks->chunks = esmm_ceil_div(w->k, blocks->cell_k);
  const size_t flags = (size_t)(panels_of(w) * blocks->chunks);
  esmm_status status = esmm_cuda_alloc(ctx, flags + ALIGN, &memory); /* the count, then the flags */
  if (status != ESMM_OK)
    return status;
  status = esmm_cuda_blocks_scan(ctx, b, w->bsr.block_rows, w->bsr.block_cols, 0, memory, &blocks->kept, stream);
  if (status == ESMM_OK)
    status =
        esmm_cuda_blocks_scan(ctx, b, blocks->cell_k, ESMM_CELL_COLS, memory + ALIGN, memory, &blocks->cells, stream);
  if (status == ESMM_OK)
    status = fill_from_flags(ctx, b, w, memory + ALIGN, &t, stream);
  if (status == ESMM_OK && (w->bsr.block_rows % 64 != 0 || w->bsr.block_cols % 64 != 0))
    status = esmm_cuda_narrow_fill(ctx, b, w, t.places, stream);
  esmm_mem_free(&ctx->allocator, t.memory, t.bytes);
  esmm_cuda_free(ctx, memory);
  return status;
}

esmm_status esmm_cuda_blocks_read(esmm_ctx *ctx, const esmm_weights *w, esmm_matrix *b, CUstream stream)
{
  static const esmm_cuda_function unpack = {&fatbin_blocks, "esmm_blocks_unpack", 0};
  const size_t bytes = esmm_cuda_tight_bytes(b);
  CUdeviceptr memory;
  esmm_status status = esmm_cuda_alloc(ctx, bytes, &memory);
  if (status != ESMM_OK)
    return status;
  const esmm_matrix dense = esmm_cuda_tight(b, ESMM_DEVICE, esmm_cuda_pointer(memory));
  status = esmm_cuda_zero(ctx, memory, bytes, stream);
  if (status == ESMM_OK)
    status = copy_cells(ctx, &unpack, &dense, &esmm_cuda_of(w)->blocks, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_download(ctx, &dense, b, stream);
  esmm_cuda_free(ctx, memory);
  return status;
}

void esmm_cuda_blocks_free(esmm_weights *w)
{
  esmm_cuda_blocks *blocks = &((esmm_cuda_weights *)w->device)->blocks;
  if (blocks->memory)
    esmm_cuda_free_at(w->ordinal, blocks->memory);
  esmm_cuda_narrow_free(w);
  esmm_mem_free(&w->allocator, blocks->by_length, (size_t)tiles_of(w) * sizeof *blocks->by_length);
}

/* ---- pruning ---- */

_Static_assert(sizeof(esmm_block_note) == sizeof(esmm_device_note), "the device writes what the core reads");
_Static_assert(ESMM_BLOCK_SUMS == 32, "a lane has a sum");

static esmm_blocks_prune_params pruning(const esmm_matrix *b, const esmm_format *f)
{
  return (esmm_blocks_prune_params){.b = esmm_cuda_matrix(b), .block_rows = f->block_rows, .block_cols = f->block_cols};
}

static int64_t blocks_of(const esmm_matrix *b, const esmm_format *f)
{
  return esmm_ceil_div(b->rows, f->block_rows) * esmm_ceil_div(b->cols, f->block_cols);
}

/* Between begin and end. Scratch: the notes, then the norms. */
static esmm_status weigh(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                         esmm_block_note *notes)
{
  static const esmm_cuda_function function = {&fatbin_blocks, "esmm_blocks_weigh", 0};
  const int64_t blocks = blocks_of(b, f);
  const size_t note_bytes = (size_t)blocks * sizeof *notes, norm_bytes = norms ? (size_t)b->rows * sizeof *norms : 0;
  size_t bytes = 0, notes_at, norms_at;
  CUdeviceptr scratch;
  if (!esmm_cuda_reserve(&bytes, note_bytes, ALIGN, &notes_at) ||
      !esmm_cuda_reserve(&bytes, norm_bytes, ALIGN, &norms_at))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "b has too many k's: %lld", (long long)b->rows);
  esmm_blocks_prune_params params = pruning(b, f);
  esmm_status status = esmm_cuda_refuse_capture(ctx, "pruning");
  if (status == ESMM_OK)
    status = esmm_cuda_scratch(ctx, bytes, ctx->stream, &scratch);
  if (status != ESMM_OK)
    return status;
  params.notes = scratch + notes_at;
  params.norms = norms ? scratch + norms_at : 0;
  if (norms)
    status = esmm_cuda_to_device(ctx, params.norms, norms, norm_bytes, ctx->stream);
  if (status == ESMM_OK)
    status =
        esmm_cuda_blocks_launch(ctx, &function, esmm_ceil_div(blocks, ESMM_BLOCKS_THREADS / 32), ctx->stream, &params);
  return status == ESMM_OK ? esmm_cuda_to_host(ctx, notes, params.notes, note_bytes, ctx->stream) : status;
}

esmm_status esmm_cuda_weigh_blocks(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const float *norms,
                                   esmm_block_note *notes)
{
  const esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  return status == ESMM_OK ? esmm_cuda_end(ctx, ctx->stream, weigh(ctx, b, f, norms, notes)) : status;
}

/* Between begin and end. */
static esmm_status drop(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const unsigned char *keep)
{
  static const esmm_cuda_function function = {&fatbin_blocks, "esmm_blocks_drop", 0};
  const int64_t blocks = blocks_of(b, f);
  CUdeviceptr scratch;
  esmm_blocks_prune_params params = pruning(b, f);
  esmm_status status = esmm_cuda_refuse_capture(ctx, "pruning");
  if (status == ESMM_OK)
    status = esmm_cuda_scratch(ctx, (size_t)blocks, ctx->stream, &scratch);
  if (status == ESMM_OK)
    status = esmm_cuda_to_device(ctx, scratch, keep, (size_t)blocks, ctx->stream);
  if (status != ESMM_OK)
    return status;
  params.keep = scratch;
  return esmm_cuda_blocks_launch(ctx, &function, blocks, ctx->stream, &params);
}

esmm_status esmm_cuda_drop_blocks(esmm_ctx *ctx, const esmm_matrix *b, const esmm_format *f, const unsigned char *keep)
{
  esmm_status status = esmm_cuda_begin(ctx, ctx->stream);
  if (status == ESMM_OK)
    status = esmm_cuda_end(ctx, ctx->stream, drop(ctx, b, f, keep));
  return status == ESMM_OK ? esmm_cuda_synchronize(ctx) : status;
}
