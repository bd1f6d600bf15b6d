/*
 * cusparse.c: cuSPARSE by dlopen: B by rows of its nonzeros (CSR), or by its blocks (BSR).
 *
 * It multiplies a sparse matrix by a dense one: C' [n,m] = B' [n,k] A' [k,m]. A' and C' by columns are our A and C by
 * rows, so only B' is made anew, here on the host from B's values. The algorithm is the library's default for the
 * format, after its own preprocessing.
 */
#include "peers.h"

#include <stdlib.h>
#include <string.h>

/* Of cusparse.h; the same from CUDA 11 on. */
enum { OP_N = 0, ORDER_COL = 1, ORDER_ROW = 2, INDEX_32I = 2, BASE_ZERO = 0, R_32F = 0, ALG_DEFAULT = 0 };

typedef struct functions {
  int (*create)(void **);
  int (*create_csr)(void **, int64_t, int64_t, int64_t, void *, void *, void *, int, int, int, int);
  int (*create_bsr)(void **, int64_t, int64_t, int64_t, int64_t, int64_t, void *, void *, void *, int, int, int, int,
                    int);
  int (*create_dense)(void **, int64_t, int64_t, int64_t, void *, int, int);
  int (*destroy_sparse)(const void *);
  int (*destroy_dense)(const void *);
  int (*buffer_size)(void *, int, int, const void *, const void *, const void *, const void *, void *, int, int,
                     size_t *);
  int (*preprocess)(void *, int, int, const void *, const void *, const void *, const void *, void *, int, int, void *);
  int (*multiply)(void *, int, int, const void *, const void *, const void *, const void *, void *, int, int, void *);
} functions;

/* Opened once and never closed (see cublas.c). */
static struct {
  void *file, *handle;
  functions f;
} library;

typedef struct spmm_state {
  void *sparse, *a, *c, *buffer;
} spmm_state;

static bool open_library(bench_peer *peer)
{
  static const char *const files[] = {"libcusparse.so.12",
                                      "libcusparse.so.13",
                                      "libcusparse.so.11",
                                      "libcusparse.so",
                                      "/usr/local/cuda/lib64/libcusparse.so",
                                      NULL};
  functions *f = &library.f;
  if (library.file)
    return true;
  void *file = peer_open(peer, "ESMM_CUSPARSE", files);
  if (!file)
    return false;
  if (!peer_find(peer, file, "cusparseCreate", &f->create) ||
      !peer_find(peer, file, "cusparseCreateCsr", &f->create_csr) ||
      !peer_find(peer, file, "cusparseCreateDnMat", &f->create_dense) ||
      !peer_find(peer, file, "cusparseDestroySpMat", &f->destroy_sparse) ||
      !peer_find(peer, file, "cusparseDestroyDnMat", &f->destroy_dense) ||
      !peer_find(peer, file, "cusparseSpMM_bufferSize", &f->buffer_size) ||
      !peer_find(peer, file, "cusparseSpMM_preprocess", &f->preprocess) ||
      !peer_find(peer, file, "cusparseSpMM", &f->multiply))
    return false;
  (void)peer_find(peer, file, "cusparseCreateBsr", &f->create_bsr); /* only a newer one has it */
  peer->error[0] = '\0';
  const int status = f->create(&library.handle);
  if (status != 0)
    return peer_failed(peer, "cusparseCreate", status);
  library.file = file;
  return true;
}

/* ---- B' ---- */

/* Blocks of B' [n,k] with a nonzero, a row of blocks after the other, each with its values by rows. Single elements are
   blocks of 1 x 1. */
typedef struct blocks {
  const float *b;     /* [k][n] */
  int64_t n, k;       /* of B' */
  int64_t rows, cols; /* of a block */
  int64_t high, wide; /* of B', in blocks */
  int64_t *counts;    /* of each row of blocks */
  int32_t *starts, *columns;
  float *values; /* NULL: only count */
} blocks;

static bool is_alive(const blocks *s, int64_t row, int64_t col)
{
  for (int64_t p = col * s->cols; p < (col + 1) * s->cols; p++)
    for (int64_t j = row * s->rows; j < (row + 1) * s->rows; j++)
      if (s->b[p * s->n + j] != 0)
        return true;
  return false;
}

static void take_row(void *arg, int64_t row)
{
  const blocks *s = arg;
  int64_t at = s->values ? s->starts[row] : 0;
  for (int64_t col = 0; col < s->wide; col++) {
    if (!is_alive(s, row, col))
      continue;
    float *to = s->values ? s->values + at * s->rows * s->cols : NULL;
    if (to)
      s->columns[at] = (int32_t)col;
    for (int64_t j = 0; to && j < s->rows; j++)
      for (int64_t p = 0; p < s->cols; p++)
        to[j * s->cols + p] = s->b[(col * s->cols + p) * s->n + row * s->rows + j];
    at++;
  }
  if (!s->values)
    s->counts[row] = at;
}

