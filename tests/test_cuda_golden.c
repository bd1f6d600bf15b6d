/*
 * test_cuda_golden.c: what a GPU context launches for some hundred products: functions, grids and every parameter, on
 * the driver of fake_cuda.c, so that no GPU is needed. Densities are what the fake kernels report. The texts are those
 * of tests/golden/plans.jsonl; ESMM_GOLDEN_UPDATE=1, or `make golden`, writes it anew.
 *
 * A product's line follows from that product alone: it has a context, weights and random numbers of its own.
 */
#include "cuda/device/device.h"
#include "fake_gpu.h"
#include "fake_reports.h"
#include "params_names.h"
#include "plan_lines.h"

#include <math.h>
#include <stdarg.h>

#define GOLDEN "tests/golden/plans.jsonl"

enum { CALLS = 20 }; /* of one product: by then reports of the first ones decide (MOST_DELAY in recall.c) */

/* ---- products ---- */

typedef struct product {
  char name[200];
  int sm;
  bool no_cublas;
  esmm_dtype dtype, dtype_c;
  int64_t m, n, k;
  esmm_order order_a, order_b, order_c;
  int64_t pad_a, pad_c; /* of leading dimensions */
  double element;       /* share of A's elements that are not 0, */
  int64_t strip;        /* which come so many rows at once; 1: anywhere */
  double density_b;     /* of strips and tiles of B; of blocks where it is BSR */
  esmm_format format;
  esmm_activation activation;
  bool bias, gate_bias, host; /* host: operands in host memory */
  int residual;               /* 1: a matrix, 2: C */
  bool gate, counts;
  int64_t pattern_rows; /* of a c_pattern; 0: none */
  int64_t given_rows;   /* of an a_pattern, which another product made; 0: none */
  float alpha, beta;
  const char *force;
  bool learnt; /* only what is launched once A's densities are known */
} product;

static const char *const dtype_names[] = {"f32", "bf16", "f16"};
static const char *const activation_names[] = {"none", "relu", "relu2", "gelu", "gelu_tanh", "silu"};

static product make_product(esmm_dtype dtype, int64_t m, int64_t n, int64_t k)
{
  return (product){.sm = 90,
                   .dtype = dtype,
                   .dtype_c = dtype,
                   .m = m,
                   .n = n,
                   .k = k,
                   .element = 1,
                   .strip = 1,
                   .density_b = 1,
                   .alpha = 1};
}

