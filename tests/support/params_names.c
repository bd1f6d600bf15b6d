/* params_names.c: tables of the structs that GPU kernels take, and texts of what such a struct holds. */
#include "params_names.h"

#include "cuda/kernels/decode/decode_params.h"
#include "cuda/kernels/nm16/decode_params.h"
#include "cuda/params.h"
#include "fake_cuda.h"

#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(fake_tensor_map) == sizeof(esmm_tensor_map), "the fake driver fills a tensor map");

/* Structs in structs, then those that kernels take: type, and its name here. */
/* clang-format off */
#define STRUCTS(X) \
  X(fake_tensor_map, tensor_map) X(esmm_selector, selector) X(esmm_device_matrix, device_matrix) \
  X(esmm_strips, strips) \
  X(esmm_epilogue_params, epilogue_params) X(esmm_wgmma16_units, wgmma16_units) \
  X(esmm_extract_params, extract_params) X(esmm_pack_params, pack_params) X(esmm_sample_params, sample_params) \
  X(esmm_count_params, count_params) X(esmm_finish_params, finish_params) X(esmm_convert_params, convert_params) \
  X(esmm_strips_product_params, strips_product_params) \
  X(esmm_dense_params, dense_params) X(esmm_wgmma16_params, wgmma16_params) X(esmm_fused16_params, fused16_params) \
  X(esmm_fine16_pack_params, fine16_pack_params) X(esmm_fine16_params, fine16_params) \
  X(esmm_tally_begin_params, tally_begin_params) X(esmm_tally_params, tally_params) \
  X(esmm_tally_count_params, tally_count_params) \
  X(esmm_mma16_params, mma16_params) \
  X(esmm_mma16_extract_params, mma16_extract_params) X(esmm_small_params, small_params) \
  X(esmm_bsr16_params, bsr16_params) X(esmm_bsr16_mma_params, bsr16_mma_params) \
  X(esmm_bsr16_decode_params, bsr16_decode_params) X(esmm_nm16_params, nm16_params) \
  X(esmm_half16_params, half16_params) \
  X(esmm_decode_params, decode_params) X(esmm_nm16_decode_params, nm16_decode_params) X(fake_gemm, gemm)
/* clang-format on */

#define ID(type, name) AT_##name,
enum { STRUCTS(ID) STRUCT_COUNT };

enum { ADDRESS = STRUCT_COUNT, INT64, INT32, UINT32, FP32 }; /* kinds of fields beside structs, which are their own */

/* clang-format off */
#define KIND(x) \
  _Generic((x), uint64_t: ADDRESS, int64_t: INT64, int32_t: INT32, uint32_t: UINT32, float: FP32, \
           esmm_tensor_map: AT_tensor_map, esmm_selector: AT_selector, esmm_device_matrix: AT_device_matrix, \
           esmm_strips: AT_strips, \
           esmm_epilogue_params: AT_epilogue_params, esmm_wgmma16_units: AT_wgmma16_units)
/* clang-format on */

typedef struct field {
  const char *name;
  size_t at, size; /* size: of one element */
  int count, kind; /* count 0: no array */
} field;

#define MEMBER(type, member) (((type *)0)->member)
/* clang-format off */
#define NAMED(text, type, member) /* text: in the golden plans, which keep it when the member's name changes */ \
  {text, offsetof(type, member), sizeof MEMBER(type, member), 0, KIND(MEMBER(type, member))}
#define FIELD(type, member) NAMED(#member, type, member)
#define ARRAY(type, member) \
  {#member, offsetof(type, member), sizeof MEMBER(type, member)[0], \
   (int)(sizeof MEMBER(type, member) / sizeof MEMBER(type, member)[0]), KIND(MEMBER(type, member)[0])}
/* clang-format on */

