/*
 * ffn_speed_gpu.c [TOKENS D_MODEL D_HIDDEN [DEVICE]]: a layer's passes on a GPU, every mode beside dense mode, in bf16
 * with ReLU2, over hidden layers with more and fewer zeros. Defaults: 4096 4096 14336 cuda. One line of JSON a mode and
 * kind of zeros: milliseconds of a forward pass, and of a whole step (esmm_ffn_set_weights, forward, backward). Then
 * passes of 1, 4 and 16 tokens through a gated layer and one without a gate, exact mode beside dense mode: in a CUDA
 * graph, and called one by one.
 *
 * Dense mode's six products are cuBLAS's, or whatever is faster, with one elementwise pass and two sums of columns:
 * what a net without this library would do. Modes take turns, each run is of several steps between two waits, and
 * medians count. Zeros come from the biases, as in ffn_speed.c.
 */
#include "ffn_speed.h"

#include <dlfcn.h>
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

/* Features have the bias `some`, a share of them, or `others`. */
static void set_bias(esmm_matrix *b, double share, double some, double others)
{
  const esmm_matrix host = host_matrix("ffn_speed_gpu", 1, b->cols);
  for (int64_t f = 0; f < b->cols; f++)
    ((float *)host.data)[f] = (float)(unit() < share ? some : others);
  must(esmm_matrix_copy(ctx, &host, b));
  free(host.data);
}

/* ---- few tokens ---- */

/*
 * Weights lie as torch's nn.Linear has them: col-major. Passes alternate between two layers with separate weights, so
 * that none finds its weights in the second-level cache.
 *
 * A token has 10 % of the features active, and tokens are alike: 15 % of the features are active for 63 % of the
 * tokens, the others for 0.65 % of them. Values before the activation are Gaussian, so biases do that.
 */
enum { SETS = 2, PASSES = 20 };
#define COMMON_SHARE 0.15
#define COMMON_BIAS 0.3319
#define RARE_BIAS (-2.4847)

/* The driver's calls for a stream and a graph. */
typedef struct driver {
  int (*get)(int *, int);
  int (*retain)(void **, int);
  int (*use)(void *);
  int (*release)(int);
  int (*stream_create)(void **, unsigned);
  int (*stream_destroy)(void *);
  int (*stream_synchronize)(void *);
  int (*begin_capture)(void *, int);
  int (*end_capture)(void *, void **);
  int (*instantiate)(void **, void *, unsigned long long);
  int (*launch)(void *, void *);
  int (*exec_destroy)(void *);
  int (*graph_destroy)(void *);
  int device;
  void *stream;
} driver;

static void must_drive(int result, const char *what)
{
  if (result == 0)
    return;
  fprintf(stderr, "ffn_speed_gpu: %s: the CUDA driver answers %d\n", what, result);
  exit(1);
}

/* A context on the CPU has none: false. */
static int open_driver(driver *g)
{
  const struct {
    void *at;
    const char *name;
  } calls[] = {{&g->get, "cuDeviceGet"},
               {&g->retain, "cuDevicePrimaryCtxRetain"},
               {&g->use, "cuCtxSetCurrent"},
               {&g->release, "cuDevicePrimaryCtxRelease_v2"},
               {&g->stream_create, "cuStreamCreate"},
               {&g->stream_destroy, "cuStreamDestroy_v2"},
               {&g->stream_synchronize, "cuStreamSynchronize"},
               {&g->begin_capture, "cuStreamBeginCapture_v2"},
               {&g->end_capture, "cuStreamEndCapture"},
               {&g->instantiate, "cuGraphInstantiateWithFlags"},
               {&g->launch, "cuGraphLaunch"},
               {&g->exec_destroy, "cuGraphExecDestroy"},
               {&g->graph_destroy, "cuGraphDestroy"}};
  const char *colon = strchr(esmm_ctx_device(ctx), ':');
  void *library = colon ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL, *primary = NULL;
  if (!library)
    return 0;
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    void *symbol = dlsym(library, calls[i].name);
    if (!symbol) {
      fprintf(stderr, "ffn_speed_gpu: the CUDA driver has no %s\n", calls[i].name);
      exit(1);
    }
    memcpy(calls[i].at, &symbol, sizeof symbol);
  }
  enum { NON_BLOCKING = 1 };
  must_drive(g->get(&g->device, atoi(colon + 1)), "cuDeviceGet");
  must_drive(g->retain(&primary, g->device), "cuDevicePrimaryCtxRetain");
  must_drive(g->use(primary), "cuCtxSetCurrent");
  must_drive(g->stream_create(&g->stream, NON_BLOCKING), "cuStreamCreate");
  return 1;
}