static void add_name(product *p, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_name(product *p, const char *format, ...)
{
  va_list arguments;
  const size_t length = strlen(p->name);
  va_start(arguments, format);
  const int more = vsnprintf(p->name + length, sizeof p->name - length, format, arguments);
  va_end(arguments);
  assert_true(more >= 0 && (size_t)more < sizeof p->name - length);
}

/* The product in words, behind the name of its group. */
static void set_name(product *p, const char *group)
{
  p->name[0] = '\0';
  add_name(p, "%s: %s", group, dtype_names[p->dtype]);
  if (p->dtype_c != p->dtype)
    add_name(p, " to %s", dtype_names[p->dtype_c]);
  add_name(p, " m %lld n %lld k %lld", (long long)p->m, (long long)p->n, (long long)p->k);
  add_name(p, ", A %g by %lld%s", p->element, (long long)p->strip, p->order_a ? " col" : "");
  if (p->pad_a)
    add_name(p, " pad %lld", (long long)p->pad_a);
  add_name(p, ", B %g%s", p->density_b, p->order_b ? " col" : "");
  if (p->format.kind == ESMM_FORMAT_BSR)
    add_name(p, " bsr:%dx%d", p->format.block_rows, p->format.block_cols);
  if (p->format.kind == ESMM_FORMAT_NM)
    add_name(p, " %d:%d", p->format.keep, p->format.group);
  if (p->order_c || p->pad_c)
    add_name(p, ", C%s pad %lld", p->order_c ? " col" : "", (long long)p->pad_c);
  if (p->activation)
    add_name(p, ", %s", activation_names[p->activation]);
  if (p->alpha != 1 || p->beta != 0)
    add_name(p, ", alpha %g beta %g", (double)p->alpha, (double)p->beta);
  add_name(p, "%s%s%s%s%s", p->bias ? ", bias" : "",
           p->residual == 0   ? ""
           : p->residual == 1 ? ", residual"
                              : ", C",
           p->gate ? ", gate" : "", p->gate_bias ? " with bias" : "", p->counts ? ", counts" : "");
  if (p->pattern_rows)
    add_name(p, ", pattern of %lld", (long long)p->pattern_rows);
  if (p->given_rows)
    add_name(p, ", given %lld", (long long)p->given_rows);
  add_name(p, "%s, sm %d%s", p->host ? ", host" : "", p->sm, p->no_cublas ? "" : ", cuBLAS");
}

/* ---- what the fake kernels report ---- */

static const product *current;

static fake_zeros zeros; /* of its A */

static uint64_t share(double part, int64_t of)
{
  return (uint64_t)llround(part * (double)of);
}

/* So many of a pattern's bits are set, at any height. */
static void write_count(uint64_t to, int64_t strips, int64_t k, uint32_t number)
{
  if (!to)
    return;
  esmm_pattern_bit_count *count = esmm_cuda_pointer(to);
  const int64_t tiles = esmm_ceil_div(strips * current->given_rows, ESMM_TILE);
  count->own = share(current->element, strips * k);
  count->folded[0] = share(current->element, strips * current->given_rows / ESMM_STRIP * k);
  count->folded[1] = share(current->element, tiles * k);
  __atomic_store_n(&count->ready, number, __ATOMIC_RELEASE);
}

/* Blocks of B that are there, by their places alone. */
static bool block_is_there(int64_t row, int64_t col)
{
  th_rng rng = {.state = (uint64_t)(row * 1000003 + col)};
  (void)th_next(&rng);
  return th_unit(&rng) < current->density_b;
}

/* Has any of B's blocks that lies in this area something? */
static bool area_is_alive(int64_t row, int64_t col, int64_t rows, int64_t cols)
{
  const esmm_format *f = &current->format;
  for (int64_t i = row / f->block_rows; i * f->block_rows < esmm_min(row + rows, current->k); i++)
    for (int64_t j = col / f->block_cols; j * f->block_cols < esmm_min(col + cols, current->n); j++)
      if (block_is_there(i, j))
        return true;
  return false;
}

static void scan_blocks(const esmm_blocks_scan_params *p)
{
  const int64_t rows = esmm_ceil_div(p->b.rows, p->block_rows), cols = esmm_ceil_div(p->b.cols, p->block_cols);
  unsigned char *flags = esmm_cuda_pointer(p->flags);
  uint64_t *count = esmm_cuda_pointer(p->count);
  for (int64_t j = 0; j < cols; j++)
    for (int64_t i = 0; i < rows; i++) {
      const bool alive = area_is_alive(i * p->block_rows, j * p->block_cols, p->block_rows, p->block_cols);
      if (flags)
        flags[j * rows + i] = alive;
      *count += alive;
    }
}

static void count_b(const esmm_prepare_bits_params *p)
{
  esmm_prepare_found *found = esmm_cuda_pointer(p->found);
  found->nonzero = share(current->density_b, current->k * current->n);
  found->set = share(current->density_b, p->k * p->strips);
  found->tile_set = share(current->density_b, p->k * esmm_ceil_div(p->strips, ESMM_TILE / ESMM_STRIP));
}

/* What a kernel would leave for the host. */
static void stand_in(const char *name, const void *params)
{
  fake_answer(&zeros, name, params);
  if (strncmp(name, "esmm_wgmma16_", 13) == 0) {
    esmm_wgmma16_params p;
    memcpy(&p, params, sizeof p);
    write_count(p.bit_count, esmm_ceil_div(p.m, ESMM_TILE), p.n, p.count_ready);
  } else if (strcmp(name, "esmm_tally_count") == 0) {
    esmm_tally_count_params p;
    memcpy(&p, params, sizeof p);
    write_count(p.out, p.strips, 64 * p.words, p.ready);
  } else if (strcmp(name, "esmm_prepare_bits") == 0) {
    esmm_prepare_bits_params p;
    memcpy(&p, params, sizeof p);
    count_b(&p);
  } else if (strcmp(name, "esmm_blocks_scan") == 0) {
    esmm_blocks_scan_params p;
    memcpy(&p, params, sizeof p);
    scan_blocks(&p);
  }
}

/* ---- what was launched, as text ---- */

enum { MOST_BLOCKS = 48 };

static struct {
  bool on;
  plan_text text;
  int launches;
  struct {
    uint64_t base;
    char name[64];
  } known[MOST_BLOCKS]; /* blocks of memory */
  int count;
} seen;

static void know(uint64_t address, const char *name)
{
  if (!address)
    return;
  const uint64_t base = fake->base_of(address);
  assert_true(base != 0 && seen.count < MOST_BLOCKS);
  seen.known[seen.count].base = base;
  (void)snprintf(seen.known[seen.count++].name, sizeof seen.known[0].name, "%s", name);
}

static void write_number(void *to, const char *name, const char *value)
{
  plan_add(to, ",\"%s\":%s", name, value);
}

static const char *known_as(uint64_t base)
{
  for (int i = 0; i < seen.count; i++)
    if (seen.known[i].base == base)
      return seen.known[i].name;
  return NULL;
}

/* Memory that the test does not know has the name of the field that had it first, and a number from the second on. */
static void write_address(void *to, const char *field, uint64_t address)
{
  const uint64_t base = fake->base_of(address);
  if (base == 0)
    fail_msg("%s: %s is no memory of the device", current->name, field);
  if (!known_as(base)) {
    char name[48];
    int same = 1;
    for (int i = 0; i < seen.count; i++)
      same += seen.known[i].name[0] == '[' && strncmp(seen.known[i].name + 1, field, strlen(field)) == 0;
    (void)snprintf(name, sizeof name, same > 1 ? "[%s %d]" : "[%s]", field, same);
    know(address, name);
  }
  plan_add(to, ",\"%s\":\"%s", field, known_as(base));
  if (address != base)
    plan_add(to, "+%llu", (unsigned long long)(address - base));
  plan_add(to, "\"");
}

/* It grows, and then is another block. */
static void know_scratch(const esmm_ctx *ctx)
{
  for (int i = 0; i < seen.count; i++)
    if (strcmp(seen.known[i].name, "scratch") == 0)
      seen.known[i] = seen.known[--seen.count];
  know(esmm_cuda_state(ctx)->scratch, "scratch");
}

static const esmm_ctx *recorded; /* whose calls these are */

static void write_params(const char *name, const void *params)
{
  const params_struct *s = params_of(name);
  if (!s)
    fail_msg("%s: params_names.c does not know what %s takes", current->name, name);
  params_write(s, params, &(params_out){.number = write_number, .address = write_address, .to = &seen.text});
  plan_add(&seen.text, "}");
}

static void take_launch(const char *name, const void *params)
{
  if (seen.on) {
    const fake_launch *l = &fake->launch;
    know_scratch(recorded);
    plan_add(&seen.text, "%s{\"launch\":\"%s\",\"grid\":\"%u", seen.launches++ ? "," : "", name, l->grid[0]);
    if (l->grid[1] > 1 || l->grid[2] > 1)
      plan_add(&seen.text, " x %u x %u", l->grid[1], l->grid[2]);
    plan_add(&seen.text, "\",\"threads\":%u", l->threads);
    if (l->cluster)
      plan_add(&seen.text, ",\"cluster\":%u", l->cluster);
    if (l->shared)
      plan_add(&seen.text, ",\"shared\":%u", l->shared);
    if (l->cooperative)
      plan_add(&seen.text, ",\"cooperative\":1");
    write_params(name, params);
  }
  stand_in(name, params);
}

static void take_gemm(const char *call, const fake_gemm *g)
{
  if (!seen.on)
    return;
  know_scratch(recorded);
  plan_add(&seen.text, "%s{\"launch\":\"%s\"", seen.launches++ ? "," : "", call);
  write_params(call, g);
}

/* ---- a product ---- */

typedef struct made {
  meter meter;
  esmm_ctx *ctx;
  esmm_matrix a, b, c, residual;
  void *bias, *gate_bias, *counts;
  esmm_weights *w, *gate;
  esmm_pattern *given;
} made;

static void must(const made *x, esmm_status status)
{
  if (status != ESMM_OK)
    fail_msg("%s: %s", current->name, esmm_ctx_error(x->ctx));
}

static void *memory(const made *x, int64_t bytes, bool host)
{
  void *at = NULL;
  if (host)
    at = calloc(1, (size_t)bytes);
  else
    must(x, esmm_memory_alloc(x->ctx, (size_t)bytes, &at));
  assert_non_null(at);
  return at;
}

static esmm_matrix matrix(const made *x, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order, int64_t pad,
                          bool host)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .dtype = dtype, .order = order, .place = host ? ESMM_HOST : ESMM_DEVICE};
  const int64_t lines = order == ESMM_ROW_MAJOR ? rows : cols;
  m.ld = (order == ESMM_ROW_MAJOR ? cols : rows) + pad;
  m.data = memory(x, lines * m.ld * (int64_t)esmm_dtype_size(dtype), host);
  return m;
}