static const field tensor_map_fields[] = {
    FIELD(fake_tensor_map, address),   FIELD(fake_tensor_map, cols),       FIELD(fake_tensor_map, rows),
    FIELD(fake_tensor_map, pitch),     FIELD(fake_tensor_map, box_cols),   FIELD(fake_tensor_map, box_rows),
    FIELD(fake_tensor_map, type),      FIELD(fake_tensor_map, interleave), FIELD(fake_tensor_map, swizzle),
    FIELD(fake_tensor_map, promotion), FIELD(fake_tensor_map, fill),       FIELD(fake_tensor_map, unused),
    ARRAY(fake_tensor_map, unused_too)};

static const field selector_fields[] = {FIELD(esmm_selector, address), FIELD(esmm_selector, value),
                                        FIELD(esmm_selector, unused)};

static const field device_matrix_fields[] = {FIELD(esmm_device_matrix, data),  FIELD(esmm_device_matrix, rows),
                                             FIELD(esmm_device_matrix, cols),  FIELD(esmm_device_matrix, ld),
                                             FIELD(esmm_device_matrix, dtype), FIELD(esmm_device_matrix, order)};

static const field strips_fields[] = {FIELD(esmm_strips, data), FIELD(esmm_strips, bits), FIELD(esmm_strips, strips),
                                      FIELD(esmm_strips, k_padded)};

static const field epilogue_params_fields[] = {
    FIELD(esmm_epilogue_params, c),          FIELD(esmm_epilogue_params, bias),
    FIELD(esmm_epilogue_params, alpha),      FIELD(esmm_epilogue_params, beta),
    FIELD(esmm_epilogue_params, activation), FIELD(esmm_epilogue_params, extra),
    FIELD(esmm_epilogue_params, residual),   FIELD(esmm_epilogue_params, factor),
    FIELD(esmm_epilogue_params, factor_ld),  FIELD(esmm_epilogue_params, counts),
    FIELD(esmm_epilogue_params, bits),       FIELD(esmm_epilogue_params, strip_rows),
    FIELD(esmm_epilogue_params, words)};

static const field wgmma16_units_fields[] = {FIELD(esmm_wgmma16_units, cols),   FIELD(esmm_wgmma16_units, share),
                                             FIELD(esmm_wgmma16_units, group),  FIELD(esmm_wgmma16_units, whole),
                                             FIELD(esmm_wgmma16_units, splits), FIELD(esmm_wgmma16_units, lent),
                                             ARRAY(esmm_wgmma16_units, unused)};

static const field extract_params_fields[] = {FIELD(esmm_extract_params, selector), FIELD(esmm_extract_params, a),
                                              FIELD(esmm_extract_params, strips), FIELD(esmm_extract_params, write_all),
                                              FIELD(esmm_extract_params, unused)};

static const field pack_params_fields[] = {FIELD(esmm_pack_params, selector), FIELD(esmm_pack_params, a),
                                           FIELD(esmm_pack_params, out), FIELD(esmm_pack_params, ld)};

static const field sample_params_fields[] = {FIELD(esmm_sample_params, a),         FIELD(esmm_sample_params, alive),
                                             FIELD(esmm_sample_params, out),       FIELD(esmm_sample_params, notes),
                                             FIELD(esmm_sample_params, dense),     FIELD(esmm_sample_params, base),
                                             FIELD(esmm_sample_params, per_strip), FIELD(esmm_sample_params, per_joint),
                                             FIELD(esmm_sample_params, height),    FIELD(esmm_sample_params, unused)};

static const field count_params_fields[] = {FIELD(esmm_count_params, a_bits),   FIELD(esmm_count_params, b_bits),
                                            FIELD(esmm_count_params, a_strips), FIELD(esmm_count_params, b_strips),
                                            FIELD(esmm_count_params, words),    FIELD(esmm_count_params, k),
                                            FIELD(esmm_count_params, out)};

static const field finish_params_fields[] = {FIELD(esmm_finish_params, epilogue), FIELD(esmm_finish_params, sums)};

static const field convert_params_fields[] = {FIELD(esmm_convert_params, selector), FIELD(esmm_convert_params, src),
                                              FIELD(esmm_convert_params, dst)};

