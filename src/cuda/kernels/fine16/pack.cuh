/*
 * pack.cuh: A's nonzeros as steps, for k_fine16_sm90a.cu, which says what a step is and why.
 *
 * A block takes a group of 32 rows, four strips, through all of k. TMA brings A, 256 k's (a chunk) at a time; sixteen
 * warps have a strip of a chunk each, four chunks a round:
 *
 *   scan      which k's are alive, and how many of each class (k modulo 8): a ballot a class
 *   schedule  where the steps of each chunk end, and where its k's go. A lane has a class of a strip; every warp does
 *             all of it, so that none waits for another
 *   note      alive k's into the table of slots
 *   emit      finished steps, in the order in which they are multiplied
 *
 * Of class r, chunk c has n k's. They take the next n places of their class, but none in a step before the first of
 * chunk c - AHEAD + 1, because the product has no more than AHEAD chunks in shared memory at once. A step has two
 * places of each class; the steps of chunk c end where all of its k's have one:
 *
 *     from = max(place, 2 * first[c - AHEAD + 1])     place = from + n     first[c + 1] = max over classes of place / 2
 *
 * A class has at most 32 k's in a chunk, so a strip's steps grow by 16 a chunk at most, whatever A holds.
 */
#ifndef ESMM_CUDA_FINE16_PACK_CUH
#define ESMM_CUDA_FINE16_PACK_CUH

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/common/sm90.cuh"

#define CHUNK ESMM_FINE16_CHUNK
#define STRIPS (ESMM_FINE16_ROWS / ESMM_FINE16_STRIP) /* of a group */
#define CLASSES 8
#define SLOTS 16
#define AHEAD ESMM_FINE16_AHEAD
#define STAGES ESMM_FINE16_STAGES
#define BLANK (STAGES * CHUNK / CLASSES) /* the place of a line of zeros */
#define STRIP_SHIFT 8                    /* of a slot's word: the place, the strip, */
#define STRIP_BITS 3u
#define FIRST_BIT 1024u /* and whether the step is the first of its chunk */

#define PACK_WARPS (ESMM_FINE16_PACK_THREADS / 32 - 1) /* and one that loads */
#define ROUND (PACK_WARPS / STRIPS)                    /* chunks */
#define BUFFERS ESMM_FINE16_PACK_BUFFERS
#define BUFFER (ESMM_FINE16_ROWS * CHUNK * 2)
#define BOX (ESMM_FINE16_ROWS * 128) /* bytes of 64 k's */
#define OPEN_STEPS 128               /* of a strip that the table has room for: those of AHEAD - 1 + ROUND chunks */
#define EMPTY 0xffffu
#define BOUNDS 16 /* chunks with a first step kept */

static_assert(CHUNK == 256 && CLASSES * STRIPS == 32 && ROUND * STRIPS == PACK_WARPS, "lanes and warps would not fit");
static_assert((AHEAD - 1 + ROUND) * CHUNK / SLOTS <= OPEN_STEPS && AHEAD + ROUND <= BOUNDS, "tables are too small");
static_assert(AHEAD - 1 + 2 * ROUND <= BUFFERS && BUFFERS % STAGES == 0, "a round would wait for itself");
static_assert(AHEAD < STAGES && BLANK < 256, "places have eight bits");

typedef struct pack_memory {
  char a[BUFFERS * BUFFER];
  uint16_t order[STRIPS][OPEN_STEPS][SLOTS]; /* buffer << 8 | k in the chunk; EMPTY */
  uint32_t counts[ROUND][32];                /* alive k's of a chunk: strip * 8 + class */
  uint32_t bounds[BOUNDS][STRIPS];           /* first step of a chunk, by its number modulo BOUNDS */
  uint64_t full[BUFFERS], empty[BUFFERS];
} pack_memory;
static_assert(sizeof(pack_memory) <= ESMM_FINE16_PACK_SHARED, "params.h gives the host another size");

static __device__ __forceinline__ void meet_packers(void)
{
  asm volatile("bar.sync 1, %0;" ::"n"(PACK_WARPS * 32) : "memory");
}

static __device__ __forceinline__ void load_chunks(const esmm_fine16_pack_params &p, pack_memory &s, int row)
{
  int buffer = 0;
  uint32_t phase = 0;
  for (int c = 0; c < p.chunks; c++) {
    sm90_barrier_wait(&s.empty[buffer], phase ^ 1);
    sm90_barrier_expect(&s.full[buffer], BUFFER);
#pragma unroll
    for (int i = 0; i < CHUNK / 64; i++)
      sm90_tma_load(s.a + buffer * BUFFER + i * BOX, &p.map_a, c * CHUNK + i * 64, row, &s.full[buffer]);
    if (++buffer == BUFFERS) {
      buffer = 0;
      phase ^= 1;
    }
  }
}

