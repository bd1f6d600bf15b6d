/*
 * generate.c: matrices with zeros in known places, for tests, benchmarks and bindings alike.
 *
 * Every number is a function of (seed, operand, indices) through a counter-based hash, never of what was drawn before
 * it, so a matrix is the same for any number of threads, any order, any ld; a smaller matrix is a corner of the larger
 * one (activations excepted, which fit features and thresholds to the whole); another dtype only rounds the same
 * values. What decides whether an element is zero uses integers, or IEEE additions, multiplications, divisions and
 * square roots alone: no library function that another machine may round another way.
 *
 * Indices are (outer, k): outer runs over A's rows or B's columns. Tiles of 64 x 64 are filled in a cache-resident
 * buffer and then stored in the matrix's own order and dtype, so no generator knows about either.
 */
#include "convert.h"
#include "esmm_tools.h"
#include "threads.h"

#include <math.h>
#include <string.h>

enum { TILE = 64 };

/* ---- random numbers ---- */

/* The purpose of a stream: two purposes never share one. */
enum { STREAM_VALUES = 1, STREAM_ALIVE, STREAM_SHUFFLE, STREAM_SHARED, STREAM_LATENT };

/* A bijection of 64 bits whose output bits each depend on all input bits (the finaliser of splitmix64). */
static inline uint64_t mix(uint64_t x)
{
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* Number `index` of stream `key`; also the key of a substream. */
static inline uint64_t draw(uint64_t key, int64_t index)
{
  return mix(key + ((uint64_t)index + 1) * 0x9e3779b97f4a7c15u);
}

/* Uniform in [-1, 1] without 0, in steps of 2^-23: exact in fp32, and the smallest is still a (subnormal) fp16. */
static inline float real_value(uint32_t bits)
{
  float magnitude = (float)((bits >> 8 & 0x7fffffu) + 1) * 0x1p-23f;
  return bits >> 31 ? -magnitude : magnitude;
}

/* -4 to 4 without 0 */
static inline float integer_value(uint32_t bits)
{
  int i = (int)(bits >> 29);
  return (float)(i < 4 ? i - 4 : i - 3);
}

/* ---- tiles ---- */

typedef struct job {
  esmm_generator gen;
  esmm_matrix out;
  int64_t outer, k;
  uint64_t key;
  uint64_t limit; /* density in units of 2^-32 */
  bool k_contiguous;
} job;

static void store_tile(const job *j, float tile[TILE][TILE], int64_t outer, int64_t outers, int64_t k, int64_t ks)
{
  if (j->k_contiguous)
    for (int64_t o = 0; o < outers; o++)
      esmm_store_elements(j->out.data, j->out.dtype, (outer + o) * j->out.ld + k, 1, ks, tile[o], 1);
  else
    for (int64_t i = 0; i < ks; i++)
      esmm_store_elements(j->out.data, j->out.dtype, (k + i) * j->out.ld + outer, 1, outers, &tile[0][i], TILE);
}

static void fill_tile(const job *j, float tile[TILE][TILE], int64_t outer, int64_t outers, int64_t k, int64_t ks)
{
  const esmm_generator *g = &j->gen;
  const uint64_t values = draw(j->key, STREAM_VALUES), alive_strips = draw(j->key, STREAM_ALIVE);
  bool alive[TILE];
  int64_t strip = -1;
  for (int64_t i = 0; i < ks; i++)
    alive[i] = g->kind != ESMM_GEN_PATTERN || g->pattern[(k + i) % 8] == '1';
  for (int64_t o = 0; o < outers; o++) {
    if (g->kind == ESMM_GEN_BLOCKWISE && (outer + o) / g->strip != strip) {
      strip = (outer + o) / g->strip;
      uint64_t key = draw(alive_strips, strip);
      for (int64_t i = 0; i < ks; i++)
        alive[i] = draw(key, k + i) >> 32 < j->limit;
    }
    uint64_t key = draw(values, outer + o);
    for (int64_t i = 0; i < ks; i++) {
      uint64_t bits = draw(key, k + i);
      float value = g->integers ? integer_value((uint32_t)bits) : real_value((uint32_t)bits);
      bool keep = g->kind == ESMM_GEN_RANDOM ? bits >> 32 < j->limit : alive[i];
      tile[o][i] = keep ? value : 0.0f;
    }
  }
}

static void generate_tiles(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  const job *j = arg;
  const int64_t across = esmm_ceil_div(j->k, TILE);
  for (int64_t t = first; t < end; t++) {
    float tile[TILE][TILE];
    int64_t outer = t / across * TILE, k = t % across * TILE;
    int64_t outers = esmm_min(TILE, j->outer - outer), ks = esmm_min(TILE, j->k - k);
    fill_tile(j, tile, outer, outers, k, ks);
    store_tile(j, tile, outer, outers, k, ks);
  }
}

/* ---- activations ----
 *
 * Token t's feature f is active where a standard normal x(t,f) exceeds the feature's threshold, and is then the excess
 * (ReLU) or its square:
 *
 *     x(t,f) = sqrt(1 - white) y(t,f) + sqrt(white - shared) e(t,f) + sqrt(shared) u(t)
 *     y(t,f) = rho y(t-1,f) + sqrt(1 - rho^2) n(t,f)       neighbouring tokens resemble each other
 *     u(t)                                                 some tokens excite every feature
 *     threshold(f) = mu + sigma z(f)                       features of very different activity
 *
 * z(f) are normal quantiles at equal steps, shuffled: the spread of activities is the same for every seed. Dead
 * features have no threshold that can be reached. For an activity p of the features that are not dead,
 * mu = sqrt(1 + sigma^2) Q(p), Q the upper quantile of the standard normal, since x - sigma z has variance
 * 1 + sigma^2.
 *
 * Where memory is long (rho near 1) a few thousand rows hold only a few independent draws of y, and the density they
 * happen to give can be a tenth off. There a first pass counts the active elements, and all thresholds move by what is
 * missing. This doubles the work on features that are not dead; such layers have few.
 *
 * The strip density at m rows is the share of features with max over m rows of x above the threshold. Simulating that
 * maximum and fitting sigma, rho and white by least squares over m = 8, 16, 32, 128 gave the table below from the
 * measured layers of a GPT (ReLU^2, 8 layers, FFN 3072); no strip density is off by more than 0.02. In layers 1 and 2
 * several (sigma, rho) fit alike: the table has one, of a coarse grid, that is close to layer 1's activations in its
 * spread of activities and in its memory over hundreds of rows. The constants turned out to be a function of p alone.
 * They are interpolated between measured layers and constant outside them. `shared` is from the spread of density among
 * tokens in layers 1 and 4; it leaves strip densities as they are.
 */
#define LONG_MEMORY 0.9 /* the rho above which thresholds are corrected */
#define MOST_MOVED 0.25 /* a matrix that asks for more is too small to measure */

typedef struct calibration {
  double p, sigma, rho, white, shared;
} calibration;

static const calibration layers[] = {
    {0.050, 1.100, 0.990, 0.13, 0.1000}, /* layer 1: 90 % of features dead */
    {0.084, 1.000, 0.980, 0.30, 0.0750}, /* layer 2: 69 % dead */
    {0.129, 0.930, 0.755, 0.20, 0.0500}, /* layer 3: 15 % dead */
    {0.160, 0.450, 0.793, 0.20, 0.0125}, /* layer 4, none dead from here on */
    {0.190, 0.445, 0.733, 0.20, 0.0125}, /* layers 5 and 6 */
    {0.260, 0.487, 0.637, 0.20, 0.0125}, /* layer 7 */
    {0.430, 1.240, 0.100, 0.20, 0.0125}, /* layer 0 */
};

static calibration calibrate(double p)
{
  const size_t last = sizeof layers / sizeof layers[0] - 1;
  size_t i = 0;
  while (i < last && layers[i + 1].p < p)
    i++;
  if (i == last || p <= layers[0].p)
    return layers[i];
  const calibration *a = &layers[i], *b = &layers[i + 1];
  double at = (p - a->p) / (b->p - a->p);
  return (calibration){.p = p,
                       .sigma = a->sigma + at * (b->sigma - a->sigma),
                       .rho = a->rho + at * (b->rho - a->rho),
                       .white = a->white + at * (b->white - a->white),
                       .shared = a->shared + at * (b->shared - a->shared)};
}

enum {
  TAIL_STEPS = 384, /* the tail is tabulated to 6 standard deviations, 64 steps to each */
  GAUSS_BITS = 11,
  GAUSS_CELLS = 1 << GAUSS_BITS
};

typedef struct latent {
  double tail[TAIL_STEPS + 1];  /* tail[i]: P(Z > i / 64), Z standard normal */
  float gauss[GAUSS_CELLS + 1]; /* quantiles of Z at equal steps of probability */
  float threshold[];            /* [k]; HUGE_VALF for dead features */
} latent;

/* Simpson's rule inwards from the far end; the density at half steps d = 1/128 comes from exp(-(t+d)^2 / 2) =
 * exp(-t^2 / 2) * exp(-d t - d^2 / 2), so that multiplications are enough. */
static void tabulate_tail(double *tail)
{
  double density[2 * TAIL_STEPS + 1];
  double ratio = 0.99996948288753155;      /* exp(-d^2 / 2) */
  const double step = 0.99993896670635725; /* exp(-d^2) */
  density[0] = 0.39894228040143268;        /* 1 / sqrt(2 pi) */
  for (int i = 0; i < 2 * TAIL_STEPS; i++, ratio *= step)
    density[i + 1] = density[i] * ratio;
  tail[TAIL_STEPS] = 9.8658764503769814e-10; /* P(Z > 6) */
  for (int i = TAIL_STEPS - 1; i >= 0; i--)
    tail[i] = tail[i + 1] + (density[2 * i] + 4 * density[2 * i + 1] + density[2 * i + 2]) / (6 * 64);
}

/* t such that P(Z > t) = p, within the table's 6 standard deviations */
static double upper_quantile(const double *tail, double p)
{
  if (p > 0.5)
    return -upper_quantile(tail, 1 - p);
  if (p <= tail[TAIL_STEPS])
    return 6;
  int low = 0, high = TAIL_STEPS; /* tail[low] >= p > tail[high] */
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (tail[middle] >= p)
      low = middle;
    else
      high = middle;
  }
  return (low + (tail[low] - p) / (tail[low] - tail[high])) / 64;
}

