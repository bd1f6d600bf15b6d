/*
 * cuda.h: the CUDA backend as its own files see it.
 *
 * backend.c   the table of backend.h
 * costs.h     what predictions are made of
 * params.h    parameters of kernels on the device
 * device/     libcuda (driver.c), a context's GPU (device.c), embedded fatbins and launches (module.c), copies
 *             (copy.c), memory where the blocks of a launch meet (meeting.c)
 * ops/        bitmaps, strips and samples of A (extract), B once (prepare, forms), bitmaps for callers (pattern)
 * product/    one product: plan, stage, launch, statistics
 * ffn/        what a layer does between its products
 * kernels/    by family, one kernel a pair of files: k_*.c with the descriptor, k_*.cu
 *
 * Every function that can fail returns esmm_status and has set the context's error text.
 */
#ifndef ESMM_CUDA_CUDA_H
#define ESMM_CUDA_CUDA_H

#include "choose/recall.h"
#include "choose/tune.h"
#include "cuda/costs.h"
#include "cuda/device/driver.h"
#include "cuda/params.h"

#include <string.h>

extern const esmm_backend esmm_cuda_backend; /* backend.c */

/* ---- device.c ---- */

/* How many GPUs the driver shows. Fails with ESMM_ERR_DRIVER or ESMM_ERR_DEVICE and the reason where there are none. */
esmm_status esmm_cuda_count(esmm_ctx *ctx, int *count);
/* Opens device `ordinal` for ctx and sets state, device, device_name, features. */
esmm_status esmm_cuda_open(esmm_ctx *ctx, int ordinal);
void esmm_cuda_close(esmm_ctx *ctx); /* waits for the context's work */

/* Properties that kernels need. */
typedef struct esmm_cuda_properties {
  int ordinal;
  int sm;               /* 90 for compute capability 9.0 */
  int multiprocessors;  /* 132 */
  int shared_per_block; /* bytes a block may have, opted in */
  int shared_per_sm;
  int cooperative; /* cooperative launches */
  int max_pitch;   /* most bytes between the lines of a 2-D copy */
} esmm_cuda_properties;
const esmm_cuda_properties *esmm_cuda_get(const esmm_ctx *ctx);
static inline int64_t esmm_cuda_sms(const esmm_problem *p) /* multiprocessors of the GPU that multiplies */
{
  return esmm_cuda_get(p->ctx)->multiprocessors;
}

/*
 * One call of the public interface that puts work on a stream: begin, work, end. begin makes the stream wait for the
 * context's earlier work on another stream (scratch is shared), and notes whether the stream is being captured into a
 * graph. end notes how far the context's work has come; call it whenever begin succeeded, with the status so far: it
 * returns that, or after ESMM_OK its own failure. Between them the primary context is current.
 */
esmm_status esmm_cuda_begin(esmm_ctx *ctx, CUstream stream);
esmm_status esmm_cuda_end(esmm_ctx *ctx, CUstream stream, esmm_status status);
bool esmm_cuda_capturing(const esmm_ctx *ctx); /* between begin and end: the stream is being captured */
/* For calls that cannot be part of a graph: fails during a capture, naming `what` ("weights"). */
esmm_status esmm_cuda_refuse_capture(esmm_ctx *ctx, const char *what);
bool esmm_cuda_lost(const esmm_ctx *ctx); /* a sticky error: nothing on this device works any more */
/* Waits for all work of the context that was put between begin and end. */
esmm_status esmm_cuda_synchronize(esmm_ctx *ctx);

/* Makes the device's primary context current for this thread, for callers of another CUDA library (cuBLAS); leave
   restores what was current. Everything declared here does that by itself. */
typedef struct esmm_cuda_scope {
  bool pushed;
} esmm_cuda_scope;
esmm_status esmm_cuda_enter(esmm_ctx *ctx, esmm_cuda_scope *scope);
void esmm_cuda_leave(esmm_cuda_scope scope);

/* Something a kernel's file keeps with the context (a cuBLAS handle): one per key, an address in that file. When the
   context closes, `release` gets it with the primary context current. attached gives NULL where there is none. */
void *esmm_cuda_attached(const esmm_ctx *ctx, const void *key);
esmm_status esmm_cuda_attach(esmm_ctx *ctx, const void *key, void *object, void (*release)(void *object));

