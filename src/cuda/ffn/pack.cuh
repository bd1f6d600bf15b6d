/*
 * pack.cuh: two of each four values of an operand, packed for the sparse tensor cores in the same pass that chooses
 * them: blocks of 128 lines by 64 k's, as nm_layout.h has them, with lines for its columns.
 *
 *   along features   lines are tokens, k's are features: what lies side by side is packed as it is read
 *   along tokens     lines are features, k's are tokens, in the order that is asked for: packed columns of what is read
 *
 * Columns that do not go sparse are zeros here, and are copied to a matrix of their own beside it. All lines are there,
 * and all k's of them, to whole pairs of 128 lines and to 64 k's: what is past the matrix is zero.
 *
 * The largest two of four are found by sorting keys, magnitude << 2 | 3 - place: no two are equal, the earlier of two
 * equal magnitudes comes first, NaN before all. All notes follow from the sorted keys.
 */
#ifndef ESMM_CUDA_FFN_PACK_CUH
#define ESMM_CUDA_FFN_PACK_CUH

#include "cuda/ffn/choose.cuh"
#include "cuda/ops/nm_layout.h"

/* ---- one group of four k's: two words, the first k in the lowest half ---- */

/* Its keys in falling order. */
struct sorted {
  uint32_t first, second, third, fourth;
};

static __device__ __forceinline__ sorted sort_keys(uint32_t low, uint32_t high)
{
  const uint32_t a = (low & 0x7fffu) << 2 | 3, b = (low >> 14 & 0x1fffcu) | 2;
  const uint32_t c = (high & 0x7fffu) << 2 | 1, d = high >> 14 & 0x1fffcu;
  const uint32_t most = max(a, b), less = min(a, b), more = max(c, d), least = min(c, d);
  const uint32_t lower = min(most, more), upper = max(less, least);
  const sorted s = {max(most, more), max(lower, upper), min(lower, upper), min(less, least)};
  return s;
}

/* The places of the two largest, four bits as nm_layout.h has them. */
static __device__ __forceinline__ uint32_t places_of(const sorted &s)
{
  const uint32_t x = ~s.first & 3, y = ~s.second & 3;
  return min(x, y) | max(x, y) << 2;
}

static __device__ __forceinline__ uint32_t two_at(uint32_t low, uint32_t high, uint32_t places)
{
  return __byte_perm(low, high, 0x1010u + (places & 3) * 0x22u + (places >> 2) * 0x2200u);
}

/* The magnitude of a key. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ float magnitude(uint32_t key)
{
  if (DTYPE == ESMM_F16)
    return __half2float(__ushort_as_half((unsigned short)(key >> 2)));
  return __uint_as_float((key & ~3u) << 14); /* ESMM_BF16 */
}

/* One element of a word. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ float element_of(uint32_t word, int which)
{
  const uint32_t bits = which ? word >> 16 : word & 0xffffu;
  return DTYPE == ESMM_F16 ? __half2float(__ushort_as_half((unsigned short)bits)) : __uint_as_float(bits << 16);
}

/* What is noted of the largest: as esmm_ffn_record, in few registers. */
struct tally {
  uint32_t kept, dropped;
  double norm, difference;
};

template <bool LARGEST> struct noted {
  typedef esmm_ffn_record type;
};
template <> struct noted<true> {
  typedef tally type;
};

static __device__ __forceinline__ esmm_ffn_record record_of(const esmm_ffn_record &r)
{
  return r;
}

static __device__ __forceinline__ esmm_ffn_record record_of(const tally &t)
{
  const esmm_ffn_record r = {t.kept, t.dropped, t.norm, t.difference, 0.0, 0.0};
  return r;
}

/* ---- 16 k's of a line: eight words become four, and 16 bits of places ---- */

struct packed {
  uint32_t values[4], places;
};

static __device__ __forceinline__ packed pack(const uint32_t (&x)[8])
{
  packed out = {};
#pragma unroll
  for (int g = 0; g < 4; g++) {
    const uint32_t places = places_of(sort_keys(x[2 * g], x[2 * g + 1]));
    out.values[g] = two_at(x[2 * g], x[2 * g + 1], places);
    out.places |= places << 4 * g;
  }
  return out;
}

/* A power of two that brings the largest of 16 near 1, so that fp32 can hold their squares. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ int exponent_of(const uint32_t (&x)[8])
{
  if (DTYPE == ESMM_F16) /* it can as they are */
    return 127;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    most = __vmaxu2(most, x[i] & 0x7fff7fffu);
  return max(254 - (int)(max(most & 0xffffu, most >> 16) >> 7), 1);
}

