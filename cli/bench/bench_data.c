/*
 * bench_data.c: the operands of a benchmark: the data asked for, the same in fp32 for the reference and for dense
 * libraries that multiply in fp32, and random dense data, because a dense library may be faster or slower on zeros and
 * neither must flatter us.
 *
 * For few rows everything is rotated past the last-level cache. The system may report the host's cache and not this
 * machine's share of it, so the total has a floor and a cap.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FEW_ROWS = 64, MOST_COPIES = 512, MOST_VARIANTS = 16 };

static const size_t mebibyte = (size_t)1 << 20;

static const size_t small_bytes = (size_t)1 << 17;

static size_t available_bytes(void)
{
  size_t kib = 0;
  char line[128];
  FILE *file = fopen("/proc/meminfo", "r");
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "MemAvailable: %zu", &kib) == 1)
      break;
  if (file)
    fclose(file);
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (kib)
    return kib * 1024;
  return pages > 0 && page > 0 ? (size_t)pages * (size_t)page / 2 : 1024 * mebibyte;
}

int bench_copies(size_t bytes)
{
  const size_t floor_bytes = 256 * mebibyte, cap_bytes = 512 * mebibyte;
  /* Ours are twice as large when both forms are kept, and the libraries have two sets: five in all, in half of it. */
  const size_t room = available_bytes() / 10;
  if (bytes <= small_bytes) /* it stays in the second-level cache, in real use too */
    return 1;
  size_t copies = floor_bytes / bytes + 1;
  if (copies < 4)
    copies = 4;
  if (copies > MOST_COPIES)
    copies = MOST_COPIES;
  while (copies > 2 && copies * bytes > cap_bytes)
    copies--;
  while (copies > 1 && copies * bytes > room)
    copies--;
  return (int)copies;
}

int bench_plain(esmm_ctx *ctx, const char *what, const esmm_matrix *m, bool always_copy, io_matrix *out)
{
  bool plain = m->dtype == ESMM_F32 && m->order == ESMM_ROW_MAJOR && (m->ld == 0 || m->ld == m->cols);
  if (!plain || always_copy)
    return cli_matrix_convert(ctx, what, m, ESMM_F32, out);
  *out = (io_matrix){.m = *m};
  return CLI_GO;
}

static double element_density(const float *x, int64_t count)
{
  int64_t set = 0;
  for (int64_t i = 0; i < count; i++)
    set += x[i] != 0;
  return count ? (double)set / (double)count : 0;
}

int bench_dense(const bench *b, const char *what, esmm_operand operand, uint64_t seed, int64_t rows, int64_t cols,
                esmm_dtype dtype, io_matrix *out)
{
  int status = cli_matrix_alloc(what, rows, cols, dtype, out);
  if (status != CLI_GO)
    return status;
  esmm_generator generator = {.size = sizeof generator, .kind = ESMM_GEN_DENSE, .operand = operand, .seed = seed};
  esmm_status made = esmm_generate(b->ctx, &generator, &out->m);
  return made == ESMM_OK ? CLI_GO : cli_status(b->ctx, what, made);
}

/* The A's of later calls: new data where it is generated. */
static int make_variants(bench *b, bench_data *data)
{
  const cli_source *source = &b->problem.a;
  int status = CLI_GO;
  for (int i = 1; i < data->variants && status == CLI_GO; i++) {
    const esmm_matrix *first = &data->a[0].m;
    esmm_generator generator = source->generator;
    generator.seed += (uint64_t)i;
    status = cli_matrix_alloc("A", first->rows, first->cols, first->dtype, &data->a[i]);
    esmm_status made = status == CLI_GO ? esmm_generate(b->ctx, &generator, &data->a[i].m) : ESMM_OK;
    if (made != ESMM_OK)
      status = cli_status(b->ctx, "A", made);
  }
  for (int i = 0; i < data->variants && status == CLI_GO; i++)
    status = bench_plain(b->ctx, "A in f32", &data->a[i].m, false, &data->plain_a[i]);
  return status;
}

