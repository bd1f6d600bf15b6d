/*
 * test_kernel_page.c: docs/kernels.md, the table of all kernels, is what the registry says. ESMM_GOLDEN_UPDATE=1, or
 * `make tables`, writes it anew. Nothing in it depends on the machine: every x86 build makes the same page.
 */
#include "cuda/cuda.h"
#include "form.h"
#include "harness.h"
#include "kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE "docs/kernels.md"

typedef struct text {
  char data[1 << 16];
  size_t length;
} text;

static void add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(text *t, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  const int bytes = vsnprintf(t->data + t->length, sizeof t->data - t->length, format, args);
  va_end(args);
  assert_true(bytes >= 0 && (size_t)bytes < sizeof t->data - t->length);
  t->length += (size_t)bytes;
}

static void add_needs(text *t, const esmm_kernel *kernel)
{
  const esmm_cuda_kernel *gpu = kernel->backend == &esmm_cpu_backend ? NULL : esmm_cuda_about(kernel);
  if (gpu)
    add(t, gpu->exact ? "sm_%da" : "sm_%d+", gpu->sm);
  else
    add(t, "%s",
        kernel->cpu & ESMM_CPU_AMX          ? "AMX"
        : kernel->cpu & ESMM_CPU_AVX512BF16 ? "AVX-512 BF16"
        : kernel->cpu & ESMM_CPU_AVX512     ? "AVX-512"
        : kernel->cpu & ESMM_CPU_AVX2       ? "AVX2"
                                            : "any CPU");
  if (kernel->missing)
    add(t, ", the library");
}

static void add_dtypes(text *t, const esmm_kernel *kernel)
{
  const char *between = "";
  for (int dtype = 0; kernel->dtypes >> dtype; dtype++)
    if (kernel->dtypes & ESMM_DTYPE_BIT(dtype)) {
      add(t, "%s%s", between, esmm_dtype_str((esmm_dtype)dtype));
      between = ", ";
    }
  if (kernel->dtypes == 0)
    add(t, "any");
}

static void add_forms(text *t, const esmm_kernel *kernel)
{
  const char *between = "";
  for (int form = 0; kernel->reads >> form; form++)
    if (kernel->reads & (1u << form)) {
      add(t, "%s%s", between, esmm_form_table[form].name);
      between = ", ";
    }
  if (kernel->reads == 0)
    add(t, "any");
}

static const char *doc_of(int at)
{
  const char *doc = esmm_registry_at(at)->doc;
  for (int dtype = ESMM_F32; dtype <= ESMM_F16; dtype++) {
    const char *name = esmm_dtype_str((esmm_dtype)dtype);
    const size_t length = strlen(name);
    if (strncmp(doc, name, length) == 0 && strncmp(doc + length, ": ", 2) == 0)
      return doc + length + 2;
  }
  return doc;
}

/* What it does, without the dtype in front, which has a column; kernels that do the same refer to the first of them. */
static void add_doc(text *t, int at)
{
  const char *doc = doc_of(at);
  for (int i = 0; i < at; i++)
    if (strcmp(doc_of(i), doc) == 0) {
      add(t, "as `%s`", esmm_registry_at(i)->name);
      return;
    }
  add(t, "%s", doc);
}

static void make_page(text *t)
{
  add(t, "# Kernels\n\n"
         "Made from the registry by `make tables`; do not edit. `esmm list` says which of these run on a machine,\n"
         "[adding-a-kernel.md](adding-a-kernel.md) how to write one, [numerics.md](numerics.md#skipping) which zeros "
         "each\n"
         "skips, and src/form.h what each form of B is. Kernels that need an sm run on a GPU, the others on a CPU.\n\n"
         "| kernel | needs | dtype of A and B | form of B | what it does |\n"
         "| --- | --- | --- | --- | --- |\n");
  for (int i = 0; i < esmm_registry_count(); i++) {
    const esmm_kernel *kernel = esmm_registry_at(i);
    add(t, "| `%s` | ", kernel->name);
    add_needs(t, kernel);
    add(t, " | ");
    add_dtypes(t, kernel);
    add(t, " | ");
    add_forms(t, kernel);
    add(t, " | ");
    add_doc(t, i);
    add(t, " |\n");
  }
}

static void page(void **state)
{
  (void)state;
#ifdef ESMM_PORTABLE
  skip(); /* such a build has fewer kernels */
#endif
  static text made, kept;
  make_page(&made);
  const bool update = getenv("ESMM_GOLDEN_UPDATE") != NULL;
  FILE *f = fopen(PAGE, update ? "w" : "r");
  if (!f)
    fail_msg("%s cannot be opened, from the root of the tree; `make tables` writes it", PAGE);
  if (update)
    assert_int_equal(fwrite(made.data, 1, made.length, f), made.length);
  else
    kept.length = fread(kept.data, 1, sizeof kept.data, f);
  assert_int_equal(fclose(f), 0);
  if (!update && (kept.length != made.length || memcmp(kept.data, made.data, made.length) != 0))
    fail_msg("%s is not what the registry says; `make tables` writes it anew", PAGE);
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(page)};
  return cmocka_run_group_tests_name("kernel page", tests, NULL, NULL);
}