static const field strips_product_params_fields[] = {
    FIELD(esmm_strips_product_params, selector), FIELD(esmm_strips_product_params, m),
    FIELD(esmm_strips_product_params, n),        FIELD(esmm_strips_product_params, k),
    FIELD(esmm_strips_product_params, a),        FIELD(esmm_strips_product_params, b),
    FIELD(esmm_strips_product_params, epilogue)};

static const field dense_params_fields[] = {
    FIELD(esmm_dense_params, map_a), FIELD(esmm_dense_params, map_b),    FIELD(esmm_dense_params, selector),
    FIELD(esmm_dense_params, m),     FIELD(esmm_dense_params, n),        FIELD(esmm_dense_params, k),
    FIELD(esmm_dense_params, a),     FIELD(esmm_dense_params, b),        FIELD(esmm_dense_params, a_ld),
    FIELD(esmm_dense_params, b_ld),  FIELD(esmm_dense_params, epilogue), ARRAY(esmm_dense_params, unused)};

static const field wgmma16_params_fields[] = {FIELD(esmm_wgmma16_params, map_a),
                                              FIELD(esmm_wgmma16_params, map_b),
                                              FIELD(esmm_wgmma16_params, map_packed),
                                              FIELD(esmm_wgmma16_params, map_c),
                                              FIELD(esmm_wgmma16_params, selector),
                                              FIELD(esmm_wgmma16_params, m),
                                              FIELD(esmm_wgmma16_params, n),
                                              FIELD(esmm_wgmma16_params, k),
                                              FIELD(esmm_wgmma16_params, mode),
                                              FIELD(esmm_wgmma16_params, choose),
                                              FIELD(esmm_wgmma16_params, a_by_k),
                                              FIELD(esmm_wgmma16_params, segments),
                                              FIELD(esmm_wgmma16_params, segment_k),
                                              FIELD(esmm_wgmma16_params, a),
                                              FIELD(esmm_wgmma16_params, b),
                                              FIELD(esmm_wgmma16_params, a_ld),
                                              FIELD(esmm_wgmma16_params, b_ld),
                                              FIELD(esmm_wgmma16_params, b_bits),
                                              FIELD(esmm_wgmma16_params, b_alive),
                                              FIELD(esmm_wgmma16_params, packed),
                                              FIELD(esmm_wgmma16_params, lists),
                                              FIELD(esmm_wgmma16_params, a_bits),
                                              FIELD(esmm_wgmma16_params, counts),
                                              FIELD(esmm_wgmma16_params, partial),
                                              FIELD(esmm_wgmma16_params, meeting),
                                              FIELD(esmm_wgmma16_params, report),
                                              FIELD(esmm_wgmma16_params, dense),
                                              FIELD(esmm_wgmma16_params, base),
                                              FIELD(esmm_wgmma16_params, per_strip),
                                              FIELD(esmm_wgmma16_params, per_joint),
                                              FIELD(esmm_wgmma16_params, b_words),
                                              FIELD(esmm_wgmma16_params, c_boxes),
                                              FIELD(esmm_wgmma16_params, b_density),
                                              ARRAY(esmm_wgmma16_params, units),
                                              FIELD(esmm_wgmma16_params, epilogue),
                                              FIELD(esmm_wgmma16_params, gate_bias),
                                              FIELD(esmm_wgmma16_params, gate_activation),
                                              NAMED("told_number", esmm_wgmma16_params, count_ready),
                                              FIELD(esmm_wgmma16_params, map_gate),
                                              NAMED("told", esmm_wgmma16_params, bit_count),
                                              FIELD(esmm_wgmma16_params, bitmap_sums),
                                              FIELD(esmm_wgmma16_params, bitmap_words),
                                              FIELD(esmm_wgmma16_params, count_words),
                                              ARRAY(esmm_wgmma16_params, unused_too)};

