/*
 * weights_file.c: prepared weights to a file and back.
 *
 * A file may be cut short, damaged, of another version, or forged to make kernels read out of bounds; kernels trust
 * their weights. So the reader checks everything before use: sizes against the file's real size before it allocates,
 * bytes against their checksums, and then every index a kernel follows (before, panel_at) against the bitmaps. The
 * section table is recomputed from the shape and compared: one shape has one layout, so overlaps, gaps and wild offsets
 * need no further rules.
 *
 * Sections are read straight into the buffers that the weights keep; there is no second copy of a large file.
 */
#include "weights_file.h"
#include "bits.h"
#include "cpu/forms.h"

#include "checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CHUNK ((size_t)1 << 20) /* a checksum is taken while a chunk is still in the cache */
#define PATH_BYTES 4096         /* the system's limit for a path */
#define TEMP_BYTES 32           /* room for the temporary file's own name */

_Static_assert(CHUNK % ESMM_CHECKSUM_BLOCK == 0, "only the last part of a checksum may be ragged");

/* ---- errors: every text starts with the file's name ---- */

typedef struct file {
  esmm_ctx *ctx;
  const char *name;
  int fd;                     /* -1: bytes */
  const unsigned char *bytes; /* NULL: fd */
  uint64_t size;
} file;

static esmm_status fail_file(const file *f, esmm_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static esmm_status fail_file(const file *f, esmm_status status, const char *format, ...)
{
  char text[ESMM_ERROR_BYTES / 2];
  va_list args;
  va_start(args, format);
  (void)vsnprintf(text, sizeof text, format, args);
  va_end(args);
  const size_t length = strlen(f->name), shown = 200; /* of a long path its end says more, and the reason must fit */
  return length > shown ? esmm_fail(f->ctx, status, "'...%s': %s", f->name + (length - shown), text)
                        : esmm_fail(f->ctx, status, "'%s': %s", f->name, text);
}

/* ---- layout ---- */

static bool keeps(const esmm_file_header *h, const esmm_host_form *form)
{
  return esmm_form_wanted(form, (esmm_format_kind)h->format, (esmm_use)h->use, h->k, h->n);
}

static bool keeps_kind(const esmm_file_header *h, esmm_form_kind kind)
{
  for (int i = 0; i < esmm_host_form_count; i++)
    if (esmm_host_forms[i].kind == kind)
      return keeps(h, &esmm_host_forms[i]);
  return false;
}

static bool keeps_rows(const esmm_file_header *h)
{
  return keeps_kind(h, ESMM_FORM_ROWS);
}

static bool keeps_panels(const esmm_file_header *h)
{
  return keeps_kind(h, ESMM_FORM_PANELS);
}

/* The form that a section holds in weights of this format; NULL: the bitmaps, or a section that it does not have. */
static const esmm_host_form *form_of(uint32_t format, int section)
{
  for (int i = 0; i < esmm_host_form_count; i++)
    if (esmm_form_table[esmm_host_forms[i].kind].format == (esmm_format_kind)format &&
        esmm_host_forms[i].sections[section])
      return &esmm_host_forms[i];
  return NULL;
}

static const char *section_name(uint32_t format, int section)
{
  static const char *const numbers[ESMM_FILE_SECTIONS] = {"bits", "2", "3", "4", "5"};
  const esmm_host_form *form = form_of(format, section);
  return form ? form->sections[section] : numbers[section];
}

/* The options for preparing the weights. */
static esmm_prepare_opts opts_of(const esmm_file_header *h)
{
  return (esmm_prepare_opts){.size = sizeof(esmm_prepare_opts),
                             .use = (esmm_use)h->use,
                             .format = {.kind = (esmm_format_kind)h->format,
                                        .block_rows = (int)h->block_rows,
                                        .block_cols = (int)h->block_cols,
                                        .keep = (int)h->n_of,
                                        .group = (int)h->m_of,
                                        .group_cols = (int)h->nm_cols}};
}

/* Sizes of the forms' sections; false on overflow. */
static bool lay_out_forms(const esmm_file_header *h, size_t size[ESMM_FILE_SECTIONS])
{
  const esmm_prepare_opts opts = opts_of(h);
  esmm_weights w = {.k = h->k, .n = h->n, .dtype = (esmm_dtype)h->dtype, .format = opts.format.kind};
  bool fits = true;
  if (w.format != ESMM_FORMAT_DENSE) { /* its counts are products of sides: they must fit before they are made */
    size_t most;
    if (!esmm_size_mul((size_t)h->k + 256, (size_t)h->n + 256, &most) || most > SIZE_MAX / 64)
      return false;
    esmm_form_shape(&opts.format, &w);
  }
  w.bsr.blocks = h->blocks;
  for (int i = 0; fits && i < esmm_host_form_count; i++)
    if (keeps(h, &esmm_host_forms[i]))
      fits = esmm_host_forms[i].section_sizes(h, &w, size);
  return fits;
}

/* Sets the offset and size of every section, and file_bytes, from the header's other fields; false on overflow. */
static bool lay_out(esmm_file_header *h)
{
  size_t size[ESMM_FILE_SECTIONS] = {0};
  bool fits = esmm_size_mul((size_t)h->panels, (size_t)h->words, &size[ESMM_FILE_BITS]) &&
              esmm_size_mul(size[ESMM_FILE_BITS], sizeof(uint64_t), &size[ESMM_FILE_BITS]) && lay_out_forms(h, size);
  size_t end = sizeof *h;
  for (int i = 0; fits && i < ESMM_FILE_SECTIONS; i++) {
    h->section[i].offset = 0;
    h->section[i].bytes = size[i];
    if (size[i] == 0)
      continue;
    fits = esmm_size_add(end, (size_t)-end % ESMM_FILE_ALIGN, &end);
    h->section[i].offset = end;
    fits = fits && esmm_size_add(end, size[i], &end);
  }
  h->file_bytes = end;
  return fits;
}

static uint64_t header_checksum(const esmm_file_header *h)
{
  return esmm_checksum_of(h, offsetof(esmm_file_header, checksum));
}

static void *section_data(const esmm_weights *w, int section)
{
  const esmm_host_form *form = form_of((uint32_t)w->format, section);
  return section == ESMM_FILE_BITS ? (void *)w->bits : form ? form->section(w, section) : NULL;
}

/* ---- reading ---- */

static esmm_status read_at(const file *f, uint64_t offset, void *data, size_t bytes)
{
  if (f->bytes) {
    if (bytes > 0)
      memcpy(data, f->bytes + offset, bytes);
    return ESMM_OK;
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = pread(f->fd, (char *)data + done, bytes - done, (off_t)(offset + done));
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0)
      return fail_file(f, ESMM_ERR_IO, "cannot read: %s", strerror(errno));
    if (got == 0) /* it was longer when it was opened */
      return fail_file(f, ESMM_ERR_TRUNCATED, "ends at byte %llu while it is read",
                       (unsigned long long)(offset + done));
    done += (size_t)got;
  }
  return ESMM_OK;
}

