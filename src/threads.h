/*
 * threads.h: loops that a context's threads share. threads.c says how, docs/design.md why not OpenMP.
 *
 * A loop is cut into pieces of some items. Each thread starts with a share of its own, so that it meets the same data
 * from call to call, and then takes pieces of the others' shares: a thread that comes late, or not at all, holds nobody
 * up. Who does which piece must not matter to the result. A piece starts no loop itself.
 */
#ifndef ESMM_THREADS_H
#define ESMM_THREADS_H

#include "internal.h"

/* Items first..end, end not among them. No two that run at once have the same worker, 0 to threads - 1. */
typedef void esmm_piece(void *arg, int64_t first, int64_t end, int worker);

/* All of 0..items, `at_once` items a piece, by up to so many threads; all is done when it returns. It cannot fail:
   where there are no other threads to be had, the caller does it all. */
void esmm_for(const esmm_ctx *ctx, int threads, int64_t items, int64_t at_once, esmm_piece *piece, void *arg);

/* Of items of so many lines, each of so many bytes, as many as make a piece: less is done sooner than handed over. */
static inline int64_t esmm_at_once(int64_t lines, int64_t bytes)
{
  return esmm_max(1, (64 << 10) / esmm_max(1, lines) / esmm_max(1, bytes));
}

esmm_status esmm_threads_open(esmm_ctx *ctx); /* after ctx->threads is known; starts none yet */
void esmm_threads_close(esmm_ctx *ctx);

#endif
