/*
 * narrow.c: lists of the blocks in a B of cells, 32 k's by 32 columns each, for a caller's blocks that are narrower
 * than a cell.
 *
 * Twice 32 columns are multiplied together, with zeros where one of them has no block. So pairs are made first: the
 * longest that is left with the one that shares most k's with it. A tile has four pairs, and reads a chunk of A
 * wherever one of them has a block. So it takes the first pair that is left, then, three times, the one that shares
 * most k's with those it has; then tiles exchange pairs. Of blocks in random places this saves 10 to 15 % of A's
 * chunks, of others more.
 *
 * The order of k's is free, so an entry takes chunks that fill it and that balance both warpgroups: a stage ends with
 * the slower one. Of 12.5 % of the blocks, in random places, this leaves 8 % fewer entries than chunks in their order,
 * and 18 % less for the slower warpgroup.
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
_Static_assert(ESMM_NARROW_BLOCKS == COLS && COLS <= 8,
               "any chunk fits into an empty entry; its columns are a byte's bits");
#define PAIRS (COLS / 2)
#define WINDOW 512  /* columns considered for a place: time grows with the square of their number */
#define EXCHANGES 2 /* times that each pair is tried: a third gained 0.2 % of A's chunks */
#define SEGMENT 512 /* chunks that entries are made of at a time: tiles that run together stay near in A */