static esmm_status read_header(const file *f, esmm_file_header *h)
{
  const size_t there = f->size < sizeof *h ? (size_t)f->size : sizeof *h;
  memset(h, 0, sizeof *h);
  const esmm_status status = read_at(f, 0, h, there);
  if (status != ESMM_OK)
    return status;
  if (there == 0)
    return fail_file(f, ESMM_ERR_TRUNCATED, "is empty");
  if (memcmp(h->magic, ESMM_FILE_MAGIC, there < sizeof h->magic ? there : sizeof h->magic) != 0)
    return fail_file(f, ESMM_ERR_FORMAT, "is not a weights file");
  if (there < sizeof *h)
    return fail_file(f, ESMM_ERR_TRUNCATED, "ends in its header, after %zu of %zu bytes", there, sizeof *h);
  if (h->endian == ESMM_FILE_ENDIAN_OTHER)
    return fail_file(f, ESMM_ERR_VERSION, "was written on a machine of the other byte order");
  if (h->endian != ESMM_FILE_ENDIAN)
    return fail_file(f, ESMM_ERR_FORMAT, "byte-order mark is 0x%08x, which no machine writes", h->endian);
  if (h->version > ESMM_FILE_VERSION)
    return fail_file(f, ESMM_ERR_VERSION, "is of version %u; this library reads up to %u", h->version,
                     ESMM_FILE_VERSION);
  if (h->version == 0 || h->header_bytes != sizeof *h)
    return fail_file(f, ESMM_ERR_FORMAT, "version %u with a header of %llu bytes does not exist", h->version,
                     (unsigned long long)h->header_bytes);
  if (h->checksum != header_checksum(h))
    return fail_file(f, ESMM_ERR_CHECKSUM, "its header was changed (checksum is %016llx, should be %016llx)",
                     (unsigned long long)header_checksum(h), (unsigned long long)h->checksum);
  return ESMM_OK;
}

static esmm_status fail_field(const file *f, const char *field, int64_t value, int64_t should)
{
  return fail_file(f, ESMM_ERR_FORMAT, "%s is %lld, should be %lld", field, (long long)value, (long long)should);
}

