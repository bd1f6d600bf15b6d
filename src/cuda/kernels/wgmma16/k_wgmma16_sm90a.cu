/*
 * k_wgmma16_sm90a.cu: products of 16-bit operands on Hopper: dense, and with the zeros of A, or of A and B, left out.
 *
 *   A [m,k]   bf16 or fp16, either order, as the caller has it
 *   B [k,n]   the rows form of the weights
 *   sums      fp32, in the tensor core
 *
 * One launch does it all, because one more costs several per cent of a product of 100 us:
 *
 *   choose    where the host could not know whether skipping pays, every block samples A, the same places, and comes to
 *             the same result (wgmma16_choose); the dense product is begun meanwhile, and called off if not wanted
 *   pack      A is scanned, and its alive k's are packed strip by strip (pack.cuh); then all blocks meet
 *   multiply  persistent blocks in pairs: a warpgroup that loads (feed.cuh), two that multiply 64 rows each
 *
 * A pair of blocks is a cluster: what both need is fetched once. Three dense products have separate entries, as their
 * code would be in the others' way: with a partial last wave (LENT in wgmma16.cuh), with a curve or a residual
 * (finish.cuh), and gated, with two B's (gated.cuh). Floors are in bench/SPEED.md.
 */
#include "cuda/kernels/common/sample.cuh"
#include "cuda/kernels/wgmma16/gated.cuh"
#include "cuda/kernels/wgmma16/pack.cuh"

/* ---- choosing ---- */

/* Where sample i is: the first row of a strip and the first of 8 k's. */
static __device__ __forceinline__ void sample_place(const esmm_wgmma16_params &p, int i, int &row, int &k)
{
  uint32_t strip, group;
  sample_by_section<SAMPLES>(i, (uint32_t)ceil_div(p.m, TILE), (uint32_t)p.k / SAMPLE_SIDE, strip, group);
  row = (int)strip * TILE;
  k = (int)group * SAMPLE_SIDE;
}

/* Which of eight elements are not zero: bits 15 and 31, 14 and 30, 13 and 29, 12 and 28. */
static __device__ __forceinline__ uint32_t nonzero_bits(uint4 x)
{
  const uint32_t magnitude = 0x7fff7fffu, carry = 0x80008000u; /* anything but 0 carries into bit 15 */
  return (((x.x & magnitude) + magnitude) & carry) | (((x.y & magnitude) + magnitude) & carry) >> 1 |
         (((x.z & magnitude) + magnitude) & carry) >> 2 | (((x.w & magnitude) + magnitude) & carry) >> 3;
}

/* The bit of k + j there. */
static __device__ __forceinline__ uint32_t sample_bit(int j)
{
  return 0x8000u << (j % 2 * 16) >> (j / 2);
}

/* What the sample says. */
typedef struct wgmma16_choice {
  float strip, joint; /* densities */
  bool skip;
} wgmma16_choice;

/*
 * SAMPLERS threads, two warps, sample A and choose; the first warp's lanes get the result. Eight elements at a place:
 * k's k to k + 7 of a row or, where A is col-major, eight rows of a k; m and k are SAMPLE_SIDE at least. Copies through
 * shared memory are all on their way at once. The loops stay rolled: code that is not in the cache comes slowly. A
 * launch and a look at its choice both come here, so that they agree.
 */
