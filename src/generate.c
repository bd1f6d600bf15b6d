/*
 * generate.c: matrices with zeros in known places, for tests, benchmarks and bindings alike.
 *
 * Every number is a function of (seed, operand, indices) through a counter-based hash, never of what was drawn before
 * it, so a matrix is the same for any number of threads, any order, any ld; a smaller matrix is a corner of the larger
 * one (activations excepted, whose dead features are counted over all of k); another dtype only rounds the same values.
 * What decides whether an element is zero uses integers, or IEEE additions, multiplications, divisions and square roots
 * alone: no library function that another machine may round another way.
 *
 * Indices are (outer, k): outer runs over A's rows or B's columns. Tiles of 64 x 64 are filled in a cache-resident
 * buffer and then stored in the matrix's own order and dtype, so no generator knows about either.
 */
#include "convert.h"
#include "internal.h"

#include <math.h>
#include <string.h>

enum { TILE = 64 };

/* ---- random numbers ---- */

/* What a stream is for: two purposes never share one. */
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
    for (int64_t o = 0; o < outers; o++) {
      int64_t at = (outer + o) * j->out.ld + k;
      if (j->out.dtype == ESMM_F32)
        memcpy((float *)j->out.data + at, tile[o], (size_t)ks * sizeof(float));
      else
        for (int64_t i = 0; i < ks; i++)
          esmm_store_element(j->out.data, j->out.dtype, at + i, tile[o][i]);
    }
  else
    for (int64_t i = 0; i < ks; i++) {
      int64_t at = (k + i) * j->out.ld + outer;
      for (int64_t o = 0; o < outers; o++)
        esmm_store_element(j->out.data, j->out.dtype, at + o, tile[o][i]);
    }
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

static void generate_tiles(const job *j, int threads)
{
  const int64_t across = esmm_ceil_div(j->k, TILE), tiles = across * esmm_ceil_div(j->outer, TILE);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t t = 0; t < tiles; t++) {
    float tile[TILE][TILE];
    int64_t outer = t / across * TILE, k = t % across * TILE;
    int64_t outers = esmm_min(TILE, j->outer - outer), ks = esmm_min(TILE, j->k - k);
    fill_tile(j, tile, outer, outers, k, ks);
    store_tile(j, tile, outer, outers, k, ks);
  }
  (void)threads; /* unused without OpenMP */
}

/* ---- activations ----
 *
 * Token t's feature f is active where a standard normal x(t,f) exceeds the feature's threshold, and is then the excess
 * (ReLU) or its square:
 *
 *     x(t,f) = sqrt(1 - WHITE) y(t,f) + sqrt(WHITE - shared) e(t,f) + sqrt(shared) u(t)
 *     y(t,f) = rho y(t-1,f) + sqrt(1 - rho^2) n(t,f)       neighbouring tokens resemble each other
 *     u(t)                                                 some tokens excite every feature
 *     threshold(f) = mu + sigma z(f)                       features of very different activity
 *
 * z(f) are normal quantiles at equal steps, shuffled: the spread of activities is the same for every seed. Dead
 * features have no threshold that can be reached. For an activity p of the features that are not dead,
 * mu = sqrt(1 + sigma^2) * Q(p), Q the upper quantile of the standard normal, since x - sigma z has variance 1 +
 * sigma^2.
 *
 * The strip density at m rows is the share of features with max over m rows of x above the threshold. With sigma
 * and rho free (WHITE = 0.2 did for all), least squares over m = 8, 16, 32, 128 on a simulation of that maximum gave
 * the table below from the layers of a GPT trained with ReLU^2 (8 layers, FFN 3072, 2048 tokens); the largest residue
 * is 0.011. They turned out to be a function of p alone: seldom active features go with a wide spread and long memory.
 * Between the measured layers it is interpolated, outside it is held. `shared` gives the measured spread of density
 * among tokens in layers 1 and 4 (as far as WHITE allows in layer 1); it does not change strip densities.
 */
#define WHITE 0.2

typedef struct calibration {
  double p, sigma, rho, shared;
} calibration;

