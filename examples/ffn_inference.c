/*
 * ffn_inference.c MODEL.safetensors: y = relu2(x W1 + b1) W2 + b2 of 256 random tokens. The model has fc1 and fc2 as
 * PyTorch stores a Linear, weight [out, in] and bias [out]; `ffn_train --save MODEL.safetensors` writes such a file.
 */
#include "esmm_ffn.h"
#include "esmm_tools.h"
#include "tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char error[512];

/* A weight as [in, out], and its bias, in the mapped file itself. */
static int find(io_tensors *file, const char *weight, const char *bias, esmm_matrix *w, const float **b)
{
  const int64_t at = io_tensors_find(file, weight), b_at = io_tensors_find(file, bias);
  if (at < 0 || b_at < 0 || file->list[b_at].dtype != IO_F32)
    return snprintf(error, sizeof error, "%s has no '%s' with a '%s' of F32", file->path, weight, bias);
  if (io_tensor_matrix(file, (size_t)at, w, error, sizeof error) ||
      io_tensor_load(file, (size_t)b_at, error, sizeof error))
    return -1;
  if (file->list[b_at].bytes != (size_t)w->rows * sizeof(float))
    return snprintf(error, sizeof error, "%s: '%s' has not the %lld numbers it must", file->path, bias,
                    (long long)w->rows);
  const int64_t in = w->cols;
  w->cols = w->rows;
  w->rows = in;
  w->order = w->order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  *b = file->list[b_at].data;
  return 0;
}

int main(int argc, char **argv)
{
  static const char usage[] = "usage: ffn_inference MODEL.safetensors";
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    printf("%s\n\nRuns a feed-forward layer on 256 random tokens and says how sparse it is. The file has\n"
           "fc1.weight, fc1.bias, fc2.weight and fc2.bias, as 'ffn_train --save MODEL.safetensors' writes them.\n",
           usage);
    return 0;
  }
  io_tensors *file = NULL;
  esmm_ctx *ctx = NULL;
  esmm_ffn *ffn = NULL;
  esmm_matrix w1 = {0}, w2 = {0}, x = {.rows = 256}, y = x;
  esmm_ffn_weights weights = {.size = sizeof weights, .w1 = &w1, .w2 = &w2};
  esmm_ffn_report report = {.size = sizeof report};
  const esmm_ctx_opts cpu = {.size = sizeof cpu, .device = "cpu", .error = error, .error_size = sizeof error};
  const esmm_generator noise = {.size = sizeof noise, .kind = ESMM_GEN_DENSE, .seed = 1};
  int failed = argc != 2 ? snprintf(error, sizeof error, "%s", usage)
                         : io_tensors_open(argv[1], 0, 0, &file, error, sizeof error);
  failed = failed || find(file, "fc1.weight", "fc1.bias", &w1, &weights.b1) ||
           find(file, "fc2.weight", "fc2.bias", &w2, &weights.b2) || esmm_ctx_create(&ctx, &cpu);
  const esmm_ffn_opts opts = {.size = sizeof opts, .d_model = w1.rows, .d_hidden = w1.cols};
  if (!failed && (w1.rows < 1 || w1.rows > 1 << 24)) /* rows * cols must not overflow below */
    failed = snprintf(error, sizeof error, "%s: d_model is %lld, not 1 to 2^24", argv[1], (long long)w1.rows);
  x.cols = y.cols = failed ? 0 : w1.rows;
  x.data = malloc((size_t)(x.rows * x.cols + 1) * sizeof(float));
  y.data = malloc((size_t)(y.rows * y.cols + 1) * sizeof(float));
  failed = failed || !x.data || !y.data || esmm_generate(ctx, &noise, &x) || esmm_ffn_create(ctx, &opts, &ffn) ||
           esmm_ffn_set_weights(ctx, ffn, &weights, NULL) || esmm_ffn_forward(ctx, ffn, &x, &y, NULL, &report);
  if (failed)
    fprintf(stderr, "ffn_inference: %s\n", *error ? error : ctx ? esmm_ctx_error(ctx) : "out of memory");
  else
    printf("%lld of %lld features alive, %.1f %% of the hidden layer nonzero; y[0] = %g\n",
           (long long)report.alive_columns, (long long)w1.cols, 100 * report.element_density, (double)*(float *)y.data);
  if (!failed && fflush(stdout) != 0) {
    fprintf(stderr, "ffn_inference: cannot write to the standard output\n");
    failed = 1;
  }
  esmm_ffn_free(ffn);
  esmm_ctx_free(ctx);
  io_tensors_close(file);
  free(x.data);
  free(y.data);
  return failed != 0;
}
