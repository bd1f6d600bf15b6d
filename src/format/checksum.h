/*
 * checksum.h: the 64-bit checksum of weights files. It finds damage (flipped bits, lost or swapped blocks, short
 * copies). It is no defence against a forged file, so the reader checks the contents as well.
 *
 * Four lanes, each takes every fourth 8-byte word:
 *
 *     lane = (rotate(lane, 23) ^ word * SPREAD) * STEP
 *
 * Four, because one lane waits for its own multiply: the lanes' chains overlap, which makes it faster than memory.
 * Both constants are odd, so a step is a bijection of the lane for a given word and of the word for a given lane, and
 * so is every step of the closing mix: damage inside one aligned 8-byte word is always found, other damage is missed
 * with a chance near 2^-64. The word is multiplied before it meets the lane so that no two single-bit flips cancel.
 *
 * Words are read in the machine's byte order: files carry their byte order, and the library reads only its own.
 */
#ifndef ESMM_CHECKSUM_H
#define ESMM_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ESMM_CHECKSUM_LANES 4
#define ESMM_CHECKSUM_BLOCK (8 * ESMM_CHECKSUM_LANES) /* every part but the last is a multiple of this long */

#define ESMM_CHECKSUM_SPREAD 0xd1342543de82ef95u
#define ESMM_CHECKSUM_STEP 0x9e6c63d0676a9a99u

typedef struct esmm_checksum {
  uint64_t lane[ESMM_CHECKSUM_LANES];
  uint64_t length;
} esmm_checksum;

static inline uint64_t esmm_checksum_rotate(uint64_t x, int by)
{
  return x << by | x >> (64 - by);
}

static inline void esmm_checksum_begin(esmm_checksum *sum)
{
  for (int i = 0; i < ESMM_CHECKSUM_LANES; i++)
    sum->lane[i] = ESMM_CHECKSUM_STEP * (uint64_t)(i + 1);
  sum->length = 0;
}

static inline uint64_t esmm_checksum_step(uint64_t lane, uint64_t word)
{
  return (esmm_checksum_rotate(lane, 23) ^ word * ESMM_CHECKSUM_SPREAD) * ESMM_CHECKSUM_STEP;
}

static inline void esmm_checksum_block(uint64_t *lane, const void *block)
{
  uint64_t word[ESMM_CHECKSUM_LANES];
  memcpy(word, block, sizeof word);
  lane[0] = esmm_checksum_step(lane[0], word[0]);
  lane[1] = esmm_checksum_step(lane[1], word[1]);
  lane[2] = esmm_checksum_step(lane[2], word[2]);
  lane[3] = esmm_checksum_step(lane[3], word[3]);
}

static inline void esmm_checksum_add(esmm_checksum *sum, const void *data, size_t bytes)
{
  const unsigned char *at = data;
  uint64_t lane[ESMM_CHECKSUM_LANES];
  memcpy(lane, sum->lane, sizeof lane);
  sum->length += bytes;
  for (; bytes >= ESMM_CHECKSUM_BLOCK; at += ESMM_CHECKSUM_BLOCK, bytes -= ESMM_CHECKSUM_BLOCK)
    esmm_checksum_block(lane, at);
  if (bytes > 0) { /* the end: as if zeros followed; the length says that these are none */
    unsigned char last[ESMM_CHECKSUM_BLOCK] = {0};
    memcpy(last, at, bytes);
    esmm_checksum_block(lane, last);
  }
  memcpy(sum->lane, lane, sizeof lane);
}

static inline uint64_t esmm_checksum_end(const esmm_checksum *sum)
{
  uint64_t x = sum->length * ESMM_CHECKSUM_SPREAD;
  for (int i = 0; i < ESMM_CHECKSUM_LANES; i++) {
    x = (x ^ sum->lane[i]) * ESMM_CHECKSUM_STEP;
    x ^= x >> 29;
  }
  x *= ESMM_CHECKSUM_SPREAD;
  return x ^ x >> 32;
}

static inline uint64_t esmm_checksum_of(const void *data, size_t bytes)
{
  esmm_checksum sum;
  esmm_checksum_begin(&sum);
  esmm_checksum_add(&sum, data, bytes);
  return esmm_checksum_end(&sum);
}

#endif
