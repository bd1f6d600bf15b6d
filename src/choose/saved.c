/*
 * saved.c: the file of saved.h. Processes that write at once take turns by a lock on the directory; each reads first
 * what the others wrote, so nothing is lost while the table has room. A line that does not parse ends the reading.
 */
#include "choose/saved.h"

#include "choose/measured.h"
#include "choose/tune.h"
#include "esmm_tools.h"
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC "esmm-measured 1"
#define MOST_BYTES (1L << 20)
#define PATH_BYTES 4128
#define LEAST_NEWS 16 /* times that are worth writing a file for */
#define MOST_FILES 64 /* read by one process */
#define LOCK_TRIES 40 /* every 5 ms: the lock's holder writes a megabyte at most, or is stopped */

static const char *kernel_name(int index)
{
  return esmm_registry_at(index)->name;
}

static int kernel_index(const char *name)
{
  for (int i = 0; i < esmm_registry_count(); i++)
    if (strcmp(kernel_name(i), name) == 0)
      return i;
  return -1;
}

/* ".../amd-epyc-avx512-2.tune" is the tuning cache's. False: there is none. */
static bool path_of(const esmm_ctx *ctx, char *path)
{
  const size_t length = strlen(ctx->tune_path), end = sizeof ".tune" - 1;
  if (length <= end)
    return false;
  (void)snprintf(path, PATH_BYTES, "%.*s.measured", (int)(length - end), ctx->tune_path);
  return true;
}

static uint32_t hash_of(const char *path)
{
  uint32_t hash = 2166136261u;
  for (; *path; path++)
    hash = (hash ^ (unsigned char)*path) * 16777619u;
  return hash ? hash : 1;
}

static _Atomic uint32_t read_homes[MOST_FILES];

void esmm_saved_forget(void)
{
  for (int i = 0; i < MOST_FILES; i++)
    read_homes[i] = 0;
}

/* Is this the first time that the process meets this file? */
static bool first_time(uint32_t home)
{
  for (int i = 0; i < MOST_FILES; i++) {
    uint32_t there = 0;
    if (atomic_compare_exchange_strong(&read_homes[i], &there, home))
      return true;
    if (there == home)
      return false;
  }
  return false;
}

void esmm_saved_read(FILE *f, uint32_t home)
{
  char line[1024], first[128];
  (void)snprintf(first, sizeof first, MAGIC " %s\n", esmm_source_id());
  if (fgets(line, sizeof line, f) && strcmp(line, first) == 0)
    while (fgets(line, sizeof line, f) && esmm_measured_parse(line, home, kernel_index)) {
    }
}

static void read_file(const char *path, uint32_t home)
{
  const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  struct stat about;
  const bool fits = fd >= 0 && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_size <= MOST_BYTES;
  FILE *f = fits ? fdopen(fd, "r") : NULL;
  if (f) {
    esmm_saved_read(f, home);
    (void)fclose(f);
  } else if (fd >= 0) {
    (void)close(fd);
  }
}

void esmm_saved_open(esmm_ctx *ctx)
{
  char path[PATH_BYTES];
  if (!ctx->learns || !path_of(ctx, path))
    return;
  ctx->home = hash_of(path);
  ctx->owner = getpid();
  if (first_time(ctx->home))
    read_file(path, ctx->home);
}

/* To a temporary file, which takes the place of the old one. */
static bool write_file(const char *path, uint32_t home, int *reason)
{
  char temporary[PATH_BYTES + 8];
  (void)snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
  const int fd = mkstemp(temporary);
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (!f) {
    *reason = errno;
    if (fd >= 0) {
      (void)close(fd);
      (void)unlink(temporary);
    }
    return false;
  }
  bool ok = fprintf(f, MAGIC " %s\n", esmm_source_id()) > 0 && esmm_measured_print(f, home, MOST_BYTES, kernel_name);
  ok = fflush(f) == 0 && ok;
  ok = fclose(f) == 0 && ok;
  ok = ok && rename(temporary, path) == 0;
  *reason = errno;
  if (!ok)
    (void)unlink(temporary);
  return ok;
}

static bool lock_directory(int directory)
{
  for (int i = 0; i < LOCK_TRIES; i++) {
    if (flock(directory, LOCK_EX | LOCK_NB) == 0)
      return true;
    if (errno != EWOULDBLOCK && errno != EINTR)
      return false;
    (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  }
  return false;
}

static esmm_status save(esmm_ctx *ctx, const char *path)
{
  char directory[PATH_BYTES];
  (void)snprintf(directory, sizeof directory, "%s", path);
  *strrchr(directory, '/') = '\0';
  if (esmm_tune_make_parents(path) != 0)
    return esmm_fail(ctx, ESMM_ERR_IO, "%.300s: %s; set XDG_CACHE_HOME to a directory that can be written", path,
                     strerror(errno));
  const int lock = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool locked = lock >= 0 && lock_directory(lock);
  int reason = errno;
  if (locked)
    read_file(path, ctx->home);
  const bool written = locked && write_file(path, ctx->home, &reason);
  if (locked)
    (void)flock(lock, LOCK_UN); /* a child that was forked meanwhile has it, too */
  if (lock >= 0)
    (void)close(lock);
  if (!written)
    return esmm_fail(ctx, ESMM_ERR_IO, "%.300s: %s", path, strerror(reason));
  esmm_measured_written(ctx->home);
  return ESMM_OK;
}

void esmm_saved_close(esmm_ctx *ctx)
{
  char path[PATH_BYTES];
  if (ctx->home && ctx->owner == getpid() && esmm_measured_news(ctx->home) >= LEAST_NEWS && path_of(ctx, path))
    (void)save(ctx, path);
}

esmm_status esmm_tune_save(esmm_ctx *ctx)
{
  char path[PATH_BYTES];
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!ctx->learns)
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "this context does not learn, so there is nothing to save");
  if (ctx->home && ctx->owner != getpid())
    return esmm_fail(ctx, ESMM_ERR_UNSUPPORTED, "a forked child does not write what was measured: its parent does");
  if (!ctx->home || !path_of(ctx, path))
    return esmm_fail(ctx, ESMM_ERR_IO,
                     "nowhere to keep what was measured: no_tuning_cache is set, or neither "
                     "XDG_CACHE_HOME nor HOME is");
  return esmm_measured_news(ctx->home) > 0 ? save(ctx, path) : ESMM_OK;
}