/* The fields that version 1 has not: all 0 there, and those of the other format 0. */
static esmm_status check_format(const file *f, const esmm_file_header *h)
{
  const bool bsr = h->format == ESMM_FORMAT_BSR, nm = h->format == ESMM_FORMAT_NM;
  const bool no_bsr = h->block_rows == 0 && h->block_cols == 0 && h->blocks == 0;
  const bool no_nm = h->n_of == 0 && h->m_of == 0 && h->nm_cols == 0;
  if (h->version == 1)
    return h->format == 0 && no_bsr && no_nm ? ESMM_OK
                                             : fail_file(f, ESMM_ERR_FORMAT, "reserved fields of its header are not 0");
  if (!bsr && !nm)
    return fail_file(f, ESMM_ERR_FORMAT, "format %u does not exist in version %u", h->format, h->version);
  if (h->strict)
    return fail_file(f, ESMM_ERR_FORMAT, "strict is 1, and %s weights keep no zeros",
                     esmm_format_str((esmm_format_kind)h->format));
  if (bsr && (h->block_rows < 1 || h->block_rows > ESMM_MAX_BLOCK || h->block_cols < 1 ||
              h->block_cols > ESMM_MAX_BLOCK || h->blocks < 0 || h->blocks > INT32_MAX || !no_nm))
    return fail_file(f, ESMM_ERR_FORMAT, "%lld blocks of %u x %u do not exist", (long long)h->blocks, h->block_rows,
                     h->block_cols);
  if (nm && (h->n_of < 1 || h->n_of > h->m_of || h->m_of > ESMM_MAX_GROUP || h->nm_cols < 1 || h->nm_cols > INT32_MAX ||
             !no_bsr))
    return fail_file(f, ESMM_ERR_FORMAT, "%u:%u with %u columns does not exist", h->n_of, h->m_of, h->nm_cols);
  return ESMM_OK;
}

/* The fields among themselves, and the table against them and the file's size: after this every size can be used. */
static esmm_status check_header(const file *f, const esmm_file_header *h)
{
  const int64_t most = INT64_MAX - ESMM_FILE_ALIGN; /* rounding up must not overflow */
  if (h->k < 0 || h->k > most || h->n < 0 || h->n > most)
    return fail_file(f, ESMM_ERR_FORMAT, "shape is %lld x %lld", (long long)h->k, (long long)h->n);
  if (esmm_dtype_size((esmm_dtype)h->dtype) == 0)
    return fail_file(f, ESMM_ERR_FORMAT, "dtype %u does not exist", h->dtype);
  if (h->use > ESMM_USE_LARGE_M)
    return fail_file(f, ESMM_ERR_FORMAT, "use %u does not exist", h->use);
  if (h->strict > 1)
    return fail_file(f, ESMM_ERR_FORMAT, "strict is %u, neither 0 nor 1", h->strict);
  if (h->panel_cols != ESMM_PANEL)
    return fail_field(f, "panel_cols", h->panel_cols, ESMM_PANEL);
  if (h->half_cols != ESMM_HALF_COLS)
    return fail_field(f, "half_cols", h->half_cols, ESMM_HALF_COLS);
  if (h->panels != esmm_ceil_div(h->n, ESMM_PANEL))
    return fail_field(f, "panels", h->panels, esmm_ceil_div(h->n, ESMM_PANEL));
  if (h->words != esmm_ceil_div(h->k, 64))
    return fail_field(f, "words", h->words, esmm_ceil_div(h->k, 64));
  const esmm_status format = check_format(f, h);
  if (format != ESMM_OK)
    return format;
  const int64_t rows_ld = keeps_rows(h) ? esmm_rows_ld(h->n, (esmm_dtype)h->dtype) : 0;
  if (h->rows_ld != rows_ld)
    return fail_field(f, "rows_ld", h->rows_ld, rows_ld);
  if (h->section_count != ESMM_FILE_SECTIONS)
    return fail_field(f, "section_count", h->section_count, ESMM_FILE_SECTIONS);
  uint64_t reserved = h->zero;
  for (size_t i = 0; i < sizeof h->reserved / sizeof h->reserved[0]; i++)
    reserved |= h->reserved[i];
  if (reserved != 0)
    return fail_file(f, ESMM_ERR_FORMAT, "reserved fields of its header are not 0");

  esmm_file_header want = *h;
  if (!lay_out(&want))
    return fail_file(f, ESMM_ERR_FORMAT, "%lld x %lld weights do not fit in memory's address range", (long long)h->k,
                     (long long)h->n);
  for (int i = 0; i < ESMM_FILE_SECTIONS; i++)
    if (h->section[i].offset != want.section[i].offset || h->section[i].bytes != want.section[i].bytes)
      return fail_file(f, ESMM_ERR_FORMAT, "section %s is %llu bytes at %llu, should be %llu at %llu",
                       section_name(h->format, i), (unsigned long long)h->section[i].bytes,
                       (unsigned long long)h->section[i].offset, (unsigned long long)want.section[i].bytes,
                       (unsigned long long)want.section[i].offset);
  if (h->file_bytes != want.file_bytes)
    return fail_field(f, "file_bytes", (int64_t)h->file_bytes, (int64_t)want.file_bytes);
  if (f->size < h->file_bytes)
    return fail_file(f, ESMM_ERR_TRUNCATED, "has %llu of %llu bytes", (unsigned long long)f->size,
                     (unsigned long long)h->file_bytes);
  if (f->size > h->file_bytes)
    return fail_file(f, ESMM_ERR_FORMAT, "goes on after its end: %llu bytes, should be %llu",
                     (unsigned long long)f->size, (unsigned long long)h->file_bytes);
  return ESMM_OK;
}