static void drop(const made *x, void *at, bool host)
{
  if (host)
    free(at);
  else
    esmm_memory_free(x->ctx, at);
}

/* A pattern of A that lies on the device: of a product whose C has A's shape. Its own plan is no part of the text. */
static esmm_pattern *pattern_of_a(const made *x, const product *p)
{
  esmm_matrix left = matrix(x, p->m, 64, p->dtype, ESMM_ROW_MAJOR, 0, false),
              right = matrix(x, 64, p->k, p->dtype, ESMM_ROW_MAJOR, 0, false), c = x->a;
  const esmm_prepare_opts strict = {.size = sizeof strict, .strict = 1};
  esmm_weights *w = NULL;
  esmm_pattern *pattern = NULL;
  const esmm_matmul_opts opts = {
      .size = sizeof opts, .strict = 1, .c_strip_rows = p->given_rows, .c_pattern = &pattern};
  must(x, esmm_prepare(x->ctx, &right, &strict, &w));
  must(x, esmm_matmul(x->ctx, &left, w, &c, &opts, NULL));
  esmm_weights_free(w);
  esmm_memory_free(x->ctx, left.data);
  esmm_memory_free(x->ctx, right.data);
  return pattern;
}

static void make(made *x, const product *p)
{
  const esmm_prepare_opts opts = {.size = sizeof opts, .format = p->format};
  reset();
  fake->sm = p->sm;
  fake->cublas = p->no_cublas ? NO_CUBLAS : 0;
  fake->memory = (size_t)1 << 40;
  *x = (made){0};
  x->ctx = must_create(&x->meter);
  current = p;
  zeros = (fake_zeros){.m = p->m, .strip = p->strip, .element = p->element, .density_b = p->density_b};
  fake->kernel = take_launch;
  fake->gemm = take_gemm;
  x->a = matrix(x, p->m, p->k, p->dtype, p->order_a, p->pad_a, p->host);
  x->b = matrix(x, p->k, p->n, p->dtype, p->order_b, 0, false);
  x->c = matrix(x, p->m, p->n, p->dtype_c, p->order_c, p->pad_c, p->host);
  if (p->residual)
    x->residual = p->residual == 2 ? x->c : matrix(x, p->m, p->n, p->dtype, ESMM_ROW_MAJOR, 8, p->host);
  if (p->bias)
    x->bias = memory(x, p->n * 4, p->host);
  if (p->gate_bias)
    x->gate_bias = memory(x, p->n * 4, p->host);
  if (p->counts)
    x->counts = memory(x, p->n * 4, p->host);
  must(x, esmm_prepare(x->ctx, &x->b, &opts, &x->w));
  if (p->gate)
    must(x, esmm_prepare(x->ctx, &x->b, &opts, &x->gate));
  if (p->given_rows)
    x->given = pattern_of_a(x, p);
}

