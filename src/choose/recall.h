/*
 * recall.h: what a context remembers from call to call. None of it decides what a product is, only which kernel makes
 * it and how soon that is known.
 *
 * Shapes: which kernels can do a product, found out once for each shape of call on the same weights. The key is all
 * that a kernel may look at before it runs, but not A's values. What is kept is the backend's own.
 *
 * Seen: the densities of A that earlier products saw, by weights and by how many rows A has, for backends that must
 * choose before they see A.
 *
 * Both tables have a fixed size and drop what was unused for longest. Nothing in that depends on addresses or on how
 * many weights there were before, so the same calls in the same order find the same.
 */
#ifndef ESMM_RECALL_H
#define ESMM_RECALL_H

#include "kernel.h"

#define ESMM_RECALL_ENTRIES 1024 /* of either table */
#define ESMM_SHAPE_BYTES 2048    /* what a backend may keep of a shape of call */
#define ESMM_REPORTS 32          /* calls with reports under way; a power of two */

/* Densities seen by products of one B with about as many rows. */
typedef struct esmm_seen {
  uint64_t serial;               /* of the weights */
  int64_t row_class;             /* see esmm_row_class */
  bool known;                    /* the densities below are there */
  bool replaced;                 /* it evicted another entry: more pairs are in use than fit */
  bool joint_known;              /* joint too; else it is strip times B's density */
  bool overflow_known;           /* and overflow */
  double element, strip, joint;  /* of A: elements, strips, joint with B */
  double overflow;               /* share of A's elements that overflow 2:4, see esmm_sample */
  int64_t strip_rows;            /* rows of those strips; 0: of whatever the kernel has */
  int64_t from;                  /* reports of earlier calls than this do not count: densities were set then */
  int64_t calls, reports;        /* products so far; reports taken from them */
  uint32_t pending;              /* bit i: call i modulo ESMM_REPORTS will report, and that was not taken yet */
  uint8_t rows_of[ESMM_REPORTS]; /* rows of the strips in those reports */
} esmm_seen;

/* 1, 2, 3 to 4, 5 to 8, ..., 33 to 64, 65 and more rows: 0 to 7. */
int64_t esmm_row_class(int64_t m);

uint64_t esmm_weights_serial(void); /* a new number for new weights; never given twice */

/* The context's tables; if it does not remember there are none, and the functions below find nothing. */
esmm_status esmm_recall_open(esmm_ctx *ctx);
void esmm_recall_close(esmm_ctx *ctx);

/* What was kept for calls like p, ESMM_SHAPE_BYTES aligned to 8 bytes, or NULL. touch: it was used now. */
void *esmm_recall_shape(const esmm_problem *p, bool touch);
/* Room for a new one, in place of the oldest; NULL where nothing is remembered. There is none for p. */
void *esmm_recall_add_shape(const esmm_problem *p);
/* Costs changed, or what kernels there are. */
void esmm_recall_clear_shapes(esmm_ctx *ctx);
int64_t esmm_recall_shapes_made(const esmm_ctx *ctx); /* so far: for tests */

/* Densities of products of w with m rows: NULL where there are none. */
esmm_seen *esmm_recall_seen(const esmm_ctx *ctx, const esmm_weights *w, int64_t m);
/* The same, made where there are none, in place of the oldest; now the newest. NULL where nothing is remembered. */
esmm_seen *esmm_recall_use_seen(esmm_ctx *ctx, const esmm_weights *w, int64_t m);
int esmm_recall_place(const esmm_ctx *ctx, const esmm_seen *seen); /* its place in the table */

#endif