/* Which k's of a strip's chunk are alive: bit i of alive[r] is k = 8i + r. A lane looks at eight k's side by side. */
static __device__ __forceinline__ void scan(const char *chunk, int strip, int lane, uint32_t (&alive)[CLASSES])
{
  const uint32_t from = sm90_address(chunk) + (uint32_t)(lane / 8 * BOX + strip * (8 * 128));
  uint32_t any[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint4 x = sm90_load4(from + (uint32_t)(i * 128 + ((lane % 8 ^ i) << 4)));
    any[0] |= x.x;
    any[1] |= x.y;
    any[2] |= x.z;
    any[3] |= x.w;
  }
#pragma unroll
  for (int r = 0; r < CLASSES; r++)
    alive[r] = __ballot_sync(~0u, (any[r / 2] & (r % 2 ? 0x7fff0000u : 0x7fffu)) != 0);
}

/* The bits of A at a noted place, in row g of a strip. */
static __device__ __forceinline__ uint32_t value_at(const pack_memory &s, int strip, int g, uint32_t place)
{
  if (place == EMPTY)
    return 0;
  const uint32_t k = place & 255u;
  return *(const uint16_t *)(s.a + (place >> 8) * BUFFER + k / 64 * BOX + (uint32_t)(strip * 8 + g) * 128 +
                             ((k / 8 % 8 ^ (uint32_t)g) << 4) + k % 8 * 2);
}

/* One step, as mma takes its values: a lane has slots 2t, 2t + 1, 2t + 8 and 2t + 9 of row g, g = lane / 4 and
   t = lane % 4. step: of the strip; below 0: a step of nothing. to: where in the lists. */
static __device__ __forceinline__ void emit(const esmm_fine16_pack_params &p, pack_memory &s, int strip, int step,
                                            bool first, int64_t to, int lane)
{
  uint32_t low = EMPTY << 16 | EMPTY, high = low, mine = EMPTY;
  if (step >= 0) {
    uint16_t *slots = s.order[strip][step % OPEN_STEPS];
    low = ((const uint32_t *)slots)[lane % 4];
    high = ((const uint32_t *)slots)[4 + lane % 4];
    mine = slots[lane % SLOTS];
    __syncwarp();
    if (lane < SLOTS / 2) /* for the steps that come after */
      ((uint32_t *)slots)[lane] = EMPTY << 16 | EMPTY;
  }
  const int g = lane / 4;
  ((uint2 *)p.values)[to * 32 + lane] =
      make_uint2(value_at(s, strip, g, low & 0xffffu) | value_at(s, strip, g, low >> 16) << 16,
                 value_at(s, strip, g, high & 0xffffu) | value_at(s, strip, g, high >> 16) << 16);
  const uint32_t place = mine == EMPTY ? BLANK : (mine >> 8) % STAGES * (CHUNK / CLASSES) + (mine & 255u) / CLASSES;
  if (lane < SLOTS)
    ((uint16_t *)p.places)[(to / 4 * SLOTS + lane) * 4 + to % 4] =
        (uint16_t)(place | (uint32_t)strip << STRIP_SHIFT | (first ? FIRST_BIT : 0u));
}

/* All steps of chunks from .. to - 1, the warps in turn; every chunk has one at least. Returns the next step's number
   in the group. */
static __device__ __forceinline__ int emit_chunks(const esmm_fine16_pack_params &p, pack_memory &s, int64_t group,
                                                  int from, int to, int at, int warp, int lane)
{
  const int64_t base = group * p.chunks * ESMM_FINE16_STEPS;
  for (int c = from; c < to; c++) {
    const uint32_t *first = s.bounds[c % BOUNDS], *next = s.bounds[(c + 1) % BOUNDS];
    int ends[STRIPS], all = 0;
#pragma unroll
    for (int i = 0; i < STRIPS; i++) {
      all += (int)(next[i] - first[i]);
      ends[i] = all;
    }
    for (int e = (warp - at) & (PACK_WARPS - 1); e < max(all, 1); e += PACK_WARPS) {
      int strip = 0, before = 0;
#pragma unroll
      for (int i = 0; i + 1 < STRIPS; i++)
        if (all > 0 && e >= ends[i]) {
          strip = i + 1;
          before = ends[i];
        }
      emit(p, s, strip, all == 0 ? -1 : (int)first[strip] + e - before, e == 0, base + at + e, lane);
    }
    at += max(all, 1);
  }
  return at;
}

