/*
 * corpus.h: tests that hold a reader to every file of tests/fuzz/corpus/KIND: what it must say of it. A file that no
 * case names fails the test, so that none is forgotten. Run from the root of the tree.
 */
#ifndef ESMM_TESTS_CORPUS_H
#define ESMM_TESTS_CORPUS_H

#include "npy.h"
#include "tensors.h"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct corpus_case {
  const char *file; /* without the ending */
  const char *says; /* part of the error; NULL: it can be read, and all of its tensors loaded */
} corpus_case;

static inline const char *corpus_path(const char *kind, const char *file)
{
  static char path[4][512];
  static int turn;
  turn = (turn + 1) % 4;
  snprintf(path[turn], sizeof path[turn], "tests/fuzz/corpus/%s/%s", kind, file);
  return path[turn];
}

/* Opens a file and loads its tensors, and fails with what went wrong; -1 where anything did. */
static inline int corpus_read(const char *path, char *error, size_t error_size)
{
  io_tensors *tensors;
  int result = io_tensors_open(path, 0, 0, &tensors, error, error_size);
  if (result != 0) {
    assert_null(tensors);
    return result;
  }
  for (size_t i = 0; i < tensors->count && result == 0; i++)
    result = io_tensor_load(tensors, i, error, error_size);
  io_tensors_close(tensors);
  return result;
}

static inline void corpus_check_case(const char *path, const corpus_case *wanted)
{
  char error[IO_ERROR_BYTES] = "";
  const int result = corpus_read(path, error, sizeof error);
  if (result != (wanted->says ? -1 : 0))
    fail_msg("%s: should %s, and gave '%s'", path, wanted->says ? "be refused" : "be read", error);
  if (wanted->says && (strncmp(error, path, strlen(path)) != 0 || !strstr(error, wanted->says)))
    fail_msg("%s: '%s' should start with the file and say '%s'", path, error, wanted->says);
  for (const char *c = error; *c; c++)
    if ((unsigned char)*c < 0x20)
      fail_msg("%s: the error has control characters", path);
}

static inline void corpus_check(const char *kind, const corpus_case *cases, size_t count)
{
  char dir[256];
  size_t seen = 0;
  snprintf(dir, sizeof dir, "tests/fuzz/corpus/%s", kind);
  DIR *files = opendir(dir);
  if (!files)
    fail_msg("%s is not there: run this from the root of the tree", dir);
  for (const struct dirent *entry; (entry = readdir(files)) != NULL;) {
    const char *dot = strrchr(entry->d_name, '.');
    const size_t stem = dot ? (size_t)(dot - entry->d_name) : 0;
    const corpus_case *found = NULL;
    if (entry->d_name[0] == '.' || (dot && strcmp(dot, ".pkl") == 0)) /* pickles are for the fuzz target */
      continue;
    for (size_t i = 0; i < count; i++)
      if (strlen(cases[i].file) == stem && strncmp(cases[i].file, entry->d_name, stem) == 0)
        found = &cases[i];
    if (!found)
      fail_msg("%s/%s: no case says what it must give", dir, entry->d_name);
    else
      corpus_check_case(corpus_path(kind, entry->d_name), found);
    seen++;
  }
  closedir(files);
  assert_int_equal(seen, count);
}

#endif