static void tabulate_gauss(latent *l)
{
  /* The outermost cells end where their mean is that of the normal's tail beyond 1 / 2048. */
  const float end = 3.84f;
  l->gauss[0] = -end;
  l->gauss[GAUSS_CELLS] = end;
  for (int i = 1; i < GAUSS_CELLS; i++)
    l->gauss[i] = (float)-upper_quantile(l->tail, (double)i / GAUSS_CELLS);
}

static inline float gauss(const latent *l, uint32_t bits)
{
  uint32_t cell = bits >> (32 - GAUSS_BITS);
  float within = (float)(bits << GAUSS_BITS >> GAUSS_BITS) * (1.0f / (float)(1u << (32 - GAUSS_BITS)));
  return l->gauss[cell] + within * (l->gauss[cell + 1] - l->gauss[cell]);
}

typedef struct recipe {
  int64_t alive;   /* features that are not dead */
  double activity; /* of those */
  calibration c;
} recipe;

static recipe make_recipe(const job *j)
{
  recipe r = {0};
  if (j->gen.density > 0) { /* at least one feature is alive, else the density could not be had */
    r.alive = esmm_max(1, j->k - (int64_t)((double)j->k * j->gen.dead + 0.5));
    r.activity = j->gen.density * (double)j->k / (double)r.alive;
  }
  r.c = calibrate(r.activity);
  return r;
}