/* Device memory that lives as long as its owner (weights); not for the hot path. It keeps the device open, also without
   its context: then free_at frees it. Both free functions wait for all work of the device and accept 0. */
esmm_status esmm_cuda_alloc(esmm_ctx *ctx, size_t bytes, CUdeviceptr *out);
void esmm_cuda_free(esmm_ctx *ctx, CUdeviceptr ptr);
void esmm_cuda_free_at(int ordinal, CUdeviceptr ptr);
/* Host memory that kernels write to, too; false if there is none, which is no error. The primary context is current.
   The owner holds device memory as well, so it is freed before the device. */
bool esmm_cuda_pin(size_t bytes, void **host, CUdeviceptr *device);
void esmm_cuda_unpin_at(int ordinal, void *host);
/* The context's device scratch: grows in the stream's order, never shrinks. Valid until the next call. */
esmm_status esmm_cuda_scratch(esmm_ctx *ctx, size_t bytes, CUstream stream, CUdeviceptr *out);
/* Copies between host and device: they wait, and are refused while the stream is being captured. */
esmm_status esmm_cuda_to_device(esmm_ctx *ctx, CUdeviceptr dst, const void *src, size_t bytes, CUstream stream);
esmm_status esmm_cuda_to_host(esmm_ctx *ctx, void *dst, CUdeviceptr src, size_t bytes, CUstream stream);
/* `rows` runs of `bytes` bytes each, `pitch` bytes apart. */
esmm_status esmm_cuda_to_device_2d(esmm_ctx *ctx, CUdeviceptr dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                   size_t bytes, size_t rows, CUstream stream);
esmm_status esmm_cuda_to_host_2d(esmm_ctx *ctx, void *dst, size_t dst_pitch, CUdeviceptr src, size_t src_pitch,
                                 size_t bytes, size_t rows, CUstream stream);
esmm_status esmm_cuda_zero(esmm_ctx *ctx, CUdeviceptr dst, size_t bytes, CUstream stream);

/* Host memory that the device writes to; free_at without a context, while the device is held. */

/* Points in a stream's time. free accepts NULL; seconds waits for `to`. */
esmm_status esmm_cuda_event_create(esmm_ctx *ctx, CUevent *out);
void esmm_cuda_event_free(esmm_ctx *ctx, CUevent event);
void esmm_cuda_event_free_at(int ordinal, CUevent event);       /* without a context, while the device is held */
esmm_status esmm_cuda_event_wait(esmm_ctx *ctx, CUevent event); /* the host does */
esmm_status esmm_cuda_event_record(esmm_ctx *ctx, CUevent event, CUstream stream);
esmm_status esmm_cuda_event_seconds(esmm_ctx *ctx, CUevent from, CUevent to, double *seconds);

/* What esmm_timer is on a GPU. */
typedef struct esmm_cuda_timer {
  CUevent start, stop;
} esmm_cuda_timer;
esmm_status esmm_cuda_timer_create(esmm_ctx *ctx, esmm_cuda_timer *timer);
void esmm_cuda_timer_free(esmm_ctx *ctx, esmm_cuda_timer *timer);
esmm_status esmm_cuda_timer_start(esmm_ctx *ctx, esmm_cuda_timer *timer, CUstream stream);
esmm_status esmm_cuda_timer_stop(esmm_ctx *ctx, esmm_cuda_timer *timer, CUstream stream);
esmm_status esmm_cuda_timer_seconds(esmm_ctx *ctx, esmm_cuda_timer *timer, double *seconds); /* waits for the stop */

/* ---- module.c ---- */

/* A fatbin that the build embedded: <name>.cu, anywhere in src/cuda, becomes esmm_fatbin_<name>. */
typedef struct esmm_fatbin {
  const char *name;
  const unsigned char *image, *end; /* equal when the build had no nvcc */
} esmm_fatbin;
#define ESMM_FATBIN(id)                                                    \
  extern const unsigned char esmm_fatbin_##id[], esmm_fatbin_##id##_end[]; \
  static const esmm_fatbin fatbin_##id = {#id, esmm_fatbin_##id, esmm_fatbin_##id##_end}

