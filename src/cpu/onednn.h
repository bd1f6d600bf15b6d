/*
 * onednn.h: oneDNN, what PyTorch multiplies bf16 with on a CPU, as a dense kernel that skipping has to beat. It is
 * opened where it is installed, never linked; ESMM_ONEDNN names another file, or is "off".
 *
 * Its own threads are not used: a product is cut into parts of rows, and each of the context's threads multiplies one
 * at a time, for which the library is told to use one thread. So nothing spins when a product is done, a busy CPU holds
 * up one part, and a forked child may multiply.
 */
#ifndef ESMM_CPU_ONEDNN_H
#define ESMM_CPU_ONEDNN_H

#include "kernel.h"

/* What is missing, or NULL: found and not given up. */
const char *esmm_onednn_missing(const esmm_kernel *self);

/* Is it worth once more B's bytes? Where B is bf16, no product of it skips k's of B, and the limit allows it. */
bool esmm_onednn_worth(const esmm_weights *w, double max_bytes_ratio);
/* Makes w->onednn of b, which has w's shape and dtype. Where the library refuses, or memory does not suffice, there is
   no such form. */
void esmm_onednn_keep(const esmm_matrix *b, esmm_weights *w);
void esmm_onednn_free(esmm_weights *w);

/* Products of `rows` rows of A with w: C [rows,n] in a dtype; of fp32 weights, [rows,rows_ld]. Both are row-major and
   tightly packed. */
typedef struct esmm_onednn_part esmm_onednn_part;
#define ESMM_ONEDNN_ROWS 256 /* at most */
/* Made where there is none yet. NULL: the library failed, or too many are in use at once; it is not asked again. To be
   given back. */
esmm_onednn_part *esmm_onednn_take(const esmm_weights *w, int64_t rows, esmm_dtype dtype_c);
void esmm_onednn_give_back(esmm_onednn_part *part);
size_t esmm_onednn_scratch(const esmm_onednn_part *part); /* bytes that a call needs */
/* By any number of threads at once, each with scratch of its own. false: it failed. */
bool esmm_onednn_multiply(const esmm_onednn_part *part, const esmm_weights *w, const void *a, void *c, void *scratch);

#endif
