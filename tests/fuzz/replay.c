/*
 * replay.c: a plain main for a fuzz target: gives it every file named on the command line, and every file of every
 * directory named there. A crash or a sanitizer's report ends the program; reaching the end is the test.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
  FILE *file = fopen(path, "rb");
  if (!file) {
    perror(path);
    return -1;
  }
  printf("# %s\n", path);
  fflush(stdout); /* so that a crash is known by its file */
  size_t size = 0, room = 1 << 16;
  uint8_t *data = malloc(room);
  while (data) {
    size_t got = fread(data + size, 1, room - size, file);
    size += got;
    if (got == 0)
      break;
    if (size == room) {
      uint8_t *more = realloc(data, room *= 2);
      if (!more)
        free(data);
      data = more;
    }
  }
  int failed = !data || ferror(file);
  fclose(file);
  if (!failed) {
    uint8_t *exact = malloc(size ? size : 1); /* its end is the block's end: a read past it shows under ASan */
    if (exact) {
      memcpy(exact, data, size);
      LLVMFuzzerTestOneInput(exact, size);
    } else {
      failed = 1;
    }
    free(exact);
  }
  free(data);
  return failed ? -1 : 1;
}

static int replay(const char *path)
{
  struct stat info;
  if (stat(path, &info) != 0) {
    perror(path);
    return -1;
  }
  if (!S_ISDIR(info.st_mode))
    return replay_file(path);
  DIR *dir = opendir(path);
  if (!dir) {
    perror(path);
    return -1;
  }
  int count = 0;
  for (const struct dirent *entry; count >= 0 && (entry = readdir(dir)) != NULL;) {
    if (entry->d_name[0] == '.')
      continue;
    char inner[4096];
    snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
    int done = replay(inner);
    count = done < 0 ? -1 : count + done;
  }
  closedir(dir);
  return count;
}

int main(int argc, char **argv)
{
  int total = 0;
  for (int i = 1; i < argc; i++) {
    int done = replay(argv[i]);
    if (done < 0)
      return 1;
    total += done;
  }
  printf("%s 1 - %d inputs replayed\n", total > 0 ? "ok" : "not ok", total);
  return total > 0 ? 0 : 1;
}
