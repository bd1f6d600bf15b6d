/*
 * pickle.h: what torch.save's pickle of tensors says, read as data.
 *
 * A pickle is a program for a stack machine that can call anything. This machine calls nothing: it has the opcodes of
 * dictionaries, lists and tuples of numbers, strings and tensors, and a list of the names that such a file may use,
 * each of which it turns into a description. Every other opcode and every other name is refused, and the error says
 * which. Time and memory are bounded by the length of the pickle.
 */
#ifndef ESMM_IO_PICKLE_H
#define ESMM_IO_PICKLE_H

#include "file.h"
#include "tensors.h"

#include <stdint.h>

typedef enum pickle_kind {
  PICKLE_NONE,
  PICKLE_BOOL,
  PICKLE_INT,
  PICKLE_FLOAT,
  PICKLE_STRING,
  PICKLE_TUPLE,
  PICKLE_LIST,
  PICKLE_DICT,   /* items: key, value, key, value, ... */
  PICKLE_GLOBAL, /* a name of Python's that may be used */
  PICKLE_STORAGE,
  PICKLE_TENSOR
} pickle_kind;

typedef struct pickle_value pickle_value;

/* Elements of one dtype in an entry of the archive. */
typedef struct pickle_storage {
  io_dtype dtype; /* IO_DTYPES: bytes without one (UntypedStorage); the tensor says it */
  const pickle_value *key;
  int64_t elements;
} pickle_storage;

typedef struct pickle_tensor {
  const pickle_storage *storage;
  io_dtype dtype;
  int64_t offset; /* of its first element in the storage, in elements */
  int dims;
  int64_t shape[IO_TENSOR_DIMS], stride[IO_TENSOR_DIMS];
} pickle_tensor;

typedef struct pickle_items {
  pickle_value **items;
  size_t count, room;
} pickle_items;

struct pickle_value {
  pickle_kind kind;
  bool visited; /* for a function that walks the values */
  union {
    int64_t integer; /* BOOL, INT */
    double number;
    struct {
      const char *text; /* in the pickle: not ended by a zero */
      size_t length;
    } string;
    pickle_items list; /* TUPLE, LIST, DICT */
    int global;
    pickle_storage storage;
    pickle_tensor *tensor;
  } as;
};

typedef struct pickle pickle;

/* *root is what the pickle makes; it and the strings' bytes live as long as the pickle and the bytes given. */
int pickle_read(const unsigned char *bytes, size_t size, pickle **out, pickle_value **root, const io_error *error);
void pickle_free(pickle *pickle); /* NULL is fine */

#endif
