/*
 * weights_file.h: the layout of a weights file, for its reader and writer and for the tests that damage one on purpose.
 * docs/weights-file.md describes it in words. Change anything here and ESMM_FILE_VERSION changes with it.
 *
 * Dense weights are written as version 1, which has no other format, and every other format as version 2: a file is no
 * newer than its content needs, so that older libraries read what they can.
 */
#ifndef ESMM_WEIGHTS_FILE_H
#define ESMM_WEIGHTS_FILE_H

#include "internal.h"

/* Starts outside ASCII and holds a CR LF: a copy made in text mode does not pass for the original. */
#define ESMM_FILE_MAGIC "\211ESMMW\r\n"
#define ESMM_FILE_MAGIC_BYTES 8
#define ESMM_FILE_ENDIAN 0x01020304u
#define ESMM_FILE_ENDIAN_OTHER 0x04030201u
#define ESMM_FILE_VERSION 2u
#define ESMM_FILE_ALIGN 64 /* of every section, so that a file may one day be mapped instead of read */

enum {
  ESMM_FILE_BITS,     /* uint64 [panels][words] */
  ESMM_FILE_BEFORE,   /* uint32 [panels][words + 1] */
  ESMM_FILE_PANEL_AT, /* uint64 [panels + 1] */
  ESMM_FILE_PANELS,   /* the panels' elements */
  ESMM_FILE_ROWS,     /* elements [k][rows_ld] */
  ESMM_FILE_SECTIONS,
  /* in a file of another format, in place of the sections of dense weights */
  ESMM_FILE_START = ESMM_FILE_BEFORE, /* BSR: int32 [strips + 1] */
  ESMM_FILE_INDEX = ESMM_FILE_BEFORE, /* NM */
  ESMM_FILE_AT = ESMM_FILE_PANEL_AT,  /* BSR: int32 [blocks] */
  ESMM_FILE_VALUES = ESMM_FILE_PANELS /* elements */
};

typedef struct esmm_file_section {
  uint64_t offset, bytes; /* both 0 where the section is absent or empty */
  uint64_t checksum;      /* of its bytes; that of no bytes where it is empty */
} esmm_file_section;

typedef struct esmm_file_header {
  unsigned char magic[ESMM_FILE_MAGIC_BYTES];
  uint32_t endian;
  uint32_t version;
  uint64_t header_bytes;
  uint64_t file_bytes;
  int64_t k, n;
  uint32_t dtype, use;
  uint32_t strict, full;
  int64_t panels, words, rows_ld;
  double element_density, strip_density;
  uint32_t panel_cols, half_cols;
  uint32_t section_count, zero;
  esmm_file_section section[ESMM_FILE_SECTIONS];
  uint32_t format;                                      /* from here on 0 in version 1 */
  uint32_t block_rows, block_cols, n_of, m_of, nm_cols; /* n_of : m_of */
  int64_t blocks;
  uint64_t reserved[5]; /* 0 */
  uint64_t checksum;    /* of all of the header before it */
} esmm_file_header;

_Static_assert(sizeof(esmm_file_header) == 320, "the header is laid out without holes, a multiple of ESMM_FILE_ALIGN");

/* What esmm_weights_load does, from memory; name stands for the path in error texts. */
esmm_status esmm_weights_parse(esmm_ctx *ctx, const char *name, const unsigned char *bytes, size_t size,
                               esmm_weights **weights);

#endif
