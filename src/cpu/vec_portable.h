/*
 * vec_portable.h: what gemm.h, rows.h and decode.h need, in C alone (GNU vector types, which every target has).
 *
 * Tile 4 x 8: 8 accumulators of four floats, which fits the 16 registers of SSE2 and the 32 of NEON.
 */
#ifndef ESMM_VEC_H
#define ESMM_VEC_H

#include "convert.h"
#include "cpu/costs.h"

#include <stdint.h>
#include <string.h>

typedef float vec __attribute__((vector_size(16)));
#define VEC 4 /* floats in a vector */
#define MR 4  /* most rows of a tile */
#define COST_FMA ESMM_CPU_COST_FMA_PORTABLE
#define COST_TILE ESMM_CPU_COST_TILE
#define COST_PACK ESMM_CPU_COST_PACK_PORTABLE
#define COST_WIDEN ESMM_CPU_COST_WIDEN_PORTABLE
#define COST_WORD ESMM_CPU_COST_WORD_PORTABLE

static inline vec vec_zero(void)
{
  return (vec){0};
}
static inline vec vec_load(const float *p)
{
  vec x;
  memcpy(&x, p, sizeof x);
  return x;
}
static inline vec vec_all(const float *p)
{
  return (vec){*p, *p, *p, *p};
}
static inline void vec_store(float *p, vec x)
{
  memcpy(p, &x, sizeof x);
}
/* The first count (VEC at most) floats; lanes past them are 0, and no other memory is touched. */
static inline vec vec_load_first(const float *p, int64_t count)
{
  vec x = {0};
  memcpy(&x, p, (size_t)count * sizeof *p);
  return x;
}
static inline void vec_store_first(float *p, int64_t count, vec x)
{
  memcpy(p, &x, (size_t)count * sizeof *p);
}
static inline vec vec_add(vec x, vec y)
{
  return x + y;
}
/* The sum of all lanes. */
static inline float vec_sum(vec x)
{
  return (x[0] + x[2]) + (x[1] + x[3]);
}
static inline vec vec_mul(vec x, vec y)
{
  return x * y;
}
static inline vec vec_fma(vec x, vec y, vec sum)
{
  return sum + x * y;
}
/* The sums of the lanes of eight vectors. */
static inline void vec_sums(const vec x[8], float out[8])
{
  for (int i = 0; i < 8; i++)
    out[i] = vec_sum(x[i]);
}
#define VEC_KEEP(x) (void)(x)

static inline vec vec_from_bf16(const uint16_t *p)
{
  return (vec){esmm_from_bf16(p[0]), esmm_from_bf16(p[1]), esmm_from_bf16(p[2]), esmm_from_bf16(p[3])};
}

static inline vec vec_from_f16(const uint16_t *p)
{
  return (vec){esmm_from_f16(p[0]), esmm_from_f16(p[1]), esmm_from_f16(p[2]), esmm_from_f16(p[3])};
}

static inline void vec_to_bf16(uint16_t *p, vec x)
{
  for (int i = 0; i < VEC; i++)
    p[i] = esmm_to_bf16(x[i]);
}

static inline void vec_to_f16(uint16_t *p, vec x)
{
  for (int i = 0; i < VEC; i++)
    p[i] = esmm_to_f16(x[i]);
}

/* The first count (VEC at most) of VEC 16-bit words; words past them are 0, and no other memory is touched. */
static inline void halves_load_first(uint16_t *words, const uint16_t *p, int64_t count)
{
  for (int64_t i = 0; i < VEC; i++)
    words[i] = i < count ? p[i] : 0;
}
static inline void halves_store_first(uint16_t *p, int64_t count, const uint16_t *words)
{
  for (int64_t i = 0; i < count; i++)
    p[i] = words[i];
}

/* NaN stays NaN. */
static inline vec vec_at_least(vec x, float least)
{
  for (int i = 0; i < VEC; i++)
    x[i] = x[i] < least ? least : x[i];
  return x;
}
static inline vec vec_at_most(vec x, float most)
{
  for (int i = 0; i < VEC; i++)
    x[i] = x[i] > most ? most : x[i];
  return x;
}
static inline vec vec_abs(vec x)
{
  for (int i = 0; i < VEC; i++)
    x[i] = __builtin_fabsf(x[i]);
  return x;
}

/* Half a vector in float64, for the activations. */
typedef double vec64 __attribute__((vector_size(16)));
static inline vec64 vec64_low(vec x)
{
  return (vec64){(double)x[0], (double)x[1]};
}
static inline vec64 vec64_high(vec x)
{
  return (vec64){(double)x[2], (double)x[3]};
}
static inline vec vec_from_halves(vec64 low, vec64 high)
{
  return (vec){(float)low[0], (float)low[1], (float)high[0], (float)high[1]};
}
static inline vec64 vec64_all(double x)
{
  return (vec64){x, x};
}
static inline vec64 vec64_fma(vec64 x, vec64 y, vec64 sum)
{
  return sum + x * y;
}

/* Bit i: word i of 64 is not zero, its top bit apart (a float that is not +0 or -0). */
static inline uint64_t nonzero_bits(const uint32_t *words)
{
  uint64_t bits = 0;
  for (int i = 0; i < 64; i++)
    bits |= (uint64_t)((words[i] & 0x7fffffffu) != 0) << i;
  return bits;
}

/* 4 k's of up to 4 rows, turned: out[i] holds the rows at k = i. Rows that are not there repeat the last. */
#define BLOCK 4
typedef vec block_column;
static inline void block_store(float *p, block_column x)
{
  vec_store(p, x);
}

static inline void block_load(const float *src, int64_t ld, int64_t rows, block_column out[BLOCK])
{
  const float *r1 = src + (rows > 1 ? 1 : 0) * ld, *r2 = src + (rows > 2 ? 2 : rows - 1) * ld;
  const float *r3 = src + (rows > 3 ? 3 : rows - 1) * ld;
  for (int i = 0; i < BLOCK; i++)
    out[i] = (vec){src[i], r1[i], r2[i], r3[i]};
}

/* Appends base + step * i for every set bit i of bits. */
static inline uint32_t *append_offsets(uint32_t *list, uint64_t bits, uint32_t base, uint32_t step, int at_least)
{
  (void)at_least;
  for (; bits; bits &= bits - 1)
    *list++ = base + step * (uint32_t)__builtin_ctzll(bits);
  return list;
}
#define APPEND_GROUP 64

/*
 * The nonzeros of x[0..count): values, and base + step * i as offsets. Returns how many; one entry past the end of
 * either list may be overwritten.
 */
static inline int64_t list_nonzeros(const float *x, int64_t count, uint32_t base, uint32_t step, float *values,
                                    uint32_t *offsets)
{
  int64_t n = 0;
  for (int64_t i = 0; i < count; i++) { /* writes every element, advances past kept ones only */
    values[n] = x[i];
    offsets[n] = base + step * (uint32_t)i;
    n += x[i] != 0.0f;
  }
  return n;
}

/* The bits of `bits` at the places where mask has ones, moved together. */
static inline uint64_t extract_bits(uint64_t bits, uint64_t mask)
{
  uint64_t out = 0;
  for (int at = 0; mask; mask &= mask - 1)
    out |= (bits >> __builtin_ctzll(mask) & 1) << at++;
  return out;
}

#define SELECT_MOST 0 /* no instruction selects by an index: N:M weights are widened */

#endif
