/*
 * cusparselt.c: cuSPARSELt by dlopen: B of 2:4 as its structured operand.
 *
 * It multiplies C' [n,m] = B' [n,k] A' [k,m], B' structured and along k in memory, which is its fastest layout; C' by
 * columns is our C by rows, and A' is our A transposed by an option. So nothing of ours is moved. The algorithm is the
 * fastest that its own search finds for this product. It wants multiples of 8 rows: A is then a copy with rows of
 * zeros, and the extra rows of C are ignored.
 *
 * Values are those of cusparseLt.h from version 0.5 on; older ones number the types of sums otherwise, and are refused.
 * Its structs are opaque: the largest was 11024 bytes.
 */
#include "peers.h"

#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

enum { OP_N = 0, OP_T = 1, ORDER_COL = 1, ORDER_ROW = 2, SPARSITY_50 = 0, COMPUTE_32F = 2, ALG_DEFAULT = 0 };
enum { ALIGNMENT = 16, FIRST_VERSION = 500, ROWS = 8 };

typedef struct opaque {
  alignas(64) unsigned char bytes[16384];
} opaque;

typedef struct functions {
  int (*init)(opaque *);
  int (*version)(const opaque *, int *);
  int (*dense)(const opaque *, opaque *, int64_t, int64_t, int64_t, uint32_t, int, int);
  int (*structured)(const opaque *, opaque *, int64_t, int64_t, int64_t, uint32_t, int, int, int);
  int (*descriptor)(const opaque *, opaque *, int, int, const opaque *, const opaque *, const opaque *, const opaque *,
                    int);
  int (*selection)(const opaque *, opaque *, const opaque *, int);
  int (*plan)(const opaque *, opaque *, const opaque *, const opaque *);
  int (*workspace)(const opaque *, const opaque *, size_t *);
  int (*check)(const opaque *, const opaque *, const void *, int *, void *);
  int (*compressed_size)(const opaque *, const opaque *, size_t *, size_t *);
  int (*compress)(const opaque *, const opaque *, const void *, void *, void *, void *);
  int (*search)(const opaque *, opaque *, const void *, const void *, const void *, const void *, const void *, void *,
                void *, void **, int32_t);
  int (*matmul)(const opaque *, const opaque *, const void *, const void *, const void *, const void *, const void *,
                void *, void *, void **, int32_t);
  int (*plan_destroy)(const opaque *);
  int (*descriptor_destroy)(const opaque *);
} functions;

/* One process has one device: the library is opened once, and never closed (see cublas.c). */
static struct {
  void *file;
  opaque handle;
  functions f;
} library;

typedef struct lt_state {
  opaque weights, a, c, product, selection, plan;
  int made; /* descriptors of matrices */
  bool planned;
  const void *near_a;
  void *compressed, *workspace;
} lt_state;

static bool open_library(bench_peer *peer)
{
  static const char *const files[] = {"libcusparseLt.so.0", "libcusparseLt.so",
                                      "/usr/local/cuda/lib64/libcusparseLt.so.0", NULL};
  functions *f = &library.f;
  int version = 0;
  if (library.file)
    return true;
  void *file = peer_open(peer, "ESMM_CUSPARSELT", files);
  if (!file)
    return false;
  if (!peer_find(peer, file, "cusparseLtInit", &f->init) ||
      !peer_find(peer, file, "cusparseLtGetVersion", &f->version) ||
      !peer_find(peer, file, "cusparseLtDenseDescriptorInit", &f->dense) ||
      !peer_find(peer, file, "cusparseLtStructuredDescriptorInit", &f->structured) ||
      !peer_find(peer, file, "cusparseLtMatmulDescriptorInit", &f->descriptor) ||
      !peer_find(peer, file, "cusparseLtMatmulAlgSelectionInit", &f->selection) ||
      !peer_find(peer, file, "cusparseLtMatmulPlanInit", &f->plan) ||
      !peer_find(peer, file, "cusparseLtMatmulGetWorkspace", &f->workspace) ||
      !peer_find(peer, file, "cusparseLtSpMMAPruneCheck", &f->check) ||
      !peer_find(peer, file, "cusparseLtSpMMACompressedSize", &f->compressed_size) ||
      !peer_find(peer, file, "cusparseLtSpMMACompress", &f->compress) ||
      !peer_find(peer, file, "cusparseLtMatmulSearch", &f->search) ||
      !peer_find(peer, file, "cusparseLtMatmul", &f->matmul) ||
      !peer_find(peer, file, "cusparseLtMatmulPlanDestroy", &f->plan_destroy) ||
      !peer_find(peer, file, "cusparseLtMatDescriptorDestroy", &f->descriptor_destroy))
    return false;
  int status = f->init(&library.handle);
  if (status != 0)
    return peer_failed(peer, "cusparseLtInit", status);
  status = f->version(&library.handle, &version);
  if (status != 0)
    return peer_failed(peer, "cusparseLtGetVersion", status);
  if (version < FIRST_VERSION) {
    snprintf(peer->error, sizeof peer->error, "its version %d is too old: 0.5 or newer is needed", version);
    return false;
  }
  library.file = file;
  return true;
}