static void set_thresholds(const job *j, const recipe *r, latent *l)
{
  const double sigma = r->c.sigma, mu = sqrt(1 + sigma * sigma) * upper_quantile(l->tail, r->activity);
  for (int64_t f = 0; f < j->k; f++)
    if (f >= r->alive)
      l->threshold[f] = HUGE_VALF;
    else if (r->activity >= 1) /* below everything that draws of at most 3.84 can sum up to, at the rho held there */
      l->threshold[f] = -16;
    else
      l->threshold[f] = (float)(mu + sigma * upper_quantile(l->tail, ((double)f + 0.5) / (double)r->alive));
  const uint64_t key = draw(j->key, STREAM_SHUFFLE);
  for (int64_t f = j->k - 1; f > 0; f--) {
    uint64_t other = draw(key, f) % ((uint64_t)f + 1);
    float swap = l->threshold[f];
    l->threshold[f] = l->threshold[other];
    l->threshold[other] = swap;
  }
}

/* Moves the thresholds of a matrix with `active` elements above them to where the planned number would be. */
static void correct_thresholds(const job *j, const recipe *r, int64_t active, latent *l)
{
  const double observed = (double)active / ((double)r->alive * (double)j->outer), sigma = r->c.sigma;
  double move = sqrt(1 + sigma * sigma) * (upper_quantile(l->tail, r->activity) - upper_quantile(l->tail, observed));
  move = move > MOST_MOVED ? MOST_MOVED : move < -MOST_MOVED ? -MOST_MOVED : move;
  for (int64_t f = 0; f < j->k; f++)
    l->threshold[f] += (float)move;
}