static const field fused16_params_fields[] = {
    FIELD(esmm_fused16_params, map_a),   FIELD(esmm_fused16_params, selector),   FIELD(esmm_fused16_params, m),
    FIELD(esmm_fused16_params, n),       FIELD(esmm_fused16_params, k),          FIELD(esmm_fused16_params, tiles),
    FIELD(esmm_fused16_params, each),    FIELD(esmm_fused16_params, ranks),      FIELD(esmm_fused16_params, range),
    FIELD(esmm_fused16_params, unused),  FIELD(esmm_fused16_params, b),          FIELD(esmm_fused16_params, b_row),
    FIELD(esmm_fused16_params, partial), FIELD(esmm_fused16_params, unused_too), FIELD(esmm_fused16_params, epilogue)};

static const field fine16_pack_params_fields[] = {
    FIELD(esmm_fine16_pack_params, map_a),  FIELD(esmm_fine16_pack_params, selector),
    FIELD(esmm_fine16_pack_params, chunks), FIELD(esmm_fine16_pack_params, unused),
    FIELD(esmm_fine16_pack_params, values), FIELD(esmm_fine16_pack_params, places),
    FIELD(esmm_fine16_pack_params, counts), FIELD(esmm_fine16_pack_params, unused_too)};

static const field fine16_params_fields[] = {
    FIELD(esmm_fine16_params, map_b),      FIELD(esmm_fine16_params, selector), FIELD(esmm_fine16_params, m),
    FIELD(esmm_fine16_params, n),          FIELD(esmm_fine16_params, chunks),   FIELD(esmm_fine16_params, groups),
    FIELD(esmm_fine16_params, row_blocks), FIELD(esmm_fine16_params, tiles),    FIELD(esmm_fine16_params, together),
    FIELD(esmm_fine16_params, registers),  FIELD(esmm_fine16_params, values),   FIELD(esmm_fine16_params, places),
    FIELD(esmm_fine16_params, counts),     FIELD(esmm_fine16_params, epilogue), FIELD(esmm_fine16_params, k),
    FIELD(esmm_fine16_params, report)};

static const field tally_begin_params_fields[] = {
    FIELD(esmm_tally_begin_params, counts), FIELD(esmm_tally_begin_params, bits),
    FIELD(esmm_tally_begin_params, count_words), FIELD(esmm_tally_begin_params, bitmap_words)};

static const field tally_params_fields[] = {FIELD(esmm_tally_params, selector),   FIELD(esmm_tally_params, c),
                                            FIELD(esmm_tally_params, counts),     FIELD(esmm_tally_params, bits),
                                            FIELD(esmm_tally_params, strip_rows), FIELD(esmm_tally_params, words)};

static const field tally_count_params_fields[] = {
    FIELD(esmm_tally_count_params, bits),  FIELD(esmm_tally_count_params, strips),
    FIELD(esmm_tally_count_params, words), ARRAY(esmm_tally_count_params, fold),
    FIELD(esmm_tally_count_params, sums),  FIELD(esmm_tally_count_params, out),
    FIELD(esmm_tally_count_params, ready), FIELD(esmm_tally_count_params, unused)};

static const field mma16_params_fields[] = {
    FIELD(esmm_mma16_params, selector), FIELD(esmm_mma16_params, m),      FIELD(esmm_mma16_params, n),
    FIELD(esmm_mma16_params, k),        FIELD(esmm_mma16_params, a),      FIELD(esmm_mma16_params, b),
    FIELD(esmm_mma16_params, a_ld),     FIELD(esmm_mma16_params, b_ld),   FIELD(esmm_mma16_params, a_strip),
    FIELD(esmm_mma16_params, words),    FIELD(esmm_mma16_params, a_bits), FIELD(esmm_mma16_params, b_bits),
    FIELD(esmm_mma16_params, epilogue)};

static const field mma16_extract_params_fields[] = {
    FIELD(esmm_mma16_extract_params, selector), FIELD(esmm_mma16_extract_params, a),
    FIELD(esmm_mma16_extract_params, data), FIELD(esmm_mma16_extract_params, bits),
    FIELD(esmm_mma16_extract_params, words)};

static const field small_params_fields[] = {FIELD(esmm_small_params, selector), FIELD(esmm_small_params, a),
                                            FIELD(esmm_small_params, b),        FIELD(esmm_small_params, n),
                                            FIELD(esmm_small_params, tiles),    FIELD(esmm_small_params, ranks),
                                            FIELD(esmm_small_params, unused),   FIELD(esmm_small_params, epilogue)};