typedef struct server {
  esmm_ffn *ffn[SETS];
  void *graph, *exec; /* of PASSES passes */
  double in_graph[RUNS], apart[RUNS];
} server;

static void serve(server *s, const esmm_matrix *x, esmm_matrix *y)
{
  for (int i = 0; i < PASSES; i++)
    must(esmm_ffn_forward(ctx, s->ffn[i % SETS], x, y, NULL, NULL));
}

static double timed_server(const driver *g, server *s, const esmm_matrix *x, esmm_matrix *y, int in_graph)
{
  const double begin = now();
  if (in_graph) {
    must_drive(g->launch(s->exec, g->stream), "cuGraphLaunch");
    must_drive(g->stream_synchronize(g->stream), "cuStreamSynchronize");
  } else {
    serve(s, x, y);
    must(esmm_ctx_synchronize(ctx));
  }
  return (now() - begin) / PASSES;
}

/* g: NULL where there are no graphs. */
static void measure_decode(const net *n, const driver *g, const esmm_ffn_weights *weights, int64_t tokens)
{
  static const esmm_ffn_mode modes[] = {ESMM_FFN_EXACT, ESMM_FFN_DENSE};
  enum { SERVERS = sizeof modes / sizeof *modes, DENSE = 1 };
  const int gated = weights->gate != NULL;
  const int64_t d = n->x.cols, hidden = weights->w1->cols;
  esmm_matrix x = n->x, y = n->y;
  server servers[SERVERS];
  esmm_ffn_report report = {.size = sizeof report};
  memset(servers, 0, sizeof servers);
  x.rows = y.rows = tokens;
  for (int m = 0; m < SERVERS; m++) {
    server *s = &servers[m];
    const esmm_ffn_opts o = {.size = sizeof o,
                             .d_model = d,
                             .d_hidden = hidden,
                             .activation = gated ? ESMM_ACT_RELU : ESMM_ACT_RELU2,
                             .gated = gated,
                             .mode = modes[m],
                             .dtype = ESMM_BF16};
    for (int i = 0; i < SETS; i++) {
      must(esmm_ffn_create(ctx, &o, &s->ffn[i]));
      must(esmm_ffn_set_weights(ctx, s->ffn[i], &weights[i], NULL));
    }
    if (m == 0)
      must(esmm_ffn_forward(ctx, s->ffn[0], &x, &y, NULL, &report));
    serve(s, &x, &y); /* warms up, and lets products remember */
    serve(s, &x, &y);
    must(esmm_ctx_synchronize(ctx));
    if (!g)
      continue;
    must_drive(g->begin_capture(g->stream, 0), "cuStreamBeginCapture");
    serve(s, &x, &y);
    must_drive(g->end_capture(g->stream, &s->graph), "cuStreamEndCapture");
    must_drive(g->instantiate(&s->exec, s->graph, 0), "cuGraphInstantiate");
    (void)timed_server(g, s, &x, &y, 1);
  }
  for (int i = 0; i < RUNS; i++)
    for (int m = 0; m < SERVERS; m++) {
      servers[m].apart[i] = timed_server(g, &servers[m], &x, &y, 0);
      servers[m].in_graph[i] = g ? timed_server(g, &servers[m], &x, &y, 1) : servers[m].apart[i];
    }
  const double forward = median(servers[DENSE].in_graph), apart = median(servers[DENSE].apart);
  for (int m = 0; m < SERVERS; m++) {
    server *s = &servers[m];
    const double mine = median(s->in_graph), one = median(s->apart);
    printf(
        "{\"suite\":\"ffn16\",\"kernel\":\"auto\",\"requested\":\"auto\",\"dtype\":\"bf16\",\"device\":\"%s\","
        "\"device_name\":\"%s\",\"source_id\":\"%s\",\"zeros\":\"%s decode, 10 %% active, m = %lld\",\"mode\":\"%s\","
        "\"tokens\":%lld,\"d_model\":%lld,\"d_hidden\":%lld,\"element_density\":%.4f,\"alive_columns\":%lld,"
        "\"graph\":%s,\"forward_ms\":%.4f,\"forward_times_dense\":%.3f,\"apart_ms\":%.4f,"
        "\"apart_times_dense\":%.3f}\n",
        esmm_ctx_device(ctx), esmm_ctx_device_name(ctx), esmm_source_id(), gated ? "gated" : "ungated",
        (long long)tokens, mode_names[modes[m]], (long long)tokens, (long long)d, (long long)hidden,
        report.element_density, (long long)report.alive_columns, g ? "true" : "false", 1e3 * mine, forward / mine,
        1e3 * one, apart / one);
    if (g) {
      (void)g->exec_destroy(s->exec);
      (void)g->graph_destroy(s->graph);
    }
    for (int i = 0; i < SETS; i++)
      esmm_ffn_free(s->ffn[i]);
  }
  fflush(stdout);
}

