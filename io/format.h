/*
 * format.h: what the readers of tensors.h share among themselves.
 */
#ifndef ESMM_IO_FORMAT_H
#define ESMM_IO_FORMAT_H

#include "file.h"
#include "tensors.h"

/* How the tensors of one file are loaded. */
typedef struct io_format {
  bool mapped;   /* tensors->bytes is a mapping of ours */
  size_t *at;    /* [count]: where a tensor's bytes lie in the file; NULL where `read` always makes a copy */
  void **copies; /* [count]: memory of a loaded tensor that could not stay where it is, else NULL */
  /* Reads a tensor into memory from io_alloc: *copy is that memory, *data its first element in it. NULL: the bytes at
     `at` are the elements, and a copy is made only where they are not aligned. */
  int (*read)(io_tensors *tensors, size_t index, void **copy, const void **data, const io_error *error);
  void (*free_state)(void *state);
  void *state;
} io_format;

/* A list of `count` zeroed tensors over bytes that outlive it; NULL: no memory, and error says so. */
io_tensors *io_tensors_new(const char *kind, const unsigned char *bytes, size_t size, size_t count,
                           const io_error *error);

/* Takes a copy of a name for list[index], if it is one: UTF-8, not empty, without control characters. */
int io_tensor_set_name(io_tensor *tensor, const char *name, size_t length, const io_error *error);

/* Counts elements and bytes of shape; false: more than fits in memory, negative, or not whole bytes. */
bool io_tensor_count(const io_tensor *tensor, size_t *elements, size_t *bytes);
void io_tensor_set_strides(io_tensor *tensor); /* row-major and tight, of shape */

/* Fails where two tensors have one name. */
int io_tensors_check_names(const io_tensors *tensors, const io_error *error);

/* A file from outside is little-endian; so must this machine be. */
int io_check_byte_order(const io_error *error);

/* Do these first bytes look like a safetensors file's? */
bool io_looks_like_safetensors(const unsigned char *bytes, size_t size);

/* A mapped .npy or raw file; fills in one tensor of the given name. */
int io_npy_tensors(const unsigned char *bytes, size_t size, const char *name, io_tensors **out, const io_error *error);
int io_raw_tensors(const unsigned char *bytes, size_t size, int64_t rows, int64_t cols, const char *name,
                   io_tensors **out, const io_error *error);

#endif