static __device__ __forceinline__ wgmma16_choice wgmma16_sample(const esmm_wgmma16_params &p, uint4 (*sample)[TILE],
                                                                uint32_t (*sample_bits)[2])
{
  const int r = (int)threadIdx.x % SAMPLERS, warp = r / 32, lane = r % 32;
  const uint16_t *a = (const uint16_t *)p.a;
  const uint32_t seen = sm90_address(sample) + (uint32_t)r * 16;
#pragma unroll 1
  for (int i = 0; i < 2 * SAMPLES; i++) { /* rows r and r + 64 */
    int row, k;
    sample_place(p, i / 2, row, k);
    const int at = r + i % 2 * SAMPLERS;
    row += p.a_by_k ? at % 16 * 8 : at;
    k += p.a_by_k ? at / 16 : 0;
    const bool inside = p.a_by_k ? row + 8 <= p.m : row < p.m;
    gather(seen + (uint32_t)i * (SAMPLERS * 16), inside ? (p.a_by_k ? a + k * p.a_ld + row : a + row * p.a_ld + k) : a,
           inside);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < SAMPLES; i++) {
    const uint32_t low = nonzero_bits(sm90_load4(seen + (uint32_t)i * (TILE * 16)));
    const uint32_t high = nonzero_bits(sm90_load4(seen + (uint32_t)i * (TILE * 16) + SAMPLERS * 16));
    const uint32_t by_k = (low ? sample_bit(r / 16) : 0) | (high ? sample_bit(r / 16 + 4) : 0);
    const uint32_t any = __reduce_or_sync(~0u, p.a_by_k ? by_k : low | high);
    if (lane == 0)
      sample_bits[i][warp] = any;
  }
  meet<4, SAMPLERS>();
  wgmma16_choice choice = {0.0f, 0.0f, false};
  if (warp == 1)
    return choice;
  const float *alive = (const float *)p.b_alive;
  int strips = 0;
  float joint = 0.0f;
  if (lane < SAMPLES) {
    int row, k;
    sample_place(p, lane, row, k);
    const uint32_t any = sample_bits[lane][0] | sample_bits[lane][1];
    strips = __popc(any);
    if (p.per_joint != 0.0f)
#pragma unroll 1
      for (int j = 0; j < 8; j++)
        joint += any & sample_bit(j) ? __ldg(alive + k + j) : 0.0f;
  }
  strips = __reduce_add_sync(~0u, strips);
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    joint += __shfl_xor_sync(~0u, joint, d);
  choice.strip = (float)strips / (SAMPLES * 8);
  choice.joint = joint / (SAMPLES * 8);
  choice.skip = skipping_pays(p, choice.strip, choice.joint);
  return choice;
}

/* A's densities for the host, written last: the report's other fields are there before `ready`. */
static __device__ __forceinline__ void report_densities(const esmm_wgmma16_params &p, float strip, float joint)
{
  esmm_choice_device *report = (esmm_choice_device *)p.report;
  report->element = 0.0f;
  report->strip = strip;
  report->joint = joint;
  __threadfence_system();
  *(volatile uint32_t *)&report->ready = 1;
}

/* Two warps of the loading warpgroup: the mode to sh->mode. */
static __device__ __forceinline__ void wgmma16_choose(const esmm_wgmma16_params &p, wgmma16_shared *sh)
{
  const wgmma16_choice choice = wgmma16_sample(p, sh->sample, sh->sample_bits);
  if (threadIdx.x % SAMPLERS == 0) {
    sh->mode = choice.skip ? (uint32_t)p.mode : ESMM_WGMMA16_DENSE;
    sm90_barrier_arrive(&sh->decided);
    if (blockIdx.x == 0 && p.report) {
      esmm_choice_device *report = (esmm_choice_device *)p.report;
      report->chosen = choice.skip;
      if (choice.skip) { /* counted exactly later on */
        report->strip = choice.strip;
        report->joint = choice.joint;
      } else {
        report_densities(p, choice.strip, p.per_joint != 0.0f ? choice.joint : choice.strip * p.b_density);
      }
    }
  }
}

/* ---- multiplying ---- */

/* What an entry of this file is for: any mode; dense, where stages are lent; dense, where more follows the sums; dense
   and gated. */
enum { ENTRY_ANY, ENTRY_LENT, ENTRY_MORE, ENTRY_GATED };

/* What one pass over the stages of a unit needs. */
typedef struct wgmma16_consumer {
  uint32_t full, empty, words; /* addresses of shared memory */
  uint64_t a_view, b_view;
  int lane, group, shares, reader;
  bool gathered_lines;
  uint32_t slot, phase;
  uint32_t held;  /* a stage from which C is being written; MAX_STAGES: none */
  uint32_t tiles; /* that were written so */
  bool read_back; /* the last of them is, by the tally warps */
} wgmma16_consumer;

