/* harness.c: see harness.h. */
#include "harness.h"
#include "internal.h"

#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GUARD_BYTES = 256, GUARD_VALUE = 0xA7 };

uint64_t th_next(th_rng *rng)
{
  uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int64_t th_below(th_rng *rng, int64_t n)
{
  return (int64_t)(th_next(rng) % (uint64_t)n);
}

double th_unit(th_rng *rng)
{
  return (double)(th_next(rng) >> 11) * 0x1p-53;
}

/* Rounds to `bits` of significand, the smallest exponent being `lowest`: to nearest, ties to even. */
static double round_to(double x, int bits, int lowest)
{
  if (x == 0 || !isfinite(x))
    return x;
  int exponent;
  frexp(x, &exponent); /* |x| in [2^(e-1), 2^e) */
  int last = (exponent - 1 < lowest ? lowest : exponent - 1) - (bits - 1);
  return ldexp(rint(ldexp(x, -last)), last);
}

/* A test that comes here has lost its way. */
static int no_dtype(esmm_dtype dtype)
{
  fail_msg("%d is no dtype", (int)dtype);
  return 0;
}

double th_roundoff(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return 0x1p-24;
  case ESMM_BF16:
    return 0x1p-8;
  case ESMM_F16:
    return 0x1p-11;
  }
  return no_dtype(dtype);
}

double th_largest(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return 0x1.ffffffp127;
  case ESMM_BF16:
    return 0x1.ffp127;
  case ESMM_F16:
    return 65520.0;
  }
  return no_dtype(dtype);
}

double th_round(esmm_dtype dtype, double value)
{
  double x = (double)(float)value, r = x;
  if (!isfinite(x))
    return x;
  switch (dtype) {
  case ESMM_F32:
    return x;
  case ESMM_BF16:
    r = round_to(x, 8, -126);
    break;
  case ESMM_F16:
    r = round_to(x, 11, -14);
    break;
  }
  return fabs(x) >= th_largest(dtype) ? copysign(INFINITY, x) : r;
}

static double f16_value(uint16_t h)
{
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? ldexp(fraction, -24)
                                     : ldexp(1024 + fraction, exponent - 25);
  return h >> 15 ? -magnitude : magnitude;
}

static double f16_looked_up(uint16_t h)
{
  static double table[65536];
  static bool ready;
  if (!ready)
    for (int i = 0; i < 65536; i++)
      table[i] = f16_value((uint16_t)i);
  ready = true;
  return table[h];
}

double th_decode(const void *data, esmm_dtype dtype, int64_t index)
{
  float x;
  uint32_t u;
  uint16_t h;
  switch (dtype) {
  case ESMM_F32:
    memcpy(&x, (const char *)data + index * 4, sizeof x);
    return (double)x;
  case ESMM_BF16:
    memcpy(&h, (const char *)data + index * 2, sizeof h);
    u = (uint32_t)h << 16;
    memcpy(&x, &u, sizeof x);
    return (double)x;
  case ESMM_F16:
    memcpy(&h, (const char *)data + index * 2, sizeof h);
    return f16_looked_up(h);
  }
  return no_dtype(dtype);
}

static uint16_t f16_bits(double r)
{
  uint16_t h = signbit(r) ? 0x8000 : 0;
  double x = fabs(r);
  if (isnan(r))
    h |= 0x7e00;
  else if (isinf(r))
    h |= 0x7c00;
  else if (x < 0x1p-14)
    h = (uint16_t)(h | (int)ldexp(x, 24));
  else {
    int exponent;
    double fraction = frexp(x, &exponent); /* [0.5, 1) */
    h = (uint16_t)(h | ((exponent + 14) << 10) | ((int)ldexp(fraction, 11) - 1024));
  }
  return h;
}