/* The same memory, seen as col-major. */
static esmm_matrix by_columns(esmm_matrix m)
{
  m.order = ESMM_COL_MAJOR;
  m.ld = m.rows;
  return m;
}

static void measure_few_tokens(net *n)
{
  static const int64_t tokens[] = {1, 4, 16};
  const int64_t d = n->x.cols, hidden = n->w1.cols;
  driver g;
  memset(&g, 0, sizeof g);
  const int has_graphs = open_driver(&g);
  esmm_matrix gate_bias = on_device(1, hidden, ESMM_F32), w[SETS][3];
  for (int i = 0; i < SETS; i++) {
    const esmm_matrix from[] = {n->w1, n->w2, i ? w[0][2] : gaussian(d, hidden, 1 / sqrt((double)d))};
    for (int j = 0; j < 3; j++) {
      w[i][j] = by_columns(i ? on_device(from[j].rows, from[j].cols, ESMM_BF16) : from[j]);
      const esmm_matrix src = by_columns(from[j]);
      if (i)
        must(esmm_matrix_copy(ctx, &src, &w[i][j]));
    }
  }
  if (has_graphs)
    must(esmm_ctx_set_stream(ctx, g.stream));
  for (int gated = 1; gated >= 0; gated--) {
    esmm_ffn_weights weights[SETS];
    set_bias(&gate_bias, COMMON_SHARE, COMMON_BIAS, RARE_BIAS);
    set_bias(&n->b1, gated ? 0 : COMMON_SHARE, COMMON_BIAS, gated ? 0 : RARE_BIAS);
    for (int i = 0; i < SETS; i++)
      weights[i] = (esmm_ffn_weights){.size = sizeof weights[i],
                                      .w1 = &w[i][0],
                                      .w2 = &w[i][1],
                                      .gate = gated ? &w[i][2] : NULL,
                                      .b1 = n->b1.data,
                                      .b_gate = gated ? gate_bias.data : NULL,
                                      .b2 = n->b2.data};
    for (size_t m = 0; m < sizeof tokens / sizeof *tokens; m++)
      if (tokens[m] <= n->x.rows)
        measure_decode(n, has_graphs ? &g : NULL, weights, tokens[m]);
  }
  must(esmm_ctx_synchronize(ctx));
  if (has_graphs) {
    must(esmm_ctx_set_stream(ctx, NULL));
    must_drive(g.stream_destroy(g.stream), "cuStreamDestroy");
  }
  esmm_memory_free(ctx, gate_bias.data);
  for (int i = 0; i < SETS; i++)
    for (int j = i ? 0 : 2; j < 3; j++) /* the first has the net's own w1 and w2 */
      esmm_memory_free(ctx, w[i][j].data);
  if (has_graphs)
    must_drive(g.release(g.device), "cuDevicePrimaryCtxRelease");
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
  set_bias(&n.b2, 0, 0, 0);
  n.weights = (esmm_ffn_weights){.size = sizeof n.weights, .w1 = &n.w1, .w2 = &n.w2, .b1 = n.b1.data, .b2 = n.b2.data};
  n.grads =
      (esmm_ffn_grads){.size = sizeof n.grads, .x = &n.dx, .w1 = &n.d1, .w2 = &n.d2, .b1 = n.g1.data, .b2 = n.g2.data};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    set_bias(&n.b1, cases[c].dead, -100, cases[c].bias); /* dead ones */
    measure(&n, d, hidden, cases[c].zeros);
  }
  measure_few_tokens(&n);
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
