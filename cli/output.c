/*
 * output.c: files that appear whole or not at all, and the JSON and CSV forms of values.
 *
 * A benchmark that is interrupted must not leave half a record where yesterday's whole one was, nor a temporary file
 * beside it: lines are kept in memory, and the file is replaced at the end.
 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Where a file is or would be created: by its directory and its last name. */
static bool find_place(const char *path, struct stat *directory, const char **name)
{
  const char *slash = strrchr(path, '/');
  char *parent = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
  const bool there = parent && stat(parent, directory) == 0;
  *name = slash ? slash + 1 : path;
  free(parent);
  return there;
}

static bool same_inode(const struct stat *x, const struct stat *y)
{
  return x->st_dev == y->st_dev && x->st_ino == y->st_ino;
}

bool cli_same_file(const char *x, const char *y)
{
  struct stat a, b;
  const char *x_name, *y_name;
  if (!x || !y)
    return false;
  if (strcmp(x, y) == 0 || (stat(x, &a) == 0 && stat(y, &b) == 0 && same_inode(&a, &b)))
    return true;
  return find_place(x, &a, &x_name) && find_place(y, &b, &y_name) && same_inode(&a, &b) && strcmp(x_name, y_name) == 0;
}

/* stdout, a device or a pipe: nothing is replaced there. */
static bool is_stream(const char *path)
{
  struct stat info;
  return strcmp(path, "-") == 0 || (stat(path, &info) == 0 && (S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode)));
}

int cli_output_spares(const char *what, const char *path, const char *other, const char *other_path)
{
  if (!path || !other_path || is_stream(path))
    return CLI_GO;
  bool same = cli_same_file(path, other_path);
  for (const char *at = strstr(other_path, "::"); at && !same; at = strstr(at + 1, "::")) {
    char *file = strndup(other_path, (size_t)(at - other_path)); /* of FILE::TENSOR */
    same = cli_same_file(path, file);
    free(file);
  }
  return same ? cli_usage("%s would replace %s, %s: give another name", what, other, path) : CLI_GO;
}

int cli_output_open(cli_output *output, const char *what, const char *path)
{
  *output = (cli_output){.path = path};
  if (strcmp(path, "-") == 0) {
    output->file = stdout;
    return CLI_GO;
  }
  if (is_stream(path)) {
    output->file = fopen(path, "w");
    return output->file ? CLI_GO : cli_failed("%s: %s: cannot be written: %s", what, path, strerror(errno));
  }
  char text[IO_ERROR_BYTES];
  io_error error = {path, text, sizeof text};
  io_sink trial; /* what cannot be written is said now, not when the work is done */
  if (io_sink_open(&trial, &error) != 0)
    return cli_failed("%s: %s", what, text);
  io_sink_abort(&trial);
  output->file = open_memstream(&output->text, &output->bytes);
  return output->file ? CLI_GO : cli_failed("%s: no memory", what);
}

static int replace_file(const cli_output *output, const char *what)
{
  char text[IO_ERROR_BYTES];
  io_error error = {output->path, text, sizeof text};
  io_sink sink;
  if (io_sink_open(&sink, &error) != 0)
    return cli_failed("%s: %s", what, text);
  (void)fwrite(output->text, 1, output->bytes, sink.file); /* the commit looks at the stream's error flag */
  return io_sink_commit(&sink, &error) == 0 ? CLI_GO : cli_failed("%s: %s", what, text);
}

int cli_output_close(cli_output *output, const char *what)
{
  if (!output->file)
    return CLI_GO;
  errno = 0;
  bool good = fflush(output->file) == 0 && !ferror(output->file);
  const char *reason = errno ? strerror(errno) : "a write failed";
  if (output->file != stdout && fclose(output->file) != 0)
    good = false;
  output->file = NULL;
  int status = !good          ? cli_failed("%s: %s: cannot be written: %s", what, output->path, reason)
               : output->text ? replace_file(output, what)
                              : CLI_GO;
  cli_output_discard(output);
  return status;
}

void cli_output_discard(cli_output *output)
{
  if (output->file && output->file != stdout)
    fclose(output->file);
  free(output->text);
  *output = (cli_output){0};
}

/* Invisible characters (io_show) are escaped like control characters. */
void cli_json_string(FILE *out, const char *text)
{
  fputc('"', out);
  for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
    const uint32_t three = c[0] >= 0xe0 && c[0] < 0xf0 && (c[1] & 0xc0) == 0x80 && (c[2] & 0xc0) == 0x80
                               ? (c[0] & 0xfu) << 12 | (c[1] & 0x3fu) << 6 | (c[2] & 0x3fu)
                               : 0;
    if (three && io_is_unseen(three)) {
      fprintf(out, "\\u%04x", three);
      c += 2;
    } else if (*c == '"' || *c == '\\')
      fprintf(out, "\\%c", *c);
    else if (*c < 0x20 || *c == 0x7f)
      fprintf(out, "\\u%04x", *c);
    else
      fputc(*c, out);
  }
  fputc('"', out);
}

void cli_json_number(FILE *out, double x)
{
  if (!isfinite(x))
    fputs("null", out);
  else
    fprintf(out, "%.9g", x);
}

void cli_csv_string(FILE *out, const char *text)
{
  if (!strpbrk(text, ",\"\r\n")) {
    fputs(text, out);
    return;
  }
  fputc('"', out);
  for (; *text; text++) {
    if (*text == '"')
      fputc('"', out);
    fputc(*text, out);
  }
  fputc('"', out);
}

void cli_json_fields(FILE *out, const cli_field *fields, int count)
{
  for (int i = 0; i < count; i++) {
    fputs(i ? "," : "", out);
    cli_json_string(out, fields[i].name);
    fputc(':', out);
    if (fields[i].literal && fields[i].text)
      fputs(fields[i].text, out);
    else if (fields[i].text)
      cli_json_string(out, fields[i].text);
    else
      cli_json_number(out, fields[i].number);
  }
}

void cli_csv_record(FILE *out, const cli_field *fields, int count, bool heads)
{
  for (int i = 0; i < count && heads; i++)
    fprintf(out, "%s%s", i ? "," : "", fields[i].name);
  if (heads)
    fputc('\n', out);
  for (int i = 0; i < count; i++) {
    fputs(i ? "," : "", out);
    if (fields[i].text)
      cli_csv_string(out, fields[i].text);
    else if (isfinite(fields[i].number))
      cli_json_number(out, fields[i].number);
  }
  fputc('\n', out);
  fflush(out);
}
