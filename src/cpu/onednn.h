/*
 * onednn.h: oneDNN, PyTorch's library for bf16 on a CPU, as a dense kernel that skipping has to beat. It is opened
 * where it is installed, never linked; ESMM_ONEDNN names another file, or is "off".
 *
 * Its own threads are not used: a product is cut into parts of rows or of columns, and each of the context's threads
 * multiplies one at a time, with the library set to one thread. So nothing spins when a product is done, a
 * busy CPU holds up one part, and a forked child may multiply.
 */
#ifndef ESMM_CPU_ONEDNN_H
#define ESMM_CPU_ONEDNN_H

#include "kernel.h"

#define ESMM_ONEDNN_SIDE 4   /* least k's and columns of a B that is worth the library's call */
#define ESMM_ONEDNN_BLOCK 64 /* columns that lie together in its layouts */

/* What is missing; NULL: the library was found and works. */
const char *esmm_onednn_missing(const esmm_kernel *self);

uint64_t esmm_onednn_version(void); /* 0: it is not there or of no use here, or does not say */

/* Is it worth once more B's bytes? Where most k's of B are alive, and the limit allows it. */
bool esmm_onednn_worth(const esmm_weights *w, double max_bytes_ratio);
/* Makes w->onednn of b, which has w's shape and dtype. Where the library refuses, or memory does not suffice, there is
   no such form. */
void esmm_onednn_keep(const esmm_matrix *b, esmm_weights *w);
void esmm_onednn_free(esmm_weights *w);
bool esmm_onednn_cuts_columns(const esmm_weights *w); /* parts of its columns can be made, as far as is known */
/* That cols columns take in it: all of them or, where it lies in blocks, whole blocks. */
size_t esmm_onednn_bytes(const esmm_weights *w, int64_t cols);

/*
 * Products of `rows` rows of A with `cols` columns of w: C [rows,cols] in a dtype. All columns or, where w->onednn lies
 * in blocks, those from col0, a multiple of ESMM_ONEDNN_BLOCK, on; of fp32 weights that have no such form, rows_ld
 * columns. A and C are row-major and tightly packed.
 */
typedef struct esmm_onednn_part esmm_onednn_part;
/* Made where there is none yet. NULL: the library failed, or too many are in use at once; it is not asked again. To be
   given back. */
esmm_onednn_part *esmm_onednn_take(const esmm_weights *w, int64_t rows, int64_t cols, esmm_dtype dtype_c);
void esmm_onednn_give_back(esmm_onednn_part *part);
size_t esmm_onednn_scratch(const esmm_onednn_part *part); /* bytes that a call needs */
/* By any number of threads at once, each with its own scratch. false: it failed. */
bool esmm_onednn_multiply(esmm_onednn_part *part, const esmm_weights *w, int64_t col0, const void *a, void *c,
                          void *scratch);

#endif