/* Reads one section, and the padding between `end` and it, where no byte may hide either. */
static esmm_status read_section(const file *f, const esmm_file_header *h, int section, uint64_t end, void *data)
{
  const esmm_file_section *s = &h->section[section];
  unsigned char padding[ESMM_FILE_ALIGN] = {0}, any = 0;
  if (s->bytes > 0) {
    const esmm_status status = read_at(f, end, padding, (size_t)(s->offset - end));
    if (status != ESMM_OK)
      return status;
  }
  for (size_t i = 0; i < sizeof padding; i++)
    any |= padding[i];
  if (any)
    return fail_file(f, ESMM_ERR_CHECKSUM, "the padding before section %s was changed",
                     section_name(h->format, section));

  esmm_checksum sum;
  esmm_checksum_begin(&sum);
  for (uint64_t done = 0; done < s->bytes;) {
    const size_t part = s->bytes - done < CHUNK ? (size_t)(s->bytes - done) : CHUNK;
    unsigned char *to = (unsigned char *)data + done;
    const esmm_status status = read_at(f, s->offset + done, to, part);
    if (status != ESMM_OK)
      return status;
    esmm_checksum_add(&sum, to, part);
    done += part;
  }
  if (s->checksum != esmm_checksum_end(&sum))
    return fail_file(f, ESMM_ERR_CHECKSUM, "section %s was changed (checksum is %016llx, should be %016llx)",
                     section_name(h->format, section), (unsigned long long)esmm_checksum_end(&sum),
                     (unsigned long long)s->checksum);
  return ESMM_OK;
}

/* ---- what the sections say ---- */

/* Every index that a kernel follows must be what the bitmaps say. */
static esmm_status check_panels(const file *f, const esmm_file_header *h, const esmm_weights *w)
{
  const uint64_t unused = w->k % 64 ? ~(uint64_t)0 << (w->k % 64) : 0;
  /* With neither bits nor panels nothing in the file bounds how many there are. */
  const int64_t panels = w->words > 0 || keeps_panels(h) ? w->panels : 0;
  uint64_t at = 0;
  int64_t set = 0;
  for (int64_t p = 0; p < panels; p++) {
    const uint64_t *bits = w->bits + p * w->words;
    const uint32_t *before = keeps_panels(h) ? w->before + p * (w->words + 1) : NULL;
    int64_t kept = 0;
    for (int64_t i = 0; i < w->words; i++) {
      if (before && before[i] != kept)
        return fail_file(f, ESMM_ERR_FORMAT, "before[%lld][%lld] is %u, should be %lld", (long long)p, (long long)i,
                         before[i], (long long)kept);
      kept += __builtin_popcountll(bits[i]);
    }
    if (w->words > 0 && (bits[w->words - 1] & unused) != 0)
      return fail_file(f, ESMM_ERR_FORMAT, "bitmap %lld has bits beyond k = %lld", (long long)p, (long long)w->k);
    if (before && before[w->words] != kept)
      return fail_file(f, ESMM_ERR_FORMAT, "before[%lld][%lld] is %u, should be %lld", (long long)p,
                       (long long)w->words, before[w->words], (long long)kept);
    if (before && w->panel_at[p] != at)
      return fail_file(f, ESMM_ERR_FORMAT, "panel_at[%lld] is %llu, should be %llu", (long long)p,
                       (unsigned long long)w->panel_at[p], (unsigned long long)at);
    at += ESMM_PANEL * (uint64_t)kept;
    set += kept;
  }
  if (keeps_panels(h) && (w->panel_at[w->panels] != at || w->panel_bytes != at * esmm_dtype_size(w->dtype)))
    return fail_file(f, ESMM_ERR_FORMAT, "panels hold %zu bytes up to element %llu, should end at %llu", w->panel_bytes,
                     (unsigned long long)w->panel_at[w->panels], (unsigned long long)at);
  const bool full = set == w->panels * w->k;
  if (h->full != full)
    return fail_field(f, "full", h->full, full);
  if (h->strict && !full)
    return fail_file(f, ESMM_ERR_FORMAT, "strict weights keep every k, its bitmaps do not");
  return ESMM_OK;
}