static int make_dense_a(bench *b, bench_data *data)
{
  int status = CLI_GO;
  for (int i = 0; i < data->variants && status == CLI_GO && !b->alone; i++)
    status = bench_dense(b, "dense A", ESMM_OPERAND_A, 1000 + (uint64_t)i, data->m, data->k, data->library_dtype,
                         &data->dense_a[i]);
  return status;
}

static int make_copies(bench *b, bench_data *data)
{
  /* A dense B is random dense data already: then the libraries need no second set of it. */
  const esmm_generator *g = &b->problem.b.generator;
  bool no_zeros = g->density == 1 && b->problem.b.prune.format.kind == ESMM_FORMAT_DENSE &&
                  g->kind != ESMM_GEN_PATTERN && g->kind != ESMM_GEN_ACTIVATIONS;
  bool share = !b->problem.b.path && no_zeros;
  int status = bench_plain(b->ctx, "B in f32", &data->b.m, false, &data->plain_b[0]);
  if (status == CLI_GO && !share && !b->alone)
    status = bench_dense(b, "dense B", ESMM_OPERAND_B, 2000, data->k, data->n, data->library_dtype, &data->dense_b[0]);
  for (int i = 1; i < data->copies && status == CLI_GO; i++) {
    status = bench_plain(b->ctx, "B in f32", &data->plain_b[0].m, true, &data->plain_b[i]);
    if (status == CLI_GO && !share && !b->alone)
      status = bench_plain(b->ctx, "dense B", &data->dense_b[0].m, true, &data->dense_b[i]);
  }
  for (int i = 0; i < data->copies && share; i++)
    data->dense_b[i].m = data->plain_b[i].m;
  return status;
}

static int prepare(bench *b, bench_data *data)
{
  const esmm_prepare_opts opts = b->problem.prepare, dense = {.size = sizeof dense, .use = opts.use};
  double *seconds = cli_alloc((size_t)data->copies, sizeof *seconds);
  esmm_status status = ESMM_OK;
  for (int i = 0; i < data->copies && status == ESMM_OK; i++) {
    double start = cli_now();
    status = esmm_prepare(b->ctx, &data->b.m, &opts, &data->weights[i]);
    seconds[i] = cli_now() - start;
    if (status == ESMM_OK && b->library_count == 0 && !b->alone)
      status = esmm_prepare(b->ctx, &data->dense_b[i].m, &dense, &data->dense_weights[i]);
  }
  data->seconds_prepare = bench_median(seconds, data->copies);
  free(seconds);
  if (status == ESMM_OK) {
    data->info = (esmm_weights_info){.size = sizeof data->info};
    status = esmm_weights_get_info(data->weights[0], &data->info);
  }
  return status == ESMM_OK ? CLI_GO : cli_status(b->ctx, "prepare", status);
}

static int measure_a(const bench *b, bench_data *data)
{
  esmm_pattern *strips = NULL;
  if (b->once)
    return CLI_GO;
  esmm_status done = esmm_pattern_extract(b->ctx, &data->a[0].m, BENCH_STRIP, &strips);
  data->density_a = element_density(data->plain_a[0].m.data, data->m * data->k);
  data->strip_density_a = cli_pattern(b->ctx, strips).density;
  esmm_pattern_free(strips);
  return done == ESMM_OK ? CLI_GO : cli_status(b->ctx, "A", done);
}

static esmm_dtype library_dtype(const bench *b)
{
  const cli_problem *p = &b->problem;
  const bool alike = p->dtype_a == p->dtype_b && (p->dtype_c == p->dtype_a || p->dtype_c == ESMM_F32);
  return b->gpu && alike ? (esmm_dtype)p->dtype_a : ESMM_F32;
}