static void unmake(made *x, const product *p)
{
  if (p->residual == 1)
    drop(x, x->residual.data, p->host);
  esmm_pattern_free(x->given);
  esmm_weights_free(x->w);
  esmm_weights_free(x->gate);
  drop(x, x->a.data, p->host);
  drop(x, x->b.data, false);
  drop(x, x->c.data, p->host);
  drop(x, x->bias, p->host);
  drop(x, x->gate_bias, p->host);
  drop(x, x->counts, p->host);
  esmm_ctx_free(x->ctx);
  fake->kernel = NULL;
  fake->gemm = NULL;
  assert_int_equal(x->meter.live, 0);
  check_balance(p->name);
}

static void know_weights(const esmm_weights *w, const char *name, const char *cells, const char *narrow)
{
  if (!w)
    return;
  know(esmm_cuda_of(w)->memory, name);
  know(esmm_cuda_of(w)->blocks.memory, cells);
  know(esmm_cuda_of(w)->blocks.narrow.memory, narrow);
}

/* Before each call: addresses of blocks that are gone may be another's by now. */
static void know_operands(const made *x, const product *p)
{
  seen.count = 0;
  know_weights(x->w, "B", "B cells", "B narrow");
  know_weights(x->gate, "gate", "gate cells", "gate narrow");
  if (p->host)
    return;
  know(esmm_cuda_address(&x->a), "A");
  know(esmm_cuda_address(&x->c), "C");
  know((uint64_t)(uintptr_t)x->bias, "bias");
  know((uint64_t)(uintptr_t)x->gate_bias, "gate_bias");
  know((uint64_t)(uintptr_t)x->counts, "counts");
  if (p->residual == 1)
    know(esmm_cuda_address(&x->residual), "residual");
}

