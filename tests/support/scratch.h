/*
 * scratch.h: a directory for the files of one test program, made before its tests and removed after them.
 */
#ifndef ESMM_TESTS_SCRATCH_H
#define ESMM_TESTS_SCRATCH_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64];

/* A path in it, good for four more calls. */
static inline const char *in_dir(const char *name)
{
  static char path[4][512];
  static int turn;
  turn = (turn + 1) % 4;
  snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
  return path[turn];
}

static inline void put_file(const char *path, const void *bytes, size_t size)
{
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(bytes, 1, size, f), size);
  assert_int_equal(fclose(f), 0);
}

/* For cmocka, around all tests. */
static inline int make_dir(void **state)
{
  (void)state;
  const char *base = getenv("TMPDIR");
  snprintf(dir, sizeof dir, "%s/esmm-test-XXXXXX", base && strlen(base) < 40 ? base : "/tmp");
  return mkdtemp(dir) && chmod(dir, 0755) == 0 ? 0 : -1;
}

static inline int remove_dir(void **state)
{
  (void)state;
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", dir);
  return system(command);
}

#endif