/* The value of a feature that exceeds its threshold, never so small that fp16 would make it zero. */
static inline float activate(const esmm_generator *g, float excess)
{
  if (g->integers)
    return excess < 1.5f ? 1.0f + (float)(int)(2 * excess) : 4.0f;
  float value = g->activation == ESMM_ACT_RELU ? excess : excess * excess;
  return value > 0x1p-24f ? value : 0x1p-24f;
}

/*
 * TILE features from k on, down all rows; features are independent given u, so these are separate tasks. Returns how
 * many elements are active; they are written only if `store` is set.
 */
static int64_t generate_features(const job *j, const latent *l, const calibration *c, int64_t k, bool store)
{
  const float rho = (float)c->rho, innovation = (float)sqrt(1 - c->rho * c->rho);
  const float of_y = (float)sqrt(1 - c->white), of_e = (float)sqrt(c->white - c->shared), of_u = (float)sqrt(c->shared);
  const uint64_t shared = draw(j->key, STREAM_SHARED), rows = draw(j->key, STREAM_LATENT);
  const int64_t ks = esmm_min(TILE, j->k - k);
  float y[TILE], tile[TILE][TILE];
  int64_t active = 0;
  for (int64_t first = 0; first < j->outer; first += TILE) {
    const int64_t outers = esmm_min(TILE, j->outer - first);
    for (int64_t o = 0; o < outers; o++) {
      const float u = of_u * gauss(l, (uint32_t)draw(shared, first + o));
      const uint64_t key = draw(rows, first + o);
      for (int64_t i = 0; i < ks; i++) {
        tile[o][i] = 0;
        if (l->threshold[k + i] == HUGE_VALF)
          continue;
        const uint64_t bits = draw(key, k + i);
        const float n = gauss(l, (uint32_t)(bits >> 32)), e = gauss(l, (uint32_t)bits);
        y[i] = first + o == 0 ? n : rho * y[i] + innovation * n;
        const float excess = of_y * y[i] + of_e * e + u - l->threshold[k + i];
        if (excess > 0) {
          tile[o][i] = activate(&j->gen, excess);
          active++;
        }
      }
    }
    if (store)
      store_tile(j, tile, first, outers, k, ks);
  }
  return active;
}

typedef struct rows_job {
  const job *j;
  const latent *l;
  const calibration *c;
  bool store;
  _Atomic int64_t active;
} rows_job;

