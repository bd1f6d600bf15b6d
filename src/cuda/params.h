/*
 * params.h: what kernels are told. Included by host code (C11) and by device code (nvcc), so plain structs only, and
 * their sizes are asserted on both sides. Each kernel takes one of these by value.
 *
 * Pointers are device addresses. Elements are fp32 unless a dtype says otherwise; dtype and order are esmm_dtype and
 * esmm_order as int32_t.
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

/* A kernel whose gate is not 0 returns at once unless *gate == gate_is: the device has chosen another one. */
typedef struct esmm_gate {
  uint64_t address; /* of a uint32_t; 0: no gate */
  uint32_t is;
  uint32_t unused;
} esmm_gate;
ESMM_PARAMS_SIZE(esmm_gate, 16);

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
 * Segments data[strip][k] whose bit is 0 hold anything: nobody reads them.
 */
typedef struct esmm_strips {
  uint64_t data, bits;
  int64_t strips, k_padded;
} esmm_strips;
ESMM_PARAMS_SIZE(esmm_strips, 32);

/* C = activation(alpha * sum + beta * C + bias), as in epilogue.h. */
typedef struct esmm_epilogue_params {
  esmm_device_matrix c;
  uint64_t bias; /* [n] fp32, or 0 */
  float alpha, beta;
  int32_t activation;
  int32_t unused;
} esmm_epilogue_params;
ESMM_PARAMS_SIZE(esmm_epilogue_params, 64);

/* ---- extract.cu ---- */

#define ESMM_EXTRACT_CHUNK 128   /* k's of a block of esmm_extract, */
#define ESMM_EXTRACT_THREADS 256 /* and the threads of all kernels there but the sample */

/* esmm_extract: bitmaps of A's strips and, where strips.data is not 0, their alive segments (all with write_all). */
typedef struct esmm_extract_params {
  esmm_gate gate;
  esmm_device_matrix a; /* B transposed, for B */
  esmm_strips strips;
  int32_t write_all;
  int32_t unused;
} esmm_extract_params;
ESMM_PARAMS_SIZE(esmm_extract_params, 96);

/* esmm_pack_rows: any matrix to fp32, row-major, k padded with zeros. */
typedef struct esmm_pack_params {
  esmm_gate gate;
  esmm_device_matrix a;
  uint64_t out; /* [rows][ld] */
  int64_t ld;
} esmm_pack_params;
ESMM_PARAMS_SIZE(esmm_pack_params, 72);

/* What the device measured of A, and what it chose. */
typedef struct esmm_choice_device {
  uint32_t chosen;             /* 0: the first kernel of the pair, 1: the second */
  float element, strip, joint; /* densities of A's sample: elements, strips of 32, joint with B */
} esmm_choice_device;
ESMM_PARAMS_SIZE(esmm_choice_device, 16);

#define ESMM_SAMPLES 64
#define ESMM_SAMPLE_NOTES (16 + 16 * ESMM_SAMPLES) /* bytes of notes; zero before the first use, then left ready */

/* esmm_sample: samples A, writes an esmm_choice_device: 1 (the skipping kernel) where base + per_strip * strip +
 * per_joint * joint < dense. */
typedef struct esmm_sample_params {
  esmm_device_matrix a;
  uint64_t alive; /* [k] share of B's strips that need k */
  uint64_t out;   /* esmm_choice_device */
  uint64_t notes; /* where the blocks meet */
  float dense, base, per_strip, per_joint;
} esmm_sample_params;
ESMM_PARAMS_SIZE(esmm_sample_params, 80);

/* esmm_count_joint: *out = joint bits over all pairs of strips; esmm_alive: out[k] = share of strips with bit k. */
typedef struct esmm_count_params {
  uint64_t a_bits, b_bits;
  int64_t a_strips, b_strips, words, k;
  uint64_t out;
} esmm_count_params;
ESMM_PARAMS_SIZE(esmm_count_params, 56);

