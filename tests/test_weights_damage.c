/*
 * test_weights_damage.c: weights files that were damaged, cut or forged must be refused with their own status, and a
 * file's layout must stay what it always was.
 */
#include "weights_files.h"

/* ---- layout ---- */

/* Files outlive the library that wrote them: the same weights must give the bytes that version 1 always gave. */
static void test_format_is_pinned(void **state)
{
  unsigned char counting[100];
  for (size_t i = 0; i < sizeof counting; i++)
    counting[i] = (unsigned char)i;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  assert_int_equal(esmm_checksum_of(counting, 0), 0x436cfa14d67d464f);
  assert_int_equal(esmm_checksum_of(counting, 32), 0x542f1ce3f0f68ffd);
  assert_int_equal(esmm_checksum_of(counting, 100), 0xb544a4d424372c58);
  size_t size;
  unsigned char *bytes = example(*state, 'A', &size); /* version 1, whatever newer ones there are */
  assert_int_equal(size, 18048);
  assert_int_equal(esmm_checksum_of(bytes, size), 0x1f194e0e5db876fb);
  free(bytes);
  static const struct {
    char letter;
    size_t size;
    uint64_t checksum;
  } newer[] = {{'B', 13632, 0xe644f7e45e22b70e}, {'N', 7744, 0x1b06c5f188b14d04}, {'V', 7360, 0x9e5402339eb7b1b8}};
  for (size_t i = 0; i < sizeof newer / sizeof newer[0]; i++) {
    bytes = example(*state, newer[i].letter, &size);
    assert_int_equal(size, newer[i].size);
    assert_int_equal(esmm_checksum_of(bytes, size), newer[i].checksum);
    free(bytes);
  }
#else
  (void)state;
  skip();
#endif
}

static void test_checksum_in_parts(void **state)
{
  (void)state;
  unsigned char bytes[300];
  th_rng rng = {5};
  for (size_t i = 0; i < sizeof bytes; i++)
    bytes[i] = (unsigned char)th_next(&rng);
  for (size_t length = 0; length <= sizeof bytes; length++) {
    esmm_checksum sum;
    esmm_checksum_begin(&sum);
    const size_t first = length / 2 / ESMM_CHECKSUM_BLOCK * ESMM_CHECKSUM_BLOCK;
    esmm_checksum_add(&sum, bytes, first);
    esmm_checksum_add(&sum, bytes + first, length - first);
    assert_int_equal(esmm_checksum_end(&sum), esmm_checksum_of(bytes, length));
    if (length > 0) /* zeros at the end are not padding */
      assert_int_not_equal(esmm_checksum_of(bytes, length), esmm_checksum_of(bytes, length - 1));
  }
  memset(bytes, 0, sizeof bytes);
  assert_int_not_equal(esmm_checksum_of(bytes, 8), esmm_checksum_of(bytes, 9));
}

/* ---- damage ---- */

static void expect_flips_found(esmm_ctx *ctx, const esmm_weights *made)
{
  esmm_weights *loaded = NULL;
  size_t size;
  unsigned char *bytes = saved_bytes(ctx, made, &size);
  expect_status(ctx, "undamaged", parse(ctx, bytes, size, &loaded), ESMM_OK);
  esmm_weights_free(loaded);
  loaded = NULL;
  for (size_t i = 0; i < size; i++)
    for (int bit = 0; bit < 8; bit++) {
      bytes[i] = (unsigned char)(bytes[i] ^ 1u << bit);
      const esmm_status status = parse(ctx, bytes, size, &loaded);
      bytes[i] = (unsigned char)(bytes[i] ^ 1u << bit);
      const bool identity = i < offsetof(esmm_file_header, file_bytes); /* says what kind of file it is */
      if (identity ? status != ESMM_ERR_FORMAT && status != ESMM_ERR_VERSION : status != ESMM_ERR_CHECKSUM)
        fail_msg("bit %d of byte %zu flipped: status %d", bit, i, status);
      assert_null(loaded);
    }
  free(bytes);
}

static void test_every_flipped_bit_is_found(void **state)
{
  static const esmm_prepare_opts formats[] = {
      {.format.kind = ESMM_FORMAT_DENSE},
      {.format.kind = ESMM_FORMAT_BSR, .format.block_rows = 4, .format.block_cols = 2},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 2, .format.group = 4},
      {.format.kind = ESMM_FORMAT_NM, .format.keep = 2, .format.group = 4, .format.group_cols = 2},
  };
  for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
    esmm_weights *made = make_format(*state, 9, 3, ESMM_BF16, formats[i]);
    expect_flips_found(*state, made);
    esmm_weights_free(made);
  }
}