void th_encode(void *data, esmm_dtype dtype, int64_t index, double value)
{
  const double r = th_round(dtype, value);
  const float x = (float)r;
  uint32_t u;
  uint16_t h;
  memcpy(&u, &x, sizeof u);
  switch (dtype) {
  case ESMM_F32:
    memcpy((char *)data + index * 4, &u, 4);
    break;
  case ESMM_BF16:
    h = (uint16_t)(u >> 16 | (isnan(r) ? 0x40 : 0));
    memcpy((char *)data + index * 2, &h, 2);
    break;
  case ESMM_F16:
    h = f16_bits(r);
    memcpy((char *)data + index * 2, &h, 2);
    break;
  }
}

/* ---- guarded memory ---- */

void th_arena_create(th_arena *arena, size_t room)
{
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  room = (room + GUARD_BYTES + page - 1) / page * page;
  unsigned char *base = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(base != MAP_FAILED);
  assert_int_equal(mprotect(base + room, page, PROT_NONE), 0);
  *arena = (th_arena){.base = base, .room = room};
}

void th_arena_free(th_arena *arena)
{
  munmap(arena->base, arena->room + (size_t)sysconf(_SC_PAGESIZE));
  *arena = (th_arena){0};
}

void *th_place(th_arena *arena, size_t bytes)
{
  assert_true(bytes + GUARD_BYTES <= arena->room);
  arena->bytes = bytes;
  arena->data = arena->base + arena->room - bytes;
  memset(arena->data - GUARD_BYTES, GUARD_VALUE, GUARD_BYTES);
  return arena->data;
}

bool th_guards_intact(const th_arena *arena)
{
  for (int i = 1; i <= GUARD_BYTES; i++)
    if (arena->data[-i] != GUARD_VALUE)
      return false;
  return true;
}

size_t th_element_bytes(esmm_dtype dtype)
{
  switch (dtype) {
  case ESMM_F32:
    return 4;
  case ESMM_BF16:
  case ESMM_F16:
    return 2;
  }
  return (size_t)no_dtype(dtype);
}

size_t th_matrix_bytes(const esmm_matrix *m)
{
  int64_t lines = m->order == ESMM_ROW_MAJOR ? m->rows : m->cols;
  int64_t length = m->order == ESMM_ROW_MAJOR ? m->cols : m->rows;
  if (lines == 0 || length == 0)
    return 0;
  return (size_t)((lines - 1) * m->ld + length) * th_element_bytes(m->dtype);
}

void th_matrix_place(th_arena *arena, esmm_matrix *m, int64_t rows, int64_t cols, int64_t pad, esmm_dtype dtype,
                     esmm_order order)
{
  *m = (esmm_matrix){.rows = rows, .cols = cols, .dtype = dtype, .order = order};
  m->ld = (order == ESMM_ROW_MAJOR ? cols : rows) + pad;
  size_t bytes = th_matrix_bytes(m);
  m->data = th_place(arena, bytes);
  memset(m->data, 0xff, bytes); /* NaN in every dtype */
}

int64_t th_index(const esmm_matrix *m, int64_t row, int64_t col)
{
  int64_t ld = m->ld ? m->ld : m->order == ESMM_ROW_MAJOR ? m->cols : m->rows;
  return m->order == ESMM_ROW_MAJOR ? row * ld + col : col * ld + row;
}

double th_get(const esmm_matrix *m, int64_t row, int64_t col)
{
  return th_decode(m->data, m->dtype, th_index(m, row, col));
}

void th_set(esmm_matrix *m, int64_t row, int64_t col, double value)
{
  th_encode(m->data, m->dtype, th_index(m, row, col), value);
}

esmm_matrix th_matrix_alloc(int64_t rows, int64_t cols, esmm_dtype dtype)
{
  size_t bytes = (size_t)(rows * cols) * th_element_bytes(dtype);
  esmm_matrix m = {.data = calloc(bytes ? bytes : 1, 1), .rows = rows, .cols = cols, .dtype = dtype};
  assert_non_null(m.data);
  return m;
}