/* A function of a fatbin. Static const in the file that launches it: its address is the key under which it is kept. */
typedef struct esmm_cuda_function {
  const esmm_fatbin *fatbin;
  const char *name; /* the extern "C" __global__ */
  unsigned shared;  /* most bytes of dynamic shared memory it is launched with */
} esmm_cuda_function;

typedef struct esmm_launch {
  unsigned grid_x, grid_y, grid_z; /* 0 means 1 */
  unsigned threads;                /* of a block, one-dimensional */
  unsigned shared;                 /* dynamic shared memory, bytes */
  int cooperative;                 /* all blocks resident: a grid barrier is allowed */
  unsigned cluster;                /* blocks of a cluster along x, which divide grid_x (sm_90); 0: no clusters */
} esmm_launch;

/* params: the kernel's one parameter. Loads the module on first use. */
esmm_status esmm_cuda_launch(esmm_ctx *ctx, const esmm_cuda_function *function, const esmm_launch *launch,
                             CUstream stream, const void *params);
/* The same for blocks along x, with the shared memory that the function says. */
static inline esmm_status esmm_cuda_launch_blocks(esmm_ctx *ctx, const esmm_cuda_function *function, int64_t blocks,
                                                  unsigned threads, CUstream stream, const void *params)
{
  const esmm_launch launch = {.grid_x = (unsigned)blocks, .threads = threads, .shared = function->shared};
  return esmm_cuda_launch(ctx, function, &launch, stream, params);
}
/* Blocks for that many pieces of work, a few per multiprocessor; each takes what is left. */
static inline unsigned esmm_cuda_blocks_for(const esmm_ctx *ctx, int64_t pieces)
{
  return (unsigned)esmm_max(1, esmm_min(pieces, 16 * (int64_t)esmm_cuda_get(ctx)->multiprocessors));
}
/* Occupancy: blocks of that size that fit on one multiprocessor at once. */
esmm_status esmm_cuda_occupancy(esmm_ctx *ctx, const esmm_cuda_function *function, unsigned threads, unsigned shared,
                                int *blocks);

/* A 2-D fp32 tensor map for TMA (sm_90): inner is contiguous; box in elements; 128-byte swizzle, zeros outside. */
esmm_status esmm_cuda_tensor_map(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                 unsigned box_inner, unsigned box_outer, esmm_tensor_map *out);

/* The same for 16-bit elements, in boxes of 64 by 64; and in boxes of 32 or 64 by any: as wide as a box is the swizzle,
   64 or 128 bytes. */
esmm_status esmm_cuda_tensor_map_16(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                    esmm_tensor_map *out);
esmm_status esmm_cuda_tensor_map_boxes_16(esmm_ctx *ctx, CUdeviceptr data, int64_t inner, int64_t outer, int64_t ld,
                                          unsigned box_inner, unsigned box_outer, esmm_tensor_map *out);

/* ---- meeting.c ---- */

/* Memory of the context where the blocks of a launch meet: zero at first; each user leaves it ready for the next.
 */
typedef enum esmm_cuda_meeting_point {
  ESMM_MEETING_SAMPLE,
  ESMM_MEETING_WGMMA16,
  ESMM_MEETING_BSR16
} esmm_cuda_meeting_point;
esmm_status esmm_cuda_meeting(esmm_ctx *ctx, esmm_cuda_meeting_point point, CUstream stream, CUdeviceptr *memory);

/* ---- one product ---- */

/*
 * Units of work (esmm_kernel.terms) as a line in A's densities: base + per_strip * strip + per_joint * joint, each.
 * at_most: this times strip bounds that term's base + per_strip * strip, which matters at low densities; 0: no bound.
 * per_overflow: adds this times the share of A that overflows 2:4 (esmm_sample.overflow), most_overflow at most, and
 * most_overflow where that share is unknown. Only the host uses at_most and per_overflow; the device chooses by the
 * line with most_overflow.
 */
typedef struct esmm_cuda_units {
  double base[ESMM_COST_TERMS], per_strip[ESMM_COST_TERMS], per_joint[ESMM_COST_TERMS], at_most[ESMM_COST_TERMS];
  double per_overflow[ESMM_COST_TERMS], most_overflow[ESMM_COST_TERMS];
} esmm_cuda_units;

