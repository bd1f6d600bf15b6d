/*
 * index.h: the index of a model in several files ("model.safetensors.index.json"): which tensor is in which of them.
 */
#ifndef ESMM_IO_INDEX_H
#define ESMM_IO_INDEX_H

#include <stdbool.h>
#include <stddef.h>

typedef struct io_index {
  char **names, **files; /* [count]: a tensor's name, and the file that it is in, beside the index */
  size_t count;
} io_index;

bool io_is_index(const char *path); /* by the ending of its name: .index.json */
/* 0, or -1 with an error text. io_index_free() is fine after both. */
int io_index_read(const char *path, io_index *index, char *error, size_t error_size);
const char *io_index_find(const io_index *index, const char *name); /* the file; NULL: there is no such tensor */
void io_index_free(io_index *index);

#endif
