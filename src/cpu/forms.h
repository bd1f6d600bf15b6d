/*
 * forms.h: the forms of B that a CPU keeps (form.h), each with its maker, its bytes, its reader in weights files.
 * Weights in files have these forms whatever the device.
 */
#ifndef ESMM_CPU_FORMS_H
#define ESMM_CPU_FORMS_H

#include "backend.h"
#include "format/weights_file.h"
#include "threads.h"

typedef struct esmm_host_form {
  esmm_form_kind kind;
  esmm_use not_for; /* a use of dense weights that does without it; ESMM_USE_ANY: none does */
  int64_t most_n;   /* kept where B has no more columns than this; 0: any number */
  bool extra;       /* made behind the others where that is worth it: esmm_forms_extra */

  /* What can be allocated before the contents are known. Sizes were checked for overflow. */
  esmm_status (*alloc)(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w);
  esmm_status (*fill)(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w); /* w's bitmaps are there */
  void (*free)(esmm_weights *w);
  void (*unpack)(const esmm_weights *w, esmm_matrix *out); /* out: [k,n], row-major, of w's dtype */
  size_t (*bytes)(const esmm_weights *w);                  /* all that it takes, */
  size_t (*held)(const esmm_weights *w);                   /* and without tables: what max_bytes_ratio limits */

  /* In files: the sections that hold it, by place (ESMM_FILE_...), NULL where it has none there. */
  const char *sections[ESMM_FILE_SECTIONS];
  void *(*section)(const esmm_weights *w, int place);
  /* Sizes of those sections from a header and the shape that w has of it; false on overflow. */
  bool (*section_sizes)(const esmm_file_header *h, const esmm_weights *w, size_t size[ESMM_FILE_SECTIONS]);
} esmm_host_form;

extern const esmm_host_form esmm_host_forms[];
extern const int esmm_host_form_count;

/* Is it kept of a B of this format and shape, prepared for this use? */
bool esmm_form_wanted(const esmm_host_form *form, esmm_format_kind format, esmm_use use, int64_t k, int64_t n);

unsigned esmm_forms_formats(void); /* that there are forms for */

/* Of all forms that w keeps. alloc sets w->forms. */
esmm_status esmm_forms_alloc(esmm_ctx *ctx, const esmm_prepare_opts *opts, esmm_weights *w);
esmm_status esmm_forms_fill(esmm_ctx *ctx, const esmm_matrix *b, esmm_weights *w);
/* The forms that only a library reads, within the limit of bytes (0: the default). b may be NULL: from another form.
   Where memory does not suffice, products do without. */
void esmm_forms_extra(const esmm_ctx *ctx, const esmm_matrix *b, double max_bytes_ratio, esmm_weights *w);
/* The forms that files do not hold, from one that they do. */
esmm_status esmm_forms_remake(esmm_ctx *ctx, esmm_weights *w);
void esmm_forms_free(esmm_weights *w);
size_t esmm_forms_bytes(const esmm_weights *w);
size_t esmm_forms_held(const esmm_weights *w);

/* Rows k..k+rows-1 of the columns j0..j0+cols-1 of b, `stride` bytes from one to the next. */
#define ESMM_READ_ROWS 16 /* read together, a column-major B gives a whole cache line of each column */
void esmm_read_rows(const esmm_matrix *b, int64_t k, int64_t rows, int64_t j0, int64_t cols, void *out, size_t stride);

/* Panels of B that make a piece of a loop (threads.h). */
static inline int64_t esmm_panels_at_once(const esmm_weights *w)
{
  return esmm_at_once(w->k, ESMM_PANEL * (int64_t)esmm_dtype_size(w->dtype));
}

#endif
