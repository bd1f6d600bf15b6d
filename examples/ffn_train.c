/*
 * ffn_train.c: a layer that learns a small function of two variables, and shows loss and sparsity as it goes.
 *
 *     ffn_train                                     dense, exact and split, one after the other from the same start
 *     ffn_train --mode sparse --sparsifier mvue     one of them
 *     ffn_train --device cuda --dtype bf16          on a GPU, with bf16 operands
 *     ffn_train --help
 *
 * A token is a point (u, v), seen as waves of it: x_j = cos(a_j u + b_j v + c_j). The target is a sharp ring around
 * each output's own centre. Negative biases start the hidden layer with few nonzeros, so that there is something to
 * skip; the second curve shows how training changes that. Writes PREFIX.csv and PREFIX.svg.
 */
#include "esmm_ffn.h"
#include "file.h"
#include "plot.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_POINTS 200 /* of a curve */
#define MOST_MODES 4

typedef struct settings {
  int64_t steps, tokens, d_model, d_hidden, seed, threads;
  double rate, bias, share;
  esmm_sparsifier sparsifier;
  int modes[MOST_MODES], mode_count;
  const char *prefix, *save, *device;
  esmm_dtype dtype;
} settings;

static const char *const mode_names[] = {"exact", "split", "sparse", "dense"};
static const char *const dtype_names[] = {"f32", "bf16", "f16"}; /* esmm_dtype */
static const char *const sparsifier_names[] = {"top", "soft", "mvue"};

static void die(const char *what, const char *text)
{
  fprintf(stderr, "ffn_train: %s%s%s\n", what, *text ? ": " : "", text);
  exit(1);
}

static void must(esmm_ctx *ctx, const char *what, esmm_status status)
{
  if (status != ESMM_OK)
    die(what, esmm_ctx_error(ctx));
}

/* ---- numbers ---- */

static double unit(uint64_t *state) /* [0, 1), splitmix64 */
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static double normal(uint64_t *state)
{
  const double radius = sqrt(-2 * log(1 - unit(state)));
  return radius * cos(6.283185307179586 * unit(state));
}

static esmm_matrix matrix(int64_t rows, int64_t cols)
{
  esmm_matrix m = {.data = calloc((size_t)(rows * cols), sizeof(float)), .rows = rows, .cols = cols};
  if (!m.data)
    die("out of memory", "");
  return m;
}

/* ---- where the layer computes: matrices there, of its dtype, beside those of the host ---- */

/* The host's own, where the layer reads that. Vectors stay fp32. */
static esmm_matrix there(esmm_ctx *ctx, const settings *s, const esmm_matrix *host)
{
  const char *colon = strchr(esmm_ctx_device(ctx), ':');
  if (!colon)
    return *host;
  esmm_matrix m = *host;
  m.place = ESMM_DEVICE;
  m.device = atoi(colon + 1);
  m.dtype = host->rows == 1 ? ESMM_F32 : s->dtype;
  must(ctx, "device memory", esmm_memory_alloc(ctx, (size_t)(m.rows * m.cols) * esmm_dtype_size(m.dtype), &m.data));
  return m;
}

static void move(esmm_ctx *ctx, const esmm_matrix *from, esmm_matrix *to)
{
  if (from->data != to->data)
    must(ctx, "copy", esmm_matrix_copy(ctx, from, to));
}

static void leave(esmm_ctx *ctx, const esmm_matrix *m)
{
  if (m->place == ESMM_DEVICE)
    esmm_memory_free(ctx, m->data);
}

/* ---- the function ---- */

typedef struct task {
  esmm_matrix waves; /* [d_model, 3]: a, b, c of each input */
} task;

static void draw_batch(const task *t, uint64_t *state, esmm_matrix *x, esmm_matrix *target)
{
  const float *w = t->waves.data;
  for (int64_t i = 0; i < x->rows; i++) {
    const double u = 2 * unit(state) - 1, v = 2 * unit(state) - 1;
    for (int64_t j = 0; j < x->cols; j++) {
      const double angle = 6.283185307179586 * (double)j / (double)x->cols;
      const double away = hypot(u - 0.5 * cos(angle), v - 0.5 * sin(angle));
      ((float *)x->data)[i * x->cols + j] =
          (float)(1.4142135623730951 * cos((double)w[3 * j] * u + (double)w[3 * j + 1] * v + (double)w[3 * j + 2]));
      ((float *)target->data)[i * x->cols + j] = (float)exp(-20 * (away - 0.5) * (away - 0.5));
    }
  }
}