static esmm_status call(made *x, const product *p, esmm_stats *stats)
{
  esmm_pattern *pattern = NULL;
  const esmm_matmul_opts opts = {.size = sizeof opts,
                                 .alpha = &p->alpha,
                                 .beta = &p->beta,
                                 .bias = x->bias,
                                 .activation = p->activation,
                                 .force = p->force,
                                 .a_pattern = x->given,
                                 .residual = p->residual ? &x->residual : NULL,
                                 .gate = x->gate,
                                 .gate_bias = x->gate_bias,
                                 .column_nonzeros = x->counts,
                                 .c_strip_rows = p->pattern_rows,
                                 .c_pattern = p->pattern_rows ? &pattern : NULL};
  const esmm_status status = esmm_matmul(x->ctx, &x->a, x->w, &x->c, &opts, stats);
  esmm_pattern_free(pattern);
  return status;
}

/* The launches of one call, [...]; to be freed. NULL: the forced kernel cannot run. */
static char *record(made *x, const product *p)
{
  seen.text = (plan_text){0};
  seen.launches = 0;
  know_operands(x, p);
  recorded = x->ctx;
  seen.on = true;
  plan_add(&seen.text, "[");
  const esmm_status status = call(x, p, NULL);
  seen.on = false;
  plan_add(&seen.text, "]");
  if (status == ESMM_ERR_UNSUPPORTED && p->force) {
    free(seen.text.data);
    return NULL;
  }
  must(x, status);
  return seen.text.data;
}

/* One line for it; none where a forced kernel cannot run. */
static bool add_product(plan_text *out, const product *p)
{
  made x;
  make(&x, p);
  char *first = record(&x, p), *last = NULL;
  if (first) {
    esmm_stats stats = {.size = sizeof stats};
    for (int i = 1; i < CALLS - 1 && !p->force; i++)
      must(&x, call(&x, p, NULL));
    last = p->force ? NULL : record(&x, p);
    must(&x, call(&x, p, &stats));
    plan_add(out, "{\"product\":\"%s\",\"kernel\":\"%s\"", p->name, stats.kernel);
    if (p->learnt)
      plan_add(out, ",\"last\":%s}\n", last);
    else if (!last || strcmp(first, last) == 0)
      plan_add(out, ",\"always\":%s}\n", first);
    else
      plan_add(out, ",\"first\":%s,\"last\":%s}\n", first, last);
  }
  const bool ran = first != NULL;
  free(first);
  free(last);
  unmake(&x, p);
  return ran;
}

/* ---- which products ---- */

/* bench/gpu_record.sh's sweep16. */
static void add_sweep(plan_text *out)
{
  static const int64_t sides[][2] = {{14336, 4096}, {4096, 14336}, {4096, 4096}},
                       rows[] = {1, 4, 16, 64, 256, 1024, 4096};
  static const double densities[] = {1, .9, .75, .5, .25, .125, .05};
  for (int s = 0; s < 3; s++)
    for (int r = 0; r < 7; r++)
      for (int d = 0; d < 7; d++) {
        product p = make_product(ESMM_BF16, rows[r], sides[s][0], sides[s][1]);
        p.element = densities[d];
        p.strip = ESMM_TILE;
        p.learnt = d > 0; /* before, they are all alike */
        set_name(&p, "sweep");
        (void)add_product(out, &p);
      }
}

/* Shapes and epilogues that kernels are forced to, where they can. */
static void vary(product *p, int shape)
{
  static const struct {
    int64_t m, n, k;
  } shapes[] = {{1, 4096, 4096},  {7, 1000, 2048},    {16, 3072, 768},    {64, 512, 1024},   {100, 96, 65},
                {300, 768, 3072}, {1024, 1024, 1024}, {4096, 4096, 4096}, {1792, 4096, 4096}};
  p->m = shapes[shape].m;
  p->n = shapes[shape].n;
  p->k = shapes[shape].k;
  p->element = shape % 3 == 0 ? .3 : shape % 3 == 1 ? .04 : 1;
  p->strip = shape % 2 ? 128 : 1;
  p->density_b = shape % 4 == 2 ? .5 : 1;
  p->bias = shape % 4 == 1;
  p->activation = shape == 3 ? ESMM_ACT_RELU2 : shape == 5 ? ESMM_ACT_GELU : ESMM_ACT_NONE;
  p->residual = shape == 5;
  p->beta = shape == 2 ? 1 : 0;
  p->order_c = shape == 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  p->order_a = shape == 6 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
}

