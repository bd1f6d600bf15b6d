/*
 * ffn_speed.c [TOKENS D_MODEL D_HIDDEN [THREADS]]: a forward and a backward pass in exact mode beside dense mode, over
 * hidden layers with more and fewer zeros, as the table in docs/ffn.md. Defaults: 1024 1024 4096, all threads.
 *
 * Zeros come from the biases: x W1 is Gaussian of variance 1, so a bias b leaves a share of P(N > -b) nonzero,
 * anywhere; a dead feature has a bias that no token overcomes. Tokens that are alike in eights, as neighbours of a
 * sequence are, have their zeros together. Both modes run in turns on the same data, and medians count.
 */
#include "ffn_speed.h"

#include <stdbool.h>
#include <string.h>

static esmm_ctx *ctx;

static void must(esmm_status status)
{
  if (status == ESMM_OK)
    return;
  fprintf(stderr, "ffn_speed: %s\n", esmm_ctx_error(ctx));
  exit(1);
}

static esmm_matrix gaussian(int64_t rows, int64_t cols, double deviation)
{
  const esmm_matrix m = host_matrix("ffn_speed", rows, cols);
  for (int64_t i = 0; i < rows * cols; i++)
    ((float *)m.data)[i] = normal(deviation);
  return m;
}

typedef struct layer {
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  double passes[RUNS], step[RUNS]; /* forward and backward; with esmm_ffn_set_weights */
} layer;

static const char usage[] = "usage: ffn_speed [TOKENS D_MODEL D_HIDDEN [THREADS]]\n";