static void test_every_truncation_is_found(void **state)
{
  esmm_ctx *ctx = *state;
  esmm_weights *loaded = NULL;
  for (const char *letter = "ALD" FORMAT_LETTERS; *letter; letter++) {
    size_t size;
    unsigned char *bytes = example(ctx, *letter, &size);
    for (size_t length = 0; length < size; length++) {
      expect_status(ctx, "cut short", parse(ctx, bytes, length, &loaded), ESMM_ERR_TRUNCATED);
      assert_null(loaded);
    }
    bytes[size] = 0; /* read_bytes left room for it */
    expect_status(ctx, "one byte more", parse(ctx, bytes, size + 1, &loaded), ESMM_ERR_FORMAT);
    free(bytes);
  }
  expect_status(ctx, "no bytes", esmm_weights_parse(ctx, "none", NULL, 0, &loaded), ESMM_ERR_TRUNCATED);
}

/* ---- forgeries: every checksum right, something else wrong ---- */

static void rotate(uint64_t *word)
{
  *word = *word << 1 | *word >> 63;
}

#define SECTION(type, which) ((type *)(void *)(bytes + h->section[which].offset))

/* clang-format off */
/* X(name, the example files it is tried on, the status it must get, the change) */
#define FORGERIES(X) \
  X(nothing, "ALDSBNV", ESMM_OK, (void)0) \
  X(other_endian, "A", ESMM_ERR_VERSION, h->endian = ESMM_FILE_ENDIAN_OTHER) \
  X(odd_endian, "A", ESMM_ERR_FORMAT, h->endian = 0x02010403u) \
  X(newer, "A", ESMM_ERR_VERSION, h->version = ESMM_FILE_VERSION + 1) \
  X(version_0, "A", ESMM_ERR_FORMAT, h->version = 0) \
  X(header_bytes, "A", ESMM_ERR_FORMAT, h->header_bytes = 256) \
  X(header_bytes_huge, "A", ESMM_ERR_FORMAT, h->header_bytes = UINT64_MAX) \
  X(file_bytes_less, "A", ESMM_ERR_FORMAT, h->file_bytes -= 64) \
  X(file_bytes_more, "A", ESMM_ERR_FORMAT, h->file_bytes += 64) \
  X(k_negative, "A", ESMM_ERR_FORMAT, h->k = -1) \
  X(k_more, "ALDBNV", ESMM_ERR_FORMAT, h->k++) \
  X(k_less, "ALDBNV", ESMM_ERR_FORMAT, h->k--) \
  X(k_huge, "ALDBNV", ESMM_ERR_FORMAT, (h->k = INT64_MAX, h->words = INT64_MAX / 64 + 1)) \
  X(k_2_40, "ALDBNV", ESMM_ERR_FORMAT, (h->k = (int64_t)1 << 40, h->words = (int64_t)1 << 34)) \
  X(n_negative, "A", ESMM_ERR_FORMAT, h->n = -40) \
  X(n_more, "ALDBNV", ESMM_ERR_FORMAT, h->n++) \
  X(n_less, "ALDBNV", ESMM_ERR_FORMAT, h->n--) \
  X(n_huge, "ALDBNV", ESMM_ERR_FORMAT, (h->n = INT64_MAX, h->panels = INT64_MAX / 32 + 1)) \
  X(n_overflows, "AD", ESMM_ERR_FORMAT, \
    (h->n = INT64_MAX - 64, h->panels = h->n / 32 + 1, h->rows_ld = h->n / 16 * 16 + 16)) \
  X(dtype_3, "A", ESMM_ERR_FORMAT, h->dtype = 3) \
  X(dtype_bf16, "ALBNV", ESMM_ERR_FORMAT, h->dtype = ESMM_BF16) \
  X(use_3, "ABNV", ESMM_ERR_FORMAT, h->use = 3) \
  X(use_any, "LD", ESMM_ERR_FORMAT, h->use = ESMM_USE_ANY) \
  X(use_decode, "AL", ESMM_ERR_FORMAT, h->use = ESMM_USE_DECODE) \
  X(use_large_m, "AD", ESMM_ERR_FORMAT, h->use = ESMM_USE_LARGE_M) \
  X(strict_2, "AS", ESMM_ERR_FORMAT, h->strict = 2) \
  X(strict_with_gaps, "AD", ESMM_ERR_FORMAT, h->strict = 1) \
  X(not_strict, "S", ESMM_ERR_FORMAT, h->strict = 0) \
  X(full_with_gaps, "ALDBNV", ESMM_ERR_FORMAT, h->full = 1) \
  X(full_2, "AS", ESMM_ERR_FORMAT, h->full = 2) \
  X(not_full, "S", ESMM_ERR_FORMAT, h->full = 0) \
  X(panels_more, "A", ESMM_ERR_FORMAT, h->panels++) \
  X(panels_negative, "A", ESMM_ERR_FORMAT, h->panels = -2) \
  X(words_less, "A", ESMM_ERR_FORMAT, h->words--) \
  X(words_huge, "A", ESMM_ERR_FORMAT, h->words = INT64_MAX) \
  X(rows_ld_less, "A", ESMM_ERR_FORMAT, h->rows_ld = 16) \
  X(rows_ld_negative, "A", ESMM_ERR_FORMAT, h->rows_ld = -48) \
  X(rows_ld_tight, "A", ESMM_ERR_FORMAT, h->rows_ld = 40) \
  X(rows_ld_without_rows, "L", ESMM_ERR_FORMAT, h->rows_ld = 48) \
  X(panel_cols, "A", ESMM_ERR_FORMAT, h->panel_cols = 16) \
  X(half_cols, "A", ESMM_ERR_FORMAT, h->half_cols = 32) \
  X(section_count, "A", ESMM_ERR_FORMAT, h->section_count = 4) \
  X(zero, "A", ESMM_ERR_FORMAT, h->zero = 1) \
  X(reserved, "ABNV", ESMM_ERR_FORMAT, h->reserved[4] = 1) \
  X(element_density_nan, "A", ESMM_ERR_FORMAT, memset(&h->element_density, 0xff, sizeof h->element_density)) \
  X(element_density, "ALDSBNV", ESMM_ERR_FORMAT, h->element_density += 0.001) \
  X(strip_density_nan, "AS", ESMM_ERR_FORMAT, memset(&h->strip_density, 0xff, sizeof h->strip_density)) \
  X(strip_density, "ALDSBNV", ESMM_ERR_FORMAT, h->strip_density += 0.001) \
  X(offset_moved, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].offset -= 64) \
  X(offset_huge, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].offset = UINT64_MAX - 63) \
  X(overlap, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].offset = h->section[ESMM_FILE_BITS].offset) \
  X(bits_longer, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_BITS].bytes += 8) \
  X(panels_shorter, "AL", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes -= 128) \
  X(panels_huge, "AL", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes = UINT64_MAX - 127) \
  X(panels_in_decode, "D", ESMM_ERR_FORMAT, h->section[ESMM_FILE_PANELS].bytes = 128) \
  X(rows_huge, "A", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].bytes = UINT64_MAX) \
  X(bit_beyond_k, "ALDSBNV", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[1] |= (uint64_t)1 << 6) \
  X(bits_set, "ALD", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[2] = UINT64_MAX) \
  X(bits_gone, "ALDSBNV", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_BITS)[0] = 0) \
  X(bits_moved, "ADBNV", ESMM_ERR_FORMAT, rotate(SECTION(uint64_t, ESMM_FILE_BITS))) \
  X(before_first, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[0] = 1) \
  X(before_middle, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[4]++) \
  X(before_last, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[5]++) \
  X(before_huge, "AL", ESMM_ERR_FORMAT, SECTION(uint32_t, ESMM_FILE_BEFORE)[2] = UINT32_MAX) \
  X(panel_at_first, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[0] = 32) \
  X(panel_at_middle, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[1] += 32) \
  X(panel_at_end, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[2] += 32) \
  X(panel_at_huge, "AL", ESMM_ERR_FORMAT, SECTION(uint64_t, ESMM_FILE_PANEL_AT)[1] = UINT64_MAX - 31) \
  X(panel_value, "AS", ESMM_ERR_FORMAT, memset(SECTION(float, ESMM_FILE_PANELS), 0xff, 4)) \
  X(panel_padding, "ALS", ESMM_ERR_FORMAT, \
    SECTION(float, ESMM_FILE_PANELS)[h->section[ESMM_FILE_PANELS].bytes / 4 - 1] = 1.0f) \
  X(panels_all_zero, "L", ESMM_ERR_FORMAT, \
    (memset(SECTION(char, ESMM_FILE_PANELS), 0, h->section[ESMM_FILE_PANELS].bytes), h->element_density = 0.0)) \
  X(row_value, "AS", ESMM_ERR_FORMAT, SECTION(float, ESMM_FILE_ROWS)[0] += 1.0f) \
  X(row_padding, "ADS", ESMM_ERR_FORMAT, SECTION(float, ESMM_FILE_ROWS)[47] = 1.0f) \
  X(version_1_of_format, "BNV", ESMM_ERR_FORMAT, h->version = 1) \
  X(version_2_of_dense, "ALDS", ESMM_ERR_FORMAT, h->version = 2) \
  X(format_of_dense, "ALDS", ESMM_ERR_FORMAT, h->format = ESMM_FORMAT_BSR) \
  X(blocks_of_dense, "A", ESMM_ERR_FORMAT, h->blocks = 1) \
  X(format_0, "BNV", ESMM_ERR_FORMAT, h->format = 0) \
  X(format_3, "BNV", ESMM_ERR_FORMAT, h->format = 3) \
  X(format_other, "BNV", ESMM_ERR_FORMAT, h->format ^= 3) \
  X(strict_format, "BNV", ESMM_ERR_FORMAT, h->strict = 1) \
  X(rows_ld_of_format, "BNV", ESMM_ERR_FORMAT, h->rows_ld = 48) \
  X(values_shorter, "BNV", ESMM_ERR_FORMAT, h->section[ESMM_FILE_VALUES].bytes -= 64) \
  X(values_huge, "BNV", ESMM_ERR_FORMAT, h->section[ESMM_FILE_VALUES].bytes = UINT64_MAX - 63) \
  X(overlap_of_format, "BNV", ESMM_ERR_FORMAT, h->section[ESMM_FILE_VALUES].offset = h->section[ESMM_FILE_BITS].offset) \
  X(rows_of_format, "BNV", ESMM_ERR_FORMAT, h->section[ESMM_FILE_ROWS].bytes = 64) \
  X(block_rows_0, "B", ESMM_ERR_FORMAT, h->block_rows = 0) \
  X(block_rows_257, "B", ESMM_ERR_FORMAT, h->block_rows = 257) \
  X(block_rows_less, "B", ESMM_ERR_FORMAT, h->block_rows = 15) \
  X(blocks_swapped, "B", ESMM_ERR_FORMAT, (h->block_rows = 12, h->block_cols = 16)) \
  X(block_cols_huge, "B", ESMM_ERR_FORMAT, h->block_cols = UINT32_MAX) \
  X(blocks_more, "B", ESMM_ERR_FORMAT, h->blocks++) \
  X(blocks_negative, "B", ESMM_ERR_FORMAT, h->blocks = -1) \
  X(blocks_2_31, "B", ESMM_ERR_FORMAT, h->blocks = (int64_t)1 << 31) \
  X(nm_in_bsr, "B", ESMM_ERR_FORMAT, h->m_of = 4) \
  X(bsr_in_nm, "NV", ESMM_ERR_FORMAT, h->block_cols = 4) \
  X(start_first, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_START)[0] = 1) \
  X(start_falls, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_START)[2] = -1) \
  X(start_far, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_START)[1] = INT32_MAX) \
  X(start_last, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_START)[4]--) \
  X(start_shifted, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_START)[1]++) \
  X(at_negative, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_AT)[0] = -1) \
  X(at_far, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_AT)[h->blocks - 1] = 5) \
  X(at_again, "B", ESMM_ERR_FORMAT, SECTION(int32_t, ESMM_FILE_AT)[1] = SECTION(int32_t, ESMM_FILE_AT)[0]) \
  X(block_of_zeros, "B", ESMM_ERR_FORMAT, memset(SECTION(float, ESMM_FILE_VALUES), 0, 16 * 12 * 4)) \
  X(block_past_n, "B", ESMM_ERR_FORMAT, \
    SECTION(float, ESMM_FILE_VALUES)[h->section[ESMM_FILE_VALUES].bytes / 4 - 1] = 1.0f) \
  X(n_of_0, "NV", ESMM_ERR_FORMAT, h->n_of = 0) \
  X(n_of_more, "NV", ESMM_ERR_FORMAT, h->n_of = 5) \
  X(n_of_less, "NV", ESMM_ERR_FORMAT, h->n_of = 1) \
  X(m_of_33, "NV", ESMM_ERR_FORMAT, h->m_of = 33) \
  X(m_of_less, "NV", ESMM_ERR_FORMAT, h->m_of = 3) \
  X(nm_cols_0, "NV", ESMM_ERR_FORMAT, h->nm_cols = 0) \
  X(nm_cols_other, "NV", ESMM_ERR_FORMAT, h->nm_cols = 40) \
  X(nm_cols_huge, "NV", ESMM_ERR_FORMAT, h->nm_cols = UINT32_MAX) \
  X(index_again, "N", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[4] &= 0xfc) \
  X(index_of_padding, "N", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[h->section[ESMM_FILE_INDEX].bytes - 1] = 0) \
  X(index_past_k, "N", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[35 * 4] |= 3) \
  X(index_falls, "V", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[0] &= 0xf3) \
  X(index_goes_on, "V", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[15] |= 0x80) \
  X(list_past_k, "V", ESMM_ERR_FORMAT, SECTION(unsigned char, ESMM_FILE_INDEX)[8] |= 0xc0) \
  X(value_past_n, "NV", ESMM_ERR_FORMAT, \
    SECTION(float, ESMM_FILE_VALUES)[h->section[ESMM_FILE_VALUES].bytes / 4 - 1] = 1.0f) \
  X(values_all_zero, "NV", ESMM_ERR_FORMAT, \
    (memset(SECTION(char, ESMM_FILE_VALUES), 0, h->section[ESMM_FILE_VALUES].bytes), h->element_density = 0.0))