static __device__ __forceinline__ wgmma16_consumer consumer_of(const esmm_wgmma16_params &p, char *ring,
                                                               wgmma16_shared *sh, int mode, int b_at)
{
  wgmma16_consumer c;
  const wgmma16_ring *barriers = mode == ESMM_WGMMA16_DENSE ? &sh->dense : &sh->skip;
  c.lane = (int)threadIdx.x % 32;
  c.group = ((int)threadIdx.x - FEEDERS) / 128;
  c.shares = p.units[mode].share == ESMM_WGMMA16_ALONE ? 1 : 2;
  c.reader = c.shares == 2 ? (int)cluster_rank() : 0;
  c.gathered_lines = mode != ESMM_WGMMA16_DENSE;
  c.full = sm90_address(barriers->full);
  c.words = sm90_address(sh->stage);
  c.empty = sm90_address_at(barriers->empty, c.shares == 2 ? (uint32_t)c.lane % 2 : cluster_rank());
  asm volatile("" : "+r"(c.full), "+r"(c.words), "+r"(c.empty)); /* they stay in registers */
  c.a_view = wgmma16_view(ring + c.group * PANEL);
  c.b_view = wgmma16_view(ring + b_at);
  c.slot = c.phase = 0;
  c.held = MAX_STAGES;
  c.tiles = 0;
  c.read_back = false;
  return c;
}

/* A stage may be used again. */
static __device__ __forceinline__ void let_go(const wgmma16_consumer &c, uint32_t at)
{
  if (c.lane < c.shares)
    sm90_barrier_arrive_cluster(c.empty + at * 8);
}

/* The same for the stage from which C was written; the first warp arrives for the warpgroup. Not WAIT: only if it is no
   longer read back. */
template <bool WAIT> static __device__ __forceinline__ void let_go_held(wgmma16_shared *sh, wgmma16_consumer &c)
{
  if (c.held >= MAX_STAGES)
    return;
  if (threadIdx.x / 32 % 4 == 0) {
    if (c.read_back) {
      uint64_t *tallied = &sh->tallied[c.group];
      const uint32_t parity = (c.tiles - 1) % 2;
      if (WAIT)
        sm90_barrier_wait(tallied, parity);
      else if (!__shfl_sync(~0u, sm90_barrier_look(tallied, parity), 0))
        return;
    }
    sm90_bulk_wait_read();
    __syncwarp();
    if (c.lane < c.shares)
      sm90_barrier_arrive_cluster_many(c.empty + c.held * 8, 4);
  }
  c.held = MAX_STAGES;
}

/* Until the tally warps have taken the last tile that was written so, the first warp waits for all. */
static __device__ __forceinline__ void await_tallied(const esmm_wgmma16_params &p, wgmma16_shared *sh,
                                                     const wgmma16_consumer &c)
{
  if (tallies_late(p) && !c.gathered_lines && c.tiles && thread_now() / 32 % 4 == 0)
    sm90_barrier_wait(&sh->tallied[c.group], (c.tiles - 1) % 2);
}

/* Stages up to a unit's last: 64 rows of this warpgroup. Returns the last one's word; at: its slot. */
template <int COLS, esmm_dtype DTYPE, bool A_BY_K>
static __device__ __forceinline__ uint32_t multiply_unit(wgmma16_shared *sh, wgmma16_consumer &c,
                                                         float (&sums)[wgmma16_stage<COLS>::SUMS], uint32_t &at)
{
  typedef wgmma16_stage<COLS> stage;
  enum { STEPS = ESMM_WGMMA16_K / 16, A_STEP = A_BY_K ? 16 * 128 >> 4 : 32 >> 4, B_STEP = 16 * 128 >> 4 };
  uint32_t before = MAX_STAGES, what = 0;
#pragma unroll
  for (int j = 0; j < stage::SUMS; j++) /* zero now: their registers are free between units */
    sums[j] = 0.0f;
  do {
    if (c.slot == c.held) /* nothing comes there before */
      let_go_held<true>(sh, c);
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    /* Read and broadcast by the lane that releases this block's stage. */
    what = __shfl_sync(~0u, c.lane == c.reader ? sm90_load(c.words + c.slot * 4) : 0, c.reader);
    const int steps = c.group * 64 < (int)(what >> STAGE_ROWS) ? (int)(what & STAGE_STEPS) : 0;
    const uint64_t a = c.a_view + c.slot * (stage::BYTES >> 4), b = c.b_view + c.slot * (stage::BYTES >> 4);
    if (A_BY_K && c.gathered_lines)
      sm90_fence_async(); /* they were not written by TMA */
    if (steps == STEPS) {
      sm90_wgmma_fence();
#pragma unroll
      for (int s = 0; s < STEPS; s++)
        wgmma16<DTYPE, A_BY_K>(sums, a + s * A_STEP, b + s * B_STEP);
      sm90_wgmma_commit();
    } else {
#pragma unroll 1
      for (int s = 0; s < steps; s++) {
        sm90_wgmma_fence();
        wgmma16<DTYPE, A_BY_K>(sums, a + s * A_STEP, b + s * B_STEP);
        sm90_wgmma_commit();
      }
      sm90_wgmma_wait<0>();
    }
    if (before < MAX_STAGES) {
      sm90_wgmma_wait<1>();
      let_go(c, before);
      let_go_held<false>(sh, c);
    }
    before = c.slot;
    if (++c.slot == stage::COUNT) {
      c.slot = 0;
      c.phase ^= 1;
    }
  } while (!(what & (STAGE_LAST | STAGE_OFF | STAGE_END)));
  sm90_wgmma_wait<0>();
  at = before;
  return what;
}

