/*
 * saved.h: what was measured, from one process to the next: a text file beside the tuning cache, of the same machine,
 * threads and kernel sources. Read when a context is made, written when one is freed or when it is asked for, never
 * inside a product. A file that is damaged, or of other sources, is as good as none.
 */
#ifndef ESMM_SAVED_H
#define ESMM_SAVED_H

#include "internal.h"

#include <stdio.h>

/* Sets ctx->home and reads the file, once in a process. After esmm_tune_find. */
void esmm_saved_open(esmm_ctx *ctx);
/* Where enough is new: failures are silent, nothing depends on the file. */
void esmm_saved_close(esmm_ctx *ctx);

/* One such file, to the first line that cannot be believed. */
void esmm_saved_read(FILE *f, uint32_t home);
void esmm_saved_forget(void); /* which files this process has read: for tests */

#endif
