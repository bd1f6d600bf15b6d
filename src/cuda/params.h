/*
 * params.h: parameters of kernels. Included by host code (C11) and by device code (nvcc), so plain structs only, and
 * their sizes are asserted on both sides. Each kernel takes one of these by value.
 *
 * Pointers are device addresses. Elements are fp32 unless a dtype says otherwise; dtype, order and activation are
 * esmm.h's enums as int32_t. Numbers that both sides rely on (tiles, threads, stages, bytes) are defined here, once.
 */
#ifndef ESMM_CUDA_PARAMS_H
#define ESMM_CUDA_PARAMS_H

#include <stdint.h>

#ifdef __cplusplus
#define ESMM_PARAMS_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), "host and device must agree on " #type)
#else
#define ESMM_PARAMS_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "host and device must agree on " #type)
#endif

#define ESMM_STRIP 32 /* rows of A, or columns of B, that share one bitmap on a GPU */
#define ESMM_TILE 128 /* the same for kernels of 16-bit operands */

/* A kernel with a selector returns at once unless *selector == value: the device chose another one. */
typedef struct esmm_selector {
  uint64_t address; /* of a uint32_t; 0: no selector */
  uint32_t value;
  uint32_t unused;
} esmm_selector;
ESMM_PARAMS_SIZE(esmm_selector, 16);

/* A matrix in device memory. */
typedef struct esmm_device_matrix {
  uint64_t data;
  int64_t rows, cols, ld;
  int32_t dtype, order;
} esmm_device_matrix;
ESMM_PARAMS_SIZE(esmm_device_matrix, 40);

/*
 * One operand as the skipping kernels read it: k-major strips of 32 rows of A (or columns of B).
 *   data [strips][k_padded][32]  fp32; rows past the matrix are 0; k_padded is a multiple of 32
 *   bits [strips][words]         bit i of word w: k = 32 w + i has a nonzero in this strip; words = k_padded / 32
 * Segments data[strip][k] are undefined, and not read, where the bit is 0.
 */
typedef struct esmm_strips {
  uint64_t data, bits;
  int64_t strips, k_padded;
} esmm_strips;
ESMM_PARAMS_SIZE(esmm_strips, 32);

/* Parts of an epilogue beyond alpha, beta, bias, ReLU and ReLU2, and notes of C: kernels test for them once. */
enum {
  ESMM_EXTRA_VALUES = 1, /* another activation, a factor, a residual, or a bias that is not aligned to 8 bytes */
  ESMM_EXTRA_TALLY = 2   /* counts or bits */
};

/* C = activation(alpha * sum + beta * C + bias) * factor + residual, as in epilogue.h. */
typedef struct esmm_epilogue_params {
  esmm_device_matrix c;
  uint64_t bias; /* [n] fp32, or 0 */
  float alpha, beta;
  int32_t activation;
  uint32_t extra;              /* ESMM_EXTRA_...: without a bit, its fields are 0 */
  esmm_device_matrix residual; /* data is 0: none */
  uint64_t factor;             /* [m][factor_ld] fp32, aligned to 16 bytes, or 0 */
  int64_t factor_ld;           /* a multiple of 4; 0: the same row for all */
  uint64_t counts;             /* [n] int32, to which the nonzeros of C's columns are added, or 0 */
  uint64_t bits;               /* [ceil(m / strip_rows)][words] uint32, into which C's strips are ORed, or 0 */
  int64_t strip_rows, words;
} esmm_epilogue_params;
ESMM_PARAMS_SIZE(esmm_epilogue_params, 152);

/* ---- extract.cu ---- */

#define ESMM_EXTRACT_CHUNK 128   /* k's of a block of esmm_extract, */
#define ESMM_EXTRACT_THREADS 256 /* and the threads of all kernels there but the sample */
#define ESMM_COPY_TILE 32        /* rows and columns that a block of esmm_pack_rows and esmm_convert takes at once */

/* esmm_extract: bitmaps of A's strips and, where strips.data is not 0, their alive segments (all with write_all). */
typedef struct esmm_extract_params {
  esmm_selector selector;
  esmm_device_matrix a; /* B transposed, for B */
  esmm_strips strips;
  int32_t write_all;
  int32_t unused;
} esmm_extract_params;
ESMM_PARAMS_SIZE(esmm_extract_params, 96);

/* esmm_pack_rows: any matrix to fp32, row-major, k padded with zeros. */
typedef struct esmm_pack_params {
  esmm_selector selector;
  esmm_device_matrix a;
  uint64_t out; /* [rows][ld] */
  int64_t ld;
} esmm_pack_params;
ESMM_PARAMS_SIZE(esmm_pack_params, 72);

/* What the device measured of A, and what it chose. */
typedef struct esmm_choice_device {
  uint32_t chosen;             /* 0: the first kernel of the pair, 1: the second */
  float element, strip, joint; /* densities of A's sample: elements, strips, joint with B */
  uint32_t extract_ns;         /* time of an extraction within the kernel's launch; else 0 */
  float overflow;              /* share of elements that are the third or fourth nonzero of their group of four k's, */
  uint32_t counted;            /* where this is 1: else they were not counted */
  uint32_t ready;              /* 1: all of the above is there; in host memory written last */
} esmm_choice_device;
ESMM_PARAMS_SIZE(esmm_choice_device, 32);

#define ESMM_SAMPLES 64
#define ESMM_SAMPLE_WARPS 4 /* of a block: one block a place, a warp for each 32 rows of the strip */
#define ESMM_SAMPLE_NOTES (16 + 20 * ESMM_SAMPLES) /* bytes of notes; zero before the first use, then left ready */

/* esmm_sample: samples A, writes an esmm_choice_device: 1 (the skipping kernel) where base + per_strip * strip +
 * per_joint * joint < dense. */