/* The two largest of each four. */
template <esmm_dtype DTYPE> static __device__ __forceinline__ packed pack_largest(const uint32_t (&x)[8], tally &r)
{
  const int exponent = exponent_of<DTYPE>(x);
  const float scale = __int_as_float(exponent << 23);
  packed out = {};
  uint32_t kept = 0, dropped = 0;
  float squares = 0.0f, lost = 0.0f;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    const sorted s = sort_keys(x[2 * g], x[2 * g + 1]);
    const uint32_t places = places_of(s);
    out.values[g] = two_at(x[2 * g], x[2 * g + 1], places);
    out.places |= places << 4 * g;
    const float a = scale * magnitude<DTYPE>(s.first), b = scale * magnitude<DTYPE>(s.second);
    const float c = scale * magnitude<DTYPE>(s.third), d = scale * magnitude<DTYPE>(s.fourth);
    squares = fmaf(a, a, fmaf(b, b, squares));
    lost = fmaf(c, c, fmaf(d, d, lost));
    kept += (uint32_t)(s.first > 3) + (uint32_t)(s.second > 3);
    dropped += (uint32_t)(s.third > 3) + (uint32_t)(s.fourth > 3);
  }
  const double unscaled = __hiloint2double((1023 + 2 * (127 - exponent)) << 20, 0);
  r.kept += kept;
  r.dropped += dropped;
  r.norm += unscaled * (double)(squares + lost);
  r.difference += unscaled * (double)lost;
  return out;
}