#define X(name, files, status, change) \
  static void forge_##name(esmm_file_header *h, unsigned char *bytes) { (void)h, (void)bytes, change; }
FORGERIES(X)
#undef X

static const struct forgery {
  const char *name, *files;
  esmm_status status;
  void (*change)(esmm_file_header *h, unsigned char *bytes);
} forgeries[] = {
#define X(name, files, status, change) {#name, files, status, forge_##name},
  FORGERIES(X)
#undef X
};
/* clang-format on */

static void test_forgeries_are_refused(void **state)
{
  esmm_ctx *ctx = *state;
  for (size_t i = 0; i < sizeof forgeries / sizeof forgeries[0]; i++)
    for (const char *letter = forgeries[i].files; *letter; letter++) {
      size_t size;
      unsigned char *bytes = example(ctx, *letter, &size);
      esmm_file_header h;
      esmm_weights *loaded = NULL;
      memcpy(&h, bytes, sizeof h);
      forgeries[i].change(&h, bytes);
      memcpy(bytes, &h, sizeof h);
      set_checksums(bytes, size);
      expect_status(ctx, forgeries[i].name, parse(ctx, bytes, size, &loaded), forgeries[i].status);
      assert_true((loaded != NULL) == (forgeries[i].status == ESMM_OK));
      esmm_weights_free(loaded);
      free(bytes);
    }
}