/* esmm_epilogue_only: C where there is nothing to sum. */
typedef struct esmm_finish_params {
  esmm_epilogue_params epilogue;
} esmm_finish_params;
ESMM_PARAMS_SIZE(esmm_finish_params, 64);

/* esmm_convert: dst = src, elementwise, any dtype and order. */
typedef struct esmm_convert_params {
  esmm_device_matrix src, dst;
} esmm_convert_params;
ESMM_PARAMS_SIZE(esmm_convert_params, 80);

/* ---- products ---- */

/* Kernels that read both operands as strips: joint_f32, joint_f32_simt, dense_f32_mma. */
typedef struct esmm_strips_product_params {
  esmm_gate gate;
  int64_t m, n, k;
  esmm_strips a, b;
  esmm_epilogue_params epilogue;
  uint64_t bank; /* joint_f32_simt: sums of earlier windows of k, 64 KiB a tile; 0 where one window is all */
} esmm_strips_product_params;
ESMM_PARAMS_SIZE(esmm_strips_product_params, 176);

#define ESMM_SIMT_TILE 128    /* rows and columns of a block of joint_f32_simt and of the ladder, */
#define ESMM_SIMT_THREADS 256 /* and its threads */
#define ESMM_SIMT_WINDOW 4096 /* k's that joint_f32_simt sums in one chain */

/*
 * The ladder reads A as the caller has it, with bitmaps of its own strip heights.
 *   a_bits [ceil(m / height)][words], b_bits8 [4 * b.strips][words]: words = b.k_padded / 32, bits as in esmm_strips
 */
typedef struct esmm_ladder_params {
  esmm_gate gate;
  int64_t m, n, k;
  esmm_device_matrix a;
  esmm_strips b;
  uint64_t a_bits;  /* 0 where A is not scanned */
  uint64_t b_bits8; /* of strips of 8 columns; 0 where those of 32 are used */
  esmm_epilogue_params epilogue;
} esmm_ladder_params;
ESMM_PARAMS_SIZE(esmm_ladder_params, 192);

/* Dynamic shared memory of the kernels of plain multiply-adds, bytes. */
#define ESMM_LADDER_SHARED 68224
#define ESMM_SIMT_SHARED(stages) (32768 * (stages) + 16384)

/* strips_mma.cuh, which joint_f32 and dense_f32_mma are made of: 96 x 128 of C a block; shared memory for its ring. */
#define ESMM_STRIPS_MMA_ROWS 96
#define ESMM_STRIPS_MMA_COLS 128
#define ESMM_STRIPS_MMA_THREADS 512
#define ESMM_STRIPS_MMA_CHUNK_90 32 /* k's of a stage on sm_90 */
#define ESMM_STRIPS_MMA_CHUNK 24    /* elsewhere */
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
  esmm_gate gate;
  int64_t m, n, k;
  uint64_t a, b; /* the same matrices, for the sums that are made again */
  int64_t a_ld, b_ld;
  esmm_epilogue_params epilogue;
  uint64_t unused[3];
} esmm_dense_params;
ESMM_PARAMS_SIZE(esmm_dense_params, 448);

/* Rows of a block, and its dynamic shared memory (1 KiB for the barriers). */
#define ESMM_DENSE_SHARED_256 (3 * 65536 + 1024)
#define ESMM_DENSE_SHARED_128 (4 * 49152 + 1024)
#define ESMM_DENSE_THREADS 384
#define ESMM_DENSE_K 32     /* k's of a stage, and of a box of the tensor maps */
#define ESMM_DENSE_ROWS 128 /* rows of a box of A */
#define ESMM_DENSE_COLS 128 /* columns of a block, and of a box of B */

/* ---- count.cu ---- */

/* esmm_count_nonzero: *out, a uint64_t, grows by the number of elements of m that are not zero. */
typedef struct esmm_nonzero_params {
  esmm_device_matrix m;
  uint64_t out;
} esmm_nonzero_params;
ESMM_PARAMS_SIZE(esmm_nonzero_params, 48);

#endif