/* first, end: in TILEs of features */
static void generate_stretches(void *arg, int64_t first, int64_t end, int worker)
{
  (void)worker;
  rows_job *r = arg;
  int64_t active = 0;
  for (int64_t i = first; i < end; i++)
    active += generate_features(r->j, r->l, r->c, i * TILE, r->store);
  r->active += active;
}

static int64_t generate_rows(const esmm_ctx *ctx, const job *j, const latent *l, const calibration *c, bool store)
{
  rows_job r = {.j = j, .l = l, .c = c, .store = store};
  esmm_for(ctx, ctx->threads, esmm_ceil_div(j->k, TILE), 1, generate_stretches, &r);
  return r.active;
}

static esmm_status generate_activations(esmm_ctx *ctx, const job *j)
{
  size_t bytes;
  if (!esmm_size_mul((size_t)j->k, sizeof(float), &bytes) || !esmm_size_add(bytes, sizeof(latent), &bytes))
    return esmm_fail(ctx, ESMM_ERR_OVERFLOW, "thresholds of %lld features do not fit in memory", (long long)j->k);
  latent *l = esmm_mem_alloc(&ctx->allocator, bytes);
  if (!l)
    return esmm_fail(ctx, ESMM_ERR_MEMORY, "out of memory: %zu bytes for the activations generator", bytes);
  tabulate_tail(l->tail);
  tabulate_gauss(l);
  const recipe r = make_recipe(j);
  set_thresholds(j, &r, l);
  if (r.alive > 0 && r.c.rho > LONG_MEMORY)
    correct_thresholds(j, &r, generate_rows(ctx, j, l, &r.c, false), l);
  (void)generate_rows(ctx, j, l, &r.c, true);
  esmm_mem_free(&ctx->allocator, l, bytes);
  return ESMM_OK;
}

/* ---- the interface ---- */

/* A copy with defaults filled in; fields that an older caller's struct does not have are 0. */
static esmm_status take_generator(esmm_ctx *ctx, const esmm_generator *generator, esmm_generator *g)
{
  if (!generator)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator is NULL");
  if (!esmm_struct_size(generator->size, sizeof *g))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->size is %zu; set it to sizeof *generator, %zu in this version",
                     generator->size, sizeof *g);
  memset(g, 0, sizeof *g);
  memcpy(g, generator, generator->size);
  return ESMM_OK;
}

static esmm_status check_share(esmm_ctx *ctx, const char *what, double share)
{
  if (!(share >= 0 && share <= 1))
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->%s is %g, must be from 0 to 1", what, share);
  return ESMM_OK;
}

static esmm_status check_activations(esmm_ctx *ctx, esmm_generator *g)
{
  esmm_status status = check_share(ctx, "dead", g->dead);
  if (status != ESMM_OK)
    return status;
  if (g->activation == ESMM_ACT_NONE)
    g->activation = ESMM_ACT_RELU2;
  if (g->activation != ESMM_ACT_RELU && g->activation != ESMM_ACT_RELU2)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->activation is %d, must be ReLU (%d) or ReLU2 (%d)",
                     (int)g->activation, (int)ESMM_ACT_RELU, (int)ESMM_ACT_RELU2);
  if (g->operand != ESMM_OPERAND_A)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->operand is B (%d): activations are made for operand A only",
                     (int)g->operand);
  if (g->density + g->dead > 1 + 1e-9) /* 0.1 and 0.9 do agree, though their sum is not 1 in binary */
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->density is %g, more than a dead share of %g leaves alive",
                     g->density, g->dead);
  return ESMM_OK;
}