void th_fill(esmm_matrix *m, uint64_t seed, double density, bool integers)
{
  th_rng rng = {seed};
  for (int64_t i = 0; i < m->rows; i++)
    for (int64_t j = 0; j < m->cols; j++) {
      bool alive = th_unit(&rng) < density;
      double value = integers ? (double)(th_below(&rng, 9) - 4) : 2 * th_unit(&rng) - 1;
      th_set(m, i, j, alive ? value : 0);
    }
}

void th_oracle(int64_t m, int64_t n, int64_t k, const double *a, const double *b, double *sum, double *magnitude)
{
  memset(sum, 0, (size_t)(m * n) * sizeof *sum);
  memset(magnitude, 0, (size_t)(m * n) * sizeof *magnitude);
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++) {
      double x = a[i * k + p];
      if (x == 0)
        continue;
      const double *row = b + p * n;
      for (int64_t j = 0; j < n; j++) {
        double term = x * row[j];
        sum[i * n + j] += term;
        magnitude[i * n + j] += fabs(term);
      }
    }
}

void th_chain(int64_t m, int64_t n, int64_t k, const double *a, const double *b, float *sum)
{
  memset(sum, 0, (size_t)(m * n) * sizeof *sum);
  for (int64_t i = 0; i < m; i++)
    for (int64_t p = 0; p < k; p++) {
      const double x = a[i * k + p];
      const double *row = b + p * n;
      for (int64_t j = 0; j < n && x != 0; j++)
        sum[i * n + j] = (float)((double)sum[i * n + j] + x * row[j]);
    }
}

/* ---- the device ---- */

const char *th_device(void)
{
  const char *device = getenv("ESMM_TEST_DEVICE");
  return device && *device ? device : "cpu";
}

bool th_on_gpu(void)
{
  return strncmp(th_device(), "cuda", 4) == 0;
}

int th_gpu_ordinal(void)
{
  const char *colon = strchr(th_device(), ':');
  return colon ? (int)strtol(colon + 1, NULL, 10) : 0;
}

static void *driver; /* libcuda.so.1 */

/* A function pointer from dlsym: ISO C has no cast for it. */
#define GET_SYMBOL(function, name) (*(void **)&(function) = dlsym(driver, name))

bool th_driver_open(char *why, size_t why_bytes)
{
  int (*init)(unsigned) = NULL, (*get)(int *, int) = NULL, (*retain)(void **, int) = NULL, (*use)(void *) = NULL;
  static void *context; /* kept: the primary context lives as long as the process */
  int device = 0, result = 0;
  if (!driver)
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) {
    (void)snprintf(why, why_bytes, "%s", dlerror());
    return false;
  }
  GET_SYMBOL(init, "cuInit");
  GET_SYMBOL(get, "cuDeviceGet");
  GET_SYMBOL(retain, "cuDevicePrimaryCtxRetain");
  GET_SYMBOL(use, "cuCtxSetCurrent");
  if (!init || !get || !retain || !use) {
    (void)snprintf(why, why_bytes, "libcuda.so.1 is not a CUDA driver");
    return false;
  }
  if (!context && ((result = init(0)) != 0 || (result = get(&device, th_gpu_ordinal())) != 0 ||
                   (result = retain(&context, device)) != 0)) {
    (void)snprintf(why, why_bytes, "the CUDA driver answers %d", result);
    return false;
  }
  result = use(context);
  if (result != 0)
    (void)snprintf(why, why_bytes, "cuCtxSetCurrent answers %d", result);
  return result == 0;
}

void *th_driver_symbol(const char *name)
{
  void *symbol = driver ? dlsym(driver, name) : NULL;
  if (!symbol)
    fail_msg("the CUDA driver has no %s", name);
  return symbol;
}