/* ---- parameters and Adam ---- */

enum { W1, B1, W2, B2, PARAMETERS };

typedef struct model {
  esmm_matrix value[PARAMETERS], gradient[PARAMETERS], mean[PARAMETERS], square[PARAMETERS];
} model;

static void model_create(model *m, const settings *s)
{
  const int64_t shapes[PARAMETERS][2] = {
      {s->d_model, s->d_hidden}, {1, s->d_hidden}, {s->d_hidden, s->d_model}, {1, s->d_model}};
  uint64_t state = (uint64_t)s->seed + 1;
  for (int i = 0; i < PARAMETERS; i++) {
    m->value[i] = matrix(shapes[i][0], shapes[i][1]);
    m->gradient[i] = matrix(shapes[i][0], shapes[i][1]);
    m->mean[i] = matrix(shapes[i][0], shapes[i][1]);
    m->square[i] = matrix(shapes[i][0], shapes[i][1]);
    float *p = m->value[i].data;
    for (int64_t e = 0; e < shapes[i][0] * shapes[i][1]; e++)
      p[e] = (float)(i == B1 ? s->bias : i == B2 ? 0 : normal(&state) / sqrt((double)shapes[i][0]));
  }
}

static void model_free(model *m)
{
  for (int i = 0; i < PARAMETERS; i++) {
    free(m->value[i].data);
    free(m->gradient[i].data);
    free(m->mean[i].data);
    free(m->square[i].data);
  }
}

static void model_update(model *m, int64_t step, double rate)
{
  const double unbias1 = 1 - pow(0.9, (double)step), unbias2 = 1 - pow(0.99, (double)step);
  for (int i = 0; i < PARAMETERS; i++) {
    float *p = m->value[i].data, *mean = m->mean[i].data, *square = m->square[i].data;
    const float *g = m->gradient[i].data;
    for (int64_t e = 0; e < m->value[i].rows * m->value[i].cols; e++) {
      mean[e] = 0.9f * mean[e] + 0.1f * g[e];
      square[e] = 0.99f * square[e] + 0.01f * g[e] * g[e];
      p[e] -= (float)(rate * ((double)mean[e] / unbias1) / (sqrt((double)square[e] / unbias2) + 1e-8));
    }
  }
}

/* ---- one run ---- */

typedef struct curve {
  const char *mode;
  int count;
  double step[MOST_POINTS + 2], loss[MOST_POINTS + 2], density[MOST_POINTS + 2], strips[MOST_POINTS + 2],
      dropped[MOST_POINTS + 2];
  int64_t alive[MOST_POINTS + 2];
} curve;

/* dy of the mean squared error, and the error. */
static double loss_of(const esmm_matrix *y, const esmm_matrix *target, esmm_matrix *dy)
{
  const int64_t count = y->rows * y->cols;
  const float *a = y->data, *b = target->data;
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    const double difference = (double)a[i] - (double)b[i];
    sum += difference * difference;
    if (dy)
      ((float *)dy->data)[i] = (float)(2 * difference / (double)count);
  }
  return sum / (double)count;
}

static void show(const curve *c, int64_t step, int64_t steps)
{
  const int last = c->count - 1;
  static const char bar[] = "####################";
  if (isatty(STDERR_FILENO))
    fprintf(stderr, "\r%-6s [%-20.*s] step %lld  loss %.5f  nonzero %.1f %%  strips %.1f %%%s", c->mode,
            (int)(20 * step / steps), bar, (long long)step, c->loss[last], 100 * c->density[last],
            100 * c->strips[last], step == steps ? "\n" : "");
  else if (step == steps || step * 5 / steps != (step - 1) * 5 / steps)
    fprintf(stderr, "%-6s step %lld  loss %.5f  nonzero %.1f %%  strips %.1f %%\n", c->mode, (long long)step,
            c->loss[last], 100 * c->density[last], 100 * c->strips[last]);
}