typedef struct esmm_sample_params {
  esmm_device_matrix a;
  uint64_t alive; /* [k] share of B's strips that need k */
  uint64_t out;   /* esmm_choice_device */
  uint64_t notes; /* where the blocks meet */
  float dense, base, per_strip, per_joint;
  int32_t height; /* rows of a strip, ESMM_STRIP or ESMM_TILE; alive is of B's strips or tiles accordingly */
  int32_t unused;
} esmm_sample_params;
ESMM_PARAMS_SIZE(esmm_sample_params, 88);

/* esmm_count_joint: *out = joint bits over all pairs of strips. */
typedef struct esmm_count_params {
  uint64_t a_bits, b_bits;
  int64_t a_strips, b_strips, words, k;
  uint64_t out;
} esmm_count_params;
ESMM_PARAMS_SIZE(esmm_count_params, 56);

/* esmm_finish: C from sums that are there, or from none. Notes nothing of C. */
typedef struct esmm_finish_params {
  esmm_epilogue_params epilogue;
  esmm_device_matrix sums; /* fp32, in C's order; data is 0: all are 0 */
} esmm_finish_params;
ESMM_PARAMS_SIZE(esmm_finish_params, 192);

/* esmm_convert: dst = src, elementwise, any dtype and order. */
typedef struct esmm_convert_params {
  esmm_selector selector;
  esmm_device_matrix src, dst;
} esmm_convert_params;
ESMM_PARAMS_SIZE(esmm_convert_params, 96);

/* ---- products ---- */

/* Kernels that read both operands as strips: joint_f32, dense_f32_mma. */
typedef struct esmm_strips_product_params {
  esmm_selector selector;
  int64_t m, n, k;
  esmm_strips a, b;
  esmm_epilogue_params epilogue;
} esmm_strips_product_params;
ESMM_PARAMS_SIZE(esmm_strips_product_params, 256);

/* strips_mma.cuh, which joint_f32 and dense_f32_mma are made of: 96 x 128 of C a block; shared memory for its ring. */
#define ESMM_STRIPS_MMA_ROWS 96
#define ESMM_STRIPS_MMA_COLS 128
#define ESMM_STRIPS_MMA_THREADS 512
#define ESMM_STRIPS_MMA_CHUNK_90 32    /* k's of a stage on sm_90 */
#define ESMM_STRIPS_MMA_CHUNK 24       /* elsewhere */
#define ESMM_STRIPS_MMA_STAGES 7       /* most stages of the ring, */
#define ESMM_STRIPS_MMA_LEAST_STAGES 4 /* and least: as many as producers */
#define ESMM_STRIPS_MMA_SHARED(chunk, stages) ((stages) * (chunk)*896 + 12288)

/* A 2-D tensor map, as cuTensorMapEncodeTiled writes it. */
typedef struct esmm_tensor_map {
#ifdef __cplusplus
  alignas(64) uint64_t opaque[16];
#else
  _Alignas(64) uint64_t opaque[16];
#endif
} esmm_tensor_map;
ESMM_PARAMS_SIZE(esmm_tensor_map, 128);

/* dense_f32 on sm_90a: A [m,k] row-major and B transposed [n,k], both with k contiguous. */
typedef struct esmm_dense_params {
  esmm_tensor_map map_a; /* boxes of 128 rows by 32 k's */
  esmm_tensor_map map_b;
  esmm_selector selector;
  int64_t m, n, k;
  uint64_t a, b; /* the same matrices, for the sums that are made again */
  int64_t a_ld, b_ld;
  esmm_epilogue_params epilogue;
  uint64_t unused[3];
} esmm_dense_params;
ESMM_PARAMS_SIZE(esmm_dense_params, 512);

/* Rows of a block: two sizes; and the dynamic shared memory of each (1 KiB for the barriers). */
#define ESMM_DENSE_TALL 256
#define ESMM_DENSE_LOW 128
#define ESMM_DENSE_SHARED_256 (3 * 65536 + 1024)
#define ESMM_DENSE_SHARED_128 (4 * 49152 + 1024)
#define ESMM_DENSE_THREADS 384
#define ESMM_DENSE_K 32     /* k's of a stage, and of a box of the tensor maps */
#define ESMM_DENSE_ROWS 128 /* rows of a box of A */
#define ESMM_DENSE_COLS 128 /* columns of a block, and of a box of B */

/* ---- k_wgmma16_sm90a.cu: 16-bit operands on Hopper, dense and skipping in one kernel ---- */

enum {
  ESMM_WGMMA16_DENSE = 0,  /* everything */
  ESMM_WGMMA16_SKIP_A = 1, /* k's alive in a strip of 128 rows of A; tiles of 256 columns, in pairs */
  ESMM_WGMMA16_SKIP_AB = 2 /* and alive in a tile of 128 columns of B */
};

/* What the two blocks of a cluster have in common. */
enum { ESMM_WGMMA16_ALONE = 0, ESMM_WGMMA16_SHARE_A = 1, ESMM_WGMMA16_SHARE_B = 2 };

/* How one mode cuts C into units of work. Tiles 0 .. whole - 1 are one unit each, the others `splits` along k. */
typedef struct esmm_wgmma16_units {
  int32_t cols;  /* of a tile, 128 or 256; it has 128 rows */
  int32_t share; /* ESMM_WGMMA16_...: neighbours along n share A, those along m share B */
  int32_t group; /* tile rows that come together */
  int32_t whole, splits;
  int32_t lent; /* dense, splits being 1: of the others, the first stages that blocks without one begin with (LENT) */
  int32_t unused[2];
} esmm_wgmma16_units;
ESMM_PARAMS_SIZE(esmm_wgmma16_units, 32);