/* Adds other pairs' sums of the tile, which follow its last stage. They do not initialise its sums: the compiler would
   then wait for every wgmma. */
template <int COLS>
static __device__ __forceinline__ void add_lent(char *ring, wgmma16_shared *sh, wgmma16_consumer &c,
                                                float (&sums)[wgmma16_stage<COLS>::SUMS])
{
  typedef wgmma16_stage<COLS> stage;
  enum { STEP = wgmma16_lent<COLS>::SUMS };
#pragma unroll
  for (int g = 0; g < stage::SUMS; g += STEP) {
    if (c.slot == c.held)
      let_go_held<true>(sh, c);
    sm90_barrier_wait_at(c.full + c.slot * 8, c.phase);
    const uint32_t from = sm90_address(ring) + c.slot * stage::BYTES + (uint32_t)(thread_now() - FEEDERS) * 16;
#pragma unroll
    for (int i = 0; i < STEP && g + i < stage::SUMS; i += 4) {
      const uint4 x = sm90_load4(from + (uint32_t)i / 4 * (WORKERS * 16));
      sums[g + i] += __uint_as_float(x.x);
      sums[g + i + 1] += __uint_as_float(x.y);
      sums[g + i + 2] += __uint_as_float(x.z);
      sums[g + i + 3] += __uint_as_float(x.w);
    }
    __syncwarp();
    let_go(c, c.slot);
    if (++c.slot == stage::COUNT) {
      c.slot = 0;
      c.phase ^= 1;
    }
  }
}

/*
 * A unit's epilogue. at: its last stage. Where TMA can write C, it does so from that stage's memory while the next unit
 * is multiplied, and the stage is held until then; else it is released.
 */
template <int COLS, bool MORE>
static __device__ __forceinline__ void finish_unit(const esmm_wgmma16_params &p, const wgmma16_unit &unit, char *ring,
                                                   wgmma16_shared *sh, wgmma16_consumer &c, uint32_t at,
                                                   float (&sums)[wgmma16_stage<COLS>::SUMS])
{
  typedef wgmma16_stage<COLS> stage;
  const int warp = (thread_now() - FEEDERS) / 32, row0 = unit.row + warp * 16;
  const bool boxes = p.c_boxes && unit.parts == 1 && unit.col + COLS <= p.n;
  let_go_held<true>(sh, c);
  if (boxes)
    await_tallied(p, sh, c);
  if (boxes || c.tiles)
    meet<1, WORKERS>(); /* all warps are done with the stage; the last tile has left the spare memory */
  if (boxes) {
    const float *bias = bias_from((const float *)p.epilogue.bias, unit.col);
    if (bias && !c.gathered_lines && bias_comes(p, unit, COLS))
      bias = sh->bias[at];
    const bool late = !c.gathered_lines && tallies_late(p), counted = late && is_counted(p, unit.row);
    c.tiles++;
    c.read_back = late && !counted;
    store_boxes<MORE>(p, sh, sums, unit.row + c.group * 64, unit.col, bias, ring + at * stage::BYTES,
                      stage::BYTES / PANEL, (char *)sh->spare, late, counted);
    c.held = at;
    return;
  }
  let_go(c, at);
  int first = 0, end = wgmma16_stage<COLS>::SUMS;
  if (unit.parts > 1)
    add_parts<false>(p, unit, sums, row0, first, end);
  store_sums(p, sums, row0, unit.col, first, end, sh->spare[warp]);
}