void th_device_arena_create(th_device_arena *arena, esmm_ctx *ctx, size_t room)
{
  char why[256];
  *arena = (th_device_arena){.ctx = ctx, .room = room + 3 * GUARD_BYTES};
  arena->image = malloc(arena->room);
  assert_non_null(arena->image);
  if (!th_driver_open(why, sizeof why))
    fail_msg("%s", why);
  if (esmm_memory_alloc(ctx, arena->room, &arena->base) != ESMM_OK)
    fail_msg("esmm_memory_alloc: %s", esmm_ctx_error(ctx));
}

void th_device_arena_free(th_device_arena *arena)
{
  esmm_memory_free(arena->ctx, arena->base);
  free(arena->image);
  *arena = (th_device_arena){0};
}

/* The driver's own copies: esmm_matrix_copy may change the bits of a NaN, and is itself under test. */
void *th_device_put(th_device_arena *arena, const void *data, size_t bytes)
{
  int (*copy)(unsigned long long, const void *, size_t) = NULL;
  *(void **)&copy = th_driver_symbol("cuMemcpyHtoD_v2");
  arena->at = GUARD_BYTES + (size_t)((uintptr_t)data % GUARD_BYTES);
  arena->bytes = bytes;
  assert_true(arena->at + bytes + GUARD_BYTES <= arena->room);
  memset(arena->image, GUARD_VALUE, arena->at + bytes + GUARD_BYTES);
  if (bytes > 0)
    memcpy(arena->image + arena->at, data, bytes);
  assert_int_equal(copy((uintptr_t)arena->base, arena->image, arena->at + bytes + GUARD_BYTES), 0);
  return (unsigned char *)arena->base + arena->at;
}

bool th_device_get(th_device_arena *arena, void *data)
{
  int (*copy)(void *, unsigned long long, size_t) = NULL;
  *(void **)&copy = th_driver_symbol("cuMemcpyDtoH_v2");
  assert_int_equal(esmm_ctx_synchronize(arena->ctx), ESMM_OK);
  assert_int_equal(copy(arena->image, (uintptr_t)arena->base, arena->at + arena->bytes + GUARD_BYTES), 0);
  if (arena->bytes > 0)
    memcpy(data, arena->image + arena->at, arena->bytes);
  for (size_t i = 0; i < arena->at + GUARD_BYTES; i++) /* those in front, then those behind */
    if (arena->image[i < arena->at ? i : i + arena->bytes] != GUARD_VALUE)
      return false;
  return true;
}

/* ---- contexts and last words ---- */

void th_clean_environment(void)
{
  unsetenv("ESMM_FORCE");
  unsetenv("ESMM_THREADS");
  unsetenv("ESMM_REMEMBER");
  if (th_on_gpu()) /* tests repeat a call and want the same bits: each is to be planned by itself */
    setenv("ESMM_REMEMBER", "0", 1);
  setenv("ESMM_DETERMINISTIC", "1", 1); /* the same; test_choose.c and test_random.c let the plan learn */
  setenv("ESMM_DEVICE", th_device(), 1);
}

esmm_ctx *th_ctx_on(const char *device, int threads)
{
  char error[512] = "";
  esmm_ctx *ctx = NULL;
  esmm_ctx_opts opts = {.size = sizeof opts,
                        .device = device,
                        .threads = threads,
                        .no_tuning_cache = 1,
                        .error = error,
                        .error_size = sizeof error};
  esmm_status status = esmm_ctx_create(&ctx, &opts);
  if (status != ESMM_OK)
    fail_msg("esmm_ctx_create: %s: %s", esmm_status_str(status), error);
  ctx->thread_work = 5e3; /* several threads for small products, too: that is where mistakes show */
  ctx->wake_seconds = 1e-12;
  return ctx;
}

int th_cpu_set_up(void **state)
{
  th_clean_environment();
  *state = th_ctx_on("cpu", 3);
  return 0;
}

int th_cpu_tear_down(void **state)
{
  esmm_ctx_free(*state);
  return 0;
}