typedef struct esmm_wgmma16_params {
  /* Boxes of ESMM_WGMMA16_BOX, contiguous side first: */
  esmm_tensor_map map_a;      /* k's by rows (row-major), rows by k's (col-major) */
  esmm_tensor_map map_b;      /* columns by k's */
  esmm_tensor_map map_packed; /* rows by k's of packed, as one matrix of 64 columns */
  esmm_tensor_map map_c;      /* columns by rows, where c_boxes is not 0 */
  esmm_selector selector;
  int32_t m, n, k;
  int32_t mode;       /* ESMM_WGMMA16_..., or, where choose is not 0, the skipping one to choose against dense */
  int32_t choose;     /* 1: sample A, then take dense unless base + per_strip * strip + per_joint * joint < dense */
  int32_t a_by_k;     /* A is col-major */
  int32_t segments;   /* parts of k that a strip of A is packed in, */
  int32_t segment_k;  /* and their k's: a multiple of ESMM_WGMMA16_SEGMENT_STEP */
  uint64_t a, b;      /* the matrices again: A for the sample, B to gather rows from */
  int64_t a_ld, b_ld; /* elements */
  uint64_t b_bits;    /* [b_ld / 128][b_words]: bitmaps of B's tiles; for SKIP_AB */
  uint64_t b_alive;   /* [k] share of B's tiles that need k; for the sample */
  uint64_t packed;    /* [strips][2][segments * segment_k][64]: A's alive k's, 64 rows each */
  uint64_t lists;     /* [strips][segments * segment_k] uint32_t: where their rows of B begin, in 16 bytes */
  uint64_t a_bits;    /* [strips][b_words] uint32_t: the same as bitmaps */
  uint64_t counts;    /* [strips][segments] uint32_t: how many */
  uint64_t partial;   /* fp32 sums of the parts of split tiles, or of lent stages */
  uint64_t meeting;   /* ESMM_WGMMA16_MEETING bytes where blocks meet; zero before the first use, then left ready */
  uint64_t report;    /* esmm_choice_device, or 0 */
  float dense, base, per_strip, per_joint;
  int64_t b_words;
  int32_t c_boxes;             /* C is 16-bit, row-major, aligned and not scaled by beta, and what follows the sums can
                                  be done in registers: TMA can write it */
  float b_density;             /* share of B's tiles that need a k, in the mean; for the report */
  esmm_wgmma16_units units[3]; /* by mode */
  esmm_epilogue_params epilogue;
  /* esmm_wgmma16_gated_*: C = activation(alpha * (A gate) + gate_bias) * (alpha * (A B) + ...), as in the epilogue. */
  uint64_t gate_bias; /* [n] fp32, or 0 */
  int32_t gate_activation;
  uint32_t count_ready;     /* bit_count's `ready`, when the bits have been counted */
  esmm_tensor_map map_gate; /* as map_b */
  /* Dense, where the launch itself clears its notes of C first: */
  uint64_t bit_count; /* esmm_pattern_bit_count in host memory: it also counts the bits, in strips of 128 rows. Or 0 */
  uint64_t bitmap_sums; /* behind the bits: a uint64_t, and at 24 a uint32_t: how many have added to it */
  int64_t bitmap_words; /* 32-bit words from the bits on that are 0 before, the sums' among them; */
  int64_t count_words;  /* the same of the counts. Both 0: they are cleared already */
  uint64_t unused_too[4];
} esmm_wgmma16_params;
ESMM_PARAMS_SIZE(esmm_wgmma16_params, 1152);

#define ESMM_WGMMA16_THREADS 384
#define ESMM_WGMMA16_CLUSTER 2  /* blocks of a cluster */
#define ESMM_WGMMA16_NARROW 128 /* columns of a tile: two sizes */
#define ESMM_WGMMA16_WIDE 256
#define ESMM_WGMMA16_MOST_SIDE (1 << 23) /* of m, n and k: 32-bit places in units of 16 bytes */
#define ESMM_WGMMA16_SHARED (4 * 49152 + 35840)
#define ESMM_WGMMA16_K 64             /* k's of a stage */
#define ESMM_WGMMA16_BOX 64           /* rows and columns of a box of the tensor maps */
#define ESMM_WGMMA16_SEGMENT_STEP 128 /* segment_k is a multiple of it */
#define ESMM_WGMMA16_MOST_SEGMENTS 32
#define ESMM_WGMMA16_LISTS_PAST 2048 /* bytes past the lists that are fetched and not used */
#define ESMM_WGMMA16_GATED 128       /* columns of C of a gated tile: half a stage's are the gate's */
#define ESMM_WGMMA16_GATED_PARTS 4   /* most parts of a gated tile that is split: each adds 32 columns at least */
#define ESMM_WGMMA16_PARTIAL (ESMM_TILE * ESMM_WGMMA16_WIDE * 4) /* bytes of one part's sums */
#define ESMM_WGMMA16_MOST_BLOCKS 256                             /* that meet at split tiles */
#define ESMM_WGMMA16_CLEARED \
  (2 + 2 * ESMM_WGMMA16_MOST_BLOCKS)                        /* the first of two words where blocks that clear meet */
#define ESMM_WGMMA16_MEETING (4 * ESMM_WGMMA16_CLEARED + 8) /* two words, two a block of a split tile, and these */
#define ESMM_WGMMA16_LEAST_SAMPLED 8                        /* A is sampled where m and k are at least this */

/* esmm_wgmma16_look: what a launch with the same esmm_wgmma16_params chooses, as an esmm_choice_device in report. One
 * block, no dynamic shared memory. */
#define ESMM_WGMMA16_LOOK_THREADS 64

/* ---- k_fused16_sm90a.cu: 16-bit operands with few or middling rows on Hopper ---- */