/* The same for a gated product. The warpgroups share no memory here. */
static __device__ __forceinline__ void finish_gated_unit(const esmm_wgmma16_params &p, const wgmma16_unit &unit,
                                                         char *ring, wgmma16_shared *sh, wgmma16_consumer &c,
                                                         uint32_t at, float (&sums)[2 * GATED_SUMS])
{
  typedef wgmma16_stage<2 * ESMM_WGMMA16_GATED> stage;
  const int row0 = unit.row + (thread_now() - FEEDERS) / 32 * 16;
  const bool inside = p.c_boxes && unit.col + ESMM_WGMMA16_GATED <= p.n, boxes = inside && unit.parts == 1;
  int first = 0, end = GATED_SUMS;
  const bool late = boxes && tallies_late(p), counted = late && is_counted(p, unit.row);
  let_go_held<true>(sh, c);
  if (boxes)
    await_tallied(p, sh, c);
  if (boxes || c.tiles)
    meet_group(7 + c.group); /* its warps multiply no more; its last tile has left the spare memory */
  if (boxes) {
    c.tiles++;
    c.read_back = late && !counted;
    c.held = at;
  } else {
    let_go(c, at);
    if (unit.parts > 1)
      add_parts<true>(p, unit, sums, row0, first, end);
    if (row0 >= p.m || unit.col >= p.n)
      return;
  }
  if (inside)
    store_gated(p, sh, unit, sums, first, end, boxes, counted, ring + at * stage::BYTES + c.group * PANEL,
                bias_comes(p, unit, ESMM_WGMMA16_GATED) ? sh->bias[at] : nullptr);
  else
    store_gated_slowly(p, sums, row0, unit.col, first, end);
}

/* All stages; the loader says where they belong. False where they were called off. */
template <int COLS, esmm_dtype DTYPE, bool A_BY_K, int ENTRY>
static __device__ __forceinline__ bool multiply(const esmm_wgmma16_params &p, int mode, char *ring, wgmma16_shared *sh)
{
  wgmma16_consumer c = consumer_of(p, ring, sh, mode, wgmma16_stage<COLS>::A);
  for (;;) {
    float sums[wgmma16_stage<COLS>::SUMS];
    uint32_t at;
    const uint32_t what = multiply_unit<COLS, DTYPE, A_BY_K>(sh, c, sums, at);
    int4 words = c.lane == c.reader ? sh->unit[at] : make_int4(0, 0, 0, 0);
    words.x = __shfl_sync(~0u, words.x, c.reader);
    words.y = __shfl_sync(~0u, words.y, c.reader);
    words.z = __shfl_sync(~0u, words.z, c.reader);
    words.w = __shfl_sync(~0u, words.w, c.reader);
    const wgmma16_unit unit = unit_from_words(words);
    if (what & (STAGE_OFF | STAGE_END)) {
      let_go_held<true>(sh, c);
      let_go(c, at);
      if (what & STAGE_END && !c.gathered_lines && tallies_late(p)) {
        await_tallied(p, sh, c);
        if (threadIdx.x % 128 == 0)
          tally_next(sh, c.group, -1, 0, 0);
      }
      return what & STAGE_END;
    }
    if constexpr (ENTRY == ENTRY_LENT) {
      if (what & STAGE_RESUMES)
        add_lent<COLS>(ring, sh, c, sums);
      if (what & STAGE_LENDS) {
        let_go(c, at);
        lend(p, unit, sums);
        continue;
      }
    }
    if constexpr (ENTRY == ENTRY_GATED)
      finish_gated_unit(p, unit, ring, sh, c, at, sums);
    else
      finish_unit<COLS, ENTRY == ENTRY_MORE>(p, unit, ring, sh, c, at, sums);
  }
}

