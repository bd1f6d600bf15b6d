/*
 * amx.h: the tile instructions of AMX that tiles.h and meet.h need, and the same in plain C (ESMM_AMX_EMULATED), with
 * which tests run the kernels on machines that have none.
 *
 * There are eight tiles of 16 rows, 64 bytes each. The unit multiplies a tile of A, 16 rows of 32 k's in bf16, by one
 * of B, 16 pairs of k's of 16 columns, and adds to a tile of 16 x 16 sums in fp32. Tiles belong to the thread. By the
 * ABI any call loses them, but for functions of the same file that use none. A thread that is done releases them, or
 * every context switch would save them.
 *
 * The compiler's own names for these are not used: in some versions they do not say that memory is read.
 */
#ifndef ESMM_AMX_H
#define ESMM_AMX_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define AMX_ROWS 16
#define AMX_BYTES 64 /* of a row */

#ifndef ESMM_AMX_EMULATED

/* Palette 1: all eight tiles whole. */
static inline __attribute__((always_inline)) void amx_begin(void)
{
  static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
  } whole = {.palette = 1,
             .colsb = {AMX_BYTES, AMX_BYTES, AMX_BYTES, AMX_BYTES, AMX_BYTES, AMX_BYTES, AMX_BYTES, AMX_BYTES},
             .rows = {AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS, AMX_ROWS}};
  _Static_assert(sizeof whole == 64, "as ldtilecfg reads it");
  __asm__ volatile("ldtilecfg %0" ::"m"(whole) : "memory");
}

static inline __attribute__((always_inline)) void amx_end(void)
{
  __asm__ volatile("tilerelease" ::: "memory");
}

#define amx_zero(tile) __asm__ volatile("tilezero %%tmm" #tile ::: "memory")
#define amx_load(tile, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define amx_store(tile, to, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define amx_dot(sums, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sums ::: "memory")

#else

typedef struct amx_tiles {
  int begun;
  unsigned char at[8][AMX_ROWS][AMX_BYTES];
} amx_tiles;

static _Thread_local amx_tiles amx_own;

/* Outside of begin and end the instructions fault: here they write where a sanitizer, or the result, shows it. */
static inline void amx_begin(void)
{
  memset(&amx_own, 0, sizeof amx_own);
  amx_own.begun = 1;
}

static inline void amx_end(void)
{
  memset(&amx_own, 0xff, sizeof amx_own);
  amx_own.begun = 0;
}

static inline void amx_load_rows(int tile, const void *from, int64_t stride)
{
  for (int r = 0; r < AMX_ROWS && amx_own.begun; r++)
    memcpy(amx_own.at[tile][r], (const char *)from + r * stride, AMX_BYTES);
}

static inline void amx_store_rows(int tile, void *to, int64_t stride)
{
  for (int r = 0; r < AMX_ROWS && amx_own.begun; r++)
    memcpy((char *)to + r * stride, amx_own.at[tile][r], AMX_BYTES);
}

/* Subnormals are zeros, as operands and as sums. */
static inline float amx_flush(float x)
{
  uint32_t word;
  memcpy(&word, &x, sizeof word);
  word = word & 0x7f800000 ? word : word & 0x80000000;
  memcpy(&x, &word, sizeof x);
  return x;
}

static inline float amx_widen(uint16_t half)
{
  const uint32_t word = (uint32_t)half << 16;
  float x;
  memcpy(&x, &word, sizeof x);
  return amx_flush(x);
}

/* The first of each pair and the second are summed apart, then together, then added to what was there. */
static inline void amx_dot_tiles(int sums, int a, int b)
{
  for (int m = 0; m < AMX_ROWS; m++) {
    float first[16] = {0}, second[16] = {0}, old[16];
    uint16_t x[32], y[32];
    memcpy(x, amx_own.at[a][m], sizeof x);
    for (int k = 0; k < 16; k++) {
      memcpy(y, amx_own.at[b][k], sizeof y);
      for (int n = 0; n < 16; n++) {
        first[n] = amx_flush(__builtin_fmaf(amx_widen(x[2 * k]), amx_widen(y[2 * n]), first[n]));
        second[n] = amx_flush(__builtin_fmaf(amx_widen(x[2 * k + 1]), amx_widen(y[2 * n + 1]), second[n]));
      }
    }
    memcpy(old, amx_own.at[sums][m], sizeof old);
    for (int n = 0; n < 16; n++)
      old[n] = amx_flush(amx_flush(old[n]) + amx_flush(first[n] + second[n]));
    memcpy(amx_own.at[sums][m], old, sizeof old);
  }
}

#define amx_zero(tile) memset(amx_own.at[tile], 0, sizeof amx_own.at[tile])
#define amx_load(tile, from, stride) amx_load_rows(tile, from, stride)
#define amx_store(tile, to, stride) amx_store_rows(tile, to, stride)
#define amx_dot(sums, a, b) amx_dot_tiles(sums, a, b)

#endif

#define AMX_SUMS_ROW ((int64_t)(2 * AMX_ROWS * sizeof(float))) /* bytes */

/* Sums of 2 x 2 tiles, the first four, from c [32, 32], or zeros; one: of 16 rows only. */
static inline __attribute__((always_inline)) void amx_take_sums(const bool one, const float *c, bool add)
{
  const float *below = c + AMX_ROWS * 2 * AMX_ROWS;
  if (add) {
    amx_load(0, c, AMX_SUMS_ROW);
    amx_load(1, c + AMX_ROWS, AMX_SUMS_ROW);
    if (!one) {
      amx_load(2, below, AMX_SUMS_ROW);
      amx_load(3, below + AMX_ROWS, AMX_SUMS_ROW);
    }
  } else {
    amx_zero(0);
    amx_zero(1);
    if (!one) {
      amx_zero(2);
      amx_zero(3);
    }
  }
}

/* And to c. */
static inline __attribute__((always_inline)) void amx_leave_sums(const bool one, float *c)
{
  float *below = c + AMX_ROWS * 2 * AMX_ROWS;
  amx_store(0, c, AMX_SUMS_ROW);
  amx_store(1, c + AMX_ROWS, AMX_SUMS_ROW);
  if (!one) {
    amx_store(2, below, AMX_SUMS_ROW);
    amx_store(3, below + AMX_ROWS, AMX_SUMS_ROW);
  }
}

#endif
