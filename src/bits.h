/* bits.h: elements seen as bits: reading floats as words, counting nonzeros, gathering flags. */
#ifndef ESMM_BITS_H
#define ESMM_BITS_H

#include "dtype.h"

#include <string.h>

/* Elements of a matrix read as their bits, whatever type they were stored as. */
typedef uint32_t __attribute__((may_alias)) esmm_word32;
typedef uint16_t __attribute__((may_alias)) esmm_word16;

/* An unknown dtype has no elements: what follows then reads and writes nothing. Public functions have refused it. */

static inline uint32_t esmm_bits_at(const void *data, esmm_dtype dtype, int64_t index)
{
  switch (dtype) {
  case ESMM_F32:
    return ((const esmm_word32 *)data)[index];
  case ESMM_BF16:
  case ESMM_F16:
    return ((const esmm_word16 *)data)[index];
  }
  return 0;
}

/* Neither +0 nor -0. */
static inline bool esmm_nonzero_at(const void *data, esmm_dtype dtype, int64_t index)
{
  return (esmm_bits_at(data, dtype, index) & esmm_dtype_magnitude(dtype)) != 0;
}

/* Elements that are neither +0 nor -0. */
static inline int64_t esmm_count_nonzero(const void *data, esmm_dtype dtype, int64_t count)
{
  const uint32_t magnitude = esmm_dtype_magnitude(dtype);
  const esmm_word32 *words = data;
  const esmm_word16 *halves = data;
  int64_t nonzero = 0;
  switch (dtype) {
  case ESMM_F32:
    for (int64_t i = 0; i < count; i++)
      nonzero += (words[i] & magnitude) != 0;
    break;
  case ESMM_BF16:
  case ESMM_F16:
    for (int64_t i = 0; i < count; i++)
      nonzero += (halves[i] & (uint16_t)magnitude) != 0;
    break;
  }
  return nonzero;
}

/* flags[i] = 1 for those, 0 for zeros */
static inline void esmm_flag_nonzero(const void *data, esmm_dtype dtype, int64_t count, unsigned char *flags)
{
  const uint32_t magnitude = esmm_dtype_magnitude(dtype);
  const esmm_word32 *words = data;
  const esmm_word16 *halves = data;
  switch (dtype) {
  case ESMM_F32:
    for (int64_t i = 0; i < count; i++)
      flags[i] = (words[i] & magnitude) != 0;
    break;
  case ESMM_BF16:
  case ESMM_F16:
    for (int64_t i = 0; i < count; i++)
      flags[i] = (halves[i] & (uint16_t)magnitude) != 0;
    break;
  }
}

/* count elements, to_step and from_step elements apart, as their bits, so that every NaN stays as it is. */
static inline void esmm_copy_elements(void *to, int64_t to_step, const void *from, int64_t from_step, int64_t count,
                                      esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    for (int64_t i = 0; i < count; i++)
      ((esmm_word32 *)to)[i * to_step] = ((const esmm_word32 *)from)[i * from_step];
    break;
  case ESMM_BF16:
  case ESMM_F16:
    for (int64_t i = 0; i < count; i++)
      ((esmm_word16 *)to)[i * to_step] = ((const esmm_word16 *)from)[i * from_step];
    break;
  }
}

static inline void esmm_copy_element(void *to, int64_t at, const void *from, int64_t index, esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    ((esmm_word32 *)to)[at] = ((const esmm_word32 *)from)[index];
    break;
  case ESMM_BF16:
  case ESMM_F16:
    ((esmm_word16 *)to)[at] = ((const esmm_word16 *)from)[index];
    break;
  }
}

/* 64 flags of 0 or 1, one a byte, to a word: the product moves byte i's bit to bit 56 + i, and no two meet. */
static inline uint64_t esmm_gather_bits(const unsigned char *flags)
{
  uint64_t word = 0;
  for (int i = 0; i < 8; i++) {
    uint64_t eight;
    memcpy(&eight, flags + 8 * i, sizeof eight);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    eight = __builtin_bswap64(eight);
#endif
    word |= (eight * 0x0102040810204080u >> 56) << (8 * i);
  }
  return word;
}

#endif
