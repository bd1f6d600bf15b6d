/*
 * bench_plot.c: esmm bench --plot: the sweep as a figure: speedup over density, a curve for each kernel asked for.
 *
 * SVG is text, and written here. rsvg-convert, where it is installed, makes a .png of it.
 */
#include "bench.h"

#include <errno.h>
#include <math.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WIDTH = 760, LEFT = 70, RIGHT = 20, TOP = 64, PLOT = 340, LEGEND = 22, SERIES = 12, POINTS = 64 };

typedef struct series {
  char name[64];
  double x[POINTS], y[POINTS];
  int count;
} series;

struct bench_plot {
  series list[SERIES];
  int count;
  char title[200], machine[200];
};

static bool ends_in(const char *path, const char *ending)
{
  const size_t length = strlen(path), tail = strlen(ending);
  return length > tail && strcmp(path + length - tail, ending) == 0;
}

int bench_plot_check(const bench *b)
{
  if (!b->plot)
    return CLI_GO;
  if (!b->sweep_count)
    return cli_usage("--plot draws a sweep: give --sweep, as in --sweep 1,.75,.5,.25,.125");
  if (!ends_in(b->plot, ".svg") && !ends_in(b->plot, ".png"))
    return cli_usage("--plot: %s ends neither in .svg nor in .png", b->plot);
  return CLI_GO;
}

/* Remembers what was measured at this step. */
void bench_plot_add(const bench *b, const bench_data *data, const bench_result *result, bench_plot **plot)
{
  if (!b->plot || result->best < 0)
    return;
  if (!*plot) {
    time_t now = time(NULL);
    struct tm utc;
    char date[16] = "";
    if (gmtime_r(&now, &utc))
      strftime(date, sizeof date, "%Y-%m-%d", &utc);
    *plot = cli_alloc(1, sizeof **plot);
    snprintf((*plot)->title, sizeof(*plot)->title, "Speedup over the dense library: %lld x %lld x %lld, %s",
             (long long)data->m, (long long)data->k, (long long)data->n,
             esmm_dtype_str((esmm_dtype)b->problem.dtype_a));
    snprintf((*plot)->machine, sizeof(*plot)->machine, "%s, %s, %s, source %s", esmm_ctx_device_name(b->ctx),
             cli_workers(b->ctx), date, esmm_source_id());
  }
  for (int i = 0; i < result->ours; i++) {
    const bench_contestant *c = &result->contestants[i];
    const char *name = c->force[0] ? c->force : "auto";
    int at = 0;
    while (at < (*plot)->count && strcmp((*plot)->list[at].name, name) != 0)
      at++;
    if (at == SERIES || !(c->median > 0))
      continue;
    series *s = &(*plot)->list[at];
    if (at == (*plot)->count) {
      (*plot)->count++;
      snprintf(s->name, sizeof s->name, "%s", name);
    }
    if (s->count < POINTS) {
      s->x[s->count] = b->problem.density_now;
      s->y[s->count++] = result->contestants[result->best].median / c->median;
    }
  }
}

static void put_text(FILE *out, double x, double y, const char *more, const char *text)
{
  fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, more);
  for (; *text; text++)
    if (*text == '<' || *text == '>' || *text == '&')
      fprintf(out, "&#%d;", *text);
    else
      fputc((unsigned char)*text < 0x20 ? '?' : *text, out);
  fputs("</text>\n", out);
}

static double x_of(double density)
{
  return LEFT + density * (WIDTH - LEFT - RIGHT);
}

static double y_of(double value, double most)
{
  return TOP + PLOT - value / most * PLOT;
}

static void put_axes(FILE *out, double most, double step)
{
  char text[32];
  for (double t = 0; t <= most * (1 + 1e-9); t += step) {
    fprintf(out, "<path d=\"M%d %.1fH%d\" stroke=\"#dadada\"/>\n", LEFT, y_of(t, most), WIDTH - RIGHT);
    snprintf(text, sizeof text, "%g", t);
    put_text(out, LEFT - 8, y_of(t, most) + 4, "text-anchor=\"end\"", text);
  }
  for (int t = 0; t <= 100; t += 25) {
    snprintf(text, sizeof text, "%d %%", t);
    fprintf(out, "<path d=\"M%.1f %dv6\" stroke=\"#595959\"/>\n", x_of(t / 100.0), TOP + PLOT);
    put_text(out, x_of(t / 100.0), TOP + PLOT + 22, t == 100 ? "text-anchor=\"end\"" : "text-anchor=\"middle\"", text);
  }
  fprintf(out, "<path d=\"M%d %dH%d\" stroke=\"#595959\"/>\n", LEFT, TOP + PLOT, WIDTH - RIGHT);
  put_text(out, (LEFT + WIDTH) / 2.0, TOP + PLOT + 44, "text-anchor=\"middle\"", "nonzero share, %");
  fprintf(out, "<g transform=\"rotate(-90 18 %d)\">", TOP + PLOT / 2);
  put_text(out, 18, TOP + PLOT / 2.0, "text-anchor=\"middle\"", "speedup, times");
  fputs("</g>\n", out);
}