/* The dense product. False where it was called off. */
template <esmm_dtype DTYPE, int ENTRY>
static __device__ __forceinline__ bool multiply_dense(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if (p.units[ESMM_WGMMA16_DENSE].cols == ESMM_WGMMA16_WIDE)
    return p.a_by_k ? multiply<ESMM_WGMMA16_WIDE, DTYPE, true, ENTRY>(p, ESMM_WGMMA16_DENSE, ring, sh)
                    : multiply<ESMM_WGMMA16_WIDE, DTYPE, false, ENTRY>(p, ESMM_WGMMA16_DENSE, ring, sh);
  return p.a_by_k ? multiply<ESMM_WGMMA16_NARROW, DTYPE, true, ENTRY>(p, ESMM_WGMMA16_DENSE, ring, sh)
                  : multiply<ESMM_WGMMA16_NARROW, DTYPE, false, ENTRY>(p, ESMM_WGMMA16_DENSE, ring, sh);
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ void multiply_gated(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if (p.a_by_k)
    (void)multiply<2 * ESMM_WGMMA16_GATED, DTYPE, true, ENTRY_GATED>(p, ESMM_WGMMA16_DENSE, ring, sh);
  else
    (void)multiply<2 * ESMM_WGMMA16_GATED, DTYPE, false, ENTRY_GATED>(p, ESMM_WGMMA16_DENSE, ring, sh);
}

/* The multiplying warpgroups of a skipping product. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void pack_and_multiply(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if (p.a_by_k)
    pack<true>(p, ring, sh);
  else
    pack<false>(p, ring, sh);
  if (threadIdx.x == FEEDERS)
    __threadfence();
  meet<2, ESMM_WGMMA16_THREADS>();
  if (p.mode == ESMM_WGMMA16_SKIP_A)
    (void)multiply<ESMM_WGMMA16_WIDE, DTYPE, true, ENTRY_ANY>(p, ESMM_WGMMA16_SKIP_A, ring, sh);
  else
    (void)multiply<ESMM_WGMMA16_NARROW, DTYPE, true, ENTRY_ANY>(p, ESMM_WGMMA16_SKIP_AB, ring, sh);
}

/* The multiplying warpgroups. A dense product that is begun before it is known to be wanted may be called off. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ void work_on(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if ((p.choose || p.mode == ESMM_WGMMA16_DENSE) && multiply_dense<DTYPE, ENTRY_ANY>(p, ring, sh))
    return;
  pack_and_multiply<DTYPE>(p, ring, sh);
}

/* ---- loading ---- */

/* A warp, when all is packed: how many k's of A's strips are alive. The host has it while the product is multiplied. */
static __device__ __forceinline__ void report_counts(const esmm_wgmma16_params &p)
{
  const uint32_t *counts = (const uint32_t *)p.counts;
  const int items = pack_items(p), lane = (int)threadIdx.x % 32;
  int64_t alive = 0;
#pragma unroll 8
  for (int i = lane; i < items; i += 32)
    alive += __ldcg(counts + i);
#pragma unroll
  for (int d = 16; d > 0; d /= 2)
    alive += __shfl_xor_sync(~0u, alive, d);
  if (lane == 0) {
    const float strip = (float)alive / ((float)ceil_div(p.m, TILE) * (float)p.k);
    report_densities(p, strip, strip * p.b_density);
  }
}

static __device__ __forceinline__ void feed_skip(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  uint64_t began = 0;
  if (threadIdx.x == 0) {
    if (p.report)
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    pack_feed(p, ring, sh);
  } else if (threadIdx.x == 32) {
    pack_send(p, ring, sh);
  }
  meet<2, ESMM_WGMMA16_THREADS>(); /* this block has packed its part */
  if (threadIdx.x == 0) {
    wait_for_all((uint32_t *)p.meeting, gridDim.x);
    sm90_fence_async_all();
    if (p.report && blockIdx.x == 0) {
      uint64_t now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
      ((esmm_choice_device *)p.report)->extract_ns = (uint32_t)(now - began);
    }
  }
  meet<3, FEEDERS>();
  if (p.report && blockIdx.x == gridDim.x - 1 && threadIdx.x >= FEEDERS - 32)
    report_counts(p);
  if (p.mode == ESMM_WGMMA16_SKIP_A)
    feed_skip_a(p, ring, sh);
  else
    feed_skip_ab(p, ring, sh);
  if (threadIdx.x == 0)
    leave((uint32_t *)p.meeting, gridDim.x);
}

/* Tallies C, where the dense product is wanted: by the warps that do not load. */
template <bool GATED>
static __device__ __forceinline__ void tally_dense(const esmm_wgmma16_params &p, wgmma16_shared *sh)
{
  if (p.choose) {
    sm90_barrier_wait(&sh->decided, 0);
    if (sh->mode != ESMM_WGMMA16_DENSE)
      return;
  }
  if (GATED)
    tally_tiles<2 * ESMM_WGMMA16_GATED, true>(p, sh);
  else if (p.units[ESMM_WGMMA16_DENSE].cols == ESMM_WGMMA16_WIDE)
    tally_tiles<ESMM_WGMMA16_WIDE, false>(p, sh);
  else
    tally_tiles<ESMM_WGMMA16_NARROW, false>(p, sh);
}

/* The loading warpgroup: thread 0 feeds the dense product while two warps decide whether it is wanted. */
static __device__ __forceinline__ void load_for(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if (p.mode == ESMM_WGMMA16_DENSE || p.choose) {
    if (threadIdx.x == 0)
      p.units[ESMM_WGMMA16_DENSE].cols == ESMM_WGMMA16_WIDE
          ? feed_dense<ESMM_WGMMA16_WIDE, false, false>(p, ring, sh)
          : feed_dense<ESMM_WGMMA16_NARROW, false, false>(p, ring, sh);
    else if (p.choose && threadIdx.x >= FEEDERS - SAMPLERS)
      wgmma16_choose(p, sh);
    if (threadIdx.x >= 32 && tallies_late(p))
      tally_dense<false>(p, sh);
    meet<3, FEEDERS>();
    if (p.mode == ESMM_WGMMA16_DENSE || sh->mode == ESMM_WGMMA16_DENSE)
      return;
  }
  feed_skip(p, ring, sh);
}

/* The same for entries that only have the dense mode, and do not choose. */
template <int ENTRY>
static __device__ __forceinline__ void load_wanted(const esmm_wgmma16_params &p, char *ring, wgmma16_shared *sh)
{
  if (threadIdx.x == 0) {
    if (ENTRY == ENTRY_GATED)
      feed_dense<2 * ESMM_WGMMA16_GATED, ENTRY == ENTRY_GATED, false>(p, ring, sh);
    else if (p.units[ESMM_WGMMA16_DENSE].cols == ESMM_WGMMA16_WIDE)
      feed_dense<ESMM_WGMMA16_WIDE, false, ENTRY == ENTRY_LENT>(p, ring, sh);
    else
      feed_dense<ESMM_WGMMA16_NARROW, false, ENTRY == ENTRY_LENT>(p, ring, sh);
  } else if (threadIdx.x >= 32 && tallies_late(p)) {
    tally_dense<ENTRY == ENTRY_GATED>(p, sh);
  }
  meet<3, FEEDERS>();
}

template <esmm_dtype DTYPE, int ENTRY> static __device__ __forceinline__ void wgmma16_main(const esmm_wgmma16_params &p)
{
  extern __shared__ __align__(1024) char ring[]; /* the only shared memory, so aligned as declared */
  wgmma16_shared *sh = (wgmma16_shared *)(ring + RING_BYTES);
  if (threadIdx.x == 0) { /* one thread in loops: eight at once are slower, their code is longer */
    sm90_prefetch_map(&p.map_a);
    sm90_prefetch_map(&p.map_b);
    if (ENTRY == ENTRY_GATED)
      sm90_prefetch_map(&p.map_gate);
#pragma unroll 1
    for (int i = 0; i < MAX_STAGES; i++) { /* eight warps of each block release a stage */
      sm90_barrier_init(&sh->dense.full[i], 1);
      sm90_barrier_init(&sh->dense.empty[i], p.units[ESMM_WGMMA16_DENSE].share == ESMM_WGMMA16_ALONE ? 8 : 16);
    }
    if (p.c_boxes)
      sm90_prefetch_map(&p.map_c);
    if (tallies_late(p)) {
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        sm90_barrier_init(&sh->tile_there[i], 1);
        sm90_barrier_init(&sh->tallied[i], TALLY_WARPS);
      }
#pragma unroll 1
      for (int i = 0; i < ESMM_WGMMA16_WIDE; i += 16)
        *(uint4 *)&sh->tally_bytes[i] = make_uint4(0, 0, 0, 0);
    }
    if (ENTRY == ENTRY_ANY && p.mode != ESMM_WGMMA16_DENSE) {
      sm90_prefetch_map(&p.map_packed);
#pragma unroll 1
      for (int i = 0; i < MAX_STAGES; i++) {
        sm90_barrier_init(&sh->skip.full[i], 1 + FEEDERS);
        sm90_barrier_init(&sh->skip.empty[i], p.units[p.mode].share == ESMM_WGMMA16_ALONE ? 8 : 16);
      }
      sm90_barrier_init(&sh->decided, 1);
#pragma unroll 1
      for (int i = 0; i < PACK_WARPS; i++) {
        sm90_barrier_init(&sh->pack_full[i], 1);
        sm90_barrier_init(&sh->pack_empty[i], 1);
        sm90_barrier_init(&sh->turn_full[i], 1);
      }
#pragma unroll 1
      for (int i = 0; i < PACK_BLOCKS; i++) { /* as many arrive as it has lines */
        sm90_barrier_init(&sh->block_full[i], ESMM_WGMMA16_K);
        sm90_barrier_init(&sh->block_empty[i], 1);
      }
    }
    sm90_fence_init();
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < FEEDERS) {
    sm90_registers_down<120>();
    if constexpr (ENTRY == ENTRY_ANY)
      load_for(p, ring, sh);
    else
      load_wanted<ENTRY>(p, ring, sh);
  } else {
    sm90_registers_up<192>();
    if constexpr (ENTRY == ENTRY_ANY)
      work_on<DTYPE>(p, ring, sh);
    else if constexpr (ENTRY == ENTRY_MORE || ENTRY == ENTRY_LENT)
      (void)multiply_dense<DTYPE, ENTRY>(p, ring, sh);
    else
      multiply_gated<DTYPE>(p, ring, sh);
  }
  cluster_sync(); /* the other block may still send here */
}

