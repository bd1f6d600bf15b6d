/* plot.c: see plot.h. */
#include "plot.h"

#include <math.h>

enum { WIDTH = 760, LEFT = 76, RIGHT = 24, TOP = 70, PANEL = 220, GAP = 58, BOTTOM = 54 };

/* Distinct with any kind of colour vision; later curves are dashed and thinner, so that equal ones show. */
static const char *const colours[PLOT_SERIES] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                 "#e69f00", "#56b4e9", "#000000", "#999999"};
static const char *const dashes[PLOT_SERIES] = {"none", "7 4", "2 3", "9 3 2 3", "none", "7 4", "2 3", "none"};
static const double widths[PLOT_SERIES] = {4, 2, 2, 2, 2, 2, 2, 2};

typedef struct axis {
  double low, high;
  bool logarithmic;
} axis;

static bool shown(const axis *a, double y)
{
  return isfinite(y) && (!a->logarithmic || y > 0);
}

static double along(const axis *a, double value) /* 0 to 1 */
{
  const double low = a->logarithmic ? log10(a->low) : a->low, high = a->logarithmic ? log10(a->high) : a->high;
  return ((a->logarithmic ? log10(value) : value) - low) / (high > low ? high - low : 1);
}

/* The next of 1, 2, 4, 10, 20, ...: quarters of it are short numbers. */
static double round_up(double value)
{
  double power = pow(10, floor(log10(value)));
  for (int i = 0; i < 3 && power < value; i++)
    power *= i == 2 ? 2.5 : 2;
  return power;
}

static axis axis_of(const plot_panel *panel)
{
  axis a = {INFINITY, -INFINITY, panel->logarithmic};
  for (int s = 0; s < panel->count; s++)
    for (int i = 0; i < panel->series[s].count; i++)
      if (shown(&a, panel->series[s].y[i])) {
        a.low = fmin(a.low, panel->series[s].y[i]);
        a.high = fmax(a.high, panel->series[s].y[i]);
      }
  if (!(a.high > 0)) /* nothing to show, or zeros */
    return (axis){a.logarithmic ? 0.1 : 0, 1, a.logarithmic};
  if (!a.logarithmic)
    return (axis){0, round_up(a.high), false};
  a.low = pow(10, floor(log10(a.low)));
  a.high = pow(10, ceil(log10(a.high)));
  a.high = a.high > a.low ? a.high : 10 * a.low;
  return a;
}

static double most_x(const plot_panel *panels, int count)
{
  double most = 0;
  for (int p = 0; p < count; p++)
    for (int s = 0; s < panels[p].count; s++)
      for (int i = 0; i < panels[p].series[s].count; i++)
        most = fmax(most, panels[p].series[s].x[i]);
  return most > 0 ? most : 1;
}

static void draw_text(FILE *file, double x, double y, const char *anchor, const char *weight, const char *text)
{
  fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" font-weight=\"%s\">", x, y, anchor, weight);
  for (; *text; text++)
    if (*text == '<' || *text == '&')
      fputs(*text == '<' ? "&lt;" : "&amp;", file);
    else
      fputc(*text, file);
  fputs("</text>\n", file);
}

static void draw_line_of_grid(FILE *file, const axis *a, double value, double top)
{
  char label[32];
  const double y = top + PANEL * (1 - along(a, value));
  snprintf(label, sizeof label, "%g", value);
  fprintf(file, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#dddddd\"/>\n", LEFT, y, WIDTH - RIGHT, y);
  draw_text(file, LEFT - 8, y + 4, "end", "normal", label);
}

static void draw_panel(FILE *file, const plot_panel *panel, double top, double x_most)
{
  const axis a = axis_of(panel);
  draw_text(file, LEFT, top - 10, "start", "bold", panel->title);
  if (a.logarithmic)
    for (double value = a.low; value <= a.high * 1.0001; value *= 10)
      draw_line_of_grid(file, &a, value, top);
  else
    for (int i = 0; i <= 4; i++)
      draw_line_of_grid(file, &a, a.low + (a.high - a.low) * i / 4, top);
  for (int s = 0; s < panel->count; s++) {
    const plot_series *line = &panel->series[s];
    fprintf(file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" stroke-dasharray=\"%s\" points=\"",
            colours[s], widths[s], dashes[s]);
    for (int i = 0; i < line->count; i++)
      if (shown(&a, line->y[i])) {
        const double at = fmin(1, fmax(0, along(&a, line->y[i])));
        fprintf(file, "%.1f,%.1f ", LEFT + (WIDTH - LEFT - RIGHT) * line->x[i] / x_most, top + PANEL * (1 - at));
      }
    fputs("\"/>\n", file);
  }
  fprintf(file, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#333333\"/>\n", LEFT, top,
          WIDTH - LEFT - RIGHT, PANEL);
}

void plot_write(FILE *file, const char *title, const char *x_name, const plot_panel *panels, int count)
{
  const int height = TOP + count * (PANEL + GAP) - GAP + BOTTOM;
  const double x_most = most_x(panels, count), bottom = height - BOTTOM;
  fprintf(file,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
          "font-family=\"sans-serif\" font-size=\"13\" fill=\"#111111\">\n"
          "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
          WIDTH, height, WIDTH, height);
  draw_text(file, LEFT, 24, "start", "bold", title);
  for (int s = 0; count > 0 && s < panels->count; s++) {
    const int x = WIDTH - RIGHT - 90 * (panels->count - s);
    fprintf(file,
            "<line x1=\"%d\" y1=\"20\" x2=\"%d\" y2=\"20\" stroke=\"%s\" stroke-width=\"%g\" "
            "stroke-dasharray=\"%s\"/>\n",
            x, x + 28, colours[s], widths[s], dashes[s]);
    draw_text(file, x + 34, 24, "start", "normal", panels->series[s].name);
  }
  for (int p = 0; p < count; p++)
    draw_panel(file, &panels[p], TOP + p * (PANEL + GAP), x_most);
  for (int i = 0; i <= 4; i++) {
    char label[32];
    snprintf(label, sizeof label, "%g", x_most * i / 4);
    draw_text(file, LEFT + (WIDTH - LEFT - RIGHT) * i / 4.0, bottom + 18, "middle", "normal", label);
  }
  draw_text(file, (LEFT + WIDTH - RIGHT) / 2.0, bottom + 40, "middle", "normal", x_name);
  fputs("</svg>\n", file);
}
