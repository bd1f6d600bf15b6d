/*
 * onednn.c: the few calls of oneDNN that onednn_bf16 and onednn_f32 make, of versions 2 and 3.
 *
 * A memory descriptor is the caller's struct in version 2, an object behind a pointer in version 3: here it is a
 * pointer, in version 2 to a buffer that is large enough. Version 2 describes a product in two steps, version 3 in one.
 * The numbers below are the same in both.
 *
 * The library compiles a product when it is first asked for, which takes some tenths of a millisecond. So parts are
 * kept for the whole process, and the least recently used make room.
 */
#include "cpu/onednn.h"

#include "convert.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { DESC_BYTES = 4096, PRODUCT_BYTES = 16384 }; /* version 2's structs take 696 and 2800 */
#define LEAST_DENSITY 0.3 /* of B's panels: where fewer k's are alive, skipping the others wins */

enum { KIND_CPU = 1, TAG_ANY = 1, TYPE_BF16 = 2, TYPE_F32 = 3, SCRATCH_OF_CALLER = 1, IN_ORDER = 1 };
enum { QUERY_KERNEL = 8, QUERY_WEIGHTS = 131, QUERY_SCRATCH = 136 };
enum { ARG_SRC = 1, ARG_DST = 17, ARG_WEIGHTS = 33, ARG_SCRATCH = 80 };
enum { PART_SETS = 32, PART_WAYS = 16, LAYOUT_ROWS = 256 };

typedef struct argument {
  int what;
  void *memory;
} argument;

static struct {
  void *engine;
  bool opaque;     /* version 3 */
  uint64_t number; /* of the version; 0: it does not say */
  int (*engine_create)(void **, int, size_t);
  int (*stream_create)(void **, void *, unsigned);
  int (*stream_wait)(void *);
  int (*stream_destroy)(void *);
  int (*desc_tag)(void *, int, const int64_t *, int, int);                                               /* version 2 */
  int (*desc_strides)(void *, int, const int64_t *, int, const int64_t *);                               /* version 2 */
  int (*matmul_init)(void *, const void *, const void *, const void *, const void *);                    /* version 2 */
  int (*primitive_desc)(void **, const void *, const void *, void *, const void *);                      /* version 2 */
  int (*desc_create_tag)(void **, int, const int64_t *, int, int);                                       /* version 3 */
  int (*desc_create_strides)(void **, int, const int64_t *, int, const int64_t *);                       /* version 3 */
  int (*desc_destroy)(void *);                                                                           /* version 3 */
  int (*matmul_create)(void **, void *, const void *, const void *, const void *, const void *, void *); /* version 3 */
  size_t (*desc_size)(const void *);
  int (*attr_create)(void **);
  int (*attr_scratch)(void *, int);
  int (*attr_destroy)(void *);
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
  void (*set_threads)(int);
  int (*threads)(void);
} dnnl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER; /* taken before calls_lock, where both are */
static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *missing; /* NULL: it is there */
/* It failed to make a part of that dtype: for good, so that a call's scratch suits what runs then. */
static atomic_bool given_up[ESMM_BF16 + 1];
static atomic_bool no_columns[ESMM_BF16 + 1]; /* the same of a part that has not all columns */

/* ---- opening ---- */

/* ISO C has no conversion from an object's address to a function's; POSIX promises that it works. */
static bool find(void *library, const char *symbol, void *function)
{
  void *address = dlsym(library, symbol);
  memcpy(function, &address, sizeof address);
  return address != NULL;
}

static bool find_version(void *l)
{
  dnnl.opaque = !find(l, "dnnl_memory_desc_init_by_tag", &dnnl.desc_tag);
  if (!dnnl.opaque)
    return find(l, "dnnl_memory_desc_init_by_strides", &dnnl.desc_strides) &&
           find(l, "dnnl_matmul_desc_init", &dnnl.matmul_init) &&
           find(l, "dnnl_primitive_desc_create", &dnnl.primitive_desc);
  return find(l, "dnnl_memory_desc_create_with_tag", &dnnl.desc_create_tag) &&
         find(l, "dnnl_memory_desc_create_with_strides", &dnnl.desc_create_strides) &&
         find(l, "dnnl_memory_desc_destroy", &dnnl.desc_destroy) &&
         find(l, "dnnl_matmul_primitive_desc_create", &dnnl.matmul_create);
}