/* What only a GPU's kernel has to say of itself: esmm_kernel.device. */
typedef struct esmm_cuda_kernel {
  int sm;        /* the least compute capability, 80 or 90 */
  bool exact;    /* built for that one only (sm_90a) */
  bool steady;   /* its cost model is right to a few per cent */
  bool stand_in; /* for kernels of sm_90a where those cannot run; elsewhere it does not replace a library */
  bool reports;  /* its launch writes A's densities at its strips to the call's report, and `ready` last: kernels that
                    see all of A anyway */
  bool (*tallies)(const esmm_problem *p); /* its launch notes what p wants of C; NULL or false: a later pass does */
  bool (*clears)(const esmm_problem *p);  /* alone it clears its notes first; NULL or false: a launch before does */
  bool gates;                             /* it can make both branches of a gated product in one launch: p->gate */
  bool library; /* its launches are a library's and ignore selectors: it runs only if the host chooses */
  /* Its cost model: a dense kernel's time does not depend on A; a skipping one's is a line in the strip and joint
     density of A at its strips (of 128 rows if it reads 16-bit rows, else of 32). base of the last term is set to 1. */
  void (*line)(const esmm_kernel *self, const esmm_problem *p, const double *cost, esmm_cuda_units *units,
               int64_t *variant);
  int strip_rows; /* 0, or the rows of its strips, if lower; the plan derives their density, for the line, from those of
                     elements and taller strips */
  double knee, past_knee; /* above the strip density `knee` it takes past_knee times the line; 0: no knee */
  /* May be NULL: called before run() of the chosen kernel, to get a library's handle only when needed. False: there is
     none, can_run() says so from now on, and the plan chooses another. */
  bool (*start)(esmm_ctx *ctx);

  /* A skipping kernel that can choose on the device, and do the work of a dense one, its partner, in its own launch;
     else all NULL. */
  const char *partner;
  bool (*can_choose)(const esmm_problem *p); /* false where A is too small to be sampled so */
  /* Samples A and chooses as that launch would; writes an esmm_choice_device to the call's report. For explain. */
  esmm_status (*look)(const esmm_kernel *self, esmm_ctx *ctx, const esmm_problem *p, void *scratch);
} esmm_cuda_kernel;

static inline const esmm_cuda_kernel *esmm_cuda_about(const esmm_kernel *kernel)
{
  return kernel->device;
}

/* What the line of a kernel is multiplied with at a strip density. */
static inline double esmm_cuda_past_knee(const esmm_cuda_kernel *about, double strip)
{
  return about->knee > 0.0 && strip > about->knee ? about->past_knee : 1.0;
}

/* Descriptor functions that all share: terms from the line at p->sample, and seconds to make fp32 strips of a 16-bit B
   for kernels that read those. */
void esmm_cuda_terms(const esmm_kernel *self, const esmm_problem *p, const double *cost, double *units,
                     int64_t *variant);
double esmm_cuda_seconds_before(const esmm_kernel *self, const esmm_problem *p);

/* Skipping pays where base + per_strip * strip + per_joint * joint < dense. */
typedef struct esmm_cuda_line {
  float dense, base, per_strip, per_joint;
} esmm_cuda_line;

/* What run() of a CUDA kernel gets beside the problem: esmm_problem.call. */
typedef struct esmm_cuda_call {
  CUstream stream;
  esmm_selector selector; /* goes into every launch that takes one */
  CUevent extracted;      /* NULL, or to be recorded between extraction and multiplication (esmm_cuda_mark_extracted) */
  esmm_strips *a_strips;  /* NULL, or where a skipping kernel notes the strips of A that it extracted: statistics count
                             joint bits from them. strips = 0: it has none */
  esmm_strips b;          /* B's strips with their data, for kernels that read those */
  bool *all_of_b;         /* NULL, or to be set if A's alive k's were multiplied with all of B: the joint is A's */
  CUdeviceptr
      report; /* 0, or an esmm_choice_device, for kernels that extract in their one launch or choose themselves */
  CUdeviceptr gate_report;      /* the same for the gate's product, if the launch makes both branches */
  const esmm_cuda_line *choose; /* NULL, or: choose between this kernel and its partner on the device */
} esmm_cuda_call;

static inline const esmm_cuda_call *esmm_cuda_call_of(const esmm_problem *p)
{
  return p->call;
}
esmm_status esmm_cuda_mark_extracted(esmm_ctx *ctx, const esmm_problem *p);