int main(int argc, char **argv)
{
  static const struct {
    const char *name;
    double dead, bias;
    bool alike;
  } cases[] = {{"anywhere", 0, -1.2816, false},
               {"half of the features dead", 0.5, -0.8416, false},
               {"80 % dead, half of the rest", 0.8, 0, false},
               {"90 % dead, the rest full", 0.9, 6, false},
               {"tokens alike in eights", 0, -1.2816, true},
               {"tokens alike in eights", 0, -0.5244, true},
               {"tokens alike in eights", 0, 0, true},
               {"tokens alike in eights", 0, 0.3853, true},
               {"tokens alike in eights", 0, 0.8416, true},
               {"70 % dead, the rest full", 0.7, 6, false},
               {"50 % dead, the rest full", 0.5, 6, false},
               {"40 % dead, the rest full", 0.4, 6, false},
               {"30 % dead, the rest full", 0.3, 6, false},
               {"20 % dead, the rest full", 0.2, 6, false},
               {"10 % dead, the rest full", 0.1, 6, false},
               {"30 % dead, 60 % of the rest", 0.3, 0.2533, false},
               {"anywhere", 0, -0.6745, false},
               {"anywhere", 0, 0, false},
               {"no zeros", 0, 6, false}};
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    fputs(usage, stdout);
    return 0;
  }
  if (argc == 2 || argc == 3 || argc > 5) {
    fputs(usage, stderr);
    return 2;
  }
  const int64_t most = 1 << 20; /* products of two of them fit */
  const int64_t tokens = argc > 3 ? whole("ffn_speed", usage, argv[1], most) : 1024,
                d = argc > 3 ? whole("ffn_speed", usage, argv[2], most) : 1024,
                hidden = argc > 3 ? whole("ffn_speed", usage, argv[3], most) : 4096;
  char why[256] = "";
  const esmm_ctx_opts opts = {.size = sizeof opts,
                              .device = "cpu",
                              .threads = argc > 4 ? (int)whole("ffn_speed", usage, argv[4], 1024) : 0,
                              .error = why,
                              .error_size = sizeof why};
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK) {
    fprintf(stderr, "ffn_speed: %s\n", why);
    return 1;
  }
  esmm_matrix apart = gaussian(tokens, d, 1), alike = gaussian(tokens, d, 0.1);
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t j = 0; j < d; j++)
      ((float *)alike.data)[i * d + j] += ((float *)apart.data)[i / 8 * 8 * d + j];
  esmm_matrix y = gaussian(tokens, d, 1), dy = gaussian(tokens, d, 1), dx = gaussian(tokens, d, 1);
  esmm_matrix w1 = gaussian(d, hidden, 1 / sqrt((double)d)), w2 = gaussian(hidden, d, 1 / sqrt((double)hidden));
  esmm_matrix d_w1 = gaussian(d, hidden, 1), d_w2 = gaussian(hidden, d, 1), b1 = gaussian(1, hidden, 1);
  esmm_matrix b2 = gaussian(1, d, 1), d_b1 = gaussian(1, hidden, 1), d_b2 = gaussian(1, d, 1);
  const esmm_ffn_weights weights = {.size = sizeof weights, .w1 = &w1, .w2 = &w2, .b1 = b1.data, .b2 = b2.data};
  const esmm_ffn_grads grads = {
      .size = sizeof grads, .x = &dx, .w1 = &d_w1, .w2 = &d_w2, .b1 = d_b1.data, .b2 = d_b2.data};
  printf("%s, %d thread%s, %lld tokens x %lld x %lld, ReLU2, source %s\n\n"
         "| zeros | element density | strip density, 8 tokens | exact ms | dense ms | times faster | a whole step |\n"
         "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
         esmm_ctx_device_name(ctx), esmm_ctx_threads(ctx), esmm_ctx_threads(ctx) == 1 ? "" : "s", (long long)tokens,
         (long long)d, (long long)hidden, esmm_source_id());
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    layer layers[2] = {{0}};
    esmm_ffn_report report = {.size = sizeof report};
    const esmm_matrix x = cases[c].alike ? alike : apart;
    for (int64_t f = 0; f < hidden; f++)
      ((float *)b1.data)[f] = (float)(unit() < cases[c].dead ? -100 : cases[c].bias);
    for (int m = 0; m < 2; m++) {
      const esmm_ffn_opts o = {
          .size = sizeof o, .d_model = d, .d_hidden = hidden, .mode = m ? ESMM_FFN_DENSE : ESMM_FFN_EXACT};
      must(esmm_ffn_create(ctx, &o, &layers[m].ffn));
      must(esmm_ffn_cache_create(ctx, layers[m].ffn, &layers[m].cache));
    }
    for (int i = -1; i < RUNS; i++) /* the first warms up */
      for (int m = 0; m < 2; m++) {
        layer *l = &layers[m];
        const double begin = now();
        must(esmm_ffn_set_weights(ctx, l->ffn, &weights, NULL));
        const double set = now();
        must(esmm_ffn_forward(ctx, l->ffn, &x, &y, l->cache, NULL));
        must(esmm_ffn_backward(ctx, l->ffn, l->cache, &dy, &grads, NULL));
        const double end = now();
        if (i >= 0) {
          l->passes[i] = end - set;
          l->step[i] = end - begin;
        }
      }
    must(esmm_ffn_forward(ctx, layers[0].ffn, &x, &y, NULL, &report));
    const double exact = median(layers[0].passes), dense = median(layers[1].passes);
    printf("| %s | %.2f | %.2f | %.1f | %.1f | %.2f | %.2f |\n", cases[c].name, report.element_density,
           report.strip_density, 1e3 * exact, 1e3 * dense, dense / exact,
           median(layers[1].step) / median(layers[0].step));
    fflush(stdout);
    for (int m = 0; m < 2; m++) {
      esmm_ffn_cache_free(layers[m].cache);
      esmm_ffn_free(layers[m].ffn);
    }
  }
  esmm_matrix *all[] = {&apart, &alike, &y, &dy, &dx, &w1, &w2, &d_w1, &d_w2, &b1, &b2, &d_b1, &d_b2};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    free(all[i]->data);
  esmm_ctx_free(ctx);
  if (fflush(stdout) != 0 || ferror(stdout)) {
    fprintf(stderr, "ffn_speed: cannot write to the standard output\n");
    return 1;
  }
  return 0;
}
