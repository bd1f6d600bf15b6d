/*
 * stage.c: operands in host memory are copied to scratch on the device before a product, and C, and the counts of its
 * columns, back after it.
 */
#include "cuda/product/product.h"

static bool same_matrix(const esmm_matrix *x, const esmm_matrix *y)
{
  return x->data == y->data && x->place == y->place;
}

/*
 * The addresses are not known yet, but their alignment is: kernels may look at it when they say how much workspace they
 * need.
 */
esmm_status esmm_run_stage(run *r, bool with_a, const float *gate_bias)
{
  esmm_problem *p = r->p;
  staging *st = &r->st;
  void *const anywhere = esmm_cuda_pointer(SCRATCH_ALIGN);
  const size_t row = (size_t)p->n * sizeof(float);
  *st = (staging){
      .a = p->a, .c = p->c, .residual = p->residual, .bias = p->bias, .gate_bias = gate_bias, .counts = p->nonzeros};
  st->a_staged = with_a && p->a.place == ESMM_HOST;
  st->c_staged = p->c.place == ESMM_HOST;
  st->bias_staged = p->bias && st->c_staged;
  st->gate_bias_staged = gate_bias && st->c_staged;
  st->counts_staged = p->nonzeros && st->c_staged;
  st->residual_is_c = p->residual.data && st->c_staged && same_matrix(&p->residual, &p->c);
  st->residual_staged = p->residual.data && p->residual.place == ESMM_HOST && !st->residual_is_c;
  const struct {
    bool wanted;
    size_t bytes, *at;
  } parts[] = {{st->a_staged, esmm_cuda_tight_bytes(&p->a), &st->a_at},
               {st->c_staged, esmm_cuda_tight_bytes(&p->c), &st->c_at},
               {st->bias_staged, row, &st->bias_at},
               {st->gate_bias_staged, row, &st->gate_bias_at},
               {st->residual_staged, esmm_cuda_tight_bytes(&p->residual), &st->residual_at},
               {st->counts_staged, row, &st->counts_at},
               {true, sizeof(notes), &st->notes_at}};
  size_t total = 0;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (!esmm_cuda_reserve(&total, parts[i].wanted ? parts[i].bytes : 0, SCRATCH_ALIGN, parts[i].at))
      return esmm_fail(r->ctx, ESMM_ERR_OVERFLOW,
                       "a is %lld x %lld, c is %lld x %lld: too large to be copied to the GPU", (long long)p->m,
                       (long long)p->k, (long long)p->m, (long long)p->n);
  st->bytes = total;
  if (st->a_staged)
    p->a = esmm_cuda_tight(&p->a, ESMM_DEVICE, anywhere);
  if (st->c_staged)
    p->c = esmm_cuda_tight(&p->c, ESMM_DEVICE, anywhere);
  if (st->residual_staged || st->residual_is_c)
    p->residual = esmm_cuda_tight(&p->residual, ESMM_DEVICE, anywhere);
  if (st->bias_staged)
    p->bias = anywhere;
  if (st->counts_staged)
    p->nonzeros = anywhere;
  return ESMM_OK;
}

/* A row of numbers that lies beside C. */
static esmm_status upload_row(run *r, size_t at, const float *from, size_t *moved)
{
  const size_t bytes = (size_t)r->p->n * sizeof *from;
  *moved += bytes;
  return esmm_cuda_to_device(r->ctx, r->scratch + at, from, bytes, r->stream);
}

static esmm_status upload_matrix(run *r, const esmm_matrix *host, const esmm_matrix *device, size_t *moved)
{
  *moved += esmm_cuda_tight_bytes(host);
  return esmm_cuda_upload(r->ctx, host, device, r->stream);
}

esmm_status esmm_run_upload(run *r, bool epilogue, size_t *moved)
{
  const staging *st = &r->st;
  esmm_problem *p = r->p;
  if (st->a_staged)
    p->a.data = esmm_cuda_pointer(r->scratch + st->a_at);
  if (st->c_staged)
    p->c.data = esmm_cuda_pointer(r->scratch + st->c_at);
  if (st->residual_staged)
    p->residual.data = esmm_cuda_pointer(r->scratch + st->residual_at);
  if (st->residual_is_c)
    p->residual.data = p->c.data;
  if (st->bias_staged)
    p->bias = esmm_cuda_pointer(r->scratch + st->bias_at);
  if (st->counts_staged)
    p->nonzeros = esmm_cuda_pointer(r->scratch + st->counts_at);
  esmm_status status = st->a_staged ? upload_matrix(r, &st->a, &p->a, moved) : ESMM_OK;
  if (!epilogue)
    return status;
  if (status == ESMM_OK && st->c_staged && (p->beta != 0.0f || st->residual_is_c))
    status = upload_matrix(r, &st->c, &p->c, moved);
  if (status == ESMM_OK && st->residual_staged)
    status = upload_matrix(r, &st->residual, &p->residual, moved);
  if (status == ESMM_OK && st->bias_staged)
    status = upload_row(r, st->bias_at, st->bias, moved);
  if (status == ESMM_OK && st->gate_bias_staged)
    status = upload_row(r, st->gate_bias_at, st->gate_bias, moved);
  return status;
}

esmm_status esmm_run_copy_back(run *r, size_t *moved)
{
  if (!r->st.c_staged)
    return ESMM_OK;
  *moved += esmm_cuda_tight_bytes(&r->st.c);
  const esmm_status status = esmm_cuda_download(r->ctx, &r->p->c, &r->st.c, r->stream);
  if (status != ESMM_OK || !r->st.counts_staged)
    return status;
  const size_t bytes = (size_t)r->p->n * sizeof *r->st.counts;
  *moved += bytes;
  return esmm_cuda_to_host(r->ctx, r->st.counts, r->scratch + r->st.counts_at, bytes, r->stream);
}