/* The matrix of the device's memory, in peer's ownership. */
static bool make_sparse(bench *b, const bench_data *data, bench_peer *peer, blocks *s, void **out)
{
  const int type = peer_type(data->library_dtype);
  const bool single = s->rows == 1 && s->cols == 1;
  void *starts, *columns, *values;
  int64_t count = 0;
  cli_parallel(b->threads, s->high, take_row, s);
  s->starts = cli_alloc((size_t)s->high + 1, sizeof *s->starts);
  for (int64_t i = 0; i < s->high && count <= INT32_MAX; i++) {
    s->starts[i] = (int32_t)count;
    count += s->counts[i];
  }
  if (count > INT32_MAX) {
    snprintf(peer->error, sizeof peer->error, "B has too many nonzeros for its 32-bit indices");
    return false;
  }
  s->starts[s->high] = (int32_t)count;
  s->columns = cli_alloc((size_t)count + 1, sizeof *s->columns);
  s->values = cli_alloc((size_t)(count * s->rows * s->cols) + 1, sizeof *s->values);
  cli_parallel(b->threads, s->high, take_row, s);
  if (!peer_array(b, peer, s->starts, s->high + 1, ESMM_F32, &starts) ||
      !peer_array(b, peer, s->columns, count + 1, ESMM_F32, &columns) ||
      !peer_array(b, peer, s->values, count * s->rows * s->cols + 1, data->library_dtype, &values))
    return false;
  const int status = single ? library.f.create_csr(out, s->n, s->k, count, starts, columns, values, INDEX_32I,
                                                   INDEX_32I, BASE_ZERO, type)
                            : library.f.create_bsr(out, s->high, s->wide, count, s->rows, s->cols, starts, columns,
                                                   values, INDEX_32I, INDEX_32I, BASE_ZERO, type, ORDER_ROW);
  return status == 0 || peer_failed(peer, single ? "cusparseCreateCsr" : "cusparseCreateBsr", status);
}

static bool make_b(bench *b, const bench_data *data, bench_peer *peer, void **out)
{
  const bool single = strcmp(peer->name, "cusparse_csr") == 0;
  const esmm_format *format = &b->problem.prepare.format;
  blocks s = {.b = data->plain_b[0].m.data, .n = data->n, .k = data->k, .rows = 1, .cols = 1};
  if (!single) {
    s.rows = format->block_cols;
    s.cols = format->block_rows;
  }
  if (!single && !library.f.create_bsr) {
    snprintf(peer->error, sizeof peer->error, "this cuSPARSE has no cusparseCreateBsr");
    return false;
  }
  if (s.n % s.rows != 0 || s.k % s.cols != 0) {
    snprintf(peer->error, sizeof peer->error, "B is no whole number of blocks of %d x %d", format->block_rows,
             format->block_cols);
    return false;
  }
  s.high = s.n / s.rows;
  s.wide = s.k / s.cols;
  s.counts = cli_alloc((size_t)s.high, sizeof *s.counts);
  const bool made = make_sparse(b, data, peer, &s, out);
  free(s.counts);
  free(s.starts);
  free(s.columns);
  free(s.values);
  return made;
}

/* ---- the product ---- */

static bool call(bench_peer *peer)
{
  const spmm_state *s = peer->state;
  const float one = 1, zero = 0;
  const int status =
      library.f.multiply(library.handle, OP_N, OP_N, &one, s->sparse, s->a, &zero, s->c, R_32F, ALG_DEFAULT, s->buffer);
  return status == 0 || peer_failed(peer, "cusparseSpMM", status);
}

static void end(bench_peer *peer)
{
  const spmm_state *s = peer->state;
  if (s->sparse)
    (void)library.f.destroy_sparse(s->sparse);
  if (s->a)
    (void)library.f.destroy_dense(s->a);
  if (s->c)
    (void)library.f.destroy_dense(s->c);
}

static bool plan(bench *b, bench_peer *peer, spmm_state *s)
{
  const functions *f = &library.f;
  const float one = 1, zero = 0;
  size_t bytes = 0;
  int status =
      f->buffer_size(library.handle, OP_N, OP_N, &one, s->sparse, s->a, &zero, s->c, R_32F, ALG_DEFAULT, &bytes);
  if (status != 0)
    return peer_failed(peer, "cusparseSpMM_bufferSize", status);
  if (!peer_bytes(b, peer, bytes, &s->buffer))
    return false;
  status = f->preprocess(library.handle, OP_N, OP_N, &one, s->sparse, s->a, &zero, s->c, R_32F, ALG_DEFAULT, s->buffer);
  return status == 0 || peer_failed(peer, "cusparseSpMM_preprocess", status);
}

bool cusparse_make(bench *b, const bench_data *data, bench_peer *peer)
{
  const bench_gpu *g = &data->gpu;
  if (!open_library(peer))
    return false;
  spmm_state *s = peer->state = cli_alloc(1, sizeof *s);
  peer->call = call;
  peer->end = end;
  if (!peer_room(b, peer, data->m, data->n, g->plain_c.dtype, &peer->c) || !make_b(b, data, peer, &s->sparse))
    return false;
  int status = library.f.create_dense(&s->a, data->k, data->m, data->k, g->plain_a.data, peer_type(data->library_dtype),
                                      ORDER_COL);
  if (status == 0)
    status =
        library.f.create_dense(&s->c, data->n, data->m, data->n, peer->c.data, peer_type(g->plain_c.dtype), ORDER_COL);
  if (status != 0)
    return peer_failed(peer, "cusparseCreateDnMat", status);
  return plan(b, peer, s);
}