/* Three numbers, each below a thousand. */
static uint64_t read_version(void *l)
{
  const int *(*version)(void);
  const int *numbers = find(l, "dnnl_version", &version) ? version() : NULL;
  return numbers ? (uint64_t)numbers[0] * 1000000 + (uint64_t)numbers[1] * 1000 + (uint64_t)numbers[2] : 0;
}

static bool find_all(void *l)
{
  return find_version(l) && find(l, "dnnl_engine_create", &dnnl.engine_create) &&
         find(l, "dnnl_stream_create", &dnnl.stream_create) && find(l, "dnnl_stream_wait", &dnnl.stream_wait) &&
         find(l, "dnnl_stream_destroy", &dnnl.stream_destroy) &&
         find(l, "dnnl_memory_desc_get_size", &dnnl.desc_size) &&
         find(l, "dnnl_primitive_attr_create", &dnnl.attr_create) &&
         find(l, "dnnl_primitive_attr_set_scratchpad_mode", &dnnl.attr_scratch) &&
         find(l, "dnnl_primitive_attr_destroy", &dnnl.attr_destroy) &&
         find(l, "dnnl_reorder_primitive_desc_create", &dnnl.reorder_create) &&
         find(l, "dnnl_primitive_desc_query", &dnnl.desc_query) &&
         find(l, "dnnl_primitive_desc_query_md", &dnnl.desc_query_md) &&
         find(l, "dnnl_primitive_create", &dnnl.primitive_create) &&
         find(l, "dnnl_primitive_execute", &dnnl.primitive_execute) &&
         find(l, "dnnl_primitive_destroy", &dnnl.primitive_destroy) &&
         find(l, "dnnl_primitive_desc_destroy", &dnnl.primitive_desc_destroy) &&
         find(l, "dnnl_memory_create", &dnnl.memory_create) &&
         find(l, "dnnl_memory_set_data_handle", &dnnl.memory_set) &&
         find(l, "dnnl_memory_destroy", &dnnl.memory_destroy);
}

static void lock_parts(void)
{
  (void)pthread_mutex_lock(&parts_lock);
}

static void unlock_parts(void)
{
  (void)pthread_mutex_unlock(&parts_lock);
}

static void lock_calls(void)
{
  (void)pthread_mutex_lock(&calls_lock);
}

static void unlock_calls(void)
{
  (void)pthread_mutex_unlock(&calls_lock);
}

/* So that a child finds them open. */
static void before_fork(void)
{
  lock_parts();
  lock_calls();
}

static void after_fork(void)
{
  unlock_calls();
  unlock_parts();
}

/* Of the OpenMP that the library calls: the process's own comes before the one it was linked to. */
static bool find_openmp(void *library, const char *name, void *function)
{
  return find(RTLD_DEFAULT, name, function) || find(library, name, function);
}

