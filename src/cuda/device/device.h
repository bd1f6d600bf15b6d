/*
 * device.h: what device.c and module.c share: a GPU as the whole process sees it, and a context's part of it.
 */
#ifndef ESMM_CUDA_DEVICE_H
#define ESMM_CUDA_DEVICE_H

#include "cuda/cuda.h"

#include <pthread.h>
#include <stdatomic.h>

#define MAX_MODULES 64
#define FUNCTION_SLOTS 512 /* a power of two, well above the functions there are */
#define MAX_RETIRED 128    /* scratch grows by half each time, so that it cannot be replaced as often as that */
#define MAX_ATTACHED 6

/*
 * One per GPU and process. Its primary context is retained and its modules are loaded while it has users: contexts and
 * device allocations. The lock guards everything but what open() sets before the first user gets it.
 */
typedef struct esmm_cuda_device {
  pthread_mutex_t lock;
  int users;
  CUdevice handle;
  CUcontext primary;
  esmm_cuda_properties properties;
  char name[128];
  bool pools;       /* stream-ordered allocation */
  atomic_bool lost; /* a sticky error: the primary context is dead */
  char lost_text[160];

  struct {
    const unsigned char *image;
    CUmodule module;
  } modules[MAX_MODULES];
  int module_count;
  struct {
    _Atomic(const esmm_cuda_function *) key; /* set behind the function: lookups need no lock */
    CUfunction function;
  } functions[FUNCTION_SLOTS];
} esmm_cuda_device;

struct esmm_cuda {
  esmm_cuda_device *device;
  bool uncooperative;             /* ESMM_COOPERATIVE=0: launches in clusters are not cooperative, too (module.c) */
  CUevent done;                   /* behind the last call's work */
  unsigned long long done_stream; /* id of the stream it was recorded on */
  bool done_recorded;
  bool done_owed;               /* work on the default stream has come since: it is recorded when needed */
  bool capturing;               /* between begin and end: this call's stream is being captured */
  bool inside;                  /* the same: the primary context is current, no need to ask */
  unsigned long long stream_id; /* the same: id of the call's stream, where it was asked for */
  bool stream_id_known;
  esmm_cuda_scope scope; /* the same: what end leaves */

  CUdeviceptr scratch;
  size_t scratch_bytes;
  bool scratch_captured;            /* a graph knows its address: it must stay where it is */
  CUdeviceptr retired[MAX_RETIRED]; /* outgrown, freed when the context closes */
  int retired_count;

  struct {
    const void *key;
    void *object;
    void (*release)(void *object);
  } attached[MAX_ATTACHED];
};

static inline struct esmm_cuda *esmm_cuda_state(const esmm_ctx *ctx) /* NULL while it is opened */
{
  return ctx->state;
}

/* ESMM_OK for CUDA_SUCCESS; else the status of that result, with the text "<what>: CUDA_ERROR_...". A result after
   which nothing works is remembered by the device. */
esmm_status esmm_cuda_check(esmm_ctx *ctx, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* module.c. The device's lock is held and its primary context current. */
esmm_status esmm_cuda_probe(esmm_ctx *ctx, esmm_cuda_device *device); /* can the embedded kernels run here? */
void esmm_cuda_unload(esmm_cuda_device *device);
bool esmm_cuda_has_kernels(void); /* the build had nvcc */

#endif