#define ESMM_FUSED16_ROWS 64  /* of a tile of C, and of a strip of A */
#define ESMM_FUSED16_COLS 256 /* of a tile of C */
#define ESMM_FUSED16_THREADS 384
#define ESMM_FUSED16_BLOCKS 1   /* at once on a multiprocessor */
#define ESMM_FUSED16_RANKS 8    /* most blocks that share a tile's k's: a cluster */
#define ESMM_FUSED16_BOXES 8    /* of 64 k's of A, that are on their way */
#define ESMM_FUSED16_LINES 512  /* alive k's of A that there is room for */
#define ESMM_FUSED16_STAGE_K 32 /* alive k's of a stage, */
#define ESMM_FUSED16_STAGES 4   /* and how many there are */
#define ESMM_FUSED16_PARTIAL (ESMM_FUSED16_ROWS * ESMM_FUSED16_COLS * 4)
/* Dynamic shared memory: stages of B, lines of A and their k's, boxes of A, barriers. */
#define ESMM_FUSED16_SHARED                                             \
  (ESMM_FUSED16_STAGES * ESMM_FUSED16_STAGE_K * ESMM_FUSED16_COLS * 2 + \
   ESMM_FUSED16_LINES * (ESMM_FUSED16_ROWS * 2 + 4) + ESMM_FUSED16_BOXES * 64 * ESMM_FUSED16_ROWS * 2 + 1024)

typedef struct esmm_fused16_params {
  esmm_tensor_map map_a; /* boxes of 64 by 64, contiguous side first */
  esmm_selector selector;
  int32_t m, n, k;
  int32_t tiles; /* of columns, */
  int32_t each;  /* of a block: 1 where ranks is more */
  int32_t ranks; /* blocks that share a tile's k's: a power of two */
  int32_t range; /* k's of a block, a multiple of 64 */
  int32_t unused;
  uint64_t b;       /* rows [k][n padded to 128] */
  int64_t b_row;    /* bytes from a k to the next */
  uint64_t partial; /* sums of a cluster's blocks: ESMM_FUSED16_PARTIAL bytes each; 0 where ranks is 1 */
  uint64_t unused_too;
  esmm_epilogue_params epilogue;
} esmm_fused16_params;
ESMM_PARAMS_SIZE(esmm_fused16_params, 384);

/* ---- k_fine16_sm90a.cu: 16-bit operands, A very sparse, on Hopper ---- */

#define ESMM_FINE16_STRIP 8        /* rows of A that share a list of alive k's */
#define ESMM_FINE16_ROWS 32        /* of a group: what a warp multiplies, and a block packs */
#define ESMM_FINE16_BLOCK_ROWS 512 /* of C per block, by this many columns: */
#define ESMM_FINE16_COLS 64
#define ESMM_FINE16_CHUNK 256  /* k's that come to shared memory together, */
#define ESMM_FINE16_STAGES 6   /* in flight at once, */
#define ESMM_FINE16_AHEAD 4    /* and those that steps may take k's from */
#define ESMM_FINE16_STEPS 64   /* of 16 k's of a strip, that a chunk adds to a group at most */
#define ESMM_FINE16_PAST 16    /* steps that are read past the end of a list, and not used */
#define ESMM_FINE16_VALUES 256 /* bytes of a step's values, */
#define ESMM_FINE16_PLACES 32  /* and of its places */
#define ESMM_FINE16_THREADS 512
#define ESMM_FINE16_SHARED (ESMM_FINE16_STAGES * ESMM_FINE16_CHUNK * ESMM_FINE16_COLS * 2 + 1024 + 18432 + 128)
#define ESMM_FINE16_PACK_THREADS 544
#define ESMM_FINE16_PACK_BUFFERS 12 /* chunks of a group, a multiple of the stages */
#define ESMM_FINE16_PACK_SHARED (ESMM_FINE16_PACK_BUFFERS * ESMM_FINE16_CHUNK * ESMM_FINE16_ROWS * 2 + 16384 + 1024)
#define ESMM_FINE16_MOST_SIDE (1 << 23)

/* esmm_fine16_pack: a block for each group. */
typedef struct esmm_fine16_pack_params {
  esmm_tensor_map map_a; /* boxes of 64 k's by ESMM_FINE16_ROWS rows; A is row-major */
  esmm_selector selector;
  int32_t chunks; /* ceil(k / ESMM_FINE16_CHUNK) */
  int32_t unused;
  uint64_t values; /* [groups][chunks * ESMM_FINE16_STEPS][32] uint2: of the steps that there are */
  uint64_t places; /* the same, [16][4] uint16_t for every four steps: a slot's of all four side by side */
  uint64_t counts; /* [groups] uint2: how many there are, and k's that are alive in its strips */
  uint64_t unused_too;
} esmm_fine16_pack_params;
ESMM_PARAMS_SIZE(esmm_fine16_pack_params, 192);

typedef struct esmm_fine16_params {
  esmm_tensor_map map_b; /* boxes of ESMM_FINE16_COLS columns by ESMM_FINE16_CHUNK k's */
  esmm_selector selector;
  int32_t m, n;
  int32_t chunks, groups;
  int32_t row_blocks, tiles;       /* of C */
  int32_t together;                /* row blocks that share columns at the same time */
  int32_t registers;               /* C is 16-bit, row-major, aligned and not read, nothing follows but finish_values */
  uint64_t values, places, counts; /* as packed */
  esmm_epilogue_params epilogue;
  int64_t k;
  uint64_t report; /* esmm_choice_device, or 0 */
} esmm_fine16_params;
ESMM_PARAMS_SIZE(esmm_fine16_params, 384);

/* ---- tally.cu ---- */

#define ESMM_TALLY_THREADS 256
#define ESMM_TALLY_ROWS 128 /* of C that a warp takes, by 32 columns */

/* esmm_tally_begin: counts and bitmaps are 0, in one launch. */
typedef struct esmm_tally_begin_params {
  uint64_t counts, bits;             /* either may be 0 */
  int64_t count_words, bitmap_words; /* of 32 bits */
} esmm_tally_begin_params;
ESMM_PARAMS_SIZE(esmm_tally_begin_params, 32);

