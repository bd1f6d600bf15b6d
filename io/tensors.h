/*
 * tensors.h: the named tensors of a file, whatever its format: safetensors, PyTorch's .pt, .npy, raw float32. For the
 * command and for bindings; not part of the core library.
 *
 * Opening a file reads its header and checks all of it: names, dtypes, shapes and where every byte lies. Values are
 * looked at only when a tensor is loaded. Regular files are mapped, so that a large model costs address space and not
 * memory; a file that another program cuts short meanwhile ends the process with SIGBUS, as with every mapped file.
 *
 * Errors as in npy.h: 0, or -1 with a text that names the file, the tensor and the value.
 */
#ifndef ESMM_IO_TENSORS_H
#define ESMM_IO_TENSORS_H

#include "esmm.h"

#include <stdbool.h>
#include <stddef.h>

#define IO_TENSOR_DIMS 8 /* most dimensions that a tensor may have */

/* The first three can be matrices; the others are listed, and that is all. */
typedef enum io_dtype {
  IO_F32,
  IO_BF16,
  IO_F16,
  IO_F64,
  IO_F8_E4M3,
  IO_F8_E5M2,
  IO_F8_E8M0,
  IO_F6_E2M3,
  IO_F6_E3M2,
  IO_F4,
  IO_I64,
  IO_I32,
  IO_I16,
  IO_I8,
  IO_U64,
  IO_U32,
  IO_U16,
  IO_U8,
  IO_BOOL,
  IO_C64,
  IO_C128,
  IO_DTYPES /* how many there are */
} io_dtype;

const char *io_dtype_str(io_dtype dtype);            /* "F32", as safetensors calls it */
unsigned io_dtype_bits(io_dtype dtype);              /* of an element */
io_dtype io_dtype_find(const char *name);            /* IO_DTYPES: there is none of that name */
bool io_dtype_esmm(io_dtype dtype, esmm_dtype *out); /* false: the library does not have it; names are the same */

typedef struct io_tensor {
  const char *name;
  io_dtype dtype;
  int dims;
  int64_t shape[IO_TENSOR_DIMS];
  int64_t stride[IO_TENSOR_DIMS]; /* in elements */
  size_t bytes;                   /* of the elements it has */
  const void *data;               /* its first element, aligned to its dtype; NULL while it is not loaded */
} io_tensor;

typedef struct io_tensors {
  const char *kind; /* "safetensors", "pt", "npy", "raw" */
  char *path;
  io_tensor *list; /* in the order of the file */
  size_t count;
  const unsigned char *bytes; /* the file, mapped */
  size_t size;
  size_t data_at; /* safetensors: where the tensors' bytes begin */
  bool as_mapped; /* for the caller to set: data that is not aligned to its elements is not copied */

  struct io_format *format; /* private: how the format loads */
} io_tensors;

/*
 * Opens a file of any of the formats, recognised by its first bytes. rows and cols are the shape of a raw float32 file;
 * both 0: not known, a raw file is refused. *out is NULL after a failure.
 */
int io_tensors_open(const char *path, int64_t rows, int64_t cols, io_tensors **out, char *error, size_t error_size);
void io_tensors_close(io_tensors *tensors); /* NULL is fine */

/* Is a regular file safetensors or .pt, by its first bytes or by the ending of its name? */
bool io_is_model(const char *path);

/* io_tensors_open from memory that outlives *out, for one format; name stands for the path. */
int io_safetensors_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                         size_t error_size);
int io_pt_parse(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, char *error,
                size_t error_size);

/* "" where this build can read the format, else what is missing and how to get it. */
const char *io_safetensors_missing(void);
const char *io_pt_missing(void);

/* Makes list[index].data point to the elements; a tensor that is loaded stays as it is. */
int io_tensor_load(io_tensors *tensors, size_t index, char *error, size_t error_size);
/* Gives back the memory of a loaded tensor, also the pages of a mapped one. */
void io_tensor_unload(io_tensors *tensors, size_t index);

/* NULL, or why the tensor is no matrix: not two dimensions, another dtype, strides that skip. */
const char *io_tensor_refusal(const io_tensor *tensor);
/*
 * Loads a tensor of two dimensions as a matrix, for reading only: it points into the tensor's own data, so it must not
 * be written to, and lives until the tensor is unloaded. Row-major, or column-major where the strides say so.
 */
int io_tensor_matrix(io_tensors *tensors, size_t index, esmm_matrix *out, char *error, size_t error_size);

/* The index of a name, or -1. */
int64_t io_tensors_find(const io_tensors *tensors, const char *name);

/*
 * Writes a copy of a safetensors file to path: the header byte for byte, and of each tensor its bytes in the file, or
 * those that `replace` gives for it (as many). replace is called once for each tensor in file order and returns 0, with
 * *bytes left NULL for a tensor that stays; any other value ends the copy and is returned. Goes to a temporary
 * file beside path that then takes its name.
 */
int io_safetensors_copy(const io_tensors *tensors, const char *path,
                        int (*replace)(void *user, size_t index, const void **bytes), void *user, char *error,
                        size_t error_size);

#endif