static void train(esmm_ctx *ctx, const settings *s, int mode, const task *t, model *m, curve *c)
{
  const esmm_ffn_opts opts = {.size = sizeof opts,
                              .d_model = s->d_model,
                              .d_hidden = s->d_hidden,
                              .mode = (esmm_ffn_mode)mode,
                              .sparsifier = s->sparsifier,
                              .sparse_share = s->share,
                              .permute_tokens = 1,
                              .dtype = s->dtype,
                              .seed = (uint64_t)s->seed};
  esmm_matrix value[PARAMETERS], gradient[PARAMETERS];
  for (int i = 0; i < PARAMETERS; i++) {
    value[i] = there(ctx, s, &m->value[i]);
    gradient[i] = there(ctx, s, &m->gradient[i]);
  }
  const esmm_ffn_weights weights = {
      .size = sizeof weights, .w1 = &value[W1], .w2 = &value[W2], .b1 = value[B1].data, .b2 = value[B2].data};
  const esmm_ffn_grads grads = {
      .size = sizeof grads, .w1 = &gradient[W1], .w2 = &gradient[W2], .b1 = gradient[B1].data, .b2 = gradient[B2].data};
  esmm_matrix x = matrix(s->tokens, s->d_model), y = matrix(s->tokens, s->d_model),
              target = matrix(s->tokens, s->d_model), dy = matrix(s->tokens, s->d_model),
              test_x = matrix(1024, s->d_model), test_y = matrix(1024, s->d_model),
              test_target = matrix(1024, s->d_model);
  uint64_t state = (uint64_t)s->seed + 2, test_state = (uint64_t)s->seed + 3;
  draw_batch(t, &test_state, &test_x, &test_target);
  esmm_matrix in = there(ctx, s, &x), out = there(ctx, s, &y), back = there(ctx, s, &dy);
  esmm_matrix test_in = there(ctx, s, &test_x), test_out = there(ctx, s, &test_y);
  move(ctx, &test_x, &test_in);
  esmm_ffn *ffn = NULL;
  esmm_ffn_cache *cache = NULL;
  must(ctx, "layer", esmm_ffn_create(ctx, &opts, &ffn));
  must(ctx, "cache", esmm_ffn_cache_create(ctx, ffn, &cache));
  const int64_t every = (s->steps + MOST_POINTS - 1) / MOST_POINTS;
  c->mode = mode_names[mode];
  for (int64_t step = 0; step <= s->steps; step++) {
    for (int i = 0; i < PARAMETERS; i++)
      move(ctx, &m->value[i], &value[i]);
    must(ctx, "weights", esmm_ffn_set_weights(ctx, ffn, &weights, NULL));
    if (step % every == 0 || step == s->steps) {
      esmm_ffn_report report = {.size = sizeof report};
      must(ctx, "test", esmm_ffn_forward(ctx, ffn, &test_in, &test_out, NULL, &report));
      move(ctx, &test_out, &test_y);
      c->step[c->count] = (double)step;
      c->loss[c->count] = loss_of(&test_y, &test_target, NULL);
      c->density[c->count] = report.element_density;
      c->strips[c->count] = report.strip_density;
      c->alive[c->count] = report.alive_columns;
      c->dropped[c->count++] = report.y.norm > 0 ? report.y.norm_dropped / report.y.norm : 0;
      show(c, step, s->steps);
    }
    if (step == s->steps)
      break;
    draw_batch(t, &state, &x, &target);
    move(ctx, &x, &in);
    must(ctx, "forward", esmm_ffn_forward(ctx, ffn, &in, &out, cache, NULL));
    move(ctx, &out, &y);
    loss_of(&y, &target, &dy);
    move(ctx, &dy, &back);
    must(ctx, "backward", esmm_ffn_backward(ctx, ffn, cache, &back, &grads, NULL));
    for (int i = 0; i < PARAMETERS; i++)
      move(ctx, &gradient[i], &m->gradient[i]);
    model_update(m, step + 1, s->rate * 0.5 * (1 + cos(3.141592653589793 * (double)step / (double)s->steps)));
  }
  esmm_ffn_cache_free(cache);
  esmm_ffn_free(ffn);
  const esmm_matrix *lent[] = {&in, &out, &back, &test_in, &test_out};
  for (size_t i = 0; i < sizeof lent / sizeof *lent; i++)
    leave(ctx, lent[i]);
  for (int i = 0; i < PARAMETERS; i++) {
    leave(ctx, &value[i]);
    leave(ctx, &gradient[i]);
  }
  esmm_matrix *own[] = {&x, &y, &target, &dy, &test_x, &test_y, &test_target};
  for (size_t i = 0; i < sizeof own / sizeof *own; i++)
    free(own[i]->data);
}