/* Of any sparsifier; place: of the first group, the others' follow. */
template <esmm_dtype DTYPE>
static __device__ __forceinline__ packed pack_chosen(const esmm_ffn_sparsify_params &p, uint32_t (&x)[8],
                                                     uint64_t place, float factor, esmm_ffn_record &r)
{
#pragma unroll
  for (int g = 0; g < 4; g++) {
    float v[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++)
      v[i] = element_of<DTYPE>(x[2 * g + i / 2], i % 2);
    do_group_here(dtype_of<DTYPE>(), p, v, place + (uint64_t)g, factor, r);
    x[2 * g] = pair_of<DTYPE>(v[0], v[1]);
    x[2 * g + 1] = pair_of<DTYPE>(v[2], v[3]);
  }
  return pack(x);
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ packed pack_16(const esmm_ffn_sparsify_params &, uint32_t (&x)[8], uint64_t, float,
                                                 tally &r)
{
  return pack_largest<DTYPE>(x, r);
}

template <esmm_dtype DTYPE>
static __device__ __forceinline__ packed pack_16(const esmm_ffn_sparsify_params &p, uint32_t (&x)[8], uint64_t place,
                                                 float factor, esmm_ffn_record &r)
{
  return pack_chosen<DTYPE>(p, x, place, factor, r);
}

/* A value that stays as it is, to its place beside. It is read once more, from the first-level cache: few are, and to
   pick them out of registers takes twice as many of those. */
template <esmm_dtype DTYPE, class NOTED>
static __device__ __forceinline__ void put_aside(const esmm_ffn_pack_params &p, int64_t token, int64_t feature,
                                                 int32_t column, NOTED &r)
{
  const uint32_t bits = __ldg((const uint16_t *)p.how.src + token * p.how.features + feature);
  const float v = element_of<DTYPE>(bits, 0);
  ((uint16_t *)p.side)[token * p.side_ld + column] = (uint16_t)bits;
  r.kept += v != 0.0f;
  r.norm += (double)v * (double)v;
}

/* ---- along features ---- */

#define FEATURES_THREADS ESMM_FFN_PACK_FEATURES
#define PATCH_LINES (2 * ESMM_NM16_COLS)
static_assert(FEATURES_THREADS / 32 * 16 == PATCH_LINES, "a warp has 16 lines of a patch");

/* Eight features of a token; zeros past the end. */
static __device__ __forceinline__ uint4 load_8(const esmm_ffn_sparsify_params &p, int64_t token, int64_t feature,
                                               bool vectors)
{
  if (token >= p.tokens || feature >= p.features)
    return make_uint4(0, 0, 0, 0);
  const uint16_t *from = (const uint16_t *)p.src + token * p.features + feature;
  if (vectors)
    return __ldg((const uint4 *)from);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (feature + i < p.features)
      words[i / 2] |= (uint32_t)from[i] << 16 * (i % 2);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Which of 16 features, from a multiple of 16 on, do not go sparse. */
static __device__ __forceinline__ uint32_t others_of(const esmm_ffn_sparsify_params &p, int64_t feature, bool vectors)
{
  const int32_t *others = (const int32_t *)p.others + feature;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    int4 four = make_int4(-1, -1, -1, -1);
    if (vectors && feature + i < p.features) {
      four = __ldg((const int4 *)(others + i));
    } else if (!vectors) {
      four.x = feature + i < p.features ? others[i] : -1;
      four.y = feature + i + 1 < p.features ? others[i + 1] : -1;
      four.z = feature + i + 2 < p.features ? others[i + 2] : -1;
      four.w = feature + i + 3 < p.features ? others[i + 3] : -1;
    }
    bits |= (uint32_t)(four.x >= 0) << i | (uint32_t)(four.y >= 0) << (i + 1) | (uint32_t)(four.z >= 0) << (i + 2) |
            (uint32_t)(four.w >= 0) << (i + 3);
  }
  return bits;
}

/* A patch is 256 tokens by 64 features; a warp has 16 tokens of it, a lane 16 features of two of them, 8 apart. */
template <esmm_dtype DTYPE, bool LARGEST, bool OTHERS>
static __device__ __forceinline__ void pack_features(const esmm_ffn_pack_params &p)
{
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = lane % 4;
  const int line = warp % (ESMM_NM16_COLS / 16) * 16 + lane / 4;
  const int count = p.strips / 2 * p.blocks;
  const bool vectors = p.how.features % 8 == 0 && p.how.src % 16 == 0;
  const float factor = factor_of(p.how);
  typename noted<LARGEST>::type r = {};
#pragma unroll 1
  for (int patch = (int)blockIdx.x; patch < count; patch += (int)gridDim.x) {
    const int pair = patch / p.blocks, block = patch % p.blocks;
    const int64_t token = (int64_t)pair * PATCH_LINES + warp * 16 + lane / 4;
    const int64_t feature = (int64_t)block * ESMM_NM16_K + part * 16;
    uint32_t x[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 a = load_8(p.how, token + 8 * h, feature, vectors);
      const uint4 b = load_8(p.how, token + 8 * h, feature + 8, vectors);
      x[h][0] = a.x, x[h][1] = a.y, x[h][2] = a.z, x[h][3] = a.w;
      x[h][4] = b.x, x[h][5] = b.y, x[h][6] = b.z, x[h][7] = b.w;
    }
    if (OTHERS) {
      uint32_t others = others_of(p.how, feature, vectors);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint32_t gone = (others >> 2 * i & 1) * 0xffffu | (others >> (2 * i + 1) & 1) * 0xffff0000u;
        x[0][i] &= ~gone;
        x[1][i] &= ~gone;
      }
      if (p.how.step == ESMM_FFN_MEASURES)
        others = 0;
#pragma unroll 1
      for (; others != 0; others &= others - 1) {
        const int64_t f = feature + __ffs((int)others) - 1;
        const int32_t column = __ldg((const int32_t *)p.how.others + f);
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (token + 8 * h < p.how.tokens)
            put_aside<DTYPE>(p, token + 8 * h, f, column, r);
      }
    }
    char *to = (char *)p.half + esmm_nm16_block_at(2 * pair + warp / (ESMM_NM16_COLS / 16), block, p.blocks);
    uint32_t word = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint64_t place = (uint64_t)(token + 8 * h) << 32 | (uint64_t)(feature / GROUP);
      const packed two = pack_16<DTYPE>(p.how, x[h], place, factor, r);
      word |= two.places << 16 * h;
      if (p.how.step != ESMM_FFN_MEASURES)
        *(uint4 *)(to + esmm_nm16_value_at(line + 8 * h, 8 * part)) =
            make_uint4(two.values[0], two.values[1], two.values[2], two.values[3]);
    }
    if (p.how.step != ESMM_FFN_MEASURES)
      *(uint32_t *)(to + esmm_nm16_word_at(line, 4 * part)) = word;
  }
  esmm_ffn_record all = record_of(r);
  leave_record<FEATURES_THREADS>(p.how, all);
}

/* ---- along tokens ---- */

#define TOKENS_THREADS ESMM_FFN_PACK_TOKENS
static_assert(TOKENS_THREADS == 256, "warps: two halves of 64 features, four parts of 16 tokens");

/* Which token is the i-th; i is below their number. */
static __device__ __forceinline__ int64_t token_at(const esmm_ffn_sparsify_params &p, int64_t i)
{
  return p.token_order ? ((const int32_t *)p.token_order)[i] : i;
}