/* esmm_tally: notes of C, from C as it is stored. */
typedef struct esmm_tally_params {
  esmm_selector selector;
  esmm_device_matrix c;
  uint64_t counts, bits; /* as in esmm_epilogue_params */
  int64_t strip_rows, words;
} esmm_tally_params;
ESMM_PARAMS_SIZE(esmm_tally_params, 88);

/*
 * esmm_tally_count: how many bits of a pattern are set, at its own strips and where `fold` of them are one. Blocks add
 * to sums, which are 0 before; the last one writes esmm_pattern_bit_count.
 */
typedef struct esmm_pattern_bit_count {
  uint64_t own, folded[2];
  uint32_t ready; /* written last: the number that the launch was given */
  uint32_t unused;
} esmm_pattern_bit_count;
ESMM_PARAMS_SIZE(esmm_pattern_bit_count, 32);

#define ESMM_TALLY_SUMS 64 /* bytes of the sums and of the counter of blocks, behind the bits */

typedef struct esmm_tally_count_params {
  uint64_t bits; /* [strips][words] uint64_t */
  int64_t strips, words;
  int64_t fold[2]; /* 1: as own */
  uint64_t sums;   /* uint64_t own, folded[2]; uint32_t blocks that are done */
  uint64_t out;    /* esmm_pattern_bit_count, in host memory */
  uint32_t ready;
  uint32_t unused;
} esmm_tally_count_params;
ESMM_PARAMS_SIZE(esmm_tally_count_params, 64);

/* ---- count.cu ---- */

#define ESMM_COUNT_THREADS 256

/* esmm_count_nonzero: *out, a uint64_t, grows by the number of elements of m that are not zero. */
typedef struct esmm_nonzero_params {
  esmm_device_matrix m;
  uint64_t out;
} esmm_nonzero_params;
ESMM_PARAMS_SIZE(esmm_nonzero_params, 48);

/* ---- ops/prepare.cu: B once ---- */

#define ESMM_PREPARE_THREADS 256
#define ESMM_PREPARE_K 64 /* of a block of esmm_prepare16, by ESMM_TILE columns: a block of the form nm16 */

/* What is counted of B while it is prepared; all 0 at first. */
typedef struct esmm_prepare_found {
  uint64_t nonzero;       /* elements */
  uint64_t set, tile_set; /* bits of strips, bits of tiles */
  uint64_t misfit;        /* of an N:M B: see esmm_nm_params; 0: it fits */
} esmm_prepare_found;
ESMM_PARAMS_SIZE(esmm_prepare_found, 32);

/* esmm_prepare16: what is wanted of a 16-bit B, in one pass. */
typedef struct esmm_prepare16_params {
  esmm_device_matrix b;
  uint64_t rows; /* 0, or [k][rows_ld], which is a multiple of ESMM_TILE: B, and zeros past its columns */
  int64_t rows_ld;
  uint64_t bits; /* of strips: [strips][words] */
  int64_t strips, words;
  uint64_t nm; /* 0, or blocks of the form nm16 */
  uint64_t found;
  int32_t check;   /* 1: four k's of a column with more than two nonzeros are a misfit */
  int32_t vectors; /* B is row-major, its rows begin at multiples of 16 bytes */
} esmm_prepare16_params;
ESMM_PARAMS_SIZE(esmm_prepare16_params, 104);

/* esmm_prepare_bits: what follows from the bitmaps of strips. */
typedef struct esmm_prepare_bits_params {
  uint64_t bits; /* [strips][words] */
  int64_t strips, words, k;
  uint64_t alive;             /* [32 * words] fp32: share of strips that have the k */
  uint64_t tiles, tile_alive; /* the same of tiles, four strips each; both 0: not wanted */
  uint64_t found;
  int32_t strict; /* 1: every bit is set, once they are counted */
  int32_t unused;
} esmm_prepare_bits_params;
ESMM_PARAMS_SIZE(esmm_prepare_bits_params, 72);

/* ---- k_dense_mma16.cu, k_joint_mma16.cu: 16-bit operands by mma.sync ---- */

#define ESMM_MMA16_MOST_SIDE (1 << 30) /* m, n and k are below */
#define ESMM_MMA16_K 32
#define ESMM_MMA16_STAGES 4
/* Per block of rows x cols of C: dynamic shared memory for the ring, and threads. */
#define ESMM_MMA16_SHARED(rows, cols) (ESMM_MMA16_STAGES * ((rows) + (cols)) * ESMM_MMA16_K * 2)
#define ESMM_MMA16_THREADS(rows, cols) ((cols) == 256 ? 256 : 128)

typedef struct esmm_mma16_params {
  esmm_selector selector;
  int64_t m, n, k;
  uint64_t a, b; /* B [k][b_ld], zeros past n; b_ld is a multiple of ESMM_TILE */
  int64_t a_ld, b_ld;
  /* joint: A is k-major, the lines of a k a_ld apart, the strips of ESMM_TILE rows a_strip elements apart */
  int64_t a_strip, words;
  uint64_t a_bits, b_bits; /* [strips][words], [b_ld / ESMM_TILE][words]; lines of A: undefined if the bit is 0 */
  esmm_epilogue_params epilogue;
} esmm_mma16_params;
ESMM_PARAMS_SIZE(esmm_mma16_params, 256);

/* esmm_joint_mma16_extract: A's bitmaps and, where data is not 0, its alive lines. */
typedef struct esmm_mma16_extract_params {
  esmm_selector selector;
  esmm_device_matrix a; /* 16-bit */
  uint64_t data;        /* [strips][32 * words][ESMM_TILE]; rows past the matrix are 0 */
  uint64_t bits;
  int64_t words;
} esmm_mma16_extract_params;
ESMM_PARAMS_SIZE(esmm_mma16_extract_params, 80);