/* ---- files: each is written beside its name and takes it when it is whole ---- */

static void open_file(const char *path, io_sink *sink)
{
  char text[512];
  const io_error error = {.name = path, .text = text, .size = sizeof text};
  if (io_sink_open(sink, &error) != 0)
    die(text, "");
}

static void write_file(const char *path, void (*fill)(FILE *file, const void *user), const void *user)
{
  char text[512];
  const io_error error = {.name = path, .text = text, .size = sizeof text};
  io_sink sink;
  open_file(path, &sink);
  fill(sink.file, user);
  if (io_sink_commit(&sink, &error) != 0)
    die(text, "");
}

typedef struct curves {
  const curve *list;
  int count;
} curves;

static void fill_csv(FILE *file, const void *user)
{
  const curves *all = user;
  fputs("mode,step,loss,element_density,strip_density,alive_columns,dropped_share\n", file);
  for (int i = 0; i < all->count; i++)
    for (int p = 0; p < all->list[i].count; p++) {
      const curve *c = &all->list[i];
      fprintf(file, "%s,%.0f,%.9g,%.6g,%.6g,%lld,%.6g\n", c->mode, c->step[p], c->loss[p], c->density[p], c->strips[p],
              (long long)c->alive[p], c->dropped[p]);
    }
}

static void fill_svg(FILE *file, const void *user)
{
  const curves *all = user;
  plot_panel panels[3] = {{.title = "loss (mean squared error on 1024 points)", .logarithmic = true},
                          {.title = "nonzero share of the hidden layer"},
                          {.title = "share of the hidden layer's norm that 2:4 dropped"}};
  for (int i = 0; i < all->count; i++) {
    const curve *c = &all->list[i];
    panels[0].series[panels[0].count++] = (plot_series){c->mode, c->count, c->step, c->loss};
    panels[1].series[panels[1].count++] = (plot_series){c->mode, c->count, c->step, c->density};
    panels[2].series[panels[2].count++] = (plot_series){c->mode, c->count, c->step, c->dropped};
  }
  plot_write(file, "A feed-forward layer learns rings", "step", panels, 3);
}

/* safetensors: the header's length, the header, the tensors; a weight is stored as PyTorch does, [out, in]. */
static void fill_safetensors(FILE *file, const void *user)
{
  const model *m = user;
  static const char *const names[PARAMETERS] = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
  char header[1024];
  int length = 0;
  int64_t at = 0;
  for (int i = 0; i < PARAMETERS; i++) {
    const esmm_matrix *v = &m->value[i];
    const int64_t bytes = v->rows * v->cols * (int64_t)sizeof(float);
    char shape[64];
    if (v->rows == 1)
      snprintf(shape, sizeof shape, "%lld", (long long)v->cols);
    else
      snprintf(shape, sizeof shape, "%lld,%lld", (long long)v->cols, (long long)v->rows);
    length += snprintf(header + length, sizeof header - (size_t)length,
                       "%c\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", i ? ',' : '{',
                       names[i], shape, (long long)at, (long long)(at + bytes));
    at += bytes;
  }
  length += snprintf(header + length, sizeof header - (size_t)length, "}");
  for (; length % 8; length++) /* tensors begin at a multiple of 8 */
    header[length] = ' ';
  for (int i = 0; i < 8; i++)
    fputc((int)((uint64_t)length >> 8 * i & 255), file);
  fwrite(header, 1, (size_t)length, file);
  for (int i = 0; i < PARAMETERS; i++)
    for (int64_t c = 0; c < m->value[i].cols; c++)
      for (int64_t r = 0; r < m->value[i].rows; r++)
        fwrite((const float *)m->value[i].data + r * m->value[i].cols + c, sizeof(float), 1, file);
}

