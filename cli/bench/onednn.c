/*
 * onednn.c: oneDNN by dlopen, versions 2 and 3.
 *
 * Their interfaces differ in two places. A memory descriptor is the caller's struct in version 2, an object behind a
 * pointer in version 3: here it is a pointer, in version 2 to a buffer that is large enough. And version 2 describes a
 * product in two steps, version 3 in one. The numbers below are the same in both.
 *
 * Its threads are OpenMP's; the number is set through whatever runtime the library brought along. It is never closed:
 * those threads live in its code.
 */
#include "onednn.h"

#include "cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { DESC_BYTES = 4096, PRODUCT_BYTES = 16384 }; /* version 2's structs take 696 and 2800 */
enum { KIND_CPU = 1, TAG_ANY = 1, TAG_ROWS = 3, TYPE_F16 = 1, TYPE_BF16 = 2, TYPE_F32 = 3 };
enum { QUERY_KERNEL = 8, QUERY_WEIGHTS = 131, ARG_SRC = 1, ARG_DST = 17, ARG_WEIGHTS = 33 };

typedef struct argument {
  int what;
  void *memory;
} argument;

typedef struct version {
  int major, minor, patch;
} version;

struct onednn_library {
  void *handle, *engine, *stream;
  bool opaque; /* version 3 */
  int (*engine_create)(void **, int, size_t);
  int (*stream_create)(void **, void *, unsigned);
  int (*stream_wait)(void *);
  int (*desc_init)(void *, int, const int64_t *, int, int);                                              /* version 2 */
  int (*matmul_init)(void *, const void *, const void *, const void *, const void *);                    /* version 2 */
  int (*primitive_desc)(void **, const void *, const void *, void *, const void *);                      /* version 2 */
  int (*desc_create)(void **, int, const int64_t *, int, int);                                           /* version 3 */
  int (*desc_destroy)(void *);                                                                           /* version 3 */
  int (*matmul_create)(void **, void *, const void *, const void *, const void *, const void *, void *); /* version 3 */
  int (*reorder_create)(void **, const void *, void *, const void *, void *, const void *);
  int (*desc_query)(const void *, int, int, void *);
  const void *(*desc_query_md)(const void *, int, int);
  int (*primitive_create)(void **, const void *);
  int (*primitive_execute)(const void *, void *, int, const argument *);
  int (*primitive_destroy)(void *);
  int (*primitive_desc_destroy)(void *);
  int (*memory_create)(void **, const void *, void *, void *);
  int (*memory_set)(void *, void *);
  int (*memory_destroy)(void *);
};

struct onednn_product {
  onednn_library *library;
  void *rows_a, *rows_b, *rows_c, *any_b; /* memory descriptors */
  const void *best_b;                     /* the layout it wants, in the primitive's descriptor */
  void *desc, *primitive, *a, *c;
  char reason[128], kernel[96];
};

/* ---- opening ---- */