/* Whether the fields that this kind reads make sense. */
static esmm_status check_generator(esmm_ctx *ctx, esmm_generator *g)
{
  esmm_status status = ESMM_OK;
  if (g->operand != ESMM_OPERAND_A && g->operand != ESMM_OPERAND_B)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->operand is %d, which is no esmm_operand", (int)g->operand);
  switch (g->kind) {
  case ESMM_GEN_DENSE:
    return ESMM_OK;
  case ESMM_GEN_RANDOM:
    return check_share(ctx, "density", g->density);
  case ESMM_GEN_BLOCKWISE:
    if (g->strip < 0)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->strip is %lld, must not be negative", (long long)g->strip);
    g->strip = g->strip ? g->strip : 32;
    return check_share(ctx, "density", g->density);
  case ESMM_GEN_PATTERN:
    if (!g->pattern)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->pattern is NULL");
    if (strlen(g->pattern) != 8 || strspn(g->pattern, "01") != 8)
      return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->pattern is \"%.40s\", must be eight characters 0 or 1",
                       g->pattern);
    return ESMM_OK;
  case ESMM_GEN_ACTIVATIONS:
    status = check_share(ctx, "density", g->density);
    return status == ESMM_OK ? check_activations(ctx, g) : status;
  }
  return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator->kind is %d, which is no esmm_generator_kind", (int)g->kind);
}

/* A matrix on the GPU is made in host memory and copied: the same matrix on every machine. */
static esmm_status generate_on_gpu(esmm_ctx *ctx, const esmm_generator *generator, const esmm_matrix *out)
{
  esmm_matrix twin;
  esmm_status status = esmm_host_twin(ctx, out, &twin);
  if (status != ESMM_OK)
    return status;
  status = esmm_generate(ctx, generator, &twin);
  if (status == ESMM_OK)
    status = esmm_host_twin_write(ctx, &twin, out);
  esmm_host_twin_free(ctx, &twin);
  return status;
}

esmm_status esmm_generate(esmm_ctx *ctx, const esmm_generator *generator, esmm_matrix *out)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  job j;
  esmm_status status = take_generator(ctx, generator, &j.gen);
  if (status == ESMM_OK)
    status = check_generator(ctx, &j.gen);
  if (status == ESMM_OK)
    status = esmm_check_matrix(ctx, "out", out, &j.out);
  if (status != ESMM_OK)
    return status;
  const bool is_a = j.gen.operand == ESMM_OPERAND_A;
  j.outer = is_a ? j.out.rows : j.out.cols;
  j.k = is_a ? j.out.cols : j.out.rows;
  if (j.outer == 0 || j.k == 0)
    return ESMM_OK;
  if (j.out.place == ESMM_DEVICE)
    return generate_on_gpu(ctx, &j.gen, &j.out);
  j.k_contiguous = is_a == (j.out.order == ESMM_ROW_MAJOR);
  j.key = draw(mix(j.gen.seed), (int64_t)j.gen.operand); /* one seed for both operands still makes them independent */
  const bool has_density = j.gen.kind == ESMM_GEN_RANDOM || j.gen.kind == ESMM_GEN_BLOCKWISE; /* else not checked */
  j.limit = has_density ? (uint64_t)(j.gen.density * 0x1p32) : 0;
  if (j.gen.kind == ESMM_GEN_ACTIVATIONS)
    return generate_activations(ctx, &j);
  esmm_for(ctx, ctx->threads, esmm_ceil_div(j.k, TILE) * esmm_ceil_div(j.outer, TILE), 4, generate_tiles, &j);
  return ESMM_OK;
}

esmm_status esmm_generator_preset(esmm_ctx *ctx, const char *preset, esmm_generator *generator)
{
  static const struct {
    const char *name;
    double density, dead;
  } presets[] = {
      {"early", 0.005, 0.90}, /* nearly all features never fire: tall strips stay sparse */
      {"middle", 0.11, 0.15}, /* between the two */
      {"late", 0.16, 0},      /* every feature fires sometimes: tall strips are full */
  };
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  esmm_generator g;
  esmm_status status = take_generator(ctx, generator, &g);
  if (status != ESMM_OK)
    return status;
  if (!preset)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "preset is NULL");
  for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
    if (strcmp(preset, presets[i].name) == 0) {
      g.density = presets[i].density;
      g.dead = presets[i].dead;
      memcpy(generator, &g, g.size);
      return ESMM_OK;
    }
  return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "preset is \"%.40s\", must be early, middle or late", preset);
}