/* product/matmul.c: as backend.h says; operands may lie in host memory */
esmm_status esmm_cuda_multiply(esmm_ctx *ctx, esmm_problem *p, const char *force, bool want_stats, esmm_stats *s);
esmm_status esmm_cuda_multiply_nothing(esmm_ctx *ctx, esmm_problem *p, bool want_stats, esmm_stats *s);
esmm_status esmm_cuda_explain(esmm_ctx *ctx, esmm_problem *p, const char *force, esmm_choice *choices, int *chosen);

/* product/recall.c */
void esmm_cuda_settle_reports(esmm_ctx *ctx, esmm_seen *seen);

/* tune.c */
extern const esmm_trial esmm_cuda_trials[];
esmm_status esmm_cuda_tune_sample(esmm_ctx *ctx, esmm_problem *p);
esmm_status esmm_cuda_tune_measure(esmm_ctx *ctx, const esmm_kernel *kernel, const esmm_tune_job *job, esmm_problem *p,
                                   double *seconds);

/* ---- extract.c ---- */

esmm_device_matrix esmm_cuda_matrix(const esmm_matrix *m);      /* m lies on the device */
esmm_epilogue_params esmm_cuda_epilogue(const esmm_problem *p); /* all operands lie on the device */
int64_t esmm_cuda_k_padded(int64_t k);
/* Bytes of the bitmaps and segments of `rows` rows; SIZE_MAX on overflow. */
size_t esmm_cuda_strips_bytes(int64_t rows, int64_t k);
/* Lays strips out in memory of that size. */
esmm_strips esmm_cuda_strips_at(CUdeviceptr at, int64_t rows, int64_t k);
/* Fills them from a device matrix [rows, k], in one pass. write_all: segments without a nonzero too, for kernels that
   do not skip, and for B. */
esmm_status esmm_cuda_extract(esmm_ctx *ctx, const esmm_matrix *a, const esmm_strips *out, bool write_all,
                              esmm_selector selector, CUstream stream);
esmm_status esmm_cuda_pack_rows(esmm_ctx *ctx, const esmm_matrix *a, CUdeviceptr out, int64_t ld,
                                esmm_selector selector, CUstream stream);
esmm_status esmm_cuda_sample(esmm_ctx *ctx, const esmm_sample_params *params, CUstream stream); /* sets notes itself */
esmm_status esmm_cuda_count_joint(esmm_ctx *ctx, const esmm_count_params *params, CUstream stream); /* out: uint64_t */
/* p's C from sums that are there, fp32 in C's order, or from none (NULL): the epilogue alone. Notes nothing of C. */
esmm_status esmm_cuda_finish(esmm_ctx *ctx, const esmm_problem *p, const esmm_matrix *sums, CUstream stream);
/* Sets the counts and bitmaps that p wants to 0, and the sums behind those: kernels add to them. */
esmm_status esmm_cuda_tally_begin(esmm_ctx *ctx, const esmm_problem *p, CUstream stream);
/* Adds what p wants noted of C, from C as it is stored, if the kernel has not. */
esmm_status esmm_cuda_tally(esmm_ctx *ctx, const esmm_problem *p, esmm_selector selector, CUstream stream);
/* Adds up a pattern's bits; the sums behind them are 0. */
esmm_status esmm_cuda_tally_count(esmm_ctx *ctx, const esmm_tally_count_params *params, CUstream stream);
esmm_status esmm_cuda_convert(esmm_ctx *ctx, const esmm_matrix *src, const esmm_matrix *dst, esmm_selector selector,
                              CUstream stream);

/*
 * `work` times the share of k's that a block of C has to list and load: those alive in any of its `rows` strips of A
 * and in any of its `cols` strips of B. A's part is a straight line, all that the device evaluates; it is right to a
 * sixth where skipping and dense kernels are level. Where few are alive, at_most is closer.
 */
void esmm_cuda_union(const esmm_problem *p, int rows, int cols, double work, int term, esmm_cuda_units *units);

/* ---- copy.c ---- */

