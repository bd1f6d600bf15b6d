/*
 * peers.h: libraries for sparse weights that the benchmark shows beside ours, opened at run time and never linked.
 *
 * A peer gets its best case: its own format of B, made beforehand and not timed, A and C where they are. It works on
 * the default stream in the context that is current, the device's primary one, as cuBLAS does (cublas.h).
 */
#ifndef ESMM_CLI_PEERS_H
#define ESMM_CLI_PEERS_H

#include "bench.h"

struct bench_peer {
  char name[32];   /* "cusparselt", "cusparse_bsr": for records */
  char error[256]; /* why it cannot, or what went wrong last; "": nothing */
  esmm_matrix c;   /* its result: row-major, at least m rows */
  void *state;     /* the library's own */
  bool (*call)(struct bench_peer *peer);
  void (*end)(struct bench_peer *peer); /* of state; NULL: nothing to end */
  esmm_matrix owned[12];                /* memory of the device */
  int owned_count;
};

/* Both say in peer->error why not. state is one block of memory, freed after end(). */
bool cusparselt_make(bench *b, const bench_data *data, bench_peer *peer);
bool cusparse_make(bench *b, const bench_data *data, bench_peer *peer);

/* ---- bench_peers.c: what both need ---- */

/* Of library_types.h; -1 for an unknown dtype. */
int peer_type(esmm_dtype dtype);
/* Opens the file that `variable` names, or the first of `files` (up to NULL); NULL and peer->error if there is none. */
void *peer_open(bench_peer *peer, const char *variable, const char *const *files);
/* false and peer->error where the file lacks it. */
bool peer_find(bench_peer *peer, void *file, const char *name, void *function);
bool peer_failed(bench_peer *peer, const char *call, int status); /* false; peer->error says so */
/* Memory of the device, freed with the peer. */
bool peer_bytes(bench *b, bench_peer *peer, size_t bytes, void **out);
/* An array of the host's in the device's memory, in another dtype; int32_t goes as fp32. */
bool peer_array(bench *b, bench_peer *peer, const void *from, int64_t count, esmm_dtype as, void **out);
bool peer_matrix(bench *b, bench_peer *peer, const esmm_matrix *from, esmm_order order, esmm_matrix *out);
bool peer_room(bench *b, bench_peer *peer, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_matrix *out);

#endif