/* What of it is counted on the host, in one allocation. */
typedef struct tables {
  int64_t columns, chunks, words, tiles;
  uint64_t *bits;      /* [columns][words]: which chunks have a block */
  uint64_t *pair_bits; /* [tiles * PAIRS][words]: which chunks one of the two has a block of */
  uint64_t *joined;    /* [words]: of what a tile has so far, or would have */
  uint32_t *lengths;   /* [columns] */
  uint32_t *from;      /* [chunks + 1]: where in `left` columns of that length begin */
  uint32_t *left;      /* [tiles * COLS]: columns, longest first; then pairs */
  uint32_t *pairs;     /* [tiles * PAIRS][2]: columns; ESMM_NO_CELL: there is none */
  uint32_t *joins;     /* [tiles][PAIRS]: pairs */
  uint32_t *reached;   /* [tiles]: chunks that a tile reads */
  uint32_t *places;    /* [tiles][COLS] */
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
  t->bytes = (columns + tiles * PAIRS + 1) * words * sizeof *t->bits + tiles * sizeof *t->by_length +
             (columns + (size_t)t->chunks + 1 + tiles * (3 * COLS + PAIRS + 1)) * sizeof *t->left +
             columns * (size_t)t->chunks; /* B has more elements than each of these */
  t->memory = esmm_mem_alloc(&ctx->allocator, t->bytes);
  if (!t->memory)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", t->bytes);
  t->bits = t->memory;
  t->pair_bits = t->bits + columns * words;
  t->joined = t->pair_bits + tiles * PAIRS * words;
  t->by_length = (void *)(t->joined + words);
  t->lengths = (void *)(t->by_length + tiles);
  t->from = t->lengths + columns;
  t->left = t->from + t->chunks + 1;
  t->pairs = t->left + tiles * COLS;
  t->joins = t->pairs + tiles * COLS;
  t->reached = t->joins + tiles * PAIRS;
  t->places = t->reached + tiles;
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

static int64_t count_shared(const uint64_t *x, const uint64_t *y, int64_t words)
{
  int64_t shared = 0;
  for (int64_t i = 0; i < words; i++)
    shared += __builtin_popcountll(x[i] & y[i]);
  return shared;
}

/* Of the first `count` that are left, the place of the one that shares most bits with `with`. */
static int64_t nearest(const tables *t, const uint64_t *bits, const uint64_t *with, const uint32_t *left, int64_t count)
{
  int64_t best = 0, most = -1;
  for (int64_t i = 0; i < count; i++) {
    const int64_t shared = count_shared(bits + (int64_t)left[i] * t->words, with, t->words);
    if (shared > most) {
      most = shared;
      best = i;
    }
  }
  return best;
}

/* Takes the one at `at` of those left; the others stay in their order, from left + 1 on. */
static uint32_t take_from(uint32_t *left, int64_t at)
{
  const uint32_t taken = left[at];
  memmove(left + 1, left, (size_t)at * sizeof *left);
  return taken;
}

static void add_bits(const tables *t, uint64_t *to, const uint64_t *bits)
{
  for (int64_t i = 0; i < t->words; i++)
    to[i] |= bits[i];
}

static void pair_columns(tables *t)
{
  const uint32_t *end = t->left + t->columns;
  uint32_t *left = t->left;
  memset(t->pair_bits, 0, (size_t)(t->tiles * PAIRS * t->words) * sizeof *t->pair_bits);
  for (int64_t i = 0; i < t->tiles * PAIRS; i++) {
    uint32_t *pair = t->pairs + 2 * i;
    uint64_t *bits = t->pair_bits + i * t->words;
    for (int j = 0; j < 2; j++) {
      pair[j] = ESMM_NO_CELL;
      if (left == end)
        continue;
      pair[j] = take_from(left, j == 0 ? 0 : nearest(t, t->bits, bits, left, esmm_min(end - left, WINDOW)));
      add_bits(t, bits, t->bits + (int64_t)pair[j] * t->words);
      left++;
    }
  }
}

/* Pairs that lack a column come last, so that only the last tile has them: it cannot store C in boxes. */
static void join_pairs(tables *t)
{
  const int64_t count = t->tiles * PAIRS, whole = t->columns / 2;
  uint32_t *left = t->left;
  for (int64_t i = 0; i < count; i++)
    left[i] = (uint32_t)i;
  for (int64_t i = 0; i < count; i++, left++) {
    if (i % PAIRS == 0)
      memset(t->joined, 0, (size_t)t->words * sizeof *t->joined);
    const int64_t looked_at = i % PAIRS == 0 || i >= whole ? 1 : esmm_min(whole - i, WINDOW / 2);
    t->joins[i] = take_from(left, nearest(t, t->pair_bits, t->joined, left, looked_at));
    add_bits(t, t->joined, t->pair_bits + (int64_t)t->joins[i] * t->words);
  }
}

/* How many chunks a tile reads with pair y in place of the one at `at`. */
static uint32_t reach_with(const tables *t, int64_t at, uint32_t y)
{
  const int64_t first = at - at % PAIRS;
  const uint64_t *bits[PAIRS];
  uint32_t count = 0;
  for (int i = 0; i < PAIRS; i++)
    bits[i] = t->pair_bits + (int64_t)(first + i == at ? y : t->joins[first + i]) * t->words;
  for (int64_t i = 0; i < t->words; i++) {
    uint64_t all = 0;
    for (int j = 0; j < PAIRS; j++)
      all |= bits[j][i];
    count += (uint32_t)__builtin_popcountll(all);
  }
  return count;
}

/* Swaps a pair with the one of a later tile that lets the two tiles read the fewest chunks. */
static void exchange_pair(tables *t, int64_t at)
{
  const int64_t tile = at / PAIRS, end = esmm_min(t->tiles, tile + WINDOW / (2 * COLS)) * PAIRS;
  const uint32_t own = t->joins[at];
  int64_t best = -1, most = 0;
  uint32_t reached[2] = {0};
  for (int64_t i = (tile + 1) * PAIRS; i < end; i++) {
    if (t->pairs[2 * t->joins[i] + 1] == ESMM_NO_CELL)
      break; /* it stays in the last tile */
    const uint32_t here = reach_with(t, at, t->joins[i]), there = reach_with(t, i, own);
    const int64_t saved = (int64_t)t->reached[tile] + t->reached[i / PAIRS] - here - there;
    if (saved > most) {
      most = saved;
      best = i;
      reached[0] = here;
      reached[1] = there;
    }
  }
  if (best >= 0) {
    t->joins[at] = t->joins[best];
    t->joins[best] = own;
    t->reached[tile] = reached[0];
    t->reached[best / PAIRS] = reached[1];
  }
}

static void exchange_pairs(tables *t)
{
  for (int64_t i = 0; i < t->tiles; i++)
    t->reached[i] = reach_with(t, i * PAIRS, t->joins[i * PAIRS]);
  for (int i = 0; i < EXCHANGES; i++)
    for (int64_t at = 0; at < t->tiles * PAIRS; at++)
      exchange_pair(t, at);
}

static void swap(uint32_t *x, uint32_t *y)
{
  const uint32_t other = *x;
  *x = *y;
  *y = other;
}

/* Within a tile, swaps columns while that makes pairs share more; then balances the warpgroups, which have two pairs
   each. */
static void settle_tile(const tables *t, uint32_t *places)
{
  uint32_t shared[COLS][COLS] = {{0}}, by[COLS], steps[PAIRS], columns[COLS], sum = 0;
  int with = 1;
  for (uint32_t i = 0; i < COLS; i++) {
    by[i] = i;
    for (uint32_t j = 0; j < COLS; j++) /* of one and the same: its length */
      if (places[i] != ESMM_NO_CELL && places[j] != ESMM_NO_CELL)
        shared[i][j] = j < i ? shared[j][i]
                             : (uint32_t)count_shared(t->bits + (int64_t)places[i] * t->words,
                                                      t->bits + (int64_t)places[j] * t->words, t->words);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < COLS; i++)
      for (int j = (i | 1) + 1; j < COLS; j++)
        if (shared[by[i ^ 1]][by[j]] + shared[by[j ^ 1]][by[i]] > shared[by[i ^ 1]][by[i]] + shared[by[j ^ 1]][by[j]]) {
          swap(&by[i], &by[j]);
          moved = true;
        }
  }
  for (int i = 0; i < PAIRS; i++) {
    const uint32_t x = by[2 * i], y = by[2 * i + 1];
    steps[i] = shared[x][x] + shared[y][y] - shared[x][y];
    sum += steps[i];
  }
  for (int i = 2; i < PAIRS; i++)
    if (llabs(2 * ((int64_t)steps[0] + steps[i]) - sum) < llabs(2 * ((int64_t)steps[0] + steps[with]) - sum))
      with = i;
  swap(&by[2], &by[2 * with]);
  swap(&by[3], &by[2 * with + 1]);
  memcpy(columns, places, sizeof columns);
  for (int i = 0; i < COLS; i++)
    places[i] = columns[by[i]];
}

