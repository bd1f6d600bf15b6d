/*
 * test_nm_layout.c: where 2:4 weights lie on a GPU (nm_layout.h): every byte of a block has one meaning, the one that
 * wgmma.sp gives it, and what was packed comes out again. No GPU is needed.
 */
#include "cuda/ops/nm.h"
#include "harness.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS = ESMM_NM16_K / 2, GROUPS = ESMM_NM16_K / 4 };

/* Values and words cover a block, and no byte twice; bits of words likewise. */
static void every_byte_once(void **state)
{
  (void)state;
  static unsigned char values[ESMM_NM16_BLOCK];
  static uint32_t bits[ESMM_NM16_BLOCK / 4];
  for (int col = 0; col < ESMM_NM16_COLS; col++)
    for (int slot = 0; slot < SLOTS; slot++) {
      const int at = esmm_nm16_value_at(col, slot);
      assert_true(at >= 0 && at % 2 == 0 && at + 2 <= ESMM_NM16_BLOCK);
      values[at]++;
      values[at + 1]++;
    }
  for (int col = 0; col < ESMM_NM16_COLS; col++)
    for (int group = 0; group < GROUPS; group++) {
      const int at = esmm_nm16_word_at(col, group);
      const uint32_t mask = (uint32_t)15 << esmm_nm16_shift(col, group);
      assert_true(at >= 0 && at % 4 == 0 && at + 4 <= ESMM_NM16_BLOCK);
      assert_int_equal(bits[at / 4] & mask, 0);
      bits[at / 4] |= mask;
    }
  for (int i = 0; i < ESMM_NM16_BLOCK; i++)
    assert_int_equal(values[i] + (bits[i / 4] == UINT32_MAX), 1);
}

/* As the instruction reads them: lines of 64 bytes under the 64-byte swizzle, which adds bits 7 and 8 of an address to
   bits 4 and 5; a thread's word has two columns, 8 apart, of which the lanes l % 4 = 0, 1 have the first 32 k's. */
static void as_the_instruction_reads(void **state)
{
  (void)state;
  for (int col = 0; col < ESMM_NM16_COLS; col++)
    for (int slot = 0; slot < SLOTS; slot++) {
      const int plain = col % 64 * 64 + slot * 2, half = col / 64 * ESMM_NM16_HALF;
      assert_int_equal(esmm_nm16_value_at(col, slot), half + (plain ^ (plain >> 7 & 3) << 4));
    }
  for (int half = 0; half < 2; half++)
    for (int warp = 0; warp < 4; warp++)
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++) { /* four bits of the thread's word */
          const int col = half * 64 + warp * 16 + lane / 4 + i / 4 * 8, k = lane % 4 * 16 + i % 4 * 4;
          assert_int_equal(esmm_nm16_word_at(col, k / 4), half * ESMM_NM16_HALF + 4096 + (warp * 32 + lane) * 4);
          assert_int_equal(esmm_nm16_shift(col, k / 4), 4 * i);
        }
}

/* The first two nonzeros, and where there are fewer, the lowest others; in rising order. */
static void places_of_every_group(void **state)
{
  (void)state;
  for (uint32_t mask = 0; mask < 16; mask++) {
    uint32_t choice = mask;
    while (__builtin_popcount(choice) < 2)
      choice |= choice + 1;
    const uint32_t low = (uint32_t)__builtin_ctz(choice), high = (uint32_t)__builtin_ctz(choice & (choice - 1));
    assert_int_equal(esmm_nm16_places(mask), low | high << 2);
  }
}

/* B as the device packs it, a tile of columns. */
static void pack(const esmm_matrix *b, int64_t tile, unsigned char *blocks)
{
  const uint16_t *from = b->data;
  memset(blocks, 0, (size_t)esmm_nm16_blocks(b->rows) * ESMM_NM16_BLOCK);
  for (int64_t i = 0; i < esmm_nm16_blocks(b->rows); i++)
    for (int col = 0; col < ESMM_NM16_COLS; col++)
      for (int group = 0; group < GROUPS; group++) {
        unsigned char *block = blocks + esmm_nm16_block_at(0, i, esmm_nm16_blocks(b->rows));
        uint16_t x[4] = {0};
        uint32_t mask = 0, word;
        for (int r = 0; r < 4; r++) {
          const int64_t k = i * ESMM_NM16_K + group * 4 + r, j = tile * ESMM_NM16_COLS + col;
          if (k < b->rows && j < b->cols)
            x[r] = from[k * b->ld + j];
          mask |= (uint32_t)((x[r] & 0x7fff) != 0) << r;
        }
        const uint32_t places = esmm_nm16_places(mask);
        memcpy(block + esmm_nm16_value_at(col, 2 * group), &x[places & 3], 2);
        memcpy(block + esmm_nm16_value_at(col, 2 * group + 1), &x[places >> 2], 2);
        memcpy(&word, block + esmm_nm16_word_at(col, group), sizeof word);
        word |= places << esmm_nm16_shift(col, group);
        memcpy(block + esmm_nm16_word_at(col, group), &word, sizeof word);
      }
}

static void what_goes_in_comes_out(void **state)
{
  (void)state;
  static const int64_t shapes[][2] = {{1, 1}, {4, 128}, {64, 64}, {65, 129}, {130, 300}, {63, 127}, {257, 5}};
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    const int64_t k = shapes[i][0], n = shapes[i][1];
    esmm_matrix b = th_matrix_alloc(k, n, ESMM_BF16), out = th_matrix_alloc(k, n, ESMM_BF16);
    b.ld = out.ld = n;
    th_rng rng = {i + 1};
    uint16_t *x = b.data;
    memset(out.data, 0xff, (size_t)(k * n) * 2);
    for (int64_t g = 0; g < k; g += 4)
      for (int64_t j = 0; j < n; j++) {
        int left = 2;
        for (int64_t r = g; r < k && r < g + 4; r++) {
          const bool keeps = left > 0 && th_below(&rng, 2);
          x[r * n + j] = keeps ? (uint16_t)(1 + th_below(&rng, 0x7ffe)) : 0;
          left -= keeps;
        }
      }
    unsigned char *blocks = malloc((size_t)esmm_nm16_blocks(k) * ESMM_NM16_BLOCK);
    assert_non_null(blocks);
    for (int64_t tile = 0; tile < esmm_nm16_tiles(n); tile++) {
      pack(&b, tile, blocks);
      esmm_cuda_nm16_unpack(blocks, tile, &out);
    }
    assert_memory_equal(b.data, out.data, (size_t)(k * n) * 2);
    free(blocks);
    free(b.data);
    free(out.data);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(every_byte_once),
      cmocka_unit_test(as_the_instruction_reads),
      cmocka_unit_test(places_of_every_group),
      cmocka_unit_test(what_goes_in_comes_out),
  };
  return cmocka_run_group_tests_name("nm layout", tests, NULL, NULL);
}
