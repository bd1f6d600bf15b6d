/*
 * format.h: the forms of B that are not dense, as kernels read them. docs/formats.md draws them.
 *
 * Values are in B's dtype. Behind the last value and the last index ESMM_FORM_SLACK bytes of zeros may be read, so that
 * a kernel may load whole vectors at the end too.
 */
#ifndef ESMM_FORMAT_H
#define ESMM_FORMAT_H

#include "esmm.h"

#include <stdbool.h>

#define ESMM_FORM_SLACK 64
#define ESMM_MAX_BLOCK 256
#define ESMM_MAX_GROUP 32
#define ESMM_NM_PANEL 16 /* columns whose values lie side by side: a cache line of fp32 */

/*
 * BSR, kept by block column: a strip is block_cols columns of B, its blocks come in ascending k. Block i:
 *   k's      at[i] * block_rows + 0 .. block_rows - 1
 *   values   [block_rows][block_cols] from element i * block_rows * block_cols on; zeros beyond k and n
 * Strip s has blocks start[s] .. start[s + 1] - 1. No block is all zeros.
 */
typedef struct esmm_bsr_form {
  int block_rows, block_cols;
  int64_t strips; /* ceil(n / block_cols) */
  int64_t levels; /* ceil(k / block_rows): block rows there are */
  int64_t blocks; /* kept; at most INT32_MAX */
  int32_t *start; /* [strips + 1] */
  int32_t *at;    /* [blocks] */
  void *values;   /* [blocks][block_rows][block_cols] */
} esmm_bsr_form;

/*
 * N:M. Groups are `group` k's from 0 on, the last may be short. Each keeps `keep` values a column, or all if it is
 * shorter: slots values a column in all, slot s in group s / keep. Within a group positions ascend and differ, and all
 * are of k's that exist; a slot without a nonzero holds +0.
 *   values   [panels][slots][16], a panel is 16 columns, zeros beyond n
 *   index    the position of each value within its group, bits each, little-endian (bit i of byte j is bit 8j + i)
 *
 *   index where group_cols = 1: [panels][slots][2 * bits bytes]
 *     - column c of the panel has bits c * bits to (c + 1) * bits - 1
 *     - 2:4 has a 32-bit word for every vector of values
 *
 *   index where group_cols > 1: [strips][list_bytes], a list for every strip of group_cols columns
 *     - strip j / group_cols is that of column j
 *     - slot s has bits s * bits to (s + 1) * bits - 1 of the list
 *     - zero bits follow, up to list_bytes
 *
 * group = 1 has no index at all (bits = 0).
 */
typedef struct esmm_nm_form {
  int keep, group;
  int group_cols;    /* columns that share their positions, at least 1 */
  int bits;          /* of an index: the least with 1 << bits >= group, 0 to 5 */
  int64_t slots;     /* k / group * keep + min(keep, k % group) */
  int64_t panels;    /* ceil(n / 16) */
  int64_t strips;    /* group_cols > 1: ceil(n / group_cols); else 0 */
  size_t list_bytes; /* group_cols > 1: ceil(slots * bits / 64) * 8; else 0 */
  void *values;
  unsigned char *index;
} esmm_nm_form;

static inline unsigned esmm_nm_field(const unsigned char *from, int64_t i, int bits) /* the i-th index of a list */
{
  const int64_t bit = i * bits;
  const unsigned pair = from[bit / 8] | (unsigned)from[bit / 8 + 1] << 8; /* at most 5 bits: never three bytes */
  return pair >> (bit % 8) & ((1u << bits) - 1);
}

/* Where in values slot s of column j is. */
static inline int64_t esmm_nm_value(const esmm_nm_form *f, int64_t j, int64_t s)
{
  return (j / ESMM_NM_PANEL * f->slots + s) * ESMM_NM_PANEL + j % ESMM_NM_PANEL;
}

/* The k of slot s of column j; slow. */
static inline int64_t esmm_nm_k(const esmm_nm_form *f, int64_t j, int64_t s)
{
  const unsigned char *list = f->group_cols == 1
                                  ? f->index + (j / ESMM_NM_PANEL * f->slots + s) * (ESMM_NM_PANEL / 8) * f->bits
                                  : f->index + (size_t)(j / f->group_cols) * f->list_bytes;
  return s / f->keep * f->group + (int64_t)esmm_nm_field(list, f->group_cols == 1 ? j % ESMM_NM_PANEL : s, f->bits);
}

/* ---- options ---- */

/* Fills in the defaults of the fields of format's kind and checks them; sets the others to 0. block_rows and block_cols
   are the defaults of a block. `what` is how the caller wrote a field, up to its name: "opts->format.", "format->". */
esmm_status esmm_format_settle(esmm_ctx *ctx, const char *what, esmm_format *format, int block_rows, int block_cols);

/* Can the context prepare weights of it? Else says so. */
esmm_status esmm_format_supported(esmm_ctx *ctx, esmm_format_kind kind);

/* ---- forms of a weights object whose format is not dense: it is settled, w has nothing of its form yet ---- */

