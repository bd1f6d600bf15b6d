/* stage.c: operands in host memory are copied to scratch on the device before a product, and C back after it. */
#include "cuda/product/product.h"

/*
 * Gives p operands of the device. Their addresses are not known yet, but their alignment is: kernels may look at it
 * when they say how much workspace they need.
 */
esmm_status esmm_run_stage(esmm_ctx *ctx, esmm_problem *p, bool with_a, staging *st)
{
  void *const anywhere = esmm_cuda_pointer(SCRATCH_ALIGN);
  *st = (staging){.a = p->a, .c = p->c, .bias = p->bias};
  st->a_staged = with_a && p->a.place == ESMM_HOST;
  st->c_staged = p->c.place == ESMM_HOST;
  st->bias_staged = p->bias && st->c_staged;
  size_t total = 0;
  if (!esmm_cuda_reserve(&total, st->a_staged ? esmm_cuda_tight_bytes(&p->a) : 0, SCRATCH_ALIGN, &st->a_at) ||
      !esmm_cuda_reserve(&total, st->c_staged ? esmm_cuda_tight_bytes(&p->c) : 0, SCRATCH_ALIGN, &st->c_at) ||
      !esmm_cuda_reserve(&total, st->bias_staged ? (size_t)p->n * sizeof(float) : 0, SCRATCH_ALIGN, &st->bias_at) ||
      !esmm_cuda_reserve(&total, sizeof(notes), SCRATCH_ALIGN, &st->notes_at))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "a is %lld x %lld, c is %lld x %lld: too large to be copied to the GPU",
                     (long long)p->m, (long long)p->k, (long long)p->m, (long long)p->n);
  st->bytes = total;
  if (st->a_staged)
    p->a = esmm_cuda_tight(&p->a, ESMM_DEVICE, anywhere);
  if (st->c_staged)
    p->c = esmm_cuda_tight(&p->c, ESMM_DEVICE, anywhere);
  if (st->bias_staged)
    p->bias = anywhere;
  return ESMM_OK;
}

/* Copies what has to be there before the product; with_c where C is read. */
esmm_status esmm_run_upload(esmm_ctx *ctx, const staging *st, bool with_c, CUdeviceptr scratch, esmm_problem *p,
                            CUstream stream, size_t *moved)
{
  esmm_status status = ESMM_OK;
  if (st->a_staged) {
    p->a.data = esmm_cuda_pointer(scratch + st->a_at);
    status = esmm_cuda_upload(ctx, &st->a, &p->a, stream);
    *moved += esmm_cuda_tight_bytes(&st->a);
  }
  if (st->c_staged) {
    p->c.data = esmm_cuda_pointer(scratch + st->c_at);
    if (status == ESMM_OK && with_c) {
      status = esmm_cuda_upload(ctx, &st->c, &p->c, stream);
      *moved += esmm_cuda_tight_bytes(&st->c);
    }
  }
  if (st->bias_staged) {
    const size_t bytes = (size_t)p->n * sizeof(float);
    p->bias = esmm_cuda_pointer(scratch + st->bias_at);
    if (status == ESMM_OK)
      status = esmm_cuda_to_device(ctx, scratch + st->bias_at, st->bias, bytes, stream);
    *moved += bytes;
  }
  return status;
}

esmm_status esmm_run_copy_back(run *r, size_t *moved)
{
  if (!r->st.c_staged)
    return ESMM_OK;
  *moved += esmm_cuda_tight_bytes(&r->st.c);
  return esmm_cuda_download(r->ctx, &r->p->c, &r->st.c, r->stream);
}
