/*
 * bench_peers.c: --peers: which libraries for sparse weights take part, and the code they share.
 *
 * All are optional: a library that cannot be opened, or refuses the product, is a line below the table.
 */
#include "peers.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* ---- what both need ---- */

int peer_type(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return 0; /* CUDA_R_32F */
  case ESMM_BF16:
    return 14; /* CUDA_R_16BF */
  case ESMM_F16:
    return 2; /* CUDA_R_16F */
  }
  return -1;
}

void *peer_open(bench_peer *peer, const char *variable, const char *const *files)
{
  const char *asked = getenv(variable);
  void *file = NULL;
  if (asked && asked[0]) {
    file = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
    if (!file)
      snprintf(peer->error, sizeof peer->error, "%s: %s", variable, dlerror());
    return file;
  }
  for (int i = 0; files[i] && !file; i++)
    file = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
  if (!file)
    snprintf(peer->error, sizeof peer->error, "there is no %s (%s may name a file)", files[0], variable);
  return file;
}

bool peer_find(bench_peer *peer, void *file, const char *name, void *function)
{
  void *symbol = dlsym(file, name);
  memcpy(function, &symbol, sizeof symbol);
  if (!symbol)
    snprintf(peer->error, sizeof peer->error, "it has no %s", name);
  return symbol != NULL;
}

bool peer_failed(bench_peer *peer, const char *call, int status)
{
  snprintf(peer->error, sizeof peer->error, "%s gave status %d%s", call, status, status == 10 ? ", not supported" : "");
  return false;
}

static bool own(bench *b, bench_peer *peer, int status, const esmm_matrix *m)
{
  if (status == CLI_GO)
    peer->owned[peer->owned_count++] = *m;
  else
    snprintf(peer->error, sizeof peer->error, "%.200s", esmm_ctx_error(b->ctx));
  return status == CLI_GO;
}

bool peer_room(bench *b, bench_peer *peer, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_matrix *out)
{
  return own(b, peer, cli_device_alloc(b->ctx, peer->name, rows, cols, dtype, ESMM_ROW_MAJOR, out), out);
}

bool peer_bytes(bench *b, bench_peer *peer, size_t bytes, void **out)
{
  esmm_matrix room;
  const bool done = peer_room(b, peer, 1, (int64_t)(bytes / sizeof(float)) + 1, ESMM_F32, &room);
  *out = done ? room.data : NULL;
  return done;
}

bool peer_matrix(bench *b, bench_peer *peer, const esmm_matrix *from, esmm_order order, esmm_matrix *out)
{
  return own(b, peer, cli_device_copy(b->ctx, peer->name, from, from->dtype, order, out), out);
}

bool peer_array(bench *b, bench_peer *peer, const void *from, int64_t count, esmm_dtype as, void **out)
{
  void *data; /* only read: a matrix has no const */
  memcpy(&data, &from, sizeof data);
  const esmm_matrix host = {.data = data, .rows = 1, .cols = count, .ld = count, .dtype = ESMM_F32};
  esmm_matrix near;
  const bool done = own(b, peer, cli_device_copy(b->ctx, peer->name, &host, as, ESMM_ROW_MAJOR, &near), &near);
  *out = done ? near.data : NULL;
  return done;
}

/* ---- which take part ---- */

static bench_peer *add(bench_data *data, const char *name)
{
  bench_peer *peer = cli_alloc(1, sizeof *peer);
  snprintf(peer->name, sizeof peer->name, "%s", name);
  data->peers[data->peer_count++] = peer;
  return peer;
}

static void settle(bench_peer *peer, bool made)
{
  char why[sizeof peer->error];
  snprintf(why, sizeof why, "%s", peer->error);
  if (made)
    peer->error[0] = '\0';
  else
    snprintf(peer->error, sizeof peer->error, "%s is left out: %.200s", peer->name, why[0] ? why : "it failed");
}

void bench_peers_make(bench *b, bench_data *data)
{
  const esmm_format *format = &b->problem.prepare.format;
  if (!b->peers)
    return;
  if (!b->gpu || b->library_count == 0) {
    settle(add(data, "peers"), false);
    snprintf(data->peers[0]->error, sizeof data->peers[0]->error, "--peers are left out: they need %s",
             b->gpu ? "cuBLAS beside them" : "a GPU");
    return;
  }
  if (format->kind == ESMM_FORMAT_NM) {
    bench_peer *peer = add(data, "cusparselt");
    settle(peer, cusparselt_make(b, data, peer));
  }
  if (format->kind == ESMM_FORMAT_BSR) {
    bench_peer *peer = add(data, "cusparse_bsr");
    settle(peer, cusparse_make(b, data, peer));
  }
  if (format->kind != ESMM_FORMAT_NM && data->info.element_density < 1) {
    bench_peer *peer = add(data, "cusparse_csr");
    settle(peer, cusparse_make(b, data, peer));
  }
}

void bench_peers_free(bench *b, bench_data *data)
{
  for (int i = 0; i < data->peer_count; i++) {
    bench_peer *peer = data->peers[i];
    (void)esmm_ctx_synchronize(b->ctx);
    if (peer->end)
      peer->end(peer);
    for (int j = 0; j < peer->owned_count; j++)
      cli_device_free(b->ctx, &peer->owned[j]);
    free(peer->state);
    free(peer);
  }
  data->peer_count = 0;
}

esmm_status bench_peer_call(bench_peer *peer)
{
  if (peer->call(peer))
    return ESMM_OK;
  settle(peer, false);
  return ESMM_ERR_DRIVER_CALL;
}

const char *bench_peer_name(const bench_peer *peer)
{
  return peer->name;
}

const char *bench_peer_reason(const bench_peer *peer)
{
  return peer->error;
}

const esmm_matrix *bench_peer_result(const bench_peer *peer)
{
  return &peer->c;
}