/* The panels' size is the one that the shape does not give: forge it together with the file's own. */
static void test_panels_of_wrong_size_are_refused(void **state)
{
  esmm_ctx *ctx = *state;
  for (int by = -128; by <= 128; by += 64) {
    size_t size;
    unsigned char *bytes = example(ctx, 'L', &size), *longer = calloc(1, size + 128);
    esmm_file_header h;
    esmm_weights *loaded = NULL;
    assert_non_null(longer);
    memcpy(longer, bytes, size);
    memcpy(&h, bytes, sizeof h);
    h.section[ESMM_FILE_PANELS].bytes += (uint64_t)by;
    h.file_bytes += (uint64_t)by;
    memcpy(longer, &h, sizeof h);
    set_checksums(longer, h.file_bytes);
    expect_status(ctx, "panels resized", parse(ctx, longer, h.file_bytes, &loaded), by ? ESMM_ERR_FORMAT : ESMM_OK);
    esmm_weights_free(loaded);
    free(bytes);
    free(longer);
  }
}

/* Without k every section is empty, so nothing of the file bounds n: what a header of 320 bytes claims must not be
   counted up to. */
static void test_any_n_without_k(void **state)
{
  esmm_ctx *ctx = *state;
  for (const char *letter = "NV"; *letter; letter++) {
    const esmm_prepare_opts opts = opts_of(*letter);
    const esmm_matrix b = {.rows = 0, .cols = 40};
    esmm_weights *w = NULL;
    size_t size;
    expect_status(ctx, "prepare", esmm_prepare(ctx, &b, &opts, &w), ESMM_OK);
    unsigned char *bytes = saved_bytes(ctx, w, &size);
    esmm_weights_free(w);
    esmm_file_header h;
    assert_int_equal(size, sizeof h);
    memcpy(&h, bytes, sizeof h);
    h.n = (int64_t)1 << 49;
    h.panels = h.n / 32;
    memcpy(bytes, &h, sizeof h);
    set_checksums(bytes, size);
    expect_status(ctx, "huge n", parse(ctx, bytes, size, &w), ESMM_OK);
    assert_true(w->k == 0 && w->n == (int64_t)1 << 49);
    esmm_weights_free(w);
    free(bytes);
  }
}

