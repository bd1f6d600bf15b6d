/*
 * threads.h: loops that a context's threads share. threads.c says how, docs/design.md why not OpenMP.
 *
 * A loop is cut into pieces of some items. Each thread starts with its own share, so that it meets the same data from
 * call to call, and then takes pieces of the others' shares: no thread waits for one that is late. The result must not
 * depend on which thread does which piece. A piece starts no loop itself.
 */
#ifndef ESMM_THREADS_H
#define ESMM_THREADS_H

#include "internal.h"

/* Items first..end, end not among them. No two that run at once have the same worker, 0 to threads - 1. */
typedef void esmm_piece(void *arg, int64_t first, int64_t end, int worker);

/* All of 0..items, `at_once` items a piece, on up to `threads` threads; returns when all is done. It cannot fail: where
   no other threads can be had, the caller does it all. */
void esmm_for(const esmm_ctx *ctx, int threads, int64_t items, int64_t at_once, esmm_piece *piece, void *arg);

/* How many items of `lines` lines, each of `bytes` bytes, make a piece: fewer are done before another thread has begun.
 */
static inline int64_t esmm_at_once(int64_t lines, int64_t bytes)
{
  return esmm_max(1, (64 << 10) / esmm_max(1, lines) / esmm_max(1, bytes));
}

esmm_status esmm_threads_open(esmm_ctx *ctx); /* after ctx->threads is known; starts none yet */
void esmm_threads_close(esmm_ctx *ctx);

#endif