#define KERNELS(name, entry)                                                   \
  extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)        \
      esmm_wgmma16_##name##bf16(const __grid_constant__ esmm_wgmma16_params p) \
  {                                                                            \
    if (!not_selected(p.selector))                                             \
      wgmma16_main<ESMM_BF16, entry>(p);                                       \
  }                                                                            \
  extern "C" __global__ void __launch_bounds__(ESMM_WGMMA16_THREADS, 1)        \
      esmm_wgmma16_##name##f16(const __grid_constant__ esmm_wgmma16_params p)  \
  {                                                                            \
    if (!not_selected(p.selector))                                             \
      wgmma16_main<ESMM_F16, entry>(p);                                        \
  }

KERNELS(, ENTRY_ANY)
/* For these mode is ESMM_WGMMA16_DENSE and choose 0: no report is made. Only here units[ESMM_WGMMA16_DENSE].lent is
   set; nothing is of ESMM_EXTRA_VALUES where c_boxes is set; */
KERNELS(lent_, ENTRY_LENT)
/* here c_boxes is set, and something is of ESMM_EXTRA_VALUES; */
KERNELS(more_, ENTRY_MORE)
/* and these make both products of a gated one. */
KERNELS(gated_, ENTRY_GATED)

/*
 * What a launch with these parameters chooses, to p.report: one block of SAMPLERS threads, no dynamic shared memory, no
 * cluster. Reads m, k, mode, choose, a, a_ld, a_by_k, b_alive and the line; of either dtype only the zeros. Where the
 * launch does not choose, no densities are known.
 */