enum { SHAPES = 9 };

/* Every `step`-th shape. */
static int add_forced_at(plan_text *out, const esmm_kernel *kernel, int sm, int step)
{
  static const esmm_format formats[] = {{.kind = ESMM_FORMAT_DENSE},
                                        {.kind = ESMM_FORMAT_BSR, .block_rows = 64, .block_cols = 64},
                                        {.kind = ESMM_FORMAT_BSR, .block_rows = 32, .block_cols = 32},
                                        {.kind = ESMM_FORMAT_NM, .keep = 2, .group = 4, .group_cols = 1}};
  const char *name = kernel->name;
  const int format = strstr(name, "bsr_narrow") ? 2 : strstr(name, "bsr") ? 1 : strstr(name, "nm") ? 3 : 0;
  int ran = 0;
  for (int shape = 0; shape < SHAPES; shape += step) {
    char group[64];
    product p = make_product(strstr(name, "bf16") ? ESMM_BF16 : strstr(name, "_f16") ? ESMM_F16 : ESMM_F32, 1, 1, 1);
    vary(&p, shape);
    p.sm = sm;
    p.force = name;
    p.format = formats[format];
    if (format == 1 || format == 2)
      p.density_b = .25;
    (void)snprintf(group, sizeof group, "%s", name);
    set_name(&p, group);
    ran += add_product(out, &p);
  }
  return ran;
}

static void add_forced(plan_text *out)
{
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    if (kernel->backend != &esmm_cuda_backend)
      continue;
    int ran = add_forced_at(out, kernel, 90, strstr(kernel->name, "_f16") ? 2 : 1); /* as bf16 */
    if (esmm_cuda_about(kernel)->sm == 80 && !esmm_cuda_about(kernel)->library)
      ran += add_forced_at(out, kernel, 80, 3);
    if (ran == 0)
      fail_msg("%s can do none of the products", kernel->name);
  }
}

/* ---- random products, as bench/storm.py has them ---- */

static int64_t pick(th_rng *rng, const int64_t *of, int count)
{
  return of[th_below(rng, count)];
}
#define PICK(rng, list) pick(rng, list, (int)(sizeof(list) / sizeof *(list)))

static const int64_t storm_rows[] = {1,  2,   3,   4,   7,   8,   12,  16,  19,   31,   32,   48,   65,
                                     96, 127, 128, 200, 256, 385, 512, 900, 1024, 1537, 2048, 3001, 4096};
static const int64_t storm_sides[] = {1,    7,    31,   33,   64,   96,   129,  250,  511,  512,  768,
                                      1001, 1024, 1536, 2047, 2048, 3072, 4095, 4096, 6144, 8192, 11008};
static const double storm_densities[] = {1, .95, .7, .5, .3, .15, .08, .03, .005, 0};

/* The zeros of A and B. */
static void draw_zeros(th_rng *rng, product *p)
{
  static const int64_t strips[] = {1, 1, 4, 16, 32, 64, 128, 200};
  static const double of_b[] = {1, 1, 1, .6, .2};
  p->element = storm_densities[th_below(rng, 10)];
  p->strip = PICK(rng, strips);
  p->density_b = of_b[th_below(rng, 5)];
}

/* What follows the sums. */
static void draw_epilogue(th_rng *rng, product *p)
{
  static const float scales[] = {1, 1, 1, 1, 1, 1, .5F, 0};
  static const int64_t pads[] = {0, 0, 0, 0, 8, 3};
  p->activation = th_below(rng, 3) ? ESMM_ACT_NONE : (esmm_activation)th_below(rng, 6);
  p->bias = th_below(rng, 3) == 0;
  p->residual = th_below(rng, 6) ? 0 : (int)(1 + th_below(rng, 2));
  p->alpha = scales[th_below(rng, 7)];
  p->beta = th_below(rng, 6) ? 0 : scales[th_below(rng, 7)];
  p->dtype_c = th_below(rng, 5) ? p->dtype : ESMM_F32;
  p->order_c = th_below(rng, 8) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
  p->pad_c = PICK(rng, pads);
}