/* Features f and f + 1 of a token, f even; zeros past the end. */
static __device__ __forceinline__ uint32_t load_2(const esmm_ffn_sparsify_params &p, int64_t i, int64_t f, bool pairs)
{
  if (i >= p.tokens || f >= p.features)
    return 0;
  const uint16_t *from = (const uint16_t *)p.src + token_at(p, i) * p.features + f;
  if (pairs)
    return __ldg((const uint32_t *)from);
  return from[0] | (f + 1 < p.features ? (uint32_t)from[1] << 16 : 0);
}

static __device__ __forceinline__ bool is_other(const esmm_ffn_sparsify_params &p, int64_t feature)
{
  return feature < p.features && __ldg((const int32_t *)p.others + feature) >= 0;
}

/* A warp's columns that do not go sparse, one after the other, a lane for each of 16 tokens from `first` on. f: the
   first of the lane's two. */
template <esmm_dtype DTYPE, class NOTED>
static __device__ __forceinline__ void put_columns_aside(const esmm_ffn_pack_params &p, int64_t f, int64_t first,
                                                         NOTED &r)
{
  const int lane = (int)threadIdx.x % 32;
  const bool mine = lane < 16 && first + lane < p.how.tokens;
  const int64_t token = mine ? token_at(p.how, first + lane) : 0;
#pragma unroll 1
  for (int e = 0; e < 2; e++) {
    uint32_t left = __ballot_sync(~0u, is_other(p.how, f + e));
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int64_t feature = f + e + 2 * (__ffs((int)left) - 1 - lane);
      if (mine)
        put_aside<DTYPE>(p, token, feature, __ldg((const int32_t *)p.how.others + feature), r);
    }
  }
}

/* A block of 128 features by 64 tokens at a time; a warp has 64 features of 16 tokens, a lane two of those. It is laid
   out in shared memory and goes out in one piece. */
template <esmm_dtype DTYPE, bool LARGEST, bool OTHERS>
static __device__ __forceinline__ void pack_tokens(const esmm_ffn_pack_params &p)
{
  __shared__ __align__(16) char image[ESMM_NM16_BLOCK];
  const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, part = warp / 2;
  const int line = warp % 2 * ESMM_NM16_LINES + 2 * lane;
  const int count = p.strips * p.blocks;
  const bool pairs = p.how.features % 2 == 0 && p.how.src % 4 == 0;
  const float factor = factor_of(p.how);
  typename noted<LARGEST>::type r = {};
#pragma unroll 1
  for (int patch = (int)blockIdx.x; patch < count; patch += (int)gridDim.x) {
    const int strip = patch % p.strips, block = patch / p.strips;
    const int64_t f = (int64_t)strip * ESMM_NM16_COLS + line, first = (int64_t)block * ESMM_NM16_K + part * 16;
    uint32_t rows[16];
#pragma unroll
    for (int i = 0; i < 16; i++)
      rows[i] = load_2(p.how, first + i, f, pairs);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      uint32_t x[8];
#pragma unroll
      for (int i = 0; i < 8; i++)
        x[i] = __byte_perm(rows[2 * i], rows[2 * i + 1], e ? 0x7632 : 0x5410);
      if (OTHERS && is_other(p.how, f + e)) {
#pragma unroll
        for (int i = 0; i < 8; i++)
          x[i] = 0;
      }
      const uint64_t place = (uint64_t)(f + e) << 32 | (uint64_t)(first / GROUP);
      const packed two = pack_16<DTYPE>(p.how, x, place, factor, r);
      *(uint4 *)(image + esmm_nm16_value_at(line + e, 8 * part)) =
          make_uint4(two.values[0], two.values[1], two.values[2], two.values[3]);
      *(uint16_t *)(image + esmm_nm16_word_at(line + e, 4 * part) + esmm_nm16_shift(line + e, 0) / 8) =
          (uint16_t)two.places;
    }
    if (OTHERS && p.how.step != ESMM_FFN_MEASURES)
      put_columns_aside<DTYPE>(p, f, first, r);
    __syncthreads();
    if (p.how.step != ESMM_FFN_MEASURES) {
      uint4 *to = (uint4 *)((char *)p.half + esmm_nm16_block_at(strip, block, p.blocks));
      for (int i = (int)threadIdx.x; i < ESMM_NM16_BLOCK / 16; i += TOKENS_THREADS)
        to[i] = ((const uint4 *)image)[i];
    }
    __syncthreads();
  }
  esmm_ffn_record all = record_of(r);
  leave_record<TOKENS_THREADS>(p.how, all);
}

#endif