static esmm_status check_density(const file *f, const char *name, double density, double should)
{
  if (!(fabs(density - should) <= 1e-6)) /* the last bits may differ; a NaN differs from everything */
    return fail_file(f, ESMM_ERR_FORMAT, "%s is %.9g, that of its elements is %.9g", name, density, should);
  return ESMM_OK;
}

/* What row k holds in panel p's columns, in one form or both. */
typedef struct strip {
  bool bit, agree;
  int64_t nonzero;
} strip;

static strip look_at_strip(const esmm_weights *w, int64_t k, int64_t p)
{
  const size_t element = esmm_dtype_size(w->dtype), half_bytes = ESMM_HALF_COLS * element;
  const int64_t col = p * ESMM_PANEL;
  const uint64_t word = w->bits[p * w->words + k / 64], bit = (uint64_t)1 << (k % 64);
  const char *row = NULL;
  strip s = {.bit = (word & bit) != 0, .agree = true};
  if (w->rows) {
    row = (const char *)w->rows + (size_t)(k * w->rows_ld + col) * element;
    s.nonzero = esmm_count_nonzero(row, w->dtype, esmm_min(ESMM_PANEL, w->rows_ld - col));
  }
  if (w->panel_data && s.bit) {
    const uint32_t *before = w->before + p * (w->words + 1);
    const size_t at = before[k / 64] + (size_t)__builtin_popcountll(word & (bit - 1)), kept = before[w->words];
    const char *first = (const char *)w->panel_data + w->panel_at[p] * element + at * half_bytes;
    const char *second = first + kept * half_bytes;
    const int64_t nonzero =
        esmm_count_nonzero(first, w->dtype, ESMM_HALF_COLS) + esmm_count_nonzero(second, w->dtype, ESMM_HALF_COLS);
    if (row) { /* equal counts: past n each form has zeros alone */
      const size_t cols = (size_t)esmm_min(ESMM_PANEL, w->n - col),
                   in_first = cols < ESMM_HALF_COLS ? cols : ESMM_HALF_COLS;
      s.agree = nonzero == s.nonzero && memcmp(row, first, in_first * element) == 0 &&
                memcmp(row + in_first * element, second, (cols - in_first) * element) == 0;
    }
    s.nonzero = nonzero;
  }
  return s;
}

/* Bitmaps, rows and panels must be of one matrix, or kernels that read different ones would give different products. */
static esmm_status check_elements(const file *f, const esmm_weights *w)
{
  int64_t nonzero = 0, alive = 0;
  for (int64_t k = 0; k < w->k; k++)
    for (int64_t p = 0; p < w->panels; p++) {
      const strip s = look_at_strip(w, k, p);
      if (!s.agree || (!w->strict && s.bit != (s.nonzero > 0)))
        return fail_file(f, ESMM_ERR_FORMAT, "row %lld, columns from %lld: its forms disagree", (long long)k,
                         (long long)(p * ESMM_PANEL));
      nonzero += s.nonzero;
      alive += s.nonzero > 0;
    }
  const double elements = (double)w->k * (double)w->n, strips = (double)w->k * (double)w->panels;
  const esmm_status status =
      check_density(f, "element_density", w->element_density, elements > 0 ? (double)nonzero / elements : 0.0);
  return status == ESMM_OK
             ? check_density(f, "strip_density", w->strip_density, strips > 0 ? (double)alive / strips : 0.0)
             : status;
}

/* Of another format: the form by its own rules, then its zeros of B against the file's numbers. */
static esmm_status check_form(const file *f, const esmm_file_header *h, esmm_weights *w)
{
  char why[160];
  if (!esmm_form_valid(w, why, sizeof why))
    return fail_file(f, ESMM_ERR_FORMAT, "%s", why);
  esmm_form_scan(f->ctx, w);
  if (esmm_checksum_of(w->bits, (size_t)h->section[ESMM_FILE_BITS].bytes) != h->section[ESMM_FILE_BITS].checksum)
    return fail_file(f, ESMM_ERR_FORMAT, "its bitmaps are not those of its values");
  if (h->full != w->full)
    return fail_field(f, "full", h->full, w->full);
  const esmm_status status = check_density(f, "element_density", h->element_density, w->element_density);
  return status == ESMM_OK ? check_density(f, "strip_density", h->strip_density, w->strip_density) : status;
}