static void add_random(plan_text *out, int index)
{
  static const esmm_dtype dtypes[] = {ESMM_BF16, ESMM_BF16, ESMM_F16, ESMM_F32};
  static const int64_t pads[] = {0, 0, 0, 8, 3};
  char group[32];
  th_rng rng = {.state = 2026 + ((uint64_t)index << 32)};
  const esmm_dtype dtype = dtypes[th_below(&rng, 4)];
  const int64_t m = PICK(&rng, storm_rows), n = PICK(&rng, storm_sides), k = PICK(&rng, storm_sides);
  product p = make_product(dtype, m, n, k);
  draw_zeros(&rng, &p);
  draw_epilogue(&rng, &p);
  p.order_a = th_below(&rng, 6) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
  p.order_b = th_below(&rng, 6) ? ESMM_ROW_MAJOR : ESMM_COL_MAJOR;
  p.pad_a = PICK(&rng, pads);
  p.sm = th_below(&rng, 8) ? 90 : 80;
  p.no_cublas = th_below(&rng, 8) == 0;
  p.host = th_below(&rng, 8) == 0 && m * k + m * n < 1 << 20; /* those are copied */
  (void)snprintf(group, sizeof group, "random %d", index);
  set_name(&p, group);
  (void)add_product(out, &p);
}

static void add_gated(plan_text *out, int index)
{
  static const int64_t rows[] = {1, 8, 16, 64, 200, 512, 1792, 2304, 3328, 4096}, sides[] = {1000, 2048, 4096, 11008};
  char group[32];
  th_rng rng = {.state = 4 + ((uint64_t)index << 32)};
  product p = make_product(th_below(&rng, 2) ? ESMM_BF16 : ESMM_F16, rows[index % 10], 1, 1);
  p.n = PICK(&rng, sides);
  p.k = PICK(&rng, sides);
  draw_zeros(&rng, &p);
  if (th_below(&rng, 3) == 0)
    draw_epilogue(&rng, &p);
  else
    p.activation = ESMM_ACT_SILU;
  if (index % 15 == 14)
    p.dtype = p.dtype_c = ESMM_F32;
  p.gate = true;
  p.gate_bias = th_below(&rng, 4) == 0;
  p.sm = th_below(&rng, 8) ? 90 : 80;
  p.no_cublas = th_below(&rng, 2) == 0;
  (void)snprintf(group, sizeof group, "gated %d", index);
  set_name(&p, group);
  (void)add_product(out, &p);
}

/* Counts and bitmaps of C: from the kernel that makes it, and from a launch behind it. */
static void add_statistics(plan_text *out, int index)
{
  static const int64_t rows[] = {1, 16, 200, 1024, 4096}, strips[] = {0, 8, 128, 32, 12};
  char group[32];
  th_rng rng = {.state = 9 + ((uint64_t)index << 32)};
  product p = make_product(index % 4 == 3 ? ESMM_F32 : index % 4 ? ESMM_BF16 : ESMM_F16, rows[index % 5], 3072, 768);
  draw_zeros(&rng, &p);
  p.activation = ESMM_ACT_RELU2;
  p.pattern_rows = strips[index / 5 % 4 + (index == 17)];
  p.counts = index % 2 == 0 || p.pattern_rows == 0;
  p.no_cublas = index % 3 == 0;
  p.order_c = index % 7 == 6 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  p.gate = index % 9 == 8;
  (void)snprintf(group, sizeof group, "statistics %d", index);
  set_name(&p, group);
  (void)add_product(out, &p);
}

/* Bitmaps of A from another product: they tell the plan its densities. */
static void add_given(plan_text *out)
{
  static const int64_t rows[] = {16, 64, 1024, 4096}, strips[] = {32, 128, 8};
  static const double densities[] = {1, .3, .05};
  for (int r = 0; r < 4; r++)
    for (int s = 0; s < 3; s++) {
      product p = make_product(s == 2 ? ESMM_F16 : ESMM_BF16, rows[r], 4096, 2048);
      p.given_rows = strips[s];
      p.strip = ESMM_TILE;
      p.element = densities[(r + s) % 3];
      set_name(&p, "given");
      (void)add_product(out, &p);
    }
}

