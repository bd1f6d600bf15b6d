/*
 * table.c: tables that line up, colour, progress, and numbers for people.
 *
 * Cells are measured in terminal columns, not bytes, so that a name in UTF-8 does not push its row out of line. Colour
 * is added when a cell is printed and is never measured. The locale is left alone: numbers always have a point.
 */
#include "cli.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

double cli_now(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- colour ---- */

bool cli_colour(FILE *out)
{
  const char *no = getenv("NO_COLOR"), *term = getenv("TERM");
  return !(no && no[0]) && !(term && strcmp(term, "dumb") == 0) && isatty(fileno(out));
}

static const char *style_on(cli_style style)
{
  switch (style) {
  case CLI_BOLD:
    return "\033[1m";
  case CLI_FAINT:
    return "\033[2m";
  case CLI_GOOD:
    return "\033[32m";
  case CLI_BAD:
    return "\033[1;31m";
  case CLI_WARN:
    return "\033[33m";
  case CLI_PLAIN:
    break;
  }
  return "";
}

void cli_print(FILE *out, cli_style style, const char *format, ...)
{
  bool colour = style != CLI_PLAIN && cli_colour(out);
  if (colour)
    fputs(style_on(style), out);
  va_list list;
  va_start(list, format);
  vfprintf(out, format, list);
  va_end(list);
  if (colour)
    fputs("\033[0m", out);
}

/* ---- widths ---- */

/* Reads one code point; a byte that starts none counts as one on its own. */
static uint32_t next_code(const unsigned char **at)
{
  const unsigned char *p = *at;
  int more = p[0] < 0x80 ? 0 : p[0] >= 0xf0 ? 3 : p[0] >= 0xe0 ? 2 : p[0] >= 0xc0 ? 1 : 0;
  uint32_t code = more ? p[0] & (0x3fu >> more) : p[0];
  for (int i = 1; i <= more; i++) {
    if ((p[i] & 0xc0) != 0x80) {
      *at = p + 1;
      return p[0];
    }
    code = code << 6 | (p[i] & 0x3fu);
  }
  *at = p + 1 + more;
  return code;
}

int cli_width(const char *utf8)
{
  static const uint32_t wide[][2] = {{0x1100, 0x115f}, {0x2e80, 0xa4cf}, {0xac00, 0xd7a3},   {0xf900, 0xfaff},
                                     {0xfe30, 0xfe6f}, {0xff00, 0xff60}, {0x1f300, 0x1faff}, {0x20000, 0x3fffd}};
  int width = 0;
  for (const unsigned char *p = (const unsigned char *)utf8; *p;) {
    uint32_t code = next_code(&p);
    int columns = code >= 0x300 && code <= 0x36f ? 0 : 1; /* combining marks sit on the letter before them */
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
      if (code >= wide[i][0] && code <= wide[i][1])
        columns = 2;
    width += columns;
  }
  return width;
}

/* ---- tables ---- */

typedef struct cell {
  char *text;
  cli_style style;
  bool rule; /* a line stands before this cell's row */
} cell;

struct cli_table {
  char *align;
  int columns;
  cell *cells;
  size_t count, room;
  bool rule_next;
  size_t heads; /* cells of the heading: 0 or columns */
};

static void add_cell(cli_table *table, cli_style style, const char *text)
{
  if (table->count == table->room) {
    table->room = table->room ? 2 * table->room : 64;
    table->cells = cli_grow(table->cells, table->room, sizeof *table->cells);
  }
  const size_t room = 3 * strlen(text) + 1; /* io_show makes six bytes of two at most */
  char *copy = cli_alloc(room, 1);
  (void)io_show(text, copy, room);
  table->cells[table->count++] = (cell){copy, style, table->rule_next};
  table->rule_next = false;
}

cli_table *cli_table_new(const char *align, const char *const *heads)
{
  cli_table *table = cli_alloc(1, sizeof *table);
  size_t columns = strlen(align);
  table->align = cli_alloc(columns + 1, 1);
  memcpy(table->align, align, columns);
  table->columns = (int)columns;
  for (size_t i = 0; heads && i < columns; i++)
    add_cell(table, CLI_BOLD, heads[i]);
  table->heads = table->count;
  return table;
}

void cli_table_cell(cli_table *table, cli_style style, const char *format, ...)
{
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  add_cell(table, style, text);
}

void cli_table_fact(cli_table *table, const char *name, const char *format, ...)
{
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  add_cell(table, CLI_BOLD, name);
  add_cell(table, CLI_PLAIN, text);
}

void cli_table_rule(cli_table *table)
{
  table->rule_next = table->count > table->heads;
}

/* How many bytes of text to print on this line: all of it, or up to a blank that is at most `width` columns away. */
static size_t line_end(const char *text, int width)
{
  if (cli_width(text) <= width)
    return strlen(text);
  size_t end = 0;
  for (size_t i = 1; text[i]; i++) /* nearly all texts are ASCII: a byte is at least as wide as it looks */
    if (text[i] == ' ' && (int)i <= width)
      end = i;
  return end ? end : strcspn(text, " ");
}

/* The cells of a last column that go on: each line is indented to where the column starts. */
static void print_last(FILE *out, const cell *c, int indent, int width)
{
  const char *at = c->text;
  for (;;) {
    size_t end = width > 0 ? line_end(at, width) : strlen(at);
    cli_print(out, c->style, "%.*s", (int)end, at);
    at += end + strspn(at + end, " ");
    if (!*at)
      return;
    fprintf(out, "\n%*s", indent, "");
  }
}

/* Part of a table: the first column, and those from `from` to in front of `to`. */
typedef struct part {
  int from, to;
} part;

static bool part_has(const part *p, int column)
{
  return column == 0 || (column >= p->from && column < p->to);
}

static void print_part(const cli_table *table, const int *widths, const part *p, int width, FILE *out)
{
  const int last = p->to - 1;
  int total = widths[0];
  for (int i = p->from; i < p->to; i++)
    total += 2 + widths[i];
  const int indent = total - widths[last], room = width > indent ? width - indent : 0;
  for (size_t row = 0; row < table->count; row += (size_t)table->columns) {
    const cell *cells = &table->cells[row];
    int columns = table->columns; /* a row that is cut short ends its line */
    if (table->count - row < (size_t)columns)
      columns = (int)(table->count - row);
    if (cells[0].rule) {
      for (int j = 0; j < total && (width == 0 || j < width); j++)
        fputc('-', out);
      fputc('\n', out);
    }
    int owed = 0; /* blanks, until something follows them, so that no line ends in one */
    for (int i = 0; i < columns; i++) {
      if (!part_has(p, i))
        continue;
      const cell *c = &cells[i];
      const int blanks = widths[i] - cli_width(c->text);
      const bool right = table->align[i] == 'r';
      if (c->text[0]) {
        fprintf(out, "%*s", owed + (right ? blanks : 0), "");
        if (i == last)
          print_last(out, c, indent, room);
        else
          cli_print(out, c->style, "%s", c->text);
        owed = right ? 0 : blanks;
      } else
        owed += widths[i];
      owed += 2;
    }
    fputc('\n', out);
  }
}

/* The least width of a last column that is broken into lines. */
enum { LEAST_TEXT = 24 };

void cli_table_print_wrapped(const cli_table *table, int width, FILE *out)
{
  int *widths = cli_alloc((size_t)table->columns, sizeof *widths);
  int total = 2 * (table->columns - 1);
  for (size_t i = 0; i < table->count; i++) {
    const int cell_width = cli_width(table->cells[i].text);
    int *widest = &widths[i % (size_t)table->columns];
    *widest = cell_width > *widest ? cell_width : *widest;
  }
  for (int i = 0; i < table->columns; i++)
    total += widths[i];
  const int last = table->columns - 1, before = total - widths[last];
  const bool breaks = table->align[last] == 'l' && before + LEAST_TEXT <= width;
  part p = {1, table->columns};
  if (table->columns == 1 || width == 0 || total <= width || breaks) {
    print_part(table, widths, &p, width, out);
  } else {
    for (; p.from < table->columns; p.from = p.to) {
      int used = widths[0] + 2 + widths[p.from];
      for (p.to = p.from + 1; p.to < table->columns && used + 2 + widths[p.to] <= width; p.to++)
        used += 2 + widths[p.to];
      if (p.from > 1)
        fputc('\n', out);
      print_part(table, widths, &p, width, out);
    }
  }
  free(widths);
}

int cli_screen_width(FILE *out)
{
  const char *columns = getenv("COLUMNS");
  struct winsize size;
  char *end = NULL;
  const long asked = columns ? strtol(columns, &end, 10) : 0;
  if (asked > 0 && asked < 10000 && !*end)
    return (int)asked;
  if (!isatty(fileno(out)))
    return 0;
  return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void cli_table_print(const cli_table *table, FILE *out)
{
  cli_table_print_wrapped(table, cli_screen_width(out), out);
}

void cli_table_free(cli_table *table)
{
  if (!table)
    return;
  for (size_t i = 0; i < table->count; i++)
    free(table->cells[i].text);
  free(table->cells);
  free(table->align);
  free(table);
}

/* ---- numbers for people ---- */

enum { RING = 16, RING_BYTES = 32 };

static char *ring_next(void)
{
  static char ring[RING][RING_BYTES];
  static unsigned at;
  return ring[at++ % RING];
}

const char *cli_number(double x, int digits)
{
  char *out = ring_next();
  if (!isfinite(x))
    return "-";
  double size = fabs(x);
  if (size != 0 && (size < 1e-4 || size >= 1e9)) {
    snprintf(out, RING_BYTES, "%.*e", digits - 1, x);
    return out;
  }
  /* 9.996 with three digits is 10.0: the rounded number decides how many places it has. */
  int places = size == 0 ? 0 : digits - 1 - (int)floor(log10(size));
  double unit = pow(10, -places), rounded = round(size / unit) * unit;
  if (size != 0 && places > 0 && floor(log10(rounded)) > floor(log10(size)))
    places--;
  snprintf(out, RING_BYTES, "%.*f", places > 0 ? places : 0, x);
  return out;
}

const char *cli_seconds(double seconds)
{
  static const struct {
    double below, unit;
    const char *name;
  } units[] = {{1e-6, 1e9, "ns"}, {1e-3, 1e6, "us"}, {1, 1e3, "ms"}, {HUGE_VAL, 1, "s"}};
  if (!isfinite(seconds))
    return "-";
  size_t i = 0;
  while (fabs(seconds) >= units[i].below)
    i++;
  char *out = ring_next();
  snprintf(out, RING_BYTES, "%s %s", cli_number(seconds * units[i].unit, 3), units[i].name);
  return out;
}

const char *cli_bytes(double bytes)
{
  static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  if (!isfinite(bytes))
    return "-";
  size_t i = 0;
  for (; bytes >= 1024 && i < 4; i++)
    bytes /= 1024;
  char *out = ring_next();
  snprintf(out, RING_BYTES, i == 0 ? "%.0f %s" : "%.1f %s", bytes, names[i]);
  return out;
}

const char *cli_count(int64_t count, const char *one)
{
  char *out = ring_next();
  snprintf(out, RING_BYTES, "%lld %s%s", (long long)count, one, count == 1 ? "" : "s");
  return out;
}

const char *cli_percent(double share)
{
  if (!isfinite(share))
    return "-";
  char *out = ring_next();
  snprintf(out, RING_BYTES, "%.1f %%", 100 * share);
  return out;
}

/* ---- progress ---- */

void cli_progress_start(cli_progress *progress, const char *title)
{
  *progress = (cli_progress){.title = title, .started = cli_now()};
}

void cli_progress_update(void *user, int done, int total)
{
  enum { BAR = 24 };
  const double patience = 2, between = 0.1; /* seconds */
  cli_progress *progress = user;
  double now = cli_now();
  if (now - progress->started < patience || now - progress->last < between || total <= 0 || !isatty(STDERR_FILENO))
    return;
  char bar[BAR + 1] = "";
  int full = (int)((int64_t)BAR * (done < total ? done : total) / total);
  memset(bar, ' ', BAR);
  memset(bar, '=', (size_t)(full < 0 ? 0 : full));
  const double taken = now - progress->started;
  fprintf(stderr, "\r%s [%s] %d of %d, %.0f s", progress->title, bar, done, total, taken);
  if (done > 0 && done < total) /* as if the rest took as long an item */
    fprintf(stderr, ", about %.0f s left", ceil(taken * (total - done) / done));
  fputs("\033[K", stderr);
  fflush(stderr);
  progress->shown = true;
  progress->last = now;
}

void cli_progress_end(cli_progress *progress)
{
  if (!progress->shown)
    return;
  fputs("\r\033[K", stderr);
  fflush(stderr);
  progress->shown = false;
}