int bench_data_make(bench *b, bench_data *data)
{
  cli_problem *p = &b->problem;
  io_matrix a;
  *data = (bench_data){0};
  int status = cli_problem_make(b->ctx, p, &a, &data->b);
  if (status == CLI_GO && (p->m == 0 || p->k == 0 || p->n == 0))
    status = cli_failed("a product of %lld x %lld x %lld has nothing to measure", (long long)p->m, (long long)p->k,
                        (long long)p->n);
  if (status != CLI_GO) {
    io_matrix_free(&a);
    return status;
  }
  data->m = p->m;
  data->k = p->k;
  data->n = p->n;
  data->source_b = p->b;
  data->library_dtype = library_dtype(b);
  bool rotate = data->m <= FEW_ROWS && !b->gpu && !b->alone && !b->switch_every;
  data->copies = rotate ? bench_copies((size_t)data->k * (size_t)data->n * sizeof(float)) : 1;
  data->variants = rotate && !p->a.path ? MOST_VARIANTS : 1;
  data->a = cli_alloc((size_t)data->variants, sizeof *data->a);
  data->plain_a = cli_alloc((size_t)data->variants, sizeof *data->plain_a);
  data->dense_a = cli_alloc((size_t)data->variants, sizeof *data->dense_a);
  data->weights = cli_alloc((size_t)data->copies, sizeof *data->weights);
  data->dense_weights = cli_alloc((size_t)data->copies, sizeof *data->dense_weights);
  data->plain_b = cli_alloc((size_t)data->copies, sizeof *data->plain_b);
  data->dense_b = cli_alloc((size_t)data->copies, sizeof *data->dense_b);
  data->a[0] = a;

  status = make_variants(b, data);
  if (status == CLI_GO)
    status = make_dense_a(b, data);
  if (status == CLI_GO)
    status = make_copies(b, data);
  if (status == CLI_GO)
    status = b->gpu ? bench_gpu_make(b, data) : prepare(b, data);
  if (status == CLI_GO && !b->gpu)
    status = cli_matrix_alloc("C", data->m, data->n, (esmm_dtype)p->dtype_c, &data->c);
  if (status == CLI_GO && !b->gpu)
    status = cli_matrix_alloc("C in f32", data->m, data->n, ESMM_F32, &data->plain_c);
  if (status == CLI_GO && b->epilogue.any)
    status = bench_finish_make(b, data);
  if (status == CLI_GO)
    status = bench_given_make(b, data);
  if (status == CLI_GO && !b->gpu && !b->alone)
    status = bench_onednn_make(b, data);
  return status == CLI_GO ? measure_a(b, data) : status;
}

bool bench_data_fits(const bench *b, const bench_data *data)
{
  const cli_problem *p = &b->problem;
  const esmm_generator *now = &p->b.generator, *then = &data->source_b.generator;
  return !p->a.path && !p->b.path && now->kind == then->kind && now->density == then->density &&
         now->strip == then->strip && now->seed == then->seed && p->b.prune.density == data->source_b.prune.density;
}

int bench_data_next(bench *b, bench_data *data)
{
  for (int i = 0; i < data->variants; i++) {
    io_matrix_free(&data->plain_a[i]);
    io_matrix_free(&data->a[i]);
  }
  int status = cli_problem_make(b->ctx, &b->problem, &data->a[0], NULL);
  if (status == CLI_GO)
    status = make_variants(b, data);
  if (status == CLI_GO && b->gpu)
    status = bench_gpu_next(b, data);
  if (status == CLI_GO)
    status = bench_given_make(b, data);
  if (status == CLI_GO)
    status = bench_onednn_next(b, data);
  return status == CLI_GO ? measure_a(b, data) : status;
}

void bench_data_free(const bench *b, bench_data *data)
{
  bench_onednn_free(data);
  bench_given_free(data);
  bench_finish_free(b, data);
  if (b->gpu)
    bench_gpu_free(b, data);
  for (int i = 0; i < data->variants; i++) {
    io_matrix_free(&data->plain_a[i]);
    io_matrix_free(&data->dense_a[i]);
    io_matrix_free(&data->a[i]);
  }
  for (int i = 0; i < data->copies; i++) {
    io_matrix_free(&data->plain_b[i]);
    io_matrix_free(&data->dense_b[i]);
    esmm_weights_free(data->weights[i]);
    esmm_weights_free(data->dense_weights[i]);
  }
  io_matrix_free(&data->b);
  io_matrix_free(&data->c);
  io_matrix_free(&data->plain_c);
  free(data->a);
  free(data->plain_a);
  free(data->dense_a);
  free(data->plain_b);
  free(data->dense_b);
  free(data->weights);
  free(data->dense_weights);
  *data = (bench_data){0};
}