static void add_blocks(plan_text *out)
{
  static const int64_t rows[] = {1, 16, 64, 512, 4096, 16384};
  static const int sides[] = {32, 64, 128};
  static const double densities[] = {.5, .2, .05};
  for (int r = 0; r < 6; r++)
    for (int s = 0; s < 3; s++)
      for (int d = 0; d < 3; d++) {
        product p = make_product(d == 1 ? ESMM_F16 : ESMM_BF16, rows[r], r == 3 ? 3000 : 4096, 4096);
        p.format = (esmm_format){.kind = ESMM_FORMAT_BSR, .block_rows = sides[s], .block_cols = sides[s]};
        p.density_b = densities[d];
        p.element = s == 1 && d == 2 ? .1 : 1;
        p.strip = ESMM_TILE;
        p.sm = r == 2 && d == 0 ? 80 : 90;
        p.activation = r == 3 ? ESMM_ACT_RELU : ESMM_ACT_NONE;
        set_name(&p, "blocks");
        (void)add_product(out, &p);
      }
}

static void add_n_m(plan_text *out)
{
  static const int64_t rows[] = {1, 8, 16, 32, 64, 128, 256, 512, 2048, 4096};
  static const struct {
    int keep, group;
  } patterns[] = {{2, 4}, {1, 4}, {4, 8}};
  for (int i = 0; i < 3; i++)
    for (int r = 0; r < (i ? 4 : 20); r++) {
      product p = make_product(r % 4 == 3 ? ESMM_F16 : ESMM_BF16, rows[i ? 3 * r : r % 10], r < 10 ? 4096 : 1000,
                               r < 10 ? 4096 : 14336);
      p.format =
          (esmm_format){.kind = ESMM_FORMAT_NM, .keep = patterns[i].keep, .group = patterns[i].group, .group_cols = 1};
      p.element = r % 5 == 2 ? .1 : 1;
      p.strip = ESMM_TILE;
      p.sm = r % 7 == 5 ? 80 : 90;
      p.bias = r % 3 == 0;
      p.order_a = r % 6 == 4 ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
      set_name(&p, "n:m");
      (void)add_product(out, &p);
    }
}

/* ---- the file ---- */

static char *read_file(const char *path)
{
  plan_text text = {0};
  char line[1 << 16];
  FILE *f = fopen(path, "r");
  if (!f)
    return NULL;
  while (fgets(line, sizeof line, f))
    plan_add(&text, "%s", line);
  (void)fclose(f);
  return text.data;
}

static void write_file(const char *path, const plan_text *text)
{
  FILE *f = fopen(path, "w");
  if (!f || fwrite(text->data, 1, text->length, f) != text->length || fclose(f) != 0)
    fail_msg("cannot write %s", path);
}

static void plans_are_as_they_were(void **state)
{
  (void)state;
  plan_text text = {0};
  add_sweep(&text);
  for (int i = 0; i < 200; i++)
    add_random(&text, i);
  for (int i = 0; i < 30; i++)
    add_gated(&text, i);
  for (int i = 0; i < 20; i++)
    add_statistics(&text, i);
  add_given(&text);
  add_blocks(&text);
  add_n_m(&text);
  add_forced(&text);
  if (getenv("ESMM_GOLDEN_UPDATE")) {
    write_file(GOLDEN, &text);
  } else {
    char *golden = read_file(GOLDEN);
    if (!golden)
      fail_msg("there is no %s, from the root of the tree; `make golden` writes it", GOLDEN);
    plan_text said = {0};
    const int others = plan_compare(golden, text.data, &said);
    if (others)
      fail_msg("%d products are planned otherwise; where that is wanted, `make golden` writes %s anew%s", others,
               GOLDEN, said.data);
    free(golden);
  }
  free(text.data);
}

/* A field that no table has would be in no text. */
static void tables_have_every_field(void **state)
{
  (void)state;
  char why[256];
  if (!params_complete(why, sizeof why))
    fail_msg("%s", why);
}

int main(int argc, char **argv)
{
  (void)argc;
  (void)use_fake(argv);
  setenv("ESMM_REMEMBER", "1", 1);
  unsetenv("ESMM_COOPERATIVE");
  const struct CMUnitTest without[] = {cmocka_unit_test(no_kernels)};
  const struct CMUnitTest with[] = {TEST(tables_have_every_field), TEST(plans_are_as_they_were)};
  if (!has_kernels())
    return cmocka_run_group_tests_name("cuda golden, no GPU kernels", without, NULL, NULL);
  return cmocka_run_group_tests_name("cuda golden", with, NULL, NULL);
}
