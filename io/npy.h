/*
 * npy.h: matrices in files, for the command and for bindings; not part of the core library.
 *
 * Readers trust nothing: every length is checked against the bytes that are there before it is used, so that a damaged
 * or hostile file costs an error text and no more. Texts name the file, the field, the value and, if there is one, the
 * remedy. All functions return 0, or -1 with the text in error (cut to error_size); *out is then all zero.
 */
#ifndef ESMM_IO_NPY_H
#define ESMM_IO_NPY_H

#include "esmm.h"

#define IO_ERROR_BYTES 512 /* room that every text fits in, but for very long paths */

/* A matrix that owns its memory. memory is never NULL after success, not even for an empty matrix. */
typedef struct io_matrix {
  esmm_matrix m;
  void *memory;
  size_t bytes;
} io_matrix;

/*
 * NumPy's .npy, versions 1.0, 2.0 and 3.0: float32, float16 and float64 of either byte order, one or two dimensions.
 * One dimension becomes 1 x n. float16 stays ESMM_F16; float64 becomes float32, and is refused where a finite value
 * would become Inf. Fortran order becomes ESMM_COL_MAJOR.
 */
int io_npy_read(const char *path, io_matrix *out, char *error, size_t error_size);

/* The same from memory; name stands for the path in error texts. bytes may be freed afterwards. */
int io_npy_parse(const unsigned char *bytes, size_t size, const char *name, io_matrix *out, char *error,
                 size_t error_size);

/* Raw little-endian float32, row-major, without a header: the file must be rows * cols * 4 bytes exactly. */
int io_raw_read(const char *path, int64_t rows, int64_t cols, io_matrix *out, char *error, size_t error_size);

/*
 * .npy where the file starts like one, else raw. rows = cols = 0 says that the shape is not known: a .npy brings its
 * own, a raw file is refused. Otherwise the shape must be rows x cols in both cases.
 */
int io_matrix_read(const char *path, int64_t rows, int64_t cols, io_matrix *out, char *error, size_t error_size);

/*
 * Writes .npy version 1.0, float32 or float16 (bf16, which NumPy does not have, is widened to float32), in the matrix's
 * own order. Goes to a temporary file beside path that then takes its name: after a failure path holds what it held.
 */
int io_npy_write(const char *path, const esmm_matrix *m, char *error, size_t error_size);

esmm_dtype io_npy_dtype(esmm_dtype dtype); /* what io_npy_write makes of it */

void io_matrix_free(io_matrix *matrix); /* NULL is fine; leaves it all zero */

#endif