/* ---- the command line ---- */

static const char help[] =
    "ffn_train: fits a feed-forward layer and shows loss and sparsity as it goes\n"
    "  --mode NAME         exact, split, sparse, dense; may be given several times (dense, exact and split)\n"
    "  --sparsifier NAME   of split and sparse: top, soft, mvue (top)\n"
    "  --share X           of the columns that go sparse in split (0.95)\n"
    "  --steps N           (600)        --tokens N    of a step (512)\n"
    "  --model N           (16)         --hidden N    (256)\n"
    "  --rate X            (0.01)       --bias X      the first layer's biases start here (-1)\n"
    "  --seed N            (1)          --threads N   (1: the layer is small)\n"
    "  --device NAME       cpu, cuda, cuda:1 (cpu)\n"
    "  --dtype NAME        of the hidden layer, and on a GPU of all matrices: f32, bf16, f16 (f32)\n"
    "  --out PREFIX        PREFIX.csv and PREFIX.svg (ffn_train)\n"
    "  --save FILE         the last run's weights, as safetensors\n";

static double number(const char *name, const char *text, double low, double high)
{
  char *end;
  const double value = strtod(text, &end);
  if (end == text || *end || !(value >= low && value <= high)) {
    fprintf(stderr, "ffn_train: %s is '%s'; it must be %g to %g\n", name, text, low, high);
    exit(2);
  }
  return value;
}

static int choice(const char *name, const char *text, const char *const *names, int count)
{
  for (int i = 0; i < count; i++)
    if (strcmp(text, names[i]) == 0)
      return i;
  fprintf(stderr, "ffn_train: %s is '%s', which there is not; try --help\n", name, text);
  exit(2);
}

static settings parse(int argc, char **argv)
{
  settings s = {.steps = 600,
                .tokens = 512,
                .d_model = 16,
                .d_hidden = 256,
                .seed = 1,
                .threads = 1,
                .rate = 0.01,
                .bias = -1,
                .prefix = "ffn_train",
                .device = "cpu"};
  const struct {
    const char *name;
    int64_t *whole;
    double *real, low, high;
  } numbers[] = {
      {"--steps", &s.steps, NULL, 1, 1e6},    {"--tokens", &s.tokens, NULL, 1, 1e5},
      {"--model", &s.d_model, NULL, 1, 4096}, {"--hidden", &s.d_hidden, NULL, 1, 65536},
      {"--seed", &s.seed, NULL, 0, 1e9},      {"--threads", &s.threads, NULL, 1, 1024},
      {"--rate", NULL, &s.rate, 0, 10},       {"--bias", NULL, &s.bias, -100, 100},
      {"--share", NULL, &s.share, 0.001, 1},
  };
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
    if (strcmp(name, "--help") == 0) {
      fputs(help, stdout);
      exit(0);
    }
    if (!value) {
      fprintf(stderr, "ffn_train: '%s' is no option, or lacks its value; try --help\n", name);
      exit(2);
    }
    i++;
    size_t n = 0;
    while (n < sizeof numbers / sizeof *numbers && strcmp(name, numbers[n].name) != 0)
      n++;
    if (n < sizeof numbers / sizeof *numbers) {
      const double got = number(name, value, numbers[n].low, numbers[n].high);
      if (numbers[n].whole && got != floor(got)) {
        fprintf(stderr, "ffn_train: %s is '%s'; it must be a whole number\n", name, value);
        exit(2);
      }
      if (numbers[n].whole)
        *numbers[n].whole = (int64_t)got;
      else
        *numbers[n].real = got;
    } else if (strcmp(name, "--mode") == 0) {
      if (s.mode_count == MOST_MODES) {
        fprintf(stderr, "ffn_train: --mode %s is one too many; there can be %d\n", value, MOST_MODES);
        exit(2);
      }
      s.modes[s.mode_count++] = choice(name, value, mode_names, 4);
    } else if (strcmp(name, "--sparsifier") == 0) {
      s.sparsifier = (esmm_sparsifier)choice(name, value, sparsifier_names, 3);
    } else if (strcmp(name, "--dtype") == 0) {
      s.dtype = (esmm_dtype)choice(name, value, dtype_names, 3);
    } else if (strcmp(name, "--device") == 0) {
      s.device = value;
    } else if (strcmp(name, "--out") == 0) {
      s.prefix = value;
    } else if (strcmp(name, "--save") == 0) {
      s.save = value;
    } else {
      fprintf(stderr, "ffn_train: '%s' is no option; try --help\n", name);
      exit(2);
    }
  }
  if (s.mode_count == 0) {
    s.modes[s.mode_count++] = ESMM_FFN_DENSE;
    s.modes[s.mode_count++] = ESMM_FFN_EXACT;
    s.modes[s.mode_count++] = ESMM_FFN_SPLIT;
  }
  return s;
}

