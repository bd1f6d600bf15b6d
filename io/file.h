/*
 * file.h: what the readers and writers of this directory share: reading a whole file, replacing one, error texts.
 */
#ifndef ESMM_IO_FILE_H
#define ESMM_IO_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define IO_MAGIC_BYTES 8 /* of a file's start, enough to recognise its kind */

/* Where an error text goes: carried as one thing, so that `return io_fail(e, ...)` reads well. */
typedef struct io_error {
  const char *name; /* the file, first in every text */
  char *text;
  size_t size;
} io_error;

/*
 * A name out of a file as a terminal may show it: control characters, which would move its cursor, become '?', and
 * invisible characters that reorder or hide others (bidirectional overrides, zero widths) become escapes, \u202e. Cut
 * to room bytes with the final 0; returns its length.
 */
size_t io_show(const char *text, char *out, size_t room);
bool io_is_unseen(uint32_t code); /* a character that is shown as an escape */

/* Writes "name: text", as io_show does, and returns -1. */
int io_fail(const io_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A file that is open for reading, with its first bytes already seen: a pipe cannot be asked twice. */
typedef struct io_source {
  int fd;
  bool sized;   /* a regular file, whose size is known */
  bool endless; /* a device: it may never end */
  size_t size;
  unsigned char head[IO_MAGIC_BYTES];
  size_t head_bytes; /* fewer than IO_MAGIC_BYTES only in a shorter file */
} io_source;

int io_source_open(io_source *source, const io_error *error);
/*
 * Reads a source that is not sized only as far as needed: until *data has `upto` bytes, or it ends. *data is NULL and
 * *size 0 at first; it is from io_alloc, for the caller to free, also after a failure.
 */
int io_source_more(io_source *source, unsigned char **data, size_t *size, size_t upto, const io_error *error);
/* Reads all of a sized one into *data, from io_alloc, for the caller to free. */
int io_source_read(io_source *source, unsigned char **data, size_t *size, const io_error *error);
void io_source_close(io_source *source);

void *io_alloc(size_t bytes); /* aligned to a cache line, never of size 0; free() it */

/* A file that will replace another when it is complete. Until then it has no name, if the file system can do that, so
   that a killed process leaves nothing behind. */
typedef struct io_sink {
  FILE *file;
  char *target;    /* path, with links followed where it exists */
  char *temporary; /* beside target; NULL: it has no name */
} io_sink;

int io_sink_open(io_sink *sink, const io_error *error);
int io_sink_commit(io_sink *sink, const io_error *error); /* flush, fsync, rename; on failure nothing is left over */
/*
 * Takes away the temporary files of all sinks that are open: for a signal handler, so it only calls unlink(2). One
 * thread at a time may open and close sinks.
 */
void io_sinks_unlink(void);

void io_sink_abort(io_sink *sink);

#endif
