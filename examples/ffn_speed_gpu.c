/*
 * ffn_speed_gpu.c [TOKENS D_MODEL D_HIDDEN [DEVICE]]: a layer's passes on a GPU, every mode beside dense mode, in bf16
 * with ReLU2, over hidden layers with more and fewer zeros. Defaults: 4096 4096 14336 cuda. One line of JSON a mode and
 * kind of zeros: milliseconds of a forward pass, and of a whole step (esmm_ffn_set_weights, forward, backward).
 *
 * Dense mode's six products are cuBLAS's, or whatever is faster, with one elementwise pass and two sums of columns:
 * what a net without this library would do. Modes take turns, each run is of several steps between two waits, and
 * medians count. Zeros come from the biases, as in ffn_speed.c.
 */
#include "ffn_speed.h"

#include <string.h>

enum { MODES = 4, STEPS = 10 };

static const char usage[] = "usage: ffn_speed_gpu [TOKENS D_MODEL D_HIDDEN [DEVICE]]\n";
static const char *const mode_names[MODES] = {"exact", "split", "sparse", "dense"}; /* esmm_ffn_mode */

static esmm_ctx *ctx;

static void must(esmm_status status)
{
  if (status == ESMM_OK)
    return;
  fprintf(stderr, "ffn_speed_gpu: %s\n", esmm_ctx_error(ctx));
  exit(1);
}

static esmm_matrix on_device(int64_t rows, int64_t cols, esmm_dtype dtype)
{
  const char *colon = strchr(esmm_ctx_device(ctx), ':');
  esmm_matrix m = {.rows = rows,
                   .cols = cols,
                   .dtype = dtype,
                   .place = colon ? ESMM_DEVICE : ESMM_HOST,
                   .device = colon ? atoi(colon + 1) : 0};
  must(esmm_memory_alloc(ctx, (size_t)(rows * cols) * esmm_dtype_size(dtype), &m.data));
  return m;
}

/* Gaussian, or where deviation is 0 not set. */
static esmm_matrix gaussian(int64_t rows, int64_t cols, double deviation)
{
  esmm_matrix m = on_device(rows, cols, ESMM_BF16);
  const esmm_matrix host = host_matrix("ffn_speed_gpu", rows, cols);
  for (int64_t i = 0; deviation > 0 && i < rows * cols; i++)
    ((float *)host.data)[i] = normal(deviation);
  if (deviation > 0)
    must(esmm_matrix_copy(ctx, &host, &m));
  free(host.data);
  return m;
}

typedef struct layer {
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  double forward[RUNS], step[RUNS];
} layer;

typedef struct net {
  esmm_matrix x, y, dy, dx, w1, w2, d1, d2, b1, b2, g1, g2;
  esmm_ffn_weights weights;
  esmm_ffn_grads grads;
} net;

static void run(const net *n, layer *l, int steps, int backward)
{
  esmm_matrix y = n->y;
  for (int i = 0; i < steps; i++) {
    if (backward)
      must(esmm_ffn_set_weights(ctx, l->ffn, &n->weights, NULL));
    must(esmm_ffn_forward(ctx, l->ffn, &n->x, &y, backward ? l->cache : NULL, NULL));
    if (backward)
      must(esmm_ffn_backward(ctx, l->ffn, l->cache, &n->dy, &n->grads, NULL));
  }
  must(esmm_ctx_synchronize(ctx));
}

static double timed(const net *n, layer *l, int backward)
{
  const double begin = now();
  run(n, l, STEPS, backward);
  return (now() - begin) / STEPS;
}