/* PREFIX and an ending; the caller frees it. */
static char *with_ending(const char *prefix, const char *ending)
{
  const size_t bytes = strlen(prefix) + strlen(ending) + 1;
  char *path = malloc(bytes);
  if (!path)
    die("out of memory", "");
  snprintf(path, bytes, "%s%s", prefix, ending);
  return path;
}

static const struct {
  const char *ending;
  void (*fill)(FILE *file, const void *user);
} outputs[] = {{".csv", fill_csv}, {".svg", fill_svg}};
enum { OUTPUTS = sizeof outputs / sizeof *outputs };

static void write_curves(const settings *s, const curves *all)
{
  for (int i = 0; i < OUTPUTS; i++) {
    char *path = with_ending(s->prefix, outputs[i].ending);
    write_file(path, outputs[i].fill, all);
    free(path);
  }
}

static void try_file(const char *path)
{
  io_sink sink;
  open_file(path, &sink);
  io_sink_abort(&sink);
}

/* What cannot be written is said before the training, and so are two files of one name. */
static void try_files(const settings *s)
{
  char *real = s->save ? realpath(s->save, NULL) : NULL;
  for (int i = 0; i < OUTPUTS; i++) {
    char *path = with_ending(s->prefix, outputs[i].ending), *other = realpath(path, NULL);
    if (s->save && (strcmp(s->save, path) == 0 || (real && other && strcmp(real, other) == 0))) {
      fprintf(stderr, "ffn_train: --save would replace --out's %s: give another name\n", path);
      exit(2);
    }
    try_file(path);
    free(other);
    free(path);
  }
  if (s->save)
    try_file(s->save);
  free(real);
}

int main(int argc, char **argv)
{
  static curve list[MOST_MODES];
  char why[256] = "";
  const settings s = parse(argc, argv);
  try_files(&s);
  const esmm_ctx_opts opts = {
      .size = sizeof opts, .device = s.device, .threads = (int)s.threads, .error = why, .error_size = sizeof why};
  esmm_ctx *ctx = NULL;
  if (esmm_ctx_create(&ctx, &opts) != ESMM_OK)
    die("context", why);
  task t = {.waves = matrix(s.d_model, 3)};
  uint64_t state = (uint64_t)s.seed;
  for (int64_t i = 0; i < 3 * s.d_model; i++)
    ((float *)t.waves.data)[i] = (float)(4 * normal(&state));
  const curves all = {list, s.mode_count};
  for (int i = 0; i < s.mode_count; i++) {
    model m;
    model_create(&m, &s);
    train(ctx, &s, s.modes[i], &t, &m, &list[i]);
    if (s.save && i == s.mode_count - 1)
      write_file(s.save, fill_safetensors, &m);
    model_free(&m);
  }
  write_curves(&s, &all);
  for (int i = 0; i < s.mode_count; i++) {
    const curve *c = &list[i];
    printf("%-6s loss %.6f, %.3f of %s's; %.1f %% of the hidden layer nonzero\n", c->mode, c->loss[c->count - 1],
           c->loss[c->count - 1] / list[0].loss[list[0].count - 1], list[0].mode, 100 * c->density[c->count - 1]);
  }
  printf("curves in %s.svg, numbers in %s.csv\n", s.prefix, s.prefix);
  free(t.waves.data);
  esmm_ctx_free(ctx);
  if (fflush(stdout) != 0 || ferror(stdout))
    die("cannot write to the standard output", "");
  return 0;
}