/* All rounds of the packing warps. */
static __device__ __forceinline__ void pack_rounds(const esmm_fine16_pack_params &p, pack_memory &s, int64_t group)
{
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, strip = warp % STRIPS, which = warp / STRIPS;
  const uint32_t below = (1u << lane) - 1;
  uint32_t place = 0;         /* of this lane's class: the next, */
  uint32_t first[AHEAD] = {}; /* and the first steps of its strip's last chunks, the newest last */
  int emitted = 0, at = 0;    /* chunks, steps */
  uint32_t found = 0;         /* alive k's of this lane's class */
  for (int c0 = 0; c0 < p.chunks; c0 += ROUND) {
    const int c = c0 + which, buffer = c % BUFFERS;
    uint32_t alive[CLASSES] = {0, 0, 0, 0, 0, 0, 0, 0}, count = 0;
    if (c < p.chunks) {
      sm90_barrier_wait(&s.full[buffer], (uint32_t)(c / BUFFERS & 1));
      scan(s.a + buffer * BUFFER, strip, lane, alive);
    }
#pragma unroll
    for (int r = 0; r < CLASSES; r++)
      if (lane == r)
        count = (uint32_t)__popc(alive[r]);
    if (lane < CLASSES)
      s.counts[which][strip * CLASSES + lane] = count;
    meet_packers();
    uint32_t from = 0; /* of this warp's chunk */
#pragma unroll
    for (int j = 0; j < ROUND; j++) {
      const uint32_t start = max(place, 2 * first[0]);
      const uint32_t more = s.counts[j][lane];
      place = start + more;
      found += more;
      uint32_t last = place;
#pragma unroll
      for (int d = 1; d < CLASSES; d *= 2)
        last = max(last, __shfl_xor_sync(~0u, last, d));
      if (j == which)
        from = start;
#pragma unroll
      for (int i = 0; i + 1 < AHEAD; i++)
        first[i] = first[i + 1];
      first[AHEAD - 1] = max(first[AHEAD - 1], (last + 1) / 2);
      if (warp == 0 && lane % CLASSES == 0)
        s.bounds[(c0 + j + 1) % BOUNDS][lane / CLASSES] = first[AHEAD - 1];
    }
#pragma unroll
    for (int r = 0; r < CLASSES; r++) {
      const uint32_t to = __shfl_sync(~0u, from, strip * CLASSES + r) + (uint32_t)__popc(alive[r] & below);
      if (alive[r] >> lane & 1)
        s.order[strip][to / 2 % OPEN_STEPS][to % 2 * CLASSES + r] = (uint16_t)(buffer << 8 | lane * 8 | r);
    }
    meet_packers();
    /* Later chunks take no place before the first step of the chunk AHEAD - 1 before them. */
    const int done = c0 + ROUND < p.chunks ? c0 + ROUND - AHEAD + 1 : p.chunks;
    at = emit_chunks(p, s, group, emitted, done, at, warp, lane);
    __syncwarp();
    if (lane == 0)
      for (int i = emitted; i < done; i++)
        sm90_barrier_arrive(&s.empty[i % BUFFERS]);
    emitted = done;
  }
  found = __reduce_add_sync(~0u, found);
  if (threadIdx.x == 0)
    ((uint2 *)p.counts)[group] = make_uint2((uint32_t)at, found);
}

static __device__ __forceinline__ void pack_group(const esmm_fine16_pack_params &p)
{
  extern __shared__ __align__(1024) char memory[];
  pack_memory &s = *(pack_memory *)memory;
  const int64_t group = blockIdx.x;
  if (not_selected(p.selector))
    return;
  for (int i = (int)threadIdx.x; i < (int)(sizeof s.order / 4); i += ESMM_FINE16_PACK_THREADS)
    ((uint32_t *)s.order)[i] = EMPTY << 16 | EMPTY;
  if (threadIdx.x < STRIPS)
    s.bounds[0][threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < BUFFERS; i++) {
      sm90_barrier_init(&s.full[i], 1);
      sm90_barrier_init(&s.empty[i], PACK_WARPS);
    }
    sm90_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < PACK_WARPS * 32)
    pack_rounds(p, s, group);
  else if (threadIdx.x == PACK_WARPS * 32)
    load_chunks(p, s, (int)(group * ESMM_FINE16_ROWS));
}

#endif
