/* plot.h: curves as an SVG file, a panel for each quantity. For the examples. */
#ifndef ESMM_EXAMPLE_PLOT_H
#define ESMM_EXAMPLE_PLOT_H

#include <stdbool.h>
#include <stdio.h>

#define PLOT_SERIES 8

typedef struct plot_series {
  const char *name;
  int count;
  const double *x, *y; /* points that are not finite (or not positive on a logarithmic axis) are left out */
} plot_series;

typedef struct plot_panel {
  const char *title;
  bool logarithmic; /* else y starts at 0 */
  int count;        /* at most PLOT_SERIES */
  plot_series series[PLOT_SERIES];
} plot_panel;

/* Panels below each other, one legend (the first panel's names), x named once. */
void plot_write(FILE *file, const char *title, const char *x_name, const plot_panel *panels, int count);

#endif