/* It stays open: parts live as long as the process. */
static void open_library(void)
{
  static const char *const files[] = {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"};
  const char *asked = getenv("ESMM_ONEDNN");
  void *library = NULL;
  if (asked && strcmp(asked, "off") == 0) {
    missing = "oneDNN is turned off (ESMM_ONEDNN=off)";
    return;
  }
  if (asked && asked[0])
    library = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
  else
    for (size_t i = 0; i < sizeof files / sizeof files[0] && !library; i++)
      library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
  if (!library)
    missing = "libdnnl was not found (ESMM_ONEDNN may name a file)";
  else if (!find_all(library) || !find_openmp(library, "omp_set_num_threads", &dnnl.set_threads) ||
           !find_openmp(library, "omp_get_max_threads", &dnnl.threads))
    missing = "this libdnnl has not the functions that are needed, or is built without OpenMP";
  else if (pthread_atfork(before_fork, after_fork, after_fork) != 0 ||
           dnnl.engine_create(&dnnl.engine, KIND_CPU, 0) != 0)
    missing = "oneDNN did not start";
  else
    dnnl.number = read_version(library);
}

const char *esmm_onednn_missing(const esmm_kernel *self)
{
  if (pthread_once(&once, open_library) != 0)
    return "libdnnl could not be opened";
  const bool failed = self && given_up[self->dtypes & ESMM_DTYPE_BIT(ESMM_BF16) ? ESMM_BF16 : ESMM_F32];
  return !missing && failed ? "oneDNN failed to set up a product" : missing;
}

uint64_t esmm_onednn_version(void)
{
  return !(esmm_cpu_detect() & ESMM_CPU_AVX512) || esmm_onednn_missing(NULL) ? 0 : dnnl.number;
}

/* ---- descriptors ---- */

static int type_of(esmm_dtype dtype)
{
  return dtype == ESMM_BF16 ? TYPE_BF16 : TYPE_F32;
}

typedef struct shape {
  int64_t rows, cols;
  int64_t down, across; /* elements to the next row, the next column */
  int type;
} shape;

/* NULL where it fails. across 0: in whatever layout the library likes best. */
static void *describe(const shape *s)
{
  const int64_t dims[12] = {s->rows, s->cols}, strides[12] = {s->down, s->across}; /* version 2 takes arrays of 12 */
  void *desc = NULL;
  if (dnnl.opaque) {
    const int status = s->across ? dnnl.desc_create_strides(&desc, 2, dims, s->type, strides)
                                 : dnnl.desc_create_tag(&desc, 2, dims, s->type, TAG_ANY);
    return status == 0 ? desc : NULL;
  }
  desc = calloc(1, DESC_BYTES);
  if (desc && (s->across ? dnnl.desc_strides(desc, 2, dims, s->type, strides)
                         : dnnl.desc_tag(desc, 2, dims, s->type, TAG_ANY)) != 0) {
    free(desc);
    return NULL;
  }
  return desc;
}

static void forget(void *desc)
{
  if (dnnl.opaque && desc)
    (void)dnnl.desc_destroy(desc);
  else
    free(desc);
}

/* The library's kernel for packed weights: others would be slower than ours. */
static bool is_packed_kernel(const void *desc)
{
  const char *name = NULL;
  return dnnl.desc_query(desc, QUERY_KERNEL, 0, &name) == 0 && name && strncmp(name, "brg", 3) == 0;
}

static void *describe_product(const void *a, const void *b, const void *c)
{
  void *attr = NULL, *desc = NULL, *two_steps = dnnl.opaque ? NULL : calloc(1, PRODUCT_BYTES);
  bool made = a && b && c && dnnl.attr_create(&attr) == 0 && dnnl.attr_scratch(attr, SCRATCH_OF_CALLER) == 0;
  if (made && dnnl.opaque)
    made = dnnl.matmul_create(&desc, dnnl.engine, a, b, NULL, c, attr) == 0;
  else if (made)
    made = two_steps && dnnl.matmul_init(two_steps, a, b, NULL, c) == 0 &&
           dnnl.primitive_desc(&desc, two_steps, attr, dnnl.engine, NULL) == 0;
  if (made && !is_packed_kernel(desc)) {
    (void)dnnl.primitive_desc_destroy(desc);
    desc = NULL;
  }
  if (attr)
    (void)dnnl.attr_destroy(attr);
  free(two_steps);
  return made ? desc : NULL;
}

/* ---- calls ---- */

/* The library's objects for the caller's memory, and a stream: made once, used by one thread at a time. */
enum { MOST_ARGUMENTS = 4 };
typedef struct call {
  argument of[MOST_ARGUMENTS];
  const void *at[MOST_ARGUMENTS]; /* where they lay last */
  int count;
  void *stream;
  struct call *next; /* of those of a part that no thread uses */
} call;

static bool add(call *x, int what, const void *desc)
{
  if (dnnl.memory_create(&x->of[x->count].memory, desc, dnnl.engine, NULL) != 0)
    return false;
  x->of[x->count++].what = what;
  return true;
}

/* data [count]: where the arguments lie. On this thread alone, whatever a caller of OpenMP has set for it. */
static bool execute(const void *primitive, call *x, const void *const *data)
{
  const int before = dnnl.threads();
  dnnl.set_threads(1); /* version 2 would take all there are to fill padding up with zeros */
  bool done = true;
  for (int i = 0; i < x->count && done; i++) {
    void *own;
    memcpy(&own, &data[i], sizeof own); /* its interface has no const, but it only reads these */
    done = data[i] == x->at[i] || dnnl.memory_set(x->of[i].memory, own) == 0;
    x->at[i] = done ? data[i] : NULL;
  }
  done = done && dnnl.primitive_execute(primitive, x->stream, x->count, x->of) == 0 && dnnl.stream_wait(x->stream) == 0;
  dnnl.set_threads(before);
  return done;
}

static bool begin(call *x)
{
  return dnnl.stream_create(&x->stream, dnnl.engine, IN_ORDER) == 0;
}

static void end(call *x)
{
  for (int i = 0; i < x->count; i++)
    (void)dnnl.memory_destroy(x->of[i].memory);
  if (x->stream)
    (void)dnnl.stream_destroy(x->stream);
}

/* ---- B ---- */

bool esmm_onednn_worth(const esmm_weights *w, double max_bytes_ratio)
{
  const double forms = w->use == ESMM_USE_ANY ? 3.0 : 2.0;
  const unsigned cpu = w->dtype == ESMM_BF16 ? ESMM_CPU_AVX512BF16 : ESMM_CPU_AVX512;
  return w->format == ESMM_FORMAT_DENSE && (w->dtype == ESMM_BF16 || w->dtype == ESMM_F32) &&
         w->use != ESMM_USE_DECODE && w->strip_density >= LEAST_DENSITY && w->k >= ESMM_ONEDNN_SIDE &&
         w->n >= ESMM_ONEDNN_SIDE && (max_bytes_ratio <= 0 || max_bytes_ratio >= forms) && esmm_cpu_detect() & cpu &&
         !esmm_onednn_missing(NULL) && !given_up[w->dtype];
}

/* Columns [0, cols) of B, in the layout that the library likes best. */
static void *any_product(const esmm_weights *w, int64_t cols)
{
  const int type = type_of(w->dtype);
  const shape a = {LAYOUT_ROWS, w->k, w->k, 1, type}, b = {.rows = w->k, .cols = cols, .type = type};
  const shape c = {LAYOUT_ROWS, cols, cols, 1, TYPE_F32};
  void *of_a = describe(&a), *of_b = describe(&b), *of_c = describe(&c);
  void *desc = describe_product(of_a, of_b, of_c);
  forget(of_a);
  forget(of_b);
  forget(of_c);
  return desc;
}

/* Columns of b from col0 on, as layout has them. */
static bool lay_out(const esmm_matrix *b, int64_t col0, const void *layout, void *to)
{
  const bool by_rows = b->order == ESMM_ROW_MAJOR;
  const shape s = {b->rows, b->cols - col0, by_rows ? b->ld : 1, by_rows ? 1 : b->ld, type_of(b->dtype)};
  const void *const data[] = {(const char *)b->data + (size_t)esmm_matrix_index(b, 0, col0) * esmm_dtype_size(b->dtype),
                              to};
  void *from = describe(&s), *desc = NULL, *primitive = NULL;
  call x = {.count = 0};
  const bool done = from && dnnl.reorder_create(&desc, from, dnnl.engine, layout, dnnl.engine, NULL) == 0 &&
                    dnnl.primitive_create(&primitive, desc) == 0 && begin(&x) && add(&x, ARG_SRC, from) &&
                    add(&x, ARG_DST, layout) && execute(primitive, &x, data);
  end(&x);
  if (primitive)
    (void)dnnl.primitive_destroy(primitive);
  if (desc)
    (void)dnnl.primitive_desc_destroy(desc);
  forget(from);
  return done;
}

/*
 * Do ESMM_ONEDNN_BLOCK columns lie together, and whatever begins there as if nothing lay before it? So the library's
 * layouts are, but it does not say so: the last columns are laid out once more, and compared.
 */
static bool lies_in_blocks(const esmm_matrix *b, const esmm_weights *w)
{
  const esmm_onednn_form *f = &w->onednn;
  const int64_t blocks = esmm_ceil_div(w->n, ESMM_ONEDNN_BLOCK), before = blocks / 2;
  if (blocks < 2 || f->bytes % (size_t)blocks != 0)
    return false;
  const int64_t col0 = before * ESMM_ONEDNN_BLOCK;
  const size_t at = f->bytes / (size_t)blocks * (size_t)before;
  void *desc = any_product(w, w->n - col0);
  const void *layout = desc ? dnnl.desc_query_md(desc, QUERY_WEIGHTS, 0) : NULL;
  void *last = layout && dnnl.desc_size(layout) == f->bytes - at ? esmm_mem_alloc(&w->allocator, f->bytes - at) : NULL;
  const bool same = last && lay_out(b, col0, layout, last) && memcmp(last, (char *)f->data + at, f->bytes - at) == 0;
  if (last)
    esmm_mem_free(&w->allocator, last, f->bytes - at);
  if (desc)
    (void)dnnl.primitive_desc_destroy(desc);
  return same;
}

void esmm_onednn_keep(const esmm_matrix *b, esmm_weights *w)
{
  esmm_onednn_form *f = &w->onednn;
  lock_parts(); /* a child that is forked meanwhile finds the library's own locks open, too */
  const int before = dnnl.threads();
  dnnl.set_threads(1); /* layouts may depend on them */
  f->desc = any_product(w, w->n);
  f->layout = f->desc ? dnnl.desc_query_md(f->desc, QUERY_WEIGHTS, 0) : NULL;
  f->bytes = f->layout ? dnnl.desc_size(f->layout) : 0;
  f->data = f->layout ? esmm_mem_alloc(&w->allocator, f->bytes) : NULL;
  if (f->data && lay_out(b, 0, f->layout, f->data)) {
    w->forms |= ESMM_FORM(ONEDNN);
    f->in_blocks = lies_in_blocks(b, w);
  } else {
    esmm_onednn_free(w);
  }
  dnnl.set_threads(before);
  unlock_parts();
}

void esmm_onednn_free(esmm_weights *w)
{
  esmm_onednn_form *f = &w->onednn;
  if (f->data)
    esmm_mem_free(&w->allocator, f->data, f->bytes);
  if (f->desc)
    (void)dnnl.primitive_desc_destroy(f->desc);
  *f = (esmm_onednn_form){.data = NULL};
}

/* ---- parts ---- */

struct esmm_onednn_part {
  int64_t k, n, rows;
  esmm_dtype dtype, dtype_c;
  bool packed;                        /* it reads the library's own layout */
  void *a, *b, *c, *desc, *primitive; /* b: of rows; primitive is NULL: this place is free */
  const void *layout, *scratch;       /* in desc */
  size_t scratch_bytes;
  call *idle;
  int users;
  uint64_t used; /* when, by the table's clock */
};

static struct {
  uint64_t clock;
  esmm_onednn_part part[PART_SETS][PART_WAYS];
} table; /* under parts_lock */

static void clear(esmm_onednn_part *x)
{
  for (call *next; x->idle; x->idle = next) {
    next = x->idle->next;
    end(x->idle);
    free(x->idle);
  }
  if (x->primitive)
    (void)dnnl.primitive_destroy(x->primitive);
  if (x->desc)
    (void)dnnl.primitive_desc_destroy(x->desc);
  forget(x->a);
  forget(x->b);
  forget(x->c);
  *x = (esmm_onednn_part){.k = 0};
}

static bool make(const esmm_weights *w, esmm_onednn_part *x)
{
  const int type = type_of(x->dtype);
  const shape a = {x->rows, x->k, x->k, 1, type}, c = {x->rows, x->n, x->n, 1, type_of(x->dtype_c)};
  const shape b = {x->k, x->n, x->n, 1, type};
  const int before = dnnl.threads();
  dnnl.set_threads(1); /* it decides how work is cut when a product is made */
  void *some = x->packed && x->n != w->n ? any_product(w, x->n) : NULL; /* whose layout was compared with B's */
  const void *packed = x->n == w->n ? w->onednn.layout : some ? dnnl.desc_query_md(some, QUERY_WEIGHTS, 0) : NULL;
  x->a = describe(&a);
  x->c = describe(&c);
  x->b = describe(&b);
  x->desc = describe_product(x->a, x->packed ? packed : x->b, x->c);
  const bool made = x->desc && dnnl.primitive_create(&x->primitive, x->desc) == 0;
  if (some)
    (void)dnnl.primitive_desc_destroy(some);
  dnnl.set_threads(before);
  if (!made)
    return false;
  x->layout = dnnl.desc_query_md(x->desc, QUERY_WEIGHTS, 0);
  x->scratch = dnnl.desc_query_md(x->desc, QUERY_SCRATCH, 0);
  x->scratch_bytes = x->scratch ? dnnl.desc_size(x->scratch) : 0;
  return x->layout && (!x->packed || dnnl.desc_size(x->layout) == esmm_onednn_bytes(w, x->n));
}

static bool is_part(const esmm_onednn_part *x, const esmm_onednn_part *wanted)
{
  return x->primitive && x->k == wanted->k && x->n == wanted->n && x->rows == wanted->rows &&
         x->dtype == wanted->dtype && x->dtype_c == wanted->dtype_c && x->packed == wanted->packed;
}

/* The set that holds a part. */
static esmm_onednn_part *set_of(const esmm_onednn_part *x)
{
  const int64_t words[] = {x->n, x->rows, (int64_t)x->dtype, (int64_t)x->dtype_c, (int64_t)x->packed};
  uint64_t hash = (uint64_t)x->k;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    hash = (hash ^ hash >> 32 ^ (uint64_t)words[i]) * 0x9e3779b97f4a7c15u;
  return table.part[(hash >> 32) % PART_SETS];
}

/* The part, or where it may go, or NULL: all places are in use. */
static esmm_onednn_part *find_place(const esmm_onednn_part *wanted)
{
  esmm_onednn_part *set = set_of(wanted), *place = NULL;
  for (int i = 0; i < PART_WAYS; i++) {
    esmm_onednn_part *x = &set[i];
    if (is_part(x, wanted))
      return x;
    if (x->users == 0 && (!place || x->used < place->used))
      place = x;
  }
  return place;
}

esmm_onednn_part *esmm_onednn_take(const esmm_weights *w, int64_t rows, int64_t cols, esmm_dtype dtype_c)
{
  const esmm_onednn_part wanted = {.k = w->k,
                                   .n = cols,
                                   .rows = rows,
                                   .dtype = w->dtype,
                                   .dtype_c = dtype_c,
                                   .packed = w->forms & ESMM_FORM(ONEDNN)};
  const bool columns = wanted.packed && cols != w->n;
  atomic_bool *const refused = columns ? &no_columns[w->dtype] : &given_up[w->dtype];
  if (given_up[w->dtype] || *refused)
    return NULL;
  lock_parts();
  esmm_onednn_part *x = find_place(&wanted);
  if (x && !is_part(x, &wanted)) {
    clear(x);
    *x = wanted;
    if (!make(w, x)) {
      clear(x);
      x = NULL;
    }
  }
  if (!x) /* also where all places are in use: a call's scratch is for the library or for what runs instead */
    *refused = true;
  if (x) {
    x->users++;
    x->used = ++table.clock;
  }
  unlock_parts();
  return x;
}

void esmm_onednn_give_back(esmm_onednn_part *part)
{
  if (!part)
    return;
  lock_parts();
  part->users--;
  unlock_parts();
}

size_t esmm_onednn_scratch(const esmm_onednn_part *part)
{
  return part->scratch_bytes;
}

/* NULL where there is no memory. */
static call *take_call(esmm_onednn_part *part)
{
  lock_calls();
  call *x = part->idle;
  if (x)
    part->idle = x->next;
  unlock_calls();
  if (x)
    return x;
  x = calloc(1, sizeof *x);
  if (x && begin(x) && add(x, ARG_SRC, part->a) && add(x, ARG_WEIGHTS, part->layout) && add(x, ARG_DST, part->c) &&
      (part->scratch_bytes == 0 || add(x, ARG_SCRATCH, part->scratch)))
    return x;
  if (x)
    end(x);
  free(x);
  return NULL;
}

static void give_call_back(esmm_onednn_part *part, call *x)
{
  lock_calls();
  x->next = part->idle;
  part->idle = x;
  unlock_calls();
}

bool esmm_onednn_cuts_columns(const esmm_weights *w)
{
  return w->onednn.in_blocks && !no_columns[w->dtype];
}

size_t esmm_onednn_bytes(const esmm_weights *w, int64_t cols)
{
  const esmm_onednn_form *f = &w->onednn;
  const int64_t blocks = esmm_ceil_div(w->n, ESMM_ONEDNN_BLOCK);
  return cols == w->n ? f->bytes : f->bytes / (size_t)blocks * (size_t)esmm_ceil_div(cols, ESMM_ONEDNN_BLOCK);
}

bool esmm_onednn_multiply(esmm_onednn_part *part, const esmm_weights *w, int64_t col0, const void *a, void *c,
                          void *scratch)
{
  const void *b = part->packed ? (const char *)w->onednn.data + esmm_onednn_bytes(w, col0) : w->rows;
  const void *const data[MOST_ARGUMENTS] = {a, b, c, scratch};
  call *x = take_call(part);
  if (!x)
    return false;
  const bool done = execute(part->primitive, x, data);
  give_call_back(part, x);
  return done;
}