static esmm_status read_sections(const file *f, const esmm_file_header *h, esmm_weights *w)
{
  uint64_t end = sizeof *h;
  for (int i = 0; i < ESMM_FILE_SECTIONS; i++) {
    const esmm_status status = read_section(f, h, i, end, section_data(w, i));
    if (status != ESMM_OK)
      return status;
    if (h->section[i].bytes > 0)
      end = h->section[i].offset + h->section[i].bytes;
  }
  if (w->format != ESMM_FORMAT_DENSE)
    return check_form(f, h, w);
  const esmm_status status = check_panels(f, h, w);
  return status == ESMM_OK ? check_elements(f, w) : status;
}

/* Buffers whose size only the header gives: a dense B's panels, the blocks of a BSR. */
static esmm_status alloc_contents(esmm_ctx *ctx, const esmm_file_header *h, esmm_weights *w)
{
  if (h->format == ESMM_FORMAT_BSR)
    return esmm_bsr_alloc_blocks(ctx, h->blocks, w);
  if (!keeps_panels(h))
    return ESMM_OK;
  w->panel_bytes = (size_t)h->section[ESMM_FILE_PANELS].bytes;
  w->panel_data = esmm_mem_alloc(&w->allocator, w->panel_bytes);
  return w->panel_data ? ESMM_OK : ESMM_ERR_MEMORY;
}

static esmm_status read_weights(const file *f, esmm_weights **weights)
{
  esmm_file_header h;
  esmm_status status = read_header(f, &h);
  if (status == ESMM_OK)
    status = check_header(f, &h);
  if (status != ESMM_OK)
    return status;

  esmm_weights *w = NULL;
  const esmm_matrix shape = {.rows = h.k, .cols = h.n, .dtype = (esmm_dtype)h.dtype};
  const esmm_prepare_opts opts = opts_of(&h);
  status = esmm_weights_alloc(f->ctx, &shape, &opts, &w);
  if (status == ESMM_OK)
    status = alloc_contents(f->ctx, &h, w);
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status == ESMM_ERR_MEMORY
               ? fail_file(f, status, "no memory for %lld x %lld weights", (long long)h.k, (long long)h.n)
               : fail_file(f, ESMM_ERR_FORMAT, "%lld x %lld weights are more than this library holds", (long long)h.k,
                           (long long)h.n);
  }
  w->strict = h.strict != 0;
  w->full = h.full != 0;
  w->element_density = h.element_density;
  w->strip_density = h.strip_density;
  if (w->rows_bytes != h.section[ESMM_FILE_ROWS].bytes)
    status = fail_field(f, "rows_ld", h.rows_ld, w->rows_ld);
  if (status == ESMM_OK)
    status = read_sections(f, &h, w);
  if (status == ESMM_OK && esmm_forms_remake(f->ctx, w) != ESMM_OK)
    status = fail_file(f, ESMM_ERR_MEMORY, "no memory for %lld x %lld weights", (long long)h.k, (long long)h.n);
  if (status != ESMM_OK) {
    esmm_weights_free(w);
    return status;
  }
  esmm_weights_set_alive(w);
  esmm_weights_count_bytes(w);
  *weights = w;
  return ESMM_OK;
}

esmm_status esmm_weights_parse(esmm_ctx *ctx, const char *name, const unsigned char *bytes, size_t size,
                               esmm_weights **weights)
{
  const file f = {.ctx = ctx, .name = name, .fd = -1, .bytes = bytes ? bytes : (const unsigned char *)"", .size = size};
  return read_weights(&f, weights);
}

/* Files hold the CPU's forms of B; another device prepares its own from them. */
static esmm_status move_to_device(esmm_ctx *ctx, esmm_weights **weights)
{
  esmm_weights *host = *weights;
  *weights = NULL;
  esmm_status status = esmm_format_supported(ctx, host->format);
  if (status == ESMM_OK)
    status = ctx->backend->weights_from_host(ctx, host, weights);
  esmm_weights_free(host);
  return status;
}

esmm_status esmm_weights_load(esmm_ctx *ctx, const char *path, esmm_weights **weights)
{
  esmm_status status = esmm_begin_handle(ctx, "weights", weights);
  if (status != ESMM_OK)
    return status;
  if (!path || !*path)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "path is %s", path ? "empty" : "NULL");
  file f = {.ctx = ctx, .name = path, .fd = -1};
  do /* O_NONBLOCK: opening a pipe without a writer must not wait for ever; regular files ignore it */
    f.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  while (f.fd < 0 && errno == EINTR);
  if (f.fd < 0)
    return fail_file(&f, ESMM_ERR_IO, "cannot open: %s", strerror(errno));
  struct stat st;
  if (fstat(f.fd, &st) != 0)
    status = fail_file(&f, ESMM_ERR_IO, "cannot look at: %s", strerror(errno));
  else if (!S_ISREG(st.st_mode))
    status = fail_file(&f, ESMM_ERR_IO, S_ISDIR(st.st_mode) ? "is a directory" : "is not a regular file");
  if (status == ESMM_OK) {
    f.size = (uint64_t)st.st_size;
    status = read_weights(&f, weights);
  }
  (void)close(f.fd);
  return status == ESMM_OK && ctx->backend->weights_from_host ? move_to_device(ctx, weights) : status;
}

