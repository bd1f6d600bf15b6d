/* bits.h: elements seen as bits: reading floats as words, counting nonzeros, gathering flags. */
#ifndef ESMM_BITS_H
#define ESMM_BITS_H

#include "esmm.h"

#include <stdbool.h>
#include <string.h>

/* Elements of a matrix read as their bits, whatever type they were stored as. */
typedef uint32_t __attribute__((may_alias)) esmm_word32;
typedef uint16_t __attribute__((may_alias)) esmm_word16;

/* Elements that are neither +0 nor -0. */
static inline int64_t esmm_count_nonzero(const void *data, esmm_dtype dtype, int64_t count)
{
  int64_t nonzero = 0;
  if (dtype == ESMM_F32) {
    const esmm_word32 *x = data;
    for (int64_t i = 0; i < count; i++)
      nonzero += (x[i] & 0x7fffffffu) != 0;
  } else {
    const esmm_word16 *x = data;
    for (int64_t i = 0; i < count; i++)
      nonzero += (x[i] & 0x7fffu) != 0;
  }
  return nonzero;
}

static inline bool esmm_nonzero_at(const void *data, esmm_dtype dtype, int64_t index)
{
  return dtype == ESMM_F32 ? (((const esmm_word32 *)data)[index] & 0x7fffffffu) != 0
                           : (((const esmm_word16 *)data)[index] & 0x7fffu) != 0;
}

/* An element as its bits, so that every NaN stays what it is. */
static inline void esmm_copy_element(void *to, int64_t at, const void *from, int64_t index, esmm_dtype dtype)
{
  if (dtype == ESMM_F32)
    ((esmm_word32 *)to)[at] = ((const esmm_word32 *)from)[index];
  else
    ((esmm_word16 *)to)[at] = ((const esmm_word16 *)from)[index];
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
