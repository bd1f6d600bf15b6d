/*
 * packed_params.h: a C that is handed over packed (wgmma16/handed.cuh). A part of params.h, which includes it.
 */
#ifndef ESMM_CUDA_PACKED_PARAMS_H
#define ESMM_CUDA_PACKED_PARAMS_H

/*
 * A 16-bit matrix without its dead columns, as the product reads it that takes it as its A (wgmma16/handed.cuh): 128
 * rows by 256 columns, a segment, at a time. A column with a nonzero in these rows is a line for each 64 of them, 128
 * bytes, in the order of columns; its 16 bytes i lie at i ^ (line % 8). Lines of zeros follow up to a multiple of
 * ESMM_PACKED_GROUP. A group of zeros lies before the values.
 */
#define ESMM_PACKED_COLS 256
#define ESMM_PACKED_GROUP 8
#define ESMM_PACKED_BYTES (ESMM_PACKED_GROUP * 128) /* of a group */

typedef struct esmm_packed {
  uint64_t values; /* [strips][2][segments][ESMM_PACKED_COLS][64]; 0: there are none */
  uint64_t places; /* [strips][segments][ESMM_PACKED_COLS] uint8_t: which columns of the segment they are */
  uint64_t counts; /* [strips][segments] uint32_t: how many */
  /*
   * The same for whoever reads strips from end to end (esmm_tally_index), one behind the other:
   *   [strips][segments * ESMM_PACKED_COLS] uint32_t   the column of each line; ESMM_PACKED_NONE for one of zeros
   *   [strips][segments * ESMM_PACKED_COLS / 8] uint32_t  of each group: the run of neighbours in memory that begins
   *                                           with it and ends with its 64 lines, | how many << 24; 0: it is in one
   *   [strips] uint32_t   lines with those of zeros, a multiple of 16; both lists are filled up to one of 64
   *   [strips] uint32_t   without them
   */
  uint64_t index;
  int32_t segments, strips;
} esmm_packed;
ESMM_PARAMS_SIZE(esmm_packed, 40);
#define ESMM_PACKED_NONE 0xffffffffu
#define ESMM_PACKED_ZEROS 0xffffffu /* the group before the values */
/* Words of the index before its second, third and fourth part, and of all. */
#define ESMM_PACKED_RUNS(p) ((uint64_t)(p).strips * (uint64_t)(p).segments * ESMM_PACKED_COLS)
#define ESMM_PACKED_LINES(p) (ESMM_PACKED_RUNS(p) / ESMM_PACKED_GROUP * (ESMM_PACKED_GROUP + 1))
#define ESMM_PACKED_ALIVE(p) (ESMM_PACKED_LINES(p) + (uint64_t)(p).strips)
#define ESMM_PACKED_INDEX(p) (ESMM_PACKED_ALIVE(p) + (uint64_t)(p).strips)

/* esmm_tally_pack: C packed, from C as it is stored, 16-bit and row-major. Blocks of ESMM_PACKED_COLS threads, one for
   each segment (x) of a strip of ESMM_TILE rows (y). */
typedef struct esmm_tally_pack_params {
  esmm_device_matrix c;
  esmm_packed to;
} esmm_tally_pack_params;
ESMM_PARAMS_SIZE(esmm_tally_pack_params, 80);

/* esmm_tally_index: the index of packed values, a block a strip; and what esmm_tally_count tells of their bits. */
#define ESMM_TALLY_INDEX_THREADS 1024

typedef struct esmm_tally_index_params {
  esmm_packed packed;
  uint64_t sums, out; /* as in esmm_tally_count_params; out 0: nobody asks */
  uint32_t ready;
  uint32_t unused;
} esmm_tally_index_params;
ESMM_PARAMS_SIZE(esmm_tally_index_params, 64);

#endif