static const field bsr16_params_fields[] = {
    FIELD(esmm_bsr16_params, map_a),    FIELD(esmm_bsr16_params, map_cells), FIELD(esmm_bsr16_params, map_c),
    FIELD(esmm_bsr16_params, selector), FIELD(esmm_bsr16_params, m),         FIELD(esmm_bsr16_params, n),
    FIELD(esmm_bsr16_params, a_by_k),   FIELD(esmm_bsr16_params, c_boxes),   FIELD(esmm_bsr16_params, rows),
    FIELD(esmm_bsr16_params, cell_k),   FIELD(esmm_bsr16_params, pairs),     FIELD(esmm_bsr16_params, group),
    FIELD(esmm_bsr16_params, columns),  FIELD(esmm_bsr16_params, entries),   FIELD(esmm_bsr16_params, partial),
    FIELD(esmm_bsr16_params, counters), ARRAY(esmm_bsr16_params, parts),     FIELD(esmm_bsr16_params, all_parts),
    FIELD(esmm_bsr16_params, unused),   FIELD(esmm_bsr16_params, places),    FIELD(esmm_bsr16_params, blocks),
    FIELD(esmm_bsr16_params, epilogue)};

static const field bsr16_mma_params_fields[] = {
    FIELD(esmm_bsr16_mma_params, selector), FIELD(esmm_bsr16_mma_params, m),       FIELD(esmm_bsr16_mma_params, n),
    FIELD(esmm_bsr16_mma_params, k),        FIELD(esmm_bsr16_mma_params, a),       FIELD(esmm_bsr16_mma_params, a_ld),
    FIELD(esmm_bsr16_mma_params, cells),    FIELD(esmm_bsr16_mma_params, places),  FIELD(esmm_bsr16_mma_params, chunks),
    FIELD(esmm_bsr16_mma_params, cell_k),   FIELD(esmm_bsr16_mma_params, epilogue)};

static const field bsr16_decode_params_fields[] = {
    FIELD(esmm_bsr16_decode_params, selector), FIELD(esmm_bsr16_decode_params, a),
    FIELD(esmm_bsr16_decode_params, cells),    FIELD(esmm_bsr16_decode_params, places),
    FIELD(esmm_bsr16_decode_params, chunks),   FIELD(esmm_bsr16_decode_params, cell_k),
    FIELD(esmm_bsr16_decode_params, vector),   FIELD(esmm_bsr16_decode_params, unused),
    FIELD(esmm_bsr16_decode_params, epilogue)};

static const field nm16_params_fields[] = {FIELD(esmm_nm16_params, map_a),  FIELD(esmm_nm16_params, selector),
                                           FIELD(esmm_nm16_params, b),      FIELD(esmm_nm16_params, m),
                                           FIELD(esmm_nm16_params, n),      FIELD(esmm_nm16_params, blocks),
                                           FIELD(esmm_nm16_params, group),  FIELD(esmm_nm16_params, registers),
                                           FIELD(esmm_nm16_params, unused), FIELD(esmm_nm16_params, epilogue)};

static const field half16_params_fields[] = {FIELD(esmm_half16_params, map_b),
                                             FIELD(esmm_half16_params, selector),
                                             FIELD(esmm_half16_params, a),
                                             FIELD(esmm_half16_params, a_ld),
                                             FIELD(esmm_half16_params, m),
                                             FIELD(esmm_half16_params, n),
                                             FIELD(esmm_half16_params, k),
                                             FIELD(esmm_half16_params, blocks),
                                             FIELD(esmm_half16_params, pairs),
                                             FIELD(esmm_half16_params, group),
                                             FIELD(esmm_half16_params, registers),
                                             FIELD(esmm_half16_params, unused),
                                             ARRAY(esmm_half16_params, half),
                                             FIELD(esmm_half16_params, many),
                                             NAMED("rests", esmm_half16_params, overflow),
                                             FIELD(esmm_half16_params, at),
                                             FIELD(esmm_half16_params, lists),
                                             FIELD(esmm_half16_params, rows),
                                             FIELD(esmm_half16_params, again),
                                             FIELD(esmm_half16_params, agains),
                                             FIELD(esmm_half16_params, b),
                                             FIELD(esmm_half16_params, b_ld),
                                             FIELD(esmm_half16_params, epilogue)};

