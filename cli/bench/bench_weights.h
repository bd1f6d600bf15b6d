/*
 * bench_weights.h: facts about weights from their files' names, for `esmm bench-weights`.
 */
#ifndef ESMM_CLI_BENCH_WEIGHTS_H
#define ESMM_CLI_BENCH_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct weights_labels {
  char layer[512];
  char pruner[32];      /* "" where nothing says it, as for the next */
  char permutation[32]; /* "row_perm" */
  double group_size;    /* NAN where nothing says it, as for the next */
  double sparsity;      /* 0 to 1 */
} weights_labels;

/*
 * Reads path parts such as wanda, grp_8, row_perm, sparsity_0.5; a file's own name may have them too. The layer is
 * the rest of the path behind `prefix` bytes, without the ending; in a file of many tensors, the tensor's name.
 */
void weights_labels_read(const char *path, size_t prefix, const char *tensor, weights_labels *labels);

/* Are the two files A and B of one product: in one directory, with names that differ in a_/b_, activations/weights,
   input/weight or x/w only? Shapes in the names of raw files do not count. */
bool weights_are_pair(const char *a, const char *b);

#endif
