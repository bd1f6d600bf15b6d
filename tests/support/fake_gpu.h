/*
 * fake_gpu.h: contexts and products on the driver of fake_cuda.c, for the programs that test what happens when it
 * fails.
 *
 * Such a program starts itself again with the fake driver's directory in LD_LIBRARY_PATH.
 */
#ifndef ESMM_TEST_FAKE_GPU_H
#define ESMM_TEST_FAKE_GPU_H

#include "fake_cuda.h"
#include "harness.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODE "ESMM_TEST_FAKE_CUDA"
#define TEST(name) cmocka_unit_test_setup(name, set_up)

enum { NO_CUBLAS = 1 }; /* CUBLAS_STATUS_NOT_INITIALIZED */

static fake_cuda_state *fake;
static int (*get_current)(void **context);

/* ---- contexts whose host memory is counted ---- */

typedef struct meter {
  esmm_allocator allocator;
  int64_t calls, fail_at, live;
  bool failed;
} meter;

static inline void *meter_alloc(void *user, size_t bytes, size_t align)
{
  meter *m = user;
  if (++m->calls == m->fail_at) {
    m->failed = true;
    return NULL;
  }
  void *p = NULL;
  if (posix_memalign(&p, align, bytes) != 0)
    return NULL;
  memset(p, 0xcd, bytes);
  m->live++;
  return p;
}

static inline void meter_free(void *user, void *p, size_t bytes)
{
  (void)bytes;
  ((meter *)user)->live--;
  free(p);
}

static inline esmm_status create(meter *m, const char *device, esmm_ctx **ctx, char *text, size_t text_bytes)
{
  m->allocator = (esmm_allocator){.alloc = meter_alloc, .free = meter_free, .user = m};
  esmm_ctx_opts opts = {.size = sizeof opts,
                        .device = device,
                        .threads = 1,
                        .allocator = &m->allocator,
                        .no_tuning_cache = 1,
                        .error = text,
                        .error_size = text_bytes};
  text[0] = '\0';
  return esmm_ctx_create(ctx, &opts);
}

static inline esmm_ctx *must_create(meter *m)
{
  char text[512];
  esmm_ctx *ctx = NULL;
  if (create(m, "cuda", &ctx, text, sizeof text) != ESMM_OK)
    fail_msg("no context of the fake GPU: %s", text);
  return ctx;
}

/* ---- the state of the fake driver ---- */

static inline void reset(void)
{
  fake->devices = 1;
  fake->sm = 90;
  fake->first_sm = 0;
  fake->cublas = NO_CUBLAS;
  fake->pools = 1;
  fake->memory = (size_t)1 << 30;
  fake->fail_at = 0;
  fake->fail_call = fake->failed = NULL;
  fake->result = fake->sticky = 0;
  fake->captured = NULL;
  fake->kernel = NULL;
  fake->blocking = fake->running = 0;
  fake->takes = NULL;
  fake->host = fake->gpu = fake->per_call = 0;
  fake->mistakes = 0;
}

/* Everything was given back, no call was made that a real driver would not forgive, and no context was left current. */
static inline void check_balance(const char *what)
{
  void *current = NULL;
  fake->sticky = 0;
  fake->fail_at = 0;
  (void)get_current(&current);
  if (fake->blocks || fake->bytes || fake->events || fake->modules || fake->retained || fake->handles || fake->pinned ||
      current)
    fail_msg("%s: %lld blocks with %lld bytes, %lld events, %lld modules, %lld contexts, %lld handles, %lld pinned are "
             "left%s",
             what, (long long)fake->blocks, (long long)fake->bytes, (long long)fake->events, (long long)fake->modules,
             (long long)fake->retained, (long long)fake->handles, (long long)fake->pinned,
             current ? ", and a context is still current" : "");
  if (fake->relaxed)
    fail_msg("%s: the capture mode of %lld threads is still the relaxed one", what, (long long)fake->relaxed);
  if (fake->mistakes)
    fail_msg("%s: %lld calls that are wrong, the last: %s", what, (long long)fake->mistakes, fake->mistake);
}

static inline int set_up(void **state)
{
  (void)state;
  reset();
  return 0;
}

/* ---- operands and products ---- */

typedef struct data {
  esmm_matrix a, b, c;
} data;

