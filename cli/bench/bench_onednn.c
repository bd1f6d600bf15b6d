/*
 * bench_onednn.c: oneDNN as a contestant on a CPU. Unlike the BLAS libraries it multiplies 16-bit operands as they are:
 * it gets A, B and C in the dtypes of the product where A and B agree, else in fp32 as the others do. Its copies of B
 * are made before anything is timed.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

static onednn_library *library_of(const bench *b)
{
  for (int i = 0; i < b->library_count; i++)
    if (b->libraries[i].onednn)
      return b->libraries[i].onednn;
  return NULL;
}

/* A matrix of B's shape in the product's dtype, to oneDNN's layout. */
static int prepare_one(const bench *b, bench_onednn *x, const esmm_matrix *from, void **to)
{
  io_matrix copy = {0};
  const bool same =
      from->dtype == x->dtype && from->order == ESMM_ROW_MAJOR && (from->ld == 0 || from->ld == from->cols);
  const int status = same ? CLI_GO : cli_matrix_convert(b->ctx, "B for oneDNN", from, x->dtype, &copy);
  if (status == CLI_GO) {
    *to = onednn_weights_make(x->product, same ? from->data : copy.m.data);
    if (!*to)
      snprintf(x->reason, sizeof x->reason, "it failed to lay out B");
  }
  io_matrix_free(&copy);
  return status;
}

/* A's that are not in the product's dtype, tight rows. */
static int take_a(const bench *b, const bench_onednn *x, const esmm_matrix *from, io_matrix *to)
{
  const bool same =
      from->dtype == x->dtype && from->order == ESMM_ROW_MAJOR && (from->ld == 0 || from->ld == from->cols);
  if (!same)
    return cli_matrix_convert(b->ctx, "A for oneDNN", from, x->dtype, to);
  *to = (io_matrix){.m = *from};
  return CLI_GO;
}

int bench_onednn_next(const bench *b, bench_data *data)
{
  bench_onednn *x = &data->onednn;
  int status = CLI_GO;
  for (int i = 0; x->product && !x->reason[0] && i < data->variants && status == CLI_GO; i++) {
    io_matrix_free(&x->a[i]);
    status = take_a(b, x, &data->a[i].m, &x->a[i]);
  }
  return status;
}

int bench_onednn_make(const bench *b, bench_data *data)
{
  bench_onednn *x = &data->onednn;
  const cli_problem *p = &b->problem;
  onednn_library *library = library_of(b);
  if (!library)
    return CLI_GO;
  x->dtype = p->dtype_a == p->dtype_b ? (esmm_dtype)p->dtype_a : ESMM_F32;
  x->narrow = x->dtype != ESMM_F32 || p->dtype_c == ESMM_F32;
  x->product =
      onednn_product_make(library, data->m, data->k, data->n, x->dtype, x->narrow ? (esmm_dtype)p->dtype_c : ESMM_F32);
  snprintf(x->reason, sizeof x->reason, "%s", onednn_product_reason(x->product));
  if (x->reason[0])
    return CLI_GO;
  x->copies = data->copies;
  x->variants = data->variants;
  x->a = cli_alloc((size_t)data->variants, sizeof *x->a);
  x->dense_a = cli_alloc((size_t)data->variants, sizeof *x->dense_a);
  x->b = cli_alloc((size_t)data->copies, sizeof *x->b);
  x->dense_b = cli_alloc((size_t)data->copies, sizeof *x->dense_b);
  x->gate = cli_alloc((size_t)data->copies, sizeof *x->gate);
  int status = bench_onednn_next(b, data);
  for (int i = 0; i < data->variants && status == CLI_GO && data->dense_a[i].m.data; i++)
    status = take_a(b, x, &data->dense_a[i].m, &x->dense_a[i]);
  for (int i = 0; i < data->copies && status == CLI_GO; i++) {
    status = prepare_one(b, x, &data->plain_b[i].m, &x->b[i]);
    if (status == CLI_GO && data->dense_b[i].m.data && data->dense_b[i].m.data != data->plain_b[i].m.data)
      status = prepare_one(b, x, &data->dense_b[i].m, &x->dense_b[i]);
    if (status == CLI_GO && b->epilogue.gate)
      status = prepare_one(b, x, &data->finish.plain_gate[i].m, &x->gate[i]);
  }
  return status;
}

void bench_onednn_free(bench_data *data)
{
  bench_onednn *x = &data->onednn;
  for (int i = 0; i < x->variants; i++) {
    io_matrix_free(&x->a[i]);
    io_matrix_free(&x->dense_a[i]);
  }
  for (int i = 0; i < x->copies; i++) {
    onednn_weights_free(x->product, x->b[i]);
    onednn_weights_free(x->product, x->dense_b[i]);
    onednn_weights_free(x->product, x->gate[i]);
  }
  free(x->a);
  free(x->dense_a);
  free(x->b);
  free(x->dense_b);
  free(x->gate);
  onednn_product_free(x->product);
  *x = (bench_onednn){0};
}

io_matrix *bench_onednn_result(bench_data *data)
{
  return data->onednn.narrow ? &data->c : &data->plain_c;
}

bool bench_onednn_call(const bench *b, bench_data *data, const bench_contestant *c, int variant, int copy)
{
  bench_onednn *x = &data->onednn;
  const void *a = (c->dense_data ? x->dense_a : x->a)[variant].m.data;
  void *dense = x->dense_b[copy] ? x->dense_b[copy] : x->b[copy], *weights = c->dense_data ? dense : x->b[copy];
  void *to = bench_onednn_result(data)->m.data;
  return (!b->epilogue.gate || onednn_multiply(x->product, a, x->gate[copy], to)) &&
         onednn_multiply(x->product, a, weights, to);
}
