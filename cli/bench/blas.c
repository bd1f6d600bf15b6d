/*
 * blas.c: OpenBLAS and BLIS by dlopen; oneDNN, which is no BLAS, is in onednn.c.
 *
 * The Fortran interface is used because every BLAS has it. It is column-major: a row-major product C = A B is the
 * column-major product C' = B' A' on the same memory. RTLD_LOCAL keeps the two libraries' equal names apart. They are
 * never closed: their worker threads live in their code until the process ends.
 */
#include "blas.h"

#include "cli.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* ISO C does not let a data pointer become a function pointer, POSIX does; copying the bytes pleases both. */
static bool find(void *handle, const char *name, void *function)
{
  void *symbol = dlsym(handle, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

static void *open_first(const char *variable, const char *const *files)
{
  const char *asked = getenv(variable);
  if (asked && asked[0]) {
    void *handle = dlopen(asked, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      cli_note("%s: %s", variable, dlerror());
    return handle;
  }
  void *handle = NULL;
  for (; *files && !handle; files++)
    handle = dlopen(*files, RTLD_NOW | RTLD_LOCAL);
  return handle;
}

static bool take(blas_library *library, const char *variable, bool threads)
{
  if (library->handle && find(library->handle, "sgemm_", &library->sgemm) &&
      find(library->handle, "sgemv_", &library->sgemv) && threads)
    return true;
  if (library->handle) {
    cli_note("%s: no usable BLAS in %s: left out", variable, library->title);
    dlclose(library->handle);
  }
  return false;
}

/* The first two words of a text. */
static int version_end(const char *text)
{
  size_t word = strcspn(text, " ");
  return (int)(text[word] ? word + 1 + strcspn(text + word + 1, " ") : word);
}

static bool open_openblas(blas_library *library, int threads)
{
  static const char *const files[] = {"libopenblas.so.0", "libopenblas.so", NULL};
  char *(*config)(void);
  *library = (blas_library){.name = "openblas", .title = "OpenBLAS", .handle = open_first("ESMM_OPENBLAS", files)};
  bool settable = library->handle && find(library->handle, "openblas_set_num_threads", &library->set_threads_int);
  if (!take(library, "ESMM_OPENBLAS", settable))
    return false;
  library->set_threads_int(threads);
  if (find(library->handle, "openblas_get_config", &config)) /* "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ..." */
    snprintf(library->title, sizeof library->title, "%.*s", version_end(config()), config());
  return true;
}

static bool open_blis(blas_library *library, int threads)
{
  static const char *const files[] = {"libblis.so.4", "libblis.so.5", "libblis.so.3", "libblis.so", NULL};
  const char *(*version)(void);
  *library = (blas_library){.name = "blis", .title = "BLIS", .handle = open_first("ESMM_BLIS", files)};
  bool settable = library->handle && find(library->handle, "bli_thread_set_num_threads", &library->set_threads_long);
  if (!take(library, "ESMM_BLIS", settable))
    return false;
  library->set_threads_long(threads);
  if (find(library->handle, "bli_info_get_version_str", &version))
    snprintf(library->title, sizeof library->title, "BLIS %.80s", version());
  return true;
}

static bool open_onednn(blas_library *library, int threads)
{
  *library = (blas_library){.name = "onednn"};
  library->onednn = onednn_open(threads, library->title, sizeof library->title);
  return library->onednn != NULL;
}

int blas_open(blas_library *libraries, int threads)
{
  int count = 0;
  count += open_openblas(&libraries[count], threads);
  count += open_blis(&libraries[count], threads);
  count += open_onednn(&libraries[count], threads);
  return count;
}

void blas_sgemm(const blas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b, float *c)
{
  const float one = 1, zero = 0;
  const int rows = (int)n, cols = (int)m, depth = (int)k;
  library->sgemm("N", "N", &rows, &cols, &depth, &one, b, &rows, a, &depth, &zero, c, &rows);
}

void blas_sgemv(const blas_library *library, int64_t m, int64_t k, int64_t n, const float *a, const float *b, float *c)
{
  const float one = 1, zero = 0;
  const int depth = (int)k, lines = (int)(m == 1 ? n : m), step = 1;
  if (m == 1)
    library->sgemv("N", &lines, &depth, &one, b, &lines, a, &step, &zero, c, &step);
  else
    library->sgemv("T", &depth, &lines, &one, a, &depth, b, &step, &zero, c, &step);
}