/* Matrices, the product and a plan with the library's first guess. */
static bool describe(bench_peer *peer, lt_state *s, int64_t m, int64_t k, int64_t n, int type, int type_c)
{
  const functions *f = &library.f;
  const opaque *h = &library.handle;
  int status = f->structured(h, &s->weights, n, k, k, ALIGNMENT, type, ORDER_ROW, SPARSITY_50);
  s->made += status == 0;
  if (status == 0)
    status = f->dense(h, &s->a, m, k, k, ALIGNMENT, type, ORDER_ROW);
  s->made += status == 0;
  if (status == 0)
    status = f->dense(h, &s->c, n, m, n, ALIGNMENT, type_c, ORDER_COL);
  s->made += status == 0;
  if (status != 0)
    return peer_failed(peer, "a matrix's descriptor", status);
  status = f->descriptor(h, &s->product, OP_N, OP_T, &s->weights, &s->a, &s->c, &s->c, COMPUTE_32F);
  if (status != 0)
    return peer_failed(peer, "cusparseLtMatmulDescriptorInit", status);
  status = f->selection(h, &s->selection, &s->product, ALG_DEFAULT);
  if (status != 0)
    return peer_failed(peer, "cusparseLtMatmulAlgSelectionInit", status);
  status = f->plan(h, &s->plan, &s->product, &s->selection);
  s->planned = status == 0;
  return s->planned || peer_failed(peer, "cusparseLtMatmulPlanInit", status);
}

/* Does it find 2:4 in them? Then its own form of them. */
static bool compress(bench *b, bench_peer *peer, lt_state *s, const esmm_matrix *weights)
{
  const functions *f = &library.f;
  const opaque *h = &library.handle;
  size_t bytes = 0, buffer_bytes = 0, workspace = 0;
  void *buffer, *near_valid;
  float word = 0;
  int valid = 1;
  const esmm_matrix host = {.data = &word, .rows = 1, .cols = 1, .ld = 1, .dtype = ESMM_F32};
  if (!peer_array(b, peer, &word, 1, ESMM_F32, &near_valid))
    return false;
  int status = f->check(h, &s->product, weights->data, near_valid, NULL);
  if (status != 0)
    return peer_failed(peer, "cusparseLtSpMMAPruneCheck", status);
  esmm_matrix near = peer->owned[peer->owned_count - 1], back = host;
  if (esmm_matrix_copy(b->ctx, &near, &back) != ESMM_OK) {
    snprintf(peer->error, sizeof peer->error, "%.200s", esmm_ctx_error(b->ctx));
    return false;
  }
  memcpy(&valid, &word, sizeof valid);
  if (valid != 0) {
    snprintf(peer->error, sizeof peer->error, "it does not find 2:4 in B");
    return false;
  }
  status = f->compressed_size(h, &s->plan, &bytes, &buffer_bytes);
  if (status != 0)
    return peer_failed(peer, "cusparseLtSpMMACompressedSize", status);
  if (!peer_bytes(b, peer, bytes, &s->compressed) || !peer_bytes(b, peer, buffer_bytes, &buffer))
    return false;
  status = f->compress(h, &s->plan, weights->data, s->compressed, buffer, NULL);
  if (status != 0)
    return peer_failed(peer, "cusparseLtSpMMACompress", status);
  status = f->workspace(h, &s->plan, &workspace);
  if (status != 0)
    return peer_failed(peer, "cusparseLtMatmulGetWorkspace", status);
  /* the search may find an algorithm that wants more than the first guess */
  return peer_bytes(b, peer, workspace > ((size_t)64 << 20) ? workspace : (size_t)64 << 20, &s->workspace);
}