static bool find(void *handle, const char *name, void *function)
{
  void *symbol = dlsym(handle, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static bool find_all(onednn_library *x)
{
  void *h = x->handle;
  const bool second = find(h, "dnnl_memory_desc_init_by_tag", &x->desc_init) &&
                      find(h, "dnnl_matmul_desc_init", &x->matmul_init) &&
                      find(h, "dnnl_primitive_desc_create", &x->primitive_desc);
  const bool third = !second && find(h, "dnnl_memory_desc_create_with_tag", &x->desc_create) &&
                     find(h, "dnnl_memory_desc_destroy", &x->desc_destroy) &&
                     find(h, "dnnl_matmul_primitive_desc_create", &x->matmul_create);
  x->opaque = third;
  return (second || third) && find(h, "dnnl_engine_create", &x->engine_create) &&
         find(h, "dnnl_stream_create", &x->stream_create) && find(h, "dnnl_stream_wait", &x->stream_wait) &&
         find(h, "dnnl_reorder_primitive_desc_create", &x->reorder_create) &&
         find(h, "dnnl_primitive_desc_query", &x->desc_query) &&
         find(h, "dnnl_primitive_desc_query_md", &x->desc_query_md) &&
         find(h, "dnnl_primitive_create", &x->primitive_create) &&
         find(h, "dnnl_primitive_execute", &x->primitive_execute) &&
         find(h, "dnnl_primitive_destroy", &x->primitive_destroy) &&
         find(h, "dnnl_primitive_desc_destroy", &x->primitive_desc_destroy) &&
         find(h, "dnnl_memory_create", &x->memory_create) && find(h, "dnnl_memory_set_data_handle", &x->memory_set) &&
         find(h, "dnnl_memory_destroy", &x->memory_destroy);
}

onednn_library *onednn_open(int threads, char *title, size_t title_bytes)
{
  static const char *const files[] = {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so", NULL};
  const char *asked = getenv("ESMM_ONEDNN");
  onednn_library *x = cli_alloc(1, sizeof *x);
  void (*set_threads)(int);
  const version *(*get_version)(void);
  if (asked && asked[0] && strcmp(asked, "off") != 0) { /* off: no kernel of ours uses it, but it is compared with */
    x->handle = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
    if (!x->handle)
      cli_note("ESMM_ONEDNN: %s", dlerror());
  } else {
    for (const char *const *file = files; *file && !x->handle; file++)
      x->handle = dlopen(*file, RTLD_NOW | RTLD_LOCAL);
  }
  if (!x->handle) {
    free(x);
    return NULL;
  }
  if (!find_all(x) || !find(x->handle, "dnnl_version", &get_version) ||
      !find(x->handle, "omp_set_num_threads", &set_threads) || x->engine_create(&x->engine, KIND_CPU, 0) != 0 ||
      x->stream_create(&x->stream, x->engine, 1) != 0) {
    cli_note("oneDNN: no usable library, or one without OpenMP: left out");
    free(x);
    return NULL;
  }
  set_threads(threads);
  const version *v = get_version();
  snprintf(title, title_bytes, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
  return x;
}

/* ---- products ---- */

static int type_of(esmm_dtype dtype)
{
  return dtype == ESMM_BF16 ? TYPE_BF16 : dtype == ESMM_F16 ? TYPE_F16 : TYPE_F32;
}

static bool describe(const onednn_library *x, int64_t rows, int64_t cols, esmm_dtype dtype, int tag, void **desc)
{
  const int64_t dims[12] = {rows, cols}; /* version 2 takes an array of 12 */
  if (x->opaque)
    return x->desc_create(desc, 2, dims, type_of(dtype), tag) == 0;
  *desc = cli_alloc(1, DESC_BYTES);
  return x->desc_init(*desc, 2, dims, type_of(dtype), tag) == 0;
}

static void forget(const onednn_library *x, void *desc)
{
  if (x->opaque && desc)
    (void)x->desc_destroy(desc);
  else
    free(desc);
}

static bool create_desc(onednn_product *p)
{
  const onednn_library *x = p->library;
  if (x->opaque)
    return x->matmul_create(&p->desc, x->engine, p->rows_a, p->any_b, NULL, p->rows_c, NULL) == 0;
  void *matmul = cli_alloc(1, PRODUCT_BYTES);
  const bool made = x->matmul_init(matmul, p->rows_a, p->any_b, NULL, p->rows_c) == 0 &&
                    x->primitive_desc(&p->desc, matmul, NULL, x->engine, NULL) == 0;
  free(matmul);
  return made;
}

onednn_product *onednn_product_make(onednn_library *library, int64_t m, int64_t k, int64_t n, esmm_dtype dtype,
                                    esmm_dtype dtype_c)
{
  onednn_product *p = cli_alloc(1, sizeof *p);
  const onednn_library *x = p->library = library;
  const char *kernel = NULL;
  if (!describe(x, m, k, dtype, TAG_ROWS, &p->rows_a) || !describe(x, k, n, dtype, TAG_ROWS, &p->rows_b) ||
      !describe(x, k, n, dtype, TAG_ANY, &p->any_b) || !describe(x, m, n, dtype_c, TAG_ROWS, &p->rows_c) ||
      !create_desc(p)) {
    snprintf(p->reason, sizeof p->reason, "it cannot multiply %s to %s on this CPU", esmm_dtype_str(dtype),
             esmm_dtype_str(dtype_c));
    return p;
  }
  p->best_b = x->desc_query_md(p->desc, QUERY_WEIGHTS, 0);
  if (x->desc_query(p->desc, QUERY_KERNEL, 0, &kernel) == 0 && kernel)
    snprintf(p->kernel, sizeof p->kernel, "%s", kernel);
  if (!p->best_b || x->primitive_create(&p->primitive, p->desc) != 0 ||
      x->memory_create(&p->a, p->rows_a, x->engine, NULL) != 0 ||
      x->memory_create(&p->c, p->rows_c, x->engine, NULL) != 0)
    snprintf(p->reason, sizeof p->reason, "it failed to set up a product");
  return p;
}

const char *onednn_product_reason(const onednn_product *product)
{
  return product->reason;
}

const char *onednn_product_kernel(const onednn_product *product)
{
  return product->kernel;
}

void onednn_product_free(onednn_product *p)
{
  if (!p)
    return;
  const onednn_library *x = p->library;
  if (p->a)
    (void)x->memory_destroy(p->a);
  if (p->c)
    (void)x->memory_destroy(p->c);
  if (p->primitive)
    (void)x->primitive_destroy(p->primitive);
  if (p->desc)
    (void)x->primitive_desc_destroy(p->desc);
  forget(x, p->rows_a);
  forget(x, p->rows_b);
  forget(x, p->rows_c);
  forget(x, p->any_b);
  free(p);
}

static bool reorder(const onednn_product *p, void *from, void *to)
{
  const onednn_library *x = p->library;
  void *desc = NULL, *primitive = NULL;
  const argument arguments[] = {{ARG_SRC, from}, {ARG_DST, to}};
  const bool done = x->reorder_create(&desc, p->rows_b, x->engine, p->best_b, x->engine, NULL) == 0 &&
                    x->primitive_create(&primitive, desc) == 0 &&
                    x->primitive_execute(primitive, x->stream, 2, arguments) == 0 && x->stream_wait(x->stream) == 0;
  if (primitive)
    (void)x->primitive_destroy(primitive);
  if (desc)
    (void)x->primitive_desc_destroy(desc);
  return done;
}

void *onednn_weights_make(onednn_product *p, const void *b)
{
  const onednn_library *x = p->library;
  void *from = NULL, *to = NULL, *own, *allocate;
  memcpy(&own, &b, sizeof own);             /* its interface has no const; it only reads this */
  memset(&allocate, 0xff, sizeof allocate); /* its word for its own memory */
  bool done = x->memory_create(&from, p->rows_b, x->engine, own) == 0 &&
              x->memory_create(&to, p->best_b, x->engine, allocate) == 0 && reorder(p, from, to);
  if (from)
    (void)x->memory_destroy(from);
  if (!done && to) {
    (void)x->memory_destroy(to);
    to = NULL;
  }
  return to;
}

void onednn_weights_free(onednn_product *p, void *weights)
{
  if (weights)
    (void)p->library->memory_destroy(weights);
}

bool onednn_multiply(onednn_product *p, const void *a, void *weights, void *c)
{
  const onednn_library *x = p->library;
  void *own;
  memcpy(&own, &a, sizeof own);
  const argument arguments[] = {{ARG_SRC, p->a}, {ARG_WEIGHTS, weights}, {ARG_DST, p->c}};
  return x->memory_set(p->a, own) == 0 && x->memory_set(p->c, c) == 0 &&
         x->primitive_execute(p->primitive, x->stream, 3, arguments) == 0 && x->stream_wait(x->stream) == 0;
}