static const field decode_params_fields[] = {
    FIELD(esmm_decode_params, selector),    FIELD(esmm_decode_params, a),
    FIELD(esmm_decode_params, b),           FIELD(esmm_decode_params, b_slice),
    FIELD(esmm_decode_params, b_row),       FIELD(esmm_decode_params, group_shift),
    FIELD(esmm_decode_params, range),       FIELD(esmm_decode_params, chunk),
    FIELD(esmm_decode_params, vector),      FIELD(esmm_decode_params, inbox),
    FIELD(esmm_decode_params, report),      FIELD(esmm_decode_params, epilogue),
    FIELD(esmm_decode_params, gate),        FIELD(esmm_decode_params, gate_bias),
    FIELD(esmm_decode_params, gate_report), FIELD(esmm_decode_params, gate_activation),
    FIELD(esmm_decode_params, unused)};

static const field nm16_decode_params_fields[] = {
    FIELD(esmm_nm16_decode_params, selector),    FIELD(esmm_nm16_decode_params, a),
    FIELD(esmm_nm16_decode_params, b),           FIELD(esmm_nm16_decode_params, blocks),
    FIELD(esmm_nm16_decode_params, range),       FIELD(esmm_nm16_decode_params, chunk),
    FIELD(esmm_nm16_decode_params, group_shift), FIELD(esmm_nm16_decode_params, vector),
    FIELD(esmm_nm16_decode_params, unused),      FIELD(esmm_nm16_decode_params, epilogue)};

static const field gemm_fields[] = {
    FIELD(fake_gemm, a),      FIELD(fake_gemm, b),       FIELD(fake_gemm, c),         FIELD(fake_gemm, workspace),
    FIELD(fake_gemm, op_a),   FIELD(fake_gemm, op_b),    FIELD(fake_gemm, m),         FIELD(fake_gemm, n),
    FIELD(fake_gemm, k),      FIELD(fake_gemm, lda),     FIELD(fake_gemm, ldb),       FIELD(fake_gemm, ldc),
    FIELD(fake_gemm, alpha),  FIELD(fake_gemm, beta),    FIELD(fake_gemm, a_type),    FIELD(fake_gemm, b_type),
    FIELD(fake_gemm, c_type), FIELD(fake_gemm, compute), FIELD(fake_gemm, algorithm), FIELD(fake_gemm, math_mode)};

struct params_struct {
  const char *name;
  size_t size, align;
  const field *fields;
  int count;
};