static bool call(bench_peer *peer)
{
  lt_state *s = peer->state;
  const float one = 1, zero = 0;
  const int status = library.f.matmul(&library.handle, &s->plan, &one, s->compressed, s->near_a, &zero, peer->c.data,
                                      peer->c.data, s->workspace, NULL, 0);
  return status == 0 || peer_failed(peer, "cusparseLtMatmul", status);
}

static void end(bench_peer *peer)
{
  const lt_state *s = peer->state;
  const opaque *const matrices[] = {&s->weights, &s->a, &s->c};
  if (s->planned)
    (void)library.f.plan_destroy(&s->plan);
  for (int i = 0; i < s->made; i++)
    (void)library.f.descriptor_destroy(matrices[i]);
}

/* A with rows of zeros below it, where it has to have more. */
static bool pad_rows(bench *b, bench_peer *peer, const esmm_matrix *a, int64_t rows, const void **out)
{
  esmm_matrix padded;
  *out = a->data;
  if (rows == a->rows)
    return true;
  float *zeros = cli_alloc((size_t)(rows * a->cols), sizeof *zeros);
  const esmm_matrix host = {.data = zeros, .rows = rows, .cols = a->cols, .ld = a->cols, .dtype = ESMM_F32};
  bool done = peer_room(b, peer, rows, a->cols, a->dtype, &padded);
  done = done && esmm_matrix_copy(b->ctx, &host, &padded) == ESMM_OK;
  free(zeros);
  if (!done)
    return false;
  *out = padded.data;
  padded.rows = a->rows;
  return esmm_matrix_copy(b->ctx, a, &padded) == ESMM_OK;
}

bool cusparselt_make(bench *b, const bench_data *data, bench_peer *peer)
{
  const esmm_format *format = &b->problem.prepare.format;
  const bench_gpu *g = &data->gpu;
  const int64_t rows = (data->m + ROWS - 1) / ROWS * ROWS;
  const float one = 1, zero = 0;
  esmm_matrix weights;
  if (format->keep != 2 || format->group != 4 || data->library_dtype == ESMM_F32) {
    snprintf(peer->error, sizeof peer->error, "it is shown for 2:4 in bf16 and f16 only");
    return false;
  }
  if (!open_library(peer))
    return false;
  lt_state *s = peer->state = aligned_alloc(64, sizeof *s);
  if (!s)
    return false;
  memset(s, 0, sizeof *s);
  peer->call = call;
  peer->end = end;
  if (!peer_matrix(b, peer, &g->plain_b, ESMM_COL_MAJOR, &weights) ||
      !peer_room(b, peer, rows, data->n, g->plain_c.dtype, &peer->c) ||
      !pad_rows(b, peer, &g->plain_a, rows, &s->near_a) ||
      !describe(peer, s, rows, data->k, data->n, peer_type(data->library_dtype), peer_type(g->plain_c.dtype)) ||
      !compress(b, peer, s, &weights))
    return false;
  const int status = library.f.search(&library.handle, &s->plan, &one, s->compressed, s->near_a, &zero, peer->c.data,
                                      peer->c.data, s->workspace, NULL, 0);
  return status == 0 || peer_failed(peer, "cusparseLtMatmulSearch", status);
}