static void join_columns(tables *t)
{
  sort_columns(t);
  pair_columns(t);
  join_pairs(t);
  exchange_pairs(t);
  for (int64_t i = 0; i < t->tiles * PAIRS; i++)
    memcpy(t->places + 2 * i, t->pairs + 2 * (int64_t)t->joins[i], 2 * sizeof *t->places);
  for (int64_t i = 0; i < t->tiles; i++)
    settle_tile(t, t->places + i * COLS);
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
} written;

/* Chunks of a tile that are in no entry yet: lists by number of blocks, and by the instructions that the first
   warpgroup has beyond the second's. */
enum { MORE = COLS / 4, MORES = 2 * MORE + 1 }; /* at most, one for each of its pairs */
typedef struct waiting {
  int64_t first;              /* chunk */
  int chunks, blocks;         /* of all */
  int counts[COLS + 1];       /* by number of blocks */
  int heads[COLS + 1][MORES]; /* -1: none; a chunk's number, counted from `first` on */
  int next[SEGMENT];
  unsigned char alive[SEGMENT];
} waiting;

static int more_of(uint32_t alive)
{
  int more = 0;
  for (int i = 0; i < PAIRS; i++)
    more += alive >> (2 * i) & 3 ? (i < PAIRS / 2 ? 1 : -1) : 0;
  return more;
}

static void wait_for(const tables *t, const uint32_t *places, int64_t first, waiting *w)
{
  const int count = (int)esmm_min(SEGMENT, t->chunks - first);
  w->first = first;
  w->chunks = w->blocks = 0;
  memset(w->counts, 0, sizeof w->counts);
  memset(w->heads, -1, sizeof w->heads);
  for (int i = count - 1; i >= 0; i--) { /* so that lists begin with the first */
    const uint32_t alive = alive_at(t, places, first + i);
    const int blocks = __builtin_popcount(alive);
    if (blocks == 0)
      continue;
    int *head = &w->heads[blocks][MORE + more_of(alive)];
    w->alive[i] = (unsigned char)alive;
    w->next[i] = *head;
    *head = i;
    w->counts[blocks]++;
    w->chunks++;
    w->blocks += blocks;
  }
}

/* How many blocks the next chunk of an entry is to have, 0 if none fits: the most there is room for. by_chunks: if
   chunks fill entries, leaves room for the missing ones. */
static int blocks_wanted(const waiting *w, int chunks, int room, bool by_chunks)
{
  int least = 1, wanted;
  while (least < COLS && w->counts[least] == 0)
    least++;
  wanted = by_chunks ? room - (ESMM_NARROW_CHUNKS - 1 - chunks) * least : room;
  for (wanted = wanted < least ? room : wanted; wanted > 0; wanted--)
    if (w->counts[wanted] > 0)
      break;
  return wanted;
}

/* Takes the first chunk of `blocks` blocks that best balances the warpgroups, an uneven chunk before an even one. As an
   entry's first chunk, the least even one. */