/* ---- memory ---- */

typedef struct meter {
  int64_t live, left; /* allocations not freed; those that still succeed */
  size_t largest;
} meter;

static void *meter_alloc(void *user, size_t bytes, size_t align)
{
  meter *m = user;
  if (m->left-- <= 0)
    return NULL;
  m->live++;
  if (bytes > m->largest)
    m->largest = bytes;
  return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void meter_free(void *user, void *ptr, size_t bytes)
{
  (void)bytes;
  ((meter *)user)->live--;
  free(ptr);
}

static void expect_memory_failures(esmm_ctx *ctx, meter *m, char letter)
{
  size_t size;
  unsigned char *bytes = example(ctx, letter, &size);
  const int64_t before = m->live;
  int64_t allowed = 0;
  for (;; allowed++) {
    esmm_weights *loaded = NULL;
    m->left = allowed;
    const esmm_status status = esmm_weights_parse(ctx, "test", bytes, size, &loaded);
    if (status == ESMM_OK) {
      esmm_weights_free(loaded);
      break;
    }
    expect_status(ctx, "out of memory", status, ESMM_ERR_MEMORY);
    expect_text(ctx, "'test': ");
    assert_null(loaded);
    assert_int_equal(m->live, before);
  }
  /* the object, bits, alive, and before, panel_at, panels, rows; or start, at, values; or index, values */
  assert_int_equal(allowed, letter == 'A' ? 7 : letter == 'B' ? 6 : 5);
  assert_int_equal(m->live, before);

  /* A small file that claims to be large must not get the memory it claims. */
  m->left = INT64_MAX;
  m->largest = 0;
  esmm_file_header h;
  memcpy(&h, bytes, sizeof h);
  h.k = h.n = 1 << 20;
  h.panels = (1 << 20) / 32;
  h.words = (1 << 20) / 64;
  h.rows_ld = letter == 'A' ? 1 << 20 : 0;
  memcpy(bytes, &h, sizeof h);
  set_checksums(bytes, size);
  esmm_weights *loaded = NULL;
  assert_int_equal(esmm_weights_parse(ctx, "test", bytes, size, &loaded), ESMM_ERR_FORMAT);
  assert_int_equal(m->largest, 0);
  free(bytes);
}

static void test_failing_allocations(void **state)
{
  (void)state;
  meter m = {.left = INT64_MAX};
  const esmm_allocator allocator = {meter_alloc, meter_free, &m};
  const esmm_ctx_opts opts = {.size = sizeof opts, .threads = 1, .no_tuning_cache = 1, .allocator = &allocator};
  esmm_ctx *ctx = NULL;
  assert_int_equal(esmm_ctx_create(&ctx, &opts), ESMM_OK);
  for (const char *letter = "A" FORMAT_LETTERS; *letter; letter++) {
    m.left = INT64_MAX;
    expect_memory_failures(ctx, &m, *letter);
  }
  esmm_ctx_free(ctx);
  assert_int_equal(m.live, 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_format_is_pinned),
      cmocka_unit_test(test_checksum_in_parts),
      cmocka_unit_test(test_every_flipped_bit_is_found),
      cmocka_unit_test(test_every_truncation_is_found),
      cmocka_unit_test(test_forgeries_are_refused),
      cmocka_unit_test(test_panels_of_wrong_size_are_refused),
      cmocka_unit_test(test_any_n_without_k),
      cmocka_unit_test(test_failing_allocations),
  };
  return cmocka_run_group_tests_name("weights_damage", tests, set_up, tear_down);
}