static void measure(const net *n, int64_t d, int64_t hidden, const char *zeros)
{
  layer layers[MODES];
  memset(layers, 0, sizeof layers);
  for (int m = 0; m < MODES; m++) {
    const esmm_ffn_opts o = {
        .size = sizeof o, .d_model = d, .d_hidden = hidden, .mode = (esmm_ffn_mode)m, .dtype = ESMM_BF16};
    must(esmm_ffn_create(ctx, &o, &layers[m].ffn));
    must(esmm_ffn_cache_create(ctx, layers[m].ffn, &layers[m].cache));
    must(esmm_ffn_set_weights(ctx, layers[m].ffn, &n->weights, NULL));
    run(n, &layers[m], STEPS, 1); /* warms up, and lets products remember */
    run(n, &layers[m], STEPS, 0);
  }
  for (int i = 0; i < RUNS; i++)
    for (int m = 0; m < MODES; m++) {
      layers[m].forward[i] = timed(n, &layers[m], 0);
      layers[m].step[i] = timed(n, &layers[m], 1);
    }
  esmm_ffn_report report = {.size = sizeof report};
  esmm_matrix y = n->y;
  must(esmm_ffn_forward(ctx, layers[0].ffn, &n->x, &y, NULL, &report));
  const double forward = median(layers[ESMM_FFN_DENSE].forward), step = median(layers[ESMM_FFN_DENSE].step);
  for (int m = 0; m < MODES; m++) {
    const double mine = median(layers[m].forward), whole = median(layers[m].step);
    printf("{\"suite\":\"ffn16\",\"kernel\":\"auto\",\"requested\":\"auto\",\"dtype\":\"bf16\",\"device\":\"%s\","
           "\"device_name\":\"%s\",\"source_id\":\"%s\",\"zeros\":\"%s\",\"mode\":\"%s\",\"tokens\":%lld,\"d_model\":%"
           "lld,\"d_hidden\":%lld,"
           "\"element_density\":%.4f,\"alive_columns\":%lld,\"forward_ms\":%.4f,\"forward_times_dense\":%.3f,"
           "\"step_ms\":%.4f,\"step_times_dense\":%.3f}\n",
           esmm_ctx_device(ctx), esmm_ctx_device_name(ctx), esmm_source_id(), zeros, mode_names[m],
           (long long)n->x.rows, (long long)d, (long long)hidden, report.element_density,
           (long long)report.alive_columns, 1e3 * mine, forward / mine, 1e3 * whole, step / whole);
    esmm_ffn_cache_free(layers[m].cache);
    esmm_ffn_free(layers[m].ffn);
  }
  fflush(stdout);
}

/* So many of the features are dead; the others have this bias. */
static void set_bias(esmm_matrix *b1, double dead, double bias)
{
  const esmm_matrix host = host_matrix("ffn_speed_gpu", 1, b1->cols);
  for (int64_t f = 0; f < b1->cols; f++)
    ((float *)host.data)[f] = (float)(unit() < dead ? -100 : bias);
  must(esmm_matrix_copy(ctx, &host, b1));
  free(host.data);
}

int main(int argc, char **argv)
{
  static const struct {
    const char *zeros;
    double dead, bias;
  } cases[] = {{"none", 0, 6},           {"50 % of features dead", 0.5, 6},   {"80 % of features dead", 0.8, 6},
               {"anywhere, 50 %", 0, 0}, {"anywhere, 10 % left", 0, -1.2816}, {"anywhere, 5 % left", 0, -1.6449}};
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    fputs(usage, stdout);
    return 0;
  }
  if (argc == 2 || argc == 3 || argc > 5) {
    fputs(usage, stderr);
    return 2;
  }
  const int64_t tokens = argc > 3 ? whole("ffn_speed_gpu", usage, argv[1], 1 << 17) : 4096,
                d = argc > 3 ? whole("ffn_speed_gpu", usage, argv[2], 1 << 17) : 4096,
                hidden = argc > 3 ? whole("ffn_speed_gpu", usage, argv[3], 1 << 17) : 14336;
  char why[256] = "";
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .device = argc > 4 ? argv[4] : "cuda", .error = why, .error_size = sizeof why};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK) {
    fprintf(stderr, "ffn_speed_gpu: %s\n", why);
    return 1;
  }
  net n = {.x = gaussian(tokens, d, 1),
           .y = gaussian(tokens, d, 0),
           .dy = gaussian(tokens, d, 1),
           .dx = gaussian(tokens, d, 0),
           .w1 = gaussian(d, hidden, 1 / sqrt((double)d)),
           .w2 = gaussian(hidden, d, 1 / sqrt((double)hidden)),
           .d1 = gaussian(d, hidden, 0),
           .d2 = gaussian(hidden, d, 0),
           .b1 = on_device(1, hidden, ESMM_F32),
           .b2 = on_device(1, d, ESMM_F32),
           .g1 = on_device(1, hidden, ESMM_F32),
           .g2 = on_device(1, d, ESMM_F32)};
  set_bias(&n.b2, 0, 0);
  n.weights = (esmm_ffn_weights){.size = sizeof n.weights, .w1 = &n.w1, .w2 = &n.w2, .b1 = n.b1.data, .b2 = n.b2.data};
  n.grads =
      (esmm_ffn_grads){.size = sizeof n.grads, .x = &n.dx, .w1 = &n.d1, .w2 = &n.d2, .b1 = n.g1.data, .b2 = n.g2.data};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    set_bias(&n.b1, cases[c].dead, cases[c].bias);
    measure(&n, d, hidden, cases[c].zeros);
  }
  esmm_matrix *all[] = {&n.x, &n.y, &n.dy, &n.dx, &n.w1, &n.w2, &n.d1, &n.d2, &n.b1, &n.b2, &n.g1, &n.g2};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    esmm_memory_free(ctx, all[i]->data);
  esmm_ctx_free(ctx);
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "ffn_speed_gpu: cannot write to the standard output\n");
    return 1;
  }
  return 0;
}
