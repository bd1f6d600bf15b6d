/*
 * nm_layout.h: where the values and places of 2:4 weights lie on a GPU (form nm16), for host and device alike.
 *
 * Blocks of 128 columns by 64 k's, those of the same columns one after the other, as one bulk copy brings them into
 * shared memory. The sparse operand of Hopper's wgmma.sp has its rows along M, so a column of B is a line here:
 *
 *   block, 9216 bytes = two halves of 64 columns, each
 *
 *     4096 bytes   64 lines of 64 bytes: a column's 32 kept values of 64 k's, in rising k. The four 16-byte chunks of a
 *                  line are swizzled by bits 1 and 2 of its number, as wgmma's 64-byte swizzle has them
 *      512 bytes   128 words, one for each thread of a warpgroup:
 *
 *                    thread (warp w, lane l)   columns 16w + l / 4 (lower half), 16w + l / 4 + 8 (upper half)
 *                                              k's 16 (l % 4) to 16 (l % 4) + 15: four groups, four bits each
 *
 *                  a group's four bits: the places of its two values, 0 to 3, the lower place in the lower two bits
 *
 * n is padded to 128 columns, k to 64, with zeros. 1.125 bytes for an element of B.
 */
#ifndef ESMM_CUDA_NM_LAYOUT_H
#define ESMM_CUDA_NM_LAYOUT_H

#include <stdint.h>

#define ESMM_NM16_COLS 128   /* of a block */
#define ESMM_NM16_K 64       /* of a block */
#define ESMM_NM16_LINES 64   /* columns of a half */
#define ESMM_NM16_WORDS 4096 /* where in a half the places begin */
#define ESMM_NM16_HALF 4608
#define ESMM_NM16_BLOCK 9216

#ifdef __CUDACC__
#define ESMM_NM_INLINE static __host__ __device__ __forceinline__
#else
#define ESMM_NM_INLINE static inline
#endif

ESMM_NM_INLINE int64_t esmm_nm16_tiles(int64_t n)
{
  return n / ESMM_NM16_COLS + (n % ESMM_NM16_COLS != 0);
}

ESMM_NM_INLINE int64_t esmm_nm16_blocks(int64_t k) /* of a tile of columns */
{
  return k / ESMM_NM16_K + (k % ESMM_NM16_K != 0);
}

/* Where the block of a tile and a 64 of k's begins, in bytes. */
ESMM_NM_INLINE int64_t esmm_nm16_block_at(int64_t tile, int64_t block, int64_t blocks)
{
  return (tile * blocks + block) * ESMM_NM16_BLOCK;
}

/* Within a block, in bytes: the value of column col (of 128) in slot `slot` (of 32): two of each group of four k's. */
ESMM_NM_INLINE int esmm_nm16_value_at(int col, int slot)
{
  const int line = col % ESMM_NM16_LINES, chunk = slot / 8;
  return col / ESMM_NM16_LINES * ESMM_NM16_HALF + line * 64 + (chunk ^ (line >> 1 & 3)) * 16 + slot % 8 * 2;
}

/* Within a block, in bytes: the word with the places of group `group` (of 16) of a column, and where in the word. */
ESMM_NM_INLINE int esmm_nm16_word_at(int col, int group)
{
  const int line = col % ESMM_NM16_LINES, thread = line / 16 * 32 + line % 8 * 4 + group / 4;
  return col / ESMM_NM16_LINES * ESMM_NM16_HALF + ESMM_NM16_WORDS + thread * 4;
}

ESMM_NM_INLINE int esmm_nm16_shift(int col, int group)
{
  return col / 8 % 2 * 16 + group % 4 * 4;
}

/* The four bits of a group with the nonzeros of mask: those and, if fewer than two, the lowest others; if more, the
   first two. */
ESMM_NM_INLINE uint32_t esmm_nm16_places(uint32_t mask)
{
  return (mask & 8 ? 0x498e4dccu : 0x49884444u) >> (mask & 7) * 4 & 15u;
}

#endif