/* A device address as the pointer that matrices and kernels carry it in. */
static inline void *esmm_cuda_pointer(CUdeviceptr address)
{
  const uintptr_t value = (uintptr_t)address;
  void *pointer;
  memcpy(&pointer, &value, sizeof pointer);
  return pointer;
}

CUdeviceptr esmm_cuda_address(const esmm_matrix *m); /* of a matrix on the GPU */

/* Its lines start at multiples of 16 bytes: what wide loads and TMA ask for. */
static inline bool esmm_cuda_in_lines(const esmm_matrix *m)
{
  return esmm_cuda_address(m) % 16 == 0 && m->ld % (16 / (int64_t)esmm_dtype_size(m->dtype)) == 0;
}

/* Room for `bytes` in one allocation, at a multiple of align; false on overflow. */
static inline bool esmm_cuda_reserve(size_t *total, size_t bytes, size_t align, size_t *at)
{
  *at = *total;
  return bytes <= SIZE_MAX - (align - 1) && esmm_size_add(*total, (bytes + align - 1) / align * align, total);
}

size_t esmm_cuda_tight_bytes(const esmm_matrix *m); /* of its elements, without padding */
/* The same matrix without padding, at data. */
esmm_matrix esmm_cuda_tight(const esmm_matrix *m, esmm_place place, void *data);
/* Between host and device, of equal shape, dtype and order: elements, not padding. They wait. */
esmm_status esmm_cuda_upload(esmm_ctx *ctx, const esmm_matrix *host, const esmm_matrix *device, CUstream stream);
esmm_status esmm_cuda_download(esmm_ctx *ctx, const esmm_matrix *device, const esmm_matrix *host, CUstream stream);
/* esmm_matrix_copy, on the context's stream. Waits where one lies in host memory;
   from device to device it does not. */
esmm_status esmm_cuda_matrix_copy(esmm_ctx *ctx, const esmm_matrix *src, esmm_matrix *dst);

/* ---- pattern.c ---- */

/* esmm_pattern_extract of a checked matrix on the GPU; waits, and gives one in host memory. */
esmm_status esmm_cuda_pattern(esmm_ctx *ctx, const esmm_matrix *a, int64_t strip_rows, esmm_pattern **pattern);
/*
 * Patterns of C, which stay on the GPU. place gives an empty one its memory; placed notes that
 * the stream has come behind what fills it. Both between begin and end, and not while the stream is captured.
 */
esmm_status esmm_cuda_pattern_place(esmm_ctx *ctx, esmm_pattern *pattern);
esmm_status esmm_cuda_pattern_placed(esmm_ctx *ctx, const esmm_pattern *pattern, CUstream stream);
CUdeviceptr esmm_cuda_pattern_address(const esmm_pattern *pattern); /* of its bits: [strips][words] uint64_t */
/* 32-bit words from its bits on that are 0 before it is filled. */
int64_t esmm_cuda_pattern_zeros(const esmm_pattern *pattern);
/* Where the product that fills it counts its bits; count 0: it need not. It does once that is noted. */
typedef struct esmm_cuda_pattern_sums {
  CUdeviceptr sums, count;
  uint32_t number;
} esmm_cuda_pattern_sums;
esmm_cuda_pattern_sums esmm_cuda_pattern_adds(const esmm_pattern *pattern);
void esmm_cuda_pattern_note_counted(esmm_pattern *pattern);
/* Its strips that make one of that height; 1 where theirs does not divide it. */
int64_t esmm_cuda_pattern_fold(const esmm_pattern *pattern, int64_t height);
/* The GPU's counts of it at strips of 32 and of 128 rows, once its `ready` is *number; NULL: none. */
const esmm_pattern_bit_count *esmm_cuda_pattern_count(const esmm_pattern *pattern, uint32_t *number);
esmm_status esmm_cuda_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern, int64_t strip, int64_t strips,
                                   uint64_t *bits); /* waits */
void esmm_cuda_pattern_free(esmm_pattern *pattern); /* the device part; needs no context */

/* ---- prepare.c ---- */

/* The columns of a tile: of a BSR B, as params.h says of k_bsr16_sm90a.cu. */
typedef struct esmm_cuda_tile_column {
  uint32_t tile, first, entries, unused;
} esmm_cuda_tile_column;