#define STRUCT(type, name) \
  {#type, sizeof(type), _Alignof(type), name##_fields, (int)(sizeof name##_fields / sizeof *name##_fields)},
static const params_struct structs[] = {STRUCTS(STRUCT)};

/* Which kernel takes what: by the longest start of its name that is here. */
static const struct {
  const char *start;
  int of;
} functions[] = {
    {"cublas", AT_gemm},
    {"esmm_bsr16_", AT_bsr16_params},
    {"esmm_bsr_", AT_bsr16_mma_params},
    {"esmm_bsr_decode_", AT_bsr16_decode_params},
    {"esmm_convert", AT_convert_params},
    {"esmm_count_joint", AT_count_params},
    {"esmm_decode_", AT_decode_params},
    {"esmm_dense_bf16", AT_mma16_params},
    {"esmm_dense_f16", AT_mma16_params},
    {"esmm_dense_f32_", AT_dense_params},
    {"esmm_dense_f32_mma", AT_strips_product_params},
    {"esmm_extract", AT_extract_params},
    {"esmm_fine16_", AT_fine16_params},
    {"esmm_fine16_pack", AT_fine16_pack_params},
    {"esmm_finish", AT_finish_params},
    {"esmm_fused16_", AT_fused16_params},
    {"esmm_half16_", AT_half16_params},
    {"esmm_joint_bf16", AT_mma16_params},
    {"esmm_joint_f16", AT_mma16_params},
    {"esmm_joint_f32", AT_strips_product_params},
    {"esmm_joint_mma16_extract", AT_mma16_extract_params},
    {"esmm_nm16_", AT_nm16_params},
    {"esmm_nm16_decode_", AT_nm16_decode_params},
    {"esmm_pack_rows", AT_pack_params},
    {"esmm_sample", AT_sample_params},
    {"esmm_small_", AT_small_params},
    {"esmm_tally", AT_tally_params},
    {"esmm_tally_begin", AT_tally_begin_params},
    {"esmm_tally_count", AT_tally_count_params},
    {"esmm_wgmma16_", AT_wgmma16_params},
};

const params_struct *params_of(const char *function)
{
  const params_struct *found = NULL;
  size_t longest = 0;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    const size_t length = strlen(functions[i].start);
    if (length > longest && strncmp(function, functions[i].start, length) == 0) {
      longest = length;
      found = &structs[functions[i].of];
    }
  }
  return found;
}

static void write_value(const field *f, const char *from, const char *name, const params_out *out);

static void write_fields(const params_struct *s, const char *from, const char *prefix, const params_out *out)
{
  for (int i = 0; i < s->count; i++) {
    const field *f = &s->fields[i];
    for (int j = 0; j < f->count || j == 0; j++) {
      char name[128], place[16] = "";
      if (f->count)
        (void)snprintf(place, sizeof place, ".%d", j);
      (void)snprintf(name, sizeof name, "%s%s%s%s", prefix, *prefix ? "." : "", f->name, place);
      write_value(f, from + f->at + (size_t)j * f->size, name, out);
    }
  }
}

static void write_value(const field *f, const char *from, const char *name, const params_out *out)
{
  uint64_t bits = 0;
  char text[32];
  if (f->kind < STRUCT_COUNT) {
    write_fields(&structs[f->kind], from, name, out);
    return;
  }
  memcpy(&bits, from, f->size);
  if (bits == 0)
    return;
  switch (f->kind) {
  case ADDRESS:
    out->address(out->to, name, bits);
    return;
  case INT64:
    (void)snprintf(text, sizeof text, "%lld", (long long)bits);
    break;
  case INT32:
    (void)snprintf(text, sizeof text, "%d", (int32_t)bits);
    break;
  case UINT32:
    (void)snprintf(text, sizeof text, "%u", (uint32_t)bits);
    break;
  default: {
    float value;
    memcpy(&value, from, sizeof value);
    (void)snprintf(text, sizeof text, "%.5g", (double)value);
  }
  }
  out->number(out->to, name, text);
}

void params_write(const params_struct *s, const void *params, const params_out *out)
{
  write_fields(s, params, "", out);
}

/* Bytes that only bring what follows to the alignment of a tensor map. */
static bool is_padding(size_t from, size_t to, size_t align)
{
  return from == to || (from < to && to - from < align && align == _Alignof(esmm_tensor_map));
}

bool params_complete(char *why, size_t bytes)
{
  for (int i = 0; i < STRUCT_COUNT; i++) {
    const params_struct *s = &structs[i];
    size_t end = 0;
    for (int j = 0; j < s->count; j++) {
      const field *f = &s->fields[j];
      if (!is_padding(end, f->at, f->kind == AT_tensor_map ? _Alignof(esmm_tensor_map) : 1)) {
        (void)snprintf(why, bytes, "%s: bytes %zu to %zu, before '%s', are in no field of its table", s->name, end,
                       f->at, f->name);
        return false;
      }
      end = f->at + f->size * (size_t)(f->count ? f->count : 1);
    }
    if (!is_padding(end, s->size, s->align)) {
      (void)snprintf(why, bytes, "%s: bytes %zu to %zu, its last, are in no field of its table", s->name, end, s->size);
      return false;
    }
  }
  return true;
}
