/*
 * ffn_mpi.c [TOKENS D_MODEL D_HIDDEN]: a feed-forward layer split over the ranks of MPI, as Megatron splits it.
 *
 *     mpirun -n 2 ffn_mpi 256 256 1024
 *
 * Each rank holds some columns of W1 with their biases, and the same rows of W2. It computes its part of
 * h = relu2(x W1 + b1) without communication, skips the zeros of that part, and has a share of y = h W2 + b2: one sum
 * over the ranks makes y whole, and one rank adds b2. The backward pass is the mirror image: dy is the
 * same everywhere, each rank has the gradients of its own weights, and one sum makes dx whole. Every rank chooses its
 * kernels by the zeros it sees, which may be more on one than on another.
 *
 * As a check, each rank runs the whole layer too and compares: h has the same nonzeros, weights' gradients are the
 * same, y and dx differ by rounding, as their sums are made in another order.
 */
#include "esmm_ffn.h"
#include "esmm_tools.h"

#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

static void give_up(const char *text)
{
  fprintf(stderr, "ffn_mpi: rank %d: %s\n", rank, text);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

static void must(esmm_ctx *ctx, esmm_status status)
{
  if (status != ESMM_OK)
    give_up(*esmm_ctx_error(ctx) ? esmm_ctx_error(ctx) : esmm_status_str(status));
}

/* [rows, cols] of random numbers, the same on every rank. */
static esmm_matrix make(esmm_ctx *ctx, int64_t rows, int64_t cols, uint64_t seed, double scale)
{
  esmm_matrix m = {.rows = rows, .cols = cols, .ld = cols};
  const esmm_generator noise = {.size = sizeof noise, .kind = ESMM_GEN_DENSE, .seed = seed};
  float *data = m.data = malloc((size_t)(rows * cols) * sizeof(float));
  if (!data)
    give_up("out of memory");
  must(ctx, esmm_generate(ctx, &noise, &m));
  for (int64_t i = 0; i < rows * cols; i++)
    data[i] *= (float)scale;
  return m;
}

/* Some columns, or some rows, of a matrix, where it lies. */
static esmm_matrix columns(esmm_matrix m, int64_t first, int64_t count)
{
  m.data = (float *)m.data + first;
  m.cols = count;
  return m;
}

static esmm_matrix rows_of(esmm_matrix m, int64_t first, int64_t count)
{
  m.data = (float *)m.data + first * m.ld;
  m.rows = count;
  return m;
}

/* The sum over all ranks, in place. Blocks of a million: MPI counts with int. */
static void sum_ranks(esmm_matrix m)
{
  float *data = m.data;
  const int64_t most = 1 << 20;
  for (int64_t at = 0, all = m.rows * m.cols; at < all; at += most)
    MPI_Allreduce(MPI_IN_PLACE, data + at, (int)(all - at < most ? all - at : most), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
}

/* The largest difference, over the largest value; of all ranks. NaN counts as infinitely far. */
static double apart(esmm_matrix got, esmm_matrix want)
{
  double worst[2] = {0, 0}; /* difference, value */
  for (int64_t i = 0; i < got.rows; i++)
    for (int64_t j = 0; j < got.cols; j++) {
      const double a = ((float *)got.data)[i * got.ld + j], b = ((float *)want.data)[i * want.ld + j];
      if (!(fabs(a - b) <= worst[0]))
        worst[0] = isfinite(a - b) ? fabs(a - b) : INFINITY;
      worst[1] = fmax(worst[1], fabs(b));
    }
  MPI_Allreduce(MPI_IN_PLACE, worst, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return worst[1] > 0 ? worst[0] / worst[1] : worst[0];
}

typedef struct layer {
  esmm_ffn *ffn;
  esmm_ffn_cache *cache;
  esmm_ffn_report report;
  esmm_matrix w1, w2, y, dx, d_w1, d_w2;
  const float *b1, *b2;
} layer;

static void open_layer(esmm_ctx *ctx, layer *l)
{
  const esmm_ffn_opts opts = {.size = sizeof opts, .d_model = l->w1.rows, .d_hidden = l->w1.cols};
  const esmm_ffn_weights weights = {.size = sizeof weights, .w1 = &l->w1, .w2 = &l->w2, .b1 = l->b1, .b2 = l->b2};
  must(ctx, esmm_ffn_create(ctx, &opts, &l->ffn));
  must(ctx, esmm_ffn_cache_create(ctx, l->ffn, &l->cache));
  must(ctx, esmm_ffn_set_weights(ctx, l->ffn, &weights, NULL));
}

static double passes(esmm_ctx *ctx, layer *l, const esmm_matrix *x, const esmm_matrix *dy, int shared)
{
  const esmm_ffn_grads grads = {.size = sizeof grads, .x = &l->dx, .w1 = &l->d_w1, .w2 = &l->d_w2};
  const double begin = MPI_Wtime();
  l->report.size = sizeof l->report;
  must(ctx, esmm_ffn_forward(ctx, l->ffn, x, &l->y, l->cache, &l->report));
  if (shared)
    sum_ranks(l->y);
  must(ctx, esmm_ffn_backward(ctx, l->ffn, l->cache, dy, &grads, NULL));
  if (shared)
    sum_ranks(l->dx);
  return MPI_Wtime() - begin;
}

int main(int argc, char **argv)
{
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  static const char usage[] =
      "usage: mpirun -n RANKS ffn_mpi [TOKENS D_MODEL D_HIDDEN], numbers from 1 to 1048576 (default 256 256 1024)\n";
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    if (rank == 0)
      printf("%s\nA feed-forward layer split over the ranks of MPI, checked against the whole layer.\n", usage);
    MPI_Finalize();
    return 0;
  }
  int64_t size[3] = {256, 256, 1024};
  int wrong = argc != 1 && argc != 4;
  for (int i = 1; i < argc && !wrong; i++) {
    char *end;
    size[i - 1] = strtoll(argv[i], &end, 10);
    wrong = *end || end == argv[i] || size[i - 1] < 1 || size[i - 1] > 1 << 20;
  }
  if (wrong || size[2] < ranks) {
    if (rank == 0)
      fputs(wrong ? usage : "ffn_mpi: D_HIDDEN must be at least the number of ranks\n", stderr);
    MPI_Finalize();
    return 2;
  }
  const int64_t tokens = size[0], d = size[1], hidden = size[2];
  const int64_t first = hidden * rank / ranks, mine = hidden * (rank + 1) / ranks - first;

  esmm_ctx *ctx;
  char error[256] = "";
  const esmm_ctx_opts cpu = {.size = sizeof cpu, .device = "cpu", .error = error, .error_size = sizeof error};
  if (esmm_ctx_create(&ctx, &cpu) != ESMM_OK)
    give_up(error);
  esmm_matrix x = make(ctx, tokens, d, 1, 1), dy = make(ctx, tokens, d, 2, 1);
  layer whole = {.w1 = make(ctx, d, hidden, 3, 1 / sqrt((double)d)), .w2 = make(ctx, hidden, d, 4, 1)};
  esmm_matrix b1 = make(ctx, 1, hidden, 5, 0.1), b2 = make(ctx, 1, d, 6, 1);
  for (int64_t i = 0; i < hidden; i++)
    ((float *)b1.data)[i] -= 0.45F; /* so that about one in ten of h is not zero */
  whole.b1 = b1.data;
  whole.b2 = b2.data;
  layer part = {.w1 = columns(whole.w1, first, mine),
                .w2 = rows_of(whole.w2, first, mine),
                .b1 = (float *)b1.data + first,
                .b2 = rank == 0 ? b2.data : NULL};
  layer *both[] = {&whole, &part};
  for (int i = 0; i < 2; i++) {
    layer *l = both[i];
    l->y = make(ctx, tokens, d, 7, 0);
    l->dx = make(ctx, tokens, d, 7, 0);
    l->d_w1 = make(ctx, d, l->w1.cols, 7, 0);
    l->d_w2 = make(ctx, l->w2.rows, d, 7, 0);
    open_layer(ctx, l);
  }

  passes(ctx, &whole, &x, &dy, 0);
  passes(ctx, &part, &x, &dy, 1); /* warms up */
  MPI_Barrier(MPI_COMM_WORLD);
  double seconds = passes(ctx, &part, &x, &dy, 1);
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);

  int64_t alive = part.report.alive_columns;
  double nonzeros = part.report.element_density * (double)mine;
  MPI_Allreduce(MPI_IN_PLACE, &alive, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, &nonzeros, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  const double y = apart(part.y, whole.y), dx = apart(part.dx, whole.dx);
  const double d_w1 = apart(part.d_w1, columns(whole.d_w1, first, mine));
  const double d_w2 = apart(part.d_w2, rows_of(whole.d_w2, first, mine));
  const double off = fabs(nonzeros / (double)hidden - whole.report.element_density);
  const int right =
      y < 1e-5 && dx < 1e-5 && d_w1 < 1e-5 && d_w2 < 1e-5 && off < 1e-9 && alive == whole.report.alive_columns;
  int failed = 0;
  if (rank == 0) {
    printf("%d ranks, %lld tokens x %lld x %lld, %.1f %% of h nonzero: %.2f ms forward and backward\n", ranks,
           (long long)tokens, (long long)d, (long long)hidden, 100 * whole.report.element_density, 1e3 * seconds);
    printf("against one rank: y %.1e, dx %.1e, dW1 %.1e, dW2 %.1e: %s\n", y, dx, d_w1, d_w2,
           right ? "the same within rounding" : "WRONG");
    failed = fflush(stdout) != 0;
    if (failed)
      fprintf(stderr, "ffn_mpi: cannot write to the standard output\n");
  }
  MPI_Bcast(&failed, 1, MPI_INT, 0, MPI_COMM_WORLD);

  for (int i = 0; i < 2; i++) {
    layer *l = both[i];
    esmm_ffn_cache_free(l->cache);
    esmm_ffn_free(l->ffn);
    esmm_matrix *made[] = {&l->y, &l->dx, &l->d_w1, &l->d_w2};
    for (size_t j = 0; j < sizeof made / sizeof *made; j++)
      free(made[j]->data);
  }
  esmm_matrix *shared[] = {&x, &dy, &whole.w1, &whole.w2, &b1, &b2};
  for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
    free(shared[i]->data);
  esmm_ctx_free(ctx);
  MPI_Finalize();
  return failed || !right;
}