static int take_chunk(waiting *w, int blocks, bool first, int *more)
{
  int best = -1, least = 0;
  for (int i = 0; i < MORES; i++) {
    const int cost = (first ? 0 : 2 * MORE * abs(*more + i - MORE)) - abs(i - MORE);
    if (w->heads[blocks][i] >= 0 && (best < 0 || cost < least)) {
      best = i;
      least = cost;
    }
  }
  const int chunk = w->heads[blocks][best];
  w->heads[blocks][best] = w->next[chunk];
  w->counts[blocks]--;
  w->chunks--;
  w->blocks -= blocks;
  *more += best - MORE;
  return chunk;
}

/* An entry of chunks that wait. */
static void fill_entry(const esmm_cuda_blocks *b, const uint32_t *cells, const uint32_t *places, waiting *w,
                       const written *out, esmm_cuda_narrow *n)
{
  const bool by_chunks = w->blocks * ESMM_NARROW_CHUNKS <= w->chunks * ESMM_NARROW_BLOCKS;
  esmm_narrow_entry entry = {.block = (uint32_t)n->blocks};
  uint32_t alive[ESMM_NARROW_CHUNKS];
  int chunks = 0, room = ESMM_NARROW_BLOCKS, more = 0;
  while (chunks < ESMM_NARROW_CHUNKS && w->chunks > 0) {
    const int wanted = blocks_wanted(w, chunks, room, by_chunks);
    if (wanted == 0)
      break;
    const int chunk = take_chunk(w, wanted, chunks == 0, &more);
    alive[chunks] = w->alive[chunk];
    entry.chunk[chunks++] = (uint32_t)(w->first + chunk);
    room -= wanted;
  }
  fill_blocks(b, cells, places, alive, chunks, &entry, out->blocks + n->blocks);
  out->entries[n->entry_count++] = entry;
  n->chunks += chunks;
  n->blocks += ESMM_NARROW_BLOCKS - room;
}

static void fill_entries(const esmm_cuda_blocks *b, const uint32_t *cells, tables *t, const written *out,
                         esmm_cuda_narrow *n)
{
  waiting w;
  for (int64_t tile = 0; tile < t->tiles; tile++) {
    const int64_t first = n->entry_count;
    for (int64_t chunk = 0; chunk < t->chunks; chunk += SEGMENT)
      for (wait_for(t, t->places + tile * COLS, chunk, &w); w.chunks > 0;)
        fill_entry(b, cells, t->places + tile * COLS, &w, out, n);
    t->by_length[tile] = (esmm_cuda_tile_column){
        .tile = (uint32_t)tile, .first = (uint32_t)first, .entries = (uint32_t)(n->entry_count - first)};
  }
  qsort(t->by_length, (size_t)t->tiles, sizeof *t->by_length, esmm_cuda_longer_first);
}

/* ---- to the device ---- */

static esmm_status upload(esmm_ctx *ctx, const tables *t, const written *lists, esmm_cuda_blocks *b, CUstream stream)
{
  esmm_cuda_narrow *n = &b->narrow;
  const esmm_cuda_part parts[] = {{&n->values, NULL, (size_t)n->blocks * BLOCK_BYTES},
                                  {&n->entries, lists->entries, (size_t)n->entry_count * sizeof *lists->entries},
                                  {&n->columns, t->by_length, (size_t)t->tiles * sizeof *t->by_length},
                                  {&n->places, t->places, (size_t)(t->tiles * COLS) * sizeof *t->places}};
  const esmm_status status =
      esmm_cuda_place_parts(ctx, parts, sizeof parts / sizeof *parts, n->blocks, &n->memory, &b->bytes, stream);
  return status == ESMM_OK ? esmm_cuda_narrow_pack(ctx, b, lists->blocks, stream) : status;
}

static esmm_status list(esmm_ctx *ctx, esmm_cuda_blocks *b, const uint32_t *cells, tables *t, CUstream stream)
{
  int64_t blocks = 0;
  for (int64_t i = 0; i < t->columns; i++)
    blocks += t->lengths[i];
  const size_t entries = (size_t)esmm_max(1, blocks) * sizeof(esmm_narrow_entry); /* none is without a block */
  const size_t bytes = entries + (size_t)blocks * sizeof(uint32_t);
  char *memory = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!memory)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no host memory for %zu bytes of block lists", bytes);
  const written lists = {.entries = (void *)memory, .blocks = (void *)(memory + entries)};
  fill_entries(b, cells, t, &lists, &b->narrow);
  esmm_status status = esmm_cuda_keep_columns(ctx, t->by_length, t->tiles, &b->narrow.by_length);
  b->narrow.tiles = t->tiles;
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
    join_columns(&t);
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