/* Distinct with any kind of colour vision, and in print by their dashes. */
static void put_series(FILE *out, const series *s, int index, double most)
{
  static const char *const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#8a6d00"};
  static const char *const dashes[] = {"none", "7 4", "2 3", "9 3 2 3"};
  const char *colour = colours[index % 6], *dash = dashes[index % 4];
  const double y = TOP + PLOT + 62 + LEGEND * (index / 2), x = LEFT + (index % 2) * (WIDTH - LEFT) / 2.0;
  fprintf(out, "<path d=\"");
  for (int i = 0; i < s->count; i++)
    fprintf(out, "%c%.1f %.1f", i ? 'L' : 'M', x_of(s->x[i]), y_of(s->y[i], most));
  fprintf(out, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n", colour, dash);
  for (int i = 0; i < s->count; i++)
    fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n", x_of(s->x[i]), y_of(s->y[i], most), colour);
  fprintf(out, "<path d=\"M%.1f %.1fh30\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n", x, y, colour,
          dash);
  put_text(out, x + 38, y + 4, "", s->name);
}

static void put_figure(FILE *out, const bench_plot *plot)
{
  double most = 1;
  for (int i = 0; i < plot->count; i++)
    for (int j = 0; j < plot->list[i].count; j++)
      most = fmax(most, plot->list[i].y[j]);
  double step = pow(10, floor(log10(most / 5)));
  step *= most / step > 25 ? 10 : most / step > 10 ? 5 : most / step > 5 ? 2 : 1;
  most = ceil(most / step) * step;
  const int height = TOP + PLOT + 72 + LEGEND * (plot->count / 2 + 1);
  fprintf(out,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
          "font-family=\"sans-serif\" font-size=\"14\" role=\"img\">\n<rect width=\"100%%\" height=\"100%%\" "
          "fill=\"#fff\"/>\n",
          WIDTH, height, WIDTH, height);
  put_text(out, LEFT, 24, "font-size=\"17\"", plot->title);
  put_text(out, LEFT, 46, "font-size=\"12\" fill=\"#595959\"", plot->machine);
  put_axes(out, most, step);
  fprintf(out, "<path d=\"M%d %.1fH%d\" stroke=\"#595959\" stroke-dasharray=\"5 4\"/>\n", LEFT, y_of(1, most),
          WIDTH - RIGHT);
  for (int i = 0; i < plot->count; i++)
    put_series(out, &plot->list[i], i, most);
  const double y = TOP + PLOT + 62 + LEGEND * (plot->count / 2), x = LEFT + (plot->count % 2) * (WIDTH - LEFT) / 2.0;
  fprintf(out, "<path d=\"M%.1f %.1fh30\" stroke=\"#595959\" stroke-dasharray=\"5 4\"/>\n", x, y);
  put_text(out, x + 38, y + 4, "", "the dense library");
  fputs("</svg>\n", out);
}

/* FILE.png of FILE.png.svg, which goes away. */
static int make_png(const char *svg, const char *path)
{
  char program[] = "rsvg-convert", option[] = "--output", zoom[] = "--zoom=2";
  char *const words[] = {program, zoom, option, (char *)path, (char *)svg, NULL};
  pid_t child;
  int state = 0;
  const int failed = posix_spawnp(&child, program, NULL, NULL, words, environ);
  if (failed == 0 && waitpid(child, &state, 0) == child && WIFEXITED(state) && WEXITSTATUS(state) == 0) {
    (void)unlink(svg);
    return CLI_GO;
  }
  return cli_failed("--plot: a .png needs rsvg-convert, which %s (Debian: librsvg2-bin); the figure is in %s",
                    failed == ENOENT || (failed == 0 && WEXITSTATUS(state) == 127) ? "is not installed" : "failed",
                    svg);
}

int bench_plot_write(const bench *b, bench_plot *plot)
{
  if (!b->plot || !plot)
    return CLI_GO;
  const bool png = ends_in(b->plot, ".png");
  char *path = cli_alloc(strlen(b->plot) + 5, 1);
  snprintf(path, strlen(b->plot) + 5, "%s%s", b->plot, png ? ".svg" : "");
  cli_output out;
  int status = cli_output_open(&out, "--plot", path);
  if (status == CLI_GO) {
    put_figure(out.file, plot);
    status = cli_output_close(&out, "--plot");
    cli_output_discard(&out);
  }
  if (status == CLI_GO && png)
    status = make_png(path, b->plot);
  free(path);
  return status;
}