/* Lists of the blocks of 32 x 32 in a BSR B's cells (narrow.c). */
typedef struct esmm_cuda_narrow {
  int64_t tiles;
  int64_t entry_count, chunks, blocks;  /* of all tiles */
  CUdeviceptr values;                   /* [blocks][32][32], in the order of entries, swizzled */
  CUdeviceptr entries, columns, places; /* as params.h says of k_bsr16_narrow_sm90a.cu */
  esmm_cuda_tile_column *by_length;     /* columns again, in host memory */
  CUdeviceptr memory;                   /* the one allocation that these lie in */
} esmm_cuda_narrow;

/* A BSR B of 16 bits, as cells (blocks.c). */
typedef struct esmm_cuda_blocks {
  int cell_k;          /* k's of a cell, 32 or 64; it has ESMM_CELL_COLS columns */
  int64_t chunks;      /* ceil(k / cell_k) */
  int64_t cells;       /* with a nonzero, */
  int64_t kept;        /* and the caller's blocks with one */
  int64_t entry_count; /* of all tiles */
  CUdeviceptr values;  /* [cells][cell_k][ESMM_CELL_COLS] */
  CUdeviceptr which;   /* [cells] uint2: chunk, panel of 64 columns */
  CUdeviceptr entries, columns, places;
  esmm_cuda_tile_column *by_length; /* columns again, in host memory */
  CUdeviceptr memory;               /* the one allocation that these lie in */
  size_t bytes;                     /* of all of it, narrow's too */
  esmm_cuda_narrow narrow;
} esmm_cuda_blocks;

typedef struct esmm_cuda_weights {
  CUdeviceptr form[ESMM_FORM_KINDS]; /* where each form begins; 0 where it is not kept */
  esmm_strips strips;                /* bits of B's strips of 32 columns; data where B is fp32, else 0 */
  CUdeviceptr alive;                 /* [k_padded] fp32: share of strips that have this k */
  CUdeviceptr columns; /* [n][columns_ld] fp32: B transposed, k contiguous; 0 where not kept (16-bit B, or decode) */
  int64_t columns_ld;
  /* A 16-bit B, in its own dtype; all 0 for fp32: */
  CUdeviceptr rows;       /* [k][rows_ld], n contiguous; columns past n are zeros; 256-byte aligned */
  int64_t rows_ld;        /* elements, a multiple of ESMM_TILE; of a B that lies transposed, its own */
  bool borrowed;          /* its elements are another's (ops/borrow.c), */
  bool copied;            /* or a copy of those */
  CUdeviceptr tiles;      /* bits [rows_ld / ESMM_TILE][strips.k_padded / 32] of tiles of 128 columns, as strips.bits */
  CUdeviceptr tile_alive; /* [k_padded] fp32: share of tiles that have this k */
  double tile_density;    /* share of the tiles' bits that are set */
  esmm_cuda_blocks blocks; /* BSR: its cells, in memory of their own */
  CUdeviceptr nm;          /* N:M: the values and places of its form (ops/nm_layout.h), behind its bitmaps */
  CUdeviceptr memory;      /* the one allocation that all of these lie in */
} esmm_cuda_weights;

esmm_status esmm_cuda_prepare(esmm_ctx *ctx, const esmm_matrix *b, const esmm_prepare_opts *opts, esmm_weights **out);
static inline const esmm_cuda_weights *esmm_cuda_of(const esmm_weights *w)
{
  return w->device;
}
static inline const esmm_cuda_weights *esmm_cuda_b(const esmm_problem *p)
{
  return esmm_cuda_of(p->w);
}

/* Weights of a B of that shape, with `bytes` of forms still to allocate; NULL: says so in ctx. */
esmm_weights *esmm_cuda_weights_new(esmm_ctx *ctx, const esmm_matrix *b, size_t bytes);
void esmm_cuda_weights_free(esmm_weights *w);              /* the device part; needs no context */
esmm_matrix esmm_cuda_weights_rows(const esmm_weights *w); /* 16-bit B [k,n], as the weights keep it */
/* Weights of a CPU with the same B, for the weights file; and the other way round. */
esmm_status esmm_cuda_weights_to_host(esmm_ctx *ctx, const esmm_weights *w, esmm_weights **out);
esmm_status esmm_cuda_weights_from_host(esmm_ctx *ctx, const esmm_weights *host, esmm_weights **out);

#endif