static inline data make_data_of(esmm_dtype a, esmm_dtype b)
{
  data d = {.a = th_matrix_alloc(40, 96, a), .b = th_matrix_alloc(96, 72, b)};
  d.c = th_matrix_alloc(40, 72, ESMM_F32);
  th_fill(&d.a, 1, 0.4, true);
  th_fill(&d.b, 2, 0.7, true);
  return d;
}

static inline data make_data(void)
{
  return make_data_of(ESMM_F32, ESMM_F32);
}

static inline void free_data(data *d)
{
  free(d->a.data);
  free(d->b.data);
  free(d->c.data);
}

static inline esmm_status place(esmm_ctx *ctx, const esmm_matrix *host, esmm_matrix *device)
{
  *device = *host;
  device->place = ESMM_DEVICE;
  return esmm_memory_alloc(ctx, (size_t)(host->rows * host->cols) * sizeof(float), &device->data);
}

/* Products of device matrices of m rows, on a stream. */
typedef struct bench {
  meter m;
  esmm_ctx *ctx;
  esmm_weights *w;
  esmm_matrix a, c;
  data d;
} bench;

static inline void bench_start(bench *b)
{
  *b = (bench){.d = make_data()};
  b->ctx = must_create(&b->m);
  assert_int_equal(esmm_prepare(b->ctx, &b->d.b, NULL, &b->w), ESMM_OK);
  assert_int_equal(place(b->ctx, &b->d.a, &b->a), ESMM_OK);
  assert_int_equal(place(b->ctx, &b->d.c, &b->c), ESMM_OK);
}

static inline esmm_status bench_run(bench *b, int64_t m, void *stream)
{
  esmm_matrix a = b->a, c = b->c;
  a.rows = c.rows = m;
  return th_matmul_on(b->ctx, stream, &a, b->w, &c, NULL);
}

static inline void bench_stop(bench *b, const char *what)
{
  esmm_memory_free(b->ctx, b->a.data);
  esmm_memory_free(b->ctx, b->c.data);
  esmm_weights_free(b->w);
  esmm_ctx_free(b->ctx);
  assert_int_equal(b->m.live, 0);
  free_data(&b->d);
  check_balance(what);
}

/* ---- starting ---- */

static inline void start_again(const char *directory, const char *mode)
{
  static char self[] = "/proc/self/exe";
  char *const arguments[] = {self, NULL};
  setenv("LD_LIBRARY_PATH", directory, 1);
  setenv(MODE, mode, 1);
  setenv("ESMM_CUBLAS", "libcuda.so.1", 1); /* the fake's: a real cuBLAS would want a real driver */
  execv(self, arguments);
  _exit(127);
}

static inline void open_fake(void)
{
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  void *state = library ? dlsym(library, "fake_cuda") : NULL;
  void *current = library ? dlsym(library, "cuCtxGetCurrent") : NULL;
  if (!state || !current) {
    fprintf(stderr, "the fake driver is not there: %s\n", dlerror());
    exit(1);
  }
  fake = state;
  memcpy(&get_current, &current, sizeof get_current);
}

/* Starts the program again with the fake driver in its way, and finds that. What mode it is: "with", or "without" where
   start_again was told so. */
static inline const char *use_fake(char **argv)
{
  th_clean_environment();
  const char *mode = getenv(MODE);
  if (!mode) {
    char directory[4096];
    const char *slash = strrchr(argv[0], '/');
    snprintf(directory, sizeof directory, "%.*s/fake", slash ? (int)(slash - argv[0]) : 1, slash ? argv[0] : ".");
    start_again(directory, "with");
    return "";
  }
  if (strcmp(mode, "with") == 0)
    open_fake();
  return mode;
}

/* Was nvcc there when the library was built? The driver must not start yet: that it cannot is the first thing tested.
 */
static inline bool has_kernels(void)
{
  meter m = {0};
  char text[512];
  esmm_ctx *ctx = NULL;
  fake->devices = 0;
  (void)create(&m, "cuda", &ctx, text, sizeof text);
  return !strstr(text, "no GPU kernels");
}

/* Stands for a program's tests where there is nothing to launch. */
static inline void no_kernels(void **state)
{
  (void)state;
  print_message("# this build has no GPU kernels\n");
  skip();
}

#endif