#define ESMM_MMA16_EXTRACT_K 64 /* k's of a block of it, */
#define ESMM_MMA16_EXTRACT_THREADS 256
#define ESMM_MMA16_WINDOW 8192 /* k's that a block of joint lists at once */
#define ESMM_MMA16_JOINT_SHARED (ESMM_MMA16_SHARED(128, 128) + 2 * ESMM_MMA16_WINDOW + 16)

/* ---- k_small.cu: products of a few microseconds ---- */

#define ESMM_SMALL_TILE 32     /* rows and columns of C of a block, */
#define ESMM_SMALL_THREADS 256 /* and its threads */
#define ESMM_SMALL_BLOCKS 2    /* at once on a multiprocessor */
#define ESMM_SMALL_CHUNK 16    /* k's that a warp takes at once */
#define ESMM_SMALL_RANKS 8     /* most blocks that share a tile's k's: a cluster */

typedef struct esmm_small_params {
  esmm_selector selector;
  esmm_device_matrix a; /* fp32; offsets in it and in B are below 2^32 */
  uint64_t b;           /* rows [k][n] */
  int32_t n;
  int32_t tiles; /* of columns */
  int32_t ranks; /* blocks that share a tile: a power of two */
  int32_t unused;
  esmm_epilogue_params epilogue;
} esmm_small_params;
ESMM_PARAMS_SIZE(esmm_small_params, 232);

/* ---- blocks.cu: a B of blocks, kept as cells of 64 columns ---- */

#define ESMM_CELL_COLS 64 /* columns of a cell; it has 32 or 64 k's */
#define ESMM_BLOCKS_THREADS 256

/* esmm_blocks_scan: which blocks of B have a nonzero. Blocks are numbered down their columns. */
typedef struct esmm_blocks_scan_params {
  esmm_device_matrix b;
  int32_t block_rows, block_cols;
  uint64_t flags; /* [block columns][block rows] bytes, 1 or 0; 0: not wanted */
  uint64_t count; /* a uint64_t that grows by their number */
} esmm_blocks_scan_params;
ESMM_PARAMS_SIZE(esmm_blocks_scan_params, 64);

/* esmm_blocks_pack: cells from B, a block each; esmm_blocks_unpack: B, which is zeros, from cells. */
typedef struct esmm_blocks_copy_params {
  esmm_device_matrix b;
  uint64_t cells; /* [cell][cell_k][64], in B's dtype; zeros past B */
  uint64_t which; /* [cells] uint2: chunk of k's, panel of columns */
  int64_t count;
  int32_t cell_k;
  int32_t unused;
} esmm_blocks_copy_params;
ESMM_PARAMS_SIZE(esmm_blocks_copy_params, 72);

/* esmm_narrow_pack: blocks of 32 k's by 32 columns from cells, in lines of 64 bytes, swizzled. */
typedef struct esmm_narrow_pack_params {
  uint64_t cells;  /* as above */
  uint64_t which;  /* [count] uint32_t: line of all cells << 1 | right half */
  uint64_t blocks; /* [count][32][32] */
  int64_t count;
} esmm_narrow_pack_params;
ESMM_PARAMS_SIZE(esmm_narrow_pack_params, 32);

/* What is known of a block that may be pruned: src/format/format.h's esmm_block_note. */
typedef struct esmm_device_note {
  uint64_t key;
  int64_t nonzero;
  double squares;
} esmm_device_note;
ESMM_PARAMS_SIZE(esmm_device_note, 24);

/* esmm_blocks_weigh: a note of every block, by block rows. esmm_blocks_drop: zeros in those that are not kept. */
typedef struct esmm_blocks_prune_params {
  esmm_device_matrix b;
  int32_t block_rows, block_cols;
  uint64_t notes; /* weigh */
  uint64_t norms; /* weigh: [k] fp32, or 0 */
  uint64_t keep;  /* drop: a byte for each block */
} esmm_blocks_prune_params;
ESMM_PARAMS_SIZE(esmm_blocks_prune_params, 72);

/*
 * A caller's esmm_bsr in device memory; lines are what the pointers run over, places what the indices count.
 * esmm_bsr_pointers, then esmm_bsr_indices: *found = ~ of the first place that is damaged, pointers before indices; it
 * stays 0 where none is. esmm_bsr_expand: the matrix, which is zeros before; what points out of the arrays or out of
 * the matrix is left out.
 */
#define ESMM_BSR_INDICES ((uint64_t)1 << 62) /* added to the number of an index */

typedef struct esmm_bsr_arrays_params {
  uint64_t pointers, indices, values;
  int64_t lines, places, blocks;
  int32_t index_bits, block_rows, block_cols;
  int32_t by_columns;    /* order is ESMM_COL_MAJOR */
  esmm_device_matrix to; /* expand: row-major */
  uint64_t found;
} esmm_bsr_arrays_params;
ESMM_PARAMS_SIZE(esmm_bsr_arrays_params, 112);

/* ---- k_bsr16_sm90a.cu, k_bsr16_narrow_sm90a.cu: 16-bit A times cells, on Hopper ---- */

#define ESMM_BSR16_COLS 128 /* of a tile of C: two panels */
#define ESMM_BSR16_ROWS 256 /* of a tile, or half as many where m is small */
#define ESMM_BSR16_PARTS 16 /* most parts that the list of a tile's columns is cut into */
#define ESMM_BSR16_STAGES 4
#define ESMM_BSR16_SHARED (ESMM_BSR16_STAGES * 49152 + 33792)
#define ESMM_BSR16_MOST_SPLIT 1024 /* counters: one for each split tile, the last gives out units */
#define ESMM_BSR16_PARTIAL(rows, cols) ((rows) * (cols)*4) /* bytes of one part's sums */

/*
 * An entry is a chunk of cell_k k's that a panel of a tile has a cell of: uint2 (chunk | panels << 28, its first cell);
 * the second panel's follows.
 * Columns of tiles come in the order of their entries, most first: uint4 (tile, first entry, entries, 0).
 */