static const calibration layers[] = {
    {0.050, 2.08, 0.920, 0.1500},  /* layer 1: 90 % of features dead */
    {0.084, 1.41, 0.866, 0.1000},  /* layer 2: 69 % dead */
    {0.129, 0.93, 0.755, 0.0500},  /* layer 3: 15 % dead */
    {0.160, 0.45, 0.793, 0.0125},  /* layer 4, none dead from here on */
    {0.190, 0.445, 0.733, 0.0125}, /* layers 5 and 6 */
    {0.260, 0.487, 0.637, 0.0125}, /* layer 7 */
    {0.430, 1.24, 0.100, 0.0125},  /* layer 0 */
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
  return (calibration){p, a->sigma + at * (b->sigma - a->sigma), a->rho + at * (b->rho - a->rho),
                       a->shared + at * (b->shared - a->shared)};
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

/* Thresholds of all features; returns the calibration they are made with. */
static calibration set_thresholds(const job *j, latent *l)
{
  int64_t alive = 0;
  if (j->gen.density > 0) /* at least one, else the density could not be had */
    alive = esmm_max(1, j->k - (int64_t)((double)j->k * j->gen.dead + 0.5));
  const double p = alive > 0 ? j->gen.density * (double)j->k / (double)alive : 0;
  const calibration c = calibrate(p);
  const double mu = sqrt(1 + c.sigma * c.sigma) * upper_quantile(l->tail, p);
  for (int64_t f = 0; f < j->k; f++)
    if (f >= alive)
      l->threshold[f] = HUGE_VALF;
    else if (p >= 1) /* below everything that draws of at most 3.84 can sum up to, at the rho held there */
      l->threshold[f] = -16;
    else
      l->threshold[f] = (float)(mu + c.sigma * upper_quantile(l->tail, ((double)f + 0.5) / (double)alive));
  const uint64_t key = draw(j->key, STREAM_SHUFFLE);
  for (int64_t f = j->k - 1; f > 0; f--) {
    uint64_t other = draw(key, f) % ((uint64_t)f + 1);
    float swap = l->threshold[f];
    l->threshold[f] = l->threshold[other];
    l->threshold[other] = swap;
  }
  return c;
}

/* What a feature that exceeds its threshold gives. Never so small that fp16 would make it zero. */
static inline float activate(const esmm_generator *g, float excess)
{
  if (g->integers)
    return excess < 1.5f ? 1.0f + (float)(int)(2 * excess) : 4.0f;
  float value = g->activation == ESMM_ACT_RELU ? excess : excess * excess;
  return value > 0x1p-24f ? value : 0x1p-24f;
}

/* Features are independent of each other given u, so blocks of them run in parallel, each down all rows. */
static void generate_features(const job *j, const latent *l, const calibration *c, int64_t k)
{
  const float rho = (float)c->rho, innovation = (float)sqrt(1 - c->rho * c->rho);
  const float of_y = (float)sqrt(1 - WHITE), of_e = (float)sqrt(WHITE - c->shared), of_u = (float)sqrt(c->shared);
  const uint64_t shared = draw(j->key, STREAM_SHARED), rows = draw(j->key, STREAM_LATENT);
  const int64_t ks = esmm_min(TILE, j->k - k);
  float y[TILE], tile[TILE][TILE];
  for (int64_t first = 0; first < j->outer; first += TILE) {
    int64_t outers = esmm_min(TILE, j->outer - first);
    for (int64_t o = 0; o < outers; o++) {
      const float u = of_u * gauss(l, (uint32_t)draw(shared, first + o));
      const uint64_t key = draw(rows, first + o);
      for (int64_t i = 0; i < ks; i++) {
        float threshold = l->threshold[k + i], value = 0;
        if (threshold < HUGE_VALF) {
          uint64_t bits = draw(key, k + i);
          float n = gauss(l, (uint32_t)(bits >> 32)), e = gauss(l, (uint32_t)bits);
          y[i] = first + o == 0 ? n : rho * y[i] + innovation * n;
          float excess = of_y * y[i] + of_e * e + u - threshold;
          if (excess > 0)
            value = activate(&j->gen, excess);
        }
        tile[o][i] = value;
      }
    }
    store_tile(j, tile, first, outers, k, ks);
  }
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
  const calibration c = set_thresholds(j, l);
#pragma omp parallel for schedule(dynamic) num_threads(ctx->threads)
  for (int64_t k = 0; k < j->k; k += TILE)
    generate_features(j, l, &c, k);
  esmm_mem_free(&ctx->allocator, l, bytes);
  return ESMM_OK;
}

/* ---- the interface ---- */

/* A copy with defaults filled in; fields that an older caller's struct does not have are 0. */
static esmm_status take_generator(esmm_ctx *ctx, const esmm_generator *generator, esmm_generator *g)
{
  if (!generator)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "generator is NULL");
  if (generator->size < sizeof(size_t) || generator->size > sizeof *g)
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
  j.k_contiguous = is_a == (j.out.order == ESMM_ROW_MAJOR);
  j.key = draw(mix(j.gen.seed), (int64_t)j.gen.operand); /* one seed for both operands still makes them independent */
  const bool has_density = j.gen.kind == ESMM_GEN_RANDOM || j.gen.kind == ESMM_GEN_BLOCKWISE; /* else not checked */
  j.limit = has_density ? (uint64_t)(j.gen.density * 0x1p32) : 0;
  if (j.gen.kind == ESMM_GEN_ACTIVATIONS)
    return generate_activations(ctx, &j);
  generate_tiles(&j, ctx->threads);
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
