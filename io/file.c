/*
 * file.c: whole files in, whole files out.
 *
 * Reading goes through read(2) into memory and not through mmap: a file that is cut short meanwhile then gives an error
 * and not a signal, and pipes (`<(gunzip -c x.npy.gz)`) work too.
 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* One character of UTF-8 and its length in bytes; a byte that starts none is one by itself. */
static uint32_t decode(const unsigned char *at, size_t *bytes)
{
  const size_t more = at[0] >= 0xf0 ? 3 : at[0] >= 0xe0 ? 2 : at[0] >= 0xc0 ? 1 : 0;
  uint32_t code = more ? at[0] & (0x3fu >> more) : at[0];
  *bytes = 1;
  for (size_t i = 1; i <= more; i++) {
    if ((at[i] & 0xc0) != 0x80)
      return at[0];
    code = code << 6 | (at[i] & 0x3fu);
  }
  *bytes = more + 1;
  return code;
}

bool io_is_unseen(uint32_t code)
{
  return code == 0x61c || (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff;
}

size_t io_show(const char *text, char *out, size_t room)
{
  size_t used = 0, bytes;
  for (const unsigned char *at = (const unsigned char *)text; *at; at += bytes) {
    const uint32_t code = decode(at, &bytes);
    char part[8];
    size_t length = bytes;
    if (code < 0x20 || (code >= 0x7f && code < 0xa0 && (bytes > 1 || code == 0x7f))) {
      part[0] = '?';
      length = 1;
    } else if (bytes > 1 && io_is_unseen(code))
      length = (size_t)snprintf(part, sizeof part, "\\u%04x", code);
    else
      memcpy(part, at, bytes);
    if (used + length >= room)
      break;
    memcpy(out + used, part, length);
    used += length;
  }
  if (room > 0)
    out[used] = '\0';
  return used;
}

int io_fail(const io_error *error, const char *format, ...)
{
  if (!error->text || error->size == 0)
    return -1;
  char text[1024];
  const int used = snprintf(text, sizeof text, "%s: ", error->name);
  if (used >= 0 && (size_t)used < sizeof text) {
    va_list list;
    va_start(list, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, list);
    va_end(list);
  }
  (void)io_show(text, error->text, error->size);
  return -1;
}

void *io_alloc(size_t bytes)
{
  if (bytes > (size_t)PTRDIFF_MAX - 64)
    return NULL;
  return aligned_alloc(64, (bytes / 64 + 1) * 64);
}

/* Fills as much of data as the file still has: short only at its end. Returns false when the system refuses. */
static bool read_fully(int fd, unsigned char *data, size_t bytes, size_t *got)
{
  *got = 0;
  while (*got < bytes) {
    size_t step = bytes - *got < ((size_t)1 << 30) ? bytes - *got : (size_t)1 << 30;
    ssize_t n = read(fd, data + *got, step);
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return false;
    if (n == 0)
      break;
    *got += (size_t)n;
  }
  return true;
}

int io_source_open(io_source *source, const io_error *error)
{
  struct stat info;
  memset(source, 0, sizeof *source);
  source->fd = open(error->name, O_RDONLY | O_CLOEXEC);
  if (source->fd < 0)
    return io_fail(error, "cannot be opened: %s", strerror(errno));
  int failed = 0;
  if (fstat(source->fd, &info) != 0)
    failed = io_fail(error, "cannot be examined: %s", strerror(errno));
  else if (S_ISDIR(info.st_mode))
    failed = io_fail(error, "is a directory, not a matrix");
  else if (!read_fully(source->fd, source->head, sizeof source->head, &source->head_bytes))
    failed = io_fail(error, "cannot be read: %s", strerror(errno));
  if (failed) {
    io_source_close(source);
    return -1;
  }
  source->sized = S_ISREG(info.st_mode) && info.st_size > 0; /* files of /proc say 0 and are not empty */
  source->size = source->sized ? (size_t)info.st_size : 0;
  source->endless = S_ISCHR(info.st_mode);
  return 0;
}

void io_source_close(io_source *source)
{
  if (source->fd >= 0)
    close(source->fd);
  source->fd = -1;
}

static int read_sized(io_source *source, unsigned char **data, const io_error *error)
{
  size_t got = 0, extra = 0;
  unsigned char beyond;
  if (source->size < source->head_bytes)
    return io_fail(error, "changed while it was read");
  unsigned char *buffer = io_alloc(source->size);
  if (!buffer)
    return io_fail(error, "no memory for its %zu bytes", source->size);
  memcpy(buffer, source->head, source->head_bytes);
  size_t want = source->size - source->head_bytes;
  if (!read_fully(source->fd, buffer + source->head_bytes, want, &got) || !read_fully(source->fd, &beyond, 1, &extra)) {
    int reason = errno;
    free(buffer);
    return io_fail(error, "cannot be read: %s", strerror(reason));
  }
  if (got != want || extra != 0) {
    free(buffer);
    return io_fail(error, "changed while it was read");
  }
  *data = buffer;
  return 0;
}

/* Never allocates more than is there: the rest is only claimed. */
int io_source_more(io_source *source, unsigned char **data, size_t *size, size_t upto, const io_error *error)
{
  size_t got = 0;
  if (!*data) { /* the first bytes are at hand, however few are asked for */
    *data = io_alloc(sizeof source->head);
    if (!*data)
      return io_fail(error, "no memory for %zu bytes", sizeof source->head);
    memcpy(*data, source->head, source->head_bytes);
    *size = source->head_bytes;
  }
  for (size_t room = *size; *size < upto && *size == room;) {
    room = *size < (size_t)1 << 16 ? (size_t)1 << 16 : 2 * *size;
    room = room < upto ? room : upto;
    unsigned char *larger = io_alloc(room);
    if (!larger)
      return io_fail(error, "no memory for more than %zu bytes", *size);
    memcpy(larger, *data, *size);
    free(*data);
    *data = larger;
    if (!read_fully(source->fd, *data + *size, room - *size, &got))
      return io_fail(error, "cannot be read: %s", strerror(errno));
    *size += got;
  }
  return 0;
}

int io_source_read(io_source *source, unsigned char **data, size_t *size, const io_error *error)
{
  *size = source->size;
  return read_sized(source, data, error);
}

/* The name of the file that a write to path changes: replacing a link itself would leave the old file behind it. */
static int sink_target(const char *path, mode_t *mode, char **target, const io_error *error)
{
  struct stat info;
  if (path[0] == '\0')
    return io_fail(error, "is not a file name");
  *mode = 0;
  if (stat(path, &info) == 0) {
    if (!S_ISREG(info.st_mode)) /* renaming over a device or a pipe would destroy it */
      return io_fail(error, "exists and is not a regular file: choose another name");
    *mode = info.st_mode & 07777;
    *target = realpath(path, NULL);
  } else if (errno == ENOENT) {
    *target = strdup(path);
  } else {
    return io_fail(error, "cannot be written: %s", strerror(errno));
  }
  return *target ? 0 : io_fail(error, "cannot be written: %s", strerror(errno));
}

/* The names of temporary files that exist, for io_sinks_unlink; with more than these at once, some would stay. */
enum { SINKS = 8 };
static char *_Atomic temporaries[SINKS];

static void replace_temporary(char *old, char *new)
{
  for (int i = 0; i < SINKS; i++) {
    char *expected = old;
    if (atomic_compare_exchange_strong(&temporaries[i], &expected, new))
      return;
  }
}

void io_sinks_unlink(void)
{
  for (int i = 0; i < SINKS; i++) {
    const char *name = atomic_load(&temporaries[i]);
    if (name)
      (void)unlink(name);
  }
}

/* Its name is freed: the file is gone, or is a temporary one no more. */
static void forget_temporary(io_sink *sink)
{
  if (sink->temporary)
    replace_temporary(sink->temporary, NULL);
  free(sink->temporary);
  sink->temporary = NULL;
}

/* Where a file without a name is found, to give it one. */
static const char *nameless_path(int fd, char path[32])
{
  snprintf(path, 32, "/proc/self/fd/%d", fd);
  return path;
}

/* A file without a name in target's directory, which ends with the process however that ends; -1 where the system has
   none. */
static int open_nameless(const char *target)
{
  char *copy = strdup(target), path[32];
  int fd = copy ? open(dirname(copy), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666) : -1;
  free(copy);
  if (fd >= 0 && access(nameless_path(fd, path), F_OK) != 0) {
    close(fd);
    fd = -1;
  }
  return fd;
}

/* A name beside target for the nameless file, or, where that is -1, for a new one. Gives the file, or -1. */
static int make_temporary(io_sink *sink, int nameless)
{
  const size_t bytes = strlen(sink->target) + 48;
  int fd = -1;
  sink->temporary = malloc(bytes);
  /* Not mkstemp: its files are private, and the umask that would correct it cannot be asked without changing it. */
  for (int attempt = 0; sink->temporary && fd < 0 && attempt < 100; attempt++) {
    char path[32];
    snprintf(sink->temporary, bytes, "%s.tmp-%ld-%d", sink->target, (long)getpid(), attempt);
    if (nameless < 0)
      fd = open(sink->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    else if (linkat(AT_FDCWD, nameless_path(nameless, path), AT_FDCWD, sink->temporary, AT_SYMLINK_FOLLOW) == 0)
      fd = nameless;
    if (fd < 0 && errno != EEXIST)
      break;
  }
  if (fd >= 0) {
    replace_temporary(NULL, sink->temporary);
  } else {
    free(sink->temporary); /* it names no file of ours */
    sink->temporary = NULL;
  }
  return fd;
}

int io_sink_open(io_sink *sink, const io_error *error)
{
  mode_t mode = 0;
  memset(sink, 0, sizeof *sink);
  if (sink_target(error->name, &mode, &sink->target, error) != 0)
    return -1;
  int fd = open_nameless(sink->target);
  if (fd < 0)
    fd = make_temporary(sink, -1);
  int reason = errno;
  if (fd >= 0) {
    if (mode != 0)
      (void)fchmod(fd, mode); /* another user's file with odd modes is still written, with ours */
    sink->file = fdopen(fd, "wb");
    reason = errno;
    if (!sink->file)
      close(fd);
  }
  if (!sink->file) {
    io_sink_abort(sink);
    return io_fail(error, "cannot be written: %s%s", strerror(reason),
                   reason == ENOENT ? " (create its directory first)" : "");
  }
  return 0;
}

void io_sink_abort(io_sink *sink)
{
  if (sink->file)
    fclose(sink->file);
  if (sink->temporary)
    unlink(sink->temporary);
  forget_temporary(sink);
  free(sink->target);
  memset(sink, 0, sizeof *sink);
}

/* A rename survives a power cut only when the directory is on the disk too. Not every file system can: no error. */
static void sync_directory(const char *path)
{
  char *copy = strdup(path);
  int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd >= 0) {
    (void)fsync(fd);
    close(fd);
  }
  free(copy);
}

int io_sink_commit(io_sink *sink, const io_error *error)
{
  const int fd = fileno(sink->file);
  bool good = fflush(sink->file) == 0 && !ferror(sink->file) && fsync(fd) == 0 &&
              (sink->temporary || make_temporary(sink, fd) >= 0);
  int reason = errno;
  if (fclose(sink->file) != 0 && good) {
    good = false;
    reason = errno;
  }
  sink->file = NULL;
  if (good && rename(sink->temporary, sink->target) != 0) {
    good = false;
    reason = errno;
  }
  if (good) {
    sync_directory(sink->target);
    forget_temporary(sink); /* it has become the target */
  }
  io_sink_abort(sink);
  return good ? 0 : io_fail(error, "cannot be written: %s", strerror(reason));
}