typedef struct esmm_bsr16_params {
  esmm_tensor_map map_a;     /* boxes of cell_k k's by `rows` rows, or 64 rows by cell_k k's where A is col-major */
  esmm_tensor_map map_cells; /* all cells as lines of 64, boxes of a cell */
  esmm_tensor_map map_c;     /* boxes of 64 by 64, where c_boxes is not 0 */
  esmm_selector selector;
  int32_t m, n;
  int32_t a_by_k;  /* A is col-major */
  int32_t c_boxes; /* C is 16-bit, row-major, aligned and not read: TMA can write it */
  int32_t rows;    /* of a tile */
  int32_t cell_k;
  int32_t pairs; /* the two blocks of a cluster have neighbouring rows and the same columns */
  int32_t group; /* tile rows, or pairs, that come together */
  uint64_t columns, entries;
  uint64_t partial;                /* sums of parts, ESMM_BSR16_PARTIAL bytes each */
  uint64_t counters;               /* [ESMM_BSR16_MOST_SPLIT] uint32_t: zero, and left so */
  int32_t parts[ESMM_BSR16_PARTS]; /* parts[q]: columns that have a part q; [0]: all */
  int32_t all_parts;               /* their sum */
  int32_t unused;
  uint64_t places; /* narrow: [tiles][ESMM_NARROW_COLS] uint32_t: which 32 columns, or ESMM_NO_CELL */
  uint64_t blocks; /* narrow: all blocks, each as it lies in a stage */
  esmm_epilogue_params epilogue;
} esmm_bsr16_params;
ESMM_PARAMS_SIZE(esmm_bsr16_params, 704);

/*
 * The narrow one reads blocks of 32 k's by 32 columns, halves or quarters of cells. A tile has eight times 32 columns,
 * which need not be neighbours. An entry is what lies in a stage: up to four chunks of 32 k's that some of these have a
 * block of, and up to eight blocks. Its boxes of A are 32 k's by `rows` rows, or 64 rows by 32 k's; of C 64
 * rows of 32 columns. Its blocks lie one after the other and come without a map.
 */
#define ESMM_NARROW_SIDE 32  /* k's and columns of a block */
#define ESMM_NARROW_COLS 8   /* times 32 columns of a tile */
#define ESMM_NARROW_CHUNKS 4 /* of an entry, */
#define ESMM_NARROW_BLOCKS 8 /* and blocks; no fewer than a chunk can have */
#define ESMM_NARROW_ROWS 128 /* of a tile */
#define ESMM_NARROW_STAGES 4
#define ESMM_NARROW_SHARED (ESMM_NARROW_STAGES * 49152 + 33792 + 2048)

typedef struct esmm_narrow_entry {
  uint32_t chunk[ESMM_NARROW_CHUNKS];
  uint32_t alive;  /* bits 16 h + 4 c to 16 h + 4 c + 3: of half h's columns, which have a block of the c-th chunk */
  uint32_t counts; /* of the lower half's blocks, which come first; of all blocks << 8; of chunks << 16 */
  uint32_t block;  /* the number of its first one among all, which lie in the order of entries */
  uint32_t unused;
} esmm_narrow_entry;
ESMM_PARAMS_SIZE(esmm_narrow_entry, 32);

/* ---- k_bsr16_mma.cu: the same by mma.sync, sm_80 and later; a block has a panel of 64 columns by 64 rows ---- */

#define ESMM_BSR16_MMA_ROWS 64

typedef struct esmm_bsr16_mma_params {
  esmm_selector selector;
  int64_t m, n, k;
  uint64_t a;
  int64_t a_ld;
  uint64_t cells, places; /* places [panels][chunks]: the cell there, or ESMM_NO_CELL */
  int32_t chunks, cell_k;
  esmm_epilogue_params epilogue;
} esmm_bsr16_mma_params;
ESMM_PARAMS_SIZE(esmm_bsr16_mma_params, 232);
#define ESMM_NO_CELL 0xffffffffu

/* ---- k_bsr16_decode.cu: at most 16 rows ---- */

#define ESMM_BSR16_DECODE_ROWS 16
#define ESMM_BSR16_DECODE_THREADS 256
#define ESMM_BSR16_DECODE_RANKS 8 /* most blocks that share a panel's cells: a cluster */
#define ESMM_BSR16_DECODE_SHARED(tiles) (8192 + 64 + (tiles)*8 * 8 * 68 * 4) /* bytes, for 8 rows a tile */

typedef struct esmm_bsr16_decode_params {
  esmm_selector selector;
  esmm_device_matrix a;
  uint64_t cells, places;
  int32_t chunks, cell_k;
  int32_t vector; /* A is row-major, its rows begin at multiples of 8 bytes */
  int32_t unused;
  esmm_epilogue_params epilogue;
} esmm_bsr16_decode_params;
ESMM_PARAMS_SIZE(esmm_bsr16_decode_params, 240);

/* ---- ops/nm.cu: N:M on the device ---- */

#define ESMM_NM_THREADS 256

/* What esmm_nm_prune did; a block's own, or all of them added up. */
typedef struct esmm_nm_tally {
  int64_t kept, dropped;
  double squares, squares_dropped;
} esmm_nm_tally;
ESMM_PARAMS_SIZE(esmm_nm_tally, 32);

/*
 * esmm_nm_check: *out = ~ of the least of ((group * strips + strip) * 64 + its nonzeros) over the groups that have too
 * many; it stays 0 where there are none.
 * esmm_nm_prune, esmm_nm_prune_4: b in place, a tally for each block to out; the latter for groups of 4 k's of a column
 * each, of a row-major 16-bit B with rows of a multiple of 8 elements, at multiples of 16 bytes.
 * Blocks lie along what neighbours in memory (x: strips where B is row-major, else groups) and along the other (y).
 */