/* ---- writing ---- */

static esmm_status write_at(const file *f, uint64_t offset, const void *data, size_t bytes)
{
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = pwrite(f->fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
    if (put < 0 && errno == EINTR)
      continue;
    if (put <= 0)
      return fail_file(f, ESMM_ERR_IO, "cannot write: %s", strerror(put < 0 ? errno : ENOSPC));
    done += (size_t)put;
  }
  return ESMM_OK;
}

/* Sections first, the header with their checksums last; what lies between sections is a hole and reads as zeros. */
static esmm_status write_weights(const file *f, const esmm_weights *w)
{
  esmm_file_header h = {
      .endian = ESMM_FILE_ENDIAN,
      .version = w->format == ESMM_FORMAT_DENSE ? 1 : ESMM_FILE_VERSION,
      .header_bytes = sizeof h,
      .k = w->k,
      .n = w->n,
      .dtype = (uint32_t)w->dtype,
      .use = (uint32_t)w->use,
      .strict = w->strict,
      .full = w->full,
      .panels = w->panels,
      .words = w->words,
      .rows_ld = w->rows_ld,
      .element_density = w->element_density,
      .strip_density = w->strip_density,
      .panel_cols = ESMM_PANEL,
      .half_cols = ESMM_HALF_COLS,
      .section_count = ESMM_FILE_SECTIONS,
      .format = (uint32_t)w->format,
      .block_rows = (uint32_t)w->bsr.block_rows,
      .block_cols = (uint32_t)w->bsr.block_cols,
      .n_of = (uint32_t)w->nm.keep,
      .m_of = (uint32_t)w->nm.group,
      .nm_cols = (uint32_t)w->nm.group_cols,
      .blocks = w->bsr.blocks,
  };
  memcpy(h.magic, ESMM_FILE_MAGIC, sizeof h.magic);
  h.section[ESMM_FILE_PANELS].bytes = w->panel_bytes;
  if (!lay_out(&h))
    return fail_file(f, ESMM_ERR_OVERFLOW, "%lld x %lld weights are too large for a file", (long long)w->k,
                     (long long)w->n);
  for (int i = 0; i < ESMM_FILE_SECTIONS; i++) {
    const unsigned char *data = section_data(w, i);
    esmm_checksum sum;
    esmm_checksum_begin(&sum);
    for (uint64_t done = 0; done < h.section[i].bytes;) {
      const size_t part = h.section[i].bytes - done < CHUNK ? (size_t)(h.section[i].bytes - done) : CHUNK;
      esmm_checksum_add(&sum, data + done, part);
      const esmm_status status = write_at(f, h.section[i].offset + done, data + done, part);
      if (status != ESMM_OK)
        return status;
      done += part;
    }
    h.section[i].checksum = esmm_checksum_end(&sum);
  }
  h.checksum = header_checksum(&h);
  return write_at(f, 0, &h, sizeof h);
}

static int sync_file(int fd)
{
  int result;
  do
    result = fsync(fd);
  while (result != 0 && errno == EINTR);
  return result;
}

/* A directory entry survives a power cut only after this. Where it fails the entry is the old or the new one: whole. */
static void sync_directory(const char *directory)
{
  const int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    return;
  (void)sync_file(fd);
  (void)close(fd);
}

/* Where a file without a name is found, to give it one. */
static const char *nameless_path(int fd, char path[32])
{
  (void)snprintf(path, 32, "/proc/self/fd/%d", fd);
  return path;
}

/* A file without a name in that directory, which ends with the process however that ends; -1 where there are none. */
static int open_nameless(const char *directory, mode_t mode)
{
  char path[32];
  const int fd = open(directory, O_WRONLY | O_TMPFILE | O_CLOEXEC, mode);
  if (fd < 0 || access(nameless_path(fd, path), F_OK) == 0)
    return fd;
  (void)close(fd);
  return -1;
}

/* Gives the nameless file a name in the directory that temp names, or, where that is -1, makes a new one; not mkstemp,
   whose files only their owner may read. The file, or -1. */