esmm_ctx *th_ctx(int threads)
{
  return th_ctx_on(th_device(), threads);
}

static const char *last_words;

/* The sanitizers end the process themselves; where one is linked in, this is its way to call us before it does. */
extern void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void say_last_words(void)
{
  if (!last_words)
    return;
  static const char head[] = "\n# died in: ";
  ssize_t ignored = write(STDOUT_FILENO, head, sizeof head - 1);
  ignored = write(STDOUT_FILENO, last_words, strlen(last_words));
  ignored = write(STDOUT_FILENO, "\n", 1);
  (void)ignored;
}

static void on_signal(int number)
{
  say_last_words();
  signal(number, SIG_DFL);
  raise(number);
}

esmm_prepare_opts th_prepare_opts_for(esmm_ctx *ctx, const char *force)
{
  esmm_prepare_opts opts = {.size = sizeof opts};
  for (int i = 0; force && i < esmm_kernel_count(); i++) {
    esmm_kernel_info info = {.size = sizeof info};
    assert_int_equal(esmm_kernel_get(ctx, i, &info), ESMM_OK);
    if (strcmp(info.name, force) != 0 || (info.formats & 1u << ESMM_FORMAT_DENSE))
      continue;
    opts.format.kind = info.formats & 1u << ESMM_FORMAT_BSR ? ESMM_FORMAT_BSR : ESMM_FORMAT_NM;
    opts.format.keep = opts.format.group = 4;
    opts.format.group_cols = strstr(force, "nm_lists") ? 32 : 0; /* which takes columns that choose together */
  }
  return opts;
}

esmm_status th_matmul_on(esmm_ctx *ctx, void *stream, const esmm_matrix *a, const esmm_weights *w, esmm_matrix *c,
                         const esmm_matmul_opts *opts)
{
  assert_int_equal(esmm_ctx_set_stream(ctx, stream), ESMM_OK);
  assert_ptr_equal(esmm_ctx_stream(ctx), stream);
  const esmm_status status = esmm_matmul(ctx, a, w, c, opts, NULL);
  assert_int_equal(esmm_ctx_set_stream(ctx, NULL), ESMM_OK);
  return status;
}

esmm_pattern_info th_pattern(esmm_ctx *ctx, const esmm_pattern *pattern)
{
  esmm_pattern_info info = {.size = sizeof info};
  if (esmm_pattern_get_info(ctx, pattern, &info) != ESMM_OK)
    fail_msg("esmm_pattern_get_info: %s", esmm_ctx_error(ctx));
  return info;
}

uint64_t *th_pattern_bits(esmm_ctx *ctx, const esmm_pattern *pattern)
{
  const esmm_pattern_info info = th_pattern(ctx, pattern);
  uint64_t *bits = calloc((size_t)(info.strips * info.words + 1), sizeof *bits);
  assert_non_null(bits);
  if (esmm_pattern_bits(ctx, pattern, 0, info.strips, bits) != ESMM_OK)
    fail_msg("esmm_pattern_bits: %s", esmm_ctx_error(ctx));
  return bits;
}

void th_on_crash(const char *text)
{
  static bool installed;
  last_words = text;
  if (installed)
    return;
  installed = true;
  if (__sanitizer_set_death_callback) {
    __sanitizer_set_death_callback(say_last_words);
    return;
  }
  static const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
    signal(numbers[i], on_signal);
}

int64_t th_env_int(const char *name, int64_t otherwise)
{
  const char *text = getenv(name);
  return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

void th_expect(const char *what, esmm_status got, esmm_status want, const char *text, const char *word1,
               const char *word2)
{
  if (got != want)
    fail_msg("%s: status %d (%s), expected %d; text: %s", what, (int)got, esmm_status_str(got), (int)want, text);
  if (!strstr(text, word1) || !strstr(text, word2))
    fail_msg("%s: the text '%s' does not say '%s' and '%s'", what, text, word1, word2);
}
