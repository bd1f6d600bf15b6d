/*
 * meeting.c: where the blocks of a launch meet: counters in device memory that belong to the context, because its calls
 * come one after the other. They are zero at first; each user leaves them ready for the next.
 */
#include "cuda/cuda.h"

typedef struct meeting {
  esmm_allocator allocator;
  int ordinal;
  CUdeviceptr memory;
} meeting;

#define WGMMA16_AT ((ESMM_SAMPLE_NOTES + 255) / 256 * 256)
#define BSR16_AT ((WGMMA16_AT + ESMM_WGMMA16_MEETING + 255) / 256 * 256)
#define BYTES (BSR16_AT + ESMM_BSR16_MOST_SPLIT * sizeof(uint32_t))

static void release(void *object)
{
  meeting *m = object;
  const esmm_allocator allocator = m->allocator;
  esmm_cuda_free_at(m->ordinal, m->memory);
  esmm_mem_free(&allocator, m, sizeof *m);
}

static esmm_status make(esmm_ctx *ctx, const void *key, CUstream stream, meeting **out)
{
  if (esmm_cuda_capturing(ctx))
    return esmm_fail(
        ctx, ESMM_ERR_UNSUPPORTED,
        "the memory where blocks meet cannot be allocated while a graph is captured: run the same call once outside "
        "the capture");
  meeting *m = esmm_mem_alloc(&ctx->allocator, sizeof *m);
  if (!m)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "no memory for the counters where blocks meet");
  *m = (meeting){.allocator = ctx->allocator, .ordinal = ctx->ordinal};
  esmm_status status = esmm_cuda_alloc(ctx, BYTES, &m->memory);
  if (status == ESMM_OK)
    status = esmm_cuda_zero(ctx, m->memory, BYTES, stream);
  if (status == ESMM_OK)
    status = esmm_cuda_attach(ctx, key, m, release);
  if (status != ESMM_OK) {
    release(m);
    return status;
  }
  *out = m;
  return ESMM_OK;
}

esmm_status esmm_cuda_meeting(esmm_ctx *ctx, esmm_cuda_meeting_point point, CUstream stream, CUdeviceptr *memory)
{
  static const char key;
  static const size_t at[] = {
      [ESMM_MEETING_SAMPLE] = 0, [ESMM_MEETING_WGMMA16] = WGMMA16_AT, [ESMM_MEETING_BSR16] = BSR16_AT};
  meeting *m = esmm_cuda_attached(ctx, &key);
  const esmm_status status = m ? ESMM_OK : make(ctx, &key, stream, &m);
  if (status == ESMM_OK)
    *memory = m->memory + at[point];
  return status;
}