/* The fields that follow from the shape alone. */
void esmm_form_shape(const esmm_format *format, esmm_weights *w);
/* Those, and what can be allocated before the contents are known: all of an NM form, `start` of a BSR. */
esmm_status esmm_form_alloc(esmm_ctx *ctx, const esmm_format *format, esmm_weights *w);
esmm_status esmm_bsr_alloc_blocks(esmm_ctx *ctx, int64_t blocks, esmm_weights *w); /* `at` and values */
/* b [k,n] in host memory, of w's dtype */
esmm_status esmm_form_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w);
void esmm_form_free(esmm_weights *w);
void esmm_form_unpack(const esmm_weights *w, esmm_matrix *out); /* out: [k,n], row-major, of w's dtype */

/* Bytes of the parts, as a file holds them: without slack. */
typedef struct esmm_form_bytes {
  size_t start, at, index, values;
} esmm_form_bytes;
esmm_form_bytes esmm_form_sizes(const esmm_weights *w);

/* Sets bits, alive, full and both densities of w from its form. */
void esmm_form_scan(esmm_ctx *ctx, esmm_weights *w);

/* Does the form, out of a file, keep the rules above? Else says why not. */
bool esmm_form_valid(const esmm_weights *w, char *why, size_t why_bytes);

/*
 * A caller's esmm_bsr: how many lines its pointers run over (block rows, or block columns of a COL_MAJOR one), and how
 * many places a line has. The error in entry i, of value `at`, of row_pointers or column_indices: before is the pointer
 * before it, or 0; or the index before it in its line, or -1. Its fields were checked.
 */
int64_t esmm_bsr_lines(const esmm_bsr *b);
int64_t esmm_bsr_places(const esmm_bsr *b);
esmm_status esmm_bsr_check_pointer(esmm_ctx *ctx, const char *what, const esmm_bsr *b, int64_t i, int64_t at,
                                   int64_t before);
esmm_status esmm_bsr_check_index(esmm_ctx *ctx, const char *what, const esmm_bsr *b, int64_t i, int64_t at,
                                 int64_t before);

/* What pruning did. */
typedef struct esmm_prune_tally {
  int64_t kept, dropped;
  double squares, squares_dropped;
} esmm_prune_tally;

/*
 * A block that may be pruned. key orders as prune.c's keys do: the sum of the squares of its weighed elements, in
 * ESMM_BLOCK_SUMS partial sums whose order prune.c defines, so that every device comes to the same bits.
 */
#define ESMM_BLOCK_SUMS 32
typedef struct esmm_block_note {
  uint64_t key;
  int64_t nonzero;
  double squares; /* of the elements themselves */
} esmm_block_note;

/*
 * Top-N (format.kind DENSE), and the soft threshold of that or of N:M. A matrix is gone through by areas of
 * ESMM_AREA_COLS columns by esmm_area_rows k's, which are numbered by levels of k's. An area is summed for each column
 * in rising k's; then the upper half of the columns' sums is added to the lower, until one is left; areas are added in
 * order. Every device keeps that order, so all come to the same factor, bit for bit.
 */
#define ESMM_AREA_COLS 32
#define ESMM_AREA_ROWS 128 /* at most */
typedef struct esmm_top {
  esmm_format format; /* settled; of NM group_cols is 1 */
  int64_t keep;       /* DENSE: elements of each column, or of all: 0 or more, more than there are keep all */
  bool whole;         /* DENSE: of all */
  bool soft;
  const float *norms; /* [k] in host memory, or NULL */
} esmm_top;

/* <x, s> and <s, s> over an area, s being the shrunk x. */
typedef struct esmm_area_fit {
  double fit, own;
} esmm_area_fit;

static inline int64_t esmm_area_rows(const esmm_format *f) /* whole groups */
{
  return f->kind == ESMM_FORMAT_NM ? ESMM_AREA_ROWS / f->group * f->group : ESMM_AREA_ROWS;
}

/* The factor for all values after shrinking; how areas' tallies become one. */
float esmm_top_factor(const esmm_area_fit *fits, int64_t areas);
void esmm_tally_add(esmm_prune_tally *to, const esmm_prune_tally *from, int64_t count);

/* Says that B [k,n] does not fit f: that group of that strip has `count` nonzero k's. */
esmm_status esmm_nm_misfit(esmm_ctx *ctx, const esmm_format *f, int64_t k, int64_t n, int64_t group, int64_t strip,
                           int count);

/* bsr.c, nm.c: the same of each format */
esmm_status esmm_bsr_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w);
void esmm_bsr_unpack(const esmm_weights *w, esmm_matrix *out);
int64_t esmm_bsr_scan_panel(const esmm_weights *w, int64_t panel, uint64_t *bits); /* returns nonzeros */
bool esmm_bsr_valid(const esmm_weights *w, char *why, size_t why_bytes);
esmm_status esmm_nm_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w);
void esmm_nm_unpack(const esmm_weights *w, esmm_matrix *out);
int64_t esmm_nm_scan_panel(const esmm_weights *w, int64_t panel, uint64_t *bits);
bool esmm_nm_valid(const esmm_weights *w, char *why, size_t why_bytes);

#endif