static int name_temp(char *temp, size_t directory_length, int nameless, mode_t mode)
{
  int fd = -1;
  for (unsigned attempt = 0; attempt < 100; attempt++) {
    struct timespec now;
    char path[32];
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t seed[4] = {(uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)getpid(),
                              (uint64_t)(uintptr_t)temp ^ attempt};
    (void)snprintf(temp + directory_length, TEMP_BYTES, ".esmm-%016llx.tmp",
                   (unsigned long long)esmm_checksum_of(seed, sizeof seed));
    if (nameless < 0)
      fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    else if (linkat(AT_FDCWD, nameless_path(nameless, path), AT_FDCWD, temp, AT_SYMLINK_FOLLOW) == 0)
      fd = nameless;
    if (fd >= 0 || (errno != EEXIST && errno != EINTR))
      break;
  }
  if (fd < 0)
    temp[directory_length] = '\0';
  return fd;
}

/* Where the weights go: path, or what it links to, so that a link stays one. Devices and directories stay too. */
static esmm_status find_target(const file *f, char target[PATH_BYTES], mode_t *mode)
{
  struct stat st;
  *mode = 0666;
  if (strlen(f->name) >= PATH_BYTES)
    return fail_file(f, ESMM_ERR_IO, "cannot write: %s", strerror(ENAMETOOLONG));
  memcpy(target, f->name, strlen(f->name) + 1);
  if (lstat(f->name, &st) != 0) /* whatever the reason, making the temporary file meets it again */
    return ESMM_OK;
  if (S_ISLNK(st.st_mode) && (!realpath(f->name, target) || stat(target, &st) != 0))
    return fail_file(f, ESMM_ERR_IO, "cannot follow the link: %s", strerror(errno));
  if (!S_ISREG(st.st_mode))
    return fail_file(f, ESMM_ERR_IO, S_ISDIR(st.st_mode) ? "is a directory" : "is not a regular file");
  *mode = st.st_mode & 0777; /* weights that were private stay so */
  return ESMM_OK;
}

static esmm_status save(esmm_ctx *ctx, const esmm_weights *weights, const char *path)
{
  file f = {.ctx = ctx, .name = path, .fd = -1};
  char target[PATH_BYTES], temp[PATH_BYTES + TEMP_BYTES];
  mode_t mode;
  esmm_status status = find_target(&f, target, &mode);
  if (status != ESMM_OK)
    return status;

  const char *slash = strrchr(target, '/');
  const size_t directory_length = slash ? (size_t)(slash - target) + 1 : 0;
  memcpy(temp, target, directory_length);
  temp[directory_length] = '\0';
  f.fd = open_nameless(directory_length ? temp : ".", mode);
  const bool nameless = f.fd >= 0;
  if (!nameless)
    f.fd = name_temp(temp, directory_length, -1, mode);
  if (f.fd < 0)
    return fail_file(&f, ESMM_ERR_IO, "cannot make a file beside it: %s", strerror(errno));
  status = write_weights(&f, weights);
  if (status == ESMM_OK && sync_file(f.fd) != 0)
    status = fail_file(&f, ESMM_ERR_IO, "cannot write: %s", strerror(errno));
  if (status == ESMM_OK && nameless && name_temp(temp, directory_length, f.fd, mode) < 0)
    status = fail_file(&f, ESMM_ERR_IO, "cannot make a file beside it: %s", strerror(errno));
  if (close(f.fd) != 0 && status == ESMM_OK)
    status = fail_file(&f, ESMM_ERR_IO, "cannot write: %s", strerror(errno));
  if (status == ESMM_OK && rename(temp, target) != 0)
    status = fail_file(&f, ESMM_ERR_IO, "cannot replace: %s", strerror(errno));
  if (status != ESMM_OK) {
    if (temp[directory_length])
      (void)unlink(temp);
    return status;
  }
  temp[directory_length] = '\0';
  sync_directory(directory_length ? temp : ".");
  return ESMM_OK;
}

esmm_status esmm_weights_save(esmm_ctx *ctx, const esmm_weights *weights, const char *path)
{
  if (!ctx)
    return ESMM_ERR_ARGUMENT;
  if (!weights)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "weights is NULL");
  if (!path || !*path)
    return esmm_fail(ctx, ESMM_ERR_ARGUMENT, "path is %s", path ? "empty" : "NULL");
  if (!weights->backend->weights_to_host)
    return save(ctx, weights, path);
  if (ctx->backend != weights->backend || ctx->ordinal != weights->ordinal)
    return esmm_fail(ctx, ESMM_ERR_DEVICE, "the weights lie on %s:%d, but this is a %s context: save them there",
                     weights->backend->name, weights->ordinal, esmm_ctx_kind(ctx));
  esmm_weights *host = NULL;
  esmm_status status = ctx->backend->weights_to_host(ctx, weights, &host);
  if (status == ESMM_OK)
    status = save(ctx, host, path);
  esmm_weights_free(host);
  return status;
}