extern "C" __global__ void __launch_bounds__(SAMPLERS) esmm_wgmma16_look(const __grid_constant__ esmm_wgmma16_params p)
{
  __shared__ alignas(16) uint4 sample[SAMPLES][TILE];
  __shared__ uint32_t sample_bits[SAMPLES][2], found[2];
  esmm_choice_device out = {};
  if (!p.choose) {
    out.chosen = p.mode != ESMM_WGMMA16_DENSE;
  } else {
    const wgmma16_choice choice = wgmma16_sample(p, sample, sample_bits);
    int nonzeros = 0, all = 0; /* of what this thread looked at; of all */
    for (int i = 0; i < SAMPLES; i++) {
      int row, k;
      sample_place(p, i, row, k);
      const int rows = min(TILE, p.m - row);
      all += (p.a_by_k ? rows / SAMPLE_SIDE * SAMPLE_SIDE : rows) * SAMPLE_SIDE;
      for (int at = (int)threadIdx.x; at < TILE; at += SAMPLERS)
        nonzeros += __popc(nonzero_bits(sample[i][at]));
    }
    nonzeros = __reduce_add_sync(~0u, nonzeros);
    if (threadIdx.x % 32 == 0)
      found[threadIdx.x / 32] = (uint32_t)nonzeros;
    __syncthreads();
    out.chosen = choice.skip;
    out.element = (float)(found[0] + found[1]) / (float)max(all, 1);
    out.strip = choice.strip;
    out.joint = choice.joint;
  }
  if (threadIdx.x == 0)
    *(esmm_choice_device *)p.report = out;
}