typedef struct esmm_nm_params {
  esmm_device_matrix b;
  int32_t keep, group;
  int64_t group_cols;
  int64_t strips, groups; /* of group_cols columns, of `group` k's */
  uint64_t out;
  uint64_t norms; /* prune: [k] fp32, or 0 */
} esmm_nm_params;
ESMM_PARAMS_SIZE(esmm_nm_params, 88);

/* esmm_nm_add: *to = the sum of the tallies, in their order. */
typedef struct esmm_nm_add_params {
  uint64_t from, to; /* esmm_nm_tally */
  int64_t count;
} esmm_nm_add_params;
ESMM_PARAMS_SIZE(esmm_nm_add_params, 24);

/* ---- k_nm16_sm90a.cu: 2:4 weights on Hopper ---- */

#define ESMM_NM16_MOST_SIDE (1 << 30)
#define ESMM_NM16_TALL 256 /* rows of a tile of the persistent kernel; its blocks work in pairs */
#define ESMM_NM16_CLUSTER 2
#define ESMM_NM16_TALL_THREADS 384
#define ESMM_NM16_TALL_STAGES 5
#define ESMM_NM16_STAGING 8704 /* bytes of a warpgroup, through which its sums go to C */
#define ESMM_NM16_TALL_SHARED (ESMM_NM16_TALL_STAGES * (32768 + 9216) + 2 * ESMM_NM16_STAGING + 128)

/* Tiles of 16 to 128 rows: the blocks of a cluster share k. */
#define ESMM_NM16_LOW 128 /* most rows */
#define ESMM_NM16_LOW_THREADS 288
#define ESMM_NM16_RANKS 8
#define ESMM_NM16_LOW_STAGES(rows) ((rows) == 16 ? 9 : (rows) == 64 ? 6 : 8)
#define ESMM_NM16_LOW_SHARED(rows) (ESMM_NM16_LOW_STAGES(rows) * ((rows)*128 + 9216 + 16))

typedef struct esmm_nm16_params {
  esmm_tensor_map map_a; /* boxes of 64 by 64; k's or rows are contiguous */
  esmm_selector selector;
  uint64_t b;        /* the form nm16 */
  int32_t m, n;      /* of C */
  int32_t blocks;    /* of 64 k's */
  int32_t group;     /* pairs of column tiles that come together */
  int32_t registers; /* nothing but scaling, bias and activation follows the sums, and C takes 16-byte stores of 16-bit
                        elements: they are finished in registers where a tile lies inside C */
  int32_t unused;
  esmm_epilogue_params epilogue;
} esmm_nm16_params;
ESMM_PARAMS_SIZE(esmm_nm16_params, (176 + sizeof(esmm_epilogue_params) + 63) / 64 * 64);

/* ---- k_half16_sm90a.cu: an A with few nonzeros anywhere, as halves of 2:4, on Hopper ---- */

#define ESMM_HALF16_MOST_SIDE (1 << 23)
#define ESMM_HALF16_ROWS 256  /* of a pair of blocks, and of a patch of A: by 64 k's */
#define ESMM_HALF16_COLS 256  /* of a tile of C; it has half of those rows */
#define ESMM_HALF16_CLUSTER 2 /* blocks of a pair */
#define ESMM_HALF16_FEW 96    /* overflowing elements that a patch may have; with more its second half is multiplied */
#define ESMM_HALF16_SPLIT 512 /* threads of a block that splits a patch */
#define ESMM_HALF16_LISTED 32 /* rows of a block that lists overflow, */
#define ESMM_HALF16_LISTING 1024 /* and its threads */
#define ESMM_HALF16_THREADS 384
#define ESMM_HALF16_STAGES 5
#define ESMM_HALF16_STAGE (32768 + 9216) /* bytes: 256 columns of B, a strip of a half, 64 k's each */
#define ESMM_HALF16_SHARED (ESMM_HALF16_STAGES * ESMM_HALF16_STAGE + 128)

/*
 * Parameters of all its launches: esmm_half16_split, esmm_half16_list, esmm_half16_<dtype>. Blocks are of 64 k's; a
 * pair is 256 rows, a strip 128.
 */
typedef struct esmm_half16_params {
  esmm_tensor_map map_b; /* boxes of 64 columns by 64 k's */
  esmm_selector selector;
  uint64_t a; /* row-major, 16 bits, lines of 16 bytes */
  int64_t a_ld;
  int32_t m, n, k;
  int32_t blocks;    /* along k */
  int32_t pairs;     /* along m */
  int32_t group;     /* of pairs, that come together */
  int32_t registers; /* as in esmm_nm16_params */
  int32_t unused;
  uint64_t half[2];  /* two of each four k's of A, and the other two of patches that have much: [strips][blocks] as in
                        nm_layout.h, rows for columns */
  uint64_t many;     /* [pairs][blocks] uint8_t: that patch has a second half */
  uint64_t overflow; /* [pairs][blocks][ESMM_HALF16_FEW] uint32_t: k within the block << 16 | value */
  uint64_t at;       /* [pairs][blocks][ESMM_HALF16_ROWS] uint16_t: a row's first among them | how many << 8 */
  uint64_t lists;    /* [8 * pairs][blocks * ESMM_HALF16_FEW] uint2: k, value; of 32 rows, one after the other */
  uint64_t rows;     /* [256 * pairs] int2: where in those a row's list begins, how many it has */
  uint64_t again;    /* [pairs][blocks] uint32_t: blocks with a second half, */
  uint64_t agains;   /* [pairs] int32_t: how many */
  uint64_t b;        /* rows [k][b_ld] */
  int64_t b_ld;      /* elements, a multiple of 128 */
  esmm_epilogue_params epilogue;
} esmm_half16_params;
ESMM_PARAMS_SIZE(esmm_half16_params, 448);

#endif
